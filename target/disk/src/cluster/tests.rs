//! Tests of the cluster layer.

use std::sync::atomic::{AtomicUsize, Ordering};

use nvme_spec::Nqn;
use nvme_spec::cluster::NextData;
use spindle_reactor::mem::Pages;
use spindle_target_card::Membership;

use super::*;
use crate::cache::tests::held::HeldDisk;
use crate::testing::{Driver, TempPath, model, steady};
use crate::{
    CacheSpec, CachedDisk, DiskError, Fault, FaultDisk, FileDisk, FileSpec, OpKind, PolicyKind, RamDisk,
    RamSpec,
};

fn host() -> Nqn {
    Nqn::new("nqn.2026-01.io.spindle:a").expect("an NQN")
}

fn clustered(inner: Arc<dyn Disk>) -> (Arc<ClusterDisk>, Arc<Cluster>) {
    let cluster = Cluster::new(inner.geometry().bytes(), vec![host()], Nanos::ZERO);
    (ClusterDisk::new(inner, Arc::clone(&cluster)), cluster)
}

fn ram() -> Arc<dyn Disk> {
    let spec = RamSpec { bytes: 1 << 20, block_bytes: 4096, pages: Pages::Base, has_seals: false };
    RamDisk::new("ram", spec).expect("memory")
}

/// A member that has the first extent.
fn member(cluster: &Arc<Cluster>, driver: &mut Driver) -> Membership {
    let member = cluster.join(host(), (1, 0), Nanos(1), (Arc::new(|_| ()), 0)).expect("it may join");
    assert!(driver.disk.register(FIRST, member.number()));
    member
}

const FIRST: BlockRange = BlockRange { lba: 0, blocks: 1 };

/// Executes what the member was told, and acknowledges it.
fn acknowledge(member: &Membership) {
    let mut data = NextData::default();
    member.take(&mut data);
    assert!(data.count.get() > 0 && member.acknowledge(data.sequence.get()));
}

#[test]
fn what_was_written_is_read_over_memory_and_over_a_cached_file() {
    let path = TempPath::new();
    let spec = FileSpec { create_bytes: Some(1 << 20), ..FileSpec::new(path.path(), 512) };
    let file = FileDisk::new("file", &spec).expect("a file");
    let spec = CacheSpec::new(256 << 10, PolicyKind::S3Fifo, Pages::Base);
    let cached = CachedDisk::new(file, Some(&spec)).expect("a cache");
    for (seed, disk) in [(1, ram()), (2, cached as _)] {
        model::check(&*clustered(disk).0, seed, 300, false);
    }
}

#[test]
fn nothing_is_allocated_in_the_steady_state() {
    let path = TempPath::new();
    let spec = FileSpec { create_bytes: Some(4 << 20), ..FileSpec::new(path.path(), 512) };
    steady::check(&*clustered(FileDisk::new("file", &spec).expect("a file")).0, 20);
}

#[test]
fn every_way_to_change_a_block_waits_for_the_member() {
    let (disk, cluster) = clustered(ram());
    let mut driver = Driver::new(&*disk);
    let member = member(&cluster, &mut driver);
    let ways: [fn(&mut Driver) -> Token; 5] = [
        |driver| driver.submit(Op::Write { fua: false }, FIRST, &[5; 4096]),
        |driver| driver.submit(Op::WriteZeroes { deallocate: false, fua: false }, FIRST, &[]),
        |driver| driver.submit(Op::Deallocate, FIRST, &[]),
        |driver| {
            driver.submit(
                Op::WriteZeroes { deallocate: true, fua: false },
                BlockRange { lba: 0, blocks: 200 },
                &[],
            )
        },
        |driver| driver.submit_swap(0, &[0; 4096], &[6; 4096]),
    ];
    for (at, way) in ways.into_iter().enumerate() {
        let token = way(&mut driver);
        (0..100).for_each(|_| _ = driver.poll());
        assert!(driver.try_end(token).is_none(), "{at}");
        assert_eq!(driver.disk.in_flight(), 1);
        assert!(!driver.disk.register(FIRST, member.number()));
        acknowledge(&member);
        assert_eq!(driver.wait(token).result, Ok(()), "{at}");
        assert!(driver.disk.register(FIRST, member.number()), "{at}");
    }
    assert_eq!(driver.read(0, 1).expect("a read"), [6; 4096]);
    // Done of the last one, and no more.
    acknowledge(&member);
}

#[test]
fn a_core_may_sleep_while_writes_wait_and_each_answer_wakes_it() {
    let (disk, cluster) = clustered(ram());
    let mut driver = Driver::new(&*disk);
    let woken = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&woken);
    let wake: spindle_target_card::Wake = Arc::new(move |core| {
        assert!(core == 0 || core == 9, "{core}");
        count.fetch_add(usize::from(core == 0), Ordering::Relaxed);
    });
    let member = cluster.join(host(), (1, 0), Nanos(1), (wake, 9)).expect("it may join");
    for pages in [1, 200] {
        assert!(driver.disk.register(FIRST, member.number()) && driver.disk.may_sleep());
        let range = BlockRange { lba: 0, blocks: pages };
        let token = driver.submit(Op::WriteZeroes { deallocate: false, fua: false }, range, &[]);
        assert!(!driver.disk.may_sleep(), "an answer before the next poll wakes nobody");
        (0..3).for_each(|_| _ = driver.poll());
        assert!(driver.disk.may_sleep() && driver.try_end(token).is_none());
        let before = woken.load(Ordering::Relaxed);
        acknowledge(&member);
        assert!(woken.load(Ordering::Relaxed) > before, "the room and the answer");
        assert_eq!(driver.wait(token).result, Ok(()));
        acknowledge(&member);
    }
    let (rest, token) = (woken.load(Ordering::Relaxed), driver.submit(Op::Deallocate, FIRST, &[]));
    (0..3).for_each(|_| _ = driver.poll());
    member.leave();
    assert_eq!((woken.load(Ordering::Relaxed), driver.wait(token).result), (rest + 1, Ok(())));
}

#[test]
fn reads_flushes_and_writes_of_other_extents_do_not_wait() {
    let (disk, cluster) = clustered(ram());
    let mut driver = Driver::new(&*disk);
    let _member = member(&cluster, &mut driver);
    let token = driver.submit(Op::Write { fua: false }, FIRST, &[5; 4096]);
    assert_eq!(driver.read(0, 1).expect("a read"), [0; 4096], "the write has not begun");
    assert_eq!(driver.run(Op::Flush, 0, 1), Ok(()));
    assert_eq!(driver.write(16, &[7; 4096], false), Ok(()));
    assert!(driver.try_end(token).is_none());
}

#[test]
fn nothing_is_kept_while_a_write_is_at_the_disk_and_the_done_follows_its_end() {
    let (inner, control) = FaultDisk::new(ram(), 1);
    let (disk, cluster) = clustered(inner);
    let mut driver = Driver::new(&*disk);
    let member = member(&cluster, &mut driver);
    for fails in [false, true] {
        control.set(if fails { Fault::Error } else { Fault::Drop }, OpKind::Write, 1_000_000);
        let token = driver.submit(Op::Write { fua: false }, FIRST, &[5; 4096]);
        acknowledge(&member);
        (0..100).for_each(|_| _ = driver.poll());
        if !fails {
            assert!(driver.try_end(token).is_none() && !driver.disk.register(FIRST, member.number()));
            let mut data = NextData::default();
            member.take(&mut data);
            assert_eq!(data.count.get(), 0, "no Done before the end");
            control.release_dropped();
        }
        assert_eq!(driver.wait(token).result.is_err(), fails);
        assert!(driver.disk.register(FIRST, member.number()));
        acknowledge(&member);
        control.set_all(Fault::Drop, 0);
    }
}

#[test]
fn nothing_is_kept_of_what_a_failed_write_may_still_change() {
    for is_told in [false, true] {
        let (inner, control) = HeldDisk::create(4096, 1 << 20);
        let (disk, cluster) = clustered(inner);
        let mut driver = Driver::new(&*disk);
        let member = cluster.join(host(), (1, 0), Nanos(1), (Arc::new(|_| ()), 0)).expect("it may join");
        assert!(!is_told || driver.disk.register(FIRST, member.number()));
        control.fails_writes.store(1, Ordering::SeqCst);
        control.lingers.store(true, Ordering::SeqCst);
        let token = driver.submit(Op::Write { fua: false }, FIRST, &[5; 4096]);
        if is_told {
            (0..3).for_each(|_| _ = driver.poll());
            acknowledge(&member);
        }
        assert!(driver.wait(token).result.is_err());
        // Although the disk forgets it.
        control.lingers.store(false, Ordering::SeqCst);
        assert!(!driver.disk.register(FIRST, member.number()), "{is_told}");
        assert!(driver.disk.register(BlockRange { lba: 16, blocks: 1 }, member.number()));
    }
}

#[test]
fn waiting_writes_are_cancelled_or_end_with_the_handle() {
    let (disk, cluster) = clustered(ram());
    for is_cancelled in [true, false] {
        let mut driver = Driver::new(&*disk);
        let member = member(&cluster, &mut driver);
        let token = driver.submit(Op::Write { fua: false }, FIRST, &[5; 4096]);
        if is_cancelled {
            assert_eq!(driver.disk.cancel_owner(token.owner()), 1);
            let done = driver.wait(token);
            assert_eq!((done.result, done.buf.map(|buf| buf.len())), (Err(DiskError::Cancelled), Some(4096)));
        }
        drop(driver);
        let mut driver = Driver::new(&*disk);
        assert!(driver.disk.register(FIRST, member.number()), "no write is in flight");
        acknowledge(&member);
        assert_eq!(driver.read(0, 1).expect("a read"), [0; 4096]);
        member.leave();
    }
}

#[test]
fn its_size_does_not_change() {
    let (disk, _) = clustered(ram());
    assert!(disk.prepare_resize(2 << 20).is_err() && disk.resize(1 << 20).is_ok());
}
