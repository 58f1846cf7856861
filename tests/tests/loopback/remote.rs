//! A disk that is a namespace of another target: this one in front of that one.

use std::net::SocketAddr;
use std::time::Instant;

use rustix::process::Signal;
use spindle_initiator::{BlockRange, Controller, Failure, Options, Pages, Pool, Ticket, ZoneSpec};
use spindle_tests::loopback::{Folder, LONG, SUBSYSTEM, Served, config, free_port, target};

use super::{RAM, V4, buf, bytes, connect, done, pool};

/// The lines of the disk that is namespace 1 of the target at `far`.
fn remote(far: SocketAddr) -> String {
    format!("kind = \"remote\"\naddress = \"{far}\"\nnqn = \"{SUBSYSTEM}\"")
}

/// A target in front of the one at `far`.
fn front(folder: &Folder, far: SocketAddr) -> (Served, SocketAddr) {
    let address = free_port(V4);
    (folder.serve(&config(1, address, &[remote(far)])), address)
}

#[test]
fn every_command_reaches_the_disk_of_the_other_target() {
    let (far, folders) = (free_port(V4), [Folder::new("far-all"), Folder::new("front-all")]);
    // The other target moves less in one command than this one.
    let text = config(1, far, &[folders[0].file_disk("far", "16MiB")]);
    let far_served = folders[0].serve(&format!("{text}[limits]\ntransfer = \"64KiB\"\n"));
    let (front_served, address) = front(&folders[1], far);
    let (mut controller, mut queue) = connect(address);
    let namespace = controller.namespace(1).expect("a namespace");
    assert_eq!(namespace.bytes(), 16 << 20);
    let pool = pool();
    for (length, lba) in [(512, 0), (4096, 32_767 - 7), (64 << 10, 8), (1 << 20, 3)] {
        let data = buf(&pool, length, 7);
        let wanted = bytes(&data);
        let ticket = queue.write(&namespace, lba, data, length == 4096).expect("taken");
        done(&mut queue, ticket);
        let ticket = queue.read(&namespace, lba, pool.take(length).expect("a buffer")).expect("taken");
        assert_eq!(bytes(&done(&mut queue, ticket).expect("its buffer")), wanted, "{length} bytes at {lba}");
    }
    let ticket = queue.flush(&namespace).expect("taken");
    done(&mut queue, ticket);
    let ticket = queue.compare(&namespace, 0, buf(&pool, 512, 9)).expect("taken");
    let differs = queue.wait(ticket, LONG).expect("an answer");
    assert!(matches!(differs.result, Err(Failure::Status(_))), "{:?}", differs.result);
    let range = BlockRange { lba: 3, blocks: 2048 };
    let ticket = queue.write_zeroes(&namespace, range, false).expect("taken");
    done(&mut queue, ticket);
    let ticket = queue.deallocate(&namespace, &[range], pool.take(4096).expect("a buffer")).expect("taken");
    done(&mut queue, ticket);
    let ticket = queue.read(&namespace, 3, pool.take(1 << 20).expect("a buffer")).expect("taken");
    assert!(bytes(&done(&mut queue, ticket).expect("its buffer")).iter().all(|byte| *byte == 0));
    // As the other target's own hosts see it.
    let (mut direct, mut of_far) = connect(far);
    let namespace = direct.namespace(1).expect("a namespace");
    let ticket = of_far.read(&namespace, 32_767 - 7, pool.take(4096).expect("a buffer")).expect("taken");
    assert_eq!(bytes(&done(&mut of_far, ticket).expect("its buffer")), bytes(&buf(&pool, 4096, 7)));
    front_served.terminate();
    far_served.terminate();
}

#[test]
fn what_was_acknowledged_survives_kill_9_of_the_other_target_and_what_was_not_is_sent_again() {
    let (far, folders) = (free_port(V4), [Folder::new("far-killed"), Folder::new("front-killed")]);
    let text = config(1, far, &[folders[0].file_disk("far", "16MiB")]);
    let mut far_served = folders[0].serve(&text);
    let (mut front_served, address) = front(&folders[1], far);
    let (mut controller, mut queue) = connect(address);
    let namespace = controller.namespace(1).expect("a namespace");
    let pool = Pool::new(&[ZoneSpec { buffer_bytes: 8192, count: 80 }], Pages::Base).expect("a pool");
    for round in 1..=3u8 {
        let tickets: Vec<Ticket> = (0..64u64)
            .map(|at| {
                let mut buf = pool.take(8192).expect("a buffer");
                buf.as_mut_slice().expect("one piece").fill(round);
                queue.write(&namespace, at * 16, buf, true).expect("taken")
            })
            .collect();
        done(&mut queue, tickets[0]);
        // The others are on their way, or with a target that dies with them.
        far_served.signal(Signal::KILL);
        far_served.end();
        front_served.wait_for("lost namespace 1");
        far_served = folders[0].serve(&text);
        for ticket in &tickets[1..] {
            done(&mut queue, *ticket);
        }
        front_served.wait_for("again");
        for at in 0..64u64 {
            let ticket = queue.read(&namespace, at * 16, pool.take(8192).expect("a buffer")).expect("taken");
            let read = bytes(&done(&mut queue, ticket).expect("its buffer"));
            assert!(read.iter().all(|byte| *byte == round), "round {round}, block {}", at * 16);
        }
    }
    assert!(queue.is_up(), "the host has noticed nothing but time");
    front_served.terminate();
    far_served.terminate();
}

#[test]
fn another_disk_under_the_same_name_is_not_used_and_commands_fail_in_time() {
    let (far, folders) = (free_port(V4), [Folder::new("far-other"), Folder::new("front-other")]);
    // A RAM disk is another disk after a restart.
    let text = config(1, far, &[RAM.to_owned()]);
    let mut far_served = folders[0].serve(&text);
    let (mut front_served, address) = front(&folders[1], far);
    let (mut controller, mut queue) = connect(address);
    let namespace = controller.namespace(1).expect("a namespace");
    far_served.signal(Signal::KILL);
    far_served.end();
    front_served.wait_for("lost namespace 1");
    let far_served = folders[0].serve(&text);
    front_served.wait_for("cannot use namespace 1");
    let ticket = queue.write(&namespace, 0, buf(&pool(), 4096, 1), false).expect("taken");
    let completion = queue.wait(ticket, LONG).expect("an answer");
    let Err(Failure::Status(status)) = completion.result else { panic!("{:?}", completion.result) };
    assert!(!status.is_dnr(), "the host may repeat it: {status}");
    drop(controller);
    front_served.terminate();
    far_served.terminate();
}

#[test]
fn without_the_other_target_the_rest_is_served_and_a_reload_finds_it() {
    let (far, address) = (free_port(V4), free_port(V4));
    let folders = [Folder::new("far-late"), Folder::new("front-late")];
    let text = config(1, address, &[RAM.to_owned(), remote(far)]);
    let mut front_served = folders[1].serve(&text);
    let mut controller = Controller::connect(&target(address), &Options::default()).expect("connects");
    assert_eq!(controller.namespaces().expect("a list"), [1]);
    let far_served = folders[0].serve(&config(1, far, &[folders[0].file_disk("far", "16MiB")]));
    front_served.signal(Signal::HUP);
    front_served.wait_for("other target");
    front_served.wait_for("configuration read again");
    let end = Instant::now() + LONG;
    while controller.namespaces().expect("a list") != [1, 2] {
        assert!(Instant::now() < end, "namespace 2 is not shown");
    }
    front_served.terminate();
    far_served.terminate();
}
