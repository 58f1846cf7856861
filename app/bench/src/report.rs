//! Results of a benchmark, and their output as text, JSON and plots.
//!
//! A run fills a [`BenchResult`]: its settings, the number of commands, the measured time and a histogram of
//! the latencies. [`table`] and [`plot`] render the result for people, [`json`] for programs. [`Progress`]
//! draws a bar during the run.
//!
//! ```text
//!   bench, spindle-limit, bench disk ── BenchResult ──┬── table::render   text
//!     └─ Progress (live, not bench disk)              ├── json::render    one object
//!                                                     ├── plot::render    SVG
//!   bench disk with several caches ───────────────────┴── sizes           the same, by cache size
//! ```
//!
//! Latencies have three significant figures, from 1 ns to [`LATENCY_MAX`]; longer ones count as that.

pub mod json;
pub mod plot;
mod progress;
pub mod sizes;
pub mod table;

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;

use crate::access::Access;
use crate::size::Bytes;

pub use progress::{PROGRESS_PERIOD, Progress};

/// Upper bound of the histogram; longer latencies count as this value.
pub const LATENCY_MAX: Duration = Duration::from_secs(100);

/// Reported percentiles: (percentile, key in JSON, column head in tables).
pub const PERCENTILES: [(f64, &str, &str); 4] =
    [(50.0, "p50", "p50"), (99.0, "p99", "p99"), (99.9, "p99_9", "p99.9"), (99.99, "p99_99", "p99.99")];

/// Histogram of command latencies in nanoseconds.
#[derive(Debug, Clone)]
pub struct Latencies(Histogram<u64>);

impl Default for Latencies {
    fn default() -> Latencies {
        Latencies::new()
    }
}

impl Latencies {
    /// Creates an empty histogram. Allocates all its memory, about 230 KiB.
    #[must_use]
    pub fn new() -> Latencies {
        let highest = u64::try_from(LATENCY_MAX.as_nanos()).expect("a constant that fits");
        Latencies(Histogram::new_with_bounds(1, highest, 3).expect("constant bounds are valid"))
    }

    /// Records `commands` commands with a latency of `nanoseconds` each.
    #[inline]
    pub fn record(&mut self, nanoseconds: u64, commands: u64) {
        self.0.saturating_record_n(nanoseconds, commands);
    }

    /// Adds all latencies of `other`.
    pub fn add(&mut self, other: &Latencies) {
        self.0.add(&other.0).expect("both have the same bounds");
    }

    /// Removes all latencies, at the end of the warm-up.
    pub fn clear(&mut self) {
        self.0.reset();
    }

    /// Returns the number of recorded commands.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.0.len()
    }

    /// Returns the mean in microseconds; 0 if empty.
    #[must_use]
    pub fn mean_us(&self) -> f64 {
        self.0.mean() / 1e3
    }

    /// Returns the latency in microseconds at `percentile` (0 ..= 100); 0 if empty.
    #[must_use]
    pub fn percentile_us(&self, percentile: f64) -> f64 {
        microseconds(self.0.value_at_percentile(percentile))
    }

    /// Returns the maximum in microseconds; 0 if empty.
    #[must_use]
    pub fn max_us(&self) -> f64 {
        microseconds(self.0.max())
    }
}

/// Returns the median; of an even number, the mean of the two in the middle; 0 if there is none.
#[must_use]
pub fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    if values.is_empty() {
        return 0.0;
    }
    (values[(values.len() - 1) / 2] + values[values.len() / 2]) / 2.0
}

fn microseconds(nanoseconds: u64) -> f64 {
    Duration::from_nanos(nanoseconds).as_secs_f64() * 1e6
}

/// Settings of a run, as reported. The JSON has no key for a setting that is `None`.
#[derive(Debug, Clone, Serialize)]
pub struct Run {
    /// Subcommand, such as `spindle-limit`.
    pub tool: &'static str,
    /// Address of the target, or the `DISK` argument; `None` for `spindle-limit`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// Subsystem of the target; `None` except for `bench ADDRESS`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nqn: Option<String>,
    /// Access pattern.
    pub rw: Access,
    /// Share of reads in per cent, for `randrw`; `None` for other access patterns.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mix: Option<u8>,
    /// Exponent of Zipf's law; `None` for other distributions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub zipf: Option<f64>,
    /// Bytes of a command's data.
    pub bs: Bytes,
    /// Commands in flight, over all queues or connections.
    pub qd: usize,
    /// I/O queues or connections among which the depth is divided; 1 in `bench disk`.
    pub queues: usize,
    /// Size of the range of addresses that the commands use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub span: Option<Bytes>,
    /// Requested measured time, without the warm-up.
    pub seconds: f64,
    /// Cores of pinned threads. `spindle-limit`: the server's and the requester's. Otherwise the measuring
    /// thread's, empty if `--core` does not pin it.
    pub cores: Vec<usize>,
    /// `true` with `--verify`, else `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verify: Option<bool>,
    /// TCP congestion control of `spindle-limit`; `None`: the system's default, or another subcommand.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub congestion: Option<String>,
}

/// Settings and results of a run.
#[derive(Debug, Clone)]
pub struct BenchResult {
    /// Settings of the run.
    pub run: Run,
    /// Measured time, to which the rates refer.
    pub elapsed: Duration,
    /// Commands that succeeded in the measured time.
    pub operations: u64,
    /// Commands that failed, or whose data was wrong, in all stages of the run.
    pub errors: u64,
    /// Latencies of the commands counted in `operations`.
    pub latency: Latencies,
    /// Round trip in nanoseconds of a cache line between the two cores of `spindle-limit`: the longer of one
    /// measurement before and one after the run. It shows how a hypervisor has placed the virtual cores.
    pub line_round_trip_ns: Option<f64>,
    /// Processor time of the polling threads over their elapsed time; `None` for `bench disk`. Below 0.97
    /// other threads used their cores, and the text output reports the result as disturbed.
    pub cpu_share: Option<f64>,
}

impl BenchResult {
    /// Returns the commands per second.
    #[must_use]
    pub fn iops(&self) -> f64 {
        per_second(self.operations, self.elapsed)
    }

    /// Returns the megabytes (10^6 bytes) of payload per second.
    #[must_use]
    pub fn mb_per_s(&self) -> f64 {
        per_second(self.operations.saturating_mul(self.run.bs.get()), self.elapsed) / 1e6
    }
}

/// Returns `count` per second of `elapsed`; 0 if `elapsed` is zero.
#[must_use]
pub fn per_second(count: u64, elapsed: Duration) -> f64 {
    if elapsed.is_zero() { 0.0 } else { count as f64 / elapsed.as_secs_f64() }
}

impl Run {
    /// Returns the title of a table or plot, such as `spindle-limit: randread 4 KiB, depth 32 over 4 queues`.
    #[must_use]
    pub fn summary(&self) -> String {
        let mut text = format!("{}: {}", self.tool, self.rw);
        if let Some(mix) = self.mix {
            text.push_str(&format!(" {mix}/{}", 100 - mix.min(100)));
        }
        text.push_str(&format!(" {}, depth {}", self.bs, self.qd));
        if self.queues > 1 {
            text.push_str(&format!(" over {} queues", self.queues));
        }
        if let Some(exponent) = self.zipf {
            text.push_str(&format!(", Zipf {exponent}"));
        }
        text
    }
}

/// 1000 commands of 4 KiB in a second, with latencies of 1, 2, .. 1000 us.
#[cfg(test)]
pub(crate) fn example_result() -> BenchResult {
    let mut latency = Latencies::new();
    for microseconds in 1..=1000 {
        latency.record(microseconds * 1000, 1);
    }
    BenchResult {
        run: Run {
            tool: "bench",
            address: Some("127.0.0.1:4420".to_owned()),
            nqn: None,
            rw: Access::RandRead,
            mix: None,
            zipf: None,
            bs: Bytes::new(4096),
            qd: 32,
            queues: 1,
            span: None,
            seconds: 1.0,
            cores: vec![1],
            verify: None,
            congestion: None,
        },
        elapsed: Duration::from_secs(1),
        operations: 1000,
        errors: 0,
        latency,
        line_round_trip_ns: None,
        cpu_share: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_over_the_measured_time() {
        let mut result = example_result();
        result.elapsed = Duration::from_millis(500);
        assert!((result.iops() - 2000.0).abs() < 1e-9);
        assert!((result.mb_per_s() - 8.192).abs() < 1e-9);
        result.elapsed = Duration::ZERO;
        assert!(result.iops() == 0.0 && result.mb_per_s() == 0.0);
    }

    #[test]
    fn percentiles_have_three_figures() {
        let latency = example_result().latency;
        assert_eq!(latency.count(), 1000);
        for (percentile, expected) in [(50.0, 500.0), (99.0, 990.0), (99.9, 999.0), (100.0, 1000.0)] {
            let found = latency.percentile_us(percentile);
            assert!((found / expected - 1.0).abs() < 2e-3, "{percentile}: {found}");
        }
        assert!((latency.mean_us() - 500.5).abs() < 0.5);
    }

    #[test]
    fn histograms_clear_and_saturate() {
        let mut latency = example_result().latency;
        latency.clear();
        assert_eq!((latency.count(), latency.max_us()), (0, 0.0));
        latency.record(u64::MAX, 3);
        latency.record(0, 1);
        assert_eq!(latency.count(), 4);
        assert!(latency.max_us() >= LATENCY_MAX.as_secs_f64() * 1e6);
    }

    #[test]
    fn a_summary_names_what_matters() {
        let mut run = example_result().run;
        assert_eq!(run.summary(), "bench: randread 4 KiB, depth 32");
        (run.rw, run.mix, run.queues) = (Access::RandRw, Some(70), 4);
        assert_eq!(run.summary(), "bench: randrw 70/30 4 KiB, depth 32 over 4 queues");
    }
}
