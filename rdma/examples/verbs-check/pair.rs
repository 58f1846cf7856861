//! Building blocks of the checks: the two ends of a connection in one process, on one thread.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use spindle_rdma::{
    CmChannel, CmEvent, CmEventKind, CmId, CompletionChannel, CompletionQueue, ConnectParams, Device,
    MemoryRegion, Posting, QueuePair, QueuePairConfig, Sge, SharedReceiveQueue, WorkCompletion,
};
use spindle_reactor::mem::{Buf, Pool};

pub type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

/// Maximum time to wait for an event or completion. Long: an emulated CPU may not run for seconds.
pub const PATIENCE: Duration = Duration::from_secs(10);
pub const RESOLVE: Duration = Duration::from_secs(2);
pub const BUFFER: u32 = 64 << 10;

/// Devices, memory and address that all checks use.
pub struct Lab {
    pub devices: Vec<Arc<Device>>,
    pub device: Arc<Device>,
    pub pool: Pool,
    pub region: Arc<MemoryRegion>,
    pub address: IpAddr,
    pub netdev: Option<String>,
}

/// Parameters of an [`End`].
#[derive(Clone, Copy)]
pub struct Shape {
    pub posting: Option<Posting>,
    pub is_shared: bool,
    pub send_wr: u32,
    pub cqe: u32,
}

impl Shape {
    pub fn new(posting: Option<Posting>) -> Shape {
        Shape { posting, is_shared: false, send_wr: 32, cqe: 128 }
    }
}

/// One side of a connection.
pub struct End {
    pub id: CmId,
    pub queue: QueuePair,
    pub completions: CompletionQueue,
    pub wake: CompletionChannel,
    pub shared: Option<SharedReceiveQueue>,
    pub memory: Buf,
    /// Address of the first byte of `memory`.
    pub base: u64,
    pub keys: (u32, u32),
}

impl End {
    pub fn new(lab: &Lab, id: CmId, shape: Shape) -> Outcome<End> {
        let device = id.device(&lab.devices).ok_or("no device of ours")?;
        let wake = CompletionChannel::new(device)?;
        let completions = CompletionQueue::new(device, shape.cqe, 0, Some(&wake))?;
        let shared = match shape.is_shared {
            true => Some(SharedReceiveQueue::new(device, 64, 2)?),
            false => None,
        };
        let config = QueuePairConfig {
            cq: &completions,
            domain: None,
            srq: shared.as_ref(),
            send_wr: shape.send_wr,
            recv_wr: 64,
            send_sge: 4,
            recv_sge: 2,
            inline_bytes: 64,
            posting: shape.posting,
        };
        let queue = id.create_queue_pair(device, &config)?;
        ensure!(shape.posting.is_none_or(|it| it == queue.posting()), "not the posting asked for");
        ensure!(queue.inline_bytes() >= 64, "{} inline bytes", queue.inline_bytes());
        let memory = lab.pool.take(BUFFER).ok_or("no memory")?;
        let base = memory.as_slice().ok_or("not contiguous")?.as_ptr() as u64;
        let keys = (lab.region.local_key(), lab.region.remote_key());
        Ok(End { id, queue, completions, wake, shared, memory, base, keys })
    }

    pub fn sge(&self, offset: u32, bytes: u32) -> Sge {
        Sge { address: self.base + u64::from(offset), bytes, key: self.keys.0 }
    }

    pub fn receive(&mut self, id: u64, offset: u32, bytes: u32) -> Outcome {
        let segment = self.sge(offset, bytes);
        match &self.shared {
            Some(shared) => shared.post(id, &[segment])?,
            None => self.queue.post_receive(id, &[segment])?,
        }
        Ok(())
    }

    /// Waits for exactly `count` completions.
    pub fn completed(&mut self, count: usize) -> Outcome<Vec<WorkCompletion>> {
        let begin = Instant::now();
        let mut found = Vec::new();
        while found.len() < count {
            self.completions.poll(|completion| found.push(completion));
            ensure!(begin.elapsed() < PATIENCE, "{} of {count} completions", found.len());
            std::thread::yield_now();
        }
        ensure!(found.len() == count, "more than {count} completions: {:?}", &found[..count + 1]);
        Ok(found)
    }

    /// Waits for successful completions with `ids`, in this order.
    pub fn completed_well(&mut self, ids: &[u64]) -> Outcome<Vec<WorkCompletion>> {
        let found = self.completed(ids.len())?;
        for (completion, id) in found.iter().zip(ids) {
            let status = completion.status;
            ensure!(completion.is_ok && completion.id == *id, "{id}: {} {status}", completion.id);
            ensure!(completion.queue_pair == self.queue.number(), "of another queue pair");
        }
        Ok(found)
    }

    pub fn fill(&mut self, offset: usize, bytes: &[u8]) {
        self.memory.copy_in(offset, bytes);
    }

    pub fn has(&self, offset: usize, bytes: &[u8]) -> Outcome {
        ensure!(self.memory.equals_at(offset, bytes), "not the bytes expected at {offset}");
        Ok(())
    }
}

pub fn is_readable(fd: impl AsFd, patience: Duration) -> Outcome<bool> {
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    let patience = Timespec { tv_sec: patience.as_secs().cast_signed(), tv_nsec: 0 };
    Ok(poll(&mut fds, Some(&patience))? > 0)
}

/// Waits for the next event of `channel`, at most [`PATIENCE`].
pub fn next_event(channel: &CmChannel) -> Outcome<CmEvent> {
    let begin = Instant::now();
    while begin.elapsed() < PATIENCE {
        if let Some(event) = channel.next_event()? {
            return Ok(event);
        }
        is_readable(channel, PATIENCE)?;
    }
    Err("no event".into())
}

/// Waits for the next event of `channel`; an error if it is not of `kind`.
pub fn event(channel: &CmChannel, kind: CmEventKind) -> Outcome<CmEvent> {
    let event = next_event(channel).map_err(|error| format!("{kind:?} was expected: {error}"))?;
    ensure!(event.kind == kind, "{kind:?} was expected, not {event:?}");
    Ok(event)
}

/// Creates a listener at `address`, and a client that is ready to connect to it.
pub fn begin(lab: &Lab, address: IpAddr, shape: Shape) -> Outcome<(CmChannel, CmId, CmChannel, End)> {
    let (servers, clients) = (CmChannel::new()?, CmChannel::new()?);
    let listener = CmId::new(&servers)?;
    listener.bind(SocketAddr::new(address, 0))?;
    listener.listen(16)?;
    let to = listener.local_address().ok_or("no address")?;
    ensure!(to.port() != 0, "no port");
    let client = resolve(lab, &clients, to, shape)?;
    Ok((servers, listener, clients, client))
}

/// A client that has resolved `to` and is ready to connect.
pub fn resolve(lab: &Lab, clients: &CmChannel, to: SocketAddr, shape: Shape) -> Outcome<End> {
    let id = CmId::new(clients)?;
    id.resolve_address(None, to, RESOLVE)?;
    let told = event(clients, CmEventKind::AddressResolved)?;
    ensure!(told.id == id.token() && told.listener.is_none(), "of another identifier");
    ensure!(id.peer_address() == Some(to), "peer {:?}", id.peer_address());
    id.resolve_route(RESOLVE)?;
    event(clients, CmEventKind::RouteResolved)?;
    End::new(lab, id, shape)
}

pub const HELLO: &[u8] = b"from the host";
pub const WELCOME: &[u8] = b"from the controller";
pub const READS: u8 = 4;

pub fn parameters(private_data: &[u8]) -> ConnectParams<'_> {
    ConnectParams { private_data, responder_resources: READS, initiator_depth: READS - 1 }
}

/// Both ends of a connection, and their event channels.
pub struct Pair {
    pub server: End,
    pub client: End,
    pub servers: CmChannel,
    pub clients: CmChannel,
}

pub fn connect_to(lab: &Lab, address: IpAddr, shape: Shape, moved: Option<CmChannel>) -> Outcome<Pair> {
    let (servers, listener, clients, client) = begin(lab, address, shape)?;
    client.id.connect(&parameters(HELLO))?;
    let request = event(&servers, CmEventKind::ConnectRequest)?;
    ensure!(request.private_data.starts_with(HELLO), "private data {:?}", request.private_data);
    ensure!(request.listener == Some(listener.token()), "of another listener");
    let reads = (request.responder_resources, request.initiator_depth);
    ensure!(reads == (READS - 1, READS), "responder resources, initiator depth {reads:?}");
    let id = request.new_id.ok_or("no identifier")?;
    ensure!(request.id == id.token() && id.token() != listener.token(), "tokens");
    let servers = match moved {
        Some(channel) => {
            id.migrate(&channel)?;
            ensure!(servers.next_event()?.is_none(), "an unexpected event");
            channel
        }
        None => servers,
    };
    let server = End::new(lab, id, shape)?;
    server.id.accept(&parameters(WELCOME))?;
    let told = event(&clients, CmEventKind::Established)?;
    ensure!(told.private_data.starts_with(WELCOME), "private data {:?}", told.private_data);
    ensure!(told.id == client.id.token(), "of another identifier");
    let told = event(&servers, CmEventKind::Established)?;
    ensure!(told.id == server.id.token(), "of another identifier");
    ensure!(server.id.peer_address() == client.id.local_address(), "addresses");
    Ok(Pair { server, client, servers, clients })
}

pub fn connect(lab: &Lab, shape: Shape) -> Outcome<Pair> {
    connect_to(lab, lab.address, shape, None)
}
