//! Admin commands: parse and checks, data length, execution.

use std::sync::Arc;

use nvme_spec::admin::Abort;
use nvme_spec::cluster::{JOIN, JOIN_BYTES, JoinData, Joined, LEAVE, NEXT, NEXT_BYTES, Next};
use nvme_spec::feature::{GetFeatures, SetFeatures};
use nvme_spec::identify::{IDENTIFY_BYTES, Identify};
use nvme_spec::log::GetLogPage;
use nvme_spec::opcode::AdminOpcode;
use nvme_spec::optimistic::{ATTACH, ATTACHMENT_BYTES};
use nvme_spec::sqe::{Fuse, Psdt, Sqe};
use nvme_spec::status::Status;
use nvme_spec::vendor::{END_FORMER_ASSOCIATIONS, EndFormerAssociations};

use spindle_reactor::mem::SealedFrames;
use spindle_target_card::{Cluster, JoinError};

use super::limits::ABORTS_MAX;
use super::{Context, Controller, Kind, Need, Outcome};
use crate::refusal::{Refusal, field};
use crate::snapshot::{Namespace, Subsystem};

/// An admin command that this kind of controller supports.
pub(super) enum Command<'a> {
    Identify(Identify<'a>),
    GetLogPage(GetLogPage<'a>),
    GetFeatures(GetFeatures<'a>),
    SetFeatures(SetFeatures<'a>),
    Abort(Abort<'a>),
    AsyncEventRequest,
    KeepAlive,
    EndFormer(EndFormerAssociations<'a>),
    Attach(u32),
    Join(u32),
    Next(Next<'a>),
    Leave,
}

/// [`IDENTIFY_BYTES`] as `u32`.
const IDENTIFY_DATA_BYTES: u32 = 4096;
const _: () = assert!(IDENTIFY_BYTES == IDENTIFY_DATA_BYTES as usize);
/// [`ATTACHMENT_BYTES`] as `u32`.
const ATTACHMENT_DATA_BYTES: u32 = 64;
const _: () = assert!(ATTACHMENT_BYTES == ATTACHMENT_DATA_BYTES as usize);
/// [`JOIN_BYTES`] and [`NEXT_BYTES`] as `u32`.
const JOIN_DATA_BYTES: u32 = 64;
const _: () = assert!(JOIN_BYTES == JOIN_DATA_BYTES as usize);
pub(crate) const NEXT_DATA_BYTES: u32 = 4096;
const _: () = assert!(NEXT_BYTES == NEXT_DATA_BYTES as usize);

impl Controller {
    pub(super) fn parse<'a>(&self, cx: &Context<'_>, sqe: &'a Sqe) -> Result<Command<'a>, Refusal> {
        if !self.state.is_ready() {
            return Err(Refusal::of(Status::COMMAND_SEQUENCE_ERROR.dnr(), None));
        }
        let is_sgl = matches!(sqe.psdt(), Psdt::SGL | Psdt::SGL_METADATA_SGL);
        if !is_sgl || sqe.fuse() != Fuse::NONE {
            return Err(Refusal::invalid(field::FLAGS));
        }
        let command = match sqe.admin_opcode() {
            AdminOpcode::IDENTIFY => Command::Identify(Identify::new(sqe)),
            AdminOpcode::GET_LOG_PAGE => Command::GetLogPage(GetLogPage::new(sqe)),
            AdminOpcode::GET_FEATURES => Command::GetFeatures(GetFeatures::new(sqe)),
            AdminOpcode::SET_FEATURES => Command::SetFeatures(SetFeatures::new(sqe)),
            AdminOpcode::ASYNC_EVENT_REQUEST => Command::AsyncEventRequest,
            AdminOpcode::KEEP_ALIVE => Command::KeepAlive,
            AdminOpcode::ABORT if self.kind == Kind::Io => Command::Abort(Abort::new(sqe)),
            END_FORMER_ASSOCIATIONS if self.kind == Kind::Io => {
                Command::EndFormer(EndFormerAssociations::new(sqe))
            }
            ATTACH if self.kind == Kind::Io && cx.registry.optimistic().is_some() => {
                Command::Attach(sqe.nsid())
            }
            JOIN if self.has_clusters(cx) => Command::Join(sqe.nsid()),
            NEXT if self.has_clusters(cx) => Command::Next(Next::new(sqe)),
            LEAVE if self.has_clusters(cx) => Command::Leave,
            _ => return Err(Refusal::at(Status::INVALID_OPCODE, field::OPCODE)),
        };
        self.check(cx, &command)?;
        Ok(command)
    }

    fn check(&self, cx: &Context<'_>, command: &Command<'_>) -> Result<(), Refusal> {
        match command {
            Command::Identify(identify) => self.check_identify(*identify),
            Command::GetLogPage(log) => self.check_log(cx, *log),
            Command::GetFeatures(get) => self.check_get(cx, *get),
            Command::SetFeatures(set) => self.check_set(cx, *set),
            Command::EndFormer(end) if end.token() == 0 => Err(Refusal::invalid(field::CDW10)),
            Command::Attach(nsid) => self.attachable(cx, *nsid).map(drop),
            Command::Join(nsid) => self.clustered(cx, *nsid).map(drop),
            Command::Next(_) | Command::Leave => self.check_member(),
            Command::Abort(_) | Command::AsyncEventRequest | Command::KeepAlive | Command::EndFormer(_) => {
                Ok(())
            }
        }
    }

    pub(super) fn need_of(&self, cx: &Context<'_>, command: &Command<'_>) -> Result<Need, Refusal> {
        match command {
            Command::Identify(_) => Ok(Need::to_host(IDENTIFY_DATA_BYTES)),
            Command::GetLogPage(log) => self.need_log(cx, *log),
            Command::GetFeatures(get) => Ok(Self::need_get(*get)),
            Command::SetFeatures(set) => Ok(Self::need_set(*set)),
            Command::Attach(_) => Ok(Need::to_host(ATTACHMENT_DATA_BYTES)),
            Command::Join(_) => Ok(Need::from_host(JOIN_DATA_BYTES)),
            // Its memory is taken when there are entries.
            Command::Next(_) => Ok(Need { memory: 0, ..Need::to_host(NEXT_DATA_BYTES) }),
            Command::Abort(_)
            | Command::AsyncEventRequest
            | Command::KeepAlive
            | Command::EndFormer(_)
            | Command::Leave => Ok(Need::NONE),
        }
    }

    pub(super) fn run(
        &mut self,
        cx: &Context<'_>,
        command: &Command<'_>,
        data: &mut [u8],
    ) -> Result<Outcome, Refusal> {
        if let Command::GetLogPage(log) = command {
            return self.get_log(cx, *log, data).map(|()| Outcome::success(0));
        }
        let need = self.need_of(cx, command)?;
        // Too short if the configuration changed after `need`, or by a bug of the caller.
        let data = usize::try_from(need.memory).ok().and_then(|bytes| data.get_mut(..bytes));
        let data = data.ok_or(Refusal::of(Status::INTERNAL_ERROR, None))?;
        match command {
            Command::GetLogPage(_) => Err(Refusal::of(Status::INTERNAL_ERROR, None)),
            Command::Identify(identify) => self.identify(cx, *identify, data).map(|()| Outcome::success(0)),
            Command::GetFeatures(get) => self.get_feature(cx, *get, data).map(success),
            Command::SetFeatures(set) => self.set_feature(cx, *set, data).map(success),
            Command::Abort(abort) => self.abort(*abort),
            Command::AsyncEventRequest => {
                if self.events.park() {
                    return Ok(Outcome::ParkAsyncEvent);
                }
                Err(Refusal::at(Status::ASYNC_EVENT_LIMIT_EXCEEDED, field::OPCODE))
            }
            // `execute` has recorded the traffic.
            Command::KeepAlive => Ok(Outcome::success(0)),
            Command::EndFormer(end) => Ok(Outcome::EndFormer { token: end.token() }),
            Command::Attach(nsid) => self.attach(cx, *nsid, data),
            Command::Join(nsid) => self.join(cx, *nsid, data),
            Command::Next(next) => Ok(Outcome::Next { acknowledged: next.acknowledged() }),
            Command::Leave => {
                self.shared.leave();
                Ok(Outcome::success(0))
            }
        }
    }

    /// Returns the frames of a namespace's cache or RAM disk. Operation Denied if the host may not read them.
    /// Namespace Not Ready if the namespace has none that hosts may read; a cache may be added.
    fn attachable(&self, cx: &Context<'_>, nsid: u32) -> Result<Arc<dyn SealedFrames>, Refusal> {
        let subsystem = self.subsystem(cx)?;
        if !subsystem.optimistic_hosts.allows(&self.shared.host_nqn) {
            return Err(Refusal::of(Status::OPERATION_DENIED, None));
        }
        let namespace = subsystem.namespace(nsid);
        let namespace = namespace.ok_or(Refusal::at(Status::INVALID_NAMESPACE_OR_FORMAT, field::NSID))?;
        namespace.source.sealed_frames().ok_or(Refusal::of(Status::NAMESPACE_NOT_READY, Some(field::NSID)))
    }

    fn attach(&mut self, cx: &Context<'_>, nsid: u32, data: &mut [u8]) -> Result<Outcome, Refusal> {
        let frames = self.attachable(cx, nsid)?;
        let service = cx.registry.optimistic();
        let attachment = service.and_then(|service| service.attach(&self.shared, nsid, frames));
        // Too many unused tokens, which expire after some seconds.
        let attachment = attachment.ok_or(Refusal::of(Status::COMMAND_INTERRUPTED, None))?;
        attachment.put(data);
        self.shared.set_attached();
        Ok(Outcome::success(0))
    }

    /// Returns true if a disk of the subsystem has members.
    pub(super) fn has_clusters(&self, cx: &Context<'_>) -> bool {
        self.kind == Kind::Io && self.subsystem(cx).is_ok_and(Subsystem::has_clusters)
    }

    /// Returns the namespace and the members of its disk. Namespace Not Ready if the disk has none: it may
    /// get `[disk.cluster]`.
    fn clustered(&self, cx: &Context<'_>, nsid: u32) -> Result<(Arc<Namespace>, Arc<Cluster>), Refusal> {
        let namespace = self.subsystem(cx)?.namespace(nsid);
        let namespace = namespace.ok_or(Refusal::at(Status::INVALID_NAMESPACE_OR_FORMAT, field::NSID))?;
        let cluster = namespace.source.cluster();
        let cluster = cluster.ok_or(Refusal::of(Status::NAMESPACE_NOT_READY, Some(field::NSID)))?;
        Ok((Arc::clone(namespace), cluster))
    }

    /// Command Sequence Error for a controller that has not joined.
    fn check_member(&self) -> Result<(), Refusal> {
        match self.shared.is_member() {
            true => Ok(()),
            false => Err(Refusal::at(Status::COMMAND_SEQUENCE_ERROR, field::OPCODE)),
        }
    }

    fn join(&mut self, cx: &Context<'_>, nsid: u32, data: &[u8]) -> Result<Outcome, Refusal> {
        let (namespace, cluster) = self.clustered(cx, nsid)?;
        let join = JoinData::parse(data).ok_or(Refusal::of(Status::INVALID_FIELD.dnr(), None))?;
        // Commands of the I/O queues may still name a former membership: the host connects again.
        if self.shared.has_membership() {
            return Err(Refusal::at(Status::COMMAND_SEQUENCE_ERROR, field::OPCODE));
        }
        let incarnations = (join.incarnation.get(), join.former.get());
        let wake = (cx.registry.waker(), self.shared.admin_core);
        let joined = cluster.join(self.shared.host_nqn, incarnations, cx.now, wake);
        let joined = joined.map_err(|error| match error {
            JoinError::NotAllowed => Refusal::of(Status::OPERATION_DENIED, None),
            // Members that are over make room soon.
            JoinError::Full => Refusal::of(Status::COMMAND_INTERRUPTED, None),
        })?;
        let answer = Joined::new().with_number(joined.number()).with_extent_shift(joined.extent_shift());
        self.shared.set_membership(joined, &namespace);
        Ok(success(answer.into_bits()))
    }

    fn abort(&mut self, abort: Abort<'_>) -> Result<Outcome, Refusal> {
        if self.aborts >= ABORTS_MAX {
            return Err(Refusal::of(Status::ABORT_LIMIT_EXCEEDED, Some(field::OPCODE)));
        }
        self.aborts += 1;
        Ok(Outcome::Abort { sqid: abort.sqid(), cid: abort.cid() })
    }
}

fn success(result: u32) -> Outcome {
    Outcome::success(u64::from(result))
}
