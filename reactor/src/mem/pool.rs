//! The buffer pool of one core: zones of equal buffers in one region, taken and freed in O(1).
//!
//! A buffer comes from the smallest zone whose buffers are large enough. If that zone is empty, the buffer
//! comes from a larger one. If those are empty too, it consists of smaller buffers, one segment each. If too
//! few of these are free, or more than [`PIECES_MAX`] are needed, [`Pool::take`] returns `None` and the
//! request waits; this is not an error. Free lists are last in, first out: a busy core reuses the same few
//! buffers, which are in the processor's cache, and an idle core touches none.
//!
//! A buffer is charged to its holder until it is dropped; see [`Share`].
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
use super::shares::{Holder, Shares, ZONES_MAX};
use super::unmaps::unmaps;
use crate::affinity::current_node;

/// Maximum number of smaller buffers in one buffer. A request that needs more waits.
pub const PIECES_MAX: usize = 32;

/// Size and count of the buffers of one zone.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
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
    /// Zones whose next free buffer is for a request that waits, a bit each; see [`Share::claim`].
    claimed: Cell<u32>,
    tails: Tails,
}

impl PoolCore {
    pub(super) fn area(&self) -> Area {
        Area::of(&self.region)
    }

    fn zone_index(&self, addr: NonNull<u8>) -> usize {
        let at = (addr.as_ptr() as usize).wrapping_sub(self.region.base().as_ptr() as usize);
        let behind = self.zones.partition_point(|zone| zone.start <= at);
        assert!(behind > 0 && at < self.region.bytes(), "a buffer of another pool");
        behind - 1
    }

    pub(super) fn buffer_bytes(&self, addr: NonNull<u8>) -> u32 {
        self.zones[self.zone_index(addr)].spec.buffer_bytes
    }

    #[inline]
    pub(super) fn put(&self, zone: u8, addr: NonNull<u8>, tail: Option<Box<Tail>>, holder: Holder) {
        self.put_one(usize::from(zone), addr, holder);
        if let Some(tail) = tail {
            self.put_tail(tail, holder);
        }
    }

    #[inline]
    fn put_one(&self, index: usize, addr: NonNull<u8>, holder: Holder) {
        let zone = &self.zones[index];
        let offset = addr.as_ptr() as usize - self.region.base().as_ptr() as usize - zone.start;
        let buffer = offset / zone.spec.buffer_bytes as usize;
        debug_assert_eq!(offset % zone.spec.buffer_bytes as usize, 0, "not the start of a buffer");
        zone.free.borrow_mut().push(u32::try_from(buffer).unwrap_or(u32::MAX));
        let bytes = u64::from(zone.spec.buffer_bytes);
        self.free_bytes.set(self.free_bytes.get() + bytes);
        self.shares.give_back(holder, index, bytes);
    }

    #[cold]
    fn put_tail(&self, tail: Box<Tail>, holder: Holder) {
        // Zeroes are not of the pool.
        let pieces = tail.0.iter().filter(|piece| !piece.is_zeroes());
        pieces.for_each(|piece| self.put_one(self.zone_index(piece.addr), piece.addr, holder));
        self.tails.put(tail);
    }

    pub(super) fn take_tail(&self) -> Box<Tail> {
        self.tails.take()
    }

    #[inline]
    fn pop(&self, zone: &Zone) -> Option<NonNull<u8>> {
        let buffer = zone.free.borrow_mut().pop()?;
        let offset = zone.start + buffer as usize * zone.spec.buffer_bytes as usize;
        // SAFETY: `map_zones` sized the region as the sum of the zones, and free lists contain indices
        // below `count`.
        Some(unsafe { self.region.base().add(offset) })
    }

    fn free_of(zone: &Zone) -> u32 {
        u32::try_from(zone.free.borrow().len()).unwrap_or(u32::MAX)
    }

    #[inline]
    fn is_claimed(&self, index: usize) -> bool {
        self.claimed.get() >> index & 1 != 0
    }

    /// True when a request may take a buffer of a zone: one is free, in the share of its holder, and not
    /// claimed by a request that came before.
    #[inline]
    fn may_take(&self, index: usize, zone: &Zone, limit: Limit) -> bool {
        match limit {
            Limit::None => true,
            Limit::Share(holder) => {
                !self.is_claimed(index)
                    && self.shares.may_take(holder, index, Self::free_of(zone), zone.spec.count)
            }
        }
    }

    /// How many buffers of a zone one request may take as its pieces.
    fn quota(&self, index: usize, zone: &Zone, limit: Limit) -> u32 {
        let free = Self::free_of(zone);
        match limit {
            Limit::None => free,
            Limit::Share(_) if self.is_claimed(index) => 0,
            Limit::Share(holder) => self.shares.quota(holder, index, free, zone.spec.count),
        }
    }

    /// Takes a buffer that consists of smaller ones. `None` when those that `limit` allows are too few for
    /// all of `bytes`, when more than [`PIECES_MAX`] are needed, or `bytes` exceeds the largest buffers.
    #[cold]
    fn take_pieces(self: &Rc<Self>, bytes: u32, holder: Holder, limit: Limit) -> Option<Buf> {
        let smaller = self.zones.partition_point(|zone| zone.spec.buffer_bytes < bytes);
        if smaller == self.zones.len() {
            return None; // larger than the buffers of the largest zone
        }
        let zones = self.zones[..smaller].iter().enumerate();
        let plan =
            plan(bytes, zones.map(|(index, zone)| (zone.spec.buffer_bytes, self.quota(index, zone, limit))))?;
        let mut head: Option<(Segment, usize)> = None;
        let mut tail = self.tails.take();
        let mut left = bytes;
        for (index, count) in plan {
            let zone = &self.zones[index];
            for addr in (0..count).map_while(|_| self.pop(zone)) {
                let piece = Segment { addr, bytes: left.min(zone.spec.buffer_bytes) };
                left -= piece.bytes;
                if head.is_none() {
                    head = Some((piece, index));
                } else {
                    tail.0.push(piece);
                }
            }
            self.charge(holder, index, count);
        }
        assert_eq!(left, 0, "the plan counted what is free");
        let (head, zone) = head?;
        Some(self.buf(head, Some(tail), bytes, zone, holder))
    }

    #[inline]
    fn charge(&self, holder: Holder, index: usize, count: u32) {
        let bytes = u64::from(self.zones[index].spec.buffer_bytes) * u64::from(count);
        self.free_bytes.set(self.free_bytes.get() - bytes);
        self.shares.take(holder, index, count, bytes);
    }

    #[inline]
    fn buf(
        self: &Rc<Self>,
        head: Segment,
        tail: Option<Box<Tail>>,
        bytes: u32,
        zone: usize,
        holder: Holder,
    ) -> Buf {
        let zone = u8::try_from(zone).unwrap_or(u8::MAX);
        Buf { head, tail, bytes, is_writable: true, origin: Origin::Pool(Rc::clone(self), zone, holder) }
    }

    /// Takes a buffer in one segment, from the smallest zone with a buffer of at least `bytes` that `limit`
    /// allows. `None` when there is no such zone.
    #[inline]
    fn take_one(self: &Rc<Self>, bytes: u32, holder: Holder, limit: Limit) -> Option<Buf> {
        for (index, zone) in self.zones.iter().enumerate() {
            if zone.spec.buffer_bytes >= bytes
                && self.may_take(index, zone, limit)
                && let Some(addr) = self.pop(zone)
            {
                self.charge(holder, index, 1);
                return Some(self.buf(Segment { addr, bytes }, None, bytes, index, holder));
            }
        }
        None
    }

    fn claim(&self, bytes: u32, is_entitled: impl Fn(usize) -> bool) -> bool {
        let zones = self.zones.iter().enumerate().filter(|(_, zone)| zone.spec.buffer_bytes >= bytes);
        let entitled = zones.filter(|(index, _)| is_entitled(*index));
        let claim = entitled.fold(0, |claim, (index, _)| claim | 1 << index);
        self.claimed.set(self.claimed.get() | claim);
        claim != 0
    }

    #[inline]
    fn take(self: &Rc<Self>, bytes: u32, holder: Holder, limit: Limit) -> Option<Buf> {
        self.take_one(bytes, holder, limit).or_else(|| self.take_pieces(bytes, holder, limit))
    }
}

#[derive(Clone, Copy)]
enum Limit {
    /// All that are free.
    None,
    /// The share of this holder, without zones that others claim.
    Share(Holder),
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
            // At the end this is the smallest zone with a buffer left over, larger than the rest.
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

/// One holder's access to a pool: buffers that the holder takes are charged to it until they are dropped,
/// and how many it may take is limited zone by zone. See [`Holder`] and the module `shares`.
#[derive(Clone, Copy)]
pub struct Share<'a> {
    pool: &'a Pool,
    holder: Holder,
}

impl Share<'_> {
    /// Returns the bytes charged to the holder: whole buffers of the zones. 0 for a holder that is not
    /// charged ([`Pool::set_connections`], [`Pool::add_host`]).
    #[inline]
    #[must_use]
    pub fn held(&self) -> u64 {
        self.pool.0.shares.bytes(self.holder)
    }

    /// Takes a buffer as [`Pool::take`] does, charged to the holder. `None` also when the zones that have
    /// enough free buffers are beyond the holder's share or claimed.
    #[inline]
    #[must_use]
    pub fn take(&self, bytes: u32) -> Option<Buf> {
        self.pool.0.take(bytes, self.holder, Limit::Share(self.holder))
    }

    /// Takes two buffers or none, as [`Share::take`] does; a length of 0 needs no buffer. A holder that
    /// has nothing gets both if they are free.
    #[must_use]
    pub fn take_both(&self, bytes: [u32; 2]) -> Option<(Option<Buf>, Option<Buf>)> {
        let [first, second] = bytes;
        let is_first = self.held() == 0;
        let first = if first == 0 { None } else { Some(self.take(first)?) };
        let second = match second {
            0 => None,
            bytes if is_first => Some(self.take_more(bytes)?),
            bytes => Some(self.take(bytes)?),
        };
        Some((first, second))
    }

    /// Takes a buffer as [`Share::take`] does, in one segment.
    #[must_use]
    pub fn take_contiguous(&self, bytes: u32) -> Option<Buf> {
        self.pool.0.take_one(bytes, self.holder, Limit::Share(self.holder))
    }

    /// Takes a buffer for a command that already has one: charged, but not limited by the share or by claims.
    /// If the command waited instead, the buffers that it has would stay in use meanwhile.
    #[inline]
    #[must_use]
    pub fn take_more(&self, bytes: u32) -> Option<Buf> {
        self.pool.0.take(bytes, self.holder, Limit::None)
    }

    /// Returns true when a buffer of `bytes` in one segment can be taken now.
    #[must_use]
    pub fn can_take(&self, bytes: u32) -> bool {
        let core = &self.pool.0;
        let zones = core.zones.iter().enumerate().filter(|(_, zone)| zone.spec.buffer_bytes >= bytes);
        zones.into_iter().any(|(index, zone)| core.may_take(index, zone, Limit::Share(self.holder)))
    }

    /// Claims the next free buffers for a request of the holder that waits for `bytes`: until
    /// [`Pool::clear_claims`], no share takes from the zones whose buffers are large enough. Zones of
    /// which the holder has buffers are not claimed, unless there is no other host: it is not kept from
    /// memory by others. False: nothing is claimed.
    pub fn claim(&self, bytes: u32) -> bool {
        self.pool.0.claim(bytes, |index| self.pool.0.shares.is_entitled(self.holder, index))
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
            claimed: Cell::new(0),
            tails: Tails::new(0, PIECES_MAX),
            zones,
        })))
    }

    /// Takes a writable buffer of `bytes`, charged to no holder. It comes from the smallest zone whose
    /// buffers are large enough, else from a larger zone, else it consists of smaller buffers, in several
    /// segments. `None`: too few are free, the request waits. Always above [`Pool::buffer_bytes_max`].
    #[inline]
    #[must_use]
    pub fn take(&self, bytes: u32) -> Option<Buf> {
        self.0.take(bytes, Holder::UNCHARGED, Limit::None)
    }

    /// Takes a buffer as [`Pool::take`] does, in one segment.
    #[inline]
    #[must_use]
    pub fn take_contiguous(&self, bytes: u32) -> Option<Buf> {
        self.0.take_one(bytes, Holder::UNCHARGED, Limit::None)
    }

    /// Charges connections in the entries 0 to `count - 1` of their slab; those in later entries are not
    /// charged. A smaller value than in an earlier call has no effect.
    pub fn set_connections(&self, count: usize) {
        self.0.shares.set_connections(count);
    }

    /// Charges the host with this number and all lower ones from now on. Allocates.
    pub fn add_host(&self, client: u16) {
        self.0.shares.add_host(client);
    }

    /// Whether at most one host is connected to the process. That one is limited by the reserve alone.
    pub fn set_alone(&self, is_alone: bool) {
        self.0.shares.set_alone(is_alone);
    }

    /// Returns the access of `holder` to the pool.
    #[inline]
    #[must_use]
    pub fn share(&self, holder: Holder) -> Share<'_> {
        Share { pool: self, holder }
    }

    /// Claims the next free buffers as [`Share::claim`] does, for a command that has others already.
    pub fn claim(&self, bytes: u32) {
        self.0.claim(bytes, |_| true);
    }

    /// Ends all claims.
    pub fn clear_claims(&self) {
        self.0.claimed.set(0);
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
    use crate::slab::Slot;

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
    fn zeroes_behind_a_buffer_are_read_and_take_nothing_of_the_pool() {
        let pool = small();
        let mut buf = pool.take(4096).expect("a buffer");
        buf.copy_in(0, &[7; 4096]);
        buf.append_zeroes(5 << 20);
        assert_eq!((buf.len(), buf.is_writable(), free(&pool)), (4096 + (5 << 20), false, vec![1, 1]));
        assert!(buf.equals_at(0, &[7; 4096]) && buf.equals_at(4096, &vec![0; 5 << 20]));
        drop(buf);
        assert_eq!(free(&pool), [2, 1]);
        let mut none = Buf::zeroes(0);
        none.append_zeroes(9);
        assert!(none.len() == 9 && none.equals_at(0, &[0; 9]));
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
            pool.add_host(1);
            let taken = pool.share(Holder::host(1)).take_both([first, second]);
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
    fn each_host_leaves_the_next_a_part_of_every_zone() {
        let pool = zoned(&[(4096, 16), (65536, 4)]);
        pool.add_host(3);
        let take_all = |host, bytes| {
            std::iter::from_fn(|| pool.share(Holder::host(host)).take(bytes)).collect::<Vec<Buf>>()
        };
        let greedy = take_all(1, 65536);
        assert_eq!(free(&pool), [16, 2], "half of the zone, and no piece of the other: too many are needed");
        let second = take_all(2, 65536);
        assert_eq!((second.len(), free(&pool)), (1, vec![16, 1]));
        assert_eq!((take_all(1, 1).len(), take_all(2, 1).len()), (8, 4), "both at the same time");
        let small = take_all(2, 1);
        assert_eq!(free(&pool), [16 - small.len(), 1]);
        assert_eq!(take_all(3, 65536).len(), 1, "one that has none takes the last");
        assert!(pool.share(Holder::host(1)).take_more(1).is_some(), "what has begun goes on");
        drop((greedy, second, small));
        assert_eq!([1, 2, 3].map(|host| pool.share(Holder::host(host)).held()), [0; 3]);
        pool.set_alone(true);
        assert_eq!(take_all(1, 65536).len(), 3, "all but the reserve");
    }

    #[test]
    fn pieces_are_charged_to_their_zones_and_come_back() {
        let pool = zoned(&[(4096, 64), (131_072, 1)]);
        pool.add_host(2);
        let share = pool.share(Holder::host(1));
        let (whole, pieced) = (share.take(131_072), share.take(131_072).expect("in pieces"));
        assert_eq!((pieced.is_contiguous(), share.held()), (false, 2 * 131_072));
        assert_eq!(share.take(131_072).map(|_| ()), None, "32 of 64 are its share");
        drop(pieced);
        assert_eq!(share.held(), 131_072);
        drop(whole);
        assert_eq!((share.held(), free(&pool)), (0, vec![64, 1]));
        let connection = pool.share(Holder::connection(Slot::from_wire(5)));
        assert_eq!((connection.take(1).is_some(), connection.held()), (true, 0), "no table, no charge");
    }

    #[test]
    fn what_one_claims_others_do_not_take() {
        let pool = zoned(&[(4096, 2), (65536, 1), (131_072, 1)]);
        pool.add_host(2);
        let [share, other] = [1, 2].map(|host| pool.share(Holder::host(host)));
        let large = other.take(131_072);
        assert!(share.claim(65536), "it has none");
        assert!(other.claim(131_072) || other.held() > 0);
        let small = [other.take(1), other.take(1)];
        assert!(small[0].is_some() && small[1].is_none(), "its share, and nothing of what is claimed");
        assert!(other.take(65536).is_none() && !other.can_take(65536));
        pool.clear_claims();
        assert!(other.take(65536).is_some_and(|buf| buf.is_contiguous()));
        drop(large);
        let held = share.take(65536);
        assert!(held.is_some() && !share.claim(131_072 + 1), "no zone is that large");
        pool.set_alone(true);
        assert!(share.claim(65536), "the only host's own commands do not overtake each other");
    }
}
