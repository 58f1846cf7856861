//! [`Flight`]: one operation from the moment it is taken until it comes back.
//!
//! ```text
//!   taken ── entry ──> in the kernel ── on_result ──> Ended
//!              ^                            │
//!              └── Again (short, or "not now")
//! ```

use std::io;
use std::ops::Range;

use io_uring::{opcode, squeue, types};
use rustix::io::Errno;

use super::{FileIndex, Target};
use crate::mem::{Buf, PIECES_MAX, SEGMENTS_MAX};

/// How often the kernel may say "not now" to one operation before that is its result.
pub(super) const RETRIES_MAX: u8 = 16;

/// What is done.
#[derive(Debug, Clone, Copy)]
pub(super) enum Kind {
    Read,
    Write { dsync: bool },
    Fsync { data_only: bool },
    Fallocate { mode: i32, len: u64 },
}

/// What a result means for the operation.
pub(super) enum Step {
    /// Some of it is left to do.
    Again,
    Ended(io::Result<()>),
}

/// An operation in flight. It owns its buffer.
pub(super) struct Flight {
    pub(super) token: u64,
    pub(super) file: FileIndex,
    kind: Kind,
    offset: u64,
    /// Bytes done by earlier rounds.
    done: usize,
    retries: u8,
    buf: Option<Buf>,
}

impl Flight {
    pub(super) fn new(token: u64, file: FileIndex, kind: Kind, offset: u64, buf: Option<Buf>) -> Flight {
        Flight { token, file, kind, offset, done: 0, retries: 0, buf }
    }

    pub(super) fn into_buf(self) -> Option<Buf> {
        self.buf
    }

    /// Where its buffer lies, and in which zone of a pool, if it is in one piece and of a pool.
    pub(super) fn memory(&mut self) -> Option<(usize, u8)> {
        let (addr, zone) = self.buf.as_mut().filter(|buf| buf.is_contiguous())?.device_target();
        Some((addr.as_ptr() as usize, zone?))
    }

    /// The entry for what is left of it. Io vectors, if it needs them, are written to `vectors`. `fixed` is
    /// the number under which the kernel knows its memory.
    pub(super) fn entry(
        &mut self,
        target: Target,
        vectors: &mut Vec<libc::iovec>,
        fixed: Option<u16>,
    ) -> squeue::Entry {
        let fd = types::Fd(target.number);
        let entry = match self.kind {
            Kind::Read | Kind::Write { .. } => self.transfer(fd, vectors, fixed),
            Kind::Fsync { data_only } => {
                let flags = if data_only { types::FsyncFlags::DATASYNC } else { types::FsyncFlags::empty() };
                opcode::Fsync::new(fd).flags(flags).build()
            }
            Kind::Fallocate { mode, len } => {
                opcode::Fallocate::new(fd, len).offset(self.offset).mode(mode).build()
            }
        };
        entry.flags(target.flags)
    }

    fn transfer(
        &mut self,
        fd: types::Fd,
        vectors: &mut Vec<libc::iovec>,
        fixed: Option<u16>,
    ) -> squeue::Entry {
        let offset = self.offset.saturating_add(self.done as u64);
        let (is_read, flags) = match self.kind {
            Kind::Write { dsync: true } => (false, libc::RWF_DSYNC),
            Kind::Write { dsync: false } => (false, 0),
            Kind::Read | Kind::Fsync { .. } | Kind::Fallocate { .. } => (true, 0),
        };
        let Some(buf) = self.buf.as_mut() else { return opcode::Nop::new().build() };
        if !buf.is_contiguous() {
            let left = self.done..buf.len();
            fill(vectors, buf, left, is_read);
            let (first, count) = (vectors.as_ptr(), u32::try_from(vectors.len()).unwrap_or(0));
            return if is_read {
                opcode::Readv::new(fd, first, count).offset(offset).build()
            } else {
                opcode::Writev::new(fd, first, count).offset(offset).rw_flags(flags).build()
            };
        }
        let left = u32::try_from(buf.len() - self.done).unwrap_or(0);
        let (addr, _) = buf.device_target();
        let addr = addr.as_ptr().wrapping_add(self.done);
        match (is_read, fixed) {
            (true, Some(fixed)) => opcode::ReadFixed::new(fd, addr, left, fixed).offset(offset).build(),
            (true, None) => opcode::Read::new(fd, addr, left).offset(offset).build(),
            (false, Some(fixed)) => {
                opcode::WriteFixed::new(fd, addr, left, fixed).offset(offset).rw_flags(flags).build()
            }
            (false, None) => opcode::Write::new(fd, addr, left).offset(offset).rw_flags(flags).build(),
        }
    }

    /// The kernel's answer to the last entry.
    pub(super) fn on_result(&mut self, result: i32) -> Step {
        let Ok(bytes) = usize::try_from(result) else {
            return self.on_error(Errno::from_raw_os_error(result.saturating_neg()));
        };
        let Some(buf) = &self.buf else { return Step::Ended(Ok(())) };
        self.done = self.done.saturating_add(bytes);
        if self.done >= buf.len() {
            return Step::Ended(Ok(()));
        }
        match (bytes, self.kind) {
            (0, Kind::Write { .. }) => Step::Ended(Err(io::ErrorKind::WriteZero.into())),
            (0, Kind::Read | Kind::Fsync { .. } | Kind::Fallocate { .. }) => Step::Ended(Err(end_of_file())),
            (_, _) => Step::Again,
        }
    }

    fn on_error(&mut self, errno: Errno) -> Step {
        let is_for_now = matches!(errno, Errno::INTR | Errno::AGAIN);
        if is_for_now && self.retries < RETRIES_MAX {
            self.retries += 1;
            return Step::Again;
        }
        // Direct reads stop at the file's end, which may lie inside of a sector; the kernel refuses to go on
        // from there.
        let is_ragged_end =
            errno == Errno::INVAL && matches!(self.kind, Kind::Read) && !self.done.is_multiple_of(512);
        Step::Ended(Err(if is_ragged_end { end_of_file() } else { errno.into() }))
    }
}

fn end_of_file() -> io::Error {
    io::ErrorKind::UnexpectedEof.into()
}

/// The pieces of the bytes `part` of `buf`, as many as fit; of a file's transfer a longer list is a short
/// one, and goes on from there.
pub(super) fn fill(vectors: &mut Vec<libc::iovec>, buf: &mut Buf, part: Range<usize>, is_read: bool) {
    vectors.clear();
    // The first time in this slot; its capacity is kept. A pool's buffers have few pieces.
    let pieces = buf.segments().take(PIECES_MAX + 1).count();
    vectors.reserve_exact(if pieces > PIECES_MAX { SEGMENTS_MAX } else { PIECES_MAX });
    let (mut skip, mut left) = (part.start, part.len());
    let mut push = |addr: *mut u8, bytes: usize| {
        let step = skip.min(bytes);
        skip -= step;
        let here = (bytes - step).min(left);
        if here > 0 && vectors.len() < SEGMENTS_MAX {
            left -= here;
            vectors.push(libc::iovec { iov_base: addr.wrapping_add(step).cast(), iov_len: here });
        }
    };
    if is_read {
        buf.segments_mut().for_each(|piece| push(piece.as_mut_ptr(), piece.len()));
    } else {
        buf.segments().for_each(|piece| push(piece.as_ptr().cast_mut(), piece.len()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::{Pages, Pool, ZoneSpec};

    fn flight(kind: Kind) -> Flight {
        let pool = Pool::new(&[ZoneSpec { buffer_bytes: 4096, count: 1 }], Pages::Base).expect("pool");
        Flight::new(1, FileIndex(0), kind, 0, pool.take(4096))
    }

    fn errno(step: Step) -> Option<Errno> {
        match step {
            Step::Again | Step::Ended(Ok(())) => None,
            Step::Ended(Err(error)) => Errno::from_io_error(&error),
        }
    }

    #[test]
    fn not_now_is_asked_again_but_not_for_ever() {
        let mut flight = flight(Kind::Read);
        for _ in 0..RETRIES_MAX {
            assert!(matches!(flight.on_result(-libc::EAGAIN), Step::Again));
        }
        assert_eq!(errno(flight.on_result(-libc::EAGAIN)), Some(Errno::AGAIN));
    }

    #[test]
    fn short_transfers_add_up_and_nothing_is_an_end() {
        let mut read = flight(Kind::Read);
        assert!(matches!(read.on_result(1000), Step::Again));
        assert!(matches!(read.on_result(3096), Step::Ended(Ok(()))));
        let mut read = flight(Kind::Read);
        assert!(matches!(read.on_result(4095), Step::Again));
        let end =
            |step| matches!(step, Step::Ended(Err(error)) if error.kind() == io::ErrorKind::UnexpectedEof);
        assert!(end(read.on_result(-libc::EINVAL)), "a direct read does not go on inside of a sector");
        assert!(end(read.on_result(0)));
        let mut write = flight(Kind::Write { dsync: false });
        assert!(matches!(write.on_result(512), Step::Again));
        assert_eq!(errno(write.on_result(-libc::EINVAL)), Some(Errno::INVAL));
        assert!(
            matches!(write.on_result(0), Step::Ended(Err(error)) if error.kind() == io::ErrorKind::WriteZero)
        );
    }
}
