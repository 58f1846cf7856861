//! [`FaultControl`]: settings of the fault layer, changed at run time from any thread.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::{BlockRange, DiskError, Op};

/// Kind of a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The command ends with an error.
    Error,
    /// The command is held for 1 to [`FaultControl::set_delay_polls_max`] polls.
    Delay,
    /// The command is held until [`FaultControl::release_dropped`].
    Drop,
    /// The command is held until the next poll, which releases held commands in random order.
    Reorder,
}

const FAULTS: usize = 4;

/// Kind of a command. Each kind has its own fault rates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpKind {
    /// Reads. [`Broken`] treats the source of a copy as a read.
    Read,
    /// Writes, with and without FUA.
    Write,
    /// Flushes; broken blocks do not affect them.
    Flush,
    /// Write Zeroes, with and without deallocation.
    WriteZeroes,
    /// Dataset Management, Deallocate.
    Deallocate,
    /// [`crate::DiskChannel::compare_and_write`]. [`Broken`] treats these commands as a read and a write.
    CompareAndWrite,
    /// Compares. [`Broken`] treats these commands as reads.
    Compare,
    /// Verifies. [`Broken`] treats these commands as reads.
    Verify,
    /// [`crate::DiskChannel::copy`]. [`Broken`] treats the destination as a write, the source as a read.
    Copy,
}

impl OpKind {
    /// All kinds, in the order of their discriminants.
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

    /// Returns the kind of an operation for [`crate::DiskChannel::submit`].
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

    /// Returns the error of this kind unless [`FaultControl::set_error`] was called.
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

/// Blocks whose commands fail until [`FaultControl::heal`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Broken {
    /// Range of broken LBAs, end exclusive.
    pub lba: Range<u64>,
    /// Reads, compares, verifies and compare-and-writes of the blocks, and copies from them, fail with
    /// [`DiskError::MediaRead`].
    pub reads: bool,
    /// Writes, Write Zeroes, deallocations and compare-and-writes of the blocks, and copies to them, fail
    /// with [`DiskError::MediaWrite`].
    pub writes: bool,
}

impl Broken {
    pub(super) fn error(&self, kind: OpKind, range: BlockRange) -> Option<DiskError> {
        if range.lba >= self.lba.end || self.lba.start >= range.lba + u64::from(range.blocks) {
            return None;
        }
        let (reads, writes) = match kind {
            OpKind::Read | OpKind::Compare | OpKind::Verify => (true, false),
            // `range` is the destination of a copy. The caller checks the source as a read.
            OpKind::Write | OpKind::WriteZeroes | OpKind::Deallocate | OpKind::Copy => (false, true),
            OpKind::CompareAndWrite => (true, true),
            OpKind::Flush => (false, false),
        };
        let read = (reads && self.reads).then_some(DiskError::MediaRead);
        read.or((writes && self.writes).then_some(DiskError::MediaWrite))
    }
}

/// Settings of a fault layer. Each core uses a copy.
#[derive(Clone)]
pub(super) struct Settings {
    /// Fault rates per million commands, by kind of command and of fault.
    per_million: [[u32; FAULTS]; OpKind::ALL.len()],
    /// By kind: the error of failed commands. `None`: [`OpKind::error_default`].
    errors: [Option<DiskError>; OpKind::ALL.len()],
    /// Rate per million failed commands: the inner disk executes the command.
    pub(super) error_effect: u32,
    pub(super) delay_polls_max: u32,
    pub(super) is_gone: bool,
    /// Number of calls of [`FaultControl::release_dropped`].
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

/// Settings and counters of a fault layer. All methods may be called from any thread.
pub struct FaultControl {
    pub(super) seed: u64,
    settings: Mutex<Settings>,
    /// Number of changes of the settings so far.
    generation: AtomicU64,
    counts: [AtomicU64; FAULTS],
    /// See [`FaultControl::reads_in_place`].
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

    /// Returns a number that changes with each change of the settings.
    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    pub(super) fn settings(&self) -> Settings {
        self.lock().clone()
    }

    /// Sets the rate of a fault, per million commands of a kind.
    pub fn set(&self, fault: Fault, kind: OpKind, per_million: u32) {
        self.change(|settings| settings.per_million[kind as usize][fault as usize] = per_million);
    }

    /// Sets the rate of a fault for each kind of command, per million commands of the kind.
    pub fn set_all(&self, fault: Fault, per_million: u32) {
        OpKind::ALL.iter().for_each(|kind| self.set(fault, *kind, per_million));
    }

    /// Sets the error of the failed commands of a kind. Default: [`DiskError::Internal`] for Flush and
    /// Deallocate, [`DiskError::MediaRead`] for Read, Compare and Verify, [`DiskError::MediaWrite`] for the
    /// others. Broken blocks and [`FaultControl::set_gone`] have their own errors.
    pub fn set_error(&self, kind: OpKind, error: DiskError) {
        self.change(|settings| settings.errors[kind as usize] = Some(error));
    }

    /// Sets the rate, per million failed commands, that the inner disk executes nevertheless. Default 0.
    pub fn set_error_effect(&self, per_million: u32) {
        self.change(|settings| settings.error_effect = per_million);
    }

    /// Sets the longest delay of [`Fault::Delay`] in polls; 0 counts as 1. Default 16.
    pub fn set_delay_polls_max(&self, polls: u32) {
        self.change(|settings| settings.delay_polls_max = polls.max(1));
    }

    /// Sets whether every new command ends with [`DiskError::Gone`]. Default false.
    pub fn set_gone(&self, is_gone: bool) {
        self.change(|settings| settings.is_gone = is_gone);
    }

    /// Adds blocks whose commands fail until [`FaultControl::heal`].
    pub fn fail_range(&self, broken: Broken) {
        self.change(|settings| settings.broken.push(broken));
    }

    /// Removes all entries that [`FaultControl::fail_range`] has added.
    pub fn heal(&self) {
        self.change(|settings| settings.broken.clear());
    }

    /// Releases all commands held by [`Fault::Drop`], at each core's next poll.
    pub fn release_dropped(&self) {
        self.change(|settings| settings.released += 1);
    }

    /// Returns the number of commands with this fault so far, on all cores.
    #[must_use]
    pub fn injected(&self, fault: Fault) -> u64 {
        self.counts[fault as usize].load(Ordering::Relaxed)
    }

    /// Returns the number of reads without a fault that the inner disk has ended in `prepare`.
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
