//! The judge on histories made by hand, and on random ones that are right.

use super::*;
use crate::sim::model::stamp;
use crate::sim::rng::Rng;

/// Four blocks, of which the upper two are copied to the lower.
fn history() -> History {
    History::new(0, 4, 2..4)
}

fn tag(sequence: u64, block: usize) -> u64 {
    stamp(sequence, 0, block)
}

fn wrote(tag: u64) -> What {
    What::Wrote { tag, is_durable: false }
}

/// Judged without a last look.
fn judged(history: &History) -> Result<Overlaps, String> {
    judge::judge(history, 1000, &[])
}

#[track_caller]
fn assert_complaint(history: &History, part: &str) {
    let complaint = judged(history).expect_err("it cannot be");
    assert!(complaint.contains(part), "{complaint}");
}

/// Each event of block 0, all done.
fn of(events: &[(What, Time, Time)]) -> History {
    let mut history = history();
    events.iter().for_each(|(what, begin, end)| history.note(0, *what, *begin, *end, Fate::Done));
    history
}

#[test]
fn what_overlaps_may_be_seen_in_either_order() {
    let [one, two] = [tag(1, 0), tag(2, 0)];
    let both = [(wrote(one), 1, 10), (wrote(two), 2, 9)];
    for last in [one, two] {
        let history = of(&[both[0], both[1], (What::Saw(0), 3, 4), (What::Saw(last), 11, 12)]);
        let overlaps = judged(&history).expect("it can be");
        assert_eq!((overlaps.writes, overlaps.reads), (1, 1));
    }
}

#[test]
fn two_reads_do_not_differ_on_which_write_was_last() {
    let [one, two] = [tag(1, 0), tag(2, 0)];
    let history =
        of(&[(wrote(one), 1, 10), (wrote(two), 2, 9), (What::Saw(one), 11, 14), (What::Saw(two), 12, 13)]);
    assert_complaint(&history, "at the same time");
}

/// A write of block 0 that was lost and sent again: it may be executed twice.
fn note_repeated(history: &mut History, tag: u64, lost: (Time, Time), again: (Time, Time), fate: Fate) {
    history.note(0, wrote(tag), lost.0, lost.1, Fate::Perhaps);
    history.note(0, wrote(tag), again.0, again.1, fate);
}

#[test]
fn what_was_lost_and_sent_again_may_come_back_once_and_not_over_what_is_newer() {
    let [one, two, three] = [tag(1, 0), tag(2, 0), tag(3, 0)];
    let mut history = of(&[
        (wrote(two), 2, 9),
        (What::Saw(one), 3, 4),
        (What::Saw(two), 5, 6),
        (What::Saw(one), 21, 22),
        (wrote(three), 23, 24),
    ]);
    note_repeated(&mut history, one, (1, 10), (11, 20), Fate::Done);
    judged(&history).expect("it can be");
    history.note(0, What::Saw(one), 25, 26, Fate::Done);
    assert_complaint(&history, "overwritten");
}

#[test]
fn of_two_that_were_sent_again_and_answered_one_stays() {
    let [one, two] = [tag(1, 0), tag(2, 0)];
    for (last, is_right) in [(two, true), (one, false)] {
        let mut history = of(&[(What::Saw(two), 21, 22), (What::Saw(last), 23, 24)]);
        note_repeated(&mut history, one, (1, 9), (11, 19), Fate::Done);
        note_repeated(&mut history, two, (2, 10), (12, 20), Fate::Done);
        if is_right {
            judged(&history).expect("it can be");
        } else {
            assert_complaint(&history, "at the same time");
        }
    }
}

#[test]
fn what_was_sent_again_and_answered_was_done_then() {
    let [one, two] = [tag(1, 0), tag(2, 0)];
    for (fate, is_right) in [(Fate::Perhaps, true), (Fate::Done, false)] {
        let mut history = of(&[(wrote(two), 2, 4), (What::Saw(two), 5, 6), (What::Saw(two), 21, 22)]);
        note_repeated(&mut history, one, (1, 10), (11, 20), fate);
        if is_right {
            judged(&history).expect("it can be");
        } else {
            assert_complaint(&history, "overwritten");
        }
    }
}

#[test]
fn a_stale_read_is_noticed() {
    let [one, two] = [tag(1, 0), tag(2, 0)];
    let writes = [(wrote(one), 1, 2), (wrote(two), 3, 4)];
    assert_complaint(&of(&[writes[0], writes[1], (What::Saw(one), 5, 6)]), "overwritten");
    assert_complaint(&of(&[writes[0], (What::Saw(0), 5, 6)]), "overwritten");
    // The newer one was seen while its write was under way: from then on the older one is gone.
    let newer = [(wrote(one), 1, 2), (wrote(two), 3, 20), (What::Saw(two), 4, 5)];
    assert_complaint(&of(&[newer[0], newer[1], newer[2], (What::Saw(one), 6, 7)]), "overwritten");
}

#[test]
fn a_lost_write_and_a_lost_zeroing_are_noticed() {
    let one = tag(1, 0);
    assert_complaint(&of(&[(wrote(one), 1, 2), (wrote(0), 3, 4), (What::Saw(one), 5, 6)]), "overwritten");
    assert_complaint(&of(&[(wrote(one), 1, 2), (What::Saw(0), 3, 4)]), "overwritten");
}

#[test]
fn what_nobody_wrote_there_is_noticed() {
    assert_complaint(&of(&[(What::Saw(tag(9, 0)), 1, 2)]), "no command wrote it");
    assert_complaint(&of(&[(wrote(tag(1, 0)), 5, 6), (What::Saw(tag(1, 0)), 1, 2)]), "written later");
    let mut history = history();
    history.note(1, wrote(tag(1, 1)), 1, 2, Fate::Done);
    history.note(0, What::Saw(tag(1, 1)), 3, 4, Fate::Done);
    assert_complaint(&history, "no command wrote it");
}

#[test]
fn a_write_of_unknown_fate_counts_once_it_was_seen() {
    let [one, two] = [tag(1, 0), tag(2, 0)];
    let mut history = history();
    history.note(0, wrote(one), 1, 2, Fate::Done);
    history.note(0, wrote(two), 3, NEVER, Fate::Open(0));
    history.note(0, What::Saw(one), 10, 11, Fate::Done);
    judged(&history).expect("it has not landed yet");
    history.note(0, What::Saw(two), 12, 13, Fate::Done);
    judged(&history).expect("now it has");
    history.note(0, What::Saw(one), 14, 15, Fate::Done);
    assert_complaint(&history, "overwritten");
}

#[test]
fn a_write_of_a_gone_connection_does_not_land_over_what_came_after_the_reconnect() {
    // A write without an answer, and one that ended with an error: both land all the same.
    for fate in [Fate::Open(0), Fate::Perhaps] {
        let [old, new] = [tag(1, 0), tag(2, 0)];
        let mut history = history();
        history.note(0, wrote(old), 1, 10, fate);
        history.note(0, wrote(new), 20, 21, Fate::Done);
        history.note(0, What::Saw(new), 22, 23, Fate::Done);
        history.note(0, What::Saw(old), 30, 31, Fate::Done);
        let complaint = judge::judge(&history, 1000, &[10]).expect_err("it landed late");
        assert!(complaint.contains("overwritten"), "{complaint}");
        if fate == Fate::Open(0) {
            judge::judge(&history, 1000, &[NEVER]).expect("no host has reconnected");
        }
    }
}

#[test]
fn a_value_is_swapped_once() {
    let [one, two, three] = [tag(1, 0), tag(2, 0), tag(3, 0)];
    let swap = |expected, tag| What::Swapped { expected, tag };
    judged(&of(&[(wrote(one), 1, 2), (swap(one, two), 3, 8), (swap(two, three), 4, 9)])).expect("it can be");
    let twice = of(&[(wrote(one), 1, 2), (swap(one, two), 3, 8), (swap(one, three), 4, 9)]);
    assert_complaint(&twice, "swapped for two values");
    // Something else came between.
    let between = [(wrote(one), 1, 2), (swap(one, three), 3, 20), (What::Saw(one), 4, 5)];
    let other = [(wrote(two), 6, 7), (What::Saw(two), 8, 9), (What::Saw(three), 10, 11)];
    assert_complaint(&of(&[between, other].concat()), "at the same time");
    assert_complaint(
        &of(&[(wrote(one), 1, 2), (What::SawOther(one), 3, 4), (What::Saw(one), 5, 6)]),
        "there",
    );
    assert_complaint(&of(&[(What::SawOther(0), 3, 4), (wrote(one), 5, 6)]), "there");
    judged(&of(&[(What::SawOther(0), 3, 6), (wrote(one), 5, 7)])).expect("it can be");
}

#[test]
fn a_copy_brings_what_its_source_held_at_the_time() {
    let [old, new] = [tag(1, 2), tag(2, 2)];
    let copied = What::Copied { from: 2, is_durable: false };
    let base = |seen| {
        let mut history = history();
        history.note(2, wrote(old), 1, 2, Fate::Done);
        history.note(2, wrote(new), 10, 20, Fate::Done);
        history.note(0, copied, 12, 14, Fate::Done);
        history.note(0, What::Saw(seen), 30, 31, Fate::Done);
        history
    };
    judged(&base(old)).expect("it can be");
    judged(&base(new)).expect("it can be");
    assert_complaint(&base(0), "overwritten");
    assert_complaint(&base(tag(3, 2)), "no command wrote it");
}

#[test]
fn what_was_flushed_or_written_with_fua_survives_a_power_cut() {
    let [one, two] = [tag(1, 0), tag(2, 0)];
    let left = |tag| vec![Some(tag), Some(0), Some(0), Some(0)];
    let written = || of(&[(wrote(one), 1, 2), (wrote(two), 5, 6)]);
    for survivor in [0, one, two] {
        written().power_cut(100, &left(survivor), &[]).expect("nothing was flushed");
    }
    let mut flushed = written();
    flushed.note_flush(3);
    flushed.power_cut(100, &left(one), &[]).expect("the second was not flushed");
    let mut lost = written();
    lost.note_flush(3);
    lost.power_cut(100, &left(0), &[]).expect_err("the first was flushed");
    let durable = What::Wrote { tag: two, is_durable: true };
    let mut fua = of(&[(wrote(one), 1, 2), (durable, 5, 6)]);
    let complaint = fua.power_cut(100, &left(one), &[]).expect_err("FUA was lost");
    assert!(complaint.contains("FUA"), "{complaint}");
    // What it left is what comes first afterwards.
    let mut after = written();
    after.power_cut(100, &left(one), &[]).expect("it can be");
    after.note(0, What::Saw(two), 101, 102, Fate::Done);
    assert_complaint(&after, "no command wrote it");
}

/// A register, asked by many at once: each does its part at one instant between its begin and its end.
fn honest(rng: &mut Rng) -> Vec<(Event, Time)> {
    let mut events: Vec<(Event, Time)> = Vec::new();
    for sequence in 1..rng.between(3, 40) {
        let begin = rng.between(1, 400) * 8 + sequence % 8;
        let end = begin + rng.between(2, 500);
        let at = rng.between(begin, end);
        let what = match rng.below(5) {
            0 | 1 => wrote(tag(sequence, 0)),
            2 if rng.permille(300) => wrote(0),
            2 => What::Swapped { expected: 0, tag: tag(sequence, 0) },
            _ => What::Saw(0),
        };
        events.push((Event { what, begin, end, fate: Fate::Done }, at));
    }
    events.sort_by_key(|(_, at)| *at);
    let mut held = 0;
    for (event, _) in &mut events {
        match &mut event.what {
            What::Wrote { tag, .. } => held = *tag,
            What::Saw(tag) => *tag = held,
            What::Swapped { expected, tag } => {
                *expected = held;
                held = *tag;
            }
            What::Copied { .. } | What::SawOther(_) => {}
        }
    }
    events
}

#[test]
fn what_a_register_does_is_never_complained_of() {
    let mut rng = Rng::new(1);
    for _ in 0..20_000 {
        let events: Vec<_> =
            honest(&mut rng).into_iter().map(|(event, _)| (event.what, event.begin, event.end)).collect();
        judged(&of(&events)).unwrap_or_else(|complaint| panic!("{complaint}"));
    }
}

/// All orders in which the events can have happened, tried one after the other.
fn has_order(events: &[Event], held: u64, done: &mut Vec<bool>) -> bool {
    let first_end = events.iter().zip(&*done).filter(|(_, done)| !**done).map(|(event, _)| event.end).min();
    let Some(first_end) = first_end else { return true };
    for (at, event) in events.iter().enumerate() {
        if done[at] || event.begin > first_end {
            continue;
        }
        let after = match event.what {
            What::Wrote { tag, .. } => tag,
            What::Saw(tag) if tag == held => held,
            What::Swapped { expected, tag } if expected == held => tag,
            What::Saw(_) | What::Swapped { .. } | What::SawOther(_) | What::Copied { .. } => continue,
        };
        done[at] = true;
        let is_explained = has_order(events, after, done);
        done[at] = false;
        if is_explained {
            return true;
        }
    }
    false
}

#[test]
fn what_no_order_explains_is_complained_of() {
    // Without zeroes and swaps of what may be written twice the rules are exact: they say what trying all
    // orders says.
    let mut rng = Rng::new(2);
    let mut verdicts = [0, 0];
    for _ in 0..20_000 {
        let count = rng.between(2, 7);
        let values: Vec<u64> = (1..=count).map(|sequence| tag(sequence, 0)).collect();
        let mut events: Vec<Event> = Vec::new();
        for (at, value) in values.iter().enumerate() {
            let begin = rng.between(1, 30) * 16 + at as u64;
            let end = begin + rng.between(1, 10) * 16 + 8;
            let what = match rng.below(3) {
                0 => wrote(*value),
                1 if at > 0 => What::Swapped { expected: values[rng.size(0, at - 1)], tag: *value },
                _ => What::Saw(values[rng.size(0, at)]),
            };
            events.push(Event { what, begin, end, fate: Fate::Done });
        }
        // The initial value is one that is written once, too.
        events.push(Event { what: wrote(tag(99, 0)), begin: 1, end: 2, fate: Fate::Done });
        let is_explained = has_order(&events, 0, &mut vec![false; events.len()]);
        let triples: Vec<_> = events.iter().map(|event| (event.what, event.begin, event.end)).collect();
        assert_eq!(judged(&of(&triples)).is_ok(), is_explained, "{events:#?}");
        verdicts[usize::from(is_explained)] += 1;
    }
    assert!(verdicts.iter().all(|count| *count > 500), "{verdicts:?}");
}

#[test]
fn what_an_order_explains_is_not_complained_of_with_values_that_were_sent_again() {
    let mut rng = Rng::new(3);
    let mut verdicts = [0, 0];
    for _ in 0..20_000 {
        let mut history = history();
        let (one, two, three) = (tag(1, 0), tag(2, 0), tag(3, 0));
        for (at, value) in [one, two].into_iter().enumerate() {
            let begin = rng.between(1, 10) * 16 + at as u64;
            let [lost, end] = [rng.between(1, 8) * 16, rng.between(9, 16) * 16].map(|span| begin + span);
            note_repeated(&mut history, value, (begin, lost + 4), (lost + 8, end + 12), Fate::Done);
        }
        for at in 2..rng.between(4, 7) {
            let begin = rng.between(1, 30) * 16 + at;
            let end = begin + rng.between(1, 6) * 16;
            let what = if at == 2 { wrote(three) } else { What::Saw(rng.pick(&[0, one, two, three])) };
            history.note(0, what, begin, end, Fate::Done);
        }
        // Each of those that are perhaps done is, or is not.
        let is_explained = (0..4).any(|mask: usize| {
            let mut perhaps = 0;
            let mut events = history.blocks[0].clone();
            events.retain(|event| {
                perhaps += usize::from(event.fate == Fate::Perhaps);
                event.fate == Fate::Done || mask >> (perhaps - 1) & 1 == 1
            });
            has_order(&events, 0, &mut vec![false; events.len()])
        });
        let verdict = judged(&history);
        assert!(!is_explained || verdict.is_ok(), "{verdict:?} {:#?}", history.blocks[0]);
        verdicts[usize::from(verdict.is_ok())] += 1;
    }
    assert!(verdicts.iter().all(|count| *count > 500), "{verdicts:?}");
}
