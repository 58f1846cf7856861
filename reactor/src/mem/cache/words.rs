//! [`FrameWords`]: the state of each frame of a cache, one atomic word per frame.
//!
//! ```text
//!            allocate           publish           invalidate, evict          last unpin
//!   Free ─────────────> Filling ───────> Present ───────────────────> Detached ─────────> Free
//!                          │ invalidate                                  ^
//!                          ├──────────> Doomed ── end of the fill ───────┤
//!                          │ drop of the buffer                          │
//!                          └──────────> Lost ──── invalidate ────────────┘
//! ```
//!
//! A frame is written only while it is Filling or Doomed, by the owner of its [`Filling`]. A Lost frame has
//! no such owner any more, but still an entry in the index above; lookups see it as Filling. A frame is read
//! only under a [`Pin`] that found it Present. A frame is freed only without pins. These three rules make the
//! slices of [`CacheFrames`](super::CacheFrames) sound, even if the index above is wrong.
//!
//! A lookup adds its pin before it reads the state, so the addition is ordered with every change of the
//! state. If the frame has another state or page, the pin is dropped at once: a *stray* pin.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::mem::atomic::AtomicWord;
use crate::mem::seals::{Reference, Seals};

/// Layout of a word: generation (31 bits) | unread (1) | state (3) | heat (2) | pins (27). A process has
/// fewer than 2^27 requests, so the pins do not overflow.
const PIN: u64 = 1;
const PINS: u64 = (1 << 27) - 1;
const HEAT: u64 = 1 << 27;
const HEATS: u64 = 3 << 27;
const STATE: u64 = 7 << 29;
/// The page was read ahead, and no request has read it yet.
const UNREAD: u64 = 1 << 32;
const GENERATION: u64 = 1 << 33;

const FREE: u64 = 0;
const FILLING: u64 = 1 << 29;
const DOOMED: u64 = 2 << 29;
const PRESENT: u64 = 3 << 29;
const DETACHED: u64 = 4 << 29;
const LOST: u64 = 5 << 29;

/// Largest heat of a frame; further hits do not raise it.
pub const HEAT_MAX: u8 = 3;

struct Frame<W> {
    /// Page index on the disk. In a Free frame: the next frame of the shard's free list plus 1 (0: none).
    page: W,
    word: W,
}

/// The right to allocate frames of one shard. Each shard has exactly one value.
#[derive(Debug)]
pub struct Shard(u32);

/// State words of all frames of a cache. See the module.
pub struct FrameWords<W = AtomicU64> {
    frames: Box<[Frame<W>]>,
    /// Head of each shard's free list: frame index plus 1 (0: empty). All threads push, but only the owner of
    /// the [`Shard`] pops. So the head cannot be popped and pushed again during a pop (ABA).
    free: Box<[W]>,
    shard_frames: u32,
    /// Count of Present frames that are unread.
    unread: W,
    /// Count of Free frames that are in no list yet: see [`FrameWords::give`].
    withheld: W,
    /// `None`: no reader is without a pin.
    seals: Option<Seals<W>>,
}

/// Result of [`FrameWords::lookup`].
pub enum Lookup<'a, W: AtomicWord> {
    /// The frame contains the page. Its bytes can be read while the pin exists.
    Present(Pin<'a, W>),
    /// The page is being read into the frame. The pin keeps the frame from being freed.
    Filling(Pin<'a, W>),
    /// The frame is neither Present nor Filling with this page, or there is no such frame.
    Other,
}

impl<W: AtomicWord> FrameWords<W> {
    /// Creates `shards` times `shard_frames` free frames, with `seals` for as many frames, and the [`Shard`]
    /// of each shard.
    ///
    /// # Panics
    /// When the count of frames is 0 or more than `u32::MAX - 1`.
    #[must_use]
    pub fn new(shards: u32, shard_frames: u32, seals: Option<Seals<W>>) -> (FrameWords<W>, Vec<Shard>) {
        let count = shards.checked_mul(shard_frames).filter(|count| (1..u32::MAX).contains(count));
        let Some(count) = count else { panic!("{shards} shards of {shard_frames} frames") };
        let frames = (0..count).map(|frame| {
            let is_last = (frame + 1) % shard_frames == 0;
            let next = if is_last { 0 } else { u64::from(frame) + 2 };
            Frame { page: W::new(next), word: W::new(FREE) }
        });
        let first = |shard: u32| W::new(u64::from(shard * shard_frames) + 1);
        let words = FrameWords {
            frames: frames.collect(),
            free: (0..shards).map(first).collect(),
            shard_frames,
            unread: W::new(0),
            withheld: W::new(0),
            seals,
        };
        (words, (0..shards).map(Shard).collect())
    }

    /// Empties the free lists of new words: no frame is allocated until [`FrameWords::give`].
    pub(super) fn withhold_all(&mut self) {
        self.free.iter().for_each(|head| head.store(0, Ordering::Relaxed));
        self.withheld.store(self.len().into(), Ordering::Relaxed);
    }

    /// Adds withheld frames of one shard to its free list. The caller gives each frame once: a frame that is
    /// in the list twice would be allocated twice.
    pub(super) fn give(&self, frames: std::ops::Range<u32>) {
        let count = u64::from(frames.end - frames.start);
        // Backwards: frames are allocated from the head of the list, so in ascending order.
        frames.rev().for_each(|frame| self.push(frame));
        self.withheld.fetch_add(count.wrapping_neg(), Ordering::Release);
    }

    /// Returns the count of frames that are withheld until their memory is resident. It only falls.
    #[inline]
    #[must_use]
    pub fn withheld(&self) -> u32 {
        u32::try_from(self.withheld.load(Ordering::Acquire)).unwrap_or(u32::MAX)
    }

    /// Returns the count of frames, at least 1.
    #[must_use]
    pub fn len(&self) -> u32 {
        u32::try_from(self.frames.len()).unwrap_or(u32::MAX)
    }

    /// Always returns false: there is at least one frame.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Returns the count of frames in each shard.
    #[must_use]
    pub fn shard_frames(&self) -> u32 {
        self.shard_frames
    }

    /// Prefetches the frame's word. No effect if there is no such frame.
    #[inline]
    pub fn prefetch_word(&self, frame: u32) {
        if let Some(frame) = self.frames.get(frame as usize) {
            super::super::prefetch(frame);
        }
    }

    /// Pins the frame if it contains `page` or is being filled with it. Returns [`Lookup::Other`] in all
    /// other cases, also if there is no such frame.
    #[inline]
    pub fn lookup(&self, frame: u32, page: u64) -> Lookup<'_, W> {
        let Some(entry) = self.frames.get(frame as usize) else { return Lookup::Other };
        let before = entry.word.fetch_add(PIN, Ordering::AcqRel);
        let pin = Pin { words: self, frame };
        let (state, is_it) = (before & STATE, entry.page.load(Ordering::Relaxed) == page);
        // The common case first.
        if state == PRESENT && is_it {
            Lookup::Present(pin)
        } else if (state == FILLING || state == LOST) && is_it {
            Lookup::Filling(pin)
        } else {
            Lookup::Other
        }
    }

    /// Takes a free frame of the shard for `page` and makes it Filling. `None` when the shard has no free
    /// frame, or the first one has a stray pin.
    pub fn allocate(&self, shard: &mut Shard, page: u64) -> Option<Filling<'_, W>> {
        let frame = self.pop(shard)?;
        let entry = &self.frames[frame as usize];
        let word = entry.word.load(Ordering::Acquire);
        debug_assert_eq!(word & STATE, FREE, "a frame in the list is free");
        // Stored before the state: a thread that sees the frame Filling sees this page.
        entry.page.store(page, Ordering::Relaxed);
        if word & PINS != 0 || entry.word.exchange(word, (word & !STATE) | FILLING).is_err() {
            self.push(frame);
            return None;
        }
        Some(Filling { words: self, frame })
    }

    /// Returns the page of a frame; `u64::MAX` if there is no such frame. The value is reliable for a caller
    /// with a pin that found the page, or with the [`Filling`]. For other callers it may be outdated.
    #[must_use]
    pub fn page(&self, frame: u32) -> u64 {
        self.frames.get(frame as usize).map_or(u64::MAX, |entry| entry.page.load(Ordering::Relaxed))
    }

    /// Pins the frame in any state, ordered after earlier changes of the state. `None`: there is none.
    pub fn pin(&self, frame: u32) -> Option<Pin<'_, W>> {
        let entry = self.frames.get(frame as usize)?;
        entry.word.fetch_add(PIN, Ordering::AcqRel);
        Some(Pin { words: self, frame })
    }

    /// Returns the heat of a Present frame; `None` in other states and if there is no such frame. The heat is
    /// the value of the last [`FrameWords::set_heat`] (0 after the fill) plus the hits counted since, at most
    /// [`HEAT_MAX`].
    #[must_use]
    pub fn heat(&self, frame: u32) -> Option<u8> {
        let word = self.frames.get(frame as usize)?.word.load(Ordering::Relaxed);
        (word & STATE == PRESENT).then(|| u8::try_from((word & HEATS) / HEAT).unwrap_or(0))
    }

    /// Sets the heat of a Present frame, at most [`HEAT_MAX`]; no effect in other states.
    pub fn set_heat(&self, frame: u32, heat: u8) {
        let Some(entry) = self.frames.get(frame as usize) else { return };
        let mut word = entry.word.load(Ordering::Relaxed);
        while word & STATE == PRESENT {
            let new = (word & !HEATS) | (u64::from(heat.min(HEAT_MAX)) * HEAT);
            match entry.word.exchange(word, new) {
                Ok(_) => return,
                Err(now) => word = now,
            }
        }
    }

    /// Returns true when the frame is Filling, Doomed or Lost.
    #[must_use]
    pub fn is_filling(&self, frame: u32) -> bool {
        let state = self.frames.get(frame as usize).map(|entry| entry.word.load(Ordering::Relaxed) & STATE);
        matches!(state, Some(FILLING | DOOMED | LOST))
    }

    /// Returns the count of Present frames whose page was read ahead and that no request has read yet.
    #[must_use]
    pub fn unread(&self) -> u64 {
        self.unread.load(Ordering::Relaxed)
    }

    /// Decrements the count of unread frames if `before` has UNREAD, and returns true in this case. Called
    /// when a frame's word has changed from `before` to a word without UNREAD.
    #[inline]
    fn count_read(&self, before: u64) -> bool {
        let was_unread = before & UNREAD != 0;
        if was_unread {
            self.unread.fetch_add(1_u64.wrapping_neg(), Ordering::Relaxed);
        }
        was_unread
    }

    /// Returns true when the frame has a pin now.
    #[must_use]
    pub fn is_pinned(&self, frame: u32) -> bool {
        self.frames.get(frame as usize).is_some_and(|entry| entry.word.load(Ordering::Relaxed) & PINS != 0)
    }

    /// Returns the counts of frames: free, filling (also doomed or lost), present, detached. Approximate
    /// while other threads change states.
    #[must_use]
    pub fn census(&self) -> [u32; 4] {
        let mut counts = [0; 4];
        for entry in &self.frames {
            let at = match entry.word.load(Ordering::Relaxed) & STATE {
                FREE => 0,
                FILLING | DOOMED | LOST => 1,
                PRESENT => 2,
                _ => 3,
            };
            counts[at] += 1;
        }
        counts
    }

    #[inline]
    pub(super) fn unpin(&self, frame: u32) {
        let entry = &self.frames[frame as usize];
        let before = entry.word.fetch_add(PIN.wrapping_neg(), Ordering::AcqRel);
        debug_assert!(before & PINS != 0, "an unpin without a pin");
        if before & (STATE | PINS) == DETACHED | PIN {
            self.free(frame, before - PIN);
        }
    }

    /// Frees a Detached frame whose last pin was dropped, unless it was pinned again since. In that case a
    /// later unpin frees it. `word` is the frame's word after the drop.
    #[cold]
    fn free(&self, frame: u32, word: u64) {
        let new = (word & !(STATE | HEATS | UNREAD)).wrapping_add(GENERATION);
        if self.frames[frame as usize].word.exchange(word, new).is_ok() {
            self.push(frame);
        }
    }

    fn push(&self, frame: u32) {
        let Some(head) = self.free.get((frame / self.shard_frames) as usize) else { return };
        let mut first = head.load(Ordering::Relaxed);
        loop {
            self.frames[frame as usize].page.store(first, Ordering::Relaxed);
            match head.exchange(first, u64::from(frame) + 1) {
                Ok(_) => return,
                Err(now) => first = now,
            }
        }
    }

    fn pop(&self, shard: &mut Shard) -> Option<u32> {
        let head = self.free.get(shard.0 as usize)?;
        let mut first = head.load(Ordering::Acquire);
        loop {
            let frame = u32::try_from(first.checked_sub(1)?).ok()?;
            let next = self.frames[frame as usize].page.load(Ordering::Relaxed);
            match head.exchange(first, next) {
                Ok(_) => return Some(frame),
                Err(now) => first = now,
            }
        }
    }

    /// Makes a Filling frame Present, with the other bits of `to`, and pins it. The frame is sealed before.
    /// False when its state is another; the seal is then broken.
    fn publish(&self, frame: u32, to: u64) -> bool {
        let Some(seals) = &self.seals else { return self.change(frame, FILLING, to, PIN) };
        let before = seals.load(frame);
        let entry = &self.frames[frame as usize];
        if entry.word.load(Ordering::Acquire) & STATE != FILLING {
            return false;
        }
        seals.seal(frame, before, entry.page.load(Ordering::Relaxed));
        let is_present = self.change(frame, FILLING, to, PIN);
        if !is_present {
            // The thread that doomed the frame may not have broken the seal yet. The caller now removes the
            // index entry, so a later writer does not find the frame: the seal must not outlive the entry.
            seals.break_seal(frame);
        }
        is_present
    }

    /// Breaks the seal of a frame, for the writer of a page that an index entry names for the frame.
    pub fn break_seal(&self, frame: u32) {
        if let Some(seals) = &self.seals {
            seals.break_seal(frame);
        }
    }

    /// Breaks all seals, and seals no frame from now on. Takes milliseconds for a large cache.
    pub fn close_seals(&self) {
        if let Some(seals) = &self.seals {
            seals.close();
        }
    }

    /// Seals of the frames; `None` if they were made without.
    #[must_use]
    pub fn seals(&self) -> Option<&Seals<W>> {
        self.seals.as_ref()
    }

    /// Changes the state from `from` to `to` and adds `pins`. Returns false, unchanged, in any other state.
    fn change(&self, frame: u32, from: u64, to: u64, pins: u64) -> bool {
        let entry = &self.frames[frame as usize];
        let mut word = entry.word.load(Ordering::Relaxed);
        while word & STATE == from {
            match entry.word.exchange(word, ((word & !STATE) | to) + pins) {
                Ok(_) => return true,
                Err(now) => word = now,
            }
        }
        false
    }
}

/// Keeps a frame from being freed. If the pin found the frame Present, it also keeps the bytes from changing.
#[must_use = "dropped, it is given back"]
pub struct Pin<'a, W: AtomicWord = AtomicU64> {
    words: &'a FrameWords<W>,
    frame: u32,
}

/// A [`Pin`] without a borrow, for [`FrameWords::resume`]. If it is dropped, its frame is never freed.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "dropped, its frame is never free again"]
pub struct KeptPin {
    frame: u32,
    /// Address of the [`FrameWords`] of the pinned frame.
    of: usize,
}

impl KeptPin {
    /// Returns the index of the frame.
    #[must_use]
    pub fn frame(&self) -> u32 {
        self.frame
    }

    #[inline]
    pub(super) fn is_of<W>(&self, words: &FrameWords<W>) -> bool {
        self.of == std::ptr::from_ref(words).addr()
    }
}

impl<W: AtomicWord> FrameWords<W> {
    /// Turns a kept pin into a [`Pin`] again.
    ///
    /// # Panics
    /// When the pin belongs to another cache.
    #[inline]
    pub fn resume(&self, kept: KeptPin) -> Pin<'_, W> {
        assert!(kept.is_of(self), "a pin of another cache");
        Pin { words: self, frame: kept.frame }
    }
}

/// Result of [`Pin::invalidate`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Invalidated {
    /// The frame was Present. The caller removes its entry from the index before it drops the pin.
    Detached,
    /// The frame was Filling or Lost and will not be published. The caller removes its entry from the index
    /// before it drops the pin.
    Doomed,
    /// The frame was in another state: another thread has invalidated or evicted it.
    AlreadyInvalid,
}

impl<W: AtomicWord> Pin<'_, W> {
    /// Returns the index of the frame.
    #[inline]
    #[must_use]
    pub fn frame(&self) -> u32 {
        self.frame
    }

    /// Returns the page of the frame.
    #[must_use]
    pub fn page(&self) -> u64 {
        self.words.page(self.frame)
    }

    /// Counts a hit, up to [`HEAT_MAX`]. Returns true, without a change of the heat, at the first hit of a
    /// page that was read ahead.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a part of the data path, in one place of it")]
    pub fn count_hit(&self) -> bool {
        let entry = &self.words.frames[self.frame as usize];
        let word = entry.word.load(Ordering::Relaxed);
        let flags = word & (UNREAD | STATE | HEATS);
        if flags == PRESENT | HEATS {
            return false;
        }
        if flags & UNREAD != 0 {
            return self.first_read();
        }
        if flags & STATE == PRESENT {
            // A hit that races with another change of the word is not counted.
            let _ = entry.word.exchange(word, word + HEAT);
        }
        false
    }

    /// Clears UNREAD; returns true if this call cleared it. The heat does not change: the first read of a
    /// page that was read ahead counts like the read that causes a fill.
    #[cold]
    #[inline(never)]
    fn first_read(&self) -> bool {
        let entry = &self.words.frames[self.frame as usize];
        let mut word = entry.word.load(Ordering::Relaxed);
        while word & (STATE | UNREAD) == PRESENT | UNREAD {
            match entry.word.exchange(word, word & !UNREAD) {
                Ok(_) => return self.words.count_read(word),
                Err(now) => word = now,
            }
        }
        false
    }

    /// A reference to the content of the frame, for a pin that found its page. `None`: its seal is broken, or
    /// the frames have none.
    #[inline]
    #[must_use]
    pub fn reference(&self) -> Option<Reference> {
        self.words.seals.as_ref()?.reference(self.frame, self.page())
    }

    /// Makes a Present or Lost frame Detached and a Filling frame Doomed, so that lookups do not find it.
    /// Breaks its seal. Called when the page changes on the disk. Pins that found the frame Present can still
    /// read the old bytes.
    pub fn invalidate(&self) -> Invalidated {
        let what = self.detach_or_doom();
        // Also if another thread has changed the state: it may not have broken the seal yet.
        self.words.break_seal(self.frame);
        what
    }

    fn detach_or_doom(&self) -> Invalidated {
        let entry = &self.words.frames[self.frame as usize];
        let mut word = entry.word.load(Ordering::Acquire);
        loop {
            let (to, what) = match word & STATE {
                PRESENT => (DETACHED, Invalidated::Detached),
                LOST => (DETACHED, Invalidated::Doomed),
                FILLING => (DOOMED, Invalidated::Doomed),
                _ => return Invalidated::AlreadyInvalid,
            };
            match entry.word.exchange(word, (word & !(STATE | UNREAD)) | to) {
                Ok(_) => {
                    self.words.count_read(word);
                    return what;
                }
                Err(now) => word = now,
            }
        }
    }

    /// Detaches the frame if it is Present and has no other pin. `None` when it is not, or when the word has
    /// changed meanwhile. `Some(true)`: the page was read ahead and no request has read it.
    pub fn evict(&self) -> Option<bool> {
        let entry = &self.words.frames[self.frame as usize];
        let word = entry.word.load(Ordering::Acquire);
        let is_evictable = word & (STATE | PINS) == PRESENT | PIN;
        let is_evicted =
            is_evictable && entry.word.exchange(word, (word & !(STATE | UNREAD)) | DETACHED).is_ok();
        is_evicted.then(|| {
            self.words.break_seal(self.frame);
            self.words.count_read(word)
        })
    }

    /// Turns the pin into a [`KeptPin`], which has no borrow.
    #[inline]
    pub fn keep(self) -> KeptPin {
        let kept = KeptPin { frame: self.frame, of: std::ptr::from_ref(self.words).addr() };
        std::mem::forget(self);
        kept
    }
}

impl<W: AtomicWord> Drop for Pin<'_, W> {
    #[inline]
    fn drop(&mut self) {
        self.words.unpin(self.frame);
    }
}

/// The right to write a frame. Ends by [`Filling::publish`], [`Filling::publish_unread`],
/// [`Filling::detach`] or [`Filling::lose`]. A buffer may own the right in between
/// ([`CacheCore::filling`](super::CacheCore::filling)).
#[must_use = "dropped, its frame is never free again"]
pub struct Filling<'a, W: AtomicWord = AtomicU64> {
    words: &'a FrameWords<W>,
    frame: u32,
}

impl<'a, W: AtomicWord> Filling<'a, W> {
    /// Returns the index of the frame.
    #[must_use]
    pub fn frame(&self) -> u32 {
        self.frame
    }

    /// Returns the page that is read into the frame.
    #[must_use]
    pub fn page(&self) -> u64 {
        self.words.page(self.frame)
    }

    /// Makes the frame Present, so that lookups find it. Returns a pin of the caller.
    ///
    /// # Errors
    /// The right, when the frame is Doomed: the page has changed since the fill began. The caller removes the
    /// frame from the index, then calls [`Filling::detach`].
    pub fn publish(self) -> Result<Pin<'a, W>, Filling<'a, W>> {
        let Filling { words, frame } = self;
        match words.publish(frame, PRESENT) {
            true => Ok(Pin { words, frame }),
            false => Err(self),
        }
    }

    /// As [`Filling::publish`], for a page that was read ahead.
    ///
    /// # Errors
    /// As [`Filling::publish`].
    pub fn publish_unread(self) -> Result<Pin<'a, W>, Filling<'a, W>> {
        let Filling { words, frame } = self;
        // Counted before the change: a reader may decrement the count right after it.
        words.unread.fetch_add(1, Ordering::Relaxed);
        if words.publish(frame, PRESENT | UNREAD) {
            return Ok(Pin { words, frame });
        }
        words.unread.fetch_add(1_u64.wrapping_neg(), Ordering::Relaxed);
        Err(self)
    }

    /// Makes the frame Doomed, so that it cannot be published. The caller removes the frame from the index
    /// before [`Filling::detach`].
    pub fn doom(&self) {
        self.words.change(self.frame, FILLING, DOOMED, 0);
    }

    /// Ends a fill without publication. The caller has removed the frame from the index. The bytes can be
    /// read through the returned pin. The frame becomes free when its last pin is dropped.
    pub fn detach(self) -> Pin<'a, W> {
        let Filling { words, frame } = self;
        self.doom();
        let is_changed = words.change(frame, DOOMED, DETACHED, PIN);
        debug_assert!(is_changed, "only who fills a frame ends that");
        Pin { words, frame }
    }

    /// Ends a fill whose buffer was dropped, so nothing writes to the frame any more. A Doomed frame becomes
    /// free once it has no pin, as the index does not contain it any more. A Filling frame becomes Lost, as
    /// the index may still contain it: it becomes free after [`Pin::invalidate`].
    pub fn lose(self) {
        let Filling { words, frame } = self;
        if words.change(frame, FILLING, LOST, 0) {
            return;
        }
        if words.change(frame, DOOMED, DETACHED, PIN) {
            drop(Pin { words, frame });
        }
    }

    /// Returns the frame index, for a buffer that owns the right from now on.
    pub(super) fn into_frame(self) -> u32 {
        self.frame
    }
}

impl<W: AtomicWord> FrameWords<W> {
    /// Returns the right to write a frame, for a buffer that owned it.
    pub(super) fn filling(&self, frame: u32) -> Filling<'_, W> {
        Filling { words: self, frame }
    }
}
