//! [`World`]: an emulated drive, its manager, and a core for each disk, stepped together in virtual time.

use std::sync::Arc;

use spindle_nvme_pcie::{Drive, Manager, Settings};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Buf, Pages, Pool, ZoneSpec};
use spindle_target_disk::{
    BlockRange, ChannelContext, Disk, DiskChannel, DiskError, Done, IoRequest, Op, Owner, Prepared, Token,
};
use spindle_tests_emulator::{Emulator, EmulatorSpec};

/// Milliseconds of virtual time in a turn.
const TURN_MS: u64 = 1;
/// Turns after which something that should end has not.
const TURNS_MAX: u64 = 2_000_000;

pub struct World {
    pub emulator: Emulator,
    /// Until it is closed.
    drive: Option<Arc<Drive>>,
    manager: Manager,
    cores: Vec<Box<dyn DiskChannel>>,
    /// What each core's last poll returned.
    pub is_busy: Vec<bool>,
    pub pool: Pool,
    now: u64,
    done: Vec<Done>,
    /// The last one; its upper half is the owner of what comes next.
    pub tokens: u64,
}

impl World {
    pub fn new(spec: EmulatorSpec) -> World {
        World::with(spec, Settings::default(), 1)
    }

    pub fn with(spec: EmulatorSpec, settings: Settings, cores: usize) -> World {
        let emulator = Emulator::new(spec);
        let (drive, manager) = Drive::stepped(Arc::new(emulator.clone()), settings);
        let zones =
            [ZoneSpec { buffer_bytes: 4096, count: 64 }, ZoneSpec { buffer_bytes: 2 << 20, count: 8 }];
        let pool = Pool::new(&zones, Pages::Base).expect("a pool");
        let mut world = World {
            emulator,
            drive: Some(drive),
            manager,
            cores: Vec::new(),
            is_busy: Vec::new(),
            pool,
            now: 0,
            done: Vec::with_capacity(64),
            tokens: 0,
        };
        world.until(|world| world.drive().facts().is_some() || world.drive().failure().is_some());
        if world.drive().facts().is_some() {
            (0..cores).for_each(|_| world.open());
        }
        world
    }

    /// One more core.
    pub fn open(&mut self) {
        let source = self.drive().disk("disk", 1).expect("namespace 1");
        self.open_on(&*source);
    }

    /// One more core, on this disk.
    pub fn open_on(&mut self, source: &dyn Disk) {
        let context = ChannelContext { core: self.cores.len(), pool: self.pool.clone(), depth: 64 };
        self.cores.push(source.open(&context).expect("opened"));
    }

    /// All cores hear that their disks were changed.
    pub fn reconfigure(&mut self) {
        self.cores.iter_mut().for_each(|core| core.reconfigure());
    }

    /// The others move up.
    pub fn drop_core(&mut self, core: usize) {
        drop(self.cores.remove(core));
    }

    pub fn drop_cores(&mut self) {
        self.cores.clear();
    }

    pub fn now(&self) -> u64 {
        self.now
    }

    pub fn health(&self) -> Option<spindle_target_disk::Health> {
        self.drive().disk("disk", 1).expect("namespace 1").health()
    }

    pub fn drive(&self) -> &Arc<Drive> {
        self.drive.as_ref().expect("not closed")
    }

    /// The process lets it go: its manager shuts it down.
    pub fn drop_drive(&mut self) {
        self.drive = None;
    }

    /// Whether the drive may still access a buffer.
    pub fn holds(&self, buf: &Buf) -> bool {
        buf.segments().any(|segment| {
            let iova = self.emulator.iova_of(segment.as_ptr().addr());
            iova.is_some_and(|iova| self.emulator.holds(&(iova.0..iova.0 + segment.len() as u64)))
        })
    }

    /// Begin a command on a core, with a buffer where it needs one; it is counted when it ends.
    pub fn start(&mut self, core: usize, op: Op, range: BlockRange) {
        let has_data = matches!(op, Op::Read | Op::Write { .. });
        let buf = has_data.then(|| self.pool.take(range.blocks * 512).expect("room"));
        self.tokens += 1;
        let done = self.cores[core].submit(Token(self.tokens), &IoRequest::new(op, range), buf);
        self.done.extend(done);
    }

    /// `owner` is gone; how many of its commands are still to come back on core 0.
    pub fn forget(&mut self, owner: u32) -> usize {
        self.cores[0].cancel_owner(Owner(owner))
    }

    /// Begin a write of one block on a core.
    pub fn start_write(&mut self, core: usize, lba: u64, byte: u8) {
        let mut buf = self.pool.take(512).expect("room");
        buf.copy_in(0, &[byte; 512]);
        self.tokens += 1;
        let range = BlockRange { lba, blocks: 1 };
        let done = self.cores[core].submit(
            Token(self.tokens),
            &IoRequest::new(Op::Write { fua: false }, range),
            Some(buf),
        );
        self.done.extend(done);
    }

    /// Begin a compare-and-write on a core: of a block of these bytes, to one of those. Its name.
    pub fn start_compare_and_write(&mut self, core: usize, lba: u64, expected: u8, data: u8) -> u64 {
        let [expected, data] = [expected, data].map(|byte| {
            let mut buf = self.pool.take(512).expect("room");
            buf.copy_in(0, &[byte; 512]);
            buf
        });
        self.tokens += 1;
        let range = BlockRange { lba, blocks: 1 };
        let done = self.cores[core].compare_and_write(Token(self.tokens), range, expected, data);
        self.done.extend(done);
        self.tokens
    }

    /// Begin a write of one byte on a core, however often it is there. Its name.
    pub fn start_fill(&mut self, core: usize, range: BlockRange, byte: u8) -> u64 {
        let mut buf = self.pool.take(range.blocks * 512).expect("room");
        buf.copy_in(0, &vec![byte; range.blocks as usize * 512]);
        self.tokens += 1;
        let op = Op::Write { fua: false };
        let done = self.cores[core].submit(Token(self.tokens), &IoRequest::new(op, range), Some(buf));
        self.done.extend(done);
        self.tokens
    }

    /// What came of a command, once, when it has ended.
    pub fn take_result(&mut self, token: u64) -> Option<Result<(), DiskError>> {
        let at = self.done.iter().position(|done| done.token == Token(token))?;
        Some(self.done.swap_remove(at).result)
    }

    /// Of those that have ended, how many have failed.
    pub fn failed(&self) -> usize {
        self.done.iter().filter(|done| done.result.is_err()).count()
    }

    /// The controller is disabled.
    pub fn is_off(&self) -> bool {
        self.emulator.register(nvme_spec::register::CSTS) & 1 == 0
    }

    /// Commands of [`World::start`] that have ended.
    pub fn ended(&self) -> usize {
        self.done.len()
    }

    /// How many have ended since the last call; they are forgotten.
    pub fn take_ended(&mut self) -> usize {
        self.done.drain(..).count()
    }

    /// Close all of it; nothing may be left, and nothing forbidden was done.
    pub fn end(&mut self) {
        self.close();
        assert_eq!((self.emulator.violations(), self.emulator.first_violation()), (0, None));
        assert!(!self.emulator.is_open(), "the function is closed");
        assert_eq!(self.emulator.mappings(), 0, "nothing is mapped");
    }

    pub fn disk(&self, core: usize) -> &dyn DiskChannel {
        self.cores[core].as_ref()
    }

    /// One turn of everything; what ended is in `done`.
    pub fn turn(&mut self) {
        self.turn_of(|_| true);
    }

    /// The same with those cores alone.
    pub fn turn_of(&mut self, mut has_turn: impl FnMut(usize) -> bool) {
        self.step(true);
        self.is_busy.resize(self.cores.len(), false);
        for (index, core) in self.cores.iter_mut().enumerate() {
            if has_turn(index) {
                self.is_busy[index] = core.poll(Nanos::ZERO, &mut self.done);
            }
        }
    }

    /// A turn without the cores, and without the drive if it is not `answering`.
    pub fn step(&mut self, answering: bool) {
        self.now += TURN_MS;
        self.manager.step(self.now);
        if answering {
            self.emulator.step();
        }
    }

    pub fn run_for(&mut self, ms: u64) {
        for _ in 0..ms / TURN_MS {
            self.turn();
        }
    }

    pub fn until(&mut self, mut is_so: impl FnMut(&World) -> bool) {
        for _ in 0..TURNS_MAX {
            if is_so(self) {
                return;
            }
            self.turn();
        }
        panic!("it did not happen");
    }

    /// One command on core 0, to its end.
    pub fn submit(
        &mut self,
        op: Op,
        range: BlockRange,
        buf: Option<Buf>,
    ) -> (Result<(), DiskError>, Option<Buf>) {
        self.submit_on(0, op, range, buf)
    }

    /// One command on a core, to its end.
    pub fn submit_on(
        &mut self,
        core: usize,
        op: Op,
        range: BlockRange,
        buf: Option<Buf>,
    ) -> (Result<(), DiskError>, Option<Buf>) {
        self.tokens += 1;
        let token = Token(self.tokens);
        let done = self.cores[core].submit(token, &IoRequest::new(op, range), buf);
        self.wait(token, done)
    }

    /// A copy on core 0, to its end.
    pub fn copy(&mut self, from: BlockRange, to: u64, fua: bool) -> Result<(), DiskError> {
        self.tokens += 1;
        let token = Token(self.tokens);
        let done = self.cores[0].copy(token, from, to, fua);
        self.wait(token, done).0
    }

    fn wait(&mut self, token: Token, done: Option<Done>) -> (Result<(), DiskError>, Option<Buf>) {
        if let Some(done) = done {
            return (done.result, done.buf);
        }
        self.until(|world| world.done.iter().any(|done| done.token == token));
        let at = self.done.iter().position(|done| done.token == token).expect("just seen");
        let done = self.done.swap_remove(at);
        (done.result, done.buf)
    }

    pub fn command(&mut self, op: Op, range: BlockRange) -> Result<(), DiskError> {
        self.submit(op, range, None).0
    }

    pub fn write(&mut self, lba: u64, data: &[u8], fua: bool) -> Result<(), DiskError> {
        let bytes = u32::try_from(data.len()).expect("small");
        let mut buf = self.pool.take(bytes).expect("room");
        buf.copy_in(0, data);
        self.submit(Op::Write { fua }, BlockRange { lba, blocks: bytes / 512 }, Some(buf)).0
    }

    pub fn compare(&mut self, lba: u64, data: &[u8]) -> Result<(), DiskError> {
        let bytes = u32::try_from(data.len()).expect("small");
        let mut buf = self.pool.take(bytes).expect("room");
        buf.copy_in(0, data);
        let (result, buf) = self.submit(Op::Compare, BlockRange { lba, blocks: bytes / 512 }, Some(buf));
        assert!(buf.is_some_and(|buf| buf.equals_at(0, data)), "it comes back as it was");
        result
    }

    pub fn read(&mut self, lba: u64, blocks: u32) -> Result<Vec<u8>, DiskError> {
        let buf = self.pool.take(blocks * 512).expect("room");
        let (result, buf) = self.submit(Op::Read, BlockRange { lba, blocks }, Some(buf));
        let buf = buf.expect("comes back");
        result.map(|()| bytes_of(&buf))
    }

    /// Begin a read on a core of what is not in its cache; it is counted when it ends.
    pub fn start_prepared(&mut self, core: usize, range: BlockRange) {
        let request = IoRequest::new(Op::Read, range);
        assert!(matches!(self.cores[core].prepare(&request, None), Prepared::Later));
        self.tokens += 1;
        let done = self.cores[core].submit(Token(self.tokens), &request, None);
        self.done.extend(done);
    }

    /// A read on a core as a target has it, to its end: its data, and whether it was answered at once.
    pub fn read_prepared(&mut self, core: usize, range: BlockRange) -> Result<(Vec<u8>, bool), DiskError> {
        let request = IoRequest::new(Op::Read, range);
        let buf = match self.cores[core].prepare(&request, None) {
            Prepared::Ready(data) => return Ok((bytes_of(&data), true)),
            Prepared::Later => None,
            Prepared::Pool => Some(self.pool.take(range.blocks * 512).expect("room")),
            Prepared::Fill(_) | Prepared::Wait => panic!("no answer of a cache"),
        };
        let (result, buf) = self.submit_on(core, Op::Read, range, buf);
        result.map(|()| (bytes_of(&buf.expect("data")), false))
    }

    /// Drop the cores and the drive; the manager ends.
    pub fn close(&mut self) {
        self.cores.clear();
        self.drop_drive();
        self.until(|world| world.manager.has_ended());
    }
}

fn bytes_of(buf: &Buf) -> Vec<u8> {
    let mut data = vec![0; buf.len()];
    buf.copy_out(0, &mut data);
    data
}
