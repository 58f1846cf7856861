//! Why the control path failed, and why a connection ended.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use nvme_spec::fabrics::ConnectInvalid;
use nvme_spec::rdma::CmStatus;
use nvme_spec::status::Status;
use spindle_rdma::host;
use spindle_rdma_verbs::{VerbsError, WcStatus};
use spindle_reactor::mem::PoolError;
use spindle_reactor::net::Errno;
use spindle_tcp::Violation;

/// Why a connection ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Loss {
    /// We closed it.
    #[error("it was closed here")]
    Requested,
    /// The target closed it.
    #[error("the target closed it")]
    ByPeer,
    /// The socket failed.
    #[error("{}", io::Error::from(*.0))]
    Socket(Errno),
    /// The target broke a rule of the protocol, or sent a terminate request.
    #[error("{0}")]
    Violation(Violation),
    /// Commands were outstanding and none was completed in this time.
    #[error("no command was completed in {0:?}")]
    Silent(Duration),
    /// A work request failed (RDMA): the target does not answer, or refused it.
    #[error("a work request failed: {0}")]
    Work(WcStatus),
    /// The target broke a rule of NVMe/RDMA.
    #[error("{0}")]
    RdmaViolation(host::Violation),
    /// The RDMA device failed.
    #[error("the RDMA device failed")]
    Device,
    /// A verb failed (RDMA).
    #[error("{0}")]
    Verb(VerbsError),
}

/// Why an RDMA connection was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RdmaRefusal {
    /// No target listens at the port.
    #[error("no target listens there")]
    Nobody,
    /// By the target, with a reason of NVMe's.
    #[error("the target refused: {}", .0.reason())]
    Status(CmStatus),
    /// Otherwise, with a reason of the connection manager's.
    #[error("it was refused (reason {0})")]
    Other(i32),
}

/// Why something on the control path failed; each names the step.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No target is at the address, or it does not answer in time.
    #[error("cannot connect to {address}: {source}")]
    Connect {
        /// The address.
        address: SocketAddr,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// This machine has no RDMA.
    #[error("this machine has no RDMA device, or its kernel no connection manager for it (rdma_ucm)")]
    NoRdma,
    /// A step of connecting over RDMA failed.
    #[error("cannot connect to {address} over RDMA: {step}: {source}")]
    Rdma {
        /// The address.
        address: SocketAddr,
        /// Which step.
        step: &'static str,
        /// The verb, and the system's reason.
        #[source]
        source: VerbsError,
    },
    /// The other side refused the connection.
    #[error("cannot connect to {address} over RDMA: {why}")]
    RdmaRefused {
        /// The address.
        address: SocketAddr,
        /// Why.
        why: RdmaRefusal,
    },
    /// The target answered with an error.
    #[error("{step}: the target answered: {status}{}", named(*invalid))]
    Status {
        /// What was asked.
        step: &'static str,
        /// The answer.
        status: Status,
        /// The field that is wrong, where the answer names one.
        invalid: Option<ConnectInvalid>,
    },
    /// The connection ended.
    #[error("{step}: the connection ended: {loss}")]
    Lost {
        /// What was being done.
        step: &'static str,
        /// Why.
        loss: Loss,
    },
    /// There was no answer in time.
    #[error("{step}: no answer in {after:?}")]
    TimedOut {
        /// What was asked.
        step: &'static str,
        /// How long was waited.
        after: Duration,
    },
    /// The answer is one that no controller may give.
    #[error("{step}: {what}")]
    Answer {
        /// What was asked.
        step: &'static str,
        /// What is wrong with the answer.
        what: &'static str,
    },
    /// A number that the controller does not allow.
    #[error("{field} = {value}: {low} to {high} are allowed")]
    Range {
        /// What it is.
        field: &'static str,
        /// What was asked for.
        value: u64,
        /// The least,
        low: u64,
        /// and the most.
        high: u64,
    },
    /// The namespace is another disk than before (NGUID, EUI-64, UUID or serial number), or has blocks of
    /// another size; or it has none of them, so that this is unknown.
    #[error("namespace {nsid} is another disk than before")]
    OtherDisk {
        /// NSID.
        nsid: u32,
    },
    /// The target wants authentication, which this host does not have.
    #[error("Connect: the target asks for authentication or a secure channel, which this host does not have")]
    Authentication,
    /// The command could not be queued: the queue is full.
    #[error("{step}: all commands of the admin queue are outstanding")]
    Busy {
        /// What was asked.
        step: &'static str,
    },
    /// No memory for admin data.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The system gave no descriptor to wait on.
    #[error("cannot watch the connections: {0}")]
    Watch(#[source] io::Error),
}

impl Error {
    /// Refuse what is not.
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

/// The field of a Connect that the target finds wrong.
fn named(invalid: Option<ConnectInvalid>) -> &'static str {
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

    #[test]
    fn a_refusal_over_rdma_says_why_in_nvmes_words() {
        let address = "10.9.1.1:4420".parse().expect("an address");
        let refused = |why| Error::RdmaRefused { address, why };
        let error = refused(RdmaRefusal::Status(CmStatus::INVALID_HSQSIZE));
        assert!(error.to_string().contains("HSQSIZE"), "{error}");
        let error = refused(RdmaRefusal::Nobody);
        assert!(error.to_string().contains("10.9.1.1:4420"), "{error}");
        let source = VerbsError { verb: "rdma_resolve_addr", errno: 110 };
        let error = Error::Rdma { address, step: "RDMA address", source };
        assert!(error.to_string().contains("rdma_resolve_addr"), "{error}");
    }
}
