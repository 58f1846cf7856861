//! Tests of a member's side of the protocol.

use std::sync::atomic::Ordering::Relaxed;

use nvme_spec::cluster::NextEntry;

use super::*;
use crate::agent::tests::{Recorder, agent};

const JOINED: Joined = Joined::new().with_number(3).with_extent_shift(4);

fn data(sequence: u64, notices: &[Notice]) -> NextData {
    let mut data = NextData::default();
    data.sequence.set(sequence);
    data.count.set(u32::try_from(notices.len()).expect("few"));
    for (entry, notice) in data.entries.iter_mut().zip(notices) {
        *entry = NextEntry::new(*notice);
    }
    data
}

/// A session that has joined as incarnation 5 at second 1.
fn member() -> (Session, Arc<Agent>, Arc<Recorder>, Nanos) {
    let (agent, recorder, _) = agent();
    let mut session = Session::new(Arc::clone(&agent));
    let now = Nanos::from_secs(1);
    assert_eq!(session.next_command(now, || 4), None);
    session.on_up(now);
    let join = Command::Join { incarnation: 5, former: 0 };
    assert_eq!((session.next_command(now, || 4), session.next_command(now, || 4)), (Some(join), None));
    session.on_joined(Some(JOINED), now).expect("a good answer");
    (session, agent, recorder, now)
}

#[test]
fn entries_are_executed_and_acknowledged_by_the_following_next() {
    let (mut session, agent, recorder, now) = member();
    let mut command = || session.next_command(now, || 4);
    let next = |acknowledged| Some(Command::Next { acknowledged });
    assert_eq!((command(), command(), command()), (next(0), next(0), None));
    assert!(!agent.has_lease());
    let invalidate = Notice::Invalidate { number: 9, first: 2, pages: 3 };
    session.on_next(now, Some(&data(41, &[invalidate]))).expect("a good answer");
    assert!(agent.has_lease(), "the lease begins with the first answer");
    assert_eq!(recorder.taken(), ["begin 2..5"]);
    assert_eq!(session.next_command(now, || 4), next(41));
    let (done, unknown) = (Notice::Done { number: 9 }, Notice::Done { number: 8 });
    session.on_next(now, Some(&data(43, &[done, unknown]))).expect("a good answer");
    assert_eq!(recorder.taken(), ["end 2..5"]);
    assert_eq!(session.next_command(now, || 4), next(43));
}

#[test]
fn the_lease_is_counted_from_the_time_at_which_next_was_sent() {
    let (agent, _, time) = agent();
    let mut session = Session::new(Arc::clone(&agent));
    let sent = Nanos::from_secs(1);
    session.on_up(sent);
    session.next_command(sent, || 4);
    session.on_joined(Some(JOINED), sent).expect("a good answer");
    session.next_command(sent, || 4);
    session.on_next(sent, Some(&data(0, &[]))).expect("a good answer");
    for (now, has) in [(sent + LEASE - Nanos(1), true), (sent + LEASE, false)] {
        time.store(now.0, Relaxed);
        assert_eq!(agent.has_lease(), has, "{now}");
    }
}

#[test]
fn a_lost_association_drops_all_and_the_next_join_says_so() {
    let (mut session, agent, recorder, now) = member();
    session.next_command(now, || 4);
    let invalidate = Notice::Invalidate { number: 9, first: 2, pages: 3 };
    session.on_next(now, Some(&data(1, &[invalidate]))).expect("a good answer");
    recorder.taken();
    session.on_down();
    assert!(!agent.has_lease() && !agent.is_member());
    assert_eq!(recorder.taken(), ["all", "end 2..5"]);
    assert_eq!(session.next_command(now, || 4), None);
    session.on_up(now);
    assert_eq!(session.next_command(now, || 6), Some(Command::Join { incarnation: 7, former: 5 }));
}

#[test]
fn a_refused_join_is_tried_again_ever_later() {
    let (agent, _, _) = agent();
    let mut session = Session::new(agent);
    let mut now = Nanos::from_secs(1);
    session.on_up(now);
    for wait in [1, 2, 4, 8, 16, 32, 60, 60] {
        assert!(session.next_command(now, || 4).is_some());
        session.on_joined(None, now).expect("a refusal");
        let due = session.due().expect("a time");
        assert_eq!(due - now, Nanos::from_secs(wait));
        assert_eq!(session.next_command(due - Nanos(1), || 4), None);
        now = due;
    }
}

#[test]
fn wrong_answers_end_the_membership() {
    let bad_kind = {
        let mut data = data(1, &[Notice::Done { number: 1 }]);
        data.entries[0].word.set(u32::MAX);
        data
    };
    let too_many = {
        let mut data = data(300, &[]);
        data.count.set(256);
        data
    };
    let beyond = Notice::Invalidate { number: 1, first: u64::MAX, pages: 2 };
    let answers = [
        None,
        Some(bad_kind),
        Some(too_many),
        Some(data(0, &[Notice::Done { number: 1 }])),
        Some(data(1, &[beyond])),
    ];
    for answer in answers {
        let (mut session, agent, recorder, now) = member();
        session.next_command(now, || 4);
        assert!(session.on_next(now, answer.as_ref()).is_err(), "{answer:?}");
        assert!(!agent.has_lease() && !agent.is_member() && recorder.taken().contains(&"all".to_owned()));
        assert_eq!(
            (session.due(), session.next_command(now, || 4)),
            (None, None),
            "not over this association"
        );
    }
    let (mut session, _, _, now) = member();
    session.on_next(now, Some(&data(5, &[]))).expect("the first names where entries begin");
    assert!(session.on_next(now, Some(&data(7, &[Notice::Done { number: 1 }]))).is_err());
}

#[test]
fn a_target_that_ends_no_write_fills_no_memory() {
    let (mut session, agent, _cache, now) = member();
    for number in 0..4097 {
        assert!(agent.is_member(), "{number}");
        session.next_command(now, || 4);
        let invalidate = Notice::Invalidate { number, first: 2, pages: 3 };
        let answer = session.on_next(now, Some(&data(u64::from(number) + 1, &[invalidate])));
        assert_eq!(answer.is_ok(), number < 4096, "{number}");
    }
    assert!(!agent.is_member() && session.foreign.is_empty());
}

#[test]
fn a_join_to_a_cluster_of_another_shape_is_refused() {
    for joined in [JOINED.with_number(64), JOINED.with_extent_shift(5)] {
        let (agent, _, _) = agent();
        let mut session = Session::new(Arc::clone(&agent));
        session.on_up(Nanos(1));
        session.next_command(Nanos(1), || 4);
        assert!(session.on_joined(Some(joined), Nanos(1)).is_err() && !agent.is_member());
    }
}
