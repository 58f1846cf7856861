//! [`Served`]: the configuration that is served, and what makes another of it: SIGHUP, a drive that was
//! absent and is there now, a drive whose namespace has another size.
//!
//! What it does not do: it tells nobody; the snapshots that it returns are for the cores.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use spindle_target::snapshot::Snapshot;

use crate::config::{Change, Config, Plan, is_function_there};
use crate::log::LogControl;

/// After a drive that is there did not work: opening it may take as long as it says that it takes (CAP.TO).
const AGAIN: Duration = Duration::from_secs(60);

/// What is served now.
pub struct Served {
    config: Config,
    snapshot: Arc<Snapshot>,
    log: LogControl,
    /// When absent drives are looked for again.
    next_try: Instant,
}

impl Served {
    /// Serving has begun with this.
    pub fn new(config: Config, snapshot: Arc<Snapshot>, log: LogControl) -> Served {
        Served { config, snapshot, log, next_try: Instant::now() }
    }

    /// What the file says.
    pub fn plan(&self) -> &Plan {
        self.config.plan()
    }

    /// Read the file again. `Some`: the snapshot that the cores are to change to.
    pub fn reload(&mut self) -> Option<Arc<Snapshot>> {
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
        match next.plan().snapshot(Some(&self.snapshot)) {
            Ok(snapshot) => {
                self.log.set_level(next.plan().log.level);
                tracing::info!(
                    generation = snapshot.generation,
                    changes = changes.len(),
                    "configuration read again"
                );
                self.config = next;
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
        let plan = self.config.plan();
        let is_back = now >= self.next_try && plan.absent(&self.snapshot).any(is_function_there);
        if !is_back && !has_new_size(&self.snapshot) {
            return None;
        }
        let next = match plan.snapshot(Some(&self.snapshot)) {
            Ok(next) => next,
            Err(error) => {
                self.next_try = now + AGAIN;
                tracing::error!("a drive cannot be taken up: {error}");
                return None;
            }
        };
        if plan.absent(&next).any(is_function_there) {
            self.next_try = now + AGAIN;
        }
        if is_same(&self.snapshot, &next) {
            return None;
        }
        tell(&self.snapshot, &next);
        self.snapshot = Arc::clone(&next);
        Some(next)
    }
}

/// A disk says another size than its namespaces have.
fn has_new_size(snapshot: &Snapshot) -> bool {
    let namespaces = snapshot.subsystems.iter().flat_map(|subsystem| subsystem.active());
    namespaces.into_iter().any(|namespace| namespace.geometry != namespace.source.geometry())
}

/// Nothing came of it: a drive that is there does not work yet.
fn is_same(before: &Snapshot, next: &Snapshot) -> bool {
    before.disks.len() == next.disks.len() && !has_new_size(before)
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
