//! [`DiskSource`]: one disk of the machine as all cores share it.

use std::any::Any;

use spindle_reactor::mem::{Area, Pool};

use crate::cache::{CacheChange, CacheSpec, CacheUse};
use crate::{Disk, Geometry};

/// What a core gives a disk when it opens it.
pub struct CoreContext {
    /// Index of the core in the configuration, from 0.
    pub core: usize,
    /// The core's buffer pool; its zones can be registered with a device.
    pub pool: Pool,
    /// Most commands that the disk will be given at once on this core before it queues.
    pub depth: u32,
}

/// Space behind a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Bytes of the medium that hold data.
    pub bytes_used: u64,
}

/// What a medium says of its own health, for the SMART / Health log (log page 02h).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Health {
    /// Critical Warning, the bits of the log.
    pub critical_warning: u8,
    /// Composite temperature, in kelvins; 0 where it is not known.
    pub temperature_kelvin: u16,
    /// Available spare, in percent.
    pub spare_percent: u8,
    /// Below this spare the medium warns, in percent.
    pub spare_threshold_percent: u8,
    /// Percentage of its life used; 255 for 255 and more.
    pub used_percent: u8,
    /// Media and data integrity errors, ever.
    pub media_errors: u128,
    /// Times that power went without a shutdown, ever.
    pub unsafe_shutdowns: u128,
}

/// Why a disk could not be made or opened. Names the field, its value and what is allowed.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// A setting is out of range.
    #[error("disk {disk:?}: {field} = {value}: {allowed}")]
    Setting {
        /// The disk's name.
        disk: String,
        /// Which setting.
        field: &'static str,
        /// What it was.
        value: String,
        /// What is allowed.
        allowed: String,
    },
    /// The system refused.
    #[error("disk {disk:?}: cannot {verb}: {source}")]
    System {
        /// The disk's name.
        disk: String,
        /// What was tried.
        verb: String,
        /// Why not.
        #[source]
        source: std::io::Error,
    },
    /// No memory.
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
    /// A setting of `disk` is out of range.
    pub fn setting(
        disk: &str,
        field: &'static str,
        value: impl ToString,
        allowed: impl Into<String>,
    ) -> OpenError {
        let (disk, value, allowed) = (disk.to_owned(), value.to_string(), allowed.into());
        OpenError::Setting { disk, field, value, allowed }
    }

    /// The system refused to `verb` for `disk`.
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
    /// The size asked for.
    pub bytes: u64,
    /// What is allowed.
    pub allowed: String,
}

impl ResizeError {
    /// `disk` cannot have `bytes`.
    pub fn new(disk: &str, bytes: u64, allowed: impl Into<String>) -> ResizeError {
        ResizeError { disk: disk.to_owned(), bytes, allowed: allowed.into() }
    }

    /// Refuses each size but the one that the medium (`what`) has itself.
    pub fn unless_same(disk: &dyn DiskSource, bytes: u64, what: &str) -> Result<(), ResizeError> {
        let has = disk.geometry().bytes();
        if bytes == has {
            return Ok(());
        }
        Err(ResizeError::new(disk.name(), bytes, format!("{what} has {has} bytes")))
    }
}

/// One disk, shared by all cores.
pub trait DiskSource: Send + Sync {
    /// Its name in the configuration.
    fn name(&self) -> &str;

    /// Its kind: `ram`, `null`, `file`, `ng`, `nvme`, `remote`.
    fn kind(&self) -> &'static str;

    /// Its shape now.
    fn geometry(&self) -> Geometry;

    /// The disk that this one is a layer in front of. What a layer does not do itself is done by that one.
    fn inner(&self) -> Option<&dyn DiskSource> {
        None
    }

    /// Make a core's pool ready for the commands that its handle will have, as far as that takes long: pages
    /// are pinned. Not on a core. What cannot be done is said by [`DiskSource::open`], which does it where
    /// this was not called.
    fn prepare(&self, pool: &Area) {
        if let Some(inner) = self.inner() {
            inner.prepare(pool);
        }
    }

    /// Let the device of the disk reach memory besides the cores' pools, for as long as what is returned is
    /// kept: data of commands may lie there, on any core. Not on a core: all of it is pinned. A device that
    /// was away reaches it again when it is back. `None`: the disk takes any memory.
    ///
    /// # Errors
    /// [`OpenError`] when it cannot be mapped, with its size and the system's reason.
    fn map_memory(&self, area: &Area) -> Result<Option<Box<dyn Any + Send + Sync>>, OpenError> {
        self.inner().map_or(Ok(None), |inner| inner.map_memory(area))
    }

    /// A core's own handle.
    fn open(&self, context: &CoreContext) -> Result<Box<dyn Disk>, OpenError>;

    /// Do all of a [`DiskSource::resize`] that can fail: the medium is made as large as it has to be, and no
    /// handle sees anything of it. So several disks change their sizes together or not at all.
    ///
    /// # Errors
    /// [`ResizeError`] when the kind cannot or the medium is too small; the medium is as it was.
    fn prepare_resize(&self, bytes: u64) -> Result<(), ResizeError> {
        self.inner().map_or(Ok(()), |inner| inner.prepare_resize(bytes))
    }

    /// The resize that was prepared last is not done: the medium gets back the size that it had.
    fn cancel_resize(&self) {
        if let Some(inner) = self.inner() {
            inner.cancel_resize();
        }
    }

    /// Change the size; every core's handle sees the new geometry.
    ///
    /// # Errors
    /// [`ResizeError`] when the kind cannot or the medium is too small.
    fn resize(&self, bytes: u64) -> Result<(), ResizeError>;

    /// Space in use: all, where the kind does not know it.
    fn usage(&self) -> Usage {
        let all = || Usage { bytes_used: self.geometry().bytes() };
        self.inner().map_or_else(all, DiskSource::usage)
    }

    /// What the medium says of its health; `None` where it says nothing.
    fn health(&self) -> Option<Health> {
        self.inner()?.health()
    }

    /// What [`Op::Deallocate`](crate::Op::Deallocate) gave back reads as zeroes. Where
    /// not, it may read as before: Dataset Management is a hint to a drive (NVM Command Set 3.2.3).
    fn deallocated_is_zero(&self) -> bool {
        self.inner().is_none_or(DiskSource::deallocated_is_zero)
    }

    /// Names of the medium itself, the best first: see [`medium_id`](crate::medium_id). None where it has
    /// none.
    fn medium_ids(&self) -> Vec<String> {
        self.inner().map_or_else(Vec::new, DiskSource::medium_ids)
    }

    /// What is the same for as long as the data are those of one and the same medium, and another for every
    /// other one: the identity that hosts see is derived from it. `None` where the names in the configuration
    /// say which medium it is.
    fn identity_seed(&self) -> Option<String> {
        self.inner()?.identity_seed()
    }

    /// To be called whenever the medium may have been changed by others, such as while a drive or a far
    /// target was away: before the first command that may see it is given to the medium, and not on a core. A
    /// disk whose medium has no other user never calls it.
    fn on_foreign_change(&self, act: Box<dyn Fn() + Send + Sync>) {
        if let Some(inner) = self.inner() {
            inner.on_foreign_change(act);
        }
    }

    /// Do all of a [`DiskSource::set_cache`] that can fail. `None`: the cache is as it is to be.
    ///
    /// # Errors
    /// [`OpenError`]: the kind has no cache, or it cannot be made. All is as it was.
    fn prepare_cache(&self, spec: Option<&CacheSpec>) -> Result<Option<CacheChange>, OpenError> {
        let Some(spec) = spec else { return Ok(None) };
        let allowed = format!("a {} disk has no cache", self.kind());
        Err(OpenError::setting(self.name(), "cache.size", spec.bytes, allowed))
    }

    /// Put a cache in front, or take it away, while the disk is in use. It begins when the cores are told
    /// ([`Disk::reconfigure`]) and takes as long as their slowest commands in flight. The new cache is empty.
    fn set_cache(&self, change: CacheChange) {
        drop(change);
    }

    /// The cache in front of it, where it has one.
    fn cache(&self) -> Option<CacheUse> {
        self.inner()?.cache()
    }

    /// Memory of its own in which the data of commands lies, to be registered with devices; `None` where all
    /// of it is the core's pool.
    fn area(&self) -> Option<Area> {
        self.inner()?.area()
    }
}
