//! The host's end of a connection: sends commands, and returns completions with the data buffers.
//!
//! ```text
//!   submit(sqe, data) ─> next_work: SEND of the capsule ─> (the controller reads or writes the buffer) ─┐
//!      write that fits: entry | data                       none: the data went with it                  │
//!      else, one piece: entry with a keyed descriptor      RDMA READ, RDMA WRITE                        │
//!      several pieces:  entry | list of keyed descriptors  the same                                     │
//!                                                       Completed <─ next_event <─ received(CQE) <──────┘
//! ```
//! Every submitted command is returned by exactly one `Completed`, with its buffer and keys. When the
//! connection ends, outstanding commands complete with a path error before `Closed`.
//!
//! **Buffers in use by the device.** A SEND with in-capsule data is signalled: the device may retransmit the
//! data until the SEND has completed. So its command ends when both the SEND's completion and the completion
//! queue entry have arrived. Any other SEND reads only the entry's head memory, which stays registered as
//! long as the queue pair exists. This memory may be overwritten once the controller has answered, as the
//! controller then discards a retransmission. So only one in 16 of these SENDs is signalled, and each one
//! while few entries of the send queue are free.
//!
//! **End.** After [`Conn::end`], a violation by the controller or a failed work request nothing more is
//! posted. Outstanding commands are reported as lost only after [`Conn::on_gone`], when the queue pair is
//! destroyed and the device no longer accesses their buffers.
//!
//! Calls of a turn: `next_work`.., `received`, `completed`, `next_event`... Once [`Conn::is_open`] is false,
//! the caller must destroy the queue pair.

mod commands;
mod sends;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;

use nvme_spec::sqe::{KeyedSgl, SglKind};
use nvme_spec::status::Status;
use nvme_spec::{Cqe, SQE_BYTES, Sgl, Sqe};
use spindle_nvme_transport::host;
pub use spindle_nvme_transport::host::SubmitErrorKind;
use spindle_reactor::mem::Buf;
use spindle_reactor::slab::Slot;
use zerocopy::{FromBytes, IntoBytes};

use crate::work::{Completion, Op, Span, Work};

use commands::{Capsule, CommandState, Commands, DataPlacement};
use sends::Sends;

/// Maximum descriptors of one command: the MSDBD of Spindle's controller.
pub const DESCRIPTORS_MAX: usize = 16;
/// Bytes of one SGL descriptor.
pub const DESCRIPTOR_BYTES: usize = 16;
/// Bytes of head memory for one queue entry: a submission queue entry and the longest descriptor list.
pub const ENTRY_BYTES: usize = SQE_BYTES + DESCRIPTORS_MAX * DESCRIPTOR_BYTES;

/// Parameters of a host's queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostConfig {
    /// Maximum outstanding commands; every CID is less than this.
    pub entries: u16,
    /// Capacity of the send queue in work requests.
    pub send_wr: u32,
    /// Maximum scatter/gather entries of one SEND, including one for the head.
    pub max_sge: u8,
    /// Maximum in-capsule data of a write in bytes (IOCCSZ). 0 until Identify Controller is known, and always
    /// on an admin queue, as in Linux.
    pub in_capsule_bytes: u32,
    /// Maximum descriptors of a command (MSDBD). 1 until Identify Controller is known.
    pub descriptors: u8,
}

impl Default for HostConfig {
    fn default() -> Self {
        HostConfig { entries: 128, send_wr: 128, max_sge: 2, in_capsule_bytes: 0, descriptors: 1 }
    }
}

/// A contiguous piece of a buffer, and its memory registration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Virtual address, the same locally and in descriptors.
    pub address: u64,
    /// Length in bytes; at most [`KeyedSgl::BYTES_MAX`] for one descriptor.
    pub bytes: u32,
    /// Remote key, for the controller's READs and WRITEs.
    pub remote_key: u32,
    /// Local key, for this host's SENDs.
    pub local_key: u32,
    /// Slot of the registration in the cache, to be released with the buffer.
    pub lease: Slot,
}

/// Pieces of one buffer, in the order of the bytes.
///
/// Nearly every buffer is one piece, which needs no allocation.
#[derive(Debug)]
pub struct Keys(Pieces);

#[derive(Debug)]
enum Pieces {
    One(Piece),
    Many(Vec<Piece>),
}

impl Keys {
    /// Returns the keys of a contiguous buffer.
    #[inline]
    #[must_use]
    pub fn one(piece: Piece) -> Keys {
        Keys(Pieces::One(piece))
    }

    /// Returns the keys of a buffer of several pieces.
    #[must_use]
    pub fn many(pieces: Vec<Piece>) -> Keys {
        Keys(Pieces::Many(pieces))
    }

    /// Returns the contiguous pieces, in the order of the bytes.
    #[inline]
    #[must_use]
    pub fn pieces(&self) -> &[Piece] {
        match &self.0 {
            Pieces::One(piece) => std::slice::from_ref(piece),
            Pieces::Many(pieces) => pieces,
        }
    }

    fn bytes(&self) -> u64 {
        self.pieces().iter().map(|piece| u64::from(piece.bytes)).sum()
    }
}

/// A command's data buffer with its memory registrations.
#[derive(Debug)]
pub struct Registered {
    /// Buffer of the data; `keys` cover all of it.
    pub buf: Buf,
    /// Addresses and keys of the pieces of `buf`.
    pub keys: Keys,
}

/// Data of a command with its direction. The keys must cover the whole buffer.
pub type HostData = host::HostData<Registered>;
/// Events of a connection. Does not return [`HostEvent::Ready`]: the link emits that event when the queue
/// pair is established.
pub type HostEvent = host::HostEvent<Violation, Registered>;
/// Cause of the end of a connection, with this transport's [`Violation`].
pub type CloseCause = host::CloseCause<Violation>;
/// Refusal of a command; contains the command's data.
pub type SubmitError = host::SubmitError<Registered>;

/// A protocol violation by the controller, which ends the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// A completion names a command that is not outstanding.
    #[error("a completion for CID {cid:#x}, which is not outstanding")]
    CompletionCid {
        /// CID in the completion queue entry.
        cid: u16,
    },
    /// A message is not a completion queue entry of 16 bytes.
    #[error("a capsule of {bytes} bytes, a completion has 16")]
    CompletionLength {
        /// Bytes received.
        bytes: usize,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Open,
    /// The caller must destroy the queue pair.
    Ending(CloseCause),
    /// The queue pair is destroyed; outstanding commands are being reported.
    Destroyed(CloseCause),
    /// [`HostEvent::Closed`] was returned.
    Closed,
}

/// The host's end of one connection; see the module documentation.
#[derive(Debug)]
pub struct Conn {
    commands: Commands,
    /// CIDs of capsules not posted yet, in order of submission.
    queued: VecDeque<u16>,
    /// CIDs of completed commands, not returned by [`Conn::next_event`] yet.
    finished: VecDeque<u16>,
    sends: Sends,
    config: HostConfig,
    phase: Phase,
}

impl Conn {
    /// Creates the state of an established connection, and allocates all memory that the connection needs.
    ///
    /// # Panics
    /// If `send_wr` is 0 or `max_sge` is less than 2 (head and one piece of data).
    #[must_use]
    pub fn new(config: HostConfig) -> Conn {
        assert!(config.send_wr > 0 && config.max_sge >= 2, "a queue pair that cannot send: {config:?}");
        let entries = usize::from(config.entries);
        Conn {
            commands: Commands::new(config.entries),
            queued: VecDeque::with_capacity(entries),
            finished: VecDeque::with_capacity(entries),
            sends: Sends::new(config.send_wr),
            config,
            phase: Phase::Open,
        }
    }

    /// Returns the SGL and placement of a command's data, or [`SubmitErrorKind::Pieces`] (Base 2.0 section
    /// 4.1.2; NVMe RDMA Transport 1.0, "SGL Support").
    #[inline]
    fn data_pointer(&self, data: &HostData) -> Result<(Sgl, DataPlacement), SubmitErrorKind> {
        let (Registered { buf, keys }, is_to_controller) = match data {
            // A keyed descriptor of zero bytes, as Linux sends.
            HostData::None => return Ok((Sgl::keyed(0, 0, 0, false), DataPlacement::Entry)),
            HostData::ToController(data) => (data, true),
            HostData::FromController(data) => (data, false),
        };
        let bytes = u32::try_from(buf.len()).unwrap_or(u32::MAX);
        assert_eq!(keys.bytes(), u64::from(bytes), "keys of another buffer");
        let pieces = keys.pieces();
        // One scatter/gather entry is for the head.
        let is_gathered = pieces.len() < usize::from(self.config.max_sge);
        if is_to_controller && bytes > 0 && bytes <= self.config.in_capsule_bytes && is_gathered {
            return Ok((Sgl::in_capsule(bytes), DataPlacement::InCapsule(bytes)));
        }
        let is_short = pieces.iter().all(|piece| piece.bytes <= KeyedSgl::BYTES_MAX);
        match pieces {
            [] => Ok((Sgl::keyed(0, 0, 0, false), DataPlacement::Entry)),
            [piece] if is_short => Ok((descriptor(piece), DataPlacement::Entry)),
            _ if is_short && pieces.len() <= self.list_max() => {
                let list = u32::try_from(pieces.len() * DESCRIPTOR_BYTES).unwrap_or(u32::MAX);
                let identifier = SglKind::LAST_SEGMENT_OFFSET.0;
                let sgl = Sgl { length: list.into(), identifier, ..Sgl::none() };
                Ok((sgl, DataPlacement::List))
            }
            _ => {
                let needed = |piece: &Piece| piece.bytes.div_ceil(KeyedSgl::BYTES_MAX) as usize;
                let allowed = self.list_max().max(1);
                Err(SubmitErrorKind::Pieces { pieces: pieces.iter().map(needed).sum(), allowed })
            }
        }
    }

    /// Returns the maximum descriptors of a list: limited by MSDBD, in-capsule bytes and [`DESCRIPTORS_MAX`].
    fn list_max(&self) -> usize {
        let room = self.config.in_capsule_bytes as usize / DESCRIPTOR_BYTES;
        usize::from(self.config.descriptors).min(room).min(DESCRIPTORS_MAX)
    }

    /// Returns the next work request to post. The caller rings the doorbell after the last one. `None` if
    /// nothing is queued, the send queue is full until a completion, or the connection has ended.
    #[inline]
    pub fn next_work(&mut self) -> Option<Work> {
        if !self.is_open() || self.sends.is_full() {
            return None;
        }
        let cid = self.queued.pop_front()?;
        let command = self.commands.queued(cid)?;
        let chain = command.chain(cid);
        let (bytes, is_awaited) = match command.placement {
            DataPlacement::InCapsule(bytes) => (bytes, true),
            DataPlacement::Entry | DataPlacement::List => (0, false),
        };
        command.capsule = if is_awaited { Capsule::Sending } else { Capsule::Sent };
        let mut head = [0; SQE_BYTES];
        head.copy_from_slice(command.sqe.as_bytes());
        let is_signalled = self.sends.reserve(chain, is_awaited)?;
        let local = Span { offset: 0, bytes };
        let head_bytes = u8::try_from(SQE_BYTES).unwrap_or(u8::MAX);
        Some(Work { chain, is_signalled, op: Op::Send { head, head_bytes, local, invalidate: None } })
    }

    /// Returns true if capsules are queued that are not posted yet.
    #[inline]
    #[must_use]
    pub fn has_queued(&self) -> bool {
        !self.queued.is_empty()
    }

    /// Returns the descriptor list that follows the head in the capsule of `chain`. Empty if the command has
    /// no such list or has ended.
    #[inline]
    pub fn descriptors(&self, chain: Slot) -> impl Iterator<Item = Sgl> + '_ {
        let command = self.commands.get(chain).filter(|command| command.placement == DataPlacement::List);
        let keys = command.and_then(|command| command.data.as_ref()).map(|data| &data.keys);
        keys.map_or(&[][..], Keys::pieces).iter().map(descriptor)
    }

    /// Returns the data buffer of the command of `chain`; `None` if the command has no data or has ended.
    #[inline]
    #[must_use]
    pub fn buffer(&self, chain: Slot) -> Option<&Buf> {
        self.commands.get(chain)?.data.as_ref().map(|data| &data.buf)
    }

    /// As [`Conn::buffer`], for a simulated device that executes the controller's WRITEs by copying.
    pub fn buffer_mut(&mut self, chain: Slot) -> Option<&mut Buf> {
        self.commands.get_mut(chain)?.data.as_mut().map(|data| &mut data.buf)
    }

    /// Returns the keys of the data buffer of the command of `chain`; `None`: it has no data or has ended.
    #[inline]
    #[must_use]
    pub fn keys(&self, chain: Slot) -> Option<&Keys> {
        self.commands.get(chain)?.data.as_ref().map(|data| &data.keys)
    }

    /// Handles the message of a RECV: a completion queue entry. An invalid message ends the connection.
    /// `bytes` are copied, so the receive may be posted again.
    #[inline]
    pub fn received(&mut self, bytes: &[u8]) {
        if !self.is_open() {
            return;
        }
        let Ok(cqe) = Cqe::read_from_bytes(bytes) else {
            return self.end(CloseCause::Violation(Violation::CompletionLength { bytes: bytes.len() }));
        };
        let cid = cqe.cid();
        let Some(command) = self.commands.posted(cid) else {
            return self.end(CloseCause::Violation(Violation::CompletionCid { cid }));
        };
        command.cqe = cqe;
        if command.capsule == Capsule::Sending {
            command.state = CommandState::Ended;
        } else {
            command.state = CommandState::Done;
            self.finished.push_back(cid);
        }
    }

    /// Handles a completion of the send queue. A failure, or a completion out of order, ends the connection.
    #[inline]
    pub fn completed(&mut self, completion: Completion) {
        let Completion { chain, is_signalled, is_ok } = completion;
        if !self.is_open() {
            return;
        }
        if !is_ok {
            return self.end(CloseCause::Failed);
        }
        if !is_signalled {
            return;
        }
        if !self.sends.end(chain) {
            return self.end(CloseCause::Device);
        }
        // A command whose SEND was not awaited may have ended, and its CID may be in use again.
        let Some(command) = self.commands.get_mut(chain) else { return };
        if command.capsule == Capsule::Sending {
            command.capsule = Capsule::Sent;
            if command.state == CommandState::Ended {
                command.state = CommandState::Done;
                self.finished.push_back(command.sqe.cid());
            }
        }
    }

    /// Ends the connection: queued capsules are not posted. [`HostEvent::Closed`] follows after
    /// [`Conn::on_gone`]. No effect if the connection has ended.
    #[cold]
    pub fn end(&mut self, why: CloseCause) {
        if self.is_open() {
            self.phase = Phase::Ending(why);
            self.queued.clear();
        }
    }

    /// Starts the report of outstanding commands as lost; [`HostEvent::Closed`] follows. To be called when
    /// the queue pair is destroyed: no device accesses the buffers any more.
    ///
    /// # Panics
    /// If the connection is open: only an ended connection's queue pair may be destroyed.
    pub fn on_gone(&mut self) {
        match self.phase {
            Phase::Ending(why) => self.phase = Phase::Destroyed(why),
            Phase::Destroyed(_) | Phase::Closed => {}
            Phase::Open => panic!("the queue pair of an open connection is gone"),
        }
    }

    /// Returns the count of commands that were submitted and not yet returned by [`HostEvent::Completed`].
    #[inline]
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.commands.outstanding
    }

    /// Queues a command, and sets its data pointer. Its CID is free and below [`HostConfig::entries`].
    ///
    /// # Errors
    /// [`SubmitError`] returns the data: the connection has ended, the CID is in use or out of range, or the
    /// data has too many pieces.
    ///
    /// # Panics
    /// If the keys do not have as many bytes as the buffer.
    #[inline]
    pub fn submit(&mut self, sqe: Sqe, data: HostData) -> Result<(), SubmitError> {
        if !self.is_open() {
            return Err(SubmitError { kind: SubmitErrorKind::Closed, data });
        }
        if !self.commands.is_free(sqe.cid()) {
            return Err(SubmitError { kind: SubmitErrorKind::Cid, data });
        }
        let (sgl, placement) = match self.data_pointer(&data) {
            Ok(pointer) => pointer,
            Err(kind) => return Err(SubmitError { kind, data }),
        };
        self.commands.start(sqe.with_sgl(sgl), placement, data.into_buffer());
        self.queued.push_back(sqe.cid());
        Ok(())
    }

    /// Returns the next event. `None`: none until a message, a completion or [`Conn::on_gone`].
    #[inline]
    pub fn next_event(&mut self) -> Option<HostEvent> {
        if let Some(cid) = self.finished.pop_front() {
            return self.commands.end(cid);
        }
        match self.phase {
            Phase::Open | Phase::Ending(_) | Phase::Closed => None,
            Phase::Destroyed(why) => {
                let event = self.commands.take_any(Status::HOST_PATHING_ERROR);
                if event.is_none() {
                    self.phase = Phase::Closed;
                    return Some(HostEvent::Closed { why });
                }
                event
            }
        }
    }

    /// Returns true while commands can be submitted. Once false, the caller must destroy the queue pair.
    #[inline]
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.phase == Phase::Open
    }

    /// Sets the controller's limits. `in_capsule_bytes`: IOCCSZ x 16 - 64 of Identify Controller; used only
    /// if the device can gather the pieces. `descriptors`: MSDBD, descriptors of a command; 0 means no limit.
    pub fn set_offered(&mut self, in_capsule_bytes: u32, descriptors: u8) {
        self.config.in_capsule_bytes = in_capsule_bytes;
        self.config.descriptors = if descriptors == 0 { u8::MAX } else { descriptors };
    }
}

/// Returns the keyed descriptor of a piece, without invalidation: other commands reuse the registration.
#[inline]
fn descriptor(piece: &Piece) -> Sgl {
    Sgl::keyed(piece.address, piece.bytes, piece.remote_key, false)
}
