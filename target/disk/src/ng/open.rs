//! Opens a namespace: checks exclusive use, reads Identify data and computes the limits. Also the settings
//! and properties of an `ng` disk.

use std::fs::File;
use std::io;
use std::path::PathBuf;

use nvme_spec::identify::{Dlfeat, IdentifyController, IdentifyNamespace, Nsattr, Oncs, Vwc};
use nvme_spec::zerocopy::FromBytes;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use spindle_reactor::uring::PassError;
use spindle_reactor::uring::admin::{self, Namespace};

use super::place::{NgBlockDevice, look_at};
use crate::OpenError;
use crate::lock::{Busy, LOCK_WAIT, check_exports, lock};
use crate::medium_id;
use crate::shape::{BLOCK_BYTES_ALLOWED, checked_blocks};

/// Bytes of a memory page in the PRP lists of a drive.
const PAGE_BYTES: u64 = 4096;
/// Most blocks of one command: NLB has 16 bits and is zero-based (NVM Command Set 1.0 section 3.2).
const COMMAND_BLOCKS_MAX: u64 = 1 << 16;

/// Settings of an `ng` disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NgSpec {
    /// Path of the generic device, such as `/dev/ng0n1`.
    pub path: PathBuf,
    /// The disk is read-only. Several read-only disks may share a namespace.
    pub is_read_only: bool,
}

impl NgSpec {
    /// Returns the settings of a writable disk on the namespace at `path`.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> NgSpec {
        NgSpec { path: path.into(), is_read_only: false }
    }
}

/// Properties of a namespace and its drive, for the log.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NgFacts {
    /// Model number (MN) of the drive.
    pub model: String,
    /// Serial number (SN) of the drive.
    pub serial: String,
    /// Completions are polled.
    pub is_polled: bool,
    /// Most bytes of one command. Larger transfers are split into pieces.
    pub transfer_bytes_max: u64,
    /// Identifiers of the namespace, the most reliable first: see [`medium_id`].
    pub medium_ids: Vec<String>,
    /// Hints for better performance, one sentence each.
    pub notes: Vec<String>,
}

/// Size, properties and transfer limits of a namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Limits {
    pub(super) block_bytes: u32,
    pub(super) block_count: u64,
    pub(super) is_read_only: bool,
    pub(super) has_volatile_cache: bool,
    /// Write Zeroes with DEAC frees space.
    pub(super) can_deallocate: bool,
    /// Most bytes of one Read or Write command, a multiple of the block size.
    pub(super) transfer_bytes_max: u64,
    /// Most bytes of one Write Zeroes command, a multiple of the block size; 0: not supported.
    pub(super) zero_bytes_max: u64,
    pub(super) is_polled: bool,
}

/// An open and locked namespace.
pub(super) struct Opened {
    pub(super) device: File,
    pub(super) block_device: Option<File>,
    pub(super) namespace: Namespace,
    pub(super) limits: Limits,
    pub(super) facts: NgFacts,
}

/// Opens and locks the namespace of `spec`. The lock is retried for [`LOCK_WAIT`]: the kernel keeps the
/// lock of a dead process until the I/O in flight of its rings has ended.
pub(super) fn open(disk: &str, spec: &NgSpec) -> Result<Opened, OpenError> {
    let path = spec.path.display();
    let system = |verb: String| move |source: io::Error| OpenError::system(disk, verb, source);
    let place = look_at(&spec.path).map_err(|error| {
        if error.kind() == io::ErrorKind::InvalidInput {
            let allowed = "must be the generic device of an NVMe namespace, as /dev/ng0n1";
            return OpenError::setting(disk, "ng", &path, allowed);
        }
        system(format!("stat {path}"))(error)
    })?;
    if !spec.is_read_only {
        check_exports(disk, "ng", &spec.path, &place.block_path)?;
    }
    let busy = Busy::new(disk, &spec.path, LOCK_WAIT);
    // The kernel rejects write commands unless the device is open for writing.
    let access = if spec.is_read_only { OFlags::RDONLY } else { OFlags::RDWR };
    let device = rustix::fs::open(&spec.path, access | OFlags::CLOEXEC, Mode::empty());
    let device = device.map(File::from).map_err(|error| system(format!("open {path}"))(error.into()))?;
    lock(&device, spec.is_read_only, &busy).map_err(system(format!("lock {path}")))?;
    let block_device = open_exclusive(&place, spec.is_read_only, &busy).map_err(|error| {
        system(format!("hold {}, the same namespace,", place.block_path.display()))(error.into())
    })?;
    let ask = |verb: &str| system(format!("{verb} {path}"));
    let namespace =
        Namespace::of(&device).map_err(|error| ask("identify the namespace of")(to_io_error(error)))?;
    let controller = admin::identify_controller(&device)
        .map_err(|error| ask("identify the drive of")(to_io_error(error)))?;
    let (Ok(id), Ok(controller)) = (
        IdentifyNamespace::read_from_bytes(namespace.identify()),
        IdentifyController::read_from_bytes(controller.as_slice()),
    ) else {
        return Err(ask("identify")(io::ErrorKind::InvalidData.into()));
    };
    let limits = Limits::of(disk, spec, &place, &id, &controller)?;
    let mut facts = facts(&place, &limits, &controller, &spec.path.display().to_string());
    // The kernel's identifiers are first, as in `medium_id::at`. Older kernels report fewer identifiers.
    facts.medium_ids = medium_id::of_block(place.block_number);
    for name in medium_id::of_nvme(&facts.serial, namespace.id(), id.nguid, id.eui64) {
        if !facts.medium_ids.contains(&name) {
            facts.medium_ids.push(name);
        }
    }
    Ok(Opened { device, block_device, namespace, limits, facts })
}

fn to_io_error(error: PassError) -> io::Error {
    match error {
        PassError::Status(_) => io::Error::other(error.to_string()),
        PassError::System(error) => error,
    }
}

/// Opens the block device of the same namespace exclusively. Fails with EBUSY at the deadline of `busy` while
/// the device is mounted, and prevents a later mount. Returns `None` for read-only disks, which share the
/// device. Opens for reading: udev probes a disk after the close of a writable descriptor.
fn open_exclusive(place: &NgBlockDevice, is_read_only: bool, busy: &Busy<'_>) -> Result<Option<File>, Errno> {
    if is_read_only {
        return Ok(None);
    }
    let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
    let opened = busy.retry(|| rustix::fs::open(&place.block_path, flags, Mode::empty()))?;
    Ok(Some(File::from(opened)))
}

impl Limits {
    /// Returns the limits from Identify data, reduced to the limits of the kernel's driver. Refuses zoned
    /// namespaces and block sizes other than 512 and 4096 bytes.
    pub(super) fn of(
        disk: &str,
        spec: &NgSpec,
        place: &NgBlockDevice,
        id: &IdentifyNamespace,
        controller: &IdentifyController,
    ) -> Result<Limits, OpenError> {
        let block_bytes = id.block_bytes().unwrap_or(0);
        if !BLOCK_BYTES_ALLOWED.contains(&block_bytes) {
            let allowed = "must be 512 or 4096: format the namespace so (nvme format -b)";
            return Err(OpenError::setting(disk, "block size of the namespace", block_bytes, allowed));
        }
        if place.is_zoned {
            return Err(OpenError::setting(disk, "namespace", "zoned", "must be one of the NVM command set"));
        }
        let bytes = id.nsze.get().saturating_mul(u64::from(block_bytes));
        let block_count = checked_blocks(disk, bytes, block_bytes)?;
        let dlfeat = Dlfeat::from_bits(id.dlfeat);
        let can_zero = Oncs::from_bits(controller.oncs.get()).write_zeroes();
        let block = u64::from(block_bytes);
        let whole = |bytes: u64| bytes.min(COMMAND_BLOCKS_MAX * block) / block * block;
        // Scattered memory has one segment per page, and one more if it begins inside a page.
        let scattered = place.segments_max.saturating_sub(1).max(1).saturating_mul(PAGE_BYTES);
        let transfer = place.transfer_bytes_max.min(scattered) / PAGE_BYTES * PAGE_BYTES;
        let zero_bytes_max = if can_zero { whole(place.zero_bytes_max) } else { 0 };
        Ok(Limits {
            block_bytes,
            block_count,
            is_read_only: spec.is_read_only || Nsattr::from_bits(id.nsattr).write_protected(),
            has_volatile_cache: Vwc::from_bits(controller.vwc).present(),
            can_deallocate: zero_bytes_max > 0 && dlfeat.deallocate_in_write_zeroes(),
            transfer_bytes_max: whole(transfer.max(PAGE_BYTES)),
            zero_bytes_max,
            is_polled: place.can_poll,
        })
    }
}

fn facts(place: &NgBlockDevice, limits: &Limits, controller: &IdentifyController, path: &str) -> NgFacts {
    let mut notes = Vec::new();
    if !place.can_poll {
        notes.push(format!(
            "{path} completes by interrupts, because its drive has no queues to poll (nvme.poll_queues=N on \
             the kernel's command line gives it N), or the kernel is older than 6.1"
        ));
    }
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    NgFacts {
        model: text(&controller.mn),
        serial: text(&controller.sn),
        is_polled: limits.is_polled,
        transfer_bytes_max: limits.transfer_bytes_max,
        medium_ids: Vec::new(),
        notes,
    }
}
