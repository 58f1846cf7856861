//! What is said of one file at a start, by `spindle check` and at a reload, in the words of the record.

use std::fmt;
use std::path::{Path, PathBuf};

use super::adapter::{self, Reload, Running};

/// Longest name of the directory: messages cut a path that is longer than 80 characters with its file.
const DIRECTORY_BYTES_MAX: usize = 64;

/// The files of disks, in a directory of their own that goes with the value.
pub struct Files {
    directory: PathBuf,
    /// What is the machine's in an answer, and what stands for it in the record.
    of_machine: Vec<(String, &'static str)>,
}

impl Files {
    pub fn new() -> Files {
        let name = uuid::Uuid::new_v4().simple().to_string();
        let directory = std::env::temp_dir().join(format!("keys-{}", &name[..8]));
        assert!(directory.as_os_str().len() <= DIRECTORY_BYTES_MAX, "{directory:?}: TMPDIR is too long");
        std::fs::create_dir(&directory).expect("a fresh directory");
        let mut files = Files { directory, of_machine: adapter::of_this_machine().into() };
        files.reset();
        let ids = spindle_target_disk::medium_id::at(&files.directory.join("f")).expect("a file");
        let id = ids.into_iter().next().expect("a file system with birth times");
        files.of_machine.insert(0, (files.directory.display().to_string(), "{dir}"));
        files.of_machine.insert(0, (id, "{medium}"));
        files
    }

    /// Makes the files as they were at first: a disk may have grown one.
    fn reset(&self) {
        let path = |name: &str| self.directory.join(name);
        for (name, bytes) in [("f", 1 << 20), ("g", 1 << 20), ("odd", 1000)] {
            let made = std::fs::File::create(path(name)).and_then(|file| file.set_len(bytes));
            made.unwrap_or_else(|error| panic!("{name}: {error}"));
        }
        let _ = std::fs::remove_file(path("new"));
        let _ = std::fs::remove_file(path("loop"));
        // What is there at a path that cannot be followed is not known before it can.
        std::os::unix::fs::symlink(Path::new("loop"), path("loop")).expect("a link");
    }

    fn expand(&self, text: &str) -> String {
        let mut text = text.to_owned();
        for (value, name) in &self.of_machine {
            text = text.replace(name, value);
        }
        while let Some((before, rest)) = text.split_once("{x") {
            let (count, after) = rest.split_once('}').expect("{xN}");
            text = format!("{before}{}{after}", "x".repeat(count.parse().expect("a number of letters")));
        }
        text
    }

    fn neutral(&self, line: &str) -> String {
        self.of_machine.iter().fold(line.to_owned(), |line, (value, name)| line.replace(value, name))
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// What is said of a file that changes.
pub struct Answers {
    lines: Vec<String>,
    is_accepted: bool,
}

impl Answers {
    /// The answers to the file `to`, for a target that serves `from`.
    pub fn of(files: &Files, from: &str, to: &str) -> Answers {
        let (from, to) = (files.expand(from), files.expand(to));
        let mut lines = Vec::new();
        files.reset();
        let running = adapter::start(&from).unwrap_or_else(|errors| panic!("{errors:#?}\n{from}"));
        let reloaded = running.reload(&to);
        let come = match &reloaded {
            Reload::Wrong(_) => adapter::start(&to).ok().map(|next| running.reload_as(&next)),
            Reload::Refused(_) | Reload::Made { .. } => None,
        };
        let known = running.notes().to_vec();
        // Its disks hold their files.
        drop(running);
        files.reset();
        let started = adapter::start(&to);
        let is_accepted = started.is_ok();
        let at_start = add_start(&mut lines, &known, started);
        // The start may have made a file.
        files.reset();
        add_check(&mut lines, &from, &to, &at_start);
        // A reload also misses the devices that are away, which is no answer to a value that is wrong.
        let is_said = |errors: &[String]| !is_accepted && at_start.iter().all(|line| errors.contains(line));
        let known = [known, at_start.clone()].concat();
        if !matches!(&reloaded, Reload::Wrong(errors) if is_said(errors)) {
            add_reload(&mut lines, "reload", &reloaded, &known);
        }
        if let Some(come) = come {
            add_reload(&mut lines, "reload, were it there", &come, &known);
        }
        let lines = lines.iter().map(|line| files.neutral(line)).collect();
        Answers { lines, is_accepted }
    }

    pub fn is_accepted(&self) -> bool {
        self.is_accepted
    }
}

impl fmt::Display for Answers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lines.iter().try_for_each(|line| writeln!(f, "    {line}"))
    }
}

fn add(lines: &mut Vec<String>, what: &str, verdict: &str, said: &[String]) {
    lines.push(format!("{what}: {verdict}"));
    lines.extend(said.iter().map(|line| format!("  {line}")));
}

/// Adds the answer of a start, without the notes that are known. Returns the errors, or all notes.
fn add_start(
    lines: &mut Vec<String>,
    known: &[String],
    started: Result<Running, Vec<String>>,
) -> Vec<String> {
    match started {
        Ok(started) => {
            let new = started.notes().iter().filter(|note| !known.contains(note));
            add(lines, "start", "accepted", &new.map(|note| format!("note: {note}")).collect::<Vec<_>>());
            started.notes().to_vec()
        }
        Err(errors) => {
            add(lines, "start", "refused", &errors);
            errors
        }
    }
}

/// Adds what `spindle check` says and neither the start nor `spindle check` of the former file does.
fn add_check(lines: &mut Vec<String>, from: &str, to: &str, at_start: &[String]) {
    let said = |answer: Result<Vec<String>, Vec<String>>| match answer {
        Ok(lines) | Err(lines) => lines,
    };
    let answer = adapter::check(to);
    let verdict = if answer.is_ok() { "accepted" } else { "refused" };
    let known = said(adapter::check(from));
    let is_new = |line: &String| !at_start.contains(line) && !known.contains(line);
    let new: Vec<String> = said(answer).into_iter().filter(is_new).collect();
    if !new.is_empty() {
        add(lines, "check", verdict, &new);
    }
}

/// Adds the answer of a target that runs, without the notes that are known.
fn add_reload(lines: &mut Vec<String>, what: &str, reload: &Reload, known: &[String]) {
    match reload {
        Reload::Wrong(errors) => add(lines, what, "refused, the file is wrong", errors),
        Reload::Refused(refused) => add(lines, what, reason(refused), refused),
        Reload::Made { changes, notes, is_other_plan } => {
            let verdict = match (changes.is_empty(), is_other_plan) {
                (false, _) => "in force without a restart",
                (true, true) => "taken over, and nothing is said",
                (true, false) => "nothing changes",
            };
            let notes = notes.iter().filter(|note| !known.contains(note)).map(|note| format!("note: {note}"));
            add(lines, what, verdict, &changes.iter().cloned().chain(notes).collect::<Vec<_>>());
        }
    }
}

/// Why a change is refused, by the words of the refusals.
fn reason(refused: &[String]) -> &'static str {
    let has = |words: &[&str]| refused.iter().any(|line| words.iter().any(|word| line.contains(word)));
    if has(&["would be another disk", "hosts would take it", "hosts know the disk by it"]) {
        "refused, a change of identity"
    } else if has(&["restart"]) {
        "refused until a restart"
    } else {
        "refused"
    }
}

/// Returns the lines that differ between two texts, with `-` or `+`, in their order.
pub fn difference(before: &str, after: &str) -> String {
    let (a, b): (Vec<&str>, Vec<&str>) = (before.lines().collect(), after.lines().collect());
    // Lengths of the longest common subsequences of the ends.
    let mut common = vec![vec![0_usize; b.len() + 1]; a.len() + 1];
    for i in (0..a.len()).rev() {
        for j in (0..b.len()).rev() {
            common[i][j] = match a[i] == b[j] {
                true => common[i + 1][j + 1] + 1,
                false => common[i + 1][j].max(common[i][j + 1]),
            };
        }
    }
    let (mut i, mut j, mut text) = (0, 0, String::new());
    while i < a.len() || j < b.len() {
        let (sign, line) = if i < a.len() && j < b.len() && a[i] == b[j] {
            (i, j) = (i + 1, j + 1);
            continue;
        } else if j == b.len() || i < a.len() && common[i + 1][j] >= common[i][j + 1] {
            i += 1;
            ("-", a[i - 1])
        } else {
            j += 1;
            ("+", b[j - 1])
        };
        text.push_str(&format!("  {sign} {line}\n"));
    }
    text
}
