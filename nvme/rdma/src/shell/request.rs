//! Validation of connection requests, and the status of a rejection (NVMe/RDMA Transport, "RDMA_CM Private
//! Data").

use std::net::SocketAddr;

use nvme_spec::fabrics::ADMIN_QUEUE_ENTRIES;
use nvme_spec::rdma::{CmReject, CmRequest, CmStatus};
use nvme_spec::zerocopy::IntoBytes;
use spindle_rdma::{CmEvent, CmId, DeviceLimits};

/// Validated parameters of a connection request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueParams {
    /// QID of the private data; 0 is an admin queue.
    pub qid: u16,
    /// HSQSIZE + 1: the host's maximum of unanswered capsules, and the receives to be posted.
    pub entries: u16,
    /// RDMA READs that may be outstanding at the host: the minimum of the host's and the device's limit.
    pub responder_resources: u8,
}

/// A validated connection request, not accepted yet.
#[derive(Debug)]
pub struct Request {
    /// The connection manager's identifier. Dropping it rejects the request.
    pub id: CmId,
    /// Index in the configuration of the listener that received the request.
    pub listener: usize,
    /// Validated parameters of the request.
    pub params: QueueParams,
}

impl Request {
    /// Returns the host's address; `None` if the connection manager has none.
    #[must_use]
    pub fn remote(&self) -> Option<SocketAddr> {
        self.id.peer_address()
    }

    /// Rejects the request with `status` in the private data.
    pub fn reject(self, status: CmStatus) {
        reject(&self.id, status);
    }
}

/// Rejects a request with `status` in the private data. Errors are ignored: the host may have cancelled the
/// request.
pub(super) fn reject(id: &CmId, status: CmStatus) {
    let _ = id.reject(CmReject::new(status).as_bytes());
}

/// Validates a connection request, against the device's `limits`.
///
/// # Errors
/// The status of the rejection, and the reason for the log: field, value, allowed range.
pub(super) fn check(
    event: &CmEvent,
    limits: &DeviceLimits,
    entries_max: u16,
) -> Result<QueueParams, (CmStatus, String)> {
    check_data(&event.private_data, event.initiator_depth.min(limits.initiator_depth), entries_max)
}

/// Validates private data and READ limit. `reads`: the minimum of the host's and the device's READ limit.
fn check_data(data: &[u8], reads: u8, entries_max: u16) -> Result<QueueParams, (CmStatus, String)> {
    let request = CmRequest::parse(data).map_err(|status| {
        (
            status,
            format!(
                "private data of {} bytes, recfmt {:?}: 32 bytes of format 0 are needed",
                data.len(),
                data.first()
            ),
        )
    })?;
    let qid = request.qid();
    if qid == u16::MAX {
        return Err((CmStatus::INVALID_QID, format!("qid {qid}: at most 65534")));
    }
    let allowed = if qid == 0 { ADMIN_QUEUE_ENTRIES } else { entries_max };
    let sends = request.host_sends();
    let Some(entries) = u16::try_from(sends).ok().filter(|sends| (2..=allowed).contains(sends)) else {
        return Err((
            CmStatus::INVALID_HSQSIZE,
            format!("hsqsize {} (from 0): 1 to {}", sends - 1, allowed - 1),
        ));
    };
    if request.host_receives() == 0 {
        return Err((CmStatus::INVALID_HRQSIZE, "hrqsize 0: at least 1".to_owned()));
    }
    // The target fetches the data of writes by READs.
    if reads == 0 {
        return Err((CmStatus::INVALID_IRD, "responder resources 0: at least 1".to_owned()));
    }
    Ok(QueueParams { qid, entries, responder_resources: reads })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENTRIES_MAX: u16 = 128;

    /// Private data with these fields; `hsqsize` is 0-based.
    fn data(qid: u16, hrqsize: u16, hsqsize: u16) -> Vec<u8> {
        let mut data = vec![0; 56];
        data[2..4].copy_from_slice(&qid.to_le_bytes());
        data[4..6].copy_from_slice(&hrqsize.to_le_bytes());
        data[6..8].copy_from_slice(&hsqsize.to_le_bytes());
        data
    }

    fn refused(data: &[u8], reads: u8) -> Option<CmStatus> {
        check_data(data, reads, ENTRIES_MAX).err().map(|(status, _)| status)
    }

    #[test]
    fn what_a_host_asks_for_wrongly_is_refused_with_the_code_of_its_field() {
        let good = data(1, 128, 127);
        assert_eq!(refused(&good[..31], 1), Some(CmStatus::INVALID_LEN));
        assert_eq!(refused(&[], 1), Some(CmStatus::INVALID_LEN));
        assert_eq!(refused(&[&[1], &good[1..]].concat(), 1), Some(CmStatus::INVALID_RECFMT));
        assert_eq!(refused(&data(u16::MAX, 128, 127), 1), Some(CmStatus::INVALID_QID));
        for hsqsize in [0, 128, u16::MAX] {
            assert_eq!(refused(&data(1, 128, hsqsize), 1), Some(CmStatus::INVALID_HSQSIZE), "{hsqsize}");
        }
        assert_eq!(refused(&data(0, 32, 32), 1), Some(CmStatus::INVALID_HSQSIZE), "an admin queue has 32");
        assert_eq!(refused(&data(1, 0, 127), 1), Some(CmStatus::INVALID_HRQSIZE));
        assert_eq!(refused(&good, 0), Some(CmStatus::INVALID_IRD));
    }

    #[test]
    fn an_admin_queue_has_32_entries_however_short_io_queues_are() {
        for entries_max in [2, 31, 32, 128] {
            let entries = |qid, hsqsize| {
                check_data(&data(qid, 32, hsqsize), 1, entries_max).map(|it| it.entries).map_err(|it| it.0)
            };
            assert_eq!(entries(0, 31), Ok(32), "{entries_max}");
            assert_eq!(entries(0, 32), Err(CmStatus::INVALID_HSQSIZE), "{entries_max}");
            assert_eq!(entries(1, entries_max - 1), Ok(entries_max));
            assert_eq!(entries(1, entries_max), Err(CmStatus::INVALID_HSQSIZE), "{entries_max}");
        }
    }

    #[test]
    fn a_host_gets_the_receives_that_it_has_sends_for() {
        for (data, entries) in
            [(data(0, 32, 31), 32), (data(1, 128, 127), 128), (data(1, 1, 1), 2), (data(7, 9, 99), 100)]
        {
            let params = check_data(&data, 16, ENTRIES_MAX).expect("all is right");
            let qid = u16::from_le_bytes([data[2], data[3]]);
            assert_eq!(params, QueueParams { qid, entries, responder_resources: 16 });
        }
    }
}
