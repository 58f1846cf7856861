//! [`patiently`]: opening what somebody else may still hold for a moment.

use std::time::{Duration, Instant};

use rustix::io::Errno;

/// Between two questions.
const PAUSE: Duration = Duration::from_millis(1);

/// Ask until nobody else holds it, or the time for that is over: then the last answer. Not on a core.
pub(crate) fn patiently<T>(until: Instant, ask: impl Fn() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match ask() {
            Err(Errno::BUSY | Errno::WOULDBLOCK) if Instant::now() < until => std::thread::sleep(PAUSE),
            other => return other,
        }
    }
}
