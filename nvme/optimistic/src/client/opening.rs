//! [`Opening`]: connects a queue to the target's optimistic service, in steps that do not wait for it.
//! [`OptimisticGrant`]: what that needs.

use std::net::SocketAddr;
use std::time::Duration;

use nvme_spec::optimistic::{
    OPTIMISTIC_PAGE_SHIFT, OptimisticAccept, OptimisticReject, OptimisticRequest, Token,
};
use nvme_spec::zerocopy::IntoBytes;
use spindle_nvme_rdma::registration::Limits as RegistrationLimits;
use spindle_rdma::{CmEvent, CmEventKind, ConnectError, ConnectParams, Connector, Progress, VerbsError};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::PoolError;
use spindle_reactor::net::Errno;

use super::{Attached, NamespacePages, RdmaReader};

/// What one optimistic connection needs: address, token and an empty directory. The directory is allocated
/// here, because the thread of a queue must not wait for so much memory.
pub struct OptimisticGrant {
    /// Address of the service.
    pub address: SocketAddr,
    /// Address of the target's NVMe port, whose protection domain the connection shares.
    pub far: SocketAddr,
    /// Token of Attach.
    pub token: Token,
    /// The namespace, with the directory.
    pub namespace: NamespacePages,
    /// Time limit of the attempt.
    pub timeout: Duration,
    /// Limits of the registration cache.
    pub registration: RegistrationLimits,
    /// Longest time without a completion while READs are in flight.
    pub silence_max: Nanos,
}

pub(super) const STEP: &str = "connect for optimistic reads";

/// Why a queue was not attached.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no connection.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The connection was not established within this time.
    #[error("connect for optimistic reads: no answer in {0:?}")]
    TimedOut(Duration),
    /// The private data of the accept is not of this protocol.
    #[error("connect for optimistic reads: the private data is not of this protocol")]
    Accept,
    /// The device has work requests for fewer commands than the queue has.
    #[error("commands outstanding of a queue (RDMA device) = {wanted}: 1 to {allowed} are allowed")]
    Depth {
        /// Commands of the queue.
        wanted: u32,
        /// Most commands.
        allowed: u32,
    },
    /// There is no memory.
    #[error(transparent)]
    Memory(#[from] PoolError),
}

/// A connection attempt to the target's optimistic service. Its drop before the end closes the connection.
pub struct Opening {
    /// Dropped first: its queue pair uses the connector's identifier. `None` before the route is resolved.
    reader: Option<RdmaReader>,
    connector: Connector,
    /// `None` after the queue was attached.
    grant: Option<OptimisticGrant>,
    /// Slots of commands are below.
    slots: usize,
    deadline: Nanos,
}

impl Opening {
    /// Begins to connect at `now`, for a queue whose commands have slots below `slots`.
    ///
    /// # Errors
    /// [`Error::Connect`].
    pub fn begin(grant: OptimisticGrant, slots: usize, now: Nanos) -> Result<Opening, Error> {
        let connector = Connector::begin(grant.address, grant.timeout, Some(STEP))?;
        let deadline = now + grant.timeout.into();
        Ok(Opening { reader: None, connector, grant: Some(grant), slots, deadline })
    }

    /// Advances without blocking. Returns the optimistic reads of the queue once the connection is
    /// established. Must not be called afterwards or after an error.
    ///
    /// # Errors
    /// The attempt has failed.
    pub fn step(&mut self, now: Nanos) -> Result<Option<Attached<RdmaReader>>, Error> {
        let Opening { reader, connector, grant: Some(grant), slots, .. } = self else { return Ok(None) };
        while let Some(progress) = connector.step()? {
            match progress {
                Progress::Routed(id, device) => {
                    *reader = Some(RdmaReader::new(id, &device, grant, *slots)?);
                    let request = OptimisticRequest::new(grant.token);
                    let parameters = ConnectParams {
                        private_data: request.as_bytes(),
                        responder_resources: 0,
                        initiator_depth: device.limits().initiator_depth,
                    };
                    id.connect(&parameters).map_err(ConnectError::failed(grant.address, STEP))?;
                }
                Progress::Established(id, channel, event) => {
                    let (Some(mut reader), Some(grant)) = (self.reader.take(), self.grant.take()) else {
                        return Ok(None);
                    };
                    let accept = accepted(&event)?;
                    reader.on_established(id, channel, accept);
                    return Ok(Some(Attached::new(reader, grant.namespace, *slots)?));
                }
                Progress::Ended(event) => return Err(refusal(grant.address, &event).into()),
            }
        }
        in_time(now, self.deadline, grant.timeout).map(|()| None)
    }

    /// Sleeps until an event arrives or the time limit is reached; may return early.
    pub fn wait_io(&self, now: Nanos) {
        self.connector.wait_io((self.deadline - now).as_duration());
    }
}

fn in_time(now: Nanos, deadline: Nanos, timeout: Duration) -> Result<(), Error> {
    if now < deadline { Ok(()) } else { Err(Error::TimedOut(timeout)) }
}

/// Converts the event that ended the attempt.
fn refusal(address: SocketAddr, event: &CmEvent) -> ConnectError {
    if event.kind == CmEventKind::Rejected {
        let why = match OptimisticReject::parse(&event.private_data) {
            Some(status) => format!("the target refused: {}", status.reason()),
            None => format!("it was refused (reason {})", event.status),
        };
        return ConnectError::Refused { address, why };
    }
    let errno = event.errno().unwrap_or(Errno::IO.raw_os_error());
    ConnectError::failed(address, STEP)(VerbsError { verb: "rdma_connect", errno })
}

fn accepted(event: &CmEvent) -> Result<OptimisticAccept, Error> {
    OptimisticAccept::parse(&event.private_data)
        .filter(|accept| accept.page_shift == OPTIMISTIC_PAGE_SHIFT)
        .ok_or(Error::Accept)
}

#[cfg(test)]
mod tests {
    use nvme_spec::optimistic::OptimisticStatus;
    use spindle_rdma::CmToken;

    use super::*;

    fn event(kind: CmEventKind, status: i32, data: &[u8]) -> Box<CmEvent> {
        Box::new(CmEvent {
            kind,
            id: CmToken::next(),
            listener: None,
            new_id: None,
            status,
            private_data: data.iter().copied().collect(),
            responder_resources: 0,
            initiator_depth: 0,
        })
    }

    #[test]
    fn the_accept_is_of_this_protocol() {
        let accept = OptimisticAccept {
            version: 1.into(),
            epoch: 9,
            page_shift: OPTIMISTIC_PAGE_SHIFT,
            ..OptimisticAccept::default()
        };
        let found = accepted(&event(CmEventKind::Established, 0, accept.as_bytes()));
        assert_eq!(found.expect("no error").epoch, 9);
        let found = accepted(&event(CmEventKind::Established, 0, &[0; 40]));
        assert!(matches!(found, Err(Error::Accept)), "{found:?}");
    }

    #[test]
    fn it_gives_up_at_the_deadline_and_not_before() {
        let (timeout, end) = (Duration::from_secs(5), Nanos::from_secs(6));
        assert!(in_time(end - Nanos(1), end, timeout).is_ok());
        assert!(matches!(in_time(end, end, timeout), Err(Error::TimedOut(after)) if after == timeout));
    }

    #[test]
    fn a_reject_and_a_failed_step_are_errors() {
        let address = "192.0.2.1:4430".parse().expect("an address");
        let of = |kind, status, data: &[u8]| refusal(address, &event(kind, status, data));
        let mut reject = [0; 4];
        reject[0] = 1;
        reject[2] = 4;
        let found = of(CmEventKind::Rejected, 28, &reject).to_string();
        assert!(found.ends_with(OptimisticStatus(4).reason()), "{found}");
        let found = of(CmEventKind::Rejected, 8, &[]).to_string();
        assert_eq!(found, "cannot connect to 192.0.2.1:4430 over RDMA: it was refused (reason 8)");
        let found = of(CmEventKind::AddressError, -110, &[]);
        assert!(matches!(found, ConnectError::Failed { source, .. } if source.errno == 110), "{found:?}");
        for (kind, status) in [(CmEventKind::DeviceRemoval, i32::MIN), (CmEventKind::Established, 0)] {
            let found = of(kind, status, &[0; 40]);
            assert!(matches!(found, ConnectError::Failed { .. }), "{found:?}");
        }
    }
}
