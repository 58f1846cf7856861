//! A target inside this process: what one core of it shares ([`Core`]) and its NVMe/TCP side ([`Tcp`]), for
//! the reactor of a thread.
//!
//! ```text
//!   Reactor::run ─┬─ Tcp::on_ready, Tcp::poll ─> Listener::accept, Shell::poll ─> TargetCore::step
//!                 └─ Tcp::flush <─ TargetCore::next_send_ready (disks and timers gave something to send)
//! ```
//!
//! `tests/examples/embedded_target.rs` uses it. What it does not do: more than one core, RDMA, a log, a
//! reload of the configuration; the binary has all of that (`app/src/serve/core_loop.rs`).

use std::io;
use std::sync::Arc;

use spindle_nvme_tcp::controller::{Conn, ConnConfig};
use spindle_nvme_tcp::shell::{Incoming, Shell, ShellConfig};
use spindle_nvme_transport::admission::Admission;
use spindle_nvme_transport::{Peer, TransportKind};
use spindle_reactor::clock::{Clock, Nanos, wall_ms};
use spindle_reactor::mem::{Pages, Pool, ZoneSpec};
use spindle_reactor::net::{Interest, Listener, Watcher};
use spindle_reactor::run::{CoreShared, Poller, Turn};
use spindle_target::core::{CoreSettings, TargetCore};
use spindle_target::env::Message;
use spindle_target::snapshot::Snapshot;

/// Most connections.
const CONNECTIONS: usize = 16;
/// Watches the listener. No connection has this key: see [`Slot::from_wire`](spindle_reactor::slab::Slot).
const LISTENER: u32 = 0;

/// What the pollers of the core share: the target's core.
pub struct Core {
    target: TargetCore<Conn>,
}

impl Core {
    /// The only core of a target with this configuration. Call it on the core's thread.
    ///
    /// # Errors
    /// That of a disk which cannot be opened.
    ///
    /// # Panics
    /// When there is no memory for the pools: 3 MiB.
    pub fn new(snapshot: Arc<Snapshot>) -> std::io::Result<Core> {
        let pool = |zones: &[ZoneSpec]| Pool::new(zones, Pages::Base).expect("memory for a pool");
        let zone = |buffer_bytes, count| ZoneSpec { buffer_bytes, count };
        let target = TargetCore::new(CoreSettings {
            core: 0,
            cores: 1,
            connections: CONNECTIONS,
            disk_depth: 128,
            pool: pool(&[zone(4096, 256), zone(1 << 20, 2)]),
            admin_pool: pool(&[zone(8192, 4)]),
            snapshot,
            registry: Arc::default(),
            now: Clock::now(),
            wall_ms: wall_ms(),
        });
        match target.disk_errors() {
            [] => Ok(Core { target }),
            [error, ..] => Err(std::io::Error::other(error.to_string())),
        }
    }
}

impl CoreShared for Core {
    fn begin_turn(&mut self, now: Nanos, wall_ms: u64) {
        self.target.set_time(now, wall_ms);
    }

    /// As after [`Message::Shutdown`]: new connections are refused, and the last one is gone.
    fn is_done(&self) -> bool {
        self.target.is_draining() && self.target.usage().connections == 0
    }
}

/// The only poller: listener, connections, and then the requests of the core.
pub struct Tcp {
    listener: Listener,
    is_ready: bool,
    shell: Shell,
    admission: Arc<Admission>,
}

impl Tcp {
    /// Accepts from `listener`, which is number 0 of the snapshot.
    ///
    /// # Errors
    /// The system's: the listener cannot be watched.
    pub fn new(listener: Listener, watcher: Watcher) -> io::Result<Tcp> {
        watcher.add(&listener, LISTENER, Interest::READ)?;
        let shell = Shell::new(ShellConfig::default(), CONNECTIONS, watcher);
        Ok(Tcp { listener, is_ready: false, shell, admission: Admission::new(0) })
    }

    /// One connection; the listener stays readable while there are more.
    fn accept(&mut self, core: &mut Core, now: Nanos) {
        let Ok(Some(accepted)) = self.listener.accept() else { return };
        let Some(admitted) = self.admission.admit(accepted.peer.ip()) else { return };
        let (remote, local) = (accepted.peer, accepted.local);
        let peer = Peer { transport: TransportKind::Tcp, listener: 0, remote, local };
        let incoming = Incoming { socket: accepted.socket, peer, config: ConnConfig::default(), admitted };
        // One that has no place is closed.
        self.shell.accept(&mut core.target, incoming, now);
    }
}

impl Poller<Core, Message> for Tcp {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn poll(&mut self, core: &mut Core, turn: &mut Turn<'_, Message>) -> bool {
        let has_newcomer = std::mem::take(&mut self.is_ready);
        if has_newcomer {
            self.accept(core, turn.now);
        }
        let has_received = self.shell.poll(&mut core.target, turn.now);
        let has_worked = core.target.poll();
        has_newcomer || has_received || has_worked
    }

    fn on_ready(&mut self, _core: &mut Core, turn: &mut Turn<'_, Message>, key: u32) {
        match key {
            LISTENER => self.is_ready = true,
            connection => self.shell.on_ready(turn.now, connection),
        }
    }

    fn on_message(
        &mut self,
        core: &mut Core,
        _: &mut Turn<'_, Message>,
        message: Message,
    ) -> Option<Message> {
        core.target.on_message(message);
        None
    }

    fn flush(&mut self, core: &mut Core, _turn: &mut Turn<'_, Message>) {
        while let Some(id) = core.target.next_send_ready() {
            self.shell.flush(&mut core.target, id);
        }
    }

    fn is_active(&self) -> bool {
        self.shell.direct_count() > 0
    }

    fn is_quiet(&self, core: &Core) -> bool {
        core.target.is_quiet() && !self.shell.is_holding()
    }

    fn prepare_sleep(&mut self, _core: &mut Core) -> bool {
        self.shell.watch_all();
        self.shell.direct_count() == 0
    }
}
