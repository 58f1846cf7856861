//! PDUs from the controller. Each value in a PDU is checked once, where it is used: here or in `frame`.

use nvme_spec::Cqe;
use nvme_spec::cqe::SQ_HEAD_NO_FLOW_CONTROL;
use nvme_spec::status::Status;
use nvme_spec::tcp::{
    C2hData, CapsuleResp, CommonHeader, IcResp, LAST_PDU, MAXH2CDATA_MIN, PDA_MAX, PFV, PduType, R2t,
    SUCCESS, pda_bytes,
};

use super::commands::{CommandState, Direction};
use super::{Conn, HostEvent, Incoming};
use crate::frame::{Agreed, Frame, check_initialize};
use crate::payload::{Filled, Payload};
use crate::violation::Violation;
use crate::wire::{Receiving, Stop};

impl Conn {
    /// Processes one header or payload. `None`: there is no event, and `step` is to be called again.
    #[inline]
    pub(super) fn step(&mut self) -> Result<Option<HostEvent>, Stop> {
        match &self.wire.receiving {
            Receiving::Payload(_) => self.step_payload(),
            Receiving::Header | Receiving::PendingCapsule(_) | Receiving::Skip(_) => self.step_header(),
        }
    }

    #[inline]
    fn step_header(&mut self) -> Result<Option<HostEvent>, Stop> {
        let Some(ch) = self.wire.inbox.peek_as::<CommonHeader>().copied() else { return Err(Stop::Wait) };
        let pdu_type = ch.pdu_type;
        let is_ready = self.max_h2c_data.is_some();
        match pdu_type {
            PduType::C2H_DATA if is_ready => self.step_c2h_data(&ch),
            PduType::CAPSULE_RESP if is_ready => self.step_completion(&ch),
            PduType::R2T if is_ready => self.step_r2t(&ch),
            PduType::ICRESP if is_ready => Err(Violation::InitializedTwice(pdu_type).into()),
            PduType::ICRESP => self.step_initialize(&ch),
            PduType::C2H_TERM_REQ => Err(self.wire.terminated()),
            PduType::C2H_DATA | PduType::CAPSULE_RESP | PduType::R2T => {
                Err(Violation::BeforeInitialize(pdu_type).into())
            }
            _ => Err(Violation::PduType(pdu_type).into()),
        }
    }

    /// Handles ICResp (NVMe/TCP 1.0 section 3.6.2.2). Commands can be submitted after it.
    fn step_initialize(&mut self, ch: &CommonHeader) -> Result<Option<HostEvent>, Stop> {
        check_initialize(ch)?;
        let Some(response) = self.wire.inbox.peek_as::<IcResp>().copied() else { return Err(Stop::Wait) };
        if response.pfv.get() != PFV {
            return Err(Violation::Pfv(response.pfv.get()).into());
        }
        if response.cpda > PDA_MAX {
            return Err(Violation::Alignment(response.cpda).into());
        }
        let digests = response.digests();
        if (digests.header(), digests.data()) != (self.config.header_digest, self.config.data_digest) {
            let asked = u8::from(self.config.header_digest) | u8::from(self.config.data_digest) << 1;
            return Err(Violation::Dgst { dgst: response.dgst, asked }.into());
        }
        let max_h2c_data = response.maxh2cdata.get();
        if max_h2c_data < MAXH2CDATA_MIN || !max_h2c_data.is_multiple_of(4) {
            return Err(Violation::Maxh2cdata(max_h2c_data).into());
        }
        self.wire.inbox.consume(size_of::<IcResp>());
        self.wire.agreed = Agreed {
            header_digest: digests.header(),
            data_digest: digests.data(),
            send_unit: u8::try_from(pda_bytes(response.cpda)).unwrap_or(4),
        };
        self.wire.lifetime.initialized();
        self.max_h2c_data = Some(max_h2c_data);
        Ok(Some(HostEvent::Ready))
    }

    /// Handles C2HData, the data of a read (NVMe/TCP 1.0 section 3.6.2.8). Only this function checks CCCID,
    /// the state of the command, offset, length, LAST_PDU and SUCCESS.
    fn step_c2h_data(&mut self, ch: &CommonHeader) -> Result<Option<HostEvent>, Stop> {
        let frame = Frame::with_data(ch, 24, &self.wire.agreed)?;
        let pdu_type = PduType::C2H_DATA;
        let header: C2hData = self.wire.header(pdu_type, &frame)?;
        let (cid, offset, bytes) = (header.cccid.get(), header.datao.get(), header.datal.get());
        let command = self.commands.waiting(cid).filter(|command| {
            command.direction == Direction::FromController && !command.has_last_pdu && command.buf.is_some()
        });
        let Some(command) = command else {
            let expected = "an outstanding command that waits for data";
            return Err(Violation::Cccid { pdu_type, cccid: cid, expected }.into());
        };
        if bytes == 0 || bytes != frame.data_bytes {
            return Err(Violation::Datal { pdu_type, datal: bytes, allowed: frame.data_bytes }.into());
        }
        if offset != command.moved {
            return Err(Violation::DataOffset { pdu_type, offset, expected: command.moved }.into());
        }
        let Some(end) = offset.checked_add(bytes).filter(|end| *end <= command.bytes) else {
            return Err(Violation::DataRange { pdu_type, offset, bytes, allowed: command.bytes }.into());
        };
        let is_last = header.header.has(LAST_PDU);
        if header.header.has(SUCCESS) && !is_last {
            let expected = "SUCCESS only together with LAST_PDU";
            return Err(Violation::LastFlag { pdu_type, flags: ch.flags, expected }.into());
        }
        if header.header.has(SUCCESS) && end != command.bytes {
            return Err(Violation::DataShort { cid, received: end, expected: command.bytes }.into());
        }
        let Some(buf) = command.buf.take() else { return Err(Stop::Wait) };
        command.has_last_pdu = is_last;
        self.wire.inbox.consume(frame.header_bytes as usize);
        let incoming = Incoming { cid, flags: ch.flags };
        self.wire.receiving = Receiving::Payload(Payload::new(incoming, buf, offset, &frame));
        Ok(None)
    }

    /// Receives data into its buffer. With the SUCCESS flag, the end of the data completes the command.
    #[inline]
    fn step_payload(&mut self) -> Result<Option<HostEvent>, Stop> {
        let Some((payload, filled)) = self.wire.fill() else { return Err(Stop::Wait) };
        let Incoming { cid, flags } = payload.key;
        let command = self.commands.outstanding_mut(cid);
        command.moved = payload.end();
        command.is_damaged |= filled == Filled::Damaged;
        command.buf = Some(payload.buf);
        if flags & SUCCESS == 0 {
            return Ok(None);
        }
        let mut cqe = Cqe::new(cid, Status::SUCCESS);
        cqe.sq_head.set(SQ_HEAD_NO_FLOW_CONTROL);
        Ok(self.commands.end(cid, cqe))
    }

    /// Handles CapsuleResp (NVMe/TCP 1.0 section 3.6.2.6). Deferred while the outbox has data of the command.
    #[inline]
    fn step_completion(&mut self, ch: &CommonHeader) -> Result<Option<HostEvent>, Stop> {
        let frame = Frame::without_data(ch, 24, &self.wire.agreed)?;
        let CapsuleResp { cqe, .. } = self.wire.header(PduType::CAPSULE_RESP, &frame)?;
        let cid = cqe.cid();
        let Some(command) = self.commands.waiting(cid) else {
            return Err(Violation::CompletionCid(cid).into());
        };
        let is_short = command.direction == Direction::FromController && command.moved < command.bytes;
        if is_short && cqe.status().is_success() {
            return Err(Violation::DataShort { cid, received: command.moved, expected: command.bytes }.into());
        }
        let is_sending = command.is_sending;
        if is_sending {
            command.state = CommandState::Ended;
            command.cqe = cqe;
        }
        self.wire.inbox.consume(frame.header_bytes as usize);
        Ok(if is_sending { None } else { self.commands.end(cid, cqe) })
    }

    /// Handles R2T (NVMe/TCP 1.0 section 3.6.2.9). Queues the first H2CData of the requested range.
    fn step_r2t(&mut self, ch: &CommonHeader) -> Result<Option<HostEvent>, Stop> {
        let frame = Frame::without_data(ch, 24, &self.wire.agreed)?;
        let pdu_type = PduType::R2T;
        let header: R2t = self.wire.header(pdu_type, &frame)?;
        let (cid, offset, bytes) = (header.cccid.get(), header.r2to.get(), header.r2tl.get());
        let command =
            self.commands.waiting(cid).filter(|command| command.direction == Direction::ToController);
        let Some(command) = command else {
            let expected = "an outstanding command with data to send";
            return Err(Violation::Cccid { pdu_type, cccid: cid, expected }.into());
        };
        if command.is_sending {
            return Err(Violation::R2tLimit(cid).into());
        }
        if bytes == 0 {
            return Err(Violation::R2tEmpty(cid).into());
        }
        if offset != command.moved {
            return Err(Violation::DataOffset { pdu_type, offset, expected: command.moved }.into());
        }
        let Some(end) = offset.checked_add(bytes).filter(|end| *end <= command.bytes) else {
            return Err(Violation::DataRange { pdu_type, offset, bytes, allowed: command.bytes }.into());
        };
        command.moved = end;
        command.queued = offset;
        command.ttag = header.ttag.get();
        self.wire.inbox.consume(frame.header_bytes as usize);
        self.queue_h2c_data(cid);
        Ok(None)
    }
}
