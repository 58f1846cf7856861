//! Round trip of a cache line between two cores.
//!
//! Two virtual cores may share a cache or not, and a hypervisor can move them at any time. Results of two
//! runs are comparable only if this round trip is about the same.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::args::CorePair;
use crate::pin;

/// Round trips between two clock readings, so that the time of a reading does not matter.
const BATCH: u64 = 500;
/// Most batches. The result is that of the fastest batch: other load on the machine only adds time.
const BATCHES: u32 = 40;
/// Time after which no further batch begins, for a loaded machine.
const TIME_MAX: Duration = Duration::from_millis(200);
/// Value that ends `echo`. Counted values begin at 1 and do not reach it.
const STOP: u64 = u64::MAX;

/// Aligned to two cache lines, which the adjacent-line prefetcher of x86 fetches as a pair: no false sharing.
#[repr(align(128))]
struct CacheLine(AtomicU64);

/// Returns the shortest mean round trip of a batch in nanoseconds. `None` leaves the two threads unpinned.
pub(super) fn round_trip_ns(cores: Option<CorePair>) -> f64 {
    let line = CacheLine(AtomicU64::new(0));
    thread::scope(|scope| {
        scope.spawn(|| {
            if let Some(cores) = cores {
                pin(cores.0);
            }
            echo(&line);
        });
        // A thread of its own: pinning would stay in effect for the caller.
        let pinging = scope.spawn(|| {
            if let Some(cores) = cores {
                pin(cores.1);
            }
            ping(&line)
        });
        pinging.join().unwrap_or(f64::NAN)
    })
}

/// Replaces each odd value by the next even one, until [`STOP`].
fn echo(line: &CacheLine) {
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

fn ping(line: &CacheLine) -> f64 {
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
