//! What files that are right come to: values, defaults, notes, sums of memory.

use std::time::Duration;

use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Holder, Pages, Pool, ZoneSpec};
use spindle_reactor::run::Idle;

use spindle_target::snapshot::AllowedHosts;

use super::*;
use crate::config::memory::{AllocationPhase, memory_items, total_bytes};
use crate::config::plan::{DiskKind, LogFormat};
use crate::config::schema;
use crate::config::{connect_line, reachable_address};
use crate::size::rounded;

#[test]
fn a_core_has_buffers_from_4_kib_to_2_mib_and_24_mib_of_them() {
    let plan = plan(LISTENER);
    let zones: Vec<(u32, u32)> =
        plan.pool.zones.iter().map(|zone| (zone.buffer_bytes >> 10, zone.count)).collect();
    assert_eq!(zones, [(4, 1024), (64, 64), (128, 32), (256, 16), (512, 6), (1024, 3), (2048, 1)]);
    assert_eq!(plan.pool.bytes_per_core(), 24 << 20);
    // A host that takes what it gets of the largest commands leaves the next one a part of every zone.
    let pool = Pool::new(&plan.pool.zones, Pages::Base).expect("a pool");
    pool.add_host(2);
    let take = |host, count| -> Vec<_> {
        let share = pool.share(Holder::host(host));
        std::iter::from_fn(|| share.take(1 << 20)).take(count).collect()
    };
    let (greedy, next) = (take(1, 100), take(2, 100));
    assert!(greedy.len() >= 10 && next.len() >= 4, "{} and {}", greedy.len(), next.len());
    drop((greedy, next));
    pool.set_alone(true);
    assert!(take(1, 100).len() >= 16, "the only host has nearly all");
    assert_eq!(pool.free_bytes(), plan.pool.bytes_per_core());
}

/// Every key of the sections that a file has once, outside a disk, with a value that the test can recognize.
const EVERY_VALUE: &str = r#"
        [reactor]
        cores = [1, 0]
        pin = false
        idle = "adaptive"
        adaptive_spin_us = 77
        [pool]
        pages = "base"
        zone = [{ buffer = 8192, count = 2 }, { buffer = "2MiB", count = 3 }]
        admin_buffer = 8192
        admin_count = 4
        [limits]
        queue_entries = 2
        transfer = "2MiB"
        bulk_unit = "256KiB"
        io_queues = 7
        connections = 9
        unconnected_per_address = 6
        disk_commands = 11
        keep_alive_ms_max = 5000
        memory_overcommit = true
        [tcp]
        in_capsule = 16
        max_h2c_data = "8k"
        header_digest = false
        data_digest = false
        receive_batch = "64KiB"
        congestion = "reno"
        user_timeout_ms = 1
        socket_buffer = 4097
        initialize_timeout_ms = 100
        close_timeout_ms = 101
        [rdma]
        shared_receives = 12
        segments = 5
        optimistic_port = 4422
        [discovery]
        keep_alive_ms = 7000
        [log]
        level = "trace"
        format = "json"
        peer_lines_per_s = 3
        [control]
        socket = "/run/a/socket"
        group = "disk"
        [shutdown]
        deadline_ms = 0
    "#;

#[test]
fn every_value_has_every_key() {
    let names: Vec<&str> =
        EVERY_VALUE.lines().filter_map(|line| Some(line.split_once(" = ")?.0.trim())).collect();
    for (heading, _, keys) in schema::sections() {
        // Sections that a file has once, outside a disk.
        if heading.starts_with("[[") || heading.starts_with("[disk.") {
            continue;
        }
        assert!(EVERY_VALUE.contains(&heading), "EVERY_VALUE has no section {heading}");
        for key in keys.iter().filter(|key| key.section().is_none()) {
            assert!(names.contains(&key.name), "EVERY_VALUE gives no value to {heading} {}", key.name);
        }
    }
}

#[test]
fn every_value_reaches_the_plan() {
    let plan = plan(&format!("{EVERY_VALUE}{LISTENER}"));
    assert_eq!(
        (plan.reactor.cores.as_slice(), plan.reactor.is_pinned, plan.reactor.idle),
        (&[1, 0][..], false, Idle::SleepAfter(Nanos::from_us(77)))
    );
    assert_eq!(plan.reactor.cpus(), [None, None]);
    let zones = [ZoneSpec { buffer_bytes: 8192, count: 2 }, ZoneSpec { buffer_bytes: 2 << 20, count: 3 }];
    assert_eq!((plan.pool.pages, plan.pool.zones.as_slice()), (Pages::Base, &zones[..]));
    assert_eq!(plan.pool.admin_zones, [ZoneSpec { buffer_bytes: 8192, count: 4 }]);
    let controller = &plan.limits.controller;
    assert_eq!((controller.queue_entries, controller.transfer_bytes), (2, 2 << 20));
    assert_eq!(controller.bulk_unit, 256 << 10);
    assert_eq!((controller.keep_alive_ms_max, controller.discovery_keep_alive_ms), (5000, 7000));
    assert_eq!((plan.limits.io_queues_max, plan.limits.connections, plan.limits.disk_commands), (7, 9, 11));
    assert_eq!((plan.limits.unconnected_per_address, plan.limits.may_overcommit), (6, true));
    assert_eq!(plan.connections_per_core(), 5, "rounded up: two cores share nine");
    let (shell, conn) = (plan.tcp.shell, plan.tcp.conn);
    assert_eq!((shell.batch_bytes, shell.user_timeout_ms, shell.socket_buffer_bytes), (65536, 1, 4097));
    assert_eq!(shell.congestion.as_deref(), Some("reno"));
    assert_eq!((conn.in_capsule_bytes, conn.max_h2c_data, conn.queue_entries), (16, 8192, 2));
    assert_eq!((conn.transfer_bytes, conn.header_digest, conn.data_digest), (2 << 20, false, false));
    assert_eq!((conn.initialize_timeout.0, conn.close_timeout.0), (100_000_000, 101_000_000));
    let log = &plan.log;
    assert_eq!((log.level, log.format, log.peer_lines_per_s), (tracing::Level::TRACE, LogFormat::Json, 3));
    assert_eq!((plan.rdma.srq_entries, plan.rdma.segments, plan.optimistic_port), (12, 5, 4422));
    let control = (plan.control.socket, plan.control.group);
    assert_eq!(control, (Some("/run/a/socket".into()), Some("disk".to_owned())));
    assert_eq!(plan.drain_deadline, Duration::ZERO);
}

#[test]
fn a_file_with_a_listener_only_has_all_defaults() {
    let plan = plan(LISTENER);
    assert_eq!(plan.reactor.cores, [0], "the first that the process may use");
    assert_eq!(plan.reactor.cpus(), [Some(0)]);
    assert_eq!(plan.reactor.idle, Idle::SleepAfter(Nanos::from_us(200)));
    assert_eq!(plan.pool.pages, Pages::Transparent);
    assert_eq!(plan.tcp.conn, spindle_nvme_tcp::controller::ConnConfig::default());
    assert_eq!(plan.tcp.shell, spindle_nvme_tcp::shell::ShellConfig::default());
    assert_eq!(plan.notes, ["there is no [[subsystem]]: hosts find nothing here"]);
    let on_three = Machine { cores: vec![3, 5], ..machine() };
    assert_eq!(plan_on(LISTENER, &on_three).reactor.cores, [3]);
}

#[test]
fn the_builtin_needs_no_root_no_huge_pages_and_no_file() {
    let config = crate::config::Config::builtin();
    let plan = config.plan();
    assert_eq!(config.source(), None);
    assert_eq!((plan.disks.len(), plan.disks[0].bytes), (1, 1 << 30));
    assert_eq!(
        plan.disks[0].kind,
        DiskKind::Ram { pages: Pages::Transparent, is_populated: false, has_seals: false }
    );
    assert_eq!(plan.listeners[0].address.to_string(), "127.0.0.1:4420");
    assert_eq!(plan.subsystems[0].nqn.as_str(), crate::config::NQN_EXAMPLE);
    assert_eq!(plan.subsystems[0].hosts, AllowedHosts::Any);
    assert_eq!(plan.subsystems[0].optimistic_hosts, AllowedHosts::Any);
}

#[test]
fn disks_get_their_sizes_from_the_file_the_device_or_the_key() {
    let directory = Directory::new();
    let there = directory.file("there", 3 << 20);
    let disk = |name: &str, more: &str| format!("[[disk]]\nname = \"{name}\"\nkind = \"file\"\n{more}\n");
    let missing = directory.0.join("missing");
    let text = [
        disk("a", &format!("path = \"{there}\"")),
        disk(
            "b",
            &format!(
                "path = \"{}\"\ncreate = true\nsize = \"5MiB\"\nblock_bytes = 4096\ndirect = false",
                missing.display()
            ),
        ),
        "[[disk]]\nname = \"c\"\nkind = \"null\"\nsize = \"1TiB\"\n".to_owned(),
        "[[disk]]\nname = \"d\"\nkind = \"ram\"\nsize = 1048576\npages = \"huge\"\npopulate = true\n"
            .to_owned(),
        LISTENER.to_owned(),
    ];
    let plan = plan(&text.concat());
    let shapes: Vec<_> =
        plan.disks.iter().map(|disk| (disk.kind.name(), disk.bytes, disk.block_bytes)).collect();
    assert_eq!(
        shapes,
        [("file", 3 << 20, 512), ("file", 5 << 20, 4096), ("null", 1 << 40, 512), ("ram", 1 << 20, 512)]
    );
    assert_eq!(
        plan.disks[1].kind,
        DiskKind::File {
            path: missing,
            is_read_only: false,
            create: true,
            is_direct: false,
            is_polled: false
        }
    );
    assert_eq!(
        plan.disks[3].kind,
        DiskKind::Ram { pages: Pages::Huge, is_populated: true, has_seals: false }
    );
}

#[test]
fn subsystems_are_at_all_listeners_or_at_those_they_name() {
    let listeners = "[[listener]]\naddress = \"10.0.0.1:4420\"\nname = \"front\"\nin_capsule = \"8KiB\"\n\
                     [[listener]]\naddress = \"[::]:4420\"\n";
    let named = format!("{}listeners = [\"front\"]\n", subsystem("b", &[]));
    let plan = plan(&[listeners, &subsystem("a", &[]), &named].concat());
    let at = |index: usize| -> Vec<String> {
        plan.listeners_of(&plan.subsystems[index]).map(|listener| listener.address.to_string()).collect()
    };
    assert_eq!(
        (at(0), at(1)),
        (vec!["10.0.0.1:4420".to_owned(), "[::]:4420".to_owned()], vec!["10.0.0.1:4420".to_owned()])
    );
    let in_capsule: Vec<u32> = plan.listeners.iter().map(|listener| listener.in_capsule_bytes).collect();
    assert_eq!(in_capsule, [8192, 4096], "a listener's own, or that of [tcp]");
}

#[test]
fn identities_do_not_depend_on_the_order_of_the_file() {
    let one = plan(
        &[LISTENER, &null("a"), &null("b"), &subsystem("s", &["a", "b"]), &subsystem("t", &[])].concat(),
    );
    let other = plan(
        &[subsystem("t", &[]), subsystem("s", &["a", "b"]), null("b"), null("a"), LISTENER.to_owned()]
            .concat(),
    );
    assert_eq!(one.subsystems[0], other.subsystems[1]);
    let [a, b] = one.subsystems[0].namespaces.as_slice() else { panic!("two namespaces") };
    assert!(a.uuid.is_some() && a.uuid != b.uuid && a.nguid != b.nguid && a.uuid != a.nguid);
}

#[test]
fn identities_can_be_given_and_for_a_ram_disk_that_is_told() {
    let given = format!(
        "{}uuid = \"6f1b3b7e-9d7a-5c1e-8a55-0d9f3c2b1a00\"\nnguid = \"000102030405060708090a0b0c0d0e0f\"\n",
        subsystem("s", &["a"])
    );
    let given = given.replace("allow_any", "serial = \"ABC 1\"\nmodel = \"M\"\nallow_any");
    let of = |disk: &str| plan(&[LISTENER, disk, &given].concat());
    let plan = of(&null("a"));
    let namespace = &plan.subsystems[0].namespaces[0];
    let uuid = uuid::Uuid::from_bytes(namespace.uuid.expect("given"));
    assert_eq!(uuid.to_string(), "6f1b3b7e-9d7a-5c1e-8a55-0d9f3c2b1a00");
    assert_eq!(namespace.nguid.expect("given").to_vec(), (0..16).collect::<Vec<u8>>());
    assert_eq!((plan.subsystems[0].serial.as_str(), plan.subsystems[0].model.as_str()), ("ABC 1", "M"));
    assert_eq!(plan.notes, [""; 0]);
    let on_ram = of(&ram("a"));
    assert_eq!(on_ram.subsystems, plan.subsystems);
    let [note] = on_ram.notes.as_slice() else { panic!("{:?}", on_ram.notes) };
    assert!(note.contains("namespace 1 has a uuid of its own and its disk \"a\" is in memory"), "{note}");
}

#[test]
fn a_ram_disk_has_no_identity_before_it_is_made() {
    let plan = plan(&[LISTENER, &ram("a"), &subsystem("s", &["a"])].concat());
    let namespace = &plan.subsystems[0].namespaces[0];
    assert_eq!((namespace.uuid, namespace.nguid), (None, None));
}

#[test]
fn over_rdma_ram_disks_are_resident_and_receives_are_counted() {
    let over = |transport: &str| {
        let text = ["[reactor]\ncores = [0]\n", LISTENER, transport, &ram("a")].concat();
        let items = memory_items(&plan(&text));
        let data = items.iter().find(|sum| sum.reason().contains("disk a: data")).map(|sum| sum.phase);
        (data, items.iter().find(|sum| sum.reason().contains("receives over RDMA")).map(|sum| sum.bytes()))
    };
    assert_eq!(over(""), (Some(AllocationPhase::Filled), None));
    assert_eq!(over("transport = \"rdma\"\n"), (Some(AllocationPhase::Start), Some(8192 * (64 + 4096))));
}

#[test]
fn memory_is_a_sum_of_named_reasons() {
    let text = ["[reactor]\ncores = [0, 1]\n", LISTENER, &ram("a")].concat();
    let plan = plan(&text);
    let items = memory_items(&plan);
    let of = |reason: &str| {
        items.iter().find(|sum| sum.reason().contains(reason)).unwrap_or_else(|| panic!("{reason}"))
    };
    assert_eq!((of("1024 buffers of 4 KiB").bytes(), of("3 buffers of 1 MiB").bytes()), (8 << 20, 6 << 20));
    assert_eq!(of("admin reserve").bytes(), 2 * 32 * 16384);
    assert_eq!((of("disk a: data").bytes(), of("disk a: data").phase), (64 << 20, AllocationPhase::Filled));
    assert!(of("disk a: table").bytes() >= 64 << 20 >> 12, "an entry for each page");
    let by_hand: u64 = items.iter().map(|sum| sum.each * sum.count).sum();
    assert_eq!(total_bytes(&items, AllocationPhase::Busy), by_hand);
    assert!(total_bytes(&items, AllocationPhase::Start) < total_bytes(&items, AllocationPhase::Filled));
    let frames = spindle_target_disk::RamSpec {
        bytes: 64 << 20,
        block_bytes: 512,
        pages: Pages::Transparent,
        has_seals: false,
    }
    .memory_bytes();
    let of_disk: u64 =
        items.iter().filter(|sum| sum.reason().starts_with("disk a")).map(|sum| sum.bytes()).sum();
    assert_eq!(of_disk, frames, "the reasons of a RAM disk are all that it takes");
}

#[test]
fn a_connection_is_counted_by_what_its_entries_really_take() {
    use spindle_target::qpair::request::Request;
    let each = |entries: u16| {
        let plan = plan(&format!("[limits]\nqueue_entries = {entries}\nconnections = 3\n{LISTENER}"));
        let items = memory_items(&plan);
        let of = |text: &str| items.iter().find(|sum| sum.reason().contains(text)).expect("a reason").clone();
        let sent = of("while no buffer was free");
        assert_eq!(
            (sent.each, sent.count, sent.phase),
            (256 << 10, 3, AllocationPhase::Busy),
            "a receive batch"
        );
        let connection = of("queue entries");
        assert_eq!((connection.count, connection.phase), (3, AllocationPhase::Busy));
        connection.each
    };
    let (short, long) = (each(128), each(256));
    let entry = (long - short) / 128;
    // The request, a PDU on its way out with its head, its tail and its buffer, a transfer.
    let least = size_of::<Request>() as u64 + 100;
    assert!((least..least + 300).contains(&entry), "{entry} bytes an entry, least {least}");
    assert!((short..2 * short).contains(&(entry * 128 + (24 << 10))), "{short} bytes with 128 entries");
    assert_eq!((each(2), each(31)), (each(32), each(32)), "an admin queue may have 32");
    assert!(each(33) > each(32));
}

#[test]
fn sizes_for_people_have_three_figures() {
    for (bytes, text) in
        [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (100 << 20, "100 MiB"), ((3 << 30) / 2, "1.5 GiB")]
    {
        assert_eq!(rounded(bytes), text);
    }
    assert_eq!(rounded(u64::MAX), "16777215 TiB");
}

#[test]
fn what_is_allowed_but_perhaps_not_meant_is_noted() {
    let notes = |text: &str, machine: &Machine| plan_on(text, machine).notes.join("\n");
    let all =
        "[reactor]\nidle = \"spin\"\ncores = [0, 1]\n[tcp]\ncongestion = \"bbr\"\n[pool]\npages = \"huge\"\n";
    let lonely = format!("{}hosts = []\n", subsystem("s", &[]).replace("allow_any_host = true\n", ""));
    let small = Machine { huge_bytes: 1 << 20, ..machine() };
    let found = notes(&[all, LISTENER, &ram("a"), &lonely].concat(), &small);
    for part in [
        "reactor.idle = \"spin\" on every core",
        "tcp.congestion = \"bbr\": this kernel has cubic, reno",
        "pool asks for 48 MiB of reserved huge pages and 1 MiB are free",
        "needs 24 pages of 2 MiB",
        "disk \"a\" is in no namespace",
        "subsystem nqn.2026-01.test:s: hosts is empty",
        "has no [[subsystem.namespace]]",
    ] {
        assert!(found.contains(part), "{part} in {found}");
    }
    let example =
        [LISTENER, &subsystem("s", &[]).replace("2026-01.test:s", "2026-01.io.spindle:default")].concat();
    assert!(!notes(&example, &machine()).contains("example"), "harmless on the loopback address");
    assert!(notes(&example.replace("127.0.0.1", "0.0.0.0"), &machine()).contains("name in every example"));
    let few = Machine { files_max: Some(1024), ..machine() };
    assert!(notes(LISTENER, &few).contains("1024 files open"));
    let directory = Directory::new();
    let file = format!("[[disk]]\nname = \"f\"\nkind = \"file\"\npath = \"{}\"\n", directory.file("f", 4096));
    let unprivileged = Machine { lockable_bytes: Some(8 << 20), ..machine() };
    assert!(notes(&[&file, LISTENER].concat(), &unprivileged).contains("may lock 8 MiB"));
    assert!(!notes(&[&file, LISTENER].concat(), &machine()).contains("may lock"));
    let rdma = format!("{LISTENER}transport = \"rdma\"\n");
    let small = "[limits]\ntransfer = \"512KiB\"\n";
    let found = notes(&[small, &file, &rdma].concat(), &machine());
    assert!(found.contains("bulk_unit is 512 KiB and limits.transfer 512 KiB: no transfer"), "{found}");
    for cuts in [[small, &file, LISTENER], [small, &ram("a"), &rdma], ["", &file, &rdma]] {
        assert!(!notes(&cuts.concat(), &machine()).contains("bulk_unit"), "{cuts:?}");
    }
}

#[test]
fn huge_pages_count_apart_from_ordinary_memory() {
    let disk = "[[disk]]\nname = \"h\"\nkind = \"ram\"\nsize = \"9GiB\"\npages = \"huge\"\n";
    let text = [LISTENER, disk].concat();
    let with_pages = Machine { huge_bytes: 10 << 30, ..machine() };
    assert!(!plan_on(&text, &with_pages).notes.join("\n").contains("huge pages"));
    let without = errors(&text);
    assert_eq!(without.len(), 1);
    assert!(without[0].starts_with("t.toml:6: disk[0].size = \"9GiB\": full RAM disks"), "{without:?}");
}

#[test]
fn hosts_are_told_an_address_that_they_can_use() {
    let line = |address: &str, nqn: &str| {
        connect_line(
            (spindle_nvme_transport::TransportKind::Tcp, address.parse().expect("address")),
            &nvme_spec::nqn::Nqn::new(nqn).expect("NQN"),
        )
    };
    assert_eq!(line("10.1.2.3:4420", "nqn.a:b"), "nvme connect -t tcp -a 10.1.2.3 -s 4420 -n nqn.a:b");
    assert_eq!(line("[fd00::1]:8009", "nqn.a:b"), "nvme connect -t tcp -a fd00::1 -s 8009 -n nqn.a:b");
    assert_eq!(
        line("10.1.2.3:1", "nqn.a'; rm -rf $HOME"),
        r"nvme connect -t tcp -a 10.1.2.3 -s 1 -n 'nqn.a'\''; rm -rf $HOME'"
    );
    for any in ["0.0.0.0:4420", "[::]:4420"] {
        let address = reachable_address(any.parse().expect("address"));
        assert!(!address.ip().is_unspecified() && address.port() == 4420, "{address}");
    }
}
