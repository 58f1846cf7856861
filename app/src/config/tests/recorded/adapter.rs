//! From the text of a file to what the program says of it: all that the record knows of the code that it
//! records.

use std::sync::{Arc, OnceLock};

use spindle_nvme_initiator::Host;
use spindle_target::snapshot::Snapshot;

use super::super::{Machine, machine};
use crate::config::{Change, Config, ConfigErrors, LocalDrives, Plan, RunningState, parse, schema};

const FILE: &str = "t.toml";

/// A target that serves a file.
pub struct Running {
    config: Config,
    snapshot: Arc<Snapshot>,
}

/// What becomes of a file that is read again.
pub enum Reload {
    /// The file is wrong, or what it names is not there.
    Wrong(Vec<String>),
    /// The file is right, and a target that runs cannot change so.
    Refused(Vec<String>),
    /// The changes are made. Nothing may be said of a change.
    Made { changes: Vec<String>, notes: Vec<String>, is_other_plan: bool },
}

/// The headings of the sections in their order, `[tcp]` or `[[disk]]`, and the keys with a value of each.
pub fn keys() -> Vec<(String, Vec<&'static str>)> {
    let values = |keys: &'static [schema::Key]| {
        keys.iter().filter(|key| key.section().is_none()).map(|key| key.name).collect()
    };
    schema::sections().into_iter().map(|(heading, _, keys)| (heading, values(keys))).collect()
}

/// What of an answer is this machine's and not the same on another: the identity of a host that has no name
/// of its own.
pub fn of_this_machine() -> [(String, &'static str); 2] {
    let Host { nqn, id } = Host::of_this_machine();
    let id = format!("{:032x}", u128::from_be_bytes(id));
    [(nqn.as_str().to_owned(), "{host of the machine}"), (id, "{its HOSTID}")]
}

fn lines(errors: &ConfigErrors) -> Vec<String> {
    errors.lines().collect()
}

fn read(text: &str, machine: &Machine) -> Result<Plan, Vec<String>> {
    parse(text, FILE.as_ref(), machine).map_err(|errors| lines(&errors))
}

/// Returns the notes of `spindle check`, or the errors.
pub fn check(text: &str) -> Result<Vec<String>, Vec<String>> {
    read(text, &Machine { is_for_start: false, ..machine() }).map(|plan| plan.notes)
}

/// Starts a target with this file. A drive, a far target and a file that are not there may come later.
pub fn start(text: &str) -> Result<Running, Vec<String>> {
    let plan = Arc::new(read(text, &machine())?);
    let failed = |error: &dyn std::fmt::Display| vec![format!("the start fails: {error}")];
    let snapshot = plan.snapshot(None, &LocalDrives, &[]).map_err(|error| failed(&error))?;
    let (source, text) = (Some(FILE.into()), text.to_owned());
    Ok(Running { config: Config { source, text, sections: OnceLock::new(), plan }, snapshot })
}

impl Running {
    pub fn notes(&self) -> &[String] {
        &self.config.plan().notes
    }

    /// Reads the file again, as after SIGHUP. All disks count as open.
    pub fn reload(&self, text: &str) -> Reload {
        match self.config.load_again_on(text.to_owned(), &machine()) {
            Ok(next) => self.apply(next.plan()),
            Err(errors) => Reload::Wrong(lines(&errors)),
        }
    }

    /// As [`Running::reload`], of what `next` has started with: also of disks that are not there.
    pub fn reload_as(&self, next: &Running) -> Reload {
        self.apply(next.config.plan())
    }

    fn apply(&self, next: &Plan) -> Reload {
        let plan = self.config.plan();
        let state = RunningState { is_open: &|_| true, rdma_capsule: plan.rdma_capsule() };
        let changes = next.changes_from(plan, &state);
        let refused: Vec<_> = changes.iter().filter(|it| it.is_refused()).map(Change::to_string).collect();
        if !refused.is_empty() {
            return Reload::Refused(refused);
        }
        let opened = next
            .check_media(Some(plan), &self.snapshot)
            .and_then(|()| next.snapshot(Some(&self.snapshot), &LocalDrives, &[]));
        match opened {
            Ok(_) => {
                let settings = |plan: &Plan| Plan { notes: Vec::new(), ..plan.clone() };
                let is_other_plan = settings(next) != settings(plan);
                let changes = changes.iter().map(Change::to_string).collect();
                Reload::Made { changes, notes: next.notes.clone(), is_other_plan }
            }
            Err(error) => Reload::Refused(vec![error.to_string()]),
        }
    }
}
