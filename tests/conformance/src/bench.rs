//! [`Bench`]: two cores with a stack of layers over a rig's disk, used as by the target.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Buf, Pages, Pool, ZoneSpec};
use spindle_target_disk::{
    BlockRange, ChannelContext, DiskChannel, Done, IoRequest, Op, Owner, Prepared, Token,
};

use crate::Rig;
use crate::stack::{CACHES, Layers, Stack, cache};

/// Cores of a bench.
pub(crate) const CORES: usize = 2;
/// Bytes of a block.
pub(crate) const BLOCK: usize = 512;
/// Time of a turn.
pub(crate) const TURN: Nanos = Nanos::from_ms(1);
/// Turns in which a cache to switch changes; each change takes some memory until it is complete.
const SWITCHED_TURNS: usize = 700;
/// Turns, and time, after which a command that should have ended has not: the kernel's disks are not in the
/// bench's time.
const TURNS_MAX: usize = 200_000;
const TIME_MAX: Duration = Duration::from_secs(120);

/// Result of a command: as in [`Done`], with the bytes of the buffer.
pub(crate) type Ended = (Result<(), spindle_target_disk::DiskError>, Option<Vec<u8>>);

/// See the module.
pub struct Bench {
    /// Cores are dropped before the disk.
    cores: Vec<Box<dyn DiskChannel>>,
    layers: Layers,
    pub(crate) rig: Box<dyn Rig>,
    pub(crate) stack: Stack,
    promise: &'static str,
    pool: Pool,
    free_at_first: u64,
    /// Commands without their [`Done`]: core and owner.
    open: HashMap<Token, (usize, Owner)>,
    ended: HashMap<Token, Done>,
    done: Vec<Done>,
    tokens: u64,
    turns: usize,
    pub(crate) now: Nanos,
}

impl Bench {
    pub(crate) fn new(rig: Box<dyn Rig>, stack: Stack, promise: &'static str) -> Bench {
        let zones =
            [ZoneSpec { buffer_bytes: 4096, count: 256 }, ZoneSpec { buffer_bytes: 65_536, count: 64 }];
        let pool = Pool::new(&zones, Pages::Base).expect("a pool");
        let layers = stack.over(rig.source());
        let open = |core| {
            let context = ChannelContext { core, pool: pool.clone(), depth: 64 };
            layers.source.open(&context).expect("opens")
        };
        let cores = (0..CORES).map(open).collect();
        let mut bench = Bench {
            cores,
            layers,
            rig,
            stack,
            promise,
            free_at_first: pool.free_bytes(),
            pool,
            open: HashMap::new(),
            ended: HashMap::new(),
            done: Vec::with_capacity(64),
            tokens: 0,
            turns: 0,
            now: Nanos::ZERO,
        };
        // A core learns of its device in its first turns.
        (0..10).for_each(|_| bench.turn());
        bench
    }

    /// Says what is being checked, for a message.
    pub(crate) fn label(&self) -> String {
        format!("{} of {:?} over {}", self.promise, self.stack, self.layers.source.kind())
    }

    pub(crate) fn disk(&mut self, core: usize) -> &mut dyn DiskChannel {
        &mut *self.cores[core]
    }

    pub(crate) fn source(&self) -> &dyn spindle_target_disk::Disk {
        &*self.layers.source
    }

    pub(crate) fn blocks(&self) -> u64 {
        self.layers.source.geometry().block_count
    }

    /// One turn of everything. A cache to switch changes every 7th turn at first.
    pub(crate) fn turn(&mut self) {
        self.turn_of(TURN);
    }

    pub(crate) fn turn_of(&mut self, time: Nanos) {
        self.turns += 1;
        self.now = self.rig.pass(time);
        if self.turns.is_multiple_of(7) && self.turns < SWITCHED_TURNS {
            self.switch(CACHES[self.turns / 7 % CACHES.len()]);
        }
        // As the target's core in each of its turns.
        self.pool.clear_claims();
        for core in 0..CORES {
            self.cores[core].poll(self.now, &mut self.done);
            for done in std::mem::take(&mut self.done) {
                self.on_done(core, done);
            }
            self.done = Vec::with_capacity(64);
        }
    }

    fn switch(&mut self, bytes: Option<u64>) {
        let Some(cached) = &self.layers.switched else { return };
        if let Ok(Some(change)) = cached.prepare_cache(bytes.map(cache).as_ref()) {
            cached.set_cache(change);
            self.cores.iter_mut().for_each(|core| core.reconfigure());
        }
    }

    fn on_done(&mut self, core: usize, done: Done) {
        let open = self.open.remove(&done.token);
        let label = self.label();
        let (of, _) = open.unwrap_or_else(|| panic!("{label}: {:?} ends twice, or never began", done.token));
        assert_eq!(of, core, "{label}: {:?} ends on another core", done.token);
        self.ended.insert(done.token, done);
    }

    fn token(&mut self, core: usize, owner: u32) -> Token {
        self.tokens += 1;
        let token = Token(u64::from(owner) << 32 | self.tokens);
        self.open.insert(token, (core, Owner(owner)));
        token
    }

    pub(crate) fn pool_buf(&self, data: &[u8]) -> Buf {
        let bytes = u32::try_from(data.len()).expect("small");
        let mut buf = self.pool.take(bytes).expect("a buffer is free");
        buf.copy_in(0, data);
        buf
    }

    /// Begins a command as the target does.
    pub(crate) fn submit(
        &mut self,
        core: usize,
        owner: u32,
        op: Op,
        range: BlockRange,
        data: &[u8],
    ) -> Token {
        let token = self.token(core, owner);
        let request = IoRequest { client: 1, ..IoRequest::new(op, range) };
        let bytes = vec![0xaa; range.blocks as usize * BLOCK];
        let buf = match op {
            Op::Read | Op::Write { .. } => loop {
                match self.cores[core].prepare(&request, None) {
                    Prepared::Ready(buf) => {
                        self.on_done(core, Done { token, result: Ok(()), buf: Some(buf) });
                        return token;
                    }
                    Prepared::Fill(mut buf) => {
                        buf.copy_in(0, if op == Op::Read { &bytes } else { data });
                        break Some(buf);
                    }
                    Prepared::Pool => break Some(self.pool_buf(if op == Op::Read { &bytes } else { data })),
                    Prepared::Later => break None,
                    Prepared::Wait => self.turn(),
                }
            },
            Op::Compare => Some(self.pool_buf(data)),
            Op::Flush | Op::WriteZeroes { .. } | Op::Deallocate | Op::Verify => None,
        };
        let done = self.cores[core].submit(token, &request, buf);
        done.into_iter().for_each(|done| self.on_done(core, done));
        token
    }

    pub(crate) fn submit_copy(&mut self, core: usize, from: BlockRange, to: u64) -> Token {
        let token = self.token(core, 1);
        let done = self.cores[core].copy(token, from, to, false);
        done.into_iter().for_each(|done| self.on_done(core, done));
        token
    }

    pub(crate) fn submit_compare_and_write(&mut self, core: usize, lba: u64, data: [&[u8]; 2]) -> Token {
        let token = self.token(core, 1);
        let range = BlockRange { lba, blocks: 1 };
        let expected = self.pool_buf(data[0]);
        let write = IoRequest::new(Op::Write { fua: false }, range);
        let data = match self.cores[core].prepare(&write, None) {
            Prepared::Fill(mut buf) => {
                buf.copy_in(0, data[1]);
                buf
            }
            Prepared::Pool => self.pool_buf(data[1]),
            other @ (Prepared::Ready(_) | Prepared::Later | Prepared::Wait) => {
                panic!("{}: memory for a write: {other:?}", self.label())
            }
        };
        let done = self.cores[core].compare_and_write(token, range, expected, data);
        done.into_iter().for_each(|done| self.on_done(core, done));
        token
    }

    /// Returns the end of a command, if it has ended.
    pub(crate) fn take(&mut self, token: Token) -> Option<Done> {
        self.ended.remove(&token)
    }

    /// Waits for the end of a command.
    pub(crate) fn wait(&mut self, token: Token) -> Ended {
        let (begin, turns) = (Instant::now(), self.turns);
        while self.turns < turns + TURNS_MAX || begin.elapsed() < TIME_MAX {
            if let Some(done) = self.take(token) {
                let bytes = |buf: &Buf| buf.segments().flatten().copied().collect();
                return (done.result, done.buf.as_ref().map(bytes));
            }
            self.turn();
            std::thread::yield_now();
        }
        let in_flight: Vec<usize> = self.cores.iter().map(|core| core.in_flight()).collect();
        panic!("{}: {token:?} does not end; open: {:?}, in flight {in_flight:?}", self.label(), self.open)
    }

    /// Checks the data of a read without printing all of it.
    #[track_caller]
    pub(crate) fn assert_same(&self, found: &[u8], expected: &[u8], what: &str) {
        let label = self.label();
        assert_eq!(found.len(), expected.len(), "{label}: {what}: bytes");
        if let Some(at) = found.iter().zip(expected).position(|(found, expected)| found != expected) {
            panic!("{label}: {what}: byte {at} is {:#x}, not {:#x}", found[at], expected[at]);
        }
    }

    /// Reads blocks and checks their bytes.
    #[track_caller]
    pub(crate) fn assert_reads(&mut self, core: usize, range: BlockRange, expected: &[u8], what: &str) {
        let found = self.read(core, range);
        self.assert_same(&found, expected, what);
    }

    /// Executes a command to its end.
    pub(crate) fn run(&mut self, core: usize, op: Op, range: BlockRange, data: &[u8]) -> Ended {
        let token = self.submit(core, 1, op, range, data);
        self.wait(token)
    }

    /// Reads blocks, which succeeds.
    pub(crate) fn read(&mut self, core: usize, range: BlockRange) -> Vec<u8> {
        let (result, data) = self.run(core, Op::Read, range, &[]);
        assert_eq!(result, Ok(()), "{}: {range:?}", self.label());
        data.unwrap_or_else(|| panic!("{}: a read without its data", self.label()))
    }

    /// Cancels an owner's commands on a core; returns how many are still to end.
    pub(crate) fn cancel(&mut self, core: usize, owner: u32) -> usize {
        self.cores[core].cancel_owner(Owner(owner))
    }

    /// Commands of an owner on a core that have not ended.
    pub(crate) fn open_of(&self, core: usize, owner: u32) -> usize {
        self.open.values().filter(|open| **open == (core, Owner(owner))).count()
    }

    pub(crate) fn has_open(&self) -> bool {
        !self.open.is_empty()
    }

    /// All commands have ended, and the disk has given all memory back.
    pub(crate) fn assert_at_rest(&mut self) {
        self.ended.clear();
        let (begin, turns) = (Instant::now(), self.turns);
        while self.turns < turns + TURNS_MAX || begin.elapsed() < TIME_MAX {
            if !self.has_open() && self.pool.free_bytes() == self.free_at_first {
                break;
            }
            self.turn();
            std::thread::yield_now();
        }
        let label = self.label();
        assert!(!self.has_open(), "{label}: commands do not end: {:?}", self.open);
        assert_eq!(self.pool.free_bytes(), self.free_at_first, "{label}: a buffer is left over");
        for core in &self.cores {
            assert_eq!(core.in_flight(), 0, "{label}: commands in flight at rest");
        }
    }
}
