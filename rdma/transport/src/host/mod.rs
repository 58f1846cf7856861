//! The host's end of a connection: commands in, completions with their data out.
//!
//! ```text
//!   submit(sqe, data) ─> next_work: SEND of the capsule ─> (the controller reads or writes the buffer) ─┐
//!      write that fits: entry | data                       none: the data went with it                  │
//!      else, one piece: entry with a keyed descriptor      RDMA READ, RDMA WRITE                        │
//!      several pieces:  entry | list of keyed descriptors  the same                                     │
//!                                                       Completed <─ next_event <─ received(CQE) <──────┘
//! ```
//! Every submitted command is given back by exactly one `Completed`, with its buffer and the keys of it, also
//! when the connection ends: then with a path error, before `Closed`.
//!
//! **What the device still reads.** A SEND whose data is in the capsule is signalled, and its command is over
//! when both the SEND and the completion entry are there: the device may send it again for an
//! acknowledgement that was lost. Any other SEND reads only the entry's own head memory, which stays
//! registered for as long as the queue pair lives and may be written again: a controller that has answered
//! discards what comes twice. So only every 16th of those is signalled.
//!
//! **The end.** When it ends ([`Conn::end`], or the controller broke a rule) nothing more
//! is posted, and commands are told as lost only after [`Conn::on_gone`]: when the queue pair is no more and
//! the device does not touch their buffers.
//!
//! A turn: `next_work`.., `received`, `completed`, `next_event`... Where [`Conn::is_open`] is false the queue
//! pair is to be torn down.

mod commands;
mod sends;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;

use nvme_spec::sqe::{KeyedSgl, SglKind};
use nvme_spec::status::Status;
use nvme_spec::{Cqe, SQE_BYTES, Sgl, Sqe};
use spindle_reactor::mem::Buf;
use spindle_reactor::slab::Slot;
use spindle_transport::host;
pub use spindle_transport::host::SubmitErrorKind;
use zerocopy::{FromBytes, IntoBytes};

use crate::work::{Completion, Op, Span, Work};

use commands::{Capsule, Carriage, Commands, State};
use sends::Sends;

/// Most descriptors of one command; more is of no use, as the controller takes no more (MSDBD of ours is 16).
pub const DESCRIPTORS_MAX: usize = 16;
/// Bytes of one descriptor.
pub const DESCRIPTOR_BYTES: usize = 16;
/// Head memory of one entry: the submission queue entry, and the longest list behind it.
pub const ENTRY_BYTES: usize = SQE_BYTES + DESCRIPTORS_MAX * DESCRIPTOR_BYTES;

/// What a host's queue is made with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostConfig {
    /// Commands that may be outstanding; CIDs are below it.
    pub entries: u16,
    /// Work requests that the send queue holds.
    pub send_wr: u32,
    /// Pieces that the device gathers for one SEND, the head's among them.
    pub max_sge: u8,
    /// Writes up to this many bytes go in the command's capsule. 0 until the controller has said more
    /// (IOCCSZ), and always on an admin queue, as Linux: its capsules have no room for data.
    pub in_capsule_bytes: u32,
    /// Descriptors that a command may have: MSDBD. 1 until the controller has said more.
    pub descriptors: u8,
}

impl Default for HostConfig {
    fn default() -> Self {
        HostConfig { entries: 128, send_wr: 128, max_sge: 2, in_capsule_bytes: 0, descriptors: 1 }
    }
}

/// A contiguous piece of a buffer, and the registration that it lies in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Its address, here and for the other side.
    pub address: u64,
    /// Its length.
    pub bytes: u32,
    /// The key that the other side needs.
    pub remote_key: u32,
    /// The key that our own device needs.
    pub local_key: u32,
    /// The registration, for the code that made it.
    pub lease: Slot,
}

/// All pieces of one buffer, in order.
///
/// Nearly every buffer is one piece; a handle to that is small and allocates nothing.
#[derive(Debug)]
pub struct Keys(Pieces);

#[derive(Debug)]
enum Pieces {
    One(Piece),
    Many(Vec<Piece>),
}

impl Keys {
    /// A buffer of one piece.
    #[inline]
    #[must_use]
    pub fn one(piece: Piece) -> Keys {
        Keys(Pieces::One(piece))
    }

    /// A buffer of several.
    #[must_use]
    pub fn many(pieces: Vec<Piece>) -> Keys {
        Keys(Pieces::Many(pieces))
    }

    /// The pieces.
    #[inline]
    #[must_use]
    pub fn pieces(&self) -> &[Piece] {
        match &self.0 {
            Pieces::One(piece) => std::slice::from_ref(piece),
            Pieces::Many(pieces) => pieces,
        }
    }

    /// How long all of them are.
    fn bytes(&self) -> u64 {
        self.pieces().iter().map(|piece| u64::from(piece.bytes)).sum()
    }
}

/// A command's data, and the registration of it.
#[derive(Debug)]
pub struct Registered {
    /// The data.
    pub buf: Buf,
    /// As devices name it.
    pub keys: Keys,
}

/// A command's data; the keys are those of all of the buffer.
pub type HostData = host::HostData<Registered>;
/// What happened on a connection. Never [`HostEvent::Ready`]: it is made when the queue pair is established.
pub type HostEvent = host::HostEvent<Violation, Registered>;
/// Why a connection ended.
pub type CloseCause = host::CloseCause<Violation>;
/// The connection cannot take the command now. The data is given back.
pub type SubmitError = host::SubmitError<Registered>;

/// A rule that the controller broke.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// A completion names a command that is not outstanding.
    #[error("a completion for CID {cid:#x}, which is not outstanding")]
    CompletionCid {
        /// CID of the completion.
        cid: u16,
    },
    /// What came is not a completion queue entry.
    #[error("a capsule of {bytes} bytes, a completion has 16")]
    CompletionLength {
        /// Its length.
        bytes: usize,
    },
}

/// How far a connection is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Open,
    /// It ends: the queue pair is to be torn down.
    Ending(CloseCause),
    /// The queue pair is gone.
    Gone(CloseCause),
    /// All has been told.
    Told,
}

/// The host's end of one connection.
#[derive(Debug)]
pub struct Conn {
    commands: Commands,
    /// CIDs whose capsules wait to be posted, in the order in which they were submitted.
    queued: VecDeque<u16>,
    /// CIDs of commands that are over and not told yet.
    finished: VecDeque<u16>,
    sends: Sends,
    config: HostConfig,
    phase: Phase,
}

impl Conn {
    /// A connection that is established. Memory for all that it will ever hold is taken here.
    ///
    /// # Panics
    /// When the send queue holds nothing, or a SEND cannot have a head and one piece of data.
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

    /// The data pointer of a command with this data (Base 2.0 section 4.1.2; NVMe RDMA Transport 1.0, "SGL
    /// Support").
    #[inline]
    fn carry(&self, data: &HostData) -> Result<(Sgl, Carriage), SubmitErrorKind> {
        let (Registered { buf, keys }, is_to_controller) = match data {
            // As Linux: a keyed descriptor of nothing.
            HostData::None => return Ok((Sgl::keyed(0, 0, 0, false), Carriage::Entry)),
            HostData::ToController(data) => (data, true),
            HostData::FromController(data) => (data, false),
        };
        let bytes = u32::try_from(buf.len()).unwrap_or(u32::MAX);
        assert_eq!(keys.bytes(), u64::from(bytes), "keys of another buffer");
        let pieces = keys.pieces();
        // One for the head.
        let is_gathered = pieces.len() < usize::from(self.config.max_sge);
        if is_to_controller && bytes > 0 && bytes <= self.config.in_capsule_bytes && is_gathered {
            return Ok((Sgl::in_capsule(bytes), Carriage::InCapsule(bytes)));
        }
        let is_short = pieces.iter().all(|piece| piece.bytes <= KeyedSgl::BYTES_MAX);
        match pieces {
            [] => Ok((Sgl::keyed(0, 0, 0, false), Carriage::Entry)),
            [piece] if is_short => Ok((descriptor(piece), Carriage::Entry)),
            _ if is_short && pieces.len() <= self.list_max() => {
                let list = u32::try_from(pieces.len() * DESCRIPTOR_BYTES).unwrap_or(u32::MAX);
                let identifier = SglKind::LAST_SEGMENT_OFFSET.0;
                let sgl = Sgl { length: list.into(), identifier, ..Sgl::none() };
                Ok((sgl, Carriage::List))
            }
            _ => {
                let needed = |piece: &Piece| piece.bytes.div_ceil(KeyedSgl::BYTES_MAX) as usize;
                let allowed = self.list_max().max(1);
                Err(SubmitErrorKind::Pieces { pieces: pieces.iter().map(needed).sum(), allowed })
            }
        }
    }

    /// How many descriptors a list may have: what the controller takes, and what its capsules have room for.
    fn list_max(&self) -> usize {
        let room = self.config.in_capsule_bytes as usize / DESCRIPTOR_BYTES;
        usize::from(self.config.descriptors).min(room).min(DESCRIPTORS_MAX)
    }

    /// The next work request, to be posted at once; ring the doorbell after the last. `None`: nothing is
    /// queued, or the send queue is full until a completion comes.
    #[inline]
    pub fn next_work(&mut self) -> Option<Work> {
        if !self.is_open() || self.sends.is_full() {
            return None;
        }
        let cid = self.queued.pop_front()?;
        let command = self.commands.queued(cid)?;
        let chain = command.chain(cid);
        let (bytes, is_awaited) = match command.carriage {
            Carriage::InCapsule(bytes) => (bytes, true),
            Carriage::Entry | Carriage::List => (0, false),
        };
        command.capsule = if is_awaited { Capsule::Leaving } else { Capsule::Left };
        let mut head = [0; SQE_BYTES];
        head.copy_from_slice(command.sqe.as_bytes());
        let is_signalled = self.sends.post(chain, is_awaited)?;
        let local = Span { offset: 0, bytes };
        let head_bytes = u8::try_from(SQE_BYTES).unwrap_or(u8::MAX);
        Some(Work { chain, is_signalled, op: Op::Send { head, head_bytes, local, invalidate: None } })
    }

    /// True when something waits to be posted.
    #[inline]
    #[must_use]
    pub fn has_queued(&self) -> bool {
        !self.queued.is_empty()
    }

    /// What travels between the head of this chain's SEND and its data: the list of descriptors, mostly
    /// empty.
    #[inline]
    pub fn descriptors(&self, chain: Slot) -> impl Iterator<Item = Sgl> + '_ {
        let command = self.commands.get(chain).filter(|command| command.carriage == Carriage::List);
        let keys = command.and_then(|command| command.data.as_ref()).map(|data| &data.keys);
        keys.map_or(&[][..], Keys::pieces).iter().map(descriptor)
    }

    /// The data of a chain; `None` when it has none, or is over.
    #[inline]
    #[must_use]
    pub fn buffer(&self, chain: Slot) -> Option<&Buf> {
        self.commands.get(chain)?.data.as_ref().map(|data| &data.buf)
    }

    /// The same, for one who carries out the controller's WRITEs by copying.
    pub fn buffer_mut(&mut self, chain: Slot) -> Option<&mut Buf> {
        self.commands.get_mut(chain)?.data.as_mut().map(|data| &mut data.buf)
    }

    /// The keys of it.
    #[inline]
    #[must_use]
    pub fn keys(&self, chain: Slot) -> Option<&Keys> {
        self.commands.get(chain)?.data.as_ref().map(|data| &data.keys)
    }

    /// What a RECV brought. Its memory is free again when this returns.
    #[inline]
    pub fn received(&mut self, bytes: &[u8]) {
        if !self.is_open() {
            return;
        }
        let Ok(cqe) = Cqe::read_from_bytes(bytes) else {
            return self.end(CloseCause::Violation(Violation::CompletionLength { bytes: bytes.len() }));
        };
        let cid = cqe.cid();
        let Some(command) = self.commands.asked(cid) else {
            return self.end(CloseCause::Violation(Violation::CompletionCid { cid }));
        };
        command.cqe = cqe;
        if command.capsule == Capsule::Leaving {
            command.state = State::Ended;
        } else {
            command.state = State::Done;
            self.finished.push_back(cid);
        }
    }

    /// A work request of the send queue is over.
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
        // A command whose SEND was not awaited may be over, and its CID in use again.
        let Some(command) = self.commands.get_mut(chain) else { return };
        if command.capsule == Capsule::Leaving {
            command.capsule = Capsule::Left;
            if command.state == State::Ended {
                command.state = State::Done;
                self.finished.push_back(command.sqe.cid());
            }
        }
    }

    /// The connection ends. What is queued does not leave any more; [`HostEvent::Closed`] follows.
    #[cold]
    pub fn end(&mut self, why: CloseCause) {
        if self.is_open() {
            self.phase = Phase::Ending(why);
            self.queued.clear();
        }
    }

    /// The queue pair is destroyed: no device of anybody touches the buffers any more. What is outstanding is
    /// told as lost, then that the connection is closed.
    ///
    /// # Panics
    /// When the connection is open: a queue pair does not go away by itself.
    pub fn on_gone(&mut self) {
        match self.phase {
            Phase::Ending(why) => self.phase = Phase::Gone(why),
            Phase::Gone(_) | Phase::Told => {}
            Phase::Open => panic!("the queue pair of an open connection is gone"),
        }
    }

    /// How many commands are outstanding.
    #[inline]
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.commands.outstanding
    }

    /// Queue a command. Its CID is the caller's choice below the queue's entries; its data pointer is set
    /// here.
    ///
    /// # Errors
    /// [`SubmitError`] gives the data back when the command cannot be taken.
    ///
    /// # Panics
    /// When the keys are not those of the buffer.
    #[inline]
    pub fn submit(&mut self, sqe: Sqe, data: HostData) -> Result<(), SubmitError> {
        if !self.is_open() {
            return Err(SubmitError { kind: SubmitErrorKind::Closed, data });
        }
        if !self.commands.is_free(sqe.cid()) {
            return Err(SubmitError { kind: SubmitErrorKind::Cid, data });
        }
        let (sgl, carriage) = match self.carry(&data) {
            Ok(carried) => carried,
            Err(kind) => return Err(SubmitError { kind, data }),
        };
        self.commands.start(sqe.with_sgl(sgl), carriage, data.into_buffer());
        self.queued.push_back(sqe.cid());
        Ok(())
    }

    /// What happened next. `None`: nothing more until something came or left.
    #[inline]
    pub fn next_event(&mut self) -> Option<HostEvent> {
        if let Some(cid) = self.finished.pop_front() {
            return self.commands.end(cid);
        }
        match self.phase {
            Phase::Open | Phase::Ending(_) | Phase::Told => None,
            Phase::Gone(why) => {
                let event = self.commands.take_any(Status::HOST_PATHING_ERROR);
                if event.is_none() {
                    self.phase = Phase::Told;
                    return Some(HostEvent::Closed { why });
                }
                event
            }
        }
    }

    /// True while commands can be submitted. When it becomes false the queue pair is to be torn down.
    #[inline]
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.phase == Phase::Open
    }

    /// What the controller takes from now on: bytes of data in a command's capsule (IOCCSZ x 16 - 64 of
    /// Identify Controller; used where the device gathers the pieces), and descriptors of a command (MSDBD;
    /// 0: no limit).
    pub fn set_offered(&mut self, in_capsule_bytes: u32, descriptors: u8) {
        self.config.in_capsule_bytes = in_capsule_bytes;
        self.config.descriptors = if descriptors == 0 { u8::MAX } else { descriptors };
    }
}

/// A piece as the controller needs it. Its key stays valid: the registration is kept for other commands.
#[inline]
fn descriptor(piece: &Piece) -> Sgl {
    Sgl::keyed(piece.address, piece.bytes, piece.remote_key, false)
}
