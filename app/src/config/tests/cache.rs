//! The cache of a disk: what it needs, which disks have one, what of it a reload can change.

use spindle_target::snapshot::Snapshot;
use spindle_target_disk::PolicyKind;

use super::*;
use crate::config::memory::{self, AllocationPhase};
use crate::config::{DiskKind, LocalDrives};

const EXCLUSIVE: &str = "size = \"1MiB\"\nmode = \"exclusive\"";
const AHEAD: &str = "size = \"1MiB\"\nread_ahead = 0";

fn disk(keys: &str, cache: &str) -> String {
    format!("{LISTENER}[[disk]]\nname = \"d\"\n{keys}\n[disk.cache]\n{cache}\n")
}

fn file(directory: &Directory, cache: &str) -> String {
    disk(&format!("kind = \"file\"\npath = \"{}\"", directory.file("d.img", 1 << 20)), cache)
}

#[test]
fn a_file_has_the_cache_that_it_is_given() {
    let directory = Directory::new();
    let cached = plan(&file(&directory, "size = \"16MiB\""));
    let cache = cached.disks[0].cache.expect("a cache");
    assert_eq!((cache.bytes, cache.policy), (16 << 20, PolicyKind::S3Fifo));
    let lru = plan(&file(&directory, "size = \"64KiB\"\npolicy = \"lru\""));
    assert_eq!(lru.disks[0].cache.expect("a cache").policy, PolicyKind::Lru);
    let text = file(&directory, "");
    let without = plan(text.split("[disk.cache]").next().expect("a beginning"));
    assert_eq!(without.disks[0].cache, None);
    // Its memory is in the sum, and resident from the start.
    let total = |plan: &Plan| memory::total_bytes(&memory::memory_items(plan), AllocationPhase::Start);
    let more = total(&cached) - total(&without);
    assert!((16 << 20..17 << 20).contains(&more), "{more}");
}

#[test]
fn a_cache_larger_than_the_memory_is_named() {
    let directory = Directory::new();
    let found = errors_on(&file(&directory, "size = \"64GiB\""), &machine());
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].contains("disk[0].cache.size = \"64GiB\""), "{found:?}");
    assert!(
        found[0].contains("the machine has 16 GiB; the largest part is this cache; make it smaller"),
        "{found:?}"
    );
    let found = errors_on(&file(&directory, "size = \"12GiB\""), &machine());
    assert!(found[0].contains("disk[0].cache.size = \"12GiB\""), "{found:?}");
    assert!(found[0].contains("8 GiB are available"), "{found:?}");
}

#[test]
fn a_section_without_a_size_and_disks_that_have_no_cache_are_refused() {
    let directory = Directory::new();
    let found = errors(&file(&directory, ""));
    assert!(found[0].contains("disk[0].cache.size: missing; a cache needs one"), "{found:?}");
    for keys in ["kind = \"ram\"\nsize = \"1MiB\"", "kind = \"null\"\nsize = \"1MiB\""] {
        let found = errors(&disk(keys, "size = \"1MiB\""));
        assert!(
            found[0].contains("disk[0].cache: a ") && found[0].contains("in memory already"),
            "{found:?}"
        );
    }
    let remote = "kind = \"remote\"\naddress = \"192.0.2.7:4420\"\nnqn = \"nqn.2026-01.test:far\"";
    let found = errors(&disk(remote, "size = \"1MiB\""));
    assert!(found[0].contains("disk[0].cache.sole_writer: must be true for a remote disk"), "{found:?}");
    assert!(plan(&disk(remote, "size = \"1MiB\"\nsole_writer = true")).disks[0].cache.is_some());
    let found = errors(&file(&directory, "size = \"1MiB\"\nsole_writer = true"));
    assert!(found[0].contains("disk[0].cache.sole_writer = true: a file disk has no such key"), "{found:?}");
    for size in ["\"63KiB\"", "65537", "\"9TiB\""] {
        let found = errors(&file(&directory, &format!("size = {size}")));
        assert!(found[0].contains(&format!("disk[0].cache.size = {size}: must be")), "{found:?}");
    }
}

/// A drive that this machine does not have: that is no error at the start.
fn drive(cache: &str) -> String {
    disk("nvme = \"ffff:ff:1f.7\"", cache)
}

#[test]
fn the_cache_of_a_drive_is_taken_at_the_start() {
    let cached = plan(&drive("size = \"64MiB\""));
    assert_eq!(cached.disks[0].cache.expect("a cache").bytes, 64 << 20);
    let sums = memory::memory_items(&cached);
    let sum = sums.iter().find(|sum| sum.reason().contains("cache, mapped for its drive")).expect("a sum");
    assert_eq!((sum.bytes(), sum.phase), (64 << 20, AllocationPhase::Start));
}

#[test]
fn caches_that_devices_reach_are_held_against_what_may_be_locked() {
    let directory = Directory::new();
    let on = |lockable_bytes| Machine { lockable_bytes, ..machine() };
    let empty = plan(LISTENER);
    let pools = empty.pool.bytes_per_core() * empty.reactor.cores.len() as u64;
    let (fits, small) = (on(Some(pools + (64 << 20))), on(Some(pools + (64 << 20) - 1)));
    let of_drive = drive("size = \"64MiB\"");
    let of_file = file(&directory, "size = \"64MiB\"");
    let over_rdma = of_file.replace(LISTENER, &format!("{LISTENER}transport = \"rdma\"\n"));
    for (text, what) in [(&of_drive, "drives"), (&over_rdma, "RDMA devices")] {
        for machine in [&fits, &on(None)] {
            assert!(!plan_on(text, machine).notes.join("\n").contains(what), "{what}");
        }
        let found = errors_on(text, &small);
        let words = format!("disk[0].cache.size = \"64MiB\": caches and all else that {what} reach come to ");
        assert!(found.len() == 1 && found[0].contains(&words), "{found:?}");
        assert!(found[0].contains("(ulimit -l)") && found[0].contains("LimitMEMLOCK=infinity"), "{found:?}");
    }
    // `spindle check` may run with another limit than the service.
    let notes = plan_on(&over_rdma, &Machine { is_for_start: false, ..small.clone() }).notes.join("\n");
    assert!(notes.contains("a process with this limit would not start"), "{notes}");
    // For optimistic reads it is registered once more, with 8 bytes for each page.
    let optimistic = format!("{over_rdma}[rdma]\noptimistic_port = 4430\n");
    let twice = pools + (128 << 20) + 8 * (64 << 20) / 4096;
    assert!(plan_on(&optimistic, &on(Some(twice))).disks[0].cache.expect("a cache").has_seals);
    assert_eq!(errors_on(&optimistic, &on(Some(twice - 1))).len(), 1);
    // So is a RAM disk. Without optimistic reads nothing is compared for it, as before there were any.
    let ram =
        format!("{LISTENER}transport = \"rdma\"\n[[disk]]\nname = \"d\"\nkind = \"ram\"\nsize = \"64MiB\"\n");
    let sealed = format!("{ram}[rdma]\noptimistic_port = 4430\n");
    plan_on(&ram, &on(Some(1)));
    let is_sealed = |it: &DiskKind| matches!(it, DiskKind::Ram { has_seals: true, .. });
    assert!(is_sealed(&plan_on(&sealed, &on(Some(twice))).disks[0].kind));
    let found = errors_on(&sealed, &on(Some(twice - 1)));
    assert!(found.len() == 1 && found[0].contains("disk[0].size = \"64MiB\": caches and all"), "{found:?}");
    let over_tcp = format!("{of_file}[rdma]\noptimistic_port = 4430\n");
    plan_on(&over_tcp, &small);
    let taken = format!("{over_rdma}[rdma]\noptimistic_port = 4420\n");
    let found = errors_on(&taken, &on(None));
    assert!(
        found.len() == 1 && found[0].contains("rdma.optimistic_port = 4420: the RDMA listener"),
        "{found:?}"
    );
    // Nothing but the kernel reaches it, or nothing keeps data.
    plan_on(&of_file, &small);
    plan_on(of_drive.split("[disk.cache]").next().expect("a beginning"), &on(Some(1)));
}

/// What a reload does with the cache of a disk that is open.
#[test]
fn a_cache_comes_and_goes_with_the_snapshot() {
    let directory = Directory::new();
    let with = |cache: &str| plan(&file(&directory, cache));
    let without = with("size = \"1MiB\"");
    let first = without.snapshot(None, &LocalDrives, &[]).expect("opened");
    let has = |snapshot: &Snapshot| {
        let disk = snapshot.disks[0].as_ref().expect("a disk");
        disk.cache().map(|cache| (cache.bytes, cache.policy))
    };
    assert_eq!(has(&first), Some((1 << 20, PolicyKind::S3Fifo)));
    let lru = with("size = \"2MiB\"\npolicy = \"lru\"");
    // What cannot be kept changes nothing.
    let mut fails = || Err(std::io::Error::other("full"));
    assert!(lru.snapshot_and_persist(Some(&first), &LocalDrives, &[], &mut fails).is_err());
    assert_eq!(has(&first), Some((1 << 20, PolicyKind::S3Fifo)));
    let second = lru.snapshot(Some(&first), &LocalDrives, &[]).expect("the same disk");
    assert_eq!(has(&second), Some((2 << 20, PolicyKind::Lru)));
    let text = file(&directory, "");
    let none = plan(text.split("[disk.cache]").next().expect("a beginning"));
    assert_eq!(has(&none.snapshot(Some(&second), &LocalDrives, &[]).expect("the same disk")), None);
}

#[test]
fn each_key_of_a_cache_is_in_the_difference_of_two_plans() {
    let directory = Directory::new();
    let with = |cache: &str| plan(&file(&directory, cache));
    let before = with("size = \"1MiB\"");
    assert_eq!(with("size = \"1MiB\"\npolicy = \"s3-fifo\"").changes(&before), []);
    for other in ["size = \"2MiB\"", "size = \"1MiB\"\npolicy = \"lru\"", EXCLUSIVE, AHEAD] {
        let changes = with(other).changes(&before);
        assert!(changes.len() == 1 && !changes[0].is_refused(), "{changes:?}");
        assert!(format!("{changes:?}").contains("disk \\\"d\\\": cache"), "{changes:?}");
    }
}
