//! The `spindle` binary: the configuration, and the subcommands that use the other crates.
//!
//! ```text
//!   main ── cli (what was asked) ──┬── serve, status, ctl       a target, what it does, changes
//!                                  ├── check, discover            its configuration, its log
//!                                  ├── nvme                       its drives: the kernel's or ours
//!                                  └── bench            a target or a disk, measured (spindle-bench)
//! ```
//!
//! Each subcommand is a module that takes its arguments and gives back `Result`; this file only parses,
//! dispatches and prints the error with its reasons. It exits 0 on success, 1 on an error, 2 on a wrong
//! command line.
#![forbid(unsafe_code)]

mod check;
mod cli;
mod completions;
mod config;
mod ctl;
mod discover;
mod identity;
mod log;
mod nvme;
mod rpc;
mod serve;
mod status;
mod text;

use std::error::Error;
use std::process::ExitCode;

use clap::Parser;

use cli::{Cli, Command};
use spindle_console::{last_words, size};

fn main() -> ExitCode {
    let cli = Cli::parse();
    match dispatch(cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            last_words(format!("spindle: {}", with_reasons(error.as_ref())));
            ExitCode::FAILURE
        }
    }
}

fn dispatch(command: Command) -> Result<(), Box<dyn Error>> {
    match command {
        Command::Serve(args) => Ok(serve::run(&args)?),
        Command::Check(args) => Ok(check::run(&args)?),
        Command::Status(args) => Ok(status::run(&args)?),
        Command::Ctl(args) => Ok(ctl::run(args)?),
        Command::Completions(args) => {
            completions::run(&args);
            Ok(())
        }
        Command::Discover(args) => Ok(discover::run(&args)?),
        Command::Nvme(args) => Ok(nvme::run(&args.command)?),
        Command::Bench(args) => spindle_bench::run(&args),
    }
}

/// An error with the chain of its reasons, but none that the message before it already says.
fn with_reasons(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut reason = error.source();
    while let Some(error) = reason {
        let message = error.to_string();
        if !text.contains(&message) {
            text.push_str(": ");
            text.push_str(&message);
        }
        reason = error.source();
    }
    text
}
