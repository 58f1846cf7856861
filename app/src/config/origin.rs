//! [`Origin`]: where a disk is that may be away, and that may take long to open: a drive of this machine, or
//! another target.
//!
//! Nothing here is retried, and the caller waits: `serve` does both, on threads.

use std::fmt;
use std::sync::Arc;

use spindle_disk::{DiskSource, OpenError};
use spindle_disk_remote::{RemoteDisk, RemoteFacts, RemoteSpec};
use spindle_nvme_pcie::{Drive, DriveError, Drives, PciAddress, Settings};

use super::machine::look_at_function;
use super::plan::{DiskKind, DiskPlan, Plan};
use super::snapshot::{SnapshotError, check_medium_id};

/// Drives by their addresses.
pub trait DriveSource: Send + Sync {
    /// There is a drive at the address that could be a disk.
    fn is_there(&self, address: PciAddress) -> bool;

    /// The drive, opened unless it is open already. Takes as long as the drive says that it takes (CAP.TO,
    /// up to minutes) where it does not become ready.
    fn open(&self, address: PciAddress) -> Result<Arc<Drive>, DriveError>;
}

/// The drives of this machine that are bound to vfio-pci.
pub struct DrivesHere;

impl DriveSource for DrivesHere {
    fn is_there(&self, address: PciAddress) -> bool {
        look_at_function(address) == Ok(true)
    }

    fn open(&self, address: PciAddress) -> Result<Arc<Drive>, DriveError> {
        Drives::here().open(address, Settings::default())
    }
}

/// Commands of one core with another target at once: what a queue of 1024 entries holds.
const REMOTE_DEPTH_MAX: u16 = 1023;

/// Where a disk is that may be away.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// A drive of this machine: its namespaces are one disk or several.
    Drive(PciAddress),
    /// Another target, for one disk.
    Remote(Box<RemotePlan>),
}

/// A disk of another target, with all that the file says of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemotePlan {
    pub name: String,
    /// What is connected to, and how.
    pub spec: RemoteSpec,
    pub medium_id: Option<String>,
}

/// What is open, for [`Plan::snapshot`].
pub enum Opened {
    /// The drive at this address. Its source gives it without waiting for as long as somebody holds it.
    Drive(PciAddress),
    /// The disk of another target.
    Remote(Arc<dyn DiskSource>),
}

/// What is open, and the drive that is to be held until a snapshot has its disks.
pub type Found = (Opened, Option<Arc<Drive>>);

/// Opens a disk of another target. Waits.
pub type OpenRemote = dyn Fn(&RemotePlan) -> Result<Arc<dyn DiskSource>, SnapshotError> + Send + Sync;

/// By what origins are opened.
#[derive(Clone)]
pub struct Origins {
    pub drives: Arc<dyn DriveSource>,
    pub remote: Arc<OpenRemote>,
}

impl Origins {
    /// Those of this machine, and what it reaches.
    pub fn here() -> Origins {
        Origins { drives: Arc::new(DrivesHere), remote: Arc::new(open_remote) }
    }

    /// False where a try to open it would be in vain.
    pub fn is_there(&self, origin: &Origin) -> bool {
        match origin {
            Origin::Drive(address) => self.drives.is_there(*address),
            // Nothing but a try tells.
            Origin::Remote(_) => true,
        }
    }

    /// Open it. A drive takes up to minutes to fail, another target up to a minute.
    pub fn open(&self, origin: &Origin) -> Result<Found, SnapshotError> {
        match origin {
            Origin::Drive(address) => {
                let drive = self.drives.open(*address)?;
                Ok((Opened::Drive(*address), Some(drive)))
            }
            Origin::Remote(plan) => Ok((Opened::Remote((self.remote)(plan)?), None)),
        }
    }
}

impl Origin {
    /// The error that it cannot be opened as something has failed here.
    pub fn failed(&self, why: &str) -> SnapshotError {
        match self {
            Origin::Drive(address) => {
                let (address, why) = (address.to_string(), why.to_owned());
                DriveError { address, why, is_absent: true }.into()
            }
            Origin::Remote(plan) => {
                let (disk, source) = (plan.name.clone(), std::io::Error::other(why.to_owned()));
                OpenError::System { disk, verb: "be opened".to_owned(), source }.into()
            }
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Drive(address) => write!(f, "{address}"),
            Origin::Remote(plan) => f.write_str(&plan.name),
        }
    }
}

impl Plan {
    /// Where a disk is, if it may be away.
    pub(super) fn origin(&self, disk: &DiskPlan) -> Option<Origin> {
        if let Some(address) = disk.address() {
            return Some(Origin::Drive(address));
        }
        let DiskKind::Remote { target, namespace, command_timeout, quiesce } = &disk.kind else {
            return None;
        };
        let depth = u16::try_from(self.limits.disk_commands).unwrap_or(u16::MAX);
        let spec = RemoteSpec {
            target: (**target).clone(),
            nsid: *namespace,
            cores: u16::try_from(self.reactor.cores.len()).unwrap_or(u16::MAX),
            depth: depth.clamp(1, REMOTE_DEPTH_MAX),
            command_timeout: *command_timeout,
            quiesce: *quiesce,
        };
        let (name, medium_id) = (disk.name.clone(), disk.medium_id.clone());
        Some(Origin::Remote(Box::new(RemotePlan { name, spec, medium_id })))
    }
}

/// Another medium than the one that is meant is told as any other failure: the far target may get the right
/// one, and whether it is there in time for the first snapshot must not decide whether serving begins.
fn open_remote(plan: &RemotePlan) -> Result<Arc<dyn DiskSource>, SnapshotError> {
    let disk = RemoteDisk::new(&plan.name, &plan.spec)?;
    let RemoteFacts { serial, model, transfer_bytes_max, medium_ids, .. } = disk.facts();
    check_medium_id(&plan.name, plan.medium_id.as_deref(), medium_ids)?;
    let (name, nsid) = (&plan.name, plan.spec.nsid);
    let address = format!("{}:{}", plan.spec.target.transport, plan.spec.target.address);
    tracing::info!(disk = name, address, nsid, serial, model, transfer_bytes_max, "far target connected");
    Ok(disk)
}
