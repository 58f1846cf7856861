//! Connection requests: who is let in, with what, and with which reason others are not (NVMe/RDMA Transport,
//! "RDMA_CM Private Data").

use std::net::SocketAddr;

use nvme_spec::rdma::{ADMIN_QUEUE_ENTRIES, CmReject, CmRequest, CmStatus};
use nvme_spec::zerocopy::IntoBytes;
use spindle_rdma_verbs::{CmEvent, CmId, DeviceLimits};

/// What a host asks for, checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    /// The queue that Connect will name.
    pub qid: u16,
    /// Capsules that the host may have on their way: receives that are posted for it.
    pub entries: u16,
    /// RDMA READs that the host serves at once.
    pub responder_resources: u8,
}

/// A connection request on its way to its core.
#[derive(Debug)]
pub struct Request {
    /// The identifier; dropped, it refuses.
    pub id: CmId,
    /// Index of the listener in the configuration.
    pub listener: usize,
    /// What is wanted.
    pub wanted: Wanted,
}

impl Request {
    /// The host's address.
    #[must_use]
    pub fn remote(&self) -> Option<SocketAddr> {
        self.id.peer_address()
    }

    /// Refuse it with a reason.
    pub fn reject(self, status: CmStatus) {
        reject(&self.id, status);
    }
}

/// Refuse a request with a reason. The host may have gone meanwhile; then the answer is lost.
pub(super) fn reject(id: &CmId, status: CmStatus) {
    let _ = id.reject(CmReject::new(status).as_bytes());
}

/// Check what a host asks for.
///
/// # Errors
/// The code to reject it with, and the reason for the log: field, value, what is allowed.
pub(super) fn check(
    event: &CmEvent,
    limits: &DeviceLimits,
    entries_max: u16,
) -> Result<Wanted, (CmStatus, String)> {
    check_data(&event.private_data, event.initiator_depth.min(limits.initiator_depth), entries_max)
}

/// The same; `reads` is how many both the host and our device allow.
fn check_data(data: &[u8], reads: u8, entries_max: u16) -> Result<Wanted, (CmStatus, String)> {
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
    let allowed = if qid == 0 { entries_max.min(ADMIN_QUEUE_ENTRIES) } else { entries_max };
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
    // Without READs of ours its writes could not be fetched.
    if reads == 0 {
        return Err((CmStatus::INVALID_IRD, "responder resources 0: at least 1".to_owned()));
    }
    Ok(Wanted { qid, entries, responder_resources: reads })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENTRIES_MAX: u16 = 128;

    /// Private data with these sizes, of which `hsqsize` counts from 0.
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
    fn a_host_gets_the_receives_that_it_has_sends_for() {
        for (data, entries) in
            [(data(0, 32, 31), 32), (data(1, 128, 127), 128), (data(1, 1, 1), 2), (data(7, 9, 99), 100)]
        {
            let wanted = check_data(&data, 16, ENTRIES_MAX).expect("all is right");
            let qid = u16::from_le_bytes([data[2], data[3]]);
            assert_eq!(wanted, Wanted { qid, entries, responder_resources: 16 });
        }
    }
}
