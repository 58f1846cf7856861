//! The table of a RAM disk and its seals under a model checker of weak memory (loom): two threads, every
//! order of their steps with a bounded number of preemptions, and every value that a load may see.
//!
//! [`Table`] is the product's. Writes, merges and moves around it are those of `publish.rs`, of single pages.
//! The bytes of a frame are relaxed atomics here, as in `spindle_target_disk::cache::tests::weak`.

use std::sync::Mutex;
use std::sync::atomic::Ordering::{self, Acquire, Relaxed, Release, SeqCst};

use loom::sync::Arc;
use loom::sync::atomic::{AtomicI32, AtomicU64};
use loom::thread;

use super::super::table::{Entry, Table};
use crate::mem::atomic::{AtomicCount, AtomicWord};
use crate::mem::seals::{Reference, Seals};

struct Word(AtomicU64);

impl AtomicWord for Word {
    fn new(value: u64) -> Self {
        Word(AtomicU64::new(value))
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

struct Count(AtomicI32);

impl AtomicCount for Count {
    fn zero() -> Self {
        Count(AtomicI32::new(0))
    }

    fn fetch_add(&self, change: i32, order: Ordering) -> i32 {
        self.0.fetch_add(change, order)
    }
}

const PLACE: u32 = 1;
const FRAMES: u32 = 4;

/// One page; its place and two small frames.
struct World {
    table: Table<Word, Count>,
    /// The version in each frame; frame 0 is none.
    content: [AtomicU64; FRAMES as usize],
    /// 1: the frame is free.
    free: [AtomicU64; FRAMES as usize],
    /// The newest version that was acknowledged.
    acknowledged: AtomicU64,
    /// A reference to the page before the threads started.
    known: Mutex<Option<(Reference, u64)>>,
}

impl World {
    fn new() -> Arc<World> {
        Arc::new(World {
            table: Table::new(1, FRAMES, Some(Seals::new(FRAMES))),
            content: std::array::from_fn(|_| AtomicU64::new(0)),
            free: std::array::from_fn(|frame| AtomicU64::new(u64::from(frame != 0))),
            acknowledged: AtomicU64::new(0),
            known: Mutex::new(None),
        })
    }

    fn seal(&self, frame: u32) -> u64 {
        self.table.seals().map_or(0, |seals| seals.load(frame))
    }

    fn claim(&self, frame: u32) -> bool {
        self.free[frame as usize].compare_exchange(1, 0, SeqCst, Relaxed).is_ok()
    }

    /// A small frame. They suffice: each of two threads has one, and the page one.
    fn take(&self) -> u32 {
        (PLACE + 1..FRAMES).find(|frame| self.claim(*frame)).expect("a free frame")
    }

    fn put(&self, frame: u32) {
        assert_eq!(self.free[frame as usize].swap(1, SeqCst), 0, "frame {frame} is free twice");
        if frame == PLACE {
            self.bring_home();
        }
    }

    fn unpin(&self, frame: u32) {
        if self.table.unpin(0, frame) {
            self.put(frame);
        }
    }

    fn retire(&self, old: Entry) {
        if self.table.retire(old) {
            self.put(old.frame());
        }
    }

    fn copy(&self, from: u32, to: u32) {
        self.content[to as usize].store(self.content[from as usize].load(Relaxed), Relaxed);
    }

    fn bring_home(&self) {
        let frame = self.table.load(0, SeqCst).frame();
        if frame == 0 || frame == PLACE || !self.claim(PLACE) {
            return;
        }
        loop {
            let frame = self.table.pin(0);
            if frame == 0 {
                return self.put(PLACE);
            }
            self.copy(frame, PLACE);
            let is_moved = self.replace(frame);
            self.unpin(frame);
            if is_moved {
                return;
            }
        }
    }

    fn replace(&self, frame: u32) -> bool {
        let before = self.table.exchange(0, frame, PLACE);
        if let Some(before) = before {
            assert!(!self.table.retire(before), "the pin of the caller is among them");
        }
        before.is_some()
    }

    /// `FrameCore::swap`.
    fn write(&self, version: u64) {
        let frame = self.take();
        self.content[frame as usize].store(version, Relaxed);
        let here = Entry::of(frame).pinned();
        let old = self.table.swap(0, here, |old| self.put(old));
        if old.pins() > 0 || old.frame() != PLACE {
            self.retire(old);
            self.unpin(frame);
            self.bring_home();
        } else {
            self.copy(frame, PLACE);
            if self.table.settle(0, here, PLACE) {
                self.put(frame);
            } else {
                if !self.replace(frame) {
                    self.put(PLACE);
                }
                self.unpin(frame);
            }
        }
        self.acknowledged.store(version, Release);
    }

    /// A write of a whole extent, whose frames stay where they are.
    fn write_extent(&self, version: u64) {
        let frame = self.take();
        self.content[frame as usize].store(version, Relaxed);
        let old = self.table.swap(0, Entry::of(frame), |old| self.put(old));
        if self.table.retire(old) {
            // Its extent is the home no more, so nothing moves there.
            assert_eq!(self.free[old.frame() as usize].swap(1, SeqCst), 0, "free twice");
        }
        self.acknowledged.store(version, Release);
    }

    /// `FrameCore::merge`: adds 1 to what is there.
    fn merge(&self) {
        let frame = self.take();
        loop {
            let old = self.table.pin(0);
            let version = self.content[old as usize].load(Relaxed) + 1;
            self.content[frame as usize].store(version, Relaxed);
            let before = self.table.exchange(0, old, frame);
            if let Some(before) = before {
                self.retire(before);
            }
            if old != 0 {
                self.unpin(old);
            }
            if before.is_some() {
                self.bring_home();
                self.acknowledged.store(version, Release);
                return;
            }
        }
    }

    /// `FrameCore::zero`. The page reads as version 0 afterwards: not for checks of versions.
    fn zero(&self) {
        let old = self.table.swap(0, Entry::of(0), |old| self.put(old));
        self.retire(old);
    }

    /// An ordinary read, with its reference.
    fn read(&self) -> Option<(Reference, u64)> {
        let floor = self.acknowledged.load(Acquire);
        let frame = self.table.pin(0);
        if frame == 0 {
            return None;
        }
        let content = self.content[frame as usize].load(Relaxed);
        let reference = self.table.reference(frame, 0);
        assert_eq!(content, self.content[frame as usize].load(Relaxed), "a pinned frame changes");
        self.unpin(frame);
        assert!(content >= floor, "version {content}, {floor} was acknowledged");
        Some((reference?, content))
    }

    fn read_by_reference(&self, (reference, content): (Reference, u64), is_seal_first: bool) {
        let floor = self.acknowledged.load(Acquire);
        let bytes = || self.content[reference.frame as usize].load(Relaxed);
        let (seal, bytes) = if is_seal_first {
            let seal = self.seal(reference.frame);
            (seal, bytes())
        } else {
            let bytes = bytes();
            (self.seal(reference.frame), bytes)
        };
        // The comparison of the bytes stands for that of their checksums.
        if seal == reference.seal(0) && bytes == content {
            assert!(content >= floor, "version {content} by reference, {floor} was acknowledged");
        }
    }

    /// Reads by a reference of before the threads started. What an ordinary read has seen is not undone.
    fn client(&self) {
        let Some(old) = self.known.lock().expect("no panic").take() else { return };
        if let Some(new) = self.read() {
            let is_old = self.seal(old.0.frame) == old.0.seal(0);
            assert!(old.1 >= new.1 || !is_old, "version {} is sealed, {} was read", old.1, new.1);
        }
        self.read_by_reference(old, false);
    }

    /// Reads by a reference of before, and by one of now.
    fn clients(&self) {
        let Some(old) = self.known.lock().expect("no panic").take() else { return };
        self.read_by_reference(old, true);
        if let Some(new) = self.read() {
            self.read_by_reference(new, true);
            self.read_by_reference(new, false);
        }
    }

    /// While a frame is sealed, the table names it, and its content does not change.
    fn check_sealed(&self) {
        for frame in 1..FRAMES {
            let before = self.seal(frame);
            if before >> 40 & 1 == 0 {
                continue;
            }
            let floor = self.acknowledged.load(Acquire);
            let content = self.content[frame as usize].load(Relaxed);
            let named = self.table.load(0, Acquire).frame();
            if self.seal(frame) == before {
                assert_eq!(named, frame, "frame {frame} is sealed");
                assert!(content >= floor, "frame {frame} is sealed with an older version");
            }
        }
    }

    /// Both threads have ended.
    fn check(&self) {
        let entry = self.table.load(0, Acquire);
        assert_eq!(entry.pins(), 0, "a pin is left over");
        for frame in 1..FRAMES {
            let is_named = frame == entry.frame();
            assert_eq!(self.seal(frame) >> 40 & 1 == 1, is_named, "seal of frame {frame}");
            assert_eq!(self.free[frame as usize].load(Acquire) == 0, is_named, "frame {frame}");
        }
    }
}

fn explore(preemptions: usize, first: fn(&World), second: fn(&World)) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(move || {
        let world = World::new();
        world.write(1);
        *world.known.lock().expect("no panic") = world.read();
        let other = Arc::clone(&world);
        let thread = thread::spawn(move || second(&other));
        first(&world);
        thread.join().expect("no panic");
        world.check();
    });
}

#[test]
fn a_client_with_references_and_a_write() {
    explore(2, |it| it.write(2), World::client);
    explore(1, |it| it.write(2), World::clients);
}

#[test]
fn a_client_with_references_and_two_writes() {
    let two = |it: &World| {
        it.write(2);
        it.write(3);
    };
    explore(1, two, World::client);
    explore(1, two, World::clients);
}

#[test]
fn a_client_with_references_and_a_merge() {
    explore(2, World::merge, World::client);
    explore(1, World::merge, World::clients);
}

#[test]
fn a_client_with_references_and_a_page_that_is_zeroed_and_written() {
    let zero = |it: &World| {
        it.zero();
        it.write(2);
    };
    explore(1, zero, World::client);
    explore(1, zero, World::clients);
}

#[test]
fn a_frame_is_sealed_only_while_the_table_names_it() {
    explore(2, |it| it.write(2), World::check_sealed);
    explore(2, World::merge, World::check_sealed);
    explore(3, World::zero, World::check_sealed);
}

#[test]
fn two_writers_leave_one_sealed_frame() {
    let two = |it: &World| {
        it.write(3);
        it.write(4);
    };
    explore(2, |it| it.write(2), |it| it.write(3));
    explore(1, World::zero, two);
    explore(2, |it| it.write(2), World::zero);
}

/// A writer has broken the seal of a frame and is about to replace it; its publisher is about to seal it.
#[test]
fn a_publisher_does_not_seal_a_frame_that_leaves() {
    let zero_and_look = |it: &World| {
        it.zero();
        it.check_sealed();
    };
    explore(2, |it| it.write_extent(2), zero_and_look);
    explore(2, |it| it.write_extent(2), |it| it.write_extent(3));
    explore(2, |it| it.write_extent(2), World::client);
}

#[test]
fn a_merge_and_a_writer_leave_one_sealed_frame() {
    explore(1, |it| it.write(2), World::merge);
    explore(1, World::merge, World::merge);
}

/// The page stays in a small frame while a read has its place, and the read moves it home.
#[test]
fn a_page_that_is_moved_home_and_a_write() {
    explore(3, |it| _ = it.read(), |it| it.write(2));
    let write_and_look = |it: &World| {
        it.write(2);
        it.check_sealed();
    };
    explore(2, |it| _ = it.read(), write_and_look);
}
