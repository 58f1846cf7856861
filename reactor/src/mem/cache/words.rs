//! [`FrameWords`]: the state of each frame of a cache, one atomic word per frame.
//!
//! ```text
//!            allocate           publish           invalidate, evict          last unpin
//!   Free ─────────────> Filling ───────> Present ───────────────────> Detached ─────────> Free
//!                          │ invalidate                                  ^
//!                          └──────────> Doomed ── end of the fill ───────┘
//! ```
//!
//! A frame is written only while it is Filling or Doomed, by the holder of its [`Filling`]. It is read only
//! under a [`Pin`] that found it Present. A frame is freed only without pins. These three rules make the
//! slices of [`CacheFrames`](super::CacheFrames) sound, whatever an index above them does.
//!
//! A pin is taken before the state is looked at: the addition orders the reader with every change of the
//! state. A pin that finds another state or page is given back at once ("stray").

use std::sync::atomic::{AtomicU64, Ordering};

/// An atomic 64-bit word: the standard library's, or that of a model checker.
pub trait AtomicWord: Send + Sync {
    /// With a first value.
    fn new(value: u64) -> Self;
    /// See [`AtomicU64::load`].
    fn load(&self, order: Ordering) -> u64;
    /// See [`AtomicU64::store`].
    fn store(&self, value: u64, order: Ordering);
    /// See [`AtomicU64::fetch_add`].
    fn fetch_add(&self, value: u64, order: Ordering) -> u64;
    /// See [`AtomicU64::compare_exchange`], with [`Ordering::AcqRel`] and [`Ordering::Acquire`].
    ///
    /// # Errors
    /// The value that it has instead of `current`.
    fn exchange(&self, current: u64, new: u64) -> Result<u64, u64>;
}

impl AtomicWord for AtomicU64 {
    #[inline]
    fn new(value: u64) -> Self {
        AtomicU64::new(value)
    }

    #[inline]
    fn load(&self, order: Ordering) -> u64 {
        AtomicU64::load(self, order)
    }

    #[inline]
    fn store(&self, value: u64, order: Ordering) {
        AtomicU64::store(self, value, order);
    }

    #[inline]
    fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
        AtomicU64::fetch_add(self, value, order)
    }

    #[inline]
    fn exchange(&self, current: u64, new: u64) -> Result<u64, u64> {
        self.compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire)
    }
}

/// generation (31) | unread (1) | state (3) | heat (2) | pins (27). More pins than there can be requests in a
/// process.
const PIN: u64 = 1;
const PINS: u64 = (1 << 27) - 1;
const HEAT: u64 = 1 << 27;
const HEATS: u64 = 3 << 27;
const STATE: u64 = 7 << 29;
/// Filled ahead of a request for the page, which has not come yet.
const UNREAD: u64 = 1 << 32;
const GENERATION: u64 = 1 << 33;

const FREE: u64 = 0;
const FILLING: u64 = 1 << 29;
const DOOMED: u64 = 2 << 29;
const PRESENT: u64 = 3 << 29;
const DETACHED: u64 = 4 << 29;

/// Most heat of a frame: hits that its policy tells apart.
pub const HEAT_MAX: u8 = 3;

struct Frame<W> {
    /// Which page of the disk; of a Free frame the next one in its shard's list, plus 1.
    page: W,
    word: W,
}

/// The right to allocate frames of one shard. There is one for each.
#[derive(Debug)]
pub struct Shard(u32);

/// The words of all frames. See the module.
pub struct FrameWords<W = AtomicU64> {
    frames: Box<[Frame<W>]>,
    /// For each shard its last freed frame plus 1; 0: none. Anybody pushes, only the holder of the [`Shard`]
    /// pops: what is popped does not come back in between.
    free: Box<[W]>,
    shard_frames: u32,
    /// Present frames that are unread.
    unread: W,
}

/// What [`FrameWords::look`] found.
pub enum Look<'a, W: AtomicWord> {
    /// The page, which can be read while the pin lasts.
    Present(Pin<'a, W>),
    /// The page is being filled. The pin keeps the frame from being freed.
    Filling(Pin<'a, W>),
    /// Another page, or none.
    Other,
}

impl<W: AtomicWord> FrameWords<W> {
    /// `shards` times `shard_frames` frames, all free.
    ///
    /// # Panics
    /// When they are more than `u32::MAX - 1`, or none.
    #[must_use]
    pub fn new(shards: u32, shard_frames: u32) -> (FrameWords<W>, Vec<Shard>) {
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
        };
        (words, (0..shards).map(Shard).collect())
    }

    /// How many frames.
    #[must_use]
    pub fn len(&self) -> u32 {
        u32::try_from(self.frames.len()).unwrap_or(u32::MAX)
    }

    /// False: there is at least one.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Frames of each shard.
    #[must_use]
    pub fn shard_frames(&self) -> u32 {
        self.shard_frames
    }

    /// Have the frame's word in the processor's cache soon.
    #[inline]
    pub fn expect(&self, frame: u32) {
        if let Some(frame) = self.frames.get(frame as usize) {
            super::super::prefetch(frame);
        }
    }

    /// Pin the frame if it has this page. A frame that there is not is another one.
    #[inline]
    pub fn look(&self, frame: u32, page: u64) -> Look<'_, W> {
        let Some(entry) = self.frames.get(frame as usize) else { return Look::Other };
        let before = entry.word.fetch_add(PIN, Ordering::AcqRel);
        let pin = Pin { words: self, frame };
        match before & STATE {
            PRESENT if entry.page.load(Ordering::Relaxed) == page => Look::Present(pin),
            FILLING if entry.page.load(Ordering::Relaxed) == page => Look::Filling(pin),
            _ => Look::Other,
        }
    }

    /// Take a free frame for this page; `None` when the shard has none (or a stray pin is on the one that is
    /// next).
    pub fn allocate(&self, shard: &mut Shard, page: u64) -> Option<Filling<'_, W>> {
        let frame = self.pop(shard)?;
        let entry = &self.frames[frame as usize];
        let word = entry.word.load(Ordering::Acquire);
        debug_assert_eq!(word & STATE, FREE, "a frame in the list is free");
        // Before the state: who sees the frame Filling sees of which page.
        entry.page.store(page, Ordering::Relaxed);
        if word & PINS != 0 || entry.word.exchange(word, (word & !STATE) | FILLING).is_err() {
            self.push(frame);
            return None;
        }
        Some(Filling { words: self, frame })
    }

    /// The page of a frame, as of now: a hint but for who holds a pin on it or its [`Filling`].
    #[must_use]
    pub fn page(&self, frame: u32) -> u64 {
        self.frames.get(frame as usize).map_or(u64::MAX, |entry| entry.page.load(Ordering::Relaxed))
    }

    /// Pin the frame whatever it holds, ordered after all that happened to it before.
    pub fn pin(&self, frame: u32) -> Option<Pin<'_, W>> {
        let entry = self.frames.get(frame as usize)?;
        entry.word.fetch_add(PIN, Ordering::AcqRel);
        Some(Pin { words: self, frame })
    }

    /// Hits since the heat was last taken, at most [`HEAT_MAX`]. `None`: the frame is not Present.
    #[must_use]
    pub fn heat(&self, frame: u32) -> Option<u8> {
        let word = self.frames.get(frame as usize)?.word.load(Ordering::Relaxed);
        (word & STATE == PRESENT).then(|| u8::try_from((word & HEATS) / HEAT).unwrap_or(0))
    }

    /// Set the heat of a Present frame.
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

    /// True when it is being filled, whether it will be published or not.
    #[must_use]
    pub fn is_filling(&self, frame: u32) -> bool {
        let state = self.frames.get(frame as usize).map(|entry| entry.word.load(Ordering::Relaxed) & STATE);
        matches!(state, Some(FILLING | DOOMED))
    }

    /// Present frames that were filled ahead of a request for their pages, which has not come yet.
    #[must_use]
    pub fn unread(&self) -> u64 {
        self.unread.load(Ordering::Relaxed)
    }

    /// The frame's word has changed from `before`: count what is unread no more.
    #[inline]
    fn count_read(&self, before: u64) -> bool {
        let was_unread = before & UNREAD != 0;
        if was_unread {
            self.unread.fetch_add(1_u64.wrapping_neg(), Ordering::Relaxed);
        }
        was_unread
    }

    /// True when something pins it now.
    #[must_use]
    pub fn is_pinned(&self, frame: u32) -> bool {
        self.frames.get(frame as usize).is_some_and(|entry| entry.word.load(Ordering::Relaxed) & PINS != 0)
    }

    /// How many frames are in each state, nearly, where others work: free, filling (doomed ones too),
    /// present, detached.
    #[must_use]
    pub fn census(&self) -> [u32; 4] {
        let mut counts = [0; 4];
        for entry in &self.frames {
            let at = match entry.word.load(Ordering::Relaxed) & STATE {
                FREE => 0,
                FILLING | DOOMED => 1,
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

    /// The unpin that brings a Detached frame to zero pins frees it, unless it was pinned since: then a later
    /// unpin does.
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

    /// Change the state while it is `from`; false when it is another.
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

/// Keeps a frame from being freed, and one that was found Present from being changed.
#[must_use = "dropped, it is given back"]
pub struct Pin<'a, W: AtomicWord = AtomicU64> {
    words: &'a FrameWords<W>,
    frame: u32,
}

/// A [`Pin`] that is put away, to be taken out by [`FrameWords::resume`]. Dropped, its frame is lost.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "dropped, its frame is never free again"]
pub struct KeptPin {
    frame: u32,
    /// Address of the words that it is of.
    of: usize,
}

impl KeptPin {
    /// Of which frame.
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
    /// The pin again.
    ///
    /// # Panics
    /// When it is one of another cache.
    #[inline]
    pub fn resume(&self, kept: KeptPin) -> Pin<'_, W> {
        assert!(kept.is_of(self), "a pin of another cache");
        Pin { words: self, frame: kept.frame }
    }
}

/// What became of a frame that is to be found no longer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Invalidated {
    /// It was Present. Its entry in the index is to be removed, before the pin goes.
    Detached,
    /// It was being filled, and will not be published. Its entry is to be removed.
    Doomed,
    /// It was neither: another has done it.
    Before,
}

impl<W: AtomicWord> Pin<'_, W> {
    /// Of which frame.
    #[inline]
    #[must_use]
    pub fn frame(&self) -> u32 {
        self.frame
    }

    /// Which page the frame has.
    #[must_use]
    pub fn page(&self) -> u64 {
        self.words.page(self.frame)
    }

    /// Count a hit. True when it is the first of a page that was filled before anybody has asked for it.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a part of the data path, in one place of it")]
    pub fn warm(&self) -> bool {
        let entry = &self.words.frames[self.frame as usize];
        let word = entry.word.load(Ordering::Relaxed);
        if word & UNREAD != 0 {
            return self.first_read();
        }
        if word & HEATS != HEATS && word & STATE == PRESENT {
            // One that is lost to another core's hit is lost.
            let _ = entry.word.exchange(word, word + HEAT);
        }
        false
    }

    /// It is what the fill was for, and no use of the page beyond that: the heat stays.
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

    /// The page changes: the frame is not found any more. Its bytes stay for those who have pinned it.
    pub fn invalidate(&self) -> Invalidated {
        let entry = &self.words.frames[self.frame as usize];
        let mut word = entry.word.load(Ordering::Acquire);
        loop {
            let (to, what) = match word & STATE {
                PRESENT => (DETACHED, Invalidated::Detached),
                FILLING => (DOOMED, Invalidated::Doomed),
                _ => return Invalidated::Before,
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

    /// The same, but only of a Present frame without another pin; `None`: it is as it was. True: the page was
    /// filled ahead of a request, which has not come.
    pub fn evict(&self) -> Option<bool> {
        let entry = &self.words.frames[self.frame as usize];
        let word = entry.word.load(Ordering::Acquire);
        let may_go = word & (STATE | PINS) == PRESENT | PIN;
        let is_gone = may_go && entry.word.exchange(word, (word & !(STATE | UNREAD)) | DETACHED).is_ok();
        is_gone.then(|| self.words.count_read(word))
    }

    /// Put it away.
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

/// The right to write a frame: of who allocated it. Ends by [`Filling::publish`],
/// [`Filling::publish_unread`] or [`Filling::detach`].
#[must_use = "dropped, its frame is never free again"]
pub struct Filling<'a, W: AtomicWord = AtomicU64> {
    words: &'a FrameWords<W>,
    frame: u32,
}

impl<'a, W: AtomicWord> Filling<'a, W> {
    /// Of which frame.
    #[must_use]
    pub fn frame(&self) -> u32 {
        self.frame
    }

    /// Which page is filled.
    #[must_use]
    pub fn page(&self) -> u64 {
        self.words.page(self.frame)
    }

    /// Let the page be found. The pin is the filler's own.
    ///
    /// # Errors
    /// The page has changed since the fill began: it is not found. After the entry is removed, `detach`.
    pub fn publish(self) -> Result<Pin<'a, W>, Filling<'a, W>> {
        let Filling { words, frame } = self;
        match words.change(frame, FILLING, PRESENT, PIN) {
            true => Ok(Pin { words, frame }),
            false => Err(self),
        }
    }

    /// The same of a page that no request has asked for yet.
    ///
    /// # Errors
    /// As [`Filling::publish`].
    pub fn publish_unread(self) -> Result<Pin<'a, W>, Filling<'a, W>> {
        let Filling { words, frame } = self;
        // Before: who reads it at once counts it off.
        words.unread.fetch_add(1, Ordering::Relaxed);
        if words.change(frame, FILLING, PRESENT | UNREAD, PIN) {
            return Ok(Pin { words, frame });
        }
        words.unread.fetch_add(1_u64.wrapping_neg(), Ordering::Relaxed);
        Err(self)
    }

    /// It will not be published. Its entry is to be removed before `detach`.
    pub fn doom(&self) {
        self.words.change(self.frame, FILLING, DOOMED, 0);
    }

    /// The end of a frame that is not published, and whose entry is removed. The pin keeps the bytes for who
    /// reads them without the index; dropped, the frame is free.
    pub fn detach(self) -> Pin<'a, W> {
        let Filling { words, frame } = self;
        self.doom();
        let is_changed = words.change(frame, DOOMED, DETACHED, PIN);
        debug_assert!(is_changed, "only who fills a frame ends that");
        Pin { words, frame }
    }

    /// Its number, for who keeps the right by other means.
    pub(super) fn into_frame(self) -> u32 {
        self.frame
    }
}

impl<W: AtomicWord> FrameWords<W> {
    /// The buffer of a fill is dropped: nothing writes to the frame any more. It is free if it was doomed, as
    /// then its entry is removed; otherwise it is lost, because it may still be found as being filled.
    pub(super) fn drop_filling(&self, frame: u32) {
        if self.change(frame, DOOMED, DETACHED, PIN) {
            drop(Pin { words: self, frame });
        }
    }

    /// The right to write a frame again, of who has kept it.
    pub(super) fn filling(&self, frame: u32) -> Filling<'_, W> {
        Filling { words: self, frame }
    }
}
