//! Memory that drive and driver share: queues, lists, Identify data.
//!
//! UNSAFETY: sees a region as atomics, because the drive writes to it while we read.
#![expect(unsafe_code, reason = "memory that a device writes to")]

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use spindle_reactor::mem::{Area, RegionError};

use crate::function::{Function, MapError, Mapping};

/// An address as the drive says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Iova(pub u64);

impl Iova {
    /// The address `bytes` further on.
    #[must_use]
    pub const fn plus(self, bytes: u64) -> Iova {
        Iova(self.0.wrapping_add(bytes))
    }
}

/// Memory pages of the controller: CC.MPS 0.
pub const PAGE_BYTES: u32 = 4096;

/// Why memory for queues could not be had.
#[derive(Debug, thiserror::Error)]
pub enum DmaError {
    /// No memory.
    #[error(transparent)]
    Memory(#[from] RegionError),
    /// The drive could not be given it.
    #[error(transparent)]
    Map(#[from] MapError),
}

/// A contiguous piece of zeroed memory that the drive can reach, on a page.
pub struct DmaMemory {
    words: NonNull<AtomicU64>,
    count: usize,
    iova: Iova,
    /// In this order: the drive loses it before the process does.
    _mapping: Box<dyn Mapping>,
    _area: Area,
}

// SAFETY: memory without thread affinity, seen only as atomics.
unsafe impl Send for DmaMemory {}
// SAFETY: as above.
unsafe impl Sync for DmaMemory {}

impl DmaMemory {
    /// At least `bytes`, mapped for the drive.
    pub fn new(function: &dyn Function, bytes: usize) -> Result<Arc<DmaMemory>, DmaError> {
        DmaMemory::near(None, function, bytes)
    }

    /// The same from a memory node, while that has any.
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

    /// Where the drive sees its first byte.
    #[must_use]
    pub fn iova(&self) -> Iova {
        self.iova
    }

    /// Its bytes as words of 8; the drive may change them at any time.
    #[inline]
    #[must_use]
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: the area is `count` words long, page-aligned, mapped as long as `self` lives; it was
        // mapped for this value alone, and a drive's writes are as another thread's atomic stores.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr(), self.count) }
    }

    /// Copy bytes from byte `offset` on, a multiple of 8, into `to`. What is behind the end reads as zeroes.
    pub fn copy_out(&self, offset: usize, to: &mut [u8]) {
        let words = self.words().get(offset / 8..).unwrap_or_default();
        to.fill(0);
        for (word, bytes) in words.iter().zip(to.chunks_mut(8)) {
            let now = word.load(Ordering::Relaxed).to_le_bytes();
            bytes.copy_from_slice(&now[..bytes.len()]);
        }
    }

    /// Zero all of it.
    pub fn clear(&self) {
        self.words().iter().for_each(|word| word.store(0, Ordering::Relaxed));
    }
}

impl std::fmt::Debug for DmaMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DmaMemory({} bytes at {:#x})", self.count * 8, self.iova.0)
    }
}
