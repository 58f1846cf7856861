//! Exclusive use of the file or device of a disk: locks, retries while a former process still holds it, and
//! exports of the kernel.

use std::fs::File;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use rustix::io::Errno;

use crate::OpenError;
use crate::exports::exporter;

/// Time between two attempts.
const RETRY_PERIOD: Duration = Duration::from_millis(1);

/// Retries `ask` while it fails with EBUSY or EWOULDBLOCK, until the deadline. Sleeps; never call it on a
/// reactor core.
pub(crate) fn retry_busy<T>(until: Instant, ask: impl Fn() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match ask() {
            Err(Errno::BUSY | Errno::WOULDBLOCK) if Instant::now() < until => {
                std::thread::sleep(RETRY_PERIOD)
            }
            other => return other,
        }
    }
}

/// Locks a file against a second target; read-only disks share the lock. The lock is released with the last
/// descriptor of the open file.
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

/// Refuses a medium that the kernel exports: its targets do not lock their files and devices. `path` is the
/// value of the setting `field`, `medium` the file or block device.
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
