//! [`SlowDisk`]: a disk of pages, each of which is read or written at a time of its own between the
//! submission of a command and its end.

use std::sync::{Arc, Mutex};

use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Buf;
use spindle_target_disk::{
    BlockRange, ChannelContext, Disk, DiskChannel, DiskError, Done, Geometry, IoRequest, Op, OpenError,
    Owner, ResizeError, Token,
};

use crate::sim::Rng;
use crate::sim::model::{fill, tag_of};

pub(super) const BLOCK: usize = 4096;

/// Content of a disk: the tag of each page. It outlives the target.
pub(super) type Content = Arc<Mutex<Vec<u64>>>;

pub(super) struct SlowDisk {
    pub(super) content: Content,
    pub(super) rng: Arc<Mutex<Rng>>,
    /// Commands that fail, of a thousand, after some of their pages were written.
    pub(super) fails: u64,
}

impl SlowDisk {
    fn pages(&self) -> u64 {
        self.content.lock().expect("no panic").len() as u64
    }
}

impl Disk for SlowDisk {
    fn name(&self) -> &'static str {
        "slow"
    }

    fn kind(&self) -> &'static str {
        "test"
    }

    fn geometry(&self) -> Geometry {
        Geometry {
            block_bytes: 4096,
            block_count: self.pages(),
            is_read_only: false,
            has_volatile_cache: false,
            can_deallocate: true,
            atomic_blocks: 1,
            can_compare_and_write: false,
        }
    }

    fn open(&self, _context: &ChannelContext) -> Result<Box<dyn DiskChannel>, OpenError> {
        let (content, rng) = (Arc::clone(&self.content), Arc::clone(&self.rng));
        let (geometry, fails) = (self.geometry(), self.fails);
        Ok(Box::new(SlowChannel { content, rng, geometry, fails, commands: Vec::new(), now: Nanos::ZERO }))
    }

    fn resize(&self, bytes: u64) -> Result<(), ResizeError> {
        ResizeError::unless_same(self, bytes, "the disk")
    }
}

struct Command {
    token: Token,
    op: Op,
    range: BlockRange,
    buf: Option<Buf>,
    /// When each page is moved, and what a read has found.
    pages: Vec<(Nanos, Option<u64>)>,
    end: Nanos,
    fails: bool,
}

struct SlowChannel {
    content: Content,
    rng: Arc<Mutex<Rng>>,
    geometry: Geometry,
    fails: u64,
    commands: Vec<Command>,
    now: Nanos,
}

impl Command {
    /// Moves the pages whose time has come.
    fn step(&mut self, content: &mut [u64], now: Nanos) {
        for (at, (due, found)) in self.pages.iter_mut().enumerate().filter(|(_, (due, _))| *due <= now) {
            if found.is_some() {
                continue;
            }
            let page = &mut content[usize::try_from(self.range.lba).expect("small") + at];
            match (self.op, &self.buf) {
                (Op::Write { .. }, Some(buf)) => {
                    let mut bytes = vec![0; BLOCK];
                    buf.copy_out(at * BLOCK, &mut bytes);
                    *page = tag_of(&bytes).expect("a block of one write");
                }
                (Op::WriteZeroes { .. } | Op::Deallocate, _) => *page = 0,
                (Op::Write { .. } | Op::Read | Op::Flush | Op::Compare | Op::Verify, _) => {}
            }
            *found = Some(*page);
            // Not moved a second time.
            *due = Nanos::ZERO;
        }
    }

    fn done(mut self) -> Done {
        if let (Op::Read, Some(buf)) = (self.op, &mut self.buf) {
            let mut bytes = vec![0; BLOCK];
            for (at, (_, found)) in self.pages.iter().enumerate() {
                fill(found.expect("its time has come"), &mut bytes);
                buf.copy_in(at * BLOCK, &bytes);
            }
        }
        let result = if self.fails { Err(DiskError::Internal) } else { Ok(()) };
        Done { token: self.token, result, buf: self.buf }
    }
}

impl DiskChannel for SlowChannel {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn submit(&mut self, token: Token, request: &IoRequest, buf: Option<Buf>) -> Option<Done> {
        let mut rng = self.rng.lock().expect("no panic");
        let end = self.now + Nanos::from_us(rng.between(1, 400));
        let due = |rng: &mut Rng| (self.now + Nanos(rng.below(end.0 - self.now.0 + 1)), None);
        let blocks = if matches!(request.op, Op::Flush) { 0 } else { request.range.blocks };
        let pages = (0..blocks).map(|_| due(&mut rng)).collect();
        let fails = rng.permille(self.fails);
        let (op, range) = (request.op, request.range);
        self.commands.push(Command { token, op, range, buf, pages, end, fails });
        None
    }

    fn poll(&mut self, now: Nanos, done: &mut Vec<Done>) -> bool {
        self.now = now;
        let mut content = self.content.lock().expect("no panic");
        self.commands.iter_mut().for_each(|command| command.step(&mut content, now));
        let ended: Vec<_> = self.commands.extract_if(.., |command| command.end <= now).collect();
        let is_busy = !ended.is_empty();
        done.extend(ended.into_iter().map(Command::done));
        is_busy
    }

    fn cancel_owner(&mut self, owner: Owner) -> usize {
        self.commands.iter().filter(|command| command.token.owner() == owner).count()
    }

    fn in_flight(&self) -> usize {
        self.commands.len()
    }
}
