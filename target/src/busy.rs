//! [`Busy`]: time for which namespaces have commands in progress on this core, for the SMART log.
//!
//! ```text
//!   first command ──> active ──> each turn with completed commands, or some at the disk: adds its time
//!                        └── no such turn in a timer period ──> not active
//! ```
//!
//! The core's clock does not advance within a turn, so a turn with a command counts with its whole length. A
//! command costs one load of a flag next to the counters that the command writes. Namespaces without commands
//! cost nothing.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use spindle_reactor::clock::Nanos;
use spindle_target_disk::DiskChannel;

use crate::counters::{self, IoCounters, NamespaceCounters};
use crate::env::{Env, NO_DISK};
use crate::snapshot::Namespace;

/// Initial capacity of [`Busy::active`], in namespaces.
const ACTIVE_CAPACITY: usize = 64;

/// A namespace with commands in this or the last timer period.
struct ActiveNamespace {
    counters: Arc<NamespaceCounters>,
    /// Index of the namespace's disk in `Env::disks`.
    disk: usize,
    /// Number of reads and writes completed by the end of the last turn; `None`: active since this turn.
    commands: Option<u64>,
    /// True if the namespace had commands in this timer period.
    was_busy: bool,
}

pub(crate) struct Busy {
    core: usize,
    active: Vec<ActiveNamespace>,
}

impl Busy {
    pub(crate) fn new(core: usize) -> Busy {
        Busy { core, active: Vec::with_capacity(ACTIVE_CAPACITY) }
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.active.is_empty()
    }

    #[cold]
    fn add(&mut self, namespace: &Namespace) {
        let counters = Arc::clone(&namespace.counters);
        counters.core(self.core).is_active.store(true, Ordering::Relaxed);
        self.active.push(ActiveNamespace {
            counters,
            disk: Env::disk_index(namespace.disk),
            commands: None,
            was_busy: true,
        });
    }

    /// Forgets the disks that are closed.
    pub(crate) fn forget_disks(&mut self, is_closed: impl Fn(usize) -> bool) {
        for namespace in self.active.iter_mut().filter(|namespace| is_closed(namespace.disk)) {
            namespace.disk = NO_DISK;
        }
    }

    /// Adds `took`, the length of the turn that ended, to the busy time of each busy namespace. A namespace
    /// is busy if it completed commands in the turn, or its disk has commands of this core.
    pub(crate) fn end_turn(&mut self, took: Nanos, disks: &[Option<Box<dyn DiskChannel>>]) {
        for namespace in &mut self.active {
            let counters = namespace.counters.core(self.core);
            let commands = Some(commands_of(counters));
            let is_at_disk = || {
                disks.get(namespace.disk).and_then(Option::as_ref).is_some_and(|disk| disk.in_flight() > 0)
            };
            if namespace.commands != commands || is_at_disk() {
                counters::add(&counters.busy_ns, took.as_u64());
                namespace.was_busy = true;
            }
            namespace.commands = commands;
        }
    }

    /// Removes the namespaces that had no commands since the last call.
    pub(crate) fn remove_idle(&mut self) {
        let core = self.core;
        self.active.retain_mut(|namespace| {
            let was_busy = std::mem::take(&mut namespace.was_busy);
            if !was_busy {
                namespace.counters.core(core).is_active.store(false, Ordering::Relaxed);
            }
            was_busy
        });
    }
}

fn commands_of(counters: &IoCounters) -> u64 {
    let [reads, writes] = [&counters.reads, &counters.writes].map(|n| n.load(Ordering::Relaxed));
    reads.wrapping_add(writes)
}

impl Env {
    /// Marks the namespace of a command as active. `counters`: those of `namespace` on this core.
    #[inline]
    pub(crate) fn note_command(&mut self, namespace: &Namespace, counters: &IoCounters) {
        if !counters.is_active.load(Ordering::Relaxed) {
            self.busy.add(namespace);
        }
    }
}
