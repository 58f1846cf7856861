//! From a [`Plan`] to the [`Snapshot`] that all cores see: disks are opened or made, or carried over from the
//! snapshot before with their counters, and get their new sizes.
//!
//! Everything that can fail without having changed a disk comes first. Resizes come last, in two steps: all
//! that can fail of any, then what hosts see of each. So a plan is followed as a whole or not at all; only a
//! file that was made for a new disk stays.
//!
//! A drive that is not there, and another target that is away, are no failures: one dead drive must not keep
//! the others of the machine from being served after a restart. Nothing here waits for them: the caller names
//! those that it has opened. What is not open is left out with its namespaces, [`Plan::absent`] tells which,
//! and a later [`Plan::snapshot`] takes it up.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use nvme_spec::nqn::Nqn;
use spindle_disk::file::{FileDisk, FileSpec};
use spindle_disk::ng::{NgDisk, NgFacts, NgSpec};
use spindle_disk::{
    CacheChange, CachedDisk, DelayDisk, DiskSource, NullDisk, NullSpec, OpenError, RamDisk, RamSpec,
    ResizeError, signature,
};
use spindle_nvme_pcie::{DriveError, PciAddress};
use spindle_target::counters::NamespaceCounters;
use spindle_target::snapshot::{DiskId, Listener, Namespace, Referral, Snapshot, Subsystem};

use super::machine::{self, PathState};
use super::origin::{DriveSource, Opened, Origin};
use super::plan::{DiskKind, DiskPlan, ListenerPlan, NamespacePlan, Plan, SubsystemPlan};
use super::validate::disks::medium_refusal;
use crate::identity::{self, Data};

/// Why there is no new snapshot.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error(transparent)]
    Drive(#[from] DriveError),
    #[error(transparent)]
    Resize(#[from] ResizeError),
    /// Something else, in words.
    #[error("{0}")]
    Other(String),
}

type Source = Arc<dyn DiskSource>;

impl Plan {
    /// The snapshot of this plan that follows `previous`, where [`Plan::changes`] refuses nothing: its disks
    /// are opened, made, carried over or resized. Of drives and other targets it has what was there before
    /// and what is in `opened`; the drives themselves come from `drives`.
    pub fn snapshot(
        &self,
        previous: Option<&Snapshot>,
        drives: &dyn DriveSource,
        opened: &[Opened],
    ) -> Result<Arc<Snapshot>, SnapshotError> {
        self.snapshot_kept(previous, drives, opened, &mut || Ok(()))
    }

    /// The same of a plan that `keep` keeps: it is called when all is ready and before any disk has another
    /// size. A disk that is larger than its file says would be refused at the next start.
    ///
    /// # Errors
    /// As there, and those of `keep`.
    pub fn snapshot_kept(
        &self,
        previous: Option<&Snapshot>,
        drives: &dyn DriveSource,
        opened: &[Opened],
        keep: &mut dyn FnMut() -> std::io::Result<()>,
    ) -> Result<Arc<Snapshot>, SnapshotError> {
        let listeners = self.listeners_after(previous)?;
        let disks = self.open_disks(previous, drives, opened)?;
        let resizes = Resizes::prepare(self.sizes(&disks))?;
        let caches = self.cache_changes(&disks)?;
        keep().map_err(|error| {
            SnapshotError::Other(format!("the configuration's file cannot be replaced: {error}"))
        })?;
        resizes.commit()?;
        caches.into_iter().for_each(|(disk, change)| disk.set_cache(change));
        let subsystems =
            self.subsystems.iter().map(|plan| self.subsystem(plan, &disks, &listeners, previous)).collect();
        let referrals = self.referrals.iter().zip(1..).map(|(referral, port_id)| Referral {
            transport: referral.transport,
            address: referral.address,
            port_id,
        });
        Ok(Arc::new(Snapshot {
            generation: previous.map_or(1, |previous| previous.generation + 1),
            disks,
            listeners,
            subsystems,
            referrals: referrals.collect(),
            limits: self.limits.controller.clone(),
        }))
    }

    /// The listeners of this plan, those that were there before in their old places: connections know theirs
    /// by its place, also when it is gone.
    ///
    /// # Errors
    /// There are no more port identifiers.
    pub fn listeners_after(&self, previous: Option<&Snapshot>) -> Result<Vec<Listener>, SnapshotError> {
        let mut listeners = previous.map_or_else(Vec::new, |previous| previous.listeners.clone());
        listeners.iter_mut().for_each(|listener| listener.is_open = false);
        for plan in &self.listeners {
            if let Some(known) = listeners.iter_mut().find(|known| known.endpoint() == plan.endpoint()) {
                known.is_open = true;
                known.in_capsule_bytes = plan.in_capsule_bytes;
                continue;
            }
            // An address has its identifier for as long as the process runs.
            let port_id = u16::try_from(listeners.len() + 1).map_err(|_| {
                let why =
                    "65535 addresses have been listened on since the start, more have no PORTID; restart";
                SnapshotError::Other(format!("listener {}: {why}", plan.address))
            })?;
            listeners.push(Listener {
                port_id,
                transport: plan.transport,
                address: plan.address,
                in_capsule_bytes: plan.in_capsule_bytes,
                is_open: true,
            });
        }
        Ok(listeners)
    }

    /// What may be away, and is in no disk of `snapshot`; each once.
    pub fn absent(&self, snapshot: Option<&Snapshot>) -> Vec<Origin> {
        let disks = snapshot.map_or(&[][..], |snapshot| &snapshot.disks);
        let is_open = |plan: &DiskPlan| disks.iter().flatten().any(|disk| disk.name() == plan.name);
        let mut absent = Vec::new();
        for plan in self.disks.iter().filter(|plan| !is_open(plan)) {
            let origin = self.origin(plan);
            absent.extend(origin.filter(|origin| !absent.contains(origin)));
        }
        absent
    }

    /// The disks by their [`DiskId`]: one that was there keeps its own, a new one gets one that was never
    /// used.
    fn open_disks(
        &self,
        previous: Option<&Snapshot>,
        drives: &dyn DriveSource,
        opened: &[Opened],
    ) -> Result<Vec<Option<Source>>, SnapshotError> {
        let before = previous.map(|previous| previous.disks.as_slice()).unwrap_or_default();
        let is_kept = |disk: &&Source| self.disk(disk.name()).is_some();
        let mut disks: Vec<Option<Source>> =
            before.iter().map(|disk| disk.as_ref().filter(is_kept).cloned()).collect();
        let mut new = Vec::with_capacity(self.disks.len());
        for plan in &self.disks {
            match disks.iter().flatten().find(|disk| disk.name() == plan.name) {
                Some(disk) => check_medium(plan, disk, false)?,
                None => new.push(plan),
            }
        }
        for plan in new {
            let Some(disk) = open(plan, drives, opened)? else { continue };
            let disk = with_cache(plan, with_delay(plan, disk)?)?;
            check_medium(plan, &disk, true)?;
            say_what_it_holds(plan);
            disks.push(Some(disk));
        }
        Ok(disks)
    }

    /// The disks that are to have another size.
    fn sizes(&self, disks: &[Option<Source>]) -> Vec<(Source, u64)> {
        let size = |disk: &Source| {
            let plan = self.disk(disk.name())?;
            let is_other = !plan.kind.is_shaped_by_drive() && disk.geometry().bytes() != plan.bytes;
            is_other.then(|| (Arc::clone(disk), plan.bytes))
        };
        disks.iter().flatten().filter_map(size).collect()
    }

    /// The caches that are to be other ones.
    fn cache_changes(&self, disks: &[Option<Source>]) -> Result<Vec<(Source, CacheChange)>, SnapshotError> {
        let mut changes = Vec::new();
        for disk in disks.iter().flatten() {
            let Some(plan) = self.disk(disk.name()) else { continue };
            changes.extend(disk.prepare_cache(plan.cache.as_ref())?.map(|change| (Arc::clone(disk), change)));
        }
        Ok(changes)
    }

    fn subsystem(
        &self,
        plan: &SubsystemPlan,
        disks: &[Option<Source>],
        listeners: &[Listener],
        previous: Option<&Snapshot>,
    ) -> Arc<Subsystem> {
        let before = previous.and_then(|previous| previous.subsystem(&plan.nqn));
        let highest = plan.namespaces.last().map_or(0, |namespace| namespace.nsid);
        let nqn = &plan.nqn;
        let namespaces = (1..=highest).map(|nsid| {
            let plan = plan.namespaces.iter().find(|namespace| namespace.nsid == nsid)?;
            let before = before.and_then(|before| before.namespace(nsid));
            self.namespace(nqn, plan, disks, before)
        });
        let endpoints: Vec<_> = self.listeners_of(plan).map(ListenerPlan::endpoint).collect();
        let is_offered = |listener: &Listener| listener.is_open && endpoints.contains(&listener.endpoint());
        let offered = listeners.iter().enumerate().filter(|(_, listener)| is_offered(listener));
        Arc::new(Subsystem {
            nqn: plan.nqn,
            serial: plan.serial.clone(),
            model: plan.model.clone(),
            hosts: plan.hosts.clone(),
            cntlid_range: plan.cntlid_range,
            io_queues_max: self.limits.io_queues_max,
            listeners: offered.map(|(index, _)| index).collect(),
            namespaces: namespaces.collect(),
        })
    }

    /// The namespace, with the counters of the one before when it is the same. `None`: its disk is absent.
    fn namespace(
        &self,
        nqn: &Nqn,
        plan: &NamespacePlan,
        disks: &[Option<Source>],
        before: Option<&Arc<Namespace>>,
    ) -> Option<Arc<Namespace>> {
        let is_it = |disk: &Option<Source>| disk.as_ref().is_some_and(|disk| disk.name() == plan.disk);
        let disk = DiskId(disks.iter().position(is_it)?);
        let source = Arc::clone(disks.get(disk.0)?.as_ref()?);
        // The identifier of a disk is never used again in this process.
        let (life, far) = (identity::life(disk.0), source.identity_seed());
        let data = match &far {
            Some(far) => Data::Far(far),
            None => Data::Living(&plan.disk, &life),
        };
        let uuid = plan.uuid.unwrap_or_else(|| identity::uuid(nqn, plan.nsid, data));
        let nguid = plan.nguid.unwrap_or_else(|| identity::nguid(nqn, plan.nsid, data));
        let before =
            before.filter(|before| before.disk == disk && before.uuid == uuid && before.nguid == nguid);
        let counters = before.map(|before| Arc::clone(&before.counters));
        Some(Arc::new(Namespace {
            nsid: plan.nsid,
            disk,
            geometry: source.geometry(),
            source,
            uuid,
            nguid,
            counters: counters.unwrap_or_else(|| Arc::new(NamespaceCounters::new(self.reactor.cores.len()))),
        }))
    }
}

/// Disks whose media are ready for other sizes. Dropped before [`Resizes::commit`], they are as they were.
struct Resizes(Vec<(Source, u64)>);

impl Resizes {
    fn prepare(sizes: Vec<(Source, u64)>) -> Result<Resizes, ResizeError> {
        let mut resizes = Resizes(Vec::with_capacity(sizes.len()));
        for (disk, bytes) in sizes {
            disk.prepare_resize(bytes)?;
            resizes.0.push((disk, bytes));
        }
        Ok(resizes)
    }

    fn commit(mut self) -> Result<(), ResizeError> {
        std::mem::take(&mut self.0).into_iter().try_for_each(|(disk, bytes)| disk.resize(bytes))
    }
}

impl Drop for Resizes {
    fn drop(&mut self) {
        self.0.iter().for_each(|(disk, _)| disk.cancel_resize());
    }
}

/// Log what is found on a device that is newly served, so that a wrong device is noticed. It is served all
/// the same: hosts put file systems and volumes on their disks.
fn say_what_it_holds(plan: &DiskPlan) {
    let (DiskKind::File { path, .. } | DiskKind::Ng { path, .. }) = &plan.kind else { return };
    let block = spindle_disk::ng::look_at(path).map_or_else(|_| path.clone(), |location| location.block_path);
    let Ok(PathState::Block(medium)) = machine::look_at(&block) else { return };
    let found = File::open(&block).and_then(|mut device| signature::find(&mut device, medium.bytes));
    let holds = found.unwrap_or_default().join(", ");
    if !holds.is_empty() {
        let path = block.display();
        tracing::info!(disk = plan.name, %path, holds, "the device is not empty; it is served as it is");
    }
}

/// The medium that is open has the name that the file gives. Its names are told, so that one can be given.
fn check_medium(plan: &DiskPlan, disk: &Source, is_new: bool) -> Result<(), SnapshotError> {
    let ids = disk.medium_ids();
    check_medium_id(&plan.name, plan.medium_id.as_deref(), &ids)?;
    if let Some(medium_id) = ids.first().filter(|_| is_new) {
        let is_held_to_it = plan.medium_id.is_some();
        tracing::info!(
            disk = plan.name,
            medium_id,
            is_held_to_it,
            "disk opened: the name of its medium, for medium_id"
        );
    }
    Ok(())
}

/// One of the names of a disk's medium is the one that is wanted, if any is.
pub(super) fn check_medium_id(disk: &str, wanted: Option<&str>, ids: &[String]) -> Result<(), SnapshotError> {
    let Some(wanted) = wanted.filter(|wanted| ids.iter().all(|id| id != wanted)) else { return Ok(()) };
    let allowed = medium_refusal("what is there", ids);
    Err(SnapshotError::Other(format!("disk {disk:?}: medium_id = {wanted:?}: {allowed}")))
}

/// `None`: it is absent.
fn open_drive(
    name: &str,
    at: PciAddress,
    namespace: u32,
    drives: &dyn DriveSource,
    opened: &[Opened],
) -> Result<Option<Source>, SnapshotError> {
    if !opened.iter().any(|opened| matches!(opened, Opened::Drive(address) if *address == at)) {
        return Ok(None);
    }
    let drive = drives.open(at)?;
    if let Some(facts) = drive.facts() {
        let (serial, model, queues) = (facts.serial, facts.model, facts.queue_pairs);
        tracing::info!(disk = name, address = %at, namespace, serial, model, queues, "drive opened");
    }
    Ok(Some(drive.disk(name, namespace)?))
}

/// Take the disk's memory, from a thread that ends with it.
fn populate(name: &str, disk: &Arc<RamDisk>) {
    let (name, disk) = (name.to_owned(), Arc::downgrade(disk));
    let told = name.clone();
    let run = move || {
        let mut next = Some(0);
        while let (Some(offset), Some(disk)) = (next, disk.upgrade()) {
            next = match disk.populate(offset) {
                Ok(None) => {
                    tracing::info!(disk = name, "all of its memory is taken");
                    None
                }
                Ok(next) => next,
                Err(error) => {
                    tracing::warn!(
                        disk = name,
                        %error,
                        "not all of its memory can be taken in advance: the rest is taken as it is written"
                    );
                    None
                }
            };
        }
    };
    if let Err(error) = std::thread::Builder::new().name("populate".to_owned()).spawn(run) {
        tracing::warn!(disk = told, %error, "no thread to take its memory in advance");
    }
}

/// `None`: its drive or its far target is absent.
fn open(
    plan: &DiskPlan,
    drives: &dyn DriveSource,
    opened: &[Opened],
) -> Result<Option<Source>, SnapshotError> {
    let (name, bytes, block_bytes) = (plan.name.as_str(), plan.bytes, plan.block_bytes);
    let disk: Source = match &plan.kind {
        DiskKind::Ram { pages, is_populated } => {
            let spec = RamSpec { bytes, block_bytes, pages: *pages };
            let disk = Arc::new(RamDisk::with_slack(name, spec, RamSpec::slack_bytes_default())?);
            if *is_populated {
                populate(name, &disk);
            }
            disk
        }
        DiskKind::Null => NullDisk::new(name, NullSpec { bytes, block_bytes })?,
        DiskKind::File { path, is_read_only, create, is_direct, is_polled } => {
            let create_bytes = is_to_be_made(path, *create).then_some(bytes);
            let (is_read_only, is_direct, is_polled) = (*is_read_only, *is_direct, *is_polled);
            let path = path.clone();
            let disk = FileDisk::new(
                name,
                &FileSpec { path, block_bytes, create_bytes, is_read_only, is_direct, is_polled },
            )?;
            for note in &disk.facts().notes {
                tracing::warn!(disk = name, "{note}");
            }
            disk
        }
        DiskKind::Nvme { address, namespace } => {
            return open_drive(name, *address, *namespace, drives, opened);
        }
        DiskKind::Remote { .. } => {
            let its = |opened: &Opened| match opened {
                Opened::Remote(disk) => (disk.name() == name).then(|| Arc::clone(disk)),
                Opened::Drive(_) => None,
            };
            return Ok(opened.iter().find_map(its));
        }
        DiskKind::Ng { path, is_read_only } => {
            let disk = NgDisk::new(name, &NgSpec { path: path.clone(), is_read_only: *is_read_only })?;
            let NgFacts { model, serial, is_polled, transfer_bytes_max, notes, .. } = disk.facts();
            let path = path.display();
            tracing::info!(disk = name, %path, serial, model, is_polled, transfer_bytes_max, "drive opened");
            for note in notes {
                tracing::warn!(disk = name, "{note}");
            }
            disk
        }
    };
    Ok(Some(disk))
}

/// As slow as the file makes it.
fn with_delay(plan: &DiskPlan, disk: Source) -> Result<Source, SnapshotError> {
    match &plan.delay {
        Some(delay) => Ok(DelayDisk::new(disk, delay)?),
        None => Ok(disk),
    }
}

/// With the cache that the file gives it, or ready for one.
fn with_cache(plan: &DiskPlan, disk: Source) -> Result<Source, SnapshotError> {
    // Commands to a drive of our own are the quickest: they do not go by way of a cache that may come.
    let can_come = !matches!(plan.kind, DiskKind::Nvme { .. });
    if !plan.kind.can_have_cache() || plan.cache.is_none() && !can_come {
        return Ok(disk);
    }
    Ok(CachedDisk::new(disk, plan.cache.as_ref())?)
}

/// True for a file that is missing and may be made, and for one that is there and empty.
fn is_to_be_made(path: &Path, create: bool) -> bool {
    match machine::look_at(path) {
        Ok(PathState::Missing { .. }) => create,
        Ok(PathState::Regular(medium)) => medium.bytes == 0,
        Ok(PathState::Block(_) | PathState::Other(_)) | Err(_) => false,
    }
}
