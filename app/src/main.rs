//! The `spindle` binary: parses the command line and runs a subcommand.
//!
//! ```text
//!   main ── cli (arguments) ──┬── serve, status, ctl         run a target; show its state; change it
//!                             ├── check, discover            check a configuration; query a target
//!                             ├── nvme                       list NVMe drives; bind them to vfio-pci or nvme
//!                             ├── bench                      measure a target or a disk (`app/bench`)
//!                             └── completions                print a completion script for a shell
//! ```
//!
//! Each subcommand is a module or crate with a function `run`. This file prints the error of `run` with its
//! sources. The exit status is 0 on success, 1 on an error, 2 on a wrong command line.
//!
//! This crate may use every crate but those of `tests/`. Begin with `serve.rs`: it starts a `CoreLoop` for
//! each core.
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
use spindle_app_bench::{console::write_final_message, size};

fn main() -> ExitCode {
    let cli = Cli::parse();
    match dispatch(cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            write_final_message(format!("spindle: {}", with_sources(error.as_ref())));
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
        Command::Bench(args) => spindle_app_bench::run(&args),
    }
}

/// Returns the message of an error and of its sources, without those that the text already contains.
fn with_sources(error: &dyn Error) -> String {
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
