//! `spindle bench`: measures rate and latency of a target or a disk.
//!
//! ```text
//!   command        measures                               modules        driven through
//!   bench ADDRESS  a target; --verify checks its data     run, verify    initiator
//!     --bare       a target, with a minimal TCP host      run::bare      sockets; initiator: admin queue
//!   bench tune     a target's best in_capsule    run            initiator
//!   bench disk     a local disk, without a network        disk, zipf     disk, nvme/pcie
//!   each of them ── BenchResult ── text, JSON, plot       report
//! ```
//!
//! The command serves no disks and reads no configuration file.
#![forbid(unsafe_code)]

pub mod access;
mod args;
pub mod console;
mod disk;
pub mod random;
pub mod report;
mod run;
pub mod size;
mod verify;
mod zipf;

use std::error::Error;

use args::BenchCommand;
pub use args::{BenchArgs, LoadArgs, OutputArgs};

/// Runs the measurement that `args` selects and prints its result to standard output.
///
/// # Errors
/// The measurement could not run, commands failed, `--verify` found wrong data, or the result or plot could
/// not be written.
pub fn run(args: &BenchArgs) -> Result<(), Box<dyn Error>> {
    match &args.command {
        None => Ok(run::run(&args.target)?),
        Some(BenchCommand::Disk(args)) => Ok(disk::run(args)?),
        Some(BenchCommand::Tune(args)) => Ok(run::tune::run(args)?),
    }
}
