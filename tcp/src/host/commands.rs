//! The commands that a host has outstanding, by CID.
//!
//! ```text
//!            submit             CapsuleResp, C2HData SUCCESS            given out
//!   Free ───────────> Waiting ──────────────────────────────> (event) ──────────> Free
//!                        └─ CapsuleResp while data is leaving ─> Ended ─ it has left ─^
//! ```
//! A CID that a controller sends back is looked up here with the state that the PDU needs; it never indexes.

use nvme_spec::Cqe;
use nvme_spec::status::Status;
use spindle_reactor::mem::Buf;

use super::HostEvent;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// The CID can be used.
    Free,
    /// Submitted; no completion yet.
    Waiting,
    /// The completion came early: the controller did not wait for data that is still leaving.
    Ended,
}

/// Which way a command's data goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    None,
    ToController,
    FromController,
}

#[derive(Debug)]
pub(super) struct Command {
    pub(super) state: State,
    pub(super) direction: Direction,
    /// Its data is in the send queue.
    pub(super) is_leaving: bool,
    /// LAST_PDU of its C2HData came.
    pub(super) is_last: bool,
    /// Some of its data was damaged on its way.
    pub(super) is_damaged: bool,
    /// TTAG of the R2T that is being answered.
    pub(super) ttag: u16,
    /// Its data; not here while it is leaving or being received.
    pub(super) buf: Option<Buf>,
    /// How long its data is.
    pub(super) bytes: u32,
    /// To the controller: asked for so far. From the controller: received so far.
    pub(super) moved: u32,
    /// Of the R2T that is being answered: the next byte to be queued. Its end is `moved`.
    pub(super) queued: u32,
    /// The completion, when `Ended`.
    pub(super) cqe: Cqe,
}

/// The table, as long as the queue.
#[derive(Debug)]
pub(super) struct Commands {
    commands: Box<[Command]>,
    pub(super) outstanding: usize,
}

impl Commands {
    pub(super) fn new(entries: u16) -> Self {
        let free = || Command {
            state: State::Free,
            direction: Direction::None,
            is_leaving: false,
            is_last: false,
            is_damaged: false,
            ttag: 0,
            buf: None,
            bytes: 0,
            moved: 0,
            queued: 0,
            cqe: Cqe::default(),
        };
        Commands { commands: (0..entries).map(|_| free()).collect(), outstanding: 0 }
    }

    /// Start a command; `None` when the CID is in use or there is none like it.
    #[inline]
    pub(super) fn start(&mut self, cid: u16, direction: Direction, bytes: u32) -> Option<&mut Command> {
        let command = self.commands.get_mut(usize::from(cid))?;
        if command.state != State::Free {
            return None;
        }
        debug_assert!(command.buf.is_none() && !command.is_leaving);
        self.outstanding += 1;
        command.state = State::Waiting;
        command.direction = direction;
        command.is_last = false;
        command.is_damaged = false;
        command.bytes = bytes;
        command.moved = 0;
        command.queued = 0;
        Some(command)
    }

    /// The command with this CID that waits for a completion.
    #[inline]
    pub(super) fn waiting(&mut self, cid: u16) -> Option<&mut Command> {
        self.commands.get_mut(usize::from(cid)).filter(|command| command.state == State::Waiting)
    }

    /// The command of a CID of our own: one whose data we hold.
    ///
    /// # Panics
    /// When there is none: our own bug.
    #[inline]
    pub(super) fn ours(&mut self, cid: u16) -> &mut Command {
        let command = &mut self.commands[usize::from(cid)];
        assert!(command.state != State::Free, "data of command {cid:#x}, which is free");
        command
    }

    /// A buffer comes back to its command.
    pub(super) fn keep(&mut self, cid: u16, buf: Buf) {
        let command = self.ours(cid);
        command.is_leaving = false;
        command.buf = Some(buf);
    }

    /// A command is over: its completion, and the CID is free.
    #[inline]
    pub(super) fn end(&mut self, cid: u16, cqe: Cqe) -> Option<HostEvent> {
        let command = self.commands.get_mut(usize::from(cid))?;
        debug_assert!(command.state != State::Free && !command.is_leaving);
        self.outstanding -= 1;
        command.state = State::Free;
        let status = cqe.status();
        let result = match status.is_success() {
            true if command.is_damaged => Err(Status::COMMAND_TRANSIENT_TRANSPORT_ERROR),
            true => Ok(()),
            false => Err(status),
        };
        Some(HostEvent::Completed { cid, cqe, buf: command.buf.take(), result })
    }

    /// As [`Commands::end`] for one whose completion came early.
    pub(super) fn take_ended(&mut self, cid: u16) -> Option<HostEvent> {
        let cqe = self.ours(cid).cqe;
        self.end(cid, cqe)
    }

    /// Any command that is left, ended by `status`, or by its own completion where that came.
    pub(super) fn take_any(&mut self, status: Status) -> Option<HostEvent> {
        let index = self.commands.iter().position(|command| command.state != State::Free)?;
        let cid = u16::try_from(index).ok()?;
        match self.commands[index].state {
            State::Ended => self.take_ended(cid),
            State::Waiting | State::Free => self.end(cid, Cqe::new(cid, status)),
        }
    }
}
