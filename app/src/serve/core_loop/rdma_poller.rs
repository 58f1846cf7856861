//! [`RdmaPoller`]: a core's RDMA connections; on core `ACCEPTOR` also the RDMA listeners.

use std::sync::{Arc, PoisonError};

use nvme_spec::rdma::CmStatus;
use spindle_nvme_rdma::controller::ConnConfig as RdmaConfig;
use spindle_nvme_rdma::shell::{Shell, ShellSetup, Source, is_absent};
use spindle_nvme_tcp::controller::ConnConfig;
use spindle_nvme_transport::TransportKind;
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Area;
use spindle_reactor::net::{Interest, Watcher};
use spindle_reactor::run::{Poller, Turn};
use spindle_target::snapshot::Snapshot;

use super::shared::Core;
use super::{AdmittedRdma, CoreMessage, CoreSetup, PublishedListeners, RdmaListeners};
use crate::serve::{ServeError, announce};

/// Most connection requests that a turn assigns to cores.
const ASSIGNED_PER_TURN: usize = 16;

pub struct RdmaPoller {
    shell: Shell,
    watcher: Watcher,
    conn: ConnConfig,
    /// Snapshot generation of the listeners.
    generation: u64,
    published: PublishedListeners,
}

impl RdmaPoller {
    /// Binds the listeners. The devices come from [`crate::serve::registrar`], which also starts the
    /// listeners. An address that no device has is tried again every second from then on, as are all where
    /// the machine has no RDMA yet.
    pub fn new(
        setup: &CoreSetup,
        generation: u64,
        areas: &[Area],
        watcher: Watcher,
    ) -> Result<RdmaPoller, ServeError> {
        let failed = |error: &dyn std::fmt::Display| ServeError::Start(format!("RDMA: {error}"));
        let mut shell = Shell::new(&ShellSetup {
            config: setup.plan.rdma,
            core: setup.core,
            known: &setup.rdma.known,
            listens: !setup.rdma.listeners.is_empty(),
            areas,
            connections: setup.plan.connections_per_core(),
            in_capsule_bytes: setup.rdma.in_capsule_bytes,
            entries_max: setup.plan.tcp.conn.queue_entries,
        })
        .map_err(|error| failed(&error))?;
        for (address, index) in &setup.rdma.listeners {
            match shell.bind(*address, *index) {
                Ok(()) => {}
                Err(error) if is_absent(*address, &error) => {
                    // Without the connection manager the shell has logged one line for all listeners.
                    if shell.has_manager() {
                        tracing::error!(
                            "listener {address} (rdma): cannot listen: {error}; next attempt in 1 s"
                        );
                    }
                    shell.add_absent(*address, *index, error);
                }
                Err(error) => return Err(ServeError::listen_rdma(*address, &error)),
            }
        }
        for (source, descriptor) in shell.take_descriptors() {
            watcher.add(descriptor, key(source), Interest::READ).map_err(|error| failed(&error))?;
        }
        let published = Arc::clone(&setup.rdma.published);
        Ok(RdmaPoller { shell, watcher, conn: setup.plan.tcp.conn, generation, published })
    }

    #[cold]
    fn start_listening(&mut self, core: &Core) {
        let opened = self.shell.start_listening();
        for (address, result) in &opened {
            if let Err(error) = result {
                tracing::error!(%address, %error, "cannot listen over RDMA; trying again");
            }
        }
        if !opened.is_empty() {
            let is_listening = |index| self.shell.is_listening(index);
            announce(core.target.snapshot(), TransportKind::Rdma, &is_listening);
        }
    }

    /// Listens on exactly the RDMA addresses of a newly advertised snapshot.
    #[cold]
    fn change_listeners(&mut self, advertised: &Snapshot) {
        self.generation = advertised.generation;
        let listeners = advertised.listeners.iter().enumerate();
        let wanted = listeners.filter(|(_, it)| it.is_open && it.transport == TransportKind::Rdma);
        let wanted: Vec<_> = wanted.map(|(index, it)| (it.address, index)).collect();
        self.shell.set_listeners(&wanted);
    }

    /// Watches the event descriptors of devices that were added.
    #[cold]
    fn watch_new_devices(&mut self, core: usize) {
        for (source, descriptor) in self.shell.take_descriptors() {
            if let Err(error) = self.watcher.add(descriptor, key(source), Interest::READ) {
                tracing::error!(core, %error, "cannot add the event descriptor of an RDMA device to epoll");
            }
        }
    }

    /// Assigns at most [`ASSIGNED_PER_TURN`] connection requests, each to the core with the fewest
    /// connections. Rejects a request whose address has too many connections that have not sent Connect.
    fn assign_requests(&mut self, core: &mut Core, turn: &mut Turn<'_, CoreMessage>) {
        for _ in 0..ASSIGNED_PER_TURN {
            let Some(request) = self.shell.next_request() else { return };
            // Dropping a request without a remote address rejects it.
            let Some(remote) = request.remote() else { continue };
            let Some(admitted) = core.admit(remote, turn.now) else {
                request.reject(CmStatus::NO_RESOURCES);
                continue;
            };
            let owner = core.assign_core();
            if owner == turn.core() {
                core.arrivals.rdma.push((request, admitted));
            } else {
                turn.send(owner, CoreMessage::AcceptRdma(Box::new((request, admitted))));
            }
        }
    }

    /// Takes over waiting connections within the budget of the turn ([`super::arrivals`]).
    fn take_arrivals(&mut self, core: &mut Core, now: Nanos) {
        while core.arrivals.has_next_rdma() && core.make_room(|target, id| self.shell.evict(target, id)) {
            let Some(request) = core.arrivals.rdma.take_next() else { return };
            self.take_over(core, request, now);
        }
    }

    fn take_over(&mut self, core: &mut Core, (request, admitted): AdmittedRdma, now: Nanos) {
        let listener = core.target.snapshot().listeners.get(request.listener);
        let tcp = &self.conn;
        let config = RdmaConfig {
            in_capsule_bytes: listener.map_or(tcp.in_capsule_bytes, |listener| listener.in_capsule_bytes),
            queue_entries: tcp.queue_entries,
            transfer_bytes: tcp.transfer_bytes,
            close_timeout: tcp.close_timeout,
            ..RdmaConfig::default()
        };
        self.shell.accept(&mut core.target, (request, admitted), config, now);
    }
}

impl Poller<Core, CoreMessage> for RdmaPoller {
    fn name(&self) -> &'static str {
        "adapters"
    }

    fn poll(&mut self, core: &mut Core, turn: &mut Turn<'_, CoreMessage>) -> bool {
        // Listeners change once the new snapshot is advertised.
        if core.target.advertised_snapshot().generation != self.generation {
            self.change_listeners(core.target.advertised_snapshot());
        }
        let mut has_worked = self.shell.poll(&mut core.target, turn.now);
        if let Some(missing) = self.shell.take_changed_listeners() {
            let listeners = RdmaListeners { generation: self.generation, missing };
            *self.published.lock().unwrap_or_else(PoisonError::into_inner) = listeners;
        }
        while let Some(message) = self.shell.next_message() {
            turn.send_to_others(|| CoreMessage::Rdma(message.clone()));
        }
        if self.shell.has_descriptors() {
            self.watch_new_devices(turn.core());
        }
        self.assign_requests(core, turn);
        while let Some(id) = core.next_evicted(TransportKind::Rdma) {
            has_worked = true;
            self.shell.evict(&mut core.target, id);
        }
        if !core.arrivals.rdma.is_empty() {
            has_worked = true;
            self.take_arrivals(core, turn.now);
        }
        has_worked
    }

    fn on_ready(&mut self, _core: &mut Core, _turn: &mut Turn<'_, CoreMessage>, key: u32) {
        match key {
            COMPLETIONS => self.shell.on_ready(Source::Completions),
            MANAGER => self.shell.on_ready(Source::Manager),
            _ => self.shell.on_ready(Source::Device),
        }
    }

    fn on_message(
        &mut self,
        core: &mut Core,
        _turn: &mut Turn<'_, CoreMessage>,
        message: CoreMessage,
    ) -> Option<CoreMessage> {
        match message {
            CoreMessage::AcceptRdma(request) => core.arrivals.rdma.push(*request),
            CoreMessage::Rdma(message) => self.shell.on_message(&mut core.target, message),
            CoreMessage::ListenRdma => self.start_listening(core),
            CoreMessage::Target(_) | CoreMessage::Accept(_) | CoreMessage::Listen(_) | CoreMessage::Wake => {
                return Some(message);
            }
        }
        None
    }

    fn flush(&mut self, core: &mut Core, _turn: &mut Turn<'_, CoreMessage>) {
        while let Some(id) = core.target.next_send_ready_over(TransportKind::Rdma) {
            self.shell.flush(&mut core.target, id);
        }
    }

    fn is_active(&self) -> bool {
        self.shell.has_connections()
    }

    fn is_quiet(&self, core: &Core) -> bool {
        core.arrivals.rdma.is_empty()
    }

    fn prepare_sleep(&mut self, _core: &mut Core) -> bool {
        self.shell.prepare_sleep()
    }

    fn wants_yield(&self) -> bool {
        self.shell.wants_yield()
    }
}

/// Keys that identify a [`Source`] when its descriptor is ready.
const COMPLETIONS: u32 = 0;
const MANAGER: u32 = 1;
const DEVICE: u32 = 2;

fn key(source: Source) -> u32 {
    match source {
        Source::Completions => COMPLETIONS,
        Source::Manager => MANAGER,
        Source::Device => DEVICE,
    }
}
