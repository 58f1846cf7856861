//! Opening a namespace: what it is, and that it has no other user.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nvme_spec::identify::{Dlfeat, IdentifyController, IdentifyNamespace, Nsattr, Oncs, Vwc};
use nvme_spec::zerocopy::FromBytes;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use spindle_reactor::uring::PassError;
use spindle_reactor::uring::admin::{self, Namespace};

use super::place::{NgPlace, look_at};
use crate::OpenError;
use crate::lock::{check_exports, lock, retry_busy};
use crate::medium_id;
use crate::shape::{BLOCK_BYTES_ALLOWED, checked_blocks};

/// Page of a drive: what its lists of memory are made of.
const PAGE_BYTES: u64 = 4096;
/// Most blocks of one command: NLB has 16 bits and is zero-based (NVM Command Set 1.0 section 3.2).
const COMMAND_BLOCKS_MAX: u64 = 1 << 16;

/// What a disk is to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NgSpec {
    /// The generic device, `/dev/ng0n1`.
    pub path: PathBuf,
    /// Refuse writes. Several read-only disks may share a namespace.
    pub is_read_only: bool,
}

impl NgSpec {
    /// A writable disk on the namespace at `path`.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> NgSpec {
        NgSpec { path: path.into(), is_read_only: false }
    }
}

/// What a namespace turned out to be, for the log.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NgFacts {
    /// The drive's model and serial number.
    pub model: String,
    /// Its serial number.
    pub serial: String,
    /// Completions are asked of the drive.
    pub is_polled: bool,
    /// Most bytes of one command; larger transfers go in pieces.
    pub transfer_bytes_max: u64,
    /// Names of the namespace.
    pub medium_ids: Vec<String>,
    /// What could be better, and how; a sentence each.
    pub notes: Vec<String>,
}

/// What can be asked of a namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Limits {
    pub(super) block_bytes: u32,
    pub(super) block_count: u64,
    pub(super) is_read_only: bool,
    pub(super) has_volatile_cache: bool,
    /// Write Zeroes with DEAC gives space back.
    pub(super) can_deallocate: bool,
    /// Bytes of a piece of a read or write, whole blocks.
    pub(super) transfer_bytes_max: u64,
    /// Bytes of a piece of a Write Zeroes, whole blocks; 0: there is none.
    pub(super) zero_bytes_max: u64,
    pub(super) is_polled: bool,
}

/// A namespace that is open and held.
pub(super) struct Opened {
    pub(super) device: File,
    pub(super) block_device: Option<File>,
    pub(super) namespace: Namespace,
    pub(super) limits: Limits,
    pub(super) facts: NgFacts,
}

/// Open what `spec` names. Its last process may be dead, with the kernel still ending what its rings had in
/// flight; it holds the device meanwhile, so we ask again until `lock_wait` is over.
pub(super) fn open(disk: &str, spec: &NgSpec, lock_wait: Duration) -> Result<Opened, OpenError> {
    let path = spec.path.display();
    let system = |verb: String| move |source: io::Error| OpenError::system(disk, verb, source);
    let place = look_at(&spec.path).map_err(|error| {
        if error.kind() == io::ErrorKind::InvalidInput {
            let allowed = "must be the generic device of an NVMe namespace, as /dev/ng0n1";
            return OpenError::setting(disk, "ng", &path, allowed);
        }
        system(format!("look at {path}"))(error)
    })?;
    if !spec.is_read_only {
        check_exports(disk, "ng", &spec.path, &place.block_path)?;
    }
    let until = Instant::now() + lock_wait;
    // The kernel passes commands that write only where the device is open for writing.
    let access = if spec.is_read_only { OFlags::RDONLY } else { OFlags::RDWR };
    let device = rustix::fs::open(&spec.path, access | OFlags::CLOEXEC, Mode::empty());
    let device = device.map(File::from).map_err(|error| system(format!("open {path}"))(error.into()))?;
    lock(&device, spec.is_read_only, until).map_err(system(format!("lock {path}")))?;
    let block_device = hold(&place, spec.is_read_only, until).map_err(|error| {
        system(format!("hold {}, the same namespace,", place.block_path.display()))(error.into())
    })?;
    let ask = |verb: &str| system(format!("{verb} {path}"));
    let namespace = Namespace::of(&device).map_err(|error| ask("identify the namespace of")(told(error)))?;
    let controller =
        admin::identify_controller(&device).map_err(|error| ask("identify the drive of")(told(error)))?;
    let (Ok(id), Ok(controller)) = (
        IdentifyNamespace::read_from_bytes(namespace.identify()),
        IdentifyController::read_from_bytes(controller.as_slice()),
    ) else {
        return Err(ask("identify")(io::ErrorKind::InvalidData.into()));
    };
    let limits = Limits::of(disk, spec, &place, &id, &controller)?;
    let mut facts = facts(&place, &limits, &controller, &spec.path.display().to_string());
    // Those of the kernel first, as `medium_id::at` has them. A kernel may lack some.
    facts.medium_ids = medium_id::of_block(place.block_number);
    for name in medium_id::of_nvme(&facts.serial, namespace.id(), id.nguid, id.eui64) {
        if !facts.medium_ids.contains(&name) {
            facts.medium_ids.push(name);
        }
    }
    Ok(Opened { device, block_device, namespace, limits, facts })
}

fn told(error: PassError) -> io::Error {
    match error {
        PassError::Status(_) => io::Error::other(error.to_string()),
        PassError::System(error) => error,
    }
}

/// The block device of the same namespace, exclusively: refused while it is mounted, and not mountable from
/// then on. Readers share it, so they do not hold it. For reading only, or udev would look at the disk again
/// when we let go.
fn hold(place: &NgPlace, is_read_only: bool, until: Instant) -> Result<Option<File>, Errno> {
    if is_read_only {
        return Ok(None);
    }
    let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
    let opened = retry_busy(until, || rustix::fs::open(&place.block_path, flags, Mode::empty()))?;
    Ok(Some(File::from(opened)))
}

impl Limits {
    /// What the drive says of itself, within what the kernel's driver takes.
    pub(super) fn of(
        disk: &str,
        spec: &NgSpec,
        place: &NgPlace,
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
        // Memory that is scattered page by page has one piece a page, and one more when it begins inside of
        // one.
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

fn facts(place: &NgPlace, limits: &Limits, controller: &IdentifyController, path: &str) -> NgFacts {
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
