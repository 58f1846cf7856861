//! Pollers that record their calls, driven turn by turn and by the loop.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use super::*;
use crate::mailbox::mesh;
use crate::net::Waker;

/// Shared state of a test's pollers: the calls of each, by the poller's number.
#[derive(Default)]
struct Told {
    turns: u64,
    ready: Vec<(usize, u32)>,
    messages: Vec<(usize, u32)>,
    flushes: Vec<usize>,
    sleeps: usize,
    long: Vec<(Vec<&'static str>, Nanos)>,
    /// The loop ends after this number of messages.
    until: usize,
}

impl CoreShared for Told {
    fn begin_turn(&mut self, _now: Nanos, _wall_ms: u64) {
        self.turns += 1;
    }

    fn is_done(&self) -> bool {
        self.until > 0 && self.messages.len() >= self.until
    }

    fn on_long_turn(&mut self, turns: &Turns, turn: LongTurn) {
        self.long.push((turns.names(turn.parts).collect(), turn.took));
    }
}

/// A poller that takes the messages for its number; its fields determine what it returns.
#[derive(Default)]
struct Fake {
    number: usize,
    /// Lowered in `on_ready`, as a read empties a socket.
    waker: Option<Waker>,
    is_active: bool,
    is_busy: bool,
    has_come: bool,
    /// Time that the handling of a message takes.
    takes: Duration,
    sends: Vec<(usize, u32)>,
    has_room: Arc<AtomicUsize>,
}

impl Poller<Told, u32> for Fake {
    fn name(&self) -> &'static str {
        "fake"
    }

    fn poll(&mut self, _told: &mut Told, turn: &mut Turn<'_, u32>) -> bool {
        let has_any = !self.sends.is_empty();
        for (to, message) in self.sends.drain(..) {
            turn.send(to, message);
        }
        self.has_room.store(usize::from(turn.has_room()), Ordering::Relaxed);
        has_any
    }

    fn on_ready(&mut self, told: &mut Told, _turn: &mut Turn<'_, u32>, key: u32) {
        if let Some(waker) = &self.waker {
            waker.drain();
        }
        told.ready.push((self.number, key));
    }

    fn on_message(&mut self, told: &mut Told, _turn: &mut Turn<'_, u32>, message: u32) -> Option<u32> {
        if message as usize % 10 != self.number {
            return Some(message);
        }
        told.messages.push((self.number, message));
        // Parks instead of spinning: another thread may take the CPU from one that spins.
        std::thread::park_timeout(self.takes);
        None
    }

    fn flush(&mut self, told: &mut Told, _turn: &mut Turn<'_, u32>) {
        if told.flushes.len() < 8 {
            told.flushes.push(self.number);
        }
    }

    fn is_active(&self) -> bool {
        self.is_active
    }

    fn is_quiet(&self, _told: &Told) -> bool {
        !self.is_busy
    }

    fn prepare_sleep(&mut self, told: &mut Told) -> bool {
        told.sleeps += 1;
        !self.has_come
    }
}

type Pollers = Vec<Box<dyn Poller<Told, u32>>>;

fn alone(idle: Idle) -> Reactor<u32> {
    Reactor::new(mesh(1, 8).expect("mailboxes").pop().expect("one"), idle).expect("epoll")
}

fn numbered(numbers: std::ops::Range<usize>) -> Pollers {
    let fake = |number| Box::new(Fake { number, ..Fake::default() }) as Box<dyn Poller<Told, u32>>;
    numbers.map(fake).collect()
}

#[test]
fn a_message_goes_to_the_first_poller_that_takes_it_and_one_of_none_goes_to_none() {
    let mut mailboxes = mesh(1, 8).expect("mailboxes");
    let remote = mailboxes[0].remote();
    let mut reactor = Reactor::new(mailboxes.remove(0), Idle::Spin).expect("epoll");
    let (mut told, mut pollers) = (Told::default(), numbered(0..3));
    [2, 11, 9, 0, 22].into_iter().for_each(|message| remote.send(0, message).expect("room"));
    assert!(reactor.turn(&mut told, &mut pollers));
    assert_eq!(told.messages, [(2, 2), (1, 11), (0, 0), (2, 22)]);
    assert_eq!(told.flushes, [0, 1, 2], "once each, in their order");
    // The mailbox's waker is lowered in the next turn, and is not reported again.
    reactor.turn(&mut told, &mut pollers);
    assert!(!reactor.turn(&mut told, &mut pollers));
}

#[test]
fn a_descriptor_is_told_to_who_watches_it_by_the_key_that_he_gave_it() {
    let mut reactor = alone(Idle::Spin);
    let (mut told, mut pollers) = (Told::default(), Pollers::new());
    let mut wakers = Vec::new();
    for number in 0..3 {
        let waker = Waker::new().expect("a waker");
        let key = if number == 1 { u32::MAX } else { 7 };
        let watcher = reactor.watcher(u32::try_from(number).expect("small"));
        watcher.add(&waker, key, Interest::READ).expect("watched");
        pollers.push(Box::new(Fake { number, waker: Some(waker.clone()), ..Fake::default() }));
        wakers.push((waker, watcher));
    }
    assert!(!reactor.turn(&mut told, &mut pollers));
    wakers[1].0.wake();
    wakers[2].0.wake();
    assert!(reactor.turn(&mut told, &mut pollers));
    told.ready.sort_unstable();
    assert_eq!(told.ready, [(1, u32::MAX), (2, 7)]);
    // A removed descriptor is not reported any more.
    wakers[2].1.remove(&wakers[2].0).expect("was watched");
    wakers[2].0.wake();
    assert!(!reactor.turn(&mut told, &mut pollers));
}

#[test]
fn descriptors_are_polled_but_not_in_every_turn_while_a_poller_is_active() {
    let mut reactor = alone(Idle::Spin);
    let waker = Waker::new().expect("a waker");
    reactor.watcher(1).add(&waker, 5, Interest::READ).expect("watched");
    let active = Fake { is_active: true, ..Fake::default() };
    let mut pollers: Pollers = vec![Box::new(active), Box::new(Fake { number: 1, ..Fake::default() })];
    waker.wake();
    let mut told = Told::default();
    while told.ready.len() < 100 {
        reactor.turn(&mut told, &mut pollers);
    }
    // Level-triggered: each poll of the descriptors reports it.
    assert!(told.turns > 200, "{} looks in {} turns", told.ready.len(), told.turns);
}

#[test]
fn messages_without_room_are_kept_and_sent_in_their_order() {
    let mut mailboxes = mesh(2, 2).expect("mailboxes");
    let mut other = mailboxes.pop().expect("two");
    let mut reactor = Reactor::new(mailboxes.remove(0), Idle::Spin).expect("epoll");
    let has_room = Arc::new(AtomicUsize::new(9));
    let sends = (0..7).map(|message| (1, message)).collect();
    let fake = Fake { sends, has_room: Arc::clone(&has_room), ..Fake::default() };
    let (mut told, mut pollers): (_, Pollers) = (Told::default(), vec![Box::new(fake)]);
    let mut came = Vec::new();
    let mut rooms = Vec::new();
    while came.len() < 7 {
        reactor.turn(&mut told, &mut pollers);
        rooms.push(has_room.load(Ordering::Relaxed));
        came.extend(std::iter::from_fn(|| other.receive()).map(|(_, message)| message));
    }
    assert_eq!(came, [0, 1, 2, 3, 4, 5, 6]);
    assert_eq!(rooms, [0, 0, 0, 1], "two in each turn, and who asks is told");
}

#[test]
fn a_core_that_sleeps_wakes_by_a_message_and_by_a_descriptor() {
    let mut mailboxes = mesh(1, 8).expect("mailboxes");
    let remote = mailboxes[0].remote();
    let mut reactor = Reactor::new(mailboxes.remove(0), Idle::SleepAfter(Nanos::ZERO)).expect("epoll");
    let waker = Waker::new().expect("a waker");
    reactor.watcher(0).add(&waker, 3, Interest::READ).expect("watched");
    let fake = Fake { waker: Some(waker.clone()), ..Fake::default() };
    let (mut told, mut pollers): (_, Pollers) = (Told { until: 3, ..Told::default() }, vec![Box::new(fake)]);
    let sender = std::thread::spawn(move || {
        for message in [10, 20, 30] {
            waker.wake();
            remote.send(0, message).expect("room");
            std::thread::park_timeout(Duration::from_millis(5));
        }
    });
    reactor.run(&mut told, &mut pollers, &AtomicBool::new(false));
    sender.join().expect("no panic");
    assert_eq!(told.messages, [(0, 10), (0, 20), (0, 30)]);
    assert!(told.ready.contains(&(0, 3)));
}

#[test]
fn a_core_does_not_sleep_while_a_poller_is_busy_or_finds_work_in_the_last_check() {
    // Only a core that sleeps polls descriptors between two turns.
    let run = |fake: Fake| {
        let mut reactor = alone(Idle::SleepAfter(Nanos::ZERO));
        let waker = Waker::new().expect("a waker");
        reactor.watcher(0).add(&waker, 3, Interest::READ).expect("watched");
        let (mut told, mut pollers): (_, Pollers) = (Told::default(), vec![Box::new(fake)]);
        assert!(!reactor.turn(&mut told, &mut pollers));
        waker.wake();
        reactor.idle(&mut told, &mut pollers);
        (told.sleeps, told.ready.len(), reactor.mailbox.is_asleep())
    };
    assert_eq!(run(Fake::default()), (1, 1, false));
    assert_eq!(run(Fake { is_busy: true, ..Fake::default() }), (0, 0, false));
    assert_eq!(run(Fake { has_come: true, ..Fake::default() }), (1, 0, false));
}

#[test]
fn a_turn_allocates_nothing() {
    let mut reactor = alone(Idle::Spin);
    let waker = Waker::new().expect("a waker");
    reactor.watcher(0).add(&waker, 1, Interest::READ).expect("watched");
    let mut told = Told { ready: Vec::with_capacity(256), ..Told::default() };
    let mut pollers = numbered(0..2);
    waker.wake();
    (0..10).for_each(|_| assert!(reactor.turn(&mut told, &mut pollers)));
    let before = crate::alloc_count::allocations_here();
    for _ in 0..100 {
        reactor.turn(&mut told, &mut pollers);
    }
    assert_eq!(crate::alloc_count::allocations_here(), before);
    assert_eq!(told.ready.len(), 110);
}

#[test]
fn a_turn_that_takes_long_is_told_with_what_was_done_in_it() {
    let mut mailboxes = mesh(1, 8).expect("mailboxes");
    let remote = mailboxes[0].remote();
    let mut reactor = Reactor::new(mailboxes.remove(0), Idle::Spin).expect("epoll");
    let turns = Arc::clone(reactor.turns());
    let takes = Duration::from_millis(3);
    let slow = Fake { number: 1, takes, ..Fake::default() };
    let quick = Fake { sends: vec![(0, 11), (0, 21)], ..Fake::default() };
    let mut pollers: Pollers = vec![Box::new(quick), Box::new(slow)];
    let mut told = Told { until: 3, ..Told::default() };
    remote.send(0, 1).expect("room");
    reactor.run(&mut told, &mut pollers, &AtomicBool::new(false));
    // The first message is the test's; the others were sent by the first poller.
    let (parts, took) = told.long.first().expect("it was long");
    assert_eq!(*parts, ["mail", "fake"]);
    assert!(*took >= takes.into(), "{took}");
    assert_eq!(turns.long(), told.long.len() as u64);
    assert!(turns.busy() >= *took);
    assert_eq!(turns.names(turns.longest()[0].0).collect::<Vec<_>>(), *parts);
}
