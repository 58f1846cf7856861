//! Gives what a disk or cache has kept back on threads of its own. Unmapping takes seconds for tens of GiB,
//! and closing a file waits for its file system; the last user is a data core, or the last reply that is sent
//! from the memory.

use std::any::Any;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{Builder, park_timeout};
use std::time::Duration;

/// Time between two looks at the users.
const PERIOD: Duration = Duration::from_millis(10);

/// What no core gets any more.
pub(crate) type Former = Arc<dyn Any + Send + Sync>;

/// The thread, and what it looks after, of all disks.
struct Releaser {
    former: Mutex<Vec<Former>>,
    has_some: Condvar,
}

/// `None`: there was no thread.
static RELEASER: OnceLock<Option<Releaser>> = OnceLock::new();

/// Starts the thread with the first disk: a thread that a data core started would share its processor.
/// Without it the last user gives back what it uses.
pub(crate) fn start() {
    RELEASER.get_or_init(|| {
        let run = || RELEASER.wait().as_ref().map(Releaser::run);
        match Builder::new().name("release".to_owned()).spawn(run) {
            Ok(_) => Some(Releaser { former: Mutex::new(Vec::new()), has_some: Condvar::new() }),
            Err(error) => {
                tracing::warn!(
                    %error,
                    "cannot start the thread that unmaps memory and closes files: a data core does it"
                );
                None
            }
        }
    });
}

/// Drops each of `gone` once it has no other user.
pub(crate) fn release(gone: impl IntoIterator<Item = Former>) {
    let Some(Some(releaser)) = RELEASER.get() else { return };
    let mut former = releaser.lock();
    for one in gone {
        // Two changes in a row both find the cache that cores still leave. A second reference would keep it.
        if !former.iter().any(|known| Arc::as_ptr(known).addr() == Arc::as_ptr(&one).addr()) {
            former.push(one);
        }
    }
    drop(former);
    releaser.has_some.notify_one();
}

impl Releaser {
    fn lock(&self) -> MutexGuard<'_, Vec<Former>> {
        self.former.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        loop {
            let former = self.has_some.wait_while(self.lock(), |former| former.is_empty());
            let mut former = former.unwrap_or_else(PoisonError::into_inner);
            let unused: Vec<_> = former.extract_if(.., |one| Arc::strong_count(one) == 1).collect();
            drop(former);
            for one in unused {
                // On a thread of its own: a file system that does not answer must not delay the others.
                // Without a thread it is dropped here.
                let _ = Builder::new().name("release".to_owned()).spawn(move || drop(one));
            }
            park_timeout(PERIOD);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::thread::{ThreadId, current};

    use super::*;

    const GIVE_UP: Duration = Duration::from_secs(20);

    /// Says which thread drops it, and then hangs for as long as there is a sender.
    struct Slow {
        dropped: Sender<ThreadId>,
        hangs: Mutex<Receiver<()>>,
    }

    impl Drop for Slow {
        fn drop(&mut self) {
            let _ = self.dropped.send(current().id());
            let _ = self.hangs.lock().expect("no panic").recv_timeout(GIVE_UP);
        }
    }

    #[test]
    fn the_last_user_drops_nothing_and_what_hangs_delays_nothing_else() {
        start();
        let (dropped, by) = channel();
        let make = |hangs| Arc::new(Slow { dropped: dropped.clone(), hangs: Mutex::new(hangs) });
        let (goes_on, hangs) = channel();
        let (slow, quick) = (make(hangs), make(channel().1));
        for one in [&slow, &quick] {
            // Twice: as after two changes in a row.
            release([Arc::clone(one) as Former, Arc::clone(one) as Former]);
            release([Arc::clone(one) as Former]);
        }
        assert!(by.recv_timeout(PERIOD * 5).is_err(), "it is in use");
        drop(slow);
        assert_ne!(by.recv_timeout(GIVE_UP).expect("dropped"), current().id());
        drop(quick);
        assert_ne!(by.recv_timeout(GIVE_UP).expect("not delayed by one that hangs"), current().id());
        drop(goes_on);
    }
}
