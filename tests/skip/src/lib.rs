//! Reports what a test cannot do on this machine.
//!
//! A test that needs something of the machine (a loop device, huge pages, no RDMA) and does not find it calls
//! [`skip`] and returns. Where only a part cannot be tested, it calls [`skip`] for that and goes on. Neither
//! Rust's test harness nor nextest knows a test that decides for itself that it is skipped: it counts as
//! passed. So each call is a line on standard output and, with `SPINDLE_SKIPS`, in a file in that folder;
//! `scripts/test` prints them at the end of the tier. `SPINDLE_SKIPS=none` makes every call fail: that is how
//! the lab's machine, which has all of it, runs them (`tests/lab/cases/tests-that-skip.sh`).
//!
//! What it does not do: it decides nothing.

#![forbid(unsafe_code)]

use std::fmt::Display;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;

/// The folder of the lines, or [`NONE`].
const VARIABLE: &str = "SPINDLE_SKIPS";
/// Nothing may be skipped.
const NONE: &str = "none";

/// Say that the running test, or a part of it, is not run here, and why.
///
/// # Panics
/// Where nothing may be skipped, and where the line cannot be written.
#[track_caller]
pub fn skip(why: impl Display) {
    let line = format!("{}: {why}", test());
    let wanted = std::env::var_os(VARIABLE).filter(|wanted| !wanted.is_empty());
    if let Some(folder) = wanted {
        assert!(folder != NONE, "{VARIABLE}={NONE}, and this is not run: {line}");
        record(Path::new(&folder), &line);
    }
    println!("skipped: {line}");
}

/// The binary and the test that runs, as nextest names them.
fn test() -> String {
    let name = std::env::var("NEXTEST_TEST_NAME").ok();
    let name = name.or_else(|| std::thread::current().name().map(str::to_owned)).unwrap_or_default();
    match std::env::var("NEXTEST_BINARY_ID") {
        Ok(binary) => format!("{binary} {name}"),
        Err(_) => name,
    }
}

/// A file for each process: tests run side by side.
#[track_caller]
fn record(folder: &Path, line: &str) {
    std::fs::create_dir_all(folder).expect("the folder of what is skipped");
    let path = folder.join(std::process::id().to_string());
    let mut file =
        OpenOptions::new().create(true).append(true).open(path).expect("the file of what is skipped");
    writeln!(file, "{line}").expect("what is skipped can be written down");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_skipped_is_written_down_with_the_reason() {
        let folder = std::env::temp_dir().join(format!("spindle-skip-{}", std::process::id()));
        record(&folder, "one: no door");
        record(&folder, "two: no key");
        let file = std::fs::read_dir(&folder).expect("made").next().expect("one file").expect("an entry");
        assert_eq!(std::fs::read_to_string(file.path()).expect("readable"), "one: no door\ntwo: no key\n");
        std::fs::remove_dir_all(folder).expect("removed");
        assert!(test().ends_with("what_is_skipped_is_written_down_with_the_reason"), "{}", test());
    }
}
