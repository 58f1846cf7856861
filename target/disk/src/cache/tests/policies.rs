//! Policies by themselves: what they keep.

use crate::cache::index::mix;
use crate::cache::policy::{Exclusive, Ghost, InsertReason, Lru, Policy, S3Fifo};
use crate::cache::sizes::SimulatedCache;
use crate::testing::Random;

fn both(frames: u32) -> [SimulatedCache; 2] {
    [Box::new(S3Fifo::new(frames)) as Box<dyn Policy>, Box::new(Lru::new(frames))]
        .map(|policy| SimulatedCache::new(policy, frames))
}

fn all(frames: u32) -> [SimulatedCache; 3] {
    let [s3, lru] = both(frames);
    let exclusive = Exclusive::new(frames, Box::new(S3Fifo::new(frames)));
    [s3, lru, SimulatedCache::new(Box::new(exclusive), frames)]
}

#[test]
fn a_set_that_fits_is_kept() {
    for mut cache in all(100) {
        for round in 0..10 {
            for page in 0..100 {
                assert_eq!(cache.read(page), round > 0, "round {round}, page {page}");
            }
        }
    }
}

#[test]
fn a_scan_does_not_evict_what_s3_fifo_knows_to_be_used() {
    let [mut s3, mut lru] = both(100);
    for cache in [&mut s3, &mut lru] {
        for _ in 0..20 {
            (0..50).for_each(|page| _ = cache.read(page));
        }
        (1000..3000).for_each(|page| _ = cache.read(page));
    }
    let hits = |cache: &mut SimulatedCache| (0..50).filter(|page| cache.read(*page)).count();
    assert_eq!((hits(&mut s3), hits(&mut lru)), (50, 0));
}

#[test]
fn s3_fifo_leaves_a_page_that_is_written_in_its_queue() {
    for from_itself in [true, false] {
        let [mut cache, _] = both(100);
        for _ in 0..3 {
            (0..20).for_each(|page| _ = cache.read(page));
        }
        (1000..1200).for_each(|page| _ = cache.read(page));
        for page in 0..20 {
            let frame = cache.at[&page];
            // Another frame of the main queue stands for one that was reused meanwhile.
            let from = if from_itself { frame } else { cache.at[&((page + 1) % 20)] };
            cache.policy.inserted(frame, mix(page), InsertReason::Written { from });
        }
        (2000..2300).for_each(|page| _ = cache.read(page));
        assert!((0..20).all(|page| cache.at.contains_key(&page)), "from itself: {from_itself}");
    }
}

#[test]
fn lru_evicts_the_page_that_was_not_used_for_the_longest_time() {
    let [_, mut cache] = both(3);
    for page in [1, 2, 3, 1, 4] {
        cache.read(page);
    }
    assert!(cache.at.contains_key(&1) && !cache.at.contains_key(&2));
}

#[test]
fn what_a_client_was_given_goes_before_what_none_was_given() {
    let [_, _, mut cache] = all(100);
    (0..100).for_each(|page| _ = cache.read(page));
    // These were written: no client was given them.
    for page in 0..50 {
        let frame = cache.at[&page];
        cache.policy.inserted(frame, mix(page), InsertReason::Written { from: frame });
    }
    (1000..1200).for_each(|page| _ = cache.read(page));
    assert!((0..50).all(|page| cache.at.contains_key(&page)));
    // One that is asked for goes with the next ones.
    (0..10).for_each(|page| assert!(cache.read(page)));
    (2000..2060).for_each(|page| _ = cache.read(page));
    assert_eq!((0..50).filter(|page| cache.at.contains_key(page)).count(), 40);
}

#[test]
fn frames_that_are_in_use_or_gone_are_no_victims() {
    let mut random = Random(5);
    for mut cache in all(64) {
        for step in 0..20_000_u32 {
            match random.below(10) {
                0 => cache.invalidate(random.below(200)),
                1 => {
                    let at = usize::try_from(random.below(64)).expect("small");
                    cache.frames.pinned[at] = step % 3 == 0;
                }
                _ => {
                    let before: Vec<u64> = (0..64)
                        .filter(|at| cache.frames.pinned[*at])
                        .map(|at| cache.frames.page[at])
                        .collect();
                    cache.read(random.below(200));
                    let is_kept = |page: &u64| *page == u64::MAX || cache.at.contains_key(page);
                    assert!(before.iter().all(is_kept), "a page in use was evicted");
                }
            }
        }
        assert!(cache.at.len() > 40, "{} pages of 64 frames", cache.at.len());
    }
}

#[test]
fn a_cache_whose_frames_are_all_in_use_has_no_victim_and_gets_over_it() {
    for mut cache in all(8) {
        (0..8).for_each(|page| _ = cache.read(page));
        cache.frames.pinned.fill(true);
        assert!(!cache.read(100) && !cache.at.contains_key(&100));
        cache.frames.pinned.fill(false);
        cache.read(100);
        assert!(cache.at.contains_key(&100));
    }
}

#[test]
fn a_ghost_remembers_as_many_evictions_as_it_is_long_and_each_once() {
    let mut ghost = Ghost::new(1000);
    (0..1500).for_each(|page| ghost.insert(mix(page)));
    let known = (500..1500).filter(|page| ghost.take(mix(*page))).count();
    assert!((970..=1000).contains(&known), "{known} of 1000");
    assert_eq!((0..1500).filter(|page| ghost.take(mix(*page))).count(), 0);
}
