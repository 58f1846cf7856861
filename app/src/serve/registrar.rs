//! [`Registrar`]: the thread that registers memory with devices, and searches for RDMA devices.
//!
//! ```text
//!   snapshot ──> new disks: prepare with each pool ──> register with the RDMA devices
//!            ──> devices and their keys to all cores ──> Listen to core ACCEPTOR ──> the snapshot to all
//!   10 times a second: RDMA devices that have come or gone ──> all cores
//! ```
//!
//! Registration pins every page, which takes seconds for a large RAM disk. At the start the cores serve TCP
//! in the meantime, and open the RDMA listeners afterwards. Without RDMA listeners no memory is registered
//! with RDMA devices.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use spindle_nvme_rdma::shell::{DeviceMessage, DiskArea, Registrar as RdmaRegistrar};
use spindle_nvme_transport::TransportKind;
use spindle_reactor::mailbox::Remote;
use spindle_reactor::mem::Area;
use spindle_target::env::Message;
use spindle_target::snapshot::{Listener, Snapshot};
use spindle_target_disk::Disk;

use super::ServeError;
use super::core_loop::{ACCEPTOR, CoreMessage, Listening};

/// Period of the search for RDMA devices. Reads one directory and the state of each device.
const SEARCH_PERIOD: Duration = Duration::from_millis(100);
/// Wait for a snapshot where there is nothing to search for.
const FOREVER: Duration = Duration::from_secs(1 << 32);

/// Handle of the thread. Once the handle is dropped, the thread sends the queued snapshots and ends.
pub struct Registrar(Sender<NextSnapshot>);

/// A snapshot for all cores, and the sockets of the listeners that are new in it.
pub type NextSnapshot = (Arc<Snapshot>, Vec<Listening>);

/// Registers memory with RDMA devices; tests implement it without devices. Both return messages for all
/// cores.
pub trait RdmaMemory: Send {
    /// Registers the memory of the disks of the next snapshot.
    fn change(&mut self, next: &Snapshot) -> Vec<DeviceMessage>;

    /// Searches for devices that have come or gone.
    fn poll(&mut self) -> Vec<DeviceMessage>;
}

impl RdmaMemory for RdmaRegistrar {
    fn change(&mut self, next: &Snapshot) -> Vec<DeviceMessage> {
        let begin = Instant::now();
        let areas = disk_areas(next);
        let (disks, bytes) = (areas.len(), areas.iter().map(|it| it.area.bytes()).sum::<usize>());
        let messages = self.set_memory(areas, is_on_all(&next.listeners));
        if !messages.is_empty() && disks > 0 {
            let took_ms = begin.elapsed().as_millis();
            tracing::info!(disks, bytes, took_ms, "memory of disks is registered with the RDMA devices");
        }
        messages
    }

    fn poll(&mut self) -> Vec<DeviceMessage> {
        RdmaRegistrar::poll(self)
    }
}

/// State of the thread.
struct RegistrarThread {
    /// `None`: the configuration had no RDMA listener at the start.
    rdma: Option<Box<dyn RdmaMemory>>,
    /// Buffer pools for I/O, one per core.
    pools: Vec<Area>,
    cores: usize,
    remote: Remote<CoreMessage>,
    /// Set when the cores must stop at once: then a message for a full mailbox is dropped.
    stop: Arc<AtomicBool>,
}

impl Registrar {
    /// Starts the thread, which first registers the disks of `first` with the RDMA devices; the cores already
    /// have this snapshot.
    pub fn start(
        rdma: Option<Box<dyn RdmaMemory>>,
        pools: Vec<Area>,
        first: Arc<Snapshot>,
        cores: usize,
        remote: Remote<CoreMessage>,
        stop: Arc<AtomicBool>,
    ) -> Result<Registrar, ServeError> {
        let (send, receive) = channel();
        let work = RegistrarThread { rdma, pools, cores, remote, stop };
        std::thread::Builder::new()
            .name("memory".to_owned())
            .spawn(move || work.run(first, &receive))
            .map_err(|error| {
                ServeError::Start(format!("cannot start the thread that registers memory: {error}"))
            })?;
        Ok(Registrar(send))
    }

    /// Queues the snapshot, which the thread sends to the cores once its memory is registered.
    ///
    /// # Errors
    /// Returns `next` if the thread has ended.
    pub fn send(&self, next: NextSnapshot) -> Result<(), NextSnapshot> {
        self.0.send(next).map_err(|back| back.0)
    }
}

impl RegistrarThread {
    fn run(mut self, first: Arc<Snapshot>, receive: &Receiver<NextSnapshot>) {
        self.register(&first);
        if self.rdma.is_some() {
            self.send(ACCEPTOR, CoreMessage::ListenRdma);
        }
        let mut known = weak_disks(&first);
        // Keeps no reference, so that removed disks are closed.
        drop(first);
        let period = if self.rdma.is_some() { SEARCH_PERIOD } else { FOREVER };
        let mut next_search = Instant::now() + period;
        loop {
            match receive.recv_timeout(next_search.saturating_duration_since(Instant::now())) {
                Ok((next, listeners)) => {
                    self.prepare(&known, &next);
                    known = weak_disks(&next);
                    self.register(&next);
                    // Sent before the snapshot: core `ACCEPTOR` opens these listeners once all cores have the
                    // snapshot.
                    if !listeners.is_empty() {
                        self.send(ACCEPTOR, CoreMessage::Listen((next.generation, listeners)));
                    }
                    self.broadcast(|| CoreMessage::Target(Message::Snapshot(Arc::clone(&next))));
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            // Also between snapshots that follow each other faster than the period.
            if Instant::now() >= next_search {
                let messages = self.rdma.as_mut().map(|rdma| rdma.poll());
                self.broadcast_rdma(messages.unwrap_or_default());
                next_search = Instant::now() + period;
            }
        }
    }

    /// Registers the pools with disks that are new in `next`, before the cores open them.
    fn prepare(&self, known: &[Weak<dyn Disk>], next: &Snapshot) {
        let known: HashSet<_> = known.iter().map(|known| known.as_ptr().cast::<()>()).collect();
        let is_known = |source: &&Arc<dyn Disk>| known.contains(&Arc::as_ptr(source).cast::<()>());
        for source in next.disks.iter().flatten().filter(|source| !is_known(source)) {
            self.pools.iter().for_each(|pool| source.prepare(pool));
        }
    }

    fn register(&mut self, snapshot: &Snapshot) {
        let messages = self.rdma.as_mut().map(|rdma| rdma.change(snapshot));
        self.broadcast_rdma(messages.unwrap_or_default());
    }

    /// Sends to core [`ACCEPTOR`] last: once it listens with a device, all other cores have been sent the
    /// device too.
    fn broadcast_rdma(&self, messages: Vec<DeviceMessage>) {
        for message in messages {
            for core in (0..self.cores).rev() {
                self.send(core, CoreMessage::Rdma(message.clone()));
            }
        }
    }

    fn broadcast(&self, message: impl Fn() -> CoreMessage) {
        (0..self.cores).for_each(|core| self.send(core, message()));
    }

    fn send(&self, core: usize, message: CoreMessage) {
        send(&self.remote, core, message, || self.stop.load(Ordering::Relaxed));
    }
}

/// Sends a message to a core, and retries while its mailbox is full. Once `has_ended` returns true, drops the
/// message instead.
pub fn send(
    remote: &Remote<CoreMessage>,
    core: usize,
    mut message: CoreMessage,
    has_ended: impl Fn() -> bool,
) {
    while let Err(back) = remote.send(core, message) {
        if has_ended() {
            return;
        }
        message = back;
        std::thread::yield_now();
    }
}

fn weak_disks(snapshot: &Snapshot) -> Vec<Weak<dyn Disk>> {
    snapshot.disks.iter().flatten().map(Arc::downgrade).collect()
}

/// Returns true if an RDMA listener is on all addresses, so that each device is used.
fn is_on_all(listeners: &[Listener]) -> bool {
    let mut open = listeners.iter().filter(|it| it.is_open && it.transport == TransportKind::Rdma);
    open.any(|it| it.address.ip().is_unspecified())
}

/// Returns the memory of the disks from and to which data is transferred directly, without a pool buffer.
fn disk_areas(snapshot: &Snapshot) -> Vec<DiskArea> {
    let area =
        |source: &Arc<dyn Disk>| Some(DiskArea { name: source.name().to_owned(), area: source.area()? });
    snapshot.disks.iter().flatten().filter_map(area).collect()
}

#[cfg(test)]
mod tests {
    use spindle_reactor::mailbox::{Mailbox, mesh};
    use spindle_reactor::mem::Pages;
    use spindle_target_disk::{
        ChannelContext, DiskChannel, Geometry, NullDisk, NullSpec, OpenError, ResizeError, Usage,
    };

    use super::*;
    use crate::config::{Config, LocalDrives};

    /// Records each call of `prepare`: the name of the thread and the address of the pool.
    struct Noted(Arc<dyn Disk>, std::sync::Mutex<Vec<(String, usize)>>);

    impl Disk for Noted {
        fn name(&self) -> &str {
            self.0.name()
        }
        fn kind(&self) -> &'static str {
            self.0.kind()
        }
        fn geometry(&self) -> Geometry {
            self.0.geometry()
        }
        fn prepare(&self, pool: &Area) {
            let thread = std::thread::current().name().unwrap_or_default().to_owned();
            self.1.lock().expect("not poisoned").push((thread, pool.base().addr().get()));
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

    #[test]
    fn a_new_disk_is_prepared_with_each_pool_before_the_cores_hear_of_it_and_once() {
        let first = Config::builtin().plan().snapshot(None, &LocalDrives, &[]).expect("opened");
        let null = NullDisk::new("n", NullSpec { bytes: 1 << 20, block_bytes: 512 }).expect("a disk");
        let noted = Arc::new(Noted(null, std::sync::Mutex::default()));
        let mut next = Config::builtin().plan().snapshot(None, &LocalDrives, &[]).expect("opened");
        let disks = &mut Arc::get_mut(&mut next).expect("not shared").disks;
        let source: Arc<dyn Disk> = noted.clone();
        disks.push(Some(source));
        let mut mailbox = mesh::<CoreMessage>(1, 16).expect("mailboxes").pop().expect("one");
        let pools: Vec<Area> = (0..2).map(|_| Area::map(1, Pages::Base).expect("memory")).collect();
        let expected: Vec<_> =
            pools.iter().map(|pool| ("memory".to_owned(), pool.base().addr().get())).collect();
        let registrar = Registrar::start(None, pools, first, 1, mailbox.remote(), Arc::default());
        let registrar = registrar.expect("a thread");
        for _ in 0..2 {
            assert!(registrar.send((Arc::clone(&next), Vec::new())).is_ok());
            while !matches!(mailbox.receive(), Some((_, CoreMessage::Target(Message::Snapshot(_))))) {
                std::thread::yield_now();
            }
            assert_eq!(*noted.1.lock().expect("not poisoned"), expected);
        }
    }

    #[test]
    fn each_device_is_used_by_an_open_rdma_listener_on_all_addresses() {
        let snapshot = Config::builtin().plan().snapshot(None, &LocalDrives, &[]).expect("opened");
        for (is_open, transport, address, expected) in [
            (true, TransportKind::Rdma, "0.0.0.0:4420", true),
            (true, TransportKind::Rdma, "[::]:4420", true),
            (true, TransportKind::Rdma, "192.0.2.1:4420", false),
            (true, TransportKind::Tcp, "0.0.0.0:4420", false),
            (false, TransportKind::Rdma, "0.0.0.0:4420", false),
        ] {
            let address = address.parse().expect("an address");
            let listener = Listener { is_open, transport, address, ..snapshot.listeners[0].clone() };
            assert_eq!(is_on_all(&[listener]), expected, "{is_open} {transport:?} {address}");
        }
    }

    /// A device for each snapshot, with the snapshot's generation as its serial number.
    struct DevicePerSnapshot;

    impl RdmaMemory for DevicePerSnapshot {
        fn change(&mut self, next: &Snapshot) -> Vec<DeviceMessage> {
            vec![DeviceMessage::Lost(next.generation)]
        }
        fn poll(&mut self) -> Vec<DeviceMessage> {
            vec![DeviceMessage::Lost(0)]
        }
    }

    /// Adds what was received to `log`.
    fn receive(mailbox: &mut Mailbox<CoreMessage>, log: &mut Vec<String>) {
        while let Some((_, message)) = mailbox.receive() {
            log.extend(match message {
                // Of the period.
                CoreMessage::Rdma(DeviceMessage::Lost(0)) => None,
                CoreMessage::Rdma(DeviceMessage::Lost(serial)) => Some(format!("device {serial}")),
                CoreMessage::ListenRdma => Some("listen".to_owned()),
                CoreMessage::Target(Message::Snapshot(it)) => Some(format!("snapshot {}", it.generation)),
                CoreMessage::Rdma(_)
                | CoreMessage::Target(_)
                | CoreMessage::Accept(_)
                | CoreMessage::AcceptRdma(_)
                | CoreMessage::Wake
                | CoreMessage::Listen(_) => panic!("another message"),
            });
        }
    }

    #[test]
    fn cores_have_the_memory_of_a_snapshot_before_the_snapshot_and_before_they_listen() {
        let first = Config::builtin().plan().snapshot(None, &LocalDrives, &[]).expect("opened");
        let mut next = Config::builtin().plan().snapshot(None, &LocalDrives, &[]).expect("opened");
        Arc::get_mut(&mut next).expect("not shared").generation = 7;
        let mut mailboxes = mesh::<CoreMessage>(2, 16).expect("mailboxes");
        let (rdma, remote) = (Some(Box::new(DevicePerSnapshot) as _), mailboxes[0].remote());
        let registrar = Registrar::start(rdma, Vec::new(), first, 2, remote, Arc::default());
        assert!(registrar.expect("a thread").send((next, Vec::new())).is_ok());
        let mut logs = [Vec::new(), Vec::new()];
        while logs.iter().any(|log| log.last().is_none_or(|last| last != "snapshot 7")) {
            // The core that listens first: the other one must have all devices that this one has.
            for (core, log) in logs.iter_mut().enumerate() {
                receive(&mut mailboxes[core], log);
            }
            let devices = |core: usize| logs[core].iter().filter(|it| it.starts_with("device")).count();
            assert!(devices(0) <= devices(1), "{logs:?}");
            std::thread::yield_now();
        }
        assert_eq!(logs[0], ["device 1", "listen", "device 7", "snapshot 7"]);
        assert_eq!(logs[1], ["device 1", "device 7", "snapshot 7"]);
    }

    #[test]
    fn devices_are_searched_for_while_one_snapshot_follows_the_other() {
        let snapshot = Config::builtin().plan().snapshot(None, &LocalDrives, &[]).expect("opened");
        let mut mailbox = mesh::<CoreMessage>(1, 16).expect("mailboxes").pop().expect("one");
        let (rdma, remote) = (Some(Box::new(DevicePerSnapshot) as _), mailbox.remote());
        let registrar = Registrar::start(rdma, Vec::new(), Arc::clone(&snapshot), 1, remote, Arc::default());
        let registrar = registrar.expect("a thread");
        let (begun, mut waiting) = (Instant::now(), 0);
        loop {
            // The thread always finds one.
            while waiting < 3 {
                assert!(registrar.send((Arc::clone(&snapshot), Vec::new())).is_ok());
                waiting += 1;
            }
            match mailbox.receive() {
                Some((_, CoreMessage::Rdma(DeviceMessage::Lost(0)))) => break,
                Some((_, CoreMessage::Target(_))) => waiting -= 1,
                Some(_) => {}
                None => std::thread::yield_now(),
            }
            assert!(begun.elapsed() < HANGS, "snapshots only");
        }
    }

    #[test]
    fn a_device_is_sent_to_the_core_that_listens_last() {
        let mut mailboxes = mesh::<CoreMessage>(3, 16).expect("mailboxes");
        let remote = mailboxes[0].remote();
        // Full, so that the thread waits for this core.
        while remote.send(ACCEPTOR, CoreMessage::ListenRdma).is_ok() {}
        let stop = Arc::new(AtomicBool::new(false));
        let (rdma, pools) = (None, Vec::new());
        let thread = RegistrarThread { rdma, pools, cores: 3, remote, stop: Arc::clone(&stop) };
        std::thread::scope(|scope| {
            scope.spawn(move || thread.broadcast_rdma(vec![DeviceMessage::Lost(1)]));
            let begun = Instant::now();
            for core in [1, 2] {
                while mailboxes[core].receive().is_none() && begun.elapsed() < HANGS {
                    std::thread::yield_now();
                }
            }
            stop.store(true, Ordering::Relaxed);
            assert!(begun.elapsed() < HANGS, "the others were not sent the device first");
        });
    }

    /// The thread would wait for ever.
    const HANGS: Duration = Duration::from_secs(20);
}
