//! Bad peers of the service for optimistic reads, and of a target with `remote` disks: for the lab
//! (`tests/lab/cases/rdma-optimistic-peers.sh`, `rdma-isolation.sh`).
//!
//! ```text
//! cargo build --release -p spindle-tests --no-default-features --features peers --example optimistic-peers
//! scripts/lab/run -- .../optimistic-peers 10.9.1.1:4420 NQN OTHER_NQN
//! scripts/lab/run -- .../optimistic-peers write 10.9.1.1:4420 MEMORY KEY
//! ```
//! First form: both subsystems have namespace 1 on a disk with a cache of its own. Second form: a host that
//! has no right to anything but its queue pair writes to memory (an address, 0x and hexadecimal) with a key
//! that was given to somebody else. Each check prints a line; the first that fails ends the program with an
//! error.
#![forbid(unsafe_code)]

use std::error::Error;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nvme_spec::Nqn;
use nvme_spec::optimistic::{OptimisticAccept, OptimisticReject, OptimisticRequest, OptimisticStatus};
use nvme_spec::rdma::CmRequest;
use nvme_spec::zerocopy::IntoBytes;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use spindle_nvme_initiator::{Controller, Host, Options, Pages, Target, TransportKind};
use spindle_rdma::{
    Access, CmChannel, CmEvent, CmEventKind, CmId, CompletionQueue, ConnectParams, Device, MemoryRegion,
    Operation, QueuePair, QueuePairConfig, SendData, WcStatus,
};
use spindle_reactor::mem::Area;

/// Longest wait for an event or a completion.
const TIMEOUT: Duration = Duration::from_secs(30);

type Outcome<T> = Result<T, Box<dyn Error>>;

/// A connection to the service; fields are dropped in this order.
struct Peer {
    queue_pair: QueuePair,
    queue: CompletionQueue,
    memory: MemoryRegion,
    id: CmId,
    channel: CmChannel,
    accept: OptimisticAccept,
}

fn event(channel: &CmChannel) -> Outcome<CmEvent> {
    loop {
        if let Some(event) = channel.next_event()? {
            return Ok(event);
        }
        if poll(&mut [PollFd::new(channel, PollFlags::IN)], Some(&Timespec::try_from(TIMEOUT)?))? == 0 {
            return Err("the connection manager says nothing".into());
        }
    }
}

/// Connects with this private data; returns the answer too.
fn open(to: SocketAddr, private_data: &[u8]) -> Outcome<(Peer, CmEvent)> {
    let channel = CmChannel::new()?;
    let id = CmId::new(&channel)?;
    id.resolve_address(None, to, TIMEOUT)?;
    event(&channel)?;
    id.resolve_route(TIMEOUT)?;
    event(&channel)?;
    let devices = Device::all()?;
    let device: &Arc<Device> = id.device(&devices).ok_or("no such device")?;
    let queue = CompletionQueue::new(device, 8, 0, None)?;
    let config = QueuePairConfig {
        cq: &queue,
        domain: None,
        srq: None,
        send_wr: 8,
        recv_wr: 1,
        send_sge: 1,
        recv_sge: 1,
        inline_bytes: 0,
        posting: None,
    };
    let queue_pair = id.create_queue_pair(device, &config)?;
    let memory = device.register_part(Area::map(4096, Pages::Base)?, 0, 4096, Access::LOCAL_WRITE)?;
    let initiator_depth = device.limits().initiator_depth;
    // A target of NVMe needs one, for its READs of data.
    id.connect(&ConnectParams { private_data, initiator_depth, responder_resources: 1 })?;
    let answer = event(&channel)?;
    let accept = OptimisticAccept::default();
    Ok((Peer { queue_pair, queue, memory, id, channel, accept }, answer))
}

/// Connects to the service for optimistic reads. `Err`: the status of the reject.
fn connect(to: SocketAddr, private_data: &[u8]) -> Outcome<Result<Peer, OptimisticStatus>> {
    let (peer, answer) = open(to, private_data)?;
    if answer.kind == CmEventKind::Established {
        let accept = OptimisticAccept::parse(&answer.private_data).ok_or("another protocol")?;
        return Ok(Ok(Peer { accept, ..peer }));
    }
    let status = OptimisticReject::parse(&answer.private_data);
    Ok(Err(status.ok_or_else(|| format!("no reject with a status: {answer:?}"))?))
}

impl Peer {
    /// Executes one operation on 64 bytes; returns the status of its completion.
    fn execute(&mut self, operation: Operation) -> Outcome<WcStatus> {
        let sge = self.memory.sge(self.memory.base(), 64).ok_or("64 bytes")?;
        let mut batch = self.queue_pair.batch();
        batch.add(1, true, operation, SendData::Local(&[sge]))?;
        batch.submit()?;
        let end = Instant::now() + TIMEOUT;
        let mut status = None;
        while status.is_none() {
            self.queue.poll(|completion| status = Some(completion.status));
            if Instant::now() > end {
                return Err("no completion".into());
            }
        }
        status.ok_or_else(|| "no completion".into())
    }

    /// A READ of the first frame of `of`.
    fn read_frame(&mut self, of: &OptimisticAccept) -> Outcome<WcStatus> {
        self.execute(Operation::Read { address: of.frames_base.get(), key: of.frames_key.get() })
    }

    fn check_reads(&mut self) -> Outcome<()> {
        let accept = self.accept;
        let status = self.read_frame(&accept)?;
        if status == WcStatus::SUCCESS {
            Ok(())
        } else {
            Err(format!("a READ that is allowed: {status}").into())
        }
    }
}

fn check(what: &str, is_right: bool) -> Outcome<()> {
    println!("{}: {what}", if is_right { "ok" } else { "WRONG" });
    if is_right { Ok(()) } else { Err(what.into()) }
}

/// A controller of the subsystem `nqn`, as a host of its own.
fn controller(address: SocketAddr, nqn: &str, host: &str) -> Outcome<Controller> {
    let host = Host::from_nqn(Nqn::new(host)?);
    let target = Target { transport: TransportKind::Rdma, address, nqn: Nqn::new(nqn)?, host };
    Ok(Controller::connect(&target, &Options { io_queues: 1, ..Options::default() })?)
}

/// Connections of one controller.
const MOST: usize = 128;
/// Longest time until a connection whose client is gone makes room: 5 s to the probe and 30 s for its answer,
/// and as long again for a slow machine.
const GONE_MAX: Duration = Duration::from_secs(70);

/// What is left of a client that is gone without a word, as with its network cut: its queue pair exists no
/// more, and its connection manager has not said so, which the target would hear.
struct Remains {
    _id: CmId,
    _channel: CmChannel,
}

impl Peer {
    /// The device ignores packets for a queue pair that does not exist.
    fn vanish(self) -> Remains {
        let Peer { queue_pair, queue, memory, id, channel, .. } = self;
        drop(queue_pair);
        drop((queue, memory));
        Remains { _id: id, _channel: channel }
    }
}

/// Connects one more client, once the controller has room for it.
fn connect_in_time(controller: &mut Controller, service: SocketAddr) -> Outcome<Peer> {
    let end = Instant::now() + GONE_MAX;
    loop {
        let token = OptimisticRequest::new(controller.attachment(1)?.token);
        match connect(service, token.as_bytes())? {
            Ok(peer) => return Ok(peer),
            Err(OptimisticStatus::TOO_MANY) if Instant::now() < end => {}
            Err(status) => return Err(status.reason().into()),
        }
        std::thread::park_timeout(Duration::from_millis(500));
    }
}

/// Clients that are gone without a word, or whose queue pair a bad READ has ended, use up no room. The
/// controller and its NVMe queue pairs stay.
fn check_silent(address: SocketAddr, service: SocketAddr, nqn: &str) -> Outcome<()> {
    let mut controller = controller(address, nqn, "nqn.2026-01.lab:tenant-d")?;
    let mut peers = Vec::new();
    for _ in 0..MOST {
        peers.push(connect_in_time(&mut controller, service)?);
    }
    let mut bad = peers.pop().ok_or("128 peers")?;
    let accept = bad.accept;
    let wrong = Operation::Read { address: accept.seals_base.get(), key: accept.frames_key.get() };
    check(
        "a READ of a seal with the key of the frames is refused",
        bad.execute(wrong)? != WcStatus::SUCCESS,
    )?;
    let _next = connect_in_time(&mut controller, service)?;
    check("a queue pair that a bad READ has ended makes room", true)?;
    drop(bad);

    let mut stays = peers.split_off(MOST / 2);
    let remains: Vec<Remains> = peers.into_iter().map(Peer::vanish).collect();
    for _ in &remains {
        stays.push(connect_in_time(&mut controller, service)?);
    }
    check("clients that are gone without a word make room", true)?;
    stays.iter_mut().try_for_each(Peer::check_reads)?;
    check("idle clients that are there stay", true)?;
    controller.refresh_identify()?;
    check("its NVMe queue pairs live on", true)
}

/// More clients than a controller may have, none of which reads.
fn check_limits(address: SocketAddr, service: SocketAddr, nqn: &str) -> Outcome<()> {
    let mut controller = controller(address, nqn, "nqn.2026-01.lab:tenant-c")?;
    let tokens: Vec<_> =
        (0..MOST).map(|_| controller.attachment(1).map(|it| it.token)).collect::<Result<_, _>>()?;
    check("a controller has 128 unused tokens at most", controller.attachment(1).is_err())?;
    let mut peers = Vec::new();
    for token in tokens {
        let made = connect(service, OptimisticRequest::new(token).as_bytes())?;
        peers.push(made.map_err(|status| status.reason())?);
    }
    let mut connect_one = || {
        let token = OptimisticRequest::new(controller.attachment(1)?.token);
        connect(service, token.as_bytes())
    };
    check(
        "a controller has 128 connections at most",
        connect_one()?.err() == Some(OptimisticStatus::TOO_MANY),
    )?;
    peers.iter_mut().try_for_each(Peer::check_reads)?;
    let gone = peers.pop().ok_or("128 peers")?;
    gone.id.disconnect()?;
    // The target answers after it has forgotten the connection.
    check("the target answers a disconnect", event(&gone.channel)?.kind == CmEventKind::Disconnected)?;
    connect_one()?.map_err(|status| status.reason())?;
    check("a client that goes makes room for another", true)
}

/// The key of memory that another target may write to is worth nothing on a host's queue pair.
fn check_foreign_write(address: &str, memory: &str, key: &str) -> Outcome<()> {
    let memory = u64::from_str_radix(memory.trim_start_matches("0x"), 16)?;
    let key = key.parse()?;
    let request = CmRequest::new(0, 32, 0);
    let (mut host, answer) = open(address.parse()?, request.as_bytes())?;
    check("a host connects its admin queue", answer.kind == CmEventKind::Established)?;
    let status = host.execute(Operation::Write { address: memory, key })?;
    println!("the WRITE has ended: {status}");
    check("a WRITE with another target's key is refused", status == WcStatus::REMOTE_ACCESS)
}

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    if let ["write", address, memory, key] = arguments[..] {
        return check_foreign_write(address, memory, key);
    }
    let [address, nqn, other_nqn] = arguments[..] else {
        return Err(
            "usage: optimistic-peers ADDRESS:PORT NQN OTHER_NQN, or write ADDRESS:PORT MEMORY KEY".into()
        );
    };
    let address: SocketAddr = address.parse()?;
    let mut controller_a = controller(address, nqn, "nqn.2026-01.lab:tenant-a")?;
    let mut controller_b = controller(address, other_nqn, "nqn.2026-01.lab:tenant-b")?;
    let first = controller_a.attachment(1)?;
    let service = SocketAddr::new(address.ip(), first.port.get());
    let request = OptimisticRequest::new(first.token);
    let reject = |data: &[u8]| Ok::<_, Box<dyn Error>>(connect(service, data)?.err());
    let format = Some(OptimisticStatus::INVALID_FORMAT);
    check("no private data is refused", reject(&[])? == format)?;
    check("NVMe's private data is refused", reject(&[0; 32])? == format)?;
    check(
        "an unknown token is refused",
        reject(OptimisticRequest::new([9; 16]).as_bytes())? == Some(OptimisticStatus::INVALID_TOKEN),
    )?;
    let mut a = connect(service, request.as_bytes())?.map_err(|status| status.reason())?;
    check("a used token is refused", reject(request.as_bytes())? == Some(OptimisticStatus::INVALID_TOKEN))?;
    let token = OptimisticRequest::new(controller_b.attachment(1)?.token);
    let mut b = connect(service, token.as_bytes())?.map_err(|status| status.reason())?;
    a.check_reads()?;
    b.check_reads()?;
    check("both tenants read their own cache", true)?;

    // Tenant a has got the key of tenant b.
    let leaked = a.read_frame(&b.accept.clone())?;
    check("a leaked key is refused by the device", leaked == WcStatus::REMOTE_ACCESS)?;
    let own = a.accept;
    check("its queue pair ends", a.read_frame(&own)? == WcStatus::FLUSHED)?;
    a.id.disconnect()?;
    b.check_reads()?;
    check("the other's reads go on", true)?;
    controller_a.refresh_identify()?;
    check("its own NVMe queue pairs live on", true)?;

    let token = OptimisticRequest::new(controller_a.attachment(1)?.token);
    let mut writer = connect(service, token.as_bytes())?.map_err(|status| status.reason())?;
    let accept = writer.accept;
    let written = Operation::Write { address: accept.frames_base.get(), key: accept.frames_key.get() };
    check("a WRITE to a frame is refused", writer.execute(written)? == WcStatus::REMOTE_ACCESS)?;
    let token = OptimisticRequest::new(controller_a.attachment(1)?.token);
    let mut writer = connect(service, token.as_bytes())?.map_err(|status| status.reason())?;
    let written = Operation::Write { address: accept.seals_base.get(), key: accept.seals_key.get() };
    check("a WRITE to a seal is refused", writer.execute(written)? == WcStatus::REMOTE_ACCESS)?;
    let token = OptimisticRequest::new(controller_a.attachment(1)?.token);
    let mut reader = connect(service, token.as_bytes())?.map_err(|status| status.reason())?;
    let bytes = u64::from(accept.frames.get()) << accept.page_shift;
    let beyond = accept.frames_base.get() + bytes.next_multiple_of(2 << 20);
    let beyond = reader.execute(Operation::Read { address: beyond, key: accept.frames_key.get() })?;
    check("a READ behind the frames is refused", beyond == WcStatus::REMOTE_ACCESS)?;
    b.check_reads()?;

    // Tenant b ends its controller: its connection ends too.
    controller_b.shutdown()?;
    let ended = event(&b.channel)?;
    check("the end of a controller ends its connection", ended.kind == CmEventKind::Disconnected)?;
    controller_a.refresh_identify()?;
    check_limits(address, service, nqn)?;
    check_silent(address, service, nqn)?;
    Ok(())
}
