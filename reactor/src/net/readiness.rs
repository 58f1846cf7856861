//! [`Readiness`]: which of many descriptors have something to do; [`Waker`]: a descriptor that other threads
//! raise.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll, eventfd, poll};
use rustix::io::Errno;

/// What to watch a descriptor for. A hang-up is always told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Interest {
    /// Bytes to read, or an end.
    pub read: bool,
    /// Room to write.
    pub write: bool,
}

impl Interest {
    /// To read only.
    pub const READ: Interest = Interest { read: true, write: false };
    /// To write only.
    pub const WRITE: Interest = Interest { read: false, write: true };

    fn flags(self) -> epoll::EventFlags {
        let mut flags = epoll::EventFlags::empty();
        flags.set(epoll::EventFlags::IN | epoll::EventFlags::RDHUP, self.read);
        flags.set(epoll::EventFlags::OUT, self.write);
        flags
    }
}

/// A descriptor that has something to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ready {
    /// The key that it was added with.
    pub key: u64,
    /// A read gives bytes, an end or an error.
    pub readable: bool,
    /// A write gives room or an error.
    pub writable: bool,
    /// The peer sends no more, or the connection is gone.
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

/// Most events of one [`Readiness::poll`]; the rest is told by the next, in turn.
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
    /// An empty set.
    pub fn new() -> io::Result<Readiness> {
        let fd = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let nothing = epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };
        Ok(Readiness { fd: Arc::new(fd), events: vec![nothing; EVENTS_MAX].into_boxed_slice() })
    }

    /// What adds descriptors to this set and takes them out again, with keys that begin at `base`.
    #[must_use]
    pub fn watcher(&self, base: u64) -> Watcher {
        Watcher { fd: Arc::clone(&self.fd), base }
    }

    /// Watch `source`, told as `key`.
    pub fn add(&self, source: impl AsFd, key: u64, interest: Interest) -> io::Result<()> {
        Ok(epoll::add(&self.fd, source, epoll::EventData::new_u64(key), interest.flags())?)
    }

    /// Watch `source` for something else, or told as another key.
    pub fn change(&self, source: impl AsFd, key: u64, interest: Interest) -> io::Result<()> {
        Ok(epoll::modify(&self.fd, source, epoll::EventData::new_u64(key), interest.flags())?)
    }

    /// Watch `source` no longer. (Closing its last handle does the same.)
    pub fn remove(&self, source: impl AsFd) -> io::Result<()> {
        Ok(epoll::delete(&self.fd, source)?)
    }

    /// Replace `ready` by what has something to do, at most what it has room for without growing (and 256).
    /// Waits for the first at most `timeout`, rounded up to milliseconds; `None` waits for ever, zero never.
    /// A signal ends the wait early with nothing.
    pub fn poll(&mut self, timeout: Option<Duration>, ready: &mut Vec<Ready>) -> io::Result<usize> {
        ready.clear();
        // No more is asked for than there is room for: the kernel tells in turn, and what was told goes to
        // the back.
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

/// One user of a [`Readiness`] that several share: its keys are its own, and the set has them behind its
/// base.
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

/// Wakes a thread that sleeps in [`Readiness::poll`] on it (an eventfd). Cheap to clone; any thread may wake.
#[derive(Debug, Clone)]
pub struct Waker(Arc<OwnedFd>);

impl Waker {
    /// A waker that is not raised.
    pub fn new() -> io::Result<Waker> {
        Ok(Waker(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)))
    }

    /// Raise it: its descriptor is readable until [`Waker::drain`].
    pub fn wake(&self) {
        // Full (2^64 - 2 wakes without a drain) is raised as well; nothing else can fail on our own eventfd.
        let _ = rustix::io::retry_on_intr(|| rustix::io::write(&*self.0, &1u64.to_ne_bytes()));
    }

    /// Sleep until it is raised, at most `timeout`, and lower it. It may return early.
    pub fn wait(&self, timeout: Duration) {
        let timeout = Timespec::try_from(timeout).ok();
        let _ = poll(&mut [PollFd::new(self, PollFlags::IN)], timeout.as_ref());
        self.drain();
    }

    /// Lower it; true when it was raised.
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
