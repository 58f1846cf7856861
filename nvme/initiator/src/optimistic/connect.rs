//! Connects to the target's optimistic service, in steps that do not wait for the target.
//!
//! ```text
//!   address (selects the device) ─> route ─> queue pair, memory of the seals ─> connect ─> Established
//! ```
//! [`Handshake`] decides what follows an event; [`Attempt`] has the verbs objects.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use arrayvec::ArrayVec;
use nvme_spec::optimistic::{
    OPTIMISTIC_PAGE_SHIFT, OptimisticAccept, OptimisticReject, OptimisticRequest, Token,
};
use nvme_spec::zerocopy::IntoBytes;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use spindle_nvme_rdma::registration::Limits as RegistrationLimits;
use spindle_rdma::{
    CmChannel, CmEventKind, CmId, CompletionQueue, ConnectParams, Device, Domain, MemoryRegion,
    PRIVATE_DATA_BYTES_MAX, QueuePair, QueuePairConfig, VerbsError,
};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Buf, Pages, Pool, ZoneSpec};

use super::RdmaReader;
use super::reader::{ReaderVerbs, seal_bytes, work_requests};
use crate::error::{Error, RdmaRefusal};
use crate::link::{Registrations, domain_of};

const STEP: &str = "connect for optimistic reads";

/// Event of the connection manager for the attempt.
#[derive(Debug)]
pub(super) struct Event {
    pub(super) kind: CmEventKind,
    /// 0, a negated error number, or a reject reason.
    pub(super) status: i32,
    pub(super) private_data: ArrayVec<u8, PRIVATE_DATA_BYTES_MAX>,
}

/// What a handshake does; tests implement it without verbs.
pub(super) trait Connector {
    /// Returns the next event; `None`: no event now.
    fn next_event(&mut self) -> Result<Option<Event>, Error>;
    /// Starts the route resolution.
    fn resolve_route(&mut self) -> Result<(), Error>;
    /// Creates the queue pair and sends the connect request.
    fn request(&mut self) -> Result<(), Error>;
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Address,
    Route,
    Connect,
    /// The accept was returned, or the attempt has failed.
    Finished,
}

/// Order of the steps, and their common timeout.
#[derive(Debug)]
pub(super) struct Handshake {
    step: Step,
    address: SocketAddr,
    deadline: Nanos,
    timeout: Duration,
}

impl Handshake {
    /// The address resolution was started at `now`.
    pub(super) fn new(address: SocketAddr, timeout: Duration, now: Nanos) -> Handshake {
        Handshake { step: Step::Address, address, deadline: now + timeout.into(), timeout }
    }

    pub(super) fn deadline(&self) -> Nanos {
        self.deadline
    }

    /// Handles the events that have arrived. Returns the accept once the connection is established. Must not
    /// be called afterwards or after an error.
    pub(super) fn step(
        &mut self,
        connector: &mut impl Connector,
        now: Nanos,
    ) -> Result<Option<OptimisticAccept>, Error> {
        let result = self.advance(connector, now);
        if !matches!(result, Ok(None)) {
            self.step = Step::Finished;
        }
        result
    }

    fn advance(
        &mut self,
        connector: &mut impl Connector,
        now: Nanos,
    ) -> Result<Option<OptimisticAccept>, Error> {
        while let Some(event) = connector.next_event()? {
            match (self.step, event.kind) {
                (Step::Address, CmEventKind::AddressResolved) => {
                    connector.resolve_route()?;
                    self.step = Step::Route;
                }
                (Step::Route, CmEventKind::RouteResolved) => {
                    connector.request()?;
                    self.step = Step::Connect;
                }
                (Step::Connect, CmEventKind::Established) => return accepted(&event).map(Some),
                _ => return Err(self.refusal(&event)),
            }
        }
        if now >= self.deadline && self.step != Step::Finished {
            return Err(Error::TimedOut { step: STEP, after: self.timeout });
        }
        Ok(None)
    }

    fn refusal(&self, event: &Event) -> Error {
        let address = self.address;
        if event.kind == CmEventKind::Rejected {
            let status = OptimisticReject::parse(&event.private_data);
            let why = status.map_or(RdmaRefusal::Other(event.status), RdmaRefusal::Optimistic);
            return Error::RdmaRefused { address, why };
        }
        let errno = event.status.saturating_neg();
        let errno = if errno > 0 { errno } else { rustix::io::Errno::IO.raw_os_error() };
        Error::Rdma { address, step: STEP, source: VerbsError { verb: "rdma_connect", errno } }
    }
}

fn accepted(event: &Event) -> Result<OptimisticAccept, Error> {
    OptimisticAccept::parse(&event.private_data)
        .filter(|accept| accept.page_shift == OPTIMISTIC_PAGE_SHIFT)
        .ok_or(Error::Answer { step: STEP, what: "the private data is not of this protocol" })
}

/// Objects made for the connect request, in drop order: the queue pair uses the objects after it.
struct Parts {
    queue_pair: QueuePair,
    queue: CompletionQueue,
    region: MemoryRegion,
    seals: Buf,
    domain: Arc<Domain>,
    /// Capacity of the send queue.
    work_requests: u32,
}

/// Verbs objects and parameters of an attempt.
pub(super) struct Attempt {
    /// First field, so dropped first. `None` before the route is resolved.
    parts: Option<Parts>,
    id: CmId,
    channel: CmChannel,
    address: SocketAddr,
    /// Address of the queue's target, whose protection domain the connection shares.
    far: SocketAddr,
    timeout: Duration,
    token: Token,
    /// Slots of commands are below.
    slots: usize,
}

impl Attempt {
    /// Starts the address resolution.
    pub(super) fn begin(
        address: SocketAddr,
        far: SocketAddr,
        token: Token,
        slots: usize,
        timeout: Duration,
    ) -> Result<Attempt, Error> {
        let failed = |source| Error::Rdma { address, step: STEP, source };
        if Device::all().map_err(failed)?.is_empty() {
            return Err(Error::NoRdma);
        }
        let channel = CmChannel::new().map_err(|_| Error::NoRdma)?;
        let id = CmId::new(&channel).map_err(failed)?;
        let attempt = Attempt { parts: None, id, channel, address, far, timeout, token, slots };
        attempt.id.resolve_address(None, address, timeout).map_err(failed)?;
        Ok(attempt)
    }

    fn failed(&self) -> impl Fn(VerbsError) -> Error + use<> {
        let address = self.address;
        move |source| Error::Rdma { address, step: STEP, source }
    }

    /// Makes the reader of an established connection.
    pub(super) fn into_reader(
        self,
        accept: OptimisticAccept,
        registration: RegistrationLimits,
        silence_max: Nanos,
    ) -> Result<RdmaReader, Error> {
        let Attempt { parts, id, channel, slots, .. } = self;
        // Not `None`: the connect request was sent.
        let Some(Parts { queue_pair, queue, region, seals, domain, work_requests }) = parts else {
            return Err(Error::Busy { step: STEP });
        };
        let registrations = Registrations::of(&domain, registration);
        let verbs = ReaderVerbs { queue_pair, queue, region, seals, id, channel };
        Ok(RdmaReader::new(verbs, accept, registrations, slots, work_requests as usize, silence_max))
    }

    /// Sleeps until an event arrives, at most `timeout`; may return early.
    pub(super) fn wait_io(&self, timeout: Duration) {
        let timeout = Timespec::try_from(timeout).ok();
        // An error ends the wait early; the next step reports it.
        let _ = poll(&mut [PollFd::new(&self.channel, PollFlags::IN)], timeout.as_ref());
    }

    fn make_parts(&self) -> Result<Parts, Error> {
        let devices = Device::all().map_err(self.failed())?;
        let device = Arc::clone(self.id.device(&devices).ok_or(Error::NoRdma)?);
        let limits = device.limits();
        let reads = u32::try_from(self.slots).unwrap_or(u32::MAX);
        // Two READs for each command.
        Error::in_range("commands outstanding of a queue (RDMA device)", reads, 1_u32, limits.send_wr / 2)?;
        let work_requests = u32::try_from(work_requests(self.slots)).unwrap_or(u32::MAX).min(limits.send_wr);
        // After a failure each work request has a completion.
        let queue = CompletionQueue::new(&device, work_requests, 0, None).map_err(self.failed())?;
        let domain = domain_of(&device, self.far).map_err(self.failed())?;
        let config = QueuePairConfig {
            cq: &queue,
            domain: Some(&domain),
            srq: None,
            send_wr: work_requests,
            recv_wr: 1,
            send_sge: 1,
            recv_sge: 1,
            inline_bytes: 0,
            posting: None,
        };
        let queue_pair = self.id.create_queue_pair(&device, &config).map_err(self.failed())?;
        let bytes = u32::try_from(seal_bytes(self.slots)).unwrap_or(u32::MAX);
        let pool = Pool::new(&[ZoneSpec { buffer_bytes: bytes, count: 1 }], Pages::Base)?;
        let region = domain.register(pool.area(), limits.read_access()).map_err(self.failed())?;
        let seals = pool.take(bytes).ok_or(Error::Busy { step: STEP })?;
        Ok(Parts { queue_pair, queue, region, seals, domain, work_requests })
    }
}

impl Connector for Attempt {
    fn next_event(&mut self) -> Result<Option<Event>, Error> {
        while let Some(event) = self.channel.next_event().map_err(self.failed())? {
            if event.id == self.id.token() {
                let (kind, status) = (event.kind, event.status);
                return Ok(Some(Event { kind, status, private_data: event.private_data }));
            }
        }
        Ok(None)
    }

    fn resolve_route(&mut self) -> Result<(), Error> {
        self.id.resolve_route(self.timeout).map_err(self.failed())
    }

    fn request(&mut self) -> Result<(), Error> {
        let parts = self.make_parts()?;
        let request = OptimisticRequest::new(self.token);
        let parameters = ConnectParams {
            private_data: request.as_bytes(),
            responder_resources: 0,
            initiator_depth: parts.domain.device().limits().initiator_depth,
        };
        self.parts = Some(parts);
        self.id.connect(&parameters).map_err(self.failed())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use nvme_spec::optimistic::OptimisticStatus;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(5);
    const BEGIN: Nanos = Nanos::from_secs(1);

    /// Plays events; notes what is done.
    #[derive(Default)]
    struct Script {
        events: VecDeque<Event>,
        done: Vec<&'static str>,
        has_no_queue_pair: bool,
    }

    impl Connector for Script {
        fn next_event(&mut self) -> Result<Option<Event>, Error> {
            Ok(self.events.pop_front())
        }

        fn resolve_route(&mut self) -> Result<(), Error> {
            self.done.push("route");
            Ok(())
        }

        fn request(&mut self) -> Result<(), Error> {
            self.done.push("request");
            if self.has_no_queue_pair { Err(Error::NoRdma) } else { Ok(()) }
        }
    }

    fn event(kind: CmEventKind, status: i32, data: &[u8]) -> Event {
        Event { kind, status, private_data: data.iter().copied().collect() }
    }

    fn handshake() -> Handshake {
        Handshake::new("192.0.2.1:4430".parse().expect("an address"), TIMEOUT, BEGIN)
    }

    /// Feeds events one by one; the result of the last.
    fn feed(script: &mut Script, events: Vec<Event>) -> Result<Option<OptimisticAccept>, Error> {
        let mut handshake = handshake();
        let last = events.len() - 1;
        for (at, event) in events.into_iter().enumerate() {
            script.events.push_back(event);
            let result = handshake.step(script, BEGIN);
            if at == last {
                return result;
            }
            assert!(matches!(result, Ok(None)), "event {at}: {result:?}");
        }
        Ok(None)
    }

    fn up_to(kind: CmEventKind, status: i32, data: &[u8]) -> Vec<Event> {
        let resolved = [CmEventKind::AddressResolved, CmEventKind::RouteResolved];
        let mut events: Vec<Event> = resolved.iter().map(|kind| event(*kind, 0, &[])).collect();
        events.push(event(kind, status, data));
        events
    }

    #[test]
    fn each_event_starts_the_next_step_and_the_accept_ends_it() {
        let accept = OptimisticAccept {
            version: 1.into(),
            epoch: 9,
            page_shift: OPTIMISTIC_PAGE_SHIFT,
            ..OptimisticAccept::default()
        };
        let mut script = Script::default();
        let found = feed(&mut script, up_to(CmEventKind::Established, 0, accept.as_bytes()));
        assert_eq!(found.expect("no error").map(|accept| accept.epoch), Some(9));
        assert_eq!(script.done, ["route", "request"]);
        // All events at once are one step.
        let mut script = Script::default();
        script.events.extend(up_to(CmEventKind::Established, 0, accept.as_bytes()));
        assert!(handshake().step(&mut script, BEGIN).is_ok_and(|accept| accept.is_some()));
    }

    #[test]
    fn it_gives_up_at_the_deadline_and_does_nothing_before() {
        let (mut script, mut handshake) = (Script::default(), handshake());
        let end = BEGIN + TIMEOUT.into();
        assert!(matches!(handshake.step(&mut script, end - Nanos(1)), Ok(None)));
        assert!(matches!(handshake.step(&mut script, end), Err(Error::TimedOut { after: TIMEOUT, .. })));
        assert!(matches!(handshake.step(&mut script, end), Ok(None)), "it is reported once");
        assert!(script.done.is_empty());
    }

    #[test]
    fn a_reject_a_failed_step_and_a_wrong_answer_are_errors() {
        let mut reject = [0; 4];
        reject[0] = 1;
        reject[2] = 4;
        let found = feed(&mut Script::default(), up_to(CmEventKind::Rejected, 28, &reject));
        let too_many = RdmaRefusal::Optimistic(OptimisticStatus(4));
        assert!(matches!(found, Err(Error::RdmaRefused { why, .. }) if why == too_many), "{found:?}");
        let found = feed(&mut Script::default(), up_to(CmEventKind::Rejected, 8, &[]));
        assert!(matches!(found, Err(Error::RdmaRefused { why: RdmaRefusal::Other(8), .. })), "{found:?}");
        let found = feed(&mut Script::default(), vec![event(CmEventKind::AddressError, -110, &[])]);
        assert!(matches!(found, Err(Error::Rdma { source, .. }) if source.errno == 110), "{found:?}");
        let found = feed(&mut Script::default(), vec![event(CmEventKind::DeviceRemoval, i32::MIN, &[])]);
        assert!(matches!(found, Err(Error::Rdma { .. })), "{found:?}");
        let found = feed(&mut Script::default(), up_to(CmEventKind::Established, 0, &[0; 40]));
        assert!(matches!(found, Err(Error::Answer { .. })), "{found:?}");
        let mut script = Script { has_no_queue_pair: true, ..Script::default() };
        let found = feed(&mut script, up_to(CmEventKind::Established, 0, &[]).drain(..2).collect());
        assert!(matches!(found, Err(Error::NoRdma)), "{found:?}");
        // An event of another step.
        let found = feed(&mut Script::default(), vec![event(CmEventKind::Established, 0, &[0; 40])]);
        assert!(matches!(found, Err(Error::Rdma { .. })), "{found:?}");
    }
}
