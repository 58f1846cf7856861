//! RDMA connect in steps that do not wait for the target. The step after the route creates the queue pair and
//! registers the queue's memory.
//!
//! ```text
//!   address (selects the device) ─> route ─> queue pair, receives posted ─> connect ─> Established
//! ```

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use nvme_spec::rdma::{CmAccept, CmReject, CmRequest};
use nvme_spec::zerocopy::IntoBytes;
use spindle_nvme_rdma::host::ENTRY_BYTES;
use spindle_nvme_rdma::registration::{Limits as RegistrationLimits, domain_of};
use spindle_rdma::{
    Access, CmEvent, CmEventKind, CmId, CompletionChannel, CompletionQueue, ConnectError, ConnectParams,
    Connector, Device, Domain, Progress, QueuePair, QueuePairConfig, VerbsError,
};
use spindle_reactor::mem::{Pages, Pool, ZoneSpec};
use spindle_reactor::net::Errno;

use super::super::QueueName;
use super::{Memory, RECEIVE, REPLY_BYTES, REPLY_STRIDE, RdmaLink, Verbs};
use crate::error::Error;
use crate::options::Options;

/// Inline bytes requested per SEND: an SQE without a list of SGL descriptors.
const INLINE_BYTES: u32 = 64;
/// Most scatter/gather elements per SEND: one for the capsule head, three for in-capsule data.
const SEND_SGE: u32 = 4;
/// Send queue entries beyond the depth, for unsignalled SENDs of unknown state.
const SEND_SPARE: u32 = 16;
/// Reject reason of the InfiniBand connection manager without a listener: invalid service ID.
const REJECT_NO_SERVICE: i32 = 8;
/// Reject reason of iWARP without a listener: `-ECONNREFUSED`.
const REJECT_REFUSED: i32 = -111;

pub(crate) struct RdmaOpening {
    /// Dropped first: the queue pair uses the connector's identifier. `None` before the connect request.
    parts: Option<QueuePairParts>,
    connector: Connector,
    address: SocketAddr,
    name: QueueName,
    registration: RegistrationLimits,
}

/// Verbs objects created before the connect request, in drop order: the queue pair uses the objects after it.
struct QueuePairParts {
    queue_pair: QueuePair,
    queue: CompletionQueue,
    completions: CompletionChannel,
    memory: Memory,
    domain: Arc<Domain>,
}

impl RdmaOpening {
    pub(in super::super) fn begin(
        address: SocketAddr,
        options: &Options,
        name: QueueName,
    ) -> Result<RdmaOpening, Error> {
        let connector = Connector::begin(address, options.connect_timeout, None)?;
        Ok(RdmaOpening { parts: None, connector, address, name, registration: options.registration })
    }

    pub(in super::super) fn name(&self) -> &'static str {
        self.connector.name()
    }

    /// Advances without blocking. Returns the link when commands can be submitted, `None` before.
    pub(in super::super) fn step(&mut self) -> Result<Option<RdmaLink>, Error> {
        let step = self.name();
        match self.connector.step()? {
            None => Ok(None),
            Some(Progress::Routed(id, device)) => {
                let parts = QueuePairParts::new(id, &device, self.address, self.name)?;
                let entries = u16::try_from(u32::from(self.name.depth) + 1).unwrap_or(u16::MAX);
                let request = CmRequest::new(self.name.qid, entries, self.name.cntlid);
                let parameters = ConnectParams {
                    private_data: request.as_bytes(),
                    // RDMA READs of the controller outstanding to this host, which itself issues none.
                    responder_resources: device.limits().responder_resources,
                    ..ConnectParams::default()
                };
                id.connect(&parameters).map_err(ConnectError::failed(self.address, "connect"))?;
                self.parts = Some(parts);
                Ok(None)
            }
            Some(Progress::Established(id, channel, event)) => {
                let Some(parts) = self.parts.take() else { return Ok(None) };
                let Some(accept) = CmAccept::parse(&event.private_data) else {
                    return Err(Error::Answer {
                        step,
                        what: "the target's private data is not that of NVMe/RDMA",
                    });
                };
                if accept.crqsize() < self.name.depth {
                    let what = "the target receives fewer commands than the queue holds";
                    return Err(Error::Answer { step, what });
                }
                let QueuePairParts { queue_pair, queue, completions, memory, domain } = parts;
                let verbs = Verbs { queue_pair, queue, completions, memory, id, channel };
                Ok(Some(RdmaLink::new(verbs, &domain, self.registration, self.name.depth)))
            }
            Some(Progress::Ended(event)) => Err(refusal(self.address, step, &event).into()),
        }
    }

    pub(in super::super) fn wait_io(&self, timeout: Duration) {
        self.connector.wait_io(timeout);
    }
}

/// Converts the event that ended the attempt in step `step`.
fn refusal(address: SocketAddr, step: &'static str, event: &CmEvent) -> ConnectError {
    if event.kind == CmEventKind::Rejected {
        // Without a listener the connection manager rejects the request and sends no NVMe private data.
        let why = match CmReject::parse(&event.private_data) {
            _ if [REJECT_NO_SERVICE, REJECT_REFUSED].contains(&event.status) => {
                "no target listens at the address".to_owned()
            }
            Some(reject) => format!("the target refused: {}", reject.status().reason()),
            None => format!("it was refused (reason {})", event.status),
        };
        return ConnectError::Refused { address, why };
    }
    // The status is a negative errno of the kernel; otherwise the error is "host unreachable".
    let errno = event.errno().unwrap_or(Errno::HOSTUNREACH.raw_os_error());
    let verb = if event.kind == CmEventKind::AddressError {
        "rdma_resolve_addr"
    } else if event.kind == CmEventKind::RouteError {
        "rdma_resolve_route"
    } else {
        "rdma_connect"
    };
    ConnectError::failed(address, step)(VerbsError { verb, errno })
}

impl QueuePairParts {
    /// Creates the queue pair and posts all receives. Fails if the depth exceeds the device's limit.
    fn new(
        id: &CmId,
        device: &Arc<Device>,
        address: SocketAddr,
        name: QueueName,
    ) -> Result<QueuePairParts, Error> {
        let failed = |step| ConnectError::failed(address, step);
        let limits = device.limits();
        let entries = u32::from(name.depth) + 1;
        let field = "commands outstanding of a queue (RDMA device)";
        Error::in_range(field, name.depth, 1_u16, limits.send_wr.saturating_sub(1))?;
        let send_wr = (entries + SEND_SPARE).min(limits.send_wr);
        let completions = CompletionChannel::new(device).map_err(failed("completion channel"))?;
        // Spreads the queues over completion vectors, so that different interrupts signal them.
        let domain = domain_of(device, address).map_err(failed("protection domain"))?;
        let vector = u32::from(name.qid) % limits.vectors.max(1);
        let queue = CompletionQueue::new(device, send_wr + entries, vector, Some(&completions))
            .map_err(failed("completion queue"))?;
        let config = QueuePairConfig {
            cq: &queue,
            domain: Some(&domain),
            srq: None,
            send_wr,
            recv_wr: entries,
            send_sge: SEND_SGE.min(limits.sge),
            recv_sge: 1,
            inline_bytes: INLINE_BYTES,
            posting: None,
        };
        // Before the queue pair, which is then dropped first where the receives cannot all be posted.
        let memory = make_memory(&domain, address, name.depth, entries)?;
        let mut queue_pair = id.create_queue_pair(device, &config).map_err(failed("queue pair"))?;
        let receives = (0..entries).map(|index| (RECEIVE | u64::from(index), memory.reply_sge(index)));
        queue_pair.post_receives(receives).map_err(VerbsError::from).map_err(failed("receives"))?;
        Ok(QueuePairParts { queue_pair, queue, completions, memory, domain })
    }
}

/// Allocates and registers memory for command capsules and completion queue entries.
fn make_memory(domain: &Arc<Domain>, address: SocketAddr, depth: u16, entries: u32) -> Result<Memory, Error> {
    let whole = |bytes: usize| u32::try_from(bytes.next_multiple_of(4096)).unwrap_or(u32::MAX);
    let heads = whole(usize::from(depth) * ENTRY_BYTES);
    let replies = whole(entries as usize * REPLY_STRIDE);
    // Zone sizes of a pool must ascend: if both are equal, the capsule zone is made larger.
    let heads = if heads == replies { heads + 4096 } else { heads };
    let zones = [ZoneSpec { buffer_bytes: replies, count: 1 }, ZoneSpec { buffer_bytes: heads, count: 1 }];
    let pool = Pool::new(&zones, Pages::Base)?;
    let step = "memory of the queue";
    let failed = ConnectError::failed(address, step);
    let region = domain.register(pool.area(), Access::LOCAL_WRITE).map_err(failed)?;
    let replies = pool.take(replies).ok_or(Error::Busy { step })?;
    let heads = pool.take(heads).ok_or(Error::Busy { step })?;
    Ok(Memory { region, heads, replies })
}

const _: () = assert!(REPLY_BYTES as usize <= REPLY_STRIDE && REPLY_STRIDE <= ENTRY_BYTES);

#[cfg(test)]
mod tests {
    use nvme_spec::rdma::CmStatus;
    use spindle_rdma::CmToken;

    use super::*;

    #[test]
    fn a_refusal_over_rdma_says_why_in_nvmes_words() {
        let refused = |kind, status, data: &[u8]| {
            let event = CmEvent {
                kind,
                id: CmToken::next(),
                listener: None,
                new_id: None,
                status,
                private_data: data.iter().copied().collect(),
                responder_resources: 0,
                initiator_depth: 0,
            };
            refusal("10.9.1.1:4420".parse().expect("an address"), "RDMA address", &event).to_string()
        };
        let reject = CmReject::new(CmStatus::INVALID_HSQSIZE);
        let text = refused(CmEventKind::Rejected, 28, reject.as_bytes());
        assert!(text.contains("HSQSIZE"), "{text}");
        let text = refused(CmEventKind::Rejected, REJECT_REFUSED, &[]);
        assert!(text.contains("10.9.1.1:4420") && text.contains("no target listens"), "{text}");
        let text = refused(CmEventKind::AddressError, -110, &[]);
        assert!(text.contains("rdma_resolve_addr") && text.contains("(110)"), "{text}");
    }
}
