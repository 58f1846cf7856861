//! The short way of the commonest commands: a read of a disk that has its data in place, and a write whose
//! data is in its capsule, to a disk that gives the memory for it.
//!
//! Nothing has to be waited for there, so such a command is checked, done and answered as it comes, without a
//! place among the requests. Whatever is not exactly like that takes the long way, from the beginning, with
//! nothing changed; so does a command that a disk does not end at once or ends with an error.

use nvme_spec::opcode::IoOpcode;
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;
use spindle_disk::{Disk, Done, Geometry, IoRequest, Op, Prepared};
use spindle_reactor::mem::Buf;
use spindle_reactor::slab::Slot;
use spindle_transport::{DataPointer, FAST_PATH, Reply, Transport};

use super::io;
use super::request::{Answer, IoCommand, IoOp, Request, State, Work};
use super::{IoRole, Qpair, Role, token};
use crate::counters;
use crate::env::Env;
use crate::snapshot::Namespace;

/// A command that passed every check, but that a Write is of a disk which takes it.
struct Checked<'r, 'e> {
    namespace: &'r Namespace,
    disk: &'e mut (dyn Disk + 'static),
    geometry: Geometry,
    request: IoRequest,
}

/// The checks that reads and writes share; `bytes` is what the command's SGL moves. `None`: not at once.
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
    let transfer_bytes = env.snapshot.limits.transfer_bytes;
    let namespace = role.subsystem.namespace(sqe.nsid())?;
    let index = Env::disk_index(namespace.disk);
    let disk = env.disks.get_mut(index)?.as_deref_mut()?;
    let geometry = disk.geometry();
    let target = io::Target { disk: index, geometry, transfer_bytes };
    let (range, whole) = io::data_range(sqe, &target, geometry.block_bytes.trailing_zeros()).ok()?;
    let request = IoRequest { op, range, hints: io::hints(sqe), client: role.shared.client };
    (whole == bytes).then_some(Checked { namespace, disk, geometry, request })
}

impl<T: Transport> Qpair<T> {
    /// False: the command takes the long way.
    #[inline]
    pub(super) fn step_fast_path(
        &mut self,
        id: Slot,
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
    fn read_fast_path(&mut self, id: Slot, env: &mut Env, sqe: &Sqe, bytes: u32) -> bool {
        let Role::Io(role) = &self.role else { return false };
        let core = env.core;
        let Some(checked) = check(role, env, sqe, Op::Read, bytes) else { return false };
        let Checked { namespace, disk, geometry, request } = checked;
        // What is looked up for a later command comes while this one is worked on.
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
                };
                role.shared.note_traffic();
                env.note_command(namespace, namespace.counters.core(core));
                self.read_on(id, env, sqe, io, prepared);
                return true;
            }
        };
        role.shared.note_traffic();
        let counters = namespace.counters.core(core);
        counters::add(&counters.units_read, u64::from(bytes) / 512);
        counters::add(&counters.reads, 1);
        env.note_command(namespace, counters);
        self.reply_fast_path(sqe.cid(), Some(data));
        true
    }

    #[inline]
    fn write_fast_path(&mut self, id: Slot, env: &mut Env, sqe: &Sqe, bytes: u32) -> bool {
        let Role::Io(role) = &self.role else { return false };
        // Who comes now does not overtake who has waited for memory before.
        if env.is_crowded || self.has_waiting() {
            return false;
        }
        let core = env.core;
        let fua = io::is_fua(sqe) || !role.shared.is_write_cache_on();
        let Some(Checked { namespace, disk, geometry, request }) =
            check(role, env, sqe, Op::Write { fua }, bytes)
        else {
            return false;
        };
        let Some(slot) = self.requests.next_slot().filter(|_| !geometry.is_read_only) else { return false };
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
                self.reply_fast_path(sqe.cid(), None);
            }
            ended => self.go_on(id, env, slot, sqe, bytes, ended),
        }
        true
    }

    /// A read whose data is not in place: it takes the long way from here, with what its disk has said.
    fn read_on(&mut self, id: Slot, env: &mut Env, sqe: &Sqe, io: IoCommand, prepared: Prepared) {
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
                request.answer = Answer::Wait;
                false
            }
        };
        let is_waiting = request.answer == Answer::Wait;
        let Ok(slot) = self.requests.insert(request) else { return };
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

    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call moves `data` through memory")]
    fn reply_fast_path(&mut self, cid: u16, data: Option<Buf>) {
        self.fast_path_inflight += 1;
        let cqe = self.cqe(cid, Status::SUCCESS);
        self.transport.reply(Reply { slot: FAST_PATH, cqe, data, may_omit_cqe: self.is_sq_flow_off });
    }

    /// The disk has the write and takes its time, or has failed it: it gets the place that the disk knows it
    /// by.
    #[cold]
    fn go_on(&mut self, id: Slot, env: &mut Env, slot: Slot, sqe: &Sqe, bytes: u32, ended: Option<Done>) {
        let Role::Io(role) = &self.role else { return };
        let mut request = Request::new(*sqe, DataPointer::InCapsule { bytes });
        // It passed these checks before, a moment ago.
        request.work = super::check_io(role, env, &request).map_or(Work::None, Work::Io);
        request.state = State::Executing;
        let is_inserted = self.requests.insert(request).is_ok_and(|own| own == slot);
        debug_assert!(is_inserted, "the slab gave another place than it said");
        // The transport keeps by it what it answers with.
        self.transport.set_slot(slot);
        if let Some(done) = ended {
            self.on_done(id, env, slot, done);
        }
    }
}
