//! A disk in a regular file or on a block device, through io_uring.
//!
//! Each core has a ring of its own with the file and the core's buffers registered; nothing on the data path
//! is shared but one word that says whether somebody compares and writes.
//!
//! The path of a request: `BackendCore` in `disk/src/backend.rs`.
//!
//! With `is_polled` reads and writes go through a second ring, whose completions are asked of the device;
//! all else, and writes with FUA, which may end with a flush, go through the first. The kernel does not poll
//! for a transfer that it has to split (`queue/max_hw_sectors_kb`): that one ends by an interrupt.
//!
//! What survives what: after a flush, or a write or zeroing with FUA, the bytes survive a power loss, as far
//! as the device keeps what it says (`fdatasync`, `RWF_DSYNC`). Other writes survive the end of this process,
//! not of the power. Where I/O goes through the page cache, a flush that failed has lost data that the kernel
//! will not report again, so every later flush and write with FUA fails too, until the disk is opened anew.
//! The kernel tells each open file of such a loss once. So each core syncs an open file of its own, one sync
//! at a time, and no write with FUA takes what a flush is to be told.
//!
//! What it does not do: it does not notice when somebody else changes the file; the lock that it takes is
//! advisory. It makes no block atomic that the device or the page cache does not: through the page cache, a
//! read may see a part of a write to the same block that is under way.
//!
//! Limits: 1024 requests of a core in its ring, the rest queued; 256 cores.

mod open;
mod ring;
mod syncs;

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::io::Errno;

use crate::backend::ZeroMethods;
use crate::backend::guard::{CORES_MAX, Guard};
use crate::medium_id;
use crate::shape::size_refusal;
use crate::{CoreContext, Disk, DiskError, DiskSource, Geometry, OpenError, ResizeError, Usage};

pub use open::{FileFacts, FileSpec};

/// How long the file may be held by the process that served it before: the kernel takes milliseconds to end
/// what a dead target's rings had in flight, more on a slow device.
const LOCK_WAIT: Duration = Duration::from_secs(2);

/// A disk in a file, shared by all cores. See the module.
pub struct FileDisk {
    shared: Arc<Shared>,
    facts: FileFacts,
}

/// What the cores have in common.
struct Shared {
    name: String,
    path: PathBuf,
    file: File,
    block_bytes: u32,
    block_count: AtomicU64,
    is_block_device: bool,
    is_direct: bool,
    is_read_only: bool,
    is_polled: bool,
    zero_methods: ZeroMethods,
    /// The page cache lost data: flushes fail from now on.
    has_lost_data: AtomicBool,
    guard: Arc<Guard>,
    /// What a resize that is prepared has changed.
    prepared: Mutex<Option<Growth>>,
}

/// A file was made larger for a disk that does not have that size yet.
#[derive(Debug, Clone, Copy)]
struct Growth {
    from: u64,
    to: u64,
}

impl Shared {
    fn geometry(&self) -> Geometry {
        Geometry {
            block_bytes: self.block_bytes,
            block_count: self.block_count.load(Ordering::Relaxed),
            is_read_only: self.is_read_only,
            has_volatile_cache: true,
            can_deallocate: self.zero_methods.can_release(),
            atomic_blocks: 1,
            can_compare_and_write: !self.is_read_only,
        }
    }

    /// What was prepared before.
    fn set_prepared(&self, growth: Option<Growth>) -> Option<Growth> {
        std::mem::replace(&mut *self.prepared.lock().unwrap_or_else(PoisonError::into_inner), growth)
    }

    /// A sync failed. Through the page cache the kernel says so once, to one core; the others must hear of it
    /// too.
    fn on_sync_error(&self) {
        if !self.is_direct {
            self.has_lost_data.store(true, Ordering::Release);
        }
    }
}

impl FileDisk {
    /// Open, and make if `spec` says so, the file of a disk. It is locked until the disk and all its cores
    /// are dropped.
    pub fn new(name: &str, spec: &FileSpec) -> Result<Arc<FileDisk>, OpenError> {
        Self::open_within(name, spec, LOCK_WAIT)
    }

    fn open_within(name: &str, spec: &FileSpec, lock_wait: Duration) -> Result<Arc<FileDisk>, OpenError> {
        let opened = open::open(name, spec, lock_wait)?;
        let shared = Shared {
            name: name.to_owned(),
            path: spec.path.clone(),
            file: opened.file,
            block_bytes: spec.block_bytes,
            block_count: AtomicU64::new(opened.block_count),
            is_block_device: opened.facts.is_block_device,
            is_direct: opened.facts.is_direct,
            is_read_only: spec.is_read_only,
            is_polled: spec.is_polled,
            zero_methods: ZeroMethods::new(opened.can_punch, true),
            has_lost_data: AtomicBool::new(false),
            guard: Guard::new(CORES_MAX),
            prepared: Mutex::new(None),
        };
        Ok(Arc::new(FileDisk { shared: Arc::new(shared), facts: opened.facts }))
    }

    /// What it turned out to be, and what differs from what was asked for.
    #[must_use]
    pub fn facts(&self) -> &FileFacts {
        &self.facts
    }
}

impl DiskSource for FileDisk {
    fn name(&self) -> &str {
        &self.shared.name
    }

    fn kind(&self) -> &'static str {
        "file"
    }

    fn geometry(&self) -> Geometry {
        self.shared.geometry()
    }

    fn open(&self, context: &CoreContext) -> Result<Box<dyn Disk>, OpenError> {
        Ok(Box::new(ring::open(Arc::clone(&self.shared), context)?))
    }

    /// A regular file is grown and never cut; of a block device the size is asked anew, and must be enough.
    fn prepare_resize(&self, bytes: u64) -> Result<(), ResizeError> {
        let shared = &self.shared;
        let refuse = |allowed: String| Err(ResizeError::new(&shared.name, bytes, allowed));
        if let Some(allowed) = size_refusal(bytes, shared.block_bytes) {
            return refuse(allowed);
        }
        let path = shared.path.display();
        // The caller may have looked at the path, where another file can lie by now.
        match open::is_still_at(&shared.file, &shared.path, shared.is_block_device) {
            Ok(true) => {}
            Ok(false) => return refuse(format!("{path} is another file now than the one that is open")),
            Err(error) => return refuse(format!("cannot look at {path}: {error}")),
        }
        let has = match open::size_now(&shared.file, shared.is_block_device) {
            Ok(has) => has,
            Err(error) => return refuse(format!("cannot ask the size of {path}: {error}")),
        };
        let is_cut_to_fit = shared.is_block_device || shared.is_read_only;
        if is_cut_to_fit && bytes > has {
            return refuse(format!("{path} has {has} bytes"));
        }
        if !is_cut_to_fit && bytes < has {
            return refuse(format!("{path} has {has} bytes, and a smaller disk would cut off its end"));
        }
        if !is_cut_to_fit && bytes > has {
            self.shared.set_prepared(Some(Growth { from: has, to: bytes }));
            if let Err(error) = shared.file.set_len(bytes).and_then(|()| shared.file.sync_all()) {
                self.cancel_resize();
                return refuse(format!("cannot change the size of {path}: {error}"));
            }
        }
        Ok(())
    }

    /// A file that was grown is cut again: no block beyond its old end was ever shown.
    fn cancel_resize(&self) {
        let Some(growth) = self.shared.set_prepared(None) else { return };
        let file = &self.shared.file;
        let is_as_made = file.metadata().is_ok_and(|metadata| metadata.len() == growth.to);
        if is_as_made {
            // A file that stays too large is no harm to the disk, which has the size that it had.
            let _ = file.set_len(growth.from).and_then(|()| file.sync_all());
        }
    }

    fn resize(&self, bytes: u64) -> Result<(), ResizeError> {
        self.prepare_resize(bytes)?;
        let shared = &self.shared;
        shared.set_prepared(None);
        shared.block_count.store(bytes / u64::from(shared.block_bytes), Ordering::Release);
        Ok(())
    }

    fn medium_ids(&self) -> Vec<String> {
        medium_id::of_file(&self.shared.file)
    }

    fn usage(&self) -> Usage {
        if self.shared.is_block_device {
            return Usage { bytes_used: self.shared.geometry().bytes() };
        }
        // stat(2) counts in units of 512 bytes, whatever the file system's block is.
        Usage { bytes_used: self.shared.file.metadata().map_or(0, |metadata| metadata.blocks() * 512) }
    }
}

/// What the system's error means for the host.
fn disk_error(error: &io::Error, is_write: bool) -> DiskError {
    let medium = if is_write { DiskError::MediaWrite } else { DiskError::MediaRead };
    // The file ends before the disk does: somebody has cut it.
    if matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::WriteZero) {
        return medium;
    }
    match Errno::from_io_error(error) {
        // The block layer says ENODATA for what the medium has lost, EILSEQ for what failed its checksum, EIO
        // for the rest.
        Some(Errno::IO | Errno::NODATA | Errno::ILSEQ) => medium,
        Some(Errno::NOSPC | Errno::DQUOT) => DiskError::NoSpace,
        Some(Errno::ROFS | Errno::BADF | Errno::PERM) => DiskError::WriteProtected,
        Some(Errno::NXIO | Errno::NODEV) => DiskError::Gone,
        Some(Errno::OPNOTSUPP) => DiskError::NotSupported,
        Some(_) | None => DiskError::Internal,
    }
}

#[cfg(test)]
mod tests;
