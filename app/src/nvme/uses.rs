//! Uses of a drive: mounts, swap, RAID, volumes, loop devices, kernel targets, processes.
//!
//! ```text
//!   nvme0n1 ─┬─ nvme0n1p1 ──────────── mounted at /boot
//!            └─ nvme0n1p2 ── dm-0 ──── swap              partitions and holders, to any depth
//! ```
//!
//! mountinfo contains the device number of a mounted file system. For btrfs and bcachefs that number belongs
//! to no block device, so their devices are found by name. mountinfo names only one device of a btrfs; the
//! others are read from `/sys/fs/btrfs`. Uses that are not detected here (ZFS, a mount in another mount
//! namespace) are reported as [`UseKind::Exclusive`], since the kernel has the device open exclusively.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::root::Root;

/// Most symbolic links that [`block_device`] follows.
const LINKS_MAX: usize = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum UseKind {
    RootDisk,
    /// A file system on the device is mounted, or the device is a member of a mounted btrfs or bcachefs.
    Mounted,
    Swap,
    Raid,
    /// A volume of device-mapper (LVM, encryption) or of another block layer is on the device.
    Volume,
    Loop,
    Exported,
    /// The device is open with `O_EXCL`: by a file system or volume manager of the kernel, or by a process.
    Exclusive,
    /// A process has the device open for writing.
    Open,
    /// A process has the drive's VFIO group or device open.
    Vfio,
}

impl UseKind {
    /// Returns the name in JSON, the name in text, and the requirement that a refusal states.
    fn about(self) -> (&'static str, &'static str, &'static str) {
        const CLOSE: &str = "must not be open: end the process that has it open";
        match self {
            UseKind::RootDisk => {
                ("root_disk", "root disk", "must not be the disk that the machine runs from")
            }
            UseKind::Mounted => {
                ("mounted", "mounted", "must not be mounted: umount it, and take it out of /etc/fstab")
            }
            UseKind::Swap => {
                ("swap", "swap", "must not be swapped to: swapoff it, and take it out of /etc/fstab")
            }
            UseKind::Raid => (
                "raid",
                "RAID member",
                "must not be in a RAID array: mdadm --stop the array, or remove the drive from it",
            ),
            UseKind::Volume => (
                "volume",
                "volume",
                "must have no volume on it: deactivate it (vgchange -an, cryptsetup close, dmsetup remove)",
            ),
            UseKind::Loop => ("loop", "loop device", "must have no loop device on it: losetup -d it"),
            UseKind::Exported => (
                "exported",
                "exported by the kernel",
                "must not be exported by the kernel's target: disable it there (nvmet: echo 0 > enable; LIO: \
                 targetcli)",
            ),
            UseKind::Exclusive => ("exclusive", "open exclusively", CLOSE),
            UseKind::Open => ("open", "open for writing", CLOSE),
            UseKind::Vfio => ("vfio", "VFIO group open", CLOSE),
        }
    }

    pub fn name(self) -> &'static str {
        self.about().0
    }

    /// Returns the requirement that a refusal states, with the way to end the use.
    pub fn allowed(self) -> &'static str {
        self.about().2
    }
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Use {
    pub kind: UseKind,
    /// The used device: a block device, a character device, or a VFIO group.
    pub device: String,
    /// The user with its preposition, such as `at /boot (ext4)` or `by pid 7 (dd)`; empty for swap.
    pub what: String,
}

impl fmt::Display for Use {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind.about().1, self.device)?;
        if self.what.is_empty() { Ok(()) } else { write!(f, " {}", self.what) }
    }
}

#[derive(Debug)]
struct Mount {
    /// `major:minor`.
    number: String,
    point: String,
    kind: String,
    /// Names of the block devices in the source field, such as `nvme0n1p1`.
    sources: Vec<String>,
}

/// A device that a process has open.
#[derive(Debug)]
struct OpenFile {
    path: String,
    /// Result of [`Root::device`]: type and number, independent of `path`.
    device: Option<String>,
    process: String,
    may_write: bool,
}

/// Mounts, swap devices, btrfs members, loop devices, exports and open devices of the machine, read once.
#[derive(Debug)]
pub struct DeviceUses {
    mounts: Vec<Mount>,
    /// Names of block devices, `nvme0n1p3`, `dm-1`.
    swaps: BTreeSet<String>,
    /// UUID of each btrfs, and the names of its block devices.
    btrfs: BTreeMap<String, BTreeSet<String>>,
    /// Name of each loop device on a block device, and the name of that block device.
    loops: Vec<(String, String)>,
    /// Devices that the kernel's targets export: path, type and number, and target.
    exports: Vec<(String, Option<String>, String)>,
    open: Vec<OpenFile>,
}

impl DeviceUses {
    pub fn read(root: &Root) -> DeviceUses {
        // This process's mount namespace, and that of PID 1.
        let tables = ["/proc/self/mountinfo", "/proc/1/mountinfo"];
        let mut mounts: Vec<Mount> = Vec::new();
        for line in tables
            .iter()
            .filter_map(|path| root.text(path))
            .flat_map(|text| text.lines().map(str::to_owned).collect::<Vec<_>>())
        {
            mounts.extend(mount(root, &line));
        }
        let swaps = root.text("/proc/swaps").unwrap_or_default();
        let swaps = swaps.lines().skip(1).filter_map(|line| line.split_whitespace().next());
        let btrfs = root.names("/sys/fs/btrfs").into_iter().map(|uuid| {
            let members = root.names(&format!("/sys/fs/btrfs/{uuid}/devices"));
            (uuid, members.into_iter().collect())
        });
        let loops = root.names("/sys/block").into_iter().filter(|name| name.starts_with("loop"));
        let loops = loops.filter_map(|name| {
            let file = root.value(&format!("/sys/block/{name}/loop/backing_file"))?;
            Some((name, block_device(root, &file)?))
        });
        DeviceUses {
            mounts,
            swaps: swaps.filter_map(|path| block_device(root, &unescape(path))).collect(),
            btrfs: btrfs.collect(),
            loops: loops.collect(),
            exports: read_exports(root),
            open: open_files(root),
        }
    }

    /// Returns the uses of a block device and of partitions, volumes and loop devices on it, by [`UseKind`].
    pub fn of_disk(&self, root: &Root, disk: &str) -> Vec<Use> {
        let mut search = UseSearch { root, users: self, visited: BTreeSet::new(), uses: BTreeSet::new() };
        search.visit(disk);
        search.uses.into_iter().collect()
    }

    /// Returns (path, process) for each process that has one of `paths` open, in any mode.
    pub fn of_files<'a>(&'a self, paths: &'a [String]) -> impl Iterator<Item = (&'a str, &'a str)> {
        let open = self.open.iter().filter(move |open| paths.contains(&open.path));
        open.map(|open| (open.path.as_str(), open.process.as_str()))
    }

    /// Returns the processes that have a device open for writing. Compares `path`, and also `device` (type
    /// and number, [`Root::device`]), since another device node may have the same number.
    pub fn writers(&self, path: &str, device: Option<&str>) -> Vec<Use> {
        let is_it = |open: &&OpenFile| {
            open.path == path || device.is_some_and(|device| open.device.as_deref() == Some(device))
        };
        let open = self.open.iter().filter(|open| open.may_write).filter(is_it);
        let mut uses: Vec<Use> = open
            .map(|open| Use {
                kind: UseKind::Open,
                device: path.to_owned(),
                what: match open.path == path {
                    true => format!("by {}", open.process),
                    false => format!("by {} as {}", open.process, open.path),
                },
            })
            .collect();
        uses.sort_unstable();
        uses.dedup();
        uses
    }
}

impl DeviceUses {
    /// Returns the kernel targets that export a device. Compares `path`, the block device that it names, and
    /// `device` (type and number, [`Root::device`]).
    pub fn exporters(&self, root: &Root, path: &str, device: Option<&str>) -> Vec<Use> {
        let name = block_device(root, path);
        let is_it = |(its, number, _): &&(String, Option<String>, String)| {
            let is_named = its == path || (name.is_some() && block_device(root, its) == name);
            is_named || device.is_some_and(|device| number.as_deref() == Some(device))
        };
        let exports = self.exports.iter().filter(is_it);
        exports
            .map(|(_, _, by)| Use {
                kind: UseKind::Exported,
                device: path.trim_start_matches("/dev/").to_owned(),
                what: format!("by {by}"),
            })
            .collect()
    }
}

fn read_exports(root: &Root) -> Vec<(String, Option<String>, String)> {
    let exports = spindle_target_disk::exports::all(&root.at(spindle_target_disk::exports::CONFIGFS));
    let known = exports.into_iter().map(|export| {
        let path = export.path.to_string_lossy().into_owned();
        let device = root.device(&path);
        (path, device, export.by)
    });
    known.collect()
}

/// A search from one disk through its partitions and the volumes and loop devices on them.
struct UseSearch<'a> {
    root: &'a Root,
    users: &'a DeviceUses,
    visited: BTreeSet<String>,
    uses: BTreeSet<Use>,
}

impl UseSearch<'_> {
    /// Adds the uses of a device, its partitions and the holders and loop devices on them. Visits each device
    /// once, so that a cycle in sysfs cannot make the search endless.
    fn visit(&mut self, disk: &str) {
        let mut pending = vec![disk.to_owned()];
        while let Some(name) = pending.pop() {
            if !self.visited.insert(name.clone()) {
                continue;
            }
            // A partition is a subdirectory of its disk in sysfs, and has its own entry in /sys/class/block.
            let folder = format!("/sys/class/block/{name}");
            for child in self.root.names(&folder) {
                if self.root.has(&format!("{folder}/{child}/partition")) {
                    pending.push(child);
                }
            }
            for holder in self.root.names(&format!("{folder}/holders")) {
                self.add_holder(&name, &holder);
                pending.push(holder);
            }
            self.add_mounts(&name, &folder);
            if self.users.swaps.contains(&name) {
                self.add(UseKind::Swap, &name, String::new());
            }
            for (above, _) in self.users.loops.iter().filter(|(_, below)| *below == name) {
                self.add(UseKind::Loop, &name, format!("in {above}"));
                pending.push(above.clone());
            }
            let (path, device) = (format!("/dev/{name}"), self.root.value(&format!("{folder}/dev")));
            let device = device.map(|number| format!("b {number}"));
            self.uses.extend(self.users.writers(&path, device.as_deref()));
            self.uses.extend(self.users.exporters(self.root, &path, device.as_deref()));
        }
    }

    fn add(&mut self, kind: UseKind, device: &str, what: String) {
        self.uses.insert(Use { kind, device: device.to_owned(), what });
    }

    /// Adds the RAID array or volume `holder` on the device `name`.
    fn add_holder(&mut self, name: &str, holder: &str) {
        let value = |file: &str| self.root.value(&format!("/sys/class/block/{holder}/{file}"));
        if self.root.has(&format!("/sys/class/block/{holder}/md")) {
            let level = value("md/level").unwrap_or_else(|| "level not known".to_owned());
            return self.add(UseKind::Raid, name, format!("in {holder} ({level})"));
        }
        let mut about = Vec::new();
        about.extend(value("dm/name"));
        about.extend(value("dm/uuid").and_then(|uuid| uuid.split_once('-').map(|(kind, _)| kind.to_owned())));
        let about = if about.is_empty() { String::new() } else { format!(" ({})", about.join(", ")) };
        self.add(UseKind::Volume, name, format!("in {holder}{about}"));
    }

    fn add_mounts(&mut self, name: &str, folder: &str) {
        let number = self.root.value(&format!("{folder}/dev"));
        let filesystems: BTreeMap<&String, &BTreeSet<String>> =
            self.users.btrfs.iter().filter(|(_, members)| members.contains(name)).collect();
        let users = self.users;
        let mut is_mounted = false;
        for mount in &users.mounts {
            let is_source = |source: &String| {
                source == name || filesystems.values().any(|members| members.contains(source))
            };
            let is_number = number.as_ref() == Some(&mount.number);
            if !is_number && !mount.sources.iter().any(is_source) {
                continue;
            }
            is_mounted = true;
            let kind = if mount.point == "/" { UseKind::RootDisk } else { UseKind::Mounted };
            self.add(kind, name, format!("at {} ({})", mount.point, mount.kind));
        }
        for uuid in filesystems.keys().filter(|_| !is_mounted) {
            self.add(UseKind::Mounted, name, format!("in the btrfs {uuid}"));
        }
    }
}

/// Parses a line of mountinfo (proc(5)): `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw`.
/// `None`: the line has another form.
fn mount(root: &Root, line: &str) -> Option<Mount> {
    let (before, after) = line.split_once(" - ")?;
    let mut before = before.split(' ').skip(2);
    let (number, point) = (before.next()?, before.nth(1)?);
    let mut after = after.split(' ');
    let (kind, source) = (after.next()?, after.next().unwrap_or_default());
    // The source of a bcachefs is a list of its devices, separated by colons.
    let sources = unescape(source);
    let sources = sources.split(':').filter_map(|path| block_device(root, path)).collect();
    Some(Mount { number: number.to_owned(), point: unescape(point), kind: kind.to_owned(), sources })
}

/// Returns the name of the block device at a path in `/dev`, after symbolic links: `dm-0` for
/// `/dev/mapper/root`. `None` for paths outside `/dev`, and after [`LINKS_MAX`] links. It need not exist.
fn block_device(root: &Root, path: &str) -> Option<String> {
    let mut path = path.to_owned();
    for _ in 0..=LINKS_MAX {
        let (folder, name) = path.rsplit_once('/').filter(|(folder, _)| folder.starts_with("/dev"))?;
        let Some(target) = root.link(&path) else { return Some(name.to_owned()) };
        path = match target.strip_prefix('/') {
            Some(_) => target,
            None => resolve(folder, &target),
        };
    }
    None
}

/// Returns the absolute target of a relative link in `folder`: `/dev/dm-0` for `/dev/mapper` and `../dm-0`.
fn resolve(folder: &str, target: &str) -> String {
    let mut parts: Vec<&str> = folder.split('/').collect();
    for part in target.split('/') {
        match part {
            ".." => drop(parts.pop()),
            "." | "" => {}
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// Decodes the octal escapes of /proc files, such as `\040` for a space.
fn unescape(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let octal = after
            .get(..3)
            .filter(|digits| *first == b'\\' && digits.iter().all(|d| (b'0'..b'8').contains(d)));
        let octal = octal.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        match octal {
            Some(byte) => {
                bytes.push(byte);
                rest = after.get(3..).unwrap_or_default();
            }
            None => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Returns the devices that processes have open. Includes a path that starts with one of `PREFIXES` even if
/// its type cannot be read. Leaves out processes that this user cannot inspect.
fn open_files(root: &Root) -> Vec<OpenFile> {
    const PREFIXES: [&str; 6] = ["/dev/nvme", "/dev/ng", "/dev/vfio/", "/dev/dm-", "/dev/md", "/dev/loop"];
    let mut found = Vec::new();
    for pid in root.names("/proc") {
        if !pid.bytes().all(|letter| letter.is_ascii_digit()) {
            continue;
        }
        for fd in root.names(&format!("/proc/{pid}/fd")) {
            let Some(path) = root.link(&format!("/proc/{pid}/fd/{fd}")) else { continue };
            // Links of sockets and pipes are not paths.
            let device =
                if path.starts_with('/') { root.device(&format!("/proc/{pid}/fd/{fd}")) } else { None };
            if device.is_none() && !PREFIXES.iter().any(|begin| path.starts_with(begin)) {
                continue;
            }
            let name = root.value(&format!("/proc/{pid}/comm")).unwrap_or_default();
            let process = if name.is_empty() { format!("pid {pid}") } else { format!("pid {pid} ({name})") };
            found.push(OpenFile { path, device, process, may_write: may_write(root, &pid, &fd) });
        }
    }
    found
}

/// Whether a descriptor is open for writing, from `flags` (octal) of its fdinfo; true if unreadable.
fn may_write(root: &Root, pid: &str, fd: &str) -> bool {
    const ACCESS_MODE: u64 = 0o3;
    let info = root.text(&format!("/proc/{pid}/fdinfo/{fd}")).unwrap_or_default();
    let flags =
        info.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("flags:")?.trim(), 8).ok());
    flags.is_none_or(|flags| flags & ACCESS_MODE != 0)
}

#[cfg(test)]
mod tests {
    use super::super::tests::machine::Fake;
    use super::*;

    #[test]
    fn as_many_links_are_followed_as_may_be() {
        let fake = Fake::empty();
        for step in 0..=LINKS_MAX {
            fake.link(&format!("/dev/link{step}"), &format!("link{}", step + 1));
        }
        let last = Some(format!("link{}", LINKS_MAX + 1));
        assert_eq!(block_device(&fake.root, "/dev/link1"), last, "by {LINKS_MAX} links");
        assert_eq!(block_device(&fake.root, "/dev/link0"), None, "by one more");
    }
}
