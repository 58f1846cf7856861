//! Checks the wrapper on a real device: soft-RoCE in the lab's guest, or any other.
//!
//! Both ends are in this process, on one thread. A line for each check; the exit code says whether all passed.
//!
//! ```text
//! cargo build -p spindle-rdma-verbs --example verbs-check
//! scripts/lab/run -- bash -c 'ip link add d0 type dummy; ip addr add 10.9.1.1/24 dev d0
//!   ip addr add fd09::1/64 dev d0 nodad; ip link set d0 mtu 4200 up
//!   modprobe -a rdma_rxe rdma_ucm ib_uverbs; rdma link add rxe0 type rxe netdev d0
//!   build/debug/examples/verbs-check --netdev d0 10.9.1.1 fd09::1'
//! ```
//!
//! Each address gets a round of connecting; the first is used for the rest. With `--netdev` the link is set
//! down and up again.
#![forbid(unsafe_code)]

use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use spindle_rdma_verbs::{
    Access, AsyncEvent, CmChannel, CmEvent, CmEventKind, CmId, CompletionChannel, CompletionQueue,
    ConnectParams, Device, LIST_BATCH, MemoryRegion, MemoryWindow, QueuePair, QueuePairConfig, Road,
    SendData, Sge, SharedReceiveQueue, WcStatus, WorkCompletion,
};
use spindle_reactor::mem::{Area, Buf, Pages, Pool, ZoneSpec};

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

/// An emulated processor can be away for long.
const PATIENCE: Duration = Duration::from_secs(10);
const RESOLVE: Duration = Duration::from_secs(2);
const BUFFER: u32 = 64 << 10;

macro_rules! ensure {
    ($is_so:expr, $($why:tt)*) => {
        if !$is_so {
            return Err(format!($($why)*).into());
        }
    };
}

/// What all checks share.
struct Lab {
    devices: Vec<Arc<Device>>,
    device: Arc<Device>,
    pool: Pool,
    region: Arc<MemoryRegion>,
    address: IpAddr,
    netdev: Option<String>,
}

/// How an end is made.
#[derive(Clone, Copy)]
struct Shape {
    road: Road,
    is_shared: bool,
    send_wr: u32,
    cqe: u32,
}

impl Shape {
    fn new(road: Road) -> Shape {
        Shape { road, is_shared: false, send_wr: 32, cqe: 128 }
    }
}

/// One side of a connection.
struct End {
    id: CmId,
    queue: QueuePair,
    completions: CompletionQueue,
    wake: CompletionChannel,
    shared: Option<SharedReceiveQueue>,
    memory: Buf,
    /// Of the memory.
    base: u64,
    keys: (u32, u32),
}

impl End {
    fn new(lab: &Lab, id: CmId, shape: Shape) -> Outcome<End> {
        let device = id.device(&lab.devices).ok_or("no device of ours")?;
        let wake = CompletionChannel::new(device)?;
        let completions = CompletionQueue::new(device, shape.cqe, 0, Some(&wake))?;
        let shared = match shape.is_shared {
            true => Some(SharedReceiveQueue::new(device, 64, 2)?),
            false => None,
        };
        let config = QueuePairConfig {
            send_cq: &completions,
            recv_cq: &completions,
            srq: shared.as_ref(),
            send_wr: shape.send_wr,
            recv_wr: 64,
            send_sge: 4,
            recv_sge: 2,
            inline_bytes: 64,
        };
        let queue = id.create_queue_pair_by(device, &config, shape.road)?;
        ensure!(shape.road == Road::Best || queue.road() == shape.road, "not the road asked for");
        ensure!(queue.inline_bytes() >= 64, "{} inline bytes", queue.inline_bytes());
        let memory = lab.pool.take(BUFFER).ok_or("no memory")?;
        let base = memory.as_slice().ok_or("not contiguous")?.as_ptr() as u64;
        let keys = (lab.region.local_key(), lab.region.remote_key());
        Ok(End { id, queue, completions, wake, shared, memory, base, keys })
    }

    fn sge(&self, offset: u32, bytes: u32) -> Sge {
        Sge { address: self.base + u64::from(offset), bytes, key: self.keys.0 }
    }

    fn receive(&mut self, id: u64, offset: u32, bytes: u32) -> Outcome {
        let segment = self.sge(offset, bytes);
        match &self.shared {
            Some(shared) => shared.post(id, &[segment])?,
            None => self.queue.post_receive(id, &[segment])?,
        }
        Ok(())
    }

    /// Wait for as many completions.
    fn completed(&mut self, count: usize) -> Outcome<Vec<WorkCompletion>> {
        let begin = Instant::now();
        let mut found = Vec::new();
        while found.len() < count {
            self.completions.poll(|completion| found.push(completion));
            ensure!(begin.elapsed() < PATIENCE, "{} of {count} completions: {found:?}", found.len());
            std::thread::yield_now();
        }
        ensure!(found.len() == count, "more than {count} completions: {found:?}");
        Ok(found)
    }

    /// Wait for as many, all of them well, with these ids in this order.
    fn completed_well(&mut self, ids: &[u64]) -> Outcome<Vec<WorkCompletion>> {
        let found = self.completed(ids.len())?;
        for (completion, id) in found.iter().zip(ids) {
            let status = completion.status;
            ensure!(completion.is_ok && completion.id == *id, "{id}: {} {status}", completion.id);
            ensure!(completion.queue_pair == self.queue.number(), "of another queue pair");
        }
        Ok(found)
    }

    fn fill(&mut self, offset: usize, bytes: &[u8]) {
        self.memory.copy_in(offset, bytes);
    }

    fn has(&self, offset: usize, bytes: &[u8]) -> Outcome {
        ensure!(self.memory.equals_at(offset, bytes), "not the bytes expected at {offset}");
        Ok(())
    }
}

fn is_readable(fd: impl AsFd, patience: Duration) -> Outcome<bool> {
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    let patience = Timespec { tv_sec: patience.as_secs().cast_signed(), tv_nsec: 0 };
    Ok(poll(&mut fds, Some(&patience))? > 0)
}

/// The next event has to be this.
fn event(channel: &CmChannel, kind: CmEventKind) -> Outcome<CmEvent> {
    let begin = Instant::now();
    while begin.elapsed() < PATIENCE {
        if let Some(event) = channel.next_event()? {
            ensure!(event.kind == kind, "{kind:?} was expected, not {event:?}");
            return Ok(event);
        }
        is_readable(channel, PATIENCE)?;
    }
    Err(format!("no event, {kind:?} was expected").into())
}

/// Listen, and bring a client as far as it can go without the other side.
fn begin(lab: &Lab, address: IpAddr, shape: Shape) -> Outcome<(CmChannel, CmId, CmChannel, End)> {
    let (servers, clients) = (CmChannel::new()?, CmChannel::new()?);
    let listener = CmId::new(&servers)?;
    listener.listen(SocketAddr::new(address, 0), 16)?;
    let to = listener.local_address().ok_or("no address")?;
    ensure!(to.port() != 0, "no port");
    let id = CmId::new(&clients)?;
    id.resolve_address(None, to, RESOLVE)?;
    let told = event(&clients, CmEventKind::AddressResolved)?;
    ensure!(told.id == id.token() && told.listener.is_none(), "of another identifier");
    ensure!(id.peer_address() == Some(to), "peer {:?}", id.peer_address());
    id.resolve_route(RESOLVE)?;
    event(&clients, CmEventKind::RouteResolved)?;
    let client = End::new(lab, id, shape)?;
    Ok((servers, listener, clients, client))
}

const HELLO: &[u8] = b"from the host";
const WELCOME: &[u8] = b"from the controller";
const READS: u8 = 4;

fn parameters(private_data: &[u8]) -> ConnectParams<'_> {
    ConnectParams {
        private_data,
        responder_resources: READS,
        initiator_depth: READS - 1,
        ..ConnectParams::default()
    }
}

/// A connection, and the channels of its ends.
struct Pair {
    server: End,
    client: End,
    servers: CmChannel,
    clients: CmChannel,
}

fn connect_to(lab: &Lab, address: IpAddr, shape: Shape, moved: Option<CmChannel>) -> Outcome<Pair> {
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
            ensure!(servers.next_event()?.is_none(), "an event that nobody expects");
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

fn connect(lab: &Lab, shape: Shape) -> Outcome<Pair> {
    connect_to(lab, lab.address, shape, None)
}

fn device(lab: &Lab) -> Outcome {
    let limits = lab.device.limits();
    println!("     {}: {limits:?}", lab.device.name());
    ensure!(limits.ports > 0 && lab.device.port_is_active(1), "port 1 has no link");
    ensure!(!lab.device.port_is_active(limits.ports + 1), "a port that is none has a link");
    let again = Device::all()?;
    ensure!(again.iter().zip(&lab.devices).all(|(a, b)| Arc::ptr_eq(a, b)), "not the same devices");
    ensure!(lab.device.next_async_event().is_none(), "an event that nobody expects");
    Ok(())
}

fn connecting(lab: &Lab, address: IpAddr) -> Outcome {
    let Pair { server, client, servers, clients } = connect_to(lab, address, Shape::new(Road::Best), None)?;
    ensure!(lab.device.is_of(&client.id) && client.id.port() == 1, "bound to another device");
    client.id.disconnect()?;
    let told = event(&servers, CmEventKind::Disconnected)?;
    ensure!(told.id == server.id.token(), "of another identifier");
    // The other side is told when this one has answered.
    server.id.disconnect()?;
    event(&clients, CmEventKind::Disconnected)?;
    Ok(())
}

fn rejecting(lab: &Lab) -> Outcome {
    let (servers, _listener, clients, client) = begin(lab, lab.address, Shape::new(Road::Best))?;
    client.id.connect(&parameters(HELLO))?;
    let request = event(&servers, CmEventKind::ConnectRequest)?;
    let reason = [1, 0, 6, 0];
    request.new_id.ok_or("no identifier")?.reject(&reason)?;
    let told = event(&clients, CmEventKind::Rejected)?;
    ensure!(told.private_data.starts_with(&reason), "private data {:?}", told.private_data);
    // Rejected by the consumer.
    ensure!(told.status == 28, "status {}", told.status);
    Ok(())
}

fn refusals(lab: &Lab) -> Outcome {
    // Dropping a request refuses it.
    let (servers, listener, clients, client) = begin(lab, lab.address, Shape::new(Road::Best))?;
    client.id.connect(&parameters(HELLO))?;
    drop(event(&servers, CmEventKind::ConnectRequest)?);
    event(&clients, CmEventKind::Rejected)?;
    // Nobody listens any more.
    let to = listener.local_address().ok_or("no address")?;
    drop((listener, client));
    let id = CmId::new(&clients)?;
    id.resolve_address(None, to, RESOLVE)?;
    event(&clients, CmEventKind::AddressResolved)?;
    id.resolve_route(RESOLVE)?;
    event(&clients, CmEventKind::RouteResolved)?;
    let client = End::new(lab, id, Shape::new(Road::Best))?;
    client.id.connect(&parameters(&[]))?;
    event(&clients, CmEventKind::Rejected)?;
    // The wrong order.
    let id = CmId::new(&clients)?;
    let error = id.connect(&parameters(&[])).err().ok_or("connected from nowhere")?;
    ensure!(error.verb == "rdma_connect", "{error}");
    ensure!(id.accept(&parameters(&[])).is_err() && id.reject(&[]).is_err(), "answered nobody");
    ensure!(id.resolve_route(RESOLVE).is_err() && id.disconnect().is_err(), "went nowhere");
    ensure!(id.device(&lab.devices).is_none() && id.local_address().is_none(), "bound to something");
    Ok(())
}

fn migrating(lab: &Lab) -> Outcome {
    let other = CmChannel::new()?;
    let pair = connect_to(lab, lab.address, Shape::new(Road::Best), Some(other))?;
    pair.client.id.disconnect()?;
    let told = event(&pair.servers, CmEventKind::Disconnected)?;
    ensure!(told.id == pair.server.id.token(), "of another identifier");
    pair.server.id.disconnect()?;
    // An event that waits goes along.
    event(&pair.clients, CmEventKind::Disconnected)?;
    let third = CmChannel::new()?;
    pair.client.id.migrate(&third)?;
    pair.client.id.migrate(&third)?;
    pair.client.id.migrate(&pair.servers)?;
    Ok(())
}

fn ping(lab: &Lab, road: Road, is_shared: bool) -> Outcome {
    let shape = Shape { is_shared, ..Shape::new(road) };
    let Pair { mut server, mut client, .. } = connect(lab, shape)?;
    client.receive(1, 0, 64)?;
    server.receive(2, 0, 64)?;
    server.receive(3, 64, 64)?;
    // Inline, then from memory in two segments.
    let mut batch = client.queue.batch();
    batch.send_inline(10, true, &[7; 64])?;
    batch.submit()?;
    client.completed_well(&[10])?;
    let found = server.completed_well(&[2])?;
    ensure!(found[0].bytes == 64 && found[0].immediate.is_none(), "{found:?}");
    server.has(0, &[7; 64])?;
    client.fill(1000, b"abcdef");
    let segments = [client.sge(1003, 3), client.sge(1000, 3)];
    let mut batch = client.queue.batch();
    batch.send(11, true, &segments)?;
    batch.submit()?;
    client.completed_well(&[11])?;
    ensure!(server.completed_well(&[3])?[0].bytes == 6, "not 6 bytes");
    server.has(64, b"defabc")?;
    // And back, with nothing in it.
    let mut batch = server.queue.batch();
    batch.send_inline(12, true, &[])?;
    batch.submit()?;
    server.completed_well(&[12])?;
    ensure!(client.completed_well(&[1])?[0].bytes == 0, "bytes out of nothing");
    Ok(())
}

fn moving(lab: &Lab, road: Road) -> Outcome {
    let Pair { mut server, mut client, .. } = connect(lab, Shape::new(road))?;
    let data: Vec<u8> = (0..16384_u32).map(|index| index.to_le_bytes()[0] ^ 0x5A).collect();
    // WRITE from three segments, READ into four: the other order of pieces.
    server.fill(0, &data);
    let segments = [server.sge(0, 4096), server.sge(4096, 8192), server.sge(12288, 4096)];
    let (remote, key) = (client.base + 8192, client.keys.1);
    let mut batch = server.queue.batch();
    batch.write(20, true, &segments, remote, key)?;
    batch.submit()?;
    server.completed_well(&[20])?;
    client.has(8192, &data)?;
    let at = [32768_u32, 40960, 36864, 49152];
    let segments = at.map(|at| server.sge(at, 4096));
    let mut batch = server.queue.batch();
    batch.read(21, true, &segments, remote, key)?;
    batch.submit()?;
    ensure!(server.completed_well(&[21])?[0].bytes == 16384, "not 16384 bytes");
    for (at, piece) in at.iter().zip(data.chunks(4096)) {
        server.has(*at as usize, piece)?;
    }
    // WRITE with a number.
    client.receive(1, 0, 0)?;
    let segment = server.sge(0, 512);
    let mut batch = server.queue.batch();
    batch.write_with_immediate(22, true, &[segment], client.base, key, 0x0102_0304)?;
    batch.submit().map_err(|error| format!("immediate: {error}"))?;
    server.completed_well(&[22])?;
    let found = client.completed_well(&[1])?;
    ensure!(found[0].immediate == Some(0x0102_0304), "{found:?}");
    client.has(0, &data[..512])
}

fn chains(lab: &Lab, road: Road) -> Outcome {
    let shape = Shape { send_wr: 256, ..Shape::new(road) };
    let Pair { mut server, mut client, .. } = connect(lab, shape)?;
    // More than one doorbell's worth of a list.
    let count = LIST_BATCH * 2 + 10;
    for round in 0..3_u64 {
        client.receive(round, 0, 64)?;
        let bytes: Vec<u8> =
            (0..count).map(|index| index.to_le_bytes()[0] ^ round.to_le_bytes()[0]).collect();
        server.fill(0, &bytes);
        let pieces: Vec<Sge> = (0..count).map(|index| server.sge(index, 1)).collect();
        let mut batch = server.queue.batch();
        for (address, piece) in (client.base + 4096..).zip(&pieces) {
            batch.write(30, false, &[*piece], address, client.keys.1)?;
        }
        batch.send_inline(31 + round, true, b"done")?;
        ensure!(batch.count() == count + 1, "{} were added", batch.count());
        batch.submit()?;
        // One for all, and the data are there before the message.
        server.completed_well(&[31 + round])?;
        client.completed_well(&[round])?;
        client.has(4096, &bytes)?;
        client.has(0, b"done")?;
    }
    Ok(())
}

fn discarding(lab: &Lab, road: Road) -> Outcome {
    let Pair { mut server, mut client, .. } = connect(lab, Shape::new(road))?;
    client.receive(1, 0, 64)?;
    let mut batch = server.queue.batch();
    batch.send_inline(40, true, b"never")?;
    drop(batch);
    let mut batch = server.queue.batch();
    batch.send_inline(41, true, b"never")?;
    std::mem::forget(batch);
    server.queue.batch().submit()?;
    let mut batch = server.queue.batch();
    batch.send_inline(42, true, b"this")?;
    batch.submit()?;
    server.completed_well(&[42])?;
    client.completed_well(&[1])?;
    client.has(0, b"this")
}

fn limits(lab: &Lab, road: Road) -> Outcome {
    let Pair { mut server, mut client, .. } = connect(lab, Shape::new(road))?;
    let segment = server.sge(0, 8);
    let (remote, key) = (client.base, client.keys.1);
    let (inline_max, room) = (server.queue.inline_bytes() as usize, server.queue.send_wr());
    let mut batch = server.queue.batch();
    ensure!(batch.send(1, true, &[segment; 5]).is_err(), "5 segments of 4");
    ensure!(batch.send_inline(1, true, &vec![0; inline_max + 1]).is_err(), "too many inline bytes");
    ensure!(batch.count() == 0, "a refused one counts");
    for _ in 0..room {
        batch.write(50, false, &[segment], remote, key)?;
    }
    let error = batch.write(50, false, &[segment], remote, key).err().ok_or("more than there are")?;
    ensure!(error.errno == rustix::io::Errno::NOMEM.raw_os_error(), "{error}");
    drop(batch);
    // Many batches, and nobody polls. A device may have more room than asked for.
    let mut posted = 0;
    let error = loop {
        let mut batch = server.queue.batch();
        for index in 0..7 {
            batch.write(51, index == 6, &[segment], remote, key)?;
        }
        match batch.submit() {
            Ok(()) => posted += 7,
            Err(error) => break error,
        }
        ensure!(posted < 10_000, "it takes everything");
    };
    println!("     {road:?}: after {posted} and {}: {}", error.posted, error.error);
    ensure!(error.posted < 7 && posted + error.posted >= room, "posted {} and {}", posted, error.posted);
    server.completed((posted / 7) as usize)?;
    // Receives.
    ensure!(client.queue.post_receive(1, &[client.sge(0, 8); 3]).is_err(), "3 segments of 2");
    let segment = client.sge(0, 8);
    let error = client.queue.post_receives((0..10_000).map(|id| (id, segment)));
    let error = error.err().ok_or("10000 receives of 64")?;
    ensure!((64..10_000).contains(&error.posted), "{error}");
    println!("     {error}");
    Ok(())
}

fn memory(lab: &Lab) -> Outcome {
    let (device, area) = (&lab.device, lab.pool.area());
    let bytes = area.bytes();
    let both = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    ensure!(device.register_part(area.clone(), 4096, bytes, both).is_err(), "beyond the area");
    ensure!(device.register_part(area.clone(), usize::MAX, 2, both).is_err(), "around the corner");
    ensure!(device.register(Area::zeroes(), both).is_err(), "the zeroes are not to be written");
    ensure!(device.register(area.clone(), Access::REMOTE_WRITE).is_err(), "remote write alone");
    let part = device.register_part(area.clone(), 4096, 8192, both)?;
    ensure!(part.base() == area.base().as_ptr() as usize + 4096 && part.bytes() == 8192, "{part:?}");
    ensure!(part.sge(part.base() + 8191, 1).is_some() && part.sge(part.base() + 8191, 2).is_none(), "sge");
    drop(part);
    // Zeroes over the wire, and a key that was taken back.
    let zeroes = device.register(Area::zeroes(), Access::LOCAL_READ)?;
    let Pair { mut server, mut client, .. } = connect(lab, Shape::new(Road::Best))?;
    client.fill(0, &[9; 4096]);
    let segment = zeroes.sge(zeroes.base(), 4096).ok_or("no zeroes")?;
    let mut batch = server.queue.batch();
    batch.write(60, true, &[segment], client.base, client.keys.1)?;
    batch.submit()?;
    server.completed_well(&[60])?;
    client.has(0, &[0; 4096])?;
    drop(zeroes);
    let mut batch = server.queue.batch();
    batch.write(61, false, &[segment], client.base, client.keys.1)?;
    batch.submit()?;
    let status = server.completed(1)?[0].status;
    ensure!(status == WcStatus::LOCAL_PROTECTION, "{status}");
    Ok(())
}

fn wrong_key(lab: &Lab, road: Road) -> Outcome {
    let Pair { mut server, client, .. } = connect(lab, Shape::new(road))?;
    let segment = server.sge(0, 8);
    let mut batch = server.queue.batch();
    batch.write(70, false, &[segment], client.base, client.keys.1 ^ 0x0F00)?;
    batch.send_inline(71, false, b"after")?;
    batch.submit()?;
    let found = server.completed(2)?;
    let status = found[0].status;
    ensure!(found[0].id == 70 && status == WcStatus::REMOTE_ACCESS, "{status}");
    println!("     {status}");
    ensure!(found[1].id == 71 && found[1].status == WcStatus::FLUSHED, "{}", found[1].status);
    Ok(())
}

/// The client opens a window and the server writes through it; it closes it by its answer.
fn windows(lab: &Lab, road: Road) -> Outcome {
    let Pair { mut server, mut client, .. } = connect(lab, Shape::new(road))?;
    let mut window = MemoryWindow::new(&lab.device)?;
    let address = usize::try_from(client.base)?;
    let mut batch = client.queue.batch();
    let beyond = lab.region.base() + lab.region.bytes();
    let opened = batch.bind_window(79, &mut window, &lab.region, beyond, 1, Access::REMOTE_WRITE);
    ensure!(opened.is_err(), "beyond the region");
    let key = batch.bind_window(80, &mut window, &lab.region, address, 4096, Access::REMOTE_WRITE)?;
    batch.submit()?;
    client.completed_well(&[80])?;
    ensure!(window.remote_key() == key && key != client.keys.1, "keys");
    client.receive(1, 8192, 64)?;
    server.fill(0, b"through the window");
    let segment = server.sge(0, 18);
    let mut batch = server.queue.batch();
    batch.write(81, false, &[segment], client.base, key)?;
    batch.send_with_invalidate(82, true, SendData::Inline(b"close it"), key)?;
    batch.submit()?;
    server.completed_well(&[82])?;
    let found = client.completed_well(&[1])?;
    ensure!(found[0].invalidated_key == Some(key), "{found:?}");
    client.has(0, b"through the window")?;
    // Again, with memory instead of bytes, then closed by its owner.
    client.receive(2, 8192, 64)?;
    let mut batch = client.queue.batch();
    let key = batch.bind_window(83, &mut window, &lab.region, address, 4096, Access::REMOTE_WRITE)?;
    batch.submit()?;
    client.completed_well(&[83])?;
    let mut batch = server.queue.batch();
    batch.send_with_invalidate(84, true, SendData::Local(&[segment]), key)?;
    batch.submit()?;
    server.completed_well(&[84])?;
    ensure!(client.completed_well(&[2])?[0].invalidated_key == Some(key), "not invalidated");
    let mut batch = client.queue.batch();
    let key = batch.bind_window(85, &mut window, &lab.region, address, 4096, Access::REMOTE_WRITE)?;
    batch.local_invalidate(86, key)?;
    batch.submit()?;
    client.completed_well(&[85, 86])?;
    let mut batch = server.queue.batch();
    batch.write(87, true, &[segment], client.base, key)?;
    batch.submit()?;
    let status = server.completed(1)?[0].status;
    ensure!(status == WcStatus::REMOTE_ACCESS, "a closed window: {status}");
    Ok(())
}

/// A key of a region cannot be invalidated by the other side: that breaks the connection.
fn invalidate_region(lab: &Lab, road: Road) -> Outcome {
    let Pair { mut server, mut client, .. } = connect(lab, Shape::new(road))?;
    client.receive(1, 0, 64)?;
    let mut batch = server.queue.batch();
    batch.send_with_invalidate(90, true, SendData::Inline(b"no"), client.keys.1)?;
    batch.submit()?;
    let (sent, received) = (server.completed(1)?[0], client.completed(1)?[0]);
    println!("     {road:?}: sender {}, receiver {}", sent.status, received.status);
    ensure!(!received.is_ok || received.invalidated_key.is_none(), "a region was invalidated");
    Ok(())
}

fn flushing(lab: &Lab, road: Road, is_shared: bool) -> Outcome {
    let shape = Shape { is_shared, ..Shape::new(road) };
    let Pair { mut server, client, .. } = connect(lab, shape)?;
    if !is_shared {
        let segment = server.sge(0, 64);
        server.queue.post_receives((0..40).map(|id| (id, segment)))?;
    }
    server.queue.set_error()?;
    let segment = server.sge(0, 64);
    let mut batch = server.queue.batch();
    batch.write(100, false, &[segment], client.base, client.keys.1)?;
    batch.send(101, false, &[segment])?;
    batch.submit()?;
    let found = server.completed(if is_shared { 2 } else { 42 })?;
    ensure!(found.iter().all(|completion| completion.status == WcStatus::FLUSHED), "{found:?}");
    let sends: Vec<u64> = found.iter().map(|found| found.id).filter(|id| *id >= 100).collect();
    let receives: Vec<u64> = found.iter().map(|found| found.id).filter(|id| *id < 100).collect();
    ensure!(sends == [100, 101] && receives.is_sorted(), "{sends:?} {receives:?}");
    Ok(())
}

fn disconnecting(lab: &Lab) -> Outcome {
    let Pair { mut server, mut client, servers, clients } = connect(lab, Shape::new(Road::Best))?;
    client.receive(1, 0, 64)?;
    server.receive(2, 0, 64)?;
    server.id.disconnect()?;
    event(&clients, CmEventKind::Disconnected)?;
    client.id.disconnect()?;
    event(&servers, CmEventKind::Disconnected)?;
    for end in [&mut server, &mut client] {
        let found = end.completed(1)?;
        ensure!(found[0].status == WcStatus::FLUSHED, "{found:?}");
    }
    Ok(())
}

fn waking(lab: &Lab) -> Outcome {
    let Pair { mut server, mut client, .. } = connect(lab, Shape::new(Road::Best))?;
    for round in 0..3 {
        client.receive(round, 0, 64)?;
        client.completions.arm()?;
        ensure!(client.completions.poll(|_| ()) == 0, "a completion that nobody expects");
        ensure!(!is_readable(&client.wake, Duration::ZERO)?, "awake for nothing");
        ensure!(client.wake.take_events(&client.completions) == 0, "an event for nothing");
        let mut batch = server.queue.batch();
        batch.send_inline(9, true, b"wake up")?;
        batch.submit()?;
        ensure!(is_readable(&client.wake, PATIENCE)?, "slept on");
        ensure!(client.wake.take_events(&server.completions) == 0 || round > 0, "another's event");
        client.wake.take_events(&client.completions);
        ensure!(!is_readable(&client.wake, Duration::ZERO)?, "awake for ever");
        client.completed_well(&[round])?;
        server.completed_well(&[9])?;
    }
    Ok(())
}

fn batches(lab: &Lab) -> Outcome {
    let shape = Shape { is_shared: true, send_wr: 64, ..Shape::new(Road::Best) };
    let Pair { mut server, mut client, .. } = connect(lab, shape)?;
    let shared = client.shared.as_ref().ok_or("no shared queue")?;
    let segment = client.sge(0, 64);
    shared.post_batch((0..50).map(|id| (id, segment)))?;
    let mut batch = server.queue.batch();
    for id in 0..50 {
        batch.send_inline(id, id == 49, b"one of fifty")?;
    }
    batch.submit()?;
    server.completed_well(&[49])?;
    // All were acknowledged, so all have been received.
    let mut found = Vec::new();
    let counts = [(); 3].map(|()| client.completions.poll(|completion| found.push(completion.id)));
    ensure!(counts == [32, 18, 0], "polled {counts:?}");
    ensure!(found == (0..50).collect::<Vec<_>>(), "{found:?}");
    Ok(())
}

/// Any order of dropping, and another thread.
fn dropping(lab: &Lab) -> Outcome {
    let shape = Shape { is_shared: true, ..Shape::new(Road::Best) };
    let Pair { server, client, servers, clients } = connect(lab, shape)?;
    let End { id, queue, completions, wake, shared, .. } = server;
    drop((servers, shared, completions, wake, id));
    let thread = std::thread::spawn(move || drop(queue));
    thread.join().map_err(|_| "the thread panicked")?;
    event(&clients, CmEventKind::Disconnected)?;
    drop(clients);
    let End { id, queue, mut completions, .. } = client;
    drop(queue);
    completions.poll(|_| ());
    drop(completions);
    drop(id);
    Ok(())
}

fn link(lab: &Lab) -> Outcome {
    let Some(netdev) = &lab.netdev else { return Err("no --netdev".into()) };
    for (word, expected, is_active) in
        [("down", AsyncEvent::PortDown { port: 1 }, false), ("up", AsyncEvent::PortUp { port: 1 }, true)]
    {
        let status = Command::new("ip").args(["link", "set", netdev, word]).status()?;
        ensure!(status.success(), "ip: {status}");
        let begin = Instant::now();
        loop {
            ensure!(begin.elapsed() < PATIENCE, "no event after {word}");
            is_readable(lab.device.async_fd(), PATIENCE)?;
            match lab.device.next_async_event() {
                Some(event) if event == expected => break,
                Some(other) => println!("     {other:?}"),
                None => {}
            }
        }
        ensure!(lab.device.port_is_active(1) == is_active, "the port is not {word}");
    }
    Ok(())
}

type Check<'a> = (String, Box<dyn Fn() -> Outcome + 'a>);

fn checks<'a>(lab: &'a Lab, addresses: &'a [IpAddr]) -> Vec<Check<'a>> {
    let mut list: Vec<Check<'a>> = Vec::new();
    let mut add = |name: &str, check: Box<dyn Fn() -> Outcome + 'a>| list.push((name.to_owned(), check));
    add("device", Box::new(|| device(lab)));
    for address in addresses {
        add(&format!("connect {address}"), Box::new(|| connecting(lab, *address)));
    }
    add("reject", Box::new(|| rejecting(lab)));
    add("refusals", Box::new(|| refusals(lab)));
    add("migrate", Box::new(|| migrating(lab)));
    add("memory", Box::new(|| memory(lab)));
    for road in [Road::Extended, Road::List] {
        add(&format!("ping, own receives, {road:?}"), Box::new(move || ping(lab, road, false)));
        add(&format!("ping, shared receives, {road:?}"), Box::new(move || ping(lab, road, true)));
        add(&format!("write and read, {road:?}"), Box::new(move || moving(lab, road)));
        add(&format!("unsignalled chains, {road:?}"), Box::new(move || chains(lab, road)));
        add(&format!("discarded batches, {road:?}"), Box::new(move || discarding(lab, road)));
        add(&format!("limits, {road:?}"), Box::new(move || limits(lab, road)));
        add(&format!("wrong key, {road:?}"), Box::new(move || wrong_key(lab, road)));
        add(&format!("windows, {road:?}"), Box::new(move || windows(lab, road)));
        add(&format!("invalidate a region, {road:?}"), Box::new(move || invalidate_region(lab, road)));
        add(&format!("flush, own receives, {road:?}"), Box::new(move || flushing(lab, road, false)));
        add(&format!("flush, shared receives, {road:?}"), Box::new(move || flushing(lab, road, true)));
    }
    add("disconnect", Box::new(|| disconnecting(lab)));
    add("completion channel", Box::new(|| waking(lab)));
    add("poll in batches", Box::new(|| batches(lab)));
    add("drop in any order", Box::new(|| dropping(lab)));
    if lab.netdev.is_some() {
        add("link down and up", Box::new(|| link(lab)));
    }
    list
}

fn prepare(address: IpAddr, netdev: Option<String>) -> Outcome<Lab> {
    let devices = Device::all()?;
    let device = Arc::clone(devices.first().ok_or("no RDMA device")?);
    let pool = Pool::new(&[ZoneSpec { buffer_bytes: BUFFER, count: 4 }], Pages::Base)?;
    let access = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
    let access = if device.limits().has_windows { access | Access::WINDOWS } else { access };
    let region = Arc::new(device.register(pool.area(), access)?);
    Ok(Lab { devices, device, pool, region, address, netdev })
}

fn main() -> ExitCode {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let netdev = match arguments.iter().position(|argument| argument == "--netdev") {
        Some(at) if at + 1 < arguments.len() => arguments.drain(at..at + 2).next_back(),
        _ => None,
    };
    let addresses: Vec<IpAddr> = arguments.iter().filter_map(|argument| argument.parse().ok()).collect();
    if addresses.is_empty() || addresses.len() != arguments.len() {
        eprintln!("usage: verbs-check [--netdev NAME] ADDRESS...");
        return ExitCode::from(2);
    }
    let lab = match prepare(addresses[0], netdev) {
        Ok(lab) => lab,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    let mut failed = 0;
    for (name, check) in checks(&lab, &addresses) {
        match check() {
            Ok(()) => println!("ok   {name}"),
            Err(error) => {
                failed += 1;
                println!("FAIL {name}: {error}");
            }
        }
    }
    println!("{}", if failed == 0 { "all passed".to_owned() } else { format!("{failed} failed") });
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
