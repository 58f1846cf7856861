//! Mailboxes between cores: a bounded queue from every core to every core, and one for threads that are no
//! core.
//!
//! What it is: messages are values that move; a full queue gives the message back to its sender. A core that
//! polls sees mail with one relaxed load; a core that sleeps is woken by the sender, and only then does
//! sending cost a system call.
//!
//! ```text
//!   sender: push -> has_mail := true -> fence -> is_asleep? -> (exchange it for false) -> Waker::wake
//!   sleeper: is_asleep := true -> fence -> queues empty? -> wait for its Waker -> awake
//! ```
//!
//! Either the sender sees the sleeper asleep, or the sleeper sees the message before it waits: the two fences
//! are in one order.
//!
//! What it does not do: it keeps no order between messages of different senders; those of one sender stay in
//! order.
//!
//! Limits: memory for `cores * (cores + 1) * capacity` messages is taken at start.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};

use crossbeam_queue::ArrayQueue;

use crate::net::Waker;

/// What all mailboxes of a mesh share. Each inbox on cache lines of its own: a poll reads its flag at every
/// turn.
#[repr(align(128))]
struct Inbox<M> {
    /// Raised after a push, lowered by the owner before it looks for the last time.
    has_mail: AtomicBool,
    is_asleep: AtomicBool,
    waker: Waker,
    /// One for each sending core, and one for all others.
    queues: Box<[ArrayQueue<M>]>,
}

impl<M> Inbox<M> {
    fn push(&self, from: usize, message: M) -> Result<(), M> {
        self.queues[from].push(message)?;
        self.has_mail.store(true, Ordering::Release);
        fence(Ordering::SeqCst);
        if self.is_asleep.load(Ordering::Relaxed) && self.is_asleep.swap(false, Ordering::AcqRel) {
            self.waker.wake();
        }
        Ok(())
    }

    /// The next message, beginning with the sender at `cursor`, which moves on.
    fn look(&self, cursor: &mut usize) -> Option<(usize, M)> {
        for _ in 0..self.queues.len() {
            let from = *cursor;
            *cursor = (from + 1) % self.queues.len();
            if let Some(message) = self.queues[from].pop() {
                return Some((from, message));
            }
        }
        None
    }
}

/// One core's end of the mesh.
pub struct Mailbox<M> {
    inboxes: Arc<[Inbox<M>]>,
    core: usize,
    /// The queue to look into first, so that no sender starves another.
    cursor: usize,
}

/// A sender for threads that are no core: signals, management.
pub struct Remote<M> {
    inboxes: Arc<[Inbox<M>]>,
}

impl<M> Clone for Remote<M> {
    fn clone(&self) -> Remote<M> {
        Remote { inboxes: Arc::clone(&self.inboxes) }
    }
}

/// A mailbox for each of `cores` cores, with room for `capacity` messages from each sender to each receiver.
///
/// # Errors
/// The system's, when a core's [`Waker`] cannot be made.
///
/// # Panics
/// When `capacity` is 0.
pub fn mesh<M: Send>(cores: usize, capacity: usize) -> io::Result<Vec<Mailbox<M>>> {
    let inbox = |_| {
        Ok(Inbox {
            has_mail: AtomicBool::new(false),
            is_asleep: AtomicBool::new(false),
            waker: Waker::new()?,
            queues: (0..=cores).map(|_| ArrayQueue::new(capacity)).collect(),
        })
    };
    let inboxes = (0..cores).map(inbox).collect::<io::Result<Arc<[_]>>>()?;
    Ok((0..cores).map(|core| Mailbox { inboxes: Arc::clone(&inboxes), core, cursor: 0 }).collect())
}

impl<M: Send> Mailbox<M> {
    /// Which core this is.
    #[must_use]
    pub fn core(&self) -> usize {
        self.core
    }

    /// How many cores there are.
    #[must_use]
    pub fn cores(&self) -> usize {
        self.inboxes.len()
    }

    /// A sender for threads that are no core. Its messages come as from `cores()`.
    #[must_use]
    pub fn remote(&self) -> Remote<M> {
        Remote { inboxes: Arc::clone(&self.inboxes) }
    }

    /// Send to core `to`, which may be this one.
    ///
    /// # Errors
    /// Gives the message back when the queue is full: keep it and try at a later turn.
    ///
    /// # Panics
    /// When there is no core `to`.
    pub fn send(&mut self, to: usize, message: M) -> Result<(), M> {
        self.inboxes[to].push(self.core, message)
    }

    /// The next message and the core it is from ([`Mailbox::cores`]: from a [`Remote`]), senders in turn.
    #[inline]
    pub fn receive(&mut self) -> Option<(usize, M)> {
        if !self.inboxes[self.core].has_mail.load(Ordering::Relaxed) {
            return None;
        }
        self.take()
    }

    fn take(&mut self) -> Option<(usize, M)> {
        let inbox = &self.inboxes[self.core];
        if let Some(found) = inbox.look(&mut self.cursor) {
            return Some(found);
        }
        // Lower the flag, then look once more: a push that this look misses raises the flag after the
        // exchange.
        inbox.has_mail.swap(false, Ordering::AcqRel);
        let found = inbox.look(&mut self.cursor);
        if found.is_some() {
            inbox.has_mail.store(true, Ordering::Relaxed);
        }
        found
    }

    /// Announce that this core is about to wait for its [`Mailbox::waker`]. False: there is mail, do not
    /// wait. True: wait, and call [`Mailbox::rise`] afterwards, whatever ended the wait.
    #[must_use]
    pub fn prepare_sleep(&mut self) -> bool {
        let inbox = &self.inboxes[self.core];
        inbox.is_asleep.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let is_empty = inbox.queues.iter().all(ArrayQueue::is_empty);
        if !is_empty {
            inbox.is_asleep.store(false, Ordering::Relaxed);
        }
        is_empty
    }

    /// The wait is over, and the caller has seen whether the waker is raised: then [`Mailbox::drain`]
    /// follows, before the mail is looked at. Costs no system call.
    pub fn rise(&mut self) {
        self.inboxes[self.core].is_asleep.store(false, Ordering::Relaxed);
    }

    /// Lower the waker, which has been seen raised.
    pub fn drain(&mut self) {
        self.inboxes[self.core].waker.drain();
    }

    /// True from a [`Mailbox::prepare_sleep`] that said so until a sender wakes this core or it awakes.
    #[must_use]
    pub fn is_asleep(&self) -> bool {
        self.inboxes[self.core].is_asleep.load(Ordering::Relaxed)
    }

    /// What wakes this core: add it to the core's [`Readiness`](crate::net::Readiness).
    #[must_use]
    pub fn waker(&self) -> &Waker {
        &self.inboxes[self.core].waker
    }
}

impl<M: Send> Remote<M> {
    /// Send to core `to`.
    ///
    /// # Errors
    /// Gives the message back when the queue is full, which all remotes share.
    ///
    /// # Panics
    /// When there is no core `to`.
    pub fn send(&self, to: usize, message: M) -> Result<(), M> {
        self.inboxes[to].push(self.inboxes.len(), message)
    }

    /// How many cores there are.
    #[must_use]
    pub fn cores(&self) -> usize {
        self.inboxes.len()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::alloc_count::allocations_here;
    use crate::net::{Interest, Readiness};

    fn two(capacity: usize) -> (Mailbox<u32>, Mailbox<u32>) {
        let mut boxes = mesh(2, capacity).expect("mesh");
        let b = boxes.pop().expect("two");
        (boxes.pop().expect("two"), b)
    }

    #[test]
    fn messages_of_one_sender_stay_in_order_and_a_full_queue_gives_back() {
        let (mut a, mut b) = two(2);
        assert_eq!((a.core(), b.core(), b.cores()), (0, 1, 2));
        assert_eq!((a.send(1, 10), a.send(1, 11), a.send(1, 12)), (Ok(()), Ok(()), Err(12)));
        assert_eq!(a.receive(), None);
        assert_eq!((b.receive(), b.receive(), b.receive()), (Some((0, 10)), Some((0, 11)), None));
        assert_eq!(a.send(0, 1), Ok(()), "a core may write to itself");
        assert_eq!(a.receive(), Some((0, 1)));
    }

    #[test]
    fn senders_take_turns() {
        let mut boxes = mesh(3, 4).expect("mesh");
        let remote = boxes[0].remote();
        for round in 0..3 {
            assert_eq!(remote.send(0, round), Ok(()));
            for mailbox in &mut boxes[1..] {
                assert_eq!(mailbox.send(0, round), Ok(()));
            }
        }
        let from: Vec<_> = std::iter::from_fn(|| boxes[0].receive()).map(|(from, _)| from).collect();
        assert_eq!(from, [1, 2, 3, 1, 2, 3, 1, 2, 3]);
        assert_eq!(remote.cores(), 3);
    }

    #[test]
    fn only_a_sleeper_is_woken() {
        let (mut a, mut b) = two(4);
        assert_eq!(a.send(1, 1), Ok(()));
        assert!(!b.waker().drain(), "no core sleeps, nothing is raised");
        assert!(!b.prepare_sleep(), "there is mail");
        assert!(!b.is_asleep());
        assert_eq!(b.receive(), Some((0, 1)));
        assert!(b.prepare_sleep() && b.is_asleep());
        assert_eq!((a.send(1, 2), a.send(1, 3)), (Ok(()), Ok(())));
        assert!(!b.is_asleep());
        assert!(b.waker().drain(), "raised by the first of the two");
        b.rise();
        b.drain();
        assert_eq!((b.receive(), b.receive(), b.receive()), (Some((0, 2)), Some((0, 3)), None));
    }

    #[test]
    fn a_late_wake_ends_one_wait_early_and_no_more() {
        let (_a, mut b) = two(1);
        b.waker().wake();
        assert!(b.prepare_sleep());
        b.rise();
        b.drain();
        assert!(!b.waker().drain());
    }

    #[test]
    fn no_wake_up_is_lost_between_two_cores_that_sleep_at_every_message() {
        const ROUNDS: u32 = 20_000;
        let (mut a, mut b) = two(1);
        let answer = |mailbox: &mut Mailbox<u32>, first: bool| {
            let peer = 1 - mailbox.core();
            let (mut readiness, mut ready) = (Readiness::new().expect("epoll"), Vec::with_capacity(1));
            readiness.add(mailbox.waker(), 0, Interest::READ).expect("add");
            let mut expected = u32::from(!first);
            if first {
                assert_eq!(mailbox.send(peer, 1), Ok(()));
                expected = 2;
            }
            while expected <= ROUNDS {
                let Some((from, got)) = mailbox.receive() else {
                    if mailbox.prepare_sleep() {
                        readiness.poll(Some(Duration::from_secs(20)), &mut ready).expect("poll");
                        assert_eq!(ready.len(), 1, "a lost wake-up at {expected}");
                        mailbox.rise();
                        mailbox.drain();
                    }
                    continue;
                };
                assert_eq!((from, got), (peer, expected));
                assert_eq!(mailbox.send(peer, got + 1), Ok(()));
                expected += 2;
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| answer(&mut a, true));
            scope.spawn(|| answer(&mut b, false));
        });
    }

    #[test]
    fn messages_of_many_senders_all_arrive_at_a_core_that_sleeps_between() {
        const EACH: u32 = 20_000;
        let (mut a, mut b) = two(8);
        let remote = b.remote();
        let stubborn = |mut send: Box<dyn FnMut(u32) -> Result<(), u32> + Send>| {
            (0..EACH).for_each(|number| {
                while send(number).is_err() {
                    std::thread::yield_now();
                }
            });
        };
        std::thread::scope(|scope| {
            scope.spawn(|| stubborn(Box::new(|number| a.send(1, number))));
            scope.spawn(|| stubborn(Box::new(|number| remote.send(1, number))));
            let (mut readiness, mut ready) = (Readiness::new().expect("epoll"), Vec::with_capacity(1));
            readiness.add(b.waker(), 0, Interest::READ).expect("add");
            let mut next = [0; 3];
            while next != [EACH, 0, EACH] {
                if let Some((from, got)) = b.receive() {
                    assert_eq!(got, next[from], "order of sender {from}");
                    next[from] += 1;
                } else if b.prepare_sleep() {
                    readiness.poll(Some(Duration::from_secs(20)), &mut ready).expect("poll");
                    assert_eq!(ready.len(), 1, "a lost wake-up at {next:?}");
                    b.rise();
                    b.drain();
                }
            }
        });
    }

    #[test]
    fn sending_and_receiving_allocate_nothing() {
        let (mut a, mut b) = two(8);
        let before = allocations_here();
        for round in 0..1000 {
            assert_eq!(a.send(1, round), Ok(()));
            assert_eq!(b.receive(), Some((0, round)));
            assert_eq!(b.receive(), None);
        }
        assert_eq!(allocations_here(), before);
    }

    #[test]
    fn a_mailbox_goes_to_its_thread_and_a_remote_to_any() {
        fn is_send<T: Send>() {}
        fn is_sync<T: Sync>() {}
        is_send::<Mailbox<std::cell::Cell<u8>>>();
        is_send::<Remote<u8>>();
        is_sync::<Remote<u8>>();
    }
}
