//! Synchronous admin commands, and the end of this host's former associations at a Spindle target.
//!
//! After a host has lost an association, the target may still have it and execute commands that arrived over
//! it. Before a host writes the same blocks over another association, it ends the former ones by Spindle's
//! vendor command End Former Associations (`docs/extensions.md`).

use std::net::SocketAddr;

use nvme_spec::feature::FeatureId;
use nvme_spec::identify::{Cns, IdentifyNamespace, NamespaceList};
use nvme_spec::log::LogId;
use nvme_spec::optimistic::{ATTACHMENT_BYTES, Attachment, OPTIMISTIC_VERSION};
use nvme_spec::register::Vs;
use nvme_spec::status::Status;
use nvme_spec::vendor::FormerAssociations;
use nvme_spec::zerocopy::FromBytes;
use nvme_spec::{Cqe, Sqe};
use spindle_nvme_optimistic::client::{NamespacePages, Opening, OptimisticGrant, OptimisticOptions};
use spindle_nvme_transport::host::HostData;
use spindle_reactor::clock::Clock;

use super::{ADMIN_BYTES_MAX, Controller};
use crate::error::{Error, Loss};
use crate::namespace::{Identity, Namespace};
use crate::qpair::{Completion, Failure, Qpair, Refusal, Ticket, WaitError};
use crate::queue::IoQueue;

/// Result of End Former Associations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Former {
    /// The former associations have ended, and none of their commands is at a disk.
    Over {
        /// Number of associations ended; `u16::MAX`: that many or more.
        ended: u16,
    },
    /// The former associations have ended, but some of their commands are still at the target's disks after
    /// the longest wait; or the target returned another error.
    MayLand,
    /// The target does not support the command.
    Unsupported,
}

fn execute(
    qpair: &mut Qpair,
    step: &'static str,
    sqe: Sqe,
    data: HostData,
    timeout: std::time::Duration,
) -> Result<Completion, Error> {
    let ended = |qpair: &Qpair| Error::Lost { step, loss: qpair.loss().unwrap_or(Loss::ByPeer) };
    let ticket = match qpair.submit(sqe, data) {
        Ok(ticket) => ticket,
        Err(refused) if refused.why == Refusal::Full => return Err(Error::Busy { step }),
        Err(_) => return Err(ended(qpair)),
    };
    match qpair.wait(ticket, timeout) {
        Ok(Completion { result: Err(Failure::Lost), .. }) => Err(ended(qpair)),
        Ok(completion) => Ok(completion),
        Err(WaitError::TimedOut(after)) => Err(Error::TimedOut { step, after }),
        Err(WaitError::Nothing) => Err(ended(qpair)),
    }
}

/// Returns the completion queue entry if the command succeeded, else an error.
pub(super) fn succeeded(step: &'static str, completion: &Completion) -> Result<Cqe, Error> {
    match completion.result {
        Ok(()) => Ok(completion.cqe),
        Err(Failure::Status(status)) => {
            let is_invalid = status.code() == Status::CONNECT_INVALID_PARAMETERS;
            let invalid = is_invalid.then(|| completion.cqe.result_u32().into());
            Err(Error::Status { step, status, invalid })
        }
        Err(Failure::Lost) => Err(Error::Lost { step, loss: Loss::ByPeer }),
    }
}

/// Parses the data of an answer; fails if its length is not that of `T`.
pub(crate) fn parsed<T: FromBytes>(step: &'static str, data: &[u8]) -> Result<T, Error> {
    T::read_from_bytes(data).map_err(|_| Error::Answer { step, what: "it is too short" })
}

impl Controller {
    fn execute(&mut self, step: &'static str, sqe: Sqe, data: HostData) -> Result<Completion, Error> {
        let timeout = self.options.connect_timeout;
        execute(&mut self.admin, step, sqe, data, timeout)
    }

    /// Executes a command that returns `bytes` bytes of data, at most [`ADMIN_BYTES_MAX`].
    fn read(&mut self, step: &'static str, sqe: Sqe, bytes: u32) -> Result<Vec<u8>, Error> {
        Error::in_range("bytes of an admin command", bytes, 0_u32, ADMIN_BYTES_MAX)?;
        // Fails only when commands that have timed out occupy all buffers.
        let buf = self.pool.take_contiguous(bytes).ok_or(Error::Busy { step })?;
        let completion = self.execute(step, sqe, HostData::FromController(buf))?;
        succeeded(step, &completion)?;
        let mut data = vec![0; bytes as usize];
        if let Some(buf) = completion.buf {
            buf.copy_out(0, &mut data);
        }
        Ok(data)
    }

    fn identify_as<T: FromBytes>(
        &mut self,
        step: &'static str,
        cns: Cns,
        nsid: u32,
    ) -> Result<Box<T>, Error> {
        let data = self.read(step, Sqe::identify(0, cns, nsid, 0), 4096)?;
        parsed(step, &data).map(Box::new)
    }

    /// Reads Identify Controller again, as VWC and SN may have changed.
    pub fn refresh_identify(&mut self) -> Result<(), Error> {
        self.identify = self.identify_as("Identify Controller", Cns::CONTROLLER, 0)?;
        Ok(())
    }

    /// Returns the NSIDs of the active namespaces, ascending.
    pub fn namespaces(&mut self) -> Result<Vec<u32>, Error> {
        let step = "Identify (active namespaces)";
        let mut found: Vec<u32> = Vec::new();
        loop {
            let after = found.last().copied().unwrap_or(0);
            let list: Box<NamespaceList> = self.identify_as(step, Cns::ACTIVE_NAMESPACE_LIST, after)?;
            let before = found.len();
            for nsid in list.iter() {
                if found.last().is_some_and(|last| nsid <= *last) {
                    return Err(Error::Answer { step, what: "the identifiers do not ascend" });
                }
                found.push(nsid);
            }
            if found.len() - before < list.nsid.len() || found.last() >= Some(&NSID_LAST) {
                return Ok(found);
            }
        }
    }

    /// Reads Identify Namespace data (CNS 00h).
    pub fn identify_namespace(&mut self, nsid: u32) -> Result<Box<IdentifyNamespace>, Error> {
        self.identify_as("Identify Namespace", Cns::NAMESPACE, nsid)
    }

    /// Reads the parameters of a namespace for I/O commands: block size, number of blocks and identity.
    ///
    /// # Errors
    /// [`Error`] when a command fails, or the block size is not from 512 bytes to 64 KiB. An inactive
    /// namespace has no block size.
    pub fn namespace(&mut self, nsid: u32) -> Result<Namespace, Error> {
        let identify = self.identify_namespace(nsid)?;
        self.namespace_of(nsid, &identify)
    }

    /// Does the same as [`Controller::namespace`], with Identify Namespace data already read.
    pub fn namespace_of(&mut self, nsid: u32, identify: &IdentifyNamespace) -> Result<Namespace, Error> {
        let what = "it names no block size that is allowed";
        let unusable = Error::Answer { step: "Identify Namespace", what };
        if identify.block_bytes().is_none() {
            return Err(unusable);
        }
        let descriptors = self.namespace_descriptors(nsid)?;
        let identity = Identity::new(&self.identify, identify, &descriptors);
        Namespace::new(nsid, identify, identity).ok_or(unusable)
    }

    /// Reads the Namespace Identification Descriptors; empty if the controller does not support them (before
    /// NVMe 1.3, or refused with Invalid Field).
    fn namespace_descriptors(&mut self, nsid: u32) -> Result<Vec<u8>, Error> {
        if self.vs < Vs::V1_3 {
            return Ok(Vec::new());
        }
        let step = "Identify (namespace descriptors)";
        match self.read(step, Sqe::identify(0, Cns::NAMESPACE_DESCRIPTORS, nsid, 0), 4096) {
            Ok(data) => Ok(data),
            Err(Error::Status { status, .. }) if status.code() == Status::INVALID_FIELD => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }

    /// Reads `bytes` bytes from `offset` of a log page, at most 64 KiB. `rae`: Retain Asynchronous Event.
    pub fn log_page(
        &mut self,
        lid: LogId,
        nsid: u32,
        offset: u64,
        bytes: u32,
        rae: bool,
    ) -> Result<Vec<u8>, Error> {
        self.read("Get Log Page", Sqe::get_log_page(0, lid, nsid, bytes, offset, rae), bytes)
    }

    /// Executes Set Features for a feature without data; returns dword 0 of the completion.
    pub(super) fn set_feature(&mut self, fid: FeatureId, value: u32) -> Result<u32, Error> {
        let completion = self.execute("Set Features", Sqe::set_features(0, fid, 0, value), HostData::None)?;
        Ok(succeeded("Set Features", &completion)?.result_u32())
    }

    /// Executes Property Get of 4 or, with `is_long`, 8 bytes.
    pub(super) fn property(&mut self, offset: u32, is_long: bool) -> Result<u64, Error> {
        let completion =
            self.execute("Property Get", Sqe::property_get(0, is_long, offset), HostData::None)?;
        let value = succeeded("Property Get", &completion)?.result_u64();
        Ok(if is_long { value } else { value & u64::from(u32::MAX) })
    }

    /// Executes Property Set of 4 bytes.
    pub(super) fn set_property(&mut self, offset: u32, value: u32) -> Result<(), Error> {
        let sqe = Sqe::property_set(0, false, offset, u64::from(value));
        let completion = self.execute("Property Set", sqe, HostData::None)?;
        succeeded("Property Set", &completion).map(drop)
    }
}

/// Returns the result of End Former Associations; `None` if the association was lost first.
pub(super) fn former_of(completion: &Completion) -> Option<Former> {
    match completion.result {
        Ok(()) => {
            let result = FormerAssociations::from_bits(completion.cqe.result_u32());
            Some(if result.may_land() { Former::MayLand } else { Former::Over { ended: result.ended() } })
        }
        Err(Failure::Status(status)) if status.code() == Status::INVALID_OPCODE => Some(Former::Unsupported),
        Err(Failure::Status(_)) => Some(Former::MayLand),
        Err(Failure::Lost) => None,
    }
}

impl Controller {
    /// Returns true if the target supports End Former Associations.
    #[must_use]
    pub fn ends_former_associations(&self) -> bool {
        self.identify.spindle_features().end_former_associations()
    }

    /// Registers this association under `token` and ends all other associations of this host that have
    /// registered the same token. `token` is not 0, and constant while the same program runs for the same
    /// purpose. [`ControllerEvent::Former`](super::ControllerEvent::Former) reports the result once no
    /// command of a former association is at a disk, or after 40 s. Without support of the target it reports
    /// `Unsupported` at once.
    pub fn begin_end_former_associations(&mut self, token: u64) {
        if !self.ends_former_associations() {
            self.former = Some(Former::Unsupported);
            return;
        }
        let sqe = Sqe::end_former_associations(0, token);
        // A refusal means that the association is lost, which `poll` reports.
        self.former_request = self.admin.submit(sqe, HostData::None).ok();
        self.admin.send();
    }
}

#[derive(Debug)]
pub(super) struct AttachRequest {
    pub(super) ticket: Ticket,
    namespace: Namespace,
    options: OptimisticOptions,
}

/// Data of a command of [`Controller::begin_command`].
#[derive(Debug, Clone, Copy)]
pub enum CommandData<'a> {
    /// These bytes are sent to the controller.
    ToController(&'a [u8]),
    /// The controller sends so many bytes.
    FromController(u32),
}

impl Controller {
    /// Submits an admin command, and does not wait: [`Controller::take_answer`] returns its completion, after
    /// [`Controller::poll`] has received it.
    ///
    /// # Errors
    /// [`Error::Range`]: more than 64 KiB of data. [`Error::Busy`]: no command can be queued now.
    /// [`Error::Lost`]: the connection has ended.
    pub fn begin_command(
        &mut self,
        step: &'static str,
        sqe: Sqe,
        data: CommandData<'_>,
    ) -> Result<Ticket, Error> {
        let bytes = match data {
            CommandData::ToController(bytes) => u32::try_from(bytes.len()).unwrap_or(u32::MAX),
            CommandData::FromController(bytes) => bytes,
        };
        Error::in_range("bytes of an admin command", bytes, 1_u32, ADMIN_BYTES_MAX)?;
        let mut buf = self.pool.take_contiguous(bytes).ok_or(Error::Busy { step })?;
        let data = match data {
            CommandData::ToController(bytes) => {
                buf.copy_in(0, bytes);
                HostData::ToController(buf)
            }
            CommandData::FromController(_) => HostData::FromController(buf),
        };
        let ticket = self.admin.submit(sqe, data).map_err(|refused| {
            let loss = self.admin.loss().unwrap_or(Loss::ByPeer);
            if refused.why == Refusal::Full { Error::Busy { step } } else { Error::Lost { step, loss } }
        })?;
        self.commands.push(ticket);
        self.admin.send();
        Ok(ticket)
    }

    /// Returns the next completion of a command of [`Controller::begin_command`].
    pub fn take_answer(&mut self) -> Option<Completion> {
        self.answers.pop_front()
    }
}

const ATTACH: &str = "Attach";

impl Controller {
    /// Returns true if the target supports optimistic reads.
    #[must_use]
    pub fn has_optimistic_reads(&self) -> bool {
        self.identify.spindle_features().optimistic_reads()
    }

    /// Executes Attach: returns the port of the service for optimistic reads, and a token for one connection.
    ///
    /// # Errors
    /// [`Error::Status`], see [`Controller::attach`]; [`Error::Answer`]: the data is of another version.
    pub fn attachment(&mut self, nsid: u32) -> Result<Attachment, Error> {
        let data = self.read(ATTACH, Sqe::attach(0, nsid), attachment_bytes())?;
        attachment_of(&data)
    }

    /// Submits Attach for `namespace`, and does not wait: [`Controller::take_grant`] returns the result.
    /// One Attach is outstanding at a time.
    ///
    /// # Errors
    /// [`Error::Busy`]: the result of another Attach was not taken yet, or no admin command can be queued.
    /// [`Error::Lost`]: the connection has ended.
    pub fn begin_attach(&mut self, namespace: &Namespace, options: &OptimisticOptions) -> Result<(), Error> {
        let busy = Error::Busy { step: ATTACH };
        if self.is_attaching() {
            return Err(busy);
        }
        let Some(buf) = self.pool.take_contiguous(attachment_bytes()) else { return Err(busy) };
        let sqe = Sqe::attach(0, namespace.nsid);
        let ticket = self.admin.submit(sqe, HostData::FromController(buf)).map_err(|refused| {
            let loss = self.admin.loss().unwrap_or(Loss::ByPeer);
            if refused.why == Refusal::Full { busy } else { Error::Lost { step: ATTACH, loss } }
        })?;
        self.admin.send();
        self.attach_request = Some(AttachRequest { ticket, namespace: *namespace, options: options.clone() });
        Ok(())
    }

    /// Returns true from [`Controller::begin_attach`] until [`Controller::take_grant`] has the result.
    #[must_use]
    pub fn is_attaching(&self) -> bool {
        self.attach_request.is_some() || self.attached.is_some()
    }

    /// Returns the result of [`Controller::begin_attach`] once [`Controller::poll`] has received it. The
    /// errors are those of [`Controller::attachment`].
    pub fn take_grant(&mut self) -> Option<Result<OptimisticGrant, Error>> {
        self.attached.take()
    }

    pub(super) fn grant_of(
        &self,
        request: &AttachRequest,
        completion: &Completion,
    ) -> Result<OptimisticGrant, Error> {
        succeeded(ATTACH, completion)?;
        let mut data = [0; ATTACHMENT_BYTES];
        if let Some(buf) = &completion.buf {
            buf.copy_out(0, &mut data);
        }
        Ok(self.grant(&attachment_of(&data)?, &request.namespace, &request.options))
    }

    fn grant(
        &self,
        attachment: &Attachment,
        namespace: &Namespace,
        options: &OptimisticOptions,
    ) -> OptimisticGrant {
        let far = self.target.address;
        let (nsid, block_bytes) = (namespace.nsid, namespace.block_bytes());
        OptimisticGrant {
            address: SocketAddr::new(far.ip(), attachment.port.get()),
            far,
            token: attachment.token,
            namespace: NamespacePages::new(nsid, block_bytes, namespace.bytes(), options),
            timeout: self.options.connect_timeout,
            registration: self.options.registration,
            silence_max: self.options.optimistic_silence.into(),
        }
    }

    /// Attaches a queue of this controller to the cache of a namespace: reads of 1 to 16 pages that the queue
    /// has read before are RDMA READs of the target's memory, without the target's CPU. All other commands,
    /// and reads whose pages have changed, are sent as before. The queue keeps one of its commands for Get
    /// References, which [`IoQueue::room`] does not count; one of a depth below 3 does not, and learns single
    /// pages only. To be called before the queue is added to a
    /// [`QueueSet`](crate::QueueSet). Once [`IoQueue::has_optimistic_connection`] returns false, the queue
    /// can be attached again. Blocks for at most the connect timeout; [`Controller::begin_attach`] and
    /// [`IoQueue::step_attach`] do not block.
    ///
    /// # Errors
    /// [`Error::Status`] with Invalid Opcode: the target has no optimistic reads; Namespace Not Ready: the
    /// namespace has no cache for them. [`Error::Optimistic`]: there is no RDMA
    /// connection to the target's service. The queue stays as it was.
    pub fn attach(
        &mut self,
        queue: &mut IoQueue,
        namespace: &Namespace,
        options: &OptimisticOptions,
    ) -> Result<(), Error> {
        let attachment = self.attachment(namespace.nsid)?;
        let grant = self.grant(&attachment, namespace, options);
        let mut opening = Opening::begin(grant, queue.depth(), Clock::now())?;
        loop {
            let now = Clock::now();
            if queue.step_attach(&mut opening, now)? {
                return Ok(());
            }
            opening.wait_io(now);
        }
    }
}

fn attachment_bytes() -> u32 {
    u32::try_from(ATTACHMENT_BYTES).unwrap_or(64)
}

fn attachment_of(data: &[u8]) -> Result<Attachment, Error> {
    let attachment: Attachment = parsed(ATTACH, data)?;
    if attachment.version.get() != OPTIMISTIC_VERSION {
        return Err(Error::Answer { step: ATTACH, what: "it is of another version" });
    }
    Ok(attachment)
}

/// Largest valid NSID (Base 2.0 section 3.2.1.2).
const NSID_LAST: u32 = 0xffff_fffe;
