//! Connection requests: who is let in, with what, and with which reason others are not (NVMe/RDMA Transport,
//! "RDMA_CM Private Data").

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
    /// Refuse it with a reason.
    pub fn reject(self, status: CmStatus) {
        // The host may have gone meanwhile; then nobody hears it.
        let _ = self.id.reject(CmReject::new(status).as_bytes());
    }
}

/// Check what a host asks for.
///
/// # Errors
/// The code to reject it with, and the reason for the log: field, value, what is allowed.
pub fn check(event: &CmEvent, limits: &DeviceLimits, entries_max: u16) -> Result<Wanted, (CmStatus, String)> {
    let data = &event.private_data;
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
    let reads = event.initiator_depth.min(limits.initiator_depth);
    if reads == 0 {
        return Err((CmStatus::INVALID_IRD, "responder resources 0: at least 1".to_owned()));
    }
    Ok(Wanted { qid, entries, responder_resources: reads })
}
