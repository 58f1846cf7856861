//! The configuration: one TOML file, parsed into a tree of values, validated into a [`Plan`], and compared
//! with the running plan on a reload.
//!
//! ```text
//!   file ── document (against schema) ──> Node ── validate (against itself and the Machine) ──> Plan
//!                                                                                                │
//!            ┌── memory: bytes, by reason          <── check ──────────────────────────────────────┤
//!            ├── changes: effects of a reload      <── serve on a reload, check --against ─────────┤
//!            └── snapshot: disks opened, a Snapshot for all cores  <── serve, at start and reload ─┘
//! ```
//!
//! A change by the control socket edits [`sections`] of the text. Those that stay keep their `Node`, and
//! disks their validated plan: what does not change is not checked against the machine again.
//!
//! A reload is caused by SIGHUP or by a method of the control socket; start and reload use the same code.
//! Errors are collected and reported together, each with file, line, field, value and the allowed values.
//! Only `snapshot` changes the machine: it creates files and changes their sizes.
//!
//! Limits of values are in [`schema`]. The count of disks, listeners and subsystems is bounded by the size of
//! the file ([`TEXT_BYTES_MAX`]) and by memory.

mod changes;
pub mod comments;
mod disk_table;
mod document;
mod error;
mod kind;
mod machine;
mod memory;
mod origin;
mod path_probe;
mod plan;
mod schema;
mod sections;
mod snapshot;
#[cfg(test)]
mod tests;
mod tree;
mod validate;

use std::cell::RefCell;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use spindle_reactor::mem::ResidentBytes;

pub use changes::{Change, Hosts, RunningState};
pub use error::ConfigErrors;
pub use kind::{Kind, Scalar};
use machine::Machine;
pub use machine::group_id;
pub use memory::{AllocationPhase, memory_items, total_bytes};
#[cfg(test)]
pub use origin::{DriveSource, LocalDrives, RemotePlan};
pub use origin::{Opened, OpenedOrigin, Origin, Origins};
#[cfg(test)]
pub use path_probe::tests::Hung;
#[cfg(test)]
pub use plan::DiskMedium;
pub use plan::{
    DiskKind, DiskPlan, ListenerPlan, LogFormat, LogPlan, Plan, SubsystemPlan, TcpPlan, cache_text,
    connect_line, delay_text, reachable_address,
};
use schema::EXAMPLE;
pub use schema::reference;
/// Kinds of keys that methods of the control socket write.
pub mod kinds {
    pub use super::schema::{BLOCK_BYTES, CNTLID, FAR_NSID, NSID};
    pub use super::tree::{CACHE_MODE, CACHE_POLICY, TRANSPORT};
}

pub use sections::{Kind as SectionKind, Section, Sections};
pub use snapshot::SnapshotError;

pub use validate::subsystems::default_listener_name;

use crate::size::Bytes;

/// The NQN of the built-in configuration and of the examples.
pub const NQN_EXAMPLE: &str = "nqn.2026-01.io.spindle:default";

/// A validated configuration with the text and the file that it was read from.
#[derive(Debug, Clone)]
pub struct Config {
    source: Option<PathBuf>,
    text: String,
    /// `text`, cut when the first change asks for it.
    sections: OnceLock<Sections>,
    plan: Arc<Plan>,
}

impl Config {
    /// Reads and validates the file at `path` for the start, against the current state of the machine.
    pub fn load(path: &Path) -> Result<Config, ConfigErrors> {
        Config::read(path, &Machine::detect())
    }

    /// Validates `text`, the new text of the file, for a reload. `retired` is the memory of removed disks
    /// that this process has not given back yet. If the machine no longer allows a disk that does not change,
    /// the disk stays as it is, and the plan has notes.
    pub fn load_again(&self, text: String, retired: ResidentBytes) -> Result<Config, ConfigErrors> {
        self.load_again_on(text, &Machine::detect().beside(retired))
    }

    fn load_again_on(&self, text: String, machine: &Machine) -> Result<Config, ConfigErrors> {
        let refused = match parse_beside(&text, self.path(), machine, Some(self.plan()), &[]) {
            Ok(plan) => return Ok(self.with_plan(text, OnceLock::new(), plan)),
            Err(refused) => refused,
        };
        let (Ok(own), Ok(mut sections)) = (self.sections(), Sections::cut(&text)) else {
            return Err(refused);
        };
        sections.keep_disks(own);
        let known = sections.disk_plans();
        let mut plan = parse_beside(&text, self.path(), machine, Some(self.plan()), &known)?;
        let notes = refused.lines().map(|line| format!("disks that do not change stay as they are: {line}"));
        plan.notes.extend(notes);
        Ok(self.with_plan(text, sections.into(), plan))
    }

    fn with_plan(&self, text: String, sections: OnceLock<Sections>, plan: Plan) -> Config {
        Config { source: self.source.clone(), text, sections, plan: Arc::new(plan) }
    }

    fn path(&self) -> &Path {
        self.source.as_deref().unwrap_or(Path::new("configuration"))
    }

    /// As [`Config::load`], for `spindle check`. Too little available memory is a note in the plan, because a
    /// running target may use that memory. An absent drive is an error.
    pub fn examine(path: &Path) -> Result<Config, ConfigErrors> {
        Config::read(path, &Machine { is_for_start: false, ..Machine::detect() })
    }

    fn read(path: &Path, machine: &Machine) -> Result<Config, ConfigErrors> {
        let text = text_of(path).map_err(|error| ConfigErrors::unreadable(path, &error))?;
        let plan = Arc::new(parse(&text, path, machine)?);
        Ok(Config { source: Some(path.to_owned()), text, sections: OnceLock::new(), plan })
    }

    #[cfg(test)]
    pub fn of(text: &str) -> Config {
        let plan = parse(text, Path::new("t.toml"), &Machine::with_unlimited_memory());
        let plan = Arc::new(plan.unwrap_or_else(|errors| panic!("{errors}")));
        Config { source: None, text: text.to_owned(), sections: OnceLock::new(), plan }
    }

    /// Returns the configuration without a file, `conf/spindle.toml`: one RAM disk of 1 GiB for any host on
    /// 127.0.0.1:4420.
    pub fn builtin() -> Config {
        // The RAM disk allocates memory on write, so a machine with less than 1 GiB can start with it.
        let plan = parse(EXAMPLE, Path::new("the built-in configuration"), &Machine::with_unlimited_memory());
        let plan = plan.unwrap_or_else(|errors| panic!("{errors}"));
        Config { source: None, text: EXAMPLE.to_owned(), sections: OnceLock::new(), plan: Arc::new(plan) }
    }

    /// Validates `sections`, what has changed in them also against the machine. The result has the source
    /// file of this configuration. `retired` as of [`Config::load_again`].
    pub fn with_sections(&self, sections: Sections, retired: ResidentBytes) -> Result<Config, ConfigErrors> {
        let (path, in_force) = (self.path(), Some(self.plan()));
        let (text, machine) = (sections.text(), Machine::detect().beside(retired));
        // The next start would not read it.
        check_length(text.len() as u64).map_err(|error| ConfigErrors::unreadable(path, &error))?;
        let known = sections.disk_plans();
        let errors = RefCell::new(Vec::new());
        let plan = sections.read(&errors).map(|root| validate::plan(&root, &machine, in_force, &errors));
        let plan = match plan {
            Some(plan) if errors.borrow().is_empty() => plan,
            // For the lines of the errors.
            _ => parse_beside(&text, path, &machine, in_force, &known)?,
        };
        #[cfg(test)]
        assert_eq!(
            parse_beside(&text, path, &machine, in_force, &known).as_ref(),
            Ok(&plan),
            "as the text says:\n{text}"
        );
        Ok(self.with_plan(text, sections.into(), plan))
    }

    /// Returns this configuration with a disk validated against the machine again, for one that was away.
    pub fn with_disk_again(&self, name: &str, retired: ResidentBytes) -> Result<Config, ConfigErrors> {
        let error = |error: toml_edit::TomlError| {
            ConfigErrors::unreadable(self.path(), &io::Error::other(error.to_string()))
        };
        let mut sections = self.sections().map_err(error)?.clone();
        sections.forget_disk_plan(name);
        let Config { plan, sections, .. } = self.with_sections(sections, retired)?;
        Ok(Config { source: self.source.clone(), text: self.text.clone(), sections, plan })
    }

    /// Records at the start that these disks could not be opened: they are opened later.
    pub fn set_away(&mut self, names: &[String]) {
        if names.is_empty() {
            return;
        }
        let plan = Arc::make_mut(&mut self.plan);
        for disk in plan.disks.iter_mut().filter(|disk| names.contains(&disk.name)) {
            Arc::make_mut(disk).medium.is_away = true;
        }
    }

    /// Returns the sections of the text, for a change.
    ///
    /// # Errors
    /// The text is not TOML, which it was when it was read.
    pub fn sections(&self) -> Result<&Sections, toml_edit::TomlError> {
        match self.sections.get() {
            Some(sections) => Ok(sections),
            None => {
                let sections = Sections::cut(&self.text)?;
                sections.set_disk_plans(&self.plan.disks);
                Ok(self.sections.get_or_init(|| sections))
            }
        }
    }

    pub fn text(&self) -> &str {
        &self.text
    }

    /// Returns the path of the configuration file; `None` for the built-in configuration.
    pub fn source(&self) -> Option<&Path> {
        self.source.as_deref()
    }

    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// As [`Config::plan`], for a reference that outlasts the configuration.
    pub fn shared_plan(&self) -> &Arc<Plan> {
        &self.plan
    }
}

/// Largest configuration file in bytes, enough for thousands of disks. Bounds the read of an endless file.
const TEXT_BYTES_MAX: u64 = 4 << 20;

/// Reads a configuration file. A file of more than [`TEXT_BYTES_MAX`] bytes is an error.
pub fn text_of(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(TEXT_BYTES_MAX + 1).read_to_string(&mut text)?;
    check_length(text.len() as u64)?;
    Ok(text)
}

fn check_length(bytes: u64) -> io::Result<()> {
    if bytes > TEXT_BYTES_MAX {
        let most = Bytes::new(TEXT_BYTES_MAX);
        return Err(io::Error::other(format!("it is longer than {most}, the most that is allowed")));
    }
    Ok(())
}

fn parse(text: &str, file: &Path, machine: &Machine) -> Result<Plan, ConfigErrors> {
    parse_beside(text, file, machine, None, &[])
}

/// As [`parse`], beside the plan in force. `known` has the plans of the disks, in their order, that are not
/// checked against the machine again.
fn parse_beside(
    text: &str,
    file: &Path,
    machine: &Machine,
    in_force: Option<&Plan>,
    known: &[Option<Arc<DiskPlan>>],
) -> Result<Plan, ConfigErrors> {
    let errors = RefCell::new(Vec::new());
    let plan = document::read(text, &errors).map(|root| {
        for (node, known) in root.sections("disk").iter().zip(known) {
            let _ = known.clone().map(|known| node.disk.set(known));
        }
        validate::plan(&root, machine, in_force, &errors)
    });
    match (plan, errors.into_inner()) {
        (Some(plan), errors) if errors.is_empty() => Ok(plan),
        (_, errors) => Err(ConfigErrors::new(file, errors)),
    }
}
