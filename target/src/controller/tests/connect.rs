//! Connect: who gets a queue, and with which words the others are sent away.

use nvme_spec::fabrics::{ConnectAttributes, ConnectData, ConnectInvalid};
use nvme_spec::nqn::DISCOVERY_NQN;
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;
use nvme_spec::zerocopy::little_endian::{U16, U32};

use super::*;
use crate::controller::Kind;
use crate::controller::connect::{ConnectRefusal, Connected, Reason};

/// A Connect to be spoilt.
struct Attempt {
    sqe: Sqe,
    data: ConnectData,
}

impl Attempt {
    fn admin() -> Attempt {
        Attempt::of(SUBSYSTEM, HOST, 0, 0xffff)
    }

    fn io(cntlid: u16, qid: u16) -> Attempt {
        Attempt::of(SUBSYSTEM, HOST, qid, cntlid)
    }

    fn of(name: &str, host: &str, qid: u16, cntlid: u16) -> Attempt {
        Attempt {
            sqe: Sqe::connect(1, qid, 31, KATO_MS, ConnectAttributes::new()),
            data: ConnectData::new(HOST_ID, cntlid, &nqn(name), &nqn(host)),
        }
    }

    fn make(&self, world: &World) -> Result<(Connected, u32), ConnectRefusal> {
        connect_command(&world.cx(), &self.sqe, &self.data, &LIMITS)
    }

    #[track_caller]
    fn refused(&self, world: &World) -> ConnectRefusal {
        match self.make(world) {
            Ok((connected, _)) => panic!("{connected:?}"),
            Err(refusal) => refusal,
        }
    }

    #[track_caller]
    fn invalid(&self, world: &World, field: ConnectInvalid) -> ConnectRefusal {
        let refusal = self.refused(world);
        assert_eq!(refusal.status.code(), Status::CONNECT_INVALID_PARAMETERS, "{refusal}");
        assert_eq!(ConnectInvalid::from(refusal.result), field, "{refusal}");
        refusal
    }
}

#[test]
fn an_admin_connect_makes_a_controller_that_is_not_ready() {
    let world = World::new();
    let controller = world.connect(SUBSYSTEM, KATO_MS);
    assert!(!controller.shared.is_ready() && controller.kind == Kind::Io);
    assert_eq!(controller.shared.admin_core, 1);
    assert_eq!(controller.keep_alive.timeout_ms, 5000);
    assert!((1..=4).contains(&controller.shared.cntlid));
}

#[test]
fn sq_flow_control_is_off_when_the_host_says_so() {
    let world = World::new();
    let mut attempt = Attempt::admin();
    attempt.sqe = Sqe::connect(1, 0, 31, 0, ConnectAttributes::from_bits(0b0000_0100));
    let (connected, _) = attempt.make(&world).unwrap();
    assert!(connected.is_sq_flow_off);
}

#[test]
fn a_record_format_other_than_zero_is_an_incompatible_format() {
    let mut attempt = Attempt::admin();
    attempt.sqe.cdw10 = U32::new(1);
    let refusal = attempt.refused(&World::new());
    assert_eq!(refusal.status, Status::CONNECT_INCOMPATIBLE_FORMAT.dnr());
    assert_eq!(refusal.to_string(), "recfmt = 1: 0 is allowed");
}

#[test]
fn a_queue_has_at_least_two_entries_and_at_most_mqes() {
    let world = World::new();
    for (sqsize_z, is_allowed) in [(0, false), (1, true), (63, true), (64, false), (0xffff, false)] {
        let mut attempt = Attempt::admin();
        attempt.sqe = Sqe::connect(1, 0, sqsize_z, 0, ConnectAttributes::new());
        if is_allowed {
            let (connected, _) = attempt.make(&world).unwrap();
            assert_eq!(connected.entries, sqsize_z + 1);
        } else {
            let refusal = attempt.invalid(&world, ConnectInvalid::SQSIZE);
            assert_eq!(refusal.to_string(), format!("sqsize = {sqsize_z}: 1 to 63 are allowed"));
        }
    }
}

#[test]
fn names_must_be_names() {
    let world = World::new();
    let mut attempt = Attempt::admin();
    attempt.data.subnqn = [b'a'; 256];
    assert!(attempt.invalid(&world, ConnectInvalid::SUBNQN).status.is_dnr());
    let mut attempt = Attempt::admin();
    attempt.data.hostnqn = [b'a'; 256];
    attempt.invalid(&world, ConnectInvalid::HOSTNQN);
    // One that is not configured is refused, whatever it begins with.
    let mut attempt = Attempt::admin();
    attempt.data.subnqn = nqn("blktests-subsystem-1").to_field();
    assert!(!attempt.invalid(&world, ConnectInvalid::SUBNQN).status.is_dnr(), "it may come");
}

#[test]
fn a_host_without_a_name_is_any_host_and_on_no_list() {
    let mut world = World::new();
    let unnamed = |qid, cntlid| {
        let mut attempt = Attempt::of(SUBSYSTEM, HOST, qid, cntlid);
        attempt.data.hostnqn = [0; 256];
        attempt
    };
    world.subsystem().hosts = AllowedHosts::Any;
    let (connected, _) = unnamed(0, 0xffff).make(&world).unwrap();
    let ConnectedQueue::Admin(mut controller) = connected.queue else { panic!("an I/O queue") };
    assert!(controller.shared.host_nqn.is_unnamed());
    controller.shared.set_ready(true);
    let cntlid = controller.shared.cntlid;
    assert!(unnamed(1, cntlid).make(&world).is_ok());
    // A host with a name is another one.
    Attempt::io(cntlid, 2).invalid(&world, ConnectInvalid::HOSTNQN);
    world.subsystem().hosts = AllowedHosts::Only(vec![nqn(HOST)]);
    assert_eq!(unnamed(0, 0xffff).refused(&world).status, Status::CONNECT_INVALID_HOST.dnr());
    controller.remove(&world.registry);
}

#[test]
fn what_a_host_without_a_name_left_keeps_only_the_same_host_waiting() {
    let world = World::new();
    let unnamed = |id: u8| {
        let mut attempt = Attempt::admin();
        attempt.data.hostnqn = [0; 256];
        attempt.data.hostid = [id; 16];
        attempt
    };
    let (connected, _) = unnamed(1).make(&world).unwrap();
    let ConnectedQueue::Admin(mut controller) = connected.queue else { panic!("an I/O queue") };
    assert!(controller.shared.claim_queue(1));
    controller.shared.queue_orphaned(1);
    let shared = Arc::clone(&controller.shared);
    controller.remove(&world.registry);
    assert_eq!(unnamed(1).refused(&world).status, Status::CONNECT_CONTROLLER_BUSY);
    assert!(unnamed(2).make(&world).is_ok() && Attempt::admin().make(&world).is_ok());
    shared.orphan_completed(1);
    assert!(unnamed(1).make(&world).is_ok());
}

#[test]
fn an_unknown_subsystem_or_one_of_another_listener_is_an_invalid_parameter() {
    let mut world = World::new();
    let refusal =
        Attempt::of("nqn.2026-01.test:none", HOST, 0, 0xffff).invalid(&world, ConnectInvalid::SUBNQN);
    assert!(!refusal.status.is_dnr(), "it may come");
    world.peer.listener = 1;
    Attempt::admin().invalid(&world, ConnectInvalid::SUBNQN);
    world.subsystem().listeners.push(1);
    assert!(Attempt::admin().make(&world).is_ok());
}

#[test]
fn a_host_that_is_not_in_the_list_is_an_invalid_host() {
    let world = World::new();
    let attempt = Attempt::of(PRIVATE, HOST, 0, 0xffff);
    let refusal = attempt.refused(&world);
    assert_eq!(
        (refusal.status, refusal.reason),
        (Status::CONNECT_INVALID_HOST.dnr(), Reason::HostNotAllowed)
    );
    let words = refusal.log_text(&attempt.data);
    assert!(words.contains("hostnqn") && words.contains(HOST) && words.contains(PRIVATE), "{words}");
    assert!(Attempt::of(PRIVATE, OTHER_HOST, 0, 0xffff).make(&world).is_ok());
}

#[test]
fn a_static_controller_is_refused() {
    let world = World::new();
    for cntlid in [0, 1, 0xfffe] {
        Attempt::of(SUBSYSTEM, HOST, 0, cntlid).invalid(&world, ConnectInvalid::CNTLID);
        Attempt::of(DISCOVERY_NQN, HOST, 0, cntlid).invalid(&world, ConnectInvalid::CNTLID);
    }
}

#[test]
fn a_keep_alive_timeout_that_is_too_long_is_refused_and_none_is_allowed() {
    let world = World::new();
    let mut attempt = Attempt::admin();
    attempt.sqe.cdw12 = U32::new(60_001);
    let refusal = attempt.invalid(&world, ConnectInvalid::KATO);
    assert_eq!(refusal.to_string(), "kato = 60001 ms: 0 to 60000 ms are allowed");
    assert_eq!(world.connect(SUBSYSTEM, 0).keep_alive.timeout_ms, 0);
    assert_eq!(world.connect(SUBSYSTEM, 1500).keep_alive.timeout_ms, 2000);
}

#[test]
fn identifiers_are_unique_and_the_host_may_try_again_when_all_are_taken() {
    let world = World::new();
    let controllers: Vec<_> = (0..4).map(|_| world.connect(SUBSYSTEM, 0)).collect();
    let mut ids: Vec<_> = controllers.iter().map(|controller| controller.shared.cntlid).collect();
    ids.sort_unstable();
    assert_eq!(ids, [1, 2, 3, 4]);
    let refusal = Attempt::admin().refused(&world);
    assert_eq!(refusal.status, Status::CONNECT_CONTROLLER_BUSY);
    assert!(!refusal.status.is_dnr());
    let mut controllers = controllers;
    controllers[2].remove(&world.registry);
    assert_eq!(Attempt::admin().make(&world).unwrap().1, u32::from(controllers[2].shared.cntlid));
}

#[test]
fn no_identifier_is_zero_or_reserved() {
    let mut world = World::new();
    world.subsystem().cntlid_range = (0, 1);
    assert_eq!(world.connect(SUBSYSTEM, 0).shared.cntlid, 1);
    let mut world = World::new();
    world.subsystem().cntlid_range = (0xffef, 0xffff);
    assert_eq!(world.connect(SUBSYSTEM, 0).shared.cntlid, 0xffef);
    assert_eq!(Attempt::admin().refused(&world).status, Status::CONNECT_CONTROLLER_BUSY);
}

#[test]
fn an_io_queue_joins_its_controller_once() {
    let world = World::new();
    let controller = world.io();
    let attempt = Attempt::io(controller.shared.cntlid, 2);
    let (connected, result) = attempt.make(&world).unwrap();
    assert_eq!((connected.entries, connected.is_sq_flow_off), (32, false));
    let ConnectedQueue::Io { shared, qid: 2, .. } = connected.queue else { panic!("an admin queue") };
    assert!(Arc::ptr_eq(&shared, &controller.shared));
    assert_eq!((result, shared.taken_qids()), (u32::from(shared.cntlid), 1));
    let refusal = attempt.refused(&world);
    assert_eq!((refusal.status, refusal.reason), (Status::COMMAND_SEQUENCE_ERROR, Reason::QueueLive(2)));
    shared.release_queue(2);
    assert!(attempt.make(&world).is_ok());
}

#[test]
fn an_io_queue_needs_a_live_controller_of_the_same_host() {
    let world = World::new();
    let mut controller = world.io();
    let cntlid = controller.shared.cntlid;
    // A controller may be gone for a moment only, as after a restart of the target: no DNR.
    assert!(!Attempt::io(cntlid + 1, 1).invalid(&world, ConnectInvalid::CNTLID).status.is_dnr());
    Attempt::of(SUBSYSTEM, OTHER_HOST, 1, cntlid).invalid(&world, ConnectInvalid::HOSTNQN);
    Attempt::of(PRIVATE, OTHER_HOST, 1, cntlid).invalid(&world, ConnectInvalid::CNTLID);
    controller.shared.set_gone();
    Attempt::io(cntlid, 1).invalid(&world, ConnectInvalid::CNTLID);
    controller.remove(&world.registry);
    Attempt::io(cntlid, 1).invalid(&world, ConnectInvalid::CNTLID);
}

#[test]
fn an_io_queue_with_another_host_identifier_is_taken_and_told_once() {
    let world = World::new();
    let controller = world.io();
    let mut told = Vec::new();
    for (qid, id) in [(1, HOST_ID), (2, [1; 16]), (3, [2; 16]), (4, HOST_ID)] {
        let mut attempt = Attempt::io(controller.shared.cntlid, qid);
        attempt.data.hostid = id;
        let (connected, _) = attempt.make(&world).unwrap();
        let ConnectedQueue::Io { has_other_id, .. } = connected.queue else { panic!("an admin queue") };
        told.push(has_other_id);
    }
    assert_eq!(told, [false, true, false, false]);
    assert_eq!(controller.shared.host_id, HOST_ID, "that of the admin queue is kept");
}

#[test]
fn an_io_queue_beyond_the_last_is_refused() {
    let world = World::new();
    let cntlid = world.io().shared.cntlid;
    assert!(Attempt::io(cntlid, 4).make(&world).is_ok());
    let refusal = Attempt::io(cntlid, 5).invalid(&world, ConnectInvalid::QID);
    assert_eq!(refusal.to_string(), "qid = 5: 0 to 4 are allowed");
    Attempt::io(cntlid, 0xffff).invalid(&world, ConnectInvalid::QID);
}

#[test]
fn an_io_queue_connect_before_cc_en_is_a_sequence_error_and_takes_no_qid() {
    let world = World::new();
    let controller = world.connect(SUBSYSTEM, 0);
    let refusal = Attempt::io(controller.shared.cntlid, 1).refused(&world);
    assert_eq!(refusal.status, Status::COMMAND_SEQUENCE_ERROR);
    assert_eq!(controller.shared.taken_qids(), 0);
}

#[test]
fn a_host_that_was_taken_off_the_list_gets_no_more_queues() {
    let mut world = World::new();
    let cntlid = world.io().shared.cntlid;
    world.subsystem().hosts = AllowedHosts::Only(Vec::new());
    assert_eq!(Attempt::io(cntlid, 1).refused(&world).status, Status::CONNECT_INVALID_HOST.dnr());
}

#[test]
fn the_discovery_service_is_on_every_listener_for_every_host_with_queue_zero_only() {
    let mut world = World::new();
    for listener in [0, 1] {
        world.peer.listener = listener;
        let controller = world.connect(DISCOVERY_NQN, 0);
        assert!(controller.kind == Kind::Discovery);
        // A host that asks for no time-out gets the default one, so that it is not kept for ever.
        assert_eq!(controller.keep_alive.timeout_ms, 120_000);
    }
    assert_eq!(world.connect(DISCOVERY_NQN, 30_000).keep_alive.timeout_ms, 30_000);
    Attempt::of(DISCOVERY_NQN, HOST, 1, 1).invalid(&world, ConnectInvalid::QID);
}

#[test]
fn no_connect_at_all_makes_it_panic() {
    use nvme_spec::zerocopy::FromBytes;
    use proptest::prelude::*;
    let world = World::new();
    let strategy = (any::<[u8; 64]>(), proptest::collection::vec(any::<u8>(), 1024), any::<bool>());
    proptest!(|((sqe, data, with_names) in strategy)| {
        let sqe = Sqe::read_from_bytes(&sqe).unwrap();
        let mut data = ConnectData::read_from_bytes(&data).unwrap();
        if with_names {
            data.subnqn = nqn(SUBSYSTEM).to_field();
            data.hostnqn = nqn(HOST).to_field();
            data.cntlid = U16::new(0xffff);
        }
        if let Err(refusal) = connect_command(&world.cx(), &sqe, &data, &LIMITS) {
            prop_assert!(!refusal.log_text(&data).is_empty());
        }
    });
}
