//! PDUs from the host. Each value in a PDU is checked in one place, where it is used: here or in `frame`.

use nvme_spec::Sqe;
use nvme_spec::opcode::FabricsType;
use nvme_spec::sqe::{Psdt, SglKind};
use nvme_spec::status::Status;
use nvme_spec::tcp::{
    ADMIN_IN_CAPSULE_BYTES, CapsuleCmd, CommonHeader, DigestBits, H2cData, IcReq, IcResp, LAST_PDU, PDA_MAX,
    PFV, PduType, pda_bytes,
};
use nvme_spec::zerocopy::{FromBytes, IntoBytes};
use spindle_nvme_transport::RequestId;
use spindle_nvme_transport::{DataPointer, Event};

use super::transfers::{Transfer, TransferTarget};
use super::{Conn, Source};
use crate::frame::{Agreed, Frame, PDA, check_initialize};
use crate::payload::{Filled, Payload};
use crate::violation::Violation;
use crate::wire::{PendingCapsule, Receiving, Stop};

/// Type, flags and HLEN in the common header of a command without digests.
const PLAIN_HEADER: u64 = u64::from_le_bytes([PduType::CAPSULE_CMD.0, 0, COMMAND_BYTES_U8, 0, 0, 0, 0, 0]);
/// Mask of type, flags and HLEN.
const PLAIN_MASK: u64 = u64::from_le_bytes([0xff, 0xff, 0xff, 0, 0, 0, 0, 0]);
/// Differs from every masked header, so that no command is plain.
pub(super) const NO_PLAIN_HEADER: u64 = u64::MAX;
/// HLEN of a command capsule (NVMe/TCP 1.0 section 3.6.2.5).
const COMMAND_BYTES_U8: u8 = 72;
const COMMAND_BYTES: usize = size_of::<CapsuleCmd>();
const _: () = assert!(COMMAND_BYTES == COMMAND_BYTES_U8 as usize);

impl Conn {
    /// Parses the common case: a command without digests whose header is whole in the batch. A few
    /// comparisons cover all checks of `step` on such a header. `None`, without effect: any other PDU, or a
    /// Fabrics command; `step` handles these.
    #[inline]
    pub(super) fn plain_command(&mut self) -> Option<Event> {
        if !matches!(self.wire.receiving, Receiving::Header) || !self.wire.lifetime.is_open() {
            return None;
        }
        let bytes: &[u8; COMMAND_BYTES] = self.wire.inbox.peek_batch()?;
        let CapsuleCmd { header, sqe } = CapsuleCmd::ref_from_bytes(bytes).ok()?;
        if u64::from_le_bytes(*bytes.first_chunk()?) & PLAIN_MASK != self.plain_header || sqe.is_fabrics() {
            return None;
        }
        let plen = header.plen();
        if plen == u32::from(COMMAND_BYTES_U8) {
            let event = Event::Command { sqe: *sqe, data: data_pointer(sqe, 0) };
            self.wire.inbox.consume_batch(COMMAND_BYTES);
            return Some(event);
        }
        let data_bytes = plen.checked_sub(u32::from(COMMAND_BYTES_U8))?;
        if header.pdo != COMMAND_BYTES_U8 || data_bytes > self.in_capsule_max {
            return None;
        }
        let data = data_pointer(sqe, data_bytes);
        let frame = Frame { header_bytes: u32::from(COMMAND_BYTES_U8), data_bytes, data_digest: false };
        self.wire.receiving = match data {
            Ok(_) => Receiving::PendingCapsule(PendingCapsule { cid: sqe.cid(), frame }),
            Err(_) => Receiving::Skip(data_bytes as usize),
        };
        let event = Event::Command { sqe: *sqe, data };
        self.wire.inbox.consume_batch(COMMAND_BYTES);
        self.wire.inbox.prefetch_header_after(data_bytes as usize);
        Some(event)
    }

    /// Implements [`Transport::peek_command`](spindle_nvme_transport::Transport::peek_command). Reads the SQE
    /// of the second command of the batch without a check: it is the next SQE only if the first command has
    /// no in-capsule data. `None`: the batch has fewer than 144 unread bytes, or the carry is not empty.
    #[inline]
    pub(super) fn peek_sqe(&self) -> Option<&Sqe> {
        let bytes: &[u8; 2 * COMMAND_BYTES] = self.wire.inbox.peek_batch()?;
        let (_, second) = bytes.split_at(COMMAND_BYTES);
        CapsuleCmd::ref_from_bytes(second).ok().map(|capsule| &capsule.sqe)
    }

    /// Returns `Fetched` for in-capsule data without digest that is complete.
    #[inline]
    pub(super) fn plain_fetched(&mut self) -> Option<Event> {
        let Receiving::Payload(payload) = &self.wire.receiving else { return None };
        if !payload.is_whole() || !matches!(payload.key, Source::Capsule(_)) {
            return None;
        }
        match std::mem::replace(&mut self.wire.receiving, Receiving::Header) {
            Receiving::Payload(Payload { key: Source::Capsule(slot), buf, .. }) => {
                Some(Event::Fetched { slot, buf, result: Ok(()) })
            }
            Receiving::Payload(_) | Receiving::Header | Receiving::PendingCapsule(_) | Receiving::Skip(_) => {
                None
            }
        }
    }

    /// Processes one header, payload or skip. `None`: there is no event, and `step` is to be called again.
    #[inline]
    pub(super) fn step(&mut self) -> Result<Option<Event>, Stop> {
        match &self.wire.receiving {
            Receiving::Header => self.step_header(),
            Receiving::Payload(_) => self.step_payload(),
            Receiving::PendingCapsule(_) => Err(Stop::Wait),
            Receiving::Skip(_) => {
                if self.wire.skip() {
                    Ok(None)
                } else {
                    Err(Stop::Wait)
                }
            }
        }
    }

    #[inline]
    fn step_header(&mut self) -> Result<Option<Event>, Stop> {
        let Some(ch) = self.wire.inbox.peek_as::<CommonHeader>().copied() else { return Err(Stop::Wait) };
        if ch.pdu_type == PduType::CAPSULE_CMD && self.is_initialized {
            return self.step_command(&ch);
        }
        self.step_other_pdu(&ch)
    }

    fn step_other_pdu(&mut self, ch: &CommonHeader) -> Result<Option<Event>, Stop> {
        let pdu_type = ch.pdu_type;
        match pdu_type {
            PduType::H2C_DATA if self.is_initialized => self.step_h2c_data(ch),
            PduType::ICREQ if self.is_initialized => Err(Violation::InitializedTwice(pdu_type).into()),
            PduType::ICREQ => self.step_initialize(ch),
            PduType::H2C_TERM_REQ => Err(self.wire.terminated()),
            PduType::CAPSULE_CMD | PduType::H2C_DATA => Err(Violation::BeforeInitialize(pdu_type).into()),
            _ => Err(Violation::PduType(pdu_type).into()),
        }
    }

    /// Negotiates digests and alignment by ICReq (NVMe/TCP 1.0 section 3.6.2.1) and queues ICResp.
    fn step_initialize(&mut self, ch: &CommonHeader) -> Result<Option<Event>, Stop> {
        check_initialize(ch)?;
        let Some(request) = self.wire.inbox.peek_as::<IcReq>().copied() else { return Err(Stop::Wait) };
        if request.pfv.get() != PFV {
            return Err(Violation::Pfv(request.pfv.get()).into());
        }
        if request.hpda > PDA_MAX {
            return Err(Violation::Alignment(request.hpda).into());
        }
        self.wire.inbox.consume(size_of::<IcReq>());
        let asked = request.digests();
        self.wire.agreed = Agreed {
            header_digest: asked.header() && self.config.header_digest,
            data_digest: asked.data() && self.config.data_digest,
            send_unit: u8::try_from(pda_bytes(request.hpda)).unwrap_or(4),
        };
        self.data_offset = self.wire.agreed.data_offset(24);
        let digests = DigestBits::new()
            .with_header(self.wire.agreed.header_digest)
            .with_data(self.wire.agreed.data_digest);
        let response = IcResp::new(PDA, digests, self.config.max_h2c_data);
        self.wire.outbox.push_bytes(response.as_bytes().into(), None);
        self.wire.lifetime.initialized();
        self.is_initialized = true;
        let has_digests = self.wire.agreed.header_digest || self.wire.agreed.data_digest;
        self.plain_header = if has_digests { NO_PLAIN_HEADER } else { PLAIN_HEADER };
        Ok(None)
    }

    /// Handles CapsuleCmd (NVMe/TCP 1.0 section 3.6.2.5).
    #[inline]
    fn step_command(&mut self, ch: &CommonHeader) -> Result<Option<Event>, Stop> {
        let frame = Frame::with_data(ch, 72, &self.wire.agreed)?;
        let CapsuleCmd { sqe, .. } = self.wire.header(PduType::CAPSULE_CMD, &frame)?;
        if frame.data_bytes == 0 {
            self.wire.inbox.consume(frame.header_bytes as usize);
            let data = data_pointer(&sqe, 0);
            self.apply_connect(&sqe);
            return Ok(Some(Event::Command { sqe, data }));
        }
        self.step_command_data(sqe, frame)
    }

    fn step_command_data(&mut self, sqe: Sqe, frame: Frame) -> Result<Option<Event>, Stop> {
        let allowed = match sqe.is_fabrics() {
            true => self.in_capsule_max.max(ADMIN_IN_CAPSULE_BYTES),
            false => self.in_capsule_max,
        };
        if frame.data_bytes > allowed {
            return Err(Violation::InCapsuleBytes { bytes: frame.data_bytes, allowed }.into());
        }
        self.wire.inbox.consume(frame.header_bytes as usize);
        let data = data_pointer(&sqe, frame.data_bytes);
        match data {
            Ok(_) => {
                self.wire.receiving = Receiving::PendingCapsule(PendingCapsule { cid: sqe.cid(), frame })
            }
            Err(_) => self.wire.skip_data(&frame),
        }
        self.apply_connect(&sqe);
        Ok(Some(Event::Command { sqe, data }))
    }

    /// Sets the limit of in-capsule data on Connect: for an I/O queue (QID not 0) the configured value, of
    /// which IOCCSZ is derived; for an admin queue at least 8192 bytes.
    #[inline]
    fn apply_connect(&mut self, sqe: &Sqe) {
        if sqe.is_fabrics() && sqe.fctype() == FabricsType::CONNECT {
            let (is_io_queue, allowed) = (sqe.cdw10() >> 16 != 0, self.config.in_capsule_bytes);
            self.in_capsule_max = if is_io_queue { allowed } else { allowed.max(ADMIN_IN_CAPSULE_BYTES) };
        }
    }

    /// Handles H2CData, the data of a write (NVMe/TCP 1.0 section 3.6.2.7). Only this function checks TTAG,
    /// CCCID, the state of the transfer, offset, length and LAST_PDU.
    fn step_h2c_data(&mut self, ch: &CommonHeader) -> Result<Option<Event>, Stop> {
        let frame = Frame::with_data(ch, 24, &self.wire.agreed)?;
        let pdu_type = PduType::H2C_DATA;
        let header: H2cData = self.wire.header(pdu_type, &frame)?;
        let (ttag, cccid) = (header.ttag.get(), header.cccid.get());
        let (offset, bytes) = (header.datao.get(), header.datal.get());
        // Each H2CData is complete before the next header, so the transfer has its buffer here.
        let transfer = self.transfers.get_mut(ttag).ok_or(Violation::Ttag(ttag))?;
        let length = transfer.bytes;
        if transfer.cid != cccid {
            return Err(Violation::Cccid { pdu_type, cccid, expected: "the command of the TTAG" }.into());
        }
        if bytes == 0 || bytes != frame.data_bytes {
            return Err(Violation::Datal { pdu_type, datal: bytes, allowed: frame.data_bytes }.into());
        }
        if bytes > self.config.max_h2c_data {
            return Err(Violation::H2cDataBytes { datal: bytes, allowed: self.config.max_h2c_data }.into());
        }
        if offset != transfer.received {
            return Err(Violation::DataOffset { pdu_type, offset, expected: transfer.received }.into());
        }
        let Some(end) = offset.checked_add(bytes).filter(|end| *end <= length) else {
            return Err(Violation::DataRange { pdu_type, offset, bytes, allowed: length }.into());
        };
        if header.header.has(LAST_PDU) != (end == length) {
            let expected = "LAST_PDU on the last H2CData of an R2T and on no other";
            return Err(Violation::LastFlag { pdu_type, flags: ch.flags, expected }.into());
        }
        match std::mem::replace(&mut transfer.target, TransferTarget::Receiving) {
            TransferTarget::Buffer(buf) => {
                self.wire.inbox.consume(frame.header_bytes as usize);
                self.wire.receiving =
                    Receiving::Payload(Payload::new(Source::H2cData(ttag), buf, offset, &frame));
            }
            TransferTarget::Discard => {
                transfer.target = TransferTarget::Discard;
                transfer.received = end;
                if end == length {
                    self.transfers.remove(ttag);
                }
                self.wire.inbox.consume(frame.header_bytes as usize);
                self.wire.skip_data(&frame);
            }
            TransferTarget::Receiving => return Err(Violation::Ttag(ttag).into()),
        }
        Ok(None)
    }

    /// Receives data into its buffer. Returns `Fetched` when all fetched data is in the buffer.
    #[inline]
    fn step_payload(&mut self) -> Result<Option<Event>, Stop> {
        let Some((payload, filled)) = self.wire.fill() else { return Err(Stop::Wait) };
        match payload.key {
            Source::Capsule(slot) => {
                let result = fetch_result(filled == Filled::Damaged);
                Ok(Some(Event::Fetched { slot, buf: payload.buf, result }))
            }
            Source::H2cData(ttag) => Ok(self.end_h2c_data(ttag, payload, filled)),
            Source::Stash(slot) => {
                self.stash.end(slot, payload.buf, fetch_result(filled == Filled::Damaged));
                Ok(self.stash.next_fetched())
            }
        }
    }

    /// Implements [`Transport::cancel`](spindle_nvme_transport::Transport::cancel): cancels a fetch from the
    /// stash, of in-capsule data or of H2CData.
    #[cold]
    pub(super) fn cancel_fetch(&mut self, slot: RequestId) -> bool {
        if self.stash.cancel(slot) {
            return true;
        }
        let ttag = self.transfers.tag_of(slot);
        let (is_of_capsule, is_of_host) = match &self.wire.receiving {
            Receiving::Payload(payload) => match payload.key {
                Source::Capsule(other) => (other == slot, false),
                Source::H2cData(other) => (false, ttag == Some(other)),
                Source::Stash(_) => (false, false),
            },
            Receiving::Header | Receiving::PendingCapsule(_) | Receiving::Skip(_) => (false, false),
        };
        let end = if is_of_capsule || is_of_host { self.wire.skip_payload() } else { None };
        let Some(ttag) = ttag else { return is_of_capsule };
        let Some(transfer) = self.transfers.get_mut(ttag) else { return false };
        transfer.target = TransferTarget::Discard;
        transfer.received = end.unwrap_or(transfer.received);
        if transfer.received == transfer.bytes {
            self.transfers.remove(ttag);
        }
        true
    }

    fn end_h2c_data(&mut self, ttag: u16, payload: Payload<Source>, filled: Filled) -> Option<Event> {
        let transfer = self.transfers.get_mut(ttag)?;
        transfer.received = payload.end();
        transfer.is_damaged |= filled == Filled::Damaged;
        if (transfer.received as usize) < payload.buf.len() {
            transfer.target = TransferTarget::Buffer(payload.buf);
            return None;
        }
        let Transfer { slot, is_damaged, .. } = self.transfers.remove(ttag)?;
        Some(Event::Fetched { slot, buf: payload.buf, result: fetch_result(is_damaged) })
    }
}

/// Returns the result of a `fetch`. A wrong data digest fails only its command, which the host may retry
/// (NVMe/TCP 1.0, "PDU Header and Data Digests").
fn fetch_result(is_damaged: bool) -> Result<(), Status> {
    if is_damaged { Err(Status::COMMAND_TRANSIENT_TRANSPORT_ERROR) } else { Ok(()) }
}

/// Returns the location and length of a command's data (NVMe/TCP 1.0, "Data Transfers"), or the status that
/// fails the command if its descriptor is not allowed. `in_capsule`: bytes of data in its capsule.
#[inline]
fn data_pointer(sqe: &Sqe, in_capsule: u32) -> Result<DataPointer, Status> {
    // Over Fabrics, PSDT must select SGLs (Base 2.0 section 3.3.3.1), except that the field is reserved in a
    // Fabrics command.
    if !matches!(sqe.psdt(), Psdt::SGL | Psdt::SGL_METADATA_SGL) && !sqe.is_fabrics() {
        return Err(Status::INVALID_FIELD.dnr());
    }
    let bytes = sqe.sgl.bytes();
    match sqe.sgl.kind() {
        SglKind::TRANSPORT_DATA_BLOCK if in_capsule != 0 => Err(Status::DATA_SGL_LENGTH_INVALID.dnr()),
        SglKind::TRANSPORT_DATA_BLOCK if bytes == 0 => Ok(DataPointer::None),
        SglKind::TRANSPORT_DATA_BLOCK => Ok(DataPointer::Host { bytes }),
        SglKind::DATA_BLOCK_OFFSET if sqe.sgl.address() != 0 => Err(Status::SGL_OFFSET_INVALID.dnr()),
        SglKind::DATA_BLOCK_OFFSET if bytes != in_capsule => Err(Status::DATA_SGL_LENGTH_INVALID.dnr()),
        SglKind::DATA_BLOCK_OFFSET if bytes == 0 => Ok(DataPointer::None),
        SglKind::DATA_BLOCK_OFFSET => Ok(DataPointer::InCapsule { bytes }),
        // Some hosts send an all-zero descriptor with a command without data.
        SglKind(0) if bytes == 0 && in_capsule == 0 => Ok(DataPointer::None),
        _ => Err(Status::SGL_DESCRIPTOR_TYPE_INVALID.dnr()),
    }
}
