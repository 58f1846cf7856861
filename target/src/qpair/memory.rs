//! Memory: which buffers a command takes, the line of those that got none, and what they wait for.
//!
//! A command takes all that it needs or nothing. Beyond its connection's share of the pool it waits like one
//! that finds the pool empty, but then it waits alone: others pass it by, and a core may sleep meanwhile.
//!
//! The memory of a disk (the frames of a RAM disk) is shared in the same way: a connection that holds more of
//! it, for data that its host has not brought, than the disk has left gets no more. That is asked only where
//! data is to be waited for; what has its data with it holds nothing.

use spindle_disk::{Disk, Op, Prepared};
use spindle_reactor::mem::{Buf, Pool, Share};
use spindle_reactor::slab::Slot;
use spindle_transport::{DataPointer, Transport};

use super::request::{Answer, IoCommand, IoOp, Request, State, Work};
use super::{Qpair, bulk, compound};
use crate::env::Env;

/// What another try for requests that wait has brought.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Retried {
    /// Some got what they waited for, or are over.
    pub(crate) has_moved: bool,
    /// Some still wait.
    pub(crate) has_waiting: bool,
}

/// What the oldest request of a line waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WaitsFor {
    /// Its turn, or memory of the disk.
    Turn,
    /// A buffer of so many bytes of the pool, for which others wait too.
    Pool { bytes: u32 },
    /// Its connection's own buffers: it is above its share.
    Share {
        /// And besides there is not enough of the pool for anybody.
        is_empty: bool,
    },
    /// Its connection holds more of the disk's memory than is left. (Other cores that give some back do not
    /// tell it.)
    DiskShare {
        /// And besides there is not enough for anybody.
        is_empty: bool,
    },
    /// A buffer of the reserve.
    Reserve {
        /// There may be one now.
        is_open: bool,
    },
}

impl WaitsFor {
    /// Others that need memory have to line up behind it.
    pub(crate) fn is_in_the_way(self) -> bool {
        match self {
            WaitsFor::Turn | WaitsFor::Pool { .. } => true,
            WaitsFor::Share { is_empty } | WaitsFor::DiskShare { is_empty } => is_empty,
            WaitsFor::Reserve { .. } => false,
        }
    }

    /// Another try may bring something, for all that is known here.
    pub(crate) fn is_worth_a_try(self) -> bool {
        !matches!(self, WaitsFor::Share { .. } | WaitsFor::Reserve { is_open: false })
    }
}

impl<T: Transport> Qpair<T> {
    /// A request gets to the end of the line for memory. Its in-capsule data gets out of the way of what is
    /// behind it in the connection: that may be the data of the very commands that hold the memory.
    #[cold]
    pub(super) fn wait_for_buffer(&mut self, slot: Slot) {
        let Some(request) = self.requests.get_mut(slot) else { return };
        request.state = State::NeedBuffer;
        self.waiting.push_back(slot);
        self.stash_capsule(slot);
    }

    /// The in-capsule data of a request that is not fetched yet lets by what is behind it.
    pub(super) fn stash_capsule(&mut self, slot: Slot) {
        let Some(request) = self.requests.get(slot) else { return };
        if let DataPointer::InCapsule { .. } = request.pointer {
            self.transport.stash_capsule(slot, request.cid());
        }
    }

    /// What the oldest request in the line waits for. `id` is this queue pair's.
    pub(crate) fn waits_for(&self, id: Slot, env: &Env) -> Option<WaitsFor> {
        let request = self.requests.get(*self.waiting.front()?)?;
        if request.state != State::NeedBuffer {
            return Some(WaitsFor::Turn);
        }
        let of_pool = |bytes| {
            if env.pool.share(id).is_within() {
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
                let is_open = env.admin_pool.free_bytes() > 0 && env.admin_pool.share(id).is_within();
                WaitsFor::Reserve { is_open }
            }
            Work::Admin { is_to_host: false, .. } | Work::Connect | Work::None => {
                let is_open = env.admin_pool.free_bytes() > 0 && env.incoming_share().is_within();
                WaitsFor::Reserve { is_open }
            }
        })
    }

    /// A write to a disk that has no memory to give, where this connection is above its share of that.
    fn disk_share(&self, env: &Env, request: &Request, io: &IoCommand) -> Option<WaitsFor> {
        let free = env.disk_ref(io.disk)?.free_bytes();
        let is_above = request.answer == Answer::Wait && self.charged > free;
        is_above.then_some(WaitsFor::DiskShare { is_empty: free < u64::from(io.data_bytes) })
    }
}

/// The largest buffer that [`take_buffers`] takes of the pool for a command that is neither a Read nor a
/// Write; 0: it takes none.
fn list_bytes(disk: &dyn Disk, pool: &Pool, io: &IoCommand) -> u32 {
    match io.op {
        IoOp::Compare | IoOp::Deallocate { .. } | IoOp::Hint => io.data_bytes,
        IoOp::Copy { .. } => piece_bytes(disk, pool, io).max(io.data_bytes),
        IoOp::Verify => piece_bytes(disk, pool, io),
        IoOp::Read | IoOp::Write { .. } | IoOp::Flush | IoOp::FlushAll | IoOp::WriteZeroes { .. } => 0,
    }
}

/// The largest buffer that [`take_buffers`] takes of the pool, if it is known to take any.
fn pool_bytes(env: &Env, request: &Request, io: &IoCommand) -> Option<u32> {
    if matches!(io.op, IoOp::Read | IoOp::Write { .. }) {
        return (request.answer == Answer::Pool).then(|| request.first_bytes(io));
    }
    Some(list_bytes(env.disk_ref(io.disk)?, &env.pool, io)).filter(|bytes| *bytes > 0)
}

/// Bytes of the buffer into which a Compare, Verify or Copy is read, piece by piece; 0 where it is not read,
/// or into memory of the disk.
fn piece_bytes(disk: &dyn Disk, pool: &Pool, io: &IoCommand) -> u32 {
    if disk.abilities().reads_in_place || compound::is_disks(disk, io.op) {
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

/// What came of [`take_buffers`].
pub(super) enum Taken {
    /// The command is a Read, and this is its data.
    Ready(Buf),
    /// It has what it needs.
    All,
    /// It has nothing, and waits.
    Nothing,
}

/// What bounds the memory of a command.
#[derive(Clone, Copy)]
pub(super) struct Bounds {
    /// Others have waited for memory before.
    pub(super) is_behind: bool,
    /// What its connection holds of the memory of disks.
    pub(super) charged: u64,
    /// See [`Qpair`].
    pub(super) bulk_unit: u32,
}

/// Take the memory of an I/O command, all of it or none, so that no command holds one buffer while it waits
/// for another. A command that is cut can do with one buffer of the unit.
#[inline]
pub(super) fn take_buffers(env: &mut Env, request: &mut Request, io: &IoCommand, bounds: Bounds) -> Taken {
    let Some(disk) = env.disks.get_mut(io.disk).and_then(|disk| disk.as_deref_mut()) else {
        return Taken::All; // without a disk the command fails at once
    };
    let share = env.pool.share(env.current);
    let has_all = match io.op {
        IoOp::Read => return take_data(disk, share, request, io, Op::Read, bounds),
        IoOp::Write { fua } => return take_data(disk, share, request, io, Op::Write { fua }, bounds),
        IoOp::Flush | IoOp::FlushAll | IoOp::WriteZeroes { .. } => true,
        _ if bounds.is_behind && list_bytes(disk, &env.pool, io) > 0 => false,
        IoOp::Compare => {
            let pieces = [io.data_bytes, piece_bytes(disk, &env.pool, io)];
            share.take_both(pieces).is_some_and(|(first, second)| {
                request.aux = second;
                set(&mut request.buf, first)
            })
        }
        IoOp::Deallocate { .. } | IoOp::Hint => set(&mut request.buf, share.take(io.data_bytes)),
        IoOp::Copy { .. } | IoOp::Verify => {
            let piece = piece_bytes(disk, &env.pool, io);
            let list = if io.op == IoOp::Verify { 0 } else { io.data_bytes };
            share.take_both([list, piece]).map(|both| (request.buf, request.aux) = both).is_some()
        }
    };
    if has_all { Taken::All } else { Taken::Nothing }
}

/// The same for a Read or a Write.
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
    // A Read that finds its data takes nothing.
    if is_write && bounds.is_behind {
        return Taken::Nothing;
    }
    if request.answer != Answer::Pool {
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
                request.answer = Answer::Wait;
                return Taken::Nothing;
            }
            Prepared::Pool => request.set_pool(disk, io, bounds.bulk_unit),
        }
    }
    let bytes = request.first_bytes(io);
    let has_buf = !bounds.is_behind && set(&mut request.buf, share.take(bytes));
    if has_buf { Taken::All } else { Taken::Nothing }
}

impl Request {
    /// Its disk works with the pool's buffers.
    #[inline]
    pub(super) fn set_pool(&mut self, disk: &dyn Disk, io: &IoCommand, bulk_unit: u32) {
        self.answer = Answer::Pool;
        if io.data_bytes > bulk_unit {
            self.pieces.unit = bulk::unit_of(disk, self.pointer, io, bulk_unit);
        }
    }
}

pub(super) fn set(place: &mut Option<Buf>, buf: Option<Buf>) -> bool {
    *place = buf;
    place.is_some()
}
