//! The outstanding commands of a host, by CID.
//!
//! ```text
//!          submit             CQE, and the SEND need not be awaited         next_event
//!   Free ──────────> Waiting ───────────────────────────────────────> Done ───────────> Free
//!                       └── CQE ──> Ended ── the SEND has completed ────^
//! ```
//! A CID from the controller is accepted only if its command is in the expected state. A chain from the
//! device also contains the command's generation, which must match.

use nvme_spec::status::Status;
use nvme_spec::{Cqe, Sqe};
use spindle_reactor::slab::Slot;

use super::{HostEvent, Registered};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CommandState {
    /// The CID can be used for a new command.
    Free,
    /// Submitted; no completion queue entry yet.
    Waiting,
    /// The completion queue entry has arrived, but the SEND of the in-capsule data has not completed.
    Ended,
    /// The command has completed; `next_event` has not returned it yet.
    Done,
}

/// State of the capsule's SEND.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Capsule {
    /// Waits for a free send queue entry.
    Queued,
    /// Posted with in-capsule data, which the device may still read.
    Sending,
    /// The SEND has completed, or it is posted without in-capsule data.
    Sent,
}

/// Placement of a command's data, as its capsule describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DataPlacement {
    /// No data, or one keyed descriptor in the submission queue entry.
    Entry,
    /// In-capsule data of this many bytes.
    InCapsule(u32),
    /// A list of keyed descriptors that follows the submission queue entry.
    List,
}

#[derive(Debug)]
pub(super) struct Command {
    pub(super) state: CommandState,
    pub(super) capsule: Capsule,
    pub(super) placement: DataPlacement,
    /// Changes with each use of the CID; 0 before the first use only.
    pub(super) generation: u16,
    pub(super) sqe: Sqe,
    pub(super) data: Option<Registered>,
    /// Valid in the states `Ended` and `Done`.
    pub(super) cqe: Cqe,
}

impl Command {
    fn new() -> Command {
        Command {
            state: CommandState::Free,
            capsule: Capsule::Sent,
            placement: DataPlacement::Entry,
            generation: 0,
            sqe: Sqe::default(),
            data: None,
            cqe: Cqe::default(),
        }
    }

    /// Returns CID and generation as the chain of the work request.
    #[inline]
    pub(super) fn chain(&self, cid: u16) -> Slot {
        Slot::from_wire(u32::from(self.generation) << 16 | u32::from(cid))
    }
}

/// Table of commands, indexed by CID.
#[derive(Debug)]
pub(super) struct Commands {
    commands: Box<[Command]>,
    pub(super) outstanding: usize,
}

impl Commands {
    pub(super) fn new(entries: u16) -> Commands {
        Commands { commands: (0..entries).map(|_| Command::new()).collect(), outstanding: 0 }
    }

    /// Returns true if `cid` is in range and unused.
    #[inline]
    pub(super) fn is_free(&self, cid: u16) -> bool {
        self.commands.get(usize::from(cid)).is_some_and(|command| command.state == CommandState::Free)
    }

    /// Stores a submitted command; [`Commands::is_free`] must be true for its CID.
    #[inline]
    pub(super) fn start(&mut self, sqe: Sqe, placement: DataPlacement, data: Option<Registered>) {
        let Some(command) = self.commands.get_mut(usize::from(sqe.cid())) else { return };
        self.outstanding += 1;
        command.state = CommandState::Waiting;
        command.capsule = Capsule::Queued;
        command.placement = placement;
        command.generation = command.generation.checked_add(1).unwrap_or(1);
        command.sqe = sqe;
        command.data = data;
    }

    /// Returns the command with `cid` between the post of its capsule and its completion.
    #[inline]
    pub(super) fn posted(&mut self, cid: u16) -> Option<&mut Command> {
        let command = self.commands.get_mut(usize::from(cid))?;
        (command.state == CommandState::Waiting && command.capsule != Capsule::Queued).then_some(command)
    }

    /// Returns the command with `cid` if its capsule is not posted yet.
    #[inline]
    pub(super) fn queued(&mut self, cid: u16) -> Option<&mut Command> {
        let command = self.commands.get_mut(usize::from(cid))?;
        (command.state == CommandState::Waiting && command.capsule == Capsule::Queued).then_some(command)
    }

    fn index(chain: Slot) -> (usize, u16) {
        let [_, _, c, d] = chain.to_wire().to_le_bytes();
        (chain.index(), u16::from_le_bytes([c, d]))
    }

    /// Returns the command of `chain`; `None` if `next_event` has returned it.
    #[inline]
    pub(super) fn get(&self, chain: Slot) -> Option<&Command> {
        let (index, generation) = Self::index(chain);
        let command = self.commands.get(index)?;
        (command.generation == generation && command.state != CommandState::Free).then_some(command)
    }

    #[inline]
    pub(super) fn get_mut(&mut self, chain: Slot) -> Option<&mut Command> {
        let (index, generation) = Self::index(chain);
        let command = self.commands.get_mut(index)?;
        (command.generation == generation && command.state != CommandState::Free).then_some(command)
    }

    /// Frees `cid` and returns its [`HostEvent::Completed`]; `None` if `cid` is free already.
    #[inline]
    pub(super) fn end(&mut self, cid: u16) -> Option<HostEvent> {
        let command = self.commands.get_mut(usize::from(cid)).filter(|it| it.state != CommandState::Free)?;
        self.outstanding -= 1;
        command.state = CommandState::Free;
        let cqe = command.cqe;
        let status = cqe.status();
        let result = if status.is_success() { Ok(()) } else { Err(status) };
        Some(HostEvent::Completed { cid, cqe, buf: command.data.take(), result })
    }

    /// Ends any outstanding command and returns its event: with its completion queue entry if that has
    /// arrived, else with `status`. `None`: there is no outstanding command.
    pub(super) fn take_any(&mut self, status: Status) -> Option<HostEvent> {
        let index = self.commands.iter().position(|command| command.state != CommandState::Free)?;
        let cid = u16::try_from(index).ok()?;
        let command = self.commands.get_mut(index)?;
        match command.state {
            CommandState::Ended | CommandState::Done => {}
            CommandState::Waiting | CommandState::Free => command.cqe = Cqe::new(cid, status),
        }
        self.end(cid)
    }
}
