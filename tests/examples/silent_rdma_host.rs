//! A host over NVMe/RDMA that stops its receives: it connects a controller with I/O queues, posts a receive
//! for each reply of the connect only, sends commands, and does nothing more. The target's SENDs of the
//! completions get RNR NAKs for ever, and the buffers of the commands wait for them.
//! `scripts/compare/neighbours-rdma` measures other hosts beside it.
//!
//! `silent_rdma_host ADDRESS NQN NSID QUEUES DEPTH BYTES read|write`: prints `silent` once all is sent, then
//! waits to be killed. With BYTES 0 it connects and sends nothing.
#![forbid(unsafe_code)]

use std::error::Error;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nvme_spec::fabrics::{ConnectAttributes, ConnectData};
use nvme_spec::nqn::Nqn;
use nvme_spec::rdma::CmRequest;
use nvme_spec::register::{CC, Cc};
use nvme_spec::zerocopy::IntoBytes;
use nvme_spec::{Sgl, Sqe};
use spindle_rdma::{
    Access, CmChannel, CmEventKind, CmId, CompletionQueue, ConnectParams, Device, MemoryRegion, Operation,
    QueuePair, QueuePairConfig, SendData, Sge,
};
use spindle_reactor::mem::{Buf, Pages, Pool, ZoneSpec};

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Longest wait for an event or a completion: an emulated CPU may not run for seconds.
const WAIT_MAX: Duration = Duration::from_secs(10);
/// Entries of an I/O queue and of the admin queue.
const ENTRIES: u16 = 128;
const ADMIN_ENTRIES: u16 = 32;
/// Receives of a queue: for Connect, and for the Property Set of the admin queue.
const RECEIVES: u32 = 2;
const CAPSULE_BYTES: u32 = 64;
const CONNECT_BYTES: u32 = 1024;
const BLOCK_BYTES: u32 = 4096;
/// Offsets in the memory of a queue: capsule with its data, replies, and data of all commands.
const REPLIES: u64 = 2048;
const DATA: u64 = 4096;
/// Identifier of a SEND; that of a receive is its index.
const SENT: u64 = u64::MAX;

struct Queue {
    queue: QueuePair,
    completions: CompletionQueue,
    region: MemoryRegion,
    memory: Buf,
    /// Of the memory.
    address: u64,
    /// SENDs without a completion, and replies that have come.
    sends: u32,
    replies: u32,
    channel: CmChannel,
    id: CmId,
}

fn wait(channel: &CmChannel, kind: CmEventKind) -> Outcome<()> {
    let begin = Instant::now();
    while begin.elapsed() < WAIT_MAX {
        match channel.next_event()? {
            Some(event) if event.kind == kind => return Ok(()),
            Some(event) => return Err(format!("{kind:?} was expected, not {event:?}").into()),
            None => std::thread::park_timeout(Duration::from_millis(1)),
        }
    }
    Err(format!("no {kind:?}").into())
}

fn entries_of(qid: u16) -> u16 {
    if qid == 0 { ADMIN_ENTRIES } else { ENTRIES }
}

impl Queue {
    fn connect(to: SocketAddr, qid: u16, cntlid: u16, bytes: u32) -> Outcome<Queue> {
        let channel = CmChannel::new()?;
        let id = CmId::new(&channel)?;
        id.resolve_address(None, to, WAIT_MAX)?;
        wait(&channel, CmEventKind::AddressResolved)?;
        id.resolve_route(WAIT_MAX)?;
        wait(&channel, CmEventKind::RouteResolved)?;
        let devices = Device::all()?;
        let device = Arc::clone(id.device(&devices).ok_or("no RDMA device")?);
        let completions = CompletionQueue::new(&device, u32::from(ENTRIES) * 2, 0, None)?;
        let config = QueuePairConfig {
            cq: &completions,
            domain: None,
            srq: None,
            send_wr: ENTRIES.into(),
            recv_wr: RECEIVES,
            send_sge: 1,
            recv_sge: 1,
            inline_bytes: 0,
            posting: None,
        };
        let queue = id.create_queue_pair(&device, &config)?;
        let buffer_bytes = u32::try_from(DATA)? + bytes;
        let pool = Pool::new(&[ZoneSpec { buffer_bytes, count: 1 }], Pages::Base)?;
        let memory = pool.take_contiguous(buffer_bytes).ok_or("no memory")?;
        let access = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
        let region = device.register_part(pool.area(), 0, pool.area().bytes(), access)?;
        let address = memory.as_slice().ok_or("not contiguous")?.as_ptr() as u64;
        let request = CmRequest::new(qid, entries_of(qid), cntlid);
        let parameters = ConnectParams {
            private_data: request.as_bytes(),
            responder_resources: device.limits().responder_resources,
            ..ConnectParams::default()
        };
        let (sends, replies) = (0, 0);
        let mut queue = Queue { queue, completions, region, memory, address, sends, replies, channel, id };
        for index in 0..u64::from(RECEIVES) {
            let reply = queue.sge(REPLIES + 16 * index, 16);
            queue.queue.post_receive(index, &[reply])?;
        }
        queue.id.connect(&parameters)?;
        wait(&queue.channel, CmEventKind::Established)?;
        Ok(queue)
    }

    fn sge(&self, offset: u64, bytes: u32) -> Sge {
        Sge { address: self.address + offset, bytes, key: self.region.local_key() }
    }

    /// Sends a capsule, whose bytes are of use until its SEND completes.
    fn send(&mut self, sqe: &Sqe, data: &[u8]) -> Outcome<()> {
        self.memory.copy_in(0, sqe.as_bytes());
        self.memory.copy_in(usize::try_from(CAPSULE_BYTES)?, data);
        let capsule = self.sge(0, CAPSULE_BYTES + u32::try_from(data.len())?);
        let mut batch = self.queue.batch();
        batch.add(SENT, true, Operation::Send, SendData::Local(&[capsule]))?;
        batch.submit()?;
        self.sends += 1;
        self.wait(|queue| queue.sends == 0)
    }

    /// Polls until `is_done`.
    fn wait(&mut self, is_done: impl Fn(&Queue) -> bool) -> Outcome<()> {
        let begin = Instant::now();
        while !is_done(self) {
            let (mut failed, mut sent, mut received) = (None, 0, 0);
            self.completions.poll(|completion| {
                if !completion.is_ok {
                    failed = Some(completion.status.to_string());
                }
                sent += u32::from(completion.id == SENT);
                received += u32::from(completion.id != SENT);
            });
            (self.sends, self.replies) = (self.sends - sent, self.replies + received);
            if let Some(failed) = failed {
                return Err(failed.into());
            }
            if begin.elapsed() > WAIT_MAX {
                return Err("no completion".into());
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Sends a command and returns the first four bytes of its completion.
    fn execute(&mut self, sqe: &Sqe, data: &[u8]) -> Outcome<u32> {
        let index = self.replies;
        self.send(sqe, data)?;
        self.wait(|queue| queue.replies > index)?;
        let at = usize::try_from(REPLIES)? + 16 * index as usize;
        let reply = &self.memory.as_slice().ok_or("not contiguous")?[at..at + 16];
        let status = u16::from_le_bytes([reply[14], reply[15]]) >> 1;
        if status != 0 {
            return Err(format!("status {status:#x}").into());
        }
        Ok(u32::from_le_bytes(reply[..4].try_into()?))
    }
}

fn main() -> Outcome<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [address, nqn, nsid, queues, depth, bytes, kind] = words.as_slice() else {
        return Err("arguments: ADDRESS NQN NSID QUEUES DEPTH BYTES read|write".into());
    };
    let (address, nqn): (SocketAddr, _) = (address.parse()?, Nqn::new(nqn)?);
    let (nsid, queues, depth, bytes): (u32, u16, u16, u32) =
        (nsid.parse()?, queues.parse()?, depth.parse()?, bytes.parse()?);
    let host = Nqn::new("nqn.2026-01.io.spindle:silent")?;
    let attributes = ConnectAttributes::new().with_disable_sq_flow_control(true);
    let connect = |qid: u16, cntlid: u16| {
        let data = ConnectData::new([7; 16], cntlid, &nqn, &host);
        let sqe =
            Sqe::connect(0, qid, entries_of(qid) - 1, 0, attributes).with_sgl(Sgl::in_capsule(CONNECT_BYTES));
        (sqe, data)
    };
    let mut admin = Queue::connect(address, 0, 0, 0)?;
    let (sqe, data) = connect(0, 0xffff);
    let cntlid = u16::try_from(admin.execute(&sqe, data.as_bytes())? & 0xffff)?;
    let enable = Cc::new().with_en(true).with_iosqes(6).with_iocqes(4);
    admin.execute(&Sqe::property_set(1, false, CC, enable.into_bits().into()), &[])?;
    let mut all = Vec::new();
    for qid in 1..=queues {
        let mut queue = Queue::connect(address, qid, cntlid, bytes)?;
        let (sqe, data) = connect(qid, cntlid);
        queue.execute(&sqe, data.as_bytes())?;
        all.push(queue);
    }
    for queue in all.iter_mut().filter(|_| bytes > 0) {
        // The receive that is left is the first command's.
        for cid in 0..depth {
            let sgl = Sgl::keyed(queue.address + DATA, bytes, queue.region.remote_key(), false);
            let blocks = bytes / BLOCK_BYTES;
            let slba = u64::from(cid) * u64::from(blocks);
            let sqe = match kind.as_str() {
                "read" => Sqe::read(cid, nsid, slba, blocks),
                _ => Sqe::write(cid, nsid, slba, blocks, false),
            };
            queue.send(&sqe.with_sgl(sgl), &[])?;
        }
    }
    println!("silent");
    loop {
        std::thread::park();
    }
}
