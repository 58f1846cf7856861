//! Commands of several disk steps: Compare, Verify, Copy, Deallocate (ranges), Flush of all namespaces.
//!
//! A disk with the ability (`DiskChannel::abilities`) executes a Compare, Verify or Copy itself; otherwise
//! the command becomes reads and writes. The choice is made once, when the command begins.
//!
//! One loop executes all of them: it computes the next [`Step`], submits the step, and passes its result to
//! the next. With a disk that completes in `submit` (RAM) the loop executes at most [`STEPS_PER_TURN`] steps.
//! Then the command waits for the next turn, so that a long command does not delay the core's other commands.

use nvme_spec::io::{CopyRangeFormat0, DsmRange};
use nvme_spec::sqe::NSID_ALL;
use nvme_spec::status::Status;
use nvme_spec::zerocopy::{FromBytes, IntoBytes};
use spindle_nvme_transport::Transport;
use spindle_nvme_transport::{ConnectionId, RequestId};
use spindle_reactor::mem::{Buf, Holder, Pool};
use spindle_target_disk::{BlockRange, DiskChannel, DiskError, Done, Op, Prepared, Sender, Token};

use super::io::check_range;
use super::request::{IoCommand, IoOp, Progress, Request, RequestState};
use super::{IoRole, Qpair, Role, Work, reads_into_pool, status_of, token};
use crate::controller::limits;
use crate::env::{Env, NO_DISK};
use crate::refusal::{Refusal, field};

/// Most steps of one command in a turn.
const STEPS_PER_TURN: u32 = 16;
/// Most bytes that Copy and Verify read or write in one step. Larger steps increase the throughput, and the
/// latency of other commands.
const PIECE_BYTES_MAX: u32 = 128 << 10;

/// Result of a step, and the buffer that the disk returned.
type Outcome = (Result<(), DiskError>, Option<Buf>);

enum Step {
    Submit {
        disk: usize,
        op: Op,
        range: BlockRange,
        buf: Option<Buf>,
    },
    /// Executed by the disk itself.
    Copy {
        disk: usize,
        from: BlockRange,
        to: u64,
        fua: bool,
    },
    /// Retry in a later turn: no memory is free for the write of a piece.
    Wait,
    Finish,
    Refuse(Refusal),
    Fail(DiskError),
}

/// Returns the command of a Flush with NSID FFFFFFFFh. `disk` and `block_shift` are not used.
pub(super) fn flush_all() -> IoCommand {
    let range = BlockRange { lba: 0, blocks: 0 };
    IoCommand {
        op: IoOp::FlushAll,
        is_fused: false,
        disk: NO_DISK,
        nsid: NSID_ALL,
        range,
        block_shift: 9,
        data_bytes: 0,
        hints: 0,
        client: 0,
        sender: Sender::HOST,
        registers: false,
        keeps: false,
    }
}

/// Most bytes of a piece: [`PIECE_BYTES_MAX`], or the largest buffer of the pool if that is smaller.
fn piece_bytes(pool: &Pool) -> u32 {
    PIECE_BYTES_MAX.min(pool.buffer_bytes_max())
}

/// True for an operation of several disk commands.
#[inline]
pub(super) fn is_compound(op: IoOp) -> bool {
    matches!(op, IoOp::FlushAll | IoOp::Deallocate { .. } | IoOp::Compare | IoOp::Verify | IoOp::Copy { .. })
}

/// True when the disk has a command for `op` and executes it itself.
pub(super) fn is_offloaded(disk: &dyn DiskChannel, op: IoOp) -> bool {
    match op {
        IoOp::Compare => disk.abilities().compare,
        IoOp::Verify => disk.abilities().verify,
        IoOp::Copy { .. } => disk.abilities().copy,
        IoOp::Read
        | IoOp::References
        | IoOp::Register
        | IoOp::Write { .. }
        | IoOp::Flush
        | IoOp::FlushAll
        | IoOp::WriteZeroes { .. }
        | IoOp::Deallocate { .. }
        | IoOp::Hint => false,
    }
}

/// Length in bytes of the buffer for the pieces of a Copy or Verify.
pub(super) fn first_piece_bytes(io: &IoCommand, pool: &Pool) -> u32 {
    let most = piece_bytes(pool);
    if io.op != IoOp::Verify {
        return most;
    }
    let bytes = u64::from(io.range.blocks) << io.block_shift;
    u32::try_from(bytes.min(u64::from(most))).unwrap_or(most)
}

impl<T: Transport> Qpair<T> {
    /// Executes steps until a step is in flight, the command waits or ends, or [`STEPS_PER_TURN`] are
    /// reached. `done`: outcome of the last step, if it is not handled yet.
    pub(super) fn step_compound(
        &mut self,
        id: ConnectionId,
        env: &mut Env,
        slot: RequestId,
        done: Option<Outcome>,
    ) {
        let mut done = done;
        for _ in 0..STEPS_PER_TURN {
            let Some(request) = self.requests.get_mut(slot) else { return };
            assert_eq!(request.state, RequestState::Executing, "a step of a request that is elsewhere");
            let Work::Io(io) = request.work else { return };
            let Role::Io(role) = &self.role else { return };
            let step = next_step(request, &io, role, env, done.take());
            match step {
                Step::Submit { disk, .. } | Step::Copy { disk, .. } => {
                    let Some(handle) = env.disk(disk) else {
                        return self.fail(env, slot, &io, DiskError::Gone);
                    };
                    match submit_step(handle, token(id, slot), &io, step) {
                        Some(ended) => done = Some((ended.result, ended.buf)),
                        None => return,
                    }
                }
                Step::Wait => return self.wait_for_next_step(slot),
                Step::Finish => {
                    let progress = (request.progress.index, request.progress.blocks);
                    self.count_io(env.core, &io);
                    self.count_unmap(env.core, &io, progress);
                    return self.finish(slot, Status::SUCCESS, 0, None);
                }
                Step::Refuse(refusal) => return self.refuse(env, slot, refusal),
                Step::Fail(error) => return self.fail(env, slot, &io, error),
            }
        }
        // Out of steps for this turn: the last outcome is kept for the next.
        self.save_outcome(env, slot, done);
    }

    /// Keeps the outcome of the last step of a turn and waits for the next turn. After an error that is not
    /// ignored, the command fails now.
    fn save_outcome(&mut self, env: &mut Env, slot: RequestId, done: Option<Outcome>) {
        let Some(request) = self.requests.get_mut(slot) else { return };
        let Work::Io(io) = request.work else { return };
        if let Some((result, buf)) = done {
            if let Err(error) = result
                && !is_hint_refused(&io, error)
            {
                return self.fail(env, slot, &io, error);
            }
            request.progress.has_outcome = true;
            // `buf`: pages that a RAM disk has pinned, or the submitted buffer. If it is `None`, `aux` is
            // unchanged.
            request.aux = buf.or(request.aux.take());
        }
        self.wait_for_next_step(slot);
    }

    pub(super) fn wait_for_next_step(&mut self, slot: RequestId) {
        if let Some(request) = self.requests.get_mut(slot) {
            let was_waiting = self.waiting.contains(&slot);
            request.state = RequestState::NeedStepBuffer;
            if !was_waiting {
                self.waiting.push_back(slot);
            }
        }
    }

    /// Resumes a compound command or a bulk transfer that waited between two steps.
    pub(super) fn resume_step(&mut self, id: ConnectionId, env: &mut Env, slot: RequestId) {
        let Some(request) = self.requests.get_mut(slot) else { return };
        assert_eq!(request.state, RequestState::NeedStepBuffer, "a step of a request that is elsewhere");
        if request.pieces.unit > 0 {
            return self.begin_bulk(id, env, slot);
        }
        request.state = RequestState::Executing;
        let done = if std::mem::take(&mut request.progress.has_outcome) {
            Some((Ok(()), request.aux.take()))
        } else {
            None
        };
        self.step_compound(id, env, slot, done);
    }

    fn fail(&mut self, env: &mut Env, slot: RequestId, io: &IoCommand, error: DiskError) {
        // Copy: lowest source range that was not copied completely, in dword 0 (NVM Command Set, Copy).
        let (IoOp::Copy { .. }, Some(request)) = (io.op, self.requests.get(slot)) else {
            return self.disk_failed(env, slot, io, error);
        };
        let index = request.progress.index;
        self.note_disk_error(env, io, error);
        self.refuse_with(env, slot, Refusal::of(status_of(error), None), u64::from(index));
    }
}

/// Submits a step to the disk. `Some`: the step completed at once; `None`: the step is in flight.
fn submit_step(disk: &mut dyn DiskChannel, token: Token, io: &IoCommand, step: Step) -> Option<Done> {
    match step {
        Step::Submit { op, range, buf, .. } => disk.submit(token, &io.request(op, range), buf),
        Step::Copy { from, to, fua, .. } => disk.copy(token, from, to, fua),
        Step::Wait | Step::Finish | Step::Refuse(_) | Step::Fail(_) => None,
    }
}

/// True when a disk without deallocation refuses a Deallocate. It is a hint, so the command succeeds.
fn is_hint_refused(io: &IoCommand, error: DiskError) -> bool {
    error == DiskError::NotSupported && matches!(io.op, IoOp::Deallocate { .. })
}

fn next_step(
    request: &mut Request,
    io: &IoCommand,
    role: &IoRole,
    env: &mut Env,
    done: Option<Outcome>,
) -> Step {
    match done {
        Some((Err(error), _)) if is_hint_refused(io, error) => {}
        // The disk had the ability when the command began. Internal Error has no DNR: a retry by the host
        // uses reads and writes.
        Some((Err(DiskError::NotSupported), _)) if request.progress.is_offloaded => {
            return Step::Fail(DiskError::Internal);
        }
        Some((Err(error), _)) => return Step::Fail(error),
        Some((Ok(()), buf)) => return after_step(request, io, role, env, buf),
        None => {}
    }
    if request.progress == Progress::default() {
        let disk = env.disk_ref(io.disk);
        request.progress.is_offloaded = disk.is_some_and(|disk| is_offloaded(disk, io.op));
        if request.progress.is_offloaded {
            request.aux = None;
        }
    }
    match io.op {
        IoOp::Compare => {
            let (op, buf) = if request.progress.is_offloaded {
                (Op::Compare, request.buf.take())
            } else {
                (Op::Read, request.aux.take())
            };
            Step::Submit { disk: io.disk, op, range: io.range, buf }
        }
        IoOp::Verify if request.progress.is_offloaded => {
            Step::Submit { disk: io.disk, op: Op::Verify, range: io.range, buf: None }
        }
        IoOp::Verify => verify_next(request, io, &env.pool, false),
        IoOp::Copy { ranges, fua } => copy_begin(request, io, env, ranges, fua),
        IoOp::Deallocate { ranges } => deallocate_begin(request, io, env, ranges),
        IoOp::FlushAll => flush_next(request, role),
        IoOp::Read
        | IoOp::References
        | IoOp::Register
        | IoOp::Write { .. }
        | IoOp::Flush
        | IoOp::WriteZeroes { .. }
        | IoOp::Hint => Step::Finish,
    }
}

/// Returns the step that follows a successful step; `buf` is the buffer that the disk returned.
fn after_step(request: &mut Request, io: &IoCommand, role: &IoRole, env: &mut Env, buf: Option<Buf>) -> Step {
    match io.op {
        IoOp::Compare | IoOp::Verify if request.progress.is_offloaded => Step::Finish,
        IoOp::Compare => compare_end(request, buf),
        IoOp::Verify => {
            request.aux = keep_piece(env, io, buf);
            verify_next(request, io, &env.pool, true)
        }
        IoOp::Copy { ranges, fua } => copy_done(request, io, env, buf, ranges, fua),
        IoOp::Deallocate { ranges } => deallocate_next(request, io, ranges),
        IoOp::FlushAll => flush_next(request, role),
        IoOp::Read
        | IoOp::References
        | IoOp::Register
        | IoOp::Write { .. }
        | IoOp::Flush
        | IoOp::WriteZeroes { .. }
        | IoOp::Hint => Step::Finish,
    }
}

/// Returns a buffer of the pool, for the next piece; drops memory of a disk that reads in place.
fn keep_piece(env: &Env, io: &IoCommand, buf: Option<Buf>) -> Option<Buf> {
    let is_pool = reads_into_pool(env, io.disk);
    buf.filter(|_| is_pool)
}

fn compare_end(request: &mut Request, read: Option<Buf>) -> Step {
    let (Some(expected), Some(read)) = (request.buf.take(), read) else {
        return Step::Fail(DiskError::Internal);
    };
    let mut at = 0;
    let mut is_same = expected.len() == read.len();
    for piece in expected.segments() {
        is_same = is_same && read.equals_at(at, piece);
        at += piece.len();
    }
    if is_same { Step::Finish } else { Step::Fail(DiskError::CompareDiffers) }
}

fn blocks_per_piece(io: &IoCommand, pool: &Pool) -> u32 {
    (piece_bytes(pool) >> io.block_shift).max(1)
}

fn verify_next(request: &mut Request, io: &IoCommand, pool: &Pool, is_piece_done: bool) -> Step {
    let Progress { mut blocks, piece, .. } = request.progress;
    if is_piece_done {
        blocks += u64::from(piece);
    }
    let left = u64::from(io.range.blocks).saturating_sub(blocks);
    let piece = u32::try_from(left.min(u64::from(blocks_per_piece(io, pool)))).unwrap_or(0);
    request.progress = Progress { blocks, piece, ..request.progress };
    if piece == 0 {
        return Step::Finish;
    }
    let range = BlockRange { lba: io.range.lba + blocks, blocks: piece };
    Step::Submit {
        disk: io.disk,
        op: Op::Read,
        range,
        buf: set_buf_len(request.aux.take(), piece << io.block_shift),
    }
}

/// Sets the buffer's length to that of the piece: the last piece may be shorter.
fn set_buf_len(buf: Option<Buf>, bytes: u32) -> Option<Buf> {
    buf.map(|mut buf| {
        buf.set_len(bytes);
        buf
    })
}

fn flush_next(request: &mut Request, role: &IoRole) -> Step {
    let index = usize::try_from(request.progress.index).unwrap_or(usize::MAX);
    let next = role
        .subsystem
        .namespaces
        .iter()
        .enumerate()
        .skip(index)
        .find_map(|(at, ns)| Some((at, ns.as_ref()?)));
    let Some((at, namespace)) = next else { return Step::Finish };
    request.progress.index = u32::try_from(at + 1).unwrap_or(u32::MAX);
    let range = BlockRange { lba: 0, blocks: 0 };
    Step::Submit { disk: Env::disk_index(namespace.disk), op: Op::Flush, range, buf: None }
}

/// Returns entry `index` of the list of ranges in the request's buffer; all zero without a buffer.
fn list_entry<E: FromBytes + IntoBytes>(request: &Request, index: u32) -> E {
    let mut entry = E::new_zeroed();
    if let Some(buf) = &request.buf {
        buf.copy_out(index as usize * size_of::<E>(), entry.as_mut_bytes());
    }
    entry
}

fn dsm_range(request: &Request, index: u32) -> BlockRange {
    let range: DsmRange = list_entry(request, index);
    BlockRange { lba: range.slba.get(), blocks: range.blocks.get() }
}

fn deallocate_begin(request: &mut Request, io: &IoCommand, env: &Env, ranges: u16) -> Step {
    if request.progress.index > 0 {
        return deallocate_next(request, io, ranges);
    }
    let Some(disk) = env.disk_ref(io.disk) else {
        return Step::Fail(DiskError::Gone);
    };
    let geometry = disk.geometry();
    for index in 0..u32::from(ranges) {
        if let Err(refusal) = check_range(dsm_range(request, index), &geometry) {
            return Step::Refuse(refusal);
        }
    }
    if !geometry.can_deallocate {
        return Step::Finish;
    }
    deallocate_next(request, io, ranges)
}

fn deallocate_next(request: &mut Request, io: &IoCommand, ranges: u16) -> Step {
    while request.progress.index < u32::from(ranges) {
        let range = dsm_range(request, request.progress.index);
        request.progress.index += 1;
        request.progress.blocks += u64::from(range.blocks);
        if range.blocks > 0 {
            return Step::Submit { disk: io.disk, op: Op::Deallocate, range, buf: None };
        }
    }
    Step::Finish
}

fn copy_source(request: &Request, index: u32) -> BlockRange {
    let range: CopyRangeFormat0 = list_entry(request, index);
    BlockRange { lba: range.slba.get(), blocks: u32::from(range.nlb_z.get()) + 1 }
}

/// Sum of the blocks of the source ranges before `index`.
fn copied_before(request: &Request, index: u32) -> u64 {
    (0..index).map(|index| u64::from(copy_source(request, index).blocks)).sum()
}

fn copy_begin(request: &mut Request, io: &IoCommand, env: &mut Env, ranges: u16, fua: bool) -> Step {
    if !request.progress.is_offloaded && request.progress != Progress::default() {
        // The command waited for memory between the read of a piece and its write.
        return match request.aux.take() {
            Some(read) => copy_write(request, io, env, read, fua),
            None => copy_read(request, io, &env.pool, None, ranges),
        };
    }
    let Some(disk) = env.disk_ref(io.disk) else {
        return Step::Fail(DiskError::Gone);
    };
    let geometry = disk.geometry();
    let total = copied_before(request, u32::from(ranges));
    let too_much = Refusal::at(Status::COMMAND_SIZE_LIMIT_EXCEEDED, field::CDW12);
    let (transfer_bytes, block_bytes) = (env.snapshot.limits.transfer_bytes, geometry.block_bytes);
    if total > u64::from(limits::copy_blocks_max(transfer_bytes, block_bytes)) {
        return Step::Refuse(too_much);
    }
    let target = BlockRange { lba: io.range.lba, blocks: u32::try_from(total).unwrap_or(u32::MAX) };
    if let Err(refusal) = check_range(target, &geometry) {
        return Step::Refuse(refusal);
    }
    for index in 0..u32::from(ranges) {
        let source = copy_source(request, index);
        if source.blocks > u32::from(limits::copy_range_blocks_max(transfer_bytes, block_bytes)) {
            return Step::Refuse(too_much);
        }
        if let Err(refusal) = check_range(source, &geometry) {
            return Step::Refuse(refusal);
        }
        let is_apart =
            source.lba + u64::from(source.blocks) <= target.lba || target.lba + total <= source.lba;
        if !is_apart {
            return Step::Refuse(Refusal::at(Status::OVERLAPPING_IO_RANGE, field::CDW10));
        }
    }
    if request.progress.is_offloaded {
        return copy_range(request, io, ranges, fua);
    }
    let piece = request.aux.take();
    copy_read(request, io, &env.pool, piece, ranges)
}

/// Returns the step in which the disk copies the next source range; `Finish` after the last. One range at a
/// time, since the completion reports the range that failed.
fn copy_range(request: &Request, io: &IoCommand, ranges: u16, fua: bool) -> Step {
    let index = request.progress.index;
    if index >= u32::from(ranges) {
        return Step::Finish;
    }
    let to = io.range.lba + copied_before(request, index);
    Step::Copy { disk: io.disk, from: copy_source(request, index), to, fua }
}

/// Returns the read of the next piece; `Finish` after the last.
fn copy_read(request: &mut Request, io: &IoCommand, pool: &Pool, piece: Option<Buf>, ranges: u16) -> Step {
    if request.progress.index >= u32::from(ranges) {
        return Step::Finish;
    }
    let source = copy_source(request, request.progress.index);
    let left = u64::from(source.blocks).saturating_sub(request.progress.blocks);
    let blocks = u32::try_from(left.min(u64::from(blocks_per_piece(io, pool)))).unwrap_or(0);
    request.progress.piece = blocks;
    request.progress.is_writing = false;
    let range = BlockRange { lba: source.lba + request.progress.blocks, blocks };
    Step::Submit { disk: io.disk, op: Op::Read, range, buf: set_buf_len(piece, blocks << io.block_shift) }
}

/// Returns the step that follows a successful step of a Copy: the write of the piece that was read, or the
/// read of the next piece.
fn copy_done(
    request: &mut Request,
    io: &IoCommand,
    env: &mut Env,
    buf: Option<Buf>,
    ranges: u16,
    fua: bool,
) -> Step {
    if request.progress.is_offloaded {
        request.progress.index += 1;
        return copy_range(request, io, ranges, fua);
    }
    if !request.progress.is_writing {
        request.progress.is_writing = true;
        return match buf {
            Some(read) => copy_write(request, io, env, read, fua),
            None => Step::Fail(DiskError::Internal),
        };
    }
    request.progress.blocks += u64::from(request.progress.piece);
    if request.progress.blocks >= u64::from(copy_source(request, request.progress.index).blocks) {
        request.progress.index += 1;
        request.progress.blocks = 0;
    }
    request.progress.is_writing = false;
    let piece = keep_piece(env, io, buf);
    copy_read(request, io, &env.pool, piece, ranges)
}

fn copy_write(request: &mut Request, io: &IoCommand, env: &mut Env, read: Buf, fua: bool) -> Step {
    let before = copied_before(request, request.progress.index) + request.progress.blocks;
    let range = BlockRange { lba: io.range.lba + before, blocks: request.progress.piece };
    let Some(disk) = env.disks.get_mut(io.disk).and_then(|disk| disk.as_deref_mut()) else {
        return Step::Fail(DiskError::Gone);
    };
    let share = env.pool.share(Holder::host(io.client));
    let buf = match disk.prepare(&io.request(Op::Write { fua }, range), None) {
        Prepared::Pool if read.is_writable() => {
            return Step::Submit { disk: io.disk, op: Op::Write { fua }, range, buf: Some(read) };
        }
        Prepared::Pool => share.take_more(range.blocks << io.block_shift),
        Prepared::Fill(buf) => Some(buf),
        Prepared::Wait | Prepared::Later | Prepared::Ready(_) => None,
    };
    let Some(mut buf) = buf else { return wait_to_write(request, read) };
    copy_bytes(&read, &mut buf);
    Step::Submit { disk: io.disk, op: Op::Write { fua }, range, buf: Some(buf) }
}

/// Waits for the memory of a write. A pool buffer is kept in `aux`. Pages that the read has pinned are
/// dropped and read again later: they may be the disk memory for which this command waits.
fn wait_to_write(request: &mut Request, read: Buf) -> Step {
    if read.is_writable() {
        request.aux = Some(read);
    } else {
        request.progress.is_writing = false;
    }
    Step::Wait
}

fn copy_bytes(from: &Buf, to: &mut Buf) {
    let mut at = 0;
    for piece in from.segments() {
        to.copy_in(at, piece);
        at += piece.len();
    }
}
