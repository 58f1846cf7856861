//! Admin commands to their end, and what is built of them.

use nvme_spec::feature::FeatureId;
use nvme_spec::identify::{Cns, IdentifyController, IdentifyNamespace, NamespaceList};
use nvme_spec::log::LogId;
use nvme_spec::register::Vs;
use nvme_spec::status::Status;
use nvme_spec::zerocopy::FromBytes;
use nvme_spec::{Cqe, Sqe};
use spindle_reactor::mem::Buf;
use spindle_transport::host::HostData;

use super::{ADMIN_BYTES_MAX, Controller};
use crate::error::{Error, Loss};
use crate::namespace::{Identity, Namespace};
use crate::qpair::{Completion, Failure, Qpair, WaitError, Why};

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
        Err(refused) if refused.why == Why::Full => return Err(Error::Busy { step }),
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

impl Controller {
    fn execute(&mut self, step: &'static str, sqe: Sqe, data: HostData) -> Result<Completion, Error> {
        let timeout = self.timeout();
        execute(&mut self.admin, step, sqe, data, timeout)
    }

    fn buffer(&self, step: &'static str, bytes: usize) -> Result<Buf, Error> {
        let bytes =
            u32::try_from(bytes).ok().filter(|bytes| *bytes <= ADMIN_BYTES_MAX).ok_or(Error::Range {
                field: "bytes of an admin command",
                value: bytes as u64,
                low: 0,
                high: u64::from(ADMIN_BYTES_MAX),
            })?;
        // Empty only if as many admin commands were given up as there are buffers.
        self.pool.take_contiguous(bytes).ok_or(Error::Busy { step })
    }

    /// A command that reads so many bytes, to its end.
    fn read(&mut self, step: &'static str, sqe: Sqe, bytes: u32) -> Result<Vec<u8>, Error> {
        let buf = self.buffer(step, bytes as usize)?;
        let completion = self.execute(step, sqe, HostData::FromController(buf))?;
        succeeded(step, &completion)?;
        let mut data = vec![0; bytes as usize];
        if let Some(buf) = completion.buf {
            buf.copy_out(0, &mut data);
        }
        Ok(data)
    }

    /// Ask again what the controller is: parts of Identify Controller may change, as VWC and SN of a
    /// subsystem that has moved.
    ///
    /// # Errors
    /// [`Error`].
    pub fn refresh_identify(&mut self) -> Result<(), Error> {
        self.identify = self.read_identify()?;
        Ok(())
    }

    /// Identify Controller, now.
    pub(super) fn read_identify(&mut self) -> Result<Box<IdentifyController>, Error> {
        let step = "Identify Controller";
        let data = self.read(step, Sqe::identify(0, Cns::CONTROLLER, 0, 0), 4096)?;
        let identify = IdentifyController::read_from_bytes(&data);
        Ok(Box::new(identify.map_err(|_| Error::Answer { step, what: "it is too short" })?))
    }

    /// The NSIDs of the active namespaces, ascending.
    ///
    /// # Errors
    /// [`Error`].
    pub fn namespaces(&mut self) -> Result<Vec<u32>, Error> {
        let step = "Identify (active namespaces)";
        let mut found: Vec<u32> = Vec::new();
        loop {
            let after = found.last().copied().unwrap_or(0);
            let data = self.read(step, Sqe::identify(0, Cns::ACTIVE_NAMESPACE_LIST, after, 0), 4096)?;
            let list = NamespaceList::read_from_bytes(&data);
            let list = list.map_err(|_| Error::Answer { step, what: "it is too short" })?;
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
    ///
    /// # Errors
    /// [`Error`].
    pub fn identify_namespace(&mut self, nsid: u32) -> Result<Box<IdentifyNamespace>, Error> {
        let step = "Identify Namespace";
        let data = self.read(step, Sqe::identify(0, Cns::NAMESPACE, nsid, 0), 4096)?;
        let identify = IdentifyNamespace::read_from_bytes(&data);
        Ok(Box::new(identify.map_err(|_| Error::Answer { step, what: "it is too short" })?))
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
    ///
    /// # Errors
    /// As there.
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
    ///
    /// # Errors
    /// [`Error`].
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

/// The largest NSID that can be one (Base 2.0 section 3.2.1.2).
const NSID_LAST: u32 = 0xffff_fffe;
