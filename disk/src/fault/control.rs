//! [`FaultControl`]: what the fault layer does, changed at run time from any thread.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use nvme_spec::status::Status;

use crate::{BlockRange, DiskError, Op};

/// What may happen to a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// It ends with an error.
    Error,
    /// It is held for some polls.
    Delay,
    /// It is held until [`FaultControl::release_dropped`].
    Drop,
    /// It ends in the next poll, in random order with the others.
    Reorder,
}

const FAULTS: usize = 4;

/// Kinds of commands, each with its own rates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpKind {
    /// [`Op::Read`].
    Read,
    /// [`Op::Write`].
    Write,
    /// [`Op::Flush`].
    Flush,
    /// [`Op::WriteZeroes`].
    WriteZeroes,
    /// [`Op::Deallocate`].
    Deallocate,
    /// [`crate::Disk::compare_and_write`].
    CompareAndWrite,
    /// [`Op::Compare`].
    Compare,
    /// [`Op::Verify`].
    Verify,
    /// [`crate::Disk::copy`].
    Copy,
}

impl OpKind {
    /// All of them.
    pub const ALL: [OpKind; 9] = [
        OpKind::Read,
        OpKind::Write,
        OpKind::Flush,
        OpKind::WriteZeroes,
        OpKind::Deallocate,
        OpKind::CompareAndWrite,
        OpKind::Compare,
        OpKind::Verify,
        OpKind::Copy,
    ];

    /// The kind of an op.
    #[must_use]
    pub fn of(op: Op) -> OpKind {
        match op {
            Op::Read => OpKind::Read,
            Op::Write { .. } => OpKind::Write,
            Op::Flush => OpKind::Flush,
            Op::WriteZeroes { .. } => OpKind::WriteZeroes,
            Op::Deallocate => OpKind::Deallocate,
            Op::Compare => OpKind::Compare,
            Op::Verify => OpKind::Verify,
        }
    }

    /// The error that this kind ends with unless told otherwise.
    fn error_default(self) -> DiskError {
        match self {
            OpKind::Read | OpKind::Compare | OpKind::Verify => DiskError::MediaRead,
            OpKind::Write | OpKind::WriteZeroes | OpKind::CompareAndWrite | OpKind::Copy => {
                DiskError::MediaWrite
            }
            OpKind::Flush | OpKind::Deallocate => DiskError::Internal,
        }
    }
}

/// Blocks that fail for good.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Broken {
    /// Which.
    pub lba: Range<u64>,
    /// Reads of them fail: compares, verifies, compare-and-writes and copies from them too.
    pub reads: bool,
    /// Writes, zeroing and deallocation of them fail, and compare-and-writes and copies to them.
    pub writes: bool,
}

impl Broken {
    pub(super) fn error(&self, kind: OpKind, range: BlockRange) -> Option<DiskError> {
        if range.lba >= self.lba.end || self.lba.start >= range.lba + u64::from(range.blocks) {
            return None;
        }
        let (reads, writes) = match kind {
            OpKind::Read | OpKind::Compare | OpKind::Verify => (true, false),
            // Where it copies to; where from is looked at as a read.
            OpKind::Write | OpKind::WriteZeroes | OpKind::Deallocate | OpKind::Copy => (false, true),
            OpKind::CompareAndWrite => (true, true),
            OpKind::Flush => (false, false),
        };
        let read = (reads && self.reads).then_some(DiskError::MediaRead);
        read.or((writes && self.writes).then_some(DiskError::MediaWrite))
    }
}

/// Errors by the number under which they lie in an atomic.
const ERRORS: [DiskError; 9] = [
    DiskError::MediaRead,
    DiskError::MediaWrite,
    DiskError::NoSpace,
    DiskError::WriteProtected,
    DiskError::NotSupported,
    DiskError::CompareDiffers,
    DiskError::Internal,
    DiskError::Gone,
    DiskError::Cancelled,
];

/// An error that is the device's own status.
const DEVICE: u32 = 1 << 16;

#[derive(Default)]
struct Rates {
    per_million: [AtomicU32; FAULTS],
    /// 0: the kind's own; else 1 + index into [`ERRORS`], or [`DEVICE`] with the bits of the device's status.
    error: AtomicU32,
}

/// Rates and states of a fault layer. See the module.
pub struct FaultControl {
    seed: u64,
    rates: [Rates; OpKind::ALL.len()],
    error_effect: AtomicU32,
    delay_polls_max: AtomicU32,
    is_gone: AtomicBool,
    released: AtomicU64,
    broken: Mutex<Vec<Broken>>,
    broken_generation: AtomicU64,
    counts: [AtomicU64; FAULTS],
    in_place: AtomicU64,
}

impl FaultControl {
    pub(super) fn new(seed: u64) -> FaultControl {
        FaultControl {
            seed,
            rates: Default::default(),
            error_effect: AtomicU32::new(0),
            delay_polls_max: AtomicU32::new(16),
            is_gone: AtomicBool::new(false),
            released: AtomicU64::new(0),
            broken: Mutex::new(Vec::new()),
            broken_generation: AtomicU64::new(0),
            counts: Default::default(),
            in_place: AtomicU64::new(0),
        }
    }

    /// How often, of a million commands of this kind, the fault happens.
    pub fn set(&self, fault: Fault, kind: OpKind, per_million: u32) {
        self.rates[kind as usize].per_million[fault as usize].store(per_million, Ordering::Relaxed);
    }

    /// As [`FaultControl::set`], for every kind of command.
    pub fn set_all(&self, fault: Fault, per_million: u32) {
        OpKind::ALL.iter().for_each(|kind| self.set(fault, *kind, per_million));
    }

    /// Which error commands of this kind end with. Until set: media errors for those that move data or
    /// zeroes, internal for the others.
    pub fn set_error(&self, kind: OpKind, error: DiskError) {
        let number = if let DiskError::Device(status) = error {
            DEVICE | u32::from(status.bits())
        } else {
            let index = ERRORS.iter().position(|known| *known == error).unwrap_or(0);
            u32::try_from(index + 1).unwrap_or(0)
        };
        self.rates[kind as usize].error.store(number, Ordering::Relaxed);
    }

    /// How often, of a million commands that end with an error, the disk below does it all the same. 0 until
    /// set.
    pub fn set_error_effect(&self, per_million: u32) {
        self.error_effect.store(per_million, Ordering::Relaxed);
    }

    /// Most polls that a delay takes, at least 1. 16 until set.
    pub fn set_delay_polls_max(&self, polls: u32) {
        self.delay_polls_max.store(polls.max(1), Ordering::Relaxed);
    }

    /// While set, every new command ends with [`DiskError::Gone`].
    pub fn set_gone(&self, is_gone: bool) {
        self.is_gone.store(is_gone, Ordering::Relaxed);
    }

    /// Break blocks, until [`FaultControl::heal`].
    pub fn fail_range(&self, broken: Broken) {
        self.broken.lock().unwrap_or_else(PoisonError::into_inner).push(broken);
        self.broken_generation.fetch_add(1, Ordering::Release);
    }

    /// No block is broken any more.
    pub fn heal(&self) {
        self.broken.lock().unwrap_or_else(PoisonError::into_inner).clear();
        self.broken_generation.fetch_add(1, Ordering::Release);
    }

    /// Everything that was dropped until now goes on, at each core's next poll.
    pub fn release_dropped(&self) {
        self.released.fetch_add(1, Ordering::Release);
    }

    /// How many commands had the fault so far, over all cores.
    #[must_use]
    pub fn injected(&self, fault: Fault) -> u64 {
        self.counts[fault as usize].load(Ordering::Relaxed)
    }

    pub(super) fn seed(&self) -> u64 {
        self.seed
    }

    pub(super) fn per_million(&self, fault: Fault, kind: OpKind) -> u32 {
        self.rates[kind as usize].per_million[fault as usize].load(Ordering::Relaxed)
    }

    pub(super) fn error(&self, kind: OpKind) -> DiskError {
        let number = self.rates[kind as usize].error.load(Ordering::Relaxed);
        if number & DEVICE != 0 {
            return DiskError::device(Status::from_bits(u16::try_from(number & 0x7fff).unwrap_or(0)));
        }
        let set = (number as usize).checked_sub(1).and_then(|index| ERRORS.get(index).copied());
        set.unwrap_or_else(|| kind.error_default())
    }

    pub(super) fn error_effect(&self) -> u32 {
        self.error_effect.load(Ordering::Relaxed)
    }

    pub(super) fn delay_polls_max(&self) -> u32 {
        self.delay_polls_max.load(Ordering::Relaxed)
    }

    pub(super) fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::Relaxed)
    }

    pub(super) fn released(&self) -> u64 {
        self.released.load(Ordering::Acquire)
    }

    pub(super) fn broken_generation(&self) -> u64 {
        self.broken_generation.load(Ordering::Acquire)
    }

    /// Copies the broken blocks to a core; their generation.
    pub(super) fn copy_broken(&self, to: &mut Vec<Broken>) -> u64 {
        let generation = self.broken_generation();
        to.clone_from(&self.broken.lock().unwrap_or_else(PoisonError::into_inner));
        generation
    }

    /// Reads that no fault met and that the disk below had in place.
    #[must_use]
    pub fn reads_in_place(&self) -> u64 {
        self.in_place.load(Ordering::Relaxed)
    }

    pub(super) fn count_in_place(&self) {
        self.in_place.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count(&self, fault: Fault) {
        self.counts[fault as usize].fetch_add(1, Ordering::Relaxed);
    }
}
