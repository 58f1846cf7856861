//! PDUs to the host: C2HData, CapsuleResp and R2T.

use nvme_spec::Cqe;
use nvme_spec::tcp::{C2hData, CapsuleResp, Extent, LAST_PDU, R2t, SUCCESS};
use spindle_nvme_transport::RequestId;
use spindle_nvme_transport::{CloseReason, Reply, Transport};
use spindle_reactor::mem::Buf;

use super::Conn;
use super::transfers::Transfer;
use crate::digest;
use crate::outbox::Body;

impl Conn {
    /// Queues the data, if any, and then the completion.
    #[inline]
    pub(super) fn queue_reply(&mut self, reply: Reply) {
        let Reply { slot, cqe, data, may_omit_cqe } = reply;
        match data {
            Some(buf) if !buf.is_empty() => self.queue_data(slot, &cqe, buf, may_omit_cqe),
            Some(_) | None => self.queue_completion(slot, &cqe),
        }
    }

    #[inline]
    fn queue_completion(&mut self, slot: RequestId, cqe: &Cqe) {
        let has_digest = self.wire.agreed.header_digest;
        self.wire.outbox.push(Some(slot)).put_head(&CapsuleResp::new(*cqe, has_digest), has_digest);
    }

    /// Queues one C2HData with all data (NVMe/TCP 1.0 section 3.6.2.8). Its SUCCESS flag replaces the
    /// completion if `may_omit_cqe` is set and the completion has status success and result 0. Otherwise the
    /// CapsuleResp follows in the tail.
    #[inline]
    fn queue_data(&mut self, slot: RequestId, cqe: &Cqe, buf: Buf, may_omit_cqe: bool) {
        let agreed = self.wire.agreed;
        let bytes = u32::try_from(buf.len()).unwrap_or(u32::MAX);
        let omits_cqe = may_omit_cqe && cqe.status().is_success() && cqe.result_u64() == 0;
        let flags = agreed.flags(true) | LAST_PDU | if omits_cqe { SUCCESS } else { 0 };
        let digest_bytes = if agreed.data_digest { 4 } else { 0 };
        let plen = u32::from(self.data_offset) + bytes + digest_bytes;
        let header = C2hData::new(cqe.cid(), 0, bytes, flags, Extent { pdo: self.data_offset, plen });
        let pdu = self.wire.outbox.push(Some(slot));
        pdu.put_head(&header, agreed.header_digest);
        // Not by `put_data`, which costs 7 instructions more of each read: `body_at` is 0 already.
        pdu.pad_to(self.data_offset);
        if agreed.data_digest {
            pdu.put_tail(&digest::of_buf(&buf, 0, buf.len()).to_le_bytes(), false);
        }
        pdu.body = Body::Buf(buf);
        pdu.body_bytes = bytes;
        if !omits_cqe {
            pdu.put_tail(&CapsuleResp::new(*cqe, agreed.header_digest), agreed.header_digest);
        }
    }

    /// Queues one R2T for all data of a write: a host with MAXR2T 0 (Linux) allows only one R2T at a time
    /// (NVMe/TCP 1.0 section 3.6.2.9). Closes the connection if all TTAGs are in use.
    ///
    /// # Panics
    /// If the transfer has 0 bytes: R2TL must not be 0.
    pub(super) fn queue_r2t(&mut self, transfer: Transfer) {
        let bytes = transfer.bytes;
        assert!(bytes > 0, "a fetch of nothing");
        let has_digest = self.wire.agreed.header_digest;
        let cid = transfer.cid;
        let Some(ttag) = self.transfers.insert(transfer) else {
            // Unreachable while the queue pair limits outstanding commands to the queue's entries.
            self.close(CloseReason::HostError);
            return;
        };
        let r2t = R2t::new(cid, ttag, 0, bytes, has_digest);
        self.wire.outbox.push(None).put_head(&r2t, has_digest);
    }
}
