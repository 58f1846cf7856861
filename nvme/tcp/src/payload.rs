//! The data of one PDU that is received into its buffer: copied from the inbox, or read from the socket.

use std::io::IoSliceMut;

use arrayvec::ArrayVec;
use nvme_spec::tcp::DIGEST_BYTES;
use spindle_reactor::mem::Buf;

use crate::digest;
use crate::frame::Frame;
use crate::inbox::Inbox;

/// Minimum bytes of a payload that a shell receives directly. Shorter ones are copied from the batch: one
/// receive then takes many commands with their payloads, and one send answers them. A direct receive is of
/// one payload. `scripts/compare/sizes` shows both.
pub(crate) const DIRECT_PAYLOAD_MIN: usize = 128 << 10;
/// Minimum missing bytes for a direct receive. For less, a copy is cheaper than more pieces in `readv`.
pub(crate) const DIRECT_BYTES_MIN: usize = 8 << 10;

/// The data of one PDU. Owns its buffer until the PDU is complete or the remaining bytes are skipped.
#[derive(Debug)]
pub(crate) struct Payload<K> {
    /// Identifies the command or transfer.
    pub(crate) key: K,
    pub(crate) buf: Buf,
    /// Offset in the buffer at which this PDU's data begins, in bytes.
    start: usize,
    /// Offset in the buffer of the next byte to be received.
    at: usize,
    /// Offset in the buffer after this PDU's last byte.
    end: usize,
    has_digest: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Filled {
    /// More bytes are needed.
    Partly,
    /// All data is in the buffer; its digest is correct, or there is none.
    Whole,
    /// All data is in the buffer, and its digest is wrong.
    Damaged,
}

impl<K> Payload<K> {
    /// Creates the payload of a PDU with this frame, to be received at offset `start` of `buf`.
    ///
    /// # Panics
    /// If the buffer is too short: callers must check the range first.
    #[inline]
    pub(crate) fn new(key: K, buf: Buf, start: u32, frame: &Frame) -> Self {
        let start = start as usize;
        let end = start + frame.data_bytes as usize;
        assert!(end <= buf.len(), "payload up to {end} of a buffer of {}", buf.len());
        Payload { key, buf, start, at: start, end, has_digest: frame.data_digest }
    }

    #[inline]
    pub(crate) fn end(&self) -> u32 {
        u32::try_from(self.end).unwrap_or(u32::MAX)
    }

    /// Returns the bytes still to be received, including the digest.
    pub(crate) fn remaining_bytes(&self) -> usize {
        self.end - self.at + if self.has_digest { DIGEST_BYTES } else { 0 }
    }

    /// Copies received data, without the digest, into the buffer.
    #[inline]
    pub(crate) fn copy(&mut self, inbox: &mut Inbox) {
        self.at += inbox.copy_to(&mut self.buf, self.at, self.end - self.at);
    }

    /// Returns true if all data is in the buffer and the PDU has no data digest.
    #[inline]
    pub(crate) fn is_whole(&self) -> bool {
        self.at == self.end && !self.has_digest
    }

    /// Copies received data into the buffer and checks the digest after the last byte.
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

    /// Appends the unfilled part of the buffer, as much as fits in `out`. Returns the length appended in
    /// bytes; 0 if the payload is shorter than `payload_min`, or less than [`DIRECT_BYTES_MIN`] is missing.
    pub(crate) fn direct_target<'a, const N: usize>(
        &'a mut self,
        out: &mut ArrayVec<IoSliceMut<'a>, N>,
        payload_min: usize,
    ) -> usize {
        let mut remaining = self.end - self.at;
        if remaining < DIRECT_BYTES_MIN || self.end - self.start < payload_min {
            return 0;
        }
        let (mut before, whole) = (self.at, remaining);
        for segment in self.buf.segments_mut() {
            if before >= segment.len() {
                before -= segment.len();
                continue;
            }
            if remaining == 0 || out.is_full() {
                break;
            }
            let count = remaining.min(segment.len() - before);
            out.push(IoSliceMut::new(&mut segment[before..before + count]));
            before = 0;
            remaining -= count;
        }
        whole - remaining
    }

    /// Records that the socket wrote `count` bytes to the memory from [`Payload::direct_target`].
    ///
    /// # Panics
    /// If `count` is greater than the unfilled part of the buffer.
    pub(crate) fn received_direct(&mut self, count: usize) {
        assert!(count <= self.end - self.at, "{count} bytes received, {} asked for", self.end - self.at);
        self.at += count;
    }
}
