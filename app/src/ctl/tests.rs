//! Which calls verbs make, and what they say.

use std::cell::RefCell;

use clap::Parser;
use serde_json::{Value, json};

use super::*;
use crate::cli::Command;
use crate::rpc::params::{Args, optional, required};

static PARAMS: &[Param] = &[
    required("nqn", Kind::Nqn, ""),
    optional("nsid", Kind::Integer { min: 1, max: 9 }, ""),
    optional("names", Kind::List(&Kind::String), ""),
    optional("flag", Kind::Flag, ""),
    optional("listen_address", Kind::Object(&[required("trsvcid", Kind::String, "")]), ""),
];

fn given(words: &[&str]) -> Result<Value, String> {
    let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
    parse(&words, PARAMS).map(Value::Object).map_err(|error| error.to_string())
}

#[test]
fn each_parameter_gets_the_type_that_the_method_takes() {
    let words = ["--nqn", "7", "--nsid=3", "--flag", "--names", "a,b", "--listen-address.trsvcid", "4420"];
    let wanted = json!({
        "nqn": "7", "nsid": 3, "flag": true, "names": ["a", "b"], "listen_address": { "trsvcid": "4420" },
    });
    assert_eq!(given(&words), Ok(wanted));
    assert_eq!(given(&["--other", "[1]", "--nsid", "x"]), Ok(json!({ "other": [1], "nsid": "x" })));
    assert_eq!(given(&["nqn"]), Err("\"nqn\": must be a parameter, as --name VALUE".to_owned()));
}

fn ctl(text: &str) -> Result<CtlArgs, String> {
    let cli = Cli::try_parse_from(format!("spindle ctl {text}").split_whitespace());
    let command = cli.map_err(|error| error.to_string())?.command;
    let Command::Ctl(args) = command else { panic!("{command:?}") };
    Ok(args)
}

/// A target with a disk of each kind; `absent` is a drive that is not there.
fn target(method: &str, params: &Value) -> Result<Value, CallError> {
    let disk = |name: &str, kind: &str| {
        let own = json!({ "spindle": { "kind": kind } });
        json!({ "name": name, "driver_specific": own })
    };
    let of = |name: &str, kind: &str| json!({ "name": name, "kind": kind });
    Ok(match (method, params["name"].as_str()) {
        ("bdev_get_bdevs", Some("absentn1" | "none")) => {
            return Err(CallError::Refused("there is no disk".to_owned()));
        }
        ("bdev_get_bdevs", Some(name)) => {
            let kind = name.trim_end_matches(|letter: char| letter.is_ascii_digit());
            json!([disk(name, kind.strip_suffix("-n").unwrap_or(kind))])
        }
        // A disk that is called remote is none of a controller.
        ("spindle_get_status", _) => json!({ "disks": [
            of("ram0", "ram"), of("nvme-n1", "nvme"), of("remote", "remote"), of("remote-n1", "remote"),
            of("remote-n2", "remote"), of("absentn1", "nvme"),
        ] }),
        ("bdev_nvme_attach_controller", Some(name)) => json!([format!("{name}n1")]),
        ("nvmf_subsystem_add_ns", _) => json!(7),
        ("log_get_level", _) => json!("NOTICE"),
        (_, Some(name)) => json!(name),
        _ => json!(true),
    })
}

/// The last call that the words make, which the method takes, and what is said.
fn calls(text: &str) -> Result<(String, Value, String), String> {
    let made = RefCell::new((String::new(), Value::Null));
    let rpc = |method: &str, params: Value| {
        let known = METHODS.iter().find(|it| it.name == method).expect(method);
        let Value::Object(object) = params.clone() else { panic!("{params}") };
        assert!(Args::new(object, known.params).is_ok(), "{method}: {params}");
        *made.borrow_mut() = (method.to_owned(), params.clone());
        target(method, &params)
    };
    let answer = match ctl(text)?.command.expect("a command") {
        CtlCommand::Status => panic!("it is tested as spindle status"),
        CtlCommand::Verb(verb) => verbs::answer(&verb, &rpc),
        CtlCommand::Method(words) => method(&words, &rpc),
    };
    let (_, said) = answer.map_err(|error| error.to_string())?;
    let (method, params) = made.into_inner();
    Ok((method, params, said))
}

#[test]
fn each_verb_of_subsystems_and_hosts_is_a_call() {
    let nqn = json!({ "nqn": "nqn.a" });
    let host = json!({ "nqn": "nqn.a", "host": "nqn.h" });
    let cases = [
        (
            "subsystem add nqn.a",
            "nvmf_create_subsystem",
            json!({ "nqn": "nqn.a", "allow_any_host": false }),
            "added subsystem nqn.a",
        ),
        (
            "subsystem add nqn.a --serial S --model M --any-host",
            "nvmf_create_subsystem",
            json!({ "nqn": "nqn.a", "serial_number": "S", "model_number": "M", "allow_any_host": true }),
            "added subsystem nqn.a",
        ),
        ("subsystem remove nqn.a", "nvmf_delete_subsystem", nqn.clone(), "removed subsystem nqn.a"),
        ("subsystem list", "nvmf_get_subsystems", json!({}), "subsystem"),
        ("host list nqn.a", "nvmf_get_subsystems", nqn, "host"),
        ("host add nqn.a nqn.h", "nvmf_subsystem_add_host", host.clone(), "added host nqn.h to nqn.a"),
        ("host remove nqn.a nqn.h", "nvmf_subsystem_remove_host", host, "removed host nqn.h from nqn.a"),
        (
            "host any nqn.a on",
            "nvmf_subsystem_allow_any_host",
            json!({ "nqn": "nqn.a", "allow_any_host": true }),
            "every host may connect to nqn.a",
        ),
        (
            "host any nqn.a off --host nqn.h --host nqn.i",
            "nvmf_subsystem_allow_any_host",
            json!({ "nqn": "nqn.a", "allow_any_host": false, "hosts": ["nqn.h", "nqn.i"] }),
            "only hosts of its list may connect to nqn.a",
        ),
        (
            "host any nqn.a off",
            "nvmf_subsystem_allow_any_host",
            json!({ "nqn": "nqn.a", "allow_any_host": false }),
            "only hosts of its list may connect to nqn.a",
        ),
    ];
    check(&cases);
}

#[test]
fn each_verb_of_listeners_and_namespaces_is_a_call() {
    let at = |trtype: &str, traddr: &str, trsvcid: &str| {
        let address = json!({ "trtype": trtype, "traddr": traddr, "trsvcid": trsvcid });
        json!({ "nqn": "nqn.a", "listen_address": address })
    };
    let nqn = json!({ "nqn": "nqn.a" });
    let uuid = "00000000-0000-0000-0000-000000000001";
    let cases = [
        ("listener list nqn.a", "nvmf_subsystem_get_listeners", nqn.clone(), "listener"),
        (
            "listener add nqn.a 192.0.2.1",
            "nvmf_subsystem_add_listener",
            at("tcp", "192.0.2.1", "4420"),
            "added listener tcp:192.0.2.1:4420 to nqn.a",
        ),
        (
            "listener add nqn.a tcp:192.0.2.1:4421",
            "nvmf_subsystem_add_listener",
            at("tcp", "192.0.2.1", "4421"),
            "added listener tcp:192.0.2.1:4421 to nqn.a",
        ),
        (
            "listener remove nqn.a rdma:[2001:db8::1]:4421",
            "nvmf_subsystem_remove_listener",
            at("rdma", "2001:db8::1", "4421"),
            "removed listener rdma:[2001:db8::1]:4421 from nqn.a",
        ),
        (
            "listener add nqn.a [::1]",
            "nvmf_subsystem_add_listener",
            at("tcp", "::1", "4420"),
            "tcp:[::1]:4420",
        ),
        ("listener add nqn.a ::1", "nvmf_subsystem_add_listener", at("tcp", "::1", "4420"), "tcp:[::1]:4420"),
        ("namespace list nqn.a", "nvmf_get_subsystems", nqn, "nsid"),
        (
            "namespace add nqn.a d0",
            "nvmf_subsystem_add_ns",
            json!({ "nqn": "nqn.a", "namespace": { "bdev_name": "d0" } }),
            "added namespace 7, disk d0, to nqn.a",
        ),
        (
            &format!("namespace add nqn.a d0 --nsid 7 --uuid {uuid}"),
            "nvmf_subsystem_add_ns",
            json!({ "nqn": "nqn.a", "namespace": { "bdev_name": "d0", "nsid": 7, "uuid": uuid } }),
            "added namespace 7, disk d0, to nqn.a",
        ),
        (
            "namespace remove nqn.a 7",
            "nvmf_subsystem_remove_ns",
            json!({ "nqn": "nqn.a", "nsid": 7 }),
            "removed namespace 7 from nqn.a",
        ),
    ];
    check(&cases);
}

#[test]
fn each_verb_of_disks_is_a_call_by_their_kind() {
    let named = |name: &str| json!({ "name": name });
    let memory = |blocks: u64, block: u64| json!({ "name": "d0", "num_blocks": blocks, "block_size": block });
    let cases = [
        ("disk list", "bdev_get_bdevs", json!({}), "disk"),
        ("disk add ram d0 64MiB", "bdev_malloc_create", memory(131_072, 512), "added disk d0"),
        ("disk add null d0 1G --block-size 4k", "bdev_null_create", memory(262_144, 4096), "added disk d0"),
        (
            "disk add file d0 /a --read-only --block-size 4096",
            "bdev_aio_create",
            json!({ "name": "d0", "filename": "/a", "readonly": true, "block_size": 4096 }),
            "added disk d0",
        ),
        (
            "disk add nvme d0 01:00.0 --namespace 1",
            "bdev_nvme_attach_controller",
            json!({ "name": "d0", "trtype": "pcie", "traddr": "0000:01:00.0", "namespace": 1 }),
            "added disk d0n1",
        ),
        (
            "disk add remote d0 rdma:192.0.2.1 --nqn nqn.a --hostnqn nqn.h",
            "bdev_nvme_attach_controller",
            json!({
                "name": "d0", "trtype": "rdma", "traddr": "192.0.2.1", "trsvcid": "4420", "subnqn": "nqn.a",
                "hostnqn": "nqn.h",
            }),
            "added disk d0n1",
        ),
        (
            "disk resize ram0 32MiB",
            "bdev_malloc_resize",
            json!({ "name": "ram0", "new_size": 32 }),
            "resized disk ram0 to 32 MiB",
        ),
        (
            "disk resize null0 1GiB",
            "bdev_null_resize",
            json!({ "name": "null0", "new_size": 1024 }),
            "resized disk null0 to 1 GiB",
        ),
        (
            "disk resize file0 1GiB",
            "spindle_file_resize",
            json!({ "name": "file0", "new_size": 1024 }),
            "resized disk file0 to 1 GiB",
        ),
        (
            "disk cache far0 64MiB --policy lru --read-ahead 0 --sole-writer",
            "spindle_disk_cache",
            json!({ "name": "far0", "size": 1 << 26, "policy": "lru", "read_ahead": 0, "sole_writer": true }),
            "disk far0 has a cache of 64 MiB",
        ),
        (
            "disk cache file0 0",
            "spindle_disk_cache",
            json!({ "name": "file0", "size": 0 }),
            "disk file0 has no cache",
        ),
        ("disk remove ram0", "bdev_malloc_delete", named("ram0"), "removed disk ram0"),
        ("disk remove null0", "bdev_null_delete", named("null0"), "removed disk null0"),
        ("disk remove file0", "bdev_aio_delete", named("file0"), "removed disk file0"),
        ("disk remove nvme-n1", "bdev_nvme_detach_controller", named("nvme-"), "removed disk nvme-n1"),
        ("disk remove absentn1", "bdev_nvme_detach_controller", named("absent"), "removed disk absentn1"),
        ("log", "log_get_level", json!({}), "notice"),
        ("log DEBUG", "log_set_level", json!({ "level": "debug" }), "the level of the log is debug"),
        ("rpc_get_methods --current", "rpc_get_methods", json!({ "current": true }), "true"),
        ("spdk_get_version", "spdk_get_version", json!({}), "true"),
    ];
    check(&cases);
}

fn check(cases: &[(&str, &str, Value, &str)]) {
    for (text, method, params, wanted) in cases {
        let (called, with, said) = calls(text).unwrap_or_else(|error| panic!("{text}: {error}"));
        assert_eq!((called.as_str(), &with), (*method, params), "{text}");
        assert!(said.contains(wanted), "{text}: {said}");
    }
}

#[test]
fn what_is_refused_names_the_value_and_what_is_allowed() {
    for (text, parts) in [
        ("subsystem lst", ["lst", "'list'"]),
        ("subsystem add", ["<NQN>", "required"]),
        ("subsytem list", ["\"subsytem\"", "did you mean \"subsystem\"?"]),
        ("rpcgetmethods", ["\"rpcgetmethods\"", "did you mean \"rpc_get_methods\"?"]),
        ("everything", ["\"everything\"", "verbs are status, connections, cache, subsystem"]),
        ("host any nqn.a maybe", ["maybe", "on, off"]),
        ("host add nqn.a", ["<HOST>", "required"]),
        ("listener add nqn.a host:4420", ["`host:4420` is not an address", "[V6]:PORT"]),
        ("listener add nqn.a 192.0.2.1:0", ["ADDRESS", "from 1 to 65535"]),
        ("listener add nqn.a 192.0.2.1:99999", ["ADDRESS", "from 1 to 65535"]),
        ("listener add nqn.a [fe80::1%2]:4420", ["`[fe80::1%2]:4420` is not an address", "[V6]:PORT"]),
        ("listener add nqn.a fc:192.0.2.1", ["`fc:192.0.2.1`", "tcp: or rdma:"]),
        ("namespace add nqn.a d0 --nsid 0", ["--nsid", "`0` is not a number from 1 up"]),
        ("namespace remove nqn.a one", ["NSID", "`one` is not a number from 1 up"]),
        ("disk add ram d0", ["<SIZE>", "required"]),
        ("disk add ram d0 64x", ["SIZE", "unit `x`; allowed are B, K, KiB"]),
        ("disk add ram d0 1000", ["SIZE = \"1000 B\"", "multiple of the block size, 512 B"]),
        ("disk add null d0 0", ["SIZE = \"0 B\"", "not 0"]),
        ("disk add ram d0 1M --block-size 0", ["--block-size", "512 or 4096"]),
        ("disk add nvme d0 nvme0", ["PCI_ADDRESS", "0000:01:00.0"]),
        ("disk add remote d0 192.0.2.1", ["--nqn", "required"]),
        ("disk add ng d0 /dev/ng0n1", ["kind = \"ng\"", "no method adds it"]),
        ("disk add tape d0", ["tape", "disk add"]),
        ("disk resize ram0 1000KiB", ["SIZE = \"1000 KiB\"", "whole MiB"]),
        ("disk resize nvme-n1 1GiB", ["NAME = \"nvme-n1\"", "no method resizes a disk of kind nvme"]),
        ("disk remove ng0", ["NAME = \"ng0\"", "no method removes a disk of kind ng"]),
        ("disk remove nvme0", ["NAME = \"nvme0\"", "not named like NAMEn1"]),
        ("disk remove remote-n1", ["together with remote-n2", "--name remote-"]),
        ("disk remove none", ["there is no disk", ""]),
        ("log loud", ["loud", "error, warning, notice, info, debug"]),
    ] {
        let message = calls(text).map(|_| ()).expect_err(text);
        for part in parts {
            assert!(message.contains(part), "{text}: {part} in: {message}");
        }
    }
}

#[test]
fn the_socket_stands_before_or_after_a_verb_or_method() {
    for (text, socket) in [
        ("--socket /s status", "/s"),
        ("status --socket /s --json", "/s"),
        ("disk --socket /s add ram d0 1M", "/s"),
        ("disk add ram d0 1M --socket /s", "/s"),
        ("--socket /s", "/s"),
        ("", crate::serve::control::SOCKET),
        ("--socket /s a_method --a 1", "/s"),
        ("--json a_method --socket /s --a 1", "/s"),
        ("a_method --a 1 --socket=/s --json", "/s"),
    ] {
        let mut args = ctl(text).expect(text);
        take_options(&mut args);
        assert_eq!(args.socket.to_str(), Some(socket), "{text}");
        assert_eq!(args.json, text.contains("--json"), "{text}");
        if let Some(CtlCommand::Method(words)) = args.command {
            assert_eq!(words, ["a_method", "--a", "1"], "{text}");
        }
    }
    let params = METHODS.iter().flat_map(|method| method.params);
    assert!(!params.into_iter().any(|param| ["socket", "json", "help"].contains(&param.name)));
}

#[test]
fn connections_show_peer_addresses_and_host_nqns_without_control_characters() {
    let rpc = |method: &str, _: Value| {
        let controller = |host: &str, cntlid: u16, core: usize| {
            json!({
                "host": host, "subsystem": "nqn.a", "controller": cntlid, "core": core, "io_queues": 1,
            })
        };
        let peer = |port: &str| json!({ "traddr": "2001:db8::1", "trsvcid": port });
        Ok(match method {
            "spindle_get_status" => json!({
                "controllers": [controller("nqn.h\u{1b}[2J", 5, 2), controller("nqn.other", 6, 0)],
            }),
            _ => json!([
                { "cntlid": 5, "qid": 0, "peer_address": peer("1001") },
                { "cntlid": 5, "qid": 1, "peer_address": peer("1002") },
                { "cntlid": 6, "qid": 0 },
            ]),
        })
    };
    let (json, text) = verbs::answer(&crate::cli::Verb::Connections, &rpc).expect("an answer");
    assert_eq!(json[0]["qpairs"].as_array().map(Vec::len), Some(2), "{json}");
    for wanted in ["nqn.h?[2J", "[2001:db8::1]:1001", "[2001:db8::1]:1002", "nqn.other", "-"] {
        assert!(text.contains(wanted), "{wanted}\n{text}");
    }
    assert_eq!(text.matches('┆').count() % 5, 0, "{text}");
}

#[test]
fn caches_are_shown_with_the_share_of_pages_that_were_found() {
    let rpc = |method: &str, _: Value| {
        assert_eq!(method, "bdev_get_iostat");
        let cache = json!({
            "size": 1 << 30, "used": 1 << 20, "policy": "s3-fifo", "hits": 750, "misses": 200,
            "ghost_hits": 7, "joined": 1, "passed": 40, "over_budget": 10, "evictions": 3,
            "doomed": 0, "sampled": 100,
            "sampled_hits_half_size": 60, "sampled_hits_this_size": 73, "sampled_hits_twice_size": 100,
        });
        let unread = json!({ "size": 1 << 20, "used": 0, "policy": "lru" });
        let namespace = json!({ "nqn": "nqn.a", "nsid": 3 });
        Ok(json!({ "bdevs": [
            { "name": "plain" }, { "name": "cached", "cache": cache, "namespace": namespace },
            { "name": "new", "cache": unread },
        ] }))
    };
    let (_, text) = verbs::answer(&crate::cli::Verb::Cache { hosts: false }, &rpc).expect("an answer");
    assert!(!text.contains("plain"), "{text}");
    let cached = "cached ┆ 3 of nqn.a ┆ s3-fifo ┆ 1 GiB ┆ 1 MiB ┆ 75.0 % ┆ 62.0 % ┆ 100.0 % ┆ 750";
    for wanted in [cached, "new    ┆ -          ┆ lru     ┆ 1 MiB"] {
        assert!(text.contains(wanted), "{wanted}\n{text}");
    }
}

#[test]
fn caches_are_shown_for_each_host() {
    let rpc = |method: &str, params: Value| {
        assert_eq!((method, params), ("bdev_get_iostat", json!({ "by_host": true })));
        let hosts = json!([
            { "hits": 0, "misses": 0, "read_ahead": 16 },
            { "hostnqn": "nqn.h\u{1b}[2J", "hits": 1, "misses": 7, "evictions": 2 },
        ]);
        Ok(json!({ "bdevs": [{ "name": "plain" }, { "name": "cached", "cache": { "hosts": hosts } }] }))
    };
    let (_, text) = verbs::answer(&crate::cli::Verb::Cache { hosts: true }, &rpc).expect("an answer");
    for wanted in ["cached ┆ -         ┆           ┆ -      ┆ 0", "nqn.h?[2J ┆ 12.5 % ┆ 1    ┆ 7"]
    {
        assert!(text.contains(wanted), "{wanted}\n{text}");
    }
}
