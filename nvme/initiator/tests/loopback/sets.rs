//! Many queues on one thread.

use std::time::Duration;

use spindle_nvme_initiator::nvme_spec::IoOpcode;
use spindle_nvme_initiator::{Clock, Controller, Loss, Namespace, Nanos, Options, Pool, QueueSet};

use super::fake::{Act, Fake, LONG, QUEUES, Script, filled, options, pool};

fn set(script: Script, queues: u16) -> (Fake, Controller, QueueSet, Namespace) {
    let fake = Fake::with(script);
    let options = Options { depth: 8, ..options() };
    let mut controller = Controller::connect(&fake.target(), &options).expect("connects");
    let namespace = controller.namespace(1).expect("a namespace");
    let mut set = QueueSet::new(64 << 10).expect("a set");
    for qid in 1..=queues {
        let queue = controller.connect_queue(qid).expect("a queue");
        assert_eq!(set.add(queue).expect("added"), usize::from(qid - 1));
    }
    (fake, controller, set, namespace)
}

/// Keep `depth` reads in flight on each queue until each has done `rounds`; how many came back.
fn exchange(set: &mut QueueSet, namespace: &Namespace, pool: &Pool, depth: usize, rounds: usize) -> usize {
    let mut left = [rounds; QUEUES as usize];
    for index in 0..left.len() {
        for lba in 0..depth as u64 {
            set.queue_mut(index).read(namespace, lba, filled(pool, 512, 1)).expect("taken");
        }
    }
    let (mut done, deadline) = (0, Clock::now() + Nanos::from(LONG));
    while set.outstanding() > 0 {
        set.poll(Clock::now(), |index, queue| {
            while let Some(completion) = queue.next_completion() {
                assert_eq!(completion.result, Ok(()));
                done += 1;
                left[index] = left[index].saturating_sub(1);
                if left[index] >= depth {
                    let buf = completion.buf.expect("a buffer");
                    queue.read(namespace, completion.ticket.index() as u64, buf).expect("taken");
                }
            }
        });
        assert!(Clock::now() < deadline, "{done} done, {} outstanding", set.outstanding());
    }
    done
}

/// Reads are never answered.
fn forgetful() -> Script {
    Box::new(|sqe, _| {
        let is_read = !sqe.is_fabrics() && sqe.io_opcode() == IoOpcode::READ;
        if is_read { Act::Forget } else { Act::Execute }
    })
}

/// Data that the target asks for (R2T) leaves without another turn, from direct queues and from queues in
/// epoll.
#[test]
fn many_busy_queues_bring_the_data_that_is_asked_for() {
    for are_watched in [false, true] {
        let (_fake, _controller, mut set, namespace) = set(forgetful(), QUEUES);
        let (pool, now) = (pool(), Clock::now());
        let forgotten = if are_watched { usize::from(QUEUES) } else { 0 };
        for index in 0..forgotten {
            set.queue_mut(index).read(&namespace, 0, filled(&pool, 512, 1)).expect("taken");
        }
        // Busy queues whose receives find nothing are in epoll for a second.
        set.poll(now, |_, _| {});
        while set.watched() < forgotten {
            set.poll(now, |_, _| {});
        }
        for index in 0..usize::from(QUEUES) {
            set.queue_mut(index).write(&namespace, 0, filled(&pool, 16 << 10, 3), false).expect("taken");
        }
        let deadline = Clock::now() + Nanos::from(LONG);
        while set.outstanding() > forgotten {
            set.poll(now, |_, queue| {
                while let Some(completion) = queue.next_completion() {
                    assert_eq!(completion.result, Ok(()));
                }
            });
            assert!(Clock::now() < deadline, "{} outstanding, watched: {are_watched}", set.outstanding());
        }
    }
}

#[test]
fn few_and_many_busy_queues_all_move_their_data() {
    let (_fake, _controller, mut set, namespace) = set(Box::new(|_, _| Act::Execute), QUEUES);
    let pool = pool();
    for depth in [1, 2] {
        assert_eq!(exchange(&mut set, &namespace, &pool, depth, 50), 50 * usize::from(QUEUES));
    }
    // One of them alone, while the others are watched.
    let mut done = 0;
    for round in 0..200 {
        set.queue_mut(17).read(&namespace, round, filled(&pool, 512, 1)).expect("taken");
        let deadline = Clock::now() + Nanos::from(LONG);
        while set.queue_mut(17).outstanding() > 0 {
            set.poll(Clock::now(), |index, queue| {
                assert_eq!(index, 17);
                done += std::iter::from_fn(|| queue.next_completion()).count();
            });
            assert!(Clock::now() < deadline);
        }
    }
    assert_eq!(done, 200);
    assert_eq!(exchange(&mut set, &namespace, &pool, 2, 50), 50 * usize::from(QUEUES));
}

#[test]
fn a_queue_that_ends_is_told_once_and_the_others_go_on() {
    let script: Script = Box::new(|sqe, qid| {
        let is_write = qid == 5 && !sqe.is_fabrics() && sqe.io_opcode() == IoOpcode::WRITE;
        if is_write { Act::Hangup } else { Act::Execute }
    });
    let (_fake, _controller, mut set, namespace) = set(script, 16);
    let pool = pool();
    set.queue_mut(4).write(&namespace, 0, filled(&pool, 512, 1), false).expect("taken");
    let (mut told, deadline) = (Vec::new(), Clock::now() + Nanos::from(LONG));
    while told.is_empty() {
        set.poll(Clock::now(), |index, queue| {
            assert_eq!(index, 4);
            while queue.next_completion().is_some() {}
            told.extend(queue.loss());
        });
        assert!(Clock::now() < deadline);
    }
    assert!(matches!(told[..], [Loss::ByPeer | Loss::Socket(_)]), "{told:?}");
    assert!(!set.queue_mut(4).is_up() && set.queue_mut(3).is_up());
    for _ in 0..100 {
        set.poll(Clock::now(), |_, _| panic!("it was told"));
    }
    for index in (0..16).filter(|index| *index != 4) {
        set.queue_mut(index).read(&namespace, 0, filled(&pool, 512, 1)).expect("taken");
    }
    let mut done = 0;
    while done < 15 {
        set.poll(Clock::now(), |_, queue| done += std::iter::from_fn(|| queue.next_completion()).count());
        assert!(Clock::now() < deadline);
    }
}

#[test]
fn idle_queues_whose_target_goes_away_are_told() {
    let (fake, _controller, mut set, _) = set(Box::new(|_, _| Act::Execute), 8);
    drop(fake);
    let (mut told, deadline) = (0, Clock::now() + Nanos::from(LONG));
    while told < 8 {
        set.poll(Clock::now(), |_, queue| told += u32::from(queue.loss().is_some()));
        assert!(Clock::now() < deadline);
    }
}

#[test]
fn silence_is_noticed_on_watched_queues_too() {
    let fake = Fake::with(forgetful());
    let options = Options { depth: 4, command_timeout: Some(Duration::from_secs(30)), ..options() };
    let mut controller = Controller::connect(&fake.target(), &options).expect("connects");
    let namespace = controller.namespace(1).expect("a namespace");
    let (mut set, pool) = (QueueSet::new(4096).expect("a set"), pool());
    for qid in 1..=8 {
        let index = set.add(controller.connect_queue(qid).expect("a queue")).expect("added");
        set.queue_mut(index).read(&namespace, 0, filled(&pool, 512, 1)).expect("taken");
    }
    let (mut told, mut now) = (Vec::new(), Clock::now());
    for _ in 0..1000 {
        // The time is an argument: half a minute passes at once.
        now += Nanos::from_ms(100);
        set.poll(now, |_, queue| {
            while queue.next_completion().is_some() {}
            told.extend(queue.loss());
        });
    }
    assert_eq!(told, [Loss::Silent(Duration::from_secs(30)); 8]);
}

/// Reads that are never answered keep all queues busy, and no receive finds bytes.
#[test]
fn many_busy_queues_without_hits_go_to_epoll_and_come_back_after_a_second() {
    let (_fake, _controller, mut set, namespace) = set(forgetful(), 16);
    let pool = pool();
    for index in 0..16 {
        set.queue_mut(index).read(&namespace, 0, filled(&pool, 512, 1)).expect("taken");
    }
    let now = Clock::now();
    set.poll(now, |_, _| {});
    assert_eq!(set.watched(), 0, "all are busy");
    // 4096 receives are 256 rounds.
    for _ in 0..300 {
        set.poll(now, |_, _| {});
    }
    assert_eq!(set.watched(), 16, "too few hits");
    set.poll(now + Nanos::from_ms(999), |_, _| {});
    assert_eq!(set.watched(), 16);
    set.poll(now + Nanos::from_secs(1), |_, _| {});
    assert_eq!(set.watched(), 0);
}
