//! [`Probe`]: a layer over any disk that tells what it was asked to do, and may lie about its shape.

use std::sync::{Arc, Mutex, PoisonError};

use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Buf;
use spindle_target_disk::{
    Abilities, BlockRange, ChannelContext, Disk, DiskChannel, Done, Geometry, IoRequest, Op, OpenError,
    Owner, Prepared, ResizeError, Token, Usage,
};

/// What a disk was asked to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asked {
    /// A command.
    Op(Op, BlockRange),
    /// A compare-and-write.
    CompareAndWrite(BlockRange),
    /// A copy.
    Copy {
        /// Where from.
        from: BlockRange,
        /// Where to.
        to: u64,
        /// Force unit access.
        fua: bool,
    },
}

/// The layer, shared by all cores.
pub struct Probe {
    inner: Arc<dyn Disk>,
    shape: Shape,
    asked: Arc<Mutex<Vec<Asked>>>,
}

type Shape = fn(Geometry) -> Geometry;

/// What the disk was asked to do, of all cores.
#[derive(Clone)]
pub struct Record(Arc<Mutex<Vec<Asked>>>);

impl Record {
    /// Everything since the last call.
    #[must_use]
    pub fn take(&self) -> Vec<Asked> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Handles on the disk that are not closed, one for each core, and the disk itself while there is one.
    #[must_use]
    pub fn handles(&self) -> usize {
        Arc::strong_count(&self.0) - 1
    }
}

impl Probe {
    /// Over `inner`, with the shape that `shape` makes of its own.
    #[must_use]
    pub fn over(inner: Arc<dyn Disk>, shape: Shape) -> (Arc<dyn Disk>, Record) {
        let asked = Arc::new(Mutex::new(Vec::new()));
        let probe = Probe { inner, shape, asked: Arc::clone(&asked) };
        (Arc::new(probe), Record(asked))
    }
}

impl Disk for Probe {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn kind(&self) -> &'static str {
        "probe"
    }

    fn geometry(&self) -> Geometry {
        (self.shape)(self.inner.geometry())
    }

    fn open(&self, context: &ChannelContext) -> Result<Box<dyn DiskChannel>, OpenError> {
        let inner = self.inner.open(context)?;
        Ok(Box::new(ProbeChannel { inner, shape: self.shape, asked: Arc::clone(&self.asked) }))
    }

    fn resize(&self, bytes: u64) -> Result<(), ResizeError> {
        self.inner.resize(bytes)
    }

    fn usage(&self) -> Usage {
        self.inner.usage()
    }
}

struct ProbeChannel {
    inner: Box<dyn DiskChannel>,
    shape: Shape,
    asked: Arc<Mutex<Vec<Asked>>>,
}

impl ProbeChannel {
    fn note(&self, asked: Asked) {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner).push(asked);
    }

    fn check(&self, range: BlockRange) {
        let geometry = self.geometry();
        let end = range.lba.checked_add(u64::from(range.blocks));
        assert!(end.is_some_and(|end| end <= geometry.block_count), "{range:?} is beyond {geometry:?}");
    }
}

impl DiskChannel for ProbeChannel {
    fn geometry(&self) -> Geometry {
        (self.shape)(self.inner.geometry())
    }

    fn free_bytes(&self) -> u64 {
        self.inner.free_bytes()
    }

    fn prepare(&mut self, request: &IoRequest, next: Option<u64>) -> Prepared {
        self.check(request.range);
        let prepared = self.inner.prepare(request, next);
        if let Prepared::Ready(_) = prepared {
            self.note(Asked::Op(Op::Read, request.range));
        }
        prepared
    }

    fn submit(&mut self, token: Token, request: &IoRequest, buf: Option<Buf>) -> Option<Done> {
        self.note(Asked::Op(request.op, request.range));
        self.check(request.range);
        self.inner.submit(token, request, buf)
    }

    fn compare_and_write(
        &mut self,
        token: Token,
        range: BlockRange,
        expected: Buf,
        data: Buf,
    ) -> Option<Done> {
        self.note(Asked::CompareAndWrite(range));
        let block_bytes = self.geometry().block_bytes as usize;
        assert_eq!((range.blocks, expected.len(), data.len()), (1, block_bytes, block_bytes));
        self.inner.compare_and_write(token, range, expected, data)
    }

    fn abilities(&self) -> Abilities {
        self.inner.abilities()
    }

    fn copy(&mut self, token: Token, from: BlockRange, to: u64, fua: bool) -> Option<Done> {
        self.note(Asked::Copy { from, to, fua });
        let (blocks, count) = (u64::from(from.blocks), self.geometry().block_count);
        for lba in [from.lba, to] {
            assert!(lba.checked_add(blocks).is_some_and(|end| end <= count), "{from:?} to {to} of {count}");
        }
        assert!(from.lba + blocks <= to || to + blocks <= from.lba, "{from:?} overlaps {to}");
        self.inner.copy(token, from, to, fua)
    }

    fn poll(&mut self, now: Nanos, done: &mut Vec<Done>) -> bool {
        self.inner.poll(now, done)
    }

    fn cancel_owner(&mut self, owner: Owner) -> usize {
        self.inner.cancel_owner(owner)
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }
}
