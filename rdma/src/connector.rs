//! [`Connector`]: connects to a peer, in steps that do not wait for it.
//!
//! ```text
//!   address (selects the device) ─> route ─> the caller makes its queue pair, and connects ─> Established
//! ```

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::cm_channel::{CmChannel, CmEvent, CmEventKind};
use crate::cm_id::CmId;
use crate::device::Device;
use crate::error::VerbsError;

/// Step of a connect: what it waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Address,
    Route,
    /// The connect request was sent.
    Connect,
    Established,
}

impl Step {
    /// Returns the step that follows on an event; `None`: the event ends the attempt.
    fn after(self, kind: CmEventKind) -> Option<Step> {
        match (self, kind) {
            (Step::Address, CmEventKind::AddressResolved) => Some(Step::Route),
            (Step::Route, CmEventKind::RouteResolved) => Some(Step::Connect),
            (Step::Connect, CmEventKind::Established) => Some(Step::Established),
            _ => None,
        }
    }
}

/// What a step of a [`Connector`] has come to.
pub enum Progress<'a> {
    /// The route is resolved. The caller creates the queue pair, on this device, and calls [`CmId::connect`].
    Routed(&'a CmId, Arc<Device>),
    /// The connection is established; the event has the peer's private data. The channel reports the events
    /// of this identifier only.
    Established(CmId, CmChannel, Box<CmEvent>),
    /// The attempt has failed: another event has arrived than the one that the step waits for.
    Ended(Box<CmEvent>),
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// This machine has no RDMA device, or none for the address, or its kernel has no `rdma_ucm`.
    #[error("this machine has no RDMA device, or its kernel no connection manager for it (rdma_ucm)")]
    NoRdma,
    /// A step has failed.
    #[error("cannot connect to {address} over RDMA: {step}: {source}")]
    Failed {
        /// Address of the peer.
        address: SocketAddr,
        /// Name of the step.
        step: &'static str,
        /// The failed verbs call and its error number.
        #[source]
        source: VerbsError,
    },
    /// The peer or its connection manager has rejected the connection.
    #[error("cannot connect to {address} over RDMA: {why}")]
    Refused {
        /// Address of the peer.
        address: SocketAddr,
        /// Reason of the rejection.
        why: String,
    },
}

impl ConnectError {
    /// Returns what makes the error of a verb in step `step`.
    pub fn failed(address: SocketAddr, step: &'static str) -> impl Fn(VerbsError) -> ConnectError {
        move |source| ConnectError::Failed { address, step, source }
    }
}

/// A connection attempt. Objects of the caller that use its identifier are dropped before it.
pub struct Connector {
    step: Step,
    /// `None` after the connection was returned.
    ends: Option<(CmId, CmChannel)>,
    address: SocketAddr,
    timeout: Duration,
    label: Option<&'static str>,
}

impl Connector {
    /// Starts the address resolution. `timeout`: that of this resolution, and of that of the route. `label`:
    /// the name of all steps in errors; `None`: each has its own.
    ///
    /// # Errors
    /// [`ConnectError::NoRdma`], [`ConnectError::Failed`].
    pub fn begin(
        address: SocketAddr,
        timeout: Duration,
        label: Option<&'static str>,
    ) -> Result<Connector, ConnectError> {
        let mut connector = Connector { step: Step::Address, ends: None, address, timeout, label };
        if Device::all().map_err(connector.failed("devices"))?.is_empty() {
            return Err(ConnectError::NoRdma);
        }
        let channel = CmChannel::new().map_err(|_| ConnectError::NoRdma)?;
        let id = CmId::new(&channel).map_err(connector.failed("identifier"))?;
        id.resolve_address(None, address, timeout).map_err(connector.failed("address"))?;
        connector.ends = Some((id, channel));
        Ok(connector)
    }

    fn failed(&self, step: &'static str) -> impl Fn(VerbsError) -> ConnectError + use<> {
        ConnectError::failed(self.address, self.label.unwrap_or(step))
    }

    /// Returns the name of the current step.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self.step {
            Step::Address => "RDMA address",
            Step::Route => "RDMA route",
            Step::Connect | Step::Established => "RDMA connect",
        }
    }

    /// Advances without blocking; `None`: the next event has not arrived. Must not be called after a failure.
    ///
    /// # Errors
    /// [`ConnectError::NoRdma`], [`ConnectError::Failed`].
    pub fn step(&mut self) -> Result<Option<Progress<'_>>, ConnectError> {
        let Some((id, channel)) = &self.ends else { return Ok(None) };
        let Some(event) = channel.next_event().map_err(self.failed(self.name()))? else { return Ok(None) };
        let Some(step) = self.step.after(event.kind) else {
            return Ok(Some(Progress::Ended(Box::new(event))));
        };
        self.step = step;
        match step {
            Step::Address | Step::Route => {
                id.resolve_route(self.timeout).map_err(self.failed("route"))?;
                Ok(None)
            }
            Step::Connect => {
                // Listed again: the device may have been added after `begin`.
                let devices = Device::all().map_err(self.failed("devices"))?;
                let device = Arc::clone(id.device(&devices).ok_or(ConnectError::NoRdma)?);
                Ok(self.ends.as_ref().map(|(id, _)| Progress::Routed(id, device)))
            }
            Step::Established => {
                let ends = self.ends.take();
                Ok(ends.map(|(id, channel)| Progress::Established(id, channel, Box::new(event))))
            }
        }
    }

    /// Sleeps until an event arrives, at most `timeout`; may return early.
    pub fn wait_io(&self, timeout: Duration) {
        let timeout = Timespec::try_from(timeout).ok();
        if let Some((_, channel)) = &self.ends {
            // An error ends the wait early; the next step reports it.
            let _ = poll(&mut [PollFd::new(channel, PollFlags::IN)], timeout.as_ref());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_event_leads_to_the_next_step_and_any_other_ends_the_attempt() {
        let kinds = [CmEventKind::AddressResolved, CmEventKind::RouteResolved, CmEventKind::Established];
        let steps = [Step::Address, Step::Route, Step::Connect, Step::Established];
        for (at, step) in steps.into_iter().enumerate() {
            for (of, kind) in kinds.into_iter().enumerate() {
                let next = (at == of).then(|| steps[at + 1]);
                assert_eq!(step.after(kind), next, "{step:?} {kind:?}");
            }
            for kind in [CmEventKind::Rejected, CmEventKind::AddressError, CmEventKind::DeviceRemoval] {
                assert_eq!(step.after(kind), None, "{step:?} {kind:?}");
            }
        }
    }
}
