//! [`Reconfigurator`]: the current configuration and snapshot. It makes the next snapshot after a SIGHUP, a
//! change by the control socket, when an absent drive or far target can be opened, and when a drive's or far
//! namespace's size changes.
//!
//! Drives and far targets are opened on background threads ([`open_attempts`]), since a broken one takes
//! minutes to fail and the caller has to handle signals. The next snapshot has the opened disks. The start
//! waits for drives without a limit, and for far targets at most [`REMOTES_MAX`], so that an absent far
//! target does not block it.
//!
//! The caller sends the returned snapshots to the cores.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use serde_json::Value;
use spindle_nvme_pcie::PciAddress;
use spindle_rdma::shell::check_address;
use spindle_reactor::net::Listener as Socket;
use spindle_target::snapshot::{Listener, Snapshot};
use spindle_transport::TransportKind;

use self::open_attempts::OpenAttempts;
use super::ServeError;
use super::core_loop::Listening;
use super::store::{Staged, difference};
use crate::config::{
    Change, Config, Opened, OpenedOrigin, Origin, Origins, Plan, RunningState, SnapshotError, text_of,
};
use crate::log::LogControl;
use crate::rpc::{Edit, Failure};

mod open_attempts;
#[cfg(test)]
mod tests;

/// How long the start waits for far targets, unless it waits longer for a drive.
const REMOTES_MAX: Duration = Duration::from_secs(1);
/// How often the start checks its open attempts.
const START_CHECK_PERIOD: Duration = Duration::from_millis(5);
/// How long a reload waits for the address of a listener that an earlier reload removed. Such a listener
/// closes once all cores have that snapshot; with RDMA this includes the registration of memory.
const CLOSING_MAX: Duration = Duration::from_secs(3);
/// How often a reload retries such an address.
const CLOSING_RETRY_PERIOD: Duration = Duration::from_millis(10);

/// Why a new configuration was refused; the current one is unchanged.
#[derive(Debug)]
enum Refused {
    /// One line for each error in the configuration.
    Lines(Vec<String>),
    /// An operation failed.
    Cause(String),
}

impl Refused {
    fn cause(error: impl std::fmt::Display) -> Refused {
        Refused::Cause(error.to_string())
    }
}

/// The current configuration and snapshot, and the open attempts for what is absent.
pub struct Reconfigurator {
    config: Config,
    /// Changes by the control socket are not written to the file (`--ephemeral`).
    is_ephemeral: bool,
    /// In-capsule data of RDMA receives in bytes, fixed at the start. `None`: no RDMA listener at the start.
    rdma_capsule: Option<u32>,
    /// When a reload or change last removed an RDMA listener.
    rdma_closed: Option<Instant>,
    snapshot: Arc<Snapshot>,
    attempts: OpenAttempts,
    /// The last logged reason why a new size cannot be served, so that it is logged once. Empty: none.
    size_error: String,
    /// Sockets of the listeners that are new in `snapshot`, until the caller takes them.
    listeners: Vec<Listening>,
    /// Sockets of all listeners. The accepting core owns and closes them.
    sockets: Vec<WeakListening>,
}

/// As [`Listening`], without ownership of the socket.
type WeakListening = (Weak<Socket>, usize);

fn downgrade(listeners: &[Listening]) -> impl Iterator<Item = WeakListening> {
    listeners.iter().map(|(socket, index)| (Arc::downgrade(socket), *index))
}

impl Reconfigurator {
    /// Opens the disks of `config` and makes the first snapshot. Absent drives, and far targets that do not
    /// answer within [`REMOTES_MAX`], are opened later.
    ///
    /// # Errors
    /// [`ServeError::Start`]: a disk that is present cannot be opened.
    pub fn open(config: Config, origins: Origins, is_ephemeral: bool) -> Result<Reconfigurator, ServeError> {
        let failed = |error: SnapshotError| ServeError::Start(error.to_string());
        let begun = Instant::now();
        let mut attempts = OpenAttempts::new(origins);
        attempts.open_all(config.plan().absent(None), begun);
        let mut found = Vec::new();
        loop {
            let now = Instant::now();
            while let Some((origin, result)) = attempts.take_finished(now) {
                match result {
                    Ok(opened) => found.push(opened),
                    // A drive that is present and cannot be opened needs the operator.
                    Err(SnapshotError::Drive(error)) if !error.is_absent => return Err(failed(error.into())),
                    Err(error) => attempts.log_failure(&origin, &error.to_string()),
                }
            }
            let is_awaited = |origin: &Origin| match origin {
                Origin::Drive(_) => true,
                Origin::Remote(_) => now < begun + REMOTES_MAX,
            };
            if !attempts.opening().any(is_awaited) {
                break;
            }
            std::thread::park_timeout(START_CHECK_PERIOD);
        }
        for origin in attempts.opening() {
            tracing::warn!(
                "disk {origin}: no answer yet; its namespaces are offline until its target answers"
            );
        }
        // `_drives` keeps the drives open until the snapshot has their disks.
        let (opened, _drives): (Vec<_>, Vec<_>) = found.into_iter().unzip();
        let snapshot = config.plan().snapshot(None, &*attempts.origins().drives, &opened).map_err(failed)?;
        // Only what the snapshot lacks is retried.
        attempts.open(config.plan().absent(Some(&snapshot)), begun);
        let (size_error, listeners, sockets) = (String::new(), Vec::new(), Vec::new());
        let rdma_capsule = config.plan().rdma_capsule();
        Ok(Reconfigurator {
            config,
            is_ephemeral,
            rdma_capsule,
            rdma_closed: None,
            snapshot,
            attempts,
            size_error,
            listeners,
            sockets,
        })
    }

    /// The current snapshot: the last that was returned for the cores.
    pub fn snapshot(&self) -> &Arc<Snapshot> {
        &self.snapshot
    }

    /// Records the sockets of the first snapshot's listeners.
    pub fn add_sockets(&mut self, listeners: &[Listening]) {
        self.sockets.extend(downgrade(listeners));
    }

    /// The plan of the current configuration.
    pub fn plan(&self) -> &Plan {
        self.config.plan()
    }

    /// Takes the sockets of the listeners that are new in the last snapshot that a reload or change returned.
    pub fn take_listeners(&mut self) -> Vec<Listening> {
        std::mem::take(&mut self.listeners)
    }

    /// Reads the file again. Returns the snapshot for the cores, or logs why there is none.
    pub fn reload(&mut self, log: &LogControl) -> Option<Arc<Snapshot>> {
        let Some(path) = self.config.source().map(Path::to_owned) else {
            tracing::warn!(
                "SIGHUP ignored: the built-in default is served, there is no file (-c FILE) to read again"
            );
            return None;
        };
        let next = Config::load(&path).map_err(|errors| Refused::Lines(errors.lines().collect()));
        match next.and_then(|next| self.apply(next, log, &mut || Ok(()))) {
            Ok(snapshot) => return Some(snapshot),
            Err(Refused::Lines(lines)) => {
                lines.iter().for_each(|line| tracing::error!("{line}"));
                tracing::error!("SIGHUP: all stays as it was");
            }
            Err(Refused::Cause(cause)) => tracing::error!("SIGHUP: all stays as it was: {cause}"),
        }
        None
    }

    /// Applies `edit` to the text of the configuration and writes it to the file (unless `--ephemeral`).
    /// Returns the result of `edit` and the snapshot for the cores; `None` when the text is unchanged.
    ///
    /// # Errors
    /// [`Failure`]; the configuration is unchanged.
    pub fn change(
        &mut self,
        log: &LogControl,
        edit: impl FnOnce(&mut Edit<'_>) -> Result<Value, Failure>,
    ) -> Result<(Value, Option<Arc<Snapshot>>), Failure> {
        let file = self.file_to_keep()?;
        let text = self.config.text();
        let document = text.parse().map_err(|error: toml_edit::TomlError| {
            Failure::system(format!("the configuration cannot be changed: {error}"))
        })?;
        let has_rdma = self.rdma_capsule.is_some();
        let mut edited = Edit { document, plan: self.config.plan(), has_rdma };
        let result = edit(&mut edited)?;
        let text = edited.document.to_string();
        if text == self.config.text() {
            return Ok((result, None));
        }
        let refused = |lines: Vec<String>| Failure::refused(lines.join("\n"));
        let next = self.config.with_text(text).map_err(|errors| refused(errors.lines().collect()))?;
        // On stable storage before anything is changed, so that only the rename can fail later.
        let staged = file.as_deref().map(|file| Staged::new(file, next.text()));
        let mut staged = staged.transpose().map_err(|error| {
            Failure::system(format!("the configuration cannot be written, so nothing is changed: {error}"))
        })?;
        let old = self.config.text().to_owned();
        let mut is_kept = false;
        let mut keep = || {
            // Not overwritten when it was saved since `file_to_keep` compared it.
            if file.as_deref().is_some_and(|file| text_of(file).is_ok_and(|text| text != old)) {
                return Err(std::io::Error::other("it was changed meanwhile"));
            }
            is_kept = true;
            staged.take().map_or(Ok(()), Staged::commit)
        };
        match self.apply(next, log, &mut keep) {
            Ok(snapshot) => Ok((result, Some(snapshot))),
            Err(refusal) => {
                if is_kept && let Some(file) = &file {
                    restore_file(file, &old);
                }
                Err(match refusal {
                    Refused::Lines(lines) => refused(lines),
                    Refused::Cause(cause) => Failure::refused(cause),
                })
            }
        }
    }

    /// The file to write a change to; `None` with `--ephemeral`. An error without a file, or when the file
    /// was edited since it was read.
    fn file_to_keep(&self) -> Result<Option<PathBuf>, Failure> {
        if self.is_ephemeral {
            return Ok(None);
        }
        let Some(path) = self.config.source() else {
            return Err(Failure::system(
                "there is no file (-c FILE) to keep a change in: start with one, or with --ephemeral to have \
                 changes that are lost at the end of the process"
                    .to_owned(),
            ));
        };
        let text = text_of(path).map_err(|error| Failure::system(format!("{}: {error}", path.display())))?;
        if text != self.config.text() {
            return Err(Failure::system(format!(
                "{} was changed since it was read (SIGHUP reads it again):\n{}",
                path.display(),
                difference(self.config.text(), &text)
            )));
        }
        Ok(Some(path.to_owned()))
    }

    /// Changes to another configuration as a whole, or not at all. `keep` writes `next` to the file; only
    /// resizing a disk can fail after `keep`.
    fn apply(
        &mut self,
        next: Config,
        log: &LogControl,
        keep: &mut dyn FnMut() -> std::io::Result<()>,
    ) -> Result<Arc<Snapshot>, Refused> {
        let is_open = |name: &str| self.snapshot.disks.iter().flatten().any(|disk| disk.name() == name);
        let state = RunningState { is_open: &is_open, rdma_capsule: self.rdma_capsule };
        let changes = next.plan().changes_from(self.config.plan(), &state);
        let refused: Vec<_> = changes.iter().filter(|change| change.is_refused()).collect();
        if !refused.is_empty() {
            return Err(Refused::Lines(refused.iter().map(|change| format!("reload: {change}")).collect()));
        }
        // First, since an address in use refuses the change.
        let sockets = self.listen(next.plan()).map_err(Refused::cause)?;
        self.check_rdma(&changes).map_err(Refused::cause)?;
        // New drives and far targets are opened later, by `poll`. Further disks of a drive that is open are
        // in this snapshot.
        let absent = next.plan().absent(Some(&self.snapshot));
        let opened: Vec<Opened> = absent.iter().filter_map(|origin| self.already_open(origin)).collect();
        let drives = &*self.attempts.origins().drives;
        let snapshot = next.plan().snapshot_and_persist(Some(&self.snapshot), drives, &opened, keep);
        let snapshot = snapshot.map_err(Refused::cause)?;
        for change in &changes {
            tracing::info!("reload: {change}");
        }
        let notes = next.plan().notes.iter().filter(|note| !self.plan().notes.contains(note));
        notes.for_each(|note| tracing::warn!("{note}"));
        log.set_level(next.plan().log.level);
        if changes.iter().any(|it| matches!(it, Change::ListenerRemoved(TransportKind::Rdma, _))) {
            self.rdma_closed = Some(Instant::now());
        }
        let generation = snapshot.generation;
        tracing::info!(generation, changes = changes.len(), "configuration read again");
        self.config = next;
        self.sockets.retain(|(socket, _)| socket.strong_count() > 0);
        self.sockets.extend(downgrade(&sockets));
        self.listeners = sockets;
        self.snapshot = Arc::clone(&snapshot);
        // The user may have repaired a drive.
        let now = Instant::now();
        self.attempts.retry_now(now);
        self.attempts.open(self.absent(), now);
        Ok(snapshot)
    }

    fn listen(&self, next: &Plan) -> Result<Vec<Listening>, ServeError> {
        let start = |error: SnapshotError| ServeError::Start(error.to_string());
        let listeners = next.listeners_after(Some(&self.snapshot)).map_err(start)?;
        let give_up = Instant::now() + CLOSING_MAX;
        loop {
            match self.listen_despite_closing(&listeners) {
                Err(ServeError::Listen { address, source })
                    if source.kind() == ErrorKind::AddrInUse
                        && self.is_closing(address)
                        && Instant::now() < give_up =>
                {
                    std::thread::park_timeout(CLOSING_RETRY_PERIOD);
                }
                result => return result,
            }
        }
    }

    /// Checks that each new RDMA address can be bound, and waits up to [`CLOSING_MAX`] for an address of a
    /// removed listener. The listening core binds it later, after it has closed the removed listeners, and
    /// retries until that succeeds.
    fn check_rdma(&self, changes: &[Change]) -> Result<(), ServeError> {
        for change in changes {
            let Change::ListenerAdded(TransportKind::Rdma, address) = *change else { continue };
            let gives_it_up = |other: &Change| {
                let Change::ListenerRemoved(TransportKind::Rdma, it) = other else { return false };
                it.port() == address.port()
            };
            let is_given_up = changes.iter().any(gives_it_up);
            while let Err(source) = check_address(address) {
                let why = std::io::Error::from_raw_os_error(source.errno).kind();
                // EADDRNOTAVAIL means in use when one of the two listeners has the wildcard address; it also
                // means that the machine does not have the address.
                let is_taken = why == ErrorKind::AddrInUse
                    || (why == ErrorKind::AddrNotAvailable
                        && check_address(SocketAddr::new(address.ip(), 0)).is_ok());
                if is_taken && is_given_up {
                    break;
                }
                if !(is_taken && self.rdma_closed.is_some_and(|at| at.elapsed() < CLOSING_MAX)) {
                    return Err(ServeError::listen_rdma(address, &source));
                }
                std::thread::park_timeout(CLOSING_RETRY_PERIOD);
            }
        }
        Ok(())
    }

    /// Binds the new listeners. The listeners that this reload removes do not conflict, so that a listener
    /// may change between the wildcard address and a single one.
    fn listen_despite_closing(&self, listeners: &[Listener]) -> Result<Vec<Listening>, ServeError> {
        let is_open = |index: usize| listeners.get(index).is_some_and(|listener| listener.is_open);
        let closing = self.sockets.iter().filter(|(_, index)| !is_open(*index));
        let closing: Vec<Arc<Socket>> = closing.filter_map(|(socket, _)| socket.upgrade()).collect();
        let closing: Vec<&Socket> = closing.iter().map(Arc::as_ref).collect();
        super::listen(listeners, &self.snapshot.listeners, &closing)
    }

    /// Whether a TCP listener on this port was removed by a reload and is still open.
    fn is_closing(&self, address: SocketAddr) -> bool {
        let has_port = |index: usize| {
            let listener = self.snapshot.listeners.get(index).filter(|listener| !listener.is_open);
            listener.is_some_and(|listener| listener.address.port() == address.port())
        };
        self.sockets.iter().any(|(socket, index)| socket.strong_count() > 0 && has_port(*index))
    }

    /// `Some` for a drive of which a namespace is a disk of the snapshot, so that it is open.
    fn already_open(&self, origin: &Origin) -> Option<Opened> {
        let Origin::Drive(address) = *origin else { return None };
        self.is_open(address).then_some(Opened::Drive(address))
    }

    fn is_open(&self, address: PciAddress) -> bool {
        let mut of_drive = self.plan().disks.iter().filter(|disk| disk.address() == Some(address));
        let is_served = |name: &str| self.snapshot.disks.iter().flatten().any(|disk| disk.name() == name);
        of_drive.any(|disk| is_served(&disk.name))
    }

    /// Time until the next [`Reconfigurator::poll`].
    pub fn pause(&self) -> Duration {
        self.attempts.pause()
    }

    /// Whether drives are being opened; these must be shut down before the process ends.
    pub fn is_opening_drives(&self) -> bool {
        self.attempts.is_opening_drives()
    }

    /// Collects finished open attempts, starts new ones, and checks the sizes of namespaces. Returns the
    /// snapshot for the cores when a disk was opened or a size has changed.
    pub fn poll(&mut self, now: Instant) -> Option<Arc<Snapshot>> {
        let before = self.snapshot.generation;
        // One origin at a time, so that an error of one does not affect the others.
        while let Some((origin, result)) = self.attempts.take_finished(now) {
            if let Err(error) = result.and_then(|found| self.add_opened(&origin, found)) {
                self.attempts.log_failure(&origin, &error.to_string());
            }
        }
        let renewed = if has_new_size(&self.snapshot) { self.update_snapshot(&[]) } else { Ok(()) };
        let why = renewed.err().map(|error| error.to_string()).unwrap_or_default();
        if !why.is_empty() && why != self.size_error {
            tracing::error!(
                "the new size of a drive or far namespace cannot be served, it keeps the old one: {why}"
            );
        }
        self.size_error = why;
        self.attempts.open(self.absent(), now);
        (self.snapshot.generation != before).then(|| Arc::clone(&self.snapshot))
    }

    /// Makes the next snapshot with what was opened, unless a reload has removed `origin` from the
    /// configuration.
    fn add_opened(&mut self, origin: &Origin, (opened, _drive): OpenedOrigin) -> Result<(), SnapshotError> {
        if self.absent().contains(origin) { self.update_snapshot(&[opened]) } else { Ok(()) }
    }

    /// Makes the next snapshot of the same plan, with `opened` and new sizes.
    fn update_snapshot(&mut self, opened: &[Opened]) -> Result<(), SnapshotError> {
        let next = self.plan().snapshot(Some(&self.snapshot), &*self.attempts.origins().drives, opened)?;
        log_namespaces(&self.snapshot, &next);
        self.snapshot = next;
        Ok(())
    }

    /// Drives and far targets of the plan that the snapshot lacks.
    fn absent(&self) -> Vec<Origin> {
        self.plan().absent(Some(&self.snapshot))
    }
}

/// Writes back the text from before a change that failed after the file was written.
fn restore_file(file: &Path, text: &str) {
    if let Err(error) = Staged::new(file, text).and_then(Staged::commit) {
        let file = file.display();
        tracing::error!(
            %file,
            %error,
            "the file has a change that is not in force and cannot be taken back: take it back by hand, or \
             the next start serves it"
        );
    }
}

/// Whether the geometry of a disk differs from that of its namespace in the snapshot.
fn has_new_size(snapshot: &Snapshot) -> bool {
    let namespaces = snapshot.subsystems.iter().flat_map(|subsystem| subsystem.active());
    namespaces.into_iter().any(|namespace| namespace.geometry != namespace.source.geometry())
}

/// Logs each namespace that is new or has another size.
fn log_namespaces(before: &Snapshot, next: &Snapshot) {
    for subsystem in &next.subsystems {
        let was = before.subsystem(&subsystem.nqn);
        for namespace in subsystem.active() {
            let was = was.and_then(|was| was.namespace(namespace.nsid)).map(|was| was.geometry);
            if was != Some(namespace.geometry) {
                let what = if namespace.source.kind() == "remote" { "far namespace" } else { "drive" };
                tracing::info!(
                    nqn = %subsystem.nqn,
                    nsid = namespace.nsid,
                    disk = namespace.source.name(),
                    bytes = namespace.geometry.bytes(),
                    bytes_before = was.map_or(0, |was| was.bytes()),
                    "serving, as the {what} is now"
                );
            }
        }
    }
}
