//! Results of runs with several caches: as a table, as JSON, and as a plot of the hit ratio.

use std::path::Path;

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{Cell, CellAlignment, Table};
use serde_json::Value;
use spindle_target_disk::{CacheCounts, CacheSpec};

use super::plot::{self, PlotError, TickAxis};
use super::table::{format_latency, group_thousands};
use super::{BenchResult, json};
use crate::size::Bytes;

/// Result of a run with one cache.
pub struct CacheRun {
    size: Bytes,
    policy: &'static str,
    /// Hit ratio in per cent, warm-up included; pages that pass around the cache count as misses.
    hit_percent: f64,
    result: BenchResult,
}

impl CacheRun {
    /// Combines a run's cache, result and `counts`, which are those of the cache after the run.
    pub fn new(spec: &CacheSpec, counts: &CacheCounts, result: BenchResult) -> CacheRun {
        let pages = counts.hits + counts.misses + counts.passed + counts.over_budget;
        let hit_percent = counts.hits as f64 * 100.0 / pages.max(1) as f64;
        CacheRun { size: Bytes::new(spec.bytes), policy: spec.policy.name(), hit_percent, result }
    }
}

/// Renders a table with one row for each run.
pub fn table(runs: &[CacheRun]) -> String {
    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED);
    let right = |text: String| Cell::new(text).set_alignment(CellAlignment::Right);
    table.set_header(["cache", "policy", "found %", "IOPS", "p50 us"].map(|head| right(head.to_owned())));
    for CacheRun { size, policy, hit_percent, result } in runs {
        let median = format_latency(result.latency.percentile_us(50.0));
        let cells = [size.to_string(), (*policy).to_owned(), format!("{hit_percent:.1}")];
        table.add_row(cells.into_iter().chain([group_thousands(result.iops()), median]).map(right));
    }
    table.to_string()
}

/// Returns an array of the objects of [`json::render`], each with `cache` in bytes, `policy` and
/// `found_percent`.
pub fn json(runs: &[CacheRun]) -> serde_json::Result<Value> {
    let objects = runs.iter().map(|CacheRun { size, policy, hit_percent, result }| {
        let mut object = json::render(result)?;
        object["cache"] = serde_json::to_value(size)?;
        object["policy"] = (*policy).into();
        object["found_percent"] = json::rounded(*hit_percent, 2);
        Ok(object)
    });
    objects.collect::<serde_json::Result<Vec<Value>>>().map(Value::Array)
}

/// Plots the hit ratio over the cache size, a curve for each policy, and writes the SVG to the file `path`.
pub fn write(path: &Path, runs: &[CacheRun]) -> Result<(), PlotError> {
    plot::save(path, &render(runs)?)
}

/// Draws that plot as SVG; [`PlotError::Empty`] without a run.
fn render(runs: &[CacheRun]) -> Result<String, PlotError> {
    let sizes = || runs.iter().map(|run| run.size.get());
    let (Some(first), Some(least), Some(most)) = (runs.first(), sizes().min(), sizes().max()) else {
        return Err(PlotError::Empty);
    };
    let mut curves: Vec<plot::Curve> = Vec::new();
    for run in runs {
        let point = (run.size.get() as f64, run.hit_percent);
        match curves.iter_mut().find(|(name, _)| name == run.policy) {
            Some((_, points)) => points.push(point),
            None => curves.push((run.policy.to_owned(), vec![point])),
        }
    }
    let run = &first.result.run;
    let of = run.span.map(|span| format!(", in front of {span}")).unwrap_or_default();
    let size = (TickAxis::sizes(least, most), format!("size of the cache{of}"));
    plot::draw(&run.summary(), size, (TickAxis::percent(), "found, %".to_owned()), &curves, 3)
}

#[cfg(test)]
mod tests {
    use spindle_reactor::mem::Pages;
    use spindle_target_disk::PolicyKind;

    use super::super::example_result;
    use super::*;

    fn runs(sizes: &[u64]) -> Vec<CacheRun> {
        let kinds = sizes.iter().flat_map(|size| [(*size, PolicyKind::S3Fifo), (*size, PolicyKind::Lru)]);
        let run = |(size, policy)| {
            let counts = CacheCounts { hits: 30, misses: 60, passed: 10, ..CacheCounts::default() };
            CacheRun::new(&CacheSpec::new(size, policy, Pages::Base), &counts, example_result())
        };
        kinds.map(run).collect()
    }

    #[test]
    fn a_plot_has_its_title_axes_and_a_line_for_each_policy() {
        let svg = render(&runs(&[8 << 20, 12 << 20, 64 << 20])).expect("draws");
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{svg}");
        let parts = ["randread 4 KiB", "size of the cache", "found, %", "8 MiB", "64 MiB", "s3-fifo", "lru"];
        for part in parts {
            assert!(svg.contains(part), "{part} in\n{svg}");
        }
        assert_eq!(svg.matches("<circle").count(), 6, "a dot for each run");
    }

    #[test]
    fn one_size_is_enough_for_a_plot_and_none_is_an_error() {
        assert!(render(&runs(&[1 << 20])).is_ok());
        assert!(matches!(render(&[]), Err(PlotError::Empty)));
    }

    #[test]
    fn table_and_json_say_what_was_found() {
        let text = table(&runs(&[8 << 20]));
        for part in ["found %", "8 MiB", "s3-fifo", "30.0", "1 000", "500"] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
        let array = json(&runs(&[8 << 20])).expect("renders");
        let object = &array[1];
        assert_eq!((&object["policy"], &object["cache"]), (&"lru".into(), &(8 << 20).into()));
        assert_eq!((&object["found_percent"], &object["iops"]), (&30.0.into(), &1000.0.into()));
    }
}
