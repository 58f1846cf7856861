//! [`BlankFile`]: a disk without a medium whose commands end in a poll, as those of a file do. For counting
//! what is in front of the kernel; only with the feature `blank-file`.
//!
//! Its requests go through [`BackendChannel`], as those of `file` and `ng` do. In the place of the ring is a
//! list: `send` ends all operations in it, as io_uring_enter does for a file in the page cache, and
//! `collect` passes them on. Reads leave the buffer as it is, and writes are discarded.

use std::io;
use std::sync::Arc;

use spindle_reactor::mem::Buf;

use super::guard::{CORES_MAX, Guard};
use super::{AsyncBackend, BackendChannel, Ended, Request, ZeroMethod, ZeroMethods, requests_of};
use crate::{ChannelContext, Disk, DiskChannel, DiskError, Geometry, OpenError, ResizeError};

const NAME: &str = "blank-file";

/// A blank file, shared by all cores. See the module.
pub struct BlankFile {
    block_count: u64,
    guard: Arc<Guard>,
}

impl BlankFile {
    /// Creates a disk of `block_count` blocks of 4096 bytes.
    #[must_use]
    pub fn new(block_count: u64) -> Arc<BlankFile> {
        Arc::new(BlankFile { block_count, guard: Guard::new(CORES_MAX) })
    }
}

/// Returns what a writable file on a block device reports.
fn geometry(block_count: u64) -> Geometry {
    Geometry {
        block_bytes: 4096,
        block_count,
        is_read_only: false,
        has_volatile_cache: true,
        can_deallocate: false,
        atomic_blocks: 1,
        can_compare_and_write: true,
    }
}

impl Disk for BlankFile {
    fn name(&self) -> &'static str {
        NAME
    }

    fn kind(&self) -> &'static str {
        NAME
    }

    fn geometry(&self) -> Geometry {
        geometry(self.block_count)
    }

    fn open(&self, context: &ChannelContext) -> Result<Box<dyn DiskChannel>, OpenError> {
        // Room for an operation of each request and one of the compare-and-write, as in a ring.
        let operations = Vec::with_capacity(requests_of(context) as usize + 1);
        let (block_count, zero_methods) = (self.block_count, ZeroMethods::new(false, false));
        let backend = BlankBackend { block_count, zero_methods, operations, ended: 0 };
        Ok(Box::new(BackendChannel::new(NAME, backend, &self.guard, context)?))
    }

    fn resize(&self, bytes: u64) -> Result<(), ResizeError> {
        Err(ResizeError::new(NAME, bytes, "never"))
    }
}

struct BlankBackend {
    block_count: u64,
    zero_methods: ZeroMethods,
    /// In order of submission.
    operations: Vec<Ended<io::Error>>,
    /// Number of `operations`, from the first on, that have been sent and so have ended.
    ended: usize,
}

impl BlankBackend {
    fn start(&mut self, token: u64, buf: Option<Buf>) {
        self.operations.push(Ended { token, result: Ok(()), buf });
    }
}

impl AsyncBackend for BlankBackend {
    type Error = io::Error;

    #[inline]
    fn geometry(&self) -> Geometry {
        geometry(self.block_count)
    }

    #[inline]
    fn refusal(&self, _request: &Request) -> Option<DiskError> {
        None
    }

    #[inline]
    fn read(&mut self, token: u64, _offset: u64, buf: Buf) {
        self.start(token, Some(buf));
    }

    #[inline]
    fn write(&mut self, token: u64, _offset: u64, buf: Buf, _fua: bool) {
        self.start(token, Some(buf));
    }

    fn sync(&mut self, token: u64) {
        self.start(token, None);
    }

    fn zero_methods(&self) -> &ZeroMethods {
        &self.zero_methods
    }

    fn zero_bytes_max(&self, _method: ZeroMethod) -> u64 {
        u64::MAX
    }

    fn zero(&mut self, token: u64, _method: ZeroMethod, _offset: u64, _bytes: u64) {
        self.start(token, None);
    }

    fn next_method(&self, _method: ZeroMethod, _error: &io::Error) -> Option<ZeroMethod> {
        None
    }

    fn on_durable_error(&self, _is_sync: bool, _error: &io::Error) {}

    fn disk_error(&self, _error: &io::Error, _is_write: bool) -> DiskError {
        DiskError::Internal
    }

    fn cancel(&mut self, _token: u64) {}

    #[inline]
    fn send(&mut self) -> io::Result<()> {
        self.ended = self.operations.len();
        Ok(())
    }

    #[inline]
    fn collect(&mut self, each: &mut dyn FnMut(Ended<io::Error>)) {
        self.operations.drain(..std::mem::take(&mut self.ended)).for_each(each);
    }
}
