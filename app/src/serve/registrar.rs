//! [`Registrar`]: a thread that registers memory with devices before the cores receive a snapshot. It
//! registers the cores' pools with new drives, and the memory of disks with the RDMA devices.
//!
//! ```text
//!   snapshot ──> new disks: prepare with each pool ──> register (seconds for a large RAM disk)
//!            ──> RdmaMemory to all cores ──> Listen to core ACCEPTOR ──> the snapshot to all cores
//! ```
//!
//! Both registrations pin every page. At the start the cores serve TCP in the meantime, and open the RDMA
//! listeners after `RdmaMemory`. Without RDMA listeners no memory is registered with RDMA devices.
//!
//! Only the cores own RDMA devices and registrations, so that a removed device is closed once the cores drop
//! it.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};
use std::time::Instant;

use spindle_nvme_rdma::shell::{DiskArea, KnownDevices, RegisteredDisks};
use spindle_reactor::mailbox::Remote;
use spindle_reactor::mem::Area;
use spindle_target::env::Message;
use spindle_target::snapshot::Snapshot;
use spindle_target_disk::Disk;

use super::ServeError;
use super::core_loop::{ACCEPTOR, CoreMessage, Handover, Listening};

/// Handle of the thread. Once the handle is dropped, the thread sends the queued snapshots and ends.
pub struct Registrar(Sender<NextSnapshot>);

/// A snapshot for all cores, and the sockets of the listeners that are new in it.
pub type NextSnapshot = (Arc<Snapshot>, Vec<Listening>);

/// State of the thread.
struct RegistrarThread {
    /// The current devices, including those that were added since the start. `None`: the configuration has no
    /// RDMA listener.
    devices: Option<KnownDevices>,
    /// Buffer pools, one per core.
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
        devices: Option<KnownDevices>,
        pools: Vec<Area>,
        first: Arc<Snapshot>,
        cores: usize,
        remote: Remote<CoreMessage>,
        stop: Arc<AtomicBool>,
    ) -> Result<Registrar, ServeError> {
        let (send, receive) = channel();
        let work = RegistrarThread { devices, pools, cores, remote, stop };
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
    fn run(&self, first: Arc<Snapshot>, receive: &Receiver<NextSnapshot>) {
        self.register(&first);
        let mut known = sources(&first);
        // Keeps no reference, so that removed disks are closed.
        drop(first);
        while let Ok((next, listeners)) = receive.recv() {
            self.prepare(&known, &next);
            known = sources(&next);
            self.register(&next);
            // Sent before the snapshot: core `ACCEPTOR` opens these listeners once all cores have the
            // snapshot.
            if !listeners.is_empty() {
                self.send(ACCEPTOR, &CoreMessage::Listen(Handover::new((next.generation, listeners))));
            }
            self.broadcast(&CoreMessage::Target(Message::Snapshot(next)));
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

    fn register(&self, snapshot: &Snapshot) {
        let Some(devices) = &self.devices else { return };
        let begin = Instant::now();
        let disks = RegisteredDisks::register(devices, disk_areas(snapshot));
        let (count, bytes, took_ms) = (disks.disks().len(), disks.bytes(), begin.elapsed().as_millis());
        if disks.is_registered() {
            tracing::info!(
                disks = count,
                bytes,
                took_ms,
                "memory of disks is registered with the RDMA devices"
            );
        }
        self.broadcast(&CoreMessage::RdmaMemory(Arc::new(disks)));
    }

    fn broadcast(&self, message: &CoreMessage) {
        (0..self.cores).for_each(|core| self.send(core, message));
    }

    fn send(&self, core: usize, message: &CoreMessage) {
        send(&self.remote, core, message, || self.stop.load(Ordering::Relaxed));
    }
}

/// Sends a message to a core, and retries while its mailbox is full. Once `has_ended` returns true, drops the
/// message instead.
pub fn send(remote: &Remote<CoreMessage>, core: usize, message: &CoreMessage, has_ended: impl Fn() -> bool) {
    let mut message = message.clone();
    while let Err(back) = remote.send(core, message) {
        if has_ended() {
            return;
        }
        message = back;
        std::thread::yield_now();
    }
}

fn sources(snapshot: &Snapshot) -> Vec<Weak<dyn Disk>> {
    snapshot.disks.iter().flatten().map(Arc::downgrade).collect()
}

/// Returns the memory of the disks from and to which data is transferred directly, without a pool buffer.
fn disk_areas(snapshot: &Snapshot) -> Vec<DiskArea> {
    let area =
        |source: &Arc<dyn Disk>| Some(DiskArea { name: source.name().to_owned(), area: source.area()? });
    snapshot.disks.iter().flatten().filter_map(area).collect()
}

#[cfg(test)]
mod tests {
    use spindle_reactor::mailbox::mesh;
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
}
