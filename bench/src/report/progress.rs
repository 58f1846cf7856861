//! The bar that moves while a benchmark runs: time done, rate now.

use std::io::{IsTerminal, stderr};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::per_second;

/// How often a bar should be moved. Each move wakes a thread on a core that may be polling: at this pace that
/// is two disturbed commands a second, which stays below the 99.99th percentile of anything worth measuring.
pub const PROGRESS_PERIOD: Duration = Duration::from_millis(500);

/// A live progress bar on the standard error; nothing at all where that is no terminal, or where JSON was
/// asked for.
#[derive(Debug)]
pub struct Progress {
    bar: ProgressBar,
    command_bytes: u64,
    last: Option<(Instant, u64)>,
}

impl Progress {
    /// A bar over `total` with a title, for commands of `command_bytes` each.
    #[must_use]
    pub fn new(title: &str, total: Duration, command_bytes: u64, wants_json: bool) -> Progress {
        let is_hidden = wants_json || !stderr().is_terminal();
        let target = if is_hidden { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
        let bar = ProgressBar::with_draw_target(Some(milliseconds(total)), target);
        if let Ok(style) = ProgressStyle::with_template("{prefix}  {bar:20.cyan/dim} {percent:>3} %  {msg}") {
            bar.set_style(style.progress_chars("━╸─"));
        }
        bar.set_prefix(title.to_owned());
        Progress { bar, command_bytes, last: None }
    }

    /// Whether nothing is drawn, so that no thread needs to wake up to move it.
    #[must_use]
    pub fn is_hidden(&self) -> bool {
        self.bar.is_hidden()
    }

    /// Move the bar to `elapsed`; `operations` is the number of commands done so far, the rate shown that of
    /// the time since the last move.
    pub fn set(&mut self, elapsed: Duration, operations: u64) {
        let now = Instant::now();
        if let Some((before, operations_before)) = self.last {
            let rate = per_second(operations.saturating_sub(operations_before), now - before);
            self.bar.set_message(rate_text(rate, rate * self.command_bytes as f64));
        }
        self.last = Some((now, operations));
        self.bar.set_position(milliseconds(elapsed));
    }

    /// Take the bar away, so that the result stands alone.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// `123 k IOPS, 504 MB/s`.
fn rate_text(iops: f64, bytes_per_second: f64) -> String {
    let iops = if iops >= 1e6 {
        format!("{:.2} M IOPS", iops / 1e6)
    } else if iops >= 1e4 {
        format!("{:.0} k IOPS", iops / 1e3)
    } else {
        format!("{iops:.0} IOPS")
    };
    let mb_per_s = bytes_per_second / 1e6;
    if mb_per_s >= 1e3 {
        format!("{iops}, {:.2} GB/s", mb_per_s / 1e3)
    } else {
        format!("{iops}, {mb_per_s:.0} MB/s")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_hides_the_bar() {
        let mut progress = Progress::new("bench", Duration::from_secs(1), 4096, true);
        assert!(progress.is_hidden());
        progress.set(Duration::from_millis(500), 10);
        progress.set(Duration::from_millis(900), 20);
        progress.finish();
    }

    #[test]
    fn rates_are_short() {
        assert_eq!(rate_text(1_134_000.0, 1_134_000.0 * 4096.0), "1.13 M IOPS, 4.64 GB/s");
        assert_eq!(rate_text(123_000.0, 123_000.0 * 4096.0), "123 k IOPS, 504 MB/s");
        assert_eq!(rate_text(900.0, 900.0 * 512.0), "900 IOPS, 0 MB/s");
    }
}
