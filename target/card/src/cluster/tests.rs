//! Tests of the members of a disk and of its writes.

use super::*;
use crate::members::{NEXT_WAIT, UNACKNOWLEDGED_MAX};

const BYTES: u64 = 1 << 30;

fn host(name: &str) -> Nqn {
    Nqn::new(&format!("nqn.2026-01.io.spindle:{name}")).expect("an NQN")
}

/// The cluster of a disk, at the time at which writes may begin.
fn cluster() -> (Arc<Cluster>, Nanos) {
    let now = Nanos::from_secs(100);
    (Cluster::new(BYTES, vec![host("a"), host("b")], now), now)
}

fn join(cluster: &Arc<Cluster>, name: &str, incarnation: u64, now: Nanos) -> Membership {
    cluster.join(host(name), (incarnation, 0), now, (Arc::new(|_| ()), 0)).expect("it may join")
}

/// The answer to a Next that is sent now.
fn next(member: &Membership) -> (u64, Vec<Notice>) {
    let mut data = NextData::default();
    member.take(&mut data);
    let entries = data.entries().expect("as many as it says");
    (data.sequence.get(), entries.iter().map(|entry| entry.notice().expect("a kind")).collect())
}

impl Membership {
    fn has_entries(&self) -> bool {
        self.member().has_entries()
    }
}

fn begin(cluster: &Cluster, pages: Range<u64>, sender: Option<u8>) -> ClusterWrite {
    cluster.begin_write(pages, sender, Vec::new())
}

#[test]
fn a_write_waits_until_each_other_member_has_dropped_its_pages() {
    let (cluster, now) = cluster();
    let (a, b) = (join(&cluster, "a", 1, now), join(&cluster, "b", 2, now));
    for member in [&a, &b] {
        assert!(cluster.register(&(0..16), member.number(), now));
    }
    let mut write = begin(&cluster, 3..5, Some(b.number()));
    assert!(!cluster.step_write(&mut write, now) && !b.has_entries(), "its sender is not told");
    let (sequence, notices) = next(&a);
    let [Notice::Invalidate { number, first: 3, pages: 2 }] = notices[..] else { panic!("{notices:?}") };
    assert!(!cluster.step_write(&mut write, now), "sent is not acknowledged");
    assert!(!a.acknowledge(sequence + 1), "that was not sent");
    assert!(!cluster.step_write(&mut write, now));
    assert!(a.acknowledge(sequence) && cluster.step_write(&mut write, now));
    assert!(!cluster.register(&(0..1), a.number(), now), "the disk has not ended the write");
    assert!(!a.has_entries());
    assert!(cluster.end_write(write, now).is_empty());
    assert_eq!(next(&a), (sequence + 1, vec![Notice::Done { number }]));
    assert!(cluster.register(&(0..1), a.number(), now));
}

#[test]
fn a_write_of_what_nobody_has_goes_on_at_once_but_for_the_first_two_seconds() {
    let (cluster, now) = cluster();
    let mut write = begin(&cluster, 0..1, None);
    assert!(!cluster.step_write(&mut write, now - Nanos(1)), "a former process may have had members");
    assert!(cluster.step_write(&mut write, now));
    cluster.end_write(write, now);
}

#[test]
fn a_write_waits_for_no_member_without_a_lease() {
    let (cluster, now) = cluster();
    let (a, b) = (join(&cluster, "a", 1, now), join(&cluster, "b", 2, now));
    for member in [&a, &b] {
        assert!(cluster.register(&(0..16), member.number(), now));
    }
    let mut write = begin(&cluster, 0..1, None);
    assert!(!cluster.step_write(&mut write, now));
    let later = now + Nanos::from_ms(500);
    assert!(b.renew(later));
    let (sequence, _) = next(&b);
    assert!(!cluster.step_write(&mut write, now + LEASE));
    assert!(a.is_over(now + LEASE) && !a.renew(now + LEASE), "nothing renews a lease that has ended");
    assert!(!b.is_over(later + LEASE - Nanos(1)));
    assert!(b.acknowledge(sequence) && cluster.step_write(&mut write, now + LEASE));
    cluster.end_write(write, now + LEASE);
    assert!(!cluster.register(&(0..16), a.number(), now), "it is no member any more");
    assert_eq!(cluster.members(now + LEASE).collect::<Vec<_>>(), [b.number()]);
}

#[test]
fn a_member_that_leaves_or_comes_again_is_over_at_once() {
    for leaves in [true, false] {
        let (cluster, now) = cluster();
        let a = join(&cluster, "a", 7, now);
        assert!(cluster.register(&(0..16), a.number(), now));
        let mut write = begin(&cluster, 0..1, None);
        assert!(!cluster.step_write(&mut write, now));
        let stranger = cluster.join(host("b"), (8, 7), now, (Arc::new(|_| ()), 0)).expect("it may join");
        assert!(!cluster.step_write(&mut write, now), "another host does not speak for it");
        let again = match leaves {
            true => {
                a.leave();
                None
            }
            false => Some(cluster.join(host("a"), (9, 7), now, (Arc::new(|_| ()), 0)).expect("it may join")),
        };
        assert!(cluster.step_write(&mut write, now));
        cluster.end_write(write, now);
        assert!(again.is_none_or(|again| again.number() != a.number() && !again.has_entries()));
        drop(stranger);
    }
}

#[test]
fn numbers_are_used_again_when_nothing_of_the_former_member_is_left() {
    let (cluster, now) = cluster();
    let members: Vec<_> = (1..=64).map(|incarnation| join(&cluster, "a", incarnation, now)).collect();
    assert_eq!(cluster.join(host("b"), (99, 0), now, (Arc::new(|_| ()), 0)).err(), Some(JoinError::Full));
    assert_eq!(
        cluster.join(host("c"), (99, 0), now, (Arc::new(|_| ()), 0)).err(),
        Some(JoinError::NotAllowed)
    );
    assert!(cluster.register(&(0..1 << 18), 63, now));
    drop(members);
    cluster.step(now);
    assert!(cluster.join(host("b"), (99, 0), now, (Arc::new(|_| ()), 0)).is_err(), "they have leases");
    let later = now + LEASE + CLEAR_PERIOD;
    for _ in 0..100 {
        cluster.step(later);
    }
    let others: Vec<_> = (1..=64).map(|incarnation| join(&cluster, "b", incarnation, later)).collect();
    assert_eq!(others.len(), 64);
    let mut write = begin(&cluster, 0..1, None);
    assert!(cluster.step_write(&mut write, later), "its number was another's");
    cluster.end_write(write, later);
}

#[test]
fn a_write_that_waits_for_a_former_member_does_not_wait_for_the_next_of_its_number() {
    let (cluster, now) = cluster();
    let a = join(&cluster, "a", 1, now);
    assert!(cluster.register(&(0..1), a.number(), now));
    let mut write = begin(&cluster, 0..1, None);
    assert!(!cluster.step_write(&mut write, now));
    a.leave();
    let number = a.number();
    drop(a);
    for _ in 0..10 {
        cluster.step(now + CLEAR_PERIOD);
    }
    let b = join(&cluster, "b", 2, now + CLEAR_PERIOD);
    assert_eq!(b.number(), number);
    assert!(cluster.step_write(&mut write, now));
    cluster.end_write(write, now);
    assert!(!b.has_entries(), "it was not told of that write");
}

#[test]
fn a_full_queue_has_room_for_the_end_of_each_write_and_further_writes_wait() {
    let (cluster, now) = cluster();
    let a = join(&cluster, "a", 1, now);
    assert!(cluster.register(&(0..1), a.number(), now));
    let mut writes: Vec<_> = (0..2049).map(|_| begin(&cluster, 0..1, None)).collect();
    for write in &mut writes {
        assert!(!cluster.step_write(write, now));
    }
    let told = |write: &ClusterWrite| write.told.len();
    assert_eq!(writes.iter().map(told).sum::<usize>(), 2048);
    let mut last = writes.pop().expect("the last");
    assert_eq!(told(&last), 0);
    for write in writes.drain(..) {
        cluster.end_write(write, now);
    }
    let mut count = 0;
    while a.has_entries() {
        let (sequence, notices) = next(&a);
        count += notices.len();
        assert!(notices.len() <= 255 && a.acknowledge(sequence));
        assert!(!cluster.step_write(&mut last, now) || last.answered == 1);
    }
    assert_eq!((count, last.answered), (2 * 2048 + 1, 1));
    cluster.end_write(last, now);
}

#[test]
fn a_long_write_finds_the_members_of_all_its_extents() {
    let (cluster, now) = cluster();
    let (a, b) = (join(&cluster, "a", 1, now), join(&cluster, "b", 2, now));
    assert!(cluster.register(&(0..1), a.number(), now));
    assert!(cluster.register(&((1 << 18) - 1..1 << 18), b.number(), now));
    let mut write = begin(&cluster, 0..1 << 18, Some(a.number()));
    let mut steps = 0;
    while !b.has_entries() {
        assert!(!cluster.step_write(&mut write, now));
        steps += 1;
    }
    assert!(steps > 1 && !a.has_entries());
    let (sequence, notices) = next(&b);
    assert!(matches!(notices[..], [Notice::Invalidate { first: 0, pages: 0x4_0000, .. }]));
    assert!(b.acknowledge(sequence) && cluster.step_write(&mut write, now));
    assert!(!cluster.register(&(100..101), a.number(), now));
    cluster.end_write(write, now);
    assert!(cluster.register(&(100..101), a.number(), now));
}

#[test]
fn what_is_ended_before_it_began_leaves_nothing_behind() {
    let (cluster, now) = cluster();
    let a = join(&cluster, "a", 1, now);
    assert!(cluster.register(&(0..1 << 18), a.number(), now));
    for pages in [0..1, 0..1 << 18] {
        cluster.end_write(begin(&cluster, pages.clone(), None), now);
        let mut write = begin(&cluster, pages.clone(), None);
        assert!(!cluster.step_write(&mut write, now));
        cluster.end_write(write, now);
        assert!(cluster.register(&(0..1 << 18), a.number(), now), "{pages:?}");
    }
}

#[test]
fn a_member_that_does_not_acknowledge_is_found() {
    let (cluster, now) = cluster();
    let a = join(&cluster, "a", 1, now);
    assert!(cluster.register(&(0..1), a.number(), now));
    let mut write = begin(&cluster, 0..1, None);
    assert!(!a.is_silent(now + LEASE) && !cluster.step_write(&mut write, now));
    let late = now + UNACKNOWLEDGED_MAX + Nanos(1);
    assert!(!a.is_silent(now + UNACKNOWLEDGED_MAX) && a.is_silent(late), "no Next took the entry");
    let (sequence, _) = next(&a);
    assert!(a.is_silent(late));
    assert!(a.acknowledge(sequence) && !a.is_silent(late));
    cluster.end_write(write, now);
    assert!(NEXT_WAIT < UNACKNOWLEDGED_MAX);
}
