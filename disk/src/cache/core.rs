//! [`CachedCore`]: one core's handle on a cached disk.
//!
//! ```text
//!   read   prepare: all pages found            -> Ready
//!                   some missing               -> Later: frames are entered, the rest is waited for
//!          submit:  pieces to the inner disk   -> each Done publishes its frames -> all pages here -> Done
//!                   a page that another fills  -> looked for again in each poll
//!                   no frame, a piece failed   -> the read itself to the inner disk, into a buffer of the
//!                   pool
//!   write  announce each page, drop what there is of it -> inner disk
//!            -> whole pages that were in the cache are entered again -> end of the write -> Done
//!          many pages: drop them, some in each poll -> inner disk -> end of the sweep -> Done
//!   others go to the inner disk as they are
//! ```

mod fetch;

use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Buf, CacheCore, FRAME_BYTES, Pool};

use super::ahead::{Fetch, Streams};
use super::counts::{CoreCounts, NOBODY};
use super::index::{Found, NO_FRAME, PageBuckets};
use super::plan::{Means, Plan, Run};
use super::policy::Came;
use super::shared::{Admission, Shared, Stay};
use super::sweeps::Sweep;
use crate::layer::{Call, Commands, inner_token, number_of};
use crate::shape::block_shift;
use crate::{
    Abilities, BlockRange, CoreContext, Disk, Done, Geometry, IoRequest, Op, Owner, Prepared, Token,
};

const FRAME: u64 = FRAME_BYTES as u64;
/// Pages of the longest read that is put into the cache, 512 KiB. A longer one would evict as much for one
/// reader that does not wait for single pages.
const FILL_PAGES_MAX: u64 = 128;
/// Pages of the longest read that is answered from the cache.
const HIT_PAGES_MAX: u64 = 512;
/// Pages of one write that stay in the cache, 128 KiB: each is copied.
const STAYS_MAX: usize = 32;
/// Pages of the longest write that announces each of them; a longer one sweeps the frames.
const ANNOUNCED_PAGES_MAX: u64 = 1024;
/// Reads of several pages for which a core is ready before the first. Beyond, memory is taken as they come.
const READY_MAX: usize = 64;
/// Its pieces, and its data.
const BUFFERS_A_READ: usize = 8;
/// Hits that are kept for the policy between two misses.
const TOUCHES_MAX: usize = 256;
/// Pages of the sample that are reckoned with at once, some microseconds.
const SAMPLES_MAX: usize = 8;
/// Places that wait to be read ahead; more are left out.
const FETCHES_MAX: usize = 16;
/// Owner of the pieces that fill frames: no queue pair has this name, as no slab has this entry.
const FILLS: Owner = Owner(0xffff);

/// A read that has not ended.
struct Read {
    /// `None`: its submitter is gone.
    token: Option<Token>,
    request: IoRequest,
    plan: Plan,
    /// Pieces at the inner disk.
    at_disk: u32,
    /// It goes around the cache once its pieces are back.
    passes: bool,
}

/// A command that has not ended.
enum Entry {
    /// The inner disk has it; nothing is to be done at its end.
    Passed(Token),
    /// A write that the inner disk has, its pages, and which of them may stay in the cache.
    Write {
        token: Token,
        pages: std::ops::Range<u64>,
        stays: Vec<Stay>,
    },
    /// A write that the inner disk has, after a sweep.
    Swept(Token, Sweep),
    /// A write whose pages are being dropped. `None`: not begun.
    Sweeping {
        token: Token,
        pages: std::ops::Range<u64>,
        sweep: Option<Sweep>,
        call: Call,
    },
    Read(Read),
}

/// What a core has of the cache.
struct Side {
    shared: Arc<Shared>,
    frames: Rc<CacheCore>,
    counts: CoreCounts,
    commands: Commands<Entry>,
    /// What [`Disk::prepare`] has answered `Later` to, until it is submitted.
    prepared: Option<(IoRequest, Plan)>,
    /// Used again and again.
    plans: Vec<Plan>,
    stays: Vec<Vec<Stay>>,
}

/// One core's handle. See the module.
pub(super) struct CachedCore {
    /// Before the rest: its drop waits for what is in flight, and only then the writes in flight have ended.
    inner: Box<dyn Disk>,
    side: Side,
    pool: Pool,
    shift: u32,
    /// Pieces that fill frames at the inner disk, at most `depth`.
    pieces: u32,
    depth: u32,
    /// The page that the next read probably wants, and the frame that it is probably in.
    expected: (u64, u32),
    /// Where the second next read probably looks.
    coming: PageBuckets,
    /// Reads that wait for others' pages or for a buffer of the pool.
    waiting: VecDeque<u32>,
    sweeping: VecDeque<u32>,
    ready: VecDeque<Done>,
    /// What the inner disk gave back; empty between polls.
    inner_done: Vec<Done>,
    /// Frames that were hit, for the policy.
    touches: Vec<u32>,
    /// Pages of the sample that were read.
    samples: Vec<u64>,
    /// Which reads follow each other; `None`: nothing is read ahead.
    streams: Option<Box<Streams>>,
    /// What is to be read ahead, and for which host.
    fetches: VecDeque<(u16, Fetch)>,
}

impl Side {
    fn means(&self, host: u16) -> Means<'_> {
        Means { shared: &self.shared, frames: &self.frames, counts: self.counts.whose(host) }
    }

    /// A read, and what its plan is worked on with.
    fn read(&mut self, slot: u32) -> Option<(&mut Read, Means<'_>)> {
        let Entry::Read(read) = self.commands.get_mut(slot)? else { return None };
        let counts = self.counts.whose(read.request.client);
        Some((read, Means { shared: &self.shared, frames: &self.frames, counts }))
    }

    fn end_read(&mut self, slot: u32) {
        if let Some(Entry::Read(read)) = self.commands.remove(slot) {
            self.put_plan(read.plan);
        }
    }

    fn put_plan(&mut self, mut plan: Plan) {
        plan.clear(&self.means(NOBODY));
        self.plans.push(plan);
    }

    /// What is prepared will not be submitted.
    fn drop_prepared(&mut self) {
        if let Some((_, plan)) = self.prepared.take() {
            self.put_plan(plan);
        }
    }

    fn end_write(&mut self, pages: std::ops::Range<u64>, mut stays: Vec<Stay>) {
        let index = &self.shared.index;
        pages.for_each(|page| index.end_write(index.buckets(page)));
        if stays.capacity() > 0 {
            stays.clear();
            self.stays.push(stays);
        }
    }

    /// A write of whole pages has ended well: those that were in the cache are in it again.
    fn keep_written(&self, pages: &std::ops::Range<u64>, stays: &[Stay], data: &Buf) {
        let means = self.means(NOBODY);
        for stay in stays {
            let buckets = self.shared.index.buckets(stay.page);
            let admission = self.shared.admit(buckets, Some(stay), Came::Written, means.counts);
            let Admission::Fill(filling) = admission else { continue };
            let mut frame = self.frames.filling(std::iter::once(filling));
            let mut at = 0;
            // The write begins with a page: see `write`.
            let offset = usize::try_from((stay.page - pages.start) * FRAME).unwrap_or(usize::MAX);
            data.visit(offset, FRAME_BYTES as usize, |piece| {
                frame.copy_in(at, piece);
                at += piece.len();
            });
            let taken = self.frames.take_back(frame, |filling| match filling.publish() {
                Ok(pin) => {
                    self.shared.words().set_heat(pin.frame(), stay.heat);
                    means.counts.nobody.written.add(1);
                }
                Err(filling) => drop(means.unpublished(filling)),
            });
            debug_assert!(taken.is_ok(), "it is a frame");
        }
    }

    /// True when all of them are found just now.
    fn has_all(&self, mut pages: std::ops::Range<u64>) -> bool {
        let index = &self.shared.index;
        pages.all(|page| matches!(index.find(self.shared.words(), index.buckets(page)), Found::Present(_)))
    }
}

impl Drop for Side {
    /// The inner disk is gone. Frames whose buffers it still had are lost.
    fn drop(&mut self) {
        self.drop_prepared();
        for slot in self.commands.numbers() {
            match self.commands.remove(slot) {
                Some(Entry::Read(mut read)) => {
                    read.plan.on_lost(&self.means(NOBODY));
                    read.plan.clear(&self.means(NOBODY));
                }
                Some(Entry::Write { pages, stays, .. }) => self.end_write(pages, stays),
                Some(Entry::Swept(_, sweep) | Entry::Sweeping { sweep: Some(sweep), .. }) => {
                    self.shared.sweeps.end(&sweep);
                }
                Some(Entry::Passed(_) | Entry::Sweeping { sweep: None, .. }) | None => {}
            }
        }
    }
}

impl CachedCore {
    pub(super) fn new(inner: Box<dyn Disk>, shared: Arc<Shared>, context: &CoreContext) -> CachedCore {
        let depth = context.depth as usize;
        let coming = shared.index.buckets(0);
        let window_max = fetch::window_max(shared.spec.read_ahead, shared.words().len());
        let side = Side {
            frames: shared.frames.core(depth.min(READY_MAX) * BUFFERS_A_READ),
            counts: CoreCounts::new(&shared.counts),
            shared,
            commands: Commands::with_capacity(depth),
            prepared: None,
            plans: (0..depth.min(READY_MAX)).map(|_| Plan::new()).collect(),
            stays: Vec::with_capacity(depth),
        };
        CachedCore {
            shift: block_shift(inner.geometry().block_bytes),
            inner,
            side,
            pool: context.pool.clone(),
            pieces: 0,
            depth: context.depth,
            expected: (u64::MAX, NO_FRAME),
            coming,
            waiting: VecDeque::with_capacity(depth),
            sweeping: VecDeque::new(),
            ready: VecDeque::with_capacity(depth),
            inner_done: Vec::with_capacity(depth.max(1)),
            touches: Vec::with_capacity(TOUCHES_MAX),
            samples: Vec::with_capacity(SAMPLES_MAX),
            streams: (window_max > 0).then(|| Box::new(Streams::new(window_max))),
            fetches: VecDeque::with_capacity(FETCHES_MAX),
        }
    }

    /// The inner disk. Nothing is in flight.
    pub(super) fn into_inner(self) -> Box<dyn Disk> {
        debug_assert_eq!(self.in_flight(), 0, "a cache goes while commands are in flight");
        self.inner
    }

    /// Give the inner disk a command that has its entry.
    fn call(&mut self, token: Token, slot: u32, call: Call) -> Option<Done> {
        let done = call.submit(&mut *self.inner, inner_token(token.owner(), slot));
        done.and_then(|done| self.on_inner_done(done))
    }

    fn pages(&self, range: BlockRange) -> std::ops::Range<u64> {
        let offset = range.offset(self.shift);
        offset / FRAME..(offset + range.bytes(self.shift)).div_ceil(FRAME)
    }

    /// A command that changes blocks.
    fn write(&mut self, token: Token, range: BlockRange, call: Call) -> Option<Done> {
        let pages = self.pages(range);
        if pages.end - pages.start > ANNOUNCED_PAGES_MAX {
            let slot = self.side.commands.insert(Entry::Sweeping { token, pages, sweep: None, call });
            self.sweeping.push_back(slot);
            return None;
        }
        let is_whole =
            range.offset(self.shift).is_multiple_of(FRAME) && range.bytes(self.shift).is_multiple_of(FRAME);
        let has_data = matches!(call, Call::Op(IoRequest { op: Op::Write { .. }, .. }, Some(_)));
        let mut stays = Vec::new();
        for page in pages.clone() {
            let stay = self.side.shared.begin_write(page);
            if let Some(stay) = stay.filter(|_| is_whole && has_data && stays.len() < STAYS_MAX) {
                if stays.capacity() == 0 {
                    stays = self.side.stays.pop().unwrap_or_else(|| Vec::with_capacity(STAYS_MAX));
                }
                stays.push(stay);
            }
        }
        let slot = self.side.commands.insert(Entry::Write { token, pages, stays });
        self.call(token, slot, call)
    }

    fn step_sweeps(&mut self) {
        let Some(slot) = self.sweeping.pop_front() else { return };
        let Some(entry) = self.side.commands.get_mut(slot) else { return };
        let Entry::Sweeping { token, pages, sweep, .. } = entry else { return };
        let Shared { sweeps, index, frames, .. } = &*self.side.shared;
        if sweep.is_none() {
            *sweep = sweeps.begin(pages.clone());
        }
        let Some(ended) = sweep.take_if(|sweep| sweeps.step(sweep, index, frames.words())) else {
            return self.sweeping.push_front(slot);
        };
        let token = *token;
        let swept = std::mem::replace(entry, Entry::Swept(token, ended));
        let Entry::Sweeping { call, .. } = swept else { return };
        if let Some(done) = self.call(token, slot, call) {
            self.ready.push_back(done);
        }
    }

    /// The inner disk has ended something. What its submitter is to be told.
    fn on_inner_done(&mut self, done: Done) -> Option<Done> {
        let slot = number_of(done.token);
        if done.token.owner() == FILLS {
            self.on_piece(slot, done);
            self.step_read(slot);
            return None;
        }
        let Some(entry) = self.side.commands.remove(slot) else {
            panic!("the inner disk ended {:?} twice", done.token)
        };
        let token = match entry {
            Entry::Passed(token) => token,
            Entry::Write { token, pages, stays } => {
                if let (Ok(()), Some(buf)) = (done.result, &done.buf) {
                    self.side.keep_written(&pages, &stays, buf);
                }
                self.side.end_write(pages, stays);
                token
            }
            Entry::Swept(token, sweep) => {
                self.side.shared.sweeps.end(&sweep);
                token
            }
            Entry::Sweeping { .. } | Entry::Read(_) => {
                panic!("the inner disk ended {:?}, which it does not have", done.token)
            }
        };
        Some(Done { token, ..done })
    }
}

/// Access Frequency of the hints (NVM Command Set, Read): the blocks are read once.
const FREQUENCY: u8 = 0xf;
const ONE_TIME_READ: u8 = 6;

/// The host says that it does not read this again: it is answered from the cache where it is there, and
/// otherwise it passes by, as it would evict what is read again.
#[inline]
fn is_once(request: &IoRequest) -> bool {
    request.hints & FREQUENCY == ONE_TIME_READ
}

/// Keep for the policy that a frame was hit.
#[inline(never)]
fn touch(shared: &Shared, touches: &mut Vec<u32>, frame: u32) {
    touches.push(frame);
    if touches.len() >= TOUCHES_MAX {
        shared.touch(touches);
    }
}

/// Keep for [`super::sizes`] that a page was read.
#[cold]
#[inline(never)]
fn sample(side: &Side, samples: &mut Vec<u64>, page: u64) {
    samples.push(page);
    if samples.len() >= SAMPLES_MAX {
        side.shared.sizes.read(samples, side.counts.of(NOBODY));
    }
}

/// Reads.
impl CachedCore {
    fn offset_and_bytes(&self, request: &IoRequest) -> (u64, u32) {
        (request.range.offset(self.shift), request.range.data_bytes(self.shift))
    }

    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call moves the data through memory")]
    fn prepare_read(&mut self, request: &IoRequest, next: Option<u64>) -> Prepared {
        let (offset, bytes) = self.offset_and_bytes(request);
        let page = offset / FRAME;
        let Shared { index, frames, .. } = &*self.side.shared;
        let guess = match self.expected {
            (expected, frame) if expected == page => frame,
            _ => index.guess(index.buckets(page)),
        };
        // While this command is worked on, the processor fetches the frame's word of the next one, whose
        // bucket it has fetched during the one before, and the bucket of the second next.
        let frame = index.guess(self.coming);
        frames.words().expect(frame);
        self.expected = (self.coming.page(), frame);
        if let Some(next) = next {
            self.coming = index.buckets((next << self.shift) / FRAME);
            index.expect(self.coming);
        }
        match self.find_one(request, guess, offset, bytes) {
            Some(data) => Prepared::Ready(data),
            None => self.prepare_pages(request, offset, bytes),
        }
    }

    /// The commonest: bytes of one page that is here.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call moves the data through memory")]
    fn find_one(&mut self, request: &IoRequest, guess: u32, offset: u64, bytes: u32) -> Option<Buf> {
        let Side { shared, frames, counts, .. } = &self.side;
        let skip = u32::try_from(offset % FRAME).unwrap_or(0);
        if bytes == 0 || bytes > FRAME_BYTES - skip {
            return None;
        }
        let pin = shared.index.hit(shared.words(), offset / FRAME, guess)?;
        counts.of(request.client).hits.add(1);
        if is_once(request) {
            return Some(frames.one(pin, skip, bytes));
        }
        let is_first = pin.warm();
        if shared.wants_touches {
            touch(shared, &mut self.touches, pin.frame());
        }
        if shared.sizes.has(offset / FRAME) {
            sample(&self.side, &mut self.samples, offset / FRAME);
        }
        let data = frames.one(pin, skip, bytes);
        if is_first {
            self.on_first_read(request, offset / FRAME);
        }
        Some(data)
    }

    #[inline(never)]
    fn prepare_pages(&mut self, request: &IoRequest, offset: u64, bytes: u32) -> Prepared {
        self.side.drop_prepared();
        if !self.touches.is_empty() {
            self.side.shared.touch(&mut self.touches);
        }
        let end = offset + u64::from(bytes);
        let pages = offset / FRAME..end.div_ceil(FRAME);
        let count = pages.end - pages.start;
        let is_last_part = end.next_multiple_of(FRAME) > self.inner.geometry().bytes();
        let is_not_filled = count > FILL_PAGES_MAX || is_once(request);
        let is_too_long = count > HIT_PAGES_MAX || is_not_filled && !self.side.has_all(pages.clone());
        let mut plan = self.side.plans.pop().unwrap_or_else(Plan::new);
        let means = self.side.means(request.client);
        let counts = means.counts.host;
        if bytes == 0
            || is_last_part
            || is_too_long
            || plan.make(&means, offset, bytes, is_once(request)).is_err()
        {
            counts.passed.add(count);
            self.side.plans.push(plan);
            return Prepared::Pool;
        }
        let hits = plan.kept().count() as u64;
        counts.hits.add(hits);
        counts.misses.add(count - hits);
        for page in pages.filter(|page| !is_once(request) && self.side.shared.sizes.has(*page)) {
            sample(&self.side, &mut self.samples, page);
        }
        if !is_once(request) {
            self.on_read(request, offset / FRAME, count);
        }
        if self.side.shared.wants_touches && !is_once(request) {
            plan.kept().for_each(|frame| touch(&self.side.shared, &mut self.touches, frame));
        }
        if hits == count {
            let data = plan.data(&self.side.means(NOBODY));
            self.side.plans.push(plan);
            return Prepared::Ready(data);
        }
        self.side.prepared = Some((*request, plan));
        Prepared::Later
    }

    /// A read whose pages are to come.
    fn begin_read(&mut self, token: Token, request: &IoRequest) {
        let prepared = self.side.prepared.take_if(|(prepared, _)| prepared == request);
        let (plan, passes) = match prepared {
            Some((_, plan)) => (plan, false),
            // Not asked for, or not at once: it goes around the cache.
            None => {
                let mut plan = self.side.plans.pop().unwrap_or_else(Plan::new);
                (plan.offset, plan.bytes) = self.offset_and_bytes(request);
                let pages = u64::from(plan.bytes).div_ceil(FRAME);
                self.side.counts.of(request.client).passed.add(pages);
                (plan, true)
            }
        };
        let read = Read { token: Some(token), request: *request, plan, at_disk: 0, passes };
        let slot = self.side.commands.insert(Entry::Read(read));
        self.step_read(slot);
    }

    /// Give the inner disk the pieces that are to be read, as far as it has room.
    fn submit_runs(&mut self, slot: u32) {
        while let Some((read, means)) = self.side.read(slot).filter(|_| self.pieces < self.depth) {
            let Some(Run { page, buf }) = read.plan.runs.pop() else { return };
            read.at_disk += 1;
            self.pieces += 1;
            let blocks = u32::try_from(buf.len() >> self.shift).unwrap_or(0);
            let range = BlockRange { lba: (page * FRAME) >> self.shift, blocks };
            // The pages are entered already: a write that ends later has doomed them, and is not asked about.
            if self.inner.may_still_write(range) {
                read.plan.doom(&means, page..page + buf.len() as u64 / FRAME);
            }
            let request = IoRequest { range, ..read.request };
            if let Some(done) = self.inner.submit(inner_token(FILLS, slot), &request, Some(buf)) {
                self.on_piece(slot, done);
            }
        }
    }

    /// The inner disk has ended a piece.
    fn on_piece(&mut self, slot: u32, done: Done) {
        let Some((read, means)) = self.side.read(slot) else {
            panic!("the inner disk ended a piece of a read that there is not")
        };
        self.pieces -= 1;
        read.at_disk -= 1;
        read.passes |= done.result.is_err() || done.buf.is_none();
        match done.buf {
            Some(buf) => read.plan.on_read(&means, buf, done.result.is_ok()),
            // The disk has it still. Dropped later, it frees doomed frames only; the other pieces pass, too.
            None => read.plan.doom(&means, 0..u64::MAX),
        }
    }

    /// What a read does next.
    fn step_read(&mut self, slot: u32) {
        self.submit_runs(slot);
        let Some((read, means)) = self.side.read(slot) else { return };
        if read.at_disk > 0 {
            return; // each piece comes by here
        }
        if !read.plan.runs.is_empty() {
            return self.waiting.push_back(slot);
        }
        read.plan.on_lost(&means);
        let Some(token) = read.token else { return self.side.end_read(slot) };
        if read.passes {
            return self.pass(slot, token);
        }
        if !read.plan.is_whole() {
            return self.waiting.push_back(slot);
        }
        let data = read.plan.data(&means);
        self.side.end_read(slot);
        self.ready.push_back(Done { token, result: Ok(()), buf: Some(data) });
    }

    /// The read itself goes to the inner disk.
    fn pass(&mut self, slot: u32, token: Token) {
        let Some((read, means)) = self.side.read(slot) else { return };
        read.plan.clear(&means);
        let (request, bytes) = (read.request, read.plan.bytes);
        let Some(buf) = self.pool.take(bytes) else { return self.waiting.push_back(slot) };
        self.side.end_read(slot);
        if let Some(done) = self.pass_on(token, Call::Op(request, Some(buf))) {
            self.ready.push_back(done);
        }
    }

    fn pass_on(&mut self, token: Token, call: Call) -> Option<Done> {
        let slot = self.side.commands.insert(Entry::Passed(token));
        self.call(token, slot, call)
    }

    /// Once for each read that waits.
    fn step_waiting(&mut self) {
        for _ in 0..self.waiting.len() {
            let Some(slot) = self.waiting.pop_front() else { return };
            let Some((read, means)) = self.side.read(slot) else { continue };
            if !read.passes && read.token.is_some() {
                read.passes = read.plan.look_again(&means).is_err();
            }
            self.step_read(slot);
        }
    }
}

impl CachedCore {
    /// Cut a command short that the inner disk does not have, if it is of `owner`.
    fn cancel(&mut self, slot: u32, owner: Owner) -> Option<Done> {
        match self.side.commands.get_mut(slot)? {
            Entry::Read(read) => {
                let token = read.token.take_if(|token| token.owner() == owner)?;
                Some(Done::cancelled(token, None))
            }
            Entry::Sweeping { token, .. } if token.owner() == owner => {
                let token = *token;
                self.sweeping.retain(|other| *other != slot);
                let Some(Entry::Sweeping { call, sweep, .. }) = self.side.commands.remove(slot) else {
                    return None;
                };
                if let Some(sweep) = sweep {
                    self.side.shared.sweeps.end(&sweep);
                }
                Some(Done::cancelled(token, call.into_buf()))
            }
            Entry::Sweeping { .. } | Entry::Passed(_) | Entry::Write { .. } | Entry::Swept(..) => None,
        }
    }
}

impl Disk for CachedCore {
    #[inline]
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn inner(&self) -> Option<&dyn Disk> {
        Some(&*self.inner)
    }

    #[inline]
    fn prepare(&mut self, request: &IoRequest, next: Option<u64>) -> Prepared {
        if request.op == Op::Read {
            return self.prepare_read(request, next);
        }
        self.inner.prepare(request, next)
    }

    fn submit(&mut self, token: Token, request: &IoRequest, buf: Option<Buf>) -> Option<Done> {
        match request.op {
            Op::Read if buf.is_none() => {
                self.begin_read(token, request);
                None
            }
            Op::Write { .. } | Op::WriteZeroes { .. } | Op::Deallocate => {
                self.write(token, request.range, Call::Op(*request, buf))
            }
            Op::Read | Op::Flush | Op::Compare | Op::Verify => self.pass_on(token, Call::Op(*request, buf)),
        }
    }

    fn compare_and_write(
        &mut self,
        token: Token,
        range: BlockRange,
        expected: Buf,
        data: Buf,
    ) -> Option<Done> {
        self.write(token, range, Call::CompareAndWrite { range, expected, data })
    }

    fn abilities(&self) -> Abilities {
        Abilities { reads_in_place: false, ..self.inner.abilities() }
    }

    fn copy(&mut self, token: Token, from: BlockRange, to: u64, fua: bool) -> Option<Done> {
        self.write(token, BlockRange { lba: to, blocks: from.blocks }, Call::Copy { from, to, fua })
    }

    fn poll(&mut self, now: Nanos, done: &mut Vec<Done>) -> bool {
        self.side.drop_prepared();
        let mut ended = std::mem::take(&mut self.inner_done);
        let mut is_busy = self.inner.poll(now, &mut ended);
        for inner in ended.drain(..) {
            if let Some(done) = self.on_inner_done(inner) {
                self.ready.push_back(done);
            }
        }
        self.inner_done = ended;
        is_busy |= !self.waiting.is_empty() || !self.sweeping.is_empty() || !self.ready.is_empty();
        self.step_waiting();
        self.step_sweeps();
        self.step_fetches();
        Done::give(&mut self.ready, done);
        is_busy
    }

    /// Pieces that fill frames go on: others may wait for the pages.
    fn cancel_owner(&mut self, owner: Owner) -> usize {
        let mut count = self.inner.cancel_owner(owner);
        count += Done::count_of(owner, &self.ready);
        for slot in self.side.commands.numbers() {
            if let Some(done) = self.cancel(slot, owner) {
                self.ready.push_back(done);
                count += 1;
            }
        }
        count
    }

    fn in_flight(&self) -> usize {
        self.side.commands.len() + self.ready.len()
    }
}
