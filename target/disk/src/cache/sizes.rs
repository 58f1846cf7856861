//! [`Sizes`]: estimates the hit ratio of the cache at half and at twice its size.
//!
//! A sample of the pages, one in 32 to one in 256, is read in three simulated caches without data. The
//! simulated caches have the cache's policy and half, one and two times its frames, scaled by the sampling
//! rate. All reads of a sampled page count, so a scaled-down cache behaves like the full one (Waldspurger et
//! al., FAST 2015). The simulation of the current size is the reference: a bias affects all three.
//!
//! Writes, read-ahead, one-time reads and reads that pass around the cache are ignored.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::{Mutex, TryLockError};

use super::CacheSpec;
use super::counts::Counts;
use super::index::mix;
use super::policy::{FrameState, Frames, InsertReason, Policy};
use super::shared::policy_for;

/// log2 of the sampling divisors: one page in 32 to one in 256. Processing a sampled page costs up to 300 ns.
const RATES: std::ops::RangeInclusive<u32> = 5..=8;
/// Fewest frames of the simulated cache of the current size, which estimates to 3 points
/// (`cache::tests::counted`). 1,024 frames cost 6 % of the rate of 64 KiB reads of a file in the page cache:
/// with one page in 32 sampled, two reads in five have such a page and are looked up. A cache of fewer than
/// 8,192 frames has a smaller sample.
const SAMPLE_FRAMES: u32 = 256;
/// Approximate bytes of memory per simulated frame: policy, page, heat and table entry.
const FRAME_BYTES: u64 = 128;
const NO_PAGE: u64 = u64::MAX;

/// Simulated caches of three sizes. See the module.
pub(super) struct Sizes {
    /// Pages with a hash below this value are sampled.
    below: u64,
    caches: Mutex<[SimulatedCache; 3]>,
}

/// Returns the frames of the three simulated caches, and log2 of the sampling divisor.
fn shape(frames: u32) -> ([u32; 3], u32) {
    let rate = RATES.rev().find(|rate| frames >> rate >= SAMPLE_FRAMES).unwrap_or(*RATES.start());
    let share = |frames: u64| u32::try_from(frames >> rate).unwrap_or(u32::MAX).max(1);
    let frames = u64::from(frames);
    ([frames / 2, frames, frames * 2].map(share), rate)
}

impl Sizes {
    pub(super) fn new(spec: &CacheSpec, frames: u32) -> Sizes {
        let (frames, rate) = shape(frames);
        let caches = frames.map(|frames| SimulatedCache::new(policy_for(spec, frames), frames));
        Sizes { below: 1 << (64 - rate), caches: Mutex::new(caches) }
    }

    /// Returns the approximate bytes of memory of the simulation for a cache of `frames` frames.
    pub(super) fn bytes_for(frames: u32) -> u64 {
        shape(frames).0.iter().map(|frames| u64::from(*frames) * FRAME_BYTES).sum()
    }

    /// Returns true for sampled pages. The multiplication by the golden ratio spreads consecutive pages
    /// evenly. Page 0 is not sampled: its frequent reads would distort the sample.
    #[inline]
    pub(super) fn is_sampled(&self, page: u64) -> bool {
        page.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15) < self.below
    }

    /// Processes reads of sampled pages and empties `pages`. Drops them while another core has the lock.
    pub(super) fn read(&self, pages: &mut Vec<u64>, counts: &Counts) {
        let caches = match self.caches.try_lock() {
            Ok(caches) => Some(caches),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        };
        if let Some(mut caches) = caches {
            counts.sampled.add(pages.len() as u64);
            for page in &*pages {
                let [half, same, twice] = caches.each_mut().map(|cache| u64::from(cache.read(*page)));
                counts.half.add(half);
                counts.same.add(same);
                counts.twice.add(twice);
            }
        }
        pages.clear();
    }
}

/// A simulated cache without data.
pub(super) struct SimulatedCache {
    pub(super) policy: Box<dyn Policy>,
    pub(super) frames: SimulatedFrames,
    /// Map from page to frame.
    pub(super) at: HashMap<u64, u32>,
    free: Vec<u32>,
}

/// Frames of a simulated cache for its policy.
pub(super) struct SimulatedFrames {
    heat: Vec<Cell<u8>>,
    pub(super) page: Vec<u64>,
    #[cfg(test)]
    pub(super) pinned: Vec<bool>,
}

impl SimulatedCache {
    pub(super) fn new(policy: Box<dyn Policy>, frames: u32) -> SimulatedCache {
        let count = frames as usize;
        SimulatedCache {
            policy,
            frames: SimulatedFrames {
                heat: vec![Cell::new(0); count],
                page: vec![NO_PAGE; count],
                #[cfg(test)]
                pinned: vec![false; count],
            },
            // Twice the capacity needed, so removals never cause the map to grow.
            at: HashMap::with_capacity(2 * count),
            free: (0..frames).rev().collect(),
        }
    }

    /// Reads a page. Returns true for a hit. For a miss, returns false and enters the page if a frame is free
    /// or evictable.
    pub(super) fn read(&mut self, page: u64) -> bool {
        if let Some(&frame) = self.at.get(&page) {
            let heat = &self.frames.heat[frame as usize];
            heat.set((heat.get() + 1).min(spindle_reactor::mem::HEAT_MAX));
            self.policy.touched(frame);
            return true;
        }
        let frame = match self.free.pop() {
            Some(frame) => frame,
            None => {
                let Some(victim) = self.policy.victim(&self.frames) else { return false };
                self.at.remove(&self.frames.page[victim as usize]);
                victim
            }
        };
        self.frames.page[frame as usize] = page;
        self.frames.heat[frame as usize].set(0);
        self.at.insert(page, frame);
        self.policy.inserted(frame, mix(page), InsertReason::Read);
        false
    }

    #[cfg(test)]
    pub(super) fn invalidate(&mut self, page: u64) {
        if let Some(frame) = self.at.remove(&page) {
            self.frames.page[frame as usize] = NO_PAGE;
            self.free.push(frame);
        }
    }
}

impl Frames for SimulatedFrames {
    fn state(&self, frame: u32) -> FrameState {
        let at = frame as usize;
        #[cfg(test)]
        if self.pinned[at] {
            return FrameState::Busy;
        }
        match self.page[at] {
            NO_PAGE => FrameState::Gone,
            _ => FrameState::Heat(self.heat[at].get()),
        }
    }

    fn set_heat(&self, frame: u32, heat: u8) {
        self.heat[frame as usize].set(heat);
    }

    fn hash(&self, frame: u32) -> u64 {
        mix(self.page[frame as usize])
    }
}
