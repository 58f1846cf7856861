//! What is not there when the target starts: the rest is served, and what is absent is tried again.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, Signal, prlimit};
use serde_json::{Value, json};
use spindle_nvme_initiator::{Controller, Options};
use spindle_tests::loopback::{Folder, LONG, SUBSYSTEM, SpindleProcess, binary, config, free_port, target};

use super::control::{Client, with_socket};
use super::namespaces::wait_for_notice;
use super::{RAM, V4, buf, connect, done, pool};

/// Forbids io_uring_setup to the process and runs the rest of the command line.
const WITHOUT_IO_URING: &str = "
import ctypes, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
# Load the number; 425 is io_uring_setup: EPERM; allow the others.
code = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7fff0000)]
filters = ctypes.create_string_buffer(b''.join(struct.pack('HBBI', *line) for line in code))
program = struct.pack('HxxxxxxP', len(code), ctypes.addressof(filters))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()
os.execv(sys.argv[1], sys.argv[1:])
";

fn missing(client: &mut Client) -> Vec<(String, String)> {
    let status = client.done("spindle_get_status", json!({}));
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    let all = status["missing"].as_array().expect("a list").iter();
    all.map(|missing| (text(&missing["what"]), text(&missing["why"]))).collect()
}

fn wait_until_all_is_there(client: &mut Client) {
    let end = Instant::now() + LONG;
    while !missing(client).is_empty() {
        assert!(Instant::now() < end, "{:?}", missing(client));
        std::thread::park_timeout(Duration::from_millis(50));
    }
}

fn file_of(path: &Path) -> String {
    format!("kind = \"file\"\npath = {path:?}")
}

#[test]
fn a_file_that_is_not_there_at_the_start_is_served_when_it_comes() {
    let (address, folder) = (free_port(V4), Folder::new("absent-file"));
    let (socket, file, place) = (folder.file("sock"), folder.file("late"), folder.file("mounted"));
    let made = folder.file_disk("mounted/made", "8MiB");
    let text = with_socket(&config(1, address, &[RAM.to_owned(), file_of(&file), made]), &socket);
    let mut served = folder.serve(&text);
    let (mut controller, mut queue) = connect(address);
    assert_eq!(controller.namespaces().expect("a list"), [1]);
    let mut client = Client::new(&socket);
    let absent = missing(&mut client);
    assert_eq!(absent.iter().map(|(what, _)| what.as_str()).collect::<Vec<_>>(), ["disk d2", "disk d3"]);
    assert!(absent.iter().all(|(_, why)| why.contains("No such file")), "{absent:?}");
    // A change of something else.
    client.done("bdev_null_create", json!({ "name": "n", "num_blocks": 8, "block_size": 512 }));
    served.signal(Signal::HUP);
    served.wait_for("configuration read again");
    // With its size at once.
    std::fs::write(folder.file("new"), vec![0; 16 << 20]).expect("written");
    std::fs::rename(folder.file("new"), &file).expect("renamed");
    wait_for_notice(&mut controller);
    assert_eq!(controller.namespaces().expect("a list"), [1, 2]);
    let namespace = controller.namespace(2).expect("a namespace");
    assert_eq!(namespace.blocks * u64::from(namespace.block_bytes()), 16 << 20);
    let ticket = queue.write(&namespace, 0, buf(&pool(), 4096, 1), true).expect("taken");
    done(&mut queue, ticket);
    std::fs::create_dir(&place).expect("made");
    wait_until_all_is_there(&mut client);
    let told = served.wait_for("bytes=8388608");
    assert!(told.contains("disk=\"d3\""), "{told}");
    let told = served.log.iter().filter(|line| line.contains("open failed"));
    assert_eq!(told.count(), 2, "however often it was tried:\n{}", served.log.join("\n"));
    // The media are known now.
    let twice = json!({ "name": "twice", "filename": file });
    client.send("bdev_aio_create", &twice);
    let error = client.answer().expect("an answer")["error"]["message"].to_string();
    assert!(error.contains("also the path of the disk"), "{error}");
    served.terminate();
}

#[test]
fn an_address_that_is_not_there_at_the_start_keeps_no_other_from_being_served() {
    let (address, folder) = (free_port(V4), Folder::new("absent-address"));
    let socket = folder.file("sock");
    let text = with_socket(&config(1, address, &[RAM.to_owned()]), &socket);
    let served = folder.serve(&format!("{text}[[listener]]\naddress = \"203.0.113.9:4420\"\n"));
    let (mut controller, _queue) = connect(address);
    assert_eq!(controller.namespaces().expect("a list"), [1]);
    let mut client = Client::new(&socket);
    let absent = missing(&mut client);
    assert_eq!((absent.len(), absent[0].0.as_str()), (1, "listener 203.0.113.9:4420"));
    // What another subsystem offers there is kept, and not in force.
    let nqn = "nqn.2026-01.io.spindle:second";
    client.done("nvmf_create_subsystem", json!({ "nqn": nqn, "allow_any_host": true }));
    let at = json!({ "trtype": "tcp", "adrfam": "ipv4", "traddr": "203.0.113.9", "trsvcid": "4420" });
    client.send("nvmf_subsystem_add_listener", &json!({ "nqn": nqn, "listen_address": at }));
    let error = client.answer().expect("an answer")["error"].clone();
    assert_eq!((&error["code"], &error["data"]["kept"]), (&json!(-32002), &json!(true)), "{error}");
    assert!(error["message"].to_string().contains("does not have the address"), "{error}");
    served.terminate();
}

#[test]
fn a_target_that_may_not_use_io_uring_serves_what_needs_none_and_takes_no_more() {
    let (address, folder) = (free_port(V4), Folder::new("absent-io-uring"));
    let socket = folder.file("sock");
    let disks = [RAM.to_owned(), folder.file_disk("d2", "16MiB")];
    let file = folder.write(&with_socket(&config(2, address, &disks), &socket));
    let text = std::fs::read_to_string(&file).expect("the file");
    let mut command = Command::new("python3");
    command.args(["-c", WITHOUT_IO_URING]).arg(binary());
    let mut served = SpindleProcess::start_by(&mut command, &file);
    let (mut controller, _queue) = connect(address);
    assert_eq!(controller.namespaces().expect("a list"), [1]);
    let mut client = Client::new(&socket);
    let absent = missing(&mut client);
    assert!(absent.len() == 1 && absent[0].0 == "disk d2" && absent[0].1.contains("seccomp"), "{absent:?}");
    std::fs::write(folder.file("other"), vec![0; 1 << 20]).expect("written");
    client.send("bdev_aio_create", &json!({ "name": "d3", "filename": folder.file("other") }));
    let error = client.answer().expect("an answer")["error"]["message"].to_string();
    assert!(error.contains("cannot set up io_uring") && error.contains("seccomp"), "{error}");
    assert_eq!(std::fs::read_to_string(&file).expect("the file"), text);
    // Changes of something else.
    served.signal(Signal::HUP);
    served.wait_for("configuration read again");
    client.done("bdev_null_create", json!({ "name": "n", "num_blocks": 8, "block_size": 512 }));
    served.terminate();
}

#[test]
fn a_core_that_cannot_open_a_disk_is_named_by_the_answer_and_opens_it_later() {
    let (address, folder) = (free_port(V4), Folder::new("absent-core"));
    let socket = folder.file("sock");
    let file = folder.file("disk");
    std::fs::write(&file, vec![0; 1 << 20]).expect("written");
    let served = folder.serve(&with_socket(&config(2, address, &[RAM.to_owned()]), &socket));
    let mut client = Client::new(&socket);
    client.done("rpc_get_methods", json!({}));
    let limit = |files: u64| {
        let limit = Rlimit { current: Some(files), maximum: Some(4096) };
        prlimit(Some(served.pid()), Resource::Nofile, limit).expect("of a child");
    };
    // The limit is on the number of a descriptor.
    let first_free = || {
        let folder = format!("/proc/{}/fd", served.pid().as_raw_nonzero());
        (0..).find(|number: &u64| !Path::new(&folder).join(number.to_string()).is_symlink())
    };
    // For the disk and one ring; each core takes two.
    limit(first_free().expect("one") + 2);
    client.send("bdev_aio_create", &json!({ "name": "d2", "filename": file }));
    let error = client.answer().expect("an answer")["error"].clone();
    assert_eq!(error["code"], -32002, "{error}");
    assert_eq!(
        (&error["data"]["in_force"], &error["data"]["kept"]),
        (&json!(false), &json!(true)),
        "{error}"
    );
    let first = &error["data"]["cores"][0];
    assert!(first["core"].is_u64() && first["why"].to_string().contains("Too many open files"), "{error}");
    let absent = missing(&mut client);
    assert!(absent.iter().all(|(what, _)| what.starts_with("disk d2 on core ")), "{absent:?}");
    // To show it to hosts is no success either; something else is. The descriptor is for the file.
    limit(first_free().expect("one") + 1);
    let namespace = json!({ "nqn": SUBSYSTEM, "namespace": { "bdev_name": "d2" } });
    client.send("nvmf_subsystem_add_ns", &namespace);
    let error = client.answer().expect("an answer")["error"].clone();
    assert_eq!(error["code"], -32002, "{error}");
    client.done("bdev_null_create", json!({ "name": "n", "num_blocks": 8, "block_size": 512 }));
    limit(4096);
    wait_until_all_is_there(&mut client);
    // The queues are on both cores.
    let options = Options { io_queues: 2, ..Options::default() };
    let mut controller = Controller::connect(&target(address), &options).expect("connects");
    let namespace = controller.namespace(2).expect("a namespace");
    for number in 1..=2 {
        let mut queue = controller.connect_queue(number).expect("a queue");
        let ticket = queue.read(&namespace, 0, buf(&pool(), 4096, 0)).expect("taken");
        done(&mut queue, ticket);
    }
    served.terminate();
}
