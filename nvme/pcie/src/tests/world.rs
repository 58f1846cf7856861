//! [`World`]: an emulated drive, its manager, and a core for each disk, stepped together in virtual time.

use std::sync::Arc;

use spindle_disk::{BlockRange, CoreContext, Disk, DiskError, DiskSource, Done, Op, Token};
use spindle_reactor::mem::{Buf, Pages, Pool, ZoneSpec};

use crate::drive::Drive;
use crate::emulator::{Emulator, EmulatorSpec};
use crate::manager::Manager;
use crate::shared::Settings;

/// Milliseconds of virtual time in a turn.
const TURN_MS: u64 = 1;
/// Turns after which something that should end has not.
const TURNS_MAX: u64 = 2_000_000;

pub(super) struct World {
    pub(super) emulator: Emulator,
    pub(super) drive: Arc<Drive>,
    manager: Manager,
    cores: Vec<Box<dyn Disk>>,
    pub(super) pool: Pool,
    now: u64,
    done: Vec<Done>,
    tokens: u64,
}

impl World {
    pub(super) fn new(spec: EmulatorSpec) -> World {
        World::with(spec, Settings::default(), 1)
    }

    pub(super) fn with(spec: EmulatorSpec, settings: Settings, cores: usize) -> World {
        let emulator = Emulator::new(spec);
        let (drive, manager) = Drive::stepped(Arc::new(emulator.clone()), settings);
        let zones =
            [ZoneSpec { buffer_bytes: 4096, count: 64 }, ZoneSpec { buffer_bytes: 2 << 20, count: 8 }];
        let pool = Pool::new(&zones, Pages::Base).expect("a pool");
        let mut world = World {
            emulator,
            drive,
            manager,
            cores: Vec::new(),
            pool,
            now: 0,
            done: Vec::with_capacity(64),
            tokens: 0,
        };
        world.until(|world| world.drive.facts().is_some() || world.drive.failure().is_some());
        if world.drive.facts().is_some() {
            for core in 0..cores {
                let source = world.drive.disk("disk", 1).expect("namespace 1");
                let context = CoreContext { core, pool: world.pool.clone(), depth: 64 };
                let disk = source.open(&context).expect("opened");
                world.cores.push(disk);
            }
        }
        world
    }

    pub(super) fn disk(&self, core: usize) -> &dyn Disk {
        self.cores[core].as_ref()
    }

    /// One turn of everything; what ended is in `done`.
    pub(super) fn turn(&mut self) {
        self.now += TURN_MS;
        self.manager.step(self.now);
        self.emulator.step();
        for core in &mut self.cores {
            core.poll(&mut self.done);
        }
    }

    pub(super) fn run_for(&mut self, ms: u64) {
        for _ in 0..ms / TURN_MS {
            self.turn();
        }
    }

    pub(super) fn until(&mut self, mut is_so: impl FnMut(&World) -> bool) {
        for _ in 0..TURNS_MAX {
            if is_so(self) {
                return;
            }
            self.turn();
        }
        panic!("it did not happen");
    }

    /// One command on core 0, to its end.
    pub(super) fn submit(
        &mut self,
        op: Op,
        range: BlockRange,
        buf: Option<Buf>,
    ) -> (Result<(), DiskError>, Option<Buf>) {
        self.tokens += 1;
        let token = Token(self.tokens);
        if let Some(done) = self.cores[0].submit(token, op, range, buf) {
            return (done.result, done.buf);
        }
        self.until(|world| world.done.iter().any(|done| done.token == token));
        let at = self.done.iter().position(|done| done.token == token).expect("just seen");
        let done = self.done.swap_remove(at);
        (done.result, done.buf)
    }

    pub(super) fn command(&mut self, op: Op, range: BlockRange) -> Result<(), DiskError> {
        self.submit(op, range, None).0
    }

    pub(super) fn write(&mut self, lba: u64, data: &[u8], fua: bool) -> Result<(), DiskError> {
        let bytes = u32::try_from(data.len()).expect("small");
        let mut buf = self.pool.take(bytes).expect("room");
        buf.copy_in(0, data);
        self.submit(Op::Write { fua }, BlockRange { lba, blocks: bytes / 512 }, Some(buf)).0
    }

    pub(super) fn read(&mut self, lba: u64, blocks: u32) -> Result<Vec<u8>, DiskError> {
        let buf = self.pool.take(blocks * 512).expect("room");
        let (result, buf) = self.submit(Op::Read, BlockRange { lba, blocks }, Some(buf));
        let buf = buf.expect("comes back");
        let mut data = vec![0; buf.len()];
        buf.copy_out(0, &mut data);
        result.map(|()| data)
    }

    /// Drop the cores and the drive; the manager ends.
    pub(super) fn close(&mut self) {
        self.cores.clear();
        self.drive.begin_closing();
        self.until(|world| world.manager.has_ended());
    }
}
