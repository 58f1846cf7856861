//! The command line of `spindle bench`. Doc comments of options are their help texts.

use std::path::PathBuf;
use std::time::Duration;

use crate::console::at_least_one;
use crate::size::Bytes;
use clap::{Args, Subcommand};
use spindle_target_disk::delay::{LATENCY_US_MAX, SEEK_US_MAX};

use crate::access::Access;
use crate::disk::DiskAddress;

/// `spindle bench`: either a target's address or one of the subcommands.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct BenchArgs {
    /// A measurement other than that of a target.
    #[command(subcommand)]
    pub command: Option<BenchCommand>,
    /// Options of `spindle bench ADDRESS`.
    #[command(flatten)]
    pub target: BenchTargetArgs,
}

/// Subcommands of `spindle bench`; without one it measures a target.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// A local disk, without a network, through the drivers of the target
    Disk(DiskArgs),
    /// A target's best in_capsule: writes of each size with in-capsule data, compared with writes whose data
    /// the target fetches
    Tune(TuneArgs),
}

/// `spindle bench ADDRESS`.
#[derive(Debug, Clone, Args)]
pub struct BenchTargetArgs {
    /// The target: HOST or HOST:PORT for TCP, rdma:HOST or rdma:HOST:PORT for RDMA
    #[arg(value_name = "ADDRESS", required = true)]
    pub address: Option<String>,
    /// The subsystem; default: the first NVM subsystem that the target's discovery log lists
    #[arg(long)]
    pub nqn: Option<String>,
    #[command(flatten)]
    pub load: LoadArgs,
    /// I/O queues, each with its own connection; --qd is divided among them
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_one)]
    pub queues: usize,
    /// The core to pin the measuring thread to
    #[arg(long, value_name = "CORE")]
    pub core: Option<usize>,
    /// Write a pattern with address and generation into each block; check each read, and all data at the end
    #[arg(long)]
    pub verify: bool,
    /// Read pages that the target has in its cache by RDMA, without the target's CPU; for targets of Spindle
    /// with rdma.optimistic_port, and reads of 4 to 64 KiB
    #[arg(long)]
    pub optimistic: bool,
    /// Most page references that each queue keeps, 24 bytes each
    #[arg(long, value_name = "N", default_value_t = 1 << 18, value_parser = at_least_one)]
    #[arg(requires = "optimistic")]
    pub optimistic_pages: usize,
    /// Get the references of all pages at the start, instead of learning them page by page from reads
    #[arg(long, requires = "optimistic")]
    pub optimistic_eager: bool,
    /// Measure with a minimal host, which costs less per command than the target: one TCP connection, one
    /// send and one receive per turn, data of reads neither checked nor copied, one payload for all writes
    #[arg(long)]
    pub bare: bool,
    /// Compare with another subsystem of the target: both have the same load, in alternating slices,
    /// and the ratio of the IOPS is the median over the pairs of slices; --seconds is the time of each; the
    /// span is that of the smaller one
    #[arg(long, value_name = "NQN", requires = "nqn")]
    #[arg(conflicts_with_all = ["bare", "verify", "busy", "plot"])]
    pub against: Option<String>,
    /// The NQN of this host; default: one derived from this machine
    #[arg(long, value_name = "NQN")]
    pub hostnqn: Option<String>,
    /// The namespace; default: the first active one
    #[arg(long, value_name = "N")]
    pub nsid: Option<u32>,
    /// Use only the first SIZE bytes of the namespace
    #[arg(long, value_name = "SIZE")]
    pub span: Option<Bytes>,
    /// Request header digests (HDGST)
    #[arg(long)]
    pub header_digest: bool,
    /// Request data digests (DDGST)
    #[arg(long)]
    pub data_digest: bool,
    /// In-capsule data: writes up to this size are sent in the command capsule, within the target's limit;
    /// default: the target's limit
    #[arg(long, value_name = "SIZE")]
    pub in_capsule: Option<Bytes>,
    /// RDMA: bytes of memory that stay registered between commands
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    pub registration_bytes: Bytes,
    /// Also report the processor time of the measuring thread per command, in turns with completions; each
    /// turn reads its clock, a system call
    #[arg(long)]
    pub busy: bool,
    /// Additional connected I/O queues on which no command is sent
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub idle_queues: usize,
    /// Keep Alive Timeout in seconds: the target may close the association when it receives no command for
    /// this time; 0: never
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    #[arg(value_parser = clap::value_parser!(u32).range(0..=KEEP_ALIVE_SECONDS_MAX))]
    pub keep_alive_tmo: u32,
    #[command(flatten)]
    pub output: OutputArgs,
}

/// `spindle bench disk DISK`.
#[derive(Debug, Args)]
pub struct DiskArgs {
    /// The disk: nvme:ADDRESS or nvme:ADDRESS/NAMESPACE for a drive that is bound to vfio-pci, ng:PATH for a
    /// generic device of the kernel (/dev/ngXnY), file:PATH for a file or block device, null: for no disk
    #[arg(value_name = "DISK")]
    pub disk: DiskAddress,
    #[command(flatten)]
    pub load: LoadArgs,
    /// The core to pin the measuring thread to
    #[arg(long, value_name = "CORE")]
    pub core: Option<usize>,
    /// Use only the first SIZE bytes of the disk
    #[arg(long, value_name = "SIZE")]
    pub span: Option<Bytes>,
    /// Draw random addresses by Zipf's law: the k-th most popular block is used 1 / k^EXPONENT times as often
    /// as the first; for randread, randwrite, randrw
    #[arg(long, value_name = "EXPONENT", value_parser = exponent, allow_negative_numbers = true)]
    pub zipf: Option<f64>,
    /// Put a cache of SIZE bytes in front of the disk, as `[disk.cache]` does. Several sizes or policies: one
    /// run of --seconds for each, with an empty cache; --plot draws the hit ratio over the size
    #[arg(long, value_name = "SIZE[,SIZE...]", value_delimiter = ',')]
    pub cache: Vec<Bytes>,
    /// Eviction policy of the cache
    #[arg(long, value_name = "POLICY[,POLICY]", value_delimiter = ',', default_value = "s3-fifo")]
    #[arg(value_parser = ["s3-fifo", "lru"], requires = "cache")]
    pub policy: Vec<String>,
    /// Most bytes that the cache reads ahead of a stream, as `read_ahead` of `[disk.cache]`
    #[arg(long, value_name = "SIZE", default_value = "256KiB", requires = "cache")]
    pub read_ahead: Bytes,
    /// Delay each command, as `latency_us` of `[disk.delay]` does
    #[arg(long, value_name = "US", default_value_t = 0)]
    #[arg(value_parser = clap::value_parser!(u64).range(0..=LATENCY_US_MAX))]
    pub latency_us: u64,
    /// Limit the bytes per second, as `bandwidth` of `[disk.delay]` does
    #[arg(long, value_name = "SIZE")]
    pub bandwidth: Option<Bytes>,
    /// Delay commands that need a seek, as `seek_us` of `[disk.delay]` does
    #[arg(long, value_name = "US", default_value_t = 0)]
    #[arg(value_parser = clap::value_parser!(u64).range(0..=SEEK_US_MAX))]
    pub seek_us: u64,
    /// Allow writes, which destroy the data on the disk
    #[arg(long)]
    pub destroy_data: bool,
    #[command(flatten)]
    pub output: OutputArgs,
}

/// `spindle bench tune ADDRESS`.
#[derive(Debug, Args)]
pub struct TuneArgs {
    /// The target: HOST or HOST:PORT for TCP, rdma:HOST or rdma:HOST:PORT for RDMA
    #[arg(value_name = "ADDRESS")]
    pub address: String,
    /// The subsystem; default: the first NVM subsystem that the target's discovery log lists
    #[arg(long)]
    pub nqn: Option<String>,
    /// The NQN of this host; default: one derived from this machine
    #[arg(long, value_name = "NQN")]
    pub hostnqn: Option<String>,
    /// The namespace; default: the first active one
    #[arg(long, value_name = "N")]
    pub nsid: Option<u32>,
    /// Use only the first SIZE bytes of the namespace
    #[arg(long, value_name = "SIZE")]
    pub span: Option<Bytes>,
    /// The core to pin the measuring thread to
    #[arg(long, value_name = "CORE")]
    pub core: Option<usize>,
    /// Queue depths to measure
    #[arg(long, value_name = "N[,N...]", value_delimiter = ',', default_value = "1,32")]
    #[arg(value_parser = at_least_one)]
    pub qd: Vec<usize>,
    /// Measured time of each run, after a short warm-up; a fraction is allowed
    #[arg(long, value_name = "SECONDS", default_value = "0.5")]
    #[arg(value_parser = seconds, allow_negative_numbers = true)]
    pub seconds: Duration,
    /// Rounds, each of which measures everything; the result has medians
    #[arg(long, value_name = "N", default_value_t = 5)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub rounds: u16,
    /// Allow writes, which destroy the data in the namespace
    #[arg(long)]
    pub destroy_data: bool,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub json: bool,
}

/// Options of the load, common to several measurements.
#[derive(Debug, Clone, Args)]
pub struct LoadArgs {
    /// Access pattern
    #[arg(long, value_enum, default_value_t = Access::RandRead)]
    pub rw: Access,
    /// Share of reads in per cent, for randrw
    #[arg(long, value_name = "PERCENT", default_value_t = 70)]
    #[arg(value_parser = clap::value_parser!(u8).range(0..=100))]
    pub mix: u8,
    /// Size of a command's data
    #[arg(long, value_name = "SIZE", default_value = "4KiB")]
    pub bs: Bytes,
    /// Queue depth: commands in flight, over all queues or connections
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = at_least_one)]
    pub qd: usize,
    /// Measured time, after a short warm-up; a fraction is allowed
    #[arg(long, value_name = "SECONDS", default_value = "10")]
    #[arg(value_parser = seconds, allow_negative_numbers = true)]
    pub seconds: Duration,
}

/// Options of the report.
#[derive(Debug, Clone, Args)]
pub struct OutputArgs {
    /// Print one JSON object instead of a table, and no progress
    #[arg(long)]
    pub json: bool,
    /// Also write a plot of the latencies by percentile to this file
    #[arg(long, value_name = "FILE.svg")]
    pub plot: Option<PathBuf>,
}

/// Largest `--keep-alive-tmo`: a day.
const KEEP_ALIVE_SECONDS_MAX: i64 = 86_400;
/// Largest `--seconds`: a day.
const SECONDS_MAX: f64 = 86_400.0;

/// Parses a time of a measurement: 0.01 s to a day.
///
/// # Errors
/// What is allowed, if `text` is something else.
pub fn seconds(text: &str) -> Result<Duration, String> {
    let wrong = || format!("`{text}` is not a time; allowed are 0.01 to {SECONDS_MAX} seconds");
    let seconds: f64 = text.parse().map_err(|_| wrong())?;
    if (0.01..=SECONDS_MAX).contains(&seconds) { Ok(Duration::from_secs_f64(seconds)) } else { Err(wrong()) }
}

/// Largest `--zipf`.
const EXPONENT_MAX: f64 = 3.0;

fn exponent(text: &str) -> Result<f64, String> {
    let exponent = text.parse().ok().filter(|exponent| *exponent > 0.0 && *exponent <= EXPONENT_MAX);
    exponent.ok_or_else(|| format!("`{text}` is not a number above 0, at most {EXPONENT_MAX}"))
}

/// Parses a command line that begins with `bench`.
#[cfg(test)]
pub(crate) fn parse(line: &str) -> Result<BenchArgs, clap::Error> {
    use clap::{CommandFactory, FromArgMatches, Parser};

    #[derive(Parser)]
    struct Tool {
        #[command(flatten)]
        bench: BenchArgs,
    }
    let matches = Tool::command().try_get_matches_from(line.split(' '))?;
    Tool::from_arg_matches(&matches).map(|tool| tool.bench)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_or_a_subcommand_is_taken() {
        let bench = parse("bench 127.0.0.1:4420 --rw randrw --mix 30 --bs 8k --qd 64").expect("a target");
        assert!(bench.command.is_none());
        assert_eq!(bench.target.address.as_deref(), Some("127.0.0.1:4420"));
        let load = &bench.target.load;
        assert_eq!((load.rw, load.mix, load.bs.get(), load.qd), (Access::RandRw, 30, 8192, 64));

        assert!(parse("bench").expect_err("no address").to_string().contains("ADDRESS"));
    }

    #[test]
    fn every_refusal_names_the_option_the_value_and_what_is_allowed() {
        for (line, parts) in [
            ("bench a --bs 4x", ["--bs", "4x", "KiB"]),
            ("bench a --qd 0", ["--qd", "`0`", "from 1 up"]),
            ("bench a --mix 101", ["--mix", "101", "0..=100"]),
            ("bench a --rw both", ["--rw", "both", "randwrite"]),
            ("bench a --seconds -1", ["--seconds", "`-1`", "0.01 to 86400"]),
            ("bench a --seconds=0", ["--seconds", "`0`", "0.01 to 86400"]),
            ("bench disk null: --zipf 0", ["--zipf", "`0`", "above 0, at most 3"]),
            ("bench disk null: --zipf nan", ["--zipf", "`nan`", "above 0, at most 3"]),
            ("bench disk null: --zipf -1", ["--zipf", "`-1`", "above 0, at most 3"]),
            ("bench disk null: --cache 1M,,2M", ["--cache", "``", "must begin with a number"]),
            ("bench disk null: --cache= --json", ["--cache", "SIZE", "value"]),
            ("bench disk null: --cache 1M --policy lru,fifo", ["--policy", "fifo", "s3-fifo"]),
        ] {
            let message = parse(line).expect_err(line).to_string();
            for part in parts {
                assert!(message.contains(part), "{part} in: {message}");
            }
        }
    }
}
