//! Loop of the measuring thread: keeps each queue at its depth with the commands of a [`Job`].

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use initiator::{
    Buf, Clock, Completion, Controller, ControllerEvent, IoQueue, Namespace, Nanos, OptimisticCounts, Pages,
    Pool, QueueSet, Target, ZoneSpec,
};
use serde_json::{Map, Value, json};
use spindle_nvme_initiator as initiator;

use super::job::{Command, Job, cpu_time};
use super::target::Connected;
use super::{BenchError, DRAIN_MAX, LoadSpec};
use crate::args::BenchTargetArgs;

/// Fewest turns between two clock readings of turns without completions. Turns with completions always read
/// the clock.
pub(super) const IDLE_TURNS_PER_CLOCK_READ: u32 = 16;
/// Period of polling the controllers, updating the progress and retrying spare buffers.
pub(super) const CONTROLLER_POLL_PERIOD: Nanos = Nanos::from_ms(50);

#[derive(Debug, Clone, Copy, Default)]
struct InFlight {
    sent: Nanos,
    command: Command,
}

#[derive(Debug)]
struct QueueState {
    /// Indexed by [`Ticket::index`](initiator::Ticket::index).
    in_flight: Box<[InFlight]>,
    /// Buffers without a command in flight: at first all buffers, later those for which the job had no
    /// command.
    spare: Vec<Buf>,
}

/// Connections to the target, and the state of the commands on them.
pub(super) struct Engine<'a> {
    set: QueueSet,
    queue_states: Vec<QueueState>,
    mapping: UnitMapping,
    controllers: Vec<Controller>,
    target: Target,
    connected_in: Duration,
    done: &'a AtomicU64,
    /// Times the turns, for [`Job::on_turn`].
    pub(super) turn_clock: Option<TurnClock>,
}

/// Measures turns in processor time of the thread: what preempts it is not its work.
#[derive(Debug)]
pub(super) struct TurnClock {
    /// Time of one reading, a system call, which is subtracted.
    reading: Duration,
}

impl TurnClock {
    pub(super) fn new() -> TurnClock {
        let readings = (0..100).map(|_| {
            let began = cpu_time();
            cpu_time().saturating_sub(began)
        });
        TurnClock { reading: readings.min().unwrap_or_default() }
    }

    pub(super) fn since(&self, began: Duration) -> Nanos {
        cpu_time().saturating_sub(began).saturating_sub(self.reading).into()
    }
}

/// Maps the units of a job to logical blocks of a namespace.
#[derive(Debug, Clone, Copy)]
struct UnitMapping {
    namespace: Namespace,
    unit_blocks: u64,
}

impl<'a> Engine<'a> {
    /// Allocates the buffers of all commands in flight and fills them with pseudo-random data.
    pub(super) fn new(
        connected: Connected,
        spec: &LoadSpec,
        done: &'a AtomicU64,
    ) -> Result<Engine<'a>, BenchError> {
        let count = spec.depths.iter().map(|depth| u32::from(*depth)).sum();
        let zone = ZoneSpec { buffer_bytes: spec.unit_bytes.next_multiple_of(4096), count };
        let pool = Pool::new(&[zone], Pages::Transparent)?;
        let mut set = QueueSet::new(initiator::Options::default().batch_bytes)?;
        let mut queue_states = Vec::new();
        for (queue, depth) in connected.queues.into_iter().zip(&spec.depths) {
            let in_flight = vec![InFlight::default(); queue.depth()].into_boxed_slice();
            let mut spare: Vec<Buf> = (0..*depth).filter_map(|_| pool.take(spec.unit_bytes)).collect();
            spare.iter_mut().for_each(|buf| fill_pseudo_random(buf, spec.seed));
            queue_states.push(QueueState { in_flight, spare });
            set.add(queue)?;
        }
        Ok(Engine {
            set,
            queue_states,
            mapping: UnitMapping { namespace: connected.namespace, unit_blocks: spec.unit_blocks.into() },
            controllers: connected.controllers,
            target: connected.target,
            connected_in: connected.connected_in,
            done,
            turn_clock: None,
        })
    }

    /// Runs the job until it is over and its last command has completed. Fails if a connection or controller
    /// is lost, or commands do not complete for [`DRAIN_MAX`].
    pub(super) fn run<J: Job>(&mut self, job: &mut J) -> Result<(), BenchError> {
        let mut now = Clock::now();
        let mut next_controller_poll = now;
        let mut drain = Drain::default();
        let mut turns = 0;
        job.tick(now);
        self.start(job, now)?;
        loop {
            let began = self.turn_clock.as_ref().map(|_| cpu_time());
            let has_completions = self.turn(job, &mut now)?;
            turns += 1;
            if let (Some(clock), Some(began), true) = (&self.turn_clock, began, has_completions) {
                job.on_turn(clock.since(began));
            }
            if !has_completions && turns >= IDLE_TURNS_PER_CLOCK_READ {
                turns = 0;
                now = Clock::now();
                job.tick(now);
            }
            if now >= next_controller_poll {
                next_controller_poll = now + CONTROLLER_POLL_PERIOD;
                self.done.store(job.done(), Ordering::Relaxed);
                self.poll_controllers(now)?;
                // Retries the spare buffers: the units that the job tried before were in use.
                self.start(job, now)?;
            }
            if !job.is_over() {
                drain = Drain::default();
                continue;
            }
            let outstanding = self.set.outstanding();
            if outstanding == 0 {
                return Ok(());
            }
            if drain.is_stuck(has_completions, now) {
                return Err(BenchError::Stuck { outstanding, after: DRAIN_MAX });
            }
        }
    }

    /// Polls all queues once. Returns whether data arrived, and updates `now`.
    #[inline]
    fn turn<J: Job>(&mut self, job: &mut J, now: &mut Nanos) -> Result<bool, BenchError> {
        let Engine { set, queue_states, mapping, .. } = self;
        let mut error = None;
        let has_completions = set.poll(*now, |index, queue| {
            *now = Clock::now();
            job.tick(*now);
            let state = &mut queue_states[index];
            while let Some(completion) = queue.next_completion() {
                if let Err(why) = state.ended(queue, *mapping, job, completion, *now) {
                    error.get_or_insert(BenchError::Refused(why));
                }
            }
            if let Some(loss) = queue.loss() {
                error = Some(BenchError::Lost { queue: index, operations: job.done(), loss });
            }
        });
        error.map_or(Ok(has_completions), Err)
    }

    /// Queues commands for the spare buffers.
    fn start<J: Job>(&mut self, job: &mut J, now: Nanos) -> Result<(), BenchError> {
        for (index, state) in self.queue_states.iter_mut().enumerate() {
            for _ in 0..state.spare.len() {
                let Some(buf) = state.spare.pop() else { break };
                state
                    .submit(self.set.queue_mut(index), self.mapping, job, buf, now)
                    .map_err(BenchError::Refused)?;
            }
        }
        Ok(())
    }

    fn poll_controllers(&mut self, now: Nanos) -> Result<(), BenchError> {
        self.controllers.iter_mut().try_for_each(|controller| poll_controller(controller, now))
    }

    pub(super) fn target(&self) -> &Target {
        &self.target
    }

    /// Returns the counts of optimistic reads of all queues; `None` without `--optimistic`.
    pub(super) fn optimistic_counts(&self) -> Option<OptimisticCounts> {
        let counts = self.set.queues().filter_map(IoQueue::optimistic_counts);
        counts.reduce(|a, b| OptimisticCounts {
            accepted: a.accepted + b.accepted,
            rejected: a.rejected + b.rejected,
            learned: a.learned + b.learned,
        })
    }

    /// Returns the settings of the run that [`Run`](crate::report::Run) does not contain, for the JSON.
    pub(super) fn extras(&self, args: &BenchTargetArgs) -> Map<String, Value> {
        let mut extras = Map::new();
        extras.insert("hostnqn".to_owned(), json!(self.target.host.nqn.as_str()));
        extras.insert("nsid".to_owned(), json!(self.mapping.namespace.nsid));
        extras.insert("idle_queues".to_owned(), json!(args.idle_queues));
        extras.insert("controllers".to_owned(), json!(self.controllers.len()));
        extras.insert("header_digest".to_owned(), json!(args.header_digest));
        extras.insert("data_digest".to_owned(), json!(args.data_digest));
        if let Some(OptimisticCounts { accepted, rejected, learned }) = self.optimistic_counts() {
            let counts = json!({ "accepted": accepted, "rejected": rejected, "learned": learned });
            extras.insert("optimistic".to_owned(), counts);
        }
        extras.insert("connect_ms".to_owned(), json!((self.connected_in.as_secs_f64() * 1e4).round() / 10.0));
        extras
    }

    /// Closes the queues and shuts the controllers down. Errors are ignored, as the result is complete.
    pub(super) fn finish(self) {
        drop(self.set);
        for controller in self.controllers {
            let _ = controller.shutdown();
        }
    }
}

impl QueueState {
    /// Passes a completion to the job and submits the next command with its buffer, if it has one.
    #[inline]
    fn ended<J: Job>(
        &mut self,
        queue: &mut IoQueue,
        mapping: UnitMapping,
        job: &mut J,
        completion: Completion,
        now: Nanos,
    ) -> Result<(), initiator::Refusal> {
        let InFlight { sent, command } = self.in_flight[completion.ticket.index()];
        job.ended(command, completion.result, completion.buf.as_ref(), (sent, now));
        match completion.buf {
            Some(buf) => self.submit(queue, mapping, job, buf, now),
            None => Ok(()),
        }
    }

    /// Submits the next command of the job with `buf`. If the job has no command, `buf` becomes spare.
    #[inline]
    fn submit<J: Job>(
        &mut self,
        queue: &mut IoQueue,
        mapping: UnitMapping,
        job: &mut J,
        mut buf: Buf,
        now: Nanos,
    ) -> Result<(), initiator::Refusal> {
        let Some(command) = job.next(&mut buf) else {
            self.spare.push(buf);
            return Ok(());
        };
        let lba = command.unit * mapping.unit_blocks;
        let ticket = match command.is_read {
            true => queue.read(&mapping.namespace, lba, buf),
            false => queue.write(&mapping.namespace, lba, buf, false),
        };
        match ticket {
            Ok(ticket) => {
                self.in_flight[ticket.index()] = InFlight { sent: now, command };
                Ok(())
            }
            // `turn` reports the loss of the connection.
            Err(refused) if refused.why == initiator::Refusal::Down => Ok(()),
            Err(refused) => Err(refused.why),
        }
    }
}

/// Polls the admin queue. Fails if the controller is lost.
pub(super) fn poll_controller(controller: &mut Controller, now: Nanos) -> Result<(), BenchError> {
    while let Some(event) = controller.poll(now) {
        if let ControllerEvent::Lost(loss) = event {
            return Err(initiator::Error::Lost { step: "admin queue", loss }.into());
        }
    }
    Ok(())
}

/// Fills the buffer with pseudo-random data, which also maps its pages before the measurement.
pub(super) fn fill_pseudo_random(buf: &mut Buf, seed: u64) {
    let mut state = seed | 1;
    for segment in buf.segments_mut() {
        for word in segment.chunks_exact_mut(8) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            word.copy_from_slice(&state.to_le_bytes());
        }
    }
}

/// Detects outstanding commands that do not complete at the end of a job; with `--bare` also before. The time
/// counts from a turn of the loop, not from the last completion. So a stopped process polls before it fails.
#[derive(Debug, Default)]
pub(super) struct Drain {
    since: Option<Nanos>,
}

impl Drain {
    /// Returns true if there was no completion for [`DRAIN_MAX`]. Called after each turn of a job that is
    /// over; `has_completions` is the result of the turn.
    #[inline]
    pub(super) fn is_stuck(&mut self, has_completions: bool, now: Nanos) -> bool {
        if has_completions {
            self.since = None;
        }
        now >= *self.since.get_or_insert(now) + DRAIN_MAX.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_time_in_which_nothing_came_counts_at_the_end() {
        let at = |seconds: u64| Nanos::from_ms(seconds * 1000);
        let mut drain = Drain::default();
        // The first call may be long after the last command.
        assert!(!drain.is_stuck(false, at(100)));
        assert!(!drain.is_stuck(false, at(109)));
        assert!(!drain.is_stuck(true, at(115)), "something came");
        assert!(!drain.is_stuck(false, at(124)));
        assert!(drain.is_stuck(false, at(125)));
    }
}
