//! Limits of time, and which errors are passed on: what the disk below promises holds with a cache in front.

use std::sync::atomic::Ordering::SeqCst;

use spindle_reactor::clock::Nanos;

use super::rules::{PAGE, Rig, read};
use super::{PolicyKind, spec};
use crate::{Disk, DiskError, IoRequest, Op, Token};

const BEGIN: Nanos = Nanos::from_secs(100);

fn waited(rig: &Rig) -> Nanos {
    rig.control.waited.lock().expect("no panic").time()
}

fn poll_at(rig: &mut Rig, time: Nanos) {
    rig.disk.poll(time, &mut rig.done);
}

/// One error for each read, without a second command.
#[test]
fn an_error_that_is_not_of_the_medium_is_that_of_the_read() {
    let mut rig = Rig::new(16 * PAGE, 1 << 20);
    rig.control.is_away.store(true, SeqCst);
    rig.control.fails.store(1, SeqCst);
    assert!(rig.begin(1, read(PAGE + 512, 512)).is_none());
    assert_eq!(rig.wait(1).result, Err(DiskError::Internal));
    assert_eq!(rig.reads(), 1);
    // Two pieces, as page 3 is there: the second one succeeds.
    rig.data(3 * PAGE, PAGE);
    rig.control.fails.store(1, SeqCst);
    assert!(rig.begin(2, read(2 * PAGE, 3 * PAGE)).is_none());
    assert_eq!(rig.wait(2).result, Err(DiskError::Internal));
    assert_eq!(rig.reads(), 4);
    rig.assert_at_rest();
}

/// A disk that fails its reads after a time fails the readers of one page after this time, however many.
#[test]
fn readers_of_one_page_do_not_wait_one_after_another() {
    let mut rig = Rig::new(16 * PAGE, 1 << 20);
    let mut others = [rig.other(), rig.other(), rig.other()];
    poll_at(&mut rig, BEGIN);
    others.iter_mut().for_each(|other| poll_at(other, BEGIN));
    rig.control.is_away.store(true, SeqCst);
    rig.control.fails.store(u64::MAX, SeqCst);
    rig.control.holds_reads.store(true, SeqCst);
    assert!(rig.begin(1, read(PAGE, PAGE)).is_none());
    others.iter_mut().for_each(|other| assert!(other.begin(2, read(PAGE, PAGE)).is_none()));
    let later = BEGIN + Nanos::from_ms(900);
    rig.control.holds_reads.store(false, SeqCst);
    poll_at(&mut rig, later);
    assert_eq!(rig.wait(1).result, Err(DiskError::Internal));
    for other in &mut others {
        // The request has the time that the read has waited, with which a disk with a limit fails it.
        poll_at(other, later);
        assert_eq!(waited(other), Nanos::from_ms(900));
        poll_at(other, later);
        assert_eq!(other.wait(2).result, Err(DiskError::Internal));
    }
    others.iter_mut().for_each(Rig::assert_at_rest);
    rig.assert_at_rest();
}

#[test]
fn a_page_that_another_core_never_fills_is_read_around_the_cache() {
    let mut rig = Rig::new(16 * PAGE, 1 << 20);
    let mut hung = rig.other();
    poll_at(&mut rig, BEGIN);
    poll_at(&mut hung, BEGIN);
    assert!(hung.begin(1, read(PAGE, PAGE)).is_none());
    assert!(rig.begin(2, read(0, 2 * PAGE)).is_none());
    for ms in [1, 500, 1000] {
        poll_at(&mut rig, BEGIN + Nanos::from_ms(ms));
        assert!(rig.done.is_empty(), "it waits for the other core");
    }
    for _ in 0..2 {
        poll_at(&mut rig, BEGIN + Nanos::from_ms(1001));
    }
    assert_eq!(waited(&rig), Nanos::from_secs(1));
    let done = rig.done.pop().expect("it has ended");
    assert!(done.result.is_ok() && done.buf.expect("data").equals_at(PAGE, &[1; PAGE]));
    assert_eq!(hung.wait(1).result, Ok(()));
    rig.assert_at_rest();
}

#[test]
fn the_time_of_a_sweep_and_of_a_change_of_the_cache_counts() {
    let mut rig = Rig::new(2048 * PAGE, 1 << 20);
    poll_at(&mut rig, BEGIN);
    let zeroes = Op::WriteZeroes { deallocate: false, fua: false };
    let request = IoRequest::new(zeroes, read(0, 2048 * PAGE).range);
    assert!(rig.disk.submit(Token(1), &request, None).is_none());
    poll_at(&mut rig, BEGIN + Nanos::from_ms(50));
    rig.wait(1);
    assert_eq!(waited(&rig), Nanos::from_ms(50));
    // A command that is held until another one has ended.
    poll_at(&mut rig, BEGIN);
    rig.control.holds_writes.store(true, SeqCst);
    rig.write(2, 0, PAGE, 7);
    let change = rig.source.prepare_cache(None).expect("it can be").expect("it is another one");
    rig.source.set_cache(change);
    rig.disk.reconfigure();
    poll_at(&mut rig, BEGIN);
    assert!(rig.begin(3, read(PAGE, PAGE)).is_none());
    rig.control.holds_writes.store(false, SeqCst);
    for ms in [700, 700, 700] {
        poll_at(&mut rig, BEGIN + Nanos::from_ms(ms));
    }
    assert_eq!((rig.wait(2).result, rig.wait(3).result), (Ok(()), Ok(())));
    assert_eq!(waited(&rig), Nanos::from_ms(700));
    rig.assert_plain();
}

/// Two changes while a command keeps the cores from leaving the first cache.
#[test]
fn a_cache_that_was_replaced_twice_gives_its_memory_back() {
    let mut rig = Rig::new(16 * PAGE, 1 << 20);
    rig.data(PAGE, PAGE);
    let control = std::sync::Arc::clone(&rig.control);
    rig.control.holds_writes.store(true, SeqCst);
    rig.write(1, 0, PAGE, 7);
    for bytes in [64 << 10, 128 << 10] {
        let next = spec(bytes, PolicyKind::Lru);
        let change = rig.source.prepare_cache(Some(&next)).expect("it can be").expect("another");
        rig.source.set_cache(change);
        rig.disk.reconfigure();
        rig.poll();
    }
    rig.control.holds_writes.store(false, SeqCst);
    assert_eq!(rig.wait(1).result, Ok(()));
    (0..8).for_each(|_| _ = rig.poll());
    let end = std::time::Instant::now() + std::time::Duration::from_secs(10);
    // The first and the second.
    while control.unmapped_by.lock().expect("no panic").len() < 2 {
        assert!(std::time::Instant::now() < end, "memory is not given back");
        std::thread::yield_now();
    }
    rig.assert_at_rest();
}

/// The memory of a cache that is removed or replaced, or whose disk goes, is not given back by a core.
#[test]
fn no_core_unmaps_the_memory_of_a_cache() {
    for goes in ["removed", "smaller", "with its disk"] {
        let mut rig = Rig::new(16 * PAGE, 1 << 20);
        rig.data(PAGE, PAGE);
        let smaller = (goes == "smaller").then(|| spec(64 << 10, PolicyKind::Lru));
        let control = std::sync::Arc::clone(&rig.control);
        if goes == "with its disk" {
            let Rig { disk, source, .. } = rig;
            drop(source);
            drop(disk);
        } else {
            let change = rig.source.prepare_cache(smaller.as_ref()).expect("it can be").expect("another");
            rig.source.set_cache(change);
            rig.disk.reconfigure();
            (0..4).for_each(|_| _ = rig.poll());
        }
        let end = std::time::Instant::now() + std::time::Duration::from_secs(10);
        let by = loop {
            if let Some(by) = control.unmapped_by.lock().expect("no panic").first() {
                break *by;
            }
            assert!(std::time::Instant::now() < end, "{goes}: its memory is not given back");
            std::thread::yield_now();
        };
        assert_ne!(by, std::thread::current().id(), "{goes}");
    }
}
