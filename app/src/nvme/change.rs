//! [`Step`]: one change to the machine, printed as the shell command that does the same; and [`Machine`],
//! which applies steps and checks whether devices are in use.
//!
//! `bind` and `unbind` collect steps before they apply them; `--dry-run` prints them instead.

use std::any::Any;
use std::fmt;
use std::io;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::root::Root;

/// Period at which a controller's state is polled while it becomes ready; sysfs has no event for that.
const POLL_PERIOD: Duration = Duration::from_millis(100);

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Loads a kernel module with `modprobe`.
    Load(&'static str),
    /// Writes a value to a sysfs file. An empty value clears `driver_override`.
    Echo {
        path: String,
        value: String,
    },
    /// Creates or replaces a file.
    Make {
        path: String,
        /// Complete lines.
        text: String,
    },
    Remove {
        path: String,
    },
}

impl Step {
    pub fn echo(path: impl Into<String>, value: impl Into<String>) -> Step {
        Step::Echo { path: path.into(), value: value.into() }
    }
}

impl fmt::Display for Step {
    /// Writes the shell command.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Step::Load(module) => write!(f, "modprobe {module}"),
            Step::Echo { path, value } if value.is_empty() => write!(f, "echo > {path}"),
            Step::Echo { path, value } => write!(f, "echo {value} > {path}"),
            Step::Make { path, text } => {
                write!(f, "printf '%s\\n'")?;
                for line in text.lines() {
                    write!(f, " '{}'", line.replace('\'', r"'\''"))?;
                }
                write!(f, " > {path}")
            }
            Step::Remove { path } => write!(f, "rm {path}"),
        }
    }
}

/// Whether a device is in use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Busy {
    No,
    Yes,
    /// The check failed, for this reason.
    Unknown(String),
}

/// A device that is open exclusively until the handle is dropped.
pub type ExclusiveHandle = Box<dyn Any>;

/// The machine that is inspected and changed. Tests have another implementation.
pub trait Machine {
    fn root(&self) -> &Root;

    /// Whether this process runs as root.
    fn is_privileged(&self) -> bool;

    /// Returns the path of this executable, for udev rules.
    fn program(&self) -> io::Result<String>;

    /// Whether a block device is open exclusively (`O_EXCL`) by a mount, a volume or a process.
    fn probe_exclusive(&self, path: &str) -> Busy;

    /// Opens a block device exclusively, so that it cannot be mounted or become part of a volume.
    ///
    /// # Errors
    /// Those of `open(2)`: `EBUSY` when the device is open exclusively already.
    fn open_exclusive(&self, path: &str) -> io::Result<ExclusiveHandle>;

    /// Whether a process has a VFIO group (`/dev/vfio/N`) open; a group can be open only once.
    fn probe_group(&self, path: &str) -> Busy;

    /// Sleeps for the poll period (100 ms).
    fn pause(&self);

    /// # Errors
    /// Those of the system, or the standard error of `modprobe`.
    fn apply(&self, step: &Step) -> io::Result<()>;
}

#[derive(Debug)]
pub struct ThisMachine(Root);

impl ThisMachine {
    pub fn new() -> ThisMachine {
        ThisMachine(Root::of_this_machine())
    }

    /// Opens and closes a device. `EBUSY`: it is in use; any other error is [`Busy::Unknown`].
    fn probe(&self, path: &str, flags: OFlags) -> Busy {
        match rustix::fs::open(self.0.at(path), flags | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty()) {
            Ok(_) => Busy::No,
            Err(Errno::BUSY) => Busy::Yes,
            Err(error) => Busy::Unknown(format!("open {path}: {}", io::Error::from(error))),
        }
    }
}

impl Machine for ThisMachine {
    fn root(&self) -> &Root {
        &self.0
    }

    fn is_privileged(&self) -> bool {
        rustix::process::geteuid().is_root()
    }

    fn program(&self) -> io::Result<String> {
        let path = std::env::current_exe()?;
        path.into_os_string().into_string().map_err(|_| io::Error::other("its path is not UTF-8"))
    }

    fn probe_exclusive(&self, path: &str) -> Busy {
        self.probe(path, OFlags::RDONLY | OFlags::EXCL)
    }

    fn open_exclusive(&self, path: &str) -> io::Result<ExclusiveHandle> {
        let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NONBLOCK;
        Ok(Box::new(rustix::fs::open(self.0.at(path), flags, Mode::empty())?))
    }

    fn probe_group(&self, path: &str) -> Busy {
        self.probe(path, OFlags::RDWR)
    }

    fn pause(&self) {
        std::thread::sleep(POLL_PERIOD);
    }

    fn apply(&self, step: &Step) -> io::Result<()> {
        match step {
            Step::Load(module) => load(module),
            Step::Echo { path, value } => self.0.echo(path, value),
            Step::Make { path, text } => self.0.make(path, text),
            Step::Remove { path } => self.0.remove(path),
        }
    }
}

/// Runs `modprobe`. If it fails, the error is the text of its standard error.
fn load(module: &str) -> io::Result<()> {
    let run = |program: &str| Command::new(program).arg(module).stdin(Stdio::null()).output();
    // After `su` without `-`, the search path may lack /sbin.
    let said = run("modprobe").or_else(|_| run("/sbin/modprobe"))?;
    if said.status.success() {
        return Ok(());
    }
    Err(io::Error::other(String::from_utf8_lossy(&said.stderr).trim().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_printed_as_a_shell_takes_it() {
        let made = Step::Make { path: "/etc/x".into(), text: "# it's\nb \"c\" $d\n".into() };
        for (step, line) in [
            (Step::Load("vfio-pci"), "modprobe vfio-pci"),
            (Step::echo("/sys/a", "b"), "echo b > /sys/a"),
            (Step::echo("/sys/a", ""), "echo > /sys/a"),
            (Step::Remove { path: "/etc/x".into() }, "rm /etc/x"),
            (made, r#"printf '%s\n' '# it'\''s' 'b "c" $d' > /etc/x"#),
        ] {
            assert_eq!(step.to_string(), line);
        }
    }
}
