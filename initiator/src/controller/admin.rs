//! Admin commands to their end, and what is built of them; and the end of former associations: what this host
//! has left behind at a target that is a Spindle.
//!
//! A target may hold an association for alive that its host lost long ago, and still execute what had arrived
//! of it. A host that writes the same blocks anew on another association ends the former ones first, by a
//! command of Spindle's (`docs/extensions.md`).

use nvme_spec::feature::FeatureId;
use nvme_spec::identify::{Cns, IdentifyNamespace, NamespaceList};
use nvme_spec::log::LogId;
use nvme_spec::register::Vs;
use nvme_spec::status::Status;
use nvme_spec::vendor::FormerAssociations;
use nvme_spec::zerocopy::FromBytes;
use nvme_spec::{Cqe, Sqe};
use spindle_transport::host::HostData;

use super::{ADMIN_BYTES_MAX, Controller};
use crate::error::{Error, Loss};
use crate::namespace::{Identity, Namespace};
use crate::qpair::{Completion, Failure, Qpair, Refusal, WaitError};

/// What has become of the former associations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Former {
    /// They have ended, and nothing of them reaches a medium any more.
    Over {
        /// How many the target held for alive; `u16::MAX`: or more.
        ended: u16,
    },
    /// They have ended, but the target's disks still have commands of them, for longer than it waits; or the
    /// target did not say.
    MayLand,
    /// The target does not know the command.
    Unsupported,
}

/// Submit one command and wait for its end.
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

/// The completion entry of a success.
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

/// What the bytes of an answer say.
pub(crate) fn parsed<T: FromBytes>(step: &'static str, data: &[u8]) -> Result<T, Error> {
    T::read_from_bytes(data).map_err(|_| Error::Answer { step, what: "it is too short" })
}

impl Controller {
    fn execute(&mut self, step: &'static str, sqe: Sqe, data: HostData) -> Result<Completion, Error> {
        let timeout = self.options.connect_timeout;
        execute(&mut self.admin, step, sqe, data, timeout)
    }

    /// A command that reads so many bytes, to its end.
    fn read(&mut self, step: &'static str, sqe: Sqe, bytes: u32) -> Result<Vec<u8>, Error> {
        Error::in_range("bytes of an admin command", bytes, 0_u32, ADMIN_BYTES_MAX)?;
        // Empty only if as many admin commands were given up as there are buffers.
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

    /// Ask again what the controller is: parts of Identify Controller may change, as VWC and SN of a
    /// subsystem that has moved.
    pub fn refresh_identify(&mut self) -> Result<(), Error> {
        self.identify = self.identify_as("Identify Controller", Cns::CONTROLLER, 0)?;
        Ok(())
    }

    /// The NSIDs of the active namespaces, ascending.
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

    /// Identify Namespace.
    pub fn identify_namespace(&mut self, nsid: u32) -> Result<Box<IdentifyNamespace>, Error> {
        self.identify_as("Identify Namespace", Cns::NAMESPACE, nsid)
    }

    /// A namespace as commands need it.
    ///
    /// # Errors
    /// [`Error`]; a namespace that is not active has no block size and is one too.
    pub fn namespace(&mut self, nsid: u32) -> Result<Namespace, Error> {
        let identify = self.identify_namespace(nsid)?;
        self.namespace_of(nsid, &identify)
    }

    /// As [`Controller::namespace`], of what Identify Namespace has answered.
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

    /// Namespace Identification Descriptors; none of a controller that does not have them: they came with
    /// 1.3, and some of later versions refuse them.
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

    /// Part of a log page; `rae`: keep the event that told of it.
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

    /// Set a feature (one without data).
    pub(super) fn set_feature(&mut self, fid: FeatureId, value: u32) -> Result<u32, Error> {
        let completion = self.execute("Set Features", Sqe::set_features(0, fid, 0, value), HostData::None)?;
        Ok(succeeded("Set Features", &completion)?.result_u32())
    }

    /// A property (a register) of 4 or, if `is_long`, 8 bytes.
    pub(super) fn property(&mut self, offset: u32, is_long: bool) -> Result<u64, Error> {
        let completion =
            self.execute("Property Get", Sqe::property_get(0, is_long, offset), HostData::None)?;
        let value = succeeded("Property Get", &completion)?.result_u64();
        Ok(if is_long { value } else { value & u64::from(u32::MAX) })
    }

    /// Set a property of 4 bytes.
    pub(super) fn set_property(&mut self, offset: u32, value: u32) -> Result<(), Error> {
        let sqe = Sqe::property_set(0, false, offset, u64::from(value));
        let completion = self.execute("Property Set", sqe, HostData::None)?;
        succeeded("Property Set", &completion).map(drop)
    }
}

/// `None`: it was lost with its association.
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
    /// The target knows the command that ends former associations.
    #[must_use]
    pub fn ends_former_associations(&self) -> bool {
        self.identify.spindle_features().end_former_associations()
    }

    /// Say that this association is of `token` (not 0: the same for as long as the host is the same program
    /// with the same purpose), and end all others of this host that have said the same. What came of it is a
    /// [`ControllerEvent::Former`](super::ControllerEvent::Former), within 40 s: when nothing of any former
    /// association is at a disk.
    pub fn begin_end_former_associations(&mut self, token: u64) {
        if !self.ends_former_associations() {
            self.former = Some(Former::Unsupported);
            return;
        }
        let sqe = Sqe::end_former_associations(0, token);
        // Not taken: the association is lost, and that is told.
        self.former_request = self.admin.submit(sqe, HostData::None).ok();
        self.admin.send();
    }
}

/// The largest NSID that can be one (Base 2.0 section 3.2.1.2).
const NSID_LAST: u32 = 0xffff_fffe;
