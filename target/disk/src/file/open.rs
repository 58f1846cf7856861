//! Opens the file or block device of a disk: checks exclusive use, size, direct I/O, polling and hole
//! punching. Also the settings and properties of a file disk.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{AtFlags, FallocateFlags, Mode, OFlags, SeekFrom, StatxFlags};
use rustix::io::Errno;

use crate::OpenError;
use crate::lock::{Busy, check_exports, lock};
use crate::shape::{checked_blocks, size_refusal};

/// Alignment of pool buffers in bytes. A file that needs a larger alignment cannot use direct I/O.
const MEMORY_ALIGN_BYTES: u32 = 4096;

/// Settings of a file disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileSpec {
    /// Path of a regular file or a block device.
    pub path: PathBuf,
    /// Bytes of a logical block: 512 or 4096. With direct I/O, at least the file's alignment.
    pub block_bytes: u32,
    /// Size in bytes of a sparse file, which is created if the file is missing or empty. A file that is not
    /// empty keeps its size. `None`: the file must exist.
    pub create_bytes: Option<u64>,
    /// The disk is read-only. Several read-only disks may share a file.
    pub is_read_only: bool,
    /// Bypass the page cache (`O_DIRECT`) if the file system supports it.
    pub is_direct: bool,
    /// Poll the device for completions of reads and writes instead of using interrupts. Needs a block device
    /// with poll queues, and direct I/O.
    pub is_polled: bool,
}

impl FileSpec {
    /// Returns the settings of a writable disk with direct I/O on the existing file at `path`.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>, block_bytes: u32) -> FileSpec {
        FileSpec {
            path: path.into(),
            block_bytes,
            create_bytes: None,
            is_read_only: false,
            is_direct: true,
            is_polled: false,
        }
    }
}

/// Properties of the open file of a disk, for the log.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FileFacts {
    /// True for a block device, false for a regular file.
    pub is_block_device: bool,
    /// I/O bypasses the page cache.
    pub is_direct: bool,
    /// The file was created, or was empty and was extended.
    pub is_new: bool,
    /// Differences from the requested settings with their reasons, one sentence each.
    pub notes: Vec<String>,
}

/// An open and locked file.
pub(super) struct Opened {
    pub(super) file: File,
    pub(super) facts: FileFacts,
    pub(super) block_count: u64,
    /// Holes can be punched; false for a read-only disk.
    pub(super) can_punch: bool,
}

struct Opening<'a> {
    disk: &'a str,
    spec: &'a FileSpec,
    busy: Busy<'a>,
    facts: FileFacts,
}

/// Opens and locks the file of `spec`. Creates a missing file if `spec` has `create_bytes`.
///
/// The lock is retried for `lock_wait`. A former process may be dead while the kernel still ends the I/O in
/// flight of its rings. The lock remains meanwhile: this I/O must not follow new writes.
pub(super) fn open(disk: &str, spec: &FileSpec, lock_wait: Duration) -> Result<Opened, OpenError> {
    // Checks size and block size before a file is created. Without `create_bytes`, 4096 is a valid size.
    checked_blocks(disk, spec.create_bytes.unwrap_or(4096), spec.block_bytes)?;
    Opening { disk, spec, busy: Busy::new(disk, &spec.path, lock_wait), facts: FileFacts::default() }.run()
}

impl Opening<'_> {
    fn run(mut self) -> Result<Opened, OpenError> {
        let path = &self.spec.path;
        let exists = match std::fs::metadata(path) {
            Ok(metadata) => {
                let kind = metadata.file_type();
                self.facts.is_block_device = kind.is_block_device();
                if !kind.is_file() && !kind.is_block_device() {
                    return self.refuse("path", path.display(), "must be a regular file or a block device");
                }
                true
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound && self.spec.create_bytes.is_some() => {
                false
            }
            Err(error) => return Err(self.system("stat", error)),
        };
        if !exists {
            self.create()?;
        } else if !self.spec.is_read_only {
            check_exports(self.disk, "path", path, path)?;
        }
        let path = &self.spec.path;
        let opened = self.open_existing();
        if !exists && opened.is_err() {
            // The file was created above and is unusable.
            let _ = std::fs::remove_file(path);
        }
        opened
    }

    /// Creates an empty file, without `O_DIRECT`: a file system that refuses the flag may create the file
    /// before the call fails.
    fn create(&self) -> Result<(), OpenError> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::CREATE | OFlags::EXCL;
        let made = rustix::fs::open(&self.spec.path, flags, Mode::RUSR | Mode::WUSR);
        made.map(drop).map_err(|error| self.system("make", error))
    }

    fn open_existing(mut self) -> Result<Opened, OpenError> {
        let file = self.open_file()?;
        lock(&file, self.spec.is_read_only, &self.busy).map_err(|error| self.system("lock", error))?;
        let bytes = self.size(&file)?;
        let block_bytes = self.spec.block_bytes;
        if self.facts.is_direct {
            self.check_alignment(&file)?;
        }
        // A block device may end with a partial block, which hosts do not see. A regular file that ends with
        // a partial block is refused, because it was not created for this disk.
        let bytes = if self.facts.is_block_device { bytes - bytes % u64::from(block_bytes) } else { bytes };
        if let Some(allowed) = size_refusal(bytes, block_bytes) {
            return self.refuse("size of the file", bytes, &allowed);
        }
        if self.spec.is_polled {
            self.check_polled(&file)?;
        }
        let can_punch = !self.spec.is_read_only && self.can_punch(&file, bytes);
        Ok(Opened { file, facts: self.facts, block_count: bytes / u64::from(block_bytes), can_punch })
    }

    fn refuse<T>(&self, field: &'static str, value: impl ToString, allowed: &str) -> Result<T, OpenError> {
        Err(OpenError::setting(self.disk, field, value, allowed))
    }

    fn system(&self, verb: &str, source: impl Into<io::Error>) -> OpenError {
        OpenError::system(self.disk, format!("{verb} {}", self.spec.path.display()), source)
    }

    /// Opens the file, with `O_DIRECT` if requested and not refused. Retries EBUSY until the deadline.
    fn open_file(&mut self) -> Result<File, OpenError> {
        let (access, verb) = match self.spec.is_read_only {
            true => (OFlags::RDONLY, "open for reading"),
            false => (OFlags::RDWR, "open for reading and writing"),
        };
        let mut flags = access | OFlags::CLOEXEC;
        if self.facts.is_block_device {
            // EBUSY: the device is mounted, or another process has opened it exclusively.
            flags |= OFlags::EXCL;
        }
        let path = &self.spec.path;
        if self.spec.is_direct {
            match self.busy.retry(|| rustix::fs::open(path, flags | OFlags::DIRECT, Mode::empty())) {
                Ok(file) => {
                    self.facts.is_direct = true;
                    return Ok(File::from(file));
                }
                Err(Errno::INVAL) => self.use_page_cache("its file system refuses O_DIRECT"),
                Err(error) => return Err(self.system(verb, error)),
            }
        }
        let opened = self.busy.retry(|| rustix::fs::open(path, flags, Mode::empty()));
        opened.map(File::from).map_err(|error| self.system(verb, error))
    }

    fn use_page_cache(&mut self, reason: &str) {
        self.facts.is_direct = false;
        let path = self.spec.path.display();
        self.facts.notes.push(format!("{path} goes through the page cache, because {reason}"));
    }

    /// Returns the size in bytes. Extends an empty regular file to `create_bytes`.
    fn size(&mut self, file: &File) -> Result<u64, OpenError> {
        let bytes = size_now(file, self.facts.is_block_device)
            .map_err(|error| self.system("read the size of", error))?;
        let Some(wanted) = self.spec.create_bytes else { return Ok(bytes) };
        if bytes == wanted {
            return Ok(bytes);
        }
        if bytes > 0 || self.facts.is_block_device {
            let path = self.spec.path.display();
            let note =
                format!("{path} has {bytes} bytes and keeps this size; the size {wanted} is for a new file");
            self.facts.notes.push(note);
            return Ok(bytes);
        }
        self.give_size(file, wanted)
            .map_err(|error| self.system(&format!("set a size of {wanted} bytes for"), error))?;
        self.facts.is_new = true;
        Ok(wanted)
    }

    /// Extends an empty file to `bytes` and makes its size and directory entry durable.
    fn give_size(&self, file: &File, bytes: u64) -> io::Result<()> {
        if self.spec.is_read_only {
            // `file` is open for reading only.
            File::options().write(true).open(&self.spec.path)?.set_len(bytes)?;
        } else {
            file.set_len(bytes)?;
        }
        file.sync_all()?;
        let folder = match self.spec.path.parent() {
            Some(folder) if folder != Path::new("") => folder,
            _ => Path::new("."),
        };
        match File::open(folder)?.sync_all() {
            // The file system does not support fsync of directories.
            Err(error) if Errno::from_io_error(&error) == Some(Errno::INVAL) => Ok(()),
            other => other,
        }
    }

    /// Refuses blocks smaller than the alignment of direct I/O. Uses the page cache if direct I/O fails.
    fn check_alignment(&mut self, file: &File) -> Result<(), OpenError> {
        let block_bytes = self.spec.block_bytes;
        if let Some((memory, offset)) = direct_alignment(file) {
            if offset == 0 {
                self.use_page_cache("its file system has no direct I/O for it");
                return self.clear_o_direct(file);
            }
            if memory > MEMORY_ALIGN_BYTES {
                self.use_page_cache("direct I/O requires buffers aligned to more than 4096 bytes");
                return self.clear_o_direct(file);
            }
            if offset > block_bytes {
                return self.refuse_block_bytes(offset);
            }
        } else if self.facts.is_block_device {
            let offset =
                rustix::fs::ioctl_blksszget(file).map_err(|e| self.system("read the block size of", e))?;
            if offset > block_bytes {
                return self.refuse_block_bytes(offset);
            }
        }
        // The reported alignment is not always correct, so reads test it.
        match (read_aligned(file, block_bytes), read_aligned(file, MEMORY_ALIGN_BYTES)) {
            (Err(Errno::INVAL), Ok(_)) => self.refuse_block_bytes(MEMORY_ALIGN_BYTES),
            (Err(Errno::INVAL), Err(_)) => {
                self.use_page_cache("its file system refuses direct reads");
                self.clear_o_direct(file)
            }
            _ => Ok(()),
        }
    }

    fn refuse_block_bytes(&self, least: u32) -> Result<(), OpenError> {
        let path = self.spec.path.display();
        let allowed = format!("must be at least {least}, the alignment that direct I/O on {path} requires");
        self.refuse("block_bytes", self.spec.block_bytes, &allowed)
    }

    /// Clears `O_DIRECT` on the open file description. The lock remains.
    fn clear_o_direct(&self, file: &File) -> Result<(), OpenError> {
        let without = |flags: OFlags| rustix::fs::fcntl_setfl(file, flags - OFlags::DIRECT);
        rustix::fs::fcntl_getfl(file)
            .and_then(without)
            .map_err(|error| self.system("clear O_DIRECT on", error))
    }

    /// Refuses polling unless the file is a block device with poll queues and uses direct I/O.
    fn check_polled(&self, file: &File) -> Result<(), OpenError> {
        let path = self.spec.path.display();
        if !self.facts.is_block_device {
            return self.refuse("poll", true, &format!("must be false: {path} is no block device"));
        }
        if !self.facts.is_direct {
            return self.refuse("poll", true, &format!("must be false: {path} goes through the page cache"));
        }
        if queue_limit(file, "io_poll") == 0 {
            let allowed = format!(
                "must be false: {path} has no queues to poll (queue/io_poll is 0); for an NVMe drive \
                 nvme.poll_queues=N on the kernel's command line makes N"
            );
            return self.refuse("poll", true, &allowed);
        }
        Ok(())
    }

    /// Returns true if holes can be punched. Test of a block device: its queue limits. Test of a regular
    /// file: a punch beyond the end, which has no effect.
    fn can_punch(&self, file: &File, bytes: u64) -> bool {
        if self.facts.is_block_device {
            return queue_limit(file, "discard_max_bytes") > 0
                && queue_limit(file, "write_zeroes_max_bytes") > 0;
        }
        let end = bytes.next_multiple_of(u64::from(MEMORY_ALIGN_BYTES));
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(file, flags, end, u64::from(MEMORY_ALIGN_BYTES)).is_ok()
    }
}

/// Returns the current size of a file or block device in bytes.
pub(super) fn size_now(file: &File, is_block_device: bool) -> io::Result<u64> {
    if is_block_device {
        return Ok(rustix::fs::seek(file, SeekFrom::End(0))?);
    }
    Ok(file.metadata()?.len())
}

/// Returns true if `path` still refers to the open file or device.
pub(super) fn is_still_at(file: &File, path: &Path, is_block_device: bool) -> io::Result<bool> {
    let (open, there) = (file.metadata()?, std::fs::metadata(path)?);
    Ok(if is_block_device {
        there.file_type().is_block_device() && open.rdev() == there.rdev()
    } else {
        (open.dev(), open.ino()) == (there.dev(), there.ino())
    })
}

/// Returns the memory and offset alignment of direct I/O in bytes. `None` if the kernel (before 6.1) or the
/// file system does not report them.
fn direct_alignment(file: &File) -> Option<(u32, u32)> {
    let statx = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
    let is_reported = StatxFlags::from_bits_retain(statx.stx_mask).contains(StatxFlags::DIOALIGN);
    is_reported.then_some((statx.stx_dio_mem_align, statx.stx_dio_offset_align))
}

/// Reads the first `bytes` of the file into memory aligned to [`MEMORY_ALIGN_BYTES`]. Returns the bytes read.
fn read_aligned(file: &File, bytes: u32) -> Result<usize, Errno> {
    let (align, bytes) = (MEMORY_ALIGN_BYTES as usize, bytes as usize);
    let mut memory = vec![0u8; align + bytes];
    let start = memory.as_ptr().align_offset(align);
    rustix::io::pread(file, &mut memory[start..start + bytes], 0)
}

/// Returns a limit of a block device's queue in sysfs; for a partition, the limit of its disk. 0 if unknown.
fn queue_limit(file: &File, name: &str) -> u64 {
    let Ok(metadata) = file.metadata() else { return 0 };
    let (major, minor) = (rustix::fs::major(metadata.rdev()), rustix::fs::minor(metadata.rdev()));
    let folder = format!("/sys/dev/block/{major}:{minor}");
    let read = |folder: &str| std::fs::read_to_string(format!("{folder}/queue/{name}")).ok();
    let text = read(&folder).or_else(|| read(&format!("{folder}/..")));
    text.and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}
