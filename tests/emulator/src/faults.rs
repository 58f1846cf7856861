//! [`Faults`]: rates of random faults; [`Injection`]: a fault of one command; [`Counters`]: counts of
//! commands and faults.

use std::collections::VecDeque;

use nvme_spec::Status;

/// Pseudorandom numbers (splitmix64).
#[derive(Debug, Clone)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        Random(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    /// Returns a number from 0 to `limit - 1`; 0 if `limit` is 0.
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.next().checked_rem(limit).unwrap_or(0)
    }

    /// Returns the low 16 bits of the next number.
    pub(crate) fn word(&mut self) -> u16 {
        (self.next() & 0xffff) as u16
    }
}

/// Fault rates in 65,536ths. Fields that begin with `admin` apply to admin commands other than Asynchronous
/// Event Request, the others to I/O commands. A command without a queued injection draws the rates in the
/// order of the fields and has the first fault that is drawn.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Faults {
    /// Seed of all random choices.
    pub seed: u64,
    /// Rate of [`Injection::Vanish`].
    pub vanish: u32,
    /// Rate of [`Injection::Fatal`].
    pub fatal: u32,
    /// Rate of [`Injection::Freeze`].
    pub freeze: u32,
    /// Rate of [`Injection::Swallow`].
    pub swallow: u32,
    /// Rate of [`Injection::Drop`].
    pub drop: u32,
    /// Rate of [`Injection::Delay`] of 1 to `delay_steps_max` steps, executed early or late.
    pub delay: u32,
    /// Longest delay in steps; 0 means 1.
    pub delay_steps_max: u64,
    /// Rate of [`Injection::Delay`] of 1 to 4 steps, executed early: later commands may complete first.
    pub reorder: u32,
    /// Rate of [`Injection::Double`].
    pub double: u32,
    /// Rate of [`Injection::WrongCid`].
    pub wrong_cid: u32,
    /// Rate of [`Injection::WrongSqid`].
    pub wrong_sqid: u32,
    /// Rate of [`Injection::WrongStatus`] with any status but success.
    pub wrong_status: u32,
    /// Rate of [`Injection::WrongSqHead`] with any value.
    pub wrong_sq_head: u32,
    /// Rate of [`Injection::Error`] with one of `errors`, with DNR or without.
    pub error: u32,
    /// Statuses for `error`. If empty: eight built-in statuses, some of them transient.
    pub errors: Vec<Status>,
    /// Rate of [`Injection::Swallow`] of admin commands.
    pub admin_swallow: u32,
    /// Rate of [`Injection::Error`] of admin commands, with Internal Error.
    pub admin_error: u32,
}

/// A fault of one command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Injection {
    /// The command is not completed: it is held until an Abort, the deletion of its queue or a reset. The
    /// command is not executed, except Identify and Get Log Page between CC.EN 0 and CSTS.RDY 0.
    Swallow,
    /// The command is executed and never completed. An Abort does not find the command. It is held until its
    /// queue is deleted or a reset.
    Drop,
    /// The command is completed later.
    Delay {
        /// Steps until the completion, at least 1.
        steps: u64,
        /// Whether the command is executed at the completion instead of at once.
        is_executed_late: bool,
    },
    /// The completion is posted twice, or once if the queue has no room for the second.
    Double,
    /// As `Drop`, and a completion with status success is posted for another CID, of no held command. If
    /// three tried CIDs are held, none is posted.
    WrongCid,
    /// The command is executed, and the completion has another SQID. The controller treats the command as
    /// completed.
    WrongSqid,
    /// The command is executed and the completion has this status.
    WrongStatus(Status),
    /// The command is executed and the completion has this SQHD.
    WrongSqHead(u16),
    /// The command is not executed and ends with this status.
    Error(Status),
    /// CSTS.CFS is set and the controller stops; the command is held.
    Fatal,
    /// The command is executed, and the controller ignores CC until the function is reset.
    Freeze,
    /// The drive is pulled: registers read as all ones and no command is executed, until a plug or link-up.
    Vanish,
}

/// Counts since the emulator was created.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Entries read from I/O submission queues.
    pub commands: u64,
    /// Entries read from the admin submission queue.
    pub admin_commands: u64,
    /// Compare commands whose checks succeeded, with any result.
    pub compares: u64,
    /// Verify commands executed.
    pub verifies: u64,
    /// Copy commands executed.
    pub copies: u64,
    /// I/O commands whose data pointer was an SGL.
    pub sgls: u64,
    /// Completions posted.
    pub completions: u64,
    /// Completions posted whose status is not success.
    pub errors: u64,
    /// Doorbell values that the controller read. Of several writes between two reads only the last is read.
    pub doorbells: u64,
    /// Steps without work, as bus mastering is off while the controller is enabled.
    pub blocked: u64,
    /// Times CC.EN was set and took effect, including enables that failed with CSTS.CFS.
    pub enables: u64,
    /// Function level resets that succeeded.
    pub function_resets: u64,
    /// Commands that an Abort ended, including Asynchronous Event Requests.
    pub aborted: u64,
    /// Count of injected [`Injection::Swallow`], admin commands included.
    pub swallowed: u64,
    /// Count of injected [`Injection::Drop`].
    pub dropped: u64,
    /// Count of injected [`Injection::Delay`], reordering included.
    pub delayed: u64,
    /// Count of injected [`Injection::Double`].
    pub doubled: u64,
    /// Count of injected [`Injection::WrongCid`].
    pub wrong_cids: u64,
    /// Count of injected [`Injection::WrongSqid`].
    pub wrong_sqids: u64,
    /// Count of injected [`Injection::WrongStatus`].
    pub wrong_statuses: u64,
    /// Count of injected [`Injection::WrongSqHead`].
    pub wrong_sq_heads: u64,
    /// Count of injected [`Injection::Error`], admin commands included.
    pub injected_errors: u64,
    /// Times CSTS.CFS was set: by an injection, a test, a failed enable, or failed DMA to a queue.
    pub fatals: u64,
    /// Times that the controller began to ignore CC, by [`Injection::Freeze`] or a test.
    pub freezes: u64,
    /// Times the drive was pulled or its link taken down.
    pub vanished: u64,
}

impl Counters {
    pub(crate) fn note(&mut self, injection: Injection) {
        let counter = match injection {
            Injection::Swallow => &mut self.swallowed,
            Injection::Drop => &mut self.dropped,
            Injection::Delay { .. } => &mut self.delayed,
            Injection::Double => &mut self.doubled,
            Injection::WrongCid => &mut self.wrong_cids,
            Injection::WrongSqid => &mut self.wrong_sqids,
            Injection::WrongStatus(_) => &mut self.wrong_statuses,
            Injection::WrongSqHead(_) => &mut self.wrong_sq_heads,
            Injection::Error(_) => &mut self.injected_errors,
            // Counted in `set_fatal`, `freeze` and `vanish`.
            Injection::Fatal | Injection::Freeze | Injection::Vanish => return,
        };
        *counter += 1;
    }
}

/// Statuses of random errors, some of them transient.
const ERRORS: [Status; 8] = [
    Status::INTERNAL_ERROR,
    Status::COMMAND_INTERRUPTED,
    Status::COMMAND_TRANSIENT_TRANSPORT_ERROR,
    Status::NAMESPACE_NOT_READY,
    Status::DATA_TRANSFER_ERROR,
    Status::WRITE_FAULT,
    Status::UNRECOVERED_READ_ERROR,
    Status::ABORTED_BY_REQUEST,
];

/// Fault rates, random generator and queued injections.
pub(crate) struct FaultState {
    faults: Faults,
    pub(crate) random: Random,
    pub(crate) queued: VecDeque<Injection>,
    pub(crate) queued_admin: VecDeque<Injection>,
    has_io_rates: bool,
}

impl FaultState {
    pub(crate) fn new() -> FaultState {
        FaultState {
            faults: Faults::default(),
            random: Random::new(0),
            queued: VecDeque::new(),
            queued_admin: VecDeque::new(),
            has_io_rates: false,
        }
    }

    pub(crate) fn set(&mut self, faults: Faults) {
        let quiet = Faults {
            seed: faults.seed,
            delay_steps_max: faults.delay_steps_max,
            errors: faults.errors.clone(),
            admin_swallow: faults.admin_swallow,
            admin_error: faults.admin_error,
            ..Faults::default()
        };
        self.has_io_rates = faults != quiet;
        self.random = Random::new(faults.seed);
        self.faults = faults;
    }

    /// Returns the fault of the next I/O command: queued, or drawn at random. `None`: no fault.
    #[inline]
    pub(crate) fn next_io(&mut self) -> Option<Injection> {
        if !self.has_io_rates && self.queued.is_empty() {
            return None;
        }
        self.queued.pop_front().or_else(|| self.random_injection())
    }

    /// Returns the fault of the next admin command: queued, or drawn at random. `None`: no fault.
    pub(crate) fn next_admin(&mut self) -> Option<Injection> {
        if let Some(injection) = self.queued_admin.pop_front() {
            return Some(injection);
        }
        let (swallow, error) = (self.faults.admin_swallow, self.faults.admin_error);
        if self.is_drawn(swallow) {
            Some(Injection::Swallow)
        } else if self.is_drawn(error) {
            Some(Injection::Error(Status::INTERNAL_ERROR))
        } else {
            None
        }
    }

    fn is_drawn(&mut self, rate: u32) -> bool {
        rate != 0 && u32::from(self.random.word()) < rate
    }

    fn random_injection(&mut self) -> Option<Injection> {
        let faults = &self.faults;
        let rates = [
            faults.vanish,
            faults.fatal,
            faults.freeze,
            faults.swallow,
            faults.drop,
            faults.delay,
            faults.reorder,
            faults.double,
            faults.wrong_cid,
            faults.wrong_sqid,
            faults.wrong_status,
            faults.wrong_sq_head,
            faults.error,
        ];
        let index = rates.into_iter().position(|rate| self.is_drawn(rate))?;
        let random = &mut self.random;
        Some(match index {
            0 => Injection::Vanish,
            1 => Injection::Fatal,
            2 => Injection::Freeze,
            3 => Injection::Swallow,
            4 => Injection::Drop,
            5 => Injection::Delay {
                steps: 1 + random.below(self.faults.delay_steps_max),
                is_executed_late: random.below(2) == 0,
            },
            6 => Injection::Delay { steps: 1 + random.below(4), is_executed_late: false },
            7 => Injection::Double,
            8 => Injection::WrongCid,
            9 => Injection::WrongSqid,
            10 => Injection::WrongStatus(any_error(random)),
            11 => Injection::WrongSqHead(random.word()),
            _ => Injection::Error(self.choose_error()),
        })
    }

    fn choose_error(&mut self) -> Status {
        let errors = if self.faults.errors.is_empty() { &ERRORS[..] } else { &self.faults.errors };
        let at = self.random.below(errors.len() as u64);
        let status = usize::try_from(at).ok().and_then(|at| errors.get(at)).copied();
        let status = status.unwrap_or(Status::INTERNAL_ERROR);
        if self.random.below(2) == 0 { status.dnr() } else { status }
    }
}

fn any_error(random: &mut Random) -> Status {
    let status = Status::from_bits(random.word());
    if status.is_success() { Status::INTERNAL_ERROR } else { status }
}
