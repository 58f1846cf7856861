//! [`Opening`]: connects an I/O queue, in steps that do not block.
//!
//! ```text
//!   begin ─> link (TCP: socket, ICReq; RDMA: address, route, connect) ─> Connect ─> IoQueue
//! ```
//! The timeout of each step is `connect_timeout`, that of Connect `connect_answer_timeout`. [`Controller`]
//! connects its queues by the same steps, and sleeps between them.

use std::sync::Arc;
use std::time::Duration;

use nvme_spec::Sqe;
use nvme_spec::fabrics::{CNTLID_DYNAMIC, ConnectAttributes, ConnectData, ConnectResult};
use nvme_spec::identify::IdentifyController;
use nvme_spec::zerocopy::IntoBytes;
use spindle_nvme_transport::host::HostData;
use spindle_reactor::clock::{Clock, Nanos};
use spindle_reactor::mem::Pool;

use super::Controller;
use super::admin::succeeded;
use crate::error::{Error, Loss};
use crate::link::{LinkOpening, QueueName};
use crate::options::{Options, Target};
use crate::qpair::{Qpair, Refusal, Ticket};
use crate::queue::IoQueue;

/// Name of the first step over TCP; a timeout of this step is reported as [`Error::Connect`].
const SOCKET: &str = "TCP";

/// Parameters of an association for connecting its I/O queues, on any thread. May outlive its [`Controller`]:
/// the target then refuses the queues.
#[derive(Debug, Clone)]
pub struct Association {
    pub(super) target: Target,
    pub(super) options: Options,
    pub(super) cntlid: u16,
    pub(super) identify: Arc<IdentifyController>,
    pub(super) depth_max: u16,
    pub(super) queues_granted: u16,
    pub(super) transfer_bytes_max: u32,
}

impl Association {
    /// Returns the most outstanding commands of one I/O queue.
    #[must_use]
    pub fn depth_max(&self) -> u16 {
        self.depth_max
    }

    /// Returns true if the target supports optimistic reads.
    #[must_use]
    pub fn has_optimistic_reads(&self) -> bool {
        self.identify.spindle_features().optimistic_reads()
    }
}

/// A connection attempt of an I/O queue. Its drop before the end closes the connection.
pub struct Opening {
    association: Arc<Association>,
    connecting: Connecting,
}

impl Opening {
    /// Begins to connect I/O queue `qid` for `depth` commands. Uses a buffer of 1 KiB of `pool` for the
    /// Connect data. The timeout of the first step begins at `now`.
    pub fn begin(
        association: &Arc<Association>,
        pool: &Pool,
        qid: u16,
        depth: u16,
        now: Nanos,
    ) -> Result<Opening, Error> {
        Error::in_range("commands outstanding", depth, 1_u16, association.depth_max)?;
        Error::in_range("I/O queues", qid, 1_u16, association.queues_granted)?;
        let name = QueueName { qid, cntlid: association.cntlid, depth };
        let connecting = Connecting::begin(&association.target, &association.options, pool, name, now)?;
        Ok(Opening { association: Arc::clone(association), connecting })
    }

    /// Advances without blocking. Returns the queue when it is connected, `None` before. Must not be called
    /// afterwards or after an error.
    pub fn step(&mut self, now: Nanos) -> Result<Option<IoQueue>, Error> {
        let Some((qpair, _)) = self.connecting.step(now)? else { return Ok(None) };
        Ok(Some(self.queue(qpair)))
    }

    /// Runs all steps and sleeps between them.
    pub(super) fn finish(mut self) -> Result<IoQueue, Error> {
        let (qpair, _) = self.connecting.finish()?;
        Ok(self.queue(qpair))
    }

    fn queue(&self, mut qpair: Qpair) -> IoQueue {
        let Association { identify, options, transfer_bytes_max, .. } = &*self.association;
        qpair.link.set_offered(identify, options.in_capsule_bytes_max);
        IoQueue::new(qpair, *transfer_bytes_max)
    }
}

impl Controller {
    /// Returns the parameters for connecting I/O queues of this association on other threads, by [`Opening`].
    #[must_use]
    pub fn association(&self) -> Arc<Association> {
        Arc::new(Association {
            target: self.target.clone(),
            options: self.options.clone(),
            cntlid: self.cntlid,
            identify: Arc::new(*self.identify),
            depth_max: self.depth_max(),
            queues_granted: self.queues_granted,
            transfer_bytes_max: self.transfer_bytes_max(),
        })
    }
}

/// A connection attempt of an admin or I/O queue.
pub(super) struct Connecting {
    target: Target,
    options: Options,
    name: QueueName,
    pool: Pool,
    state: OpeningState,
    deadline: Nanos,
}

enum OpeningState {
    Link(LinkOpening),
    Connect(Box<Qpair>, Ticket),
    /// The queue was returned, or the attempt has failed.
    Finished,
}

impl Connecting {
    pub(super) fn begin(
        target: &Target,
        options: &Options,
        pool: &Pool,
        name: QueueName,
        now: Nanos,
    ) -> Result<Connecting, Error> {
        let state = OpeningState::Link(LinkOpening::begin(target, options, name)?);
        let deadline = now + options.connect_timeout.into();
        let (target, options, pool) = (target.clone(), options.clone(), pool.clone());
        Ok(Connecting { target, options, name, pool, state, deadline })
    }

    fn step_name(&self) -> &'static str {
        match &self.state {
            OpeningState::Link(link) => link.name(),
            OpeningState::Connect(..) | OpeningState::Finished if self.name.qid == 0 => "Connect",
            OpeningState::Connect(..) | OpeningState::Finished => "Connect (I/O queue)",
        }
    }

    fn timeout(&self) -> Duration {
        match self.state {
            OpeningState::Link(_) | OpeningState::Finished => self.options.connect_timeout,
            OpeningState::Connect(..) => self.options.connect_answer_timeout,
        }
    }

    /// Advances without blocking. Returns the queue and its CNTLID when it is connected, `None` before. Fails
    /// when the current step has timed out.
    pub(super) fn step(&mut self, now: Nanos) -> Result<Option<(Qpair, u16)>, Error> {
        let before = self.step_name();
        let connected = self.step_state(now).inspect_err(|_| self.state = OpeningState::Finished)?;
        let step = self.step_name();
        if connected.is_some() {
            return Ok(connected);
        }
        if step != before {
            self.deadline = now + self.timeout().into();
        } else if now >= self.deadline && !matches!(self.state, OpeningState::Finished) {
            let after = self.timeout();
            self.state = OpeningState::Finished;
            if step == SOCKET {
                let source = std::io::ErrorKind::TimedOut.into();
                return Err(Error::Connect { address: self.target.address, source });
            }
            return Err(Error::TimedOut { step, after });
        }
        Ok(None)
    }

    fn step_state(&mut self, now: Nanos) -> Result<Option<(Qpair, u16)>, Error> {
        match &mut self.state {
            OpeningState::Finished => Ok(None),
            OpeningState::Link(opening) => {
                let Some(link) = opening.step()? else { return Ok(None) };
                let mut qpair = Qpair::new(link, self.name.depth, &self.options);
                let ticket = self.submit_connect(&mut qpair)?;
                qpair.send();
                self.state = OpeningState::Connect(Box::new(qpair), ticket);
                Ok(None)
            }
            OpeningState::Connect(qpair, ticket) => {
                qpair.poll(now);
                // Sends the Connect data if an R2T was received.
                qpair.send();
                let completion = qpair.take(*ticket);
                let loss = qpair.loss();
                let step = self.step_name();
                let Some(completion) = completion else {
                    return loss.map_or(Ok(None), |loss| Err(Error::Lost { step, loss }));
                };
                let result = ConnectResult::from_bits(succeeded(step, &completion)?.result_u32());
                if result.authentication_transaction_required() || result.secure_channel_required() {
                    return Err(Error::Authentication);
                }
                if self.name.qid != 0 && result.cntlid() != self.name.cntlid {
                    return Err(Error::Answer { step, what: "it names another controller" });
                }
                match std::mem::replace(&mut self.state, OpeningState::Finished) {
                    OpeningState::Connect(qpair, _) => Ok(Some((*qpair, result.cntlid()))),
                    OpeningState::Link(_) | OpeningState::Finished => Ok(None),
                }
            }
        }
    }

    fn submit_connect(&self, qpair: &mut Qpair) -> Result<Ticket, Error> {
        let QueueName { qid, cntlid, .. } = self.name;
        let (step, cntlid, kato) = match qid {
            0 => ("Connect", CNTLID_DYNAMIC, self.options.keep_alive_ms),
            _ => ("Connect (I/O queue)", cntlid, 0),
        };
        // SQSIZE is zero-based: entries less one. That is the depth, as one entry stays empty.
        let sqsize_z = u16::try_from(qpair.depth()).unwrap_or(u16::MAX);
        // Without SQ flow control a successful read may complete by C2HData with SUCCESS.
        let cattr = ConnectAttributes::new().with_disable_sq_flow_control(true);
        let data = ConnectData::new(self.target.host.id, cntlid, &self.target.nqn, &self.target.host.nqn);
        let bytes = u32::try_from(data.as_bytes().len()).unwrap_or(0);
        let mut buf = self.pool.take(bytes).ok_or(Error::Busy { step })?;
        buf.copy_in(0, data.as_bytes());
        let sqe = Sqe::connect(0, qid, sqsize_z, kato, cattr);
        qpair.submit(sqe, HostData::ToController(buf)).map_err(|refused| {
            if refused.why == Refusal::Full {
                return Error::Busy { step };
            }
            Error::Lost { step, loss: qpair.loss().unwrap_or(Loss::ByPeer) }
        })
    }

    pub(super) fn finish(&mut self) -> Result<(Qpair, u16), Error> {
        loop {
            let now = Clock::now();
            if let Some(connected) = self.step(now)? {
                return Ok(connected);
            }
            let left = (self.deadline - now).as_duration();
            match &mut self.state {
                OpeningState::Link(link) => link.wait_io(left),
                OpeningState::Connect(qpair, _) => qpair.link.wait_io(left, None),
                OpeningState::Finished => {}
            }
        }
    }
}
