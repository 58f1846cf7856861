//! The commands that a host has outstanding, by CID.
//!
//! ```text
//!          submit             CQE, and the SEND need not be awaited          given out
//!   Free ──────────> Waiting ───────────────────────────────────────> Done ───────────> Free
//!                       └── CQE ──> Ended ── the SEND is over ──────────^
//! ```
//! A CID that a controller sends back is looked up here together with the state that it needs; it never
//! indexes. What comes back from the device carries the generation of the command's use.

use nvme_spec::status::Status;
use nvme_spec::{Cqe, Sqe};
use spindle_reactor::slab::Slot;

use super::{HostEvent, Registered};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// The CID can be used.
    Free,
    /// Submitted; no completion yet.
    Waiting,
    /// The completion came; the device still reads the data.
    Ended,
    /// It is over, and waits to be told.
    Done,
}

/// Where the capsule is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Capsule {
    /// It waits for room in the send queue.
    Queued,
    /// It is in the send queue, with data behind it that has to stay.
    Leaving,
    /// It has left; or nothing that the caller owns goes with it.
    Left,
}

/// How a command's data travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Carriage {
    /// There is none, or one descriptor in the entry names it.
    Entry,
    /// In the capsule: so many bytes.
    InCapsule(u32),
    /// A list of descriptors in the capsule names it.
    List,
}

#[derive(Debug)]
pub(super) struct Command {
    pub(super) state: State,
    pub(super) capsule: Capsule,
    pub(super) carriage: Carriage,
    /// Of this use; never 0.
    pub(super) generation: u16,
    pub(super) sqe: Sqe,
    pub(super) data: Option<Registered>,
    /// The completion, when `Ended` or `Done`.
    pub(super) cqe: Cqe,
}

impl Command {
    fn new() -> Command {
        Command {
            state: State::Free,
            capsule: Capsule::Left,
            carriage: Carriage::Entry,
            generation: 0,
            sqe: Sqe::default(),
            data: None,
            cqe: Cqe::default(),
        }
    }

    /// The name of this use.
    #[inline]
    pub(super) fn chain(&self, cid: u16) -> Slot {
        Slot::from_wire(u32::from(self.generation) << 16 | u32::from(cid))
    }
}

/// The table, as long as the queue.
#[derive(Debug)]
pub(super) struct Commands {
    commands: Box<[Command]>,
    pub(super) outstanding: usize,
}

impl Commands {
    pub(super) fn new(entries: u16) -> Commands {
        Commands { commands: (0..entries).map(|_| Command::new()).collect(), outstanding: 0 }
    }

    /// True when a command with this CID can be started.
    #[inline]
    pub(super) fn is_free(&self, cid: u16) -> bool {
        self.commands.get(usize::from(cid)).is_some_and(|command| command.state == State::Free)
    }

    /// Start a command, whose CID [`Commands::is_free`].
    #[inline]
    pub(super) fn start(&mut self, sqe: Sqe, carriage: Carriage, data: Option<Registered>) {
        let Some(command) = self.commands.get_mut(usize::from(sqe.cid())) else { return };
        self.outstanding += 1;
        command.state = State::Waiting;
        command.capsule = Capsule::Queued;
        command.carriage = carriage;
        command.generation = command.generation.checked_add(1).unwrap_or(1);
        command.sqe = sqe;
        command.data = data;
    }

    /// The command with this CID that the controller was told of and has not answered.
    #[inline]
    pub(super) fn asked(&mut self, cid: u16) -> Option<&mut Command> {
        let command = self.commands.get_mut(usize::from(cid))?;
        (command.state == State::Waiting && command.capsule != Capsule::Queued).then_some(command)
    }

    /// The command with this CID whose capsule waits to be posted.
    #[inline]
    pub(super) fn queued(&mut self, cid: u16) -> Option<&mut Command> {
        let command = self.commands.get_mut(usize::from(cid))?;
        (command.state == State::Waiting && command.capsule == Capsule::Queued).then_some(command)
    }

    fn index(chain: Slot) -> (usize, u16) {
        let [_, _, c, d] = chain.to_wire().to_le_bytes();
        (chain.index(), u16::from_le_bytes([c, d]))
    }

    /// The command of this chain, unless it is over.
    #[inline]
    pub(super) fn get(&self, chain: Slot) -> Option<&Command> {
        let (index, generation) = Self::index(chain);
        let command = self.commands.get(index)?;
        (command.generation == generation && command.state != State::Free).then_some(command)
    }

    /// As [`Commands::get`], to change.
    #[inline]
    pub(super) fn get_mut(&mut self, chain: Slot) -> Option<&mut Command> {
        let (index, generation) = Self::index(chain);
        let command = self.commands.get_mut(index)?;
        (command.generation == generation && command.state != State::Free).then_some(command)
    }

    /// A command is given out with its completion, and the CID is free.
    #[inline]
    pub(super) fn end(&mut self, cid: u16) -> Option<HostEvent> {
        let command = self.commands.get_mut(usize::from(cid)).filter(|it| it.state != State::Free)?;
        self.outstanding -= 1;
        command.state = State::Free;
        let cqe = command.cqe;
        let status = cqe.status();
        let result = if status.is_success() { Ok(()) } else { Err(status) };
        Some(HostEvent::Completed { cid, cqe, buf: command.data.take(), result })
    }

    /// Any command that is left: ended by its own completion where that came, else by `status`.
    pub(super) fn take_any(&mut self, status: Status) -> Option<HostEvent> {
        let index = self.commands.iter().position(|command| command.state != State::Free)?;
        let cid = u16::try_from(index).ok()?;
        let command = self.commands.get_mut(index)?;
        match command.state {
            State::Ended | State::Done => {}
            State::Waiting | State::Free => command.cqe = Cqe::new(cid, status),
        }
        self.end(cid)
    }
}
