//! What ends of optimistic reads send each other: private data of the connection manager, references, seals
//! and pages that the target invents.
//!
//! The first byte selects one of both. The client is the shipped one, over a reader that answers with what
//! the next bytes say. A read that it accepts has, page by page, the seal and the checksum of the newest
//! reference that the client had when it posted the read; each posted read ends once.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use nvme_spec::optimistic::{
    OptimisticAccept, OptimisticReject, OptimisticRequest, PageEntry, PageReference, page_checksum,
};
use nvme_spec::zerocopy::IntoBytes;
use nvme_spec::{Cqe, Sqe};
use spindle_nvme_optimistic::client::{
    Attached, NamespacePages, OptimisticOptions, Outcome, PageRange, PageReader,
};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Buf, Pages, Pool, ZoneSpec};

use super::bytes::Bytes;

/// Bytes of a program that are used: longer ones find nothing that a short one does not.
const BYTES_MAX: usize = 1024;
const SLOTS: usize = 4;
/// Pages that a program names: fewer than the directory has, so that none is forgotten.
const PAGES: usize = 8;
const PAGE_BYTES: usize = 4096;
const EPOCH: u8 = 3;

/// The body.
///
/// # Panics
/// When a promise is broken.
pub fn run(bytes: &[u8]) {
    let mut bytes = Bytes::new(&bytes[..bytes.len().min(BYTES_MAX)]);
    match bytes.below(2) {
        0 => private_data(bytes.rest()),
        _ => Program::new(bytes).run(),
    }
}

/// What is accepted is what the other end has written.
fn private_data(bytes: &[u8]) {
    if let Ok(token) = OptimisticRequest::parse(bytes) {
        assert_eq!(token, bytes[8..24], "the token");
    }
    if let Some(accept) = OptimisticAccept::parse(bytes) {
        assert_eq!(accept.as_bytes(), &bytes[..40]);
    }
    if let Some(status) = OptimisticReject::parse(bytes) {
        assert_eq!(OptimisticReject::new(status).as_bytes(), &bytes[..4]);
        assert!(!status.reason().is_empty());
    }
}

/// Reads in flight, and what the target answers to the next ones.
#[derive(Default)]
struct Line {
    posted: Vec<(usize, Vec<u32>, Buf)>,
    /// Of the next read that ends: seals, or none; and the byte of which each page consists.
    answer: (Option<Vec<u64>>, Vec<u8>),
    is_down: bool,
}

struct Reader(Rc<RefCell<Line>>);

impl PageReader for Reader {
    fn post(&mut self, slot: usize, frames: &[u32], buf: Buf) -> Result<(), Buf> {
        let mut line = self.0.borrow_mut();
        if line.is_down {
            return Err(buf);
        }
        line.posted.push((slot, frames.to_vec(), buf));
        Ok(())
    }

    fn send(&mut self) {}

    fn poll(&mut self, _now: Nanos, mut each: impl FnMut(usize, Option<&[u64]>, Buf)) -> bool {
        let mut line = self.0.borrow_mut();
        let ends = if line.is_down { line.posted.len() } else { line.posted.len().min(1) };
        let (seals, fills) = std::mem::take(&mut line.answer);
        for (slot, _, mut buf) in line.posted.drain(..ends).collect::<Vec<_>>() {
            for (at, fill) in fills.iter().enumerate().take(buf.len() / PAGE_BYTES) {
                buf.copy_in(at * PAGE_BYTES, &[*fill; PAGE_BYTES]);
            }
            each(slot, seals.as_deref(), buf);
        }
        ends > 0
    }

    fn end(&mut self) {
        self.0.borrow_mut().is_down = true;
    }

    fn is_connected(&self) -> bool {
        !self.0.borrow().is_down
    }

    fn epoch(&self) -> u8 {
        EPOCH
    }

    fn in_flight(&self) -> usize {
        self.0.borrow().posted.len()
    }
}

/// A reference that the client has, and the checksum of its page.
type Known = (PageReference, u64);

struct Program<'a> {
    bytes: Bytes<'a>,
    line: Rc<RefCell<Line>>,
    optimistic: Attached<Reader>,
    pool: Pool,
    now: Nanos,
    /// By page: the newest reference that the client may have.
    known: HashMap<u64, Known>,
    /// Reads in flight: their pages as they were known.
    posted: [Option<Vec<(u64, Known)>>; SLOTS],
}

impl<'a> Program<'a> {
    fn new(bytes: Bytes<'a>) -> Program<'a> {
        let line = Rc::new(RefCell::new(Line::default()));
        let options = OptimisticOptions { directory_pages: 4096, ..OptimisticOptions::default() };
        let namespace = NamespacePages::new(1, 4096, 0, &options);
        let optimistic = Attached::new(Reader(Rc::clone(&line)), namespace, SLOTS).expect("memory");
        let zone = ZoneSpec { buffer_bytes: 16 << 10, count: 8 };
        let pool = Pool::new(&[zone], Pages::Base).expect("a pool");
        let now = Nanos::from_secs(1);
        Program { bytes, line, optimistic, pool, now, known: HashMap::new(), posted: Default::default() }
    }

    fn run(mut self) {
        let free = self.pool.free_bytes();
        self.poll();
        while !self.bytes.is_empty() {
            match self.bytes.below(8) {
                0 | 1 => self.read(),
                2 => self.entries(),
                3 | 4 => self.post(),
                5 | 6 => self.answer(),
                _ => self.rare(),
            }
        }
        self.optimistic.end();
        self.poll();
        assert!(self.posted.iter().all(Option::is_none), "a read has not ended");
        assert_eq!(self.pool.free_bytes(), free, "a buffer is not home");
    }

    fn pages(&mut self) -> PageRange {
        let first = self.bytes.below(PAGES);
        PageRange { first: first as u64, count: 1 + self.bytes.below(4) }
    }

    fn reference(&mut self) -> PageReference {
        let epoch = self.bytes.pick(&[EPOCH, EPOCH, EPOCH, EPOCH + 1]);
        let frame = self.bytes.pick(&[0, 1, 2, u32::MAX]);
        PageReference { frame, generation: u32::from(self.bytes.byte()), epoch }
    }

    fn learn(&mut self, page: u64, reference: PageReference, crc: u64) {
        if reference.epoch == EPOCH && reference.generation % 2 == 1 {
            self.known.insert(page, (reference, crc));
        }
    }

    /// An ordinary read of one page, or of several, is answered.
    fn read(&mut self) {
        let (pages, reference, fill) = (self.pages(), self.reference(), self.bytes.byte());
        let data = vec![fill; pages.count * PAGE_BYTES];
        let mut buf = self.pool.take(u32::try_from(data.len()).expect("few")).expect("room");
        buf.copy_in(0, &data);
        self.optimistic.note(0, Some(pages));
        self.optimistic.on_read(0, &Cqe::default().with_result_u64(reference.to_result()), Some(&buf));
        if pages.count == 1 {
            self.learn(pages.first, reference, page_checksum(&data));
        }
    }

    /// Get References is answered: with checksums of pages, or with any.
    fn entries(&mut self) {
        let pages = self.optimistic.next_wanted().unwrap_or(PageRange { first: 0, count: 2 });
        let mut entries = Vec::new();
        for page in pages.first..pages.first + pages.count as u64 {
            let (reference, fill) = (self.reference(), self.bytes.byte());
            let crc = if fill < 8 { u64::from(fill) } else { page_checksum(&[fill; PAGE_BYTES]) };
            entries.push(PageEntry::new(reference, crc));
            self.learn(page, reference, crc);
        }
        self.optimistic.on_entries(pages.first, &entries);
    }

    fn post(&mut self) {
        let (slot, pages) = (self.bytes.below(SLOTS), self.pages());
        if self.posted[slot].is_some() {
            return;
        }
        let buf = self.pool.take(u32::try_from(pages.count * PAGE_BYTES).expect("few")).expect("room");
        let blocks = u32::try_from(pages.count * 8).expect("few");
        let sqe = Sqe::read(0, 1, pages.first * 8, blocks);
        if self.optimistic.try_read(slot, pages, sqe, buf).is_ok() {
            let range = pages.first..pages.first + pages.count as u64;
            let known = range.map(|page| (page, *self.known.get(&page).expect("a page that was learned")));
            self.posted[slot] = Some(known.collect());
        }
    }

    /// The oldest read ends: with the seals and pages that it expects, but for what the next bytes change.
    fn answer(&mut self) {
        let slot = self.line.borrow().posted.first().map(|(slot, ..)| *slot);
        let expected = slot.and_then(|slot| self.posted[slot].clone()).unwrap_or_default();
        let mut seals: Vec<u64> =
            expected.iter().map(|(page, (reference, _))| reference.seal(*page)).collect();
        let fills = expected.iter().map(|_| self.bytes.byte()).collect();
        match self.bytes.below(8) {
            0 => seals.iter_mut().for_each(|seal| *seal = seal.wrapping_add(1 << 40)),
            1 => seals.truncate(seals.len() / 2),
            2 => seals.push(0),
            3 => seals.reverse(),
            _ => {}
        }
        let seals = (self.bytes.below(8) > 0).then_some(seals);
        self.line.borrow_mut().answer = (seals, fills);
        self.poll();
    }

    fn rare(&mut self) {
        match self.bytes.below(3) {
            0 => {
                let pages = self.pages();
                self.optimistic.on_write(1, pages.first << 12, pages.count * PAGE_BYTES);
                (pages.first..pages.first + pages.count as u64).for_each(|page| _ = self.known.remove(&page));
            }
            1 => {
                self.now = Nanos(self.now.0 + 1_000_000 * u64::from(self.bytes.byte()));
                self.poll();
            }
            _ => self.line.borrow_mut().is_down |= self.bytes.below(8) == 0,
        }
    }

    fn poll(&mut self) {
        let Program { optimistic, posted, known, line, now, .. } = self;
        let seals = line.borrow().answer.0.clone();
        optimistic.poll(*now, |slot, outcome| {
            let expected = posted[slot].take().expect("a read ends once");
            match outcome {
                Outcome::Accepted(buf) => {
                    let seals = seals.as_ref().expect("seals");
                    let data = buf.as_slice().expect("one piece");
                    assert_eq!(seals.len(), expected.len());
                    for (at, (page, (reference, crc))) in expected.iter().enumerate() {
                        assert_eq!(seals[at], reference.seal(*page), "the seal of page {page}");
                        let content = &data[at * PAGE_BYTES..][..PAGE_BYTES];
                        assert_eq!(page_checksum(content), *crc, "the checksum of page {page}");
                    }
                }
                Outcome::Repeat(..) => expected.iter().for_each(|(page, _)| _ = known.remove(page)),
            }
        });
    }
}
