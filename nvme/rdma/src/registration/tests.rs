//! The cache against a fake device, which records the registrations, and against a simple model.

use std::cell::RefCell;
use std::rc::Rc;

use super::*;

#[derive(Debug, Default)]
struct Device {
    /// Live registrations by key: start, end, and whether writable.
    live: BTreeMap<u32, (usize, usize, bool)>,
    next_key: u32,
    /// Maximum bytes of all registrations.
    bytes_max: usize,
}

#[derive(Debug, Clone)]
struct Fake(Rc<RefCell<Device>>);

#[derive(Debug)]
struct Registration {
    device: Fake,
    key: u32,
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.device.0.borrow_mut().live.remove(&self.key).expect("deregistered once");
    }
}

impl Registrar for Fake {
    type Region = Registration;
    type Memory = ();
    type Error = &'static str;

    fn register(
        &mut self,
        (): &(),
        address: usize,
        bytes: usize,
        is_writable: bool,
    ) -> Result<Registration, &'static str> {
        assert!(address.is_multiple_of(4096) && bytes.is_multiple_of(4096) && bytes > 0, "whole pages");
        let mut device = self.0.borrow_mut();
        if device.bytes_max < usize::MAX {
            let pinned: usize = device.live.values().map(|(start, end, _)| end - start).sum();
            if pinned + bytes > device.bytes_max {
                return Err("too much is pinned");
            }
        }
        device.next_key += 1;
        let key = device.next_key;
        device.live.insert(key, (address, address + bytes, is_writable));
        Ok(Registration { device: self.clone(), key })
    }

    fn keys(region: &Registration) -> (u32, u32) {
        (region.key, region.key | 1 << 31)
    }
}

fn device() -> Fake {
    Fake(Rc::new(RefCell::new(Device { bytes_max: usize::MAX, ..Device::default() })))
}

fn cache(limits: Limits) -> (Cache<Fake>, Fake) {
    let device = device();
    (Cache::new(device.clone(), limits), device)
}

const KIB: usize = 1024;

#[test]
fn a_range_that_is_covered_is_a_hit_and_a_longer_one_takes_its_place() {
    let (mut cache, device) = cache(Limits::default());
    let first = cache.acquire(0x1_0100, 4 * KIB, true, || ()).expect("registered");
    assert_eq!(device.0.borrow().live[&first.local_key], (0x1_0000, 0x1_2000, true), "rounded to pages");
    let inside = cache.acquire(0x1_0000, 8 * KIB, true, || ()).expect("covered");
    assert_eq!(inside, first);
    assert_eq!(first.remote_key, first.local_key | 1 << 31);
    let longer = cache.acquire(0x1_0000, 8 * KIB + 1, true, || ()).expect("registered");
    assert_ne!(longer, first);
    cache.release(inside.slot);
    assert_eq!(device.0.borrow().live.len(), 2, "the shorter one is in use");
    cache.release(first.slot);
    for _ in 0..8 {
        cache.tidy();
    }
    assert_eq!(cache.acquire(0x1_0000, 1, true, || ()).expect("covered"), longer);
    let device = device.0.borrow();
    assert_eq!((device.next_key, device.live.len()), (2, 2), "registered twice, and kept");
}

#[test]
fn a_full_table_makes_room_by_what_is_idle_and_counts_only_what_is_in_it() {
    let limits = Limits { bytes: usize::MAX, entries: usize::MAX, batch: 1 };
    let (mut cache, _device) = cache(limits);
    let mut acquire = |index: usize| {
        let lease = cache.acquire((index + 1) * 8 * KIB, 4 * KIB, true, || ());
        if index == 0 {
            cache.release(lease.expect("registered").slot);
        }
        (lease, cache.bytes)
    };
    let all = SLAB_ENTRIES_MAX * 4 * KIB;
    let last = (0..SLAB_ENTRIES_MAX).map(&mut acquire).last().expect("some");
    assert_eq!(last.1, all);
    let (more, bytes) = acquire(SLAB_ENTRIES_MAX);
    assert!(more.is_ok(), "the idle one makes room: {more:?}");
    assert_eq!(bytes, all);
    assert_eq!(acquire(SLAB_ENTRIES_MAX + 1), (Err(CacheError::Full), all));
}

#[test]
fn memory_that_may_not_be_written_is_apart() {
    let (mut cache, device) = cache(Limits::default());
    let shared = cache.acquire(0x1000, 4 * KIB, false, || ()).expect("registered");
    let own = cache.acquire(0x1000, 4 * KIB, true, || ()).expect("registered");
    assert_ne!(shared, own);
    assert!(!device.0.borrow().live[&shared.local_key].2);
    assert_eq!(cache.acquire(0x1000, 1, false, || ()), Ok(shared));
    assert_eq!(cache.acquire(usize::MAX, 2, false, || ()), Err(CacheError::Range));
    assert_eq!(cache.acquire(usize::MAX - 1, 1, false, || ()), Err(CacheError::Range));
}

#[test]
fn the_least_recently_used_goes_first_and_what_is_in_use_never() {
    let limits = Limits { bytes: 12 * KIB, batch: 1, ..Limits::default() };
    let (mut cache, device) = cache(limits);
    let at = |index: usize| index * 0x10_000;
    let leases: Vec<Lease> =
        (0..3).map(|index| cache.acquire(at(index), 4 * KIB, true, || ()).expect("registered")).collect();
    for lease in &leases {
        cache.release(lease.slot);
    }
    // Registration 0 is used again: 1 is the least recently used now.
    cache.acquire(at(0), 1, true, || ()).expect("a hit");
    cache.acquire(at(3), 4 * KIB, true, || ()).expect("registered");
    cache.tidy();
    let is_live = |index: usize| device.0.borrow().live.values().any(|(start, ..)| *start == at(index));
    assert_eq!([0, 1, 2, 3].map(is_live), [true, false, true, true]);
    // Registrations 0 and 3 are in use; those in use may exceed the limit.
    let more: Vec<Lease> =
        (4..8).map(|index| cache.acquire(at(index), 4 * KIB, true, || ()).expect("registered")).collect();
    assert_eq!(cache.bytes, 24 * KIB);
    for lease in more {
        cache.release(lease.slot);
    }
    assert_eq!(cache.bytes, 12 * KIB);
    assert!(is_live(0) && is_live(3));
}

#[test]
fn what_is_given_up_goes_in_batches() {
    let limits = Limits { entries: 4, batch: 8, ..Limits::default() };
    let (mut cache, device) = cache(limits);
    let mut use_one = |index: usize| {
        let lease = cache.acquire(index * 0x10_000, 4 * KIB, true, || ()).expect("registered");
        cache.release(lease.slot);
        cache.tidy();
        let device = device.0.borrow();
        device.next_key as usize - device.live.len()
    };
    let gone: Vec<usize> = (0..20).map(&mut use_one).collect();
    assert_eq!(gone[..12], [0; 11].into_iter().chain([8]).collect::<Vec<usize>>()[..]);
    assert_eq!((gone[18], gone[19]), (8, 16));
    assert_eq!(device.0.borrow().live.len(), 4);
}

#[test]
fn memory_that_was_unmapped_is_registered_anew() {
    let (mut cache, device) = cache(Limits { batch: 1, ..Limits::default() });
    let idle = cache.acquire(0x1000, 8 * KIB, true, || ()).expect("registered");
    cache.release(idle.slot);
    let used = cache.acquire(0x2000, 12 * KIB, true, || ()).expect("registered");
    let other = cache.acquire(0x6000, 4 * KIB, false, || ()).expect("registered");
    cache.invalidate(0x2800, 1);
    assert!(!device.0.borrow().live.contains_key(&idle.local_key), "it is not used");
    assert!(device.0.borrow().live.contains_key(&used.local_key), "its command is on its way");
    let anew = cache.acquire(0x2000, 4 * KIB, true, || ()).expect("registered");
    assert_ne!(anew.local_key, used.local_key);
    assert_eq!(cache.acquire(0x6000, 4 * KIB, false, || ()), Ok(other), "not touched");
    cache.release(used.slot);
    cache.tidy();
    assert!(!device.0.borrow().live.contains_key(&used.local_key));
    cache.invalidate(0, usize::MAX);
    cache.release(other.slot);
    cache.release(other.slot);
    cache.release(anew.slot);
    cache.tidy();
    cache.tidy();
    assert!(device.0.borrow().live.is_empty());
}

#[test]
fn where_no_more_can_be_pinned_what_is_idle_goes() {
    let (mut cache, device) = cache(Limits::default());
    device.0.borrow_mut().bytes_max = 8 * KIB;
    for index in 0..4 {
        let lease = cache.acquire(index * 0x10_000, 4 * KIB, true, || ()).expect("room was made");
        cache.release(lease.slot);
    }
    let _held = cache.acquire(0x50_0000, 8 * KIB, true, || ()).expect("room was made");
    let full = cache.acquire(0x60_0000, 4 * KIB, true, || ());
    assert_eq!(full, Err(CacheError::Register("too much is pinned")));
    assert_eq!(cache.bytes, 8 * KIB);
}

/// The cache and a list of its leases; every lease is checked against the table of the fake device.
struct Play {
    random: u64,
    cache: Cache<Fake>,
    device: Fake,
    limits: Limits,
    /// Leases in use: address and length asked for, whether the memory is writable, and the lease.
    used: Vec<(usize, usize, bool, Lease)>,
    /// Keys of stale registrations: made before their memory was unmapped.
    stale: Vec<u32>,
    /// Keys of registrations that a later one covers.
    shadowed: Vec<u32>,
}

impl Play {
    fn new(seed: u64) -> Play {
        let batch = usize::try_from(1 + seed % 3).expect("small");
        let limits = Limits { bytes: 64 * KIB, entries: 12, batch };
        let (cache, device) = cache(limits);
        let random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        Play { random, cache, device, limits, used: Vec::new(), stale: Vec::new(), shadowed: Vec::new() }
    }

    fn below(&mut self, n: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        usize::try_from(self.random % n as u64).expect("small")
    }

    fn acquire(&mut self) {
        let (address, bytes) = (self.below(100_000), 1 + self.below(20_000));
        let is_writable = self.below(3) > 0;
        let before = self.device.0.borrow().next_key;
        let lease = self.cache.acquire(address, bytes, is_writable, || ()).expect("no limit of the device");
        let (start, end, is_live_writable) = self.device.0.borrow().live[&lease.local_key];
        assert!(start <= address && address + bytes <= end, "covers the range");
        assert_eq!(is_live_writable, is_writable);
        assert!(!self.stale.contains(&lease.local_key), "of memory that was unmapped");
        let device = self.device.0.borrow();
        if device.next_key > before {
            for (_, _, _, held) in self.used.iter().filter(|held| held.2 == is_writable) {
                let key = held.local_key;
                let (held_start, held_end, _) = device.live[&key];
                let is_found = !self.stale.contains(&key) && !self.shadowed.contains(&key);
                let is_enough = held_start <= address && address + bytes <= held_end;
                assert!(!(is_found && is_enough), "{held:?} would have done");
                if start <= held_start && held_end <= end {
                    self.shadowed.push(key);
                }
            }
        }
        self.used.push((address, bytes, is_writable, lease));
    }

    fn release(&mut self) {
        if self.used.is_empty() {
            return;
        }
        let at = self.below(self.used.len());
        let (_, _, _, lease) = self.used.swap_remove(at);
        self.cache.release(lease.slot);
    }

    fn unmap(&mut self) {
        let (address, bytes) = (self.below(100_000), 1 + self.below(8_000));
        self.cache.invalidate(address, bytes);
        let device = self.device.0.borrow();
        let touched =
            |(_, (start, end, _)): &(&u32, &(usize, usize, bool))| *start < address + bytes && address < *end;
        self.stale.extend(device.live.iter().filter(touched).map(|(key, _)| *key));
    }

    fn check(&self) {
        let device = self.device.0.borrow();
        for (_, _, _, lease) in &self.used {
            assert!(device.live.contains_key(&lease.local_key), "in use, and gone");
        }
        let keys: std::collections::BTreeSet<u32> = self.used.iter().map(|it| it.3.local_key).collect();
        let used: usize = keys.iter().map(|key| device.live[key].1 - device.live[key].0).sum();
        assert!(self.cache.bytes <= self.limits.bytes.max(used), "more is kept than allowed");
        let parked = device.live.len() - self.cache.entries.len();
        assert!(parked <= 4 * self.limits.batch, "{parked} are parked");
        for map in &self.cache.maps {
            let ends: Vec<usize> =
                map.values().map(|slot| self.cache.entries.get(*slot).expect("").end).collect();
            assert!(ends.is_sorted_by(|a, b| a < b), "one covers another");
        }
    }
}

#[test]
fn in_any_order_every_answer_is_true_and_everything_is_given_up_once() {
    for seed in 1..300 {
        let mut play = Play::new(seed);
        for _ in 0..600 {
            match play.below(12) {
                0..=4 => play.acquire(),
                5..=9 => play.release(),
                10 => play.unmap(),
                _ => play.cache.tidy(),
            }
            play.check();
        }
        while !play.used.is_empty() {
            play.release();
        }
        play.check();
        let Play { cache, device, .. } = play;
        drop(cache);
        assert!(device.0.borrow().live.is_empty(), "seed {seed}");
    }
}
