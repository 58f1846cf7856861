//! The target killed and started again; its configuration read again.

use std::fs::File;
use std::net::SocketAddr;
use std::time::Instant;

use rustix::fs::{FlockOperation, flock};
use rustix::process::Signal;
use spindle_nvme_initiator::{Controller, Options};
use spindle_tests::loopback::{Folder, LONG, config, free_port, target};

use super::{NULL, RAM, V4, buf, bytes, connect, done, round_pool, write_round};

#[test]
fn what_was_acknowledged_survives_kill_9_and_the_disk_is_the_same_one() {
    let address = free_port(V4);
    let folder = Folder::new("killed");
    let text = config(1, address, &[folder.file_disk("killed", "16MiB")]);
    let mut served = folder.serve(&text);
    let mut acknowledged = [0u8; 64];
    let mut identity = None;
    for round in 1..=4u8 {
        let mut controller = Controller::connect(&target(address), &Options::default()).expect("connects");
        let mut queue = controller.connect_queue(1).expect("a queue");
        let namespace = controller.namespace(1).expect("a namespace");
        let identify = controller.identify_namespace(1).expect("identified");
        let ids = format!("{:?} {:?}", controller.identify().sn, identify.nguid);
        assert_eq!(identity.get_or_insert(ids.clone()), &ids, "the same disk after a restart");
        let pool = round_pool();
        for (at, round) in (0u64..).zip(acknowledged) {
            let ticket = queue.read(&namespace, at * 16, pool.take(8192).expect("a buffer")).expect("taken");
            let read = bytes(&done(&mut queue, ticket).expect("its buffer"));
            let found = read[0];
            assert!(found >= round, "block {at}: round {round} was acknowledged, round {found} is there");
            assert!(read.chunks(512).all(|block| block.iter().all(|byte| *byte == block[0])), "torn");
        }
        // Half of the writes are waited for; the target dies with the others in flight.
        let tickets = write_round(&mut queue, &namespace, &pool, round);
        for (ticket, acknowledged) in tickets.into_iter().zip(&mut acknowledged).take(32) {
            done(&mut queue, ticket);
            *acknowledged = round;
        }
        served.signal(Signal::KILL);
        served.end();
        served = folder.serve(&text);
    }
    served.terminate();
}

#[test]
fn a_reload_grows_a_disk_under_a_live_host_and_a_wrong_one_changes_nothing() {
    let address = free_port(V4);
    let folder = Folder::new("grown");
    let text = |size| config(1, address, &[folder.file_disk("grown", size)]);
    let mut served = folder.serve(&text("16MiB"));
    let mut controller = Controller::connect(&target(address), &Options::default()).expect("connects");
    let before = controller.namespace(1).expect("a namespace").bytes();
    folder.write(&text("seventeen"));
    served.signal(Signal::HUP);
    assert!(served.wait_for("size").contains("seventeen"));
    served.wait_for("the configuration is unchanged");
    folder.write(&text("32MiB"));
    served.signal(Signal::HUP);
    served.wait_for("configuration read again");
    assert_eq!(controller.namespace(1).expect("a namespace").bytes(), 2 * before);
    controller.shutdown().expect("ends in order");
    served.terminate();
}

#[test]
fn a_reload_that_one_disk_refuses_changes_none() {
    let address = free_port(V4);
    let folder = Folder::new("refused");
    let text = |file, ram| {
        let ram = format!("kind = \"ram\"\nsize = \"{ram}\"");
        config(1, address, &[folder.file_disk("refused", file), ram])
    };
    let length = || std::fs::metadata(folder.file("refused")).expect("the file").len();
    let mut served = folder.serve(&text("16MiB", "16MiB"));
    let mut controller = Controller::connect(&target(address), &Options::default()).expect("connects");
    let mut bytes = || [1, 2].map(|nsid| controller.namespace(nsid).expect("a namespace").bytes());
    let before = bytes();

    // The file could grow, and the RAM disk cannot.
    folder.write(&text("32MiB", "32MiB"));
    served.signal(Signal::HUP);
    let line = served.wait_for("the configuration is unchanged");
    assert!(line.contains("\"d2\"") && line.contains("33554432"), "{line}");
    assert_eq!((bytes(), length()), (before, 16 << 20));

    // So the file as it was is still one that can be served, and what can be done is.
    folder.write(&text("16MiB", "8MiB"));
    served.signal(Signal::HUP);
    served.wait_for("configuration read again");
    assert_eq!((bytes(), length()), ([16 << 20, 8 << 20], 16 << 20));
    folder.write(&text("32MiB", "16MiB"));
    served.signal(Signal::HUP);
    served.wait_for("configuration read again");
    assert_eq!((bytes(), length()), ([32 << 20, 16 << 20], 32 << 20));
    controller.shutdown().expect("ends in order");
    served.terminate();
}

/// What hosts know the namespaces by.
fn nguids(address: SocketAddr, count: u32) -> Vec<[u8; 16]> {
    let (mut controller, _queue) = connect(address);
    let nguid = |nsid| controller.identify_namespace(nsid).expect("identified").nguid;
    let nguids = (1..=count).map(nguid).collect();
    controller.shutdown().expect("ends in order");
    nguids
}

#[test]
fn a_ram_disk_that_comes_back_empty_is_another_disk_and_the_others_are_the_same() {
    let address = free_port(V4);
    let folder = Folder::new("identities");
    let file = folder.file_disk("identities", "16MiB");
    let text = config(1, address, &[file.clone(), NULL.to_owned(), RAM.to_owned()]);
    let mut served = folder.serve(&text);
    let first = nguids(address, 3);
    assert_eq!(first, nguids(address, 3), "as long as it is there");
    served.signal(Signal::KILL);
    served.end();

    let mut served = folder.serve(&text);
    let second = nguids(address, 3);
    assert_eq!(first[..2], second[..2], "a file and what has no data");
    assert_ne!(first[2], second[2], "memory is empty after a restart");

    // It goes and comes within one process.
    folder.write(&config(1, address, &[file, NULL.to_owned()]));
    served.signal(Signal::HUP);
    served.wait_for("configuration read again");
    folder.write(&text);
    served.signal(Signal::HUP);
    served.wait_for("configuration read again");
    let third = nguids(address, 3);
    assert_eq!(second[..2], third[..2]);
    assert!(third[2] != second[2] && third[2] != first[2], "memory is empty after it was given back");
    served.terminate();
}

#[test]
fn a_disk_is_held_to_the_medium_that_it_was_made_for() {
    let address = free_port(V4);
    let folder = Folder::new("medium");
    let text = |more: &str| config(1, address, &[folder.file_disk("medium", "16MiB") + more]);
    let mut served = folder.serve(&text(""));
    let line = served.log.iter().find(|line| line.contains("medium_id=")).expect("its name in the log");
    let id = line.split("medium_id=\"").nth(1).and_then(|rest| rest.split('"').next());
    let id = id.expect("a name").to_owned();
    let held = text(&format!("\nmedium_id = \"{id}\""));
    // Also by a reload, of the file that is open.
    folder.write(&held);
    served.signal(Signal::HUP);
    served.wait_for("configuration read again");

    // Another file at the path, with as many bytes: what is open stays, and neither name fits both.
    let path = folder.file("medium");
    std::fs::rename(&path, folder.file("moved")).expect("moved");
    std::fs::File::create(&path).and_then(|file| file.set_len(16 << 20)).expect("a file");
    served.signal(Signal::HUP);
    let said = served.wait_for("disk[0].medium_id");
    assert!(
        said.contains("is another one") && said.contains("disks that do not change stay as they are"),
        "{said}"
    );
    served.wait_for("configuration read again");
    let other = spindle_target_disk::medium_id::at(&path).expect("there");
    folder.write(&held.replace(&id, &other[0]));
    served.signal(Signal::HUP);
    assert!(served.wait_for("the configuration is unchanged").contains("is another one"));
    let (controller, _queue) = connect(address);
    controller.shutdown().expect("ends in order");
    served.terminate();

    let log = folder.fails_to_serve(&held);
    assert!(log.contains("disk[0].medium_id") && log.contains("is another one"), "{log}");
    std::fs::rename(folder.file("moved"), &path).expect("moved back");
    folder.serve(&held).terminate();
}

#[test]
fn a_disk_of_the_start_that_a_reload_takes_away_is_closed() {
    let address = free_port(V4);
    let folder = Folder::new("closed");
    let both = config(2, address, &[RAM.to_owned(), folder.file_disk("goes", "16MiB")]);
    let mut served = folder.serve(&both);
    let (mut controller, mut queue) = connect(address);
    let pool = super::pool();
    let second = controller.namespace(2).expect("a namespace");
    let ticket = queue.write(&second, 0, buf(&pool, 4096, 5), false).expect("taken");
    done(&mut queue, ticket);
    // The lock that keeps two targets from one file goes with its last descriptor.
    let file = File::open(folder.file("goes")).expect("it is there");
    let is_free = || flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok();
    assert!(!is_free(), "it is served");
    folder.write(&config(2, address, &[RAM.to_owned()]));
    served.signal(Signal::HUP);
    served.wait_for("configuration read again");
    let begin = Instant::now();
    while !is_free() {
        assert!(begin.elapsed() < LONG, "the target still has the file of a disk that it does not serve");
        std::thread::yield_now();
    }
    flock(&file, FlockOperation::Unlock).expect("ours");
    // The host that was there when it went sees it come back, with what it had.
    folder.write(&both);
    served.signal(Signal::HUP);
    // Shown when all cores have it.
    let begin = Instant::now();
    while controller.namespaces().expect("a list") != [1, 2] {
        assert!(begin.elapsed() < LONG, "it did not come back");
    }
    let second = controller.namespace(2).expect("a namespace");
    let ticket = queue.compare(&second, 0, buf(&pool, 4096, 5)).expect("taken");
    done(&mut queue, ticket);
    controller.shutdown().expect("ends in order");
    served.terminate();
}
