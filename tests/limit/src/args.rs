//! The command line of `spindle-limit`. Doc comments of options are their help texts.

use std::str::FromStr;

use clap::{Args, Parser, Subcommand};
use spindle_app_bench::console::at_least_one;
use spindle_app_bench::size::Bytes;
use spindle_app_bench::{LoadArgs, OutputArgs};

/// Upper bound for NVMe/TCP on this machine: exchange the same bytes over loopback sockets, between two
/// pinned, busy-polling threads
#[derive(Debug, Parser)]
#[command(name = "spindle-limit", version, args_conflicts_with_subcommands = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    #[command(flatten)]
    pub(crate) limit: LimitArgs,
}

/// A measurement other than that of sockets.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Round trip of a cache line between two cores
    Line(LineArgs),
}

/// Options of the exchange.
#[derive(Debug, Args)]
pub(crate) struct LimitArgs {
    #[command(flatten)]
    pub(crate) load: LoadArgs,
    /// Size of the serving thread's payload memory; give the size of the disk that this is compared with
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    pub(crate) span: Bytes,
    /// Connections; --qd is divided among them
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_one)]
    pub(crate) connections: usize,
    /// The cores to pin the serving and the requesting thread to; default: the first two
    #[arg(long, value_name = "A,B")]
    pub(crate) cores: Option<CorePair>,
    /// In-capsule data: writes up to this size are sent with their request, larger ones after a
    /// ready-to-transfer (R2T)
    #[arg(long, value_name = "SIZE", default_value = "4KiB")]
    pub(crate) icd: Bytes,
    /// TCP congestion control of both ends; a system's default may pace packets (bbr), which lowers the rate
    /// even on loopback
    #[arg(long, value_name = "NAME", default_value = "reno")]
    pub(crate) congestion: String,
    /// SO_SNDBUF and SO_RCVBUF of the serving end, as tcp.socket_buffer; 0: the kernel tunes them
    #[arg(long, value_name = "SIZE", default_value = "0")]
    pub(crate) socket_buffer: Bytes,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// `spindle-limit line`.
#[derive(Debug, Args)]
pub(crate) struct LineArgs {
    /// The two cores; default: the first two
    #[arg(long, value_name = "A,B")]
    pub(crate) cores: Option<CorePair>,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

/// Indices of two different cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CorePair(pub(crate) usize, pub(crate) usize);

impl FromStr for CorePair {
    type Err = String;

    fn from_str(text: &str) -> Result<CorePair, String> {
        let wrong = || format!("`{text}` is not two core numbers with a comma between, as in 0,1");
        let (first, second) = text.split_once(',').ok_or_else(wrong)?;
        let core = |text: &str| text.trim().parse::<usize>().map_err(|_| wrong());
        let pair = CorePair(core(first)?, core(second)?);
        if pair.0 == pair.1 {
            return Err(format!("core {} cannot be both ends: each end polls without a pause", pair.0));
        }
        Ok(pair)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(line.split(' '))
    }

    #[test]
    fn the_exchange_is_the_default_and_line_a_subcommand() {
        let cli = parse("spindle-limit --span 1GiB --cores 1,0 --seconds 0.5 --json").expect("the limit");
        let limit = &cli.limit;
        assert!(cli.command.is_none());
        assert_eq!((limit.span.get(), limit.cores), (1 << 30, Some(CorePair(1, 0))));
        assert_eq!((limit.load.seconds, limit.output.json), (Duration::from_millis(500), true));
        let cli = parse("spindle-limit line --cores 0,1").expect("the line");
        let Some(Command::Line(line)) = cli.command else { panic!("the line") };
        assert_eq!(line.cores, Some(CorePair(0, 1)));
    }

    #[test]
    fn cores_that_are_not_two_are_refused_with_what_is_allowed() {
        for (line, parts) in [
            ("spindle-limit --cores 1,1", ["--cores", "core 1", "both ends"]),
            ("spindle-limit --cores 1", ["--cores", "`1`", "0,1"]),
        ] {
            let message = parse(line).expect_err(line).to_string();
            for part in parts {
                assert!(message.contains(part), "{part} in: {message}");
            }
        }
    }
}
