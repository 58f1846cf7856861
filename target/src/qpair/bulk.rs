//! Bulk transfers: a large Read or Write in pieces, so that the disk and the network work at the same time.
//!
//! ```text
//!   read:   free buffer ──> disk ──> send_part ── SentPart ──> free      the reply follows the last part
//!   write:  free buffer ──> fetch_part ── FetchedPart ──> (ready) ──> disk ──> free      then the reply
//! ```
//!
//! A bulk transfer has at most two buffers of a piece each, and at most one piece at the disk. It begins with
//! one buffer. It takes the second when another piece can begin, the share of its connection allows it, and
//! no command waits for memory. With one buffer, disk and network alternate. A transfer never waits for a
//! buffer while it has one.
//!
//! After a piece fails or the command is aborted, no further piece begins. The reply is sent once the disk
//! and the transport have returned their buffers.
//!
//! Reads and Writes of more than `bulk_unit` bytes are split if they are not fused and their data is not in
//! the capsule. The transport must support parts (`moves_parts`). The disk must use buffers of the pool and
//! have an atomic write unit of one block: pieces would break a larger unit.

use nvme_spec::status::Status;
use spindle_nvme_transport::{ConnectionId, RequestId};
use spindle_nvme_transport::{DataPointer, Transport};
use spindle_reactor::mem::Buf;
use spindle_target_disk::{BlockRange, DiskChannel, DiskError, Op};

use super::request::{IoCommand, IoOp, Request, RequestState};
use super::{Qpair, Role, Work, status_of, token};
use crate::env::Env;
use crate::refusal::Refusal;

/// Most buffers of a bulk transfer: one at the disk, one on the wire.
const BUFFERS_MAX: u8 = 2;

enum Step {
    /// Submit a piece to the disk.
    Submit { range: BlockRange, buf: Buf },
    /// Fetch the piece of the host's data at `offset`, in bytes.
    Fetch { offset: u32, buf: Buf },
    /// Wait for the disk or the transport.
    Wait,
    /// Wait for a buffer of the pool: the command has none.
    WaitForMemory,
    /// All pieces are done, or the transfer has failed or was aborted: reply.
    End,
}

/// Length in bytes of a piece of a Read or Write of more than `unit` bytes: `unit` rounded down to whole
/// blocks. 0: the command is not split.
#[cold]
pub(super) fn piece_unit(disk: &dyn DiskChannel, pointer: DataPointer, io: &IoCommand, unit: u32) -> u32 {
    let is_at_host = matches!(pointer, DataPointer::Host { .. });
    let is_atomic = io.is_fused || disk.geometry().atomic_blocks > 1;
    if is_at_host && !is_atomic { unit >> io.block_shift << io.block_shift } else { 0 }
}

impl<T: Transport> Qpair<T> {
    /// Begins a bulk transfer, or resumes one that waited for a buffer.
    pub(super) fn begin_bulk(&mut self, id: ConnectionId, env: &mut Env, slot: RequestId) {
        let Some(request) = self.requests.get_mut(slot) else { return };
        request.state = RequestState::Bulk;
        self.advance_bulk(id, env, slot);
    }

    /// Begins all pieces that can begin; replies after the last piece.
    fn advance_bulk(&mut self, id: ConnectionId, env: &mut Env, slot: RequestId) {
        // Bounded: each round begins a piece at the disk or the transport, or returns.
        while matches!(self.role, Role::Io(_)) {
            let may_take = self.waiting.is_empty();
            let Some(request) = self.requests.get_mut(slot) else { return };
            assert_eq!(request.state, RequestState::Bulk, "a piece of a request that is elsewhere");
            let Work::Io(io) = request.work else { return };
            match next_step(request, &io, env, may_take) {
                Step::Submit { range, buf } => self.submit_piece(id, env, slot, &io, range, buf),
                Step::Fetch { offset, buf } => {
                    let cid = request.cid();
                    self.fetches.begin();
                    self.transport.fetch_part(slot, cid, offset, buf);
                }
                Step::Wait => return,
                Step::WaitForMemory => return self.wait_for_next_step(slot),
                Step::End => return self.end_bulk(env, slot, &io),
            }
        }
    }

    fn end_bulk(&mut self, env: &mut Env, slot: RequestId, io: &IoCommand) {
        match self.requests.get(slot).and_then(|request| request.abort_status) {
            Some(status) => self.refuse(env, slot, Refusal::of(status, None)),
            None => {
                self.count_io(env.core, io);
                self.finish(slot, Status::SUCCESS, u64::from(io.keeps), None);
            }
        }
    }

    fn submit_piece(
        &mut self,
        id: ConnectionId,
        env: &mut Env,
        slot: RequestId,
        io: &IoCommand,
        range: BlockRange,
        buf: Buf,
    ) {
        let op = if let IoOp::Write { fua } = io.op { Op::Write { fua } } else { Op::Read };
        match env.disk(io.disk) {
            None => self.end_piece(env, slot, Err(DiskError::Gone), None),
            Some(disk) => match disk.submit(token(id, slot), &io.request(op, range), Some(buf)) {
                Some(done) => self.end_piece(env, slot, done.result, done.buf),
                None => self.has_submitted = true,
            },
        }
    }

    /// Handles a piece that the disk completed after `submit` returned, then begins the next pieces.
    pub(super) fn on_piece_done(
        &mut self,
        id: ConnectionId,
        env: &mut Env,
        slot: RequestId,
        result: Result<(), DiskError>,
        buf: Option<Buf>,
    ) {
        self.end_piece(env, slot, result, buf);
        self.advance_bulk(id, env, slot);
    }

    /// Handles the completion of a piece by the disk. Read: sends the data, unless the command is aborted.
    /// Write: keeps the buffer for the next piece. An error is logged and becomes the abort status.
    fn end_piece(&mut self, env: &mut Env, slot: RequestId, result: Result<(), DiskError>, buf: Option<Buf>) {
        let Some(request) = self.requests.get_mut(slot) else { return };
        let Work::Io(io) = request.work else { return };
        let offset = request.pieces.at_disk.take();
        assert!(offset.is_some(), "a disk completed a piece twice");
        let (Some(offset), Role::Io(_)) = (offset, &self.role) else { return };
        let bytes = piece_bytes(request, &io, offset);
        let result = match (io.op, result, buf) {
            (_, Err(error), _) => Err(error),
            (IoOp::Read, Ok(()), None) => Err(DiskError::Internal),
            (IoOp::Read, Ok(()), Some(buf)) => {
                request.pieces.done += bytes;
                if request.abort_status.is_none() {
                    request.pieces.on_wire += 1;
                    let cid = request.cid();
                    self.transport.send_part(slot, cid, offset, buf);
                }
                Ok(())
            }
            (_, Ok(()), buf) => {
                request.pieces.done += bytes;
                request.buf = buf;
                Ok(())
            }
        };
        if let Err(error) = result {
            request.abort_status.get_or_insert(status_of(error));
            let range = range_of(&io, offset, bytes);
            self.note_disk_error(env, &IoCommand { range, ..io }, error);
        }
    }

    /// Handles the end of the fetch of a piece: the piece is ready for the disk, or the error in `result`
    /// becomes the abort status.
    pub(super) fn on_fetched_part(
        &mut self,
        id: ConnectionId,
        env: &mut Env,
        slot: RequestId,
        offset: u32,
        buf: Buf,
        result: Result<(), Status>,
    ) {
        let Some(request) = self.requests.get_mut(slot) else { return };
        assert_eq!(request.state, RequestState::Bulk, "a piece for a request that did not ask for it");
        self.fetches.end();
        request.pieces.on_wire -= 1;
        if matches!(self.role, Role::Closing) {
            return; // no new piece while closing; the buffer is freed
        }
        match result {
            Ok(()) => {
                assert!(request.pieces.ready.is_none(), "more pieces than buffers");
                request.pieces.ready = Some(offset);
                request.aux = Some(buf);
            }
            Err(status) => {
                request.abort_status.get_or_insert(status);
            }
        }
        self.advance_bulk(id, env, slot);
    }

    /// Keeps the buffer of a sent piece for the next piece; frees it if the reply was queued meanwhile.
    pub(super) fn on_sent_part(&mut self, id: ConnectionId, env: &mut Env, slot: RequestId, buf: Buf) {
        let Some(request) = self.requests.get_mut(slot) else { return };
        request.pieces.on_wire -= 1;
        if request.state == RequestState::Bulk {
            request.buf = Some(buf);
            self.advance_bulk(id, env, slot);
        }
    }

    /// Aborts a bulk transfer. True: the transfer ends without effect once its pieces in flight have
    /// completed. False: the Write continues, since a piece was already submitted to the disk.
    pub(super) fn abort_bulk(&mut self, slot: RequestId) -> bool {
        let Some(request) = self.requests.get_mut(slot) else { return false };
        let Work::Io(io) = request.work else { return false };
        let has_effect = request.pieces.done > 0 || request.pieces.at_disk.is_some();
        if io.op != IoOp::Read && has_effect {
            return false;
        }
        request.abort_status.get_or_insert(Status::ABORTED_BY_REQUEST);
        true
    }
}

/// Returns the next step of a bulk transfer with the buffer for it. `may_take`: no command waits for memory,
/// so a second buffer may be taken.
fn next_step(request: &mut Request, io: &IoCommand, env: &Env, may_take: bool) -> Step {
    let pieces = request.pieces;
    let is_disk_free = pieces.at_disk.is_none();
    if request.abort_status.is_some() {
        (request.buf, request.aux, request.pieces.ready) = (None, None, None);
        return if is_disk_free && pieces.on_wire == 0 { Step::End } else { Step::Wait };
    }
    if is_disk_free && let (Some(offset), Some(buf)) = (pieces.ready, request.aux.take()) {
        request.pieces.ready = None;
        request.pieces.at_disk = Some(offset);
        return Step::Submit { range: range_of(io, offset, piece_bytes(request, io, offset)), buf };
    }
    if pieces.done == io.data_bytes {
        return Step::End;
    }
    if pieces.next == io.data_bytes {
        request.buf = None;
        return Step::Wait;
    }
    let is_read = io.op == IoOp::Read;
    if is_read && !is_disk_free {
        return Step::Wait;
    }
    let (offset, bytes) = (pieces.next, piece_bytes(request, io, pieces.next));
    let held = pieces.on_wire + u8::from(!is_disk_free) + u8::from(pieces.ready.is_some());
    let buf = match request.buf.take() {
        Some(buf) => Some(buf),
        None if held == 0 => match env.share(io.client).take_more(bytes) {
            None => return Step::WaitForMemory,
            some => some,
        },
        None if held < BUFFERS_MAX && may_take => env.share(io.client).take(bytes),
        None => None,
    };
    let Some(mut buf) = buf else { return Step::Wait };
    if buf.len() != bytes as usize {
        buf.set_len(bytes); // the last piece is shorter
    }
    request.pieces.next += bytes;
    if is_read {
        request.pieces.at_disk = Some(offset);
        return Step::Submit { range: range_of(io, offset, bytes), buf };
    }
    request.pieces.on_wire += 1;
    Step::Fetch { offset, buf }
}

fn piece_bytes(request: &Request, io: &IoCommand, offset: u32) -> u32 {
    request.pieces.unit.min(io.data_bytes - offset)
}

/// Blocks of the piece of `bytes` bytes at `offset`.
fn range_of(io: &IoCommand, offset: u32, bytes: u32) -> BlockRange {
    let lba = io.range.lba + u64::from(offset >> io.block_shift);
    BlockRange { lba, blocks: bytes >> io.block_shift }
}
