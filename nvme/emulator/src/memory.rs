//! The emulator's raw memory: its registers, and the host's memory behind checked translations.
//!
//! UNSAFETY: registers that a `Bar` points into, and reads and writes of mapped areas by address.
#![expect(unsafe_code, reason = "plays a device: registers and direct memory access")]

use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use nvme_spec::zerocopy::{FromBytes, IntoBytes};
use nvme_spec::{CQE_BYTES, Cqe, SQE_BYTES, Sqe};
use spindle_nvme_pcie::Bar;
use spindle_reactor::mem::Area;

/// Where the first mapping lies, so that no address of the process is one of the drive.
const IOVA_FIRST: u64 = 0x40_0000_0000;
/// What lies between two mappings, mapped to nothing.
const IOVA_GAP: u64 = 2 << 20;

/// What a doorbell holds that was not written since it was last looked at.
const NOT_RUNG: u32 = u32::MAX;

/// Registers of a controller as memory.
pub(crate) struct Registers {
    words: Box<[AtomicU64]>,
}

impl Registers {
    /// `bytes` of registers, all 0, doorbells as if never written.
    pub(crate) fn new(bytes: usize) -> Arc<Registers> {
        let words = (0..bytes.div_ceil(8)).map(|_| AtomicU64::new(0)).collect();
        let registers = Arc::new(Registers { words });
        registers.forget_doorbells();
        registers
    }

    /// The same memory as the driver sees it; `keep` goes with the last clone.
    pub(crate) fn bar(self: &Arc<Self>, keep: Arc<dyn Any + Send + Sync>) -> Bar {
        let base = NonNull::from(&*self.words).cast();
        let mapping = Arc::new((Arc::clone(self), keep));
        // SAFETY: aligned to 8, as long as said, and kept by the `Arc` in `mapping`. It is seen as atomics
        // only, which other accesses may change.
        unsafe { Bar::new(base, self.bytes(), mapping) }
    }

    /// How long.
    pub(crate) fn bytes(&self) -> usize {
        self.words.len() * 8
    }

    fn word(&self, offset: u64) -> Option<&AtomicU32> {
        let offset = usize::try_from(offset).ok().filter(|offset| offset.is_multiple_of(4))?;
        let base: *const AtomicU64 = self.words.get(offset / 8)?;
        // SAFETY: one of the two halves of a word that is there; all other accesses are atomic.
        Some(unsafe { &*base.cast::<AtomicU32>().add(offset % 8 / 4) })
    }

    /// The register of 4 bytes at `offset`.
    pub(crate) fn load(&self, offset: u64) -> u32 {
        self.word(offset).map_or(u32::MAX, |word| u32::from_le(word.load(Ordering::Relaxed)))
    }

    /// The register of 8 bytes at `offset`.
    pub(crate) fn load64(&self, offset: u64) -> u64 {
        u64::from(self.load(offset)) | u64::from(self.load(offset + 4)) << 32
    }

    /// Set the register of 4 bytes at `offset`.
    pub(crate) fn store(&self, offset: u64, value: u32) {
        if let Some(word) = self.word(offset) {
            word.store(value.to_le(), Ordering::Relaxed);
        }
    }

    /// Set the register of 8 bytes at `offset`.
    pub(crate) fn store64(&self, offset: u64, value: u64) {
        let [a, b, c, d, e, f, g, h] = value.to_le_bytes();
        self.store(offset, u32::from_le_bytes([a, b, c, d]));
        self.store(offset + 4, u32::from_le_bytes([e, f, g, h]));
    }

    /// What was last written to the doorbell at `offset` since the last look. What the host wrote to memory
    /// before it rang is seen after this.
    pub(crate) fn take_doorbell(&self, offset: u64) -> Option<u32> {
        let word = self.word(offset)?;
        if word.load(Ordering::Relaxed) == NOT_RUNG {
            return None;
        }
        Some(u32::from_le(word.swap(NOT_RUNG, Ordering::Acquire))).filter(|value| *value != NOT_RUNG)
    }

    /// What was written to doorbells until now is not looked at.
    pub(crate) fn forget_doorbells(&self) {
        self.words.iter().skip(0x1000 / 8).for_each(|word| word.store(u64::MAX, Ordering::Relaxed));
    }

    /// All ones: nothing answers.
    pub(crate) fn vanish(&self) {
        self.words.iter().for_each(|word| word.store(u64::MAX, Ordering::Relaxed));
    }

    /// As after a reset.
    pub(crate) fn clear(&self) {
        self.words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        self.forget_doorbells();
    }
}

/// One area, as the drive sees it.
struct Window {
    id: u64,
    iova: u64,
    bytes: u64,
    /// Kept, so that the memory is there as long as the window.
    area: Area,
}

/// A piece of the host's memory, by the drive's address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) iova: u64,
    pub(crate) bytes: u32,
}

/// What an access is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

/// The host's memory as far as it is mapped for the drive.
pub(crate) struct HostMemory {
    /// By address.
    windows: Vec<Window>,
    /// Index of the window of the last access.
    last: usize,
    next_iova: u64,
    next_id: u64,
    pub(crate) is_bus_master: bool,
    /// A larger area is not mapped.
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

    /// Map an area at addresses that were never used before. Its number and its address.
    pub(crate) fn map(&mut self, area: &Area) -> (u64, u64) {
        let (id, iova) = (self.next_id, self.next_iova);
        let bytes = area.bytes() as u64;
        self.next_id += 1;
        self.next_iova += bytes.next_multiple_of(IOVA_GAP) + IOVA_GAP;
        self.windows.push(Window { id, iova, bytes, area: area.clone() });
        (id, iova)
    }

    /// Take a mapping away.
    pub(crate) fn unmap(&mut self, id: u64) {
        self.windows.retain(|window| window.id != id);
    }

    /// Take all mappings away.
    pub(crate) fn unmap_all(&mut self) {
        self.windows.clear();
    }

    /// How many mappings there are.
    pub(crate) fn mappings(&self) -> usize {
        self.windows.len()
    }

    /// Bytes of all mappings.
    pub(crate) fn mapped_bytes(&self) -> usize {
        self.windows.iter().map(|window| window.area.bytes()).sum()
    }

    /// Where the drive sees an address of the process.
    pub(crate) fn iova_of(&self, address: usize) -> Option<u64> {
        self.windows.iter().find_map(|window| {
            let offset = address.checked_sub(window.area.base().addr().get())?;
            (offset < window.area.bytes()).then(|| window.iova + offset as u64)
        })
    }

    /// Note that the host, or the drive by the host's word, did what it must not.
    pub(crate) fn violate(&mut self, what: impl FnOnce() -> String) {
        self.violations += 1;
        self.first_violation.get_or_insert_with(what);
    }

    pub(crate) fn violations(&self) -> u64 {
        self.violations
    }

    pub(crate) fn first_violation(&self) -> Option<&str> {
        self.first_violation.as_deref()
    }

    /// Whether all of these pieces may be accessed; what may not is noted.
    pub(crate) fn is_open(&mut self, pieces: &[Piece], access: Access, what: &str) -> bool {
        pieces.iter().all(|piece| self.find(piece.iova, piece.bytes as usize, access, what).is_some())
    }

    /// A submission queue entry.
    pub(crate) fn fetch(&mut self, iova: u64) -> Option<Sqe> {
        let mut bytes = [0; SQE_BYTES];
        self.read_words(iova, &mut bytes, "submission queue entry")?;
        Sqe::read_from_bytes(&bytes).ok()
    }

    /// A completion queue entry, its phase tag last.
    pub(crate) fn post(&mut self, iova: u64, cqe: &Cqe) -> Option<()> {
        let base = self.find(iova, CQE_BYTES, Access::Write, "completion queue entry")?.cast::<u64>();
        let (result, rest) = cqe.as_bytes().split_first_chunk::<8>()?;
        let rest = rest.first_chunk::<8>()?;
        // SAFETY: 16 bytes that are mapped, aligned to 16 because queues are aligned to pages and areas too;
        // the other side sees them as atomics.
        let (first, second) =
            unsafe { (AtomicU64::from_ptr(base.as_ptr()), AtomicU64::from_ptr(base.add(1).as_ptr())) };
        first.store(u64::from_ne_bytes(*result), Ordering::Relaxed);
        second.store(u64::from_ne_bytes(*rest), Ordering::Release);
        Some(())
    }

    /// Aligned words of a list or a queue into `to`, whose length is a multiple of 8.
    pub(crate) fn read_words(&mut self, iova: u64, to: &mut [u8], what: &str) -> Option<()> {
        if !iova.is_multiple_of(8) {
            self.violate(|| format!("{what} at {iova:#x}, which is not aligned to 8"));
            return None;
        }
        let base = self.find(iova, to.len(), Access::Read, what)?.cast::<u64>();
        for (index, bytes) in to.chunks_exact_mut(8).enumerate() {
            // SAFETY: mapped and aligned, both checked above; the other side sees atomics.
            let word = unsafe { AtomicU64::from_ptr(base.add(index).as_ptr()) };
            bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
        }
        Some(())
    }

    /// A word of a list.
    pub(crate) fn load64(&mut self, iova: u64, what: &str) -> Option<u64> {
        let mut bytes = [0; 8];
        self.read_words(iova, &mut bytes, what)?;
        Some(u64::from_le_bytes(bytes))
    }

    /// A shadow doorbell. What the host wrote before it is seen after this.
    pub(crate) fn load32(&mut self, iova: u64) -> Option<u32> {
        let word = self.word32(iova, Access::Read)?;
        // SAFETY: mapped and aligned (`word32`); the other side sees atomics.
        Some(u32::from_le(unsafe { AtomicU32::from_ptr(word.as_ptr()) }.load(Ordering::SeqCst)))
    }

    /// An event index; it is out before what is loaded after this.
    pub(crate) fn store32(&mut self, iova: u64, value: u32) -> Option<()> {
        let word = self.word32(iova, Access::Write)?;
        // SAFETY: as in `load32`.
        unsafe { AtomicU32::from_ptr(word.as_ptr()) }.store(value.to_le(), Ordering::SeqCst);
        Some(())
    }

    fn word32(&mut self, iova: u64, access: Access) -> Option<NonNull<u32>> {
        let word = self.find(iova, 4, access, "doorbell buffer")?;
        iova.is_multiple_of(4).then(|| word.cast())
    }

    /// Bytes of the host.
    pub(crate) fn read(&mut self, iova: u64, to: &mut [u8]) -> Option<()> {
        let base = self.find(iova, to.len(), Access::Read, "data")?;
        // SAFETY: mapped, and not the emulator's own memory. The host gave this memory to the drive and
        // leaves it alone until the command is completed.
        unsafe { base.copy_to_nonoverlapping(NonNull::from(&mut *to).cast(), to.len()) };
        Some(())
    }

    /// Bytes to the host.
    pub(crate) fn write(&mut self, iova: u64, from: &[u8]) -> Option<()> {
        let base = self.find(iova, from.len(), Access::Write, "data")?;
        // SAFETY: as in `read`; the area is writable.
        unsafe { base.copy_from_nonoverlapping(NonNull::from(from).cast(), from.len()) };
        Some(())
    }

    /// The translation: where `bytes` at `iova` lie in the process, if all of them may be accessed so.
    fn find(&mut self, iova: u64, bytes: usize, access: Access, what: &str) -> Option<NonNull<u8>> {
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
                    // SAFETY: inside of the area, which the window keeps.
                    return Some(unsafe { window.area.base().add(offset) });
                }
            }
        }
        let is_bus_master = self.is_bus_master;
        self.violate(|| {
            let why = if is_bus_master { "not mapped so" } else { "bus mastering is off" };
            format!("{access:?} of {bytes} bytes at {iova:#x} ({what}): {why}")
        });
        None
    }
}
