//! [`Registrar`]: gives devices memory, on a thread of its own: the cores' pools to drives that are new, and
//! the memory of disks to the RDMA devices.
//!
//! ```text
//!   snapshot ──> new disks: prepare with each pool ──> register (seconds for a large RAM disk)
//!            ──> RdmaMemory to all cores ──> the snapshot
//! ```
//!
//! Both pin every page. At the start TCP is served meanwhile, and the RDMA listeners follow; at a reload the
//! cores go on, and get the new snapshot when its memory is ready. Where nothing listens on RDMA nothing is
//! registered.
//!
//! What it does not do: it keeps neither a device nor its memory: the cores alone do, so that a device that
//! goes is let go of.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};
use std::time::Instant;

use spindle_disk::DiskSource;
use spindle_rdma::shell::{DiskArea, KnownDevices, RegisteredDisks};
use spindle_reactor::mailbox::Remote;
use spindle_reactor::mem::Area;
use spindle_target::env::Message;
use spindle_target::snapshot::Snapshot;

use super::ServeError;
use super::core_loop::{ACCEPTOR, CoreMessage, Handover, Listening};

/// The thread's end of the work; see the module.
pub struct Registrar(Sender<Next>);

/// What the cores are to change to, and the sockets of listeners that are new in it.
pub type Next = (Arc<Snapshot>, Vec<Listening>);

/// What the thread has.
struct Work {
    /// Those that have come since are in it.
    devices: KnownDevices,
    /// Something listens on RDMA: that takes a device.
    has_rdma: bool,
    /// Of each core.
    pools: Vec<Area>,
    cores: usize,
    remote: Remote<CoreMessage>,
    /// The cores end at once.
    stop: Arc<AtomicBool>,
}

impl Registrar {
    /// Begin with the memory of `first`, which the cores have.
    pub fn start(
        devices: KnownDevices,
        pools: Vec<Area>,
        first: Arc<Snapshot>,
        cores: usize,
        remote: Remote<CoreMessage>,
        stop: Arc<AtomicBool>,
    ) -> Result<Registrar, ServeError> {
        let (send, receive) = channel();
        // Later on the list may be empty for a while.
        let has_rdma = !devices.is_empty();
        let work = Work { devices, has_rdma, pools, cores, remote, stop };
        std::thread::Builder::new()
            .name("memory".to_owned())
            .spawn(move || work.run(first, &receive))
            .map_err(|error| {
                ServeError::Start(format!("cannot start the thread of the devices' memory: {error}"))
            })?;
        Ok(Registrar(send))
    }

    /// The cores change to this snapshot when its memory is registered. Gives it back when the thread is
    /// gone.
    pub fn send(&self, next: Next) -> Result<(), Next> {
        self.0.send(next).map_err(|back| back.0)
    }
}

impl Work {
    fn run(&self, first: Arc<Snapshot>, receive: &Receiver<Next>) {
        self.register(&first);
        let mut known = sources(&first);
        // What is removed is let go of.
        drop(first);
        while let Ok((next, listeners)) = receive.recv() {
            self.prepare(&known, &next);
            known = sources(&next);
            self.register(&next);
            // First: it is accepted from them when all cores have the snapshot.
            if !listeners.is_empty() {
                self.send(ACCEPTOR, &CoreMessage::Listen(Handover::new((next.generation, listeners))));
            }
            self.tell(&CoreMessage::Target(Message::Snapshot(next)));
        }
    }

    /// Disks that the cores are to open.
    fn prepare(&self, known: &[Weak<dyn DiskSource>], next: &Snapshot) {
        let is_known = |source: &&Arc<dyn DiskSource>| {
            let place = Arc::as_ptr(source).cast::<()>();
            known.iter().any(|known| known.as_ptr().cast::<()>() == place)
        };
        for source in next.disks.iter().flatten().filter(|source| !is_known(source)) {
            self.pools.iter().for_each(|pool| source.prepare(pool));
        }
    }

    fn register(&self, snapshot: &Snapshot) {
        if !self.has_rdma {
            return;
        }
        let begin = Instant::now();
        let disks = RegisteredDisks::register(&self.devices, disk_areas(snapshot));
        let (count, bytes, took_ms) = (disks.disks().len(), disks.bytes(), begin.elapsed().as_millis());
        tracing::info!(disks = count, bytes, took_ms, "memory of disks is registered with the RDMA devices");
        self.tell(&CoreMessage::RdmaMemory(Arc::new(disks)));
    }

    fn tell(&self, message: &CoreMessage) {
        (0..self.cores).for_each(|core| self.send(core, message));
    }

    fn send(&self, core: usize, message: &CoreMessage) {
        send(&self.remote, core, message, || self.stop.load(Ordering::Relaxed));
    }
}

/// Send a message to a core. A full mailbox is emptied within a turn, unless the core has ended.
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

fn sources(snapshot: &Snapshot) -> Vec<Weak<dyn DiskSource>> {
    snapshot.disks.iter().flatten().map(Arc::downgrade).collect()
}

/// Memory of the disks that commands move without a buffer of the pool.
fn disk_areas(snapshot: &Snapshot) -> Vec<DiskArea> {
    let area = |source: &Arc<dyn DiskSource>| {
        Some(DiskArea { name: source.name().to_owned(), area: source.area()? })
    };
    snapshot.disks.iter().flatten().filter_map(area).collect()
}

#[cfg(test)]
mod tests {
    use spindle_disk::{CoreContext, Disk, Geometry, NullDisk, NullSpec, OpenError, ResizeError, Usage};
    use spindle_reactor::mailbox::mesh;
    use spindle_reactor::mem::Pages;

    use super::*;
    use crate::config::{Config, DrivesHere};

    /// Notes who prepares it, and with what.
    struct Noted(Arc<dyn DiskSource>, std::sync::Mutex<Vec<(String, usize)>>);

    impl DiskSource for Noted {
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
        fn open(&self, context: &CoreContext) -> Result<Box<dyn Disk>, OpenError> {
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
        let first = Config::builtin().plan().snapshot(None, &DrivesHere, &[]).expect("opened");
        let null = NullDisk::new("n", NullSpec { bytes: 1 << 20, block_bytes: 512 }).expect("a disk");
        let noted = Arc::new(Noted(null, std::sync::Mutex::default()));
        let mut next = Config::builtin().plan().snapshot(None, &DrivesHere, &[]).expect("opened");
        let disks = &mut Arc::get_mut(&mut next).expect("not shared").disks;
        let source: Arc<dyn DiskSource> = noted.clone();
        disks.push(Some(source));
        let mut mailbox = mesh::<CoreMessage>(1, 16).expect("mailboxes").pop().expect("one");
        let pools: Vec<Area> = (0..2).map(|_| Area::map(1, Pages::Base).expect("memory")).collect();
        let expected: Vec<_> =
            pools.iter().map(|pool| ("memory".to_owned(), pool.base().addr().get())).collect();
        let registrar =
            Registrar::start(KnownDevices::new(&[]), pools, first, 1, mailbox.remote(), Arc::default());
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
