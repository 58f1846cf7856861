//! Received bytes of a connection: the batch, shared by all connections of a core, and the carry. The carry
//! is the connection's own copy of bytes that it did not read from earlier batches.
//!
//! ```text
//!   shell: recv -> RxBatch -> load ─> peek / consume / copy in place ─> unload -> RxBatch -> next connection
//!                                        │ incomplete header, bytes after a pending capsule
//!                                        v
//!                                      carry (read before the next batch)
//! ```
//!
//! Limits: the carry contains at most one batch and one header, because a shell does not receive for a paused
//! connection.

use nvme_spec::zerocopy::FromBytes;
use spindle_reactor::mem::{Buf, note_copied, prefetch};

/// The receive buffer of one core and its unread range. A connection owns the batch from `load` to `unload`.
#[derive(Debug, Default)]
pub struct RxBatch {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

impl RxBatch {
    /// Creates an empty batch of `capacity` bytes.
    #[must_use]
    pub fn new(capacity: usize) -> RxBatch {
        RxBatch { bytes: vec![0; capacity].into_boxed_slice(), start: 0, end: 0 }
    }

    /// Returns the unfilled part, for a receive.
    #[must_use]
    pub fn space(&mut self) -> &mut [u8] {
        &mut self.bytes[self.end..]
    }

    /// Adds the first `count` bytes of [`RxBatch::space`], which were filled, to the unread bytes.
    ///
    /// # Panics
    /// If `count` is greater than the length of [`RxBatch::space`].
    pub fn filled(&mut self, count: usize) {
        assert!(
            count <= self.bytes.len() - self.end,
            "filled {count} bytes of {}",
            self.bytes.len() - self.end
        );
        self.end += count;
    }

    /// Appends as much of `from` as fits. Returns the count of bytes copied.
    pub fn extend(&mut self, from: &[u8]) -> usize {
        let count = from.len().min(self.bytes.len() - self.end);
        self.bytes[self.end..self.end + count].copy_from_slice(&from[..count]);
        self.end += count;
        count
    }

    #[inline]
    fn unread(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    #[inline]
    fn len(&self) -> usize {
        self.end - self.start
    }

    #[inline]
    fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Returns the size of the buffer in bytes, filled or not.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.bytes.len()
    }

    /// Drops all bytes, so that [`RxBatch::space`] is the whole buffer.
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

/// A carry with more capacity than this is freed when empty, so that an idle connection stays small.
const CARRY_KEPT_BYTES: usize = 16 << 10;
/// Minimum bytes of a carry's first allocation: more than the longest header with digest and padding.
const CARRY_FIRST_BYTES: usize = 256;

/// The unread bytes of a connection, in order: the carry, then the loaded batch.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    batch: RxBatch,
    carry: Vec<u8>,
    carry_read: usize,
}

impl Inbox {
    /// # Panics
    /// If the previous batch has unread bytes: the shell must unload it first.
    #[inline]
    pub(crate) fn load(&mut self, batch: RxBatch) {
        assert!(self.batch.is_empty(), "a batch was loaded onto another");
        self.batch = batch;
    }

    /// Returns the batch, cleared. Its unread bytes are appended to the carry.
    #[inline]
    pub(crate) fn unload(&mut self) -> RxBatch {
        let mut batch = std::mem::take(&mut self.batch);
        if !batch.is_empty() {
            self.carry_over(batch.unread());
        }
        batch.clear();
        batch
    }

    /// Returns the count of unread bytes in the carry.
    pub(crate) fn carried(&self) -> usize {
        self.carry.len() - self.carry_read
    }

    /// Drops all unread bytes and frees the carry.
    pub(crate) fn clear(&mut self) {
        self.batch.clear();
        self.carry = Vec::new();
        self.carry_read = 0;
    }

    /// Returns the next `count` bytes, contiguous, without consuming them. `None`: fewer were received.
    /// Copies only while the carry is not empty.
    #[inline]
    pub(crate) fn peek(&mut self, count: usize) -> Option<&[u8]> {
        if self.carry.is_empty() { self.batch.unread().get(..count) } else { self.peek_carry(count) }
    }

    /// Returns the next bytes as a `T`, which must have alignment 1, without consuming them. `None`: fewer
    /// were received. Copies only while the carry is not empty.
    #[inline]
    pub(crate) fn peek_as<
        T: FromBytes + nvme_spec::zerocopy::KnownLayout + nvme_spec::zerocopy::Immutable,
    >(
        &mut self,
    ) -> Option<&T> {
        let bytes = self.peek(size_of::<T>())?;
        T::ref_from_bytes(bytes).ok()
    }

    /// Returns the next `N` bytes without consuming them. `None`: the batch has fewer, or there is a carry.
    #[inline]
    pub(crate) fn peek_batch<const N: usize>(&self) -> Option<&[u8; N]> {
        if self.carry.is_empty() { self.batch.unread().first_chunk() } else { None }
    }

    /// Prefetches up to two cache lines of the batch after its next `count` bytes: the following header.
    #[inline]
    pub(crate) fn prefetch_header_after(&self, count: usize) {
        if let Some(lines) = self.batch.unread().get(count..) {
            lines.chunks(64).take(2).for_each(|line| prefetch(&line[0]));
        }
    }

    /// Drops the next `count` bytes, which must be in the batch. The carry must be empty.
    #[inline]
    pub(crate) fn consume_batch(&mut self, count: usize) {
        self.batch.consume(count);
    }

    /// Drops the next `count` bytes, which a `peek` must have returned.
    #[inline]
    pub(crate) fn consume(&mut self, count: usize) {
        if self.carry.is_empty() {
            self.batch.consume(count);
        } else {
            self.consume_carry(count);
        }
    }

    /// Drops up to `most` bytes. Returns the count of bytes dropped.
    pub(crate) fn skip(&mut self, most: usize) -> usize {
        let carried = most.min(self.carried());
        if carried > 0 {
            self.consume_carry(carried);
        }
        let batched = (most - carried).min(self.batch.len());
        self.batch.consume(batched);
        carried + batched
    }

    /// Copies up to `most` bytes to offset `at` of `buf` and drops them. Returns the count of bytes copied.
    #[inline]
    pub(crate) fn copy_to(&mut self, buf: &mut Buf, at: usize, most: usize) -> usize {
        let mut copied = 0;
        if !self.carry.is_empty() {
            copied = most.min(self.carried());
            buf.copy_in(at, &self.carry[self.carry_read..self.carry_read + copied]);
            self.consume_carry(copied);
        }
        let count = (most - copied).min(self.batch.len());
        if count > 0 {
            buf.copy_in(at + copied, &self.batch.unread()[..count]);
            self.batch.consume(count);
        }
        copied + count
    }

    /// Fills `buf` from the batch and drops the copied bytes. Returns false, without effect, if the batch has
    /// fewer bytes or the carry is not empty.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a part of the data path, in one place of it")]
    pub(crate) fn copy_whole_to(&mut self, buf: &mut Buf) -> bool {
        if !self.carry.is_empty() {
            return false;
        }
        let Some(bytes) = self.batch.unread().get(..buf.len()) else { return false };
        buf.copy_in(0, bytes);
        self.batch.consume(buf.len());
        true
    }

    /// As [`Inbox::peek`] with a carry that is not empty: moves missing bytes from the batch to the carry.
    #[cold]
    fn peek_carry(&mut self, count: usize) -> Option<&[u8]> {
        let carried = self.carried();
        if carried < count {
            let missing = (count - carried).min(self.batch.len());
            self.carry.extend_from_slice(&self.batch.unread()[..missing]);
            self.batch.consume(missing);
        }
        self.carry.get(self.carry_read..self.carry_read + count)
    }

    #[cold]
    fn consume_carry(&mut self, count: usize) {
        debug_assert!(count <= self.carried());
        self.carry_read += count;
        if self.carry_read == self.carry.len() {
            self.carry_read = 0;
            self.carry.clear();
            if self.carry.capacity() > CARRY_KEPT_BYTES {
                self.carry = Vec::new();
            }
        }
    }

    #[cold]
    fn carry_over(&mut self, rest: &[u8]) {
        if self.carry.capacity() == 0 {
            self.carry.reserve(CARRY_FIRST_BYTES.max(rest.len()));
        }
        if self.carry_read > 0 {
            self.carry.drain(..self.carry_read);
            self.carry_read = 0;
        }
        note_copied(rest.len());
        self.carry.extend_from_slice(rest);
    }
}

/// Maximum bytes of a receive into the batch while a large payload is expected: some headers, and little data
/// that must be copied.
const HEADERS_BYTES: usize = 4096;

/// Predicts whether the next bytes of a connection are a large payload. If so, at most `HEADERS_BYTES` are
/// received into the batch, and the payload directly into its buffer. At first, whole batches are received.
///
/// Large payloads often follow each other: after one, receives into the batch are limited. When a limited
/// receive was full and no direct receive follows it, whole batches are received again. A wrong prediction
/// costs one system call or one copy.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Expectation {
    expects_payload: bool,
    /// The last receive into the batch filled its limit of [`HEADERS_BYTES`].
    was_cut: bool,
}

impl Expectation {
    /// Returns the maximum bytes of the next receive into the batch. To be called once before each receive; a
    /// direct one sets the expectation itself ([`Expectation::on_direct`]).
    #[inline]
    pub(crate) fn batch_bytes(&mut self) -> usize {
        if self.was_cut {
            // The last limited receive was full, and no direct receive followed it.
            *self = Expectation::default();
        }
        if self.expects_payload { HEADERS_BYTES } else { usize::MAX }
    }

    /// Records a receive into the batch. `is_full`: it returned all of [`Expectation::batch_bytes`].
    #[inline]
    pub(crate) fn on_batch(&mut self, is_full: bool) {
        self.was_cut = self.expects_payload && is_full;
    }

    /// Records a receive of a payload directly into its buffer.
    #[inline]
    pub(crate) fn on_direct(&mut self) {
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
        assert_eq!(inbox.carried(), 3);
        inbox.load(batch(&[4, 5, 6, 7]));
        assert_eq!(inbox.peek(4), Some(&[1, 2, 3, 4][..]));
        inbox.consume(2);
        assert_eq!(inbox.peek(2), Some(&[3, 4][..]));
        inbox.consume(2);
        assert_eq!(inbox.carried(), 0);
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
        inbox.load(batch(&[7; 3 * CARRY_KEPT_BYTES]));
        inbox.unload();
        assert_eq!(inbox.skip(CARRY_KEPT_BYTES), CARRY_KEPT_BYTES);
        inbox.load(batch(&[8; 10]));
        inbox.unload();
        assert_eq!(inbox.carried(), 2 * CARRY_KEPT_BYTES + 10);
        assert_eq!(inbox.skip(usize::MAX), 2 * CARRY_KEPT_BYTES + 10);
        assert_eq!(inbox.carry.capacity(), 0);
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
