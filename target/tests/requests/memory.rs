//! Memory: who waits for it, in which order, and what never does.

use std::sync::Arc;

use nvme_spec::identify::Cns;
use nvme_spec::register::CSTS;
use nvme_spec::{Sqe, Status};
use spindle_nvme_transport::Connections;
use spindle_target::qpair::request::RequestState;
use spindle_target_disk::{Fault, FaultDisk, OpKind};
use spindle_tests::script::{HOST, Queue, Rig, Setup, Want};

use crate::{assert_ok, pattern, pool_disk, ram_disk};

/// One host with two I/O queues on a pool with these zones.
fn two_queues(zones: &[(u32, u32)]) -> (Rig, Queue, [Queue; 2]) {
    let mut rig = Rig::new(Setup { zones: zones.to_vec(), ..Setup::small(vec![pool_disk(512)]) });
    let (admin, cntlid) = rig.admin(0, 0);
    let queues = [1, 2].map(|qid| rig.io(0, Want { entries: 64, ..Want::io(cntlid, qid) }));
    (rig, admin, queues)
}

fn write(cid: u16) -> Sqe {
    Sqe::write(cid, 1, u64::from(cid), 1, false)
}

#[test]
fn commands_wait_for_memory_in_the_order_in_which_they_came() {
    let (mut rig, _, [io, _]) = two_queues(&[(4096, 2)]);
    for cid in 0..6 {
        rig.send(&io, write(cid), 512);
    }
    assert_eq!(rig.states(&io), [(RequestState::NeedBuffer, 4), (RequestState::Fetching, 2)]);
    assert_eq!(rig.cores[0].usage().waits, 4);
    for cid in 0..6 {
        rig.turn();
        let expected: Vec<u16> = (cid..6.min(cid + 2)).collect();
        assert_eq!(io.line.fetching(), expected);
        rig.bring(&io, cid, &pattern(usize::from(cid), 512));
        assert_eq!(rig.answer(&io).map(|answer| answer.cid), Some(cid));
    }
    assert_eq!(rig.cores[0].usage().waits, 4, "each is counted once");
    rig.finish();
}

#[test]
fn replies_of_disks_do_not_wait_for_commands_that_got_memory_later() {
    let (disk, control) = FaultDisk::new(pool_disk(512), 1);
    let mut rig = Rig::new(Setup { zones: vec![(4096, 1)], ..Setup::small(vec![disk]) });
    let host = rig.host();
    control.set(Fault::Drop, OpKind::Read, 1_000_000);
    for cid in [1, 2] {
        rig.send(&host.io, Sqe::read(cid, 1, 0, 1), 512);
    }
    assert_eq!(rig.states(&host.io), [(RequestState::NeedBuffer, 1), (RequestState::Executing, 1)]);
    control.release_dropped();
    rig.turn();
    assert_eq!(rig.answer(&host.io).map(|answer| answer.cid), Some(1));
    rig.cores[0].poll();
    assert_eq!(rig.states(&host.io), [(RequestState::Executing, 1)], "the disk has the other");
    assert!(!rig.cores[0].has_submitted(host.io.id));
    control.release_dropped();
    rig.turn();
    assert_eq!(rig.answer(&host.io).map(|answer| answer.cid), Some(2));
    rig.finish();
}

#[test]
fn a_turn_takes_all_that_a_disk_has_ended() {
    const READS: u16 = 60;
    let (disk, control) = FaultDisk::new(pool_disk(512), 1);
    let mut rig = Rig::new(Setup { zones: vec![(4096, 512)], ..Setup::small(vec![disk]) });
    let (_, cntlid) = rig.admin(0, 0);
    let queues = [1, 2, 3, 4].map(|qid| rig.io(0, Want { entries: 64, ..Want::io(cntlid, qid) }));
    control.set(Fault::Drop, OpKind::Read, 1_000_000);
    for queue in &queues {
        for cid in 0..READS {
            rig.send(queue, Sqe::read(cid, 1, 0, 1), 512);
        }
        assert_eq!(rig.states(queue), [(RequestState::Executing, READS.into())]);
    }
    control.release_dropped();
    rig.cores[0].poll();
    for queue in &queues {
        let executing =
            rig.states(queue).iter().filter(|(state, _)| *state == RequestState::Executing).count();
        assert_eq!(executing, 0, "240 in one turn");
    }
}

#[test]
fn who_comes_later_does_not_take_the_buffer_that_another_waits_for() {
    let (mut rig, _, [a, b]) = two_queues(&[(4096, 1)]);
    rig.send(&a, write(1), 512);
    rig.send(&a, write(2), 512);
    // The buffer comes free, and before anybody looks at who waits, others ask for it.
    rig.bring(&a, 1, &[1; 512]);
    assert_eq!(rig.answer(&a).map(|answer| answer.cid), Some(1));
    rig.send(&b, write(3), 512);
    rig.send(&a, write(4), 512);
    rig.send(&b, Sqe::read(5, 1, 0, 1), 512);
    assert_eq!((a.line.fetching(), b.line.fetching()), (vec![], vec![]));
    rig.turn();
    assert_eq!((a.line.fetching(), b.line.fetching()), (vec![2], vec![]));
    rig.bring(&a, 2, &[1; 512]);
    rig.turn();
    assert_eq!((a.line.fetching(), b.line.fetching()), (vec![], vec![3]), "now it is the other's turn");
    rig.bring(&b, 3, &[1; 512]);
    rig.turn();
    assert_eq!(a.line.fetching(), [4]);
    rig.finish();
}

#[test]
fn a_deep_queue_does_not_starve_a_shallow_one() {
    let (mut rig, _, [deep, shallow]) = two_queues(&[(4096, 4)]);
    let mut served = [0, 0];
    let mut next = 0;
    let mut send = |rig: &mut Rig, queue: &Queue| {
        next = (next + 1) % 2000;
        rig.send(queue, write(next), 512);
    };
    for _ in 0..40 {
        send(&mut rig, &deep);
    }
    send(&mut rig, &shallow);
    for _ in 0..400 {
        for (queue, count) in [(&deep, 0), (&shallow, 1)] {
            for cid in queue.line.fetching() {
                rig.bring(queue, cid, &[0; 512]);
                served[count] += rig.answers(queue).len();
                send(&mut rig, queue);
            }
        }
        rig.turn();
    }
    // Four buffers: in one turn the deep queue has them all, in the next the shallow one has the one that it
    // wants.
    let [deep, shallow] = served;
    assert!(shallow > 150 && deep > 400, "{served:?}");
    rig.finish();
}

#[test]
fn a_large_command_that_waits_does_not_hold_up_another_queues_small_ones() {
    let (mut rig, _, [a, b]) = two_queues(&[(4096, 2), (64 << 10, 1)]);
    let large = |cid| Sqe::write(cid, 1, 0, 128, false);
    rig.send(&a, large(1), 64 << 10);
    rig.send(&a, large(2), 64 << 10);
    assert_eq!(rig.states(&a), [(RequestState::NeedBuffer, 1), (RequestState::Fetching, 1)]);
    for cid in 10..20 {
        rig.send(&b, write(cid), 512);
        rig.turn();
        assert_eq!(b.line.fetching(), [cid]);
        rig.bring(&b, cid, &[0; 512]);
        assert_ok(&rig.answer(&b).expect("an answer"));
    }
    rig.finish();
}

#[test]
fn what_needs_no_memory_does_not_wait_for_it() {
    let setup = Setup { zones: vec![(4096, 1)], ..Setup::small(vec![pool_disk(512), ram_disk(512)]) };
    let mut rig = Rig::new(setup);
    let host = rig.host();
    let io = &host.io;
    rig.send(io, write(1), 512);
    rig.send(io, write(2), 512);
    for sqe in [Sqe::flush(3, 1), Sqe::flush(4, u32::MAX), Sqe::write_zeroes(5, 1, 7, 1, false)] {
        rig.send(io, sqe, 0);
        assert_ok(&rig.answer(io).expect("an answer at once"));
    }
    // A RAM disk's data is sent from where it lies, and its writes go to its own frames.
    rig.send(io, Sqe::read(6, 2, 0, 1), 512);
    assert_ok(&rig.answer(io).expect("an answer at once"));
    rig.send(io, Sqe::write(7, 2, 0, 1, false), 512);
    rig.turn();
    assert_eq!(io.line.fetching(), [1], "in order: behind the command that waits for the pool");
    rig.bring(io, 1, &[0; 512]);
    rig.turn();
    assert_eq!(io.line.fetching(), [2, 7]);
    rig.finish();
}

#[test]
fn admin_commands_connect_and_keep_alive_are_served_with_all_data_buffers_taken() {
    let (mut rig, admin, [io, _]) = two_queues(&[(4096, 1)]);
    rig.send(&io, write(1), 512);
    rig.send(&io, write(2), 512);
    assert_eq!(rig.states(&io), [(RequestState::NeedBuffer, 1), (RequestState::Fetching, 1)]);
    assert_ok(&rig.read(&admin, Sqe::identify(1, Cns::CONTROLLER, 0, 0), 4096));
    let other = rig.accept(0);
    assert_ok(&rig.try_connect(&other, Want::admin(), HOST));
    // The reserve is taken as well: two answers that have not left.
    for cid in [2, 3, 4] {
        rig.send(&admin, Sqe::identify(cid, Cns::CONTROLLER, 0, 0), 4096);
    }
    assert_eq!(rig.states(&admin), [(RequestState::NeedBuffer, 1), (RequestState::Replying, 2)]);
    rig.send(&admin, Sqe::keep_alive(5), 0);
    rig.send(&admin, Sqe::property_get(6, false, CSTS), 0);
    rig.send(&admin, Sqe::async_event_request(7), 0);
    rig.send(&admin, Sqe::abort(8, 1, 2), 0);
    // Each is answered although an older command waits; reading them gives the reserve back.
    let answers: Vec<u16> = rig.answers(&admin).iter().map(|answer| answer.cid).collect();
    assert_eq!(answers, [2, 3, 5, 6, 8]);
    rig.turn();
    assert_eq!(rig.answer(&admin).map(|answer| answer.cid), Some(4));
    rig.finish();
}

#[test]
fn buffers_of_failures_and_of_both_compared_sides_come_home() {
    let disk = pool_disk(512);
    let mut rig = Rig::new(Setup { zones: vec![(4096, 2)], ..Setup::small(vec![Arc::clone(&disk)]) });
    let host = rig.host();
    for round in 0..20 {
        let answer = rig.run(&host.io, Sqe::compare(1, 1, 0, 1), &[u8::from(round % 2 == 0); 512]);
        let expected = if round % 2 == 0 { Status::COMPARE_FAILURE } else { Status::SUCCESS };
        assert_eq!(answer.status.code(), expected);
        let wrong = Err(Status::COMMAND_TRANSIENT_TRANSPORT_ERROR);
        rig.send(&host.io, write(2), 512);
        rig.bring_result(&host.io, 2, &[9; 512], wrong);
        assert!(!rig.answer(&host.io).expect("an answer").status.is_success());
        assert_eq!(rig.cores[0].pools().0.free_bytes(), 8192);
    }
    rig.finish();
}
