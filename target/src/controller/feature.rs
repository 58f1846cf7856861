//! Get and Set Features (Base 2.0 sections 5.15 and 5.27). No feature is saveable: a Controller Reset sets
//! each to its default, except Keep Alive Timer and Host Identifier, which keep their values.

use nvme_spec::feature::{
    Arbitration, AsyncEventConfig, ErrorRecovery, FeatureCapabilities, FeatureId, FeatureSelect, GetFeatures,
    HostBehavior, HostIdentifier, NumberOfQueues, PowerManagement, SetFeatures, TemperatureThreshold,
    Timestamp, TimestampAttributes, VolatileWriteCache, WriteAtomicity,
};
use nvme_spec::sqe::NSID_ALL;
use nvme_spec::status::Status;
use nvme_spec::zerocopy::{FromBytes, IntoBytes};
use spindle_reactor::clock::Nanos;

use super::limits::TEMPERATURE_WARNING_KELVIN;
use super::{Context, Controller, Kind, Need, Window, event, identify, identify_controller, keep_alive};
use crate::refusal::{Refusal, field};
use crate::shared::ControllerShared;
use crate::snapshot::NSID_MAX;

use std::sync::atomic::Ordering;

/// Bit of [`ControllerShared::feature_bits`]: write cache enabled. While clear, every write has FUA.
pub(crate) const FEATURE_WRITE_CACHE: u32 = 1 << 0;

/// Arbitration burst of 64 commands, as log2. A host's value is stored but has no effect on the round robin.
const ARBITRATION_DEFAULT: u32 = 6;

/// TMPSEL: composite temperature; all sensors (Set only).
const SENSOR_COMPOSITE: u8 = 0;
const SENSOR_ALL: u8 = 0xf;
/// THSEL of Temperature Threshold.
const THRESHOLD_OVER: u8 = 0;
const THRESHOLD_UNDER: u8 = 1;

/// Timestamp origin: counts from a Controller Reset, or was set by the host.
const ORIGIN_RESET: u8 = 0;
const ORIGIN_SET: u8 = 1;
/// Width of the Timestamp feature, which wraps.
const TIMESTAMP_BITS: u32 = 48;

/// Features of an I/O controller, also in log page 12h.
const IO_FEATURES: &[FeatureId] = &[
    FeatureId::ARBITRATION,
    FeatureId::POWER_MANAGEMENT,
    FeatureId::TEMPERATURE_THRESHOLD,
    FeatureId::ERROR_RECOVERY,
    FeatureId::VOLATILE_WRITE_CACHE,
    FeatureId::NUMBER_OF_QUEUES,
    FeatureId::WRITE_ATOMICITY,
    FeatureId::ASYNC_EVENT_CONFIG,
    FeatureId::TIMESTAMP,
    FeatureId::KEEP_ALIVE_TIMER,
    FeatureId::HOST_BEHAVIOR,
    FeatureId::IO_COMMAND_SET_PROFILE,
    FeatureId::HOST_IDENTIFIER,
];

const DISCOVERY_FEATURES: &[FeatureId] = &[FeatureId::ASYNC_EVENT_CONFIG, FeatureId::KEEP_ALIVE_TIMER];

pub(super) fn is_namespace_specific(id: FeatureId) -> bool {
    id == FeatureId::ERROR_RECOVERY
}

/// Capabilities that Get Features reports. Host Identifier is not changeable: Connect sets it.
fn capabilities(id: FeatureId) -> FeatureCapabilities {
    FeatureCapabilities::new()
        .with_namespace_specific(is_namespace_specific(id))
        .with_changeable(id != FeatureId::HOST_IDENTIFIER)
}

/// Supported features of this kind of controller.
pub(super) fn supported(kind: Kind) -> &'static [FeatureId] {
    match kind {
        Kind::Io => IO_FEATURES,
        Kind::Discovery => DISCOVERY_FEATURES,
    }
}

/// Default of Asynchronous Event Configuration (0Bh): the notices that this kind of controller supports.
pub(super) fn async_events_default(kind: Kind) -> u32 {
    match kind {
        Kind::Io => event::Kind::NamespaceChanged.enable_bits(),
        Kind::Discovery => event::Kind::DiscoveryChanged.enable_bits(),
    }
}

/// Allowed bits of Asynchronous Event Configuration: notices, and for an I/O controller critical warnings.
fn async_events_allowed(kind: Kind) -> u32 {
    let warnings = AsyncEventConfig::new().with_critical_warnings(u8::MAX).into_bits();
    match kind {
        Kind::Io => warnings | async_events_default(kind),
        Kind::Discovery => async_events_default(kind),
    }
}

/// Enables or disables the volatile write cache for the I/O queues.
pub(super) fn set_write_cache(shared: &ControllerShared, is_enabled: bool) {
    if is_enabled {
        shared.feature_bits.fetch_or(FEATURE_WRITE_CACHE, Ordering::Relaxed);
    } else {
        shared.feature_bits.fetch_and(!FEATURE_WRITE_CACHE, Ordering::Relaxed);
    }
}

fn write_cache(shared: &ControllerShared) -> bool {
    shared.feature_bits.load(Ordering::Relaxed) & FEATURE_WRITE_CACHE != 0
}

/// Error Recovery (TLER) by namespace. `by_namespace`: NSIDs and their values; `all`: that of the others.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct ErrorRecoveries {
    all: u32,
    by_namespace: Vec<(u32, u32)>,
}

impl ErrorRecoveries {
    fn get(&self, nsid: u32) -> u32 {
        self.by_namespace.iter().find(|(other, _)| *other == nsid).map_or(self.all, |(_, value)| *value)
    }

    fn set(&mut self, nsid: u32, value: u32) {
        if nsid == NSID_ALL {
            *self = ErrorRecoveries { all: value, by_namespace: Vec::new() };
            return;
        }
        self.by_namespace.retain(|(other, _)| *other != nsid);
        if value != self.all && self.by_namespace.len() < NSID_MAX as usize {
            self.by_namespace.push((nsid, value));
        }
    }
}

/// State of the Timestamp feature: `milliseconds` at time `at`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct HostTimestamp {
    milliseconds: u64,
    at: Nanos,
    origin: u8,
}

/// Current values of the features, except event configuration, keep alive, write cache and host identifier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Features {
    arbitration: u32,
    power: PowerManagement,
    temperature_over: u16,
    temperature_under: u16,
    error_recovery: ErrorRecoveries,
    queues_max: u16,
    queues: NumberOfQueues,
    write_atomicity: u32,
    clock: HostTimestamp,
    acre: u8,
}

impl Features {
    /// Default values, with at most `queues_max` I/O queues.
    pub(super) fn new(queues_max: u16, now: Nanos) -> Features {
        Features {
            arbitration: ARBITRATION_DEFAULT,
            power: PowerManagement::new(),
            temperature_over: TEMPERATURE_WARNING_KELVIN,
            temperature_under: 0,
            error_recovery: ErrorRecoveries::default(),
            queues_max,
            queues: NumberOfQueues::both(u32::from(queues_max)),
            write_atomicity: 0,
            clock: HostTimestamp { milliseconds: 0, at: now, origin: ORIGIN_RESET },
            acre: 0,
        }
    }

    pub(super) fn reset(&mut self, now: Nanos) {
        *self = Features::new(self.queues_max, now);
    }

    /// True when the temperature (in kelvin; 0: not known) is at or beyond a threshold of the host.
    pub(super) fn is_temperature_beyond(&self, kelvin: u16) -> bool {
        kelvin != 0 && (kelvin >= self.temperature_over || kelvin <= self.temperature_under)
    }

    fn timestamp(&self, now: Nanos) -> Timestamp {
        let passed = (now - self.clock.at).as_ms();
        let milliseconds = self.clock.milliseconds.saturating_add(passed) % (1 << TIMESTAMP_BITS);
        Timestamp::new(milliseconds, TimestampAttributes::new().with_origin(self.clock.origin))
    }
}

impl Controller {
    /// Checks that the controller supports the feature.
    fn check_feature(&self, cx: &Context<'_>, id: FeatureId) -> Result<(), Refusal> {
        // Base 2.0 section 5.27.1.4: Volatile Write Cache is not supported without a volatile write cache.
        let is_there = supported(self.kind).contains(&id)
            && (id != FeatureId::VOLATILE_WRITE_CACHE
                || identify_controller::has_volatile_cache(self.subsystem(cx)?));
        if is_there { Ok(()) } else { Err(Refusal::invalid(field::CDW10)) }
    }

    pub(super) fn check_get(&self, cx: &Context<'_>, get: GetFeatures<'_>) -> Result<(), Refusal> {
        self.check_feature(cx, get.fid())?;
        let select = get.select();
        if select > FeatureSelect::SUPPORTED {
            return Err(Refusal::invalid(field::CDW10));
        }
        if select == FeatureSelect::SUPPORTED {
            return Ok(());
        }
        let nsid = get.sqe().nsid();
        if is_namespace_specific(get.fid()) && nsid != NSID_ALL {
            identify::find_active(self.subsystem(cx)?, nsid)?;
        }
        match get.fid() {
            FeatureId::TEMPERATURE_THRESHOLD => {
                let asked = TemperatureThreshold::from_bits(get.argument());
                let is_known =
                    asked.sensor() == SENSOR_COMPOSITE && asked.threshold_type() <= THRESHOLD_UNDER;
                if is_known { Ok(()) } else { Err(Refusal::invalid(field::CDW11)) }
            }
            // CTRATT reports 128-bit host identifiers, so EXHID must be set.
            FeatureId::HOST_IDENTIFIER if !HostIdentifier::from_bits(get.argument()).extended() => {
                Err(Refusal::at(Status::HOST_ID_INCONSISTENT_FORMAT, field::CDW11))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn need_get(get: GetFeatures<'_>) -> Need {
        let has_data = get.select() != FeatureSelect::SUPPORTED;
        if has_data { Need::to_host(data_bytes(get.fid())) } else { Need::NONE }
    }

    pub(super) fn get_feature(
        &self,
        cx: &Context<'_>,
        get: GetFeatures<'_>,
        data: &mut [u8],
    ) -> Result<u32, Refusal> {
        match get.select() {
            FeatureSelect::SUPPORTED => Ok(capabilities(get.fid()).into_bits()),
            FeatureSelect::CURRENT => {
                let cache = write_cache(&self.shared);
                let (events, kato) = (self.events.enabled, self.keep_alive.timeout_ms);
                Ok(self.feature_value(&self.features, (cache, events, kato), cx, get, data))
            }
            // No feature is saveable, so the saved value is the default.
            _ => {
                let default = Features::new(self.features.queues_max, cx.now);
                let elsewhere = (true, async_events_default(self.kind), self.keep_alive_ms_default);
                Ok(self.feature_value(&default, elsewhere, cx, get, data))
            }
        }
    }

    /// Returns dword 0 of a feature, from `from` or from the three values that are stored elsewhere. Writes
    /// the data structure of a feature, if it has one, into `data`.
    fn feature_value(
        &self,
        from: &Features,
        (cache, events, keep_alive_ms): (bool, u32, u32),
        cx: &Context<'_>,
        get: GetFeatures<'_>,
        data: &mut [u8],
    ) -> u32 {
        let mut window = Window::new(0, data);
        match get.fid() {
            FeatureId::ARBITRATION => from.arbitration,
            FeatureId::POWER_MANAGEMENT => from.power.into_bits(),
            FeatureId::TEMPERATURE_THRESHOLD => {
                let asked = TemperatureThreshold::from_bits(get.argument());
                let is_over = asked.threshold_type() == THRESHOLD_OVER;
                let kelvins = if is_over { from.temperature_over } else { from.temperature_under };
                TemperatureThreshold::new().with_kelvins(kelvins).into_bits()
            }
            FeatureId::ERROR_RECOVERY => from.error_recovery.get(get.sqe().nsid()),
            FeatureId::VOLATILE_WRITE_CACHE => VolatileWriteCache::new().with_enabled(cache).into_bits(),
            FeatureId::NUMBER_OF_QUEUES => from.queues.into_bits(),
            FeatureId::WRITE_ATOMICITY => from.write_atomicity,
            FeatureId::ASYNC_EVENT_CONFIG => events,
            FeatureId::TIMESTAMP => {
                window.put(0, from.timestamp(cx.now).as_bytes());
                0
            }
            FeatureId::KEEP_ALIVE_TIMER => keep_alive_ms,
            FeatureId::HOST_BEHAVIOR => {
                window.put(0, &[from.acre]);
                0
            }
            FeatureId::HOST_IDENTIFIER => {
                window.put(0, &self.shared.host_id);
                0
            }
            // I/O Command Set Profile: combination 0, the only one.
            _ => 0,
        }
    }

    pub(super) fn check_set(&self, cx: &Context<'_>, set: SetFeatures<'_>) -> Result<(), Refusal> {
        self.check_feature(cx, set.fid())?;
        if set.save() {
            return Err(Refusal::at(Status::FEATURE_NOT_SAVEABLE, field::CDW10));
        }
        if set.fid() == FeatureId::HOST_IDENTIFIER {
            // Base 2.0 section 5.27.1.25: over Fabrics, Connect sets the host identifier, and Set Features is
            // refused with Command Sequence Error.
            return Err(Refusal::at(Status::COMMAND_SEQUENCE_ERROR, field::CDW10));
        }
        let nsid = set.sqe().nsid();
        if is_namespace_specific(set.fid()) {
            if nsid != NSID_ALL {
                identify::find_active(self.subsystem(cx)?, nsid)?;
            }
        } else if nsid != 0 && nsid != NSID_ALL {
            return Err(Refusal::at(Status::FEATURE_NOT_NAMESPACE_SPECIFIC, field::NSID));
        }
        self.check_value(set)
    }

    /// Checks the value (dword 11) of Set Features.
    fn check_value(&self, set: SetFeatures<'_>) -> Result<(), Refusal> {
        let value = set.value();
        let is_allowed = match set.fid() {
            FeatureId::ARBITRATION => value & !arbitration_mask() == 0,
            // Power state 0 is the only one (NPSS 0).
            FeatureId::POWER_MANAGEMENT => {
                let hint = PowerManagement::from_bits(value).workload_hint();
                PowerManagement::new().with_workload_hint(hint).into_bits() == value
            }
            FeatureId::TEMPERATURE_THRESHOLD => {
                let asked = TemperatureThreshold::from_bits(value);
                let is_sensor_known = asked.sensor() == SENSOR_COMPOSITE || asked.sensor() == SENSOR_ALL;
                let known = TemperatureThreshold::new()
                    .with_kelvins(asked.kelvins())
                    .with_sensor(asked.sensor())
                    .with_threshold_type(asked.threshold_type());
                is_sensor_known && asked.threshold_type() <= THRESHOLD_UNDER && known == asked
            }
            // NSFEAT bit 2 is clear, so DULBE must be 0: deallocated blocks can be read.
            FeatureId::ERROR_RECOVERY => {
                let known =
                    ErrorRecovery::new().with_time_limit(ErrorRecovery::from_bits(value).time_limit());
                known.into_bits() == value
            }
            FeatureId::VOLATILE_WRITE_CACHE => value <= 1,
            FeatureId::WRITE_ATOMICITY => {
                value <= WriteAtomicity::new().with_disable_normal(true).into_bits()
            }
            // Base 2.0 section 5.27.1.5: allowed only before the first I/O queue.
            FeatureId::NUMBER_OF_QUEUES if self.shared.taken_qids() > 0 => {
                return Err(Refusal::of(Status::COMMAND_SEQUENCE_ERROR.dnr(), None));
            }
            FeatureId::NUMBER_OF_QUEUES => {
                // The same section: 65,536 queues (FFFFh) are refused. Other values are reduced to the limit.
                let asked = NumberOfQueues::from_bits(value);
                asked.submission_z() != u16::MAX && asked.completion_z() != u16::MAX
            }
            FeatureId::ASYNC_EVENT_CONFIG => value & !async_events_allowed(self.kind) == 0,
            FeatureId::KEEP_ALIVE_TIMER if value > self.keep_alive_ms_max => {
                return Err(Refusal::at(Status::KEEP_ALIVE_TIMEOUT_INVALID, field::CDW11));
            }
            FeatureId::IO_COMMAND_SET_PROFILE if value != 0 => {
                return Err(Refusal::at(Status::IO_COMMAND_SET_COMBINATION_REJECTED, field::CDW11));
            }
            _ => true,
        };
        if is_allowed { Ok(()) } else { Err(Refusal::invalid(field::CDW11)) }
    }

    pub(super) fn need_set(set: SetFeatures<'_>) -> Need {
        match data_bytes(set.fid()) {
            0 => Need::NONE,
            bytes => Need::from_host(bytes),
        }
    }

    pub(super) fn set_feature(
        &mut self,
        cx: &Context<'_>,
        set: SetFeatures<'_>,
        data: &[u8],
    ) -> Result<u32, Refusal> {
        let value = set.value();
        match set.fid() {
            FeatureId::ARBITRATION => self.features.arbitration = value,
            FeatureId::POWER_MANAGEMENT => self.features.power = PowerManagement::from_bits(value),
            FeatureId::TEMPERATURE_THRESHOLD => {
                self.set_temperature(cx, TemperatureThreshold::from_bits(value))
            }
            FeatureId::ERROR_RECOVERY => self.features.error_recovery.set(set.sqe().nsid(), value),
            FeatureId::VOLATILE_WRITE_CACHE => set_write_cache(&self.shared, value != 0),
            FeatureId::NUMBER_OF_QUEUES => {
                self.features.queues =
                    granted_queues(NumberOfQueues::from_bits(value), self.features.queues_max);
                return Ok(self.features.queues.into_bits());
            }
            FeatureId::WRITE_ATOMICITY => self.features.write_atomicity = value,
            FeatureId::ASYNC_EVENT_CONFIG => {
                self.events.set_enabled(value);
                self.recheck_health(cx);
            }
            FeatureId::TIMESTAMP => self.set_timestamp(cx, data)?,
            FeatureId::KEEP_ALIVE_TIMER => self.set_keep_alive(cx, value),
            FeatureId::HOST_BEHAVIOR => self.set_host_behavior(data)?,
            _ => {}
        }
        Ok(0)
    }

    fn set_temperature(&mut self, cx: &Context<'_>, asked: TemperatureThreshold) {
        if asked.threshold_type() == THRESHOLD_OVER {
            self.features.temperature_over = asked.kelvins();
        } else {
            self.features.temperature_under = asked.kelvins();
        }
        self.recheck_health(cx);
    }

    fn set_timestamp(&mut self, cx: &Context<'_>, data: &[u8]) -> Result<(), Refusal> {
        let time = Timestamp::read_from_bytes(data).map_err(|_| Refusal::of(Status::INTERNAL_ERROR, None))?;
        self.features.clock =
            HostTimestamp { milliseconds: time.milliseconds(), at: cx.now, origin: ORIGIN_SET };
        Ok(())
    }

    fn set_keep_alive(&mut self, cx: &Context<'_>, asked_ms: u32) {
        // A discovery host that disables keep alive gets the default, as at Connect.
        let is_default = asked_ms == 0 && self.kind == Kind::Discovery;
        let asked_ms = if is_default { cx.snapshot.limits.discovery_keep_alive_ms } else { asked_ms };
        self.keep_alive.set_timeout_ms(keep_alive::granted_ms(asked_ms), cx.now);
    }

    /// Host Behavior Support: accepts ACRE (Advanced Command Retry; no effect while CRDT is 0), refuses
    /// nonzero values of the other fields.
    fn set_host_behavior(&mut self, data: &[u8]) -> Result<(), Refusal> {
        let behavior =
            HostBehavior::ref_from_bytes(data).map_err(|_| Refusal::of(Status::INTERNAL_ERROR, None))?;
        let is_known = behavior.acre <= 1
            && behavior.etdas == 0
            && behavior.lbafee == 0
            && behavior.hdisns == 0
            && behavior.cdfe.get() == 0;
        if !is_known {
            return Err(Refusal::of(Status::INVALID_FIELD.dnr(), None));
        }
        self.features.acre = behavior.acre;
        Ok(())
    }
}

/// Bytes of a feature's data structure; 0: its value is a dword.
fn data_bytes(id: FeatureId) -> u32 {
    match id {
        FeatureId::TIMESTAMP => 8,
        FeatureId::HOST_BEHAVIOR => 512,
        FeatureId::HOST_IDENTIFIER => 16,
        _ => 0,
    }
}

/// The requested numbers of queues, at most `queues_max` each.
fn granted_queues(asked: NumberOfQueues, queues_max: u16) -> NumberOfQueues {
    let max_z = queues_max.saturating_sub(1);
    NumberOfQueues::new()
        .with_submission_z(asked.submission_z().min(max_z))
        .with_completion_z(asked.completion_z().min(max_z))
}

/// Bits of Arbitration that are not reserved.
fn arbitration_mask() -> u32 {
    Arbitration::new()
        .with_burst(0b111)
        .with_low_weight_z(u8::MAX)
        .with_medium_weight_z(u8::MAX)
        .with_high_weight_z(u8::MAX)
        .into_bits()
}
