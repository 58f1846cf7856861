//! [`FileCore`]: one core's handle on a file disk: its ring, its requests, its turn.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::io::Errno;
use spindle_reactor::mem::{Buf, Pool};
use spindle_reactor::slab::{Slab, Slot};
use spindle_reactor::uring::{Completion, FileIndex, FileRing, Full};

use super::request::{Request, State, Way, Zeroing, is_medium_error};
use super::swap::{Gate, Swap, SwapState};
use super::{Shared, disk_error, guard};
use crate::shape::block_shift;
use crate::{BlockRange, CoreContext, Disk, DiskError, Done, Geometry, Op, OpenError, Token};

/// Most requests of a core in its ring: as many as a queue of an NVMe drive usually takes.
pub(crate) const REQUESTS_MAX: u32 = 1024;

/// The ring's name for the compare-and-write; requests have their slots, which are 32 bits.
const SWAP_TOKEN: u64 = u64::MAX;

/// One core's handle. The ring comes first: its drop waits for what is in flight, and the gate's must come
/// after that.
pub(super) struct FileCore {
    ring: FileRing,
    file: FileIndex,
    gate: Gate,
    shared: Arc<Shared>,
    pool: Pool,
    shift: u32,
    /// Begun: each has one entry in the ring.
    requests: Slab<Request>,
    /// No room in the ring yet, in order.
    queue: VecDeque<Request>,
    /// Writes that wait for the guard, in order.
    waiting: VecDeque<Request>,
    /// What the ring gave back; empty between polls.
    completions: Vec<Completion>,
    /// Ended, not yet told.
    ready: VecDeque<Done>,
    /// The ring does not work any more.
    is_broken: bool,
}

impl FileCore {
    pub(super) fn open(shared: Arc<Shared>, context: &CoreContext) -> Result<FileCore, OpenError> {
        let system = |verb: &str| {
            let (disk, verb) = (shared.name.clone(), format!("{verb} {}", shared.path.display()));
            move |source| OpenError::System { disk, verb, source }
        };
        let entries = context.depth.clamp(1, REQUESTS_MAX);
        // One entry more, for the compare-and-write.
        let mut ring = FileRing::new(entries + 1, &context.pool).map_err(system("set up io_uring for"))?;
        let fd = shared.file.try_clone().map_err(system("take another descriptor of"))?;
        let file = ring.register_file(fd.into());
        let Some(member) = shared.guard.join() else {
            return Err(OpenError::Setting {
                disk: shared.name.clone(),
                field: "cores",
                value: (guard::CORES_MAX + 1).to_string(),
                allowed: format!("at most {} cores can have one file disk open", guard::CORES_MAX),
            });
        };
        let (entries, depth) = (entries as usize, context.depth as usize);
        Ok(FileCore {
            ring,
            file,
            gate: Gate::new(member),
            pool: context.pool.clone(),
            shift: block_shift(shared.block_bytes),
            shared,
            requests: Slab::with_capacity(entries),
            queue: VecDeque::with_capacity(depth),
            waiting: VecDeque::with_capacity(depth),
            completions: Vec::with_capacity(entries + 1),
            ready: VecDeque::with_capacity(depth + 1),
            is_broken: false,
        })
    }

    /// Why a command ends before it begins.
    #[inline]
    fn refusal(&self, request: &Request) -> Option<DiskError> {
        if self.is_broken {
            return Some(DiskError::Gone);
        }
        if request.is_write() && self.shared.is_read_only {
            return Some(DiskError::WriteProtected);
        }
        if request.is_durable() && self.shared.has_lost_data.load(Ordering::Acquire) {
            return Some(DiskError::MediaWrite);
        }
        None
    }

    /// Begin a request for which the slab has room.
    #[inline]
    fn begin(&mut self, request: Request) {
        if request.is_write() && !self.gate.member.enter(request.range) {
            self.waiting.push_back(request);
            return;
        }
        let Ok(slot) = self.requests.insert(request) else { panic!("begun without room") };
        self.step_new(slot);
    }

    /// The first entry of a request in the ring.
    fn step_new(&mut self, slot: Slot) {
        let Some(request) = self.requests.get_mut(slot) else { return };
        let (range, offset) = (request.range, request.range.offset(self.shift));
        match request.op {
            Op::Read | Op::Write { .. } => {
                request.state = State::Transfer;
                let Some(buf) = request.buf.take() else {
                    return self.end(slot, Err(DiskError::Internal), None);
                };
                assert_eq!(buf.len() as u64, range.bytes(self.shift), "a buffer is as long as its range");
                let token = u64::from(slot.to_wire());
                took(match request.op {
                    Op::Write { fua } => self.ring.write(token, self.file, offset, buf, fua),
                    Op::Read | Op::Flush | Op::WriteZeroes { .. } | Op::Deallocate => {
                        self.ring.read(token, self.file, offset, buf)
                    }
                });
            }
            Op::Flush => self.step_sync(slot),
            Op::WriteZeroes { deallocate, .. } => self.step_zeroing(slot, offset, deallocate),
            Op::Deallocate => self.step_zeroing(slot, offset, true),
        }
    }

    fn step_sync(&mut self, slot: Slot) {
        let Some(request) = self.requests.get_mut(slot) else { return };
        request.state = State::Sync;
        took(self.ring.fsync(u64::from(slot.to_wire()), self.file, true));
    }

    fn step_zeroing(&mut self, slot: Slot, at: u64, gives_back: bool) {
        let Some(request) = self.requests.get_mut(slot) else { return };
        let zeroing = Zeroing {
            way: Way::best(&self.shared, gives_back),
            at,
            end: at + request.range.bytes(self.shift),
        };
        self.step_piece(slot, zeroing);
    }

    /// The next piece of a zeroing, or what comes after the last.
    fn step_piece(&mut self, slot: Slot, zeroing: Zeroing) {
        let Some(request) = self.requests.get_mut(slot) else { return };
        request.state = State::Zeroing(zeroing);
        let bytes = zeroing.piece_bytes();
        if bytes == 0 {
            return if request.syncs_last() { self.step_sync(slot) } else { self.end(slot, Ok(()), None) };
        }
        let token = u64::from(slot.to_wire());
        match zeroing.way.flags() {
            Some(flags) => took(self.ring.fallocate(token, self.file, flags, zeroing.at, bytes)),
            None => {
                // At most WRITE_PIECE_BYTES.
                let zeroes = Buf::zeroes(u32::try_from(bytes).unwrap_or(0));
                took(self.ring.write(token, self.file, zeroing.at, zeroes, false));
            }
        }
    }

    fn on_completion(&mut self, completion: Completion) {
        if completion.token == SWAP_TOKEN {
            return self.on_swap(completion);
        }
        let slot = Slot::from_wire(u32::try_from(completion.token).unwrap_or(0));
        let Some(request) = self.requests.get_mut(slot) else { return };
        let error = completion.result.as_ref().err();
        match request.state {
            State::Zeroing(zeroing) => match error {
                None => {
                    let at = zeroing.at + zeroing.piece_bytes();
                    self.step_piece(slot, Zeroing { at, ..zeroing });
                }
                Some(error) => {
                    let next = match Errno::from_io_error(error) {
                        Some(Errno::OPNOTSUPP) => zeroing.way.refused(&self.shared),
                        Some(Errno::INVAL) => zeroing.way.humbler(),
                        Some(_) | None => None,
                    };
                    match next {
                        Some(way) => self.step_piece(slot, Zeroing { way, ..zeroing }),
                        None => self.end(slot, Err(disk_error(error, true)), None),
                    }
                }
            },
            State::New | State::Transfer | State::Sync => {
                if error.is_some_and(|error| request.lost_data(error)) {
                    self.shared.on_sync_error();
                }
                let is_write = !matches!(request.op, Op::Read);
                self.end(
                    slot,
                    completion.result.map_err(|error| disk_error(&error, is_write)),
                    completion.buf,
                );
            }
        }
    }

    fn end(&mut self, slot: Slot, result: Result<(), DiskError>, buf: Option<Buf>) {
        let Some(request) = self.requests.remove(slot) else { return };
        if request.is_write() {
            self.gate.member.leave();
        }
        self.ready.push_back(Done { token: request.token, result, buf });
    }

    /// The block of the compare-and-write was read or written.
    fn on_swap(&mut self, completion: Completion) {
        let Some(active) = &mut self.gate.active else { return };
        let result = match active.state {
            SwapState::Clearing => panic!("nothing of this compare-and-write is in the ring"),
            SwapState::Reading => match (completion.result, &completion.buf) {
                (Err(error), _) => Err(disk_error(&error, false)),
                (Ok(()), Some(buf))
                    if buf.as_slice().is_some_and(|now| active.swap.expected.equals_at(0, now)) =>
                {
                    let offset = active.swap.range.offset(self.shift);
                    let Some(data) = active.swap.data.take() else {
                        panic!("the data are here until they are written")
                    };
                    active.state = SwapState::Writing;
                    return took(self.ring.write(SWAP_TOKEN, self.file, offset, data, true));
                }
                (Ok(()), _) => Err(DiskError::CompareDiffers),
            },
            SwapState::Writing => {
                active.swap.data = completion.buf;
                if completion.result.as_ref().is_err_and(is_medium_error) {
                    self.shared.on_sync_error();
                }
                completion.result.map_err(|error| disk_error(&error, true))
            }
        };
        if let Some(swap) = self.gate.finish() {
            self.ready.push_back(Done { token: swap.token, result, buf: swap.data });
        }
    }

    /// What the guard has for this core to do.
    #[inline]
    pub(super) fn step_gate(&mut self) {
        if let Some(guarded) = self.gate.member.unanswered() {
            let has_block = |request: &Request| request.is_write() && guarded.is_in(request.range);
            if !self.requests.iter().any(|(_, request)| has_block(request)) {
                self.gate.member.answer(guarded);
            }
        }
        if self.gate.len() == 0 {
            return;
        }
        self.gate.step_queued(&self.pool);
        if let Some((range, scratch)) = self.gate.step_clearing() {
            took(self.ring.read(SWAP_TOKEN, self.file, range.offset(self.shift), scratch));
        }
    }

    /// Begin what waits, as far as there is room: those that the guard held up first, they are older.
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

    /// Send what is queued in the ring to the kernel.
    #[inline]
    fn send(&mut self) {
        if self.ring.submit().is_err() {
            self.is_broken = true;
            self.fail_all();
        }
    }

    /// The ring is broken. Of what is in flight nothing is known, and nothing will come back; the ring keeps
    /// the buffers.
    #[cold]
    fn fail_all(&mut self) {
        for index in 0..self.requests.capacity() {
            if let Some(slot) = self.requests.slot_at(index) {
                self.end(slot, Err(DiskError::Gone), None);
            }
        }
        let gone = |token, buf| Done { token, result: Err(DiskError::Gone), buf };
        let queued = self.waiting.drain(..).chain(self.queue.drain(..));
        self.ready.extend(queued.map(|request| gone(request.token, request.buf)));
        self.ready.extend(self.gate.drain().map(|swap| gone(swap.token, swap.data)));
    }

    fn collect(&mut self) -> bool {
        let mut completions = std::mem::take(&mut self.completions);
        self.ring.poll(|completion| completions.push(completion));
        let has_any = !completions.is_empty();
        completions.drain(..).for_each(|completion| self.on_completion(completion));
        self.completions = completions;
        has_any
    }
}

/// The ring has an entry for each request in the slab, and one for the compare-and-write, so it is never
/// full.
#[inline]
fn took<B>(result: Result<(), Full<B>>) {
    assert!(result.is_ok(), "the ring is full although each of its users has one entry");
}

impl Disk for FileCore {
    #[inline]
    fn geometry(&self) -> Geometry {
        self.shared.geometry()
    }

    fn submit(&mut self, token: Token, op: Op, range: BlockRange, buf: Option<Buf>) -> Option<Done> {
        let request = Request::new(token, op, range, buf);
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
        self.gate.push(Swap { token, range, expected, data: Some(data) });
        None
    }

    fn poll(&mut self, done: &mut Vec<Done>) -> bool {
        self.send();
        let mut is_busy = self.collect();
        self.step_gate();
        self.step_waiting();
        // The next steps of what came back leave in this turn.
        self.send();
        is_busy |= !self.ready.is_empty() || !self.waiting.is_empty() || self.gate.len() > 0;
        while done.len() < done.capacity() {
            let Some(ready) = self.ready.pop_front() else { break };
            done.push(ready);
        }
        is_busy
    }

    #[inline]
    fn in_flight(&self) -> usize {
        self.requests.len() + self.queue.len() + self.waiting.len() + self.gate.len() + self.ready.len()
    }
}
