//! Large transfers in pieces: their order, their overlap, their two buffers, and every way in which they end.

use std::cell::RefCell;
use std::sync::Arc;

use nvme_spec::register::CC;
use nvme_spec::{Sqe, Status};
use spindle_nvme_transport::DataPointer;
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Buf;
use spindle_target::counters::IoTotals;
use spindle_target::qpair::request::RequestState;
use spindle_target_disk::fault::{Broken, Fault, FaultControl, FaultDisk};
use spindle_target_disk::{
    BlockRange, ChannelContext, Disk, DiskChannel, Done, Geometry, IoRequest, Op, OpenError, Owner,
    ResizeError, Token, Usage,
};
use spindle_tests::script::{Answer, Asked, CC_DISABLED, Host, Probe, Queue, Record, Rig, Setup, Want};

use crate::{assert_ok, pattern, pool_disk, ram_disk};

/// Bytes of a piece: 8 blocks of 512 bytes.
const UNIT: u32 = 4096;
const PIECE: usize = UNIT as usize;

struct Fixture {
    rig: Rig,
    host: Host,
    control: Arc<FaultControl>,
    record: Record,
}

/// A host on a disk behind so many buffers of a piece each.
fn fixture_on(disk: Arc<dyn Disk>, buffers: u32) -> Fixture {
    let (disk, control) = FaultDisk::new(disk, 1);
    let (disk, record) = Probe::over(disk, |geometry| geometry);
    let zones = vec![(UNIT, buffers)];
    let mut rig = Rig::new(Setup { zones, bulk_unit: UNIT, ..Setup::small(vec![disk]) });
    let host = rig.host();
    Fixture { rig, host, control, record }
}

fn fixture(buffers: u32) -> Fixture {
    fixture_on(pool_disk(512), buffers)
}

/// The same; the disk keeps each command until [`Fixture::let_go`].
fn slow_fixture(buffers: u32) -> Fixture {
    let fixture = fixture(buffers);
    fixture.control.set_all(Fault::Drop, 1_000_000);
    fixture
}

impl Fixture {
    /// The disk ends what it has.
    fn let_go(&mut self) {
        self.control.release_dropped();
        self.rig.turn();
    }

    fn totals(&self) -> IoTotals {
        let snapshot = self.rig.cores[0].snapshot();
        snapshot.subsystems[0].namespaces[0].as_ref().expect("a namespace").counters.totals()
    }

    fn free(&self) -> u64 {
        self.rig.cores[0].pools().0.free_bytes()
    }

    /// What the disk was asked to do, as first blocks and numbers of blocks.
    fn asked(&self) -> Vec<(u64, u32)> {
        let asked = self.record.take().into_iter().map(|asked| match asked {
            Asked::Op(Op::Read | Op::Write { .. }, BlockRange { lba, blocks }) => (lba, blocks),
            Asked::Op(..) | Asked::CompareAndWrite(_) | Asked::Copy { .. } => panic!("{asked:?}"),
        });
        asked.collect()
    }

    fn finish(self) {
        self.control.set_all(Fault::Drop, 0);
        self.control.release_dropped();
        self.rig.finish();
    }
}

/// One thing happens to a part on the wire, if there is any: it arrives, from `data`, or leaves, into `data`.
fn move_part(rig: &mut Rig, queue: &Queue, data: &mut [u8]) -> bool {
    let Some((cid, offset, bytes)) = queue.line.parts().first().copied() else { return false };
    let place = offset as usize..offset as usize + bytes;
    if queue.line.is_first_part_fetch() {
        rig.bring_part(queue, cid, offset, &data[place], Ok(()));
    } else {
        data[place].copy_from_slice(&rig.part_sent(queue, cid, offset));
    }
    true
}

/// Move parts and give turns until the command is answered; at no time has the queue more than two buffers.
fn run(rig: &mut Rig, queue: &Queue, sqe: Sqe, data: &mut [u8]) -> Answer {
    rig.send(queue, sqe, data.len());
    for _ in 0..10_000 {
        let held = rig.held(queue);
        assert!(held <= 2 * u64::from(UNIT), "{held} bytes");
        if move_part(rig, queue, data) {
            continue;
        }
        if let Some(answer) = rig.answer(queue) {
            assert_eq!((answer.cid, answer.data.len()), (sqe.cid(), 0));
            return answer;
        }
        rig.turn();
    }
    panic!("not answered; {:?}", rig.states(queue));
}

fn write(cid: u16, blocks: u16) -> Sqe {
    Sqe::write(cid, 1, 0, u32::from(blocks), false)
}

fn read(cid: u16, blocks: u16) -> Sqe {
    Sqe::read(cid, 1, 0, u32::from(blocks))
}

#[test]
fn a_piece_of_a_write_is_on_the_wire_while_the_one_before_is_at_the_disk() {
    let mut fixture = slow_fixture(16);
    let io = fixture.host.io.clone();
    let data = pattern(1, 5 * PIECE);
    fixture.rig.send(&io, write(1, 40), data.len());
    assert_eq!(io.line.parts(), [(1, 0, PIECE), (1, UNIT, PIECE)], "two buffers, no more");
    assert_eq!(fixture.rig.states(&io), [(RequestState::Bulk, 1)]);
    fixture.rig.bring_part(&io, 1, 0, &data[..PIECE], Ok(()));
    for piece in 0..5_u32 {
        let next: Vec<_> = if piece < 4 { vec![(1, (piece + 1) * UNIT, PIECE)] } else { vec![] };
        assert_eq!(fixture.asked(), [(u64::from(piece) * 8, 8)], "one piece is at the disk");
        assert_eq!(io.line.parts(), next, "and the next on the wire");
        if piece < 4 {
            let at = (piece + 1) as usize * PIECE;
            fixture.rig.bring_part(&io, 1, (piece + 1) * UNIT, &data[at..at + PIECE], Ok(()));
            assert_eq!(fixture.asked(), [], "the disk has one at a time");
            assert_eq!(io.line.parts(), [], "both buffers are full");
        }
        assert_eq!(fixture.rig.answer(&io), None);
        fixture.let_go();
    }
    assert_ok(&fixture.rig.answer(&io).expect("an answer"));
    fixture.control.set_all(Fault::Drop, 0);
    for piece in 0..5_usize {
        let sqe = Sqe::read(2, 1, piece as u64 * 8, 8);
        let answer = fixture.rig.read(&io, sqe, PIECE);
        assert_eq!(answer.data, data[piece * PIECE..][..PIECE], "what is no larger than the unit is not cut");
    }
    let totals = fixture.totals();
    assert_eq!((totals.writes, totals.units_written, totals.reads), (1, 40, 5));
    fixture.finish();
}

#[test]
fn a_piece_of_a_read_is_at_the_disk_while_the_one_before_is_on_the_wire() {
    let mut fixture = fixture(16);
    let io = fixture.host.io.clone();
    let mut data = pattern(2, 5 * PIECE);
    assert_ok(&run(&mut fixture.rig, &io, write(1, 40), &mut data));
    assert_eq!(fixture.asked(), [(0, 8), (8, 8), (16, 8), (24, 8), (32, 8)]);
    fixture.control.set_all(Fault::Drop, 1_000_000);
    fixture.rig.send(&io, read(2, 40), data.len());
    assert_eq!((fixture.asked(), io.line.parts()), (vec![(0, 8)], vec![]));
    fixture.let_go();
    let sent = |fixture: &mut Fixture, offset: u32| {
        assert_eq!(fixture.rig.part_sent(&io, 2, offset), data[offset as usize..][..PIECE]);
    };
    let on_wire = |offset| (2, offset, PIECE);
    assert_eq!((fixture.asked(), io.line.parts()), (vec![(8, 8)], vec![on_wire(0)]), "both work");
    // The wire is slower: the disk has to wait.
    fixture.let_go();
    assert_eq!((fixture.asked(), io.line.parts()), (vec![], vec![on_wire(0), on_wire(UNIT)]));
    sent(&mut fixture, 0);
    assert_eq!((fixture.asked(), io.line.parts()), (vec![(16, 8)], vec![on_wire(UNIT)]), "both work");
    // The disk is slower: the wire has nothing to do.
    sent(&mut fixture, UNIT);
    assert_eq!((fixture.asked(), io.line.parts()), (vec![], vec![]));
    fixture.let_go();
    assert_eq!((fixture.asked(), io.line.parts()), (vec![(24, 8)], vec![on_wire(2 * UNIT)]), "both work");
    fixture.let_go();
    sent(&mut fixture, 2 * UNIT);
    assert_eq!((fixture.asked(), io.line.parts()), (vec![(32, 8)], vec![on_wire(3 * UNIT)]), "both work");
    assert_eq!(fixture.rig.states(&io), [(RequestState::Bulk, 1)]);
    fixture.let_go();
    // The answer follows the last part at once, and takes none of the wire's buffers away.
    assert_eq!(fixture.rig.states(&io), [(RequestState::Replying, 1)]);
    assert_eq!(io.line.parts(), [on_wire(3 * UNIT), on_wire(4 * UNIT)]);
    assert_eq!(fixture.free(), 14 * u64::from(UNIT));
    sent(&mut fixture, 3 * UNIT);
    assert_ok(&fixture.rig.answer(&io).expect("an answer"));
    let totals = fixture.totals();
    assert_eq!((totals.reads, totals.units_read, totals.writes), (1, 40, 1));
    fixture.finish();
}

/// Both ways through a disk with blocks of this size, behind so many buffers of a piece.
fn both_ways(block_bytes: u32, buffers: u32, fault: Option<Fault>) {
    let (disk, control) = FaultDisk::new(pool_disk(block_bytes), 7);
    let unit = 8 * block_bytes;
    let zones = vec![(unit, buffers)];
    let setup = Setup { zones, bulk_unit: unit, transfer_bytes: 1 << 20, ..Setup::small(vec![disk]) };
    let mut rig = Rig::new(setup);
    let io = rig.host().io;
    fault.inspect(|fault| control.set_all(*fault, 500_000));
    // One block more than a piece, one less than two, whole pieces, many.
    for blocks in [9, 15, 16, 17, 23, 24, 100] {
        let mut data = pattern(blocks as usize, (blocks * block_bytes) as usize);
        let lba = 2048 - u64::from(blocks);
        let is_over = |rig: &mut Rig, data: &mut [u8]| {
            if !move_part(rig, &io, data) {
                rig.turn();
            }
            io.line.parts().is_empty() && rig.states(&io) == [(RequestState::Replying, 1)]
        };
        rig.send(&io, Sqe::write(1, 1, lba, blocks, true), data.len());
        assert!((0..10_000).any(|_| is_over(&mut rig, &mut data)), "{:?}", rig.states(&io));
        assert_ok(&rig.answer(&io).expect("an answer"));
        let mut back = vec![0; data.len()];
        rig.send(&io, Sqe::read(2, 1, lba, blocks), back.len());
        assert!((0..10_000).any(|_| is_over(&mut rig, &mut back)), "{:?}", rig.states(&io));
        assert_ok(&rig.answer(&io).expect("an answer"));
        assert!(back == data, "{blocks} blocks");
    }
    rig.finish();
}

#[test]
fn every_length_goes_through_on_disks_of_every_speed_with_few_buffers_and_many() {
    for block_bytes in [512, 4096] {
        for (buffers, fault) in [(1, None), (2, Some(Fault::Delay)), (16, Some(Fault::Reorder)), (16, None)] {
            both_ways(block_bytes, buffers, fault);
        }
    }
}

#[test]
fn each_piece_is_forced_to_the_medium_where_the_command_is() {
    for fua in [false, true] {
        let mut fixture = fixture(4);
        let io = fixture.host.io.clone();
        let sqe = Sqe::write(1, 1, 5, 20, fua);
        assert_ok(&run(&mut fixture.rig, &io, sqe, &mut pattern(1, 20 * 512)));
        let op = |lba, blocks| Asked::Op(Op::Write { fua }, BlockRange { lba, blocks });
        assert_eq!(fixture.record.take(), [op(5, 8), op(13, 8), op(21, 4)]);
        fixture.finish();
    }
}

#[test]
fn the_first_piece_that_fails_is_the_commands_status_and_no_other_is_begun() {
    for is_read in [false, true] {
        for piece in 0..4_u64 {
            let mut fixture = fixture(8);
            let io = fixture.host.io.clone();
            let lba = piece * 8 + 3..piece * 8 + 4;
            fixture.control.fail_range(Broken { lba, reads: true, writes: true });
            let (sqe, status) = match is_read {
                true => (read(1, 32), Status::UNRECOVERED_READ_ERROR),
                false => (write(1, 32), Status::WRITE_FAULT),
            };
            let answer = run(&mut fixture.rig, &io, sqe, &mut pattern(3, 4 * PIECE));
            assert_eq!((answer.status, answer.has_more), (status.dnr(), true));
            assert_eq!(fixture.asked().len() as u64, piece + 1);
            let totals = fixture.totals();
            assert_eq!((totals.reads, totals.writes, totals.media_errors), (0, 0, 1));
            assert_eq!(fixture.free(), 8 * u64::from(UNIT));
            // The queue goes on.
            fixture.control.heal();
            assert_ok(&run(&mut fixture.rig, &io, write(2, 32), &mut pattern(3, 4 * PIECE)));
            fixture.finish();
        }
    }
}

#[test]
fn a_failed_command_is_answered_when_the_wire_has_given_its_buffer_back() {
    let mut fixture = fixture(8);
    let io = fixture.host.io.clone();
    fixture.control.fail_range(Broken { lba: 8..9, reads: true, writes: false });
    fixture.rig.send(&io, read(1, 24), 3 * PIECE);
    assert_eq!(io.line.parts(), [(1, 0, PIECE)]);
    assert_eq!((fixture.rig.answer(&io), fixture.free()), (None, 7 * u64::from(UNIT)));
    fixture.rig.part_sent(&io, 1, 0);
    let answer = fixture.rig.answer(&io).expect("an answer");
    assert_eq!(answer.status, Status::UNRECOVERED_READ_ERROR.dnr());
    // Data that was damaged on its way, while a piece is at the disk.
    fixture.control.set_all(Fault::Drop, 1_000_000);
    fixture.rig.send(&io, write(2, 24), 3 * PIECE);
    fixture.rig.bring_part(&io, 2, 0, &[1; PIECE], Ok(()));
    let damaged = Err(Status::COMMAND_TRANSIENT_TRANSPORT_ERROR);
    fixture.rig.bring_part(&io, 2, UNIT, &[1; PIECE], damaged);
    assert_eq!((fixture.rig.answer(&io), io.line.parts()), (None, vec![]));
    fixture.let_go();
    let answer = fixture.rig.answer(&io).expect("an answer");
    assert_eq!(answer.status, Status::COMMAND_TRANSIENT_TRANSPORT_ERROR);
    assert_eq!((fixture.asked().len(), fixture.free()), (3, 8 * u64::from(UNIT)));
    fixture.finish();
}

#[test]
fn a_disk_that_goes_in_between_fails_the_command() {
    for is_removed in [false, true] {
        let mut fixture = fixture(8);
        let io = fixture.host.io.clone();
        fixture.rig.send(&io, write(1, 24), 3 * PIECE);
        fixture.rig.bring_part(&io, 1, 0, &[1; PIECE], Ok(()));
        if is_removed {
            fixture.rig.setup.remove(1);
            fixture.rig.publish();
        } else {
            fixture.control.set_gone(true);
        }
        fixture.rig.bring_part(&io, 1, UNIT, &[1; PIECE], Ok(()));
        assert_eq!(fixture.rig.answer(&io), None, "the third piece is on its way");
        fixture.rig.bring_part(&io, 1, 2 * UNIT, &[1; PIECE], Ok(()));
        let answer = fixture.rig.answer(&io).expect("an answer");
        assert_eq!(answer.status, Status::INTERNAL_ERROR.dnr());
        fixture.finish();
    }
}

/// Abort command 1 of the I/O queue; whether the target says that it was aborted.
fn abort(fixture: &mut Fixture) -> bool {
    let admin = fixture.host.admin.clone();
    let answer = fixture.rig.run(&admin, Sqe::abort(0x500, 1, 1), &[]);
    assert_ok(&answer);
    answer.result == 0
}

#[test]
fn a_write_is_aborted_before_the_disk_has_seen_it_and_not_after() {
    let mut fixture = slow_fixture(8);
    let io = fixture.host.io.clone();
    fixture.rig.send(&io, write(1, 24), 3 * PIECE);
    assert!(abort(&mut fixture) && abort(&mut fixture));
    fixture.rig.bring_part(&io, 1, UNIT, &[1; PIECE], Ok(()));
    assert_eq!(fixture.rig.answer(&io), None, "the wire still has a buffer");
    fixture.rig.bring_part(&io, 1, 0, &[1; PIECE], Ok(()));
    assert_eq!(fixture.rig.answer(&io).map(|answer| answer.status), Some(Status::ABORTED_BY_REQUEST));
    assert_eq!((fixture.asked(), fixture.free()), (vec![], 8 * u64::from(UNIT)));

    fixture.rig.send(&io, write(1, 24), 3 * PIECE);
    fixture.rig.bring_part(&io, 1, 0, &[1; PIECE], Ok(()));
    assert!(!abort(&mut fixture), "at the disk");
    fixture.let_go();
    assert!(!abort(&mut fixture), "a part of it is on the disk");
    fixture.control.set_all(Fault::Drop, 0);
    fixture.control.release_dropped();
    fixture.rig.bring_part(&io, 1, UNIT, &[1; PIECE], Ok(()));
    fixture.rig.bring_part(&io, 1, 2 * UNIT, &[1; PIECE], Ok(()));
    assert_ok(&fixture.rig.answer(&io).expect("an answer"));
    fixture.finish();
}

#[test]
fn a_read_is_aborted_wherever_it_is_and_ends_when_disk_and_wire_have_given_back() {
    let mut fixture = slow_fixture(8);
    let io = fixture.host.io.clone();
    fixture.rig.send(&io, read(1, 32), 4 * PIECE);
    fixture.let_go();
    assert_eq!((io.line.parts().len(), fixture.asked().len()), (1, 2), "one on the wire, one at the disk");
    assert!(abort(&mut fixture));
    fixture.rig.part_sent(&io, 1, 0);
    assert_eq!(fixture.rig.answer(&io), None, "the disk still has a buffer");
    fixture.let_go();
    assert_eq!(fixture.rig.answer(&io).map(|answer| answer.status), Some(Status::ABORTED_BY_REQUEST));
    assert_eq!((io.line.parts(), fixture.free()), (vec![], 8 * u64::from(UNIT)));
    // While it waits for its first buffer.
    let _all: Vec<_> = std::iter::from_fn(|| fixture.rig.cores[0].pools().0.take(UNIT)).collect();
    fixture.rig.send(&io, read(1, 32), 4 * PIECE);
    assert_eq!(fixture.rig.states(&io), [(RequestState::NeedBuffer, 1)]);
    assert!(abort(&mut fixture));
    assert_eq!(fixture.rig.answer(&io).map(|answer| answer.status), Some(Status::ABORTED_BY_REQUEST));
    drop(_all);
    fixture.finish();
}

/// The command goes `steps` steps of disk and wire, in turn; false when it was answered before.
fn go(fixture: &mut Fixture, sqe: Sqe, steps: usize) -> bool {
    let io = fixture.host.io.clone();
    let mut data = vec![5; 4 * PIECE];
    fixture.rig.send(&io, sqe, data.len());
    for step in 0..steps {
        if step % 3 == 2 || !move_part(&mut fixture.rig, &io, &mut data) {
            fixture.let_go();
        }
        if fixture.rig.states(&io) == [(RequestState::Replying, 1)] && io.line.parts().is_empty() {
            return false;
        }
    }
    true
}

#[test]
fn a_queue_may_end_at_every_step_and_leaves_nothing_behind() {
    for sqe in [read(1, 32), write(1, 32)] {
        for buffers in [1, 2, 8] {
            for by in 0..4 {
                for steps in 0.. {
                    assert!(steps < 100, "it never ends");
                    let mut fixture = slow_fixture(buffers);
                    let io = fixture.host.io.clone();
                    let is_under_way = go(&mut fixture, sqe, steps);
                    match by {
                        0 => fixture.rig.hang_up(&io),
                        1 => {
                            let admin = fixture.host.admin.clone();
                            fixture.rig.send(&admin, Sqe::property_set(2, false, CC, CC_DISABLED), 0);
                        }
                        2 => (100..200).for_each(|cid| fixture.rig.send(&io, Sqe::new(0x6e, cid, 1), 0)),
                        _ => {
                            fixture.rig.setup.remove(1);
                            fixture.rig.publish();
                        }
                    }
                    // What disk and wire give back after the end does no harm.
                    for _ in 0..20 {
                        fixture.let_go();
                        move_part(&mut fixture.rig, &io, &mut [5; 4 * PIECE]);
                    }
                    fixture.finish();
                    if !is_under_way {
                        break;
                    }
                }
            }
        }
    }
}

#[test]
fn with_one_buffer_disk_and_wire_take_turns_and_commands_wait_in_order() {
    let mut fixture = fixture(1);
    let io = fixture.host.io.clone();
    fixture.rig.send(&io, write(1, 24), 3 * PIECE);
    fixture.rig.send(&io, read(2, 24), 3 * PIECE);
    assert_eq!(fixture.rig.states(&io), [(RequestState::NeedBuffer, 1), (RequestState::Bulk, 1)]);
    for offset in [0, UNIT, 2 * UNIT] {
        assert_eq!(io.line.parts(), [(1, offset, PIECE)]);
        fixture.rig.bring_part(&io, 1, offset, &[9; PIECE], Ok(()));
        fixture.rig.turn();
    }
    assert_ok(&fixture.rig.answer(&io).expect("an answer"));
    for offset in [0, UNIT, 2 * UNIT] {
        assert_eq!(io.line.parts(), [(2, offset, PIECE)]);
        assert_eq!(fixture.rig.part_sent(&io, 2, offset), [9; PIECE]);
    }
    assert_ok(&fixture.rig.answer(&io).expect("an answer"));
    assert_eq!(fixture.rig.cores[0].usage().waits, 1);
    fixture.finish();
}

#[test]
fn the_second_buffer_is_not_taken_from_who_waits_nor_beyond_the_share() {
    let mut fixture = slow_fixture(4);
    let io = fixture.host.io.clone();
    let [second, third, fourth] = [2, 3, 4].map(|number| fixture.rig.host_number(number).io);
    fixture.rig.send(&io, write(1, 24), 3 * PIECE);
    fixture.rig.send(&io, write(2, 24), 3 * PIECE);
    assert_eq!(io.line.parts(), [(1, 0, PIECE), (1, UNIT, PIECE)], "two of four");
    for other in [&second, &third, &fourth] {
        fixture.rig.send(other, write(1, 24), 3 * PIECE);
    }
    let begun = [(1, 0, PIECE)];
    assert_eq!((second.line.parts(), third.line.parts()), (begun.to_vec(), begun.to_vec()));
    assert_eq!(fixture.rig.states(&fourth), [(RequestState::NeedBuffer, 1)]);
    // Buffers come free, and go to those who wait and not to one that has begun.
    fixture.control.set_all(Fault::Drop, 0);
    for offset in [0, UNIT, 2 * UNIT] {
        fixture.rig.bring_part(&io, 1, offset, &[1; PIECE], Ok(()));
    }
    fixture.rig.bring_part(&second, 1, 0, &[1; PIECE], Ok(()));
    assert_eq!(second.line.parts(), [(1, UNIT, PIECE)]);
    fixture.rig.turn();
    assert_eq!((io.line.parts(), fourth.line.parts()), (vec![(2, 0, PIECE)], begun.to_vec()));
    fixture.finish();
}

#[test]
fn many_large_commands_on_few_buffers_all_end() {
    for buffers in [1, 2, 3, 5] {
        let mut fixture = fixture(buffers);
        fixture.control.set_all(Fault::Delay, 300_000);
        let cntlid = fixture.host.cntlid;
        let queues = [fixture.host.io.clone(), fixture.rig.io(0, Want::io(cntlid, 2))];
        for cid in 1..=12_u16 {
            for queue in &queues {
                let (lba, blocks) = (u64::from(cid) * 40, 9 + u32::from(cid) * 2);
                let sqe = match cid % 3 {
                    0 => Sqe::write(cid, 1, lba, 3, false),
                    1 => Sqe::write(cid, 1, lba, blocks, false),
                    _ => Sqe::read(cid, 1, lba, blocks),
                };
                fixture.rig.send(queue, sqe, sqe.blocks() as usize * 512);
            }
        }
        let mut answered = [0; 2];
        for _ in 0..5000 {
            for (queue, count) in queues.iter().zip(&mut answered) {
                move_part(&mut fixture.rig, queue, &mut [3; 64 * 512]);
                for cid in queue.line.fetching() {
                    fixture.rig.bring(queue, cid, &[3; 3 * 512]);
                }
                let answers = fixture.rig.answers(queue);
                answers.iter().for_each(assert_ok);
                *count += answers.len();
            }
            fixture.rig.turn();
        }
        assert_eq!(answered, [12, 12], "{buffers} buffers");
        fixture.finish();
    }
}

#[test]
fn what_may_not_be_cut_is_not() {
    // Data that a disk pins, or takes into memory of its own.
    let disks = |disk| Setup { bulk_unit: UNIT, ..Setup::small(vec![disk]) };
    let mut rig = Rig::new(disks(ram_disk(512)));
    let host = rig.host();
    assert_ok(&rig.run(&host.io, write(1, 32), &pattern(1, 4 * PIECE)));
    assert_eq!(rig.read(&host.io, read(2, 32), 4 * PIECE).data, pattern(1, 4 * PIECE));
    rig.finish();
    // Blocks that change in one step.
    let shape = |geometry| Geometry { atomic_blocks: 16, ..geometry };
    let (disk, record) = Probe::over(pool_disk(512), shape);
    let mut rig = Rig::new(disks(disk));
    let host = rig.host();
    assert_ok(&rig.run(&host.io, write(1, 16), &pattern(1, 2 * PIECE)));
    assert_eq!(rig.read(&host.io, read(2, 32), 4 * PIECE).data[..2 * PIECE], pattern(1, 2 * PIECE));
    assert_eq!(record.take().len(), 2);
    rig.finish();
    // Data in the capsule, commands of several steps, and everything where it is turned off.
    let mut rig = Rig::new(Setup { bulk_unit: 512, ..Setup::small(vec![pool_disk(512)]) });
    let host = rig.host();
    rig.send_pointer(&host.io, write(1, 2), Ok(DataPointer::InCapsule { bytes: 1024 }));
    assert_eq!(host.io.line.fetching(), [1]);
    assert_ok(&rig.finish_command(&host.io, 1, &[1; 1024]));
    assert_ok(&rig.run(&host.io, Sqe::compare(2, 1, 0, 2), &[1; 1024]));
    assert_ok(&rig.run(&host.io, Sqe::verify(3, 1, 0, 64), &[]));
    rig.finish();
    let mut rig = Rig::new(Setup { bulk_unit: 0, ..Setup::small(vec![pool_disk(512)]) });
    let host = rig.host();
    assert_ok(&rig.run(&host.io, write(1, 32), &pattern(1, 4 * PIECE)));
    rig.finish();
}

/// A disk that keeps the buffers of writes until [`KEPT`] is cleared.
struct Keeping(Arc<dyn Disk>);

struct KeepingChannel(Box<dyn DiskChannel>);

thread_local! {
    static KEPT: RefCell<Vec<Buf>> = const { RefCell::new(Vec::new()) };
}

impl Disk for Keeping {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn kind(&self) -> &'static str {
        "keeping"
    }

    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn open(&self, context: &ChannelContext) -> Result<Box<dyn DiskChannel>, OpenError> {
        Ok(Box::new(KeepingChannel(self.0.open(context)?)))
    }

    fn resize(&self, bytes: u64) -> Result<(), ResizeError> {
        self.0.resize(bytes)
    }

    fn usage(&self) -> Usage {
        self.0.usage()
    }
}

impl DiskChannel for KeepingChannel {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn submit(&mut self, token: Token, request: &IoRequest, buf: Option<Buf>) -> Option<Done> {
        let done = self.0.submit(token, request, buf)?;
        KEPT.with_borrow_mut(|kept| kept.extend(done.buf));
        Some(Done { buf: None, ..done })
    }

    fn poll(&mut self, now: Nanos, done: &mut Vec<Done>) -> bool {
        self.0.poll(now, done)
    }

    fn cancel_owner(&mut self, owner: Owner) -> usize {
        self.0.cancel_owner(owner)
    }

    fn in_flight(&self) -> usize {
        self.0.in_flight()
    }
}

#[test]
fn where_the_disk_keeps_the_last_buffer_the_command_waits_for_it_to_come_home() {
    let mut fixture = fixture_on(Arc::new(Keeping(pool_disk(512))), 1);
    let io = fixture.host.io.clone();
    fixture.rig.send(&io, write(1, 20), 20 * 512);
    for (offset, bytes) in [(0, PIECE), (UNIT, PIECE), (2 * UNIT, PIECE / 2)] {
        assert_eq!(io.line.parts(), [(1, offset, bytes)]);
        assert_eq!(fixture.rig.answer(&io), None);
        fixture.rig.bring_part(&io, 1, offset, &vec![7; bytes], Ok(()));
        if offset < 2 * UNIT {
            fixture.rig.turn();
            assert_eq!(fixture.rig.states(&io), [(RequestState::NeedStepBuffer, 1)]);
        }
        KEPT.with_borrow_mut(Vec::clear);
        fixture.rig.turn();
    }
    assert_ok(&fixture.rig.answer(&io).expect("an answer"));
    assert_eq!((fixture.asked(), fixture.free()), (vec![(0, 8), (8, 8), (16, 4)], u64::from(UNIT)));
    fixture.finish();
}
