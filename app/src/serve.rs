//! `spindle serve`: starts one thread per core, sends snapshots of the configuration to the cores, handles
//! signals.
//!
//! ```text
//!   main thread: plan -> snapshot (disks) -> listeners -> core threads -> all ready -> log lines -> loop:
//!     SIGHUP            read the file again, send the new snapshot to all cores
//!     timer             open absent drives and far targets, check for new sizes; then send as for SIGHUP
//!     control socket    another thread responds (`rpc`); the main thread applies the changes
//!     SIGTERM, SIGINT   send Shutdown to all cores, wait until the deadline; also after a core's panic
//! ```
//!
//! The data path is in `core_loop` and the crates below it.

pub mod conn;
pub mod control;
pub mod core_loop;
mod optimistic;
mod reconfigurator;
mod registrar;
mod store;
mod threads;
pub mod view;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use self::control::Control;
use self::reconfigurator::{Changed, Reconfigurator};
use self::view::{CoreView, View};
use core_loop::{
    ACCEPTOR, CoreLoop, CoreMessage, CoreReady, CoreSetup, DiskError, DiskErrors, Listening,
    PublishedListeners, RdmaListeners, RdmaSetup,
};
use registrar::{NextSnapshot, RdmaMemory, Registrar};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, SignalsInfo};
use spindle_nvme_optimistic::service::Service;
use spindle_nvme_rdma::shell::{KnownDevices, Registrar as RdmaRegistrar, SharedDevice};
use spindle_nvme_transport::TransportKind;
use spindle_nvme_transport::admission::Admission;
use spindle_reactor::mailbox::{Mailbox, Remote, mesh};
use spindle_reactor::mem::Area;
use spindle_reactor::net::Listener as Socket;
use spindle_target::env::Message;
use spindle_target::shared::Registry;
use spindle_target::snapshot::{Listener, Snapshot};

use crate::cli::ServeArgs;
use crate::config::{Config, ConfigErrors, Origins, Plan, connect_line, group_id};
use crate::{log, rpc};

/// Why serving could not start or ended with an error.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error(transparent)]
    Config(#[from] ConfigErrors),
    /// A resource is missing (a thread, memory, a device, a disk, the control socket), or a core's thread
    /// panicked.
    #[error("{0}")]
    Start(String),
    #[error("listener {address}: cannot listen: {source}")]
    Listen { address: SocketAddr, source: std::io::Error },
    /// Connections were still open after `shutdown.deadline_ms`.
    #[error("shutdown: connections were still open after {0:?} (shutdown.deadline_ms)")]
    Drain(Duration),
}

impl ServeError {
    fn listen_rdma(address: SocketAddr, error: &spindle_rdma::VerbsError) -> ServeError {
        ServeError::Start(format!("listener {address} (rdma): cannot listen: {error}"))
    }
}

/// Capacity of a core's mailbox, in messages.
const MAILBOX_ENTRIES: usize = 1024;
/// Backlog of `listen(2)`, in connections.
const BACKLOG: u32 = 1024;
/// Longest drain of the other cores once a core has panicked.
const FAILED_DEADLINE: Duration = Duration::from_secs(1);
/// Longest time for the cores to stop after the shutdown deadline, while they wait for commands in flight at
/// their disks. After this time the process exits without waiting for the cores.
const STOP_MAX: Duration = Duration::from_secs(2);

/// How long a change by the control socket waits until all cores advertise it, and how often it checks.
const ADVERTISED_MAX: Duration = Duration::from_secs(10);
const ADVERTISED_CHECK_PERIOD: Duration = Duration::from_micros(200);

/// Longest wait at the end of the process for drives that are being opened, which are then shut down. After
/// an error, also the longest wait for the shutdown of drives.
const DRIVE_WAIT_MAX: Duration = Duration::from_secs(5);

/// `spindle serve [-c FILE]`: runs until SIGTERM or SIGINT.
///
/// # Errors
/// [`ServeError`]: the configuration is wrong, something could not be started, a core's thread panicked, or
/// the shutdown passed its deadline.
pub fn run(args: &ServeArgs) -> Result<(), ServeError> {
    let config = match &args.config {
        Some(path) => Config::load(path)?,
        None => Config::builtin(),
    };
    // Before any thread starts that stays: threads inherit the affinity, which excludes the polling cores.
    // The path probes of the configuration only wait.
    let polled: Vec<usize> = config.plan().reactor.cpus().into_iter().flatten().collect();
    spindle_reactor::affinity::leave_to_pollers(&polled);
    let log = log::start(&config.plan().log).map_err(ServeError::Start)?;
    // Before the cores start, so that no signal is lost.
    let signals = signal_hook::iterator::Signals::new([SIGHUP, SIGTERM, SIGINT])
        .map_err(|error| ServeError::Start(format!("cannot wait for signals: {error}")))?;
    for note in &config.plan().notes {
        tracing::warn!("{note}");
    }
    allow_descriptors();
    let end = serve(args, config, signals, &log);
    // Waits until the drives are shut down, also after a failed start. After an error the wait is bounded: a
    // core that hangs never drops its drives.
    match &end {
        Ok(()) => spindle_nvme_pcie::finish(),
        Err(_) => drop(spindle_nvme_pcie::finish_within(DRIVE_WAIT_MAX)),
    }
    end
}

/// Binds the control socket and the listeners, opens the disks, starts the cores, and handles signals,
/// changes and absent disks until the shutdown.
fn serve(
    args: &ServeArgs,
    config: Config,
    signals: SignalsInfo,
    log: &log::LogControl,
) -> Result<(), ServeError> {
    // Before the disks are opened: a failure here has nothing to undo.
    threads::check(config.plan()).map_err(ServeError::Start)?;
    let control = bind_control(config.plan())?;
    let mut reconfigurator = Reconfigurator::open(config, Origins::here(), args.ephemeral)?;
    let listeners = reconfigurator.listen_first()?;
    let running = start(reconfigurator.plan(), reconfigurator.snapshot(), listeners, &signals.handle())?;
    let (send, tasks) = mpsc::channel();
    if let Some(control) = &control
        && let Err(error) = control.answer(Arc::clone(&running.view), send.clone())
    {
        tracing::error!(%error, "control socket: cannot start its thread, methods are not answered; restart");
    }
    running.show(&mut reconfigurator);
    announce(reconfigurator.snapshot(), TransportKind::Tcp, &|index| !reconfigurator.is_absent(index));
    let handle = signals.handle();
    let is_ending = Arc::new(AtomicBool::new(false));
    forward_signals(signals, send, Arc::clone(&is_ending))?;
    loop {
        let next = match tasks.recv_timeout(reconfigurator.pause()) {
            Ok(MainTask::Signal(SIGHUP)) => reconfigurator.reload(log),
            Ok(MainTask::Change(change)) => {
                apply_change(change, &mut reconfigurator, &running, log, &is_ending);
                None
            }
            Err(RecvTimeoutError::Timeout) => {
                reconfigurator.set_disk_errors(running.disk_errors());
                reconfigurator.poll(Instant::now())
            }
            // `End`: a core has panicked. All cores stop, since the hosts of that core would otherwise wait
            // for ever.
            Ok(MainTask::Signal(_) | MainTask::End) | Err(RecvTimeoutError::Disconnected) => break,
        };
        if let Some(next) = next {
            let listeners = reconfigurator.take_listeners();
            running.change_to(reconfigurator.plan(), (next, listeners));
        }
        running.show(&mut reconfigurator);
    }
    let mut deadline = reconfigurator.plan().drain_deadline;
    if handle.is_closed() {
        // The hosts of the panicked core have no target until the process restarts, so the drain is short.
        deadline = deadline.min(FAILED_DEADLINE);
    }
    tracing::info!(
        deadline_ms = deadline.as_millis(),
        "shutting down: commands in flight end, hosts are disconnected"
    );
    let view = Arc::clone(&running.view);
    let end = running.shut_down(deadline);
    view.clear_snapshot();
    // Drives that are being opened are also shut down, if they become ready in time.
    let give_up = Instant::now() + DRIVE_WAIT_MAX;
    while reconfigurator.is_opening_drives() && Instant::now() < give_up {
        let next = tasks.recv_timeout(reconfigurator.pause());
        if matches!(next, Ok(MainTask::End) | Err(RecvTimeoutError::Disconnected)) {
            break;
        }
    }
    end
}

/// Binds the control socket. `None`: `control.socket` is empty; or the default path cannot be bound, and
/// neither `control.socket` nor `control.group` is set.
///
/// # Errors
/// A path that the configuration requires cannot be bound.
fn bind_control(plan: &Plan) -> Result<Option<Control>, ServeError> {
    let group = plan.control.group.as_deref();
    let path = match &plan.control.socket {
        None if group.is_none() => return Ok(control::bind_default(&control::default_path())),
        None => control::default_path(),
        Some(path) if path.as_os_str().is_empty() => return Ok(None),
        Some(path) => path.clone(),
    };
    let unknown = |why| ServeError::Start(format!("control.group = {:?}: {why}", group.unwrap_or_default()));
    let group = group.map(group_id).transpose().map_err(unknown)?;
    let failed = |error| ServeError::Start(format!("control.socket = {path:?}: cannot listen: {error}"));
    Control::bind(&path, group).map(Some).map_err(failed)
}

/// Work for the main thread.
enum MainTask {
    Signal(i32),
    Change(rpc::Change),
    /// A core has panicked.
    End,
}

impl From<rpc::Change> for MainTask {
    fn from(change: rpc::Change) -> MainTask {
        MainTask::Change(change)
    }
}

/// Applies a change for a client of the control socket, and responds once all cores advertise it. Responds
/// with an error if the change fails, the target is shutting down, or [`ADVERTISED_MAX`] passes.
fn apply_change(
    change: rpc::Change,
    reconfigurator: &mut Reconfigurator,
    running: &Running,
    log: &log::LogControl,
    is_ending: &AtomicBool,
) {
    if is_ending.load(Ordering::Acquire) {
        return change.respond(Err(rpc::Failure::system("the target is shutting down".to_owned())));
    }
    let edit = |edit: &mut rpc::Edit<'_>| (change.edit)(edit, &change.args);
    let result = change_all_cores(edit, reconfigurator, running, log, is_ending);
    // Before the answer: a status that is asked for after it shows the change.
    running.show(reconfigurator);
    change.respond(result);
}

/// Makes a change, and waits until all cores advertise it and its RDMA listeners are bound.
///
/// # Errors
/// The change was refused, or is not in force in time ([`Running::answer_max`]).
fn change_all_cores(
    edit: impl FnOnce(&mut rpc::Edit<'_>) -> Result<serde_json::Value, rpc::Failure>,
    reconfigurator: &mut Reconfigurator,
    running: &Running,
    log: &log::LogControl,
    is_ending: &AtomicBool,
) -> Result<serde_json::Value, rpc::Failure> {
    let (former, errors) = (Arc::clone(reconfigurator.plan()), running.disk_errors());
    let Changed { result, next, unsaved } = reconfigurator.change(log, edit)?;
    if let Some(next) = next {
        let (generation, listeners) = (next.generation, reconfigurator.take_listeners());
        let plan = Arc::clone(reconfigurator.plan());
        running.change_to(&plan, (next, listeners));
        let not_in_force = |why: &str, cores: &[(usize, &str)]| {
            Err(rpc::Failure::not_in_force(why, cores, unsaved.as_deref()))
        };
        let end = Instant::now() + running.answer_max;
        if !(running.wait_until_advertised(generation, end, is_ending) && running.check_optimistic(None)) {
            return not_in_force("memory may still be in registration", &[]);
        }
        let known = former.offers();
        let added: Vec<_> = plan.offers().into_iter().filter(|offer| !known.contains(offer)).collect();
        let of = |transport| added.iter().filter(move |it| it.1.0 == transport).map(|it| it.1.1);
        let rdma: Vec<_> = of(TransportKind::Rdma).collect();
        if let Err(why) = running.wait_until_listening(&rdma, generation, end, is_ending) {
            return not_in_force(&format!("{why}; next attempt in 1 s"), &[(ACCEPTOR, &why)]);
        }
        if let Some(absent) = of(TransportKind::Tcp).find(|at| reconfigurator.lacks(*at)) {
            let why = format!("listener {absent}: this machine does not have the address");
            return not_in_force(&format!("{why}; next attempt in 2 s"), &[(ACCEPTOR, &why)]);
        }
        let exposes = |plan: &Plan, disk: &str| {
            let mut namespaces = plan.subsystems.iter().flat_map(|subsystem| &subsystem.namespaces);
            namespaces.any(|namespace| namespace.disk == disk)
        };
        // Those of disks that the change opens or shows to hosts.
        let is_of_change = |error: &DiskError| {
            let is_shown = exposes(&plan, &error.disk) && !exposes(&former, &error.disk);
            // The reason may be another one at each try.
            let is_it = |known: &DiskError| (known.core, &known.disk) == (error.core, &error.disk);
            is_shown || !errors.iter().any(is_it)
        };
        let failed: Vec<_> = running.disk_errors().into_iter().filter(is_of_change).collect();
        if let Some(first) = failed.first() {
            let why = format!("core {}: {}; next attempt in 10 s", first.core, first.why);
            let cores: Vec<_> = failed.iter().map(|error| (error.core, error.why.as_str())).collect();
            return not_in_force(&why, &cores);
        }
    }
    match unsaved {
        None => Ok(result),
        Some(why) => Err(rpc::Failure::not_saved(&why)),
    }
}

/// Starts the thread that forwards signals to `send`. A core's panic ends the thread, which then sends
/// [`MainTask::End`]. The thread itself sets `is_ending`, so that changes queued before a SIGTERM or SIGINT
/// are refused.
fn forward_signals(
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

/// Raises the soft limit of open files to the hard limit, as each connection uses a descriptor. Logs a
/// failure.
fn allow_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        let files = limit.current.unwrap_or(u64::MAX);
        tracing::warn!(files, %error, "cannot raise the limit of open files, which limits connections");
    }
}

/// The core threads, the state that they share, and the registrar.
struct Running {
    remote: Remote<CoreMessage>,
    /// Indexed by core.
    threads: Vec<JoinHandle<()>>,
    stop: Arc<AtomicBool>,
    view: Arc<View>,
    /// Per core, the generation of its advertised snapshot.
    advertised: Arc<[AtomicU64]>,
    /// Per core, the disks that are not open there.
    disk_errors: DiskErrors,
    /// Sends snapshots to the cores once their memory is registered. `None` only in tests.
    registrar: Option<Registrar>,
    /// `None`: hosts cannot read caches by RDMA.
    optimistic: Option<Service<optimistic::Owner>>,
    /// [`ADVERTISED_MAX`]; less in tests.
    answer_max: Duration,
}

impl Running {
    /// Updates the view. Sends the snapshot to all cores, and its new listeners to core [`ACCEPTOR`], through
    /// the registrar.
    fn change_to(&self, plan: &Arc<Plan>, next: NextSnapshot) {
        let former = self.view.look().snapshot;
        self.view.change_to(plan, &next.0);
        // Before a core learns of another disk under a NSID: then a host writes to that, and another one
        // would still read the former disk's frames.
        if !self.check_optimistic(Some(optimistic::addresses(plan))) {
            tracing::warn!(
                "optimistic reads: no answer in 10 s, connections of the old configuration may stay open"
            );
            former.iter().for_each(|former| optimistic::close_revoked(former, &next.0));
        }
        let next = match &self.registrar {
            Some(registrar) => registrar.send(next),
            None => Err(next),
        };
        // Sends without the registrar, whose thread has panicked: changes that need no registered memory
        // still work.
        if let Err((next, listeners)) = next {
            self.send(ACCEPTOR, CoreMessage::Listen((next.generation, listeners)));
            self.broadcast(|| CoreMessage::Target(Message::Snapshot(Arc::clone(&next))));
        }
    }

    /// Waits until all cores advertise this generation. False: not before `end` (registering much memory may
    /// take longer), or the target is shutting down.
    fn wait_until_advertised(&self, generation: u64, end: Instant, is_ending: &AtomicBool) -> bool {
        wait_until(end, is_ending, || {
            self.advertised.iter().all(|seen| seen.load(Ordering::Acquire) >= generation)
        })
    }

    /// Waits until core [`ACCEPTOR`] listens on the RDMA listeners `added`, which are new in this generation.
    ///
    /// # Errors
    /// The reason, if one is not listened on before `end` (its device may be being registered), or the target
    /// is shutting down.
    fn wait_until_listening(
        &self,
        added: &[SocketAddr],
        generation: u64,
        end: Instant,
        is_ending: &AtomicBool,
    ) -> Result<(), String> {
        let first_missing = || {
            let RdmaListeners { generation: now, missing } = self.view.rdma_listeners();
            let missing = missing.into_iter().find(|(address, _)| added.contains(address));
            let unknown = || added.first().map(|address| (*address, "no answer yet".to_owned()));
            if now < generation { unknown() } else { missing }
        };
        wait_until(end, is_ending, || first_missing().is_none());
        first_missing().map_or(Ok(()), |(address, why)| Err(format!("listener {address} (rdma): {why}")))
    }

    /// Makes visible what is not saved, not there, or not open.
    fn show(&self, reconfigurator: &mut Reconfigurator) {
        reconfigurator.set_disk_errors(self.disk_errors());
        self.view.set_unsaved(reconfigurator.unsaved());
        self.view.set_missing(reconfigurator.missing());
    }

    /// Returns the disks that are not open on a core, by core.
    fn disk_errors(&self) -> Vec<DiskError> {
        let of_core =
            |errors: &Mutex<Vec<DiskError>>| errors.lock().unwrap_or_else(PoisonError::into_inner).clone();
        self.disk_errors.iter().flat_map(of_core).collect()
    }

    fn broadcast(&self, message: impl Fn() -> CoreMessage) {
        (0..self.threads.len()).for_each(|core| self.send(core, message()));
    }

    fn send(&self, core: usize, message: CoreMessage) {
        registrar::send(&self.remote, core, message, || self.threads[core].is_finished());
    }

    /// Ends the optimistic connections that the current configuration does not allow. False: not within 10 s.
    fn check_optimistic(&self, listeners: Option<Vec<SocketAddr>>) -> bool {
        self.optimistic.as_ref().is_none_or(|service| service.check(listeners))
    }

    fn shut_down(mut self, deadline: Duration) -> Result<(), ServeError> {
        self.optimistic = None;
        self.broadcast(|| CoreMessage::Target(Message::Shutdown));
        let end = Instant::now() + deadline;
        let mut is_late = false;
        while self.threads.iter().any(|thread| !thread.is_finished()) {
            if Instant::now() >= end && !is_late {
                is_late = true;
                self.stop.store(true, Ordering::Relaxed);
            }
            if Instant::now() >= end + STOP_MAX {
                // The threads end with the process; the kernel closes their disks.
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

/// Waits until `is_done`. False: not before `end`, or the target is shutting down.
fn wait_until(end: Instant, is_ending: &AtomicBool, is_done: impl Fn() -> bool) -> bool {
    while !is_done() {
        if Instant::now() >= end || is_ending.load(Ordering::Acquire) {
            return false;
        }
        std::thread::park_timeout(ADVERTISED_CHECK_PERIOD);
    }
    true
}

/// Ends `Signals::forever` if it is dropped by a panic.
struct CloseSignalsOnPanic(Handle);

impl Drop for CloseSignalsOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.close();
        }
    }
}

/// Opens the RDMA devices, starts the core threads, waits until all cores are ready, and starts the
/// registrar.
fn start(
    plan: &Arc<Plan>,
    snapshot: &Arc<Snapshot>,
    listeners: Vec<Listening>,
    signals: &Handle,
) -> Result<Running, ServeError> {
    let cpus = plan.reactor.cpus();
    let cores = cpus.len();
    let (mailboxes, remote) = mailboxes(cores)?;
    let registry = Arc::new(Registry::default());
    let waker = remote.clone();
    // A full mailbox: the core is awake, or will be.
    registry.set_wake(Arc::new(move |core| _ = waker.send(core, CoreMessage::Wake)));
    let loads: Arc<[AtomicUsize]> = (0..cores).map(|_| AtomicUsize::new(0)).collect();
    let advertised: Arc<[AtomicU64]> = (0..cores).map(|_| AtomicU64::new(snapshot.generation)).collect();
    let disk_errors: DiskErrors = (0..cores).map(|_| Mutex::default()).collect();
    let admission = Admission::new(plan.limits.unconnected_per_address);
    let (stop, mut listeners) = (Arc::new(AtomicBool::new(false)), Some(listeners));
    let (mut rdma, devices) = open_rdma(plan, snapshot)?;
    let ((ready, is_ready), answer_max) = (mpsc::channel(), ADVERTISED_MAX);
    let mut threads = Vec::new();
    for (core, (mailbox, cpu)) in mailboxes.into_iter().zip(cpus.iter().copied()).enumerate() {
        let setup = CoreSetup {
            core,
            cores,
            cpu,
            plan: Arc::clone(plan),
            registry: Arc::clone(&registry),
            listeners: listeners.take().unwrap_or_default(),
            loads: Arc::clone(&loads),
            advertised: Arc::clone(&advertised),
            disk_errors: Arc::clone(&disk_errors),
            admission: Arc::clone(&admission),
            rdma: RdmaSetup { listeners: std::mem::take(&mut rdma.listeners), ..rdma.clone() },
            stop: Arc::clone(&stop),
        };
        let (ready, on_panic) = (ready.clone(), CloseSignalsOnPanic(signals.clone()));
        let first = Arc::clone(snapshot);
        let run = move || {
            let _on_panic = on_panic;
            match CoreLoop::new(setup, mailbox, first) {
                Ok(core) => {
                    let _ = ready.send(Ok(core.ready()));
                    // If a core panics before it reports, `wait_ready` ends once all other cores have dropped
                    // their sender.
                    drop(ready);
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
    let (pools, turns): (Vec<_>, Vec<_>) = ready.into_iter().map(|core| (core.pools, core.turns)).unzip();
    let core_views = cpus.into_iter().zip(turns).map(|(cpu, turns)| CoreView { cpu, turns }).collect();
    let view = Arc::new(View::new(core_views, loads, registry, (plan, snapshot), rdma.published));
    let optimistic = optimistic::start(plan, rdma.known.clone(), &view)?;
    let memory = plan.rdma_capsule().map(|_| register(devices, rdma.known, pools.as_flattened()));
    let memory = memory.transpose().inspect_err(|_| stop.store(true, Ordering::Relaxed))?;
    let (pools, first) = (pools.into_iter().map(|[io, _]| io).collect(), Arc::clone(snapshot));
    let registrar = Some(Registrar::start(memory, pools, first, cores, remote.clone(), Arc::clone(&stop))?);
    Ok(Running { remote, threads, stop, view, advertised, disk_errors, registrar, optimistic, answer_max })
}

/// Creates a mailbox for each core, and a sender for other threads.
fn mailboxes(cores: usize) -> Result<(Vec<Mailbox<CoreMessage>>, Remote<CoreMessage>), ServeError> {
    let mailboxes = mesh::<CoreMessage>(cores, MAILBOX_ENTRIES)
        .map_err(|error| ServeError::Start(format!("cannot make the mailboxes between cores: {error}")))?;
    let remote = mailboxes.first().map(Mailbox::remote);
    let remote = remote.ok_or_else(|| ServeError::Start("no core is configured".to_owned()))?;
    Ok((mailboxes, remote))
}

/// Registers the cores' pools with the RDMA devices.
fn register(
    devices: Vec<Arc<SharedDevice>>,
    known: KnownDevices,
    pools: &[Area],
) -> Result<Box<dyn RdmaMemory>, ServeError> {
    let registrar = RdmaRegistrar::new(devices, known, pools.to_vec());
    Ok(Box::new(registrar.map_err(|error| ServeError::Start(format!("RDMA: {error}")))?))
}

/// Waits until each core is ready or one has failed. The result is sorted by core.
fn wait_ready(
    cores: usize,
    is_ready: &mpsc::Receiver<Result<CoreReady, ServeError>>,
) -> Result<Vec<CoreReady>, ServeError> {
    // A core that panics drops its sender; `recv` fails once all senders are dropped.
    let panicked = || Err(ServeError::Start("a core's thread panicked".to_owned()));
    let ready = (0..cores).map(|_| is_ready.recv().unwrap_or_else(|_| panicked()));
    let mut ready = ready.collect::<Result<Vec<_>, _>>()?;
    ready.sort_by_key(|core| core.core);
    Ok(ready)
}

/// Binds the TCP listeners that are open in `listeners` and not open in `before`. The sockets in `closing`
/// may have overlapping addresses, since they will be closed.
fn listen(
    listeners: &[Listener],
    before: &[Listener],
    closing: &[&Socket],
) -> Result<Vec<Listening>, ServeError> {
    let is_new = |(index, _): &(usize, &Listener)| !before.get(*index).is_some_and(|before| before.is_open);
    let new = listeners.iter().enumerate().filter(is_new);
    new.filter_map(|(index, listener)| listen_beside(index, listener, closing)).collect()
}

/// Binds a listener; `None`: it is closed, or of another transport than TCP.
fn listen_at(index: usize, listener: &Listener) -> Option<Result<Listening, ServeError>> {
    listen_beside(index, listener, &[])
}

fn listen_beside(
    index: usize,
    listener: &Listener,
    closing: &[&Socket],
) -> Option<Result<Listening, ServeError>> {
    let address = listener.address;
    (listener.is_open && listener.transport == TransportKind::Tcp).then(|| {
        let socket = Socket::bind_beside(address, BACKLOG, closing);
        let socket = socket.map_err(|source| ServeError::Listen { address, source })?;
        Ok((Arc::new(socket), index))
    })
}

/// Opens the RDMA devices if the snapshot has an RDMA listener. There may be none yet.
fn open_rdma(plan: &Plan, snapshot: &Snapshot) -> Result<(RdmaSetup, Vec<Arc<SharedDevice>>), ServeError> {
    let is_rdma = |(_, listener): &(usize, &Listener)| listener.transport == TransportKind::Rdma;
    let listeners = snapshot.listeners.iter().enumerate().filter(is_rdma);
    let listeners: Vec<_> = listeners.map(|(index, listener)| (listener.address, index)).collect();
    let mut devices = Vec::new();
    if !listeners.is_empty() {
        let failed = |error| ServeError::Start(format!("cannot open the RDMA devices: {error}"));
        let addresses: Vec<_> = listeners.iter().map(|(address, _)| *address).collect();
        devices = SharedDevice::for_listeners(&addresses).map_err(failed)?;
    }
    let known = KnownDevices::new(&devices);
    let in_capsule_bytes = plan.rdma_capsule().unwrap_or(0);
    let published = PublishedListeners::default();
    Ok((RdmaSetup { known, in_capsule_bytes, listeners, published }, devices))
}

/// Logs the open listeners of a transport that are bound and, if there are any, all namespaces. Logs the
/// `nvme connect` command for each subsystem at each of these listeners.
fn announce(snapshot: &Snapshot, transport: TransportKind, is_bound: &dyn Fn(usize) -> bool) {
    let bound = |index: &usize| is_bound(*index).then(|| snapshot.listeners.get(*index)).flatten();
    let is_meant = |listener: &&Listener| listener.is_open && listener.transport == transport;
    let all: Vec<_> = (0..snapshot.listeners.len()).collect();
    for listener in all.iter().filter_map(bound).filter(is_meant) {
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
    let is_there = all.iter().filter_map(bound).any(|listener| is_meant(&listener));
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
        let listeners = subsystem.listeners.iter().filter_map(bound);
        for listener in listeners.filter(is_meant) {
            tracing::info!("{}", connect_line(listener.endpoint(), &subsystem.nqn));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_core_that_panics_ends_the_wait_for_signals_and_one_that_ends_does_not() {
        let mut signals = signal_hook::iterator::Signals::new([SIGHUP]).expect("a handler");
        let core = |does_panic: bool| {
            let on_panic = CloseSignalsOnPanic(signals.handle());
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

    /// One core, which never takes a message, and advertises the first snapshot.
    struct Silent {
        running: Running,
        reconfigurator: Reconfigurator,
        listeners: PublishedListeners,
        /// Dropped, it ends the core's thread.
        _end: mpsc::Sender<()>,
        _mailbox: Mailbox<CoreMessage>,
    }

    fn silent(config: Config) -> Silent {
        let mailbox = mesh::<CoreMessage>(1, 16).expect("mailboxes").pop().expect("one");
        let (end, ended) = mpsc::channel::<()>();
        let thread = std::thread::spawn(move || assert!(ended.recv().is_err()));
        let reconfigurator =
            Reconfigurator::open(config, Origins::here(), true).unwrap_or_else(|error| panic!("{error}"));
        let in_force = (reconfigurator.plan(), reconfigurator.snapshot());
        let listeners = PublishedListeners::default();
        let published = Arc::clone(&listeners);
        let view = View::new(Vec::new(), Arc::new([]), Arc::default(), in_force, published);
        let running = Running {
            remote: mailbox.remote(),
            threads: vec![thread],
            stop: Arc::default(),
            view: Arc::new(view),
            advertised: Arc::new([AtomicU64::new(1)]),
            disk_errors: Arc::new([]),
            registrar: None,
            optimistic: None,
            answer_max: Duration::from_millis(50),
        };
        Silent { running, reconfigurator, listeners, _end: end, _mailbox: mailbox }
    }

    #[test]
    fn a_core_that_hangs_does_not_keep_the_process_from_its_end() {
        let core = silent(Config::builtin());
        let stop = Arc::clone(&core.running.stop);
        let error = core.running.shut_down(Duration::ZERO);
        assert!(matches!(error, Err(ServeError::Drain(Duration::ZERO))), "{error:?}");
        assert!(stop.load(Ordering::Relaxed));
    }

    /// Makes a change that adds a disk, and returns the answer.
    fn add_disk(core: &mut Silent, name: &str, is_ending: bool) -> Result<serde_json::Value, rpc::Failure> {
        let params = serde_json::json!({ "name": name, "num_blocks": 2048, "block_size": 512 });
        let (edit, args) = rpc::tests::change("bdev_malloc_create", params)?;
        let log = log::LogControl::unread();
        let edit = |sections: &mut rpc::Edit<'_>| edit(sections, &args);
        let is_ending = AtomicBool::new(is_ending);
        change_all_cores(edit, &mut core.reconfigurator, &core.running, &log, &is_ending)
    }

    #[test]
    fn a_change_that_a_core_does_not_take_in_time_is_answered_as_kept_and_not_in_force() {
        let mut core = silent(Config::builtin());
        let expected = Err(rpc::Failure::not_in_force("memory may still be in registration", &[], None));
        let begun = Instant::now();
        assert_eq!(add_disk(&mut core, "m1", false), expected);
        assert!(begun.elapsed() >= core.running.answer_max, "it is waited for");
        assert_eq!(core.reconfigurator.snapshot().generation, 2);
        assert!(core.running.view.look().plan.disk("m1").is_some(), "the change stays");
        core.running.answer_max = Duration::from_secs(600);
        assert_eq!(add_disk(&mut core, "m2", true), expected, "the end does not wait");
        core.running.advertised = Arc::new([AtomicU64::new(4)]);
        assert_eq!(add_disk(&mut core, "m3", false), Ok("m3".into()), "the core has it");
    }

    #[test]
    fn a_change_waits_for_its_rdma_listeners_and_for_no_others() {
        let core = silent(Config::builtin());
        let at = |port| SocketAddr::from(([10, 9, 1, 1], port));
        let wait = |added: &[SocketAddr]| {
            let end = Instant::now() + core.running.answer_max;
            core.running.wait_until_listening(added, 2, end, &AtomicBool::new(false))
        };
        let publish = |generation, missing: &[u16]| {
            let missing = missing.iter().map(|port| (at(*port), "why".to_owned())).collect();
            *core.listeners.lock().expect("not poisoned") = RdmaListeners { generation, missing };
        };
        publish(1, &[]);
        assert_eq!(wait(&[]), Ok(()));
        assert_eq!(wait(&[at(1)]), Err("listener 10.9.1.1:1 (rdma): no answer yet".to_owned()));
        publish(2, &[2, 3]);
        assert_eq!(wait(&[at(1)]), Ok(()));
        assert_eq!(wait(&[at(1), at(3)]), Err("listener 10.9.1.1:3 (rdma): why".to_owned()));
        let missing = core.running.view.look().status()["missing"].clone();
        assert_eq!(missing[1], serde_json::json!({ "what": "listener 10.9.1.1:3 (rdma)", "why": "why" }));
        let (end, ending) = (Instant::now() + Duration::from_secs(20), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| core.running.wait_until_listening(&[at(3)], 2, end, &ending));
            publish(2, &[2]);
            assert_eq!(waiter.join().expect("no panic"), Ok(()));
        });
    }
}
