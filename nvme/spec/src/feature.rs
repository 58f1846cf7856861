//! Get Features and Set Features: commands, feature identifiers and feature values (Base 2.0 sections 5.15
//! and 5.27).

use bitfield_struct::bitfield;
use zerocopy::little_endian::{U16, U32};

use crate::opcode::AdminOpcode;
use crate::sqe::Sqe;

open_enum! {
    /// FID: Feature Identifier (Base 2.0 figure "Feature Identifiers").
    pub struct FeatureId: u8 {
        /// Value: [`Arbitration`].
        ARBITRATION = 0x01,
        /// Value: [`PowerManagement`].
        POWER_MANAGEMENT = 0x02,
        /// Value: [`TemperatureThreshold`].
        TEMPERATURE_THRESHOLD = 0x04,
        /// Value: [`ErrorRecovery`].
        ERROR_RECOVERY = 0x05,
        /// Value: [`VolatileWriteCache`].
        VOLATILE_WRITE_CACHE = 0x06,
        /// Value: [`NumberOfQueues`].
        NUMBER_OF_QUEUES = 0x07,
        /// Write Atomicity Normal; value: [`WriteAtomicity`].
        WRITE_ATOMICITY = 0x0a,
        /// Value: [`AsyncEventConfig`].
        ASYNC_EVENT_CONFIG = 0x0b,
        /// Value: [`Timestamp`] in the data buffer.
        TIMESTAMP = 0x0e,
        /// Value: KATO in milliseconds.
        KEEP_ALIVE_TIMER = 0x0f,
        /// Host Behavior Support; value: [`HostBehavior`] in the data buffer.
        HOST_BEHAVIOR = 0x16,
        IO_COMMAND_SET_PROFILE = 0x19,
        /// Dword 11: [`HostIdentifier`]; the identifier is in the data buffer.
        HOST_IDENTIFIER = 0x81,
    }
}

open_enum! {
    /// SEL: Select, attribute of the value that Get Features returns (Base 2.0 figure "Get Features - Command
    /// Dword 10").
    pub struct FeatureSelect: u8 {
        CURRENT = 0,
        DEFAULT = 1,
        /// Value that persists over power cycles and resets.
        SAVED = 2,
        /// Supported capabilities instead of a value; see [`FeatureCapabilities`].
        SUPPORTED = 3,
    }
}

/// Dword 10 of Get Features.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct GetFeaturesCdw10 {
    /// FID: Feature Identifier; see [`FeatureId`].
    pub fid: u8,
    /// SEL: Select; see [`FeatureSelect`].
    #[bits(3)]
    pub sel: u8,
    #[bits(21)]
    __: u32,
}

/// Dword 10 of Set Features.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct SetFeaturesCdw10 {
    /// FID: Feature Identifier; see [`FeatureId`].
    pub fid: u8,
    #[bits(23)]
    __: u32,
    /// SV: Save; the controller saves the value over power cycles and resets.
    pub sv: bool,
}

/// Dword 0 of the completion of Get Features with [`FeatureSelect::SUPPORTED`].
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct FeatureCapabilities {
    __: bool,
    /// Bit 1, NS Specific: the feature has a value per namespace.
    pub namespace_specific: bool,
    /// Bit 2, Changeable: Set Features can change the value.
    pub changeable: bool,
    #[bits(29)]
    __: u32,
}

view! {
    /// Get Features (Base 2.0 section 5.15).
    pub struct GetFeatures(sqe) {
        /// FID: Feature Identifier.
        fid: FeatureId = FeatureId(GetFeaturesCdw10::from(sqe.cdw10).fid()),
        /// SEL: Select, current, default or saved value, or supported capabilities.
        select: FeatureSelect = FeatureSelect(GetFeaturesCdw10::from(sqe.cdw10).sel()),
        /// Dword 11: feature-specific selector of a value, for example TMPSEL; 0 for most features.
        argument: u32 = sqe.cdw11(),
    }
}

view! {
    /// Set Features (Base 2.0 section 5.27).
    pub struct SetFeatures(sqe) {
        /// FID: Feature Identifier.
        fid: FeatureId = FeatureId(SetFeaturesCdw10::from(sqe.cdw10).fid()),
        /// SV: Save; the controller saves the value over power cycles and resets.
        save: bool = SetFeaturesCdw10::from(sqe.cdw10).sv(),
        /// Dword 11: value of a feature without data buffer.
        value: u32 = sqe.cdw11(),
    }
}

/// Builders for hosts.
impl Sqe {
    /// Builds a Get Features command. `argument` is dword 11, 0 for most features; `nsid` is 0 for features
    /// of the controller.
    #[must_use]
    pub fn get_features(cid: u16, fid: FeatureId, select: FeatureSelect, nsid: u32, argument: u32) -> Self {
        let mut sqe = Self::new(AdminOpcode::GET_FEATURES.0, cid, nsid);
        sqe.cdw10 = GetFeaturesCdw10::new().with_fid(fid.0).with_sel(select.0 & 0b111).into();
        sqe.cdw11 = U32::new(argument);
        sqe
    }

    /// Builds a Set Features command with SV 0; `value` is dword 11.
    #[must_use]
    pub fn set_features(cid: u16, fid: FeatureId, nsid: u32, value: u32) -> Self {
        let mut sqe = Self::new(AdminOpcode::SET_FEATURES.0, cid, nsid);
        sqe.cdw10 = SetFeaturesCdw10::new().with_fid(fid.0).into();
        sqe.cdw11 = U32::new(value);
        sqe
    }
}

/// Dword 11 of feature 01h, Arbitration.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Arbitration {
    /// AB: Arbitration Burst, 2^AB commands of one queue per round; 7 is no limit.
    #[bits(3)]
    pub burst: u8,
    #[bits(5)]
    __: u8,
    /// LPW: Low Priority Weight, zero-based.
    pub low_weight_z: u8,
    /// MPW: Medium Priority Weight, zero-based.
    pub medium_weight_z: u8,
    /// HPW: High Priority Weight, zero-based.
    pub high_weight_z: u8,
}

/// Dword 11 of feature 02h, Power Management. PS (Power State, bits 4:0) has no field here.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct PowerManagement {
    #[bits(5)]
    __: u8,
    /// WH: Workload Hint.
    #[bits(3)]
    pub workload_hint: u8,
    #[bits(24)]
    __: u32,
}

/// Dword 11 of feature 04h, Temperature Threshold.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct TemperatureThreshold {
    /// TMPTH: Temperature Threshold in kelvins.
    pub kelvins: u16,
    /// TMPSEL: Threshold Temperature Select; 0 is the composite temperature, 1 to 8 a sensor, Fh all (Set
    /// Features only).
    #[bits(4)]
    pub sensor: u8,
    /// THSEL: Threshold Type Select; 0 is over, 1 is under temperature.
    #[bits(2)]
    pub threshold_type: u8,
    #[bits(10)]
    __: u16,
}

/// Dword 11 of feature 05h, Error Recovery. DULBE (bit 16) has no field here.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct ErrorRecovery {
    /// TLER: Time Limited Error Recovery in units of 100 ms; 0 is no limit.
    pub time_limit: u16,
    __: u16,
}

/// Dword 11 of feature 06h, Volatile Write Cache.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct VolatileWriteCache {
    /// WCE: Volatile Write Cache Enable.
    pub enabled: bool,
    #[bits(31)]
    __: u32,
}

/// Feature 07h, Number of Queues: requested in dword 11 of Set Features, allocated in dword 0 of the
/// completion.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct NumberOfQueues {
    /// NSQR or NSQA: I/O submission queues requested or allocated, zero-based.
    pub submission_z: u16,
    /// NCQR or NCQA: I/O completion queues requested or allocated, zero-based.
    pub completion_z: u16,
}

impl NumberOfQueues {
    /// Creates a value of `queues` I/O submission queues and as many I/O completion queues. `queues` is
    /// clamped to 1 to 65,536.
    #[must_use]
    pub fn both(queues: u32) -> Self {
        let queues_z = u16::try_from(queues.saturating_sub(1)).unwrap_or(u16::MAX);
        Self::new().with_submission_z(queues_z).with_completion_z(queues_z)
    }

    /// Returns the count of pairs of one submission and one completion queue, 1 to 65,536.
    #[must_use]
    pub fn pairs(self) -> u32 {
        u32::from(self.submission_z().min(self.completion_z())) + 1
    }
}

/// Dword 11 of feature 0Ah, Write Atomicity Normal.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct WriteAtomicity {
    /// DN: Disable Normal; AWUN and NAWUN need not be met, only the power fail units.
    pub disable_normal: bool,
    #[bits(31)]
    __: u32,
}

/// Dword 11 of feature 0Bh, Asynchronous Event Configuration: events that the host enables. Bits 31:8 are
/// those of [`Oaes`](crate::identify::Oaes).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct AsyncEventConfig {
    /// Bits 7:0, SMART / Health Critical Warnings; see [`CriticalWarning`](crate::log::CriticalWarning).
    pub critical_warnings: u8,
    /// Bit 8, Attached Namespace Attribute Notices.
    pub namespace_attribute: bool,
    /// Bit 9, Firmware Activation Notices.
    pub firmware_activation: bool,
    /// Bit 10, Telemetry Log Notices.
    pub telemetry: bool,
    #[bits(20)]
    __: u32,
    /// Bit 31, Discovery Log Page Change Notification.
    pub discovery_log: bool,
}

/// Dword 11 of feature 81h, Host Identifier.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct HostIdentifier {
    /// EXHID: Enable Extended Host Identifier; the data has 16 bytes, otherwise 8.
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
    /// Data of feature 16h, Host Behavior Support (Base 2.0 figure "Host Behavior Support - Data Structure").
    pub struct HostBehavior[512] {
        /// ACRE: Advanced Command Retry Enable; 1 if the host uses CRD of a status.
        acre @ 0: u8,
        /// ETDAS: Extended Telemetry Data Area 4 Supported; 1 if the host supports it.
        etdas @ 1: u8,
        /// LBAFEE: LBA Format Extension Enable; 1 if the host supports extended LBA formats.
        lbafee @ 2: u8,
        /// HDISNS: Host Dispersed Namespace Support; 1 if the host supports it (Base 2.1).
        hdisns @ 3: u8,
        /// CDFE: Copy Descriptor Formats Enable, one bit per format, 2h and above (Base 2.1).
        cdfe @ 4: U16,
        reserved6 @ 6: [u8; 506],
    }
}

wire! {
    /// Data of feature 0Eh, Timestamp (Base 2.0 figure "Timestamp - Data Structure").
    pub struct Timestamp[8] {
        /// Milliseconds since 1970-01-01 UTC, 48 bits.
        milliseconds @ 0: [u8; 6],
        /// Bit 0, Synch: the count may have stopped; bits 3:1: [`TimestampAttributes::origin`].
        attributes @ 6: u8,
        reserved7 @ 7: u8,
    }
}

/// Attributes, byte 6 of a [`Timestamp`].
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
pub struct TimestampAttributes {
    __: bool,
    /// TO: Timestamp Origin; 0: initialized to 0 by a reset, 1: initialized by Set Features.
    #[bits(3)]
    pub origin: u8,
    #[bits(4)]
    __: u8,
}

impl Timestamp {
    /// Creates a timestamp of `milliseconds` since 1970-01-01 UTC, truncated to 48 bits.
    #[must_use]
    pub fn new(milliseconds: u64, attributes: TimestampAttributes) -> Self {
        let [a, b, c, d, e, f, ..] = milliseconds.to_le_bytes();
        Self { milliseconds: [a, b, c, d, e, f], attributes: attributes.into_bits(), reserved7: 0 }
    }

    /// Returns the milliseconds since 1970-01-01 UTC.
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
