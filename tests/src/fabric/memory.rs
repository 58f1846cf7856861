//! The host's memory as its device knows it: keys, what they open, and for what.

use spindle_nvme_rdma::host::{self, Keys, Piece};
use spindle_nvme_rdma::work::Remote;
use spindle_reactor::mem::Buf;
use spindle_reactor::slab::Slot;

use crate::sim::Rng;

/// What the other side may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    Read,
    Write,
}

#[derive(Debug)]
struct Registered {
    key: u32,
    /// Whose buffer it is; known when its command is posted.
    chain: Option<Slot>,
    base: u64,
    bytes: u32,
    /// Where it begins in that buffer.
    offset: usize,
    access: Access,
    is_valid: bool,
}

/// Bits of a key that are its place.
const PLACE_BITS: u32 = 12;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Memory {
    places: Vec<Option<Registered>>,
    free: Vec<usize>,
    uses: u32,
}

impl Memory {
    /// Nothing is registered.
    pub(super) fn is_empty(&self) -> bool {
        self.free.len() == self.places.len()
    }

    /// Register a buffer in up to `pieces_max` pieces, each with a key and an address of its own.
    pub(super) fn register(&mut self, buf: &Buf, access: Access, pieces_max: usize, rng: &mut Rng) -> Keys {
        let bytes = u32::try_from(buf.len()).expect("a buffer");
        let pieces = if pieces_max > 1 { rng.size(1, pieces_max.min(buf.len().max(1))) } else { 1 };
        if pieces == 1 {
            return Keys::one(self.piece(0, bytes, access, rng));
        }
        let mut cuts: Vec<u32> = (1..pieces).map(|_| narrow(rng.size(1, buf.len() - 1))).collect();
        cuts.extend([0, bytes]);
        cuts.sort_unstable();
        cuts.dedup();
        let spans = cuts.windows(2).map(|cut| (cut[0], cut[1] - cut[0]));
        Keys::many(spans.map(|(offset, bytes)| self.piece(offset, bytes, access, rng)).collect())
    }

    fn piece(&mut self, offset: u32, bytes: u32, access: Access, rng: &mut Rng) -> Piece {
        let place = self.free.pop().unwrap_or_else(|| {
            self.places.push(None);
            self.places.len() - 1
        });
        assert!(place < 1 << PLACE_BITS, "many registrations");
        self.uses += 1;
        let key = self.uses << PLACE_BITS | narrow(place);
        let base = rng.draw() >> 1;
        let offset = offset as usize;
        self.places[place] =
            Some(Registered { key, chain: None, base, bytes, offset, access, is_valid: true });
        Piece { address: base, bytes, remote_key: key, local_key: 0, lease: Slot::from_wire(key) }
    }

    fn find(&mut self, key: u32) -> Option<&mut Registered> {
        let place = (key & ((1 << PLACE_BITS) - 1)) as usize;
        self.places.get_mut(place)?.as_mut().filter(|found| found.key == key)
    }

    /// The command is on its way: from now on the other side may use its keys.
    pub(super) fn open(&mut self, keys: &Keys, chain: Slot) {
        for piece in keys.pieces() {
            self.find(piece.remote_key).expect("registered").chain = Some(chain);
        }
    }

    /// The command is over.
    pub(super) fn deregister(&mut self, keys: &Keys) {
        for piece in keys.pieces() {
            assert!(self.find(piece.remote_key).is_some(), "a key came back twice");
            let place = (piece.remote_key & ((1 << PLACE_BITS) - 1)) as usize;
            self.places[place] = None;
            self.free.push(place);
        }
    }

    /// A SEND came that takes a key away. False: there is none such.
    pub(super) fn invalidate(&mut self, key: u32) -> bool {
        self.find(key).is_some_and(|found| std::mem::replace(&mut found.is_valid, false))
    }

    /// The chain and the offset in its buffer that these bytes are; `None`: access is refused.
    pub(super) fn look_up(&mut self, remote: Remote, bytes: u32, access: Access) -> Option<(Slot, usize)> {
        let found = self.find(remote.key)?;
        let at = remote.address.checked_sub(found.base)?;
        let is_inside = at.checked_add(u64::from(bytes))? <= u64::from(found.bytes);
        let chain = found.chain.filter(|_| is_inside && found.is_valid && found.access == access)?;
        Some((chain, found.offset + usize::try_from(at).ok()?))
    }
}

fn narrow(value: usize) -> u32 {
    u32::try_from(value).expect("small")
}

/// Copy into a buffer as a device does: no copy of user space, so none that is counted.
pub(super) fn put(to: &mut Buf, offset: usize, from: &[u8]) {
    let (mut skip, mut from) = (offset, from);
    for segment in to.segments_mut() {
        if skip >= segment.len() {
            skip -= segment.len();
            continue;
        }
        let (now, later) = from.split_at(from.len().min(segment.len() - skip));
        segment[skip..skip + now.len()].copy_from_slice(now);
        (skip, from) = (0, later);
        if from.is_empty() {
            break;
        }
    }
    assert!(from.is_empty(), "past the buffer's end");
}

/// The same from one buffer into another.
pub(super) fn copy(from: &Buf, offset: usize, bytes: usize, to: &mut Buf, at: usize) {
    let mut at = at;
    from.visit(offset, bytes, |piece| {
        put(to, at, piece);
        at += piece.len();
    });
}

/// A sum over some bytes, to see whether they changed.
pub(super) fn sum(of: &Buf, offset: usize, bytes: usize) -> u64 {
    let mut sum = 0_u64;
    of.visit(offset, bytes, |piece| {
        for word in piece.chunks(8) {
            let mut bytes = [0; 8];
            bytes[..word.len()].copy_from_slice(word);
            sum = sum
                .rotate_left(5)
                .wrapping_add(u64::from_le_bytes(bytes))
                .wrapping_mul(0x9e37_79b9_7f4a_7c15);
        }
    });
    sum
}

/// The host's buffer of a chain that is being read or written.
pub(super) fn buffer(host: &mut host::Conn, chain: Slot) -> &mut Buf {
    host.buffer_mut(chain).expect("a key outlives its command")
}
