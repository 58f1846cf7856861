//! [`FileBackend`]: the file of one core: its ring, and how a range becomes zeroes there.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use spindle_reactor::mem::Buf;
use spindle_reactor::uring::{Completion, FileIndex, FileRing, Full};

use super::syncs::Syncs;
use super::{Shared, disk_error};
use crate::backend::request::ZERO_WRITE_BYTES;
use crate::backend::{AsyncBackend, BackendCore, Ended, Request, requests_of};
use crate::{CoreContext, DiskError, Geometry, OpenError};

/// Bytes punched or zeroed in one call: a file system locks the file meanwhile, and others want to have their
/// turn.
pub(super) const PIECE_BYTES: u64 = 1 << 30;
/// How a range becomes zeroes, the better first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ZeroMethod {
    /// A hole: the space goes back.
    Punch,
    /// The file system knows that it is zero; the space stays.
    Range,
    /// Zeroes are written.
    Write,
}

impl ZeroMethod {
    /// The best way that the file has not refused.
    pub(super) fn best(shared: &Shared, gives_back: bool) -> ZeroMethod {
        if gives_back && shared.can_punch.load(Ordering::Relaxed) {
            ZeroMethod::Punch
        } else if shared.can_zero_range.load(Ordering::Relaxed) {
            ZeroMethod::Range
        } else {
            ZeroMethod::Write
        }
    }

    /// The file refused this way: it is not tried again. The next one.
    pub(super) fn refused(self, shared: &Shared) -> Option<ZeroMethod> {
        match self {
            ZeroMethod::Punch => shared.can_punch.store(false, Ordering::Relaxed),
            ZeroMethod::Range => shared.can_zero_range.store(false, Ordering::Relaxed),
            ZeroMethod::Write => return None,
        }
        Some(ZeroMethod::best(shared, false))
    }

    /// This range cannot be done so, as one that does not end at the device's own blocks, which may be larger
    /// than the disk's where I/O goes through the page cache. The next way, for this one alone.
    pub(super) fn humbler(self) -> Option<ZeroMethod> {
        match self {
            ZeroMethod::Punch => Some(ZeroMethod::Range),
            ZeroMethod::Range => Some(ZeroMethod::Write),
            ZeroMethod::Write => None,
        }
    }

    /// Flags of fallocate; `None` for the way without it.
    pub(super) fn flags(self) -> Option<FallocateFlags> {
        match self {
            ZeroMethod::Punch => Some(FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE),
            ZeroMethod::Range => Some(FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE),
            ZeroMethod::Write => None,
        }
    }
}

/// True for an error that the page cache keeps for the next sync.
fn is_medium_error(error: &io::Error) -> bool {
    Errno::from_io_error(error) == Some(Errno::IO)
}

/// A file and the ring of one core.
pub(super) struct FileBackend {
    ring: FileRing,
    file: FileIndex,
    /// Through the page cache: the same file, opened once more by this core for its syncs alone, and the
    /// syncs. So no write with FUA and no other core takes the error that a flush is to be told.
    cached: Option<(FileIndex, Syncs)>,
    /// For reads and writes, where the device is asked for completions.
    polled: Option<(FileRing, FileIndex)>,
    shared: Arc<Shared>,
}

/// One core's handle on a file disk.
pub(super) type FileCore = BackendCore<FileBackend>;

/// Open the handle of one core.
pub(super) fn open(shared: Arc<Shared>, context: &CoreContext) -> Result<FileCore, OpenError> {
    let (name, guard) = (shared.name.clone(), Arc::clone(&shared.guard));
    BackendCore::new(&name, medium(shared, context)?, &guard, context)
}

/// The file with a ring of its own.
pub(super) fn medium(shared: Arc<Shared>, context: &CoreContext) -> Result<FileBackend, OpenError> {
    let system = |verb: &str| {
        let (disk, verb) = (shared.name.clone(), format!("{verb} {}", shared.path.display()));
        move |source| OpenError::System { disk, verb, source }
    };
    // One entry more, for the compare-and-write.
    let entries = requests_of(context) + 1;
    let mut ring = FileRing::new(entries, &context.pool).map_err(system("set up io_uring for"))?;
    let fd = shared.file.try_clone().map_err(system("take another descriptor of"))?;
    let file = ring.register_file(fd.into());
    let cached = if shared.is_direct {
        None
    } else {
        // The file, not what is at its path by now.
        let again = File::open(format!("/proc/self/fd/{}", shared.file.as_raw_fd()));
        let again = again.map_err(system("open once more, for syncs,"))?;
        Some((ring.register_file(again.into()), Syncs::new(requests_of(context) as usize + 1)))
    };
    let polled = match shared.is_polled {
        true => {
            let ring = FileRing::polled(entries, &context.pool);
            let mut ring = ring.map_err(system("set up io_uring that polls for"))?;
            let fd = shared.file.try_clone().map_err(system("take another descriptor of"))?;
            let file = ring.register_file(fd.into());
            Some((ring, file))
        }
        false => None,
    };
    Ok(FileBackend { ring, file, cached, polled, shared })
}

impl AsyncBackend for FileBackend {
    type Error = io::Error;
    type ZeroMethod = ZeroMethod;

    #[inline]
    fn geometry(&self) -> Geometry {
        self.shared.geometry()
    }

    #[inline]
    fn refusal(&self, request: &Request<ZeroMethod>) -> Option<DiskError> {
        let is_lost = request.is_durable() && self.shared.has_lost_data.load(Ordering::Acquire);
        is_lost.then_some(DiskError::MediaWrite)
    }

    #[inline]
    fn read(&mut self, token: u64, offset: u64, buf: Buf) {
        took(match &mut self.polled {
            Some((ring, file)) => ring.read(token, *file, offset, buf),
            None => self.ring.read(token, self.file, offset, buf),
        });
    }

    #[inline]
    fn write(&mut self, token: u64, offset: u64, buf: Buf, fua: bool) {
        took(match &mut self.polled {
            Some((ring, file)) if !fua => ring.write(token, *file, offset, buf, false),
            Some(_) | None => self.ring.write(token, self.file, offset, buf, fua),
        });
    }

    fn sync(&mut self, token: u64) {
        match &mut self.cached {
            None => took(self.ring.fsync(token, self.file, true)),
            Some((file, syncs)) => {
                if let Some(token) = syncs.ask(token) {
                    took(self.ring.fsync(token, *file, true));
                }
            }
        }
    }

    fn way(&self, gives_back: bool) -> ZeroMethod {
        ZeroMethod::best(&self.shared, gives_back)
    }

    fn zero_bytes_max(&self, way: ZeroMethod) -> u64 {
        if way == ZeroMethod::Write { ZERO_WRITE_BYTES } else { PIECE_BYTES }
    }

    fn zero(&mut self, token: u64, way: ZeroMethod, offset: u64, bytes: u64) {
        match way.flags() {
            Some(flags) => took(self.ring.fallocate(token, self.file, flags, offset, bytes)),
            // At most ZERO_WRITE_BYTES.
            None => self.write(token, offset, Buf::zeroes(u32::try_from(bytes).unwrap_or(0)), false),
        }
    }

    fn next_way(&self, way: ZeroMethod, error: &io::Error) -> Option<ZeroMethod> {
        match Errno::from_io_error(error) {
            Some(Errno::OPNOTSUPP) => way.refused(&self.shared),
            Some(Errno::INVAL) => way.humbler(),
            Some(_) | None => None,
        }
    }

    /// It may be about bytes that were acknowledged before: any error of a sync, and of a write with FUA
    /// those of the medium. If others are, the next sync is told as well: it has an open file of its own.
    fn on_durable_error(&self, is_sync: bool, error: &io::Error) {
        if is_sync || is_medium_error(error) {
            self.shared.on_sync_error();
        }
    }

    fn disk_error(&self, error: &io::Error, is_write: bool) -> DiskError {
        disk_error(error, is_write)
    }

    /// Each is one thing that the kernel does.
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
                took(self.ring.fsync(token, *file, true));
            }
        }
    }
}

/// The ring has an entry for each request in the slab, and one for the compare-and-write, so it is never
/// full.
#[inline]
fn took<B>(result: Result<(), Full<B>>) {
    assert!(result.is_ok(), "the ring is full although each of its users has one entry");
}
