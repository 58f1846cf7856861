//! [`Policy`]: which frame of a shard is to go when a page comes. Pure: it knows frames by number and asks
//! for their state, so that the same code runs over a trace without a disk.
//!
//! - [`S3Fifo`] (Yang et al., SOSP 2023): a small queue takes a tenth of the frames, so that what is read
//!   once is soon gone; what is read again, or comes back soon after (the [`Ghost`] remembers), goes to
//!   the main queue.
//! - [`Lru`]: the page that was not read for the longest time.
//! - [`Exclusive`], over either: a page that a client was given goes before all that no client was given. The
//!   client keeps it itself; here it stays only for as long as nothing better needs the frame.

use super::lists::Lists;

/// What a policy is told of a frame that it asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// It has no page any more: somebody has invalidated it.
    Gone,
    /// It is in use now.
    Busy,
    /// It can go. Hits since the heat was last set, at most [`spindle_reactor::mem::HEAT_MAX`].
    Heat(u8),
}

/// The frames of a shard as a policy sees them.
pub trait Frames {
    /// How one is.
    fn state(&self, frame: u32) -> State;
    /// From now on it has so many hits.
    fn set_heat(&self, frame: u32, heat: u8);
    /// The hash of its page.
    fn hash(&self, frame: u32) -> u64;
}

/// Why a page comes into the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Came {
    /// A client has asked for it.
    Read,
    /// It was there, and was written.
    Written,
    /// No host has asked for it yet.
    Ahead,
}

/// Frames that a [`Policy::victim`] looks at before it says that there is none: a turn of a core is bounded.
const LOOKS_MAX: u32 = 256;

/// Chooses victims among the frames of one shard, which are numbered from 0.
pub trait Policy: Send {
    /// A frame gets a page, of this hash. True: the page was evicted not long ago.
    fn inserted(&mut self, frame: u32, hash: u64, came: Came) -> bool;

    /// Forget a frame.
    fn removed(&mut self, frame: u32);

    /// A page was hit. Told late, and not of every hit; policies that live by the heat ignore it.
    fn touched(&mut self, frame: u32);

    /// True when it wants to be told of hits.
    fn wants_touches(&self) -> bool;

    /// The frame that is to go; the policy has forgotten it. `None`: there is none that can.
    fn victim(&mut self, frames: &dyn Frames) -> Option<u32>;

    /// What was named as victim could not go: somebody has just taken it into use.
    fn kept(&mut self, frame: u32);
}

const SMALL: u8 = 1;
const MAIN: u8 = 2;
/// Hits in the small queue that bring a page to the main one.
const PROMOTED_HEAT: u8 = 2;

/// See the module.
pub struct S3Fifo {
    lists: Lists<2>,
    ghost: Ghost,
    small_max: u32,
    main_max: u32,
    /// Until the first eviction, pages beyond the small queue's part go to the main one.
    has_evicted: bool,
}

impl S3Fifo {
    /// For so many frames.
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
    fn inserted(&mut self, frame: u32, hash: u64, came: Came) -> bool {
        self.lists.unlink(frame);
        let is_ghost = came != Came::Ahead && self.ghost.take(hash);
        let is_filling_up = !self.has_evicted && self.lists.len(SMALL) >= self.small_max;
        let queue = if is_ghost || is_filling_up { MAIN } else { SMALL };
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
        for _ in 0..LOOKS_MAX {
            let is_main = self.lists.len(MAIN) > self.main_max || self.lists.len(SMALL) == 0;
            let queue = if is_main { MAIN } else { SMALL };
            let frame = self.lists.pop_back(queue)?;
            match (frames.state(frame), queue) {
                (State::Gone, _) => {}
                (State::Busy, _) => self.lists.push_front(queue, frame),
                (State::Heat(heat), SMALL) if heat >= PROMOTED_HEAT => {
                    frames.set_heat(frame, 0);
                    self.lists.push_front(MAIN, frame);
                }
                (State::Heat(heat), MAIN) if heat > 0 => {
                    frames.set_heat(frame, heat - 1);
                    self.lists.push_front(MAIN, frame);
                }
                (State::Heat(_), _) => {
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

/// See the module.
pub struct Lru {
    lists: Lists<2>,
    ghost: Ghost,
}

impl Lru {
    /// For so many frames.
    pub fn new(frames: u32) -> Lru {
        Lru { lists: Lists::new(frames), ghost: Ghost::new(frames) }
    }
}

impl Policy for Lru {
    fn inserted(&mut self, frame: u32, hash: u64, _came: Came) -> bool {
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
        for _ in 0..LOOKS_MAX {
            let frame = self.lists.pop_back(MAIN)?;
            match frames.state(frame) {
                State::Gone => {}
                State::Busy => self.lists.push_front(MAIN, frame),
                State::Heat(_) => {
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

const GIVEN: u8 = 1;

/// See the module.
pub struct Exclusive {
    /// Pages that clients were given and have not asked for again since.
    given: Lists<1>,
    /// All others.
    kept: Box<dyn Policy>,
}

impl Exclusive {
    /// For so many frames; `kept` chooses among those that no client was given.
    pub fn new(frames: u32, kept: Box<dyn Policy>) -> Exclusive {
        Exclusive { given: Lists::new(frames), kept }
    }
}

impl Policy for Exclusive {
    fn inserted(&mut self, frame: u32, hash: u64, came: Came) -> bool {
        self.given.unlink(frame);
        let is_ghost = self.kept.inserted(frame, hash, came);
        if came == Came::Read {
            self.touched(frame);
        }
        is_ghost
    }

    fn removed(&mut self, frame: u32) {
        self.given.unlink(frame);
        self.kept.removed(frame);
    }

    fn touched(&mut self, frame: u32) {
        self.removed(frame);
        self.given.push_front(GIVEN, frame);
    }

    fn wants_touches(&self) -> bool {
        true
    }

    fn victim(&mut self, frames: &dyn Frames) -> Option<u32> {
        for _ in 0..LOOKS_MAX {
            let Some(frame) = self.given.pop_back(GIVEN) else { return self.kept.victim(frames) };
            match frames.state(frame) {
                State::Gone => {}
                State::Busy => self.given.push_front(GIVEN, frame),
                State::Heat(_) => return Some(frame),
            }
        }
        // Those in use are with clients; of the others one may be free to go.
        self.kept.victim(frames)
    }

    fn kept(&mut self, frame: u32) {
        self.touched(frame);
    }
}

/// Entries that a hash can be in: one line of the processor's cache.
const WAYS: usize = 8;

/// Which pages were evicted last, by hash: a table of fingerprints, each with the number of its eviction. An
/// entry is forgotten when as many pages as the ghost is long were evicted after it, without being taken out:
/// it is too old to count.
pub struct Ghost {
    /// fingerprint (32) | number of the eviction (32); 0: empty.
    entries: Box<[[u64; WAYS]]>,
    /// Evictions that it remembers.
    most: u32,
    /// Evictions so far, from 1.
    now: u32,
}

impl Ghost {
    /// One that remembers `most` evictions.
    pub fn new(most: u32) -> Ghost {
        Ghost { entries: vec![[0; WAYS]; Self::sets_for(most)].into(), most, now: 1 }
    }

    /// Twice the entries that are remembered: then few are displaced before their time.
    fn sets_for(most: u32) -> usize {
        (most as usize / 4).max(1)
    }

    /// Bytes that one takes.
    pub fn bytes_for(most: u32) -> u64 {
        (Self::sets_for(most) * WAYS * 8) as u64
    }

    fn set(&mut self, hash: u64) -> (&mut [u64; WAYS], u64) {
        let at = ((hash >> 32) * self.entries.len() as u64) >> 32;
        let at = usize::try_from(at).unwrap_or(0);
        (&mut self.entries[at], (hash & 0xffff_ffff) << 32)
    }

    fn age(entry: u64, now: u32) -> u32 {
        // The lower half.
        now.wrapping_sub(u32::try_from(entry & 0xffff_ffff).unwrap_or(0))
    }

    /// A page is evicted.
    pub fn insert(&mut self, hash: u64) {
        let now = self.now;
        let (set, fingerprint) = self.set(hash);
        let age = |entry: &u64| if *entry == 0 { u32::MAX } else { Self::age(*entry, now) };
        let same = set.iter().position(|entry| *entry != 0 && *entry >> 32 == fingerprint >> 32);
        let oldest = same.or_else(|| (0..WAYS).max_by_key(|at| age(&set[*at])));
        set[oldest.unwrap_or(0)] = fingerprint | u64::from(now);
        self.now = now.wrapping_add(1).max(1);
    }

    /// True when the page was evicted not long ago; it is forgotten.
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
