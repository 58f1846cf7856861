//! Identifiers of media, independent of path and contents of a medium.
//!
//! | medium | identifiers, the most reliable first |
//! |---|---|
//! | an NVMe namespace, by the kernel | its `wwid`, `uuid.`, `eui.`, `serial.SN/NSID`, `serial.SN` |
//! | an NVMe namespace, by Identify | `serial.SN/NSID`, `serial.SN`, `eui.` of NGUID or EUI-64 |
//! | other block devices | `wwid` (`naa.`, `t10.`), `serial.` (virtio), `dm-uuid.`, `md-uuid.` |
//! | a partition | the identifiers of its disk, each followed by `-part1` (partition 1) |
//! | a regular file | `file.` with inode number and birth time; none without birth times |
//!
//! A copy of a file has a different identifier. The same file in a snapshot of its file system has the same
//! identifier. From Identify, serial numbers precede NGUID and EUI-64, because some drive models report the
//! same NGUID or EUI-64 for every unit. The kernel ignores those values (`NVME_QUIRK_BOGUS_NID`). `uuid.`,
//! `eui.` and `naa.` are spelt as in the kernel's `/sys/block/*/wwid`.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use rustix::fs::{AtFlags, StatxFlags};

/// Longest sysfs attribute that is used, in bytes. Longer attributes are ignored.
const ATTRIBUTE_BYTES_MAX: usize = 4096;

/// Returns the identifiers of an NVMe namespace from Identify data. An `nguid` or `eui64` of zero, or a blank
/// serial number, adds no identifier.
#[must_use]
pub fn of_nvme(serial: &str, nsid: u32, nguid: [u8; 16], eui64: [u8; 8]) -> Vec<String> {
    let mut ids = Vec::new();
    if let Some(serial) = sanitize(serial) {
        ids.push(format!("serial.{serial}/{nsid}"));
        ids.push(format!("serial.{serial}"));
    }
    if nguid != [0; 16] {
        ids.push(format!("eui.{:032x}", u128::from_be_bytes(nguid)));
    }
    if eui64 != [0; 8] {
        ids.push(format!("eui.{:016x}", u64::from_be_bytes(eui64)));
    }
    ids
}

/// Returns the identifiers of the regular file, block device or NVMe generic device at `path`. Fails with the
/// error of `stat`, or `InvalidInput` for another character device.
pub fn at(path: &Path) -> io::Result<Vec<String>> {
    let metadata = fs::metadata(path)?;
    let kind = metadata.file_type();
    if kind.is_block_device() {
        return Ok(of_block(metadata.rdev()));
    }
    if kind.is_char_device() {
        return Ok(of_block(crate::ng::look_at(path)?.block_number));
    }
    let statx =
        rustix::fs::statx(rustix::fs::CWD, path, AtFlags::empty(), StatxFlags::BTIME | StatxFlags::INO);
    Ok(statx.ok().and_then(|statx| of_statx(&statx)).into_iter().collect())
}

/// Returns the identifiers of an open file or block device; empty if `stat` fails.
pub(crate) fn of_file(file: &File) -> Vec<String> {
    let Ok(metadata) = file.metadata() else { return Vec::new() };
    if metadata.file_type().is_block_device() {
        return of_block(metadata.rdev());
    }
    let statx = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::BTIME | StatxFlags::INO);
    statx.ok().and_then(|statx| of_statx(&statx)).into_iter().collect()
}

/// Returns the identifier of a regular file. `None` without birth times, as inode numbers are reused.
fn of_statx(statx: &rustix::fs::Statx) -> Option<String> {
    let is_reported = StatxFlags::from_bits_retain(statx.stx_mask).contains(StatxFlags::BTIME);
    let made = statx.stx_btime;
    is_reported.then(|| format!("file.{}-{}.{:09}", statx.stx_ino, made.tv_sec, made.tv_nsec))
}

/// Returns the identifiers of the block device with this device number.
pub(crate) fn of_block(number: u64) -> Vec<String> {
    of_block_in(Path::new("/sys"), rustix::fs::major(number), rustix::fs::minor(number))
}

fn of_block_in(sys: &Path, major: u32, minor: u32) -> Vec<String> {
    let Ok(folder) = fs::canonicalize(sys.join(format!("dev/block/{major}:{minor}"))) else {
        return Vec::new();
    };
    match (value(&folder, "partition"), folder.parent()) {
        (Some(part), Some(disk)) => {
            of_folder(disk).into_iter().map(|id| format!("{id}-part{part}")).collect()
        }
        _ => of_folder(&folder),
    }
}

/// Returns the identifiers of a whole disk from its sysfs directory.
fn of_folder(folder: &Path) -> Vec<String> {
    let mut ids = Vec::new();
    // NVMe disks have `wwid` in their own directory, SCSI disks in `device`.
    ids.extend(value(folder, "wwid").or_else(|| value(folder, "device/wwid")));
    // An NVMe disk may have several identifiers; the kernel uses one of them as its `wwid`.
    for (file, kind, digits) in [("uuid", "uuid", 36), ("nguid", "eui", 32), ("eui", "eui", 16)] {
        let text = value(folder, file).unwrap_or_default();
        let text = if kind == "eui" { text.replace(['-', '_'], "") } else { text };
        let id = format!("{kind}.{text}");
        if text.len() == digits && !ids.contains(&id) {
            ids.push(id);
        }
    }
    // NVMe disks have `serial` in `device`, virtio disks in their own directory.
    if let Some(serial) = value(folder, "device/serial").or_else(|| value(folder, "serial")) {
        ids.extend(value(folder, "nsid").map(|nsid| format!("serial.{serial}/{nsid}")));
        ids.push(format!("serial.{serial}"));
    }
    ids.extend(value(folder, "dm/uuid").map(|uuid| format!("dm-uuid.{uuid}")));
    ids.extend(value(folder, "md/uuid").map(|uuid| format!("md-uuid.{uuid}")));
    ids
}

/// Returns a sysfs attribute, sanitized for an identifier. `None`: missing, too long or blank.
fn value(folder: &Path, file: &str) -> Option<String> {
    let text = fs::read(folder.join(file)).ok().filter(|text| text.len() <= ATTRIBUTE_BYTES_MAX)?;
    sanitize(&String::from_utf8_lossy(&text))
}

/// Converts text of a device for use in a configuration. Keeps printable ASCII; replaces inner blanks by `_`
/// and other characters by `?`. `None` if nothing remains.
fn sanitize(text: &str) -> Option<String> {
    let text = text.trim_matches(|letter: char| letter.is_whitespace() || letter == '\0');
    let words: Vec<&str> = text.split_whitespace().collect();
    let text: String = words.join("_");
    let text = text.replace(|letter: char| !letter.is_ascii_graphic(), "?");
    (!text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::TempPath;

    #[test]
    fn a_namespace_is_named_by_what_it_has() {
        let nguid = core::array::from_fn(|at| u8::try_from(at).unwrap_or(0));
        assert_eq!(
            of_nvme("S1 2  ", 3, nguid, [0, 1, 2, 3, 4, 5, 6, 7]),
            ["serial.S1_2/3", "serial.S1_2", "eui.000102030405060708090a0b0c0d0e0f", "eui.0001020304050607"]
        );
        assert_eq!(of_nvme("S\u{7}", 1, [0; 16], [0; 8]), ["serial.S?/1", "serial.S?"]);
        assert_eq!(of_nvme("   ", 1, [0; 16], [0; 8]), [""; 0]);
    }

    #[test]
    fn block_devices_are_named_by_what_the_kernel_says_of_them() {
        let sys = TempPath::new();
        let file = |path: &str, text: &str| {
            let path = sys.path().join(path);
            fs::create_dir_all(path.parent().expect("a parent")).expect("folders");
            fs::write(path, text).expect("a file");
        };
        file("dev/block/259:0/wwid", "eui.0025385b71b0a3f1\n");
        file("dev/block/259:0/device/serial", "S4EV  \n");
        file("dev/block/259:0/nsid", "2\n");
        // One of each; the kernel's choice comes first.
        file("dev/block/259:1/wwid", "uuid.c1b9d5a2-30f9-4f0e-9b0d-8c8c4e5b7e11\n");
        file("dev/block/259:1/uuid", "c1b9d5a2-30f9-4f0e-9b0d-8c8c4e5b7e11\n");
        file("dev/block/259:1/nguid", "00010203-0405-0607-0809-0a0b0c0d0e0f\n");
        file("dev/block/259:1/eui", "00 01 02 03 04 05 06 07\n");
        file("dev/block/8:0/device/wwid", "t10.ATA     Disk  X\n");
        file("dev/block/252:0/dm/uuid", "LVM-abc\n");
        file("dev/block/253:1/serial", "\n");
        let of = |major, minor| of_block_in(sys.path(), major, minor);
        assert_eq!(of(259, 0), ["eui.0025385b71b0a3f1", "serial.S4EV/2", "serial.S4EV"]);
        let namespace = of_nvme(
            "",
            1,
            0x0001_0203_0405_0607_0809_0a0b_0c0d_0e0f_u128.to_be_bytes(),
            [0, 1, 2, 3, 4, 5, 6, 7],
        );
        let of_kernel = of(259, 1);
        assert_eq!(of_kernel[0], "uuid.c1b9d5a2-30f9-4f0e-9b0d-8c8c4e5b7e11");
        assert_eq!(of_kernel[1..], namespace, "spelt alike whichever driver has the drive");
        assert_eq!(of(8, 0), ["t10.ATA_Disk_X"]);
        assert_eq!(of(252, 0), ["dm-uuid.LVM-abc"]);
        assert_eq!((of(253, 1), of(7, 7)), (vec![], vec![]));
        // A partition lies in the directory of its disk.
        file("dev/block/259:0/nvme0n1p3/partition", "3\n");
        std::os::unix::fs::symlink("259:0/nvme0n1p3", sys.path().join("dev/block/259:3")).expect("a link");
        assert_eq!(of(259, 3)[0], "eui.0025385b71b0a3f1-part3");
        fs::remove_dir_all(sys.path()).expect("removed");
    }

    #[test]
    fn a_file_has_a_name_that_no_other_has() {
        let (first, second) = (TempPath::new(), TempPath::new());
        for path in [&first, &second] {
            fs::write(path.path(), "x").expect("written");
        }
        let (a, b) = (at(first.path()).expect("there"), at(second.path()).expect("there"));
        assert_eq!(a, of_file(&File::open(first.path()).expect("open")));
        // Not every file system keeps birth times.
        assert!(a.is_empty() || (a[0].starts_with("file.") && a != b), "{a:?} {b:?}");
        assert!(at(Path::new("/nonexistent")).is_err());
    }
}
