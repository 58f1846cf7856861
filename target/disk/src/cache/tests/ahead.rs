//! Reading ahead, over a disk whose completions the test holds.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use super::held::HeldDisk;
use super::rules::{PAGE, Rig, read};
use super::{CacheMode, CacheSpec, CachedDisk, PolicyKind, spec};
use crate::{Disk, IoRequest};

fn rig(disk_pages: usize, cache_bytes: u64, read_ahead: u32) -> Rig {
    let (inner, control) = HeldDisk::create(512, disk_pages * PAGE);
    let spec = CacheSpec { read_ahead, ..spec(cache_bytes, PolicyKind::S3Fifo) };
    Rig::on(CachedDisk::new(inner, Some(&spec)).expect("a cache"), control)
}

fn turns(rig: &mut Rig) {
    (0..8).for_each(|_| _ = rig.poll());
}

#[test]
fn a_stream_finds_its_pages_and_right_bytes() {
    for step in [1, 4, 32] {
        let mut rig = rig(1024, 16 << 20, 256 << 10);
        for page in (0..512).step_by(step) {
            let data = rig.data(page * PAGE, step * PAGE);
            assert!(data.chunks(PAGE).zip(page..).all(|(data, page)| data == [page.to_le_bytes()[0]; PAGE]));
            turns(&mut rig);
        }
        let counts = rig.counts();
        assert!(counts.hits > counts.misses * 2, "{counts:?}");
        assert!(counts.useful > 300 && counts.wasted == 0, "{counts:?}");
        assert!(counts.ahead - counts.useful <= 64, "{counts:?}");
        rig.assert_at_rest();
    }
}

#[test]
fn what_is_read_once_is_not_read_ahead_of_where_it_is_there() {
    let mut rig = rig(1024, 4 << 20, 256 << 10);
    // Each page by itself and backwards is no stream.
    (0..32).rev().for_each(|page| _ = rig.data(page * 7 % 32 * PAGE, PAGE));
    turns(&mut rig);
    let before = (rig.reads(), rig.counts().ahead);
    for page in (0..32).step_by(2) {
        let once = IoRequest { hints: 6, ..read(page * PAGE, 2 * PAGE) };
        assert!(rig.begin(1, once).is_some(), "{page}");
        turns(&mut rig);
    }
    assert_eq!((rig.reads(), rig.counts().ahead), before);
    rig.assert_at_rest();
}

/// A disk with an arm would seek for each piece.
#[test]
fn pieces_go_to_the_disk_in_their_order() {
    let mut rig = rig(1024, 64 << 20, 1 << 20);
    for page in (0..512).step_by(4) {
        rig.data(page * PAGE, 4 * PAGE);
    }
    rig.data(600 * PAGE, 100 * PAGE);
    let places = rig.control.places.lock().expect("no panic").clone();
    assert!(places.is_sorted() && places.len() > 8, "{places:?}");
}

#[test]
fn a_read_waits_for_a_page_that_is_being_read_ahead() {
    let mut rig = rig(1024, 2 << 20, 256 << 10);
    (0..3).for_each(|page| _ = rig.data(page * PAGE, PAGE));
    rig.control.holds_reads.store(true, SeqCst);
    turns(&mut rig);
    let before = rig.reads();
    assert!(rig.begin(1, read(5 * PAGE, PAGE)).is_none());
    turns(&mut rig);
    assert_eq!(rig.reads(), before, "it is under way");
    rig.control.holds_reads.store(false, SeqCst);
    assert!(rig.wait(1).buf.expect("data").equals_at(0, &[5; PAGE]));
    assert_eq!(rig.counts().late, 1);
    rig.assert_at_rest();
}

#[test]
fn demand_comes_first_and_a_busy_disk_is_left_alone() {
    let mut rig = rig(1024, 2 << 20, 256 << 10);
    rig.control.holds_reads.store(true, SeqCst);
    // More than a quarter of what the disk takes, which is 64.
    let places = (0..40).map(|at| at * 20 + 200).chain(0..4);
    for (token, page) in (0..).zip(places) {
        assert!(rig.begin(token, read(page * PAGE, PAGE)).is_none());
    }
    turns(&mut rig);
    assert_eq!((rig.reads(), rig.counts().ahead), (44, 0));
    rig.control.holds_reads.store(false, SeqCst);
    (0..44).for_each(|token| _ = rig.wait(token));
    turns(&mut rig);
    rig.assert_at_rest();
}

#[test]
fn a_sixteenth_of_the_cache_is_unread_at_most() {
    let mut rig = rig(16 << 10, 1 << 20, 4 << 20);
    // Many streams that do not go on.
    for stream in 0..64 {
        (0..4).for_each(|page| _ = rig.data((stream * 200 + page) * PAGE, PAGE));
        turns(&mut rig);
    }
    let unread = rig.source.shared().words().unread();
    assert!(unread > 0 && unread <= 256 / 16 + 8, "{unread}");
    let counts = rig.counts();
    assert_eq!(counts.ahead, counts.useful + counts.late + counts.wasted + unread, "{counts:?}");
    rig.assert_at_rest();
}

#[test]
fn the_end_of_the_disk_failures_writes_and_cores_that_go_leave_nothing_behind() {
    let mut rig = rig(40, 1 << 20, 256 << 10);
    for page in 0..40 {
        assert_eq!(rig.data(page * PAGE, PAGE), [page.to_le_bytes()[0]; PAGE]);
        turns(&mut rig);
    }
    rig.assert_at_rest();
    rig.source.shared().drop_all();
    let mut other = rig.other();
    rig.control.holds_reads.store(true, SeqCst);
    for (token, page) in (0..).zip(0..3) {
        assert!(other.begin(token, read(page * PAGE, PAGE)).is_none());
    }
    turns(&mut other);
    // Read ahead, and changed meanwhile.
    rig.write(1, 5 * PAGE, PAGE, 0xee);
    rig.wait(1);
    rig.control.holds_reads.store(false, SeqCst);
    (0..3).for_each(|token| _ = other.wait(token));
    turns(&mut other);
    assert_eq!(other.data(5 * PAGE, PAGE), [0xee; PAGE]);
    turns(&mut other);
    other.assert_at_rest();
    rig.source.shared().drop_all();
    assert_eq!(rig.source.shared().words().unread(), 0);
    // What is read ahead fails; who asks for it reads it again.
    for page in 20..22 {
        rig.data(page * PAGE, PAGE);
    }
    assert!(rig.begin(2, read(22 * PAGE, PAGE)).is_none());
    rig.control.fails.store(1, SeqCst);
    assert_eq!(rig.wait(2).result, Ok(()));
    turns(&mut rig);
    assert_eq!(rig.control.fails.load(SeqCst), 0);
    assert_eq!(rig.data(23 * PAGE, PAGE), [23; PAGE]);
    turns(&mut rig);
    rig.source.shared().drop_all();
    // A core that goes while it reads ahead.
    for page in 0..2 {
        other.data(page * PAGE, PAGE);
    }
    assert!(other.begin(2, read(2 * PAGE, PAGE)).is_none());
    rig.control.holds_reads.store(true, SeqCst);
    turns(&mut other);
    assert!(other.disk.in_flight() > 0);
    drop(other);
    rig.control.holds_reads.store(false, SeqCst);
    // What the disk had is lost with the core's handle, and no request waits for it.
    for page in 0..40 {
        assert_eq!(rig.data(page * PAGE, 512)[0], if page == 5 { 0xee } else { page.to_le_bytes()[0] });
    }
}

#[test]
fn what_is_read_ahead_stays_before_what_was_given_in_an_exclusive_cache() {
    let (inner, control) = HeldDisk::create(512, 4096 * PAGE);
    let (mode, read_ahead) = (CacheMode::Exclusive, 64 << 10);
    let spec = CacheSpec { mode, read_ahead, ..spec(256 << 10, PolicyKind::S3Fifo) };
    let mut rig = Rig::on(CachedDisk::new(inner, Some(&spec)).expect("a cache"), Arc::clone(&control));
    (0..60).for_each(|at| _ = rig.data((at * at % 61 * 50 + 1000) * PAGE, PAGE));
    (0..4).for_each(|page| _ = rig.data(page * PAGE, PAGE));
    turns(&mut rig);
    (0..30).for_each(|at| _ = rig.data((at * at % 31 * 70 + 1010) * PAGE, PAGE));
    let before = rig.reads();
    rig.data(4 * PAGE, PAGE);
    assert_eq!(rig.reads(), before, "it is there still");
    assert!(rig.source.cache().is_some());
}
