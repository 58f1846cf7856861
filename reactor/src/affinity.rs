//! Pinning of threads to cores, and the memory node (NUMA) of a thread.
//! UNSAFETY: a system call without a safe wrapper.
#![expect(unsafe_code, reason = "asks the system for the node of a processor")]

use std::sync::{OnceLock, PoisonError, RwLock};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Error of pinning a thread.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AffinityError {
    /// The core does not exist, or this process may not use it.
    #[error("core {core} is not one that this process may use; allowed: {available:?}")]
    NotAvailable {
        /// The requested core.
        core: usize,
        /// Cores that this process may use, ascending.
        available: Vec<usize>,
    },
    /// sched_setaffinity(2) failed.
    #[error("the system refused to pin a thread to core {core}")]
    Refused {
        /// The requested core.
        core: usize,
    },
}

/// Returns the cores that this process may use, ascending: the affinity of the calling thread at the first
/// call. Later calls return the same cores. The first call must come before any thread is pinned.
#[must_use]
pub fn available_cores() -> Vec<usize> {
    static AVAILABLE: OnceLock<Vec<usize>> = OnceLock::new();
    AVAILABLE.get_or_init(current_cores).clone()
}

/// Returns the cores that the calling thread may run on, ascending; none when sched_getaffinity(2) fails.
fn current_cores() -> Vec<usize> {
    let set = sched_getaffinity(None).unwrap_or_else(|_| CpuSet::new());
    (0..CpuSet::MAX_CPU).filter(|core| set.is_set(*core)).collect()
}

/// Cores on which threads of this process poll: the last argument of [`leave_to_pollers`].
static POLLED: RwLock<Vec<usize>> = RwLock::new(Vec::new());

/// Excludes `cores`, on which threads poll, from the affinity of the calling thread and of threads that it
/// starts later. The affinity stays if no other core is left. `cores` replaces those of an earlier call.
pub fn leave_to_pollers(cores: &[usize]) {
    *POLLED.write().unwrap_or_else(PoisonError::into_inner) = cores.to_vec();
    let others = cores_without_pollers();
    if !others.is_empty() {
        // An error is ignored: it costs only speed.
        let _ = set_affinity(&others);
    }
}

/// Returns [`available_cores`] without those of the last [`leave_to_pollers`]; may be empty.
#[must_use]
pub fn cores_without_pollers() -> Vec<usize> {
    let polled = POLLED.read().unwrap_or_else(PoisonError::into_inner);
    available_cores().into_iter().filter(|core| !polled.contains(core)).collect()
}

fn set_affinity(cores: &[usize]) -> std::io::Result<()> {
    let mut set = CpuSet::new();
    cores.iter().filter(|core| **core < CpuSet::MAX_CPU).for_each(|core| set.set(*core));
    Ok(sched_setaffinity(None, &set)?)
}

/// Pins the calling thread to `core`.
///
/// # Errors
/// [`AffinityError`] when `core` is not one of [`available_cores`] or the system refuses.
pub fn pin_current_thread(core: usize) -> Result<(), AffinityError> {
    let available = available_cores();
    if !available.contains(&core) {
        return Err(AffinityError::NotAvailable { core, available });
    }
    set_affinity(&[core]).map_err(|_| AffinityError::Refused { core })
}

/// Returns the memory node (NUMA) on which the calling thread runs now. `None` where getcpu(2) fails.
#[must_use]
pub fn current_node() -> Option<u32> {
    let mut node: libc::c_uint = 0;
    let nothing = std::ptr::null_mut::<libc::c_uint>();
    // SAFETY: getcpu writes to `node`, which outlives the call, and skips null pointers.
    let result = unsafe { libc::syscall(libc::SYS_getcpu, nothing, &raw mut node, nothing) };
    (result == 0).then_some(node)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pinned_thread_has_one_core() {
        std::thread::scope(|scope| {
            for core in available_cores() {
                scope.spawn(move || {
                    pin_current_thread(core).expect("pins");
                    assert_eq!(current_cores(), [core]);
                });
            }
        });
    }

    #[test]
    fn a_thread_and_those_it_starts_leave_cores_to_pollers_and_these_are_pinned_there() {
        let available = available_cores();
        let (polled, others) = available.split_at(1);
        let run = || {
            leave_to_pollers(polled);
            assert_eq!(cores_without_pollers(), others);
            let others = if others.is_empty() { polled } else { others };
            let started = || (current_cores(), pin_current_thread(polled[0]), current_cores());
            let started = std::thread::scope(|scope| scope.spawn(started).join().expect("no panic"));
            assert_eq!(started, (others.to_vec(), Ok(()), polled.to_vec()));
        };
        std::thread::scope(|scope| scope.spawn(run).join().expect("no panic"));
        leave_to_pollers(&[]);
        assert_eq!(cores_without_pollers(), available);
    }

    #[test]
    fn a_core_that_is_not_there_is_refused_by_name() {
        for core in [1_000_000, usize::MAX] {
            let error = pin_current_thread(core).expect_err("refused");
            assert!(error.to_string().contains(&format!("core {core} is not one")), "{error}");
        }
    }
}
