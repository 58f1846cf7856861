//! Errors of the control path, and reasons for the end of a connection.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use nvme_spec::fabrics::ConnectInvalid;
use nvme_spec::status::Status;
use spindle_nvme_optimistic::client;
use spindle_nvme_rdma::host;
use spindle_nvme_tcp::Violation;
use spindle_rdma::{ConnectError, VerbsError, WcStatus};
use spindle_reactor::mem::PoolError;
use spindle_reactor::net::Errno;

/// Reason for which a connection ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Loss {
    /// Closed by this host.
    #[error("this host closed it")]
    Requested,
    /// Closed by the target.
    #[error("the target closed it")]
    ByPeer,
    /// The socket has failed with this error number.
    #[error("{}", io::Error::from(*.0))]
    Socket(Errno),
    /// The target violated NVMe/TCP, did not answer ICReq in time, or sent C2HTermReq.
    #[error("{0}")]
    Violation(Violation),
    /// In this time no outstanding command was completed, or Keep Alive was not answered.
    #[error("no command was completed in {0:?}")]
    Silent(Duration),
    /// A work request has failed with this completion status (RDMA).
    #[error("a work request failed: {0}")]
    Work(WcStatus),
    /// The target violated NVMe/RDMA.
    #[error("{0}")]
    RdmaViolation(host::Violation),
    /// The RDMA device was removed or has failed.
    #[error("the RDMA device failed")]
    Device,
    /// A verbs call has failed.
    #[error("{0}")]
    Verb(VerbsError),
}

/// Errors of the control path; most name the failed step.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The TCP connect has failed or timed out.
    #[error("cannot connect to {address}: {source}")]
    Connect {
        /// Address of the target.
        address: SocketAddr,
        /// Error of the kernel; `TimedOut` after the connect timeout.
        #[source]
        source: io::Error,
    },
    /// There is no RDMA connection.
    #[error(transparent)]
    Rdma(#[from] ConnectError),
    /// There is no optimistic connection.
    #[error(transparent)]
    Optimistic(#[from] client::Error),
    /// The target has completed a command with an error status.
    #[error("{step}: the target answered: {status}{}", invalid_field_text(*invalid))]
    Status {
        /// Name of the step.
        step: &'static str,
        /// Status of the completion.
        status: Status,
        /// Invalid field of Connect, where the completion names one.
        invalid: Option<ConnectInvalid>,
    },
    /// The connection ended before the step was complete.
    #[error("{step}: the connection ended: {loss}")]
    Lost {
        /// Name of the step.
        step: &'static str,
        /// Reason of the end.
        loss: Loss,
    },
    /// No answer, or not the expected status (CSTS), within the timeout.
    #[error("{step}: no answer in {after:?}")]
    TimedOut {
        /// Name of the step.
        step: &'static str,
        /// The timeout.
        after: Duration,
    },
    /// The answer violates the specification or an assumption of this host.
    #[error("{step}: {what}")]
    Answer {
        /// Name of the step.
        step: &'static str,
        /// The violation, for the message.
        what: &'static str,
    },
    /// A number outside the limits of the controller, the RDMA device or this host.
    #[error("{field} = {value}: {low} to {high} are allowed")]
    Range {
        /// Name of the parameter.
        field: &'static str,
        /// Requested value.
        value: u64,
        /// Smallest allowed value.
        low: u64,
        /// Largest allowed value.
        high: u64,
    },
    /// The namespace is another disk than before (NSID, NGUID, EUI-64, UUID, serial number or block size
    /// differs), or reports no identifier.
    #[error("namespace {nsid} is another disk than before")]
    OtherDisk {
        /// NSID of the namespace.
        nsid: u32,
    },
    /// The target requires authentication or a secure channel, which is not supported.
    #[error("Connect: the target requires authentication or a secure channel, which is not supported")]
    Authentication,
    /// All entries of the admin queue or all its buffers are in use.
    #[error("{step}: all commands of the admin queue are outstanding")]
    Busy {
        /// Name of the step.
        step: &'static str,
    },
    /// Buffers for admin data could not be allocated.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The epoll instance could not be created or used.
    #[error("cannot watch the connections: {0}")]
    Watch(#[source] io::Error),
}

impl Error {
    /// Returns [`Error::Range`] unless `value` is in the range `low` to `high`.
    pub(crate) fn in_range(
        field: &'static str,
        value: impl Into<u64>,
        low: impl Into<u64>,
        high: impl Into<u64>,
    ) -> Result<(), Error> {
        let (value, low, high) = (value.into(), low.into(), high.into());
        if (low..=high).contains(&value) { Ok(()) } else { Err(Error::Range { field, value, low, high }) }
    }
}

/// Returns the text for the invalid field of a Connect; empty for `None` and for other fields.
fn invalid_field_text(invalid: Option<ConnectInvalid>) -> &'static str {
    const FIELDS: [(ConnectInvalid, &str); 9] = [
        (ConnectInvalid::RECFMT, ", because of RECFMT"),
        (ConnectInvalid::QID, ", because of QID"),
        (ConnectInvalid::SQSIZE, ", because of SQSIZE (queue entries)"),
        (ConnectInvalid::CATTR, ", because of CATTR (SQ flow control)"),
        (ConnectInvalid::KATO, ", because of KATO (keep alive)"),
        (ConnectInvalid::HOSTID, ", because of HOSTID"),
        (ConnectInvalid::CNTLID, ", because of CNTLID"),
        (ConnectInvalid::SUBNQN, ", because of SUBNQN (no such subsystem here)"),
        (ConnectInvalid::HOSTNQN, ", because of HOSTNQN"),
    ];
    let Some(invalid) = invalid else { return "" };
    FIELDS.iter().find(|(field, _)| *field == invalid).map_or("", |(_, text)| *text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_connect_names_the_field() {
        let error = Error::Status {
            step: "Connect",
            status: Status::CONNECT_INVALID_PARAMETERS.dnr(),
            invalid: Some(ConnectInvalid::SUBNQN),
        };
        let text = error.to_string();
        assert!(text.contains("Connect") && text.contains("SUBNQN") && text.contains("0x182"), "{text}");
    }
}
