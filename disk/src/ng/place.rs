//! What sysfs says of a generic device: the block device of the same namespace, and that one's limits.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Bytes of a sector in sysfs, whatever the device's blocks.
const SECTOR_BYTES: u64 = 512;

/// The block device beside a generic device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NgPlace {
    /// Its path, `/dev/nvme0n1`.
    pub block_path: PathBuf,
    /// Its device number.
    pub block_number: u64,
    /// Bytes of the namespace.
    pub bytes: u64,
    /// Bytes of a block.
    pub block_bytes: u32,
    /// The drive has queues whose completions are asked for, and the kernel does so for passthrough.
    pub can_poll: bool,
    /// Most bytes that the driver takes in one command.
    pub(super) transfer_bytes_max: u64,
    /// Most pieces of memory in one command.
    pub(super) segments_max: u64,
    /// Most bytes that one Write Zeroes may have; 0: the drive does not know it, or does it wrong.
    pub(super) zero_bytes_max: u64,
    /// It is a zoned namespace.
    pub(super) is_zoned: bool,
}

/// What is at `path`, without opening it.
///
/// # Errors
/// `InvalidInput` for what is no generic device of an NVMe namespace; the system's.
pub fn look_at(path: &Path) -> io::Result<NgPlace> {
    let metadata = fs::metadata(path)?;
    let wrong =
        || io::Error::new(io::ErrorKind::InvalidInput, "it is no generic device of an NVMe namespace");
    if !metadata.file_type().is_char_device() {
        return Err(wrong());
    }
    let (major, minor) = (rustix::fs::major(metadata.rdev()), rustix::fs::minor(metadata.rdev()));
    NgPlace::of(Path::new("/sys"), major, minor).ok_or_else(wrong)
}

impl NgPlace {
    /// What `sys` says of the character device with this number. `None` where that is none of a namespace, or
    /// the kernel has no block device for the namespace.
    pub(super) fn of(sys: &Path, major: u32, minor: u32) -> Option<NgPlace> {
        let folder = fs::canonicalize(sys.join(format!("dev/char/{major}:{minor}"))).ok()?;
        let name = folder.file_name()?.to_str()?;
        let block = folder.with_file_name(format!("nvme{}", name.strip_prefix("ng")?));
        let value = |file: &str| Some(fs::read_to_string(block.join(file)).ok()?.trim().to_owned());
        let number = |file: &str| value(file)?.parse::<u64>().ok();
        let (block_major, block_minor) = value("dev")?
            .split_once(':')
            .map(|(major, minor)| (major.parse::<u32>(), minor.parse::<u32>()))?;
        Some(NgPlace {
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

/// Linux 6.1 is the first that polls passthrough commands; those before refuse each of them.
pub(super) fn polls_passthrough(release: &str) -> bool {
    let mut numbers = release.split(['.', '-']).map(str::parse::<u32>);
    matches!((numbers.next(), numbers.next()), (Some(Ok(major)), Some(Ok(minor))) if (major, minor) >= (6, 1))
}
