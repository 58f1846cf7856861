//! Admin commands that have no file of their own, and commands that come at the wrong time or are not there.

use nvme_spec::opcode::FabricsType;
use nvme_spec::sqe::{Fuse, Psdt};

use super::*;

#[test]
fn commands_before_ready_are_a_sequence_error() {
    let world = World::new();
    let mut controller = world.connect(SUBSYSTEM, 0);
    let refused = world.run(&mut controller, &Sqe::keep_alive(1));
    assert_eq!(refused, Err((Status::COMMAND_SEQUENCE_ERROR.dnr(), None)));
}

#[test]
fn every_opcode_that_is_not_there_is_an_invalid_opcode() {
    let world = World::new();
    let io = [0x02, 0x06, 0x08, 0x09, 0x0a, 0x0c, 0x18, 0xc0];
    let discovery = [0x02, 0x06, 0x09, 0x0a, 0x0c, 0x18];
    for (mut controller, known) in [(world.io(), &io[..]), (world.discovery(0), &discovery[..])] {
        for opcode in (0..=u8::MAX).filter(|opcode| !known.contains(opcode)) {
            let refused = world.run(&mut controller, &Sqe::new(opcode, 1, 0));
            assert_eq!(refused, Err((Status::INVALID_OPCODE.dnr(), Some(0))), "{opcode:#x}");
        }
    }
}

#[test]
fn prps_and_fused_admin_commands_are_an_invalid_field() {
    let world = World::new();
    let mut controller = world.io();
    let sqe = Sqe::keep_alive(1);
    for sqe in
        [sqe.with_psdt(Psdt::PRP), sqe.with_psdt(Psdt(3)), sqe.with_fuse(Fuse::FIRST), sqe.with_fuse(Fuse(3))]
    {
        assert_eq!(world.run(&mut controller, &sqe), Err((Status::INVALID_FIELD.dnr(), Some(1))));
    }
}

#[test]
fn an_abort_is_passed_on_and_the_fifth_at_once_is_over_the_limit() {
    let world = World::new();
    let mut controller = world.io();
    for _ in 0..4 {
        let outcome = controller.execute(&world.cx(), &Sqe::abort(9, 3, 0x1234), &mut []);
        assert_eq!(outcome, Outcome::Abort { sqid: 3, cid: 0x1234 });
    }
    let refused = world.run(&mut controller, &Sqe::abort(9, 3, 0x1234));
    assert_eq!(refused, Err((Status::ABORT_LIMIT_EXCEEDED, Some(0))));
    controller.abort_done();
    assert!(world.run(&mut controller, &Sqe::abort(9, 3, 0x1234)).is_ok());
}

#[test]
fn keep_alive_succeeds_and_moves_no_data() {
    let world = World::new();
    let mut controller = world.io();
    assert_eq!(controller.need(&world.cx(), &Sqe::keep_alive(1)), Ok(Need::NONE));
    assert_eq!(world.run(&mut controller, &Sqe::keep_alive(1)), Ok((0, Vec::new())));
    assert!(controller.shared.take_traffic());
}

#[test]
fn the_end_of_former_associations_is_passed_on_with_its_token_which_is_not_zero() {
    let world = World::new();
    let mut controller = world.io();
    let token = 1 << 63 | 5;
    let mut sqe = Sqe::end_former_associations(1, token);
    sqe.cdw15 = nvme_spec::zerocopy::little_endian::U32::new(7);
    assert_eq!(controller.need(&world.cx(), &sqe), Ok(Need::NONE));
    assert_eq!(controller.execute(&world.cx(), &sqe, &mut []), Outcome::EndFormer { token });
    let refused = world.run(&mut controller, &Sqe::end_former_associations(1, 0));
    assert_eq!(refused, Err((Status::INVALID_FIELD.dnr(), Some(40))));
}

#[test]
fn a_buffer_that_is_too_short_does_nothing() {
    use nvme_spec::identify::Cns;
    let world = World::new();
    let mut controller = world.io();
    let outcome = controller.execute(&world.cx(), &Sqe::identify(1, Cns::CONTROLLER, 0, 0), &mut [0; 100]);
    assert_eq!(outcome, Outcome::Reply { status: Status::INTERNAL_ERROR, result: 0, field: None });
}

#[test]
fn other_fabrics_commands_are_not_properties() {
    let world = World::new();
    let mut controller = world.io();
    let (outcome, effect) =
        controller.property(&world.cx(), &Sqe::fabrics(1, FabricsType::AUTHENTICATION_SEND));
    assert_eq!(outcome, Outcome::Reply { status: Status::INVALID_OPCODE.dnr(), result: 0, field: Some(4) });
    assert_eq!(effect, Effect::None);
}

#[test]
fn a_subsystem_that_is_gone_before_its_controller_knows_is_an_internal_error() {
    use nvme_spec::identify::Cns;
    let mut world = World::new();
    let mut controller = world.io();
    world.snapshot.subsystems.clear();
    let refused = world.run(&mut controller, &Sqe::identify(1, Cns::CONTROLLER, 0, 0));
    assert_eq!(refused, Err((Status::INTERNAL_ERROR, None)));
}

/// What Linux 6.12 sends from Connect to the first I/O, in its order.
#[test]
fn the_order_in_which_linux_brings_a_controller_up_works() {
    use nvme_spec::feature::{FeatureId, NumberOfQueues};
    use nvme_spec::identify::{Cns, Csi};
    use nvme_spec::log::LogId;
    let world = World::new();
    let mut controller = world.connect(SUBSYSTEM, KATO_MS);
    let mut property = |sqe: Sqe| {
        let (outcome, effect) = controller.property(&world.cx(), &sqe);
        assert_eq!(effect, Effect::None);
        let Outcome::Reply { status: Status::SUCCESS, result, .. } = outcome else { panic!("{outcome:?}") };
        result
    };
    let cap = property(Sqe::property_get(1, true, register::CAP));
    property(Sqe::property_get(2, false, register::VS));
    let cc = if cap & 1 << 43 == 0 { 0x0046_0000 } else { 0x0046_0060 };
    property(Sqe::property_set(3, false, register::CC, cc));
    property(Sqe::property_get(4, true, register::CAP));
    property(Sqe::property_get(5, false, register::CRTO));
    property(Sqe::property_set(6, false, register::CC, cc | 1));
    assert_eq!(property(Sqe::property_get(7, false, register::CSTS)), 1);
    let all = 0xffff_ffff;
    let commands = [
        Sqe::identify(8, Cns::CONTROLLER, 0, 0),
        Sqe::get_log_page(9, LogId::COMMAND_EFFECTS, all, 4096, 0, false),
        Sqe::identify_csi(10, Cns::CSI_CONTROLLER, 0, Csi::NVM),
        Sqe::set_features(11, FeatureId::TIMESTAMP, 0, 0),
        Sqe::get_log_page(12, LogId::SMART, all, 512, 0, false),
        Sqe::set_features(13, FeatureId::NUMBER_OF_QUEUES, 0, NumberOfQueues::both(2).into_bits()),
        Sqe::set_features(14, FeatureId::ASYNC_EVENT_CONFIG, 0, 1 << 8),
        Sqe::async_event_request(0xf000),
        Sqe::identify(15, Cns::ACTIVE_NAMESPACE_LIST, 0, 0),
        Sqe::identify(16, Cns::NAMESPACE_DESCRIPTORS, 1, 0),
        Sqe::identify(17, Cns::NAMESPACE, 1, 0),
        Sqe::identify_csi(18, Cns::CSI_NAMESPACE, 1, Csi::NVM),
        Sqe::get_log_page(19, LogId::CHANGED_NAMESPACES, all, 4096, 0, false),
        Sqe::keep_alive(20),
    ];
    for sqe in commands {
        let answer = world.run(&mut controller, &sqe);
        assert!(answer.is_ok(), "{:?}: {answer:?}", sqe.admin_opcode());
    }
}

#[test]
fn a_controller_takes_little_memory() {
    // Growth is a reviewed event: a thousand idle hosts have one each, beside 4 KiB of error log.
    let bytes = size_of::<Controller>();
    assert!(bytes <= 512, "{bytes} bytes");
}
