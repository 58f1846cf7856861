//! [`NgBackend`]: one core's operations on a namespace, split into commands that the drive accepts.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use nvme_spec::io::ReadWriteCdw12;
use nvme_spec::opcode::IoOpcode;
use nvme_spec::status::{Status, StatusType};
use rustix::io::Errno;
use spindle_reactor::mem::Buf;
use spindle_reactor::slab::{Slab, Slot};
use spindle_reactor::uring::{PassCommand, PassDone, PassError, PassRing};

use super::NgShared;
use crate::backend::request::ZERO_WRITE_BYTES;
use crate::backend::{AsyncBackend, Ended, Request, ZeroMethod, ZeroMethods};
use crate::shape::block_shift;
use crate::{DiskError, Geometry};

/// Most retries of a command whose status permits a retry. The kernel retries commands five times, except
/// passthrough commands.
const RETRIES_MAX: u8 = 5;

/// Executor of NVMe commands: [`PassRing`], or a mock in tests.
pub(super) trait Drive {
    /// Begins a command without data.
    fn command(&mut self, token: u64, command: PassCommand);

    /// Begins a read of the blocks from `lba` on into the bytes `piece` of `buf`.
    fn read(&mut self, token: u64, lba: u64, buf: Buf, piece: Range<usize>);

    /// Begins a write of the bytes `piece` of `buf` to the blocks from `lba` on, with `fua` if set.
    fn write(&mut self, token: u64, lba: u64, buf: Buf, piece: Range<usize>, fua: bool);

    fn submit(&mut self) -> io::Result<()>;

    /// Passes each completed command to `each`.
    fn poll(&mut self, each: &mut dyn FnMut(PassDone));
}

impl Drive for PassRing {
    fn command(&mut self, token: u64, command: PassCommand) {
        PassRing::command(self, token, command);
    }

    fn read(&mut self, token: u64, lba: u64, buf: Buf, piece: Range<usize>) {
        PassRing::read(self, token, lba, buf, piece);
    }

    fn write(&mut self, token: u64, lba: u64, buf: Buf, piece: Range<usize>, fua: bool) {
        PassRing::write(self, token, lba, buf, piece, fua);
    }

    fn submit(&mut self) -> io::Result<()> {
        PassRing::submit(self)
    }

    fn poll(&mut self, each: &mut dyn FnMut(PassDone)) {
        PassRing::poll(self, each);
    }
}

#[derive(Debug, Clone, Copy)]
enum Kind {
    Read,
    Write { fua: bool },
    Command(PassCommand),
}

/// An operation in progress, whose buffer is at the drive.
#[derive(Debug)]
struct Transfer {
    token: u64,
    kind: Kind,
    lba: u64,
    /// Byte range of the buffer that the drive transfers now.
    piece: Range<usize>,
    /// Bytes of the whole buffer; 0 for a command without data.
    bytes: usize,
    retries: u8,
    /// Cancelled: the operation ends with the piece at the drive.
    is_cancelled: bool,
}

pub(super) struct NgBackend<D> {
    drive: D,
    transfers: Slab<Transfer>,
    shared: Arc<NgShared>,
    shift: u32,
    /// Completed commands; empty between polls.
    done: Vec<PassDone>,
}

impl<D: Drive> NgBackend<D> {
    /// Creates the backend of one core. `drive` must have capacity for `entries` commands.
    pub(super) fn new(drive: D, shared: Arc<NgShared>, entries: u32) -> NgBackend<D> {
        let shift = block_shift(shared.limits.block_bytes);
        let entries = entries as usize;
        let (transfers, done) = (Slab::with_capacity(entries), Vec::with_capacity(entries));
        NgBackend { drive, transfers, shared, shift, done }
    }

    fn begin(&mut self, token: u64, kind: Kind, offset: u64, buf: Option<Buf>) {
        let bytes = buf.as_ref().map_or(0, Buf::len);
        let lba = offset >> self.shift;
        let transfer = Transfer { token, kind, lba, piece: 0..0, bytes, retries: 0, is_cancelled: false };
        let Ok(slot) = self.transfers.insert(transfer) else { panic!("begun without room") };
        self.next(slot, buf);
    }

    /// Sends the next piece of an operation to the drive, or the command of an operation without data.
    fn next(&mut self, slot: Slot, buf: Option<Buf>) {
        let Some(transfer) = self.transfers.get_mut(slot) else { return };
        let begin = transfer.piece.end;
        let most = usize::try_from(self.shared.limits.transfer_bytes_max).unwrap_or(usize::MAX);
        transfer.piece = begin..begin.saturating_add(most).min(transfer.bytes);
        transfer.retries = 0;
        self.give(slot, buf);
    }

    /// Sends the current piece of an operation to the drive, or its command.
    fn give(&mut self, slot: Slot, buf: Option<Buf>) {
        let Some(transfer) = self.transfers.get(slot) else { return };
        let (token, piece) = (u64::from(slot.to_wire()), transfer.piece.clone());
        let lba = transfer.lba + (piece.start as u64 >> self.shift);
        match (transfer.kind, buf) {
            (Kind::Command(command), _) => self.drive.command(token, command),
            (Kind::Read, Some(buf)) => self.drive.read(token, lba, buf, piece),
            (Kind::Write { fua }, Some(buf)) => self.drive.write(token, lba, buf, piece, fua),
            (Kind::Read | Kind::Write { .. }, None) => panic!("a transfer keeps its buffer"),
        }
    }

    /// Handles the end of a piece: sends the next piece, or the same piece again after a transient error.
    /// Returns the end of the operation after the last piece, another error or a cancellation.
    fn on_done(&mut self, done: PassDone) -> Option<Ended<PassError>> {
        let slot = Slot::from_wire(u32::try_from(done.token).unwrap_or(0));
        let transfer = self.transfers.get_mut(slot)?;
        match &done.result {
            _ if transfer.is_cancelled => {}
            Ok(()) if transfer.piece.end < transfer.bytes => {
                self.next(slot, done.buf);
                return None;
            }
            Err(PassError::Status(status)) if is_transient(*status) && transfer.retries < RETRIES_MAX => {
                transfer.retries += 1;
                self.give(slot, done.buf);
                return None;
            }
            Ok(()) | Err(_) => {}
        }
        let transfer = self.transfers.remove(slot)?;
        Some(Ended { token: transfer.token, result: done.result, buf: done.buf })
    }
}

impl<D: Drive> AsyncBackend for NgBackend<D> {
    type Error = PassError;

    #[inline]
    fn geometry(&self) -> Geometry {
        self.shared.geometry()
    }

    #[inline]
    fn refusal(&self, _: &Request) -> Option<DiskError> {
        None
    }

    #[inline]
    fn read(&mut self, token: u64, offset: u64, buf: Buf) {
        self.begin(token, Kind::Read, offset, Some(buf));
    }

    #[inline]
    fn write(&mut self, token: u64, offset: u64, buf: Buf, fua: bool) {
        self.begin(token, Kind::Write { fua }, offset, Some(buf));
    }

    fn sync(&mut self, token: u64) {
        let command = PassCommand { opcode: IoOpcode::FLUSH.0, dwords: [0; 6] };
        self.begin(token, Kind::Command(command), 0, None);
    }

    fn zero_methods(&self) -> &ZeroMethods {
        &self.shared.zero_methods
    }

    fn zero_bytes_max(&self, method: ZeroMethod) -> u64 {
        if method == ZeroMethod::Write { ZERO_WRITE_BYTES } else { self.shared.limits.zero_bytes_max }
    }

    fn zero(&mut self, token: u64, method: ZeroMethod, offset: u64, bytes: u64) {
        if method == ZeroMethod::Write {
            // At most ZERO_WRITE_BYTES.
            return self.write(token, offset, Buf::zeroes(u32::try_from(bytes).unwrap_or(0)), false);
        }
        let (lba, blocks) = (offset >> self.shift, bytes >> self.shift);
        // `zero_bytes_max` limits the range to 65,536 blocks.
        let nlb_z = u16::try_from(blocks.saturating_sub(1)).unwrap_or(u16::MAX);
        let cdw12 = ReadWriteCdw12::new().with_nlb_z(nlb_z).with_deac(method == ZeroMethod::Release);
        let [a, b, c, d, e, f, g, h] = lba.to_le_bytes();
        let (low, high) = (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]));
        let dwords = [low, high, cdw12.into_bits(), 0, 0, 0];
        let command = PassCommand { opcode: IoOpcode::WRITE_ZEROES.0, dwords };
        self.begin(token, Kind::Command(command), offset, None);
    }

    fn next_method(&self, method: ZeroMethod, error: &PassError) -> Option<ZeroMethod> {
        let PassError::Status(bits) = error else { return None };
        let is_unknown = [Status::INVALID_OPCODE, Status::INVALID_FIELD];
        if !is_unknown.contains(&Status::from_bits(*bits).code()) {
            return None;
        }
        self.shared.zero_methods.refuse(method)
    }

    /// No effect: the drive reports each failure in the status of the failed command.
    fn on_durable_error(&self, _: bool, _: &PassError) {}

    fn disk_error(&self, error: &PassError, is_write: bool) -> DiskError {
        match error {
            PassError::Status(bits) => of_status(Status::from_bits(*bits), is_write),
            PassError::System(error) => match Errno::from_io_error(error) {
                Some(Errno::NODEV | Errno::NXIO) => DiskError::Gone,
                Some(Errno::OPNOTSUPP) => DiskError::NotSupported,
                Some(_) | None => DiskError::Internal,
            },
        }
    }

    fn cancel(&mut self, token: u64) {
        let own = self.transfers.iter_mut().filter(|(_, transfer)| transfer.token == token);
        own.for_each(|(_, transfer)| transfer.is_cancelled = true);
    }

    #[inline]
    fn send(&mut self) -> io::Result<()> {
        self.drive.submit()
    }

    fn collect(&mut self, each: &mut dyn FnMut(Ended<PassError>)) {
        let mut done = std::mem::take(&mut self.done);
        self.drive.poll(&mut |ended| done.push(ended));
        done.drain(..).filter_map(|ended| self.on_done(ended)).for_each(each);
        self.done = done;
    }
}

/// Returns true for a transient status with DNR clear, as after a reset or while the namespace is not ready.
fn is_transient(bits: u16) -> bool {
    let status = Status::from_bits(bits);
    let passing = [
        Status::ABORTED_BY_REQUEST,
        Status::ABORTED_SQ_DELETION,
        Status::ABORTED_POWER_LOSS,
        Status::DATA_TRANSFER_ERROR,
        Status::NAMESPACE_NOT_READY,
        Status::COMMAND_INTERRUPTED,
        Status::COMMAND_TRANSIENT_TRANSPORT_ERROR,
    ];
    !status.is_dnr() && (passing.contains(&status.code()) || status.sct() == StatusType::PATH)
}

/// Returns the [`DiskError`] for a status of the drive.
fn of_status(status: Status, is_write: bool) -> DiskError {
    match status.code() {
        // The namespace was detached or deleted.
        Status::INVALID_NAMESPACE_OR_FORMAT => DiskError::Gone,
        // The namespace has shrunk. Its missing blocks are media errors.
        Status::LBA_OUT_OF_RANGE if is_write => DiskError::MediaWrite,
        Status::LBA_OUT_OF_RANGE => DiskError::MediaRead,
        _ => DiskError::of_status(status),
    }
}
