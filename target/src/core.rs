//! [`TargetCore`]: one core's share of the target: its queue pairs, its disks, its messages.
//!
//! The shell (sockets, verbs, the simulator) drives it, turn by turn:
//!
//! ```text
//!   set_time -> for each connection with input: feed transport(id), step(id)
//!            -> on_message for what other cores sent -> poll (disks, waiting requests, time-outs)
//!            -> next_touched: what may have output; send, then step(id) again for Sent
//!            -> next_message: to other cores' mailboxes      -> next_closed: close the socket
//! ```
//!
//! It does no I/O itself and reads no clock. What it does when it is full: `room`.

mod connections;
mod room;

use std::collections::VecDeque;
use std::sync::Arc;

use spindle_disk::{CoreContext, Done, OpenError};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Pool, SHARE_BYTES};
use spindle_reactor::slab::{Slab, Slot};
use spindle_transport::{CloseReason, Transport, TransportKind};

use crate::busy::Busy;
use crate::controller::Controller;
use crate::env::{AbortFrom, DONE_BATCH, Env, Message};
use crate::notice::{Notice, Notices};
use crate::orphaned_commands::OrphanedCommands;
use crate::qpair::memory::WaitsFor;
use crate::qpair::request::Request;
use crate::qpair::{Life, Qpair, Retried, from_token};
use crate::shared::{ControllerShared, Registry};
use crate::snapshot::Snapshot;
use room::Unconnected;

/// How often time-outs are looked at.
const TIMER_PERIOD: Nanos = Nanos::from_ms(50);

/// Turns that somebody is first in the line for the pool before what it needs is kept for it.
const FIRST_TURNS: u32 = 32;

/// What a core is made of.
pub struct CoreSettings {
    /// Index of this core.
    pub core: usize,
    /// Number of cores.
    pub cores: usize,
    /// Most connections on this core.
    pub connections: usize,
    /// Most commands that a disk has at once on this core.
    pub disk_depth: u32,
    /// Buffers of the data path.
    pub pool: Pool,
    /// Buffers of admin and Connect commands only.
    pub admin_pool: Pool,
    /// The configuration.
    pub snapshot: Arc<Snapshot>,
    /// Live controllers of the process.
    pub registry: Arc<Registry>,
    /// Now.
    pub now: Nanos,
    /// Wall clock, ms since 1970.
    pub wall_ms: u64,
}

/// Counters of a core.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CoreUse {
    /// Connections now.
    pub connections: usize,
    /// Commands that arrived, ever.
    pub commands: u64,
    /// Requests that waited for memory, ever.
    pub waits: u64,
}

/// The queue pair that has been first in the line for the pool, and for how many turns.
#[derive(Clone, Copy)]
struct First {
    id: Slot,
    turns: u32,
}

/// One core's share of the target. See the module.
pub struct TargetCore<T: Transport> {
    env: Env,
    qpairs: Slab<Qpair<T>>,
    unconnected: Unconnected,
    /// Queue pairs with waiting requests; whose turn was longest ago comes first.
    waiting: VecDeque<Slot>,
    /// Queue pairs that may have something to send, by transport.
    send_ready: [Vec<Slot>; TransportKind::ALL.len()],
    /// Connections that are gone, for the shell.
    closed: Vec<(Slot, T)>,
    /// Scratch list of ids.
    ids: Vec<Slot>,
    /// Who is first in the line for the pool.
    first: Option<First>,
    next_timer: Nanos,
    disk_depth: u32,
    /// A disk that the configuration has no more still has something in flight.
    is_closing_disks: bool,
    /// Generation of the configuration that each core has.
    taken: Vec<u64>,
}

impl<T: Transport> TargetCore<T> {
    /// A core with all disks of the snapshot opened.
    ///
    /// # Errors
    /// [`OpenError`] of the first disk that cannot be opened.
    pub fn new(settings: CoreSettings) -> Result<Self, OpenError> {
        let connections = settings.connections;
        let taken = vec![settings.snapshot.generation; settings.cores];
        settings.pool.set_owners(connections);
        settings.admin_pool.set_owners(connections + 1);
        let env = Env {
            core: settings.core,
            cores: settings.cores,
            now: settings.now,
            started: settings.now,
            wall_ms: settings.wall_ms,
            advertised_snapshot: Arc::clone(&settings.snapshot),
            snapshot: settings.snapshot,
            registry: settings.registry,
            pool: settings.pool,
            admin_pool: settings.admin_pool,
            disks: Vec::new(),
            outbox: VecDeque::with_capacity(64),
            notices: Notices::default(),
            current: Slot::from_wire(0),
            is_draining: false,
            is_crowded: false,
            // Behind those of the connections.
            incoming: Slot::from_wire(u32::try_from(connections).unwrap_or(u32::MAX)),
            is_reserve_short: false,
            scarce_bytes: u64::MAX,
            waits: 0,
            commands: 0,
            done: Vec::with_capacity(DONE_BATCH),
            orphaned_commands: OrphanedCommands::default(),
            busy: Busy::new(settings.core),
        };
        let mut core = TargetCore {
            env,
            qpairs: Slab::with_capacity(connections),
            unconnected: Unconnected::default(),
            waiting: VecDeque::with_capacity(connections),
            send_ready: TransportKind::ALL.map(|_| Vec::with_capacity(connections)),
            closed: Vec::with_capacity(connections),
            ids: Vec::with_capacity(connections),
            first: None,
            next_timer: Nanos::ZERO,
            disk_depth: settings.disk_depth,
            is_closing_disks: false,
            taken,
        };
        match core.open_disks().pop() {
            Some(error) => Err(error),
            None => Ok(core),
        }
    }

    /// Open the disks that the snapshot has and this core has not; close those that it has no more. What
    /// could not be opened.
    fn open_disks(&mut self) -> Vec<OpenError> {
        let mut errors = Vec::new();
        let env = &mut self.env;
        let snapshot = Arc::clone(&env.snapshot);
        env.disks.resize_with(snapshot.disks.len().max(env.disks.len()), || None);
        let context = CoreContext { core: env.core, pool: env.pool.clone(), depth: self.disk_depth };
        for (handle, source) in env.disks.iter_mut().zip(&snapshot.disks) {
            if let (None, Some(source)) = (&handle, source) {
                match source.open(&context) {
                    Ok(disk) => *handle = Some(disk),
                    Err(error) => errors.push(error),
                }
            }
        }
        self.close_disks();
        errors
    }

    /// Close the disks that the configuration has no more, each once it is idle.
    fn close_disks(&mut self) {
        let env = &mut self.env;
        self.is_closing_disks = false;
        for (index, handle) in env.disks.iter_mut().enumerate() {
            let is_gone = env.snapshot.disks.get(index).is_none_or(Option::is_none);
            match handle {
                Some(disk) if is_gone && disk.in_flight() > 0 => self.is_closing_disks = true,
                Some(_) if is_gone => *handle = None,
                Some(_) | None => {}
            }
        }
    }

    /// Time of this turn.
    #[inline]
    pub fn set_time(&mut self, now: Nanos, wall_ms: u64) {
        let before = std::mem::replace(&mut self.env.now, now);
        let Env { busy, disks, .. } = &mut self.env;
        if !busy.is_empty() {
            busy.end_turn(now - before, disks);
        }
        self.env.wall_ms = wall_ms;
    }

    /// Most bytes that a connection takes here with a queue of `entries`, all of which were used at once: its
    /// queue pair, its requests and its controller.
    #[must_use]
    pub fn connection_bytes(entries: u16) -> usize {
        let entries = usize::from(entries);
        // Named in seven lists of the core.
        Slab::<Qpair<T>>::bytes_for(1)
            + 7 * size_of::<Slot>()
            // What it holds of the pool and of the reserve.
            + 2 * SHARE_BYTES
            + Slab::<Request>::bytes_for(entries)
            + entries * size_of::<Slot>()
            + Controller::bytes()
    }

    /// A queue pair, for counters.
    #[must_use]
    pub fn qpair(&self, id: Slot) -> Option<&Qpair<T>> {
        self.qpairs.get(id)
    }

    /// Runs `act` on a queue pair and books what came of it.
    #[inline]
    fn with(&mut self, id: Slot, act: impl FnOnce(&mut Qpair<T>, &mut Env) -> Life) {
        self.run_qpair(id, true, act);
    }

    #[inline]
    fn run_qpair(&mut self, id: Slot, touches: bool, act: impl FnOnce(&mut Qpair<T>, &mut Env) -> Life) {
        let Some(qpair) = self.qpairs.get_mut(id) else { return };
        self.env.current = id;
        let life = act(qpair, &mut self.env);
        if life == Life::Closed {
            if let Some(qpair) = self.qpairs.remove(id) {
                self.closed.push((id, qpair.transport));
            }
            return;
        }
        if touches && qpair.touch() {
            self.send_ready[qpair.peer.transport as usize].push(id);
        }
        if qpair.has_waiting() && !qpair.is_listed {
            qpair.is_listed = true;
            self.waiting.push_back(id);
            let waits_for = qpair.waits_for(id, &self.env);
            self.env.is_crowded |= waits_for.is_some_and(WaitsFor::is_in_the_way);
        }
    }

    /// The same for actions that do not ask whether it is closed: the transport tells that later.
    fn with_open(&mut self, id: Slot, act: impl FnOnce(&mut Qpair<T>, &mut Env)) {
        self.with(id, |qpair, env| {
            act(qpair, env);
            Life::Open
        });
    }

    /// Disks, requests that wait for memory, time-outs. True when there was anything to do.
    pub fn poll(&mut self) -> bool {
        let mut has_worked = self.poll_disks();
        if self.is_closing_disks {
            self.close_disks();
        }
        has_worked |= self.poll_waiting();
        if self.env.now >= self.next_timer {
            self.next_timer = self.env.now + TIMER_PERIOD;
            self.env.look_at_scarcity();
            self.each(|qpair, env| qpair.on_time(env));
            self.env.is_reserve_short = false;
            self.env.busy.let_go();
            self.expire_orphans();
        }
        if self.env.is_draining {
            self.each(Qpair::drain);
        }
        self.deliver_own();
        has_worked
    }

    fn poll_disks(&mut self) -> bool {
        let (mut has_worked, now) = (false, self.env.now);
        for index in 0..self.env.disks.len() {
            let mut done = std::mem::take(&mut self.env.done);
            if let Some(disk) = self.env.disk(index) {
                has_worked |= disk.poll(now, &mut done);
            }
            for ended in done.drain(..) {
                self.on_done(ended);
            }
            self.env.done = done;
        }
        has_worked
    }

    fn on_done(&mut self, done: Done) {
        let (id, slot) = from_token(done.token);
        // A queue pair that is gone does not want it: the buffer is dropped here, and so comes home.
        self.with_open(id, |qpair, env| qpair.on_done(id, env, slot, done));
        if !self.env.orphaned_commands.is_empty() {
            self.on_orphan_done(id);
        }
    }

    /// A command of a queue pair that is gone has come back, perhaps. The disks say whether it was the last.
    #[cold]
    fn on_orphan_done(&mut self, id: Slot) {
        if self.env.orphaned_commands.on_done(id) {
            let commands = self.env.cancel_commands_of(id);
            self.env.orphaned_commands.set(id, commands);
        }
    }

    fn expire_orphans(&mut self) {
        while let Some(orphan) = self.env.orphaned_commands.expired(self.env.now) {
            let (controller, commands) = (&orphan.controller, orphan.commands);
            let (host, subsystem) = (controller.host_nqn, controller.subsystem_nqn);
            self.env.notice(Notice::Orphan { host, subsystem, commands });
        }
    }

    /// Who got something goes to the end of the line, who did not keeps its place: a deep queue does not
    /// take, turn after turn, what a shallow one waits for. Who has been first for long gets what it needs
    /// kept for it: small ones do not take, turn after turn, what a large one waits for.
    fn poll_waiting(&mut self) -> bool {
        if self.waiting.is_empty() && self.first.is_none() {
            return false;
        }
        let (mut has_worked, mut is_crowded) = (false, false);
        let mut first = None;
        let mut at = 0;
        for _ in 0..self.waiting.len() {
            let Some(id) = self.waiting.get(at).copied() else { break };
            if self.first.is_some_and(|first| first.id == id) {
                self.env.pool.keep_for(None);
            }
            let mut retried = Retried::default();
            let mut waits_for = None;
            self.with_open(id, |qpair, env| {
                retried = qpair.retry_buffers(id, env);
                qpair.is_listed = retried.has_waiting;
                waits_for = qpair.waits_for(id, env);
            });
            has_worked |= retried.has_moved;
            is_crowded |= waits_for.is_some_and(WaitsFor::is_in_the_way);
            if retried.has_waiting && !retried.has_moved {
                if let (None, Some(WaitsFor::Pool { bytes })) = (first, waits_for) {
                    first = Some(self.wait_first(id, bytes));
                }
                at += 1;
                continue;
            }
            self.waiting.remove(at);
            if retried.has_waiting {
                self.waiting.push_back(id);
            }
        }
        self.first = first;
        if first.is_none() {
            self.env.pool.keep_for(None);
        }
        self.env.is_crowded = is_crowded;
        has_worked || is_crowded
    }

    /// `id` is the first in the line that waits for the pool, for `bytes`.
    fn wait_first(&mut self, id: Slot, bytes: u32) -> First {
        let turns = self.first.filter(|first| first.id == id).map_or(0, |first| first.turns);
        let first = First { id, turns: turns.saturating_add(1) };
        self.env.pool.keep_for((first.turns >= FIRST_TURNS).then_some(bytes));
        first
    }

    fn each(&mut self, mut act: impl FnMut(&mut Qpair<T>, &mut Env)) {
        let mut ids = std::mem::take(&mut self.ids);
        ids.extend(self.qpairs.slots());
        for id in ids.drain(..) {
            self.with_open(id, &mut act);
        }
        self.ids = ids;
    }

    /// A message from another core (or from this one).
    pub fn on_message(&mut self, message: Message) {
        self.act_on(message);
        self.deliver_own();
    }

    fn act_on(&mut self, message: Message) {
        match message {
            Message::CloseQueues(controller, reason) => {
                self.close_all(reason, |qpair| qpair.is_io_queue_of(&controller, None));
            }
            Message::CloseController(controller, reason) => {
                self.close_all(reason, |qpair| qpair.is_admin_queue_of(&controller));
            }
            Message::Abort { controller, qid, cid, from } => self.abort(&controller, qid, cid, from),
            Message::Aborted { from, is_aborted } => {
                self.with_open(from.qpair, |qpair, env| qpair.on_abort_answer(env, from.slot, is_aborted));
            }
            Message::Failed(controller, record) => {
                // Looked up, not searched for: a host can cause as many of these as it likes.
                let qpair = self.qpairs.get_mut(controller.admin_queue());
                if let Some(qpair) = qpair.filter(|qpair| qpair.is_admin_queue_of(&controller)) {
                    qpair.on_failed(record);
                }
            }
            Message::Snapshot(snapshot) => self.on_snapshot(snapshot),
            Message::SnapshotTaken { core, generation } => self.on_snapshot_taken(core, generation),
            Message::Shutdown => self.env.is_draining = true,
        }
    }

    /// End the connections of these queue pairs.
    fn close_all(&mut self, reason: CloseReason, is_one: impl Fn(&Qpair<T>) -> bool) {
        self.each(|qpair, env| {
            if is_one(qpair) {
                qpair.close(env, reason);
            }
        });
    }

    fn find(&self, is_it: impl Fn(&Qpair<T>) -> bool) -> Option<Slot> {
        self.qpairs.iter().find(|(_, qpair)| is_it(qpair)).map(|(id, _)| id)
    }

    fn abort(&mut self, controller: &Arc<ControllerShared>, qid: u16, cid: u16, from: AbortFrom) {
        let mut is_aborted = false;
        if let Some(id) = self.find(|qpair| qpair.is_io_queue_of(controller, Some(qid))) {
            self.with_open(id, |qpair, env| is_aborted = qpair.abort(env, cid, None));
        }
        self.env.send(from.core, Message::Aborted { from, is_aborted });
    }

    /// The new configuration, for I/O queues at once. What hosts are shown and told follows when all cores
    /// have it: a host that knows of a namespace reads from it on all its queues, and one that got a refusal
    /// with DNR would give it up.
    fn on_snapshot(&mut self, snapshot: Arc<Snapshot>) {
        let old = std::mem::replace(&mut self.env.snapshot, snapshot);
        self.env.disks.iter_mut().flatten().for_each(|disk| disk.reconfigure());
        for error in self.open_disks() {
            // Its namespaces answer Namespace Not Ready on this core; the operator is told.
            self.env.notice(Notice::DiskOpen { reason: error.to_string() });
        }
        self.each(|qpair, env| {
            if !qpair.is_admin_queue() {
                qpair.on_snapshot(env, &old);
            }
        });
        let (core, generation) = (self.env.core, self.env.snapshot.generation);
        self.env.broadcast(&Message::SnapshotTaken { core, generation });
    }

    fn on_snapshot_taken(&mut self, core: usize, generation: u64) {
        if let Some(taken) = self.taken.get_mut(core) {
            *taken = generation;
        }
        let own = self.env.snapshot.generation;
        if self.taken.iter().any(|taken| *taken < own) {
            return;
        }
        if self.env.advertised_snapshot.generation == own {
            return;
        }
        let old = std::mem::replace(&mut self.env.advertised_snapshot, Arc::clone(&self.env.snapshot));
        self.each(|qpair, env| {
            if qpair.is_admin_queue() {
                qpair.on_snapshot(env, &old);
            }
        });
    }

    /// Messages to this core itself need no mailbox.
    #[inline]
    fn deliver_own(&mut self) {
        // Bounded: what an own message sends to this core again is taken in the same loop, and no message
        // loops. Those for others stay in order.
        let mut at = 0;
        while let Some((to, _)) = self.env.outbox.get(at) {
            if *to != self.env.core {
                at += 1;
            } else if let Some((_, message)) = self.env.outbox.remove(at) {
                self.act_on(message);
            }
        }
    }

    /// The next message for another core.
    pub fn next_message(&mut self) -> Option<(usize, Message)> {
        self.env.outbox.pop_front()
    }

    /// The next queue pair that may have something to send; each is named once.
    #[inline]
    pub fn next_touched(&mut self) -> Option<Slot> {
        TransportKind::ALL.into_iter().find_map(|transport| self.next_touched_over(transport))
    }

    /// The next of them that is over this transport.
    #[inline]
    pub fn next_touched_over(&mut self, transport: TransportKind) -> Option<Slot> {
        while let Some(id) = self.send_ready[transport as usize].pop() {
            if let Some(qpair) = self.qpairs.get_mut(id) {
                qpair.untouch();
                return Some(id);
            }
        }
        None
    }

    /// What the log should say.
    pub fn notices(&mut self) -> &mut Notices {
        &mut self.env.notices
    }

    /// True when nothing waits for a next turn by itself (memory, messages, disks): the core may sleep.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        let is_worth_a_try = |id: &Slot| {
            let waits_for = self.qpairs.get(*id).and_then(|qpair| qpair.waits_for(*id, &self.env));
            waits_for.is_none_or(WaitsFor::is_worth_a_try)
        };
        !self.waiting.iter().any(is_worth_a_try)
            && self.env.outbox.is_empty()
            && self.send_ready.iter().all(Vec::is_empty)
            && self.is_disk_idle()
    }

    /// True when no disk has anything in flight on this core.
    #[must_use]
    pub fn is_disk_idle(&self) -> bool {
        self.env.disks.iter().flatten().all(|disk| disk.in_flight() == 0)
    }

    /// True once shutdown has begun.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.env.is_draining
    }

    /// Ids of all connections.
    pub fn connections(&self) -> impl Iterator<Item = Slot> {
        self.qpairs.slots()
    }

    /// Counters.
    #[must_use]
    pub fn usage(&self) -> CoreUse {
        CoreUse { connections: self.qpairs.len(), commands: self.env.commands, waits: self.env.waits }
    }

    /// The pools, for counters and tests.
    #[must_use]
    pub fn pools(&self) -> (&Pool, &Pool) {
        (&self.env.pool, &self.env.admin_pool)
    }

    /// The newest configuration that all cores have.
    #[must_use]
    pub fn advertised_snapshot(&self) -> &Arc<Snapshot> {
        &self.env.advertised_snapshot
    }

    /// The configuration in force.
    #[must_use]
    pub fn snapshot(&self) -> &Arc<Snapshot> {
        &self.env.snapshot
    }
}
