//! Admin commands.

use nvme_spec::admin::{AsyncEvent, AsyncEventType, AsyncNotice};
use nvme_spec::feature::{FeatureId, FeatureSelect, NumberOfQueues};
use nvme_spec::identify::{Cns, Csi, IdentifyController, IdentifyNamespace, NamespaceDescriptor, Oncs};
use nvme_spec::log::{ErrorLogEntry, LogId, SmartLog};
use nvme_spec::pcie::CreateCqCdw11;
use nvme_spec::register::Vs;
use nvme_spec::sqe::{Fuse, NSID_ALL};
use nvme_spec::zerocopy::FromBytes;
use nvme_spec::{AdminOpcode, Sqe, Status};

use super::Host;
use crate::{EmulatorSpec, Injection, NamespaceSpec};

fn two() -> EmulatorSpec {
    let second = NamespaceSpec { blocks: 1000, block_bytes: 512, noiob: 256, ..NamespaceSpec::default() };
    EmulatorSpec { namespaces: vec![NamespaceSpec::default(), second], ..EmulatorSpec::default() }
}

/// Status and data of an Identify, at an odd offset so that it takes two pages.
fn identify(host: &mut Host, sqe: Sqe) -> (Status, Vec<u8>) {
    host.put(512, &[0xee; 4096]);
    let status = host.admin(sqe.with_prp(host.at(512), host.at(4096))).status();
    (status, host.get(512, 4096))
}

#[test]
fn identify_controller_says_what_the_spec_says() {
    let spec = EmulatorSpec { has_write_cache: true, has_doorbell_buffer: true, mdts: 5, ..two() };
    let mut host = Host::new(EmulatorSpec { serial: "S".repeat(30), version: Vs::V1_3, ..spec });
    let (status, data) = identify(&mut host, Sqe::identify(0, Cns::CONTROLLER, 0, 0));
    assert_eq!(status, Status::SUCCESS);
    assert_eq!(data[4..24], [b'S'; 20]);
    assert_eq!(&data[24..47], b"Spindle emulated drive ");
    assert_eq!((data[77], &data[80..84], data[111]), (5, &[0, 3, 1, 0][..], 1));
    assert_eq!((&data[256..260], &data[512..514]), (&[0, 1, 3, 3][..], &[0x66, 0x44][..]));
    // NN 2; Compare, DSM, Write Zeroes, Save, Verify, Copy; a cache that flushes all; SGLs of bytes.
    assert_eq!(
        (&data[516..522], data[525], &data[536..540]),
        (&[2, 0, 0, 0, 0x9d, 1][..], 7, &[1, 0, 0, 0][..])
    );
    let id = IdentifyController::read_from_bytes(&data[..]).expect("a page");
    assert_eq!((id.model(), id.firmware()), ("Spindle emulated drive", "1.0"));
    let oncs = Oncs::new().with_verify(true).with_reservations(true);
    let mut host = Host::new(EmulatorSpec { oncs, ..EmulatorSpec::default() });
    let (_, data) = identify(&mut host, Sqe::identify(0, Cns::CONTROLLER, 0, 0));
    assert_eq!((&data[520..522], data[525] & 1), (&[0x80, 0][..], 0), "only what there is");
}

#[test]
fn identify_namespace_says_size_format_and_what_deallocated_blocks_are() {
    let mut host = Host::new(two());
    let (_, data) = identify(&mut host, Sqe::identify(0, Cns::NAMESPACE, 2, 0));
    assert_eq!(data[..8], 1000_u64.to_le_bytes());
    assert_eq!((data[33], &data[46..48], &data[128..132]), (9, &[0, 1][..], &[0, 0, 9, 0][..]));
    let (_, first) = identify(&mut host, Sqe::identify(0, Cns::NAMESPACE, 1, 0));
    let one = IdentifyNamespace::read_from_bytes(&first[..]).expect("a page");
    assert_eq!((one.nsze.get(), one.block_bytes(), one.mssrl.get()), (16_384, Some(4096), 128));
    assert_ne!(one.nguid[..], data[104..120]);
    let (status, list) = identify(&mut host, Sqe::identify(0, Cns::ACTIVE_NAMESPACE_LIST, 0, 0));
    assert_eq!((status, &list[..12]), (Status::SUCCESS, &[1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0][..]));
    let (_, list) = identify(&mut host, Sqe::identify_csi(0, Cns::CSI_ACTIVE_NAMESPACE_LIST, 1, Csi::NVM));
    assert_eq!(list[..8], [2, 0, 0, 0, 0, 0, 0, 0]);
    let (_, descriptors) = identify(&mut host, Sqe::identify(0, Cns::NAMESPACE_DESCRIPTORS, 1, 0));
    let found: Vec<_> =
        NamespaceDescriptor::iter(&descriptors).map(|(kind, id)| (kind.0, id.len())).collect();
    assert_eq!(found, [(1, 8), (2, 16), (4, 1)]);
    assert_eq!(descriptors[16..32], one.nguid);
    host.assert_clean();
}

#[test]
fn identify_refuses_what_there_is_not() {
    let mut host = Host::new(two());
    let (field, namespace) = (Status::INVALID_FIELD.dnr(), Status::INVALID_NAMESPACE_OR_FORMAT.dnr());
    let table = [
        (Sqe::identify(0, Cns::NAMESPACE, 0, 0), namespace),
        (Sqe::identify(0, Cns::NAMESPACE, 3, 0), namespace),
        (Sqe::identify(0, Cns::NAMESPACE, NSID_ALL, 0), namespace),
        (Sqe::identify(0, Cns::NAMESPACE_DESCRIPTORS, 3, 0), namespace),
        (Sqe::identify(0, Cns::ACTIVE_NAMESPACE_LIST, 0xffff_fffe, 0), namespace),
        (Sqe::identify(0, Cns::NVM_SET_LIST, 0, 0), field),
        (Sqe::identify(0, Cns(0xff), 0, 0), field),
        (Sqe::identify_csi(0, Cns::CSI_NAMESPACE, 1, Csi::ZONED), Status::INVALID_IO_COMMAND_SET.dnr()),
        (Sqe::identify_csi(0, Cns::CSI_NAMESPACE, 1, Csi::NVM), Status::SUCCESS),
        (Sqe::identify_csi(0, Cns::CSI_CONTROLLER, 0, Csi::NVM), Status::SUCCESS),
        (Sqe::identify(0, Cns::INDEPENDENT_NAMESPACE, 1, 0), Status::SUCCESS),
        (Sqe::identify(0, Cns::CONTROLLER_LIST, 0, 0), Status::SUCCESS),
        (Sqe::identify(0, Cns::IO_COMMAND_SETS, 0, 0), Status::SUCCESS),
    ];
    for (sqe, wanted) in table {
        let (status, data) = identify(&mut host, sqe);
        assert_eq!(status, wanted, "{sqe:?}");
        assert_eq!(data == [0xee; 4096], !wanted.is_success(), "written if and only if it succeeds");
    }
    let odd = Sqe::identify(0, Cns::CONTROLLER, 0, 0).with_prp(host.at(514), host.at(4096));
    assert_eq!(host.admin(odd).status(), Status::PRP_OFFSET_INVALID.dnr());
    host.assert_clean();
}

#[test]
fn queues_are_made_and_deleted_by_the_rules() {
    let mut host =
        Host::new(EmulatorSpec { queue_pairs: 4, queue_entries_max: 128, ..EmulatorSpec::default() });
    let (sq, cq) = (host.sq_iova(1), host.cq_iova(1));
    let (id, size) = (Status::INVALID_QUEUE_ID.dnr(), Status::INVALID_QUEUE_SIZE.dnr());
    let (field, offset) = (Status::INVALID_FIELD.dnr(), Status::PRP_OFFSET_INVALID.dnr());
    let flags = |sqe: Sqe, cdw11: u32| Sqe { cdw11: cdw11.into(), ..sqe };
    let interrupts = CreateCqCdw11::new().with_contiguous(true).with_interrupts(true);
    let table = [
        (Sqe::create_io_cq(0, 0, 7, cq), id),
        (Sqe::create_io_cq(0, 5, 7, cq), id),
        (Sqe::create_io_cq(0, 1, 0, cq), size),
        (Sqe::create_io_cq(0, 1, 128, cq), size),
        (Sqe::create_io_cq(0, 1, 7, cq + 8), offset),
        (flags(Sqe::create_io_cq(0, 1, 7, cq), 0), field),
        (
            flags(Sqe::create_io_cq(0, 1, 7, cq), interrupts.into_bits()),
            Status::INVALID_INTERRUPT_VECTOR.dnr(),
        ),
        (Sqe::create_io_sq(0, 1, 7, sq, 1), Status::COMPLETION_QUEUE_INVALID.dnr()),
        (Sqe::create_io_cq(0, 1, 127, cq), Status::SUCCESS),
        (Sqe::create_io_cq(0, 1, 7, cq), id),
        (Sqe::create_io_sq(0, 0, 7, sq, 1), id),
        (Sqe::create_io_sq(0, 5, 7, sq, 1), id),
        (Sqe::create_io_sq(0, 1, 7, sq, 0), id),
        (Sqe::create_io_sq(0, 1, 7, sq, 5), id),
        (Sqe::create_io_sq(0, 1, 7, sq, 2), Status::COMPLETION_QUEUE_INVALID.dnr()),
        (Sqe::create_io_sq(0, 1, 0, sq, 1), size),
        (Sqe::create_io_sq(0, 1, 128, sq, 1), size),
        (Sqe::create_io_sq(0, 1, 7, sq + 2048, 1), offset),
        (flags(Sqe::create_io_sq(0, 1, 7, sq, 1), 1 << 16), field),
        (Sqe::create_io_sq(0, 4, 127, sq, 1), Status::SUCCESS),
        (Sqe::create_io_sq(0, 4, 7, sq, 1), id),
        (Sqe::delete_io_cq(0, 1), Status::INVALID_QUEUE_DELETION.dnr()),
        (Sqe::delete_io_cq(0, 0), id),
        (Sqe::delete_io_sq(0, 0), id),
        (Sqe::delete_io_cq(0, 2), id),
        (Sqe::delete_io_sq(0, 1), id),
        (Sqe::delete_io_sq(0, 4), Status::SUCCESS),
        (Sqe::delete_io_sq(0, 4), id),
        (Sqe::delete_io_cq(0, 1), Status::SUCCESS),
        (Sqe::delete_io_cq(0, 1), id),
    ];
    for (sqe, wanted) in table {
        assert_eq!(host.admin(sqe).status(), wanted, "{sqe:?}");
    }
    host.set_cc(nvme_spec::register::Cc::new().with_en(true));
    assert_eq!(host.admin(Sqe::create_io_cq(0, 1, 7, cq)).status(), size, "CC.IOCQES is not 4");
    host.assert_clean();
}

#[test]
fn what_is_no_command_is_refused() {
    let mut host = Host::new(EmulatorSpec::default());
    let known = [0, 1, 2, 4, 5, 6, 8, 9, 10, 12];
    for opcode in (0..=255).filter(|opcode| !known.contains(opcode)) {
        let sqe = Sqe::new(opcode, 0, 0).with_prp(host.at(0), 0);
        assert_eq!(host.admin(sqe).status(), Status::INVALID_OPCODE.dnr(), "{opcode:#x}");
    }
    let fused = Sqe::identify(0, Cns::CONTROLLER, 0, 0).with_prp(host.at(0), 0).with_fuse(Fuse::SECOND);
    assert_eq!(host.admin(fused).status(), Status::INVALID_FIELD.dnr());
    host.assert_clean();
}

#[test]
fn features_are_set_and_got() {
    let mut host =
        Host::new(EmulatorSpec { has_write_cache: true, queue_pairs: 3, ..EmulatorSpec::default() });
    let field = Status::INVALID_FIELD.dnr();
    let cqe =
        host.admin(Sqe::set_features(0, FeatureId::NUMBER_OF_QUEUES, 0, NumberOfQueues::both(8).into_bits()));
    assert_eq!((cqe.status(), cqe.result_u32()), (Status::SUCCESS, 0x0002_0002));
    let all = Sqe::set_features(0, FeatureId::NUMBER_OF_QUEUES, 0, 0xffff_0000);
    assert_eq!(host.admin(all).status(), field);
    let get = |host: &mut Host, fid, select, argument| {
        let cqe = host.admin(Sqe::get_features(0, fid, select, 0, argument));
        (cqe.status(), cqe.result_u32())
    };
    let (cache, temperature) = (FeatureId::VOLATILE_WRITE_CACHE, FeatureId::TEMPERATURE_THRESHOLD);
    let (current, default) = (FeatureSelect::CURRENT, FeatureSelect::DEFAULT);
    assert_eq!(get(&mut host, cache, current, 0), (Status::SUCCESS, 1));
    assert_eq!(host.admin(Sqe::set_features(0, cache, 0, 0)).status(), Status::SUCCESS);
    assert_eq!(get(&mut host, cache, current, 0), (Status::SUCCESS, 0));
    assert_eq!(get(&mut host, cache, default, 0), (Status::SUCCESS, 1));
    assert_eq!(get(&mut host, cache, FeatureSelect::SUPPORTED, 0), (Status::SUCCESS, 4));
    assert_eq!(get(&mut host, cache, FeatureSelect(4), 0), (field, 0));
    assert_eq!(get(&mut host, temperature, current, 0), (Status::SUCCESS, 343));
    assert_eq!(host.admin(Sqe::set_features(0, temperature, 0, 0x10_0140)).status(), Status::SUCCESS);
    assert_eq!(get(&mut host, temperature, current, 0x10_0000), (Status::SUCCESS, 0x140));
    assert_eq!(get(&mut host, temperature, current, 0x1_0000), (field, 0));
    assert_eq!(get(&mut host, FeatureId::NUMBER_OF_QUEUES, current, 0), (Status::SUCCESS, 0x0002_0002));
    assert_eq!(get(&mut host, FeatureId::TIMESTAMP, current, 0), (field, 0));
    let mut save = Sqe::set_features(0, cache, 0, 1);
    save.cdw10 = (save.cdw10() | 1 << 31).into();
    assert_eq!(host.admin(save).status(), Status::FEATURE_NOT_SAVEABLE.dnr());
    let of_namespace = Sqe::set_features(0, cache, 1, 1);
    assert_eq!(host.admin(of_namespace).status(), Status::FEATURE_NOT_NAMESPACE_SPECIFIC.dnr());
    host.make_pair(1, 8);
    let late = Sqe::set_features(0, FeatureId::NUMBER_OF_QUEUES, 0, 0);
    assert_eq!(host.admin(late).status(), Status::COMMAND_SEQUENCE_ERROR.dnr());
    host.disable();
    host.enable();
    assert_eq!(get(&mut host, cache, current, 0), (Status::SUCCESS, 1), "the reset brings the default back");
    let mut host = Host::new(EmulatorSpec { oncs: Oncs::new(), ..EmulatorSpec::default() });
    assert_eq!(get(&mut host, cache, current, 0), (field, 0), "no cache");
    assert_eq!(get(&mut host, temperature, default, 0), (field, 0), "no Save and Select");
}

/// Status and data of a Get Log Page.
fn log(host: &mut Host, lid: LogId, bytes: u32, offset: u64, rae: bool) -> (Status, Vec<u8>) {
    host.put(0, &vec![0xee; bytes as usize]);
    let sqe = Sqe::get_log_page(0, lid, NSID_ALL, bytes, offset, rae).with_prp(host.at(0), host.at(4096));
    (host.admin(sqe).status(), host.get(0, bytes as usize))
}

#[test]
fn log_pages_are_read_in_whole_and_in_parts() {
    let mut host = Host::with_io(EmulatorSpec::default());
    host.emulator.set_health(|health| {
        health.temperature = 320;
        health.percentage_used = 7;
        health.media_errors = 0x0102_0304_0506;
    });
    assert_eq!(host.io(Sqe::read(0, 1, 0, 1).with_prp(host.at(0), 0)), Status::SUCCESS);
    assert_eq!(
        host.io(Sqe::read(0, 9, 0, 1).with_prp(host.at(0), 0)),
        Status::INVALID_NAMESPACE_OR_FORMAT.dnr()
    );
    let (status, data) = log(&mut host, LogId::SMART, 512, 0, false);
    assert_eq!((status, &data[..6]), (Status::SUCCESS, &[0, 0x40, 1, 100, 10, 7][..]));
    let smart = SmartLog::read_from_bytes(&data[..]).expect("512 bytes");
    assert_eq!((smart.data_units_read.get(), smart.host_reads.get()), (1, 1));
    assert_eq!((smart.media_errors.get(), smart.error_log_entries.get()), (0x0102_0304_0506, 1));
    assert_eq!(log(&mut host, LogId::SMART, 8, 160, false).1, [6, 5, 4, 3, 2, 1, 0, 0]);
    assert_eq!(log(&mut host, LogId::SMART, 8, 508, false).1, [0; 8], "zeroes behind the end");
    let (_, data) = log(&mut host, LogId::FIRMWARE_SLOT, 512, 0, false);
    assert_eq!((data[0], &data[8..24]), (1, b"1.0     \0\0\0\0\0\0\0\0".as_slice()));
    let (_, data) = log(&mut host, LogId::ERROR, 4096, 0, false);
    let entry = ErrorLogEntry::read_from_prefix(&data).expect("an entry").0;
    assert_eq!((entry.error_count.get(), entry.sqid.get()), (1, 1));
    assert_eq!(entry.status.get(), Status::INVALID_NAMESPACE_OR_FORMAT.dnr().to_wire(false));
    assert!(data[64..].iter().all(|byte| *byte == 0));
    let field = Status::INVALID_FIELD.dnr();
    assert_eq!(log(&mut host, LogId::ANA, 512, 0, false).0, Status::INVALID_LOG_PAGE.dnr());
    assert_eq!(log(&mut host, LogId::SMART, 8, 516, false).0, field, "LPO behind the end");
    assert_eq!(log(&mut host, LogId::SMART, 8, 2, false).0, field, "LPO not of dwords");
    let long = Sqe::get_log_page(0, LogId::SMART, 0, (1 << 20) + 4, 0, false).with_prp(host.at(0), 0);
    assert_eq!(host.admin(long).status(), field, "more than MDTS");
    let of_namespace = Sqe::get_log_page(0, LogId::SMART, 1, 512, 0, false).with_prp(host.at(0), 0);
    assert_eq!(host.admin(of_namespace).status(), field);
    host.assert_clean();
}

const CHANGED: AsyncEvent = AsyncEvent::notice(AsyncNotice::NAMESPACE_CHANGED, LogId::CHANGED_NAMESPACES);

#[test]
fn a_namespace_that_changed_is_told_once_until_its_log_is_read() {
    let mut host = Host::new(two());
    let request = Sqe::async_event_request(0).with_prp(0, 0);
    let first = host.submit(0, request);
    let second = host.submit(0, request);
    host.emulator.set_namespace_blocks(2, 500);
    host.emulator.steps(3);
    assert!(host.poll(0).is_none(), "not asked for");
    let config = Sqe::set_features(0, FeatureId::ASYNC_EVENT_CONFIG, 0, 1 << 8);
    assert_eq!(host.admin(config).status(), Status::SUCCESS);
    host.emulator.set_namespace_blocks(1, 2000);
    host.emulator.set_namespace_blocks(2, 2000);
    host.emulator.steps(3);
    let cqe = host.poll(0).expect("an event");
    assert_eq!((cqe.cid(), cqe.result_u32()), (first, CHANGED.into_bits()));
    assert!(host.poll(0).is_none(), "once");
    let (_, data) = log(&mut host, LogId::CHANGED_NAMESPACES, 16, 0, true);
    assert_eq!(data, [1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    host.emulator.set_namespace_blocks(1, 2001);
    host.emulator.steps(3);
    assert!(host.poll(0).is_none(), "the log was read with RAE");
    log(&mut host, LogId::CHANGED_NAMESPACES, 4096, 0, false);
    host.emulator.steps(3);
    assert_eq!(host.poll(0).map(|cqe| cqe.cid()), Some(second));
    let (_, data) = log(&mut host, LogId::CHANGED_NAMESPACES, 8, 0, false);
    assert_eq!(data, [0; 8], "reading it emptied it");
    let (_, data) = identify(&mut host, Sqe::identify(0, Cns::NAMESPACE, 1, 0));
    assert_eq!(data[..8], 2001_u64.to_le_bytes());
    host.assert_clean();
}

#[test]
fn health_events_follow_the_thresholds_that_the_host_set() {
    let mut host = Host::new(EmulatorSpec::default());
    let config = Sqe::set_features(0, FeatureId::ASYNC_EVENT_CONFIG, 0, 0b10);
    assert_eq!(host.admin(config).status(), Status::SUCCESS);
    host.submit(0, Sqe::async_event_request(0).with_prp(0, 0));
    host.emulator.set_health(|health| health.temperature = 342);
    host.emulator.set_health(|health| health.critical_warning.set_spare(true));
    host.emulator.steps(3);
    assert!(host.poll(0).is_none(), "below the threshold; the spare was not asked for");
    host.emulator.set_health(|health| health.temperature = 343);
    host.emulator.steps(3);
    assert_eq!(host.poll(0).map(|cqe| cqe.result_u32()), Some(0x0002_0101));
    assert_eq!(log(&mut host, LogId::SMART, 4, 0, false).1[0], 0b11);
    assert!(!host.emulator.raise_event(CHANGED), "not asked for");
    assert!(host.emulator.raise_event(AsyncEvent::of(AsyncEventType::ERROR, 3, LogId::ERROR)));
}

#[test]
fn there_may_be_so_many_event_requests_and_each_may_be_aborted() {
    let mut host = Host::new(EmulatorSpec { aerl_z: 2, ..EmulatorSpec::default() });
    let request = Sqe::async_event_request(0).with_prp(0, 0);
    let cids: Vec<u16> = (0..3).map(|_| host.submit(0, request)).collect();
    let limit = Status::ASYNC_EVENT_LIMIT_EXCEEDED.dnr();
    assert_eq!(host.run(0, request).status(), limit);
    host.submit(0, Sqe::abort(0, 0, cids[1]).with_prp(0, 0));
    host.emulator.step();
    let aborted = host.poll(0).expect("the request");
    assert_eq!((aborted.cid(), aborted.status()), (cids[1], Status::ABORTED_BY_REQUEST));
    assert_eq!(host.poll(0).map(|cqe| cqe.result_u32()), Some(0), "aborted");
    assert_eq!(host.admin(Sqe::abort(0, 0, cids[1])).result_u32(), 1, "not aborted: it is no more");
    host.submit(0, request);
    host.emulator.steps(2);
    assert!(host.poll(0).is_none());
    host.assert_clean();
}

#[test]
fn a_wrong_doorbell_is_an_error_event() {
    let mut host = Host::with_io(EmulatorSpec::default());
    host.submit(0, Sqe::async_event_request(0).with_prp(0, 0));
    host.emulator.step();
    host.ring_tail(1, 64);
    host.emulator.steps(3);
    assert_eq!(host.poll(0).map(|cqe| cqe.result_u32()), Some(0x0001_0100));
}

#[test]
fn there_may_be_so_many_aborts_at_once() {
    let mut host = Host::new(EmulatorSpec { acl_z: 1, ..EmulatorSpec::default() });
    for _ in 0..2 {
        host.emulator.inject_admin(Injection::Swallow);
        host.submit(0, Sqe::abort(0, 1, 7).with_prp(0, 0));
    }
    assert_eq!(host.admin(Sqe::abort(0, 1, 8)).status(), Status::ABORT_LIMIT_EXCEEDED.dnr());
    assert_eq!(host.emulator.counters().swallowed, 2);
    assert_eq!(AdminOpcode::ABORT.0, 8);
}

#[test]
#[should_panic(expected = "blocks of 0 bytes")]
fn a_namespace_cannot_be_formatted_with_blocks_of_nothing() {
    Host::new(two()).emulator.format_namespace(1, 0);
}
