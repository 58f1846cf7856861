//! `spindle bench ADDRESS`: measures an NVMe/TCP or NVMe/RDMA target through the initiator library.
//!
//! ```text
//!   main thread                          measuring thread (--core pins it; polls without a pause)
//!   Progress <── stage, completed ────   connect: discover, controllers, queues
//!   table, JSON, plot <── Outcome ────   [fill] ─ load: warm-up, then measured ─ [check every block]
//! ```
//! Fill and check run with `--verify` only, and the fill only if the load has reads. A turn of the measuring
//! thread is one [`QueueSet::poll`](spindle_nvme_initiator::QueueSet::poll). The clock is read once for all
//! completions of a queue, and the commands that replace them are sent in one call.
//!
//! With `--bare` another loop, of [`bare`], takes the place of the initiator's I/O queues. With `--against`,
//! [`against`] runs the load in slices.
//!
//! The I/O commands are reads and writes at addresses that are multiples of `--bs`.
//!
//! Limits: 1 GiB of data in flight. A run always ends: each step of connecting has a deadline, and a
//! connection without a completion for 30 s is closed. At the end of a stage the run fails if commands are
//! outstanding and none completes for [`DRAIN_MAX`].

mod against;
mod bare;
mod engine;
mod job;
mod target;
pub mod tune;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use crate::say;
use serde_json::json;
use spindle_nvme_initiator as initiator;
use spindle_reactor::affinity::{AffinityError, pin_current_thread};

use crate::access::Access;
use crate::args::BenchTargetArgs;
use crate::report::{self, BenchResult, Latencies, PROGRESS_PERIOD, Progress, Run};
use crate::size::Bytes;

use engine::{Engine, TurnClock};
use job::{Check, Fill, Load, Tally};

/// Warm-up before the measured time, in which TCP windows grow and processor caches fill.
const WARM_UP: Duration = Duration::from_millis(200);
/// Longest time without a completion at the end of a stage, while commands are outstanding.
const DRAIN_MAX: Duration = Duration::from_secs(10);
/// Most errors that are printed. All errors are counted.
const ERRORS_SHOWN: usize = 8;
/// A result is reported as disturbed if the measuring thread had less than this share of a core.
const CPU_SHARE_MIN: f64 = 0.97;

/// Failure of `bench ADDRESS`: no result, or a result with failed commands or wrong data.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    #[error(transparent)]
    Address(#[from] initiator::AddressError),
    #[error("{option} = `{value}`: {source}")]
    Name {
        option: &'static str,
        value: String,
        #[source]
        source: initiator::nvme_spec::nqn::NqnError,
    },
    #[error(transparent)]
    Target(#[from] initiator::Error),
    #[error(
        "{address} offers no NVM subsystem over {} to this host (--nqn selects one, --hostnqn sets the host \
         NQN)",
        transport.to_string().to_uppercase()
    )]
    NothingOffered { address: SocketAddr, transport: initiator::TransportKind },
    #[error("the subsystem has no active namespace{0} for this host")]
    NoNamespace(String),
    /// A value out of range, or a value that the target or another option does not allow.
    #[error("{option} is {value}, but {rule}")]
    Size { option: &'static str, value: String, rule: String },
    #[error(transparent)]
    Core(#[from] AffinityError),
    #[error(transparent)]
    Pool(#[from] initiator::PoolError),
    #[error("queue {queue}: the connection ended after {operations} commands: {loss}")]
    Lost { queue: usize, operations: u64, loss: initiator::Loss },
    #[error("{outstanding} commands did not end, and nothing was received for {after:?}")]
    Stuck { outstanding: usize, after: Duration },
    #[error("a command could not be sent: {0}")]
    Refused(initiator::Refusal),
    #[error("{count} errors:\n{}", shown.join("\n"))]
    Errors { count: u64, shown: Vec<String> },
    /// The measuring thread could not be started, or panicked.
    #[error("the measuring thread {0}")]
    Thread(&'static str),
    #[error("cannot print the result: {0}")]
    Json(#[from] serde_json::Error),
    #[error(transparent)]
    Plot(#[from] report::plot::PlotError),
}

#[derive(Debug)]
struct Outcome {
    result: BenchResult,
    tally: Tally,
    /// Settings of the run in addition to [`Run`], for the JSON.
    extras: serde_json::Map<String, serde_json::Value>,
    /// With `--against`: the other side.
    against: Option<against::Against>,
}

/// Message to the main thread at the start of a stage: fill, load or check.
#[derive(Debug)]
struct Stage {
    title: String,
    total: Total,
}

/// Length of a stage.
#[derive(Debug, Clone, Copy)]
enum Total {
    Time(Duration),
    Commands(u64),
}

/// Runs `spindle bench ADDRESS` and prints the result. Fails if any command failed or a read returned wrong
/// data, in any stage.
pub fn run(args: &BenchTargetArgs) -> Result<(), BenchError> {
    let done = AtomicU64::new(0);
    let outcome = thread::scope(|scope| {
        let (stages, stage) = mpsc::channel();
        let done = &done;
        let measuring = thread::Builder::new().name("bench".to_owned());
        let measuring = measuring.spawn_scoped(scope, move || measure(args, &stages, done));
        let measuring = measuring.map_err(|_| BenchError::Thread("could not be started"))?;
        show_progress(args, &stage, done);
        measuring.join().unwrap_or(Err(BenchError::Thread("panicked")))
    })?;
    show(args, &outcome)
}

/// Draws the progress until the measuring thread ends, which closes the channel.
fn show_progress(args: &BenchTargetArgs, stages: &mpsc::Receiver<Stage>, done: &AtomicU64) {
    let Ok(mut stage) = stages.recv() else { return };
    loop {
        let (total, bytes) = (stage.total, args.load.bs.get());
        let span = match total {
            Total::Time(time) => time,
            Total::Commands(commands) => Duration::from_millis(commands),
        };
        let mut progress = Progress::new(&stage.title, span, bytes, args.output.json);
        let began = Instant::now();
        let next = loop {
            // While the bar is hidden, only the end of a stage wakes this thread.
            let period = if progress.is_hidden() { Duration::from_secs(3600) } else { PROGRESS_PERIOD };
            match stages.recv_timeout(period) {
                Ok(next) => break Some(next),
                Err(RecvTimeoutError::Disconnected) => break None,
                Err(RecvTimeoutError::Timeout) => {}
            }
            let commands = done.load(Ordering::Relaxed);
            let at = match total {
                Total::Time(_) => began.elapsed(),
                Total::Commands(_) => Duration::from_millis(commands),
            };
            progress.set(at, commands);
        };
        progress.finish();
        match next {
            Some(next) => stage = next,
            None => return,
        }
    }
}

fn measure(
    args: &BenchTargetArgs,
    stages: &mpsc::Sender<Stage>,
    done: &AtomicU64,
) -> Result<Outcome, BenchError> {
    if let Some(core) = args.core {
        pin_current_thread(core)?;
    }
    if args.bare {
        return bare::measure(args, stages, done);
    }
    if let Some(nqn) = &args.against {
        return against::measure(args, nqn, stages, done);
    }
    let connected = target::connect(args)?;
    let transfer_bytes_max = connected.queues.first().map_or(0, initiator::IoQueue::transfer_bytes_max);
    let spec = target::spec(args, &connected.namespace, transfer_bytes_max)?;
    let mut table = spec.table();
    let mut engine = Engine::new(connected, &spec, done)?;
    engine.turn_clock = args.busy.then(TurnClock::new);
    let begin = |title: &str, total: Total| {
        let title = format!("{title} {}", args.load.bs);
        // Fails only after a panic of the main thread.
        let _ = stages.send(Stage { title, total });
        done.store(0, Ordering::Relaxed);
    };
    let mut tally = Tally::default();
    if let Some(table) = &mut table
        && spec.reads_percent > 0
    {
        begin("fill", Total::Commands(table.units() as u64));
        let mut fill = Fill::new(table, &mut tally);
        engine.run(&mut fill)?;
    }
    begin(&format!("bench {}", args.load.rw), Total::Time(WARM_UP + spec.measured));
    let mut load = Load::new(&spec, table.as_mut(), &mut tally);
    engine.run(&mut load)?;
    let measured = load.measured();
    if let Some(table) = &mut table {
        begin("check", Total::Commands(table.units() as u64));
        engine.run(&mut Check::new(table, &mut tally))?;
    }
    let mut extras = engine.extras(args);
    add_busy(&mut extras, &measured);
    let run = describe(args, engine.target(), &spec);
    engine.finish();
    Ok(outcome(run, measured, tally, extras))
}

/// Adds the processor time per command, if it was measured.
fn add_busy(extras: &mut serde_json::Map<String, serde_json::Value>, measured: &Measured) {
    if let Some(busy) = measured.busy.filter(|_| measured.operations > 0) {
        let each = busy.as_secs_f64() * 1e6 / measured.operations as f64;
        extras.insert("busy_us_per_command".to_owned(), json!((each * 1e3).round() / 1e3));
    }
}

fn outcome(
    run: Run,
    measured: Measured,
    tally: Tally,
    extras: serde_json::Map<String, serde_json::Value>,
) -> Outcome {
    let result = BenchResult {
        run,
        elapsed: measured.elapsed,
        operations: measured.operations,
        errors: tally.errors,
        latency: measured.latency,
        line_round_trip_ns: None,
        cpu_share: measured.cpu_share,
    };
    Outcome { result, tally, extras, against: None }
}

#[derive(Debug)]
struct Measured {
    elapsed: Duration,
    operations: u64,
    latency: Latencies,
    cpu_share: Option<f64>,
    /// Processor time of turns with completions; `None` without `--busy`.
    busy: Option<Duration>,
}

/// Options checked against the target. A unit is the blocks of one command.
#[derive(Debug)]
struct LoadSpec {
    access: Access,
    reads_percent: u8,
    unit_bytes: u32,
    unit_blocks: u32,
    block_bytes: u32,
    /// Units of the namespace that are used, from LBA 0.
    units: u64,
    /// Commands in flight by queue; 0 for idle queues.
    depths: Vec<u16>,
    warm_up: Duration,
    measured: Duration,
    verify: bool,
    seed: u64,
}

impl LoadSpec {
    fn table(&self) -> Option<super::verify::GenerationTable> {
        let count = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
        let (unit, block) = (count(self.unit_blocks.into()), count(self.block_bytes.into()));
        self.verify.then(|| super::verify::GenerationTable::new(count(self.units), unit, block, self.seed))
    }
}

fn describe(args: &BenchTargetArgs, target: &initiator::Target, spec: &LoadSpec) -> Run {
    Run {
        tool: if args.bare { "bench --bare" } else { "bench" },
        address: Some(target.address.to_string()),
        nqn: Some(target.nqn.to_string()),
        rw: args.load.rw,
        mix: (args.load.rw == Access::RandRw).then_some(args.load.mix),
        zipf: None,
        bs: args.load.bs,
        qd: args.load.qd,
        queues: args.queues,
        span: Some(Bytes::new(spec.units * u64::from(spec.unit_bytes))),
        seconds: args.load.seconds.as_secs_f64(),
        cores: args.core.into_iter().collect(),
        verify: args.verify.then_some(true),
        congestion: None,
    }
}

fn show(args: &BenchTargetArgs, outcome: &Outcome) -> Result<(), BenchError> {
    let Outcome { result, tally, extras, against } = outcome;
    if args.output.json {
        let mut object = report::json::render(result)?;
        if let Some(run) = object["run"].as_object_mut() {
            run.extend(extras.clone());
        }
        if args.verify {
            object["blocks_checked"] = json!(tally.blocks_checked);
        }
        if let Some(against) = against {
            object["against"] = report::json::render(&against.result)?;
            object["iops_ratio"] = report::json::rounded(against.iops_ratio, 4);
        }
        say!("{object}");
    } else {
        let (address, nqn) = (result.run.address.as_deref(), result.run.nqn.as_deref());
        say!("{}, {} at {}", result.run.summary(), nqn.unwrap_or_default(), address.unwrap_or_default());
        let mut rows = vec![("bench", result)];
        rows.extend(against.iter().map(|against| ("against", &against.result)));
        say!("{}", report::table::render(&rows));
        if let Some(against) = against {
            say!(
                "IOPS over those of {}: {:.3}",
                against.result.run.nqn.as_deref().unwrap_or_default(),
                against.iops_ratio
            );
        }
        if let Some(counts) = extras.get("optimistic") {
            say!(
                "optimistic reads: {} accepted, {} repeated as ordinary reads",
                counts["accepted"],
                counts["rejected"]
            );
        }
        if let Some(busy) = extras.get("busy_us_per_command") {
            say!("busy for {busy} us per command");
        }
        if args.verify {
            let wrong = if tally.mismatches == 0 { "none" } else { "NOT ALL" };
            say!(
                "{} blocks checked, {wrong} {}",
                tally.blocks_checked,
                if wrong == "none" { "wrong" } else { "right" }
            );
        }
        if let Some(share) = result.cpu_share.filter(|share| *share < CPU_SHARE_MIN) {
            say!("disturbed: the measuring thread had its core for only {:.0} % of the time", share * 100.0);
        }
    }
    let summary = result.run.summary();
    let plotted = args
        .output
        .plot
        .as_ref()
        .map_or(Ok(()), |path| report::plot::write(path, &summary, &[("bench", &result.latency)]));
    // Failed commands are reported first: they may be the reason for an empty plot.
    if tally.errors > 0 {
        return Err(BenchError::Errors { count: tally.errors, shown: tally.shown.clone() });
    }
    Ok(plotted?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_that_failed_are_told_also_where_none_is_left_to_plot() {
        let bench =
            crate::args::parse("bench 127.0.0.1 --json --plot /nowhere/at/all.svg").expect("a command");
        let mut result = report::example_result();
        result.latency.clear();
        let tally = Tally { errors: 7, shown: vec!["write of unit 3".to_owned()], ..Tally::default() };
        let mut outcome = Outcome { result, tally, extras: serde_json::Map::new(), against: None };
        let error = show(&bench.target, &outcome).expect_err("failed").to_string();
        assert_eq!(error, "7 errors:\nwrite of unit 3");
        outcome.tally = Tally::default();
        assert!(matches!(show(&bench.target, &outcome), Err(BenchError::Plot(_))));
    }
}
