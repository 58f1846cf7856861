//! [`Switch`]: a cache is put in front of a disk that is in use, or taken away.
//!
//! ```text
//!   Plain ──> Announcing ──> Cached        each arrow when every core has confirmed the stage before
//!   Plain <── Announcing <── Cached
//! ```
//!
//! Cores change one after the other. A write that is not announced makes a page wrong that another core may
//! find. So no core finds or fills a page before all cores announce their writes, and none stops to announce
//! before all have stopped to find pages. In between is a stage of its own, Announcing: writes are announced,
//! reads go to the disk.
//!
//! A core changes when none of its commands is in flight: it holds those that come for as long as the slowest
//! of those that it has. It confirms when it has changed. From Announcing to Cached nothing has to be waited
//! for.
//!
//! A core changes only after it was told of the request ([`Disk::reconfigure`]): what comes with it, such as
//! the registration of the cache's memory, has reached that core before.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Buf, Pool};

use super::core::CachedCore;
use super::shared::Shared;
use crate::layer::Call;
use crate::{
    Abilities, BlockRange, CoreContext, Disk, Done, Geometry, IoRequest, Op, Owner, Prepared, Token,
};

/// What all cores are to do, one after the other.
#[derive(Clone)]
enum Stage {
    Plain,
    Announcing(Arc<Shared>),
    Cached(Arc<Shared>),
}

impl Stage {
    fn cache(&self) -> Option<&Arc<Shared>> {
        match self {
            Stage::Plain => None,
            Stage::Announcing(shared) | Stage::Cached(shared) => Some(shared),
        }
    }
}

struct Now {
    stage: Stage,
    /// What is to be in the end.
    wanted: Option<Arc<Shared>>,
    /// Counts what was wanted.
    request: u64,
    /// The generation that each core has confirmed.
    cores: Vec<Arc<AtomicU64>>,
}

/// What the cores of one disk have in common. See the module.
pub(super) struct Switch {
    now: Mutex<Now>,
    /// Counts the stages.
    generation: AtomicU64,
}

impl Switch {
    pub(super) fn new(shared: Option<Arc<Shared>>) -> Switch {
        let stage = shared.clone().map_or(Stage::Plain, Stage::Cached);
        let now = Now { stage, wanted: shared, request: 0, cores: Vec::new() };
        Switch { now: Mutex::new(now), generation: AtomicU64::new(0) }
    }

    fn lock(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on this cache is wanted, or none. The cores begin when they are told.
    pub(super) fn want(&self, shared: Option<Arc<Shared>>) {
        let mut now = self.lock();
        now.wanted = shared;
        now.request += 1;
    }

    /// The cache that is wanted.
    pub(super) fn wanted(&self) -> Option<Arc<Shared>> {
        self.lock().wanted.clone()
    }

    /// Drop all pages. Not under the lock: it takes milliseconds for a large cache.
    pub(super) fn drop_all(&self) {
        let mut done: Option<Arc<Shared>> = None;
        loop {
            let cache = self.lock().stage.cache().cloned();
            let Some(cache) = cache.filter(|it| done.as_ref().is_none_or(|done| !Arc::ptr_eq(it, done)))
            else {
                return;
            };
            cache.drop_all();
            // Another one that came meanwhile may have pages of before.
            done = Some(cache);
        }
    }

    /// Go to the next stage, if there is one and all cores have confirmed this one.
    fn advance(&self, now: &mut Now) {
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

/// What a core does with its commands.
enum Path {
    Plain(Box<dyn Disk>),
    Announcing(Box<CachedCore>),
    Cached(Box<CachedCore>),
    /// Within [`SwitchedCore::take`] only.
    Moving,
}

/// One core's handle on a disk that can have a cache. See the module.
pub(super) struct SwitchedCore {
    path: Path,
    switch: Arc<Switch>,
    /// The stage that `path` is of.
    generation: u64,
    confirmed: Arc<AtomicU64>,
    /// The request that this core was told of.
    told: u64,
    /// Commands are held until none is in flight.
    is_holding: bool,
    held: VecDeque<(Token, Call)>,
    /// Of commands that end while they are taken from `held`.
    ready: VecDeque<Done>,
    core: usize,
    pool: Pool,
    depth: u32,
    /// A write of several blocks is not told to be one step, because a cache may come: see
    /// [`CachedDisk`](super::CachedDisk).
    has_single_blocks: bool,
}

impl SwitchedCore {
    pub(super) fn new(
        inner: Box<dyn Disk>,
        switch: &Arc<Switch>,
        context: &CoreContext,
        has_single_blocks: bool,
    ) -> SwitchedCore {
        let mut now = switch.lock();
        let generation = switch.generation.load(Ordering::Acquire);
        let confirmed = Arc::new(AtomicU64::new(generation));
        now.cores.push(Arc::clone(&confirmed));
        let (stage, told) = (now.stage.clone(), now.request);
        drop(now);
        let mut handle = SwitchedCore {
            path: Path::Plain(inner),
            switch: Arc::clone(switch),
            generation,
            confirmed,
            told,
            is_holding: false,
            held: VecDeque::new(),
            ready: VecDeque::new(),
            core: context.core,
            pool: context.pool.clone(),
            depth: context.depth,
            has_single_blocks,
        };
        handle.take(&stage);
        handle
    }

    fn disk(&mut self) -> &mut dyn Disk {
        match &mut self.path {
            Path::Plain(disk) => &mut **disk,
            Path::Announcing(core) | Path::Cached(core) => &mut **core,
            Path::Moving => unreachable!("a path is moved in one call"),
        }
    }

    fn as_disk(&self) -> &dyn Disk {
        match &self.path {
            Path::Plain(disk) => &**disk,
            Path::Announcing(core) | Path::Cached(core) => &**core,
            Path::Moving => unreachable!("a path is moved in one call"),
        }
    }

    /// Take the path of a stage. Nothing is in flight, or the stage is Cached and that before was Announcing
    /// the same.
    fn take(&mut self, stage: &Stage) {
        let path = std::mem::replace(&mut self.path, Path::Moving);
        let context = CoreContext { core: self.core, pool: self.pool.clone(), depth: self.depth };
        let inner = |path| match path {
            Path::Plain(inner) => inner,
            Path::Announcing(core) | Path::Cached(core) => core.into_inner(),
            Path::Moving => unreachable!("a path is moved in one call"),
        };
        self.path = match (stage, path) {
            (Stage::Plain, path) => Path::Plain(inner(path)),
            (Stage::Announcing(_), Path::Cached(core) | Path::Announcing(core)) => Path::Announcing(core),
            (Stage::Cached(_), Path::Announcing(core)) => Path::Cached(core),
            (Stage::Announcing(shared), path) => {
                Path::Announcing(Box::new(CachedCore::new(inner(path), Arc::clone(shared), &context)))
            }
            (Stage::Cached(shared), path) => {
                Path::Cached(Box::new(CachedCore::new(inner(path), Arc::clone(shared), &context)))
            }
        };
    }

    /// Do what is this core's part of a change. True while it is not done.
    #[cold]
    fn step(&mut self) -> bool {
        let switch = Arc::clone(&self.switch);
        let mut now = switch.lock();
        if self.told != now.request {
            return true; // it will be, soon
        }
        switch.advance(&mut now);
        let generation = switch.generation.load(Ordering::Acquire);
        if self.generation != generation {
            let needs_rest = !matches!((&now.stage, &self.path), (Stage::Cached(_), Path::Announcing(_)));
            if needs_rest && self.as_disk().in_flight() > 0 {
                self.is_holding = true;
                // No page is found any more, and writes are announced still.
                self.path = match std::mem::replace(&mut self.path, Path::Moving) {
                    Path::Cached(core) | Path::Announcing(core) => Path::Announcing(core),
                    path @ (Path::Plain(_) | Path::Moving) => path,
                };
                return true;
            }
            let stage = now.stage.clone();
            self.take(&stage);
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
        while let Some((token, call)) = self.held.pop_front() {
            if let Some(done) = call.submit(self.disk(), token) {
                self.ready.push_back(done);
            }
        }
    }

    #[inline]
    fn give(&mut self, token: Token, call: Call) -> Option<Done> {
        if self.is_holding {
            self.held.push_back((token, call));
            return None;
        }
        call.submit(self.disk(), token)
    }
}

impl Disk for SwitchedCore {
    #[inline]
    fn geometry(&self) -> Geometry {
        let mut geometry = match &self.path {
            Path::Plain(disk) => disk.geometry(),
            Path::Announcing(core) | Path::Cached(core) => core.geometry(),
            Path::Moving => unreachable!("a path is moved in one call"),
        };
        if self.has_single_blocks {
            geometry.atomic_blocks = 1;
        }
        geometry
    }

    fn inner(&self) -> Option<&dyn Disk> {
        Some(self.as_disk())
    }

    #[inline]
    fn prepare(&mut self, request: &IoRequest, next: Option<u64>) -> Prepared {
        match &mut self.path {
            Path::Cached(core) => core.prepare(request, next),
            Path::Plain(disk) if !self.is_holding => disk.prepare(request, next),
            Path::Announcing(core) if request.op != Op::Read => core.prepare(request, next),
            Path::Plain(_) | Path::Announcing(_) | Path::Moving => Prepared::Pool,
        }
    }

    fn submit(&mut self, token: Token, request: &IoRequest, buf: Option<Buf>) -> Option<Done> {
        if self.is_holding {
            return self.give(token, Call::Op(*request, buf));
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
        self.give(token, Call::CompareAndWrite { range, expected, data })
    }

    fn abilities(&self) -> Abilities {
        Abilities { reads_in_place: false, ..self.as_disk().abilities() }
    }

    fn copy(&mut self, token: Token, from: BlockRange, to: u64, fua: bool) -> Option<Done> {
        self.give(token, Call::Copy { from, to, fua })
    }

    fn poll(&mut self, now: Nanos, done: &mut Vec<Done>) -> bool {
        let mut is_busy = !self.ready.is_empty();
        Done::give(&mut self.ready, done);
        is_busy |= self.disk().poll(now, done);
        if self.is_holding || self.generation != self.switch.generation.load(Ordering::Acquire) {
            is_busy |= self.step();
        }
        is_busy
    }

    fn reconfigure(&mut self) {
        self.told = self.switch.lock().request;
        self.step();
        let disk = self.disk();
        disk.reconfigure();
    }

    fn cancel_owner(&mut self, owner: Owner) -> usize {
        let count = self.disk().cancel_owner(owner);
        for _ in 0..self.held.len() {
            match self.held.pop_front() {
                Some((token, call)) if token.owner() == owner => {
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
