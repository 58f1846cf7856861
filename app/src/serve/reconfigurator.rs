//! [`Reconfigurator`]: the current configuration and snapshot. It makes the next snapshot in these cases:
//! SIGHUP, a change by the control socket, an absent drive, far target or file was opened, an absent address
//! has come, or the size of a drive's or far namespace has changed.
//!
//! Drives and far targets are opened on background threads ([`open_attempts`]), since a broken drive takes
//! minutes to fail and the caller has to handle signals. The next snapshot contains the opened disks. The
//! start waits for drives without a limit. It waits for far targets at most [`REMOTES_MAX`], and for files
//! [`PATHS_MAX`], so that an absent one does not block it.
//!
//! The caller sends the returned snapshots to the cores.

use std::cell::LazyCell;
use std::collections::HashSet;
use std::io::{Error, ErrorKind};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use serde_json::Value;
use spindle_nvme_pcie::PciAddress;
use spindle_nvme_rdma::shell::check_address;
use spindle_nvme_transport::TransportKind;
use spindle_reactor::net::Listener as Socket;
use spindle_target::snapshot::{Listener, Snapshot};
use spindle_target_disk::OpenError;

use self::open_attempts::{OpenAttempts, REMOTE_RETRY_PERIOD};
use self::retired::{RETIRED_MAX, RetiredMemory, memory_of};
use super::ServeError;
use super::core_loop::{DiskError, Listening};
use super::store::{Staged, difference};
use super::threads;
use crate::config::{
    Change, Config, Opened, OpenedOrigin, Origin, Origins, Plan, RunningState, SnapshotError, text_of,
};
use crate::log::LogControl;
use crate::rpc::{Edit, Failure, unusable};

mod open_attempts;
mod retired;
#[cfg(test)]
mod tests;

/// Longest wait of the start for far targets, while no drive is being opened.
const REMOTES_MAX: Duration = Duration::from_secs(1);
/// Longest wait of the start for files and devices: above the wait for a former process's lock, 10 s.
const PATHS_MAX: Duration = Duration::from_secs(12);
/// Time between two snapshots with which cores open disks again that they could not open.
const CORE_RETRY_PERIOD: Duration = Duration::from_secs(10);
/// Period at which the start checks its open attempts.
const START_CHECK_PERIOD: Duration = Duration::from_millis(5);
/// Longest wait of a reload for the address of a listener that an earlier reload removed. The accepting core
/// closes that listener once all cores have the snapshot of the earlier reload. With RDMA this includes the
/// registration of memory.
const CLOSING_MAX: Duration = Duration::from_secs(3);
/// Period at which a reload retries such an address.
const CLOSING_RETRY_PERIOD: Duration = Duration::from_millis(10);

/// Why a new configuration was refused; the current one is unchanged.
#[derive(Debug)]
enum Refused {
    /// One line for each error in the configuration, or for each change that a reload cannot make.
    Lines(Vec<String>),
    /// An operation failed.
    Cause(String),
}

impl Refused {
    fn cause(error: impl std::fmt::Display) -> Refused {
        Refused::Cause(error.to_string())
    }
}

/// The current configuration and snapshot, and the attempts to open absent drives and far targets.
pub struct Reconfigurator {
    config: Config,
    /// Changes by the control socket are not written to the file (`--ephemeral`).
    is_ephemeral: bool,
    /// In-capsule data of RDMA receives in bytes, fixed at the start. `None`: no RDMA listener at the start.
    rdma_capsule: Option<u32>,
    /// When a reload or change last removed an RDMA listener.
    rdma_closed: Option<Instant>,
    snapshot: Arc<Snapshot>,
    /// The file lacks a revocation that is in force.
    unsaved: Option<Unsaved>,
    retired: RetiredMemory,
    attempts: OpenAttempts,
    /// Why a new size cannot be served, as of the last [`Reconfigurator::poll`]; each reason is logged once.
    /// Empty: no failure.
    size_error: String,
    /// Disks that are not open on a core, which opens them again with the next snapshot.
    disk_errors: Vec<DiskError>,
    /// Earliest time of a snapshot for that.
    next_cores: Instant,
    /// Indices of the TCP listeners of `snapshot` whose address the machine does not have yet.
    absent_listeners: Vec<usize>,
    /// Sockets of the TCP listeners that are new in `snapshot`, until [`Reconfigurator::take_listeners`].
    listeners: Vec<Listening>,
    /// Sockets of all TCP listeners. The accepting core owns and closes them.
    sockets: Vec<WeakListening>,
}

/// A revocation that could not be written to the file.
struct Unsaved {
    /// The text that the file had when it was last read or written.
    text: String,
    why: String,
}

/// Result of a change that is made.
pub struct Changed {
    /// The result of the method.
    pub result: Value,
    /// For the cores; `None`: the text is unchanged.
    pub next: Option<Arc<Snapshot>>,
    /// Why the file does not have the change; only of a revocation.
    pub unsaved: Option<String>,
}

/// As [`Listening`], without ownership of the socket.
type WeakListening = (Weak<Socket>, usize);

fn downgrade(listeners: &[Listening]) -> impl Iterator<Item = WeakListening> {
    listeners.iter().map(|(socket, index)| (Arc::downgrade(socket), *index))
}

impl Reconfigurator {
    /// Opens the disks of `config` and makes the first snapshot. Absent drives are opened later, and so are
    /// far targets that do not answer in time ([`REMOTES_MAX`]).
    ///
    /// # Errors
    /// [`ServeError::Start`]: a drive that is present cannot be opened, or the snapshot cannot be made.
    pub fn open(
        mut config: Config,
        origins: Origins,
        is_ephemeral: bool,
    ) -> Result<Reconfigurator, ServeError> {
        let failed = |error: SnapshotError| ServeError::Start(error.to_string());
        let begun = Instant::now();
        let mut attempts = OpenAttempts::new(origins);
        attempts.open_all(config.plan().absent(None), begun);
        let (mut found, mut late, mut away) = (Vec::new(), Vec::new(), Vec::new());
        loop {
            let now = Instant::now();
            while let Some((origin, result)) = attempts.take_finished(now) {
                match result {
                    // Its path has not answered the validation, which lacks its size.
                    Ok(opened) if is_away(&origin) => late.push((origin, opened)),
                    Ok(opened) => found.push(opened),
                    // Only the operator can repair a drive that is present and cannot be opened.
                    Err(SnapshotError::Drive(error)) if !error.is_absent => return Err(failed(error.into())),
                    Err(error) if is_of_settings(&origin, &error) => return Err(failed(error)),
                    Err(error) => {
                        attempts.log_failure(&origin, &error.to_string());
                        away.extend(origin.disk().map(str::to_owned));
                    }
                }
            }
            let is_awaited = |origin: &Origin| match origin {
                Origin::Drive(_) => true,
                Origin::Remote(_) => now < begun + REMOTES_MAX,
                Origin::Path(_) => now < begun + PATHS_MAX,
            };
            if !attempts.opening().any(is_awaited) {
                break;
            }
            std::thread::park_timeout(START_CHECK_PERIOD);
        }
        for origin in attempts.opening() {
            tracing::warn!("disk {origin}: no answer yet; its namespaces are offline until there is one");
            away.extend(origin.disk().map(str::to_owned));
        }
        config.set_away(&away);
        // `_drives` keeps the drives open until the snapshot has their disks.
        let (opened, _drives): (Vec<_>, Vec<_>) = found.into_iter().unzip();
        let snapshot = config.plan().snapshot(None, &*attempts.origins().drives, &opened).map_err(failed)?;
        let (size_error, listeners, sockets) = (String::new(), Vec::new(), Vec::new());
        let rdma_capsule = config.plan().rdma_capsule();
        let mut served = Reconfigurator {
            config,
            is_ephemeral,
            rdma_capsule,
            rdma_closed: None,
            snapshot,
            unsaved: None,
            retired: RetiredMemory::default(),
            attempts,
            size_error,
            disk_errors: Vec::new(),
            next_cores: begun,
            absent_listeners: Vec::new(),
            listeners,
            sockets,
        };
        for (origin, opened) in late {
            served.add_or_log(&origin, Ok(opened));
        }
        // Retries only the drives and far targets that the snapshot lacks.
        served.attempts.open(served.absent(), begun);
        Ok(served)
    }

    /// Returns the current snapshot: the first one, or the last that was returned for the cores.
    pub fn snapshot(&self) -> &Arc<Snapshot> {
        &self.snapshot
    }

    /// Binds the TCP listeners of the first snapshot. An address that the machine does not have yet is tried
    /// again by [`Reconfigurator::poll`].
    ///
    /// # Errors
    /// An address cannot be bound for another reason.
    pub fn listen_first(&mut self) -> Result<Vec<Listening>, ServeError> {
        let mut bound = Vec::new();
        for (index, listener) in self.snapshot.listeners.iter().enumerate() {
            match super::listen_at(index, listener) {
                Some(Ok(listening)) => bound.push(listening),
                Some(Err(ServeError::Listen { address, source }))
                    if source.kind() == ErrorKind::AddrNotAvailable =>
                {
                    tracing::error!("listener {address}: cannot listen: {source}; next attempt in 2 s");
                    self.absent_listeners.push(index);
                }
                Some(Err(error)) => return Err(error),
                None => {}
            }
        }
        self.sockets.extend(downgrade(&bound));
        Ok(bound)
    }

    /// Whether the address of a listener of the snapshot is not there yet.
    pub fn is_absent(&self, listener: usize) -> bool {
        self.absent_listeners.contains(&listener)
    }

    /// Whether there is a TCP listener at `address`, which the machine does not have yet.
    pub fn lacks(&self, address: SocketAddr) -> bool {
        self.absent_listeners.iter().any(|index| self.snapshot.listeners[*index].address == address)
    }

    /// Listens at absent addresses that have come. Returns true if one has come.
    fn listen_again(&mut self) -> bool {
        let count = self.listeners.len();
        for index in std::mem::take(&mut self.absent_listeners) {
            let listener = &self.snapshot.listeners[index];
            match super::listen_at(index, listener) {
                Some(Ok(listening)) => {
                    tracing::info!(
                        address = %listener.address,
                        "listening (NVMe/TCP): the address is available now"
                    );
                    self.listeners.push(listening);
                }
                Some(Err(_)) => self.absent_listeners.push(index),
                // A change has removed it.
                None => {}
            }
        }
        self.sockets.extend(downgrade(&self.listeners[count..]));
        self.listeners.len() > count
    }

    /// Records the disks that are not open on a core.
    pub fn set_disk_errors(&mut self, errors: Vec<DiskError>) {
        if self.disk_errors.is_empty() {
            self.next_cores = Instant::now() + CORE_RETRY_PERIOD;
        }
        self.disk_errors = errors;
    }

    /// Returns what of the configuration is not there, each with the reason: disks and listeners.
    pub fn missing(&self) -> Vec<(String, String)> {
        let disk = |origin: Origin| {
            let what = match &origin {
                Origin::Drive(address) => format!("drive {address}"),
                Origin::Remote(_) | Origin::Path(_) => format!("disk {origin}"),
            };
            let why = self.attempts.reason(&origin).unwrap_or("no answer yet");
            (what, why.to_owned())
        };
        let listener = |index: &usize| {
            let address = self.snapshot.listeners[*index].address;
            (format!("listener {address}"), "this machine does not have the address".to_owned())
        };
        let listeners = self.absent_listeners.iter().map(listener);
        let on_core =
            |DiskError { core, disk, why }: &DiskError| (format!("disk {disk} on core {core}"), why.clone());
        let on_cores = self.disk_errors.iter().map(on_core);
        self.absent().into_iter().map(disk).chain(listeners).chain(on_cores).collect()
    }

    pub fn plan(&self) -> &Arc<Plan> {
        self.config.shared_plan()
    }

    /// Returns, once, the sockets of the TCP listeners that are new in the last snapshot of a reload or
    /// change.
    pub fn take_listeners(&mut self) -> Vec<Listening> {
        std::mem::take(&mut self.listeners)
    }

    /// Why the file lacks a revocation that is in force; `None`: it has all that is in force.
    pub fn unsaved(&self) -> Option<&str> {
        self.unsaved.as_ref().map(|unsaved| unsaved.why.as_str())
    }

    /// Reads the configuration file again and applies it. Returns the snapshot for the cores. `None`: there
    /// is no file or the file was refused; the reason is logged.
    pub fn reload(&mut self, log: &LogControl) -> Option<Arc<Snapshot>> {
        if self.config.source().is_none() {
            tracing::warn!(
                "SIGHUP ignored: the built-in default is served, there is no file (-c FILE) to read again"
            );
            return None;
        }
        let next = self.read_again().map_err(Refused::Lines);
        match next.and_then(|next| self.apply(next, log, &mut || Ok(()))) {
            Ok(snapshot) => {
                if self.unsaved.take().is_some() {
                    tracing::warn!(
                        "revocations that were not saved are undone: the file was changed by hand and lacks \
                         them"
                    );
                }
                return Some(snapshot);
            }
            Err(Refused::Lines(lines)) => {
                lines.iter().for_each(|line| tracing::error!("{line}"));
                tracing::error!("SIGHUP: reload failed, the configuration is unchanged");
            }
            Err(Refused::Cause(cause)) => {
                tracing::error!("SIGHUP: reload failed, the configuration is unchanged: {cause}")
            }
        }
        None
    }

    /// Reads the configuration file again. Refuses a file that only lacks a revocation that is in force: it
    /// would take that back.
    fn read_again(&mut self) -> Result<Config, Vec<String>> {
        self.save_again();
        let path = self.config.source().unwrap_or(Path::new("")).to_owned();
        let text = text_of(&path).map_err(|error| vec![format!("{}: {error}", path.display())])?;
        if let Some(Unsaved { why, .. }) = self.unsaved.as_ref().filter(|unsaved| unsaved.text == text) {
            let path = path.display();
            return Err(vec![format!(
                "{path} lacks a revocation that is in force and cannot be saved: {why}"
            )]);
        }
        let load = |retired| self.config.load_again(text.clone(), retired);
        let next = self.retired.validate_beside(RETIRED_MAX, load);
        next.map_err(|errors| errors.lines().collect())
    }

    /// Writes what is in force to the file, if it lacks a revocation and can be written again.
    fn save_again(&mut self) {
        if self.unsaved.is_none() {
            return;
        }
        let has_all = |path: &Path| text_of(path).is_ok_and(|text| text == self.config.text());
        if self.config.source().is_some_and(has_all) {
            // Somebody has put it into the file by hand.
            self.unsaved = None;
            return;
        }
        let Ok(Some(file)) = self.file_to_keep() else { return };
        let Ok(staged) = Staged::new(&file, self.config.text()) else { return };
        // To write and sync takes time, in which the file may be edited.
        if self.file_to_keep().is_ok() && staged.commit().is_ok() {
            self.unsaved = None;
            let file = file.display();
            tracing::info!(%file, "revocations that could not be saved earlier are saved in the file now");
        }
    }

    /// Applies `edit` to the text of the configuration, writes the new text to the file (unless
    /// `--ephemeral`) and applies it. A revocation is applied even if the file cannot be written; it is
    /// written by a later call or [`Reconfigurator::poll`]. Without a file (the built-in configuration) it
    /// could never be saved, nor be taken back, and is refused.
    ///
    /// # Errors
    /// [`Failure`]; the configuration is unchanged. If the file was already written, its old text is written
    /// back.
    pub fn change(
        &mut self,
        log: &LogControl,
        edit: impl FnOnce(&mut Edit<'_>) -> Result<Value, Failure>,
    ) -> Result<Changed, Failure> {
        self.save_again();
        let file = self.file_to_keep();
        let sections = self.config.sections().map_err(|error| unusable(&error))?.clone();
        let (plan, has_rdma) = (self.config.plan(), self.rdma_capsule.is_some());
        let is_log_level_fixed = log.is_fixed();
        let mut edited = Edit { sections, plan, has_rdma, is_log_level_fixed, is_revocation: false };
        let result = edit(&mut edited)?;
        let Edit { sections, is_revocation, .. } = edited;
        let (file, mut unsaved) = match file {
            Ok(file) => (file, None),
            Err(failure) if is_revocation && self.config.source().is_some() => (None, Some(failure.message)),
            Err(failure) => return Err(failure),
        };
        // Compared with the former sections: to cut the text can move lines, which is no change.
        if self.config.sections().is_ok_and(|former| sections.is_same(former)) {
            let unsaved = self.unsaved().filter(|_| is_revocation).map(str::to_owned);
            return Ok(Changed { result, next: None, unsaved });
        }
        let refused = |lines: Vec<String>| Failure::refused(lines.join("\n"));
        let validate = |retired| self.config.with_sections(sections.clone(), retired);
        let next = self.retired.validate_beside(RETIRED_MAX, validate);
        let next = next.map_err(|errors| refused(errors.lines().collect()))?;
        // Writes the new text to stable storage before anything is changed, so that only the rename can fail
        // later.
        let staged = file.as_deref().map(|file| Staged::new(file, next.text())).transpose();
        let mut staged = staged.or_else(|error| {
            let what = format!("the configuration cannot be written: {error}");
            if !is_revocation {
                return Err(Failure::system(format!("nothing is changed: {what}")));
            }
            unsaved = Some(what);
            Ok(None)
        })?;
        let old = self.known_text().to_owned();
        let mut is_kept = false;
        let mut keep = || {
            let Some((staged, file)) = staged.take().zip(file.as_deref()) else { return Ok(()) };
            // Does not overwrite a file that was edited after `file_to_keep` compared it.
            let is_unchanged = match text_of(file) {
                Ok(text) if text == old => Ok(()),
                Ok(_) => Err(Error::other(format!("{} was changed by another program", file.display()))),
                Err(error) => Err(Error::other(format!("{}: {error}", file.display()))),
            };
            is_kept = is_unchanged.is_ok();
            is_unchanged.and_then(|()| staged.commit()).or_else(|error| {
                unsaved = Some(format!("the configuration's file cannot be replaced: {error}"));
                if is_revocation { Ok(()) } else { Err(error) }
            })
        };
        match self.apply(next, log, &mut keep) {
            Ok(next) => {
                self.set_unsaved(old, unsaved.as_deref());
                Ok(Changed { result, next: Some(next), unsaved })
            }
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

    /// Records whether the file has what is in force; `text` is what it had before.
    fn set_unsaved(&mut self, text: String, why: Option<&str>) {
        if let Some(why) = why {
            tracing::error!("a revocation is in force and not saved, a restart would undo it: {why}");
        }
        self.unsaved = why.map(|why| Unsaved { text, why: why.to_owned() });
    }

    /// Returns the text that the file had when it was last read or written.
    fn known_text(&self) -> &str {
        self.unsaved.as_ref().map_or(self.config.text(), |unsaved| &unsaved.text)
    }

    /// Returns the file to write a change to; `None` with `--ephemeral`.
    ///
    /// # Errors
    /// There is no file, it cannot be read, or it was edited since it was read.
    fn file_to_keep(&self) -> Result<Option<PathBuf>, Failure> {
        if self.is_ephemeral {
            return Ok(None);
        }
        let Some(path) = self.config.source() else {
            return Err(Failure::system(
                "there is no file (-c FILE) in which to save a change: start with -c FILE, or with \
                 --ephemeral for changes that are lost at the end of the process"
                    .to_owned(),
            ));
        };
        let text = text_of(path).map_err(|error| Failure::system(format!("{}: {error}", path.display())))?;
        if text != self.known_text() {
            return Err(Failure::system(format!(
                "{} was changed since it was read (SIGHUP reads it again):\n{}",
                path.display(),
                difference(self.known_text(), &text)
            )));
        }
        Ok(Some(path.to_owned()))
    }

    /// Applies `next` completely or not at all. `keep` writes `next` to the file; after `keep`, only the
    /// resize of a disk can fail.
    fn apply(
        &mut self,
        mut next: Config,
        log: &LogControl,
        keep: &mut dyn FnMut() -> std::io::Result<()>,
    ) -> Result<Arc<Snapshot>, Refused> {
        let disks = &self.snapshot.disks;
        let open =
            LazyCell::new(|| -> HashSet<_> { disks.iter().flatten().map(|disk| disk.name()).collect() });
        let is_open = |name: &str| open.contains(name);
        let state = RunningState { is_open: &is_open, rdma_capsule: self.rdma_capsule };
        let changes = next.plan().changes_from(self.config.plan(), &state);
        let refused: Vec<_> = changes.iter().filter(|change| change.is_refused()).collect();
        if !refused.is_empty() {
            return Err(Refused::Lines(refused.iter().map(|change| format!("reload: {change}")).collect()));
        }
        threads::check_change(self.config.plan(), next.plan()).map_err(Refused::Cause)?;
        // First, since an address in use refuses the change.
        let sockets = self.listen(next.plan()).map_err(Refused::cause)?;
        self.check_rdma(&changes).map_err(Refused::cause)?;
        // New drives and far targets are opened later, by `poll`. Further disks of a drive that is open are
        // in this snapshot.
        let absent = next.plan().absent(Some(&self.snapshot));
        let opened: Vec<Opened> = absent.iter().filter_map(|origin| self.already_open(origin)).collect();
        // What is absent and stays in the configuration is no part of the change.
        next.set_away(&self.absent_in(next.plan()));
        let drives = &*self.attempts.origins().drives;
        next.plan().check_media(Some(self.config.plan()), &self.snapshot).map_err(Refused::cause)?;
        let memory = memory_of(&self.snapshot);
        let snapshot = next.plan().snapshot_and_persist(Some(&self.snapshot), drives, &opened, keep);
        // Also after an error, which may come after a cache was replaced.
        let now = snapshot.as_ref().map_or_else(|_| memory_of(&self.snapshot), |next| memory_of(next));
        self.retired.add(memory, &now);
        let snapshot = snapshot.map_err(Refused::cause)?;
        for change in &changes {
            tracing::info!("reload: {change}");
        }
        let known: HashSet<_> = self.plan().notes.iter().collect();
        let notes = next.plan().notes.iter().filter(|note| !known.contains(note));
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
        self.listeners.extend(sockets);
        self.snapshot = Arc::clone(&snapshot);
        self.absent_listeners.retain(|index| snapshot.listeners[*index].is_open);
        // Retries failed attempts at once: the operator may have repaired a drive.
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

    /// Checks that each new RDMA address can be bound. An address in use is accepted if this reload removes
    /// an RDMA listener with its port. Otherwise waits for the address until [`CLOSING_MAX`] after the last
    /// removal of an RDMA listener.
    ///
    /// The accepting core binds the address later, after it has closed the removed listeners. It retries
    /// until the bind succeeds.
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
                // EADDRNOTAVAIL has two meanings. The address is in use, if one of the two listeners has the
                // wildcard address; or the machine does not have the address, and then a bind with port 0
                // fails too.
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

    /// Binds the new TCP listeners. The sockets of removed listeners do not conflict, so that a listener may
    /// change between the wildcard address and a single address.
    fn listen_despite_closing(&self, listeners: &[Listener]) -> Result<Vec<Listening>, ServeError> {
        let is_open = |index: usize| listeners.get(index).is_some_and(|listener| listener.is_open);
        let closing = self.sockets.iter().filter(|(_, index)| !is_open(*index));
        let closing: Vec<Arc<Socket>> = closing.filter_map(|(socket, _)| socket.upgrade()).collect();
        let closing: Vec<&Socket> = closing.iter().map(Arc::as_ref).collect();
        super::listen(listeners, &self.snapshot.listeners, &closing)
    }

    /// Whether a TCP listener on this port was removed by a reload and its socket is still open.
    fn is_closing(&self, address: SocketAddr) -> bool {
        let has_port = |index: usize| {
            let listener = self.snapshot.listeners.get(index).filter(|listener| !listener.is_open);
            listener.is_some_and(|listener| listener.address.port() == address.port())
        };
        self.sockets.iter().any(|(socket, index)| socket.strong_count() > 0 && has_port(*index))
    }

    /// Returns the drive as opened if one of its namespaces is a disk of the snapshot. `None` for other
    /// drives and for far targets.
    fn already_open(&self, origin: &Origin) -> Option<Opened> {
        let Origin::Drive(address) = *origin else { return None };
        self.is_open(address).then_some(Opened::Drive(address))
    }

    fn is_open(&self, address: PciAddress) -> bool {
        let mut of_drive = self.plan().disks.iter().filter(|disk| disk.address() == Some(address));
        let is_served = |name: &str| self.snapshot.disks.iter().flatten().any(|disk| disk.name() == name);
        of_drive.any(|disk| is_served(&disk.name))
    }

    /// Returns the time until the next [`Reconfigurator::poll`].
    pub fn pause(&self) -> Duration {
        let pause = self.attempts.pause();
        let is_all_there = self.absent_listeners.is_empty() && self.disk_errors.is_empty();
        if is_all_there { pause } else { pause.min(REMOTE_RETRY_PERIOD) }
    }

    /// Whether drives are being opened; these must be shut down before the process ends.
    pub fn is_opening_drives(&self) -> bool {
        self.attempts.is_opening_drives()
    }

    /// Collects finished open attempts, starts new ones, and checks the sizes of namespaces. Returns the
    /// snapshot for the cores if a disk was opened or a size has changed, otherwise `None`.
    pub fn poll(&mut self, now: Instant) -> Option<Arc<Snapshot>> {
        self.save_again();
        let before = self.snapshot.generation;
        // One origin at a time, so that an error of one does not affect the others.
        while let Some((origin, result)) = self.attempts.take_finished(now) {
            self.add_or_log(&origin, result);
        }
        let is_core_due = !self.disk_errors.is_empty() && now >= self.next_cores;
        if is_core_due {
            self.next_cores = now + CORE_RETRY_PERIOD;
        }
        if self.listen_again() || is_core_due {
            // With the next snapshot, the cores are sent the sockets, and open what they lack.
            let plan = Arc::clone(self.plan());
            if let Err(error) = self.update_snapshot(&plan, &[]) {
                tracing::error!("cannot send the configuration to the cores, retrying: {error}");
            }
        }
        let renewed = if has_new_size(&self.snapshot) {
            let plan = Arc::clone(self.plan());
            let checked = plan.check_media(None, &self.snapshot);
            checked.and_then(|()| self.update_snapshot(&plan, &[]))
        } else {
            Ok(())
        };
        let why = renewed.err().map(|error| error.to_string()).unwrap_or_default();
        if !why.is_empty() && why != self.size_error {
            tracing::error!(
                "cannot serve the new size of a drive or far namespace, the old size stays: {why}"
            );
        }
        self.size_error = why;
        self.attempts.open(self.absent(), now);
        (self.snapshot.generation != before).then(|| Arc::clone(&self.snapshot))
    }

    fn add_or_log(&mut self, origin: &Origin, result: Result<OpenedOrigin, SnapshotError>) {
        if let Err(error) = result.and_then(|found| self.add_opened(origin, found)) {
            self.attempts.log_failure(origin, &error.to_string());
        }
    }

    /// Makes the next snapshot with what was opened, unless a reload has removed `origin` from the
    /// configuration.
    fn add_opened(&mut self, origin: &Origin, (opened, _drive): OpenedOrigin) -> Result<(), SnapshotError> {
        if !self.absent().contains(origin) {
            return Ok(());
        }
        let Origin::Path(disk) = origin else {
            let plan = Arc::clone(self.plan());
            return self.update_snapshot(&plan, &[opened]);
        };
        // The plan of a disk that was away lacks its size and its medium.
        let next = self.config.with_disk_again(&disk.name, self.retired.resident());
        let next =
            next.map_err(|errors| SnapshotError::Other(errors.lines().collect::<Vec<_>>().join("; ")))?;
        let plan = Arc::clone(next.shared_plan());
        self.update_snapshot(&plan, &[opened])?;
        self.config = next;
        Ok(())
    }

    /// Makes the next snapshot of `plan`, which is that of the configuration but for a disk in `opened`, with
    /// `opened` and new sizes, and logs the namespaces that differ.
    fn update_snapshot(&mut self, plan: &Plan, opened: &[Opened]) -> Result<(), SnapshotError> {
        let next = plan.snapshot(Some(&self.snapshot), &*self.attempts.origins().drives, opened)?;
        log_namespaces(&self.snapshot, &next);
        self.snapshot = next;
        Ok(())
    }

    /// Returns the names of absent disks that are at the same place in `next`.
    fn absent_in(&self, next: &Plan) -> Vec<String> {
        let kind_in = |plan: &Plan, name: &str| plan.disk(name).map(|disk| disk.kind.clone());
        let is_same = |name: &&str| kind_in(next, name) == kind_in(self.plan(), name);
        let absent = self.absent();
        absent.iter().filter_map(Origin::disk).filter(is_same).map(str::to_owned).collect()
    }

    /// Returns the origins of the plan that the snapshot lacks.
    fn absent(&self) -> Vec<Origin> {
        self.plan().absent(Some(&self.snapshot))
    }
}

/// Whether nothing was known of the path of a disk when it was validated.
fn is_away(origin: &Origin) -> bool {
    matches!(origin, Origin::Path(disk) if disk.medium.is_away)
}

/// Whether an attempt failed for a setting of a disk on a path, which time does not change.
fn is_of_settings(origin: &Origin, error: &SnapshotError) -> bool {
    let is_system = matches!(error, SnapshotError::Open(OpenError::System { .. }));
    matches!(origin, Origin::Path(_)) && !is_system
}

/// Writes the old text to the file, after a change that failed once the file was written. Logs a failure.
fn restore_file(file: &Path, text: &str) {
    if let Err(error) = Staged::new(file, text).and_then(Staged::commit) {
        let file = file.display();
        tracing::error!(
            %file,
            %error,
            "cannot undo a change in the file that is not in force: undo it by hand, or the next start \
             serves it"
        );
    }
}

/// Whether the geometry of a disk differs from that of its namespace in the snapshot.
fn has_new_size(snapshot: &Snapshot) -> bool {
    let namespaces = snapshot.subsystems.iter().flat_map(|subsystem| subsystem.active());
    namespaces.into_iter().any(|namespace| namespace.geometry != namespace.source.geometry())
}

/// Logs each namespace of `next` that is new or whose geometry differs.
fn log_namespaces(before: &Snapshot, next: &Snapshot) {
    for subsystem in &next.subsystems {
        let was = before.subsystem(&subsystem.nqn);
        for namespace in subsystem.active() {
            let was = was.and_then(|was| was.namespace(namespace.nsid)).map(|was| was.geometry);
            if was != Some(namespace.geometry) {
                let what = match namespace.source.kind() {
                    "remote" => "far namespace",
                    "file" => "file",
                    _ => "drive",
                };
                tracing::info!(
                    nqn = %subsystem.nqn,
                    nsid = namespace.nsid,
                    disk = namespace.source.name(),
                    bytes = namespace.geometry.bytes(),
                    bytes_before = was.map_or(0, |was| was.bytes()),
                    "serving the current size of the {what}"
                );
            }
        }
    }
}
