//! Measures ways to transfer the data of an I/O: in the capsule, by the target, and by RDMA WRITE with
//! immediate data ("fast write", "fast read"). A prototype of the exchange only: there is no NVMe in it.
//!
//! The target is a thread on core 0, the host one on core 1; both poll their completion queue, and yield the
//! core when it is empty, as soft-RoCE runs in kernel threads of the same machine. `scripts/compare/transfer`
//! runs it in the lab's guest and makes the table.
//!
//! ```text
//! write inline          host SENDs [capsule, data]                     target SENDs the response
//! write target-driven   host SENDs the capsule; target READs the data, then SENDs the response
//! write fast            host WRITEs [capsule, data] with immediate data into its slot at the target;
//!                                                                      target SENDs the response
//! read  ordinary        host SENDs the capsule      target WRITEs the data and SENDs the response
//! read  fast            host SENDs the capsule      target WRITEs the data with immediate data
//! read  fast-both       host WRITEs the capsule with immediate data    target as in `fast`
//! ```
//!
//! The same in all: the last work request of a message is signalled, a receive is posted again before its
//! message is answered, messages of one poll share a doorbell, capsules without data and responses are
//! inline, and the target uses data where the device has put it. An I/O is over when its response and the
//! completion of its request have come.
//!
//! Memory of the host's data: `registered` once, `each`: registered for the I/O, `copied` to or from memory
//! that is registered.
#![forbid(unsafe_code)]

use std::error::Error;
use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use spindle_rdma::{
    Access, CmChannel, CmEvent, CmEventKind, CmId, CompletionQueue, ConnectParams, Device, MemoryRegion,
    Operation, QueuePair, QueuePairConfig, SendData, Sge, WorkCompletion,
};
use spindle_reactor::affinity::{available_cores, pin_current_thread};
use spindle_reactor::mem::{Buf, Pages, Pool, ZoneSpec};

type Outcome<T = ()> = Result<T, Box<dyn Error + Send + Sync>>;

/// Longest wait for an event or a completion. Long: an emulated CPU may not run for seconds.
const PATIENCE: Duration = Duration::from_secs(10);
const TARGET_CORE: usize = 0;
/// Both are on the target's core where there is no other.
const HOST_CORE: usize = 1;
/// I/Os of each slot that are not counted.
const WARM_UP: u32 = 2;

const CAPSULE_BYTES: u32 = 64;
const RESPONSE_BYTES: u32 = 16;
const DATA_BYTES_MAX: u32 = 64 << 10;
/// Offsets in a slot: the capsule ends where the data begins, at a page.
const RESPONSE: u32 = 0;
const CAPSULE: u32 = DATA - CAPSULE_BYTES;
const DATA: u32 = 4096;
const SLOT_BYTES: u32 = DATA + DATA_BYTES_MAX;

const DEPTHS: [u32; 2] = [1, 32];
const SIZES: [u32; 6] = [512, 4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10];

/// What completed: bits of a work request's id above the index of its slot or receive.
const SENT: u64 = 0;
const RECEIVED: u64 = 1 << 32;
const FETCHED: u64 = 2 << 32;

const ACCESS: [Access; 3] = [Access::LOCAL_WRITE, Access::REMOTE_READ, Access::REMOTE_WRITE];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scheme {
    WriteInline,
    WriteTargetDriven,
    WriteFast,
    ReadOrdinary,
    ReadFast,
    ReadFastBoth,
}

const SCHEMES: [(Scheme, &str); 6] = [
    (Scheme::WriteInline, "write inline"),
    (Scheme::WriteTargetDriven, "write target-driven"),
    (Scheme::WriteFast, "write fast"),
    (Scheme::ReadOrdinary, "read ordinary"),
    (Scheme::ReadFast, "read fast"),
    (Scheme::ReadFastBoth, "read fast-both"),
];

impl Scheme {
    fn is_write(self) -> bool {
        matches!(self, Scheme::WriteInline | Scheme::WriteTargetDriven | Scheme::WriteFast)
    }

    /// Offset and bytes of a slot for a receive of the target; `None`: a receive without memory.
    fn receive_of_target(self) -> Option<(u32, u32)> {
        match self {
            Scheme::WriteInline => Some((CAPSULE, CAPSULE_BYTES + DATA_BYTES_MAX)),
            Scheme::WriteTargetDriven | Scheme::ReadOrdinary | Scheme::ReadFast => {
                Some((CAPSULE, CAPSULE_BYTES))
            }
            Scheme::WriteFast | Scheme::ReadFastBoth => None,
        }
    }

    fn receive_of_host(self) -> Option<(u32, u32)> {
        let is_fast = matches!(self, Scheme::ReadFast | Scheme::ReadFastBoth);
        (!is_fast).then_some((RESPONSE, RESPONSE_BYTES))
    }
}

/// The host's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Memory {
    Registered,
    RegisteredEach,
    Copied,
}

const MEMORIES: [(Memory, &str); 3] =
    [(Memory::Registered, "registered"), (Memory::RegisteredEach, "each"), (Memory::Copied, "copied")];

/// One measurement.
#[derive(Debug, Clone, Copy)]
struct Shape {
    scheme: Scheme,
    memory: Memory,
    bytes: u32,
    depth: u32,
    seconds: f64,
    /// Data is a pattern of the I/O and is compared.
    is_checked: bool,
}

fn ensure(is_so: bool, why: impl FnOnce() -> String) -> Outcome {
    if is_so { Ok(()) } else { Err(why().into()) }
}

fn access() -> Access {
    let [first, second, third] = ACCESS;
    first | second | third
}

/// Word `index` of the data of I/O `sequence`.
fn word(sequence: u64, index: usize) -> u64 {
    (sequence + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ index as u64
}

fn fill(data: &mut [u8], sequence: u64) {
    for (index, bytes) in data.chunks_exact_mut(8).enumerate() {
        bytes.copy_from_slice(&word(sequence, index).to_le_bytes());
    }
}

fn check(data: &[u8], sequence: u64) -> Outcome {
    let wrong =
        data.chunks_exact(8).enumerate().position(|(index, it)| *it != word(sequence, index).to_le_bytes());
    ensure(wrong.is_none(), || format!("I/O {sequence}: wrong data at word {}", wrong.unwrap_or(0)))
}

/// What the host tells the target of an I/O.
#[derive(Debug, Clone, Copy)]
struct Capsule {
    /// Address and key of the host's data.
    address: u64,
    key: u32,
    slot: u32,
    sequence: u64,
}

impl Capsule {
    fn to_bytes(self) -> [u8; CAPSULE_BYTES as usize] {
        let mut bytes = [0; CAPSULE_BYTES as usize];
        bytes[..8].copy_from_slice(&self.address.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.key.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.slot.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.sequence.to_le_bytes());
        bytes
    }

    fn parse(bytes: &[u8]) -> Outcome<Capsule> {
        Ok(Capsule {
            address: u64::from_le_bytes(bytes[..8].try_into()?),
            key: u32::from_le_bytes(bytes[8..12].try_into()?),
            slot: u32::from_le_bytes(bytes[12..16].try_into()?),
            sequence: u64::from_le_bytes(bytes[16..24].try_into()?),
        })
    }
}

/// Waits for an event of `kind`; an error if another one comes.
fn event(channel: &CmChannel, kind: CmEventKind) -> Outcome<CmEvent> {
    let begin = Instant::now();
    while begin.elapsed() < PATIENCE {
        if let Some(event) = channel.next_event()? {
            ensure(event.kind == kind, || format!("{kind:?} was expected, not {event:?}"))?;
            return Ok(event);
        }
        let timeout = Timespec::try_from(PATIENCE).ok();
        poll(&mut [PollFd::new(channel, PollFlags::IN)], timeout.as_ref())?;
    }
    Err(format!("no {kind:?}").into())
}

/// Memory of `count` slots, adjacent.
fn slots(count: u32) -> Outcome<(Pool, Vec<Buf>)> {
    let pool = Pool::new(&[ZoneSpec { buffer_bytes: SLOT_BYTES, count }], Pages::Base)?;
    let slots: Option<Vec<Buf>> = (0..count).map(|_| pool.take_contiguous(SLOT_BYTES)).collect();
    let mut slots = slots.ok_or("no memory")?;
    slots.iter_mut().for_each(Buf::clear);
    Ok((pool, slots))
}

fn bytes_of(slot: &Buf, offset: u32, bytes: u32) -> Outcome<&[u8]> {
    let slot = slot.as_slice().ok_or("not contiguous")?;
    Ok(&slot[offset as usize..][..bytes as usize])
}

fn bytes_of_mut(slot: &mut Buf, offset: u32, bytes: u32) -> Outcome<&mut [u8]> {
    let slot = slot.as_mut_slice().ok_or("not contiguous")?;
    Ok(&mut slot[offset as usize..][..bytes as usize])
}

fn address_of(slot: &Buf) -> u64 {
    slot.as_slice().map_or(0, |bytes| bytes.as_ptr() as u64)
}

/// One side of a connection.
struct End {
    queue: QueuePair,
    completions: CompletionQueue,
    region: MemoryRegion,
    slots: Vec<Buf>,
    /// See [`Scheme::receive_of_target`].
    receive: Option<(u32, u32)>,
    device: Arc<Device>,
    id: CmId,
}

impl End {
    /// Creates the queue pair and posts a receive for each slot.
    fn new(devices: &[Arc<Device>], id: CmId, depth: u32, receive: Option<(u32, u32)>) -> Outcome<End> {
        let device = Arc::clone(id.device(devices).ok_or("no device of ours")?);
        // For each slot: a receive, a READ, and responses (with their WRITE) of two I/Os, as the completion
        // of a response may come after the next request.
        let completions = CompletionQueue::new(&device, 8 * depth + 16, 0, None)?;
        let config = QueuePairConfig {
            cq: &completions,
            domain: None,
            srq: None,
            send_wr: 6 * depth + 16,
            recv_wr: depth,
            send_sge: 2,
            recv_sge: 1,
            inline_bytes: CAPSULE_BYTES,
            posting: None,
        };
        let queue = id.create_queue_pair(&device, &config)?;
        ensure(queue.inline_bytes() >= CAPSULE_BYTES, || "too few inline bytes".to_owned())?;
        let (pool, slots) = slots(depth)?;
        let region = device.register(pool.area(), access())?;
        let mut end = End { queue, completions, region, slots, receive, device, id };
        (0..u64::from(depth)).try_for_each(|index| end.post_receive(index))?;
        Ok(end)
    }

    fn sge(&self, slot: usize, offset: u32, bytes: u32) -> Sge {
        let address = address_of(&self.slots[slot]) + u64::from(offset);
        Sge { address, bytes, key: self.region.local_key() }
    }

    fn post_receive(&mut self, index: u64) -> Outcome {
        match self.receive {
            Some((offset, bytes)) => {
                let segment = self.sge(usize::try_from(index)?, offset, bytes);
                self.queue.post_receive(RECEIVED | index, &[segment])?;
            }
            None => self.queue.post_receive(RECEIVED | index, &[])?,
        }
        Ok(())
    }
}

/// Kind and index of a completion's id.
fn split(id: u64) -> (u64, usize) {
    let index = u32::try_from(id & u64::from(u32::MAX)).unwrap_or(0);
    (id & !u64::from(u32::MAX), index as usize)
}

struct Target {
    end: End,
    shape: Shape,
    /// Capsule of the I/O in each slot.
    capsules: Vec<Option<Capsule>>,
    /// Slots whose data is to be READ, and those to be answered.
    fetches: Vec<usize>,
    replies: Vec<usize>,
}

impl Target {
    fn accept(devices: &[Arc<Device>], channel: &CmChannel, shape: Shape) -> Outcome<Target> {
        let request = event(channel, CmEventKind::ConnectRequest)?;
        let id = request.new_id.ok_or("no identifier")?;
        let end = End::new(devices, id, shape.depth, shape.scheme.receive_of_target())?;
        // The slots, for `Host::connect`.
        let mut private_data = [0; 12];
        private_data[..8].copy_from_slice(&address_of(&end.slots[0]).to_le_bytes());
        private_data[8..].copy_from_slice(&end.region.remote_key().to_le_bytes());
        let initiator_depth = request.initiator_depth.min(end.device.limits().initiator_depth);
        end.id.accept(&ConnectParams {
            private_data: &private_data,
            responder_resources: 1,
            initiator_depth,
        })?;
        event(channel, CmEventKind::Established)?;
        let depth = shape.depth as usize;
        Ok(Target {
            end,
            shape,
            capsules: vec![None; depth],
            fetches: Vec::with_capacity(depth),
            replies: Vec::with_capacity(depth),
        })
    }

    fn run(mut self, is_over: &AtomicBool) -> Outcome {
        let mut found: Vec<WorkCompletion> = Vec::with_capacity(64);
        while !is_over.load(Ordering::Acquire) {
            if self.end.completions.poll(|completion| found.push(completion)) == 0 {
                thread::yield_now();
                continue;
            }
            for completion in found.drain(..) {
                if !completion.is_ok {
                    let is_flushed = is_over.load(Ordering::Acquire);
                    return ensure(is_flushed, || format!("target: {}", completion.status));
                }
                match split(completion.id) {
                    (RECEIVED, index) => self.on_request(index, completion.immediate)?,
                    (FETCHED, slot) => {
                        self.check(slot, slot)?;
                        self.replies.push(slot);
                    }
                    _ => {}
                }
            }
            self.post()?;
        }
        Ok(())
    }

    /// Takes the capsule, which is in the slot that the immediate data names, or else in the receive.
    fn on_request(&mut self, receive: usize, immediate: Option<u32>) -> Outcome {
        let at = immediate.map_or(receive, |slot| slot as usize);
        let capsule = Capsule::parse(bytes_of(&self.end.slots[at], CAPSULE, CAPSULE_BYTES)?)?;
        let slot = capsule.slot as usize;
        self.capsules[slot] = Some(capsule);
        match self.shape.scheme {
            Scheme::WriteTargetDriven => self.fetches.push(slot),
            Scheme::WriteInline | Scheme::WriteFast => {
                self.check(slot, at)?;
                self.replies.push(slot);
            }
            Scheme::ReadOrdinary | Scheme::ReadFast | Scheme::ReadFastBoth => {
                if self.shape.is_checked {
                    let bytes = self.shape.bytes;
                    fill(bytes_of_mut(&mut self.end.slots[slot], DATA, bytes)?, capsule.sequence);
                }
                self.replies.push(slot);
            }
        }
        self.end.post_receive(receive as u64)
    }

    /// Compares the data of a write, which is in slot `at`.
    fn check(&self, slot: usize, at: usize) -> Outcome {
        let capsule = self.capsules[slot].ok_or("no capsule")?;
        if !self.shape.is_checked {
            return Ok(());
        }
        check(bytes_of(&self.end.slots[at], DATA, self.shape.bytes)?, capsule.sequence)
    }

    fn data(&self, slot: usize) -> Sge {
        self.end.sge(slot, DATA, self.shape.bytes)
    }

    fn post(&mut self) -> Outcome {
        let (fetches, replies) = (std::mem::take(&mut self.fetches), std::mem::take(&mut self.replies));
        let data: [Vec<Sge>; 2] =
            [&fetches, &replies].map(|slots| slots.iter().map(|slot| self.data(*slot)).collect());
        let mut batch = self.end.queue.batch();
        for (slot, data) in fetches.iter().zip(&data[0]) {
            let Capsule { address, key, .. } = self.capsules[*slot].ok_or("no capsule")?;
            let operation = Operation::Read { address, key };
            batch.add(FETCHED | *slot as u64, true, operation, SendData::Local(&[*data]))?;
        }
        for (slot, data) in replies.iter().zip(&data[1]) {
            let capsule = self.capsules[*slot].take().ok_or("no capsule")?;
            let (id, immediate) = (SENT | *slot as u64, capsule.slot);
            let Capsule { address, key, .. } = capsule;
            if let Scheme::ReadFast | Scheme::ReadFastBoth = self.shape.scheme {
                let operation = Operation::WriteWithImmediate { address, key, immediate };
                batch.add(id, true, operation, SendData::Local(&[*data]))?;
                continue;
            }
            if self.shape.scheme == Scheme::ReadOrdinary {
                batch.add(id, false, Operation::Write { address, key }, SendData::Local(&[*data]))?;
            }
            let mut response = [0; RESPONSE_BYTES as usize];
            response[..4].copy_from_slice(&capsule.slot.to_le_bytes());
            batch.add(id, true, Operation::Send, SendData::Inline(&response))?;
        }
        batch.submit()?;
        // Their memory is used again.
        (self.fetches, self.replies) = (fetches, replies);
        self.fetches.clear();
        self.replies.clear();
        Ok(())
    }
}

/// An I/O of the host.
struct Io {
    /// The caller's data; see [`Memory`].
    data: Buf,
    region: Option<MemoryRegion>,
    /// Segments of the capsule, and of the data as the device gets it.
    segments: [Sge; 2],
    capsule: Capsule,
    /// Completions that are missing: of the request and of the response.
    missing: u8,
}

struct Host {
    end: End,
    shape: Shape,
    ios: Vec<Io>,
    /// Registration of all data, and its area.
    data: Option<MemoryRegion>,
    pool: Pool,
    /// Address of the target's first slot, and key.
    slots: (u64, u32),
    ready: Vec<usize>,
}

impl Host {
    fn connect(devices: &[Arc<Device>], to: SocketAddr, shape: Shape) -> Outcome<(CmChannel, Host)> {
        let channel = CmChannel::new()?;
        let id = CmId::new(&channel)?;
        id.resolve_address(None, to, PATIENCE)?;
        event(&channel, CmEventKind::AddressResolved)?;
        id.resolve_route(PATIENCE)?;
        event(&channel, CmEventKind::RouteResolved)?;
        let end = End::new(devices, id, shape.depth, shape.scheme.receive_of_host())?;
        let responder_resources = end.device.limits().responder_resources;
        end.id.connect(&ConnectParams { private_data: &[], responder_resources, initiator_depth: 1 })?;
        let private_data = event(&channel, CmEventKind::Established)?.private_data;
        let base = u64::from_le_bytes(private_data[..8].try_into()?);
        let key = u32::from_le_bytes(private_data[8..12].try_into()?);
        let (pool, data) = slots(shape.depth)?;
        let region = (shape.memory == Memory::Registered)
            .then(|| end.device.register(pool.area(), access()))
            .transpose()?;
        let io = |(slot, data): (usize, Buf)| {
            let segments = [end.sge(slot, CAPSULE, CAPSULE_BYTES), end.sge(slot, DATA, shape.bytes)];
            let slot = u32::try_from(slot).unwrap_or(0);
            let capsule = Capsule { address: 0, key: 0, slot, sequence: u64::from(slot) };
            Io { data, region: None, segments, capsule, missing: 0 }
        };
        let ios = data.into_iter().enumerate().map(io).collect();
        let ready = (0..shape.depth as usize).collect();
        let slots = (base, key);
        Ok((channel, Host { end, shape, ios, data: region, pool, slots, ready }))
    }

    /// Runs I/Os and returns how many per second were completed, after [`WARM_UP`] of each slot.
    fn run(mut self) -> Outcome<f64> {
        let warm_up = u64::from(self.shape.depth * WARM_UP);
        let period = Duration::from_secs_f64(self.shape.seconds);
        // I/Os completed; when the warm-up has ended; when the last I/O of the period was completed, and
        // how many were completed until then.
        let (mut count, mut inflight) = (0, 0);
        let mut first = None;
        let mut last = (Instant::now(), 0);
        let mut progress = last.0;
        let mut found: Vec<WorkCompletion> = Vec::with_capacity(64);
        loop {
            let now = Instant::now();
            let is_over = first.is_some_and(|first| now >= first + period);
            if !is_over && !self.ready.is_empty() {
                inflight += self.ready.len();
                self.post()?;
            }
            if inflight == 0 {
                break;
            }
            if self.end.completions.poll(|completion| found.push(completion)) == 0 {
                ensure(progress + PATIENCE > now, || "host: no completion".to_owned())?;
                thread::yield_now();
                continue;
            }
            progress = now;
            for completion in found.drain(..) {
                let Some(slot) = self.on_completion(&completion)? else { continue };
                inflight -= 1;
                count += 1;
                self.ready.push(slot);
            }
            if !is_over {
                last = (Instant::now(), count);
            }
            if first.is_none() && count >= warm_up {
                (first, count) = (Some(last.0), 0);
                last.1 = 0;
            }
        }
        let elapsed = last.0 - first.ok_or("no I/O")?;
        #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
        Ok(last.1 as f64 / elapsed.as_secs_f64().max(1e-3))
    }

    /// Returns the slot whose I/O is over.
    fn on_completion(&mut self, completion: &WorkCompletion) -> Outcome<Option<usize>> {
        ensure(completion.is_ok, || format!("host: {}", completion.status))?;
        let slot = match split(completion.id) {
            (RECEIVED, index) => {
                let slot = match completion.immediate {
                    Some(slot) => slot,
                    None => {
                        let response = bytes_of(&self.end.slots[index], RESPONSE, RESPONSE_BYTES)?;
                        u32::from_le_bytes(response[..4].try_into()?)
                    }
                };
                self.end.post_receive(index as u64)?;
                slot as usize
            }
            (_, slot) => slot,
        };
        let Host { end, shape, ios, .. } = self;
        let io = &mut ios[slot];
        io.missing = io.missing.checked_sub(1).ok_or("more completions than work")?;
        if io.missing > 0 {
            return Ok(None);
        }
        io.region = None;
        if !shape.scheme.is_write() {
            if shape.memory == Memory::Copied {
                let from = bytes_of(&end.slots[slot], DATA, shape.bytes)?;
                bytes_of_mut(&mut io.data, DATA, shape.bytes)?.copy_from_slice(from);
            }
            if shape.is_checked {
                check(bytes_of(&io.data, DATA, shape.bytes)?, io.capsule.sequence)?;
            }
        }
        Ok(Some(slot))
    }

    /// Prepares the data and the capsule of the next I/O in `slot`.
    fn prepare(&mut self, slot: usize) -> Outcome {
        let Host { end, shape, ios, data, pool, .. } = self;
        let (io, bytes) = (&mut ios[slot], shape.bytes);
        io.missing = 2;
        io.capsule.sequence += u64::from(shape.depth);
        if shape.is_checked && shape.scheme.is_write() {
            fill(bytes_of_mut(&mut io.data, DATA, bytes)?, io.capsule.sequence);
        }
        let address = address_of(&io.data) + u64::from(DATA);
        let (address, region) = match shape.memory {
            Memory::Registered => (address, data.as_ref()),
            Memory::RegisteredEach => {
                let area = pool.area();
                let offset = usize::try_from(address)? - area.base().as_ptr().addr();
                let region = end.device.register_part(area, offset, bytes as usize, access())?;
                (address, Some(&*io.region.insert(region)))
            }
            Memory::Copied => {
                if shape.scheme.is_write() {
                    let from = bytes_of(&io.data, DATA, bytes)?;
                    bytes_of_mut(&mut end.slots[slot], DATA, bytes)?.copy_from_slice(from);
                }
                (address_of(&end.slots[slot]) + u64::from(DATA), Some(&end.region))
            }
        };
        let region = region.ok_or("not registered")?;
        io.segments[1] = Sge { address, bytes, key: region.local_key() };
        (io.capsule.address, io.capsule.key) = (address, region.remote_key());
        let capsule = io.capsule.to_bytes();
        bytes_of_mut(&mut end.slots[slot], CAPSULE, CAPSULE_BYTES)?.copy_from_slice(&capsule);
        Ok(())
    }

    /// Posts the next I/O of the slots that are ready, with one doorbell.
    fn post(&mut self) -> Outcome {
        for index in 0..self.ready.len() {
            self.prepare(self.ready[index])?;
        }
        let (base, key) = self.slots;
        let mut batch = self.end.queue.batch();
        for slot in self.ready.drain(..) {
            let Io { segments, capsule, .. } = &self.ios[slot];
            let address = base + slot as u64 * u64::from(SLOT_BYTES) + u64::from(CAPSULE);
            let fast = Operation::WriteWithImmediate { address, key, immediate: capsule.slot };
            let (id, bytes) = (SENT | slot as u64, capsule.to_bytes());
            let (operation, data) = match self.shape.scheme {
                Scheme::WriteInline => (Operation::Send, SendData::Local(segments)),
                Scheme::WriteFast => (fast, SendData::Local(segments)),
                Scheme::WriteTargetDriven | Scheme::ReadOrdinary | Scheme::ReadFast => {
                    (Operation::Send, SendData::Inline(&bytes))
                }
                Scheme::ReadFastBoth => (fast, SendData::Inline(&bytes)),
            };
            batch.add(id, true, operation, data)?;
        }
        Ok(batch.submit()?)
    }
}

/// Ends the target when the host has ended, by an error or not.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Returns I/Os per second.
fn measure(devices: &[Arc<Device>], address: IpAddr, shape: Shape) -> Outcome<f64> {
    let channel = CmChannel::new()?;
    let listener = CmId::new(&channel)?;
    listener.bind(SocketAddr::new(address, 0))?;
    listener.listen(1)?;
    let to = listener.local_address().ok_or("no address")?;
    let is_over = &AtomicBool::new(false);
    thread::scope(|scope| {
        let target = scope.spawn(move || -> Outcome {
            let (channel, _listener) = (channel, listener);
            pin_current_thread(TARGET_CORE)?;
            Target::accept(devices, &channel, shape)?.run(is_over)
        });
        let host = scope.spawn(move || -> Outcome<f64> {
            let _over = Over(is_over);
            let is_alone = !available_cores().contains(&HOST_CORE);
            pin_current_thread(if is_alone { TARGET_CORE } else { HOST_CORE })?;
            let (_channel, host) = Host::connect(devices, to, shape)?;
            host.run()
        });
        let rate = host.join().map_err(|_| "the host has panicked")?;
        target.join().map_err(|_| "the target has panicked")??;
        rate
    })
}

/// All measurements of a round. Those of one shape follow each other.
fn shapes(seconds: f64, is_checked: bool) -> impl Iterator<Item = (String, Shape)> {
    let of = move |depth, bytes, (memory, memory_name): (Memory, &'static str)| {
        SCHEMES.into_iter().map(move |(scheme, name)| {
            let shape = Shape { scheme, memory, bytes, depth, seconds, is_checked };
            (format!("{name} {memory_name} {depth} {bytes}"), shape)
        })
    };
    let sizes = move |depth| SIZES.into_iter().map(move |bytes| (depth, bytes));
    DEPTHS
        .into_iter()
        .flat_map(sizes)
        .flat_map(move |(depth, bytes)| MEMORIES.into_iter().flat_map(move |memory| of(depth, bytes, memory)))
}

/// Prints a line for each measurement: `DIRECTION SCHEME MEMORY DEPTH BYTES IOPS`.
fn run(address: IpAddr, rounds: u32, seconds: f64, is_checked: bool) -> Outcome {
    let devices = Device::all()?;
    for _ in 0..rounds {
        for (name, shape) in shapes(seconds, is_checked) {
            let rate = measure(&devices, address, shape).map_err(|error| format!("{name}: {error}"))?;
            println!("{name} {rate:.1}");
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    const USAGE: &str = "usage: transfer-schemes ADDRESS ROUNDS SECONDS [--check]";
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (plain, is_checked) = match &arguments[..] {
        [plain @ .., last] if last == "--check" => (plain, true),
        plain => (plain, false),
    };
    let parsed = match plain {
        [address, rounds, seconds] => address.parse().ok().zip(rounds.parse().ok()).zip(seconds.parse().ok()),
        _ => None,
    };
    let Some(((address, rounds), seconds)) = parsed else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    match run(address, rounds, seconds, is_checked) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("transfer-schemes: {error}");
            ExitCode::FAILURE
        }
    }
}
