//! A cache that comes, gets another size, and goes, while the disk is in use.

use std::sync::atomic::Ordering::SeqCst;

use super::rules::{PAGE, Rig, range, read};
use super::{PolicyKind, spec};
use crate::{Disk, DiskError, IoRequest, Op, OpenError, Owner, Token};

/// Want a cache of so many bytes, or none.
fn want(rig: &Rig, bytes: Option<u64>) {
    let spec = bytes.map(|bytes| spec(bytes, PolicyKind::Lru));
    let change = rig.source.prepare_cache(spec.as_ref()).expect("it can be").expect("it is another one");
    rig.source.set_cache(change);
}

/// Tell these cores, and let them change.
fn tell(rigs: &mut [&mut Rig]) {
    rigs.iter_mut().for_each(|rig| rig.disk.reconfigure());
    for _ in 0..4 {
        rigs.iter_mut().for_each(|rig| _ = rig.poll());
    }
}

/// True when the second of two reads is a hit.
fn has_cache(rig: &mut Rig, at: usize) -> bool {
    rig.data(at, PAGE);
    let before = rig.reads();
    rig.data(at, PAGE);
    rig.reads() == before
}

#[test]
fn a_cache_comes_gets_another_size_and_goes() {
    let mut rig = Rig::without(64 * PAGE);
    let mut other = rig.other();
    assert!(!has_cache(&mut rig, 0) && rig.source.cache().is_none() && rig.source.area().is_none());
    for bytes in [Some(1 << 20), Some(64 << 10), Some(128 << 10), None, None, Some(1 << 20)] {
        let Ok(Some(_)) = rig.source.prepare_cache(bytes.map(|it| spec(it, PolicyKind::Lru)).as_ref()) else {
            continue; // it is so
        };
        want(&rig, bytes);
        assert_eq!(rig.source.cache().map(|it| it.bytes), bytes);
        tell(&mut [&mut rig, &mut other]);
        assert_eq!(has_cache(&mut rig, 0), bytes.is_some());
        assert_eq!(has_cache(&mut other, PAGE), bytes.is_some());
        rig.write(1, 0, 2 * PAGE, 0xee);
        rig.wait(1);
        assert_eq!(other.data(0, 2 * PAGE), [0xee; 2 * PAGE]);
    }
    let present = rig.source.cache().expect("a cache").used_bytes;
    assert_eq!(present, 2 * PAGE as u64, "the new one had begun empty");
    other.assert_at_rest();
    rig.assert_at_rest();
}

/// A write that is not announced makes a page wrong that is filled meanwhile.
#[test]
fn nothing_is_filled_before_the_writes_of_all_cores_are_announced() {
    let mut rig = Rig::without(64 * PAGE);
    let mut writer = rig.other();
    rig.control.holds_writes.store(true, SeqCst);
    writer.write(1, PAGE, PAGE, 0xee);
    want(&rig, Some(1 << 20));
    tell(&mut [&mut rig]);
    assert!(!has_cache(&mut rig, 2 * PAGE), "the other core was not told");
    tell(&mut [&mut rig, &mut writer]);
    assert!(!has_cache(&mut rig, 2 * PAGE), "a write of before is in flight");
    // What comes meanwhile waits on that core, and on no other.
    writer.write(2, 3 * PAGE, PAGE, 0xdd);
    assert!(writer.begin(3, read(2 * PAGE, PAGE)).is_none());
    (0..10).for_each(|_| _ = writer.poll());
    assert_eq!(rig.data(3 * PAGE, PAGE), [3; PAGE]);
    rig.control.holds_writes.store(false, SeqCst);
    for token in 1..=3 {
        assert_eq!(writer.wait(token).result, Ok(()));
    }
    tell(&mut [&mut rig, &mut writer]);
    assert!(has_cache(&mut rig, PAGE) && has_cache(&mut writer, 2 * PAGE));
    assert_eq!(rig.data(3 * PAGE, PAGE), [0xdd; PAGE]);
    writer.assert_at_rest();
    rig.assert_at_rest();
}

/// A core that was told announces its writes for as long as another one may find pages.
#[test]
fn writes_are_announced_until_no_core_finds_pages() {
    let mut rig = Rig::new(64 * PAGE, 1 << 20);
    let mut reader = rig.other();
    assert!(has_cache(&mut reader, PAGE));
    want(&rig, None);
    for byte in 0..4 {
        tell(&mut [&mut rig]);
        reader.data(PAGE, PAGE);
        rig.write(1, PAGE + 512, 512, byte);
        rig.wait(1);
        assert_eq!(reader.data(PAGE, PAGE)[512..1024], [byte; 512]);
    }
    assert!(has_cache(&mut reader, PAGE), "it was not told");
    rig.control.holds_reads.store(true, SeqCst);
    assert!(reader.begin(1, read(2 * PAGE, PAGE)).is_none());
    tell(&mut [&mut rig, &mut reader]);
    // No core may find its fill any more.
    rig.write(2, 2 * PAGE, PAGE, 0xee);
    assert_eq!(rig.wait(2).result, Ok(()));
    rig.control.holds_reads.store(false, SeqCst);
    assert_eq!(reader.wait(1).result, Ok(()));
    tell(&mut [&mut rig, &mut reader]);
    assert!(!has_cache(&mut reader, PAGE) && !has_cache(&mut rig, 2 * PAGE));
    assert_eq!(reader.data(2 * PAGE, PAGE), [0xee; PAGE]);
    reader.assert_plain();
    rig.assert_plain();
}

#[test]
fn what_is_held_is_cancelled_with_its_submitter() {
    let mut rig = Rig::without(64 * PAGE);
    let owned = |owner: u64, token: u64| owner << 32 | token;
    rig.control.holds_writes.store(true, SeqCst);
    rig.write(owned(1, 1), PAGE, PAGE, 1);
    want(&rig, Some(1 << 20));
    rig.disk.reconfigure();
    rig.poll();
    rig.write(owned(1, 2), 2 * PAGE, PAGE, 0xee);
    let zeroes = IoRequest::new(Op::WriteZeroes { deallocate: false, fua: false }, range(3 * PAGE, PAGE));
    assert!(rig.disk.submit(Token(owned(2, 1)), &zeroes, None).is_none());
    assert_eq!(rig.disk.in_flight(), 3);
    assert_eq!(rig.disk.cancel_owner(Owner(1)), 2);
    assert_eq!(rig.wait(owned(1, 2)).result, Err(DiskError::Cancelled));
    rig.control.holds_writes.store(false, SeqCst);
    assert_eq!(rig.wait(owned(1, 1)).result, Ok(()));
    assert_eq!(rig.wait(owned(2, 1)).result, Ok(()));
    assert_eq!(rig.data(2 * PAGE, 2 * PAGE), [[2; PAGE], [0; PAGE]].concat());
    rig.assert_at_rest();
}

/// The last of several changes is the one that comes to be, and a core that is opened or closed meanwhile
/// stands in the way of none.
#[test]
fn a_change_of_a_change_and_cores_that_come_and_go() {
    let mut rig = Rig::without(64 * PAGE);
    let mut other = rig.other();
    want(&rig, Some(1 << 20));
    rig.disk.reconfigure();
    rig.poll();
    want(&rig, Some(64 << 10));
    let mut third = rig.other();
    tell(&mut [&mut rig, &mut third]);
    assert!(!has_cache(&mut rig, 0));
    other.disk.reconfigure();
    drop(other);
    tell(&mut [&mut rig, &mut third]);
    assert!(has_cache(&mut rig, 0) && has_cache(&mut third, 0));
    assert_eq!(rig.source.cache().map(|it| it.bytes), Some(64 << 10));
    want(&rig, None);
    want(&rig, Some(128 << 10));
    tell(&mut [&mut rig, &mut third]);
    (0..10).for_each(|_| tell(&mut [&mut third, &mut rig]));
    assert!(has_cache(&mut rig, 0) && has_cache(&mut third, 0));
    assert_eq!(rig.source.cache().map(|it| it.bytes), Some(128 << 10));
    third.assert_at_rest();
    rig.assert_at_rest();
}

#[test]
fn a_size_that_cannot_be_is_refused_and_all_is_as_it_was() {
    let rig = Rig::new(64 * PAGE, 1 << 20);
    for bytes in [0, u64::MAX] {
        let refused = rig.source.prepare_cache(Some(&spec(bytes, PolicyKind::Lru)));
        assert!(matches!(refused, Err(OpenError::Setting { field: "cache.size", .. })));
    }
    let same = rig.source.prepare_cache(Some(&spec(1 << 20, PolicyKind::S3Fifo)));
    assert!(matches!(same, Ok(None)));
    // Hosts were told that a write of 8 blocks is one step.
    let plain = Rig::without(64 * PAGE);
    plain.control.atomic_blocks.store(8, SeqCst);
    let refused = plain.source.prepare_cache(Some(&spec(1 << 20, PolicyKind::Lru)));
    assert!(matches!(refused, Err(OpenError::Setting { field: "cache", .. })));
}
