//! Frames of a cache without an index: states, pins, buffers.

use super::*;

fn frames(count: u32) -> (Arc<CacheFrames>, Shard) {
    let (frames, mut shards) = CacheFrames::new(1, count, Pages::Base, true).expect("memory");
    (frames, shards.remove(0))
}

/// Fills a frame with `byte` for `page`. Returns the frame.
fn fill(core: &Rc<CacheCore>, shard: &mut Shard, page: u64, byte: u8) -> u32 {
    let filling = core.frames().words().allocate(shard, page).expect("a free frame");
    let frame = filling.frame();
    let mut buf = core.filling(std::iter::once(filling));
    buf.copy_in(0, &[byte; FRAME]);
    core.take_back(buf, |filling| drop(filling.publish().unwrap_or_else(|_| panic!("published"))))
        .expect("of this cache");
    frame
}

#[test]
fn a_frame_is_free_again_after_its_last_pin() {
    let (frames, mut shard) = frames(2);
    let (core, words) = (frames.core(1), frames.words());
    let frame = fill(&core, &mut shard, 7, 0xaa);
    let Lookup::Present(pin) = words.lookup(frame, 7) else { panic!("present") };
    assert!(matches!(words.lookup(frame, 8), Lookup::Other), "another page");
    let buf = core.page_buf(pin, 512, 1024);
    assert_eq!(words.pin(frame).expect("a frame").invalidate(), Invalidated::Detached);
    assert!(matches!(words.lookup(frame, 7), Lookup::Other), "not found any more");
    assert!(buf.equals_at(0, &[0xaa; 1024]), "who has it reads it");
    assert_eq!(words.census(), [1, 0, 0, 1]);
    drop(buf);
    assert_eq!(words.census(), [2, 0, 0, 0]);
}

#[test]
fn buffers_of_several_pages_give_back_each_frame_once() {
    let (frames, mut shard) = frames(8);
    let (core, words) = (frames.core(1), frames.words());
    let mut at = (0..4_u8).map(|page| fill(&core, &mut shard, u64::from(page), page)).collect::<Vec<_>>();
    at.swap(1, 2); // two in a row, two apart
    let pins = |at: &[u32]| -> Vec<KeptPin> {
        at.iter().map(|frame| words.pin(*frame).expect("a frame").keep()).collect()
    };
    let buf = core.pages_buf(pins(&at).into_iter().map(|kept| words.resume(kept)), 4000, 96 + 4096 * 2 + 1);
    for (offset, byte) in [(0, 0), (96, 2), (96 + 4096, 1), (96 + 8192, 3)] {
        assert!(buf.equals_at(offset, &[byte]), "{offset}");
    }
    assert!(at.iter().all(|frame| words.is_pinned(*frame)));
    drop(buf);
    assert!(!at.iter().any(|frame| words.is_pinned(*frame)));
    // Truncation of a buffer in one segment.
    at.swap(1, 2);
    for kept in [0, 1, 4096, 4097, 3 * 4096] {
        let mut buf = core.pages_buf(pins(&at).into_iter().map(|kept| words.resume(kept)), 0, 4 * 4096);
        buf.truncate(kept);
        let pinned = at.iter().filter(|frame| words.is_pinned(**frame)).count();
        assert_eq!(pinned, kept.div_ceil(4096));
        drop(buf);
        assert!(!at.iter().any(|frame| words.is_pinned(*frame)), "{kept}");
    }
}

#[test]
fn a_doomed_fill_is_not_published_and_its_bytes_last_as_long_as_its_pin() {
    let (frames, mut shard) = frames(1);
    let (core, words) = (frames.core(1), frames.words());
    let filling = words.allocate(&mut shard, 3).expect("free");
    let frame = filling.frame();
    assert!(words.allocate(&mut shard, 4).is_none(), "there is one frame");
    let Lookup::Filling(pin) = words.lookup(frame, 3) else { panic!("being filled") };
    assert_eq!(pin.invalidate(), Invalidated::Doomed);
    drop(pin);
    let mut buf = core.filling(std::iter::once(filling));
    buf.copy_in(0, &[9; FRAME]);
    let mut data = None;
    core.take_back(buf, |filling| {
        let Err(filling) = filling.publish() else { panic!("a doomed fill is published") };
        data = Some(core.page_buf(filling.detach(), 0, 4096));
    })
    .expect("of this cache");
    assert!(data.as_ref().is_some_and(|data| data.equals_at(0, &[9; FRAME])));
    assert_eq!(words.census(), [0, 0, 0, 1]);
    drop(data);
    assert_eq!(words.census(), [1, 0, 0, 0]);
    assert!(words.allocate(&mut shard, 4).is_some_and(|again| again.frame() == frame));
}

#[test]
fn a_buffer_that_is_cut_gives_back_the_frames_behind() {
    for kept in [0, 1, 4096, 4097, 8192] {
        let (frames, mut shard) = frames(2);
        let (core, words) = (frames.core(1), frames.words());
        let mut both = [1, 2].map(|page| words.allocate(&mut shard, page).expect("free"));
        both.sort_by_key(|filling| filling.frame());
        for (frame, page) in both.iter().map(|filling| (filling.frame(), words.page(filling.frame()))) {
            let Lookup::Filling(pin) = words.lookup(frame, page) else { panic!("being filled") };
            assert_eq!(pin.invalidate(), Invalidated::Doomed);
        }
        let mut buf = core.filling(both.into_iter());
        buf.truncate(kept);
        assert_eq!(words.census()[0] as usize, 2 - kept.div_ceil(4096), "truncated to {kept}");
        drop(buf);
        assert_eq!(words.census(), [2, 0, 0, 0], "truncated to {kept}");
    }
    let (frames, mut shard) = frames(1);
    let (core, words) = (frames.core(1), frames.words());
    let frame = fill(&core, &mut shard, 1, 1);
    let Lookup::Present(pin) = words.lookup(frame, 1) else { panic!("present") };
    let mut buf = core.page_buf(pin, 0, 4096);
    buf.set_len(0);
    assert!(buf.is_empty() && !words.is_pinned(frame));
}

#[test]
fn a_stray_pin_keeps_a_free_frame_from_being_allocated() {
    let (frames, mut shard) = frames(1);
    let words = frames.words();
    let stray = words.pin(0).expect("a frame");
    assert!(words.allocate(&mut shard, 1).is_none());
    drop(stray);
    assert!(words.allocate(&mut shard, 1).is_some());
}

#[test]
fn only_a_present_frame_without_other_pins_is_evicted() {
    let (frames, mut shard) = frames(2);
    let (core, words) = (frames.core(1), frames.words());
    let frame = fill(&core, &mut shard, 1, 1);
    let mine = words.pin(frame).expect("a frame");
    let other = words.pin(frame).expect("a frame");
    assert_eq!(mine.evict(), None);
    drop(other);
    assert_eq!((mine.evict(), mine.evict()), (Some(false), None));
    drop(mine);
    assert_eq!(words.census(), [2, 0, 0, 0]);
    let filling = words.allocate(&mut shard, 1).expect("free");
    assert_eq!(words.pin(filling.frame()).expect("a frame").evict(), None, "not what is being filled");
}

#[test]
fn heat_is_counted_up_to_its_most_and_changes_nothing_else() {
    let (frames, mut shard) = frames(1);
    let (core, words) = (frames.core(1), frames.words());
    assert_eq!(words.heat(0), None);
    let frame = fill(&core, &mut shard, 1, 1);
    for hits in 1..6_u8 {
        let Lookup::Present(pin) = words.lookup(frame, 1) else { panic!("present") };
        pin.count_hit();
        assert_eq!(words.heat(frame), Some(hits.min(HEAT_MAX)));
    }
    words.set_heat(frame, 1);
    assert_eq!(words.heat(frame), Some(1));
    assert!(!words.is_pinned(frame) && matches!(words.lookup(frame, 1), Lookup::Present(_)));
}

#[test]
#[should_panic(expected = "a pin of another cache")]
fn a_pin_of_another_cache_is_refused() {
    let ((a, mut shard), (b, _other)) = (frames(1), frames(1));
    let frame = fill(&a.core(1), &mut shard, 1, 1);
    drop(b.core(1).page_buf(a.words().pin(frame).expect("a frame"), 0, 512));
}

#[test]
fn a_buffer_of_the_pool_is_not_taken_back() {
    let (frames, _shard) = frames(1);
    let buf =
        frames.core(1).take_back(Buf::heap(4096), |_| panic!("no frame of ours")).expect_err("not ours");
    assert_eq!(buf.len(), 4096);
}

#[test]
fn withheld_frames_are_free_once_they_are_resident_and_each_once() {
    // Not a multiple of the frames of a step.
    let (shards, each) = (3, 2 * STEP_FRAMES + 100);
    let (frames, mut rights, mut memory) =
        CacheFrames::withheld(shards, each, Pages::Base, false).expect("memory");
    let words = frames.words();
    assert_eq!((words.withheld(), frames.region.resident_bytes()), (shards * each, 0));
    assert!(rights.iter_mut().all(|right| words.allocate(right, 1).is_none()));
    for right in &mut rights {
        assert!(memory.step());
        let filling = words.allocate(right, 1).expect("the steps take turns between the shards");
        filling.lose();
    }
    assert_eq!(words.withheld(), shards * (each - STEP_FRAMES));
    assert_eq!(frames.region.resident_bytes(), (shards * STEP_FRAMES) as usize * FRAME);
    while memory.step() {}
    assert_eq!((words.withheld(), frames.region.resident_bytes() / FRAME), (0, (shards * each) as usize));
    let mut seen = std::collections::BTreeSet::new();
    for right in &mut rights {
        while let Some(filling) = words.allocate(right, 2) {
            assert!(seen.insert(filling.frame()), "frame {} is free twice", filling.frame());
            filling.lose();
        }
    }
    assert_eq!(seen.len(), (shards * (each - 1)) as usize, "a frame of each shard was allocated before");
    drop(frames);
    assert!(!memory.step(), "the cache is gone");
}
