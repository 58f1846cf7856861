//! Changes of pages: freeing frames, publishing written frames, compare-and-write, zeroing, and moving pages
//! to their places.
//!
//! ```text
//!   small frame S filled -> entry = S, pinned by the writer -> the old frame is the page's place, and free:
//!       copy S there -> entry = place, if it is still S  -> S is free
//!   otherwise the page stays at S; the thread that frees its place moves the page to it
//! ```
//!
//! The bit of a free place ([`Extents`]) is set; any other place is in the table, pinned, or owned by one
//! thread. A thread that sets the bit reads the table afterwards. A thread that publishes a page outside of
//! its place reads the bit afterwards. At least one of them sees both changes and moves the page. So a page
//! is outside of its place only while the place is in use.
//!
//! The table changes only in [`Table`], which keeps the seals of its frames.

use super::*;

/// Collects freed places, so that those of one extent are freed in one step. Small frames are freed at once.
struct Freed<'a> {
    core: &'a FrameCore,
    extent: u32,
    places: u64,
}

impl<'a> Freed<'a> {
    fn new(core: &'a FrameCore) -> Freed<'a> {
        Freed { core, extent: 0, places: 0 }
    }

    #[inline]
    fn push(&mut self, frame: u32) {
        if self.core.store.is_small(frame) {
            return self.core.put_small(frame);
        }
        let (extent, place) = (frame / EXTENT_PAGES, frame % EXTENT_PAGES);
        if extent != self.extent {
            self.flush();
            self.extent = extent;
        }
        self.places |= 1 << place;
    }

    fn flush(&mut self) {
        let places = std::mem::take(&mut self.places);
        if places != 0 {
            self.core.put_places(self.extent, places);
        }
    }
}

impl FrameStore {
    #[inline]
    pub(super) fn is_small(&self, frame: u32) -> bool {
        frame >= self.small_first
    }
}

impl FrameCore {
    /// Frees a frame that is in no entry and has no pin.
    #[inline]
    pub(super) fn put_frame(&self, frame: u32) {
        if self.store.is_small(frame) {
            self.put_small(frame);
        } else {
            self.put_places(frame / EXTENT_PAGES, 1 << (frame % EXTENT_PAGES));
        }
    }

    /// Frees adjacent frames that are in no entry and have no pin; those of one extent in one step.
    pub(super) fn put_frames(&self, frames: std::ops::Range<u32>) {
        let mut freed = Freed::new(self);
        frames.for_each(|frame| freed.push(frame));
        freed.flush();
    }

    /// Frees a whole extent that was taken for a write.
    #[cold]
    pub(super) fn put_extent(&self, extent: u32) {
        self.put_places(extent, (1 << EXTENT_PAGES) - 1);
    }

    /// Frees places (bits) of an extent. Pages that were published elsewhere meanwhile are moved to them.
    #[cold]
    fn put_places(&self, extent: u32, places: u64) {
        let Some(x) = self.store.extents.put(extent, places) else { return };
        for place in (0..EXTENT_PAGES).filter(|place| places >> place & 1 == 1) {
            self.bring_home((x * EXTENT_PAGES + place) as usize);
        }
    }

    /// Moves the page to its place if it is elsewhere and its place is free.
    fn bring_home(&self, page: usize) {
        loop {
            // Places of the last extent may be behind the end of the disk.
            if page >= self.store.table.len() {
                return;
            }
            let frame = self.store.table.load(page, Ordering::SeqCst).frame();
            if frame == NONE || frame == self.store.extents.place_of(page) {
                return;
            }
            // If the place is taken, the thread that frees it calls this function.
            let Some(place) = self.store.extents.claim(page) else { return };
            if self.move_to(page, place) {
                return;
            }
            if self.store.extents.put(place / EXTENT_PAGES, 1 << (place % EXTENT_PAGES)).is_none() {
                return; // not the home any more: a new home has been published with the page
            }
        }
    }

    /// Moves the page to `place`, which the caller has claimed. Returns false when the page has no frame any
    /// more, or another home.
    fn move_to(&self, page: usize, place: u32) -> bool {
        loop {
            let frame = self.store.table.pin(page);
            if frame == NONE {
                return false;
            }
            // Read after the pin: a thread that replaces the home does this before it changes the entries.
            let is_home = self.store.extents.place_of(page) == place;
            let is_moved = is_home && {
                self.store.copy_frame(frame, place);
                self.replace(page, frame, place)
            };
            self.unpin(page, frame);
            if is_moved || !is_home {
                return is_moved;
            }
        }
    }

    /// Puts `place` into the entry of `page` if the entry contains `frame`, which the caller has pinned and
    /// copied to `place`. Returns false when the entry contains another frame.
    fn replace(&self, page: usize, frame: u32, place: u32) -> bool {
        let before = self.store.table.exchange(page, frame, place);
        if let Some(before) = before {
            let is_free = self.store.table.retire(before);
            debug_assert!(!is_free, "the pin of the caller is among them");
        }
        before.is_some()
    }
}

impl FrameCore {
    /// Publishes `buf`, from [`FrameCore::take`] for the same `offset`. Each page changes in one step.
    ///
    /// # Panics
    /// When `buf` is not from `take` of this handle, or was taken for another offset within a page, or the
    /// range is outside of the disk.
    #[inline]
    pub fn write(self: &Rc<Self>, offset: u64, buf: Buf) {
        let result = self.publish(offset, buf, None);
        debug_assert!(result.is_ok(), "an unconditional write is not refused");
    }

    /// Publishes `buf` if the bytes on the disk equal `expected`; comparison and change are one atomic step.
    /// The range must be inside of one 4 KiB page.
    ///
    /// # Errors
    /// [`SwapError::Differs`]; nothing has changed.
    ///
    /// # Panics
    /// When the range is empty or crosses a page, when the lengths of `buf` and `expected` differ, and as
    /// [`FrameCore::write`].
    pub fn compare_and_write(
        self: &Rc<Self>,
        offset: u64,
        buf: Buf,
        expected: &Buf,
    ) -> Result<(), SwapError> {
        assert!(Self::pages(offset, buf.bytes).count() == 1, "compare-and-write of more than one page");
        assert_eq!(expected.len(), buf.len(), "compared and written bytes are of one length");
        self.publish(offset, buf, Some(expected))
    }

    fn publish(self: &Rc<Self>, offset: u64, mut buf: Buf, expected: Option<&Buf>) -> Result<(), SwapError> {
        self.assert_in_range(offset, buf.bytes);
        let is_ours =
            buf.is_writable && matches!(&buf.origin, Origin::Frames(core, ..) if Rc::ptr_eq(core, self));
        assert!(is_ours, "a buffer of another home cannot be published");
        // Equal offsets in the page: frames of the buffer and pages of the range correspond one to one.
        let start = buf.head.addr.as_ptr() as u64;
        assert_eq!(start % FRAME, offset % FRAME, "the buffer was taken for another offset");
        let head = buf.head;
        // Common case: one whole page.
        if buf.bytes == FRAME_BYTES && start.is_multiple_of(FRAME) && expected.is_none() {
            if let Some(frame) = self.store.first_frame(head) {
                self.swap(PagePosition::of(offset).page as usize, frame);
            }
            buf.head.bytes = 0;
            return Ok(());
        }
        let tail = buf.tail.take();
        let result = self.publish_pages(offset, buf.bytes, head, tail.as_deref(), expected);
        if result.is_err() {
            buf.tail = tail;
            return result; // dropping `buf` frees the frame
        }
        if let Some(tail) = tail {
            self.tails.put(tail);
        }
        // The table owns the frames now.
        buf.head.bytes = 0;
        Ok(())
    }

    fn publish_pages(
        &self,
        offset: u64,
        bytes: u32,
        head: Segment,
        tail: Option<&Tail>,
        expected: Option<&Buf>,
    ) -> Result<(), SwapError> {
        let end = usize::try_from((offset + u64::from(bytes)) / FRAME).unwrap_or(usize::MAX);
        let segments = std::iter::once(head).chain(tail.iter().flat_map(|tail| tail.0.iter().copied()));
        let frames = segments.flat_map(|segment| self.store.frames_of(segment));
        let mut freed = Freed::new(self);
        // End (exclusive) of the last whole extent; pages before it are part of that extent.
        let mut whole_end = 0;
        for ((page, skip, step), frame) in Self::pages(offset, bytes).zip(frames) {
            if page >= whole_end && self.is_whole(page, frame, end) {
                let x = page / EXTENT_PAGES as usize;
                self.store.extents.set_home(frame / EXTENT_PAGES, u32::try_from(x).unwrap_or(u32::MAX));
                whole_end = page + EXTENT_PAGES as usize;
            }
            if page < whole_end {
                let old = self.store.table.swap(page, Entry::of(frame), |frame| self.put_frame(frame));
                self.retire(old, |frame| freed.push(frame));
                // If another core has replaced the home since, no other thread moves these pages to it.
                if page + 1 == whole_end && self.store.extents.place_of(page) != frame {
                    freed.flush();
                    (whole_end - EXTENT_PAGES as usize..whole_end).for_each(|page| self.bring_home(page));
                }
            } else if step == FRAME_BYTES && expected.is_none() {
                self.swap(page, frame);
            } else {
                self.merge(page, frame, skip, step, expected)?;
            }
        }
        freed.flush();
        Ok(())
    }

    /// Returns true when a whole extent begins at `page` and at `frame`, and the buffer contains all of it.
    /// `end` is the page behind the buffer's last whole page. [`FrameCore::take`] uses extents for whole
    /// extents of pages only, but a buffer may be truncated.
    fn is_whole(&self, page: usize, frame: u32, end: usize) -> bool {
        page.is_multiple_of(EXTENT_PAGES as usize)
            && frame.is_multiple_of(EXTENT_PAGES)
            && !self.store.is_small(frame)
            && page + EXTENT_PAGES as usize <= end
    }

    /// Publishes a full page in `frame`, then copies it to its place, if free, and publishes that.
    #[inline]
    fn swap(&self, page: usize, frame: u32) {
        let store = &*self.store;
        // The entry includes a pin of this thread. Until the pin is dropped, the frame is not free, so it
        // cannot be published at this page again with other bytes.
        let here = Entry::of(frame).pinned();
        let old = store.table.swap(page, here, |old| self.put_frame(old));
        let place = old.frame();
        if old.pins() > 0 || place != store.extents.place_of(page) {
            return self.publish_away(page, frame, old);
        }
        store.copy_frame(frame, place);
        if store.table.settle(page, here, place) {
            self.put_frame(frame);
        } else {
            self.finish_swap(page, frame, place);
        }
    }

    /// Completes [`FrameCore::swap`] when the entry has changed during the copy of `frame` to `place`: other
    /// threads have pinned `frame`, or another frame has replaced it.
    #[cold]
    fn finish_swap(&self, page: usize, frame: u32, place: u32) {
        if !self.replace(page, frame, place) {
            self.put_frame(place);
        }
        self.unpin(page, frame);
    }

    /// Completes [`FrameCore::swap`] when the page cannot move at once. `frame`, which the caller has pinned,
    /// has replaced `old` in the entry.
    #[cold]
    fn publish_away(&self, page: usize, frame: u32, old: Entry) {
        self.retire(old, |old| self.put_frame(old));
        if !self.store.is_small(frame) {
            self.store.extents.end_claim(frame / EXTENT_PAGES); // part of an extent, from a truncated buffer
        }
        self.unpin(page, frame);
        self.bring_home(page);
    }

    /// Increments `pages_used` if the replaced entry `old` had no frame. Otherwise retires the old frame, and
    /// passes it to `put` if it has no pins.
    #[inline]
    fn retire(&self, old: Entry, mut put: impl FnMut(u32)) {
        if old.frame() == NONE {
            self.store.pages_used.fetch_add(1, Ordering::Relaxed);
        } else if self.store.table.retire(old) {
            put(old.frame());
        }
    }

    /// Completes `frame`, whose bytes `skip .. skip + step` are new, with the rest of the page on the disk,
    /// and publishes it. Repeats this when another core has changed the page meanwhile. Fails with
    /// [`SwapError::Differs`] when the old bytes there differ from `expected`.
    fn merge(
        &self,
        page: usize,
        frame: u32,
        skip: u32,
        step: u32,
        expected: Option<&Buf>,
    ) -> Result<(), SwapError> {
        let (skip, step) = (skip as usize, step as usize);
        loop {
            let old = self.store.table.pin(page);
            let old_bytes: &[u8] =
                if old == NONE { &[0; FRAME_BYTES as usize] } else { self.store.bytes_of(old) };
            let differs =
                expected.is_some_and(|expected| !expected.equals_at(0, &old_bytes[skip..skip + step]));
            if !differs {
                self.store.complete(frame, old_bytes, skip, step);
            }
            // While `old` is pinned, or is `NONE`, an entry that contains it still has the same bytes.
            let published = if differs { None } else { self.store.table.exchange(page, old, frame) };
            if let Some(before) = published {
                self.retire(before, |old| self.put_frame(old));
            }
            if old != NONE {
                self.unpin(page, old);
            }
            if differs {
                return Err(SwapError::Differs);
            }
            if published.is_some() {
                self.bring_home(page);
                return Ok(());
            }
        }
    }

    /// Makes `offset .. offset + bytes` read as zeroes and frees the frames of whole pages in it. With
    /// `is_released`, the memory of frames without pins is released to the kernel, unless the disk is on
    /// reserved huge pages or registered with a device. Returns false when no frame was free for a page that
    /// is zeroed in part: the pages before it are zeroed, and the caller tries again later.
    ///
    /// # Panics
    /// When the range is outside of the disk.
    #[must_use]
    pub fn zero(self: &Rc<Self>, offset: u64, bytes: u32, is_released: bool) -> bool {
        self.assert_in_range(offset, bytes);
        let mut run: std::ops::Range<u32> = 0..0;
        for (page, skip, step) in Self::pages(offset, bytes) {
            if step < FRAME_BYTES {
                if self.store.table.load(page, Ordering::Relaxed).frame() == NONE {
                    continue;
                }
                // Freed frames first: a page that is zeroed in part may need one of them.
                self.release_run(std::mem::take(&mut run));
                let Some(mut buf) = self.take(page as u64 * FRAME + u64::from(skip), step) else {
                    return false;
                };
                buf.clear();
                self.write(page as u64 * FRAME + u64::from(skip), buf);
                continue;
            }
            let before = self.store.table.swap(page, Entry::of(NONE), |frame| self.put_frame(frame));
            let old = before.frame();
            if old == NONE {
                continue;
            }
            self.store.pages_used.fetch_sub(1, Ordering::Relaxed);
            if !self.store.table.retire(before) {
                continue; // a reply is being sent from the frame; the drop of its pin frees it
            }
            if is_released {
                // No other thread uses the frame until it is freed. Adjacent ones are released with one call.
                if old == run.end {
                    run.end += 1;
                } else {
                    self.release_run(run);
                    run = old..old + 1;
                }
            } else {
                self.put_frame(old);
            }
        }
        self.release_run(run);
        true
    }

    fn release_run(&self, run: std::ops::Range<u32>) {
        if run.is_empty() {
            return;
        }
        let frame_bytes = FRAME_BYTES as usize;
        self.store.region.release(run.start as usize * frame_bytes, run.len() * frame_bytes);
        self.put_frames(run);
    }
}
