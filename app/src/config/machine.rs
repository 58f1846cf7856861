//! Resources of the machine that a configuration can exceed (CPUs, memory, open files), and the state of the
//! files and NVMe drives that it names.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use rustix::fs::Access;
use spindle_nvme_pcie::PciAddress;
use spindle_reactor::mem::ResidentBytes;

/// Limits of this process and of the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    /// CPUs that the process may use, ascending.
    pub cores: Vec<usize>,
    /// Bytes of memory of the machine, or the limit of the control group if that is less.
    pub memory_bytes: u64,
    /// Bytes of MemAvailable plus the anonymous memory of this process, at most `memory_bytes`; without
    /// `retired`.
    pub available_bytes: u64,
    /// Memory of removed disks that this process has not given back yet.
    pub retired: ResidentBytes,
    /// True at start and reload: too little available memory is an error, an absent drive is not. False in
    /// `spindle check`: too little available memory is a note, because a running target may use that memory
    /// for the same plan; an absent drive is an error.
    pub is_for_start: bool,
    /// Bytes of reserved huge pages that are free or in use by this process.
    pub huge_bytes: u64,
    /// RLIMIT_MEMLOCK in bytes, which limits io_uring buffers too; `None`: no limit, or CAP_IPC_LOCK.
    pub lockable_bytes: Option<u64>,
    /// Hard RLIMIT_NOFILE, sockets included; `None`: no limit.
    pub files_max: Option<u64>,
    /// TCP congestion control algorithms that the process may select.
    pub congestion: Vec<String>,
}

#[derive(Debug, PartialEq, Eq)]
pub enum PathState {
    Missing {
        has_directory: bool,
    },
    Regular(BackingFile),
    Block(BackingFile),
    /// Neither a regular file nor a block device; its type in words.
    Other(&'static str),
}

/// Size and identity of a regular file or block device.
#[derive(Debug, PartialEq, Eq)]
pub struct BackingFile {
    pub bytes: u64,
    /// Device and inode of a file; `u64::MAX` and the device number of a block device.
    pub identity: (u64, u64),
}

impl Machine {
    /// Reads the current state of this machine. Call it on a thread that is not pinned: `cores` is the
    /// affinity mask of the calling thread.
    pub fn detect() -> Machine {
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let kib = |text: &str, name: &str| number_after(text, name).map(|kib| kib << 10);
        let limit = control_group_limit();
        // Without /proc, memory counts as unlimited, so that no plan is refused.
        let memory_bytes = kib(&meminfo, "MemTotal:").unwrap_or(u64::MAX).min(limit);
        let own = kib(&status, "RssAnon:").unwrap_or(0);
        let available = kib(&meminfo, "MemAvailable:").unwrap_or(u64::MAX).saturating_add(own);
        let huge_page = kib(&meminfo, "Hugepagesize:").unwrap_or(0);
        let huge_own = kib(&status, "HugetlbPages:").unwrap_or(0);
        let huge_free = number_after(&meminfo, "HugePages_Free:").unwrap_or(0).saturating_mul(huge_page);
        let is_privileged = rustix::process::geteuid().is_root();
        let capabilities = rustix::thread::capabilities(None).map(|sets| sets.effective);
        let may_lock_all =
            capabilities.map_or(is_privileged, |has| has.contains(rustix::thread::CapabilitySet::IPC_LOCK));
        let lockable = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
        Machine {
            cores: spindle_reactor::affinity::available_cores(),
            memory_bytes,
            available_bytes: available.min(memory_bytes),
            retired: ResidentBytes::default(),
            is_for_start: true,
            huge_bytes: huge_free.saturating_add(huge_own),
            lockable_bytes: lockable.filter(|_| !may_lock_all),
            files_max: rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum,
            congestion: congestion(is_privileged),
        }
    }

    /// Subtracts the memory of removed disks from what is available.
    pub fn beside(self, retired: ResidentBytes) -> Machine {
        Machine {
            available_bytes: self.available_bytes.saturating_sub(retired.ordinary),
            huge_bytes: self.huge_bytes.saturating_sub(retired.huge),
            retired,
            ..self
        }
    }

    pub fn with_unlimited_memory() -> Machine {
        Machine { memory_bytes: u64::MAX, available_bytes: u64::MAX, ..Machine::detect() }
    }
}

/// Returns the GID of a group, given by name or as a number.
///
/// # Errors
/// What is wrong with it.
pub fn group_id(group: &str) -> Result<u32, String> {
    let groups = fs::read_to_string("/etc/group")
        .map_err(|error| format!("cannot be looked up, as /etc/group cannot be read: {error}"))?;
    group_in(&groups, group).ok_or_else(|| "must be a group of /etc/group, or a number".to_owned())
}

fn group_in(groups: &str, group: &str) -> Option<u32> {
    let named = groups.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(group)).then(|| fields.nth(1)?.parse().ok())?
    });
    named.or_else(|| group.parse().ok())
}

fn congestion(is_privileged: bool) -> Vec<String> {
    let which = if is_privileged { "available" } else { "allowed" };
    let names =
        fs::read_to_string(format!("/proc/sys/net/ipv4/tcp_{which}_congestion_control")).unwrap_or_default();
    names.split_whitespace().map(str::to_owned).collect()
}

/// Returns the number after `name` in a file of /proc; `None`: no line begins with `name`.
fn number_after(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Returns the lowest memory limit in bytes of this process's control group and its ancestors; `u64::MAX`
/// without a limit.
fn control_group_limit() -> u64 {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let mut least = u64::MAX;
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let (root, file) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max"),
            "memory" => ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
            _ => continue,
        };
        for group in Path::new(path.trim_start_matches('/')).ancestors() {
            let limit = fs::read_to_string(Path::new(root).join(group).join(file)).ok();
            least = least.min(limit.and_then(|text| text.trim().parse().ok()).unwrap_or(u64::MAX));
        }
    }
    least
}

/// Returns the type of the file at `path`, with size and identity of a regular file or block device. Opens
/// only block devices, for reading.
///
/// # Errors
/// `stat` fails for another reason than a missing file, or a block device cannot be opened.
pub fn path_state(path: &Path) -> io::Result<PathState> {
    let metadata = match fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let has_directory = path.parent().is_some_and(Path::is_dir);
            return Ok(PathState::Missing { has_directory });
        }
        Err(error) => return Err(error),
    };
    let kind = metadata.file_type();
    Ok(if kind.is_file() {
        PathState::Regular(BackingFile { bytes: metadata.len(), identity: (metadata.dev(), metadata.ino()) })
    } else if kind.is_block_device() {
        let bytes = io::Seek::seek(&mut fs::File::open(path)?, io::SeekFrom::End(0))?;
        PathState::Block(BackingFile { bytes, identity: (u64::MAX, metadata.rdev()) })
    } else if kind.is_dir() {
        PathState::Other("a directory")
    } else if kind.is_char_device() {
        PathState::Other("a character device")
    } else {
        PathState::Other("a pipe or a socket")
    })
}

/// Checks by `access(2)` that the process may read `path`, and write to `path` unless `is_read_only`.
pub fn may_open(path: &Path, is_read_only: bool) -> io::Result<()> {
    let access = if is_read_only { Access::READ_OK } else { Access::READ_OK | Access::WRITE_OK };
    Ok(rustix::fs::access(path, access)?)
}

/// PCI class code: mass storage, non-volatile memory, NVM Express.
const NVME_CLASS: &str = "0x010802";

/// Reads from sysfs whether the PCI function at `address` is an NVMe controller that is bound to vfio-pci.
/// False: there is no function at the address.
///
/// # Errors
/// The class cannot be read or is not that of an NVMe controller. Another driver or none is bound; that text
/// names the command that binds vfio-pci.
pub fn probe_nvme_function(address: PciAddress) -> Result<bool, String> {
    let path = Path::new("/sys/bus/pci/devices").join(address.to_string());
    if !path.exists() {
        return Ok(false);
    }
    let class = fs::read_to_string(path.join("class")).map_err(|error| format!("its class: {error}"))?;
    if class.trim_end() != NVME_CLASS {
        return Err(format!("its class is {}, that of an NVMe drive is {NVME_CLASS}", class.trim_end()));
    }
    let driver = fs::read_link(path.join("driver")).ok();
    match driver.as_deref().and_then(Path::file_name).and_then(|name| name.to_str()) {
        Some("vfio-pci") => Ok(true),
        Some(driver) => {
            Err(format!("its driver is {driver}; spindle nvme bind {address} takes it from there"))
        }
        None => Err(format!("it has no driver; spindle nvme bind {address} gives it the one it needs")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_found_by_name_or_number() {
        let groups = "root:x:0:\ndisk:x:6:a,b\nbroken\nx:y:z:\n";
        assert_eq!(
            ["disk", "root", "17", "x", "none"].map(|it| group_in(groups, it)),
            [Some(6), Some(0), Some(17), None, None]
        );
    }
}
