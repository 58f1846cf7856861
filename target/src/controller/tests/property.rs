//! Properties: what a host reads, and what it may write.

use nvme_spec::register::{Csts, NSSR_RESET};

use super::*;
use crate::controller::ControllerState;

fn get(world: &World, controller: &mut Controller, size8: bool, offset: u32) -> Result<u64, Refused> {
    match controller.property(&world.cx(), &Sqe::property_get(1, size8, offset)).0 {
        Outcome::Reply { status: Status::SUCCESS, result, .. } => Ok(result),
        Outcome::Reply { status, field, .. } => Err((status, field)),
        Outcome::ParkAsyncEvent
        | Outcome::Abort { .. }
        | Outcome::EndFormer { .. }
        | Outcome::Next { .. } => unreachable!(),
    }
}

fn csts(world: &World, controller: &mut Controller) -> Csts {
    Csts::from_bits(u32::try_from(get(world, controller, false, register::CSTS).unwrap()).unwrap())
}

const INVALID: Status = Status::INVALID_FIELD.dnr();

#[test]
fn registers_read_as_a_host_expects_before_it_enables_the_controller() {
    let world = World::new();
    let mut controller = world.connect(SUBSYSTEM, 0);
    let cap = get(&world, &mut controller, true, register::CAP).unwrap();
    // CRMS.CRWMS, CSS NVM and I/O command sets, TO 45 s, CQR, MQES 63; no NSSRS, MPSMIN and MPSMAX 0.
    assert_eq!(cap, 1 << 59 | 1 << 43 | 1 << 37 | 90 << 24 | 1 << 16 | 63);
    assert_eq!(get(&world, &mut controller, false, register::VS), Ok(0x0002_0000));
    assert_eq!(get(&world, &mut controller, false, register::CC), Ok(0));
    assert_eq!(get(&world, &mut controller, false, register::CSTS), Ok(0));
    // Linux warns where CRTO.CRWMT is less than CAP.TO.
    assert_eq!(get(&world, &mut controller, false, register::CRTO), Ok(90));
    assert_eq!(get(&world, &mut controller, false, register::NSSR), Ok(0));
}

#[test]
fn a_property_is_read_in_its_own_size_only() {
    let world = World::new();
    let mut controller = world.io();
    for (size8, offset) in [(false, register::CAP), (true, register::VS), (true, register::CSTS)] {
        assert_eq!(get(&world, &mut controller, size8, offset), Err((INVALID, Some(40))));
    }
    let mut sqe = Sqe::property_get(1, false, register::VS);
    sqe.cdw10 = 7.into();
    let (outcome, _) = controller.property(&world.cx(), &sqe);
    assert!(matches!(outcome, Outcome::Reply { status: INVALID, .. }));
}

#[test]
fn other_properties_are_an_invalid_field() {
    let world = World::new();
    let mut controller = world.io();
    for offset in [register::INTMS, register::AQA, register::ASQ, register::NSSD, 0x16, 0x1000, u32::MAX] {
        assert_eq!(get(&world, &mut controller, false, offset), Err((INVALID, Some(44))), "{offset:#x}");
    }
}

#[test]
fn only_cc_is_written_and_only_as_four_bytes() {
    let world = World::new();
    let mut controller = world.io();
    let writes = [
        (false, register::CAP, 44),
        (false, register::CSTS, 44),
        (false, register::VS, 44),
        (false, register::NSSR, 44),
        (true, register::CC, 40),
    ];
    for (size8, offset, field) in writes {
        let (outcome, effect) =
            controller.property(&world.cx(), &Sqe::property_set(1, size8, offset, u64::from(NSSR_RESET)));
        assert_eq!(outcome, Outcome::Reply { status: INVALID, result: 0, field: Some(field) });
        assert_eq!(effect, Effect::None);
    }
    assert_eq!(controller.state, ControllerState::Enabled);
}

#[test]
fn enabling_makes_it_ready_and_disabling_closes_its_io_queues() {
    let world = World::new();
    let mut controller = world.io();
    assert!(controller.shared.is_ready() && csts(&world, &mut controller).rdy());
    assert_eq!(get(&world, &mut controller, false, register::CC), Ok(0x0046_0001));
    assert_eq!(world.set_cc(&mut controller, enabled()), Ok(Effect::None));
    assert_eq!(world.set_cc(&mut controller, enabled().with_en(false)), Ok(Effect::CloseIoQueues));
    assert!(!controller.shared.is_ready() && !csts(&world, &mut controller).rdy());
    assert_eq!(world.set_cc(&mut controller, enabled()), Ok(Effect::None));
    assert!(controller.shared.is_ready());
}

#[test]
fn a_shutdown_is_complete_at_once_and_a_reset_ends_it() {
    let world = World::new();
    for shn in [1, 2] {
        let mut controller = world.io();
        assert_eq!(world.set_cc(&mut controller, enabled().with_shn(shn)), Ok(Effect::CloseIoQueues));
        let status = csts(&world, &mut controller);
        assert_eq!((status.shst(), status.rdy(), status.cfs()), (2, true, false));
        assert!(!controller.shared.is_ready());
        let refused = world.run(&mut controller, &Sqe::keep_alive(1));
        assert_eq!(refused, Err((Status::COMMAND_SEQUENCE_ERROR.dnr(), None)));
        assert_eq!(world.set_cc(&mut controller, enabled().with_shn(shn)), Ok(Effect::None));
        // The reset ends it also where SHN is left as it was.
        assert_eq!(world.set_cc(&mut controller, Cc::new().with_shn(shn)), Ok(Effect::CloseIoQueues));
        assert_eq!(csts(&world, &mut controller).into_bits(), 0);
        assert_eq!(world.set_cc(&mut controller, enabled()), Ok(Effect::None));
        assert!(controller.shared.is_ready());
        controller.remove(&world.registry);
    }
}

#[test]
fn one_write_may_enable_and_shut_down_and_a_shutdown_may_come_before_any_enable() {
    let world = World::new();
    let mut controller = world.connect(SUBSYSTEM, 0);
    assert_eq!(world.set_cc(&mut controller, enabled().with_shn(1)), Ok(Effect::CloseIoQueues));
    assert_eq!(controller.state, ControllerState::ShutDown);
    let mut controller = world.connect(SUBSYSTEM, 0);
    assert_eq!(world.set_cc(&mut controller, Cc::new().with_shn(2)), Ok(Effect::CloseIoQueues));
    let status = csts(&world, &mut controller);
    assert_eq!((status.rdy(), status.shst()), (false, 2));
    assert_eq!(world.set_cc(&mut controller, enabled()), Ok(Effect::None));
    assert!(controller.shared.is_ready());
}

#[test]
fn a_configuration_that_it_cannot_have_is_refused_and_changes_nothing() {
    let world = World::new();
    let mut controller = world.connect(SUBSYSTEM, 0);
    let bad = [
        enabled().with_iosqes(7),
        enabled().with_iocqes(5),
        enabled().with_iosqes(0).with_iocqes(0),
        enabled().with_mps(1),
        enabled().with_ams(1),
        enabled().with_css(0b111),
        enabled().with_css(0b001),
        enabled().with_shn(3),
        enabled().with_crime(true),
        Cc::from_bits(enabled().into_bits() | 1 << 31),
    ];
    for cc in bad {
        assert_eq!(world.set_cc(&mut controller, cc), Err(INVALID), "{cc:?}");
        assert_eq!(
            (controller.state, csts(&world, &mut controller).into_bits()),
            (ControllerState::Disabled, 0)
        );
    }
    // Linux writes its configuration first and enables after.
    assert_eq!(world.set_cc(&mut controller, enabled().with_css(0b110).with_en(false)), Ok(Effect::None));
    assert_eq!(world.set_cc(&mut controller, enabled().with_css(0b110)), Ok(Effect::None));
    assert_eq!(world.set_cc(&mut controller, enabled().with_css(0)), Err(INVALID));
    assert!(controller.shared.is_ready());
}

#[test]
fn a_discovery_controller_needs_no_entry_sizes() {
    let world = World::new();
    let mut controller = world.connect(nvme_spec::nqn::DISCOVERY_NQN, 0);
    assert_eq!(world.set_cc(&mut controller, Cc::new().with_en(true)), Ok(Effect::None));
    assert!(controller.shared.is_ready());
}

#[test]
fn a_failed_controller_says_so_and_is_not_written() {
    let mut world = World::new();
    let mut controller = world.io();
    world.now += Nanos::from_ms(5000);
    assert!(tick(&mut controller, world.now).is_some());
    let status = csts(&world, &mut controller);
    assert_eq!((status.cfs(), status.rdy()), (true, false));
    assert_eq!(world.set_cc(&mut controller, enabled()), Err(Status::COMMAND_SEQUENCE_ERROR.dnr()));
    assert!(controller.shared.is_gone());
}
