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
            shift: block_shift(inner.geometry().block_bytes),
            inner,
            writes: Writes {
                cluster: Arc::clone(&self.cluster),
                commands: Commands::with_capacity(depth),
                lists: Vec::with_capacity(depth),
                now: Nanos::ZERO,
            },
            waiting: VecDeque::with_capacity(depth),
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

enum Entry {
    /// At the inner disk, and no write.
    Passed(Token),
    /// A write that waits for members.
    Waiting { token: Token, range: BlockRange, call: Call, write: ClusterWrite, since: Nanos },
    /// A write at the inner disk.
    Written(Token, BlockRange, ClusterWrite),
}

/// The commands in flight of a core.
struct Writes {
    cluster: Arc<Cluster>,
    commands: Commands<Entry>,
    /// Emptied lists of former writes.
    lists: Vec<Vec<Told>>,
    now: Nanos,
}

impl Writes {
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
        for slot in self.commands.numbers() {
            match self.commands.remove(slot) {
                Some(Entry::Waiting { write, .. } | Entry::Written(_, _, write)) => self.end(write),
                Some(Entry::Passed(_)) | None => {}
            }
        }
    }
}

struct ClusterChannel {
    /// Declared first, so dropped first: see [`Writes::drop`].
    inner: Box<dyn DiskChannel>,
    writes: Writes,
    shift: u32,
    /// Indices of the writes that wait for members, in order of submission.
    waiting: VecDeque<u32>,
    /// One of them does not wait for members only, or this core is not woken when a member has answered.
    must_step: bool,
    core: usize,
    ready: VecDeque<Done>,
}

impl ClusterChannel {
    fn pages(&self, range: BlockRange) -> std::ops::Range<u64> {
        let offset = range.offset(self.shift);
        offset / FRAME..(offset + range.bytes(self.shift)).div_ceil(FRAME)
    }

    fn pass(&mut self, token: Token, call: Call) -> Option<Done> {
        let slot = self.writes.commands.insert(Entry::Passed(token));
        self.call(token, slot, call)
    }

    fn write(&mut self, token: Token, range: BlockRange, sender: Option<u8>, call: Call) -> Option<Done> {
        let pages = self.pages(range);
        let list = self.writes.lists.pop().unwrap_or_default();
        let mut write = self.writes.cluster.begin_write(pages, sender, list);
        let now = self.writes.now;
        if self.writes.cluster.step_write(&mut write, now) {
            let slot = self.writes.commands.insert(Entry::Written(token, range, write));
            return self.call(token, slot, call);
        }
        let slot = self.writes.commands.insert(Entry::Waiting { token, range, call, write, since: now });
        self.waiting.push_back(slot);
        self.must_step = true;
        None
    }

    /// Submits the command at `slot` to the inner disk.
    fn call(&mut self, token: Token, slot: u32, call: Call) -> Option<Done> {
        let done = call.submit(&mut *self.inner, inner_token(token.owner(), slot))?;
        Some(self.on_inner_done(done))
    }

    fn on_inner_done(&mut self, done: Done) -> Done {
        let token = match self.writes.commands.remove(number_of(done.token)) {
            Some(Entry::Passed(token)) => token,
            Some(Entry::Written(token, range, write)) => {
                if done.result.is_err() && self.inner.may_still_write(range) {
                    // It is in flight for ever: no member but its sender keeps these pages.
                    std::mem::forget(write);
                } else {
                    self.writes.end(write);
                }
                token
            }
            Some(Entry::Waiting { .. }) | None => {
                panic!("the inner disk ended {:?}, which it does not have", done.token)
            }
        };
        Done { token, ..done }
    }

    /// Submits the writes whose members have all answered. Returns true if there was one.
    fn step_waiting(&mut self) -> bool {
        if self.waiting.is_empty() {
            return false;
        }
        let (mut has_worked, now) = (false, self.writes.now);
        self.must_step = !self.writes.cluster.wake_when_answered(self.core);
        for _ in 0..self.waiting.len() {
            let Some(slot) = self.waiting.pop_front() else { break };
            let Writes { cluster, commands, .. } = &mut self.writes;
            let Some(Entry::Waiting { write, .. }) = commands.get_mut(slot) else { continue };
            if !cluster.step_write(write, now) {
                self.must_step |= !write.knows_members();
                self.waiting.push_back(slot);
                continue;
            }
            has_worked = true;
            let Some(Entry::Waiting { token, range, mut call, write, since }) = commands.remove(slot) else {
                continue;
            };
            call.add_wait(since, now);
            let slot = commands.insert(Entry::Written(token, range, write));
            let ended = self.call(token, slot, call);
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
        let call = Call::Op(*request, buf);
        match request.op {
            Op::Write { .. } | Op::WriteZeroes { .. } | Op::Deallocate => {
                self.write(token, request.range, request.sender.member(), call)
            }
            Op::Read | Op::Flush | Op::Compare | Op::Verify => self.pass(token, call),
        }
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
        let is_registered = cluster.register(&self.pages(range), member, *now);
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
        for _ in 0..self.waiting.len() {
            let Some(slot) = self.waiting.pop_front() else { break };
            let is_own =
                |entry: &mut Entry| matches!(entry, Entry::Waiting { token, .. } if token.owner() == owner);
            match self.writes.commands.remove_if(slot, is_own) {
                Some(Entry::Waiting { token, call, write, .. }) => {
                    self.writes.end(write);
                    self.ready.push_back(Done::cancelled(token, call.into_buf()));
                }
                Some(Entry::Passed(_) | Entry::Written(..)) | None => self.waiting.push_back(slot),
            }
        }
        count += Done::count_of(owner, &self.ready);
        count
    }

    fn in_flight(&self) -> usize {
        self.writes.commands.len() + self.ready.len()
    }

    fn may_sleep(&self) -> bool {
        let is_watched = self.waiting.is_empty() || !self.must_step;
        is_watched && self.ready.is_empty() && self.inner.may_sleep()
    }
}
