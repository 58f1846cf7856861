//! Send queue of the I/O queue of `--bare`: the PDUs of a turn leave with one system call.
//!
//! ```text
//!   heads     │ CapsuleCmd │ CapsuleCmd │ H2CData │ ..    headers of the queued PDUs, one after the other
//!   payload   │ data of one write │                       sent for every write
//!   sendmsg   [ heads of PDUs without data ] [ head, part of payload ] [ head, part of payload ] ..
//! ```

use std::collections::VecDeque;
use std::io::IoSlice;

use arrayvec::ArrayVec;
use spindle_nvme_initiator::Buf;
use spindle_reactor::net::{Errno, Sent, Socket};

/// Most slices of one `sendmsg` (UIO_MAXIOV).
const IOV_MAX: usize = 1024;
type Slices<'a> = ArrayVec<IoSlice<'a>, IOV_MAX>;

/// A PDU with data, or consecutive PDUs without data.
#[derive(Debug, Clone, Copy)]
struct Item {
    /// Bytes in `heads`, with the padding before the data.
    head_bytes: usize,
    /// Range of the payload; empty without data.
    payload_at: usize,
    payload_bytes: usize,
}

#[derive(Debug)]
pub(super) struct Outbox {
    heads: Vec<u8>,
    items: VecDeque<Item>,
    /// Offset in `heads` of the first item.
    head_at: usize,
    /// Number of bytes of the first item that were sent.
    sent: usize,
    /// Number of all bytes that were ever appended, and of those that the socket has accepted.
    appended_total: u64,
    sent_total: u64,
    /// In one piece.
    payload: Buf,
}

impl Outbox {
    /// Creates an empty queue, with memory for `pdus` PDUs. `payload` is the data of every write.
    pub(super) fn new(pdus: usize, payload: Buf) -> Outbox {
        Outbox {
            // Sent heads are removed when they are half of all.
            heads: Vec::with_capacity(2 * pdus * PADDED_HEAD_MAX),
            items: VecDeque::with_capacity(pdus),
            head_at: 0,
            sent: 0,
            appended_total: 0,
            sent_total: 0,
            payload,
        }
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    #[inline]
    pub(super) fn appended_total(&self) -> u64 {
        self.appended_total
    }

    #[inline]
    pub(super) fn sent_total(&self) -> u64 {
        self.sent_total
    }

    /// Appends a PDU without data.
    #[inline]
    pub(super) fn push(&mut self, head: &[u8]) {
        self.appended_total += head.len() as u64;
        self.heads.extend_from_slice(head);
        // A first item that was sent in part stays as it is, so that it ends and its heads are removed.
        let is_begun = self.items.len() == 1 && self.sent > 0;
        if let Some(last) = self.items.back_mut().filter(|last| last.payload_bytes == 0 && !is_begun) {
            last.head_bytes += head.len();
            return;
        }
        self.items.push_back(Item { head_bytes: head.len(), payload_at: 0, payload_bytes: 0 });
    }

    /// Appends a PDU with `payload_bytes` of data, which begin at offset `pdo` of the PDU and at `payload_at`
    /// of the payload.
    ///
    /// # Panics
    /// If the data is not within the payload.
    #[inline]
    pub(super) fn push_with_data(&mut self, head: &[u8], pdo: u8, payload_at: usize, payload_bytes: usize) {
        let all = self.payload.len();
        assert!(payload_at <= all && payload_bytes <= all - payload_at, "data beyond the payload");
        let head_bytes = head.len().max(pdo.into());
        let end = self.heads.len() + head_bytes;
        self.appended_total += (head_bytes + payload_bytes) as u64;
        self.heads.extend_from_slice(head);
        self.heads.resize(end, 0);
        self.items.push_back(Item { head_bytes, payload_at, payload_bytes });
    }

    /// Sends until the queue is empty or the socket's buffer is full.
    #[inline]
    pub(super) fn flush(&mut self, socket: &Socket) -> Result<(), Errno> {
        while !self.items.is_empty() {
            let (outcome, total) = self.send_once(socket);
            match outcome {
                Sent::Bytes(sent) => {
                    self.advance(sent);
                    if sent < total {
                        return Ok(());
                    }
                }
                Sent::Full => return Ok(()),
                Sent::Failed(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    /// Sends as much as one call accepts. Returns the outcome and the number of bytes passed to the call.
    #[inline]
    fn send_once(&self, socket: &Socket) -> (Sent, usize) {
        // Filled in place: moving 16 KiB of slices in each turn costs too much.
        let mut slices = Slices::new();
        let total = self.gather(&mut slices);
        (socket.send_vectored(&slices), total)
    }

    /// Appends the unsent bytes to `slices` until it is full. Returns the number of bytes appended.
    #[inline]
    fn gather<'a>(&'a self, slices: &mut Slices<'a>) -> usize {
        let (mut skip, mut at, mut total) = (self.sent, self.head_at, 0);
        let payload = self.payload.as_slice().unwrap_or_default();
        for item in &self.items {
            let head = &self.heads[at..at + item.head_bytes];
            let data = &payload[item.payload_at..item.payload_at + item.payload_bytes];
            at += item.head_bytes;
            for bytes in [head, data] {
                let unsent = &bytes[skip.min(bytes.len())..];
                skip -= bytes.len() - unsent.len();
                if unsent.is_empty() {
                    continue;
                }
                if slices.try_push(IoSlice::new(unsent)).is_err() {
                    return total;
                }
                total += unsent.len();
            }
        }
        total
    }

    #[inline]
    fn advance(&mut self, sent: usize) {
        self.sent += sent;
        self.sent_total += sent as u64;
        while let Some(item) = self.items.front() {
            let bytes = item.head_bytes + item.payload_bytes;
            if self.sent < bytes {
                break;
            }
            self.sent -= bytes;
            self.head_at += item.head_bytes;
            self.items.pop_front();
        }
        if self.items.is_empty() {
            self.heads.clear();
            self.head_at = 0;
        } else if self.head_at > self.heads.len() / 2 {
            self.heads.drain(..self.head_at);
            self.head_at = 0;
        }
    }
}

/// Longest head with its padding: the largest CPDA aligns data to 128 bytes.
const PADDED_HEAD_MAX: usize = 128;

#[cfg(test)]
mod tests {
    use spindle_nvme_initiator::{Pages, Pool, ZoneSpec};

    use super::*;

    fn outbox() -> Outbox {
        let pool = Pool::new(&[ZoneSpec { buffer_bytes: 4096, count: 1 }], Pages::Base).expect("pool");
        let mut payload = pool.take(4096).expect("buffer");
        for (byte, value) in payload.as_mut_slice().expect("one piece").iter_mut().zip((0..=255).cycle()) {
            *byte = value;
        }
        Outbox::new(4, payload)
    }

    /// The bytes of the next call, and the number of its slices.
    fn gathered(outbox: &Outbox) -> (Vec<u8>, usize) {
        let mut slices = Slices::new();
        let total = outbox.gather(&mut slices);
        let bytes: Vec<u8> = slices.iter().flat_map(|slice| slice.to_vec()).collect();
        assert_eq!(bytes.len(), total);
        (bytes, slices.len())
    }

    /// Sends at most `step` bytes at a time; `more` is called between the sends. Returns all bytes.
    fn drain(outbox: &mut Outbox, step: usize, mut more: impl FnMut(&mut Outbox)) -> Vec<u8> {
        let mut sent = Vec::new();
        while !outbox.is_empty() {
            let bytes = gathered(outbox).0;
            let count = bytes.len().min(step);
            assert!(count > 0, "a queue that is not empty has something to send");
            sent.extend(&bytes[..count]);
            outbox.advance(count);
            more(outbox);
        }
        sent
    }

    fn fill(outbox: &mut Outbox) {
        outbox.push(&[1; 72]);
        outbox.push(&[2; 72]);
        outbox.push_with_data(&[3; 24], 32, 16, 100);
        outbox.push_with_data(&[4; 72], 72, 0, 4096);
        outbox.push(&[5; 72]);
    }

    #[test]
    fn whatever_the_sends_take_the_stream_is_the_same() {
        let mut queue = outbox();
        fill(&mut queue);
        let whole = drain(&mut queue, usize::MAX, |_| {});
        assert_eq!(whole.len(), 2 * 72 + 32 + 100 + 72 + 4096 + 72);
        assert_eq!(whole[2 * 72 + 24..][..9], [0, 0, 0, 0, 0, 0, 0, 0, 16], "padding, then data");
        for step in [1, 7, 24, 71, 72, 73, 150, 1000] {
            let mut queue = outbox();
            fill(&mut queue);
            assert_eq!(drain(&mut queue, step, |_| {}), whole, "sends of {step}");
        }
    }

    #[test]
    fn pdus_without_data_are_one_slice() {
        let mut queue = outbox();
        for _ in 0..100 {
            queue.push(&[1; 72]);
        }
        let (bytes, slices) = gathered(&queue);
        assert_eq!((bytes.len(), slices), (7200, 1));
    }

    #[test]
    fn more_than_one_call_can_take_stays_for_the_next() {
        let mut queue = outbox();
        for _ in 0..IOV_MAX {
            queue.push_with_data(&[1; 72], 72, 0, 8);
        }
        let (bytes, slices) = gathered(&queue);
        assert_eq!((bytes.len(), slices), (IOV_MAX / 2 * 80, IOV_MAX));
        assert_eq!(drain(&mut queue, usize::MAX, |_| {}).len(), IOV_MAX * 80);
    }

    #[test]
    fn a_queue_that_is_never_empty_does_not_grow() {
        for with_data in [false, true] {
            let mut queue = outbox();
            fill(&mut queue);
            let mut left = 1000;
            let sent = drain(&mut queue, 60, |queue| {
                if left > 0 {
                    left -= 1;
                    match with_data {
                        true => queue.push_with_data(&[1; 24], 24, 0, 36),
                        false => queue.push(&[1; 60]),
                    }
                }
            });
            assert!(sent.len() > 60_000);
            assert_eq!((queue.appended_total(), queue.sent_total()), (sent.len() as u64, sent.len() as u64));
            assert!(queue.heads.capacity() <= 16 << 10, "{}", queue.heads.capacity());
        }
    }
}
