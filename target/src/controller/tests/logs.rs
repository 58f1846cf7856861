//! Log pages: their bytes, any part of them, and what reading clears.

use std::cell::RefCell;
use std::sync::atomic::Ordering::Relaxed;

use nvme_spec::log::LogId;
use nvme_spec::zerocopy::little_endian::U32;
use proptest::prelude::*;

use super::*;
use crate::controller::{DISCOVERY_PAGES, ErrorRecord, IO_PAGES};

const INVALID: Status = Status::INVALID_FIELD.dnr();
const ALL: u32 = 0xffff_ffff;

fn read(
    world: &World,
    controller: &mut Controller,
    lid: LogId,
    nsid: u32,
    bytes: u32,
) -> Result<Vec<u8>, Refused> {
    world.run(controller, &Sqe::get_log_page(1, lid, nsid, bytes, 0, true)).map(|(_, data)| data)
}

#[test]
fn the_list_of_pages_names_exactly_those_that_can_be_read() {
    let world = World::new();
    for mut controller in [world.io(), world.discovery(0)] {
        let supported = read(&world, &mut controller, LogId::SUPPORTED_LOG_PAGES, 0, 1024).unwrap();
        for lid in 0..=u8::MAX {
            let answer = read(&world, &mut controller, LogId(lid), 0, 4);
            let is_supported = supported[usize::from(lid) * 4] & 1 == 1;
            match answer {
                Ok(_) => assert!(is_supported, "{lid:#x}"),
                Err(refused) => {
                    assert_eq!(refused, (Status::INVALID_LOG_PAGE.dnr(), Some(40)), "{lid:#x}");
                    assert!(!is_supported, "{lid:#x}");
                }
            }
        }
    }
}

#[test]
fn each_page_has_its_length_and_its_content() {
    let world = World::new();
    let mut io = world.io();
    io.on_error(error(1));
    let mut new = World::new();
    new.subsystem().namespaces[0] = None;
    io.on_snapshot(&world.snapshot, &new.snapshot);
    for mut controller in [io, world.discovery(0)] {
        for lid in controller.pages() {
            let bytes = controller.log_bytes(&world.cx(), *lid);
            assert!(bytes > 0, "{lid:?} has a length in log_bytes");
            let log = read(&world, &mut controller, *lid, 0, 16 * 1024).unwrap();
            let (log, beyond) = log.split_at(usize::try_from(bytes).unwrap());
            let is_zero = log.iter().all(|byte| *byte == 0);
            assert_eq!(is_zero, *lid == LogId::MI_COMMAND_EFFECTS, "{lid:?} has its content in get_log");
            assert!(beyond.iter().all(|byte| *byte == 0), "{lid:?} ends where log_bytes says");
        }
    }
}

#[test]
fn the_table_of_log_pages_in_the_documents_has_each_page() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/operating.md");
    let text = std::fs::read_to_string(path).unwrap();
    let (_, section) =
        text.split_once("### Log pages").expect("a heading \"### Log pages\" in docs/operating.md");
    let section = section.split("\n#").next().unwrap();
    let pages_of = |controller: &str| -> Vec<LogId> {
        let lid = |row: &str| {
            let (lid, columns) = row.strip_prefix("| ")?.split_once("h |")?;
            let is_of =
                columns.trim_end_matches(" |").rsplit("| ").next()?.split(", ").any(|it| it == controller);
            is_of.then(|| u8::from_str_radix(lid, 16).ok())?.map(LogId)
        };
        section.lines().filter_map(lid).collect()
    };
    assert_eq!(pages_of("I/O"), IO_PAGES, "rows `| XXh | page | controllers |` of docs/operating.md");
    assert_eq!(pages_of("discovery"), DISCOVERY_PAGES, "rows `| XXh | page | controllers |`");
}

#[test]
fn the_smart_log_counts_what_was_done() {
    let mut world = World::new();
    world.now = Nanos::from_secs(400 + 3 * 3600 + 10);
    let mut controller = world.io();
    let subsystem = &world.snapshot.subsystems[0];
    let first = subsystem.namespace(1).unwrap().counters.core(0);
    first.units_read.store(1001, Relaxed);
    first.reads.store(7, Relaxed);
    first.busy_ns.store(125_000_000_000, Relaxed);
    let second = subsystem.namespace(3).unwrap().counters.core(1);
    second.units_read.store(1, Relaxed);
    second.units_written.store(1, Relaxed);
    second.writes.store(9, Relaxed);
    second.media_errors.store(2, Relaxed);
    second.busy_ns.store(70_000_000_000, Relaxed);
    controller.on_error(error(1));
    for nsid in [0, ALL] {
        let log = read(&world, &mut controller, LogId::SMART, nsid, 512).unwrap();
        assert_eq!((log[0], u16_at(&log, 1)), (0, 300), "no warning, 300 K");
        assert_eq!((log[3], log[4], log[5]), (100, 10, 0), "spare, threshold, used");
        let counters = [32, 48, 64, 80, 96, 112, 128, 144, 160, 176].map(|at| u64_at(&log, at));
        // Data units read and written, reads, writes, busy minutes, power cycles, hours, unsafe shutdowns,
        // media, errors.
        assert_eq!(counters, [2, 1, 7, 9, 2, 0, 3, 0, 2, 1]);
    }
    first.busy_ns.store(u64::MAX, Relaxed);
    let log = read(&world, &mut controller, LogId::SMART, ALL, 512).unwrap();
    assert_eq!(u64_at(&log, 96), 3 * 60, "no longer than it is on");
    let log = read(&world, &mut controller, LogId::SMART, 3, 512).unwrap();
    assert_eq!([32, 48, 64, 80, 160].map(|at| u64_at(&log, at)), [1, 1, 0, 9, 2]);
    let refused = read(&world, &mut controller, LogId::SMART, 2, 512);
    assert_eq!(refused, Err((Status::INVALID_NAMESPACE_OR_FORMAT.dnr(), Some(4))));
}

#[test]
fn busy_time_is_that_of_the_busiest_core_and_neither_rises_while_idle_nor_falls() {
    const MINUTE: u64 = 60_000_000_000;
    let mut world = World::new();
    world.now = Nanos::from_secs(400 + 3600);
    let mut controller = world.io();
    let busy_minutes = |world: &World, controller: &mut Controller, nsid: u32| {
        u64_at(&read(world, controller, LogId::SMART, nsid, 512).unwrap(), 96)
    };
    // Four times 50 minutes at once, within the first hour.
    for nsid in [1, 3] {
        let counters = &world.snapshot.subsystems[0].namespace(nsid).unwrap().counters;
        (0..2).for_each(|core| counters.core(core).busy_ns.store(50 * MINUTE, Relaxed));
    }
    for nsid in [ALL, 1, 3] {
        assert_eq!(busy_minutes(&world, &mut controller, nsid), 50, "namespace {nsid:#x}");
    }
    world.now = Nanos::from_secs(400 + 10 * 3600);
    assert_eq!(busy_minutes(&world, &mut controller, ALL), 50, "nothing was done since");
    let counters = Arc::clone(&world.snapshot.subsystems[0].namespace(1).unwrap().counters);
    counters.core(1).busy_ns.store(52 * MINUTE, Relaxed);
    assert_eq!([ALL, 1, 3].map(|nsid| busy_minutes(&world, &mut controller, nsid)), [52, 52, 50]);
    // A reload takes the busiest namespace away.
    world.subsystem().namespaces[0] = None;
    assert_eq!([ALL, 3].map(|nsid| busy_minutes(&world, &mut controller, nsid)), [52, 50]);
}

fn error(cid: u16) -> ErrorRecord {
    ErrorRecord {
        sqid: 2,
        cid,
        status: Status::LBA_OUT_OF_RANGE.dnr(),
        field: Some(40),
        lba: 0x12_3456_789a,
        nsid: 3,
    }
}

#[test]
fn the_error_log_has_the_newest_first_with_the_field_to_blame() {
    let world = World::new();
    let mut controller = world.io();
    let empty = read(&world, &mut controller, LogId::ERROR, ALL, 4096).unwrap();
    assert!(empty.iter().all(|byte| *byte == 0));
    for cid in 1..=70 {
        controller.on_error(error(cid));
    }
    controller.on_error(ErrorRecord { field: None, ..error(71) });
    let log = read(&world, &mut controller, LogId::ERROR, ALL, 4096).unwrap();
    assert_eq!((u64_at(&log, 0), u16_at(&log, 8), u16_at(&log, 10), u16_at(&log, 14)), (71, 2, 71, 0xffff));
    let second = &log[64..128];
    assert_eq!((u64_at(second, 0), u16_at(second, 10)), (70, 70));
    assert_eq!(u16_at(second, 12), 0x8100, "status above the phase tag");
    assert_eq!(u16_at(second, 14), 40, "parameter error location");
    assert_eq!((u64_at(second, 16), u32_at(second, 24), second[29]), (0x12_3456_789a, 3, 3));
    assert_eq!(u64_at(&log, 63 * 64), 8, "64 entries are kept");
}

#[test]
fn there_is_one_firmware_slot() {
    let world = World::new();
    let log = read(&world, &mut world.io(), LogId::FIRMWARE_SLOT, ALL, 512).unwrap();
    assert_eq!((log[0], &log[8..16]), (1, &b"0.1.0   "[..]));
    assert!(log[16..].iter().all(|byte| *byte == 0));
}

#[test]
fn the_effects_log_names_the_commands_that_work() {
    let world = World::new();
    let mut controller = world.io();
    let log = read(&world, &mut controller, LogId::COMMAND_EFFECTS, ALL, 4096).unwrap();
    let admin: Vec<_> = (0..256).filter(|opcode| log[opcode * 4] & 1 == 1).collect();
    assert_eq!(admin, [0x02, 0x06, 0x08, 0x09, 0x0a, 0x0c, 0x18, 0xc0]);
    let io: Vec<_> = (0..256).filter(|opcode| log[1024 + opcode * 4] & 1 == 1).collect();
    assert_eq!(io, [0x00, 0x01, 0x02, 0x05, 0x08, 0x09, 0x0c, 0x19]);
    let changing: Vec<_> = (0..256).filter(|opcode| log[1024 + opcode * 4] & 2 == 2).collect();
    assert_eq!(changing, [0x01, 0x08, 0x09, 0x19]);
    let is_plain = (0..256).all(|opcode| u32_at(&log, 1024 + opcode * 4) & !3 == 0);
    assert!(is_plain, "Linux warns of any bit but CSUPP and LBCC");
    let mut zoned = Sqe::get_log_page(1, LogId::COMMAND_EFFECTS, ALL, 4096, 0, true);
    zoned.cdw14 = U32::new(2 << 24);
    assert_eq!(world.run(&mut controller, &zoned), Err((INVALID, Some(56))));
}

#[test]
fn the_feature_log_names_the_features_that_can_be_got() {
    use nvme_spec::feature::{FeatureId, FeatureSelect};
    let world = World::new();
    let mut controller = world.io();
    let log = read(&world, &mut controller, LogId::FEATURE_EFFECTS, ALL, 1024).unwrap();
    for fid in 0..=u8::MAX {
        let sqe = Sqe::get_features(1, FeatureId(fid), FeatureSelect::SUPPORTED, 0, 0);
        let is_named = log[usize::from(fid) * 4] & 1 == 1;
        assert_eq!(world.run(&mut controller, &sqe).is_ok(), is_named, "{fid:#x}");
    }
}

#[test]
fn only_the_smart_log_may_be_asked_for_a_namespace() {
    let world = World::new();
    let mut controller = world.io();
    for lid in IO_PAGES {
        let refused = (*lid != LogId::SMART).then_some((INVALID, Some(4)));
        assert_eq!(read(&world, &mut controller, *lid, 1, 512).err(), refused, "{lid:?}");
        assert!(read(&world, &mut controller, *lid, 0, 512).is_ok(), "{lid:?}");
    }
}

#[test]
fn offsets_are_in_dwords_and_within_the_page() {
    let world = World::new();
    let mut controller = world.io();
    let at = |offset| Sqe::get_log_page(1, LogId::SMART, ALL, 512, offset, true);
    for offset in [1, 2, 3, 513, 516, u64::MAX - 3, u64::MAX] {
        assert_eq!(world.run(&mut controller, &at(offset)), Err((INVALID, Some(48))), "{offset}");
    }
    for offset in [0, 4, 508, 512] {
        assert!(world.run(&mut controller, &at(offset)).is_ok(), "{offset}");
    }
    let mut indexed = at(0);
    indexed.cdw14 = U32::new(1 << 23);
    assert_eq!(world.run(&mut controller, &indexed), Err((INVALID, Some(56))));
}

#[test]
fn a_length_beyond_mdts_is_refused_in_all_32_bits() {
    let world = World::new();
    let mut controller = world.io();
    let mut sqe = Sqe::get_log_page(1, LogId::ERROR, ALL, 1 << 20, 0, true);
    assert_eq!(controller.need(&world.cx(), &sqe), Ok(Need { memory: 4096, ..Need::to_host(1 << 20) }));
    for numdu in [4, 0x4000, 0xffff] {
        sqe.cdw11 = U32::new(numdu);
        assert_eq!(world.run(&mut controller, &sqe), Err((INVALID, Some(42))), "{numdu:#x}");
    }
}

#[test]
fn a_page_that_is_shorter_than_the_buffer_ends_in_zeroes() {
    let world = World::new();
    let log = read(&world, &mut world.io(), LogId::FIRMWARE_SLOT, ALL, 8192).unwrap();
    assert!(log[16..].iter().all(|byte| *byte == 0));
}

#[test]
fn only_a_controller_with_an_error_log_says_that_it_keeps_an_entry() {
    let world = World::new();
    assert!(world.io().on_error(error(1)));
    assert!(!world.discovery(0).on_error(error(1)));
}

#[test]
fn any_part_of_any_page_is_that_part_of_the_whole_page() {
    let world = World::new();
    let mut io = world.io();
    for cid in 1..=80 {
        io.on_error(error(cid));
    }
    let old = World::new();
    let mut new = World::new();
    new.subsystem().namespaces[0] = None;
    io.on_snapshot(&old.snapshot, &new.snapshot);
    let (io, discovery) = (RefCell::new(io), RefCell::new(world.discovery(0)));
    let strategy = (0..IO_PAGES.len() + DISCOVERY_PAGES.len(), 0_u64..2000, 1_u32..1500);
    proptest!(|((page, dword, dwords) in strategy)| {
        let (controller, lid) = match IO_PAGES.get(page) {
            Some(lid) => (&io, *lid),
            None => (&discovery, DISCOVERY_PAGES[page - IO_PAGES.len()]),
        };
        let controller = &mut controller.borrow_mut();
        let whole = read(&world, controller, lid, 0, 16 * 1024).unwrap();
        let part = world.run(controller, &Sqe::get_log_page(1, lid, 0, dwords * 4, dword * 4, true));
        match part {
            Ok((_, part)) => {
                let mut padded = whole;
                padded.resize(64 * 1024, 0);
                let start = usize::try_from(dword * 4).unwrap();
                prop_assert_eq!(&part[..], &padded[start..start + part.len()]);
            }
            Err(refused) => prop_assert_eq!(refused, (INVALID, Some(48))),
        }
    });
}
