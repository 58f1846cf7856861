//! A cache in front of a disk: pages of 4 KiB in memory, shared by all cores, found without a lock.
//!
//! ```text
//!   core 0: CachedCore ── inner Disk of core 0          a hit: index -> pinned frame -> sent from there
//!   core 1: CachedCore ── inner Disk of core 1          a miss: frame entered -> filled by the inner disk ->
//!              └──── Shared: frames, index, policy ──┘          published -> sent from there
//! ```
//!
//! Write-through: a write is acknowledged when the inner disk has ended it, and what it changes is dropped
//! from the cache before the inner disk is given it. Whole pages that were in the cache come back into it
//! when the inner disk has ended the write. So the disk's promises stay what they are: flush and
//! FUA go down, and nothing is lost with the cache. Reads and writes of a block are as linearizable as
//! without it; the argument is in `index.rs`, the states of a frame in [`spindle_reactor::mem::FrameWords`].
//!
//! Each miss of a page that another read is filling waits for that one: the disk reads a page once. A fill
//! belongs to the cache: a host that goes away does not end it.
//!
//! Reads that follow each other are read ahead of: `ahead.rs` finds them.
//!
//! What it does not do: it keeps no write back, and nothing over the end of the process. It does not see what
//! others change on the medium, but for the times that the disk below tells of
//! ([`DiskSource::on_foreign_change`]): then it drops all pages.
//!
//! Limits: pages of 4 KiB; reads of more than 512 KiB are answered from it and not put into it; what lies
//! in a part of a page at the end of the disk is not cached.

mod ahead;
mod core;
mod counts;
mod index;
mod lists;
mod plan;
mod policy;
mod shared;
mod sizes;
mod sweeps;
mod switch;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use spindle_reactor::mem::{Area, Pages};

use self::shared::Shared;
use self::switch::{Switch, SwitchedCore};
use crate::{CoreContext, Disk, DiskSource, Geometry, OpenError, ResizeError};

pub use self::counts::CacheCounts;

/// Fewest bytes of a cache: 16 pages.
pub const CACHE_BYTES_MIN: u64 = 64 << 10;
/// Longest window that is read ahead of a stream.
pub const READ_AHEAD_BYTES_MAX: u32 = 4 << 20;
/// Most bytes of a cache: frames have 32-bit numbers.
pub const CACHE_BYTES_MAX: u64 = 8 << 40;

/// Which page is to go when another comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PolicyKind {
    /// What is read once soon goes; see `policy.rs`.
    #[default]
    S3Fifo,
    /// What was not read for the longest time.
    Lru,
}

impl PolicyKind {
    /// Its name in the configuration.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            PolicyKind::S3Fifo => "s3-fifo",
            PolicyKind::Lru => "lru",
        }
    }
}

/// Who keeps a page that a client was given.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CacheMode {
    /// The cache, as if the client did not.
    #[default]
    Shared,
    /// The client: in the cache it goes first.
    Exclusive,
}

impl CacheMode {
    /// Its name in the configuration.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            CacheMode::Shared => "shared",
            CacheMode::Exclusive => "exclusive",
        }
    }
}

/// What a cache is to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheSpec {
    /// Bytes of pages, [`CACHE_BYTES_MIN`] to [`CACHE_BYTES_MAX`].
    pub bytes: u64,
    /// Which page is to go.
    pub policy: PolicyKind,
    /// Who keeps what a client was given.
    pub mode: CacheMode,
    /// Bytes that are read ahead of a stream of reads at most, up to [`READ_AHEAD_BYTES_MAX`]; 0: nothing is.
    pub read_ahead: u32,
    /// Which pages of memory to ask for.
    pub pages: Pages,
}

impl CacheSpec {
    /// A shared one that reads nothing ahead.
    #[must_use]
    pub const fn new(bytes: u64, policy: PolicyKind, pages: Pages) -> CacheSpec {
        CacheSpec { bytes, policy, mode: CacheMode::Shared, read_ahead: 0, pages }
    }

    /// Memory that it takes when it is full, its tables included.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        shared::memory_bytes(self)
    }
}

/// A cache as it is now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheUse {
    /// Bytes of pages that it has room for.
    pub bytes: u64,
    /// Bytes of pages that are in it, nearly.
    pub used_bytes: u64,
    /// Which page is to go.
    pub policy: PolicyKind,
    /// Who keeps what a client was given.
    pub mode: CacheMode,
    /// What it has done so far, on all cores.
    pub counts: CacheCounts,
    /// The same for each host, by [`IoRequest::client`](crate::IoRequest::client). 0: hosts from 256 on, and
    /// what is known of no host.
    pub by_host: Vec<(u16, CacheCounts)>,
}

/// A disk that can have a cache in front, shared by all cores. See the module.
pub struct CachedDisk {
    inner: Arc<dyn DiskSource>,
    switch: Arc<Switch>,
    /// It was opened with a cache, whose pages come one by one: hosts are not told that a write of several
    /// blocks is one step, whether it has a cache now or not. They ask only once.
    has_single_blocks: bool,
}

/// A cache that is ready to be put in front of a disk, or that there is to be none.
pub struct CacheChange(Option<Arc<Shared>>);

fn make(inner: &dyn DiskSource, spec: Option<&CacheSpec>) -> Result<Option<Arc<Shared>>, OpenError> {
    let Some(spec) = spec else { return Ok(None) };
    if !(CACHE_BYTES_MIN..=CACHE_BYTES_MAX).contains(&spec.bytes) {
        let allowed = format!("{CACHE_BYTES_MIN} to {CACHE_BYTES_MAX} bytes");
        return Err(OpenError::setting(inner.name(), "cache.size", spec.bytes, allowed));
    }
    let made = Shared::new(spec);
    let mut shared = made.map_err(|source| OpenError::Memory { disk: inner.name().to_owned(), source })?;
    shared.mapped = inner.map_memory(&shared.frames.area())?;
    Ok(Some(Arc::new(shared)))
}

impl CachedDisk {
    /// Put a cache in front of `inner`, whose reads fill the buffers that they are given. Without a `spec`
    /// all passes, and a cache can come later.
    ///
    /// # Errors
    /// [`OpenError`] when the size is out of range, the address space cannot be had, or the device of `inner`
    /// cannot be given it.
    pub fn new(inner: Arc<dyn DiskSource>, spec: Option<&CacheSpec>) -> Result<Arc<CachedDisk>, OpenError> {
        let switch = Arc::new(Switch::new(make(&*inner, spec)?));
        let weak = Arc::downgrade(&switch);
        inner.on_foreign_change(Box::new(move || {
            if let Some(switch) = weak.upgrade() {
                switch.drop_all();
            }
        }));
        Ok(Arc::new(CachedDisk { inner, switch, has_single_blocks: spec.is_some() }))
    }

    /// What the cache that it has, or will have, has done so far, on all cores.
    #[must_use]
    pub fn counts(&self) -> CacheCounts {
        self.switch.wanted().map(|shared| shared.counts.totals()).unwrap_or_default()
    }

    #[cfg(test)]
    fn shared(&self) -> Arc<Shared> {
        self.switch.wanted().expect("a cache")
    }
}

impl DiskSource for CachedDisk {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn kind(&self) -> &'static str {
        self.inner.kind()
    }

    fn geometry(&self) -> Geometry {
        let geometry = self.inner.geometry();
        let atomic_blocks = if self.has_single_blocks { 1 } else { geometry.atomic_blocks };
        Geometry { atomic_blocks, ..geometry }
    }

    fn inner(&self) -> Option<&dyn DiskSource> {
        Some(&*self.inner)
    }

    fn open(&self, context: &CoreContext) -> Result<Box<dyn Disk>, OpenError> {
        // Besides the commands it gets pieces that fill frames.
        let depth = context.depth.saturating_mul(2);
        let inner = self.inner.open(&CoreContext { pool: context.pool.clone(), depth, ..*context })?;
        Ok(Box::new(SwitchedCore::new(inner, &self.switch, context, self.has_single_blocks)))
    }

    fn resize(&self, bytes: u64) -> Result<(), ResizeError> {
        let resized = self.inner.resize(bytes);
        // What lies beyond the end, or comes back, is not what it was.
        self.switch.drop_all();
        resized
    }

    fn prepare_cache(&self, spec: Option<&CacheSpec>) -> Result<Option<CacheChange>, OpenError> {
        let has = self.switch.wanted();
        if has.as_ref().map(|shared| &shared.spec) == spec {
            return Ok(None);
        }
        let atomic_blocks = self.geometry().atomic_blocks;
        if atomic_blocks > 1 && spec.is_some() {
            let allowed = format!(
                "hosts were told that a write of {atomic_blocks} blocks is one step, which it is not in a \
                 cache; restart to add one"
            );
            return Err(OpenError::setting(self.name(), "cache", "new", allowed));
        }
        Ok(Some(CacheChange(make(&*self.inner, spec)?)))
    }

    fn set_cache(&self, change: CacheChange) {
        self.switch.want(change.0);
    }

    fn cache(&self) -> Option<CacheUse> {
        let shared = self.switch.wanted()?;
        let words = shared.words();
        let [_, _, present, _] = words.census();
        let bytes = |frames: u32| u64::from(frames) * 4096;
        Some(CacheUse {
            bytes: bytes(words.len()),
            used_bytes: bytes(present),
            policy: shared.spec.policy,
            mode: shared.spec.mode,
            counts: shared.counts.totals(),
            by_host: shared.counts.by_host(),
        })
    }

    fn area(&self) -> Option<Area> {
        Some(self.switch.wanted()?.frames.area())
    }
}
