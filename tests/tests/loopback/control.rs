//! The control socket: a target that is built call by call, changes that stay, and what is refused.

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use spindle_nvme_initiator::{BlockRange, Controller, Host, Options, Target, TransportKind, discover};
use spindle_tests::loopback::{Folder, LONG, SUBSYSTEM, SpindleProcess, binary, config, free_port, target};

use super::namespaces::wait_for_notice;
use super::{RAM, V4, buf, connect, done, pool};

/// A client of the socket.
pub(super) struct Client(UnixStream);

impl Client {
    pub(super) fn new(socket: &Path) -> Client {
        let end = Instant::now() + LONG;
        loop {
            match UnixStream::connect(socket) {
                Ok(stream) => {
                    stream.set_read_timeout(Some(LONG)).expect("an option");
                    return Client(stream);
                }
                Err(error) => assert!(Instant::now() < end, "{socket:?}: {error}"),
            }
            std::thread::park_timeout(Duration::from_millis(5));
        }
    }

    pub(super) fn send(&mut self, method: &str, params: &Value) {
        let request = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params });
        // A target that has been killed is seen by who reads the answer.
        let _ = self.0.write_all(request.to_string().as_bytes());
    }

    /// The answer; `None`: the target has hung up.
    pub(super) fn answer(&mut self) -> Option<Value> {
        let (mut text, mut piece) = (Vec::new(), [0; 4096]);
        loop {
            let count = self.0.read(&mut piece).unwrap_or(0);
            if count == 0 {
                return None;
            }
            text.extend_from_slice(&piece[..count]);
            if let Ok(value) = serde_json::from_slice(&text) {
                return Some(value);
            }
        }
    }

    fn call(&mut self, method: &str, params: Value) -> Result<Value, String> {
        self.send(method, &params);
        let answer = self.answer().expect("an answer");
        match answer.get("error") {
            Some(error) => Err(error["message"].as_str().expect("a message").to_owned()),
            None => Ok(answer["result"].clone()),
        }
    }

    pub(super) fn done(&mut self, method: &str, params: Value) -> Value {
        self.call(method, params).unwrap_or_else(|error| panic!("{method}: {error}"))
    }
}

pub(super) fn with_socket(text: &str, socket: &Path) -> String {
    format!("[control]\nsocket = {socket:?}\n{text}")
}

/// A target that serves nothing yet has no line to wait for.
pub(super) struct Bare(Child);

impl Bare {
    pub(super) fn start(file: &Path) -> Bare {
        let command = Command::new(binary())
            .args(["serve", "-c"])
            .arg(file)
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        Bare(command.expect("spindle starts"))
    }
}

impl Drop for Bare {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn listen_address(address: SocketAddr) -> Value {
    json!({
        "trtype": "TCP", "adrfam": "IPv4", "traddr": address.ip().to_string(),
        "trsvcid": address.port().to_string(),
    })
}

/// SPDK's order of calls.
fn build(client: &mut Client, folder: &Folder, address: SocketAddr) {
    let nqn = json!({ "nqn": SUBSYSTEM });
    let with = |more: Value| {
        let mut params = nqn.clone();
        for (name, value) in more.as_object().expect("an object") {
            params[name] = value.clone();
        }
        params
    };
    client.done("nvmf_create_transport", json!({ "trtype": "TCP", "no_srq": false, "c2h_success": true }));
    let name = client.done("bdev_malloc_create", json!({ "num_blocks": 32768, "block_size": 512 }));
    assert_eq!(name, "Malloc0");
    let file = folder.file("disk.img");
    std::fs::write(&file, vec![0; 16 << 20]).expect("written");
    client.done("bdev_aio_create", json!({ "name": "aio0", "filename": file, "block_size": 4096 }));
    client.done("nvmf_create_subsystem", with(json!({ "serial_number": "S1", "max_namespaces": 10 })));
    let nsid = client.done("nvmf_subsystem_add_ns", with(json!({ "namespace": { "bdev_name": name } })));
    assert_eq!(nsid, 1);
    let namespace = json!({ "namespace": { "bdev_name": "aio0", "nsid": 5 } });
    assert_eq!(client.done("nvmf_subsystem_add_ns", with(namespace)), 5);
    client.done("nvmf_subsystem_add_listener", with(json!({ "listen_address": listen_address(address) })));
    client.done("nvmf_subsystem_allow_any_host", with(json!({ "allow_any_host": true })));
}

#[test]
fn a_target_is_built_call_by_call_from_nothing_and_is_the_same_after_a_restart() {
    let (address, folder) = (free_port(V4), Folder::new("control-built"));
    let socket = folder.file("sock");
    let file = folder.write(&with_socket("# A comment that stays.\n", &socket));
    let bare = Bare::start(&file);
    let mut client = Client::new(&socket);
    build(&mut client, &folder, address);
    let (mut controller, mut queue) = connect(address);
    assert_eq!(controller.namespaces().expect("a list"), [1, 5]);
    let namespace = controller.namespace(5).expect("a namespace");
    let ticket = queue.write(&namespace, 0, buf(&pool(), 4096, 1), true).expect("taken");
    done(&mut queue, ticket);
    let controllers = client.done("nvmf_subsystem_get_controllers", json!({ "nqn": SUBSYSTEM }));
    assert_eq!(controllers[0]["num_io_qpairs"], 1, "{controllers}");
    let qpairs = client.done("nvmf_subsystem_get_qpairs", json!({ "nqn": SUBSYSTEM }));
    assert_eq!(qpairs.as_array().map(Vec::len), Some(2), "{qpairs}");
    for (qid, qpair) in qpairs.as_array().expect("a list").iter().enumerate() {
        let (listen, peer) = (&qpair["listen_address"], &qpair["peer_address"]["traddr"]);
        assert_eq!(
            (listen, peer, &qpair["qid"]),
            (&listen_address(address), &json!("127.0.0.1"), &json!(qid))
        );
    }
    let stat = client.done("bdev_get_iostat", json!({ "name": "aio0" }));
    assert_eq!(stat["bdevs"][0]["bytes_written"], 4096, "{stat}");
    let stat = client.done("bdev_get_iostat", json!({ "name": "aio0", "per_channel": true }));
    assert_eq!(stat["bdevs"][0]["channels"][0]["bytes_written"], 4096, "{stat}");
    let ram = controller.namespace(1).expect("a namespace");
    let range = BlockRange { lba: 8, blocks: 16 };
    let ticket = queue.deallocate(&ram, &[range], buf(&pool(), 4096, 0)).expect("taken");
    done(&mut queue, ticket);
    let stat = client.done("bdev_get_iostat", json!({ "name": "Malloc0" }));
    let bdev = &stat["bdevs"][0];
    assert_eq!((&bdev["num_unmap_ops"], &bdev["bytes_unmapped"]), (&json!(1), &json!(8192)), "{stat}");
    // Not measured, and there for those who read SPDK's.
    assert_eq!((&bdev["write_latency_ticks"], &bdev["min_copy_latency_ticks"]), (&json!(0), &json!(0)));
    // A cache comes, by and by, and is counted for its host.
    client.done("spindle_disk_cache", json!({ "name": "aio0", "size": 65536 }));
    let cached = (0..10_000).find_map(|_| {
        let ticket = queue.read(&namespace, 0, buf(&pool(), 4096, 0)).expect("taken");
        done(&mut queue, ticket);
        let stat = client.done("bdev_get_iostat", json!({ "name": "aio0", "by_host": true }));
        (stat["bdevs"][0]["cache"]["hits"] == 2).then_some(stat)
    });
    let stat = cached.expect("hits");
    let disk = &stat["bdevs"][0];
    assert_eq!(disk["namespace"], json!({ "nqn": SUBSYSTEM, "nsid": 5 }), "{stat}");
    let host = &disk["cache"]["hosts"][0];
    assert_eq!((&host["hits"], &host["misses"]), (&json!(2), &json!(1)), "{stat}");
    assert_eq!(host["hostnqn"], controllers[0]["hostnqn"], "{stat}");
    // A host is told of what changes under it.
    client.done("nvmf_subsystem_remove_ns", json!({ "nqn": SUBSYSTEM, "nsid": 1 }));
    wait_for_notice(&mut controller);
    assert_eq!(controller.namespaces().expect("a list"), [5]);
    let before = client.done("nvmf_get_subsystems", json!({}));
    drop((controller, queue, bare));
    let text = std::fs::read_to_string(&file).expect("the file");
    assert!(text.contains("# A comment that stays."), "{text}");
    let _bare = Bare::start(&file);
    let mut client = Client::new(&socket);
    assert_eq!(client.done("nvmf_get_subsystems", json!({})), before);
}

#[test]
fn what_is_refused_leaves_file_and_target_as_they_were() {
    let (address, folder) = (free_port(V4), Folder::new("control-refused"));
    let socket = folder.file("sock");
    let text = with_socket(&config(1, address, &[RAM.to_owned()]), &socket);
    let mut served = folder.serve(&text);
    let mut client = Client::new(&socket);
    let file = folder.file("spindle.toml");
    let cases = [
        ("nvmf_create_subsystm", json!({}), "did you mean \"nvmf_create_subsystem\"?"),
        ("bdev_malloc_create", json!({ "num_blocks": 8, "block_size": 520 }), "must be 512 or 4096"),
        (
            "bdev_malloc_create",
            json!({ "name": "d1", "num_blocks": 8, "block_size": 512 }),
            "there is a disk",
        ),
        ("bdev_malloc_delete", json!({ "name": "d2" }), "there is no such disk"),
        ("bdev_null_delete", json!({ "name": "d1" }), "is a disk of kind ram"),
        ("bdev_aio_create", json!({ "name": "f", "filename": "/none/of/it" }), "path = \"/none/of/it\""),
        ("nvmf_delete_subsystem", json!({ "nqn": "nqn.none" }), "there is no such subsystem"),
        ("nvmf_create_subsystem", json!({ "nqn": SUBSYSTEM }), "there is a subsystem of this name"),
        ("nvmf_subsystem_remove_ns", json!({ "nqn": SUBSYSTEM, "nsid": 2 }), "no namespace of this number"),
        ("nvmf_subsystem_add_host", json!({ "nqn": SUBSYSTEM, "host": "nqn.h" }), "every host may connect"),
        (
            "nvmf_subsystem_add_listener",
            json!({ "nqn": SUBSYSTEM, "listen_address": { "trtype": "rdma", "traddr": "127.0.0.1" } }),
            "restart",
        ),
        (
            "nvmf_subsystem_add_listener",
            json!({ "nqn": SUBSYSTEM, "listen_address": { "trtype": "tcp", "traddr": "203.0.113.9" } }),
            "203.0.113.9:4420: cannot listen",
        ),
        ("nvmf_create_transport", json!({ "trtype": "tcp", "max_queue_depth": 17 }), "limits.queue_entries"),
    ];
    for (method, params, wanted) in cases {
        let error = client.call(method, params).expect_err(wanted);
        assert!(error.contains(wanted), "{method}: {error}");
        assert_eq!(std::fs::read_to_string(&file).expect("the file"), text, "{method}");
    }
    assert_eq!(client.done("spindle_get_status", json!({}))["generation"], 1);
    // Changed by hand, the file is not written over.
    let by_hand = text.replace("[control]", "# By hand.\n[control]");
    std::fs::write(&file, &by_hand).expect("written");
    let params = json!({ "num_blocks": 8, "block_size": 512 });
    let error = client.call("bdev_malloc_create", params.clone()).expect_err("changed by hand");
    assert!(error.contains("was changed since it was read") && error.contains("+# By hand."), "{error}");
    served.signal(rustix::process::Signal::HUP);
    served.wait_for("configuration read again");
    client.done("bdev_malloc_create", params);
    assert!(std::fs::read_to_string(&file).expect("the file").starts_with("# By hand."));
    served.terminate();
}

#[test]
fn kill_9_during_changes_leaves_the_file_as_before_or_after_one_of_them() {
    let (address, folder) = (free_port(V4), Folder::new("control-killed"));
    let socket = folder.file("sock");
    let file = folder.write(&with_socket(&config(1, address, &[RAM.to_owned()]), &socket));
    let disks = |text: &str| text.matches("[[disk]]").count();
    let mut kept = 1;
    let mut delays = (0..10).cycle().map(|step| Duration::from_millis(step * 3));
    for round in 0.. {
        if kept > 100 {
            break;
        }
        let delay = delays.next().unwrap_or_default();
        let mut served = SpindleProcess::start(&file);
        let mut client = Client::new(&socket);
        let bdevs = client.done("bdev_get_bdevs", json!({}));
        assert_eq!(bdevs.as_array().map(Vec::len), Some(kept), "a restart serves what the file says");
        let killer = std::thread::spawn({
            let pid = served.pid();
            move || {
                std::thread::park_timeout(delay);
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        });
        let mut answered = kept;
        for change in 0.. {
            let name = format!("r{round}c{change}");
            client.send("bdev_null_create", &json!({ "name": name, "num_blocks": 8, "block_size": 512 }));
            match client.answer() {
                Some(answer) => assert_eq!(answer["result"], name, "{answer}"),
                None => break,
            }
            answered += 1;
        }
        killer.join().expect("no panic");
        served.end();
        let text = std::fs::read_to_string(&file).expect("the file");
        kept = disks(&text);
        // What was answered is kept; one more may be.
        assert!(kept == answered || kept == answered + 1, "{answered} were answered, {kept} are kept");
    }
}

#[test]
fn a_listener_on_all_addresses_becomes_one_on_a_single_address_and_connections_stay() {
    let (address, folder) = (free_port(V4), Folder::new("control-wildcard"));
    let everywhere = SocketAddr::from(([0, 0, 0, 0], address.port()));
    let socket = folder.file("sock");
    let file = folder.write(&with_socket(&config(1, everywhere, &[RAM.to_owned()]), &socket));
    let _bare = Bare::start(&file);
    let mut client = Client::new(&socket);
    // It answers when it listens.
    client.done("rpc_get_methods", json!({}));
    let (mut controller, _queue) = connect(address);
    for (from, to) in [(everywhere, address), (address, everywhere)] {
        let params = |address| json!({ "nqn": SUBSYSTEM, "listen_address": listen_address(address) });
        client.done("nvmf_subsystem_remove_listener", params(from));
        client.done("nvmf_subsystem_add_listener", params(to));
        let listeners = client.done("nvmf_subsystem_get_listeners", json!({ "nqn": SUBSYSTEM }));
        assert_eq!(listeners.as_array().map(Vec::len), Some(1), "{listeners}");
        assert_eq!(listeners[0]["address"], listen_address(to));
        assert_eq!(controller.namespaces().expect("the connection stays"), [1]);
        drop(connect(address));
    }
}

#[test]
fn a_subsystem_for_any_host_is_narrowed_and_the_hosts_of_the_list_stay_connected() {
    let (address, folder) = (free_port(V4), Folder::new("control-narrowed"));
    let socket = folder.file("sock");
    let served = folder.serve(&with_socket(&config(1, address, &[RAM.to_owned()]), &socket));
    let (stays, (mut controller, mut queue)) = (target(address).host.nqn.to_string(), connect(address));
    let other = Target { host: Host::from_uuid([8; 16]), ..target(address) };
    let mut cut = Controller::connect(&other, &Options::default()).expect("connects");
    let words = ["host", "any", SUBSYSTEM, "off", "--host", &stays];
    assert!(ctl(&socket, &words).0);
    let namespace = controller.namespace(1).expect("the connection stays");
    let ticket = queue.write(&namespace, 0, buf(&pool(), 4096, 1), true).expect("taken");
    done(&mut queue, ticket);
    assert!(cut.namespaces().is_err(), "the other host is cut");
    let mut client = Client::new(&socket);
    let subsystem = client.done("nvmf_get_subsystems", json!({ "nqn": SUBSYSTEM }));
    assert_eq!(subsystem[0]["hosts"], json!([{ "nqn": stays }]), "{subsystem}");
    for (hosts, is_any, wanted) in [
        (json!([stays]), true, "must not be given with allow_any_host = true"),
        (json!(["a\n"]), false, "hosts[0]"),
        (json!([stays, stays]), false, "hosts[1]"),
    ] {
        let params = json!({ "nqn": SUBSYSTEM, "allow_any_host": is_any, "hosts": hosts });
        let error = client.call("nvmf_subsystem_allow_any_host", params).expect_err(wanted);
        assert!(error.contains(wanted), "{error}");
    }
    served.terminate();
}

/// The calls of SPDK's guide to its target, with parameters that tune SPDK.
#[test]
fn calls_that_tune_only_spdk_are_taken() {
    let (address, folder) = (free_port(V4), Folder::new("control-guide"));
    let socket = folder.file("sock");
    let _bare = Bare::start(&folder.write(&with_socket("", &socket)));
    let mut client = Client::new(&socket);
    let transport = json!({
        "trtype": "TCP", "io_unit_size": 16384, "num_shared_buffers": 511, "buf_cache_size": 32,
        "abort_timeout_sec": 1, "max_aq_depth": 128, "sock_priority": 0,
    });
    assert_eq!(client.done("nvmf_create_transport", transport), true);
    let subsystem = json!({
        "nqn": SUBSYSTEM, "allow_any_host": true, "serial_number": "SPDK00000000000001",
        "max_namespaces": 2048, "ana_reporting": true,
    });
    assert_eq!(client.done("nvmf_create_subsystem", subsystem), true);
    client.done("bdev_malloc_create", json!({ "name": "m", "num_blocks": 8, "block_size": 512 }));
    client.done("nvmf_subsystem_add_ns", json!({ "nqn": SUBSYSTEM, "namespace": { "bdev_name": "m" } }));
    let at = |nqn: &str, address| json!({ "nqn": nqn, "listen_address": listen_address(address) });
    let discovery = "nqn.2014-08.org.nvmexpress.discovery";
    assert_eq!(client.done("nvmf_subsystem_add_listener", at(SUBSYSTEM, address)), true);
    // Discovery is there.
    let before = client.done("spindle_get_status", json!({}))["generation"].clone();
    assert_eq!(client.done("nvmf_subsystem_add_listener", at(discovery, address)), true);
    assert_eq!(client.done("spindle_get_status", json!({}))["generation"], before);
    let error = client.call("nvmf_subsystem_remove_listener", at(discovery, address)).expect_err("used");
    assert!(error.contains(SUBSYSTEM), "{error}");
    // At an address of its own.
    let alone = free_port(V4);
    assert_eq!(client.done("nvmf_subsystem_add_listener", at(discovery, alone)), true);
    let log = discover(TransportKind::Tcp, alone, &target(address).host, &Options::default());
    let log = log.expect("a discovery log").entries;
    assert!(log.iter().any(|entry| entry.subnqn().is_ok_and(|nqn| nqn.as_str() == SUBSYSTEM)), "{log:?}");
    assert_eq!(client.done("nvmf_subsystem_remove_listener", at(discovery, alone)), true);
    assert!(std::net::TcpStream::connect(alone).is_err(), "it is closed");
}

/// A target with this variable of the environment.
fn start_with(variable: (&str, &str), file: &Path) -> Bare {
    let command = Command::new(binary())
        .env(variable.0, variable.1)
        .args(["serve", "-c"])
        .arg(file)
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    Bare(command.expect("spindle starts"))
}

#[test]
fn a_log_level_that_the_environment_overrides_is_refused() {
    let folder = Folder::new("control-log");
    let (socket, text) = (folder.file("sock"), with_socket("", &folder.file("sock")));
    let file = folder.write(&text);
    let _bare = start_with(("SPINDLE_LOG", "info"), &file);
    let mut client = Client::new(&socket);
    let error = client.call("log_set_level", json!({ "level": "DEBUG" })).expect_err("refused");
    assert!(error.contains("level = \"DEBUG\"") && error.contains("SPINDLE_LOG"), "{error}");
    assert_eq!(std::fs::read_to_string(&file).expect("the file"), text);
}

#[test]
fn a_group_that_does_not_exist_is_named_by_check_and_at_the_start() {
    let folder = Folder::new("control-group");
    let text = with_socket(&config(1, free_port(V4), &[RAM.to_owned()]), &folder.file("sock"))
        .replace("[control]", "[control]\ngroup = \"no such group\"");
    let wanted = "control.group = \"no such group\": must be a group of /etc/group, or a number";
    let said = folder.fails_to_serve(&text);
    assert!(said.contains(wanted), "{said}");
    let checked = Command::new(binary()).arg("check").arg(folder.write(&text)).output();
    let checked = checked.expect("spindle starts");
    let said = String::from_utf8_lossy(&checked.stderr);
    assert!(!checked.status.success() && said.contains(wanted), "{said}");
}

/// Each that is refused says why, though there may be no thread for the message.
#[test]
fn a_process_that_may_not_have_its_threads_does_not_start_and_says_so() {
    let folder = Folder::new("control-threads");
    let (program, disk) = (folder.file("spindle"), folder.file("disk.img"));
    std::fs::copy(binary(), &program).expect("copied");
    std::fs::write(&disk, [0; 1 << 20]).expect("written");
    // Another user opens it: root has no limit of processes.
    std::fs::set_permissions(&disk, std::fs::Permissions::from_mode(0o666)).expect("set");
    let disk = format!("kind = \"file\"\npath = {disk:?}");
    let file = folder.write(&format!("[control]\nsocket = \"\"\n{}", config(1, free_port(V4), &[disk])));
    for processes in [1, 2, 3, 6] {
        let mut command = Command::new("prlimit");
        command.arg(format!("--nproc={processes}")).arg(&program).args(["serve", "-c"]).arg(&file);
        if rustix::process::geteuid().is_root() {
            command.uid(65534);
        }
        let output = command.stdin(Stdio::null()).output().expect("prlimit is there");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{processes}: {said}");
        assert!(said.contains("thread") && said.contains("os error 11"), "{processes}: {said}");
        assert!(said.contains("ulimit -u"), "{processes}: {said}");
    }
}

#[test]
fn a_file_that_is_mounted_alone_is_written_in_place() {
    let folder = Folder::new("control-mounted");
    let (socket, file) = (folder.file("sock"), folder.write(&with_socket("", &folder.file("sock"))));
    let mount = "mount --bind \"$1\" \"$1\"";
    let shell = |script: &str| {
        let mut command = Command::new("unshare");
        command.args(["--map-root-user", "--mount", "sh", "-c", script]).arg(binary()).arg(&file);
        command.stdin(Stdio::null()).stderr(Stdio::null());
        command
    };
    if !shell(mount).status().is_ok_and(|status| status.success()) {
        return spindle_tests_skip::skip("a file that is mounted alone: no mounts may be made here");
    }
    let bare = shell(&format!("{mount} && exec \"$0\" serve -c \"$1\"")).spawn();
    let _bare = Bare(bare.expect("spindle starts"));
    let mut client = Client::new(&socket);
    for (name, blocks) in [("a", 8_000_000), ("b", 8)] {
        client.done("bdev_null_create", json!({ "name": name, "num_blocks": blocks, "block_size": 512 }));
        let text = std::fs::read_to_string(&file).expect("the file");
        assert!(text.contains(&format!("name = \"{name}\"")), "{text}");
    }
    client.done("bdev_null_delete", json!({ "name": "a" }));
    let text = std::fs::read_to_string(&file).expect("the file");
    assert!(!text.contains("name = \"a\"") && text.contains("name = \"b\""), "{text}");
    assert!(!folder.file(".spindle.toml.new").exists());
}

#[test]
fn without_a_file_changes_are_made_only_where_they_may_be_lost() {
    let folder = Folder::new("control-ephemeral");
    let socket = folder.file("sock");
    let file = folder.write(&with_socket("", &socket));
    let ephemeral = Command::new(binary())
        .args(["serve", "--ephemeral", "-c"])
        .arg(&file)
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let bare = Bare(ephemeral.expect("spindle starts"));
    let mut client = Client::new(&socket);
    let before = std::fs::read_to_string(&file).expect("the file");
    client.done("bdev_null_create", json!({ "name": "n", "num_blocks": 8, "block_size": 512 }));
    assert_eq!(client.done("bdev_get_bdevs", json!({}))[0]["name"], "n");
    assert_eq!(std::fs::read_to_string(&file).expect("the file"), before);
    drop(bare);
}

pub(super) fn ctl(socket: &Path, words: &[&str]) -> (bool, String) {
    let output = Command::new(binary()).arg("ctl").arg("--socket").arg(socket).args(words).output();
    let output = output.expect("spindle starts");
    let said = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&said).into_owned())
}

#[test]
fn an_operator_calls_methods_by_spindle_ctl() {
    let (address, folder) = (free_port(V4), Folder::new("control-ctl"));
    let socket: PathBuf = folder.file("sock");
    let served = folder.serve(&with_socket(&config(1, address, &[RAM.to_owned()]), &socket));
    let host = "nqn.2026-01.io.spindle:host";
    assert!(ctl(&socket, &["nvmf_subsystem_allow_any_host", "--nqn", SUBSYSTEM, "--allow-any-host=false"]).0);
    let refused =
        Controller::connect(&target(address), &Options::default()).map(drop).expect_err("no host is allowed");
    assert!(refused.to_string().contains("Connect"), "{refused}");
    assert!(ctl(&socket, &["nvmf_subsystem_add_host", "--nqn", SUBSYSTEM, "--host", host]).0);
    let (is_done, said) = ctl(&socket, &["nvmf_get_subsystems", "--nqn", SUBSYSTEM]);
    assert!(is_done && said.contains(host), "{said}");
    let (is_done, said) = ctl(&socket, &["log_set_level", "--level", "LOUD"]);
    assert!(!is_done && said.contains("level = \"LOUD\": must be \"ERROR\""), "{said}");
    assert!(ctl(&socket, &["log_set_level", "--level", "DEBUG"]).0);
    assert_eq!(ctl(&socket, &["log_get_level"]), (true, "DEBUG\n".to_owned()));
    served.terminate();
}
