//! [`Place`]: a member's queue pair on the controller, as the manager makes and deletes it.

use std::sync::Arc;

use nvme_spec::sqe::Sqe;

use super::{Controller, Life, Trouble, look_ready, wait};
use crate::dma::DmaMemory;
use crate::function::{Function, Mapping};
use crate::member::{Member, Order, Setup};
use crate::pointers::{Pointers, Window};
use crate::queue::{Layout, QueuePair};

/// A core that has not answered for so long is told of. When it starts, its memory may take seconds.
const ANSWER_MS: u64 = 30_000;

/// What belongs to one member.
pub(super) struct Place {
    pub(super) member: Arc<Member>,
    /// 1 on.
    qid: u16,
    /// Of the function that is open now.
    memory: Option<(Layout, Arc<DmaMemory>)>,
    pool: Option<Box<dyn Mapping>>,
    /// The controller has queues for it.
    has_queues: bool,
}

impl Place {
    /// The core works, or is to stop working, with a queue.
    pub(super) fn is_live(&self) -> bool {
        !matches!(self.member.word().order(), Order::Gone | Order::Wait | Order::Stop)
    }

    /// Its queues' identifier.
    pub(super) fn qid(&self) -> u16 {
        self.qid
    }

    /// It needs queues.
    fn is_new(&self) -> bool {
        !self.has_queues && !self.member.is_closed()
    }

    /// The drive does not see the core's pool any more.
    pub(super) fn unmap(&mut self) {
        self.pool = None;
        drop(self.member.take_mapping());
    }

    /// The function is closed.
    pub(super) fn let_go(&mut self) {
        self.has_queues = false;
        self.member.put_setup(None);
        self.memory = None;
        self.unmap();
    }
}

impl Life {
    /// Members that were opened since, as far as there are identifiers up to `qid_max` for them. One that
    /// waits for a member that goes has to wait. One for which there will be none, as the drive has fewer
    /// than it had, gets one beyond, and with it hears that there is no queue: its requests end.
    fn adopt(&mut self, qid_max: u32) {
        let members: Vec<_> = self.shared.state().members.clone();
        for member in members {
            if self.places.iter().any(|place| Arc::ptr_eq(&place.member, &member)) {
                continue;
            }
            let is_free = |qid: &u16| self.places.iter().all(|place| place.qid != *qid);
            let qid_max = u16::try_from(qid_max).unwrap_or(u16::MAX);
            let staying = self.places.iter().filter(|place| !place.member.is_closed()).count();
            let is_short = staying >= usize::from(qid_max);
            let highest = if is_short { u16::MAX } else { qid_max };
            let Some(qid) = (1..=highest).find(is_free) else { continue };
            self.places.push(Place { member, qid, memory: None, pool: None, has_queues: false });
        }
    }

    /// Members that were opened while the drive is gone: they fail as the others do.
    pub(super) fn refuse_new(&mut self) {
        self.adopt(u32::MAX);
        for place in &self.places {
            if place.member.word().order() != Order::Gone {
                place.member.order(Order::Gone);
            }
        }
        self.drop_closed();
    }

    /// Members whose core is gone, and that have no queues any more.
    pub(super) fn drop_closed(&mut self) {
        self.places.retain(|place| !place.member.is_closed() || place.has_queues);
        let places = &self.places;
        let is_kept = |member: &Arc<Member>| {
            !member.is_closed() || places.iter().any(|place| Arc::ptr_eq(&place.member, member))
        };
        self.shared.state().members.retain(is_kept);
    }

    /// The controller was disabled: it has no queues, and identifiers begin at 1 again.
    pub(super) fn forget_queues(&mut self) {
        self.places.iter_mut().for_each(|place| place.has_queues = false);
        self.drop_closed();
        self.places.iter_mut().zip(1..=u16::MAX).for_each(|(place, qid)| place.qid = qid);
    }

    /// Queues for every member that has none, and no queues for members that are gone.
    pub(super) async fn settle(
        &mut self,
        function: &Arc<dyn Function>,
        controller: &Controller,
    ) -> Result<(), Trouble> {
        // First those that go: a drive may have no queue pair to spare.
        for index in 0..self.places.len() {
            let is_over = |place: &Place| place.has_queues && place.member.is_closed();
            if self.places.get(index).is_some_and(is_over) {
                self.delete(function, controller, index).await?;
            }
        }
        self.drop_closed();
        self.adopt(controller.queue_pairs);
        for index in 0..self.places.len() {
            if self.places.get(index).is_some_and(Place::is_new) {
                self.make(function, controller, index).await?;
            }
        }
        Ok(())
    }

    /// The member's memory and queues; then it works.
    async fn make(
        &mut self,
        function: &Arc<dyn Function>,
        controller: &Controller,
        index: usize,
    ) -> Result<(), Trouble> {
        let Some(place) = self.places.get_mut(index) else { return Ok(()) };
        let member = Arc::clone(&place.member);
        let layout = Layout::new(member.depth, controller.cap.queue_entries_max());
        let memory = match &place.memory {
            Some((was, memory)) if *was == layout => Arc::clone(memory),
            _ => DmaMemory::new(function.as_ref(), layout.bytes())?,
        };
        place.memory = Some((layout, Arc::clone(&memory)));
        let pool = match place.pool.take().or_else(|| member.take_mapping()) {
            Some(pool) => pool,
            None => function.map(&member.pool)?,
        };
        let window = Window::new(&member.pool, pool.iova());
        place.pool = Some(pool);
        let qid = place.qid;
        // A drive that came back may have fewer queues than it had.
        let has_queue = u32::from(qid) <= controller.queue_pairs;
        let Some(rules) = self.shared.rules(member.nsid).filter(|_| has_queue) else {
            if member.word().order() != Order::Gone {
                let (drive, core, nsid) = (&self.shared.address, member.core, member.nsid);
                let queue_pairs = controller.queue_pairs;
                tracing::error!(%drive, core, nsid, queue_pairs, "no namespace or no queue for this core");
                member.order(Order::Gone);
            }
            return Ok(());
        };
        memory.clear();
        let queue = QueuePair::new(qid, layout, memory, controller.bar.clone(), controller.cap.dstrd())
            .with_shadow(controller.shadow.clone());
        let (sq, cq) = (queue.sq_iova(), queue.cq_iova());
        let pointers = Pointers { window, has_sgls: controller.has_sgls() };
        member.put_setup(Some(Setup { queue, pointers, rules }));
        member.order(Order::Rewind);
        self.answered(function, controller, &member).await?;
        // Of the queue before: its identifiers are others' now.
        member.forget_asked();
        let sqe = Sqe::create_io_cq(0, qid, layout.cq_entries - 1, cq.0);
        self.command(function, controller, sqe, "Create I/O Completion Queue").await?;
        let sqe = Sqe::create_io_sq(0, qid, layout.sq_entries - 1, sq.0, qid);
        self.command(function, controller, sqe, "Create I/O Submission Queue").await?;
        if let Some(place) = self.places.get_mut(index) {
            place.has_queues = true;
        }
        member.order(Order::Go);
        Ok(())
    }

    /// The controller has no queues for it any more, nor the memory.
    async fn delete(
        &mut self,
        function: &Arc<dyn Function>,
        controller: &Controller,
        index: usize,
    ) -> Result<(), Trouble> {
        let Some(qid) = self.places.get(index).map(|place| place.qid) else { return Ok(()) };
        let sqe = Sqe::delete_io_sq(0, qid);
        self.command(function, controller, sqe, "Delete I/O Submission Queue").await?;
        let sqe = Sqe::delete_io_cq(0, qid);
        self.command(function, controller, sqe, "Delete I/O Completion Queue").await?;
        if let Some(place) = self.places.get_mut(index) {
            place.let_go();
        }
        Ok(())
    }

    /// The core did what was ordered last. One that hangs is waited for, and said.
    async fn answered(
        &self,
        function: &Arc<dyn Function>,
        controller: &Controller,
        member: &Arc<Member>,
    ) -> Result<(), Trouble> {
        self.is_busy.set(true);
        let mut tell_from = Some(self.now.get().saturating_add(ANSWER_MS));
        wait(|| {
            if member.has_answered() {
                return Some(Ok(()));
            }
            if tell_from.is_some_and(|from| self.now.get() >= from) {
                tell_from = None;
                let (drive, core, order) = (&self.shared.address, member.core, member.word().order());
                tracing::error!(%drive, core, ?order, "core does not answer; the others wait for it");
            }
            look_ready(&controller.bar, function).err().map(Err)
        })
        .await
    }
}
