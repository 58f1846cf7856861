//! Which written pages stay in the cache: whole ones that were in it, that one write alone has changed.

use std::sync::atomic::Ordering::SeqCst;

use super::rules::{PAGE, Rig, range, read};
use crate::{DiskError, IoRequest, Op, Token};

#[test]
fn a_whole_page_that_was_there_stays_and_another_is_not_entered() {
    let mut rig = Rig::new(16 * PAGE, 1 << 20);
    rig.data(2 * PAGE, PAGE);
    let old = rig.begin(9, read(2 * PAGE, PAGE)).expect("a hit");
    rig.write(1, PAGE, 4 * PAGE, 0xee);
    assert_eq!(rig.wait(1).result, Ok(()));
    assert!(old.equals_at(0, &[2; PAGE]), "who has the old bytes keeps them");
    drop(old);
    let before = rig.reads();
    assert_eq!(rig.data(2 * PAGE, PAGE), [0xee; PAGE]);
    assert_eq!((rig.reads(), rig.counts().written), (before, 1), "it is found");
    assert_eq!(rig.data(PAGE, 4 * PAGE), [0xee; 4 * PAGE]);
    assert_eq!(rig.reads(), before + 2, "what was not there is read from the disk");
    rig.assert_at_rest();
}

#[test]
fn the_hits_of_a_page_are_kept_for_the_policy() {
    let mut rig = Rig::new(16 * PAGE, 1 << 20);
    let frame = |rig: &Rig| {
        let shared = rig.source.shared();
        let words = shared.words();
        (0..words.len()).find_map(|frame| words.heat(frame)).expect("one page is there")
    };
    rig.data(0, PAGE);
    (0..2).for_each(|_| drop(rig.data(0, PAGE)));
    let heat = frame(&rig);
    assert!(heat > 1);
    rig.write(1, 0, PAGE, 3);
    rig.wait(1);
    assert_eq!(frame(&rig), heat);
    rig.assert_at_rest();
}

/// The page is written into another frame, as the old one is in use.
#[test]
fn a_page_that_is_read_often_is_not_evicted_by_a_scan_after_it_was_written() {
    let mut rig = Rig::new(256 * PAGE, 64 << 10);
    let scan = |rig: &mut Rig, pages: std::ops::Range<usize>| {
        pages.for_each(|page| _ = rig.data(page * PAGE, PAGE));
    };
    (0..4).for_each(|_| drop(rig.data(0, PAGE)));
    scan(&mut rig, 10..40);
    let old = rig.begin(9, read(0, PAGE)).expect("a hit");
    scan(&mut rig, 40..70);
    rig.write(1, 0, PAGE, 0xee);
    rig.wait(1);
    drop(old);
    scan(&mut rig, 70..100);
    let before = rig.reads();
    assert_eq!(rig.data(0, PAGE), [0xee; PAGE]);
    assert_eq!(rig.reads(), before, "it is found");
    rig.assert_at_rest();
}

#[test]
fn a_part_of_a_page_a_failed_write_and_zeroes_do_not_stay() {
    let mut rig = Rig::new(16 * PAGE, 1 << 20);
    rig.data(0, 8 * PAGE);
    rig.write(1, 512, PAGE, 0xee);
    rig.wait(1);
    rig.control.fails_writes.store(1, SeqCst);
    rig.write(2, 2 * PAGE, PAGE, 0xee);
    assert_eq!(rig.wait(2).result, Err(DiskError::MediaWrite));
    let zeroes = IoRequest::new(Op::WriteZeroes { deallocate: false, fua: false }, range(4 * PAGE, PAGE));
    assert!(rig.disk.submit(Token(3), &zeroes, None).is_none());
    rig.wait(3);
    assert_eq!(rig.counts().written, 0);
    assert_eq!(rig.source.shared().index.len(), 8 - 4);
    assert_eq!(rig.data(4 * PAGE, PAGE), [0; PAGE]);
    rig.assert_at_rest();
}

/// The second write changes the disk last; it ends first, or last.
#[test]
fn of_two_writes_at_a_time_neither_stays() {
    for second_ends_first in [true, false] {
        let mut rig = Rig::new(16 * PAGE, 1 << 20);
        let mut other = rig.other();
        rig.data(PAGE, PAGE);
        rig.write(1, PAGE, PAGE, 0xaa);
        other.write(2, PAGE, PAGE, 0xbb);
        if second_ends_first {
            other.wait(2);
            rig.wait(1);
        } else {
            rig.wait(1);
            other.wait(2);
        }
        assert_eq!(rig.data(PAGE, PAGE), [0xbb; PAGE]);
        assert_eq!(rig.counts().written, 0);
        other.assert_at_rest();
        rig.assert_at_rest();
    }
}

#[test]
fn a_page_that_a_long_write_has_changed_meanwhile_does_not_stay() {
    for long_begins_first in [false, true] {
        let mut rig = Rig::new(2048 * PAGE, 1 << 20);
        let mut other = rig.other();
        rig.data(PAGE, PAGE);
        let zeroes = IoRequest::new(Op::WriteZeroes { deallocate: false, fua: false }, range(0, 2000 * PAGE));
        if long_begins_first {
            assert!(other.disk.submit(Token(2), &zeroes, None).is_none());
            rig.write(1, PAGE, PAGE, 0xaa);
        } else {
            rig.write(1, PAGE, PAGE, 0xaa);
            assert!(other.disk.submit(Token(2), &zeroes, None).is_none());
        }
        // It sweeps, changes the disk and ends, all while the first has not.
        other.wait(2);
        assert_eq!(rig.wait(1).result, Ok(()));
        assert_eq!(rig.data(PAGE, PAGE), [0; PAGE]);
        assert_eq!(rig.counts().written, 0);
        other.assert_at_rest();
        rig.assert_at_rest();
    }
}

#[test]
fn a_page_that_is_written_during_a_long_write_does_not_stay() {
    let mut rig = Rig::new(2048 * PAGE, 1 << 20);
    let mut other = rig.other();
    rig.data(2001 * PAGE, PAGE);
    rig.control.holds_writes.store(true, SeqCst);
    let zeroes = IoRequest::new(Op::WriteZeroes { deallocate: false, fua: false }, range(0, 2000 * PAGE));
    assert!(other.disk.submit(Token(2), &zeroes, None).is_none());
    // It has swept the frames, and the disk has it.
    (0..4).for_each(|_| _ = other.poll());
    rig.write(1, 2001 * PAGE, PAGE, 0xaa);
    rig.control.holds_writes.store(false, SeqCst);
    rig.wait(1);
    other.wait(2);
    assert_eq!(rig.counts().written, 0);
    assert_eq!(rig.data(2001 * PAGE, PAGE), [0xaa; PAGE]);
    other.assert_at_rest();
    rig.assert_at_rest();
}

#[test]
fn a_long_write_keeps_32_pages_at_most() {
    // Two of its pages in one bucket would disturb each other.
    let mut rig = Rig::new(64 * PAGE, 64 << 20);
    rig.data(0, 64 * PAGE);
    rig.write(1, 0, 64 * PAGE, 0xee);
    rig.wait(1);
    assert_eq!(rig.counts().written, 32);
    assert_eq!(rig.data(0, 64 * PAGE), [0xee; 64 * PAGE]);
    rig.assert_at_rest();
}
