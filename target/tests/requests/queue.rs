//! The queue itself: Connect, entries, SQHD, command identifiers, Disconnect.

use nvme_spec::feature::FeatureId;
use nvme_spec::identify::Cns;
use nvme_spec::register::{CAP, CSTS};
use nvme_spec::{FabricsType, Sqe, Status};
use spindle_nvme_transport::{CloseReason, DataPointer, Event};
use spindle_reactor::clock::Nanos;
use spindle_target::notice::Notice;
use spindle_target::qpair::CONNECT_TIMEOUT;
use spindle_target::qpair::request::RequestState;
use spindle_tests::script::{CC_DISABLED, CC_ENABLED, HOST, Rig, Setup, Want, connect_data, connect_sqe};

use crate::{assert_ok, assert_refused, pool_disk, ram_disk};

fn rig() -> Rig {
    Rig::new(Setup::small(vec![pool_disk(512)]))
}

#[test]
fn every_command_before_connect_is_out_of_sequence_and_connect_may_follow() {
    let mut rig = rig();
    for sqe in [
        Sqe::read(0, 1, 0, 1),
        Sqe::keep_alive(0),
        Sqe::property_get(0, true, CAP),
        Sqe::disconnect(0),
        Sqe::identify(0, Cns::CONTROLLER, 0, 0),
        Sqe::fabrics(0, FabricsType::AUTHENTICATION_SEND),
    ] {
        let queue = rig.accept(0);
        assert_refused(&rig.run(&queue, sqe, &[]), Status::COMMAND_SEQUENCE_ERROR);
        assert_ok(&rig.try_connect(&queue, Want::admin(), HOST));
    }
    rig.finish();
}

#[test]
fn a_second_command_before_the_answer_to_the_first_ends_a_fresh_connection() {
    // Once Connect was answered in the name of the command before it, which had the same identifier, and that
    // panicked.
    let mut rig = rig();
    let queue = rig.accept(0);
    rig.send(&queue, Sqe::keep_alive(0), 0);
    rig.send_pointer(&queue, connect_sqe(Want::admin()), Ok(DataPointer::InCapsule { bytes: 1024 }));
    assert_eq!(queue.line.closed(), Some(CloseReason::HostError));
    rig.turn();
    assert!(rig.notices.iter().any(|notice| matches!(notice, Notice::HostError { .. })));
    rig.finish();
}

#[test]
fn connect_has_exactly_its_kilobyte_of_data() {
    let mut rig = rig();
    let queue = rig.accept(0);
    for bytes in [0, 1023, 1025, 2048] {
        let answer = rig.read(&queue, connect_sqe(Want::admin()), bytes);
        assert_refused(&answer, Status::DATA_SGL_LENGTH_INVALID);
    }
    assert_ok(&rig.try_connect(&queue, Want::admin(), HOST));
    rig.finish();
}

#[test]
fn damaged_connect_data_fails_that_connect_only() {
    let mut rig = rig();
    let queue = rig.accept(0);
    let data = connect_data(Want::admin(), HOST);
    rig.send(&queue, connect_sqe(Want::admin()), data.len());
    rig.bring_result(&queue, 0, &data, Err(Status::COMMAND_TRANSIENT_TRANSPORT_ERROR));
    let answer = rig.answer(&queue).expect("an answer");
    assert_eq!(answer.status, Status::COMMAND_TRANSIENT_TRANSPORT_ERROR);
    assert_ok(&rig.try_connect(&queue, Want::admin(), HOST));
    rig.finish();
}

#[test]
fn an_admin_queue_has_room_for_what_linux_asks_for_however_short_io_queues_are() {
    for queue_entries in [2, 31, 32, 128_u16] {
        let mut rig = Rig::new(Setup { queue_entries, ..Setup::small(vec![pool_disk(512)]) });
        let admin_max = queue_entries.max(32);
        let queue = rig.accept(0);
        let too_long = Want { entries: admin_max + 1, ..Want::admin() };
        assert_refused(&rig.try_connect(&queue, too_long, HOST), Status::CONNECT_INVALID_PARAMETERS);
        let (admin, cntlid) = rig.admin(0, 0);
        let mqes_z = rig.run(&admin, Sqe::property_get(1, true, CAP), &[]).result & 0xffff;
        assert_eq!(mqes_z, u64::from(queue_entries) - 1, "CAP.MQES is of I/O queues");
        // A whole queue of commands, none of which has left.
        for cid in 1..32 {
            rig.send(&admin, Sqe::property_get(cid, false, CSTS), 0);
        }
        let statuses: Vec<_> = rig.answers(&admin).iter().map(|answer| answer.status).collect();
        assert_eq!(statuses, [Status::SUCCESS; 31]);
        let longest = Want { entries: queue_entries, ..Want::io(cntlid, 1) };
        let queue = rig.accept(0);
        let too_long = Want { entries: queue_entries + 1, ..longest };
        assert_refused(&rig.try_connect(&queue, too_long, HOST), Status::CONNECT_INVALID_PARAMETERS);
        let io = rig.io(0, longest);
        assert_ok(&rig.run(&io, Sqe::flush(1, 1), &[]));
        rig.finish();
    }
}

#[test]
fn a_second_connect_on_a_queue_is_out_of_sequence() {
    let mut rig = rig();
    let host = rig.host();
    for (queue, want) in [(&host.admin, Want::admin()), (&host.io, Want::io(host.cntlid, 2))] {
        let answer = rig.run(queue, connect_sqe(want), &connect_data(want, HOST));
        assert_refused(&answer, Status::COMMAND_SEQUENCE_ERROR);
        assert_eq!(queue.line.closed(), None);
    }
    assert_ok(&rig.read(&host.io, Sqe::read(1, 1, 0, 1), 512));
    rig.finish();
}

#[test]
fn a_queue_that_is_live_is_not_connected_again_and_one_that_has_ended_is() {
    let mut rig = rig();
    let host = rig.host();
    let want = Want::io(host.cntlid, 1);
    let (_, answer) = rig.connect(0, want);
    assert_eq!(answer.status.code(), Status::COMMAND_SEQUENCE_ERROR);
    assert!(!answer.status.is_dnr(), "the old connection may be on its way out");
    rig.hang_up(&host.io);
    assert_ok(&rig.connect(0, want).1);
    rig.finish();
}

#[test]
fn a_controller_that_is_not_enabled_takes_no_io_queue_and_no_admin_command() {
    let mut rig = rig();
    let (admin, answer) = rig.connect(0, Want::admin());
    let cntlid = u16::try_from(answer.result & 0xffff).unwrap();
    let (_, refused) = rig.connect(0, Want::io(cntlid, 1));
    assert_eq!(refused.status.code(), Status::COMMAND_SEQUENCE_ERROR);
    let identify = Sqe::identify(1, Cns::CONTROLLER, 0, 0);
    assert_refused(&rig.read(&admin, identify, 4096), Status::COMMAND_SEQUENCE_ERROR);
    assert_refused(&rig.run(&admin, Sqe::keep_alive(1), &[]), Status::COMMAND_SEQUENCE_ERROR);
    assert_refused(&rig.run(&admin, Sqe::async_event_request(1), &[]), Status::COMMAND_SEQUENCE_ERROR);
    assert_eq!(rig.run(&admin, Sqe::property_get(1, false, CSTS), &[]).result, 0);
    rig.set_cc(&admin, CC_ENABLED);
    assert_eq!(rig.run(&admin, Sqe::property_get(1, false, CSTS), &[]).result, 1);
    assert_ok(&rig.read(&admin, identify, 4096));
    assert_ok(&rig.connect(0, Want::io(cntlid, 1)).1);
    rig.set_cc(&admin, CC_DISABLED);
    assert_refused(&rig.read(&admin, identify, 4096), Status::COMMAND_SEQUENCE_ERROR);
    rig.finish();
}

#[test]
fn sqhd_counts_modulo_the_queue_and_is_all_ones_without_flow_control() {
    for sq_flow_off in [false, true] {
        // Disks that answer at once and disks that take the long way agree.
        for disk in [pool_disk(512), ram_disk(512)] {
            let mut rig = Rig::new(Setup::small(vec![disk]));
            let (_, cntlid) = rig.admin(0, 0);
            let want = Want { entries: 3, sq_flow_off, ..Want::io(cntlid, 1) };
            let (io, answer) = rig.connect(0, want);
            let expected = |head: u16| if sq_flow_off { 0xffff } else { head };
            assert_eq!(answer.sq_head, expected(1), "Connect takes the first entry");
            assert_eq!(io.line.entries(), 3);
            for head in [2, 0, 1, 2, 0, 1] {
                assert_eq!(rig.read(&io, Sqe::read(1, 1, 0, 1), 512).sq_head, expected(head));
            }
            assert_eq!(rig.read(&io, Sqe::read(1, 1, u64::MAX, 1), 512).sq_head, expected(2), "failures too");
            rig.finish();
        }
    }
}

#[test]
fn all_sixteen_bits_of_a_command_identifier_come_back() {
    let mut rig = rig();
    let host = rig.host();
    for cid in [0, 1, 0x7fff, 0x8000, 0xf00f, 0xffff] {
        assert_eq!(rig.read(&host.io, Sqe::read(cid, 1, 0, 1), 512).cid, cid);
        assert_eq!(rig.run(&host.io, Sqe::write(cid, 1, 0, 1, false), &[0; 512]).cid, cid);
        assert_eq!(rig.run(&host.admin, Sqe::keep_alive(cid), &[]).cid, cid);
        assert_eq!(rig.read(&host.admin, Sqe::identify(cid, Cns::CONTROLLER, 0, 0), 4096).cid, cid);
        assert_eq!(rig.run(&host.io, Sqe::new(0x6e, cid, 1), &[]).cid, cid);
    }
    rig.finish();
}

#[test]
fn more_commands_than_the_queue_has_entries_end_the_connection() {
    for disk in [pool_disk(512), ram_disk(512)] {
        let mut rig = Rig::new(Setup::small(vec![disk]));
        let (admin, cntlid) = rig.admin(0, 0);
        let io = rig.io(0, Want { entries: 4, ..Want::io(cntlid, 1) });
        for cid in 0..4 {
            rig.send(&io, Sqe::read(cid, 1, 0, 1), 512);
        }
        // Answered, but the replies have not left: the entries are still in use.
        assert_eq!(io.line.closed(), None);
        rig.send(&io, Sqe::read(4, 1, 0, 1), 512);
        assert_eq!(io.line.closed(), Some(CloseReason::HostError));
        rig.turn();
        assert!(rig.notices.iter().any(|notice| matches!(notice, Notice::HostError { .. })));
        assert_ok(&rig.run(&admin, Sqe::keep_alive(1), &[]));
        rig.finish();
    }
}

#[test]
fn disconnect_ends_an_io_queue_after_its_answer_and_is_refused_on_the_admin_queue() {
    let mut rig = rig();
    let host = rig.host();
    assert_refused(&rig.run(&host.admin, Sqe::disconnect(1), &[]), Status::INVALID_QUEUE_TYPE);
    assert_eq!(host.admin.line.closed(), None);
    // A write of which the data is missing ends with the queue.
    rig.send(&host.io, Sqe::write(2, 1, 0, 1, false), 512);
    rig.send(&host.io, Sqe::disconnect(3), 0);
    let answer = host.io.line.read().expect("an answer");
    assert_eq!((answer.cid, answer.status), (3, Status::SUCCESS));
    assert_eq!(host.io.line.closed(), Some(CloseReason::Disconnect));
    assert_ok(&rig.connect(0, Want::io(host.cntlid, 1)).1);
    rig.finish();
}

#[test]
fn other_fabrics_commands_on_an_io_queue_are_refused() {
    let mut rig = rig();
    let host = rig.host();
    for sqe in [
        Sqe::property_get(1, true, CAP),
        Sqe::property_set(1, false, nvme_spec::register::CC, 0),
        Sqe::fabrics(1, FabricsType::AUTHENTICATION_SEND),
        Sqe::fabrics(1, FabricsType::AUTHENTICATION_RECEIVE),
        Sqe::fabrics(1, FabricsType(0x42)),
    ] {
        assert_refused(&rig.run(&host.io, sqe, &[]), Status::INVALID_OPCODE);
    }
    rig.finish();
}

#[test]
fn a_connection_without_connect_is_given_up_in_the_end() {
    let mut rig = rig();
    let silent = rig.accept(0);
    let stalled = rig.accept(0);
    rig.send(&stalled, connect_sqe(Want::admin()), 1024);
    let before = Nanos(CONNECT_TIMEOUT.0 - 1_000_000_000);
    rig.pass(before);
    assert_eq!((silent.line.closed(), stalled.line.closed()), (None, None));
    rig.pass(Nanos::from_secs(2));
    let expected = Some(CloseReason::ConnectTimeout);
    assert_eq!((silent.line.closed(), stalled.line.closed()), (expected, expected));
    rig.finish();
}

#[test]
fn the_fifth_event_request_is_one_too_many() {
    let mut rig = rig();
    let host = rig.host();
    for cid in 1..=4 {
        rig.send(&host.admin, Sqe::async_event_request(cid), 0);
    }
    assert_refused(
        &rig.run(&host.admin, Sqe::async_event_request(5), &[]),
        Status::ASYNC_EVENT_LIMIT_EXCEEDED,
    );
    // Held requests do not fill the queue.
    assert_ok(&rig.run(&host.admin, Sqe::keep_alive(6), &[]));
    rig.finish();
}

#[test]
fn a_shutdown_or_reset_drops_parked_aers_without_an_answer_and_new_ones_may_follow() {
    // SPDK's initiator has forgotten them when it says CC.SHN: an answer to one fails its detach.
    const CC_SHUTDOWN: u64 = CC_ENABLED | 1 << 14;
    for cc in [CC_SHUTDOWN, CC_DISABLED] {
        for io_closes in [true, false] {
            let mut rig = rig();
            let host = rig.host();
            for cid in 1..=4 {
                rig.send(&host.admin, Sqe::async_event_request(cid), 0);
            }
            if io_closes {
                rig.hang_up(&host.io);
            }
            rig.send(&host.admin, Sqe::property_set(7, false, nvme_spec::register::CC, cc), 0);
            rig.turn();
            let answers: Vec<_> =
                rig.answers(&host.admin).iter().map(|answer| (answer.cid, answer.status)).collect();
            assert_eq!(answers, [(7, Status::SUCCESS)], "and nothing else");
            assert_eq!((host.admin.line.forgotten(), rig.states(&host.admin)), (4, vec![]));
            let csts =
                rig.run(&host.admin, Sqe::property_get(8, false, nvme_spec::register::CSTS), &[]).result;
            assert_eq!(csts & 0b1101, if cc == CC_SHUTDOWN { 0b1001 } else { 0 }, "CSTS {csts:#b}");
            // The same identifiers serve again on the controller that is enabled anew.
            rig.set_cc(&host.admin, CC_DISABLED);
            rig.set_cc(&host.admin, CC_ENABLED);
            for cid in 1..=4 {
                rig.send(&host.admin, Sqe::async_event_request(cid), 0);
            }
            assert_eq!(rig.states(&host.admin), [(RequestState::Parked, 4)]);
            assert_eq!(rig.answers(&host.admin), []);
            rig.finish();
        }
    }
}

#[test]
fn silence_beyond_the_keep_alive_time_ends_all_queues_on_all_cores() {
    for cores in [1, 2] {
        let mut rig = Rig::new(Setup { cores, ..Setup::small(vec![pool_disk(512)]) });
        let (admin, cntlid) = rig.admin(0, 5000);
        let io = rig.io(cores - 1, Want::io(cntlid, 1));
        // Any command of any queue is a sign of life.
        for second in 0..30 {
            let queue = if second % 2 == 0 { &admin } else { &io };
            let sqe = if second % 2 == 0 { Sqe::keep_alive(1) } else { Sqe::flush(1, 1) };
            assert_ok(&rig.run(queue, sqe, &[]));
            rig.pass(Nanos::from_secs(1));
        }
        rig.pass(Nanos::from_secs(11));
        assert_eq!(admin.line.closed(), Some(CloseReason::KeepAliveExpired));
        assert_eq!(io.line.closed(), Some(CloseReason::KeepAliveExpired));
        assert!(rig.notices.iter().any(|notice| matches!(notice, Notice::KeepAliveExpired { .. })));
        assert_eq!(rig.registry.all().len(), 0);
        rig.finish();
    }
}

#[test]
fn set_features_with_the_wrong_length_of_data_is_refused_before_any_data_moves() {
    let mut rig = rig();
    let host = rig.host();
    let sqe = Sqe::set_features(1, FeatureId::TIMESTAMP, 0, 0);
    for pointer in [DataPointer::None, DataPointer::Host { bytes: 7 }, DataPointer::InCapsule { bytes: 4096 }]
    {
        rig.send_pointer(&host.admin, sqe, Ok(pointer));
        let answer = rig.answer(&host.admin).expect("an answer at once");
        assert!(answer.status.is_dnr() && !answer.status.is_success(), "{pointer:?}: {answer:?}");
        assert!(host.admin.line.fetching().is_empty());
    }
    host.admin.line.push(Event::Command { sqe: Sqe::keep_alive(2), data: Ok(DataPointer::None) });
    rig.step(&host.admin);
    assert_ok(&rig.answer(&host.admin).expect("an answer"));
    rig.finish();
}
