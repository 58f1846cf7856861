//! [`Place`]: a member's queue pair on the controller, as the manager makes and deletes it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use nvme_spec::sqe::Sqe;

use super::away::STOP_MS;
use super::{Controller, Life, Trouble};
use crate::bar::Bar;
use crate::dma::{DmaError, DmaMemory, PAGE_BYTES};
use crate::function::{Function, Mapping};
use crate::guests::{GUEST_QID, Guest};
use crate::member::{Member, Order, Setup};
use crate::pointers::{Pointers, Window};
use crate::queue::{Layout, QueuePair, Shadow};
use crate::shared::TICK_MS;

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
    /// It had queues once: commands may be with it that are to be repeated.
    has_worked: bool,
    /// Its core was given a queue, and has not answered yet.
    asked: Option<Asked>,
    /// The drive has no queue pair for it: it works with another core's.
    pub(super) is_guest: bool,
    /// Whose it works with.
    host: Option<Arc<Member>>,
    /// No core can be its host: its requests wait until then.
    hostless_until: Option<u64>,
    doorbells: Option<Shadow>,
    /// Its core did not stop in time. Until it answers it has no queue, and nobody has its identifier: it
    /// may still write to the doorbells.
    pub(super) is_left: bool,
}

/// When a core was asked for something.
#[derive(Clone, Copy)]
struct Asked {
    at: u64,
    /// From when on it is told of; `None`: it was.
    tell_from: Option<u64>,
}

impl Place {
    /// The core works, or is to stop working, with a queue.
    pub(super) fn is_live(&self) -> bool {
        !matches!(self.member.word().order(), Order::Gone | Order::Absent | Order::Wait | Order::Stop)
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
        !self.has_queues && !self.is_left && !self.member.is_closed()
    }

    /// Its core was given a queue, and has not answered yet.
    pub(super) fn is_asked(&self) -> bool {
        self.asked.is_some() && !self.member.is_closed()
    }

    /// A guest whose requests wait for a core that could be its host.
    fn is_hostless(&self) -> bool {
        let is_waiting = matches!(self.member.word().order(), Order::Wait | Order::Rewind);
        self.is_guest && is_waiting && self.is_new() && !self.is_asked()
    }

    /// Its host's core does not work.
    pub(super) fn is_host_hung(&self) -> bool {
        let ticks = u32::try_from(STOP_MS / TICK_MS).unwrap_or(u32::MAX);
        self.host.as_ref().is_some_and(|host| host.is_behind(ticks))
    }

    /// It gets a queue pair of the drive's, or has to be a guest.
    fn set_qid(&mut self, qid: Option<u16>) {
        if self.is_guest {
            // A host that hangs may still write to it.
            self.memory = None;
        }
        (self.is_guest, self.qid) = (qid.is_none(), qid.unwrap_or(GUEST_QID));
        (self.host, self.doorbells) = (None, None);
    }

    /// It may have something to repeat, and has no queue yet.
    fn is_to_repeat(&self) -> bool {
        let is_new = self.is_new() && self.member.word().order() == Order::Rewind;
        self.has_worked && (is_new || self.is_asked())
    }

    /// A queue pair for it: one that the drive is to be told of, or a guest's, in fresh memory, since a host
    /// that hangs may still write to that of the one before.
    fn queue(
        &mut self,
        function: &Arc<dyn Function>,
        controller: &Controller,
    ) -> Result<QueuePair, DmaError> {
        let entries_min = if self.is_guest { 0 } else { controller.quirks.queue_entries_min };
        let layout = Layout::new(self.member.depth, entries_min, controller.cap.queue_entries_max());
        let memory = match &self.memory {
            Some((was, memory)) if *was == layout && !self.is_guest => Arc::clone(memory),
            _ => DmaMemory::near(self.member.node, function.as_ref(), layout.bytes())?,
        };
        self.memory = Some((layout, Arc::clone(&memory)));
        memory.clear();
        if self.is_guest {
            let doorbells = DmaMemory::near(self.member.node, function.as_ref(), 2 * PAGE_BYTES as usize)?;
            self.doorbells = Some(Shadow { memory: doorbells });
            let queue = QueuePair::new(GUEST_QID, layout, memory, Bar::none(), 0);
            return Ok(queue.with_shadow(self.doorbells.clone()));
        }
        self.doorbells = None;
        let queue = QueuePair::new(self.qid, layout, memory, controller.bar.clone(), controller.cap.dstrd());
        Ok(queue.with_shadow(controller.shadow.clone()))
    }

    /// The core is not waited for any more. Its order stays: [`Order::Absent`] makes it give its buffers
    /// back, and the drive may still reach them.
    pub(super) fn leave(&mut self) {
        self.is_left = true;
        self.asked = None;
        self.member.put_setup(None);
    }

    /// The same when the drive cannot reach the buffers: what the core had with it fails when it goes on.
    pub(super) fn leave_absent(&mut self) {
        self.leave();
        self.member.order(Order::Absent);
    }

    /// A core that was left behind has obeyed [`Order::Stop`] since. It touches its queue no more, and what
    /// it had can be repeated.
    pub(super) fn take_late_stop(&mut self) {
        if self.member.word().order() == Order::Stop && self.member.has_answered() {
            self.is_left = false;
        }
    }

    /// The drive does not see the core's pool any more, nor what the core alone has left with it.
    pub(super) fn unmap(&mut self) {
        self.pool = None;
        self.member.drop_left();
        drop(self.member.take_mapping());
    }

    /// The function is closed.
    pub(super) fn let_go(&mut self) {
        self.has_queues = false;
        self.asked = None;
        self.is_left = false;
        drop(self.member.take_guests());
        (self.host, self.hostless_until, self.doorbells) = (None, None, None);
        self.member.put_setup(None);
        self.memory = None;
        self.unmap();
    }
}

impl Life {
    /// Members that were opened since, as far as there are identifiers up to `qid_max` for them. One that
    /// waits for a member that goes has to wait. One for which there will be none works with another core's.
    pub(super) fn adopt(&mut self, qid_max: u32) {
        let members: Vec<_> = self.shared.state().members.clone();
        for member in members {
            if self.places.iter().any(|place| Arc::ptr_eq(&place.member, &member)) {
                continue;
            }
            let of_drive = || self.places.iter().filter(|place| !place.is_guest);
            let is_free = |qid: &u16| of_drive().all(|place| place.qid != *qid);
            let qid_max = u16::try_from(qid_max).unwrap_or(u16::MAX);
            let staying = of_drive().filter(|place| !place.member.is_closed()).count();
            let is_short = staying >= usize::from(qid_max);
            let free = if is_short { Some(GUEST_QID) } else { (1..=qid_max).find(is_free) };
            let Some(qid) = free else { continue };
            self.places.push(Place {
                member,
                qid,
                memory: None,
                pool: None,
                has_queues: false,
                has_worked: false,
                asked: None,
                is_guest: is_short,
                host: None,
                hostless_until: None,
                doorbells: None,
                is_left: false,
            });
        }
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

    /// The controller was disabled: it has no queues, and identifiers begin at 1 again, but for those of
    /// cores that have not stopped. Those that get none of `queue_pairs` are guests.
    pub(super) fn forget_queues(&mut self, queue_pairs: u32) {
        self.replaying_since = None;
        for place in &mut self.places {
            (place.has_queues, place.asked, place.host) = (false, None, None);
            place.hostless_until = None;
            drop(place.member.take_guests());
        }
        self.drop_closed();
        let is_kept = |place: &&Place| place.is_left && !place.is_guest;
        let kept: Vec<_> = self.places.iter().filter(is_kept).map(|place| place.qid).collect();
        let mut free = (1..=u16::try_from(queue_pairs).unwrap_or(u16::MAX)).filter(|qid| !kept.contains(qid));
        for place in self.places.iter_mut().filter(|place| !place.is_left) {
            let qid = free.next();
            place.set_qid(qid);
        }
    }

    /// Queues for every member that has none, and no queues for members that are gone.
    pub(super) async fn settle(
        &mut self,
        function: &Arc<dyn Function>,
        controller: &Controller,
    ) -> Result<(), Trouble> {
        // First those that go: a drive may have no queue pair to spare.
        for index in 0..self.places.len() {
            let is_over = |place: &Place| place.has_queues && !place.is_guest && place.member.is_closed();
            if self.places.get(index).is_some_and(is_over) {
                self.delete(function, controller, index).await?;
            }
        }
        self.drop_closed();
        self.settle_guests(controller.queue_pairs);
        // One that was left behind goes on, without what it had.
        for place in self.places.iter_mut().filter(|place| place.is_left && place.member.has_answered()) {
            place.is_left = false;
            // A drive that came back may have fewer queues than it had.
            if u32::from(place.qid) > controller.queue_pairs {
                place.set_qid(None);
            }
        }
        self.adopt(controller.queue_pairs);
        for index in 0..self.places.len() {
            if self.places.get(index).is_some_and(Place::is_new) {
                self.make(function, controller, index).await?;
            }
        }
        self.release_all()
    }

    /// Guests that are closed go once nothing of them is with the drive; those whose host has gone get its
    /// queue pair, or another host. What they had with it, which is deleted, they give to the drive again.
    fn settle_guests(&mut self, queue_pairs: u32) {
        let hosts: Vec<_> = self.places.iter().map(|place| Arc::clone(&place.member)).collect();
        let is_there = |host: &Arc<Member>| hosts.iter().any(|there| Arc::ptr_eq(there, host));
        for place in self.places.iter_mut().filter(|place| place.is_guest && place.has_queues) {
            if place.member.is_closed() {
                // A host that has closed may have left commands with the drive until its queue pair is
                // deleted. It closes before it lets go of its guests, so it is looked at after them.
                let is_free = !place.member.is_hosted();
                if is_free && !place.host.as_ref().is_some_and(|host| host.is_closed() && is_there(host)) {
                    place.let_go();
                }
            } else if !place.host.as_ref().is_some_and(is_there) {
                (place.has_queues, place.host) = (false, None);
                // The drive goes on: nothing is lost.
                self.shared.may_lose_cache.store(false, Ordering::Relaxed);
            }
        }
        self.drop_closed();
        let is_waiting = |place: &Place| place.is_guest && place.is_new() && !place.is_asked();
        while let Some(index) = self.places.iter().position(is_waiting) {
            let is_free = |qid: &u16| self.places.iter().all(|place| place.is_guest || place.qid != *qid);
            let free = (1..=u16::try_from(queue_pairs).unwrap_or(u16::MAX)).find(is_free);
            match (free, self.places.get_mut(index)) {
                (Some(qid), Some(place)) => place.set_qid(Some(qid)),
                _ => return,
            }
        }
    }

    /// A core that has a queue pair of the drive's and can serve another one: the same if there is one, else
    /// one with the fewest guests.
    fn host_for(&self, core: usize) -> Option<Arc<Member>> {
        let can_serve = |place: &&Place| {
            place.has_queues && !place.is_guest && !place.is_left && !place.member.is_closed()
        };
        let guests_of = |host: &Arc<Member>| {
            let hosts = self.places.iter().filter_map(|place| place.host.as_ref());
            hosts.filter(|other| Arc::ptr_eq(other, host)).count()
        };
        let hosts = self.places.iter().filter(can_serve);
        let host = hosts.min_by_key(|place| (place.member.core != core, guests_of(&place.member)))?;
        Some(Arc::clone(&host.member))
    }

    /// Cores that have their queues work with them, once nothing is left to be repeated on any of them: what
    /// was with the drive before a reset is not to be done after what came later.
    fn release_all(&mut self) -> Result<(), Trouble> {
        // First: what a guest has to repeat keeps all cores waiting.
        self.end_hostless();
        if self.places.iter().any(Place::is_to_repeat) {
            return Ok(());
        }
        let is_replaying = self.places.iter().any(|place| place.has_queues && place.member.is_replaying());
        for place in self.places.iter().filter(|place| place.has_queues) {
            match (place.member.word().order(), is_replaying) {
                (Order::Rewind, true) => place.member.order(Order::Replay),
                (Order::Rewind | Order::Replay, false) => place.member.order(Order::Go),
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

    /// Guests wait for a host no longer than for a drive that is away; cores that could be one have as long
    /// to answer as any. Then their requests fail, until there is a host. The drive has nothing of them:
    /// since then the controller was off, or the queue pair of the host that they had was deleted.
    fn end_hostless(&mut self) {
        let now = self.now.get();
        let limit = self.lost_at.unwrap_or(now).saturating_add(self.return_limit_ms());
        let limit = limit.max(now.saturating_add(STOP_MS));
        for index in 0..self.places.len() {
            // One whose host has come back in this turn gets it in the next.
            let has_host = self.host_for(self.places[index].member.core).is_some();
            let place = &mut self.places[index];
            if !place.is_hostless() || has_host {
                place.hostless_until = None;
            } else if now >= *place.hostless_until.get_or_insert(limit) {
                place.hostless_until = None;
                place.member.order(Order::Absent);
                let (drive, core) = (&self.shared.address, place.member.core);
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

    /// The member's memory and queues; then it works. Until its core has answered there is nothing to do.
    async fn make(
        &mut self,
        function: &Arc<dyn Function>,
        controller: &Controller,
        index: usize,
    ) -> Result<(), Trouble> {
        if !self.has_queue_asked(function, controller, index)? {
            return Ok(());
        }
        let Some(place) = self.places.get_mut(index) else { return Ok(()) };
        let Some((layout, memory)) = &place.memory else { return Ok(()) };
        let (layout, sq, qid) = (*layout, memory.iova(), place.qid);
        place.asked = None;
        // Of the queue before: its identifiers are others' now.
        place.member.forget_asked();
        if let (Some(host), Some(doorbells)) = (&place.host, &place.doorbells) {
            host.add_guest(Guest::new(&place.member, memory, doorbells, layout));
            (place.has_queues, place.has_worked) = (true, true);
            return Ok(());
        }
        let cq = layout.cq_iova(sq);
        let sqe = Sqe::create_io_cq(0, qid, layout.cq_entries - 1, cq.0);
        self.command(function, controller, sqe, "Create I/O Completion Queue").await?;
        let sqe = Sqe::create_io_sq(0, qid, layout.sq_entries - 1, sq.0, qid);
        self.command(function, controller, sqe, "Create I/O Submission Queue").await?;
        if let Some(place) = self.places.get_mut(index) {
            (place.has_queues, place.has_worked) = (true, true);
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
        let is_asked = self.places.get(index).is_some_and(Place::is_asked);
        if !is_asked && !self.give(function, controller, index)? {
            return Ok(false);
        }
        let (now, member) = match self.places.get(index) {
            Some(place) => (self.now.get(), Arc::clone(&place.member)),
            None => return Ok(false),
        };
        if member.has_answered() {
            return Ok(!member.is_closed());
        }
        let Some(mut asked) = self.places.get(index).and_then(|place| place.asked) else { return Ok(false) };
        self.tell_hung(&member, &mut asked.tell_from);
        let Some(place) = self.places.get_mut(index) else { return Ok(false) };
        place.asked = Some(asked);
        // The others wait for what it has to repeat. The drive has none of it: since then the controller was
        // off, or the host's queue pair was deleted, and the new queue is not made yet.
        if place.has_worked && now.saturating_sub(asked.at) >= STOP_MS {
            place.leave_absent();
            self.tell_left(&member);
        }
        Ok(false)
    }

    /// The member's memory, and a queue for its core. False where there is none for it now.
    fn give(
        &mut self,
        function: &Arc<dyn Function>,
        controller: &Controller,
        index: usize,
    ) -> Result<bool, Trouble> {
        let asked = Asked { at: self.now.get(), tell_from: self.answer_limit() };
        let Some((core, is_guest)) = self.places.get(index).map(|it| (it.member.core, it.is_guest)) else {
            return Ok(false);
        };
        let host = if is_guest { self.host_for(core) } else { None };
        if is_guest && host.is_none() {
            return Ok(false);
        }
        let Some(place) = self.places.get_mut(index) else { return Ok(false) };
        let member = Arc::clone(&place.member);
        let Some(rules) = self.shared.rules(member.nsid) else {
            if member.word().order() != Order::Gone {
                let (drive, nsid) = (&self.shared.address, member.nsid);
                tracing::error!(%drive, core, nsid, "no such namespace any more");
                member.order(Order::Gone);
            }
            return Ok(false);
        };
        let pool = match place.pool.take().or_else(|| member.take_mapping()) {
            Some(pool) => pool,
            None => function.map(&member.pool)?,
        };
        let window = Window::new(&member.pool, pool.iova());
        place.pool = Some(pool);
        let others = member.fronts.map(function.as_ref())?;
        let queue = place.queue(function, controller)?;
        if let Some(host) = host {
            let (drive, nsid, host_core) = (&self.shared.address, member.nsid, host.core);
            let queue_pairs = controller.queue_pairs;
            tracing::warn!(%drive, core, nsid, queue_pairs, host_core, "the drive gives too few queue pairs: \
                this core works with another one's");
            place.host = Some(host);
        }
        let pointers = Pointers { window, others, has_sgls: controller.has_sgls() };
        place.asked = Some(asked);
        member.put_setup(Some(Setup { queue, pointers, rules }));
        member.order(Order::Rewind);
        Ok(true)
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
}
