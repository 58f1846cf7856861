//! [`Reconfigurator`]: the configuration that is served, and what makes another of it: SIGHUP, a change by
//! the control socket, a drive or a far target that was absent and is there now, a namespace of one that has
//! another size.
//!
//! Drives and far targets are opened in the background ([`attempts`]), at the start as well as later: one
//! that is broken takes minutes to say so, and the caller has signals to hear meanwhile. What opens is in the
//! next snapshot. The start waits for drives, however long they take, and for at most [`REMOTES_MAX`] for far
//! targets: so a normal start shows them at once, and one that is away does not block the start.
//!
//! What it does not do: it tells no core; the caller gives the snapshots that it returns to them.

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
use crate::config::{Change, Config, Found, Has, Opened, Origin, Origins, Plan, SnapshotError, text_of};
use crate::log::LogControl;
use crate::rpc::{Edit, Failure};

mod open_attempts;
#[cfg(test)]
mod tests;

/// How long the start waits for far targets.
const REMOTES_MAX: Duration = Duration::from_secs(1);
/// Between two looks at what the start waits for.
const START_PERIOD: Duration = Duration::from_millis(5);
/// How long a listener that an earlier reload has taken away may still have its address: until all cores have
/// that configuration, which waits for memory to be registered where there is RDMA.
const CLOSING_MAX: Duration = Duration::from_secs(3);
/// Between two looks at it.
const CLOSING_PERIOD: Duration = Duration::from_millis(10);

/// Why a configuration is not served; all is as it was.
#[derive(Debug)]
enum Refused {
    /// All that is wrong with it.
    Lines(Vec<String>),
    /// What has failed.
    Cause(String),
}

impl Refused {
    fn cause(error: impl std::fmt::Display) -> Refused {
        Refused::Cause(error.to_string())
    }
}

/// What is served now.
pub struct Reconfigurator {
    config: Config,
    /// Changes are not written to a file.
    is_ephemeral: bool,
    /// Of the plan at the start.
    rdma_capsule: Option<u32>,
    /// When a listener over RDMA was taken away last.
    rdma_closed: Option<Instant>,
    snapshot: Arc<Snapshot>,
    attempts: OpenAttempts,
    /// Why a new size cannot be served, as it was said: not said again.
    why: String,
    /// Sockets of listeners that are new in the snapshot.
    listeners: Vec<Listening>,
    /// Sockets of all listeners, until the core that accepts closes them.
    known: Vec<Known>,
}

/// A socket with its listener's index in the snapshot.
type Known = (Weak<Socket>, usize);

fn known(listeners: &[Listening]) -> impl Iterator<Item = Known> {
    listeners.iter().map(|(socket, index)| (Arc::downgrade(socket), *index))
}

impl Reconfigurator {
    /// Open what the file says, to which changes are written unless `is_ephemeral`: the first snapshot, with
    /// the drives that are there and the far targets that answer soon.
    ///
    /// # Errors
    /// [`ServeError::Start`]. A drive that is absent, or a far target that is away, is none.
    pub fn open(config: Config, origins: Origins, is_ephemeral: bool) -> Result<Reconfigurator, ServeError> {
        let failed = |error: SnapshotError| ServeError::Start(error.to_string());
        let begun = Instant::now();
        let mut attempts = OpenAttempts::new(origins);
        attempts.open_all(config.plan().absent(None), begun);
        let mut found = Vec::new();
        loop {
            let now = Instant::now();
            while let Some((origin, result)) = attempts.take(now) {
                match result {
                    Ok(opened) => found.push(opened),
                    // What stands in the way of a drive that is there is to be mended first.
                    Err(SnapshotError::Drive(error)) if !error.is_absent => return Err(failed(error.into())),
                    Err(error) => attempts.tell(&origin, &error.to_string()),
                }
            }
            let is_awaited = |origin: &Origin| match origin {
                Origin::Drive(_) => true,
                Origin::Remote(_) => now < begun + REMOTES_MAX,
            };
            if !attempts.opening().any(is_awaited) {
                break;
            }
            std::thread::park_timeout(START_PERIOD);
        }
        for origin in attempts.opening() {
            tracing::warn!(
                "disk {origin}: no answer yet; its namespaces are offline until its target answers"
            );
        }
        // The drives are held until the snapshot has their disks.
        let (opened, _drives): (Vec<_>, Vec<_>) = found.into_iter().unzip();
        let snapshot = config.plan().snapshot(None, &*attempts.origins().drives, &opened).map_err(failed)?;
        // What is open is not tried any more, and a drive that is not there is opened once it is.
        attempts.open(config.plan().absent(Some(&snapshot)), begun);
        let (why, listeners, known) = (String::new(), Vec::new(), Vec::new());
        let rdma_capsule = config.plan().rdma_capsule();
        Ok(Reconfigurator {
            config,
            is_ephemeral,
            rdma_capsule,
            rdma_closed: None,
            snapshot,
            attempts,
            why,
            listeners,
            known,
        })
    }

    /// What is served now.
    pub fn snapshot(&self) -> &Arc<Snapshot> {
        &self.snapshot
    }

    /// The sockets of the first snapshot's listeners.
    pub fn listens_on(&mut self, listeners: &[Listening]) {
        self.known.extend(known(listeners));
    }

    /// What the file says.
    pub fn plan(&self) -> &Plan {
        self.config.plan()
    }

    /// The sockets of listeners that are new in the snapshot which was returned last.
    pub fn take_listeners(&mut self) -> Vec<Listening> {
        std::mem::take(&mut self.listeners)
    }

    /// Read the file again. `Some`: the snapshot that the cores are to change to.
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

    /// Change the text of the configuration as `edit` says, keep it, and serve it. `Some`: the snapshot that
    /// the cores are to change to; `None`: nothing is changed by it.
    ///
    /// # Errors
    /// [`Failure`]; all is as it was.
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
        // On stable storage before anything is changed: what can fail is the rename.
        let staged = file.as_deref().map(|file| Staged::new(file, next.text()));
        let mut staged = staged.transpose().map_err(|error| {
            Failure::system(format!("the configuration cannot be written, so nothing is changed: {error}"))
        })?;
        let old = self.config.text().to_owned();
        let mut is_kept = false;
        let mut keep = || {
            // A file that was saved since it was compared is not written over.
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
                    put_back(file, &old);
                }
                Err(match refusal {
                    Refused::Lines(lines) => refused(lines),
                    Refused::Cause(cause) => Failure::refused(cause),
                })
            }
        }
    }

    /// The file that a change is to be kept in; none where changes are not kept.
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

    /// Serve another configuration: all of it, or nothing. `keep` is called when nothing else can fail but
    /// that a disk gets its new size.
    fn apply(
        &mut self,
        next: Config,
        log: &LogControl,
        keep: &mut dyn FnMut() -> std::io::Result<()>,
    ) -> Result<Arc<Snapshot>, Refused> {
        let is_open = |name: &str| self.snapshot.disks.iter().flatten().any(|disk| disk.name() == name);
        let has = Has { is_open: &is_open, rdma_capsule: self.rdma_capsule };
        let changes = next.plan().changes_from(self.config.plan(), &has);
        let refused: Vec<_> = changes.iter().filter(|change| change.is_refused()).collect();
        if !refused.is_empty() {
            return Err(Refused::Lines(refused.iter().map(|change| format!("reload: {change}")).collect()));
        }
        // Before anything is changed: an address that is in use is a refusal.
        let sockets = self.listen(next.plan()).map_err(Refused::cause)?;
        self.check_rdma(&changes).map_err(Refused::cause)?;
        // What is new and may be away is opened by the looks that follow. Other disks of a drive that is open
        // are there at once.
        let absent = next.plan().absent(Some(&self.snapshot));
        let opened: Vec<Opened> = absent.iter().filter_map(|origin| self.already_open(origin)).collect();
        let drives = &*self.attempts.origins().drives;
        let snapshot = next.plan().snapshot_kept(Some(&self.snapshot), drives, &opened, keep);
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
        self.known.retain(|(socket, _)| socket.strong_count() > 0);
        self.known.extend(known(&sockets));
        self.listeners = sockets;
        self.snapshot = Arc::clone(&snapshot);
        // The user may have repaired a drive.
        let now = Instant::now();
        self.attempts.again(now);
        self.attempts.open(self.absent(), now);
        Ok(snapshot)
    }

    fn listen(&self, next: &Plan) -> Result<Vec<Listening>, ServeError> {
        let start = |error: SnapshotError| ServeError::Start(error.to_string());
        let listeners = next.listeners_after(Some(&self.snapshot)).map_err(start)?;
        let give_up = Instant::now() + CLOSING_MAX;
        loop {
            match self.listen_beside(&listeners) {
                Err(ServeError::Listen { address, source })
                    if source.kind() == ErrorKind::AddrInUse
                        && self.has_closed(address)
                        && Instant::now() < give_up =>
                {
                    std::thread::park_timeout(CLOSING_PERIOD);
                }
                result => return result,
            }
        }
    }

    /// New addresses over RDMA can be listened on. The core that listens takes them when it has let go of the
    /// others, and tries again until it can.
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
                // The kernel says the second where one of the two is on all addresses, and of an address that
                // the machine does not have.
                let is_taken = why == ErrorKind::AddrInUse
                    || (why == ErrorKind::AddrNotAvailable
                        && check_address(SocketAddr::new(address.ip(), 0)).is_ok());
                if is_taken && is_given_up {
                    break;
                }
                if !(is_taken && self.rdma_closed.is_some_and(|at| at.elapsed() < CLOSING_MAX)) {
                    return Err(ServeError::listen_rdma(address, &source));
                }
                std::thread::park_timeout(CLOSING_PERIOD);
            }
        }
        Ok(())
    }

    /// A listener may change between all addresses and one of them: those that this reload takes away are not
    /// in its way.
    fn listen_beside(&self, listeners: &[Listener]) -> Result<Vec<Listening>, ServeError> {
        let is_open = |index: usize| listeners.get(index).is_some_and(|listener| listener.is_open);
        let closing = self.known.iter().filter(|(_, index)| !is_open(*index));
        let closing: Vec<Arc<Socket>> = closing.filter_map(|(socket, _)| socket.upgrade()).collect();
        let closing: Vec<&Socket> = closing.iter().map(Arc::as_ref).collect();
        super::listen(listeners, &self.snapshot.listeners, &closing)
    }

    /// A reload has taken away a TCP listener that still has this address.
    fn has_closed(&self, address: SocketAddr) -> bool {
        let is_it = |index: usize| {
            let listener = self.snapshot.listeners.get(index).filter(|listener| !listener.is_open);
            listener.is_some_and(|listener| listener.address.port() == address.port())
        };
        self.known.iter().any(|(socket, index)| socket.strong_count() > 0 && is_it(*index))
    }

    /// A drive of which a namespace is served.
    fn already_open(&self, origin: &Origin) -> Option<Opened> {
        let Origin::Drive(address) = *origin else { return None };
        self.is_open(address).then_some(Opened::Drive(address))
    }

    fn is_open(&self, address: PciAddress) -> bool {
        let mut of_drive = self.plan().disks.iter().filter(|disk| disk.address() == Some(address));
        let is_served = |name: &str| self.snapshot.disks.iter().flatten().any(|disk| disk.name() == name);
        of_drive.any(|disk| is_served(&disk.name))
    }

    /// How long there is nothing to look at.
    pub fn pause(&self) -> Duration {
        self.attempts.pause()
    }

    /// Drives are being opened. Far targets need not be told when the process ends.
    pub fn is_opening_drives(&self) -> bool {
        self.attempts.is_opening_drives()
    }

    /// Look at what is absent, and at sizes. `Some`: a drive or a far target is there at last, or a namespace
    /// has another size: the snapshot that the cores are to change to.
    pub fn poll(&mut self, now: Instant) -> Option<Arc<Snapshot>> {
        let before = self.snapshot.generation;
        // One at a time: what is wrong with one is not the others' harm.
        while let Some((origin, result)) = self.attempts.take(now) {
            if let Err(error) = result.and_then(|found| self.take_up(&origin, found)) {
                self.attempts.tell(&origin, &error.to_string());
            }
        }
        let renewed = if has_new_size(&self.snapshot) { self.renew(&[]) } else { Ok(()) };
        let why = renewed.err().map(|error| error.to_string()).unwrap_or_default();
        if !why.is_empty() && why != self.why {
            tracing::error!(
                "the new size of a drive or far namespace cannot be served, it keeps the old one: {why}"
            );
        }
        self.why = why;
        self.attempts.open(self.absent(), now);
        (self.snapshot.generation != before).then(|| Arc::clone(&self.snapshot))
    }

    /// Serve what has been opened, unless it was taken out of the file meanwhile.
    fn take_up(&mut self, origin: &Origin, (opened, _drive): Found) -> Result<(), SnapshotError> {
        if self.absent().contains(origin) { self.renew(&[opened]) } else { Ok(()) }
    }

    /// The next snapshot, with what is open now.
    fn renew(&mut self, opened: &[Opened]) -> Result<(), SnapshotError> {
        let next = self.plan().snapshot(Some(&self.snapshot), &*self.attempts.origins().drives, opened)?;
        tell(&self.snapshot, &next);
        self.snapshot = next;
        Ok(())
    }

    /// What the snapshot lacks.
    fn absent(&self) -> Vec<Origin> {
        self.plan().absent(Some(&self.snapshot))
    }
}

/// The text that the file had before a change that could not be made.
fn put_back(file: &Path, text: &str) {
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

/// A disk says another size than its namespaces have.
fn has_new_size(snapshot: &Snapshot) -> bool {
    let namespaces = snapshot.subsystems.iter().flat_map(|subsystem| subsystem.active());
    namespaces.into_iter().any(|namespace| namespace.geometry != namespace.source.geometry())
}

/// A line for each namespace that is new or has another size.
fn tell(before: &Snapshot, next: &Snapshot) {
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
