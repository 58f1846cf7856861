//! [`retry_busy`]: opening what somebody else may still hold for a moment.

use std::time::{Duration, Instant};

use rustix::io::Errno;

/// Between two questions.
const PAUSE: Duration = Duration::from_millis(1);

/// Ask until no other process holds it, or the time for that is over: then the last answer. Not on a core.
pub(crate) fn retry_busy<T>(until: Instant, ask: impl Fn() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match ask() {
            Err(Errno::BUSY | Errno::WOULDBLOCK) if Instant::now() < until => std::thread::sleep(PAUSE),
            other => return other,
        }
    }
}
