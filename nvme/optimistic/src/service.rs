//! [`Service`]: the target's end: the thread that listens for optimistic connections and ends them.
//!
//! ```text
//!   reactor core: Attach ──> Grants::issue ──> token ──> host
//!   host: RDMA connect with the token ──> service thread: Grants::redeem
//!                                            ├─ Domains: frames and seals of the cache, registered in a
//!                                            │  protection domain of their own on the host's device
//!                                            └─ queue pair in that domain, accepted with addresses and keys
//!   each 100 ms, and at Service::check: queue pairs whose grant is not valid any more are ended
//!   each 100 ms: queue pairs whose client is gone, or that have failed, are ended
//! ```
//!
//! **Isolation.** There is one protection domain for each cache and device. A key is valid only in its
//! domain, so a client cannot read another cache with it. The memory is registered for remote reads only.
//!
//! **What it does not do.** The service posts nothing but probes (`probes`): the device answers the client's
//! READs. It does not touch the queue pairs of NVMe.
//!
//! **Limits.** [`CONNECTIONS_MAX`] queue pairs, 128 of a controller; [`TOKENS_MAX`] unused tokens,
//! [`CONTROLLER_TOKENS_MAX`] of a controller; [`TOKEN_TTL`].

mod admission;
mod domains;
mod grants;
mod probes;

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use nvme_spec::optimistic::{OptimisticReject, OptimisticStatus};
use nvme_spec::zerocopy::IntoBytes;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use spindle_rdma::{
    CmChannel, CmEvent, CmEventKind, CmId, CmToken, ConnectParams, Device, Domain, Operation, POLL_BATCH,
    QueuePair, QueuePairConfig, SendData, VerbsError,
};
use spindle_reactor::net::Waker;

use admission::{Granted, Refusal, Refusals, admit, end_revoked};
use domains::{CacheDomain, Domains};
use grants::Grant;
use probes::{Probe, Probed, is_over};

pub use admission::{CONNECTIONS_MAX, IsValid};
pub use grants::{CONTROLLER_TOKENS_MAX, Grants, Owner, TOKEN_TTL, TOKENS_MAX};

/// READs of a client that the target's device serves at once: data and seal of 8 pages.
const READS_MAX: u8 = 16;
const BACKLOG: u32 = 128;
/// Period of the check of grants and devices while there are connections.
const CHECK_PERIOD: Duration = Duration::from_millis(100);
/// Period of other work: retries of listeners, tokens and domains that are too old.
const IDLE_PERIOD: Duration = Duration::from_secs(1);
/// Longest wait for [`Service::check`].
const CHECK_MAX: Duration = Duration::from_secs(10);

/// Returns the open device to which an identifier is bound; `None`: the target does not use it.
pub type DeviceOf = dyn Fn(&CmId) -> Option<Arc<Device>> + Send;

/// Functions of the target, called on the service's thread.
pub struct Hooks<O> {
    /// See [`DeviceOf`].
    pub device_of: Box<DeviceOf>,
    /// See [`IsValid`].
    pub is_valid: Box<IsValid<O>>,
}

/// See [`Service::check`].
struct Order {
    addresses: Option<Vec<SocketAddr>>,
    done: Sender<()>,
}

/// Handle on the service's thread; dropped, it ends the thread and all optimistic connections.
pub struct Service<O> {
    /// Tokens, issued by the cores.
    pub grants: Arc<Grants<O>>,
    port: u16,
    orders: Sender<Order>,
    waker: Waker,
}

impl<O: Owner> Service<O> {
    /// Starts the thread, which listens on `addresses` (with one port). An address that no device has yet is
    /// tried again every second, as are all where the machine has no RDMA yet.
    ///
    /// # Errors
    /// The thread or its eventfd cannot be created.
    pub fn start(addresses: Vec<SocketAddr>, hooks: Hooks<O>) -> io::Result<Service<O>> {
        let port = addresses.first().map_or(0, SocketAddr::port);
        let (orders, receive) = channel();
        let (waker, grants) = (Waker::new()?, Arc::new(Grants::default()));
        let mut work = ServiceThread {
            connections: HashMap::new(),
            waiting: Vec::new(),
            domains: Domains::new(waker.clone()),
            listeners: addresses.into_iter().map(|address| (address, None)).collect(),
            is_told: false,
            channel: None,
            hooks,
            grants: Arc::clone(&grants),
            orders: receive,
            waker: waker.clone(),
            refusals: Refusals::default(),
            ended: EndCount::default(),
            lost: EndCount::default(),
            next_probe_id: 0,
        };
        std::thread::Builder::new().name("optimistic".to_owned()).spawn(move || work.run())?;
        Ok(Service { grants, port, orders, waker })
    }

    /// Port of the listeners.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Ends the connections whose grant is not valid any more, and listens on `addresses`, if any are passed,
    /// and on no others. Waits at most 10 s. False: timed out, or the thread has ended.
    #[must_use]
    pub fn check(&self, addresses: Option<Vec<SocketAddr>>) -> bool {
        let (done, is_done) = channel();
        let is_sent = self.orders.send(Order { addresses, done }).is_ok();
        self.waker.wake();
        is_sent && is_done.recv_timeout(CHECK_MAX).is_ok()
    }
}

impl<O> Drop for Service<O> {
    fn drop(&mut self) {
        // The thread ends when it finds the channel closed.
        let (closed, _) = channel();
        drop(std::mem::replace(&mut self.orders, closed));
        self.waker.wake();
    }
}

/// A connection; fields are dropped in this order.
struct Connection<O> {
    /// `None`: it could not be ended otherwise than by its destruction.
    queue_pair: Option<QueuePair>,
    id: CmId,
    grant: Grant<O>,
    domain: Arc<Domain>,
    probe: Probe,
}

impl<O> Granted<O> for Connection<O> {
    fn grant(&self) -> &Grant<O> {
        &self.grant
    }
}

impl<O> Granted<O> for Request<O> {
    fn grant(&self) -> &Grant<O> {
        &self.grant
    }
}

impl<O> Probed for Connection<O> {
    fn probe(&mut self) -> &mut Probe {
        &mut self.probe
    }

    fn post(&mut self, id: u64) -> Result<(), VerbsError> {
        let Some(queue_pair) = &mut self.queue_pair else { return Ok(()) };
        let mut batch = queue_pair.batch();
        batch.add(id, true, Operation::Write { address: 0, key: 0 }, SendData::Local(&[]))?;
        batch.submit()
    }
}

impl<O> Connection<O> {
    /// The device serves no READ of the client afterwards.
    fn end(&mut self) {
        let is_ended = self.queue_pair.as_mut().is_none_or(|it| it.set_error().is_ok());
        if !is_ended {
            self.queue_pair = None;
        }
    }

    /// Tells the client that it has ended, which otherwise finds out by its retries.
    fn close(self) {
        let _ = self.id.disconnect();
    }
}

/// A request to connect whose token was accepted, while its cache is being registered.
struct Request<O> {
    id: CmId,
    grant: Grant<O>,
    device: Arc<Device>,
    /// READs that the client asks for.
    reads: u8,
}

struct ServiceThread<O> {
    connections: HashMap<CmToken, Connection<O>>,
    waiting: Vec<Request<O>>,
    domains: Domains,
    /// Addresses, and their identifiers while they listen.
    listeners: Vec<(SocketAddr, Option<CmId>)>,
    /// A failed bind was logged as a warning since the last success.
    is_told: bool,
    /// `None`: the machine had no RDMA at the last attempt.
    channel: Option<CmChannel>,
    hooks: Hooks<O>,
    grants: Arc<Grants<O>>,
    orders: Receiver<Order>,
    waker: Waker,
    refusals: Refusals,
    /// Connections that were ended as their grant is not valid any more.
    ended: EndCount,
    /// Connections that were ended by their probes.
    lost: EndCount,
    /// Id of the probes of the next connection.
    next_probe_id: u64,
}

/// Connections that were ended and are not logged yet, and the peer of the last one.
#[derive(Default)]
struct EndCount(usize, Option<SocketAddr>);

impl EndCount {
    fn add<O>(&mut self, ended: &[Connection<O>]) {
        if let Some(last) = ended.last() {
            *self = EndCount(self.0 + ended.len(), last.id.peer_address());
        }
    }

    /// At most one line for each call.
    fn log(&mut self, why: &str) {
        if let EndCount(count @ 1.., peer) = std::mem::take(self) {
            let peer = peer.map(tracing::field::display);
            tracing::info!(
                count,
                peer,
                "optimistic connections ended: {why}; the peer is that of the last one"
            );
        }
    }
}

impl<O: Owner> ServiceThread<O> {
    fn run(&mut self) {
        let (mut next_check, mut next_idle) = (Instant::now(), Instant::now());
        loop {
            let now = Instant::now();
            if now >= next_idle {
                next_idle = now + IDLE_PERIOD;
                self.listen();
                self.grants.expire(now);
                self.refusals.log();
                // A host may connect and reset its controller again and again.
                self.ended.log("the host has lost access, or the controller, namespace or cache was removed");
                self.lost.log("the client does not respond, or its READ was refused");
            }
            let mut done = Vec::new();
            loop {
                match self.orders.try_recv() {
                    Ok(order) => {
                        order.addresses.into_iter().for_each(|addresses| self.change_listeners(addresses));
                        done.push(order.done);
                    }
                    Err(std::sync::mpsc::TryRecvError::Empty) => break,
                    Err(std::sync::mpsc::TryRecvError::Disconnected) => return self.end_all(),
                }
            }
            if now >= next_check || !done.is_empty() {
                next_check = now + CHECK_PERIOD;
                let ended = self.check_grants();
                // Fails if the caller has stopped waiting.
                done.iter().for_each(|done| _ = done.send(()));
                ended.into_iter().for_each(Connection::close);
                self.check_devices();
                self.probe(now);
                let connections = &self.connections;
                self.domains.drop_idle(now, |domain| {
                    connections.values().any(|connection| Arc::ptr_eq(&connection.domain, domain))
                });
            }
            if self.domains.take_registered() {
                self.accept_waiting();
            }
            // One event, so that peers cannot delay the checks.
            let event = self.channel.as_ref().and_then(|channel| channel.next_event().ok().flatten());
            let has_come = event.is_some();
            event.into_iter().for_each(|event| self.on_event(event));
            if !has_come {
                self.sleep();
            }
        }
    }

    fn sleep(&self) {
        let is_idle = self.connections.is_empty() && self.domains.devices().next().is_none();
        let period = if is_idle { IDLE_PERIOD } else { CHECK_PERIOD };
        let timeout = Timespec::try_from(period).ok();
        let mut sources = vec![PollFd::new(&self.waker, PollFlags::IN)];
        sources.extend(self.channel.iter().map(|channel| PollFd::new(channel, PollFlags::IN)));
        // A signal ends the wait early, which is harmless.
        let _ = poll(&mut sources, timeout.as_ref());
        self.waker.drain();
    }

    fn change_listeners(&mut self, addresses: Vec<SocketAddr>) {
        self.listeners.retain(|(address, _)| addresses.contains(address));
        let known: Vec<_> = self.listeners.iter().map(|(address, _)| *address).collect();
        let added = addresses.into_iter().filter(|address| !known.contains(address));
        self.listeners.extend(added.map(|address| (address, None)));
        self.listen();
    }

    /// Listens on the addresses that are not listened on.
    fn listen(&mut self) {
        // Once for all addresses.
        let channel = self.channel.take().map_or_else(CmChannel::if_listed, Ok);
        for (address, listener) in self.listeners.iter_mut().filter(|(_, listener)| listener.is_none()) {
            let listen = || {
                let id = CmId::new(channel.as_ref().map_err(|error| *error)?)?;
                id.bind(*address)?;
                id.listen(BACKLOG)?;
                Ok::<_, VerbsError>(id)
            };
            match listen() {
                Ok(id) => {
                    tracing::info!(%address, "listening for optimistic reads");
                    *listener = Some(id);
                    self.is_told = false;
                }
                Err(error) if !std::mem::replace(&mut self.is_told, true) => {
                    tracing::warn!(
                        %address,
                        %error,
                        "cannot listen for optimistic reads; next attempt in 1 s"
                    );
                }
                Err(error) => tracing::debug!(%address, %error, "cannot listen for optimistic reads"),
            }
        }
        self.channel = channel.ok();
    }

    fn on_event(&mut self, event: CmEvent) {
        match event.kind {
            CmEventKind::ConnectRequest => self.on_request(event),
            CmEventKind::DeviceRemoval => {
                // Connections have the device's name too, but only an identifier of it gets this event.
                let is_it = |id: &Option<CmId>| id.as_ref().is_some_and(|id| id.token() == event.id);
                let of_listener = self.listeners.iter().find(|(_, id)| is_it(id));
                let id = self.connections.get(&event.id).map(|it| &it.id);
                let id =
                    id.or_else(|| self.waiting.iter().map(|it| &it.id).find(|id| id.token() == event.id));
                if let Some(name) =
                    id.or(of_listener.and_then(|(_, id)| id.as_ref())).and_then(CmId::device_name)
                {
                    self.drop_device(|device| device.name() == name);
                }
                self.listeners.iter_mut().filter(|(_, id)| is_it(id)).for_each(|(_, id)| *id = None);
            }
            CmEventKind::AddressChange => {
                let is_it = |id: &Option<CmId>| id.as_ref().is_some_and(|id| id.token() == event.id);
                self.listeners.iter_mut().filter(|(_, id)| is_it(id)).for_each(|(_, id)| *id = None);
            }
            CmEventKind::Disconnected
            | CmEventKind::ConnectError
            | CmEventKind::Rejected
            | CmEventKind::Unreachable => {
                if let Some(mut connection) = self.connections.remove(&event.id) {
                    connection.end();
                    connection.close();
                }
                self.waiting.retain(|request| request.id.token() != event.id);
            }
            CmEventKind::Established
            | CmEventKind::AddressResolved
            | CmEventKind::AddressError
            | CmEventKind::RouteResolved
            | CmEventKind::RouteError
            | CmEventKind::Other(_) => {}
        }
    }

    fn on_request(&mut self, event: CmEvent) {
        let Some(id) = event.new_id else { return };
        match self.check_request(&id, &event.private_data) {
            Ok((grant, device)) => {
                self.accept(Request { id, grant, device, reads: event.responder_resources });
            }
            Err(refusal) => self.refuse(&id, &refusal),
        }
    }

    fn check_request(&self, id: &CmId, private_data: &[u8]) -> Result<(Grant<O>, Arc<Device>), Refusal> {
        let connections = self.connections.values().map(Granted::grant);
        let held = connections.chain(self.waiting.iter().map(Granted::grant));
        let is_valid = &*self.hooks.is_valid;
        let grant = admit(private_data, &self.grants, is_valid, held, Instant::now())?;
        let device = (self.hooks.device_of)(id).ok_or_else(|| Refusal {
            status: OptimisticStatus::NO_MEMORY,
            why: "its RDMA device is not in use".to_owned(),
        })?;
        Ok((grant, device))
    }

    /// A registration has ended.
    fn accept_waiting(&mut self) {
        std::mem::take(&mut self.waiting).into_iter().for_each(|request| self.accept(request));
    }

    /// Accepts or rejects a connection, or lets it wait for the registration of its cache.
    fn accept(&mut self, request: Request<O>) {
        let Request { id, mut grant, device, reads } = request;
        let cache = match self.domains.get(&device, &grant.frames) {
            Ok(Some(cache)) => cache,
            Ok(None) => return self.waiting.push(Request { id, grant, device, reads }),
            Err(error) => return self.refuse(&id, &error.into()),
        };
        match connect(&id, &device, cache, reads) {
            Ok(queue_pair) => {
                let peer = id.peer_address().map(tracing::field::display);
                tracing::debug!(peer, "an optimistic connection");
                grant.owner.on_connected();
                let domain = Arc::clone(&cache.domain);
                let probe = Probe::new(self.next_probe_id, Instant::now());
                self.next_probe_id += 1;
                let queue_pair = Some(queue_pair);
                self.connections.insert(id.token(), Connection { queue_pair, id, grant, domain, probe });
            }
            Err(error) => self.refuse(&id, &error.into()),
        }
    }

    fn refuse(&mut self, id: &CmId, refusal: &Refusal) {
        // Fails if the client has given up.
        let _ = id.reject(OptimisticReject::new(refusal.status).as_bytes());
        self.refusals.add(id.peer_address(), refusal);
    }

    /// Ends the connections whose grant is not valid any more. Returns them, to be closed.
    fn check_grants(&mut self) -> Vec<Connection<O>> {
        let is_valid = &*self.hooks.is_valid;
        let ended = end_revoked(&mut self.connections, is_valid, Connection::end);
        self.ended.add(&ended);
        let is_over = |it: &mut Request<O>| !is_valid(&it.grant.owner, &it.grant.frames);
        for request in self.waiting.extract_if(.., is_over).collect::<Vec<_>>() {
            let why = "the host has lost access, or the namespace or cache was removed".to_owned();
            self.refuse(&request.id, &Refusal { status: OptimisticStatus::INVALID_TOKEN, why });
        }
        ended
    }

    /// Takes the completions of probes, posts those that are due, and ends the connections that are over.
    fn probe(&mut self, now: Instant) {
        let mut completed = HashMap::new();
        for cache in self.domains.iter_mut() {
            // Ends: what was posted has been posted before.
            while cache.queue.poll(|it| _ = completed.insert(it.id, it.is_ok)) == POLL_BATCH {}
        }
        for connection in self.connections.values_mut() {
            if let Some(is_ok) = completed.get(&connection.probe.id()) {
                connection.probe.completed(*is_ok, now);
            }
        }
        let mut ended = Vec::new();
        for cache in self.domains.iter_mut() {
            let is_of = |it: &Connection<O>| Arc::ptr_eq(&it.domain, &cache.domain);
            let posted = self.connections.values().filter(|it| is_of(it) && it.probe.is_posted()).count();
            // Completions fit the queue: between two passes each connection has one at most.
            let mut room = (cache.queue.entries() as usize).saturating_sub(posted);
            ended.extend(self.connections.extract_if(|_, it| {
                let was_posted = it.probe.is_posted();
                let is_over = is_of(it) && is_over(it, room > 0, now);
                room -= usize::from(it.probe.is_posted() && !was_posted);
                is_over
            }));
        }
        let mut ended: Vec<_> = ended.into_iter().map(|(_, it)| it).collect();
        ended.iter_mut().for_each(Connection::end);
        self.lost.add(&ended);
        ended.into_iter().for_each(Connection::close);
    }

    /// Drops devices that are lost. soft-RoCE sends no event before its users have gone.
    fn check_devices(&mut self) {
        let is_gone = |device: &Device| device.is_lost() || !device.is_listed();
        if self.domains.devices().any(|device| is_gone(device)) {
            self.drop_device(is_gone);
        }
    }

    fn drop_device(&mut self, is_it: impl Fn(&Device) -> bool) {
        self.connections.retain(|_, connection| !is_it(connection.domain.device()));
        self.waiting.retain(|request| !is_it(&request.device));
        if self.domains.drop_device(is_it) {
            self.accept_waiting();
        }
    }

    fn end_all(&mut self) {
        self.connections.values_mut().for_each(Connection::end);
        self.connections.drain().for_each(|(_, connection)| connection.close());
    }
}

/// Makes the queue pair of a connection and accepts it.
fn connect(id: &CmId, device: &Arc<Device>, cache: &CacheDomain, reads: u8) -> Result<QueuePair, VerbsError> {
    let config = QueuePairConfig {
        cq: &cache.queue,
        domain: Some(&cache.domain),
        srq: None,
        send_wr: 1,
        recv_wr: 1,
        send_sge: 1,
        recv_sge: 1,
        inline_bytes: 0,
        posting: None,
    };
    let queue_pair = id.create_queue_pair(device, &config)?;
    let private_data = cache.accept();
    let parameters = ConnectParams {
        private_data: private_data.as_bytes(),
        responder_resources: reads.min(READS_MAX).min(device.limits().responder_resources).max(1),
        initiator_depth: 0,
    };
    id.accept(&parameters)?;
    Ok(queue_pair)
}
