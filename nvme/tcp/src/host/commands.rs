//! The outstanding commands of a host, by CID.
//!
//! ```text
//!            submit             CapsuleResp, C2HData SUCCESS
//!   Free ───────────> Waiting ────────────────────────────────────────────> Free, Completed
//!                        └─ CapsuleResp while data is queued ─> Ended ─ data sent ─^
//! ```
//! A CID from the controller is checked for range and state before the command is used.

use nvme_spec::Cqe;
use nvme_spec::status::Status;
use spindle_reactor::mem::Buf;

use super::HostEvent;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CommandState {
    /// The CID can be submitted.
    Free,
    /// Submitted; no completion yet.
    Waiting,
    /// The completion arrived before the command's queued data was completely sent.
    Ended,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    None,
    ToController,
    FromController,
}

#[derive(Debug)]
pub(super) struct Command {
    pub(super) state: CommandState,
    pub(super) direction: Direction,
    /// The outbox contains the command's buffer.
    pub(super) is_sending: bool,
    /// A C2HData with LAST_PDU arrived.
    pub(super) has_last_pdu: bool,
    /// A C2HData had a wrong data digest.
    pub(super) is_damaged: bool,
    /// TTAG of the current R2T.
    pub(super) ttag: u16,
    /// The command's data; `None` while it is queued to be sent or being received, or if there is none.
    pub(super) buf: Option<Buf>,
    /// Length of the data in bytes.
    pub(super) bytes: u32,
    /// To the controller: end of the range that was requested by R2T or sent in the capsule. From the
    /// controller: bytes received so far.
    pub(super) moved: u32,
    /// Offset of the next byte of the current R2T to be queued; the R2T ends at `moved`.
    pub(super) queued: u32,
    /// The completion, valid in state `Ended`.
    pub(super) cqe: Cqe,
}

/// Table indexed by CID, with one entry per queue entry.
#[derive(Debug)]
pub(super) struct Commands {
    commands: Box<[Command]>,
    pub(super) outstanding: usize,
}

impl Commands {
    pub(super) fn new(entries: u16) -> Self {
        let free = || Command {
            state: CommandState::Free,
            direction: Direction::None,
            is_sending: false,
            has_last_pdu: false,
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

    /// Starts a command. `None`: the CID is outstanding or out of range.
    #[inline]
    pub(super) fn start(&mut self, cid: u16, direction: Direction, bytes: u32) -> Option<&mut Command> {
        let command = self.commands.get_mut(usize::from(cid))?;
        if command.state != CommandState::Free {
            return None;
        }
        debug_assert!(command.buf.is_none() && !command.is_sending);
        self.outstanding += 1;
        command.state = CommandState::Waiting;
        command.direction = direction;
        command.has_last_pdu = false;
        command.is_damaged = false;
        command.bytes = bytes;
        command.moved = 0;
        command.queued = 0;
        Some(command)
    }

    /// Returns the command that waits for a completion. `None`: there is none with this CID.
    #[inline]
    pub(super) fn waiting(&mut self, cid: u16) -> Option<&mut Command> {
        self.commands.get_mut(usize::from(cid)).filter(|command| command.state == CommandState::Waiting)
    }

    /// Returns the command of a CID that this end stored with a payload or a queued PDU.
    ///
    /// # Panics
    /// If the CID is free or out of range: a command stays outstanding until its data is sent or received.
    #[inline]
    pub(super) fn outstanding_mut(&mut self, cid: u16) -> &mut Command {
        let command = &mut self.commands[usize::from(cid)];
        assert!(command.state != CommandState::Free, "data of command {cid:#x}, which is free");
        command
    }

    /// Returns the buffer to its command after it was sent, or after its receive was aborted.
    pub(super) fn return_buf(&mut self, cid: u16, buf: Buf) {
        let command = self.outstanding_mut(cid);
        command.is_sending = false;
        command.buf = Some(buf);
    }

    /// Ends a command and frees its CID. Returns its `Completed` event.
    #[inline]
    pub(super) fn end(&mut self, cid: u16, cqe: Cqe) -> Option<HostEvent> {
        let command = self.commands.get_mut(usize::from(cid))?;
        debug_assert!(command.state != CommandState::Free && !command.is_sending);
        self.outstanding -= 1;
        command.state = CommandState::Free;
        let status = cqe.status();
        let result = match status.is_success() {
            true if command.is_damaged => Err(Status::COMMAND_TRANSIENT_TRANSPORT_ERROR),
            true => Ok(()),
            false => Err(status),
        };
        Some(HostEvent::Completed { cid, cqe, buf: command.buf.take(), result })
    }

    /// As [`Commands::end`] with the stored completion of a command in state `Ended`.
    pub(super) fn take_ended(&mut self, cid: u16) -> Option<HostEvent> {
        let cqe = self.outstanding_mut(cid).cqe;
        self.end(cid, cqe)
    }

    /// Ends one outstanding command: with `status`, or with its stored completion in state `Ended`. `None`:
    /// no command is outstanding.
    pub(super) fn end_any(&mut self, status: Status) -> Option<HostEvent> {
        let index = self.commands.iter().position(|command| command.state != CommandState::Free)?;
        let cid = u16::try_from(index).ok()?;
        match self.commands[index].state {
            CommandState::Ended => self.take_ended(cid),
            CommandState::Waiting | CommandState::Free => self.end(cid, Cqe::new(cid, status)),
        }
    }
}
