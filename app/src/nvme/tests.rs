//! The subcommands on machines that are folders: files as the kernel shows them, and a kernel that does what
//! is written into them.

mod bind;
mod list;
pub mod machine;
mod unbind;

use clap::Parser;

use super::{NvmeError, run_on};
use crate::cli::{Cli, Command};
use machine::Fake;

/// Run `spindle nvme ARGUMENTS` on `fake`; what it says.
fn run(fake: &Fake, arguments: &str) -> (Vec<String>, Result<(), NvmeError>) {
    let words = format!("spindle nvme {arguments}");
    let Ok(Cli { command: Command::Nvme(nvme) }) = Cli::try_parse_from(words.split_whitespace()) else {
        panic!("no such command: {words}");
    };
    let mut lines = Vec::new();
    let result = run_on(&nvme.command, fake, &mut |line| lines.push(line));
    (lines, result)
}

/// What it says where it must succeed.
fn done(fake: &Fake, arguments: &str) -> String {
    let (lines, result) = run(fake, arguments);
    if let Err(error) = result {
        panic!("{arguments}: {error}\n{}", lines.join("\n"));
    }
    lines.join("\n")
}

/// Why it is refused, or what failed.
fn refusal(fake: &Fake, arguments: &str) -> String {
    run(fake, arguments).1.expect_err(arguments).to_string()
}

/// Fails unless each of `parts` is in `text`.
fn assert_has(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part} in\n{text}");
    }
}
