//! Disks: the interface that the target core drives, and the kinds that need no driver.
//!
//! A [`DiskSource`] is one disk of the machine, shared by all cores: its name, size and state. Each core
//! opens it once and gets a [`Disk`] of its own, which it drives without a lock: `submit`, then `poll` until
//! [`Done`] comes back.
//!
//! ```text
//!   Qpair::step_buffer -> Disk::prepare -> Ready: ended (ram, null) | Fill | Pool -> Pool::take
//!   Qpair::step_execute -> Disk::submit -> Some(Done): ended (ram, null)
//!                                       -> None, then Core::poll -> Disk::poll -> Done (file)
//!   a read on the fast path: Disk::prepare -> Ready
//! ```
//!
//! A kind of disk of your own: `disk/examples/disk_kind.rs`, and `CONTRIBUTING.md` for its configuration.
//!
//! What a disk answers for: `Done::result` is the truth about the medium as its kind can know it. After
//! `Flush`, or a write with `fua`, the bytes survive what the kind says it survives (a file: power loss; RAM:
//! nothing). What it does not do: it checks no range (the caller has), knows no namespace and no NVMe status.
//!
//! Limits: a command is at most [`BLOCKS_MAX`] blocks; data of one command is one [`Buf`].

#![forbid(unsafe_code)]

mod backend;
pub mod cache;
pub mod delay;
pub mod exports;
pub mod fault;
pub mod file;
mod layer;
mod lock;
pub mod medium_id;
pub mod ng;
pub mod null;
pub mod ram;
mod shape;
pub mod signature;
pub mod source;

use std::collections::VecDeque;

use nvme_spec::status::{Status, StatusType};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Buf;

pub use backend::{compare_and_write, guard};
pub use cache::{CacheChange, CacheCounts, CacheMode, CacheSpec, CacheUse, CachedDisk, PolicyKind};
pub use delay::{DelayDisk, DelaySpec};
pub use fault::{Broken, Fault, FaultControl, FaultDisk, OpKind};
pub use file::{FileDisk, FileFacts, FileSpec};
pub use ng::{NgDisk, NgFacts, NgSpec};
pub use null::{NullDisk, NullSpec};
pub use ram::{RamDisk, RamSpec};
pub use source::{CoreContext, DiskSource, Health, OpenError, ResizeError, Usage};

/// Most blocks in one command: the 16-bit zero-based NLB of NVM commands (NVM Command Set 3.2.1), and the 32
/// bits that Dataset Management ranges have.
pub const BLOCKS_MAX: u32 = u32::MAX;

/// Shape of a disk. Changes only by a resize.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes of a logical block: 512 or 4096.
    pub block_bytes: u32,
    /// Blocks of the disk.
    pub block_count: u64,
    /// Writes are refused.
    pub is_read_only: bool,
    /// A write is on the medium only after a flush (NVMe calls it a volatile write cache).
    pub has_volatile_cache: bool,
    /// Deallocated blocks give their space back.
    pub can_deallocate: bool,
    /// Blocks that one write changes in one step as seen by readers, at least 1.
    pub atomic_blocks: u32,
    /// Compare-and-write of one block is one step as seen by every core.
    pub can_compare_and_write: bool,
}

impl Geometry {
    /// Capacity in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.block_count.saturating_mul(u64::from(self.block_bytes))
    }
}

/// Blocks `lba .. lba + blocks`; the caller has checked that they are on the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockRange {
    /// First block.
    pub lba: u64,
    /// Number of blocks.
    pub blocks: u32,
}

/// What to do with a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// Read the range.
    Read,
    /// Write the buffer to the range. With `fua` it is on the medium before `Done`.
    Write {
        /// Force unit access.
        fua: bool,
    },
    /// Everything that was acknowledged before goes to the medium. The range is not looked at.
    Flush,
    /// The range reads as zeroes afterwards.
    WriteZeroes {
        /// The space may be given back (DEAC).
        deallocate: bool,
        /// Force unit access.
        fua: bool,
    },
    /// The host does not need the range any more, and gives its space back. What gave it back reads as
    /// zeroes, where [`DiskSource::deallocated_is_zero`]; a drive may keep some of a large range as it was.
    Deallocate,
    /// The range holds the bytes of the buffer, else [`DiskError::CompareDiffers`]. Nothing is changed. Where
    /// [`Abilities::compare`]; [`DiskError::NotSupported`] elsewhere.
    Compare,
    /// The range can be read. Where [`Abilities::verify`]; [`DiskError::NotSupported`] elsewhere.
    Verify,
}

impl Op {
    /// It changes blocks.
    #[inline]
    #[must_use]
    pub fn is_write(self) -> bool {
        match self {
            Op::Write { .. } | Op::WriteZeroes { .. } | Op::Deallocate => true,
            Op::Read | Op::Flush | Op::Compare | Op::Verify => false,
        }
    }
}

/// What a disk does itself of what its user can put together from reads and writes: see
/// [`Disk::abilities`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Abilities {
    /// [`Op::Compare`].
    pub compare: bool,
    /// [`Op::Verify`].
    pub verify: bool,
    /// [`Disk::copy`].
    pub copy: bool,
    /// [`Disk::prepare`] says `Ready` to every Read (a layer that delays it, `Later`), and [`Disk::submit`]
    /// brings a pin where it is given no buffer: the caller takes no buffer for what is read.
    pub reads_in_place: bool,
}

/// Why a disk could not do it. The target core maps these to NVMe status codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DiskError {
    /// The medium could not be read; repeating will not help.
    #[error("unrecovered read error")]
    MediaRead,
    /// The medium could not be written; repeating will not help.
    #[error("write fault")]
    MediaWrite,
    /// No space is left behind a thin disk.
    #[error("no space left")]
    NoSpace,
    /// The disk takes no writes.
    #[error("write protected")]
    WriteProtected,
    /// This kind cannot do that at all.
    #[error("not supported by this disk")]
    NotSupported,
    /// The bytes on the disk are not those expected (compare, compare-and-write).
    #[error("compare failed")]
    CompareDiffers,
    /// Something else, which may pass.
    #[error("internal error")]
    Internal,
    /// The disk is gone for good.
    #[error("disk is gone")]
    Gone,
    /// What the NVMe device itself says of its medium: the host gets the code and DNR as they are, so that it
    /// repeats where the device says that it may. Made by [`DiskError::device`].
    #[error("the device says: {0}")]
    Device(Status),
    /// Its submitter is gone ([`Disk::cancel_owner`]): some of it was not done, and will not be.
    #[error("cancelled: its submitter is gone")]
    Cancelled,
}

impl DiskError {
    /// The device's own answer, without what refers to the device: M and its retry delays (CRD).
    #[must_use]
    pub fn device(status: Status) -> DiskError {
        if status.is_success() {
            return DiskError::Internal; // no failure can be told to the host as a success
        }
        DiskError::Device(if status.is_dnr() { status.code().dnr() } else { status.code() })
    }

    /// What the status of an NVMe controller behind a disk means for the host. What it says of its medium
    /// goes to the host as it is: whether it may be repeated is the device's word. What it says of the
    /// command that it was given, and of itself, the host does not know: an internal error.
    #[must_use]
    pub fn of_status(status: Status) -> DiskError {
        match status.code() {
            Status::CAPACITY_EXCEEDED | Status::NAMESPACE_INSUFFICIENT_CAPACITY => DiskError::NoSpace,
            Status::NAMESPACE_IS_WRITE_PROTECTED | Status::WRITE_TO_READ_ONLY_RANGE => {
                DiskError::WriteProtected
            }
            Status::INVALID_OPCODE => DiskError::NotSupported,
            Status::COMPARE_FAILURE => DiskError::CompareDiffers,
            Status::ACCESS_DENIED => DiskError::Internal,
            code if code.sct() == StatusType::MEDIA => DiskError::device(status),
            _ => DiskError::Internal,
        }
    }

    /// It is an error of the medium, as the SMART log counts them.
    #[must_use]
    pub fn is_media(self) -> bool {
        if let DiskError::Device(status) = self {
            return status.sct() == StatusType::MEDIA;
        }
        matches!(self, DiskError::MediaRead | DiskError::MediaWrite)
    }
}

/// The submitter's own name for a command in flight; comes back unchanged. Its upper 32 bits are the
/// [`Owner`], the only part that a disk looks at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Token(pub u64);

impl Token {
    /// Whose command it is.
    #[inline]
    #[must_use]
    pub fn owner(self) -> Owner {
        Owner((self.0 >> 32) as u32)
    }
}

/// Whose command it is: a queue pair of the core. All commands of one owner are forgotten together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Owner(pub u32);

/// A command has ended.
#[derive(Debug)]
pub struct Done {
    /// Which.
    pub token: Token,
    /// How.
    pub result: Result<(), DiskError>,
    /// The buffer of a read, filled; or the one of a write or a compare, back (a disk that keeps it gives
    /// `None`).
    pub buf: Option<Buf>,
}

impl Done {
    /// The end of a command that this kind of disk does not have; the buffer goes back untouched.
    pub(crate) fn not_supported(token: Token, buf: Option<Buf>) -> Done {
        Done { token, result: Err(DiskError::NotSupported), buf }
    }

    /// The end of a command that was not begun and whose submitter is gone.
    pub(crate) fn cancelled(token: Token, buf: Option<Buf>) -> Done {
        Done { token, result: Err(DiskError::Cancelled), buf }
    }

    /// Move what has ended from `ready` to `done`, as far as there is room: the end of each [`Disk::poll`].
    #[inline]
    pub fn give(ready: &mut VecDeque<Done>, done: &mut Vec<Done>) {
        let count = ready.len().min(done.capacity() - done.len());
        done.extend(ready.drain(..count));
    }

    /// How many of them are of `owner`.
    pub fn count_of<'a>(owner: Owner, ended: impl IntoIterator<Item = &'a Done>) -> usize {
        ended.into_iter().filter(|done| done.token.owner() == owner).count()
    }
}

/// A command for a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IoRequest {
    /// What to do.
    pub op: Op,
    /// With which blocks.
    pub range: BlockRange,
    /// What its host says of a Read's or a Write's data: Dataset Management, the low byte of CDW13 (NVM
    /// Command Set, Read and Write). 0: nothing.
    pub hints: u8,
    /// Its host: a number that no two hosts of the process have at a time. 0: none.
    pub client: u16,
}

impl IoRequest {
    /// Without hints, of no host.
    #[inline]
    #[must_use]
    pub const fn new(op: Op, range: BlockRange) -> IoRequest {
        IoRequest { op, range, hints: 0, client: 0 }
    }
}

/// Where the data of a Read or a Write is, or is to be: a disk's answer to [`Disk::prepare`].
#[derive(Debug)]
pub enum Prepared {
    /// A Read's data, where it lies, pinned until the buffer is dropped: the Read has ended.
    Ready(Buf),
    /// Memory of the disk, to be submitted with the command: a Write's data is filled into it before.
    Fill(Buf),
    /// A buffer of the core's pool is to be submitted with the command, or one with each piece of it.
    Pool,
    /// A Read's data comes with its [`Done`], in memory of the disk: it is to be submitted at once, without a
    /// buffer.
    Later,
    /// No memory of the disk is free: ask again later.
    Wait,
}

/// One core's handle on a disk.
pub trait Disk {
    /// Its shape now.
    fn geometry(&self) -> Geometry;

    /// The disk that this one is a layer in front of. What a layer does not say of itself is what that one
    /// says.
    fn inner(&self) -> Option<&dyn Disk> {
        None
    }

    /// Where the data of this Read or Write is, or is to be. What it gives is for this command alone;
    /// dropped, it is free again. `next` is the block that is probably read second next, unchecked: a hint,
    /// to begin to fetch what will be looked up for it.
    fn prepare(&mut self, request: &IoRequest, next: Option<u64>) -> Prepared {
        let _ = (request, next);
        Prepared::Pool
    }

    /// Bytes that [`Prepared::Fill`] has for Writes of all cores together, nearly; what a user that is to
    /// leave others theirs compares with what it holds. A disk that gives no memory has as much as is wanted.
    fn free_bytes(&self) -> u64 {
        self.inner().map_or(u64::MAX, Disk::free_bytes)
    }

    /// Begin a command. `Some` when it ended at once. `buf` is the destination of a Read (of the pool or from
    /// [`Disk::prepare`]; `None` where that says `Later`, or [`Abilities::reads_in_place`]), the data of a
    /// Write (likewise), the bytes that a Compare expects (of the core's pool), `None` for the others. A
    /// command beyond what the disk can have in flight is queued by the disk, in order.
    fn submit(&mut self, token: Token, request: &IoRequest, buf: Option<Buf>) -> Option<Done>;

    /// Write `data` to the range of one block if it holds `expected` now, in one step as seen by every core.
    /// Where [`Geometry::can_compare_and_write`]; [`DiskError::NotSupported`] elsewhere.
    fn compare_and_write(
        &mut self,
        token: Token,
        range: BlockRange,
        expected: Buf,
        data: Buf,
    ) -> Option<Done> {
        let _ = (range, expected, data);
        Some(Done { token, result: Err(DiskError::NotSupported), buf: None })
    }

    /// Which commands it does itself now, of any length: a disk whose device has limits cuts them. It may be
    /// asked before each command; a command whose ability went meanwhile ends with an error.
    fn abilities(&self) -> Abilities {
        self.inner().map_or_else(Abilities::default, Disk::abilities)
    }

    /// Copy the blocks `from` to as many blocks from `to` on; the caller has checked that both are on the
    /// disk and that they do not overlap. One that fails may have copied any of them. It is a write as
    /// [`Disk::compare_and_write`] sees it: a disk that has both keeps them apart. Where
    /// [`Abilities::copy`]; [`DiskError::NotSupported`] elsewhere.
    fn copy(&mut self, token: Token, from: BlockRange, to: u64, fua: bool) -> Option<Done> {
        let _ = (from, to, fua);
        Some(Done::not_supported(token, None))
    }

    /// Collect what has ended, at most what fits `done`'s spare capacity (it is never grown), and send what
    /// was submitted since the last call to the device. `now` never goes back; whatever waits for a time
    /// counts by it. True when there was anything to do.
    fn poll(&mut self, now: Nanos, done: &mut Vec<Done>) -> bool;

    /// Cut short the commands of `owner`, which is gone. None of them is begun any more, and none that failed
    /// is given to the medium again; a long one ends with the piece that the medium has. Each still comes
    /// back as a [`Done`], with [`DiskError::Cancelled`] where it was cut short.
    ///
    /// How many are still to come back: once they have, nothing that `owner` submitted on this core reaches
    /// the medium any more. It submits nothing after this.
    fn cancel_owner(&mut self, owner: Owner) -> usize;

    /// True while a write of some of these blocks, of any core, that has ended with an error may still change
    /// them. Where every write has done all it does when it ends: never.
    fn may_still_write(&self, range: BlockRange) -> bool {
        self.inner().is_some_and(|inner| inner.may_still_write(range))
    }

    /// The configuration has changed: what the source was told before takes effect on this core.
    fn reconfigure(&mut self) {}

    /// Commands in flight, so that a drain knows when it is over.
    fn in_flight(&self) -> usize;
}

#[cfg(test)]
mod testing;

#[cfg(test)]
#[global_allocator]
static ALLOCATOR: spindle_reactor::alloc_count::CountingAllocator =
    spindle_reactor::alloc_count::CountingAllocator;
