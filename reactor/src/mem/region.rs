//! A mapped piece of memory: anonymous, private, zero until touched, on huge pages where there are any.
//!
//! Pages are taken lazily by the kernel at the first touch and given back by [`Region::release`].
//! UNSAFETY: mmap, madvise and the raw pointers that come of them.
#![expect(unsafe_code, reason = "owns a memory mapping")]

use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::unmaps::unmaps;

/// Which pages a region asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pages {
    /// The machine's base pages (4 KiB).
    Base,
    /// Base pages, with the advice to back them by transparent huge pages (2 MiB). Needs no set-up; the
    /// default.
    Transparent,
    /// Reserved huge pages (`vm.nr_hugepages`). Falls back to [`Pages::Transparent`] where there are too few.
    Huge,
}

/// Pages that a region lies on when a device is about to take it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageSizes {
    /// Huge pages, all of it.
    Huge,
    /// The machine's base pages, as was asked for.
    Base,
    /// Base pages in part, although huge ones were asked for.
    Mixed {
        /// Pieces of 2 MiB that lie on base pages.
        small: usize,
        /// Pieces of 2 MiB altogether.
        all: usize,
    },
    /// The kernel does not say (before Linux 6.1).
    Unknown,
}

/// Why a region could not be mapped.
#[derive(Debug, thiserror::Error)]
#[error("cannot map {bytes} bytes of memory: {source}")]
pub struct RegionError {
    bytes: usize,
    #[source]
    source: io::Error,
}

/// An anonymous mapping that lives as long as this value.
#[derive(Debug)]
pub struct Region {
    base: NonNull<u8>,
    bytes: usize,
    pages: Pages,
    /// A device knows its pages: none is given back.
    is_registered: AtomicBool,
    /// Releases under way.
    releases: AtomicUsize,
}

// SAFETY: a region is memory, not state: it has no thread affinity. What may read or write which part of it
// and when is the business of its users in this folder (Pool is one thread's; FrameStore has its own
// protocol).
unsafe impl Send for Region {}
// SAFETY: as above; `&Region` gives only addresses and `release`, which the kernel serialises.
unsafe impl Sync for Region {}

/// Size that regions are rounded up to, that of a huge page on x86-64.
pub(super) const HUGE_BYTES: usize = 2 << 20;

impl Region {
    /// Map `bytes`, rounded up to 2 MiB. Nothing is touched yet.
    pub fn map(bytes: usize, pages: Pages) -> Result<Region, RegionError> {
        let bytes = bytes.max(1).next_multiple_of(HUGE_BYTES);
        if pages == Pages::Huge
            && let Ok(base) = map_anonymous(bytes, libc::MAP_HUGETLB)
        {
            return Ok(Region::of(base, bytes, pages));
        }
        // One huge page more than asked, so that the start can be moved to a boundary.
        let mapped = map_anonymous(bytes + HUGE_BYTES, libc::MAP_NORESERVE)
            .map_err(|source| RegionError { bytes, source })?;
        let head = mapped.as_ptr().align_offset(HUGE_BYTES);
        // SAFETY: the mapping is `bytes + HUGE_BYTES` long and head < HUGE_BYTES, so both cuts are inside of
        // it.
        let base = unsafe {
            if head > 0 {
                libc::munmap(mapped.as_ptr().cast(), head);
            }
            let base = mapped.add(head);
            let rest = HUGE_BYTES - head;
            if rest > 0 {
                libc::munmap(base.as_ptr().add(bytes).cast(), rest);
            }
            base
        };
        let pages = if pages == Pages::Base { Pages::Base } else { Pages::Transparent };
        if pages == Pages::Transparent {
            // SAFETY: the range is our mapping. Only advice: a refusal costs speed, not truth.
            unsafe { libc::madvise(base.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE) };
        }
        Ok(Region::of(base, bytes, pages))
    }

    fn of(base: NonNull<u8>, bytes: usize, pages: Pages) -> Region {
        let (is_registered, releases) = (AtomicBool::new(false), AtomicUsize::new(0));
        Region { base, bytes, pages, is_registered, releases }
    }

    /// Map `bytes`, rounded up to base pages and on one. Nothing is touched yet.
    pub(super) fn map_pages(bytes: usize) -> Result<Region, RegionError> {
        let bytes = bytes.max(1).next_multiple_of(page_bytes());
        let base = map_anonymous(bytes, 0).map_err(|source| RegionError { bytes, source })?;
        Ok(Region::of(base, bytes, Pages::Base))
    }

    /// Have pages that are not touched yet come from this memory node while it has free ones, on whichever
    /// node the first touch is. Best effort: a refusal costs speed.
    pub(super) fn prefer_node(&self, node: u32) {
        const WORD_BITS: u32 = libc::c_ulong::BITS;
        let mut nodes = [0 as libc::c_ulong; 16];
        let Some(word) = nodes.get_mut((node / WORD_BITS) as usize) else { return };
        *word = 1 << (node % WORD_BITS);
        // The kernel reads one bit less than this number says (mbind(2), maxnode).
        let count = nodes.len() * WORD_BITS as usize + 1;
        // SAFETY: the range is our mapping, of which contents stay; the kernel reads as many bits as `nodes`
        // has.
        unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.base.as_ptr(),
                self.bytes,
                libc::MPOL_PREFERRED,
                nodes.as_ptr(),
                count,
                0,
            )
        };
    }

    /// Bytes mapped, a multiple of 2 MiB, or of a base page for `Region::map_pages`.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Which pages it got.
    #[must_use]
    pub fn pages(&self) -> Pages {
        self.pages
    }

    /// The first byte.
    #[must_use]
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// The bytes, for a user that is the only one of this region (benchmarks).
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: `&mut self`, and every handle to a part of a region (Buf) lies behind a Pool or a
        // FrameStore that owns the region and never lends `&mut Region`.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.bytes) }
    }

    /// Have pages in `offset .. offset + bytes` now instead of at their first touch; what they hold stays.
    /// Not on a reactor core: the kernel zeroes them.
    ///
    /// # Errors
    /// The system's: it has none, or is older than Linux 5.14.
    pub(super) fn populate(&self, offset: usize, bytes: usize) -> io::Result<()> {
        let is_done = self.advise(offset, bytes, libc::MADV_POPULATE_WRITE);
        if is_done { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Have all of its pages, and where transparent huge pages were asked for, bring the small ones together
    /// to such. A device that finds one small page among them takes all of the region for small ones.
    ///
    /// Not on a reactor core: it takes seconds for a large region. What the region holds stays.
    pub(super) fn settle(&self) -> PageSizes {
        match self.pages {
            Pages::Base => return PageSizes::Base,
            Pages::Huge => return PageSizes::Huge,
            Pages::Transparent => {}
        }
        // Where that fails the device finds the reason out, too.
        let _ = self.populate(0, self.bytes);
        // Of no bytes: only whether the kernel knows it.
        if !self.collapse(0, 0) {
            return PageSizes::Unknown;
        }
        if self.collapse(0, self.bytes) {
            return PageSizes::Huge;
        }
        let all = self.bytes / HUGE_BYTES;
        // A page that somebody just uses is left alone, so twice.
        let is_small = |piece: &usize| {
            let offset = piece * HUGE_BYTES;
            !self.collapse(offset, HUGE_BYTES) && !self.collapse(offset, HUGE_BYTES)
        };
        match (0..all).filter(is_small).count() {
            0 => PageSizes::Huge,
            small => PageSizes::Mixed { small, all },
        }
    }

    /// True: all pieces of 2 MiB there lie on huge pages. A page that a device has is not moved.
    fn collapse(&self, offset: usize, bytes: usize) -> bool {
        self.advise(offset, bytes, libc::MADV_COLLAPSE)
    }

    /// True when the kernel takes the advice. All but [`Region::release`] leave what the pages hold, also
    /// while other threads read or write them.
    fn advise(&self, offset: usize, bytes: usize, advice: libc::c_int) -> bool {
        assert!(
            offset.checked_add(bytes).is_some_and(|end| end <= self.bytes),
            "advice for what is outside of the region"
        );
        // SAFETY: in range (asserted), and our mapping for as long as `self` is. Who releases pages owns them
        // and holds no reference into them.
        unsafe { libc::madvise(self.base.as_ptr().add(offset).cast(), bytes, advice) == 0 }
    }

    /// From now on its pages stay where they are: a device has their addresses. Returns when no release is
    /// under way any more.
    pub(super) fn set_registered(&self) {
        self.is_registered.store(true, Ordering::SeqCst);
        // A release that has not seen it has been counted. It takes a system call.
        while self.releases.load(Ordering::SeqCst) > 0 {
            std::thread::yield_now();
        }
    }

    /// Give the pages of `offset .. offset + bytes` back to the kernel; their contents are undefined
    /// afterwards. Reserved huge pages are kept (the kernel gives them back whole or not at all), and so are
    /// pages that a device knows: it would go on with the old ones.
    pub(super) fn release(&self, offset: usize, bytes: usize) {
        self.release_after(offset, bytes, || ());
    }

    /// [`Region::release`], with something to do between the decision and the release: for a test.
    fn release_after(&self, offset: usize, bytes: usize, decided: impl FnOnce()) {
        assert!(
            offset.checked_add(bytes).is_some_and(|end| end <= self.bytes),
            "release outside of the region"
        );
        if self.pages == Pages::Huge || bytes == 0 || self.is_registered.load(Ordering::SeqCst) {
            return;
        }
        // Counted before the question that decides: who registers either is seen here, or sees the count.
        self.releases.fetch_add(1, Ordering::SeqCst);
        if !self.is_registered.load(Ordering::SeqCst) {
            decided();
            unmaps().tell(self.base.as_ptr().addr() + offset, bytes);
            self.advise(offset, bytes, libc::MADV_DONTNEED);
        }
        self.releases.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        unmaps().tell(self.base.as_ptr().addr(), self.bytes);
        // SAFETY: exactly what `map` mapped; users hold the region by reference count, so none is left.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// Bytes of a base page.
fn page_bytes() -> usize {
    // SAFETY: asks for a number.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).unwrap_or(4096)
}

fn map_anonymous(bytes: usize, flags: libc::c_int) -> io::Result<NonNull<u8>> {
    // SAFETY: a fresh anonymous mapping at an address that the kernel picks touches no memory of ours.
    let addr = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | flags,
            -1,
            0,
        )
    };
    if addr == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(addr.cast()).ok_or_else(|| io::Error::other("mapped at address 0"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The policy and the node of the page at `base`, as the kernel has them.
    fn policy_of(base: NonNull<u8>) -> (libc::c_int, libc::c_ulong) {
        // MPOL_F_ADDR, which the libc crate has not.
        let of_address: libc::c_ulong = 2;
        let (mut mode, mut nodes) = (-1, [0 as libc::c_ulong; 16]);
        // SAFETY: writes to the two places, as long as it is told.
        let result = unsafe {
            let bits = nodes.len() * libc::c_ulong::BITS as usize;
            libc::syscall(
                libc::SYS_get_mempolicy,
                &raw mut mode,
                nodes.as_mut_ptr(),
                bits,
                base.as_ptr(),
                of_address,
            )
        };
        assert_eq!(result, 0, "{}", io::Error::last_os_error());
        (mode, nodes[0])
    }

    #[test]
    fn a_region_of_pages_is_no_larger_than_they_and_comes_from_the_node_that_is_preferred() {
        let region = Region::map_pages(5000).expect("maps");
        assert_eq!(region.bytes() % page_bytes(), 0);
        assert!(region.bytes() < 5000 + page_bytes());
        assert_eq!(policy_of(region.base()), (libc::MPOL_DEFAULT, 0));
        let node = crate::affinity::current_node().expect("a node");
        region.prefer_node(node);
        assert_eq!(policy_of(region.base()), (libc::MPOL_PREFERRED, 1 << node));
        // No machine has it.
        region.prefer_node(u32::MAX);
        assert_eq!(policy_of(region.base()), (libc::MPOL_PREFERRED, 1 << node));
    }

    #[test]
    fn a_region_is_rounded_aligned_zero_and_released_to_zero() {
        for pages in [Pages::Base, Pages::Transparent, Pages::Huge] {
            let mut region = Region::map(5000, pages).expect("maps");
            assert_eq!(region.bytes(), HUGE_BYTES);
            assert_eq!(region.base().as_ptr().align_offset(HUGE_BYTES), 0);
            assert!(region.as_mut_slice().iter().all(|byte| *byte == 0));
            region.as_mut_slice()[4096..8192].fill(7);
            region.release(4096, 4096);
            let kept = region.pages() == Pages::Huge;
            if pages == Pages::Huge && !kept {
                spindle_skip::skip("a region of reserved huge pages: none is free");
            }
            assert_eq!(region.as_mut_slice()[4096], if kept { 7 } else { 0 });
        }
    }

    #[test]
    fn pages_that_a_device_knows_are_never_given_back() {
        let mut region = Region::map(HUGE_BYTES, Pages::Base).expect("maps");
        region.as_mut_slice().fill(7);
        region.set_registered();
        region.release(0, HUGE_BYTES);
        assert!(region.as_mut_slice().iter().all(|byte| *byte == 7), "the device still has these pages");
    }

    #[test]
    fn a_release_that_is_under_way_is_over_before_a_device_knows_the_pages() {
        let region = Region::map(HUGE_BYTES, Pages::Base).expect("maps");
        // SAFETY: in the region; one thread writes to it, and this one reads when that has ended.
        let page = || unsafe { region.base().as_ptr().add(4096) } as usize;
        let is_pinned = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let mut registrar = None;
            region.release_after(0, HUGE_BYTES, || {
                registrar = Some(scope.spawn(|| {
                    region.set_registered();
                    // The page that the device pins. One that comes in its place is zero.
                    // SAFETY: see above.
                    unsafe { (page() as *mut u8).write_volatile(7) };
                    is_pinned.store(true, Ordering::SeqCst);
                }));
                // It has decided to release, and something holds it up.
                let end = std::time::Instant::now() + std::time::Duration::from_millis(200);
                while !is_pinned.load(Ordering::SeqCst) && std::time::Instant::now() < end {
                    std::thread::yield_now();
                }
            });
            registrar.expect("spawned").join().expect("no panic");
        });
        // SAFETY: see above.
        let found = unsafe { (page() as *const u8).read_volatile() };
        assert_eq!(found, 7, "the device has a page that is not the region's any more");
        region.release(0, HUGE_BYTES);
        // SAFETY: see above.
        assert_eq!(unsafe { (page() as *const u8).read_volatile() }, 7, "released though it is registered");
    }

    /// KiB of the mapping of `base` that lie on transparent huge pages.
    fn huge_kib(base: NonNull<u8>) -> usize {
        let maps = std::fs::read_to_string("/proc/self/smaps").expect("smaps");
        let at = base.as_ptr() as usize;
        let is_range = |line: &str| {
            let (start, end) = line.split(' ').next()?.split_once('-')?;
            let parse = |text| usize::from_str_radix(text, 16).ok();
            Some((parse(start)?..parse(end)?).contains(&at))
        };
        let lines = maps.lines().skip_while(|line| is_range(line) != Some(true));
        let line = lines.into_iter().find(|line| line.starts_with("AnonHugePages:")).expect("a line");
        line.split_whitespace().nth(1).and_then(|kib| kib.parse().ok()).expect("a number")
    }

    #[test]
    fn one_small_page_does_not_leave_a_region_that_a_device_takes_on_small_pages() {
        let region = Region::map(2 * HUGE_BYTES, Pages::Transparent).expect("maps");
        let settled = region.settle();
        if settled != PageSizes::Huge {
            // A machine without huge pages, or without a free one: then it says so.
            let is_told = matches!(settled, PageSizes::Mixed { small: 1.., all: 2 } | PageSizes::Unknown);
            assert!(is_told, "{settled:?}");
            return;
        }
        let before = huge_kib(region.base());
        // A trim, as of a RAM disk before any device has it.
        region.release(8192, 4096);
        // SAFETY: in the region, and no other thread reads or writes it.
        unsafe { region.base().as_ptr().write_volatile(9) };
        assert_eq!(huge_kib(region.base()), before - HUGE_BYTES / 1024, "the trim has split a page");
        assert_eq!(region.settle(), PageSizes::Huge);
        assert_eq!(huge_kib(region.base()), before);
        // SAFETY: as above.
        assert_eq!(unsafe { region.base().as_ptr().read_volatile() }, 9, "what it holds stays");
        let base = Region::map(HUGE_BYTES, Pages::Base).expect("maps");
        assert_eq!(base.settle(), PageSizes::Base, "as was asked for");
    }

    #[test]
    fn a_size_that_no_machine_has_is_an_error() {
        let error = Region::map(1 << 60, Pages::Base).expect_err("too large");
        assert!(error.to_string().contains("cannot map 1152921504606846976 bytes"), "{error}");
    }
}
