//! Shared code of the tests of all disk kinds: a driver of one disk handle, temporary files, random numbers.

pub(crate) mod able;
pub(crate) mod model;
pub(crate) mod steady;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Buf, Pages, Pool, ZoneSpec};

use crate::{BlockRange, ChannelContext, Disk, DiskChannel, DiskError, Done, IoRequest, Op, Prepared, Token};

/// Timeout of a command. Long: a flush may wait for other writers of the machine.
pub(crate) const TEST_TIME_MAX: Duration = Duration::from_secs(300);

/// Random number generator (PCG-like), deterministic by seed.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }

    pub(crate) fn byte(&mut self) -> u8 {
        u8::try_from(self.below(255) + 1).expect("a byte, not zero")
    }
}

/// Path of a temporary file, removed on drop.
pub(crate) struct TempPath(PathBuf);

impl TempPath {
    pub(crate) fn new() -> TempPath {
        TempPath::in_folder(&std::env::temp_dir())
    }

    pub(crate) fn in_folder(folder: &Path) -> TempPath {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        TempPath(folder.join(format!("spindle-disk-{}-{number}", std::process::id())))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TempPath {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

pub(crate) fn pool() -> Pool {
    let zones = [ZoneSpec { buffer_bytes: 4096, count: 64 }, ZoneSpec { buffer_bytes: 65536, count: 64 }];
    Pool::new(&zones, Pages::Base).expect("pool")
}

/// One disk handle, used as by the target.
pub(crate) struct Driver {
    pub(crate) pool: Pool,
    pub(crate) disk: Box<dyn DiskChannel>,
    pub(crate) block_bytes: u32,
    pub(crate) token_next: u64,
    /// Time passed to the disk; advances by 1 microsecond per poll.
    now: Nanos,
    done: Vec<Done>,
    ended: Vec<Done>,
}

impl Driver {
    pub(crate) fn new(source: &dyn Disk) -> Driver {
        Driver::with_depth(source, 0, 32)
    }

    pub(crate) fn with_depth(source: &dyn Disk, core: usize, depth: u32) -> Driver {
        let pool = pool();
        let disk = source.open(&ChannelContext { core, pool: pool.clone(), depth }).expect("opens");
        let block_bytes = disk.geometry().block_bytes;
        let (done, now) = (Vec::with_capacity(8), Nanos::ZERO);
        Driver { pool, disk, block_bytes, token_next: 1, now, done, ended: Vec::new() }
    }

    pub(crate) fn bytes(&self, range: BlockRange) -> u32 {
        range.blocks * self.block_bytes
    }

    /// A buffer for a write with `data`, from the disk or the pool, as [`DiskChannel::prepare`] decides.
    pub(crate) fn buffer(&mut self, range: BlockRange, data: &[u8]) -> Buf {
        let mut buf = match self.disk.prepare(&IoRequest::new(Op::Write { fua: false }, range), None) {
            Prepared::Fill(buf) => buf,
            Prepared::Pool => self.pool.take(self.bytes(range)).expect("a buffer is free"),
            Prepared::Ready(_) | Prepared::Later | Prepared::Wait => panic!("a buffer is free"),
        };
        buf.copy_in(0, data);
        buf
    }

    fn token(&mut self) -> Token {
        self.token_next += 1;
        Token(self.token_next - 1)
    }

    /// Begins a command and returns its token.
    pub(crate) fn submit(&mut self, op: Op, range: BlockRange, data: &[u8]) -> Token {
        let token = self.token();
        let request = IoRequest::new(op, range);
        let buf = match (op, self.disk.abilities().reads_in_place) {
            (Op::Write { .. }, _) => Some(self.buffer(range, data)),
            (Op::Read, false) => match self.disk.prepare(&request, None) {
                Prepared::Ready(data) => {
                    self.ended.push(Done { token, result: Ok(()), buf: Some(data) });
                    return token;
                }
                Prepared::Fill(buf) => Some(buf),
                Prepared::Pool => Some(self.pool.take(self.bytes(range)).expect("a buffer is free")),
                Prepared::Later => None,
                Prepared::Wait => panic!("memory is free"),
            },
            (Op::Compare, _) => {
                let mut buf = self.pool.take(self.bytes(range)).expect("a buffer is free");
                buf.copy_in(0, data);
                Some(buf)
            }
            (Op::Read | Op::Flush | Op::WriteZeroes { .. } | Op::Deallocate | Op::Verify, _) => None,
        };
        self.ended.extend(self.disk.submit(token, &request, buf));
        token
    }

    /// Begins a compare-and-write of one block and returns its token.
    pub(crate) fn submit_swap(&mut self, lba: u64, expected: &[u8], data: &[u8]) -> Token {
        let token = self.token();
        let range = BlockRange { lba, blocks: 1 };
        let mut expects = self.pool.take(self.block_bytes).expect("a buffer is free");
        expects.copy_in(0, expected);
        let data = self.buffer(range, data);
        self.ended.extend(self.disk.compare_and_write(token, range, expects, data));
        token
    }

    /// Copies blocks and waits for the end.
    pub(crate) fn copy(&mut self, from: BlockRange, to: u64, fua: bool) -> Result<(), DiskError> {
        let token = self.token();
        self.ended.extend(self.disk.copy(token, from, to, fua));
        self.wait(token).result
    }

    /// Polls the disk once.
    pub(crate) fn poll(&mut self) -> bool {
        self.now += Nanos::from_us(1);
        let is_busy = self.disk.poll(self.now, &mut self.done);
        self.ended.append(&mut self.done);
        is_busy
    }

    /// The completion of a command, if it has ended.
    pub(crate) fn try_end(&mut self, token: Token) -> Option<Done> {
        let index = self.ended.iter().position(|done| done.token == token)?;
        Some(self.ended.swap_remove(index))
    }

    /// Polls until a command has ended.
    pub(crate) fn wait(&mut self, token: Token) -> Done {
        let start = Instant::now();
        loop {
            if let Some(done) = self.try_end(token) {
                return done;
            }
            self.poll();
            assert!(start.elapsed() < TEST_TIME_MAX, "{token:?} does not end");
        }
    }

    /// Polls until no command is in flight.
    pub(crate) fn drain(&mut self) {
        let start = Instant::now();
        while self.disk.in_flight() > 0 {
            self.poll();
            assert!(start.elapsed() < TEST_TIME_MAX, "{} do not end", self.disk.in_flight());
        }
    }

    pub(crate) fn run(&mut self, op: Op, lba: u64, blocks: u32) -> Result<(), DiskError> {
        let token = self.submit(op, BlockRange { lba, blocks }, &[]);
        self.wait(token).result
    }

    pub(crate) fn write(&mut self, lba: u64, data: &[u8], fua: bool) -> Result<(), DiskError> {
        let blocks = u32::try_from(data.len()).expect("small") / self.block_bytes;
        let token = self.submit(Op::Write { fua }, BlockRange { lba, blocks }, data);
        self.wait(token).result
    }

    pub(crate) fn read(&mut self, lba: u64, blocks: u32) -> Result<Vec<u8>, DiskError> {
        let token = self.submit(Op::Read, BlockRange { lba, blocks }, &[]);
        let done = self.wait(token);
        done.result.map(|()| done.buf.expect("a read has a buffer").segments().flatten().copied().collect())
    }

    pub(crate) fn swap(&mut self, lba: u64, expected: &[u8], data: &[u8]) -> Result<(), DiskError> {
        let token = self.submit_swap(lba, expected, data);
        self.wait(token).result
    }
}
