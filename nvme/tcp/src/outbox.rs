//! The send queue of a connection: PDUs as pieces for `sendmsg`, removed as the socket accepts their bytes.
//!
//! ```text
//!   push ─> [ head | pad | body: a range of a Buf | tail ] [ head | .. ] [ .. ] ─> pieces ─> sendmsg
//!                                                                               └> advance ─> sent PDUs
//! ```
//! Head and tail of a PDU are stored in the queue; `sendmsg` reads payload from its buffer. The queue owns
//! the buffer until the socket has accepted the whole PDU.

use std::io::IoSlice;

use arrayvec::ArrayVec;
use nvme_spec::tcp::DIGEST_BYTES;
use nvme_spec::zerocopy::{Immutable, IntoBytes};
use spindle_reactor::mem::Buf;
use spindle_reactor::net::{PIECES_MAX, Sent, Socket};

use crate::digest;

/// Zero bytes between header and data, at most 128 minus the header (NVMe/TCP 1.0 section 3.6.1, PAD).
static PADDING: [u8; 128] = [0; 128];
/// Maximum pieces of the list that is tried first. [`PIECES_MAX`] need 16 KiB of stack, too much for one PDU.
const FEW_PIECES: usize = 16;

/// The part of a PDU between head and tail.
#[derive(Debug)]
pub(crate) enum Body {
    None,
    /// Payload: `body_bytes` bytes of this buffer, from offset `body_at` on.
    Buf(Buf),
    /// A whole PDU that is longer than a head: ICReq, ICResp, terminate request.
    Bytes(Box<[u8]>),
}

/// One PDU, or C2HData and its CapsuleResp, with a head of up to `HEAD` and a tail of up to `TAIL` bytes.
/// Built in place in the queue.
#[derive(Debug)]
pub(crate) struct OutPdu<const HEAD: usize, const TAIL: usize, K> {
    pub(crate) body: Body,
    /// Offset of the payload in its buffer, in bytes.
    pub(crate) body_at: u32,
    /// Length of the body in bytes.
    pub(crate) body_bytes: u32,
    /// The request's slot or the CID, read by the connection when the PDU is sent.
    pub(crate) key: K,
    /// Used bytes of `head`.
    head_bytes: u8,
    pad_bytes: u8,
    /// Used bytes of `tail`.
    tail_bytes: u8,
    /// Header and header digest.
    head: [u8; HEAD],
    /// Data digest, CapsuleResp and its header digest.
    tail: [u8; TAIL],
}

impl<const HEAD: usize, const TAIL: usize, K: Default> OutPdu<HEAD, TAIL, K> {
    fn empty() -> Self {
        OutPdu {
            body: Body::None,
            body_at: 0,
            body_bytes: 0,
            key: K::default(),
            head_bytes: 0,
            pad_bytes: 0,
            tail_bytes: 0,
            head: [0; HEAD],
            tail: [0; TAIL],
        }
    }

    /// Sets the header, followed by its digest if `has_digest`.
    #[inline]
    pub(crate) fn put_head<T: IntoBytes + Immutable>(&mut self, header: &T, has_digest: bool) {
        let bytes = size_of::<T>();
        self.head[..bytes].copy_from_slice(header.as_bytes());
        self.head_bytes = length_byte(bytes);
        if has_digest {
            let digest = digest::of_bytes(&self.head[..bytes]).to_le_bytes();
            self.head[bytes..bytes + DIGEST_BYTES].copy_from_slice(&digest);
            self.head_bytes += length_byte(DIGEST_BYTES);
        }
    }

    /// Sets the padding so that data begins at `data_offset` (PDO).
    #[inline]
    pub(crate) fn pad_to(&mut self, data_offset: u8) {
        self.pad_bytes = data_offset - self.head_bytes;
    }

    /// Sets padding, body and, with `has_digest`, data digest of a PDU whose head is set: `bytes` bytes of
    /// `buf` from offset `at` on.
    #[inline]
    pub(crate) fn put_data(&mut self, data_offset: u8, buf: Buf, at: u32, bytes: u32, has_digest: bool) {
        self.pad_to(data_offset);
        if has_digest {
            self.put_tail(&digest::of_buf(&buf, at as usize, bytes as usize).to_le_bytes(), false);
        }
        self.body = Body::Buf(buf);
        self.body_at = at;
        self.body_bytes = bytes;
    }

    /// Appends `part` to the tail, followed by its header digest if `has_digest`.
    #[inline]
    pub(crate) fn put_tail<T: IntoBytes + Immutable>(&mut self, part: &T, has_digest: bool) {
        let (at, bytes) = (usize::from(self.tail_bytes), size_of::<T>());
        self.tail[at..at + bytes].copy_from_slice(part.as_bytes());
        self.tail_bytes += length_byte(bytes);
        if has_digest {
            let digest = digest::of_bytes(part.as_bytes());
            self.put_tail(&digest.to_le_bytes(), false);
        }
    }

    /// Returns the length on the wire in bytes.
    #[inline]
    fn len(&self) -> usize {
        usize::from(self.head_bytes)
            + usize::from(self.pad_bytes)
            + self.body_bytes as usize
            + usize::from(self.tail_bytes)
    }
}

#[inline]
fn length_byte(len: usize) -> u8 {
    debug_assert!(len <= 128);
    u8::try_from(len).unwrap_or(0)
}

/// The send queue of one connection: a ring buffer whose length is a power of two, or 0.
#[derive(Debug, Default)]
pub(crate) struct Outbox<const HEAD: usize, const TAIL: usize, K> {
    ring: Box<[OutPdu<HEAD, TAIL, K>]>,
    /// Index of the first PDU in `ring`.
    first: usize,
    len: usize,
    /// Bytes of the first PDU already sent.
    front_sent: usize,
}

impl<const HEAD: usize, const TAIL: usize, K: Default> Outbox<HEAD, TAIL, K> {
    /// Returns the bytes of all bodies in the queue, including the sent part of the first PDU.
    pub(crate) fn unsent_bytes(&self) -> u64 {
        (0..self.len).map(|index| u64::from(self.ring[self.ring_index(index)].body_bytes)).sum()
    }

    /// Returns the bytes of the ring after `count` PDUs, 4 or more, were queued at once; no bodies.
    pub(crate) const fn bytes_for(count: usize) -> usize {
        count.next_power_of_two() * size_of::<OutPdu<HEAD, TAIL, K>>()
    }

    /// Grows the ring so that `count` PDUs fit.
    pub(crate) fn reserve(&mut self, count: usize) {
        if count > self.ring.len() {
            self.grow(count.next_power_of_two());
        }
    }

    /// Appends a PDU, empty except for its key. The caller fills in the rest.
    #[inline]
    pub(crate) fn push(&mut self, key: K) -> &mut OutPdu<HEAD, TAIL, K> {
        if self.len == self.ring.len() {
            self.grow((self.len * 2).max(4));
        }
        let entry = self.ring_index(self.len);
        self.len += 1;
        let pdu = &mut self.ring[entry];
        debug_assert!(matches!(pdu.body, Body::None), "its body was not taken");
        pdu.body_at = 0;
        pdu.body_bytes = 0;
        pdu.head_bytes = 0;
        pdu.pad_bytes = 0;
        pdu.tail_bytes = 0;
        pdu.key = key;
        pdu
    }

    /// Appends a PDU that is longer than a head.
    pub(crate) fn push_bytes(&mut self, bytes: Box<[u8]>, key: K) {
        let pdu = self.push(key);
        pdu.body_bytes = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        pdu.body = Body::Bytes(bytes);
    }

    #[cold]
    fn grow(&mut self, count: usize) {
        let mut ring = Vec::with_capacity(count);
        for index in 0..self.len {
            let entry = self.ring_index(index);
            ring.push(std::mem::replace(&mut self.ring[entry], OutPdu::empty()));
        }
        ring.resize_with(count, OutPdu::empty);
        self.ring = ring.into_boxed_slice();
        self.first = 0;
    }

    #[inline]
    fn ring_index(&self, index: usize) -> usize {
        (self.first + index) & self.ring.len().wrapping_sub(1)
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Removes all PDUs without sending them. Calls `on_removed` with the key and body of each.
    pub(crate) fn clear(&mut self, mut on_removed: impl FnMut(&K, Body)) {
        while self.len > 0 {
            let pdu = self.pop();
            let body = std::mem::replace(&mut pdu.body, Body::None);
            on_removed(&pdu.key, body);
        }
    }

    /// Appends the unsent pieces of all PDUs until `out` is full. Returns the length appended in bytes.
    #[inline]
    pub(crate) fn pieces<'a, const N: usize>(&'a self, out: &mut ArrayVec<IoSlice<'a>, N>) -> usize {
        let mut list = PieceList { out, skip: self.front_sent, bytes: 0 };
        for index in 0..self.len {
            if !list.push_pdu(&self.ring[self.ring_index(index)]) {
                break;
            }
        }
        list.bytes
    }

    /// Sends the unsent pieces, at most [`PIECES_MAX`], by one `sendmsg`. Returns the result and the bytes
    /// passed to `sendmsg`.
    #[inline]
    pub(crate) fn send_to(&self, socket: &Socket) -> (Sent, usize) {
        let mut few = ArrayVec::<IoSlice<'_>, FEW_PIECES>::new();
        let bytes = self.pieces(&mut few);
        if few.is_full() { self.send_many_to(socket) } else { (socket.send_vectored(&few), bytes) }
    }

    #[inline(never)]
    fn send_many_to(&self, socket: &Socket) -> (Sent, usize) {
        let mut pieces = ArrayVec::<IoSlice<'_>, PIECES_MAX>::new();
        let bytes = self.pieces(&mut pieces);
        (socket.send_vectored(&pieces), bytes)
    }

    /// Removes and returns the first PDU if `sent` covers its unsent bytes, and subtracts these from `sent`.
    /// Otherwise counts `sent` for the first PDU, sets it to 0 and returns `None`. To be called until `None`;
    /// if the queue is empty then, `sent` is unchanged. The caller must take the body at once, as the next
    /// `push` reuses the entry.
    #[inline]
    pub(crate) fn advance(&mut self, sent: &mut usize) -> Option<&mut OutPdu<HEAD, TAIL, K>> {
        if self.len == 0 {
            return None;
        }
        let unsent = self.ring[self.first].len() - self.front_sent;
        if *sent < unsent {
            self.front_sent += *sent;
            *sent = 0;
            return None;
        }
        *sent -= unsent;
        Some(self.pop())
    }

    #[inline]
    fn pop(&mut self) -> &mut OutPdu<HEAD, TAIL, K> {
        let entry = self.first;
        self.front_sent = 0;
        self.first = self.ring_index(1);
        self.len -= 1;
        &mut self.ring[entry]
    }
}

/// Slices of PDUs for `sendmsg`, without the first `skip` bytes.
struct PieceList<'o, 'a, const N: usize> {
    out: &'o mut ArrayVec<IoSlice<'a>, N>,
    skip: usize,
    bytes: usize,
}

impl<'a, const N: usize> PieceList<'_, 'a, N> {
    /// Appends a piece, without bytes to skip. Returns false if `out` is full and nothing was appended.
    #[inline]
    fn push_piece(&mut self, piece: &'a [u8]) -> bool {
        if self.skip >= piece.len() {
            self.skip -= piece.len();
            return true;
        }
        if self.out.is_full() {
            return false;
        }
        let piece = &piece[self.skip..];
        self.skip = 0;
        self.bytes += piece.len();
        self.out.push(IoSlice::new(piece));
        true
    }

    #[inline]
    fn push_pdu<const HEAD: usize, const TAIL: usize, K>(&mut self, pdu: &'a OutPdu<HEAD, TAIL, K>) -> bool {
        self.push_piece(&pdu.head[..usize::from(pdu.head_bytes)])
            && (pdu.pad_bytes == 0 || self.push_piece(&PADDING[..usize::from(pdu.pad_bytes)]))
            && self.push_body(&pdu.body, pdu.body_at as usize, pdu.body_bytes as usize)
            && (pdu.tail_bytes == 0 || self.push_piece(&pdu.tail[..usize::from(pdu.tail_bytes)]))
    }

    #[inline]
    fn push_body(&mut self, body: &'a Body, at: usize, bytes: usize) -> bool {
        match body {
            Body::None => true,
            Body::Bytes(all) => self.push_piece(all),
            Body::Buf(buf) => match buf.as_slice() {
                Some(slice) => self.push_piece(&slice[at..at + bytes]),
                None => self.push_segments(buf, at, bytes),
            },
        }
    }

    fn push_segments(&mut self, buf: &'a Buf, at: usize, bytes: usize) -> bool {
        let (mut before, mut remaining) = (at, bytes);
        for segment in buf.segments() {
            if before >= segment.len() {
                before -= segment.len();
                continue;
            }
            let count = remaining.min(segment.len() - before);
            if !self.push_piece(&segment[before..before + count]) {
                return false;
            }
            before = 0;
            remaining -= count;
            if remaining == 0 {
                break;
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Queue = Outbox<8, 8, u32>;

    fn queue() -> Queue {
        let mut queue = Queue::default();
        // Use three entries first, so that the queue wraps around the end of the ring.
        for _ in 0..3 {
            queue.push(0).put_head(&[0_u8], false);
            let mut sent = 1;
            assert!(queue.advance(&mut sent).is_some() && queue.is_empty());
        }
        let data = queue.push(10);
        data.put_head(&[1_u8, 2, 3], false);
        data.pad_to(5);
        data.body = Body::Buf(Buf::zeroes((2 << 20) + 9));
        data.body_at = (2 << 20) - 4;
        data.body_bytes = 9;
        data.put_tail(&[4_u8, 5], false);
        data.put_tail(&[6_u8], false);
        queue.push_bytes(Box::new([7; 20]), 11);
        queue.push(12).put_head(&[8_u8], false);
        queue
    }

    fn bytes<const N: usize>(queue: &Queue) -> Vec<u8> {
        let mut pieces = ArrayVec::<IoSlice, N>::new();
        let count = queue.pieces(&mut pieces);
        let bytes: Vec<u8> = pieces.iter().flat_map(|piece| piece.iter().copied()).collect();
        assert_eq!(bytes.len(), count);
        bytes
    }

    #[test]
    fn any_partial_send_goes_on_where_it_stopped() {
        let whole = bytes::<16>(&queue());
        assert_eq!(whole.len(), 17 + 20 + 1);
        assert_eq!(whole[..17], [1, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 5, 6]);
        for step in 1..whole.len() {
            let (mut queue, mut at, mut keys) = (queue(), 0, Vec::new());
            while !queue.is_empty() {
                assert_eq!(bytes::<16>(&queue), whole[at..]);
                let few = bytes::<2>(&queue);
                assert_eq!(few, whole[at..at + few.len()], "a short list is a prefix");
                let mut sent = step.min(whole.len() - at);
                at += sent;
                while let Some(pdu) = queue.advance(&mut sent) {
                    pdu.body = Body::None;
                    keys.push((pdu.key, at));
                }
                assert_eq!(sent, 0);
            }
            let ends = [17, 37, 38].map(|end: usize| end.next_multiple_of(step).min(38));
            assert_eq!(keys, [(10, ends[0]), (11, ends[1]), (12, ends[2])]);
        }
    }

    #[test]
    fn a_queue_grows_in_order_and_gives_back_what_it_held() {
        let mut queue = queue();
        let before = bytes::<64>(&queue);
        for key in 0..10 {
            queue.push(key).put_head(&[9_u8], true);
        }
        assert_eq!(queue.len(), 13);
        let after = bytes::<64>(&queue);
        assert_eq!(after[..before.len()], before);
        assert_eq!(after[before.len()..before.len() + 5], [9, 0x9d, 0x88, 0xcf, 0x2a]);
        let mut held = Vec::new();
        queue.clear(|key, body| held.push((*key, matches!(body, Body::None))));
        assert_eq!(held[..4], [(10, false), (11, false), (12, true), (0, true)]);
        assert!(queue.is_empty() && held.len() == 13);
    }
}
