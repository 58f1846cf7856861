//! Index and frames under a model checker of weak memory (loom): two threads, two frames, two pages, every
//! order of their steps with up to three preemptions (two, where the steps are many), and every value that
//! a load may see.
//!
//! The bytes of a frame, and those of the disk, are relaxed atomics here: what orders them in the product
//! is the index and the frames' words, so that is what must order them in the model.

use std::sync::atomic::Ordering::{self, Relaxed};

use loom::sync::Arc;
use loom::sync::Mutex;
use loom::sync::atomic::AtomicU64;
use loom::thread;
use spindle_reactor::mem::{AtomicWord, Filling, FrameWords, Reference, Seals, Shard};

use crate::cache::index::{Found, Index, Inserted, Write};
use crate::cache::sweeps::Sweeps;

struct Modelled(AtomicU64);

impl AtomicWord for Modelled {
    fn new(value: u64) -> Self {
        Modelled(AtomicU64::new(value))
    }

    fn load(&self, order: Ordering) -> u64 {
        self.0.load(order)
    }

    fn store(&self, value: u64, order: Ordering) {
        self.0.store(value, order);
    }

    fn swap(&self, value: u64, order: Ordering) -> u64 {
        self.0.swap(value, order)
    }

    fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
        self.0.fetch_add(value, order)
    }

    fn exchange_ordered(&self, current: u64, new: u64, orders: (Ordering, Ordering)) -> Result<u64, u64> {
        self.0.compare_exchange(current, new, orders.0, orders.1)
    }
}

/// Pages 0 and 1 of a disk, two frames.
struct World {
    words: FrameWords<Modelled>,
    index: Index<Modelled>,
    shard: Mutex<Shard>,
    sweeps: Sweeps<Modelled>,
    /// The version on the disk.
    disk: [AtomicU64; 2],
    /// What is in a frame: page and version.
    content: [AtomicU64; 2],
    /// The newest version that was acknowledged.
    acknowledged: [AtomicU64; 2],
    /// Entries of no frame, which fill the first bucket of page 1.
    others: usize,
}

/// Where the pages are in the index.
#[derive(Clone, Copy)]
enum Places {
    /// In one bucket.
    One,
    /// In a bucket each.
    Apart,
    /// Page 1 is in its second bucket: its first is full. Both buckets of page 0 are the same.
    Second,
}

fn pair() -> [AtomicU64; 2] {
    [AtomicU64::new(0), AtomicU64::new(0)]
}

impl World {
    fn new(places: Places) -> Arc<World> {
        let (words, mut shards) = FrameWords::new(1, 2, Some(Seals::new(2)));
        let shard = Mutex::new(shards.remove(0));
        // One bucket for up to 2 frames, 11 for 30.
        let index = Index::new(if matches!(places, Places::One) { 2 } else { 30 });
        let others = match places {
            Places::One | Places::Apart => 0,
            Places::Second => {
                assert!(!index.is_single(index.buckets(1)));
                index.fill_first_bucket(index.buckets(1))
            }
        };
        let (sweeps, disk, content, acknowledged) = (Sweeps::new(1), pair(), pair(), pair());
        Arc::new(World { words, index, shard, sweeps, disk, content, acknowledged, others })
    }

    /// A read of a page, with a fill where it is missing.
    fn read(&self, page: usize) -> u64 {
        let floor = self.acknowledged[page].load(Ordering::Acquire);
        let version = self.look(page).unwrap_or_else(|| match self.enter(page, None) {
            Some(filling) => self.fill(page, filling),
            None => self.disk[page].load(Relaxed),
        });
        assert!(version >= floor, "page {page}: version {version} after {floor} was acknowledged");
        version
    }

    /// A read that is answered from the cache or not at all.
    fn hit(&self, page: usize) {
        let floor = self.acknowledged[page].load(Ordering::Acquire);
        assert!(self.look(page).is_none_or(|version| version >= floor), "page {page}: older than {floor}");
    }

    /// A reference to a page in the cache, and its bytes.
    fn refer(&self, page: usize) -> Option<(Reference, u64)> {
        let Found::Present(pin) = self.index.find(&self.words, self.index.buckets(page as u64)) else {
            return None;
        };
        let content = self.content[pin.frame() as usize].load(Relaxed);
        Some((pin.reference()?, content))
    }

    /// A read by a client without a pin. The seal is read before the bytes or after.
    fn read_by_reference(&self, page: usize, (reference, content): (Reference, u64), is_seal_first: bool) {
        let floor = self.acknowledged[page].load(Ordering::Acquire);
        let seal = || self.words.seals().map_or(0, |seals| seals.load(reference.frame));
        let bytes = || self.content[reference.frame as usize].load(Relaxed);
        let (seal, bytes) = if is_seal_first {
            let seal = seal();
            (seal, bytes())
        } else {
            let bytes = bytes();
            (seal(), bytes)
        };
        // The comparison of the bytes stands for that of their checksums.
        if seal == reference.seal(page as u64) && bytes == content {
            let version = content & 0xffff_ffff;
            assert!(
                version >= floor,
                "page {page}: version {version} by reference, {floor} was acknowledged"
            );
        }
    }

    /// Two reads by references that were valid before, and by those of now.
    fn client(&self, page: usize) {
        let old = self.refer(page);
        self.read_by_reference_if(page, old);
        let new = self.refer(page);
        self.read_by_reference_if(page, old);
        self.read_by_reference_if(page, new);
    }

    /// A write, and then reads by a reference of before, and by every seal: also by those to which no client
    /// has a reference yet.
    fn write_and_read_by_reference(&self, page: usize, version: u64) {
        let old = self.refer(page);
        self.write(page, version, false);
        self.read_by_reference_if(page, old);
        for frame in 0..2 {
            let seal = || self.words.seals().map_or(0, |seals| seals.load(frame));
            let before = seal();
            let content = self.content[frame as usize].load(Relaxed);
            if before >> 40 & 1 == 1 && before & 1 == page as u64 && before == seal() {
                assert!(content & 0xffff_ffff >= version, "frame {frame} is sealed with an older version");
            }
        }
    }

    /// Announces a write while nothing is filled: no frame is sealed for the page before the disk changes.
    fn announce(&self, page: usize) {
        let buckets = self.index.buckets(page as u64);
        self.index.begin_write(&self.words, buckets);
        for frame in 0..2 {
            let seal = self.words.seals().map_or(0, |seals| seals.load(frame));
            assert!(seal >> 40 & 1 == 0 || seal & 1 != page as u64, "frame {frame} is still sealed");
        }
        self.index.end_write(buckets);
    }

    /// A frame that is sealed for a page contains this page.
    fn check_sealed(&self) {
        for frame in 0..2 {
            let seal = || self.words.seals().map_or(0, |seals| seals.load(frame));
            let before = seal();
            let content = self.content[frame as usize].load(Relaxed);
            if before >> 40 & 1 == 1 && before == seal() {
                assert_eq!(content >> 32, before & 1, "frame {frame} is sealed for another page");
            }
        }
    }

    fn read_by_reference_if(&self, page: usize, reference: Option<(Reference, u64)>) {
        if let Some(reference) = reference {
            self.read_by_reference(page, reference, true);
            self.read_by_reference(page, reference, false);
        }
    }

    fn look(&self, page: usize) -> Option<u64> {
        match self.index.find(&self.words, self.index.buckets(page as u64)) {
            Found::Present(pin) => {
                let content = self.content[pin.frame() as usize].load(Relaxed);
                assert_eq!(content >> 32, page as u64, "another page's bytes");
                Some(content & 0xffff_ffff)
            }
            Found::Filling | Found::Missing => None,
        }
    }

    fn enter(&self, page: usize, write: Option<Write>) -> Option<Filling<'_, Modelled>> {
        let buckets = self.index.buckets(page as u64);
        let mut shard = self.shard.lock().expect("no panic");
        if !matches!(self.index.find(&self.words, buckets), Found::Missing) {
            return None;
        }
        let filling = self.words.allocate(&mut shard, page as u64)?;
        assert_ne!(self.index.insert(&self.words, buckets, &filling, write), Inserted::Full);
        if write.is_none() && self.sweeps.covers(page as u64) {
            filling.doom();
            self.index.remove(&self.words, buckets, filling.frame());
        }
        Some(filling)
    }

    fn fill(&self, page: usize, filling: Filling<'_, Modelled>) -> u64 {
        let version = self.disk[page].load(Relaxed);
        self.publish(page, version, filling)
    }

    /// A fill whose buffer the disk drops before the cache learns of it.
    fn lose(&self, page: usize) {
        let Some(filling) = self.enter(page, None) else { return };
        let frame = filling.frame();
        filling.lose();
        if let Some(pin) = self.words.pin(frame) {
            if pin.page() == page as u64 {
                pin.invalidate();
            }
            self.index.remove(&self.words, self.index.buckets(page as u64), frame);
        }
    }

    fn publish(&self, page: usize, version: u64, filling: Filling<'_, Modelled>) -> u64 {
        self.content[filling.frame() as usize].store((page as u64) << 32 | version, Relaxed);
        if let Err(filling) = filling.publish() {
            self.index.remove(&self.words, self.index.buckets(page as u64), filling.frame());
            let pin = filling.detach();
            let own = self.content[pin.frame() as usize].load(Relaxed);
            assert_eq!(own, (page as u64) << 32 | version, "a frame changes under its filler's pin");
        }
        version
    }

    /// A write of the next version, acknowledged.
    fn write(&self, page: usize, version: u64, stays: bool) {
        let buckets = self.index.buckets(page as u64);
        let write = self.index.begin_write(&self.words, buckets);
        self.disk[page].store(version, Relaxed);
        if stays
            && write.is_alone
            && write.was.is_some()
            && let Some(filling) = self.enter(page, Some(write))
        {
            self.publish(page, version, filling);
        }
        self.index.end_write(buckets);
        self.acknowledged[page].store(version, Ordering::Release);
    }

    /// The same by a long write, which drops its pages one by one or looks at all frames.
    fn write_long(&self, page: usize, version: u64, is_by_page: bool) {
        let at = page as u64;
        let mut sweep = self.sweeps.begin(at..at + 1).expect("it is the only one");
        if is_by_page {
            self.index.sweep_page(&self.words, self.index.buckets(at));
        } else {
            assert!(self.sweeps.step(&mut sweep, &self.index, &self.words), "two frames are one step");
        }
        self.disk[page].store(version, Relaxed);
        self.sweeps.end(&sweep);
        self.acknowledged[page].store(version, Ordering::Release);
    }

    /// Take a page out, if no other thread has it pinned.
    fn evict(&self, page: usize) {
        let buckets = self.index.buckets(page as u64);
        if let Found::Present(pin) = self.index.find(&self.words, buckets)
            && pin.evict().is_some()
        {
            self.index.remove(&self.words, buckets, pin.frame());
        }
    }

    /// Both threads have ended.
    fn check(&self) {
        let [free, filling, present, detached] = self.words.census();
        assert_eq!((filling, detached, free + present), (0, 0, 2), "a frame is left over");
        assert_eq!(self.index.len(), present as usize + self.others, "entries and frames differ");
        let in_second = self.others > 0 && self.look(1).is_some();
        assert_eq!(
            self.index.control_of(self.index.buckets(1)).1,
            u64::from(in_second),
            "entries in second buckets"
        );
        assert!(!self.words.is_pinned(0) && !self.words.is_pinned(1), "a pin is left over");
        for frame in 0..2 {
            let seal = self.words.seals().map_or(0, |seals| seals.load(frame));
            let page = seal & 1;
            let refers = |it: (Reference, u64)| it.0.frame == frame && it.0.seal(page) == seal;
            let is_present = self.refer(page as usize).is_some_and(refers);
            assert_eq!(seal >> 40 & 1 == 1, is_present, "frame {frame}: seal {seal:#x}");
        }
        for page in 0..2 {
            let newest = self.disk[page].load(Relaxed);
            assert!(self.look(page).is_none_or(|version| version == newest), "page {page} is stale");
        }
    }
}

fn explore(before: fn(&World), first: fn(&World), second: fn(&World)) {
    explore_up_to(3, before, first, second);
}

fn explore_up_to(preemptions: usize, before: fn(&World), first: fn(&World), second: fn(&World)) {
    explore_in(Places::One, preemptions, before, first, second);
}

fn explore_in(places: Places, preemptions: usize, before: fn(&World), first: fn(&World), second: fn(&World)) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(move || {
        let world = World::new(places);
        before(&world);
        let other = Arc::clone(&world);
        let thread = thread::spawn(move || second(&other));
        first(&world);
        thread.join().expect("no panic");
        world.check();
    });
}

#[test]
fn a_write_and_a_read_of_a_page_that_is_there() {
    explore(|it| _ = it.read(0), |it| it.write(0, 1, false), |it| _ = it.read(0));
}

/// With two preemptions: a write that enters its page has so many steps.
#[test]
fn a_write_of_a_page_that_stays_and_a_hit() {
    explore_up_to(2, |it| _ = it.read(0), |it| it.write(0, 1, true), |it| it.hit(0));
}

#[test]
fn two_writes_of_a_page_that_is_there() {
    explore_up_to(2, |it| _ = it.read(0), |it| it.write(0, 1, true), |it| it.write(0, 2, true));
}

#[test]
fn a_write_and_a_fill() {
    explore(|_| (), |it| it.write(0, 1, false), |it| _ = it.read(0));
}

#[test]
fn a_long_write_and_a_fill() {
    explore(|_| (), |it| it.write_long(0, 1, true), |it| _ = it.read(0));
    explore(|_| (), |it| it.write_long(0, 1, false), |it| _ = it.read(0));
}

#[test]
fn a_long_write_and_a_read_of_a_page_that_is_there() {
    explore_up_to(2, |it| _ = it.read(0), |it| it.write_long(0, 1, true), |it| _ = it.read(0));
    explore_up_to(2, |it| _ = it.read(0), |it| it.write_long(0, 1, false), |it| _ = it.read(0));
}

#[test]
fn a_fill_whose_buffer_is_dropped_and_a_write_a_read_or_the_same() {
    explore_up_to(2, |_| (), |it| it.lose(0), |it| it.write(0, 1, false));
    explore_up_to(2, |_| (), |it| it.lose(0), |it| it.write_long(0, 1, false));
    explore_up_to(2, |_| (), |it| it.lose(0), |it| _ = it.read(0));
    explore_up_to(2, |_| (), |it| it.lose(0), |it| it.lose(0));
}

#[test]
fn two_fills_of_one_page_and_two_of_two_pages() {
    explore(|_| (), |it| _ = it.read(0), |it| _ = it.read(0));
    explore(|_| (), |it| _ = it.read(0), |it| _ = it.read(1));
}

#[test]
fn an_eviction_a_fill_of_its_frame_and_a_read() {
    let both_there = |it: &World| {
        it.read(0);
        it.read(1);
    };
    let reuse = |it: &World| {
        it.evict(0);
        it.evict(1);
        it.read(1);
    };
    explore(both_there, reuse, |it| _ = it.read(0));
}

#[test]
fn an_eviction_and_a_write() {
    explore(|it| _ = it.read(0), |it| it.evict(0), |it| it.write(0, 1, false));
}

/// A client reads by references while the other thread changes the page.
#[test]
fn a_client_with_references_and_a_write() {
    explore_up_to(2, |it| _ = it.read(0), |it| it.write(0, 1, false), |it| it.client(0));
    explore_up_to(2, |it| _ = it.read(0), |it| it.write(0, 1, true), |it| it.client(0));
    explore_up_to(2, |it| _ = it.read(0), |it| it.write_long(0, 1, false), |it| it.client(0));
}

#[test]
fn a_client_with_references_and_evictions() {
    let reuse = |it: &World| {
        it.evict(0);
        it.read(1);
        it.evict(1);
        it.read(0);
    };
    explore_up_to(2, |it| _ = it.read(0), reuse, |it| it.client(0));
}

#[test]
fn a_writer_with_references_and_an_eviction_and_a_fill() {
    explore(|it| _ = it.read(0), |it| it.evict(0), |it| it.write_and_read_by_reference(0, 1));
    explore_up_to(2, |_| (), |it| _ = it.read(0), |it| it.write_and_read_by_reference(0, 1));
}

/// The first write dooms the fill. Before this write breaks the seal, the filler seals the frame, cannot
/// publish it, and removes the index entry. The second write finds no entry, so it does not break the seal.
#[test]
fn a_write_after_a_fill_that_another_write_has_doomed() {
    let second_writer = |it: &World| {
        it.read(0);
        it.write_and_read_by_reference(0, 2);
    };
    explore_up_to(2, |_| (), second_writer, |it| it.write(0, 1, false));
}

/// The fill of page 0 is doomed, and its frame is filled with page 1 while the writer is still about to break
/// the seal.
#[test]
fn a_frame_is_not_filled_again_under_a_seal() {
    let both = |it: &World| {
        it.read(0);
        it.read(1);
        it.check_sealed();
    };
    explore_up_to(2, |_| (), both, |it| it.write(0, 1, false));
}

/// Of two writers one invalidates the frame. The other must not change the disk before the seal is broken.
#[test]
fn no_writer_changes_the_disk_before_the_seal_is_broken() {
    explore_in(Places::Apart, 3, |it| _ = it.read(1), |it| it.announce(1), |it| it.announce(1));
    explore(|it| _ = it.read(0), |it| it.evict(0), |it| it.announce(0));
    explore(|it| _ = it.read(0), |it| it.write_long(0, 1, false), |it| it.announce(0));
}

/// The count of entries in second buckets is never too low for a writer, and exact at rest.
#[test]
fn a_page_in_its_second_bucket_that_is_filled_written_evicted_and_read() {
    let there = |it: &World| _ = it.read(1);
    let explore = |before, first, second| explore_in(Places::Second, 2, before, first, second);
    explore(|_| (), |it| it.write(1, 1, false), |it| _ = it.read(1));
    explore(|_| (), |it| it.write_long(1, 1, false), |it| _ = it.read(1));
    explore(|_| (), |it| _ = it.read(1), |it| _ = it.read(1));
    explore(|_| (), |it| it.lose(1), |it| it.write(1, 1, false));
    explore(there, |it| it.write(1, 1, true), |it| it.hit(1));
    explore(there, |it| it.write(1, 1, false), |it| it.write(1, 2, true));
    explore(there, |it| it.evict(1), |it| it.write(1, 1, false));
    explore(there, |it| it.evict(1), |it| _ = it.read(1));
}

/// One actor more than elsewhere: the page leaves its second bucket and enters it again while it is written.
#[test]
fn a_page_in_its_second_bucket_and_three_threads() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(|| {
        let world = World::new(Places::Second);
        world.read(1);
        let [evictor, reader] = [Arc::clone(&world), Arc::clone(&world)];
        let threads = [thread::spawn(move || evictor.evict(1)), thread::spawn(move || reader.hit(1))];
        world.write(1, 1, false);
        threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
        world.check();
    });
}
