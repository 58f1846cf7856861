//! Optimistic reads of a host: the shipped client over READs that take several turns and see a frame change
//! under them.
//!
//! ```text
//!   Attach ── Service (tokens of the target) ──> SimReader: the frames and seals of a cache or RAM disk
//!   ordinary Read, Get References ── references ──> Attached (shipped) ── post ──> SimReader: sectors and
//!                                                        seals in any order
//!                                                   <─ seals, data ── accepted: the judge hears of it
//! ```
//! A READ takes its nine parts of each page, eight sectors and the seal, in any order and in several turns;
//! the target and other hosts do anything in between. A connection outlives what it depends on by some turns,
//! as the service notices that later.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use nvme_spec::optimistic::{Attachment, PageEntry, Token};
use nvme_spec::zerocopy::IntoBytes;
use nvme_spec::{Cqe, Sqe};
use spindle_nvme_optimistic::client::{
    Attached, NamespacePages, OptimisticOptions, Outcome, PageRange, PageReader,
};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Buf, SealedFrames};
use spindle_target::shared::{ControllerShared, OptimisticService};

use super::history::Time;
use super::host::Issue;
use super::rng::Rng;

/// Reads in flight of one host and namespace.
const SLOTS: usize = 4;
const SECTOR: usize = 512;
const SECTORS: usize = 8;
/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;
const PAGE: u64 = 4096;

/// What the target has granted and nobody has used: frames by token.
#[derive(Default)]
pub struct Service {
    granted: Mutex<HashMap<Token, Arc<dyn SealedFrames>>>,
}

impl Service {
    /// The frames of a token, once.
    pub fn redeem(&self, token: &Token) -> Option<Arc<dyn SealedFrames>> {
        self.granted.lock().expect("no panic").remove(token)
    }
}

/// The service as the target sees it.
pub struct Issuer(pub Arc<Service>);

impl OptimisticService for Issuer {
    fn attach(
        &self,
        _controller: &Arc<ControllerShared>,
        _nsid: u32,
        frames: Arc<dyn SealedFrames>,
    ) -> Option<Attachment> {
        let mut granted = self.0.granted.lock().expect("no panic");
        let mut token = [0; 16];
        token[..8].copy_from_slice(&(granted.len() as u64 + 1).to_le_bytes());
        token[8..].copy_from_slice(&(Arc::as_ptr(&frames).addr() as u64).to_le_bytes());
        granted.insert(token, frames);
        Some(Attachment::new(4430, 10_000, token))
    }
}

/// READs in flight.
struct InFlight {
    slot: usize,
    frames: Vec<u32>,
    buf: Buf,
    /// Parts that are still to be read: of each frame `SECTORS` sectors and the seal.
    left: Vec<usize>,
    seals: Vec<u64>,
}

impl InFlight {
    fn read(&mut self, frames: &dyn SealedFrames, part: usize) {
        let (at, sector) = (part / (SECTORS + 1), part % (SECTORS + 1));
        if sector == SECTORS {
            self.seals[at] = frames.seal_of(self.frames[at]);
            return;
        }
        let mut content = [0; SECTOR];
        frames.device_read(self.frames[at], sector * SECTOR, &mut content);
        self.buf.copy_in(at * PAGE_BYTES + sector * SECTOR, &content);
    }

    /// A frame is not what was read.
    fn has_changed(&self, frames: &dyn SealedFrames) -> bool {
        let mut now = [0; PAGE_BYTES];
        self.frames.iter().enumerate().any(|(at, frame)| {
            frames.device_read(*frame, 0, &mut now);
            !self.buf.equals_at(at * PAGE_BYTES, &now)
        })
    }
}

/// What a connection shares with its `SimReader`, which belongs to the shipped client.
struct Line {
    frames: Arc<dyn SealedFrames>,
    rng: Rng,
    is_up: bool,
    reads: Vec<InFlight>,
    /// Reads whose frame changed under them.
    changed: u64,
}

/// A connection to the service.
pub struct SimReader(Rc<RefCell<Line>>);

impl PageReader for SimReader {
    fn post(&mut self, slot: usize, frames: &[u32], buf: Buf) -> Result<(), Buf> {
        let mut line = self.0.borrow_mut();
        let count = line.frames.frames();
        if !line.is_up || frames.iter().any(|frame| *frame >= count) {
            return Err(buf);
        }
        let left = (0..frames.len() * (SECTORS + 1)).collect();
        let seals = vec![0; frames.len()];
        line.reads.push(InFlight { slot, frames: frames.to_vec(), buf, left, seals });
        Ok(())
    }

    fn send(&mut self) {}

    fn poll(&mut self, _now: Nanos, mut each: impl FnMut(usize, Option<&[u64]>, Buf)) -> bool {
        let mut line = self.0.borrow_mut();
        let Line { frames, rng, is_up, reads, changed } = &mut *line;
        if !*is_up {
            let has_any = !reads.is_empty();
            reads.drain(..).for_each(|read| each(read.slot, None, read.buf));
            return has_any;
        }
        for read in reads.iter_mut() {
            for _ in 0..rng.size(0, 4 * read.frames.len()) {
                if read.left.is_empty() {
                    break;
                }
                let part = read.left.swap_remove(rng.size(0, read.left.len() - 1));
                read.read(&**frames, part);
            }
        }
        let mut has_any = false;
        for read in reads.extract_if(.., |read| read.left.is_empty()) {
            *changed += u64::from(read.has_changed(&**frames));
            has_any = true;
            each(read.slot, Some(&read.seals), read.buf);
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
        self.0.borrow().frames.epoch()
    }

    fn in_flight(&self) -> usize {
        self.0.borrow().reads.len()
    }
}

/// A namespace that the host reads optimistically.
struct AttachedNamespace {
    line: Rc<RefCell<Line>>,
    optimistic: Attached<SimReader>,
    /// By slot: first page, and when the read was posted.
    posted: [(u64, u64); SLOTS],
    /// Accepted reads of several pages.
    groups: u64,
    /// Pages whose reference was learned, some of them.
    known: Vec<u64>,
}

/// The optimistic reads of one host.
pub struct Client {
    service: Arc<Service>,
    rng: Rng,
    /// By namespace.
    attached: Vec<Option<AttachedNamespace>>,
    /// Attach is on its way.
    pub is_attaching: bool,
    /// When the host may not read optimistically.
    pub denial: Denial,
}

/// When a host may not read optimistically.
#[derive(Debug, Clone, Copy, Default)]
pub struct Denial {
    /// The newest configuration does not allow the host.
    pub is_now: bool,
    /// All cores refuse an Attach that is sent after it.
    pub since: Option<Time>,
    /// A core may refuse an Attach that is sent before it.
    pub until: Time,
}

impl Client {
    /// A host that has attached to nothing.
    #[must_use]
    pub fn new(service: Arc<Service>, namespaces: usize, seed: u64) -> Client {
        let attached = (0..namespaces).map(|_| None).collect();
        let denial = Denial::default();
        Client { service, rng: Rng::new(seed), attached, is_attaching: false, denial }
    }

    /// A namespace to which the host attaches now.
    pub fn wants(&mut self) -> Option<usize> {
        let place = self.rng.size(0, self.attached.len() - 1);
        let is_wanted = self.attached[place].is_none() && !self.is_attaching && self.rng.permille(300);
        is_wanted.then_some(place)
    }

    /// Attach has succeeded.
    ///
    /// # Panics
    /// When its data is not what it is to be.
    pub fn attach(&mut self, place: usize, attachment: &Attachment) {
        let Some(frames) = self.service.redeem(&attachment.token) else { return };
        assert_eq!(attachment.port.get(), 4430);
        // The service looks at the newest configuration, which the core had not seen.
        if self.denial.is_now {
            return;
        }
        let rng = Rng::new(self.rng.below(u64::MAX));
        let line = Line { frames, rng, is_up: true, reads: Vec::new(), changed: 0 };
        let line = Rc::new(RefCell::new(line));
        let nsid = u32::try_from(place + 1).expect("few");
        let options = OptimisticOptions { directory_pages: 32, ..OptimisticOptions::default() };
        let namespace = NamespacePages::new(nsid, 4096, 0, &options);
        let optimistic = Attached::new(SimReader(Rc::clone(&line)), namespace, SLOTS).expect("memory");
        self.attached[place] = Some(AttachedNamespace {
            line,
            optimistic,
            posted: [(0, 0); SLOTS],
            groups: 0,
            known: Vec::new(),
        });
    }

    /// An ordinary Read of `place` has brought this.
    pub fn learn(&mut self, place: usize, offset: u64, result: u64, buf: &Buf) {
        let Some(attached) = &mut self.attached[place] else { return };
        let nsid = u32::try_from(place + 1).expect("few");
        let pages = attached.optimistic.pages(nsid, offset, buf.len());
        let is_one = pages.is_some_and(|pages| pages.count == 1);
        assert!(is_one || result == 0, "a reference to what is not one page");
        let Some(pages) = pages else { return };
        attached.optimistic.note(0, Some(pages));
        attached.optimistic.on_read(0, &Cqe::default().with_result_u64(result), Some(buf));
        attached.know(pages.first);
    }

    /// The pages of the next Get References of the host of `issue`, and their namespace.
    pub fn next_references(issue: &mut Issue<'_>) -> Option<(usize, PageRange)> {
        let client = &mut *issue.client;
        let there = |place: &usize| client.attached[*place].is_some();
        let places: Vec<usize> = (0..client.attached.len()).filter(there).collect();
        if places.is_empty() || !client.rng.permille(100) {
            return None;
        }
        let place = places[client.rng.size(0, places.len() - 1)];
        let attached = client.attached[place].as_mut()?;
        if let Some(wanted) = attached.optimistic.next_wanted() {
            return Some((place, wanted));
        }
        let bytes = issue.places[place].history.len() * issue.places[place].block_bytes();
        let pages = bytes / PAGE_BYTES;
        if pages == 0 {
            return None;
        }
        let first = client.rng.size(0, pages - 1);
        let count = client.rng.size(1, (pages - first).min(8));
        Some((place, PageRange { first: first as u64, count }))
    }

    /// Get References of `pages` has brought `buf`, if anything.
    pub fn learn_entries(issue: &mut Issue<'_>, place: usize, pages: PageRange, buf: Option<&Buf>) {
        let Some(buf) = buf else { return };
        let mut entries = vec![PageEntry::default(); pages.count];
        buf.copy_out(0, entries.as_mut_bytes());
        let found = entries.iter().filter(|entry| entry.get().is_some()).count();
        issue.counts.add("references of Get References", found as u64);
        let Some(attached) = &mut issue.client.attached[place] else { return };
        attached.optimistic.on_entries(pages.first, &entries);
        attached.know(pages.first);
    }

    /// The target has started: its service.
    pub fn set_service(&mut self, service: &Arc<Service>) {
        self.service = Arc::clone(service);
    }

    /// Posts reads of the host of `issue`, lets the READs go on, and tells the judge of what was accepted.
    pub fn turn(issue: &mut Issue<'_>, now: Nanos) {
        let mut all = std::mem::take(&mut issue.client.attached);
        for (place, entry) in all.iter_mut().enumerate() {
            let Some(attached) = entry else { continue };
            let source = issue.places[place].source.sealed_frames();
            let is_valid = issue.places[place].is_there
                && !issue.client.denial.is_now
                && source.is_some_and(|frames| Arc::ptr_eq(&frames, &attached.line.borrow().frames));
            // The service notices it within some turns. The device of either end may be lost in each.
            let is_lost = issue.client.rng.size(0, 2999) == 0;
            if is_lost || !is_valid && issue.client.rng.permille(30) {
                attached.optimistic.end();
                issue.counts.add("lost devices of optimistic reads", u64::from(is_lost));
            }
            if issue.client.rng.permille(700) {
                attached.post(issue);
            }
            attached.poll(issue, place, now);
            if !attached.line.borrow().is_up && attached.optimistic.in_flight() == 0 {
                attached.count(issue, place);
                *entry = None;
            }
        }
        issue.client.attached = all;
    }

    /// The host, or its target, is gone.
    pub fn end_all(issue: &mut Issue<'_>) {
        let mut all = std::mem::take(&mut issue.client.attached);
        for (place, attached) in all.iter_mut().enumerate() {
            attached.take().iter().for_each(|attached| attached.count(issue, place));
        }
        issue.client.attached = all;
        issue.client.is_attaching = false;
    }
}

impl AttachedNamespace {
    fn know(&mut self, page: u64) {
        self.known.push(page);
        if self.known.len() > 8 {
            self.known.remove(0);
        }
    }

    fn count(&self, issue: &mut Issue<'_>, place: usize) {
        let counts = self.optimistic.counts();
        if issue.places[place].medium.is_none() {
            issue.counts.add("optimistic reads of RAM disks", counts.accepted);
            issue.counts.add("rejected reads of RAM disks", counts.rejected);
        }
        issue.counts.add("optimistic reads", counts.accepted);
        issue.counts.add("rejected reads", counts.rejected);
        issue.counts.add("optimistic reads of several pages", self.groups);
        issue.counts.add("references", counts.learned);
        issue.counts.add("frames changed under a read", self.line.borrow().changed);
        issue.counts.hit("ended optimistic connections");
    }

    fn post(&mut self, issue: &mut Issue<'_>) {
        let used: Vec<usize> = self.line.borrow().reads.iter().map(|read| read.slot).collect();
        let Some(slot) = (0..SLOTS).find(|slot| !used.contains(slot)) else { return };
        if self.known.is_empty() {
            return;
        }
        let rng = &mut issue.client.rng;
        let first = self.known[rng.size(0, self.known.len() - 1)];
        let count = if rng.permille(300) { rng.size(2, 4) } else { 1 };
        // Of several pages, all that are known from the first on.
        for count in (1..=count).rev() {
            let bytes = u32::try_from(count * PAGE_BYTES).expect("few");
            let buf = issue.pool.take(bytes).expect("the hosts' pool is large");
            let begin = issue.tick();
            if self.optimistic.try_read(slot, PageRange { first, count }, Sqe::default(), buf).is_ok() {
                self.posted[slot] = (first, begin);
                return;
            }
        }
    }

    fn poll(&mut self, issue: &mut Issue<'_>, place: usize, now: Nanos) {
        let mut accepted = Vec::new();
        self.optimistic.poll(now, |slot, outcome| {
            if let Outcome::Accepted(buf) = outcome {
                accepted.push((slot, buf));
            }
        });
        for (slot, buf) in accepted {
            let (page, begin) = self.posted[slot];
            let end = issue.tick();
            self.groups += u64::from(buf.len() > PAGE_BYTES);
            note(issue, place, page, &buf, (begin, end));
        }
    }
}

/// The judge hears what was read.
fn note(issue: &mut Issue<'_>, place: usize, page: u64, buf: &Buf, (begin, end): (u64, u64)) {
    let place = &mut issue.places[place];
    let block_bytes = place.block_bytes();
    let first = usize::try_from(page * PAGE).expect("small") / block_bytes;
    let bytes: Vec<u8> = buf.segments().flatten().copied().collect();
    for (at, content) in bytes.chunks_exact(block_bytes).enumerate() {
        place.saw(first + at, content, begin, end);
    }
}
