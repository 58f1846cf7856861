//! [`FileRing`]: reads and writes of files and block devices, syncs, and fallocate(2).

#[cfg(test)]
mod tests;

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use io_uring::{cqueue, opcode, squeue, types};
use rustix::io::Errno;

use super::Ring;
use super::flight::{Data, Device, Flight, Step};
use crate::mem::{Buf, Pool};

const FILES_REGISTERED_MAX: u16 = 64;

/// Index of a file in its ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileIndex(u16);

/// The files of a ring.
pub struct Files {
    files: Vec<File>,
    has_table: bool,
}

struct File {
    fd: OwnedFd,
    is_registered: bool,
}

#[derive(Debug, Clone, Copy)]
enum Kind {
    Read,
    Write { dsync: bool },
    Fsync { data_only: bool },
    Fallocate { mode: i32, len: u64 },
}

/// An operation on a file, at `offset` in bytes.
pub struct Operation {
    file: FileIndex,
    kind: Kind,
    offset: u64,
}

/// A ring for files. Each method that starts an operation panics when as many are in flight as the ring has
/// entries, or when the ring has no file of the given index. Both are faults of the caller.
pub type FileRing = Ring<Files>;

impl Ring<Files> {
    /// Creates a ring for `entries` operations in flight.
    ///
    /// # Errors
    /// The error of io_uring_setup(2), for example where io_uring is disabled; `InvalidInput` for 0 or more
    /// than [`RING_ENTRIES_MAX`](super::RING_ENTRIES_MAX) entries.
    pub fn new(entries: u32, pool: &Pool) -> io::Result<FileRing> {
        FileRing::open(entries, pool, false)
    }

    /// Creates a ring as [`FileRing::new`] does, but the ring polls the device (IOPOLL). Its descriptor never
    /// becomes readable: a caller with operations in flight must not sleep.
    ///
    /// # Errors
    /// As [`FileRing::new`].
    pub fn polled(entries: u32, pool: &Pool) -> io::Result<FileRing> {
        FileRing::open(entries, pool, true)
    }

    fn open(entries: u32, pool: &Pool, is_polled: bool) -> io::Result<FileRing> {
        let mut made = Ring::make(entries, pool, is_polled, Files { files: Vec::new(), has_table: false })?;
        let table = made.ring.submitter().register_files_sparse(u32::from(FILES_REGISTERED_MAX));
        made.device.has_table = table.is_ok();
        Ok(made)
    }

    /// Adds `fd` to the files of this ring; the drop of the ring closes `fd`. The first 64 are registered
    /// with the kernel, if it allows that.
    ///
    /// # Panics
    /// At the 65537th file.
    pub fn register_file(&mut self, fd: OwnedFd) -> FileIndex {
        let index = u16::try_from(self.device.files.len()).expect("at most 65536 files in a ring");
        let is_registered = self.device.has_table
            && index < FILES_REGISTERED_MAX
            && self.ring.submitter().register_files_update(u32::from(index), &[fd.as_raw_fd()]).is_ok();
        self.device.files.push(File { fd, is_registered });
        FileIndex(index)
    }

    /// Fills `buf` with bytes of the file, from `offset` on.
    ///
    /// # Panics
    /// When `buf` is shared; and as [`FileRing`] says.
    pub fn read(&mut self, token: u64, file: FileIndex, offset: u64, buf: Buf) {
        let (operation, all) = (self.operation(file, Kind::Read, offset), 0..buf.len());
        self.start(Flight::read(token, operation, buf, all));
    }

    /// Writes the bytes of `buf` at `offset` of the file; with `dsync` they are on stable storage when the
    /// operation completes (RWF_DSYNC, as FUA).
    pub fn write(&mut self, token: u64, file: FileIndex, offset: u64, buf: Buf, dsync: bool) {
        let (operation, all) = (self.operation(file, Kind::Write { dsync }, offset), 0..buf.len());
        self.start(Flight::write(token, operation, buf, all));
    }

    /// Flushes the file's data to stable storage, and its metadata; with `data_only` only the metadata that
    /// is needed to read the data (fdatasync).
    pub fn fsync(&mut self, token: u64, file: FileIndex, data_only: bool) {
        let operation = self.operation(file, Kind::Fsync { data_only }, 0);
        self.start(Flight::without_data(token, operation));
    }

    /// Allocates, frees or zeroes the space of `offset .. offset + len`, by `mode` of fallocate(2).
    pub fn fallocate(
        &mut self,
        token: u64,
        file: FileIndex,
        mode: rustix::fs::FallocateFlags,
        offset: u64,
        len: u64,
    ) {
        let mode = i32::from_ne_bytes(mode.bits().to_ne_bytes());
        let operation = self.operation(file, Kind::Fallocate { mode, len }, offset);
        self.start(Flight::without_data(token, operation));
    }

    fn operation(&self, file: FileIndex, kind: Kind, offset: u64) -> Operation {
        assert!(usize::from(file.0) < self.device.files.len(), "a file of another ring");
        Operation { file, kind, offset }
    }
}

impl Device for Files {
    type Submission = squeue::Entry;
    type Completion = cqueue::Entry;
    type Operation = Operation;
    type Error = io::Error;

    fn entry(&self, flight: &Flight<Operation>, data: &Data, user_data: u64) -> squeue::Entry {
        let Operation { file, kind, offset } = flight.operation;
        let File { fd, is_registered } = &self.files[usize::from(file.0)];
        let (fd, flags) = if *is_registered {
            (types::Fd(i32::from(file.0)), squeue::Flags::FIXED_FILE)
        } else {
            (types::Fd(fd.as_raw_fd()), squeue::Flags::empty())
        };
        let entry = match kind {
            Kind::Read => read(fd, data, offset.saturating_add(flight.left.start as u64)),
            Kind::Write { dsync } => {
                let flags = if dsync { libc::RWF_DSYNC } else { 0 };
                write(fd, data, offset.saturating_add(flight.left.start as u64), flags)
            }
            Kind::Fsync { data_only } => {
                let flags = if data_only { types::FsyncFlags::DATASYNC } else { types::FsyncFlags::empty() };
                opcode::Fsync::new(fd).flags(flags).build()
            }
            Kind::Fallocate { mode, len } => {
                opcode::Fallocate::new(fd, len).offset(offset).mode(mode).build()
            }
        };
        entry.flags(flags).user_data(user_data)
    }

    fn on_result(flight: &mut Flight<Operation>, result: i32) -> Step<io::Error> {
        let Ok(bytes) = usize::try_from(result) else {
            let errno = Errno::from_raw_os_error(result.saturating_neg());
            // A direct read stops at the file's end, which may be inside of a sector; the kernel refuses to
            // continue there.
            let is_ragged_end = errno == Errno::INVAL
                && matches!(flight.operation.kind, Kind::Read)
                && !flight.left.start.is_multiple_of(512);
            return Step::Ended(Err(if is_ragged_end { end_of_file() } else { errno.into() }));
        };
        flight.left.start = flight.left.start.saturating_add(bytes);
        if flight.left.is_empty() {
            return Step::Ended(Ok(()));
        }
        match (bytes, flight.operation.kind) {
            (0, Kind::Write { .. }) => Step::Ended(Err(io::ErrorKind::WriteZero.into())),
            (0, Kind::Read | Kind::Fsync { .. } | Kind::Fallocate { .. }) => Step::Ended(Err(end_of_file())),
            (_, _) => Step::Again,
        }
    }
}

/// Makes the entry of a read. If `data` is not all that is left (`Data::is_whole`), the read is short, and
/// the ring queues the rest.
fn read(fd: types::Fd, data: &Data, offset: u64) -> squeue::Entry {
    let (addr, count) = (data.addr, data.count);
    match data.fixed {
        _ if data.is_vectors => opcode::Readv::new(fd, addr.cast(), count).offset(offset).build(),
        Some(fixed) => opcode::ReadFixed::new(fd, addr, count, fixed).offset(offset).build(),
        None => opcode::Read::new(fd, addr, count).offset(offset).build(),
    }
}

fn write(fd: types::Fd, data: &Data, offset: u64, flags: i32) -> squeue::Entry {
    let (addr, count) = (data.addr, data.count);
    match data.fixed {
        _ if data.is_vectors => {
            opcode::Writev::new(fd, addr.cast(), count).offset(offset).rw_flags(flags).build()
        }
        Some(fixed) => opcode::WriteFixed::new(fd, addr, count, fixed).offset(offset).rw_flags(flags).build(),
        None => opcode::Write::new(fd, addr, count).offset(offset).rw_flags(flags).build(),
    }
}

fn end_of_file() -> io::Error {
    io::ErrorKind::UnexpectedEof.into()
}
