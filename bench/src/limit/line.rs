//! What a cache line takes from one core to the other and back.
//!
//! Two virtual cores may or may not share a cache, and a host can move them at any time. This number tells
//! which of the two it was, so that figures are only compared with others of the same kind.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::pin;
use crate::args::CorePair;

/// Round trips that are timed together, so that the clock itself does not count.
const BATCH: u64 = 500;
/// Batches, of which the fastest is taken: others on the machine only ever add.
const BATCHES: u32 = 40;
/// When to stop early: on a machine that is busy with others.
const TIME_MAX: Duration = Duration::from_millis(200);
/// What ends the echo. Turns are counted from 1 up and never get there.
const STOP: u64 = u64::MAX;

/// An atomic alone on its cache lines (two: processors fetch them in pairs).
#[repr(align(128))]
struct Line(AtomicU64);

/// The round trip between the two cores in nanoseconds, or between wherever the system puts the two threads.
pub(super) fn round_trip_ns(cores: Option<CorePair>) -> f64 {
    let line = Line(AtomicU64::new(0));
    thread::scope(|scope| {
        scope.spawn(|| {
            if let Some(cores) = cores {
                pin(cores.0);
            }
            echo(&line);
        });
        // Not on the caller's thread, which must not stay pinned.
        let asking = scope.spawn(|| {
            if let Some(cores) = cores {
                pin(cores.1);
            }
            ask(&line)
        });
        asking.join().unwrap_or(f64::NAN)
    })
}

/// Answer every odd value with the even one above it.
fn echo(line: &Line) {
    let mut next = 1;
    loop {
        match line.0.load(Ordering::Acquire) {
            STOP => return,
            value if value == next => {
                line.0.store(value + 1, Ordering::Release);
                next = value + 2;
            }
            _ => std::hint::spin_loop(),
        }
    }
}

fn ask(line: &Line) -> f64 {
    let mut best = f64::INFINITY;
    let started = Instant::now();
    let mut value = 1;
    for _ in 0..BATCHES {
        let batch = Instant::now();
        for _ in 0..BATCH {
            line.0.store(value, Ordering::Release);
            while line.0.load(Ordering::Acquire) != value + 1 {
                std::hint::spin_loop();
            }
            value += 2;
        }
        best = best.min(batch.elapsed().as_secs_f64() * 1e9 / BATCH as f64);
        if started.elapsed() > TIME_MAX {
            break;
        }
    }
    line.0.store(STOP, Ordering::Release);
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_trip_takes_some_time() {
        let nanoseconds = round_trip_ns(None);
        assert!(nanoseconds.is_finite() && nanoseconds > 0.0, "{nanoseconds}");
    }
}
