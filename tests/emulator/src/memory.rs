//! The emulator's registers, and its checked DMA access to the host's memory.
//!
//! UNSAFETY: a `Bar` points to the registers; mapped areas are read and written by address.
#![expect(unsafe_code, reason = "plays a device: registers and direct memory access")]

use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use nvme_spec::zerocopy::{FromBytes, IntoBytes};
use nvme_spec::{CQE_BYTES, Cqe, SQE_BYTES, Sqe};
use spindle_nvme_pcie::Bar;
use spindle_reactor::mem::Area;

/// IOVA of the first mapping.
const IOVA_FIRST: u64 = 0x40_0000_0000;
/// Unmapped bytes between two mappings.
const IOVA_GAP: u64 = 2 << 20;

/// Value of a doorbell register without a write since the last `take_doorbell`.
const NOT_RUNG: u32 = u32::MAX;

/// Registers of a controller, in plain memory.
pub(crate) struct Registers {
    words: Box<[AtomicU64]>,
}

impl Registers {
    /// Creates registers that are 0, with doorbells that are not written.
    pub(crate) fn new(bytes: usize) -> Arc<Registers> {
        let words = (0..bytes.div_ceil(8)).map(|_| AtomicU64::new(0)).collect();
        let registers = Arc::new(Registers { words });
        registers.discard_doorbells();
        registers
    }

    /// Returns the registers as a [`Bar`] for the driver. `keep` is dropped with the last clone of the `Bar`.
    pub(crate) fn bar(self: &Arc<Self>, keep: Arc<dyn Any + Send + Sync>) -> Bar {
        let base = NonNull::from(&*self.words).cast();
        let mapping = Arc::new((Arc::clone(self), keep));
        // SAFETY: the words are aligned to 8, and the `Arc` in `mapping` keeps them as long as the `Bar`. The
        // emulator accesses them as atomics only, so other accesses are allowed.
        unsafe { Bar::new(base, self.bytes(), mapping) }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.words.len() * 8
    }

    fn word(&self, offset: u64) -> Option<&AtomicU32> {
        let offset = usize::try_from(offset).ok().filter(|offset| offset.is_multiple_of(4))?;
        let base: *const AtomicU64 = self.words.get(offset / 8)?;
        // SAFETY: the pointer is to one of the two halves of an existing word, borrowed from `self`. All
        // other accesses are atomic, or volatile through a `Bar`.
        Some(unsafe { &*base.cast::<AtomicU32>().add(offset % 8 / 4) })
    }

    /// Returns the 32-bit register at `offset`; all ones if it does not exist or `offset` is not a multiple
    /// of 4.
    pub(crate) fn load(&self, offset: u64) -> u32 {
        self.word(offset).map_or(u32::MAX, |word| u32::from_le(word.load(Ordering::Relaxed)))
    }

    pub(crate) fn load64(&self, offset: u64) -> u64 {
        u64::from(self.load(offset)) | u64::from(self.load(offset + 4)) << 32
    }

    /// Sets the 32-bit register at `offset`, if it exists.
    pub(crate) fn store(&self, offset: u64, value: u32) {
        if let Some(word) = self.word(offset) {
            word.store(value.to_le(), Ordering::Relaxed);
        }
    }

    pub(crate) fn store64(&self, offset: u64, value: u64) {
        let [a, b, c, d, e, f, g, h] = value.to_le_bytes();
        self.store(offset, u32::from_le_bytes([a, b, c, d]));
        self.store(offset + 4, u32::from_le_bytes([e, f, g, h]));
    }

    /// Returns the last value written to the doorbell at `offset` since the last call. `None`: there was no
    /// write, or the value was all ones. Acquire: memory that the host wrote before is visible.
    pub(crate) fn take_doorbell(&self, offset: u64) -> Option<u32> {
        let word = self.word(offset)?;
        if word.load(Ordering::Relaxed) == NOT_RUNG {
            return None;
        }
        Some(u32::from_le(word.swap(NOT_RUNG, Ordering::Acquire))).filter(|value| *value != NOT_RUNG)
    }

    /// Discards all doorbell writes.
    pub(crate) fn discard_doorbells(&self) {
        self.words.iter().skip(0x1000 / 8).for_each(|word| word.store(u64::MAX, Ordering::Relaxed));
    }

    /// Sets all registers to all ones.
    pub(crate) fn vanish(&self) {
        self.words.iter().for_each(|word| word.store(u64::MAX, Ordering::Relaxed));
    }

    /// Sets the registers as after a reset.
    pub(crate) fn clear(&self) {
        self.words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        self.discard_doorbells();
    }
}

/// An area that is mapped at an IOVA.
struct Window {
    id: u64,
    iova: u64,
    bytes: u64,
    /// The memory, allocated as long as the window exists.
    area: Area,
}

/// A contiguous IOVA range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) iova: u64,
    pub(crate) bytes: u32,
}

/// Direction of a DMA access, as the controller sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

/// Mappings of the host's memory, and a record of invalid accesses.
pub(crate) struct HostMemory {
    /// By increasing IOVA.
    windows: Vec<Window>,
    /// Index of the window of the last access, checked first.
    last: usize,
    next_iova: u64,
    next_id: u64,
    pub(crate) is_bus_master: bool,
    /// Maximum bytes of an area that can be mapped.
    pub(crate) map_bytes_max: usize,
    violations: u64,
    first_violation: Option<String>,
}

impl HostMemory {
    pub(crate) fn new() -> HostMemory {
        HostMemory {
            windows: Vec::new(),
            last: 0,
            next_iova: IOVA_FIRST,
            next_id: 0,
            is_bus_master: true,
            map_bytes_max: usize::MAX,
            violations: 0,
            first_violation: None,
        }
    }

    /// Maps an area at an IOVA that was never used. Returns the identifier of the mapping and its IOVA.
    pub(crate) fn map(&mut self, area: &Area) -> (u64, u64) {
        let (id, iova) = (self.next_id, self.next_iova);
        let bytes = area.bytes() as u64;
        self.next_id += 1;
        self.next_iova += bytes.next_multiple_of(IOVA_GAP) + IOVA_GAP;
        self.windows.push(Window { id, iova, bytes, area: area.clone() });
        (id, iova)
    }

    pub(crate) fn unmap(&mut self, id: u64) {
        self.windows.retain(|window| window.id != id);
    }

    pub(crate) fn unmap_all(&mut self) {
        self.windows.clear();
    }

    pub(crate) fn mappings(&self) -> usize {
        self.windows.len()
    }

    pub(crate) fn mapped_bytes(&self) -> usize {
        self.windows.iter().map(|window| window.area.bytes()).sum()
    }

    /// Returns the IOVA of an address of the process; `None` if it is not mapped.
    pub(crate) fn iova_of(&self, address: usize) -> Option<u64> {
        self.windows.iter().find_map(|window| {
            let offset = address.checked_sub(window.area.base().addr().get())?;
            (offset < window.area.bytes()).then(|| window.iova + offset as u64)
        })
    }

    /// Records a violation by the host, or an invalid DMA access that the host caused.
    pub(crate) fn record_violation(&mut self, what: impl FnOnce() -> String) {
        self.violations += 1;
        self.first_violation.get_or_insert_with(what);
    }

    pub(crate) fn violations(&self) -> u64 {
        self.violations
    }

    pub(crate) fn first_violation(&self) -> Option<&str> {
        self.first_violation.as_deref()
    }

    /// Returns true if all pieces may be accessed. Records a violation for the first piece that may not.
    pub(crate) fn may_access(&mut self, pieces: &[Piece], access: Access, what: &str) -> bool {
        pieces.iter().all(|piece| self.translate(piece.iova, piece.bytes as usize, access, what).is_some())
    }

    /// Reads a submission queue entry. `None`, with a violation, if the memory may not be read.
    pub(crate) fn fetch(&mut self, iova: u64) -> Option<Sqe> {
        let mut bytes = [0; SQE_BYTES];
        self.read_words(iova, &mut bytes, "submission queue entry")?;
        Sqe::read_from_bytes(&bytes).ok()
    }

    /// Writes a completion queue entry, the word with the phase tag last. `None`, with a violation, if the
    /// memory may not be written.
    pub(crate) fn post(&mut self, iova: u64, cqe: &Cqe) -> Option<()> {
        let base = self.translate(iova, CQE_BYTES, Access::Write, "completion queue entry")?.cast::<u64>();
        let (result, rest) = cqe.as_bytes().split_first_chunk::<8>()?;
        let rest = rest.first_chunk::<8>()?;
        // SAFETY: `translate` has checked that the 16 bytes are mapped; they are aligned to 16, as queues and
        // areas are page-aligned. The driver accesses them as atomics.
        let (first, second) =
            unsafe { (AtomicU64::from_ptr(base.as_ptr()), AtomicU64::from_ptr(base.add(1).as_ptr())) };
        first.store(u64::from_ne_bytes(*result), Ordering::Relaxed);
        second.store(u64::from_ne_bytes(*rest), Ordering::Release);
        Some(())
    }

    /// Reads words of a list or queue into `to`, whose length is a multiple of 8. `None`, with a violation,
    /// if the memory may not be read or `iova` is not a multiple of 8.
    pub(crate) fn read_words(&mut self, iova: u64, to: &mut [u8], what: &str) -> Option<()> {
        if !iova.is_multiple_of(8) {
            self.record_violation(|| format!("{what} at {iova:#x}, which is not aligned to 8"));
            return None;
        }
        let base = self.translate(iova, to.len(), Access::Read, what)?.cast::<u64>();
        for (index, bytes) in to.chunks_exact_mut(8).enumerate() {
            // SAFETY: the word is mapped and aligned, both checked above. The driver accesses these words as
            // atomics.
            let word = unsafe { AtomicU64::from_ptr(base.add(index).as_ptr()) };
            bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
        }
        Some(())
    }

    /// Reads a 64-bit word of a list.
    pub(crate) fn load64(&mut self, iova: u64, what: &str) -> Option<u64> {
        let mut bytes = [0; 8];
        self.read_words(iova, &mut bytes, what)?;
        Some(u64::from_le_bytes(bytes))
    }

    /// Reads a shadow doorbell. Memory that the host wrote before is visible afterwards. `None` if `iova` is
    /// not mapped or not a multiple of 4.
    pub(crate) fn load32(&mut self, iova: u64) -> Option<u32> {
        let word = self.word32(iova, Access::Read)?;
        // SAFETY: `word32` has checked mapping and alignment; the driver accesses the word as an atomic.
        Some(u32::from_le(unsafe { AtomicU32::from_ptr(word.as_ptr()) }.load(Ordering::SeqCst)))
    }

    /// Writes an EventIdx, before any later load. `None` if `iova` is not mapped as writable or not a
    /// multiple of 4.
    pub(crate) fn store32(&mut self, iova: u64, value: u32) -> Option<()> {
        let word = self.word32(iova, Access::Write)?;
        // SAFETY: `word32` has checked mapping and alignment; the driver accesses the word as an atomic.
        unsafe { AtomicU32::from_ptr(word.as_ptr()) }.store(value.to_le(), Ordering::SeqCst);
        Some(())
    }

    fn word32(&mut self, iova: u64, access: Access) -> Option<NonNull<u32>> {
        let word = self.translate(iova, 4, access, "doorbell buffer")?;
        iova.is_multiple_of(4).then(|| word.cast())
    }

    /// Copies data from the host. `None`, with a violation, if the memory may not be read.
    pub(crate) fn read(&mut self, iova: u64, to: &mut [u8]) -> Option<()> {
        let base = self.translate(iova, to.len(), Access::Read, "data")?;
        // SAFETY: `translate` has checked that the range is mapped, and `to` is the emulator's own memory.
        // The host does not write to a command's buffer before the completion.
        unsafe { base.copy_to_nonoverlapping(NonNull::from(&mut *to).cast(), to.len()) };
        Some(())
    }

    /// Copies data to the host. `None`, with a violation, if the memory may not be written.
    pub(crate) fn write(&mut self, iova: u64, from: &[u8]) -> Option<()> {
        let base = self.translate(iova, from.len(), Access::Write, "data")?;
        // SAFETY: `translate` has checked that the range is mapped and writable, and `from` is the emulator's
        // own memory. The host does not access a command's buffer before the completion.
        unsafe { base.copy_from_nonoverlapping(NonNull::from(from).cast(), from.len()) };
        Some(())
    }

    /// Returns the address in the process of `bytes` at `iova`. `None`, with a violation, if not all of these
    /// may be accessed, or bus mastering is off.
    fn translate(&mut self, iova: u64, bytes: usize, access: Access, what: &str) -> Option<NonNull<u8>> {
        if self.is_bus_master {
            let is_inside = |window: &Window| iova >= window.iova && iova - window.iova < window.bytes;
            if !self.windows.get(self.last).is_some_and(is_inside) {
                self.last = self.windows.iter().position(is_inside).unwrap_or(usize::MAX);
            }
            if let Some(window) = self.windows.get(self.last) {
                let offset = iova - window.iova;
                let is_long = bytes as u64 <= window.bytes - offset;
                let is_allowed = access == Access::Read || window.area.is_writable();
                if let (Ok(offset), true, true) = (usize::try_from(offset), is_long, is_allowed) {
                    // SAFETY: `offset` is within the area, which the window keeps allocated.
                    return Some(unsafe { window.area.base().add(offset) });
                }
            }
        }
        let is_bus_master = self.is_bus_master;
        self.record_violation(|| {
            let why = if is_bus_master { "not mapped so" } else { "bus mastering is off" };
            format!("{access:?} of {bytes} bytes at {iova:#x} ({what}): {why}")
        });
        None
    }
}
