//! Received bytes: the batch that a core shares out among its connections, and what a connection keeps of it.
//!
//! ```text
//!   shell: recv -> RxBatch -> load ─> peek / consume / copy in place ─> unload -> RxBatch -> next connection
//!                                        │ a cut header, bytes behind a paused command
//!                                        v
//!                                      stash (the connection's own, looked at before the next batch)
//! ```
//!
//! Limits: the stash holds at most one batch and one header, because a shell does not read for a paused
//! connection.

use nvme_spec::zerocopy::FromBytes;
use spindle_reactor::mem::{Buf, note_copied, prefetch};

/// A receive buffer of one core, with the range that is filled. It is lent to a connection while its events
/// are pulled.
#[derive(Debug, Default)]
pub struct RxBatch {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

impl RxBatch {
    /// An empty batch with room for `capacity` bytes.
    #[must_use]
    pub fn new(capacity: usize) -> RxBatch {
        RxBatch { bytes: vec![0; capacity].into_boxed_slice(), start: 0, end: 0 }
    }

    /// The room behind what is filled, for a socket to fill.
    #[must_use]
    pub fn space(&mut self) -> &mut [u8] {
        &mut self.bytes[self.end..]
    }

    /// The first `count` bytes of [`RxBatch::space`] were filled.
    ///
    /// # Panics
    /// When there is less room than that.
    pub fn filled(&mut self, count: usize) {
        assert!(
            count <= self.bytes.len() - self.end,
            "filled {count} bytes of {}",
            self.bytes.len() - self.end
        );
        self.end += count;
    }

    /// Copy as much of `from` as there is room for; how many bytes that was.
    pub fn extend(&mut self, from: &[u8]) -> usize {
        let count = from.len().min(self.bytes.len() - self.end);
        self.bytes[self.end..self.end + count].copy_from_slice(&from[..count]);
        self.end += count;
        count
    }

    /// The bytes that are not read yet.
    #[inline]
    fn unread(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    /// How many bytes are not read yet.
    #[inline]
    fn len(&self) -> usize {
        self.end - self.start
    }

    #[inline]
    fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Bytes of the whole buffer.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.bytes.len()
    }

    /// Forget what it holds; all of it is room again.
    pub fn clear(&mut self) {
        self.start = 0;
        self.end = 0;
    }

    #[inline]
    fn consume(&mut self, count: usize) {
        debug_assert!(count <= self.len());
        self.start += count;
    }
}

/// A stash that grew larger than this is given back as soon as it is empty: an idle connection stays small.
const STASH_KEPT_BYTES: usize = 16 << 10;
/// First allocation of a stash: the longest header with its digest and padding.
const STASH_FIRST_BYTES: usize = 256;

/// The unread bytes of a connection, in order: the stash, then the batch that is loaded.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    batch: RxBatch,
    stash: Vec<u8>,
    stash_read: usize,
}

impl Inbox {
    /// Take a filled batch.
    ///
    /// # Panics
    /// When the previous one was not unloaded: a bug of the shell.
    #[inline]
    pub(crate) fn load(&mut self, batch: RxBatch) {
        assert!(self.batch.is_empty(), "a batch was loaded onto another");
        self.batch = batch;
    }

    /// Give the batch back, empty; what was not read of it is kept.
    #[inline]
    pub(crate) fn unload(&mut self) -> RxBatch {
        let mut batch = std::mem::take(&mut self.batch);
        if !batch.is_empty() {
            self.keep(batch.unread());
        }
        batch.clear();
        batch
    }

    /// Bytes that are kept between batches.
    pub(crate) fn stashed(&self) -> usize {
        self.stash.len() - self.stash_read
    }

    /// Forget everything that was received.
    pub(crate) fn clear(&mut self) {
        self.batch.clear();
        self.stash = Vec::new();
        self.stash_read = 0;
    }

    /// The next `count` bytes in one piece, if they are here.
    #[inline]
    pub(crate) fn peek(&mut self, count: usize) -> Option<&[u8]> {
        if self.stash.is_empty() { self.batch.unread().get(..count) } else { self.peek_stash(count) }
    }

    /// The next bytes as a wire structure, if they are here. Its alignment is 1, so it is looked at where it
    /// lies.
    #[inline]
    pub(crate) fn peek_as<
        T: FromBytes + nvme_spec::zerocopy::KnownLayout + nvme_spec::zerocopy::Immutable,
    >(
        &mut self,
    ) -> Option<&T> {
        let bytes = self.peek(size_of::<T>())?;
        T::ref_from_bytes(bytes).ok()
    }

    /// The next `N` bytes, if they are here and in the batch.
    #[inline]
    pub(crate) fn peek_batch<const N: usize>(&self) -> Option<&[u8; N]> {
        if self.stash.is_empty() { self.batch.unread().first_chunk() } else { None }
    }

    /// The header behind the next `count` bytes will be looked at soon.
    #[inline]
    pub(crate) fn expect_header_after(&self, count: usize) {
        if let Some(lines) = self.batch.unread().get(count..) {
            lines.chunks(64).take(2).for_each(|line| prefetch(&line[0]));
        }
    }

    /// Drop the next `count` bytes, which [`Inbox::peek_batch`] gave.
    #[inline]
    pub(crate) fn consume_batch(&mut self, count: usize) {
        self.batch.consume(count);
    }

    /// Drop the next `count` bytes, which were peeked at.
    #[inline]
    pub(crate) fn consume(&mut self, count: usize) {
        if self.stash.is_empty() {
            self.batch.consume(count);
        } else {
            self.consume_stash(count);
        }
    }

    /// Drop up to `most` bytes; how many there were.
    pub(crate) fn skip(&mut self, most: usize) -> usize {
        let stashed = most.min(self.stashed());
        if stashed > 0 {
            self.consume_stash(stashed);
        }
        let batched = (most - stashed).min(self.batch.len());
        self.batch.consume(batched);
        stashed + batched
    }

    /// Copy up to `most` bytes into `buf` from `at` on; how many there were.
    #[inline]
    pub(crate) fn copy_to(&mut self, buf: &mut Buf, at: usize, most: usize) -> usize {
        let mut copied = 0;
        if !self.stash.is_empty() {
            copied = most.min(self.stashed());
            buf.copy_in(at, &self.stash[self.stash_read..self.stash_read + copied]);
            self.consume_stash(copied);
        }
        let count = (most - copied).min(self.batch.len());
        if count > 0 {
            buf.copy_in(at + copied, &self.batch.unread()[..count]);
            self.batch.consume(count);
        }
        copied + count
    }

    /// Fill all of `buf` from the batch; false when the next bytes are not all there.
    #[inline]
    pub(crate) fn copy_whole_to(&mut self, buf: &mut Buf) -> bool {
        let Some(bytes) = self.peek_batch_bytes(buf.len()) else { return false };
        buf.copy_in(0, bytes);
        self.batch.consume(buf.len());
        true
    }

    #[inline]
    fn peek_batch_bytes(&self, count: usize) -> Option<&[u8]> {
        if self.stash.is_empty() { self.batch.unread().get(..count) } else { None }
    }

    /// As [`Inbox::peek`] with something in the stash, which is topped up from the batch.
    #[cold]
    fn peek_stash(&mut self, count: usize) -> Option<&[u8]> {
        let stashed = self.stashed();
        if stashed < count {
            let missing = (count - stashed).min(self.batch.len());
            self.stash.extend_from_slice(&self.batch.unread()[..missing]);
            self.batch.consume(missing);
        }
        self.stash.get(self.stash_read..self.stash_read + count)
    }

    #[cold]
    fn consume_stash(&mut self, count: usize) {
        debug_assert!(count <= self.stashed());
        self.stash_read += count;
        if self.stash_read == self.stash.len() {
            self.stash_read = 0;
            self.stash.clear();
            if self.stash.capacity() > STASH_KEPT_BYTES {
                self.stash = Vec::new();
            }
        }
    }

    #[cold]
    fn keep(&mut self, rest: &[u8]) {
        if self.stash.capacity() == 0 {
            self.stash.reserve(STASH_FIRST_BYTES.max(rest.len()));
        }
        if self.stash_read > 0 {
            self.stash.drain(..self.stash_read);
            self.stash_read = 0;
        }
        note_copied(rest.len());
        self.stash.extend_from_slice(rest);
    }
}

/// Bytes of a batch while a large payload is expected: some headers, and little that has to be copied.
const HEADERS_BYTES: usize = 4096;

/// One connection's guess whether the bytes that come next are a large payload, so that only its header
/// should be received into the batch and the payload itself straight into its place. Begins with whole
/// batches.
///
/// Payloads come in streams: after a large one, the next receive takes little. When that little was not
/// followed by a payload, whole batches are taken again. A wrong guess costs one system call or one copy,
/// never more.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Expectation {
    expects_payload: bool,
    was_cut: bool,
}

impl Expectation {
    /// How much of the batch to fill at most, when no payload is being received.
    #[inline]
    #[must_use]
    pub fn batch_bytes(&mut self) -> usize {
        if self.was_cut {
            // The last cut receive did not lead to a payload.
            *self = Expectation::default();
        }
        if self.expects_payload { HEADERS_BYTES } else { usize::MAX }
    }

    /// The batch was filled; `is_full`: with all that was asked for.
    #[inline]
    pub fn on_batch(&mut self, is_full: bool) {
        self.was_cut = self.expects_payload && is_full;
    }

    /// A payload is being received into its place.
    #[inline]
    pub fn on_direct(&mut self) {
        *self = Expectation { expects_payload: true, was_cut: false };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(bytes: &[u8]) -> RxBatch {
        let mut batch = RxBatch::new(bytes.len());
        assert_eq!(batch.extend(bytes), bytes.len());
        batch
    }

    #[test]
    fn bytes_come_in_order_over_stash_and_batches() {
        let mut inbox = Inbox::default();
        inbox.load(batch(&[1, 2, 3]));
        assert_eq!(inbox.peek(4), None);
        assert!(inbox.unload().is_empty());
        assert_eq!(inbox.stashed(), 3);
        inbox.load(batch(&[4, 5, 6, 7]));
        assert_eq!(inbox.peek(4), Some(&[1, 2, 3, 4][..]));
        inbox.consume(2);
        assert_eq!(inbox.peek(2), Some(&[3, 4][..]));
        inbox.consume(2);
        assert_eq!(inbox.stashed(), 0);
        assert_eq!(inbox.peek(3), Some(&[5, 6, 7][..]));
        inbox.consume(1);
        inbox.unload();
        inbox.load(batch(&[8, 9, 10]));
        assert_eq!(inbox.skip(3), 3);
        assert_eq!(inbox.peek(2), Some(&[9, 10][..]));
        assert_eq!(inbox.skip(9), 2);
        assert_eq!(inbox.peek(1), None);
    }

    #[test]
    fn a_large_stash_is_given_back_when_it_is_empty() {
        let mut inbox = Inbox::default();
        inbox.load(batch(&[7; 3 * STASH_KEPT_BYTES]));
        inbox.unload();
        assert_eq!(inbox.skip(STASH_KEPT_BYTES), STASH_KEPT_BYTES);
        inbox.load(batch(&[8; 10]));
        inbox.unload();
        assert_eq!(inbox.stashed(), 2 * STASH_KEPT_BYTES + 10);
        assert_eq!(inbox.skip(usize::MAX), 2 * STASH_KEPT_BYTES + 10);
        assert_eq!(inbox.stash.capacity(), 0);
    }

    #[test]
    fn headers_only_are_taken_after_a_payload_until_small_commands_come() {
        let mut expects = Expectation::default();
        assert_eq!(expects.batch_bytes(), usize::MAX);
        expects.on_batch(true);
        assert_eq!(expects.batch_bytes(), usize::MAX);
        expects.on_direct();
        assert_eq!(expects.batch_bytes(), HEADERS_BYTES);
        expects.on_batch(false); // a lone capsule
        assert_eq!(expects.batch_bytes(), HEADERS_BYTES);
        expects.on_batch(true); // a header, with its payload behind it
        expects.on_direct();
        assert_eq!(expects.batch_bytes(), HEADERS_BYTES);
        expects.on_batch(true); // many capsules
        assert_eq!(expects.batch_bytes(), usize::MAX);
    }
}
