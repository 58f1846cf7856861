//! [`Busy`]: how long namespaces have commands at work on this core, for the SMART log.
//!
//! ```text
//!   first command ──> watched ──> each turn: commands counted in it, or at the disk ──> its time is added
//!                        └── none since the last look at time-outs ──> not watched
//! ```
//!
//! The clock is the core's, which stands still within a turn: a turn in which a command was done counts as a
//! whole. A command costs one look at the flag in the counters that it writes anyway; namespaces without
//! commands cost nothing.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use spindle_disk::Disk;
use spindle_reactor::clock::Nanos;

use crate::counters::{self, IoCounters, NamespaceCounters};
use crate::env::Env;
use crate::snapshot::Namespace;

/// Namespaces for which there is room from the start.
const WATCHED: usize = 64;

/// A namespace that has commands, or had some a moment ago.
struct Watched {
    counters: Arc<NamespaceCounters>,
    /// Of its disk, in `Env::disks`.
    disk: usize,
    /// Reads and writes at the end of the last turn; none: it is watched since this turn, for a command.
    commands: Option<u64>,
    /// Since the last look at time-outs.
    was_busy: bool,
}

/// Those of one core.
pub(crate) struct Busy {
    core: usize,
    watched: Vec<Watched>,
}

impl Busy {
    pub(crate) fn new(core: usize) -> Busy {
        Busy { core, watched: Vec::with_capacity(WATCHED) }
    }

    /// True when no namespace has commands.
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

    /// A turn has ended after so long.
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

    /// Those that had no command since the last call are not watched any more.
    pub(crate) fn let_go(&mut self) {
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
    /// The namespace has a command. `counters` are its own, of this core.
    #[inline]
    pub(crate) fn note_command(&mut self, namespace: &Namespace, counters: &IoCounters) {
        if !counters.is_watched.load(Ordering::Relaxed) {
            self.busy.watch(namespace);
        }
    }
}
