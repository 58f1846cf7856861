//! [`Disk`]: one disk of the configuration, shared by all cores. Also the parameters, errors, space use
//! and health of a disk.

use std::any::Any;
use std::sync::Arc;

use spindle_reactor::mem::{Area, MemoryWatch, Pool, SealedFrames};

use spindle_target_card::{Agent, Cluster};

use crate::cache::{CacheChange, CacheSpec, CacheUse};
use crate::{DiskChannel, Geometry};

/// Parameters of [`Disk::open`] for one core.
pub struct ChannelContext {
    /// Index of the core in the configuration, from 0.
    pub core: usize,
    /// The core's buffer pool; its zones can be registered with a device.
    pub pool: Pool,
    /// Most commands of the target in flight at the disk on this core. The disk sizes its tables and device
    /// queues by this number and queues further commands.
    pub depth: u32,
}

/// Use of the medium's space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Bytes of the medium that are in use.
    pub bytes_used: u64,
}

/// Health of a medium, for the SMART / Health log (log page 02h).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Health {
    /// Critical Warning: bits as in the log page.
    pub critical_warning: u8,
    /// Composite temperature, in kelvins; 0 if not known.
    pub temperature_kelvin: u16,
    /// Available spare, in percent.
    pub spare_percent: u8,
    /// Available Spare Threshold, in percent.
    pub spare_threshold_percent: u8,
    /// Percentage Used; 255 means 255 or more.
    pub used_percent: u8,
    /// Media and Data Integrity Errors over the life of the medium.
    pub media_errors: u128,
    /// Unsafe Shutdowns over the life of the medium.
    pub unsafe_shutdowns: u128,
}

/// Reads of a remote disk from the far target's cache by RDMA READ, since the disk was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OptimisticReads {
    /// Reads whose data was accepted.
    pub accepted: u64,
    /// Reads that were repeated as ordinary reads.
    pub rejected: u64,
    /// Queues that are attached now, one a core.
    pub attached: u64,
}

/// Why a disk or its cache could not be created, opened or mapped.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// A setting, or a property of the medium, is not allowed.
    #[error("disk {disk:?}: {field} = {value}: {allowed}")]
    Setting {
        /// The disk's name.
        disk: String,
        /// Key in the disk's section of the configuration, or a property of the medium.
        field: &'static str,
        /// Rejected value.
        value: String,
        /// Values that are allowed.
        allowed: String,
    },
    /// A system call, or a command to the device, failed.
    #[error("disk {disk:?}: cannot {verb}: {source}")]
    System {
        /// The disk's name.
        disk: String,
        /// Verb phrase that follows "cannot" in the message.
        verb: String,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
    /// Memory of the disk could not be reserved.
    #[error("disk {disk:?}: {source}")]
    Memory {
        /// The disk's name.
        disk: String,
        /// Why the memory could not be reserved.
        #[source]
        source: spindle_reactor::mem::RegionError,
    },
}

impl OpenError {
    /// Returns an [`OpenError::Setting`].
    pub fn setting(
        disk: &str,
        field: &'static str,
        value: impl ToString,
        allowed: impl Into<String>,
    ) -> OpenError {
        let (disk, value, allowed) = (disk.to_owned(), value.to_string(), allowed.into());
        OpenError::Setting { disk, field, value, allowed }
    }

    /// Returns the name of the disk.
    #[must_use]
    pub fn disk(&self) -> &str {
        match self {
            OpenError::Setting { disk, .. }
            | OpenError::System { disk, .. }
            | OpenError::Memory { disk, .. } => disk,
        }
    }

    /// Returns an [`OpenError::System`]; the message begins "cannot {verb}".
    pub fn system(disk: &str, verb: impl Into<String>, source: impl Into<std::io::Error>) -> OpenError {
        OpenError::System { disk: disk.to_owned(), verb: verb.into(), source: source.into() }
    }
}

/// Why a resize was refused.
#[derive(Debug, thiserror::Error)]
#[error("disk {disk:?}: size = {bytes} bytes: {allowed}")]
pub struct ResizeError {
    /// The disk's name.
    pub disk: String,
    /// Requested size in bytes.
    pub bytes: u64,
    /// Sizes that the disk accepts.
    pub allowed: String,
}

impl ResizeError {
    /// Returns the refusal of the size `bytes` for `disk`; `allowed` describes the accepted sizes.
    pub fn new(disk: &str, bytes: u64, allowed: impl Into<String>) -> ResizeError {
        ResizeError { disk: disk.to_owned(), bytes, allowed: allowed.into() }
    }

    /// Refuses every size except the current size: for a disk whose medium determines the size. `what`: the
    /// medium's name in the error message.
    pub fn unless_same(disk: &dyn Disk, bytes: u64, what: &str) -> Result<(), ResizeError> {
        let has = disk.geometry().bytes();
        if bytes == has {
            return Ok(());
        }
        Err(ResizeError::new(disk.name(), bytes, format!("{what} has {has} bytes")))
    }
}

/// One disk of the configuration, shared by all cores.
pub trait Disk: Send + Sync {
    /// Returns the disk's name in the configuration.
    fn name(&self) -> &str;

    /// Returns the kind in the configuration: `ram`, `null`, `file`, `ng`, `nvme` or `remote`. The fault
    /// layer, which has no configuration, returns `fault`; others the kind of the inner disk.
    fn kind(&self) -> &'static str;

    /// Returns the current geometry.
    fn geometry(&self) -> Geometry;

    /// Returns the inner disk of a layer; `None`: this is no layer. All default implementations forward to
    /// the inner disk, except `prepare_cache` and `set_cache`.
    fn inner(&self) -> Option<&dyn Disk> {
        None
    }

    /// Registers a core's pool with the device, which pins the pool's pages. Slow: not called on a reactor
    /// core. [`Disk::open`] reports errors and registers a pool that was not registered here.
    fn prepare(&self, pool: &Area) {
        if let Some(inner) = self.inner() {
            inner.prepare(pool);
        }
    }

    /// Maps memory outside the cores' pools for the disk's device until the returned value is dropped.
    /// Commands of any core may then have their data in `area`. Pins all pages of `area`: not called on a
    /// reactor core. A lost device that returns is mapped again. `None`: the disk accepts any memory.
    ///
    /// # Errors
    /// [`OpenError`] when `area` cannot be mapped, with its size and the system's error.
    fn map_memory(&self, area: &Area) -> Result<Option<Box<dyn Any + Send + Sync>>, OpenError> {
        self.inner().map_or(Ok(None), |inner| inner.map_memory(area))
    }

    /// Opens the handle of one core; fails with the [`OpenError`] of the disk or its device.
    fn open(&self, context: &ChannelContext) -> Result<Box<dyn DiskChannel>, OpenError>;

    /// Executes the steps of [`Disk::resize`] that can fail, such as the growth of a file. The geometry
    /// does not change yet. With this step several disks are resized together or not at all.
    ///
    /// # Errors
    /// [`ResizeError`] when the disk cannot have `bytes` bytes; its size has not changed.
    fn prepare_resize(&self, bytes: u64) -> Result<(), ResizeError> {
        self.inner().map_or(Ok(()), |inner| inner.prepare_resize(bytes))
    }

    /// Undoes the last [`Disk::prepare_resize`]: restores the former size of the medium.
    fn cancel_resize(&self) {
        if let Some(inner) = self.inner() {
            inner.cancel_resize();
        }
    }

    /// Sets the size of the disk to `bytes` bytes for the handles of all cores.
    ///
    /// # Errors
    /// [`ResizeError`] when the disk cannot have `bytes` bytes.
    fn resize(&self, bytes: u64) -> Result<(), ResizeError>;

    /// Returns the space in use; the full size of the disk if its use is not known.
    fn usage(&self) -> Usage {
        let all = || Usage { bytes_used: self.geometry().bytes() };
        self.inner().map_or_else(all, Disk::usage)
    }

    /// Returns the health of the medium; `None` for a medium that reports no health.
    fn health(&self) -> Option<Health> {
        self.inner()?.health()
    }

    /// Returns true if blocks freed by [`Op::Deallocate`](crate::Op::Deallocate) read as zeroes. If false,
    /// freed blocks may keep their data: Dataset Management is a hint to a drive (NVM Command Set 3.2.3).
    fn deallocated_is_zero(&self) -> bool {
        self.inner().is_none_or(Disk::deallocated_is_zero)
    }

    /// Returns the identifiers of the medium, the most reliable first: see [`medium_id`](crate::medium_id).
    /// Empty for a medium without identifiers.
    fn medium_ids(&self) -> Vec<String> {
        self.inner().map_or_else(Vec::new, Disk::medium_ids)
    }

    /// Returns a text that is unique to the medium and stable across restarts. The namespace identifiers for
    /// hosts are derived from this text. `None`: the identifiers are derived from the names in the
    /// configuration.
    fn identity_seed(&self) -> Option<String> {
        self.inner()?.identity_seed()
    }

    /// Registers `act`, which the disk calls whenever others may have changed the medium, for example while a
    /// drive or a far target was away. The call precedes every command that may read changed blocks. It is
    /// not made on a reactor core. A disk that is the only user of its medium never calls `act`.
    fn on_foreign_change(&self, act: Box<dyn Fn() + Send + Sync>) {
        if let Some(inner) = self.inner() {
            inner.on_foreign_change(act);
        }
    }

    /// Executes the steps of [`Disk::set_cache`] that can fail: allocates and maps the memory of a new
    /// cache. `None`: the cache already matches `spec`.
    ///
    /// # Errors
    /// [`OpenError`] when the disk supports no cache, or the cache cannot be created. The disk is unchanged.
    fn prepare_cache(&self, spec: Option<&CacheSpec>) -> Result<Option<CacheChange>, OpenError> {
        let Some(spec) = spec else { return Ok(None) };
        let allowed = format!("a {} disk has no cache", self.kind());
        Err(OpenError::setting(self.name(), "cache.size", spec.bytes, allowed))
    }

    /// Adds, replaces or removes the cache while the disk is in use. Each core switches after
    /// [`DiskChannel::reconfigure`], once its commands in flight have ended. A new cache is empty. No effect
    /// on a disk that supports no cache.
    fn set_cache(&self, change: CacheChange) {
        drop(change);
    }

    /// Returns the settings and counters of the cache; `None` without a cache.
    fn cache(&self) -> Option<CacheUse> {
        self.inner()?.cache()
    }

    /// Returns the counts of optimistic reads from a far target; `None` for a disk that has none.
    fn optimistic_reads(&self) -> Option<OptimisticReads> {
        self.inner()?.optimistic_reads()
    }

    /// Returns the frames of the cache or RAM disk, if clients may read them without the target's CPU
    /// ([`CacheSpec::has_seals`], [`RamSpec::has_seals`](crate::ram::RamSpec::has_seals)). `None`: they may
    /// not, or there is no cache.
    fn sealed_frames(&self) -> Option<Arc<dyn SealedFrames>> {
        self.inner()?.sealed_frames()
    }

    /// Returns the members of the disk, for a disk with the cluster layer.
    fn cluster(&self) -> Option<Arc<Cluster>> {
        self.inner()?.cluster()
    }

    /// Returns what a cache in front of the disk must ask before it answers a read and before it keeps a
    /// page: other hosts may write to the disk. `None`: they do not.
    fn agent(&self) -> Option<Arc<Agent>> {
        self.inner()?.agent()
    }

    /// Returns a watch of the disk's own memory for data. `None`: the disk uses only the core's pool.
    fn memory_watch(&self) -> Option<MemoryWatch> {
        self.inner()?.memory_watch()
    }

    /// Returns the disk's own memory for data of commands, for registration with network and storage devices.
    /// `None`: the disk uses only the core's pool.
    fn area(&self) -> Option<Area> {
        self.inner()?.area()
    }
}
