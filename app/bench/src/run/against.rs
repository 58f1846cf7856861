//! `spindle bench ADDRESS --against NQN`: the same load on two subsystems of one target, in short slices.
//!
//! ```text
//!   slices    A B  B A  A B  B A ..    each: ramp, measured time, then the commands in flight end
//! ```
//! A machine that changes its speed for seconds changes it for both sides alike. The ratio of the rates is
//! the median over the pairs of slices, so that a pair within which the speed changed does not count.
//! Latencies are those of all slices.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use super::engine::Engine;
use super::job::{Load, Tally};
use super::{BenchError, LoadSpec, Measured, Outcome, Stage, Total, WARM_UP, describe, outcome, target};
use crate::args::BenchTargetArgs;
use crate::random::Random;
use crate::report::{BenchResult, Latencies, median, per_second};

/// Measured time of a slice. Long against the ramp, short against a virtual machine's changes of speed.
const SLICE: Duration = Duration::from_millis(50);
/// Latencies that a slice has at least, up to [`SLICE_MAX`]: the rate of a slice is that of whole commands.
const SLICE_LATENCIES: f64 = 50.0;
/// Longest slice: the other side does not keep its controllers alive meanwhile. The shortest time-out is 1 s.
const SLICE_MAX: Duration = Duration::from_millis(500);
/// Time at the start of a slice that is not measured: the queue fills.
const RAMP: Duration = Duration::from_millis(3);

#[derive(Debug)]
pub(super) struct Against {
    pub(super) result: BenchResult,
    /// Rate of the first side over that of the other: median over the pairs of slices.
    pub(super) iops_ratio: f64,
}

struct Side<'a> {
    engine: Engine<'a>,
    spec: LoadSpec,
    tally: Tally,
    /// Position of sequential loads.
    next: u64,
    sum: Measured,
    cpu: Duration,
}

impl<'a> Side<'a> {
    fn connect(args: &BenchTargetArgs, done: &'a AtomicU64) -> Result<Side<'a>, BenchError> {
        let connected = target::connect(args)?;
        let allowed = connected.queues.first().map_or(0, spindle_nvme_initiator::IoQueue::transfer_bytes_max);
        let mut spec = target::spec(args, &connected.namespace, allowed)?;
        spec.warm_up = RAMP;
        spec.measured = SLICE.min(args.load.seconds);
        let engine = Engine::new(connected, &spec, done)?;
        let sum = Measured {
            elapsed: Duration::ZERO,
            operations: 0,
            latency: Latencies::new(),
            cpu_share: None,
            busy: None,
        };
        Ok(Side { engine, spec, tally: Tally::default(), next: 0, sum, cpu: Duration::ZERO })
    }

    /// Runs one slice and returns its rate. `is_counted`: the slice is part of the result.
    fn slice(&mut self, seed: u64, is_counted: bool, done: &AtomicU64) -> Result<f64, BenchError> {
        self.spec.seed = seed;
        let mut load = Load::new(&self.spec, None, &mut self.tally);
        load.continue_at(self.next);
        self.engine.run(&mut load)?;
        self.next = load.next_unit();
        let measured = load.measured();
        done.fetch_add(measured.operations, Ordering::Relaxed);
        let rate = per_second(measured.operations, measured.elapsed);
        if is_counted {
            self.cpu += measured.elapsed.mul_f64(measured.cpu_share.unwrap_or(0.0));
            self.sum.elapsed += measured.elapsed;
            self.sum.operations += measured.operations;
            self.sum.latency.add(&measured.latency);
        }
        Ok(rate)
    }

    fn finish(mut self, args: &BenchTargetArgs) -> Outcome {
        let share = self.cpu.as_secs_f64() / self.sum.elapsed.as_secs_f64();
        self.sum.cpu_share = Some(share).filter(|share| share.is_finite());
        let (extras, run) = (self.engine.extras(args), describe(args, self.engine.target(), &self.spec));
        self.engine.finish();
        outcome(run, self.sum, self.tally, extras)
    }
}

/// Returns the measured time of a slice for a load of `depth` commands in flight that has this rate, in
/// commands per second. At most a quarter of `seconds`, so that each side is the first of some pairs.
fn slice_for(rate: f64, depth: usize, seconds: Duration) -> Duration {
    let wanted = SLICE_LATENCIES * depth as f64 / rate;
    let longest = if wanted < SLICE_MAX.as_secs_f64() { Duration::from_secs_f64(wanted) } else { SLICE_MAX };
    longest.min(seconds / 4).max(SLICE.min(seconds))
}

/// Connects to both subsystems, runs the load on each by turns and returns the result of the first, with that
/// of the other in [`Outcome::against`].
pub(super) fn measure(
    args: &BenchTargetArgs,
    nqn: &str,
    stages: &mpsc::Sender<Stage>,
    done: &AtomicU64,
) -> Result<Outcome, BenchError> {
    // The engines count each slice anew.
    let in_slice = AtomicU64::new(0);
    let other_args = BenchTargetArgs { nqn: Some(nqn.to_owned()), ..args.clone() };
    let mut first = Side::connect(args, &in_slice)?;
    let mut other = Side::connect(&other_args, &in_slice)?;
    let slices = |time: Duration, slice: Duration| time.as_nanos().div_ceil(slice.as_nanos().max(1));
    let warm_up = slices(WARM_UP, first.spec.measured);
    let mut count = warm_up + 1;
    let mut warm_up_rates = Vec::new();
    let title = format!("bench {} {} by turns", args.load.rw, args.load.bs);
    // Fails only after a panic of the main thread.
    let _ = stages.send(Stage { title, total: Total::Time(2 * (WARM_UP + args.load.seconds)) });
    // Both read and write the same addresses.
    let units = first.spec.units.min(other.spec.units);
    (first.spec.units, other.spec.units) = (units, units);
    let mut ratios = Vec::new();
    let mut seeds = Random::new(first.spec.seed);
    let mut pair = 0;
    while pair < count {
        let (seed, is_counted) = (seeds.below(u64::MAX), pair >= warm_up);
        let rates = if pair.is_multiple_of(2) {
            let rate = first.slice(seed, is_counted, done)?;
            (rate, other.slice(seed, is_counted, done)?)
        } else {
            let rate = other.slice(seed, is_counted, done)?;
            (first.slice(seed, is_counted, done)?, rate)
        };
        if is_counted && rates != (0.0, 0.0) {
            ratios.push(rates.0 / rates.1);
        }
        pair += 1;
        if !is_counted {
            warm_up_rates.push(rates.0.min(rates.1));
        }
        if pair == warm_up {
            let slice = slice_for(median(warm_up_rates.drain(..)), args.load.qd, args.load.seconds);
            (first.spec.measured, other.spec.measured) = (slice, slice);
            count = warm_up + slices(args.load.seconds, slice);
        }
    }
    if first.sum.operations == 0 || other.sum.operations == 0 {
        let rule =
            format!("no command of one of the subsystems ended in its slices of {:?}", first.spec.measured);
        return Err(BenchError::Size { option: "--against", value: nqn.to_owned(), rule });
    }
    let other = other.finish(&other_args);
    let mut outcome = first.finish(args);
    outcome.tally.join(other.tally);
    outcome.against = Some(Against { result: other.result, iops_ratio: median(ratios.into_iter()) });
    Ok(outcome)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_has_fifty_latencies_but_no_more_than_half_a_second() {
        let seconds = Duration::from_secs(10);
        assert_eq!(slice_for(10_000.0, 1, seconds), SLICE, "0.1 ms");
        assert_eq!(slice_for(100_000.0, 400, seconds), Duration::from_millis(200), "4 ms");
        for rate in [30.0, 0.0, f64::NAN] {
            assert_eq!(slice_for(rate, 1, seconds), SLICE_MAX);
            assert_eq!(slice_for(rate, 1, Duration::from_millis(300)), Duration::from_millis(75));
            assert_eq!(slice_for(rate, 1, Duration::from_millis(20)), Duration::from_millis(20));
        }
    }
}
