//! The buffer pool of one core: zones of equal buffers in one region, taken and freed in O(1).
//!
//! A buffer comes from the smallest zone whose buffers are large enough. If that zone is empty, the buffer
//! comes from a larger one. If those are empty too, it consists of smaller buffers, one segment each. If too
//! few of these are free, or more than [`PIECES_MAX`] are needed, [`Pool::take`] returns `None` and the
//! request waits; this is not an error. Free lists are last in, first out: a busy core reuses the same few
//! buffers, which are in the processor's cache, and an idle core touches none.
//!
//! A buffer is charged to its owner until it is dropped; see [`Share`].
//! UNSAFETY: makes segments out of a region; a buffer that is not on the free list has one handle.
#![expect(unsafe_code, reason = "cuts a region into buffers")]

use std::cell::{Cell, RefCell};
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;

use arrayvec::ArrayVec;

use super::area::Area;
use super::buf::{Buf, Origin, Segment, Tail, Tails};
use super::region::{Pages, Region, RegionError};
use super::unmaps::unmaps;
use crate::affinity::current_node;
use crate::slab::Slot;

/// Maximum number of smaller buffers in one buffer. A request that needs more waits.
pub const PIECES_MAX: usize = 32;
const ZONES_MAX: usize = 16;

/// Owner of buffers: an entry of a slab, for example a connection. An owner without an entry in [`Shares`] is
/// not charged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Owner(pub(super) Slot);

impl Owner {
    /// Owner of buffers that are not charged: no slab has an entry with this index.
    pub(super) const UNCHARGED: Owner = Owner(Slot::from_wire(u16::MAX as u32));
}

/// Bytes charged to the last owner of an entry.
#[derive(Clone, Copy)]
struct Charge {
    owner: Owner,
    bytes: u64,
}

/// Bytes charged to each owner; see [`Share`] for the rule. Buffers that are still in use when their owner
/// ends (a disk may have them) are not charged to the next owner of the entry.
#[derive(Default)]
pub(super) struct Shares(RefCell<Vec<Cell<Charge>>>);

impl Shares {
    /// Extends the table to `owners` entries. The table never shrinks: a removed entry would lose its charge.
    pub(super) fn set_owners(&self, owners: usize) {
        let mut table = self.0.borrow_mut();
        if owners > table.len() {
            table.resize(owners, Cell::new(Charge { owner: Owner::UNCHARGED, bytes: 0 }));
        }
    }

    #[inline]
    pub(super) fn held(&self, owner: Owner) -> u64 {
        let held = self.0.borrow().get(owner.0.index()).map(Cell::get);
        held.filter(|held| held.owner == owner).map_or(0, |held| held.bytes)
    }

    #[inline]
    pub(super) fn take(&self, owner: Owner, bytes: u64) {
        if let Some(entry) = self.0.borrow().get(owner.0.index()) {
            let held = entry.get();
            let before = if held.owner == owner { held.bytes } else { 0 };
            entry.set(Charge { owner, bytes: before + bytes });
        }
    }

    #[inline]
    pub(super) fn give_back(&self, owner: Owner, bytes: u64) {
        let table = self.0.borrow();
        let Some(entry) = table.get(owner.0.index()) else { return };
        let held = entry.get();
        if held.owner == owner {
            debug_assert!(held.bytes >= bytes, "given back twice, or taken before there was a table");
            entry.set(Charge { owner, bytes: held.bytes.saturating_sub(bytes) });
        }
    }
}

/// Bytes that the table of owners needs for each owner.
pub const SHARE_BYTES: usize = size_of::<Charge>();

/// Size and count of the buffers of one zone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ZoneSpec {
    /// Bytes of each buffer. For [`Pool::new`]: a multiple of 4096, at most 64 MiB.
    pub buffer_bytes: u32,
    /// Count of buffers: at least 1, and at most 1 GiB of buffers in a zone.
    pub count: u32,
}

/// Error of creating a pool.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// The size or count of a zone's buffers is out of range, or the order or count of the zones is wrong.
    #[error("pool zone of {} buffers of {} bytes: {allowed}", spec.count, spec.buffer_bytes)]
    Zone {
        /// The refused zone; the first one if the count of zones is wrong.
        spec: ZoneSpec,
        /// Allowed values, for the message.
        allowed: &'static str,
    },
    /// The memory could not be mapped.
    #[error(transparent)]
    Map(#[from] RegionError),
}

struct Zone {
    spec: ZoneSpec,
    /// Offset of the first buffer in the region.
    start: usize,
    free: RefCell<Vec<u32>>,
}

pub(super) struct PoolCore {
    region: Arc<Region>,
    zones: Vec<Zone>,
    free_bytes: Cell<u64>,
    pub(super) shares: Shares,
    /// Zones from this index on are reserved; see [`Pool::keep_for`].
    kept_from: Cell<usize>,
    tails: Tails,
}

impl PoolCore {
    pub(super) fn area(&self) -> Area {
        Area::of(&self.region)
    }

    fn zone_of(&self, addr: NonNull<u8>) -> &Zone {
        let at = (addr.as_ptr() as usize).wrapping_sub(self.region.base().as_ptr() as usize);
        let behind = self.zones.partition_point(|zone| zone.start <= at);
        assert!(behind > 0 && at < self.region.bytes(), "a buffer of another pool");
        &self.zones[behind - 1]
    }

    pub(super) fn buffer_bytes(&self, addr: NonNull<u8>) -> u32 {
        self.zone_of(addr).spec.buffer_bytes
    }

    #[inline]
    pub(super) fn put(&self, zone: u8, addr: NonNull<u8>, tail: Option<Box<Tail>>, owner: Owner) {
        let mut bytes = self.put_one(&self.zones[usize::from(zone)], addr);
        if let Some(tail) = tail {
            bytes += self.put_tail(tail);
        }
        self.free_bytes.set(self.free_bytes.get() + bytes);
        self.shares.give_back(owner, bytes);
    }

    #[inline]
    fn put_one(&self, zone: &Zone, addr: NonNull<u8>) -> u64 {
        let offset = addr.as_ptr() as usize - self.region.base().as_ptr() as usize - zone.start;
        let index = offset / zone.spec.buffer_bytes as usize;
        debug_assert_eq!(offset % zone.spec.buffer_bytes as usize, 0, "not the start of a buffer");
        zone.free.borrow_mut().push(u32::try_from(index).unwrap_or(u32::MAX));
        u64::from(zone.spec.buffer_bytes)
    }

    /// Adds each segment's buffer to the free list of its zone. Returns the bytes of these buffers.
    #[cold]
    fn put_tail(&self, tail: Box<Tail>) -> u64 {
        let bytes = tail.0.iter().map(|piece| self.put_one(self.zone_of(piece.addr), piece.addr)).sum();
        self.tails.put(tail);
        bytes
    }

    #[inline]
    fn pop(&self, zone: &Zone) -> Option<NonNull<u8>> {
        let buffer = zone.free.borrow_mut().pop()?;
        let offset = zone.start + buffer as usize * zone.spec.buffer_bytes as usize;
        // SAFETY: `map_zones` sized the region as the sum of the zones, and free lists contain indices
        // below `count`.
        Some(unsafe { self.region.base().add(offset) })
    }

    /// Takes a buffer that consists of smaller ones, from zones with an index below `end`. `None` when these
    /// are too few for all of `bytes`, when more than [`PIECES_MAX`] are needed, or when `bytes` exceeds the
    /// largest zone's buffers.
    #[cold]
    fn take_pieces(self: &Rc<Self>, bytes: u32, owner: Owner, end: usize) -> Option<Buf> {
        let smaller = self.zones.partition_point(|zone| zone.spec.buffer_bytes < bytes);
        if smaller == self.zones.len() {
            return None; // larger than the buffers of the largest zone
        }
        let free = |zone: &Zone| u32::try_from(zone.free.borrow().len()).unwrap_or(u32::MAX);
        let zones = self.zones[..smaller.min(end)].iter().map(|zone| (zone.spec.buffer_bytes, free(zone)));
        let plan = plan(bytes, zones)?;
        let mut head: Option<(Segment, usize)> = None;
        let mut tail = self.tails.take();
        let (mut left, mut charged) = (bytes, 0);
        for (index, count) in plan {
            let zone = &self.zones[index];
            for addr in (0..count).map_while(|_| self.pop(zone)) {
                let piece = Segment { addr, bytes: left.min(zone.spec.buffer_bytes) };
                left -= piece.bytes;
                charged += u64::from(zone.spec.buffer_bytes);
                if head.is_none() {
                    head = Some((piece, index));
                } else {
                    tail.0.push(piece);
                }
            }
        }
        assert_eq!(left, 0, "the plan counted what is free");
        let (head, zone) = head?;
        Some(self.charge(head, Some(tail), bytes, zone, owner, charged))
    }

    #[inline]
    fn charge(
        self: &Rc<Self>,
        head: Segment,
        tail: Option<Box<Tail>>,
        bytes: u32,
        zone: usize,
        owner: Owner,
        charged: u64,
    ) -> Buf {
        self.free_bytes.set(self.free_bytes.get() - charged);
        self.shares.take(owner, charged);
        let zone = u8::try_from(zone).unwrap_or(u8::MAX);
        Buf { head, tail, bytes, is_writable: true, origin: Origin::Pool(Rc::clone(self), zone, owner) }
    }

    /// Takes a buffer in one segment, from the smallest zone with an index below `end` that has a free buffer
    /// of at least `bytes`. `None` when there is no such zone.
    #[inline]
    fn take_one(self: &Rc<Self>, bytes: u32, owner: Owner, end: usize) -> Option<Buf> {
        for (index, zone) in self.zones.iter().enumerate() {
            if zone.spec.buffer_bytes < bytes {
                continue;
            }
            if index < end
                && let Some(addr) = self.pop(zone)
            {
                let charged = u64::from(zone.spec.buffer_bytes);
                return Some(self.charge(Segment { addr, bytes }, None, bytes, index, owner, charged));
            }
        }
        None
    }

    #[inline]
    fn take(self: &Rc<Self>, bytes: u32, owner: Owner, end: usize) -> Option<Buf> {
        self.take_one(bytes, owner, end).or_else(|| self.take_pieces(bytes, owner, end))
    }
}

/// Chooses buffers for `bytes`, as (index of the zone, count of buffers), larger ones first. All but the last
/// buffer are used in full. `None` when too few are free, or more than [`PIECES_MAX`] are needed. `zones`, in
/// ascending order: bytes of a buffer, and count of free buffers.
fn plan(
    bytes: u32,
    zones: impl DoubleEndedIterator<Item = (u32, u32)> + ExactSizeIterator,
) -> Option<ArrayVec<(usize, u32), { ZONES_MAX + 1 }>> {
    let mut plan = ArrayVec::new();
    let (mut left, mut pieces) = (bytes, 0);
    let mut spare = None;
    for (index, (buffer_bytes, free)) in zones.enumerate().rev() {
        let count = free.min(left / buffer_bytes);
        if free > count {
            // At the end this is the smallest zone with a buffer left over, which is larger than the bytes
            // left.
            spare = Some(index);
        }
        if count > 0 {
            plan.push((index, count));
            left -= count * buffer_bytes;
            pieces += count as usize;
        }
    }
    if left > 0 {
        plan.push((spare?, 1));
        pieces += 1;
    }
    (pieces <= PIECES_MAX).then_some(plan)
}

/// Returns true when an unused pool of `zones` has buffers of all `wanted` lengths at the same time, taken in
/// this order as [`Share::take_both`] takes them. Otherwise a command could wait for them forever.
/// `zones` are in ascending order of buffer size; a length of 0 needs no buffer.
#[must_use]
pub fn can_serve(zones: &[ZoneSpec], wanted: &[u32]) -> bool {
    let mut zones: Vec<(u32, u32)> = zones.iter().map(|zone| (zone.buffer_bytes, zone.count)).collect();
    wanted.iter().filter(|bytes| **bytes > 0).all(|bytes| {
        if let Some((_, free)) = zones.iter_mut().find(|(each, free)| each >= bytes && *free > 0) {
            *free -= 1;
            return true;
        }
        let smaller = zones.partition_point(|(each, _)| each < bytes);
        if smaller == zones.len() || smaller > ZONES_MAX {
            return false;
        }
        let Some(plan) = plan(*bytes, zones[..smaller].iter().copied()) else { return false };
        plan.into_iter().for_each(|(index, count)| zones[index].1 -= count);
        true
    })
}

impl Drop for PoolCore {
    /// Records the region, so that caches of registrations drop their entries for it. A registration may keep
    /// the region mapped.
    fn drop(&mut self) {
        unmaps().record(self.region.base().as_ptr().addr(), self.region.bytes());
    }
}

/// The pool of one core. A clone is another handle to the same pool.
#[derive(Clone)]
pub struct Pool(Rc<PoolCore>);

/// One owner's access to a pool: buffers that the owner takes are charged to it until they are dropped.
///
/// An owner is within its share while it has at most as many bytes as are free (a dynamic threshold with
/// factor 1, Choudhury and Hahne 1998). One greedy owner gets about half of the pool, n greedy owners about
/// 1/(n+1) each, so some buffers remain for a new owner. The share is checked before a buffer is taken, so
/// one buffer may exceed it. An owner without buffers may take the last buffer.
#[derive(Clone, Copy)]
pub struct Share<'a> {
    pool: &'a Pool,
    owner: Owner,
}

impl Share<'_> {
    /// Returns true when the bytes charged to the owner are at most the free bytes.
    #[inline]
    #[must_use]
    pub fn is_within(&self) -> bool {
        self.held() <= self.pool.free_bytes()
    }

    /// Returns the bytes charged to the owner: whole buffers of the zones. 0 for an owner that is not charged
    /// ([`Pool::set_owners`]).
    #[inline]
    #[must_use]
    pub fn held(&self) -> u64 {
        self.pool.0.shares.held(self.owner)
    }

    /// Takes a buffer as [`Pool::take`] does, charged to the owner. `None` also when the owner is above its
    /// share, or when only zones that are reserved for another request ([`Pool::keep_for`]) have enough free
    /// buffers.
    #[inline]
    #[must_use]
    pub fn take(&self, bytes: u32) -> Option<Buf> {
        let core = &self.pool.0;
        if self.is_within() { core.take(bytes, self.owner, core.kept_from.get()) } else { None }
    }

    /// Takes two buffers or none, as [`Share::take`] does; a length of 0 needs no buffer. The share is
    /// checked once, before both.
    #[must_use]
    pub fn take_both(&self, bytes: [u32; 2]) -> Option<(Option<Buf>, Option<Buf>)> {
        let core = &self.pool.0;
        let [first, second] = bytes;
        if first.max(second) > 0 && !self.is_within() {
            return None;
        }
        let take = |bytes| core.take(bytes, self.owner, core.kept_from.get());
        let first = if first == 0 { None } else { Some(take(first)?) };
        let second = if second == 0 { None } else { Some(take(second)?) };
        Some((first, second))
    }

    /// Takes a buffer as [`Share::take`] does, in one segment.
    #[must_use]
    pub fn take_contiguous(&self, bytes: u32) -> Option<Buf> {
        let core = &self.pool.0;
        if self.is_within() { core.take_one(bytes, self.owner, core.kept_from.get()) } else { None }
    }

    /// Takes a buffer for a command that already has one: charged, but not limited by the share or by
    /// [`Pool::keep_for`]. If the command waited instead, the buffers that it has would stay in use
    /// meanwhile.
    #[inline]
    #[must_use]
    pub fn take_more(&self, bytes: u32) -> Option<Buf> {
        self.pool.0.take(bytes, self.owner, usize::MAX)
    }
}

/// Maximum bytes of a zone: the limit of io_uring for one registered buffer.
const ZONE_BYTES_MAX: u64 = 1 << 30;

impl Pool {
    /// Returns the bytes of all buffers of `zones`. [`Pool::new`] maps these, rounded up to 2 MiB.
    #[must_use]
    pub fn bytes_for(zones: &[ZoneSpec]) -> u64 {
        zones.iter().map(|zone| u64::from(zone.buffer_bytes) * u64::from(zone.count)).sum()
    }

    /// Creates a pool of `zones`, which are in ascending order of buffer size.
    ///
    /// # Errors
    /// [`PoolError`] when `zones` are not 1 to 16 in ascending order, a zone is out of the range of
    /// [`ZoneSpec`], or the memory cannot be mapped.
    pub fn new(zones: &[ZoneSpec], pages: Pages) -> Result<Pool, PoolError> {
        let refuse = |spec: ZoneSpec, allowed| Err(PoolError::Zone { spec, allowed });
        let mut previous = 0;
        for spec in zones.iter().copied() {
            if spec.buffer_bytes == 0 || spec.buffer_bytes % 4096 != 0 || spec.buffer_bytes > 64 << 20 {
                return refuse(spec, "the buffer size must be a multiple of 4096, up to 64 MiB");
            }
            if spec.count == 0 || u64::from(spec.buffer_bytes) * u64::from(spec.count) > ZONE_BYTES_MAX {
                return refuse(spec, "there must be at least 1 buffer and at most 1 GiB in a zone");
            }
            if spec.buffer_bytes <= previous {
                return refuse(spec, "zones must be in ascending order of size");
            }
            previous = spec.buffer_bytes;
        }
        if zones.is_empty() || zones.len() > ZONES_MAX {
            let spec = zones.first().copied().unwrap_or(ZoneSpec { buffer_bytes: 0, count: 0 });
            return refuse(spec, "there must be 1 to 16 zones");
        }
        Pool::map_zones(zones, pages)
    }

    /// Creates a pool of `count` adjacent buffers of `buffer_bytes`, a multiple of 64, on base pages. At most
    /// 1 GiB. For messages, which are never passed to a disk.
    ///
    /// # Errors
    /// [`PoolError`] when the size or the count is out of range or the memory cannot be mapped.
    pub fn of_strides(buffer_bytes: u32, count: u32) -> Result<Pool, PoolError> {
        let spec = ZoneSpec { buffer_bytes, count };
        let bytes = u64::from(buffer_bytes) * u64::from(count);
        if bytes == 0 || !buffer_bytes.is_multiple_of(64) || bytes > ZONE_BYTES_MAX {
            let allowed = "multiples of 64 bytes, at least one, at most 1 GiB";
            return Err(PoolError::Zone { spec, allowed });
        }
        Pool::map_zones(&[spec], Pages::Base)
    }

    fn map_zones(zones: &[ZoneSpec], pages: Pages) -> Result<Pool, PoolError> {
        let bytes = usize::try_from(Pool::bytes_for(zones)).unwrap_or(usize::MAX);
        let region = Region::map(bytes, pages)?;
        // A core's pool is created on the core's thread, but another thread may touch the memory first when
        // it registers the pool with a device.
        if let Some(node) = current_node() {
            region.prefer_node(node);
        }
        let region = Arc::new(region);
        let mut start = 0;
        let zones = zones
            .iter()
            .map(|spec| {
                let zone = Zone {
                    spec: *spec,
                    start,
                    // Reversed: the buffer taken first is the first in memory.
                    free: RefCell::new((0..spec.count).rev().collect()),
                };
                start += spec.buffer_bytes as usize * spec.count as usize;
                zone
            })
            .collect();
        Ok(Pool(Rc::new(PoolCore {
            region,
            free_bytes: Cell::new(bytes as u64),
            shares: Shares::default(),
            kept_from: Cell::new(usize::MAX),
            tails: Tails::new(0, PIECES_MAX),
            zones,
        })))
    }

    /// Takes a writable buffer of `bytes`, charged to no owner. It comes from the smallest zone whose buffers
    /// are large enough, else from a larger zone, else it consists of smaller buffers, in several segments.
    /// `None` when too few are free: the request waits. Always `None` above [`Pool::buffer_bytes_max`].
    #[inline]
    #[must_use]
    pub fn take(&self, bytes: u32) -> Option<Buf> {
        self.0.take(bytes, Owner::UNCHARGED, usize::MAX)
    }

    /// Takes a buffer as [`Pool::take`] does, in one segment.
    #[inline]
    #[must_use]
    pub fn take_contiguous(&self, bytes: u32) -> Option<Buf> {
        self.0.take_one(bytes, Owner::UNCHARGED, usize::MAX)
    }

    /// Charges the owners in the entries 0 to `owners - 1` of a slab; owners in later entries are not
    /// charged. A smaller value than in an earlier call has no effect.
    pub fn set_owners(&self, owners: usize) {
        self.0.shares.set_owners(owners);
    }

    /// Returns the access of `owner` to the pool.
    #[inline]
    #[must_use]
    pub fn share(&self, owner: Slot) -> Share<'_> {
        Share { pool: self, owner: Owner(owner) }
    }

    /// Reserves the zones whose buffers have at least `bytes` for a request that has waited long: a [`Share`]
    /// then takes from smaller zones only, except by [`Share::take_more`]. `None` ends the reservation.
    pub fn keep_for(&self, bytes: Option<u32>) {
        let fits = |bytes| self.0.zones.partition_point(|zone| zone.spec.buffer_bytes < bytes);
        self.0.kept_from.set(bytes.map_or(usize::MAX, fits));
    }

    /// Returns the memory of the pool, for registration with a device. Includes the rounding up to 2 MiB.
    #[must_use]
    pub fn area(&self) -> Area {
        self.0.area()
    }

    /// Returns the bytes of a buffer of the largest zone.
    #[must_use]
    pub fn buffer_bytes_max(&self) -> u32 {
        self.0.zones.last().map_or(0, |zone| zone.spec.buffer_bytes)
    }

    /// Returns the free bytes of all zones.
    #[inline]
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        self.0.free_bytes.get()
    }

    /// Returns for each zone: address, bytes, and bytes of one buffer. The zones are in the order of the
    /// indices that [`Buf::device_target`] returns.
    pub(crate) fn zone_ranges(&self) -> impl Iterator<Item = (NonNull<u8>, usize, usize)> {
        self.0.zones.iter().map(|zone| {
            // SAFETY: `map_zones` sized the region as the sum of the zones, so each zone begins inside of it.
            let addr = unsafe { self.0.region.base().add(zone.start) };
            let buffer_bytes = zone.spec.buffer_bytes as usize;
            (addr, buffer_bytes * zone.spec.count as usize, buffer_bytes)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small() -> Pool {
        let zones = [ZoneSpec { buffer_bytes: 4096, count: 2 }, ZoneSpec { buffer_bytes: 65536, count: 1 }];
        Pool::new(&zones, Pages::Base).expect("pool")
    }

    /// Number of free buffers of each zone.
    fn free(pool: &Pool) -> Vec<usize> {
        pool.0.zones.iter().map(|zone| zone.free.borrow().len()).collect()
    }

    #[test]
    fn buffers_come_from_the_smallest_zone_then_a_larger_one_then_not_at_all() {
        let pool = small();
        let (a, b, c) = (pool.take(512), pool.take(4096), pool.take(1));
        assert!(a.is_some() && b.is_some() && c.is_some());
        assert!(pool.take(1).is_none());
        drop((a, b, c));
        assert_eq!(pool.free_bytes(), 2 * 4096 + 65536);
        assert_eq!(free(&pool), [2, 1]);
        assert!(pool.take(65537).is_none(), "no zone is that large");
    }

    #[test]
    fn buffers_do_not_overlap_and_keep_their_bytes() {
        let pool = small();
        let mut bufs: Vec<Buf> = std::iter::from_fn(|| pool.take(4096)).collect();
        assert_eq!(bufs.len(), 3);
        for (index, buf) in bufs.iter_mut().enumerate() {
            buf.segments_mut().for_each(|segment| segment.fill(u8::try_from(index).expect("small") + 1));
        }
        for (index, buf) in bufs.iter().enumerate() {
            assert!(buf.equals_at(0, &[u8::try_from(index).expect("small") + 1; 4096]));
        }
    }

    #[test]
    fn shapes_out_of_range_are_refused_by_name() {
        for (bytes, count) in [(0, 1), (100, 1), (4096, 0), (64 << 20, 17), (128 << 20, 1)] {
            let error =
                Pool::new(&[ZoneSpec { buffer_bytes: bytes, count }], Pages::Base).err().expect("refused");
            assert!(error.to_string().contains(&format!("{count} buffers of {bytes} bytes")), "{error}");
        }
    }

    fn zoned(zones: &[(u32, u32)]) -> Pool {
        let zones: Vec<_> = zones
            .iter()
            .map(|(buffer_bytes, count)| ZoneSpec { buffer_bytes: *buffer_bytes, count: *count })
            .collect();
        Pool::new(&zones, Pages::Base).expect("pool")
    }

    fn pieces(buf: &Buf) -> Vec<usize> {
        buf.segments().map(<[u8]>::len).collect()
    }

    #[test]
    fn smaller_pieces_serve_the_larger_first_all_or_none() {
        let pool = zoned(&[(4096, 40), (65536, 1), (131_072, 1)]);
        let whole = pool.take(131_072).expect("one piece");
        assert!(whole.is_contiguous());
        assert!(pool.take_contiguous(131_072).is_none());
        let mut pieced = pool.take(131_072).expect("in pieces");
        assert_eq!(pieces(&pieced), [&[65536][..], &[4096; 16]].concat());
        assert!(pieced.segments().all(|piece| piece.as_ptr().addr() % 4096 == 0));
        let bytes: Vec<u8> = (0..131_072).map(|at: u32| (at % 251) as u8).collect();
        pieced.copy_in(0, &bytes);
        assert!(pieced.equals_at(0, &bytes));
        // 24 buffers of 4 KiB are left; a request that needs more takes none.
        let before = pool.free_bytes();
        assert!(pool.take(25 * 4096).is_none());
        assert_eq!(pool.free_bytes(), before);
        let ragged = pool.take(70_000).expect("in pieces");
        assert_eq!(pieces(&ragged), [&[4096; 17][..], &[70_000 - 17 * 4096]].concat());
        drop((whole, pieced, ragged));
        assert_eq!(free(&pool), [40, 1, 1]);
    }

    #[test]
    fn the_last_piece_may_be_of_a_larger_zone_and_no_buffer_has_too_many() {
        let pool = zoned(&[(4096, 64), (65536, 2), (262_144, 1)]);
        let small: Vec<Buf> = (0..64).map_while(|_| pool.take(4096)).collect();
        let whole = pool.take(262_144).expect("one piece");
        let both = pool.take(100_000).expect("in pieces");
        assert_eq!(pieces(&both), [65536, 100_000 - 65536]);
        assert!(pool.take(69_632).is_none());
        drop((small, both));
        let kept: Vec<Buf> = (0..2).map_while(|_| pool.take(65536)).collect();
        assert_eq!(pieces(&pool.take(131_072).expect("32 pieces")).len(), PIECES_MAX);
        assert!(pool.take(131_073).is_none(), "it would be of 33");
        drop((kept, whole));
        assert_eq!(pool.free_bytes(), 64 * 4096 + 2 * 65536 + 262_144);
    }

    #[test]
    fn what_an_empty_pool_can_serve_is_what_it_serves() {
        let specs = |zones: &[(u32, u32)]| -> Vec<ZoneSpec> {
            zones
                .iter()
                .map(|(buffer_bytes, count)| ZoneSpec { buffer_bytes: *buffer_bytes, count: *count })
                .collect()
        };
        let cases = [
            // The second large buffer would consist of more than PIECES_MAX small ones.
            (&[(4096, 1024), (1 << 20, 1)][..], [1 << 20, 1 << 20], false),
            (&[(4096, 1024), (1 << 20, 2)], [1 << 20, 1 << 20], true),
            (&[(64 << 10, 16), (1 << 20, 1)], [1 << 20, 1 << 20], true),
            (&[(64 << 10, 15), (1 << 20, 1)], [1 << 20, 1 << 20], false),
            (&[(1 << 20, 1)], [8192, 128 << 10], false),
            (&[(4096, 64)], [8192, 0], false),
            (&[(4096, 2)], [4096, 4096], true),
        ];
        for (zones, [first, second], expected) in cases {
            assert_eq!(can_serve(&specs(zones), &[first, second]), expected, "{zones:?} {first} {second}");
            let pool = zoned(zones);
            pool.set_owners(1);
            let taken = pool.share(Slot::from_wire(1 << 16)).take_both([first, second]);
            assert_eq!(taken.is_some(), expected, "{zones:?} {first} {second}");
        }
    }

    #[test]
    fn a_buffer_of_pieces_gets_shorter_and_as_long_again() {
        let pool = zoned(&[(4096, 8), (16384, 1)]);
        let whole = pool.take(16384);
        let mut buf = pool.take(16384).expect("in pieces");
        for bytes in [0, 1, 4096, 5000, 12288, 16384, 100] {
            buf.set_len(bytes);
            assert_eq!((buf.len(), pieces(&buf).iter().sum::<usize>()), (bytes as usize, bytes as usize));
            assert!(pieces(&buf).len() <= (bytes as usize).div_ceil(4096).max(1));
        }
        buf.truncate(50);
        assert_eq!(buf.len(), 50);
        drop((whole, buf));
        assert_eq!(pool.free_bytes(), 8 * 4096 + 16384);
    }

    #[test]
    fn pieces_cost_no_heap_in_the_steady_state() {
        let pool = zoned(&[(4096, 64), (131_072, 1)]);
        let whole = pool.take(131_072).expect("one piece");
        let twice = || (pool.take(131_072), pool.take(65536));
        drop(twice());
        let before = crate::alloc_count::allocations_here();
        for _ in 0..10 {
            drop(twice());
        }
        assert_eq!(crate::alloc_count::allocations_here(), before);
        drop(whole);
    }

    #[test]
    fn an_owner_takes_while_it_holds_no_more_than_is_free() {
        let pool = zoned(&[(4096, 16)]);
        pool.set_owners(3);
        let owner = |index: u32| Slot::from_wire(1 << 16 | index);
        let share = |index| pool.share(owner(index));
        let take_all = |index| std::iter::from_fn(|| share(index).take(1)).collect::<Vec<Buf>>();
        let greedy = take_all(0);
        assert_eq!(greedy.len(), 9, "the one that goes above the half");
        let (second, third) = (take_all(1), take_all(2));
        assert_eq!((second.len(), third.len(), pool.free_bytes()), (4, 2, 4096));
        assert!(!share(0).is_within() && share(0).take_more(1).is_some(), "what has begun goes on");
        let all: Vec<Buf> = std::iter::from_fn(|| pool.take(1)).collect();
        assert!(all.len() == 1 && pool.free_bytes() == 0);
        drop(third);
        let last = share(2).take(1);
        assert!(last.is_some(), "who holds nothing takes what there is");
        // The next owner of the entry holds nothing; buffers that are given back late were not charged to it.
        let next = pool.share(Slot::from_wire(2 << 16));
        assert_eq!((next.held(), share(0).held()), (0, 9 * 4096));
        drop((second, all, last));
        let own = next.take(1);
        assert_eq!((own.is_some(), next.held()), (true, 4096));
        drop(greedy);
        assert_eq!((next.held(), share(0).held()), (4096, 0));
        drop(own);
        assert_eq!((0..3).map(|index| share(index).held() + next.held()).collect::<Vec<_>>(), [0; 3]);
    }

    #[test]
    fn what_is_kept_for_one_others_do_not_take() {
        let pool = zoned(&[(4096, 2), (65536, 1), (131_072, 1)]);
        pool.set_owners(1);
        pool.keep_for(Some(65536));
        let share = pool.share(Slot::from_wire(1 << 16));
        let small = [share.take(1), share.take(1)];
        assert!(small.iter().all(Option::is_some));
        assert!(share.take(1).is_none() && share.take(65536).is_none() && share.take(131_072).is_none());
        pool.keep_for(None);
        assert!(share.take(1).is_some_and(|buf| buf.is_contiguous()));
    }
}
