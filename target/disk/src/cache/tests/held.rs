//! [`HeldDisk`]: memory that does a command when it is submitted, and says so when the test lets it.

use std::any::Any;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;

use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Area, Buf};

use crate::{
    BlockRange, ChannelContext, Disk, DiskChannel, DiskError, Done, Geometry, IoRequest, Op, OpenError,
    Owner, ResizeError, Token, Usage, Waited,
};

/// What a test sets and sees.
#[derive(Default)]
pub(crate) struct Control {
    pub(crate) holds_reads: AtomicBool,
    pub(crate) holds_writes: AtomicBool,
    /// The next reads fail, so many.
    pub(crate) fails: AtomicU64,
    /// The next writes fail, so many, after they have changed the disk.
    pub(crate) fails_writes: AtomicU64,
    /// Such writes may still change the disk.
    pub(crate) lingers: AtomicBool,
    /// The next reads do not give their buffers back, so many.
    pub(crate) loses: AtomicU64,
    /// Such buffers are dropped by the next poll.
    pub(crate) drops: AtomicBool,
    /// Reads of this page are held; 0: of none.
    pub(crate) holds_page: AtomicU64,
    /// Reads that came.
    pub(crate) reads: AtomicU64,
    /// First blocks of the first of them.
    pub(crate) places: Mutex<Vec<u64>>,
    pub(crate) bytes: Mutex<Vec<u8>>,
    /// Such buffers are dropped before the end of their reads is told.
    pub(crate) drops_first: AtomicBool,
    /// The error of a read without a media error.
    pub(crate) is_away: AtomicBool,
    /// [`IoRequest::waited`] of the last command.
    pub(crate) waited: Mutex<Waited>,
    /// The thread that has given back the mapping of a cache.
    pub(crate) unmapped_by: Mutex<Vec<ThreadId>>,
    /// What it says of its writes; 0: 1.
    pub(crate) atomic_blocks: AtomicU32,
}

pub(crate) struct HeldDisk {
    pub(crate) control: Arc<Control>,
    block_bytes: u32,
    blocks: u64,
}

impl HeldDisk {
    /// Byte `n` of the disk is the number of its page.
    pub(crate) fn create(block_bytes: u32, bytes: usize) -> (Arc<dyn Disk>, Arc<Control>) {
        let content = (0..bytes).map(|at| (at / 4096).to_le_bytes()[0]).collect();
        let places = Mutex::new(Vec::with_capacity(1000));
        let control = Arc::new(Control { bytes: Mutex::new(content), places, ..Control::default() });
        let blocks = bytes as u64 / u64::from(block_bytes);
        (Arc::new(HeldDisk { control: Arc::clone(&control), block_bytes, blocks }), control)
    }
}

impl Disk for HeldDisk {
    fn name(&self) -> &'static str {
        "held"
    }

    fn kind(&self) -> &'static str {
        "test"
    }

    fn geometry(&self) -> Geometry {
        Geometry {
            block_bytes: self.block_bytes,
            block_count: self.blocks,
            is_read_only: false,
            has_volatile_cache: false,
            can_deallocate: true,
            atomic_blocks: self.control.atomic_blocks.load(Ordering::SeqCst).max(1),
            can_compare_and_write: false,
        }
    }

    fn open(&self, _context: &ChannelContext) -> Result<Box<dyn DiskChannel>, OpenError> {
        let control = Arc::clone(&self.control);
        Ok(Box::new(HeldChannel {
            control,
            geometry: self.geometry(),
            pending: VecDeque::new(),
            lost: Vec::new(),
        }))
    }

    fn resize(&self, _bytes: u64) -> Result<(), ResizeError> {
        Ok(())
    }

    fn map_memory(&self, _area: &Area) -> Result<Option<Box<dyn Any + Send + Sync>>, OpenError> {
        Ok(Some(Box::new(Mapped(Arc::clone(&self.control)))))
    }

    fn usage(&self) -> Usage {
        Usage::default()
    }
}

struct Mapped(Arc<Control>);

impl Drop for Mapped {
    fn drop(&mut self) {
        self.0.unmapped_by.lock().expect("no panic").push(std::thread::current().id());
    }
}

struct HeldChannel {
    control: Arc<Control>,
    geometry: Geometry,
    pending: VecDeque<(IoRequest, Done)>,
    lost: Vec<Buf>,
}

fn takes_one(count: &AtomicU64) -> bool {
    count.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |count| count.checked_sub(1)).is_ok()
}

impl HeldChannel {
    fn span(&self, range: BlockRange) -> std::ops::Range<usize> {
        let at = usize::try_from(range.lba).expect("small") * self.geometry.block_bytes as usize;
        at..at + range.blocks as usize * self.geometry.block_bytes as usize
    }
}

impl DiskChannel for HeldChannel {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn submit(&mut self, token: Token, request: &IoRequest, mut buf: Option<Buf>) -> Option<Done> {
        let span = self.span(request.range);
        let mut bytes = self.control.bytes.lock().expect("no panic");
        let mut result = Ok(());
        *self.control.waited.lock().expect("no panic") = request.waited;
        match (request.op, &mut buf) {
            (Op::Read, Some(buf)) => {
                self.control.reads.fetch_add(1, Ordering::SeqCst);
                let mut places = self.control.places.lock().expect("no panic");
                if places.len() < places.capacity() {
                    places.push(request.range.lba);
                }
                if takes_one(&self.control.fails) {
                    let is_away = self.control.is_away.load(Ordering::SeqCst);
                    result = Err(if is_away { DiskError::Internal } else { DiskError::MediaRead });
                } else {
                    buf.copy_in(0, &bytes[span]);
                }
            }
            (Op::Write { .. }, Some(buf)) => {
                buf.copy_out(0, &mut bytes[span]);
                if takes_one(&self.control.fails_writes) {
                    result = Err(DiskError::MediaWrite);
                }
            }
            (Op::WriteZeroes { .. } | Op::Deallocate, None) => bytes[span].fill(0),
            (Op::Flush, None) => {}
            (op, _) => panic!("{op:?} with or without a buffer"),
        }
        if request.op == Op::Read && takes_one(&self.control.loses) {
            // The device may still write to it, until it is dropped.
            self.lost.extend(buf.take().filter(|_| !self.control.drops_first.load(Ordering::SeqCst)));
            result = Err(DiskError::Gone);
        }
        self.pending.push_back((*request, Done { token, result, buf }));
        None
    }

    fn poll(&mut self, _now: Nanos, done: &mut Vec<Done>) -> bool {
        if self.control.drops.load(Ordering::SeqCst) {
            self.lost.clear();
        }
        for _ in 0..self.pending.len() {
            let Some((request, ended)) = self.pending.pop_front() else { break };
            let control = &self.control;
            let is_read = request.op == Op::Read;
            let holds = if is_read { &control.holds_reads } else { &control.holds_writes };
            let page = request.range.lba * u64::from(self.geometry.block_bytes) / 4096;
            let is_held = is_read && page > 0 && page == control.holds_page.load(Ordering::SeqCst);
            if holds.load(Ordering::SeqCst) || is_held || done.len() == done.capacity() {
                self.pending.push_back((request, ended));
            } else {
                done.push(ended);
            }
        }
        !self.pending.is_empty()
    }

    fn may_still_write(&self, _range: BlockRange) -> bool {
        self.control.lingers.load(Ordering::SeqCst)
    }

    fn cancel_owner(&mut self, owner: Owner) -> usize {
        self.pending.iter().filter(|(_, done)| done.token.owner() == owner).count()
    }

    fn in_flight(&self) -> usize {
        self.pending.len()
    }
}
