//! Tests of a member's state.

use std::sync::Mutex;

use super::*;

/// Records what a cache is told.
#[derive(Default)]
pub(crate) struct Recorder(Mutex<Vec<String>>);

impl Recorder {
    pub(crate) fn taken(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.lock().expect("no panic"))
    }

    fn note(&self, what: String) {
        self.0.lock().expect("no panic").push(what);
    }
}

impl CachedPages for Recorder {
    fn begin_foreign(&self, pages: Range<u64>) -> ForeignWrite {
        self.note(format!("begin {pages:?}"));
        ForeignWrite::Pages(pages)
    }

    fn end_foreign(&self, write: ForeignWrite) {
        let ForeignWrite::Pages(pages) = write else { panic!("not of this cache") };
        self.note(format!("end {pages:?}"));
    }

    fn drop_all(&self) {
        self.note("all".to_owned());
    }
}

/// An agent of a disk of 64 MiB with its cache, and the time.
pub(crate) fn agent() -> (Arc<Agent>, Arc<Recorder>, Arc<AtomicU64>) {
    let time = Arc::new(AtomicU64::new(1));
    let clock = Arc::clone(&time);
    let agent = Agent::new(64 << 20, Box::new(move || Nanos(clock.load(Ordering::Relaxed))));
    let recorder = Arc::new(Recorder::default());
    let cache: Arc<dyn CachedPages> = Arc::clone(&recorder) as _;
    agent.set_cache(Arc::downgrade(&cache));
    (agent, recorder, time)
}

#[test]
fn a_lease_ends_at_its_time_and_with_the_membership() {
    let (agent, recorder, time) = agent();
    assert!(!agent.has_lease());
    agent.begin();
    agent.extend_lease(Nanos(100));
    agent.extend_lease(Nanos(50));
    for (now, has) in [(99, true), (100, false), (99, true)] {
        time.store(now, Ordering::Relaxed);
        assert_eq!(agent.has_lease(), has, "{now}");
    }
    agent.end();
    assert!(!agent.has_lease() && !agent.is_member());
    assert_eq!(recorder.taken(), ["all"]);
}

#[test]
fn what_is_read_may_be_kept_where_the_extent_is_set_or_becomes_so() {
    let (agent, _, _) = agent();
    assert_eq!(agent.begin_fill(&(0..1)), Fill::Plain);
    assert!(!agent.end_fill(Fill::Plain, &(0..1), true));
    agent.begin();
    let fill = agent.begin_fill(&(15..17));
    assert_eq!(fill, Fill::Registers(1));
    assert!(!agent.end_fill(fill, &(15..17), false) && !agent.is_set(&(15..16)));
    assert!(agent.end_fill(fill, &(15..17), true) && agent.is_set(&(0..32)) && !agent.is_set(&(0..33)));
    assert_eq!(agent.begin_fill(&(31..32)), Fill::Set);
    assert!(agent.end_fill(Fill::Set, &(31..32), false));
    agent.end();
    assert!(!agent.is_set(&(0..1)));
    agent.begin();
    assert!(!agent.end_fill(fill, &(15..17), true), "the answer is of the former membership");
    assert!(!agent.is_set(&(15..16)));
}

#[test]
fn an_extent_beyond_the_table_is_never_set() {
    let (agent, _, _) = agent();
    agent.begin();
    let (last, beyond) = ((1 << 14) - 1..1 << 14, 1 << 14..(1 << 14) + 1);
    for (pages, is_set) in [(last, true), (beyond, false), (u64::MAX - 1..u64::MAX, false)] {
        let fill = agent.begin_fill(&pages);
        assert_eq!((agent.end_fill(fill, &pages, true), agent.is_set(&pages)), (is_set, is_set), "{pages:?}");
    }
}

#[test]
fn pages_that_may_not_be_kept_are_dropped_as_by_a_write_of_another() {
    let (agent, recorder, _) = agent();
    agent.drop_pages(3..5);
    assert_eq!(recorder.taken(), ["begin 3..5", "end 3..5"]);
}
