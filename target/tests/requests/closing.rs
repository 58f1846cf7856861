//! The end of a connection in each state of its requests, by each way in which it ends.

use std::sync::Arc;

use nvme_spec::Nqn;
use nvme_spec::cluster::{JoinData, NEXT_BYTES};
use nvme_spec::register::CC;
use nvme_spec::sqe::Fuse;
use nvme_spec::zerocopy::IntoBytes;
use nvme_spec::{Sqe, Status};
use spindle_nvme_transport::{CloseReason, Connections, Event};
use spindle_reactor::clock::Nanos;
use spindle_target::qpair::request::RequestState;
use spindle_target::snapshot::AllowedHosts;
use spindle_target_card::Cluster;
use spindle_target_disk::fault::{Fault, FaultControl, FaultDisk};
use spindle_target_disk::{ClusterDisk, Disk};
use spindle_tests::script::{
    CC_DISABLED, Fetch, HOST, Host, Queue, Rig, Setup, Want, connect_data, connect_sqe,
};

use crate::{assert_ok, pool_disk};

/// The states in which a request can be between two calls. `New` is left within one.
const STATES: [RequestState; 11] = [
    RequestState::NeedBuffer,
    RequestState::Fetching,
    RequestState::Executing,
    RequestState::NeedStepBuffer,
    RequestState::Bulk,
    RequestState::Fused,
    RequestState::Parked,
    RequestState::Aborting,
    RequestState::ConnectBlocked,
    RequestState::Next,
    RequestState::Replying,
];

#[test]
fn every_state_is_looked_at() {
    let mut all = STATES.to_vec();
    all.push(RequestState::New);
    for state in RequestState::ALL {
        assert!(all.contains(&state), "{state:?} is new: bring a queue into it here");
    }
}

/// How a queue ends.
#[derive(Debug, Clone, Copy)]
enum End {
    HungUp,
    Overrun,
    AdminHungUp,
    Reset,
    HostRemoved,
    SilentHost,
}

const ENDS: [End; 6] =
    [End::HungUp, End::Overrun, End::AdminHungUp, End::Reset, End::HostRemoved, End::SilentHost];

struct Fixture {
    rig: Rig,
    host: Host,
    control: Arc<FaultControl>,
}

fn fixture(cores: usize, buffers: u32) -> Fixture {
    let (disk, control) = FaultDisk::new(pool_disk(512), 1);
    fixture_on(disk, control, cores, buffers)
}

/// As [`fixture`], on a disk whose members have caches.
fn clustered_fixture(cores: usize, buffers: u32) -> Fixture {
    let (disk, control) = FaultDisk::new(pool_disk(512), 1);
    let agents = vec![Nqn::new(HOST).expect("an NQN")];
    let cluster = Cluster::new(disk.geometry().bytes(), agents, Nanos::ZERO);
    fixture_on(ClusterDisk::new(disk, cluster), control, cores, buffers)
}

fn fixture_on(disk: Arc<dyn Disk>, control: Arc<FaultControl>, cores: usize, buffers: u32) -> Fixture {
    let zones = vec![(4096, buffers)];
    let mut rig = Rig::new(Setup { cores, zones, bulk_unit: 4096, ..Setup::small(vec![disk]) });
    let (admin, cntlid) = rig.admin(0, 5000);
    let io = rig.io(cores - 1, Want::io(cntlid, 1));
    Fixture { rig, host: Host { admin, io, cntlid }, control }
}

/// Bring a request of the host into this state, with as much memory as goes with it; which queue it is on.
fn enter(fixture: &mut Fixture, state: RequestState) -> Queue {
    let Fixture { rig, host, control } = fixture;
    let io = host.io.clone();
    match state {
        RequestState::New => panic!("left within a call"),
        RequestState::NeedBuffer => {
            for cid in 1..=3 {
                rig.send(&io, Sqe::write(cid, 1, 0, 1, false), 512);
            }
        }
        RequestState::Fetching => rig.send(&io, Sqe::write(1, 1, 0, 1, false), 512),
        RequestState::Executing => {
            control.set_all(Fault::Drop, 1_000_000);
            rig.send(&io, Sqe::read(1, 1, 0, 1), 512);
            rig.send(&io, Sqe::verify(2, 1, 0, 8), 0);
        }
        RequestState::NeedStepBuffer => rig.send(&io, Sqe::verify(1, 1, 0, 2048), 0),
        // Three pieces, of which two are on the wire.
        RequestState::Bulk => rig.send(&io, Sqe::read(1, 1, 0, 24), 24 * 512),
        RequestState::Fused => {
            rig.send(&io, Sqe::compare(1, 1, 0, 1).with_fuse(Fuse::FIRST), 512);
            rig.bring(&io, 1, &[0; 512]);
        }
        RequestState::Parked => rig.send(&host.admin, Sqe::async_event_request(1), 0),
        RequestState::Aborting => {
            rig.is_mail_held = true;
            rig.send(&host.admin, Sqe::abort(1, 1, 99), 0);
        }
        RequestState::ConnectBlocked => {
            control.set_all(Fault::Drop, 1_000_000);
            rig.send(&io, Sqe::read(1, 1, 0, 1), 512);
            rig.hang_up(&io);
            let queue = rig.accept(0);
            rig.send(&queue, connect_sqe(Want::admin()), 1024);
            rig.bring(&queue, 0, &connect_data(Want::admin(), HOST));
            assert_eq!(rig.states(&queue), [(RequestState::ConnectBlocked, 1)]);
            return queue;
        }
        RequestState::Next => {
            rig.run(&host.admin, Sqe::join(1, 1), JoinData::new(1, 0).as_bytes());
            rig.send(&host.admin, Sqe::next_notices(2, 0), NEXT_BYTES);
        }
        RequestState::Replying => rig.send(&io, Sqe::read(1, 1, 0, 1), 512),
    }
    let is_admin = matches!(state, RequestState::Parked | RequestState::Aborting | RequestState::Next);
    let queue = if is_admin { host.admin.clone() } else { io };
    assert!(rig.states(&queue).iter().any(|(now, _)| *now == state), "{state:?}: {:?}", rig.states(&queue));
    queue
}

fn end(fixture: &mut Fixture, queue: &Queue, by: End) {
    let Fixture { rig, host, .. } = fixture;
    match by {
        End::HungUp => rig.hang_up(queue),
        End::Overrun => {
            for cid in 100..200 {
                rig.send(queue, Sqe::new(0x6e, cid, 1), 0);
            }
            assert_eq!(queue.line.closed(), Some(CloseReason::HostError));
        }
        End::AdminHungUp => rig.hang_up(&host.admin),
        End::Reset => rig.send(&host.admin, Sqe::property_set(0x600, false, CC, CC_DISABLED), 0),
        End::HostRemoved => {
            rig.setup.hosts = AllowedHosts::Only(Vec::new());
            rig.publish();
        }
        End::SilentHost => rig.pass(spindle_reactor::clock::Nanos::from_secs(11)),
    }
    rig.is_mail_held = false;
    rig.turn();
}

#[test]
fn a_queue_may_end_in_every_state_by_every_way_and_leaves_nothing_behind() {
    for state in STATES {
        for by in ENDS {
            for cores in [1, 2] {
                if state == RequestState::Aborting && cores == 1 {
                    continue; // with one core an Abort is answered within the call
                }
                let make = if state == RequestState::Next { clustered_fixture } else { fixture };
                let mut fixture = make(cores, 2);
                let queue = enter(&mut fixture, state);
                end(&mut fixture, &queue, by);
                let Fixture { mut rig, host, control } = fixture;
                let is_over =
                    rig.cores[host.io.core].qpair(host.io.id).is_none() || host.io.line.closed().is_some();
                let is_admin_only = matches!(
                    (state, by),
                    (
                        RequestState::Parked | RequestState::Aborting | RequestState::Next,
                        End::HungUp | End::Overrun
                    )
                );
                assert!(is_over || is_admin_only, "{state:?} {by:?}");
                // The disk answers now, or after the transport is gone.
                for is_gone_first in [false, true] {
                    if is_gone_first && rig.cores[queue.core].qpair(queue.id).is_some() {
                        rig.hang_up(&queue);
                    }
                    control.release_dropped();
                    rig.turn();
                    rig.turn();
                }
                rig.finish();
            }
        }
    }
}

#[test]
fn completions_of_a_queue_that_has_ended_touch_no_queue_in_its_place() {
    let mut fixture = fixture(1, 6);
    let old = enter(&mut fixture, RequestState::Executing);
    let Fixture { mut rig, host, control } = fixture;
    rig.hang_up(&old);
    // Not of the same number: that one's is taken as long as the disk has something of it.
    let new = rig.io(0, Want::io(host.cntlid, 2));
    assert_eq!(new.id.index(), old.id.index(), "it is in the same place");
    // Commands in the same places, with the same identifiers.
    rig.send(&new, Sqe::read(1, 1, 0, 1), 512);
    rig.send(&new, Sqe::read(2, 1, 0, 1), 512);
    assert_eq!(rig.states(&new), [(RequestState::Executing, 2)]);
    control.release_dropped();
    rig.turn();
    rig.turn();
    let mut answers = rig.answers(&new);
    answers.sort_by_key(|answer| answer.cid);
    assert_eq!(
        answers.iter().map(|answer| (answer.cid, answer.data.len())).collect::<Vec<_>>(),
        [(1, 512), (2, 512)]
    );
    assert_eq!(rig.states(&new), []);
    rig.finish();
}

#[test]
fn data_that_arrives_after_the_queue_was_closed_is_written_nowhere() {
    let mut rig = Rig::new(Setup::small(vec![pool_disk(512)]));
    let host = rig.host();
    rig.send(&host.io, Sqe::write(1, 1, 0, 1, false), 512);
    // The transport has all of it, but has not said so yet.
    let Fetch { slot, mut buf, .. } = host.io.line.take_fetch(1).expect("asked for");
    buf.copy_in(0, &[1; 512]);
    rig.set_cc(&host.admin, CC_DISABLED);
    rig.turn();
    assert_eq!(host.io.line.closed(), Some(CloseReason::ControllerGone));
    host.io.line.push(Event::Fetched { slot, buf, result: Ok(()) });
    rig.step(&host.io);
    let (_, cntlid) = rig.admin(0, 0);
    let io = rig.io(0, Want::io(cntlid, 1));
    assert_eq!(rig.read(&io, Sqe::read(1, 1, 0, 1), 512).data, [0; 512]);
    rig.finish();
}

#[test]
fn a_reset_closes_the_io_queues_of_all_cores_and_of_that_controller_only() {
    let mut rig = Rig::new(Setup { cores: 2, ..Setup::small(vec![pool_disk(512)]) });
    let (admin, cntlid) = rig.admin(0, 0);
    let queues: Vec<Queue> = (1..=4).map(|qid| rig.io(usize::from(qid % 2), Want::io(cntlid, qid))).collect();
    let (other, other_cntlid) = rig.admin(1, 0);
    let spared: Vec<Queue> =
        (1..=2).map(|qid| rig.io(usize::from(qid % 2), Want::io(other_cntlid, qid))).collect();
    rig.is_mail_held = true;
    rig.set_cc(&admin, CC_DISABLED);
    // Before the message is there, the queue refuses by itself.
    let far = queues.iter().find(|queue| queue.core == 1).expect("one");
    let answer = rig.read(far, Sqe::read(1, 1, 0, 1), 512);
    assert_eq!(answer.status.code(), Status::COMMAND_SEQUENCE_ERROR);
    rig.is_mail_held = false;
    rig.turn();
    for queue in &queues {
        assert_eq!(queue.line.closed(), Some(CloseReason::ControllerGone));
    }
    assert_eq!(admin.line.closed(), None);
    for queue in &spared {
        assert_ok(&rig.read(queue, Sqe::read(1, 1, 0, 1), 512));
    }
    // The same controller, enabled again, takes the same queues.
    rig.set_cc(&admin, spindle_tests::script::CC_ENABLED);
    let io = rig.io(1, Want::io(cntlid, 1));
    assert_ok(&rig.read(&io, Sqe::read(1, 1, 0, 1), 512));
    drop(other);
    rig.finish();
}

#[test]
fn an_io_queue_that_ends_leaves_its_controller_and_the_other_queues_alone() {
    let mut rig = Rig::new(Setup { cores: 2, ..Setup::small(vec![pool_disk(512)]) });
    let host = rig.host();
    let second = rig.io(0, Want::io(host.cntlid, 2));
    rig.hang_up(&host.io);
    rig.turn();
    assert_ok(&rig.run(&host.admin, Sqe::keep_alive(1), &[]));
    assert_ok(&rig.read(&second, Sqe::read(1, 1, 0, 1), 512));
    rig.finish();
}

#[test]
fn an_io_queue_does_not_outlive_its_controller() {
    let mut rig = Rig::new(Setup { cores: 2, ..Setup::small(vec![pool_disk(512)]) });
    let host = rig.host();
    rig.is_mail_held = true;
    rig.hang_up(&host.admin);
    rig.turn();
    assert_eq!(host.io.line.closed(), None, "its core has not heard of it yet");
    // Not answered, least of all with DNR: the host repeats it elsewhere.
    rig.send(&host.io, Sqe::read(1, 1, 0, 1), 512);
    assert_eq!(rig.answer(&host.io), None);
    assert_eq!(host.io.line.closed(), Some(CloseReason::ControllerGone));
    let (_, answer) = rig.connect(1, Want::io(host.cntlid, 2));
    assert!(!answer.status.is_success(), "nor is a queue added");
    rig.is_mail_held = false;
    rig.turn();
    assert_eq!(host.io.line.closed(), Some(CloseReason::ControllerGone));
    rig.finish();
}

#[test]
fn a_connection_is_refused_when_the_core_is_full_and_taken_when_one_has_ended() {
    let mut rig = Rig::new(Setup { connections: 2, ..Setup::small(vec![pool_disk(512)]) });
    let first = rig.accept(0);
    let peer = *rig.cores[0].peer(first.id).expect("it is there");
    rig.accept(0);
    assert!(rig.cores[0].accept(spindle_tests::script::Line::default(), peer).is_err());
    rig.hang_up(&first);
    rig.accept(0);
    rig.finish();
}

#[test]
fn many_connects_and_ends_leave_no_controller_and_no_buffer() {
    let mut rig = Rig::new(Setup { cores: 2, ..Setup::small(vec![pool_disk(512)]) });
    for round in 0..300 {
        let host = rig.host();
        rig.send(&host.io, Sqe::write(1, 1, 0, 1, false), 512);
        match round % 3 {
            0 => {
                rig.hang_up(&host.io);
                rig.hang_up(&host.admin);
            }
            1 => {
                rig.hang_up(&host.admin);
                rig.hang_up(&host.io);
            }
            _ => {
                rig.hang_up(&host.admin);
                rig.turn();
                assert_eq!(host.io.line.closed(), Some(CloseReason::ControllerGone));
                rig.hang_up(&host.io);
            }
        }
        rig.turn();
        assert_eq!(rig.registry.all().len(), 0);
    }
    rig.finish();
}

/// How much stack the target takes for this end of hosts that have so many I/O queues with commands each.
fn stack_of_end(hosts: usize, queues: u16, commands: u16, by: End) -> usize {
    let (disk, control) = FaultDisk::new(pool_disk(512), 1);
    let zones = vec![(4096, 64)];
    let mut rig = Rig::new(Setup { zones, connections: 128, ..Setup::small(vec![disk]) });
    let mut all = Vec::new();
    let mut host = None;
    for _ in 0..hosts {
        let (admin, cntlid) = rig.admin(0, 5000);
        let ios: Vec<Queue> = (1..=queues).map(|qid| rig.io(0, Want::io(cntlid, qid))).collect();
        all.extend(ios.iter().cloned());
        host.get_or_insert(Host { admin, io: ios[0].clone(), cntlid });
    }
    // Some of them are at the disk, the others wait for memory.
    control.set_all(Fault::Drop, 1_000_000);
    for io in &all {
        (1..=commands).for_each(|cid| rig.send(io, Sqe::read(cid, 1, 0, 1), 512));
        let _ = io.line.take_stack_low();
    }
    let host = host.expect("one at least");
    let mut fixture = Fixture { rig, host: Host { io: all[0].clone(), ..host }, control };
    let above = spindle_tests::script::stack_address();
    end(&mut fixture, &all[0], by);
    let Fixture { mut rig, control, .. } = fixture;
    control.set_all(Fault::Drop, 0);
    control.release_dropped();
    rig.turn();
    let lows = all.iter().filter_map(|io| io.line.take_stack_low());
    let low = lows.min().expect("the target has looked at its queues");
    let ended = all.iter().filter(|io| io.line.closed().is_some()).count();
    assert!(ended >= usize::from(queues), "{by:?} ended {ended} queues");
    rig.finish();
    above - low
}

#[test]
fn an_end_of_many_queues_takes_no_more_stack_than_that_of_one() {
    for by in [End::AdminHungUp, End::Reset, End::HostRemoved, End::SilentHost] {
        let (one, many) = (stack_of_end(1, 1, 1, by), stack_of_end(6, 16, 15, by));
        // 96 queues, each with a call of its own within that of the one before, would need far more.
        assert!(many < one + 1024, "{by:?}: {one} bytes for one queue, {many} for many");
    }
}
