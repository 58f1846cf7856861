//! Atomic replacement of the configuration file: after a loss of power or a kill the file has the old text or
//! the new text, unless the file is itself a mount point. Also [`difference`], for an error message.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// New text in a temporary file next to the file that [`Staged::commit`] replaces. Dropped without `commit`,
/// it removes the temporary file.
pub struct Staged {
    file: PathBuf,
    temporary: PathBuf,
    is_committed: bool,
}

impl Staged {
    /// Writes and syncs `text`, with the permissions of `file` and, if this process may set it, its owner.
    ///
    /// # Errors
    /// Those of the system; the temporary file is removed.
    pub fn new(file: &Path, text: &str) -> io::Result<Staged> {
        // Keeps a symbolic link and replaces the file to which it points.
        let file = std::fs::canonicalize(file)?;
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let temporary = file.with_file_name(format!(".{name}.new"));
        let was = std::fs::metadata(&file)?;
        // A killed process may have left one.
        match std::fs::remove_file(&temporary) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            Ok(()) | Err(_) => {}
        }
        // O_EXCL: what another user puts there meanwhile, for example a symbolic link, is not written to.
        let mut written = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
        let staged = Staged { file, temporary, is_committed: false };
        let now = written.metadata()?;
        if (now.uid(), now.gid()) != (was.uid(), was.gid()) {
            // Only root may change the owner. Otherwise the file belongs to the user of this process.
            let _ = std::os::unix::fs::fchown(&written, Some(was.uid()), Some(was.gid()));
        }
        written.set_permissions(std::fs::Permissions::from_mode(was.permissions().mode() & 0o7777))?;
        written.write_all(text.as_bytes())?;
        written.sync_all()?;
        Ok(staged)
    }

    /// Renames the temporary file over the file. A file that is a mount point cannot be replaced, and is
    /// written in place: a loss of power may leave a part of the new text in it.
    ///
    /// # Errors
    /// Those of the system; the file has its old text. A failed sync of the directory is only logged: the
    /// file has the new text, but may have the old one after a loss of power.
    pub fn commit(mut self) -> io::Result<()> {
        match std::fs::rename(&self.temporary, &self.file) {
            Err(error) if error.kind() == ErrorKind::ResourceBusy => return self.write_in_place(),
            renamed => renamed?,
        }
        self.is_committed = true;
        let directory = self.file.parent().unwrap_or(Path::new("/"));
        if let Err(error) = File::open(directory).and_then(|directory| directory.sync_all()) {
            let directory = directory.display();
            tracing::warn!(%directory, %error, "the configuration's directory cannot be synced");
        }
        Ok(())
    }

    /// Writes the text of the temporary file into the file, or its old text if that fails.
    fn write_in_place(&self) -> io::Result<()> {
        let (old, new) = (std::fs::read(&self.file)?, std::fs::read(&self.temporary)?);
        overwrite(&self.file, &new).map_err(|error| match overwrite(&self.file, &old) {
            Ok(()) => io::Error::new(
                error.kind(),
                format!("{error} (the file is a mount point and was written in place)"),
            ),
            Err(second) => io::Error::other(format!(
                "{error} (the file is a mount point and was written in place), and its old text cannot be \
                 restored: {second}"
            )),
        })
    }
}

fn overwrite(file: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).open(file)?;
    file.write_all(bytes)?;
    file.set_len(bytes.len() as u64)?;
    file.sync_all()
}

impl Drop for Staged {
    fn drop(&mut self) {
        if !self.is_committed {
            let _ = std::fs::remove_file(&self.temporary);
        }
    }
}

/// Returns the lines that only one of the texts has, at most 10 of each. `-` marks lines of `before`, `+`
/// lines of `after`. Without such a line, returns a text that says so.
pub fn difference(before: &str, after: &str) -> String {
    const LINES_MAX: usize = 10;
    let only = |of: &str, other: &str, mark: char| -> Vec<String> {
        let others: Vec<&str> = other.lines().collect();
        let own = of.lines().filter(|line| !others.contains(line)).take(LINES_MAX);
        own.map(|line| format!("{mark}{line}")).collect()
    };
    let lines = [only(before, after, '-'), only(after, before, '+')].concat();
    if lines.is_empty() {
        "only the order of lines or empty lines differ".to_owned()
    } else {
        lines.join("\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directory(test: &str) -> PathBuf {
        let directory = std::env::temp_dir().join(format!("spindle-store-{test}-{}", uuid::Uuid::new_v4()));
        std::fs::create_dir_all(&directory).expect("a directory");
        directory
    }

    #[test]
    fn a_commit_replaces_the_file_keeps_its_mode_and_follows_a_symlink() {
        let directory = directory("commit");
        let (file, link) = (directory.join("real.toml"), directory.join("link.toml"));
        std::fs::write(&file, "old").expect("written");
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o640)).expect("set");
        std::os::unix::fs::symlink(&file, &link).expect("a link");
        std::fs::write(directory.join(".real.toml.new"), "left by a killed process, and longer")
            .expect("written");
        let staged = Staged::new(&link, "new").expect("staged");
        assert_eq!(std::fs::read_to_string(&file).expect("read"), "old");
        staged.commit().expect("renamed");
        assert_eq!(std::fs::read_to_string(&file).expect("read"), "new");
        assert_eq!(std::fs::metadata(&file).expect("there").permissions().mode() & 0o7777, 0o640);
        assert!(std::fs::symlink_metadata(&link).expect("there").is_symlink());
        assert_eq!(std::fs::read_dir(&directory).expect("a directory").count(), 2);
        std::fs::remove_dir_all(directory).expect("removed");
    }

    #[test]
    fn a_link_where_the_temporary_file_goes_is_replaced_and_not_followed() {
        let directory = directory("link");
        let (file, other) = (directory.join("a.toml"), directory.join("other"));
        std::fs::write(&file, "old").expect("written");
        std::fs::write(&other, "of another").expect("written");
        std::os::unix::fs::symlink(&other, directory.join(".a.toml.new")).expect("a link");
        Staged::new(&file, "new").and_then(Staged::commit).expect("written");
        assert_eq!(std::fs::read_to_string(&file).expect("read"), "new");
        assert_eq!(std::fs::read_to_string(&other).expect("read"), "of another");
        std::fs::remove_dir_all(directory).expect("removed");
    }

    #[test]
    fn what_is_not_committed_leaves_nothing() {
        let directory = directory("drop");
        let file = directory.join("a.toml");
        std::fs::write(&file, "old").expect("written");
        drop(Staged::new(&file, "new").expect("staged"));
        assert_eq!(std::fs::read_to_string(&file).expect("read"), "old");
        assert_eq!(std::fs::read_dir(&directory).expect("a directory").count(), 1);
        assert!(Staged::new(&directory.join("none.toml"), "new").is_err());
        std::fs::remove_dir_all(directory).expect("removed");
    }

    #[test]
    fn a_difference_has_the_lines_of_both() {
        assert_eq!(difference("a\nb\nc", "a\nx\nc"), "-b\n+x");
        assert!(difference("a\nb", "b\na").contains("order"));
    }
}
