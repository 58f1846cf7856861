//! Keeping others off the file or device of a disk: locks, and what another process may still hold for a
//! moment.

use std::fs::File;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use rustix::io::Errno;

use crate::OpenError;
use crate::exports::exporter;

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

/// Two targets must not serve one file. The lock goes with the last descriptor; readers share it.
pub(crate) fn lock(file: &File, is_read_only: bool, until: Instant) -> io::Result<()> {
    let operation = match is_read_only {
        true => FlockOperation::NonBlockingLockShared,
        false => FlockOperation::NonBlockingLockExclusive,
    };
    retry_busy(until, || rustix::fs::flock(file, operation)).map_err(|error| match error {
        Errno::WOULDBLOCK => io::Error::new(io::ErrorKind::WouldBlock, "somebody else serves it"),
        other => other.into(),
    })
}

/// The kernel's own target has devices and files open without keeping others out. `path` is that of the
/// setting `field`, `medium` that of the file or block device.
pub(crate) fn check_exports(
    disk: &str,
    field: &'static str,
    path: &Path,
    medium: &Path,
) -> Result<(), OpenError> {
    let Some(by) = exporter(medium) else { return Ok(()) };
    let allowed = format!("must not be exported by the kernel as well ({by}): disable it there");
    Err(OpenError::setting(disk, field, path.display(), allowed))
}
