//! [`Origin`]: the NVMe drive, far namespace, file or device of a disk. It can be absent, and a drive can
//! take minutes to open.
//!
//! Opening blocks and is not retried here; `serve` opens each origin on a separate thread and retries.

use std::fmt;
use std::sync::Arc;

use spindle_nvme_pcie::{Drive, DriveError, Drives, PciAddress, Settings};
use spindle_target_disk::{Disk, OpenError};
use spindle_target_remote::{RemoteDisk, RemoteFacts, RemoteSpec};

use super::machine::probe_nvme_function;
use super::plan::{DiskKind, DiskPlan, Plan};
use super::snapshot::{SnapshotError, check_medium_id, open_path};

/// Opens NVMe drives by PCI address; tests replace it.
pub trait DriveSource: Send + Sync {
    /// Whether an NVMe drive that is bound to vfio-pci is at the address.
    fn is_present(&self, address: PciAddress) -> bool;

    /// Opens the drive, or returns the handle of a drive that is open. Blocks up to CAP.TO (minutes) if the
    /// drive does not become ready.
    fn open(&self, address: PciAddress) -> Result<Arc<Drive>, DriveError>;
}

/// The drives of this machine that are bound to vfio-pci.
pub struct LocalDrives;

impl DriveSource for LocalDrives {
    fn is_present(&self, address: PciAddress) -> bool {
        probe_nvme_function(address) == Ok(true)
    }

    fn open(&self, address: PciAddress) -> Result<Arc<Drive>, DriveError> {
        Drives::here().open(address, Settings::default())
    }
}

/// Most commands in flight of one core on one remote disk. A Spindle target allows queues of at most 1024
/// entries (`limits.queue_entries`), and one entry stays empty.
const REMOTE_DEPTH_MAX: u16 = 1023;

/// What a disk is on, which can be absent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// An NVMe drive; each of its namespaces can be a disk.
    Drive(PciAddress),
    /// A namespace of a far target, for one disk.
    Remote(Box<RemotePlan>),
    /// The file or device of a `file` or `ng` disk.
    Path(Box<DiskPlan>),
}

/// Settings of a `remote` disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemotePlan {
    pub name: String,
    pub spec: RemoteSpec,
    pub medium_id: Option<String>,
}

/// An origin that was opened, for [`Plan::snapshot`].
pub enum Opened {
    /// The drive at this address. [`DriveSource::open`] does not block while a handle of it exists.
    Drive(PciAddress),
    /// The disk of a far target, file or device.
    Disk(Arc<dyn Disk>),
}

/// An opened origin, and the handle that keeps its drive open until a snapshot contains the drive's disks.
pub type OpenedOrigin = (Opened, Option<Arc<Drive>>);

/// Connects to a far target and opens its namespace. Blocks.
pub type OpenRemote = dyn Fn(&RemotePlan) -> Result<Arc<dyn Disk>, SnapshotError> + Send + Sync;

/// Functions that open origins; tests replace them.
#[derive(Clone)]
pub struct Origins {
    pub drives: Arc<dyn DriveSource>,
    pub remote: Arc<OpenRemote>,
}

impl Origins {
    pub fn here() -> Origins {
        Origins { drives: Arc::new(LocalDrives), remote: Arc::new(open_remote) }
    }

    /// False if the drive is absent. Always true for other origins, which only an attempt can probe.
    pub fn is_present(&self, origin: &Origin) -> bool {
        match origin {
            Origin::Drive(address) => self.drives.is_present(*address),
            Origin::Remote(_) | Origin::Path(_) => true,
        }
    }

    /// Opens the origin. Blocks for minutes if a drive fails, and up to a minute for a far target.
    pub fn open(&self, origin: &Origin) -> Result<OpenedOrigin, SnapshotError> {
        match origin {
            Origin::Drive(address) => {
                let drive = self.drives.open(*address)?;
                Ok((Opened::Drive(*address), Some(drive)))
            }
            Origin::Remote(plan) => Ok((Opened::Disk((self.remote)(plan)?), None)),
            Origin::Path(plan) => Ok((Opened::Disk(open_path(plan)?), None)),
        }
    }
}

impl Origin {
    /// Returns the error of an attempt that failed in this process, for example by a panic of its thread.
    pub fn failed(&self, why: &str) -> SnapshotError {
        match self {
            Origin::Drive(address) => {
                let (address, why) = (address.to_string(), why.to_owned());
                DriveError { address, why, is_absent: true }.into()
            }
            Origin::Remote(_) | Origin::Path(_) => {
                let (disk, source) = (self.to_string(), std::io::Error::other(why.to_owned()));
                OpenError::System { disk, verb: "be opened".to_owned(), source }.into()
            }
        }
    }

    /// Returns the name of the disk, of those that are of one disk.
    pub fn disk(&self) -> Option<&str> {
        match self {
            Origin::Drive(_) => None,
            Origin::Remote(plan) => Some(&plan.name),
            Origin::Path(plan) => Some(&plan.name),
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Drive(address) => write!(f, "{address}"),
            Origin::Remote(plan) => f.write_str(&plan.name),
            Origin::Path(plan) => f.write_str(&plan.name),
        }
    }
}

impl Plan {
    pub(super) fn remote_depth(&self) -> u16 {
        u16::try_from(self.limits.disk_commands).unwrap_or(u16::MAX).clamp(1, REMOTE_DEPTH_MAX)
    }

    /// Returns the origin of a disk; `None` for kinds that have none.
    pub(super) fn origin(&self, disk: &DiskPlan) -> Option<Origin> {
        if let Some(address) = disk.address() {
            return Some(Origin::Drive(address));
        }
        if let DiskKind::File { .. } | DiskKind::Ng { .. } = &disk.kind {
            return Some(Origin::Path(Box::new(disk.clone())));
        }
        let DiskKind::Remote { target, namespace, command_timeout, quiesce, is_optimistic, optimistic } =
            &disk.kind
        else {
            return None;
        };
        let spec = RemoteSpec {
            target: (**target).clone(),
            nsid: *namespace,
            cores: u16::try_from(self.reactor.cores.len()).unwrap_or(u16::MAX),
            depth: self.remote_depth(),
            command_timeout: *command_timeout,
            quiesce: *quiesce,
            optimistic: is_optimistic.then(|| optimistic.clone()),
            is_clustered: disk.cluster.is_some(),
        };
        let (name, medium_id) = (disk.name.clone(), disk.medium_id.clone());
        Some(Origin::Remote(Box::new(RemotePlan { name, spec, medium_id })))
    }
}

/// Connects to the far target and checks `medium_id`. Another medium is an error like any other and is
/// retried. So the target starts whether the far target answers before or after the first snapshot.
fn open_remote(plan: &RemotePlan) -> Result<Arc<dyn Disk>, SnapshotError> {
    let disk = RemoteDisk::new(&plan.name, &plan.spec)?;
    let RemoteFacts { serial, model, transfer_bytes_max, medium_ids, .. } = disk.facts();
    check_medium_id(&plan.name, plan.medium_id.as_deref(), medium_ids)?;
    let (name, nsid) = (&plan.name, plan.spec.nsid);
    let address = format!("{}:{}", plan.spec.target.transport, plan.spec.target.address);
    tracing::info!(disk = name, address, nsid, serial, model, transfer_bytes_max, "far target connected");
    Ok(disk)
}
