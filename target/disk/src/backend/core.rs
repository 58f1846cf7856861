//! [`BackendChannel`]: the requests and compare-and-writes of one core, and their progress in each poll.

use std::collections::VecDeque;
use std::sync::Arc;

use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Buf;
use spindle_reactor::slab::{Slab, Slot};

use super::compare_and_write::{CompareAndWrite, CompareAndWriteQueue, Phase};
use super::guard::{self, Guard};
use super::request::{BackendState, Request, Zeroing};
use super::{AsyncBackend, Ended};
use crate::shape::block_shift;
use crate::{
    BlockRange, ChannelContext, DiskChannel, DiskError, Done, Geometry, IoRequest, Op, OpenError, Owner,
    Token,
};

/// Most requests of a core at its backend: the usual depth of a queue of an NVMe drive.
pub(crate) const REQUESTS_MAX: u32 = 1024;

/// Token of the compare-and-write at the backend. The tokens of requests are their slots, which have 32 bits.
const COMPARE_AND_WRITE_TOKEN: u64 = u64::MAX;

/// One core's handle on a disk. `backend` is dropped first: its drop waits for its operations, which must end
/// before the drop of `compare_and_writes`.
pub(crate) struct BackendChannel<M: AsyncBackend> {
    backend: M,
    compare_and_writes: CompareAndWriteQueue,
    shift: u32,
    /// Requests with an operation at the backend.
    requests: Slab<Request>,
    /// Requests that wait for a free slot of `requests`, in order of submission.
    queue: VecDeque<Request>,
    /// Writes whose range contains the guarded block.
    waiting: VecDeque<Request>,
    /// Completed operations; empty between polls.
    endings: Vec<Ended<M::Error>>,
    /// Completions that `poll` has not returned yet.
    ready: VecDeque<Done>,
    /// [`AsyncBackend::send`] has failed.
    is_broken: bool,
}

/// Returns the most requests of a core at its backend: the core's depth, but 1 to [`REQUESTS_MAX`]. The
/// backend needs capacity for one more operation, for the compare-and-write.
pub(crate) fn requests_of(context: &ChannelContext) -> u32 {
    context.depth.clamp(1, REQUESTS_MAX)
}

impl<M: AsyncBackend> BackendChannel<M> {
    /// Creates the handle of one core on `disk`. `backend` must have capacity for one operation more than
    /// [`requests_of`] returns.
    ///
    /// # Errors
    /// [`OpenError::Setting`] when [`guard::CORES_MAX`] cores have the disk open.
    pub(crate) fn new(
        disk: &str,
        backend: M,
        guard: &Arc<Guard>,
        context: &ChannelContext,
    ) -> Result<BackendChannel<M>, OpenError> {
        let Some(participant) = guard.join() else {
            let allowed = format!("at most {} cores can have one disk open", guard::CORES_MAX);
            return Err(OpenError::setting(disk, "cores", guard::CORES_MAX + 1, allowed));
        };
        let (entries, depth) = (requests_of(context) as usize, context.depth as usize);
        Ok(BackendChannel {
            shift: block_shift(backend.geometry().block_bytes),
            backend,
            compare_and_writes: CompareAndWriteQueue::new(participant),
            requests: Slab::with_capacity(entries),
            queue: VecDeque::with_capacity(depth),
            waiting: VecDeque::with_capacity(depth),
            endings: Vec::with_capacity(entries + 1),
            ready: VecDeque::with_capacity(depth + 1),
            is_broken: false,
        })
    }

    /// Returns the error with which a command is refused before its first operation. `Gone`: the backend has
    /// failed. `WriteProtected`: the disk is read-only. Other errors are the backend's. `None`: not refused.
    #[inline]
    fn refusal(&self, request: &Request) -> Option<DiskError> {
        if self.is_broken {
            return Some(DiskError::Gone);
        }
        if request.op.is_write() && self.backend.geometry().is_read_only {
            return Some(DiskError::WriteProtected);
        }
        self.backend.refusal(request)
    }

    /// Begins a request; a write to the guarded block waits instead. The slab must not be full.
    #[inline]
    fn begin(&mut self, request: Request) {
        if request.op.is_write() && !self.compare_and_writes.participant().enter(request.range) {
            self.waiting.push_back(request);
            return;
        }
        let Ok(slot) = self.requests.insert(request) else { panic!("begun without room") };
        self.step_new(slot);
    }

    fn step_new(&mut self, slot: Slot) {
        let Some(request) = self.requests.get_mut(slot) else { return };
        let (range, offset) = (request.range, request.range.offset(self.shift));
        match request.op {
            Op::Read | Op::Write { .. } => {
                request.state = BackendState::Transfer;
                let Some(buf) = request.buf.take() else {
                    return self.end(slot, Err(DiskError::Internal), None);
                };
                assert_eq!(buf.len() as u64, range.bytes(self.shift), "a buffer is as long as its range");
                let token = u64::from(slot.to_wire());
                if let Op::Write { fua } = request.op {
                    self.backend.write(token, offset, buf, fua);
                } else {
                    self.backend.read(token, offset, buf);
                }
            }
            Op::Flush => self.step_sync(slot),
            Op::WriteZeroes { deallocate, .. } => self.step_zeroing(slot, offset, deallocate),
            Op::Deallocate => self.step_zeroing(slot, offset, true),
            Op::Compare | Op::Verify => {
                let buf = request.buf.take();
                self.end(slot, Err(DiskError::NotSupported), buf);
            }
        }
    }

    fn step_sync(&mut self, slot: Slot) {
        let Some(request) = self.requests.get_mut(slot) else { return };
        request.state = BackendState::Sync;
        self.backend.sync(u64::from(slot.to_wire()));
    }

    fn step_zeroing(&mut self, slot: Slot, at: u64, gives_back: bool) {
        let Some(request) = self.requests.get_mut(slot) else { return };
        let zeroing = Zeroing {
            method: self.backend.zero_methods().best(gives_back),
            at,
            end: at + request.range.bytes(self.shift),
        };
        self.step_piece(slot, zeroing);
    }

    /// Starts the next piece of a zeroing. After the last, syncs for a durable request, or ends it.
    fn step_piece(&mut self, slot: Slot, zeroing: Zeroing) {
        let Some(request) = self.requests.get_mut(slot) else { return };
        request.state = BackendState::Zeroing(zeroing);
        let bytes = zeroing.piece_bytes(self.backend.zero_bytes_max(zeroing.method));
        if bytes == 0 {
            return if request.syncs_last() { self.step_sync(slot) } else { self.end(slot, Ok(()), None) };
        }
        self.backend.zero(u64::from(slot.to_wire()), zeroing.method, zeroing.at, bytes);
    }

    fn on_ended(&mut self, ended: Ended<M::Error>) {
        if ended.token == COMPARE_AND_WRITE_TOKEN {
            return self.on_compare_and_write(ended);
        }
        let slot = Slot::from_wire(u32::try_from(ended.token).unwrap_or(0));
        let Some(request) = self.requests.get_mut(slot) else { return };
        let error = ended.result.as_ref().err();
        match request.state {
            BackendState::Zeroing(_) if request.is_cancelled => {
                self.end(slot, Err(DiskError::Cancelled), None)
            }
            BackendState::Zeroing(zeroing) => match error {
                None => {
                    let done = zeroing.piece_bytes(self.backend.zero_bytes_max(zeroing.method));
                    self.step_piece(slot, Zeroing { at: zeroing.at + done, ..zeroing });
                }
                Some(error) => match self.backend.next_method(zeroing.method, error) {
                    Some(method) => self.step_piece(slot, Zeroing { method, ..zeroing }),
                    None => {
                        let error = self.backend.disk_error(error, true);
                        self.end(slot, Err(error), None);
                    }
                },
            },
            BackendState::New | BackendState::Transfer | BackendState::Sync => {
                let is_sync = matches!(request.state, BackendState::Sync);
                let is_write = !matches!(request.op, Op::Read);
                if let Some(error) = error.filter(|_| is_sync || request.is_durable()) {
                    self.backend.on_durable_error(is_sync, error);
                }
                let result = ended.result.map_err(|error| self.backend.disk_error(&error, is_write));
                self.end(slot, result, ended.buf);
            }
        }
    }

    fn end(&mut self, slot: Slot, result: Result<(), DiskError>, buf: Option<Buf>) {
        let Some(request) = self.requests.remove(slot) else { return };
        if request.op.is_write() {
            self.compare_and_writes.participant().leave();
        }
        // A cancelled request may be incomplete.
        let result = if request.is_cancelled { Err(DiskError::Cancelled) } else { result };
        self.ready.push_back(Done { token: request.token, result, buf });
    }

    /// Handles the end of the compare-and-write's read or write: starts the write after a read of the
    /// expected data, otherwise ends the compare-and-write.
    fn on_compare_and_write(&mut self, ended: Ended<M::Error>) {
        let pairs = &mut self.compare_and_writes;
        let is_write = pairs.phase() == Some(Phase::Writing);
        let result = match (ended.result, &ended.buf) {
            (Err(error), _) => {
                if is_write {
                    self.backend.on_durable_error(false, &error);
                }
                Err(self.backend.disk_error(&error, is_write))
            }
            (Ok(()), _) if is_write => Ok(()),
            (Ok(()), _) if pairs.is_cancelled() => Err(DiskError::Cancelled),
            (Ok(()), read) => match read.as_ref().and_then(|read| pairs.begin_write(read)) {
                Some((_, range, data)) => {
                    let offset = range.offset(self.shift);
                    return self.backend.write(COMPARE_AND_WRITE_TOKEN, offset, data, true);
                }
                None => Err(DiskError::CompareDiffers),
            },
        };
        if let Some(pair) = pairs.finish(ended.buf.filter(|_| is_write)) {
            self.ready.push_back(Done { token: pair.token, result, buf: pair.data });
        }
    }

    /// Answers the published guard once this core has no write to the guarded block in flight. Takes the
    /// guard for this core's next compare-and-write, and starts its read.
    #[inline]
    pub(crate) fn step_guard(&mut self) {
        if let Some(guarded) = self.compare_and_writes.participant().unanswered() {
            let has_block = |request: &Request| request.op.is_write() && guarded.is_in(request.range);
            if !self.requests.iter().any(|(_, request)| has_block(request)) {
                self.compare_and_writes.participant().answer(guarded);
            }
        }
        if self.compare_and_writes.is_empty() {
            return;
        }
        self.compare_and_writes.hold_next();
        if let Some((_, range, scratch)) = self.compare_and_writes.begin_read() {
            self.backend.read(COMPARE_AND_WRITE_TOKEN, range.offset(self.shift), scratch);
        }
    }

    /// Begins waiting requests until the slab is full. Writes that waited for the guard are begun first,
    /// because they are older.
    #[inline]
    fn step_waiting(&mut self) {
        for _ in 0..self.waiting.len() {
            if self.requests.is_full() {
                return;
            }
            let Some(request) = self.waiting.pop_front() else { break };
            self.begin(request);
        }
        while !self.requests.is_full() {
            let Some(request) = self.queue.pop_front() else { break };
            self.begin(request);
        }
    }

    /// Submits operations to the device. Ends all commands if the submission fails.
    #[inline]
    fn send(&mut self) {
        if self.backend.send().is_err() {
            self.is_broken = true;
            self.fail_all();
        }
    }

    /// Ends all commands with [`DiskError::Gone`] after the backend has failed. The outcome of operations in
    /// flight is unknown, and the backend keeps their buffers. The device may still execute the writes among
    /// them. Their ranges are recorded, so that no cache keeps these blocks.
    #[cold]
    fn fail_all(&mut self) {
        for index in 0..self.requests.capacity() {
            let Some(slot) = self.requests.slot_at(index) else { continue };
            if let Some(request) = self.requests.get(slot).filter(|request| request.op.is_write()) {
                self.compare_and_writes.participant().record_unfinished(request.range);
            }
            self.end(slot, Err(DiskError::Gone), None);
        }
        let is_written = self.compare_and_writes.phase() == Some(Phase::Writing);
        let gone = |token, buf| Done { token, result: Err(DiskError::Gone), buf };
        let queued = self.waiting.drain(..).chain(self.queue.drain(..));
        self.ready.extend(queued.map(|request| gone(request.token, request.buf)));
        // The compare-and-write that holds the guard ends too.
        let (held, pairs) = (self.compare_and_writes.finish(None), &mut self.compare_and_writes);
        if let Some(pair) = held.as_ref().filter(|_| is_written) {
            pairs.participant().record_unfinished(pair.range);
        }
        let queued = std::iter::from_fn(|| pairs.take_where(|_| true));
        self.ready.extend(held.into_iter().chain(queued).map(|pair| gone(pair.token, pair.data)));
    }

    /// Cancels the requests and compare-and-writes of `owner` without an operation at the backend.
    fn cancel_queued(&mut self, owner: Owner) {
        for queue in [&mut self.waiting, &mut self.queue] {
            for _ in 0..queue.len() {
                let Some(request) = queue.pop_front() else { break };
                if request.token.owner() == owner {
                    self.ready.push_back(Done::cancelled(request.token, request.buf));
                } else {
                    queue.push_back(request);
                }
            }
        }
        let is_own = |pair: &CompareAndWrite| pair.token.owner() == owner;
        while let Some(pair) = self.compare_and_writes.take_where(is_own) {
            self.ready.push_back(Done::cancelled(pair.token, pair.data));
        }
    }

    fn collect(&mut self) -> bool {
        let mut endings = std::mem::take(&mut self.endings);
        self.backend.collect(&mut |ended| endings.push(ended));
        let has_any = !endings.is_empty();
        endings.drain(..).for_each(|ended| self.on_ended(ended));
        self.endings = endings;
        has_any
    }
}

impl<M: AsyncBackend> DiskChannel for BackendChannel<M> {
    #[inline]
    fn geometry(&self) -> Geometry {
        self.backend.geometry()
    }

    fn submit(&mut self, token: Token, request: &IoRequest, buf: Option<Buf>) -> Option<Done> {
        let request = Request::new(token, request.op, request.range, buf);
        if let Some(error) = self.refusal(&request) {
            return Some(Done { token, result: Err(error), buf: request.buf });
        }
        if self.queue.is_empty() && !self.requests.is_full() {
            self.begin(request);
        } else {
            self.queue.push_back(request);
        }
        None
    }

    fn compare_and_write(
        &mut self,
        token: Token,
        range: BlockRange,
        expected: Buf,
        data: Buf,
    ) -> Option<Done> {
        assert_eq!(range.blocks, 1, "compare-and-write is of one block");
        assert_eq!(expected.len() as u64, range.bytes(self.shift), "what is expected is one block");
        assert_eq!(data.len(), expected.len(), "compared and written bytes are of one length");
        let request = Request::new(token, Op::Write { fua: true }, range, None);
        if let Some(error) = self.refusal(&request) {
            return Some(Done { token, result: Err(error), buf: Some(data) });
        }
        self.compare_and_writes.push(CompareAndWrite::new(token, range, expected, data, 0));
        None
    }

    fn poll(&mut self, _now: Nanos, done: &mut Vec<Done>) -> bool {
        self.send();
        let mut is_busy = self.collect();
        self.step_guard();
        self.step_waiting();
        // Submits the operations that the steps above have begun.
        self.send();
        is_busy |= !self.ready.is_empty() || !self.waiting.is_empty() || !self.compare_and_writes.is_empty();
        Done::give(&mut self.ready, done);
        is_busy
    }

    fn may_still_write(&self, range: BlockRange) -> bool {
        self.compare_and_writes.participant().may_still_write(range)
    }

    fn cancel_owner(&mut self, owner: Owner) -> usize {
        self.cancel_queued(owner);
        let mut count = Done::count_of(owner, &self.ready);
        for (slot, request) in self.requests.iter_mut() {
            if request.token.owner() == owner {
                request.is_cancelled = true;
                self.backend.cancel(u64::from(slot.to_wire()));
                count += 1;
            }
        }
        if self.compare_and_writes.cancel_active(owner) {
            self.backend.cancel(COMPARE_AND_WRITE_TOKEN);
            count += 1;
        }
        count
    }

    #[inline]
    fn in_flight(&self) -> usize {
        self.requests.len()
            + self.queue.len()
            + self.waiting.len()
            + self.compare_and_writes.len()
            + self.ready.len()
    }
}
