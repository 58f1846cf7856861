//! Disks: the interface that the target core drives, and the kinds that need no driver.
//!
//! A [`DiskSource`] is one disk of the machine, shared by all cores: its name, size and state. Each core
//! opens it once and gets a [`Disk`] of its own, used without a lock: `submit`, then `poll` until it returns
//! [`Done`].
//!
//! ```text
//!   Qpair::read_fast_path -> Disk::prepare -> Ready: ended (ram, null, a cache hit)
//!   Qpair::step_buffer  -> Disk::prepare -> Ready: ended | Fill | Pool -> Pool::take
//!   Qpair::step_execute -> Disk::submit -> Some(Done): ended (ram, null)
//!                                       -> None, then TargetCore::poll -> Disk::poll -> Done
//!                                          (file, ng, nvme, remote)
//! ```
//!
//! How to add a kind: `disk/examples/disk_kind.rs`; its configuration: `CONTRIBUTING.md`.
//!
//! Guarantees: `Done::result` reports the outcome on the medium. After `Flush`, or a write with `fua`, the
//! bytes survive the failures that the kind documents (a file: power loss; RAM: none). Not done here: range
//! checks (the caller has done them), namespaces.
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

/// Most blocks in one command. NLB has 16 bits (NVM Command Set 3.2.1), the length of a Dataset Management
/// range 32.
pub const BLOCKS_MAX: u32 = u32::MAX;

/// Size and properties of a disk. They change by a resize, with the far target of a `remote` disk, and when
/// the medium refuses to deallocate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes of a logical block: 512 or 4096.
    pub block_bytes: u32,
    /// Number of logical blocks.
    pub block_count: u64,
    /// Writes end with [`DiskError::WriteProtected`].
    pub is_read_only: bool,
    /// A write without FUA is on the medium only after a flush; reported to hosts as VWC in Identify
    /// Controller.
    pub has_volatile_cache: bool,
    /// [`Op::Deallocate`] frees the space of the blocks on the medium.
    pub can_deallocate: bool,
    /// Largest write, in blocks, that readers never see in part. At least 1.
    pub atomic_blocks: u32,
    /// [`Disk::compare_and_write`] of one block is atomic for all cores.
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

/// Operation of an [`IoRequest`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// Read the range into the buffer.
    Read,
    /// Write the buffer to the range. With `fua` it is on the medium before `Done`.
    Write {
        /// Force unit access.
        fua: bool,
    },
    /// Bring all acknowledged writes to the medium. The range is ignored.
    Flush,
    /// Make the range read as zeroes.
    WriteZeroes {
        /// The space may be freed (DEAC).
        deallocate: bool,
        /// Force unit access.
        fua: bool,
    },
    /// Free the space of the range (Dataset Management, Deallocate). Freed blocks read as zeroes where
    /// [`DiskSource::deallocated_is_zero`]; a drive may leave part of a large range as it was.
    Deallocate,
    /// Compare the range with the buffer; [`DiskError::CompareDiffers`] where they differ. Needs
    /// [`Abilities::compare`], otherwise [`DiskError::NotSupported`].
    Compare,
    /// Read the range without a transfer. Needs [`Abilities::verify`], otherwise [`DiskError::NotSupported`].
    Verify,
}

impl Op {
    /// True where the operation may change blocks.
    #[inline]
    #[must_use]
    pub fn is_write(self) -> bool {
        match self {
            Op::Write { .. } | Op::WriteZeroes { .. } | Op::Deallocate => true,
            Op::Read | Op::Flush | Op::Compare | Op::Verify => false,
        }
    }
}

/// Optional operations of a disk, which its user otherwise composes from reads and writes: see
/// [`Disk::abilities`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Abilities {
    /// The disk does [`Op::Compare`].
    pub compare: bool,
    /// The disk does [`Op::Verify`].
    pub verify: bool,
    /// The disk does [`Disk::copy`].
    pub copy: bool,
    /// [`Disk::prepare`] returns `Ready` for every Read (through the delay layer `Later`, through the fault
    /// layer `Fill` for a read with a fault).
    /// [`Disk::submit`] of a Read without a buffer returns a pin on the data.
    pub reads_in_place: bool,
}

/// Why a command failed. The target core maps these to NVMe status codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DiskError {
    /// The medium cannot be read; a repetition does not help.
    #[error("unrecovered read error")]
    MediaRead,
    /// The medium cannot be written; a repetition does not help.
    #[error("write fault")]
    MediaWrite,
    /// The medium below a thinly provisioned disk is full.
    #[error("no space left")]
    NoSpace,
    /// A write to a read-only disk.
    #[error("write protected")]
    WriteProtected,
    /// The kind of disk, or its device, does not have the operation.
    #[error("not supported by this disk")]
    NotSupported,
    /// The blocks differ from the expected data (Compare, compare-and-write).
    #[error("compare failed")]
    CompareDiffers,
    /// Any other failure; a repetition may succeed.
    #[error("internal error")]
    Internal,
    /// The device was removed, or the disk cannot use it any more.
    #[error("disk is gone")]
    Gone,
    /// Status of the NVMe device below. The host gets its code and DNR, so that it repeats the command where
    /// the device allows it. Made by [`DiskError::device`].
    #[error("the device says: {0}")]
    Device(Status),
    /// Cancelled by [`Disk::cancel_owner`]; the command may have been executed in part, in whole or not at
    /// all.
    #[error("cancelled: its submitter is gone")]
    Cancelled,
}

impl DiskError {
    /// [`DiskError::Device`] without the fields that refer to the device: M and CRD.
    #[must_use]
    pub fn device(status: Status) -> DiskError {
        if status.is_success() {
            return DiskError::Internal; // an error must not be reported to the host as success
        }
        DiskError::Device(if status.is_dnr() { status.code().dnr() } else { status.code() })
    }

    /// The error for a status of the NVMe controller behind a disk. Full, write protected, invalid opcode and
    /// compare failure have an error of their own. Other media errors, except `ACCESS_DENIED`, are passed to
    /// the host with their DNR. Any other status concerns the command that this process has sent, which the
    /// host does not know: an internal error.
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

    /// True for the errors that "Media and Data Integrity Errors" of the SMART log counts.
    #[must_use]
    pub fn is_media(self) -> bool {
        if let DiskError::Device(status) = self {
            return status.sct() == StatusType::MEDIA;
        }
        matches!(self, DiskError::MediaRead | DiskError::MediaWrite)
    }
}

/// Names a command in flight; chosen by the submitter and returned in [`Done`]. The upper 32 bits are the
/// [`Owner`]; a disk does not interpret the rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Token(pub u64);

impl Token {
    /// The queue pair that submitted the command.
    #[inline]
    #[must_use]
    pub fn owner(self) -> Owner {
        Owner((self.0 >> 32) as u32)
    }
}

/// Submitter of a command: a queue pair of the core. [`Disk::cancel_owner`] cancels its commands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Owner(pub u32);

/// Completion of a command.
#[derive(Debug)]
pub struct Done {
    /// Token given to `submit`.
    pub token: Token,
    /// Outcome.
    pub result: Result<(), DiskError>,
    /// The buffer with the data of a read, or the buffer given with a write or compare (of a
    /// compare-and-write: `data`). `None` where the disk keeps it, also after a failure.
    pub buf: Option<Buf>,
}

impl Done {
    /// Completion with [`DiskError::NotSupported`]; returns the buffer unchanged.
    pub(crate) fn not_supported(token: Token, buf: Option<Buf>) -> Done {
        Done { token, result: Err(DiskError::NotSupported), buf }
    }

    /// Completion with [`DiskError::Cancelled`]; returns the buffer unchanged.
    pub(crate) fn cancelled(token: Token, buf: Option<Buf>) -> Done {
        Done { token, result: Err(DiskError::Cancelled), buf }
    }

    /// Moves completions from `ready` to `done`, up to the spare capacity of `done`.
    #[inline]
    pub fn give(ready: &mut VecDeque<Done>, done: &mut Vec<Done>) {
        let count = ready.len().min(done.capacity() - done.len());
        done.extend(ready.drain(..count));
    }

    /// Number of completions in `ended` whose command belongs to `owner`.
    pub fn count_of<'a>(owner: Owner, ended: impl IntoIterator<Item = &'a Done>) -> usize {
        ended.into_iter().filter(|done| done.token.owner() == owner).count()
    }
}

/// A command for a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IoRequest {
    /// Operation.
    pub op: Op,
    /// Blocks of the operation; ignored by Flush.
    pub range: BlockRange,
    /// Dataset Management hints of a Read or Write: the low byte of CDW13 (NVM Command Set, Read and Write).
    /// 0: none.
    pub hints: u8,
    /// Number of the host, unique among the connected hosts of the process. 0: none.
    pub client: u16,
}

impl IoRequest {
    /// A request without hints and without a host.
    #[inline]
    #[must_use]
    pub const fn new(op: Op, range: BlockRange) -> IoRequest {
        IoRequest { op, range, hints: 0, client: 0 }
    }
}

/// Where the data of a Read or Write is to be placed: the result of [`Disk::prepare`].
#[derive(Debug)]
pub enum Prepared {
    /// The Read has ended: its data in the disk's memory, pinned until the buffer is dropped.
    Ready(Buf),
    /// A Write: memory of the disk for its data. The caller fills it and submits it with the command. Through
    /// the fault layer also a Read: the buffer to submit it with.
    Fill(Buf),
    /// The caller submits the command with a buffer of the core's pool, or each piece of the command with
    /// one.
    Pool,
    /// A Read: submit it at once without a buffer. Its [`Done`] returns the data in memory of the disk.
    Later,
    /// No memory of the disk is free now; call again later.
    Wait,
}

/// One core's handle on a disk.
pub trait Disk {
    /// Current geometry.
    fn geometry(&self) -> Geometry;

    /// The inner disk of a layer. Methods that a layer does not implement are forwarded to it.
    fn inner(&self) -> Option<&dyn Disk> {
        None
    }

    /// Chooses the memory for the data of a Read or Write. Returned memory belongs to this command and is
    /// free again when dropped. `next` is a hint: the block that is probably read after the next read,
    /// unchecked, so that the disk can prefetch its lookup tables.
    fn prepare(&mut self, request: &IoRequest, next: Option<u64>) -> Prepared {
        let _ = (request, next);
        Prepared::Pool
    }

    /// Approximate number of bytes that [`Prepared::Fill`] can still give to Writes of all cores together.
    /// Callers limit their share by it. `u64::MAX`: the disk gives no memory of its own.
    fn free_bytes(&self) -> u64 {
        self.inner().map_or(u64::MAX, Disk::free_bytes)
    }

    /// Begins a command; `Some` when it has ended already. `buf` by operation: Read: the destination, of the
    /// pool or from [`Disk::prepare`]; `None` after `Later` or with [`Abilities::reads_in_place`]. Write: the
    /// data, from the same sources. Compare: the expected bytes, in a buffer of the core's pool. Others:
    /// `None`. The disk queues commands beyond its depth, in order.
    fn submit(&mut self, token: Token, request: &IoRequest, buf: Option<Buf>) -> Option<Done>;

    /// Writes `data` to a range of one block if the block equals `expected`, atomically for all cores. Needs
    /// [`Geometry::can_compare_and_write`], otherwise [`DiskError::NotSupported`].
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

    /// Optional operations that the disk has now, for any length: a disk whose device has limits splits the
    /// command. May change between commands; a command whose ability was lost in between ends with an error.
    fn abilities(&self) -> Abilities {
        self.inner().map_or_else(Abilities::default, Disk::abilities)
    }

    /// Copies the blocks `from` to as many blocks starting at `to`. The caller has checked that both are on
    /// the disk and do not overlap. A copy that fails may have copied any of the blocks.
    /// [`Disk::compare_and_write`] is atomic with respect to it, as to a write. Needs [`Abilities::copy`],
    /// otherwise [`DiskError::NotSupported`].
    fn copy(&mut self, token: Token, from: BlockRange, to: u64, fua: bool) -> Option<Done> {
        let _ = (from, to, fua);
        Some(Done::not_supported(token, None))
    }

    /// Sends to the device the commands submitted since the last call, and adds completions to `done` up to
    /// its spare capacity (`done` is never grown). `now` is monotonic; timeouts and delays use it. True when
    /// there was any work.
    fn poll(&mut self, now: Nanos, done: &mut Vec<Done>) -> bool;

    /// Cancels the commands of `owner`, which submits nothing after this call. No further command or piece of
    /// a command is begun and no failed one is repeated; the piece that is at the medium completes. Each
    /// command still returns a [`Done`], with [`DiskError::Cancelled`] where it may have been cut short.
    ///
    /// Returns the number of completions to come. After the last of them nothing that `owner` submitted on
    /// this core reaches the medium, except writes that [`Disk::may_still_write`] reports.
    fn cancel_owner(&mut self, owner: Owner) -> usize;

    /// True while a write of any core to some of these blocks that has ended with an error may still change
    /// them. Always false where a write has no effect after its end.
    fn may_still_write(&self, range: BlockRange) -> bool {
        self.inner().is_some_and(|inner| inner.may_still_write(range))
    }

    /// Called after the configuration has changed: changes set on the [`DiskSource`] take effect on this
    /// core.
    fn reconfigure(&mut self) {}

    /// Commands submitted whose [`Done`] was not returned yet.
    fn in_flight(&self) -> usize;
}

#[cfg(test)]
mod testing;

#[cfg(test)]
#[global_allocator]
static ALLOCATOR: spindle_reactor::alloc_count::CountingAllocator =
    spindle_reactor::alloc_count::CountingAllocator;
