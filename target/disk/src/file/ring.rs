//! [`FileBackend`]: one core's io_uring on the file, and zeroing by fallocate.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use spindle_reactor::mem::Buf;
use spindle_reactor::uring::{Completion, FileIndex, FileRing};

use super::syncs::Syncs;
use super::{FileShared, disk_error};
use crate::backend::request::ZERO_WRITE_BYTES;
use crate::backend::{AsyncBackend, BackendChannel, Ended, Request, ZeroMethod, ZeroMethods, requests_of};
use crate::{ChannelContext, DiskError, Geometry, OpenError};

/// Most bytes punched or zeroed per call. The locked inode blocks other writes meanwhile.
pub(super) const PIECE_BYTES: u64 = 1 << 30;

/// Returns true for EIO, which may be an error of the writeback of earlier writes.
fn is_medium_error(error: &io::Error) -> bool {
    Errno::from_io_error(error) == Some(Errno::IO)
}

pub(super) struct FileBackend {
    ring: FileRing,
    file: FileIndex,
    /// Only through the page cache: a second open file description for the syncs of this core, and the queue
    /// of syncs. No write with FUA and no other core then consumes an error that belongs to a flush.
    cached: Option<(FileIndex, Syncs)>,
    /// Second ring, for polled reads and writes without FUA, and the file's index in this ring.
    polled: Option<(FileRing, FileIndex)>,
    shared: Arc<FileShared>,
}

pub(super) type FileChannel = BackendChannel<FileBackend>;

pub(super) fn open(shared: Arc<FileShared>, context: &ChannelContext) -> Result<FileChannel, OpenError> {
    let (name, guard) = (shared.name.clone(), Arc::clone(&shared.guard));
    BackendChannel::new(&name, open_backend(shared, context)?, &guard, context)
}

/// Sets up the rings of one core. Fails if io_uring or a further file descriptor is not available.
pub(super) fn open_backend(
    shared: Arc<FileShared>,
    context: &ChannelContext,
) -> Result<FileBackend, OpenError> {
    let system = |verb: &str| {
        let verb = format!("{verb} {}", shared.path.display());
        |source: io::Error| OpenError::system(&shared.name, verb, source)
    };
    // One entry for each request in the slab and one for the compare-and-write, so the ring is never full.
    let entries = requests_of(context) + 1;
    let mut ring = FileRing::new(entries, &context.pool).map_err(system("set up io_uring for"))?;
    let fd = shared.file.try_clone().map_err(system("duplicate the descriptor of"))?;
    let file = ring.register_file(fd.into());
    let cached = if shared.is_direct {
        None
    } else {
        // Reopens the inode itself: its path may refer to another file by now.
        let again = File::open(format!("/proc/self/fd/{}", shared.file.as_raw_fd()));
        let again = again.map_err(system("reopen, for syncs,"))?;
        Some((ring.register_file(again.into()), Syncs::new(requests_of(context) as usize + 1)))
    };
    let polled = match shared.is_polled {
        true => {
            let ring = FileRing::polled(entries, &context.pool);
            let mut ring = ring.map_err(system("set up io_uring that polls for"))?;
            let fd = shared.file.try_clone().map_err(system("duplicate the descriptor of"))?;
            let file = ring.register_file(fd.into());
            Some((ring, file))
        }
        false => None,
    };
    Ok(FileBackend { ring, file, cached, polled, shared })
}

impl AsyncBackend for FileBackend {
    type Error = io::Error;

    #[inline]
    fn geometry(&self) -> Geometry {
        self.shared.geometry()
    }

    #[inline]
    fn refusal(&self, request: &Request) -> Option<DiskError> {
        let is_lost = request.is_durable() && self.shared.has_lost_data.load(Ordering::Acquire);
        is_lost.then_some(DiskError::MediaWrite)
    }

    #[inline]
    fn read(&mut self, token: u64, offset: u64, buf: Buf) {
        match &mut self.polled {
            Some((ring, file)) => ring.read(token, *file, offset, buf),
            None => self.ring.read(token, self.file, offset, buf),
        }
    }

    #[inline]
    fn write(&mut self, token: u64, offset: u64, buf: Buf, fua: bool) {
        match &mut self.polled {
            Some((ring, file)) if !fua => ring.write(token, *file, offset, buf, false),
            Some(_) | None => self.ring.write(token, self.file, offset, buf, fua),
        }
    }

    fn sync(&mut self, token: u64) {
        match &mut self.cached {
            None => self.ring.fsync(token, self.file, true),
            Some((file, syncs)) => {
                if let Some(token) = syncs.ask(token) {
                    self.ring.fsync(token, *file, true);
                }
            }
        }
    }

    fn zero_methods(&self) -> &ZeroMethods {
        &self.shared.zero_methods
    }

    fn zero_bytes_max(&self, method: ZeroMethod) -> u64 {
        if method == ZeroMethod::Write { ZERO_WRITE_BYTES } else { PIECE_BYTES }
    }

    fn zero(&mut self, token: u64, method: ZeroMethod, offset: u64, bytes: u64) {
        let flags = match method {
            ZeroMethod::Release => FallocateFlags::PUNCH_HOLE,
            ZeroMethod::Zero => FallocateFlags::ZERO_RANGE,
            ZeroMethod::Write => {
                // At most ZERO_WRITE_BYTES.
                let zeroes = Buf::zeroes(u32::try_from(bytes).unwrap_or(0));
                return self.write(token, offset, zeroes, false);
            }
        };
        let flags = flags | FallocateFlags::KEEP_SIZE;
        self.ring.fallocate(token, self.file, flags, offset, bytes);
    }

    fn next_method(&self, method: ZeroMethod, error: &io::Error) -> Option<ZeroMethod> {
        match Errno::from_io_error(error) {
            Some(Errno::OPNOTSUPP) => self.shared.zero_methods.refuse(method),
            // The range is not aligned to the blocks of the device. Through the page cache, these may be
            // larger than the blocks of the disk. The method remains enabled for other ranges.
            Some(Errno::INVAL) => method.next(),
            Some(_) | None => None,
        }
    }

    /// Records a possible loss of data. Any failed sync, and EIO of a write with FUA, may concern data that
    /// was acknowledged before. After other errors of a write with FUA, the next sync still reports a loss,
    /// because syncs use their own file description.
    fn on_durable_error(&self, is_sync: bool, error: &io::Error) {
        if is_sync || is_medium_error(error) {
            self.shared.on_sync_error();
        }
    }

    fn disk_error(&self, error: &io::Error, is_write: bool) -> DiskError {
        disk_error(error, is_write)
    }

    /// No effect: each operation is one operation of the kernel and cannot be shortened.
    fn cancel(&mut self, _token: u64) {}

    #[inline]
    fn send(&mut self) -> io::Result<()> {
        if let Some((ring, _)) = &mut self.polled {
            ring.submit()?;
        }
        self.ring.submit()
    }

    #[inline]
    fn collect(&mut self, each: &mut dyn FnMut(Ended<io::Error>)) {
        let mut tell =
            |done: Completion| each(Ended { token: done.token, result: done.result, buf: done.buf });
        if let Some((ring, _)) = &mut self.polled {
            ring.poll(&mut tell);
        }
        let Some((file, syncs)) = &mut self.cached else {
            self.ring.poll(tell);
            return;
        };
        let mut synced = None;
        self.ring.poll(
            |done| {
                if syncs.is_running(done.token) { synced = Some(done.result) } else { tell(done) }
            },
        );
        if let Some(result) = synced {
            let errno = result.as_ref().err().and_then(io::Error::raw_os_error);
            let again = || match &result {
                Ok(()) => Ok(()),
                Err(_) => Err(errno.map_or_else(|| ErrorKind::Other.into(), io::Error::from_raw_os_error)),
            };
            let next = syncs.end(result.is_ok(), |token| each(Ended { token, result: again(), buf: None }));
            if let Some(token) = next {
                self.ring.fsync(token, *file, true);
            }
        }
    }
}
