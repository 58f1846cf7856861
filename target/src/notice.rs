//! [`Notice`]: what the log should say about hosts, as values. The app drains them, limits their rate and
//! prints them.

use std::collections::VecDeque;
use std::net::SocketAddr;

use nvme_spec::nqn::Nqn;
use nvme_spec::status::Status;
use spindle_transport::CloseReason;

use crate::orphaned_commands::ORPHAN_MAX;

/// Something worth a line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Notice {
    /// A controller was made.
    Connected {
        /// Who.
        host: Nqn,
        /// To what.
        subsystem: Nqn,
        /// The controller's identifier.
        cntlid: u16,
        /// From where.
        remote: SocketAddr,
    },
    /// A controller has ended.
    Disconnected {
        /// Who.
        host: Nqn,
        /// From what.
        subsystem: Nqn,
        /// The controller's identifier.
        cntlid: u16,
        /// Why; `None`: the host closed the connection.
        reason: Option<CloseReason>,
    },
    /// Connect was refused.
    Refused {
        /// From where.
        remote: SocketAddr,
        /// The status it got.
        status: Status,
        /// Field, value and what is allowed.
        reason: String,
    },
    /// The host did not follow the rules of the queue.
    HostError {
        /// From where.
        remote: SocketAddr,
        /// Which rule.
        rule: &'static str,
    },
    /// The host did not follow the rules of the transport.
    Violation {
        /// From where.
        remote: SocketAddr,
        /// Field, value and what is allowed.
        text: String,
    },
    /// A connection was not taken.
    ConnectionRefused {
        /// From where.
        remote: SocketAddr,
        /// Field, value and what is allowed; or what has run out.
        reason: String,
    },
    /// The keep-alive time-out of a controller has passed.
    KeepAliveExpired {
        /// Who.
        host: Nqn,
        /// The controller's identifier.
        cntlid: u16,
        /// The time-out, in ms.
        timeout_ms: u32,
    },
    /// An I/O queue was connected with another HOSTID than its controller's admin queue. Told once for each
    /// controller.
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
        /// Disk, verb and the system's reason.
        reason: String,
    },
    /// What a host that is gone left at the disks has not ended in time: its next connection does not wait
    /// for it any longer.
    Orphan {
        /// HOSTNQN of the connection that is gone.
        host: Nqn,
        /// SUBNQN that it was connected to.
        subsystem: Nqn,
        /// Commands that the disks have not completed.
        commands: usize,
    },
    /// A host that is back has ended controllers that it had before (End Former Associations).
    FormerEnded {
        /// HOSTNQN.
        host: Nqn,
        /// SUBNQN.
        subsystem: Nqn,
        /// CNTLID of the controller that it is back with.
        cntlid: u16,
        /// How many it has ended.
        ended: usize,
    },
    /// A disk failed a command.
    DiskError {
        /// The subsystem.
        subsystem: Nqn,
        /// Its namespace.
        nsid: u32,
        /// First block.
        lba: u64,
        /// What the host was told.
        status: Status,
    },
}

/// A host's name, for people.
struct Name<'a>(&'a Nqn);

impl std::fmt::Display for Name<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0.is_unnamed() { f.write_str("(a host without a name)") } else { self.0.fmt(f) }
    }
}

impl std::fmt::Display for Notice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Notice::Connected { host, subsystem, cntlid, remote } => {
                let host = Name(host);
                write!(f, "host {host} at {remote} connected to {subsystem} as controller {cntlid}")
            }
            Notice::Disconnected { host, subsystem, cntlid, reason } => {
                let host = Name(host);
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
            Notice::OtherHostId { host, cntlid, qid } => {
                let host = Name(host);
                write!(
                    f,
                    "controller {cntlid} of {host}: hostid of queue {qid} is not that of queue 0, which \
                     is kept"
                )
            }
            Notice::KeepAliveExpired { host, cntlid, timeout_ms } => {
                let host = Name(host);
                write!(f, "keep alive of controller {cntlid} ({host}) expired after {timeout_ms} ms")
            }
            Notice::DiskOpen { reason } => f.write_str(reason),
            Notice::Orphan { host, subsystem, commands } => {
                let seconds = ORPHAN_MAX.as_ms() / 1000;
                write!(
                    f,
                    "{commands} commands of a connection of {host} to {subsystem} that ended {seconds} s ago \
                     are still at the disk: writes among them may land over newer ones of this host"
                )
            }
            Notice::FormerEnded { host, subsystem, cntlid, ended } => {
                let host = Name(host);
                write!(
                    f,
                    "host {host} is back on {subsystem} as controller {cntlid} and has ended {ended} of its \
                     former controllers"
                )
            }
            Notice::DiskError { subsystem, nsid, lba, status } => {
                write!(f, "disk of {subsystem} namespace {nsid} failed at LBA {lba}: {status}")
            }
        }
    }
}

/// A bounded list of notices; what does not fit is counted.
#[derive(Debug)]
pub struct Notices {
    list: VecDeque<Notice>,
    dropped: u64,
}

/// Notices kept between two drains: more than a turn's worth of honest hosts, a bound for the others.
const NOTICES_MAX: usize = 64;

impl Default for Notices {
    fn default() -> Self {
        Notices { list: VecDeque::with_capacity(NOTICES_MAX), dropped: 0 }
    }
}

impl Notices {
    /// Keep it if there is room.
    pub fn push(&mut self, notice: Notice) {
        if self.list.len() < NOTICES_MAX {
            self.list.push_back(notice);
        } else {
            self.dropped += 1;
        }
    }

    /// The oldest.
    pub fn pop(&mut self) -> Option<Notice> {
        self.list.pop_front()
    }

    /// How many did not fit since the last call.
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
