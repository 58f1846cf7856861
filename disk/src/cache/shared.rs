//! [`Shared`]: what the cores have in common of one cache: frames, index, policy.
//!
//! The frames are divided into shards by the page's first bucket. A shard has its own policy and its own free
//! frames, under a lock that only misses take, and never wait for: who finds it taken asks again in its
//! next turn.

use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

use spindle_reactor::mem::{CacheFrames, FRAME_BYTES, Filling, FrameWords, Pin, RegionError, Shard};

use super::counts::{AllCounts, Whose};
use super::index::{Found, Index, Inserted, PageBuckets, Write, mix};
use super::lists::LIST_BYTES;
use super::policy::{Came, Exclusive, Frames, Ghost, Lru, Policy, S3Fifo, State};
use super::sizes::Sizes;
use super::sweeps::{RANGES, Sweeps};
use super::{CacheMode, CacheSpec, PolicyKind};

/// Fewest frames of a shard: with fewer, pages that fall into one shard by chance cost hits.
const SHARD_FRAMES_MIN: u32 = 4096;
const SHARDS_MAX: u32 = 64;
/// Victims that a miss tries before it goes without the cache.
const VICTIMS_MAX: u32 = 8;
/// How often the lock of a shard is tried. It is held for less than a microsecond.
const LOCK_TRIES: u32 = 64;

/// A shard's part that only its lock's holder may use.
struct ShardState {
    right: Shard,
    policy: Box<dyn Policy>,
}

/// What the cores have in common. See the module.
pub(super) struct Shared {
    pub(super) spec: CacheSpec,
    pub(super) frames: Arc<CacheFrames>,
    pub(super) index: Index,
    shards: Box<[Mutex<ShardState>]>,
    pub(super) sweeps: Sweeps,
    pub(super) counts: Arc<AllCounts>,
    pub(super) sizes: Sizes,
    pub(super) wants_touches: bool,
    /// The inner disk's device reaches the frames for as long as this is here.
    pub(super) mapped: Option<Box<dyn Any + Send + Sync>>,
}

/// A write of a page that was in the cache: the page may stay, if no other write comes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stay {
    pub(super) page: u64,
    pub(super) heat: u8,
    write: Write,
    sweeps: u64,
}

/// What a miss may do.
pub(super) enum Admission<'a> {
    /// It is there by now.
    Present(Pin<'a>),
    /// Somebody fills it.
    Filling,
    /// This one is to fill it.
    Fill(Filling<'a>),
    /// The lock was taken: ask again.
    Busy,
    /// There is no frame for it.
    Full,
}

/// Shards, and frames of each, of a cache of so many bytes.
fn shape(bytes: u64) -> (u32, u32) {
    let frames = u32::try_from(bytes / u64::from(FRAME_BYTES)).unwrap_or(u32::MAX - SHARDS_MAX).max(1);
    let shards = (frames / SHARD_FRAMES_MIN).clamp(1, SHARDS_MAX);
    (shards, frames / shards)
}

/// Memory that a cache of so many bytes takes with its tables.
pub(super) fn memory_bytes(spec: &CacheSpec) -> u64 {
    let (shards, shard_frames) = shape(spec.bytes);
    let lists = if spec.mode == CacheMode::Exclusive { 2 } else { 1 };
    let frames = shards * shard_frames;
    // Page and word of each frame.
    let each = u64::from(FRAME_BYTES) + 16 + lists * LIST_BYTES;
    let ghosts = u64::from(shards) * Ghost::bytes_for(shard_frames);
    let sizes = Sizes::bytes_for(frames);
    u64::from(frames) * each + ghosts + sizes + Index::<std::sync::atomic::AtomicU64>::bytes_for(frames)
}

/// The policy that a cache is to have, for so many frames.
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

impl Shared {
    pub(super) fn new(spec: &CacheSpec) -> Result<Shared, RegionError> {
        let (shards, shard_frames) = shape(spec.bytes);
        let (frames, rights) = CacheFrames::new(shards, shard_frames, spec.pages)?;
        let policy = || policy_for(spec, shard_frames);
        let shard = |right| Mutex::new(ShardState { right, policy: policy() });
        Ok(Shared {
            spec: *spec,
            index: Index::new(frames.words().len()),
            frames,
            wants_touches: policy().wants_touches(),
            shards: rights.into_iter().map(shard).collect(),
            sweeps: Sweeps::new(RANGES),
            counts: Arc::default(),
            sizes: Sizes::new(spec, shards * shard_frames),
            mapped: None,
        })
    }

    pub(super) fn words(&self) -> &FrameWords {
        self.frames.words()
    }

    fn lock(&self, shard: u32) -> Option<MutexGuard<'_, ShardState>> {
        let shard = self.shards.get(shard as usize)?;
        for _ in 0..LOCK_TRIES {
            match shard.try_lock() {
                Ok(state) => return Some(state),
                // A policy that panicked is still one; at worst it names a poor victim.
                Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) => std::hint::spin_loop(),
            }
        }
        None
    }

    /// A page is not in the cache: what now? `Fill` with the entry made: the caller is to read the page
    /// from the disk into the frame, and no other request does meanwhile. `stay`: it is the writer of the
    /// page, whose write has ended and is still announced.
    pub(super) fn admit(
        &self,
        buckets: PageBuckets,
        stay: Option<&Stay>,
        came: Came,
        counts: Whose<'_>,
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
            // A doomed frame is filled for the one read that it was taken for.
            Inserted::Clean | Inserted::Doomed => {}
        }
        // It is Filling, and entered, since before this; a sweep that began later finds it so.
        let is_swept = match stay {
            None => self.sweeps.covers(buckets.page()),
            // One that began and ended meanwhile has dropped the page before the frame was entered.
            Some(stay) => self.sweeps.seen() != Some(stay.sweeps),
        };
        if is_swept {
            filling.doom();
            self.index.remove(words, buckets, filling.frame());
        }
        let local = filling.frame() - at * words.shard_frames();
        if state.policy.inserted(local, mix(buckets.page()), came) && came == Came::Read {
            counts.host.ghost_hits.add(1);
        }
        Admission::Fill(filling)
    }

    /// A free frame of the shard, or that of a victim.
    fn frame_for(
        &self,
        buckets: PageBuckets,
        state: &mut ShardState,
        at: u32,
        counts: Whose<'_>,
    ) -> Option<Filling<'_>> {
        let words = self.words();
        for _ in 0..VICTIMS_MAX {
            if let Some(filling) = words.allocate(&mut state.right, buckets.page()) {
                return Some(filling);
            }
            let view = View { words, first: at * words.shard_frames() };
            let victim = state.policy.victim(&view)?;
            let pin = words.pin(view.first + victim)?;
            if let Some(is_unread) = pin.evict() {
                counts.host.evictions.add(1);
                counts.nobody.wasted.add(u64::from(is_unread));
                self.index.remove(words, self.index.buckets(pin.page()), pin.frame());
            } else {
                state.policy.kept(victim);
            }
        }
        words.allocate(&mut state.right, buckets.page())
    }

    /// Frames that were hit, for a policy that wants to know. Those whose shard is busy are left out.
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

    /// A write of the page begins: see [`Index::begin_write`]. `Some`: the page may stay in the cache.
    pub(super) fn begin_write(&self, page: u64) -> Option<Stay> {
        let write = self.index.begin_write(self.words(), self.index.buckets(page));
        let sweeps = self.sweeps.seen()?;
        let heat = write.heat.filter(|_| write.is_alone)?;
        Some(Stay { page, heat, write, sweeps })
    }

    /// Drop all: others may have written to the disk before this.
    pub(super) fn drop_all(&self) {
        self.sweeps.everything(&self.index, self.words());
    }
}

/// A shard's frames as its policy sees them.
struct View<'a> {
    words: &'a FrameWords,
    first: u32,
}

impl Frames for View<'_> {
    fn state(&self, frame: u32) -> State {
        let frame = self.first + frame;
        match self.words.heat(frame) {
            None if self.words.is_filling(frame) => State::Busy,
            None => State::Gone,
            Some(_) if self.words.is_pinned(frame) => State::Busy,
            Some(heat) => State::Heat(heat),
        }
    }

    fn set_heat(&self, frame: u32, heat: u8) {
        self.words.set_heat(self.first + frame, heat);
    }

    fn hash(&self, frame: u32) -> u64 {
        mix(self.words.page(self.first + frame))
    }
}
