//! Which pages enter a cache, and when: the budget of a core, large reads, memory that becomes resident.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use spindle_reactor::clock::Nanos;

use super::held::HeldDisk;
use super::rules::{PAGE, Rig, read};
use super::{CacheSpec, CachedDisk, PolicyKind, spec};
use crate::Disk;
use crate::cache::CacheShared;
use crate::cache::switch::Switch;

const LATER: Nanos = Nanos::from_secs(1);

fn rig(disk_pages: usize, spec: &CacheSpec) -> Rig {
    let (inner, control) = HeldDisk::create(512, disk_pages * PAGE);
    Rig::on(CachedDisk::new(inner, Some(spec)).expect("a cache"), control)
}

fn paced() -> CacheSpec {
    CacheSpec { is_paced: true, ..spec(16 << 20, PolicyKind::S3Fifo) }
}

fn check(rig: &mut Rig, pages: std::ops::Range<usize>) {
    for page in pages {
        assert_eq!(rig.data(page * PAGE, PAGE), [page.to_le_bytes()[0]; PAGE]);
    }
}

/// Reads a page that is there until a lookup finds it: a core that found nothing looks for few.
fn find_something(rig: &mut Rig) {
    let mut reads = 0;
    while rig.counts().hits == 0 {
        assert_eq!(rig.data(0, PAGE).len(), PAGE);
        reads += 1;
        assert!(reads <= 8, "one in four is looked up");
    }
}

#[test]
fn pages_beyond_the_budget_of_a_core_pass_around_and_enter_later() {
    let mut rig = rig(1024, &paced());
    check(&mut rig, 0..200);
    let counts = rig.counts();
    assert_eq!((counts.hits, counts.misses, counts.over_budget), (0, 64, 136));
    find_something(&mut rig);
    let before = rig.counts();
    // What is there is found all the same. A read of which a page is missing passes around as a whole.
    check(&mut rig, 0..64);
    assert_eq!(rig.data(PAGE, 8 * PAGE).len(), 8 * PAGE);
    assert_eq!(rig.data(60 * PAGE, 8 * PAGE).len(), 8 * PAGE);
    let counts = rig.counts();
    assert_eq!((counts.hits - before.hits, counts.misses), (64 + 8, 64));
    assert_eq!(counts.over_budget - before.over_budget, 8);
    for page in 100..200 {
        rig.disk.poll(LATER, &mut rig.done);
        check(&mut rig, page..page + 1);
    }
    assert_eq!(rig.counts().misses, 128);
    rig.assert_at_rest();
}

/// Two readers of one page are one read of the disk, whatever the budget.
#[test]
fn a_read_beyond_the_budget_waits_for_the_page_that_another_fills() {
    let mut rig = rig(1024, &paced());
    rig.control.holds_reads.store(true, SeqCst);
    let count = 64 * PAGE;
    assert!(rig.begin(1, read(0, count)).is_none());
    assert!(rig.begin(2, read(0, PAGE)).is_none());
    assert!(rig.begin(3, read(70 * PAGE, PAGE)).is_none());
    let counts = rig.counts();
    assert_eq!((counts.misses, counts.over_budget), (64 + 1, 1));
    rig.control.holds_reads.store(false, SeqCst);
    for token in [1, 2, 3] {
        assert_eq!(rig.wait(token).result, Ok(()));
    }
    assert_eq!(rig.counts().joined, 1);
    rig.assert_at_rest();
}

#[test]
fn a_written_page_beyond_the_budget_leaves_the_cache() {
    let mut rig = rig(1024, &paced());
    check(&mut rig, 0..64);
    for page in 0..40 {
        rig.write(7, page * PAGE, 2 * PAGE, 0xee);
        assert_eq!(rig.wait(7).result, Ok(()));
    }
    // 32 writes with two pages that stay, one after another.
    assert_eq!((rig.counts().written, rig.source.shared().index.len()), (64, 32 + 23));
    find_something(&mut rig);
    let before = rig.counts();
    for page in 0..40 {
        assert_eq!(rig.data(page * PAGE, PAGE), [0xee; PAGE]);
    }
    let counts = rig.counts();
    assert_eq!((counts.hits - before.hits, counts.over_budget - before.over_budget), (32, 8));
    rig.assert_at_rest();
}

/// Reads that are not looked up have the data of the last write, too.
#[test]
fn a_core_that_finds_nothing_looks_for_one_page_in_four() {
    let mut rig = rig(2048, &paced());
    check(&mut rig, 0..164);
    let before = rig.counts();
    rig.write(7, 0, PAGE, 0xee);
    assert_eq!(rig.wait(7).result, Ok(()));
    let mut found = 0;
    // Each time a page is found, the reads that follow find nothing for long enough.
    for round in 0..50 {
        check(&mut rig, 200 + round * 16..200 + (round + 1) * 16);
        assert_eq!(rig.data(0, PAGE), [0xee; PAGE]);
        let hits = rig.counts().hits;
        if hits > before.hits + found {
            found += 1;
            // The distance differs, because a hit begins the sequence anew.
            check(&mut rig, 1100..1170 + round);
        }
    }
    assert!((5..=25).contains(&found), "{found} of 50");
    assert_eq!(rig.counts().misses, before.misses);
    rig.assert_at_rest();
}

/// Those that are looked up follow each other, so that strides are seen among them.
#[test]
fn strides_are_read_ahead_while_most_reads_are_not_looked_up() {
    let mut rig = rig(4096, &CacheSpec { read_ahead: 256 << 10, ..paced() });
    for place in 0..200 {
        let page = place * place * 7 % 900;
        check(&mut rig, page..page + 1);
    }
    let before = rig.counts();
    assert!(before.over_budget > 0, "{before:?}");
    for place in 0..128 {
        let page = 1000 + place * 20;
        check(&mut rig, page..page + 1);
    }
    let counts = rig.counts();
    assert!(counts.ahead > before.ahead && counts.useful > before.useful, "{counts:?}");
    rig.assert_at_rest();
}

#[test]
fn nothing_is_read_ahead_of_large_reads_beside_each_other() {
    for (pages, beside, is_ahead) in [(32, 4, false), (32, 1, true), (4, 4, true)] {
        let spec = CacheSpec { read_ahead: 256 << 10, ..spec(16 << 20, PolicyKind::S3Fifo) };
        let mut rig = rig(1024, &spec);
        let mut places = (0..1024 / pages).map(|at| at * pages * PAGE);
        for _ in 0..6 {
            rig.control.holds_reads.store(true, SeqCst);
            let tokens = 1..=beside;
            let waits = |token: &u64| {
                let request = read(places.next().expect("a place"), pages * PAGE);
                rig.begin(*token, request).is_none()
            };
            let waiting: Vec<_> = tokens.filter(waits).collect();
            rig.control.holds_reads.store(false, SeqCst);
            waiting.into_iter().for_each(|token| _ = rig.wait(token));
            (0..8).for_each(|_| _ = rig.poll());
        }
        assert_eq!(rig.counts().ahead > 0, is_ahead, "{beside} of {pages} pages");
        rig.assert_at_rest();
    }
}

/// [`HeldDisk`] ends what it does not hold in the first poll.
#[test]
fn little_is_read_ahead_from_a_disk_that_executes_reads_on_the_core() {
    for (pages, is_inline, longest) in [(32, true, 0), (32, false, 64), (1, true, 16), (1, false, 64)] {
        let spec = CacheSpec { read_ahead: 256 << 10, ..spec(16 << 20, PolicyKind::S3Fifo) };
        let mut rig = rig(16 << 10, &spec);
        // One read at a time, at places that continue nothing.
        for at in 0..100_usize {
            rig.control.holds_reads.store(!is_inline && at % 50 == 49, SeqCst);
            let request = read((8000 + (at * at * 31) % 8000) * PAGE, PAGE);
            if rig.begin(at as u64, request).is_none() {
                rig.poll();
                rig.control.holds_reads.store(false, SeqCst);
                rig.wait(at as u64);
            }
        }
        let before = rig.counts();
        let mut longest_fetch = 0;
        for at in 0..4096 / pages {
            let ahead = rig.counts().ahead;
            assert_eq!(rig.data(at * pages * PAGE, pages * PAGE).len(), pages * PAGE);
            longest_fetch = longest_fetch.max(rig.counts().ahead - ahead);
        }
        // One of the pages may be in the cache.
        let longest_fetch = u64::next_multiple_of(longest_fetch, 16);
        assert_eq!(longest_fetch, longest, "{pages} pages, inline: {is_inline}, {before:?}");
        (0..8).for_each(|_| _ = rig.poll());
        rig.assert_at_rest();
    }
}

#[test]
fn only_memory_that_is_resident_is_used_and_nothing_is_evicted_until_all_is() {
    let spec = CacheSpec { is_resident: true, ..spec(4 << 20, PolicyKind::S3Fifo) };
    let (inner, control) = HeldDisk::create(512, 2048 * PAGE);
    let (shared, memory) = CacheShared::new(&spec).expect("memory");
    let mut memory = memory.expect("it is not resident yet");
    let switch = Arc::new(Switch::new(Some(Arc::new(shared))));
    let source = Arc::new(CachedDisk { inner, switch, has_single_blocks: true });
    let mut rig = Rig::on(source, control);
    let usable = |rig: &Rig| rig.source.cache().expect("a cache").usable_bytes;
    check(&mut rig, 0..8);
    assert_eq!((usable(&rig), rig.counts().passed), (0, 8));
    assert!(memory.step());
    assert_eq!(usable(&rig), 2 << 20);
    check(&mut rig, 0..600);
    assert_eq!((rig.counts().misses, rig.counts().passed, rig.counts().evictions), (512, 8 + 88, 0));
    while memory.step() {}
    assert_eq!(usable(&rig), 4 << 20);
    check(&mut rig, 600..1400);
    assert_eq!((rig.counts().misses, rig.counts().passed), (512 + 800, 8 + 88));
    assert!(rig.counts().evictions > 0);
    rig.assert_at_rest();
}

#[test]
fn the_memory_of_a_cache_becomes_resident_without_a_read() {
    let spec = CacheSpec { is_resident: true, ..spec(8 << 20, PolicyKind::S3Fifo) };
    let rig = rig(16, &spec);
    let begin = Instant::now();
    loop {
        let cache = rig.source.cache().expect("a cache");
        if cache.resident_after.is_some() {
            assert_eq!((cache.usable_bytes, cache.used_bytes), (8 << 20, 0));
            break;
        }
        assert!(begin.elapsed() < Duration::from_secs(20), "{cache:?}");
        std::thread::yield_now();
    }
}
