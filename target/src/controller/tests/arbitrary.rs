//! Anything that a host can send: no panic, and always an answer that the protocol knows.

use nvme_spec::opcode::FabricsType;
use nvme_spec::zerocopy::little_endian::U32;
use nvme_spec::zerocopy::{FromBytes, IntoBytes};
use proptest::prelude::*;

use super::*;
use crate::controller::{DISCOVERY_PAGES, ErrorRecord, IO_PAGES};

/// What may happen to a controller.
#[derive(Debug, Clone)]
enum Operation {
    Admin([u8; 64]),
    /// A known opcode and small numbers, so that more of them pass.
    Near {
        opcode: u8,
        nsid: u32,
        cdw10: u32,
        cdw11: u32,
        cdw12: u32,
    },
    Property {
        is_set: bool,
        size8: bool,
        offset: u32,
        value: u64,
    },
    Cc(u32),
    Snapshot(bool),
    Error(Option<u16>),
    Tick(u64),
    TakeEvent,
    EventAborted,
    AbortDone,
}

fn near() -> impl Strategy<Value = Operation> {
    let opcode =
        prop_oneof![Just(2_u8), Just(6), Just(8), Just(9), Just(0xa), Just(0xc), Just(0x18), Just(0xc0)];
    let nsid = prop_oneof![0_u32..5, Just(0xffff_ffff), any::<u32>()];
    let pages: Vec<u32> = IO_PAGES.iter().chain(DISCOVERY_PAGES).map(|lid| u32::from(lid.0)).collect();
    let low = prop_oneof![2 => 0_u32..0x20, 1 => proptest::sample::select(pages)];
    let cdw10 =
        (low, prop_oneof![Just(0_u32), 0_u32..0x10, any::<u32>()]).prop_map(|(low, high)| high << 8 | low);
    let cdw11 = prop_oneof![Just(0_u32), 0_u32..0x400, any::<u32>()];
    let cdw12 = prop_oneof![Just(0_u32), (0_u32..4096).prop_map(|dword| dword * 4), any::<u32>()];
    (opcode, nsid, cdw10, cdw11, cdw12).prop_map(|(opcode, nsid, cdw10, cdw11, cdw12)| Operation::Near {
        opcode,
        nsid,
        cdw10,
        cdw11,
        cdw12,
    })
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        2 => any::<[u8; 64]>().prop_map(Operation::Admin),
        8 => near(),
        2 => (any::<bool>(), any::<bool>(), 0_u32..0x80, any::<u64>())
            .prop_map(|(is_set, size8, offset, value)| Operation::Property { is_set, size8, offset, value }),
        3 => prop_oneof![Just(0x0046_0001), Just(0), Just(0x0046_4001), any::<u32>()].prop_map(Operation::Cc),
        1 => any::<bool>().prop_map(Operation::Snapshot),
        1 => any::<Option<u16>>().prop_map(Operation::Error),
        1 => (0_u64..20_000).prop_map(Operation::Tick),
        1 => Just(Operation::TakeEvent),
        1 => Just(Operation::EventAborted),
        1 => Just(Operation::AbortDone),
    ]
}

/// Run it, and check what must hold after anything.
fn apply(world: &mut World, controller: &mut Controller, operation: &Operation) {
    match operation {
        Operation::Admin(bytes) => admin(world, controller, &Sqe::read_from_bytes(bytes).unwrap()),
        Operation::Near { opcode, nsid, cdw10, cdw11, cdw12 } => {
            let mut sqe = Sqe::new(*opcode, 1, *nsid);
            sqe.cdw10 = U32::new(*cdw10);
            sqe.cdw11 = U32::new(*cdw11);
            sqe.cdw12 = U32::new(*cdw12);
            admin(world, controller, &sqe);
        }
        Operation::Property { is_set, size8, offset, value } => {
            let sqe = if *is_set {
                Sqe::property_set(1, *size8, *offset, *value)
            } else {
                Sqe::property_get(1, *size8, *offset)
            };
            controller.property(&world.cx(), &sqe);
        }
        Operation::Cc(value) => {
            let sqe = Sqe::property_set(1, false, register::CC, u64::from(*value));
            assert_eq!(sqe.fctype(), FabricsType::PROPERTY_SET);
            controller.property(&world.cx(), &sqe);
        }
        Operation::Snapshot(is_smaller) => {
            let old = std::mem::replace(&mut world.snapshot, World::new().snapshot);
            if *is_smaller {
                world.subsystem().namespaces[0] = None;
                world.snapshot.referrals.clear();
            }
            controller.on_snapshot(&old, &world.snapshot);
        }
        Operation::Error(field) => {
            controller.on_error(ErrorRecord {
                sqid: 1,
                cid: 2,
                status: Status::INTERNAL_ERROR,
                field: *field,
                lba: u64::MAX,
                nsid: u32::MAX,
            });
        }
        Operation::Tick(ms) => {
            world.now += Nanos::from_ms(*ms);
            tick(controller, world.now);
        }
        Operation::TakeEvent => {
            let held = controller.events.parked_aers;
            let taken = controller.take_async_event();
            assert_eq!(controller.events.parked_aers + u8::from(taken.is_some()), held);
        }
        Operation::EventAborted => controller.async_event_aborted(),
        Operation::AbortDone => controller.abort_done(),
    }
    assert!(controller.events.parked_aers <= 4);
    assert_eq!(controller.shared.is_ready(), controller.state.is_ready());
    assert_eq!(controller.shared.is_gone(), controller.state.is_over());
    if let Some(deadline) = controller.keep_alive.deadline {
        assert!(deadline <= world.now + Nanos::from_secs(120));
    }
}

fn admin(world: &World, controller: &mut Controller, sqe: &Sqe) {
    let need = controller.need(&world.cx(), sqe);
    let bytes = match need {
        Ok(need) => need.bytes,
        Err(failure) => {
            assert!(!failure.status.is_success());
            assert!(failure.field.is_none_or(|field| field < 64));
            0
        }
    };
    assert!(bytes <= 1 << 20, "MDTS");
    // What the host sends is as arbitrary as the command.
    let mut data: Vec<u8> =
        sqe.as_bytes().iter().copied().cycle().take(usize::try_from(bytes).unwrap()).collect();
    if need.is_ok_and(|need| need.is_to_host) {
        data.fill(0);
    }
    let outcome = controller.execute(&world.cx(), sqe, &mut data);
    match (need, outcome) {
        (Err(failure), outcome) => assert_eq!(outcome, Outcome::from(failure), "need and execute agree"),
        (Ok(_), Outcome::Reply { status, .. }) => {
            assert_ne!(status.code(), Status::INVALID_OPCODE);
        }
        (Ok(need), Outcome::ParkAsyncEvent | Outcome::Abort { .. }) => assert_eq!(need, Need::NONE),
        (Ok(need), Outcome::Next { .. }) => assert_eq!((need.bytes, need.memory), (4096, 0)),
        (Ok(need), Outcome::EndFormer { token }) => assert!(need == Need::NONE && token != 0),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn no_sequence_of_commands_makes_a_controller_panic(
        is_discovery in any::<bool>(),
        operations in proptest::collection::vec(operation(), 1..60),
    ) {
        let mut world = World::new();
        let mut controller = if is_discovery { world.discovery(0) } else { world.io() };
        for operation in &operations {
            apply(&mut world, &mut controller, operation);
        }
        controller.remove(&world.registry);
        prop_assert_eq!(world.registry.all().len(), 0);
    }
}
