//! Memory of commands: allocation of buffers, the queue of requests that wait for memory, and the resource
//! that each of them waits for.
//!
//! A command takes all the memory that it needs, or waits with none. Buffers of the pool are charged to the
//! host, with all its queues ([`Holder::host`]); a host that has its share of a zone waits for its own
//! buffers, and others overtake it. A request of a host that has none claims the next free buffer: new
//! commands of any host queue behind it. The core may sleep meanwhile.
//!
//! The memory of a disk (the frames of a RAM disk) is shared in a similar way, by all cores. A host is
//! charged for disk memory until it has sent the data, and for what its large Reads pin until it has taken
//! the reply: each write to a pinned page takes more of the disk's memory. While the charge exceeds the
//! free memory of the disk (half of that for a Read), the host gets no more. The fast path is not limited:
//! the data of its Writes has arrived, and its Reads are small
//! ([`FAST_PATH_BYTES_MAX`](super::fast_path::FAST_PATH_BYTES_MAX)).

use spindle_nvme_transport::RequestId;
use spindle_nvme_transport::{DataPointer, Transport};
use spindle_reactor::mem::{Buf, Holder, Pool, Share};
use spindle_target_disk::{DiskChannel, Op, Prepared};

use super::request::{DataMemory, IoCommand, IoOp, Request, RequestState, Work};
use super::{Qpair, Role, bulk, compound};
use crate::env::Env;
use crate::shared::{HostMemory, memory_group};

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Retried {
    /// A request got its memory, was resumed between two steps, or ended.
    pub(crate) has_progress: bool,
    pub(crate) has_waiting: bool,
}

/// The resource that the oldest waiting request of a queue pair needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WaitsFor {
    /// The next turn.
    Turn,
    /// A pool buffer of `bytes` bytes. Only this core frees such buffers.
    Pool { bytes: u32 },
    /// Memory of the disk. Retried in each turn, because other cores send no message when they free disk
    /// memory. `is_above`: the host has more of it than is free.
    Disk { is_above: bool },
    /// Memory for the next step of a command: of the disk, or a pool buffer of `bytes` bytes.
    Step { bytes: u32 },
    /// A buffer of the admin pool.
    Reserve {
        /// The admin pool has a free buffer and the share allows it.
        is_open: bool,
    },
}

impl WaitsFor {
    /// False when no retry succeeds until this core frees a buffer, so that the core may sleep.
    pub(crate) fn may_succeed(self) -> bool {
        !matches!(self, WaitsFor::Pool { .. } | WaitsFor::Reserve { is_open: false })
    }
}

impl<T: Transport> Qpair<T> {
    /// Appends a request to the queue for memory. Copies its in-capsule data out of the receive batch (TCP):
    /// the bytes after this data may belong to commands that occupy the memory.
    #[cold]
    pub(super) fn wait_for_buffer(&mut self, slot: RequestId) {
        let Some(request) = self.requests.get_mut(slot) else { return };
        request.state = RequestState::NeedBuffer;
        self.waiting.push_back(slot);
        self.stash_capsule(slot);
    }

    /// Copies in-capsule data not fetched yet out of the receive batch (TCP), so that receiving continues.
    pub(super) fn stash_capsule(&mut self, slot: RequestId) {
        let Some(request) = self.requests.get(slot) else { return };
        if let DataPointer::InCapsule { .. } = request.pointer {
            self.transport.stash_capsule(slot, request.cid());
        }
    }

    /// The resource that the oldest waiting request needs; `None`: no request waits.
    pub(crate) fn waits_for(&self, env: &Env) -> Option<WaitsFor> {
        let request = self.requests.get(*self.waiting.front()?)?;
        Some(match request.work {
            Work::Io(_) if request.state == RequestState::NeedStepBuffer && request.progress.has_outcome => {
                WaitsFor::Turn
            }
            Work::Io(io) if request.state == RequestState::NeedStepBuffer => {
                let piece = u64::from(request.progress.piece) << io.block_shift;
                let bytes = u64::from(request.pieces.unit).max(piece).max(1);
                WaitsFor::Step { bytes: u32::try_from(bytes).unwrap_or(u32::MAX) }
            }
            Work::Io(io) => match pool_bytes(env, request, &io) {
                Some(bytes) => WaitsFor::Pool { bytes },
                // A Read waits for replies of its own host to be taken.
                None if request.data_memory == DataMemory::Wait => WaitsFor::Disk {
                    is_above: io.op == IoOp::Read || is_above(env, self.role.disk_bytes(io.disk), io.disk),
                },
                None => WaitsFor::Turn,
            },
            Work::Admin { bytes, .. } if bytes > env.admin_pool.buffer_bytes_max() => {
                WaitsFor::Pool { bytes }
            }
            Work::Admin { bytes, is_to_host: true, .. } => {
                let share = env.admin_pool.share(self.admin_holder(env));
                WaitsFor::Reserve { is_open: share.can_take(bytes) }
            }
            Work::Admin { bytes, is_to_host: false, .. } => {
                let share = env.admin_pool.share(self.incoming_holder(env));
                WaitsFor::Reserve { is_open: share.can_take(bytes) }
            }
            Work::Connect | Work::None => {
                let share = env.admin_pool.share(self.incoming_holder(env));
                WaitsFor::Reserve { is_open: share.can_take(1) }
            }
        })
    }

    /// Claims the memory that the oldest waiting request waits for, if its host is entitled to it.
    #[cold]
    #[inline(never)]
    pub(crate) fn claim_memory(&self, env: &mut Env) {
        let Some(waits_for) = self.waits_for(env) else { return };
        let Some(request) = self.waiting.front().and_then(|slot| self.requests.get(*slot)) else { return };
        let Work::Io(io) = request.work else { return };
        let holder = Holder::host(io.client);
        match waits_for {
            WaitsFor::Pool { bytes } if env.pool.share(holder).claim(bytes) => env.claimants.add(holder),
            WaitsFor::Disk { is_above: false } => env.claim_disk(io.disk, holder),
            WaitsFor::Step { bytes } => {
                env.pool.claim(bytes);
                env.claim_disk(io.disk, holder);
            }
            WaitsFor::Turn | WaitsFor::Pool { .. } | WaitsFor::Disk { .. } | WaitsFor::Reserve { .. } => {}
        }
    }

    /// Charges the host for `bytes` of the disk's memory.
    #[inline]
    pub(super) fn charge(&mut self, disk: usize, bytes: u32) {
        if bytes > 0
            && let Some(memory) = self.role.host_memory()
        {
            memory.add(disk, bytes.into());
            self.charged += u64::from(bytes);
        }
    }

    /// Ends the charge of a request whose data has come or does not come any more, or whose reply was taken.
    #[inline(never)]
    pub(super) fn discharge(&mut self, slot: RequestId) {
        let Some((disk, bytes)) = self.requests.get_mut(slot).and_then(take_charge) else { return };
        if let Some(memory) = self.role.host_memory() {
            memory.remove(disk, bytes);
            self.charged -= bytes;
        }
    }

    /// Ends the charges for disks that this core has closed, before their indices are given to others.
    pub(super) fn discharge_disks(&mut self, is_closed: impl Fn(usize) -> bool) {
        self.discharge_if(|io| is_closed(io.disk));
    }

    fn discharge_if(&mut self, is_it: impl Fn(&IoCommand) -> bool) {
        let Some(memory) = self.role.host_memory().filter(|_| self.charged > 0) else { return };
        for request in self.requests.all_mut() {
            let Work::Io(io) = request.work else { continue };
            if let Some((disk, bytes)) = Some(request).filter(|_| is_it(&io)).and_then(take_charge) {
                memory.remove(disk, bytes);
                self.charged -= bytes;
            }
        }
    }

    /// Ends all charges of a queue pair that closes. The transport gives its buffers back soon.
    pub(super) fn discharge_all(&mut self) {
        self.discharge_if(|_| true);
        debug_assert_eq!(self.charged, 0, "charged without a request");
    }
}

impl Role {
    /// The charges of an I/O queue's host.
    fn host_memory(&self) -> Option<&HostMemory> {
        match self {
            Role::Io(role) => Some(&role.shared.memory),
            Role::Admin(_) | Role::Fresh | Role::Closing => None,
        }
    }

    /// Bytes of this disk's memory that are charged to the host.
    #[inline]
    pub(super) fn disk_bytes(&self, disk: usize) -> u64 {
        self.host_memory().map_or(0, |memory| memory.disk_bytes(memory_group(disk)))
    }
}

/// Takes the charge of a request: the disk and the bytes.
fn take_charge(request: &mut Request) -> Option<(usize, u64)> {
    let Work::Io(io) = request.work else { return None };
    let bytes = std::mem::take(&mut request.charged);
    (bytes > 0).then(|| (io.disk, bytes.into()))
}

/// True when a host with `disk_bytes` bytes of disk memory has as much as it may have of this disk's: as
/// much as is free, or seven times that if it is the only host.
fn is_above(env: &Env, disk_bytes: u64, disk: usize) -> bool {
    if disk_bytes == 0 {
        return false; // the usual case, without a call of the disk
    }
    let free = env.disk_ref(disk).map_or(u64::MAX, |disk| disk.free_bytes());
    disk_bytes > free.saturating_mul(if env.registry.is_one_host() { 7 } else { 1 })
}

/// Bytes of the largest pool buffer that [`take_buffers`] takes for a command that is neither Read nor Write;
/// 0: it takes none.
fn list_bytes(disk: &dyn DiskChannel, pool: &Pool, io: &IoCommand) -> u32 {
    match io.op {
        IoOp::Compare | IoOp::References | IoOp::Deallocate { .. } | IoOp::Hint => io.data_bytes,
        IoOp::Copy { .. } => piece_bytes(disk, pool, io).max(io.data_bytes),
        IoOp::Verify => piece_bytes(disk, pool, io),
        IoOp::Read
        | IoOp::Write { .. }
        | IoOp::Flush
        | IoOp::FlushAll
        | IoOp::WriteZeroes { .. }
        | IoOp::Register => 0,
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
fn piece_bytes(disk: &dyn DiskChannel, pool: &Pool, io: &IoCommand) -> u32 {
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
    /// The request is new, and earlier ones of its queue wait for memory.
    pub(super) is_behind: bool,
    /// Bytes of the disk's memory that are charged to the host.
    pub(super) disk_bytes: u64,
    /// Bytes of data above which a transfer may be split ([`Qpair::bulk_unit`]).
    pub(super) bulk_unit: u32,
}

/// Takes all memory of an I/O command or none, so that no command keeps one buffer while it waits for
/// another. A bulk transfer takes one buffer of the length of a piece.
#[inline]
pub(super) fn take_buffers(env: &mut Env, request: &mut Request, io: &IoCommand, bounds: Bounds) -> Taken {
    let may_not_pin = io.op == IoOp::Read
        && !env.registry.is_one_host()
        && is_above(env, bounds.disk_bytes.saturating_mul(2), io.disk);
    let is_disk_short = env.is_disk_claimed(io.disk) || is_above(env, bounds.disk_bytes, io.disk);
    let Some(disk) = env.disks.get_mut(io.disk).and_then(|disk| disk.as_deref_mut()) else {
        return Taken::All; // without a disk the command fails at once
    };
    let share = env.pool.share(Holder::host(io.client));
    let has_all = match io.op {
        IoOp::Read if may_not_pin && request.data_memory != DataMemory::Pool => {
            request.data_memory = DataMemory::Wait;
            false
        }
        IoOp::Read => return take_data(disk, share, request, io, Op::Read, bounds),
        // A Write that has no memory yet and may take none of the disk now.
        IoOp::Write { .. } if is_disk_short && request.data_memory != DataMemory::Pool => {
            request.data_memory = DataMemory::Wait;
            false
        }
        IoOp::Write { fua } => return take_data(disk, share, request, io, Op::Write { fua }, bounds),
        IoOp::Flush | IoOp::FlushAll | IoOp::WriteZeroes { .. } | IoOp::Register => true,
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
    disk: &mut dyn DiskChannel,
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
        match disk.prepare(&io.request(op, io.range), None) {
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
    pub(super) fn set_pool(&mut self, disk: &dyn DiskChannel, io: &IoCommand, bulk_unit: u32) {
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
