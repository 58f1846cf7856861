//! What a benchmark found, and the ways to show it.
//!
//! A run fills a [`BenchResult`]: what was run, how many commands ended in which time, and the histogram of
//! their latencies. From there it goes to people ([`table`], [`plot`]), to programs ([`json`]), and while it
//! runs to the terminal ([`Progress`]).
//!
//! ```text
//!   bench, bench limit ── BenchResult ──┬── table::render   text
//!          └─ Progress (live)           ├── json::render    one object
//!                                       ├── plot::render    SVG, several series
//!   bench disk with several caches ─────┴── sizes           the same, over the size of the cache
//! ```
//!
//! What it does not do: it measures nothing.
//!
//! Limits: latencies are kept with three significant figures, from 1 ns to [`LATENCY_MAX`]; longer ones count
//! as that.

pub mod json;
pub mod plot;
mod progress;
pub mod sizes;
pub mod table;

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;

use crate::access::Access;
use spindle_console::size::Bytes;

pub use progress::{PROGRESS_PERIOD, Progress};

/// The longest latency that a histogram tells from longer ones.
pub const LATENCY_MAX: Duration = Duration::from_secs(100);

/// The percentiles of every report, with the keys they have in JSON and the heads they have in tables.
pub const PERCENTILES: [(f64, &str, &str); 4] =
    [(50.0, "p50", "p50"), (99.0, "p99", "p99"), (99.9, "p99_9", "p99.9"), (99.99, "p99_99", "p99.99")];

/// Latencies of commands in nanoseconds.
#[derive(Debug, Clone)]
pub struct Latencies(Histogram<u64>);

impl Default for Latencies {
    fn default() -> Latencies {
        Latencies::new()
    }
}

impl Latencies {
    /// An empty histogram; all its memory (about 230 KiB, of which a run touches a few lines) is taken here.
    ///
    /// # Panics
    /// Never: the bounds are constants that the histogram accepts.
    #[must_use]
    pub fn new() -> Latencies {
        let highest = u64::try_from(LATENCY_MAX.as_nanos()).expect("a constant that fits");
        Latencies(Histogram::new_with_bounds(1, highest, 3).expect("constant bounds are valid"))
    }

    /// Count `commands` commands that took `nanoseconds` each.
    #[inline]
    pub fn record(&mut self, nanoseconds: u64, commands: u64) {
        self.0.saturating_record_n(nanoseconds, commands);
    }

    /// Forget everything, for the end of a warm-up.
    pub fn clear(&mut self) {
        self.0.reset();
    }

    /// How many commands were counted.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.0.len()
    }

    /// The mean in microseconds; 0 of no commands.
    #[must_use]
    pub fn mean_us(&self) -> f64 {
        self.0.mean() / 1e3
    }

    /// The latency in microseconds that `percentile` (0 ..= 100) of the commands do not exceed; 0 of no
    /// commands.
    #[must_use]
    pub fn percentile_us(&self, percentile: f64) -> f64 {
        microseconds(self.0.value_at_percentile(percentile))
    }

    /// The longest in microseconds; 0 of no commands.
    #[must_use]
    pub fn max_us(&self) -> f64 {
        microseconds(self.0.max())
    }
}

fn microseconds(nanoseconds: u64) -> f64 {
    Duration::from_nanos(nanoseconds).as_secs_f64() * 1e6
}

/// What was run: every setting that a reader needs to run it again. What does not apply is left out of the
/// JSON.
#[derive(Debug, Clone, Serialize)]
pub struct Run {
    /// `bench` or `bench limit`.
    pub tool: &'static str,
    /// The address that was measured, if it was a target.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// The subsystem that was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nqn: Option<String>,
    /// Which commands at which addresses.
    pub rw: Access,
    /// The share of reads in per cent, where it is a mix.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mix: Option<u8>,
    /// The exponent of Zipf's law, where the addresses follow it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub zipf: Option<f64>,
    /// Bytes of a command.
    pub bs: Bytes,
    /// Commands in flight in all.
    pub qd: usize,
    /// Queues, which over TCP are connections, that share the depth.
    pub queues: usize,
    /// Bytes of the region or disk that the commands are spread over.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub span: Option<Bytes>,
    /// How long it was measured, without the warm-up.
    pub seconds: f64,
    /// The cores that were pinned: the measuring end's, or for the limit the serving and the requesting
    /// end's.
    pub cores: Vec<usize>,
    /// Whether the data was checked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verify: Option<bool>,
    /// The congestion control of the sockets.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub congestion: Option<String>,
}

/// What a run found.
#[derive(Debug, Clone)]
pub struct BenchResult {
    /// What was run.
    pub run: Run,
    /// How long it was measured; the rates are over this time.
    pub elapsed: Duration,
    /// Commands that ended in that time, the failed ones not counted.
    pub operations: u64,
    /// Commands that ended with an error, or whose data was wrong.
    pub errors: u64,
    /// Latencies of the commands counted in `operations`.
    pub latency: Latencies,
    /// What a cache line takes from one pinned core to the other and back, measured beside the run: it tells
    /// which of a virtual machine's moods the figures were taken in.
    pub line_round_trip_ns: Option<f64>,
    /// The share of the time in which the polling threads really had their cores. Below 0.97 others were
    /// running there, and the figures say little.
    pub cpu_share: Option<f64>,
}

impl BenchResult {
    /// Commands a second.
    #[must_use]
    pub fn iops(&self) -> f64 {
        per_second(self.operations, self.elapsed)
    }

    /// Megabytes (10^6 bytes) of payload a second.
    #[must_use]
    pub fn mb_per_s(&self) -> f64 {
        per_second(self.operations.saturating_mul(self.run.bs.get()), self.elapsed) / 1e6
    }
}

/// `count` over `elapsed` as a rate; 0 over no time.
#[must_use]
pub fn per_second(count: u64, elapsed: Duration) -> f64 {
    if elapsed.is_zero() { 0.0 } else { count as f64 / elapsed.as_secs_f64() }
}

impl Run {
    /// One line for titles and legends, such as `bench limit: randread 4 KiB, depth 32 over 4 queues`.
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

/// A result to test the ways of showing with: 1000 commands of 4 KiB in a second, of 1, 2, .. 1000 us.
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
