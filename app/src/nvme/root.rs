//! [`Root`]: reads and writes files of the machine: sysfs, proc, `/dev`, `/etc`.
//!
//! All file accesses use [`Root`], so that tests can use a directory instead of `/`. File contents are not
//! trusted: invalid UTF-8 becomes replacement characters, files are read up to [`TEXT_BYTES_MAX`], and a
//! missing file is `None` or empty.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, StatxFlags};

/// Most bytes read of one file. Only a mount table could be this large.
const TEXT_BYTES_MAX: u64 = 16 << 20;

/// The directory that is used as `/`.
#[derive(Debug, Clone)]
pub struct Root(PathBuf);

impl Root {
    pub fn of_this_machine() -> Root {
        Root(PathBuf::from("/"))
    }

    #[cfg(test)]
    pub fn in_folder(folder: PathBuf) -> Root {
        Root(folder)
    }

    /// Returns the path to open for `path`, an absolute path of the machine.
    pub fn at(&self, path: &str) -> PathBuf {
        self.0.join(path.trim_start_matches('/'))
    }

    /// Returns the first [`TEXT_BYTES_MAX`] bytes of a file; `None` if the file cannot be read.
    pub fn text(&self, path: &str) -> Option<String> {
        let mut bytes = Vec::new();
        File::open(self.at(path)).ok()?.take(TEXT_BYTES_MAX).read_to_end(&mut bytes).ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Returns the value of a sysfs attribute without blanks and NULs at its ends; `None` if the value is
    /// empty or cannot be read.
    pub fn value(&self, path: &str) -> Option<String> {
        let value =
            self.text(path)?.trim_matches(|letter: char| letter.is_whitespace() || letter == '\0').to_owned();
        (!value.is_empty()).then_some(value)
    }

    /// Returns the decimal number in a sysfs attribute; `None` for any other content.
    pub fn number(&self, path: &str) -> Option<u64> {
        self.value(path)?.parse().ok()
    }

    /// The names in a directory, sorted; empty if the directory cannot be read. Skips names not in UTF-8.
    pub fn names(&self, path: &str) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.at(path)) else { return Vec::new() };
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let mut names: Vec<String> = names.collect();
        names.sort_unstable();
        names
    }

    /// Returns the target of a symbolic link, not resolved further; `None` for other files.
    pub fn link(&self, path: &str) -> Option<String> {
        Some(fs::read_link(self.at(path)).ok()?.to_string_lossy().into_owned())
    }

    /// Returns type and number of the device at a path, after symbolic links: `b 259:0` for a block device,
    /// `c 10:1` for a character device. `None` for other files. Works for `/proc/PID/fd/N`.
    pub fn device(&self, path: &str) -> Option<String> {
        #[cfg(test)]
        if let Some(device) = self.value(&format!("/devices-of-the-test{path}")) {
            return Some(device);
        }
        // Cached attributes, so that a network file system whose server does not answer cannot block.
        let (flags, mask) = (AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE);
        let statx = rustix::fs::statx(rustix::fs::CWD, self.at(path), flags, mask).ok()?;
        let kind = FileType::from_raw_mode(statx.stx_mode.into());
        let is_device = kind == FileType::BlockDevice || kind == FileType::CharacterDevice;
        let letter = if kind == FileType::BlockDevice { 'b' } else { 'c' };
        is_device.then(|| format!("{letter} {}:{}", statx.stx_rdev_major, statx.stx_rdev_minor))
    }

    /// Returns the file name of a symbolic link's target; `None` for other files.
    pub fn link_name(&self, path: &str) -> Option<String> {
        let target = self.link(path)?;
        Some(Path::new(&target).file_name()?.to_string_lossy().into_owned())
    }

    /// Whether the path exists, after symbolic links.
    pub fn has(&self, path: &str) -> bool {
        self.at(path).exists()
    }

    /// Writes to an existing file as `echo` does: one write, with a newline.
    pub fn echo(&self, path: &str, value: &str) -> io::Result<()> {
        let mut file = File::options().write(true).truncate(true).open(self.at(path))?;
        file.write_all(format!("{value}\n").as_bytes())
    }

    /// Creates or replaces a file atomically, by a rename. Creates its directory if missing.
    ///
    /// # Errors
    /// Those of the system; the file is unchanged.
    pub fn make(&self, path: &str, text: &str) -> io::Result<()> {
        let file = self.at(path);
        if let Some(folder) = file.parent() {
            fs::create_dir_all(folder)?;
        }
        // udev and systemd ignore files with this suffix.
        let new = self.at(&format!("{path}.new"));
        let made = File::create(&new)
            .and_then(|mut file| {
                file.write_all(text.as_bytes())?;
                file.sync_all()
            })
            .and_then(|()| fs::rename(&new, &file));
        if made.is_err() {
            // Fails when the new file was not created.
            let _ = fs::remove_file(&new);
        }
        made
    }

    pub fn remove(&self, path: &str) -> io::Result<()> {
        fs::remove_file(self.at(path))
    }
}
