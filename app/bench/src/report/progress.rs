//! Progress bar of a running benchmark: elapsed time and current rate.

use std::io::{IsTerminal, stderr};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::per_second;

/// Period of the calls of [`Progress::set`]. Each call wakes a thread, perhaps on a polling core. Two delayed
/// commands per second do not affect the 99.99th percentile above 20,000 IOPS.
pub const PROGRESS_PERIOD: Duration = Duration::from_millis(500);

/// Progress bar on standard error; hidden with `--json`, or if standard error is no terminal.
#[derive(Debug)]
pub struct Progress {
    bar: ProgressBar,
    command_bytes: u64,
    last: Option<(Instant, u64)>,
}

impl Progress {
    /// Creates a bar that is full after `total`. `command_bytes` is the payload of a command.
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

    /// Returns whether nothing is drawn: then [`Progress::set`] need not be called.
    #[must_use]
    pub fn is_hidden(&self) -> bool {
        self.bar.is_hidden()
    }

    /// Moves the bar to `elapsed`. `operations` is the number of commands completed so far. The shown rate is
    /// that since the previous call; the first call shows none.
    pub fn set(&mut self, elapsed: Duration, operations: u64) {
        let now = Instant::now();
        if let Some((before, operations_before)) = self.last {
            let rate = per_second(operations.saturating_sub(operations_before), now - before);
            self.bar.set_message(rate_text(rate, rate * self.command_bytes as f64));
        }
        self.last = Some((now, operations));
        self.bar.set_position(milliseconds(elapsed));
    }

    /// Clears the bar from the terminal.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Formats a rate with about three figures, such as `123 k IOPS, 504 MB/s`.
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
