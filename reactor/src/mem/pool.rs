//! The buffer pool of one core: zones of equal buffers, cut from one region, taken and given back in O(1).
//!
//! A zone that is empty is no error: [`Pool::take`] says `None`, the request waits in its queue, and the miss
//! is counted. Last in, first out, so that a busy core keeps using the same few cache-warm buffers and an
//! idle one touches none. UNSAFETY: makes segments out of a region; exclusiveness is the free list's.
#![expect(unsafe_code, reason = "cuts a region into buffers")]

use std::cell::{Cell, RefCell};
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;

use super::area::Area;
use super::buf::{Buf, Home, Segment};
use super::region::{Pages, Region, RegionError};

/// Size and number of the buffers of one zone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ZoneSpec {
    /// Bytes of each buffer, a multiple of 4096, at most 64 MiB.
    pub buffer_bytes: u32,
    /// How many there are, at least 1.
    pub count: u32,
}

/// A zone's state, for counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ZoneUse {
    /// Its shape.
    pub spec: ZoneSpec,
    /// Buffers that are free now.
    pub free: u32,
    /// How often a taker found it empty.
    pub empty_count: u64,
}

/// Why a pool cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// A zone's shape is out of range.
    #[error("pool zone of {} buffers of {} bytes: {allowed}", spec.count, spec.buffer_bytes)]
    Zone {
        /// The zone.
        spec: ZoneSpec,
        /// What is allowed.
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
    empty_count: Cell<u64>,
}

pub(super) struct PoolCore {
    region: Arc<Region>,
    zones: Vec<Zone>,
}

impl PoolCore {
    pub(super) fn area(&self) -> Area {
        Area::of(&self.region)
    }

    pub(super) fn buffer_bytes(&self, zone: u8) -> u32 {
        self.zones[usize::from(zone)].spec.buffer_bytes
    }

    #[inline]
    pub(super) fn put(&self, zone: u8, addr: NonNull<u8>) {
        let zone = &self.zones[usize::from(zone)];
        let offset = addr.as_ptr() as usize - self.region.base().as_ptr() as usize - zone.start;
        let index = offset / zone.spec.buffer_bytes as usize;
        debug_assert_eq!(offset % zone.spec.buffer_bytes as usize, 0, "not the start of a buffer");
        zone.free.borrow_mut().push(u32::try_from(index).unwrap_or(u32::MAX));
    }
}

/// The pool of one core. Cloning gives another handle to the same pool.
#[derive(Clone)]
pub struct Pool(Rc<PoolCore>);

/// Most bytes in a zone: what io_uring registers as one buffer.
const ZONE_BYTES_MAX: u64 = 1 << 30;

impl Pool {
    /// Bytes that [`Pool::new`] would map for these zones.
    #[must_use]
    pub fn bytes_for(zones: &[ZoneSpec]) -> u64 {
        zones.iter().map(|zone| u64::from(zone.buffer_bytes) * u64::from(zone.count)).sum()
    }

    /// Make a pool of `zones`, given in ascending order of size.
    ///
    /// # Errors
    /// [`PoolError`] when a zone's shape is out of range or the memory cannot be mapped.
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
        if zones.is_empty() || zones.len() > 16 {
            let spec = zones.first().copied().unwrap_or(ZoneSpec { buffer_bytes: 0, count: 0 });
            return refuse(spec, "there must be 1 to 16 zones");
        }
        let bytes = usize::try_from(Pool::bytes_for(zones)).unwrap_or(usize::MAX);
        let region = Arc::new(Region::map(bytes, pages)?);
        let mut start = 0;
        let zones = zones
            .iter()
            .map(|spec| {
                let zone = Zone {
                    spec: *spec,
                    start,
                    // Reversed: the first taken is the first in memory.
                    free: RefCell::new((0..spec.count).rev().collect()),
                    empty_count: Cell::new(0),
                };
                start += spec.buffer_bytes as usize * spec.count as usize;
                zone
            })
            .collect();
        Ok(Pool(Rc::new(PoolCore { region, zones })))
    }

    /// Take a writable buffer of `bytes` from the smallest zone whose buffers are large enough, or from the
    /// next larger one when that is empty. `None`: the request waits.
    #[inline]
    #[must_use]
    pub fn take(&self, bytes: u32) -> Option<Buf> {
        let mut is_first = true;
        for (index, zone) in self.0.zones.iter().enumerate() {
            if zone.spec.buffer_bytes < bytes {
                continue;
            }
            if let Some(buffer) = zone.free.borrow_mut().pop() {
                let offset = zone.start + buffer as usize * zone.spec.buffer_bytes as usize;
                // SAFETY: `new` sized the region as the sum of the zones, and free lists hold indices below
                // `count`.
                let addr = unsafe { self.0.region.base().add(offset) };
                let zone = u8::try_from(index).unwrap_or(u8::MAX);
                return Some(Buf {
                    head: Segment { addr, bytes },
                    tail: None,
                    bytes,
                    is_writable: true,
                    home: Home::Pool(Rc::clone(&self.0), zone),
                });
            }
            if is_first {
                zone.empty_count.set(zone.empty_count.get() + 1);
                is_first = false;
            }
        }
        None
    }

    /// Its memory, to be registered with a device.
    #[must_use]
    pub fn area(&self) -> Area {
        self.0.area()
    }

    /// The largest buffer that can ever be taken, in bytes.
    #[must_use]
    pub fn buffer_bytes_max(&self) -> u32 {
        self.0.zones.last().map_or(0, |zone| zone.spec.buffer_bytes)
    }

    /// Bytes that are free now, over all zones.
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        self.zones().map(|zone| u64::from(zone.free) * u64::from(zone.spec.buffer_bytes)).sum()
    }

    /// The zones' states.
    pub fn zones(&self) -> impl Iterator<Item = ZoneUse> {
        self.0.zones.iter().map(|zone| ZoneUse {
            spec: zone.spec,
            free: u32::try_from(zone.free.borrow().len()).unwrap_or(u32::MAX),
            empty_count: zone.empty_count.get(),
        })
    }

    /// Address, length and bytes of a buffer of each zone, in the order that [`Buf::device_target`] numbers
    /// them.
    pub(crate) fn zone_ranges(&self) -> impl Iterator<Item = (NonNull<u8>, usize, usize)> {
        self.0.zones.iter().map(|zone| {
            // SAFETY: zones lie inside of the region, see `new`.
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

    #[test]
    fn buffers_come_from_the_smallest_zone_then_a_larger_one_then_not_at_all() {
        let pool = small();
        let (a, b, c) = (pool.take(512), pool.take(4096), pool.take(1));
        assert!(a.is_some() && b.is_some() && c.is_some());
        assert!(pool.take(1).is_none());
        assert_eq!(pool.zones().map(|zone| zone.empty_count).collect::<Vec<_>>(), [2, 0]);
        drop((a, b, c));
        assert_eq!(pool.free_bytes(), 2 * 4096 + 65536);
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
}
