//! Mailboxes between cores: bounded queues from every core, and from all other threads, to every core.
//!
//! What it is: messages are moved, not copied. If a queue is full, the sender gets the message back. A core
//! that polls checks for mail with one relaxed load. A sleeping core is woken by the sender, which makes a
//! system call only then.
//!
//! ```text
//!   sender: push -> has_mail := true -> fence -> is_asleep? -> (exchange it for false) -> Waker::wake
//!   sleeper: is_asleep := true -> fence -> queues empty? -> wait for its Waker -> awake
//! ```
//!
//! Either the sender sees that the core sleeps, or the core sees the message before it waits, as the two
//! SeqCst fences have one order.
//!
//! Messages of one sender stay in order. Messages of different senders have no order.
//!
//! Limits: memory for `cores * (cores + 1) * capacity` messages is allocated at start.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};

use crossbeam_queue::ArrayQueue;

use crate::net::Waker;

/// Queues to one core. On cache lines of its own, as the core reads `has_mail` in every turn.
#[repr(align(128))]
struct Inbox<M> {
    /// Set after a push. The receiver clears the flag when the queues are empty, and then checks them again.
    has_mail: AtomicBool,
    is_asleep: AtomicBool,
    waker: Waker,
    /// One queue for each sending core; the last one is for all other threads.
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

    /// Returns the next message and its sender; `None` when all queues are empty. Checks the queues from
    /// `cursor` on, and advances `cursor` past the queue that had the message.
    fn pop_next(&self, cursor: &mut usize) -> Option<(usize, M)> {
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

/// One core's access to the mesh: receives from the core's inbox and sends to all inboxes.
pub struct Mailbox<M> {
    inboxes: Arc<[Inbox<M>]>,
    core: usize,
    /// The queue to check first, so that no sender starves another.
    cursor: usize,
}

/// A sender for threads that are not cores: signal handling, management.
pub struct Remote<M> {
    inboxes: Arc<[Inbox<M>]>,
}

impl<M> Clone for Remote<M> {
    fn clone(&self) -> Remote<M> {
        Remote { inboxes: Arc::clone(&self.inboxes) }
    }
}

/// Creates a mailbox for each of `cores` cores. Each queue has room for `capacity` messages.
///
/// # Errors
/// The error of [`Waker::new`].
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
    /// Returns the index of this core.
    #[must_use]
    pub fn core(&self) -> usize {
        self.core
    }

    /// Returns the count of cores.
    #[must_use]
    pub fn cores(&self) -> usize {
        self.inboxes.len()
    }

    /// Returns a sender for threads that are not cores. Its messages have the sender `cores()`.
    #[must_use]
    pub fn remote(&self) -> Remote<M> {
        Remote { inboxes: Arc::clone(&self.inboxes) }
    }

    /// Sends `message` to core `to`, which may be this core.
    ///
    /// # Errors
    /// Returns the message when the queue is full: keep it and try again in a later turn.
    ///
    /// # Panics
    /// When there is no core `to`.
    pub fn send(&mut self, to: usize, message: M) -> Result<(), M> {
        self.inboxes[to].push(self.core, message)
    }

    /// Returns the next message and the core that sent it ([`Mailbox::cores`]: a [`Remote`]), round-robin by
    /// sender. `None` when there is no message.
    #[inline]
    pub fn receive(&mut self) -> Option<(usize, M)> {
        if !self.inboxes[self.core].has_mail.load(Ordering::Relaxed) {
            return None;
        }
        self.take()
    }

    fn take(&mut self) -> Option<(usize, M)> {
        let inbox = &self.inboxes[self.core];
        if let Some(found) = inbox.pop_next(&mut self.cursor) {
            return Some(found);
        }
        // Clear the flag, then check the queues again: a push that this check misses sets the flag after the
        // swap.
        inbox.has_mail.swap(false, Ordering::AcqRel);
        let found = inbox.pop_next(&mut self.cursor);
        if found.is_some() {
            inbox.has_mail.store(true, Ordering::Relaxed);
        }
        found
    }

    /// Announces that this core is about to wait for its [`Mailbox::waker`]. Returns false when there is
    /// mail: do not wait. After true, wait, then call [`Mailbox::end_sleep`], whatever ended it.
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

    /// Ends the wait. If the caller has seen the waker raised, it calls [`Mailbox::drain`] before it
    /// receives. Makes no system call.
    pub fn end_sleep(&mut self) {
        self.inboxes[self.core].is_asleep.store(false, Ordering::Relaxed);
    }

    /// Lowers the waker by a system call. Call it when the waker was seen raised.
    pub fn drain(&mut self) {
        self.inboxes[self.core].waker.drain();
    }

    /// Returns true after a [`Mailbox::prepare_sleep`] that returned true, until a sender wakes this core or
    /// [`Mailbox::end_sleep`] is called.
    #[must_use]
    pub fn is_asleep(&self) -> bool {
        self.inboxes[self.core].is_asleep.load(Ordering::Relaxed)
    }

    /// Returns the waker of this core, to be added to the core's [`Readiness`](crate::net::Readiness).
    #[must_use]
    pub fn waker(&self) -> &Waker {
        &self.inboxes[self.core].waker
    }
}

impl<M: Send> Remote<M> {
    /// Sends `message` to core `to`.
    ///
    /// # Errors
    /// Returns the message when the queue, which all remotes share, is full.
    ///
    /// # Panics
    /// When there is no core `to`.
    pub fn send(&self, to: usize, message: M) -> Result<(), M> {
        self.inboxes[to].push(self.inboxes.len(), message)
    }

    /// Returns the count of cores.
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
        b.end_sleep();
        b.drain();
        assert_eq!((b.receive(), b.receive(), b.receive()), (Some((0, 2)), Some((0, 3)), None));
    }

    #[test]
    fn a_late_wake_ends_one_wait_early_and_no_more() {
        let (_a, mut b) = two(1);
        b.waker().wake();
        assert!(b.prepare_sleep());
        b.end_sleep();
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
                        mailbox.end_sleep();
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
                    b.end_sleep();
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
