//! Commands of several steps: Compare, Dataset Management, Copy, Verify.

use nvme_spec::feature::FeatureId;
use nvme_spec::{Sqe, Status};
use spindle_nvme_transport::DataPointer;
use spindle_target::qpair::request::RequestState;
use spindle_target_disk::fault::{Fault, FaultDisk, OpKind};
use spindle_target_disk::{BlockRange, DiskError, Geometry, NullDisk, NullSpec, Op};
use spindle_tests::script::{Asked, HOST, Probe, Queue, Rig, Setup, Want};

use crate::{BLOCKS, able_disk, assert_ok, assert_refused, kinds, pattern, pool_disk, ram_disk};

/// A list of Dataset Management ranges: first block, blocks.
fn ranges(list: &[(u64, u32)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (lba, blocks) in list {
        bytes.extend([0; 4]);
        bytes.extend(blocks.to_le_bytes());
        bytes.extend(lba.to_le_bytes());
    }
    bytes
}

/// A list of Copy source ranges, format 0h: first block, blocks.
fn sources(list: &[(u64, u32)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (lba, blocks) in list {
        let mut range = [0; 32];
        range[8..16].copy_from_slice(&lba.to_le_bytes());
        range[16..18].copy_from_slice(&u16::try_from(blocks - 1).unwrap().to_le_bytes());
        bytes.extend(range);
    }
    bytes
}

fn dsm(list: &[(u64, u32)]) -> Sqe {
    Sqe::dsm(1, 1, u16::try_from(list.len()).unwrap())
}

fn copy(to: u64, list: &[(u64, u32)]) -> Sqe {
    Sqe::copy(1, 1, to, u16::try_from(list.len()).unwrap())
}

/// All blocks hold their own number, as far as they are filled.
fn fill(rig: &mut Rig, io: &Queue, blocks: u32, block: usize) -> Vec<u8> {
    let bytes = pattern(5, blocks as usize * block);
    for (at, piece) in (0..).zip(bytes.chunks(16 * block)) {
        let count = u32::try_from(piece.len() / block).unwrap();
        assert_ok(&rig.run(io, Sqe::write(1, 1, at * 16, count, false), piece));
    }
    bytes
}

fn content(rig: &mut Rig, io: &Queue, lba: u64, blocks: u32, block: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    let end = lba + u64::from(blocks);
    for at in (lba..end).step_by(16) {
        let count = u32::try_from((end - at).min(16)).unwrap();
        let answer = rig.read(io, Sqe::read(1, 1, at, count), count as usize * block);
        assert_ok(&answer);
        bytes.extend(answer.data);
    }
    bytes
}

/// On every kind of disk, with its first 64 blocks filled.
fn on_every_kind(test: impl Fn(&mut Rig, &Queue, usize, &[u8])) {
    for disk in kinds() {
        let block = disk.geometry().block_bytes as usize;
        let mut rig = Rig::new(Setup::small(vec![disk]));
        let host = rig.host();
        let bytes = fill(&mut rig, &host.io, 64, block);
        test(&mut rig, &host.io, block, &bytes);
        rig.finish();
    }
}

#[test]
fn compare_tells_equal_from_different_to_the_last_byte() {
    on_every_kind(|rig, io, block, bytes| {
        let expected = bytes[2 * block..5 * block].to_vec();
        assert_ok(&rig.run(io, Sqe::compare(1, 1, 2, 3), &expected));
        for at in [0, block, 3 * block - 1] {
            let mut other = expected.clone();
            other[at] ^= 1;
            assert_refused(&rig.run(io, Sqe::compare(1, 1, 2, 3), &other), Status::COMPARE_FAILURE);
        }
        let zeroes = vec![0; block];
        assert_ok(&rig.run(io, Sqe::compare(1, 1, BLOCKS - 1, 1), &zeroes));
    });
}

#[test]
fn deallocate_zeroes_its_ranges_and_nothing_else() {
    on_every_kind(|rig, io, block, bytes| {
        let list = [(1, 2), (10, 0), (20, 1), (BLOCKS, 0), (BLOCKS - 1, 1)];
        assert_ok(&rig.run(io, dsm(&list), &ranges(&list)));
        let mut expected = bytes.to_vec();
        expected[block..3 * block].fill(0);
        expected[20 * block..21 * block].fill(0);
        assert_eq!(content(rig, io, 0, 64, block), expected);
    });
}

#[test]
fn a_range_out_of_the_namespace_refuses_the_whole_list_before_any_of_it_is_done() {
    on_every_kind(|rig, io, block, bytes| {
        for wrong in [(BLOCKS, 1), (BLOCKS - 1, 2), (u64::MAX, 1), (0, u32::MAX), (u64::MAX, u32::MAX)] {
            let list = [(1, 2), wrong];
            assert_refused(&rig.run(io, dsm(&list), &ranges(&list)), Status::LBA_OUT_OF_RANGE);
        }
        assert_eq!(content(rig, io, 0, 64, block), bytes);
    });
}

#[test]
fn a_list_may_be_longer_than_its_count_says_as_linux_sends_it_and_not_shorter() {
    on_every_kind(|rig, io, _block, _bytes| {
        for count in [1, 2, 255, 256] {
            let list = vec![(3, 1); count];
            let mut page = ranges(&list);
            page.resize(4096, 0xff);
            assert_ok(&rig.run(io, dsm(&list), &page));
            // In the capsule, as Linux has it.
            rig.send_pointer(io, dsm(&list), Ok(DataPointer::InCapsule { bytes: 4096 }));
            assert_ok(&rig.finish_command(io, 1, &page));
            assert_ok(&rig.run(io, dsm(&list), &ranges(&list)));
            for bytes in [0, 16 * count - 1, 8193] {
                assert_refused(&rig.read(io, dsm(&list), bytes), Status::DATA_SGL_LENGTH_INVALID);
            }
        }
    });
}

#[test]
fn hints_that_change_nothing_succeed_and_ask_nothing_of_the_disk() {
    let (disk, record) = Probe::over(pool_disk(512), |geometry| geometry);
    let mut rig = Rig::new(Setup::small(vec![disk]));
    let host = rig.host();
    for attributes in [0, 1, 2, 3] {
        let mut sqe = dsm(&[(0, 1)]);
        sqe.cdw11.set(attributes);
        assert_ok(&rig.run(&host.io, sqe, &ranges(&[(0, 1)])));
    }
    assert_eq!(record.take(), []);
    rig.finish();
}

#[test]
fn deallocate_on_a_disk_that_cannot_is_a_success_of_nothing() {
    let (disk, record) =
        Probe::over(pool_disk(512), |geometry| Geometry { can_deallocate: false, ..geometry });
    let mut rig = Rig::new(Setup::small(vec![disk]));
    let host = rig.host();
    assert_ok(&rig.run(&host.io, dsm(&[(0, 1)]), &ranges(&[(0, 1)])));
    assert_eq!(record.take(), []);
    rig.finish();
}

#[test]
fn deallocate_goes_on_where_the_disk_finds_out_that_it_cannot() {
    // Once the range at which the turn's share of steps ends failed the command.
    let (disk, control) = FaultDisk::new(pool_disk(512), 1);
    control.set(Fault::Error, OpKind::Deallocate, 1_000_000);
    control.set_error(OpKind::Deallocate, DiskError::NotSupported);
    let mut rig = Rig::new(Setup::small(vec![disk]));
    let host = rig.host();
    let list = vec![(0, 1); 40];
    assert_ok(&rig.run(&host.io, dsm(&list), &ranges(&list)));
    rig.finish();
}

#[test]
fn copy_moves_its_ranges_one_behind_the_other() {
    on_every_kind(|rig, io, block, bytes| {
        let list = [(0, 1), (40, 3), (7, 16), (0, 1)];
        assert_ok(&rig.run(io, copy(100, &list), &sources(&list)));
        let mut expected: Vec<u8> = Vec::new();
        for (lba, blocks) in list {
            let at = usize::try_from(lba).unwrap() * block;
            expected.extend(&bytes[at..at + blocks as usize * block]);
        }
        assert_eq!(content(rig, io, 100, 21, block), expected);
        assert_eq!(content(rig, io, 0, 64, block), bytes);
        assert!(content(rig, io, 121, 2, block).iter().all(|byte| *byte == 0), "not a block further");
    });
}

#[test]
fn copies_and_verifies_of_many_pieces_take_turns_with_others() {
    // 64 MiB in pieces of 128 KiB: some 512 steps, of which 16 are done in a turn.
    let disk = NullDisk::new("null", NullSpec { bytes: 256 << 20, block_bytes: 4096 }).expect("a disk");
    let mut rig = Rig::new(Setup { transfer_bytes: 1 << 20, ..Setup::small(vec![disk]) });
    let host = rig.host();
    let io = &host.io;
    rig.send(io, Sqe::verify(1, 1, 0, 16_384), 0);
    assert_eq!(rig.states(io), [(RequestState::NeedStepBuffer, 1)]);
    let mut turns = 0;
    let answer = loop {
        // A read that comes in between is answered in its own turn.
        assert_ok(&rig.read(io, Sqe::read(2, 1, 0, 1), 4096));
        rig.turn();
        turns += 1;
        if let Some(answer) = rig.answer(io) {
            break answer;
        }
    };
    assert_eq!(answer.cid, 1);
    assert_ok(&answer);
    assert!((16..64).contains(&turns), "{turns}");
    rig.finish();
}

#[test]
fn copies_that_wait_for_memory_hold_none_of_it() {
    // If each kept what it had read, and writes overwrote just that, no memory would come free any more.
    let zones = vec![(4096, 64), (128 << 10, 4)];
    let mut rig = Rig::new(Setup { zones, connections: 128, ..Setup::small(vec![ram_disk(4096)]) });
    let queue = |rig: &mut Rig, number: usize| {
        rig.host_nqn = format!("{HOST}-{number}");
        let (_, cntlid) = rig.admin(0, 0);
        rig.io(0, Want { entries: 128, ..Want::io(cntlid, 1) })
    };
    let io = queue(&mut rig, 0);
    let piece = 32 * 4096;
    for lba in (0..BLOCKS).step_by(32) {
        assert_ok(&rig.run(&io, Sqe::write(1, 1, lba, 32, false), &vec![1; piece]));
    }
    // All memory that is left, 767 pages, goes to writes whose data is still to come.
    let writes: Vec<(u64, u32)> =
        (0..23).map(|index| (index * 32, 32)).chain((736..767).map(|lba| (lba, 1))).collect();
    // Each of a host of its own: one that has nothing may take the last.
    let writers: Vec<_> = (1..=writes.len()).map(|number| queue(&mut rig, number)).collect();
    for (writer, (lba, blocks)) in writers.iter().zip(&writes) {
        rig.send(writer, Sqe::write(100, 1, *lba, *blocks, false), *blocks as usize * 4096);
        assert_eq!(rig.states(writer), [(RequestState::Fetching, 1)]);
    }
    // Copies of what they will overwrite.
    let copies: Vec<(u64, u32)> = (0..23).map(|index| (index * 32, 32)).chain([(736, 31)]).collect();
    for (cid, range) in (300..).zip(&copies) {
        let sqe = Sqe::copy(cid, 1, 1024 + range.0, 1);
        rig.send(&io, sqe, 32);
        rig.turn();
        rig.bring(&io, cid, &sources(&[*range]));
    }
    assert_eq!(rig.states(&io), [(RequestState::NeedStepBuffer, copies.len())]);
    let mut answers = Vec::new();
    for (writer, (_, blocks)) in writers.iter().zip(&writes) {
        rig.bring(writer, 100, &vec![2; *blocks as usize * 4096]);
        answers.extend(rig.answers(writer));
    }
    for _ in 0..100 {
        rig.turn();
        answers.extend(rig.answers(&io));
    }
    answers.iter().for_each(assert_ok);
    assert_eq!(answers.len(), writes.len() + copies.len());
    assert_eq!(content(&mut rig, &io, 1024, 32, 4096), vec![2; piece]);
    rig.finish();
}

#[test]
fn copy_is_limited_in_ranges_their_length_and_their_sum() {
    // MSRC 127, MSSRL and MCL of a transfer of 128 KiB.
    let disk = NullDisk::new("null", NullSpec { bytes: 1 << 30, block_bytes: 4096 }).expect("a disk");
    let mut rig = Rig::new(Setup::small(vec![disk]));
    let host = rig.host();
    let io = &host.io;
    let too_much = Status::COMMAND_SIZE_LIMIT_EXCEEDED;
    let most = 32;
    let list = vec![(0, most); 128];
    assert_ok(&rig.run(io, copy(100_000, &list), &sources(&list)));
    let long = [(0, most + 1)];
    assert_refused(&rig.run(io, copy(100_000, &long), &sources(&long)), too_much);
    let long = [(0, 1), (0, 65_536)];
    assert_refused(&rig.run(io, copy(100_000, &long), &sources(&long)), too_much);
    let many = vec![(0, 1); 129];
    assert_refused(&rig.run(io, copy(100_000, &many), &sources(&many)), too_much);
    rig.finish();
}

#[test]
fn copy_is_refused_out_of_range_over_itself_and_in_formats_that_are_not_offered() {
    on_every_kind(|rig, io, block, bytes| {
        for (to, list, status) in [
            (BLOCKS, [(0, 1), (1, 1)], Status::LBA_OUT_OF_RANGE),
            (u64::MAX, [(0, 1), (1, 1)], Status::LBA_OUT_OF_RANGE),
            (BLOCKS - 1, [(0, 1), (1, 1)], Status::LBA_OUT_OF_RANGE),
            (100, [(0, 1), (BLOCKS, 1)], Status::LBA_OUT_OF_RANGE),
            (100, [(0, 1), (BLOCKS - 1, 2)], Status::LBA_OUT_OF_RANGE),
            (100, [(0, 1), (u64::MAX, 2)], Status::LBA_OUT_OF_RANGE),
            (4, [(0, 1), (4, 1)], Status::OVERLAPPING_IO_RANGE),
            (4, [(0, 1), (5, 1)], Status::OVERLAPPING_IO_RANGE),
            (4, [(0, 1), (3, 2)], Status::OVERLAPPING_IO_RANGE),
        ] {
            assert_refused(&rig.run(io, copy(to, &list), &sources(&list)), status);
        }
        let adjacent = [(3, 1), (6, 1)];
        assert_ok(&rig.run(io, copy(4, &adjacent), &sources(&adjacent)));
        let mut expected = bytes.to_vec();
        expected.copy_within(3 * block..4 * block, 4 * block);
        expected.copy_within(6 * block..7 * block, 5 * block);
        assert_eq!(content(rig, io, 0, 64, block), expected);
        for format in 1..16 {
            let mut sqe = copy(100, &[(0, 1)]);
            sqe.cdw12.set(sqe.cdw12() | format << 8);
            assert_refused(&rig.run(io, sqe, &[0; 32]), Status::INVALID_FIELD);
        }
        for length in [0, 31, 8193] {
            assert_refused(&rig.read(io, copy(100, &[(0, 1)]), length), Status::DATA_SGL_LENGTH_INVALID);
        }
    });
}

/// Also where the host has turned the write cache off, which it has again at the end.
#[test]
fn copy_passes_fua_to_each_of_its_writes() {
    let (disk, record) = Probe::over(pool_disk(512), |geometry| geometry);
    let mut rig = Rig::new(Setup::small(vec![disk]));
    let host = rig.host();
    let list = [(0, 1), (5, 2)];
    for (has_cache, asked, fua) in [(1, true, true), (0, false, true), (1, false, false)] {
        let cache = Sqe::set_features(1, FeatureId::VOLATILE_WRITE_CACHE, 0, has_cache);
        assert_ok(&rig.run(&host.admin, cache, &[]));
        let mut sqe = copy(100, &list);
        sqe.cdw12.set(sqe.cdw12() | u32::from(asked) << 30);
        assert_ok(&rig.run(&host.io, sqe, &sources(&list)));
        let range = |lba, blocks| BlockRange { lba, blocks };
        let write = Op::Write { fua };
        assert_eq!(
            record.take(),
            [
                Asked::Op(Op::Read, range(0, 1)),
                Asked::Op(write, range(100, 1)),
                Asked::Op(Op::Read, range(5, 2)),
                Asked::Op(write, range(101, 2)),
            ]
        );
    }
    rig.finish();
}

#[test]
fn a_copy_that_fails_says_which_range_was_not_copied_and_is_counted() {
    let (disk, control) = FaultDisk::new(pool_disk(512), 1);
    let mut rig = Rig::new(Setup::small(vec![disk]));
    let host = rig.host();
    control.fail_range(spindle_target_disk::Broken { lba: 7..8, reads: true, writes: false });
    let list = [(0, 2), (3, 2), (6, 4), (20, 1)];
    let answer = rig.run(&host.io, copy(100, &list), &sources(&list));
    assert_refused(&answer, Status::UNRECOVERED_READ_ERROR);
    assert_eq!(answer.result, 2, "the lowest range that was not copied whole");
    let counters = rig.cores[0].snapshot().subsystems[0].namespaces[0].as_ref().unwrap().counters.totals();
    assert_eq!(counters.media_errors, 1);
    rig.finish();
}

#[test]
fn verify_reads_everything_and_fails_where_a_read_fails() {
    let (disk, record) = Probe::over(pool_disk(512), |geometry| geometry);
    let (disk, control) = FaultDisk::new(disk, 1);
    let mut rig = Rig::new(Setup::small(vec![disk]));
    let host = rig.host();
    assert_ok(&rig.run(&host.io, Sqe::verify(1, 1, 3, 1000), &[]));
    let seen: Vec<_> = record.take();
    let piece = |lba, blocks| Asked::Op(Op::Read, BlockRange { lba, blocks });
    assert_eq!(seen, [piece(3, 256), piece(259, 256), piece(515, 256), piece(771, 232)]);
    control.fail_range(spindle_target_disk::Broken { lba: 1002..1003, reads: true, writes: false });
    assert_refused(&rig.run(&host.io, Sqe::verify(1, 1, 3, 1000), &[]), Status::UNRECOVERED_READ_ERROR);
    assert_ok(&rig.run(&host.io, Sqe::verify(1, 1, 3, 999), &[]));
    rig.finish();
}

#[test]
fn what_the_disk_does_itself_it_is_asked_for_whole_and_without_memory_of_the_pool() {
    let (disk, record) = Probe::over(able_disk(512), |geometry| geometry);
    let (disk, control) = FaultDisk::new(disk, 1);
    let mut rig = Rig::new(Setup::small(vec![disk]));
    let host = rig.host();
    let range = |lba, blocks| BlockRange { lba, blocks };
    assert_ok(&rig.run(&host.io, Sqe::verify(1, 1, 3, 1000), &[]));
    assert_eq!(record.take(), [Asked::Op(Op::Verify, range(3, 1000))]);
    assert_ok(&rig.run(&host.io, Sqe::compare(1, 1, 9, 2), &[0; 1024]));
    assert_refused(&rig.run(&host.io, Sqe::compare(1, 1, 9, 2), &[1; 1024]), Status::COMPARE_FAILURE);
    assert_eq!(record.take(), [Asked::Op(Op::Compare, range(9, 2)); 2]);
    let list = [(0, 1), (5, 2), (9, 4)];
    let mut sqe = copy(100, &list);
    assert_ok(&rig.run(&host.io, sqe, &sources(&list)));
    sqe.cdw12.set(sqe.cdw12() | 1 << 30);
    assert_ok(&rig.run(&host.io, sqe, &sources(&list)));
    let asked = |fua| {
        let one = |from, to| Asked::Copy { from, to, fua };
        [one(range(0, 1), 100), one(range(5, 2), 101), one(range(9, 4), 103)]
    };
    assert_eq!(record.take(), [asked(false), asked(true)].concat());
    // Nothing but the host's own data lies in the pool meanwhile.
    control.set_all(Fault::Drop, 1_000_000);
    let free = |rig: &Rig| rig.cores[0].pools().0.free_bytes();
    let before = free(&rig);
    for (sqe, data, taken) in
        [(Sqe::verify(1, 1, 0, 1000), 0, 0), (Sqe::compare(1, 1, 0, 8), 4096, 4096), (sqe, 96, 4096)]
    {
        rig.send(&host.io, sqe, data);
        if data > 0 {
            rig.bring(&host.io, 1, &vec![0; data]);
        }
        assert_eq!(before - free(&rig), taken, "{:#x}", sqe.opcode);
        while rig.answer(&host.io).is_none() {
            control.release_dropped();
            rig.turn();
        }
    }
    rig.finish();
}

#[test]
fn what_the_disk_fails_to_do_itself_fails_as_reads_and_writes_would() {
    let (disk, control) = FaultDisk::new(able_disk(512), 1);
    let mut rig = Rig::new(Setup::small(vec![disk]));
    let host = rig.host();
    control.fail_range(spindle_target_disk::Broken { lba: 7..8, reads: true, writes: false });
    control.fail_range(spindle_target_disk::Broken { lba: 110..111, reads: false, writes: true });
    let io = &host.io;
    assert_refused(&rig.run(io, Sqe::verify(1, 1, 0, 8), &[]), Status::UNRECOVERED_READ_ERROR);
    assert_refused(&rig.run(io, Sqe::compare(1, 1, 7, 1), &[0; 512]), Status::UNRECOVERED_READ_ERROR);
    let list = [(0, 2), (3, 2), (6, 4), (20, 1)];
    let answer = rig.run(io, copy(100, &list), &sources(&list));
    assert_refused(&answer, Status::UNRECOVERED_READ_ERROR);
    assert_eq!(answer.result, 2, "the lowest range that was not copied whole");
    let answer = rig.run(io, copy(109, &[(0, 1), (20, 2)]), &sources(&[(0, 1), (20, 2)]));
    assert_refused(&answer, Status::WRITE_FAULT);
    assert_eq!(answer.result, 1);
    let counters = rig.cores[0].snapshot().subsystems[0].namespaces[0].as_ref().unwrap().counters.totals();
    assert_eq!(counters.media_errors, 4);
    // A disk that has forgotten how: the host may ask again.
    control.heal();
    control.set(Fault::Error, OpKind::Verify, 1_000_000);
    control.set_error(OpKind::Verify, DiskError::NotSupported);
    assert_eq!(rig.run(io, Sqe::verify(1, 1, 0, 8), &[]).status, Status::INTERNAL_ERROR);
    rig.finish();
}

#[test]
fn pieces_are_no_larger_than_the_pools_largest_buffer() {
    // Once these waited for ever: no zone had a buffer of a whole piece.
    for disk in [pool_disk(512), ram_disk(512)] {
        let small = Setup { zones: vec![(4096, 4)], transfer_bytes: 4096, ..Setup::small(vec![disk]) };
        let mut rig = Rig::new(small);
        let host = rig.host();
        assert_ok(&rig.run(&host.io, Sqe::write(1, 1, 0, 8, false), &pattern(1, 4096)));
        assert_ok(&rig.run(&host.io, Sqe::verify(1, 1, 0, 100), &[]));
        let list = [(0, 8), (0, 4)];
        assert_ok(&rig.run(&host.io, copy(100, &list), &sources(&list)));
        let answer = rig.read(&host.io, Sqe::read(1, 1, 100, 8), 4096);
        assert_eq!(answer.data, pattern(1, 4096));
        rig.finish();
    }
}
