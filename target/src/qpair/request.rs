//! [`Request`]: one command of the host with its state, from arrival until its reply has left.
//!
//! ```text
//!                    ┌───────────── no buffer free: waits, in order ──────────────┐
//!   Command ──> parse, check ──> NeedBuffer ──> Fetching ──> Executing ──> Replying ──> (free)
//!                    │                              │             │  ^          ^
//!                    │ wrong                        │ damaged     └──┘ next     │
//!                    └──────────────────────────────┴──────── step ─────────────┤
//!                  cut: NeedBuffer ──> Moving ──> Replying (`bulk`)
//!                                                    Held (async event), Fused (waits for its other half),
//!                                                    Aborting (waits for the answer of another core) ────┘
//! ```

use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;
use spindle_disk::{BlockRange, IoRequest, Op};
use spindle_reactor::mem::Buf;
use spindle_reactor::slab::Slot;

use spindle_transport::DataPointer;

/// Where a request is. Each variant says what ends it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Just arrived; left within the same call.
    New,
    /// Waits for a buffer of the pool, of the admin pool or of the disk; ended by `Qpair::retry_buffers`.
    NeedBuffer,
    /// The transport brings the host's data; ended by `Fetched`.
    Fetching,
    /// A disk has it (or a step of it); ended by `Done`.
    Executing,
    /// Waits for a second buffer between two steps; ended by `Qpair::retry_buffers`.
    NeedStepBuffer,
    /// It is cut: its pieces are at the disk and on the wire; ended when the last of them is through.
    Moving,
    /// Half of a fused pair with its data; ended by the arrival of the other half.
    Fused,
    /// An Asynchronous Event Request; ended by an event, an abort or the end of the controller.
    Held,
    /// An Abort that another core carries out; ended by its answer.
    Aborting,
    /// A Connect, or an End Former Associations, that waits until nothing of its host's former associations
    /// is at a disk; ended by `Qpair::retry_connect`, `Qpair::look_at_former`.
    ConnectBlocked,
    /// The transport has the reply; ended by `Sent`.
    Replying,
}

impl State {
    /// All states, for counters and whole-matrix tests.
    pub const ALL: [State; 11] = [
        State::New,
        State::NeedBuffer,
        State::Fetching,
        State::Executing,
        State::NeedStepBuffer,
        State::Moving,
        State::Fused,
        State::Held,
        State::Aborting,
        State::ConnectBlocked,
        State::Replying,
    ];
}

/// What a request does, as parsed and checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Not parsed yet.
    None,
    /// A command of an I/O queue.
    Io(IoCommand),
    /// Connect, whose data is being fetched.
    Connect,
    /// An admin command that moves data to or from the host, or neither.
    Admin {
        /// Bytes of its data.
        bytes: u32,
        /// They go to the host.
        is_to_host: bool,
    },
}

/// A checked I/O command: it has passed every check that does not need its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IoCommand {
    /// What to do.
    pub op: IoOp,
    /// Half of a fused pair.
    pub is_fused: bool,
    /// Index of the disk in the core's list.
    pub disk: usize,
    /// The namespace.
    pub nsid: u32,
    /// The blocks; on the disk as it was when the command arrived.
    pub range: BlockRange,
    /// log2 of the block size.
    pub block_shift: u8,
    /// Bytes of host data in either direction.
    pub data_bytes: u32,
    /// What the host says of the data: the low byte of CDW13 of a Read or a Write.
    pub hints: u8,
    /// Its host: [`ControllerShared::client`](crate::shared::ControllerShared::client).
    pub client: u16,
}

impl IoCommand {
    /// A step of it, for its disk.
    #[inline]
    #[must_use]
    pub fn request(&self, op: Op, range: BlockRange) -> IoRequest {
        IoRequest { op, range, hints: self.hints, client: self.client }
    }
}

/// What the disk has said of the memory of a Read's or a Write's data.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Answer {
    /// It was not asked yet.
    #[default]
    None,
    /// Buffers of the pool. It is not asked again.
    Pool,
    /// It has none free now.
    Wait,
}

/// Commands of the NVM command set that we carry out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IoOp {
    /// Read.
    Read,
    /// Write, with FUA or without.
    Write {
        /// Force unit access.
        fua: bool,
    },
    /// Flush of one namespace.
    Flush,
    /// Flush of all namespaces (NSID FFFFFFFFh).
    FlushAll,
    /// Write Zeroes.
    WriteZeroes {
        /// DEAC.
        deallocate: bool,
        /// Force unit access.
        fua: bool,
    },
    /// Dataset Management with the attribute Deallocate.
    Deallocate {
        /// Number of ranges, 1 to 256.
        ranges: u16,
    },
    /// Dataset Management without it: hints, which we do not need.
    Hint,
    /// Compare.
    Compare,
    /// Verify.
    Verify,
    /// Copy.
    Copy {
        /// Number of source ranges.
        ranges: u16,
        /// Force unit access.
        fua: bool,
    },
}

/// Which way an I/O command moves host data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// No data.
    None,
    /// To the host.
    ToHost,
    /// From the host.
    FromHost,
}

impl IoOp {
    /// Which way it moves host data.
    #[inline]
    #[must_use]
    pub fn direction(self) -> Direction {
        match self {
            IoOp::Read => Direction::ToHost,
            IoOp::Write { .. } | IoOp::Compare | IoOp::Deallocate { .. } | IoOp::Copy { .. } | IoOp::Hint => {
                Direction::FromHost
            }
            IoOp::Flush | IoOp::FlushAll | IoOp::WriteZeroes { .. } | IoOp::Verify => Direction::None,
        }
    }
}

impl IoOp {
    /// The same, but on the medium before it is answered: what the host gets that has turned the volatile
    /// write cache off.
    #[must_use]
    pub fn with_fua(self) -> IoOp {
        match self {
            IoOp::Write { .. } => IoOp::Write { fua: true },
            IoOp::WriteZeroes { deallocate, .. } => IoOp::WriteZeroes { deallocate, fua: true },
            IoOp::Copy { ranges, .. } => IoOp::Copy { ranges, fua: true },
            IoOp::Read
            | IoOp::Flush
            | IoOp::FlushAll
            | IoOp::Deallocate { .. }
            | IoOp::Hint
            | IoOp::Compare
            | IoOp::Verify => self,
        }
    }
}

/// How far a command of several steps has come.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Progress {
    /// Range (Copy, Deallocate) or namespace (flush of all) that is next.
    pub index: u32,
    /// Blocks of that range (Verify, Copy: of the piece) that are done.
    pub blocks: u64,
    /// Blocks of the piece in flight.
    pub piece: u32,
    /// Copy: the piece was read, its write is in flight or next.
    pub is_writing: bool,
    /// Compare, Verify, Copy: the disk does it itself.
    pub is_disks: bool,
    /// A step ended well as the turn ended; its buffer is in `aux`.
    pub has_outcome: bool,
}

/// How far a command that is cut has come, in bytes of its data.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Pieces {
    /// Bytes of a piece, of which the last may be shorter; 0: the command is not cut.
    pub unit: u32,
    /// Where the next piece begins.
    pub next: u32,
    /// What the disk is through with.
    pub done: u32,
    /// Where the piece begins that is at the disk.
    pub at_disk: Option<u32>,
    /// Where the piece begins that waits for the disk, with its data in `aux`.
    pub ready: Option<u32>,
    /// Pieces on the wire.
    pub on_wire: u8,
}

/// One command in flight. Lives in its queue pair's slab.
#[derive(Debug)]
pub struct Request {
    /// Where it is.
    pub state: State,
    /// It is to end with this status, and without effect, as soon as its data is here: it was aborted, or
    /// lost the other half of its pair.
    pub abort_status: Option<Status>,
    /// What it does.
    pub work: Work,
    /// Where its data is.
    pub pointer: DataPointer,
    /// The command.
    pub sqe: Sqe,
    /// Its data.
    pub buf: Option<Buf>,
    /// A second buffer: what a Compare read, what a Copy carries.
    pub aux: Option<Buf>,
    /// Where its data is to be.
    pub answer: Answer,
    /// Bytes of a disk's memory that are charged to the queue pair while its host brings the data.
    pub charged: u32,
    /// Steps.
    pub progress: Progress,
    /// Pieces.
    pub pieces: Pieces,
    /// The other half of a fused pair.
    pub partner: Option<Slot>,
}

impl Request {
    /// A request in state `New`.
    #[inline]
    #[must_use]
    pub fn new(sqe: Sqe, pointer: DataPointer) -> Request {
        Request {
            state: State::New,
            abort_status: None,
            work: Work::None,
            pointer,
            sqe,
            buf: None,
            aux: None,
            answer: Answer::None,
            charged: 0,
            progress: Progress::default(),
            pieces: Pieces::default(),
            partner: None,
        }
    }

    /// What it takes of the pool to begin with: all of its data or, when it is cut, a piece.
    #[inline]
    pub(super) fn first_bytes(&self, io: &IoCommand) -> u32 {
        if self.pieces.unit > 0 { self.pieces.unit } else { io.data_bytes }
    }

    /// Its command identifier, all 16 bits as the host sent it.
    #[inline]
    #[must_use]
    pub fn cid(&self) -> u16 {
        self.sqe.cid()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Growth of this struct is growth of every connection's memory by its queue entries.
    #[test]
    fn a_request_stays_within_five_cache_lines() {
        assert!(size_of::<Request>() <= 320, "{}", size_of::<Request>());
    }
}
