//! `spindle-limit`: upper bound for an NVMe/TCP target on this machine. Messages of the same sizes are
//! exchanged over loopback sockets, without the protocol. `spindle-limit line`: round trip of a cache line.
//!
//! The exchange has two pinned, busy-polling threads of one process. The requester keeps `qd` requests in
//! flight. The server normally answers all requests of one receive with one `send` or `sendmsg`. Neither
//! thread parses or checks a command; message sizes, directions and payload memory are those of NVMe/TCP.
//!
//! ```text
//!   requester (core B)                                    server (core A)
//!   read            72 ────────────────────────────────▶  picks a block of the span
//!                      ◀──────────────────────────────── 24 + block, sent from the span
//!   small write     72 + block ─────────────────────────▶ copies it into a block of the span
//!                      ◀──────────────────────────────── 24
//!   large write     72 ────────────────────────────────▶
//!                      ◀──────────────────────────────── 24 (ready to transfer)
//!                   24 + block ─────────────────────────▶ copies it into a block of the span
//!                      ◀──────────────────────────────── 24
//! ```
//!
//! The first byte of a message is its kind, which determines its length.
//!
//! Loopback only. `docs/lab-notes.md` lists the measured alternatives that were not faster.

#![forbid(unsafe_code)]

mod args;
mod cache_line;
mod exchange;
mod message;
mod outbox;
mod poll_loop;
mod requester;
mod server;

use std::io;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use spindle_app_bench::access::Access;
use spindle_app_bench::console::write_final_message;
use spindle_app_bench::report::{self, BenchResult, Progress, Run};
use spindle_app_bench::say;
use spindle_app_bench::size::Bytes;
use spindle_reactor::affinity::{available_cores, pin_current_thread};
use spindle_reactor::mem::RegionError;

use args::{Cli, Command, CorePair, LimitArgs, LineArgs};

/// Warm-up before the measured time, in which TCP windows grow and processor caches fill.
const WARM_UP: Duration = Duration::from_millis(200);

/// A result is reported as disturbed if the two threads had less than this share of their cores.
const CPU_SHARE_MIN: f64 = 0.97;

/// Checked options of a run.
#[derive(Debug, Clone)]
pub(crate) struct LoadSpec {
    /// Access pattern of the requests, and order in which the server uses the blocks of its span.
    access: Access,
    /// Share of reads in per cent.
    reads_percent: u8,
    /// Payload bytes of a request.
    block_bytes: usize,
    /// Requests in flight over all connections.
    depth: usize,
    connections: usize,
    /// Size of the server's payload memory.
    span_bytes: usize,
    /// Largest write in bytes whose payload is sent with the request.
    inline_bytes_max: usize,
    /// TCP congestion control of both ends; `None` keeps the system's default.
    congestion: Option<String>,
    /// SO_SNDBUF and SO_RCVBUF of the server's sockets; 0: the kernel tunes them.
    socket_buffer_bytes: usize,
    /// The server's and the requester's core; `None` leaves both unpinned (tests).
    cores: Option<CorePair>,
    warm_up: Duration,
    /// Measured time, without the warm-up.
    measured: Duration,
}

/// Failure of a measurement.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LimitError {
    /// A core outside the process's affinity mask, or fewer than two cores in the mask.
    #[error("cannot pin the two ends to the cores {asked}: this process may use {allowed}")]
    Cores { asked: String, allowed: String },
    #[error("{option} is {value}, but {rule}")]
    Size { option: &'static str, value: String, rule: String },
    #[error(transparent)]
    Span(#[from] RegionError),
    #[error("{what}: {source}")]
    Socket {
        what: &'static str,
        #[source]
        source: io::Error,
    },
    /// A message whose first byte is no known kind.
    #[error("the exchange broke: a message begins with the byte {0}")]
    UnknownMessage(u8),
    #[error("the {0} end panicked")]
    Panicked(&'static str),
    #[error("cannot print the result: {0}")]
    Json(#[from] serde_json::Error),
    #[error(transparent)]
    Plot(#[from] report::plot::PlotError),
}

impl LimitError {
    fn socket(what: &'static str) -> impl FnOnce(io::Error) -> LimitError {
        move |source| LimitError::Socket { what, source }
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let outcome = match &cli.command {
        None => run(&cli.limit),
        Some(Command::Line(args)) => run_line(args),
    };
    let Err(error) = outcome else { return ExitCode::SUCCESS };
    write_final_message(format!("spindle-limit: {error}"));
    ExitCode::FAILURE
}

/// Measures the exchange and prints the result.
fn run(args: &LimitArgs) -> Result<(), LimitError> {
    let spec = LoadSpec::new(args)?;
    let title = format!("limit {} {}", args.load.rw, args.load.bs);
    let total = spec.warm_up + spec.measured;
    let progress = Progress::new(&title, total, args.load.bs.get(), args.output.json);
    let result = measure(&spec, progress)?;
    show(args, &result)
}

/// Measures the round trip of a cache line and prints the result.
fn run_line(args: &LineArgs) -> Result<(), LimitError> {
    let cores = choose_cores(args.cores)?;
    let nanoseconds = cache_line::round_trip_ns(Some(cores));
    if args.json {
        say!(
            "{}",
            serde_json::json!({ "cores": [cores.0, cores.1], "line_round_trip_ns": nanoseconds.round() })
        );
    } else {
        say!("a cache line goes from core {} to core {} and back in {nanoseconds:.0} ns", cores.0, cores.1);
    }
    Ok(())
}

fn measure(spec: &LoadSpec, progress: Progress) -> Result<BenchResult, LimitError> {
    let before = cache_line::round_trip_ns(spec.cores);
    let outcome = exchange::run(spec, progress)?;
    // The hypervisor may have moved a virtual core during the run: the longer round trip is reported.
    let after = cache_line::round_trip_ns(spec.cores);
    Ok(BenchResult {
        run: Run {
            tool: "spindle-limit",
            address: None,
            nqn: None,
            rw: spec.access,
            mix: (spec.access == Access::RandRw).then_some(spec.reads_percent),
            zipf: None,
            bs: Bytes::from_len(spec.block_bytes),
            qd: spec.depth,
            queues: spec.connections,
            span: Some(Bytes::from_len(spec.span_bytes)),
            seconds: spec.measured.as_secs_f64(),
            cores: spec.cores.map_or(Vec::new(), |CorePair(server, requester)| vec![server, requester]),
            verify: None,
            congestion: spec.congestion.clone(),
        },
        elapsed: outcome.elapsed,
        operations: outcome.operations,
        errors: 0,
        latency: outcome.latency,
        line_round_trip_ns: Some(before.max(after)),
        cpu_share: Some(outcome.cpu_share),
    })
}

fn show(args: &LimitArgs, result: &BenchResult) -> Result<(), LimitError> {
    if args.output.json {
        say!("{}", report::json::render(result)?);
    } else {
        say!("{}, payload in {}", result.run.summary(), args.span);
        say!("{}", report::table::render(&[("limit", result)]));
        if let (Some(nanoseconds), [server, requester]) =
            (result.line_round_trip_ns, result.run.cores.as_slice())
        {
            say!(
                "cache line between core {server} (serving) and {requester} (requesting): {nanoseconds:.0} ns"
            );
        }
        if let Some(share) = result.cpu_share.filter(|share| *share < CPU_SHARE_MIN) {
            say!("disturbed: the two ends had their cores for only {:.0} % of the time", share * 100.0);
        }
    }
    if let Some(path) = &args.output.plot {
        report::plot::write(path, &result.run.summary(), &[("limit", &result.latency)])?;
    }
    Ok(())
}

impl LoadSpec {
    fn new(args: &LimitArgs) -> Result<LoadSpec, LimitError> {
        let load = &args.load;
        if load.bs.get() == 0 || load.bs > BLOCK_MAX {
            let rule = format!("a block is 1 B to {BLOCK_MAX}");
            return Err(LimitError::Size { option: "--bs", value: load.bs.to_string(), rule });
        }
        if args.span < load.bs || args.span.get() / load.bs.get() > u64::from(u32::MAX) {
            let rule = format!("the span holds 1 to 2^32 - 1 blocks of {}", load.bs);
            return Err(LimitError::Size { option: "--span", value: args.span.to_string(), rule });
        }
        if load.qd < args.connections || load.qd > DEPTH_MAX {
            let rule = format!(
                "each of the {} connections needs one, and {DEPTH_MAX} is the most",
                args.connections
            );
            return Err(LimitError::Size { option: "--qd", value: load.qd.to_string(), rule });
        }
        if args.socket_buffer > SOCKET_BUFFER_MAX {
            let rule = format!("a socket's buffer is 0 to {SOCKET_BUFFER_MAX}");
            let value = args.socket_buffer.to_string();
            return Err(LimitError::Size { option: "--socket-buffer", value, rule });
        }
        Ok(LoadSpec {
            access: load.rw,
            reads_percent: load.rw.reads_percent(load.mix),
            block_bytes: load.bs.as_len(),
            depth: load.qd,
            connections: args.connections,
            span_bytes: args.span.as_len(),
            inline_bytes_max: args.icd.as_len(),
            congestion: (!args.congestion.is_empty()).then(|| args.congestion.clone()),
            socket_buffer_bytes: args.socket_buffer.as_len(),
            cores: Some(choose_cores(args.cores)?),
            warm_up: WARM_UP,
            measured: load.seconds,
        })
    }

    /// Returns the expected duration of a run, with a margin. The main thread sleeps that long if it draws no
    /// progress bar.
    fn expected_duration(&self) -> Duration {
        self.warm_up + self.measured + WARM_UP
    }

    /// Returns the number of requests that connection `index` keeps in flight.
    fn depth_of(&self, index: usize) -> usize {
        self.depth / self.connections + usize::from(index < self.depth % self.connections)
    }
}

/// Largest `--bs`; larger than the MDTS of NVMe drives.
const BLOCK_MAX: Bytes = Bytes::new(64 << 20);
/// Largest `--socket-buffer`, as for `tcp.socket_buffer`.
const SOCKET_BUFFER_MAX: Bytes = Bytes::new(64 << 20);
/// Largest `--qd`: an NVMe queue has at most 65,536 entries, one of which stays empty.
const DEPTH_MAX: usize = 65_535;

/// Returns the requested cores, or the first two of the process's affinity mask. Fails if a core is not in
/// the mask, or the mask has fewer than two cores.
fn choose_cores(asked: Option<CorePair>) -> Result<CorePair, LimitError> {
    let allowed = available_cores();
    let refused = |asked: String| LimitError::Cores { asked, allowed: format!("{allowed:?}") };
    match (asked, allowed.as_slice()) {
        (None, [first, second, ..]) => Ok(CorePair(*first, *second)),
        (None, _) => Err(refused("A,B (it needs two)".to_owned())),
        (Some(pair), _) if allowed.contains(&pair.0) && allowed.contains(&pair.1) => Ok(pair),
        (Some(pair), _) => Err(refused(format!("{},{}", pair.0, pair.1))),
    }
}

/// Pins the calling thread. A failure is ignored: the run is valid, and the reported round trip of a cache
/// line shows a bad placement.
fn pin(core: usize) {
    let _ = pin_current_thread(core);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn depth_is_shared_out_to_the_last_request() {
        let spec = LoadSpec { depth: 10, connections: 4, ..exchange::small_spec(Access::RandRead) };
        let depths: Vec<usize> = (0..4).map(|index| spec.depth_of(index)).collect();
        assert_eq!(depths, [3, 3, 2, 2]);
    }

    #[test]
    fn a_core_that_does_not_exist_is_refused_with_those_that_do() {
        let error = choose_cores(Some(CorePair(0, 4097))).expect_err("no such core").to_string();
        assert!(error.contains("0,4097") && error.contains("may use ["), "{error}");
    }

    #[test]
    fn a_result_says_what_was_run() {
        let spec = exchange::small_spec(Access::RandRw);
        let progress = Progress::new("test", spec.measured, 4096, true);
        let result = measure(&spec, progress).expect("runs");
        assert_eq!(result.latency.count(), result.operations);
        let json = report::json::render(&result).expect("renders");
        assert_eq!(json["run"]["tool"], "spindle-limit");
        assert_eq!(json["run"]["mix"], 50);
        assert!(json["line_round_trip_ns"].is_number());
    }
}
