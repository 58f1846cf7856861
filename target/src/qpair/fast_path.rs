//! The fast path: a Read of data in the disk's memory, and a Write of in-capsule data to it.
//!
//! Such a command is checked, executed and answered in the turn that receives it, without a request in the
//! slab. A command that fails a check takes the slab path from its beginning; nothing has changed. A Read
//! whose data is not in memory continues in `continue_read`. A Write that the disk failed or did not complete
//! in `submit` continues in `continue_write`.

use nvme_spec::opcode::IoOpcode;
use nvme_spec::optimistic::PageReference;
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;
use spindle_nvme_transport::{ConnectionId, RequestId};
use spindle_nvme_transport::{DataPointer, FAST_PATH, Reply, Transport};
use spindle_reactor::mem::{Buf, Reference};
use spindle_target_disk::{DiskChannel, Done, Geometry, IoRequest, Op, Prepared, Sender};

use super::io;
use super::request::{DataMemory, IoCommand, IoOp, Request, RequestState, Work};
use super::{IoRole, Qpair, Role, token};
use crate::counters;
use crate::env::Env;
use crate::snapshot::Namespace;

/// Most bytes of a command on the fast path. A larger Read costs a request in the slab, which is charged
/// to its host until the reply is taken; its data costs many times that.
pub(crate) const FAST_PATH_BYTES_MAX: u32 = 32 << 10;

/// A command that passed [`check`]. A Write to a read-only disk also passes; `write_fast_path` rejects it.
struct Checked<'r, 'e> {
    namespace: &'r Namespace,
    disk: &'e mut (dyn DiskChannel + 'static),
    geometry: Geometry,
    request: IoRequest,
}

/// Executes the checks that Reads and Writes share. `bytes` is the length of the command's SGL. `None`: the
/// command takes the slab path, which repeats the checks and determines the status.
#[inline]
fn check<'r, 'e>(
    role: &'r IoRole,
    env: &'e mut Env,
    sqe: &Sqe,
    op: Op,
    bytes: u32,
) -> Option<Checked<'r, 'e>> {
    if !role.shared.is_ready() {
        return None;
    }
    let transfer_bytes = env.fast_path_bytes;
    let namespace = role.subsystem.namespace(sqe.nsid())?;
    let index = Env::disk_index(namespace.disk);
    let disk = env.disks.get_mut(index)?.as_deref_mut()?;
    let geometry = disk.geometry();
    let target = io::Target { disk: index, geometry, transfer_bytes };
    let (range, whole) = io::data_range(sqe, &target, geometry.block_bytes.trailing_zeros()).ok()?;
    let request =
        IoRequest { hints: io::hints(sqe), client: role.shared.client, ..IoRequest::new(op, range) };
    (whole == bytes).then_some(Checked { namespace, disk, geometry, request })
}

impl<T: Transport> Qpair<T> {
    /// Executes a Read or Write on the fast path, if possible. False: the command takes the slab path, and
    /// nothing has changed.
    #[inline]
    pub(super) fn step_fast_path(
        &mut self,
        id: ConnectionId,
        env: &mut Env,
        sqe: &Sqe,
        pointer: DataPointer,
    ) -> bool {
        if sqe.flags & 3 != 0 || self.fused_first.is_some() {
            return false;
        }
        match (sqe.io_opcode(), pointer) {
            (IoOpcode::READ, DataPointer::Host { bytes }) => self.read_fast_path(id, env, sqe, bytes),
            (IoOpcode::WRITE, DataPointer::InCapsule { bytes }) => self.write_fast_path(id, env, sqe, bytes),
            _ => false,
        }
    }

    #[inline]
    fn read_fast_path(&mut self, id: ConnectionId, env: &mut Env, sqe: &Sqe, bytes: u32) -> bool {
        let Role::Io(role) = &self.role else { return false };
        let core = env.core;
        let Some(checked) = check(role, env, sqe, Op::Read, bytes) else { return false };
        let Checked { namespace, disk, geometry, request } = checked;
        // First block of the command after the next: the disk prefetches its look-up tables for this block.
        let next = self.transport.peek_command().filter(|next| next.nsid() == sqe.nsid()).map(Sqe::slba);
        let data = match disk.prepare(&request, next) {
            Prepared::Ready(data) => data,
            prepared @ (Prepared::Fill(_) | Prepared::Pool | Prepared::Later | Prepared::Wait) => {
                let io = IoCommand {
                    op: IoOp::Read,
                    is_fused: false,
                    disk: Env::disk_index(namespace.disk),
                    nsid: namespace.nsid,
                    range: request.range,
                    block_shift: u8::try_from(geometry.block_bytes.trailing_zeros()).unwrap_or(12),
                    data_bytes: bytes,
                    hints: request.hints,
                    client: request.client,
                    sender: Sender::HOST,
                    registers: false,
                    keeps: false,
                };
                role.shared.note_traffic();
                env.note_command(namespace, namespace.counters.core(core));
                self.continue_read(id, env, sqe, io, prepared);
                return true;
            }
        };
        role.shared.note_traffic();
        let reference = if role.shared.has_attached() { reference_of(&data) } else { 0 };
        let counters = namespace.counters.core(core);
        counters::add(&counters.units_read, u64::from(bytes) / 512);
        counters::add(&counters.reads, 1);
        env.note_command(namespace, counters);
        self.reply_fast_path(sqe.cid(), reference, Some(data));
        true
    }

    #[inline]
    fn write_fast_path(&mut self, id: ConnectionId, env: &mut Env, sqe: &Sqe, bytes: u32) -> bool {
        let Role::Io(role) = &self.role else { return false };
        // A new command does not overtake those that wait for memory. A member's takes the slab path, which
        // names the member.
        if env.disk_claims != 0 || self.has_waiting() || role.shared.is_member() {
            return false;
        }
        let core = env.core;
        let fua = io::is_fua(sqe) || !role.shared.is_write_cache_on();
        let Some(Checked { namespace, disk, geometry, request }) =
            check(role, env, sqe, Op::Write { fua }, bytes)
        else {
            return false;
        };
        let Some(slot) = self.requests.next_id().filter(|_| !geometry.is_read_only) else { return false };
        let Prepared::Fill(mut buf) = disk.prepare(&request, None) else { return false };
        if !self.transport.take_in_capsule(&mut buf) {
            return false;
        }
        role.shared.note_traffic();
        match disk.submit(token(id, slot), &request, Some(buf)) {
            Some(Done { result: Ok(()), .. }) => {
                let counters = namespace.counters.core(core);
                counters::add(&counters.units_written, u64::from(bytes) / 512);
                counters::add(&counters.writes, 1);
                env.note_command(namespace, counters);
                self.reply_fast_path(sqe.cid(), 0, None);
            }
            ended => self.continue_write(id, env, slot, sqe, bytes, ended),
        }
        true
    }

    /// Creates the request of a Read whose data is not in memory, and continues on the slab path. `prepared`
    /// is the result of `DiskChannel::prepare`.
    fn continue_read(
        &mut self,
        id: ConnectionId,
        env: &mut Env,
        sqe: &Sqe,
        io: IoCommand,
        prepared: Prepared,
    ) {
        let mut request = Request::new(*sqe, DataPointer::Host { bytes: io.data_bytes });
        request.work = Work::Io(io);
        let is_whole = match prepared {
            Prepared::Ready(buf) | Prepared::Fill(buf) => {
                request.buf = Some(buf);
                true
            }
            Prepared::Later => true,
            Prepared::Pool => {
                if let Some(disk) = env.disk(io.disk) {
                    request.set_pool(disk, &io, self.bulk_unit);
                }
                false
            }
            Prepared::Wait => {
                request.data_memory = DataMemory::Wait;
                false
            }
        };
        let is_waiting = request.data_memory == DataMemory::Wait;
        let Some(slot) = self.requests.insert(request) else { return };
        self.transport.set_slot(slot);
        if is_whole {
            self.step_execute(id, env, slot);
        } else if is_waiting {
            env.waits += 1;
            self.wait_for_buffer(slot);
        } else {
            self.step_buffer(id, env, slot);
        }
    }

    /// Returns dwords 0 and 1 of the completion of a Read: KEEP of a Read and Register, or a
    /// [`PageReference`].
    #[inline]
    pub(super) fn read_result(&self, io: &IoCommand, data: Option<&Buf>) -> u64 {
        if io.registers { u64::from(io.keeps) } else { self.page_reference(data) }
    }

    /// Returns the [`PageReference`] for the completion of a Read with this data; 0: none.
    #[inline]
    pub(super) fn page_reference(&self, data: Option<&Buf>) -> u64 {
        match &self.role {
            Role::Io(role) if role.shared.has_attached() => data.map_or(0, reference_of),
            Role::Io(_) | Role::Admin(_) | Role::Fresh | Role::Closing => 0,
        }
    }

    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call moves `data` through memory")]
    fn reply_fast_path(&mut self, cid: u16, result: u64, data: Option<Buf>) {
        self.fast_path_inflight += 1;
        let cqe = self.cqe(cid, Status::SUCCESS).with_result_u64(result);
        let may_omit_cqe = self.is_sq_flow_off && result == 0;
        self.transport.reply(Reply { slot: FAST_PATH, cqe, data, may_omit_cqe });
    }

    /// Creates the request of a Write that the disk failed, or did not complete in `submit` (`ended` is
    /// `None`). The request is in `slot`, since the token of the disk command contains that slot.
    #[cold]
    fn continue_write(
        &mut self,
        id: ConnectionId,
        env: &mut Env,
        slot: RequestId,
        sqe: &Sqe,
        bytes: u32,
        ended: Option<Done>,
    ) {
        let Role::Io(role) = &self.role else { return };
        let mut request = Request::new(*sqe, DataPointer::InCapsule { bytes });
        // `check` accepted the command in this turn, so `check_io` does not fail.
        request.work = io::check_io(role, env, &request).map_or(Work::None, Work::Io);
        request.state = RequestState::Executing;
        let is_inserted = self.requests.insert(request).is_some_and(|own| own == slot);
        debug_assert!(is_inserted, "the slab gave another place than it said");
        // The reply needs the state of the command, which RDMA keeps by slot.
        self.transport.set_slot(slot);
        match ended {
            Some(done) => self.on_done(id, env, slot, done),
            None => self.has_submitted = true,
        }
    }
}

/// Returns the reference to a whole page of a cache, as dwords 0 and 1 of a completion; 0 for other data.
#[inline(never)]
fn reference_of(data: &Buf) -> u64 {
    data.page_reference().map_or(0, |(Reference { frame, generation }, epoch)| {
        PageReference { frame, generation, epoch }.to_result()
    })
}
