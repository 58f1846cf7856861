//! [`Opening`]: an I/O queue that is being connected, in steps that do not wait.
//!
//! ```text
//!   begin ─> link (TCP: socket, ICReq; RDMA: address, route, connect) ─> Connect ─> IoQueue
//! ```
//! Each step has `connect_timeout`, Connect `connect_answer_timeout`. The same steps with waits between them
//! are how a controller connects its queues itself.

use std::sync::Arc;
use std::time::Duration;

use nvme_spec::Sqe;
use nvme_spec::fabrics::{CNTLID_DYNAMIC, ConnectAttributes, ConnectData, ConnectResult};
use nvme_spec::identify::IdentifyController;
use nvme_spec::zerocopy::IntoBytes;
use spindle_reactor::clock::{Clock, Nanos};
use spindle_reactor::mem::Pool;
use spindle_transport::host::HostData;

use super::Controller;
use super::admin::succeeded;
use crate::error::{Error, Loss};
use crate::link::{LinkOpening, QueueName};
use crate::options::{Options, Target};
use crate::qpair::{Qpair, Refusal, Ticket};
use crate::queue::IoQueue;

/// The name of the first step over TCP, whose end in time has an error of its own.
const SOCKET: &str = "TCP";

/// What the I/O queues of one association need to know of it; any thread may make them. It outlives its
/// [`Controller`]: then the target refuses them.
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
    /// Most commands that one I/O queue may have outstanding.
    #[must_use]
    pub fn depth_max(&self) -> u16 {
        self.depth_max
    }
}

/// See the module. Dropped before its end, it ends the connection.
pub struct Opening {
    association: Arc<Association>,
    connecting: Connecting,
}

impl Opening {
    /// Begin to connect I/O queue `qid` for `depth` commands. A buffer of 1 KiB of `pool` is taken until it
    /// is over. `now` begins the time of the first step.
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

    /// On, as far as it goes at once. The queue when it is connected; after that, and after an error, there
    /// is nothing left to do.
    pub fn step(&mut self, now: Nanos) -> Result<Option<IoQueue>, Error> {
        let Some((qpair, _)) = self.connecting.step(now)? else { return Ok(None) };
        Ok(Some(self.queue(qpair)))
    }

    /// All steps, with waits between them.
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
    /// What makes I/O queues of this association elsewhere, by [`Opening`].
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

/// A queue of any number on its way.
pub(super) struct Connecting {
    target: Target,
    options: Options,
    name: QueueName,
    pool: Pool,
    state: State,
    deadline: Nanos,
}

enum State {
    Link(LinkOpening),
    /// Its Connect is outstanding.
    Connect(Box<Qpair>, Ticket),
    /// It was given out, or has failed.
    Over,
}

impl Connecting {
    pub(super) fn begin(
        target: &Target,
        options: &Options,
        pool: &Pool,
        name: QueueName,
        now: Nanos,
    ) -> Result<Connecting, Error> {
        let state = State::Link(LinkOpening::begin(target, options, name)?);
        let deadline = now + options.connect_timeout.into();
        let (target, options, pool) = (target.clone(), options.clone(), pool.clone());
        Ok(Connecting { target, options, name, pool, state, deadline })
    }

    fn step_name(&self) -> &'static str {
        match &self.state {
            State::Link(link) => link.name(),
            State::Connect(..) | State::Over if self.name.qid == 0 => "Connect",
            State::Connect(..) | State::Over => "Connect (I/O queue)",
        }
    }

    /// Time for the step that it is at.
    fn timeout(&self) -> Duration {
        match self.state {
            State::Link(_) | State::Over => self.options.connect_timeout,
            State::Connect(..) => self.options.connect_answer_timeout,
        }
    }

    /// On, as far as it goes at once. The queue and its CNTLID when it is connected.
    pub(super) fn step(&mut self, now: Nanos) -> Result<Option<(Qpair, u16)>, Error> {
        let before = self.step_name();
        let connected = self.step_state(now).inspect_err(|_| self.state = State::Over)?;
        let step = self.step_name();
        if connected.is_some() {
            return Ok(connected);
        }
        if step != before {
            self.deadline = now + self.timeout().into();
        } else if now >= self.deadline && !matches!(self.state, State::Over) {
            let after = self.timeout();
            self.state = State::Over;
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
            State::Over => Ok(None),
            State::Link(opening) => {
                let Some(link) = opening.step()? else { return Ok(None) };
                let mut qpair = Qpair::new(link, self.name.depth, &self.options);
                let ticket = self.submit_connect(&mut qpair)?;
                qpair.send();
                self.state = State::Connect(Box::new(qpair), ticket);
                Ok(None)
            }
            State::Connect(qpair, ticket) => {
                qpair.poll(now);
                // What was received may ask for the data (R2T).
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
                match std::mem::replace(&mut self.state, State::Over) {
                    State::Connect(qpair, _) => Ok(Some((*qpair, result.cntlid()))),
                    State::Link(_) | State::Over => Ok(None),
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
        // Entries less one, as the field counts, is the depth: one entry always stays empty.
        let sqsize_z = u16::try_from(qpair.depth()).unwrap_or(u16::MAX);
        // Then a successful read needs no completion of its own (C2HData SUCCESS).
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

    /// All steps, with waits between them.
    pub(super) fn finish(&mut self) -> Result<(Qpair, u16), Error> {
        loop {
            let now = Clock::now();
            if let Some(connected) = self.step(now)? {
                return Ok(connected);
            }
            let left = (self.deadline - now).as_duration();
            match &mut self.state {
                State::Link(link) => link.wait_io(left),
                State::Connect(qpair, _) => qpair.link.wait_io(left, None),
                State::Over => {}
            }
        }
    }
}
