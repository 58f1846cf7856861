//! Moving drives to vfio-pci, and everything that forbids it.

use super::machine::{A, B, Fake};
use super::{assert_has, done, refusal, run};

const NODE: &str = "/sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages";
const PAGES: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
const RULE_A: &str = "/etc/udev/rules.d/90-spindle-nvme-0000:01:00.0.rules";
const RULE_B: &str = "/etc/udev/rules.d/90-spindle-nvme-0000:02:00.0.rules";

fn vfio() -> (Option<String>, Option<String>) {
    (Some("vfio-pci".to_owned()), Some("vfio-pci".to_owned()))
}

fn kernel() -> (Option<String>, Option<String>) {
    (Some("nvme".to_owned()), None)
}

/// Refused with each of these parts, and nothing was changed.
fn assert_refused(fake: &Fake, arguments: &str, parts: &[&str]) {
    let before = fake.files();
    let text = refusal(fake, arguments);
    assert_has(&text, parts);
    assert!(fake.steps.borrow().is_empty() && fake.files() == before, "{text}");
}

#[test]
fn bind_makes_the_steps_in_order_and_says_each() {
    let fake = Fake::new();
    let said = done(&fake, "bind 0000:01:00.0 02:00.0 0000:01:00.0");
    assert_eq!(
        said,
        "modprobe vfio-pci\n\
         echo vfio-pci > /sys/bus/pci/devices/0000:01:00.0/driver_override\n\
         echo 0000:01:00.0 > /sys/bus/pci/drivers/nvme/unbind\n\
         echo 0000:01:00.0 > /sys/bus/pci/drivers_probe\n\
         0000:01:00.0 (SAMSUNG MZVL2512HCJQ-00B00, serial S0000) is bound to vfio-pci: /dev/vfio/01\n\
         echo vfio-pci > /sys/bus/pci/devices/0000:02:00.0/driver_override\n\
         echo 0000:02:00.0 > /sys/bus/pci/drivers/nvme/unbind\n\
         echo 0000:02:00.0 > /sys/bus/pci/drivers_probe\n\
         0000:02:00.0 (SAMSUNG MZVL2512HCJQ-00B00, serial S0001) is bound to vfio-pci: /dev/vfio/02"
    );
    assert_eq!((fake.state(A), fake.state(B)), (vfio(), vfio()));
}

#[test]
fn a_drive_that_holds_something_is_taken_with_force_only() {
    let fake = Fake::new();
    // The members of an array and of a volume that are not active now: nothing but their marks shows it.
    let mut medium = vec![0; 1 << 20];
    medium[4096..4100].copy_from_slice(&0xa92b_4efc_u32.to_le_bytes());
    fake.file("/dev/nvme0n1", &medium);
    fake.partition("nvme1n1", "nvme1n1p2", "259:112");
    medium.fill(0);
    medium[512..520].copy_from_slice(b"LABELONE");
    fake.file("/dev/nvme1n1p2", &medium);
    assert_refused(
        &fake,
        "bind 0000:01:00.0 0000:02:00.0",
        &[
            "0000:01:00.0: holds = linux_raid_member on nvme0n1: must be confirmed",
            "0000:02:00.0: holds = LVM2_member on nvme1n1p2: must be confirmed",
            "--force",
        ],
    );
    done(&fake, "bind --force 0000:01:00.0 0000:02:00.0");
    assert_eq!((fake.state(A), fake.state(B)), (vfio(), vfio()));
}

#[test]
fn what_the_kernel_exports_is_refused_also_with_force() {
    let fake = Fake::new();
    let namespace = "/sys/kernel/config/nvmet/subsystems/nqn.x/namespaces/1";
    fake.file(&format!("{namespace}/device_path"), "/dev/nvme0n1\n");
    fake.file(&format!("{namespace}/enable"), "1\n");
    let parts = ["in use = exported by the kernel: nvme0n1 by nvmet subsystem nqn.x, namespace 1", "disable"];
    assert_refused(&fake, "bind --force 0000:01:00.0", &parts);
}

#[test]
fn a_drive_without_a_driver_is_only_probed() {
    let fake = Fake::empty();
    fake.function(A, "0x010802");
    fake.give_to_vfio(B);
    let said = done(&fake, "bind 0000:01:00.0");
    assert!(!said.contains("unbind") && !said.contains("modprobe"), "{said}");
    assert_eq!(fake.state(A), vfio());
}

#[test]
fn a_drive_that_is_bound_already_is_left_alone() {
    let fake = Fake::new();
    fake.give_to_vfio(A);
    fake.process(99, "spindle", "/dev/vfio/01", "02");
    assert_eq!(done(&fake, "bind 01:00.0"), "0000:01:00.0 is bound to vfio-pci already: /dev/vfio/01");
    assert!(fake.steps.borrow().is_empty());
}

#[test]
fn a_dry_run_prints_the_steps_of_the_real_one_and_makes_none() {
    let arguments = "bind 01:00.0 02:00.0 --persist --huge-pages 64";
    let fake = Fake::new();
    fake.file(PAGES, "0\n");
    let before = fake.files();
    let printed = done(&fake, &format!("{arguments} --dry-run"));
    assert!(fake.steps.borrow().is_empty() && fake.files() == before);
    done(&fake, arguments);
    let made: Vec<String> = fake.steps.borrow().iter().map(ToString::to_string).collect();
    assert_eq!(printed.lines().collect::<Vec<_>>(), made);
    assert_eq!(made.len(), 1 + 2 * 3 + 1 + 4, "{printed}");
    assert_eq!(done(&fake, &format!("{arguments} --dry-run")), "nothing to change");
    // They are shown without root, too.
    fake.is_root.set(false);
    assert_eq!(done(&fake, "bind 01:00.0 --dry-run"), "nothing to change");
}

#[test]
fn each_use_of_a_drive_is_refused_with_the_device_and_what_to_do() {
    type Case<'a> = (&'a dyn Fn(&Fake), &'a [&'a str]);
    let set_up: [Case<'_>; 8] = [
        (
            &|fake| fake.mounts(&["30 1 259:01 / /data rw - ext4 /dev/nvme0n1 rw"]),
            &["0000:01:00.0: in use = mounted: nvme0n1 at /data (ext4): must not be mounted", "umount"],
        ),
        (
            &|fake| fake.mounts(&["30 1 259:01 / / rw - ext4 /dev/nvme0n1 rw"]),
            &["in use = root disk: nvme0n1 at / (ext4): must not be the disk that the machine runs from"],
        ),
        (
            &|fake| fake.file("/proc/swaps", "Filename\n/dev/nvme0n1 partition 1 0 -2\n"),
            &["in use = swap: nvme0n1: must not be swapped to", "swapoff"],
        ),
        (
            &|fake| fake.holder("nvme0n1", "md0", "9:0"),
            &["RAID member: nvme0n1 in md0 (raid1)", "mdadm --stop"],
        ),
        (
            &|fake| fake.holder("nvme0n1", "dm-0", "253:0"),
            &["volume: nvme0n1 in dm-0 (vg-data, LVM)", "vgchange"],
        ),
        (
            &|fake| fake.busy.borrow_mut().extend(["/dev/nvme0n1".to_owned()]),
            &["open exclusively: nvme0n1", "must not"],
        ),
        (
            &|fake| fake.process(7, "dd", "/dev/nvme0n1", "01"),
            &["open for writing: /dev/nvme0n1 by pid 7 (dd)"],
        ),
        (
            &|fake| fake.bind(A, "uio_pci_generic"),
            &["driver = uio_pci_generic: must be nvme, vfio-pci or none"],
        ),
    ];
    for (set_up, parts) in set_up {
        let fake = Fake::new();
        set_up(&fake);
        assert_refused(&fake, "bind 01:00.0", parts);
        // One that is refused keeps the others where they are.
        assert_refused(&fake, "bind 02:00.0 01:00.0 --dry-run", parts);
        done(&fake, "bind 02:00.0");
    }
}

#[test]
fn a_drive_is_held_from_the_last_look_until_the_kernel_has_let_go() {
    let fake = Fake::new();
    done(&fake, "bind 01:00.0 02:00.0");
    let (a, b) = (vec!["/dev/nvme0n1"], vec!["/dev/nvme1n1"]);
    let both = [a.clone(), b.clone()].concat();
    // The module; of each drive the override, the unbind, the probe.
    let expected = [both.clone(), both.clone(), both, b.clone(), b.clone(), b, vec![]];
    assert_eq!(*fake.held_at.borrow(), expected);
    assert!(fake.held.borrow().is_empty());
}

#[test]
fn a_drive_that_is_taken_after_the_last_look_stays_where_it_is() {
    let fake = Fake::new();
    *fake.is_taken_next.borrow_mut() = Some("/dev/nvme1n1".to_owned());
    assert_refused(&fake, "bind 01:00.0 02:00.0", &["0000:02:00.0: in use = nvme1n1: ", "must not be open"]);
    assert!(fake.held.borrow().is_empty());
    assert_eq!((fake.state(A), fake.state(B)), (kernel(), kernel()));
}

#[test]
fn what_is_no_drive_is_refused_with_what_there_is() {
    let fake = Fake::new();
    fake.function("0000:00:1f.2", "0x010601");
    assert_refused(&fake, "bind 00:1f.2", &["0000:00:1f.2: class = 0x010601: must be 0x010802", A, B]);
    assert_refused(&fake, "bind 09:00.0", &["ADDRESS = 0000:09:00.0", A, B]);
    assert_refused(&Fake::empty(), "bind 09:00.0", &["ADDRESS = 0000:09:00.0", "this machine has none"]);
}

#[test]
fn all_that_is_wrong_is_said_at_once() {
    let fake = Fake::new();
    fake.is_root.set(false);
    fake.mounts(&["30 1 259:01 / /data rw - ext4 /dev/nvme0n1 rw"]);
    assert_refused(
        &fake,
        "bind 01:00.0 02:00.0 --huge-pages 4",
        &[
            "user = not root: must be root",
            "at /data",
            "0000:02:00.0: in use = not known (",
            "--huge-pages = 4",
            PAGES,
        ],
    );
}

#[test]
fn a_machine_without_iommu_is_told_what_to_turn_on() {
    let fake = Fake::new();
    for address in [A, B] {
        fake.remove(&format!("/sys/bus/pci/devices/{address}/iommu_group"));
    }
    // Another device has one: then it is the slot.
    assert_refused(&fake, "bind 01:00.0", &["iommu_group = none", "does not cover this drive's slot"]);
    fake.remove("/sys/kernel/iommu_groups");
    assert_refused(&fake, "bind 01:00.0", &["iommu_group = none", "VT-d", "boot with intel_iommu=on"]);
    fake.file("/proc/cmdline", "intel_iommu=on\n");
    assert_refused(
        &fake,
        "bind 01:00.0",
        &["the kernel has intel_iommu=on and found no IOMMU; turn VT-d on"],
    );
    fake.file("/proc/cpuinfo", "vendor_id : AuthenticAMD\n");
    assert_refused(&fake, "bind 01:00.0", &["AMD-Vi", "amd_iommu=on"]);
    fake.remove("/proc/cpuinfo");
    assert_refused(&fake, "bind 01:00.0", &["turn it on in the firmware"]);
}

#[test]
fn a_group_is_given_whole_or_not_at_all() {
    let fake = Fake::new();
    fake.function("0000:00:1c.0", "0x060400");
    fake.bind("0000:00:1c.0", "pcieport");
    fake.function("0000:03:00.0", "0x020000");
    fake.group("0000:00:1c.0", "01");
    fake.group("0000:03:00.0", "01");
    done(&fake, "bind 01:00.0 --dry-run");
    fake.bind("0000:03:00.0", "e1000e");
    let parts = ["0000:01:00.0: iommu_group = 01 with 0000:03:00.0 (e1000e): must have no other function"];
    assert_refused(&fake, "bind 01:00.0", &parts);
    fake.bind("0000:03:00.0", "pci-stub");
    fake.group(B, "01");
    assert_refused(&fake, "bind 01:00.0", &["01 with 0000:02:00.0 (nvme)"]);
    done(&fake, "bind 01:00.0 02:00.0");
    assert_eq!((fake.state(A), fake.state(B)), (vfio(), vfio()));
}

#[test]
fn whatever_step_fails_the_drive_is_with_the_kernel_again() {
    for at in 1..4 {
        let fake = Fake::new();
        fake.fails_at.set(Some(at));
        let text = refusal(&fake, "bind 01:00.0");
        assert_has(&text, &["cannot bind: `echo ", "Invalid argument", "0000:01:00.0 is bound to nvme"]);
        assert_eq!(fake.state(A), kernel(), "step {at}: {text}");
    }
    let fake = Fake::new();
    fake.fails_at.set(Some(0));
    assert_has(&refusal(&fake, "bind 01:00.0"), &["`modprobe vfio-pci`", "no drive was bound"]);
    assert_eq!(fake.steps.borrow().len(), 1);
}

#[test]
fn a_drive_that_vfio_does_not_take_goes_back() {
    let fake = Fake::new();
    fake.refusing.borrow_mut().insert("vfio-pci");
    let text = refusal(&fake, "bind 01:00.0");
    assert_has(&text, &["vfio-pci did not bind the drive", "0000:01:00.0 is bound to nvme"]);
    assert_eq!(fake.state(A), kernel());
    // Nor does the kernel's: then it is said whose it is.
    fake.refusing.borrow_mut().insert("nvme");
    assert_has(&refusal(&fake, "bind 01:00.0"), &["0000:01:00.0 is bound to no driver"]);
}

#[test]
fn persist_makes_a_rule_with_the_serial_number_and_loads_the_module_at_boot() {
    let fake = Fake::new();
    done(&fake, "bind 01:00.0 --persist");
    let rule = fake.text(RULE_A).expect("a rule");
    assert_has(
        &rule,
        &[
            "# serial: S0000\n",
            "ACTION==\"add\", SUBSYSTEM==\"pci\", KERNEL==\"0000:01:00.0\", \
             RUN+=\"/usr/local/bin/spindle nvme bind --from-rule 0000:01:00.0\"\n",
        ],
    );
    assert!(fake.text("/etc/modules-load.d/spindle-nvme.conf").expect("modules").ends_with("\nvfio-pci\n"));
    // Again, now that the drive does not tell its number: the rule keeps it.
    fake.program.replace("/usr/bin/spindle".to_owned());
    assert!(!done(&fake, "bind 01:00.0 --persist").contains("cannot be read"));
    assert_eq!(fake.text(RULE_A), Some(rule.replace("/usr/local/bin", "/usr/bin")));
    assert!(fake.text(RULE_B).is_none());
}

#[test]
fn a_rule_without_a_serial_number_says_so() {
    let fake = Fake::new();
    fake.give_to_vfio(A);
    assert_has(
        &done(&fake, "bind 01:00.0 --persist"),
        &["the serial number of a drive that is bound to vfio-pci cannot be read", A],
    );
    assert!(!fake.text(RULE_A).expect("a rule").contains("serial"));
}

#[test]
fn a_program_that_a_rule_cannot_run_is_refused() {
    let fake = Fake::new();
    for program in
        ["/opt/my tools/spindle", "/opt/%k/spindle", "/opt/$x/spindle", "/opt/\"x/spindle", "spindle"]
    {
        fake.program.replace(program.to_owned());
        let field = format!("--persist: this program = {program}: must be an absolute path");
        assert_refused(&fake, "bind 01:00.0 --persist", &[&field]);
    }
}

#[test]
fn a_rule_that_cannot_be_written_leaves_the_drive_bound_and_says_so() {
    let fake = Fake::new();
    fake.fails_at.set(Some(4));
    assert_has(
        &refusal(&fake, "bind 01:00.0 --persist"),
        &["make the bind persistent", RULE_A, "bound to vfio-pci: 0000:01:00.0"],
    );
    assert_eq!((fake.state(A), fake.text(RULE_A)), (vfio(), None));
}

#[test]
fn a_rule_takes_only_the_drive_that_it_was_made_for() {
    let fake = Fake::new();
    fake.file(RULE_A, "# serial: S0001\n");
    assert_refused(&fake, "bind --from-rule 01:00.0", &["serial = S0000: must be S0001"]);
    fake.file(RULE_A, "# serial: S0000\n");
    // The disk that the machine runs from may stand there now.
    fake.mounts(&["30 1 259:01 / / rw - ext4 /dev/nvme0n1 rw"]);
    assert_refused(&fake, "bind --from-rule 01:00.0", &["root disk"]);
    fake.mounts(&[]);
    done(&fake, "bind --from-rule 01:00.0");
    assert_eq!(fake.state(A), vfio());
    assert_eq!(fake.pauses.get(), 0);
}

#[test]
fn a_rule_waits_for_a_drive_that_is_not_ready_but_not_for_ever() {
    // Plugged in a moment ago: no driver has it yet.
    let fake = Fake::empty();
    fake.function(A, "0x010802");
    fake.file(RULE_A, "# serial: S0000\n");
    let said = done(&fake, "bind --from-rule 01:00.0");
    assert!(said.starts_with("modprobe nvme\necho 0000:01:00.0 > /sys/bus/pci/drivers_probe\n"), "{said}");
    assert_eq!(fake.state(A), vfio());
    // Its driver is not done with it, and never will be.
    let fake = Fake::new();
    fake.file(RULE_A, "# serial: S0000\n");
    fake.file("/sys/bus/pci/devices/0000:01:00.0/nvme/nvme0/state", "resetting\n");
    fake.file("/sys/bus/pci/devices/0000:01:00.0/nvme/nvme0/serial", "\n");
    assert_refused(&fake, "bind --from-rule 01:00.0", &["serial = not known: must be S0000"]);
    assert_eq!(fake.pauses.get(), 100);
}

#[test]
fn huge_pages_are_reserved_on_the_node_of_the_drive() {
    let fake = Fake::new();
    fake.file(PAGES, "0\n");
    fake.file(NODE, "10\n");
    fake.file("/sys/bus/pci/devices/0000:02:00.0/numa_node", "1\n");
    let said = done(&fake, "bind 01:00.0 02:00.0 --huge-pages 64 --persist");
    assert_has(
        &said,
        &[
            &format!("echo 64 > {NODE}"),
            "NUMA node 1 has 64 huge pages of 2 MiB (it had 10; 64 are wanted)",
            "the machine has 64 huge pages of 2 MiB (it had 0; 64 are wanted)",
        ],
    );
    let kept = fake.text("/etc/tmpfiles.d/spindle-nvme.conf").expect("kept");
    assert_has(&kept, &[&format!("w {NODE} - - - - 64\n"), &format!("w {PAGES} - - - - 64\n")]);
    // None is taken away, and what is there is enough.
    let said = done(&fake, "bind 02:00.0 --huge-pages 8");
    assert!(said.contains("it had 64; 64 are wanted") && !said.contains("echo"), "{said}");
}

#[test]
fn huge_pages_of_a_machine_with_one_node_are_kept_by_sysctl() {
    let fake = Fake::new();
    fake.file(PAGES, "0\n");
    done(&fake, "bind 01:00.0 --huge-pages 64 --persist");
    let kept = fake.text("/etc/sysctl.d/90-spindle-nvme.conf").expect("kept");
    assert!(kept.ends_with("\nvm.nr_hugepages = 64\n"), "{kept}");
    assert!(fake.text("/etc/tmpfiles.d/spindle-nvme.conf").is_none());
}

#[test]
fn too_few_huge_pages_are_an_error_that_says_how_many_there_are() {
    let fake = Fake::new();
    fake.file(PAGES, "2\n");
    fake.pages_max.set(12);
    let (lines, result) = run(&fake, "bind 01:00.0 --huge-pages 64");
    assert_has(&lines.join("\n"), &["the machine has 12 huge pages of 2 MiB (it had 2; 64 are wanted)"]);
    let text = result.expect_err("too few").to_string();
    assert_has(&text, &["the machine gave 12 huge pages of 64", "bound to vfio-pci: 0000:01:00.0"]);
    assert_eq!(fake.state(A), vfio());
}
