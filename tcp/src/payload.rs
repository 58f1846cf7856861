//! The data of one PDU on its way into a buffer: from a batch, or by the socket straight into its place.

use std::io::IoSliceMut;

use arrayvec::ArrayVec;
use nvme_spec::tcp::DIGEST_BYTES;
use spindle_reactor::mem::Buf;

use crate::digest;
use crate::frame::Frame;
use crate::inbox::Inbox;

/// With less than this to come, one more pass through the batch is cheaper than two more pieces in a `readv`.
pub(crate) const DIRECT_BYTES_MIN: usize = 8 << 10;

/// Data being received. The buffer is here and nowhere else until the PDU is whole.
#[derive(Debug)]
pub(crate) struct Payload<K> {
    /// Whose data it is.
    pub(crate) key: K,
    /// Where it goes.
    pub(crate) buf: Buf,
    /// Where this PDU's data begins in the buffer,
    start: usize,
    /// up to where it is here,
    at: usize,
    /// and where it ends.
    end: usize,
    has_digest: bool,
}

/// What came of trying to fill a payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Filled {
    /// More bytes are needed.
    Partly,
    /// All data is in the buffer; its digest is right, or there is none.
    Whole,
    /// All data is in the buffer, and its digest says that it is damaged.
    Damaged,
}

impl<K> Payload<K> {
    /// Data of a PDU with this frame, which goes to `start` of `buf`.
    ///
    /// # Panics
    /// When the buffer is too short: every caller has checked the range against it.
    #[inline]
    pub(crate) fn new(key: K, buf: Buf, start: u32, frame: &Frame) -> Self {
        let start = start as usize;
        let end = start + frame.data_bytes as usize;
        assert!(end <= buf.len(), "payload up to {end} of a buffer of {}", buf.len());
        Payload { key, buf, start, at: start, end, has_digest: frame.data_digest }
    }

    /// Where the data ends in the buffer.
    #[inline]
    pub(crate) fn end(&self) -> u32 {
        u32::try_from(self.end).unwrap_or(u32::MAX)
    }

    /// Bytes that are still to come, those of the digest too.
    pub(crate) fn left(&self) -> usize {
        self.end - self.at + if self.has_digest { DIGEST_BYTES } else { 0 }
    }

    /// Take what is here of the data; not yet of its digest.
    #[inline]
    pub(crate) fn copy(&mut self, inbox: &mut Inbox) {
        self.at += inbox.copy_to(&mut self.buf, self.at, self.end - self.at);
    }

    /// True when all data is here and there is no digest to wait for.
    #[inline]
    pub(crate) fn is_whole(&self) -> bool {
        self.at == self.end && !self.has_digest
    }

    /// Take what is here.
    #[inline]
    pub(crate) fn fill(&mut self, inbox: &mut Inbox) -> Filled {
        if self.at < self.end {
            self.copy(inbox);
            if self.at < self.end {
                return Filled::Partly;
            }
        }
        if self.has_digest { self.check_digest(inbox) } else { Filled::Whole }
    }

    fn check_digest(&self, inbox: &mut Inbox) -> Filled {
        let Some(received) = inbox.peek(DIGEST_BYTES).and_then(|bytes| bytes.first_chunk()) else {
            return Filled::Partly;
        };
        let received = digest::from_wire(*received);
        inbox.consume(DIGEST_BYTES);
        if received == digest::of_buf(&self.buf, self.start, self.end - self.start) {
            Filled::Whole
        } else {
            Filled::Damaged
        }
    }

    /// The rest of the data's place, if it is worth a read of its own; how many bytes that is.
    pub(crate) fn direct_target<'a, const N: usize>(
        &'a mut self,
        out: &mut ArrayVec<IoSliceMut<'a>, N>,
    ) -> usize {
        let mut left = self.end - self.at;
        if left < DIRECT_BYTES_MIN {
            return 0;
        }
        let (mut before, whole) = (self.at, left);
        for segment in self.buf.segments_mut() {
            if before >= segment.len() {
                before -= segment.len();
                continue;
            }
            if left == 0 || out.is_full() {
                break;
            }
            let count = left.min(segment.len() - before);
            out.push(IoSliceMut::new(&mut segment[before..before + count]));
            before = 0;
            left -= count;
        }
        whole - left
    }

    /// A socket wrote so many bytes there.
    ///
    /// # Panics
    /// When that is more than was asked for.
    pub(crate) fn received_direct(&mut self, count: usize) {
        assert!(count <= self.end - self.at, "{count} bytes received, {} asked for", self.end - self.at);
        self.at += count;
    }
}
