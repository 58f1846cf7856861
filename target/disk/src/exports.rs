//! Block devices and files that the kernel's targets, nvmet and LIO, export: from their trees in configfs.
//!
//! The kernel opens the device or file itself, so no process is listed as its user. An exclusive open
//! succeeds while nvmet exports the device. Only the configuration shows the export.
//!
//! ```text
//!   nvmet/subsystems/NQN/namespaces/NSID/{device_path,enable}     a block device or a file
//!   nvmet/subsystems/NQN/passthru/{device_path,enable}            a controller and all its namespaces
//!   target/core/HBA/NAME/{udev_path,enable,info}                  LIO; info has the path of a fileio file
//! ```

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// A device or file that the kernel exports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Export {
    /// Path of a block device, a file, or the character device of an NVMe controller.
    pub path: PathBuf,
    /// Name of the exporting target object, such as `nvmet subsystem NQN, namespace 1`.
    pub by: String,
}

/// Mount point of configfs.
pub const CONFIGFS: &str = "/sys/kernel/config";

/// Returns the enabled exports in the configfs at `root`. Empty without a kernel target; unreadable entries
/// are skipped.
#[must_use]
pub fn all(root: &Path) -> Vec<Export> {
    let mut exports = Vec::new();
    for nqn in names(&root.join("nvmet/subsystems")) {
        let subsystem = root.join("nvmet/subsystems").join(&nqn);
        for nsid in names(&subsystem.join("namespaces")) {
            let by = format!("nvmet subsystem {nqn}, namespace {nsid}");
            exports.extend(export(&subsystem.join("namespaces").join(nsid), "device_path", by));
        }
        exports.extend(export(
            &subsystem.join("passthru"),
            "device_path",
            format!("nvmet subsystem {nqn}, passthru"),
        ));
    }
    for hba in names(&root.join("target/core")) {
        for name in names(&root.join("target/core").join(&hba)) {
            let folder = root.join("target/core").join(&hba).join(&name);
            let by = format!("LIO backstore {hba}/{name}");
            let named = export(&folder, "udev_path", by.clone());
            // `udev_path` is free text of the administrator. `info` of a fileio backstore contains the path
            // of the open file and is preferred.
            let info = fs::read_to_string(folder.join("info")).unwrap_or_default();
            let file = info.split_once("File: ").and_then(|(_, rest)| rest.rsplit_once("  Size: "));
            let open = file.filter(|_| is_enabled(&folder)).map(|(file, _)| Export { path: file.into(), by });
            exports.extend(open.or(named));
        }
    }
    exports
}

fn export(folder: &Path, file: &str, by: String) -> Option<Export> {
    let path = fs::read_to_string(folder.join(file)).ok()?;
    let path = path.trim();
    (is_enabled(folder) && path.starts_with('/')).then(|| Export { path: path.into(), by })
}

fn is_enabled(folder: &Path) -> bool {
    fs::read_to_string(folder.join("enable")).is_ok_and(|text| text.trim() == "1")
}

fn names(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut names: Vec<String> =
        entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
    names.sort_unstable();
    names
}

/// Returns the name of the kernel target object that exports the file or block device at `path`, or a device
/// that overlaps it. `None`: not exported, or `stat` fails. Compares device and inode numbers, not names.
pub(crate) fn exporter(path: &Path) -> Option<String> {
    let ours = fs::metadata(path).ok()?;
    let is_same = |export: &Export| {
        let Ok(theirs) = fs::metadata(&export.path) else { return false };
        let (a, b) = (ours.file_type(), theirs.file_type());
        if a.is_block_device() && b.is_block_device() {
            return disk_of(ours.rdev()) == disk_of(theirs.rdev()) && overlap(ours.rdev(), theirs.rdev());
        }
        if a.is_block_device() && b.is_char_device() {
            return has_controller(ours.rdev(), &export.path);
        }
        a.is_file() && b.is_file() && (ours.dev(), ours.ino()) == (theirs.dev(), theirs.ino())
    };
    all(Path::new(CONFIGFS)).into_iter().find(is_same).map(|export| export.by)
}

fn folder_of(number: u64) -> Option<PathBuf> {
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    fs::canonicalize(format!("/sys/dev/block/{major}:{minor}")).ok()
}

/// Returns the sysfs directory of the disk with device number `number`; for a partition, that of its disk.
fn disk_of(number: u64) -> Option<PathBuf> {
    let folder = folder_of(number)?;
    match folder.join("partition").exists() {
        true => folder.parent().map(Path::to_owned),
        false => Some(folder),
    }
}

/// Returns true if two devices of one disk overlap: they are equal, or one of them is the whole disk.
fn overlap(a: u64, b: u64) -> bool {
    let is_whole = |number| folder_of(number).is_some_and(|folder| !folder.join("partition").exists());
    a == b || is_whole(a) || is_whole(b)
}

/// Returns true if `controller`, a character device, is one of the NVMe disk with device number `number`.
fn has_controller(number: u64, controller: &Path) -> bool {
    let (Some(disk), Some(name)) = (disk_of(number), controller.file_name()) else { return false };
    let device = disk.join("device");
    fs::canonicalize(&device).is_ok_and(|device| device.file_name() == Some(name))
        || device.join(name).exists()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::TempPath;

    #[test]
    fn what_is_enabled_is_exported_and_nothing_else() {
        let root = TempPath::new();
        let file = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("a parent")).expect("folders");
            fs::write(path, text).expect("a file");
        };
        assert_eq!(all(root.path()), []);
        for (nsid, enable) in [("1", "1\n"), ("2", "0\n")] {
            file(&format!("nvmet/subsystems/nqn.a/namespaces/{nsid}/device_path"), "/dev/nvme0n1\n");
            file(&format!("nvmet/subsystems/nqn.a/namespaces/{nsid}/enable"), enable);
        }
        file("nvmet/subsystems/nqn.b/passthru/device_path", "/dev/nvme1\n");
        file("nvmet/subsystems/nqn.b/passthru/enable", "1\n");
        file("nvmet/subsystems/nqn.c/passthru/device_path", "(null)\n");
        file("nvmet/subsystems/nqn.c/passthru/enable", "1\n");
        file("target/core/iblock_0/disk/udev_path", "/dev/sdb\n");
        file("target/core/iblock_0/disk/enable", "1\n");
        file("target/core/fileio_1/image/udev_path", "/a/b c.img\n");
        file("target/core/fileio_1/image/enable", "1\n");
        file(
            "target/core/fileio_1/image/info",
            "Status: ACTIVATED\n TCM FILEIO ID: 0        File: /a/b c.img  Size: 1  Mode: O_DSYNC\n",
        );
        file("target/core/alua/lu_gps/x", "");
        let found: Vec<(String, String)> =
            all(root.path()).into_iter().map(|it| (it.path.display().to_string(), it.by)).collect();
        let is = |path: &str, by: &str| (path.to_owned(), by.to_owned());
        assert_eq!(
            found,
            [
                is("/dev/nvme0n1", "nvmet subsystem nqn.a, namespace 1"),
                is("/dev/nvme1", "nvmet subsystem nqn.b, passthru"),
                is("/a/b c.img", "LIO backstore fileio_1/image"),
                is("/dev/sdb", "LIO backstore iblock_0/disk"),
            ]
        );
        fs::remove_dir_all(root.path()).expect("removed");
    }
}
