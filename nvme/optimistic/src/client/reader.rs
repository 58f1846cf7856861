//! [`RdmaReader`]: reads frames and seals over a queue pair of the target's optimistic service.

use std::rc::Rc;
use std::sync::Arc;

use arrayvec::ArrayVec;
use nvme_spec::optimistic::OptimisticAccept;
use spindle_nvme_rdma::host::Keys;
use spindle_nvme_rdma::registration::{Registrations, domain_of};
use spindle_rdma::{
    CmChannel, CmId, CompletionQueue, ConnectError, Device, MemoryRegion, Operation, QueuePair,
    QueuePairConfig, SendData, Sge, VerbsError,
};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Buf, Pages, Pool, ZoneSpec};
use spindle_reactor::net::Errno;

use super::opening::{Error, OptimisticGrant, STEP};
use super::{PAGE_BYTES, PageReader, READ_PAGES_MAX};

const SEAL_BYTES: u32 = 8;
/// Distance of the seals of two slots in memory: whole cache lines, so that the device writes to no line that
/// the core reads.
const SEAL_STRIDE: usize = READ_PAGES_MAX * SEAL_BYTES as usize;
/// Returns the bytes of the seals of reads in slots below `slots`: whole pages.
pub(super) fn seal_bytes(slots: usize) -> usize {
    (slots * SEAL_STRIDE).next_multiple_of(4096)
}
/// Returns the work requests of the send queue for `slots` reads: two for each of them, and all that a read
/// may need for each of the first 32. A read takes two for each run of adjacent frames.
fn work_requests(slots: usize) -> usize {
    2 * slots + 2 * (READ_PAGES_MAX - 1) * slots.min(32)
}

/// Period of polling the connection manager; each poll is a system call.
const CM_POLL_PERIOD: Nanos = Nanos::from_ms(1);

/// Verbs objects, in drop order: the queue pair uses the objects after it.
struct Verbs {
    queue_pair: QueuePair,
    queue: CompletionQueue,
    region: MemoryRegion,
    /// Seals that were read, by slot.
    seals: Buf,
    /// `None` before the connection is established.
    connection: Option<(CmId, CmChannel)>,
}

struct InFlight {
    buf: Buf,
    keys: Keys,
    frames: ArrayVec<u32, READ_PAGES_MAX>,
}

/// Splits frames into runs of adjacent ones.
fn runs(frames: &[u32]) -> impl Iterator<Item = &[u32]> {
    frames.chunk_by(|one, next| one.checked_add(1) == Some(*next))
}

/// A connection to the optimistic service.
pub struct RdmaReader {
    /// `None` after the end: the device accesses no buffer.
    verbs: Option<Verbs>,
    accept: OptimisticAccept,
    registrations: Rc<Registrations>,
    /// By slot.
    reads: Box<[Option<InFlight>]>,
    in_flight: usize,
    /// Work requests that the send queue has free for further reads.
    free: usize,
    /// Slots of reads that are not posted yet.
    queued: Vec<usize>,
    /// Time of the last completion, or of the first poll with reads in flight; zero until that.
    active: Nanos,
    silence_max: Nanos,
    next_cm_poll: Nanos,
}

impl RdmaReader {
    /// Creates the queue pair of `id`, in the domain of the target, and registers the memory of the seals.
    /// Slots of commands are below `slots`.
    pub(super) fn new(
        id: &CmId,
        device: &Arc<Device>,
        grant: &OptimisticGrant,
        slots: usize,
    ) -> Result<RdmaReader, Error> {
        let failed = ConnectError::failed(grant.address, STEP);
        let limits = device.limits();
        let wanted = u32::try_from(slots).unwrap_or(u32::MAX);
        // Two READs for each command.
        let allowed = limits.send_wr / 2;
        if !(1..=allowed).contains(&wanted) {
            return Err(Error::Depth { wanted, allowed });
        }
        let send_wr = u32::try_from(work_requests(slots)).unwrap_or(u32::MAX).min(limits.send_wr);
        // After a failure each work request has a completion.
        let queue = CompletionQueue::new(device, send_wr, 0, None).map_err(&failed)?;
        let domain = domain_of(device, grant.far).map_err(&failed)?;
        let config = QueuePairConfig {
            cq: &queue,
            domain: Some(&domain),
            srq: None,
            send_wr,
            recv_wr: 1,
            send_sge: 1,
            recv_sge: 1,
            inline_bytes: 0,
            posting: None,
        };
        let queue_pair = id.create_queue_pair(device, &config).map_err(&failed)?;
        let bytes = u32::try_from(seal_bytes(slots)).unwrap_or(u32::MAX);
        let pool = Pool::new(&[ZoneSpec { buffer_bytes: bytes, count: 1 }], Pages::Base)?;
        let region = domain.register(pool.area(), limits.read_access()).map_err(&failed)?;
        // Not `None`: the pool has a buffer of that size.
        let seals = pool.take(bytes).ok_or_else(|| failed(NO_MEMORY))?;
        Ok(RdmaReader {
            verbs: Some(Verbs { queue_pair, queue, region, seals, connection: None }),
            accept: OptimisticAccept::default(),
            registrations: Registrations::of(&domain, grant.registration),
            reads: (0..slots).map(|_| None).collect(),
            in_flight: 0,
            free: send_wr as usize,
            queued: Vec::with_capacity(slots),
            active: Nanos::ZERO,
            silence_max: grant.silence_max,
            next_cm_poll: Nanos::ZERO,
        })
    }

    pub(super) fn on_established(&mut self, id: CmId, channel: CmChannel, accept: OptimisticAccept) {
        self.accept = accept;
        if let Some(verbs) = &mut self.verbs {
            verbs.connection = Some((id, channel));
        }
    }

    /// Posts the READs of each queued read, data and seals of each run of frames, all with one doorbell. Only
    /// the last is signalled: READs complete in order.
    fn post_queued(&mut self) -> Result<(), VerbsError> {
        let RdmaReader { verbs: Some(verbs), accept, queued, reads, .. } = self else { return Err(ENDED) };
        let seals = verbs.seals.as_slice().map_or(0, |seals| seals.as_ptr() as u64);
        let seal_key = verbs.region.local_key();
        let read = |address, key: u32| Operation::Read { address, key };
        let mut batch = verbs.queue_pair.batch();
        for slot in queued.drain(..) {
            let Some(InFlight { keys, frames, .. }) = &reads[slot] else { continue };
            // `post` refuses a buffer of several pieces.
            let [piece] = keys.pieces() else { continue };
            let (mut data_to, mut seal_to) = (piece.address, seals + (slot * SEAL_STRIDE) as u64);
            let mut left = frames.len();
            for run in runs(frames) {
                let count = u32::try_from(run.len()).unwrap_or(0);
                left -= run.len();
                let (data_bytes, seal_bytes) = (count << accept.page_shift, count * SEAL_BYTES);
                let data = Sge { address: data_to, bytes: data_bytes, key: piece.local_key };
                let seal = Sge { address: seal_to, bytes: seal_bytes, key: seal_key };
                let frame = u64::from(run[0]);
                let frame_at = accept.frames_base.get().wrapping_add(frame << accept.page_shift);
                let seal_at = accept.seals_base.get().wrapping_add(frame * u64::from(SEAL_BYTES));
                let (id, is_last) = (slot as u64, left == 0);
                batch.add(id, false, read(frame_at, accept.frames_key.get()), SendData::Local(&[data]))?;
                batch.add(id, is_last, read(seal_at, accept.seals_key.get()), SendData::Local(&[seal]))?;
                data_to += u64::from(data_bytes);
                seal_to += u64::from(seal_bytes);
            }
        }
        batch.submit()
    }

    /// Detects the end of the connection.
    #[cold]
    fn poll_cm(&mut self) {
        let Some(Verbs { connection: Some((_, channel)), .. }) = &self.verbs else { return };
        if !matches!(channel.next_event(), Ok(None)) {
            self.end();
        }
    }
}

const NO_MEMORY: VerbsError = VerbsError { verb: "ibv_reg_mr", errno: Errno::NOMEM.raw_os_error() };
const ENDED: VerbsError = VerbsError { verb: "ibv_post_send", errno: Errno::NOTCONN.raw_os_error() };

impl PageReader for RdmaReader {
    #[inline]
    fn post(&mut self, slot: usize, frames: &[u32], buf: Buf) -> Result<(), Buf> {
        let is_ours = frames.iter().all(|frame| *frame < self.accept.frames.get()) && slot < self.reads.len();
        let work_requests = 2 * runs(frames).count();
        let is_one_piece = buf.as_slice().is_some_and(|data| data.len() == frames.len() * PAGE_BYTES);
        let has_room = work_requests <= self.free && self.verbs.is_some();
        let (true, true, Ok(frames)) =
            (is_ours && has_room, is_one_piece && buf.is_writable(), frames.try_into())
        else {
            return Err(buf);
        };
        let Ok(keys) = self.registrations.acquire(&buf) else { return Err(buf) };
        if keys.pieces().len() != 1 {
            self.registrations.release(&keys);
            return Err(buf);
        }
        if self.in_flight == 0 {
            self.active = Nanos::ZERO;
        }
        self.reads[slot] = Some(InFlight { buf, keys, frames });
        self.queued.push(slot);
        self.free -= work_requests;
        self.in_flight += 1;
        Ok(())
    }

    #[inline]
    fn send(&mut self) {
        // Some READs may have been posted: their buffers are free once the queue pair is destroyed.
        if !self.queued.is_empty() && self.post_queued().is_err() {
            self.end();
        }
    }

    #[inline]
    fn poll(&mut self, now: Nanos, mut each: impl FnMut(usize, Option<&[u64]>, Buf)) -> bool {
        self.send();
        if self.in_flight == 0 || self.active == Nanos::ZERO {
            self.active = now;
        }
        self.registrations.tidy();
        if now >= self.next_cm_poll {
            self.next_cm_poll = now + CM_POLL_PERIOD;
            self.poll_cm();
        }
        let before = self.in_flight;
        let RdmaReader { verbs, registrations, reads, in_flight, free, .. } = self;
        let mut is_broken = false;
        if let Some(Verbs { queue, seals, .. }) = verbs
            && *in_flight > 0
        {
            queue.poll(|completion| {
                if !completion.is_ok {
                    is_broken = true;
                    return;
                }
                let slot = usize::try_from(completion.id).unwrap_or(usize::MAX);
                let Some(read) = reads.get_mut(slot).and_then(Option::take) else { return };
                *in_flight -= 1;
                *free += 2 * runs(&read.frames).count();
                registrations.release(&read.keys);
                let mut found = [0; READ_PAGES_MAX];
                for (at, found) in found.iter_mut().enumerate().take(read.frames.len()) {
                    let mut seal = [0; SEAL_BYTES as usize];
                    seals.copy_out(slot * SEAL_STRIDE + at * seal.len(), &mut seal);
                    *found = u64::from_le_bytes(seal);
                }
                each(slot, Some(&found[..read.frames.len()]), read.buf);
            });
            is_broken |= queue.is_broken();
        }
        if self.in_flight < before {
            self.active = now;
        }
        if is_broken || self.in_flight > 0 && now >= self.active + self.silence_max {
            self.end();
        }
        if self.verbs.is_none() && self.in_flight > 0 {
            self.in_flight = 0;
            for (slot, read) in self.reads.iter_mut().enumerate() {
                if let Some(read) = read.take() {
                    self.registrations.release(&read.keys);
                    each(slot, None, read.buf);
                }
            }
        }
        self.in_flight < before
    }

    #[cold]
    fn end(&mut self) {
        self.queued.clear();
        let verbs = self.verbs.take();
        if let Some(Verbs { connection: Some((id, _)), .. }) = &verbs {
            // Fails if the target has disconnected already.
            let _ = id.disconnect();
        }
    }

    #[inline]
    fn is_connected(&self) -> bool {
        self.verbs.is_some()
    }

    fn epoch(&self) -> u8 {
        self.accept.epoch
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }
}

impl Drop for RdmaReader {
    fn drop(&mut self) {
        self.end();
        self.reads
            .iter_mut()
            .filter_map(Option::take)
            .for_each(|read| self.registrations.release(&read.keys));
    }
}
