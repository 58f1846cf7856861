//! Where pages lie: few segments after any history, and every page at its place without pins and writes.

use super::*;

const EXTENT: u32 = EXTENT_PAGES * FRAME_BYTES;
/// Number of pages of the disk in tests that count segments: 4 MiB.
const PAGES: u64 = 1024;

struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

/// The value of every word of a page: number of the page, and version.
fn stamp(page: u64, version: u64) -> u64 {
    page << 40 | version
}

/// Writes pages, each filled with its stamp. False when no frames are free.
fn write_stamped(core: &Rc<FrameCore>, page: u64, pages: u32, version: u64) -> bool {
    let Some(mut buf) = core.take(page * FRAME, pages * FRAME_BYTES) else { return false };
    let mut at = page;
    for segment in buf.segments_mut() {
        for frame in segment.chunks_exact_mut(FRAME_BYTES as usize) {
            let word = stamp(at, version).to_le_bytes();
            frame.chunks_exact_mut(8).for_each(|to| to.copy_from_slice(&word));
            at += 1;
        }
    }
    core.write(page * FRAME, buf);
    true
}

/// Asserts that each page in the buffer has its own stamp in every word. Returns the versions.
fn versions(buf: &Buf, page: u64) -> Vec<u64> {
    let mut found = Vec::new();
    let frames = buf.segments().flat_map(|segment| segment.chunks_exact(FRAME_BYTES as usize));
    for (page, frame) in (page..).zip(frames) {
        let first = u64::from_le_bytes(frame[..8].try_into().expect("a word"));
        assert!(frame.chunks_exact(8).all(|word| word == first.to_le_bytes()), "page {page} is torn");
        assert!(first == 0 || first >> 40 == page, "page {page} shows page {}", first >> 40);
        found.push(first & ((1 << 40) - 1));
    }
    found
}

/// Largest number of segments of all aligned reads of `bytes`.
fn pieces(core: &Rc<FrameCore>, bytes: u32) -> usize {
    let reads = (0..PAGES * FRAME / u64::from(bytes)).map(|at| core.read(at * u64::from(bytes), bytes));
    reads.map(|buf| buf.segments().count()).max().expect("some")
}

fn random_pages(core: &Rc<FrameCore>, random: &mut Random) {
    for version in 2..4 * PAGES {
        assert!(write_stamped(core, random.below(PAGES), 1, version));
    }
}

/// Asserts the number of segments of reads of 128 KiB and 1 MiB, and the contents of all pages.
fn assert_pieces(core: &Rc<FrameCore>, of_128_kib: usize, of_1_mib: usize, history: &str) {
    let pieces = (pieces(core, 128 << 10), pieces(core, 1 << 20));
    assert!(pieces.0 <= of_128_kib && pieces.1 <= of_1_mib, "{history}: {pieces:?}");
    for page in 0..PAGES {
        versions(&core.read(page * FRAME, FRAME_BYTES), page);
    }
}

#[test]
fn large_reads_are_few_pieces_whatever_was_written_before() {
    let store = store(PAGES, PAGES);
    let core = store.core();
    let mut random = Random(7);
    let sequential = |bytes: u32, version| {
        for at in 0..PAGES * FRAME / u64::from(bytes) {
            let pages = bytes / FRAME_BYTES;
            assert!(write_stamped(&core, at * u64::from(pages), pages, version));
        }
    };
    sequential(128 << 10, 1);
    assert_pieces(&core, 1, 1, "front to back once");
    random_pages(&core, &mut random);
    assert_pieces(&core, 1, 1, "random pages after that");
    assert!(core.zero(0, 2 << 20, true));
    random_pages(&core, &mut random);
    sequential(4096, 5);
    assert_pieces(&core, 1, 1, "trimmed, random pages, and front to back by pages");
    sequential(128 << 10, 6);
    random_pages(&core, &mut random);
    // At worst, no extent is adjacent to its neighbours.
    assert_pieces(&core, 2, 16, "front to back again by 128 KiB, and random pages");
    for version in 0..8 * PAGES {
        let pages = [1, 2, 8, 15, 16, 32, 40, 64, 256][usize::try_from(random.below(9)).expect("small")];
        let page = random.below(PAGES - u64::from(pages) + 1);
        match random.below(5) {
            0 => assert!(core.zero(page * FRAME, pages * FRAME_BYTES, version % 2 == 0)),
            _ => assert!(write_stamped(&core, page, pages, version)),
        }
    }
    sequential(4096, 9); // so that none is a page of zeroes, which lies elsewhere
    assert_pieces(&core, 2, 16, "mixed");
    drop(store);
    all_at_home(core);
}

#[test]
fn large_writes_are_received_into_few_pieces() {
    let core = store(PAGES, PAGES).core();
    for round in 0..20 {
        for at in 0..PAGES / 32 {
            let mut buf = core.take(at * 32 * FRAME, 128 << 10).expect("frames");
            assert!(buf.segments().count() <= 2, "round {round}");
            buf.clear();
            core.write(at * 32 * FRAME, buf);
        }
    }
    all_at_home(core);
}

#[test]
fn a_page_that_is_overwritten_while_it_is_sent_comes_home_afterwards() {
    let core = store(32, 64).core();
    assert!(write_stamped(&core, 0, 32, 1));
    let sent = core.read(0, 2 * EXTENT);
    for page in 0..32 {
        assert!(write_stamped(&core, page, 1, 2 + page));
    }
    assert!(core.read(0, 2 * EXTENT).segments().count() > 1, "the places are in use");
    assert_eq!(versions(&sent, 0), vec![1; 32]);
    let sent_too = core.read(0, EXTENT);
    drop(sent);
    let now = core.read(0, 2 * EXTENT);
    assert_eq!(now.segments().count(), 1);
    assert_eq!(versions(&now, 0), (2..34).collect::<Vec<_>>());
    assert_eq!(versions(&sent_too, 0), (2..18).collect::<Vec<_>>());
    drop((now, sent_too));
    all_at_home(core);
}

#[test]
fn without_a_spare_extent_large_writes_go_through_small_frames() {
    let store = store(64, 32);
    assert_eq!(store.extents.spares(), 1);
    let core = store.core();
    assert!(write_stamped(&core, 0, 64, 1));
    let sent = core.read(0, 4 * EXTENT);
    assert!(write_stamped(&core, 0, 64, 2));
    assert_eq!(store.extents.spares(), 0);
    assert_eq!(versions(&core.read(0, 4 * EXTENT), 0), vec![2; 64]);
    drop(sent);
    assert_eq!(versions(&core.read(0, 4 * EXTENT), 0), vec![2; 64]);
    drop(store);
    all_at_home(core);
}

#[test]
fn what_was_taken_and_not_written_goes_back_and_lets_pages_come_home() {
    let core = store(64, 256).core();
    // The homes of the first two extents, which are free as a whole, and spare extents.
    let (empty, spare) = (core.take(0, 2 * EXTENT), core.take(0, 2 * EXTENT));
    assert!(write_stamped(&core, 3, 7, 5));
    assert!(write_stamped(&core, 20, 1, 6));
    drop(empty);
    assert_eq!(versions(&core.read(3 * FRAME, 7 * FRAME_BYTES), 3), vec![5; 7]);
    drop(spare);
    // A truncated buffer has no whole extent any more.
    let mut cut = core.take(0, 2 * EXTENT).expect("frames");
    let first = cut.segments().next().expect("a piece").len();
    cut.clear();
    assert!(cut.is_contiguous());
    cut.truncate(first - 5 * FRAME_BYTES as usize);
    core.write(0, cut);
    assert_eq!(versions(&core.read(20 * FRAME, FRAME_BYTES), 20), vec![0]);
    all_at_home(core);
}

#[test]
fn without_small_frames_small_writes_and_ragged_ends_have_spare_extents() {
    let mut store = store(128, 160);
    few_small(&mut store, 4);
    let core = store.core();
    let spares = u64::from(store.extents.spares());
    assert!(spares >= 4);
    assert_eq!(core.free_bytes(), (4 + 16 * spares) * FRAME);
    // A claimed home counts as used twice: other writes to its pages need spare frames until it is published.
    let taken = core.take(0, 2 * EXTENT).expect("frames");
    assert_eq!(core.free_bytes(), (4 + 16 * (spares - 2)) * FRAME);
    for page in 0..32 {
        assert!(write_stamped(&core, page, 1, 9), "page {page}");
    }
    assert!(u64::from(store.extents.spares()) < spares);
    // Seven pages before whole extents and nine behind them.
    assert!(write_stamped(&core, 57, 7 + 32 + 9, 10));
    assert_eq!(versions(&core.read(57 * FRAME, 48 * FRAME_BYTES), 57), vec![10; 48]);
    drop(taken);
    assert_eq!(versions(&core.read(0, 2 * EXTENT), 0), vec![9; 32]);
    // The core keeps the rest of the extent for its next small write.
    let torn = core.partial_extent.get();
    let partly = if torn.0 == torn.1 { 0 } else { 16 };
    assert!(core.free_bytes() >= (4 + 16 * spares - partly) * FRAME);
    // Too few frames: those collected are given back.
    let mut held = Vec::new();
    while let Some(buf) = core.take(0, 15 * FRAME_BYTES) {
        held.push(buf);
    }
    drop(held);
    assert!(core.take(0, 15 * FRAME_BYTES).is_some());
    drop(store);
    all_at_home(core);
}

#[test]
fn threads_that_take_one_home_and_give_it_back_leave_it_unclaimed() {
    let store = store(16, 64);
    let free = store.core().free_bytes();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            let store = &store;
            scope.spawn(move || {
                let core = store.core();
                (0..50_000).for_each(|_| drop(core.take(0, EXTENT)));
            });
        }
    });
    assert_eq!(store.core().free_bytes(), free);
    all_at_home(store.core());
}

/// Threads write single pages and many, zero, hold pins, and compare-and-write, all on the same pages.
fn stress(seed: u64, small: Option<u32>, rounds: u32) {
    const ALL: u64 = 70; // the last extent is not whole
    let mut store = store_with(ALL, 160, seed.is_multiple_of(2));
    if let Some(small) = small {
        few_small(&mut store, small);
    }
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let store = &store;
            scope.spawn(move || {
                let core = store.core();
                let mut random = Random(seed << 8 | thread);
                let mut held: Vec<(u64, Buf, Vec<u64>)> = Vec::new();
                for round in 0..rounds {
                    let version = u64::from(round) << 2 | thread;
                    let pages = [1, 1, 1, 3, 16, 32, 48][usize::try_from(random.below(7)).expect("small")];
                    let page = random.below(ALL - u64::from(pages) + 1);
                    // Half of the large writes are whole extents.
                    let page = if pages >= 16 && round % 2 == 0 { page / 16 * 16 } else { page };
                    match random.below(8) {
                        0 => {
                            let _ = core.zero(page * FRAME, pages * FRAME_BYTES, round % 2 == 0);
                        }
                        1 => drop(core.take(page * FRAME, pages * FRAME_BYTES)),
                        2..=4 => drop(write_stamped(&core, page, pages, version)),
                        _ => {
                            let buf = core.read(page * FRAME, pages * FRAME_BYTES);
                            let seen = versions(&buf, page);
                            held.push((page, buf, seen));
                        }
                    }
                    if held.len() > 6 {
                        let at = usize::try_from(random.below(held.len() as u64)).expect("small");
                        let (page, buf, seen) = held.swap_remove(at);
                        assert_eq!(versions(&buf, page), seen, "pinned pages changed");
                    }
                }
            });
        }
    });
    all_at_home(store.core());
}

#[test]
fn threads_that_write_one_page_and_many_tear_none_and_leave_every_page_at_home() {
    for seed in 0..4 {
        stress(seed, None, 6_000);
    }
}

#[test]
fn so_they_do_with_few_frames() {
    for seed in 4..8 {
        stress(seed, Some(40), 6_000);
    }
}

/// Each thread is the only writer of every third page, and must read what it wrote last. The other threads
/// pin these pages, so that they leave their places and come back.
#[test]
fn no_write_is_lost_when_pages_go_home() {
    no_write_is_lost(false);
    no_write_is_lost(true);
}

fn no_write_is_lost(has_seals: bool) {
    const ALL: u64 = 48; // as many as in `last`
    let store = store_with(ALL, 64, has_seals);
    std::thread::scope(|scope| {
        for thread in 0..3_u64 {
            let store = &store;
            scope.spawn(move || {
                let core = store.core();
                let mut random = Random(thread);
                let mut held = std::collections::VecDeque::new();
                let mut last = [0; 48];
                for version in 1..20_000 {
                    let page = random.below(ALL / 3) * 3 + thread;
                    let at = usize::try_from(page).expect("small");
                    assert_eq!(versions(&core.read(page * FRAME, FRAME_BYTES), page), [last[at]]);
                    if write_stamped(&core, page, 1, version) {
                        last[at] = version;
                    }
                    let other = random.below(ALL);
                    held.push_back(core.read(other * FRAME, FRAME_BYTES));
                    if held.len() > 4 {
                        held.pop_front();
                    }
                }
                drop(held);
                for page in (thread..ALL).step_by(3) {
                    let at = usize::try_from(page).expect("small");
                    assert_eq!(versions(&core.read(page * FRAME, FRAME_BYTES), page), [last[at]]);
                }
            });
        }
    });
    all_at_home(store.core());
}
