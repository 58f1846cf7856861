//! Absent drives, drives that come, and sizes, with drives of the emulator.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, MutexGuard, PoisonError, Weak};

use spindle_nvme_pcie::Settings;
use spindle_nvme_pcie::emulator::{Emulator, EmulatorSpec};

use super::*;

const FIRST: &str = "fffe:ff:1f.6";
const SECOND: &str = "fffe:ff:1f.7";
const GIVE_UP: Duration = Duration::from_secs(20);

/// What a drive does when it is opened.
#[derive(Clone)]
enum Opens {
    /// It is this one.
    As(Emulator),
    /// It waits for a word, and then fails.
    OnceTold(Arc<Mutex<Receiver<()>>>),
}

/// A machine's drives; only those in the map are there.
#[derive(Default)]
struct Bays {
    drives: Mutex<BTreeMap<PciAddress, Opens>>,
    /// As [`Drives::here`](spindle_nvme_pcie::Drives::here) has them: a drive is open while somebody has it.
    open: Mutex<BTreeMap<PciAddress, Weak<Drive>>>,
    asked: AtomicUsize,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Bays {
    fn plug(&self, address: &str, opens: Opens) {
        locked(&self.drives).insert(address.parse().expect("an address"), opens);
    }

    /// How often a drive was asked for that was not open.
    fn asked(&self) -> usize {
        self.asked.load(Ordering::Relaxed)
    }
}

impl DriveSource for Bays {
    fn is_there(&self, address: PciAddress) -> bool {
        locked(&self.drives).contains_key(&address)
    }

    fn open(&self, address: PciAddress) -> Result<Arc<Drive>, DriveError> {
        if let Some(drive) = locked(&self.open).get(&address).and_then(Weak::upgrade) {
            return Ok(drive);
        }
        self.asked.fetch_add(1, Ordering::Relaxed);
        let drive = locked(&self.drives).get(&address).cloned();
        let absent =
            |why: &str| DriveError { address: address.to_string(), why: why.to_owned(), is_absent: true };
        match drive {
            None => Err(absent("there is none")),
            Some(Opens::OnceTold(word)) => {
                let _ = locked(&word).recv();
                Err(absent("it does not become ready"))
            }
            Some(Opens::As(emulator)) => {
                let drive = Drive::open(Arc::new(emulator), Settings::default())?;
                locked(&self.open).insert(address, Arc::downgrade(&drive));
                Ok(drive)
            }
        }
    }
}

/// A drive that somebody steps.
struct Stepped {
    emulator: Emulator,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Stepped {
    fn new() -> Stepped {
        let emulator = Emulator::new(EmulatorSpec::default());
        let stop = Arc::new(AtomicBool::new(false));
        let (its, drive) = (Arc::clone(&stop), emulator.clone());
        let thread = std::thread::spawn(move || {
            while !its.load(Ordering::Relaxed) {
                drive.step();
                std::thread::yield_now();
            }
        });
        Stepped { emulator, stop, thread: Some(thread) }
    }
}

impl Drop for Stepped {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Namespace 1 is a RAM disk, 2 and so on are these drives and their namespaces.
fn config(drives: &[(&str, u32)]) -> Config {
    let mut disks = "[[disk]]\nname = \"d1\"\nkind = \"ram\"\nsize = \"1MiB\"\n".to_owned();
    let mut namespaces = "[[subsystem.namespace]]\nnsid = 1\ndisk = \"d1\"\n".to_owned();
    for ((address, namespace), nsid) in drives.iter().zip(2..) {
        disks.push_str(&format!(
            "[[disk]]\nname = \"d{nsid}\"\nnvme = \"{address}\"\nnamespace = {namespace}\n"
        ));
        namespaces.push_str(&format!("[[subsystem.namespace]]\nnsid = {nsid}\ndisk = \"d{nsid}\"\n"));
    }
    Config::of(&format!(
        "[[listener]]\naddress = \"127.0.0.1:4420\"\n{disks}\
         [[subsystem]]\nnqn = \"nqn.2026-01.test:served\"\nallow_any_host = true\n{namespaces}"
    ))
}

fn served(bays: &Arc<Bays>, drives: &[(&str, u32)]) -> Served {
    let config = config(drives);
    let drives: Arc<dyn DriveSource> = Arc::clone(bays) as _;
    let snapshot = config.plan().snapshot(None, &*drives, &[]).unwrap_or_else(|error| panic!("{error}"));
    Served::new(config, snapshot, drives, Vec::new())
}

fn nsids(snapshot: &Snapshot) -> Vec<u32> {
    snapshot.subsystems[0].active().map(|namespace| namespace.nsid).collect()
}

/// Until something is so.
fn wait(mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + GIVE_UP;
    while !is_so() {
        assert!(Instant::now() < end, "nothing came of it");
        std::thread::yield_now();
    }
}

/// Look until there is another snapshot.
fn look_until_changed(served: &mut Served, now: Instant) -> Arc<Snapshot> {
    let mut next = None;
    wait(|| {
        next = served.look(now);
        next.is_some()
    });
    next.expect("there is one")
}

/// Look until all tries have come to an end, which changes nothing.
fn look_until_tried(served: &mut Served, now: Instant) {
    wait(|| {
        assert!(served.look(now).is_none());
        served.tries.iter().all(|tried| tried.thread.is_none())
    });
}

/// Let go of all drives before they are not stepped any more.
fn finish(served: Served) {
    drop(served);
    spindle_nvme_pcie::finish();
}

#[test]
fn drives_that_come_are_taken_up_and_those_that_do_not_are_not_asked_for() {
    let bays = Arc::new(Bays::default());
    let mut served = served(&bays, &[(FIRST, 1), (SECOND, 1)]);
    let now = Instant::now();
    assert_eq!((nsids(&served.snapshot), bays.asked()), (vec![1], 2));
    assert!(served.look(now).is_none());
    assert_eq!((bays.asked(), served.pause()), (2, LOOK_PERIOD), "nothing is there to be opened");

    let drive = Stepped::new();
    bays.plug(SECOND, Opens::As(drive.emulator.clone()));
    let next = look_until_changed(&mut served, now);
    assert_eq!((nsids(&next), next.generation), (vec![1, 3], 2));
    assert_eq!(bays.asked(), 3, "once, and the other one is not there");
    assert!(served.look(now).is_none(), "once");
    finish(served);
}

#[test]
fn a_drive_that_takes_for_ever_holds_up_neither_a_look_nor_the_other_drive_nor_sizes() {
    let bays = Arc::new(Bays::default());
    let mut served = served(&bays, &[(FIRST, 1), (SECOND, 1)]);
    let now = Instant::now();
    let (told, word): (Sender<()>, _) = channel();
    bays.plug(FIRST, Opens::OnceTold(Arc::new(Mutex::new(word))));
    assert!(served.look(now).is_none());
    wait(|| bays.asked() == 3);
    assert!(served.is_opening());

    let drive = Stepped::new();
    bays.plug(SECOND, Opens::As(drive.emulator.clone()));
    assert_eq!(nsids(&look_until_changed(&mut served, now)), [1, 3]);
    let blocks = served.snapshot.subsystems[0].namespace(3).expect("there").geometry.block_count;
    drive.emulator.set_namespace_blocks(1, blocks * 2);
    let next = look_until_changed(&mut served, now);
    assert_eq!(next.subsystems[0].namespace(3).expect("there").geometry.block_count, blocks * 2);
    assert_eq!((bays.asked(), served.pause()), (4, OPENING_PERIOD), "one thread for a drive");

    // It fails at last, and has a minute from then on to mend itself.
    told.send(()).expect("it waits");
    let later = now + 2 * AGAIN;
    look_until_tried(&mut served, later);
    assert!(served.look(later + AGAIN - Duration::from_secs(1)).is_none());
    assert!(served.tries[0].thread.is_none(), "not so soon");
    assert!(served.look(later + AGAIN).is_none());
    assert!(served.tries[0].thread.is_some(), "again");
    drop(told);
    look_until_tried(&mut served, later + AGAIN);
    assert_eq!(bays.asked(), 5);
    finish(served);
}

#[test]
fn why_a_new_size_cannot_be_served_is_known_until_it_can() {
    let bays = Arc::new(Bays::default());
    let drive = Stepped::new();
    bays.plug(FIRST, Opens::As(drive.emulator.clone()));
    let mut served = served(&bays, &[(FIRST, 1)]);
    let now = Instant::now();
    let blocks = served.snapshot.subsystems[0].namespace(2).expect("there").geometry.block_count;
    let right = std::mem::replace(&mut served.config, Config::of(&OF_ANOTHER_KIND.replace("FIRST", FIRST)));
    drive.emulator.set_namespace_blocks(1, blocks * 2);
    wait(|| {
        assert!(served.look(now).is_none());
        !served.why.is_empty()
    });
    assert!(served.why.contains("d1"), "{}", served.why);
    // The drive takes it back: there is nothing to say, and if it comes again it is said again.
    drive.emulator.set_namespace_blocks(1, blocks);
    wait(|| {
        assert!(served.look(now).is_none());
        served.why.is_empty()
    });
    served.config = right;
    drive.emulator.set_namespace_blocks(1, blocks * 2);
    let next = look_until_changed(&mut served, now);
    assert_eq!(next.subsystems[0].namespace(2).expect("there").geometry.block_count, blocks * 2);
    assert_eq!(served.why, "");
    finish(served);
}

/// The same with a disk `d1` that is none of memory.
const OF_ANOTHER_KIND: &str = r#"
[[listener]]
address = "127.0.0.1:4420"
[[disk]]
name = "d1"
kind = "null"
size = "1MiB"
[[disk]]
name = "d2"
nvme = "FIRST"
namespace = 1
[[subsystem]]
nqn = "nqn.2026-01.test:served"
allow_any_host = true
[[subsystem.namespace]]
nsid = 1
disk = "d1"
[[subsystem.namespace]]
nsid = 2
disk = "d2"
"#;

#[test]
fn a_drive_without_its_namespace_is_not_the_others_harm() {
    let bays = Arc::new(Bays::default());
    let mut served = served(&bays, &[(FIRST, 9), (SECOND, 1)]);
    let now = Instant::now();
    let drives = [Stepped::new(), Stepped::new()];
    for (address, drive) in [FIRST, SECOND].into_iter().zip(&drives) {
        bays.plug(address, Opens::As(drive.emulator.clone()));
    }
    assert_eq!(nsids(&look_until_changed(&mut served, now)), [1, 3]);
    look_until_tried(&mut served, now);
    assert!(served.tries[0].why.contains("namespace = 9"), "{}", served.tries[0].why);
    assert_eq!(nsids(&served.snapshot), [1, 3]);
    finish(served);
}

#[test]
fn a_drive_that_is_taken_out_of_the_file_while_it_is_opened_is_let_go() {
    let bays = Arc::new(Bays::default());
    let mut served = served(&bays, &[(FIRST, 1)]);
    let now = Instant::now();
    let drive = Stepped::new();
    bays.plug(FIRST, Opens::As(drive.emulator.clone()));
    assert!(served.look(now).is_none());
    served.config = config(&[]);
    look_until_tried(&mut served, now);
    wait(|| !drive.emulator.is_open());
    assert!(served.tries.is_empty());
    assert_eq!(served.snapshot.generation, 1);
    finish(served);
}
