//! Tests of the fault layer over a RAM disk and a null disk.

use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Pages, Pool, ZoneSpec};

use super::*;
use crate::testing::able::Able;
use crate::{Abilities, Op};
use crate::{NullDisk, NullSpec, RamDisk, RamSpec};

const ALWAYS: u32 = 1_000_000;
const ONE: BlockRange = BlockRange { lba: 3, blocks: 1 };

fn context(core: usize) -> ChannelContext {
    let pool = Pool::new(&[ZoneSpec { buffer_bytes: 4096, count: 64 }], Pages::Base).expect("pool");
    ChannelContext { core, pool, depth: 64 }
}

fn over_null(seed: u64) -> (Box<dyn DiskChannel>, Arc<FaultControl>) {
    let null = NullDisk::new("n", NullSpec { bytes: 1 << 30, block_bytes: 4096 }).expect("null disk");
    let (source, control) = FaultDisk::new(null, seed);
    (source.open(&context(0)).expect("opens"), control)
}

fn over_ram(seed: u64) -> (Box<dyn DiskChannel>, Arc<FaultControl>) {
    let spec = RamSpec { bytes: 1 << 20, block_bytes: 4096, pages: Pages::Base, has_seals: false };
    let (source, control) = FaultDisk::new(RamDisk::new("r", spec).expect("ram disk"), seed);
    (source.open(&context(0)).expect("opens"), control)
}

fn frames(disk: &mut dyn DiskChannel, range: BlockRange) -> Buf {
    let prepared = disk.prepare(&IoRequest::new(Op::Write { fua: false }, range), None);
    let Prepared::Fill(buf) = prepared else { panic!("no frames are free") };
    buf
}

fn write(disk: &mut dyn DiskChannel, token: u64, range: BlockRange, fill: u8) -> Option<Done> {
    let mut buf = frames(disk, range);
    buf.segments_mut().for_each(|segment| segment.fill(fill));
    disk.submit(Token(token), &IoRequest::new(Op::Write { fua: false }, range), Some(buf))
}

/// The byte that a block is filled with, read when nothing is set to fail.
fn fill_of(disk: &mut dyn DiskChannel, range: BlockRange) -> u8 {
    let done = disk.submit(Token(99), &IoRequest::new(Op::Read, range), None).expect("at once");
    done.buf.and_then(|buf| buf.as_slice().map(|bytes| bytes[0])).expect("a pin")
}

/// Submits 400 reads with mixed faults, polling after each; what ended, in order.
fn story(seed: u64) -> Vec<(u64, Result<(), DiskError>)> {
    let (mut disk, control) = over_null(seed);
    control.set(Fault::Error, OpKind::Read, 100_000);
    control.set(Fault::Delay, OpKind::Read, 300_000);
    control.set(Fault::Reorder, OpKind::Read, 300_000);
    control.set(Fault::Drop, OpKind::Read, 50_000);
    let mut done = Vec::with_capacity(8);
    let mut ended = Vec::new();
    for token in 0..400 {
        let at_once = disk.submit(Token(token), &IoRequest::new(Op::Read, ONE), None);
        ended.extend(at_once.map(|done| (done.token.0, done.result)));
        disk.poll(Nanos::ZERO, &mut done);
        ended.extend(done.drain(..).map(|done| (done.token.0, done.result)));
    }
    for _ in 0..64 {
        disk.poll(Nanos::ZERO, &mut done);
        ended.extend(done.drain(..).map(|done| (done.token.0, done.result)));
    }
    assert_eq!(disk.in_flight() as u64, control.injected(Fault::Drop), "only the dropped are left");
    assert!(!disk.poll(Nanos::ZERO, &mut done), "nothing to do for what is dropped");
    control.release_dropped();
    for _ in 0..64 {
        disk.poll(Nanos::ZERO, &mut done);
        ended.extend(done.drain(..).map(|done| (done.token.0, done.result)));
    }
    assert_eq!(disk.in_flight(), 0);
    ended
}

#[test]
fn a_seed_repeats_its_story_and_another_tells_another() {
    let first = story(7);
    assert_eq!(first, story(7));
    assert_ne!(first, story(8));
    let mut tokens: Vec<u64> = first.iter().map(|(token, _)| *token).collect();
    assert!(!tokens.is_sorted(), "some were reordered");
    tokens.sort_unstable();
    assert_eq!(tokens, (0..400).collect::<Vec<_>>(), "each ended exactly once");
    let errors = first.iter().filter(|(_, result)| *result == Err(DiskError::MediaRead)).count();
    assert!((20..70).contains(&errors), "{errors} of 400 at 10 %");
}

#[test]
fn nothing_happens_until_it_is_set_and_only_to_the_ops_it_is_set_for() {
    let (mut disk, control) = over_ram(1);
    control.set(Fault::Error, OpKind::Write, ALWAYS);
    assert_eq!(
        disk.submit(Token(1), &IoRequest::new(Op::Read, ONE), None).map(|done| done.result),
        Some(Ok(()))
    );
    assert_eq!(
        disk.submit(Token(1), &IoRequest::new(Op::Flush, ONE), None).map(|done| done.result),
        Some(Ok(()))
    );
    let done = write(&mut *disk, 2, ONE, 5).expect("at once");
    assert_eq!((done.token, done.result), (Token(2), Err(DiskError::MediaWrite)));
    assert!(done.buf.is_some(), "the frames come back");
    assert_eq!(fill_of(&mut *disk, ONE), 0, "without effect");
    control.set_error(OpKind::Write, DiskError::NoSpace);
    control.set_error_effect(ALWAYS);
    assert_eq!(write(&mut *disk, 2, ONE, 6).map(|done| done.result), Some(Err(DiskError::NoSpace)));
    assert_eq!(fill_of(&mut *disk, ONE), 6, "with effect");
    control.set(Fault::Error, OpKind::Write, 0);
    assert_eq!(write(&mut *disk, 2, ONE, 7).map(|done| done.result), Some(Ok(())));
    assert_eq!(control.injected(Fault::Error), 2);
}

#[test]
fn a_delayed_write_takes_effect_before_or_after_the_delay_but_before_its_end() {
    let (mut disk, control) = over_ram(3);
    control.set(Fault::Delay, OpKind::Write, ALWAYS);
    control.set_delay_polls_max(4);
    let (mut early, mut late) = (0, 0);
    for fill in 1..=50u8 {
        assert!(write(&mut *disk, u64::from(fill), ONE, fill).is_none());
        if fill_of(&mut *disk, ONE) == fill {
            early += 1
        } else {
            late += 1
        }
        let mut done = Vec::with_capacity(1);
        let polls = (1..=4).find(|_| disk.poll(Nanos::ZERO, &mut done) && !done.is_empty());
        assert!(polls.is_some(), "ends within 4 polls");
        assert_eq!(done[0].token.0, u64::from(fill));
        assert_eq!(fill_of(&mut *disk, ONE), fill);
    }
    assert!(early > 5 && late > 5, "{early} early, {late} late");
}

#[test]
fn broken_blocks_fail_until_healed_and_a_gone_disk_fails_all() {
    let (mut disk, control) = over_ram(1);
    control.fail_range(Broken { lba: 3..4, reads: true, writes: false });
    control.fail_range(Broken { lba: 5..7, reads: false, writes: true });
    let mut result = |op, lba, blocks| {
        let range = BlockRange { lba, blocks };
        let buf = matches!(op, Op::Write { .. }).then(|| frames(&mut *disk, range));
        disk.submit(Token(0), &IoRequest::new(op, range), buf).expect("at once").result
    };
    let zeroes = Op::WriteZeroes { deallocate: true, fua: false };
    assert_eq!(result(Op::Read, 3, 1), Err(DiskError::MediaRead));
    assert_eq!(result(Op::Read, 0, 8), Err(DiskError::MediaRead));
    assert_eq!((result(Op::Read, 0, 3), result(Op::Read, 4, 8)), (Ok(()), Ok(())));
    assert_eq!(result(Op::Write { fua: true }, 3, 1), Ok(()));
    assert_eq!(result(Op::Write { fua: true }, 6, 4), Err(DiskError::MediaWrite));
    assert_eq!((result(zeroes, 0, 6), result(zeroes, 7, 1)), (Err(DiskError::MediaWrite), Ok(())));
    assert_eq!(result(Op::Flush, 0, 0), Ok(()));
    let mut swap = |lba| {
        let range = BlockRange { lba, blocks: 1 };
        let data = frames(&mut *disk, range);
        disk.compare_and_write(Token(0), range, Buf::zeroes(4096), data).expect("at once").result
    };
    assert_eq!((swap(3), swap(5)), (Err(DiskError::MediaRead), Err(DiskError::MediaWrite)));
    assert_eq!(swap(200), Ok(()));
    control.heal();
    let mut result = |op, lba, blocks| {
        disk.submit(Token(0), &IoRequest::new(op, BlockRange { lba, blocks }), None).expect("at once").result
    };
    assert_eq!((result(Op::Read, 3, 1), result(zeroes, 0, 6)), (Ok(()), Ok(())));
    control.set_gone(true);
    assert_eq!(
        (result(Op::Read, 0, 1), result(Op::Flush, 0, 0)),
        (Err(DiskError::Gone), Err(DiskError::Gone))
    );
    control.set_gone(false);
    assert_eq!(result(Op::Read, 0, 1), Ok(()));
}

#[test]
fn what_the_disk_does_itself_fails_as_its_parts_do_and_is_held() {
    let spec = RamSpec { bytes: 1 << 20, block_bytes: 4096, pages: Pages::Base, has_seals: false };
    let able = Arc::new(Able(RamDisk::new("r", spec).expect("ram disk")));
    let (source, control) = FaultDisk::new(able, 1);
    let mut disk = source.open(&context(0)).expect("opens");
    let all = Abilities { compare: true, verify: true, copy: true, reads_in_place: true };
    assert_eq!(disk.abilities(), all);
    control.fail_range(Broken { lba: 3..4, reads: true, writes: false });
    control.fail_range(Broken { lba: 5..7, reads: false, writes: true });
    let range = |lba, blocks| BlockRange { lba, blocks };
    let mut look = |op, lba, blocks: u32| {
        let buf = (op == Op::Compare).then(|| Buf::zeroes(blocks * 4096));
        disk.submit(Token(0), &IoRequest::new(op, range(lba, blocks)), buf).expect("at once").result
    };
    for op in [Op::Compare, Op::Verify] {
        assert_eq!((look(op, 2, 2), look(op, 4, 4)), (Err(DiskError::MediaRead), Ok(())), "{op:?}");
    }
    let mut copy = |from, to, blocks| disk.copy(Token(0), range(from, blocks), to, false).map(|it| it.result);
    assert_eq!(copy(2, 20, 2), Some(Err(DiskError::MediaRead)), "it reads what is broken");
    assert_eq!(copy(20, 2, 2), Some(Ok(())), "where writes work");
    assert_eq!(copy(20, 4, 2), Some(Err(DiskError::MediaWrite)));
    assert_eq!(copy(5, 20, 2), Some(Ok(())), "where reads work");
    control.set(Fault::Drop, OpKind::Copy, ALWAYS);
    assert!(copy(20, 30, 1).is_none());
    control.set(Fault::Error, OpKind::Verify, ALWAYS);
    control.set_error(OpKind::Verify, DiskError::Internal);
    let done = disk.submit(Token(1), &IoRequest::new(Op::Verify, range(0, 1)), None).expect("at once");
    assert_eq!((done.result, disk.in_flight()), (Err(DiskError::Internal), 1));
    control.release_dropped();
    let mut done = Vec::with_capacity(1);
    assert!(disk.poll(Nanos::ZERO, &mut done));
    assert_eq!((done[0].token, done[0].result), (Token(0), Ok(())));
}

#[test]
fn a_dropped_compare_and_write_ends_when_it_is_released() {
    let (mut disk, control) = over_ram(1);
    control.set(Fault::Drop, OpKind::CompareAndWrite, ALWAYS);
    let mut data = frames(&mut *disk, ONE);
    data.segments_mut().for_each(|segment| segment.fill(8));
    assert!(disk.compare_and_write(Token(4), ONE, Buf::zeroes(4096), data).is_none());
    let mut done = Vec::with_capacity(4);
    for _ in 0..100 {
        assert!(!disk.poll(Nanos::ZERO, &mut done) && done.is_empty());
    }
    assert_eq!(disk.in_flight(), 1);
    control.release_dropped();
    assert!(disk.poll(Nanos::ZERO, &mut done));
    assert_eq!((done[0].token, done[0].result, disk.in_flight()), (Token(4), Ok(()), 0));
    assert_eq!(fill_of(&mut *disk, ONE), 8);
}

#[test]
fn reordered_commands_end_in_an_order_that_the_seed_draws() {
    let order = |seed| {
        let (mut disk, control) = over_null(seed);
        control.set_all(Fault::Reorder, ALWAYS);
        for token in 0..8 {
            assert!(disk.submit(Token(token), &IoRequest::new(Op::Read, ONE), None).is_none());
        }
        let mut done = Vec::with_capacity(8);
        assert!(disk.poll(Nanos::ZERO, &mut done));
        done.iter().map(|done| done.token.0).collect::<Vec<_>>()
    };
    let orders: std::collections::HashSet<_> = (0..20).map(order).collect();
    assert!(orders.len() > 15, "{orders:?}");
    assert!(orders.iter().all(|order| order.len() == 8));
}

#[test]
fn what_does_not_fit_the_list_of_done_comes_in_the_next_poll() {
    let (mut disk, control) = over_null(1);
    control.set_all(Fault::Reorder, ALWAYS);
    for token in 0..5 {
        assert!(disk.submit(Token(token), &IoRequest::new(Op::Read, ONE), None).is_none());
    }
    let mut done = Vec::with_capacity(2);
    for expected in [2, 2, 1] {
        assert!(disk.poll(Nanos::ZERO, &mut done));
        assert_eq!((done.len(), done.capacity()), (expected, 2));
        done.clear();
    }
    assert_eq!(disk.in_flight(), 0);
}

#[test]
fn a_read_in_place_meets_the_faults_that_a_submitted_one_would_meet() {
    let with_faults = || {
        let (disk, control) = over_null(11);
        control.set(Fault::Error, OpKind::Read, 100_000);
        control.set(Fault::Delay, OpKind::Read, 200_000);
        control.set(Fault::Drop, OpKind::Read, 100_000);
        (disk, control)
    };
    let ((mut submitted, all), (mut asked, some)) = (with_faults(), with_faults());
    let mut in_place = 0;
    for token in 0..400 {
        let wanted =
            submitted.submit(Token(token), &IoRequest::new(Op::Read, ONE), None).map(|done| done.result);
        let read = IoRequest::new(Op::Read, ONE);
        let seen = match asked.prepare(&read, None) {
            Prepared::Ready(data) => {
                assert_eq!(data.len(), 4096);
                in_place += 1;
                Some(Ok(()))
            }
            Prepared::Fill(data) => asked.submit(Token(token), &read, Some(data)).map(|done| done.result),
            Prepared::Pool | Prepared::Later | Prepared::Wait => panic!("a null disk has its data in place"),
        };
        assert_eq!(seen, wanted, "read {token}");
    }
    assert!((200..300).contains(&in_place), "{in_place}");
    assert_eq!(some.reads_in_place(), in_place);
    for fault in [Fault::Error, Fault::Delay, Fault::Drop] {
        assert_eq!(some.injected(fault), all.injected(fault), "{fault:?}");
    }
}
