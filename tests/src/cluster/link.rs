//! The seam of the remote disk, over [`Wire`](super::wire::Wire).

use std::collections::VecDeque;
use std::sync::Arc;

use nvme_spec::Sqe;
use nvme_spec::cluster::READ_AND_REGISTER;
use nvme_spec::io::ReadWriteCdw12;
use nvme_spec::opcode::IoOpcode;
use nvme_spec::status::Status;
use spindle_nvme_initiator::{Error, Failure, HostData, Loss, OptimisticCounts, Refusal, Refused};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Buf, Pool};
use spindle_target_disk::{BlockRange, Op};
use spindle_target_remote::{Far, FarCompletion, FarQueue};

use super::disk::BLOCK;
use super::wire::{Answer, Sent, Shared, lock};
use crate::sim::model::{fill, tag_of};

/// An association of an agent.
pub(super) struct SimLink {
    pub(super) wire: Shared,
    /// Its number on the wire.
    pub(super) link: usize,
    /// Most blocks of a command.
    pub(super) transfer_blocks: u32,
}

pub(super) struct SimQueue {
    far: Arc<SimLink>,
    queue: usize,
    /// Outstanding commands: `None` is free.
    slots: Vec<Option<Option<Buf>>>,
    completed: VecDeque<FarCompletion>,
    loss: Option<Loss>,
}

impl Far for SimLink {
    type Opening = Arc<SimLink>;
    type Queue = SimQueue;
    type Grant = ();
    type Attaching = ();

    fn depth_max(&self) -> u16 {
        16
    }

    fn begin(self: &Arc<SimLink>, _: &Pool, _: u16, _: u16, _: Nanos) -> Result<Arc<SimLink>, Error> {
        Ok(Arc::clone(self))
    }

    fn step(opening: &mut Arc<SimLink>, _now: Nanos) -> Result<Option<SimQueue>, Error> {
        let queue = lock(&opening.wire).connect_queue(opening.link);
        let queue = queue.ok_or(Error::Lost { step: "Connect", loss: Loss::ByPeer })?;
        let slots = (0..16).map(|_| None).collect();
        let far = Arc::clone(opening);
        Ok(Some(SimQueue { far, queue, slots, completed: VecDeque::new(), loss: None }))
    }

    fn has_optimistic_reads(&self) -> bool {
        false
    }

    fn begin_attach((): (), _: &SimQueue, _: Nanos) -> Result<(), Error> {
        unreachable!("no optimistic reads")
    }

    fn step_attach((): &mut (), _: &mut SimQueue, _: Nanos) -> Result<bool, Error> {
        unreachable!("no optimistic reads")
    }
}

fn decode(sqe: &Sqe, data: &HostData) -> Sent {
    let cdw12 = ReadWriteCdw12::from_bits(sqe.cdw12.get());
    let lba = u64::from(sqe.cdw11.get()) << 32 | u64::from(sqe.cdw10.get());
    let range = BlockRange { lba, blocks: u32::from(cdw12.nlb_z()) + 1 };
    let sent = |op| Sent { op, range, registers: false, tags: Vec::new() };
    match (IoOpcode(sqe.opcode), data) {
        (IoOpcode::READ, _) => sent(Op::Read),
        (READ_AND_REGISTER, _) => Sent { registers: true, ..sent(Op::Read) },
        (IoOpcode::WRITE, HostData::ToController(buf)) => {
            let mut bytes = vec![0; buf.len()];
            buf.copy_out(0, &mut bytes);
            let tags = bytes.chunks_exact(BLOCK).map(|block| tag_of(block).expect("a block of one write"));
            Sent { tags: tags.collect(), ..sent(Op::Write { fua: false }) }
        }
        (IoOpcode::WRITE_ZEROES, _) => sent(Op::WriteZeroes { deallocate: false, fua: false }),
        (opcode, data) => panic!("{opcode:?} with {data:?}"),
    }
}

impl SimQueue {
    fn on_answer(&mut self, Answer { slot, is_ok, tags, keeps }: Answer) {
        let Some(mut buf) = self.slots[slot].take() else { panic!("an answer to no command") };
        if let Some(buf) = buf.as_mut().filter(|_| !tags.is_empty()) {
            let mut block = vec![0; BLOCK];
            for (at, tag) in tags.into_iter().enumerate() {
                fill(tag, &mut block);
                buf.copy_in(at * BLOCK, &block);
            }
        }
        let result = if is_ok { Ok(()) } else { Err(Failure::Status(Status::INTERNAL_ERROR)) };
        self.completed.push_back(FarCompletion { index: slot, result, buf, keeps });
    }

    fn lose(&mut self, loss: Loss) {
        if self.loss.replace(loss).is_some() {
            return;
        }
        lock(&self.far.wire).cut(self.far.link);
        for (index, slot) in self.slots.iter_mut().enumerate() {
            if let Some(buf) = slot.take() {
                let result = Err(Failure::Lost);
                self.completed.push_back(FarCompletion { index, result, buf, keeps: false });
            }
        }
    }
}

impl FarQueue for SimQueue {
    fn transfer_bytes_max(&self) -> u32 {
        self.far.transfer_blocks * u32::try_from(BLOCK).expect("small")
    }

    fn room(&self) -> usize {
        self.slots.iter().filter(|slot| slot.is_none()).count().saturating_sub(self.completed.len())
    }

    fn is_up(&self) -> bool {
        self.loss.is_none()
    }

    fn submit(&mut self, sqe: Sqe, _offset: u64, data: HostData) -> Result<usize, Refused> {
        let is_free = |index: &usize| {
            self.slots[*index].is_none() && self.completed.iter().all(|completion| completion.index != *index)
        };
        let free = (0..self.slots.len()).find(is_free);
        let (Some(slot), None) = (free, self.loss) else {
            let why = if self.loss.is_some() { Refusal::Down } else { Refusal::Full };
            return Err(Refused { why, buf: data.into_buffer() });
        };
        let sent = decode(&sqe, &data);
        self.slots[slot] = Some(data.into_buffer());
        lock(&self.far.wire).command(self.queue, slot, sent);
        Ok(slot)
    }

    fn send(&mut self) {}

    fn poll(&mut self, _now: Nanos) -> bool {
        if self.loss.is_some() {
            return false;
        }
        let answers = lock(&self.far.wire).answers(self.queue);
        let Some(answers) = answers else {
            self.lose(Loss::ByPeer);
            return true;
        };
        let has_come = !answers.is_empty();
        answers.into_iter().for_each(|answer| self.on_answer(answer));
        has_come
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
        false
    }

    fn optimistic_counts(&self) -> Option<OptimisticCounts> {
        None
    }
}
