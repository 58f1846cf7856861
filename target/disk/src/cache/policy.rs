//! [`Policy`]: chooses the victim of a shard. Works on frame indices only and queries the state of frames by
//! [`Frames`], so the same code runs over a trace without a disk.
//!
//! - [`S3Fifo`] (Yang et al., SOSP 2023): new pages enter a small queue of a tenth of the frames. Pages with
//!   at least two hits in the small queue move to the main queue. Pages that were recently evicted from the
//!   small queue ([`Ghost`]) enter the main queue directly.
//! - [`Lru`]: evicts the least recently used page.
//! - [`Exclusive`], over [`S3Fifo`] or [`Lru`]: first evicts pages that a host has read and so caches itself.

use super::lists::Lists;

/// State of a frame for a policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FrameState {
    /// The frame's page was invalidated.
    Gone,
    /// The frame is pinned or being filled: not evictable now.
    Busy,
    /// The frame is evictable. Its heat: the value that was last set plus the hits since, at most
    /// [`spindle_reactor::mem::HEAT_MAX`].
    Heat(u8),
}

/// Access of a policy to the frames of its shard.
pub trait Frames {
    /// Returns the current state of a frame.
    fn state(&self, frame: u32) -> FrameState;
    /// Sets the heat of a frame.
    fn set_heat(&self, frame: u32, heat: u8);
    /// Returns the hash of the page in a frame.
    fn hash(&self, frame: u32) -> u64;
}

/// Why a page is inserted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InsertReason {
    /// A host reads the page.
    Read,
    /// The page was cached, then written. It was in the frame `from`, which may have another page now.
    Written { from: u32 },
    /// The page is read ahead; no host has read the page yet.
    Ahead,
}

/// Most frames that one call of [`Policy::victim`] examines, which bounds the time of a turn. [`Exclusive`]
/// examines at most twice as many, half of them in its inner policy.
const EXAMINED_MAX: u32 = 256;

/// Chooses victims among the frames of one shard. Frame indices begin at 0 in each shard.
pub trait Policy: Send {
    /// Adds `frame` to the policy's queues after a page with this hash was inserted into it. Returns true if
    /// the page was evicted recently.
    fn inserted(&mut self, frame: u32, hash: u64, reason: InsertReason) -> bool;

    /// Removes a frame from the policy's queues.
    fn removed(&mut self, frame: u32);

    /// Records a hit of a frame's page. Called late and not for every hit. Policies that use only the heat
    /// ignore the call.
    fn touched(&mut self, frame: u32);

    /// Returns true if the policy uses [`Policy::touched`].
    fn wants_touches(&self) -> bool;

    /// Removes a frame to evict from the policy's queues and returns it. `None`: none examined is evictable.
    fn victim(&mut self, frames: &dyn Frames) -> Option<u32>;

    /// Adds a victim to the queues again that was in use and was not evicted.
    fn kept(&mut self, frame: u32);
}

const SMALL: u8 = 1;
const MAIN: u8 = 2;
/// Heat at which a page of the small queue moves to the main queue.
const PROMOTED_HEAT: u8 = 2;

/// S3-FIFO. See the module.
pub struct S3Fifo {
    lists: Lists<2>,
    ghost: Ghost,
    small_max: u32,
    main_max: u32,
    /// A frame was evicted. Until then, new pages enter the main queue while the small queue is full.
    has_evicted: bool,
}

impl S3Fifo {
    pub fn new(frames: u32) -> S3Fifo {
        let small_max = (frames / 10).max(1);
        let main_max = frames.saturating_sub(small_max);
        S3Fifo {
            lists: Lists::new(frames),
            ghost: Ghost::new(main_max),
            small_max,
            main_max,
            has_evicted: false,
        }
    }
}

impl Policy for S3Fifo {
    fn inserted(&mut self, frame: u32, hash: u64, reason: InsertReason) -> bool {
        // A write changes nothing of how often a page is read: it stays in its queue.
        let was_in_main = matches!(reason, InsertReason::Written { from } if self.lists.queue(from) == MAIN);
        self.lists.unlink(frame);
        let is_ghost = reason != InsertReason::Ahead && self.ghost.take(hash);
        let is_filling_up = !self.has_evicted && self.lists.len(SMALL) >= self.small_max;
        let queue = if is_ghost || is_filling_up || was_in_main { MAIN } else { SMALL };
        self.lists.push_front(queue, frame);
        is_ghost
    }

    fn removed(&mut self, frame: u32) {
        self.lists.unlink(frame);
    }

    fn touched(&mut self, _frame: u32) {}

    fn wants_touches(&self) -> bool {
        false
    }

    fn victim(&mut self, frames: &dyn Frames) -> Option<u32> {
        for _ in 0..EXAMINED_MAX {
            let is_main = self.lists.len(MAIN) > self.main_max || self.lists.len(SMALL) == 0;
            let queue = if is_main { MAIN } else { SMALL };
            let frame = self.lists.pop_back(queue)?;
            match (frames.state(frame), queue) {
                (FrameState::Gone, _) => {}
                (FrameState::Busy, _) => self.lists.push_front(queue, frame),
                (FrameState::Heat(heat), SMALL) if heat >= PROMOTED_HEAT => {
                    frames.set_heat(frame, 0);
                    self.lists.push_front(MAIN, frame);
                }
                (FrameState::Heat(heat), MAIN) if heat > 0 => {
                    frames.set_heat(frame, heat - 1);
                    self.lists.push_front(MAIN, frame);
                }
                (FrameState::Heat(_), _) => {
                    if queue == SMALL {
                        self.ghost.insert(frames.hash(frame));
                    }
                    self.has_evicted = true;
                    return Some(frame);
                }
            }
        }
        None
    }

    fn kept(&mut self, frame: u32) {
        self.lists.unlink(frame);
        self.lists.push_front(MAIN, frame);
    }
}

/// Least recently used. The ghost serves only the counter `ghost_hits`.
pub struct Lru {
    lists: Lists<2>,
    ghost: Ghost,
}

impl Lru {
    pub fn new(frames: u32) -> Lru {
        Lru { lists: Lists::new(frames), ghost: Ghost::new(frames) }
    }
}

impl Policy for Lru {
    fn inserted(&mut self, frame: u32, hash: u64, _came: InsertReason) -> bool {
        self.lists.unlink(frame);
        self.lists.push_front(MAIN, frame);
        self.ghost.take(hash)
    }

    fn removed(&mut self, frame: u32) {
        self.lists.unlink(frame);
    }

    fn touched(&mut self, frame: u32) {
        if self.lists.is_linked(frame) {
            self.lists.unlink(frame);
            self.lists.push_front(MAIN, frame);
        }
    }

    fn wants_touches(&self) -> bool {
        true
    }

    fn victim(&mut self, frames: &dyn Frames) -> Option<u32> {
        for _ in 0..EXAMINED_MAX {
            let frame = self.lists.pop_back(MAIN)?;
            match frames.state(frame) {
                FrameState::Gone => {}
                FrameState::Busy => self.lists.push_front(MAIN, frame),
                FrameState::Heat(_) => {
                    self.ghost.insert(frames.hash(frame));
                    return Some(frame);
                }
            }
        }
        None
    }

    fn kept(&mut self, frame: u32) {
        self.lists.unlink(frame);
        self.lists.push_front(MAIN, frame);
    }
}

const READ_BY_HOST: u8 = 1;

/// First evicts the pages that hosts have read. See the module.
pub struct Exclusive {
    /// Frames of pages that hosts have read. The page read least recently is evicted first.
    read_by_host: Lists<1>,
    /// Policy of all other pages.
    kept: Box<dyn Policy>,
}

impl Exclusive {
    /// Returns the policy for `frames` frames. `kept` is the policy of the pages that no host has read.
    pub fn new(frames: u32, kept: Box<dyn Policy>) -> Exclusive {
        Exclusive { read_by_host: Lists::new(frames), kept }
    }
}

impl Policy for Exclusive {
    fn inserted(&mut self, frame: u32, hash: u64, reason: InsertReason) -> bool {
        self.read_by_host.unlink(frame);
        let is_ghost = self.kept.inserted(frame, hash, reason);
        if reason == InsertReason::Read {
            self.touched(frame);
        }
        is_ghost
    }

    fn removed(&mut self, frame: u32) {
        self.read_by_host.unlink(frame);
        self.kept.removed(frame);
    }

    fn touched(&mut self, frame: u32) {
        self.removed(frame);
        self.read_by_host.push_front(READ_BY_HOST, frame);
    }

    fn wants_touches(&self) -> bool {
        true
    }

    fn victim(&mut self, frames: &dyn Frames) -> Option<u32> {
        for _ in 0..EXAMINED_MAX {
            let Some(frame) = self.read_by_host.pop_back(READ_BY_HOST) else {
                return self.kept.victim(frames);
            };
            match frames.state(frame) {
                FrameState::Gone => {}
                FrameState::Busy => self.read_by_host.push_front(READ_BY_HOST, frame),
                FrameState::Heat(_) => return Some(frame),
            }
        }
        // None of the examined frames is evictable: tries the pages that no host has read.
        self.kept.victim(frames)
    }

    fn kept(&mut self, frame: u32) {
        self.touched(frame);
    }
}

/// Entries of a set, which fills one 64-byte cache line.
const WAYS: usize = 8;

/// Hashes of the pages evicted last: a set-associative table of fingerprints, each with the sequence number
/// of its eviction. An entry expires once more than `most` evictions have followed; it stays until replaced.
pub struct Ghost {
    /// Upper 32 bits: fingerprint; lower 32: sequence number of the eviction. 0: empty.
    entries: Box<[[u64; WAYS]]>,
    /// Most evictions after which an entry is still valid.
    most: u32,
    /// Sequence number of the next eviction, from 1.
    now: u32,
}

impl Ghost {
    pub fn new(most: u32) -> Ghost {
        Ghost { entries: vec![[0; WAYS]; Self::sets_for(most)].into(), most, now: 1 }
    }

    /// Returns the number of sets. It has twice `most` entries, so few are replaced before they expire.
    fn sets_for(most: u32) -> usize {
        (most as usize / 4).max(1)
    }

    /// Returns the bytes of memory of a ghost for `most` evictions.
    pub fn bytes_for(most: u32) -> u64 {
        (Self::sets_for(most) * WAYS * 8) as u64
    }

    fn set(&mut self, hash: u64) -> (&mut [u64; WAYS], u64) {
        let at = ((hash >> 32) * self.entries.len() as u64) >> 32;
        let at = usize::try_from(at).unwrap_or(0);
        (&mut self.entries[at], (hash & 0xffff_ffff) << 32)
    }

    fn age(entry: u64, now: u32) -> u32 {
        // The sequence number is the lower half.
        now.wrapping_sub(u32::try_from(entry & 0xffff_ffff).unwrap_or(0))
    }

    /// Records the eviction of a page with this hash. Replaces an entry with the same fingerprint, otherwise
    /// the oldest entry of the set.
    pub fn insert(&mut self, hash: u64) {
        let now = self.now;
        let (set, fingerprint) = self.set(hash);
        let age = |entry: &u64| if *entry == 0 { u32::MAX } else { Self::age(*entry, now) };
        let same = set.iter().position(|entry| *entry != 0 && *entry >> 32 == fingerprint >> 32);
        let oldest = same.or_else(|| (0..WAYS).max_by_key(|at| age(&set[*at])));
        set[oldest.unwrap_or(0)] = fingerprint | u64::from(now);
        self.now = now.wrapping_add(1).max(1);
    }

    /// Returns true if a page with this hash was among the last `most` evicted. Removes its entry.
    pub fn take(&mut self, hash: u64) -> bool {
        let (now, most) = (self.now, self.most);
        let (set, fingerprint) = self.set(hash);
        let same = set.iter_mut().find(|entry| **entry != 0 && **entry >> 32 == fingerprint >> 32);
        let Some(entry) = same else { return false };
        let is_young = Self::age(*entry, now) <= most;
        *entry = 0;
        is_young
    }
}
