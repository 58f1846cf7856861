//! What is counted: for each host, and for other sizes.

use spindle_reactor::mem::Pages;

use super::rules::{PAGE, Rig, read};
use crate::IoRequest;
use crate::cache::counts::{AllCounts, CoreCounts};
use crate::cache::index::mix;
use crate::cache::shared::policy_for;
use crate::cache::sizes::{SimulatedCache, Sizes};
use crate::cache::{CacheMode, CacheSpec, PolicyKind};
use crate::testing::Random;

#[test]
fn hosts_are_counted_apart_on_all_cores_and_when_cores_have_gone() {
    let mut rig = Rig::new(64 * PAGE, 1 << 20);
    let mut other = rig.other();
    let get = |rig: &mut Rig, client, page: usize| {
        if rig.begin(7, IoRequest { client, ..read(page * PAGE, PAGE) }).is_none() {
            rig.wait(7);
        }
    };
    // A miss and two hits of host 1, two hits of host 2, a miss of a host that is not counted apart.
    get(&mut rig, 1, 0);
    get(&mut rig, 1, 0);
    get(&mut other, 1, 0);
    get(&mut other, 2, 0);
    get(&mut rig, 2, 0);
    get(&mut rig, 300, 9);
    drop(other);
    let mut third = rig.other();
    get(&mut third, 2, 9);
    let counts = rig.source.shared().counts.by_host();
    let told: Vec<_> = counts.iter().map(|(host, counts)| (*host, counts.hits, counts.misses)).collect();
    assert_eq!(told, [(0, 0, 1), (1, 2, 1), (2, 3, 0)]);
    let all = rig.counts();
    assert_eq!((all.hits, all.misses), (5, 2));
    // The place of the core that went is used again.
    let shared = rig.source.shared();
    let before = shared.counts.len();
    for _ in 0..10 {
        let mut fourth = rig.other();
        get(&mut fourth, 2, 9);
        get(&mut fourth, 1, 9);
    }
    assert!(shared.counts.len() <= before + 2, "{} sets of counters, {before} before", shared.counts.len());
    drop(third);
    rig.assert_at_rest();
}

#[test]
fn what_half_and_twice_the_size_would_give_is_reckoned_well_from_a_sample() {
    let (frames, pages) = (1_u32 << 15, 1_u64 << 18);
    for policy in [PolicyKind::S3Fifo, PolicyKind::Lru] {
        let spec = CacheSpec::new(u64::from(frames) * 4096, policy, Pages::Base);
        assert_eq!(spec.mode, CacheMode::Shared);
        let sizes = Sizes::new(&spec, frames);
        let counts = CoreCounts::new(&std::sync::Arc::<AllCounts>::default());
        let mut whole =
            [frames / 2, frames, frames * 2].map(|it| SimulatedCache::new(policy_for(&spec, it), it));
        let mut hits = [0_u64; 3];
        let (mut random, mut samples) = (Random(3), Vec::new());
        let reads = 1_500_000;
        for _ in 0..reads {
            // A few are read often: of the order of 1 / rank.
            let rank = (1 << random.below(18)) + random.below(1 << 17) % pages;
            let page = mix(rank % pages) >> 20;
            for (cache, hits) in whole.iter_mut().zip(&mut hits) {
                *hits += u64::from(cache.read(page));
            }
            if sizes.is_sampled(page) {
                samples.push(page);
                sizes.read(&mut samples, counts.of(0));
            }
        }
        let told = counts.of(0);
        let sampled = told.sampled.get();
        assert!((reads / 256..reads / 64).contains(&sampled), "{sampled}");
        let permille = |hits: u64, of: u64| hits * 1000 / of;
        let told = [&told.half, &told.same, &told.twice].map(|it| permille(it.get(), sampled));
        let real = hits.map(|hits| permille(hits, reads));
        assert!(real[0] + 50 < real[1] && real[1] + 50 < real[2], "{real:?} tells nothing");
        let is_near = told.iter().zip(real).all(|(told, real)| told.abs_diff(real) < 30);
        assert!(is_near, "{policy:?}: {told:?} of the sample, {real:?} of all");
    }
}
