//! Fused Compare and Write: two adjacent commands of one queue that are one step (Base 2.0, 3.4.2).
//!
//! ```text
//!   Compare, FIRST  ── takes both buffers, fetches its data ───> Fused ─┐
//!   Write, SECOND   ── takes over its buffer, fetches its data ─> Fused ┴─> Disk::compare_and_write
//! ```
//!
//! A first half without its second, or the other way round, ends with Command Aborted due to Missing Fused
//! Command; when one half fails, the other ends with Command Aborted due to Failed Fused Command.

use nvme_spec::sqe::Fuse;
use nvme_spec::status::Status;
use spindle_disk::{DiskError, Op, Prepared};
use spindle_reactor::clock::Nanos;
use spindle_reactor::slab::Slot;
use spindle_transport::Transport;

use super::request::{IoCommand, IoOp, State};
use super::{Qpair, Work, status_of, token};
use crate::env::Env;
use crate::refusal::{Refusal, field};

/// How long a first half waits for its second: hosts send both at once. As long as for data.
pub const FUSED_TIMEOUT: Nanos = Nanos::from_secs(30);

impl<T: Transport> Qpair<T> {
    /// A command passed its checks and is half of a pair, or follows a first half.
    pub(super) fn step_fused(&mut self, id: Slot, env: &mut Env, slot: Slot) {
        let Some(request) = self.requests.get(slot) else { return };
        let Work::Io(io) = request.work else { return };
        let is_write = matches!(io.op, IoOp::Write { .. });
        match (self.fused_first, request.sqe.fuse()) {
            (Some(first), Fuse::SECOND) if is_write => {
                if self.are_of_one_range(first, &io) {
                    self.fused_first = None;
                    self.join(env, first, slot);
                } else {
                    self.end_first(env, Status::ABORTED_FAILED_FUSED);
                    self.refuse(env, slot, Refusal::invalid(field::CDW10));
                }
            }
            (None, Fuse::SECOND) if is_write => {
                self.refuse(env, slot, Refusal::at(Status::ABORTED_MISSING_FUSED, field::FLAGS));
            }
            (_, Fuse::FIRST) if io.op == IoOp::Compare => {
                self.end_first(env, Status::ABORTED_MISSING_FUSED);
                self.fused_first = Some(slot);
                self.begin_first(env, slot);
            }
            (_, Fuse::NONE) => {
                self.end_first(env, Status::ABORTED_MISSING_FUSED);
                self.step_buffer(id, env, slot);
            }
            _ => {
                self.end_first(env, Status::ABORTED_MISSING_FUSED);
                self.refuse(env, slot, Refusal::invalid(field::FLAGS));
            }
        }
    }

    /// The two halves name the same blocks of the same namespace.
    fn are_of_one_range(&self, first: Slot, second: &IoCommand) -> bool {
        let work = self.requests.find(first).map(|request| request.work);
        matches!(work, Some(Work::Io(first)) if first.nsid == second.nsid && first.disk == second.disk
            && first.range == second.range && first.data_bytes == second.data_bytes)
    }

    /// A command that failed its checks ends its pair too.
    pub(super) fn refuse_io(&mut self, env: &mut Env, slot: Slot, refusal: Refusal) {
        let Some(request) = self.requests.get(slot) else { return };
        let is_second = request.sqe.fuse() == Fuse::SECOND;
        let status = if is_second { Status::ABORTED_FAILED_FUSED } else { Status::ABORTED_MISSING_FUSED };
        self.end_first(env, status);
        self.refuse(env, slot, refusal);
    }

    /// A first half that waits for its second gets none.
    pub(super) fn end_first(&mut self, env: &mut Env, status: Status) {
        if let Some(first) = self.fused_first.take() {
            self.end_half(env, first, Refusal::at(status, field::FLAGS));
        }
    }

    /// A first half has waited too long. What it holds would be its host's for as long as it is connected,
    /// and others wait for memory.
    pub(super) fn end_lone_first(&mut self, env: &mut Env) {
        match (self.fused_first, self.lone_first) {
            (Some(first), Some((slot, until))) if first == slot => {
                if env.now >= until {
                    self.end_first(env, Status::ABORTED_MISSING_FUSED);
                }
            }
            (first, _) => {
                let until = env.now + FUSED_TIMEOUT;
                self.lone_first = first.map(|slot| (slot, until));
            }
        }
    }

    /// A half ends because of the other: at once, or when a device that has its buffer is through.
    fn end_half(&mut self, env: &mut Env, slot: Slot, refusal: Refusal) {
        let Some(request) = self.requests.find_mut(slot) else { return };
        match request.state {
            State::Fetching => {
                if self.stop_fetch(slot, refusal.status) {
                    self.refuse(env, slot, refusal);
                }
            }
            State::Moving => {
                request.abort_status.get_or_insert(refusal.status);
            }
            State::Replying => {}
            State::NeedBuffer => {
                // The line may stand for long: who is answered does not stay in it.
                self.waiting.retain(|waiting| *waiting != slot);
                self.refuse(env, slot, refusal);
            }
            State::New
            | State::Executing
            | State::NeedStepBuffer
            | State::Fused
            | State::Held
            | State::Aborting
            | State::ConnectBlocked => self.refuse(env, slot, refusal),
        }
    }

    /// The first half takes the memory of both, so that no pair holds one buffer while it waits for another.
    fn begin_first(&mut self, env: &mut Env, slot: Slot) {
        let Some(request) = self.requests.get_mut(slot) else { return };
        let Work::Io(io) = request.work else { return };
        let Some(disk) = env.disks.get_mut(io.disk).and_then(|disk| disk.as_deref_mut()) else {
            let partner = request.partner;
            self.fused_first.take_if(|first| *first == slot);
            return self.end_pair(env, slot, partner, status_of(DiskError::Gone));
        };
        let is_behind = (env.is_crowded || !self.waiting.is_empty()) && request.state == State::New;
        let share = env.pool.share(env.current);
        let write = io.request(Op::Write { fua: false }, io.range);
        let both = match (!is_behind).then(|| disk.prepare(&write, None)) {
            Some(Prepared::Fill(data)) => Some((share.take(io.data_bytes), Some(data))),
            Some(Prepared::Pool) => share.take_both([io.data_bytes; 2]),
            Some(Prepared::Wait | Prepared::Later | Prepared::Ready(_)) | None => None,
        };
        let Some((Some(expected), Some(data))) = both else {
            if request.state == State::New {
                env.waits += 1;
                self.wait_for_buffer(slot);
            }
            return;
        };
        request.buf = Some(expected);
        request.aux = Some(data);
        let partner = request.partner;
        self.fetch(slot);
        if let Some(second) = partner {
            self.begin_second(env, slot, second);
        }
    }

    /// Memory for a first half that waited.
    pub(super) fn retry_fused(&mut self, env: &mut Env, slot: Slot) {
        if self.requests.get(slot).is_some_and(|request| request.sqe.fuse() == Fuse::FIRST) {
            self.begin_first(env, slot);
        }
    }

    /// Both halves are here.
    fn join(&mut self, env: &mut Env, first: Slot, second: Slot) {
        if let Some(request) = self.requests.find_mut(first) {
            request.partner = Some(second);
        }
        if let Some(request) = self.requests.find_mut(second) {
            request.partner = Some(first);
        }
        let is_first_waiting =
            self.requests.find(first).is_some_and(|request| request.state == State::NeedBuffer);
        if is_first_waiting {
            if let Some(request) = self.requests.find_mut(second) {
                request.state = State::NeedBuffer; // begun by its first half
            }
            return self.stash_capsule(second);
        }
        self.begin_second(env, first, second);
    }

    /// The second half takes over the buffer that the first took for it.
    fn begin_second(&mut self, env: &mut Env, first: Slot, second: Slot) {
        let data = self.requests.find_mut(first).and_then(|request| request.aux.take());
        let Some(request) = self.requests.find_mut(second) else { return };
        request.buf = data;
        if request.buf.is_some() {
            self.fetch(second);
        } else {
            self.refuse(env, second, Refusal::of(Status::INTERNAL_ERROR, None));
        }
    }

    /// One half has its data, or fails.
    pub(super) fn on_fused_fetched(&mut self, id: Slot, env: &mut Env, slot: Slot, failure: Option<Status>) {
        let Some(request) = self.requests.get_mut(slot) else { return };
        request.state = State::Fused;
        let (partner, is_first) = (request.partner, request.sqe.fuse() == Fuse::FIRST);
        if let Some(status) = failure {
            // Where its second half is still to come, it will find none.
            self.fused_first.take_if(|first| *first == slot);
            return self.end_pair(env, slot, partner, status);
        }
        let Some(partner) = partner else { return };
        let is_ready = self.requests.find(partner).is_some_and(|request| request.state == State::Fused);
        if !is_ready {
            return;
        }
        let (first, second) = if is_first { (slot, partner) } else { (partner, slot) };
        self.execute_pair(id, env, first, second);
    }

    fn execute_pair(&mut self, id: Slot, env: &mut Env, first: Slot, second: Slot) {
        let expected = self.requests.find_mut(first).and_then(|request| {
            request.state = State::Executing;
            request.buf.take()
        });
        let Some(request) = self.requests.find_mut(second) else { return };
        request.state = State::Executing;
        let (Work::Io(io), Some(data), Some(expected)) = (request.work, request.buf.take(), expected) else {
            return;
        };
        let Some(disk) = env.disk(io.disk) else {
            return self.on_fused_done(env, second, Err(DiskError::Gone));
        };
        if let Some(done) = disk.compare_and_write(token(id, second), io.range, expected, data) {
            self.on_fused_done(env, second, done.result);
        }
    }

    /// The disk has carried out the pair, or not. `second` is the Write.
    pub(super) fn on_fused_done(&mut self, env: &mut Env, second: Slot, result: Result<(), DiskError>) {
        let Some(first) = self.requests.find(second).and_then(|request| request.partner) else { return };
        let io_of = |slot| match self.requests.find(slot)?.work {
            Work::Io(io) => Some(io),
            Work::None | Work::Connect | Work::Admin { .. } => None,
        };
        match result {
            Ok(()) => {
                for slot in [first, second] {
                    if let Some(io) = io_of(slot) {
                        self.count_io(env.core, &io);
                    }
                }
                self.finish(first, Status::SUCCESS, 0, None);
                self.finish(second, Status::SUCCESS, 0, None);
            }
            Err(error) => {
                if let Some(io) = io_of(second) {
                    self.note_disk_error(env, &io, error);
                }
                let (failed, other) = match error {
                    DiskError::Device(status) if status.code() == Status::WRITE_FAULT => (second, first),
                    DiskError::MediaWrite | DiskError::NoSpace | DiskError::WriteProtected => (second, first),
                    DiskError::MediaRead
                    | DiskError::NotSupported
                    | DiskError::CompareDiffers
                    | DiskError::Internal
                    | DiskError::Gone
                    | DiskError::Device(_)
                    | DiskError::Cancelled => (first, second),
                };
                self.end_pair(env, failed, Some(other), status_of(error));
            }
        }
    }

    /// `slot` fails with `status`, and its other half, unless it is answered already, because of it.
    fn end_pair(&mut self, env: &mut Env, slot: Slot, partner: Option<Slot>, status: Status) {
        self.refuse(env, slot, Refusal::of(status, None));
        if let Some(partner) = partner {
            // The states of the two are one step: nothing of the pair is on the disk when one half fails.
            self.end_half(env, partner, Refusal::of(Status::ABORTED_FAILED_FUSED, None));
        }
    }
}
