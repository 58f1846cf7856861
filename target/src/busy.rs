//! [`Busy`]: time for which namespaces have commands in progress on this core, for the SMART log.
//!
//! ```text
//!   first command ──> watched ──> each turn with completed commands, or some at the disk: adds its time
//!                        └── no such turn in a timer period ──> not watched
//! ```
//!
//! The core's clock does not advance within a turn, so a turn with a command counts as a whole. A command
//! costs one load of the flag next to the counters that it writes; namespaces without commands cost nothing.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use spindle_disk::Disk;
use spindle_reactor::clock::Nanos;

use crate::counters::{self, IoCounters, NamespaceCounters};
use crate::env::Env;
use crate::snapshot::Namespace;

/// Initial capacity of [`Busy::watched`], in namespaces.
const WATCHED_CAPACITY: usize = 64;

/// A namespace with commands in this or the last timer period.
struct Watched {
    counters: Arc<NamespaceCounters>,
    /// Index of its disk in `Env::disks`.
    disk: usize,
    /// Reads and writes completed by the end of the last turn; `None`: watched since this turn.
    commands: Option<u64>,
    /// It was busy in this timer period.
    was_busy: bool,
}

/// Watched namespaces of one core.
pub(crate) struct Busy {
    core: usize,
    watched: Vec<Watched>,
}

impl Busy {
    pub(crate) fn new(core: usize) -> Busy {
        Busy { core, watched: Vec::with_capacity(WATCHED_CAPACITY) }
    }

    /// True when no namespace is watched.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.watched.is_empty()
    }

    #[cold]
    fn watch(&mut self, namespace: &Namespace) {
        let counters = Arc::clone(&namespace.counters);
        counters.core(self.core).is_watched.store(true, Ordering::Relaxed);
        self.watched.push(Watched {
            counters,
            disk: Env::disk_index(namespace.disk),
            commands: None,
            was_busy: true,
        });
    }

    /// Adds the length of the turn that ended to the busy time of namespaces that had commands in it.
    pub(crate) fn end_turn(&mut self, took: Nanos, disks: &[Option<Box<dyn Disk>>]) {
        for watched in &mut self.watched {
            let counters = watched.counters.core(self.core);
            let commands = Some(commands_of(counters));
            let is_at_disk =
                || disks.get(watched.disk).and_then(Option::as_ref).is_some_and(|disk| disk.in_flight() > 0);
            if watched.commands != commands || is_at_disk() {
                counters::add(&counters.busy_ns, took.as_u64());
                watched.was_busy = true;
            }
            watched.commands = commands;
        }
    }

    /// Stops to watch namespaces that were not busy since the last call.
    pub(crate) fn unwatch_idle(&mut self) {
        let core = self.core;
        self.watched.retain_mut(|watched| {
            let was_busy = std::mem::take(&mut watched.was_busy);
            if !was_busy {
                watched.counters.core(core).is_watched.store(false, Ordering::Relaxed);
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
    /// Watches a namespace that has a command. `counters` are those of the namespace on this core.
    #[inline]
    pub(crate) fn note_command(&mut self, namespace: &Namespace, counters: &IoCounters) {
        if !counters.is_watched.load(Ordering::Relaxed) {
            self.busy.watch(namespace);
        }
    }
}
