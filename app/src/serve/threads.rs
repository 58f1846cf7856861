//! Whether the process may have the threads that it needs, its own and those with which io_uring executes
//! commands of files. Without the latter, the kernel ends such commands with an error.

use std::sync::{Arc, Mutex, PoisonError};

use crate::config::{DiskKind, Plan};
use crate::log::THREADS_HINT as HINT;

/// Threads besides those of the cores: control socket, registrar, signals, release, used space of files.
const OTHERS: usize = 5;
/// io_uring has two kinds of threads for each ring.
const WORKERS_OF_A_RING: usize = 2;
/// Stack of a thread that only waits, in bytes.
const STACK_BYTES: usize = 64 << 10;

/// Starts as many threads as the plan needs at least, and ends them.
///
/// # Errors
/// They cannot be started; the text says how many are needed, and for what.
pub fn check(plan: &Plan) -> Result<(), String> {
    let (cores, workers) = (plan.reactor.cores.len(), workers(plan));
    start(cores + OTHERS + workers).map_err(|error| {
        format!(
            "the process cannot have the {} threads that it needs ({cores} of cores, {OTHERS} others, \
             {workers} of io_uring for disks of kind file and ng): {error}; {HINT}",
            cores + OTHERS + workers
        )
    })
}

/// As [`check`], for a change from `before` that adds the first disk which needs threads of io_uring.
///
/// # Errors
/// As of [`check`].
pub fn check_change(before: &Plan, next: &Plan) -> Result<(), String> {
    let workers = if workers(before) == 0 { workers(next) } else { 0 };
    start(workers).map_err(|error| {
        format!(
            "the process cannot have {workers} more threads, which io_uring needs for disks of kind file and \
             ng: {error}; {HINT}"
        )
    })
}

fn workers(plan: &Plan) -> usize {
    let needs_ring = |kind: &DiskKind| matches!(kind, DiskKind::File { .. } | DiskKind::Ng { .. });
    let is_needed = plan.disks.iter().any(|disk| needs_ring(&disk.kind));
    if is_needed { plan.reactor.cores.len() * WORKERS_OF_A_RING } else { 0 }
}

/// Starts `count` threads that are there at the same time, and ends them.
fn start(count: usize) -> std::io::Result<()> {
    let gate = Arc::new(Mutex::new(()));
    let closed = gate.lock().unwrap_or_else(PoisonError::into_inner);
    let spawn = |_| {
        let gate = Arc::clone(&gate);
        let wait = move || drop(gate.lock());
        std::thread::Builder::new().name("probe".to_owned()).stack_size(STACK_BYTES).spawn(wait)
    };
    let (mut threads, mut outcome) = (Vec::with_capacity(count), Ok(()));
    for thread in (0..count).map(spawn) {
        match thread {
            Ok(thread) => threads.push(thread),
            Err(error) => {
                outcome = Err(error);
                break;
            }
        }
    }
    drop(closed);
    threads.into_iter().for_each(|thread| drop(thread.join()));
    outcome
}
