//! Connect: what a host must say to get a queue (Base 2.0 section 6.3), and the refusals, each with field,
//! value and what is allowed.
//!
//! Controllers are dynamic: an admin Connect makes one, an I/O Connect joins it. A refusal that a host could
//! outlive by trying again (all identifiers taken, the controller just reset) comes without DNR, since Linux
//! gives up for good on DNR.

use std::fmt;
use std::sync::Arc;

use nvme_spec::fabrics::{CNTLID_DYNAMIC, CNTLID_MAX, Connect, ConnectData, ConnectInvalid, ConnectResult};
use nvme_spec::nqn::{Nqn, NqnError};
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;
use spindle_transport::Limits;

use super::{Context, Controller};
use crate::shared::{ControllerShared, IO_QUEUES_MAX};
use crate::snapshot::Subsystem;

/// A queue was made.
#[derive(Debug)]
pub enum Connected {
    /// The admin queue, and a controller with it.
    Admin {
        /// The controller, owned by the admin queue.
        controller: Box<Controller>,
        /// Entries of the queue.
        entries: u16,
        /// SQ flow control is off: SQHD is FFFFh in every completion.
        sq_flow_off: bool,
    },
    /// An I/O queue of a controller that was made before. Its `qid` is claimed; give it back with
    /// [`ControllerShared::release_queue`].
    Io {
        /// The controller.
        shared: Arc<ControllerShared>,
        /// The queue's identifier, 1 and up.
        qid: u16,
        /// Entries of the queue.
        entries: u16,
        /// SQ flow control is off.
        sq_flow_off: bool,
        /// HOSTID is another than that of the admin queue, for the first time; that one is kept.
        has_other_id: bool,
    },
}

/// Why a Connect was refused. `Display` names the field and what is allowed; [`ConnectRefusal::about`] adds
/// the names in its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// RECFMT is not 0.
    Format(u16),
    /// SQSIZE is 0 or too large: its value, the largest allowed.
    QueueSize(u16, u16),
    /// QID is too large: its value, the largest allowed.
    QueueId(u16, u16),
    /// An I/O queue of a discovery controller.
    DiscoveryQueue(u16),
    /// SUBNQN is not a name.
    SubsystemName(NqnError),
    /// HOSTNQN is not a name.
    HostName(NqnError),
    /// There is no such subsystem on this listener.
    Subsystem,
    /// The host is not in the subsystem's list.
    HostNotAllowed,
    /// An admin Connect asks for a controller by its identifier.
    StaticController(u16),
    /// An I/O Connect names a controller that is not there.
    Controller(u16),
    /// KATO is too long: its value, the longest allowed, in ms.
    KeepAlive(u32, u32),
    /// All controller identifiers of the range are taken.
    Busy(u16, u16),
    /// HOSTNQN is not that of the controller's admin queue.
    OtherHost(u16),
    /// The controller is not enabled, or on its way out.
    NotReady(u16),
    /// The queue is there already.
    QueueLive(u16),
    /// Commands of the host's former association are still at a disk. Not said to the host: it waits.
    OrphanedCommands,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::Format(value) => write!(f, "recfmt = {value}: 0 is allowed"),
            Reason::QueueSize(value, max) => write!(f, "sqsize = {value}: 1 to {max} are allowed"),
            Reason::QueueId(value, max) => write!(f, "qid = {value}: 0 to {max} are allowed"),
            Reason::DiscoveryQueue(qid) => write!(f, "qid = {qid}: a discovery controller has queue 0 only"),
            Reason::SubsystemName(error) => write!(f, "subnqn: {error}"),
            Reason::HostName(error) => write!(f, "hostnqn: {error}"),
            Reason::Subsystem => f.write_str("subnqn: names of subsystems on this listener are allowed"),
            Reason::HostNotAllowed => f.write_str("hostnqn: the subsystem's hosts are allowed"),
            Reason::StaticController(id) => {
                write!(f, "cntlid = {id:#x}: {CNTLID_DYNAMIC:#x} is allowed on the admin queue")
            }
            Reason::Controller(id) => {
                write!(f, "cntlid = {id:#x}: live controllers of the subsystem are allowed")
            }
            Reason::KeepAlive(ms, max) => write!(f, "kato = {ms} ms: 0 to {max} ms are allowed"),
            Reason::Busy(low, high) => write!(f, "no controller identifier is free in {low} to {high}"),
            Reason::OtherHost(id) => write!(f, "hostnqn: controller {id:#x} belongs to another host"),
            Reason::NotReady(id) => write!(f, "cntlid = {id:#x}: enabled controllers (CC.EN 1) are allowed"),
            Reason::OrphanedCommands => {
                f.write_str("commands of this host's former association are at a disk")
            }
            Reason::QueueLive(qid) => write!(f, "qid = {qid}: queues that do not exist yet are allowed"),
        }
    }
}

/// A Connect that was refused: the completion, and the reason for the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct ConnectRefusal {
    /// Status of the completion.
    pub status: Status,
    /// Dword 0: IPO and IATTR where the status is `CONNECT_INVALID_PARAMETERS`.
    pub result: u32,
    /// Why.
    pub reason: Reason,
}

/// [`ConnectRefusal::about`].
#[derive(Debug, Clone, Copy)]
pub struct About<'a> {
    refusal: ConnectRefusal,
    data: &'a ConnectData,
}

impl ConnectRefusal {
    /// The reason and the names in the host's data, for the log.
    #[must_use]
    pub fn about<'a>(&self, data: &'a ConnectData) -> About<'a> {
        About { refusal: *self, data }
    }

    fn invalid(reason: Reason, field: ConnectInvalid) -> ConnectRefusal {
        let status = Status::CONNECT_INVALID_PARAMETERS.dnr();
        ConnectRefusal { status, result: u32::from(field), reason }
    }

    /// The same, but the host may try again.
    fn passing(self) -> ConnectRefusal {
        ConnectRefusal { status: self.status.code(), ..self }
    }

    fn with_status(reason: Reason, status: Status) -> ConnectRefusal {
        ConnectRefusal { status, result: 0, reason }
    }
}

impl fmt::Display for About<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.refusal.reason)?;
        // Names that are not well formed are not printed: they are a peer's bytes.
        if let Ok(name) = self.data.subnqn() {
            write!(f, "; subnqn = {name}")?;
        }
        if let Ok(name) = self.data.hostnqn() {
            write!(f, "; hostnqn = {name}")?;
        }
        Ok(())
    }
}

/// A Connect command that was found well formed.
struct Asked {
    subsystem_nqn: Nqn,
    host_nqn: Nqn,
    host_id: [u8; 16],
    cntlid: u16,
    qid: u16,
    entries: u16,
    kato_ms: u32,
    sq_flow_off: bool,
}

/// Make a queue: the answer to a Connect command.
///
/// `limits` are those of the connection. On success the `u32` is dword 0 of the completion.
///
/// # Errors
/// [`ConnectRefusal`]; the connection may try again with another Connect.
pub fn connect(
    cx: &Context<'_>,
    sqe: &Sqe,
    data: &ConnectData,
    limits: &Limits,
) -> Result<(Connected, u32), ConnectRefusal> {
    let asked = parse(cx, sqe, data, limits)?;
    let connected = match (asked.subsystem_nqn.is_discovery(), asked.qid) {
        (true, 0) => connect_discovery(cx, &asked, limits)?,
        (true, qid) => return Err(ConnectRefusal::invalid(Reason::DiscoveryQueue(qid), ConnectInvalid::QID)),
        (false, 0) => connect_admin(cx, &asked, limits)?,
        (false, _) => connect_io(cx, &asked)?,
    };
    let cntlid = match &connected {
        Connected::Admin { controller, .. } => controller.shared.cntlid,
        Connected::Io { shared, .. } => shared.cntlid,
    };
    Ok((connected, ConnectResult::new().with_cntlid(cntlid).into_bits()))
}

/// True when this Connect asks for an admin queue, and so for a controller.
#[must_use]
pub fn is_admin_connect(sqe: &Sqe) -> bool {
    Connect::new(sqe).qid() == 0
}

/// Most entries of a queue on this connection: MQES + 1.
pub(super) fn queue_entries_max(cx: &Context<'_>, limits: &Limits) -> u16 {
    limits.queue_entries.min(cx.snapshot.limits.queue_entries).max(2)
}

fn parse(cx: &Context<'_>, sqe: &Sqe, data: &ConnectData, limits: &Limits) -> Result<Asked, ConnectRefusal> {
    let command = Connect::new(sqe);
    if command.recfmt() != 0 {
        let reason = Reason::Format(command.recfmt());
        return Err(ConnectRefusal::with_status(reason, Status::CONNECT_INCOMPATIBLE_FORMAT.dnr()));
    }
    let sqsize_z = command.sqsize_z();
    let sqsize_max = queue_entries_max(cx, limits) - 1;
    if sqsize_z == 0 || sqsize_z > sqsize_max {
        return Err(ConnectRefusal::invalid(Reason::QueueSize(sqsize_z, sqsize_max), ConnectInvalid::SQSIZE));
    }
    let subsystem_nqn = data
        .subnqn()
        .map_err(|error| ConnectRefusal::invalid(Reason::SubsystemName(error), ConnectInvalid::SUBNQN))?;
    let host_nqn = match data.hostnqn() {
        // SPDK's initiator sends none unless it is given one. It is a host that no list names.
        Err(NqnError::Empty) => Nqn::unnamed(),
        name => {
            name.map_err(|error| ConnectRefusal::invalid(Reason::HostName(error), ConnectInvalid::HOSTNQN))?
        }
    };
    Ok(Asked {
        subsystem_nqn,
        host_nqn,
        host_id: data.hostid,
        cntlid: data.cntlid.get(),
        qid: command.qid(),
        entries: sqsize_z + 1,
        kato_ms: command.kato(),
        sq_flow_off: command.cattr().disable_sq_flow_control(),
    })
}

/// The subsystem, if it is offered on this listener to this host. Where a reload has taken the listener away
/// meanwhile, hosts that are connected get the queues that they have begun to connect.
fn find_subsystem<'a>(cx: &Context<'a>, asked: &Asked) -> Result<&'a Arc<Subsystem>, ConnectRefusal> {
    let listener = cx.peer.listener;
    let is_gone = cx.snapshot.listeners.get(listener).is_some_and(|listener| !listener.is_open);
    let is_offered = |subsystem: &Subsystem| subsystem.listeners.contains(&listener);
    let subsystem = cx
        .snapshot
        .subsystem(&asked.subsystem_nqn)
        .filter(|subsystem| is_offered(subsystem) || is_gone && asked.qid != 0)
        .ok_or_else(|| ConnectRefusal::invalid(Reason::Subsystem, ConnectInvalid::SUBNQN))?;
    if !subsystem.hosts.allows(&asked.host_nqn) {
        return Err(ConnectRefusal::with_status(Reason::HostNotAllowed, Status::CONNECT_INVALID_HOST.dnr()));
    }
    Ok(subsystem)
}

fn check_dynamic(asked: &Asked) -> Result<(), ConnectRefusal> {
    if asked.cntlid == CNTLID_DYNAMIC {
        return Ok(());
    }
    Err(ConnectRefusal::invalid(Reason::StaticController(asked.cntlid), ConnectInvalid::CNTLID))
}

fn check_keep_alive(cx: &Context<'_>, asked: &Asked) -> Result<(), ConnectRefusal> {
    let max = cx.snapshot.limits.keep_alive_ms_max;
    if asked.kato_ms <= max {
        return Ok(());
    }
    Err(ConnectRefusal::invalid(Reason::KeepAlive(asked.kato_ms, max), ConnectInvalid::KATO))
}

fn make_controller(
    cx: &Context<'_>,
    asked: &Asked,
    range: (u16, u16),
) -> Result<Arc<ControllerShared>, ConnectRefusal> {
    // 0 is no identifier that hosts expect, FFF0h and above are reserved.
    let range = (range.0.max(1), range.1.min(CNTLID_MAX));
    cx.registry.create(asked.subsystem_nqn, range, asked.host_nqn, asked.host_id, cx.core).map_err(|_| {
        ConnectRefusal::with_status(Reason::Busy(range.0, range.1), Status::CONNECT_CONTROLLER_BUSY)
    })
}

fn connect_admin(cx: &Context<'_>, asked: &Asked, limits: &Limits) -> Result<Connected, ConnectRefusal> {
    let subsystem = find_subsystem(cx, asked)?;
    check_dynamic(asked)?;
    check_keep_alive(cx, asked)?;
    // Last of all, so that a Connect which would be refused does not wait.
    if cx.registry.has_orphans(&asked.subsystem_nqn, &asked.host_nqn, &asked.host_id) {
        return Err(ConnectRefusal::with_status(Reason::OrphanedCommands, Status::CONNECT_CONTROLLER_BUSY));
    }
    let shared = make_controller(cx, asked, subsystem.cntlid_range)?;
    let controller = Controller::new_io(cx, shared, asked.kato_ms, limits, subsystem.io_queues_max);
    Ok(Connected::Admin {
        controller: Box::new(controller),
        entries: asked.entries,
        sq_flow_off: asked.sq_flow_off,
    })
}

fn connect_discovery(cx: &Context<'_>, asked: &Asked, limits: &Limits) -> Result<Connected, ConnectRefusal> {
    check_dynamic(asked)?;
    check_keep_alive(cx, asked)?;
    let shared = make_controller(cx, asked, (1, CNTLID_MAX))?;
    // A host that asks for no time-out reads the log and goes; one that asks for one stays (a persistent
    // controller).
    let kato_ms = if asked.kato_ms == 0 { cx.snapshot.limits.discovery_keep_alive_ms } else { asked.kato_ms };
    let controller = Controller::new_discovery(cx, shared, kato_ms, limits);
    Ok(Connected::Admin {
        controller: Box::new(controller),
        entries: asked.entries,
        sq_flow_off: asked.sq_flow_off,
    })
}

fn connect_io(cx: &Context<'_>, asked: &Asked) -> Result<Connected, ConnectRefusal> {
    let subsystem = find_subsystem(cx, asked)?;
    let cntlid = asked.cntlid;
    let shared =
        cx.registry.find(&asked.subsystem_nqn, cntlid).filter(|shared| !shared.is_gone()).ok_or_else(
            || ConnectRefusal::invalid(Reason::Controller(cntlid), ConnectInvalid::CNTLID).passing(),
        )?;
    if shared.host_nqn != asked.host_nqn {
        return Err(ConnectRefusal::invalid(Reason::OtherHost(cntlid), ConnectInvalid::HOSTNQN));
    }
    let qid_max = subsystem.io_queues_max.min(IO_QUEUES_MAX);
    if asked.qid > qid_max {
        return Err(ConnectRefusal::invalid(Reason::QueueId(asked.qid, qid_max), ConnectInvalid::QID));
    }
    if !shared.claim_queue(asked.qid) {
        let reason = Reason::QueueLive(asked.qid);
        return Err(ConnectRefusal::with_status(reason, Status::COMMAND_SEQUENCE_ERROR));
    }
    // After the claim: a reset that comes now finds the queue in the map.
    if !shared.is_ready() || shared.is_gone() {
        shared.release_queue(asked.qid);
        let reason = Reason::NotReady(cntlid);
        return Err(ConnectRefusal::with_status(reason, Status::COMMAND_SEQUENCE_ERROR));
    }
    // Base 2.0 wants the HOSTID of the admin queue here too. Initiators exist that make a new one for each
    // queue; nvmet and SPDK's target compare the name alone, and so it is here.
    let has_other_id = shared.host_id != asked.host_id && shared.note_other_host_id();
    Ok(Connected::Io {
        shared,
        qid: asked.qid,
        entries: asked.entries,
        sq_flow_off: asked.sq_flow_off,
        has_other_id,
    })
}
