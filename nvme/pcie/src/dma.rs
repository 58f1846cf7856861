//! Memory that drive and driver share: queues, lists, Identify data.
//!
//! UNSAFETY: accesses an area as atomics, because the drive writes to it at the same time.
#![expect(unsafe_code, reason = "memory that a device writes to")]

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use spindle_reactor::mem::{Area, RegionError};

use crate::function::{Function, MapError, Mapping};

/// An I/O virtual address: the address that the drive uses in DMA.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Iova(pub u64);

impl Iova {
    /// Returns the address plus `bytes`, modulo 2^64.
    #[must_use]
    pub const fn plus(self, bytes: u64) -> Iova {
        Iova(self.0.wrapping_add(bytes))
    }
}

/// Memory page size of the controller (CC.MPS 0).
pub const PAGE_BYTES: u32 = 4096;

/// Error of [`DmaMemory::new`] and [`DmaMemory::near`].
#[derive(Debug, thiserror::Error)]
pub enum DmaError {
    /// Allocation failed.
    #[error(transparent)]
    Memory(#[from] RegionError),
    /// Mapping the memory for the drive failed.
    #[error(transparent)]
    Map(#[from] MapError),
}

/// Contiguous, page-aligned, zeroed memory that is mapped for the drive.
pub struct DmaMemory {
    words: NonNull<AtomicU64>,
    count: usize,
    iova: Iova,
    /// Declared before `_area`, so that the memory is unmapped before it is freed.
    _mapping: Box<dyn Mapping>,
    _area: Area,
}

// SAFETY: `_area` owns the memory, which any thread may free. All access is through `&[AtomicU64]`, see
// `words`.
unsafe impl Send for DmaMemory {}
// SAFETY: shared access is atomic loads and stores only, see `words`.
unsafe impl Sync for DmaMemory {}

impl DmaMemory {
    /// Allocates at least `bytes` of memory and maps the memory for the drive.
    pub fn new(function: &dyn Function, bytes: usize) -> Result<Arc<DmaMemory>, DmaError> {
        DmaMemory::near(None, function, bytes)
    }

    /// As [`DmaMemory::new`], from NUMA node `node` if that has free memory. With `None`, the kernel chooses.
    pub fn near(
        node: Option<u32>,
        function: &dyn Function,
        bytes: usize,
    ) -> Result<Arc<DmaMemory>, DmaError> {
        let area = Area::of_pages(bytes, node)?;
        let mapping = function.map(&area)?;
        let count = area.bytes() / size_of::<AtomicU64>();
        Ok(Arc::new(DmaMemory {
            words: area.base().cast(),
            count,
            iova: mapping.iova(),
            _mapping: mapping,
            _area: area,
        }))
    }

    /// Returns the IOVA of the first byte.
    #[must_use]
    pub fn iova(&self) -> Iova {
        self.iova
    }

    /// Returns the memory as 64-bit words. The drive may change them at any time.
    #[inline]
    #[must_use]
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: `_area` has `count` words, is page-aligned and lives as long as `self`. The area was
        // allocated for this value, and the process accesses the area only as atomics. The drive's writes act
        // like another thread's atomic stores.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr(), self.count) }
    }

    /// Copies from byte `offset`, a multiple of 8, into `to`. Bytes beyond the end read as zeroes.
    pub fn copy_out(&self, offset: usize, to: &mut [u8]) {
        let words = self.words().get(offset / 8..).unwrap_or_default();
        to.fill(0);
        for (word, bytes) in words.iter().zip(to.chunks_mut(8)) {
            let now = word.load(Ordering::Relaxed).to_le_bytes();
            bytes.copy_from_slice(&now[..bytes.len()]);
        }
    }

    /// Fills the memory with zeroes.
    pub fn clear(&self) {
        self.words().iter().for_each(|word| word.store(0, Ordering::Relaxed));
    }
}

impl std::fmt::Debug for DmaMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DmaMemory({} bytes at {:#x})", self.count * 8, self.iova.0)
    }
}
