//! Connecting over RDMA, step by step, each with its time.
//!
//! ```text
//!   address ─ which device leads there ─> route ─> queue pair, receives posted ─> connect ─> Established
//! ```

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use nvme_spec::rdma::{CmAccept, CmReject, CmRequest};
use nvme_spec::zerocopy::IntoBytes;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use spindle_rdma::host::ENTRY_BYTES;
use spindle_rdma_verbs::{
    Access, CmChannel, CmEvent, CmEventKind, CmId, CompletionChannel, CompletionQueue, ConnectParams, Device,
    QueuePair, QueuePairConfig, VerbsError,
};
use spindle_reactor::clock::{Clock, Nanos};
use spindle_reactor::mem::{Pages, Pool, ZoneSpec};

use super::super::QueueName;
use super::{Memory, RECEIVE, REPLY_BYTES, REPLY_STRIDE, Verbs};
use crate::error::{Error, RdmaRefusal};

/// Bytes that a SEND should carry in itself: a command without a list of descriptors.
const INLINE_BYTES: u32 = 64;
/// Pieces that a SEND gathers: the head, and three of in-capsule data.
const SEND_SGE: u32 = 4;
/// Room in the send queue beyond the commands: for those whose end was not asked for.
const SEND_SPARE: u32 = 16;
/// Reasons of a reject in the connection manager's numbers: nobody listens at the service's number; and the
/// same over iWARP.
const REJECT_NO_SERVICE: i32 = 8;
const REJECT_REFUSED: i32 = -111;

/// An attempt.
struct Attempt {
    channel: CmChannel,
    id: CmId,
    address: SocketAddr,
    timeout: Duration,
}

/// Connect to `address` for a queue.
pub(super) fn connect(
    address: SocketAddr,
    timeout: Duration,
    name: QueueName,
) -> Result<(Arc<Device>, Verbs), Error> {
    let failed = |step| move |source| Error::Rdma { address, step, source };
    let devices = Device::all().map_err(failed("devices"))?;
    if devices.is_empty() {
        return Err(Error::NoRdma);
    }
    let channel = CmChannel::new().map_err(|_| Error::NoRdma)?;
    let id = CmId::new(&channel).map_err(failed("identifier"))?;
    let attempt = Attempt { channel, id, address, timeout };
    attempt.id.resolve_address(None, address, timeout).map_err(failed("address"))?;
    attempt.await_event("RDMA address", CmEventKind::AddressResolved)?;
    attempt.id.resolve_route(timeout).map_err(failed("route"))?;
    attempt.await_event("RDMA route", CmEventKind::RouteResolved)?;
    // A device may be newer than the list.
    let devices = Device::all().map_err(failed("devices"))?;
    let device = Arc::clone(attempt.id.device(&devices).ok_or(Error::NoRdma)?);
    let (queue_pair, queue, completions, memory) = attempt.make_queue_pair(&device, name)?;
    let entries = u32::from(name.depth) + 1;
    let request = CmRequest::new(name.qid, u16::try_from(entries).unwrap_or(u16::MAX), name.cntlid);
    let parameters = ConnectParams {
        private_data: request.as_bytes(),
        // READs of the controller that are served at once; we do none.
        responder_resources: device.limits().responder_resources,
        ..ConnectParams::default()
    };
    attempt.id.connect(&parameters).map_err(failed("connect"))?;
    let step = "RDMA connect";
    let event = attempt.await_event(step, CmEventKind::Established)?;
    let Some(accept) = CmAccept::parse(&event.private_data) else {
        return Err(Error::Answer { step, what: "the target's private data is not NVMe's" });
    };
    if accept.crqsize() < name.depth {
        return Err(Error::Answer { step, what: "the target receives fewer commands than the queue holds" });
    }
    let Attempt { channel, id, .. } = attempt;
    Ok((device, Verbs { queue_pair, queue, completions, memory, id, channel }))
}

impl Attempt {
    fn failed(&self, step: &'static str) -> impl Fn(VerbsError) -> Error + use<> {
        let address = self.address;
        move |source| Error::Rdma { address, step, source }
    }

    /// The next event of the connection, which is to be of this kind.
    fn await_event(&self, step: &'static str, wanted: CmEventKind) -> Result<CmEvent, Error> {
        let deadline = Clock::now() + Nanos::from(self.timeout);
        loop {
            if let Some(event) = self.channel.next_event().map_err(self.failed(step))? {
                if event.id != self.id.token() {
                    continue;
                }
                return if event.kind == wanted { Ok(event) } else { Err(self.refusal(step, &event)) };
            }
            let now = Clock::now();
            if now >= deadline {
                return Err(Error::TimedOut { step, after: self.timeout });
            }
            let left = Timespec::try_from((deadline - now).as_duration()).ok();
            // An error ends the wait early; the next event says what it is.
            let _ = poll(&mut [PollFd::new(&self.channel, PollFlags::IN)], left.as_ref());
        }
    }

    /// What an event says that was not hoped for.
    fn refusal(&self, step: &'static str, event: &CmEvent) -> Error {
        let address = self.address;
        if event.kind == CmEventKind::Rejected {
            // Nobody who listens: the connection manager itself refuses, without NVMe's words.
            let why = match CmReject::parse(&event.private_data) {
                _ if [REJECT_NO_SERVICE, REJECT_REFUSED].contains(&event.status) => RdmaRefusal::Nobody,
                Some(reject) => RdmaRefusal::Status(reject.status()),
                None => RdmaRefusal::Other(event.status),
            };
            return Error::RdmaRefused { address, why };
        }
        // A system's error; where there is none, that nobody answered.
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

    /// Everything that the connection needs, with all receives posted.
    fn make_queue_pair(
        &self,
        device: &Arc<Device>,
        name: QueueName,
    ) -> Result<(QueuePair, CompletionQueue, CompletionChannel, Memory), Error> {
        let limits = device.limits();
        let entries = u32::from(name.depth) + 1;
        if entries > limits.send_wr {
            return Err(Error::Range {
                field: "commands outstanding of a queue (RDMA device)",
                value: name.depth.into(),
                low: 1,
                high: u64::from(limits.send_wr).saturating_sub(1),
            });
        }
        let send_wr = (entries + SEND_SPARE).min(limits.send_wr);
        let completions = CompletionChannel::new(device).map_err(self.failed("completion channel"))?;
        // Each queue of a thread on another vector: their sleepers are woken by different interrupts.
        let vector = u32::from(name.qid) % limits.vectors.max(1);
        let queue = CompletionQueue::new(device, send_wr + entries, vector, Some(&completions))
            .map_err(self.failed("completion queue"))?;
        let config = QueuePairConfig {
            send_cq: &queue,
            recv_cq: &queue,
            srq: None,
            send_wr,
            recv_wr: entries,
            send_sge: SEND_SGE.min(limits.sge),
            recv_sge: 1,
            inline_bytes: INLINE_BYTES,
        };
        let queue_pair = self.id.create_queue_pair(device, &config).map_err(self.failed("queue pair"))?;
        let memory = self.make_memory(device, name.depth, entries)?;
        let mut queue_pair = queue_pair;
        let receives = (0..entries).map(|index| (RECEIVE | u64::from(index), memory.reply_sge(index)));
        queue_pair.post_receives(receives).map_err(|error| self.failed("receives")(error.error))?;
        Ok((queue_pair, queue, completions, memory))
    }

    /// Memory for heads and replies, registered.
    fn make_memory(&self, device: &Arc<Device>, depth: u16, entries: u32) -> Result<Memory, Error> {
        let whole = |bytes: usize| u32::try_from(bytes.next_multiple_of(4096)).unwrap_or(u32::MAX);
        let heads = whole(usize::from(depth) * ENTRY_BYTES);
        let replies = whole(entries as usize * REPLY_STRIDE);
        // Heads are longer than replies, always: zones ascend.
        let heads = if heads == replies { heads + 4096 } else { heads };
        let zones =
            [ZoneSpec { buffer_bytes: replies, count: 1 }, ZoneSpec { buffer_bytes: heads, count: 1 }];
        let pool = Pool::new(&zones, Pages::Base)?;
        let region =
            device.register(pool.area(), Access::LOCAL_WRITE).map_err(self.failed("memory of the queue"))?;
        let step = "memory of the queue";
        let replies = pool.take(replies).ok_or(Error::Busy { step })?;
        let heads = pool.take(heads).ok_or(Error::Busy { step })?;
        Ok(Memory { region, heads, replies })
    }
}

const _: () = assert!(REPLY_BYTES as usize <= REPLY_STRIDE && REPLY_STRIDE <= ENTRY_BYTES);
