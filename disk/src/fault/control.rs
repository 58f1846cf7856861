//! [`FaultControl`]: what the fault layer does, changed at run time from any thread.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

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

/// What happens to commands. Each core has a copy.
#[derive(Clone)]
pub(super) struct Settings {
    per_million: [[u32; FAULTS]; OpKind::ALL.len()],
    /// `None`: the kind's own.
    errors: [Option<DiskError>; OpKind::ALL.len()],
    pub(super) error_effect: u32,
    pub(super) delay_polls_max: u32,
    pub(super) is_gone: bool,
    /// How often what was dropped was let go.
    pub(super) released: u64,
    pub(super) broken: Vec<Broken>,
}

impl Settings {
    pub(super) fn per_million(&self, fault: Fault, kind: OpKind) -> u32 {
        self.per_million[kind as usize][fault as usize]
    }

    pub(super) fn error(&self, kind: OpKind) -> DiskError {
        self.errors[kind as usize].unwrap_or_else(|| kind.error_default())
    }
}

/// Rates and states of a fault layer. See the module.
pub struct FaultControl {
    pub(super) seed: u64,
    settings: Mutex<Settings>,
    /// Counts the changes of the settings.
    generation: AtomicU64,
    counts: [AtomicU64; FAULTS],
    in_place: AtomicU64,
}

impl FaultControl {
    pub(super) fn new(seed: u64) -> FaultControl {
        let settings = Settings {
            per_million: Default::default(),
            errors: Default::default(),
            error_effect: 0,
            delay_polls_max: 16,
            is_gone: false,
            released: 0,
            broken: Vec::new(),
        };
        FaultControl {
            seed,
            settings: Mutex::new(settings),
            generation: AtomicU64::new(0),
            counts: Default::default(),
            in_place: AtomicU64::new(0),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Settings> {
        self.settings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut Settings)) {
        let mut settings = self.lock();
        change(&mut settings);
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// Another number after each change.
    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    pub(super) fn settings(&self) -> Settings {
        self.lock().clone()
    }

    /// How often, of a million commands of this kind, the fault happens.
    pub fn set(&self, fault: Fault, kind: OpKind, per_million: u32) {
        self.change(|settings| settings.per_million[kind as usize][fault as usize] = per_million);
    }

    /// As [`FaultControl::set`], for every kind of command.
    pub fn set_all(&self, fault: Fault, per_million: u32) {
        OpKind::ALL.iter().for_each(|kind| self.set(fault, *kind, per_million));
    }

    /// Which error commands of this kind end with. Until set: media errors for those that move data or
    /// zeroes, internal for the others.
    pub fn set_error(&self, kind: OpKind, error: DiskError) {
        self.change(|settings| settings.errors[kind as usize] = Some(error));
    }

    /// How often, of a million commands that end with an error, the disk below does it all the same. 0 until
    /// set.
    pub fn set_error_effect(&self, per_million: u32) {
        self.change(|settings| settings.error_effect = per_million);
    }

    /// Most polls that a delay takes, at least 1. 16 until set.
    pub fn set_delay_polls_max(&self, polls: u32) {
        self.change(|settings| settings.delay_polls_max = polls.max(1));
    }

    /// While set, every new command ends with [`DiskError::Gone`].
    pub fn set_gone(&self, is_gone: bool) {
        self.change(|settings| settings.is_gone = is_gone);
    }

    /// Break blocks, until [`FaultControl::heal`].
    pub fn fail_range(&self, broken: Broken) {
        self.change(|settings| settings.broken.push(broken));
    }

    /// No block is broken any more.
    pub fn heal(&self) {
        self.change(|settings| settings.broken.clear());
    }

    /// Everything that was dropped until now goes on, at each core's next poll.
    pub fn release_dropped(&self) {
        self.change(|settings| settings.released += 1);
    }

    /// How many commands had the fault so far, over all cores.
    #[must_use]
    pub fn injected(&self, fault: Fault) -> u64 {
        self.counts[fault as usize].load(Ordering::Relaxed)
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
