//! Two cores on one cache: no read is older than what was acknowledged before it began, and none is torn.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Buf;

use super::held::HeldDisk;
use super::{CachedDisk, PolicyKind, spec};
use crate::testing::{Random, pool};
use crate::{BlockRange, ChannelContext, Disk, DiskChannel, Done, IoRequest, Op, Prepared, Token};

const PAGE: u32 = 4096;
/// More than the cache has room for.
const PAGES: u64 = 24;
const COMMANDS: u64 = 30_000;

/// What is known of a read in flight.
struct Asked {
    token: Token,
    page: u64,
    floor: u64,
}

struct Core<'a> {
    disk: Box<dyn DiskChannel>,
    /// The newest version of each page that was acknowledged.
    acknowledged: &'a [AtomicU64],
    asked: Vec<Asked>,
    random: Random,
    /// Counts the changes of the cache, and what this core was told.
    changes: &'a AtomicU64,
    told: u64,
}

fn version(buf: &Buf, page: u64) -> u64 {
    let bytes: Vec<u8> = buf.segments().flatten().copied().collect();
    let words: Vec<u64> =
        bytes.chunks(8).map(|word| u64::from_le_bytes(word.try_into().expect("8 bytes"))).collect();
    assert!(words.iter().all(|word| *word == words[0]), "a torn page");
    if words[0] == 0 {
        return 0;
    }
    assert_eq!(words[0] >> 32, page, "another page");
    words[0] & 0xffff_ffff
}

impl Core<'_> {
    fn on_read(&self, asked: &Asked, buf: &Buf) {
        let seen = version(buf, asked.page);
        assert!(seen >= asked.floor, "page {}: {seen} is older than {}", asked.page, asked.floor);
    }

    fn read(&mut self, token: u64, pool: &spindle_reactor::mem::Pool) {
        let page = self.random.below(PAGES);
        let asked = Asked { token: Token(token), page, floor: self.acknowledged[slot(page)].load(SeqCst) };
        let request = IoRequest::new(Op::Read, BlockRange { lba: page * 8, blocks: 8 });
        let buf = match self.disk.prepare(&request, None) {
            Prepared::Ready(data) => return self.on_read(&asked, &data),
            Prepared::Later => None,
            Prepared::Pool => Some(pool.take(PAGE).expect("a buffer")),
            Prepared::Fill(_) | Prepared::Wait => panic!("no answer of a cache"),
        };
        self.asked.push(asked);
        assert!(self.disk.submit(Token(token), &request, buf).is_none());
    }

    fn poll(&mut self, done: &mut Vec<Done>) {
        let changes = self.changes.load(SeqCst);
        if changes != self.told && self.random.below(4) == 0 {
            self.told = changes;
            self.disk.reconfigure();
        }
        self.disk.poll(Nanos::ZERO, done);
        for ended in done.drain(..) {
            assert_eq!(ended.result, Ok(()));
            if let Some(at) = self.asked.iter().position(|asked| asked.token == ended.token) {
                let asked = self.asked.swap_remove(at);
                self.on_read(&asked, ended.buf.as_ref().expect("data"));
            }
        }
    }

    /// Write the next version of a page of this core's, to the end.
    fn write(&mut self, token: u64, page: u64, pool: &spindle_reactor::mem::Pool, done: &mut Vec<Done>) {
        let next = self.acknowledged[slot(page)].load(SeqCst) + 1;
        let mut buf = pool.take(PAGE).expect("a buffer");
        buf.copy_in(0, &(page << 32 | next).to_le_bytes().repeat(512));
        let request = IoRequest::new(Op::Write { fua: false }, BlockRange { lba: page * 8, blocks: 8 });
        assert!(self.disk.submit(Token(token), &request, Some(buf)).is_none());
        let before = self.asked.len();
        while self.disk.in_flight() > 0 {
            self.poll(done);
        }
        assert!(self.asked.len() <= before);
        self.acknowledged[slot(page)].store(next, SeqCst);
    }
}

fn slot(page: u64) -> usize {
    usize::try_from(page).expect("small")
}

fn run(source: &dyn Disk, acknowledged: &[AtomicU64], changes: &AtomicU64, core: u64) {
    let pool = pool();
    let context = ChannelContext { core: usize::from(core == 1), pool: pool.clone(), depth: 64 };
    let disk = source.open(&context).expect("opens");
    let (asked, random) = (Vec::new(), Random(core + 1));
    let mut it = Core { disk, acknowledged, asked, random, changes, told: 0 };
    let mut done = Vec::with_capacity(64);
    for token in 0..COMMANDS {
        if it.random.below(16) == 0 {
            let page = it.random.below(PAGES / 2) * 2 + core;
            it.write(token, page, &pool, &mut done);
        } else {
            it.read(token, &pool);
        }
        while it.asked.len() > 8 || it.random.below(4) == 0 {
            it.poll(&mut done);
        }
    }
    while it.disk.in_flight() > 0 {
        it.poll(&mut done);
    }
    assert_eq!(pool.free_bytes(), super::super::super::testing::pool().free_bytes());
}

#[test]
fn no_read_is_older_than_what_was_acknowledged_and_none_is_torn() {
    for policy in [PolicyKind::S3Fifo, PolicyKind::Lru] {
        let (inner, control) = HeldDisk::create(512, slot(PAGES) * 4096);
        control.bytes.lock().expect("no panic").fill(0);
        let source = CachedDisk::new(inner, Some(&spec(64 << 10, policy))).expect("a cache");
        let acknowledged: Arc<[AtomicU64]> = (0..PAGES).map(|_| AtomicU64::new(0)).collect();
        std::thread::scope(|scope| {
            for core in 0..2 {
                let (source, acknowledged) = (&source, &acknowledged);
                scope.spawn(move || run(&**source, acknowledged, &AtomicU64::new(0), core));
            }
        });
        let counts = source.counts();
        assert!(counts.hits > 1000 && counts.evictions > 1000, "{counts:?}");
        let shared = source.shared();
        let words = shared.words();
        let [free, filling, present, detached] = words.census();
        assert_eq!((filling, detached, free + present), (0, 0, 16), "{counts:?}");
        assert_eq!(source.shared().index.len(), present as usize);
    }
}

struct Ends<'a>(&'a AtomicU64);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

/// The same while the cache comes, gets another size and goes, at any time on either core.
#[test]
fn no_read_is_older_while_the_cache_changes() {
    let (inner, control) = HeldDisk::create(512, slot(PAGES) * 4096);
    control.bytes.lock().expect("no panic").fill(0);
    let source = CachedDisk::new(inner, None).expect("a disk");
    let acknowledged: Arc<[AtomicU64]> = (0..PAGES).map(|_| AtomicU64::new(0)).collect();
    let (changes, running) = (AtomicU64::new(0), AtomicU64::new(2));
    let mut counts = Vec::new();
    std::thread::scope(|scope| {
        for core in 0..2 {
            let (source, acknowledged, changes, running) = (&source, &acknowledged, &changes, &running);
            scope.spawn(move || {
                // Also when it panics.
                let _ends = Ends(running);
                run(&**source, acknowledged, changes, core);
            });
        }
        let mut random = Random(7);
        while running.load(SeqCst) > 0 {
            let sizes = [None, Some(64 << 10), Some(96 << 10)];
            let size = sizes[slot(random.below(3))];
            counts.push(source.counts());
            let spec = size.map(|bytes| spec(bytes, PolicyKind::S3Fifo));
            if let Some(change) = source.prepare_cache(spec.as_ref()).expect("a cache") {
                source.set_cache(change);
                changes.fetch_add(1, SeqCst);
            }
            // Most changes come to their end, some do not.
            std::thread::park_timeout(std::time::Duration::from_micros(random.below(1500)));
        }
    });
    let with_hits = counts.iter().filter(|counts| counts.hits > 0).count();
    assert!(changes.load(SeqCst) > 20 && with_hits > 5, "{with_hits} of {}", changes.load(SeqCst));
}
