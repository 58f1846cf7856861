//! What is changed on the machine: single steps, each a line that a person could type.
//!
//! A plan is a list of steps before any is made, so that `--dry-run` prints just what would be done.

use std::any::Any;
use std::fmt;
use std::io;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::root::Root;

/// Between two looks at a controller that gets ready, of which sysfs tells no event.
const PAUSE: Duration = Duration::from_millis(100);

/// One change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    Load(&'static str),
    /// Write a value into a file of the kernel's. An empty one clears it.
    Echo {
        path: String,
        value: String,
    },
    /// Make a file, or replace it.
    Make {
        path: String,
        /// All of its text, of whole lines.
        text: String,
    },
    Remove {
        path: String,
    },
}

impl Step {
    /// Write `value` into `path`.
    pub fn echo(path: impl Into<String>, value: impl Into<String>) -> Step {
        Step::Echo { path: path.into(), value: value.into() }
    }
}

impl fmt::Display for Step {
    /// As a shell takes it.
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

/// Whether somebody uses a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Busy {
    No,
    Yes,
    /// It does not say; why.
    Unknown(String),
}

/// What is held until it is dropped.
pub type Held = Box<dyn Any>;

/// The machine that is looked at and changed.
pub trait Machine {
    fn root(&self) -> &Root;

    /// Whether this process may change it.
    fn is_privileged(&self) -> bool;

    /// The path of this program, for rules that run it.
    fn program(&self) -> io::Result<String>;

    /// Whether somebody has a block device open exclusively.
    fn ask_exclusive(&self, path: &str) -> Busy;

    /// Have a block device open exclusively until what is returned is dropped, so that it is not mounted or
    /// taken for a volume meanwhile.
    ///
    /// # Errors
    /// The system's: `EBUSY` where somebody has it.
    fn hold(&self, path: &str) -> io::Result<Held>;

    /// Whether a process has a VFIO group open; a group is open once at a time.
    fn ask_group(&self, path: &str) -> Busy;

    /// Wait a little for what the kernel does meanwhile.
    fn pause(&self);

    /// Make one change.
    ///
    /// # Errors
    /// The system's; the step then had no effect.
    fn apply(&self, step: &Step) -> io::Result<()>;
}

#[derive(Debug)]
pub struct ThisMachine(Root);

impl ThisMachine {
    pub fn new() -> ThisMachine {
        ThisMachine(Root::of_this_machine())
    }

    /// Opens a device for a moment; `EBUSY` says that somebody has it.
    fn ask(&self, path: &str, flags: OFlags) -> Busy {
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

    fn ask_exclusive(&self, path: &str) -> Busy {
        self.ask(path, OFlags::RDONLY | OFlags::EXCL)
    }

    fn hold(&self, path: &str) -> io::Result<Held> {
        let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NONBLOCK;
        Ok(Box::new(rustix::fs::open(self.0.at(path), flags, Mode::empty())?))
    }

    fn ask_group(&self, path: &str) -> Busy {
        self.ask(path, OFlags::RDWR)
    }

    fn pause(&self) {
        std::thread::sleep(PAUSE);
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

/// `modprobe`, whose reason is the error's.
fn load(module: &str) -> io::Result<()> {
    let run = |program: &str| Command::new(program).arg(module).stdin(Stdio::null()).output();
    // Of a user who became root by `su`, the search path may lack it.
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
