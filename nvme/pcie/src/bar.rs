//! [`Bar`]: the registers of a controller, mapped.
//!
//! UNSAFETY: volatile access through a pointer into a mapping that lives as long as the value.
#![expect(unsafe_code, reason = "registers of a device")]

use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;

/// Mapped registers of a controller. The drop of the last clone unmaps the registers.
#[derive(Clone)]
pub struct Bar {
    base: NonNull<u8>,
    bytes: usize,
    _mapping: Arc<dyn Any + Send + Sync>,
}

// SAFETY: `_mapping` keeps the registers mapped for any thread. The driver's protocol decides which thread
// accesses a register: each doorbell belongs to one queue, and each queue to one core.
unsafe impl Send for Bar {}
// SAFETY: the mapping lives as long as the value, and every access is one volatile load or store of an
// aligned register.
unsafe impl Sync for Bar {}

impl Bar {
    /// Creates a `Bar` of `bytes` of registers at `base`, kept mapped by `mapping`.
    ///
    /// # Safety
    /// `base` is aligned to 8, and `bytes` from there are mapped readable and writable for as long as
    /// `mapping` lives. No reference in the process points into them.
    ///
    /// # Panics
    /// If `base` is not aligned to 8.
    #[must_use]
    pub unsafe fn new(base: NonNull<u8>, bytes: usize, mapping: Arc<dyn Any + Send + Sync>) -> Bar {
        assert!(base.addr().get().is_multiple_of(8), "registers are aligned");
        Bar { base, bytes, _mapping: mapping }
    }

    /// Returns a `Bar` without registers, for a sharer's queue, whose doorbells are in memory only.
    #[must_use]
    pub(crate) fn none() -> Bar {
        Bar { base: NonNull::<u64>::dangling().cast(), bytes: 0, _mapping: Arc::new(()) }
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Reads the 32-bit register at `offset`. Returns all ones if `offset` is beyond the end, as a bus does,
    /// or unaligned.
    #[inline]
    #[must_use]
    pub fn read32(&self, offset: u64) -> u32 {
        let Some(register) = self.register(offset) else { return u32::MAX };
        // SAFETY: `register` returns aligned addresses within the mapping, which `_mapping` keeps.
        u32::from_le(unsafe { register.read_volatile() })
    }

    /// Writes the 32-bit register at `offset`. No effect if `offset` is beyond the end or unaligned.
    #[inline]
    pub fn write32(&self, offset: u64, value: u32) {
        let Some(register) = self.register(offset) else { return };
        // SAFETY: `register` returns aligned addresses within the mapping, which `_mapping` keeps.
        unsafe { register.write_volatile(value.to_le()) };
    }

    /// Reads the 64-bit register at `offset` by two 32-bit reads, which every controller supports (NVMe over
    /// PCIe Transport 1.0 section 3.1).
    #[must_use]
    pub fn read64(&self, offset: u64) -> u64 {
        u64::from(self.read32(offset)) | u64::from(self.read32(offset + 4)) << 32
    }

    /// Writes the 64-bit register at `offset` by two 32-bit writes.
    pub fn write64(&self, offset: u64, value: u64) {
        let [a, b, c, d, e, f, g, h] = value.to_le_bytes();
        self.write32(offset, u32::from_le_bytes([a, b, c, d]));
        self.write32(offset + 4, u32::from_le_bytes([e, f, g, h]));
    }

    #[inline]
    fn register(&self, offset: u64) -> Option<NonNull<u32>> {
        let offset = usize::try_from(offset).ok().filter(|offset| offset.is_multiple_of(4))?;
        if offset.checked_add(4)? > self.bytes {
            return None;
        }
        // SAFETY: `offset + 4 <= bytes`, checked above, and `_mapping` keeps these bytes mapped.
        Some(unsafe { self.base.add(offset) }.cast())
    }
}

impl std::fmt::Debug for Bar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Bar({} bytes)", self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_are_read_and_written_and_what_is_not_there_reads_as_ones() {
        let memory: &'static mut [u64; 4] = Box::leak(Box::new([0; 4]));
        // SAFETY: leaked, aligned, and not looked at below.
        let bar = unsafe { Bar::new(NonNull::from(memory).cast(), 32, Arc::new(())) };
        bar.write64(8, 0x0102_0304_0506_0708);
        assert_eq!((bar.read32(8), bar.read32(12)), (0x0506_0708, 0x0102_0304));
        assert_eq!(bar.read64(8), 0x0102_0304_0506_0708);
        bar.write32(28, 5);
        assert_eq!(bar.read32(28), 5);
        for offset in [32, 30, 29, u64::MAX, u64::MAX - 3] {
            bar.write32(offset, 9);
            assert_eq!(bar.read32(offset), u32::MAX, "{offset}");
        }
    }
}
