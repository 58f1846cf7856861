//! Identify, checked at the byte offsets of the specification, not through our own structures.

use nvme_spec::identify::{Cns, Csi};

use super::*;

const INVALID: Status = Status::INVALID_FIELD.dnr();
const NO_NAMESPACE: Refused = (Status::INVALID_NAMESPACE_OR_FORMAT.dnr(), Some(4));

fn identify(world: &World, controller: &mut Controller, cns: Cns, nsid: u32) -> Result<Vec<u8>, Refused> {
    let (result, data) = world.run(controller, &Sqe::identify(1, cns, nsid, 0))?;
    assert_eq!((result, data.len()), (0, 4096));
    Ok(data)
}

#[test]
fn identify_controller_says_what_linux_checks() {
    let world = World::new();
    let mut controller = world.io();
    let id = identify(&world, &mut controller, Cns::CONTROLLER, 0).unwrap();
    assert_eq!(&id[4..24], b"SPDL0001            ");
    assert_eq!(&id[24..64], b"Spindle test                            ");
    assert_eq!(&id[64..72], b"0.1.0   ");
    assert_eq!(id[76], 0b0011, "CMIC: several ports and controllers, no ANA");
    assert_eq!(id[77], 8, "MDTS: 2^8 pages, 1 MiB");
    assert_eq!(u16_at(&id, 78), controller.shared.cntlid);
    assert_eq!(u32_at(&id, 80), 0x0002_0000, "VER as the VS property");
    assert_eq!(u32_at(&id, 92), 1 << 8, "OAES: namespace attribute notices");
    assert_eq!(u32_at(&id, 96), 1 << 6 | 1, "CTRATT: TBKAS, 128-bit host identifier");
    assert_eq!(id[111], 1, "CNTRLTYPE: I/O");
    assert_eq!(u16_at(&id, 256), 0, "OACS: no optional admin commands");
    assert_eq!((id[258], id[259]), (3, 3), "ACL, AERL");
    assert_eq!(id[260], 0b011, "FRMW: one slot, read only");
    assert_eq!(id[261], 0b10_0111, "LPA");
    assert_eq!((id[262], id[263]), (63, 0), "ELPE, NPSS");
    assert!(u16_at(&id, 266) > 273 && u16_at(&id, 268) > u16_at(&id, 266), "WCTEMP < CCTEMP");
    assert_eq!(u16_at(&id, 320), 10, "KAS: 1 s");
    assert_eq!((id[512], id[513]), (0x66, 0x44), "SQES, CQES");
    assert_eq!(u16_at(&id, 514), 64, "MAXCMD");
    assert_eq!((u32_at(&id, 516), u32_at(&id, 540)), (1024, 1024), "NN, MNAN");
    assert_eq!(&id[768..768 + SUBSYSTEM.len()], SUBSYSTEM.as_bytes());
    assert_eq!(id[768 + SUBSYSTEM.len()], 0);
    assert_eq!(u32_at(&id, 1792), (64 + 4096) / 16, "IOCCSZ");
    assert_eq!(u32_at(&id, 1796), 1, "IORCSZ");
    assert_eq!(u16_at(&id, 1800), 0, "ICDOFF");
    assert_eq!((id[1802], id[1803]), (0, 1), "FCATT: dynamic; MSDBD");
    assert_eq!(u16_at(&id, 1804), 1, "OFCS: Disconnect");
}

#[test]
fn identify_controller_advertises_only_what_works() {
    let world = World::new();
    let mut controller = world.io();
    let id = identify(&world, &mut controller, Cns::CONTROLLER, 0).unwrap();
    // Compare, Dataset Management, Write Zeroes, select, Timestamp, Verify, Copy; no Write Uncorrectable,
    // reservations.
    assert_eq!(u16_at(&id, 520), 0b1_1101_1101 & !0b10_0000, "ONCS");
    assert_eq!(u16_at(&id, 522), 1, "FUSES: a disk can compare and write");
    assert_eq!(id[525], 0b111, "VWC: present in one namespace, flush of all supported");
    assert_eq!((u16_at(&id, 526), u16_at(&id, 528)), (1, 0), "AWUN of the least namespace, AWUPF");
    assert_eq!(u16_at(&id, 532), 0, "ACWU: one block");
    assert_eq!(u16_at(&id, 534), 1, "copy format 0");
    assert_eq!(u32_at(&id, 536), 1 << 21 | 1 << 20 | 1, "SGLS: transport, offset, supported");
    assert_eq!((id[331], u32_at(&id, 328), id[343]), (0, 0, 0), "SANICAP, ANACAP");
    assert!(id[1806..3072].iter().all(|byte| *byte == 0));
    assert_eq!(id[3072..3088], *b"SPINDLE\0\x01\0\0\0\x01\0\0\0", "End Former Associations");
    assert!(id[3088..].iter().all(|byte| *byte == 0));
}

#[test]
fn what_a_controller_can_do_follows_its_namespaces() {
    let mut world = World::new();
    let mut geometry = THIN_512;
    geometry.can_compare_and_write = false;
    geometry.atomic_blocks = 1;
    *world.subsystem() = subsystem(SUBSYSTEM, AllowedHosts::Any, &[namespace(1, geometry)]);
    let mut controller = world.io();
    let id = identify(&world, &mut controller, Cns::CONTROLLER, 0).unwrap();
    assert_eq!((u16_at(&id, 522), id[525], u16_at(&id, 526)), (0, 0b110, 0));
    // One that cannot compare and write does not take it from the others.
    let both = [namespace(1, geometry), namespace(2, THICK_4096)];
    *world.subsystem() = subsystem(SUBSYSTEM, AllowedHosts::Any, &both);
    let id = identify(&world, &mut world.io(), Cns::CONTROLLER, 0).unwrap();
    assert_eq!(u16_at(&id, 522), 1);
    *world.subsystem() = subsystem(SUBSYSTEM, AllowedHosts::Any, &[]);
    let id = identify(&world, &mut world.io(), Cns::CONTROLLER, 0).unwrap();
    assert_eq!(u16_at(&id, 522), 1, "namespaces may come");
}

#[test]
fn an_rdma_controller_has_keyed_sgls() {
    let mut world = World::new();
    world.peer.transport = TransportKind::Rdma;
    let id = identify(&world, &mut world.io(), Cns::CONTROLLER, 0).unwrap();
    assert_eq!(u32_at(&id, 536), 1 << 20 | 1 << 2 | 1);
    assert_eq!(id[1803], 16, "MSDBD");
}

#[test]
fn a_discovery_controller_says_that_it_is_one() {
    let world = World::new();
    let mut controller = world.discovery(0);
    let id = identify(&world, &mut controller, Cns::CONTROLLER, 0).unwrap();
    assert_eq!(u16_at(&id, 78), controller.shared.cntlid);
    assert_eq!((id[111], id[1806]), (2, 1), "CNTRLTYPE, DCTYPE");
    assert_eq!(u32_at(&id, 92), 1 << 31, "OAES: discovery log");
    assert_eq!((id[261], id[259]), (0b100, 3), "LPA, AERL");
    assert_eq!(u16_at(&id, 320), 10, "KAS");
    assert_eq!(u16_at(&id, 514), 64, "MAXCMD");
    assert_eq!(&id[768..768 + 36], b"nqn.2014-08.org.nvmexpress.discovery");
    assert!(id[3072..].iter().all(|byte| *byte == 0), "no extension of ours");
    assert_eq!(
        (id[512], u32_at(&id, 516), u16_at(&id, 520)),
        (0, 0, 0),
        "no I/O queues, namespaces, I/O commands"
    );
    for cns in [Cns::NAMESPACE, Cns::ACTIVE_NAMESPACE_LIST, Cns::NAMESPACE_DESCRIPTORS, Cns::IO_COMMAND_SETS]
    {
        assert_eq!(identify(&world, &mut controller, cns, 1), Err((INVALID, Some(40))));
    }
}

#[test]
fn a_thin_namespace_says_what_it_holds_and_how_it_deallocates() {
    let world = World::new();
    let id = identify(&world, &mut world.io(), Cns::NAMESPACE, 1).unwrap();
    assert_eq!((u64_at(&id, 0), u64_at(&id, 8)), (2048, 2048), "NSZE, NCAP");
    assert_eq!(u64_at(&id, 16), 10, "NUSE: 5000 bytes in blocks of 512, rounded up");
    assert_eq!(id[24], 0b1_0001, "NSFEAT: thin, preferred sizes");
    assert_eq!((id[25], id[26], id[30]), (0, 0, 1), "NLBAF, FLBAS, NMIC: shared");
    assert_eq!(id[33], 0b1001, "DLFEAT: reads zeroes, DEAC of Write Zeroes");
    assert_eq!(u64_at(&id, 48), 1 << 20, "NVMCAP");
    assert_eq!([64, 66, 68, 70].map(|at| u16_at(&id, at)), [7; 4], "NPWG, NPWA, NPDG, NPDA: 4 KiB");
    assert_eq!(u16_at(&id, 72), 2047, "NOWS: one command");
    assert_eq!((u16_at(&id, 74), u32_at(&id, 76), id[80]), (2048, 2048 * 128, 127), "MSSRL, MCL, MSRC");
    assert_eq!((u32_at(&id, 92), id[99]), (0, 0), "ANAGRPID, NSATTR");
    assert_eq!(id[104..120], [0x81; 16], "NGUID");
    assert_eq!(id[120..128], [0; 8], "EUI64");
    assert_eq!(u32_at(&id, 128), 9 << 16, "LBAF0");
}

#[test]
fn a_drive_that_takes_a_deallocation_as_a_hint_is_not_said_to_read_zeroes() {
    let mut world = World::new();
    let drive = Arc::new(Shape::new(THIN_512));
    drive.warn(CriticalWarning::new(), 300);
    *world.subsystem() = subsystem(SUBSYSTEM, AllowedHosts::Any, &[namespace_of(1, THIN_512, drive)]);
    let id = identify(&world, &mut world.io(), Cns::NAMESPACE, 1).unwrap();
    assert_eq!((id[24], id[33]), (0b1_0001, 0b1000), "thin; reads not reported, DEAC of Write Zeroes");
}

#[test]
fn a_thick_read_only_namespace_promises_nothing_about_deallocation() {
    let mut world = World::new();
    let geometry = Geometry { is_read_only: true, ..THICK_4096 };
    *world.subsystem() = subsystem(SUBSYSTEM, AllowedHosts::Any, &[namespace(9, geometry)]);
    let mut controller = world.io();
    let id = identify(&world, &mut controller, Cns::NAMESPACE, 9).unwrap();
    assert_eq!((u64_at(&id, 16), id[24], id[33]), (1000, 0b1_0000, 0));
    assert_eq!((u16_at(&id, 64), u16_at(&id, 72), u32_at(&id, 128)), (0, 255, 12 << 16));
    assert_eq!(id[99], 1, "NSATTR: write protected");
    let id = identify(&world, &mut controller, Cns::INDEPENDENT_NAMESPACE, 9).unwrap();
    assert_eq!((id[1], id[8], id[14]), (1, 1, 1), "NMIC, NSATTR, NSTAT: ready");
}

#[test]
fn a_resized_disk_is_reported_with_its_new_size_at_once() {
    let world = World::new();
    let mut controller = world.io();
    world.snapshot.subsystems[0].namespace(1).unwrap().source.resize(512 * 4096).unwrap();
    let id = identify(&world, &mut controller, Cns::NAMESPACE, 1).unwrap();
    assert_eq!(u64_at(&id, 0), 4096);
}

#[test]
fn an_inactive_namespace_is_all_zero_and_a_number_beyond_nn_is_invalid() {
    let world = World::new();
    let mut controller = world.io();
    for cns in [Cns::NAMESPACE, Cns::CSI_NAMESPACE, Cns::INDEPENDENT_NAMESPACE] {
        for nsid in [2, 4, 1024] {
            let id = identify(&world, &mut controller, cns, nsid).unwrap();
            assert!(id.iter().all(|byte| *byte == 0), "{cns} of {nsid}");
        }
        for nsid in [0, 1025, 0xffff_fffe, 0xffff_ffff] {
            assert_eq!(identify(&world, &mut controller, cns, nsid), Err(NO_NAMESPACE), "{cns} of {nsid}");
        }
    }
}

#[test]
fn the_active_list_ascends_from_the_next_number() {
    let world = World::new();
    let mut controller = world.io();
    for cns in [Cns::ACTIVE_NAMESPACE_LIST, Cns::CSI_ACTIVE_NAMESPACE_LIST] {
        for (nsid, expected) in
            [(0, [1, 3, 0]), (1, [3, 0, 0]), (2, [3, 0, 0]), (3, [0; 3]), (0xffff_fffd, [0; 3])]
        {
            let list = identify(&world, &mut controller, cns, nsid).unwrap();
            assert_eq!([0, 4, 8].map(|at| u32_at(&list, at)), expected, "above {nsid}");
        }
        for nsid in [0xffff_fffe, 0xffff_ffff] {
            assert_eq!(identify(&world, &mut controller, cns, nsid), Err(NO_NAMESPACE));
        }
    }
}

#[test]
fn a_full_subsystem_fills_the_list_to_its_end() {
    let mut world = World::new();
    let all: Vec<_> = (1..=1024).map(|nsid| namespace(nsid, THIN_512)).collect();
    *world.subsystem() = subsystem(SUBSYSTEM, AllowedHosts::Any, &all);
    let list = identify(&world, &mut world.io(), Cns::ACTIVE_NAMESPACE_LIST, 0).unwrap();
    assert_eq!((u32_at(&list, 0), u32_at(&list, 4092)), (1, 1024));
}

#[test]
fn descriptors_are_uuid_nguid_and_command_set() {
    let world = World::new();
    let mut controller = world.io();
    let data = identify(&world, &mut controller, Cns::NAMESPACE_DESCRIPTORS, 3).unwrap();
    assert_eq!(data[..4], [3, 16, 0, 0]);
    assert_eq!(data[4..20], [0x43; 16]);
    assert_eq!(data[20..24], [2, 16, 0, 0]);
    assert_eq!(data[24..40], [0x83; 16]);
    assert_eq!(data[40..45], [4, 1, 0, 0, 0]);
    assert!(data[45..].iter().all(|byte| *byte == 0));
    for nsid in [0, 2, 1025, 0xffff_ffff] {
        assert_eq!(identify(&world, &mut controller, Cns::NAMESPACE_DESCRIPTORS, nsid), Err(NO_NAMESPACE));
    }
}

#[test]
fn the_nvm_command_set_has_its_own_limits() {
    let world = World::new();
    let mut controller = world.io();
    let id = identify(&world, &mut controller, Cns::CSI_CONTROLLER, 0).unwrap();
    assert_eq!((id[0], id[1], id[3]), (0, 13, 0), "VSL none, WZSL 32 MiB, DMRL none");
    let id = identify(&world, &mut controller, Cns::CSI_NAMESPACE, 1).unwrap();
    assert!(id.iter().all(|byte| *byte == 0), "no protection information, no storage tag");
    for cns in [Cns::CSI_NAMESPACE, Cns::CSI_CONTROLLER, Cns::CSI_ACTIVE_NAMESPACE_LIST] {
        let refused = world.run(&mut controller, &Sqe::identify_csi(1, cns, 1, Csi::ZONED));
        assert_eq!(refused, Err((INVALID, Some(47))));
    }
}

#[test]
fn the_command_set_vector_is_of_a_live_controller() {
    let world = World::new();
    let mut controller = world.io();
    let other = world.io().shared.cntlid;
    for cntid in [0xffff, controller.shared.cntlid, other] {
        let sqe = Sqe::identify(1, Cns::IO_COMMAND_SETS, 0, cntid);
        let (_, data) = world.run(&mut controller, &sqe).unwrap();
        assert_eq!((u64_at(&data, 0), u64_at(&data, 8)), (1, 0));
    }
    let refused = world.run(&mut controller, &Sqe::identify(1, Cns::IO_COMMAND_SETS, 0, 999));
    assert_eq!(refused, Err((INVALID, Some(42))));
}

#[test]
fn every_other_cns_is_an_invalid_field_for_good() {
    let world = World::new();
    let mut controller = world.io();
    let known = [0x00, 0x01, 0x02, 0x03, 0x05, 0x06, 0x07, 0x08, 0x1c];
    for cns in (0..=u8::MAX).filter(|cns| !known.contains(cns)) {
        assert_eq!(identify(&world, &mut controller, Cns(cns), 1), Err((INVALID, Some(40))), "{cns:#x}");
    }
}
