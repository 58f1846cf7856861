//! The target killed and started again; its configuration read again.

use rustix::process::Signal;
use spindle_initiator::{Controller, Options, Pages, Pool, Ticket, ZoneSpec};
use spindle_tests::loopback::{Folder, config, free_port, target};

use super::{V4, bytes, done};

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
        let pool = Pool::new(&[ZoneSpec { buffer_bytes: 8192, count: 80 }], Pages::Base).expect("a pool");
        for (at, round) in (0u64..).zip(acknowledged) {
            let ticket = queue.read(&namespace, at * 16, pool.take(8192).expect("a buffer")).expect("taken");
            let read = bytes(&done(&mut queue, ticket).expect("its buffer"));
            let found = read[0];
            assert!(found >= round, "block {at}: round {round} was acknowledged, round {found} is there");
            assert!(read.chunks(512).all(|block| block.iter().all(|byte| *byte == block[0])), "torn");
        }
        // Half of the writes are waited for; the target dies with the others in flight.
        let tickets: Vec<Ticket> = (0..64u64)
            .map(|at| {
                let mut buf = pool.take(8192).expect("a buffer");
                buf.as_mut_slice().expect("one piece").fill(round);
                queue.write(&namespace, at * 16, buf, true).expect("taken")
            })
            .collect();
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
    served.wait_for("all stays as it was");
    folder.write(&text("32MiB"));
    served.signal(Signal::HUP);
    served.wait_for("configuration read again");
    assert_eq!(controller.namespace(1).expect("a namespace").bytes(), 2 * before);
    controller.shutdown().expect("ends in order");
    served.terminate();
}
