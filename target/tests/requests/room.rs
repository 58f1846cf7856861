//! Room for newcomers on a core that is full: places of connections that have not sent Connect.

use spindle_nvme_transport::ConnectionId;
use std::net::IpAddr;
use std::sync::Arc;

use nvme_spec::fabrics::ConnectData;
use nvme_spec::zerocopy::IntoBytes;
use nvme_spec::{Nqn, Sqe, Status};
use spindle_nvme_transport::Connections;
use spindle_nvme_transport::admission::Admission;
use spindle_reactor::clock::Nanos;
use spindle_target::core::TargetCore;
use spindle_target::env::Message;
use spindle_target::notice::Notice;
use spindle_target::qpair::request::RequestState;
use spindle_target::snapshot::AllowedHosts;
use spindle_target_disk::fault::{Fault, FaultControl, FaultDisk, OpKind};
use spindle_tests::script::{HOST, Line, Queue, Rig, Setup, Want, connect_data, connect_sqe};

use crate::{assert_ok, pool_disk};

fn rig(connections: usize) -> Rig {
    Rig::new(Setup { connections, ..Setup::small(vec![pool_disk(512)]) })
}

/// As over TCP: it is gone at once.
fn end_at_once(core: &mut TargetCore<Line>, id: ConnectionId) {
    core.transport(id).expect("it is there").hang_up();
    core.step_deferred(id);
}

fn none_ends(_: &mut TargetCore<Line>, id: ConnectionId) {
    panic!("{id:?} need not end");
}

#[test]
fn a_newcomer_takes_the_place_of_the_oldest_connection_without_connect() {
    let mut rig = rig(4);
    let mut without = vec![rig.accept(0)];
    let (connected, _) = rig.admin(0, 0);
    assert!(rig.cores[0].make_room(1, none_ends), "there is room");
    without.extend([rig.accept(0), rig.accept(0)]);
    for oldest in &without {
        assert!(rig.cores[0].refusal().is_some(), "full");
        assert!(rig.cores[0].make_room(1, end_at_once));
        assert!(rig.cores[0].qpair(oldest.id).is_none());
        assert_eq!(rig.cores[0].usage().connections, 3, "and no other");
        let said: Vec<_> = std::iter::from_fn(|| rig.cores[0].notices().pop()).collect();
        assert!(matches!(said.last(), Some(Notice::ConnectionRefused { .. })), "{said:?}");
        let newcomer = rig.accept(0);
        rig.try_connect(&newcomer, Want::admin(), HOST);
    }
    // All have sent Connect: the next one is refused.
    assert!(rig.cores[0].make_room(1, none_ends));
    assert!(rig.cores[0].refusal().is_some() && rig.cores[0].qpair(connected.id).is_some());
    rig.finish();
}

#[test]
fn newcomers_wait_for_places_that_take_their_time_to_be_free() {
    let mut rig = rig(3);
    let without = [rig.accept(0), rig.accept(0), rig.accept(0)];
    // As over RDMA: it begins to end.
    let mut ending = Vec::new();
    for turn in 1..5 {
        assert!(!rig.cores[0].make_room(2, |_, id| ending.push(id)), "no place yet");
        assert_eq!(ending.len(), turn.min(2), "one in each turn, and as many as newcomers wait");
    }
    assert_eq!(ending, [without[0].id, without[1].id]);
    for (left, next) in without.iter().zip([2, 1]) {
        assert!(!rig.cores[0].make_room(next, none_ends));
        rig.hang_up(left);
        assert!(rig.cores[0].make_room(next, none_ends));
        rig.accept(0);
    }
    assert!(rig.cores[0].make_room(1, end_at_once));
    assert!(rig.cores[0].qpair(without[2].id).is_none());
    rig.finish();
}

#[test]
fn one_that_is_connected_before_it_could_be_ended_is_not_waited_for() {
    let mut rig = rig(2);
    let (first, second) = (rig.accept(0), rig.accept(0));
    // The other transport is to end it, and has not had its turn yet.
    assert!(!rig.cores[0].make_room(1, |_, id| assert_eq!(id, first.id)));
    assert!(rig.try_connect(&first, Want::admin(), HOST).status.is_success());
    assert!(rig.cores[0].make_room(1, end_at_once));
    assert!(rig.cores[0].qpair(second.id).is_none() && rig.cores[0].qpair(first.id).is_some());
    rig.finish();
}

/// A rig whose oldest connection has a Connect that waits for a write of its host's former association.
fn with_waiting_connect(connections: usize) -> (Rig, Queue, Arc<FaultControl>) {
    let (disk, control) = FaultDisk::new(pool_disk(512), 1);
    let mut rig = Rig::new(Setup { connections, ..Setup::small(vec![disk]) });
    let host = rig.host();
    control.set(Fault::Drop, OpKind::Write, 1_000_000);
    rig.send(&host.io, Sqe::write(1, 1, 0, 1, false), 512);
    rig.bring(&host.io, 1, &[1; 512]);
    rig.hang_up(&host.io);
    rig.hang_up(&host.admin);
    let waiting = rig.accept(0);
    begin_connect(&mut rig, &waiting);
    (rig, waiting, control)
}

fn begin_connect(rig: &mut Rig, queue: &Queue) {
    rig.send(queue, connect_sqe(Want::admin()), 1024);
    rig.bring(queue, 0, &connect_data(Want::admin(), HOST));
    assert_eq!(rig.states(queue), [(RequestState::ConnectBlocked, 1)]);
}

#[test]
fn a_connection_whose_connect_waits_for_leftovers_is_not_ended_for_a_newcomer() {
    let (mut rig, waiting, control) = with_waiting_connect(3);
    let silent = [rig.accept(0), rig.accept(0)];
    for oldest in &silent {
        assert!(rig.cores[0].make_room(1, end_at_once));
        assert!(rig.cores[0].qpair(oldest.id).is_none(), "the silent one ends, although it is younger");
        let newcomer = rig.accept(0);
        rig.try_connect(&newcomer, Want::admin(), "nqn.2026-01.io.spindle:other");
    }
    // All others are connected: the next one is refused, and who waits is let through.
    assert!(rig.cores[0].make_room(1, none_ends));
    assert!(rig.cores[0].refusal().is_some());
    control.release_dropped();
    rig.pass(Nanos::from_ms(400));
    assert_ok(&rig.answer(&waiting).expect("nothing is at the disk any more"));
    rig.finish();
}

#[test]
fn one_whose_connect_waits_before_it_could_be_ended_is_not_waited_for() {
    let (mut rig, _waiting, control) = with_waiting_connect(3);
    let (second, third) = (rig.accept(0), rig.accept(0));
    // The other transport is to end it, and has not had its turn yet.
    assert!(!rig.cores[0].make_room(1, |_, id| assert_eq!(id, second.id)));
    begin_connect(&mut rig, &second);
    assert!(!rig.cores[0].qpair(second.id).expect("it stays").may_be_evicted());
    assert!(rig.cores[0].make_room(1, end_at_once));
    assert!(rig.cores[0].qpair(third.id).is_none() && rig.cores[0].qpair(second.id).is_some());
    control.release_dropped();
    rig.finish();
}

#[test]
fn a_connect_that_waits_and_is_then_refused_may_be_ended_for_a_newcomer() {
    let (mut rig, waiting, control) = with_waiting_connect(2);
    let admin = rig.accept(0);
    assert_ok(&rig.try_connect(&admin, Want::admin(), "nqn.2026-01.io.spindle:other"));
    rig.setup.hosts =
        AllowedHosts::Only(vec![Nqn::new("nqn.2026-01.io.spindle:other").expect("well formed")]);
    rig.publish();
    control.release_dropped();
    rig.pass(Nanos::from_ms(400));
    assert!(!rig.answer(&waiting).expect("refused").status.is_success());
    assert!(rig.cores[0].make_room(1, end_at_once));
    assert!(rig.cores[0].qpair(waiting.id).is_none() && rig.cores[0].qpair(admin.id).is_some());
    rig.finish();
}

#[test]
fn none_ends_for_a_newcomer_while_the_target_shuts_down() {
    let mut rig = rig(1);
    rig.accept(0);
    rig.cores[0].on_message(Message::Shutdown);
    assert!(rig.cores[0].make_room(1, none_ends));
    rig.finish();
}

#[test]
fn many_that_come_and_go_do_not_hide_the_oldest() {
    let mut rig = rig(3);
    let oldest = rig.accept(0);
    for _ in 0..100 {
        let (queue, _) = rig.admin(0, 0);
        rig.hang_up(&queue);
    }
    rig.accept(0);
    rig.accept(0);
    assert!(rig.cores[0].make_room(1, end_at_once));
    assert!(rig.cores[0].qpair(oldest.id).is_none());
    rig.finish();
}

#[test]
fn a_connection_is_counted_until_its_queue_is_connected_or_it_is_gone() {
    let mut rig = rig(8);
    let admission = Admission::new(1);
    let address: IpAddr = "192.0.2.1".parse().expect("an address");
    let admitted = |rig: &mut Rig| {
        let queue = rig.accept(0);
        rig.cores[0].set_admitted(queue.id, admission.admit(address).expect("a place"));
        assert!(admission.admit(address).is_none());
        queue
    };
    let admin = admitted(&mut rig);
    let answer = rig.try_connect(&admin, Want::admin(), HOST);
    assert!(answer.status.is_success());
    let cntlid = u16::try_from(answer.result & 0xffff).expect("16 bits");
    rig.set_cc(&admin, spindle_tests::script::CC_ENABLED);
    let io = admitted(&mut rig);
    assert!(rig.try_connect(&io, Want::io(cntlid, 1), HOST).status.is_success());
    let refused = admitted(&mut rig);
    assert!(!rig.try_connect(&refused, Want::io(cntlid + 1, 1), HOST).status.is_success());
    assert!(admission.admit(address).is_none(), "it has shown nothing");
    rig.hang_up(&refused);
    let silent = admitted(&mut rig);
    rig.hang_up(&silent);
    assert!(admission.admit(address).is_some());
    rig.finish();
}

#[test]
fn discovery_controllers_give_way_to_others_and_have_a_limit_by_address() {
    let mut rig = rig(4);
    let admission = Admission::new(3);
    let address: IpAddr = "192.0.2.1".parse().expect("an address");
    let discovery = |rig: &mut Rig, kato_ms| {
        let queue = rig.accept(0);
        rig.cores[0].set_admitted(queue.id, admission.admit(address).expect("a place"));
        let want = Want { kato_ms, ..Want::admin() };
        let host = Nqn::new(HOST).expect("well formed");
        let data = ConnectData::new([7; 16], want.cntlid, &Nqn::discovery(), &host);
        let answer = rig.run(&queue, connect_sqe(want), data.as_bytes());
        (queue, answer.status)
    };
    let (hour, status) = discovery(&mut rig, 3_600_000);
    assert_eq!(status, Status::CONNECT_INVALID_PARAMETERS.dnr());
    rig.hang_up(&hour);
    let controllers = [(); 3].map(|()| discovery(&mut rig, 30_000));
    assert!(controllers.iter().all(|(_, status)| status.is_success()));
    assert!(rig.registry.hosts().is_empty());
    let (more, status) = discovery(&mut rig, 0);
    assert_eq!(status, Status::CONNECT_CONTROLLER_BUSY);
    rig.hang_up(&more);
    // The others of the address do not count.
    let io: Vec<Queue> = (0..3)
        .map(|_| {
            assert!(rig.cores[0].make_room(1, end_at_once));
            let queue = rig.accept(0);
            rig.cores[0].set_admitted(queue.id, admission.admit(address).expect("a place"));
            assert!(rig.try_connect(&queue, Want::admin(), HOST).status.is_success());
            queue
        })
        .collect();
    assert!(io.iter().all(|queue| rig.cores[0].qpair(queue.id).is_some()));
    let left = controllers.map(|(queue, _)| rig.cores[0].qpair(queue.id).is_some());
    assert_eq!(left, [false, false, true], "the oldest went");
    rig.turn();
    assert!(rig.notices.iter().any(|notice| notice.to_string().contains("is of a discovery controller")));
    rig.finish();
}
