//! [`QueueSlot`]: the manager's state of a core queue. The manager assigns queue pairs to cores, creates and
//! deletes them at the controller, and assigns cores without a queue pair to host cores.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use nvme_spec::sqe::Sqe;

use super::away::STOP_MS;
use super::{Controller, ManagerError, ManagerTask};
use crate::bar::Bar;
use crate::core_queue::{CoreQueue, QueueCommand, Setup};
use crate::dma::{DmaError, DmaMemory, PAGE_BYTES};
use crate::function::{Function, Mapping};
use crate::pointers::{Pointers, Window};
use crate::queue::{Layout, QueuePair, Shadow};
use crate::shared::TICK_MS;
use crate::shared_queue::{SHARER_QID, Sharer};

pub(super) struct QueueSlot {
    pub(super) core_queue: Arc<CoreQueue>,
    /// Queue identifier, from 1; [`SHARER_QID`] for a sharer.
    qid: u16,
    /// Memory of the queue pair, mapped for the function that is open.
    memory: Option<(Layout, Arc<DmaMemory>)>,
    pool: Option<Box<dyn Mapping>>,
    /// The controller has the queue pair or, for a sharer, a host serves it.
    has_queues: bool,
    /// The slot had queues before, so its core may have commands to repeat.
    has_worked: bool,
    /// `Some` until the core answers the `Rewind` that offers its queue.
    offer: Option<Offer>,
    /// The drive has no queue pair for this core, so a host core submits its commands.
    pub(super) is_sharer: bool,
    host: Option<Arc<CoreQueue>>,
    /// Manager time in milliseconds at which the requests of a sharer fail. `None` if the sharer has, or
    /// could have, a host.
    hostless_until: Option<u64>,
    doorbells: Option<Shadow>,
    /// The core did not answer in time and may still write to the doorbells. Until the core answers, it
    /// receives no queue, and its queue identifier is not reused.
    pub(super) is_left_behind: bool,
}

/// A queue offered to a core, until the core answers. Times are manager times in milliseconds.
#[derive(Clone, Copy)]
struct Offer {
    at: u64,
    /// Time from which a missing answer is logged; `None` after it was logged.
    log_from: Option<u64>,
}

impl QueueSlot {
    /// Returns true if the core may access its queue and must be stopped.
    pub(super) fn is_live(&self) -> bool {
        !matches!(
            self.core_queue.word().queue_command(),
            QueueCommand::Gone | QueueCommand::Absent | QueueCommand::Wait | QueueCommand::Stop
        )
    }

    pub(super) fn qid(&self) -> u16 {
        self.qid
    }

    pub(super) fn has_queues(&self) -> bool {
        self.has_queues
    }

    fn is_new(&self) -> bool {
        !self.has_queues && !self.is_left_behind && !self.core_queue.is_closed()
    }

    pub(super) fn is_offered(&self) -> bool {
        self.offer.is_some() && !self.core_queue.is_closed()
    }

    /// Returns true for a sharer that waits for a host.
    fn is_hostless(&self) -> bool {
        let is_waiting =
            matches!(self.core_queue.word().queue_command(), QueueCommand::Wait | QueueCommand::Rewind);
        self.is_sharer && is_waiting && self.is_new() && !self.is_offered()
    }

    /// Returns true for a sharer whose host has not answered for `STOP_MS`.
    pub(super) fn is_host_hung(&self) -> bool {
        let ticks = u32::try_from(STOP_MS / TICK_MS).unwrap_or(u32::MAX);
        self.host.as_ref().is_some_and(|host| host.is_unresponsive(ticks))
    }

    /// Assigns a queue identifier of the drive. `None` makes the core a sharer.
    fn set_qid(&mut self, qid: Option<u16>) {
        if self.is_sharer {
            // Not reused: a host that hangs may still write to this memory.
            self.memory = None;
        }
        (self.is_sharer, self.qid) = (qid.is_none(), qid.unwrap_or(SHARER_QID));
        (self.host, self.doorbells) = (None, None);
    }

    /// Returns true if the core may have commands to repeat and has no queues at the drive yet.
    fn is_to_repeat(&self) -> bool {
        let is_new = self.is_new() && self.core_queue.word().queue_command() == QueueCommand::Rewind;
        self.has_worked && (is_new || self.is_offered())
    }

    /// Creates the queue pair, in the previous memory if the layout is the same. A sharer always receives new
    /// memory, because a host that hangs may still write to the old memory.
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

    /// Stops waiting for the core and withdraws an offered queue. The queue command stays, because
    /// [`QueueCommand::Absent`] would release buffers that the drive may still access.
    pub(super) fn leave_behind(&mut self) {
        self.is_left_behind = true;
        self.offer = None;
        self.core_queue.put_setup(None);
    }

    /// As [`QueueSlot::leave_behind`], and fails the core's commands once the core continues. Called only
    /// while the drive has none of these commands.
    pub(super) fn leave_behind_absent(&mut self) {
        self.leave_behind();
        self.core_queue.set_queue_command(QueueCommand::Absent);
    }

    /// Clears `is_left_behind` if the core has applied [`QueueCommand::Stop`] late. The core then no longer
    /// accesses its queue, so its commands can be repeated.
    pub(super) fn take_late_stop(&mut self) {
        if self.core_queue.word().queue_command() == QueueCommand::Stop && self.core_queue.has_answered() {
            self.is_left_behind = false;
        }
    }

    /// Drops the mapping of the core's pool and the cache memory kept for a dropped core. Called once the
    /// drive has none of the core's commands, or to end the drive's access to memory.
    pub(super) fn unmap(&mut self) {
        self.pool = None;
        self.core_queue.drop_orphaned_memory();
        drop(self.core_queue.take_mapping());
    }

    /// Drops everything that belongs to the function or the deleted queue pair.
    pub(super) fn release(&mut self) {
        self.has_queues = false;
        self.offer = None;
        self.is_left_behind = false;
        drop(self.core_queue.take_sharers());
        (self.host, self.hostless_until, self.doorbells) = (None, None, None);
        self.core_queue.put_setup(None);
        self.memory = None;
        self.unmap();
    }
}

impl ManagerTask {
    /// Adds a slot for each new core queue, with a free queue identifier up to `qid_max`. If open core queues
    /// use all identifiers, the new core queue becomes a sharer. If closed core queues still use some, the
    /// new core queue is added by a later call.
    pub(super) fn add_slots(&mut self, qid_max: u32) {
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
                offer: None,
                is_sharer: is_short,
                host: None,
                hostless_until: None,
                doorbells: None,
                is_left_behind: false,
            });
        }
    }

    /// Removes core queues that are closed and have no queues.
    pub(super) fn drop_closed(&mut self) {
        self.queue_slots.retain(|queue_slot| !queue_slot.core_queue.is_closed() || queue_slot.has_queues);
        let queue_slots = &self.queue_slots;
        let is_kept = |core_queue: &Arc<CoreQueue>| {
            !core_queue.is_closed()
                || queue_slots.iter().any(|queue_slot| Arc::ptr_eq(&queue_slot.core_queue, core_queue))
        };
        self.shared.state().core_queues.retain(is_kept);
    }

    /// Records that no core has queues after a reset. Assigns queue identifiers from 1 again, except those of
    /// cores that were left behind. Cores without an identifier become sharers.
    pub(super) fn reset_queues(&mut self, queue_pairs: u32) {
        self.replaying_since = None;
        for queue_slot in &mut self.queue_slots {
            (queue_slot.has_queues, queue_slot.offer, queue_slot.host) = (false, None, None);
            queue_slot.hostless_until = None;
            drop(queue_slot.core_queue.take_sharers());
        }
        self.drop_closed();
        let is_kept = |queue_slot: &&QueueSlot| queue_slot.is_left_behind && !queue_slot.is_sharer;
        let kept: Vec<_> = self.queue_slots.iter().filter(is_kept).map(|queue_slot| queue_slot.qid).collect();
        let mut free = (1..=u16::try_from(queue_pairs).unwrap_or(u16::MAX)).filter(|qid| !kept.contains(qid));
        for queue_slot in self.queue_slots.iter_mut().filter(|queue_slot| !queue_slot.is_left_behind) {
            let qid = free.next();
            queue_slot.set_qid(qid);
        }
    }

    /// Deletes the queue pairs of closed core queues, reassigns sharers, creates missing queue pairs, and
    /// then sends `Replay` or `Go`.
    pub(super) async fn update_queues(
        &mut self,
        function: &Arc<dyn Function>,
        controller: &Controller,
    ) -> Result<(), ManagerError> {
        // Deletes first: the drive may have no other free queue pair.
        for index in 0..self.queue_slots.len() {
            let may_close = |queue_slot: &QueueSlot| {
                queue_slot.has_queues && !queue_slot.is_sharer && queue_slot.core_queue.is_closed()
            };
            if self.queue_slots.get(index).is_some_and(may_close) {
                self.delete_queues(function, controller, index).await?;
            }
        }
        self.drop_closed();
        self.update_sharers(controller.queue_pairs);
        // A core that was left behind and has answered receives a queue again.
        for queue_slot in self
            .queue_slots
            .iter_mut()
            .filter(|queue_slot| queue_slot.is_left_behind && queue_slot.core_queue.has_answered())
        {
            queue_slot.is_left_behind = false;
            // The drive may have fewer queue pairs than before.
            if u32::from(queue_slot.qid) > controller.queue_pairs {
                queue_slot.set_qid(None);
            }
        }
        self.add_slots(controller.queue_pairs);
        for index in 0..self.queue_slots.len() {
            if self.queue_slots.get(index).is_some_and(QueueSlot::is_new) {
                self.make_queues(function, controller, index).await?;
            }
        }
        self.resume_all()
    }

    /// Releases closed sharers without commands at the drive. A sharer whose host's queue pair was deleted
    /// waits for a new queue and repeats its commands there. Assigns free identifiers to waiting sharers.
    fn update_sharers(&mut self, queue_pairs: u32) {
        let hosts: Vec<_> =
            self.queue_slots.iter().map(|queue_slot| Arc::clone(&queue_slot.core_queue)).collect();
        let is_there = |host: &Arc<CoreQueue>| hosts.iter().any(|there| Arc::ptr_eq(there, host));
        for queue_slot in
            self.queue_slots.iter_mut().filter(|queue_slot| queue_slot.is_sharer && queue_slot.has_queues)
        {
            if queue_slot.core_queue.is_closed() {
                // Commands of a closed host may be at the drive until its queue pair is deleted. A host
                // closes before it drops its sharers, so `is_hosted` is read first.
                let is_free = !queue_slot.core_queue.is_hosted();
                if is_free && !queue_slot.host.as_ref().is_some_and(|host| host.is_closed() && is_there(host))
                {
                    queue_slot.release();
                }
            } else if !queue_slot.host.as_ref().is_some_and(is_there) {
                (queue_slot.has_queues, queue_slot.host) = (false, None);
                // The drive was not reset, so its write cache is intact.
                self.shared.may_lose_cache.store(false, Ordering::Relaxed);
            }
        }
        self.drop_closed();
        let is_waiting =
            |queue_slot: &QueueSlot| queue_slot.is_sharer && queue_slot.is_new() && !queue_slot.is_offered();
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

    /// Returns the host for a sharer on `core`. Candidates are the core queues with a working queue pair. One
    /// on the same core is preferred, then that with the fewest sharers. `None`: there is no candidate.
    fn host_for(&self, core: usize) -> Option<Arc<CoreQueue>> {
        let can_serve = |queue_slot: &&QueueSlot| {
            queue_slot.has_queues
                && !queue_slot.is_sharer
                && !queue_slot.is_left_behind
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

    /// Sends `Replay`, later `Go`, to cores with queues. `Go` is sent only when no core has commands to
    /// repeat, because repeated commands must not execute after newer ones. Fails as `check_replay`.
    fn resume_all(&mut self) -> Result<(), ManagerError> {
        // Called first: a sharer without a host that must repeat commands makes all cores wait.
        self.end_hostless();
        if self.queue_slots.iter().any(QueueSlot::is_to_repeat) {
            return Ok(());
        }
        let is_replaying = self
            .queue_slots
            .iter()
            .any(|queue_slot| queue_slot.has_queues && queue_slot.core_queue.is_replaying());
        for queue_slot in self.queue_slots.iter().filter(|queue_slot| queue_slot.has_queues) {
            match (queue_slot.core_queue.word().queue_command(), is_replaying) {
                (QueueCommand::Rewind, true) => queue_slot.core_queue.set_queue_command(QueueCommand::Replay),
                (QueueCommand::Rewind | QueueCommand::Replay, false) => {
                    queue_slot.core_queue.set_queue_command(QueueCommand::Go)
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

    /// Fails the requests of sharers that have no host. The time limit is `return_timeout` after the loss of
    /// the drive (without a loss, after the wait began), and at least `STOP_MS` after the wait began. The
    /// drive has none of them: it was off, or the former host's queue pair was deleted.
    fn end_hostless(&mut self) {
        let now = self.now.get();
        let limit = self.lost_at.unwrap_or(now).saturating_add(self.return_limit_ms());
        let limit = limit.max(now.saturating_add(STOP_MS));
        for index in 0..self.queue_slots.len() {
            // A sharer with a possible host is assigned in the next step.
            let has_host = self.host_for(self.queue_slots[index].core_queue.core).is_some();
            let queue_slot = &mut self.queue_slots[index];
            if !queue_slot.is_hostless() || has_host {
                queue_slot.hostless_until = None;
            } else if now >= *queue_slot.hostless_until.get_or_insert(limit) {
                queue_slot.hostless_until = None;
                queue_slot.core_queue.set_queue_command(QueueCommand::Absent);
                let (drive, core) = (&self.shared.address, queue_slot.core_queue.core);
                tracing::error!(%drive, core, "no core with a queue pair responds: requests of this core, \
                    which has no queue pair, fail until one does");
            }
        }
    }

    fn return_limit_ms(&self) -> u64 {
        u64::try_from(self.shared.settings.return_timeout.as_millis()).unwrap_or(u64::MAX)
    }

    /// Fails if the repetition after a reset has taken `STOP_MS` and the drive has been lost for
    /// `return_timeout`. The next reset ends commands never completed, and leaves hung cores behind.
    fn check_replay(&mut self) -> Result<(), ManagerError> {
        let (now, limit) = (self.now.get(), self.shared.settings.return_timeout);
        let since = *self.replaying_since.get_or_insert(now);
        let lost_at = self.lost_at.unwrap_or(since);
        let is_late =
            now.saturating_sub(lost_at) >= self.return_limit_ms() && now.saturating_sub(since) >= STOP_MS;
        if is_late { Err(ManagerError::Replay { limit }) } else { Ok(()) }
    }

    /// Offers the core its queue. Once the core has answered, creates the queues at the controller, or
    /// assigns a sharer to its host.
    async fn make_queues(
        &mut self,
        function: &Arc<dyn Function>,
        controller: &Controller,
        index: usize,
    ) -> Result<(), ManagerError> {
        if !self.offer_queue(function, controller, index)? {
            return Ok(());
        }
        let Some(queue_slot) = self.queue_slots.get_mut(index) else { return Ok(()) };
        let Some((layout, memory)) = &queue_slot.memory else { return Ok(()) };
        let (layout, sq, qid) = (*layout, memory.iova(), queue_slot.qid);
        queue_slot.offer = None;
        // Requested Aborts contain CIDs of the previous queue.
        queue_slot.core_queue.clear_requests();
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

    /// Offers the core its queue, if not offered yet. Returns true once the core has answered and is open.
    /// Leaves behind a core with commands to repeat that has not answered for `STOP_MS`.
    fn offer_queue(
        &mut self,
        function: &Arc<dyn Function>,
        controller: &Controller,
        index: usize,
    ) -> Result<bool, ManagerError> {
        let is_offered = self.queue_slots.get(index).is_some_and(QueueSlot::is_offered);
        if !is_offered && !self.assign_queue(function, controller, index)? {
            return Ok(false);
        }
        let (now, core_queue) = match self.queue_slots.get(index) {
            Some(queue_slot) => (self.now.get(), Arc::clone(&queue_slot.core_queue)),
            None => return Ok(false),
        };
        if core_queue.has_answered() {
            return Ok(!core_queue.is_closed());
        }
        let Some(mut offer) = self.queue_slots.get(index).and_then(|queue_slot| queue_slot.offer) else {
            return Ok(false);
        };
        self.log_hung(&core_queue, &mut offer.log_from);
        let Some(queue_slot) = self.queue_slots.get_mut(index) else { return Ok(false) };
        queue_slot.offer = Some(offer);
        // The other cores wait until this core has repeated its commands. The drive has none of them: it was
        // off or the former host's queue pair was deleted, and there is no new one.
        if queue_slot.has_worked && now.saturating_sub(offer.at) >= STOP_MS {
            queue_slot.leave_behind_absent();
            self.log_left_behind(&core_queue);
        }
        Ok(false)
    }

    /// Maps the core's memory and offers the core a queue with `Rewind`. Returns false if no core can be the
    /// host of a sharer, or if the drive does not have the namespace (the core then receives `Gone`).
    fn assign_queue(
        &mut self,
        function: &Arc<dyn Function>,
        controller: &Controller,
        index: usize,
    ) -> Result<bool, ManagerError> {
        let offer = Offer { at: self.now.get(), log_from: self.answer_limit() };
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
            if core_queue.word().queue_command() != QueueCommand::Gone {
                let (drive, nsid) = (&self.shared.address, core_queue.nsid);
                tracing::error!(%drive, core, nsid, "namespace no longer exists");
                core_queue.set_queue_command(QueueCommand::Gone);
            }
            return Ok(false);
        };
        let pool = match queue_slot.pool.take().or_else(|| core_queue.take_mapping()) {
            Some(pool) => pool,
            None => function.map(&core_queue.pool)?,
        };
        let window = Window::new(&core_queue.pool, pool.iova());
        queue_slot.pool = Some(pool);
        let cache_windows = core_queue.fronts.map(function.as_ref())?;
        let queue = queue_slot.queue(function, controller)?;
        if let Some(host) = host {
            let (drive, nsid, host_core) = (&self.shared.address, core_queue.nsid, host.core);
            let queue_pairs = controller.queue_pairs;
            tracing::warn!(%drive, core, nsid, queue_pairs, host_core, "the drive has too few queue pairs: \
                this core shares the one of host_core");
            queue_slot.host = Some(host);
        }
        let pointers = Pointers { window, cache_windows, has_sgls: controller.has_sgls() };
        queue_slot.offer = Some(offer);
        core_queue.put_setup(Some(Setup { queue, pointers, rules }));
        core_queue.set_queue_command(QueueCommand::Rewind);
        Ok(true)
    }

    /// Deletes the queues at the controller and releases the slot's memory and mappings.
    async fn delete_queues(
        &mut self,
        function: &Arc<dyn Function>,
        controller: &Controller,
        index: usize,
    ) -> Result<(), ManagerError> {
        let Some(qid) = self.queue_slots.get(index).map(|queue_slot| queue_slot.qid) else { return Ok(()) };
        let sqe = Sqe::delete_io_sq(0, qid);
        self.command(function, controller, sqe, "Delete I/O Submission Queue").await?;
        let sqe = Sqe::delete_io_cq(0, qid);
        self.command(function, controller, sqe, "Delete I/O Completion Queue").await?;
        if let Some(queue_slot) = self.queue_slots.get_mut(index) {
            queue_slot.release();
        }
        Ok(())
    }
}
