//! PDUs to the controller: ICReq, CapsuleCmd and H2CData.

use nvme_spec::tcp::{
    ADMIN_IN_CAPSULE_BYTES, CapsuleCmd, DigestBits, Extent, H2cData, IcReq, LAST_PDU, MAXH2CDATA_MIN,
};
use nvme_spec::zerocopy::IntoBytes;
use nvme_spec::{Sgl, Sqe};
use spindle_reactor::mem::Buf;

use super::commands::{CommandState, Direction};
use super::{Conn, HostData, SubmitError, SubmitErrorKind};
use crate::frame::PDA;

/// MAXR2T, a zero-based value: one open R2T per command, as Linux.
const MAX_R2T: u32 = 0;

impl Conn {
    /// Queues ICReq (NVMe/TCP 1.0 section 3.6.2.1).
    pub(super) fn queue_initialize(&mut self) {
        let digests =
            DigestBits::new().with_header(self.config.header_digest).with_data(self.config.data_digest);
        let request = IcReq::new(PDA, digests, MAX_R2T);
        self.wire.outbox.push_bytes(request.as_bytes().into(), None);
    }

    /// Queues CapsuleCmd (NVMe/TCP 1.0 section 3.6.2.5). Data for the controller is sent in the capsule if it
    /// fits, else after an R2T. At least 8192 bytes fit in the capsule of a Fabrics command.
    #[inline]
    pub(super) fn queue_command(&mut self, sqe: Sqe, data: HostData) -> Result<(), SubmitError> {
        let (direction, buf) = match data {
            HostData::None => (Direction::None, None),
            HostData::ToController(buf) => (Direction::ToController, Some(buf)),
            HostData::FromController(buf) => (Direction::FromController, Some(buf)),
        };
        let bytes = buf.as_ref().map_or(0, |buf| u32::try_from(buf.len()).unwrap_or(u32::MAX));
        let Some(command) = self.commands.start(sqe.cid(), direction, bytes) else {
            return Err(SubmitError { kind: SubmitErrorKind::Cid, data: host_data(direction, buf) });
        };
        let allowed = match sqe.is_fabrics() {
            true => self.config.in_capsule_bytes.max(ADMIN_IN_CAPSULE_BYTES),
            false => self.config.in_capsule_bytes,
        };
        if direction == Direction::ToController && bytes > 0 && bytes <= allowed {
            command.is_sending = true;
            command.moved = bytes;
            command.queued = bytes;
            if let Some(buf) = buf {
                self.queue_capsule_with_data(&sqe.with_sgl(Sgl::in_capsule(bytes)), buf, bytes);
            }
            return Ok(());
        }
        command.buf = buf;
        self.queue_capsule(&sqe.with_sgl(Sgl::transport(bytes)));
        Ok(())
    }

    #[inline]
    fn queue_capsule(&mut self, sqe: &Sqe) {
        let agreed = self.wire.agreed;
        let plen = if agreed.header_digest { 76 } else { 72 };
        let capsule = CapsuleCmd::new(*sqe, agreed.flags(false), Extent { pdo: 0, plen });
        self.wire.outbox.push(None).put_head(&capsule, agreed.header_digest);
    }

    fn queue_capsule_with_data(&mut self, sqe: &Sqe, buf: Buf, bytes: u32) {
        let agreed = self.wire.agreed;
        let extent = self.extent(72, bytes);
        let capsule = CapsuleCmd::new(*sqe, agreed.flags(true), extent);
        let pdu = self.wire.outbox.push(Some(sqe.cid()));
        pdu.put_head(&capsule, agreed.header_digest);
        pdu.put_data(extent.pdo, buf, 0, bytes, agreed.data_digest);
    }

    /// Queues the next H2CData of the command's current R2T (NVMe/TCP 1.0 section 3.6.2.7). The next one is
    /// queued after this one is sent, so that commands alternate and one PDU at a time owns the buffer.
    pub(super) fn queue_h2c_data(&mut self, cid: u16) {
        let (agreed, max) = (self.wire.agreed, self.max_h2c_data.unwrap_or(MAXH2CDATA_MIN));
        let command = self.commands.outstanding_mut(cid);
        let Some(buf) = command.buf.take() else { return };
        command.is_sending = true;
        let (offset, ttag) = (command.queued, command.ttag);
        let bytes = (command.moved - offset).min(max);
        command.queued += bytes;
        let last = if command.queued == command.moved { LAST_PDU } else { 0 };
        let extent = self.extent(24, bytes);
        let header = H2cData::new(cid, ttag, offset, bytes, agreed.flags(true) | last, extent);
        let pdu = self.wire.outbox.push(Some(cid));
        pdu.put_head(&header, agreed.header_digest);
        pdu.put_data(extent.pdo, buf, offset, bytes, agreed.data_digest);
    }

    fn extent(&self, hlen: u8, bytes: u32) -> Extent {
        let pdo = self.wire.agreed.data_offset(hlen);
        let digest_bytes = if self.wire.agreed.data_digest { 4 } else { 0 };
        Extent { pdo, plen: u32::from(pdo) + bytes + digest_bytes }
    }

    /// Continues the R2T of a command whose data was sent, or ends the command if its completion has arrived.
    pub(super) fn on_data_sent(&mut self, cid: u16, buf: Buf) {
        self.commands.return_buf(cid, buf);
        let command = self.commands.outstanding_mut(cid);
        match command.state {
            CommandState::Ended => self.finished.push_back(cid),
            CommandState::Waiting if command.queued < command.moved && self.wire.lifetime.is_open() => {
                self.queue_h2c_data(cid);
            }
            CommandState::Waiting | CommandState::Free => {}
        }
    }
}

fn host_data(direction: Direction, buf: Option<Buf>) -> HostData {
    match (direction, buf) {
        (Direction::ToController, Some(buf)) => HostData::ToController(buf),
        (Direction::FromController, Some(buf)) => HostData::FromController(buf),
        (Direction::None, _) | (_, None) => HostData::None,
    }
}
