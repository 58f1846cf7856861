//! What is wrong is named: file, line, field, value, what is allowed; all of it at once.

use spindle_reactor::mem::ResidentBytes;

use super::*;
use crate::config::parse_beside;
use crate::config::{Config, LocalDrives};

/// A file of a listener and these lines has these errors, each without "t.toml:"; the lines begin at 1.
fn check(lines: &str, expected: &[&str]) {
    let found = errors(&format!("{lines}\n{LISTENER}"));
    let expected: Vec<String> = expected.iter().map(|error| format!("t.toml:{error}")).collect();
    assert_eq!(found, expected, "\n{lines}");
}

fn check_all(cases: &[(&str, &str)]) {
    for (lines, expected) in cases {
        check(lines, &[expected]);
    }
}

#[test]
fn values_of_the_wrong_type_or_out_of_range() {
    check_all(&[
        ("[reactor]\npin = 1", "2: reactor.pin = 1: must be true or false"),
        ("[reactor]\nidle = \"lazy\"", "2: reactor.idle = \"lazy\": must be \"spin\" or \"adaptive\""),
        ("[reactor]\nidle = true", "2: reactor.idle = true: must be \"spin\" or \"adaptive\""),
        (
            "[reactor]\nadaptive_spin_us = 1000001",
            "2: reactor.adaptive_spin_us = 1000001: must be a whole number from 0 to 1000000",
        ),
        (
            "[reactor]\nadaptive_spin_us = -1",
            "2: reactor.adaptive_spin_us = -1: must be a whole number from 0 to 1000000",
        ),
        (
            "[reactor]\nadaptive_spin_us = 0.5",
            "2: reactor.adaptive_spin_us = 0.5: must be a whole number from 0 to 1000000",
        ),
        ("[limits]\nqueue_entries = 1", "2: limits.queue_entries = 1: must be a whole number from 2 to 1024"),
        (
            "[limits]\nqueue_entries = 1025",
            "2: limits.queue_entries = 1025: must be a whole number from 2 to 1024",
        ),
        (
            "[limits]\nconnections = 65536",
            "2: limits.connections = 65536: must be a whole number from 1 to 65535",
        ),
        ("[limits]\nio_queues = 129", "2: limits.io_queues = 129: must be a whole number from 1 to 128"),
        (
            "[tcp]\nin_capsule = 24",
            "2: tcp.in_capsule = 24: must be a size from 0 B to 64 KiB, a multiple of 16, like \"64KiB\" or \
             65536",
        ),
        (
            "[tcp]\nin_capsule = \"65KiB\"",
            "2: tcp.in_capsule = \"65KiB\": must be a size from 0 B to 64 KiB, a multiple of 16, like \
             \"64KiB\" or 65536",
        ),
        (
            "[tcp]\nin_capsule = \"4 parsecs\"",
            "2: tcp.in_capsule = \"4 parsecs\": `4 parsecs` has the unit `parsecs`; allowed are B, K, KiB, \
             M, MiB, G, GiB, T, TiB (powers of 1024); must be a size from 0 B to 64 KiB, a multiple of 16, \
             like \"64KiB\" or 65536",
        ),
        (
            "[log]\nlevel = \"loud\"",
            "2: log.level = \"loud\": must be \"error\", \"warn\", \"info\", \"debug\" or \"trace\"",
        ),
        ("[reactor]\ncores = 0", "2: reactor.cores = 0: must be a list, each a whole number from 0 to 8191"),
        ("[reactor]\ncores = [\"0\"]", "2: reactor.cores[0] = \"0\": must be a whole number from 0 to 8191"),
        (
            "[[listener]]\naddress = \"localhost:4420\"",
            "2: listener[0].address = \"localhost:4420\": must be an IP address and a port, like \
             \"0.0.0.0:4420\" or \"[::]:4420\"",
        ),
        (
            "[[listener]]\naddress = \"10.0.0.1:0\"",
            "2: listener[0].address = \"10.0.0.1:0\": must be an IP address and a port, like \
             \"0.0.0.0:4420\" or \"[::]:4420\"",
        ),
        (
            "[[listener]]\naddress = \"10.0.0.1:4420\"\ntransport = \"fc\"",
            "3: listener[0].transport = \"fc\": must be \"tcp\" or \"rdma\"",
        ),
    ]);
}

#[test]
fn unknown_keys_with_the_nearest_that_is_known() {
    check_all(&[
        ("[reactor]\nidel = \"spin\"", "2: reactor.idel = \"spin\": unknown key; did you mean \"idle\"?"),
        ("[reactr]\ncores = [0]", "1: reactr: unknown key; did you mean \"reactor\"?"),
        (
            "[log]\nadaptive_spin_us = 5",
            "2: log.adaptive_spin_us = 5: unknown key here; \"adaptive_spin_us\" belongs to [reactor]",
        ),
        (
            "[log]\nfile = \"/tmp/log\"",
            "2: log.file = \"/tmp/log\": unknown key; allowed: level, format, peer_lines_per_s",
        ),
        ("[log]\nrotate = [1,\n 2]", "2: log.rotate: unknown key; allowed: level, format, peer_lines_per_s"),
        (
            "tcp.header_digests = true",
            "1: tcp.header_digests = true: unknown key; did you mean \"header_digest\"?",
        ),
    ]);
    let disk = "[[disk]]\nname = \"a\"\nkind = \"null\"\nsize = 4096\nblock_size = 4096";
    check(disk, &["5: disk[0].block_size = 4096: unknown key; did you mean \"block_bytes\"?"]);
}

#[test]
fn sections_of_the_wrong_form() {
    check_all(&[
        ("reactor = 5", "1: reactor = 5: must be a section, written [reactor]; there is one of them"),
        (
            "[[reactor]]",
            "1: reactor = [[reactor]]: must be a section, written [reactor]; there is one of them",
        ),
        ("[disk]\nname = \"a\"", "1: disk: there may be several, so it is written [[disk]]"),
        ("disk = [1]", "1: disk[0] = 1: must be a section, written [[disk]]"),
        ("disk = \"ram\"", "1: disk = \"ram\": must be sections, each written [[disk]]"),
        (
            "[[subsystem]]\nnqn = \"nqn.a:b\"\nallow_any_host = true\n[subsystem.namespace]\nnsid = 1",
            "4: subsystem[0].namespace: there may be several, so it is written [[subsystem.namespace]]",
        ),
    ]);
    assert_eq!(
        errors("[listener]\naddress = \"10.0.0.1:4420\""),
        ["t.toml:1: listener: there may be several, so it is written [[listener]]"]
    );
}

#[test]
fn a_file_that_is_not_toml_names_every_line_that_is_not() {
    assert_eq!(
        errors("a = 1\nb = = 2\n[x\n"),
        [
            "t.toml:2: not TOML: extra `=`, expected nothing in `b = = 2`",
            "t.toml:2: not TOML: unexpected key or value, expected newline, `#` in `b = = 2`",
            "t.toml:3: not TOML: unclosed table, expected `]` in `[x`",
        ]
    );
    assert_eq!(
        errors("[log]\nlevel = \"info\"\nlevel = \"warn\""),
        ["t.toml:3: not TOML: duplicate key in `level = \"warn\"`"]
    );
}

#[test]
fn cores_that_are_not_there_or_there_twice() {
    check_all(&[
        ("[reactor]\ncores = []", "2: reactor.cores = []: must name at least one core"),
        (
            "[reactor]\ncores = [0,\n 7]",
            "3: reactor.cores[1] = 7: must be a core that this process may use: 0 or 1",
        ),
        (
            "[reactor]\ncores = [1, 1]",
            "2: reactor.cores[1] = 1: the same core twice; each core has one thread",
        ),
    ]);
}

#[test]
fn pools_that_cannot_be_or_that_no_transfer_fits() {
    let zone = |buffer: &str, count: u32| format!("[[pool.zone]]\nbuffer = {buffer}\ncount = {count}\n");
    check(
        &[zone("\"1MiB\"", 4), zone("4096", 4)].concat(),
        &[
            "5: pool.zone[1].buffer = 4096: must be more than 1 MiB of the zone before; zones ascend",
            "5: pool.zone[1].buffer = 4096: the largest buffer must hold a whole transfer, limits.transfer \
             = 1 MiB, and has 4 KiB",
        ],
    );
    check(
        &zone("\"2MiB\"", 513),
        &["3: pool.zone[0].count = 513: a zone has at most 1 GiB, which is 512 buffers of 2 MiB"],
    );
    check(
        &zone("5000", 1),
        &["2: pool.zone[0].buffer = 5000: must be a size from 4 KiB to 64 MiB, a multiple of 4096, like \
             \"64KiB\" or 65536"],
    );
    let many: String = (1..=17).map(|index| zone(&(index << 20).to_string(), 1)).collect();
    check(&many, &["49: pool.zone[16]: there may be at most 16 zones"]);
    check_all(&[
        (
            "[limits]\ntransfer = \"2MiB\"\n[[pool.zone]]\nbuffer = \"1MiB\"\ncount = 4",
            "4: pool.zone[0].buffer = \"1MiB\": the largest buffer must hold a whole transfer, \
             limits.transfer = 2 MiB, and has 1 MiB",
        ),
        (
            "[limits]\ntransfer = \"768KiB\"",
            "2: limits.transfer = \"768KiB\": must be a power of two, like \"512 KiB\" or \"1 MiB\"",
        ),
        (
            "[limits]\ntransfer = \"4MiB\"",
            "2: limits.transfer = \"4MiB\": must be a size from 4 KiB to 2 MiB, a multiple of 4096, like \
             \"64KiB\" or 65536",
        ),
        ("[pool]\nadmin_count = 3", "2: pool.admin_count = 3: must be a whole number from 4 to 4096"),
    ]);
}

#[test]
fn zones_that_some_command_would_wait_for_without_end() {
    let zone = |buffer: &str, count: u32| format!("[[pool.zone]]\nbuffer = \"{buffer}\"\ncount = {count}\n");
    let file = "[[disk]]\nname = \"f\"\nkind = \"file\"\npath = \"/f\"\nsize = \"16MiB\"\ncreate = true\n";
    let with = |zones: &[(&str, u32)], disk: &str, more: &str| {
        let zones: String = zones.iter().map(|(buffer, count)| zone(buffer, *count)).collect();
        let text = format!("{zones}{LISTENER}{disk}{more}");
        parse(&text, Path::new("t.toml"), &machine())
            .err()
            .map_or_else(String::new, |errors| errors.to_string())
    };
    // A Compare of 1 MiB takes two, and 32 of 4 KiB make no second one.
    let few = [("4KiB", 1024), ("1MiB", 1)];
    let refused = with(&few, file, "");
    assert_eq!(
        refused,
        "t.toml:6: pool.zone[1].count = 1: Compare takes buffers of 1 MiB and 1 MiB at once (limits.transfer \
          = 1 MiB, at most 32 smaller ones for one), and the zones do not have them; allowed are zones that \
          do, like one more buffer here"
    );
    assert!(with(&few, &ram("a"), "").is_empty(), "a RAM disk's is compared where it lies");
    assert!(with(&[("4KiB", 1024), ("1MiB", 2)], file, "").is_empty());
    assert!(with(&[("64KiB", 16), ("1MiB", 1)], file, "").is_empty(), "16 of 64 KiB are one");
    let small = "[limits]\ntransfer = \"4KiB\"\n";
    assert!(
        with(&[("4KiB", 64)], &ram("a"), small).contains("a list of ranges takes buffers of 8 KiB at once")
    );
    assert!(with(&[("8KiB", 1)], file, small).contains("Compare takes buffers of 4 KiB and 4 KiB"));
}

#[test]
fn sums_that_the_machine_does_not_have() {
    let pool = format!("[[pool.zone]]\nbuffer = \"1MiB\"\ncount = 1024\n{LISTENER}");
    let small = Machine { memory_bytes: 512 << 20, available_bytes: 256 << 20, ..machine() };
    assert_eq!(
        errors_on(&pool, &small),
        ["t.toml:3: pool.zone[0].count = 1024: all that is taken at the start comes to 1 GiB, and the \
             machine has 512 MiB; \
          take fewer buffers"]
    );
    // 13 bytes of tables for each 4 KiB.
    let tables =
        format!("{}{LISTENER}[limits]\nmemory_overcommit = true\n", ram("a").replace("64MiB", "8TiB"));
    assert_eq!(
        errors(&tables),
        ["t.toml:4: disk[0].size = \"8TiB\": all that is taken at the start comes to 26 GiB, and the \
             machine has 16 GiB, most of it for the tables of RAM disks; make it smaller"]
    );
    let disks = format!("{}{}{LISTENER}", ram("a"), ram("b").replace("64MiB", "9GiB"));
    let message = "t.toml:8: disk[1].size = \"9GiB\": full RAM disks and all that is taken at the start \
    come to 9.1 GiB, and \
                   8 GiB are available; make it smaller, or set limits.memory_overcommit = true";
    assert_eq!(errors(&disks), [message]);
    let removed = ResidentBytes { ordinary: 3 << 30, huge: 0 };
    let fits = disks.replace("9GiB", "6GiB");
    plan(&fits);
    let message = "t.toml:8: disk[1].size = \"6GiB\": full RAM disks and all that is taken at the start \
    come to 6.1 GiB, and 5 GiB (without 3 GiB of removed disks that are not given back yet) are available; \
    make it smaller, or set limits.memory_overcommit = true";
    assert_eq!(errors_on(&fits, &machine().beside(removed)), [message]);
    let to_look_at = Machine { is_for_start: false, ..machine() };
    assert!(plan_on(&disks, &to_look_at).notes.join("\n").contains("8 GiB are available now"));
    let more = disks.replace("9GiB", "16GiB");
    assert!(errors_on(&more, &to_look_at)[0].contains("and the machine has 16 GiB"));
    let overcommitted = plan(&format!("{more}[limits]\nmemory_overcommit = true\n"));
    assert!(overcommitted.notes.join("\n").contains("takes the risk"));
}

#[test]
fn only_block_devices_past_the_page_cache_are_polled() {
    let directory = Directory::new();
    let file = directory.file("there", 4096);
    let disk = format!("[[disk]]\nname = \"a\"\nkind = \"file\"\npath = \"{file}\"\npoll = true\n");
    check(&disk, &["5: disk[0].poll = true: must be false for what is no block device"]);
}

#[test]
fn disks_whose_keys_do_not_fit_their_kind() {
    let disk = |kind: &str, more: &str| format!("[[disk]]\nname = \"a\"\nkind = \"{kind}\"\n{more}");
    for (kind, more, expected) in [
        ("ram", "", "1: disk[0].size: missing; a ram disk needs one, like \"1GiB\""),
        ("null", "", "1: disk[0].size: missing; a null disk needs one, like \"1GiB\""),
        (
            "ram",
            "size = 4096\npath = \"/a\"",
            "5: disk[0].path = \"/a\": a ram disk has no path; it is for kind = \"file\"",
        ),
        (
            "null",
            "size = 4096\nread_only = false",
            "5: disk[0].read_only = false: a null disk has no read_only; it is for kind = \"file\" or \"ng\"",
        ),
        (
            "null",
            "size = 4096\npopulate = true",
            "5: disk[0].populate = true: a null disk has no populate; it is for kind = \"ram\"",
        ),
        (
            "null",
            "size = 4096\npages = \"huge\"",
            "5: disk[0].pages = \"huge\": a null disk has no memory of its own; it is for kind = \"ram\"",
        ),
        (
            "ram",
            "size = 512\nblock_bytes = 4096",
            "4: disk[0].size = 512: must be a multiple of block_bytes = 4096",
        ),
        ("ram", "size = 1024\nblock_bytes = 1024", "5: disk[0].block_bytes = 1024: must be 512 or 4096"),
        (
            "flash",
            "",
            "3: disk[0].kind = \"flash\": must be \"ram\", \"null\", \"file\", \"nvme\", \"ng\" or \
             \"remote\"",
        ),
        ("file", "", "1: disk[0].path: missing; a file disk needs one, like \"/var/lib/spindle/disk0.img\""),
        (
            "file",
            "path = \"disk.img\"",
            "4: disk[0].path = \"disk.img\": must be an absolute path, like \"/var/lib/spindle/disk0.img\"",
        ),
    ] {
        check(&disk(kind, more), &[expected]);
    }
    check(
        "[[disk]]\n",
        &[
            "1: disk[0].name: missing; it must be 1 to 64 printable ASCII characters without a space at \
             either end",
            "1: disk[0].kind: missing; it must be \"ram\", \"null\", \"file\", \"nvme\", \"ng\" or \
             \"remote\"",
        ],
    );
    check(&[ram("a"), ram("a")].concat(), &["6: disk[1].name = \"a\": also the name of the disk in line 2"]);
}

/// Such a kind would pass the schema and have no plan.
#[test]
fn every_kind_of_the_schema_has_a_plan() {
    use crate::config::kind::Kind;
    use crate::config::schema;
    use crate::config::validate::disks::NOT_SERVED;
    let sections = schema::sections();
    let (.., keys) = sections.iter().find(|(heading, ..)| heading == "[[disk]]").expect("disks");
    let kind = keys.iter().find(|key| key.name == "kind").expect("a kind");
    let Kind::Word(words) = kind.kind else { panic!("words") };
    assert_eq!(words.len(), 6);
    for word in words {
        // Each lacks a key, and says only that.
        let found = errors(&format!("{LISTENER}[[disk]]\nname = \"a\"\nkind = {word:?}\n"));
        assert!(!found.iter().any(|error| error.contains(NOT_SERVED)), "{word}: {found:?}");
    }
}

#[test]
fn other_targets_that_are_not_named_or_named_twice() {
    let remote = "kind = \"remote\"\naddress = \"192.0.2.7:4420\"\nnqn = \"nqn.2026-01.io.spindle:far\"\n";
    let disk = |name: &str, more: &str| format!("[[disk]]\nname = \"{name}\"\n{more}");
    check(
        &disk("a", "kind = \"remote\"\n"),
        &[
            "1: disk[0].address: missing; a remote disk needs that of the other target, like \
             \"192.0.2.7:4420\"",
            "1: disk[0].nqn: missing; a remote disk needs that of the other target, like \
             \"nqn.2026-01.io.spindle:far\"",
        ],
    );
    check(
        &[disk("a", remote), disk("b", remote)].concat(),
        &["10: disk[1].nqn = \"nqn.2026-01.io.spindle:far\": namespace 1 is also the disk in line 5; \
           two would destroy it"],
    );
    check(
        &disk("a", &format!("{remote}size = 4096\n")),
        &["6: disk[0].size = 4096: the other target says the size of its namespace; leave it out"],
    );
    check(
        &disk("a", "kind = \"null\"\nsize = 4096\naddress = \"192.0.2.7:4420\"\n"),
        &["5: disk[0].address = \"192.0.2.7:4420\": a null disk has no address; it is for kind = \
           \"remote\""],
    );
    for (line, allowed) in [
        ("command_timeout_ms = 999", "must be a whole number from 1000 to 3600000"),
        ("command_timeout_ms = 3600001", "must be a whole number from 1000 to 3600000"),
        ("quiesce_ms = 600001", "must be a whole number from 0 to 600000"),
    ] {
        let expected = format!("6: disk[0].{line}: {allowed}");
        check(&disk("a", &format!("{remote}{line}\n")), &[expected.as_str()]);
        let key = line.split(' ').next().unwrap_or_default();
        check(
            &disk("a", &format!("kind = \"null\"\nsize = 4096\n{key} = 1000\n")),
            &[&format!("5: disk[0].{key} = 1000: a null disk has no {key}; it is for kind = \"remote\"")],
        );
    }
}

#[test]
fn settings_of_optimistic_reads_are_for_remote_disks_that_have_them() {
    let remote = "kind = \"remote\"\naddress = \"192.0.2.7:4420\"\nnqn = \"nqn.2026-01.test:far\"\n";
    let disk = |lines: &str| format!("[[disk]]\nname = \"a\"\n{lines}");
    let no_effect = "has no effect without optimistic = true; set that, or leave it out";
    for (lines, expected) in [
        ("optimistic_pages = 4096\n", format!("6: disk[0].optimistic_pages = 4096: {no_effect}")),
        ("optimistic_eager = true\n", format!("6: disk[0].optimistic_eager = true: {no_effect}")),
        (
            "optimistic_pages = 1\noptimistic = true\n",
            "6: disk[0].optimistic_pages = 1: must be a whole number from 1024 to 16777216".to_owned(),
        ),
    ] {
        check(&disk(&[remote, lines].concat()), &[expected.as_str()]);
    }
    let null = "kind = \"null\"\nsize = 4096\noptimistic = true\n";
    let expected = "5: disk[0].optimistic = true: a null disk has no optimistic; it is for kind = \"remote\"";
    check(&disk(null), &[expected]);
}

#[test]
fn drives_whose_keys_do_not_fit_them() {
    let disk = |kind: &str, more: &str| format!("[[disk]]\nname = \"a\"\nkind = \"{kind}\"\n{more}");
    for (kind, more, expected) in [
        (
            "nvme",
            "",
            "1: disk[0].nvme: missing; an nvme disk needs the PCI address of its drive, like \
             \"0000:01:00.0\"",
        ),
        (
            "nvme",
            "nvme = \"01:00.0\"",
            "4: disk[0].nvme = \"01:00.0\": PCI address \"01:00.0\": form is \"01:00.0\": allowed is \
             domain:bus:device.function, as in 0000:01:00.0; must be a PCI address, like \"0000:01:00.0\"",
        ),
        (
            "ng",
            "",
            "1: disk[0].ng: missing; an ng disk needs the generic device of its namespace, like \
             \"/dev/ng0n1\"",
        ),
        (
            "ng",
            "ng = \"/dev/null\"",
            "4: disk[0].ng = \"/dev/null\": must be the generic device of an NVMe namespace, like \
             /dev/ng0n1: it is no generic device of an NVMe namespace",
        ),
        (
            "ram",
            "size = 4096\nng = \"/dev/ng0n1\"",
            "5: disk[0].ng = \"/dev/ng0n1\": a ram disk has no ng; it is for kind = \"ng\"",
        ),
        (
            "null",
            "size = 4096\npoll = true",
            "5: disk[0].poll = true: a null disk has no poll; it is for kind = \"file\"",
        ),
        (
            "null",
            "size = 4096\nnamespace = 2",
            "5: disk[0].namespace = 2: a null disk has no namespace; it is for kind = \"nvme\" or \"remote\"",
        ),
    ] {
        check(&disk(kind, more), &[expected]);
    }
}

#[test]
fn a_missing_drive_fails_the_config_check_and_other_disks_are_served_at_start() {
    let text = [LISTENER, "[[disk]]\nname = \"d\"\nnvme = \"fffe:ff:1f.7\"\n", &ram("a")].concat();
    let to_look_at = Machine { is_for_start: false, ..machine() };
    assert_eq!(
        errors_on(&text, &to_look_at),
        ["t.toml:5: disk[0].nvme = \"fffe:ff:1f.7\": must be a drive of this machine: there is no such PCI \
          function; spindle nvme list shows the drives"]
    );
    assert_eq!(plan(&text).disks.len(), 2);
}

#[test]
fn files_that_are_not_there_may_come_at_the_start_and_are_refused_later() {
    let directory = Directory::new();
    let folder = directory.0.display().to_string();
    let missing = format!("{folder}/missing");
    let disk = |path: &str, more: &str| {
        format!("[[disk]]\nname = \"a\"\nkind = \"file\"\npath = \"{path}\"\n{more}")
    };
    let to_look_at = Machine { is_for_start: false, ..machine() };
    for (path, more, expected) in [
        (missing.as_str(), "", "there is no such file; create = true with a size makes a sparse one"),
        (
            &format!("{folder}/no/a"),
            "create = true\nsize = 4096",
            &*format!("cannot be made: there is no directory {folder}/no"),
        ),
    ] {
        let text = format!("{LISTENER}{}", disk(path, more));
        let expected = format!("t.toml:6: disk[0].path = \"{path}\": {expected}");
        assert_eq!(errors_on(&text, &to_look_at), [expected.as_str()]);
        assert!(plan(&text).disks[0].medium.is_away);
        let in_force = Some(&plan(LISTENER)).cloned();
        let added = parse_beside(&text, Path::new("t.toml"), &machine(), in_force.as_ref(), &[]);
        assert_eq!(added.map_err(|errors| errors.to_string()).err(), Some(expected));
    }
}

#[test]
fn files_that_are_not_usable_or_not_of_that_size() {
    let directory = Directory::new();
    let (file, folder) = (directory.file("f", 10_000), directory.0.display().to_string());
    let disk = |path: &str, more: &str| {
        format!("[[disk]]\nname = \"a\"\nkind = \"file\"\npath = \"{path}\"\n{more}")
    };
    let missing = format!("{folder}/missing");
    for (path, more, expected) in [
        (folder.as_str(), "", "must be a regular file or a block device; this is a directory"),
        ("/dev/null", "", "must be a regular file or a block device; this is a character device"),
        (
            file.as_str(),
            "",
            "the file has 10000 bytes, which are not a multiple of block_bytes = 512, at least one block; \
             give it a size that is",
        ),
    ] {
        check(&disk(path, more), &[&format!("4: disk[0].path = \"{path}\": {expected}")]);
    }
    for (more, expected) in [
        (
            "size = 8192",
            "5: disk[0].size = 8192: the file has 10000 bytes, and a smaller disk would cut off its end; \
             leave the size out, or shorten the file yourself"
                .to_owned(),
        ),
        (
            "size = 10240\nread_only = true",
            format!("5: disk[0].size = 10240: {file} has 10000 bytes and does not grow; leave the size out"),
        ),
    ] {
        check(&disk(&file, more), &[&expected]);
    }
    check(
        &disk(&missing, "create = true"),
        &["5: disk[0].create = true: a file that is made needs a size as well, like size = \"1 GiB\""],
    );
    assert_eq!(
        plan(&format!("{}\n{LISTENER}", disk(&file, "size = 8192\nread_only = true"))).disks[0].bytes,
        8192
    );
    let link = format!("{folder}/link");
    std::os::unix::fs::symlink(&file, &link).expect("a link");
    let twice =
        [disk(&file, "size = 10240"), disk(&link, "size = 10240").replace("\"a\"", "\"b\"")].join("\n");
    check(
        &twice,
        &[&format!(
            "9: disk[1].path = \"{link}\": also the path of the disk in line 4; two would destroy it"
        )],
    );
    plan(&format!("{}\n{LISTENER}", twice.replace("size = 10240", "size = 8192\nread_only = true")));
}

#[test]
fn listeners_that_cannot_both_be() {
    let listener = |address: &str, more: &str| format!("[[listener]]\naddress = \"{address}\"\n{more}");
    for (address, expected) in [
        (
            "127.0.0.1:4420",
            "5: listener[1].address = \"127.0.0.1:4420\": already listened on by 127.0.0.1:4420 in line 2",
        ),
        (
            "0.0.0.0:4420",
            "5: listener[1].address = \"127.0.0.1:4420\": already listened on by 0.0.0.0:4420 in line 2",
        ),
    ] {
        assert_eq!(
            errors(&format!("{}\n\n{LISTENER}", listener(address, "").trim_end())),
            [format!("t.toml:{expected}")]
        );
    }
    plan(&format!("{}{}{LISTENER}", listener("[::]:4420", ""), listener("127.0.0.1:4421", "")));
    let named = [listener("10.0.0.1:1", "name = \"a\"\n"), listener("10.0.0.1:2", "name = \"a\"\n")].concat();
    check(&named, &["6: listener[1].name = \"a\": also that of the listener in line 3"]);
}

#[test]
fn subsystems_that_nobody_or_two_could_be() {
    check(
        "[[subsystem]]\nnqn = \"\"\nallow_any_host = true",
        &["2: subsystem[0].nqn = \"\": an NQN has at least one byte; must be an NQN, like \
             \"nqn.2026-01.io.spindle:a\": at most 223 bytes, no control or invisible characters"],
    );
    check(
        "[[subsystem]]\nnqn = \"nqn.2014-08.org.nvmexpress.discovery\"\nallow_any_host = true",
        &["2: subsystem[0].nqn = \"nqn.2014-08.org.nvmexpress.discovery\": is the discovery service's, \
             which every listener \
           has; choose another name"],
    );
    check(
        "[[subsystem]]\nnqn = \"nqn.a:b\"",
        &["1: subsystem[0].hosts: missing; say who may connect: a list of host NQNs, or allow_any_host = \
             true"],
    );
    let s = |more: &str| format!("[[subsystem]]\nnqn = \"nqn.a:b\"\nallow_any_host = true\n{more}");
    for (more, expected) in [
        (
            "hosts = [\"nqn.a:h\"]",
            "3: subsystem[0].allow_any_host = true: hosts lists who may connect; leave one of the two out",
        ),
        (
            "listeners = [\"back\"]",
            "4: subsystem[0].listeners[0] = \"back\": must be the name of a [[listener]]; there is \
             \"127.0.0.1:4420\"",
        ),
        ("cntlid_min = 9\ncntlid_max = 8", "5: subsystem[0].cntlid_max = 8: the range is empty: 9 to 8"),
        (
            "serial = \"123456789012345678901\"",
            "4: subsystem[0].serial = \"123456789012345678901\": must be 1 to 20 printable ASCII characters \
             without a space at either end",
        ),
        (
            "model = \"Spindle \"",
            "4: subsystem[0].model = \"Spindle \": must be 1 to 40 printable ASCII characters without a \
             space at either end",
        ),
    ] {
        check(&s(more), &[expected]);
    }
    let twice = [s("serial = \"A\"\n"), s("serial = \"A\"\n")].concat();
    check(
        &twice,
        &[
            "6: subsystem[1].nqn = \"nqn.a:b\": also that of the subsystem in line 2",
            "8: subsystem[1].serial = \"A\": also that of the subsystem in line 4",
        ],
    );
}

#[test]
fn namespaces_that_collide_or_have_no_disk() {
    let text = format!("{}{}", ram("a"), subsystem("s", &["a", "a", "b"]).replace("nsid = 2", "nsid = 1"));
    check(
        &text,
        &[
            "12: subsystem[0].namespace[1].nsid = 1: also that of the namespace in line 9",
            "13: subsystem[0].namespace[1].disk = \"a\": also that of the namespace in line 10",
            "16: subsystem[0].namespace[2].disk = \"b\": must be the name of a [[disk]]; there is \"a\"",
        ],
    );
    let zero = format!("{}{}", ram("a"), subsystem("s", &["a"]).replace("nsid = 1", "nsid = 0"));
    check(&zero, &["9: subsystem[0].namespace[0].nsid = 0: must be a whole number from 1 to 1024"]);
    let shared = format!("{}{}{}", ram("a"), subsystem("s", &["a"]), subsystem("t", &["a"]));
    check(&shared, &["16: subsystem[1].namespace[0].disk = \"a\": also that of the namespace in line 10"]);
    let identity =
        "uuid = \"6f1b3b7e-9d7a-5c1e-8a55-0d9f3c2b1a00\"\nnguid = \"6f1b3b7e9d7a5c1e8a550d9f3c2b1a00\"\n";
    let twins = [
        ram("a"),
        ram("b"),
        subsystem("s", &["a"]),
        identity.to_owned(),
        subsystem("t", &["b"]),
        identity.to_owned(),
    ];
    check(
        &twins.concat(),
        &[
            "23: subsystem[1].namespace[0].uuid = \"6f1b3b7e-9d7a-5c1e-8a55-0d9f3c2b1a00\": also that of \
             the namespace in line 15",
            "24: subsystem[1].namespace[0].nguid = \"6f1b3b7e9d7a5c1e8a550d9f3c2b1a00\": also that of the \
             namespace in line 16",
        ],
    );
    let none = "uuid = \"00000000-0000-0000-0000-000000000000\"\nnguid = \"12\"";
    check(
        &[&ram("a"), &subsystem("s", &["a"]), none].concat(),
        &[
            "11: subsystem[0].namespace[0].uuid = \"00000000-0000-0000-0000-000000000000\": must be a UUID \
             like \"6f1b3b7e-9d7a-5c1e-8a55-0d9f3c2b1a00\", not all zeroes",
            "12: subsystem[0].namespace[0].nguid = \"12\": must be 32 hexadecimal digits, not all zeroes",
        ],
    );
}

/// A disk that got another name keeps its identity by the file, and a new one takes the old name and number.
#[test]
fn an_identity_that_is_given_and_derived_elsewhere() {
    let before = plan(&[LISTENER, &null("a"), &subsystem("s", &["a"])].concat());
    let old = &before.subsystems[0].namespaces[0];
    let (uuid, nguid) = (old.uuid.expect("derived"), old.nguid.expect("derived"));
    let (uuid, nguid) = (uuid::Uuid::from_bytes(uuid), u128::from_be_bytes(nguid));
    let identity = format!("uuid = \"{uuid}\"\nnguid = \"{nguid:032x}\"\n");
    let after = [&null("a"), &null("a-old"), &subsystem("s", &["a", "a-old"]), identity.as_str()].concat();
    check(
        &after,
        &[
            &format!(
                "18: subsystem[0].namespace[1].uuid = \"{uuid}\": also what the namespace in line 12 has \
                 when it is given none"
            ),
            &format!(
                "19: subsystem[0].namespace[1].nguid = \"{nguid:032x}\": also what the namespace in line \
                 12 has when it is given none"
            ),
        ],
    );
    // What it is anyway may be said.
    let same = plan(&[LISTENER, &null("a"), &subsystem("s", &["a"]), identity.as_str()].concat());
    assert_eq!(same.subsystems, before.subsystems);
}

#[test]
fn a_medium_is_held_to_its_name() {
    let directory = Directory::new();
    let path = directory.file("f", 4096);
    let disk = |id: &str| {
        format!("[[disk]]\nname = \"f\"\nkind = \"file\"\npath = \"{path}\"\nmedium_id = \"{id}\"\n")
    };
    let ids = spindle_target_disk::medium_id::at(Path::new(&path)).expect("there");
    let wrong = errors(&[disk("eui.1"), LISTENER.to_owned()].concat());
    let Some(id) = ids.first() else {
        assert!(wrong[0].contains("has no name of its own to be known by"), "{wrong:?}");
        return spindle_tests_skip::skip("the file system of the temporary folder has no birth times");
    };
    let expected = format!(
        "t.toml:5: disk[0].medium_id = \"eui.1\": must be a name of the medium that is meant; {path} is \
         another one, {id:?}"
    );
    assert_eq!(wrong, [expected]);
    let right = plan(&[disk(id), LISTENER.to_owned()].concat());
    assert_eq!(right.disks[0].medium_id.as_ref(), Some(id));
    // Another file takes its place before it is opened.
    std::fs::rename(&path, directory.0.join("g")).expect("moved");
    directory.file("f", 4096);
    let error = right.snapshot(None, &LocalDrives, &[]).err().expect("refused").to_string();
    assert!(error.contains(&format!("disk \"f\": medium_id = {id:?}: must be a name of")), "{error}");
    let foreign = errors(&[&ram("a"), "medium_id = \"eui.1\"\n", LISTENER].concat());
    assert!(foreign[0].contains("a ram disk has no medium_id; it is for kind = \"file\""), "{foreign:?}");
}

#[test]
fn everything_that_is_wrong_is_said_at_once() {
    let found = errors(
        "[reactor]\ncores = [9]\nidel = 1\n[[disk]]\nname = \"a\"\nkind = \"ram\"\nsize = \
         5000\n[[subsystem]]\nnqn = \"\"\n\
         [[subsystem.namespace]]\nnsid = 1\ndisk = \"b\"\n",
    );
    let fields: Vec<&str> =
        found.iter().filter_map(|error| error.split(": ").nth(1)?.split(" =").next()).collect();
    assert_eq!(
        fields,
        [
            "reactor.cores[0]",
            "reactor.idel",
            "disk[0].size",
            "subsystem[0].hosts",
            "subsystem[0].nqn",
            "subsystem[0].namespace[0].disk"
        ]
    );
}

#[test]
fn a_value_that_is_long_is_shown_from_its_beginning() {
    let found = errors(&format!("[log]\nlevel = \"{}\"\n{LISTENER}", "x".repeat(1000)));
    assert!(found[0].len() < 200 && found[0].contains("xxx ...: must be"), "{found:?}");
}

#[test]
fn a_file_that_cannot_be_read_says_why() {
    let error = Config::load(Path::new("/nonexistent/t.toml")).expect_err("no file").to_string();
    assert_eq!(
        error,
        "/nonexistent/t.toml: cannot read the configuration: No such file or directory (os error 2)"
    );
    let directory = Directory::new();
    let path = directory.0.join("binary");
    std::fs::write(&path, [0xff, 0xfe]).expect("a file");
    let error = Config::load(&path).expect_err("not text").to_string();
    assert!(error.contains("cannot read the configuration") && error.contains("UTF-8"), "{error}");
    assert!(Config::load(&directory.0).is_err(), "a directory");
    let error = Config::load(Path::new("/dev/zero")).expect_err("it has no end").to_string();
    assert!(error.contains("longer than 4 MiB"), "{error}");
}

#[test]
fn an_error_shows_no_more_of_a_line_than_a_screen_has() {
    let error = parse(&"[".repeat(100_000), Path::new("t.toml"), &machine()).expect_err("not TOML");
    assert!(error.lines().all(|line| line.len() < 300), "{} bytes", error.to_string().len());
}
