//! Sections that come and go, and what is wrong with a section as a whole.

use super::template::{KINDS, LISTENER, NULL, SUBSYSTEM, disk, namespace, served};

/// What changes, the file before, and the file after.
pub type Case = (String, String, String);

/// A section: its heading, the text of one with a key, and the rest of the file, before it.
struct Sample {
    heading: &'static str,
    /// A key that the section has, nearly.
    misspelt: &'static str,
    text: String,
    rest: String,
}

fn sample(heading: &'static str, misspelt: &'static str, keys: &str) -> Sample {
    let rest = [NULL, &served("n")].concat();
    Sample { heading, misspelt, text: format!("{heading}\n{keys}"), rest }
}

fn samples() -> Vec<Sample> {
    let in_disk = |kind: &str| [LISTENER, SUBSYSTEM, &namespace(1, "d"), &disk("d", kind)].concat();
    let subsystem = [LISTENER, NULL, SUBSYSTEM].concat();
    vec![
        sample("[reactor]", "coress", "pin = false\n"),
        sample("[pool]", "page", "pages = \"base\"\n"),
        sample("[[pool.zone]]", "buffers", "buffer = \"1MiB\"\ncount = 4\n"),
        sample("[limits]", "transfers", "transfer = \"512KiB\"\n"),
        sample("[tcp]", "in_capsules", "in_capsule = 0\n"),
        sample("[rdma]", "segment", "segments = 8\n"),
        sample("[[disk]]", "nam", "name = \"d\"\nkind = \"null\"\nsize = \"1MiB\"\n"),
        Sample { rest: in_disk("file"), ..sample("[disk.cache]", "modes", "size = \"1MiB\"\n") },
        Sample { rest: in_disk("ram"), ..sample("[disk.delay]", "seek", "latency_us = 100\n") },
        Sample {
            rest: in_disk("ram"),
            ..sample("[disk.cluster]", "agent", "agents = [\"nqn.2026-01.test:a\"]\n")
        },
        sample("[[listener]]", "adress", "address = \"127.0.0.1:4421\"\n"),
        sample("[[subsystem]]", "host", "nqn = \"nqn.2026-01.test:t\"\nallow_any_host = true\n"),
        Sample { rest: subsystem, ..sample("[[subsystem.namespace]]", "nssid", "nsid = 1\ndisk = \"n\"\n") },
        sample("[[referral]]", "transports", "address = \"192.0.2.9:8009\"\n"),
        sample("[discovery]", "keep_alive", "keep_alive_ms = 5000\n"),
        sample("[log]", "levels", "level = \"debug\"\n"),
        sample("[control]", "sockets", "socket = \"/run/a\"\n"),
        sample("[shutdown]", "deadline", "deadline_ms = 1\n"),
    ]
}

pub fn headings() -> Vec<&'static str> {
    samples().iter().map(|sample| sample.heading).collect()
}

/// The stanzas with their cases.
pub fn all() -> Vec<(String, Vec<Case>)> {
    let of_sections = samples().into_iter().map(|sample| (sample.heading.to_owned(), of_section(&sample)));
    let others = [
        ("sections of each kind of disk", of_kinds()),
        ("names twice", names_twice()),
        ("names of what changes", renamed()),
        ("rules between keys", rules()),
        ("the file", whole_files()),
    ];
    of_sections.chain(others.map(|(name, cases)| (name.to_owned(), cases))).collect()
}

fn case(what: &str, from: &str, to: &str) -> Case {
    (what.to_owned(), from.to_owned(), to.to_owned())
}

fn of_section(sample: &Sample) -> Vec<Case> {
    let Sample { heading, misspelt, text, rest } = sample;
    let with = [rest.as_str(), text].concat();
    let path = heading.trim_matches(['[', ']']);
    let name = path.rsplit('.').next().unwrap_or_default();
    let other = if heading.starts_with("[[") { format!("[{path}]") } else { format!("[[{path}]]") };
    let keys = text.strip_prefix(heading).unwrap_or_default();
    let as_value = match path {
        "pool.zone" => format!("{rest}[pool]\n{name} = 7\n"),
        // The rest ends with the section that has this one.
        _ if path.contains('.') => format!("{rest}{name} = 7\n"),
        _ => format!("{name} = 7\n{rest}"),
    };
    vec![
        case("added", rest, &with),
        case("removed", &with, rest),
        case("added without keys", rest, &format!("{rest}{heading}\n")),
        case("added twice", rest, &format!("{with}{text}")),
        case("with the heading of the other form", rest, &format!("{rest}{other}{keys}")),
        case("as a value", rest, &as_value),
        case("with a key that is misspelt", &with, &format!("{with}{misspelt} = 7\n")),
        case("with a key of no section", &with, &format!("{with}quite_another_one = 7\n")),
        case("with a key of another section", &with, &format!("{with}{} = 7\n", foreign_key(path))),
        case(
            "with a key twice",
            &with,
            &format!("{with}{}\n", keys.trim().lines().next().unwrap_or_default()),
        ),
        case(
            "with a name that is misspelt",
            rest,
            &format!("{rest}{}", text.replacen(name, &format!("{name}x"), 1)),
        ),
    ]
}

/// A key that only another section has.
fn foreign_key(path: &str) -> &'static str {
    if path == "limits" { "shared_receives" } else { "keep_alive_ms_max" }
}

/// Each kind of disk: the disk, its cache and its delay, added and removed, and the next kind in its place.
fn of_kinds() -> Vec<Case> {
    let mut cases = Vec::new();
    for (kind, next) in KINDS.iter().zip(KINDS.iter().cycle().skip(1)) {
        let (without, with) =
            ([NULL, &served("n")].concat(), [NULL, &served("n"), &disk("d", kind)].concat());
        let sole_writer = if *kind == "remote" { "sole_writer = true\n" } else { "" };
        let cache = format!("{with}[disk.cache]\nsize = \"1MiB\"\n{sole_writer}");
        let delay = format!("{with}[disk.delay]\nseek_us = 1\n");
        let other = [NULL, &served("n"), &disk("d", next)].concat();
        cases.push(case(&format!("a {kind} disk is added"), &without, &with));
        cases.push(case(&format!("a {kind} disk is removed"), &with, &without));
        cases.push(case(&format!("a {kind} disk gets a cache"), &with, &cache));
        if !["ram", "null"].contains(kind) {
            cases.push(case(&format!("a {kind} disk loses its cache"), &cache, &with));
        }
        cases.push(case(&format!("a {kind} disk gets a delay"), &with, &delay));
        cases.push(case(&format!("a {kind} disk loses its delay"), &delay, &with));
        cases.push(case(&format!("a {kind} disk becomes a {next} disk"), &with, &other));
    }
    cases
}

fn names_twice() -> Vec<Case> {
    let rest = [NULL, &served("n")].concat();
    let also = |what: &str, more: &str| case(what, &rest, &format!("{rest}{more}"));
    let second = "[[subsystem]]\nnqn = \"nqn.2026-01.test:t\"\nallow_any_host = true\n";
    let serial = format!("{second}serial = \"T\"\n");
    let uuid = "uuid = \"6f1b3b7e-9d7a-5c1e-8a55-0d9f3c2b1a00\"\n";
    let nguid = "nguid = \"6f1b3b7e9d7a5c1e8a550d9f3c2b1a00\"\n";
    let twice = |identity: &str| {
        let disks = [disk("d", "null"), disk("e", "null")].concat();
        [&disks, second, &namespace(1, "d"), identity, &namespace(2, "e"), identity].concat()
    };
    let referral = "[[referral]]\naddress = \"192.0.2.9:8009\"\n";
    let two = |kind: &str| [disk("d", kind), disk("e", kind)].concat();
    let read_only = two("file").replace("kind = \"file\"\n", "kind = \"file\"\nread_only = true\n");
    vec![
        also("two disks of one name", &disk("n", "null")),
        also(
            "two listeners of one name",
            "[[listener]]\naddress = \"127.0.0.1:4421\"\nname = \"127.0.0.1:4420\"\n",
        ),
        also("two listeners at one address", LISTENER),
        also("a listener at every address and one at one", "[[listener]]\naddress = \"0.0.0.0:4420\"\n"),
        also("two listeners at one address, of two transports", &format!("{LISTENER}transport = \"rdma\"\n")),
        also("two subsystems of one name", SUBSYSTEM),
        also("two subsystems of one serial number", &format!("{serial}{}", serial.replace(":t", ":u"))),
        also("two namespaces of one number", &[&disk("d", "null"), &*namespace(1, "d")].concat()),
        also("two namespaces of one disk", &namespace(2, "n")),
        also("two namespaces of one UUID", &twice(uuid)),
        also("two namespaces of one NGUID", &twice(nguid)),
        also("two referrals to one address", &[referral, referral].concat()),
        also("two disks of one file", &two("file")),
        also("two disks that are read only, of one file", &read_only),
        also("two disks of one namespace of a drive", &two("nvme")),
        also("two disks of one generic device", &two("ng")),
        also("two disks of one far namespace", &two("remote")),
    ]
}

fn renamed() -> Vec<Case> {
    let before = [&disk("d", "null"), NULL, &*served("d")].concat();
    let name = before.replace("name = \"d\"", "name = \"e\"");
    let both = name.replace("disk = \"d\"", "disk = \"e\"");
    let uuid = "uuid = \"6f1b3b7e-9d7a-5c1e-8a55-0d9f3c2b1a00\"\n";
    let nguid = "nguid = \"6f1b3b7e9d7a5c1e8a550d9f3c2b1a00\"\n";
    let [with_uuid, with_nguid] = [uuid, nguid].map(|identity| [&before, identity].concat());
    let other = |text: &str| text.replace("disk = \"d\"", "disk = \"n\"");
    let listener = before.replace("4420\"\n", "4420\"\nname = \"l\"\n");
    let elsewhere = before.replace(":4420", ":4422");
    vec![
        case("the name of a disk in a namespace", &before, &name),
        case("the name of a disk, and of that of the namespace", &before, &both),
        case("the disk of a namespace", &before, &other(&before)),
        case("the disk of a namespace with a UUID", &with_uuid, &other(&with_uuid)),
        case("the disk of a namespace with an NGUID", &with_nguid, &other(&with_nguid)),
        case("the name of a listener", &before, &listener),
        case("the address of a listener", &before, &elsewhere),
        case("the name of a subsystem", &before, &before.replace("test:s", "test:t")),
        case("the order of the disks", &before, &[NULL, &disk("d", "null"), &*served("d")].concat()),
        case("a comment", &before, &format!("# A comment.\n{before}")),
    ]
}

fn rules() -> Vec<Case> {
    let rest = [NULL, &served("n")].concat();
    let also = |what: &str, more: &str| case(what, &rest, &format!("{rest}{more}"));
    let of_rdma = format!("{LISTENER}transport = \"rdma\"\n");
    let with_rdma = format!("{rest}{of_rdma}");
    let zone = |bytes: &str, count: u32| format!("[[pool.zone]]\nbuffer = \"{bytes}\"\ncount = {count}\n");
    let ram = |more: &str| format!("{}[limits]\n{more}", disk("r", "ram").replace("1MiB", "12GiB"));
    let larger = |bytes: &str| format!("{with_rdma}in_capsule = \"{bytes}\"\n");
    let file = disk("d", "file");
    vec![
        also("the first listener on RDMA", &of_rdma),
        case("no listener on RDMA any more", &with_rdma, &rest),
        case("receives on RDMA for less", &larger("8KiB"), &larger("4KiB")),
        case("receives on RDMA for more", &larger("8KiB"), &larger("16KiB")),
        also(
            "the port of an RDMA listener for optimistic reads",
            &format!("{of_rdma}[rdma]\noptimistic_port = 4420\n"),
        ),
        case(
            "in_capsule of TCP, where the listener has its own",
            &rest.replace("4420\"\n", "4420\"\nin_capsule = 0\n"),
            &format!(
                "{}[tcp]\nin_capsule = \"8KiB\"\n",
                rest.replace("4420\"\n", "4420\"\nin_capsule = 0\n")
            ),
        ),
        also("zones that descend", &[zone("2MiB", 2), zone("1MiB", 2)].concat()),
        also("17 zones", &(1..=17).map(|n| zone(&format!("{}KiB", 128 * n), 1)).collect::<String>()),
        also("zones that are too small", &zone("64KiB", 64)),
        also("zones too small for two transfers of a file", &[&file, &*zone("1MiB", 1)].concat()),
        also("a RAM disk beyond what is available", &ram("")),
        also("the same at the risk of the operator", &ram("memory_overcommit = true\n")),
        also("a unit as large as a transfer", &format!("{of_rdma}{file}[limits]\nbulk_unit = \"1MiB\"\n")),
        also(
            "optimistic reads of a RAM disk",
            &format!("{}[rdma]\noptimistic_port = 4422\n", disk("r", "ram")),
        ),
    ]
}

fn whole_files() -> Vec<Case> {
    let rest = [NULL, &served("n")].concat();
    let to = |what: &str, text: &str| case(what, &rest, text);
    vec![
        to("is empty", ""),
        to("is not TOML", "[tcp\n"),
        to("is not TOML in two places", "[tcp\nin_capsule =\n[log]\n"),
        to("has a section that is misspelt", &format!("{rest}[limit]\ntransfer = 4096\n")),
        to("has a section of another name", &format!("{rest}[quite_another_one]\na = 7\n")),
        to("has a key outside its section", &format!("transfer = 4096\n{rest}")),
        to("has three errors", &format!("{rest}[tcp]\nin_capsule = 24\nx = 1\n[log]\nlevel = \"x\"\n")),
        to("has no listener", NULL),
    ]
}
