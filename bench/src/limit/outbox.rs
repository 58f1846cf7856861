//! What an end still has to send on one connection, and the memory that it is sent from.
//!
//! Messages that differ in nothing are not made one by one: a [`Stock`] holds a run of them, one after the
//! other, and a turn's worth is one slice of it. Only the reply to a read is gathered from two places, its
//! head and the block where it lies in the span.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::net::TcpStream;

use arrayvec::ArrayVec;
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, send, sendmsg};

use super::message::Kind;

/// Slices that the system takes in one call (UIO_MAXIOV).
const IOV_MAX: usize = 1024;
/// Memory that a stock takes at most for one kind of message; beyond it slots are shared.
const STOCK_BYTES_MAX: usize = 256 << 20;

/// Ready-made messages: for each kind of it a run of equal ones, as many as can be in flight, so that each
/// request in flight has payload memory of its own, as it has with any host.
#[derive(Debug)]
pub(super) struct Stock {
    block_bytes: usize,
    runs: [Run; Kind::ALL.len()],
    reply_head: Vec<u8>,
}

#[derive(Debug, Default)]
struct Run {
    bytes: Vec<u8>,
    slots: usize,
}

impl Stock {
    /// Runs of `slots` messages of each of `kinds`.
    pub(super) fn new(kinds: &[Kind], slots: usize, block_bytes: usize) -> Stock {
        let mut stock =
            Stock { block_bytes, runs: Default::default(), reply_head: message(Kind::ReadReply, 0) };
        for kind in kinds {
            let one = message(*kind, block_bytes);
            let slots = slots.min(STOCK_BYTES_MAX / one.len()).max(1);
            stock.runs[index(*kind)] = Run { bytes: one.repeat(slots), slots };
        }
        stock
    }

    fn run(&self, kind: Kind) -> &Run {
        &self.runs[index(kind)]
    }
}

fn index(kind: Kind) -> usize {
    usize::from(kind.first_byte()) - 1
}

/// One message. The payload tells its kind, so that a test can see where a block came from.
fn message(kind: Kind, block_bytes: usize) -> Vec<u8> {
    let mut bytes = vec![kind.first_byte()];
    bytes.resize(kind.head_bytes(), 0);
    bytes.resize(kind.bytes(block_bytes), PAYLOAD);
    bytes
}

/// The byte that the payload of writes is made of.
pub(super) const PAYLOAD: u8 = 0x5a;

/// What one call sends.
type Slices<'a> = ArrayVec<IoSlice<'a>, IOV_MAX>;

/// Something to send.
#[derive(Debug, Clone, Copy)]
enum Item {
    /// `count` messages of the stock, from `slot` on.
    Run { kind: Kind, slot: usize, count: usize },
    /// The reply to a read, its block at this offset of the span.
    Block { at: usize },
}

/// The messages that wait to be sent on one connection, in order.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    items: VecDeque<Item>,
    /// Bytes of the first item that are sent already.
    sent: usize,
    /// The slot of the next message of a run.
    slot: usize,
}

impl Outbox {
    /// Whether everything is sent.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Send `count` messages of a kind that the stock has.
    #[inline]
    pub(super) fn push(&mut self, kind: Kind, more: usize, stock: &Stock) {
        let slots = stock.run(kind).slots;
        let slot = self.slot % slots;
        self.slot = (slot + more) % slots;
        if let Some(Item::Run { kind: last, slot: first, count }) = self.items.back_mut()
            && *last == kind
            && (*first + *count) % slots == slot
        {
            *count += more;
            return;
        }
        self.items.push_back(Item::Run { kind, slot, count: more });
    }

    /// Send the reply to a read, with the block at offset `at` of the span.
    #[inline]
    pub(super) fn push_block(&mut self, at: usize) {
        self.items.push_back(Item::Block { at });
    }

    /// Send as much as the socket takes, in one call if it takes all of it.
    ///
    /// # Errors
    /// The system's, except that a full socket is none.
    #[inline]
    pub(super) fn flush(&mut self, socket: &TcpStream, stock: &Stock, span: &[u8]) -> io::Result<()> {
        while !self.items.is_empty() {
            // Filled in place: a list of this size is too large to be moved in every turn.
            let mut slices = ArrayVec::new();
            self.gather(stock, span, &mut slices);
            let total: usize = slices.iter().map(|slice| slice.len()).sum();
            let sent = match slices.as_slice() {
                // Without a list of slices the system copies less in.
                [only] => send(socket, only, SendFlags::NOSIGNAL),
                all => sendmsg(socket, all, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL),
            };
            match sent {
                Ok(sent) => {
                    self.advance(sent, stock);
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

    /// Put the next slices to send into `slices`.
    #[inline]
    fn gather<'a>(&self, stock: &'a Stock, span: &'a [u8], slices: &mut Slices<'a>) {
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
                Item::Run { kind, slot, count } => push_run(stock, kind, slot, count, &mut push),
                Item::Block { at } => push(&stock.reply_head) && push(&span[at..at + stock.block_bytes]),
            };
            if !has_room {
                break;
            }
        }
    }

    /// So many bytes of it were sent.
    #[inline]
    fn advance(&mut self, sent: usize, stock: &Stock) {
        self.sent += sent;
        while let Some(item) = self.items.front() {
            let bytes = match *item {
                Item::Run { kind, count, .. } => count * kind.bytes(stock.block_bytes),
                Item::Block { .. } => Kind::ReadReply.bytes(stock.block_bytes),
            };
            if self.sent < bytes {
                break;
            }
            self.sent -= bytes;
            self.items.pop_front();
        }
    }
}

/// Push the slices of a run, which wraps at the end of the stock; false when there is no room for more.
#[inline]
fn push_run<'a>(
    stock: &'a Stock,
    kind: Kind,
    mut slot: usize,
    mut count: usize,
    push: &mut impl FnMut(&'a [u8]) -> bool,
) -> bool {
    let run = stock.run(kind);
    let bytes = kind.bytes(stock.block_bytes);
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

    fn gathered<'a>(outbox: &Outbox, stock: &'a Stock, span: &'a [u8]) -> Slices<'a> {
        let mut slices = Slices::new();
        outbox.gather(stock, span, &mut slices);
        slices
    }

    /// All that an outbox holds, taken out by sends of `step` bytes.
    fn drain(mut outbox: Outbox, stock: &Stock, span: &[u8], step: usize) -> Vec<u8> {
        let mut sent = Vec::new();
        while !outbox.is_empty() {
            let bytes: Vec<u8> =
                gathered(&outbox, stock, span).iter().flat_map(|slice| slice.to_vec()).take(step).collect();
            assert!(!bytes.is_empty(), "an outbox that is not empty has something to send");
            outbox.advance(bytes.len(), stock);
            sent.extend(bytes);
        }
        sent
    }

    #[test]
    fn whatever_the_sends_take_the_stream_is_the_same() {
        let stock = Stock::new(&[Kind::Done, Kind::WriteInline], 3, BLOCK);
        let span: Vec<u8> = (0..64).collect();
        let make = || {
            let mut outbox = Outbox::default();
            outbox.push(Kind::Done, 2, &stock);
            outbox.push(Kind::Done, 2, &stock); // wraps over the three slots
            outbox.push_block(32);
            outbox.push_block(0);
            outbox.push(Kind::WriteInline, 7, &stock);
            outbox
        };
        let whole = drain(make(), &stock, &span, usize::MAX);
        assert_eq!(whole.len(), 4 * 24 + 2 * (24 + BLOCK) + 7 * (72 + BLOCK));
        assert_eq!(whole[4 * 24 + 24..][..BLOCK], span[32..48]);
        for step in [1, 7, 23, 24, 25, 41, 100] {
            assert_eq!(drain(make(), &stock, &span, step), whole, "sends of {step}");
        }
    }

    #[test]
    fn equal_messages_are_one_slice() {
        let stock = Stock::new(&[Kind::Read], 128, BLOCK);
        let mut outbox = Outbox::default();
        for _ in 0..100 {
            outbox.push(Kind::Read, 1, &stock);
        }
        assert_eq!(gathered(&outbox, &stock, &[]).len(), 1);
    }

    #[test]
    fn more_than_one_call_can_take_stays_for_the_next() {
        let stock = Stock::new(&[], 1, BLOCK);
        let span = [7; BLOCK];
        let mut outbox = Outbox::default();
        for _ in 0..IOV_MAX {
            outbox.push_block(0);
        }
        assert_eq!(gathered(&outbox, &stock, &span).len(), IOV_MAX);
        assert_eq!(drain(outbox, &stock, &span, usize::MAX).len(), IOV_MAX * (24 + BLOCK));
    }
}
