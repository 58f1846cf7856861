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
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use spindle_nvme_rdma::host::ENTRY_BYTES;
use spindle_nvme_rdma::registration::Limits as RegistrationLimits;
use spindle_rdma::{
    Access, CmChannel, CmEvent, CmEventKind, CmId, CompletionChannel, CompletionQueue, ConnectParams, Device,
    Domain, QueuePair, QueuePairConfig, VerbsError,
};
use spindle_reactor::mem::{Pages, Pool, ZoneSpec};

use super::super::QueueName;
use super::domains::domain_of;
use super::{Memory, RECEIVE, REPLY_BYTES, REPLY_STRIDE, RdmaLink, Verbs};
use crate::error::{Error, RdmaRefusal};
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

/// A connection attempt, in steps that do not block.
pub(crate) struct RdmaOpening {
    /// First field, so dropped first: the queue pair uses objects of `attempt`.
    step: Step,
    name: QueueName,
    registration: RegistrationLimits,
    /// `None` after the link was returned.
    attempt: Option<Attempt>,
}

enum Step {
    /// Address resolution, which also selects the device.
    Address,
    /// Route resolution.
    Route,
    /// The connect request was sent; Established has not arrived.
    Connect(Box<QueuePairParts>),
    /// The link was returned, or the attempt has failed.
    Finished,
}

/// Verbs objects created before the connect request, in drop order: the queue pair uses the objects after it.
struct QueuePairParts {
    queue_pair: QueuePair,
    queue: CompletionQueue,
    completions: CompletionChannel,
    memory: Memory,
    domain: Arc<Domain>,
}

/// Connection manager objects and parameters of the attempt.
struct Attempt {
    id: CmId,
    channel: CmChannel,
    address: SocketAddr,
    timeout: Duration,
}

const CONNECT: &str = "RDMA connect";

impl RdmaOpening {
    /// Starts the address resolution.
    pub(in super::super) fn begin(
        address: SocketAddr,
        options: &Options,
        name: QueueName,
    ) -> Result<RdmaOpening, Error> {
        let failed = |step| move |source| Error::Rdma { address, step, source };
        if Device::all().map_err(failed("devices"))?.is_empty() {
            return Err(Error::NoRdma);
        }
        let channel = CmChannel::new().map_err(|_| Error::NoRdma)?;
        let id = CmId::new(&channel).map_err(failed("identifier"))?;
        let attempt = Attempt { id, channel, address, timeout: options.connect_timeout };
        attempt.id.resolve_address(None, address, attempt.timeout).map_err(failed("address"))?;
        let registration = options.registration;
        Ok(RdmaOpening { step: Step::Address, name, registration, attempt: Some(attempt) })
    }

    /// Returns the name of the current step.
    pub(in super::super) fn name(&self) -> &'static str {
        match self.step {
            Step::Address => "RDMA address",
            Step::Route => "RDMA route",
            Step::Connect(_) | Step::Finished => CONNECT,
        }
    }

    /// Advances without blocking. Returns the link when commands can be submitted, `None` before.
    pub(in super::super) fn step(&mut self) -> Result<Option<RdmaLink>, Error> {
        let wanted = match self.step {
            Step::Address => CmEventKind::AddressResolved,
            Step::Route => CmEventKind::RouteResolved,
            Step::Connect(_) => CmEventKind::Established,
            Step::Finished => return Ok(None),
        };
        let name = self.name();
        let Some(attempt) = &self.attempt else { return Ok(None) };
        let Some(event) = attempt.event(name, wanted)? else { return Ok(None) };
        match std::mem::replace(&mut self.step, Step::Finished) {
            Step::Address => {
                attempt.id.resolve_route(attempt.timeout).map_err(attempt.failed("route"))?;
                self.step = Step::Route;
            }
            Step::Route => self.step = Step::Connect(Box::new(attempt.connect(self.name)?)),
            Step::Connect(parts) => return self.establish(*parts, &event),
            Step::Finished => {}
        }
        Ok(None)
    }

    fn establish(&mut self, parts: QueuePairParts, event: &CmEvent) -> Result<Option<RdmaLink>, Error> {
        let Some(accept) = CmAccept::parse(&event.private_data) else {
            return Err(Error::Answer { step: CONNECT, what: "the target's private data is not NVMe's" });
        };
        if accept.crqsize() < self.name.depth {
            let what = "the target receives fewer commands than the queue holds";
            return Err(Error::Answer { step: CONNECT, what });
        }
        let QueuePairParts { queue_pair, queue, completions, memory, domain } = parts;
        let Some(Attempt { id, channel, .. }) = self.attempt.take() else { return Ok(None) };
        let verbs = Verbs { queue_pair, queue, completions, memory, id, channel };
        Ok(Some(RdmaLink::new(verbs, &domain, self.registration, self.name.depth)))
    }

    /// Sleeps until an event of the connection manager arrives, at most `timeout`; may return early.
    pub(in super::super) fn wait_io(&self, timeout: Duration) {
        let timeout = Timespec::try_from(timeout).ok();
        if let Some(attempt) = &self.attempt {
            // An error ends the wait early; the next step reports it.
            let _ = poll(&mut [PollFd::new(&attempt.channel, PollFlags::IN)], timeout.as_ref());
        }
    }
}

impl Attempt {
    fn failed(&self, step: &'static str) -> impl Fn(VerbsError) -> Error + use<> {
        let address = self.address;
        move |source| Error::Rdma { address, step, source }
    }

    /// Returns the next event of this connection, `None` if there is none; an error unless the event is of
    /// kind `wanted`.
    fn event(&self, step: &'static str, wanted: CmEventKind) -> Result<Option<CmEvent>, Error> {
        while let Some(event) = self.channel.next_event().map_err(self.failed(step))? {
            if event.id != self.id.token() {
                continue;
            }
            return if event.kind == wanted { Ok(Some(event)) } else { Err(self.refusal(step, &event)) };
        }
        Ok(None)
    }

    /// Creates the queue pair, after route resolution, and sends the connect request.
    fn connect(&self, name: QueueName) -> Result<QueuePairParts, Error> {
        // Listed again: the device may have been added after `begin`.
        let devices = Device::all().map_err(self.failed("devices"))?;
        let device = Arc::clone(self.id.device(&devices).ok_or(Error::NoRdma)?);
        let parts = self.make_queue_pair(device, name)?;
        let entries = u32::from(name.depth) + 1;
        let request = CmRequest::new(name.qid, u16::try_from(entries).unwrap_or(u16::MAX), name.cntlid);
        let parameters = ConnectParams {
            private_data: request.as_bytes(),
            // RDMA READs of the controller that may be outstanding to this host. The host itself issues none.
            responder_resources: parts.domain.device().limits().responder_resources,
            ..ConnectParams::default()
        };
        self.id.connect(&parameters).map_err(self.failed("connect"))?;
        Ok(parts)
    }

    /// Converts an unexpected event to an error.
    fn refusal(&self, step: &'static str, event: &CmEvent) -> Error {
        let address = self.address;
        if event.kind == CmEventKind::Rejected {
            // Without a listener the connection manager rejects the request and sends no NVMe private data.
            let why = match CmReject::parse(&event.private_data) {
                _ if [REJECT_NO_SERVICE, REJECT_REFUSED].contains(&event.status) => RdmaRefusal::NoListener,
                Some(reject) => RdmaRefusal::Status(reject.status()),
                None => RdmaRefusal::Other(event.status),
            };
            return Error::RdmaRefused { address, why };
        }
        // The status is a negative errno of the kernel; otherwise the error is "host unreachable".
        let errno = event.status.saturating_neg();
        let errno = if errno > 0 { errno } else { rustix::io::Errno::HOSTUNREACH.raw_os_error() };
        let verb = if event.kind == CmEventKind::AddressError {
            "rdma_resolve_addr"
        } else if event.kind == CmEventKind::RouteError {
            "rdma_resolve_route"
        } else {
            "rdma_connect"
        };
        Error::Rdma { address, step, source: VerbsError { verb, errno } }
    }

    /// Creates the queue pair and its objects, and posts all receives. Fails if the depth exceeds the
    /// device's limit.
    fn make_queue_pair(&self, device: Arc<Device>, name: QueueName) -> Result<QueuePairParts, Error> {
        let limits = device.limits();
        let entries = u32::from(name.depth) + 1;
        let field = "commands outstanding of a queue (RDMA device)";
        Error::in_range(field, name.depth, 1_u16, limits.send_wr.saturating_sub(1))?;
        let send_wr = (entries + SEND_SPARE).min(limits.send_wr);
        let completions = CompletionChannel::new(&device).map_err(self.failed("completion channel"))?;
        // Spreads the queues over completion vectors, so that different interrupts signal them.
        let domain = domain_of(&device, self.address).map_err(self.failed("protection domain"))?;
        let vector = u32::from(name.qid) % limits.vectors.max(1);
        let queue = CompletionQueue::new(&device, send_wr + entries, vector, Some(&completions))
            .map_err(self.failed("completion queue"))?;
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
        let queue_pair = self.id.create_queue_pair(&device, &config).map_err(self.failed("queue pair"))?;
        let memory = self.make_memory(&domain, name.depth, entries)?;
        let mut queue_pair = queue_pair;
        let receives = (0..entries).map(|index| (RECEIVE | u64::from(index), memory.reply_sge(index)));
        queue_pair.post_receives(receives).map_err(VerbsError::from).map_err(self.failed("receives"))?;
        Ok(QueuePairParts { queue_pair, queue, completions, memory, domain })
    }

    /// Allocates and registers memory for command capsules and completion queue entries.
    fn make_memory(&self, domain: &Arc<Domain>, depth: u16, entries: u32) -> Result<Memory, Error> {
        let whole = |bytes: usize| u32::try_from(bytes.next_multiple_of(4096)).unwrap_or(u32::MAX);
        let heads = whole(usize::from(depth) * ENTRY_BYTES);
        let replies = whole(entries as usize * REPLY_STRIDE);
        // Zone sizes of a pool must ascend: if both are equal, the capsule zone is made larger.
        let heads = if heads == replies { heads + 4096 } else { heads };
        let zones =
            [ZoneSpec { buffer_bytes: replies, count: 1 }, ZoneSpec { buffer_bytes: heads, count: 1 }];
        let pool = Pool::new(&zones, Pages::Base)?;
        let region =
            domain.register(pool.area(), Access::LOCAL_WRITE).map_err(self.failed("memory of the queue"))?;
        let step = "memory of the queue";
        let replies = pool.take(replies).ok_or(Error::Busy { step })?;
        let heads = pool.take(heads).ok_or(Error::Busy { step })?;
        Ok(Memory { region, heads, replies })
    }
}

const _: () = assert!(REPLY_BYTES as usize <= REPLY_STRIDE && REPLY_STRIDE <= ENTRY_BYTES);
