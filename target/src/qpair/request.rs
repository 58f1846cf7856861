//! [`Request`]: one command of the host and its state, from arrival until its reply is sent.
//!
//! ```text
//!   New ──┬── memory is free ───────────┬──> Fetching ──> Executing ──> Replying ── Sent ──> (free)
//!         └── NeedBuffer, in order ─────┘       │             │            ^
//!   check failed, data damaged, aborted ────────┴─────────────┴────────────┘
//!
//!   no data from the host   New or NeedBuffer ──> Executing
//!   several steps           Executing <──> NeedStepBuffer
//!   bulk transfer           Bulk <──> NeedStepBuffer, instead of Fetching and Executing
//!   fused pair              Fetching ──> Fused ──> Executing
//!   admin queue             Parked (AER), Aborting (Abort), ConnectBlocked, Next ──> Replying
//! ```

use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;
use spindle_nvme_transport::RequestId;
use spindle_reactor::mem::Buf;
use spindle_target_disk::{BlockRange, IoRequest, Op, Sender};

use spindle_nvme_transport::DataPointer;

/// State of a request. The text of each state has the event that ends it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestState {
    /// The command has just arrived; another state follows within the same call.
    New,
    /// Waits for a buffer of the pool, of the admin pool or of the disk; the second half of a fused pair
    /// waits for its first. Ended by `Qpair::retry_buffers`, an abort, or the failure of the other half.
    NeedBuffer,
    /// The transport fetches the host's data; ended by `Fetched` or `Transport::cancel`.
    Fetching,
    /// A disk executes the command or a step of the command; ended by `Done`. Also an admin command, within
    /// the call that executes the command.
    Executing,
    /// Waits between two steps for a buffer or for the next turn; ended by `Qpair::retry_buffers`.
    NeedStepBuffer,
    /// A bulk transfer, with pieces at the disk and on the wire; ended when the last piece has completed.
    Bulk,
    /// Half of a fused pair that has its data; ended when the other half has its data or fails.
    Fused,
    /// An Asynchronous Event Request; ended by an event, abort, reset, shutdown or end of the controller.
    Parked,
    /// An Abort of a command on an I/O queue, sent to all cores; ended by the answer of the last core.
    Aborting,
    /// A Connect or End Former Associations that waits until the disks have completed the commands of the
    /// host's former associations. Ended by `retry_connect`, `poll_end_former`, a reset or shutdown.
    ConnectBlocked,
    /// A Next that waits for entries. Ended by entries, its time, an abort, a reset, a shutdown, or the end
    /// of the membership.
    Next,
    /// The transport has the reply; ended by `Sent`.
    Replying,
}

impl RequestState {
    /// All states, in the order of their declaration, for tests and the simulator.
    pub const ALL: [RequestState; 12] = [
        RequestState::New,
        RequestState::NeedBuffer,
        RequestState::Fetching,
        RequestState::Executing,
        RequestState::NeedStepBuffer,
        RequestState::Bulk,
        RequestState::Fused,
        RequestState::Parked,
        RequestState::Aborting,
        RequestState::ConnectBlocked,
        RequestState::Next,
        RequestState::Replying,
    ];
}

/// The parsed and checked command of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Not parsed yet.
    None,
    /// A command of an I/O queue.
    Io(IoCommand),
    /// A Connect. Its data is parsed after the fetch.
    Connect,
    /// An admin command, with or without data.
    Admin {
        /// Bytes of data that need memory; 0: none.
        bytes: u32,
        /// Zeroes that the controller sends after them: what the host reads beyond the end of a log page.
        zeroes: u32,
        /// True: the controller sends the data; false: the host sends it.
        is_to_host: bool,
    },
}

/// An I/O command that passed all checks that do not need its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IoCommand {
    /// The operation, with the attributes that change it.
    pub op: IoOp,
    /// True for half of a fused pair.
    pub is_fused: bool,
    /// Index of the namespace's disk in [`Env::disks`](crate::env::Env::disks).
    pub disk: usize,
    /// Namespace identifier as the host sent it; FFFFFFFFh for a flush of all namespaces.
    pub nsid: u32,
    /// Blocks of the command, checked against the disk's size when the command arrives. `blocks` is 0 for a
    /// Flush and for commands with a list of ranges; `lba` of a Copy is the first destination block.
    pub range: BlockRange,
    /// log2 of the block size in bytes.
    pub block_shift: u8,
    /// Bytes of host data in either direction; for a list of ranges, the length of the SGL.
    pub data_bytes: u32,
    /// Dataset Management hints of a Read or Write: the low byte of CDW13.
    pub hints: u8,
    /// Client identifier of the host: [`ControllerShared::client`](crate::shared::ControllerShared::client).
    pub client: u16,
    /// Member of the disk's cluster that sends a Write.
    pub sender: Sender,
    /// A Read is a Read and Register.
    pub registers: bool,
    /// KEEP of a Read and Register.
    pub keeps: bool,
}

impl IoCommand {
    /// Returns the disk request `op` for `range`, with the hints and the client of this command.
    #[inline]
    #[must_use]
    pub fn request(&self, op: Op, range: BlockRange) -> IoRequest {
        IoRequest { hints: self.hints, client: self.client, sender: self.sender, ..IoRequest::new(op, range) }
    }
}

/// Kind of memory for the data of a Read or Write, from the result of `DiskChannel::prepare`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DataMemory {
    /// `prepare` was not called yet, or returned `Ready`, `Fill` or `Later`.
    #[default]
    Unknown,
    /// Buffers of the pool; `prepare` is not called again.
    Pool,
    /// Memory of the disk, of which none is free for this connection; each retry calls `prepare` again.
    Wait,
}

/// Supported commands of the NVM command set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IoOp {
    /// Opcode 02h.
    Read,
    /// Opcode 01h.
    Write {
        /// Force unit access.
        fua: bool,
    },
    /// Flush of one namespace.
    Flush,
    /// Flush of all namespaces (NSID FFFFFFFFh).
    FlushAll,
    /// Opcode 08h.
    WriteZeroes {
        /// DEAC: the host allows the blocks to be deallocated.
        deallocate: bool,
        /// Force unit access.
        fua: bool,
    },
    /// Dataset Management with the attribute Deallocate.
    Deallocate {
        /// Number of ranges, 1 to 256.
        ranges: u16,
    },
    /// Dataset Management without Deallocate: access hints, which the target does not use.
    Hint,
    /// Opcode 05h.
    Compare,
    /// Opcode 0Ch.
    Verify,
    /// Get References, opcode 82h: an extension for optimistic reads.
    References,
    /// Register, opcode 88h: an extension for coherent caches.
    Register,
    /// Opcode 19h.
    Copy {
        /// Number of source ranges, 1 to [`COPY_RANGES_MAX`](crate::controller::limits::COPY_RANGES_MAX).
        ranges: u16,
        /// Force unit access.
        fua: bool,
    },
}

/// Direction of a command's data transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// The command transfers no data.
    None,
    /// Controller to host, as in a Read.
    ToHost,
    /// Host to controller, as in a Write.
    FromHost,
}

impl IoOp {
    /// Direction of the data transfer of this operation.
    #[inline]
    #[must_use]
    pub fn direction(self) -> Direction {
        match self {
            IoOp::Read | IoOp::References => Direction::ToHost,
            IoOp::Write { .. } | IoOp::Compare | IoOp::Deallocate { .. } | IoOp::Copy { .. } | IoOp::Hint => {
                Direction::FromHost
            }
            IoOp::Flush | IoOp::FlushAll | IoOp::WriteZeroes { .. } | IoOp::Verify | IoOp::Register => {
                Direction::None
            }
        }
    }
}

impl IoOp {
    /// Returns the operation with FUA set if it is a Write, Write Zeroes or Copy; any other operation
    /// unchanged. Used while the host has disabled the volatile write cache.
    #[must_use]
    pub fn with_fua(self) -> IoOp {
        match self {
            IoOp::Write { .. } => IoOp::Write { fua: true },
            IoOp::WriteZeroes { deallocate, .. } => IoOp::WriteZeroes { deallocate, fua: true },
            IoOp::Copy { ranges, .. } => IoOp::Copy { ranges, fua: true },
            IoOp::Read
            | IoOp::References
            | IoOp::Register
            | IoOp::Flush
            | IoOp::FlushAll
            | IoOp::Deallocate { .. }
            | IoOp::Hint
            | IoOp::Compare
            | IoOp::Verify => self,
        }
    }
}

/// Progress of a command of several steps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Progress {
    /// Copy: index of the current range. Deallocate, flush of all: index of the next range or namespace.
    /// Abort: number of cores that answered.
    pub index: u32,
    /// Completed blocks of the command (Verify), of the source range `index` (Copy), or of all ranges before
    /// `index` (Deallocate).
    pub blocks: u64,
    /// Length in blocks of the piece that is read or written.
    pub piece: u32,
    /// Copy: the piece was read; its write is in flight or follows. Abort: a core has aborted the command.
    pub is_writing: bool,
    /// Compare, Verify, Copy: the disk executes the command itself.
    pub is_offloaded: bool,
    /// The last step of the turn succeeded, or its error is ignored, and the next turn handles the outcome.
    /// The buffer of the step, if any, is in `aux`.
    pub has_outcome: bool,
}

/// Progress of a bulk transfer. Offsets and lengths are bytes of the command's data.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Pieces {
    /// Length of a piece; the last may be shorter. 0: no bulk transfer.
    pub unit: u32,
    /// Offset of the next piece to begin.
    pub next: u32,
    /// Bytes of the pieces that the disk has completed.
    pub done: u32,
    /// Offset of the piece at the disk.
    pub at_disk: Option<u32>,
    /// Offset of the fetched piece that waits for the disk; its data is in `aux`.
    pub ready: Option<u32>,
    /// Number of pieces that the transport sends or fetches.
    pub on_wire: u8,
}

/// One command in flight, in its queue pair's slab.
#[derive(Debug)]
pub struct Request {
    /// State, changed only by `qpair`.
    pub state: RequestState,
    /// Status with which the request ends once the transport and the disk have returned its buffers. Set when
    /// the request is aborted, a piece fails, or the other half of a fused pair fails or is missing.
    pub abort_status: Option<Status>,
    /// The parsed command; [`Work::None`] before that.
    pub work: Work,
    /// Location and length of the host's data, from the SGL.
    pub pointer: DataPointer,
    /// Submission queue entry as received.
    pub sqe: Sqe,
    /// Data, or the list of ranges. `None`: the transport or the disk owns it, or the request has none.
    pub buf: Option<Buf>,
    /// Second buffer: blocks read for a Compare, a Verify or a Copy; in the first half of a fused pair, the
    /// buffer for the second; in a bulk Write, the fetched piece that waits for the disk.
    pub aux: Option<Buf>,
    /// Kind of memory for the data of a Read or Write.
    pub data_memory: DataMemory,
    /// Bytes of disk memory charged to the queue pair until the host has sent the data.
    pub charged: u32,
    /// Progress of a command of several steps.
    pub progress: Progress,
    /// Progress of a bulk transfer.
    pub pieces: Pieces,
    /// Slot of the other half of a fused pair; `None`: it has not arrived, or the command is not fused.
    pub partner: Option<RequestId>,
}

impl Request {
    /// Creates a request in state `New`, not parsed and without memory.
    #[inline]
    #[must_use]
    pub fn new(sqe: Sqe, pointer: DataPointer) -> Request {
        Request {
            state: RequestState::New,
            abort_status: None,
            work: Work::None,
            pointer,
            sqe,
            buf: None,
            aux: None,
            data_memory: DataMemory::Unknown,
            charged: 0,
            progress: Progress::default(),
            pieces: Pieces::default(),
            partner: None,
        }
    }

    /// Length in bytes of the request's first pool buffer: all data, or one piece of a bulk transfer.
    #[inline]
    pub(super) fn first_bytes(&self, io: &IoCommand) -> u32 {
        if self.pieces.unit > 0 { self.pieces.unit } else { io.data_bytes }
    }

    /// Command identifier as the host sent it.
    #[inline]
    #[must_use]
    pub fn cid(&self) -> u16 {
        self.sqe.cid()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each connection reserves one request per queue entry.
    #[test]
    fn a_request_stays_within_five_cache_lines() {
        assert!(size_of::<Request>() <= 320, "{}", size_of::<Request>());
    }
}
