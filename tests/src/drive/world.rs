//! [`World`]: an emulated drive, its manager, and cores that each have a queue of it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use spindle_nvme_pcie::{Drive, Manager, NvmeDisk, Settings};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Buf, Pages, Pool, ZoneSpec};
use spindle_target_disk::{CacheSpec, CachedDisk, ChannelContext, Disk, DiskChannel, Done, PolicyKind};
use spindle_tests_emulator::{Emulator, EmulatorSpec};

/// Most ends that a poll brings.
const DONE_MAX: usize = 64;

/// One core.
pub struct Core {
    /// Its handle; `None` while it is closed.
    pub disk: Option<Box<dyn DiskChannel>>,
    /// Its memory.
    pub pool: Pool,
    /// Bytes that are free in it when all of it is home.
    pub pool_bytes: u64,
}

/// See the module.
pub struct World {
    /// The drive and its place.
    pub emulator: Emulator,
    /// The drive as the process holds it, until it is closed.
    pub disk: Option<Arc<dyn Disk>>,
    /// The same without a cache.
    pub nvme: Option<Arc<NvmeDisk>>,
    /// Stepped by hand.
    pub manager: Manager,
    /// Each with a queue of its own.
    pub cores: Vec<Core>,
    /// Milliseconds.
    pub now: u64,
    done: Vec<Done>,
    depth: u32,
    zones: Vec<ZoneSpec>,
}

impl World {
    /// A drive in service, and `cores` that have opened it.
    ///
    /// # Panics
    /// When it cannot be opened.
    #[must_use]
    pub fn new(spec: EmulatorSpec, settings: Settings, cores: usize, depth: u32) -> World {
        let zones =
            [ZoneSpec { buffer_bytes: 4096, count: 128 }, ZoneSpec { buffer_bytes: 1 << 20, count: 6 }];
        World::with_pools(spec, settings, cores, depth, &zones)
    }

    /// The same with pools of these zones.
    ///
    /// # Panics
    /// As [`World::new`].
    #[must_use]
    pub fn with_pools(
        spec: EmulatorSpec,
        settings: Settings,
        cores: usize,
        depth: u32,
        zones: &[ZoneSpec],
    ) -> World {
        let emulator = Emulator::new(spec);
        let (drive, mut manager) = Drive::stepped(Arc::new(emulator.clone()), settings);
        let mut now = 0;
        while drive.facts().is_none() {
            assert!(drive.failure().is_none() && now < 100_000, "{:?}", drive.failure());
            now += 1;
            manager.step(now);
            emulator.step();
        }
        let nvme = drive.disk("disk", 1).expect("namespace 1");
        let core = || {
            let pool = Pool::new(zones, Pages::Base).expect("a pool");
            Core { disk: None, pool_bytes: pool.free_bytes(), pool }
        };
        let cores = (0..cores).map(|_| core()).collect();
        let done = Vec::with_capacity(DONE_MAX);
        let mut world = World {
            emulator,
            disk: Some(nvme.clone()),
            nvme: Some(nvme),
            manager,
            cores,
            now,
            done,
            depth,
            zones: zones.to_vec(),
        };
        (0..world.cores.len()).for_each(|core| world.open(core));
        world
    }

    /// Puts a cache in front of the disk.
    ///
    /// # Panics
    /// When it cannot be mapped.
    pub fn put_cache(&mut self, bytes: u64) -> Arc<CachedDisk> {
        self.cores.iter_mut().for_each(|core| core.disk = None);
        let spec = CacheSpec::new(bytes, PolicyKind::S3Fifo, Pages::Base);
        let disk = self.disk.take().expect("not closed");
        let cached = CachedDisk::new(disk, Some(&spec)).expect("a cache");
        self.disk = Some(Arc::clone(&cached) as Arc<dyn Disk>);
        (0..self.cores.len()).for_each(|core| self.open(core));
        cached
    }

    /// Gives a core that is closed other memory.
    ///
    /// # Panics
    /// Without memory.
    pub fn renew_pool(&mut self, index: usize) {
        let pool = Pool::new(&self.zones, Pages::Base).expect("a pool");
        self.cores[index] = Core { disk: None, pool_bytes: pool.free_bytes(), pool };
    }

    /// Give a core a queue, if the drive has one.
    pub fn open(&mut self, index: usize) {
        let (Some(core), Some(source)) = (self.cores.get_mut(index), &self.disk) else { return };
        let context = ChannelContext { core: index, pool: core.pool.clone(), depth: self.depth };
        core.disk = source.open(&context).ok();
    }

    /// Time for the manager.
    pub fn step_manager(&mut self, ms: u64) {
        self.now += ms;
        self.manager.step(self.now);
    }

    /// A poll of one core: what has ended.
    pub fn poll(&mut self, index: usize) -> std::vec::Drain<'_, Done> {
        // As the target's core in each of its turns.
        self.cores.get(index).inspect(|core| core.pool.clear_claims());
        if let Some(disk) = self.cores.get_mut(index).and_then(|core| core.disk.as_mut()) {
            disk.poll(Nanos::ZERO, &mut self.done);
        }
        self.done.drain(..)
    }

    /// Whether the drive may still access a buffer.
    #[must_use]
    pub fn holds(&self, buf: &Buf) -> bool {
        buf.segments().any(|segment| {
            let iova = self.emulator.iova_of(segment.as_ptr().addr());
            iova.is_some_and(|iova| self.emulator.holds(&(iova.0..iova.0 + segment.len() as u64)))
        })
    }

    /// Close the cores and the drive.
    ///
    /// # Panics
    /// When something is left.
    pub fn close(&mut self) {
        self.cores.iter_mut().for_each(|core| core.disk = None);
        (self.disk, self.nvme) = (None, None);
        // A thread gives up the memory of a cache, in its own time.
        let end = Instant::now() + Duration::from_secs(60);
        for turn in 0.. {
            if self.manager.has_ended() && self.emulator.mappings() == 0 {
                break;
            }
            assert!(turn < 100_000 || Instant::now() < end, "the drive is not shut down");
            self.step_manager(10);
            self.emulator.step();
        }
        assert!(self.manager.has_ended(), "the drive is shut down");
        assert!(!self.emulator.is_open(), "the function is closed");
        assert_eq!(self.emulator.mappings(), 0, "nothing is mapped");
    }
}
