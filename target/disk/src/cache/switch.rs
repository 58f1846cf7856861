//! [`Switch`]: adds, replaces or removes the cache of a disk in use. [`SwitchedCore`]: a core's handle on it.
//!
//! ```text
//!   Plain ──> Announcing ──> Cached        next stage once every core has confirmed the current stage
//!   Plain <── Announcing <── Cached
//! ```
//!
//! Cores switch one after the other. A write that is not announced would leave a stale page in the cache. So
//! no core reads from the cache before all cores announce their writes. And no core stops announcing before
//! all cores have stopped reading from the cache. In the stage Announcing, writes are announced and reads go
//! to the disk.
//!
//! A core switches when none of its commands is in flight: new commands are queued until the commands in
//! flight have ended. Then the core confirms the stage. The step from Announcing to Cached does not wait.
//!
//! A core switches only after [`DiskChannel::reconfigure`]. By then the rest of the new configuration, such
//! as the registration of the cache's memory, is valid on the core.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Buf, Pool};
use spindle_target_card::{CachedPages, ForeignWrite};

use super::core::CachedChannel;
use super::shared::CacheShared;
use crate::layer::Call;
use crate::release::{Former, release};
use crate::{
    Abilities, BlockRange, ChannelContext, DiskChannel, Done, Geometry, IoRequest, Op, Owner, Prepared, Token,
};

/// Stage of the switch, see the module. The cores enter a stage one after the other.
#[derive(Clone)]
enum Stage {
    Plain,
    Announcing(Arc<CacheShared>),
    Cached(Arc<CacheShared>),
}

impl Stage {
    fn cache(&self) -> Option<&Arc<CacheShared>> {
        match self {
            Stage::Plain => None,
            Stage::Announcing(shared) | Stage::Cached(shared) => Some(shared),
        }
    }
}

struct SwitchState {
    stage: Stage,
    /// The requested cache; `None`: no cache.
    wanted: Option<Arc<CacheShared>>,
    /// Number of calls of [`Switch::set_wanted`].
    request: u64,
    /// By core: the generation that the core has confirmed.
    cores: Vec<Arc<AtomicU64>>,
}

/// Switch state of one disk, shared by its cores. See the module.
pub(super) struct Switch {
    state: Mutex<SwitchState>,
    /// Number of stage changes so far; identifies the current stage.
    generation: AtomicU64,
}

/// Gives caches back that no core gets any more. The frames outlive a cache while replies are sent from them.
fn release_all(caches: Vec<Arc<CacheShared>>) {
    let frames: Vec<Former> = caches.iter().map(|cache| Arc::clone(&cache.frames) as Former).collect();
    release(caches.into_iter().map(|cache| cache as Former).chain(frames));
}

impl Switch {
    pub(super) fn new(shared: Option<Arc<CacheShared>>) -> Switch {
        let stage = shared.clone().map_or(Stage::Plain, Stage::Cached);
        let now = SwitchState { stage, wanted: shared, request: 0, cores: Vec::new() };
        Switch { state: Mutex::new(now), generation: AtomicU64::new(0) }
    }

    fn lock(&self) -> MutexGuard<'_, SwitchState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the cache in use and the requested one, if it is another.
    fn caches(&self) -> Vec<Arc<CacheShared>> {
        let now = self.lock();
        let mut caches: Vec<_> = now.stage.cache().cloned().into_iter().chain(now.wanted.clone()).collect();
        drop(now);
        caches.dedup_by(|one, other| Arc::ptr_eq(one, other));
        caches
    }

    /// Requests the cache `shared`, or no cache. Each core starts to switch at [`DiskChannel::reconfigure`].
    /// The memory of a former cache is given back by another thread.
    pub(super) fn set_wanted(&self, shared: Option<Arc<CacheShared>>) {
        let mut former = self.caches();
        former.retain(|it| shared.as_ref().is_none_or(|shared| !Arc::ptr_eq(it, shared)));
        // Before any core can begin to switch, and so to stop announcing its writes to a former cache:
        // clients must find no seal then.
        former.iter().for_each(|it| it.words().close_seals());
        let mut now = self.lock();
        now.wanted = shared;
        now.request += 1;
        drop(now);
        release_all(former);
    }

    /// The disk has gone: breaks all seals of its caches and seals no frame of them from now on. Another
    /// thread gives their memory back.
    pub(super) fn close(&self) {
        let caches = self.caches();
        caches.iter().for_each(|it| it.words().close_seals());
        release_all(caches);
    }

    pub(super) fn wanted(&self) -> Option<Arc<CacheShared>> {
        self.lock().wanted.clone()
    }

    /// Drops all pages of the cache in use. Releases the lock first, because dropping the pages of a large
    /// cache takes milliseconds.
    pub(super) fn drop_all(&self) {
        let mut done: Option<Arc<CacheShared>> = None;
        loop {
            let cache = self.lock().stage.cache().cloned();
            let Some(cache) = cache.filter(|it| done.as_ref().is_none_or(|done| !Arc::ptr_eq(it, done)))
            else {
                return;
            };
            cache.drop_all();
            // A cache installed meanwhile may contain old pages too.
            done = Some(cache);
        }
    }

    /// Advances to the next stage if all cores have confirmed the current stage. No effect if the requested
    /// stage is reached.
    fn advance(&self, now: &mut SwitchState) {
        now.cores.retain(|core| Arc::strong_count(core) > 1);
        let generation = self.generation.load(Ordering::Acquire);
        if now.cores.iter().any(|core| core.load(Ordering::Acquire) != generation) {
            return;
        }
        let next = match (&now.stage, &now.wanted) {
            (Stage::Plain, None) => return,
            (Stage::Plain, Some(wanted)) => Stage::Announcing(Arc::clone(wanted)),
            (Stage::Announcing(shared), Some(wanted)) if Arc::ptr_eq(shared, wanted) => {
                Stage::Cached(Arc::clone(shared))
            }
            (Stage::Announcing(_), _) => Stage::Plain,
            (Stage::Cached(shared), Some(wanted)) if Arc::ptr_eq(shared, wanted) => return,
            (Stage::Cached(shared), _) => Stage::Announcing(Arc::clone(shared)),
        };
        now.stage = next;
        self.generation.store(generation + 1, Ordering::Release);
    }
}

/// Writes of other hosts to a disk with an agent, whose cache does not change while it is open.
impl CachedPages for Switch {
    fn begin_foreign(&self, pages: Range<u64>) -> ForeignWrite {
        let cache = self.lock().stage.cache().cloned();
        cache.map_or(ForeignWrite::Pages(0..0), |cache| cache.begin_foreign(pages))
    }

    fn end_foreign(&self, write: ForeignWrite) {
        let cache = self.lock().stage.cache().cloned();
        if let Some(cache) = cache {
            cache.end_foreign(write);
        }
    }

    fn drop_all(&self) {
        Switch::drop_all(self);
    }
}

/// Disk handle for a core's commands, by stage.
enum Path {
    Plain(Box<dyn DiskChannel>),
    Announcing(Box<CachedChannel>),
    Cached(Box<CachedChannel>),
    /// Placeholder while a method of [`SwitchedCore`] replaces the path.
    Moving,
}

/// One core's handle on a disk with an optional cache. See the module.
pub(super) struct SwitchedCore {
    path: Path,
    switch: Arc<Switch>,
    /// Generation of the stage of `path`.
    generation: u64,
    confirmed: Arc<AtomicU64>,
    /// [`SwitchState::request`] at the last `reconfigure`, or at open.
    known_request: u64,
    /// New commands are queued in `held` until no command is in flight.
    is_holding: bool,
    /// Each with its time of submission.
    held: VecDeque<(Token, Call, Nanos)>,
    /// Completions of queued commands that were cancelled or that ended in `submit`.
    ready: VecDeque<Done>,
    core: usize,
    pool: Pool,
    depth: u32,
    /// Copy of the inner disk's geometry, renewed by `poll` and `reconfigure`: a call for each command costs
    /// 24 instructions.
    geometry: Geometry,
    now: Nanos,
    /// `geometry` reports no atomic writes of several blocks: see [`CachedDisk`](super::CachedDisk).
    has_single_blocks: bool,
}

impl SwitchedCore {
    pub(super) fn new(
        inner: Box<dyn DiskChannel>,
        switch: &Arc<Switch>,
        context: &ChannelContext,
        has_single_blocks: bool,
    ) -> SwitchedCore {
        let mut now = switch.lock();
        let generation = switch.generation.load(Ordering::Acquire);
        let confirmed = Arc::new(AtomicU64::new(generation));
        now.cores.push(Arc::clone(&confirmed));
        let (stage, known_request) = (now.stage.clone(), now.request);
        drop(now);
        let mut handle = SwitchedCore {
            geometry: inner.geometry(),
            path: Path::Plain(inner),
            switch: Arc::clone(switch),
            generation,
            confirmed,
            known_request,
            is_holding: false,
            held: VecDeque::new(),
            ready: VecDeque::new(),
            core: context.core,
            pool: context.pool.clone(),
            depth: context.depth,
            now: Nanos::ZERO,
            has_single_blocks,
        };
        handle.enter_stage(&stage);
        handle.renew_geometry();
        handle
    }

    fn renew_geometry(&mut self) {
        self.geometry = self.as_disk().geometry();
        if self.has_single_blocks {
            self.geometry.atomic_blocks = 1;
        }
    }

    fn disk(&mut self) -> &mut dyn DiskChannel {
        match &mut self.path {
            Path::Plain(disk) => &mut **disk,
            Path::Announcing(core) | Path::Cached(core) => &mut **core,
            Path::Moving => unreachable!("a path is moved in one call"),
        }
    }

    fn as_disk(&self) -> &dyn DiskChannel {
        match &self.path {
            Path::Plain(disk) => &**disk,
            Path::Announcing(core) | Path::Cached(core) => &**core,
            Path::Moving => unreachable!("a path is moved in one call"),
        }
    }

    /// Switches to the path of a stage. No command is in flight, except from Announcing to Cached.
    fn enter_stage(&mut self, stage: &Stage) {
        let path = std::mem::replace(&mut self.path, Path::Moving);
        let context = ChannelContext { core: self.core, pool: self.pool.clone(), depth: self.depth };
        let inner = |path| match path {
            Path::Plain(inner) => inner,
            Path::Announcing(core) | Path::Cached(core) => core.into_inner(),
            Path::Moving => unreachable!("a path is moved in one call"),
        };
        self.path = match (stage, path) {
            (Stage::Plain, path) => Path::Plain(inner(path)),
            (Stage::Announcing(_), Path::Cached(core) | Path::Announcing(core)) => Path::Announcing(core),
            (Stage::Cached(_), Path::Announcing(core)) => Path::Cached(core),
            (Stage::Announcing(shared), path) => Path::Announcing(Box::new(CachedChannel::new(
                inner(path),
                Arc::clone(shared),
                &context,
                self.now,
            ))),
            (Stage::Cached(shared), path) => Path::Cached(Box::new(CachedChannel::new(
                inner(path),
                Arc::clone(shared),
                &context,
                self.now,
            ))),
        };
    }

    /// Performs this core's part of a stage change. Returns true while the change is incomplete.
    #[cold]
    fn step(&mut self) -> bool {
        let switch = Arc::clone(&self.switch);
        let mut now = switch.lock();
        if self.known_request != now.request {
            return true; // waits for `reconfigure` of this core
        }
        switch.advance(&mut now);
        let generation = switch.generation.load(Ordering::Acquire);
        if self.generation != generation {
            let needs_rest = !matches!((&now.stage, &self.path), (Stage::Cached(_), Path::Announcing(_)));
            if needs_rest && self.as_disk().in_flight() > 0 {
                self.is_holding = true;
                // Reads stop using the cache; writes are still announced.
                self.path = match std::mem::replace(&mut self.path, Path::Moving) {
                    Path::Cached(core) | Path::Announcing(core) => Path::Announcing(core),
                    path @ (Path::Plain(_) | Path::Moving) => path,
                };
                return true;
            }
            let stage = now.stage.clone();
            self.enter_stage(&stage);
            self.generation = generation;
            self.confirmed.store(generation, Ordering::Release);
            switch.advance(&mut now);
        }
        drop(now);
        self.is_holding = false;
        self.submit_held();
        self.generation != switch.generation.load(Ordering::Acquire)
    }

    fn submit_held(&mut self) {
        while let Some((token, mut call, since)) = self.held.pop_front() {
            call.add_wait(since, self.now);
            if let Some(done) = call.submit(self.disk(), token) {
                self.ready.push_back(done);
            }
        }
    }

    #[inline]
    fn submit_or_hold(&mut self, token: Token, call: Call) -> Option<Done> {
        if self.is_holding {
            self.held.push_back((token, call, self.now));
            return None;
        }
        call.submit(self.disk(), token)
    }
}

impl DiskChannel for SwitchedCore {
    #[inline]
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn inner(&self) -> Option<&dyn DiskChannel> {
        Some(self.as_disk())
    }

    fn inner_mut(&mut self) -> Option<&mut dyn DiskChannel> {
        Some(self.disk())
    }

    #[inline]
    fn prepare(&mut self, request: &IoRequest, next: Option<u64>) -> Prepared {
        // Before the `match`, which becomes a jump table.
        if let Path::Cached(core) = &mut self.path {
            return core.prepare(request, next);
        }
        match &mut self.path {
            Path::Plain(disk) if !self.is_holding => disk.prepare(request, next),
            Path::Announcing(core) if request.op != Op::Read => core.prepare(request, next),
            Path::Plain(_) | Path::Announcing(_) | Path::Cached(_) | Path::Moving => Prepared::Pool,
        }
    }

    fn page_in_memory(&self, offset: u64) -> Option<Buf> {
        match &self.path {
            Path::Cached(core) => core.page_in_memory(offset),
            Path::Plain(disk) if !self.is_holding => disk.page_in_memory(offset),
            Path::Plain(_) | Path::Announcing(_) | Path::Moving => None,
        }
    }

    fn submit(&mut self, token: Token, request: &IoRequest, buf: Option<Buf>) -> Option<Done> {
        if self.is_holding {
            return self.submit_or_hold(token, Call::Op(*request, buf));
        }
        self.disk().submit(token, request, buf)
    }

    fn compare_and_write(
        &mut self,
        token: Token,
        range: BlockRange,
        expected: Buf,
        data: Buf,
    ) -> Option<Done> {
        self.submit_or_hold(token, Call::CompareAndWrite { range, expected, data })
    }

    fn abilities(&self) -> Abilities {
        Abilities { reads_in_place: false, ..self.as_disk().abilities() }
    }

    fn copy(&mut self, token: Token, from: BlockRange, to: u64, fua: bool) -> Option<Done> {
        self.submit_or_hold(token, Call::Copy { from, to, fua })
    }

    fn poll(&mut self, now: Nanos, done: &mut Vec<Done>) -> bool {
        self.now = now;
        let mut is_busy = !self.ready.is_empty();
        Done::give(&mut self.ready, done);
        is_busy |= self.disk().poll(now, done);
        if self.is_holding || self.generation != self.switch.generation.load(Ordering::Acquire) {
            is_busy |= self.step();
        }
        self.renew_geometry();
        is_busy
    }

    fn reconfigure(&mut self) {
        self.known_request = self.switch.lock().request;
        self.step();
        self.disk().reconfigure();
        self.renew_geometry();
    }

    fn cancel_owner(&mut self, owner: Owner) -> usize {
        let count = self.disk().cancel_owner(owner);
        for _ in 0..self.held.len() {
            match self.held.pop_front() {
                Some((token, call, _)) if token.owner() == owner => {
                    self.ready.push_back(Done::cancelled(token, call.into_buf()));
                }
                other => self.held.extend(other),
            }
        }
        count + Done::count_of(owner, &self.ready)
    }

    fn in_flight(&self) -> usize {
        self.as_disk().in_flight() + self.held.len() + self.ready.len()
    }
}
