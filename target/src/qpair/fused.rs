//! Fused Compare and Write: two adjacent commands of one queue that are one step (Base 2.0, 3.4.2).
//!
//! ```text
//!   Compare, FIRST  ── takes both buffers, fetches its data ──> Fused ─┐
//!   Write, SECOND   ── takes over its buffer, fetches its data ─> Fused ┴─> Disk::compare_and_write ──> both answered
//! ```
//!
//! A first half without its second, or the other way round, ends with Command Aborted due to Missing Fused Command; when one
//! half fails, the other ends with Command Aborted due to Failed Fused Command.

use nvme_spec::sqe::Fuse;
use nvme_spec::status::Status;
use spindle_disk::{BufferFrom, DiskError};
use spindle_reactor::slab::Slot;

use super::io::field;
use super::request::{IoOp, Refusal, State};
use super::{Qpair, Work, set, status_of, token};
use crate::env::Env;
use crate::transport::Transport;

impl<T: Transport> Qpair<T> {
    /// A command passed its checks and is half of a pair, or follows a first half.
    pub(super) fn step_fused(&mut self, id: Slot, env: &mut Env, slot: Slot) {
        let Some(request) = self.requests.get(slot) else { return };
        let Work::Io(io) = request.work else { return };
        let fuse = request.sqe.fuse();
        let first = self.fused_first.take();
        let first_range = first.and_then(|first| match self.requests.get(first)?.work {
            Work::Io(io) => Some(io.range),
            _ => None,
        });
        let is_write = matches!(io.op, IoOp::Write { .. });
        match (first, fuse) {
            (Some(first), Fuse::SECOND) if is_write => {
                if first_range == Some(io.range) {
                    self.join(env, first, slot);
                } else {
                    self.refuse(env, first, Refusal::at(Status::ABORTED_FAILED_FUSED, field::CDW10));
                    self.refuse(env, slot, Refusal::at(Status::INVALID_FIELD, field::CDW10));
                }
            }
            (None, Fuse::FIRST) if io.op == IoOp::Compare => {
                self.fused_first = Some(slot);
                self.begin_first(env, slot);
            }
            (first, _) => {
                if let Some(first) = first {
                    self.refuse(env, first, Refusal::at(Status::ABORTED_MISSING_FUSED, field::FLAGS));
                }
                match fuse {
                    Fuse::NONE => self.step_buffer(id, env, slot),
                    Fuse::FIRST if io.op == IoOp::Compare => {
                        self.fused_first = Some(slot);
                        self.begin_first(env, slot);
                    }
                    Fuse::SECOND if is_write => {
                        self.refuse(env, slot, Refusal::at(Status::ABORTED_MISSING_FUSED, field::FLAGS));
                    }
                    _ => self.refuse(env, slot, Refusal::at(Status::INVALID_FIELD, field::FLAGS)),
                }
            }
        }
    }

    /// A command that failed its checks ends its pair too.
    pub(super) fn refuse_io(&mut self, id: Slot, env: &mut Env, slot: Slot, refusal: Refusal) {
        let _ = id;
        let Some(request) = self.requests.get(slot) else { return };
        let fuse = request.sqe.fuse();
        if let Some(first) = self.fused_first.take() {
            let status = if fuse == Fuse::SECOND { Status::ABORTED_FAILED_FUSED } else { Status::ABORTED_MISSING_FUSED };
            self.refuse(env, first, Refusal::at(status, field::FLAGS));
        }
        self.refuse(env, slot, refusal);
    }

    /// The first half takes the memory of both, so that no pair holds one buffer while it waits for another.
    fn begin_first(&mut self, env: &mut Env, slot: Slot) {
        let Some(request) = self.requests.get_mut(slot) else { return };
        let Work::Io(io) = request.work else { return };
        let Some(disk) = env.disks.get_mut(io.disk).and_then(|disk| disk.as_deref_mut()) else {
            self.fused_first = None;
            self.refuse(env, slot, Refusal { status: status_of(DiskError::Gone), field: None });
            return;
        };
        let data = match disk.write_buffers() {
            BufferFrom::Disk => disk.take(io.range),
            BufferFrom::Pool => env.pool.take(io.data_bytes),
        };
        let is_taken = data.is_some() && set(&mut request.buf, env.pool.take(io.data_bytes));
        if !is_taken {
            if request.state == State::New {
                env.waits += 1;
                request.state = State::NeedBuffer;
                self.waiting.push_back(slot);
            }
            return;
        }
        request.aux = data;
        let partner = request.partner;
        self.fetch(slot);
        if let Some(second) = partner {
            self.begin_second(env, slot, second);
        }
    }

    /// Memory for a first half that waited.
    pub(super) fn retry_fused(&mut self, env: &mut Env, slot: Slot) {
        let is_second = self.requests.get(slot).is_some_and(|request| matches!(request.work,
            Work::Io(io) if matches!(io.op, IoOp::Write { .. })));
        if !is_second {
            self.begin_first(env, slot);
        }
    }

    /// Both halves are here.
    fn join(&mut self, env: &mut Env, first: Slot, second: Slot) {
        if let Some(request) = self.requests.get_mut(first) {
            request.partner = Some(second);
        }
        if let Some(request) = self.requests.get_mut(second) {
            request.partner = Some(first);
        }
        let is_first_waiting = self.requests.get(first).is_some_and(|request| request.state == State::NeedBuffer);
        if is_first_waiting {
            if let Some(request) = self.requests.get_mut(second) {
                request.state = State::NeedBuffer; // begun by its first half
            }
            return;
        }
        self.begin_second(env, first, second);
    }

    /// The second half takes over the buffer that the first took for it.
    fn begin_second(&mut self, env: &mut Env, first: Slot, second: Slot) {
        let data = self.requests.get_mut(first).and_then(|request| request.aux.take());
        let Some(request) = self.requests.get_mut(second) else { return };
        request.buf = data;
        if request.buf.is_some() {
            self.fetch(second);
        } else {
            self.refuse(env, second, Refusal { status: Status::INTERNAL_ERROR, field: None });
        }
    }

    /// One half has its data.
    pub(super) fn on_fused_fetched(&mut self, id: Slot, env: &mut Env, slot: Slot, result: Result<(), Status>) {
        let Some(request) = self.requests.get_mut(slot) else { return };
        request.state = State::Fused;
        let partner = request.partner;
        let is_aborted = request.is_aborted;
        let failure = match result {
            Err(status) => Some(status),
            Ok(()) if is_aborted && self.has_failed(partner) => Some(Status::ABORTED_FAILED_FUSED),
            Ok(()) if is_aborted => Some(Status::ABORTED_BY_REQUEST),
            Ok(()) => None,
        };
        if let Some(status) = failure {
            if self.fused_first == Some(slot) {
                // Its second half is still to come and will find none.
                self.fused_first = None;
            }
            self.end_pair(env, slot, partner, status, Status::ABORTED_FAILED_FUSED);
            return;
        }
        let Some(partner) = partner else { return };
        let is_ready = self.requests.get(partner).is_some_and(|request| request.state == State::Fused);
        if !is_ready {
            return;
        }
        let is_first = self.requests.get(slot).is_some_and(|request| request.sqe.fuse() == Fuse::FIRST);
        let (first, second) = if is_first { (slot, partner) } else { (partner, slot) };
        self.execute_pair(id, env, first, second);
    }

    /// The other half is answered already.
    fn has_failed(&self, partner: Option<Slot>) -> bool {
        let partner = partner.map(|partner| self.requests.get(partner).map(|request| request.state));
        matches!(partner, Some(None | Some(State::Replying)))
    }

    fn execute_pair(&mut self, id: Slot, env: &mut Env, first: Slot, second: Slot) {
        let expected = self.requests.get_mut(first).and_then(|request| {
            request.state = State::Executing;
            request.buf.take()
        });
        let Some(request) = self.requests.get_mut(second) else { return };
        request.state = State::Executing;
        let (Work::Io(io), Some(data), Some(expected)) = (request.work, request.buf.take(), expected) else { return };
        let Some(disk) = env.disk(io.disk) else {
            self.on_fused_done(env, second, Err(DiskError::Gone));
            return;
        };
        if let Some(done) = disk.compare_and_write(token(id, second), io.range, expected, data) {
            self.on_fused_done(env, second, done.result);
        }
    }

    /// The disk has carried out the pair, or not. `second` is the Write.
    pub(super) fn on_fused_done(&mut self, env: &mut Env, second: Slot, result: Result<(), DiskError>) {
        let Some(first) = self.requests.get(second).and_then(|request| request.partner) else { return };
        let io_of = |slot| match self.requests.get(slot)?.work {
            Work::Io(io) => Some(io),
            _ => None,
        };
        match result {
            Ok(()) => {
                for slot in [first, second] {
                    if let Some(io) = io_of(slot) {
                        self.count_io(env.core, &io);
                    }
                }
                self.finish(env, first, Status::SUCCESS, 0, None);
                self.finish(env, second, Status::SUCCESS, 0, None);
            }
            Err(error @ (DiskError::MediaWrite | DiskError::NoSpace | DiskError::WriteProtected)) => {
                self.end_pair(env, second, Some(first), status_of(error), Status::ABORTED_FAILED_FUSED);
            }
            Err(error) => self.end_pair(env, first, Some(second), status_of(error), Status::ABORTED_FAILED_FUSED),
        }
    }

    /// `slot` fails with `status`, its other half, unless it is answered already, with `other`.
    fn end_pair(&mut self, env: &mut Env, slot: Slot, partner: Option<Slot>, status: Status, other: Status) {
        self.refuse(env, slot, Refusal { status, field: None });
        let Some(partner) = partner else { return };
        let Some(request) = self.requests.get_mut(partner) else { return };
        match request.state {
            // Its data is on its way and has to be taken in: it fails when it is here.
            State::Fetching => request.is_aborted = true,
            State::Replying => {}
            State::New
            | State::NeedBuffer
            | State::Executing
            | State::NeedStepBuffer
            | State::Fused
            | State::Held
            | State::Aborting => self.refuse(env, partner, Refusal { status: other, field: None }),
        }
    }
}
