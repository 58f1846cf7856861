//! [`SimDisk`]: a drive in small: its commands take several polls and touch one block after the other in any
//! order, so that commands tear each other and power cuts tear them; what is not flushed may be lost. A
//! [`Plant`] makes it wrong in one way, to show that the judge sees it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Buf;
use spindle_target_disk::{
    Abilities, BlockRange, ChannelContext, Disk, DiskChannel, DiskError, Done, Geometry, IoRequest, Op,
    OpenError, Owner, ResizeError, Token, Usage,
};

use super::history::Left;
use super::model::tag_of;
use super::rng::Rng;

/// A fault that is planted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plant {
    /// A Flush does nothing.
    LostFlush,
    /// FUA is not looked at.
    LostFua,
    /// A write that is acknowledged is not done.
    LostWrite,
    /// A write that was answered with an error is done long afterwards.
    LateWrite,
    /// A read brings what the block held before.
    StaleRead,
    /// A read brings another block.
    WrongBlock,
    /// Half of a block is written.
    TornBlock,
    /// Compare-and-write compares now and writes later.
    SplitSwap,
    /// A command's end is told twice.
    Doubled,
    /// What is in flight is not counted.
    Uncounted,
    /// Commands whose submitter is gone go on, and are not counted among those that are still to come back.
    Unforgotten,
}

/// What a medium is to be.
#[derive(Debug, Clone, Copy)]
pub struct Spec {
    /// Bytes of a block.
    pub block_bytes: u32,
    /// Number of blocks.
    pub blocks: usize,
    /// What it does itself.
    pub abilities: Abilities,
    /// What was not flushed may be lost with the power.
    pub is_volatile: bool,
    /// Commands that take their time, in a thousand.
    pub slow_permille: u64,
    /// Those of them that wait for hundreds of polls first, in a thousand.
    pub stuck_permille: u64,
    /// Writes that end in the middle with an error, in a thousand.
    pub torn_permille: u64,
    /// What is wrong with it.
    pub plant: Option<Plant>,
    /// Chance.
    pub seed: u64,
}

/// The drive, shared by all cores.
pub struct SimDisk {
    spec: Spec,
    state: Arc<Mutex<MediumState>>,
}

struct MediumState {
    blocks: usize,
    now: Vec<u8>,
    /// What survives a power cut.
    durable: Vec<u8>,
    /// What the last write of each block replaced.
    before: Vec<u8>,
    is_dirty: Vec<bool>,
    /// Writes that were answered and are still to come: in how many polls.
    late: Vec<(u32, usize, Vec<u8>)>,
    rng: Rng,
    /// How often the planted fault has happened.
    planted: u64,
    /// Writes that ended in their middle.
    torn: u64,
    /// Blocks that lost something with the power.
    lost: u64,
}

impl MediumState {
    fn range(&self, spec: &Spec, block: usize) -> std::ops::Range<usize> {
        let bytes = spec.block_bytes as usize;
        block * bytes..(block + 1) * bytes
    }

    /// The planted fault happens now.
    fn hits(&mut self, spec: &Spec, plant: Plant, permille: u64) -> bool {
        let hits = spec.plant == Some(plant) && self.rng.permille(permille);
        self.planted += u64::from(hits);
        hits
    }

    fn put(&mut self, spec: &Spec, block: usize, bytes: &[u8], is_durable: bool) {
        let range = self.range(spec, block);
        if self.hits(spec, Plant::LostWrite, 20) {
            return;
        }
        self.before[range.clone()].copy_from_slice(&self.now[range.clone()]);
        let half = if self.hits(spec, Plant::TornBlock, 20) { bytes.len() / 2 } else { bytes.len() };
        self.now[range.start..range.start + half].copy_from_slice(&bytes[..half]);
        self.is_dirty[block] = true;
        if (is_durable && !self.hits(spec, Plant::LostFua, 1000)) || !spec.is_volatile {
            self.destage(spec, block);
        }
    }

    fn destage(&mut self, spec: &Spec, block: usize) {
        let range = self.range(spec, block);
        self.durable[range.clone()].copy_from_slice(&self.now[range]);
        self.is_dirty[block] = false;
    }

    fn get(&mut self, spec: &Spec, block: usize) -> Vec<u8> {
        let other = (block + 1) % self.blocks.max(1);
        let from = if self.hits(spec, Plant::WrongBlock, 20) { other } else { block };
        let range = self.range(spec, from);
        let is_stale = self.hits(spec, Plant::StaleRead, 50);
        if is_stale { self.before[range].to_vec() } else { self.now[range].to_vec() }
    }

    fn flush(&mut self, spec: &Spec) {
        if self.hits(spec, Plant::LostFlush, 1000) {
            return;
        }
        for block in 0..self.is_dirty.len() {
            if self.is_dirty[block] {
                self.destage(spec, block);
            }
        }
    }

    fn do_late(&mut self, spec: &Spec) {
        let mut index = 0;
        while let Some((polls, ..)) = self.late.get_mut(index) {
            *polls -= 1;
            if *polls > 0 {
                index += 1;
                continue;
            }
            let (_, block, bytes) = self.late.swap_remove(index);
            self.put(spec, block, &bytes, false);
        }
    }
}

impl SimDisk {
    /// All zeroes.
    #[must_use]
    pub fn new(spec: Spec) -> SimDisk {
        let bytes = spec.blocks * spec.block_bytes as usize;
        let state = MediumState {
            blocks: spec.blocks,
            now: vec![0; bytes],
            durable: vec![0; bytes],
            before: vec![0; bytes],
            is_dirty: vec![false; spec.blocks],
            late: Vec::new(),
            rng: Rng::new(spec.seed ^ 0x0d15_c000),
            planted: 0,
            torn: 0,
            lost: 0,
        };
        SimDisk { spec, state: Arc::new(Mutex::new(state)) }
    }

    /// The power is gone, and with it some of what was not flushed. What is left.
    pub fn power_cut(&self) -> Left {
        let (mut state, spec) = (lock(&self.state), &self.spec);
        let lost_permille = state.rng.pick(&[0, 500, 1000]);
        for block in 0..state.is_dirty.len() {
            if !state.is_dirty[block] {
                continue;
            }
            if state.rng.permille(lost_permille) {
                let range = state.range(spec, block);
                let MediumState { now, durable, .. } = &mut *state;
                now[range.clone()].copy_from_slice(&durable[range]);
                state.is_dirty[block] = false;
                state.lost += 1;
            } else {
                state.destage(spec, block);
            }
        }
        state.late.clear();
        let MediumState { now, before, .. } = &mut *state;
        before.copy_from_slice(now);
        state.now.chunks_exact(spec.block_bytes as usize).map(tag_of).collect()
    }

    /// How often the planted fault has happened.
    #[must_use]
    pub fn planted(&self) -> u64 {
        lock(&self.state).planted
    }

    /// Writes that ended in their middle, and blocks that lost something with the power.
    #[must_use]
    pub fn torn_and_lost(&self) -> (u64, u64) {
        let state = lock(&self.state);
        (state.torn, state.lost)
    }
}

fn lock(state: &Mutex<MediumState>) -> MutexGuard<'_, MediumState> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

fn geometry(spec: &Spec, blocks: usize) -> Geometry {
    Geometry {
        block_bytes: spec.block_bytes,
        block_count: blocks as u64,
        is_read_only: false,
        has_volatile_cache: spec.is_volatile,
        can_deallocate: true,
        atomic_blocks: 1,
        can_compare_and_write: true,
    }
}

impl Disk for SimDisk {
    fn name(&self) -> &'static str {
        "medium"
    }

    fn kind(&self) -> &'static str {
        "sim"
    }

    fn geometry(&self) -> Geometry {
        geometry(&self.spec, lock(&self.state).blocks)
    }

    fn open(&self, _context: &ChannelContext) -> Result<Box<dyn DiskChannel>, OpenError> {
        Ok(Box::new(SimDiskChannel {
            spec: self.spec,
            state: Arc::clone(&self.state),
            running: Vec::new(),
            ready: VecDeque::new(),
            polls: 0,
        }))
    }

    /// What a shrink takes away reads as zeroes when it comes back.
    fn resize(&self, bytes: u64) -> Result<(), ResizeError> {
        let blocks = usize::try_from(bytes / u64::from(self.spec.block_bytes)).unwrap_or(usize::MAX);
        if blocks > self.spec.blocks {
            let allowed = format!("up to {} blocks", self.spec.blocks);
            return Err(ResizeError { disk: self.name().to_owned(), bytes, allowed });
        }
        let mut state = lock(&self.state);
        let zeroes = vec![0; self.spec.block_bytes as usize];
        for block in blocks.min(state.blocks)..blocks.max(state.blocks) {
            let range = state.range(&self.spec, block);
            state.now[range.clone()].copy_from_slice(&zeroes);
            state.before[range.clone()].copy_from_slice(&zeroes);
            state.durable[range].copy_from_slice(&zeroes);
            state.is_dirty[block] = false;
        }
        state.blocks = blocks;
        Ok(())
    }

    fn usage(&self) -> Usage {
        Usage::default()
    }
}

#[derive(Debug, Clone, Copy)]
enum Call {
    Op(Op),
    Copy { to: usize, fua: bool },
}

/// A command that takes its time.
struct Running {
    token: Token,
    call: Call,
    first: usize,
    /// Blocks of the range that are still to be done.
    left: Vec<usize>,
    /// After so many more of them it fails.
    fails_after: Option<usize>,
    buf: Option<Buf>,
    /// Of a compare-and-write.
    expected: Option<Buf>,
    /// Not before this poll.
    not_before: u64,
}

struct SimDiskChannel {
    spec: Spec,
    state: Arc<Mutex<MediumState>>,
    running: Vec<Running>,
    ready: VecDeque<Done>,
    polls: u64,
}

impl SimDiskChannel {
    fn begin(&mut self, mut running: Running) -> Option<Done> {
        let is_slow = lock(&self.state).rng.permille(self.spec.slow_permille);
        if is_slow {
            let rng = &mut lock(&self.state).rng;
            if rng.permille(self.spec.stuck_permille) {
                running.not_before = self.polls + rng.between(100, 2000);
            }
            self.running.push(running);
            return None;
        }
        let result = loop {
            if let Some(result) = self.step(&mut running) {
                break result;
            }
        };
        let mut done = self.end(running, result);
        let first = done.pop_front();
        self.ready.append(&mut done);
        first
    }

    /// Do one block, or all of what is done at once. `Some` when that was the last.
    fn step(&self, running: &mut Running) -> Option<Result<(), DiskError>> {
        let spec = &self.spec;
        let mut state = lock(&self.state);
        if let Call::Op(Op::Flush) = running.call {
            state.flush(spec);
            return Some(Ok(()));
        }
        if let Some(expected) = &running.expected {
            let range = state.range(spec, running.first);
            if !expected.equals_at(0, &state.now[range]) {
                return Some(Err(DiskError::CompareDiffers));
            }
            let Some(data) = running.buf.as_ref().map(|buf| bytes_of(spec, buf, 0)) else {
                return Some(Err(DiskError::Internal));
            };
            if state.hits(spec, Plant::SplitSwap, 1000) {
                running.expected = None;
                return None;
            }
            state.put(spec, running.first, &data, true);
            return Some(Ok(()));
        }
        if running.fails_after == Some(0) {
            state.torn += 1;
            return Some(Err(DiskError::MediaWrite));
        }
        let Some(at) = running.left.pop() else { return Some(Ok(())) };
        running.fails_after = running.fails_after.map(|left| left - 1);
        let block = running.first + at;
        let zeroes = || vec![0; spec.block_bytes as usize];
        match (running.call, &mut running.buf) {
            (Call::Op(Op::Read), Some(buf)) => {
                buf.copy_in(at * spec.block_bytes as usize, &state.get(spec, block));
            }
            (Call::Op(Op::Write { fua }), Some(buf)) => {
                let data = bytes_of(spec, buf, at);
                if state.hits(spec, Plant::LateWrite, 20) {
                    let polls = u32::try_from(state.rng.between(20, 800)).unwrap_or(20);
                    state.late.push((polls, block, data));
                    return Some(Err(DiskError::MediaWrite));
                }
                state.put(spec, block, &data, fua);
            }
            (Call::Op(Op::WriteZeroes { fua, .. }), _) => state.put(spec, block, &zeroes(), fua),
            (Call::Op(Op::Deallocate), _) => state.put(spec, block, &zeroes(), false),
            (Call::Op(Op::Compare), Some(buf)) => {
                let range = state.range(spec, block);
                if bytes_of(spec, buf, at) != state.now[range] {
                    return Some(Err(DiskError::CompareDiffers));
                }
            }
            (Call::Copy { to, fua }, _) => {
                let data = state.get(spec, block);
                state.put(spec, to + at, &data, fua);
            }
            (Call::Op(Op::Verify), _) => {}
            (Call::Op(_), None) => panic!("a command came without its buffer"),
            (Call::Op(Op::Flush), Some(_)) => panic!("a Flush came with a buffer"),
        }
        running.left.is_empty().then_some(Ok(()))
    }

    fn end(&self, running: Running, result: Result<(), DiskError>) -> VecDeque<Done> {
        let token = running.token;
        let mut done = VecDeque::from([Done { token, result, buf: running.buf }]);
        if lock(&self.state).hits(&self.spec, Plant::Doubled, 20) {
            done.push_back(Done { token, result, buf: None });
        }
        done
    }

    fn blocks_of(&self, blocks: u32) -> Vec<usize> {
        let mut order: Vec<usize> = (0..blocks as usize).collect();
        let mut state = lock(&self.state);
        for at in 1..order.len() {
            let other = state.rng.size(0, at);
            order.swap(at, other);
        }
        order
    }

    fn fails_after(&self, call: Call, blocks: u32) -> Option<usize> {
        let is_write = matches!(
            call,
            Call::Op(Op::Write { .. } | Op::WriteZeroes { .. } | Op::Deallocate) | Call::Copy { .. }
        );
        let mut state = lock(&self.state);
        let fails = is_write && state.rng.permille(self.spec.torn_permille);
        fails.then(|| state.rng.size(0, blocks as usize))
    }

    fn run(&mut self, token: Token, call: Call, range: BlockRange, buf: Option<Buf>) -> Option<Done> {
        let first = usize::try_from(range.lba).expect("checked by the target");
        let left = self.blocks_of(range.blocks);
        let fails_after = self.fails_after(call, range.blocks);
        self.begin(Running { token, call, first, left, fails_after, buf, expected: None, not_before: 0 })
    }
}

fn bytes_of(spec: &Spec, buf: &Buf, at: usize) -> Vec<u8> {
    let mut bytes = vec![0; spec.block_bytes as usize];
    buf.copy_out(at * spec.block_bytes as usize, &mut bytes);
    bytes
}

impl DiskChannel for SimDiskChannel {
    fn geometry(&self) -> Geometry {
        geometry(&self.spec, lock(&self.state).blocks)
    }

    fn submit(&mut self, token: Token, request: &IoRequest, buf: Option<Buf>) -> Option<Done> {
        let IoRequest { op, range, .. } = *request;
        let abilities = self.spec.abilities;
        let is_able = match op {
            Op::Compare => abilities.compare,
            Op::Verify => abilities.verify,
            Op::Read | Op::Write { .. } | Op::Flush | Op::WriteZeroes { .. } | Op::Deallocate => true,
        };
        if !is_able {
            return Some(Done { token, result: Err(DiskError::NotSupported), buf });
        }
        self.run(token, Call::Op(op), range, buf)
    }

    fn abilities(&self) -> Abilities {
        self.spec.abilities
    }

    fn copy(&mut self, token: Token, from: BlockRange, to: u64, fua: bool) -> Option<Done> {
        if !self.spec.abilities.copy {
            return Some(Done { token, result: Err(DiskError::NotSupported), buf: None });
        }
        let to = usize::try_from(to).expect("checked by the target");
        self.run(token, Call::Copy { to, fua }, from, None)
    }

    fn compare_and_write(
        &mut self,
        token: Token,
        range: BlockRange,
        expected: Buf,
        data: Buf,
    ) -> Option<Done> {
        let call = Call::Op(Op::Write { fua: true });
        let first = usize::try_from(range.lba).expect("checked by the target");
        let (left, buf, expected) = (vec![0], Some(data), Some(expected));
        self.begin(Running { token, call, first, left, fails_after: None, buf, expected, not_before: 0 })
    }

    fn poll(&mut self, _now: Nanos, done: &mut Vec<Done>) -> bool {
        self.polls += 1;
        lock(&self.state).do_late(&self.spec);
        let count = self.running.len();
        let steps = if count > 0 { lock(&self.state).rng.size(1, 2 * count) } else { 0 };
        for _ in 0..steps {
            if self.running.is_empty() {
                break;
            }
            let at = lock(&self.state).rng.size(0, self.running.len() - 1);
            if self.running[at].not_before > self.polls {
                continue;
            }
            let mut running = self.running.swap_remove(at);
            match self.step(&mut running) {
                Some(result) => {
                    let mut ended = self.end(running, result);
                    self.ready.append(&mut ended);
                }
                None => self.running.push(running),
            }
        }
        while done.len() < done.capacity() {
            let Some(ready) = self.ready.pop_front() else { break };
            done.push(ready);
        }
        count > 0 || !self.ready.is_empty()
    }

    /// Some end where they are, the others go on to their end, as a drive's do.
    fn cancel_owner(&mut self, owner: Owner) -> usize {
        if self.spec.plant == Some(Plant::Unforgotten) {
            return 0;
        }
        let mut at = 0;
        while let Some(running) = self.running.get(at) {
            if running.token.owner() != owner || lock(&self.state).rng.permille(700) {
                at += 1;
                continue;
            }
            let running = self.running.swap_remove(at);
            let mut ended = self.end(running, Err(DiskError::Cancelled));
            self.ready.append(&mut ended);
        }
        let running = self.running.iter().filter(|running| running.token.owner() == owner).count();
        running + self.ready.iter().filter(|done| done.token.owner() == owner).count()
    }

    fn in_flight(&self) -> usize {
        if self.spec.plant == Some(Plant::Uncounted) {
            return 0;
        }
        self.running.len() + self.ready.len()
    }
}
