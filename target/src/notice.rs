//! [`Notice`]: log entries about hosts and disks, as values. The app drains the queue, limits the rate and
//! logs the entries.

use std::collections::VecDeque;
use std::net::SocketAddr;

use nvme_spec::nqn::Nqn;
use nvme_spec::status::Status;
use spindle_nvme_transport::CloseReason;

use crate::orphaned_commands::ORPHAN_MAX;
use crate::qpair::{FETCH_TIMEOUT, STARVED_TIMEOUT};

/// One log entry; `Display` is its text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Notice {
    /// A controller was created.
    Connected {
        /// HOSTNQN.
        host: Nqn,
        /// SUBNQN; also of the discovery subsystem.
        subsystem: Nqn,
        /// CNTLID that was assigned.
        cntlid: u16,
        /// Address of the host.
        remote: SocketAddr,
    },
    /// A controller has ended.
    Disconnected {
        /// HOSTNQN.
        host: Nqn,
        /// SUBNQN.
        subsystem: Nqn,
        /// CNTLID; may be assigned again.
        cntlid: u16,
        /// Reason for which the target closed the connection; `None`: the connection ended otherwise (closed
        /// by the host, network failure, violation of the transport's protocol).
        reason: Option<CloseReason>,
    },
    /// A Connect command was refused.
    Refused {
        /// Address of the host.
        remote: SocketAddr,
        /// Status of the completion of Connect.
        status: Status,
        /// Field, value, allowed values, and the NQNs of the Connect.
        reason: String,
    },
    /// The host violated a rule of its queue, or did not send data or read replies in time; its connection
    /// was closed.
    HostError {
        /// Address of the host.
        remote: SocketAddr,
        /// Text of the violation.
        rule: &'static str,
    },
    /// A host keeps memory without progress. Once for each host while it is connected.
    Stalled {
        /// HOSTNQN.
        host: Nqn,
        /// Address of the host's queue that was found first.
        remote: SocketAddr,
        /// Buffers of the core's pool that the host has, and data that it has not sent or taken, in bytes.
        bytes: u64,
        /// What the host does not do.
        what: &'static str,
    },
    /// The host violated a rule of the transport; its connection was closed.
    Violation {
        /// Address of the host.
        remote: SocketAddr,
        /// Field, value and allowed values.
        text: String,
    },
    /// A connection was refused or evicted before Connect.
    ConnectionRefused {
        /// Address of the host.
        remote: SocketAddr,
        /// Field, value and allowed values; or the reason for which the core cannot accept the connection.
        reason: String,
    },
    /// The keep-alive time-out of a controller has passed.
    KeepAliveExpired {
        /// HOSTNQN.
        host: Nqn,
        /// CNTLID.
        cntlid: u16,
        /// The time-out that was granted, in ms.
        timeout_ms: u32,
    },
    /// An I/O queue has another HOSTID than its controller's admin queue. At most one for each controller.
    OtherHostId {
        /// HOSTNQN.
        host: Nqn,
        /// CNTLID.
        cntlid: u16,
        /// QID of the I/O queue.
        qid: u16,
    },
    /// A disk of a new configuration could not be opened on a core.
    DiskOpen {
        /// Text of the [`OpenError`](spindle_target_disk::OpenError).
        reason: String,
    },
    /// Commands of an ended connection have been at a disk for longer than [`ORPHAN_MAX`]; the host's next
    /// connection no longer waits for them.
    Orphan {
        /// HOSTNQN of the ended connection.
        host: Nqn,
        /// SUBNQN of the ended connection.
        subsystem: Nqn,
        /// Commands that the disks have not completed: their last report less the completions since.
        commands: usize,
    },
    /// A host has ended its former controllers (End Former Associations).
    FormerEnded {
        /// HOSTNQN.
        host: Nqn,
        /// SUBNQN.
        subsystem: Nqn,
        /// CNTLID of the new controller.
        cntlid: u16,
        /// Number of controllers that were ended.
        ended: usize,
    },
    /// A disk failed a command.
    DiskError {
        /// SUBNQN.
        subsystem: Nqn,
        /// NSID of the command.
        nsid: u32,
        /// First block of the command, or of the failed piece of a bulk transfer.
        lba: u64,
        /// Status of the completion.
        status: Status,
    },
}

/// Displays a HOSTNQN, or a text for a host without one.
struct HostName<'a>(&'a Nqn);

impl std::fmt::Display for HostName<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0.is_unnamed() { f.write_str("(a host without a name)") } else { self.0.fmt(f) }
    }
}

impl std::fmt::Display for Notice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Notice::Connected { host, subsystem, cntlid, remote } => {
                let host = HostName(host);
                write!(f, "host {host} at {remote} connected to {subsystem} as controller {cntlid}")
            }
            Notice::Disconnected { host, subsystem, cntlid, reason } => {
                let host = HostName(host);
                write!(f, "controller {cntlid} of {host} on {subsystem} ended: ")?;
                match reason {
                    Some(reason) => reason.fmt(f),
                    None => f.write_str("the host closed the connection"),
                }
            }
            Notice::Refused { remote, status, reason } => {
                write!(f, "connect from {remote} refused: {reason} ({status})")
            }
            Notice::ConnectionRefused { remote, reason } => {
                write!(f, "connection from {remote} refused: {reason}")
            }
            Notice::Violation { remote, text } => write!(f, "connection from {remote} closed: {text}"),
            Notice::HostError { remote, rule } => write!(f, "connection from {remote} closed: {rule}"),
            Notice::Stalled { host, remote, bytes, what } => {
                let host = HostName(host);
                let (starved, alone) = (STARVED_TIMEOUT.as_ms() / 1000, FETCH_TIMEOUT.as_ms() / 1000);
                write!(
                    f,
                    "host {host} at {remote} holds {bytes} bytes of memory without progress: {what}; the \
                     connection is closed after {alone} s, or {starved} s while other hosts wait for memory"
                )
            }
            Notice::OtherHostId { host, cntlid, qid } => {
                let host = HostName(host);
                write!(
                    f,
                    "controller {cntlid} of {host}: hostid of queue {qid} differs from that of queue 0 and \
                     is ignored"
                )
            }
            Notice::KeepAliveExpired { host, cntlid, timeout_ms } => {
                let host = HostName(host);
                write!(f, "keep alive of controller {cntlid} ({host}) expired after {timeout_ms} ms")
            }
            Notice::DiskOpen { reason } => f.write_str(reason),
            Notice::Orphan { host, subsystem, commands } => {
                let seconds = ORPHAN_MAX.as_ms() / 1000;
                write!(
                    f,
                    "{commands} commands of a connection of {host} to {subsystem} that ended {seconds} s ago \
                     are still outstanding at the disk: their writes may overwrite newer ones of this host"
                )
            }
            Notice::FormerEnded { host, subsystem, cntlid, ended } => {
                let host = HostName(host);
                write!(
                    f,
                    "host {host} reconnected to {subsystem} as controller {cntlid}; {ended} of its former \
                     controllers ended"
                )
            }
            Notice::DiskError { subsystem, nsid, lba, status } => {
                write!(f, "disk of {subsystem} namespace {nsid} failed at LBA {lba}: {status}")
            }
        }
    }
}

/// A bounded queue of notices. Notices beyond its capacity are dropped and counted.
#[derive(Debug)]
pub struct Notices {
    list: VecDeque<Notice>,
    dropped: u64,
}

/// Most notices in the queue: more than well-behaved hosts cause in a turn.
const NOTICES_MAX: usize = 64;

impl Default for Notices {
    fn default() -> Self {
        Notices { list: VecDeque::with_capacity(NOTICES_MAX), dropped: 0 }
    }
}

impl Notices {
    /// Appends a notice, or drops and counts it when the queue is full.
    pub fn push(&mut self, notice: Notice) {
        if self.list.len() < NOTICES_MAX {
            self.list.push_back(notice);
        } else {
            self.dropped += 1;
        }
    }

    /// Removes and returns the oldest notice; `None`: the queue is empty.
    pub fn pop(&mut self) -> Option<Notice> {
        self.list.pop_front()
    }

    /// Returns the number of notices dropped since the last call, and resets it.
    pub fn take_dropped(&mut self) -> u64 {
        std::mem::take(&mut self.dropped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_counted_once() {
        let mut notices = Notices::default();
        let remote = "192.0.2.1:4420".parse().expect("an address");
        for _ in 0..NOTICES_MAX + 6 {
            notices.push(Notice::HostError { remote, rule: "a rule" });
        }
        assert_eq!(std::iter::from_fn(|| notices.pop()).count(), NOTICES_MAX);
        assert_eq!((notices.take_dropped(), notices.take_dropped()), (6, 0));
    }
}
