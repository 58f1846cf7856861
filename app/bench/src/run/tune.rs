//! `spindle bench tune ADDRESS`: writes of each size with in-capsule data, compared with writes whose data
//! the target fetches (TCP: after an R2T, RDMA: by RDMA READ).
//!
//! Each round measures each memory, depth and size in both ways, one after the other, each on connections of
//! its own. A ratio is the median of the ratios of the rounds. The result is the largest size up to which the
//! geometric mean of the ratios of all depths is at least 1.

use std::sync::atomic::AtomicU64;
use std::sync::mpsc;
use std::thread;

use crate::say;
use crate::size::Bytes;
use serde_json::{Value, json};
use spindle_nvme_initiator::{TransportKind, split_transport};

use super::{BenchError, measure, target};
use crate::access::Access;
use crate::args::{BenchTargetArgs, LoadArgs, OutputArgs, TuneArgs};
use crate::report::median;

/// Sizes that are compared, within the target's limit.
const SIZES: [u64; 6] = [2 << 10, 4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10];

/// A depth and memory, with the result for each size.
struct Shape {
    qd: usize,
    /// The host's buffers are registered once (RDMA), not for each command.
    is_registered: bool,
    comparisons: Vec<Comparison>,
}

/// One size: IOPS of each round.
struct Comparison {
    bytes: u64,
    in_capsule: Vec<f64>,
    fetched: Vec<f64>,
}

impl Comparison {
    fn ratio(&self) -> f64 {
        median(self.in_capsule.iter().zip(&self.fetched).map(|(capsule, fetched)| capsule / fetched))
    }
}

/// Runs `spindle bench tune` and prints the result.
pub fn run(args: &TuneArgs) -> Result<(), BenchError> {
    if !args.destroy_data {
        let rule = "this measurement writes to the namespace: --destroy-data allows it".to_owned();
        return Err(BenchError::Size { option: "--destroy-data", value: "not given".to_owned(), rule });
    }
    // A thread of its own, as the measuring thread of `bench ADDRESS`: it is pinned.
    let tuned = thread::scope(|scope| {
        let measuring = thread::Builder::new().name("bench".to_owned());
        let measuring = measuring.spawn_scoped(scope, || compare(args));
        let measuring = measuring.map_err(|_| BenchError::Thread("could not be started"))?;
        measuring.join().unwrap_or(Err(BenchError::Thread("panicked")))
    });
    let (offered, shapes) = tuned?;
    show(args, offered, &shapes);
    Ok(())
}

/// Measures everything. Returns the target's in-capsule limit and the shapes.
fn compare(args: &TuneArgs) -> Result<(u64, Vec<Shape>), BenchError> {
    let first = bench_args(args, SIZES[0], 1, true, true);
    let connected = target::connect(&first)?;
    let offered = connected.controllers.first().map_or(0, |it| it.identify().in_capsule_bytes());
    let block_bytes = u64::from(connected.namespace.block_bytes());
    drop(connected);
    let sizes = SIZES.into_iter().filter(|bytes| *bytes <= offered && bytes.is_multiple_of(block_bytes));
    let sizes: Vec<u64> = sizes.collect();
    if sizes.is_empty() {
        let rule = format!("at least {} and a block of {block_bytes} B are needed", Bytes::new(SIZES[0]));
        let value = Bytes::new(offered).to_string();
        return Err(BenchError::Size { option: "the target's in_capsule", value, rule });
    }
    let is_rdma = split_transport(&args.address).0 == TransportKind::Rdma;
    let memories: &[bool] = if is_rdma { &[true, false] } else { &[true] };
    let mut shapes = Vec::new();
    for is_registered in memories {
        for qd in &args.qd {
            let comparison =
                |bytes: &u64| Comparison { bytes: *bytes, in_capsule: Vec::new(), fetched: Vec::new() };
            let comparisons = sizes.iter().map(comparison).collect();
            shapes.push(Shape { qd: *qd, is_registered: *is_registered, comparisons });
        }
    }
    for _ in 0..args.rounds {
        for Shape { qd, is_registered, comparisons } in &mut shapes {
            for Comparison { bytes, in_capsule, fetched } in comparisons {
                in_capsule.push(iops(&bench_args(args, *bytes, *qd, true, *is_registered))?);
                fetched.push(iops(&bench_args(args, *bytes, *qd, false, *is_registered))?);
            }
        }
    }
    Ok((offered, shapes))
}

fn iops(args: &BenchTargetArgs) -> Result<f64, BenchError> {
    // Nobody receives the stages: this command draws no progress.
    let (stages, _) = mpsc::channel();
    let outcome = measure(args, &stages, &AtomicU64::new(0))?;
    if outcome.tally.errors > 0 {
        return Err(BenchError::Errors { count: outcome.tally.errors, shown: outcome.tally.shown });
    }
    Ok(outcome.result.iops())
}

fn bench_args(
    args: &TuneArgs,
    bytes: u64,
    qd: usize,
    is_in_capsule: bool,
    is_registered: bool,
) -> BenchTargetArgs {
    let registered = if is_registered { 1 << 30 } else { 0 };
    BenchTargetArgs {
        address: Some(args.address.clone()),
        nqn: args.nqn.clone(),
        load: LoadArgs { rw: Access::RandWrite, mix: 0, bs: Bytes::new(bytes), qd, seconds: args.seconds },
        queues: 1,
        core: args.core,
        verify: false,
        optimistic: false,
        bare: false,
        against: None,
        optimistic_pages: 1,
        optimistic_eager: false,
        hostnqn: args.hostnqn.clone(),
        nsid: args.nsid,
        span: args.span,
        header_digest: false,
        data_digest: false,
        in_capsule: Some(Bytes::new(if is_in_capsule { bytes } else { 0 })),
        registration_bytes: Bytes::new(registered),
        busy: false,
        idle_queues: 0,
        keep_alive_tmo: 10,
        output: OutputArgs { json: true, plot: None },
    }
}

/// The largest size such that it and all smaller ones are not slower with in-capsule data, over all depths;
/// 0: none. Of buffers that are registered once, as those of a host's page cache or of `bench` are.
fn best(shapes: &[Shape]) -> u64 {
    let mut best = 0;
    let of_registered: Vec<&Shape> = shapes.iter().filter(|shape| shape.is_registered).collect();
    let sizes = of_registered.first().map_or(0, |shape| shape.comparisons.len());
    for at in 0..sizes {
        let ratios = of_registered.iter().filter_map(|shape| shape.comparisons.get(at));
        let product: f64 = ratios.map(Comparison::ratio).product();
        if product < 1.0 {
            break;
        }
        best = of_registered[0].comparisons[at].bytes;
    }
    best
}

fn show(args: &TuneArgs, offered: u64, shapes: &[Shape]) {
    let best = best(shapes);
    if args.json {
        let rows: Vec<Value> = shapes.iter().flat_map(rows).collect();
        say!("{}", json!({ "offered": offered, "in_capsule": best, "writes": rows }));
        return;
    }
    say!(
        "{:>6} {:>9} {:>12} {:>12} {:>12} {:>7}",
        "depth",
        "size",
        "memory",
        "in-capsule",
        "fetched",
        "ratio"
    );
    for row in shapes.iter().flat_map(rows) {
        let number = |key: &str| row[key].as_f64().unwrap_or(0.0);
        let memory = if row["is_registered"] == true { "registered" } else { "each time" };
        let (qd, size) = (&row["qd"], Bytes::new(row["bytes"].as_u64().unwrap_or(0)).to_string());
        let (capsule, fetched) = (number("in_capsule_iops"), number("fetched_iops"));
        say!("{qd:>6} {size:>9} {memory:>12} {capsule:>12.0} {fetched:>12.0} {:>7.2}", number("ratio"));
    }
    say!("in_capsule = \"{}\"", Bytes::new(best));
    if best == offered.min(SIZES[SIZES.len() - 1]) && offered < SIZES[SIZES.len() - 1] {
        let offered = Bytes::new(offered);
        say!(
            "the target takes no more than {offered} in a capsule; set in_capsule = \"64KiB\" to measure more"
        );
    }
}

fn rows(shape: &Shape) -> Vec<Value> {
    let row = |it: &Comparison| {
        json!({
            "qd": shape.qd,
            "bytes": it.bytes,
            "is_registered": shape.is_registered,
            "in_capsule_iops": median(it.in_capsule.iter().copied()).round(),
            "fetched_iops": median(it.fetched.iter().copied()).round(),
            "ratio": (it.ratio() * 1e3).round() / 1e3,
        })
    };
    shape.comparisons.iter().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(qd: usize, is_registered: bool, ratios: &[f64]) -> Shape {
        let comparison = |(at, ratio): (usize, &f64)| Comparison {
            bytes: SIZES[at],
            in_capsule: vec![100.0 * ratio, 90.0 * ratio, 300.0 * ratio],
            fetched: vec![100.0, 90.0, 300.0],
        };
        Shape { qd, is_registered, comparisons: ratios.iter().enumerate().map(comparison).collect() }
    }

    #[test]
    fn the_result_is_the_largest_size_up_to_which_nothing_is_slower_on_the_whole() {
        let deep = shape(32, true, &[1.2, 1.1, 0.95, 0.8]);
        assert_eq!(best(&[shape(1, true, &[1.5, 1.4, 1.2, 1.1]), deep]), 8 << 10);
        assert_eq!(best(&[shape(1, true, &[0.9, 2.0])]), 0, "a gap ends it");
        assert_eq!(best(&[shape(1, true, &[1.0]), shape(1, false, &[0.1])]), 2 << 10);
        assert_eq!(best(&[]), 0);
    }

    #[test]
    fn data_is_only_destroyed_where_it_is_said() {
        let bench = crate::args::parse("bench tune 127.0.0.1").expect("a command");
        let Some(crate::args::BenchCommand::Tune(args)) = bench.command else { panic!("tune") };
        assert!(run(&args).expect_err("refused").to_string().contains("--destroy-data"));
    }
}
