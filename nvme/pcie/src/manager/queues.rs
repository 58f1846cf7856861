//! [`QueueSlot`]: a core queue's queue pair on the controller, as the manager makes and deletes it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use nvme_spec::sqe::Sqe;

use super::away::STOP_MS;
use super::{Controller, Life, Trouble};
use crate::bar::Bar;
use crate::core_queue::{CoreQueue, QueueCommand, Setup};
use crate::dma::{DmaError, DmaMemory, PAGE_BYTES};
use crate::function::{Function, Mapping};
use crate::pointers::{Pointers, Window};
use crate::queue::{Layout, QueuePair, Shadow};
use crate::shared::TICK_MS;
use crate::shared_queue::{SHARER_QID, Sharer};

/// What belongs to one core_queue.
pub(super) struct QueueSlot {
    pub(super) core_queue: Arc<CoreQueue>,
    /// 1 on.
    qid: u16,
    /// Of the function that is open now.
    memory: Option<(Layout, Arc<DmaMemory>)>,
    pool: Option<Box<dyn Mapping>>,
    /// The controller has queues for it.
    has_queues: bool,
    /// It had queues once: commands may be with it that are to be repeated.
    has_worked: bool,
    /// Its core was given a queue, and has not answered yet.
    asked: Option<Asked>,
    /// The drive has no queue pair for it: it works with another core's.
    pub(super) is_sharer: bool,
    /// Whose it works with.
    host: Option<Arc<CoreQueue>>,
    /// No core can be its host: its requests wait until then.
    hostless_until: Option<u64>,
    doorbells: Option<Shadow>,
    /// Its core did not stop in time. Until it answers it has no queue, and no other core gets its
    /// identifier: it may still write to the doorbells.
    pub(super) is_left: bool,
}

/// When a core was asked for something.
#[derive(Clone, Copy)]
struct Asked {
    at: u64,
    /// From when on it is told of; `None`: it was.
    tell_from: Option<u64>,
}

impl QueueSlot {
    /// The core works, or is to stop working, with a queue.
    pub(super) fn is_live(&self) -> bool {
        !matches!(
            self.core_queue.word().order(),
            QueueCommand::Gone | QueueCommand::Absent | QueueCommand::Wait | QueueCommand::Stop
        )
    }

    /// Its queues' identifier.
    pub(super) fn qid(&self) -> u16 {
        self.qid
    }

    /// The controller has queues for it.
    pub(super) fn has_queues(&self) -> bool {
        self.has_queues
    }

    /// It needs queues.
    fn is_new(&self) -> bool {
        !self.has_queues && !self.is_left && !self.core_queue.is_closed()
    }

    /// Its core was given a queue, and has not answered yet.
    pub(super) fn is_asked(&self) -> bool {
        self.asked.is_some() && !self.core_queue.is_closed()
    }

    /// A sharer whose requests wait for a core that could be its host.
    fn is_hostless(&self) -> bool {
        let is_waiting = matches!(self.core_queue.word().order(), QueueCommand::Wait | QueueCommand::Rewind);
        self.is_sharer && is_waiting && self.is_new() && !self.is_asked()
    }

    /// Its host's core does not work.
    pub(super) fn is_host_hung(&self) -> bool {
        let ticks = u32::try_from(STOP_MS / TICK_MS).unwrap_or(u32::MAX);
        self.host.as_ref().is_some_and(|host| host.is_behind(ticks))
    }

    /// It gets a queue pair of the drive's, or has to be a sharer.
    fn set_qid(&mut self, qid: Option<u16>) {
        if self.is_sharer {
            // A host that hangs may still write to it.
            self.memory = None;
        }
        (self.is_sharer, self.qid) = (qid.is_none(), qid.unwrap_or(SHARER_QID));
        (self.host, self.doorbells) = (None, None);
    }

    /// It may have something to repeat, and has no queue yet.
    fn is_to_repeat(&self) -> bool {
        let is_new = self.is_new() && self.core_queue.word().order() == QueueCommand::Rewind;
        self.has_worked && (is_new || self.is_asked())
    }

    /// A queue pair for it: one that the drive is to be told of, or a sharer's, in fresh memory, since a host
    /// that hangs may still write to that of the one before.
    fn queue(
        &mut self,
        function: &Arc<dyn Function>,
        controller: &Controller,
    ) -> Result<QueuePair, DmaError> {
        let entries_min = if self.is_sharer { 0 } else { controller.quirks.queue_entries_min };
        let layout = Layout::new(self.core_queue.depth, entries_min, controller.cap.queue_entries_max());
        let memory = match &self.memory {
            Some((was, memory)) if *was == layout && !self.is_sharer => Arc::clone(memory),
            _ => DmaMemory::near(self.core_queue.node, function.as_ref(), layout.bytes())?,
        };
        self.memory = Some((layout, Arc::clone(&memory)));
        memory.clear();
        if self.is_sharer {
            let doorbells =
                DmaMemory::near(self.core_queue.node, function.as_ref(), 2 * PAGE_BYTES as usize)?;
            self.doorbells = Some(Shadow { memory: doorbells });
            let queue = QueuePair::new(SHARER_QID, layout, memory, Bar::none(), 0);
            return Ok(queue.with_shadow(self.doorbells.clone()));
        }
        self.doorbells = None;
        let queue = QueuePair::new(self.qid, layout, memory, controller.bar.clone(), controller.cap.dstrd());
        Ok(queue.with_shadow(controller.shadow.clone()))
    }

    /// The core is not waited for any more. Its order stays: [`QueueCommand::Absent`] makes it give its
    /// buffers back, and the drive may still reach them.
    pub(super) fn leave(&mut self) {
        self.is_left = true;
        self.asked = None;
        self.core_queue.put_setup(None);
    }

    /// The same when the drive cannot reach the buffers: what the core had with it fails when it goes on.
    pub(super) fn leave_absent(&mut self) {
        self.leave();
        self.core_queue.order(QueueCommand::Absent);
    }

    /// A core that was left behind has obeyed [`QueueCommand::Stop`] since. It touches its queue no more, and
    /// what it had can be repeated.
    pub(super) fn take_late_stop(&mut self) {
        if self.core_queue.word().order() == QueueCommand::Stop && self.core_queue.has_answered() {
            self.is_left = false;
        }
    }

    /// The drive does not see the core's pool any more, nor what the core alone has left with it.
    pub(super) fn unmap(&mut self) {
        self.pool = None;
        self.core_queue.drop_left();
        drop(self.core_queue.take_mapping());
    }

    /// The function is closed.
    pub(super) fn let_go(&mut self) {
        self.has_queues = false;
        self.asked = None;
        self.is_left = false;
        drop(self.core_queue.take_sharers());
        (self.host, self.hostless_until, self.doorbells) = (None, None, None);
        self.core_queue.put_setup(None);
        self.memory = None;
        self.unmap();
    }
}

impl Life {
    /// Members that were opened since, as far as there are identifiers up to `qid_max` for them. One that
    /// waits for a core queue that goes has to wait. One for which there will be none works with another
    /// core's.
    pub(super) fn adopt(&mut self, qid_max: u32) {
        let core_queues: Vec<_> = self.shared.state().core_queues.clone();
        for core_queue in core_queues {
            if self.queue_slots.iter().any(|queue_slot| Arc::ptr_eq(&queue_slot.core_queue, &core_queue)) {
                continue;
            }
            let of_drive = || self.queue_slots.iter().filter(|queue_slot| !queue_slot.is_sharer);
            let is_free = |qid: &u16| of_drive().all(|queue_slot| queue_slot.qid != *qid);
            let qid_max = u16::try_from(qid_max).unwrap_or(u16::MAX);
            let staying = of_drive().filter(|queue_slot| !queue_slot.core_queue.is_closed()).count();
            let is_short = staying >= usize::from(qid_max);
            let free = if is_short { Some(SHARER_QID) } else { (1..=qid_max).find(is_free) };
            let Some(qid) = free else { continue };
            self.queue_slots.push(QueueSlot {
                core_queue,
                qid,
                memory: None,
                pool: None,
                has_queues: false,
                has_worked: false,
                asked: None,
                is_sharer: is_short,
                host: None,
                hostless_until: None,
                doorbells: None,
                is_left: false,
            });
        }
    }

    /// Members whose core is gone, and that have no queues any more.
    pub(super) fn drop_closed(&mut self) {
        self.queue_slots.retain(|queue_slot| !queue_slot.core_queue.is_closed() || queue_slot.has_queues);
        let queue_slots = &self.queue_slots;
        let is_kept = |core_queue: &Arc<CoreQueue>| {
            !core_queue.is_closed()
                || queue_slots.iter().any(|queue_slot| Arc::ptr_eq(&queue_slot.core_queue, core_queue))
        };
        self.shared.state().core_queues.retain(is_kept);
    }

    /// The controller was disabled: it has no queues, and identifiers begin at 1 again, but for those of
    /// cores that have not stopped. Those that get none of `queue_pairs` are sharers.
    pub(super) fn forget_queues(&mut self, queue_pairs: u32) {
        self.replaying_since = None;
        for queue_slot in &mut self.queue_slots {
            (queue_slot.has_queues, queue_slot.asked, queue_slot.host) = (false, None, None);
            queue_slot.hostless_until = None;
            drop(queue_slot.core_queue.take_sharers());
        }
        self.drop_closed();
        let is_kept = |queue_slot: &&QueueSlot| queue_slot.is_left && !queue_slot.is_sharer;
        let kept: Vec<_> = self.queue_slots.iter().filter(is_kept).map(|queue_slot| queue_slot.qid).collect();
        let mut free = (1..=u16::try_from(queue_pairs).unwrap_or(u16::MAX)).filter(|qid| !kept.contains(qid));
        for queue_slot in self.queue_slots.iter_mut().filter(|queue_slot| !queue_slot.is_left) {
            let qid = free.next();
            queue_slot.set_qid(qid);
        }
    }

    /// Queues for every core queue that has none, and no queues for core queues that are gone.
    pub(super) async fn settle(
        &mut self,
        function: &Arc<dyn Function>,
        controller: &Controller,
    ) -> Result<(), Trouble> {
        // First those that go: a drive may have no queue pair to spare.
        for index in 0..self.queue_slots.len() {
            let is_over = |queue_slot: &QueueSlot| {
                queue_slot.has_queues && !queue_slot.is_sharer && queue_slot.core_queue.is_closed()
            };
            if self.queue_slots.get(index).is_some_and(is_over) {
                self.delete(function, controller, index).await?;
            }
        }
        self.drop_closed();
        self.settle_sharers(controller.queue_pairs);
        // One that was left behind goes on, without what it had.
        for queue_slot in self
            .queue_slots
            .iter_mut()
            .filter(|queue_slot| queue_slot.is_left && queue_slot.core_queue.has_answered())
        {
            queue_slot.is_left = false;
            // A drive that came back may have fewer queues than it had.
            if u32::from(queue_slot.qid) > controller.queue_pairs {
                queue_slot.set_qid(None);
            }
        }
        self.adopt(controller.queue_pairs);
        for index in 0..self.queue_slots.len() {
            if self.queue_slots.get(index).is_some_and(QueueSlot::is_new) {
                self.make(function, controller, index).await?;
            }
        }
        self.release_all()
    }

    /// Sharers that are closed go once nothing of them is with the drive; those whose host has gone get its
    /// queue pair, or another host. What they had with it, which is deleted, they give to the drive again.
    fn settle_sharers(&mut self, queue_pairs: u32) {
        let hosts: Vec<_> =
            self.queue_slots.iter().map(|queue_slot| Arc::clone(&queue_slot.core_queue)).collect();
        let is_there = |host: &Arc<CoreQueue>| hosts.iter().any(|there| Arc::ptr_eq(there, host));
        for queue_slot in
            self.queue_slots.iter_mut().filter(|queue_slot| queue_slot.is_sharer && queue_slot.has_queues)
        {
            if queue_slot.core_queue.is_closed() {
                // A host that has closed may have left commands with the drive until its queue pair is
                // deleted. It closes before it lets go of its sharers, so it is looked at after them.
                let is_free = !queue_slot.core_queue.is_hosted();
                if is_free && !queue_slot.host.as_ref().is_some_and(|host| host.is_closed() && is_there(host))
                {
                    queue_slot.let_go();
                }
            } else if !queue_slot.host.as_ref().is_some_and(is_there) {
                (queue_slot.has_queues, queue_slot.host) = (false, None);
                // The drive goes on: nothing is lost.
                self.shared.may_lose_cache.store(false, Ordering::Relaxed);
            }
        }
        self.drop_closed();
        let is_waiting =
            |queue_slot: &QueueSlot| queue_slot.is_sharer && queue_slot.is_new() && !queue_slot.is_asked();
        while let Some(index) = self.queue_slots.iter().position(is_waiting) {
            let is_free = |qid: &u16| {
                self.queue_slots.iter().all(|queue_slot| queue_slot.is_sharer || queue_slot.qid != *qid)
            };
            let free = (1..=u16::try_from(queue_pairs).unwrap_or(u16::MAX)).find(is_free);
            match (free, self.queue_slots.get_mut(index)) {
                (Some(qid), Some(queue_slot)) => queue_slot.set_qid(Some(qid)),
                _ => return,
            }
        }
    }

    /// A core that has a queue pair of the drive's and can serve another one: the same if there is one, else
    /// one with the fewest sharers.
    fn host_for(&self, core: usize) -> Option<Arc<CoreQueue>> {
        let can_serve = |queue_slot: &&QueueSlot| {
            queue_slot.has_queues
                && !queue_slot.is_sharer
                && !queue_slot.is_left
                && !queue_slot.core_queue.is_closed()
        };
        let sharers_of = |host: &Arc<CoreQueue>| {
            let hosts = self.queue_slots.iter().filter_map(|queue_slot| queue_slot.host.as_ref());
            hosts.filter(|other| Arc::ptr_eq(other, host)).count()
        };
        let hosts = self.queue_slots.iter().filter(can_serve);
        let host = hosts.min_by_key(|queue_slot| {
            (queue_slot.core_queue.core != core, sharers_of(&queue_slot.core_queue))
        })?;
        Some(Arc::clone(&host.core_queue))
    }

    /// Cores that have their queues work with them, once nothing is left to be repeated on any of them: what
    /// was with the drive before a reset is not to be done after what came later.
    fn release_all(&mut self) -> Result<(), Trouble> {
        // First: what a sharer has to repeat keeps all cores waiting.
        self.end_hostless();
        if self.queue_slots.iter().any(QueueSlot::is_to_repeat) {
            return Ok(());
        }
        let is_replaying = self
            .queue_slots
            .iter()
            .any(|queue_slot| queue_slot.has_queues && queue_slot.core_queue.is_replaying());
        for queue_slot in self.queue_slots.iter().filter(|queue_slot| queue_slot.has_queues) {
            match (queue_slot.core_queue.word().order(), is_replaying) {
                (QueueCommand::Rewind, true) => queue_slot.core_queue.order(QueueCommand::Replay),
                (QueueCommand::Rewind | QueueCommand::Replay, false) => {
                    queue_slot.core_queue.order(QueueCommand::Go)
                }
                _ => {}
            }
        }
        if is_replaying {
            self.is_busy.set(true);
            return self.check_replay();
        }
        (self.lost_at, self.replaying_since) = (None, None);
        Ok(())
    }

    /// Sharers wait for a host no longer than for a drive that is away; cores that could be one have as long
    /// to answer as any. Then their requests fail, until there is a host. The drive has nothing of them:
    /// since then the controller was off, or the queue pair of the host that they had was deleted.
    fn end_hostless(&mut self) {
        let now = self.now.get();
        let limit = self.lost_at.unwrap_or(now).saturating_add(self.return_limit_ms());
        let limit = limit.max(now.saturating_add(STOP_MS));
        for index in 0..self.queue_slots.len() {
            // One whose host has come back in this turn gets it in the next.
            let has_host = self.host_for(self.queue_slots[index].core_queue.core).is_some();
            let queue_slot = &mut self.queue_slots[index];
            if !queue_slot.is_hostless() || has_host {
                queue_slot.hostless_until = None;
            } else if now >= *queue_slot.hostless_until.get_or_insert(limit) {
                queue_slot.hostless_until = None;
                queue_slot.core_queue.order(QueueCommand::Absent);
                let (drive, core) = (&self.shared.address, queue_slot.core_queue.core);
                tracing::error!(%drive, core, "no core that has a queue pair answers: requests of this core, \
                    which has none, fail until one does");
            }
        }
    }

    fn return_limit_ms(&self) -> u64 {
        u64::try_from(self.shared.settings.return_timeout.as_millis()).unwrap_or(u64::MAX)
    }

    /// Requests of all cores wait for what is repeated, with the time that the drive was away no longer than
    /// for one that is away, but what is repeated has as long as a core has to stop. A reset ends what the
    /// drive swallowed, and leaves a core behind that hangs.
    fn check_replay(&mut self) -> Result<(), Trouble> {
        let (now, limit) = (self.now.get(), self.shared.settings.return_timeout);
        let since = *self.replaying_since.get_or_insert(now);
        let lost_at = self.lost_at.unwrap_or(since);
        let is_late =
            now.saturating_sub(lost_at) >= self.return_limit_ms() && now.saturating_sub(since) >= STOP_MS;
        if is_late { Err(Trouble::Replay { limit }) } else { Ok(()) }
    }

    /// The core queue's memory and queues; then it works. Until its core has answered there is nothing to do.
    async fn make(
        &mut self,
        function: &Arc<dyn Function>,
        controller: &Controller,
        index: usize,
    ) -> Result<(), Trouble> {
        if !self.has_queue_asked(function, controller, index)? {
            return Ok(());
        }
        let Some(queue_slot) = self.queue_slots.get_mut(index) else { return Ok(()) };
        let Some((layout, memory)) = &queue_slot.memory else { return Ok(()) };
        let (layout, sq, qid) = (*layout, memory.iova(), queue_slot.qid);
        queue_slot.asked = None;
        // Of the queue before: its identifiers are others' now.
        queue_slot.core_queue.forget_asked();
        if let (Some(host), Some(doorbells)) = (&queue_slot.host, &queue_slot.doorbells) {
            host.add_sharer(Sharer::new(&queue_slot.core_queue, memory, doorbells, layout));
            (queue_slot.has_queues, queue_slot.has_worked) = (true, true);
            return Ok(());
        }
        let cq = layout.cq_iova(sq);
        let sqe = Sqe::create_io_cq(0, qid, layout.cq_entries - 1, cq.0);
        self.command(function, controller, sqe, "Create I/O Completion Queue").await?;
        let sqe = Sqe::create_io_sq(0, qid, layout.sq_entries - 1, sq.0, qid);
        self.command(function, controller, sqe, "Create I/O Submission Queue").await?;
        if let Some(queue_slot) = self.queue_slots.get_mut(index) {
            (queue_slot.has_queues, queue_slot.has_worked) = (true, true);
        }
        Ok(())
    }

    /// Give the core its queue, if that was not done. True when it has taken it.
    fn has_queue_asked(
        &mut self,
        function: &Arc<dyn Function>,
        controller: &Controller,
        index: usize,
    ) -> Result<bool, Trouble> {
        let is_asked = self.queue_slots.get(index).is_some_and(QueueSlot::is_asked);
        if !is_asked && !self.give(function, controller, index)? {
            return Ok(false);
        }
        let (now, core_queue) = match self.queue_slots.get(index) {
            Some(queue_slot) => (self.now.get(), Arc::clone(&queue_slot.core_queue)),
            None => return Ok(false),
        };
        if core_queue.has_answered() {
            return Ok(!core_queue.is_closed());
        }
        let Some(mut asked) = self.queue_slots.get(index).and_then(|queue_slot| queue_slot.asked) else {
            return Ok(false);
        };
        self.tell_hung(&core_queue, &mut asked.tell_from);
        let Some(queue_slot) = self.queue_slots.get_mut(index) else { return Ok(false) };
        queue_slot.asked = Some(asked);
        // The others wait for what it has to repeat. The drive has none of it: since then the controller was
        // off, or the host's queue pair was deleted, and the new queue is not made yet.
        if queue_slot.has_worked && now.saturating_sub(asked.at) >= STOP_MS {
            queue_slot.leave_absent();
            self.tell_left(&core_queue);
        }
        Ok(false)
    }

    /// The core queue's memory, and a queue for its core. False where there is none for it now.
    fn give(
        &mut self,
        function: &Arc<dyn Function>,
        controller: &Controller,
        index: usize,
    ) -> Result<bool, Trouble> {
        let asked = Asked { at: self.now.get(), tell_from: self.answer_limit() };
        let Some((core, is_sharer)) =
            self.queue_slots.get(index).map(|it| (it.core_queue.core, it.is_sharer))
        else {
            return Ok(false);
        };
        let host = if is_sharer { self.host_for(core) } else { None };
        if is_sharer && host.is_none() {
            return Ok(false);
        }
        let Some(queue_slot) = self.queue_slots.get_mut(index) else { return Ok(false) };
        let core_queue = Arc::clone(&queue_slot.core_queue);
        let Some(rules) = self.shared.rules(core_queue.nsid) else {
            if core_queue.word().order() != QueueCommand::Gone {
                let (drive, nsid) = (&self.shared.address, core_queue.nsid);
                tracing::error!(%drive, core, nsid, "no such namespace any more");
                core_queue.order(QueueCommand::Gone);
            }
            return Ok(false);
        };
        let pool = match queue_slot.pool.take().or_else(|| core_queue.take_mapping()) {
            Some(pool) => pool,
            None => function.map(&core_queue.pool)?,
        };
        let window = Window::new(&core_queue.pool, pool.iova());
        queue_slot.pool = Some(pool);
        let others = core_queue.fronts.map(function.as_ref())?;
        let queue = queue_slot.queue(function, controller)?;
        if let Some(host) = host {
            let (drive, nsid, host_core) = (&self.shared.address, core_queue.nsid, host.core);
            let queue_pairs = controller.queue_pairs;
            tracing::warn!(%drive, core, nsid, queue_pairs, host_core, "the drive gives too few queue pairs: \
                this core works with another one's");
            queue_slot.host = Some(host);
        }
        let pointers = Pointers { window, others, has_sgls: controller.has_sgls() };
        queue_slot.asked = Some(asked);
        core_queue.put_setup(Some(Setup { queue, pointers, rules }));
        core_queue.order(QueueCommand::Rewind);
        Ok(true)
    }

    /// The controller has no queues for it any more, nor the memory.
    async fn delete(
        &mut self,
        function: &Arc<dyn Function>,
        controller: &Controller,
        index: usize,
    ) -> Result<(), Trouble> {
        let Some(qid) = self.queue_slots.get(index).map(|queue_slot| queue_slot.qid) else { return Ok(()) };
        let sqe = Sqe::delete_io_sq(0, qid);
        self.command(function, controller, sqe, "Delete I/O Submission Queue").await?;
        let sqe = Sqe::delete_io_cq(0, qid);
        self.command(function, controller, sqe, "Delete I/O Completion Queue").await?;
        if let Some(queue_slot) = self.queue_slots.get_mut(index) {
            queue_slot.let_go();
        }
        Ok(())
    }
}
