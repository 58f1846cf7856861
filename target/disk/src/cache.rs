//! A read cache in front of a disk: pages of 4 KiB in memory, shared by all cores. Lookups take no lock.
//!
//! ```text
//! core 0: CachedChannel ── inner Disk of core 0      hit: index -> pinned frame -> reply sent from the frame
//!   core 1: CachedChannel ── inner Disk of core 1      miss: frame entered -> filled by the inner disk ->
//!              └──── Shared: frames, index, policy             published -> reply sent from the frame
//! ```
//!
//! Write-through: the affected pages are dropped from the cache, the inner disk executes the write, then the
//! write is acknowledged. After a write of whole pages, up to 32 of its pages are entered again with the new
//! data. Only pages that were cached, and that no other write overlapped, are entered. The disk's guarantees
//! are unchanged: the inner disk executes Flush and FUA, and no data is lost with the cache. Reads and writes
//! of a block are linearizable: see `index.rs`; for a frame's states [`spindle_reactor::mem::FrameWords`].
//!
//! A miss of a page that another read is filling waits for that fill, so the disk reads the page once. A fill
//! continues when the host of its read disconnects.
//!
//! Sequential and strided reads trigger read-ahead (`ahead.rs`). `switch.rs` adds or removes the cache of a
//! disk in use, and `sizes.rs` estimates the hit ratio at other sizes.
//!
//! Not done here: write-back; contents across restarts. The cache detects changes by other users of the
//! medium only if the inner disk reports them ([`Disk::on_foreign_change`]), and then drops all pages.
//!
//! Limits: a read of more than 128 pages (512 KiB) does not fill the cache. Up to 512 pages (2 MiB), such a
//! read is answered from the cache if all its pages are cached. A partial last page is not cached.

mod ahead;
mod budget;
mod core;
mod counts;
mod index;
mod lists;
mod memory;
mod plan;
mod policy;
mod shared;
mod sizes;
mod sweeps;
mod switch;
#[cfg(test)]
pub(crate) mod tests;

use std::sync::Arc;
use std::time::{Duration, Instant};

use spindle_reactor::mem::{Area, MemoryWatch, Pages, SealedFrames};
use spindle_target_card::CachedPages;

use self::shared::CacheShared;
use self::switch::{Switch, SwitchedCore};
use crate::{ChannelContext, Disk, DiskChannel, Geometry, OpenError, ResizeError};

pub use self::counts::CacheCounts;

/// Fewest bytes of a cache: 16 pages.
pub const CACHE_BYTES_MIN: u64 = 64 << 10;
/// Largest read-ahead window of a stream, in bytes.
pub const READ_AHEAD_BYTES_MAX: u32 = 4 << 20;
/// Largest cache, in bytes (8 TiB): frame indices have 32 bits.
pub const CACHE_BYTES_MAX: u64 = 8 << 40;

/// Replacement policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PolicyKind {
    /// S3-FIFO (Yang et al., SOSP 2023): evicts pages early that are read only once.
    #[default]
    S3Fifo,
    /// Least recently used.
    Lru,
}

impl PolicyKind {
    /// Returns the policy's value in the configuration.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            PolicyKind::S3Fifo => "s3-fifo",
            PolicyKind::Lru => "lru",
        }
    }
}

/// Eviction of pages that a host has read, and may cache itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CacheMode {
    /// Pages that a host has read are evicted like all others.
    #[default]
    Shared,
    /// Pages that a host has read are evicted before all others, because the host caches them itself.
    Exclusive,
}

impl CacheMode {
    /// Returns the mode's value in the configuration.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            CacheMode::Shared => "shared",
            CacheMode::Exclusive => "exclusive",
        }
    }
}

/// Settings of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheSpec {
    /// Capacity in bytes, [`CACHE_BYTES_MIN`] to [`CACHE_BYTES_MAX`].
    pub bytes: u64,
    /// Replacement policy.
    pub policy: PolicyKind,
    /// Treatment of pages that a host has read.
    pub mode: CacheMode,
    /// Largest read-ahead window in bytes, up to [`READ_AHEAD_BYTES_MAX`]; 0 turns read-ahead off. The window
    /// is at most 1/32 of the cache.
    pub read_ahead: u32,
    /// Kind of memory pages to allocate.
    pub pages: Pages,
    /// Clients can read the pages by RDMA: each frame has a seal.
    pub has_seals: bool,
    /// A thread makes the memory resident, and the cores use only the part that is. Otherwise a core makes
    /// each page resident when it first fills it, which costs up to a millisecond.
    pub is_resident: bool,
    /// Each core spends only a small part of its time on pages that enter, so that a cold cache costs little.
    /// Otherwise every page that is read enters.
    pub is_paced: bool,
}

impl CacheSpec {
    /// Returns settings with [`CacheMode::CacheShared`], without read-ahead, and with memory that the cores
    /// make resident, without a limit of the pages that enter.
    #[must_use]
    pub const fn new(bytes: u64, policy: PolicyKind, pages: Pages) -> CacheSpec {
        CacheSpec {
            bytes,
            policy,
            mode: CacheMode::Shared,
            read_ahead: 0,
            pages,
            has_seals: false,
            is_resident: false,
            is_paced: false,
        }
    }

    /// Returns the bytes of memory of a full cache, including its tables.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        shared::memory_bytes(self)
    }
}

/// Settings, use and counters of a cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheUse {
    /// Capacity in bytes.
    pub bytes: u64,
    /// Bytes of cached pages; approximate while cores fill and evict.
    pub used_bytes: u64,
    /// Bytes that the cores may use: all of them, once the memory is resident.
    pub usable_bytes: u64,
    /// Time from the creation until all of the memory was resident. `None` until then, without
    /// [`CacheSpec::is_resident`], and if the kernel refused.
    pub resident_after: Option<Duration>,
    /// Replacement policy.
    pub policy: PolicyKind,
    /// Treatment of pages that a host has read.
    pub mode: CacheMode,
    /// Totals of all cores since the cache was created.
    pub counts: CacheCounts,
    /// Totals of each host with a nonzero counter, in ascending order of
    /// [`IoRequest::client`](crate::IoRequest::client). Index 0: hosts with an index of 256 or more, and
    /// events without a host.
    pub by_host: Vec<(u16, CacheCounts)>,
}

/// A disk with an optional cache, shared by all cores. See the module.
pub struct CachedDisk {
    inner: Arc<dyn Disk>,
    switch: Arc<Switch>,
    /// The disk was created with a cache. A cache changes page by page, so no atomic writes of several blocks
    /// are reported. This remains so after the cache is removed, because hosts read the atomic size once.
    has_single_blocks: bool,
}

impl Drop for CachedDisk {
    /// Then the service for optimistic reads and the cores give up the cache.
    fn drop(&mut self) {
        self.switch.close();
    }
}

/// A prepared change for [`Disk::set_cache`]: a new cache; `None`: removal of the cache.
pub struct CacheChange(Option<Arc<CacheShared>>);

fn make(inner: &dyn Disk, spec: Option<&CacheSpec>) -> Result<Option<Arc<CacheShared>>, OpenError> {
    let Some(spec) = spec else { return Ok(None) };
    if !(CACHE_BYTES_MIN..=CACHE_BYTES_MAX).contains(&spec.bytes) {
        let allowed = format!("{CACHE_BYTES_MIN} to {CACHE_BYTES_MAX} bytes");
        return Err(OpenError::setting(inner.name(), "cache.size", spec.bytes, allowed));
    }
    crate::release::start();
    let made = CacheShared::new(spec);
    let (mut shared, memory) =
        made.map_err(|source| OpenError::Memory { disk: inner.name().to_owned(), source })?;
    shared.mapped = inner.map_memory(&shared.frames.area())?;
    shared.agent = inner.agent();
    if let Some(memory) = memory {
        memory::make_resident(memory, &shared.resident_after, inner.name());
    }
    Ok(Some(Arc::new(shared)))
}

impl CachedDisk {
    /// Creates a cached disk over `inner`, whose reads must fill the submitted buffers. Without a `spec` all
    /// commands go to `inner`; [`Disk::set_cache`] can add a cache later.
    ///
    /// # Errors
    /// [`OpenError`] when the size is out of range, or the memory cannot be reserved or mapped for the device
    /// of `inner`.
    pub fn new(inner: Arc<dyn Disk>, spec: Option<&CacheSpec>) -> Result<Arc<CachedDisk>, OpenError> {
        let switch = Arc::new(Switch::new(make(&*inner, spec)?));
        if let Some(agent) = inner.agent() {
            let cache: Arc<dyn CachedPages> = Arc::clone(&switch) as _;
            agent.set_cache(Arc::downgrade(&cache));
        }
        let weak = Arc::downgrade(&switch);
        inner.on_foreign_change(Box::new(move || {
            if let Some(switch) = weak.upgrade() {
                switch.drop_all();
            }
        }));
        Ok(Arc::new(CachedDisk { inner, switch, has_single_blocks: spec.is_some() }))
    }

    /// Returns the totals of all cores for the requested cache, also while cores still switch to that cache.
    /// Zero without a requested cache.
    #[must_use]
    pub fn counts(&self) -> CacheCounts {
        self.switch.wanted().map(|shared| shared.counts.totals()).unwrap_or_default()
    }

    #[cfg(test)]
    fn shared(&self) -> Arc<CacheShared> {
        self.switch.wanted().expect("a cache")
    }
}

impl Disk for CachedDisk {
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

    fn inner(&self) -> Option<&dyn Disk> {
        Some(&*self.inner)
    }

    fn open(&self, context: &ChannelContext) -> Result<Box<dyn DiskChannel>, OpenError> {
        // The inner disk also executes reads that fill frames, up to `depth` of them.
        let depth = context.depth.saturating_mul(2);
        let inner = self.inner.open(&ChannelContext { pool: context.pool.clone(), depth, ..*context })?;
        Ok(Box::new(SwitchedCore::new(inner, &self.switch, context, self.has_single_blocks)))
    }

    fn resize(&self, bytes: u64) -> Result<(), ResizeError> {
        let resized = self.inner.resize(bytes);
        // Blocks beyond a new, smaller end are lost. Blocks that a growth adds have new contents.
        self.switch.drop_all();
        resized
    }

    fn prepare_cache(&self, spec: Option<&CacheSpec>) -> Result<Option<CacheChange>, OpenError> {
        let has = self.switch.wanted();
        if has.as_ref().map(|shared| &shared.spec) == spec {
            return Ok(None);
        }
        if self.inner.agent().is_some() {
            let allowed = "the cache of a disk with [disk.cluster] cannot change while it is in use; restart";
            return Err(OpenError::setting(self.name(), "cache", "changed", allowed));
        }
        let atomic_blocks = self.geometry().atomic_blocks;
        if atomic_blocks > 1 && spec.is_some() {
            let allowed = format!(
                "hosts were told that writes of {atomic_blocks} blocks are atomic, which a cache does not \
                 provide; restart to add one"
            );
            return Err(OpenError::setting(self.name(), "cache", "new", allowed));
        }
        Ok(Some(CacheChange(make(&*self.inner, spec)?)))
    }

    fn set_cache(&self, change: CacheChange) {
        self.switch.set_wanted(change.0);
    }

    fn cache(&self) -> Option<CacheUse> {
        let shared = self.switch.wanted()?;
        let words = shared.words();
        let present = shared.present(Instant::now());
        let bytes = |frames: u32| u64::from(frames) * 4096;
        Some(CacheUse {
            bytes: bytes(words.len()),
            used_bytes: bytes(present),
            usable_bytes: bytes(words.len() - words.withheld()),
            resident_after: shared.resident_after.get().copied(),
            policy: shared.spec.policy,
            mode: shared.spec.mode,
            counts: shared.counts.totals(),
            by_host: shared.counts.by_host(),
        })
    }

    fn sealed_frames(&self) -> Option<Arc<dyn SealedFrames>> {
        // Clients would read pages by RDMA also without a lease.
        let shared = self.switch.wanted().filter(|shared| shared.agent.is_none())?;
        shared.spec.has_seals.then(|| Arc::clone(&shared.frames) as Arc<dyn SealedFrames>)
    }

    fn memory_watch(&self) -> Option<MemoryWatch> {
        Some(self.switch.wanted()?.frames.memory_watch())
    }

    fn area(&self) -> Option<Area> {
        Some(self.switch.wanted()?.frames.area())
    }
}
