//! `spindle serve`: starts one thread a core, hands them the configuration, waits for signals.
//!
//! ```text
//!   main thread: plan -> snapshot (disks) -> listeners -> threads ─ ready? ─> start lines ─> signals
//!                                                        SIGHUP: read the file again, new snapshot to all cores
//!                                                        SIGTERM, SIGINT: Shutdown to all cores; a deadline; the end
//! ```
//!
//! What it does not do: no data passes here; `core_loop` has the cores.

pub mod builtin;
pub mod core_loop;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use spindle_reactor::mailbox::{Remote, mesh};
use spindle_reactor::mem::{Pages, ZoneSpec};
use spindle_reactor::net::Listener;
use spindle_target::env::Message;
use spindle_target::shared::Registry;
use spindle_target::snapshot::Snapshot;
use spindle_tcp::controller::ConnConfig;
use spindle_tcp::shell::ShellConfig;

use core_loop::{CoreLoop, CoreMessage, CoreSetup, Idle};

/// Why serving could not begin or had to end.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A resource could not be had.
    #[error("{0}")]
    Start(String),
    /// An address could not be listened on.
    #[error("listener {address}: cannot listen: {source}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// Why not.
        source: std::io::Error,
    },
    /// Commands were still in flight at the deadline.
    #[error("shutdown: connections were still open after {0:?}")]
    Drain(Duration),
}

/// All that serving needs to know, from the configuration.
pub struct ServePlan {
    /// CPUs, one a core; `None`: that core's thread is not pinned.
    pub cpus: Vec<Option<usize>>,
    /// What cores do when idle.
    pub idle: Idle,
    /// Zones of each core's data pool and admin pool.
    pub zones: (Vec<ZoneSpec>, Vec<ZoneSpec>),
    /// Pages of the pools.
    pub pages: Pages,
    /// Most connections of a core.
    pub connections: usize,
    /// Most commands of a disk on one core.
    pub disk_depth: u32,
    /// Sockets and batches.
    pub shell: ShellConfig,
    /// NVMe/TCP.
    pub conn: ConnConfig,
    /// How long a shutdown may take.
    pub drain_deadline: Duration,
}

/// Makes the snapshot that follows the given one, from the file as it is now.
pub type Reload = Box<dyn FnMut(&Snapshot) -> Result<Arc<Snapshot>, String>>;

/// Messages that a mailbox holds.
const MAILBOX_ENTRIES: usize = 1024;
/// Connections that may wait to be accepted.
const BACKLOG: u32 = 1024;

/// Serve until SIGTERM or SIGINT.
///
/// # Errors
/// [`ServeError`]: something could not be started, or the shutdown passed its deadline.
pub fn serve(plan: ServePlan, snapshot: Arc<Snapshot>, mut reload: Option<Reload>) -> Result<(), ServeError> {
    // Before any thread is there, so that no signal is lost.
    let mut signals = signal_hook::iterator::Signals::new([SIGHUP, SIGTERM, SIGINT])
        .map_err(|error| ServeError::Start(format!("signals: {error}")))?;
    let running = start(&plan, &snapshot)?;
    announce(&snapshot);
    let mut snapshot = snapshot;
    for signal in signals.forever() {
        match signal {
            SIGHUP => {
                let Some(reload) = &mut reload else {
                    tracing::warn!("SIGHUP: serving the built-in default, there is no file to read again");
                    continue;
                };
                match reload(&snapshot) {
                    Ok(next) => {
                        snapshot = next;
                        running.broadcast(&CoreMessage::Target(Message::Snapshot(Arc::clone(&snapshot))));
                        tracing::info!(generation = snapshot.generation, "configuration read again");
                    }
                    Err(error) => tracing::error!("SIGHUP: the configuration stays as it was:\n{error}"),
                }
            }
            _ => break,
        }
    }
    tracing::info!(deadline_s = plan.drain_deadline.as_secs(), "shutting down");
    running.shut_down(plan.drain_deadline)
}

/// The threads at work.
struct Running {
    remote: Remote<CoreMessage>,
    cores: usize,
    threads: Vec<JoinHandle<()>>,
    stop: Arc<AtomicBool>,
}

impl Running {
    fn broadcast(&self, message: &CoreMessage) {
        for core in 0..self.cores {
            let mut message = message.clone();
            // A full mailbox is emptied within a turn.
            while let Err(back) = self.remote.send(core, message) {
                message = back;
                std::thread::yield_now();
            }
        }
    }

    fn shut_down(self, deadline: Duration) -> Result<(), ServeError> {
        self.broadcast(&CoreMessage::Target(Message::Shutdown));
        let end = Instant::now() + deadline;
        let mut is_late = false;
        while self.threads.iter().any(|thread| !thread.is_finished()) {
            if Instant::now() >= end && !is_late {
                is_late = true;
                self.stop.store(true, Ordering::Relaxed);
            }
            std::thread::park_timeout(Duration::from_millis(2));
        }
        for thread in self.threads {
            if thread.join().is_err() {
                return Err(ServeError::Start("a core's thread panicked".to_owned()));
            }
        }
        if is_late { Err(ServeError::Drain(deadline)) } else { Ok(()) }
    }
}

fn start(plan: &ServePlan, snapshot: &Arc<Snapshot>) -> Result<Running, ServeError> {
    let cores = plan.cpus.len();
    let mailboxes =
        mesh::<CoreMessage>(cores, MAILBOX_ENTRIES).map_err(|error| ServeError::Start(format!("mailboxes: {error}")))?;
    let remote = mailboxes
        .first()
        .map(spindle_reactor::mailbox::Mailbox::remote)
        .ok_or_else(|| ServeError::Start("no core is configured".to_owned()))?;
    let registry = Arc::new(Registry::default());
    let loads: Arc<[AtomicUsize]> = (0..cores).map(|_| AtomicUsize::new(0)).collect();
    let stop = Arc::new(AtomicBool::new(false));
    let mut listeners = Some(listen(snapshot)?);
    let (ready, is_ready) = mpsc::channel();
    let mut threads = Vec::new();
    for (core, (mailbox, cpu)) in mailboxes.into_iter().zip(plan.cpus.iter().copied()).enumerate() {
        let setup = CoreSetup {
            core,
            cores,
            cpu,
            idle: plan.idle,
            zones: plan.zones.clone(),
            pages: plan.pages,
            connections: plan.connections,
            disk_depth: plan.disk_depth,
            snapshot: Arc::clone(snapshot),
            registry: Arc::clone(&registry),
            mailbox,
            listeners: listeners.take().unwrap_or_default(),
            loads: Arc::clone(&loads),
            shell: plan.shell,
            conn: plan.conn,
            stop: Arc::clone(&stop),
        };
        let ready = ready.clone();
        let run = move || match CoreLoop::new(setup) {
            Ok(core) => {
                let _ = ready.send(Ok(()));
                core.run();
            }
            Err(error) => {
                let _ = ready.send(Err(error));
            }
        };
        let thread = std::thread::Builder::new().name(format!("reactor-{core}")).spawn(run);
        threads.push(thread.map_err(|error| ServeError::Start(format!("thread of core {core}: {error}")))?);
    }
    drop(ready);
    for _ in 0..cores {
        if let Ok(Err(error)) = is_ready.recv() {
            stop.store(true, Ordering::Relaxed);
            return Err(error);
        }
    }
    Ok(Running { remote, cores, threads, stop })
}

fn listen(snapshot: &Snapshot) -> Result<Vec<(Listener, usize)>, ServeError> {
    let bind = |(index, listener): (usize, &spindle_target::snapshot::Listener)| {
        let address = listener.address;
        match Listener::bind(address, BACKLOG) {
            Ok(listener) => Ok((listener, index)),
            Err(source) => Err(ServeError::Listen { address, source }),
        }
    };
    snapshot.listeners.iter().enumerate().map(bind).collect()
}

/// Listeners, NQNs and the line that a host types.
fn announce(snapshot: &Snapshot) {
    for listener in &snapshot.listeners {
        tracing::info!(address = %listener.address, port_id = listener.port_id, "listening (NVMe/TCP, discovery included)");
    }
    for subsystem in &snapshot.subsystems {
        for namespace in subsystem.active() {
            let geometry = namespace.source.geometry();
            tracing::info!(
                nqn = %subsystem.nqn,
                nsid = namespace.nsid,
                disk = namespace.source.name(),
                kind = namespace.source.kind(),
                bytes = geometry.bytes(),
                block_bytes = geometry.block_bytes,
                "serving"
            );
        }
        for listener in subsystem.listeners.iter().filter_map(|index| snapshot.listeners.get(*index)) {
            let (ip, port) = (listener.address.ip(), listener.address.port());
            tracing::info!("nvme connect -t tcp -a {ip} -s {port} -n {}", subsystem.nqn);
        }
    }
}

/// The file that was served, for a reload.
pub type ConfigPath = Option<PathBuf>;
