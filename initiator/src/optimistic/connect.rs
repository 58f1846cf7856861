//! Connects to the target's optimistic service. Blocks for at most the connect timeout.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use nvme_spec::optimistic::{
    OPTIMISTIC_PAGE_SHIFT, OptimisticAccept, OptimisticReject, OptimisticRequest, Token,
};
use nvme_spec::zerocopy::IntoBytes;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use spindle_rdma_verbs::{
    CmChannel, CmEvent, CmEventKind, CmId, CompletionQueue, ConnectParams, Device, QueuePairConfig,
    VerbsError,
};
use spindle_reactor::mem::{Pages, Pool, ZoneSpec};

use super::RdmaReader;
use super::reader::{ReaderVerbs, SEAL_STRIDE};
use crate::error::{Error, RdmaRefusal};
use crate::link::Registrations;
use crate::options::Options;

const STEP: &str = "connect for optimistic reads";

/// Connects with a token to `address`, for reads of commands in slots below `slots`.
pub(crate) fn connect(
    address: SocketAddr,
    token: Token,
    slots: usize,
    options: &Options,
) -> Result<RdmaReader, Error> {
    let failed = |source| Error::Rdma { address, step: STEP, source };
    if Device::all().map_err(failed)?.is_empty() {
        return Err(Error::NoRdma);
    }
    let channel = CmChannel::new().map_err(|_| Error::NoRdma)?;
    let id = CmId::new(&channel).map_err(failed)?;
    let attempt =
        Attempt { id, channel, address, deadline: Instant::now() + options.connect_timeout, options };
    let timeout = options.connect_timeout;
    attempt.id.resolve_address(None, address, timeout).map_err(failed)?;
    attempt.wait(CmEventKind::AddressResolved)?;
    attempt.id.resolve_route(timeout).map_err(failed)?;
    attempt.wait(CmEventKind::RouteResolved)?;
    attempt.establish(token, slots)
}

struct Attempt<'a> {
    id: CmId,
    channel: CmChannel,
    address: SocketAddr,
    deadline: Instant,
    options: &'a Options,
}

impl Attempt<'_> {
    fn failed(&self, source: VerbsError) -> Error {
        Error::Rdma { address: self.address, step: STEP, source }
    }

    /// Waits for an event of this kind.
    fn wait(&self, wanted: CmEventKind) -> Result<CmEvent, Error> {
        loop {
            if let Some(event) = self.channel.next_event().map_err(|error| self.failed(error))? {
                if event.id != self.id.token() {
                    continue;
                }
                return if event.kind == wanted { Ok(event) } else { Err(self.refusal(&event)) };
            }
            let left = self.deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::TimedOut { step: STEP, after: self.options.connect_timeout });
            }
            let timeout = Timespec::try_from(left).ok();
            // An error ends the wait early; the next loop reports it.
            let _ = poll(&mut [PollFd::new(&self.channel, PollFlags::IN)], timeout.as_ref());
        }
    }

    fn refusal(&self, event: &CmEvent) -> Error {
        let address = self.address;
        if event.kind == CmEventKind::Rejected {
            let status = OptimisticReject::parse(&event.private_data);
            let why = status.map_or(RdmaRefusal::Other(event.status), RdmaRefusal::Optimistic);
            return Error::RdmaRefused { address, why };
        }
        let errno = if event.status < 0 { -event.status } else { rustix::io::Errno::IO.raw_os_error() };
        self.failed(VerbsError { verb: "rdma_connect", errno })
    }

    fn establish(self, token: Token, slots: usize) -> Result<RdmaReader, Error> {
        let failed = |error| self.failed(error);
        let devices = Device::all().map_err(failed)?;
        let device = Arc::clone(self.id.device(&devices).ok_or(Error::NoRdma)?);
        let limits = device.limits();
        let reads = u32::try_from(slots).unwrap_or(u32::MAX);
        // Two READs for each command.
        Error::in_range("commands outstanding of a queue (RDMA device)", reads, 1_u32, limits.send_wr / 2)?;
        let queue = CompletionQueue::new(&device, 2 * reads, 0, None).map_err(failed)?;
        let config = QueuePairConfig {
            cq: &queue,
            domain: None,
            srq: None,
            send_wr: 2 * reads,
            recv_wr: 1,
            send_sge: 1,
            recv_sge: 1,
            inline_bytes: 0,
            posting: None,
        };
        let queue_pair = self.id.create_queue_pair(&device, &config).map_err(failed)?;
        let bytes = u32::try_from((slots * SEAL_STRIDE).next_multiple_of(4096)).unwrap_or(u32::MAX);
        let pool = Pool::new(&[ZoneSpec { buffer_bytes: bytes, count: 1 }], Pages::Base)?;
        let region = device.register(pool.area(), limits.read_access()).map_err(failed)?;
        let seals = pool.take(bytes).ok_or(Error::Busy { step: STEP })?;
        let request = OptimisticRequest::new(token);
        let parameters = ConnectParams {
            private_data: request.as_bytes(),
            responder_resources: 0,
            initiator_depth: limits.initiator_depth,
        };
        self.id.connect(&parameters).map_err(failed)?;
        let event = self.wait(CmEventKind::Established)?;
        let accept = OptimisticAccept::parse(&event.private_data)
            .filter(|accept| accept.page_shift == OPTIMISTIC_PAGE_SHIFT)
            .ok_or(Error::Answer { step: STEP, what: "the private data is not of this protocol" })?;
        let registrations = Registrations::of(&device, self.options.registration);
        let Attempt { id, channel, .. } = self;
        let verbs = ReaderVerbs { queue_pair, queue, region, seals, id, channel };
        Ok(RdmaReader::new(verbs, accept, registrations, slots))
    }
}
