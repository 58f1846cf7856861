//! [`Served`]: the configuration that is served, and what makes another of it: SIGHUP, a drive that was
//! absent and is there now, a drive whose namespace has another size.
//!
//! An absent drive is opened on a thread of its own, as one that is broken takes minutes to say so, and the
//! caller has signals to hear meanwhile. The drives that open are in the next snapshot.
//!
//! What it does not do: it tells nobody; the snapshots that it returns are for the cores.

use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use spindle_nvme_pcie::{Drive, PciAddress};
use spindle_target::snapshot::Snapshot;

use crate::config::{Change, Config, DriveSource, Plan};
use crate::log::LogControl;

#[cfg(test)]
mod tests;

/// From one try to open an absent drive to the next.
const AGAIN: Duration = Duration::from_secs(60);

/// What is served now.
pub struct Served {
    config: Config,
    snapshot: Arc<Snapshot>,
    drives: Arc<dyn DriveSource>,
    tries: Vec<Try>,
}

/// An absent drive that was there when it was looked for.
struct Try {
    address: PciAddress,
    began: Instant,
    /// Until it is known what came of it.
    thread: Option<JoinHandle<Option<Arc<Drive>>>>,
}

impl Served {
    /// Serving has begun with this.
    pub fn new(config: Config, snapshot: Arc<Snapshot>, drives: Arc<dyn DriveSource>) -> Served {
        Served { config, snapshot, drives, tries: Vec::new() }
    }

    /// What the file says.
    pub fn plan(&self) -> &Plan {
        self.config.plan()
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
        match next.plan().snapshot(Some(&self.snapshot), &*self.drives, &self.absent()) {
            Ok(snapshot) => {
                log.set_level(next.plan().log.level);
                tracing::info!(
                    generation = snapshot.generation,
                    changes = changes.len(),
                    "configuration read again"
                );
                self.config = next;
                // Whoever asks for it may have mended a drive.
                self.tries.retain(|tried| tried.thread.is_some());
                self.snapshot = Arc::clone(&snapshot);
                Some(snapshot)
            }
            Err(error) => {
                tracing::error!("SIGHUP: all stays as it was: {error}");
                None
            }
        }
    }

    /// Look at the drives. `Some`: one that was absent is there, or a namespace has another size: the
    /// snapshot that the cores are to change to.
    pub fn look(&mut self, now: Instant) -> Option<Arc<Snapshot>> {
        let opened = self.take_opened();
        let next =
            if opened.is_empty() && !has_new_size(&self.snapshot) { None } else { self.renew(&opened) };
        self.open_absent(now);
        next
    }

    /// The snapshot with these drives in it. They are open, so that it does not take long.
    fn renew(&mut self, opened: &[(PciAddress, Arc<Drive>)]) -> Option<Arc<Snapshot>> {
        let mut absent = self.absent();
        absent.retain(|address| opened.iter().all(|(at, _)| at != address));
        match self.plan().snapshot(Some(&self.snapshot), &*self.drives, &absent) {
            Ok(next) => {
                tell(&self.snapshot, &next);
                self.snapshot = Arc::clone(&next);
                Some(next)
            }
            Err(error) => {
                tracing::error!("a drive cannot be taken up: {error}");
                None
            }
        }
    }

    /// The drives that the snapshot lacks, each once.
    fn absent(&self) -> Vec<PciAddress> {
        let mut absent: Vec<_> = self.plan().absent(&self.snapshot).collect();
        absent.sort_unstable();
        absent.dedup();
        absent
    }

    /// The drives that were opened since the last time.
    fn take_opened(&mut self) -> Vec<(PciAddress, Arc<Drive>)> {
        let mut opened = Vec::new();
        for tried in &mut self.tries {
            if let Some(thread) = tried.thread.take_if(|thread| thread.is_finished())
                && let Ok(Some(drive)) = thread.join()
            {
                opened.push((tried.address, drive));
            }
        }
        opened
    }

    /// Open the absent drives that are there, unless that was tried a moment ago.
    fn open_absent(&mut self, now: Instant) {
        let absent = self.absent();
        self.tries.retain(|tried| {
            tried.thread.is_some() || (absent.contains(&tried.address) && now < tried.began + AGAIN)
        });
        for address in absent {
            if self.tries.iter().any(|tried| tried.address == address) || !self.drives.is_there(address) {
                continue;
            }
            let drives = Arc::clone(&self.drives);
            let run = move || match drives.open(address) {
                Ok(drive) => Some(drive),
                Err(error) => {
                    tracing::error!("its namespaces are left out until its drive is there: {error}");
                    None
                }
            };
            let thread = std::thread::Builder::new().name(format!("open-{address}")).spawn(run);
            let thread =
                thread.map_err(|error| tracing::error!(%address, %error, "no thread to open a drive"));
            self.tries.push(Try { address, began: now, thread: thread.ok() });
        }
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
