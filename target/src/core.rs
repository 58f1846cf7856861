//! [`TargetCore`]: one core's part of the target: its queue pairs, its disks, its messages.
//!
//! The shell (sockets, verbs, the simulator) calls these functions in each turn:
//!
//! ```text
//!   set_time -> for each connection with input: feed transport(id), step(id)
//!            -> on_message for messages of other cores -> poll (disks, waiting requests, time-outs)
//!            -> next_send_ready: connections that may have output; send, then step(id) for Sent
//!            -> next_message: to other cores' mailboxes      -> next_closed: close the socket
//! ```
//!
//! `TargetCore` does no I/O itself and reads no clock. `connections` implements the interface of the shells;
//! `eviction` closes connections without Connect on a full core; `timers` checks the time-outs of hosts.

mod connections;
mod eviction;
mod timers;

use spindle_nvme_transport::ConnectionId;
use std::collections::VecDeque;
use std::sync::Arc;

use spindle_nvme_transport::{CloseReason, Transport, TransportKind};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Pool, SHARE_BYTES};
use spindle_reactor::slab::Slab;
use spindle_target_disk::{ChannelContext, Disk, Done, OpenError};

use crate::busy::Busy;
use crate::controller::Controller;
use crate::env::{AbortFrom, Claimants, DONE_BATCH, Env, Message};
use crate::notice::{Notice, Notices};
use crate::orphaned_commands::OrphanedCommands;
use crate::qpair::memory::WaitsFor;
use crate::qpair::request::Request;
use crate::qpair::{Liveness, Qpair, Retried, from_token};
use crate::shared::{ControllerShared, MEMORY_GROUPS, Registry};
use crate::snapshot::Snapshot;
use eviction::Unconnected;

/// Arguments of [`TargetCore::new`].
pub struct CoreSettings {
    /// Index of this core, from 0.
    pub core: usize,
    /// Number of cores of the process.
    pub cores: usize,
    /// Most connections on this core.
    pub connections: usize,
    /// Most commands in flight at one disk from this core.
    pub disk_depth: u32,
    /// Buffers of the data path.
    pub pool: Pool,
    /// Buffers that only admin and Connect commands use.
    pub admin_pool: Pool,
    /// Configuration at the start; replaced by [`Message::Snapshot`].
    pub snapshot: Arc<Snapshot>,
    /// Controllers of the process, shared by all cores.
    pub registry: Arc<Registry>,
    /// Time of the start, on the clock of [`TargetCore::set_time`].
    pub now: Nanos,
    /// Wall clock at the start, ms since 1970.
    pub wall_ms: u64,
}

/// Counters of a core, for operators.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CoreUse {
    /// Admin and I/O queues together.
    pub connections: usize,
    /// Commands that arrived since the start.
    pub commands: u64,
    /// Requests that waited for memory since the start.
    pub waits: u64,
}

/// One core's part of the target. See the module.
pub struct TargetCore<T: Transport> {
    env: Env,
    qpairs: Slab<Qpair<T>>,
    unconnected: Unconnected,
    /// Queue pairs with waiting requests, least recently served first.
    waiting: VecDeque<ConnectionId>,
    /// Queue pairs that may have output, by transport.
    send_ready: [Vec<ConnectionId>; TransportKind::ALL.len()],
    /// Transports of removed queue pairs, for `Connections::next_closed`.
    closed: Vec<(ConnectionId, T)>,
    /// Scratch list of [`TargetCore::for_each_qpair`].
    ids: Vec<ConnectionId>,
    /// `Env::claimants` at the last timer check.
    claimants_before: Claimants,
    /// Time of the next check of the time-outs.
    next_timer: Nanos,
    pass: Option<timers::Pass>,
    disk_depth: u32,
    /// The disk of each handle in [`Env::disks`]. The last reference of this core, which keeps the disk's
    /// slot in use ([`DiskSlot`](crate::snapshot::DiskSlot)).
    sources: Vec<Option<Arc<dyn Disk>>>,
    /// True while a disk that was removed from the configuration has commands in flight.
    is_closing_disks: bool,
    /// Why disks of the newest configuration are not open on this core.
    disk_errors: Vec<OpenError>,
    /// Generation of the configuration that each core has last reported to serve, by core index.
    applied: Vec<u64>,
}

impl<T: Transport> TargetCore<T> {
    /// Creates a core without connections and opens the disks of the snapshot ([`TargetCore::disk_errors`]).
    #[must_use]
    pub fn new(settings: CoreSettings) -> Self {
        let connections = settings.connections;
        let applied = vec![settings.snapshot.generation; settings.cores];
        settings.pool.set_connections(connections);
        settings.admin_pool.set_connections(connections + 1);
        let env = Env {
            core: settings.core,
            cores: settings.cores,
            now: settings.now,
            process_started: settings.now,
            wall_ms: settings.wall_ms,
            fast_path_bytes: Env::fast_path_bytes_of(settings.snapshot.limits.transfer_bytes),
            advertised_snapshot: Arc::clone(&settings.snapshot),
            snapshot: settings.snapshot,
            registry: settings.registry,
            pool: settings.pool,
            admin_pool: settings.admin_pool,
            disks: Vec::new(),
            outbox: VecDeque::with_capacity(64),
            notices: Notices::default(),
            current: ConnectionId::from_wire(0),
            is_draining: false,
            disk_claims: 0,
            claimants: Claimants::default(),
            starved: Claimants::default(),
            // The owner index after the last connection index.
            unconnected_holder: ConnectionId::from_wire(u32::try_from(connections).unwrap_or(u32::MAX)),
            is_admin_short: false,
            waiting_queues: 0,
            received: settings.now,
            wants_pass: false,
            late: Nanos::ZERO,
            scarce_bytes: [u64::MAX; MEMORY_GROUPS],
            waits: 0,
            commands: 0,
            done: Vec::with_capacity(DONE_BATCH),
            orphaned_commands: OrphanedCommands::default(),
            busy: Busy::new(settings.core),
            next_queues: Vec::new(),
        };
        let mut core = TargetCore {
            env,
            qpairs: Slab::with_capacity(connections),
            unconnected: Unconnected::default(),
            waiting: VecDeque::with_capacity(connections),
            send_ready: TransportKind::ALL.map(|_| Vec::with_capacity(connections)),
            closed: Vec::with_capacity(connections),
            ids: Vec::with_capacity(connections),
            claimants_before: Claimants::default(),
            next_timer: settings.now,
            pass: None,
            disk_depth: settings.disk_depth,
            sources: Vec::new(),
            is_closing_disks: false,
            disk_errors: Vec::new(),
            applied,
        };
        core.open_disks();
        core
    }

    /// Why disks of the newest configuration are not open on this core, one error for each: its commands to
    /// them fail with Namespace Not Ready. They are opened again with the next configuration.
    #[must_use]
    pub fn disk_errors(&self) -> &[OpenError] {
        &self.disk_errors
    }

    /// Opens the disks of the snapshot that have no handle yet, and closes removed disks that are idle.
    ///
    /// # Panics
    /// When a slot has another disk than this core has open in it: the snapshot was made before
    /// [`DiskSlot::is_free`](crate::snapshot::DiskSlot::is_free), and commands would go to the wrong disk.
    fn open_disks(&mut self) {
        let mut errors = Vec::new();
        let env = &mut self.env;
        let snapshot = Arc::clone(&env.snapshot);
        env.disks.resize_with(snapshot.disks.len().max(env.disks.len()), || None);
        self.sources.resize(env.disks.len(), None);
        let context = ChannelContext { core: env.core, pool: env.pool.clone(), depth: self.disk_depth };
        let handles = env.disks.iter_mut().zip(&mut self.sources);
        for ((handle, opened), source) in handles.zip(&snapshot.disks) {
            match (opened.as_ref(), source) {
                (Some(opened), Some(source)) => {
                    assert!(Arc::ptr_eq(opened, source), "the slot of a disk that is open has another");
                }
                (None, Some(source)) => match source.open(&context) {
                    Ok(disk) => (*handle, *opened) = (Some(disk), Some(Arc::clone(source))),
                    Err(error) => errors.push(error),
                },
                (_, None) => {}
            }
        }
        self.close_disks();
        let former = std::mem::replace(&mut self.disk_errors, errors);
        for error in &self.disk_errors {
            let reason = error.to_string();
            // It is opened again and again: told once.
            if former.iter().all(|former| former.to_string() != reason) {
                self.env.notice(Notice::DiskOpen { reason });
            }
        }
    }

    /// Closes disks that were removed from the configuration and have no commands in flight. Sets
    /// `is_closing_disks` if removed disks with commands are left.
    fn close_disks(&mut self) {
        let env = &mut self.env;
        self.is_closing_disks = false;
        let mut has_closed = false;
        for (index, handle) in env.disks.iter_mut().enumerate() {
            let is_gone = env.snapshot.disks.get(index).is_none_or(Option::is_none);
            match handle {
                Some(disk) if is_gone && disk.in_flight() > 0 => self.is_closing_disks = true,
                Some(_) if is_gone => {
                    *handle = None;
                    has_closed = true;
                }
                Some(_) | None => {}
            }
        }
        if has_closed {
            self.forget_closed_disks();
        }
    }

    /// Takes the indices of closed disks out of everything that outlives the turn, then gives up the disks,
    /// so that others may get their slots.
    #[cold]
    fn forget_closed_disks(&mut self) {
        let Env { disks, busy, .. } = &mut self.env;
        let is_closed = |index: usize| disks.get(index).is_none_or(Option::is_none);
        self.qpairs.iter_mut().for_each(|(_, qpair)| qpair.forget_disks(is_closed));
        busy.forget_disks(is_closed);
        let used = disks.iter().rposition(Option::is_some).map_or(0, |last| last + 1);
        disks.truncate(used);
        self.sources.truncate(used);
        for (source, handle) in self.sources.iter_mut().zip(disks.iter()) {
            source.take_if(|_| handle.is_none());
        }
    }

    /// Length of the table of disks that each turn walks.
    #[must_use]
    pub fn disk_slots(&self) -> usize {
        self.env.disks.len()
    }

    /// Begins a turn. `now`: time of a monotonic clock; `wall_ms`: wall clock in ms since 1970. The time
    /// since the last call is added to the busy time of namespaces that had commands meanwhile.
    #[inline]
    pub fn set_time(&mut self, now: Nanos, wall_ms: u64) {
        let before = std::mem::replace(&mut self.env.now, now);
        let Env { busy, disks, .. } = &mut self.env;
        if !busy.is_empty() {
            busy.end_turn(now - before, disks);
        }
        self.env.wall_ms = wall_ms;
    }

    /// Most bytes of memory of a connection with a queue of `entries`: queue pair, requests, controller,
    /// share counters in the pools, and entries in the lists of the core and the queue pair. `cores`: of the
    /// process, as each has share counters for every host. Heap memory of the transport is not included.
    #[must_use]
    pub fn connection_bytes(entries: u16, cores: usize) -> usize {
        let entries = usize::from(entries);
        // A connection is in at most seven lists of the core.
        Slab::<Qpair<T>>::bytes_for(1)
            + 7 * size_of::<ConnectionId>()
            // Share counters in the pool and the admin pool: of the connection, and of its host on all cores.
            + 2 * SHARE_BYTES * cores.saturating_add(1)
            + Slab::<Request>::bytes_for(entries)
            + entries * size_of::<ConnectionId>()
            + Controller::bytes()
    }

    /// Returns the queue pair of a connection; `None` once it is removed.
    #[must_use]
    pub fn qpair(&self, id: ConnectionId) -> Option<&Qpair<T>> {
        self.qpairs.get(id.0)
    }

    /// Runs `act` on a queue pair and marks the queue pair as possibly having output.
    #[inline]
    fn with_qpair(&mut self, id: ConnectionId, act: impl FnOnce(&mut Qpair<T>, &mut Env) -> Liveness) {
        self.run_qpair(id, true, act);
    }

    /// Runs `act` on a queue pair. Removes the queue pair if it has closed, and adds it to `waiting` if
    /// requests wait. `has_output`: `act` may cause output that the caller does not send itself.
    #[inline]
    fn run_qpair(
        &mut self,
        id: ConnectionId,
        has_output: bool,
        act: impl FnOnce(&mut Qpair<T>, &mut Env) -> Liveness,
    ) {
        let Some(qpair) = self.qpairs.get_mut(id.0) else { return };
        self.env.current = id;
        let liveness = act(qpair, &mut self.env);
        if liveness == Liveness::Closed {
            if let Some(qpair) = self.qpairs.remove(id.0) {
                self.closed.push((id, qpair.transport));
            }
            return;
        }
        if has_output && qpair.set_send_ready() {
            self.send_ready[qpair.peer.transport as usize].push(id);
        }
        if qpair.has_waiting() && !qpair.is_listed {
            qpair.is_listed = true;
            self.waiting.push_back(id);
            qpair.claim_memory(&mut self.env);
        }
    }

    /// As [`TargetCore::with_qpair`], for actions that read no events and so do not see `Closed`.
    fn with_open_qpair(&mut self, id: ConnectionId, act: impl FnOnce(&mut Qpair<T>, &mut Env)) {
        self.with_qpair(id, |qpair, env| {
            act(qpair, env);
            Liveness::Open
        });
    }

    /// Polls the disks, closes removed disks, retries waiting requests, checks the time-outs every 50 ms,
    /// drains during shutdown, and executes messages to this core. True when a disk or a retry made progress,
    /// or when new requests must queue behind waiting requests.
    pub fn poll(&mut self) -> bool {
        let has_worked = if self.waiting.is_empty() { self.poll_disks() } else { self.poll_waiting() };
        if self.is_closing_disks {
            self.close_disks();
        }
        if !self.env.next_queues.is_empty() {
            self.poll_nexts();
        }
        self.poll_timers();
        if self.env.is_draining {
            self.for_each_qpair(Qpair::drain);
        }
        self.deliver_own();
        has_worked
    }

    /// Replies to the Next commands that have entries or have waited long enough.
    #[cold]
    fn poll_nexts(&mut self) {
        let mut at = 0;
        while let Some(id) = self.env.next_queues.get(at).copied() {
            let qpair = self.qpairs.get(id.0).filter(|qpair| qpair.has_nexts());
            let Some(qpair) = qpair else {
                self.env.next_queues.swap_remove(at);
                continue;
            };
            if qpair.has_due_next(&self.env) {
                self.with_open_qpair(id, Qpair::step_nexts);
            }
            at += 1;
        }
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
        // If the queue pair was removed, `done` is dropped and its buffer freed.
        self.with_open_qpair(id, |qpair, env| {
            qpair.has_submitted = false;
            qpair.on_done(id, env, slot, done);
        });
        if !self.env.orphaned_commands.is_empty() {
            self.on_orphan_done(id);
        }
    }

    /// Counts a completed command that may be of an orphan. After the last known command, queries the disks
    /// for commands that are left.
    #[cold]
    fn on_orphan_done(&mut self, id: ConnectionId) {
        if self.env.orphaned_commands.on_done(id) {
            let commands = self.env.cancel_commands_of(id);
            self.env.orphaned_commands.set_commands(id, commands);
        }
    }

    fn expire_orphans(&mut self) {
        while let Some(orphan) = self.env.orphaned_commands.next_expired(self.env.now) {
            let (controller, commands) = (&orphan.controller, orphan.commands);
            let (host, subsystem) = (controller.host_nqn, controller.subsystem_nqn);
            self.env.notice(Notice::Orphan { host, subsystem, commands });
        }
    }

    /// Polls the disks and retries waiting requests, round-robin over the queue pairs. A queue pair that
    /// made progress moves to the end; any other keeps its position, so that a deep queue does not starve
    /// a shallow one. What a request is entitled to and does not find is claimed: neither the queue pairs
    /// behind it nor new requests take it, so that small commands do not starve a large one. True when a
    /// retry made progress, or may in the next turn.
    #[cold]
    fn poll_waiting(&mut self) -> bool {
        // Disks claim buffers as waiting requests do, and before them. What they claim while no request
        // waits stays claimed until one does.
        self.env.clear_claims();
        let mut has_worked = self.poll_disks();
        let mut at = 0;
        for _ in 0..self.waiting.len() {
            let Some(id) = self.waiting.get(at).copied() else { break };
            let mut retried = Retried::default();
            self.with_open_qpair(id, |qpair, env| {
                retried = qpair.retry_buffers(id, env);
                // What disks have ended in this turn must not wait for the commands that they were given now.
                qpair.has_submitted = false;
                qpair.is_listed = retried.has_waiting;
                qpair.claim_memory(env);
            });
            has_worked |= retried.has_progress;
            if retried.has_waiting && !retried.has_progress {
                at += 1;
                continue;
            }
            self.waiting.remove(at);
            if retried.has_waiting {
                self.waiting.push_back(id);
            }
        }
        has_worked || self.env.disk_claims != 0
    }

    fn for_each_qpair(&mut self, mut act: impl FnMut(&mut Qpair<T>, &mut Env)) {
        let mut ids = std::mem::take(&mut self.ids);
        ids.extend(self.qpairs.slots().map(ConnectionId));
        for id in ids.drain(..) {
            self.with_open_qpair(id, &mut act);
        }
        self.ids = ids;
    }

    /// Executes a message from another core or from the app.
    pub fn on_message(&mut self, message: Message) {
        self.execute_message(message);
        self.deliver_own();
    }

    fn execute_message(&mut self, message: Message) {
        match message {
            Message::CloseQueues(controller, reason) => {
                self.close_all(reason, |qpair| qpair.is_io_queue_of(&controller, None));
            }
            Message::CloseController(controller, reason) => {
                self.close_all(reason, |qpair| qpair.is_admin_queue_of(&controller));
            }
            Message::Abort { controller, qid, cid, from } => self.abort(&controller, qid, cid, from),
            Message::Aborted { from, is_aborted } => {
                self.with_open_qpair(from.qpair, |qpair, env| {
                    qpair.on_abort_answer(env, from.slot, is_aborted)
                });
            }
            Message::Failed(controller, record) => {
                // A look-up by slot instead of a search: hosts can cause any number of these messages.
                let qpair = self.qpairs.get_mut(controller.admin_queue().0);
                if let Some(qpair) = qpair.filter(|qpair| qpair.is_admin_queue_of(&controller)) {
                    qpair.on_failed(record);
                }
            }
            Message::Snapshot(snapshot) => self.on_snapshot(snapshot),
            Message::SnapshotApplied { core, generation } => self.on_snapshot_applied(core, generation),
            Message::Shutdown => self.env.is_draining = true,
        }
    }

    fn close_all(&mut self, reason: CloseReason, must_close: impl Fn(&Qpair<T>) -> bool) {
        self.for_each_qpair(|qpair, env| {
            if must_close(qpair) {
                qpair.close(env, reason);
            }
        });
    }

    fn find(&self, is_it: impl Fn(&Qpair<T>) -> bool) -> Option<ConnectionId> {
        self.qpairs.iter().find(|(_, qpair)| is_it(qpair)).map(|(id, _)| ConnectionId(id))
    }

    fn abort(&mut self, controller: &Arc<ControllerShared>, qid: u16, cid: u16, from: AbortFrom) {
        let mut is_aborted = false;
        if let Some(id) = self.find(|qpair| qpair.is_io_queue_of(controller, Some(qid))) {
            self.with_open_qpair(id, |qpair, env| is_aborted = qpair.abort(env, cid, None));
        }
        self.env.send(from.core, Message::Aborted { from, is_aborted });
    }

    /// Opens and closes disks, applies a new configuration to the I/O queues at once, and reports its
    /// generation to all cores. The configuration is advertised to hosts once all cores serve it: a host
    /// reads from a new namespace on all its queues, and drops the namespace after a status with DNR.
    fn on_snapshot(&mut self, snapshot: Arc<Snapshot>) {
        let old = std::mem::replace(&mut self.env.snapshot, snapshot);
        self.env.fast_path_bytes = Env::fast_path_bytes_of(self.env.snapshot.limits.transfer_bytes);
        self.env.disks.iter_mut().flatten().for_each(|disk| disk.reconfigure());
        self.open_disks();
        self.for_each_qpair(|qpair, env| {
            if !qpair.is_admin_queue() {
                qpair.on_snapshot(env, &old);
            }
        });
        let (core, generation) = (self.env.core, self.env.snapshot.generation);
        self.env.broadcast(&Message::SnapshotApplied { core, generation });
    }

    fn on_snapshot_applied(&mut self, core: usize, generation: u64) {
        if let Some(applied) = self.applied.get_mut(core) {
            *applied = generation;
        }
        let own = self.env.snapshot.generation;
        if self.applied.iter().any(|applied| *applied < own) {
            return;
        }
        if self.env.advertised_snapshot.generation == own {
            return;
        }
        let old = std::mem::replace(&mut self.env.advertised_snapshot, Arc::clone(&self.env.snapshot));
        self.for_each_qpair(|qpair, env| {
            if qpair.is_admin_queue() {
                qpair.on_snapshot(env, &old);
            }
        });
    }

    /// Executes the messages in the outbox that are addressed to this core.
    #[inline]
    fn deliver_own(&mut self) {
        // Messages to this core that are queued meanwhile are executed in the same loop. The loop ends, since
        // no message causes itself. The order of messages to other cores does not change.
        let mut at = 0;
        while let Some((to, _)) = self.env.outbox.get(at) {
            if *to != self.env.core {
                at += 1;
            } else if let Some((_, message)) = self.env.outbox.remove(at) {
                self.execute_message(message);
            }
        }
    }

    /// Removes the oldest message for another core. Returns the index of that core, and the message.
    pub fn next_message(&mut self) -> Option<(usize, Message)> {
        self.env.outbox.pop_front()
    }

    /// Clears the mark of a queue pair that may have output, of any transport, and returns its slot; `None`:
    /// no queue pair is marked.
    #[inline]
    pub fn next_send_ready(&mut self) -> Option<ConnectionId> {
        TransportKind::ALL.into_iter().find_map(|transport| self.next_send_ready_over(transport))
    }

    /// As [`TargetCore::next_send_ready`], for queue pairs of one transport.
    #[inline]
    pub fn next_send_ready_over(&mut self, transport: TransportKind) -> Option<ConnectionId> {
        while let Some(id) = self.send_ready[transport as usize].pop() {
            if let Some(qpair) = self.qpairs.get_mut(id.0) {
                qpair.is_send_ready = false;
                return Some(id);
            }
        }
        None
    }

    /// Notices for the log, which the caller drains.
    pub fn notices(&mut self) -> &mut Notices {
        &mut self.env.notices
    }

    /// True when the core may sleep until input arrives: no retry may succeed, no message or output of this
    /// core is pending, and no disk must be polled.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        let may_succeed = |id: &ConnectionId| {
            let waits_for = self.qpairs.get(id.0).and_then(|qpair| qpair.waits_for(&self.env));
            waits_for.is_none_or(WaitsFor::may_succeed)
        };
        !self.waiting.iter().any(may_succeed)
            && self.env.outbox.is_empty()
            && self.send_ready.iter().all(Vec::is_empty)
            && self.env.disks.iter().flatten().all(|disk| disk.may_sleep())
    }

    /// True when no disk has commands of this core in flight.
    #[must_use]
    pub fn is_disk_idle(&self) -> bool {
        self.env.disks.iter().flatten().all(|disk| disk.in_flight() == 0)
    }

    /// True after [`Message::Shutdown`].
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.env.is_draining
    }

    /// Slots of all connections.
    pub fn connections(&self) -> impl Iterator<Item = ConnectionId> {
        self.qpairs.slots().map(ConnectionId)
    }

    /// Current values of the core's counters.
    #[must_use]
    pub fn usage(&self) -> CoreUse {
        CoreUse { connections: self.qpairs.len(), commands: self.env.commands, waits: self.env.waits }
    }

    /// The data pool and the admin pool.
    #[must_use]
    pub fn pools(&self) -> (&Pool, &Pool) {
        (&self.env.pool, &self.env.admin_pool)
    }

    /// The newest configuration that all cores serve, as advertised to hosts.
    #[must_use]
    pub fn advertised_snapshot(&self) -> &Arc<Snapshot> {
        &self.env.advertised_snapshot
    }

    /// The newest configuration of this core.
    #[must_use]
    pub fn snapshot(&self) -> &Arc<Snapshot> {
        &self.env.snapshot
    }
}
