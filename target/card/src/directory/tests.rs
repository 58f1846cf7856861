//! Tests of the directory; under a model checker of weak memory (loom), its words against each other.

use loom::sync::Arc;
use loom::sync::atomic::AtomicU64 as LoomU64;
use loom::thread;

use super::*;

/// 64 extents of 16 pages.
const PAGES: u64 = 1024;

fn directory() -> Directory {
    Directory::new(PAGES)
}

#[test]
fn a_write_finds_the_members_of_its_extents_and_of_no_other() {
    let directory = directory();
    assert!(
        directory.register(&(0..1), 3) && directory.register(&(15..17), 5) && directory.register(&(0..1), 3)
    );
    for (pages, members) in
        [(0..1, 1 << 3 | 1 << 5), (16..17, 1 << 5), (32..33, 0), (0..1024, 1 << 3 | 1 << 5)]
    {
        assert_eq!(directory.begin_short(&pages), members, "{pages:?}");
        directory.end_short(&pages);
    }
    directory.release(0, 5);
    assert_eq!(directory.begin_short(&(0..32)), 1 << 3 | 1 << 5, "it has the other one");
    directory.release(1, 5);
    assert_eq!(directory.begin_short(&(0..32)), 1 << 3);
}

#[test]
fn nothing_may_be_kept_of_an_extent_while_it_is_written() {
    let directory = directory();
    for _ in 0..2 {
        assert_eq!(directory.begin_short(&(16..32)), 0);
    }
    assert!(!directory.register(&(31..32), 1) && directory.register(&(32..33), 1));
    directory.end_short(&(16..32));
    assert!(!directory.register(&(31..32), 1), "one is still in flight");
    directory.end_short(&(16..32));
    assert!(directory.register(&(31..32), 1));
    assert_eq!(directory.begin_short(&(16..17)), 1 << 1, "a refusal leaves the registration");
}

#[test]
fn long_writes_refuse_their_extents_and_are_limited() {
    let directory: Directory = Directory::new(1 << 20);
    let pages = 1 << 16..1 << 17;
    let long = directory.begin_long(&pages).expect("a place");
    assert!(directory.register(&(0..1 << 16), 1) && directory.register(&((1 << 17)..(1 << 17) + 1), 1));
    assert!(!directory.register(&(1 << 16..(1 << 16) + 1), 2));
    assert!(!directory.register(&((1 << 17) - 1..1 << 17), 3));
    let (mut next, mut members, mut steps) = (0, 0, 0);
    while {
        let (found, is_last) = directory.step_members(&pages, &mut next);
        (members, steps) = (members | found, steps + 1);
        !is_last
    } {}
    assert_eq!((members, steps), (1 << 2 | 1 << 3, 2));
    let others: Vec<_> = std::iter::from_fn(|| directory.begin_long(&pages)).collect();
    assert_eq!(others.len(), LONG_MAX - 1);
    others.iter().for_each(|other| directory.end_long(other));
    assert!(!directory.register(&(1 << 16..(1 << 16) + 1), 2));
    directory.end_long(&long);
    assert!(directory.register(&(1 << 16..(1 << 16) + 1), 2) && directory.begin_long(&pages).is_some());
}

#[test]
fn a_member_that_is_gone_is_removed_from_all_extents() {
    let directory: Directory = Directory::new(1 << 17);
    for member in [0, 1, 63] {
        assert!(directory.register(&(0..1 << 17), member));
    }
    let mut next = 0;
    while !directory.step_clear(1 << 63 | 1, &mut next) {}
    for page in [0, 1 << 16, (1 << 17) - 1] {
        assert_eq!(directory.begin_short(&(page..page + 1)), 1 << 1);
    }
}

#[test]
fn nothing_may_be_kept_of_pages_beyond_the_table() {
    let directory = directory();
    assert!(!directory.register(&(PAGES..PAGES + 1), 1));
    assert_eq!(directory.begin_short(&(PAGES - 1..PAGES + 64)), 0);
    directory.end_short(&(PAGES - 1..PAGES + 64));
    directory.release(u64::MAX, 1);
    assert!(!directory.register(&(PAGES - 1..PAGES + 1), 1) && directory.register(&(PAGES - 1..PAGES), 1));
}

struct Modelled(LoomU64);

impl AtomicWord for Modelled {
    fn new(value: u64) -> Self {
        Modelled(LoomU64::new(value))
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

/// A disk of one page. A relaxed word: what orders it in the product is the directory, so that is what must
/// order it here.
struct World {
    directory: Directory<Modelled>,
    disk: LoomU64,
}

impl World {
    fn new() -> Arc<World> {
        Arc::new(World { directory: Directory::with_counters(1, 1), disk: LoomU64::new(0) })
    }

    /// Read and Register: what a member keeps, if it may keep it.
    fn register(&self, member: u8) -> Option<u64> {
        let keeps = self.directory.register(&(0..1), member);
        let version = self.disk.load(Ordering::Relaxed);
        keeps.then_some(version)
    }

    /// A write. Returns the members that it has told.
    fn write(&self, version: u64, is_long: bool) -> u64 {
        if is_long {
            let long = self.directory.begin_long(&(0..1)).expect("a place");
            let (members, _) = self.directory.step_members(&(0..1), &mut 0);
            self.disk.store(version, Ordering::Relaxed);
            self.directory.end_long(&long);
            return members;
        }
        let members = self.directory.begin_short(&(0..1));
        self.disk.store(version, Ordering::Relaxed);
        self.directory.end_short(&(0..1));
        members
    }
}

/// Two members register while two writes of the page are made, the second after the first. A member that
/// keeps an older version than a write's was told of that write.
fn a_kept_page_is_told_of(is_long: bool) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        let world = World::new();
        let writer = thread::spawn({
            let world = Arc::clone(&world);
            move || [world.write(1, is_long), world.write(2, false)]
        });
        let other = thread::spawn({
            let world = Arc::clone(&world);
            move || world.register(1)
        });
        let kept = [world.register(0), other.join().expect("no panic")];
        let told = writer.join().expect("no panic");
        for (member, version) in (0..).zip(kept).filter_map(|(member, kept)| Some((member, kept?))) {
            for (write, members) in (1..).zip(told) {
                assert!(version >= write || members >> member & 1 == 1, "{member} has {version}: {told:?}");
            }
        }
    });
}

#[test]
fn a_member_that_keeps_a_page_is_told_of_each_later_write() {
    a_kept_page_is_told_of(false);
}

#[test]
fn a_member_that_keeps_a_page_is_told_of_each_later_long_write() {
    a_kept_page_is_told_of(true);
}

/// Two members are entered in one word while a third is removed: none of the changes is lost.
#[test]
fn members_are_entered_and_removed_at_the_same_time() {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(|| {
        let world = World::new();
        assert!(world.directory.register(&(0..1), 2));
        let others = [0, 1].map(|member| {
            let world = Arc::clone(&world);
            thread::spawn(move || world.directory.register(&(0..1), member))
        });
        assert!(world.directory.step_clear(1 << 2, &mut 0));
        assert!(others.into_iter().all(|other| other.join().expect("no panic")));
        assert_eq!(world.directory.begin_short(&(0..1)), 0b11);
    });
}
