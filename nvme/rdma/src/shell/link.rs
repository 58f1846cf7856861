//! One connection's queue pair: posts the work requests and receives of a [`Conn`].

use arrayvec::ArrayVec;
use spindle_nvme_transport::ConnectionId;
use spindle_rdma::{
    Access, CmId, MemoryRegion, Operation, QueuePair, QueuePairConfig, RNR_0_64_MS, SendBatch, SendData, Sge,
    VerbsError,
};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Buf, Pages, Pool, ZoneSpec};
use spindle_reactor::slab::Slot;

use super::completions::Reservation;
use super::device::DeviceCore;
use super::ending::{End, EndState, Ending};
use super::keys::{KeyTable, SharedDevice};
use super::receives::{Queue, Receives};
use super::shared::{Queues, SharedReceives};
use super::{OWN_QUEUE_BIT, RECEIVE_BIT, SIGNALLED_BIT};
use crate::controller::{CHAINS_PER_COMMAND, Capsule, Conn};
use crate::work::{Op, Span, Work};

/// Maximum scatter/gather entries of a work request that the shell posts.
pub(super) const SEGMENTS_MAX: usize = 32;
const CQE_BYTES: usize = 16;
/// Inline bytes of a SEND: one completion queue entry.
const INLINE_BYTES: u32 = 16;

/// Registered memory for the completion queue entries of posted SENDs. Needed if the queue pair supports less
/// than 16 bytes of inline data.
struct Heads {
    memory: Buf,
    region: MemoryRegion,
}

/// A connection's queue pair and its memory. Fields are dropped in the order of their declaration: the queue
/// pair before the memory that it refers to.
pub(super) struct Link {
    pub(super) id: ConnectionId,
    /// Index in `Shell::devices`.
    pub(super) device: usize,
    queue_pair: QueuePair,
    pub(super) cm: CmId,
    pub(super) reservation: Reservation,
    /// Slots of the queue pair's own receive queue; `None` if it uses a shared receive queue.
    own: Option<Receives>,
    heads: Option<Heads>,
    /// Time of the last completion, or of the last check without posted work.
    pub(super) progress: Nanos,
    /// True while the link is in `Shell::active`.
    pub(super) is_active: bool,
    pub(super) end: End,
}

pub(super) struct Parts {
    pub(super) device: usize,
    pub(super) queue_pair: QueuePair,
    pub(super) cm: CmId,
    pub(super) reservation: Reservation,
}

impl Link {
    /// Creates the link. Posts the receives if the queue pair has its own receive queue. `Link::id` is set
    /// after the target has accepted the connection. An error contains the identifier, for the rejection, and
    /// the reason.
    pub(super) fn new(
        parts: Parts,
        device: &SharedDevice,
        entries: u32,
        in_capsule_bytes: u32,
    ) -> Result<Link, (CmId, String)> {
        let Parts { device: index, mut queue_pair, cm, reservation } = parts;
        let own = match reservation.share {
            None => own_receives(&mut queue_pair, device, entries, in_capsule_bytes).map(Some),
            Some(_) => Ok(None),
        };
        let heads = match queue_pair.inline_bytes() as usize >= CQE_BYTES {
            true => Ok(None),
            false => Heads::new(device, CHAINS_PER_COMMAND * entries as usize + 1).map(Some),
        };
        match (own, heads) {
            (Ok(own), Ok(heads)) => Ok(Link {
                id: ConnectionId::from_wire(0),
                device: index,
                queue_pair,
                cm,
                reservation,
                own,
                heads,
                progress: Nanos::ZERO,
                is_active: false,
                end: End::default(),
            }),
            (Err(error), _) | (_, Err(error)) => {
                drop(queue_pair);
                Err((cm, error))
            }
        }
    }

    /// Sets the time that the host waits after an RNR NAK to 0.64 ms.
    pub(super) fn set_min_rnr_timer(&mut self) -> Result<(), VerbsError> {
        self.queue_pair.set_min_rnr_timer(RNR_0_64_MS)
    }

    pub(super) fn number(&self) -> u32 {
        self.queue_pair.number()
    }

    /// Returns the serial in events of the device; a number is used again.
    pub(super) fn serial(&self) -> usize {
        self.queue_pair.serial()
    }

    /// Returns the capsule of a completed receive; `None` if no receive is posted in `slot`.
    #[inline]
    pub(super) fn received(&mut self, device: &mut DeviceCore, slot: u32, bytes: u32) -> Option<Capsule> {
        self.receives(&mut device.receives)?.0.completed(slot, bytes)
    }

    /// Returns the receive slots, and the queue to which they are posted: the queue pair's own or a shared
    /// one. `None`: the shared queue does not exist.
    #[inline]
    fn receives<'a>(
        &'a mut self,
        shared: &'a mut Queues<SharedReceives>,
    ) -> Option<(&'a mut Receives, Queue<'a>)> {
        if let Some(own) = &mut self.own {
            return Some((own, Queue::Own(&mut self.queue_pair)));
        }
        let SharedReceives { queue, receives, .. } = shared.get_mut(self.reservation.share?)?;
        Some((receives, Queue::Shared(queue)))
    }

    /// Posts all receives of the connection's queue that are not posted: those that have completed, of any
    /// connection of the queue, and the buffers that this connection has returned.
    #[inline]
    pub(super) fn post_receives(
        &mut self,
        conn: &mut Conn,
        device: &mut DeviceCore,
    ) -> Result<(), VerbsError> {
        let Some((receives, mut queue)) = self.receives(&mut device.receives) else { return Ok(()) };
        while let Some(buf) = conn.next_buffer() {
            receives.give_back(buf);
        }
        receives.flush(&mut queue)
    }

    /// Posts all work requests of the connection with one doorbell. With
    /// [`Posting::List`](spindle_rdma::Posting::List), each full list costs a doorbell.
    #[inline]
    pub(super) fn post_work(&mut self, conn: &mut Conn, keys: &KeyTable) -> Result<(), String> {
        let Some(first) = conn.next_work() else { return Ok(()) };
        let mut batch = self.queue_pair.batch();
        let mut next = Some(first);
        while let Some(work) = next {
            add(&mut batch, &work, conn, keys, self.heads.as_mut())?;
            next = conn.next_work();
        }
        batch.submit().map_err(|error| error.to_string())
    }

    /// Disconnects and sets the queue pair to the error state: posted work completes as flushed.
    pub(super) fn begin_end(&mut self, ending: Ending) {
        self.end.ending = Some(ending);
        // Errors are ignored: the peer may have disconnected first.
        let _ = self.cm.disconnect();
        let _ = self.queue_pair.set_error();
    }

    /// Returns the inputs of [`Ending::is_over`]. `posted`: work requests of the send queue without a
    /// completion.
    pub(super) fn end_state(&self, device: &DeviceCore, posted: u32) -> EndState {
        EndState {
            posted,
            shared_slots: self.reservation.share.map_or(0, |share| share.slots),
            is_drained: self.end.is_drained,
            is_dead: device.is_lost || device.is_broken(self.reservation),
            is_soft_roce: device.shared.device().is_soft_roce(),
        }
    }
}

/// Creates the queue pair of a connection, which has the identifier `cm`.
pub(super) fn make_queue_pair(
    cm: &CmId,
    device: &DeviceCore,
    reservation: Reservation,
    (entries, send_wr, segments): (u32, u32, u32),
) -> Result<QueuePair, String> {
    let queue = device.completion_queue(reservation).ok_or("no completion queue")?;
    let srq = reservation.share.and_then(|share| device.receives.get(share)).map(|it| &it.queue);
    let config = QueuePairConfig {
        cq: queue,
        domain: None,
        srq,
        send_wr,
        recv_wr: entries,
        send_sge: segments,
        recv_sge: 1,
        inline_bytes: INLINE_BYTES,
        posting: None,
    };
    cm.create_queue_pair(device.shared.device(), &config).map_err(|error| error.to_string())
}

fn own_receives(
    queue_pair: &mut QueuePair,
    device: &SharedDevice,
    entries: u32,
    in_capsule_bytes: u32,
) -> Result<Receives, String> {
    let mut receives = Receives::new(entries, in_capsule_bytes, RECEIVE_BIT | OWN_QUEUE_BIT);
    while receives.slots() < entries {
        let missing = entries - receives.slots();
        receives.grow(missing, device, &mut Queue::Own(queue_pair))?;
    }
    Ok(receives)
}

impl Heads {
    fn new(device: &SharedDevice, count: usize) -> Result<Heads, String> {
        let bytes = u32::try_from((count * CQE_BYTES).next_multiple_of(4096)).unwrap_or(u32::MAX);
        let pool = Pool::new(&[ZoneSpec { buffer_bytes: bytes, count: 1 }], Pages::Base)
            .map_err(|error| error.to_string())?;
        let region = device.device().register_part(pool.area(), 0, bytes as usize, Access::LOCAL_READ);
        let region = region.map_err(|error| error.to_string())?;
        let memory = pool.take(bytes).ok_or_else(|| "no memory for completions".to_owned())?;
        Ok(Heads { memory, region })
    }

    fn put(&mut self, at: usize, head: &[u8]) -> Option<Sge> {
        let at = at * CQE_BYTES;
        let memory = self.memory.as_mut_slice()?.get_mut(at..at + head.len())?;
        memory.copy_from_slice(head);
        let bytes = u32::try_from(memory.len()).ok()?;
        Some(Sge { address: memory.as_ptr() as u64, bytes, key: self.region.local_key() })
    }
}

/// Returns the scatter/gather entries of a span of a chain's buffer; none if the chain has no buffer. Fails
/// if memory is not registered, or there are more than [`SEGMENTS_MAX`] entries.
#[inline]
fn segments(
    conn: &Conn,
    chain: Slot,
    span: Span,
    keys: &KeyTable,
) -> Result<ArrayVec<Sge, SEGMENTS_MAX>, String> {
    let mut found = ArrayVec::new();
    let Some(buf) = conn.buffer(chain) else { return Ok(found) };
    let (mut skip, mut left) = (span.offset as usize, span.bytes as usize);
    for segment in buf.segments() {
        if left == 0 {
            break;
        }
        if skip >= segment.len() {
            skip -= segment.len();
            continue;
        }
        let piece = &segment[skip..segment.len().min(skip + left)];
        let key = keys.key(piece).ok_or("data in memory that is not registered")?;
        let bytes = u32::try_from(piece.len()).unwrap_or(u32::MAX);
        let segment = Sge { address: piece.as_ptr() as u64, bytes, key };
        found.try_push(segment).map_err(|_| "more segments than the device takes")?;
        left -= piece.len();
        skip = 0;
    }
    Ok(found)
}

#[inline]
fn add(
    batch: &mut SendBatch<'_>,
    work: &Work,
    conn: &Conn,
    keys: &KeyTable,
    heads: Option<&mut Heads>,
) -> Result<(), String> {
    let chain = work.chain;
    let id = u64::from(chain.to_wire()) | if work.is_signalled { SIGNALLED_BIT } else { 0 };
    let added = match &work.op {
        Op::Read { local, remote } => {
            let local = segments(conn, chain, *local, keys)?;
            let operation = Operation::Read { address: remote.address, key: remote.key };
            batch.add(id, work.is_signalled, operation, SendData::Local(&local))
        }
        Op::Write { local, remote } => {
            let local = segments(conn, chain, *local, keys)?;
            let operation = Operation::Write { address: remote.address, key: remote.key };
            batch.add(id, work.is_signalled, operation, SendData::Local(&local))
        }
        Op::Send { head, head_bytes, invalidate, .. } => {
            let head = &head[..usize::from(*head_bytes)];
            let operation = invalidate.map_or(Operation::Send, |key| Operation::SendWithInvalidate { key });
            match heads {
                None => batch.add(id, work.is_signalled, operation, SendData::Inline(head)),
                Some(heads) => {
                    let segment = heads.put(chain.index(), head).ok_or("no memory for a completion")?;
                    batch.add(id, work.is_signalled, operation, SendData::Local(&[segment]))
                }
            }
        }
    };
    added.map_err(|error| error.to_string())
}
