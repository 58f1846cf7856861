//! Connect: what a host must say to get a queue (Base 2.0 section 6.3), and the refusals, each with field,
//! value and what is allowed.
//!
//! Controllers are dynamic: an admin Connect makes one, an I/O Connect joins it. A refusal that a host could
//! outlive by trying again (all identifiers taken, the controller just reset) comes without DNR, since Linux
//! gives up for good on DNR.

use std::sync::Arc;

use nvme_spec::fabrics::{CNTLID_DYNAMIC, CNTLID_MAX, Connect, ConnectData, ConnectInvalid, ConnectResult};
use nvme_spec::nqn::{Nqn, NqnError};
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;
use spindle_transport::Limits;

use super::{Context, Controller, Kind};
use crate::shared::{ControllerShared, IO_QUEUES_MAX};
use crate::snapshot::Subsystem;

/// A queue was made.
#[derive(Debug)]
pub struct Connected {
    /// Which.
    pub queue: ConnectedQueue,
    /// Its entries.
    pub entries: u16,
    /// SQ flow control is off: SQHD is FFFFh in every completion.
    pub is_sq_flow_off: bool,
}

/// The queue that a Connect has made.
#[derive(Debug)]
pub enum ConnectedQueue {
    /// The admin queue, and its own controller with it.
    Admin(Box<Controller>),
    /// An I/O queue of a controller that was made before. Its `qid` is claimed; give it back with
    /// [`ControllerShared::release_queue`].
    Io {
        /// The controller.
        shared: Arc<ControllerShared>,
        /// The queue's identifier, 1 and up.
        qid: u16,
        /// HOSTID is another than that of the admin queue, for the first time; that one is kept.
        has_other_id: bool,
    },
}

/// Why a Connect was refused. `Display` names the field and what is allowed; [`ConnectRefusal::about`] adds
/// the names in its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// RECFMT is not 0.
    #[error("recfmt = {0}: 0 is allowed")]
    Format(u16),
    /// SQSIZE is 0 or too large: its value, the largest allowed.
    #[error("sqsize = {0}: 1 to {1} are allowed")]
    QueueSize(u16, u16),
    /// QID is too large: its value, the largest allowed.
    #[error("qid = {0}: 0 to {1} are allowed")]
    QueueId(u16, u16),
    /// An I/O queue of a discovery controller.
    #[error("qid = {0}: a discovery controller has queue 0 only")]
    DiscoveryQueue(u16),
    /// SUBNQN is not a name.
    #[error("subnqn: {0}")]
    SubsystemName(NqnError),
    /// HOSTNQN is not a name.
    #[error("hostnqn: {0}")]
    HostName(NqnError),
    /// There is no such subsystem on this listener.
    #[error("subnqn: names of subsystems on this listener are allowed")]
    Subsystem,
    /// The host is not in the subsystem's list.
    #[error("hostnqn: the subsystem's hosts are allowed")]
    HostNotAllowed,
    /// An admin Connect asks for a controller by its identifier.
    #[error("cntlid = {0:#x}: {CNTLID_DYNAMIC:#x} is allowed on the admin queue")]
    StaticController(u16),
    /// An I/O Connect names a controller that is not there.
    #[error("cntlid = {0:#x}: live controllers of the subsystem are allowed")]
    Controller(u16),
    /// KATO is too long: its value, the longest allowed, in ms.
    #[error("kato = {0} ms: 0 to {1} ms are allowed")]
    KeepAlive(u32, u32),
    /// All controller identifiers of the range are taken.
    #[error("no controller identifier is free in {0} to {1}")]
    Busy(u16, u16),
    /// HOSTNQN is not that of the controller's admin queue.
    #[error("hostnqn: controller {0:#x} belongs to another host")]
    OtherHost(u16),
    /// The controller is not enabled, or on its way out.
    #[error("cntlid = {0:#x}: enabled controllers (CC.EN 1) are allowed")]
    NotReady(u16),
    /// The queue is there already.
    #[error("qid = {0}: queues that do not exist yet are allowed")]
    QueueLive(u16),
    /// Not said to the host: it waits.
    #[error("commands of this host's former association are at a disk")]
    OrphanedCommands,
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

impl ConnectRefusal {
    /// The reason and the names in the host's data, for the log. Names that are not well formed are left out:
    /// they are a peer's bytes.
    #[must_use]
    pub fn about(&self, data: &ConnectData) -> String {
        let named = |field, name: Result<Nqn, _>| name.map(|name| format!("; {field} = {name}"));
        let names = [named("subnqn", data.subnqn()), named("hostnqn", data.hostnqn())];
        [self.reason.to_string()].into_iter().chain(names.into_iter().flatten()).collect()
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

/// A Connect command that was found well formed.
struct Asked {
    subsystem_nqn: Nqn,
    host_nqn: Nqn,
    host_id: [u8; 16],
    cntlid: u16,
    qid: u16,
    entries: u16,
    kato_ms: u32,
    is_sq_flow_off: bool,
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
    let queue = match asked.qid {
        0 => connect_admin(cx, &asked, limits)?,
        qid if asked.subsystem_nqn.is_discovery() => {
            return Err(ConnectRefusal::invalid(Reason::DiscoveryQueue(qid), ConnectInvalid::QID));
        }
        _ => connect_io(cx, &asked)?,
    };
    let cntlid = match &queue {
        ConnectedQueue::Admin(controller) => controller.shared.cntlid,
        ConnectedQueue::Io { shared, .. } => shared.cntlid,
    };
    let connected = Connected { queue, entries: asked.entries, is_sq_flow_off: asked.is_sq_flow_off };
    Ok((connected, ConnectResult::new().with_cntlid(cntlid).into_bits()))
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
        is_sq_flow_off: command.cattr().disable_sq_flow_control(),
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

/// The admin queue of a new controller, of a subsystem or of the discovery service.
fn connect_admin(cx: &Context<'_>, asked: &Asked, limits: &Limits) -> Result<ConnectedQueue, ConnectRefusal> {
    let configured = &cx.snapshot.limits;
    let (kind, range, io_queues) = if asked.subsystem_nqn.is_discovery() {
        (Kind::Discovery, (1, CNTLID_MAX), 0)
    } else {
        let subsystem = find_subsystem(cx, asked)?;
        (Kind::Io, subsystem.cntlid_range, subsystem.io_queues_max.clamp(1, IO_QUEUES_MAX))
    };
    if asked.cntlid != CNTLID_DYNAMIC {
        return Err(ConnectRefusal::invalid(Reason::StaticController(asked.cntlid), ConnectInvalid::CNTLID));
    }
    if asked.kato_ms > configured.keep_alive_ms_max {
        let reason = Reason::KeepAlive(asked.kato_ms, configured.keep_alive_ms_max);
        return Err(ConnectRefusal::invalid(reason, ConnectInvalid::KATO));
    }
    let busy = |reason| ConnectRefusal::with_status(reason, Status::CONNECT_CONTROLLER_BUSY);
    // Last of all, so that a Connect which would be refused does not wait.
    if kind == Kind::Io && cx.registry.has_orphans(&asked.subsystem_nqn, &asked.host_nqn, &asked.host_id) {
        return Err(busy(Reason::OrphanedCommands));
    }
    // 0 is no identifier that hosts expect, FFF0h and above are reserved.
    let range = (range.0.max(1), range.1.min(CNTLID_MAX));
    let shared = cx
        .registry
        .create(asked.subsystem_nqn, range, asked.host_nqn, asked.host_id, cx.core)
        .ok_or(busy(Reason::Busy(range.0, range.1)))?;
    // A host that asks for no time-out of the discovery service reads the log and goes; one that asks for one
    // stays (a persistent controller).
    let is_default = kind == Kind::Discovery && asked.kato_ms == 0;
    let kato_ms = if is_default { configured.discovery_keep_alive_ms } else { asked.kato_ms };
    Ok(ConnectedQueue::Admin(Box::new(Controller::new(cx, shared, kind, kato_ms, limits, io_queues))))
}

fn connect_io(cx: &Context<'_>, asked: &Asked) -> Result<ConnectedQueue, ConnectRefusal> {
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
    Ok(ConnectedQueue::Io { shared, qid: asked.qid, has_other_id })
}
