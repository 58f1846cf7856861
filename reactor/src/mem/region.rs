//! [`Region`]: a private anonymous memory mapping, on huge pages if requested and available.
//!
//! The kernel allocates pages at the first access; [`Region::release`] returns them to the kernel.
//! UNSAFETY: mmap, madvise and the raw pointers to the mapping.
#![expect(unsafe_code, reason = "owns a memory mapping")]

use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::unmaps::unmaps;

/// Kind of memory pages of a region: requested, or obtained.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Pages {
    /// The machine's base pages (4 KiB).
    Base,
    /// Base pages, advised to be transparent huge pages (2 MiB). Needs no set-up; the default.
    #[default]
    Transparent,
    /// Reserved huge pages (`vm.nr_hugepages`). [`Region::map`] falls back to [`Pages::Transparent`] when too
    /// few are free.
    Huge,
}

/// Sizes of a region's pages when the region is registered with a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageSizes {
    /// Huge pages only.
    Huge,
    /// Base pages only: huge pages were not requested.
    Base,
    /// Some base pages, although huge pages were requested.
    Mixed {
        /// Number of 2 MiB pieces with at least one base page.
        small: usize,
        /// Number of 2 MiB pieces in the region.
        all: usize,
    },
    /// Not known, as the kernel has no MADV_COLLAPSE (before Linux 6.1).
    Unknown,
}

/// Error of mmap(2), with the size of the region.
#[derive(Debug, thiserror::Error)]
#[error("cannot map {bytes} bytes of memory: {source}")]
pub struct RegionError {
    bytes: usize,
    #[source]
    source: io::Error,
}

/// An anonymous mapping. The drop unmaps it.
#[derive(Debug)]
pub struct Region {
    base: NonNull<u8>,
    bytes: usize,
    pages: Pages,
    /// True when a device may have the addresses of the pages: no page is released to the kernel any more.
    is_registered: AtomicBool,
    /// Count of calls of [`Region::release`] in progress.
    releases: AtomicUsize,
    /// The RAM disk or cache of the region is dropped: no buffer lies in the region any more.
    is_abandoned: AtomicBool,
}

// SAFETY: a mapping has no thread affinity. Its users in this directory ensure that no byte is written while
// another thread uses it: a Pool is used by one thread; FrameStore and FrameWords have protocols for frames.
unsafe impl Send for Region {}
// SAFETY: as above; `&Region` allows only reads of addresses, atomics, and system calls that the kernel
// serialises.
unsafe impl Sync for Region {}

/// Alignment and granularity of the regions of [`Region::map`]: a huge page of x86-64.
pub(super) const HUGE_BYTES: usize = 2 << 20;

impl Region {
    /// Maps `bytes`, at least 1, rounded up and aligned to 2 MiB. Touches no page. Fails as mmap(2).
    pub fn map(bytes: usize, pages: Pages) -> Result<Region, RegionError> {
        let bytes = bytes.max(1).next_multiple_of(HUGE_BYTES);
        if pages == Pages::Huge
            && let Ok(base) = map_anonymous(bytes, libc::MAP_HUGETLB)
        {
            return Ok(Region::of(base, bytes, pages));
        }
        // One huge page more than requested, so that the start can be moved to a boundary.
        let mapped = map_anonymous(bytes + HUGE_BYTES, libc::MAP_NORESERVE)
            .map_err(|source| RegionError { bytes, source })?;
        let head = mapped.as_ptr().align_offset(HUGE_BYTES);
        // SAFETY: the mapping was just made, so nothing refers to it; it is `bytes + HUGE_BYTES` long and
        // head < HUGE_BYTES, so both unmapped parts are inside of it.
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
            // SAFETY: the range is the mapping that was just made. The advice changes no contents; if it is
            // refused, the region is only slower.
            unsafe { libc::madvise(base.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE) };
        }
        Ok(Region::of(base, bytes, pages))
    }

    fn of(base: NonNull<u8>, bytes: usize, pages: Pages) -> Region {
        Region {
            base,
            bytes,
            pages,
            is_registered: AtomicBool::new(false),
            releases: AtomicUsize::new(0),
            is_abandoned: AtomicBool::new(false),
        }
    }

    /// Maps `bytes`, at least 1, rounded up and aligned to base pages. Touches no page. Fails as mmap(2).
    pub(super) fn map_pages(bytes: usize) -> Result<Region, RegionError> {
        let bytes = bytes.max(1).next_multiple_of(page_bytes());
        let base = map_anonymous(bytes, 0).map_err(|source| RegionError { bytes, source })?;
        Ok(Region::of(base, bytes, Pages::Base))
    }

    /// Makes the kernel prefer memory node `node` for pages that are not touched yet, wherever the touching
    /// thread runs. An error, or a node above 1023, is ignored: it costs only speed.
    pub(super) fn prefer_node(&self, node: u32) {
        const WORD_BITS: u32 = libc::c_ulong::BITS;
        let mut nodes = [0 as libc::c_ulong; 16];
        let Some(word) = nodes.get_mut((node / WORD_BITS) as usize) else { return };
        *word = 1 << (node % WORD_BITS);
        // The kernel reads one bit fewer than this count (mbind(2), maxnode).
        let count = nodes.len() * WORD_BITS as usize + 1;
        // SAFETY: the range is the mapping of `self`, and its contents stay; the kernel reads as many bits as
        // `nodes` has.
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

    /// Returns the mapped bytes: a multiple of 2 MiB, or, after `Region::map_pages`, of the base page size.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the kind of pages of the mapping. It may differ from the requested kind.
    #[must_use]
    pub fn pages(&self) -> Pages {
        self.pages
    }

    /// Returns the address of the first byte.
    #[must_use]
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Returns all bytes, for the only user of the region (benchmarks).
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: `&mut self` excludes other users. A Buf refers to a region only through a pool, RAM disk or
        // cache, which has the region in an `Arc` and never lends `&mut Region`.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.bytes) }
    }

    /// Allocates the pages of `offset .. offset + bytes` now instead of at their first access; contents stay.
    /// Never call it on a reactor core: the kernel zeroes the pages.
    ///
    /// # Errors
    /// The error of madvise(2): no memory, or a kernel older than Linux 5.14.
    pub(super) fn populate(&self, offset: usize, bytes: usize) -> io::Result<()> {
        let is_done = self.advise(offset, bytes, libc::MADV_POPULATE_WRITE);
        if is_done { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Allocates all pages of a region with [`Pages::Transparent`] and collapses base pages into huge ones.
    /// If one base page remains, a device maps the whole region by base pages. Regions of other kinds do not
    /// change. Returns the resulting page sizes.
    ///
    /// Takes seconds for a large region, so never call it on a reactor core. Contents stay.
    pub(super) fn collapse_to_huge(&self) -> PageSizes {
        match self.pages {
            Pages::Base => return PageSizes::Base,
            Pages::Huge => return PageSizes::Huge,
            Pages::Transparent => {}
        }
        // An error is ignored: registration with the device needs the same pages and reports it.
        let _ = self.populate(0, self.bytes);
        // A call with 0 bytes succeeds if the kernel has MADV_COLLAPSE.
        if !self.collapse(0, 0) {
            return PageSizes::Unknown;
        }
        if self.collapse(0, self.bytes) {
            return PageSizes::Huge;
        }
        let all = self.bytes / HUGE_BYTES;
        // A page in use at that moment is not collapsed, so each piece is tried twice.
        let is_small = |piece: &usize| {
            let offset = piece * HUGE_BYTES;
            !self.collapse(offset, HUGE_BYTES) && !self.collapse(offset, HUGE_BYTES)
        };
        match (0..all).filter(is_small).count() {
            0 => PageSizes::Huge,
            small => PageSizes::Mixed { small, all },
        }
    }

    /// Collapses the range to huge pages. Returns true when all of it lies on huge pages now. A page that a
    /// device has pinned is not moved.
    fn collapse(&self, offset: usize, bytes: usize) -> bool {
        self.advise(offset, bytes, libc::MADV_COLLAPSE)
    }

    /// Calls madvise(2). Returns true on success. All advice except that of [`Region::release`] keeps the
    /// contents, even while other threads read or write them.
    fn advise(&self, offset: usize, bytes: usize, advice: libc::c_int) -> bool {
        assert!(
            offset.checked_add(bytes).is_some_and(|end| end <= self.bytes),
            "advice for what is outside of the region"
        );
        // SAFETY: the range is inside of the mapping (asserted), which lives as long as `self`. A caller of
        // `release` owns the pages and has no reference to them.
        unsafe { libc::madvise(self.base.as_ptr().add(offset).cast(), bytes, advice) == 0 }
    }

    /// Prevents later releases, as a device may have the pages' addresses. Waits for releases in progress.
    pub(super) fn set_registered(&self) {
        self.is_registered.store(true, Ordering::SeqCst);
        // A release that did not see the flag has been counted; it lasts one system call.
        while self.releases.load(Ordering::SeqCst) > 0 {
            std::thread::yield_now();
        }
    }

    /// Called by the drop of the RAM disk or cache that cuts buffers from the region, after which no buffer
    /// is left. Registrations may still keep the region mapped; caches of registrations are told.
    pub(super) fn abandon(&self) {
        self.is_abandoned.store(true, Ordering::Release);
        unmaps().record(self.base.as_ptr().addr(), self.bytes);
    }

    pub(super) fn is_abandoned(&self) -> bool {
        self.is_abandoned.load(Ordering::Acquire)
    }

    /// Returns the bytes of the region that are in memory now; pages that were swapped out count. 0 if the
    /// kernel does not tell. A system call for each 4 GiB walks the page table: never on a reactor core.
    pub(super) fn resident_bytes(&self) -> usize {
        /// Pages of one call: 1 MiB of answers.
        const PAGES: usize = 1 << 20;
        let page = page_bytes();
        let mut states = vec![0; self.bytes.div_ceil(page).min(PAGES)];
        let mut resident = 0;
        for offset in (0..self.bytes).step_by(PAGES * page) {
            let bytes = (self.bytes - offset).min(PAGES * page);
            // SAFETY: the range is inside of the mapping, which `self` keeps; `states` has a byte for each
            // of its pages.
            let result =
                unsafe { libc::mincore(self.base.as_ptr().add(offset).cast(), bytes, states.as_mut_ptr()) };
            if result == 0 {
                let pages = states.iter().take(bytes.div_ceil(page));
                resident += pages.filter(|state| **state & 1 == 1).count() * page;
            }
        }
        resident.min(self.bytes)
    }

    /// Returns the pages of `offset .. offset + bytes` to the kernel; their contents are undefined
    /// afterwards. No effect on reserved huge pages, which the kernel frees only as a whole. No effect on a
    /// registered region, as the device would continue to use the old pages.
    pub(super) fn release(&self, offset: usize, bytes: usize) {
        self.release_after(offset, bytes, || ());
    }

    /// Implements [`Region::release`], with a hook between the decision and the release, for a test.
    fn release_after(&self, offset: usize, bytes: usize, decided: impl FnOnce()) {
        assert!(
            offset.checked_add(bytes).is_some_and(|end| end <= self.bytes),
            "release outside of the region"
        );
        if self.pages == Pages::Huge || bytes == 0 || self.is_registered.load(Ordering::SeqCst) {
            return;
        }
        // Counted before the flag is read again: either this function sees the registration, or
        // `set_registered` sees the count.
        self.releases.fetch_add(1, Ordering::SeqCst);
        if !self.is_registered.load(Ordering::SeqCst) {
            decided();
            unmaps().record(self.base.as_ptr().addr() + offset, bytes);
            self.advise(offset, bytes, libc::MADV_DONTNEED);
        }
        self.releases.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        unmaps().record(self.base.as_ptr().addr(), self.bytes);
        // SAFETY: the range is exactly the mapping; users hold the region by reference count, so none is
        // left.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

fn page_bytes() -> usize {
    // SAFETY: sysconf has no pointer argument.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).unwrap_or(4096)
}

fn map_anonymous(bytes: usize, flags: libc::c_int) -> io::Result<NonNull<u8>> {
    // SAFETY: an anonymous mapping at an address that the kernel chooses replaces no existing memory.
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

    /// Memory policy and node of the page at `base`, from the kernel.
    fn policy_of(base: NonNull<u8>) -> (libc::c_int, libc::c_ulong) {
        // MPOL_F_ADDR, which the libc crate does not define.
        let of_address: libc::c_ulong = 2;
        let (mut mode, mut nodes) = (-1, [0 as libc::c_ulong; 16]);
        // SAFETY: `mode` and `nodes` outlive the call, and `bits` is the length of `nodes`.
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
    fn a_region_of_base_pages_is_rounded_up_to_a_page_and_prefers_its_numa_node() {
        let region = Region::map_pages(5000).expect("maps");
        assert_eq!(region.bytes() % page_bytes(), 0);
        assert!(region.bytes() < 5000 + page_bytes());
        assert_eq!(policy_of(region.base()), (libc::MPOL_DEFAULT, 0));
        let node = crate::affinity::current_node().expect("a node");
        region.prefer_node(node);
        assert_eq!(policy_of(region.base()), (libc::MPOL_PREFERRED, 1 << node));
        // No machine has this node.
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
                spindle_tests_skip::skip("a region of reserved huge pages: none is free");
            }
            assert_eq!(region.as_mut_slice()[4096], if kept { 7 } else { 0 });
        }
    }

    #[test]
    fn resident_bytes_are_those_that_were_touched() {
        let mut region = Region::map(4 * HUGE_BYTES, Pages::Base).expect("maps");
        assert_eq!(region.resident_bytes(), 0);
        region.as_mut_slice()[4096..4096 + HUGE_BYTES].fill(7);
        assert_eq!(region.resident_bytes(), HUGE_BYTES);
        region.populate(0, 4 * HUGE_BYTES).expect("memory");
        assert_eq!(region.resident_bytes(), 4 * HUGE_BYTES);
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
                // The release is decided and delayed here.
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
        let settled = region.collapse_to_huge();
        if settled != PageSizes::Huge {
            // Without huge pages, or without a free one, the result says so.
            let is_told = matches!(settled, PageSizes::Mixed { small: 1.., all: 2 } | PageSizes::Unknown);
            assert!(is_told, "{settled:?}");
            return spindle_tests_skip::skip("no huge pages, or none free");
        }
        let before = huge_kib(region.base());
        // As a trim of a RAM disk does before it is registered with a device.
        region.release(8192, 4096);
        // SAFETY: in the region, and no other thread reads or writes it.
        unsafe { region.base().as_ptr().write_volatile(9) };
        assert_eq!(huge_kib(region.base()), before - HUGE_BYTES / 1024, "the trim has split a page");
        assert_eq!(region.collapse_to_huge(), PageSizes::Huge);
        assert_eq!(huge_kib(region.base()), before);
        // SAFETY: as above.
        assert_eq!(unsafe { region.base().as_ptr().read_volatile() }, 9, "what it holds stays");
        let base = Region::map(HUGE_BYTES, Pages::Base).expect("maps");
        assert_eq!(base.collapse_to_huge(), PageSizes::Base, "as was asked for");
    }

    #[test]
    fn a_size_that_no_machine_has_is_an_error() {
        let error = Region::map(1 << 60, Pages::Base).expect_err("too large");
        assert!(error.to_string().contains("cannot map 1152921504606846976 bytes"), "{error}");
    }
}
