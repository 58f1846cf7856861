//! Giving drives back.

use super::machine::{A, B, Fake};
use super::{assert_has, done, refusal};

const RULE_A: &str = "/etc/udev/rules.d/90-spindle-nvme-0000:01:00.0.rules";
const MODULES: &str = "/etc/modules-load.d/spindle-nvme.conf";
const SYSCTL: &str = "/etc/sysctl.d/90-spindle-nvme.conf";

fn kernel() -> (Option<String>, Option<String>) {
    (Some("nvme".to_owned()), None)
}

#[test]
fn unbind_makes_the_steps_in_order_and_says_each() {
    let fake = Fake::new();
    fake.give_to_vfio(A);
    let before = fake.files();
    let printed = done(&fake, "unbind 01:00.0 --dry-run");
    assert!(fake.files() == before && fake.steps.borrow().is_empty());
    assert_eq!(
        printed,
        "echo > /sys/bus/pci/devices/0000:01:00.0/driver_override\n\
         echo 0000:01:00.0 > /sys/bus/pci/drivers/vfio-pci/unbind\n\
         echo 0000:01:00.0 > /sys/bus/pci/drivers_probe"
    );
    assert_eq!(done(&fake, "unbind 01:00.0"), format!("{printed}\n0000:01:00.0 is bound to nvme"));
    assert_eq!(fake.state(A), kernel());
}

#[test]
fn a_drive_with_the_kernel_is_left_there() {
    let fake = Fake::new();
    assert_has(&done(&fake, "unbind 01:00.0"), &["is bound to nvme already"]);
    assert!(fake.steps.borrow().is_empty());
    // But not an override that would keep it from coming back.
    fake.file("/sys/bus/pci/devices/0000:01:00.0/driver_override", "vfio-pci\n");
    done(&fake, "unbind 01:00.0");
    assert_eq!(fake.state(A), kernel());
}

#[test]
fn a_driver_that_is_not_loaded_is_loaded() {
    let fake = Fake::new();
    fake.give_to_vfio(A);
    fake.remove("/sys/bus/pci/drivers/nvme");
    assert_has(&done(&fake, "unbind 01:00.0"), &["modprobe nvme\n", "is bound to nvme"]);
}

#[test]
fn a_drive_that_a_process_drives_is_refused_with_the_process() {
    let fake = Fake::new();
    fake.give_to_vfio(A);
    fake.process(99, "spindle", "/dev/vfio/01", "02");
    let text = refusal(&fake, "unbind 01:00.0");
    assert_has(
        &text,
        &["0000:01:00.0: in use = VFIO group open: /dev/vfio/01 served by pid 99 (spindle): must not"],
    );
    fake.remove("/proc/99");
    fake.busy.borrow_mut().insert("/dev/vfio/01".to_owned());
    assert_has(&refusal(&fake, "unbind 01:00.0"), &["/dev/vfio/01 by a process that /proc does not show"]);
    assert!(fake.steps.borrow().is_empty());
    fake.busy.borrow_mut().clear();
    done(&fake, "unbind 01:00.0");
}

#[test]
fn another_driver_and_what_is_no_drive_are_refused() {
    let fake = Fake::new();
    fake.bind(A, "uio_pci_generic");
    assert_has(
        &refusal(&fake, "unbind 01:00.0"),
        &["driver = uio_pci_generic: must be vfio-pci, nvme or none"],
    );
    assert_has(&refusal(&fake, "unbind 09:00.0"), &["ADDRESS = 0000:09:00.0", A, B]);
    fake.is_root.set(false);
    assert_has(&refusal(&fake, "unbind 02:00.0"), &["user = not root: must be root"]);
    assert!(fake.steps.borrow().is_empty());
}

#[test]
fn whatever_step_fails_the_drive_is_with_vfio_again() {
    for at in 0..3 {
        let fake = Fake::new();
        fake.give_to_vfio(A);
        let before = fake.state(A);
        fake.fails_at.set(Some(at));
        let text = refusal(&fake, "unbind 01:00.0");
        assert_has(
            &text,
            &["cannot unbind: `echo ", "Invalid argument", "0000:01:00.0 is bound to vfio-pci"],
        );
        assert_eq!(fake.state(A), before, "step {at}");
    }
    let fake = Fake::new();
    fake.give_to_vfio(A);
    fake.refusing.borrow_mut().insert("nvme");
    let text = refusal(&fake, "unbind 01:00.0");
    assert_has(&text, &["the kernel's driver did not bind the drive", "0000:01:00.0 is bound to vfio-pci"]);
}

#[test]
fn what_persist_made_goes_and_with_the_last_drive_what_is_for_all() {
    let fake = Fake::new();
    fake.file("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "0\n");
    done(&fake, "bind 01:00.0 02:00.0 --persist --huge-pages 4");
    assert_has(&done(&fake, "list"), &["(persists)"]);
    done(&fake, "unbind 01:00.0");
    assert_eq!(fake.text(RULE_A), None);
    assert!(fake.text(MODULES).is_some() && fake.text(SYSCTL).is_some());
    // Somebody else's file of that name stays.
    fake.file(SYSCTL, "vm.nr_hugepages = 1000\n");
    assert_has(&done(&fake, "unbind 02:00.0"), &["rm /etc/udev/rules.d/90-spindle-nvme-0000:02:00.0.rules"]);
    assert_eq!(fake.text(MODULES), None);
    assert!(fake.text(SYSCTL).is_some());
    assert!(!done(&fake, "list").contains("(persists)"));
}

#[test]
fn the_rule_of_a_drive_that_was_pulled_out_can_go() {
    let fake = Fake::new();
    done(&fake, "bind 01:00.0 --persist");
    fake.remove("/sys/bus/pci/devices/0000:01:00.0");
    done(&fake, "unbind 01:00.0");
    assert_eq!((fake.text(RULE_A), fake.text(MODULES)), (None, None));
    assert_has(&refusal(&fake, "unbind 01:00.0"), &["ADDRESS = 0000:01:00.0"]);
}

#[test]
fn a_rule_that_cannot_be_removed_is_said() {
    let fake = Fake::new();
    done(&fake, "bind 01:00.0 --persist");
    fake.fails_at.set(Some(fake.steps.borrow().len() + 3));
    assert_has(
        &refusal(&fake, "unbind 01:00.0"),
        &["remove the rule of the bind", RULE_A, "0000:01:00.0 is bound to nvme"],
    );
}
