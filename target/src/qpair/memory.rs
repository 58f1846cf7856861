//! Memory of commands: allocation of buffers, the queue of requests that wait for memory, and the resource
//! that each of them waits for.
//!
//! A command takes all the memory that it needs, or waits with none. Commands of a connection that is above
//! its share of the pool wait as if the pool were empty. Other connections overtake them while the pool has
//! enough free bytes, and the core may sleep meanwhile.
//!
//! The memory of a disk (the frames of a RAM disk) is shared in a similar way. A connection is charged for
//! disk memory until the host has sent the data. While the charge exceeds the free memory of the disk, the
//! connection gets no more for Writes. A Write with in-capsule data on the fast path is not limited, since
//! its data has arrived.

use spindle_disk::{Disk, Op, Prepared};
use spindle_reactor::mem::{Buf, Pool, Share};
use spindle_transport::{ConnectionId, RequestId};
use spindle_transport::{DataPointer, Transport};

use super::request::{DataMemory, IoCommand, IoOp, Request, State, Work};
use super::{Qpair, bulk, compound};
use crate::env::Env;

/// Outcome of `Qpair::retry_buffers`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Retried {
    /// A request got its memory, was resumed between two steps, or ended.
    pub(crate) has_progress: bool,
    pub(crate) has_waiting: bool,
}

/// The resource that the oldest waiting request of a queue pair needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WaitsFor {
    /// The next turn, or memory of the disk; the connection is within its share.
    Turn,
    /// A pool buffer of `bytes` bytes; the connection is within its share.
    Pool { bytes: u32 },
    /// Buffers that its own connection frees: the connection is above its share of the pool.
    Share {
        /// The pool has fewer bytes free than the request needs.
        is_empty: bool,
    },
    /// Memory of the disk. The disk memory that is charged to the connection exceeds the free memory of the
    /// disk. Retried in each turn, because other cores send no message when they free disk memory.
    DiskShare {
        /// The disk has fewer bytes free than the request needs.
        is_empty: bool,
    },
    /// A buffer of the admin pool.
    Reserve {
        /// The admin pool has a free buffer and the share allows it.
        is_open: bool,
    },
}

impl WaitsFor {
    /// True when new requests of all connections must queue behind the waiting request.
    pub(crate) fn blocks_others(self) -> bool {
        match self {
            WaitsFor::Turn | WaitsFor::Pool { .. } => true,
            WaitsFor::Share { is_empty } | WaitsFor::DiskShare { is_empty } => is_empty,
            WaitsFor::Reserve { .. } => false,
        }
    }

    /// False when no retry succeeds until this core frees a buffer, so that the core may sleep.
    pub(crate) fn may_succeed(self) -> bool {
        !matches!(self, WaitsFor::Share { .. } | WaitsFor::Reserve { is_open: false })
    }
}

impl<T: Transport> Qpair<T> {
    /// Appends a request to the queue for memory. Copies its in-capsule data out of the receive batch (TCP):
    /// the bytes after this data may belong to commands that occupy the memory.
    #[cold]
    pub(super) fn wait_for_buffer(&mut self, slot: RequestId) {
        let Some(request) = self.requests.get_mut(slot) else { return };
        request.state = State::NeedBuffer;
        self.waiting.push_back(slot);
        self.stash_capsule(slot);
    }

    /// Copies in-capsule data that is not fetched yet out of the receive batch (TCP), so that receiving
    /// continues.
    pub(super) fn stash_capsule(&mut self, slot: RequestId) {
        let Some(request) = self.requests.get(slot) else { return };
        if let DataPointer::InCapsule { .. } = request.pointer {
            self.transport.stash_capsule(slot, request.cid());
        }
    }

    /// The resource that the oldest waiting request needs; `None`: no request waits. `id`: slot of this queue
    /// pair.
    pub(crate) fn waits_for(&self, id: ConnectionId, env: &Env) -> Option<WaitsFor> {
        let request = self.requests.get(*self.waiting.front()?)?;
        if request.state != State::NeedBuffer {
            return Some(WaitsFor::Turn);
        }
        let of_pool = |bytes| {
            if env.pool.share(id.0).is_within() {
                WaitsFor::Pool { bytes }
            } else {
                WaitsFor::Share { is_empty: env.pool.free_bytes() < u64::from(bytes) }
            }
        };
        Some(match request.work {
            Work::Io(io) => match pool_bytes(env, request, &io) {
                Some(bytes) => of_pool(bytes),
                None => self.disk_share(env, request, &io).unwrap_or(WaitsFor::Turn),
            },
            Work::Admin { bytes, .. } if bytes > env.admin_pool.buffer_bytes_max() => of_pool(bytes),
            Work::Admin { is_to_host: true, .. } => {
                let is_open = env.admin_pool.free_bytes() > 0 && env.admin_pool.share(id.0).is_within();
                WaitsFor::Reserve { is_open }
            }
            Work::Admin { is_to_host: false, .. } | Work::Connect | Work::None => {
                let is_open = env.admin_pool.free_bytes() > 0 && env.incoming_share().is_within();
                WaitsFor::Reserve { is_open }
            }
        })
    }

    /// `Some` if the request waits for disk memory and this connection is above its share of that memory.
    fn disk_share(&self, env: &Env, request: &Request, io: &IoCommand) -> Option<WaitsFor> {
        let free = env.disk_ref(io.disk)?.free_bytes();
        let is_above = request.data_memory == DataMemory::Wait && self.charged > free;
        is_above.then_some(WaitsFor::DiskShare { is_empty: free < u64::from(io.data_bytes) })
    }
}

/// Bytes of the largest pool buffer that [`take_buffers`] takes for a command that is neither Read nor Write;
/// 0: it takes none.
fn list_bytes(disk: &dyn Disk, pool: &Pool, io: &IoCommand) -> u32 {
    match io.op {
        IoOp::Compare | IoOp::References | IoOp::Deallocate { .. } | IoOp::Hint => io.data_bytes,
        IoOp::Copy { .. } => piece_bytes(disk, pool, io).max(io.data_bytes),
        IoOp::Verify => piece_bytes(disk, pool, io),
        IoOp::Read | IoOp::Write { .. } | IoOp::Flush | IoOp::FlushAll | IoOp::WriteZeroes { .. } => 0,
    }
}

/// Bytes of the largest pool buffer that [`take_buffers`] takes; `None`: it takes no buffer, or the length is
/// not known yet.
fn pool_bytes(env: &Env, request: &Request, io: &IoCommand) -> Option<u32> {
    // No buffer is taken for a disk that was removed: the next retry ends the request.
    let disk = env.disk_ref(io.disk)?;
    if matches!(io.op, IoOp::Read | IoOp::Write { .. }) {
        return (request.data_memory == DataMemory::Pool).then(|| request.first_bytes(io));
    }
    Some(list_bytes(disk, &env.pool, io)).filter(|bytes| *bytes > 0)
}

/// Bytes of the pool buffer into which a Compare, Verify or Copy reads its pieces; 0 where the disk executes
/// the command itself or reads into its own memory.
fn piece_bytes(disk: &dyn Disk, pool: &Pool, io: &IoCommand) -> u32 {
    if disk.abilities().reads_in_place || compound::is_offloaded(disk, io.op) {
        0
    } else if io.op == IoOp::Compare {
        io.data_bytes
    } else {
        compound::first_piece_bytes(io, pool)
    }
}

pub(super) fn reads_into_pool(env: &Env, disk: usize) -> bool {
    let handle = env.disk_ref(disk);
    handle.is_some_and(|disk| !disk.abilities().reads_in_place)
}

/// Outcome of [`take_buffers`].
pub(super) enum Taken {
    /// The data of a Read, which has ended.
    Ready(Buf),
    /// The request has all memory that it needs, or its disk is gone.
    All,
    /// The request got no memory and must wait.
    Nothing,
}

/// State of the queue pair that limits the memory of a command.
#[derive(Clone, Copy)]
pub(super) struct Bounds {
    /// The request is new, and other requests wait for memory.
    pub(super) is_behind: bool,
    /// Bytes of disk memory for data that the host has not sent yet ([`Qpair::charged`]).
    pub(super) charged: u64,
    /// Bytes of data above which a transfer may be split ([`Qpair::bulk_unit`]).
    pub(super) bulk_unit: u32,
}

/// Takes all memory of an I/O command or none, so that no command keeps one buffer while it waits for
/// another. A bulk transfer takes one buffer of the length of a piece.
#[inline]
pub(super) fn take_buffers(env: &mut Env, request: &mut Request, io: &IoCommand, bounds: Bounds) -> Taken {
    let Some(disk) = env.disks.get_mut(io.disk).and_then(|disk| disk.as_deref_mut()) else {
        return Taken::All; // without a disk the command fails at once
    };
    let share = env.pool.share(env.current.0);
    let has_all = match io.op {
        IoOp::Read => return take_data(disk, share, request, io, Op::Read, bounds),
        IoOp::Write { fua } => return take_data(disk, share, request, io, Op::Write { fua }, bounds),
        IoOp::Flush | IoOp::FlushAll | IoOp::WriteZeroes { .. } => true,
        _ if bounds.is_behind && list_bytes(disk, &env.pool, io) > 0 => false,
        IoOp::Compare => {
            let pieces = [io.data_bytes, piece_bytes(disk, &env.pool, io)];
            share.take_both(pieces).is_some_and(|(first, second)| {
                request.aux = second;
                store_buf(&mut request.buf, first)
            })
        }
        IoOp::References | IoOp::Deallocate { .. } | IoOp::Hint => {
            store_buf(&mut request.buf, share.take(io.data_bytes))
        }
        IoOp::Copy { .. } | IoOp::Verify => {
            let piece = piece_bytes(disk, &env.pool, io);
            let list = if io.op == IoOp::Verify { 0 } else { io.data_bytes };
            share.take_both([list, piece]).map(|both| (request.buf, request.aux) = both).is_some()
        }
    };
    if has_all { Taken::All } else { Taken::Nothing }
}

/// As [`take_buffers`], for a Read or a Write.
#[inline]
fn take_data(
    disk: &mut dyn Disk,
    share: Share<'_>,
    request: &mut Request,
    io: &IoCommand,
    op: Op,
    bounds: Bounds,
) -> Taken {
    let is_write = op != Op::Read;
    // A Read whose data is in memory needs no buffer, so it does not queue.
    if is_write && bounds.is_behind {
        return Taken::Nothing;
    }
    if request.data_memory != DataMemory::Pool {
        let is_above = is_write && bounds.charged > 0 && bounds.charged > disk.free_bytes();
        match if is_above { Prepared::Wait } else { disk.prepare(&io.request(op, io.range), None) } {
            Prepared::Ready(data) => return Taken::Ready(data),
            Prepared::Fill(buf) => {
                request.charged = if is_write { io.data_bytes } else { 0 };
                request.buf = Some(buf);
                return Taken::All;
            }
            Prepared::Later => return Taken::All,
            Prepared::Wait => {
                request.data_memory = DataMemory::Wait;
                return Taken::Nothing;
            }
            Prepared::Pool => request.set_pool(disk, io, bounds.bulk_unit),
        }
    }
    let bytes = request.first_bytes(io);
    let has_buf = !bounds.is_behind && store_buf(&mut request.buf, share.take(bytes));
    if has_buf { Taken::All } else { Taken::Nothing }
}

impl Request {
    /// Records that the disk uses buffers of the pool. Sets the length of a piece for a transfer of more than
    /// `bulk_unit` bytes, where [`bulk::piece_unit`] allows pieces.
    #[inline]
    pub(super) fn set_pool(&mut self, disk: &dyn Disk, io: &IoCommand, bulk_unit: u32) {
        self.data_memory = DataMemory::Pool;
        if io.data_bytes > bulk_unit {
            self.pieces.unit = bulk::piece_unit(disk, self.pointer, io, bulk_unit);
        }
    }
}

pub(super) fn store_buf(target: &mut Option<Buf>, buf: Option<Buf>) -> bool {
    *target = buf;
    target.is_some()
}
