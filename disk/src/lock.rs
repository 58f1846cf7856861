//! Exclusive use of the file or device of a disk: a lock, retries while another process uses the medium, and
//! a check for exports by the kernel.

use std::fs::File;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use rustix::io::Errno;

use crate::OpenError;
use crate::exports::exporter;

/// Time between two attempts of [`retry_busy`].
const RETRY_PERIOD: Duration = Duration::from_millis(1);

/// Retries `ask` while it fails with EBUSY or EWOULDBLOCK, until the deadline `until`. Returns the last
/// result. Sleeps between attempts: never called on a reactor core.
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

/// Locks a file against use by a second target process. Read-only disks take a shared lock. Retries until the
/// deadline `until`. The close of the last descriptor of the open file releases the lock.
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

/// Refuses a medium that a kernel target (nvmet, LIO) exports: these targets do not lock their files and
/// devices. `path` is the value of the setting `field`, `medium` the file or block device.
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
