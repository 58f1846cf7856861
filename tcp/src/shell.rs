//! The shell of one core: joins the core's connections to their sockets. It moves bytes and knows no
//! protocol.
//!
//! ```text
//!   poll:   direct connections ── recv into the core's one batch ──> Conn ── Connections::step ──> sendmsg
//!           watched ones wait in the reactor's epoll, which says when one has something (on_ready)
//!   flush:  connections that disks, timers or messages gave something to send
//! ```
//!
//! A connection is direct while it has traffic: it is then asked directly, which costs less than to be told
//! by epoll. After `WATCH_AFTER` without data it goes to epoll and costs nothing, so that a thousand idle
//! connections do not slow a busy one. A full socket is asked whether there is room again: by a send in every
//! turn while its connection is direct, by epoll once it has waited for `WATCH_AFTER`, or immediately where
//! many connections are direct.
//!
//! A turn has a budget (`BUDGET`): with many busy connections it serves some of them and the next turn goes
//! on behind them, so that the core's disks, timers and newcomers do not wait for all of them.

use std::io::{IoSlice, IoSliceMut};
use std::time::Duration;

use arrayvec::{ArrayString, ArrayVec};
use spindle_reactor::clock::Nanos;
use spindle_reactor::net::{Interest, Received, Sent, Socket, Watcher};
use spindle_reactor::slab::Slot;
use spindle_transport::admission::Admitted;
use spindle_transport::{Connections, Holds, Peer};

use crate::controller::{Conn, ConnConfig};
use crate::{Expectation, Phase, RxBatch};

/// Settings of a shell. Every default says why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShellConfig {
    /// Bytes that one receive may bring. 256 KiB: see docs/lab-notes.md, "Trials".
    pub batch_bytes: usize,
    /// Time that sent bytes may stay without acknowledgement before the connection is given up, in ms. 30 s:
    /// longer than a switch takes to fail over, shorter than the hosts' patience.
    pub user_timeout_ms: u32,
    /// Send and receive buffers of the sockets, in bytes; 0 leaves them to the kernel, which tunes them by
    /// itself.
    pub socket_buffer_bytes: usize,
    /// Congestion control; `None` leaves the system's. `cubic`: it does not pace, and pacing (bbr) costs even
    /// where nothing is lost.
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

/// Silence after which a connection goes to epoll: longer than a host's think time between two commands.
const WATCH_AFTER: Nanos = Nanos::from_ms(1);
/// How often the connections' own time-outs are looked at.
const TIMER_PERIOD: Nanos = Nanos::from_ms(50);
/// Rounds over the direct connections in a turn, while none has anything, when there are few.
const EMPTY_ROUNDS_MAX: u32 = 8;
const FEW_CONNECTIONS: usize = 4;
/// Receives of one connection in a turn: no connection starves another.
const RECEIVES_PER_TURN: u32 = 4;
/// What a turn does for its connections: so many receives that brought something, of which each 64 KiB that
/// are moved count as one more. Each takes microseconds, so that this is some hundreds of them.
const BUDGET: usize = 64;
const BUDGET_BYTES: usize = 64 << 10;
/// Bytes of the batch that a direct receive may fill behind its payload: the next header, and little that
/// would be copied.
const BEHIND_DIRECT_BYTES: usize = 2048;
/// Pieces of one send: the kernel's limit.
const PIECES_MAX: usize = 1024;
/// Pieces of a send that are listed first. The list of all there may be is 16 KiB of stack, which a send of
/// one reply should not set up.
const FEW_PIECES: usize = 16;
/// Pieces of a buffer that one direct receive fills: 256 KiB of pages that lie apart, more where they do not.
const DIRECT_PIECES_MAX: usize = 64;

/// A connection's socket.
struct Link {
    id: Slot,
    socket: Socket,
    /// When it last had anything to do.
    active: Nanos,
    is_direct: bool,
    /// What epoll watches for; `None`: it is not in epoll.
    interest: Option<Interest>,
    is_full: bool,
    is_shut: bool,
    expects: Expectation,
}

/// A connection that was accepted, for [`Shell::accept`].
#[derive(Debug)]
pub struct Incoming {
    /// Its socket.
    pub socket: Socket,
    /// Its ends.
    pub peer: Peer,
    /// From its listener.
    pub config: ConnConfig,
    /// Its place among those that have not sent Connect.
    pub admitted: Admitted,
}

/// One core's sockets. See the module.
pub struct Shell {
    config: ShellConfig,
    watcher: Watcher,
    batch: Option<RxBatch>,
    /// By the index of the connection's slot.
    links: Vec<Option<Link>>,
    direct: Vec<Slot>,
    /// The place in `direct` that is asked next.
    next: usize,
    /// What is left of the turn's [`BUDGET`].
    budget: usize,
    now: Nanos,
    next_timer: Nanos,
}

/// Most bytes that a connection takes here and in its [`Conn`], beside the `Conn` itself, with a queue of
/// `entries`.
#[must_use]
pub fn connection_bytes(entries: u16) -> usize {
    size_of::<Option<Link>>() + size_of::<Slot>() + Conn::heap_bytes(entries)
}

impl Shell {
    /// A shell for at most `connections`, which are watched by `watcher`; the keys of what is ready come to
    /// [`Shell::on_ready`].
    #[must_use]
    pub fn new(config: ShellConfig, connections: usize, watcher: Watcher) -> Shell {
        Shell {
            config,
            watcher,
            batch: Some(RxBatch::new(config.batch_bytes)),
            links: (0..connections).map(|_| None).collect(),
            direct: Vec::with_capacity(connections),
            next: 0,
            budget: 0,
            now: Nanos::ZERO,
            next_timer: Nanos::ZERO,
        }
    }

    /// Take over an accepted connection. False: there is no room, and the socket is closed.
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
            active: now,
            is_direct: true,
            interest: None,
            is_full: false,
            is_shut: false,
            expects: Expectation::default(),
        };
        if let Some(place) = self.links.get_mut(id.index()) {
            *place = Some(link);
        }
        self.direct.push(id);
        true
    }

    /// Options of a socket. Best effort: a refusal costs latency, not truth.
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

    /// End a connection whose place another needs; it is free at once. False: it is none of ours.
    #[cold]
    pub fn evict<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, id: Slot) -> bool {
        if self.link(id).is_none() {
            return false;
        }
        if let Some(conn) = conn_of(core, id) {
            conn.on_reset();
        }
        core.step(id);
        self.remove_closed(core);
        true
    }

    /// Number of connections that are asked directly.
    #[must_use]
    pub fn direct_count(&self) -> usize {
        self.direct.len()
    }

    /// One turn of receiving, stepping and sending. True when there was anything to do.
    pub fn poll<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, now: Nanos) -> bool {
        self.now = now;
        self.budget = BUDGET;
        let mut has_worked = false;
        // With few connections an empty round costs less than the rest of the core's turn, and the next
        // command may come any moment: it is found sooner.
        for _ in 0..EMPTY_ROUNDS_MAX {
            has_worked |= self.poll_direct(core);
            if has_worked || self.direct.len() > FEW_CONNECTIONS {
                break;
            }
        }
        if now >= self.next_timer {
            self.next_timer = now + TIMER_PERIOD;
            self.on_time(core, now);
        }
        has_worked
    }

    /// Ask every direct connection once, or as many as the budget allows.
    #[inline]
    fn poll_direct<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C) -> bool {
        let mut has_worked = false;
        for _ in 0..self.direct.len() {
            if self.budget == 0 {
                break;
            }
            let Some(id) = self.direct.get(self.next).or_else(|| self.direct.first()).copied() else { break };
            if self.next >= self.direct.len() {
                self.next = 0;
            }
            has_worked |= self.serve(core, id);
            // A connection that is watched now or closed was swapped out of the list.
            if self.direct.get(self.next) == Some(&id) {
                self.next += 1;
            }
        }
        has_worked
    }

    /// Send all connections to epoll, so that the core can sleep. One that cannot be watched stays direct.
    pub fn watch_all(&mut self) {
        // Each once.
        for at in (0..self.direct.len()).rev() {
            let id = self.direct[at];
            self.set_watched(id);
        }
    }

    /// A connection has something, as its watcher says by this key: the next [`Shell::poll`] asks it.
    pub fn on_ready(&mut self, now: Nanos, key: u32) {
        self.now = now;
        let id = Slot::from_wire(key);
        if self.link(id).is_some() {
            self.set_direct(id);
        }
    }

    #[inline]
    fn link(&mut self, id: Slot) -> Option<&mut Link> {
        self.links.get_mut(id.index())?.as_mut().filter(|link| link.id == id)
    }

    fn set_direct(&mut self, id: Slot) {
        let Some(link) = self.links.get_mut(id.index()).and_then(Option::as_mut) else { return };
        if link.interest.take().is_some() {
            let _ = self.watcher.remove(&link.socket);
        }
        link.active = self.now;
        if !link.is_direct {
            link.is_direct = true;
            self.direct.push(id);
        }
    }

    fn set_watched(&mut self, id: Slot) {
        if let Some(at) = self.direct.iter().position(|direct| *direct == id) {
            self.direct.swap_remove(at);
        }
        let Some(link) = self.links.get_mut(id.index()).and_then(Option::as_mut) else { return };
        link.is_direct = false;
        let interest = Interest { read: true, write: link.is_full };
        if self.watcher.add(&link.socket, id.to_wire(), interest).is_ok() {
            link.interest = Some(interest);
        } else {
            // Without epoll it stays direct: which is slower.
            link.is_direct = true;
            self.direct.push(id);
        }
    }

    /// Receive, step and send for one connection. True when there was anything to do.
    #[inline]
    fn serve<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, id: Slot) -> bool {
        let mut has_worked = self.resume(core, id);
        for _ in 0..RECEIVES_PER_TURN {
            let received = self.receive(core, id);
            if received != Receive::Nothing {
                has_worked = true;
                self.send(core, id);
            }
            if received != Receive::Full {
                break;
            }
        }
        self.settle(core, id, has_worked);
        has_worked
    }

    /// Send on where the socket was full. True when it took any of it.
    #[inline]
    fn resume<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, id: Slot) -> bool {
        let Some(link) = self.links.get_mut(id.index()).and_then(Option::as_mut) else { return false };
        if !link.is_full {
            return false;
        }
        link.is_full = false;
        self.send(core, id)
    }

    /// One receive, and the step that acts on it.
    #[inline]
    fn receive<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, id: Slot) -> Receive {
        let Some(link) = self.links.get_mut(id.index()).and_then(Option::as_mut) else {
            return Receive::Nothing;
        };
        let Some(conn) = conn_of(core, id) else { return Receive::Nothing };
        if conn.is_paused() {
            return Receive::Nothing;
        }
        let mut batch = self.batch.take().unwrap_or_else(|| RxBatch::new(self.config.batch_bytes));
        let (received, direct, asked) = receive_into(&link.socket, conn, &mut batch, &mut link.expects);
        let result = match received {
            Received::Bytes(count) => {
                self.budget = self.budget.saturating_sub(1 + count / BUDGET_BYTES);
                let into_payload = count.min(direct);
                if into_payload > 0 {
                    conn.received_direct(into_payload);
                }
                batch.filled(count - into_payload);
                conn.load(batch);
                core.step(id);
                let Some(conn) = conn_of(core, id) else {
                    // Closed meanwhile; the batch went with it.
                    return Receive::Some;
                };
                batch = conn.unload();
                if count == asked { Receive::Full } else { Receive::Some }
            }
            Received::Empty => Receive::Nothing,
            Received::Closed | Received::Failed(_) => {
                self.budget = self.budget.saturating_sub(1);
                if received == Received::Closed {
                    conn.on_peer_closed()
                } else {
                    conn.on_reset()
                }
                core.step(id);
                Receive::Some
            }
        };
        self.batch = Some(batch);
        result
    }

    /// Send what the connection has, until the socket is full. True when it took any of it.
    #[inline]
    fn send<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, id: Slot) -> bool {
        let Some(link) = self.links.get_mut(id.index()).and_then(Option::as_mut) else { return false };
        if link.is_full {
            return false;
        }
        let mut has_sent = false;
        loop {
            let Some(conn) = conn_of(core, id) else { return has_sent };
            if !conn.wants_send() {
                return has_sent;
            }
            let (sent, bytes) = send_from(&link.socket, conn);
            match sent {
                Sent::Bytes(count) => {
                    has_sent = true;
                    self.budget = self.budget.saturating_sub(count / BUDGET_BYTES);
                    conn.sent(count);
                    core.step_sent(id);
                    if count < bytes {
                        link.is_full = true;
                        return has_sent;
                    }
                }
                Sent::Full => {
                    link.is_full = true;
                    return has_sent;
                }
                Sent::Failed(_) => {
                    conn.on_reset();
                    core.step_sent(id);
                    return true;
                }
            }
        }
    }

    /// What a connection's state asks of its socket, and whether it stays direct.
    #[inline]
    fn settle<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, id: Slot, has_worked: bool) {
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
                    core.step_sent(id);
                    self.remove_closed(core);
                    return;
                }
            }
        }
        if has_worked {
            link.active = self.now;
            return;
        }
        let is_silent = self.now.0.saturating_sub(link.active.0) >= WATCH_AFTER.0;
        // Among many, those that wait for room are not asked in every turn: each time costs a system call.
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

    /// Send for a connection that something else than its own input gave something to send. False: it is none
    /// of ours.
    pub fn flush<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, id: Slot) -> bool {
        if self.link(id).is_none() {
            return false;
        }
        let Some(conn) = conn_of(core, id) else { return true };
        if conn.has_unread() && !conn.is_paused() {
            core.step_sent(id);
        }
        let is_open = conn_of(core, id).is_some_and(|conn| conn.phase() == Phase::Open && !conn.wants_send());
        if is_open {
            return true;
        }
        self.send(core, id);
        let is_unwatched = |link: &mut Link| {
            link.is_full && !link.is_direct && !link.interest.is_some_and(|interest| interest.write)
        };
        if self.link(id).is_some_and(is_unwatched) {
            self.set_direct(id); // settles into epoll again, for room as well
        }
        self.settle(core, id, false);
        self.remove_closed(core);
        true
    }

    /// The connections' own time-outs.
    fn on_time<C: Connections<Conn: Holds<Conn>>>(&mut self, core: &mut C, now: Nanos) {
        for index in 0..self.links.len() {
            let Some(id) = self.links.get(index).and_then(Option::as_ref).map(|link| link.id) else {
                continue;
            };
            let Some(conn) = conn_of(core, id) else { continue };
            if conn.deadline().is_some_and(|deadline| deadline <= now) {
                conn.on_time(now);
                core.step(id);
                self.settle(core, id, true);
            }
        }
    }
}

/// A connection of ours.
#[inline]
fn conn_of<C: Connections<Conn: Holds<Conn>>>(core: &mut C, id: Slot) -> Option<&mut Conn> {
    core.transport(id)?.held()
}

/// One send of all that the connection has, as far as it fits; and how much that was.
#[inline]
fn send_from(socket: &Socket, conn: &Conn) -> (Sent, usize) {
    let mut few = ArrayVec::<IoSlice<'_>, FEW_PIECES>::new();
    let bytes = conn.send_pieces(&mut few);
    if few.is_full() { send_many_from(socket, conn) } else { (socket.send_vectored(&few), bytes) }
}

#[inline(never)]
fn send_many_from(socket: &Socket, conn: &Conn) -> (Sent, usize) {
    let mut pieces = ArrayVec::<IoSlice<'_>, PIECES_MAX>::new();
    let bytes = conn.send_pieces(&mut pieces);
    (socket.send_vectored(&pieces), bytes)
}

/// One receive: into the payload that the connection waits for and a little of the batch behind it, or into
/// the batch. What it brought, how much of it belongs to the payload at most, and how much was asked for.
#[inline]
fn receive_into(
    socket: &Socket,
    conn: &mut Conn,
    batch: &mut RxBatch,
    expects: &mut Expectation,
) -> (Received, usize, usize) {
    let mut pieces = ArrayVec::<IoSliceMut<'_>, DIRECT_PIECES_MAX>::new();
    let direct = conn.direct_target(&mut pieces);
    let space = batch.space();
    if direct == 0 {
        let asked = space.len().min(expects.batch_bytes());
        let received = socket.recv(&mut space[..asked]);
        expects.on_batch(matches!(received, Received::Bytes(count) if count == asked));
        return (received, 0, asked);
    }
    expects.on_direct();
    let behind = space.len().min(BEHIND_DIRECT_BYTES);
    // Full when the payload alone takes all pieces: then this receive does not reach its end.
    let has_room = pieces.try_push(IoSliceMut::new(&mut space[..behind])).is_ok();
    let asked = direct + if has_room { behind } else { 0 };
    (socket.recv_vectored(&mut pieces), direct, asked)
}

/// What one receive brought.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Receive {
    Nothing,
    Some,
    /// As much as was asked for: there may be more.
    Full,
}

#[cfg(test)]
mod tests;
