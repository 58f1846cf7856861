//! The seam of the remote disk, over [`World`](super::far::World).

use std::collections::VecDeque;
use std::sync::Arc;

use nvme_spec::Sqe;
use nvme_spec::io::ReadWriteCdw12;
use nvme_spec::opcode::IoOpcode;
use spindle_nvme_initiator::{Error, Failure, HostData, Loss, OptimisticCounts, Refusal, Refused};
use spindle_nvme_optimistic::client::Outcome;
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Buf, Pool};
use spindle_target_disk::BlockRange;
use spindle_target_remote::{Far, FarCompletion, FarQueue};

use super::cache::{Client, SimAttaching};
use super::far::{Answer, FarShared, Sent, Verb, lock};
use crate::sim::model::{fill, tag_of};

/// What queues are limited by.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Bytes of a block.
    pub block_bytes: u32,
    /// MDTS in blocks.
    pub transfer_blocks: u32,
    /// Pieces of a buffer that a command can name.
    pub pieces_max: usize,
    /// Commands of a queue.
    pub depth: u16,
}

/// An association.
pub struct SimFar {
    /// The far target.
    pub world: FarShared,
    /// From 1.
    pub number: u64,
    /// Of each queue.
    pub limits: Limits,
}

/// A token for the cache of this epoch.
#[derive(Debug)]
pub struct SimGrant(pub u8);

/// A queue that is being connected.
pub struct SimOpening {
    far: Arc<SimFar>,
    core: usize,
    depth: usize,
    /// Connect needs one.
    _buf: Option<Buf>,
    due: Nanos,
    fails: bool,
}

fn lost() -> Error {
    Error::Lost { step: "Connect", loss: Loss::ByPeer }
}

impl Far for SimFar {
    type Opening = SimOpening;
    type Queue = SimQueue;
    type Grant = SimGrant;
    type Attaching = SimAttaching;

    fn depth_max(&self) -> u16 {
        self.limits.depth
    }

    fn begin(self: &Arc<SimFar>, pool: &Pool, qid: u16, depth: u16, now: Nanos) -> Result<SimOpening, Error> {
        let mut world = lock(&self.world);
        if world.rng.permille(10) && !world.is_healed {
            return Err(lost());
        }
        let due = now + world.span(3000, 2_000_000);
        let fails = world.rng.permille(30) && !world.is_healed;
        drop(world);
        let (core, depth) = (usize::from(qid) - 1, usize::from(depth));
        Ok(SimOpening { far: Arc::clone(self), core, depth, _buf: pool.take(1024), due, fails })
    }

    fn step(opening: &mut SimOpening, now: Nanos) -> Result<Option<SimQueue>, Error> {
        if now < opening.due {
            return Ok(None);
        }
        let mut world = lock(&opening.far.world);
        if opening.fails || !world.is_connectable(opening.far.number) {
            return Err(lost());
        }
        let id = world.connect(opening.far.number, opening.core);
        drop(world);
        let slots = (0..opening.depth).map(|_| None).collect();
        let (completed, far) = (VecDeque::new(), Arc::clone(&opening.far));
        Ok(Some(SimQueue { far, id, slots, completed, loss: None, client: None, now: Nanos::ZERO }))
    }

    fn has_optimistic_reads(&self) -> bool {
        lock(&self.world).is_optimistic()
    }

    fn begin_attach(grant: SimGrant, queue: &SimQueue, now: Nanos) -> Result<SimAttaching, Error> {
        Ok(SimAttaching::begin(&queue.far.world, grant.0, now))
    }

    fn step_attach(attaching: &mut SimAttaching, queue: &mut SimQueue, now: Nanos) -> Result<bool, Error> {
        let Some(client) = attaching.step(&queue.far.world, queue.slots.len(), now) else { return Ok(false) };
        let Some(client) = client else { return Err(lost()) };
        queue.end_client();
        queue.client = Some(client);
        lock(&queue.far.world).book.counts.hit("attached");
        Ok(true)
    }
}

/// An outstanding command.
struct Slot {
    buf: Option<Buf>,
    is_read: bool,
    /// Of a write: whose, and which part of it.
    write: Option<(u64, BlockRange)>,
}

/// A queue.
pub struct SimQueue {
    far: Arc<SimFar>,
    id: usize,
    slots: Vec<Option<Slot>>,
    /// With the slot that it leaves.
    completed: VecDeque<FarCompletion>,
    loss: Option<Loss>,
    /// Its optimistic reads, once it was attached.
    client: Option<Client>,
    /// Of the last poll.
    now: Nanos,
}

/// The values of a buffer's blocks.
fn tags(buf: &Buf, block_bytes: usize) -> Vec<u64> {
    let mut bytes = vec![0; buf.len()];
    buf.copy_out(0, &mut bytes);
    let tag = |block| tag_of(block).expect("no block is torn");
    bytes.chunks_exact(block_bytes).map(tag).collect()
}

impl SimQueue {
    /// What the far target is given.
    fn decode(&self, sqe: &Sqe, data: &HostData) -> Sent {
        let block_bytes = self.far.limits.block_bytes as usize;
        let cdw12 = ReadWriteCdw12::from_bits(sqe.cdw12.get());
        let lba = u64::from(sqe.cdw11.get()) << 32 | u64::from(sqe.cdw10.get());
        let range = BlockRange { lba, blocks: u32::from(cdw12.nlb_z()) + 1 };
        let bytes = range.blocks as usize * block_bytes;
        let mut sent =
            Sent { verb: Verb::Look, range, tags: Vec::new(), is_compare: false, is_durable: cdw12.fua() };
        match (IoOpcode(sqe.opcode), data) {
            (IoOpcode::READ, HostData::FromController(buf)) => assert_eq!(buf.len(), bytes, "{sqe:?}"),
            (IoOpcode::WRITE | IoOpcode::COMPARE, HostData::ToController(buf)) => {
                assert_eq!(buf.len(), bytes, "{sqe:?}");
                sent.tags = tags(buf, block_bytes);
                sent.is_compare = IoOpcode(sqe.opcode) == IoOpcode::COMPARE;
                sent.verb = if sent.is_compare { Verb::Look } else { Verb::Write };
            }
            (IoOpcode::WRITE_ZEROES, HostData::None) => {
                (sent.verb, sent.tags) = (Verb::Zeroes, vec![0; range.blocks as usize]);
            }
            (IoOpcode::VERIFY, HostData::None) => {}
            (IoOpcode::FLUSH, HostData::None) => sent.range = BlockRange { lba: 0, blocks: 0 },
            (IoOpcode::DATASET_MANAGEMENT, HostData::ToController(buf)) => {
                let mut bytes = [0; 16];
                buf.copy_out(0, &mut bytes);
                let (blocks, lba) =
                    (u64::from_le_bytes(bytes[..8].try_into().expect("8")) >> 32, &bytes[8..]);
                let lba = u64::from_le_bytes(lba.try_into().expect("8"));
                sent.range = BlockRange { lba, blocks: u32::try_from(blocks).expect("32 bits") };
                (sent.verb, sent.tags) = (Verb::Trim, vec![0; sent.range.blocks as usize]);
            }
            (opcode, data) => panic!("{opcode:?} with {data:?}"),
        }
        sent
    }

    /// Why the queue does not take it.
    fn refusal(&self, data: &HostData) -> Option<Refusal> {
        let limits = self.far.limits;
        let (HostData::ToController(buf) | HostData::FromController(buf)) = data else { return None };
        let allowed = limits.transfer_blocks * limits.block_bytes;
        let pieces = buf.segments().count();
        if buf.len() > allowed as usize {
            Some(Refusal::TooLong { bytes: buf.len(), allowed })
        } else if pieces > limits.pieces_max {
            lock(&self.far.world).book.counts.hit("bounces");
            Some(Refusal::Pieces { pieces, allowed: limits.pieces_max })
        } else {
            None
        }
    }

    fn on_answer(&mut self, answer: Answer) {
        let Answer { slot, result, seen, reference } = answer;
        let Slot { mut buf, is_read, write } = self.slots[slot].take().expect("outstanding");
        if is_read
            && result.is_ok()
            && let Some(buf) = &mut buf
        {
            let bytes = self.far.limits.block_bytes as usize;
            let mut content = vec![0; bytes];
            for (at, tag) in seen.into_iter().enumerate() {
                fill(tag, &mut content);
                buf.copy_in(at * bytes, &content);
            }
        }
        if result.is_ok()
            && let Some(client) = &mut self.client
        {
            client.on_read(slot, reference, buf.as_ref());
        }
        let command = write.map(|(command, _)| command);
        lock(&self.far.world).taken(self.id, command, result.is_ok());
        let result = result.map_err(Failure::Status);
        self.completed.push_back(FarCompletion { index: slot, result, buf, keeps: false });
    }

    /// Takes optimistic reads that have ended; rejected ones become ordinary reads, or are lost.
    fn poll_client(&mut self) -> bool {
        let Some(client) = &mut self.client else { return false };
        let ended = client.poll(self.now);
        let has_come = !ended.is_empty();
        for (slot, outcome) in ended {
            match outcome {
                Outcome::Accepted(buf) => {
                    lock(&self.far.world).book.counts.hit("optimistic reads");
                    self.slots[slot] = None;
                    self.completed.push_back(FarCompletion {
                        index: slot,
                        result: Ok(()),
                        buf: Some(buf),
                        keeps: false,
                    });
                }
                Outcome::Repeat(sqe, buf) => {
                    lock(&self.far.world).book.counts.hit("rejected reads");
                    let data = HostData::FromController(buf);
                    let sent = self.decode(&sqe, &data);
                    if self.loss.is_none() {
                        lock(&self.far.world).send(self.id, slot, sent);
                    }
                    self.slots[slot] = Some(Slot { buf: data.into_buffer(), is_read: true, write: None });
                }
            }
        }
        has_come
    }

    /// Reads that are in flight end.
    fn end_client(&mut self) {
        if let Some(client) = &mut self.client {
            client.end();
            self.poll_client();
        }
    }

    /// Posts an optimistic read, if that is possible.
    fn try_read(&mut self, slot: usize, sqe: Sqe, offset: u64, data: HostData) -> Result<(), HostData> {
        let Some(client) = &mut self.client else { return Err(data) };
        match data {
            HostData::FromController(buf) => {
                let bytes = buf.len();
                let posted = client.try_read(slot, sqe, offset, buf).map_err(HostData::FromController);
                if posted.is_err() {
                    client.note(slot, Some((offset, bytes)));
                }
                posted
            }
            HostData::ToController(buf) => {
                client.note(slot, None);
                client.on_write(offset, buf.len());
                Err(HostData::ToController(buf))
            }
            HostData::None => {
                client.note(slot, None);
                Err(HostData::None)
            }
        }
    }

    fn lose(&mut self, loss: Loss) {
        if self.loss.replace(loss).is_some() {
            return;
        }
        self.end_client();
        let mut world = lock(&self.far.world);
        let lost = self.slots.iter().flatten().filter_map(|slot| slot.write);
        world.leave(self.id, lost);
        let mut outstanding: Vec<_> = (0..self.slots.len()).collect();
        outstanding.retain(|index| self.slots[*index].is_some());
        while !outstanding.is_empty() {
            let at = world.rng.size(0, outstanding.len() - 1);
            let index = outstanding.swap_remove(at);
            let buf = self.slots[index].take().and_then(|slot| slot.buf);
            self.completed.push_back(FarCompletion { index, result: Err(Failure::Lost), buf, keeps: false });
        }
    }
}

impl FarQueue for SimQueue {
    fn transfer_bytes_max(&self) -> u32 {
        self.far.limits.transfer_blocks * self.far.limits.block_bytes
    }

    fn room(&self) -> usize {
        self.slots.iter().filter(|slot| slot.is_none()).count().saturating_sub(self.completed.len())
    }

    fn is_up(&self) -> bool {
        self.loss.is_none()
    }

    fn submit(&mut self, sqe: Sqe, offset: u64, data: HostData) -> Result<usize, Refused> {
        let taken: Vec<usize> = self.completed.iter().map(|completion| completion.index).collect();
        let is_free = |index: &usize| self.slots[*index].is_none() && !taken.contains(index);
        let free = (0..self.slots.len()).find(is_free);
        let why = match free {
            _ if self.loss.is_some() => Some(Refusal::Down),
            None => Some(Refusal::Full),
            Some(_) => self.refusal(&data),
        };
        if let Some(why) = why {
            return Err(Refused { why, buf: data.into_buffer() });
        }
        let slot = free.expect("just seen");
        let data = match self.try_read(slot, sqe, offset, data) {
            Err(data) => data,
            Ok(()) => {
                lock(&self.far.world).check_may_send(self.id);
                self.slots[slot] = Some(Slot { buf: None, is_read: true, write: None });
                return Ok(slot);
            }
        };
        let sent = self.decode(&sqe, &data);
        if sent.verb == Verb::Write && sent.tags.iter().all(|tag| *tag == 0) {
            lock(&self.far.world).book.counts.hit("zeroes as data");
        }
        let is_read = matches!(data, HostData::FromController(_));
        let range = sent.range;
        let command = lock(&self.far.world).submit(self.id, slot, sent);
        let write = command.map(|command| (command, range));
        self.slots[slot] = Some(Slot { buf: data.into_buffer(), is_read, write });
        Ok(slot)
    }

    fn send(&mut self) {}

    fn poll(&mut self, now: Nanos) -> bool {
        self.now = now;
        if self.loss.is_some() {
            return false;
        }
        let answers = lock(&self.far.world).poll(self.id);
        let Some(answers) = answers else {
            self.lose(Loss::ByPeer);
            return true;
        };
        let has_come = !answers.is_empty();
        answers.into_iter().for_each(|answer| self.on_answer(answer));
        self.poll_client() || has_come
    }

    fn next_completion(&mut self) -> Option<FarCompletion> {
        self.completed.pop_front()
    }

    fn loss(&self) -> Option<Loss> {
        self.loss.filter(|_| self.completed.is_empty())
    }

    fn abandon(&mut self) {
        self.lose(Loss::Requested);
    }

    fn has_optimistic_connection(&self) -> bool {
        self.client.as_ref().is_some_and(Client::is_up)
    }

    fn optimistic_counts(&self) -> Option<OptimisticCounts> {
        self.client.as_ref().map(Client::counts)
    }
}

impl Drop for SimQueue {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.lose(Loss::Requested);
        }
    }
}
