//! The files of the machine, as this tool reads and writes them: sysfs, proc, `/dev`, `/etc`.
//!
//! All paths go through [`Root`], so that tests show another machine: a folder of theirs. What the files say
//! is not trusted: bytes that are no UTF-8 become replacement characters, what is too long is cut, and
//! anything that is missing is `None` or empty.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, StatxFlags};

/// The most that is read of one file. Only a table of mounts could come near it.
const TEXT_BYTES_MAX: u64 = 16 << 20;

/// The folder that stands for `/`.
#[derive(Debug, Clone)]
pub struct Root(PathBuf);

impl Root {
    pub fn of_this_machine() -> Root {
        Root(PathBuf::from("/"))
    }

    /// The machine whose files are in `folder`.
    #[cfg(test)]
    pub fn in_folder(folder: PathBuf) -> Root {
        Root(folder)
    }

    /// Where an absolute path of the machine really is.
    pub fn at(&self, path: &str) -> PathBuf {
        self.0.join(path.trim_start_matches('/'))
    }

    /// The text of a file; `None` when it cannot be read.
    pub fn text(&self, path: &str) -> Option<String> {
        let mut bytes = Vec::new();
        File::open(self.at(path)).ok()?.take(TEXT_BYTES_MAX).read_to_end(&mut bytes).ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The value in an attribute of sysfs, without blanks around it; `None` when there is none.
    pub fn value(&self, path: &str) -> Option<String> {
        let value =
            self.text(path)?.trim_matches(|letter: char| letter.is_whitespace() || letter == '\0').to_owned();
        (!value.is_empty()).then_some(value)
    }

    /// The number in an attribute of sysfs.
    pub fn number(&self, path: &str) -> Option<u64> {
        self.value(path)?.parse().ok()
    }

    /// The names in a folder, sorted; none when it cannot be read. A name that is not UTF-8 is none of ours.
    pub fn names(&self, path: &str) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.at(path)) else { return Vec::new() };
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let mut names: Vec<String> = names.collect();
        names.sort_unstable();
        names
    }

    /// Where a symbolic link points, as it says it; `None` when it is none.
    pub fn link(&self, path: &str) -> Option<String> {
        Some(fs::read_link(self.at(path)).ok()?.to_string_lossy().into_owned())
    }

    /// The device that a path leads to, whatever its name: `b 259:0` for a block device, `c 10:1` for
    /// another. Also by the descriptor of a process.
    pub fn device(&self, path: &str) -> Option<String> {
        #[cfg(test)]
        if let Some(device) = self.value(&format!("/devices-of-the-test{path}")) {
            return Some(device);
        }
        // As the kernel has it: a file server that does not answer is not asked.
        let (flags, mask) = (AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE);
        let statx = rustix::fs::statx(rustix::fs::CWD, self.at(path), flags, mask).ok()?;
        let kind = FileType::from_raw_mode(statx.stx_mode.into());
        let is_device = kind == FileType::BlockDevice || kind == FileType::CharacterDevice;
        let letter = if kind == FileType::BlockDevice { 'b' } else { 'c' };
        is_device.then(|| format!("{letter} {}:{}", statx.stx_rdev_major, statx.stx_rdev_minor))
    }

    /// The last name of where a symbolic link points.
    pub fn link_name(&self, path: &str) -> Option<String> {
        let target = self.link(path)?;
        Some(Path::new(&target).file_name()?.to_string_lossy().into_owned())
    }

    /// True when something is there; a link to nothing is not.
    pub fn has(&self, path: &str) -> bool {
        self.at(path).exists()
    }

    /// Write into a file that is there, as `echo` does: one write, with a newline.
    pub fn echo(&self, path: &str, value: &str) -> io::Result<()> {
        let mut file = File::options().write(true).truncate(true).open(self.at(path))?;
        file.write_all(format!("{value}\n").as_bytes())
    }

    /// Make a file with this text, or give one that is there this text, in one step: a reader sees all or
    /// nothing. Its folder is made if it is missing.
    ///
    /// # Errors
    /// The system's; the file is then as it was.
    pub fn make(&self, path: &str, text: &str) -> io::Result<()> {
        let place = self.at(path);
        if let Some(folder) = place.parent() {
            fs::create_dir_all(folder)?;
        }
        // Not a name that udev or systemd would read.
        let new = self.at(&format!("{path}.new"));
        let made = File::create(&new)
            .and_then(|mut file| {
                file.write_all(text.as_bytes())?;
                file.sync_all()
            })
            .and_then(|()| fs::rename(&new, &place));
        if made.is_err() {
            // It may not be there.
            let _ = fs::remove_file(&new);
        }
        made
    }

    pub fn remove(&self, path: &str) -> io::Result<()> {
        fs::remove_file(self.at(path))
    }
}
