//! Send queue of a connection, and the memory from which messages are sent.
//!
//! Messages of a kind are equal, so [`PreparedMessages`] contains copies of them, one after the other.
//! Consecutive messages of a kind are one slice of this memory, or two where they wrap. A reply to a read
//! needs two slices: its head and its block in the span.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::net::TcpStream;

use arrayvec::ArrayVec;
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, send, sendmsg};

use crate::message::Kind;

/// Most slices of one `sendmsg` (UIO_MAXIOV).
const IOV_MAX: usize = 1024;
/// Most bytes of prepared messages of a kind. If the depth needs more, messages in flight share slots.
const PREPARED_BYTES_MAX: usize = 256 << 20;

/// Equal messages of each kind, one after the other. The requester prepares as many as can be in flight,
/// within [`PREPARED_BYTES_MAX`]: each request then has its own payload memory, as with a real host.
#[derive(Debug)]
pub(super) struct PreparedMessages {
    block_bytes: usize,
    runs: [MessageRun; Kind::ALL.len()],
    reply_head: Vec<u8>,
}

#[derive(Debug, Default)]
struct MessageRun {
    bytes: Vec<u8>,
    slots: usize,
}

impl PreparedMessages {
    /// Prepares `slots` messages of each of `kinds`; fewer, but at least one, if they exceed
    /// [`PREPARED_BYTES_MAX`].
    pub(super) fn new(kinds: &[Kind], slots: usize, block_bytes: usize) -> PreparedMessages {
        let mut prepared = PreparedMessages {
            block_bytes,
            runs: Default::default(),
            reply_head: message(Kind::ReadReply, 0),
        };
        for kind in kinds {
            let one = message(*kind, block_bytes);
            let slots = slots.min(PREPARED_BYTES_MAX / one.len()).max(1);
            prepared.runs[index(*kind)] = MessageRun { bytes: one.repeat(slots), slots };
        }
        prepared
    }

    fn run(&self, kind: Kind) -> &MessageRun {
        &self.runs[index(kind)]
    }
}

fn index(kind: Kind) -> usize {
    usize::from(kind.first_byte()) - 1
}

/// Returns a message with payload bytes [`PAYLOAD`].
fn message(kind: Kind, block_bytes: usize) -> Vec<u8> {
    let mut bytes = vec![kind.first_byte()];
    bytes.resize(kind.head_bytes(), 0);
    bytes.resize(kind.bytes(block_bytes), PAYLOAD);
    bytes
}

/// Value of each payload byte of a write.
pub(super) const PAYLOAD: u8 = 0x5a;

/// Slices of one `sendmsg`.
type Slices<'a> = ArrayVec<IoSlice<'a>, IOV_MAX>;

/// Entry of a send queue.
#[derive(Debug, Clone, Copy)]
enum Item {
    /// `count` prepared messages from `slot` on, modulo the number of slots.
    Messages { kind: Kind, slot: usize, count: usize },
    /// Reply to a read, with the block at byte offset `at` of the span.
    ReadReply { at: usize },
}

/// Send queue of a connection.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    items: VecDeque<Item>,
    /// Number of bytes of the first item that were sent.
    sent: usize,
    /// Slot of the next message that is pushed, modulo the number of slots of its kind.
    slot: usize,
}

impl Outbox {
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Appends `more` messages of `kind`, which must be a prepared kind.
    #[inline]
    pub(super) fn push(&mut self, kind: Kind, more: usize, prepared: &PreparedMessages) {
        let slots = prepared.run(kind).slots;
        let slot = self.slot % slots;
        self.slot = (slot + more) % slots;
        if let Some(Item::Messages { kind: last, slot: first, count }) = self.items.back_mut()
            && *last == kind
            && (*first + *count) % slots == slot
        {
            *count += more;
            return;
        }
        self.items.push_back(Item::Messages { kind, slot, count: more });
    }

    /// Appends a reply to a read, with the block at byte offset `at` of the span.
    #[inline]
    pub(super) fn push_block(&mut self, at: usize) {
        self.items.push_back(Item::ReadReply { at });
    }

    /// Sends until the outbox is empty or the socket buffer is full (a short send or EAGAIN). A full buffer
    /// is no error.
    #[inline]
    pub(super) fn flush(
        &mut self,
        socket: &TcpStream,
        prepared: &PreparedMessages,
        span: &[u8],
    ) -> io::Result<()> {
        while !self.items.is_empty() {
            // Filled in place: moving 16 KiB of slices in each turn costs too much.
            let mut slices = ArrayVec::new();
            self.gather(prepared, span, &mut slices);
            let total: usize = slices.iter().map(|slice| slice.len()).sum();
            let sent = match slices.as_slice() {
                // `send` does not copy an iovec array into the kernel.
                [only] => send(socket, only, SendFlags::NOSIGNAL),
                all => sendmsg(socket, all, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL),
            };
            match sent {
                Ok(sent) => {
                    self.advance(sent, prepared);
                    if sent < total {
                        return Ok(());
                    }
                }
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Appends the unsent bytes to `slices` until it is full.
    #[inline]
    fn gather<'a>(&self, prepared: &'a PreparedMessages, span: &'a [u8], slices: &mut Slices<'a>) {
        let mut skip = self.sent;
        let mut push = |bytes: &'a [u8]| {
            if skip >= bytes.len() {
                skip -= bytes.len();
            } else if !slices.is_full() {
                slices.push(IoSlice::new(&bytes[skip..]));
                skip = 0;
            }
            !slices.is_full()
        };
        for item in &self.items {
            let has_room = match *item {
                Item::Messages { kind, slot, count } => push_messages(prepared, kind, slot, count, &mut push),
                Item::ReadReply { at } => {
                    push(&prepared.reply_head) && push(&span[at..at + prepared.block_bytes])
                }
            };
            if !has_room {
                break;
            }
        }
    }

    /// Removes `sent` bytes from the front.
    #[inline]
    fn advance(&mut self, sent: usize, prepared: &PreparedMessages) {
        self.sent += sent;
        while let Some(item) = self.items.front() {
            let bytes = match *item {
                Item::Messages { kind, count, .. } => count * kind.bytes(prepared.block_bytes),
                Item::ReadReply { .. } => Kind::ReadReply.bytes(prepared.block_bytes),
            };
            if self.sent < bytes {
                break;
            }
            self.sent -= bytes;
            self.items.pop_front();
        }
    }
}

/// Pushes the slices of `count` messages from `slot` on, modulo the number of slots. False: the list of
/// slices is full.
#[inline]
fn push_messages<'a>(
    prepared: &'a PreparedMessages,
    kind: Kind,
    mut slot: usize,
    mut count: usize,
    push: &mut impl FnMut(&'a [u8]) -> bool,
) -> bool {
    let run = prepared.run(kind);
    let bytes = kind.bytes(prepared.block_bytes);
    while count > 0 {
        let part = count.min(run.slots - slot);
        if !push(&run.bytes[slot * bytes..(slot + part) * bytes]) {
            return false;
        }
        count -= part;
        slot = 0;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: usize = 16;

    fn gathered<'a>(outbox: &Outbox, prepared: &'a PreparedMessages, span: &'a [u8]) -> Slices<'a> {
        let mut slices = Slices::new();
        outbox.gather(prepared, span, &mut slices);
        slices
    }

    /// All bytes that `outbox` sends, in sends of at most `step` bytes.
    fn drain(mut outbox: Outbox, prepared: &PreparedMessages, span: &[u8], step: usize) -> Vec<u8> {
        let mut sent = Vec::new();
        while !outbox.is_empty() {
            let bytes: Vec<u8> = gathered(&outbox, prepared, span)
                .iter()
                .flat_map(|slice| slice.to_vec())
                .take(step)
                .collect();
            assert!(!bytes.is_empty(), "an outbox that is not empty has something to send");
            outbox.advance(bytes.len(), prepared);
            sent.extend(bytes);
        }
        sent
    }

    #[test]
    fn whatever_the_sends_take_the_stream_is_the_same() {
        let prepared = PreparedMessages::new(&[Kind::Done, Kind::WriteInline], 3, BLOCK);
        let span: Vec<u8> = (0..64).collect();
        let make = || {
            let mut outbox = Outbox::default();
            outbox.push(Kind::Done, 2, &prepared);
            outbox.push(Kind::Done, 2, &prepared); // wraps over the three slots
            outbox.push_block(32);
            outbox.push_block(0);
            outbox.push(Kind::WriteInline, 7, &prepared);
            outbox
        };
        let whole = drain(make(), &prepared, &span, usize::MAX);
        assert_eq!(whole.len(), 4 * 24 + 2 * (24 + BLOCK) + 7 * (72 + BLOCK));
        assert_eq!(whole[4 * 24 + 24..][..BLOCK], span[32..48]);
        for step in [1, 7, 23, 24, 25, 41, 100] {
            assert_eq!(drain(make(), &prepared, &span, step), whole, "sends of {step}");
        }
    }

    #[test]
    fn equal_messages_are_one_slice() {
        let prepared = PreparedMessages::new(&[Kind::Read], 128, BLOCK);
        let mut outbox = Outbox::default();
        for _ in 0..100 {
            outbox.push(Kind::Read, 1, &prepared);
        }
        assert_eq!(gathered(&outbox, &prepared, &[]).len(), 1);
    }

    #[test]
    fn more_than_one_call_can_take_stays_for_the_next() {
        let prepared = PreparedMessages::new(&[], 1, BLOCK);
        let span = [7; BLOCK];
        let mut outbox = Outbox::default();
        for _ in 0..IOV_MAX {
            outbox.push_block(0);
        }
        assert_eq!(gathered(&outbox, &prepared, &span).len(), IOV_MAX);
        assert_eq!(drain(outbox, &prepared, &span, usize::MAX).len(), IOV_MAX * (24 + BLOCK));
    }
}
