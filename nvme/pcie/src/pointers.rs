//! Data pointers: from a part of a [`Buf`] to PRPs or SGL descriptors (Base 2.0 sections 4.1.1 and 4.1.2).
//!
//! ```text
//!   one or two pages           PRP 1, PRP 2                       no list
//!   one contiguous piece       one SGL data block in the entry    if the drive supports SGLs
//!   up to 256 pieces           SGL last segment -> list page      if the drive supports SGLs
//!   pieces that meet at pages  PRP 1, PRP 2 -> list page          also without SGLs
//! ```
//!
//! Data is never copied. Memory other than the core's pool or a cache's is refused.

use std::sync::atomic::{AtomicU64, Ordering};

use nvme_spec::sqe::{Sgl, Sqe};
use nvme_spec::zerocopy;
use spindle_reactor::mem::{Area, Buf};

use crate::dma::{Iova, PAGE_BYTES};
use crate::fronts::Windows;

const PAGE: u64 = PAGE_BYTES as u64;

/// Maximum number of SGL descriptors (16 bytes each) in the list page.
const DESCRIPTORS_MAX: usize = PAGE_BYTES as usize / 16;

/// Maximum data of a command in bytes: at most 257 pages, so PRP 1 and 256 entries of the list page.
pub(crate) const TRANSFER_BYTES_MAX: u32 = 1 << 20;

/// An area of memory and its IOVA: the core's pool, or a cache's memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Window {
    base: usize,
    bytes: usize,
    iova: Iova,
}

impl Window {
    pub(crate) fn new(area: &Area, iova: Iova) -> Window {
        Window { base: area.base().addr().get(), bytes: area.bytes(), iova }
    }

    /// Returns the IOVA of `piece`; `None` if `piece` is not within the window.
    #[inline]
    pub(crate) fn iova(&self, piece: &[u8]) -> Option<u64> {
        let offset = piece.as_ptr().addr().wrapping_sub(self.base);
        if offset <= self.bytes && piece.len() <= self.bytes - offset {
            Some(self.iova.0 + offset as u64)
        } else {
            None
        }
    }
}

pub(crate) struct Pointers {
    pub(crate) window: Window,
    pub(crate) cache_windows: Windows,
    /// SGLs are used where two PRP entries are not enough.
    pub(crate) has_sgls: bool,
}

/// A command slot's page for lists, and its IOVA.
#[derive(Clone, Copy)]
pub(crate) struct ListPage<'a> {
    pub(crate) words: &'a [AtomicU64],
    pub(crate) iova: Iova,
}

impl ListPage<'_> {
    #[inline]
    fn set(&self, index: usize, value: u64) -> Option<()> {
        self.words.get(index)?.store(value.to_le(), Ordering::Relaxed);
        Some(())
    }
}

/// Returns PRP 1 and PRP 2 of `bytes` from `iova`; `None` if the bytes span more than two pages.
#[inline]
fn two_pages(iova: u64, bytes: usize) -> Option<(u64, u64)> {
    let (first, bytes) = (PAGE - iova % PAGE, bytes as u64);
    if bytes <= first {
        Some((iova, 0))
    } else if bytes <= first + PAGE {
        Some((iova, iova + first))
    } else {
        None
    }
}

impl Pointers {
    /// Returns the IOVA of `piece`; `None` if `piece` is not mapped as a whole.
    #[inline]
    fn iova(&self, piece: &[u8]) -> Option<u64> {
        match self.window.iova(piece) {
            Some(iova) => Some(iova),
            None => self.cache_iova(piece),
        }
    }

    /// Returns the IOVA in a cache's memory. Not inlined: commands with pool data do not pay for it.
    #[cold]
    #[inline(never)]
    fn cache_iova(&self, piece: &[u8]) -> Option<u64> {
        self.cache_windows.iova(piece)
    }

    /// Returns PRP 1 and PRP 2 of the first `bytes` of a buffer. Returns `None` if the bytes span more than
    /// two pages, or if the buffer is not contiguous, is shorter, or is not in the pool.
    #[expect(clippy::inline_always, reason = "a part of the data path, in one place of it")]
    #[inline(always)]
    pub(crate) fn pages(&self, buf: &Buf, bytes: usize) -> Option<(u64, u64)> {
        two_pages(self.window.iova(buf.as_slice()?.get(..bytes)?)?, bytes)
    }

    /// As [`Pointers::pages`], for a buffer in a cache's memory.
    #[inline]
    pub(crate) fn cache_pages(&self, buf: &Buf, bytes: usize) -> Option<(u64, u64)> {
        two_pages(self.cache_windows.iova(buf.as_slice()?.get(..bytes)?)?, bytes)
    }

    /// Sets the data pointer for `buf[offset .. offset + bytes]`. Returns `None` if this range is longer than
    /// the buffer or not mapped for the drive. Without SGLs, or with more than `DESCRIPTORS_MAX` pieces, the
    /// pieces must meet at page boundaries, otherwise returns `None`.
    #[inline]
    pub(crate) fn set_data_pointer(
        &self,
        sqe: Sqe,
        buf: &Buf,
        offset: usize,
        bytes: usize,
        list: ListPage<'_>,
    ) -> Option<Sqe> {
        if let Some(whole) = buf.as_slice() {
            let piece = whole.get(offset..offset.checked_add(bytes)?)?;
            let iova = self.iova(piece)?;
            let first = PAGE - iova % PAGE;
            let bytes = bytes as u64;
            if bytes <= first {
                return Some(sqe.with_prp(iova, 0));
            }
            if bytes <= first + PAGE {
                return Some(sqe.with_prp(iova, iova + first));
            }
            if self.has_sgls {
                return Some(sqe.with_sgl(Sgl::data_block(iova, u32::try_from(bytes).ok()?)));
            }
        }
        self.set_list_pointer(sqe, buf, offset, bytes, list)
    }

    fn set_list_pointer(
        &self,
        sqe: Sqe,
        buf: &Buf,
        offset: usize,
        bytes: usize,
        list: ListPage<'_>,
    ) -> Option<Sqe> {
        if offset.checked_add(bytes)? > buf.len() {
            return None;
        }
        let pieces = Pieces { segments: buf.segments(), skip: offset, left: bytes };
        if self.has_sgls
            && let Some(sqe) = self.segments(sqe, pieces, list)
        {
            return Some(sqe);
        }
        let pieces = Pieces { segments: buf.segments(), skip: offset, left: bytes };
        self.prps(sqe, pieces, list)
    }

    fn segments<'a, S: Iterator<Item = &'a [u8]>>(
        &self,
        sqe: Sqe,
        pieces: Pieces<S>,
        list: ListPage<'_>,
    ) -> Option<Sqe> {
        let mut count = 0;
        for piece in pieces {
            if count == DESCRIPTORS_MAX {
                return None;
            }
            let block = Sgl::data_block(self.iova(piece)?, u32::try_from(piece.len()).ok()?);
            let words: [[u8; 8]; 2] = zerocopy::transmute!(block);
            for (half, word) in words.into_iter().enumerate() {
                list.set(2 * count + half, u64::from_le_bytes(word))?;
            }
            count += 1;
        }
        // At most 4096 bytes, which fit the list page.
        let list_bytes = u32::try_from(count * size_of::<Sgl>()).ok()?;
        Some(sqe.with_sgl(Sgl::last_segment(list.iova.0, list_bytes)))
    }

    fn prps<'a, S: Iterator<Item = &'a [u8]>>(
        &self,
        sqe: Sqe,
        pieces: Pieces<S>,
        list: ListPage<'_>,
    ) -> Option<Sqe> {
        let (mut first, mut second, mut count) = (0, 0, 0_usize);
        let mut ends_page = true;
        for piece in pieces {
            let begin = self.iova(piece)?;
            let end = begin + piece.len() as u64;
            // Only the first entry may begin within a page, and only the last may end within one.
            if !ends_page || (count > 0 && !begin.is_multiple_of(PAGE)) {
                return None;
            }
            ends_page = end.is_multiple_of(PAGE);
            let mut at = begin;
            while at < end {
                match count {
                    0 => first = at,
                    1 => second = at,
                    _ => {}
                }
                if count > 0 {
                    list.set(count - 1, at)?;
                }
                count += 1;
                at = (at / PAGE + 1) * PAGE;
            }
        }
        match count {
            0 => None,
            1 => Some(sqe.with_prp(first, 0)),
            2 => Some(sqe.with_prp(first, second)),
            _ => Some(sqe.with_prp(first, list.iova.0)),
        }
    }
}

/// Iterator over the contiguous pieces of a byte range of a buffer.
struct Pieces<S> {
    segments: S,
    skip: usize,
    left: usize,
}

impl<'a, S: Iterator<Item = &'a [u8]>> Iterator for Pieces<S> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        while self.left > 0 {
            let segment = self.segments.next()?;
            if self.skip >= segment.len() {
                self.skip -= segment.len();
                continue;
            }
            let bytes = self.left.min(segment.len() - self.skip);
            let piece = segment.get(self.skip..self.skip + bytes)?;
            self.skip = 0;
            self.left -= bytes;
            return Some(piece);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::fronts::Fronts;
    use crate::function::Mapping;
    use nvme_spec::sqe::{Psdt, SglKind};
    use spindle_reactor::mem::{Pages, Pool, ZoneSpec};

    const IOVA: u64 = 0x10_0000_0000;

    struct World {
        pool: Pool,
        window: Window,
        fronts: Arc<Fronts>,
        list: Vec<AtomicU64>,
    }

    impl World {
        fn new(zones: &[(u32, u32)]) -> World {
            let zones: Vec<_> =
                zones.iter().map(|(bytes, count)| ZoneSpec { buffer_bytes: *bytes, count: *count }).collect();
            let pool = Pool::new(&zones, Pages::Base).expect("a pool");
            let window = Window::new(&pool.area(), Iova(IOVA));
            let list = (0..512).map(|_| AtomicU64::new(u64::MAX)).collect();
            World { pool, window, fronts: Arc::default(), list }
        }

        fn point(&self, buf: &Buf, offset: usize, bytes: usize, has_sgls: bool) -> Option<Sqe> {
            let list = ListPage { words: &self.list, iova: Iova(0x7000) };
            let pointers =
                Pointers { window: self.window, cache_windows: Windows::of(&self.fronts), has_sgls };
            pointers.set_data_pointer(Sqe::read(1, 1, 0, 1), buf, offset, bytes, list)
        }

        fn listed(&self) -> Vec<u64> {
            let words = self.list.iter().map(|word| word.load(Ordering::Relaxed));
            words.take_while(|word| *word != u64::MAX).collect()
        }

        /// Where the drive sees a byte of the buffer.
        fn at(&self, buf: &Buf, offset: usize) -> u64 {
            let mut skip = offset;
            for segment in buf.segments() {
                if skip < segment.len() {
                    return self.window.iova(&segment[skip..=skip]).expect("of the pool");
                }
                skip -= segment.len();
            }
            panic!("behind the end");
        }
    }

    #[test]
    fn one_and_two_pages_need_no_list() {
        let world = World::new(&[(65_536, 2)]);
        let buf = world.pool.take(65_536).expect("room");
        for (offset, bytes, second) in [
            (0, 4096, None),
            (512, 3584, None),
            (512, 4096, Some(4096)),
            (0, 8192, Some(4096)),
            (4096, 512, None),
        ] {
            let sqe = world.point(&buf, offset, bytes, true).expect("said");
            let second = second.map_or(0, |second| world.at(&buf, second));
            assert_eq!((sqe.psdt(), sqe.sgl.prp()), (Psdt::PRP, (world.at(&buf, offset), second)));
        }
        assert!(world.listed().is_empty());
    }

    #[test]
    fn more_in_one_piece_is_one_descriptor_or_a_list_of_pages() {
        let world = World::new(&[(65_536, 2)]);
        let buf = world.pool.take(65_536).expect("room");
        let sqe = world.point(&buf, 512, 16_384, true).expect("said");
        assert_eq!((sqe.psdt(), sqe.sgl.kind()), (Psdt::SGL, SglKind::DATA_BLOCK_ADDRESS));
        assert_eq!((sqe.sgl.address(), sqe.sgl.bytes()), (world.at(&buf, 512), 16_384));
        let sqe = world.point(&buf, 512, 16_384, false).expect("said");
        assert_eq!((sqe.psdt(), sqe.sgl.prp()), (Psdt::PRP, (world.at(&buf, 512), 0x7000)));
        let pages: Vec<u64> = [4096, 8192, 12_288, 16_384].map(|at| world.at(&buf, at)).into();
        assert_eq!(world.listed(), pages);
    }

    #[test]
    fn several_pieces_are_a_list_of_descriptors_or_of_pages() {
        let world = World::new(&[(4096, 20), (65_536, 1)]);
        let (_large, buf) = (world.pool.take(65_536), world.pool.take(5 * 4096).expect("in pieces"));
        assert!(!buf.is_contiguous());
        let sqe = world.point(&buf, 1024, 3 * 4096, true).expect("said");
        assert_eq!((sqe.sgl.kind(), sqe.sgl.address()), (SglKind::LAST_SEGMENT_ADDRESS, 0x7000));
        assert_eq!(sqe.sgl.bytes(), 4 * 16);
        let listed = world.listed();
        assert_eq!((listed[0], listed[1] & 0xffff_ffff), (world.at(&buf, 1024), 3072));
        assert_eq!((listed[6], listed[7] & 0xffff_ffff), (world.at(&buf, 3 * 4096), 1024));
        let world = World::new(&[(4096, 20), (65_536, 1)]);
        let (_large, buf) = (world.pool.take(65_536), world.pool.take(5 * 4096).expect("in pieces"));
        let sqe = world.point(&buf, 1024, 3 * 4096, false).expect("said");
        assert_eq!(sqe.sgl.prp(), (world.at(&buf, 1024), 0x7000));
        assert_eq!(world.listed(), [4096, 8192, 12_288].map(|at| world.at(&buf, at)));
    }

    #[test]
    fn the_largest_command_fits_its_list_page_at_any_offset() {
        let world = World::new(&[(2 << 20, 1)]);
        let buf = world.pool.take(257 * 4096).expect("room");
        let sqe = world.point(&buf, 512, TRANSFER_BYTES_MAX as usize, false).expect("said");
        assert_eq!((sqe.psdt(), sqe.sgl.prp()), (Psdt::PRP, (world.at(&buf, 512), 0x7000)));
        assert_eq!(world.listed().len(), 256);
        assert!(world.point(&buf, 0, TRANSFER_BYTES_MAX as usize + 4096, false).is_some());
    }

    #[test]
    fn memory_that_is_not_the_pools_is_refused() {
        let world = World::new(&[(65_536, 2)]);
        assert!(world.point(&Buf::zeroes(4096), 0, 4096, true).is_none());
        assert!(world.point(&Buf::heap(4096), 0, 4096, false).is_none());
        let buf = world.pool.take(8192).expect("room");
        assert!(world.point(&buf, 4096, 8192, true).is_none(), "longer than the buffer");
        assert!(world.point(&buf, usize::MAX, 2, true).is_none());
    }

    struct At(Iova);

    impl Mapping for At {
        fn iova(&self) -> Iova {
            self.0
        }
    }

    #[test]
    fn memory_besides_the_pool_is_said_too_and_none_but_what_is_mapped() {
        let world = World::new(&[(4096, 20)]);
        // Whose larger buffer is gone, so that what is taken comes in pieces.
        let pools: Vec<Pool> = (0..3).map(|_| World::new(&[(4096, 20), (65_536, 1)]).pool).collect();
        let _large: Vec<_> = pools.iter().map(|pool| pool.take(65_536)).collect();
        let iovas = [Some(1_u64 << 40), Some(2 << 40), None];
        let add = |(pool, iova): (&Pool, Option<u64>)| {
            let attached = Fronts::new_area(&pool.area());
            attached.set_mapping(Box::new(At(Iova(iova?))));
            Some(world.fronts.add(attached))
        };
        let mut leases: Vec<_> = pools.iter().zip(iovas).filter_map(add).collect();
        for has_sgls in [false, true] {
            for (pool, iova) in pools.iter().zip(iovas) {
                let base = pool.area().base().addr().get();
                let (one, several) = (pool.take(4096).expect("room"), pool.take(3 * 4096).expect("room"));
                let place = |piece: &[u8]| iova.map(|iova| iova + (piece.as_ptr().addr() - base) as u64);
                let places: Vec<_> = several.segments().filter_map(place).collect();
                let sqe = world.point(&one, 512, 1024, has_sgls);
                let first = one.segments().next().and_then(place);
                assert_eq!(sqe.map(|sqe| sqe.sgl.prp()), first.map(|first| (first + 512, 0)));
                let sqe = world.point(&several, 0, 3 * 4096, has_sgls);
                assert_eq!(
                    (sqe.is_some(), places.len()),
                    if iova.is_some() { (true, 3) } else { (false, 0) }
                );
                let listed = world.listed();
                match sqe {
                    Some(sqe) if !has_sgls => {
                        assert_eq!((sqe.sgl.prp().0, &listed[..2]), (places[0], &places[1..]));
                    }
                    Some(_) => assert_eq!([listed[0], listed[2], listed[4]], *places),
                    None => {}
                }
            }
            let buf = world.pool.take(4096).expect("room");
            assert!(world.point(&buf, 0, 4096, has_sgls).is_some(), "the pool is what it was");
        }
        // One goes: a copy of before says nothing at all until it is renewed.
        let (first, second) = (pools[0].take(4096).expect("room"), pools[1].take(4096).expect("room"));
        let mut windows = Windows::of(&world.fronts);
        let said =
            |windows: &Windows, buf: &Buf| buf.as_slice().and_then(|piece| windows.iova(piece)).is_some();
        assert!(said(&windows, &first) && said(&windows, &second) && !windows.refresh());
        drop(leases.remove(0));
        assert!(!said(&windows, &first) && !said(&windows, &second));
        assert!(windows.refresh());
        assert!(!said(&windows, &first) && said(&windows, &second));
    }
}
