//! Optimistic reads over a reader without verbs: a target with one version of each page.

use std::collections::VecDeque;

use nvme_spec::optimistic::{PageEntry, PageReference, page_checksum};
use nvme_spec::zerocopy::IntoBytes;
use nvme_spec::{Cqe, Sqe};
use spindle_reactor::mem::{Pages, Pool, ZoneSpec};
use spindle_reactor::slab::Slab;

use super::attached::{ANSWER_DUE, ASK_PAUSE, PAUSE, WANTED_MAX, WINDOW};
use super::*;

/// Frame `n` contains page `n`. A change of a page has the next odd generation.
struct FakeReader {
    generations: [u32; 4],
    /// READs in flight: slot, frames, buffer.
    posted: VecDeque<(usize, Vec<u32>, Buf)>,
    is_up: bool,
    /// The data of the next READ is of another version than the seal.
    is_torn: bool,
}

/// A page has the same data after so many generations.
const SAME_DATA: u32 = 16;

fn bytes_of(frame: u32, generation: u32) -> Vec<u8> {
    vec![u8::try_from(frame * 16 + generation % SAME_DATA).expect("small"); PAGE_BYTES]
}

impl PageReader for FakeReader {
    fn post(&mut self, slot: usize, frames: &[u32], buf: Buf) -> Result<(), Buf> {
        if !self.is_up {
            return Err(buf);
        }
        self.posted.push_back((slot, frames.to_vec(), buf));
        Ok(())
    }

    fn send(&mut self) {}

    fn poll(&mut self, _now: Nanos, mut each: impl FnMut(usize, Option<&[u64]>, Buf)) -> bool {
        let has_any = !self.posted.is_empty();
        for (slot, frames, mut buf) in self.posted.drain(..) {
            if !self.is_up {
                each(slot, None, buf);
                continue;
            }
            let mut seals = Vec::new();
            for (at, frame) in frames.into_iter().enumerate() {
                let generation = self.generations[frame as usize];
                // The last page is torn.
                let torn = u32::from((at + 1) * PAGE_BYTES == buf.len() && std::mem::take(&mut self.is_torn));
                buf.copy_in(at * PAGE_BYTES, &bytes_of(frame, generation + torn));
                seals.push(PageReference { frame, generation, epoch: 5 }.seal(u64::from(frame)));
            }
            each(slot, Some(&seals), buf);
        }
        has_any
    }

    fn end(&mut self) {
        self.is_up = false;
    }

    fn is_connected(&self) -> bool {
        self.is_up
    }

    fn epoch(&self) -> u8 {
        5
    }

    fn in_flight(&self) -> usize {
        self.posted.len()
    }
}

struct World {
    optimistic: Attached<FakeReader>,
    pool: Pool,
    now: Nanos,
}

impl World {
    fn new() -> World {
        World::with(&OptimisticOptions { directory_pages: 64, is_eager: false })
    }

    /// Of a namespace of 1000 blocks of 4 KiB.
    fn with(options: &OptimisticOptions) -> World {
        let reader = FakeReader { generations: [1; 4], posted: VecDeque::new(), is_up: true, is_torn: false };
        let zone = ZoneSpec { buffer_bytes: 16_384, count: 16 };
        let namespace = NamespacePages::new(1, 4096, 4_096_000, options);
        let mut optimistic = Attached::new(reader, namespace, 8).expect("memory");
        let now = Nanos::from_secs(1);
        optimistic.poll(now, |_, _| ());
        World { optimistic, pool: Pool::new(&[zone], Pages::Base).expect("memory"), now }
    }

    fn buf(&self) -> Buf {
        self.pool.take(4096).expect("free")
    }

    fn pages(first: u32, count: usize) -> PageRange {
        PageRange { first: first.into(), count }
    }

    fn sqe(page: u32) -> Sqe {
        Sqe::read(0, 1, u64::from(page) * 8, 8)
    }

    /// An ordinary read of a page in slot 0; `epoch`: that of its reference.
    fn read(&mut self, page: u32, epoch: u8) {
        self.optimistic.note(0, Some(World::pages(page, 1)));
        let generation = self.optimistic.reader.generations[page as usize];
        let mut buf = self.buf();
        buf.copy_in(0, &bytes_of(page, generation));
        let reference = PageReference { frame: page, generation, epoch };
        let cqe = Cqe::default().with_result_u64(reference.to_result());
        self.optimistic.on_read(0, &cqe, Some(&buf));
    }

    /// An optimistic read in slot 1. `None`: not possible; else whether it was accepted.
    fn try_read(&mut self, page: u32) -> Option<bool> {
        self.try_read_pages(page, 1)
    }

    fn try_read_pages(&mut self, page: u32, count: usize) -> Option<bool> {
        let buf = self.pool.take(u32::try_from(count * PAGE_BYTES).expect("few")).expect("free");
        self.optimistic.try_read(1, World::pages(page, count), World::sqe(page), buf).ok()?;
        let mut is_accepted = None;
        self.optimistic.poll(self.now, |slot, outcome| {
            assert_eq!(slot, 1);
            is_accepted = Some(match outcome {
                Outcome::Accepted(_) => true,
                Outcome::Repeat(sqe, _) => {
                    assert_eq!(sqe, World::sqe(page), "the ordinary read of the same blocks");
                    false
                }
            });
        });
        assert!(is_accepted.is_some(), "it ends");
        is_accepted
    }
}

#[test]
fn a_page_that_was_read_is_read_optimistically_until_it_changes() {
    let mut world = World::new();
    assert_eq!(world.try_read(2), None, "nothing is known of it");
    world.read(2, 5);
    assert_eq!(world.try_read(2), Some(true));
    world.optimistic.reader.generations[2] = 3;
    assert_eq!(world.try_read(2), Some(false), "another seal");
    assert_eq!(world.try_read(2), None, "it was removed");
    world.read(2, 5);
    assert_eq!(world.try_read(2), Some(true));
    world.optimistic.on_write(1, 2 * 4096 + 4095, 2);
    assert_eq!(world.try_read(2), None, "this host has written it");
    let counts = OptimisticCounts { accepted: 2, rejected: 1, learned: 2 };
    assert_eq!(world.optimistic.counts(), counts);
}

#[test]
fn torn_data_under_a_valid_seal_is_rejected() {
    let mut world = World::new();
    world.read(1, 5);
    world.optimistic.reader.is_torn = true;
    assert_eq!(world.try_read(1), Some(false));
}

#[test]
fn the_same_data_under_another_seal_is_rejected() {
    let mut world = World::new();
    world.read(1, 5);
    world.optimistic.reader.generations[1] += SAME_DATA;
    assert_eq!(world.try_read(1), Some(false));
}

#[test]
fn references_of_another_cache_and_even_generations_are_not_learned() {
    let mut world = World::new();
    world.read(1, 6);
    assert_eq!(world.try_read(1), None, "another epoch");
    world.optimistic.reader.generations[1] = 2;
    world.read(1, 5);
    assert_eq!(world.try_read(1), None, "no reference");
    assert_eq!(world.optimistic.counts().learned, 0);
}

#[test]
fn only_whole_aligned_pages_of_the_namespace_are_meant() {
    let optimistic = World::new().optimistic;
    assert_eq!(optimistic.pages(1, 8192, 4096), Some(World::pages(2, 1)));
    assert_eq!(optimistic.pages(1, 4096, 65_536), Some(World::pages(1, 16)));
    for (nsid, offset, bytes) in [(2, 8192, 4096), (1, 512, 4096), (1, 8192, 512), (1, 8192, 6144), (1, 0, 0)]
    {
        assert_eq!(optimistic.pages(nsid, offset, bytes), None);
    }
    assert_eq!(optimistic.pages(1, 0, 17 * PAGE_BYTES), None, "longer than an optimistic read");
}

#[test]
fn a_read_of_several_pages_is_accepted_only_if_each_page_is_as_expected() {
    let mut world = World::new();
    world.read(1, 5);
    assert_eq!(world.try_read_pages(1, 2), None, "a page is not known");
    world.read(2, 5);
    assert_eq!(world.try_read_pages(1, 2), Some(true));
    world.optimistic.reader.is_torn = true;
    assert_eq!(world.try_read_pages(1, 2), Some(false), "the second page is torn");
    world.read(1, 5);
    world.read(2, 5);
    world.optimistic.reader.generations[2] += 2;
    assert_eq!(world.try_read_pages(1, 2), Some(false), "the second page has changed");
    world.read(1, 5);
    world.read(2, 5);
    world.optimistic.reader.generations[2] += SAME_DATA;
    assert_eq!(world.try_read_pages(1, 2), Some(false), "the second page has another seal");
    assert_eq!(world.optimistic.in_flight(), 0);
}

#[test]
fn several_pages_are_learned_by_get_references() {
    let mut world = World::new();
    let read = |world: &mut World, pages| {
        world.optimistic.note(0, Some(pages));
        world.optimistic.on_read(0, &Cqe::default(), None);
    };
    read(&mut world, World::pages(1, 3));
    assert_eq!(world.optimistic.next_wanted(), Some(World::pages(1, 3)));
    assert_eq!(world.optimistic.next_wanted(), None);
    let entry = |frame: u32, epoch| {
        PageEntry::new(PageReference { frame, generation: 1, epoch }, page_checksum(&bytes_of(frame, 1)))
    };
    // One page is in memory, one is not, and one is in another cache.
    world.optimistic.on_entries(1, &[entry(1, 5), PageEntry::default(), entry(3, 6)]);
    let known: Vec<_> = (1..=3).map(|page| world.try_read(page)).collect();
    assert_eq!(known, [Some(true), None, None]);
    assert_eq!(world.optimistic.counts().learned, 1);
    for first in 0..20 {
        read(&mut world, World::pages(first, 2));
    }
    let wanted: Vec<_> = std::iter::from_fn(|| world.optimistic.next_wanted()).collect();
    assert_eq!(wanted.len(), WANTED_MAX);
    assert_eq!(wanted[0], World::pages(19, 2), "the one read last comes first");
    for _ in 0..2 * WINDOW {
        read(&mut world, World::pages(1, 2));
        world.optimistic.next_wanted();
    }
    read(&mut world, World::pages(1, 2));
    assert_eq!(world.optimistic.next_wanted(), None, "asking has led to nothing");
    world.now += ASK_PAUSE;
    world.optimistic.poll(world.now, |_, _| ());
    read(&mut world, World::pages(1, 2));
    assert_eq!(world.optimistic.next_wanted(), Some(World::pages(1, 2)));
}

/// 1000 blocks of 4 KiB, of which the directory has 128.
#[test]
fn a_new_connection_walks_the_directory_from_page_0_whatever_the_former_one_asked() {
    let make = || World::with(&OptimisticOptions { directory_pages: 128, is_eager: true });
    // The first block of what is asked for.
    let ask = |world: &mut World, slot| {
        let mut asked = None;
        let is_sent = world.optimistic.ask(slot, |sqe, _| {
            asked = Some(u64::from(sqe.cdw11()) << 32 | u64::from(sqe.cdw10()));
            true
        });
        assert_eq!(is_sent, asked.is_some());
        asked
    };
    let mut slots = Slab::with_capacity(4);
    let (one, two) = (slots.insert(()).expect("free"), slots.insert(()).expect("free"));
    let mut former = make();
    assert!(!former.optimistic.ask(one, |_, _| false), "the connection does not take it");
    assert_eq!(ask(&mut former, one), Some(0), "the first pages");
    assert_eq!(ask(&mut former, two), None, "one is outstanding");
    let mut world = make();
    world.optimistic.replace(&former.optimistic);
    assert_eq!(world.optimistic.own(), 1, "that of the former connection");
    let entries = [PageEntry::new(PageReference { frame: 1, generation: 1, epoch: 5 }, 0); 4];
    let mut late = world.buf();
    late.copy_in(0, entries.as_bytes());
    let end =
        |world: &mut World, slot| world.optimistic.on_completed(slot, true, &Cqe::default(), Some(&late));
    assert!(!end(&mut world, two), "not its slot");
    assert!(end(&mut world, one));
    assert_eq!(world.optimistic.counts().learned, 0, "references of the former connection");
    for first in [0, 64] {
        assert_eq!(ask(&mut world, one), Some(first), "the next pages");
        assert!(end(&mut world, one));
    }
    assert_eq!(world.optimistic.counts().learned, 8);
    assert_eq!(ask(&mut world, one), None, "the directory has no more");
}

#[test]
fn a_slot_that_another_command_has_used_teaches_nothing() {
    let mut world = World::new();
    world.optimistic.note(0, Some(World::pages(3, 1)));
    world.optimistic.note(0, None);
    let reference = PageReference { frame: 3, generation: 1, epoch: 5 };
    let cqe = Cqe::default().with_result_u64(reference.to_result());
    let buf = world.buf();
    world.optimistic.on_read(0, &cqe, Some(&buf));
    assert_eq!(world.try_read(3), None);
}

#[test]
fn with_few_accepted_reads_there_is_a_pause() {
    let mut world = World::new();
    for at in 0..WINDOW {
        world.read(0, 5);
        if at % 4 != 0 {
            world.optimistic.reader.generations[0] += 2;
        }
        assert_eq!(world.try_read(0), Some(at % 4 == 0));
    }
    world.read(0, 5);
    assert_eq!(world.try_read(0), None, "a pause");
    world.now += PAUSE;
    world.optimistic.poll(world.now, |_, _| ());
    world.read(0, 5);
    assert_eq!(world.try_read(0), Some(true));
}

/// A stopped target serves READs, but answers no command.
#[test]
fn reads_are_ordinary_while_no_command_is_answered() {
    let mut world = World::new();
    world.read(0, 5);
    assert_eq!(world.try_read(0), Some(true));
    world.now += Nanos::from_ms(400);
    assert_eq!(world.try_read(0), Some(true));
    // Posted in time, and completed when the last answer is too old.
    world.now += Nanos::from_ms(700);
    assert_eq!(world.try_read(0), Some(false));
    world.now += Nanos::from_ms(1);
    world.read(1, 5);
    assert_eq!(world.try_read(1), Some(true), "a command was answered");
    world.now += ANSWER_DUE + Nanos(1);
    world.optimistic.poll(world.now, |_, _| ());
    assert_eq!(world.try_read(1), None, "an ordinary read is due");
    world.read(1, 5);
    assert_eq!(world.try_read(1), Some(true));
}

#[test]
fn the_end_of_the_connection_repeats_what_is_in_flight() {
    let mut world = World::new();
    world.read(0, 5);
    let buf = world.buf();
    world.optimistic.try_read(4, World::pages(0, 1), World::sqe(0), buf).expect("posted");
    assert_eq!(world.optimistic.in_flight(), 1);
    world.optimistic.end();
    let mut repeated = 0;
    world.optimistic.poll(world.now, |slot, outcome| {
        assert!(slot == 4 && matches!(outcome, Outcome::Repeat(..)));
        repeated += 1;
    });
    assert_eq!(repeated, 1);
    world.read(0, 5);
    assert_eq!(world.try_read(0), None, "no connection");
}
