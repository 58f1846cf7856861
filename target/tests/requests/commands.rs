//! Commands of an I/O queue that move data in one step, and what is refused of them.

use std::sync::Arc;

use nvme_spec::feature::FeatureId;
use nvme_spec::log::LogId;
use nvme_spec::sqe::NSID_ALL;
use nvme_spec::{Sqe, Status};
use spindle_nvme_transport::DataPointer;
use spindle_target_disk::{BlockRange, Disk, Geometry, NullDisk, NullSpec, Op};
use spindle_tests::script::{Asked, Host, Probe, Queue, Record, Rig, Setup};

use crate::{BLOCKS, assert_ok, assert_refused, kinds, pattern, pool_disk};

const FUA: u32 = 1 << 30;

/// Every kind of disk, each as a namespace of its own, and an I/O queue on them.
fn on_every_kind(test: impl Fn(&mut Rig, &Queue, u32, usize)) {
    for disk in kinds() {
        let block_bytes = disk.geometry().block_bytes as usize;
        let mut rig = Rig::new(Setup::small(vec![disk]));
        let host = rig.host();
        test(&mut rig, &host.io, 1, block_bytes);
        rig.finish();
    }
}

/// A pool disk that tells what it was asked.
fn probed(shape: fn(Geometry) -> Geometry) -> (Rig, Host, Record) {
    let (disk, record) = Probe::over(pool_disk(512), shape);
    let mut rig = Rig::new(Setup::small(vec![disk]));
    let host = rig.host();
    (rig, host, record)
}

#[test]
fn what_is_written_is_read_up_to_the_last_block() {
    on_every_kind(|rig, io, nsid, block| {
        for (lba, blocks) in [(0, 1), (BLOCKS - 1, 1), (BLOCKS - 3, 3), (5, 7)] {
            let bytes = pattern(usize::try_from(lba).unwrap(), block * blocks as usize);
            assert_ok(&rig.run(io, Sqe::write(1, nsid, lba, blocks, false), &bytes));
            let answer = rig.read(io, Sqe::read(2, nsid, lba, blocks), bytes.len());
            assert_ok(&answer);
            assert_eq!(answer.data, bytes);
        }
    });
}

#[test]
fn a_block_behind_the_last_is_out_of_range_for_every_command_that_names_blocks() {
    on_every_kind(|rig, io, nsid, block| {
        for (lba, blocks) in [
            (BLOCKS, 1),
            (BLOCKS - 1, 2),
            (u64::MAX, 1),
            (u64::MAX, 2),
            (u64::MAX - 1, 2),
            (u64::MAX / 2, 65_536),
        ] {
            let bytes = if blocks <= 2 { block * blocks as usize } else { 0 };
            for sqe in [
                Sqe::read(1, nsid, lba, blocks),
                Sqe::write(1, nsid, lba, blocks, false),
                Sqe::compare(1, nsid, lba, blocks),
            ] {
                assert_refused(&rig.read(io, sqe, bytes), Status::LBA_OUT_OF_RANGE);
            }
            for sqe in [Sqe::write_zeroes(1, nsid, lba, blocks, false), Sqe::verify(1, nsid, lba, blocks)] {
                assert_refused(&rig.run(io, sqe, &[]), Status::LBA_OUT_OF_RANGE);
            }
        }
    });
}

#[test]
fn a_transfer_may_be_as_large_as_mdts_says_and_not_a_block_larger() {
    for disk in kinds() {
        let block = disk.geometry().block_bytes;
        let mut rig = Rig::new(Setup { transfer_bytes: 64 << 10, ..Setup::small(vec![disk]) });
        let host = rig.host();
        let most = (64 << 10) / block;
        let bytes = pattern(3, 64 << 10);
        assert_ok(&rig.run(&host.io, Sqe::write(1, 1, 8, most, false), &bytes));
        assert_eq!(rig.read(&host.io, Sqe::read(2, 1, 8, most), bytes.len()).data, bytes);
        let more = bytes.len() + block as usize;
        for sqe in [
            Sqe::read(1, 1, 0, most + 1),
            Sqe::write(1, 1, 0, most + 1, false),
            Sqe::compare(1, 1, 0, most + 1),
        ] {
            assert_refused(&rig.read(&host.io, sqe, more), Status::INVALID_FIELD);
        }
        rig.finish();
    }
}

#[test]
fn the_sgl_is_exactly_as_long_as_the_data() {
    on_every_kind(|rig, io, nsid, block| {
        let wrong = Status::DATA_SGL_LENGTH_INVALID;
        for bytes in [0, 1, block - 1, block + 1, block * 3] {
            assert_refused(&rig.read(io, Sqe::read(1, nsid, 0, 2), bytes), wrong);
            assert_refused(&rig.read(io, Sqe::write(1, nsid, 0, 2, false), bytes), wrong);
            assert_refused(&rig.read(io, Sqe::compare(1, nsid, 0, 2), bytes), wrong);
        }
        // A read has no place for its data in the capsule of its command.
        let pointer = DataPointer::InCapsule { bytes: u32::try_from(block).unwrap() };
        rig.send_pointer(io, Sqe::read(1, nsid, 0, 1), Ok(pointer));
        assert_refused(&rig.finish_command(io, 1, &[]), Status::SGL_DESCRIPTOR_TYPE_INVALID);
        // What the transport has found wrong is answered as it said.
        rig.send_pointer(io, Sqe::read(1, nsid, 0, 1), Err(Status::SGL_OFFSET_INVALID.dnr()));
        assert_refused(&rig.finish_command(io, 1, &[]), Status::SGL_OFFSET_INVALID);
    });
}

#[test]
fn a_write_takes_its_data_from_the_capsule_as_well() {
    on_every_kind(|rig, io, nsid, block| {
        let bytes = pattern(9, block);
        let pointer = DataPointer::InCapsule { bytes: u32::try_from(block).unwrap() };
        rig.send_pointer(io, Sqe::write(1, nsid, 4, 1, false), Ok(pointer));
        assert_ok(&rig.finish_command(io, 1, &bytes));
        assert_eq!(rig.read(io, Sqe::read(2, nsid, 4, 1), block).data, bytes);
    });
}

#[test]
fn unknown_opcodes_and_namespaces_are_refused_by_name() {
    on_every_kind(|rig, io, nsid, block| {
        for opcode in (0..=0xff_u8).filter(|opcode| ![0, 1, 2, 5, 8, 9, 0xc, 0x19, 0x7f].contains(opcode)) {
            assert_refused(&rig.run(io, Sqe::new(opcode, 1, nsid), &[]), Status::INVALID_OPCODE);
        }
        for wrong in [0, nsid + 1, 1024, 1025, u32::MAX - 1, NSID_ALL] {
            let answer = rig.read(io, Sqe::read(1, wrong, 0, 1), block);
            assert_refused(&answer, Status::INVALID_NAMESPACE_OR_FORMAT);
        }
        assert_refused(&rig.run(io, Sqe::flush(1, 0), &[]), Status::INVALID_NAMESPACE_OR_FORMAT);
        assert_refused(
            &rig.run(io, Sqe::write_zeroes(1, NSID_ALL, 0, 1, false), &[]),
            Status::INVALID_NAMESPACE_OR_FORMAT,
        );
    });
}

#[test]
fn fua_is_passed_down_and_only_where_it_was_asked_for() {
    let (mut rig, host, record) = probed(|geometry| geometry);
    let range = BlockRange { lba: 3, blocks: 2 };
    for fua in [false, true] {
        assert_ok(&rig.run(&host.io, Sqe::write(1, 1, 3, 2, fua), &[1; 1024]));
        assert_eq!(record.take(), [Asked::Op(Op::Write { fua }, range)]);
        for deallocate in [false, true] {
            let mut sqe = Sqe::write_zeroes(2, 1, 3, 2, deallocate);
            sqe.cdw12.set(sqe.cdw12() | if fua { FUA } else { 0 });
            assert_ok(&rig.run(&host.io, sqe, &[]));
            assert_eq!(record.take(), [Asked::Op(Op::WriteZeroes { deallocate, fua }, range)]);
        }
    }
    rig.finish();
}

#[test]
fn with_the_write_cache_turned_off_every_write_is_on_the_medium_when_it_is_answered() {
    let (mut rig, host, record) = probed(|geometry| geometry);
    let cache = |on: u32| Sqe::set_features(1, FeatureId::VOLATILE_WRITE_CACHE, 0, on);
    assert_ok(&rig.run(&host.admin, cache(0), &[]));
    let range = BlockRange { lba: 3, blocks: 2 };
    assert_ok(&rig.run(&host.io, Sqe::write(1, 1, 3, 2, false), &[1; 1024]));
    assert_ok(&rig.run(&host.io, Sqe::write_zeroes(1, 1, 3, 2, false), &[]));
    let zeroes = Op::WriteZeroes { deallocate: false, fua: true };
    assert_eq!(record.take(), [Asked::Op(Op::Write { fua: true }, range), Asked::Op(zeroes, range)]);
    assert_ok(&rig.run(&host.admin, cache(1), &[]));
    assert_ok(&rig.run(&host.io, Sqe::write(1, 1, 3, 2, false), &[1; 1024]));
    assert_eq!(record.take(), [Asked::Op(Op::Write { fua: false }, range)]);
    rig.finish();
}

#[test]
fn a_flush_of_one_namespace_or_of_all_reaches_the_disks() {
    let disks: Vec<(Arc<dyn Disk>, Record)> =
        (0..20).map(|_| Probe::over(pool_disk(512), |geometry| geometry)).collect();
    let mut setup = Setup::small(disks.iter().map(|(disk, _)| Arc::clone(disk)).collect());
    drop(setup.remove(3));
    let mut rig = Rig::new(setup);
    let host = rig.host();
    let flushed = |disks: &[(Arc<dyn Disk>, Record)]| -> Vec<usize> {
        let count = |(_, record): &(Arc<dyn Disk>, Record)| record.take().len();
        disks.iter().map(count).collect()
    };
    assert_ok(&rig.run(&host.io, Sqe::flush(1, 2), &[]));
    let mut one = vec![0; 20];
    one[1] = 1;
    assert_eq!(flushed(&disks), one);
    assert_ok(&rig.run(&host.io, Sqe::flush(1, NSID_ALL), &[]));
    let mut all = vec![1; 20];
    all[2] = 0;
    assert_eq!(flushed(&disks), all, "each active namespace once, beyond a turn's share of steps too");
    rig.finish();
}

#[test]
fn zeroes_are_written_where_they_belong() {
    on_every_kind(|rig, io, nsid, block| {
        let bytes = pattern(1, 3 * block);
        assert_ok(&rig.run(io, Sqe::write(1, nsid, 0, 3, false), &bytes));
        for deallocate in [false, true] {
            assert_ok(&rig.run(io, Sqe::write_zeroes(1, nsid, 1, 1, deallocate), &[]));
            let now = rig.read(io, Sqe::read(2, nsid, 0, 3), 3 * block).data;
            assert_eq!(now[..block], bytes[..block]);
            assert!(now[block..2 * block].iter().all(|byte| *byte == 0));
            assert_eq!(now[2 * block..], bytes[2 * block..]);
        }
    });
}

#[test]
fn zeroes_are_written_as_many_at_once_as_wzsl_says_and_not_a_block_more() {
    for (block_bytes, most) in [(512, 65_536), (4096, 8192)] {
        let disk = NullDisk::new("null", NullSpec { bytes: 1 << 30, block_bytes }).expect("a disk");
        let mut rig = Rig::new(Setup::small(vec![disk]));
        let host = rig.host();
        assert_ok(&rig.run(&host.io, Sqe::write_zeroes(1, 1, 0, most, false), &[]));
        if most < 65_536 {
            let answer = rig.run(&host.io, Sqe::write_zeroes(1, 1, 0, most + 1, false), &[]);
            assert_refused(&answer, Status::INVALID_FIELD);
        }
        rig.finish();
    }
}

#[test]
fn a_read_only_disk_takes_no_command_that_would_change_it() {
    let (mut rig, host, record) = probed(|geometry| Geometry { is_read_only: true, ..geometry });
    let io = &host.io;
    let refused = Status::NAMESPACE_IS_WRITE_PROTECTED;
    assert_refused(&rig.run(io, Sqe::write(1, 1, 0, 1, false), &[0; 512]), refused);
    assert_refused(&rig.run(io, Sqe::write_zeroes(1, 1, 0, 1, false), &[]), refused);
    assert_refused(&rig.run(io, Sqe::dsm(1, 1, 1), &[0; 16]), refused);
    assert_refused(&rig.run(io, Sqe::copy(1, 1, 0, 1), &[0; 32]), refused);
    assert_eq!(record.take(), []);
    assert_ok(&rig.read(io, Sqe::read(1, 1, 0, 1), 512));
    assert_ok(&rig.run(io, Sqe::compare(1, 1, 0, 1), &[0; 512]));
    assert_ok(&rig.run(io, Sqe::verify(1, 1, 0, 1), &[]));
    assert_ok(&rig.run(io, Sqe::flush(1, 1), &[]));
    rig.finish();
}

#[test]
fn a_refusal_is_in_the_error_log_with_its_field() {
    let (mut rig, host, _record) = probed(|geometry| geometry);
    let refused = rig.read(&host.io, Sqe::read(0xbeef, 1, BLOCKS, 1), 512);
    assert_refused(&refused, Status::LBA_OUT_OF_RANGE);
    assert!(refused.has_more, "the host is told that there is an entry");
    let log = Sqe::get_log_page(1, LogId::ERROR, NSID_ALL, 64, 0, false);
    let answer = rig.read(&host.admin, log, 64);
    assert!(!answer.has_more);
    let entry = answer.data;
    assert_eq!(entry[..8], 1_u64.to_le_bytes());
    assert_eq!(entry[8..12], [1, 0, 0xef, 0xbe], "SQID, CID");
    assert_eq!(entry[14..16], 40_u16.to_le_bytes(), "the field at fault: CDW10");
    assert_eq!(entry[16..24], BLOCKS.to_le_bytes());
    rig.finish();
}

#[test]
fn a_read_beyond_the_end_of_a_log_page_takes_no_memory_and_is_zero() {
    const ASKED: usize = 64 << 10;
    // No buffer of the target is as large as what is asked for.
    let mut rig = Rig::new(Setup { zones: vec![(4096, 1)], ..Setup::small(vec![pool_disk(512)]) });
    let host = rig.host();
    let page = rig.read(&host.admin, Sqe::get_log_page(1, LogId::SMART, NSID_ALL, 512, 0, true), 512);
    let at =
        |offset| Sqe::get_log_page(1, LogId::SMART, NSID_ALL, u32::try_from(ASKED).unwrap(), offset, true);
    for offset in [0, 256, 512] {
        let answer = rig.read(&host.admin, at(offset), ASKED);
        assert_ok(&answer);
        let left = &page.data[usize::try_from(offset).unwrap()..];
        assert_eq!((answer.data.len(), &answer.data[..left.len()]), (ASKED, left));
        assert!(answer.data[left.len()..].iter().all(|byte| *byte == 0));
    }
    rig.finish();
}
