//! A disk in a regular file or on a block device, through io_uring.
//!
//! Each core has its own ring, in which the file and the core's buffers are registered. On the data path the
//! cores share only words that rarely change, such as the size and the compare-and-write guard.
//!
//! `target/disk/src/backend.rs` describes the path of a request.
//!
//! With `is_polled`, reads and writes without FUA use a second ring with `IORING_SETUP_IOPOLL`. All other
//! operations use the first ring: a write with FUA may end with a flush. The kernel does not poll for a
//! transfer that it has to split (`queue/max_hw_sectors_kb`). Such a transfer completes by an interrupt.
//!
//! Durability: after a flush, or a write or zeroing with FUA, the bytes survive a power loss if the device
//! honours flushes (`fdatasync`, `RWF_DSYNC`). Other writes survive the end of this process, but not a power
//! loss. Through the page cache, a failed flush may have lost data, and the kernel does not report the loss
//! again. So every later flush and write or zeroing with FUA fails too, until the disk is created anew. The
//! kernel reports a loss once per open file description. So through the page cache each core syncs its own
//! file description, one sync at a time. No write with FUA then consumes an error that belongs to a flush.
//!
//! Not done here: detection of changes by other processes; the lock is advisory. Blocks are as atomic as in
//! the device or the page cache. Through the page cache, a read may return part of a concurrent write.
//!
//! Limits: 1024 requests of a core in its ring, further requests are queued; 256 cores.

mod open;
mod ring;
mod space;
mod syncs;

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::io::Errno;

use crate::backend::ZeroMethods;
use crate::backend::guard::{CORES_MAX, Guard};
use crate::lock::LOCK_WAIT;
use crate::medium_id;
use crate::release;
use crate::shape::size_refusal;
use crate::{ChannelContext, Disk, DiskChannel, DiskError, Geometry, OpenError, ResizeError, Usage};

use space::SpaceUse;

pub use open::{FileFacts, FileSpec};

/// A disk in a file, shared by all cores. See the module.
pub struct FileDisk {
    shared: Arc<FileShared>,
    facts: FileFacts,
    /// As of the open: the file stays the same.
    medium_ids: Vec<String>,
    /// `None`: a block device, all of which is in use.
    space: Option<Arc<SpaceUse>>,
}

struct FileShared {
    name: String,
    path: PathBuf,
    file: Arc<File>,
    block_bytes: u32,
    block_count: AtomicU64,
    is_block_device: bool,
    is_direct: bool,
    is_read_only: bool,
    is_polled: bool,
    zero_methods: ZeroMethods,
    /// The page cache may have lost data: all later flushes, and writes and zeroings with FUA, fail.
    has_lost_data: AtomicBool,
    guard: Arc<Guard>,
    /// The prepared resize. Locked while one is prepared or undone: two that a file system delays would
    /// otherwise cut what the other has made longer.
    prepared: Mutex<Option<PreparedSize>>,
}

/// Bytes of the file before a prepared resize, and of the disk after it.
#[derive(Debug, Clone, Copy)]
struct PreparedSize {
    file_before: u64,
    disk: u64,
}

impl FileShared {
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

    fn prepared(&self) -> MutexGuard<'_, Option<PreparedSize>> {
        self.prepared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Truncates a file that a prepared resize has extended, unless its size has changed since. No host has
    /// seen the blocks beyond the former end.
    fn undo_growth(&self, prepared: Option<PreparedSize>) {
        let Some(PreparedSize { file_before, disk }) = prepared.filter(|it| it.file_before < it.disk) else {
            return;
        };
        let is_as_made = self.file.metadata().is_ok_and(|metadata| metadata.len() == disk);
        if is_as_made {
            // An error is ignored: a file that is too large is harmless, as the disk has its former size.
            let _ = self.file.set_len(file_before).and_then(|()| self.file.sync_all());
        }
    }

    /// Sets `has_lost_data` on a disk that uses the page cache. Called after a failed sync, or a write with
    /// FUA that failed with a media error. The kernel reports the error once, to one core; the flag makes the
    /// error visible to all cores.
    fn on_sync_error(&self) {
        if !self.is_direct {
            self.has_lost_data.store(true, Ordering::Release);
        }
    }
}

impl FileDisk {
    /// Opens and locks the file of a disk. Creates a missing file if `spec` has `create_bytes`. The file
    /// remains locked until the disk and all its core handles are dropped. Fails with [`OpenError`].
    pub fn new(name: &str, spec: &FileSpec) -> Result<Arc<FileDisk>, OpenError> {
        Self::open_within(name, spec, LOCK_WAIT)
    }

    fn open_within(name: &str, spec: &FileSpec, lock_wait: Duration) -> Result<Arc<FileDisk>, OpenError> {
        // Before a file is created. No core could serve the disk.
        let system =
            |error| OpenError::system(name, format!("set up io_uring for {}", spec.path.display()), error);
        spindle_reactor::uring::probe().map_err(system)?;
        let opened = open::open(name, spec, lock_wait)?;
        release::start();
        let shared = FileShared {
            name: name.to_owned(),
            path: spec.path.clone(),
            file: Arc::new(opened.file),
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
        let medium_ids = medium_id::of_file(&shared.file);
        let space = (!shared.is_block_device).then(|| {
            let file = Arc::clone(&shared.file);
            // stat(2) counts in units of 512 bytes, independent of the file system's block size.
            SpaceUse::new(Box::new(move || Ok(file.metadata()?.blocks() * 512)))
        });
        Ok(Arc::new(FileDisk { shared: Arc::new(shared), facts: opened.facts, medium_ids, space }))
    }

    /// Returns the properties of the file, and differences from the requested settings.
    #[must_use]
    pub fn facts(&self) -> &FileFacts {
        &self.facts
    }
}

impl Drop for FileDisk {
    /// Another thread closes the file, once no core uses it any more.
    fn drop(&mut self) {
        release::release([Arc::clone(&self.shared.file) as release::Former]);
    }
}

impl Disk for FileDisk {
    fn name(&self) -> &str {
        &self.shared.name
    }

    fn kind(&self) -> &'static str {
        "file"
    }

    fn geometry(&self) -> Geometry {
        self.shared.geometry()
    }

    fn open(&self, context: &ChannelContext) -> Result<Box<dyn DiskChannel>, OpenError> {
        Ok(Box::new(ring::open(Arc::clone(&self.shared), context)?))
    }

    /// Extends a writable regular file to the new size if needed; refuses to truncate it. A block device or
    /// read-only file must have at least the new size. Refuses a file that is no longer at its path.
    fn prepare_resize(&self, bytes: u64) -> Result<(), ResizeError> {
        let shared = &self.shared;
        let refuse = |allowed: String| Err(ResizeError::new(&shared.name, bytes, allowed));
        if let Some(allowed) = size_refusal(bytes, shared.block_bytes) {
            return refuse(allowed);
        }
        let path = shared.path.display();
        let mut prepared = shared.prepared();
        // The path may refer to another file by now; the disk uses the open file.
        match open::is_still_at(&shared.file, &shared.path, shared.is_block_device) {
            Ok(true) => {}
            Ok(false) => return refuse(format!("{path} is no longer the file that is open")),
            Err(error) => return refuse(format!("cannot stat {path}: {error}")),
        }
        let has = match open::size_now(&shared.file, shared.is_block_device) {
            Ok(has) => has,
            Err(error) => return refuse(format!("cannot read the size of {path}: {error}")),
        };
        let is_fixed_size = shared.is_block_device || shared.is_read_only;
        if is_fixed_size && bytes > has {
            return refuse(format!("{path} has {has} bytes"));
        }
        if !is_fixed_size && bytes < has {
            return refuse(format!("{path} has {has} bytes, and a smaller disk would cut off its end"));
        }
        if prepared.is_none_or(|prepared| prepared.disk != bytes) {
            *prepared = Some(PreparedSize { file_before: has, disk: bytes });
        }
        if !is_fixed_size
            && bytes > has
            && let Err(error) = shared.file.set_len(bytes).and_then(|()| shared.file.sync_all())
        {
            shared.undo_growth(prepared.take());
            return refuse(format!("cannot change the size of {path}: {error}"));
        }
        Ok(())
    }

    fn cancel_resize(&self) {
        let mut prepared = self.shared.prepared();
        self.shared.undo_growth(prepared.take());
    }

    /// Asks the file system nothing after [`Disk::prepare_resize`] with the same size.
    fn resize(&self, bytes: u64) -> Result<(), ResizeError> {
        let is_prepared = self.shared.prepared().is_some_and(|prepared| prepared.disk == bytes);
        if !is_prepared {
            self.prepare_resize(bytes)?;
        }
        let shared = &self.shared;
        shared.prepared().take();
        shared.block_count.store(bytes / u64::from(shared.block_bytes), Ordering::Release);
        Ok(())
    }

    fn medium_ids(&self) -> Vec<String> {
        self.medium_ids.clone()
    }

    fn usage(&self) -> Usage {
        let all = || self.shared.geometry().bytes();
        Usage { bytes_used: self.space.as_ref().map_or_else(all, SpaceUse::bytes) }
    }
}

/// Returns the [`DiskError`] for an error of the kernel.
fn disk_error(error: &io::Error, is_write: bool) -> DiskError {
    let medium = if is_write { DiskError::MediaWrite } else { DiskError::MediaRead };
    // The transfer was cut short: another process has truncated the file.
    if matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::WriteZero) {
        return medium;
    }
    match Errno::from_io_error(error) {
        // The block layer returns ENODATA for media errors, EILSEQ for checksum errors, EIO for others.
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
