//! Admin commands other than Identify and Get Log Page: queues, features, events, Abort, doorbell buffer.
//! Also the error log.

use std::collections::VecDeque;

use nvme_spec::admin::{ABORT_NOT_DONE, Abort, AsyncError, AsyncEvent, AsyncEventType, AsyncNotice};
use nvme_spec::feature::{
    AsyncEventConfig, FeatureCapabilities, FeatureId, FeatureSelect, GetFeatures, NumberOfQueues,
    SetFeatures, TemperatureThreshold, VolatileWriteCache,
};
use nvme_spec::log::{ErrorLocation, ErrorLogEntry, GetLogPage, LogId};
use nvme_spec::pcie::QueueCommand;
use nvme_spec::register::Cc;
use nvme_spec::sqe::{Fuse, NSID_ALL, Psdt};
use nvme_spec::{AdminOpcode, Sqe, Status};

use crate::controller::{Controller, Outcome};
use crate::queues::{Cq, Shadow, Sq};

const INVALID_FIELD: Status = Status::INVALID_FIELD.dnr();
const OFFSET_INVALID: Status = Status::PRP_OFFSET_INVALID.dnr();
/// Maximum entries of the error log.
pub(crate) const ERROR_LOG_ENTRIES: usize = 64;
/// Maximum events that wait for an Asynchronous Event Request.
const EVENTS_MAX: usize = 64;
/// Default over-temperature threshold, in kelvins.
const TEMPERATURE_THRESHOLD: u16 = 343;

/// Admin state that a controller level reset clears.
pub(crate) struct Admin {
    /// CIDs of outstanding Asynchronous Event Requests.
    requests: VecDeque<u16>,
    events: VecDeque<AsyncEvent>,
    /// A bit for each log page: set when an event of the page is reported, cleared when the page is read with
    /// RAE 0.
    masked: [u64; 4],
    pub(crate) event_config: AsyncEventConfig,
    pub(crate) is_cache_on: bool,
    /// Over and under thresholds of the composite temperature, in kelvins.
    temperature: [u16; 2],
    /// NSIDs of namespaces that changed since log page 04h was read with RAE 0, ascending.
    pub(crate) changed: Vec<u32>,
    /// Error log, newest entry first.
    pub(crate) error_log: VecDeque<ErrorLogEntry>,
    pub(crate) error_count: u64,
}

impl Admin {
    pub(crate) fn new() -> Admin {
        Admin {
            requests: VecDeque::new(),
            events: VecDeque::new(),
            masked: [0; 4],
            event_config: AsyncEventConfig::new(),
            is_cache_on: true,
            temperature: [TEMPERATURE_THRESHOLD, 0],
            changed: Vec::new(),
            error_log: VecDeque::with_capacity(ERROR_LOG_ENTRIES),
            error_count: 0,
        }
    }

    /// Returns true if there are an event, masked or not, and an Asynchronous Event Request.
    pub(crate) fn has_events(&self) -> bool {
        !self.events.is_empty() && !self.requests.is_empty()
    }

    /// Adds an entry to the error log. Beyond `ERROR_LOG_ENTRIES` the oldest entry is dropped.
    pub(crate) fn note_error(&mut self, sqid: u16, cid: u16, status: Status) {
        self.error_count += 1;
        if self.error_log.len() == ERROR_LOG_ENTRIES {
            self.error_log.pop_back();
        }
        self.error_log.push_front(ErrorLogEntry {
            error_count: self.error_count.into(),
            sqid: sqid.into(),
            cid: cid.into(),
            status: status.to_wire(false).into(),
            location: ErrorLocation::NONE.into(),
            ..ErrorLogEntry::default()
        });
    }

    fn is_masked(&self, log: LogId) -> bool {
        self.masked.get(usize::from(log.0 >> 6)).is_some_and(|word| word >> (log.0 & 63) & 1 == 1)
    }

    fn set_masked(&mut self, log: LogId, is_masked: bool) {
        if let Some(word) = self.masked.get_mut(usize::from(log.0 >> 6)) {
            *word = *word & !(1 << (log.0 & 63)) | u64::from(is_masked) << (log.0 & 63);
        }
    }

    /// Allows the next event of `log`, which the host has read.
    pub(crate) fn unmask(&mut self, log: LogId) {
        self.set_masked(log, false);
    }
}

impl Controller {
    /// Returns the bytes that an admin command transfers.
    pub(crate) fn admin_bytes(&self, sqe: &Sqe) -> u64 {
        match sqe.admin_opcode() {
            AdminOpcode::IDENTIFY => 4096,
            AdminOpcode::GET_LOG_PAGE => GetLogPage::new(sqe).bytes(),
            _ => 0,
        }
    }

    /// Executes an admin command other than Asynchronous Event Request. Always returns `Some`.
    pub(crate) fn execute_admin(&mut self, sqe: &Sqe) -> Option<Outcome> {
        if sqe.fuse() != Fuse::NONE || sqe.psdt() != Psdt::PRP {
            // Admin commands over PCIe do not use SGLs.
            return Some(Err(INVALID_FIELD));
        }
        Some(match sqe.admin_opcode() {
            AdminOpcode::CREATE_IO_CQ => self.create_cq(sqe),
            AdminOpcode::CREATE_IO_SQ => self.create_sq(sqe),
            AdminOpcode::DELETE_IO_CQ => self.delete_cq(sqe),
            AdminOpcode::DELETE_IO_SQ => self.delete_sq(sqe),
            AdminOpcode::IDENTIFY => self.identify(sqe),
            AdminOpcode::GET_LOG_PAGE => self.get_log_page(sqe),
            AdminOpcode::ABORT => self.abort(sqe),
            AdminOpcode::SET_FEATURES => self.set_features(sqe),
            AdminOpcode::GET_FEATURES => self.get_features(sqe),
            AdminOpcode::DOORBELL_BUFFER_CONFIG if self.spec.has_doorbell_buffer => {
                self.configure_doorbells(sqe)
            }
            _ => Err(Status::INVALID_OPCODE.dnr()),
        })
    }

    fn has_queue(&self, qid: u16) -> (bool, bool) {
        let index = usize::from(qid);
        let is_there = |found: bool| qid != 0 && found;
        (
            is_there(matches!(self.sqs.get(index), Some(Some(_)))),
            is_there(matches!(self.cqs.get(index), Some(Some(_)))),
        )
    }

    fn create_cq(&mut self, sqe: &Sqe) -> Outcome {
        let command = QueueCommand::new(sqe);
        let (qid, (base, _)) = (command.qid(), sqe.sgl.prp());
        let (_, is_there) = self.has_queue(qid);
        if qid == 0 || qid > self.queue_pairs || is_there {
            return Err(Status::INVALID_QUEUE_ID.dnr());
        }
        self.check_size(command.entries(), self.configuration().iocqes() == 4)?;
        if !command.cq().contiguous() {
            return Err(INVALID_FIELD);
        }
        if command.cq().interrupts() {
            // The function has no interrupts, so no vector is valid.
            return Err(Status::INVALID_INTERRUPT_VECTOR.dnr());
        }
        if !base.is_multiple_of(4096) {
            return Err(OFFSET_INVALID);
        }
        if let Some(place) = self.cqs.get_mut(usize::from(qid)) {
            *place = Some(Cq::new(base, command.entries()));
        }
        self.qid_max = self.qid_max.max(qid);
        Ok(0)
    }

    fn create_sq(&mut self, sqe: &Sqe) -> Outcome {
        let command = QueueCommand::new(sqe);
        let (qid, cqid, (base, _)) = (command.qid(), command.sq().cqid(), sqe.sgl.prp());
        let (is_there, _) = self.has_queue(qid);
        if qid == 0 || qid > self.queue_pairs || is_there || cqid == 0 || cqid > self.queue_pairs {
            return Err(Status::INVALID_QUEUE_ID.dnr());
        }
        let (_, has_cq) = self.has_queue(cqid);
        if !has_cq {
            return Err(Status::COMPLETION_QUEUE_INVALID.dnr());
        }
        self.check_size(command.entries(), self.configuration().iosqes() == 6)?;
        if !command.sq().contiguous() {
            return Err(INVALID_FIELD);
        }
        if !base.is_multiple_of(4096) {
            return Err(OFFSET_INVALID);
        }
        if let Some(Some(cq)) = self.cqs.get_mut(usize::from(cqid)) {
            cq.users += 1;
        }
        if let Some(place) = self.sqs.get_mut(usize::from(qid)) {
            *place = Some(Sq::new(qid, base, command.entries(), cqid));
        }
        self.qid_max = self.qid_max.max(qid);
        Ok(0)
    }

    fn configuration(&self) -> Cc {
        Cc::from_bits(self.registers.load(u64::from(nvme_spec::register::CC)))
    }

    fn check_size(&self, entries: u32, is_entry_size_set: bool) -> Result<(), Status> {
        let is_fit = (2..=self.spec.queue_entries_max).contains(&entries) && is_entry_size_set;
        if is_fit { Ok(()) } else { Err(Status::INVALID_QUEUE_SIZE.dnr()) }
    }

    fn delete_cq(&mut self, sqe: &Sqe) -> Outcome {
        let qid = QueueCommand::new(sqe).qid();
        let (_, is_there) = self.has_queue(qid);
        let Some(place) = self.cqs.get_mut(usize::from(qid)).filter(|_| is_there) else {
            return Err(Status::INVALID_QUEUE_ID.dnr());
        };
        if place.as_ref().is_some_and(|cq| cq.users != 0) {
            return Err(Status::INVALID_QUEUE_DELETION.dnr());
        }
        // Reads a head doorbell that was written before the deletion.
        self.read_head(qid);
        if let Some(place) = self.cqs.get_mut(usize::from(qid)) {
            *place = None;
        }
        Ok(0)
    }

    fn delete_sq(&mut self, sqe: &Sqe) -> Outcome {
        let qid = QueueCommand::new(sqe).qid();
        let (is_there, _) = self.has_queue(qid);
        if !is_there {
            return Err(Status::INVALID_QUEUE_ID.dnr());
        }
        self.read_tail(qid);
        self.end_held_of(qid);
        let place = self.sqs.get_mut(usize::from(qid)).and_then(Option::take);
        let cqid = place.map_or(0, |sq| usize::from(sq.cqid));
        if let Some(Some(cq)) = self.cqs.get_mut(cqid) {
            cq.users = cq.users.saturating_sub(1);
        }
        Ok(0)
    }

    fn abort(&mut self, sqe: &Sqe) -> Outcome {
        if self.held_of(AdminOpcode::ABORT) > usize::from(self.spec.acl_z) {
            return Err(Status::ABORT_LIMIT_EXCEEDED.dnr());
        }
        let command = Abort::new(sqe);
        let (sqid, cid) = (command.sqid(), command.cid());
        let at = self.admin.requests.iter().position(|request| sqid == 0 && *request == cid);
        if let Some(at) = at {
            self.admin.requests.remove(at);
            self.counters.aborted += 1;
            self.end(0, cid, Err(Status::ABORTED_BY_REQUEST));
            return Ok(0);
        }
        Ok(if self.abort_held(sqid, cid) { 0 } else { ABORT_NOT_DONE })
    }

    fn configure_doorbells(&mut self, sqe: &Sqe) -> Outcome {
        let (doorbells, event_indexes) = sqe.sgl.prp();
        if !doorbells.is_multiple_of(4096) || !event_indexes.is_multiple_of(4096) {
            return Err(INVALID_FIELD);
        }
        self.shadow = Some(Shadow { doorbells, event_indexes });
        for qid in 1..=self.qid_max {
            self.set_event_index(qid);
        }
        Ok(0)
    }

    fn set_features(&mut self, sqe: &Sqe) -> Outcome {
        let command = SetFeatures::new(sqe);
        let value = command.value();
        self.check_feature(command.fid(), sqe.nsid())?;
        if command.save() {
            return Err(Status::FEATURE_NOT_SAVEABLE.dnr());
        }
        match command.fid() {
            FeatureId::NUMBER_OF_QUEUES => {
                return self.set_number_of_queues(NumberOfQueues::from_bits(value));
            }
            FeatureId::ASYNC_EVENT_CONFIG => {
                self.admin.event_config = AsyncEventConfig::from_bits(value);
                self.check_health();
            }
            FeatureId::VOLATILE_WRITE_CACHE => {
                self.admin.is_cache_on = VolatileWriteCache::from_bits(value).enabled();
                if !self.admin.is_cache_on {
                    self.media.iter_mut().for_each(crate::medium::EmulatedMedia::flush);
                }
            }
            _ => {
                let threshold = TemperatureThreshold::from_bits(value);
                let [over, under] = &mut self.admin.temperature;
                match (threshold.sensor(), threshold.threshold_type()) {
                    (0 | 0xf, 0) => *over = threshold.kelvins(),
                    (0 | 0xf, 1) => *under = threshold.kelvins(),
                    _ => return Err(INVALID_FIELD),
                }
                self.check_health();
            }
        }
        Ok(0)
    }

    fn check_feature(&self, fid: FeatureId, nsid: u32) -> Result<(), Status> {
        let is_known = match fid {
            FeatureId::NUMBER_OF_QUEUES
            | FeatureId::ASYNC_EVENT_CONFIG
            | FeatureId::TEMPERATURE_THRESHOLD => true,
            FeatureId::VOLATILE_WRITE_CACHE => self.spec.has_write_cache,
            _ => false,
        };
        if !is_known {
            return Err(INVALID_FIELD);
        }
        if nsid != 0 && nsid != NSID_ALL {
            return Err(Status::FEATURE_NOT_NAMESPACE_SPECIFIC.dnr());
        }
        Ok(())
    }

    fn set_number_of_queues(&mut self, requested: NumberOfQueues) -> Outcome {
        let has_queues =
            self.sqs.iter().skip(1).any(Option::is_some) || self.cqs.iter().skip(1).any(Option::is_some);
        if has_queues {
            return Err(Status::COMMAND_SEQUENCE_ERROR.dnr());
        }
        if requested.submission_z() == u16::MAX || requested.completion_z() == u16::MAX {
            return Err(INVALID_FIELD);
        }
        // Grants the same count of submission and completion queues, regardless of the request.
        Ok(NumberOfQueues::both(u32::from(self.spec.queue_pairs)).into_bits())
    }

    fn get_features(&mut self, sqe: &Sqe) -> Outcome {
        let command = GetFeatures::new(sqe);
        self.check_feature(command.fid(), sqe.nsid())?;
        let select = command.select();
        if select != FeatureSelect::CURRENT && !self.spec.oncs.save_select() {
            return Err(INVALID_FIELD);
        }
        let is_now = match select {
            FeatureSelect::CURRENT => true,
            FeatureSelect::DEFAULT | FeatureSelect::SAVED => false,
            FeatureSelect::SUPPORTED => {
                return Ok(FeatureCapabilities::new().with_changeable(true).into_bits());
            }
            _ => return Err(INVALID_FIELD),
        };
        let default = Admin::new();
        let admin = if is_now { &self.admin } else { &default };
        match command.fid() {
            FeatureId::NUMBER_OF_QUEUES => {
                Ok(NumberOfQueues::both(u32::from(self.spec.queue_pairs)).into_bits())
            }
            FeatureId::ASYNC_EVENT_CONFIG => Ok(admin.event_config.into_bits()),
            FeatureId::VOLATILE_WRITE_CACHE => {
                Ok(VolatileWriteCache::new().with_enabled(admin.is_cache_on).into_bits())
            }
            _ => {
                let which = TemperatureThreshold::from_bits(command.argument());
                let [over, under] = admin.temperature;
                match (which.sensor(), which.threshold_type()) {
                    (0, 0) => Ok(u32::from(over)),
                    (0, 1) => Ok(u32::from(under)),
                    _ => Err(INVALID_FIELD),
                }
            }
        }
    }

    /// Queues an Asynchronous Event Request until there is an event. Fails it if it is invalid or exceeds
    /// AERL.
    pub(crate) fn take_event_request(&mut self, sqe: &Sqe) {
        if sqe.fuse() != Fuse::NONE || sqe.psdt() != Psdt::PRP {
            return self.end(0, sqe.cid(), Err(INVALID_FIELD));
        }
        if self.admin.requests.len() > usize::from(self.spec.aerl_z) {
            return self.end(0, sqe.cid(), Err(Status::ASYNC_EVENT_LIMIT_EXCEEDED.dnr()));
        }
        self.admin.requests.push_back(sqe.cid());
        self.deliver_events();
    }

    /// Completes Asynchronous Event Requests with events that are not masked, while completion queue 0 has
    /// room. Returns true if any was completed.
    pub(crate) fn deliver_events(&mut self) -> bool {
        let mut has_worked = false;
        while self.admin.has_events() && self.has_room(0) {
            let admin = &mut self.admin;
            let Some(at) = admin.events.iter().position(|event| !admin.is_masked(event.log())) else { break };
            let Some(event) = self.admin.events.remove(at) else { break };
            let Some(cid) = self.admin.requests.pop_front() else { break };
            self.admin.set_masked(event.log(), true);
            self.complete(0, cid, Ok(event.into_bits()));
            has_worked = true;
        }
        has_worked
    }

    /// Queues an event if the host enabled it and the controller is enabled; returns true if both hold. A
    /// duplicate, or an event beyond `EVENTS_MAX`, is dropped.
    pub(crate) fn raise(&mut self, event: AsyncEvent) -> bool {
        let config = self.admin.event_config;
        let is_wanted = match event.kind() {
            AsyncEventType::NOTICE => match event.as_notice() {
                Some(AsyncNotice::NAMESPACE_CHANGED) => config.namespace_attribute(),
                Some(AsyncNotice::FIRMWARE_ACTIVATION_STARTING) => config.firmware_activation(),
                Some(AsyncNotice::TELEMETRY_CHANGED) => config.telemetry(),
                _ => false,
            },
            AsyncEventType::HEALTH => config.critical_warnings() != 0,
            _ => true,
        };
        let is_new = !self.admin.events.contains(&event) && self.admin.events.len() < EVENTS_MAX;
        let is_ready = self.enable_state == crate::registers::EnableState::Ready;
        if is_wanted && is_new && is_ready {
            self.admin.events.push_back(event);
        }
        is_wanted && is_ready
    }

    /// Raises an error event: with `is_value` for an invalid doorbell value, otherwise for a write to the
    /// doorbell of a missing queue.
    pub(crate) fn raise_doorbell_error(&mut self, is_value: bool) {
        let error =
            if is_value { AsyncError::INVALID_DOORBELL_VALUE } else { AsyncError::INVALID_DOORBELL_REGISTER };
        self.raise(AsyncEvent::of(AsyncEventType::ERROR, error.0, LogId::ERROR));
    }

    /// Updates the temperature warning. Raises a health event if a critical warning is set that the host
    /// enabled.
    pub(crate) fn check_health(&mut self) {
        let [over, under] = self.admin.temperature;
        let kelvins = self.health.temperature;
        self.health.is_too_hot = kelvins >= over || (under != 0 && kelvins <= under);
        let warning = self.health.warning();
        let wanted = warning.into_bits() & self.admin.event_config.critical_warnings();
        if wanted == 0 {
            return;
        }
        use nvme_spec::admin::AsyncHealth;
        let information = if warning.spare() && wanted & 1 != 0 {
            AsyncHealth::SPARE
        } else if warning.temperature() && wanted & 2 != 0 {
            AsyncHealth::TEMPERATURE
        } else {
            AsyncHealth::RELIABILITY
        };
        self.raise(AsyncEvent::of(AsyncEventType::HEALTH, information.0, LogId::SMART));
    }

    /// Adds a namespace to the changed list and raises its event.
    pub(crate) fn note_changed(&mut self, nsid: u32) {
        if let Err(at) = self.admin.changed.binary_search(&nsid) {
            self.admin.changed.insert(at, nsid);
        }
        self.raise(AsyncEvent::notice(AsyncNotice::NAMESPACE_CHANGED, LogId::CHANGED_NAMESPACES));
    }
}
