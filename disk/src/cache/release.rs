//! Gives the memory of caches back on a thread of its own. Unmapping takes seconds for tens of GiB, and the
//! last user of a cache is a data core, or the last reply that is sent from its frames.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use spindle_reactor::mem::CacheFrames;

use super::shared::Shared;

/// Time between two looks at the users.
const PERIOD: Duration = Duration::from_millis(10);

/// What is left of a cache that no core gets any more.
enum Former {
    Cache(Arc<Shared>),
    Frames(Arc<CacheFrames>),
}

/// The thread, and what it looks after: former caches of all disks.
struct Releaser {
    former: Mutex<Vec<Former>>,
    has_some: Condvar,
}

/// `None`: there was no thread.
static RELEASER: OnceLock<Option<Releaser>> = OnceLock::new();

/// Starts the thread with the first cache: a thread that a data core started would share its processor.
/// Without it the last user of a cache gives its memory back.
pub(super) fn start() {
    RELEASER.get_or_init(|| {
        let run = || RELEASER.wait().as_ref().map(Releaser::run);
        match std::thread::Builder::new().name("cache-release".to_owned()).spawn(run) {
            Ok(_) => Some(Releaser { former: Mutex::new(Vec::new()), has_some: Condvar::new() }),
            Err(error) => {
                tracing::warn!(%error, "no thread to give back the memory of caches: a data core does it");
                None
            }
        }
    });
}

/// Drops caches that no core gets any more, once their last user has gone.
pub(super) fn release(caches: Vec<Arc<Shared>>) {
    let Some(Some(releaser)) = RELEASER.get() else { return };
    let mut former = releaser.lock();
    for cache in caches {
        // Two changes in a row both find the cache that cores still leave. A second reference would keep it.
        let is_it = |one: &Former| matches!(one, Former::Cache(known) if Arc::ptr_eq(known, &cache));
        if !former.iter().any(is_it) {
            former.push(Former::Cache(cache));
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
            let unused = take_unused(&mut former.unwrap_or_else(PoisonError::into_inner));
            // Without the lock, which a data core may wait for: this unmaps.
            drop(unused);
            std::thread::park_timeout(PERIOD);
        }
    }
}

/// Takes what has no other user out of `former`.
fn take_unused(former: &mut Vec<Former>) -> Vec<Former> {
    let mut unused = Vec::new();
    for mut one in std::mem::take(former) {
        // The frames outlive the cache while replies are sent from them.
        if let Former::Cache(cache) = &one
            && Arc::strong_count(cache) == 1
        {
            let frames = Arc::clone(&cache.frames);
            unused.push(std::mem::replace(&mut one, Former::Frames(frames)));
        }
        // The cache that is dropped below is one of its users.
        let is_unused = matches!(&one, Former::Frames(frames) if Arc::strong_count(frames) == 1);
        if is_unused { &mut unused } else { &mut *former }.push(one);
    }
    unused
}
