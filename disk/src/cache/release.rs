//! Gives the memory of caches back on a thread of its own. Unmapping takes seconds for tens of GiB, and the
//! last user of a cache is a data core, or the last reply that is sent from its frames.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
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

/// Former caches, of all disks. `None`: no thread looks after them.
static FORMER: Mutex<Option<Vec<Former>>> = Mutex::new(None);

fn lock() -> MutexGuard<'static, Option<Vec<Former>>> {
    FORMER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Drops caches that no core gets any more, once their last user has gone. If no thread can be had, the last
/// user gives the memory back.
pub(super) fn release(caches: Vec<Arc<Shared>>) {
    if caches.is_empty() {
        return;
    }
    let mut former = lock();
    let has_thread = former.is_some();
    former.get_or_insert_default().extend(caches.into_iter().map(Former::Cache));
    if has_thread {
        return;
    }
    let spawned = std::thread::Builder::new().name("cache-release".to_owned()).spawn(|| while step() {});
    if let Err(error) = spawned {
        tracing::warn!(%error, "no thread to give back the memory of a cache: a data core does it");
        *former = None;
    }
}

/// Drops what has no other user. Returns false when nothing is left.
fn step() -> bool {
    std::thread::park_timeout(PERIOD);
    let mut former = lock();
    let Some(all) = &mut *former else { return false };
    let mut unused = Vec::new();
    for mut one in std::mem::take(all) {
        // The frames outlive the cache while replies are sent from them.
        if let Former::Cache(cache) = &one
            && Arc::strong_count(cache) == 1
        {
            let frames = Arc::clone(&cache.frames);
            unused.push(std::mem::replace(&mut one, Former::Frames(frames)));
        }
        let is_unused = matches!(&one, Former::Frames(frames) if Arc::strong_count(frames) == 1);
        if is_unused { &mut unused } else { &mut *all }.push(one);
    }
    if all.is_empty() {
        *former = None;
    }
    let is_left = former.is_some();
    drop(former);
    // Without the lock, which a change of another cache waits for: this unmaps.
    drop(unused);
    is_left
}
