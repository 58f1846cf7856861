//! [`CachedChannel`]: one core's handle on a cached disk.
//!
//! ```text
//!   read   prepare: all pages found            -> Ready
//!                   some missing               -> Later: missing pages are entered
//!                   long, one-time, no frame   -> Pool
//!          submit:  pieces to the inner disk   -> each Done publishes its frames -> all pages pinned -> Done
//!                   pages that others fill     -> looked up again in each poll
//!                   no frame, a media error, a page filled for a second by others
//!                                              -> pass around: the inner disk executes the read with a
//!                                                 buffer of the pool
//!                   another error of a piece   -> Done with this error
//!   write  announce each page, drop each from the cache -> inner disk
//!            -> whole pages that were in the cache are entered again -> end of the write -> Done
//!          over 1024 pages: sweep, some pages dropped in each poll -> inner disk -> end of the sweep -> Done
//!   other commands, and reads for which `prepare` returned `Pool`, are passed to the inner disk unchanged
//! ```
//! The inner disk is told how long a command has waited here ([`IoRequest::waited`]), so that its limit of
//! time holds from the submission to this layer.

mod fetch;
mod read;
mod write;

use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Buf, CacheCore, FRAME_BYTES, Holder, KeptPin, Pool};

use self::read::Read;
use super::ahead::{Fetch, Streams};
use super::budget::{Budget, Misses};
use super::counts::{CoreCounts, NO_HOST};
use super::index::{FirstBucket, Found, NO_FRAME};
use super::plan::{NoFrame, ReadContext, ReadPlan, Run};
use super::shared::{CacheShared, Stay};
use super::sweeps::Sweep;
use crate::layer::{Call, Commands, between, is_own, number_of, own_token};
use crate::shape::block_shift;
use crate::{
    Abilities, BlockRange, ChannelContext, DiskChannel, Done, Geometry, IoRequest, Op, Owner, Prepared,
    Sender, Token,
};

const FRAME: u64 = FRAME_BYTES as u64;
/// Pages of the longest read that fills the cache: 512 KiB. A longer read would evict as many pages for data
/// that is rarely read again.
const FILL_PAGES_MAX: u64 = 128;
/// Pages of the longest read that is answered from the cache: 2 MiB.
const HIT_PAGES_MAX: u64 = 512;
/// Reads with a [`ReadPlan`] for which a core allocates memory at open. Memory for further reads is allocated
/// on demand.
const READY_MAX: usize = 64;
/// Buffers allocated at open for one read: for its pieces and its data.
const BUFFERS_A_READ: usize = 8;
/// Hits that a core collects before one report to the policy.
const TOUCHES_MAX: usize = 256;
/// Sampled pages that are processed in one batch, which takes some microseconds.
const SAMPLES_MAX: usize = 8;
/// Most queued read-ahead fetches of a core. Further fetches are dropped.
const FETCHES_MAX: usize = 16;
/// Longest wait of a read for pages that other reads fill. Then it passes around the cache: the core that
/// fills them may hang.
const FILL_WAIT_MAX: Nanos = Nanos::from_secs(1);
/// Owner of the pieces that fill frames. No queue pair has it: a slab has at most 65,535 entries.
const FILLS: Owner = Owner(0xffff);

enum Entry {
    /// A write at the inner disk: its announced pages, and the pages that may be entered again.
    Write {
        token: Token,
        pages: std::ops::Range<u64>,
        stays: Vec<Stay>,
    },
    /// A write at the inner disk whose pages a sweep has dropped.
    Swept(Token, Sweep),
    /// A write whose sweep waits (`sweep` is `None`) or is in progress. Not yet at the inner disk.
    Sweeping {
        token: Token,
        pages: std::ops::Range<u64>,
        sweep: Option<Sweep>,
        call: Call,
        since: Nanos,
    },
    Read(Read),
}

/// One core's part of a cache: shared state, and the core's frame handle, counters and commands.
struct CoreCache {
    shared: Arc<CacheShared>,
    frames: Rc<CacheCore>,
    counts: CoreCounts,
    commands: Commands<Entry>,
    /// Count of commands at the inner disk that do not change the cache. Their tokens are the submitter's.
    passed: usize,
    /// Count of `commands` that are read-aheads.
    aheads: usize,
    /// For pages that are read and enter.
    budget: Budget,
    /// For written pages that stay. Apart from `budget`: a load that reads and writes needs both.
    stays_budget: Budget,
    /// The read for which [`DiskChannel::prepare`] last returned `Later`, until it is submitted or dropped.
    prepared: Option<(IoRequest, ReadPlan)>,
    plans: Vec<ReadPlan>,
    stays: Vec<Vec<Stay>>,
}

pub(super) struct CachedChannel {
    /// Declared first, so dropped first. Its drop waits for the commands in flight, so the writes of `cache`
    /// have ended when `cache` is dropped.
    inner: Box<dyn DiskChannel>,
    cache: CoreCache,
    pool: Pool,
    shift: u32,
    now: Nanos,
    misses: Misses,
    /// Number of pieces at the inner disk that fill frames, at most `depth`.
    pieces: u32,
    depth: u32,
    /// Prediction for the next read: its page, and the frame that probably contains the page.
    predicted: (u64, u32),
    /// Prediction for the read after the next: the first bucket of its page.
    predicted_bucket: FirstBucket,
    /// Indices of waiting reads. A read waits for one of these: pages that other commands fill, the lock of a
    /// shard, fewer than `depth` pieces at the inner disk, a buffer of the pool.
    waiting: VecDeque<u32>,
    sweeping: VecDeque<u32>,
    ready: VecDeque<Done>,
    /// Frames with hits that were not yet reported to the policy.
    touches: Vec<u32>,
    /// Sampled pages with reads that were not yet reported to `sizes`.
    samples: Vec<u64>,
    /// Polls in a row that have ended all commands in flight. Polls without commands do not count.
    inline_polls: u32,
    /// Detects sequential and strided reads. `None`: read-ahead is off.
    streams: Option<Box<Streams>>,
    /// Queued read-ahead fetches, each with the index of its host ([`IoRequest::client`]).
    fetches: VecDeque<(u16, Fetch)>,
}

impl CoreCache {
    fn context(&self, host: u16) -> ReadContext<'_> {
        ReadContext { shared: &self.shared, frames: &self.frames, counts: self.counts.host_counts(host) }
    }

    /// Returns the read at `slot` and the context for its plan; `None` for another kind of command.
    fn read(&mut self, slot: u32) -> Option<(&mut Read, ReadContext<'_>)> {
        let Entry::Read(read) = self.commands.get_mut(slot)? else { return None };
        let counts = self.counts.host_counts(read.request.client);
        Some((read, ReadContext { shared: &self.shared, frames: &self.frames, counts }))
    }

    fn end_read(&mut self, slot: u32) {
        if let Some(Entry::Read(read)) = self.commands.remove(slot) {
            self.aheads -= usize::from(read.plan.is_ahead);
            self.put_plan(read.plan);
        }
    }

    fn put_plan(&mut self, mut plan: ReadPlan) {
        plan.clear(&self.context(NO_HOST));
        self.plans.push(plan);
    }

    /// Clears the plan of a prepared read that was not submitted: frees its frames and pins.
    fn drop_prepared(&mut self) {
        if let Some((_, plan)) = self.prepared.take() {
            self.put_plan(plan);
        }
    }
}

impl Drop for CoreCache {
    /// Ends all writes and sweeps, and dooms the frames in buffers that the inner disk did not return. Runs
    /// after the drop of the inner disk.
    fn drop(&mut self) {
        self.drop_prepared();
        for slot in self.commands.numbers() {
            match self.commands.remove(slot) {
                Some(Entry::Read(mut read)) => {
                    read.plan.on_lost(&self.context(NO_HOST));
                    read.plan.clear(&self.context(NO_HOST));
                }
                Some(Entry::Write { pages, stays, .. }) => self.end_write(pages, stays),
                Some(Entry::Swept(_, sweep) | Entry::Sweeping { sweep: Some(sweep), .. }) => {
                    self.shared.sweeps.end(&sweep);
                }
                Some(Entry::Sweeping { sweep: None, .. }) | None => {}
            }
        }
    }
}

impl CachedChannel {
    pub(super) fn new(
        inner: Box<dyn DiskChannel>,
        shared: Arc<CacheShared>,
        context: &ChannelContext,
        now: Nanos,
    ) -> CachedChannel {
        let depth = context.depth as usize;
        let predicted_bucket = shared.index.first_bucket(0);
        let window_max = fetch::window_max(shared.spec.read_ahead, shared.words().len());
        let is_paced = shared.spec.is_paced;
        let budget = || Budget::new(is_paced);
        let cache = CoreCache {
            frames: shared.frames.core(depth.min(READY_MAX) * BUFFERS_A_READ),
            counts: CoreCounts::new(&shared.counts),
            shared,
            commands: Commands::with_capacity(depth),
            passed: 0,
            aheads: 0,
            budget: budget(),
            stays_budget: budget(),
            prepared: None,
            plans: (0..depth.min(READY_MAX)).map(|_| ReadPlan::new()).collect(),
            stays: Vec::with_capacity(depth),
        };
        CachedChannel {
            shift: block_shift(inner.geometry().block_bytes),
            inner,
            cache,
            pool: context.pool.clone(),
            now,
            misses: Misses::default(),
            pieces: 0,
            depth: context.depth,
            predicted: (u64::MAX, NO_FRAME),
            predicted_bucket,
            waiting: VecDeque::with_capacity(depth),
            sweeping: VecDeque::new(),
            ready: VecDeque::with_capacity(depth),
            touches: Vec::with_capacity(TOUCHES_MAX),
            samples: Vec::with_capacity(SAMPLES_MAX),
            inline_polls: 0,
            streams: (window_max > 0).then(|| Box::new(Streams::new(window_max))),
            fetches: VecDeque::with_capacity(FETCHES_MAX),
        }
    }

    /// Removes the cache and returns the inner disk. No command may be in flight.
    pub(super) fn into_inner(self) -> Box<dyn DiskChannel> {
        debug_assert_eq!(self.in_flight(), 0, "a cache goes while commands are in flight");
        self.inner
    }

    /// Submits the command with index `slot` in `commands` to the inner disk.
    fn call(&mut self, token: Token, slot: u32, call: Call) -> Option<Done> {
        let done = call.submit(&mut *self.inner, own_token(token.owner(), slot));
        done.and_then(|done| self.on_inner_done(done))
    }

    /// Handles the completions of this layer's own commands among those from `first` on, and puts what ends
    /// with them in their places. The others are for the submitter as they are. The order stays: a read that
    /// moves from the front of a batch to its end waits for the batch twice.
    fn take_own(&mut self, done: &mut Vec<Done>, first: usize) {
        let mut passed = done.len() - first;
        if self.cache.commands.len() > 0 {
            let mut end = first;
            for at in first..done.len() {
                let token = done[at].token;
                if is_own(token) {
                    passed -= 1;
                    let own = std::mem::replace(&mut done[at], Done { token, result: Ok(()), buf: None });
                    let Some(ended) = self.on_inner_done(own) else { continue };
                    done[at] = ended;
                }
                done.swap(at, end);
                end += 1;
            }
            done.truncate(end);
        }
        let passed = self.cache.passed.checked_sub(passed);
        self.cache.passed = passed.unwrap_or_else(|| panic!("the inner disk ended a command twice"));
    }

    fn pages(&self, range: BlockRange) -> std::ops::Range<u64> {
        let offset = range.offset(self.shift);
        offset / FRAME..(offset + range.bytes(self.shift)).div_ceil(FRAME)
    }

    /// Handles the completion of a command of this layer. Returns the completion for the submitter; `None` if
    /// no command of the submitter has ended with it.
    fn on_inner_done(&mut self, done: Done) -> Option<Done> {
        let slot = number_of(done.token);
        if done.token.owner() == FILLS {
            self.on_piece(slot, done);
            return self.step_read(slot);
        }
        let Some(entry) = self.cache.commands.remove(slot) else {
            panic!("the inner disk ended {:?} twice", done.token)
        };
        let token = match entry {
            Entry::Write { token, pages, stays } => {
                if let (Ok(()), Some(buf)) = (done.result, &done.buf) {
                    self.cache.keep_written(&pages, &stays, buf, self.now);
                }
                self.cache.end_write(pages, stays);
                token
            }
            Entry::Swept(token, sweep) => {
                self.cache.shared.sweeps.end(&sweep);
                token
            }
            Entry::Sweeping { .. } | Entry::Read(_) => {
                panic!("the inner disk ended {:?}, which it does not have", done.token)
            }
        };
        Some(Done { token, ..done })
    }
}

/// Mask of Access Frequency in the hints (NVM Command Set, Read), and its value "one time read".
const FREQUENCY: u8 = 0xf;
const ONE_TIME_READ: u8 = 6;

/// Returns true if the host announces a one-time read. Such a read is answered from the cache if all its
/// pages are cached. Otherwise it passes around the cache: its pages would evict pages that are read again.
#[inline]
fn is_once(request: &IoRequest) -> bool {
    request.hints & FREQUENCY == ONE_TIME_READ
}

/// Records a hit; reports the collected hits to the policy once there are [`TOUCHES_MAX`].
#[inline(never)]
fn touch(shared: &CacheShared, touches: &mut Vec<u32>, frame: u32) {
    touches.push(frame);
    if touches.len() >= TOUCHES_MAX {
        shared.touch(touches);
    }
}

/// Records a read of a sampled page; reports [`SAMPLES_MAX`] reads at a time to [`super::sizes`].
#[cold]
#[inline(never)]
fn sample(cache: &CoreCache, samples: &mut Vec<u64>, page: u64) {
    samples.push(page);
    if samples.len() >= SAMPLES_MAX {
        cache.shared.sizes.read(samples, cache.counts.of(NO_HOST));
    }
}

impl CachedChannel {
    fn offset_and_bytes(&self, request: &IoRequest) -> (u64, u32) {
        (request.range.offset(self.shift), request.range.data_bytes(self.shift))
    }

    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call moves the data through memory")]
    fn prepare_read(&mut self, request: &IoRequest, next: Option<u64>) -> Prepared {
        let (offset, bytes) = self.offset_and_bytes(request);
        let page = offset / FRAME;
        if !self.cache.shared.may_answer() {
            return self.without_lease(request, bytes);
        }
        if self.misses.are_many() && self.skips(request, page, bytes) {
            return Prepared::Pool;
        }
        let CacheShared { index, frames, .. } = &*self.cache.shared;
        let guess = match self.predicted {
            (expected, frame) if expected == page => frame,
            _ => index.guess(index.first_bucket(page)),
        };
        // Prefetches for later reads, in parallel to this command: the frame word of the next read, and the
        // bucket of the read after the next. That of the next read was prefetched one command earlier.
        if let Some(next) = next {
            let frame = index.guess(self.predicted_bucket);
            frames.words().prefetch_word(frame);
            self.predicted = (self.predicted_bucket.page(), frame);
            self.predicted_bucket = index.first_bucket((next << self.shift) / FRAME);
            index.prefetch(self.predicted_bucket);
        }
        let skip = u32::try_from(offset % FRAME).unwrap_or(0);
        if bytes == 0 || bytes > FRAME_BYTES - skip {
            return self.prepare_pages(request, offset, bytes);
        }
        // A kept pin has no borrow of the cache.
        let kept = match index.hit(frames.words(), page, guess) {
            Found::Present(pin) => Ok(pin.keep()),
            Found::Filling => Err(true),
            Found::Missing => Err(false),
        };
        let kept = match kept {
            Ok(kept) => kept,
            Err(true) => return self.prepare_pages(request, offset, bytes),
            Err(false) => return self.miss_one(request, offset, bytes),
        };
        let CoreCache { shared, frames, counts, .. } = &self.cache;
        let pin = shared.words().resume(kept);
        counts.of(request.client).hits.add(1);
        self.misses.on_read(true);
        if !is_once(request) {
            if shared.wants_touches {
                touch(shared, &mut self.touches, pin.frame());
            }
            if shared.sizes.is_sampled(page) {
                sample(&self.cache, &mut self.samples, page);
            }
            if pin.count_hit() {
                let kept = pin.keep();
                return self.first_hit(request, kept, skip, bytes);
            }
        }
        Prepared::Ready(frames.page_buf(pin, skip, bytes))
    }

    /// The cache may not answer now: the read passes around it.
    #[cold]
    fn without_lease(&mut self, request: &IoRequest, bytes: u32) -> Prepared {
        self.cache.drop_prepared();
        self.cache.counts.of(request.client).passed.add(u64::from(bytes).div_ceil(FRAME));
        Prepared::Pool
    }

    /// Returns true for a read that passes around the cache without a lookup, because the last reads found
    /// nothing and the budget is spent. The disk has the newest data of each acknowledged write. Sampled
    /// pages are looked up. So are reads of several pages, except for large ones beside others.
    #[inline(never)]
    fn skips(&mut self, request: &IoRequest, page: u64, bytes: u32) -> bool {
        if self.cache.budget.is_open(self.now) || is_once(request) || !self.misses.skip() {
            return false;
        }
        let (offset, _) = self.offset_and_bytes(request);
        let end = (offset + u64::from(bytes)).div_ceil(FRAME);
        let is_skipped = end - page == 1 || self.is_beside(end - page);
        if !is_skipped || (page..end).any(|page| self.cache.shared.sizes.is_sampled(page)) {
            return false;
        }
        self.cache.counts.of(request.client).over_budget.add(end - page);
        self.misses.on_read(false);
        true
    }

    /// Prepares a read within one page that is missing. Beyond the budget it passes around the cache: the
    /// most common case of a core that misses in each read.
    #[inline(never)]
    fn miss_one(&mut self, request: &IoRequest, offset: u64, bytes: u32) -> Prepared {
        if is_once(request) || self.cache.budget.is_open(self.now) {
            return self.prepare_pages(request, offset, bytes);
        }
        let page = offset / FRAME;
        self.cache.counts.of(request.client).over_budget.add(1);
        self.misses.on_read(false);
        if self.cache.shared.sizes.is_sampled(page) {
            sample(&self.cache, &mut self.samples, page);
        }
        self.on_read(request, page, 1);
        Prepared::Pool
    }

    /// Reads a page for the first time that was read ahead.
    #[cold]
    #[inline(never)]
    fn first_hit(&mut self, request: &IoRequest, kept: KeptPin, skip: u32, bytes: u32) -> Prepared {
        let (offset, _) = self.offset_and_bytes(request);
        self.on_first_read(request, offset / FRAME);
        let CoreCache { shared, frames, .. } = &self.cache;
        Prepared::Ready(frames.page_buf(shared.words().resume(kept), skip, bytes))
    }

    #[inline(never)]
    fn prepare_pages(&mut self, request: &IoRequest, offset: u64, bytes: u32) -> Prepared {
        self.cache.drop_prepared();
        if !self.touches.is_empty() {
            self.cache.shared.touch(&mut self.touches);
        }
        let end = offset + u64::from(bytes);
        let pages = offset / FRAME..end.div_ceil(FRAME);
        let count = pages.end - pages.start;
        let is_once = is_once(request);
        let is_last_part = end.next_multiple_of(FRAME) > self.inner.geometry().bytes();
        let is_cached = bytes > 0 && !is_last_part && count <= HIT_PAGES_MAX;
        let fills = is_cached && count <= FILL_PAGES_MAX && !is_once;
        let is_open = self.cache.budget.is_open(self.now);
        let mut plan = self.cache.plans.pop().unwrap_or_else(ReadPlan::new);
        let context = self.cache.context(request.client);
        let counts = context.counts.host;
        let is_planned = if fills && is_open {
            plan.make(&context, offset, bytes).is_ok()
        } else {
            is_cached && plan.find(&context, offset, bytes, is_once, fills)
        };
        let hits = plan.kept().count() as u64;
        self.misses.on_read(hits > 0);
        if is_planned {
            counts.hits.add(hits);
            counts.misses.add(count - hits);
            self.cache.budget.spend(plan.own(), self.now);
        } else if fills && !is_open {
            counts.over_budget.add(count);
        } else {
            counts.passed.add(count);
        }
        if fills {
            for page in pages.filter(|page| self.cache.shared.sizes.is_sampled(*page)) {
                sample(&self.cache, &mut self.samples, page);
            }
            self.on_read(request, offset / FRAME, count);
        }
        if !is_planned {
            self.cache.plans.push(plan);
            return Prepared::Pool;
        }
        if self.cache.shared.wants_touches && !is_once {
            plan.kept().for_each(|frame| touch(&self.cache.shared, &mut self.touches, frame));
        }
        if hits == count {
            let data = plan.data(&self.cache.context(NO_HOST));
            self.cache.plans.push(plan);
            return Prepared::Ready(data);
        }
        self.cache.prepared = Some((*request, plan));
        Prepared::Later
    }

    /// Begins a read without a buffer, for which `prepare` did not return `Ready`.
    fn begin_read(&mut self, token: Token, request: &IoRequest) -> Option<Done> {
        let prepared = self.cache.prepared.take_if(|(prepared, _)| prepared == request);
        let (plan, passes_around) = match prepared {
            Some((_, plan)) => (plan, false),
            // Without `prepare`, or after another call of `prepare` or `poll`: passes around the cache.
            None => {
                let mut plan = self.cache.plans.pop().unwrap_or_else(ReadPlan::new);
                (plan.offset, plan.bytes) = self.offset_and_bytes(request);
                let pages = u64::from(plan.bytes).div_ceil(FRAME);
                self.cache.counts.of(request.client).passed.add(pages);
                (plan, true)
            }
        };
        let read = Read { passes_around, ..Read::new(Some(token), request, plan, self.now) };
        let slot = self.cache.commands.insert(Entry::Read(read));
        self.step_read(slot)
    }

    /// Submits the read's pieces to the inner disk while fewer than `depth` pieces of this core are there.
    fn submit_runs(&mut self, slot: u32) {
        while let Some((read, context)) = self.cache.read(slot).filter(|_| self.pieces < self.depth) {
            if read.failed.is_some() {
                return;
            }
            let Some(Run { page, buf }) = read.plan.runs.pop() else { return };
            if page * FRAME + buf.len() as u64 > self.inner.geometry().bytes() {
                // The disk has shrunk, and the page is not whole any more.
                context.give_up(buf);
                read.passes_around = true;
                continue;
            }
            read.at_disk += 1;
            self.pieces += 1;
            let blocks = u32::try_from(buf.len() >> self.shift).unwrap_or(0);
            let range = BlockRange { lba: (page * FRAME) >> self.shift, blocks };
            // The pages are entered already, so writes in flight doom them. Only writes that have ended with
            // an error need this check.
            if self.inner.may_still_write(range) {
                read.plan.doom(&context, page..page + buf.len() as u64 / FRAME);
            }
            let request = IoRequest { range, sender: Sender::FILL, ..read.request_at(self.now) };
            if let Some(done) = self.inner.submit(own_token(FILLS, slot), &request, Some(buf)) {
                self.on_piece(slot, done);
            }
        }
    }

    /// Handles the completion of a piece: publishes its frames. After a media error the read passes around
    /// the cache, because the blocks that its host asked for may be readable. Another error is that of the
    /// read: a second command would take its time again.
    fn on_piece(&mut self, slot: u32, done: Done) {
        let Some((read, context)) = self.cache.read(slot) else {
            panic!("the inner disk ended a piece of a read that there is not")
        };
        self.pieces -= 1;
        read.at_disk -= 1;
        match done.result {
            Err(error) if !error.is_media() => _ = read.failed.get_or_insert(error),
            Err(_) => read.passes_around = true,
            Ok(()) => read.passes_around |= done.buf.is_none(),
        }
        match done.buf {
            Some(buf) => read.plan.on_read(&context, buf, done.result.is_ok()),
            // The inner disk keeps the buffer. All frames that the read fills are doomed, so a later drop of
            // the buffer frees only doomed frames.
            None => read.plan.doom(&context, 0..u64::MAX),
        }
    }

    /// Advances a read: submits its pieces, adds it to `waiting`, passes it around the cache, or ends it.
    /// Returns its completion if it has ended and its submitter waits for it.
    fn step_read(&mut self, slot: u32) -> Option<Done> {
        self.submit_runs(slot);
        let (read, context) = self.cache.read(slot)?;
        if read.at_disk > 0 {
            return None; // the completion of the last piece calls this function again
        }
        if let Some(error) = read.failed {
            read.plan.on_lost(&context);
            let token = read.token;
            self.cache.end_read(slot);
            return token.map(|token| Done { token, result: Err(error), buf: None });
        }
        if !read.plan.runs.is_empty() {
            self.waiting.push_back(slot);
            return None;
        }
        read.plan.on_lost(&context);
        let Some(token) = read.token else {
            self.cache.end_read(slot);
            return None;
        };
        if read.passes_around {
            return self.pass_around(slot, token);
        }
        if !read.plan.is_whole() {
            self.waiting.push_back(slot);
            return None;
        }
        let data = read.plan.data(&context);
        self.cache.end_read(slot);
        Some(Done { token, result: Ok(()), buf: Some(data) })
    }

    /// Passes a read to the inner disk, with a buffer of the pool that its host is charged for. Without a
    /// buffer in the host's share the read waits, and claims the next one. Returns the completion if it has
    /// ended already.
    fn pass_around(&mut self, slot: u32, token: Token) -> Option<Done> {
        let (read, context) = self.cache.read(slot)?;
        read.plan.clear(&context);
        let (request, bytes) = (read.request_at(self.now), read.plan.bytes);
        let share = self.pool.share(Holder::host(request.client));
        let Some(buf) = share.take(bytes) else {
            share.claim(bytes);
            self.waiting.push_back(slot);
            return None;
        };
        self.cache.end_read(slot);
        self.forward(token, &request, Some(buf))
    }

    fn forward(&mut self, token: Token, request: &IoRequest, buf: Option<Buf>) -> Option<Done> {
        assert!(!is_own(token), "the token {token:?} of a submitter has the bit of this layer");
        let done = self.inner.submit(token, request, buf);
        self.cache.passed += usize::from(done.is_none());
        done
    }

    fn step_waiting(&mut self) {
        for _ in 0..self.waiting.len() {
            let Some(slot) = self.waiting.pop_front() else { return };
            let Some((read, context)) = self.cache.read(slot) else { continue };
            if !context.shared.may_answer() {
                read.passes_around = true;
            } else if !read.passes_around && read.token.is_some() {
                let is_late = between(read.since, self.now) > FILL_WAIT_MAX;
                read.passes_around = match read.plan.retry_waiting(&context) {
                    Ok(()) => is_late && read.plan.runs.is_empty() && !read.plan.is_whole(),
                    Err(NoFrame) => true,
                };
            }
            let ended = self.step_read(slot);
            self.ready.extend(ended);
        }
    }
}

impl CachedChannel {
    /// Cancels the command at `slot` if it is a read, or a write with an unfinished sweep, of `owner`.
    /// Returns its completion. The pieces of a read continue.
    fn cancel(&mut self, slot: u32, owner: Owner) -> Option<Done> {
        match self.cache.commands.get_mut(slot)? {
            Entry::Read(read) => {
                let token = read.token.take_if(|token| token.owner() == owner)?;
                Some(Done::cancelled(token, None))
            }
            Entry::Sweeping { token, .. } if token.owner() == owner => {
                let token = *token;
                self.sweeping.retain(|other| *other != slot);
                let Some(Entry::Sweeping { call, sweep, .. }) = self.cache.commands.remove(slot) else {
                    return None;
                };
                if let Some(sweep) = sweep {
                    self.cache.shared.sweeps.end(&sweep);
                }
                Some(Done::cancelled(token, call.into_buf()))
            }
            Entry::Sweeping { .. } | Entry::Write { .. } | Entry::Swept(..) => None,
        }
    }
}

impl DiskChannel for CachedChannel {
    #[inline]
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn inner(&self) -> Option<&dyn DiskChannel> {
        Some(&*self.inner)
    }

    fn inner_mut(&mut self) -> Option<&mut dyn DiskChannel> {
        Some(&mut *self.inner)
    }

    #[inline]
    fn prepare(&mut self, request: &IoRequest, next: Option<u64>) -> Prepared {
        if request.op == Op::Read {
            return self.prepare_read(request, next);
        }
        self.inner.prepare(request, next)
    }

    /// A page that only the inner disk has in memory is not meant: its reference is not of this cache.
    fn page_in_memory(&self, offset: u64) -> Option<Buf> {
        let CoreCache { shared, frames, .. } = &self.cache;
        match shared.index.find(shared.words(), shared.index.buckets(offset / FRAME)) {
            Found::Present(pin) => Some(frames.page_buf(pin, 0, FRAME_BYTES)),
            Found::Filling | Found::Missing => None,
        }
    }

    fn submit(&mut self, token: Token, request: &IoRequest, buf: Option<Buf>) -> Option<Done> {
        match request.op {
            Op::Read if buf.is_none() => self.begin_read(token, request),
            Op::Write { .. } | Op::WriteZeroes { .. } | Op::Deallocate => {
                self.write(token, request.range, Call::Op(*request, buf))
            }
            Op::Read | Op::Flush | Op::Compare | Op::Verify => self.forward(token, request, buf),
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
        self.now = now;
        self.cache.drop_prepared();
        // What had no room in the last poll comes first: the inner disk may fill `done` each time.
        Done::give(&mut self.ready, done);
        let (first, before) = (done.len(), self.pending());
        let mut is_busy = self.inner.poll(now, done);
        self.take_own(done, first);
        is_busy |= !self.waiting.is_empty() || !self.sweeping.is_empty() || !self.ready.is_empty();
        self.step_waiting();
        self.on_polled(before);
        self.step_sweeps();
        self.step_fetches();
        Done::give(&mut self.ready, done);
        is_busy
    }

    /// Cancels reads and writes with unfinished sweeps here, the other commands at the inner disk. Pieces
    /// that fill frames continue, because other reads may wait for their pages.
    fn cancel_owner(&mut self, owner: Owner) -> usize {
        let mut count = self.inner.cancel_owner(owner);
        count += Done::count_of(owner, &self.ready);
        for slot in self.cache.commands.numbers() {
            if let Some(done) = self.cancel(slot, owner) {
                self.ready.push_back(done);
                count += 1;
            }
        }
        count
    }

    fn in_flight(&self) -> usize {
        self.cache.commands.len() + self.cache.passed + self.ready.len()
    }
}
