//! What is found out about drives.

use std::fs;
use std::path::PathBuf;

use serde_json::{Value, json};

use super::machine::{A, B, Fake};
use super::{assert_has, done};

fn drives(fake: &Fake) -> Value {
    let object: Value = serde_json::from_str(&done(fake, "list --json")).expect("JSON");
    object["drives"].clone()
}

/// Kind, device and what, of the first drive's uses.
fn uses(fake: &Fake) -> Vec<String> {
    let drives = drives(fake);
    let uses = drives[0]["uses"].as_array().expect("a list").iter();
    let text = |value: &Value, key: &str| value[key].as_str().expect("text").to_owned();
    let uses: Vec<String> = uses
        .map(|found| format!("{} {} {}", text(found, "kind"), text(found, "device"), text(found, "what")))
        .collect();
    assert_eq!(drives[0]["in_use"], json!(!uses.is_empty()));
    uses
}

#[test]
fn every_nvme_function_is_listed_with_what_the_kernel_knows() {
    let fake = Fake::new();
    fake.function("0000:00:1f.2", "0x010601");
    fake.file("/sys/bus/pci/devices/0000:02:00.0/numa_node", "1\n");
    let drives = drives(&fake);
    assert_eq!(drives.as_array().map(Vec::len), Some(2));
    assert_eq!(
        drives[0],
        json!({
            "address": A, "model": "SAMSUNG MZVL2512HCJQ-00B00", "serial": "S0000", "vendor": "144d",
            "device": "a808", "driver": "nvme", "iommu_group": "01", "numa_node": null,
            "bytes": 1_u64 << 30, "namespaces": [{ "device": "nvme0n1", "bytes": 1_u64 << 30 }], "holds": [],
            "in_use": false, "uses": [], "unknown": null, "persistent": false,
        })
    );
    assert_eq!(drives[1]["numa_node"], 1);
    let table = done(&fake, "list");
    assert_has(&table, &[A, B, "SAMSUNG", "S0001", "144d:a808", "nvme", "1 GiB", "no"]);
}

#[test]
fn a_machine_without_drives_says_so() {
    let fake = Fake::empty();
    assert_eq!(done(&fake, "list"), "no NVMe drive on the PCI bus");
    assert_eq!(done(&fake, "list --json"), r#"{"drives":[]}"#);
    fake.remove("/sys");
    fake.remove("/proc");
    assert_eq!(drives(&fake), json!([]));
}

#[test]
fn a_drive_without_the_kernel_has_no_name_and_no_size() {
    let fake = Fake::new();
    fake.give_to_vfio(A);
    let drives = drives(&fake);
    for key in ["model", "serial", "bytes"] {
        assert_eq!(drives[0][key], Value::Null, "{key}");
    }
    assert_eq!((&drives[0]["driver"], &drives[0]["in_use"]), (&json!("vfio-pci"), &json!(false)));
    assert!(done(&fake, "list").contains("vfio-pci"));
}

#[test]
fn several_namespaces_and_multipath_are_disks_of_their_drive() {
    let fake = Fake::new();
    fake.namespace(A, 0, "n2");
    // A path is hidden; the disk stands elsewhere.
    let path = "/sys/devices/pci0000:00/0000:01:00.0/nvme/nvme0/nvme3c0n7";
    fake.file(&format!("{path}/size"), "2097152\n");
    fake.block("nvme3n7", "/sys/devices/virtual/nvme-subsystem/nvme-subsys3/nvme3n7", "259:77");
    fake.mounts(&["40 1 259:77 / /multi rw - xfs /dev/nvme3n7 rw"]);
    let drives = drives(&fake);
    let names: Vec<&Value> =
        drives[0]["namespaces"].as_array().expect("a list").iter().map(|disk| &disk["device"]).collect();
    assert_eq!(names, ["nvme0n1", "nvme0n2", "nvme3n7"]);
    assert_eq!(drives[0]["bytes"], json!(3_u64 << 30));
    assert_eq!(uses(&fake), ["mounted nvme3n7 at /multi (xfs)"]);
}

#[test]
fn mounts_are_found_on_the_disk_and_on_its_partitions() {
    let fake = Fake::new();
    assert_eq!(uses(&fake), [""; 0]);
    fake.partition("nvme0n1", "nvme0n1p1", "259:101");
    fake.mounts(&[
        r"30 1 259:101 / /my\040data rw,noatime shared:1 master:2 - ext4 /dev/nvme0n1p1 rw",
        "31 1 259:99 / /other rw - ext4 /dev/sda1 rw",
    ]);
    assert_eq!(uses(&fake), ["mounted nvme0n1p1 at /my data (ext4)"]);
    // Only in the mount namespace of the machine.
    fake.mounts(&[]);
    fake.file("/proc/1/mountinfo", "30 1 259:01 / /data rw - ext4 /dev/nvme0n1 rw\n");
    assert_eq!(uses(&fake), ["mounted nvme0n1 at /data (ext4)"]);
}

#[test]
fn a_root_on_raid_on_a_volume_on_a_partition_is_the_root_disk() {
    let fake = Fake::new();
    fake.partition("nvme0n1", "nvme0n1p2", "259:102");
    fake.holder("nvme0n1p2", "md127", "9:127");
    fake.partition("md127", "md127p1", "259:103");
    fake.holder("md127p1", "dm-0", "253:0");
    fake.mounts(&["22 1 253:0 / / rw - ext4 /dev/mapper/vg-root rw"]);
    assert_eq!(
        uses(&fake),
        [
            "root_disk dm-0 at / (ext4)",
            "raid nvme0n1p2 in md127 (raid1)",
            "volume md127p1 in dm-0 (vg-data, LVM)",
        ]
    );
}

#[test]
fn a_btrfs_of_several_drives_names_only_one_and_counts_for_all() {
    let fake = Fake::new();
    for name in ["nvme0n1", "nvme1n1"] {
        fake.link(&format!("/sys/fs/btrfs/1234-abcd/devices/{name}"), "../../../../class/block/x");
    }
    fake.mounts(&["22 1 0:31 /@root / rw - btrfs /dev/nvme1n1 rw,subvol=/@root"]);
    assert_eq!(uses(&fake), ["root_disk nvme0n1 at / (btrfs)"]);
    fake.mounts(&[]);
    assert_eq!(uses(&fake), ["mounted nvme0n1 in the btrfs 1234-abcd"]);
}

#[test]
fn a_bcachefs_names_all_its_drives_in_one_source() {
    let fake = Fake::new();
    fake.mounts(&["50 1 0:40 / /pool rw - bcachefs /dev/sda:/dev/nvme0n1:/dev/nvme1n1 rw"]);
    assert_eq!(uses(&fake), ["mounted nvme0n1 at /pool (bcachefs)"]);
}

#[test]
fn swap_is_found_below_a_volume_that_is_named_by_a_link() {
    let fake = Fake::new();
    fake.holder("nvme0n1", "dm-3", "253:3");
    fake.link("/dev/mapper/vg-swap", "../dm-3");
    fake.file(
        "/proc/swaps",
        "Filename\tType\n/dev/mapper/vg-swap partition 1 0 -2\n/swap\\040file file 1 0 -3\n",
    );
    assert_eq!(uses(&fake), ["swap dm-3 ", "volume nvme0n1 in dm-3 (vg-data, LVM)"]);
    // Links in a circle are no device.
    fake.link("/dev/mapper/vg-swap", "vg-swap");
    assert_eq!(uses(&fake), ["volume nvme0n1 in dm-3 (vg-data, LVM)"]);
}

#[test]
fn loop_devices_and_what_is_on_them_count() {
    let fake = Fake::new();
    fake.block("loop0", "/sys/devices/virtual/block/loop0", "7:0");
    fake.link("/sys/block/loop0", "../devices/virtual/block/loop0");
    fake.file("/sys/devices/virtual/block/loop0/loop/backing_file", "/dev/nvme0n1\n");
    fake.mounts(&["50 1 7:0 / /iso ro - iso9660 /dev/loop0 ro"]);
    assert_eq!(uses(&fake), ["mounted loop0 at /iso (iso9660)", "loop nvme0n1 in loop0"]);
}

#[test]
fn who_has_it_open_is_named_unless_he_only_reads() {
    let fake = Fake::new();
    fake.process(41, "blkid", "/dev/nvme0n1", "0100000");
    assert_eq!(uses(&fake), [""; 0]);
    fake.process(42, "dd", "/dev/nvme0n1", "0100001");
    fake.process(43, "spindle", "/dev/ng0n1", "0100002");
    fake.process(44, "other", "/dev/nvme1n1", "0100002");
    assert_eq!(uses(&fake), ["open /dev/ng0n1 by pid 43 (spindle)", "open /dev/nvme0n1 by pid 42 (dd)"]);
    // What is known says more than that it is open exclusively.
    fake.busy.borrow_mut().insert("/dev/nvme0n1".to_owned());
    assert_eq!(uses(&fake).len(), 3);
    fake.mounts(&["30 1 259:01 / /data rw - ext4 /dev/nvme0n1 rw"]);
    assert!(!uses(&fake).join("\n").contains("exclusive"));
}

#[test]
fn a_device_is_known_by_its_number_whatever_its_name_and_so_is_its_controller() {
    let fake = Fake::new();
    // A node that somebody made elsewhere.
    fake.process(51, "dd", "/tmp/mine", "0100002");
    assert_eq!(uses(&fake), [""; 0]);
    fake.file("/devices-of-the-test/proc/51/fd/7", "b 259:01\n");
    assert_eq!(uses(&fake), ["open /dev/nvme0n1 by pid 51 (dd) as /tmp/mine"]);
    fake.file("/devices-of-the-test/proc/51/fd/7", "c 259:01\n");
    assert_eq!(uses(&fake), [""; 0], "a character device of that number is another");
    fake.file("/sys/class/nvme-generic/ng0n1/dev", "240:7\n");
    fake.file("/devices-of-the-test/proc/51/fd/7", "c 240:7\n");
    assert_eq!(uses(&fake), ["open /dev/ng0n1 by pid 51 (dd) as /tmp/mine"]);
    fake.process(52, "nvme", "/dev/nvme0", "0100002");
    fake.remove("/proc/51");
    assert_eq!(uses(&fake), ["open /dev/nvme0 by pid 52 (nvme)"]);
}

#[test]
fn what_the_kernels_own_targets_export_is_in_use() {
    let fake = Fake::new();
    let nvmet = "/sys/kernel/config/nvmet/subsystems/nqn.x";
    fake.link("/dev/disk/by-id/nvme-x", "../../nvme0n1");
    fake.file(&format!("{nvmet}/namespaces/1/device_path"), "/dev/disk/by-id/nvme-x\n");
    fake.file(&format!("{nvmet}/namespaces/1/enable"), "0\n");
    assert_eq!(uses(&fake), [""; 0], "not enabled");
    fake.file(&format!("{nvmet}/namespaces/1/enable"), "1\n");
    assert_eq!(uses(&fake), ["exported nvme0n1 by nvmet subsystem nqn.x, namespace 1"]);
    fake.remove(&format!("{nvmet}/namespaces"));
    fake.file(&format!("{nvmet}/passthru/device_path"), "/dev/nvme0\n");
    fake.file(&format!("{nvmet}/passthru/enable"), "1\n");
    assert_eq!(uses(&fake), ["exported nvme0 by nvmet subsystem nqn.x, passthru"]);
    fake.remove(nvmet);
    fake.partition("nvme0n1", "nvme0n1p1", "259:101");
    fake.file("/sys/kernel/config/target/core/iblock_0/d/udev_path", "/dev/nvme0n1p1\n");
    fake.file("/sys/kernel/config/target/core/iblock_0/d/enable", "1\n");
    assert_eq!(uses(&fake), ["exported nvme0n1p1 by LIO backstore iblock_0/d"]);
}

#[test]
fn what_only_the_kernel_knows_shows_as_open_exclusively() {
    let fake = Fake::new();
    fake.busy.borrow_mut().insert("/dev/nvme0n1".to_owned());
    assert_eq!(uses(&fake), ["exclusive nvme0n1 by another user of the device"]);
}

#[test]
fn who_is_not_root_is_told_what_is_not_known() {
    let fake = Fake::new();
    fake.is_root.set(false);
    let drives = drives(&fake);
    assert_eq!(drives[0]["in_use"], Value::Null);
    assert_has(drives[0]["unknown"].as_str().expect("a reason"), &["nvme0n1", "Permission denied"]);
    assert_has(&done(&fake, "list"), &["not known"]);
}

#[test]
fn a_vfio_drive_names_the_process_that_has_its_group_or_its_device() {
    let fake = Fake::new();
    fake.give_to_vfio(A);
    fake.file("/sys/bus/pci/devices/0000:01:00.0/vfio-dev/vfio3/dev", "511:3\n");
    fake.process(99, "spindle", "/dev/vfio/01", "02");
    fake.process(98, "qemu (x)", "/dev/vfio/devices/vfio3", "02");
    fake.process(97, "qemu", "/dev/vfio/02", "02");
    assert_eq!(
        uses(&fake),
        ["vfio /dev/vfio/01 served by pid 99 (spindle)", "vfio /dev/vfio/devices/vfio3 by pid 98 (qemu (x))",]
    );
}

#[test]
fn a_vfio_group_that_is_open_in_secret_is_in_use() {
    let fake = Fake::new();
    fake.give_to_vfio(A);
    fake.busy.borrow_mut().insert("/dev/vfio/01".to_owned());
    assert_eq!(uses(&fake), ["vfio /dev/vfio/01 by a process that /proc does not show"]);
}

#[test]
fn what_udev_found_on_it_is_said_and_forbids_nothing() {
    let fake = Fake::new();
    fake.partition("nvme0n1", "nvme0n1p1", "259:101");
    fake.file("/run/udev/data/b259:01", "N:nvme0n1\nE:ID_PART_TABLE_TYPE=gpt\n");
    fake.file("/run/udev/data/b259:101", "E:ID_FS_TYPE=LVM2_member\nE:ID_PART_TABLE_TYPE=gpt\n");
    assert_eq!(drives(&fake)[0]["holds"], json!(["gpt on nvme0n1", "LVM2_member on nvme0n1p1"]));
    assert_eq!(uses(&fake), [""; 0]);
    assert_has(&done(&fake, "list"), &["(holds LVM2_member on nvme0n1p1)"]);
}

#[test]
fn holders_in_a_circle_end() {
    let fake = Fake::new();
    fake.holder("nvme0n1", "dm-0", "253:0");
    fake.link("/sys/class/block/dm-0/holders/nvme0n1", "../../../..");
    assert_eq!(uses(&fake).len(), 2);
}

#[test]
fn what_a_device_says_cannot_command_the_terminal() {
    let fake = Fake::new();
    fake.file("/sys/bus/pci/devices/0000:01:00.0/nvme/nvme0/model", b"evil\x1b[2J\xff\xfe\n");
    let table = done(&fake, "list");
    assert!(!table.contains('\u{1b}') && table.contains("evil?[2J"), "{table}");
}

/// A machine with something of everything.
fn crowded() -> Fake {
    let fake = Fake::new();
    fake.partition("nvme0n1", "nvme0n1p1", "259:101");
    fake.holder("nvme0n1p1", "dm-0", "253:0");
    fake.holder("nvme1n1", "md0", "9:0");
    fake.function("0000:03:00.0", "0x010802");
    fake.give_to_vfio("0000:03:00.0");
    fake.process(99, "spindle", "/dev/vfio/03", "02");
    fake.link("/sys/fs/btrfs/1234-abcd/devices/nvme1n1", "../../../../class/block/x");
    fake.link("/dev/mapper/vg-swap", "../dm-0");
    fake.file("/proc/swaps", "Filename\n/dev/mapper/vg-swap partition 1 0 -2\n");
    fake.file("/run/udev/data/b259:01", "E:ID_PART_TABLE_TYPE=gpt\n");
    fake.file("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "0\n");
    fake
}

#[test]
fn no_file_that_is_missing_or_says_nonsense_is_a_panic() {
    let nonsense: [&[u8]; 5] = [
        b"",
        b"\xff\xfe\x00\n\n - - - \\",
        b"18446744073709551615\n",
        b"a - b\n1 2 3 4 5 - x\n\\777 \\1 / \\040 - \\ \\\n",
        b"/dev/\n/dev/x/../../..\n::::\n-1\nflags:\tzz\n",
    ];
    let fake = crowded();
    let files: Vec<PathBuf> = fake.files().into_iter().map(|(path, _)| path).collect();
    assert!(files.len() > 60, "{}", files.len());
    for path in files {
        let kept = path.with_extension("kept");
        fs::rename(&path, &kept).expect("moved");
        for bytes in nonsense.iter().map(Some).chain([None]) {
            if let Some(bytes) = bytes {
                fs::write(&path, bytes).expect("written");
            }
            for command in ["list", "list --json"] {
                done(&fake, command);
            }
            for command in ["bind --dry-run --huge-pages 8 --persist", "unbind --dry-run"] {
                let _ = super::run(&fake, &format!("{command} {A} {B} 0000:03:00.0"));
            }
        }
        let _ = fs::remove_file(&path);
        fs::rename(&kept, &path).expect("moved back");
    }
}
