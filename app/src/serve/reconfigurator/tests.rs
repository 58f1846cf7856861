//! What is absent, what comes, and sizes, with drives of the emulator and far targets that are none.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;

use spindle_nvme_pcie::{Drive, DriveError, Settings};
use spindle_target_disk::{
    ChannelContext, Disk, DiskChannel, Geometry, NullDisk, NullSpec, OpenError, ResizeError, Usage,
};
use spindle_tests_emulator::{Emulator, EmulatorSpec};

use super::open_attempts::{CHECK_PERIOD, DRIVE_RETRY_PERIOD, OPENING_CHECK_PERIOD, REMOTE_RETRY_PERIOD};
use super::*;
use crate::config::{DriveSource, RemotePlan};

mod paths;
mod refusals;

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
    fn is_present(&self, address: PciAddress) -> bool {
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

/// A namespace of another target.
struct FarDisk {
    disk: Arc<dyn Disk>,
    is_read_only: Arc<AtomicBool>,
}

impl Disk for FarDisk {
    fn name(&self) -> &str {
        self.disk.name()
    }

    fn kind(&self) -> &'static str {
        "remote"
    }

    fn geometry(&self) -> Geometry {
        Geometry { is_read_only: self.is_read_only.load(Ordering::Relaxed), ..self.disk.geometry() }
    }

    fn open(&self, context: &ChannelContext) -> Result<Box<dyn DiskChannel>, OpenError> {
        self.disk.open(context)
    }

    fn resize(&self, bytes: u64) -> Result<(), ResizeError> {
        panic!("{bytes} bytes: the size is the far target's to change")
    }

    fn usage(&self) -> Usage {
        self.disk.usage()
    }

    fn identity_seed(&self) -> Option<String> {
        Some("a far disk".to_owned())
    }
}

/// What a far target does when it is asked for a disk.
#[derive(Clone)]
enum Answers {
    /// It refuses, for this reason.
    No(&'static str),
    /// It has it.
    Yes,
    /// The same, once it is told or the sender is gone.
    OnceTold(Arc<Mutex<Receiver<()>>>),
}

/// The far targets, by the names of their disks.
#[derive(Default)]
struct FarTargets {
    answers: Mutex<BTreeMap<String, Answers>>,
    asked: AtomicUsize,
    is_read_only: Arc<AtomicBool>,
    /// Disks that were made.
    disks: Mutex<Vec<Weak<dyn Disk>>>,
}

impl FarTargets {
    fn now(&self, disk: &str, answers: Answers) {
        locked(&self.answers).insert(disk.to_owned(), answers);
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::Relaxed)
    }

    fn open(&self, plan: &RemotePlan) -> Result<Arc<dyn Disk>, SnapshotError> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        let answers = locked(&self.answers).get(&plan.name).cloned();
        match answers.unwrap_or(Answers::No("refused")) {
            Answers::No(why) => return Err(Origin::Remote(Box::new(plan.clone())).failed(why)),
            Answers::Yes => {}
            Answers::OnceTold(word) => drop(locked(&word).recv()),
        }
        let disk = NullDisk::new(&plan.name, NullSpec { bytes: 1 << 20, block_bytes: 512 })?;
        locked(&self.disks).push(Arc::downgrade(&disk));
        Ok(Arc::new(FarDisk { disk, is_read_only: Arc::clone(&self.is_read_only) }))
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
    let lines =
        |(address, namespace): &(&str, u32)| format!("nvme = \"{address}\"\nnamespace = {namespace}\n");
    config_of(&drives.iter().map(lines).collect::<Vec<_>>())
}

/// The same with disks of other targets.
fn config_of_remotes(hosts: &[u8]) -> Config {
    let lines = |host: &u8| {
        let far = "nqn = \"nqn.2026-01.test:far\"\n";
        format!("kind = \"remote\"\naddress = \"192.0.2.{host}:4420\"\n{far}")
    };
    config_of(&hosts.iter().map(lines).collect::<Vec<_>>())
}

fn config_of(more: &[String]) -> Config {
    let mut disks = "[[disk]]\nname = \"d1\"\nkind = \"ram\"\nsize = \"1MiB\"\n".to_owned();
    let mut namespaces = "[[subsystem.namespace]]\nnsid = 1\ndisk = \"d1\"\n".to_owned();
    for (lines, nsid) in more.iter().zip(2..) {
        disks.push_str(&format!("[[disk]]\nname = \"d{nsid}\"\n{lines}"));
        namespaces.push_str(&format!("[[subsystem.namespace]]\nnsid = {nsid}\ndisk = \"d{nsid}\"\n"));
    }
    Config::of(&format!(
        "[[listener]]\naddress = \"127.0.0.1:4420\"\n{disks}\
         [[subsystem]]\nnqn = \"nqn.2026-01.test:served\"\nallow_any_host = true\n{namespaces}"
    ))
}

fn served(bays: &Arc<Bays>, drives: &[(&str, u32)]) -> Reconfigurator {
    let drives_there: Arc<dyn DriveSource> = Arc::clone(bays) as _;
    let origins =
        Origins { drives: drives_there, remote: Arc::new(|_: &RemotePlan| panic!("there is none")) };
    Reconfigurator::open(config(drives), origins, false).unwrap_or_else(|error| panic!("{error}"))
}

fn served_remotes(targets: &Arc<FarTargets>, hosts: &[u8]) -> Reconfigurator {
    let its = Arc::clone(targets);
    let remote = Arc::new(move |plan: &RemotePlan| its.open(plan));
    let origins = Origins { drives: Arc::new(Bays::default()), remote };
    Reconfigurator::open(config_of_remotes(hosts), origins, false).unwrap_or_else(|error| panic!("{error}"))
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
fn look_until_changed(served: &mut Reconfigurator, now: Instant) -> Arc<Snapshot> {
    let mut next = None;
    wait(|| {
        next = served.poll(now);
        next.is_some()
    });
    next.expect("there is one")
}

/// Look until all attempts have come to an end, which changes nothing.
fn look_until_tried(served: &mut Reconfigurator, now: Instant) {
    wait(|| {
        assert!(served.poll(now).is_none());
        served.attempts.opening().next().is_none()
    });
}

/// Let go of all drives before they are not stepped any more.
fn finish(served: Reconfigurator) {
    drop(served);
    spindle_nvme_pcie::finish();
}

#[test]
fn memory_of_a_removed_disk_is_counted_until_nothing_keeps_it() {
    let ram = |name: &str| format!("[[disk]]\nname = {name:?}\nkind = \"ram\"\nsize = \"1MiB\"\n");
    let config = |disks: &str| Config::of(&format!("[[listener]]\naddress = \"127.0.0.1:4420\"\n{disks}"));
    let origins = Origins {
        drives: Arc::new(Bays::default()),
        remote: Arc::new(|_: &RemotePlan| panic!("there is none")),
    };
    let both = config(&(ram("stays") + &ram("goes")));
    let mut served = Reconfigurator::open(both, origins, false).unwrap_or_else(|error| panic!("{error}"));
    // As a device that has it registered: all of it is in memory.
    let former = Arc::clone(served.snapshot());
    let area = former.disks[1].as_ref().and_then(|disk| disk.area()).expect("a RAM disk has memory");
    drop(former);
    let _ = area.collapse_to_huge();
    served.apply(config(&ram("stays")), &LogControl::unread(), &mut || Ok(())).expect("applied");
    assert!(served.retired.resident().ordinary >= 1 << 20, "the registration keeps it");
    drop(area);
    // Another thread unmaps it.
    let end = Instant::now() + Duration::from_secs(20);
    while served.retired.resident().ordinary > 0 {
        assert!(Instant::now() < end, "it is not given back");
        std::thread::yield_now();
    }
}

#[test]
fn drives_that_come_are_taken_up_and_those_that_do_not_are_not_asked_for() {
    let bays = Arc::new(Bays::default());
    let mut served = served(&bays, &[(FIRST, 1), (SECOND, 1)]);
    let now = Instant::now();
    assert_eq!((nsids(&served.snapshot), bays.asked()), (vec![1], 2));
    assert!(served.poll(now).is_none());
    assert_eq!((bays.asked(), served.pause()), (2, CHECK_PERIOD), "nothing is there to be opened");

    let drive = Stepped::new();
    bays.plug(SECOND, Opens::As(drive.emulator.clone()));
    let next = look_until_changed(&mut served, now);
    assert_eq!((nsids(&next), next.generation), (vec![1, 3], 2));
    assert_eq!(bays.asked(), 3, "once, and the other one is not there");
    assert!(served.poll(now).is_none(), "once");
    finish(served);
}

#[test]
fn a_drive_whose_open_hangs_delays_neither_polls_nor_other_drives_nor_resizes() {
    let bays = Arc::new(Bays::default());
    let mut served = served(&bays, &[(FIRST, 1), (SECOND, 1)]);
    let now = Instant::now();
    let (told, word): (Sender<()>, _) = channel();
    bays.plug(FIRST, Opens::OnceTold(Arc::new(Mutex::new(word))));
    assert!(served.poll(now).is_none());
    wait(|| bays.asked() == 3);
    assert!(served.is_opening_drives());

    let drive = Stepped::new();
    bays.plug(SECOND, Opens::As(drive.emulator.clone()));
    assert_eq!(nsids(&look_until_changed(&mut served, now)), [1, 3]);
    let blocks = served.snapshot.subsystems[0].namespace(3).expect("there").geometry.block_count;
    drive.emulator.set_namespace_blocks(1, blocks * 2);
    let next = look_until_changed(&mut served, now);
    assert_eq!(next.subsystems[0].namespace(3).expect("there").geometry.block_count, blocks * 2);
    assert_eq!((bays.asked(), served.pause()), (4, OPENING_CHECK_PERIOD), "one thread for a drive");

    // It fails at last, and has a minute from then on to mend itself.
    told.send(()).expect("it waits");
    let later = now + 2 * DRIVE_RETRY_PERIOD;
    look_until_tried(&mut served, later);
    assert!(served.poll(later + DRIVE_RETRY_PERIOD - Duration::from_secs(1)).is_none());
    assert_eq!(served.attempts.opening().count(), 0, "not so soon");
    assert!(served.poll(later + DRIVE_RETRY_PERIOD).is_none());
    assert_eq!(served.attempts.opening().count(), 1, "again");
    drop(told);
    look_until_tried(&mut served, later + DRIVE_RETRY_PERIOD);
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
    let another = format!("nvme = \"{FIRST}\"\nnamespace = 1\nmedium_id = \"another\"\n");
    let right = std::mem::replace(&mut served.config, config_of(&[another]));
    drive.emulator.set_namespace_blocks(1, blocks * 2);
    wait(|| {
        assert!(served.poll(now).is_none());
        !served.size_error.is_empty()
    });
    assert!(served.size_error.contains("another"), "{}", served.size_error);
    // The drive takes it back: there is nothing to say, and if it comes again it is said again.
    drive.emulator.set_namespace_blocks(1, blocks);
    wait(|| {
        assert!(served.poll(now).is_none());
        served.size_error.is_empty()
    });
    served.config = right;
    drive.emulator.set_namespace_blocks(1, blocks * 2);
    let next = look_until_changed(&mut served, now);
    assert_eq!(next.subsystems[0].namespace(2).expect("there").geometry.block_count, blocks * 2);
    assert_eq!(served.size_error, "");
    finish(served);
}

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
    let told = served.attempts.logged();
    assert!(told.iter().any(|why| why.contains("namespace = 9")), "{told:?}");
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
    assert!(served.poll(now).is_none());
    served.config = config(&[]);
    look_until_tried(&mut served, now);
    wait(|| !drive.emulator.is_open());
    assert_eq!(served.snapshot.generation, 1);
    finish(served);
}

/// Drives that do not answer before all of them are asked.
struct Together(Mutex<usize>, std::sync::Condvar);

impl DriveSource for Together {
    fn is_present(&self, _: PciAddress) -> bool {
        true
    }

    fn open(&self, address: PciAddress) -> Result<Arc<Drive>, DriveError> {
        let mut asked = locked(&self.0);
        *asked += 1;
        self.1.notify_all();
        let asked = self.1.wait_timeout_while(asked, GIVE_UP, |asked| *asked < 2);
        let (asked, _) = asked.unwrap_or_else(PoisonError::into_inner);
        Err(DriveError { address: address.to_string(), why: format!("one of {asked}"), is_absent: true })
    }
}

#[test]
fn the_start_opens_drives_at_once_and_each_once() {
    let drives = Arc::new(Together(Mutex::default(), std::sync::Condvar::new()));
    let origins = Origins { drives: Arc::clone(&drives) as _, ..Origins::here() };
    let served =
        Reconfigurator::open(config(&[(FIRST, 1), (SECOND, 1), (FIRST, 2)]), origins, false).expect("opened");
    assert_eq!((nsids(&served.snapshot), *locked(&drives.0)), (vec![1], 2));
    let told = served.attempts.logged();
    assert!(told.len() == 2 && told.iter().all(|why| why.contains("one of 2")), "{told:?}");
}

#[test]
fn what_stands_in_the_way_of_a_drive_ends_the_start() {
    struct InUse;
    impl DriveSource for InUse {
        fn is_present(&self, _: PciAddress) -> bool {
            true
        }

        fn open(&self, address: PciAddress) -> Result<Arc<Drive>, DriveError> {
            Err(DriveError { address: address.to_string(), why: "in use".to_owned(), is_absent: false })
        }
    }
    let origins = Origins { drives: Arc::new(InUse), ..Origins::here() };
    let error =
        Reconfigurator::open(config(&[(FIRST, 1)]), origins, false).err().expect("refused").to_string();
    assert!(error.contains(FIRST) && error.contains("in use"), "{error}");
}

#[test]
fn a_far_target_that_is_there_is_in_the_first_snapshot() {
    let targets = Arc::new(FarTargets::default());
    targets.now("d2", Answers::Yes);
    let served = served_remotes(&targets, &[1]);
    assert_eq!((nsids(&served.snapshot), served.pause()), (vec![1, 2], CHECK_PERIOD));
}

#[test]
fn a_far_target_that_is_away_is_tried_again_and_each_reason_is_told_once() {
    let targets = Arc::new(FarTargets::default());
    let mut served = served_remotes(&targets, &[1, 2]);
    assert_eq!((nsids(&served.snapshot), targets.asked()), (vec![1], 2));
    assert_eq!(served.attempts.logged().len(), 2);
    assert!(served.pause() <= REMOTE_RETRY_PERIOD);
    targets.now("d2", Answers::No("reset"));
    let mut now = Instant::now();
    for round in 2..5 {
        now += REMOTE_RETRY_PERIOD;
        look_until_tried(&mut served, now);
        assert_eq!(targets.asked(), 2 * round);
        assert_eq!(served.attempts.logged().len(), 3, "{:?}", served.attempts.logged());
        assert!(served.poll(now + REMOTE_RETRY_PERIOD - Duration::from_millis(1)).is_none());
        assert_eq!(targets.asked(), 2 * round, "not so soon");
    }
    targets.now("d3", Answers::Yes);
    let next = look_until_changed(&mut served, now + REMOTE_RETRY_PERIOD);
    assert_eq!(nsids(&next), [1, 3]);
}

#[test]
fn a_far_target_that_does_not_answer_holds_up_neither_the_start_nor_another_one() {
    let targets = Arc::new(FarTargets::default());
    let (tell, word) = channel();
    targets.now("d2", Answers::OnceTold(Arc::new(Mutex::new(word))));
    let mut served = served_remotes(&targets, &[1, 2]);
    assert_eq!(nsids(&served.snapshot), [1]);
    assert!(!served.is_opening_drives(), "the end of the process does not wait for it");
    targets.now("d3", Answers::Yes);
    let now = Instant::now() + REMOTE_RETRY_PERIOD;
    assert_eq!(nsids(&look_until_changed(&mut served, now)), [1, 3]);
    assert_eq!((targets.asked(), served.pause()), (3, OPENING_CHECK_PERIOD), "one try of each at a time");
    drop(tell);
    let next = look_until_changed(&mut served, now);
    assert_eq!((nsids(&next), served.pause()), (vec![1, 2, 3], CHECK_PERIOD));
}

#[test]
fn a_far_disk_that_is_taken_out_of_the_file_while_it_is_opened_is_dropped() {
    let targets = Arc::new(FarTargets::default());
    let (tell, word) = channel();
    targets.now("d2", Answers::OnceTold(Arc::new(Mutex::new(word))));
    let mut served = served_remotes(&targets, &[1]);
    // Another target under the same name, after it was taken out and put back.
    served.config = config_of_remotes(&[9]);
    targets.now("d2", Answers::No("refused"));
    assert!(served.poll(Instant::now()).is_none());
    wait(|| targets.asked() == 2);
    drop(tell);
    look_until_tried(&mut served, Instant::now());
    let made: Vec<_> = locked(&targets.disks).iter().map(|disk| disk.upgrade().is_some()).collect();
    assert_eq!((made, served.snapshot.generation), (vec![false], 1));
}

#[test]
fn a_far_namespace_that_becomes_read_only_is_served_so() {
    let targets = Arc::new(FarTargets::default());
    targets.now("d2", Answers::Yes);
    let mut served = served_remotes(&targets, &[1]);
    let before = Arc::clone(served.snapshot.subsystems[0].namespace(2).expect("there"));
    assert!(served.poll(Instant::now()).is_none());
    targets.is_read_only.store(true, Ordering::Relaxed);
    let next = served.poll(Instant::now()).expect("another snapshot");
    let after = next.subsystems[0].namespace(2).expect("there");
    assert!(after.geometry.is_read_only && !before.geometry.is_read_only);
    assert_eq!((after.disk, after.uuid, after.nguid), (before.disk, before.uuid, before.nguid));
    let (nqn, far) = (&next.subsystems[0].nqn, crate::identity::Data::Far("a far disk"));
    assert_eq!(after.uuid, crate::identity::uuid(nqn, 2, far));
}

#[test]
fn a_listener_whose_address_comes_is_bound_with_the_next_snapshot() {
    let config = Config::of("[[listener]]\naddress = \"203.0.113.9:4420\"\n");
    let origins = Origins {
        drives: Arc::new(Bays::default()),
        remote: Arc::new(|_: &RemotePlan| panic!("there is none")),
    };
    let mut served = Reconfigurator::open(config, origins, false).unwrap_or_else(|error| panic!("{error}"));
    assert!(served.listen_first().is_ok_and(|bound| bound.is_empty()), "the address is of no machine");
    let missing = served.missing();
    assert_eq!((missing.len(), missing[0].0.as_str()), (1, "listener 203.0.113.9:4420"));
    assert_eq!(served.pause(), REMOTE_RETRY_PERIOD);
    assert!(served.poll(Instant::now()).is_none() && served.is_absent(0), "it is tried again");
    // As if the machine had been given it.
    let mut snapshot = Snapshot {
        generation: 7,
        ..served
            .config
            .plan()
            .snapshot(None, &Bays::default(), &[])
            .map(|first| Snapshot {
                listeners: first.listeners.clone(),
                disks: Vec::new(),
                slots: first.slots.clone(),
                subsystems: Vec::new(),
                referrals: Vec::new(),
                generation: 1,
                discovery_logs: Default::default(),
                limits: first.limits.clone(),
            })
            .expect("nothing to open")
    };
    snapshot.listeners[0].address = "127.0.0.1:0".parse().expect("an address");
    served.snapshot = Arc::new(snapshot);
    let next = served.poll(Instant::now()).expect("for the cores");
    assert_eq!((next.generation, served.take_listeners().len()), (8, 1));
    assert!(served.missing().is_empty() && !served.is_absent(0));
}
