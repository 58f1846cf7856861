//! Cost of changes, counted: what a turn walks depends on the disks that there are, not on how many there
//! ever were, and the work of a change grows as the configuration does.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use spindle_nvme_tcp::controller::Conn;
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Pages, Pool, ZoneSpec};
use spindle_target::core::{CoreSettings, TargetCore};
use spindle_target::env::Message;
use spindle_target::shared::Registry;
use spindle_target::snapshot::Snapshot;
use spindle_target_disk::{ChannelContext, Disk, DiskChannel, Geometry, OpenError, ResizeError, Usage};

use super::*;
use crate::config::LocalDrives;

/// Snapshots by which core 1 is behind core 0.
const BEHIND: usize = 3;

fn next(plan: &Plan, previous: Option<&Snapshot>) -> Arc<Snapshot> {
    plan.snapshot(previous, &LocalDrives, &[]).unwrap_or_else(|error| panic!("{error}"))
}

fn core(core: usize, snapshot: &Arc<Snapshot>, registry: &Arc<Registry>) -> TargetCore<Conn> {
    let pool = || Pool::new(&[ZoneSpec { buffer_bytes: 8192, count: 1 }], Pages::Base).expect("a pool");
    let settings = CoreSettings {
        core,
        cores: 2,
        connections: 1,
        disk_depth: 8,
        pool: pool(),
        admin_pool: pool(),
        snapshot: Arc::clone(snapshot),
        registry: Arc::clone(registry),
        now: Nanos::ZERO,
        wall_ms: 0,
    };
    TargetCore::new(settings)
}

/// Delivers the messages between the cores.
fn exchange(cores: &mut [TargetCore<Conn>; 2]) {
    for from in [0, 1, 0] {
        while let Some((to, message)) = cores[from].next_message() {
            cores[to].on_message(message);
        }
    }
}

#[test]
fn a_hundred_thousand_disks_that_came_and_went_leave_the_table_as_long_as_it_was() {
    let without = plan(&[LISTENER, &null("a"), &subsystem("s", &["a"])].concat());
    let with = plan(&[LISTENER, &null("a"), &null("b"), &subsystem("s", &["a", "b"])].concat());
    let registry = Arc::new(Registry::default());
    let mut newest = next(&without, None);
    let mut cores = [0, 1].map(|at| core(at, &newest, &registry));
    let lengths = |newest: &Snapshot, cores: &[TargetCore<Conn>; 2]| {
        [newest.disks.len(), cores[0].disk_slots(), cores[1].disk_slots()]
    };
    let before = lengths(&newest, &cores);
    let mut late = VecDeque::new();
    for _ in 0..100_000 {
        for plan in [&with, &without] {
            newest = next(plan, Some(&newest));
            cores[0].on_message(Message::Snapshot(Arc::clone(&newest)));
            late.push_back(Arc::clone(&newest));
            if late.len() > BEHIND {
                cores[1].on_message(Message::Snapshot(late.pop_front().expect("one")));
            }
            exchange(&mut cores);
        }
        let most = 1 + BEHIND;
        assert!(
            lengths(&newest, &cores).iter().all(|length| *length <= most),
            "a slot for each that is late"
        );
    }
    for snapshot in late.drain(..) {
        cores[1].on_message(Message::Snapshot(snapshot));
        exchange(&mut cores);
    }
    newest = next(&without, Some(&newest));
    for core in &mut cores {
        core.on_message(Message::Snapshot(Arc::clone(&newest)));
    }
    assert_eq!(lengths(&newest, &cores), before);
}

/// A disk that counts how often it is asked for its name, which is what a search through all disks does.
struct Asked(Arc<dyn Disk>, Arc<AtomicU32>);

impl Disk for Asked {
    fn name(&self) -> &str {
        self.1.fetch_add(1, Ordering::Relaxed);
        self.0.name()
    }
    fn kind(&self) -> &'static str {
        self.0.kind()
    }
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }
    fn open(&self, context: &ChannelContext) -> Result<Box<dyn DiskChannel>, OpenError> {
        self.0.open(context)
    }
    fn resize(&self, bytes: u64) -> Result<(), ResizeError> {
        self.0.resize(bytes)
    }
    fn usage(&self) -> Usage {
        self.0.usage()
    }
}

/// Look-ups of names when one disk and its namespace are added to `count` disks.
fn name_lookups(count: usize) -> u32 {
    let names: Vec<_> = (0..=count).map(|at| format!("d{at}")).collect();
    let plan_of = |names: &[String]| {
        let disks: String = names.iter().map(|name| null(name)).collect();
        let names: Vec<_> = names.iter().map(String::as_str).collect();
        plan(&[LISTENER, &disks, &subsystem("s", &names)].concat())
    };
    let mut first = next(&plan_of(&names[..count]), None);
    let asked = Arc::new(AtomicU32::new(0));
    for disk in &mut Arc::get_mut(&mut first).expect("not shared").disks {
        *disk = disk.take().map(|disk| Arc::new(Asked(disk, Arc::clone(&asked))) as Arc<dyn Disk>);
    }
    let plan = plan_of(&names);
    let second = next(&plan, Some(&first));
    assert_eq!(second.subsystems[0].active().count(), count + 1);
    assert_eq!(plan.absent(Some(&second)), []);
    asked.load(Ordering::Relaxed)
}

#[test]
fn a_change_looks_at_each_disk_a_few_times_however_many_there_are() {
    let each = [8, 64, 512].map(|count| name_lookups(count).div_ceil(u32::try_from(count).expect("small")));
    assert!(each.iter().all(|times| *times <= 8), "{each:?} looks at each");
}
