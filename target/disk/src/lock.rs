//! Exclusive use of the file or device of a disk: a lock, retries while another process uses the medium, and
//! a check for exports by the kernel.

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use rustix::io::Errno;

use crate::OpenError;
use crate::exports::exporter;

/// Longest wait for a medium that a former process used. The kernel keeps the locks of a killed target until
/// it has ended the I/O in flight of the target's rings: milliseconds at rest, seconds under load.
pub(crate) const LOCK_WAIT: Duration = Duration::from_secs(10);
/// Wait after which the log says what is waited for.
const NOTICE_AFTER: Duration = Duration::from_secs(1);
/// Time between two attempts of [`Busy::retry`].
const RETRY_PERIOD: Duration = Duration::from_millis(1);

/// The wait of one disk for media that another process still uses. All steps of an open share one deadline.
pub(crate) struct Busy<'a> {
    disk: &'a str,
    path: &'a Path,
    started: Instant,
    wait: Duration,
    has_logged: Cell<bool>,
}

impl<'a> Busy<'a> {
    /// Starts the wait: [`Busy::retry`] gives up `wait` after this call.
    pub(crate) fn new(disk: &'a str, path: &'a Path, wait: Duration) -> Self {
        Busy { disk, path, started: Instant::now(), wait, has_logged: Cell::new(false) }
    }

    /// Retries `ask` while it fails with EBUSY or EWOULDBLOCK, until the deadline. Returns the last result.
    /// Sleeps between attempts: never called on a reactor core.
    pub(crate) fn retry<T>(&self, ask: impl Fn() -> Result<T, Errno>) -> Result<T, Errno> {
        loop {
            let waited = self.started.elapsed();
            match ask() {
                Err(error @ (Errno::BUSY | Errno::WOULDBLOCK)) if waited < self.wait => {
                    if waited >= NOTICE_AFTER && !self.has_logged.replace(true) {
                        let (path, wait) = (self.path.display(), self.wait.as_secs());
                        tracing::warn!(
                            "disk {}: {path} is in use by another process ({error}); waiting up to {wait} s",
                            self.disk
                        );
                    }
                    std::thread::sleep(RETRY_PERIOD);
                }
                other => return other,
            }
        }
    }
}

/// Locks a file against use by a second target process. Read-only disks take a shared lock. Retries until the
/// deadline of `busy`. The close of the last descriptor of the open file releases the lock.
pub(crate) fn lock(file: &File, is_read_only: bool, busy: &Busy<'_>) -> io::Result<()> {
    let operation = match is_read_only {
        true => FlockOperation::NonBlockingLockShared,
        false => FlockOperation::NonBlockingLockExclusive,
    };
    busy.retry(|| rustix::fs::flock(file, operation)).map_err(|error| match error {
        Errno::WOULDBLOCK => {
            io::Error::new(io::ErrorKind::WouldBlock, "another disk or process has it locked")
        }
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
