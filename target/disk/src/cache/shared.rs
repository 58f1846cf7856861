//! [`CacheShared`]: state of one cache, shared by all cores: frames, index, shards with their policies,
//! sweeps and counters.
//!
//! The frames are divided into shards by the page's first bucket. A shard has its own policy and free frames,
//! under a lock. Misses, written pages that are entered again, and reports of hits take the lock. No core
//! blocks on the lock: after [`LOCK_TRIES`] failed attempts a read retries in its next turn, and any other
//! operation is dropped.

use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use spindle_reactor::mem::{
    CacheFrames, CacheMemory, FRAME_BYTES, Filling, FrameWords, Pin, RegionError, Shard,
};
use spindle_target_card::{Agent, ForeignWrite};

use super::counts::{AllCounts, HostCounts};
use super::index::{Found, Index, Inserted, PageBuckets, Was, Write, mix};
use super::lists::LIST_BYTES;
use super::policy::{Exclusive, FrameState, Frames, Ghost, InsertReason, Lru, Policy, S3Fifo};
use super::sizes::Sizes;
use super::sweeps::{RANGES, Sweeps};
use super::{CacheMode, CacheSpec, PolicyKind};

/// Fewest frames of a shard, unless the cache has fewer. With smaller shards, an uneven distribution of pages
/// over shards costs hits.
const SHARD_FRAMES_MIN: u32 = 4096;
const SHARDS_MAX: u32 = 64;
/// Most victims that a miss tries before the read passes around the cache.
const VICTIMS_MAX: u32 = 8;
/// Frames of a cache whose pages are counted at each call of [`CacheShared::present`]: more take over 1 ms.
const COUNTED_ALWAYS: u32 = 1 << 18;
/// How long the count of a larger cache is used again.
const COUNT_PERIOD: Duration = Duration::from_secs(1);
/// Attempts to take the lock of a shard before the caller gives up.
const LOCK_TRIES: u32 = 64;
/// Most pages of a write that announces each page: 4 MiB. A longer write announces its range (`sweeps.rs`).
pub(super) const ANNOUNCED_PAGES_MAX: u64 = 1024;
/// Pages between one that is looked up and those whose buckets and whose frame word are prefetched. A line
/// takes about 100 ns from memory, and a page 20 to 40 ns without such waits.
const BUCKETS_AHEAD: u64 = 8;
const WORDS_AHEAD: u64 = 4;

struct ShardState {
    /// Right to allocate frames of the shard.
    right: Shard,
    policy: Box<dyn Policy>,
}

/// State of one cache, shared by all cores. See the module.
pub(super) struct CacheShared {
    pub(super) spec: CacheSpec,
    pub(super) frames: Arc<CacheFrames>,
    pub(super) index: Index,
    shards: Box<[Mutex<ShardState>]>,
    pub(super) sweeps: Sweeps,
    pub(super) counts: Arc<AllCounts>,
    pub(super) sizes: Sizes,
    pub(super) wants_touches: bool,
    /// Last count of [`CacheShared::present`], and its time.
    counted: Mutex<Option<(Instant, u32)>>,
    /// Time until all of the memory was resident. Empty until then, and if the kernel refused.
    pub(super) resident_after: Arc<OnceLock<Duration>>,
    /// Of a disk that other hosts may write to: asked before a hit and before a fill. `None`: they do not.
    pub(super) agent: Option<Arc<Agent>>,
    /// Mapping of the frames for the inner disk's device, until dropped; `None`: the device needs no mapping.
    pub(super) mapped: Option<Box<dyn Any + Send + Sync>>,
}

/// A write in flight of a page that was in the cache. It may enter again if no other write overlaps.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stay {
    pub(super) page: u64,
    pub(super) was: Was,
    write: Write,
    sweeps: u64,
}

pub(super) enum Admission<'a> {
    /// Another core has published the page since the miss.
    Present(Pin<'a>),
    /// Another read or write fills the page.
    Filling,
    /// The page was entered; the caller fills the frame.
    Fill(Filling<'a>),
    /// The lock of the shard is taken: the caller retries or gives up.
    Busy,
    /// No frame is free, resident or evictable, or both buckets of the page are full.
    Full,
}

/// Returns the number of shards and the frames per shard for a cache of `bytes` bytes.
fn shape(bytes: u64) -> (u32, u32) {
    let frames = u32::try_from(bytes / u64::from(FRAME_BYTES)).unwrap_or(u32::MAX - SHARDS_MAX).max(1);
    let shards = (frames / SHARD_FRAMES_MIN).clamp(1, SHARDS_MAX);
    (shards, frames / shards)
}

/// Returns the bytes of memory of a full cache, including its tables.
pub(super) fn memory_bytes(spec: &CacheSpec) -> u64 {
    let (shards, shard_frames) = shape(spec.bytes);
    let lists = if spec.mode == CacheMode::Exclusive { 2 } else { 1 };
    let frames = shards * shard_frames;
    // 16: page (8 bytes) and state word (8 bytes) of a frame; 8: its seal.
    let each = u64::from(FRAME_BYTES) + 16 + 8 * u64::from(spec.has_seals) + lists * LIST_BYTES;
    let ghosts = u64::from(shards) * Ghost::bytes_for(shard_frames);
    let sizes = Sizes::bytes_for(frames);
    u64::from(frames) * each + ghosts + sizes + Index::<std::sync::atomic::AtomicU64>::bytes_for(frames)
}

/// Returns a new policy for `frames` frames, according to `spec`.
pub(super) fn policy_for(spec: &CacheSpec, frames: u32) -> Box<dyn Policy> {
    let policy: Box<dyn Policy> = match spec.policy {
        PolicyKind::S3Fifo => Box::new(S3Fifo::new(frames)),
        PolicyKind::Lru => Box::new(Lru::new(frames)),
    };
    match spec.mode {
        CacheMode::Shared => policy,
        CacheMode::Exclusive => Box::new(Exclusive::new(frames, policy)),
    }
}

impl CacheShared {
    /// Returns a new cache's state, and with [`CacheSpec::is_resident`] the memory to be made resident.
    pub(super) fn new(spec: &CacheSpec) -> Result<(CacheShared, Option<CacheMemory>), RegionError> {
        let (shards, shard_frames) = shape(spec.bytes);
        let (frames, rights, memory) = if spec.is_resident {
            let made = CacheFrames::withheld(shards, shard_frames, spec.pages, spec.has_seals)?;
            (made.0, made.1, Some(made.2))
        } else {
            let (frames, rights) = CacheFrames::new(shards, shard_frames, spec.pages, spec.has_seals)?;
            (frames, rights, None)
        };
        let policy = || policy_for(spec, shard_frames);
        let shard = |right| Mutex::new(ShardState { right, policy: policy() });
        let shared = CacheShared {
            spec: *spec,
            index: Index::new(frames.words().len()),
            frames,
            wants_touches: policy().wants_touches(),
            counted: Mutex::default(),
            shards: rights.into_iter().map(shard).collect(),
            sweeps: Sweeps::new(RANGES),
            counts: Arc::default(),
            sizes: Sizes::new(spec, shards * shard_frames),
            resident_after: Arc::default(),
            agent: None,
            mapped: None,
        };
        Ok((shared, memory))
    }

    pub(super) fn words(&self) -> &FrameWords {
        self.frames.words()
    }

    /// Prefetches for the lookups of the pages that follow `page`, up to `end`.
    #[inline]
    pub(super) fn prefetch_after(&self, page: u64, end: u64) {
        if page + BUCKETS_AHEAD < end {
            self.index.prefetch(self.index.first_bucket(page + BUCKETS_AHEAD));
        }
        if page + WORDS_AHEAD < end {
            self.words().prefetch_word(self.index.guess(self.index.first_bucket(page + WORDS_AHEAD)));
        }
    }

    /// Returns the count of pages in the cache; of a large cache it may be up to [`COUNT_PERIOD`] old.
    pub(super) fn present(&self, now: Instant) -> u32 {
        let mut counted = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        let is_new = |at: Instant| now.saturating_duration_since(at) < COUNT_PERIOD;
        match *counted {
            Some((at, count)) if self.words().len() > COUNTED_ALWAYS && is_new(at) => count,
            _ => {
                let [_, _, count, _] = self.words().census();
                *counted = Some((now, count));
                count
            }
        }
    }

    fn lock(&self, shard: u32) -> Option<MutexGuard<'_, ShardState>> {
        let shard = self.shards.get(shard as usize)?;
        for _ in 0..LOCK_TRIES {
            match shard.try_lock() {
                Ok(state) => return Some(state),
                // After a panic the policy is still usable. At worst, the policy chooses poor victims.
                Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) => std::hint::spin_loop(),
            }
        }
        None
    }

    /// Enters a missing page. After `Fill` the caller fills the frame; no other caller receives `Fill` for
    /// the page meanwhile, unless the frame is doomed. `stay`: the caller's own write of the page, which has
    /// ended at the disk and is still announced.
    pub(super) fn admit(
        &self,
        buckets: PageBuckets,
        stay: Option<&Stay>,
        reason: InsertReason,
        counts: HostCounts<'_>,
    ) -> Admission<'_> {
        let words = self.words();
        let at = buckets.part(u32::try_from(self.shards.len()).unwrap_or(1));
        let Some(mut guard) = self.lock(at) else { return Admission::Busy };
        match self.index.find(words, buckets) {
            Found::Present(pin) => return Admission::Present(pin),
            Found::Filling => return Admission::Filling,
            Found::Missing => {}
        }
        let state = &mut *guard;
        let Some(filling) = self.frame_for(buckets, state, at, counts) else { return Admission::Full };
        match self.index.insert(words, buckets, &filling, stay.map(|stay| stay.write)) {
            Inserted::Full => {
                drop(filling.detach());
                return Admission::Full;
            }
            // Only the read that fills a doomed frame uses its data.
            Inserted::Clean | Inserted::Doomed => {}
        }
        // The frame is in state Filling and entered before this check, so a later sweep finds the frame.
        let is_swept = match stay {
            None => self.sweeps.covers(buckets.page()),
            // A sweep may have begun after the write, and ended before the frame was entered.
            Some(stay) => self.sweeps.idle_count() != Some(stay.sweeps),
        };
        if is_swept {
            filling.doom();
            self.index.remove(words, buckets, filling.frame());
        }
        let local = filling.frame() - at * words.shard_frames();
        if state.policy.inserted(local, mix(buckets.page()), reason) && reason == InsertReason::Read {
            counts.host.ghost_hits.add(1);
        }
        Admission::Fill(filling)
    }

    /// Returns a free frame of the shard for the page. Evicts up to [`VICTIMS_MAX`] victims until a frame is
    /// free; `None` if none is.
    fn frame_for(
        &self,
        buckets: PageBuckets,
        state: &mut ShardState,
        at: u32,
        counts: HostCounts<'_>,
    ) -> Option<Filling<'_>> {
        let words = self.words();
        for _ in 0..VICTIMS_MAX {
            if let Some(filling) = words.allocate(&mut state.right, buckets.page()) {
                return Some(filling);
            }
            // The shard gets more frames soon. An eviction would make room for one page at the cost of
            // another that has just been read.
            if words.withheld() > 0 {
                return None;
            }
            let view = View { words, first: at * words.shard_frames() };
            let victim = state.policy.victim(&view)?;
            let pin = words.pin(view.first + victim)?;
            if let Some(is_unread) = pin.evict() {
                counts.host.evictions.add(1);
                counts.no_host.wasted.add(u64::from(is_unread));
                self.index.remove(words, self.index.buckets(pin.page()), pin.frame());
            } else {
                state.policy.kept(victim);
            }
        }
        words.allocate(&mut state.right, buckets.page())
    }

    /// Reports hits to the policies and empties `frames`. Hits in shards whose lock is taken are dropped.
    pub(super) fn touch(&self, frames: &mut Vec<u32>) {
        let shard_frames = self.words().shard_frames();
        let mut held: Option<(u32, MutexGuard<'_, ShardState>)> = None;
        for frame in frames.drain(..) {
            let at = frame / shard_frames;
            if held.as_ref().is_none_or(|(shard, _)| *shard != at) {
                drop(held.take());
                held = self.lock(at).map(|state| (at, state));
            }
            if let Some((_, state)) = &mut held {
                state.policy.touched(frame % shard_frames);
            }
        }
    }

    /// Announces a write of the page: see [`Index::begin_write`]. `Some`: the page was in the cache and may
    /// be entered again after the write.
    pub(super) fn begin_write(&self, page: u64) -> Option<Stay> {
        let write = self.index.begin_write(self.words(), self.index.buckets(page));
        let sweeps = self.sweeps.idle_count()?;
        let was = write.was.filter(|_| write.is_alone)?;
        Some(Stay { page, was, write, sweeps })
    }

    /// Drops all pages, after a resize or a possible change of the medium by others.
    pub(super) fn drop_all(&self) {
        self.sweeps.drop_all(&self.index, self.words());
    }

    /// Returns true if reads may be answered from the cache, and pages may enter: always without an agent.
    /// Reads the clock.
    #[inline]
    pub(super) fn may_answer(&self) -> bool {
        self.agent.as_ref().is_none_or(|agent| agent.has_lease())
    }

    /// Drops the pages of a write of another host, and keeps none of them until [`CacheShared::end_foreign`].
    pub(super) fn begin_foreign(&self, pages: Range<u64>) -> ForeignWrite {
        let (index, words) = (&self.index, self.words());
        if pages.end - pages.start <= ANNOUNCED_PAGES_MAX {
            pages.clone().for_each(|page| _ = index.begin_write(words, index.buckets(page)));
            return ForeignWrite::Pages(pages);
        }
        let Some(mut sweep) = self.sweeps.begin(pages.clone()) else {
            // All ranges are in use, by writes that may take long.
            self.sweeps.begin_all(&pages, index, words);
            return ForeignWrite::All;
        };
        while !self.sweeps.step(&mut sweep, index, words) {}
        ForeignWrite::Swept(sweep.at)
    }

    /// Ends a write of [`CacheShared::begin_foreign`].
    pub(super) fn end_foreign(&self, write: ForeignWrite) {
        match write {
            ForeignWrite::Pages(pages) => {
                pages.for_each(|page| self.index.end_write(self.index.buckets(page)))
            }
            ForeignWrite::Swept(at) => self.sweeps.end_at(at),
            ForeignWrite::All => self.sweeps.end_all(),
        }
    }
}

/// Frames of a shard for its policy.
struct View<'a> {
    words: &'a FrameWords,
    /// Index of the shard's first frame in the cache.
    first: u32,
}

impl Frames for View<'_> {
    fn state(&self, frame: u32) -> FrameState {
        let frame = self.first + frame;
        match self.words.heat(frame) {
            None if self.words.is_filling(frame) => FrameState::Busy,
            None => FrameState::Gone,
            Some(_) if self.words.is_pinned(frame) => FrameState::Busy,
            Some(heat) => FrameState::Heat(heat),
        }
    }

    fn set_heat(&self, frame: u32, heat: u8) {
        self.words.set_heat(self.first + frame, heat);
    }

    fn hash(&self, frame: u32) -> u64 {
        mix(self.words.page(self.first + frame))
    }
}
