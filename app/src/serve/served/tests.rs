//! Absent drives, drives that come, and sizes, with drives of the emulator.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError};

use spindle_nvme_pcie::emulator::{Emulator, EmulatorSpec};
use spindle_nvme_pcie::{DriveError, Settings};

use super::*;

const FIRST: &str = "fffe:ff:1f.6";
const SECOND: &str = "fffe:ff:1f.7";
const GIVE_UP: Duration = Duration::from_secs(20);

/// What a drive does when it is opened.
enum Opens {
    /// It is this one.
    As(Emulator),
    /// It waits for a word, and then fails.
    OnceTold(Receiver<()>),
}

/// A machine's drives; only those in the map are there.
#[derive(Default)]
struct Bays {
    drives: Mutex<BTreeMap<PciAddress, Opens>>,
    /// Those that are open stay so, as [`Drives::here`](spindle_nvme_pcie::Drives::here) has them.
    open: Mutex<BTreeMap<PciAddress, Arc<Drive>>>,
    asked: AtomicUsize,
}

impl Bays {
    fn plug(&self, address: &str, opens: Opens) {
        let address = address.parse().expect("an address");
        self.drives.lock().unwrap_or_else(PoisonError::into_inner).insert(address, opens);
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::Relaxed)
    }
}

impl DriveSource for Bays {
    fn is_there(&self, address: PciAddress) -> bool {
        self.drives.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&address)
    }

    fn open(&self, address: PciAddress) -> Result<Arc<Drive>, DriveError> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(drive) = open.get(&address) {
            return Ok(Arc::clone(drive));
        }
        self.asked.fetch_add(1, Ordering::Relaxed);
        let drive = self.drives.lock().unwrap_or_else(PoisonError::into_inner).remove(&address);
        let absent =
            |why: &str| DriveError { address: address.to_string(), why: why.to_owned(), is_absent: true };
        match drive {
            None => Err(absent("there is none")),
            Some(Opens::OnceTold(word)) => {
                drop(open);
                let _ = word.recv();
                self.plug(&address.to_string(), Opens::OnceTold(word));
                Err(absent("it does not become ready"))
            }
            Some(Opens::As(emulator)) => {
                let drive = Drive::open(Arc::new(emulator.clone()), Settings::default())?;
                open.insert(address, Arc::clone(&drive));
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

/// Namespace 1 is a RAM disk, 2 and 3 are drives.
fn served(bays: &Arc<Bays>) -> Served {
    let mut text = "[[listener]]\naddress = \"127.0.0.1:4420\"\n[[disk]]\nname = \"ram\"\nkind = \"ram\"\n\
                    size = \"1MiB\"\n"
        .to_owned();
    for (name, address) in [("first", FIRST), ("second", SECOND)] {
        text.push_str(&format!("[[disk]]\nname = \"{name}\"\nnvme = \"{address}\"\n"));
    }
    text.push_str("[[subsystem]]\nnqn = \"nqn.2026-01.test:served\"\nallow_any_host = true\n");
    for (index, disk) in ["ram", "first", "second"].iter().enumerate() {
        text.push_str(&format!("[[subsystem.namespace]]\nnsid = {}\ndisk = \"{disk}\"\n", index + 1));
    }
    let config = Config::of(&text);
    let drives: Arc<dyn DriveSource> = Arc::clone(bays) as _;
    let snapshot = config.plan().snapshot(None, &*drives, &[]).unwrap_or_else(|error| panic!("{error}"));
    Served::new(config, snapshot, drives)
}

fn nsids(snapshot: &Snapshot) -> Vec<u32> {
    snapshot.subsystems[0].active().map(|namespace| namespace.nsid).collect()
}

/// Look until there is another snapshot.
fn look_until_changed(served: &mut Served, now: Instant) -> Arc<Snapshot> {
    let end = Instant::now() + GIVE_UP;
    loop {
        if let Some(next) = served.look(now) {
            return next;
        }
        assert!(Instant::now() < end, "nothing came of it");
        std::thread::yield_now();
    }
}

/// Let go of all drives before they are not stepped any more.
fn finish(served: Served, bays: &Bays) {
    drop(served);
    bays.open.lock().unwrap_or_else(PoisonError::into_inner).clear();
    spindle_nvme_pcie::finish();
}

#[test]
fn drives_that_come_are_taken_up_and_those_that_do_not_are_not_asked_for() {
    let bays = Arc::new(Bays::default());
    let mut served = served(&bays);
    let now = Instant::now();
    assert_eq!((nsids(&served.snapshot), bays.asked()), (vec![1], 2));
    assert!(served.look(now).is_none());
    assert_eq!(bays.asked(), 2, "nothing is there to be opened");

    let drive = Stepped::new();
    bays.plug(SECOND, Opens::As(drive.emulator.clone()));
    let next = look_until_changed(&mut served, now);
    assert_eq!((nsids(&next), next.generation), (vec![1, 3], 2));
    assert_eq!(bays.asked(), 3, "the other one is not there");
    assert!(served.look(now).is_none(), "once");
    finish(served, &bays);
}

#[test]
fn a_drive_that_takes_for_ever_holds_up_neither_a_look_nor_the_other_drive_nor_sizes() {
    let bays = Arc::new(Bays::default());
    let mut served = served(&bays);
    let now = Instant::now();
    let (told, word): (Sender<()>, _) = channel();
    bays.plug(FIRST, Opens::OnceTold(word));
    let asked = bays.asked() + 1;
    assert!(served.look(now).is_none());
    while bays.asked() < asked {
        std::thread::yield_now();
    }

    let drive = Stepped::new();
    bays.plug(SECOND, Opens::As(drive.emulator.clone()));
    assert_eq!(nsids(&look_until_changed(&mut served, now)), [1, 3]);
    let blocks = served.snapshot.subsystems[0].namespace(3).expect("there").geometry.block_count;
    drive.emulator.set_namespace_blocks(1, blocks * 2);
    let next = look_until_changed(&mut served, now);
    assert_eq!(next.subsystems[0].namespace(3).expect("there").geometry.block_count, blocks * 2);

    // It fails at last, and has a minute to mend itself.
    let asked = bays.asked();
    told.send(()).expect("it waits");
    let end = Instant::now() + GIVE_UP;
    while served.tries.iter().any(|tried| tried.thread.is_some()) {
        assert!(served.look(now).is_none());
        assert!(Instant::now() < end, "it has not failed");
        std::thread::yield_now();
    }
    assert!(served.look(now + AGAIN - Duration::from_secs(1)).is_none());
    assert_eq!((bays.asked(), served.tries.len()), (asked, 1), "not asked again so soon");
    assert!(served.look(now + AGAIN).is_none());
    assert!(served.tries.iter().any(|tried| tried.thread.is_some()), "asked again");
    drop(told);
    finish(served, &bays);
}
