//! [`TcpPoller`]: a core's TCP connections.

use spindle_nvme_tcp::controller::ConnConfig;
use spindle_nvme_tcp::shell::{Incoming, Shell};
use spindle_nvme_transport::{Peer, TransportKind};
use spindle_reactor::clock::Nanos;
use spindle_reactor::net::Watcher;
use spindle_reactor::rate::RateLimit;
use spindle_reactor::run::{Poller, Turn};

use super::shared::Core;
use super::{AdmittedTcp, CoreMessage};
use crate::config::TcpPlan;

pub struct TcpPoller {
    shell: Shell,
    conn: ConnConfig,
    connections: usize,
    /// Earliest time of the next attempt to sleep, after a socket could not be added to epoll.
    next_sleep: Nanos,
    log: RateLimit,
}

/// How long the core stays awake after a socket could not be added to epoll.
const SLEEP_RETRY_PERIOD: Nanos = Nanos::from_ms(1);

impl TcpPoller {
    pub fn new(tcp: TcpPlan, connections: usize, watcher: Watcher) -> TcpPoller {
        let TcpPlan { shell, conn } = tcp;
        let shell = Shell::new(shell, connections, watcher);
        TcpPoller { shell, conn, connections, next_sleep: Nanos::ZERO, log: RateLimit::new(1, 5) }
    }

    /// Takes over waiting connections within the budget of the turn ([`super::arrivals`]).
    fn take_arrivals(&mut self, core: &mut Core, now: Nanos) {
        while core.arrivals.tcp.has_next() && core.make_room(|target, id| self.shell.evict(target, id)) {
            let Some(accepted) = core.arrivals.tcp.take_next() else { return };
            self.take_over(core, accepted, now);
        }
    }

    fn take_over(&mut self, core: &mut Core, (accepted, admitted, listener): AdmittedTcp, now: Nanos) {
        let remote = accepted.peer;
        let peer = Peer { transport: TransportKind::Tcp, listener, remote, local: accepted.local };
        let mut config = self.conn;
        if let Some(listener) = core.target.snapshot().listeners.get(listener) {
            config.in_capsule_bytes = listener.in_capsule_bytes;
        }
        let incoming = Incoming { socket: accepted.socket, peer, config, admitted };
        let is_taken = self.shell.accept(&mut core.target, incoming, now);
        if !is_taken
            && !core.target.is_draining()
            && let Some(allowed) = self.log.allow(now)
        {
            let (connections, untold) = (self.connections, allowed.suppressed);
            tracing::warn!(
                %remote,
                connections,
                untold,
                "connection refused: its core has reached its share of limits.connections"
            );
        }
    }
}

impl Poller<Core, CoreMessage> for TcpPoller {
    fn name(&self) -> &'static str {
        "sockets"
    }

    fn poll(&mut self, core: &mut Core, turn: &mut Turn<'_, CoreMessage>) -> bool {
        let mut has_worked = self.shell.poll(&mut core.target, turn.now);
        if !core.arrivals.tcp.is_empty() {
            has_worked = true;
            self.take_arrivals(core, turn.now);
        }
        // After the TCP arrivals, so that the freed slots remain for the RDMA arrivals, which are polled
        // next.
        while let Some(id) = core.next_evicted(TransportKind::Tcp) {
            has_worked = true;
            self.shell.evict(&mut core.target, id);
        }
        has_worked
    }

    fn on_ready(&mut self, _core: &mut Core, turn: &mut Turn<'_, CoreMessage>, key: u32) {
        self.shell.on_ready(turn.now, key);
    }

    fn on_message(
        &mut self,
        core: &mut Core,
        _turn: &mut Turn<'_, CoreMessage>,
        message: CoreMessage,
    ) -> Option<CoreMessage> {
        let CoreMessage::Accept(accepted) = message else { return Some(message) };
        core.arrivals.tcp.push(*accepted);
        None
    }

    fn flush(&mut self, core: &mut Core, _turn: &mut Turn<'_, CoreMessage>) {
        while let Some(id) = core.target.next_send_ready_over(TransportKind::Tcp) {
            self.shell.flush(&mut core.target, id);
        }
    }

    fn is_active(&self) -> bool {
        self.shell.direct_count() > 0
    }

    fn is_quiet(&self, core: &Core) -> bool {
        core.arrivals.tcp.is_empty() && core.now >= self.next_sleep && !self.shell.is_holding()
    }

    fn prepare_sleep(&mut self, core: &mut Core) -> bool {
        self.shell.watch_all();
        let are_all_watched = self.shell.direct_count() == 0;
        if !are_all_watched {
            self.next_sleep = core.now + SLEEP_RETRY_PERIOD;
        }
        are_all_watched
    }
}
