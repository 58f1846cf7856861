//! [`Faults`]: what goes wrong, at random by one seed, or once by [`Injection`].

use std::collections::VecDeque;

use nvme_spec::Status;

/// Random numbers (splitmix64): the same on every machine.
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

    /// 0 to `limit - 1`; 0 where `limit` is 0.
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.next().checked_rem(limit).unwrap_or(0)
    }

    /// The low bits of a number.
    pub(crate) fn word(&mut self) -> u16 {
        (self.next() & 0xffff) as u16
    }
}

/// How often what goes wrong, each in 65,536ths of the commands it is about: I/O commands, where the name
/// does not begin with `admin`. The first one that strikes, in the order of the fields, is what happens.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Faults {
    /// Everything follows from it.
    pub seed: u64,
    /// [`Injection::Vanish`].
    pub vanish: u32,
    /// [`Injection::Fatal`].
    pub fatal: u32,
    /// [`Injection::Freeze`].
    pub freeze: u32,
    /// [`Injection::Swallow`].
    pub swallow: u32,
    /// [`Injection::Drop`].
    pub drop: u32,
    /// [`Injection::Delay`] of 1 to `delay_steps_max` steps, executed early or late.
    pub delay: u32,
    /// See `delay`; 0 is as 1.
    pub delay_steps_max: u64,
    /// The completion waits 1 to 4 steps, so that those of later commands overtake it.
    pub reorder: u32,
    /// [`Injection::Double`].
    pub double: u32,
    /// [`Injection::WrongCid`].
    pub wrong_cid: u32,
    /// [`Injection::WrongSqid`].
    pub wrong_sqid: u32,
    /// [`Injection::WrongStatus`] with any code but success.
    pub wrong_status: u32,
    /// [`Injection::WrongSqHead`] with any value.
    pub wrong_sq_head: u32,
    /// [`Injection::Error`] with one of `errors`, with DNR or without.
    pub error: u32,
    /// What `error` says; where it is empty, a choice of what drives say.
    pub errors: Vec<Status>,
    /// An admin command other than Asynchronous Event Request is neither executed nor completed.
    pub admin_swallow: u32,
    /// An admin command other than Asynchronous Event Request is not executed and ends with Internal Error.
    pub admin_error: u32,
}

/// One thing that goes wrong with one command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Injection {
    /// The command is neither executed nor completed, until it is aborted or the controller is reset. It is
    /// in the controller's hand all the time.
    Swallow,
    /// The command is executed and never completed. No Abort finds it; in hand until the reset.
    Drop,
    /// The command is completed after so many steps.
    Delay {
        /// How many; at least 1.
        steps: u64,
        /// It is executed only then, else at once.
        is_executed_late: bool,
    },
    /// The completion is there twice.
    Double,
    /// The completion has the identifier of no command of the queue. The command is executed; else as `Drop`.
    WrongCid,
    /// The completion names another submission queue. To the controller the command is completed.
    WrongSqid,
    /// The command is executed and the completion has this status.
    WrongStatus(Status),
    /// The completion has this SQHD.
    WrongSqHead(u16),
    /// The command is not executed and ends with this status.
    Error(Status),
    /// CSTS.CFS is set and the controller stops; the command is in its hand.
    Fatal,
    /// From now on CSTS does not follow CC, until a function level reset; the command is executed.
    Freeze,
    /// The drive is gone: all registers read as ones, nothing is executed, until it is plugged again.
    Vanish,
}

/// What was done, since the beginning.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Entries read from I/O submission queues.
    pub commands: u64,
    /// Entries read from the admin submission queue.
    pub admin_commands: u64,
    /// Compares that were done, with whatever result.
    pub compares: u64,
    /// Verifies that were done.
    pub verifies: u64,
    /// Copies that were done.
    pub copies: u64,
    /// I/O commands whose data pointer was an SGL.
    pub sgls: u64,
    /// Completions written to memory.
    pub completions: u64,
    /// Completions among them whose status is not success.
    pub errors: u64,
    /// Doorbells that were found written.
    pub doorbells: u64,
    /// Steps in which the controller is enabled and bus mastering is off: nothing is done.
    pub blocked: u64,
    /// Times the controller was enabled.
    pub enables: u64,
    /// Function level resets.
    pub function_resets: u64,
    /// Commands that an Abort ended.
    pub aborted: u64,
    /// [`Injection::Swallow`], admin commands included.
    pub swallowed: u64,
    /// [`Injection::Drop`].
    pub dropped: u64,
    /// [`Injection::Delay`] and reordering.
    pub delayed: u64,
    /// [`Injection::Double`].
    pub doubled: u64,
    /// [`Injection::WrongCid`].
    pub wrong_cids: u64,
    /// [`Injection::WrongSqid`].
    pub wrong_sqids: u64,
    /// [`Injection::WrongStatus`].
    pub wrong_statuses: u64,
    /// [`Injection::WrongSqHead`].
    pub wrong_sq_heads: u64,
    /// [`Injection::Error`], admin commands included.
    pub injected_errors: u64,
    /// Times the controller said that it is dead: injected, or because the host's queues cannot be reached.
    pub fatals: u64,
    /// [`Injection::Freeze`].
    pub freezes: u64,
    /// Times the drive went away.
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
            // Counted where they happen, which is not only here.
            Injection::Fatal | Injection::Freeze | Injection::Vanish => return,
        };
        *counter += 1;
    }
}

/// What drives say when they cannot; some of it may be tried again.
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

/// Decides.
pub(crate) struct FaultState {
    faults: Faults,
    pub(crate) random: Random,
    pub(crate) once: VecDeque<Injection>,
    pub(crate) once_admin: VecDeque<Injection>,
    has_io_rates: bool,
}

impl FaultState {
    pub(crate) fn new() -> FaultState {
        FaultState {
            faults: Faults::default(),
            random: Random::new(0),
            once: VecDeque::new(),
            once_admin: VecDeque::new(),
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

    /// What goes wrong with the next I/O command.
    #[inline]
    pub(crate) fn next_io(&mut self) -> Option<Injection> {
        if !self.has_io_rates && self.once.is_empty() {
            return None;
        }
        self.once.pop_front().or_else(|| self.at_random())
    }

    /// What goes wrong with the next admin command.
    pub(crate) fn next_admin(&mut self) -> Option<Injection> {
        if let Some(injection) = self.once_admin.pop_front() {
            return Some(injection);
        }
        let (swallow, error) = (self.faults.admin_swallow, self.faults.admin_error);
        if self.strikes(swallow) {
            Some(Injection::Swallow)
        } else if self.strikes(error) {
            Some(Injection::Error(Status::INTERNAL_ERROR))
        } else {
            None
        }
    }

    fn strikes(&mut self, rate: u32) -> bool {
        rate != 0 && u32::from(self.random.word()) < rate
    }

    fn at_random(&mut self) -> Option<Injection> {
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
        let index = rates.into_iter().position(|rate| self.strikes(rate))?;
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
