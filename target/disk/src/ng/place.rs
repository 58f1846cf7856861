//! [`NgBlockDevice`]: the block device of a generic device's namespace, and its limits, from sysfs.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Bytes of a sector in sysfs, independent of the device's block size.
const SECTOR_BYTES: u64 = 512;

/// The block device of the same namespace as a generic device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NgBlockDevice {
    /// Path of the block device, such as `/dev/nvme0n1`.
    pub block_path: PathBuf,
    /// Device number (`dev_t`) of the block device.
    pub block_number: u64,
    /// Bytes of the namespace.
    pub bytes: u64,
    /// Bytes of a logical block.
    pub block_bytes: u32,
    /// The driver has poll queues, and the kernel polls passthrough commands.
    pub can_poll: bool,
    /// Most bytes of one command in the kernel's driver (`max_hw_sectors_kb`).
    pub(super) transfer_bytes_max: u64,
    /// Most memory segments of one command (`max_segments`).
    pub(super) segments_max: u64,
    /// Most bytes of one Write Zeroes. 0: the drive does not support the command, or the kernel has disabled
    /// it for the drive's model.
    pub(super) zero_bytes_max: u64,
    pub(super) is_zoned: bool,
}

/// Returns the block device of the generic device at `path`, without opening either device.
///
/// # Errors
/// `InvalidInput` if `path` is no generic device of an NVMe namespace, or sysfs lacks its block device.
/// Otherwise the error of `stat`.
pub fn look_at(path: &Path) -> io::Result<NgBlockDevice> {
    let metadata = fs::metadata(path)?;
    let wrong =
        || io::Error::new(io::ErrorKind::InvalidInput, "it is no generic device of an NVMe namespace");
    if !metadata.file_type().is_char_device() {
        return Err(wrong());
    }
    let (major, minor) = (rustix::fs::major(metadata.rdev()), rustix::fs::minor(metadata.rdev()));
    NgBlockDevice::of(Path::new("/sys"), major, minor).ok_or_else(wrong)
}

impl NgBlockDevice {
    /// Reads the sysfs tree `sys` for the character device with this number. `None`: the device is no generic
    /// device of a namespace, the namespace has no block device, or an attribute is missing or invalid.
    pub(super) fn of(sys: &Path, major: u32, minor: u32) -> Option<NgBlockDevice> {
        let folder = fs::canonicalize(sys.join(format!("dev/char/{major}:{minor}"))).ok()?;
        let name = folder.file_name()?.to_str()?;
        let block = folder.with_file_name(format!("nvme{}", name.strip_prefix("ng")?));
        let value = |file: &str| Some(fs::read_to_string(block.join(file)).ok()?.trim().to_owned());
        let number = |file: &str| value(file)?.parse::<u64>().ok();
        let (block_major, block_minor) = value("dev")?
            .split_once(':')
            .map(|(major, minor)| (major.parse::<u32>(), minor.parse::<u32>()))?;
        Some(NgBlockDevice {
            block_path: Path::new("/dev").join(block.file_name()?),
            block_number: rustix::fs::makedev(block_major.ok()?, block_minor.ok()?),
            bytes: number("size")?.checked_mul(SECTOR_BYTES)?,
            block_bytes: u32::try_from(number("queue/logical_block_size")?).ok()?,
            can_poll: number("queue/io_poll") == Some(1)
                && polls_passthrough(&rustix::system::uname().release().to_string_lossy()),
            transfer_bytes_max: number("queue/max_hw_sectors_kb")?.checked_mul(1024)?,
            segments_max: number("queue/max_segments")?,
            zero_bytes_max: number("queue/write_zeroes_max_bytes").unwrap_or(0),
            is_zoned: value("queue/zoned").is_some_and(|zoned| zoned != "none"),
        })
    }
}

/// Returns true for Linux 6.1 and later. Earlier kernels reject polled passthrough commands.
pub(super) fn polls_passthrough(release: &str) -> bool {
    let mut numbers = release.split(['.', '-']).map(str::parse::<u32>);
    matches!((numbers.next(), numbers.next()), (Some(Ok(major)), Some(Ok(minor))) if (major, minor) >= (6, 1))
}
