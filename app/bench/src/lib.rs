//! `spindle bench`: measures rate and latency of a target, a disk or the machine's sockets.
//!
//! ```text
//!   command        measures                               modules        driven through
//!   bench ADDRESS  a target; --verify checks its data     run, verify    initiator
//!     --bare       a target, with a minimal TCP host      run::bare      sockets; initiator: admin queue
//!   bench tune     a target's best in_capsule    run            initiator
//!   bench disk     a local disk, without a network        disk, zipf     disk, nvme/pcie
//!   bench limit    loopback sockets, the same bytes       limit          sockets
//!   each of them ── BenchResult ── text, JSON, plot       report
//! ```
//!
//! `bench delivery` and the hidden `bench line` are in `limit` too and print their own results.
//!
//! The command serves no disks and reads no configuration file.
#![forbid(unsafe_code)]

mod access;
mod args;
pub mod console;
mod disk;
mod limit;
mod random;
mod report;
mod run;
pub mod size;
mod verify;
mod zipf;

use std::error::Error;

pub use args::BenchArgs;
use args::BenchCommand;

/// Runs the measurement that `args` selects and prints its result to standard output.
///
/// # Errors
/// The measurement could not run, commands failed, `--verify` found wrong data, or the result or plot could
/// not be written.
pub fn run(args: &BenchArgs) -> Result<(), Box<dyn Error>> {
    match &args.command {
        None => Ok(run::run(&args.target)?),
        Some(BenchCommand::Limit(args)) => Ok(limit::run(args)?),
        Some(BenchCommand::Disk(args)) => Ok(disk::run(args)?),
        Some(BenchCommand::Delivery(args)) => Ok(limit::delivery::run(args)?),
        Some(BenchCommand::Tune(args)) => Ok(run::tune::run(args)?),
        Some(BenchCommand::Line(args)) => Ok(limit::run_line(args)?),
    }
}
