//! Registers, opening, mappings, removal.

use std::sync::Arc;

use nvme_spec::io::ReadWriteCdw12;
use nvme_spec::register::{ACQ, AQA, ASQ, CAP, CC, CRTO, Cap, Cc, Vs};
use nvme_spec::{Sqe, Status};
use spindle_nvme_pcie::{Bus, OpenFunctionError};
use spindle_reactor::mem::Area;

use super::Host;
use super::io::pattern;
use crate::{Emulator, EmulatorSpec};

fn spec() -> EmulatorSpec {
    EmulatorSpec { ready_steps: 3, ..EmulatorSpec::default() }
}

#[test]
fn capabilities_are_those_of_the_spec_and_cannot_be_written() {
    let spec = EmulatorSpec { dstrd: 2, queue_entries_max: 64, timeout: 9, ..EmulatorSpec::default() };
    let host = Host::opened(&Emulator::new(spec), 2);
    let cap = Cap::from_bits(host.bar.read64(u64::from(CAP)));
    assert_eq!((cap.queue_entries_max(), cap.dstrd(), cap.timeout_ms()), (64, 2, 4500));
    assert!(cap.cqr() && cap.css_nvm() && cap.mpsmin() == 0 && cap.mpsmax() == 0);
    assert_eq!(host.bar.read32(8), Vs::V1_4.into_bits());
    (0..8).for_each(|at| host.bar.write32(at * 4, 0));
    host.emulator.step();
    assert_eq!(host.bar.read64(u64::from(CAP)), cap.into_bits());
    assert_eq!(host.bar.read32(8), 0x0001_0400);
    // 64 pairs of I/O queues and the admin queues, 16 bytes apart.
    assert_eq!(host.bar.bytes(), 0x1000 + 0x1000);
    let version = EmulatorSpec { version: Vs::V2_0, timeout: 9, ..EmulatorSpec::default() };
    let host = Host::opened(&Emulator::new(version), 0);
    assert_eq!(host.bar.read32(u64::from(CRTO)), 9);
}

#[test]
fn ready_follows_enable_after_its_steps_both_ways() {
    let mut host = Host::new(spec());
    host.set_cc(Cc::new());
    for _ in 0..3 {
        host.emulator.step();
        assert!(host.csts().rdy());
    }
    host.emulator.step();
    assert!(!host.csts().rdy());
    host.set_cc(Host::cc());
    for _ in 0..3 {
        host.emulator.step();
        assert!(!host.csts().rdy());
    }
    host.emulator.step();
    assert!(host.csts().rdy());
    assert_eq!(host.emulator.counters().enables, 2);
    host.enable();
    host.assert_clean();
}

#[test]
fn a_controller_that_cannot_be_enabled_so_says_that_it_is_dead() {
    let write = |offset: u32, value: u32| move |host: &Host| host.bar.write32(u64::from(offset), value);
    let ways: [&dyn Fn(&Host); 6] = [
        &write(AQA, 0x000f_0000),
        &write(AQA, 0x0000_000f),
        &write(ASQ, 0x800),
        &write(ACQ, 0x10),
        &|host| host.set_cc(Host::cc().with_mps(1)),
        &|host| host.set_cc(Host::cc().with_css(1)),
    ];
    for (index, way) in ways.iter().enumerate() {
        let mut host = Host::new(EmulatorSpec::default());
        host.disable();
        host.set_cc(Host::cc());
        way(&host);
        host.emulator.steps(10);
        assert!(host.csts().cfs() && !host.csts().rdy(), "way {index}");
        assert_eq!(host.emulator.violations(), 1, "way {index}");
        host.set_cc(Cc::new());
        host.wait(|host| !host.csts().cfs());
        host.enable();
        assert!(!host.csts().cfs(), "way {index}");
    }
}

#[test]
fn disabling_forgets_queues_and_enabling_before_it_is_done_is_wrong() {
    let mut host = Host::with_io(spec());
    host.disable();
    host.enable();
    let sq = Sqe::create_io_sq(0, 1, 7, host.sq_iova(1), 1);
    assert_eq!(host.admin(sq).status(), Status::COMPLETION_QUEUE_INVALID.dnr());
    host.make_pair(1, 8);
    host.assert_clean();
    host.set_cc(Cc::new());
    host.emulator.step();
    host.set_cc(Host::cc());
    host.emulator.step();
    assert!(host.emulator.first_violation().is_some_and(|what| what.contains("before CSTS.RDY")));
}

#[test]
fn shutting_down_flushes_and_ends_the_work() {
    let mut host = Host::with_io(EmulatorSpec { has_write_cache: true, ..spec() });
    host.put(0, &pattern(3, 4096));
    let write = Sqe::write(0, 1, 0, 1, false).with_prp(host.at(0), 0);
    assert_eq!(host.io(write), Status::SUCCESS);
    host.set_cc(Host::cc().with_shn(1));
    host.emulator.step();
    assert_eq!(host.csts().shst(), 1);
    host.submit(1, Sqe::flush(0, 1).with_prp(0, 0));
    host.wait(|host| host.csts().shst() == 2);
    host.emulator.steps(10);
    assert!(host.poll(1).is_none() && host.csts().rdy());
    for seed in 0..20 {
        host.emulator.power_cut(seed);
        assert_eq!(host.emulator.read_medium(1, 0, 1), pattern(3, 4096));
    }
}

#[test]
fn a_function_reset_is_a_controller_that_was_never_enabled() {
    let mut host = Host::with_io(spec());
    host.emulator.freeze_registers();
    host.set_cc(Cc::new());
    host.emulator.steps(100);
    assert!(host.csts().rdy(), "frozen");
    host.emulator.fail_resets(1);
    assert!(host.function.reset().is_err());
    host.function.set_bus_master(false).expect("off");
    host.function.reset().expect("resets");
    assert_eq!((host.csts().into_bits(), host.bar.read32(u64::from(CC))), (0, 0));
    assert_eq!(host.bar.read64(u64::from(ASQ)), 0);
    host.enable();
    host.make_pair(1, 8);
    assert_eq!(host.io(Sqe::flush(0, 1).with_prp(0, 0)), Status::SUCCESS, "and bus mastering is on");
    assert_eq!(host.emulator.counters().function_resets, 1);
    host.assert_clean();
}

#[test]
fn without_bus_mastering_nothing_is_read_or_written() {
    let mut host = Host::with_io(spec());
    host.function.set_bus_master(false).expect("off");
    let write = Sqe::write(0, 1, 0, 1, false).with_prp(host.at(0), 0);
    host.submit(1, write);
    host.emulator.steps(50);
    assert!(host.poll(1).is_none());
    assert!(!host.emulator.holds(&(host.at(0)..host.at(4096))));
    assert_eq!((host.emulator.counters().commands, host.emulator.counters().blocked), (0, 50));
    host.function.set_bus_master(true).expect("on");
    assert!(host.emulator.holds(&(host.at(0)..host.at(4096))));
    host.emulator.step();
    assert_eq!(host.poll(1).map(|cqe| cqe.status()), Some(Status::SUCCESS));
    host.assert_clean();
}

#[test]
fn one_holder_has_it_at_a_time_and_its_registers_count() {
    let emulator = Emulator::new(spec());
    let function = emulator.open().expect("opens");
    assert!(matches!(emulator.open(), Err(OpenFunctionError::System { .. })));
    let bar = function.bar();
    drop(function);
    assert!(emulator.is_open() && emulator.open().is_err());
    bar.write32(u64::from(CC), 1);
    drop(bar);
    assert!(!emulator.is_open());
    let function = emulator.open().expect("opens again");
    assert_eq!(function.bar().read32(u64::from(CC)), 0, "reset in between");
}

#[test]
fn mappings_are_at_addresses_of_their_own_and_go_when_they_are_dropped() {
    let mut host = Host::with_io(spec());
    let area = Area::map(4096, spindle_reactor::mem::Pages::Base).expect("maps");
    let mapping = host.function.map(&area).expect("maps");
    let iova = mapping.iova().0;
    assert_ne!(iova, area.base().addr().get() as u64);
    assert_eq!(host.emulator.iova_of(area.base().addr().get() + 5), Some(mapping.iova().plus(5)));
    assert_eq!(host.emulator.mappings(), 3);
    let write = |iova| Sqe::write(0, 1, 0, 1, false).with_prp(iova, 0);
    assert_eq!(host.io(write(iova)), Status::SUCCESS);
    host.assert_clean();
    drop(mapping);
    assert_eq!(host.emulator.mappings(), 2);
    assert_eq!(host.io(write(iova)), Status::DATA_TRANSFER_ERROR);
    let first = host.emulator.first_violation().expect("one");
    assert!(first.contains(&format!("{iova:#x}")) && first.contains("data"), "{first}");
    for wrong in [0, iova - 4096, host.at(super::host::DATA_BYTES as u64), host.at(0) - 4096, u64::MAX - 4095]
    {
        let before = host.emulator.violations();
        assert_eq!(host.io(write(wrong)), Status::DATA_TRANSFER_ERROR, "{wrong:#x}");
        assert_eq!(host.emulator.violations(), before + 1, "{wrong:#x}");
    }
    let again = host.function.map(&area).expect("maps");
    assert_ne!(again.iova().0, iova, "an address is never used again");
}

#[test]
fn memory_that_is_not_writable_is_only_read() {
    let mut host = Host::with_io(spec());
    host.emulator.write_medium(1, 0, &pattern(1, 4096));
    let mapping = host.function.map(&Area::zeroes()).expect("maps");
    let read = Sqe::read(0, 1, 0, 1).with_prp(mapping.iova().0, 0);
    assert_eq!(host.io(read), Status::DATA_TRANSFER_ERROR);
    assert_eq!(host.emulator.violations(), 1);
    let write = Sqe::write(0, 1, 0, 1, false).with_prp(mapping.iova().0, 0);
    assert_eq!(host.io(write), Status::SUCCESS);
    assert_eq!(host.emulator.read_medium(1, 0, 1), vec![0; 4096]);
    assert_eq!(host.emulator.violations(), 1);
}

#[test]
fn queues_that_cannot_be_reached_are_fatal() {
    for is_completion in [false, true] {
        let mut host = Host::new(spec());
        let nowhere = 0x1000;
        let cq = if is_completion { nowhere } else { host.cq_iova(1) };
        let sq = if is_completion { host.sq_iova(1) } else { nowhere };
        assert_eq!(host.admin(Sqe::create_io_cq(0, 1, 7, cq)).status(), Status::SUCCESS);
        assert_eq!(host.admin(Sqe::create_io_sq(0, 1, 7, sq, 1)).status(), Status::SUCCESS);
        host.take_pair(super::pair(1, 1, 8, 8));
        host.submit(1, Sqe::flush(0, 1).with_prp(0, 0));
        host.emulator.steps(3);
        assert!(host.csts().cfs(), "completion {is_completion}");
        assert_eq!((host.emulator.violations(), host.emulator.counters().fatals), (1, 1));
        host.disable();
        host.enable();
        assert!(!host.csts().cfs());
    }
}

#[test]
fn doorbells_that_no_driver_writes_are_found() {
    let is_found = |act: &dyn Fn(&mut Host), words: &str| {
        let mut host = Host::with_io(spec());
        act(&mut host);
        host.emulator.steps(70);
        let first = host.emulator.first_violation().unwrap_or_default();
        assert!(first.contains(words), "{words}: {first:?}");
    };
    is_found(&|host| host.ring_tail(1, 64), "tail 64 of queue 1");
    is_found(&|host| host.ring_tail(1, 0x1_0001), "tail 65537 of queue 1");
    is_found(&|host| host.ring_head(1, 1), "head 1 of queue 1");
    is_found(&|host| host.ring_head(1, 64), "head 64 of queue 1");
    is_found(&|host| host.ring_tail(2, 1), "the tail of no queue");
    is_found(&|host| host.ring_head(64, 0), "the head of no queue");
    let early = |host: &mut Host| {
        host.disable();
        host.ring_tail(0, 0);
    };
    is_found(&early, "disabled");
    let early = |host: &mut Host| {
        host.disable();
        host.set_cc(Host::cc());
        host.emulator.step();
        host.ring_tail(1, 0);
    };
    is_found(&early, "disabled");
}

#[test]
fn a_doorbell_that_is_rung_with_the_same_value_again_is_no_wrong_and_no_work() {
    let mut host = Host::with_io(spec());
    assert_eq!(host.io(Sqe::flush(0, 1).with_prp(0, 0)), Status::SUCCESS);
    host.emulator.step();
    host.ring_tail(1, 1);
    host.ring_head(1, 1);
    assert!(!host.emulator.step());
    assert_eq!(host.emulator.counters().commands, 1);
    host.assert_clean();
}

#[test]
fn a_drive_that_vanished_reads_as_ones_and_is_opened_again_when_it_is_plugged() {
    let mut host = Host::with_io(spec());
    host.emulator.write_medium(1, 0, &pattern(7, 4096));
    host.submit(1, Sqe::read(0, 1, 0, 1).with_prp(host.at(0), 0));
    host.emulator.vanish();
    host.set_cc(Cc::new());
    host.emulator.steps(5);
    assert_eq!((host.bar.read32(0x1c), host.bar.read64(0), host.bar.read32(0x14)), (!0, !0, !0));
    assert_eq!((host.get(0, 4096), host.poll(1).is_none()), (vec![0; 4096], true));
    assert!(host.function.reset().is_err() && host.function.set_bus_master(false).is_err());
    assert!(matches!(host.emulator.open(), Err(OpenFunctionError::Missing { .. })));
    let emulator = host.emulator.clone();
    emulator.plug();
    assert!(matches!(emulator.open(), Err(OpenFunctionError::System { .. })), "still held");
    host.set_cc(Host::cc());
    emulator.steps(5);
    assert_eq!((host.bar.read32(0x1c), host.bar.read32(0x14)), (!0, !0), "the old one stays gone");
    assert!(host.function.reset().is_err());
    drop(host);
    let mut host = Host::opened(&emulator, 0);
    host.enable();
    host.make_pair(1, 8);
    let read = Sqe::read(0, 1, 0, 1).with_prp(host.at(0), 0);
    assert_eq!(host.io(read), Status::SUCCESS);
    assert_eq!(host.get(0, 4096), pattern(7, 4096));
    assert_eq!(emulator.counters().vanished, 1);
    host.assert_clean();
}

#[test]
fn another_drive_may_come_in_its_place() {
    let host = Host::with_io(spec());
    host.emulator.write_medium(1, 0, &pattern(7, 4096));
    let emulator = host.emulator.clone();
    emulator.plug_other(EmulatorSpec { serial: "OTHER".to_owned(), ..spec() });
    assert_eq!(host.csts().into_bits(), !0);
    host.ring_tail(1, 3);
    drop(host);
    let mut host = Host::opened(&emulator, 0);
    host.enable();
    let identify = Sqe::identify(0, nvme_spec::identify::Cns::CONTROLLER, 0, 0).with_prp(host.at(0), 0);
    assert_eq!(host.admin(identify).status(), Status::SUCCESS);
    assert_eq!(host.get(4, 6), b"OTHER ");
    assert_eq!(emulator.read_medium(1, 0, 1), vec![0; 4096]);
    host.assert_clean();
}

#[test]
fn a_drive_that_was_asked_back_is_gone_when_it_is_closed() {
    let host = Host::new(spec());
    let (emulator, function) = (host.emulator.clone(), Arc::clone(&host.function));
    assert!(!function.is_removal_asked());
    emulator.ask_removal();
    assert!(function.is_removal_asked());
    drop(host);
    drop(function);
    assert!(matches!(emulator.open(), Err(OpenFunctionError::Missing { .. })));
    emulator.plug();
    assert!(!emulator.open().expect("opens").is_removal_asked());
}

#[test]
fn mappings_of_an_earlier_opening_mean_nothing() {
    let mut host = Host::with_io(spec());
    let area = Area::map(4096, spindle_reactor::mem::Pages::Base).expect("maps");
    let old = host.function.map(&area).expect("maps");
    let emulator = host.emulator.clone();
    let write = Sqe::write(0, 1, 0, 1, false).with_prp(old.iova().0, 0);
    assert_eq!(host.io(write), Status::SUCCESS);
    drop(host);
    let mut host = Host::opened(&emulator, 0);
    host.enable();
    host.make_pair(1, 8);
    assert_eq!(host.io(write), Status::DATA_TRANSFER_ERROR);
    drop(old);
    assert_eq!(emulator.mappings(), 2);
}

#[test]
fn nothing_of_a_write_is_taken_that_cannot_be_read_to_its_end() {
    let mut host = Host::with_io(spec());
    host.put(0, &pattern(9, 4096));
    let mut write = Sqe::write(0, 1, 0, 2, false).with_prp(host.at(0), 0x1000);
    assert_eq!(host.io(write), Status::DATA_TRANSFER_ERROR);
    assert_eq!(host.emulator.read_medium(1, 0, 2), vec![0; 8192]);
    write.cdw12 = ReadWriteCdw12::new().into();
    assert_eq!(host.io(write), Status::SUCCESS);
}
