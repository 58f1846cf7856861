//! [`FarCache`]: the cache of the far target, and the optimistic reads of it by the queues of the remote disk
//! ([`Client`]), with the shipped client of the initiator.
//!
//! ```text
//!   ordinary read of a page ── reference ──> Attached (shipped) ── post ──> SimReader: blocks and seal in
//!                                                                             any order, in several turns
//! ```
//! Frame `n` contains page `n`. Its generation is odd while the frame has the newest content; a write makes
//! it even, and the next ordinary read of the page odd again. Pages are evicted, and the cache goes and
//! comes, at random.

use std::cell::RefCell;
use std::rc::Rc;

use nvme_spec::optimistic::PageReference;
use nvme_spec::{Cqe, Sqe};
use spindle_nvme_initiator::OptimisticCounts;
use spindle_nvme_optimistic::client::{Attached, NamespacePages, OptimisticOptions, Outcome, PageReader};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Buf;

use super::book::index;
use super::far::{FarShared, lock};
use crate::sim::Rng;
use crate::sim::model::fill;

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;

/// See the module.
#[derive(Debug)]
pub struct FarCache {
    /// Chance of everything that is only here.
    pub rng: Rng,
    /// The cache is there.
    is_there: bool,
    /// Of the cache that is there, or was there last.
    epoch: u8,
    /// By page.
    generations: Vec<u32>,
    blocks_per_page: u64,
}

impl FarCache {
    /// A cache that is there, without a page.
    #[must_use]
    pub fn new(blocks: u64, block_bytes: u32, seed: u64) -> FarCache {
        let blocks_per_page = PAGE_BYTES as u64 / u64::from(block_bytes);
        FarCache {
            rng: Rng::new(seed ^ 0x00ca_c4e0),
            is_there: true,
            epoch: 1,
            generations: vec![0; index(blocks.div_ceil(blocks_per_page))],
            blocks_per_page,
        }
    }

    /// A block changes: the page leaves the cache.
    pub fn on_change(&mut self, block: u64) {
        self.break_seal(index(block / self.blocks_per_page));
    }

    fn break_seal(&mut self, page: usize) {
        self.generations[page] += self.generations[page] % 2;
    }

    /// The page that a range is, if it is one.
    #[must_use]
    pub fn page_of(&self, lba: u64, blocks: u32) -> Option<u64> {
        let is_page = u64::from(blocks) == self.blocks_per_page && lba.is_multiple_of(self.blocks_per_page);
        is_page.then_some(lba / self.blocks_per_page)
    }

    /// An ordinary read has the newest content of a page: its reference.
    pub fn enter(&mut self, page: u64) -> Option<PageReference> {
        if !self.is_there || self.rng.permille(200) {
            return None;
        }
        let generation = &mut self.generations[index(page)];
        *generation |= 1;
        let frame = u32::try_from(page).expect("few");
        Some(PageReference { frame, generation: *generation, epoch: self.epoch })
    }

    /// The seal of a frame, for a reader of the cache `epoch`.
    fn seal(&self, frame: u32, epoch: u8) -> u64 {
        if epoch != self.epoch {
            return 0;
        }
        let generation = self.generations[frame as usize];
        PageReference { frame, generation, epoch }.seal(frame.into())
    }

    /// What happens in a turn. Returns true when the cache went.
    pub fn happen(&mut self) -> bool {
        if self.rng.permille(20) {
            let page = self.rng.size(0, self.generations.len() - 1);
            self.break_seal(page);
        }
        if self.rng.below(10_000) >= if self.is_there { 5 } else { 200 } {
            return false;
        }
        self.is_there = !self.is_there;
        if self.is_there {
            self.epoch = self.epoch.wrapping_add(1);
        } else {
            (0..self.generations.len()).for_each(|page| self.break_seal(page));
        }
        !self.is_there
    }

    /// The cache that is there now.
    #[must_use]
    pub fn grant(&self) -> Option<u8> {
        self.is_there.then_some(self.epoch)
    }
}

/// READs in flight.
struct InFlight {
    slot: usize,
    frames: Vec<u32>,
    buf: Buf,
    /// Blocks that are still to be read, and the seal, of each frame.
    left: Vec<usize>,
    seals: Vec<u64>,
}

/// A connection.
struct Line {
    world: FarShared,
    epoch: u8,
    is_up: bool,
    reads: Vec<InFlight>,
}

/// The end of a connection that the shipped client has.
pub struct SimReader(Rc<RefCell<Line>>);

impl Line {
    /// The cache is gone, and the service has noticed.
    fn has_ended(&self) -> bool {
        let cache = &mut lock(&self.world).cache;
        cache.grant() != Some(self.epoch) && cache.rng.permille(50)
    }

    /// Reads some of what is left.
    fn advance(&mut self) {
        let mut world = lock(&self.world);
        for read in &mut self.reads {
            let blocks = index(world.cache.blocks_per_page);
            let bytes = PAGE_BYTES / blocks;
            for _ in 0..world.cache.rng.size(0, 5 * read.frames.len()) {
                if read.left.is_empty() {
                    break;
                }
                let at = world.cache.rng.size(0, read.left.len() - 1);
                let part = read.left.swap_remove(at);
                let (at, block) = (part / (blocks + 1), part % (blocks + 1));
                let frame = read.frames[at];
                if block == blocks {
                    read.seals[at] = world.cache.seal(frame, self.epoch);
                    continue;
                }
                let mut content = vec![0; bytes];
                fill(world.disk[frame as usize * blocks + block], &mut content);
                read.buf.copy_in(at * PAGE_BYTES + block * bytes, &content);
            }
        }
    }
}

impl PageReader for SimReader {
    fn post(&mut self, slot: usize, frames: &[u32], buf: Buf) -> Result<(), Buf> {
        let mut line = self.0.borrow_mut();
        if !line.is_up {
            return Err(buf);
        }
        let parts = index(lock(&line.world).cache.blocks_per_page) + 1;
        let left = (0..frames.len() * parts).collect();
        let seals = vec![0; frames.len()];
        line.reads.push(InFlight { slot, frames: frames.to_vec(), buf, left, seals });
        Ok(())
    }

    fn send(&mut self) {}

    fn poll(&mut self, _now: Nanos, mut each: impl FnMut(usize, Option<&[u64]>, Buf)) -> bool {
        let mut line = self.0.borrow_mut();
        if line.is_up {
            line.advance();
        }
        let is_up = line.is_up;
        let mut has_any = false;
        for read in line.reads.extract_if(.., |read| !is_up || read.left.is_empty()) {
            has_any = true;
            each(read.slot, is_up.then_some(&read.seals), read.buf);
        }
        has_any
    }

    fn end(&mut self) {
        self.0.borrow_mut().is_up = false;
    }

    fn is_connected(&self) -> bool {
        self.0.borrow().is_up
    }

    fn epoch(&self) -> u8 {
        self.0.borrow().epoch
    }

    fn in_flight(&self) -> usize {
        self.0.borrow().reads.len()
    }
}

/// A connection attempt.
pub struct SimAttaching {
    epoch: u8,
    due: Nanos,
    fails: bool,
}

impl SimAttaching {
    /// With the token of the cache `epoch`.
    #[must_use]
    pub fn begin(world: &FarShared, epoch: u8, now: Nanos) -> SimAttaching {
        let rng = &mut lock(world).cache.rng;
        let due = now + Nanos::from_us(rng.between(1, 200_000));
        SimAttaching { epoch, due, fails: rng.permille(100) }
    }

    /// `None`: not yet; `Some(None)`: refused.
    #[must_use]
    pub fn step(&self, world: &FarShared, depth: usize, now: Nanos) -> Option<Option<Client>> {
        if now < self.due {
            return None;
        }
        let is_valid = lock(world).cache.grant() == Some(self.epoch);
        Some((is_valid && !self.fails).then(|| {
            Client::new(
                Rc::new(RefCell::new(Line {
                    world: FarShared::clone(world),
                    epoch: self.epoch,
                    is_up: true,
                    reads: Vec::new(),
                })),
                depth,
            )
        }))
    }
}

/// The optimistic reads of a queue.
pub struct Client {
    line: Rc<RefCell<Line>>,
    optimistic: Attached<SimReader>,
}

impl Client {
    fn new(line: Rc<RefCell<Line>>, depth: usize) -> Client {
        let options = OptimisticOptions { directory_pages: 32, ..OptimisticOptions::default() };
        let namespace = NamespacePages::new(1, 4096, 0, &options);
        let optimistic = Attached::new(SimReader(Rc::clone(&line)), namespace, depth).expect("memory");
        Client { line, optimistic }
    }

    /// The connection has not ended.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.line.borrow().is_up
    }

    /// What was read.
    #[must_use]
    pub fn counts(&self) -> OptimisticCounts {
        self.optimistic.counts()
    }

    /// Posts a read in a free slot, if it is one of a known page.
    pub fn try_read(&mut self, slot: usize, sqe: Sqe, offset: u64, buf: Buf) -> Result<(), Buf> {
        match self.optimistic.pages(1, offset, buf.len()) {
            Some(pages) => self.optimistic.try_read(slot, pages, sqe, buf),
            None => Err(buf),
        }
    }

    /// A slot has an ordinary command; `read`: offset and length of a read.
    pub fn note(&mut self, slot: usize, read: Option<(u64, usize)>) {
        let pages = read.and_then(|(offset, bytes)| self.optimistic.pages(1, offset, bytes));
        self.optimistic.note(slot, pages);
    }

    /// A write is sent.
    pub fn on_write(&mut self, offset: u64, bytes: usize) {
        self.optimistic.on_write(1, offset, bytes);
    }

    /// An ordinary command has ended well.
    pub fn on_read(&mut self, slot: usize, reference: Option<PageReference>, buf: Option<&Buf>) {
        let result = reference.map_or(0, PageReference::to_result);
        self.optimistic.on_read(slot, &Cqe::default().with_result_u64(result), buf);
    }

    /// Reads that have ended. The service ends a connection to a cache that is gone, some time later.
    pub fn poll(&mut self, now: Nanos) -> Vec<(usize, Outcome)> {
        if self.line.borrow().has_ended() {
            self.line.borrow_mut().is_up = false;
        }
        let mut ended = Vec::new();
        self.optimistic.poll(now, |slot, outcome| ended.push((slot, outcome)));
        ended
    }

    /// The queue is lost.
    pub fn end(&mut self) {
        self.optimistic.end();
    }
}
