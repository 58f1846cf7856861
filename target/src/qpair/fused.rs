//! Fused Compare and Write: two adjacent commands of one queue, executed atomically (Base 2.0, 3.4.2).
//!
//! ```text
//!   Compare, FIRST  ── takes both buffers, fetches its data ───> Fused ─┐
//!   Write, SECOND   ── gets a buffer from the first, fetches ──> Fused ─┴─> DiskChannel::compare_and_write
//! ```
//!
//! A half without the other ends with Command Aborted due to Missing Fused Command. When one half fails, the
//! other ends with Command Aborted due to Failed Fused Command.

use nvme_spec::sqe::Fuse;
use nvme_spec::status::Status;
use spindle_nvme_transport::Transport;
use spindle_nvme_transport::{ConnectionId, RequestId};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Holder;
use spindle_target_disk::{DiskError, Op, Prepared};

use super::request::{IoCommand, IoOp, RequestState};
use super::{Qpair, Work, status_of, token};
use crate::env::Env;
use crate::refusal::{Refusal, field};

/// Longest time for which a first half waits for its second, from the first timer check that finds no second.
/// The same as `FETCH_TIMEOUT`; hosts send both halves together.
pub const FUSED_TIMEOUT: Nanos = Nanos::from_secs(30);

impl<T: Transport> Qpair<T> {
    /// Handles a checked command that is half of a pair, or that follows a first half. Ends a first half
    /// without its second, and refuses an invalid half.
    pub(super) fn step_fused(&mut self, id: ConnectionId, env: &mut Env, slot: RequestId) {
        let Some(request) = self.requests.get(slot) else { return };
        let Work::Io(io) = request.work else { return };
        let is_write = matches!(io.op, IoOp::Write { .. });
        match (self.fused_first, request.sqe.fuse()) {
            (Some(first), Fuse::SECOND) if is_write => {
                if self.are_of_one_range(first, &io) {
                    self.fused_first = None;
                    self.link_pair(env, first, slot);
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

    /// True when both halves have the same blocks of the same namespace.
    fn are_of_one_range(&self, first: RequestId, second: &IoCommand) -> bool {
        let work = self.requests.find(first).map(|request| request.work);
        matches!(work, Some(Work::Io(first)) if first.nsid == second.nsid && first.disk == second.disk
            && first.range == second.range && first.data_bytes == second.data_bytes)
    }

    /// Refuses a command that failed its checks. Ends a first half that waits for its second.
    pub(super) fn refuse_io(&mut self, env: &mut Env, slot: RequestId, refusal: Refusal) {
        let Some(request) = self.requests.get(slot) else { return };
        let is_second = request.sqe.fuse() == Fuse::SECOND;
        let status = if is_second { Status::ABORTED_FAILED_FUSED } else { Status::ABORTED_MISSING_FUSED };
        self.end_first(env, status);
        self.refuse(env, slot, refusal);
    }

    /// Ends a first half that waits for its second, with `status`.
    pub(super) fn end_first(&mut self, env: &mut Env, status: Status) {
        if let Some(first) = self.fused_first.take() {
            self.end_half(env, first, Refusal::at(status, field::FLAGS));
        }
    }

    /// Ends a first half whose deadline has passed, since other commands may wait for its two buffers. Sets
    /// the deadline of a new first half.
    pub(super) fn expire_fused_first(&mut self, env: &mut Env) {
        match (self.fused_first, self.fused_first_deadline) {
            (Some(first), Some((slot, until))) if first == slot => {
                if env.has_passed(until) {
                    self.end_first(env, Status::ABORTED_MISSING_FUSED);
                }
            }
            (first, _) => {
                let until = env.now + FUSED_TIMEOUT;
                self.fused_first_deadline = first.map(|slot| (slot, until));
            }
        }
    }

    /// Ends half of a pair with `refusal`, because the other half failed or is missing: at once, or when the
    /// transport or the disk returns its buffer.
    fn end_half(&mut self, env: &mut Env, slot: RequestId, refusal: Refusal) {
        let Some(request) = self.requests.find_mut(slot) else { return };
        match request.state {
            RequestState::Fetching => {
                if self.stop_fetch(slot, refusal.status) {
                    self.refuse(env, slot, refusal);
                }
            }
            RequestState::Bulk => {
                request.abort_status.get_or_insert(refusal.status);
            }
            RequestState::Replying => {}
            RequestState::NeedBuffer => {
                // Removed now, since the queue for memory may not advance for a long time.
                self.waiting.retain(|waiting| *waiting != slot);
                self.refuse(env, slot, refusal);
            }
            RequestState::New
            | RequestState::Executing
            | RequestState::NeedStepBuffer
            | RequestState::Fused
            | RequestState::Parked
            | RequestState::Next
            | RequestState::Aborting
            | RequestState::ConnectBlocked => self.refuse(env, slot, refusal),
        }
    }

    /// Takes the memory of both halves for the first half, or queues the first half for memory. So no pair
    /// keeps one buffer while it waits for another. Then fetches the data of the first half, and of the
    /// second if it has arrived.
    fn begin_first(&mut self, env: &mut Env, slot: RequestId) {
        let Some(request) = self.requests.get_mut(slot) else { return };
        let Work::Io(io) = request.work else { return };
        let is_claimed = env.is_disk_claimed(io.disk);
        let Some(disk) = env.disks.get_mut(io.disk).and_then(|disk| disk.as_deref_mut()) else {
            let partner = request.partner;
            self.fused_first.take_if(|first| *first == slot);
            return self.end_pair(env, slot, partner, status_of(DiskError::Gone));
        };
        let is_behind = is_claimed || !self.waiting.is_empty() && request.state == RequestState::New;
        let share = env.pool.share(Holder::host(io.client));
        let write = io.request(Op::Write { fua: false }, io.range);
        let both = match (!is_behind).then(|| disk.prepare(&write, None)) {
            Some(Prepared::Fill(data)) => Some((share.take(io.data_bytes), Some(data))),
            Some(Prepared::Pool) => share.take_both([io.data_bytes; 2]),
            Some(Prepared::Wait | Prepared::Later | Prepared::Ready(_)) | None => None,
        };
        let Some((Some(expected), Some(data))) = both else {
            if request.state == RequestState::New {
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

    /// Retries a first half that waits for memory. Does nothing for a second half, which waits for its first.
    pub(super) fn retry_fused(&mut self, env: &mut Env, slot: RequestId) {
        if self.requests.get(slot).is_some_and(|request| request.sqe.fuse() == Fuse::FIRST) {
            self.begin_first(env, slot);
        }
    }

    /// Links the two halves of a pair and begins the second, unless the first still waits for memory.
    fn link_pair(&mut self, env: &mut Env, first: RequestId, second: RequestId) {
        if let Some(request) = self.requests.find_mut(first) {
            request.partner = Some(second);
        }
        if let Some(request) = self.requests.find_mut(second) {
            request.partner = Some(first);
        }
        let is_first_waiting =
            self.requests.find(first).is_some_and(|request| request.state == RequestState::NeedBuffer);
        if is_first_waiting {
            if let Some(request) = self.requests.find_mut(second) {
                request.state = RequestState::NeedBuffer; // `begin_first` begins the second
            }
            return self.stash_capsule(second);
        }
        self.begin_second(env, first, second);
    }

    /// Moves the buffer that the first half took for the second to the second half, and fetches its data.
    /// Refuses the second half with Internal Error if there is no such buffer.
    fn begin_second(&mut self, env: &mut Env, first: RequestId, second: RequestId) {
        let data = self.requests.find_mut(first).and_then(|request| request.aux.take());
        let Some(request) = self.requests.find_mut(second) else { return };
        request.buf = data;
        if request.buf.is_some() {
            self.fetch(second);
        } else {
            self.refuse(env, second, Refusal::of(Status::INTERNAL_ERROR, None));
        }
    }

    /// Handles half of a pair whose fetch has ended. Executes the pair once both halves have their data; ends
    /// the pair with `failure`.
    pub(super) fn on_fused_fetched(
        &mut self,
        id: ConnectionId,
        env: &mut Env,
        slot: RequestId,
        failure: Option<Status>,
    ) {
        let Some(request) = self.requests.get_mut(slot) else { return };
        request.state = RequestState::Fused;
        let (partner, is_first) = (request.partner, request.sqe.fuse() == Fuse::FIRST);
        if let Some(status) = failure {
            // A second half that arrives later is refused, since its first half is missing.
            self.fused_first.take_if(|first| *first == slot);
            return self.end_pair(env, slot, partner, status);
        }
        let Some(partner) = partner else { return };
        let is_ready =
            self.requests.find(partner).is_some_and(|request| request.state == RequestState::Fused);
        if !is_ready {
            return;
        }
        let (first, second) = if is_first { (slot, partner) } else { (partner, slot) };
        self.execute_pair(id, env, first, second);
    }

    fn execute_pair(&mut self, id: ConnectionId, env: &mut Env, first: RequestId, second: RequestId) {
        let expected = self.requests.find_mut(first).and_then(|request| {
            request.state = RequestState::Executing;
            request.buf.take()
        });
        let Some(request) = self.requests.find_mut(second) else { return };
        request.state = RequestState::Executing;
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

    /// Completes both halves with the `result` of the disk. `second` is the Write.
    pub(super) fn on_fused_done(&mut self, env: &mut Env, second: RequestId, result: Result<(), DiskError>) {
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

    /// Refuses `slot` with `status`. Refuses `partner` with Command Aborted due to Failed Fused Command,
    /// unless `partner` already has a reply.
    fn end_pair(&mut self, env: &mut Env, slot: RequestId, partner: Option<RequestId>, status: Status) {
        self.refuse(env, slot, Refusal::of(status, None));
        if let Some(partner) = partner {
            // The pair is one disk command, so neither half was executed alone.
            self.end_half(env, partner, Refusal::of(Status::ABORTED_FAILED_FUSED, None));
        }
    }
}
