//! `spindle serve`: starts one thread a core, hands them the configuration, waits for signals.
//!
//! ```text
//!   main thread: plan -> snapshot (disks) -> listeners -> threads ─ ready? ─> start lines ─> signals
//!     SIGHUP: read the file again, new snapshot to all cores
//!     now and then: drives and far targets that are there at last, or have another size: the same
//!     the control socket: a thread of its own answers (`rpc`)
//!     SIGTERM, SIGINT: Shutdown to all cores; a deadline; the end
//! ```
//!
//! What it does not do: no data passes here; `core_loop` has the cores.

pub mod conn;
pub mod control;
pub mod core_loop;
mod reconfigurator;
mod registrar;
mod store;
pub mod view;

use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use self::control::Control;
use self::reconfigurator::Reconfigurator;
use self::view::{CoreView, View};
use core_loop::{ACCEPTOR, CoreLoop, CoreMessage, CoreReady, CoreSetup, Handover, Listening, RdmaSetup};
use registrar::{Next, Registrar};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, SignalsInfo};
use spindle_rdma::shell::{KnownDevices, SharedDevice};
use spindle_reactor::mailbox::{Remote, mesh};
use spindle_reactor::net::Listener as Socket;
use spindle_target::env::Message;
use spindle_target::shared::Registry;
use spindle_target::snapshot::{Listener, Snapshot};
use spindle_transport::TransportKind;
use spindle_transport::admission::Admission;

use crate::cli::ServeArgs;
use crate::config::{Config, ConfigErrors, Origins, Plan, connect_line};
use crate::{log, rpc};

/// Why serving could not begin or had to end.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error(transparent)]
    Config(#[from] ConfigErrors),
    /// A resource could not be had.
    #[error("{0}")]
    Start(String),
    /// An address could not be listened on.
    #[error("listener {address}: cannot listen: {source}")]
    Listen { address: SocketAddr, source: std::io::Error },
    /// Commands were still in flight at the deadline.
    #[error("shutdown: connections were still open after {0:?} (shutdown.deadline_ms)")]
    Drain(Duration),
}

impl ServeError {
    /// An address could not be listened on over RDMA.
    fn listen_rdma(address: SocketAddr, error: &spindle_rdma_verbs::VerbsError) -> ServeError {
        ServeError::Start(format!("listener {address} (rdma): cannot listen: {error}"))
    }
}

/// Messages that a mailbox holds.
const MAILBOX_ENTRIES: usize = 1024;
/// Connections that may wait to be accepted.
const BACKLOG: u32 = 1024;
/// Longest drain once a core has failed.
const FAILED_DEADLINE: Duration = Duration::from_secs(1);
/// How long the cores may take to stop once the deadline of a shutdown is over: they wait for what their
/// disks have in flight, and one that hangs must not keep the process.
const STOP_MAX: Duration = Duration::from_secs(2);

/// How long a client of the control socket waits until its change is in force, and between two looks.
const SHOWN_MAX: Duration = Duration::from_secs(10);
const SHOWN_PERIOD: Duration = Duration::from_micros(200);

/// How long drives may take to be shut down after a shutdown that did not go well, and to be opened until
/// they can be.
const DRIVES_MAX: Duration = Duration::from_secs(5);

/// `spindle serve [-c FILE]`: until SIGTERM or SIGINT.
///
/// # Errors
/// [`ServeError`]: the configuration is wrong, something could not be started, or the shutdown passed its
/// deadline.
pub fn run(args: &ServeArgs) -> Result<(), ServeError> {
    let config = match &args.config {
        Some(path) => Config::load(path)?,
        None => Config::builtin(),
    };
    // Before any thread is there: what is not a core's loop keeps off the cores'.
    let polled: Vec<usize> = config.plan().reactor.cpus().into_iter().flatten().collect();
    spindle_reactor::affinity::leave_to_pollers(&polled);
    let log = log::start(&config.plan().log).map_err(ServeError::Start)?;
    // Before any thread is there, so that no signal is lost.
    let signals = signal_hook::iterator::Signals::new([SIGHUP, SIGTERM, SIGINT])
        .map_err(|error| ServeError::Start(format!("cannot wait for signals: {error}")))?;
    for note in &config.plan().notes {
        tracing::warn!("{note}");
    }
    allow_descriptors();
    let end = serve(args, config, signals, &log);
    // Drives are told that power may go, and until then the process stays, also where it could not start.
    // Not for ever where a core hangs.
    match &end {
        Ok(()) => spindle_nvme_pcie::finish(),
        Err(_) => drop(spindle_nvme_pcie::finish_within(DRIVES_MAX)),
    }
    end
}

/// Open the disks, run the cores, and do what signals, drives and far targets ask for until it is time to go.
fn serve(
    args: &ServeArgs,
    config: Config,
    signals: SignalsInfo,
    log: &log::LogControl,
) -> Result<(), ServeError> {
    // First of all: what it finds wrong ends nothing that has begun.
    let control = bind_control(config.plan())?;
    let mut served = Reconfigurator::open(config, Origins::here(), args.ephemeral)?;
    let listeners = listen(&served.snapshot().listeners, &[], &[])?;
    served.listens_on(&listeners);
    let running = start(served.plan(), served.snapshot(), listeners, &signals.handle())?;
    let (send, orders) = mpsc::channel();
    if let Some(control) = &control
        && let Err(error) = control.answer(Arc::clone(&running.view), send.clone())
    {
        tracing::error!(%error, "the control socket is not answered, as there is no thread for it; restart");
    }
    announce(served.snapshot(), TransportKind::Tcp);
    let handle = signals.handle();
    let is_ending = Arc::new(AtomicBool::new(false));
    forward(signals, send, Arc::clone(&is_ending))?;
    loop {
        let next = match orders.recv_timeout(served.pause()) {
            Ok(MainTask::Signal(SIGHUP)) => served.reload(log),
            Ok(MainTask::Change(change)) => {
                act_on(change, &mut served, &running, log, &is_ending);
                None
            }
            Err(RecvTimeoutError::Timeout) => served.poll(Instant::now()),
            // The end of signals: a core has failed. Without it a part of the hosts would wait for ever.
            Ok(MainTask::Signal(_) | MainTask::End) | Err(RecvTimeoutError::Disconnected) => break,
        };
        if let Some(next) = next {
            let listeners = served.take_listeners();
            running.change_to(served.plan(), (next, listeners));
        }
    }
    let mut deadline = served.plan().drain_deadline;
    if handle.is_closed() {
        // A core that has failed cannot end its queues: what the others have is not worth a longer outage.
        deadline = deadline.min(FAILED_DEADLINE);
    }
    tracing::info!(
        deadline_ms = deadline.as_millis(),
        "shutting down: commands in flight end, hosts are disconnected"
    );
    let view = Arc::clone(&running.view);
    let end = running.shut_down(deadline);
    view.end();
    // A drive that is being opened is shut down as well, unless it does not become ready.
    let give_up = Instant::now() + DRIVES_MAX;
    while served.is_opening_drives() && Instant::now() < give_up {
        if matches!(
            orders.recv_timeout(served.pause()),
            Ok(MainTask::End) | Err(RecvTimeoutError::Disconnected)
        ) {
            break;
        }
    }
    end
}

/// Where operators ask, if there is such a place.
fn bind_control(plan: &Plan) -> Result<Option<Control>, ServeError> {
    let group = plan.control.group.as_deref();
    let path = match &plan.control.socket {
        None if group.is_none() => return Ok(control::bind_implied(&control::implied())),
        None => control::implied(),
        Some(path) if path.as_os_str().is_empty() => return Ok(None),
        Some(path) => path.clone(),
    };
    let failed = |error| ServeError::Start(format!("control.socket = {path:?}: cannot listen: {error}"));
    Control::bind(&path, group).map(Some).map_err(failed)
}

/// What the main thread is to do.
enum MainTask {
    Signal(i32),
    Change(rpc::Change),
    /// A core has failed.
    End,
}

impl From<rpc::Change> for MainTask {
    fn from(change: rpc::Change) -> MainTask {
        MainTask::Change(change)
    }
}

/// Do what a client of the control socket asks for, and tell it when all cores have it.
fn act_on(
    change: rpc::Change,
    served: &mut Reconfigurator,
    running: &Running,
    log: &log::LogControl,
    is_ending: &AtomicBool,
) {
    if is_ending.load(Ordering::Acquire) {
        return change.answer(Err(rpc::Failure::system("the target is ending".to_owned())));
    }
    let done = served.change(log, |edit| (change.edit)(edit, &change.args));
    let result = done.and_then(|(result, next)| {
        let Some(next) = next else { return Ok(result) };
        let (generation, listeners) = (next.generation, served.take_listeners());
        running.change_to(served.plan(), (next, listeners));
        if running.wait_until_shown(generation, is_ending) {
            return Ok(result);
        }
        let what = "the change is kept, and not in force on all cores yet (memory may be being registered)";
        Err(rpc::Failure::system(what.to_owned()))
    });
    change.answer(result);
}

/// The signals, until a core has failed. From a thread of their own, which goes with the process.
/// `is_ending` is raised at once, as changes may be waiting before the signal.
fn forward(
    mut signals: SignalsInfo,
    send: mpsc::Sender<MainTask>,
    is_ending: Arc<AtomicBool>,
) -> Result<(), ServeError> {
    let run = move || {
        let _ = signals.forever().try_for_each(|signal| {
            is_ending.fetch_or(signal != SIGHUP, Ordering::AcqRel);
            send.send(MainTask::Signal(signal))
        });
        is_ending.store(true, Ordering::Release);
        let _ = send.send(MainTask::End);
    };
    std::thread::Builder::new()
        .name("signals".to_owned())
        .spawn(run)
        .map_err(|error| ServeError::Start(format!("cannot start the thread of the signals: {error}")))?;
    Ok(())
}

/// A connection is a descriptor: allow as many as the system lets us have.
fn allow_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        let files = limit.current.unwrap_or(u64::MAX);
        tracing::warn!(files, %error, "the limit of open files is not raised: it limits connections");
    }
}

/// The threads at work.
struct Running {
    remote: Remote<CoreMessage>,
    /// By core.
    threads: Vec<JoinHandle<()>>,
    stop: Arc<AtomicBool>,
    view: Arc<View>,
    /// Generation of the configuration that hosts of each core are shown.
    advertised: Arc<[AtomicU64]>,
    /// What the cores change to goes by it.
    registrar: Option<Registrar>,
}

impl Running {
    /// All cores change to this snapshot, and one of them listens on what is new in it.
    fn change_to(&self, plan: &Plan, next: Next) {
        self.view.change_to(plan, &next.0);
        let next = match &self.registrar {
            Some(registrar) => registrar.send(next),
            None => Err(next),
        };
        // That thread has ended by a panic: what needs no memory of disks can be changed without it.
        if let Err((next, listeners)) = next {
            let listeners = Handover::new((next.generation, listeners));
            self.send(ACCEPTOR..ACCEPTOR + 1, &CoreMessage::Listen(listeners));
            self.broadcast(&CoreMessage::Target(Message::Snapshot(next)));
        }
    }

    /// Until hosts of all cores are shown this configuration. False: not within [`SHOWN_MAX`], as where much
    /// memory is registered for it, or the target is ending.
    fn wait_until_shown(&self, generation: u64, is_ending: &AtomicBool) -> bool {
        let end = Instant::now() + SHOWN_MAX;
        let is_shown = || self.advertised.iter().all(|seen| seen.load(Ordering::Acquire) >= generation);
        while !is_shown() {
            if Instant::now() >= end || is_ending.load(Ordering::Acquire) {
                return false;
            }
            std::thread::park_timeout(SHOWN_PERIOD);
        }
        true
    }

    fn broadcast(&self, message: &CoreMessage) {
        self.send(0..self.threads.len(), message);
    }

    fn send(&self, cores: Range<usize>, message: &CoreMessage) {
        for (core, thread) in self.threads.iter().enumerate().filter(|(core, _)| cores.contains(core)) {
            registrar::send(&self.remote, core, message, || thread.is_finished());
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
            if Instant::now() >= end + STOP_MAX {
                // The end of the process takes the threads along, and leaves their disks to the kernel.
                return Err(ServeError::Drain(deadline));
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

/// Ends the wait for signals when its thread panics.
struct OnPanic(Handle);

impl Drop for OnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.close();
        }
    }
}

/// A thread on each core, and what they share.
fn start(
    plan: &Plan,
    snapshot: &Arc<Snapshot>,
    listeners: Vec<Listening>,
    signals: &Handle,
) -> Result<Running, ServeError> {
    let cpus = plan.reactor.cpus();
    let cores = cpus.len();
    let mailboxes = mesh::<CoreMessage>(cores, MAILBOX_ENTRIES)
        .map_err(|error| ServeError::Start(format!("cannot make the mailboxes between cores: {error}")))?;
    let remote = mailboxes
        .first()
        .map(spindle_reactor::mailbox::Mailbox::remote)
        .ok_or_else(|| ServeError::Start("no core is configured".to_owned()))?;
    let registry = Arc::new(Registry::default());
    let loads: Arc<[AtomicUsize]> = (0..cores).map(|_| AtomicUsize::new(0)).collect();
    let advertised: Arc<[AtomicU64]> = (0..cores).map(|_| AtomicU64::new(snapshot.generation)).collect();
    let admission = Admission::new(plan.limits.unconnected_per_address);
    let (stop, shared_plan) = (Arc::new(AtomicBool::new(false)), Arc::new(plan.clone()));
    let mut listeners = Some(listeners);
    let mut rdma = open_rdma(plan, snapshot)?;
    let (ready, is_ready) = mpsc::channel();
    let mut threads = Vec::new();
    for (core, (mailbox, cpu)) in mailboxes.into_iter().zip(cpus.iter().copied()).enumerate() {
        let setup = CoreSetup {
            core,
            cores,
            cpu,
            plan: Arc::clone(&shared_plan),
            registry: Arc::clone(&registry),
            listeners: listeners.take().unwrap_or_default(),
            loads: Arc::clone(&loads),
            advertised: Arc::clone(&advertised),
            admission: Arc::clone(&admission),
            rdma: RdmaSetup { listeners: std::mem::take(&mut rdma.listeners), ..rdma.clone() },
            stop: Arc::clone(&stop),
        };
        let (ready, on_panic) = (ready.clone(), OnPanic(signals.clone()));
        let first = Arc::clone(snapshot);
        let run = move || {
            let _on_panic = on_panic;
            match CoreLoop::new(setup, mailbox, first) {
                Ok(core) => {
                    let _ = ready.send(Ok(core.ready()));
                    core.run();
                }
                Err(error) => {
                    let _ = ready.send(Err(error));
                }
            }
        };
        let thread = std::thread::Builder::new().name(format!("reactor-{core}")).spawn(run);
        threads.push(thread.map_err(|error| {
            ServeError::Start(format!("cannot start the thread of core {core}: {error}"))
        })?);
    }
    drop(ready);
    let ready = wait_ready(cores, &is_ready).inspect_err(|_| stop.store(true, Ordering::Relaxed))?;
    let (pools, turns): (Vec<_>, Vec<_>) = ready.into_iter().map(|core| (core.pool, core.turns)).unzip();
    let seen = cpus.into_iter().zip(turns).map(|(cpu, turns)| CoreView { cpu, turns }).collect();
    let view = Arc::new(View::new(seen, loads, registry, (plan, snapshot)));
    let (first, its_stop) = (Arc::clone(snapshot), Arc::clone(&stop));
    let registrar = Registrar::start(rdma.known, pools, first, cores, remote.clone(), its_stop)?;
    Ok(Running { remote, threads, stop, view, advertised, registrar: Some(registrar) })
}

/// Until each of so many cores has said that it works; what each said, in their order.
fn wait_ready(
    cores: usize,
    is_ready: &mpsc::Receiver<Result<CoreReady, ServeError>>,
) -> Result<Vec<CoreReady>, ServeError> {
    // A core that panics takes its end of the channel along.
    let panicked = || Err(ServeError::Start("a core's thread panicked".to_owned()));
    let ready = (0..cores).map(|_| is_ready.recv().unwrap_or_else(|_| panicked()));
    let mut ready = ready.collect::<Result<Vec<_>, _>>()?;
    ready.sort_by_key(|core| core.core);
    Ok(ready)
}

/// Sockets of the TCP listeners that are open in `listeners` and were not in `before`. Those of `closing` are
/// still there, and are not to be.
fn listen(
    listeners: &[Listener],
    before: &[Listener],
    closing: &[&Socket],
) -> Result<Vec<Listening>, ServeError> {
    let bind = |(index, listener): (usize, &Listener)| {
        let address = listener.address;
        match Socket::bind_beside(address, BACKLOG, closing) {
            Ok(listener) => Ok((Arc::new(listener), index)),
            Err(source) => Err(ServeError::Listen { address, source }),
        }
    };
    let is_new = |(index, listener): &(usize, &Listener)| {
        listener.transport == TransportKind::Tcp
            && listener.is_open
            && !before.get(*index).is_some_and(|before| before.is_open)
    };
    listeners.iter().enumerate().filter(is_new).map(bind).collect()
}

/// The devices and addresses of RDMA listeners; nothing is opened where there is none.
fn open_rdma(plan: &Plan, snapshot: &Snapshot) -> Result<RdmaSetup, ServeError> {
    let is_rdma = |(_, listener): &(usize, &Listener)| listener.transport == TransportKind::Rdma;
    let listeners = snapshot.listeners.iter().enumerate().filter(is_rdma);
    let listeners: Vec<_> = listeners.map(|(index, listener)| (listener.address, index)).collect();
    let mut devices = Vec::new();
    if let Some((address, _)) = listeners.first() {
        let failed = |error| ServeError::Start(format!("cannot open the RDMA devices: {error}"));
        let addresses: Vec<_> = listeners.iter().map(|(address, _)| *address).collect();
        devices = SharedDevice::for_listeners(&addresses).map_err(failed)?;
        if devices.is_empty() {
            return Err(ServeError::Start(format!(
                "listener {address}: transport = \"rdma\": this machine has no RDMA device (rdma link show); \
                 take \"tcp\", or add one"
            )));
        }
    }
    let known = KnownDevices::new(&devices);
    let in_capsule_bytes = plan.rdma_capsule().unwrap_or(0);
    Ok(RdmaSetup { devices: devices.into(), known, in_capsule_bytes, listeners })
}

/// Listeners of a transport, NQNs and the line that a host types.
fn announce(snapshot: &Snapshot, transport: TransportKind) {
    let is_meant = |listener: &&Listener| listener.transport == transport;
    for listener in snapshot.open_listeners().filter(is_meant) {
        let (address, port_id) = (listener.address, listener.port_id);
        match transport {
            TransportKind::Tcp => {
                tracing::info!(%address, port_id, "listening (NVMe/TCP, discovery included)")
            }
            TransportKind::Rdma => {
                tracing::info!(%address, port_id, "listening (NVMe/RDMA, discovery included)")
            }
        }
    }
    let is_there = snapshot.open_listeners().any(|listener| is_meant(&listener));
    for subsystem in &snapshot.subsystems {
        for namespace in subsystem.active().filter(|_| is_there) {
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
        let listeners = subsystem.listeners.iter().filter_map(|index| snapshot.listeners.get(*index));
        for listener in listeners.filter(is_meant) {
            tracing::info!("{}", connect_line(listener.endpoint(), &subsystem.nqn));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::DrivesHere;

    #[test]
    fn a_core_that_panics_ends_the_wait_for_signals_and_one_that_ends_does_not() {
        let mut signals = signal_hook::iterator::Signals::new([SIGHUP]).expect("a handler");
        let core = |does_panic: bool| {
            let on_panic = OnPanic(signals.handle());
            let run = move || {
                let _on_panic = on_panic;
                assert!(!does_panic, "as asked");
            };
            std::thread::spawn(run).join()
        };
        assert!(core(false).is_ok() && !signals.is_closed());
        assert!(core(true).is_err() && signals.is_closed());
        assert_eq!(signals.forever().next(), None);
    }

    #[test]
    fn a_core_that_hangs_does_not_keep_the_process_from_its_end() {
        let mailboxes = mesh::<CoreMessage>(1, 4).expect("mailboxes");
        let stop = Arc::new(AtomicBool::new(false));
        let (end, ended) = mpsc::channel::<()>();
        let thread = std::thread::spawn(move || assert!(ended.recv().is_err()));
        let snapshot = Config::builtin().plan().snapshot(None, &DrivesHere, &[]).expect("opened");
        let running = Running {
            remote: mailboxes[0].remote(),
            threads: vec![thread],
            stop: Arc::clone(&stop),
            view: Arc::new(View::new(
                Vec::new(),
                Arc::new([]),
                Arc::default(),
                (Config::builtin().plan(), &snapshot),
            )),
            advertised: Arc::new([]),
            registrar: None,
        };
        let error = running.shut_down(Duration::ZERO);
        assert!(matches!(error, Err(ServeError::Drain(Duration::ZERO))), "{error:?}");
        assert!(stop.load(Ordering::Relaxed));
        drop(end);
    }
}
