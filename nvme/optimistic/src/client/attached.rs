//! [`Attached`]: the optimistic reads of a queue, and the Get References that it sends of its own accord, one
//! at a time: for pages that were read, and, if eager, for all pages once.

use arrayvec::ArrayVec;
use nvme_spec::optimistic::{
    OPTIMISTIC_PAGE_SHIFT, PAGE_ENTRY_BYTES, PageEntry, PageReference, REFERENCE_PAGES_MAX, page_checksum,
};
use nvme_spec::zerocopy::IntoBytes;
use nvme_spec::{Cqe, Sqe};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Buf, Pages, Pool, PoolError, ZoneSpec};
use spindle_reactor::slab::Slot;

use super::directory::Directory;
use super::{OptimisticCounts, OptimisticOptions, PAGE_BYTES, PageRange, PageReader, READ_PAGES_MAX};

/// Reads after which the share of accepted ones is judged.
pub(super) const WINDOW: u32 = 256;
/// Time without optimistic reads after a window with too few accepted ones.
pub(super) const PAUSE: Nanos = Nanos::from_secs(1);
/// Longest time since the last answer to an ordinary command, for a read to be accepted.
const ANSWER_AGE_MAX: Nanos = Nanos::from_secs(1);
/// Time since that answer from which reads are ordinary, which brings the next answer in time.
pub(super) const ANSWER_DUE: Nanos = Nanos::from_ms(500);
/// Most ranges that wait for a Get References; others are not asked for.
pub(super) const WANTED_MAX: usize = 8;
/// Time without Get References after a window of them that was of little use: a host whose reads of several
/// pages never come back would otherwise send one for each.
pub(super) const ASK_PAUSE: Nanos = Nanos::from_ms(100);
/// Get References that fail in a row after which no further one is sent.
const FAILURES_MAX: u8 = 8;
/// Bytes of the longest answer to Get References, which are less than a page of memory.
const ANSWER_BYTES_MAX: u32 = REFERENCE_PAGES_MAX * PAGE_ENTRY_BYTES;
/// Least depth at which a queue keeps one command for Get References: two are left, for a compare-and-write.
const OWN_COMMAND_DEPTH: usize = 3;

/// The pages of a namespace, and what is known of them.
pub struct NamespacePages {
    nsid: u32,
    /// Blocks of a page. 0: a block is longer, which it is at no target with optimistic reads.
    blocks: u32,
    /// Pages of the eager walk that were not asked for yet.
    walk: std::ops::Range<u64>,
    pub(super) directory: Directory,
}

impl NamespacePages {
    /// Makes an empty directory for namespace `nsid` of `bytes`, in blocks of `block_bytes`.
    #[must_use]
    pub fn new(nsid: u32, block_bytes: u32, bytes: u64, options: &OptimisticOptions) -> NamespacePages {
        let pages = (bytes >> OPTIMISTIC_PAGE_SHIFT).min(options.directory_pages as u64);
        NamespacePages {
            nsid,
            blocks: (1 << OPTIMISTIC_PAGE_SHIFT) / block_bytes,
            walk: if options.is_eager { 0..pages } else { 0..0 },
            directory: Directory::new(options.directory_pages),
        }
    }
}

/// An optimistic read in flight.
#[derive(Clone, Copy)]
struct Expected {
    pages: PageRange,
    /// The ordinary read of the same blocks.
    sqe: Sqe,
}

/// What one page of an optimistic read must be.
#[derive(Clone, Copy, Default)]
struct Content {
    seal: u64,
    crc: u64,
}

/// Result of an optimistic read.
pub enum Outcome {
    /// The buffer has the newest content.
    Accepted(Buf),
    /// The command must be sent as an ordinary read.
    Repeat(Sqe, Buf),
}

/// Optimistic reads of one queue and namespace.
pub struct Attached<R> {
    pub(super) reader: R,
    namespace: NamespacePages,
    /// By slot: pages of an ordinary read; `None` for other commands.
    noted: Box<[Option<PageRange>]>,
    /// By slot.
    expected: Box<[Option<Expected>]>,
    /// By slot, [`READ_PAGES_MAX`] for each.
    contents: Box<[Content]>,
    /// Pages of which references are to be asked for.
    wanted: ArrayVec<PageRange, WANTED_MAX>,
    /// Ranges that were asked for, and accepted reads of several pages, of the current window.
    ask_window: (u32, u32),
    asks_paused_until: Nanos,
    counts: OptimisticCounts,
    /// Reads and accepted reads of the current window.
    window: (u32, u32),
    paused_until: Nanos,
    /// Time of the last answer to an ordinary command.
    answered: Nanos,
    now: Nanos,
    /// The outstanding Get References, and its pages; without pages, it was sent for the former connection.
    request: Option<(Slot, Option<PageRange>)>,
    /// Get References that may fail still in a row. Without one no further one is sent: the target has
    /// another answer to them, as a Spindle without Get References.
    failures_left: u8,
    /// Has one buffer, for the answer to Get References.
    pool: Pool,
}

impl<R> std::fmt::Debug for Attached<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Attached").field("request", &self.request).finish_non_exhaustive()
    }
}

/// Returns true if the pages in `buf` have these contents.
#[inline]
fn is_valid(contents: &[Content], seals: Option<&[u64]>, buf: &Buf) -> bool {
    let (Some(seals), Some(data)) = (seals, buf.as_slice()) else { return false };
    let is_whole = seals.len() == contents.len() && data.len() == contents.len() * PAGE_BYTES;
    let pages = data.chunks_exact(PAGE_BYTES);
    let are_sealed = || contents.iter().zip(seals).all(|(content, seal)| content.seal == *seal);
    is_whole
        && are_sealed()
        && contents.iter().zip(pages).all(|(content, page)| content.crc == page_checksum(page))
}

impl<R: PageReader> Attached<R> {
    /// Makes the optimistic reads of a queue. Slots of its commands are below `slots`.
    ///
    /// # Errors
    /// There is no memory.
    pub fn new(reader: R, namespace: NamespacePages, slots: usize) -> Result<Attached<R>, PoolError> {
        let zone = ZoneSpec { buffer_bytes: ANSWER_BYTES_MAX.next_multiple_of(4096), count: 1 };
        Ok(Attached {
            reader,
            namespace,
            noted: vec![None; slots].into(),
            expected: vec![None; slots].into(),
            contents: vec![Content::default(); slots * READ_PAGES_MAX].into(),
            wanted: ArrayVec::new(),
            ask_window: (0, 0),
            asks_paused_until: Nanos::ZERO,
            counts: OptimisticCounts::default(),
            window: (0, 0),
            paused_until: Nanos::ZERO,
            answered: Nanos::ZERO,
            now: Nanos::ZERO,
            request: None,
            failures_left: FAILURES_MAX,
            pool: Pool::new(&[zone], Pages::Base)?,
        })
    }

    /// Takes the place of `former`, the optimistic reads of the connection before: counts on from its counts.
    /// The outstanding Get References stays: its answer is of no use.
    pub fn replace(&mut self, former: &Attached<R>) {
        self.counts = former.counts;
        self.request = former.request.map(|(slot, _)| (slot, None));
    }

    /// Returns the counts since the queue was attached.
    #[must_use]
    pub fn counts(&self) -> OptimisticCounts {
        self.counts
    }

    /// Returns true until the connection has ended; without it all reads are ordinary.
    #[inline]
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.reader.is_connected()
    }

    /// Returns the number of optimistic reads in flight.
    #[inline]
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.reader.in_flight()
    }

    /// Returns the number of outstanding commands that the queue's user does not know of: 0 or 1.
    #[inline]
    #[must_use]
    pub fn own(&self) -> usize {
        usize::from(self.request.is_some())
    }

    /// Returns the number of free commands that the queue keeps for Get References: 0 or 1.
    #[inline]
    #[must_use]
    pub fn kept(&self) -> usize {
        usize::from(self.noted.len() >= OWN_COMMAND_DEPTH && self.request.is_none())
    }

    /// Returns the pages that a read of `bytes` at `offset` covers; `None`: it is not 1 to
    /// [`READ_PAGES_MAX`] whole pages of the namespace.
    #[inline]
    #[must_use]
    pub fn pages(&self, nsid: u32, offset: u64, bytes: usize) -> Option<PageRange> {
        let is_whole = offset.is_multiple_of(PAGE_BYTES as u64) && bytes.is_multiple_of(PAGE_BYTES);
        let count = bytes / PAGE_BYTES;
        let is_readable = nsid == self.namespace.nsid && is_whole && (1..=READ_PAGES_MAX).contains(&count);
        is_readable.then_some(PageRange { first: offset >> OPTIMISTIC_PAGE_SHIFT, count })
    }

    /// Begins an optimistic read of `pages` in slot `slot`. `sqe`: the ordinary read.
    ///
    /// # Errors
    /// `buf`: a page is not in the directory, or no optimistic read is possible now. The caller sends `sqe`.
    #[inline]
    pub fn try_read(&mut self, slot: usize, pages: PageRange, sqe: Sqe, buf: Buf) -> Result<(), Buf> {
        if self.now < self.paused_until || self.now > self.answered + ANSWER_DUE {
            return Err(buf);
        }
        let first = slot * READ_PAGES_MAX;
        let Some(contents) = self.contents.get_mut(first..first + pages.count) else { return Err(buf) };
        let (epoch, mut frames) = (self.reader.epoch(), [0; READ_PAGES_MAX]);
        for ((page, content), at) in pages.iter().zip(contents).zip(&mut frames) {
            let Some(known) = self.namespace.directory.find(page) else { return Err(buf) };
            let reference = PageReference { frame: known.frame, generation: known.generation, epoch };
            *content = Content { seal: reference.seal(page), crc: known.crc };
            *at = known.frame;
        }
        self.reader.post(slot, &frames[..pages.count], buf)?;
        self.expected[slot] = Some(Expected { pages, sqe });
        Ok(())
    }

    /// Sends the optimistic reads that are queued.
    #[inline]
    pub fn send(&mut self) {
        self.reader.send();
    }

    /// Notes that the ordinary command in `slot` reads `pages`, or is none that could be optimistic.
    #[inline]
    pub fn note(&mut self, slot: usize, pages: Option<PageRange>) {
        if let Some(noted) = self.noted.get_mut(slot) {
            *noted = pages;
        }
    }

    /// An ordinary command has ended. Returns true if it is the Get References of the queue.
    #[inline]
    pub fn on_completed(&mut self, slot: Slot, is_success: bool, cqe: &Cqe, buf: Option<&Buf>) -> bool {
        let Some((_, pages)) = self.request.take_if(|(own, _)| *own == slot) else {
            if is_success && self.is_connected() {
                self.on_read(slot.index(), cqe, buf);
            }
            return false;
        };
        if let Some(pages) = pages {
            self.on_references(pages, buf.filter(|_| is_success));
        }
        true
    }

    /// An ordinary command has ended with success: learns its reference, if it has one.
    #[inline]
    pub fn on_read(&mut self, slot: usize, cqe: &Cqe, buf: Option<&Buf>) {
        self.answered = self.now;
        let Some(pages) = self.noted.get_mut(slot).and_then(Option::take) else { return };
        if pages.count > 1 {
            return self.want(pages);
        }
        let (Some(reference), Some(data)) = (cqe.page_reference(), buf.and_then(Buf::as_slice)) else {
            return;
        };
        if reference.epoch == self.reader.epoch() {
            self.learn(pages.first, reference, page_checksum(data));
        }
    }

    fn want(&mut self, pages: PageRange) {
        if self.now < self.asks_paused_until {
            return;
        }
        // The oldest were read longest ago.
        if self.wanted.is_full() {
            self.wanted.remove(0);
        }
        self.wanted.push(pages);
    }

    fn learn(&mut self, page: u64, reference: PageReference, crc: u64) {
        self.counts.learned += 1;
        self.namespace.directory.insert(page, reference, crc);
    }

    /// Takes pages whose references are to be asked for.
    pub fn next_wanted(&mut self) -> Option<PageRange> {
        let pages = self.wanted.pop()?;
        self.ask_window.0 += 1;
        if self.ask_window.0 >= WINDOW {
            if self.ask_window.1 < WINDOW / 2 {
                self.asks_paused_until = self.now + ASK_PAUSE;
                self.wanted.clear();
            }
            self.ask_window = (0, 0);
        }
        Some(pages)
    }

    /// Asks for references, if that is due and no Get References is outstanding: passes the command of slot
    /// `slot` with its buffer to `send`, which returns true if the command is queued. Returns the same.
    #[cold]
    pub fn ask(&mut self, slot: Slot, send: impl FnOnce(Sqe, Buf) -> bool) -> bool {
        let is_possible = self.kept() > 0 && self.is_connected() && self.failures_left > 0;
        let NamespacePages { nsid, blocks, ref walk, .. } = self.namespace;
        if !is_possible || blocks == 0 {
            return false;
        }
        // Those of the walk first, which are more for each command.
        let (first, count) = (walk.start, (walk.end - walk.start).min(REFERENCE_PAGES_MAX.into()));
        let walked = usize::try_from(count).ok().filter(|count| *count > 0);
        let pages = walked.map(|count| PageRange { first, count }).or_else(|| self.next_wanted());
        let Some(PageRange { first, count: pages }) = pages else { return false };
        let of = u32::try_from(pages).unwrap_or(REFERENCE_PAGES_MAX);
        let Some(buf) = self.pool.take(of * PAGE_ENTRY_BYTES) else { return false };
        let is_sent = send(Sqe::get_references(0, nsid, first * u64::from(blocks), of * blocks), buf);
        if is_sent {
            self.namespace.walk.start += count;
            self.note(slot.index(), None);
            self.request = Some((slot, Some(PageRange { first, count: pages })));
        }
        is_sent
    }

    /// Get References of `pages` has ended, with `answer` if it was successful.
    fn on_references(&mut self, pages: PageRange, answer: Option<&Buf>) {
        let Some(answer) = answer else {
            // The namespace may have shrunk.
            self.namespace.walk = 0..0;
            self.failures_left = self.failures_left.saturating_sub(1);
            return;
        };
        let mut entries = [PageEntry::default(); REFERENCE_PAGES_MAX as usize];
        let entries = &mut entries[..pages.count];
        answer.copy_out(0, entries.as_mut_bytes());
        self.on_entries(pages.first, entries);
        self.failures_left = FAILURES_MAX;
    }

    /// Learns the entries of Get References, for the pages from `first` on.
    pub fn on_entries(&mut self, first: u64, entries: &[PageEntry]) {
        self.answered = self.now;
        for (at, entry) in entries.iter().enumerate() {
            if let Some((reference, crc)) = entry.get().filter(|(it, _)| it.epoch == self.reader.epoch()) {
                self.learn(first + at as u64, reference, crc);
            }
        }
    }

    /// The caller writes pages: their entries are not valid any more.
    pub fn on_write(&mut self, nsid: u32, offset: u64, bytes: usize) {
        if nsid == self.namespace.nsid && bytes > 0 {
            let last = offset.saturating_add(bytes as u64 - 1) >> OPTIMISTIC_PAGE_SHIFT;
            (offset >> OPTIMISTIC_PAGE_SHIFT..=last).for_each(|page| self.namespace.directory.remove(page));
        }
    }

    /// Passes each optimistic read that has ended to `each`. Returns true if there was any.
    #[inline]
    pub fn poll(&mut self, now: Nanos, mut each: impl FnMut(usize, Outcome)) -> bool {
        self.now = now;
        let has_answer = now <= self.answered + ANSWER_AGE_MAX;
        let Attached { reader, noted, expected, contents, namespace, counts, window, ask_window, .. } = self;
        let has_come = reader.poll(now, |slot, seals, buf| {
            // The reader passes only slots that were posted.
            let Some(Expected { pages, sqe }) = expected.get_mut(slot).and_then(Option::take) else { return };
            let contents = &contents[slot * READ_PAGES_MAX..][..pages.count];
            window.0 += 1;
            if has_answer && is_valid(contents, seals, &buf) {
                window.1 += 1;
                ask_window.1 += u32::from(pages.count > 1);
                counts.accepted += 1;
                return each(slot, Outcome::Accepted(buf));
            }
            counts.rejected += 1;
            pages.iter().for_each(|page| namespace.directory.remove(page));
            // The ordinary read brings new references.
            noted[slot] = Some(pages);
            each(slot, Outcome::Repeat(sqe, buf));
        });
        if self.window.0 >= WINDOW {
            if self.window.1 < self.window.0 / 2 {
                self.paused_until = now + PAUSE;
            }
            self.window = (0, 0);
        }
        has_come
    }

    /// Ends the reader; the next poll passes all reads in flight as ones to be repeated.
    pub fn end(&mut self) {
        self.reader.end();
    }
}
