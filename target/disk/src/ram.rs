//! A disk in memory, shared by all cores without a lock.
//!
//! A read pins the frames of its data, and the reply is sent from the frames. A write is received into fresh
//! frames of the disk ([`DiskChannel::prepare`]), which `submit` swaps into the page table. If a page is
//! written in part, the rest is copied from its old frame. Pages of a write that are not whole extents (64
//! KiB) are then copied to their place on the disk. Frames: [`spindle_reactor::mem`].
//!
//! ```text
//!   Read          prepare: pin the frames                      -> Ready, with the pins
//!   Write         prepare: fresh frames (Fill), or Wait -> submit: publish -> Done at once
//!   Deallocate,   submit: within one portion (64 pages)        -> Done at once
//!   WriteZeroes   longer, or no free frame: portion after portion in `poll`, bounded per turn -> Done
//!   Compare-and-write, Flush                                   -> Done at once
//! ```
//!
//! Durability: no data survives the end of the process. The disk has no volatile cache, so Flush and FUA have
//! no effect.
//!
//! Limits: at most 16 TiB of frames, including the slack. A resize cannot exceed the size at creation.

use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Area, Buf, FRAME_BYTES, FrameCore, FrameStore, MemoryWatch, Pages, SealedFrames};

use crate::release;
use crate::shape::{block_shift, checked_blocks, size_refusal};
use crate::{
    Abilities, BlockRange, ChannelContext, Disk, DiskChannel, DiskError, Done, Geometry, IoRequest, Op,
    OpenError, Owner, Prepared, ResizeError, Token, Usage,
};

const FRAME: u64 = FRAME_BYTES as u64;

/// Pages zeroed in one portion. Concurrent zeroings alternate after each portion.
const PORTION_PAGES: u64 = 64;
/// Most portions per turn: 8192 pages, 32 MiB.
const PORTIONS_A_TURN: u32 = 128;
/// Pages freed in one turn after which no further portion begins. Each freed page may cost a system call of
/// about a microsecond.
const PAGES_FREED_A_TURN: u64 = 64;
/// Slack bytes per core, for free frames that the core keeps in its list. With less slack, the free frames of
/// an idle core could block the writes of another core forever.
const CORE_CACHE_BYTES: u64 = 10 << 20;
/// Slack bytes for writes that are being received, and for overwritten pages that are being sent.
const IN_FLIGHT_BYTES: u64 = 64 << 20;

/// Settings of a RAM disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RamSpec {
    /// Capacity in bytes, a multiple of the block size.
    pub bytes: u64,
    /// Bytes of a logical block: 512 or 4096.
    pub block_bytes: u32,
    /// Kind of memory pages to allocate.
    pub pages: Pages,
    /// Clients may read pages without the target's CPU: see [`Seals`](spindle_reactor::mem::Seals). Each
    /// frame takes 8 bytes more, and each write some atomic operations.
    pub has_seals: bool,
}

impl RamSpec {
    /// Returns the default slack: bytes of frames beyond the capacity, for writes in flight and for free
    /// frames in the lists of idle cores. Unused slack costs address space and table entries only.
    #[must_use]
    pub fn slack_bytes_default() -> u64 {
        // Not `available_parallelism`, which counts only the calling thread's affinity mask. That mask may
        // exclude the reactor cores.
        let cores = spindle_reactor::affinity::available_cores().len().max(1);
        IN_FLIGHT_BYTES + CORE_CACHE_BYTES * cores as u64
    }

    /// Returns the bytes of memory of a disk whose pages are all written, including default slack and tables.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        FrameStore::bytes_for(self.bytes, Self::slack_bytes_default(), self.has_seals)
    }
}

/// A RAM disk, shared by all cores. See the module.
pub struct RamDisk {
    shared: Arc<RamShared>,
    bytes_max: u64,
}

struct RamShared {
    name: String,
    store: Arc<FrameStore>,
    block_bytes: u32,
    block_count: AtomicU64,
}

impl RamShared {
    fn geometry(&self) -> Geometry {
        Geometry {
            block_bytes: self.block_bytes,
            block_count: self.block_count.load(Ordering::Relaxed),
            is_read_only: false,
            has_volatile_cache: false,
            can_deallocate: true,
            // Each page changes in one step, but a write of several blocks may span two pages.
            atomic_blocks: 1,
            can_compare_and_write: true,
        }
    }
}

impl RamDisk {
    /// Creates a RAM disk that reads as zeroes. Reserves address space and tables. Memory for a page is
    /// allocated by its first write.
    ///
    /// # Errors
    /// [`OpenError`] when a setting is out of range, the address space cannot be reserved, or the frames
    /// exceed 16 TiB.
    #[expect(clippy::new_ret_no_self, reason = "every kind is made as the interface that its users see")]
    pub fn new(name: &str, spec: RamSpec) -> Result<Arc<dyn Disk>, OpenError> {
        Ok(Arc::new(Self::with_slack(name, spec, RamSpec::slack_bytes_default())?))
    }

    /// Creates a disk as [`RamDisk::new`], with `slack_bytes` bytes of frames beyond the capacity. With
    /// little slack, writes wait for free frames.
    pub fn with_slack(name: &str, spec: RamSpec, slack_bytes: u64) -> Result<RamDisk, OpenError> {
        let block_count = checked_blocks(name, spec.bytes, spec.block_bytes)?;
        release::start();
        let store = FrameStore::new(spec.bytes, slack_bytes, spec.pages, spec.has_seals)
            .map_err(|source| OpenError::Memory { disk: name.to_owned(), source })?;
        let shared = RamShared {
            name: name.to_owned(),
            store,
            block_bytes: spec.block_bytes,
            block_count: AtomicU64::new(block_count),
        };
        Ok(RamDisk { shared: Arc::new(shared), bytes_max: spec.bytes })
    }

    /// Allocates up to 2 MiB of the memory of the disk's frames from byte `offset` on, before the first
    /// writes. Returns the offset of the next call; `None`: all memory is allocated. Not called on a reactor
    /// core. A later Deallocate frees the memory.
    ///
    /// # Errors
    /// The kernel's error: out of memory, or Linux before 5.14.
    pub fn populate(&self, offset: usize) -> std::io::Result<Option<usize>> {
        self.shared.store.populate(offset)
    }

    /// Returns the kind of memory pages in use, which may differ from [`RamSpec::pages`].
    #[must_use]
    pub fn pages(&self) -> Pages {
        self.shared.store.pages()
    }

    /// Opens the handle of one core, as [`Disk::open`], but returns the concrete type.
    #[must_use]
    pub fn open_core(&self, context: &ChannelContext) -> RamChannel {
        RamChannel {
            frames: self.shared.store.core(),
            shift: block_shift(self.shared.block_bytes),
            shared: Arc::clone(&self.shared),
            zeroings: VecDeque::with_capacity(context.depth as usize),
        }
    }

    /// Zeroes the bytes `from .. to`, which a resize removes or adds. Returns false if no frame is free for a
    /// partial page. A growth zeroes: commands in flight during an earlier shrink may have written there.
    fn clear(&self, from: u64, to: u64) -> bool {
        let frames = self.shared.store.core();
        let mut zeroing = Zeroing { token: Token(0), at: from, end: to, is_released: true, result: Ok(()) };
        while zeroing.at < zeroing.end {
            if !zeroing.step(&frames) {
                return false;
            }
        }
        true
    }
}

impl Disk for RamDisk {
    fn name(&self) -> &str {
        &self.shared.name
    }

    fn kind(&self) -> &'static str {
        "ram"
    }

    fn geometry(&self) -> Geometry {
        self.shared.geometry()
    }

    fn open(&self, context: &ChannelContext) -> Result<Box<dyn DiskChannel>, OpenError> {
        Ok(Box::new(self.open_core(context)))
    }

    fn prepare_resize(&self, bytes: u64) -> Result<(), ResizeError> {
        let refuse = |allowed: String| Err(ResizeError::new(&self.shared.name, bytes, allowed));
        if let Some(allowed) = size_refusal(bytes, self.shared.block_bytes) {
            return refuse(allowed);
        }
        if bytes > self.bytes_max {
            return refuse(format!("a RAM disk grows up to the size it was made with, {}", self.bytes_max));
        }
        let before = self.shared.geometry().bytes();
        // Blocks that a growth adds must read as zeroes.
        if bytes > before && !self.clear(before, bytes) {
            return refuse("no frame is free to zero a part of a page; try again".to_owned());
        }
        Ok(())
    }

    fn resize(&self, bytes: u64) -> Result<(), ResizeError> {
        self.prepare_resize(bytes)?;
        let before = self.shared.geometry().bytes();
        let block_count = bytes / u64::from(self.shared.block_bytes);
        self.shared.block_count.store(block_count, Ordering::Release);
        if bytes < before {
            // Frees memory. If no frame is free for a partial page, the next growth zeroes the page.
            let _ = self.clear(bytes, before);
        }
        Ok(())
    }

    fn usage(&self) -> Usage {
        Usage { bytes_used: self.shared.store.usage().pages_used * FRAME }
    }

    fn memory_watch(&self) -> Option<MemoryWatch> {
        Some(self.shared.store.memory_watch())
    }

    fn area(&self) -> Option<Area> {
        Some(self.shared.store.area())
    }

    fn sealed_frames(&self) -> Option<Arc<dyn SealedFrames>> {
        let store = &self.shared.store;
        store.has_seals().then(|| Arc::clone(store) as Arc<dyn SealedFrames>)
    }
}

impl Drop for RamDisk {
    /// Then the service for optimistic reads gives the memory up. Another thread unmaps it.
    fn drop(&mut self) {
        self.shared.store.stop_seals();
        release::release([Arc::clone(&self.shared.store) as release::Former]);
    }
}

/// A range that is being zeroed portion by portion.
struct Zeroing {
    token: Token,
    /// The range is zeroed up to this byte offset.
    at: u64,
    end: u64,
    /// The memory of whole pages is freed.
    is_released: bool,
    /// Result for the [`Done`] of the command.
    result: Result<(), DiskError>,
}

impl Zeroing {
    fn is_one_portion(&self) -> bool {
        self.end <= (self.at / FRAME + PORTION_PAGES) * FRAME
    }

    /// Zeroes one portion. Returns false if no frame is free for a partial page: the caller retries later.
    fn step(&mut self, frames: &Rc<FrameCore>) -> bool {
        let until = self.end.min((self.at / FRAME + PORTION_PAGES) * FRAME);
        // At most PORTION_PAGES pages: 256 KiB.
        let bytes = u32::try_from(until - self.at).unwrap_or(0);
        if !frames.zero(self.at, bytes, self.is_released) {
            return false;
        }
        self.at = until;
        true
    }
}

/// One core's handle on a RAM disk.
pub struct RamChannel {
    frames: Rc<FrameCore>,
    shift: u32,
    shared: Arc<RamShared>,
    /// Zeroings in progress, served round-robin.
    zeroings: VecDeque<Zeroing>,
}

impl RamChannel {
    #[cold]
    fn submit_zeroes(&mut self, token: Token, range: BlockRange, is_released: bool) -> Option<Done> {
        let at = range.offset(self.shift);
        let end = at + range.bytes(self.shift);
        let mut zeroing = Zeroing { token, at, end, is_released, result: Ok(()) };
        if zeroing.is_one_portion() && zeroing.step(&self.frames) {
            return Some(Done { token, result: Ok(()), buf: None });
        }
        self.zeroings.push_back(zeroing);
        None
    }

    #[cold]
    fn poll_zeroings(&mut self, done: &mut Vec<Done>) {
        let used_before = self.frames.store().usage().pages_used;
        for _ in 0..PORTIONS_A_TURN {
            if done.len() == done.capacity() {
                return;
            }
            let Some(mut zeroing) = self.zeroings.pop_front() else { return };
            let has_frames = zeroing.at == zeroing.end || zeroing.step(&self.frames);
            if zeroing.at == zeroing.end {
                done.push(Done { token: zeroing.token, result: zeroing.result, buf: None });
            } else {
                self.zeroings.push_back(zeroing);
            }
            let freed = used_before.saturating_sub(self.frames.store().usage().pages_used);
            if !has_frames || freed >= PAGES_FREED_A_TURN {
                return;
            }
        }
    }
}

impl DiskChannel for RamChannel {
    #[inline]
    fn geometry(&self) -> Geometry {
        self.shared.geometry()
    }

    #[inline]
    fn prepare(&mut self, request: &IoRequest, next: Option<u64>) -> Prepared {
        let (offset, bytes) = (request.range.offset(self.shift), request.range.data_bytes(self.shift));
        if let Op::Write { .. } = request.op {
            return self.frames.take(offset, bytes).map_or(Prepared::Wait, Prepared::Fill);
        }
        if let Some(next) = next {
            self.frames.prefetch_entry(next << self.shift);
        }
        Prepared::Ready(self.frames.read(offset, bytes))
    }

    fn page_in_memory(&self, offset: u64) -> Option<Buf> {
        Some(self.frames.read(offset, FRAME_BYTES))
    }

    fn abilities(&self) -> Abilities {
        Abilities { reads_in_place: true, ..Abilities::default() }
    }

    fn free_bytes(&self) -> u64 {
        self.frames.free_bytes()
    }

    #[inline]
    fn submit(&mut self, token: Token, request: &IoRequest, buf: Option<Buf>) -> Option<Done> {
        let IoRequest { op, range, .. } = *request;
        match op {
            Op::Read => {
                let buf = self.frames.read(range.offset(self.shift), range.data_bytes(self.shift));
                Some(Done { token, result: Ok(()), buf: Some(buf) })
            }
            Op::Write { .. } => {
                let Some(buf) = buf else {
                    return Some(Done { token, result: Err(DiskError::Internal), buf: None });
                };
                assert_eq!(
                    buf.len() as u64,
                    range.bytes(self.shift),
                    "the data of a write are as long as its range"
                );
                self.frames.write(range.offset(self.shift), buf);
                Some(Done { token, result: Ok(()), buf: None })
            }
            Op::Flush => Some(Done { token, result: Ok(()), buf: None }),
            Op::WriteZeroes { deallocate, .. } => self.submit_zeroes(token, range, deallocate),
            Op::Deallocate => self.submit_zeroes(token, range, true),
            Op::Compare | Op::Verify => Some(Done::not_supported(token, buf)),
        }
    }

    fn compare_and_write(
        &mut self,
        token: Token,
        range: BlockRange,
        expected: Buf,
        data: Buf,
    ) -> Option<Done> {
        assert_eq!(range.blocks, 1, "compare-and-write is of one block");
        let swapped = self.frames.compare_and_write(range.offset(self.shift), data, &expected);
        Some(Done { token, result: swapped.map_err(|_differs| DiskError::CompareDiffers), buf: None })
    }

    #[inline]
    fn poll(&mut self, _now: Nanos, done: &mut Vec<Done>) -> bool {
        if self.zeroings.is_empty() {
            return false;
        }
        self.poll_zeroings(done);
        true
    }

    /// Cancels zeroings: no other command is ever in flight. A cancelled zeroing zeroes no further portion,
    /// and the next polls return its completion.
    fn cancel_owner(&mut self, owner: Owner) -> usize {
        let own = self.zeroings.iter_mut().filter(|zeroing| zeroing.token.owner() == owner);
        let cut = |zeroing: &mut Zeroing| {
            zeroing.end = zeroing.at;
            zeroing.result = Err(DiskError::Cancelled);
        };
        own.map(cut).count()
    }

    #[inline]
    fn in_flight(&self) -> usize {
        self.zeroings.len()
    }
}

#[cfg(test)]
mod tests;
