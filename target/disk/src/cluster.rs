//! The cluster layer: caches on client hosts stay coherent with the disk (`docs/extensions.md`, "Coherent
//! caches").
//!
//! ```text
//!   write      Cluster::begin_write: which members may have pages of it?
//!                nobody   -> inner disk -> Cluster::end_write -> Done
//!                some     -> waits until each has dropped them, or is over -> inner disk -> ...
//!   register   a member may keep what it reads from now on, unless a write is in flight
//!   others     inner disk
//! ```
//! The outermost layer: what it passes on may be answered from the target's own cache.
//!
//! A waiting write can be cancelled. A write that has ended with an error although the medium may still
//! execute it ([`DiskChannel::may_still_write`]) counts as in flight for ever: no member keeps its pages,
//! but the sender those that are in an extent which it had.
//!
//! Not done here: the queues to the members, which are the target core's; resizes.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Buf, FRAME_BYTES};
use spindle_target_card::{Cluster, ClusterWrite, Told};

use crate::layer::{Call, Commands, inner_token, number_of};
use crate::shape::block_shift;
use crate::{
    BlockRange, ChannelContext, Disk, DiskChannel, Done, Geometry, IoRequest, Op, OpenError, Owner, Prepared,
    ResizeError, Token,
};

const FRAME: u64 = FRAME_BYTES as u64;

/// The cluster layer over one disk, shared by all cores. See the module.
pub struct ClusterDisk {
    inner: Arc<dyn Disk>,
    cluster: Arc<Cluster>,
}

impl ClusterDisk {
    /// Adds the layer over `inner`.
    #[must_use]
    pub fn new(inner: Arc<dyn Disk>, cluster: Arc<Cluster>) -> Arc<ClusterDisk> {
        Arc::new(ClusterDisk { inner, cluster })
    }
}

impl Disk for ClusterDisk {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn kind(&self) -> &'static str {
        self.inner.kind()
    }

    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn inner(&self) -> Option<&dyn Disk> {
        Some(&*self.inner)
    }

    fn open(&self, context: &ChannelContext) -> Result<Box<dyn DiskChannel>, OpenError> {
        let (inner, depth) = (self.inner.open(context)?, context.depth as usize);
        Ok(Box::new(ClusterChannel {
            writes: Writes {
                shift: block_shift(inner.geometry().block_bytes),
                cluster: Arc::clone(&self.cluster),
                commands: Commands::with_capacity(depth),
                waiting: VecDeque::with_capacity(depth),
                told: Commands::with_capacity(depth),
                lists: Vec::with_capacity(depth),
                now: Nanos::ZERO,
            },
            inner,
            must_step: false,
            core: context.core,
            ready: VecDeque::with_capacity(depth),
        }))
    }

    /// Refuses another size: members have pages of the present one.
    fn prepare_resize(&self, bytes: u64) -> Result<(), ResizeError> {
        ResizeError::unless_same(
            self,
            bytes,
            "the disk has [disk.cluster]; without it the size can change; it",
        )
    }

    fn resize(&self, bytes: u64) -> Result<(), ResizeError> {
        self.prepare_resize(bytes)
    }

    fn cluster(&self) -> Option<Arc<Cluster>> {
        Some(Arc::clone(&self.cluster))
    }
}

#[derive(Clone, Copy)]
enum Entry {
    /// At the inner disk, and no write.
    Passed(Token),
    /// A write at the inner disk that nobody was told of.
    Free(Token, BlockRange),
    /// A write at the inner disk that waited, and its index in [`Writes::told`].
    Told(Token, BlockRange, u32),
}

/// A write that waits for members.
struct Waiting {
    token: Token,
    range: BlockRange,
    call: Call,
    write: ClusterWrite,
    since: Nanos,
}

/// The commands in flight of a core.
struct Writes {
    shift: u32,
    cluster: Arc<Cluster>,
    /// Those at the inner disk.
    commands: Commands<Entry>,
    /// In order of submission. Not among `commands`, as `told`: every command moves an entry of those.
    waiting: VecDeque<Waiting>,
    told: Commands<ClusterWrite>,
    /// Emptied lists of former writes.
    lists: Vec<Vec<Told>>,
    now: Nanos,
}

impl Writes {
    fn pages(&self, range: BlockRange) -> Range<u64> {
        let offset = range.offset(self.shift);
        offset / FRAME..(offset + range.bytes(self.shift)).div_ceil(FRAME)
    }

    fn end_free(&self, range: BlockRange) {
        self.cluster.end_free(&self.pages(range));
    }

    fn end_told(&mut self, told: u32) {
        if let Some(write) = self.told.remove(told) {
            self.end(write);
        }
    }

    fn end(&mut self, write: ClusterWrite) {
        let list = self.cluster.end_write(write, self.now);
        if list.capacity() > 0 {
            self.lists.push(list);
        }
    }
}

impl Drop for Writes {
    /// Ends all writes. Runs after the drop of the inner disk, which waits for them.
    fn drop(&mut self) {
        while let Some(Waiting { write, .. }) = self.waiting.pop_front() {
            self.end(write);
        }
        for slot in self.commands.numbers() {
            match self.commands.remove(slot) {
                Some(Entry::Told(_, _, told)) => self.end_told(told),
                Some(Entry::Free(_, range)) => self.end_free(range),
                Some(Entry::Passed(_)) | None => {}
            }
        }
    }
}

struct ClusterChannel {
    /// Declared first, so dropped first: see [`Writes::drop`].
    inner: Box<dyn DiskChannel>,
    writes: Writes,
    /// A waiting write does not wait for members only, or this core is not woken when a member has answered.
    must_step: bool,
    core: usize,
    ready: VecDeque<Done>,
}

impl ClusterChannel {
    /// Begins a write that must wait, or of which it is not known.
    #[cold]
    fn write(&mut self, token: Token, range: BlockRange, sender: Option<u8>, call: Call) -> Option<Done> {
        let pages = self.writes.pages(range);
        let list = self.writes.lists.pop().unwrap_or_default();
        let mut write = self.writes.cluster.begin_write(pages, sender, list);
        let now = self.writes.now;
        if self.writes.cluster.step_write(&mut write, now) {
            return self.submit_told(token, range, call, write);
        }
        self.writes.waiting.push_back(Waiting { token, range, call, write, since: now });
        self.must_step = true;
        None
    }

    /// Submits a write whose members have all answered to the inner disk.
    fn submit_told(
        &mut self,
        token: Token,
        range: BlockRange,
        call: Call,
        write: ClusterWrite,
    ) -> Option<Done> {
        let told = self.writes.told.insert(write);
        let slot = self.writes.commands.insert(Entry::Told(token, range, told));
        let done = call.submit(&mut *self.inner, inner_token(token.owner(), slot))?;
        Some(self.on_inner_done(done))
    }

    fn on_inner_done(&mut self, done: Done) -> Done {
        let token = match self.writes.commands.remove(number_of(done.token)) {
            Some(Entry::Passed(token)) => token,
            // One that may still change the medium is in flight for ever: no member but its sender keeps
            // these pages.
            Some(Entry::Free(token, range)) => {
                if done.result.is_ok() || !self.inner.may_still_write(range) {
                    self.writes.end_free(range);
                }
                token
            }
            Some(Entry::Told(token, range, told)) => {
                if done.result.is_ok() || !self.inner.may_still_write(range) {
                    self.writes.end_told(told);
                } else {
                    std::mem::forget(self.writes.told.remove(told));
                }
                token
            }
            None => panic!("the inner disk ended {:?}, which it does not have", done.token),
        };
        Done { token, ..done }
    }

    /// Submits the writes whose members have all answered. Returns true if there was one.
    fn step_waiting(&mut self) -> bool {
        if self.writes.waiting.is_empty() {
            return false;
        }
        let (mut has_worked, now) = (false, self.writes.now);
        self.must_step = !self.writes.cluster.wake_when_answered(self.core);
        for _ in 0..self.writes.waiting.len() {
            let Some(mut waiting) = self.writes.waiting.pop_front() else { break };
            if !self.writes.cluster.step_write(&mut waiting.write, now) {
                self.must_step |= !waiting.write.knows_members();
                self.writes.waiting.push_back(waiting);
                continue;
            }
            has_worked = true;
            let Waiting { token, range, mut call, write, since } = waiting;
            call.add_wait(since, now);
            let ended = self.submit_told(token, range, call, write);
            self.ready.extend(ended);
        }
        has_worked
    }
}

impl DiskChannel for ClusterChannel {
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
        self.inner.prepare(request, next)
    }

    fn submit(&mut self, token: Token, request: &IoRequest, buf: Option<Buf>) -> Option<Done> {
        let (range, sender) = (request.range, request.sender.member());
        let entry = match request.op {
            Op::Read | Op::Flush | Op::Compare | Op::Verify => Entry::Passed(token),
            Op::Write { .. } | Op::WriteZeroes { .. } | Op::Deallocate => {
                let Writes { cluster, now, .. } = &self.writes;
                if !cluster.begin_free(&self.writes.pages(range), sender, *now) {
                    return self.write(token, range, sender, Call::Op(*request, buf));
                }
                Entry::Free(token, range)
            }
        };
        let slot = self.writes.commands.insert(entry);
        let done = self.inner.submit(inner_token(token.owner(), slot), request, buf)?;
        Some(self.on_inner_done(done))
    }

    fn compare_and_write(
        &mut self,
        token: Token,
        range: BlockRange,
        expected: Buf,
        data: Buf,
    ) -> Option<Done> {
        self.write(token, range, None, Call::CompareAndWrite { range, expected, data })
    }

    fn copy(&mut self, token: Token, from: BlockRange, to: u64, fua: bool) -> Option<Done> {
        self.write(token, BlockRange { lba: to, blocks: from.blocks }, None, Call::Copy { from, to, fua })
    }

    fn register(&mut self, range: BlockRange, member: u8) -> bool {
        let Writes { cluster, now, .. } = &self.writes;
        // Both are called: a refusal leaves the registration.
        let is_registered = cluster.register(&self.writes.pages(range), member, *now);
        is_registered && !self.inner.may_still_write(range)
    }

    fn poll(&mut self, now: Nanos, done: &mut Vec<Done>) -> bool {
        self.writes.now = now;
        let mut is_busy = self.writes.cluster.step(now) || !self.ready.is_empty();
        Done::give(&mut self.ready, done);
        let first = done.len();
        is_busy |= self.inner.poll(now, done);
        for own in &mut done[first..] {
            let token = own.token;
            let ended = std::mem::replace(own, Done { token, result: Ok(()), buf: None });
            *own = self.on_inner_done(ended);
        }
        is_busy |= self.step_waiting();
        Done::give(&mut self.ready, done);
        is_busy
    }

    fn cancel_owner(&mut self, owner: Owner) -> usize {
        let mut count = self.inner.cancel_owner(owner);
        for _ in 0..self.writes.waiting.len() {
            let Some(waiting) = self.writes.waiting.pop_front() else { break };
            if waiting.token.owner() != owner {
                self.writes.waiting.push_back(waiting);
                continue;
            }
            self.writes.end(waiting.write);
            self.ready.push_back(Done::cancelled(waiting.token, waiting.call.into_buf()));
        }
        count += Done::count_of(owner, &self.ready);
        count
    }

    fn in_flight(&self) -> usize {
        self.writes.commands.len() + self.writes.waiting.len() + self.ready.len()
    }

    fn may_sleep(&self) -> bool {
        let is_watched = self.writes.waiting.is_empty() || !self.must_step;
        is_watched && self.ready.is_empty() && self.inner.may_sleep()
    }
}
