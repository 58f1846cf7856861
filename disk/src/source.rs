//! [`DiskSource`]: one disk of the machine as all cores share it.

use std::any::Any;

use spindle_reactor::mem::{Area, Pool};

use crate::cache::{CacheChange, CacheSpec, CacheUse};
use crate::{Disk, Geometry};

/// Parameters of [`DiskSource::open`] for one core.
pub struct CoreContext {
    /// Index of the core in the configuration, from 0.
    pub core: usize,
    /// The core's buffer pool; its zones can be registered with a device.
    pub pool: Pool,
    /// Most commands of the target in flight at the disk on this core. The disk sizes its tables and device
    /// queues by it and queues further commands.
    pub depth: u32,
}

/// Use of the medium's space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Bytes of the medium that hold data.
    pub bytes_used: u64,
}

/// Health of a medium, for the SMART / Health log (log page 02h).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Health {
    /// Critical Warning: bits as in the log page.
    pub critical_warning: u8,
    /// Composite temperature, in kelvins; 0 where it is not known.
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

/// Why a disk could not be created or opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// A setting is out of range.
    #[error("disk {disk:?}: {field} = {value}: {allowed}")]
    Setting {
        /// The disk's name.
        disk: String,
        /// Key in the disk's section of the configuration.
        field: &'static str,
        /// Rejected value.
        value: String,
        /// Values that are allowed.
        allowed: String,
    },
    /// A system call failed.
    #[error("disk {disk:?}: cannot {verb}: {source}")]
    System {
        /// The disk's name.
        disk: String,
        /// The attempt, as a verb phrase: the message is "cannot {verb}".
        verb: String,
        /// Why not.
        #[source]
        source: std::io::Error,
    },
    /// Memory of the disk could not be reserved.
    #[error("disk {disk:?}: {source}")]
    Memory {
        /// The disk's name.
        disk: String,
        /// Why not.
        #[source]
        source: spindle_reactor::mem::RegionError,
    },
}

impl OpenError {
    /// An [`OpenError::Setting`].
    pub fn setting(
        disk: &str,
        field: &'static str,
        value: impl ToString,
        allowed: impl Into<String>,
    ) -> OpenError {
        let (disk, value, allowed) = (disk.to_owned(), value.to_string(), allowed.into());
        OpenError::Setting { disk, field, value, allowed }
    }

    /// An [`OpenError::System`].
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
    /// Refusal of the size `bytes` for `disk`.
    pub fn new(disk: &str, bytes: u64, allowed: impl Into<String>) -> ResizeError {
        ResizeError { disk: disk.to_owned(), bytes, allowed: allowed.into() }
    }

    /// Refuses every size except the current one, which the medium determines. `what` names the medium in the
    /// error message.
    pub fn unless_same(disk: &dyn DiskSource, bytes: u64, what: &str) -> Result<(), ResizeError> {
        let has = disk.geometry().bytes();
        if bytes == has {
            return Ok(());
        }
        Err(ResizeError::new(disk.name(), bytes, format!("{what} has {has} bytes")))
    }
}

/// One disk of the configuration, shared by all cores.
pub trait DiskSource: Send + Sync {
    /// Name in the configuration.
    fn name(&self) -> &str;

    /// Kind in the configuration: `ram`, `null`, `file`, `ng`, `nvme`, `remote`.
    fn kind(&self) -> &'static str;

    /// Current geometry.
    fn geometry(&self) -> Geometry;

    /// The inner disk of a layer. Methods that a layer does not implement are forwarded to it.
    fn inner(&self) -> Option<&dyn DiskSource> {
        None
    }

    /// Registers a core's pool with the device (pins its pages). Slow: not called on a reactor core. Errors
    /// are reported by [`DiskSource::open`], which registers the pool if this was not called.
    fn prepare(&self, pool: &Area) {
        if let Some(inner) = self.inner() {
            inner.prepare(pool);
        }
    }

    /// Maps memory outside the cores' pools for the disk's device until the returned value is dropped. Data
    /// of commands on any core may lie there. Pins all of `area`: not called on a reactor core. The mapping
    /// is restored when a lost device returns. `None`: the disk accepts any memory.
    ///
    /// # Errors
    /// [`OpenError`] when it cannot be mapped, with its size and the system's reason.
    fn map_memory(&self, area: &Area) -> Result<Option<Box<dyn Any + Send + Sync>>, OpenError> {
        self.inner().map_or(Ok(None), |inner| inner.map_memory(area))
    }

    /// Opens the handle of one core.
    fn open(&self, context: &CoreContext) -> Result<Box<dyn Disk>, OpenError>;

    /// Does everything in a [`DiskSource::resize`] that can fail: the medium gets its new size, which no
    /// handle sees yet. So several disks are resized together or not at all.
    ///
    /// # Errors
    /// [`ResizeError`] when the disk cannot have `bytes` bytes; its size has not changed.
    fn prepare_resize(&self, bytes: u64) -> Result<(), ResizeError> {
        self.inner().map_or(Ok(()), |inner| inner.prepare_resize(bytes))
    }

    /// Undoes the last [`DiskSource::prepare_resize`]: the medium gets its former size.
    fn cancel_resize(&self) {
        if let Some(inner) = self.inner() {
            inner.cancel_resize();
        }
    }

    /// Sets the size in bytes; the handles of all cores see the new geometry.
    ///
    /// # Errors
    /// [`ResizeError`] when the disk cannot have `bytes` bytes.
    fn resize(&self, bytes: u64) -> Result<(), ResizeError>;

    /// Space in use; the full size where the kind cannot tell.
    fn usage(&self) -> Usage {
        let all = || Usage { bytes_used: self.geometry().bytes() };
        self.inner().map_or_else(all, DiskSource::usage)
    }

    /// Health of the medium; `None` where it reports none.
    fn health(&self) -> Option<Health> {
        self.inner()?.health()
    }

    /// True where blocks freed by [`Op::Deallocate`](crate::Op::Deallocate) read as zeroes. Otherwise they
    /// may keep their data: Dataset Management is a hint to a drive (NVM Command Set 3.2.3).
    fn deallocated_is_zero(&self) -> bool {
        self.inner().is_none_or(DiskSource::deallocated_is_zero)
    }

    /// Identifiers of the medium, the most reliable first: see [`medium_id`](crate::medium_id). Empty where
    /// it has none.
    fn medium_ids(&self) -> Vec<String> {
        self.inner().map_or_else(Vec::new, DiskSource::medium_ids)
    }

    /// Text that is unique to the medium and stable across restarts; the namespace identifiers that hosts see
    /// are derived from it. `None`: they are derived from the names in the configuration.
    fn identity_seed(&self) -> Option<String> {
        self.inner()?.identity_seed()
    }

    /// Registers `act`, which the disk calls whenever others may have changed the medium, such as while a
    /// drive or a far target was away. The call precedes any command that may see the change, and is not made
    /// on a reactor core. A disk that is the only user of its medium never calls `act`.
    fn on_foreign_change(&self, act: Box<dyn Fn() + Send + Sync>) {
        if let Some(inner) = self.inner() {
            inner.on_foreign_change(act);
        }
    }

    /// Does everything in a [`DiskSource::set_cache`] that can fail. `None`: the cache already matches
    /// `spec`.
    ///
    /// # Errors
    /// [`OpenError`]: the kind has no cache, or the cache cannot be created; nothing has changed.
    fn prepare_cache(&self, spec: Option<&CacheSpec>) -> Result<Option<CacheChange>, OpenError> {
        let Some(spec) = spec else { return Ok(None) };
        let allowed = format!("a {} disk has no cache", self.kind());
        Err(OpenError::setting(self.name(), "cache.size", spec.bytes, allowed))
    }

    /// Adds, replaces or removes the cache while the disk is in use. Each core switches after
    /// [`Disk::reconfigure`], once its commands in flight have ended. A new cache is empty.
    fn set_cache(&self, change: CacheChange) {
        drop(change);
    }

    /// Settings and counters of the cache; `None` where the disk has none.
    fn cache(&self) -> Option<CacheUse> {
        self.inner()?.cache()
    }

    /// Memory of the disk that holds data of commands and is registered with devices; `None` where the disk
    /// uses only the core's pool.
    fn area(&self) -> Option<Area> {
        self.inner()?.area()
    }
}
