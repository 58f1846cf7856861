//! [`Drive`]: an open drive, and [`NvmeDisk`], one of its namespaces as a disk.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nvme_spec::log::SmartLog;
use spindle_reactor::lock::Lock;
use spindle_reactor::mem::Area;
use spindle_target_disk::guard::CORES_MAX;
use spindle_target_disk::{
    CacheChange, CacheSpec, ChannelContext, Disk, DiskChannel, Geometry, Health, OpenError, ResizeError,
    Usage, medium_id,
};

use crate::core::NvmeChannel;
use crate::core_queue::CoreQueue;
use crate::fronts::Fronts;
use crate::function::Bus;
use crate::manager::Manager;
use crate::rules::{Deallocating, Namespace, Rules};
use crate::shared::{DriveFacts, DriveShared, NotOpened, Settings};
use crate::shared_queue::OWN_COMMANDS_MAX;

/// Interval of manager steps while the manager has work in progress.
const STEP_BUSY: Duration = Duration::from_millis(1);
/// Interval of manager steps while the manager only watches the drive.
const STEP_IDLE: Duration = Duration::from_millis(20);

/// Manager threads of dropped drives, until the threads have ended. `finish` waits for these threads.
static CLOSING: Lock<Vec<JoinHandle<()>>> = Lock::new(Vec::new());

/// Blocks until every dropped drive is shut down. Call this at the end of the process. Otherwise the kernel
/// resets the drives without a shutdown notification, which drives may count as an unsafe shutdown.
pub fn finish() {
    while !finish_within(Duration::from_secs(1)) {}
}

/// As [`finish`], for at most `limit`, because a core that hangs keeps its drive's manager running. Returns
/// false if some drives are not shut down.
pub fn finish_within(limit: Duration) -> bool {
    let end = Instant::now() + limit;
    loop {
        let mut closing = CLOSING.lock();
        closing.retain(|thread| !thread.is_finished());
        if closing.is_empty() || Instant::now() >= end {
            return closing.is_empty();
        }
        drop(closing);
        std::thread::sleep(STEP_BUSY);
    }
}

/// Error of opening a drive.
#[derive(Debug, Clone, thiserror::Error)]
#[error("NVMe drive {address}: {why}")]
pub struct DriveError {
    /// Address of the drive, from [`Bus::address`].
    pub address: String,
    /// Reason, as text for the log.
    pub why: String,
    /// The drive is missing, broken or not ready, so that another attempt may succeed. False if the drive
    /// works but is not supported, or if the machine or its settings prevent its use.
    pub is_absent: bool,
}

/// An open drive. After its drop, its manager's thread shuts the drive down; see [`finish`].
pub struct Drive {
    shared: Arc<DriveShared>,
    thread: Option<JoinHandle<()>>,
}

impl Drive {
    /// Opens, enables and identifies the drive. Blocks until the drive is ready or has failed (CAP.TO and
    /// `admin_timeout`, up to minutes); never call this on a core.
    pub fn open(bus: Arc<dyn Bus>, settings: Settings) -> Result<Arc<Drive>, DriveError> {
        Drive::open_until(bus, settings, &Arc::default())
    }

    /// As [`Drive::open`], and sets `ended` once the drive's manager has ended, also after a failure. Until
    /// then the function cannot be opened again.
    pub(crate) fn open_until(
        bus: Arc<dyn Bus>,
        settings: Settings,
        ended: &Arc<AtomicBool>,
    ) -> Result<Arc<Drive>, DriveError> {
        let address = bus.address();
        let shared = DriveShared::new(address.clone(), settings);
        let (its, end) = (Arc::clone(&shared), ManagerEnd(Arc::clone(&shared), Arc::clone(ended)));
        let run = move || {
            let _end = end;
            let begin = Instant::now();
            let mut manager = Manager::new(its, bus);
            while !manager.has_ended() {
                let now = u64::try_from(begin.elapsed().as_millis()).unwrap_or(u64::MAX);
                std::thread::sleep(if manager.step(now) { STEP_BUSY } else { STEP_IDLE });
            }
        };
        let failed = |NotOpened { why, is_absent }| DriveError { address: address.clone(), why, is_absent };
        let thread = std::thread::Builder::new().name(format!("nvme-{address}")).spawn(run);
        let thread = thread.map_err(|error| {
            failed(NotOpened { why: format!("cannot start its thread: {error}"), is_absent: false })
        })?;
        let drive = Drive { shared, thread: Some(thread) };
        drive.shared.wait_first_result().map_err(failed)?;
        Ok(Arc::new(drive))
    }

    /// Returns a drive and its manager, which the caller steps, for simulation. The drive is in service once
    /// [`Drive::facts`] is `Some`.
    #[must_use]
    pub fn stepped(bus: Arc<dyn Bus>, settings: Settings) -> (Arc<Drive>, Manager) {
        let shared = DriveShared::new(bus.address(), settings);
        let manager = Manager::new(Arc::clone(&shared), bus);
        (Arc::new(Drive { shared, thread: None }), manager)
    }

    /// Returns identity and limits as identified; `None` if the drive was never in service.
    #[must_use]
    pub fn facts(&self) -> Option<DriveFacts> {
        let state = self.shared.state();
        if state.first_result != Some(Ok(())) {
            return None;
        }
        state.facts.clone()
    }

    /// Returns the reason why opening failed; `None` before the result and after a success.
    #[must_use]
    pub fn failure(&self) -> Option<String> {
        self.shared.state().first_result.clone().and_then(Result::err).map(|failure| failure.why)
    }

    /// Returns the SMART / Health log page as last read; `None` before the first read.
    #[must_use]
    pub fn health(&self) -> Option<SmartLog> {
        self.shared.state().health
    }

    /// Returns two counts. The first is of completions on I/O queues that matched no command. The second is
    /// of I/O commands that failed after all retries, or with a status that is not retried.
    #[must_use]
    pub fn faults(&self) -> (u64, u64) {
        (self.shared.strays.load(Ordering::Relaxed), self.shared.failures.load(Ordering::Relaxed))
    }

    /// Returns namespace `nsid` as the disk `name`.
    ///
    /// # Errors
    /// [`OpenError::Setting`]: the namespace does not exist or cannot be served.
    pub fn disk(self: &Arc<Self>, name: &str, nsid: u32) -> Result<Arc<NvmeDisk>, OpenError> {
        let mut state = self.shared.state();
        let found = state.namespaces.iter().find(|(namespace, _)| namespace.nsid == nsid);
        let Some((namespace, rules)) = found else {
            let there: Vec<u32> = state.namespaces.iter().map(|(namespace, _)| namespace.nsid).collect();
            return Err(OpenError::Setting {
                disk: name.to_owned(),
                field: "namespace",
                value: nsid.to_string(),
                allowed: format!("{} has these usable namespaces: {there:?}", self.shared.address),
            });
        };
        let (name, namespace, rules) = (name.to_owned(), Arc::clone(namespace), *rules);
        let (drive, fronts) = (Arc::clone(self), state.add_fronts(nsid, &self.shared.released));
        Ok(Arc::new(NvmeDisk { name, drive, namespace, rules, fronts }))
    }
}

impl Drive {
    /// Requests the shutdown of the drive by its manager.
    pub(crate) fn begin_closing(&self) {
        self.shared.is_closing.store(true, Ordering::Release);
    }
}

impl Drop for Drive {
    fn drop(&mut self) {
        self.begin_closing();
        // Not joined here: this thread may be a core's, and a shutdown may take seconds.
        if let Some(thread) = self.thread.take() {
            CLOSING.lock().push(thread);
        }
    }
}

/// Drop guard of a manager's thread. When the thread ends or panics, the guard sets an error as the first
/// result if there is none, and then publishes that the manager has ended.
struct ManagerEnd(Arc<DriveShared>, Arc<AtomicBool>);

impl Drop for ManagerEnd {
    fn drop(&mut self) {
        let why = "its manager has ended; see the log".to_owned();
        self.0.set_first_result(Err(NotOpened { why, is_absent: true }));
        self.1.store(true, Ordering::Release);
    }
}

/// Blocks until the manager has ended. Blocks without limit while a core that has the drive hangs.
pub(crate) fn wait_ended(ended: &AtomicBool) {
    while !ended.load(Ordering::Acquire) {
        std::thread::sleep(STEP_BUSY);
    }
}

/// One namespace of a drive as a disk.
pub struct NvmeDisk {
    name: String,
    drive: Arc<Drive>,
    namespace: Arc<Namespace>,
    rules: Rules,
    fronts: Arc<Fronts>,
}

impl NvmeDisk {
    /// Returns the drive with this namespace.
    #[must_use]
    pub fn drive(&self) -> &Arc<Drive> {
        &self.drive
    }
}

impl Disk for NvmeDisk {
    fn name(&self) -> &str {
        &self.name
    }

    fn kind(&self) -> &'static str {
        "nvme"
    }

    fn geometry(&self) -> Geometry {
        self.namespace.geometry(&self.rules)
    }

    /// Maps the pool for a later `open`. No effect if the drive is away or the mapping fails; the mapping is
    /// discarded if the function was replaced meanwhile.
    fn prepare(&self, pool: &Area) {
        let shared = &self.drive.shared;
        let Some(function) = shared.state().function.clone() else { return };
        // Outside the lock: mapping is slow, and cores may open other disks of the drive.
        let Ok(mapping) = function.map(pool) else { return };
        let mut state = shared.state();
        if state.function.as_ref().is_some_and(|now| Arc::ptr_eq(now, &function)) {
            state.prepared.push((pool.clone(), mapping));
        }
    }

    /// Maps a cache's memory. If the drive is away, the manager maps the memory when the drive returns.
    fn map_memory(&self, area: &Area) -> Result<Option<Box<dyn Any + Send + Sync>>, OpenError> {
        let shared = &self.drive.shared;
        let attached = Fronts::new_area(area);
        loop {
            let function = shared.state().function.clone();
            // Outside the lock: mapping is slow, and cores may open other disks of the drive.
            let mapping = function.as_ref().map(|function| function.map(area)).transpose();
            let mapping = mapping.map_err(|error| OpenError::System {
                disk: self.name.clone(),
                verb: format!("map the memory of its cache ({} bytes)", error.bytes),
                source: error.source,
            })?;
            let state = shared.state();
            let is_open = match (&function, &state.function) {
                (Some(then), Some(now)) => Arc::ptr_eq(then, now),
                (None, None) => true,
                // The function was closed or opened meanwhile.
                (Some(_), None) | (None, Some(_)) => false,
            };
            if is_open {
                mapping.into_iter().for_each(|mapping| attached.set_mapping(mapping));
                return Ok(Some(Box::new(self.fronts.add(attached))));
            }
        }
    }

    /// Adds `act`, which the manager calls after the drive was reset or away, before any core submits.
    fn on_foreign_change(&self, act: Box<dyn Fn() + Send + Sync>) {
        self.fronts.on_foreign_change(act);
    }

    /// Refuses a new cache; accepts `None`. Called only for a disk that was opened without a cache, whose
    /// handles therefore have no cache layer.
    fn prepare_cache(&self, spec: Option<&CacheSpec>) -> Result<Option<CacheChange>, OpenError> {
        if spec.is_none() {
            return Ok(None);
        }
        Err(OpenError::Setting {
            disk: self.name.clone(),
            field: "cache",
            value: "new".to_owned(),
            allowed: "an nvme disk opened without a cache cannot get one; restart to add one".to_owned(),
        })
    }

    /// Registers a core queue. Requests wait until the manager has made its queue pair. Fails if
    /// [`CORES_MAX`] cores have the namespace open, or if the pool cannot be mapped.
    fn open(&self, context: &ChannelContext) -> Result<Box<dyn DiskChannel>, OpenError> {
        let shared = &self.drive.shared;
        let mut state = shared.state();
        let depth = context.depth.clamp(1, OWN_COMMANDS_MAX);
        let Some(participant) = state.guard(self.namespace.nsid).join() else {
            return Err(OpenError::Setting {
                disk: self.name.clone(),
                field: "cores",
                value: (CORES_MAX + 1).to_string(),
                allowed: format!("at most {CORES_MAX} cores can have one namespace open"),
            });
        };
        let pool = context.pool.area();
        // Mapped here, so that the opening core receives the error.
        let mapped = match (state.take_prepared(&pool), &state.function) {
            (Some(mapping), _) => Ok(Some(mapping)),
            (None, Some(function)) => function.map(&pool).map(Some),
            (None, None) => Ok(None),
        };
        let mapping = match mapped {
            Ok(mapping) => mapping,
            Err(error) => {
                return Err(OpenError::System {
                    disk: self.name.clone(),
                    verb: format!("map the pool of core {} ({} bytes)", context.core, pool.bytes()),
                    source: error.source,
                });
            }
        };
        let core_queue = CoreQueue::new(context.core, self.namespace.nsid, depth, pool, mapping);
        let core_queue = Arc::new(core_queue.with_fronts(Arc::clone(&self.fronts)));
        state.core_queues.push(Arc::clone(&core_queue));
        drop(state);
        let namespace = Arc::clone(&self.namespace);
        Ok(Box::new(NvmeChannel::new(core_queue, Arc::clone(shared), namespace, self.rules, participant)))
    }

    /// Accepts only the current size of the namespace.
    fn prepare_resize(&self, bytes: u64) -> Result<(), ResizeError> {
        let has = self.geometry().bytes();
        if bytes == has {
            return Ok(());
        }
        Err(ResizeError {
            disk: self.name.clone(),
            bytes,
            allowed: format!("the namespace has {has} bytes; without a size the disk has that size"),
        })
    }

    fn resize(&self, bytes: u64) -> Result<(), ResizeError> {
        self.prepare_resize(bytes)
    }

    fn health(&self) -> Option<Health> {
        self.drive.health().map(|log| Health {
            critical_warning: log.critical_warning,
            temperature_kelvin: log.temperature.get(),
            spare_percent: log.available_spare,
            spare_threshold_percent: log.available_spare_threshold,
            used_percent: log.percentage_used,
            media_errors: log.media_errors.get(),
            unsafe_shutdowns: log.unsafe_shutdowns.get(),
        })
    }

    fn medium_ids(&self) -> Vec<String> {
        let serial = self.drive.facts().map(|facts| facts.serial).unwrap_or_default();
        let Namespace { nsid, nguid, eui64, .. } = *self.namespace;
        medium_id::of_nvme(&serial, nsid, nguid, eui64)
    }

    fn usage(&self) -> Usage {
        Usage { bytes_used: self.geometry().bytes() }
    }

    fn deallocated_is_zero(&self) -> bool {
        self.rules.deallocating == Deallocating::WriteZeroes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core_queue::QueueCommand;
    use nvme_spec::identify::{IdentifyController, IdentifyControllerNvm, IdentifyNamespace};
    use spindle_reactor::clock::Nanos;
    use spindle_reactor::mem::{Pages, Pool, ZoneSpec};

    #[test]
    fn what_the_manager_ordered_before_the_core_came_is_done() {
        let (controller, nvm) = (IdentifyController::default(), IdentifyControllerNvm::default());
        let mut id = IdentifyNamespace { nsze: 1000.into(), ..IdentifyNamespace::default() };
        id.lbaf[0].lbads = 9;
        let namespace = Arc::new(Namespace::new(1, &id, &controller).expect("fits"));
        let rules = Rules::new(&namespace, &controller, &nvm, 0);
        let shared = DriveShared::new("drive".to_owned(), Settings::default());
        let pool = Pool::new(&[ZoneSpec { buffer_bytes: 4096, count: 4 }], Pages::Base).expect("a pool");
        let core_queue = Arc::new(CoreQueue::new(0, 1, 4, pool.area(), None));
        // Between the two lines of open() that make the core queue known and the handle.
        core_queue.set_queue_command(QueueCommand::Rewind);
        let participant = shared.state().guard(1).join().expect("a line");
        let mut core = NvmeChannel::new(Arc::clone(&core_queue), shared, namespace, rules, participant);
        assert!(!core_queue.has_answered());
        core.poll(Nanos::ZERO, &mut Vec::with_capacity(4));
        assert!(core_queue.has_answered(), "or the manager waits for ever, and the requests with it");
    }
}
