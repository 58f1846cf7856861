//! [`Sizes`]: what the cache would give with half and with twice its size.
//!
//! Reads of a sample of the pages, one in 32 to one in 256, are played through three caches without bytes,
//! which have the same policy and half, once and twice the cache's frames, divided by the same. A sample of
//! pages, not of reads: a page of it is seen each time it is read, so that a small cache keeps of it what the
//! large one keeps of all (Waldspurger et al., FAST 2015). The one of the same size is for comparison: what
//! the sample has too much or too little of is in all three.
//!
//! What it does not see: writes, and what is read ahead.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::{Mutex, TryLockError};

use super::CacheSpec;
use super::counts::Counts;
use super::index::mix;
use super::policy::{Came, Frames, Policy, State};
use super::shared::policy_for;

/// One page in so many, as a power of two: the reckoning costs up to 300 ns a page.
const RATES: std::ops::RangeInclusive<u32> = 5..=8;
/// Frames that a sample is to have at least, where it can: with fewer, chance decides.
const SAMPLE_FRAMES: u32 = 1024;
/// Memory of a frame without bytes: its policy, its page and an entry of the table, nearly.
const FRAME_BYTES: u64 = 128;
const NO_PAGE: u64 = u64::MAX;

/// See the module.
pub(super) struct Sizes {
    /// Pages of the sample have a hash below this.
    below: u64,
    caches: Mutex<[Paper; 3]>,
}

/// Frames of the three, and the rate, for a cache of so many frames.
fn shape(frames: u32) -> ([u32; 3], u32) {
    let rate = RATES.rev().find(|rate| frames >> rate >= SAMPLE_FRAMES).unwrap_or(*RATES.start());
    let share = |frames: u64| u32::try_from(frames >> rate).unwrap_or(u32::MAX).max(1);
    let frames = u64::from(frames);
    ([frames / 2, frames, frames * 2].map(share), rate)
}

impl Sizes {
    pub(super) fn new(spec: &CacheSpec, frames: u32) -> Sizes {
        let (frames, rate) = shape(frames);
        let caches = frames.map(|frames| Paper::new(policy_for(spec, frames), frames));
        Sizes { below: 1 << (64 - rate), caches: Mutex::new(caches) }
    }

    /// Memory of it, nearly.
    pub(super) fn bytes_for(frames: u32) -> u64 {
        shape(frames).0.iter().map(|frames| u64::from(*frames) * FRAME_BYTES).sum()
    }

    /// True of the pages of the sample. The golden ratio spreads also pages that follow each other. Page 0,
    /// which is read more than others, is not in it: it would count for many.
    #[inline]
    pub(super) fn has(&self, page: u64) -> bool {
        page.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15) < self.below
    }

    /// These pages of the sample were read. While another core is at it, they are left out.
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

/// A cache of pages without bytes.
pub(super) struct Paper {
    pub(super) policy: Box<dyn Policy>,
    pub(super) frames: PaperFrames,
    /// The frame of each page.
    pub(super) at: HashMap<u64, u32>,
    free: Vec<u32>,
}

/// What the policy is told of.
pub(super) struct PaperFrames {
    heat: Vec<Cell<u8>>,
    pub(super) page: Vec<u64>,
    #[cfg(test)]
    pub(super) pinned: Vec<bool>,
}

impl Paper {
    pub(super) fn new(policy: Box<dyn Policy>, frames: u32) -> Paper {
        let count = frames as usize;
        Paper {
            policy,
            frames: PaperFrames {
                heat: vec![Cell::new(0); count],
                page: vec![NO_PAGE; count],
                #[cfg(test)]
                pinned: vec![false; count],
            },
            // Twice the entries that it gets: then removals never make it grow.
            at: HashMap::with_capacity(2 * count),
            free: (0..frames).rev().collect(),
        }
    }

    /// True when it was there. It is from now on.
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
        self.policy.inserted(frame, mix(page), Came::Read);
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

impl Frames for PaperFrames {
    fn state(&self, frame: u32) -> State {
        let at = frame as usize;
        #[cfg(test)]
        if self.pinned[at] {
            return State::Busy;
        }
        match self.page[at] {
            NO_PAGE => State::Gone,
            _ => State::Heat(self.heat[at].get()),
        }
    }

    fn set_heat(&self, frame: u32, heat: u8) {
        self.heat[frame as usize].set(heat);
    }

    fn hash(&self, frame: u32) -> u64 {
        mix(self.page[frame as usize])
    }
}
