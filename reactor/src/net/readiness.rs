//! [`Readiness`]: an epoll set; [`Waker`]: an eventfd that other threads raise.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll, eventfd, poll};
use rustix::io::Errno;

/// Events to watch a descriptor for. A failure is always reported; the end of the stream only with `read`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Interest {
    /// Bytes to read, or the end of the stream.
    pub read: bool,
    /// Space in the send buffer.
    pub write: bool,
}

impl Interest {
    /// `read` only.
    pub const READ: Interest = Interest { read: true, write: false };
    /// `write` only.
    pub const WRITE: Interest = Interest { read: false, write: true };

    fn flags(self) -> epoll::EventFlags {
        let mut flags = epoll::EventFlags::empty();
        flags.set(epoll::EventFlags::IN | epoll::EventFlags::RDHUP, self.read);
        flags.set(epoll::EventFlags::OUT, self.write);
        flags
    }
}

/// A descriptor with an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ready {
    /// Key passed to [`Readiness::add`] or [`Readiness::change`]; for a [`Watcher`], the key passed to
    /// [`Watcher::add`] plus `base`.
    pub key: u64,
    /// A read returns bytes, an end or an error.
    pub readable: bool,
    /// A write accepts bytes or returns an error.
    pub writable: bool,
    /// The peer has closed its sending direction, or the connection has failed.
    pub hangup: bool,
}

impl From<epoll::Event> for Ready {
    fn from(event: epoll::Event) -> Ready {
        let flags = event.flags;
        let key = event.data.u64();
        let is_gone = flags.intersects(epoll::EventFlags::HUP | epoll::EventFlags::ERR);
        let hangup = is_gone || flags.intersects(epoll::EventFlags::RDHUP);
        Ready {
            key,
            readable: hangup || flags.intersects(epoll::EventFlags::IN),
            writable: is_gone || flags.intersects(epoll::EventFlags::OUT),
            hangup,
        }
    }
}

/// Maximum number of events of one [`Readiness::poll`]; the next call reports the others.
const EVENTS_MAX: usize = 256;

/// A set of watched descriptors (epoll, level-triggered).
pub struct Readiness {
    fd: Arc<OwnedFd>,
    events: Box<[epoll::Event]>,
}

impl fmt::Debug for Readiness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Readiness").field("fd", &self.fd).finish_non_exhaustive()
    }
}

impl Readiness {
    /// Creates a set without descriptors; fails with the error of epoll_create1(2).
    pub fn new() -> io::Result<Readiness> {
        let fd = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let nothing = epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };
        Ok(Readiness { fd: Arc::new(fd), events: vec![nothing; EVENTS_MAX].into_boxed_slice() })
    }

    /// Returns a handle that adds and removes descriptors; `base` is added to their keys.
    #[must_use]
    pub fn watcher(&self, base: u64) -> Watcher {
        Watcher { fd: Arc::clone(&self.fd), base }
    }

    /// Watches `source`; its events have `key`.
    pub fn add(&self, source: impl AsFd, key: u64, interest: Interest) -> io::Result<()> {
        Ok(epoll::add(&self.fd, source, epoll::EventData::new_u64(key), interest.flags())?)
    }

    /// Changes the events or the key of a watched descriptor.
    pub fn change(&self, source: impl AsFd, key: u64, interest: Interest) -> io::Result<()> {
        Ok(epoll::modify(&self.fd, source, epoll::EventData::new_u64(key), interest.flags())?)
    }

    /// Stops watching `source`. (Closing its last handle does the same.)
    pub fn remove(&self, source: impl AsFd) -> io::Result<()> {
        Ok(epoll::delete(&self.fd, source)?)
    }

    /// Replaces the contents of `ready` by descriptors with events, at most 256 and at most the capacity of
    /// `ready`. Waits for the first event for at most `timeout`, rounded up to milliseconds. `None` waits
    /// without limit, zero does not wait. A signal ends the wait early, without events. Returns their count.
    pub fn poll(&mut self, timeout: Option<Duration>, ready: &mut Vec<Ready>) -> io::Result<usize> {
        ready.clear();
        // At most as many as fit in `ready`. The kernel moves a reported descriptor to the end of its list,
        // so the next call reports the others first.
        let room = ready.capacity().min(EVENTS_MAX);
        if room == 0 {
            return Ok(0);
        }
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let told = match epoll::wait(&self.fd, &mut self.events[..room], timeout.as_ref()) {
            Ok(told) => told,
            Err(Errno::INTR) => 0,
            Err(errno) => return Err(errno.into()),
        };
        ready.extend(self.events[..told].iter().map(|event| Ready::from(*event)));
        Ok(ready.len())
    }
}

/// Access of one user to a shared [`Readiness`]. The user has its own 32-bit keys, to which `base` is added.
#[derive(Debug)]
pub struct Watcher {
    fd: Arc<OwnedFd>,
    base: u64,
}

impl Watcher {
    /// As [`Readiness::add`].
    pub fn add(&self, source: impl AsFd, key: u32, interest: Interest) -> io::Result<()> {
        let key = self.base + u64::from(key);
        Ok(epoll::add(&self.fd, source, epoll::EventData::new_u64(key), interest.flags())?)
    }

    /// As [`Readiness::remove`].
    pub fn remove(&self, source: impl AsFd) -> io::Result<()> {
        Ok(epoll::delete(&self.fd, source)?)
    }
}

impl AsFd for Readiness {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// An eventfd that wakes a thread. The thread sleeps in [`Waker::wait`], or in the [`Readiness::poll`] of a
/// set that contains the waker. Any thread may wake; clones are the same eventfd.
#[derive(Debug, Clone)]
pub struct Waker(Arc<OwnedFd>);

impl Waker {
    /// Creates a waker that is not raised; fails with the error of eventfd(2).
    pub fn new() -> io::Result<Waker> {
        Ok(Waker(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)))
    }

    /// Raises the waker: its descriptor is readable until [`Waker::drain`].
    pub fn wake(&self) {
        // A full counter (2^64 - 2 wakes without a drain) is raised too; an eventfd has no other error here.
        let _ = rustix::io::retry_on_intr(|| rustix::io::write(&*self.0, &1u64.to_ne_bytes()));
    }

    /// Blocks until the waker is raised, at most `timeout`, and lowers it. A signal ends the wait early.
    pub fn wait(&self, timeout: Duration) {
        let timeout = Timespec::try_from(timeout).ok();
        let _ = poll(&mut [PollFd::new(self, PollFlags::IN)], timeout.as_ref());
        self.drain();
    }

    /// Lowers the waker. Returns true when it was raised.
    pub fn drain(&self) -> bool {
        rustix::io::retry_on_intr(|| rustix::io::read(&*self.0, &mut [0u8; 8])).is_ok()
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Option<Duration> = Some(Duration::from_secs(10));

    #[test]
    fn a_waker_is_readable_from_wake_to_drain() {
        let (mut readiness, mut ready) = (Readiness::new().expect("epoll"), Vec::with_capacity(4));
        let waker = Waker::new().expect("eventfd");
        readiness.add(&waker, 42, Interest::READ).expect("add");
        assert_eq!(readiness.poll(Some(Duration::ZERO), &mut ready).expect("poll"), 0);
        let other = waker.clone();
        std::thread::scope(|scope| {
            scope.spawn(move || other.wake());
            assert_eq!(readiness.poll(LONG, &mut ready).expect("poll"), 1);
        });
        assert_eq!(ready, [Ready { key: 42, readable: true, writable: false, hangup: false }]);
        assert!(waker.drain());
        assert!(!waker.drain());
        assert_eq!(readiness.poll(Some(Duration::ZERO), &mut ready).expect("poll"), 0);
        assert!(ready.is_empty());
    }

    #[test]
    fn what_does_not_fit_is_told_by_the_next_poll() {
        let mut readiness = Readiness::new().expect("epoll");
        let wakers: Vec<_> = (0..5).map(|_| Waker::new().expect("eventfd")).collect();
        for (key, waker) in (0..).zip(&wakers) {
            readiness.add(waker, key, Interest::READ).expect("add");
            waker.wake();
        }
        let mut ready = Vec::with_capacity(2);
        let mut seen = 0;
        while seen < 5 {
            assert!(readiness.poll(LONG, &mut ready).expect("poll") <= 2);
            for event in &ready {
                assert!(wakers[usize::try_from(event.key).expect("small")].drain(), "told twice");
                seen += 1;
            }
        }
        assert_eq!(ready.capacity(), 2);
    }

    #[test]
    fn interest_changes_and_ends() {
        let (mut readiness, mut ready) = (Readiness::new().expect("epoll"), Vec::with_capacity(4));
        let waker = Waker::new().expect("eventfd");
        readiness.add(&waker, 1, Interest::READ).expect("add");
        readiness.change(&waker, 2, Interest { read: true, write: true }).expect("change");
        readiness.poll(LONG, &mut ready).expect("poll");
        assert_eq!(ready, [Ready { key: 2, readable: false, writable: true, hangup: false }]);
        readiness.remove(&waker).expect("remove");
        assert_eq!(readiness.poll(Some(Duration::ZERO), &mut ready).expect("poll"), 0);
        assert!(readiness.remove(&waker).is_err());
    }
}
