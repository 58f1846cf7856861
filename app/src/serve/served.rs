//! [`Served`]: the configuration that is served, and what makes another of it: SIGHUP, a drive that was
//! absent and is there now, a drive whose namespace has another size.
//!
//! An absent drive, and one that the file names anew, is opened on a thread of its own, as one that is
//! broken takes minutes to say so, and the caller has signals to hear meanwhile. The drives that open are in
//! the next snapshot. (Those of the start are opened one after the other before there is a [`Served`]: nobody
//! is served yet.)
//!
//! What it does not do: it tells nobody; the snapshots that it returns are for the cores.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use spindle_nvme_pcie::{Drive, DriveError, PciAddress};
use spindle_reactor::net::Listener as Socket;
use spindle_target::snapshot::{Listener, Snapshot};

use super::ServeError;
use super::core_loop::Listening;
use crate::config::{Change, Config, DriveSource, Plan, SnapshotError};
use crate::log::LogControl;

#[cfg(test)]
mod tests;

/// From a try to open an absent drive that failed to the next.
const AGAIN: Duration = Duration::from_secs(60);
/// Between two looks at drives that are not there, and at sizes.
const LOOK_PERIOD: Duration = Duration::from_secs(5);
/// How long a listener that an earlier reload has taken away may still have its address: until all cores have
/// that configuration, which waits for memory to be registered where there is RDMA.
const CLOSING_MAX: Duration = Duration::from_secs(3);
/// Between two looks at drives that are being opened.
const OPENING_PERIOD: Duration = Duration::from_millis(100);

/// What is served now.
pub struct Served {
    config: Config,
    snapshot: Arc<Snapshot>,
    drives: Arc<dyn DriveSource>,
    tries: Vec<Try>,
    /// Why a new size cannot be served, as it was said: not said again.
    why: String,
    /// Sockets of listeners that are new in the snapshot.
    listeners: Vec<Listening>,
    /// Sockets of all listeners, until the core that accepts closes them.
    known: Vec<Known>,
}

/// A socket with its listener's index in the snapshot.
type Known = (Weak<Socket>, usize);

/// What [`Served`] keeps of sockets.
pub fn known(listeners: &[Listening]) -> Vec<Known> {
    listeners.iter().map(|(socket, index)| (Arc::downgrade(socket), *index)).collect()
}

/// An absent drive that was there when it was looked for.
struct Try {
    address: PciAddress,
    /// Until it is known what came of it.
    thread: Option<JoinHandle<Result<Arc<Drive>, DriveError>>>,
    /// It failed: not again before this.
    next: Instant,
    /// Why, as it was said: not said again.
    why: String,
}

impl Served {
    /// Serving has begun with this.
    pub fn new(
        config: Config,
        snapshot: Arc<Snapshot>,
        drives: Arc<dyn DriveSource>,
        known: Vec<Known>,
    ) -> Served {
        let (tries, why, listeners) = (Vec::new(), String::new(), Vec::new());
        Served { config, snapshot, drives, tries, why, listeners, known }
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
            tracing::warn!("SIGHUP: serving the built-in default, there is no file to read again");
            return None;
        };
        let next = match Config::load(&path) {
            Ok(next) => next,
            Err(errors) => {
                errors.lines().for_each(|line| tracing::error!("{line}"));
                tracing::error!("SIGHUP: all stays as it was");
                return None;
            }
        };
        let changes = next.plan().changes(self.config.plan());
        for change in &changes {
            if change.is_refused() {
                tracing::warn!("reload: {change}");
            } else {
                tracing::info!("reload: {change}");
            }
        }
        if changes.iter().any(Change::is_refused) {
            tracing::error!("SIGHUP: all stays as it was");
            return None;
        }
        let notes = next.plan().notes.iter().filter(|note| !self.plan().notes.contains(note));
        notes.for_each(|note| tracing::warn!("{note}"));
        // Before anything is changed: an address that is in use is a refusal.
        let sockets = match self.listen(next.plan()) {
            Ok(sockets) => sockets,
            Err(error) => {
                tracing::error!("SIGHUP: all stays as it was: {error}");
                return None;
            }
        };
        // New drives as well as absent ones are opened by the looks that follow.
        let mut absent = absent(next.plan(), &self.snapshot);
        absent.retain(|address| !self.is_open(*address));
        match next.plan().snapshot(Some(&self.snapshot), &*self.drives, &absent) {
            Ok(snapshot) => {
                log.set_level(next.plan().log.level);
                tracing::info!(
                    generation = snapshot.generation,
                    changes = changes.len(),
                    "configuration read again"
                );
                self.config = next;
                self.known.retain(|(socket, _)| socket.strong_count() > 0);
                self.known.extend(known(&sockets));
                self.listeners = sockets;
                // Whoever asks for it may have mended a drive.
                let now = Instant::now();
                self.tries.iter_mut().for_each(|tried| tried.next = now);
                self.snapshot = Arc::clone(&snapshot);
                Some(snapshot)
            }
            Err(error) => {
                tracing::error!("SIGHUP: all stays as it was: {error}");
                None
            }
        }
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
                    std::thread::park_timeout(Duration::from_millis(10));
                }
                result => return result,
            }
        }
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

    /// A reload has taken away a listener that may still have this address.
    fn has_closed(&self, address: SocketAddr) -> bool {
        let mut listeners = self.snapshot.listeners.iter().filter(|listener| !listener.is_open);
        listeners.any(|listener| listener.address.port() == address.port())
    }

    /// A namespace of the drive is served.
    fn is_open(&self, address: PciAddress) -> bool {
        let mut of_drive = self.plan().disks.iter().filter(|disk| disk.address() == Some(address));
        let is_served = |name: &str| self.snapshot.disks.iter().flatten().any(|disk| disk.name() == name);
        of_drive.any(|disk| is_served(&disk.name))
    }

    /// How long there is nothing to look at.
    pub fn pause(&self) -> Duration {
        if self.tries.iter().any(|tried| tried.thread.is_some()) { OPENING_PERIOD } else { LOOK_PERIOD }
    }

    /// Drives are being opened.
    pub fn is_opening(&self) -> bool {
        self.tries.iter().any(|tried| tried.thread.as_ref().is_some_and(|thread| !thread.is_finished()))
    }

    /// Look at the drives. `Some`: one that was absent is there, or a namespace has another size: the
    /// snapshot that the cores are to change to.
    pub fn look(&mut self, now: Instant) -> Option<Arc<Snapshot>> {
        let before = self.snapshot.generation;
        for index in 0..self.tries.len() {
            self.take_up(index, now);
        }
        let renewed = if has_new_size(&self.snapshot) { self.renew(None) } else { Ok(()) };
        let why = renewed.err().map(|error| error.to_string()).unwrap_or_default();
        if !why.is_empty() && why != self.why {
            tracing::error!("a drive's new size cannot be served: {why}");
        }
        self.why = why;
        self.open_absent(now);
        (self.snapshot.generation != before).then(|| Arc::clone(&self.snapshot))
    }

    /// If a try has come to its end, see what came of it. One drive at a time: what is wrong with one is not
    /// the others' harm.
    fn take_up(&mut self, index: usize, now: Instant) {
        let absent = self.absent();
        let Some(tried) = self.tries.get_mut(index) else { return };
        let Some(thread) = tried.thread.take_if(|thread| thread.is_finished()) else { return };
        tried.next = now + AGAIN;
        let address = tried.address;
        let drive = match thread.join() {
            // It was taken out of the file meanwhile.
            Ok(Ok(_)) if !absent.contains(&address) => return,
            Ok(Ok(drive)) => drive,
            Ok(Err(error)) => return self.say(index, &error.to_string()),
            Err(_) => return self.say(index, &format!("NVMe drive {address}: opening it has panicked")),
        };
        if let Err(error) = self.renew(Some(address)) {
            self.say(index, &error.to_string());
        }
        // Until here, or it would be opened a second time.
        drop(drive);
    }

    fn say(&mut self, index: usize, why: &str) {
        let Some(tried) = self.tries.get_mut(index) else { return };
        if tried.why != why {
            tracing::error!("its namespaces are left out, and it is tried again each minute: {why}");
            why.clone_into(&mut tried.why);
        }
    }

    /// The next snapshot, with the drive at `address` in it: it is open, so that it does not take long.
    fn renew(&mut self, address: Option<PciAddress>) -> Result<(), SnapshotError> {
        let mut absent = self.absent();
        absent.retain(|absent| address != Some(*absent));
        let next = self.plan().snapshot(Some(&self.snapshot), &*self.drives, &absent)?;
        tell(&self.snapshot, &next);
        self.snapshot = next;
        Ok(())
    }

    /// The drives that the snapshot lacks, each once.
    fn absent(&self) -> Vec<PciAddress> {
        absent(self.plan(), &self.snapshot)
    }

    /// Open the absent drives that are there, unless that has failed a moment ago.
    fn open_absent(&mut self, now: Instant) {
        let absent = self.absent();
        let drives = Arc::clone(&self.drives);
        self.tries.retain(|tried| {
            tried.thread.is_some() || (absent.contains(&tried.address) && drives.is_there(tried.address))
        });
        for address in absent {
            let known = self.tries.iter().position(|tried| tried.address == address);
            let is_due = known.is_none_or(|index| {
                self.tries.get(index).is_some_and(|tried| tried.thread.is_none() && now >= tried.next)
            });
            if !is_due || !drives.is_there(address) {
                continue;
            }
            let its = Arc::clone(&drives);
            let thread = std::thread::Builder::new().name(format!("open-{address}"));
            let thread = thread.spawn(move || its.open(address));
            let thread =
                thread.map_err(|error| tracing::error!(%address, %error, "no thread to open a drive"));
            let thread = thread.ok();
            match known.and_then(|index| self.tries.get_mut(index)) {
                Some(tried) => tried.thread = thread,
                None => self.tries.push(Try { address, thread, next: now + AGAIN, why: String::new() }),
            }
        }
    }
}

/// The drives of a plan that a snapshot lacks, each once.
fn absent(plan: &Plan, snapshot: &Snapshot) -> Vec<PciAddress> {
    let mut absent: Vec<_> = plan.absent(snapshot).collect();
    absent.sort_unstable();
    absent.dedup();
    absent
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
                tracing::info!(
                    nqn = %subsystem.nqn,
                    nsid = namespace.nsid,
                    disk = namespace.source.name(),
                    bytes = namespace.geometry.bytes(),
                    bytes_before = was.map_or(0, |was| was.bytes()),
                    "serving, as the drive is now"
                );
            }
        }
    }
}
