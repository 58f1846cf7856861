//! Builds the [`Snapshot`] of a [`Plan`] for all cores: opens or creates disks, reuses the disks and counters
//! of the previous snapshot, resizes disks and changes their caches.
//!
//! A plan is applied completely or not at all, unless the commit of a prepared resize fails. Resizes are
//! prepared for all disks before the first is committed, and are the last step that can fail. After any other
//! failure only a file created for a new disk remains.
//!
//! An absent drive or far target is not a failure, nor is a file that was away at the start, so that one dead
//! disk does not stop the target from starting. This module does not wait for an origin: the caller passes
//! the origins that it has opened. Disks of other origins are left out with their namespaces.
//! [`Plan::absent`] lists those origins, and a later [`Plan::snapshot`] adds their disks.

use std::cell::LazyCell;
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use nvme_spec::nqn::Nqn;
use spindle_nvme_pcie::{DriveError, PciAddress};
use spindle_reactor::clock::Clock;
use spindle_target::counters::NamespaceCounters;
use spindle_target::discovery::DiscoveryLogs;
use spindle_target::snapshot::{Listener, Namespace, Referral, Snapshot, Subsystem};
use spindle_target_card::{Cluster, START_WAIT};
use spindle_target_disk::file::{FileDisk, FileSpec};
use spindle_target_disk::ng::{NgDisk, NgFacts, NgSpec};
use spindle_target_disk::{
    CacheChange, CachedDisk, ClusterDisk, DelayDisk, NullDisk, NullSpec, OpenError, RamDisk, RamSpec,
    ResizeError, signature,
};

use super::disk_table::{DiskTable, Source};
use super::machine::{self, PathState};
use super::origin::{DriveSource, Opened, Origin};
use super::path_probe::within;
use super::plan::{
    ClusterPlan, DiskKind, DiskPlan, ListenerPlan, NamespacePlan, Plan, SubsystemPlan, by_name,
};
use super::validate::disks::medium_id_error;
use crate::identity::{self, Data};

/// Longest wait of a change for a new disk's file: above the wait for a former process's lock, 10 s.
const OPEN_MAX: Duration = Duration::from_secs(12);

#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error(transparent)]
    Drive(#[from] DriveError),
    #[error(transparent)]
    Resize(#[from] ResizeError),
    /// Any other failure; the text is the complete message.
    #[error("{0}")]
    Other(String),
}

impl Plan {
    /// Builds the snapshot that replaces `previous`; [`Plan::changes_from`] must contain no refused change.
    /// Disks of drives and far targets are those of `previous` and of `opened`; `drives` returns the handle
    /// of an opened drive.
    ///
    /// # Errors
    /// A disk cannot be opened, resized or cached, or has another medium than `medium_id`; no PORTID is free.
    pub fn snapshot(
        &self,
        previous: Option<&Snapshot>,
        drives: &dyn DriveSource,
        opened: &[Opened],
    ) -> Result<Arc<Snapshot>, SnapshotError> {
        self.snapshot_and_persist(previous, drives, opened, &mut || Ok(()))
    }

    /// As [`Plan::snapshot`]. `persist` writes the configuration file, after all preparations and before the
    /// first disk is resized: a file disk larger than its configured `size` would prevent the next start.
    ///
    /// # Errors
    /// Those of [`Plan::snapshot`], and a failure of `persist`.
    pub fn snapshot_and_persist(
        &self,
        previous: Option<&Snapshot>,
        drives: &dyn DriveSource,
        opened: &[Opened],
        persist: &mut dyn FnMut() -> io::Result<()>,
    ) -> Result<Arc<Snapshot>, SnapshotError> {
        let listeners = self.listeners_after(previous)?;
        let plans = self.disks_by_name();
        let disks = self.open_disks(previous, &plans, drives, opened)?;
        let resizes = PreparedResize::prepare_all(size_changes(&disks, &plans))?;
        let caches = cache_changes(&disks, &plans)?;
        persist().map_err(|error| {
            SnapshotError::Other(format!("the configuration's file cannot be replaced: {error}"))
        })?;
        resizes.into_iter().try_for_each(PreparedResize::commit)?;
        caches.into_iter().for_each(|(disk, change)| disk.set_cache(change));
        let subsystems =
            self.subsystems.iter().map(|plan| self.subsystem(plan, &disks, &listeners, previous)).collect();
        let referrals = self.referrals.iter().zip(1..).map(|(referral, port_id)| Referral {
            transport: referral.transport,
            address: referral.address,
            port_id,
        });
        let (disks, slots) = disks.into_parts();
        Ok(Arc::new(Snapshot {
            generation: previous.map_or(1, |previous| previous.generation + 1),
            disks,
            slots,
            listeners,
            subsystems,
            referrals: referrals.collect(),
            discovery_logs: DiscoveryLogs::default(),
            limits: self.limits.controller.clone(),
        }))
    }

    /// Checks the disks of `snapshot` whose `medium_id` differs from `former`; all of them without `former`.
    ///
    /// # Errors
    /// A disk has another medium than its `medium_id`.
    pub fn check_media(&self, former: Option<&Plan>, snapshot: &Snapshot) -> Result<(), SnapshotError> {
        let known = by_name(former.map_or(&[], |former| &former.disks));
        let is_checked = |plan: &&Arc<DiskPlan>| {
            let known = known.get(plan.name.as_str());
            plan.medium_id.is_some() && known.is_none_or(|known| known.medium_id != plan.medium_id)
        };
        for plan in self.disks.iter().filter(is_checked) {
            let disk = snapshot.disks.iter().flatten().find(|disk| disk.name() == plan.name);
            let Some(disk) = disk else { continue };
            check_medium_id(&plan.name, plan.medium_id.as_deref(), &disk.medium_ids())?;
        }
        Ok(())
    }

    /// Returns the listeners of `previous`, followed by the new listeners of this plan. Connections refer to
    /// a listener by its index, so one that this plan lacks stays in the list, with `is_open` false.
    ///
    /// # Errors
    /// All 65535 port identifiers are used.
    pub fn listeners_after(&self, previous: Option<&Snapshot>) -> Result<Vec<Listener>, SnapshotError> {
        let mut listeners = previous.map_or_else(Vec::new, |previous| previous.listeners.clone());
        listeners.iter_mut().for_each(|listener| listener.is_open = false);
        for plan in &self.listeners {
            if let Some(known) = listeners.iter_mut().find(|known| known.endpoint() == plan.endpoint()) {
                known.is_open = true;
                known.in_capsule_bytes = plan.in_capsule_bytes;
                continue;
            }
            // PORTIDs are never reused while the process runs.
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

    /// Returns the origins of this plan's disks that are not open in `snapshot`, without duplicates.
    pub fn absent(&self, snapshot: Option<&Snapshot>) -> Vec<Origin> {
        let disks = snapshot.map_or(&[][..], |snapshot| &snapshot.disks);
        let open =
            LazyCell::new(|| -> HashSet<_> { disks.iter().flatten().map(|disk| disk.name()).collect() });
        let mut absent = Vec::new();
        let has_origin = |plan: &&Arc<DiskPlan>| !matches!(plan.kind, DiskKind::Ram { .. } | DiskKind::Null);
        for plan in self.disks.iter().filter(has_origin) {
            let origin = if open.contains(plan.name.as_str()) { None } else { self.origin(plan) };
            absent.extend(origin.filter(|origin| !absent.contains(origin)));
        }
        absent
    }

    /// Returns the disks: those of `previous` in their slots, then new disks, which it opens. A disk whose
    /// origin is not open is left out.
    fn open_disks(
        &self,
        previous: Option<&Snapshot>,
        plans: &HashMap<&str, &Arc<DiskPlan>>,
        drives: &dyn DriveSource,
        opened: &[Opened],
    ) -> Result<DiskTable, SnapshotError> {
        let mut disks = DiskTable::after(previous, |name| plans.contains_key(name));
        let new: Vec<_> = self.disks.iter().filter(|plan| disks.find(&plan.name).is_none()).collect();
        for plan in new {
            let Some(disk) = open_disk(plan, drives, opened)? else { continue };
            let disk = with_cluster(plan, with_cache(plan, with_delay(plan, disk)?)?);
            check_medium(plan, &disk)?;
            disks.add(disk);
        }
        Ok(disks)
    }

    fn subsystem(
        &self,
        plan: &SubsystemPlan,
        disks: &DiskTable,
        listeners: &[Listener],
        previous: Option<&Snapshot>,
    ) -> Arc<Subsystem> {
        let before = previous.and_then(|previous| previous.subsystem(&plan.nqn));
        let highest = plan.namespaces.last().map_or(0, |namespace| namespace.nsid);
        let nqn = &plan.nqn;
        let mut plans = plan.namespaces.iter().peekable();
        let namespaces = (1..=highest).map(|nsid| {
            let plan = plans.next_if(|namespace| namespace.nsid == nsid)?;
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
            optimistic_hosts: plan.optimistic_hosts.clone(),
            cntlid_range: plan.cntlid_range,
            io_queues_max: self.limits.io_queues_max,
            listeners: offered.map(|(index, _)| index).collect(),
            namespaces: namespaces.collect(),
        })
    }

    /// Builds the namespace. It has the counters of `before` if disk, UUID and NGUID are equal. `None`: the
    /// disk is absent.
    fn namespace(
        &self,
        nqn: &Nqn,
        plan: &NamespacePlan,
        disks: &DiskTable,
        before: Option<&Arc<Namespace>>,
    ) -> Option<Arc<Namespace>> {
        let (source, disk, number) = disks.find(&plan.disk)?;
        let geometry = source.geometry();
        let is_identity_derived = plan.uuid.is_none() && plan.nguid.is_none();
        let before = before.filter(|before| Arc::ptr_eq(&before.source, source));
        let is_kept = |before: &&Arc<Namespace>| {
            is_identity_derived && before.is_identity_derived
                || plan.uuid == Some(before.uuid) && plan.nguid == Some(before.nguid)
        };
        // An open disk keeps its name, number and far identity.
        if let Some(kept) = before.filter(is_kept)
            && (kept.disk, kept.geometry) == (disk, geometry)
        {
            return Some(Arc::clone(kept));
        }
        let (life, far) = (identity::life(number), source.identity_seed());
        let data = match &far {
            Some(far) => Data::Far(far),
            None => Data::Living(&plan.disk, &life),
        };
        let uuid = plan.uuid.unwrap_or_else(|| identity::uuid(nqn, plan.nsid, data));
        let nguid = plan.nguid.unwrap_or_else(|| identity::nguid(nqn, plan.nsid, data));
        let before = before.filter(|before| before.uuid == uuid && before.nguid == nguid);
        let counters = before.map(|before| Arc::clone(&before.counters));
        Some(Arc::new(Namespace {
            nsid: plan.nsid,
            disk,
            geometry,
            source: Arc::clone(source),
            uuid,
            nguid,
            is_identity_derived,
            counters: counters.unwrap_or_else(|| Arc::new(NamespaceCounters::new(self.reactor.cores.len()))),
        }))
    }
}

/// Returns the open disks whose size differs from the plan, with the planned size in bytes. Leaves out
/// `nvme`, `ng` and `remote` disks, whose size is that of their namespace.
fn size_changes(disks: &DiskTable, plans: &HashMap<&str, &Arc<DiskPlan>>) -> Vec<(Source, u64)> {
    let size = |disk: &Source| {
        let plan = plans.get(disk.name())?;
        let is_other = !plan.kind.has_drive_geometry() && disk.geometry().bytes() != plan.bytes;
        is_other.then(|| (Arc::clone(disk), plan.bytes))
    };
    disks.disks().filter_map(size).collect()
}

/// Prepares the changes of the caches that differ from the plan.
fn cache_changes(
    disks: &DiskTable,
    plans: &HashMap<&str, &Arc<DiskPlan>>,
) -> Result<Vec<(Source, CacheChange)>, SnapshotError> {
    let mut changes = Vec::new();
    for disk in disks.disks() {
        let Some(plan) = plans.get(disk.name()) else { continue };
        changes.extend(disk.prepare_cache(plan.cache.as_ref())?.map(|change| (Arc::clone(disk), change)));
    }
    Ok(changes)
}

/// A prepared resize of a disk, which is cancelled when it is dropped without [`PreparedResize::commit`].
struct PreparedResize {
    disk: Source,
    /// `None` after the commit.
    bytes: Option<u64>,
}

impl PreparedResize {
    /// The growth of a file is synced, without a limit of time: one that ended after its change was refused
    /// would leave a file that is longer than its configured `size`, or cut what another has written there.
    fn prepare_all(sizes: Vec<(Source, u64)>) -> Result<Vec<PreparedResize>, ResizeError> {
        let prepare = |(disk, bytes): (Source, u64)| {
            disk.prepare_resize(bytes).map(|()| PreparedResize { disk, bytes: Some(bytes) })
        };
        sizes.into_iter().map(prepare).collect()
    }

    fn commit(mut self) -> Result<(), ResizeError> {
        self.bytes.take().map_or(Ok(()), |bytes| self.disk.resize(bytes))
    }
}

impl Drop for PreparedResize {
    fn drop(&mut self) {
        if self.bytes.is_some() {
            self.disk.cancel_resize();
        }
    }
}

/// Logs the signatures on the block device of a new `file` or `ng` disk, so that the operator notices a wrong
/// device. The device is served anyway: its signatures normally come from the hosts that use it.
fn log_signatures(plan: &DiskPlan) {
    let (DiskKind::File { path, .. } | DiskKind::Ng { path, .. }) = &plan.kind else { return };
    let block =
        spindle_target_disk::ng::look_at(path).map_or_else(|_| path.clone(), |location| location.block_path);
    let Ok(PathState::Block(medium)) = machine::path_state(&block) else { return };
    let found = File::open(&block).and_then(|mut device| signature::find(&mut device, medium.bytes));
    let holds = found.unwrap_or_default().join(", ");
    if !holds.is_empty() {
        let path = block.display();
        tracing::info!(disk = plan.name, %path, holds, "the device is not empty; it is served as it is");
    }
}

/// Checks a new disk against `medium_id` of the plan. Logs a name for `medium_id`.
fn check_medium(plan: &DiskPlan, disk: &Source) -> Result<(), SnapshotError> {
    let ids = disk.medium_ids();
    check_medium_id(&plan.name, plan.medium_id.as_deref(), &ids)?;
    if let Some(medium_id) = ids.first() {
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

/// Checks that `ids`, the names of a disk's medium, contain `wanted`; `None` accepts any medium.
pub(super) fn check_medium_id(disk: &str, wanted: Option<&str>, ids: &[String]) -> Result<(), SnapshotError> {
    let Some(wanted) = wanted.filter(|wanted| ids.iter().all(|id| id != wanted)) else { return Ok(()) };
    let allowed = medium_id_error("what is there", ids);
    Err(SnapshotError::Other(format!("disk {disk:?}: medium_id = {wanted:?}: {allowed}")))
}

/// Opens a namespace of an NVMe drive. `None`: the drive is not in `opened`.
fn open_drive(
    name: &str,
    address: PciAddress,
    namespace: u32,
    drives: &dyn DriveSource,
    opened: &[Opened],
) -> Result<Option<Source>, SnapshotError> {
    if !opened.iter().any(|opened| matches!(opened, Opened::Drive(other) if *other == address)) {
        return Ok(None);
    }
    let drive = drives.open(address)?;
    if let Some(facts) = drive.facts() {
        let (serial, model, queues) = (facts.serial, facts.model, facts.queue_pairs);
        tracing::info!(disk = name, %address, namespace, serial, model, queues, "drive opened");
    }
    Ok(Some(drive.disk(name, namespace)?))
}

/// Allocates the RAM disk's memory on a thread. The thread ends when all memory is allocated, an allocation
/// fails, or the disk is dropped.
fn populate(name: &str, disk: &Arc<RamDisk>) {
    let (name, disk) = (name.to_owned(), Arc::downgrade(disk));
    let disk_name = name.clone();
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
        tracing::warn!(disk = disk_name, %error, "no thread to take its memory in advance");
    }
}

/// Opens or creates the disk, without the delay and cache layers. `None`: its drive, far target, or file that
/// was away is not in `opened`.
fn open_disk(
    plan: &DiskPlan,
    drives: &dyn DriveSource,
    opened: &[Opened],
) -> Result<Option<Source>, SnapshotError> {
    let (name, bytes, block_bytes) = (plan.name.as_str(), plan.bytes, plan.block_bytes);
    let by_name = || {
        opened.iter().find_map(|opened| match opened {
            Opened::Disk(disk) => (disk.name() == name).then(|| Arc::clone(disk)),
            Opened::Drive(_) => None,
        })
    };
    let disk: Source = match &plan.kind {
        DiskKind::Ram { pages, is_populated, has_seals } => {
            let spec = RamSpec { bytes, block_bytes, pages: *pages, has_seals: *has_seals };
            let disk = Arc::new(RamDisk::with_slack(name, spec, RamSpec::slack_bytes_default())?);
            if *is_populated {
                populate(name, &disk);
            }
            disk
        }
        DiskKind::Null => NullDisk::new(name, NullSpec { bytes, block_bytes })?,
        DiskKind::File { .. } | DiskKind::Ng { .. } => match by_name() {
            Some(disk) => disk,
            None if plan.medium.is_away => return Ok(None),
            None => open_in_time(plan)?,
        },
        DiskKind::Nvme { address, namespace } => {
            return open_drive(name, *address, *namespace, drives, opened);
        }
        DiskKind::Remote { .. } => return Ok(by_name()),
    };
    Ok(Some(disk))
}

/// As [`open_path`], for the caller that handles signals and changes.
fn open_in_time(plan: &DiskPlan) -> Result<Source, SnapshotError> {
    let (its, path) = (plan.clone(), plan.kind.path().unwrap_or(Path::new("")));
    let opened = within(OPEN_MAX, path, move || open_path(&its));
    let action = format!("open {}", path.display());
    opened.unwrap_or_else(|error| Err(OpenError::system(&plan.name, action, error).into()))
}

/// Opens or creates the file or device of a `file` or `ng` disk. Blocks while its file system does.
pub(super) fn open_path(plan: &DiskPlan) -> Result<Source, SnapshotError> {
    let (name, bytes, block_bytes) = (plan.name.as_str(), plan.bytes, plan.block_bytes);
    let disk: Source = match &plan.kind {
        DiskKind::File { path, is_read_only, create, is_direct, is_polled } => {
            let create_bytes = needs_initial_size(path, *create).then_some(bytes);
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
        DiskKind::Ram { .. } | DiskKind::Null | DiskKind::Nvme { .. } | DiskKind::Remote { .. } => {
            return Err(SnapshotError::Other(format!("disk {name:?} has no path")));
        }
    };
    log_signatures(plan);
    Ok(disk)
}

/// Puts the delay layer of `[disk.delay]`, if there is one, in front of the disk.
fn with_delay(plan: &DiskPlan, disk: Source) -> Result<Source, SnapshotError> {
    match &plan.delay {
        Some(delay) => Ok(DelayDisk::new(disk, delay)?),
        None => Ok(disk),
    }
}

/// Puts a cache layer in front of a disk that can have a cache, also without `[disk.cache]`, so that a reload
/// can add it. No layer for `nvme` without `[disk.cache]`.
fn with_cache(plan: &DiskPlan, disk: Source) -> Result<Source, SnapshotError> {
    // A cache layer would add latency to an `nvme` disk, whose latency is the lowest.
    let can_get_cache = !matches!(plan.kind, DiskKind::Nvme { .. });
    if !plan.kind.can_have_cache() || plan.cache.is_none() && !can_get_cache {
        return Ok(disk);
    }
    Ok(CachedDisk::new(disk, plan.cache.as_ref())?)
}

/// Puts the cluster layer of `[disk.cluster]`, if there is one, in front of a disk of this target.
fn with_cluster(plan: &DiskPlan, disk: Source) -> Source {
    match &plan.cluster {
        Some(ClusterPlan { agents }) if !matches!(plan.kind, DiskKind::Remote { .. }) => {
            let cluster = Cluster::new(disk.geometry().bytes(), agents.clone(), Clock::now() + START_WAIT);
            ClusterDisk::new(disk, cluster)
        }
        Some(_) | None => disk,
    }
}

/// True for a file that must be set to its configured size: a missing file with `create`, or an empty file.
fn needs_initial_size(path: &Path, create: bool) -> bool {
    match machine::path_state(path) {
        Ok(PathState::Missing { .. }) => create,
        Ok(PathState::Regular(medium)) => medium.bytes == 0,
        Ok(PathState::Block(_) | PathState::Other(_)) | Err(_) => false,
    }
}
