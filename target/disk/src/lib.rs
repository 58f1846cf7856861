//! Disks: the interface between the target core and disks, the disk kinds `ram`, `null`, `file` and `ng`, and
//! the cache, delay and fault layers.
//!
//! A [`Disk`] is one disk of the configuration, shared by all cores. Each core opens the disk once and
//! receives its own [`DiskChannel`] handle. A handle needs no lock. A core calls `submit`, then `poll` until
//! [`Done`] is returned.
//!
//! ```text
//!   Qpair::read_fast_path -> DiskChannel::prepare -> Ready: ended (ram, null, a cache hit)
//!   Qpair::step_buffer  -> DiskChannel::prepare -> Ready: ended | Fill | Pool -> Pool::take | Later | Wait
//!   Qpair::step_execute -> DiskChannel::submit -> Some(Done): ended (ram, null)
//!                                       -> None, then TargetCore::poll -> DiskChannel::poll -> Done
//!                                          (file, ng, nvme, remote, a cache miss, a long zeroing of ram)
//! ```
//!
//! How to add a kind: `target/disk/examples/disk_kind.rs`; its configuration: `CONTRIBUTING.md`.
//!
//! `docs/disk-contract.md` has the promises of a kind and of a layer, and `tests/conformance` checks them.
//!
//! Guarantees: `Done::result` reports the outcome on the medium. After `Flush`, or a write with `fua`, the
//! bytes survive the failures that the kind documents (a file: power loss; RAM: none). Not done here: range
//! checks, which are the caller's duty, and namespaces.
//!
//! Limits: a command covers at most [`BLOCKS_MAX`] blocks. The data of one command is in one [`Buf`].

#![forbid(unsafe_code)]

mod backend;
pub mod cache;
mod cluster;
pub mod delay;
pub mod exports;
#[cfg(any(test, feature = "faults"))]
pub mod fault;
pub mod file;
mod layer;
mod lock;
pub mod medium_id;
pub mod ng;
pub mod null;
pub mod ram;
mod release;
mod shape;
pub mod signature;
pub mod source;

use std::collections::VecDeque;

use nvme_spec::status::{Status, StatusType};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Buf;

#[cfg(feature = "blank-file")]
pub use backend::blank::BlankFile;
pub use backend::{compare_and_write, guard};
pub use cache::{CacheChange, CacheCounts, CacheMode, CacheSpec, CacheUse, CachedDisk, PolicyKind};
pub use cluster::ClusterDisk;
pub use delay::{DelayDisk, DelaySpec};
#[cfg(any(test, feature = "faults"))]
pub use fault::{Broken, Fault, FaultControl, FaultDisk, OpKind};
pub use file::{FileDisk, FileFacts, FileSpec};
pub use ng::{NgDisk, NgFacts, NgSpec};
pub use null::{NullDisk, NullSpec};
pub use ram::{RamDisk, RamSpec};
pub use source::{ChannelContext, Disk, Health, OpenError, OptimisticReads, ResizeError, Usage};

/// Most blocks in one command: the length of a Dataset Management range has 32 bits (NVM Command Set 3.2.3).
pub const BLOCKS_MAX: u32 = u32::MAX;

/// Size and properties of a disk. The values may change while the disk is in use. Reasons are a resize, a
/// change at the far target of a `remote` disk, and a medium that refuses to deallocate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes of a logical block: 512 or 4096.
    pub block_bytes: u32,
    /// Number of logical blocks.
    pub block_count: u64,
    /// Commands that change blocks end with [`DiskError::WriteProtected`].
    pub is_read_only: bool,
    /// A power loss may lose writes without FUA that no flush has followed. Reported to hosts as VWC in
    /// Identify Controller.
    pub has_volatile_cache: bool,
    /// [`Op::Deallocate`] frees the space of the blocks on the medium.
    pub can_deallocate: bool,
    /// Longest write, in blocks, that is atomic: no reader sees a part of its data. At least 1.
    pub atomic_blocks: u32,
    /// [`DiskChannel::compare_and_write`] of one block is atomic for all cores.
    pub can_compare_and_write: bool,
}

impl Geometry {
    /// Returns the capacity in bytes; `u64::MAX` if the product overflows.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.block_count.saturating_mul(u64::from(self.block_bytes))
    }
}

/// Blocks `lba .. lba + blocks`. The caller ensures that all blocks are on the disk.
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
    /// Reads the range.
    Read,
    /// Writes the buffer to the range. With `fua` the data is durable before `Done` is returned.
    Write {
        /// Force unit access.
        fua: bool,
    },
    /// Makes all acknowledged writes durable. The range is ignored.
    Flush,
    /// Zeroes the range.
    WriteZeroes {
        /// The disk may free the space (DEAC).
        deallocate: bool,
        /// Force unit access.
        fua: bool,
    },
    /// Frees the space of the range (Dataset Management, Deallocate). Freed blocks read as zeroes if
    /// [`Disk::deallocated_is_zero`]. A drive may skip part of a large range, which keeps its data.
    Deallocate,
    /// Compares the range with the buffer. Ends with [`DiskError::CompareDiffers`] if the bytes differ, and
    /// with [`DiskError::NotSupported`] without [`Abilities::compare`].
    Compare,
    /// Reads the range without its data. Ends with [`DiskError::NotSupported`] without [`Abilities::verify`].
    Verify,
}

impl Op {
    /// Returns true if the operation may change blocks.
    #[inline]
    #[must_use]
    pub fn is_write(self) -> bool {
        match self {
            Op::Write { .. } | Op::WriteZeroes { .. } | Op::Deallocate => true,
            Op::Read | Op::Flush | Op::Compare | Op::Verify => false,
        }
    }
}

/// Optional operations of a disk, see [`DiskChannel::abilities`]. The caller composes a missing operation
/// from reads and writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Abilities {
    /// The disk executes [`Op::Compare`].
    pub compare: bool,
    /// The disk executes [`Op::Verify`].
    pub verify: bool,
    /// The disk executes [`DiskChannel::copy`].
    pub copy: bool,
    /// [`DiskChannel::prepare`] returns `Ready` for every Read. The delay layer returns `Later` instead; the
    /// fault layer returns `Fill` for a read with a fault. [`DiskChannel::submit`] of a Read without a buffer
    /// returns a buffer that pins the data.
    pub reads_in_place: bool,
}

/// Why a command failed. The target core maps these errors to NVMe status codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DiskError {
    /// The medium cannot be read. A retry does not help.
    #[error("unrecovered read error")]
    MediaRead,
    /// The medium cannot be written. A retry does not help.
    #[error("write fault")]
    MediaWrite,
    /// The medium below a thinly provisioned disk is full.
    #[error("no space left")]
    NoSpace,
    /// The disk is read-only.
    #[error("write protected")]
    WriteProtected,
    /// The kind of disk, or its device, does not support the operation.
    #[error("not supported by this disk")]
    NotSupported,
    /// The blocks differ from the expected data (Compare, compare-and-write).
    #[error("compare failed")]
    CompareDiffers,
    /// Any other failure. A retry may succeed.
    #[error("internal error")]
    Internal,
    /// The device was removed, or the disk cannot use the device any more.
    #[error("disk is gone")]
    Gone,
    /// Status of the NVMe device of the disk. The host receives its code and DNR, and so retries only where
    /// the device allows a retry. Made by [`DiskError::device`].
    #[error("device status: {0}")]
    Device(Status),
    /// Cancelled by [`DiskChannel::cancel_owner`]; executed in part, in whole or not at all.
    #[error("cancelled: its submitter has ended")]
    Cancelled,
}

impl DiskError {
    /// Returns [`DiskError::Device`] with the code and DNR of `status`. M and CRD refer to the device and are
    /// removed. Returns [`DiskError::Internal`] for a successful status.
    #[must_use]
    pub fn device(status: Status) -> DiskError {
        if status.is_success() {
            return DiskError::Internal; // an error must not be reported to the host as success
        }
        DiskError::Device(if status.is_dnr() { status.code().dnr() } else { status.code() })
    }

    /// Returns the error for a status of the NVMe controller of a disk. Full, write protected, invalid opcode
    /// and compare failure have their own errors. Other media errors, except `ACCESS_DENIED`, are reported to
    /// the host with their DNR. Any other status concerns a command of this process, not of the host:
    /// [`DiskError::Internal`].
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

    /// Returns true for the errors that "Media and Data Integrity Errors" of the SMART log counts.
    #[must_use]
    pub fn is_media(self) -> bool {
        if let DiskError::Device(status) = self {
            return status.sct() == StatusType::MEDIA;
        }
        matches!(self, DiskError::MediaRead | DiskError::MediaWrite)
    }
}

/// Identifier of a command in flight. The submitter chooses the token, and [`Done`] returns it. The upper 32
/// bits are the [`Owner`]; a disk does not interpret the lower 32. Bit 31 is clear: a layer sets it in the
/// tokens of its own commands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Token(pub u64);

impl Token {
    /// Returns the queue pair that submitted the command.
    #[inline]
    #[must_use]
    pub fn owner(self) -> Owner {
        Owner((self.0 >> 32) as u32)
    }
}

/// Submitter of a command: a queue pair of the core. [`DiskChannel::cancel_owner`] cancels its commands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Owner(pub u32);

/// Completion of a command.
#[derive(Debug)]
pub struct Done {
    /// Token of the command.
    pub token: Token,
    /// Success, or why the command failed.
    pub result: Result<(), DiskError>,
    /// Read: the buffer with the data. Write and Compare: the submitted buffer. Compare-and-write: `data`.
    /// `None` for other operations, and if the disk has kept or dropped the buffer, also after a failure. A
    /// buffer that was kept may be dropped before or after this completion is returned.
    pub buf: Option<Buf>,
}

impl Done {
    /// Returns a completion with [`DiskError::NotSupported`] and the unchanged buffer.
    pub(crate) fn not_supported(token: Token, buf: Option<Buf>) -> Done {
        Done { token, result: Err(DiskError::NotSupported), buf }
    }

    /// Returns a completion with [`DiskError::Cancelled`] and the unchanged buffer.
    pub(crate) fn cancelled(token: Token, buf: Option<Buf>) -> Done {
        Done { token, result: Err(DiskError::Cancelled), buf }
    }

    /// Moves completions from `ready` to `done`, up to the spare capacity of `done`.
    #[inline]
    pub fn give(ready: &mut VecDeque<Done>, done: &mut Vec<Done>) {
        let count = ready.len().min(done.capacity() - done.len());
        done.extend(ready.drain(..count));
    }

    /// Counts the completions in `ended` whose command belongs to `owner`.
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
    /// Dataset Management hints of a Read or Write: low byte of CDW13 (NVM Command Set). 0: none.
    pub hints: u8,
    /// Who submits it, for caches on client hosts.
    pub sender: Sender,
    /// Index of the host, unique among the connected hosts of the process. 0: no host, or no free index.
    pub client: u16,
    /// Time for which a layer has kept the command before this submission. A disk that limits the time of a
    /// command counts it, so that the limit holds from the first submission on.
    pub waited: Waited,
}

impl IoRequest {
    /// Returns a request without hints and without a host.
    #[inline]
    #[must_use]
    pub const fn new(op: Op, range: BlockRange) -> IoRequest {
        IoRequest { op, range, hints: 0, sender: Sender::HOST, client: 0, waited: Waited(0) }
    }
}

/// Who submits a request: a host, a member of the disk's cluster, or the cache in front of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sender(u8);

impl Sender {
    /// A host that is no member.
    pub const HOST: Sender = Sender(0);
    /// A Read of the cache in front of the disk, which fills frames.
    pub const FILL: Sender = Sender(u8::MAX);

    /// Returns the sender that is the member with this number, below 64.
    #[inline]
    #[must_use]
    pub const fn of_member(number: u8) -> Sender {
        Sender(number % 64 + 1)
    }

    /// Returns the number of the member; `None`: another sender.
    #[inline]
    #[must_use]
    pub fn member(self) -> Option<u8> {
        self.0.checked_sub(1).filter(|number| *number < 64)
    }
}

/// A time in units of 10 ms, rounded down; at most 655 s.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Waited(u16);

impl Waited {
    const UNIT: Nanos = Nanos::from_ms(10);

    /// Returns `time`; 655.35 s if it is longer.
    #[must_use]
    pub fn of(time: Nanos) -> Waited {
        Waited(u16::try_from(time.0 / Waited::UNIT.0).unwrap_or(u16::MAX))
    }

    /// Returns the time.
    #[must_use]
    pub fn time(self) -> Nanos {
        Nanos(Waited::UNIT.0 * u64::from(self.0))
    }
}

/// Memory for the data of a Read or Write: the result of [`DiskChannel::prepare`].
#[derive(Debug)]
pub enum Prepared {
    /// The Read has ended. The buffer pins its data in the disk's memory until it is dropped.
    Ready(Buf),
    /// Memory of the disk for the data of a Write. The caller fills the buffer and submits it with the
    /// command. The fault layer also returns `Fill` for a Read, which the caller submits with this buffer.
    Fill(Buf),
    /// The disk provides no memory: the caller submits the command, or each piece of it, with a buffer of the
    /// core's pool.
    Pool,
    /// The caller submits the Read at once, without a buffer. Its [`Done`] returns the data in memory of the
    /// disk.
    Later,
    /// No memory of the disk is free now. The caller retries later.
    Wait,
}

/// One core's handle on a disk.
pub trait DiskChannel {
    /// Returns the current geometry.
    fn geometry(&self) -> Geometry;

    /// Returns the inner disk of a layer; `None`: this is no layer. The default implementations of
    /// `page_in_memory`, `free_bytes`, `abilities` and `may_still_write` forward to the inner disk.
    fn inner(&self) -> Option<&dyn DiskChannel> {
        None
    }

    /// As [`DiskChannel::inner`], for `reconfigure`, which by default forwards too. Every layer has both.
    fn inner_mut(&mut self) -> Option<&mut dyn DiskChannel> {
        None
    }

    /// Chooses the memory for the data of a Read or Write. Returned memory belongs to this command; a drop of
    /// the buffer frees it. `next` is a hint for prefetching lookup tables: the LBA of the read that probably
    /// follows the next read. It may be beyond the end of the disk.
    fn prepare(&mut self, request: &IoRequest, next: Option<u64>) -> Prepared {
        let _ = (request, next);
        Prepared::Pool
    }

    /// Returns the page of 4 KiB at `offset`, which is on the disk, if it is in memory now. The buffer pins
    /// it. For references of optimistic reads: nothing is read from the medium, and no hit is counted.
    fn page_in_memory(&self, offset: u64) -> Option<Buf> {
        self.inner().and_then(|inner| inner.page_in_memory(offset))
    }

    /// Returns the approximate number of bytes that are free for [`Prepared::Fill`], for the Writes of all
    /// cores together. Callers limit their share by this number. `u64::MAX`: the disk provides no memory for
    /// Writes.
    fn free_bytes(&self) -> u64 {
        self.inner().map_or(u64::MAX, DiskChannel::free_bytes)
    }

    /// Registers the range for a member of the disk's cluster. Returns true if the member may keep what it
    /// reads of the range from now on. False: a write of it is in flight, or the disk has no cluster.
    fn register(&mut self, range: BlockRange, member: u8) -> bool {
        self.inner_mut().is_some_and(|inner| inner.register(range, member))
    }

    /// Begins a command. Returns `Some` if the command has ended already. The disk queues commands beyond its
    /// depth, in order of submission.
    ///
    /// `buf` by operation:
    /// - Read: the destination, from the pool or [`DiskChannel::prepare`]. `None` after [`Prepared::Later`],
    ///   or with [`Abilities::reads_in_place`].
    /// - Write: the data, in a buffer from the pool or [`DiskChannel::prepare`].
    /// - Compare: the expected bytes, in a buffer from the pool.
    /// - Others: `None`.
    fn submit(&mut self, token: Token, request: &IoRequest, buf: Option<Buf>) -> Option<Done>;

    /// Writes `data` to a range of one block if the block equals `expected`, atomically for all cores. `data`
    /// is from [`DiskChannel::prepare`] of a Write, or from the pool after [`Prepared::Pool`]; `expected` is
    /// from the pool. Ends with [`DiskError::CompareDiffers`] if the block differs, and with
    /// [`DiskError::NotSupported`] without [`Geometry::can_compare_and_write`].
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

    /// Returns the optional operations that the disk supports now, for commands of any length. A disk splits
    /// commands that exceed the limits of its device. The abilities may change between commands; a command
    /// whose ability was lost meanwhile ends with an error.
    fn abilities(&self) -> Abilities {
        self.inner().map_or_else(Abilities::default, DiskChannel::abilities)
    }

    /// Copies the blocks `from` to as many blocks starting at `to`. The caller ensures that both ranges are
    /// on the disk and do not overlap. A copy that fails may have copied any of the blocks.
    /// [`DiskChannel::compare_and_write`] is atomic with respect to copies, as to writes. Ends with
    /// [`DiskError::NotSupported`] without [`Abilities::copy`].
    fn copy(&mut self, token: Token, from: BlockRange, to: u64, fua: bool) -> Option<Done> {
        let _ = (from, to, fua);
        Some(Done::not_supported(token, None))
    }

    /// Sends to the device the commands submitted since the last call. Adds completions to `done` up to its
    /// spare capacity; `done` never grows. `now` is monotonic and is the time for timeouts and delays.
    /// Returns true if the call did work or if a further call is due soon.
    fn poll(&mut self, now: Nanos, done: &mut Vec<Done>) -> bool;

    /// Cancels the commands of `owner`, which submits nothing after this call. The disk begins no further
    /// command or piece of a command and retries none. A piece at the medium completes. Each command still
    /// returns a [`Done`], with [`DiskError::Cancelled`] if it may be incomplete.
    ///
    /// Returns the number of completions that the disk still returns for `owner`. After the last completion,
    /// nothing that `owner` submitted on this core reaches the medium, except writes that
    /// [`DiskChannel::may_still_write`] reports.
    fn cancel_owner(&mut self, owner: Owner) -> usize;

    /// Returns true while these blocks may still be changed by a write, of any core, that has ended with an
    /// error. Always false for a disk whose writes have no effect after their end.
    fn may_still_write(&self, range: BlockRange) -> bool {
        self.inner().is_some_and(|inner| inner.may_still_write(range))
    }

    /// Applies to this core the changes set on the [`Disk`]. Called after the configuration has
    /// changed.
    fn reconfigure(&mut self) {
        if let Some(inner) = self.inner_mut() {
            inner.reconfigure();
        }
    }

    /// Returns the number of submitted commands whose [`Done`] was not returned yet.
    fn in_flight(&self) -> usize;

    /// Returns true if the core need not call [`DiskChannel::poll`] at once: all commands in flight wait for
    /// what wakes the core, or for a time that may pass by some 50 ms.
    fn may_sleep(&self) -> bool {
        self.in_flight() == 0
    }
}

#[cfg(test)]
mod testing;

#[cfg(test)]
#[global_allocator]
static ALLOCATOR: spindle_reactor::alloc_count::CountingAllocator =
    spindle_reactor::alloc_count::CountingAllocator;
