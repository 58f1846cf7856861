//! Pinning a thread to a core, and the memory that is near to it.
//! UNSAFETY: a system call that nobody wraps.
#![expect(unsafe_code, reason = "asks the system for the node of a processor")]

/// Why a thread could not be pinned.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AffinityError {
    /// There is no such core for this process.
    #[error("core {core} is not one that this process may use; allowed: {available:?}")]
    NotAvailable {
        /// The core that was asked for.
        core: usize,
        /// Those that there are.
        available: Vec<usize>,
    },
    /// The system refused.
    #[error("the system refused to pin a thread to core {core}")]
    Refused {
        /// The core that was asked for.
        core: usize,
    },
}

/// The cores that the calling thread may run on, ascending. Ask before pinning: a pinned thread, and those
/// that it starts, see one.
#[must_use]
pub fn available_cores() -> Vec<usize> {
    core_affinity::get_core_ids().unwrap_or_default().into_iter().map(|core| core.id).collect()
}

/// Run the calling thread on `core` from now on.
///
/// # Errors
/// [`AffinityError`] when the thread may not run there.
pub fn pin_current_thread(core: usize) -> Result<(), AffinityError> {
    let available = available_cores();
    if !available.contains(&core) {
        return Err(AffinityError::NotAvailable { core, available });
    }
    let is_pinned = core_affinity::set_for_current(core_affinity::CoreId { id: core });
    if is_pinned { Ok(()) } else { Err(AffinityError::Refused { core }) }
}

/// The memory node (NUMA) of the processor that the calling thread runs on now; of a pinned thread, its own.
/// `None` where the system does not say.
#[must_use]
pub fn current_node() -> Option<u32> {
    let mut node: libc::c_uint = 0;
    let nothing = std::ptr::null_mut::<libc::c_uint>();
    // SAFETY: writes one number to `node`, which is ours, and nothing where it is given no place.
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
                    assert_eq!(available_cores(), [core]);
                });
            }
        });
    }

    #[test]
    fn a_core_that_is_not_there_is_refused_by_name() {
        for core in [1_000_000, usize::MAX] {
            let error = pin_current_thread(core).expect_err("refused");
            assert!(error.to_string().contains(&format!("core {core} is not one")), "{error}");
        }
    }
}
