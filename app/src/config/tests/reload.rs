//! From a plan to a snapshot, and from one to the next.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use spindle_target::snapshot::{DiskId, Snapshot};

use super::*;
use crate::config::snapshot::SnapshotError;
use crate::config::{Change, DiskKind, LocalDrives, Origin, RunningState};

fn snapshot(plan: &Plan, previous: Option<&Snapshot>) -> Arc<Snapshot> {
    plan.snapshot(previous, &LocalDrives, &[]).unwrap_or_else(|error| panic!("{error}"))
}

/// Why there is no snapshot.
fn refusal(plan: &Plan, previous: Option<&Snapshot>) -> SnapshotError {
    plan.snapshot(previous, &LocalDrives, &[]).err().expect("it is refused")
}

fn two_disks() -> String {
    [LISTENER, &ram("a"), &ram("b"), &subsystem("s", &["a", "b"])].concat()
}

/// What a reload says that it does.
fn changes(from: &str, to: &str) -> Vec<String> {
    plan(to).changes(&plan(from)).iter().map(Change::to_string).collect()
}

#[test]
fn a_reload_compares_values_and_not_their_texts() {
    let socket = |path: &str| format!("[control]\nsocket = \"{path}\"\n");
    assert_eq!(changes(&socket("/run/spindle//s"), &socket("/run/spindle/s")), [""; 0]);
    let file =
        |path: &str| format!("[[disk]]\nname = \"a\"\nkind = \"file\"\nsize = \"1MiB\"\npath = \"{path}\"\n");
    assert_eq!(changes(&file("/tmp//a"), &file("/tmp/a")), [""; 0]);
    let named = subsystem("s", &[]).replace("allow_any_host = true", "hosts = [\"any\"]");
    assert_eq!(changes(&subsystem("s", &[]), &named).len(), 1);
}

#[test]
fn a_first_snapshot_has_all_that_the_file_says() {
    let referral = "[[referral]]\naddress = \"10.0.0.2:8009\"\n";
    let snapshot = snapshot(&plan(&[&two_disks(), referral].concat()), None);
    assert_eq!(snapshot.generation, 1);
    let names: Vec<_> =
        snapshot.disks.iter().flatten().map(|disk| (disk.name().to_owned(), disk.kind())).collect();
    assert_eq!(names, [("a".to_owned(), "ram"), ("b".to_owned(), "ram")]);
    assert_eq!(
        (snapshot.listeners[0].port_id, snapshot.listeners[0].address.to_string()),
        (1, "127.0.0.1:4420".to_owned())
    );
    assert_eq!(
        (snapshot.referrals[0].port_id, snapshot.referrals[0].address.to_string()),
        (1, "10.0.0.2:8009".to_owned())
    );
    let subsystem = &snapshot.subsystems[0];
    assert_eq!(
        (subsystem.listeners.as_slice(), subsystem.cntlid_range, subsystem.io_queues_max),
        (&[0][..], (1, 0xffef), 64)
    );
    let namespace = subsystem.namespace(2).expect("namespace 2");
    assert_eq!((namespace.nsid, namespace.disk, namespace.source.name()), (2, DiskId(1), "b"));
    assert_eq!(namespace.geometry.bytes(), 64 << 20);
    assert!(subsystem.namespace(3).is_none());
}

#[test]
fn a_drive_that_is_absent_is_left_out_with_its_namespaces_also_by_what_follows() {
    let drive = "[[disk]]\nname = \"d\"\nnvme = \"fffe:ff:1f.7\"\n";
    let plan = plan(&[LISTENER, drive, &ram("a"), &subsystem("s", &["d", "a"])].concat());
    let first = snapshot(&plan, None);
    let second = snapshot(&plan, Some(&first));
    for snapshot in [&first, &second] {
        let names: Vec<_> = snapshot.disks.iter().flatten().map(|disk| disk.name().to_owned()).collect();
        assert_eq!(names, ["a"]);
        let nsids: Vec<_> = snapshot.subsystems[0].active().map(|namespace| namespace.nsid).collect();
        assert_eq!(nsids, [2], "the other keeps its number");
        assert_eq!(plan.absent(Some(snapshot)), [Origin::Drive("fffe:ff:1f.7".parse().expect("an address"))]);
    }
    let fewer = super::plan(&[LISTENER, &ram("a"), &subsystem("s", &["a"])].concat());
    assert_eq!(fewer.absent(Some(&snapshot(&fewer, Some(&second)))), []);
}

#[test]
fn a_disk_that_stays_is_the_same_disk_and_keeps_its_counters() {
    let first = snapshot(&plan(&two_disks()), None);
    let counted = first.subsystems[0].namespace(1).expect("namespace 1");
    counted.counters.core(0).reads.store(7, Ordering::Relaxed);
    let reordered = [&subsystem("s", &["a", "b"]), &ram("b"), &ram("a"), LISTENER].concat();
    let second = snapshot(&plan(&reordered), Some(&first));
    assert_eq!(second.generation, 2);
    let kept = second.subsystems[0].namespace(1).expect("namespace 1");
    assert_eq!((kept.disk, kept.uuid, kept.counters.totals().reads), (counted.disk, counted.uuid, 7));
    assert!(Arc::ptr_eq(&kept.source, &counted.source));
}

#[test]
fn a_namespace_of_which_either_identity_is_new_is_another_one() {
    let identity = |uuid: u128, nguid: u128| {
        let uuid = uuid::Uuid::from_u128(uuid);
        let identity = format!("uuid = \"{uuid}\"\nnguid = \"{nguid:032x}\"\n");
        plan(&[LISTENER, &ram("a"), &subsystem("s", &["a"]), &identity].concat())
    };
    let first = snapshot(&identity(1, 2), None);
    first.subsystems[0].namespace(1).expect("namespace 1").counters.core(0).reads.store(7, Ordering::Relaxed);
    for (uuid, nguid, reads) in [(1, 2, 7), (3, 2, 0), (1, 4, 0)] {
        let next = snapshot(&identity(uuid, nguid), Some(&first));
        let namespace = next.subsystems[0].namespace(1).expect("namespace 1");
        let found = (u128::from_be_bytes(namespace.uuid), u128::from_be_bytes(namespace.nguid));
        assert_eq!(found, (uuid, nguid));
        assert_eq!(namespace.counters.totals().reads, reads, "{found:?}");
    }
}

#[test]
fn a_removed_disks_slot_is_used_again_once_no_core_has_the_disk() {
    let first = snapshot(&plan(&two_disks()), None);
    let without_a = [LISTENER, &ram("b"), &subsystem("s", &["b"])].concat();
    let second = snapshot(&plan(&without_a), Some(&first));
    assert!(second.disks[0].is_none());
    let namespace = second.subsystems[0].namespace(1).expect("namespace 1");
    assert_eq!((namespace.disk, namespace.counters.totals().reads), (DiskId(1), 0));
    let third = snapshot(&plan(&two_disks()), Some(&second));
    assert!(third.disks[0].is_none(), "a core may still serve the first snapshot");
    let named = |snapshot: &Snapshot| snapshot.subsystems[0].namespace(1).map(|it| (it.disk, it.uuid));
    assert_eq!(named(&third).map(|it| it.0), Some(DiskId(2)));
    let former = named(&first).map(|it| it.1);
    drop(first);
    let fourth = snapshot(&plan(&without_a), Some(&third));
    drop(third);
    let fifth = snapshot(&plan(&two_disks()), Some(&fourth));
    assert_eq!((fifth.disks.len(), named(&fifth).map(|it| it.0)), (2, Some(DiskId(0))));
    assert_ne!(named(&fifth).map(|it| it.1), former, "an empty disk is another one, also in the same slot");
}

#[test]
fn a_file_disk_is_made_and_grows_and_is_never_cut() {
    let directory = Directory::new();
    let path = directory.0.join("made");
    let disk = |size: &str| {
        format!(
            "[[disk]]\nname = \"f\"\nkind = \"file\"\npath = \"{}\"\ncreate = true\nsize = \"{size}\"\n",
            path.display()
        )
    };
    let text = |size: &str| [LISTENER, &disk(size), &subsystem("s", &["f"])].concat();
    let length = || std::fs::metadata(&path).expect("the file").len();
    let first = snapshot(&plan(&text("1MiB")), None);
    assert_eq!(
        (length(), first.subsystems[0].namespace(1).expect("it").geometry.bytes()),
        (1 << 20, 1 << 20)
    );
    let grown = plan(&text("3MiB"));
    assert_eq!(changes(&text("3MiB"), &text("3MiB")), [""; 0]);
    let second = snapshot(&grown, Some(&first));
    assert_eq!(
        (length(), second.subsystems[0].namespace(1).expect("it").geometry.bytes()),
        (3 << 20, 3 << 20)
    );
    let cut = errors(&text("2MiB"));
    assert!(cut[0].contains("would cut off its end"), "{cut:?}");
    drop((first, second));
    let again = snapshot(&plan(&text("4MiB").replace("create = true\n", "")), None);
    assert_eq!((length(), again.disks[0].as_ref().expect("open").geometry().bytes()), (4 << 20, 4 << 20));
}

#[test]
fn a_file_that_grew_under_us_is_noticed_by_a_reload() {
    let directory = Directory::new();
    let path = directory.file("f", 1 << 20);
    let text = [
        LISTENER,
        "[[disk]]\nname = \"f\"\nkind = \"file\"\npath = \"",
        &path,
        "\"\n",
        &subsystem("s", &["f"]),
    ]
    .concat();
    let before = plan(&text);
    let first = snapshot(&before, None);
    directory.file("f", 2 << 20);
    let after = plan(&text);
    let resized = "disk \"f\" resized from 1 MiB to 2 MiB".to_owned();
    assert_eq!(after.changes(&before), [Change::Other(resized)]);
    let second = snapshot(&after, Some(&first));
    assert_eq!(second.subsystems[0].namespace(1).expect("it").geometry.bytes(), 2 << 20);
}

#[test]
fn an_open_file_cannot_become_another_disk_by_one_change() {
    let text = |name: &str, path: &str| {
        let disk = format!("[[disk]]\nname = \"{name}\"\nkind = \"file\"\npath = \"{path}\"\n");
        format!("{LISTENER}{disk}size = \"1MiB\"\ncreate = true\n")
    };
    let renamed = changes(&text("a", "/nowhere/1"), &text("b", "/nowhere/1"));
    assert!(
        renamed[0].contains("disk \"b\": path is that of disk \"a\", which is open; remove that disk first"),
        "{renamed:?}"
    );
    assert_eq!(
        changes(&text("a", "/nowhere/1"), &text("b", "/nowhere/2")),
        ["disk \"b\" added", "disk \"a\" removed"]
    );
}

#[test]
fn how_completions_come_is_fixed_at_the_start() {
    let directory = Directory::new();
    let file = directory.file("f", 4096);
    let text = format!("[[disk]]\nname = \"f\"\nkind = \"file\"\npath = \"{file}\"\n{LISTENER}");
    let (from, mut to) = (plan(&text), plan(&text));
    let DiskKind::File { is_polled, .. } = &mut Arc::make_mut(&mut to.disks[0]).kind else {
        panic!("a file")
    };
    *is_polled = true;
    let changes: Vec<String> = to.changes(&from).iter().map(Change::to_string).collect();
    let expected =
        "disk \"f\": poll from false to true: refused, is fixed at the start; restart to change it";
    assert_eq!(changes, [expected]);
}

#[test]
fn what_memory_a_disk_has_at_the_start_and_where_operators_ask_are_fixed() {
    let text = two_disks();
    let fixed = "refused, is fixed at the start; restart to change it";
    let populated = text.replacen("kind = \"ram\"", "kind = \"ram\"\npopulate = true", 1);
    assert_eq!(changes(&text, &populated), [format!("disk \"a\": populate from false to true: {fixed}")]);
    assert_eq!(changes(&populated, &text), [format!("disk \"a\": populate from true to false: {fixed}")]);
    let control = format!("{text}[control]\nsocket = \"/run/a\"\n");
    let found = changes(&text, &control);
    assert!(
        found.len() == 1 && found[0].starts_with("control.socket ") && found[0].ends_with(fixed),
        "{found:?}"
    );
}

#[test]
fn an_empty_file_gets_its_size_without_create() {
    let directory = Directory::new();
    let path = directory.file("empty", 0);
    let disk = format!("[[disk]]\nname = \"f\"\nkind = \"file\"\npath = \"{path}\"\nsize = \"1MiB\"\n");
    let made = snapshot(&plan(&[LISTENER, &disk].concat()), None);
    assert_eq!(made.disks[0].as_ref().expect("open").geometry().bytes(), 1 << 20);
}

#[test]
fn what_cannot_be_opened_or_resized_is_named() {
    let first = snapshot(&plan(&two_disks()), None);
    let larger = plan(&two_disks().replace("64MiB", "128MiB"));
    let error = refusal(&larger, Some(&first)).to_string();
    assert!(error.starts_with("disk \"a\": size = 134217728 bytes: "), "{error}");
    let directory = Directory::new();
    let path = directory.file("f", 4096);
    let file =
        plan(&[LISTENER, "[[disk]]\nname = \"f\"\nkind = \"file\"\npath = \"", &path, "\"\n"].concat());
    std::fs::remove_file(&path).expect("the file");
    let error = refusal(&file, None).to_string();
    assert!(error.contains("disk \"f\"") && error.contains(&path), "{error}");
}

#[test]
fn the_order_of_listeners_in_the_file_may_change() {
    let text = two_disks();
    let one = "[[listener]]\naddress = \"127.0.0.1:4421\"\n";
    let first = snapshot(&plan(&[one, &text].concat()), None);
    let second = snapshot(&plan(&[&text, one].concat()), Some(&first));
    assert_eq!(first.listeners, second.listeners, "the order of the file may change, theirs does not");
}

#[test]
fn a_listener_keeps_its_place_and_its_port_identifier_whatever_comes_and_goes() {
    let with = |ports: &[u16]| {
        let listener = |port: &u16| format!("[[listener]]\naddress = \"127.0.0.1:{port}\"\n");
        let listeners: String = ports.iter().map(listener).collect();
        plan(&[&listeners, ram("a").as_str(), &subsystem("s", &["a"])].concat())
    };
    let mut now = snapshot(&with(&[4420]), None);
    for (ports, expected, offered) in [
        (&[4421, 4420][..], &[(4420, true), (4421, true)][..], &[0, 1][..]),
        (&[4421], &[(4420, false), (4421, true)], &[1]),
        (&[4422, 4421], &[(4420, false), (4421, true), (4422, true)], &[1, 2]),
        (&[4420], &[(4420, true), (4421, false), (4422, false)], &[0]),
    ] {
        now = snapshot(&with(ports), Some(&now));
        let found: Vec<_> =
            now.listeners.iter().map(|listener| (listener.address.port(), listener.is_open)).collect();
        assert_eq!((found.as_slice(), now.subsystems[0].listeners.as_slice()), (expected, offered));
        assert!(now.listeners.iter().zip(1..).all(|(listener, port_id)| listener.port_id == port_id));
    }
}

#[test]
fn a_reload_lists_what_it_does() {
    let from = two_disks();
    assert_eq!(changes(&from, &from), [""; 0]);
    let to = [
        LISTENER,
        "in_capsule = \"8KiB\"\n[log]\nlevel = \"debug\"\n[shutdown]\ndeadline_ms = 1\n\
         [limits]\nmemory_overcommit = true\n",
        &ram("a").replace("64MiB", "32MiB"),
        &ram("c"),
        &subsystem("s", &["a", "c"])
            .replace("allow_any_host = true", "hosts = [\"nqn.a:h\"]\noptimistic_hosts = []"),
        &subsystem("t", &[]),
        "[[referral]]\naddress = \"10.0.0.2:8009\"\n",
    ];
    assert_eq!(
        changes(&from, &to.concat()),
        [
            "disk \"a\" resized from 64 MiB to 32 MiB",
            "disk \"c\" added",
            "disk \"b\" removed",
            "listener 127.0.0.1:4420: in_capsule from 4096 to 8192",
            "subsystem nqn.2026-01.test:s: namespace 2 removed, disk \"b\"",
            "subsystem nqn.2026-01.test:s: hosts from any to nqn.a:h",
            "subsystem nqn.2026-01.test:s: optimistic_hosts from any to none",
            "subsystem nqn.2026-01.test:s: namespace 2 added, disk \"c\"",
            "subsystem nqn.2026-01.test:t added",
            "referral to tcp 10.0.0.2:8009 added",
            "limits.memory_overcommit from false to true",
            "log.level from \"info\" to \"debug\"",
            "shutdown.deadline_ms from 10000 to 1",
        ]
    );
    let elsewhere = changes(&from, &from.replace("127.0.0.1:4420", "127.0.0.1:4421"));
    let (come, gone) = ("listener 127.0.0.1:4421 (tcp) added", "listener 127.0.0.1:4420 (tcp) removed");
    assert_eq!(elsewhere[..2], [come, gone]);
    let back = changes(&to.concat(), &from);
    for part in [
        "subsystem nqn.2026-01.test:t removed",
        "referral to tcp 10.0.0.2:8009 removed",
        "hosts from nqn.a:h to any",
    ] {
        assert!(back.iter().any(|change| change.contains(part)), "{part} in {back:?}");
    }
}

#[test]
fn a_reload_refuses_by_name_what_cannot_change() {
    let from = two_disks();
    let refused = |to: String| -> Vec<String> {
        let changes = plan(&to).changes(&plan(&from));
        assert!(changes.iter().all(Change::is_refused), "{changes:?}");
        changes.iter().map(Change::to_string).collect()
    };
    let fixed = "is fixed at the start; restart to change it";
    for (more, expected) in [
        ("[reactor]\ncores = [1]", "reactor.cores from [0] to [1]"),
        ("[reactor]\nidle = \"spin\"", "reactor.idle from \"adaptive, adaptive_spin_us = 200\" to \"spin\""),
        ("[pool]\npages = \"base\"", "pool.pages from \"transparent\" to \"base\""),
        (
            "[pool]\nadmin_count = 64",
            "pool.admin_buffer, admin_count from [{ buffer = \"16 KiB\", count = 32 }] \
             to [{ buffer = \"16 KiB\", count = 64 }]",
        ),
        ("[tcp]\nreceive_batch = \"64KiB\"", "tcp.receive_batch from 262144 to 65536"),
        ("[tcp]\ncongestion = \"system\"", "tcp.congestion from \"cubic\" to \"system\""),
        ("[tcp]\nclose_timeout_ms = 500", "tcp.close_timeout_ms from 2000 to 500"),
        ("[rdma]\nsegments = 8", "rdma.segments from 16 to 8"),
        ("[rdma]\noptimistic_port = 4422", "rdma.optimistic_port from 0 to 4422"),
        ("[control]\ngroup = \"disk\"", "control.group from unset to \"disk\""),
        ("[log]\nformat = \"json\"", "log.format from \"text\" to \"json\""),
        ("[limits]\nqueue_entries = 64", "limits.queue_entries from 256 to 64"),
        ("[limits]\nconnections = 64", "limits.connections from 2048 to 64"),
        ("[limits]\nunconnected_per_address = 8", "limits.unconnected_per_address from 256 to 8"),
    ] {
        let found = refused(format!("{from}{more}\n"));
        assert!(found.contains(&format!("{expected}: refused, {fixed}")), "{expected} in {found:?}");
    }
    // The new listener is also in the subsystem's list, which may change.
    let rdma = "[[listener]]\naddress = \"127.0.0.1:4421\"\ntransport = \"rdma\"\n";
    let reload = plan(&format!("{from}{rdma}")).changes(&plan(&from));
    let found = reload.iter().find(|change| change.is_refused()).map(Change::to_string).unwrap_or_default();
    let field =
        "listener 127.0.0.1:4421: transport from \"none\" to \"rdma\": refused, no listener was on RDMA";
    assert!(found.starts_with(field), "{found}");
    let blocks = refused(from.replacen("size =", "block_bytes = 4096\nsize =", 1));
    assert_eq!(
        blocks,
        ["disk \"a\": block_bytes from 512 to 4096: refused, would be another disk under the same name; \
             give it a new name"]
    );
    let pages = refused(from.replacen("size =", "pages = \"base\"\nsize =", 1));
    assert!(
        pages[0].starts_with("disk \"a\": pages from \"transparent\" to \"base\": refused, would"),
        "{pages:?}"
    );
    let kind = changes(&from, &from.replacen("kind = \"ram\"", "kind = \"null\"", 1));
    assert_eq!(kind.iter().filter(|change| change.contains("refused")).count(), 1, "{kind:?}");
    assert!(kind[0].starts_with("disk \"a\": kind from \"ram\" to \"null\": refused, would"), "{kind:?}");
    let serial = refused(from.replace("allow_any", "serial = \"A\"\nallow_any"));
    assert!(serial[0].starts_with("subsystem nqn.2026-01.test:s: serial from \"SPDL"), "{serial:?}");
}

#[test]
fn a_reload_changes_rdma_listeners_up_to_the_in_capsule_size_of_those_at_start() {
    let at = |port: u16, bytes: u32| {
        format!("[[listener]]\naddress = \"127.0.0.1:{port}\"\ntransport = \"rdma\"\nin_capsule = {bytes}\n")
    };
    let with = |listeners: &[String]| plan(&[LISTENER.to_owned(), listeners.concat()].concat());
    let first = with(&[at(4421, 16384)]);
    let said = |to: &Plan, from: &Plan| {
        let has = RunningState { is_open: &|_| true, rdma_capsule: first.rdma_capsule() };
        to.changes_from(from, &has).iter().map(Change::to_string).collect::<Vec<_>>()
    };
    let none = with(&[]);
    assert_eq!((first.rdma_capsule(), none.rdma_capsule()), (Some(16384), None));
    assert_eq!(said(&none, &first), ["listener 127.0.0.1:4421 (rdma) removed"]);
    assert_eq!(said(&with(&[at(4422, 16384)]), &none), ["listener 127.0.0.1:4422 (rdma) added"]);
    let smaller = said(&with(&[at(4421, 4096)]), &first);
    assert_eq!(smaller, ["listener 127.0.0.1:4421: in_capsule from 16384 to 4096"]);
    for from in [&first, &none] {
        let larger = said(&with(&[at(4421, 32768)]), from);
        assert!(
            larger.len() == 1 && larger[0].contains("to 32768: refused, receives were made"),
            "{larger:?}"
        );
    }
}

#[test]
fn a_disk_under_the_identity_of_another_is_refused() {
    let uuid = "uuid = \"6f1b3b7e-9d7a-5c1e-8a55-0d9f3c2b1a00\"\n";
    let nguid = "nguid = \"6f1b3b7e9d7a5c1e8a550d9f3c2b1a00\"\n";
    // One of the two is enough: a host may go by either.
    for identity in [uuid, nguid] {
        let from = [LISTENER, &ram("a"), &ram("b"), &subsystem("s", &["a"]), identity].concat();
        let to = [LISTENER, &ram("a"), &ram("b"), &subsystem("s", &["b"]), identity].concat();
        let refused: Vec<_> =
            plan(&to).changes(&plan(&from)).into_iter().filter(Change::is_refused).collect();
        assert_eq!(refused.len(), 1, "{identity}");
        assert!(
            refused[0]
                .to_string()
                .contains("namespace 1: disk from \"a\" to \"b\": refused, hosts would take it"),
            "{refused:?}"
        );
    }
}

#[test]
fn settings_of_a_remote_disk_are_fixed_and_its_identity_is_unknown_before_open() {
    let with = |more: &str| {
        let far = "kind = \"remote\"\naddress = \"192.0.2.7:4420\"\nnqn = \"nqn.2026-01.test:far\"\n";
        [LISTENER, "[[disk]]\nname = \"r\"\n", far, more, &subsystem("s", &["r"])].concat()
    };
    let (usual, other) =
        (with(""), with("command_timeout_ms = 1000\nquiesce_ms = 7000\noptimistic = true\n"));
    assert_eq!(
        changes(&usual, &other),
        [
            "disk \"r\": command_timeout_ms from 25000 to 1000: refused, is fixed at the start; restart to \
             change it",
            "disk \"r\": quiesce_ms from 0 to 7000: refused, is fixed at the start; restart to change it",
            "disk \"r\": optimistic from false to true: refused, is fixed at the start; restart to change it"
        ]
    );
    let Some(Origin::Remote(remote)) = plan(&other).absent(None).pop() else { panic!("no remote disk") };
    let (spec, ms) = (&remote.spec, std::time::Duration::from_millis);
    assert_eq!((spec.command_timeout, spec.quiesce, spec.cores), (ms(1000), ms(7000), 1));
    let pages = |text: &str| {
        let Some(Origin::Remote(remote)) = plan(text).absent(None).pop() else { panic!("no remote disk") };
        remote.spec.optimistic.map(|options| options.directory_pages)
    };
    let few = with("optimistic = true\noptimistic_pages = 1024\n");
    assert_eq!((pages(&usual), pages(&other), pages(&few)), (None, Some(1 << 18), Some(1024)));
    let namespace = plan(&usual).subsystems[0].namespaces[0].clone();
    assert_eq!((namespace.uuid, namespace.nguid), (None, None));
    let uuid = "uuid = \"6f1b3b7e-9d7a-5c1e-8a55-0d9f3c2b1a00\"\n";
    assert!(plan(&[&usual, uuid].concat()).subsystems[0].namespaces[0].uuid.is_some());
}
