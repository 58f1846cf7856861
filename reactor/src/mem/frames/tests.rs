//! Stores of frames, alone and from several cores.

use super::*;

fn store(pages: u64, slack: u64) -> Arc<FrameStore> {
    // With non-temporal stores, as a large disk has: they need a fence before other cores see the page.
    store_with(pages, slack, true)
}

fn store_with(pages: u64, slack: u64, has_seals: bool) -> Arc<FrameStore> {
    FrameStore::create(pages * FRAME, slack * FRAME, Pages::Base, true, has_seals).expect("store")
}

fn write(core: &Rc<FrameCore>, offset: u64, bytes: &[u8]) {
    let mut buf = core.take(offset, u32::try_from(bytes.len()).expect("small")).expect("frames");
    buf.copy_in(0, bytes);
    core.write(offset, buf);
}

/// Publishes a frame that was taken for another page.
fn write_to(core: &Rc<FrameCore>, offset: u64, mut buf: Buf) {
    buf.clear();
    core.write(offset, buf);
}

/// Asserts, without pins and writes and with `core` as the last handle, that every page is at its place and
/// every other frame is free.
fn all_at_home(core: Rc<FrameCore>) {
    let store = Arc::clone(&core.store);
    drop(core);
    assert_eq!(store.cores.load(Ordering::Relaxed), 0, "another core is left");
    let mut used = 0_u32;
    for page in 0..store.table.len() {
        let entry = store.table.load(page, Ordering::Relaxed);
        assert_eq!(entry.pins(), 0, "page {page} is pinned");
        if entry.frame() != NONE {
            assert_eq!(entry.frame(), store.extents.place_of(page), "page {page} is not at home");
            used += 1;
            let reference = store.table.reference(entry.frame(), page as u64);
            assert_eq!(reference.is_some(), store.has_seals(), "seal of page {page}");
        }
    }
    let sealed = (0..store.frames).filter(|frame| store.seal_of(*frame) >> 40 & 1 == 1).count();
    assert_eq!(sealed, if store.has_seals() { used as usize } else { 0 }, "frames with seals");
    assert_eq!(store.usage().pages_used, u64::from(used), "pages in use");
    assert!(store.table.detached().all(|left| left == 0), "pins are left over");
    let (homes, spares) = store.extents.counts();
    assert_eq!(store.extents.spares(), spares, "spare extents");
    assert_eq!(used + store.extents.free_places(), homes * EXTENT_PAGES, "places");
    assert_eq!(store.extents.claimed(), (0, 0), "claimed homes");
    let fresh = store.frames - store.fresh.load(Ordering::Relaxed);
    assert_eq!(u64::from(fresh) + store.spill.len() as u64, u64::from(store.surplus), "small frames");
}

fn read(core: &Rc<FrameCore>, offset: u64, bytes: u32) -> Vec<u8> {
    core.read(offset, bytes).segments().flatten().copied().collect()
}

#[test]
fn what_was_written_is_read_at_any_alignment() {
    let store = store(16, 4);
    let core = store.core();
    let mut model = vec![0u8; 16 * 4096];
    let mut seed = 1u64;
    for round in 0..2000u32 {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let offset = usize::try_from((seed >> 33) % 128).expect("small") * 512;
        let bytes = (usize::try_from((seed >> 20) % 24).expect("small") + 1) * 512;
        let bytes = bytes.min(model.len() - offset);
        let fill = vec![u8::try_from(round % 251).expect("small") + 1; bytes];
        if round % 7 == 0 {
            assert!(core.zero(offset as u64, u32::try_from(bytes).expect("small"), round % 2 == 0));
            model[offset..offset + bytes].fill(0);
        } else {
            write(&core, offset as u64, &fill);
            model[offset..offset + bytes].copy_from_slice(&fill);
        }
        assert_eq!(read(&core, 0, 16 * 4096), model, "round {round}");
    }
    assert!(core.zero(0, 16 * 4096, true));
    assert_eq!(store.usage().pages_used, 0);
}

#[test]
fn a_pinned_page_keeps_its_bytes_while_it_is_overwritten() {
    let core = store(2, 8).core();
    write(&core, 0, &[1; 4096]);
    let pinned = core.read(0, 4096);
    for fill in 2..10 {
        write(&core, 0, &[fill; 4096]);
    }
    assert!(core.zero(0, 4096, true));
    assert!(pinned.equals_at(0, &[1; 4096]));
    assert_eq!(read(&core, 0, 4096), [0; 4096]);
}

#[test]
fn frames_run_out_and_come_back() {
    let store = FrameStore::new(4 * FRAME, 0, Pages::Base, true).expect("store");
    let core = store.core();
    let mut held = Vec::new();
    while let Some(buf) = core.take(0, 4096) {
        held.push(buf);
    }
    assert!(held.len() >= 4);
    held.pop();
    assert!(core.take(0, 8192).is_none());
    assert!(core.take(0, 4096).is_some());
    held.clear();
    assert!(core.take(0, 8192).is_some());
}

#[test]
fn a_zeroing_that_finds_no_frame_for_its_ragged_end_loses_none() {
    let core = store(8, 0).core();
    for page in 0..8 {
        write(&core, page * FRAME, &[3; 4096]);
    }
    let take_all = || std::iter::from_fn(|| core.take(0, 4096)).collect::<Vec<_>>();
    let held = take_all();
    assert!(!core.zero(0, 512, true), "a ragged range alone finds no frame");
    assert_eq!(read(&core, 0, 4096), [3; 4096]);
    assert!(!core.zero(0, 7 * 4096 + 512, true), "nor does one after whole pages, which are zeroed");
    assert_eq!(read(&core, 6 * FRAME, 8192), [[0; 4096], [3; 4096]].concat());
    // A page that was overwritten while it was pinned is not at its place; zeroing it frees its small frame.
    let mut held = held;
    let pinned = core.read(7 * FRAME, 4096);
    core.write(7 * FRAME, held.pop().expect("a frame"));
    assert!(take_all().is_empty());
    write_to(&core, 6 * FRAME, held.pop().expect("a frame"));
    assert!(core.zero(6 * FRAME, 4096 + 512, true), "the ragged end takes what was freed");
    drop(pinned);
    assert_eq!(take_all().len(), 2);
    let free = held.len() + 2;
    drop(held);
    assert_eq!(take_all().len(), free);
    all_at_home(core);
}

#[test]
fn a_cut_buffer_gives_back_what_was_cut() {
    for (cut_to, kept) in [(0, 0), (1, 1), (4096, 1), (4097, 2), (16383, 4), (16384, 4)] {
        let core = store(8, 0).core();
        let take_all = || std::iter::from_fn(|| core.take(0, 4096)).collect::<Vec<_>>();
        let mut buf = core.take(0, 16384).expect("frames");
        let others = take_all();
        buf.truncate(cut_to); // fresh frames lie side by side
        let cut = take_all();
        assert_eq!(cut.len(), 4 - kept, "cut to {cut_to}");
        drop(buf);
        assert_eq!(take_all().len(), kept, "cut to {cut_to}, then dropped");
        drop((others, cut));
    }
}

#[test]
fn unwritten_pages_are_one_piece_of_zeroes() {
    let core = store(600, 8).core();
    assert!(core.read(0, 512 * 4096).as_slice().is_some_and(|bytes| bytes.iter().all(|byte| *byte == 0)));
    write(&core, 4096, &[1; 4096]);
    let buf = core.read(0, 600 * 4096);
    assert_eq!(buf.segments().map(<[u8]>::len).collect::<Vec<_>>(), [4096, 4096, 512 * 4096, 86 * 4096]);
}

#[test]
#[should_panic(expected = "taken for another offset")]
fn a_buffer_of_another_offset_is_not_published() {
    let core = store(2, 8).core();
    let buf = core.take(0, 4096).expect("frame");
    core.write(512, buf);
}

#[test]
fn a_core_that_idles_on_free_frames_keeps_nobody_waiting() {
    for slack in [0, 64, 1024] {
        let store = store(256, slack);
        let (idle, busy) = (store.core(), store.core());
        // The idle core takes all frames and gives them back.
        drop(std::iter::from_fn(|| idle.take(0, 4096)).collect::<Vec<_>>());
        let total = u64::from(store.surplus);
        let taken = std::iter::from_fn(|| busy.take(0, 4096)).collect::<Vec<_>>().len() as u64;
        assert!(taken >= total - total / 4, "{taken} of {total}");
        for page in 0..256 {
            write(&busy, page * FRAME, &[1; 4096]);
        }
        // The same after the idle core has tried to take more than there was.
        let held: Vec<Buf> = std::iter::from_fn(|| busy.take(0, 4096)).collect();
        let extents: Vec<Buf> = std::iter::from_fn(|| busy.take(0, 16 * 4096)).collect();
        assert!(idle.take(0, 256 * 4096).is_none());
        drop((held, extents));
        assert!(busy.take(0, 256 * 4096).is_some());
    }
}

#[test]
fn compare_and_write_changes_only_what_is_as_expected() {
    let core = store(1, 4).core();
    write(&core, 0, &[5; 4096]);
    let expected = |fill: u8| {
        let mut buf = core.take(512, 512).expect("frame");
        buf.copy_in(0, &[fill; 512]);
        buf
    };
    let new = || expected(9);
    assert_eq!(core.compare_and_write(512, new(), &expected(4)), Err(SwapError::Differs));
    assert_eq!(read(&core, 512, 512), [5; 512]);
    assert_eq!(core.compare_and_write(512, new(), &expected(5)), Ok(()));
    assert_eq!(read(&core, 0, 1536), [[5u8; 512], [9; 512], [5; 512]].concat());
}

#[test]
fn two_cores_that_write_and_read_one_page_never_see_a_torn_one() {
    let store = store(1, 64);
    std::thread::scope(|scope| {
        for thread in 0..2u8 {
            let store = &store;
            scope.spawn(move || {
                let core = store.core();
                for round in 0..20_000u32 {
                    let fill = thread * 100 + u8::try_from(round % 100).expect("small");
                    write(&core, 0, &[fill; 4096]);
                    let seen = core.read(0, 4096);
                    let first = seen.as_slice().expect("one piece")[0];
                    assert!(seen.equals_at(0, &[first; 4096]), "torn page");
                }
            });
        }
    });
    assert_eq!(store.usage().pages_used, 1);
}

#[test]
fn two_cores_that_write_halves_of_a_page_lose_nothing() {
    let store = store(1, 64);
    std::thread::scope(|scope| {
        for thread in 0..2u64 {
            let store = &store;
            scope.spawn(move || {
                let core = store.core();
                for round in 0..20_000u32 {
                    let fill = [u8::try_from(round % 256).expect("small"); 512];
                    write(&core, thread * 512, &fill);
                    assert_eq!(read(&core, thread * 512, 512), fill);
                }
            });
        }
    });
}

#[test]
fn frames_that_go_from_page_to_page_are_never_seen_as_another_page() {
    let mut store = store(4, 0);
    // Only seven small frames, none of them never used, so that each is used again at once.
    few_small(&mut store, 7);
    std::thread::scope(|scope| {
        for thread in 0..3u8 {
            let store = &store;
            scope.spawn(move || {
                let core = store.core();
                for round in 0..20_000u32 {
                    let page = u64::from((round * 7 + u32::from(thread)) % 4);
                    let tag = u8::try_from(page + 1).expect("small");
                    if let Some(mut buf) = core.take(page * FRAME, 4096) {
                        buf.copy_in(0, &[tag; 4096]);
                        core.write(page * FRAME, buf);
                    }
                    if round % 5 == 0 {
                        assert!(core.zero((page + 1) % 4 * FRAME, 4096, round % 2 == 0));
                    }
                    let seen = core.read(page * FRAME, 4096);
                    let first = seen.as_slice().expect("one piece")[0];
                    assert!(first == 0 || first == tag, "page {page} shows {first}");
                    assert!(seen.equals_at(0, &[first; 4096]), "torn page");
                }
            });
        }
    });
    all_at_home(store.core());
    let core = store.core();
    assert!(core.zero(0, 4 * 4096, false));
    assert_eq!(std::iter::from_fn(|| core.take(0, 4096)).collect::<Vec<_>>().len(), 7, "all come back");
}

fn few_small(store: &mut Arc<FrameStore>, frames: u32) {
    let store = Arc::get_mut(store).expect("no core yet");
    store.surplus = frames;
    *store.fresh.get_mut() = store.frames;
    (store.small_first..store.small_first + frames).for_each(|frame| store.spill_one(frame));
}

/// Pins in the table by page, and the sum of the detached pins.
fn pins(store: &FrameStore) -> (Vec<u32>, i32) {
    let pages = (0..store.table.len()).map(|page| store.table.load(page, Ordering::Relaxed).pins()).collect();
    (pages, store.table.detached().map(i32::abs).sum())
}

#[test]
fn every_pin_of_a_scattered_read_is_dropped_on_its_own_page() {
    let store = store(6, 8);
    let core = store.core();
    // Page 2 is not written.
    for page in [4, 1, 3, 0, 5] {
        write(&core, page * FRAME, &[7; 4096]);
    }
    for (offset, bytes, pinned) in [
        (100, 5 * 4096, [1, 1, 0, 1, 1, 1]),
        (2 * FRAME + 5, 8192, [0, 0, 0, 1, 1, 0]),
        (0, 512, [1, 0, 0, 0, 0, 0]),
    ] {
        let buf = core.read(offset, bytes);
        assert_eq!(pins(&store), (pinned.to_vec(), 0));
        drop(buf);
        assert_eq!(pins(&store), (vec![0; 6], 0));
    }
}

#[test]
fn a_cut_read_keeps_the_pins_of_what_is_kept() {
    let store = store(4, 8);
    let core = store.core();
    write(&core, 0, &[7; 4 * 4096]);
    // The last case ends at a lower offset in its last page than it begins at in its first.
    let whole =
        [(0, 0), (1, 1), (3996, 1), (3997, 2), (8092, 2), (8093, 3), (12_000, 3)].map(|cut| (12_000, cut));
    for (bytes, (kept, pinned)) in whole.into_iter().chain([(8192, (5000, 2)), (8192, (8092, 2))]) {
        let mut buf = core.read(100, bytes);
        assert!(buf.is_contiguous());
        buf.truncate(kept);
        let expected: Vec<u32> = (0..4).map(|page| u32::from(page < pinned)).collect();
        assert_eq!(pins(&store), (expected, 0), "{kept} bytes kept");
        drop(buf);
        assert_eq!(pins(&store), (vec![0; 4], 0));
    }
}

#[test]
fn a_page_has_a_reference_until_it_changes() {
    let store = store(4, 8);
    let core = store.core();
    let refer = |page: u64| core.read(page * FRAME, 4096).page_reference();
    assert_eq!(refer(0), None, "it was never written");
    write(&core, 0, &[1; 2 * 4096]);
    let (reference, epoch) = refer(1).expect("a page with a seal");
    assert_eq!(epoch, store.epoch());
    assert_eq!(store.seal_of(reference.frame), reference.seal(1));
    assert_ne!(store.seal_of(reference.frame), reference.seal(0));
    assert_eq!(core.read(4096, 512).page_reference(), None, "a part of a page");
    assert_eq!(core.read(0, 8192).page_reference(), None, "two pages");
    assert_eq!(core.take(0, 4096).expect("a frame").page_reference(), None, "not written yet");
    let changes: [(&str, &dyn Fn()); 5] = [
        ("a write", &|| write(&core, 4096, &[2; 4096])),
        ("a write of a part", &|| write(&core, 4096 + 512, &[3; 512])),
        ("a compare-and-write", &|| {
            let mut buf = core.take(4096, 512).expect("a frame");
            buf.copy_in(0, &[4; 512]);
            let expected = core.read(4096, 512);
            assert_eq!(core.compare_and_write(4096, buf, &expected), Ok(()));
        }),
        ("a zeroed part", &|| assert!(core.zero(4096, 512, false))),
        ("a zeroed page", &|| assert!(core.zero(4096, 4096, true))),
    ];
    for (what, change) in changes {
        let (before, _) = refer(1).expect("a page with a seal");
        // Also of a page that is being sent, which the change leaves at its place.
        let sent = core.read(4096, 4096);
        change();
        assert_ne!(store.seal_of(before.frame), before.seal(1), "{what}");
        assert_eq!(sent.page_reference(), None, "{what}");
        drop(sent);
    }
    assert_eq!(refer(1), None, "a page of zeroes");
    let (before, _) = refer(0).expect("a page with a seal");
    let others = || {
        let mut buf = core.take(0, 512).expect("a frame");
        buf.clear();
        buf
    };
    assert_eq!(core.compare_and_write(0, others(), &others()), Err(SwapError::Differs));
    assert_eq!(refer(0).map(|it| it.0), Some(before), "a compare-and-write that differs changes nothing");
    store.stop_seals();
    assert!(!store.is_open());
    write(&core, 0, &[9; 4096]);
    assert_eq!((refer(0), store.seal_of(before.frame) == before.seal(0)), (None, false));
}

#[test]
fn a_closed_store_has_no_seals() {
    let store = store(4, 8);
    let core = store.core();
    let is_any_sealed = || (0..store.frames).any(|frame| store.seal_of(frame) >> 40 & 1 == 1);
    write(&core, 0, &[1; 2 * 4096]);
    assert!(is_any_sealed());
    store.close();
    assert!(!is_any_sealed() && !store.is_open());
    write(&core, 0, &[2; 4096]);
    assert!(!is_any_sealed() && core.read(0, 4096).page_reference().is_none());
}

/// Threads change pages, and read them by references as clients do, but with a pin, so that the frames are
/// not written meanwhile.
#[test]
fn a_sealed_frame_is_in_the_table() {
    let store = store(8, 64);
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let store = &store;
            scope.spawn(move || {
                let core = store.core();
                for round in 0..20_000_u64 {
                    let page = (round * 5 + thread * 3) % 8;
                    match (round + thread) % 4 {
                        0 => write(&core, page * FRAME, &[1; 4096]),
                        1 => write(&core, page * FRAME + 512, &[2; 512]),
                        2 => assert!(core.zero(page * FRAME, 4096, false)),
                        _ => drop(core.read(page / 2 * 2 * FRAME, 8192)),
                    }
                    for frame in 0..store.frames {
                        let seal = store.seal_of(frame);
                        if seal >> 40 & 1 == 0 {
                            continue;
                        }
                        let at = usize::try_from(seal & 0xff).expect("small");
                        let entry = store.table.load(at, Ordering::Acquire);
                        assert!(entry.frame() == frame || store.seal_of(frame) != seal, "page {at}");
                    }
                }
            });
        }
    });
    all_at_home(store.core());
}

mod homes;
mod weak;
