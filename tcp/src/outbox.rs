//! PDUs on their way out: gathered in one piece list for a whole turn, advanced by however much a socket took.
//!
//! ```text
//!   push ─> [ head | pad | body: a range of a Buf | tail ] [ head | .. ] [ .. ] ─> pieces ─> sendmsg ─> advance ─> Done
//! ```
//! A PDU's head and tail lie in the queue itself; payload is sent from where it is. A buffer stays in the queue until its
//! last byte has left, so that nothing else can own it meanwhile.

use std::collections::VecDeque;
use std::io::IoSlice;

use arrayvec::ArrayVec;
use spindle_reactor::mem::Buf;

/// Zeroes between a header and its data; at most 128 minus the header (NVMe/TCP 1.0 section 3.6.1, PAD).
static PADDING: [u8; 128] = [0; 128];

/// What lies between head and tail.
#[derive(Debug)]
pub(crate) enum Body {
    /// Nothing.
    None,
    /// Some bytes of a buffer.
    Buf(Buf),
    /// A rare PDU that is longer than a head (ICReq, ICResp, terminate requests).
    Bytes(Box<[u8]>),
}

/// One PDU, or two that leave together (data and completion), with a head of up to `HEAD` and a tail of up to `TAIL` bytes.
#[derive(Debug)]
pub(crate) struct OutPdu<const HEAD: usize, const TAIL: usize, K> {
    /// Payload.
    pub(crate) body: Body,
    /// Which bytes of the buffer: from here,
    pub(crate) body_at: u32,
    /// so many.
    pub(crate) body_bytes: u32,
    /// Header and its digest.
    pub(crate) head: [u8; HEAD],
    /// How much of `head` there is.
    pub(crate) head_bytes: u8,
    /// Zeroes before the data.
    pub(crate) pad_bytes: u8,
    /// Data digest, and a completion.
    pub(crate) tail: [u8; TAIL],
    /// How much of `tail` there is.
    pub(crate) tail_bytes: u8,
    /// What its owner wants to know again when it has left.
    pub(crate) key: K,
}

impl<const HEAD: usize, const TAIL: usize, K> OutPdu<HEAD, TAIL, K> {
    /// A PDU that is a header.
    #[inline]
    pub(crate) fn of_head(header: &[u8], key: K) -> Self {
        let mut pdu = OutPdu {
            body: Body::None,
            body_at: 0,
            body_bytes: 0,
            head: [0; HEAD],
            head_bytes: 0,
            pad_bytes: 0,
            tail: [0; TAIL],
            tail_bytes: 0,
            key,
        };
        pdu.push_head(header);
        pdu
    }

    /// A rare PDU with bytes of its own.
    pub(crate) fn of_bytes(bytes: Box<[u8]>, key: K) -> Self {
        let body_bytes = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        OutPdu { body: Body::Bytes(bytes), body_bytes, ..Self::of_head(&[], key) }
    }

    /// Append to the head.
    #[inline]
    pub(crate) fn push_head(&mut self, bytes: &[u8]) {
        let at = usize::from(self.head_bytes);
        self.head[at..at + bytes.len()].copy_from_slice(bytes);
        self.head_bytes += short(bytes.len());
    }

    /// Append to the tail.
    #[inline]
    pub(crate) fn push_tail(&mut self, bytes: &[u8]) {
        let at = usize::from(self.tail_bytes);
        self.tail[at..at + bytes.len()].copy_from_slice(bytes);
        self.tail_bytes += short(bytes.len());
    }

    /// Bytes on the wire.
    #[inline]
    fn len(&self) -> usize {
        usize::from(self.head_bytes)
            + usize::from(self.pad_bytes)
            + self.body_bytes as usize
            + usize::from(self.tail_bytes)
    }
}

#[inline]
fn short(len: usize) -> u8 {
    debug_assert!(len <= 128);
    u8::try_from(len).unwrap_or(0)
}

/// The queue of one connection.
#[derive(Debug)]
pub(crate) struct Outbox<const HEAD: usize, const TAIL: usize, K> {
    pdus: VecDeque<OutPdu<HEAD, TAIL, K>>,
    /// How much of the first PDU has left.
    front_sent: usize,
}

impl<const HEAD: usize, const TAIL: usize, K> Default for Outbox<HEAD, TAIL, K> {
    fn default() -> Self {
        Outbox { pdus: VecDeque::new(), front_sent: 0 }
    }
}

impl<const HEAD: usize, const TAIL: usize, K> Outbox<HEAD, TAIL, K> {
    /// Make room for `count` PDUs.
    pub(crate) fn reserve(&mut self, count: usize) {
        self.pdus.reserve(count.saturating_sub(self.pdus.len()));
    }

    #[inline]
    pub(crate) fn push(&mut self, pdu: OutPdu<HEAD, TAIL, K>) {
        self.pdus.push_back(pdu);
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.pdus.is_empty()
    }

    /// How many PDUs wait.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.pdus.len()
    }

    /// Forget everything, and the buffers with it.
    pub(crate) fn clear(&mut self) {
        self.front_sent = 0;
        self.pdus.clear();
    }

    /// Forget everything; the PDUs are given back for what they hold.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = OutPdu<HEAD, TAIL, K>> {
        self.front_sent = 0;
        self.pdus.drain(..)
    }

    /// Appends the pieces of what is to be sent until `out` is full; how many bytes they are.
    #[inline]
    pub(crate) fn pieces<'a, const N: usize>(&'a self, out: &mut ArrayVec<IoSlice<'a>, N>) -> usize {
        let mut gather = Gather { out, skip: self.front_sent, bytes: 0 };
        for pdu in &self.pdus {
            if !gather.pdu(pdu) {
                break;
            }
        }
        gather.bytes
    }

    /// So many bytes have left. The next PDU of which the last byte is among them; call until `None`.
    #[inline]
    pub(crate) fn advance(&mut self, sent: &mut usize) -> Option<OutPdu<HEAD, TAIL, K>> {
        let front = self.pdus.front()?;
        let left = front.len() - self.front_sent;
        if *sent < left {
            self.front_sent += *sent;
            *sent = 0;
            return None;
        }
        *sent -= left;
        self.front_sent = 0;
        self.pdus.pop_front()
    }
}

/// Collects slices, leaving out the first `skip` bytes.
struct Gather<'o, 'a, const N: usize> {
    out: &'o mut ArrayVec<IoSlice<'a>, N>,
    skip: usize,
    bytes: usize,
}

impl<'a, const N: usize> Gather<'_, 'a, N> {
    /// False when there is no more room.
    #[inline]
    fn piece(&mut self, piece: &'a [u8]) -> bool {
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
    fn pdu<const HEAD: usize, const TAIL: usize, K>(&mut self, pdu: &'a OutPdu<HEAD, TAIL, K>) -> bool {
        self.piece(&pdu.head[..usize::from(pdu.head_bytes)])
            && (pdu.pad_bytes == 0 || self.piece(&PADDING[..usize::from(pdu.pad_bytes)]))
            && self.body(&pdu.body, pdu.body_at as usize, pdu.body_bytes as usize)
            && (pdu.tail_bytes == 0 || self.piece(&pdu.tail[..usize::from(pdu.tail_bytes)]))
    }

    #[inline]
    fn body(&mut self, body: &'a Body, at: usize, bytes: usize) -> bool {
        match body {
            Body::None => true,
            Body::Bytes(all) => self.piece(all),
            Body::Buf(buf) => match buf.as_slice() {
                Some(slice) => self.piece(&slice[at..at + bytes]),
                None => self.segments(buf, at, bytes),
            },
        }
    }

    fn segments(&mut self, buf: &'a Buf, at: usize, bytes: usize) -> bool {
        let (mut before, mut left) = (at, bytes);
        for segment in buf.segments() {
            if before >= segment.len() {
                before -= segment.len();
                continue;
            }
            let count = left.min(segment.len() - before);
            if !self.piece(&segment[before..before + count]) {
                return false;
            }
            before = 0;
            left -= count;
            if left == 0 {
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
        let mut data = OutPdu::of_head(&[1, 2, 3], 10);
        data.pad_bytes = 2;
        data.body = Body::Buf(Buf::zeroes(70_000));
        data.body_at = 65_530;
        data.body_bytes = 9;
        data.push_tail(&[4, 5]);
        data.push_tail(&[6]);
        queue.push(data);
        queue.push(OutPdu::of_bytes(Box::new([7; 20]), 11));
        queue.push(OutPdu::of_head(&[8], 12));
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
                    keys.push((pdu.key, at));
                }
                assert_eq!(sent, 0);
            }
            let ends = [17, 37, 38].map(|end: usize| end.next_multiple_of(step).min(38));
            assert_eq!(keys, [(10, ends[0]), (11, ends[1]), (12, ends[2])]);
        }
    }
}
