//! The configuration: one TOML file, read into a tree of checked values, validated into a [`Plan`] that
//! cannot be wrong, and compared with what runs.
//!
//! ```text
//!   file ── document (against schema) ──> Node ── validate (against itself and the Machine) ──> Plan
//!                                                                                                │
//!            ┌── memory: what it takes, by reason  <── check ──────────────────────────────────────┤
//!            ├── changes: what a reload would do   <── serve, SIGHUP ──────────────────────────────┤
//!            └── snapshot: disks opened, a Snapshot for all cores  <── serve, at start and SIGHUP ─┘
//! ```
//!
//! Start and reload take the same road. Every error names file, line, field, value and what is allowed, and
//! all of them are reported at once.
//!
//! What it does not do: it starts nothing (`serve`), and changes nothing on the machine but what `snapshot`
//! says: files that are to be made, and sizes.
//!
//! Limits: those of [`schema`]; disks, listeners and subsystems are as many as memory holds.

mod changes;
mod document;
mod error;
mod machine;
mod memory;
mod origin;
mod plan;
mod schema;
mod snapshot;
#[cfg(test)]
mod tests;
mod tree;
mod validate;

use std::cell::RefCell;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

pub use changes::{Change, Has, Hosts};
pub use error::ConfigErrors;
use machine::Machine;
pub use memory::{When, sums, total};
#[cfg(test)]
pub use origin::{DriveSource, DrivesHere, RemotePlan};
pub use origin::{Found, Opened, Origin, Origins};
pub use plan::{
    DiskKind, DiskPlan, LogFormat, LogPlan, Plan, SubsystemPlan, TcpPlan, cache_words, connect_line,
    delay_words, reachable,
};
pub use schema::{CNTLID_MAX, reference};
pub use snapshot::SnapshotError;

pub use validate::subsystems::named_by;

use crate::size::Bytes;

/// The NQN of the built-in configuration and of the examples.
pub const NQN_EXAMPLE: &str = "nqn.2026-01.io.spindle:default";

/// What runs without a file: `conf/spindle.toml` says the same at length, which a test holds.
const BUILTIN: &str = r#"
[[disk]]
name = "ram0"
kind = "ram"
size = "1GiB"

[[listener]]
address = "127.0.0.1:4420"

[[subsystem]]
nqn = "nqn.2026-01.io.spindle:default"
allow_any_host = true

[[subsystem.namespace]]
nsid = 1
disk = "ram0"
"#;

/// A configuration, read and validated.
#[derive(Debug, Clone)]
pub struct Config {
    source: Option<PathBuf>,
    /// As it was read.
    text: String,
    plan: Plan,
}

impl Config {
    /// Read and validate the file at `path` against this machine as it is now, to be served. For a reload,
    /// again.
    pub fn load(path: &Path) -> Result<Config, ConfigErrors> {
        Config::read(path, &Machine::here())
    }

    /// As [`Config::load`], for a look only: that a target which may be this very one has the memory now is
    /// no error.
    pub fn examine(path: &Path) -> Result<Config, ConfigErrors> {
        Config::read(path, &Machine { is_to_start: false, ..Machine::here() })
    }

    fn read(path: &Path, machine: &Machine) -> Result<Config, ConfigErrors> {
        let text = text_of(path).map_err(|error| ConfigErrors::unreadable(path, &error))?;
        let plan = parse(&text, path, machine)?;
        Ok(Config { source: Some(path.to_owned()), text, plan })
    }

    /// That of a text, for tests.
    #[cfg(test)]
    pub fn of(text: &str) -> Config {
        let plan = parse(text, Path::new("t.toml"), &Machine::with_endless_memory());
        Config { source: None, text: text.to_owned(), plan: plan.unwrap_or_else(|errors| panic!("{errors}")) }
    }

    /// What runs without a file: one RAM disk of 1 GiB for any host on 127.0.0.1:4420.
    pub fn builtin() -> Config {
        // The disk takes memory as it is written, so a machine with less than 1 GiB may still begin with it.
        let plan = parse(BUILTIN, Path::new("the built-in configuration"), &Machine::with_endless_memory());
        let text = BUILTIN.to_owned();
        Config { source: None, text, plan: plan.unwrap_or_else(|errors| panic!("{errors}")) }
    }

    /// The same with another text, to be served.
    pub fn with_text(&self, text: String) -> Result<Config, ConfigErrors> {
        let path = self.source.as_deref().unwrap_or(Path::new("configuration"));
        let plan = parse(&text, path, &Machine::here())?;
        Ok(Config { source: self.source.clone(), text, plan })
    }

    /// What it was read from.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The file it was read from; `None` for the built-in.
    pub fn source(&self) -> Option<&Path> {
        self.source.as_deref()
    }

    pub fn plan(&self) -> &Plan {
        &self.plan
    }
}

/// Most bytes of a configuration: thousands of disks. What is longer is something else, and may have no end.
const TEXT_BYTES_MAX: u64 = 4 << 20;

/// What the file says.
pub fn text_of(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(TEXT_BYTES_MAX + 1).read_to_string(&mut text)?;
    if text.len() as u64 > TEXT_BYTES_MAX {
        let most = Bytes::new(TEXT_BYTES_MAX);
        return Err(io::Error::other(format!("it is longer than {most}, the most that is allowed")));
    }
    Ok(text)
}

/// The plan that `text` gives on `machine`.
fn parse(text: &str, file: &Path, machine: &Machine) -> Result<Plan, ConfigErrors> {
    let errors = RefCell::new(Vec::new());
    let plan = document::read(text, &errors).map(|root| validate::plan(&root, machine, &errors));
    match (plan, errors.into_inner()) {
        (Some(plan), errors) if errors.is_empty() => Ok(plan),
        (_, errors) => Err(ConfigErrors::new(file, errors)),
    }
}
