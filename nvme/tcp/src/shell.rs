//! The shell of one core: moves bytes between connections and sockets. `Conn` implements the protocol.
//!
//! ```text
//!   poll:   direct connections ── recv into the core's one batch ──> Conn ── step_deferred ──> sendmsg
//!           watched connections wait in the reactor's epoll, which reports readiness by on_ready
//!   flush:  connections with replies that disks, timers or messages caused; replies that may leave with
//!           those of disks (`may_send_later`) wait for them until the end of the next turn
//! ```
//!
//! A connection is direct while it has traffic: `recv` in each turn costs less than epoll. After
//! `WATCH_AFTER` without data the connection is watched by epoll and costs nothing, so that a thousand idle
//! connections do not slow a busy one. The shell retries the send of a direct connection with a full socket
//! buffer in each turn. Such a connection is watched for writability after `WATCH_AFTER`, or immediately if
//! more than `FEW_CONNECTIONS` are direct.
//!
//! A turn has a budget (`BUDGET`): with many busy connections it serves some of them, and the next turn
//! continues with the others. So disks, timers and new connections do not wait for all.
//!
//! Time-outs are judged after what arrived: before a connection's deadline ends it, the shell receives from
//! it, and for the time-outs of the core it makes receive passes ([`Connections::wants_pass`]).

use spindle_nvme_transport::ConnectionId;
use std::time::Duration;

use arrayvec::ArrayString;
use spindle_nvme_transport::admission::Admitted;
use spindle_nvme_transport::{Connections, Holds, Peer, TransportKind};
use spindle_reactor::clock::Nanos;
use spindle_reactor::net::{Interest, Received, Sent, Socket, Watcher};

use crate::controller::{Conn, ConnConfig};
use crate::{Phase, RxBatch};

/// Settings of a shell. The documentation of each field contains the default and its reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShellConfig {
    /// Maximum bytes of one receive into the batch. 256 KiB: see docs/lab-notes.md, "Trials".
    pub batch_bytes: usize,
    /// TCP_USER_TIMEOUT in ms: time without acknowledgement of sent bytes after which the kernel closes the
    /// connection. 30 s: longer than the failover of a switch, shorter than the time-outs of hosts.
    pub user_timeout_ms: u32,
    /// SO_SNDBUF and SO_RCVBUF in bytes; 0: the kernel tunes both automatically.
    pub socket_buffer_bytes: usize,
    /// TCP_CONGESTION; `None`: the system's default. `cubic` does not pace: pacing (bbr) costs throughput.
    pub congestion: Option<ArrayString<16>>,
}

impl Default for ShellConfig {
    fn default() -> Self {
        ShellConfig {
            batch_bytes: 256 << 10,
            user_timeout_ms: 30_000,
            socket_buffer_bytes: 0,
            congestion: ArrayString::from("cubic").ok(),
        }
    }
}

/// Time since [`Link::last_active`] after which a connection is watched by epoll: longer than a host's pause
/// between commands.
const WATCH_AFTER: Nanos = Nanos::from_ms(1);
/// Interval between checks of the connections' deadlines.
const TIMER_PERIOD: Nanos = Nanos::from_ms(50);
/// Maximum rounds over at most [`FEW_CONNECTIONS`] direct connections in a turn without data.
const EMPTY_ROUNDS_MAX: u32 = 8;
const FEW_CONNECTIONS: usize = 4;
/// Maximum receives of one connection in a turn, so that one connection cannot starve the others.
const RECEIVES_PER_TURN: u32 = 4;
/// Work budget of a turn. A receive of data, end of stream or error costs 1; each [`BUDGET_BYTES`] of one
/// receive or send cost 1 more. 64 is a few hundred microseconds.
const BUDGET: usize = 64;
const BUDGET_BYTES: usize = 64 << 10;
/// Maximum receives of one connection in a receive pass: a host that sends fast cannot hold up the time-outs
/// of others. What its socket had when the pass began, at most some MiB (tcp_rmem), is then received.
const RECEIVES_PER_PASS: u32 = 1024;

struct Link {
    id: ConnectionId,
    socket: Socket,
    /// Time at which the connection was accepted, became direct, last received, or last resumed a send.
    /// Replies that [`Shell::flush`] sends do not count.
    last_active: Nanos,
    is_direct: bool,
    /// Readiness registered with epoll; `None`: not registered.
    interest: Option<Interest>,
    /// The socket's send buffer was full at the last send.
    is_full: bool,
    /// The sending side is shut down.
    is_shut: bool,
    /// Replies wait for those of disks; the connection is in `Shell::held` or `Shell::held_before`.
    is_held: bool,
}

/// A connection that was accepted, for [`Shell::accept`].
#[derive(Debug)]
pub struct Incoming {
    /// The connected socket, in non-blocking mode.
    pub socket: Socket,
    /// Transport, listener and addresses, for discovery and logs.
    pub peer: Peer,
    /// Constants from the configuration.
    pub config: ConnConfig,
    /// Admission of the connection, which counts for its address until Connect succeeds.
    pub admitted: Admitted,
}

/// The TCP sockets of one core.
pub struct Shell {
    config: ShellConfig,
    watcher: Watcher,
    /// `None` while the batch is loaded into a connection.
    batch: Option<RxBatch>,
    /// By index of the [`ConnectionId`].
    links: Vec<Option<Link>>,
    direct: Vec<ConnectionId>,
    /// Index into `direct` of the connection served next.
    next_direct: usize,
    /// Connections whose replies wait for those of disks since the last or this turn. Never grows.
    held: Vec<ConnectionId>,
    /// `held` of the turn before.
    held_before: Vec<ConnectionId>,
    /// Remaining [`BUDGET`] of the turn.
    budget: usize,
    now: Nanos,
    /// Time of the next call of `on_timer`: the next check of deadlines, or at once in a receive pass.
    next_timer: Nanos,
    next_deadlines: Nanos,
    pass: Option<Pass>,
}

/// A receive pass in progress ([`Connections::wants_pass`]).
#[derive(Clone, Copy, Default)]
struct Pass {
    /// Index in [`Shell::links`] of the connection to receive from.
    link: usize,
    receives: u32,
}

/// Returns the maximum memory in bytes of a connection with a queue of `entries`: in the shell and on the
/// heap of its [`Conn`]. Without `size_of::<Conn>()`, capsule stash and unread bytes.
#[must_use]
pub fn connection_bytes(entries: u16) -> usize {
    // An identifier each in `direct`, `held` and `held_before`.
    size_of::<Option<Link>>() + 3 * size_of::<ConnectionId>() + Conn::heap_bytes(entries)
}

impl Shell {
    /// Creates a shell for at most `connections`. Keys of `watcher` are for [`Shell::on_ready`].
    #[must_use]
    pub fn new(config: ShellConfig, connections: usize, watcher: Watcher) -> Shell {
        Shell {
            config,
            watcher,
            batch: Some(RxBatch::new(config.batch_bytes)),
            links: (0..connections).map(|_| None).collect(),
            direct: Vec::with_capacity(connections),
            next_direct: 0,
            held: Vec::with_capacity(connections),
            held_before: Vec::with_capacity(connections),
            budget: 0,
            now: Nanos::ZERO,
            next_timer: Nanos::ZERO,
            next_deadlines: Nanos::ZERO,
            pass: None,
        }
    }

    /// Adds an accepted connection. Returns false if `core` did not accept it; the socket is closed.
    pub fn accept<C: Connections<Conn: Holds<Conn>>>(
        &mut self,
        core: &mut C,
        incoming: Incoming,
        now: Nanos,
    ) -> bool {
        let Incoming { socket, peer, config, admitted } = incoming;
        self.configure(&socket);
        let Ok(id) = core.accept(Holds::wrap(Conn::new(config, now)), peer) else { return false };
        core.set_admitted(id, admitted);
        let link = Link {
            id,
            socket,
            last_active: now,
            is_direct: true,
            interest: None,
            is_full: false,
            is_shut: false,
            is_held: false,
        };
        if let Some(entry) = self.links.get_mut(id.index()) {
            *entry = Some(link);
        }
        self.direct.push(id);
        true
    }

    /// Sets socket options. Errors are ignored: the connection works without them.
    fn configure(&self, socket: &Socket) {
        let _ = socket.set_nodelay(true);
        let _ = socket.set_user_timeout(self.config.user_timeout_ms);
        let _ = socket.set_keepalive(Duration::from_secs(10), Duration::from_secs(5), 3);
        if self.config.socket_buffer_bytes > 0 {
            let _ = socket.set_buffers(self.config.socket_buffer_bytes, self.config.socket_buffer_bytes);
        }
        if let Some(name) = &self.config.congestion {
            let _ = socket.set_congestion(name);
        }
    }

    /// Closes a connection at once to free its slot for another. Returns false if `id` is not in this shell.
    #[cold]
    pub fn evict<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, id: ConnectionId) -> bool {
        if self.link(id).is_none() {
            return false;
        }
        if let Some(conn) = conn_of(core, id) {
            conn.on_reset();
        }
        core.step_deferred(id);
        self.remove_closed(core);
        true
    }

    /// Returns the count of direct connections.
    #[must_use]
    pub fn direct_count(&self) -> usize {
        self.direct.len()
    }

    /// Serves the direct connections within the turn's budget, and checks deadlines once per `TIMER_PERIOD`.
    /// Returns true if anything was received (data, end of stream, error) or sent, in a receive pass, and
    /// while replies wait for those of disks.
    pub fn poll<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, now: Nanos) -> bool {
        self.now = now;
        let mut has_worked = self.send_held(core);
        self.budget = BUDGET;
        // With few connections an empty round costs less than the rest of the core's turn, and another round
        // finds the next command sooner.
        for _ in 0..EMPTY_ROUNDS_MAX {
            has_worked |= self.poll_direct(core);
            if has_worked || self.direct.len() > FEW_CONNECTIONS {
                break;
            }
        }
        if now >= self.next_timer {
            has_worked |= self.on_timer(core);
        }
        has_worked
    }

    /// Sends the replies that have waited since the turn before the last. True: replies wait, or have waited.
    #[inline]
    fn send_held<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C) -> bool {
        if !self.is_holding() {
            return false;
        }
        std::mem::swap(&mut self.held, &mut self.held_before);
        while let Some(id) = self.held.pop() {
            self.send_ready(core, id);
        }
        true
    }

    /// Returns true if replies wait for those of disks. The second next [`Shell::poll`] sends them at the
    /// latest. The core must not sleep meanwhile.
    #[must_use]
    #[inline]
    pub fn is_holding(&self) -> bool {
        !self.held.is_empty() || !self.held_before.is_empty()
    }

    /// Continues or begins a receive pass, and checks the deadlines. True: a pass is in progress.
    #[cold]
    fn on_timer<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C) -> bool {
        if self.pass.is_none() && core.wants_pass(TransportKind::Tcp) {
            self.pass = Some(Pass::default());
        }
        self.continue_pass(core);
        if self.now >= self.next_deadlines {
            self.next_deadlines = self.now + TIMER_PERIOD;
            self.on_time(core, self.now);
        }
        let is_passing = self.pass.is_some();
        self.next_timer = if is_passing { self.now } else { self.next_deadlines };
        is_passing
    }

    /// Receives from the next connections of a receive pass, direct and watched ones, each until its socket
    /// is empty. The budget is that of a turn again, and an empty receive costs 1 too.
    fn continue_pass<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C) {
        self.budget = BUDGET;
        while let Some(Pass { link, receives }) = self.pass {
            if self.budget == 0 {
                return;
            }
            let Some(entry) = self.links.get(link) else {
                self.pass = None;
                return core.passed(TransportKind::Tcp);
            };
            let is_empty = entry.as_ref().map(|link| link.id).is_none_or(|id| self.drain(core, id));
            let is_over = is_empty || receives + 1 >= RECEIVES_PER_PASS;
            self.pass = Some(if is_over {
                Pass { link: link + 1, receives: 0 }
            } else {
                Pass { link, receives: receives + 1 }
            });
        }
    }

    /// Receives once from a connection, direct or watched. Returns true if its socket is empty then, or the
    /// connection is paused or gone.
    fn drain<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, id: ConnectionId) -> bool {
        self.budget = self.budget.saturating_sub(1);
        let mut has_worked = self.retry_send(core, id);
        let received = self.receive(core, id);
        if received != Receive::Empty {
            has_worked = true;
            self.send(core, id);
        }
        if has_worked {
            self.set_direct(id);
        }
        self.update_link(core, id, has_worked);
        received != Receive::Full
    }

    /// Serves each direct connection once, or as many as the budget allows. Returns true if anything was
    /// received or sent.
    #[inline]
    fn poll_direct<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C) -> bool {
        let mut has_worked = false;
        for _ in 0..self.direct.len() {
            if self.budget == 0 {
                break;
            }
            let next = self.direct.get(self.next_direct).or_else(|| self.direct.first());
            let Some(id) = next.copied() else { break };
            if self.next_direct >= self.direct.len() {
                self.next_direct = 0;
            }
            has_worked |= self.serve(core, id);
            // If `serve` has removed the connection (watched, closed), another one is at this index.
            if self.direct.get(self.next_direct) == Some(&id) {
                self.next_direct += 1;
            }
        }
        has_worked
    }

    /// Registers all direct connections with epoll, so that the core can sleep. A connection stays direct if
    /// the registration fails.
    pub fn watch_all(&mut self) {
        // Backwards: a connection that stays direct is pushed to the end and must not be visited again.
        for at in (0..self.direct.len()).rev() {
            let id = self.direct[at];
            self.set_watched(id);
        }
    }

    /// Makes the connection with this epoll key direct, if it is open; the next [`Shell::poll`] serves it.
    pub fn on_ready(&mut self, now: Nanos, key: u32) {
        self.now = now;
        let id = ConnectionId::from_wire(key);
        if self.link(id).is_some() {
            self.set_direct(id);
        }
    }

    #[inline]
    fn link(&mut self, id: ConnectionId) -> Option<&mut Link> {
        self.links.get_mut(id.index())?.as_mut().filter(|link| link.id == id)
    }

    fn set_direct(&mut self, id: ConnectionId) {
        let Some(link) = self.links.get_mut(id.index()).and_then(Option::as_mut) else { return };
        if link.interest.take().is_some() {
            let _ = self.watcher.remove(&link.socket);
        }
        link.last_active = self.now;
        if !link.is_direct {
            link.is_direct = true;
            self.direct.push(id);
        }
    }

    fn set_watched(&mut self, id: ConnectionId) {
        if let Some(at) = self.direct.iter().position(|direct| *direct == id) {
            self.direct.swap_remove(at);
        }
        let Some(link) = self.links.get_mut(id.index()).and_then(Option::as_mut) else { return };
        link.is_direct = false;
        let interest = Interest { read: true, write: link.is_full };
        if self.watcher.add(&link.socket, id.to_wire(), interest).is_ok() {
            link.interest = Some(interest);
        } else {
            // Not registered: the connection must stay direct.
            link.is_direct = true;
            self.direct.push(id);
        }
    }

    /// Receives, handles events and sends for one connection. Returns true if anything was received or sent.
    #[inline]
    fn serve<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, id: ConnectionId) -> bool {
        let mut has_worked = self.retry_send(core, id);
        for _ in 0..RECEIVES_PER_TURN {
            let received = self.receive(core, id);
            if received != Receive::Empty {
                has_worked = true;
                if received == Receive::Full || !Self::may_send_later(core, id) {
                    self.send(core, id);
                }
            }
            if received != Receive::Full {
                break;
            }
        }
        self.update_link(core, id, has_worked);
        has_worked
    }

    /// Returns true if what is queued may wait for the replies to commands that disks were given now. A host
    /// sends its next commands as the replies come. If a batch is answered in two parts, its queue has two
    /// smaller batches from then on, each with a receive and a send of its own. While data is fetched nothing
    /// waits: a host sends the data for an R2T meanwhile.
    #[inline]
    fn may_send_later<C: Connections<Conn: Holds<Conn>>>(core: &mut C, id: ConnectionId) -> bool {
        core.has_submitted(id)
            && conn_of(core, id).is_some_and(|conn| conn.phase() == Phase::Open && !conn.is_fetching())
    }

    /// Sends again after a full socket buffer. Returns true if the socket accepted any bytes or failed.
    #[inline]
    fn retry_send<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, id: ConnectionId) -> bool {
        let Some(link) = self.links.get_mut(id.index()).and_then(Option::as_mut) else { return false };
        if !link.is_full {
            return false;
        }
        link.is_full = false;
        self.send(core, id)
    }

    /// Receives once, and calls `Connections::step_deferred` for the received bytes, end of stream or error.
    #[inline]
    fn receive<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, id: ConnectionId) -> Receive {
        let Some(link) = self.links.get_mut(id.index()).and_then(Option::as_mut) else {
            return Receive::Empty;
        };
        let Some(conn) = conn_of(core, id) else { return Receive::Empty };
        if conn.is_paused() {
            return Receive::Empty;
        }
        let mut batch = self.batch.take().unwrap_or_else(|| RxBatch::new(self.config.batch_bytes));
        let (received, is_whole) = conn.receive_from(&link.socket, &mut batch);
        let result = match received {
            Received::Bytes(count) => {
                self.budget = self.budget.saturating_sub(1 + count / BUDGET_BYTES);
                conn.load(batch);
                core.step_deferred(id);
                let Some(conn) = conn_of(core, id) else {
                    // `step` removed the connection and the batch in it; the next receive allocates a batch.
                    return Receive::Partial;
                };
                batch = conn.unload();
                if is_whole { Receive::Full } else { Receive::Partial }
            }
            Received::Empty => Receive::Empty,
            Received::Closed | Received::Failed(_) => {
                self.budget = self.budget.saturating_sub(1);
                if received == Received::Closed {
                    self.send(core, id);
                }
                if let Some(conn) = conn_of(core, id) {
                    if received == Received::Closed { conn.on_peer_closed() } else { conn.on_reset() }
                }
                core.step_deferred(id);
                Receive::Partial
            }
        };
        self.batch = Some(batch);
        result
    }

    /// Sends until nothing is queued or the socket buffer is full. Returns true if any bytes were accepted or
    /// the socket failed.
    #[inline]
    fn send<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, id: ConnectionId) -> bool {
        let Some(link) = self.links.get_mut(id.index()).and_then(Option::as_mut) else { return false };
        send_queued(core, link, &mut self.budget, false).is_none_or(|(_, has_sent)| has_sent)
    }

    /// Updates the link of a connection that was served. Reports a violation, and shuts down or closes the
    /// socket according to the phase. Otherwise decides whether it stays direct.
    #[inline]
    fn update_link<C: Connections<Conn: Holds<Conn>>>(
        &mut self,
        core: &mut C,
        id: ConnectionId,
        has_worked: bool,
    ) {
        let Some(link) = self.links.get_mut(id.index()).and_then(Option::as_mut) else { return };
        let Some(conn) = conn_of(core, id) else {
            self.remove_closed(core);
            return;
        };
        match conn.phase() {
            Phase::Open => {}
            Phase::Draining | Phase::HalfClosed | Phase::Closed => {
                if let Some(violation) = conn.take_violation() {
                    core.on_violation(id, violation.to_string());
                }
                let Some(conn) = conn_of(core, id) else { return };
                if conn.phase() == Phase::HalfClosed && !link.is_shut {
                    link.is_shut = true;
                    let _ = link.socket.shutdown_write();
                }
                if conn.phase() == Phase::Closed {
                    core.step(id);
                    self.remove_closed(core);
                    return;
                }
            }
        }
        if has_worked {
            link.last_active = self.now;
            return;
        }
        let is_silent = self.now.0.saturating_sub(link.last_active.0) >= WATCH_AFTER.0;
        // With many direct connections a full socket is watched now: a retry per turn costs a system call.
        if link.is_direct && (is_silent || link.is_full && self.direct.len() > FEW_CONNECTIONS) {
            self.set_watched(id);
        }
    }

    fn remove_closed<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C) {
        while let Some((id, _conn)) = core.next_closed() {
            if let Some(at) = self.direct.iter().position(|direct| *direct == id) {
                self.direct.swap_remove(at);
            }
            if let Some(link) = self.links.get_mut(id.index()).and_then(Option::take)
                && link.interest.is_some()
            {
                let _ = self.watcher.remove(&link.socket);
            }
        }
    }

    /// Sends the replies of a connection that were caused by a disk, timer or message, or that waited for
    /// such replies. If all of them may wait (`may_send_later`), they wait for those of disks until the end
    /// of the next turn: the second next [`Shell::poll`] sends them at the latest. Another flush meanwhile
    /// sends them, also those of a new batch. Returns false if `id` is not in this shell.
    pub fn flush<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, id: ConnectionId) -> bool {
        if Self::may_send_later(core, id)
            && conn_of(core, id).is_some_and(|conn| conn.wants_send() && !conn.has_unread())
            && self.held.len() < self.held.capacity()
            && let Some(link) = self.link(id).filter(|link| !link.is_held)
        {
            link.is_held = true;
            self.held.push(id);
            return true;
        }
        self.send_ready(core, id)
    }

    /// Sends what is queued, and handles received events that are left. False: `id` is not in this shell.
    fn send_ready<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, id: ConnectionId) -> bool {
        let Some(link) = self.links.get_mut(id.index()).and_then(Option::as_mut).filter(|it| it.id == id)
        else {
            return false;
        };
        link.is_held = false;
        let phase = send_queued(core, link, &mut self.budget, true).map(|(phase, _)| phase);
        if link.is_full && !link.is_direct && !link.interest.is_some_and(|interest| interest.write) {
            self.set_direct(id); // `set_watched` later adds writability to its epoll events
        }
        // An open connection is watched, if it is to be, when it is served next.
        if phase != Some(Phase::Open) {
            self.update_link(core, id, false);
            self.remove_closed(core);
        }
        true
    }

    /// Calls [`Conn::on_time`] of each connection whose deadline has passed, also after a receive.
    fn on_time<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, now: Nanos) {
        for index in 0..self.links.len() {
            let Some(id) = self.links.get(index).and_then(Option::as_ref).map(|link| link.id) else {
                continue;
            };
            let Some(conn) = conn_of(core, id) else { continue };
            if conn.deadline().is_none_or(|deadline| deadline > now) {
                continue;
            }
            self.drain(core, id);
            let Some(conn) = conn_of(core, id) else { continue };
            if conn.deadline().is_some_and(|deadline| deadline <= now) {
                conn.on_time(now);
                core.step_deferred(id);
                self.update_link(core, id, true);
            }
        }
    }
}

/// Returns the connection; `None`: it has closed, or it belongs to another transport.
#[inline]
fn conn_of<C: Connections<Conn: Holds<Conn>>>(core: &mut C, id: ConnectionId) -> Option<&mut Conn> {
    core.transport(id)?.held()
}

/// Sends what a connection has queued, until nothing is left or the socket buffer is full. With `resumes`,
/// handles first what was received and not read. Returns the phase, and true if any bytes were accepted or
/// the socket failed; `None` if the connection is gone. Only a step may remove the connection.
fn send_queued<C: Connections<Conn: Holds<Conn>>>(
    core: &mut C,
    link: &mut Link,
    budget: &mut usize,
    resumes: bool,
) -> Option<(Phase, bool)> {
    let mut conn = conn_of(core, link.id)?;
    if resumes && conn.has_unread() && !conn.is_paused() {
        core.step(link.id);
        conn = conn_of(core, link.id)?;
    }
    let mut has_sent = false;
    while !link.is_full && conn.wants_send() {
        let (sent, is_full) = conn.send_to(&link.socket);
        link.is_full = is_full;
        match sent {
            Sent::Bytes(count) => {
                has_sent = true;
                *budget = budget.saturating_sub(count / BUDGET_BYTES);
            }
            Sent::Full => break,
            Sent::Failed(_) => {
                conn.on_reset();
                core.step(link.id);
                return conn_of(core, link.id).map(|conn| (conn.phase(), true));
            }
        }
        core.step(link.id);
        conn = conn_of(core, link.id)?;
    }
    Some((conn.phase(), has_sent))
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Receive {
    /// No data, or the connection is paused or gone.
    Empty,
    /// Fewer bytes than requested, end of stream or error, or the connection was removed.
    Partial,
    /// All bytes requested: more may be in the socket.
    Full,
}

#[cfg(test)]
mod tests;
