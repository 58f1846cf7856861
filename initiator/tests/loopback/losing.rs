//! Connections that end, and what becomes of commands.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use spindle_initiator::nvme_spec::IoOpcode;
use spindle_initiator::nvme_spec::status::Status;
use spindle_initiator::{
    Clock, Completion, Controller, Failure, Host, IoQueue, Loss, Nanos, OnLoss, Options, Session,
    SessionEvent, SessionOptions, Target, Why,
};

use super::fake::{Act, Disk, Fake, LONG, Script, filled, options, pool};

fn is_write(sqe: &spindle_initiator::nvme_spec::Sqe, qid: u16) -> bool {
    qid > 0 && !sqe.is_fabrics() && sqe.io_opcode() == IoOpcode::WRITE
}

/// Closes an I/O queue's connection at its first write, once.
fn hangup_once() -> Script {
    let mut has_hung_up = false;
    Box::new(move |sqe, qid| {
        if is_write(sqe, qid) && !has_hung_up {
            has_hung_up = true;
            return Act::Hangup;
        }
        Act::Execute
    })
}

#[test]
fn what_is_outstanding_when_a_connection_ends_is_lost_with_its_buffer() {
    let fake = Fake::with(hangup_once());
    let mut controller = Controller::connect(&fake.target(), &options()).expect("connects");
    let namespace = controller.namespace(1).expect("a namespace");
    let mut queue = controller.connect_queue(1).expect("a queue");
    let pool = pool();
    let free = pool.free_bytes();
    let tickets = [
        queue.write(&namespace, 0, filled(&pool, 512, 1), false).expect("taken"),
        queue.write(&namespace, 8, filled(&pool, 65_536, 2), false).expect("taken"),
        queue.read(&namespace, 0, filled(&pool, 4096, 3)).expect("taken"),
        queue.flush(&namespace).expect("taken"),
    ];
    for (ticket, bytes) in tickets.into_iter().zip([Some(512), Some(65_536), Some(4096), None]) {
        let completion = queue.wait(ticket, LONG).expect("a completion");
        assert_eq!(completion.result, Err(Failure::Lost));
        assert_eq!(completion.buf.map(|buf| buf.len()), bytes);
    }
    assert!(!queue.is_up() && queue.loss().is_some());
    let refused = queue.write(&namespace, 0, filled(&pool, 512, 1), false).expect_err("it is down");
    assert!(refused.why == Why::Down && refused.buf.is_some());
    drop(refused);
    assert_eq!(pool.free_bytes(), free, "every buffer is back");
    assert!(controller.is_up(), "only that connection ended");
    controller.reconnect_queue(&mut queue).expect("connects again");
    let ticket = queue.write(&namespace, 0, filled(&pool, 512, 1), false).expect("taken");
    assert_eq!(queue.wait(ticket, LONG).expect("a completion").result, Ok(()));
}

#[test]
fn a_connection_without_completions_is_given_up() {
    let fake = Fake::with(Box::new(|sqe, qid| if is_write(sqe, qid) { Act::Forget } else { Act::Execute }));
    let options = Options { command_timeout: Some(Duration::from_millis(40)), ..options() };
    let mut controller = Controller::connect(&fake.target(), &options).expect("connects");
    let namespace = controller.namespace(1).expect("a namespace");
    let mut queue = controller.connect_queue(1).expect("a queue");
    let ticket = queue.write(&namespace, 0, filled(&pool(), 512, 1), false).expect("taken");
    assert_eq!(queue.wait(ticket, LONG).expect("a completion").result, Err(Failure::Lost));
    assert_eq!(queue.loss(), Some(Loss::Silent(Duration::from_millis(40))));
}

#[test]
fn a_queue_that_we_close_says_so() {
    let fake = Fake::start();
    let mut controller = Controller::connect(&fake.target(), &options()).expect("connects");
    let namespace = controller.namespace(1).expect("a namespace");
    let mut queue = controller.connect_queue(1).expect("a queue");
    queue.close();
    assert!(queue.flush(&namespace).is_err());
    let deadline = Clock::now() + Nanos::from(LONG);
    while queue.loss().is_none() && Clock::now() < deadline {
        queue.poll(Clock::now());
    }
    assert_eq!(queue.loss(), Some(Loss::Requested));
}

/// A session of one queue over a controller that can go away and come back at one address.
fn session(fake: &Fake, on_loss: OnLoss, attempts_max: u32) -> Session {
    let options = Options { on_loss, io_queues: 2, ..options() };
    let waits = SessionOptions {
        wait_first: Duration::from_secs(1),
        wait_longest: Duration::from_secs(8),
        attempts_max,
        seed: 7,
    };
    Session::connect(&fake.target(), &options, &waits).expect("connects")
}

/// Poll until something happened to the session, moving the time on to its next attempt where it waits for
/// that.
fn next_event(session: &mut Session, now: &mut Nanos, completions: &mut Vec<Completion>) -> SessionEvent {
    let deadline = Clock::now() + Nanos::from(LONG);
    loop {
        if let Some(retry_at) = session.retry_at() {
            *now = retry_at;
        }
        let take = |_: usize, queue: &mut IoQueue| {
            completions.extend(std::iter::from_fn(|| queue.next_completion()))
        };
        if let Some(event) = session.poll(*now, take) {
            return event;
        }
        assert!(Clock::now() < deadline, "nothing happened");
    }
}

#[test]
fn a_session_reports_what_was_lost_and_comes_back() {
    let fake = Fake::with(hangup_once());
    let mut session = session(&fake, OnLoss::Report, 5);
    let namespace = session.controller().namespace(1).expect("a namespace");
    let (pool, mut now, mut completions) = (pool(), Clock::now(), Vec::new());
    session.queue_mut(0).write(&namespace, 0, filled(&pool, 512, 1), false).expect("taken");
    session.queue_mut(1).flush(&namespace).expect("taken");
    assert!(matches!(next_event(&mut session, &mut now, &mut completions), SessionEvent::Lost { .. }));
    assert!(!session.is_up() && session.outstanding() == 0);
    assert!(completions.iter().any(|completion| completion.result == Err(Failure::Lost)));
    assert_eq!(completions.len(), 2, "the other queue's command ended too, one way or the other");
    assert!(session.queue_mut(1).flush(&namespace).is_err(), "an association is one");
    let event = next_event(&mut session, &mut now, &mut completions);
    assert!(matches!(event, SessionEvent::Reconnected { attempts: 1, replayed: 0 }), "{event:?}");
    for index in 0..2 {
        let queue = session.queue_mut(index);
        let ticket = queue.write(&namespace, 0, filled(&pool, 512, 1), false).expect("taken");
        assert_eq!(queue.wait(ticket, LONG).expect("a completion").result, Ok(()));
    }
}

#[test]
fn a_session_replays_under_the_same_tickets_but_never_a_fused_pair() {
    let fake = Fake::with(hangup_once());
    let mut session = session(&fake, OnLoss::Replay, 5);
    let namespace = session.controller().namespace(1).expect("a namespace");
    let (pool, mut now, mut completions) = (pool(), Clock::now(), Vec::new());
    let queue = session.queue_mut(0);
    let write = queue.write(&namespace, 3, filled(&pool, 4096, 0x77), false).expect("taken");
    let read = queue.read(&namespace, 3, filled(&pool, 4096, 0)).expect("taken");
    let pair =
        queue.compare_and_write(&namespace, 50, filled(&pool, 512, 0), filled(&pool, 512, 5)).expect("taken");
    assert!(matches!(next_event(&mut session, &mut now, &mut completions), SessionEvent::Lost { .. }));
    let lost: Vec<_> =
        completions.drain(..).map(|completion| (completion.ticket, completion.result)).collect();
    assert_eq!(lost, pair.map(|ticket| (ticket, Err(Failure::Lost))));
    assert_eq!(session.outstanding(), 2);
    let event = next_event(&mut session, &mut now, &mut completions);
    assert!(matches!(event, SessionEvent::Reconnected { replayed: 2, .. }), "{event:?}");
    let queue = session.queue_mut(0);
    assert_eq!(queue.wait(write, LONG).expect("a completion").result, Ok(()));
    let completion = queue.wait(read, LONG).expect("a completion");
    assert!(completion.buf.expect("buffer").equals_at(0, &[0x77; 4096]), "in the order of submission");
}

#[test]
fn what_is_replayed_comes_in_the_order_in_which_it_was_submitted() {
    let fake = Fake::with(hangup_once());
    let mut session = session(&fake, OnLoss::Replay, 5);
    let namespace = session.controller().namespace(1).expect("a namespace");
    let (pool, mut now, mut completions) = (pool(), Clock::now(), Vec::new());
    let queue = session.queue_mut(0);
    // Places that were used before are taken again in another order than that of their numbers.
    let before: Vec<_> =
        (0..8).map(|lba| queue.read(&namespace, lba, filled(&pool, 512, 0)).expect("taken")).collect();
    for ticket in before {
        assert_eq!(queue.wait(ticket, LONG).expect("a completion").result, Ok(()));
    }
    let writes: Vec<_> = (1..=8)
        .map(|value| queue.write(&namespace, 3, filled(&pool, 512, value), false).expect("taken"))
        .collect();
    assert!(matches!(next_event(&mut session, &mut now, &mut completions), SessionEvent::Lost { .. }));
    let event = next_event(&mut session, &mut now, &mut completions);
    assert!(matches!(event, SessionEvent::Reconnected { replayed: 8, .. }), "{event:?}");
    let queue = session.queue_mut(0);
    for ticket in writes {
        assert_eq!(queue.wait(ticket, LONG).expect("a completion").result, Ok(()));
    }
    let read = queue.read(&namespace, 3, filled(&pool, 512, 0)).expect("taken");
    let completion = queue.wait(read, LONG).expect("a completion");
    assert!(completion.buf.expect("buffer").equals_at(0, &[8; 512]), "the last write is the last");
}

#[test]
fn a_session_without_a_target_gives_up_and_then_everything_held_is_lost() {
    let mut fake = Some(Fake::with(hangup_once()));
    let mut session = session(fake.as_ref().expect("running"), OnLoss::Replay, 3);
    let namespace = session.controller().namespace(1).expect("a namespace");
    let (pool, mut now, mut completions) = (pool(), Clock::now(), Vec::new());
    let ticket = session.queue_mut(0).write(&namespace, 0, filled(&pool, 512, 1), false).expect("taken");
    assert!(matches!(next_event(&mut session, &mut now, &mut completions), SessionEvent::Lost { .. }));
    fake.take();
    let start = now;
    for _ in 0..2 {
        let event = next_event(&mut session, &mut now, &mut completions);
        assert!(matches!(event, SessionEvent::AttemptFailed { .. }), "{event:?}");
    }
    assert!(completions.is_empty() && session.outstanding() == 1);
    assert!(matches!(next_event(&mut session, &mut now, &mut completions), SessionEvent::GaveUp { .. }));
    // Waits of 1, 2 and 4 s, each at least half.
    assert!((now - start).as_u64() >= 3_000_000_000, "{}", now - start);
    let lost: Vec<_> = completions.iter().map(|completion| (completion.ticket, completion.result)).collect();
    assert_eq!(lost, [(ticket, Err(Failure::Lost))]);
    assert_eq!(completions[0].buf.as_ref().map(|buf| buf.len()), Some(512));
    assert_eq!(session.retry_at(), None);
}

#[test]
fn a_target_that_loses_every_connection_at_once_is_asked_ever_less_often() {
    let fake = Fake::with(Box::new(|sqe, qid| if is_write(sqe, qid) { Act::Hangup } else { Act::Execute }));
    let mut session = session(&fake, OnLoss::Replay, 2);
    let namespace = session.controller().namespace(1).expect("a namespace");
    let (pool, mut now, mut completions) = (pool(), Clock::now(), Vec::new());
    session.queue_mut(0).write(&namespace, 0, filled(&pool, 512, 1), false).expect("taken");
    // The write is sent again with each connection, and ends it.
    for whole in [1, 2, 4, 8, 8] {
        assert!(matches!(next_event(&mut session, &mut now, &mut completions), SessionEvent::Lost { .. }));
        let wait = session.retry_at().expect("there is an attempt") - now;
        let whole = Nanos::from_secs(whole);
        assert!(Nanos(whole.0 / 2) <= wait && wait <= whole, "{wait} of {whole}");
        let event = next_event(&mut session, &mut now, &mut completions);
        assert!(matches!(event, SessionEvent::Reconnected { attempts: 1, replayed: 1 }), "{event:?}");
    }
}

#[test]
fn two_hosts_with_one_seed_do_not_come_back_in_step() {
    let fake = Fake::with(Box::new(|sqe, qid| if is_write(sqe, qid) { Act::Hangup } else { Act::Execute }));
    let wait = |id: u8| {
        let target = Target { host: Host::from_uuid([id; 16]), ..fake.target() };
        let waits =
            SessionOptions { wait_first: Duration::from_secs(1), seed: 1, ..SessionOptions::default() };
        let mut session = Session::connect(&target, &options(), &waits).expect("connects");
        let namespace = session.controller().namespace(1).expect("a namespace");
        session.queue_mut(0).write(&namespace, 0, filled(&pool(), 512, 1), false).expect("taken");
        let mut now = Nanos::from_secs(1 << 20);
        assert!(matches!(next_event(&mut session, &mut now, &mut Vec::new()), SessionEvent::Lost { .. }));
        session.retry_at().expect("there is an attempt") - now
    };
    assert_eq!(wait(1), wait(1), "one host, one sequence");
    assert_ne!(wait(1), wait(2));
}

#[test]
fn the_wait_begins_when_the_attempt_has_failed() {
    let mut fake = Some(Fake::with(hangup_once()));
    let running = fake.as_ref().expect("running");
    let options = Options { connect_timeout: Duration::from_millis(1500), ..options() };
    let waits = SessionOptions { wait_first: Duration::from_secs(1), ..SessionOptions::default() };
    let mut session = Session::connect(&running.target(), &options, &waits).expect("connects");
    let namespace = session.controller().namespace(1).expect("a namespace");
    let (mut now, mut completions) = (Clock::now(), Vec::new());
    session.queue_mut(0).write(&namespace, 0, filled(&pool(), 512, 1), false).expect("taken");
    assert!(matches!(next_event(&mut session, &mut now, &mut completions), SessionEvent::Lost { .. }));
    let address = running.address;
    fake.take();
    // It accepts connections and says nothing.
    let _silent = std::net::TcpListener::bind(address).expect("listens");
    let event = next_event(&mut session, &mut now, &mut completions);
    let SessionEvent::AttemptFailed { retry_in, .. } = event else { panic!("{event:?}") };
    let after = session.retry_at().expect("there is another") - now;
    assert!(after >= Nanos::from_ms(1500) + Nanos::from(retry_in), "{after}");
}

#[test]
fn a_target_that_was_restarted_has_what_it_had_and_the_session_goes_on() {
    let disk = Disk::new();
    let any: SocketAddr = "127.0.0.1:0".parse().expect("an address");
    let fake = Fake::at(any, disk.clone(), Box::new(|_, _| Act::Execute));
    let address = fake.address;
    let mut session = session(&fake, OnLoss::Replay, 10);
    let namespace = session.controller().namespace(1).expect("a namespace");
    let (pool, mut now, mut completions) = (pool(), Clock::now(), Vec::new());
    let queue = session.queue_mut(0);
    let ticket = queue.write(&namespace, 9, filled(&pool, 512, 0x42), true).expect("taken");
    assert_eq!(queue.wait(ticket, LONG).expect("a completion").result, Ok(()));
    drop(fake);
    assert!(matches!(next_event(&mut session, &mut now, &mut completions), SessionEvent::Lost { .. }));
    assert!(matches!(
        next_event(&mut session, &mut now, &mut completions),
        SessionEvent::AttemptFailed { .. }
    ));
    let _fake = Fake::at(address, disk, Box::new(|_, _| Act::Execute));
    let event = next_event(&mut session, &mut now, &mut completions);
    assert!(matches!(event, SessionEvent::Reconnected { attempts: 2, .. }), "{event:?}");
    let queue = session.queue_mut(0);
    let ticket = queue.read(&namespace, 9, filled(&pool, 512, 0)).expect("taken");
    let completion = queue.wait(ticket, LONG).expect("a completion");
    assert!(completion.buf.expect("buffer").equals_at(0, &[0x42; 512]));
}

/// A write on its way to `disk` when the connection is lost is not sent to `other`, which then has its NSID.
fn is_not_sent_to(other: Disk, disk: Disk) {
    let fake = Fake::at("127.0.0.1:0".parse().expect("an address"), disk, hangup_once());
    let address = fake.address;
    let mut session = session(&fake, OnLoss::Replay, 10);
    let namespace = session.controller().namespace(1).expect("a namespace");
    let (pool, mut now, mut completions) = (pool(), Clock::now(), Vec::new());
    session.queue_mut(0).write(&namespace, 9, filled(&pool, 512, 0x42), true).expect("taken");
    assert!(matches!(next_event(&mut session, &mut now, &mut completions), SessionEvent::Lost { .. }));
    drop(fake);
    let _fake = Fake::at(
        address,
        other,
        Box::new(|sqe, qid| match is_write(sqe, qid) {
            true => panic!("written to the other disk"),
            false => Act::Execute,
        }),
    );
    let event = next_event(&mut session, &mut now, &mut completions);
    let SessionEvent::GaveUp { error } = event else { panic!("{event:?}") };
    assert_eq!(error.to_string(), "namespace 1 is another disk than before");
    assert!(completions.iter().all(|completion| completion.result == Err(Failure::Lost)));
    assert_eq!((completions.len(), session.outstanding()), (1, 0));
}

fn disk(nguid: u8, uuid: u8) -> Disk {
    let mut disk = Disk::new();
    (disk.nguid, disk.uuid) = ([nguid; 16], [uuid; 16]);
    disk
}

#[test]
fn what_was_meant_for_one_disk_is_not_sent_to_another_that_has_its_nsid() {
    is_not_sent_to(disk(8, 0), disk(9, 0));
}

#[test]
fn without_an_nguid_a_disk_is_known_by_its_uuid() {
    is_not_sent_to(disk(0, 2), disk(0, 1));
    let fake = Fake::at("127.0.0.1:0".parse().expect("an address"), disk(0, 1), hangup_once());
    let mut session = session(&fake, OnLoss::Replay, 5);
    let namespace = session.controller().namespace(1).expect("a namespace");
    assert_eq!(namespace.identity.uuid, [1; 16]);
    let (mut now, mut completions) = (Clock::now(), Vec::new());
    session.queue_mut(0).write(&namespace, 9, filled(&pool(), 512, 0x42), true).expect("taken");
    assert!(matches!(next_event(&mut session, &mut now, &mut completions), SessionEvent::Lost { .. }));
    let event = next_event(&mut session, &mut now, &mut completions);
    assert!(matches!(event, SessionEvent::Reconnected { replayed: 1, .. }), "{event:?}");
}

#[test]
fn a_disk_that_has_no_identifier_at_all_is_not_taken_for_the_one_before() {
    is_not_sent_to(disk(0, 0), disk(0, 0));
}

#[test]
fn a_refusal_for_good_ends_the_attempts_at_once() {
    let is_refusing = Arc::new(AtomicBool::new(false));
    let (refusing, count) = (Arc::clone(&is_refusing), Arc::new(AtomicU32::new(0)));
    let counted = Arc::clone(&count);
    let fake = Fake::with(Box::new(move |sqe, qid| {
        if is_write(sqe, qid) {
            refusing.store(true, Ordering::Relaxed);
            return Act::Hangup;
        }
        if sqe.is_fabrics() && refusing.load(Ordering::Relaxed) {
            counted.fetch_add(1, Ordering::Relaxed);
            return Act::Fail(Status::CONNECT_INVALID_HOST.dnr());
        }
        Act::Execute
    }));
    let mut session = session(&fake, OnLoss::Report, 9);
    let namespace = session.controller().namespace(1).expect("a namespace");
    let (mut now, mut completions) = (Clock::now(), Vec::new());
    session.queue_mut(0).write(&namespace, 0, filled(&pool(), 512, 1), false).expect("taken");
    assert!(matches!(next_event(&mut session, &mut now, &mut completions), SessionEvent::Lost { .. }));
    assert!(matches!(next_event(&mut session, &mut now, &mut completions), SessionEvent::GaveUp { .. }));
    assert_eq!(count.load(Ordering::Relaxed), 1, "one refused Connect");
}
