//! The thread that makes the memory of a new cache resident.

use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::thread::Builder;
use std::time::{Duration, Instant};

use spindle_reactor::mem::CacheMemory;

/// Makes all of `memory` resident on a thread of its own, and sets `after` then, unless the kernel refuses.
/// The thread ends early when the owner of `after`, the cache of `disk`, is gone. Called by a thread that is
/// no data core: the new thread runs on its processors.
pub(super) fn make_resident(memory: CacheMemory, after: &Arc<OnceLock<Duration>>, disk: &str) {
    // Shared, so that it is still here if there is no thread.
    let memory = Arc::new(Mutex::new(memory));
    let (its_memory, its_after) = (Arc::clone(&memory), Arc::downgrade(after));
    let its_disk = disk.to_owned();
    let thread = Builder::new().name("cache-memory".to_owned());
    let spawned = thread.spawn(move || run(&its_memory, &its_after, &its_disk));
    if let Err(error) = spawned {
        tracing::warn!(
            disk,
            %error,
            "cannot start the thread that populates the cache's memory: the change waits until it is resident"
        );
        run(&memory, &Arc::downgrade(after), disk);
    }
}

fn run(memory: &Mutex<CacheMemory>, after: &Weak<OnceLock<Duration>>, disk: &str) {
    let begin = Instant::now();
    let mut memory = memory.lock().unwrap_or_else(PoisonError::into_inner);
    // Before each step: a step holds the frames, and their memory is given back only when nothing holds them.
    while after.strong_count() > 0 && memory.step() {}
    let Some(after) = after.upgrade() else { return };
    match memory.error() {
        None => _ = after.set(begin.elapsed()),
        Some(error) => {
            tracing::warn!(
                disk,
                %error,
                "the cache's memory is not resident: cores populate each page on first use"
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use spindle_reactor::mem::{CacheFrames, Pages};

    use super::*;

    #[test]
    fn the_memory_of_a_cache_that_is_gone_is_not_made_resident() {
        let (frames, _, memory) = CacheFrames::withheld(4, 1024, Pages::Base, false).expect("memory");
        let memory = Mutex::new(memory);
        let after = Arc::new(OnceLock::new());
        run(&memory, &Arc::downgrade(&after), "d");
        assert!(after.get().is_some() && frames.words().withheld() == 0);
        let (frames, _, memory) = CacheFrames::withheld(4, 1024, Pages::Base, false).expect("memory");
        let gone = Arc::downgrade(&Arc::new(OnceLock::new()));
        run(&Mutex::new(memory), &gone, "d");
        assert_eq!(frames.words().withheld(), 4 * 1024);
    }
}
