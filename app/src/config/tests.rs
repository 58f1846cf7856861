//! Tests of the configuration, by what they hold: messages, sums, reload, and the files that describe it.

mod cache;
mod cluster;
mod comments;
mod delay;
mod errors;
mod files;
mod keys;
mod recorded;
mod reload;
mod sections;
mod slots;
mod values;

use std::path::{Path, PathBuf};

use super::machine::Machine;
use super::{Plan, parse};

/// A machine of two cores, 16 GiB of memory of which 8 GiB are available, and 1 GiB of huge pages.
fn machine() -> Machine {
    Machine {
        cores: vec![0, 1],
        memory_bytes: 16 << 30,
        available_bytes: 8 << 30,
        retired: Default::default(),
        is_for_start: true,
        huge_bytes: 1 << 30,
        lockable_bytes: None,
        files_max: None,
        congestion: vec!["cubic".to_owned(), "reno".to_owned()],
    }
}

/// What is needed to serve anything.
const LISTENER: &str = "[[listener]]\naddress = \"127.0.0.1:4420\"\n";

/// A RAM disk of this name.
fn ram(name: &str) -> String {
    format!("[[disk]]\nname = \"{name}\"\nkind = \"ram\"\nsize = \"64MiB\"\n")
}

/// A disk of this name that needs nothing, and whose identity is derived.
fn null(name: &str) -> String {
    ram(name).replace("ram", "null")
}

/// A subsystem for any host with these disks as namespaces 1, 2, ...
fn subsystem(name: &str, disks: &[&str]) -> String {
    let mut text = format!("[[subsystem]]\nnqn = \"nqn.2026-01.test:{name}\"\nallow_any_host = true\n");
    for (index, disk) in disks.iter().enumerate() {
        text.push_str(&format!("[[subsystem.namespace]]\nnsid = {}\ndisk = \"{disk}\"\n", index + 1));
    }
    text
}

/// The plan of a file that is right.
fn plan(text: &str) -> Plan {
    plan_on(text, &machine())
}

fn plan_on(text: &str, machine: &Machine) -> Plan {
    parse(text, Path::new("t.toml"), machine).unwrap_or_else(|errors| panic!("{errors}\n{text}"))
}

/// Returns the errors of a file, one line each.
fn errors(text: &str) -> Vec<String> {
    errors_on(text, &machine())
}

fn errors_on(text: &str, machine: &Machine) -> Vec<String> {
    let Err(errors) = parse(text, Path::new("t.toml"), machine) else { panic!("nothing is wrong:\n{text}") };
    let text = errors.to_string();
    let lines: Vec<String> = text.lines().map(str::to_owned).collect();
    if lines.len() == 1 {
        return lines;
    }
    assert_eq!(lines[0], format!("t.toml has {} errors:", lines.len() - 1));
    lines[1..].to_vec()
}

/// A directory of its own that goes with the value.
struct Directory(PathBuf);

impl Directory {
    fn new() -> Directory {
        let path = std::env::temp_dir().join(format!("spindle-config-{}", uuid::Uuid::new_v4()));
        std::fs::create_dir(&path).expect("a fresh directory");
        Directory(path)
    }

    /// A sparse file of `bytes` in it.
    fn file(&self, name: &str, bytes: u64) -> String {
        let path = self.0.join(name);
        std::fs::File::create(&path).and_then(|file| file.set_len(bytes)).expect("a sparse file");
        path.display().to_string()
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
