//! What caches of several sizes and policies found of the same load: as a table, as JSON, as a plot.

use std::path::Path;

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{Cell, CellAlignment, Table};
use serde_json::Value;
use spindle_disk::{CacheCounts, CacheSpec};

use super::plot::{self, PlotError, TickAxis};
use super::table::{figures, grouped};
use super::{BenchResult, json};
use spindle_console::size::Bytes;

/// A run with one cache.
pub struct SizeRun {
    size: Bytes,
    policy: &'static str,
    /// The share of pages that were found, in per cent.
    found: f64,
    result: BenchResult,
}

impl SizeRun {
    /// With a cache of this `spec`, which counted so much.
    pub fn new(spec: &CacheSpec, counts: &CacheCounts, result: BenchResult) -> SizeRun {
        let pages = counts.hits + counts.misses + counts.passed;
        let found = counts.hits as f64 * 100.0 / pages.max(1) as f64;
        SizeRun { size: Bytes::new(spec.bytes), policy: spec.policy.name(), found, result }
    }
}

/// One row a run.
pub fn table(runs: &[SizeRun]) -> String {
    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED);
    let right = |text: String| Cell::new(text).set_alignment(CellAlignment::Right);
    table.set_header(["cache", "policy", "found %", "IOPS", "p50 us"].map(|head| right(head.to_owned())));
    for SizeRun { size, policy, found, result } in runs {
        let median = figures(result.latency.percentile_us(50.0));
        let cells = [size.to_string(), (*policy).to_owned(), format!("{found:.1}")];
        table.add_row(cells.into_iter().chain([grouped(result.iops()), median]).map(right));
    }
    table.to_string()
}

/// An array of what [`json::render`] gives, each with `cache` in bytes, `policy` and `found_percent`.
///
/// # Errors
/// Those of [`json::render`].
pub fn json(runs: &[SizeRun]) -> serde_json::Result<Value> {
    let objects = runs.iter().map(|SizeRun { size, policy, found, result }| {
        let mut object = json::render(result)?;
        object["cache"] = serde_json::to_value(size)?;
        object["policy"] = (*policy).into();
        object["found_percent"] = json::rounded(*found, 2);
        Ok(object)
    });
    objects.collect::<serde_json::Result<Vec<Value>>>().map(Value::Array)
}

/// Draw what was found over the size into the file `path`, a line for each policy.
///
/// # Errors
/// [`PlotError`], naming the file where that is the reason.
pub fn write(path: &Path, runs: &[SizeRun]) -> Result<(), PlotError> {
    plot::save(path, &render(runs)?)
}

/// [`PlotError::Empty`] of no run.
fn render(runs: &[SizeRun]) -> Result<String, PlotError> {
    let sizes = || runs.iter().map(|run| run.size.get());
    let (Some(first), Some(least), Some(most)) = (runs.first(), sizes().min(), sizes().max()) else {
        return Err(PlotError::Empty);
    };
    let mut curves: Vec<plot::Curve> = Vec::new();
    for run in runs {
        let point = (run.size.get() as f64, run.found);
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
    use spindle_disk::PolicyKind;
    use spindle_reactor::mem::Pages;

    use super::super::example_result;
    use super::*;

    fn runs(sizes: &[u64]) -> Vec<SizeRun> {
        let kinds = sizes.iter().flat_map(|size| [(*size, PolicyKind::S3Fifo), (*size, PolicyKind::Lru)]);
        let run = |(size, policy)| {
            let counts = CacheCounts { hits: 30, misses: 60, passed: 10, ..CacheCounts::default() };
            SizeRun::new(&CacheSpec::new(size, policy, Pages::Base), &counts, example_result())
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
