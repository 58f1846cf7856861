//! [`SimNamespace`]: a namespace of the simulator: its disk, and what the judge knows of it.

use std::sync::Arc;

use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Pages, Pool};
use spindle_target_disk::fault::{Fault, FaultControl, FaultDisk};
use spindle_target_disk::ram::{RamDisk, RamSpec};
use spindle_target_disk::{
    Abilities, BlockRange, CacheSpec, CachedDisk, ChannelContext, Disk, IoRequest, Op, PolicyKind, Token,
};

use super::history::{History, Left, NEVER, Time, What};
use super::medium::{Plant, SimDisk, Spec};
use super::model::tag_of;
use super::rng::Rng;
use super::swarm::Swarm;

/// A namespace.
pub struct SimNamespace {
    /// Its number.
    pub nsid: u32,
    /// As the target sees it.
    pub source: Arc<dyn Disk>,
    /// Faults of its disk.
    pub control: Arc<FaultControl>,
    /// The cache of its disk, where it has one.
    pub cache: Option<Arc<CachedDisk>>,
    /// Its disk, without the faults.
    inner: Arc<dyn Disk>,
    /// When it is such a one.
    pub medium: Option<Arc<SimDisk>>,
    /// The configuration has it.
    pub is_there: bool,
    /// Index of its disk in the configuration.
    pub disk: usize,
    /// What was done to it.
    pub history: History,
    /// What each block held when it was last looked at: a guess.
    pub guess: Vec<u64>,
    /// Until when it was last away, or smaller: what was sent before may be refused.
    pub changed_until: Time,
    index: usize,
    sequence: u64,
    swarm: Swarm,
}

/// The disk of namespace `index` as drawn.
fn inner_disk(swarm: &Swarm, index: usize) -> (Arc<dyn Disk>, Option<Arc<SimDisk>>) {
    // One of each kind, where there are several.
    let slack = if index % 2 == 1 && swarm.slack_bytes.is_some() { None } else { swarm.slack_bytes };
    if let Some(slack) = slack {
        let bytes = swarm.blocks as u64 * u64::from(swarm.block_bytes);
        // Not drawn, so that what follows stays what it was.
        let has_seals = swarm.seed & 32 == 0;
        let spec = RamSpec { bytes, block_bytes: swarm.block_bytes, pages: Pages::Base, has_seals };
        return (Arc::new(RamDisk::with_slack("ram", spec, slack).expect("a RAM disk")), None);
    }
    let has = |bit: u64| swarm.seed >> bit & 1 == 1;
    let medium = Arc::new(SimDisk::new(Spec {
        block_bytes: swarm.block_bytes,
        blocks: swarm.blocks,
        abilities: Abilities { compare: has(0), verify: has(1), copy: has(2), reads_in_place: false },
        is_volatile: swarm.is_volatile,
        slow_permille: swarm.slow_permille,
        stuck_permille: swarm.stuck_permille,
        torn_permille: if swarm.faults[0] > 0 { 20 } else { 0 },
        plant: swarm.plant,
        seed: swarm.seed.wrapping_add(index as u64),
    }));
    (Arc::clone(&medium) as Arc<dyn Disk>, Some(medium))
}

/// The disk as the target sees it: with faults, and a cache in front where one was drawn or comes later.
struct Dressed {
    source: Arc<dyn Disk>,
    control: Arc<FaultControl>,
    cache: Option<Arc<CachedDisk>>,
}

fn dressed(swarm: &Swarm, inner: &Arc<dyn Disk>, has_own_memory: bool) -> Dressed {
    let (source, control) = with_faults(swarm, inner);
    let policy = if swarm.seed & 16 == 0 { PolicyKind::S3Fifo } else { PolicyKind::Lru };
    let spec = |bytes| CacheSpec {
        read_ahead: 64 << 10,
        has_seals: true,
        is_paced: swarm.seed & 96 == 0,
        ..CacheSpec::new(bytes, policy, Pages::Base)
    };
    if has_own_memory {
        return Dressed { source, control, cache: None };
    }
    let cache = CachedDisk::new(source, swarm.cache_bytes.map(spec).as_ref()).expect("a cache");
    Dressed { source: Arc::clone(&cache) as Arc<dyn Disk>, control, cache: Some(cache) }
}

fn with_faults(swarm: &Swarm, inner: &Arc<dyn Disk>) -> (Arc<dyn Disk>, Arc<FaultControl>) {
    let (source, control) = FaultDisk::new(Arc::clone(inner), swarm.seed);
    for (fault, rate) in
        [Fault::Error, Fault::Delay, Fault::Drop, Fault::Reorder].into_iter().zip(swarm.faults)
    {
        control.set_all(fault, rate);
    }
    // Some of what fails has its effect all the same.
    control.set_error_effect(300_000);
    // The layer would notice, or hide, these.
    let is_bare = matches!(swarm.plant, Some(Plant::Doubled | Plant::Uncounted | Plant::Unforgotten));
    (if is_bare { Arc::clone(inner) } else { source }, control)
}

impl SimNamespace {
    /// As drawn, all zeroes.
    #[must_use]
    pub fn new(swarm: &Swarm, index: usize) -> SimNamespace {
        let (inner, medium) = inner_disk(swarm, index);
        let Dressed { source, control, cache } = dressed(swarm, &inner, medium.is_none());
        // Copy copies from one part of the disk to the other.
        let middle = swarm.blocks / 2;
        let sources = if swarm.seed >> 3 & 1 == 1 { 0..middle } else { middle..swarm.blocks };
        SimNamespace {
            nsid: u32::try_from(index + 1).expect("few"),
            source,
            control,
            cache,
            inner,
            medium,
            is_there: true,
            disk: index,
            history: History::new(index, swarm.blocks, sources),
            guess: vec![0; swarm.blocks],
            changed_until: 0,
            index,
            sequence: 0,
            swarm: swarm.clone(),
        }
    }

    /// Bytes of a block.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        self.swarm.block_bytes as usize
    }

    /// A value for this block that no other write has.
    pub fn fresh_tag(&mut self, block: usize) -> u64 {
        self.sequence += 1;
        super::model::stamp(self.sequence, self.index, block)
    }

    /// From now on commands may find it changed.
    pub fn begin_change(&mut self) {
        self.changed_until = NEVER;
    }

    /// From now on they may not.
    pub fn end_change(&mut self, now: Time) {
        self.changed_until = now;
    }

    /// It is as it was made, and no core changes to another configuration.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.changed_until != NEVER
    }

    /// Note what a block was seen to hold.
    ///
    /// # Panics
    /// When that is no whole block of any write.
    pub fn saw(&mut self, block: usize, bytes: &[u8], begin: Time, end: Time) {
        let Some(tag) = tag_of(bytes) else {
            panic!("namespace {} block {block}: a torn block was read at {begin} .. {end}", self.nsid)
        };
        self.guess[block] = tag;
        self.history.note(block, What::Saw(tag), begin, end, super::history::Fate::Done);
    }

    /// What is on the disk now: asked without faults, of a disk at rest.
    ///
    /// # Panics
    /// When it does not answer.
    #[must_use]
    pub fn left(&self) -> Left {
        let bytes = self.swarm.block_bytes;
        let zone = spindle_reactor::mem::ZoneSpec { buffer_bytes: 4096, count: 2 };
        let pool = Pool::new(&[zone], Pages::Base).expect("a pool");
        let context = ChannelContext { core: 0, pool: pool.clone(), depth: 1 };
        let mut disk = self.inner.open(&context).expect("it is open elsewhere");
        (0..self.history.len())
            .map(|block| {
                let is_in_place = disk.abilities().reads_in_place;
                let buf = (!is_in_place).then(|| pool.take(bytes).expect("a buffer"));
                let range = BlockRange { lba: block as u64, blocks: 1 };
                let mut done = Vec::with_capacity(1);
                done.extend(disk.submit(Token(0), &IoRequest::new(Op::Read, range), buf));
                for _ in 0..5000 {
                    if !done.is_empty() {
                        break;
                    }
                    disk.poll(Nanos::ZERO, &mut done);
                }
                let done = done.pop().expect("an answer");
                let buf = done.buf.filter(|_| done.result.is_ok()).expect("the content");
                let content: Vec<u8> = buf.segments().flatten().copied().collect();
                tag_of(&content)
            })
            .collect()
    }

    fn dress(&mut self) {
        let dressed = dressed(&self.swarm, &self.inner, self.medium.is_none());
        (self.source, self.control, self.cache) = (dressed.source, dressed.control, dressed.cache);
    }

    /// The power is cut: what is left is judged, and what comes begins with it.
    ///
    /// # Errors
    /// What cannot be.
    pub fn power_cut(&mut self, now: Time, closed: &[Time]) -> Result<super::history::Overlaps, String> {
        if let Some(medium) = &self.medium {
            let left = medium.power_cut();
            let overlaps = self.history.power_cut(now, &left, closed)?;
            self.guess = left.into_iter().map(|tag| tag.unwrap_or(0)).collect();
            self.dress();
            return Ok(overlaps);
        }
        // Memory comes back empty.
        let overlaps = self.history.lose_all(now, closed)?;
        (self.inner, self.medium) = inner_disk(&self.swarm, self.index);
        self.dress();
        self.guess.fill(0);
        Ok(overlaps)
    }

    /// Where a command goes, and over how many blocks.
    pub fn pick(&self, rng: &mut Rng, blocks_max: usize) -> (usize, usize) {
        // Few large ones among many small ones.
        let is_small = blocks_max > 12 && rng.permille(950);
        let count = rng.size(1, if is_small { 12 } else { blocks_max });
        let last = self.history.len() - count;
        let first = if rng.permille(self.swarm.hot_permille) {
            // On both sides of the middle, so that copies are among them.
            let middle = self.history.len() / 2;
            rng.size(middle.saturating_sub(4), (middle + 4).min(last)).min(last)
        } else {
            rng.size(0, last)
        };
        (first, count)
    }
}
