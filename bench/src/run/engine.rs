//! The measuring thread's loop: keeps every queue at its depth with the commands of a [`Job`].

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use initiator::nvme_spec::Nqn;
use initiator::{
    Buf, Clock, Completion, Controller, ControllerEvent, IoQueue, Namespace, Nanos, Pages, Pool, QueueSet,
    Target, ZoneSpec,
};
use serde_json::{Map, Value, json};
use spindle_initiator as initiator;

use super::job::{Command, Job};
use super::target::Connected;
use super::{BenchError, DRAIN_MAX, Plan};
use crate::args::BenchTargetArgs;

/// Turns without anything to do after which the time is asked for all the same.
const TURNS_PER_LOOK: u32 = 16;
/// How often the controllers are looked at and the progress is told.
const SLOW_PERIOD: Nanos = Nanos::from_ms(50);

/// A command in flight.
#[derive(Debug, Clone, Copy, Default)]
struct Flight {
    sent: Nanos,
    command: Command,
}

/// What one queue needs.
#[derive(Debug)]
struct Lane {
    /// By the index of the ticket.
    flights: Box<[Flight]>,
    /// Buffers without a command.
    spare: Vec<Buf>,
}

/// See the module.
pub(super) struct Engine<'a> {
    set: QueueSet,
    lanes: Vec<Lane>,
    shape: Shape,
    controllers: Vec<Controller>,
    target: Target,
    connected_in: Duration,
    done: &'a AtomicU64,
}

/// What turns a command of a job into one of NVMe.
#[derive(Debug, Clone, Copy)]
struct Shape {
    namespace: Namespace,
    unit_blocks: u64,
}

impl<'a> Engine<'a> {
    /// Takes over the connections; all memory is taken here.
    pub(super) fn new(
        connected: Connected,
        plan: &Plan,
        done: &'a AtomicU64,
    ) -> Result<Engine<'a>, BenchError> {
        let count = plan.depths.iter().map(|depth| u32::from(*depth)).sum();
        let zone = ZoneSpec { buffer_bytes: plan.unit_bytes.next_multiple_of(4096), count };
        let pool = Pool::new(&[zone], Pages::Transparent)?;
        let mut set = QueueSet::new(initiator::Options::default().batch_bytes)?;
        let mut lanes = Vec::new();
        for (queue, depth) in connected.queues.into_iter().zip(&plan.depths) {
            let flights = vec![Flight::default(); queue.depth()].into_boxed_slice();
            let mut spare: Vec<Buf> = (0..*depth).filter_map(|_| pool.take(plan.unit_bytes)).collect();
            spare.iter_mut().for_each(|buf| scribble(buf, plan.seed));
            lanes.push(Lane { flights, spare });
            set.add(queue)?;
        }
        Ok(Engine {
            set,
            lanes,
            shape: Shape { namespace: connected.namespace, unit_blocks: plan.unit_blocks.into() },
            controllers: connected.controllers,
            target: connected.target,
            connected_in: connected.connected_in,
            done,
        })
    }

    /// Run a job to its end.
    pub(super) fn run<J: Job>(&mut self, job: &mut J) -> Result<(), BenchError> {
        let mut now = Clock::now();
        let mut next_slow = now;
        let mut drain = Drain::default();
        let mut turns = 0;
        job.tick(now);
        self.start(job, now)?;
        loop {
            let has_come = self.turn(job, &mut now)?;
            turns += 1;
            if !has_come && turns >= TURNS_PER_LOOK {
                turns = 0;
                now = Clock::now();
                job.tick(now);
            }
            if now >= next_slow {
                next_slow = now + SLOW_PERIOD;
                self.done.store(job.done(), Ordering::Relaxed);
                self.look_at_controllers(now)?;
                // What found no free unit is tried again.
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
            if drain.is_stuck(has_come, now) {
                return Err(BenchError::Stuck { outstanding, after: DRAIN_MAX });
            }
        }
    }

    /// One turn of all queues; `now` is moved on when something came.
    #[inline]
    fn turn<J: Job>(&mut self, job: &mut J, now: &mut Nanos) -> Result<bool, BenchError> {
        let Engine { set, lanes, shape, .. } = self;
        let mut trouble = None;
        let has_come = set.poll(*now, |index, queue| {
            *now = Clock::now();
            job.tick(*now);
            let lane = &mut lanes[index];
            while let Some(completion) = queue.next_completion() {
                if let Err(why) = lane.ended(queue, *shape, job, completion, *now) {
                    trouble.get_or_insert(BenchError::Refused(why));
                }
            }
            if let Some(loss) = queue.loss() {
                trouble = Some(BenchError::Lost { queue: index, operations: job.done(), loss });
            }
        });
        trouble.map_or(Ok(has_come), Err)
    }

    /// Start commands for all buffers that have none.
    fn start<J: Job>(&mut self, job: &mut J, now: Nanos) -> Result<(), BenchError> {
        for (index, lane) in self.lanes.iter_mut().enumerate() {
            for _ in 0..lane.spare.len() {
                let Some(buf) = lane.spare.pop() else { break };
                lane.submit(self.set.queue_mut(index), self.shape, job, buf, now)
                    .map_err(BenchError::Refused)?;
            }
        }
        Ok(())
    }

    fn look_at_controllers(&mut self, now: Nanos) -> Result<(), BenchError> {
        for controller in &mut self.controllers {
            while let Some(event) = controller.poll(now) {
                if let ControllerEvent::Lost(loss) = event {
                    return Err(initiator::Error::Lost { step: "admin queue", loss }.into());
                }
            }
        }
        Ok(())
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.target.address
    }

    pub(super) fn nqn(&self) -> Nqn {
        self.target.nqn
    }

    /// What was run, beyond what every benchmark has.
    pub(super) fn extras(&self, args: &BenchTargetArgs) -> Map<String, Value> {
        let mut extras = Map::new();
        extras.insert("hostnqn".to_owned(), json!(self.target.host.nqn.as_str()));
        extras.insert("nsid".to_owned(), json!(self.shape.namespace.nsid));
        extras.insert("idle_queues".to_owned(), json!(args.idle_queues));
        extras.insert("controllers".to_owned(), json!(self.controllers.len()));
        extras.insert("header_digest".to_owned(), json!(args.header_digest));
        extras.insert("data_digest".to_owned(), json!(args.data_digest));
        extras.insert("connect_ms".to_owned(), json!((self.connected_in.as_secs_f64() * 1e4).round() / 10.0));
        extras
    }

    /// Say goodbye. What was measured stands, whatever becomes of that.
    pub(super) fn finish(self) {
        drop(self.set);
        for controller in self.controllers {
            let _ = controller.shutdown();
        }
    }
}

impl Lane {
    /// A command ended; its buffer goes on with the next.
    #[inline]
    fn ended<J: Job>(
        &mut self,
        queue: &mut IoQueue,
        shape: Shape,
        job: &mut J,
        completion: Completion,
        now: Nanos,
    ) -> Result<(), initiator::Why> {
        let Flight { sent, command } = self.flights[completion.ticket.index()];
        job.ended(command, completion.result, completion.buf.as_ref(), (sent, now));
        match completion.buf {
            Some(buf) => self.submit(queue, shape, job, buf, now),
            None => Ok(()),
        }
    }

    /// Send the next command of the job with this buffer; without one the buffer waits.
    #[inline]
    fn submit<J: Job>(
        &mut self,
        queue: &mut IoQueue,
        shape: Shape,
        job: &mut J,
        mut buf: Buf,
        now: Nanos,
    ) -> Result<(), initiator::Why> {
        let Some(command) = job.next(&mut buf) else {
            self.spare.push(buf);
            return Ok(());
        };
        let lba = command.unit * shape.unit_blocks;
        let ticket = match command.is_read {
            true => queue.read(&shape.namespace, lba, buf),
            false => queue.write(&shape.namespace, lba, buf, false),
        };
        match ticket {
            Ok(ticket) => {
                self.flights[ticket.index()] = Flight { sent: now, command };
                Ok(())
            }
            // The end of the connection is told by the queue.
            Err(refused) if refused.why == initiator::Why::Down => Ok(()),
            Err(refused) => Err(refused.why),
        }
    }
}

/// Data that is not all alike; it also brings the buffer's pages in before anything is measured.
fn scribble(buf: &mut Buf, seed: u64) {
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

/// How long nothing has come of what is outstanding at the end. It counts from what was seen last and not
/// from the last command, so that a process which was stopped meanwhile looks first.
#[derive(Debug, Default)]
struct Drain {
    since: Option<Nanos>,
}

impl Drain {
    /// A turn in which something came, or not, has ended at `now`. True: it has been [`DRAIN_MAX`].
    fn is_stuck(&mut self, has_come: bool, now: Nanos) -> bool {
        if has_come {
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
        // The first look may be long after the last command.
        assert!(!drain.is_stuck(false, at(100)));
        assert!(!drain.is_stuck(false, at(109)));
        assert!(!drain.is_stuck(true, at(115)), "something came");
        assert!(!drain.is_stuck(false, at(124)));
        assert!(drain.is_stuck(false, at(125)));
    }
}
