//! Shutdown: no new commands, those in flight finish, the hosts are told, nothing is left.

use nvme_spec::sqe::{Fuse, Sgl};
use nvme_spec::tcp::{CapsuleCmd, Extent};
use nvme_spec::zerocopy::IntoBytes;
use nvme_spec::{Sqe, Status};
use spindle_nvme_tcp::RxBatch;
use spindle_nvme_tcp::host::{HostData, HostEvent};
use spindle_nvme_transport::{CloseReason, Connections};
use spindle_target::env::Message;
use spindle_target_disk::fault::{Fault, FaultDisk};
use spindle_tests::direct::Direct;
use spindle_tests::script::{HOST, Line, Rig, Setup, Want, connect_data, connect_sqe};

use crate::{assert_ok, pattern, pool_disk};

const SHUTDOWN: Option<CloseReason> = Some(CloseReason::Shutdown);

#[test]
fn idle_queues_end_at_once_and_no_connection_is_taken_any_more() {
    let mut rig = Rig::new(Setup { cores: 2, ..Setup::small(vec![pool_disk(512)]) });
    let host = rig.host();
    let fresh = rig.accept(0);
    rig.send(&host.admin, Sqe::async_event_request(1), 0);
    rig.tell(&Message::Shutdown);
    rig.turn();
    for queue in [&host.admin, &host.io, &fresh] {
        assert_eq!(queue.line.closed(), SHUTDOWN);
    }
    let peer = *rig.cores[0].peer(fresh.id).expect("it is there");
    assert!(rig.cores[0].accept(Line::default(), peer).is_err());
    assert!(rig.cores.iter().all(spindle_target::core::TargetCore::is_draining));
    rig.finish();
}

#[test]
fn a_shutdown_answers_commands_then_closes_io_queues_then_the_admin_queue() {
    // Once the admin queue, which is idle most of the time, took its I/O queues along with what they had in
    // flight.
    for cores in [1, 2] {
        let (disk, control) = FaultDisk::new(pool_disk(512), 1);
        let mut rig = Rig::new(Setup { cores, zones: vec![(4096, 2)], ..Setup::small(vec![disk]) });
        let host = rig.host();
        let (admin, io) = (&host.admin, &host.io);
        control.set_all(Fault::Drop, 1_000_000);
        rig.send(io, Sqe::read(1, 1, 0, 1), 512);
        rig.send(io, Sqe::write(2, 1, 0, 1, false), 512);
        rig.send(io, Sqe::write(3, 1, 1, 1, false), 512);
        rig.tell(&Message::Shutdown);
        rig.turn();
        assert_eq!((admin.line.closed(), io.line.closed()), (None, None));
        control.set_all(Fault::Drop, 0);
        control.release_dropped();
        rig.turn();
        assert_ok(&rig.finish_command(io, 1, &[]));
        assert_ok(&rig.finish_command(io, 2, &pattern(2, 512)));
        assert_ok(&rig.finish_command(io, 3, &pattern(3, 512)));
        rig.turn();
        assert_eq!(io.line.closed(), SHUTDOWN);
        rig.turn();
        assert_eq!(admin.line.closed(), SHUTDOWN);
        rig.finish();
    }
}

#[test]
fn the_reply_of_the_last_command_has_left_before_its_queue_ends() {
    let mut rig = Rig::new(Setup::small(vec![pool_disk(512)]));
    let host = rig.host();
    rig.send(&host.io, Sqe::read(1, 1, 0, 1), 512);
    rig.tell(&Message::Shutdown);
    rig.turn();
    assert_eq!(host.io.line.closed(), None);
    assert_ok(&rig.answer(&host.io).expect("an answer"));
    rig.turn();
    assert_eq!(host.io.line.closed(), SHUTDOWN);
    rig.finish();
}

#[test]
fn a_host_that_keeps_sending_does_not_keep_the_target_alive() {
    // Once every command was still taken, so that a busy queue was never idle.
    let mut rig = Rig::new(Setup::small(vec![pool_disk(512)]));
    let host = rig.host();
    rig.send(&host.io, Sqe::write(1, 1, 0, 1, false), 512);
    rig.tell(&Message::Shutdown);
    for cid in 10..15 {
        rig.send(&host.io, Sqe::write(cid, 1, 9, 1, false), 512);
        rig.send(&host.admin, Sqe::keep_alive(cid), 0);
        rig.turn();
    }
    assert_eq!(host.io.line.fetching(), [1], "what came later is not taken");
    rig.bring(&host.io, 1, &[1; 512]);
    let answers = rig.answers(&host.io);
    assert_eq!(answers.iter().map(|answer| answer.cid).collect::<Vec<_>>(), [1]);
    rig.turn();
    rig.turn();
    assert_eq!((host.io.line.closed(), host.admin.line.closed()), (SHUTDOWN, SHUTDOWN));
    rig.finish();
}

#[test]
fn half_a_pair_does_not_wait_for_a_half_that_is_not_taken_any_more() {
    let mut rig = Rig::new(Setup::small(vec![pool_disk(512)]));
    let host = rig.host();
    rig.send(&host.io, Sqe::compare(1, 1, 0, 1).with_fuse(Fuse::FIRST), 512);
    rig.bring(&host.io, 1, &[0; 512]);
    rig.tell(&Message::Shutdown);
    let answer = rig.answer(&host.io).expect("an answer");
    assert_eq!(answer.status.code(), Status::ABORTED_MISSING_FUSED);
    rig.turn();
    assert_eq!(host.io.line.closed(), SHUTDOWN);
    rig.finish();
}

#[test]
fn a_connect_that_is_under_way_ends_with_the_shutdown() {
    let mut rig = Rig::new(Setup::small(vec![pool_disk(512)]));
    let queue = rig.accept(0);
    rig.send(&queue, connect_sqe(Want::admin()), 1024);
    rig.tell(&Message::Shutdown);
    assert_eq!(queue.line.closed(), None);
    assert_ok(&rig.finish_command(&queue, 0, &connect_data(Want::admin(), HOST)));
    rig.turn();
    assert_eq!(queue.line.closed(), SHUTDOWN);
    rig.finish();
}

#[test]
fn data_behind_a_command_that_is_not_taken_any_more_still_arrives() {
    // Once that command's in-capsule data stood in the way for ever, and the write before it was never
    // finished.
    let mut direct = Direct::on(&pool_disk(512));
    let Direct { core, io_link, pool, .. } = &mut direct;
    let data = HostData::ToController(pool.take(8192).expect("a buffer"));
    io_link.host.submit(Sqe::write(1, 1, 0, 16, false), data).expect("room");
    let mut completed = Vec::new();
    let mut on_event = |event| match event {
        HostEvent::Completed { cid, result, .. } => completed.push((cid, result)),
        other @ (HostEvent::Ready | HostEvent::Closed { .. }) => panic!("{other:?}"),
    };
    io_link.turn(core, &mut on_event); // the R2T is here, the data is about to leave
    core.on_message(Message::Shutdown);
    let sqe = Sqe::write(2, 1, 0, 1, false).with_sgl(Sgl::in_capsule(512));
    let mut batch = RxBatch::new(1024);
    batch.extend(CapsuleCmd::new(sqe, 0, Extent::new(72, 512, false, false, 0)).as_bytes());
    batch.extend(&[7; 512]);
    core.transport(io_link.id).expect("open").load(batch);
    core.step_deferred(io_link.id);
    core.transport(io_link.id).expect("open").unload();
    for _ in 0..3 {
        io_link.turn(core, &mut on_event);
    }
    assert_eq!(completed, [(1, Ok(()))]);
}
