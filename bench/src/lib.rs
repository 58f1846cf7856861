//! `spindle bench`: what a target, a disk or the machine's sockets give.
//!
//! ```text
//!   bench ADDRESS  a target, with a check of what it stores     run, verify       initiator
//!   bench disk     a disk of this machine, without a network    disk, zipf        disk, nvme/pcie
//!   bench limit    the bare exchange of the same bytes          limit             sockets
//!   each of them ── BenchResult ── text, JSON, plot             report
//! ```
//!
//! What it does not do: it serves nothing, and knows no configuration.
#![forbid(unsafe_code)]

mod access;
mod args;
mod disk;
mod limit;
mod random;
mod report;
mod run;
mod verify;
mod zipf;

use std::error::Error;

pub use args::BenchArgs;
use args::BenchCommand;

/// Measure what `args` name and print the result.
///
/// # Errors
/// Why there is nothing to report, or why what is reported is not good.
pub fn run(args: &BenchArgs) -> Result<(), Box<dyn Error>> {
    match &args.command {
        None => Ok(run::run(&args.target)?),
        Some(BenchCommand::Limit(args)) => Ok(limit::run(args)?),
        Some(BenchCommand::Disk(args)) => Ok(disk::run(args)?),
        Some(BenchCommand::Delivery(args)) => Ok(limit::delivery::run(args)?),
        Some(BenchCommand::Line(args)) => Ok(limit::run_line(args)?),
    }
}
