//! Promises of a disk whose submitter or device goes, fails, or does not answer.

use spindle_reactor::clock::Nanos;
use spindle_target_disk::{BlockRange, DiskError, Op, Token};

use crate::Bench;
use crate::bench::{BLOCK, CORES, TURN};

const PAGE: BlockRange = BlockRange { lba: 8, blocks: 8 };
const ONES: [u8; 8 * BLOCK] = [1; 8 * BLOCK];
const TWOS: [u8; 8 * BLOCK] = [2; 8 * BLOCK];
/// More than the periods in which disks check their times, and the delay layer.
const SLACK: Nanos = Nanos::from_ms(250);

/// A submitter that goes has the number of its commands that are still to end; the commands of others go on.
pub(crate) fn a_submitter_that_goes(bench: &mut Bench) -> bool {
    assert_eq!(bench.run(0, Op::Write { fua: false }, PAGE, &ONES).0, Ok(()), "{}", bench.label());
    let is_held = bench.rig.hold(true);
    let mut others = Vec::new();
    for core in 0..CORES {
        for owner in [5, 6] {
            let places = [(16, 8), (16, 8), (40, 3), (64, 32)];
            for (lba, blocks) in places {
                let token = bench.submit(core, owner, Op::Read, BlockRange { lba, blocks }, &[]);
                others.extend((owner == 6).then_some(token));
            }
            let token = bench.submit(core, owner, Op::Write { fua: false }, PAGE, &TWOS);
            others.extend((owner == 6).then_some(token));
        }
        bench.turn();
    }
    for core in 0..CORES {
        let open = bench.open_of(core, 5);
        assert_eq!(bench.cancel(core, 5), open, "{}: what is still to end", bench.label());
    }
    (0..5).for_each(|_| bench.turn());
    if is_held {
        bench.rig.hold(false);
    }
    for token in others {
        assert_eq!(bench.wait(token).0, Ok(()), "{}: a command of another", bench.label());
    }
    while (0..CORES).any(|core| bench.open_of(core, 5) > 0) {
        bench.turn();
    }
    if bench.rig.keeps_data() {
        bench.assert_reads(1, PAGE, &TWOS, "the write of the one that stays");
    }
    true
}

/// An error that is not of the medium is that of the command, whatever is above the disk.
pub(crate) fn an_error_is_passed_on(bench: &mut Bench) -> bool {
    for core in 0..CORES {
        // Not a page that another read has brought into a cache.
        let range = BlockRange { lba: 16 + 64 * core as u64, blocks: 8 };
        let Some(error) = bench.rig.fail_reads(true) else { return false };
        assert_eq!(bench.run(core, Op::Read, range, &[]).0, Err(error), "{}", bench.label());
        bench.rig.fail_reads(false);
        assert_eq!(bench.run(core, Op::Read, range, &[]).0, Ok(()), "{}: the next one", bench.label());
    }
    true
}

/// Polls until these commands have ended; returns the time of the last end.
fn wait_for_all(bench: &mut Bench, tokens: &[Token], error: DiskError) -> Nanos {
    let begin = bench.now;
    let mut left: Vec<Token> = tokens.to_vec();
    while !left.is_empty() {
        bench.turn_of(TURN + TURN);
        let mut ended = Vec::new();
        left.retain(|token| match bench.take(*token) {
            Some(done) => {
                ended.push(done.result);
                false
            }
            None => true,
        });
        for result in ended {
            assert_eq!(result, Err(error), "{}", bench.label());
        }
        assert!(bench.now - begin < Nanos::from_secs(600), "{}: {left:?} do not end", bench.label());
    }
    bench.now - begin
}

/// Each command of a device that does not answer ends within the limit of time, also readers of one page,
/// readers that come later, and writes; and not before. The host may repeat it.
pub(crate) fn one_limit_of_time(bench: &mut Bench) -> bool {
    let Some(limit) = bench.rig.time_limit() else { return false };
    assert!(bench.rig.hold(true), "a rig with a limit can be held");
    let mut tokens = Vec::new();
    for core in 0..CORES {
        for owner in 1..4 {
            tokens.push(bench.submit(core, owner, Op::Read, BlockRange { lba: 16, blocks: 8 }, &[]));
            tokens.push(bench.submit(core, owner, Op::Read, BlockRange { lba: 16, blocks: 40 }, &[]));
        }
        tokens.push(bench.submit(core, 1, Op::Write { fua: false }, PAGE, &ONES));
        tokens.push(bench.submit(core, 1, Op::Flush, PAGE, &[]));
    }
    let half = Nanos(limit.0 / 2);
    let begin = bench.now;
    while bench.now - begin < half {
        bench.turn();
    }
    let late = bench.submit(1, 1, Op::Read, BlockRange { lba: 16, blocks: 8 }, &[]);
    let took = half + wait_for_all(bench, &tokens, DiskError::Internal);
    assert!(took + SLACK > limit && took < limit + SLACK, "{}: {took:?} of {limit:?}", bench.label());
    let took = half + wait_for_all(bench, &[late], DiskError::Internal);
    assert!(took < limit + SLACK, "{}: the late one, {took:?} of {limit:?}", bench.label());
    bench.rig.hold(false);
    assert_eq!(bench.run(0, Op::Read, BlockRange { lba: 16, blocks: 8 }, &[]).0, Ok(()));
    true
}

/// A buffer that came back with an error is not written to afterwards, whatever the device still does.
pub(crate) fn a_buffer_that_came_back_is_not_used(bench: &mut Bench) -> bool {
    let Some(limit) = bench.rig.time_limit() else { return false };
    bench.rig.hold(true);
    let token = bench.submit(0, 1, Op::Read, BlockRange { lba: 16, blocks: 16 }, &[]);
    let begin = bench.now;
    let done = loop {
        bench.turn_of(TURN + TURN);
        if let Some(done) = bench.take(token) {
            break done;
        }
        assert!(bench.now - begin < limit + limit, "{}: no end", bench.label());
    };
    let bytes = |buf: &spindle_reactor::mem::Buf| buf.segments().flatten().copied().collect::<Vec<u8>>();
    let before = done.buf.as_ref().map(bytes);
    bench.rig.hold(false);
    (0..50).for_each(|_| bench.turn());
    let is_same = done.buf.as_ref().map(bytes) == before;
    assert!(is_same, "{}: the device writes to it", bench.label());
    true
}

/// Writes to a disk that has become read-only are refused by name, reads go on.
pub(crate) fn a_disk_that_becomes_read_only(bench: &mut Bench) -> bool {
    assert_eq!(bench.run(0, Op::Write { fua: false }, PAGE, &ONES).0, Ok(()), "{}", bench.label());
    if !bench.rig.set_read_only(true) {
        return false;
    }
    (0..20).for_each(|_| bench.turn());
    for core in 0..CORES {
        assert!(bench.disk(core).geometry().is_read_only, "{}", bench.label());
        let refused = bench.run(core, Op::Write { fua: false }, PAGE, &TWOS).0;
        assert_eq!(refused, Err(DiskError::WriteProtected), "{}", bench.label());
        bench.assert_reads(core, PAGE, &ONES, "a read-only disk");
    }
    bench.rig.set_read_only(false);
    (0..20).for_each(|_| bench.turn());
    assert_eq!(bench.run(0, Op::Write { fua: false }, PAGE, &TWOS).0, Ok(()), "{}", bench.label());
    bench.assert_reads(1, PAGE, &TWOS, "writable again");
    true
}

/// What others have written while the device was away is read by all cores.
pub(crate) fn a_device_that_was_changed_while_away(bench: &mut Bench) -> bool {
    if !bench.rig.keeps_data() {
        return false;
    }
    assert_eq!(bench.run(0, Op::Write { fua: true }, PAGE, &ONES).0, Ok(()), "{}", bench.label());
    for core in [0, 1] {
        bench.assert_reads(core, PAGE, &ONES, "before");
    }
    if !bench.rig.change_while_away(PAGE.lba, 9) {
        return false;
    }
    // A read that the device answers tells that it is back.
    let elsewhere = BlockRange { lba: 200, blocks: 8 };
    while bench.run(0, Op::Read, elsewhere, &[]).0.is_err() {
        bench.turn();
    }
    for core in [1, 0] {
        bench.assert_reads(core, BlockRange { blocks: 1, ..PAGE }, &[9; BLOCK], "after the return");
    }
    true
}
