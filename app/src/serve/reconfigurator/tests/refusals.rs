//! Changes that are refused for what there is: each says which field, which value and what is allowed, and
//! file and target are as they were.

use std::path::PathBuf;

use serde_json::{Value, json};

use super::*;
use crate::rpc::tests::{change, changing};

const A: &str = "nqn.2026-01.test:a";
/// Any host may connect to it, at no listener.
const B: &str = "nqn.2026-01.test:b";
const HOST: &str = "nqn.2026-01.test:h";
const FAR: &str = "nqn.2026-01.test:far";
const DISCOVERY: &str = "nqn.2014-08.org.nvmexpress.discovery";
const UUID: &str = "6f1b3b7e-9d7a-5c1e-8a55-0d9f3c2b1a00";
const NGUID: &str = "6f1b3b7e9d7a5c1e8a550d9f3c2b1a01";

/// The last has no whole number of blocks.
const FILES: [(&str, u64); 3] = [("f0", 2 << 20), ("r0", 1 << 20), ("odd", 1000)];

/// A folder of its own that goes with the value.
pub(super) struct Folder(pub(super) PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A target with a disk of each kind but ng, and its file.
pub(super) fn target() -> (Folder, PathBuf, Reconfigurator) {
    let folder = std::env::temp_dir().join(format!("spindle-refusals-{}", uuid::Uuid::new_v4()));
    std::fs::create_dir(&folder).expect("a fresh folder");
    let path = |name: &str| folder.join(name);
    for (name, bytes) in FILES {
        std::fs::File::create(path(name)).and_then(|file| file.set_len(bytes)).expect("a file");
    }
    let of_file = |name: &str| format!("kind = \"file\"\npath = {:?}\n", path(name));
    let disks = [
        ("m0", "kind = \"ram\"\nsize = \"1MiB\"\n".to_owned()),
        ("n0", "kind = \"null\"\nsize = \"1MiB\"\n".to_owned()),
        ("f0", of_file("f0")),
        ("r0", of_file("r0") + "read_only = true\n"),
        ("far0n1", format!("kind = \"remote\"\naddress = \"192.0.2.7:4420\"\nnqn = {FAR:?}\n")),
        ("pci0n1", format!("nvme = {FIRST:?}\n")),
    ];
    let mut text = "# A comment that stays.\n[[listener]]\naddress = \"127.0.0.1:4420\"\n\
                    [[referral]]\naddress = \"192.0.2.9:8009\"\n"
        .to_owned();
    disks.iter().for_each(|(name, lines)| text.push_str(&format!("[[disk]]\nname = {name:?}\n{lines}")));
    text.push_str(&format!(
        "[[subsystem]]\nnqn = {A:?}\nserial = \"S1\"\nhosts = [{HOST:?}]\nlisteners = [\"127.0.0.1:4420\"]\n\
         [[subsystem.namespace]]\nnsid = 1\ndisk = \"m0\"\n\
         [[subsystem.namespace]]\nnsid = 2\ndisk = \"n0\"\nuuid = {UUID:?}\nnguid = {NGUID:?}\n\
         [[subsystem]]\nnqn = {B:?}\nallow_any_host = true\nlisteners = []\n"
    ));
    let file = path("spindle.toml");
    std::fs::write(&file, text).expect("written");
    let targets = Arc::new(FarTargets::default());
    let remote = Arc::new(move |plan: &RemotePlan| targets.open(plan));
    let origins = Origins { drives: Arc::new(Bays::default()), remote };
    let config = Config::load(&file).unwrap_or_else(|errors| panic!("{errors}"));
    let served = Reconfigurator::open(config, origins, false).unwrap_or_else(|error| panic!("{error}"));
    (Folder(folder), file, served)
}

/// A method, its parameters, and the parts of what is said, with a bar between them.
type Case = (&'static str, Value, &'static str);

fn with(mut params: Value, name: &str, value: impl Into<Value>) -> Value {
    params[name] = value.into();
    params
}

/// Each method that names a subsystem, with one that is not there.
fn of_names_of_subsystems() -> Vec<Case> {
    let host = json!({ "host": "nqn.2026-01.test:x" });
    let at = json!({ "listen_address": { "trtype": "tcp", "traddr": "127.0.0.1" } });
    let methods = [
        ("nvmf_delete_subsystem", json!({})),
        ("nvmf_subsystem_add_ns", json!({ "namespace": { "bdev_name": "f0" } })),
        ("nvmf_subsystem_remove_ns", json!({ "nsid": 1 })),
        ("nvmf_subsystem_add_host", host.clone()),
        ("nvmf_subsystem_remove_host", host),
        ("nvmf_subsystem_allow_any_host", json!({ "allow_any_host": true })),
        ("nvmf_subsystem_add_listener", at.clone()),
        ("nvmf_subsystem_remove_listener", at),
    ];
    let of = |(method, params): (&'static str, Value)| {
        let near = "nqn = \"nqn.2026-01.test:aa\": there is no such subsystem; did you mean \
                    \"nqn.2026-01.test:a\"?";
        let far = "nqn = \"x\": there is no such subsystem; nvmf_get_subsystems lists them";
        let near = (method, with(params.clone(), "nqn", "nqn.2026-01.test:aa"), near);
        [near, (method, with(params, "nqn", "x"), far)]
    };
    methods.into_iter().flat_map(of).collect()
}

fn of_subsystems() -> Vec<Case> {
    let (create, add, remove) =
        ("nvmf_create_subsystem", "nvmf_subsystem_add_host", "nvmf_subsystem_remove_host");
    let new = |name: &str, value: Value| with(json!({ "nqn": "nqn.2026-01.test:c" }), name, value);
    let host = |nqn: &str, host: &str| json!({ "nqn": nqn, "host": host });
    vec![
        (create, new("nqn", A.into()), "nqn = \"nqn.2026-01.test:a\": there is a subsystem of|a new one"),
        (create, new("nqn", DISCOVERY.into()), "subsystem[2].nqn = |choose another name"),
        (create, new("serial_number", "S1".into()), "subsystem[2].serial = \"S1\": also that of the"),
        (create, new("serial_number", "S".repeat(21).into()), "[2].serial = \"SS|must be 1 to 20 printable"),
        (create, new("model_number", " M".into()), "[2].model = \" M\": must be 1 to 40 printable"),
        (
            create,
            with(new("min_cntlid", 9.into()), "max_cntlid", 8),
            "[2].cntlid_max = 8: the range is empty: 9 to 8",
        ),
        (add, host(B, HOST), "host = \"nqn.2026-01.test:h\": every host may connect|first"),
        (remove, host(A, "nqn.2026-01.test:i"), "host = \"nqn.2026-01.test:i\"|mean \"nqn.2026-01.test:h\"?"),
        (remove, host(A, "x"), "host = \"x\": there is no such host in the list; nvmf_get_subsystems has it"),
        (remove, host(B, HOST), "host = \"nqn.2026-01.test:h\": every host may connect|to change that"),
    ]
}

fn of_namespaces() -> Vec<Case> {
    let (add, remove) = ("nvmf_subsystem_add_ns", "nvmf_subsystem_remove_ns");
    let of = |disk: &str, name: &str, value: Value| {
        let namespace = with(json!({ "bdev_name": disk }), name, value);
        json!({ "nqn": A, "namespace": namespace })
    };
    let disk = |disk: &str| of(disk, "nsid", Value::Null);
    vec![
        (add, disk("m00"), "namespace.bdev_name = \"m00\": there is no such disk; did you mean \"m0\"?"),
        (add, disk("other"), "namespace.bdev_name = \"other\": there is no such disk; bdev_get_bdevs lists"),
        (add, disk("m0"), "subsystem[0].namespace[2].disk = \"m0\": also that of the namespace in line"),
        (
            add,
            of("f0", "nsid", 1.into()),
            "namespace.nsid = 1: the subsystem has a namespace of this number; the lowest free is 3",
        ),
        (add, of("f0", "uuid", UUID.into()), "namespace[2].uuid = \"6f1b|also that of the namespace in line"),
        (add, of("f0", "nguid", NGUID.into()), "namespace[2].nguid = \"6f1b|also that of the namespace in"),
        (
            remove,
            json!({ "nqn": A, "nsid": 3 }),
            "nsid = 3: the subsystem has no namespace of this number; nvmf_get_subsystems lists them",
        ),
    ]
}

/// Whatever takes an address, with what is none.
fn of_addresses() -> Vec<Case> {
    let mut cases: Vec<Case> = Vec::new();
    for (method, name) in [
        ("nvmf_subsystem_add_listener", "listen_address"),
        ("nvmf_subsystem_remove_listener", "listen_address"),
        ("nvmf_discovery_add_referral", "address"),
        ("nvmf_discovery_remove_referral", "address"),
        ("bdev_nvme_attach_controller", ""),
    ] {
        for (part, value, said) in [
            ("traddr", "host", "traddr = \"host\": must be an IP address, like"),
            ("traddr", "127.0.0.1:4420", "traddr = \"127.0.0.1:4420\": must be an IP address, like"),
            ("adrfam", "IPv6", "adrfam = \"IPv6\": must be \"ipv4\", the family of traddr = \"192.0.2.1\""),
            ("trsvcid", "0", "trsvcid = \"0\": must be a port from 1 to 65535"),
            ("trsvcid", "65536", "trsvcid = \"65536\": must be a port from 1 to 65535"),
            ("trsvcid", "+4420", "trsvcid = \"+4420\": must be a port from 1 to 65535"),
            ("trsvcid", "nvme", "trsvcid = \"nvme\": must be a port from 1 to 65535"),
        ] {
            let address = with(json!({ "trtype": "tcp", "traddr": "192.0.2.1" }), part, value);
            let params = match name {
                "" => with(with(address, "name", "x"), "subnqn", A),
                "address" => json!({ "address": address }),
                name => with(json!({ "nqn": A }), name, address),
            };
            cases.push((method, params, said));
        }
    }
    cases
}

fn of_listeners_referrals_and_transports() -> Vec<Case> {
    let at = |trtype: &str, ip: &str, port: &str| json!({ "trtype": trtype, "traddr": ip, "trsvcid": port });
    let of_a = |address: Value| json!({ "nqn": A, "listen_address": address });
    let referral = |address: Value| json!({ "address": address });
    let (add, remove) = ("nvmf_subsystem_add_listener", "nvmf_subsystem_remove_listener");
    let transport = "nvmf_create_transport";
    let tcp = |name: &str, value: u64| with(json!({ "trtype": "TCP" }), name, value);
    vec![
        (
            add,
            of_a(at("tcp", "0.0.0.0", "4420")),
            "listener[1].address = \"0.0.0.0:4420\": already listened on by 127.0.0.1:4420 in line 3",
        ),
        (add, of_a(at("tcp", "203.0.113.9", "4420")), "listener 203.0.113.9:4420: cannot listen: "),
        (
            add,
            of_a(at("rdma", "127.0.0.1", "4420")),
            "listener 127.0.0.1:4420: transport from \"none\" to \"rdma\": refused|restart to add one",
        ),
        (
            remove,
            of_a(at("tcp", "127.0.0.1", "4421")),
            "listen_address = {|not offered at this address; it is offered at 127.0.0.1:4420 (tcp)",
        ),
        (
            "nvmf_discovery_add_referral",
            referral(at("tcp", "192.0.2.9", "8009")),
            "address = {|\"192.0.2.9\"|there is such a referral; it must be another address",
        ),
        (
            "nvmf_discovery_add_referral",
            referral(at("tcp", "0.0.0.0", "8009")),
            "referral[1].address = \"0.0.0.0:8009\": must be an address at which hosts reach",
        ),
        (
            "nvmf_discovery_remove_referral",
            referral(at("rdma", "192.0.2.9", "8009")),
            "address = {|there is no such referral; there is 192.0.2.9:8009 (tcp)",
        ),
        (
            transport,
            json!({ "trtype": "rdma" }),
            "trtype = \"rdma\": RDMA devices are opened only at|restart",
        ),
        (transport, tcp("max_queue_depth", 17), "max_queue_depth = 17: must be 256, as limits.queue_entries"),
        (transport, tcp("max_io_qpairs_per_ctrlr", 0), "max_io_qpairs_per_ctrlr = 0: must be 64, as limits."),
        (transport, tcp("in_capsule_data_size", 1), "in_capsule_data_size = 1: must be 4096, as tcp.in_"),
        (
            transport,
            tcp("max_io_size", u64::MAX),
            "max_io_size = 18446744073709551615: must be 1048576, as limits.transfer in the file says",
        ),
    ]
}

fn of_new_disks(folder: &Path) -> Vec<Case> {
    let of = |name: &str, blocks: u64, block_size: u64| {
        let name = json!({ "name": name });
        with(with(name, "num_blocks", blocks), "block_size", block_size)
    };
    let mut cases: Vec<Case> = Vec::new();
    for method in ["bdev_malloc_create", "bdev_null_create"] {
        for (params, said) in [
            (of("m0", 8, 512), "name = \"m0\": there is a disk \"m0\"; it must be a new name"),
            (
                of("x", u64::MAX, 512),
                "num_blocks = 18446744073709551615: must be less than 2^63 bytes in all",
            ),
            (of("x", 1 << 51, 4096), "num_blocks = 2251799813685248: must be less than 2^63 bytes in all"),
            (
                of("x", (1 << 53) + 1, 512),
                "disk[6].size = \"4611686018427388416B\": must be a size from 512 B to",
            ),
            (of(" x", 8, 512), "disk[6].name = \" x\": must be 1 to 64 printable"),
            (of(&"x".repeat(65), 8, 512), "disk[6].name = \"xxx|must be 1 to 64 printable"),
        ] {
            cases.push((method, params, said));
        }
    }
    let large = "disk[6].size = \"524288TiB\": |make it smaller";
    cases.push(("bdev_malloc_create", of("x", 1 << 50, 512), large));
    let file = |name: &str, file: &str| json!({ "name": name, "filename": folder.join(file) });
    for method in ["bdev_aio_create", "bdev_uring_create"] {
        for (params, said) in [
            (file("r0", "x"), "name = \"r0\": there is a disk \"r0\"; it must be a new name"),
            (with(file("x", ""), "filename", "x.img"), "disk[6].path = \"x.img\": must be an absolute path"),
            (file("x", "none"), "disk[6].path = |there is no such file; create = true"),
            (file("x", "none/x"), "disk[6].path = |there is no such file; create = true"),
            (file("x", "f0/x"), "disk[6].path = |must be a file or block device that can be looked at"),
            (file("x", "x\0y"), "disk[6].path = |must be a file or block device that can be looked at"),
            (file("x", ""), "disk[6].path = |must be a regular file or a block device; this is a directory"),
            (file("x", "/dev/null"), "disk[6].path = \"/dev/null\": must be a regular file or a block"),
            (
                file("x", "odd"),
                "disk[6].path = |has 1000 bytes, which are not a multiple of block_bytes = 512",
            ),
            (
                with(file("x", "f0"), "block_size", 4096),
                "disk[6].path = |also the path of the disk in line|would destroy it",
            ),
            (file("x", "f0"), "disk[6].path = |also the path of the disk in line|would destroy it"),
        ] {
            cases.push((method, params, said));
        }
    }
    cases
}

fn of_attached_disks() -> Vec<Case> {
    let (attach, detach) = ("bdev_nvme_attach_controller", "bdev_nvme_detach_controller");
    let far = json!({ "name": "x", "trtype": "tcp", "traddr": "192.0.2.7", "trsvcid": "4420" });
    let drive = |traddr: &str| json!({ "name": "x", "trtype": "pcie", "traddr": traddr });
    let of_drive = |name: &str, value: &str| with(drive(SECOND), name, value);
    let name = |name: &str| json!({ "name": name });
    vec![
        (attach, far.clone(), "subnqn: must be given: the subsystem of the other target"),
        (
            attach,
            with(far.clone(), "subnqn", DISCOVERY),
            "disk[6].nqn = |must be a subsystem with namespaces; this is the discovery service",
        ),
        (
            attach,
            with(far, "subnqn", FAR),
            "disk[6].nqn = \"nqn.2026-01.test:far\": namespace 1 is also the disk in line",
        ),
        (attach, drive("01:00.0"), "disk[6].nvme = \"01:00.0\": |must be a PCI address, like"),
        (attach, drive(FIRST), "disk[6].nvme = \"fffe:ff:1f.6\": namespace 1 is also the disk in line"),
        (
            attach,
            of_drive("subnqn", A),
            "subnqn = \"nqn.2026-01.test:a\": must not be given with trtype pcie",
        ),
        (
            attach,
            of_drive("hostnqn", HOST),
            "hostnqn = \"nqn.2026-01.test:h\": must not be given with trtype",
        ),
        (attach, of_drive("trsvcid", "4420"), "trsvcid = \"4420\": must not be given with trtype pcie"),
        (attach, of_drive("adrfam", "ipv4"), "adrfam = \"ipv4\": must not be given with trtype pcie"),
        (attach, of_drive("name", "far0"), "name = \"far0\": there is a disk \"far0n1\"; it must be a new"),
        (detach, name("far"), "name = \"far\": there is no such controller; did you mean \"far0\"?"),
        (detach, name("far0n1"), "name = \"far0n1\": there is no such controller; did you mean \"far0\"?"),
        (detach, name("m"), "name = \"m\": there is no such controller; its disks of kind"),
    ]
}

fn of_known_disks() -> Vec<Case> {
    let size = |of: &str, mib: u64| json!({ "name": of, "new_size": mib });
    let of_ram = "name = \"m0\": is a disk of kind ram; this method is for those of ";
    let mut cases: Vec<Case> = Vec::new();
    for (methods, other, said) in [
        (
            &["bdev_malloc_delete", "bdev_malloc_resize"][..],
            "n0",
            "name = \"n0\": is a disk of kind null; this method is for those of ram",
        ),
        (&["bdev_null_delete", "bdev_null_resize"], "m0", of_ram),
        (
            &["bdev_aio_delete", "bdev_uring_delete", "spindle_file_resize", "spindle_disk_cache"],
            "m0",
            of_ram,
        ),
    ] {
        for method in methods.iter().copied() {
            for (name, said) in [
                (other, said),
                ("m00", "name = \"m00\": there is no such disk; did you mean \"m0\"?"),
                (
                    "quite another",
                    "name = \"quite another\": there is no such disk; bdev_get_bdevs lists them",
                ),
            ] {
                let params = match method {
                    _ if method.ends_with("delete") => json!({ "name": name }),
                    "spindle_disk_cache" => json!({ "name": name, "size": 1 << 20 }),
                    _ => size(name, 1),
                };
                cases.push((method, params, said));
            }
        }
    }
    let (ram, file) = ("bdev_malloc_resize", "spindle_file_resize");
    cases.extend([
        (ram, size("m0", 2), "disk \"m0\": size = 2097152 bytes: "),
        (ram, size("m0", 1 << 42), "disk[0].size = \"4194304TiB\": |make it smaller"),
        (file, size("r0", 2), "disk[3].size = \"2MiB\": |does not grow; leave the size out"),
        ("spindle_disk_cache", json!({ "name": "f0", "size": 1 }), "disk[2].cache.size = \"1B\": |must be"),
        (
            "spindle_disk_cache",
            json!({ "name": "f0", "size": 1 << 20, "read_ahead": 1 }),
            "disk[2].cache.read_ahead = \"1B\": |must be",
        ),
        (
            "spindle_disk_cache",
            json!({ "name": "f0", "size": 1 << 20, "sole_writer": true }),
            "disk[2].cache.sole_writer = true: |a file disk has no such key",
        ),
        (
            "spindle_disk_cache",
            json!({ "name": "far0n1", "size": 1 << 20, "read_ahead": 0 }),
            ".cache.sole_writer|must be true for a remote disk",
        ),
        (file, size("f0", 1), "disk[2].size = \"1MiB\": the file has 2097152 bytes|leave the size out"),
    ]);
    cases
}

#[test]
fn what_each_method_refuses_for_what_there_is_names_field_value_and_what_is_allowed() {
    let (folder, file, mut served) = target();
    let text = std::fs::read_to_string(&file).expect("the file");
    let cases = [
        of_names_of_subsystems(),
        of_subsystems(),
        of_namespaces(),
        of_addresses(),
        of_listeners_referrals_and_transports(),
        of_new_disks(&folder.0),
        of_attached_disks(),
        of_known_disks(),
        vec![("log_set_level", json!({ "level": "DEBUG" }), "level = \"DEBUG\"|SPINDLE_LOG")],
    ]
    .concat();
    let is_tried = |method: &&str| cases.iter().any(|(of, ..)| of == method);
    let untried: Vec<_> = changing().into_iter().filter(|method| !is_tried(method)).collect();
    assert!(untried.is_empty(), "{untried:?}");
    assert!(cases.len() >= 153, "{}", cases.len());
    for (method, params, said) in cases {
        let what = format!("{method} {params}");
        let refused = change(method, params).and_then(|(act, args)| {
            served.change(&LogControl::unread(), |edit| act(edit, &args)).map(|done| done.result)
        });
        let message = match refused {
            Ok(result) => panic!("{what}: is done: {result}"),
            Err(failure) => failure.message,
        };
        assert!(said.split('|').all(|part| message.contains(part)), "{what}: {said}: {message}");
        assert_eq!(std::fs::read_to_string(&file).expect("the file"), text, "{what}");
        assert_eq!((served.config.text(), served.snapshot.generation), (text.as_str(), 1), "{what}");
    }
    // Nothing was made, and nothing has another size.
    let bytes = |name: &str| folder.0.join(name).metadata().expect("a file").len();
    assert_eq!(FILES.map(|(name, _)| (name, bytes(name))), FILES);
    assert_eq!(std::fs::read_dir(&folder.0).expect("a folder").count(), FILES.len() + 1);
    // What is there already, and may be asked for again.
    let listener = json!({ "trtype": "tcp", "traddr": "127.0.0.1", "trsvcid": "4420" });
    for (method, params) in [
        ("nvmf_subsystem_add_host", json!({ "nqn": A, "host": HOST })),
        ("nvmf_subsystem_add_listener", json!({ "nqn": A, "listen_address": listener })),
        ("nvmf_subsystem_allow_any_host", json!({ "nqn": B, "allow_any_host": true })),
    ] {
        let (act, args) = change(method, params).expect("right");
        let done = served.change(&LogControl::unread(), |edit| act(edit, &args));
        assert!(done.is_ok_and(|done| done.result == json!(true) && done.next.is_none()), "{method}");
    }
}

#[test]
fn a_file_that_is_edited_after_it_was_compared_is_kept() {
    let edits = [
        (b"# Saved in Latin-1: \xe4\n".as_slice(), "UTF-8"),
        (b"# Saved.\n", "was changed by another program"),
    ];
    for (by_hand, why) in edits {
        let (_folder, file, mut served) = target();
        let params = json!({ "name": "new", "num_blocks": 8, "block_size": 512 });
        let (act, args) = change("bdev_null_create", params).expect("right");
        let done = served.change(&LogControl::unread(), |edit| {
            std::fs::write(&file, by_hand).expect("written");
            act(edit, &args)
        });
        let message = done.map(drop).expect_err("refused").message;
        assert!(message.contains("spindle.toml") && message.contains(why), "{message}");
        let is_kept = std::fs::read(&file).is_ok_and(|text| text == by_hand);
        assert!(is_kept && served.snapshot.generation == 1, "{why}");
    }
}

#[test]
fn a_remote_disk_gets_a_cache_from_who_says_that_nobody_else_writes() {
    let (_folder, file, mut served) = target();
    let params = json!({ "name": "far0n1", "size": 1 << 20, "read_ahead": 65536, "sole_writer": true });
    let resized = json!({ "name": "far0n1", "size": 2 << 20 });
    for (params, size) in [(params, "1MiB"), (resized, "2MiB")] {
        let (act, args) = change("spindle_disk_cache", params).expect("right");
        let done = served.change(&LogControl::unread(), |edit| act(edit, &args));
        assert_eq!(done.map(|done| done.result).map_err(|failure| failure.message), Ok(json!(true)));
        let text = std::fs::read_to_string(&file).expect("the file");
        for line in [&format!("size = {size:?}"), "read_ahead = \"64KiB\"", "sole_writer = true"] {
            assert!(text.contains(line), "{line}: {text}");
        }
    }
}
