//! Get Features and Set Features: identifiers, selectors and the values themselves (Base 2.0 sections 5.15
//! and 5.27).

use bitfield_struct::bitfield;
use zerocopy::little_endian::{U16, U32};

use crate::opcode::AdminOpcode;
use crate::sqe::Sqe;

open_enum! {
    /// FID: Feature Identifier (Base 2.0 figure "Feature Identifiers").
    pub struct FeatureId: u8 {
        /// Arbitration; see [`Arbitration`].
        ARBITRATION = 0x01,
        /// Power Management; see [`PowerManagement`].
        POWER_MANAGEMENT = 0x02,
        /// Temperature Threshold; see [`TemperatureThreshold`].
        TEMPERATURE_THRESHOLD = 0x04,
        /// Error Recovery; see [`ErrorRecovery`].
        ERROR_RECOVERY = 0x05,
        /// Volatile Write Cache; see [`VolatileWriteCache`].
        VOLATILE_WRITE_CACHE = 0x06,
        /// Number of Queues; see [`NumberOfQueues`].
        NUMBER_OF_QUEUES = 0x07,
        /// Write Atomicity Normal; see [`WriteAtomicity`].
        WRITE_ATOMICITY = 0x0a,
        /// Asynchronous Event Configuration; see [`AsyncEventConfig`].
        ASYNC_EVENT_CONFIG = 0x0b,
        /// Timestamp; see [`Timestamp`].
        TIMESTAMP = 0x0e,
        /// Keep Alive Timer: KATO in milliseconds.
        KEEP_ALIVE_TIMER = 0x0f,
        /// Host Behavior Support; see [`HostBehavior`].
        HOST_BEHAVIOR = 0x16,
        IO_COMMAND_SET_PROFILE = 0x19,
        /// Host Identifier; see [`HostIdentifier`].
        HOST_IDENTIFIER = 0x81,
    }
}

open_enum! {
    /// SEL: which value Get Features is to give (Base 2.0 figure "Get Features - Command Dword 10").
    pub struct FeatureSelect: u8 {
        /// The value in use.
        CURRENT = 0,
        /// The value of the manufacturer.
        DEFAULT = 1,
        /// The value that is saved.
        SAVED = 2,
        /// Not a value but what may be done with it; see [`FeatureCapabilities`].
        SUPPORTED = 3,
    }
}

/// Dword 10 of Get Features.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct GetFeaturesCdw10 {
    /// FID; see [`FeatureId`].
    pub fid: u8,
    /// SEL; see [`FeatureSelect`].
    #[bits(3)]
    pub sel: u8,
    #[bits(21)]
    __: u32,
}

/// Dword 10 of Set Features.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct SetFeaturesCdw10 {
    /// FID; see [`FeatureId`].
    pub fid: u8,
    #[bits(23)]
    __: u32,
    /// SV: save the value.
    pub sv: bool,
}

/// Dword 0 of the completion of Get Features with [`FeatureSelect::SUPPORTED`].
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct FeatureCapabilities {
    __: bool,
    /// The feature is of a namespace.
    pub namespace_specific: bool,
    /// The feature can be changed.
    pub changeable: bool,
    #[bits(29)]
    __: u32,
}

view! {
    /// Get Features (Base 2.0 section 5.15).
    pub struct GetFeatures(sqe) {
        /// FID.
        fid: FeatureId = FeatureId(GetFeaturesCdw10::from(sqe.cdw10).fid()),
        /// SEL.
        select: FeatureSelect = FeatureSelect(GetFeaturesCdw10::from(sqe.cdw10).sel()),
        /// Dword 11: what some features need to be told which value is meant.
        argument: u32 = sqe.cdw11(),
    }
}

view! {
    /// Set Features (Base 2.0 section 5.27).
    pub struct SetFeatures(sqe) {
        /// FID.
        fid: FeatureId = FeatureId(SetFeaturesCdw10::from(sqe.cdw10).fid()),
        /// SV: save the value.
        save: bool = SetFeaturesCdw10::from(sqe.cdw10).sv(),
        /// Dword 11: the value, where it is one dword.
        value: u32 = sqe.cdw11(),
    }
}

/// Builders for hosts.
impl Sqe {
    /// Get Features.
    #[must_use]
    pub fn get_features(cid: u16, fid: FeatureId, select: FeatureSelect, nsid: u32, argument: u32) -> Self {
        let mut sqe = Self::new(AdminOpcode::GET_FEATURES.0, cid, nsid);
        sqe.cdw10 = GetFeaturesCdw10::new().with_fid(fid.0).with_sel(select.0 & 0b111).into();
        sqe.cdw11 = U32::new(argument);
        sqe
    }

    /// Set Features, without save.
    #[must_use]
    pub fn set_features(cid: u16, fid: FeatureId, nsid: u32, value: u32) -> Self {
        let mut sqe = Self::new(AdminOpcode::SET_FEATURES.0, cid, nsid);
        sqe.cdw10 = SetFeaturesCdw10::new().with_fid(fid.0).into();
        sqe.cdw11 = U32::new(value);
        sqe
    }
}

/// 01h Arbitration.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Arbitration {
    /// AB: commands of one queue in a round, as a power of two; 7 for no limit.
    #[bits(3)]
    pub burst: u8,
    #[bits(5)]
    __: u8,
    /// LPW: weight of low priority, one less than the count.
    pub low_weight_z: u8,
    /// MPW: weight of medium priority, one less than the count.
    pub medium_weight_z: u8,
    /// HPW: weight of high priority, one less than the count.
    pub high_weight_z: u8,
}

/// 02h Power Management.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct PowerManagement {
    #[bits(5)]
    __: u8,
    /// WH: workload hint.
    #[bits(3)]
    pub workload_hint: u8,
    #[bits(24)]
    __: u32,
}

/// 04h Temperature Threshold.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct TemperatureThreshold {
    /// TMPTH: in kelvins.
    pub kelvins: u16,
    /// TMPSEL: 0 composite, 1 to 8 a sensor, Fh all (Set Features).
    #[bits(4)]
    pub sensor: u8,
    /// THSEL: 0 over, 1 under.
    #[bits(2)]
    pub threshold_type: u8,
    #[bits(10)]
    __: u16,
}

/// 05h Error Recovery.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct ErrorRecovery {
    /// TLER: limit of retries, in 100 ms; 0 for none.
    pub time_limit: u16,
    __: u16,
}

/// 06h Volatile Write Cache.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct VolatileWriteCache {
    /// WCE: the cache is on.
    pub enabled: bool,
    #[bits(31)]
    __: u32,
}

/// 07h Number of Queues: what is asked for, and what is given; in both, one less than the count.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct NumberOfQueues {
    /// NSQR or NSQA: I/O submission queues.
    pub submission_z: u16,
    /// NCQR or NCQA: I/O completion queues.
    pub completion_z: u16,
}

impl NumberOfQueues {
    /// As many of both; `queues` is at least 1 and at most 65,536, what is beyond is cut.
    #[must_use]
    pub fn both(queues: u32) -> Self {
        let queues_z = u16::try_from(queues.saturating_sub(1)).unwrap_or(u16::MAX);
        Self::new().with_submission_z(queues_z).with_completion_z(queues_z)
    }

    /// How many pairs of one submission and one completion queue that makes.
    #[must_use]
    pub fn pairs(self) -> u32 {
        u32::from(self.submission_z().min(self.completion_z())) + 1
    }
}

/// 0Ah Write Atomicity Normal.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct WriteAtomicity {
    /// DN: AWUN and NAWUN need not be kept.
    pub disable_normal: bool,
    #[bits(31)]
    __: u32,
}

/// 0Bh Asynchronous Event Configuration: which events the host wants. The bits above 7 are those of
/// [`Oaes`](crate::identify::Oaes).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct AsyncEventConfig {
    /// SMART critical warnings, the bits of [`CriticalWarning`](crate::log::CriticalWarning).
    pub critical_warnings: u8,
    /// Attached namespace attributes changed.
    pub namespace_attribute: bool,
    /// Firmware activation starts.
    pub firmware_activation: bool,
    /// Telemetry log changed.
    pub telemetry: bool,
    #[bits(20)]
    __: u32,
    /// Discovery log page changed.
    pub discovery_log: bool,
}

/// 81h Host Identifier: dword 11.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct HostIdentifier {
    /// EXHID: the data is 16 bytes, else 8.
    pub extended: bool,
    #[bits(31)]
    __: u32,
}

wire_bits!(
    GetFeaturesCdw10 => U32, SetFeaturesCdw10 => U32, FeatureCapabilities => U32, Arbitration => U32,
    PowerManagement => U32, TemperatureThreshold => U32, ErrorRecovery => U32, VolatileWriteCache => U32,
    NumberOfQueues => U32, WriteAtomicity => U32, AsyncEventConfig => U32, HostIdentifier => U32,
);

wire! {
    /// 16h Host Behavior Support: what the host can deal with (Base 2.0 figure "Host Behavior Support - Data
    /// Structure").
    pub struct HostBehavior[512] {
        /// ACRE: 1 if the host obeys CRD in a status.
        acre @ 0: u8,
        /// ETDAS: 1 if the host takes telemetry data area 4.
        etdas @ 1: u8,
        /// LBAFEE: 1 if the host takes extended LBA formats.
        lbafee @ 2: u8,
        /// HDISNS: 1 if the host takes dispersed namespaces (Base 2.1).
        hdisns @ 3: u8,
        /// CDFE: the Copy descriptor formats 2h and above that the host uses (Base 2.1).
        cdfe @ 4: U16,
        /// Reserved.
        reserved6 @ 6: [u8; 506],
    }
}

wire! {
    /// 0Eh Timestamp (Base 2.0 figure "Timestamp - Data Structure").
    pub struct Timestamp[8] {
        /// Milliseconds since 1970-01-01 UTC, 48 bits.
        milliseconds @ 0: [u8; 6],
        /// Bit 0: the count may have stopped; bits 3:1: where it comes from. See [`TimestampAttributes`].
        attributes @ 6: u8,
        /// Reserved.
        reserved7 @ 7: u8,
    }
}

/// Byte 6 of a [`Timestamp`].
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
pub struct TimestampAttributes {
    __: bool,
    /// TO: 0 cleared at reset, 1 set by the host.
    #[bits(3)]
    pub origin: u8,
    #[bits(4)]
    __: u8,
}

impl Timestamp {
    /// A timestamp; the upper 16 bits of `milliseconds` are cut.
    #[must_use]
    pub fn new(milliseconds: u64, attributes: TimestampAttributes) -> Self {
        let [a, b, c, d, e, f, ..] = milliseconds.to_le_bytes();
        Self { milliseconds: [a, b, c, d, e, f], attributes: attributes.into_bits(), reserved7: 0 }
    }

    /// The milliseconds as a number.
    #[must_use]
    pub fn milliseconds(&self) -> u64 {
        let [a, b, c, d, e, f] = self.milliseconds;
        u64::from_le_bytes([a, b, c, d, e, f, 0, 0])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::IntoBytes;

    #[test]
    fn set_features_asks_for_queues_as_linux_does() {
        let sqe = Sqe::set_features(1, FeatureId::NUMBER_OF_QUEUES, 0, NumberOfQueues::both(4).into_bits());
        assert_eq!(sqe.as_bytes()[..4], [9, 0x40, 1, 0]);
        assert_eq!(sqe.as_bytes()[40..48], [7, 0, 0, 0, 3, 0, 3, 0]);
        let view = SetFeatures::new(&sqe);
        assert_eq!((view.fid(), view.save()), (FeatureId::NUMBER_OF_QUEUES, false));
        assert_eq!(NumberOfQueues::from_bits(view.value()).pairs(), 4);
        assert_eq!((NumberOfQueues::both(0).pairs(), NumberOfQueues::both(u32::MAX).pairs()), (1, 65_536));
        assert_eq!(SetFeaturesCdw10::new().with_sv(true).into_bits(), 1 << 31);
    }

    #[test]
    fn get_features_has_its_selector_above_the_identifier() {
        let sqe = Sqe::get_features(1, FeatureId::TIMESTAMP, FeatureSelect::SUPPORTED, 2, 5);
        assert_eq!(sqe.as_bytes()[40..48], [0x0e, 3, 0, 0, 5, 0, 0, 0]);
        let view = GetFeatures::new(&sqe);
        assert_eq!((view.fid(), view.select()), (FeatureId::TIMESTAMP, FeatureSelect::SUPPORTED));
        assert_eq!((view.argument(), view.sqe().nsid()), (5, 2));
    }

    #[test]
    fn event_bits_agree_with_what_identify_offers() {
        use crate::identify::Oaes;
        let config = AsyncEventConfig::new().with_namespace_attribute(true);
        let config = config.with_discovery_log(true);
        let offer = Oaes::new().with_namespace_attribute(true);
        let offer = offer.with_discovery_log(true);
        assert_eq!(config.into_bits(), offer.into_bits());
        assert_eq!(config.into_bits(), 0x8000_0100);
    }

    #[test]
    fn small_values_have_their_bits_where_the_figures_have_them() {
        assert_eq!(TemperatureThreshold::new().with_threshold_type(1).with_sensor(2).into_bits(), 0x12_0000);
        assert_eq!(PowerManagement::new().with_workload_hint(1).into_bits(), 0x20);
        assert_eq!(FeatureCapabilities::new().with_changeable(true).into_bits(), 4);
        let time = Timestamp::new(0x0123_4567_89ab, TimestampAttributes::new().with_origin(1));
        assert_eq!(time.as_bytes(), [0xab, 0x89, 0x67, 0x45, 0x23, 1, 2, 0]);
        assert_eq!(time.milliseconds(), 0x0123_4567_89ab);
    }
}
