//! Connect: the checks (Base 2.0 section 6.3), and refusals, each with field, value and allowed values.
//!
//! Only the dynamic controller model is supported: an admin Connect creates a controller, an I/O Connect adds
//! a queue to an existing controller. A refusal that a retry can resolve has no DNR, since Linux does not
//! reconnect after DNR. Examples: no CNTLID is free, the controller was just reset.

use std::sync::Arc;

use nvme_spec::fabrics::{
    ADMIN_QUEUE_ENTRIES, CNTLID_DYNAMIC, CNTLID_MAX, Connect, ConnectData, ConnectInvalid, ConnectResult,
};
use nvme_spec::nqn::{Nqn, NqnError};
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;
use spindle_nvme_transport::Limits;

use super::{Context, Controller, Kind};
use crate::shared::{ControllerShared, IO_QUEUES_MAX};
use crate::snapshot::{ControllerLimits, Subsystem};

/// Result of a successful Connect.
#[derive(Debug)]
pub struct Connected {
    /// The created queue, with its controller.
    pub queue: ConnectedQueue,
    /// Entries of the submission queue (SQSIZE + 1).
    pub entries: u16,
    /// SQ flow control is off: SQHD is FFFFh in every completion.
    pub is_sq_flow_off: bool,
}

/// A queue that Connect has created.
#[derive(Debug)]
pub enum ConnectedQueue {
    /// The admin queue of a new controller.
    Admin(Box<Controller>),
    /// An I/O queue of an existing controller. Its `qid` is claimed; [`ControllerShared::release_queue`]
    /// frees the QID.
    Io {
        /// Controller of the queue.
        shared: Arc<ControllerShared>,
        /// QID, from 1.
        qid: u16,
        /// True for the first I/O queue of the controller whose HOSTID differs from that of the admin queue.
        /// The HOSTID of the admin queue stays in effect.
        has_other_id: bool,
    },
}

/// Reason of a refused Connect. `Display` has the field, its value and the allowed values;
/// [`ConnectRefusal::log_text`] adds the NQNs in the host's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// RECFMT is not 0.
    #[error("recfmt = {0}: 0 is allowed")]
    Format(u16),
    /// SQSIZE is 0 or too large (value, largest allowed value).
    #[error("sqsize = {0}: 1 to {1} are allowed")]
    QueueSize(u16, u16),
    /// QID is too large (value, largest allowed value).
    #[error("qid = {0}: 0 to {1} are allowed")]
    QueueId(u16, u16),
    /// An I/O queue of a discovery controller.
    #[error("qid = {0}: a discovery controller has queue 0 only")]
    DiscoveryQueue(u16),
    /// SUBNQN is not a valid NQN.
    #[error("subnqn: {0}")]
    SubsystemName(NqnError),
    /// HOSTNQN is not a valid NQN.
    #[error("hostnqn: {0}")]
    HostName(NqnError),
    /// No subsystem with this SUBNQN is offered on the listener of the connection.
    #[error("subnqn: names of subsystems on this listener are allowed")]
    Subsystem,
    /// The host is not in the subsystem's list of allowed hosts.
    #[error("hostnqn: the subsystem's hosts are allowed")]
    HostNotAllowed,
    /// An admin Connect has a CNTLID other than FFFFh: the static controller model is not supported.
    #[error("cntlid = {0:#x}: {CNTLID_DYNAMIC:#x} is allowed on the admin queue")]
    StaticController(u16),
    /// An I/O Connect has the CNTLID of a controller that does not exist or has ended.
    #[error("cntlid = {0:#x}: live controllers of the subsystem are allowed")]
    Controller(u16),
    /// KATO is too long (value, largest allowed value, in ms).
    #[error("kato = {0} ms: 0 to {1} ms are allowed")]
    KeepAlive(u32, u32),
    /// The host's address has this many discovery controllers, the limit.
    #[error("discovery controllers of the address: {0} (limits.unconnected_per_address)")]
    DiscoveryControllers(usize),
    /// All CNTLIDs of the range (lowest, highest) are in use.
    #[error("no controller identifier is free in {0} to {1}")]
    Busy(u16, u16),
    /// HOSTNQN is not that of the controller's admin queue.
    #[error("hostnqn: controller {0:#x} belongs to another host")]
    OtherHost(u16),
    /// The controller is not enabled, or has failed.
    #[error("cntlid = {0:#x}: enabled controllers (CC.EN 1) are allowed")]
    NotReady(u16),
    /// The queue is connected already, or disks have commands of an ended queue with its QID.
    #[error("qid = {0}: queues that do not exist yet are allowed")]
    QueueLive(u16),
    /// Not reported to the host: the Connect waits and is retried.
    #[error("commands of this host's former association are at a disk")]
    OrphanedCommands,
}

/// A refused Connect: its completion, and the reason for the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct ConnectRefusal {
    /// Status of the completion.
    pub status: Status,
    /// Dword 0: IPO and IATTR if the status is `CONNECT_INVALID_PARAMETERS`, else 0.
    pub result: u32,
    /// Reason for the log, from which status and result follow.
    pub reason: Reason,
}

impl ConnectRefusal {
    /// Returns the reason and the NQNs in the host's data, for the log. Invalid NQNs are left out, since they
    /// may contain any bytes.
    #[must_use]
    pub fn log_text(&self, data: &ConnectData) -> String {
        let named = |field, name: Result<Nqn, _>| name.map(|name| format!("; {field} = {name}"));
        let names = [named("subnqn", data.subnqn()), named("hostnqn", data.hostnqn())];
        [self.reason.to_string()].into_iter().chain(names.into_iter().flatten()).collect()
    }

    /// The address of the host has `limit` discovery controllers. It may retry.
    pub(crate) fn discovery_controllers(limit: usize) -> ConnectRefusal {
        ConnectRefusal::with_status(Reason::DiscoveryControllers(limit), Status::CONNECT_CONTROLLER_BUSY)
    }

    fn invalid(reason: Reason, field: ConnectInvalid) -> ConnectRefusal {
        let status = Status::CONNECT_INVALID_PARAMETERS.dnr();
        ConnectRefusal { status, result: u32::from(field), reason }
    }

    /// Returns this refusal without DNR, so that the host may retry.
    fn without_dnr(self) -> ConnectRefusal {
        ConnectRefusal { status: self.status.code(), ..self }
    }

    fn with_status(reason: Reason, status: Status) -> ConnectRefusal {
        ConnectRefusal { status, result: 0, reason }
    }
}

/// Fields of a Connect command that passed [`parse`].
struct ConnectFields {
    subsystem_nqn: Nqn,
    host_nqn: Nqn,
    host_id: [u8; 16],
    cntlid: u16,
    qid: u16,
    entries: u16,
    kato_ms: u32,
    is_sq_flow_off: bool,
}

/// Executes a Connect command: creates a controller, or adds a queue to an existing controller.
///
/// `limits` are those of the connection. On success the `u32` is dword 0 of the completion.
///
/// # Errors
/// [`ConnectRefusal`] when a field is invalid, the host is not allowed or no CNTLID is free: the host may
/// send another Connect on the connection. On [`Reason::OrphanedCommands`] the caller retries instead.
pub fn connect(
    cx: &Context<'_>,
    sqe: &Sqe,
    data: &ConnectData,
    limits: &Limits,
) -> Result<(Connected, u32), ConnectRefusal> {
    let fields = parse(cx, sqe, data, limits)?;
    let queue = match fields.qid {
        0 => connect_admin(cx, &fields, limits)?,
        qid if fields.subsystem_nqn.is_discovery() => {
            return Err(ConnectRefusal::invalid(Reason::DiscoveryQueue(qid), ConnectInvalid::QID));
        }
        _ => connect_io(cx, &fields)?,
    };
    let cntlid = match &queue {
        ConnectedQueue::Admin(controller) => controller.shared.cntlid,
        ConnectedQueue::Io { shared, .. } => shared.cntlid,
    };
    let connected = Connected { queue, entries: fields.entries, is_sq_flow_off: fields.is_sq_flow_off };
    Ok((connected, ConnectResult::new().with_cntlid(cntlid).into_bits()))
}

/// Most entries of an I/O queue on this connection (MQES + 1), at least 2.
pub(super) fn queue_entries_max(cx: &Context<'_>, limits: &Limits) -> u16 {
    limits.queue_entries.min(cx.snapshot.limits.queue_entries).max(2)
}

fn parse(
    cx: &Context<'_>,
    sqe: &Sqe,
    data: &ConnectData,
    limits: &Limits,
) -> Result<ConnectFields, ConnectRefusal> {
    let command = Connect::new(sqe);
    if command.recfmt() != 0 {
        let reason = Reason::Format(command.recfmt());
        return Err(ConnectRefusal::with_status(reason, Status::CONNECT_INCOMPATIBLE_FORMAT.dnr()));
    }
    let sqsize_z = command.sqsize_z();
    let io_entries = queue_entries_max(cx, limits);
    // A host chooses the size of the admin queue before it can read CAP.MQES.
    let entries_max = if command.qid() == 0 { io_entries.max(ADMIN_QUEUE_ENTRIES) } else { io_entries };
    let sqsize_max = entries_max - 1;
    if sqsize_z == 0 || sqsize_z > sqsize_max {
        return Err(ConnectRefusal::invalid(Reason::QueueSize(sqsize_z, sqsize_max), ConnectInvalid::SQSIZE));
    }
    let subsystem_nqn = data
        .subnqn()
        .map_err(|error| ConnectRefusal::invalid(Reason::SubsystemName(error), ConnectInvalid::SUBNQN))?;
    let host_nqn = match data.hostnqn() {
        // SPDK's initiator sends no HOSTNQN unless one is configured. No list of hosts has the unnamed host.
        Err(NqnError::Empty) => Nqn::unnamed(),
        name => {
            name.map_err(|error| ConnectRefusal::invalid(Reason::HostName(error), ConnectInvalid::HOSTNQN))?
        }
    };
    Ok(ConnectFields {
        subsystem_nqn,
        host_nqn,
        host_id: data.hostid,
        cntlid: data.cntlid.get(),
        qid: command.qid(),
        entries: sqsize_z + 1,
        kato_ms: command.kato(),
        is_sq_flow_off: command.cattr().disable_sq_flow_control(),
    })
}

/// Longest keep-alive time-out that a host may request, in ms.
pub(super) fn keep_alive_ms_max(limits: &ControllerLimits, kind: Kind) -> u32 {
    match kind {
        Kind::Io => limits.keep_alive_ms_max,
        Kind::Discovery => limits.discovery_keep_alive_ms_max(),
    }
}

/// Returns the subsystem if it is offered on this listener to this host. On a listener that a reload has
/// removed, connected hosts can still connect I/O queues.
fn find_subsystem<'a>(
    cx: &Context<'a>,
    fields: &ConnectFields,
) -> Result<&'a Arc<Subsystem>, ConnectRefusal> {
    let listener = cx.peer.listener;
    let is_gone = cx.snapshot.listeners.get(listener).is_some_and(|listener| !listener.is_open);
    let is_offered = |subsystem: &Subsystem| subsystem.listeners.contains(&listener);
    let subsystem = cx
        .snapshot
        .subsystem(&fields.subsystem_nqn)
        .filter(|subsystem| is_offered(subsystem) || is_gone && fields.qid != 0)
        // It may come, or come back: Linux gives a lost controller up for good after a refusal with DNR.
        .ok_or_else(|| ConnectRefusal::invalid(Reason::Subsystem, ConnectInvalid::SUBNQN).without_dnr())?;
    if !subsystem.hosts.allows(&fields.host_nqn) {
        return Err(ConnectRefusal::with_status(Reason::HostNotAllowed, Status::CONNECT_INVALID_HOST.dnr()));
    }
    Ok(subsystem)
}

/// Creates a controller of an NVM subsystem or of the discovery subsystem.
fn connect_admin(
    cx: &Context<'_>,
    fields: &ConnectFields,
    limits: &Limits,
) -> Result<ConnectedQueue, ConnectRefusal> {
    let configured = &cx.snapshot.limits;
    let (kind, range, io_queues) = if fields.subsystem_nqn.is_discovery() {
        (Kind::Discovery, (1, CNTLID_MAX), 0)
    } else {
        let subsystem = find_subsystem(cx, fields)?;
        (Kind::Io, subsystem.cntlid_range, subsystem.io_queues_max.clamp(1, IO_QUEUES_MAX))
    };
    if fields.cntlid != CNTLID_DYNAMIC {
        return Err(ConnectRefusal::invalid(Reason::StaticController(fields.cntlid), ConnectInvalid::CNTLID));
    }
    let kato_ms_max = keep_alive_ms_max(configured, kind);
    if fields.kato_ms > kato_ms_max {
        let reason = Reason::KeepAlive(fields.kato_ms, kato_ms_max);
        return Err(ConnectRefusal::invalid(reason, ConnectInvalid::KATO));
    }
    let busy = |reason| ConnectRefusal::with_status(reason, Status::CONNECT_CONTROLLER_BUSY);
    // After all other checks, so that an invalid Connect is refused at once.
    if kind == Kind::Io && cx.registry.has_orphans(&fields.subsystem_nqn, &fields.host_nqn, &fields.host_id) {
        return Err(busy(Reason::OrphanedCommands));
    }
    // CNTLID 0 is avoided because hosts do not expect it; FFF0h and above are reserved.
    let range = (range.0.max(1), range.1.min(CNTLID_MAX));
    let shared = cx
        .registry
        .create(fields.subsystem_nqn, range, fields.host_nqn, fields.host_id, cx.core)
        .ok_or(busy(Reason::Busy(range.0, range.1)))?;
    // A discovery host with KATO 0 usually reads the log and disconnects; a default time-out applies if it
    // does not. A host with another KATO keeps the connection (persistent discovery controller).
    let is_default = kind == Kind::Discovery && fields.kato_ms == 0;
    let kato_ms = if is_default { configured.discovery_keep_alive_ms } else { fields.kato_ms };
    Ok(ConnectedQueue::Admin(Box::new(Controller::new(cx, shared, kind, kato_ms, limits, io_queues))))
}

fn connect_io(cx: &Context<'_>, fields: &ConnectFields) -> Result<ConnectedQueue, ConnectRefusal> {
    let subsystem = find_subsystem(cx, fields)?;
    let cntlid = fields.cntlid;
    let shared =
        cx.registry.find(&fields.subsystem_nqn, cntlid).filter(|shared| !shared.is_gone()).ok_or_else(
            || ConnectRefusal::invalid(Reason::Controller(cntlid), ConnectInvalid::CNTLID).without_dnr(),
        )?;
    if shared.host_nqn != fields.host_nqn {
        return Err(ConnectRefusal::invalid(Reason::OtherHost(cntlid), ConnectInvalid::HOSTNQN));
    }
    let qid_max = subsystem.io_queues_max.min(IO_QUEUES_MAX);
    if fields.qid > qid_max {
        return Err(ConnectRefusal::invalid(Reason::QueueId(fields.qid, qid_max), ConnectInvalid::QID));
    }
    if !shared.claim_queue(fields.qid) {
        let reason = Reason::QueueLive(fields.qid);
        return Err(ConnectRefusal::with_status(reason, Status::COMMAND_SEQUENCE_ERROR));
    }
    // Checked after the claim: a later reset finds the QID in use and closes the queue.
    if !shared.is_ready() || shared.is_gone() {
        shared.release_queue(fields.qid);
        let reason = Reason::NotReady(cntlid);
        return Err(ConnectRefusal::with_status(reason, Status::COMMAND_SEQUENCE_ERROR));
    }
    // Base 2.0 demands the HOSTID of the admin queue. SPDK's initiator without a HOSTNQN sends a new HOSTID
    // for each queue. Like nvmet and SPDK's target, Spindle compares HOSTNQN only.
    let has_other_id = shared.host_id != fields.host_id && shared.note_other_host_id();
    Ok(ConnectedQueue::Io { shared, qid: fields.qid, has_other_id })
}
