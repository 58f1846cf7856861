//! Get Log Page and the log pages (Base 2.0 section 5.16). The discovery log has a file of its own.

mod discovery;

use bitfield_struct::bitfield;
use zerocopy::little_endian::{U16, U32, U64, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::identify::Csi;
use crate::opcode::AdminOpcode;
use crate::sqe::Sqe;

pub use discovery::{
    AddressFamily, DISCOVERY_ENTRY_BYTES, DiscoveryLogEntry, DiscoveryLogHeader, EFLAGS_DUPRETINFO,
    EFLAGS_EPCSD, Eflags, SubsystemType, TREQ_SECURE_CHANNEL_NOT_REQUIRED, TREQ_SECURE_CHANNEL_REQUIRED,
    TREQ_SQ_FLOW_CONTROL_DISABLE, TransportType, Treq, TsasRdma, TsasTcp,
};

open_enum! {
    /// LID: Log Page Identifier (Base 2.0 figure "Get Log Page - Log Page Identifiers").
    pub struct LogId: u8 {
        /// Supported Log Pages; see [`SupportedLogPages`].
        SUPPORTED_LOG_PAGES = 0x00,
        /// Error Information; entries are [`ErrorLogEntry`].
        ERROR = 0x01,
        /// SMART / Health Information; see [`SmartLog`].
        SMART = 0x02,
        /// Firmware Slot Information; see [`FirmwareSlotLog`].
        FIRMWARE_SLOT = 0x03,
        /// Changed Attached Namespace List: up to 1,024 NSIDs.
        CHANGED_NAMESPACES = 0x04,
        /// Commands Supported and Effects; see [`CommandEffects`].
        COMMAND_EFFECTS = 0x05,
        /// Device Self-test.
        DEVICE_SELF_TEST = 0x06,
        /// Telemetry Host-Initiated.
        TELEMETRY_HOST = 0x07,
        /// Telemetry Controller-Initiated.
        TELEMETRY_CONTROLLER = 0x08,
        /// Endurance Group Information.
        ENDURANCE_GROUP = 0x09,
        /// Predictable Latency Per NVM Set.
        PREDICTABLE_LATENCY = 0x0a,
        /// Predictable Latency Event Aggregate.
        PREDICTABLE_LATENCY_AGGREGATE = 0x0b,
        /// Asymmetric Namespace Access; see [`AnaHeader`].
        ANA = 0x0c,
        /// Persistent Event.
        PERSISTENT_EVENT = 0x0d,
        /// LBA Status Information.
        LBA_STATUS = 0x0e,
        /// Endurance Group Event Aggregate.
        ENDURANCE_GROUP_AGGREGATE = 0x0f,
        /// Media Unit Status.
        MEDIA_UNIT_STATUS = 0x10,
        /// Supported Capacity Configuration List.
        CAPACITY_CONFIGURATIONS = 0x11,
        /// Feature Identifiers Supported and Effects.
        FEATURE_EFFECTS = 0x12,
        /// NVMe-MI Commands Supported and Effects.
        MI_COMMAND_EFFECTS = 0x13,
        /// Command and Feature Lockdown.
        LOCKDOWN = 0x14,
        /// Boot Partition.
        BOOT_PARTITION = 0x15,
        /// Rotational Media Information.
        ROTATIONAL_MEDIA = 0x16,
        /// Dispersed Namespace Participating NVM Subsystems (Base 2.1).
        DISPERSED_NAMESPACE = 0x17,
        /// Management Address List (Base 2.1).
        MANAGEMENT_ADDRESSES = 0x18,
        /// Reachability Groups (Base 2.1).
        REACHABILITY_GROUPS = 0x1a,
        /// Reachability Associations (Base 2.1).
        REACHABILITY_ASSOCIATIONS = 0x1b,
        /// Changed Allocated Namespace List (Base 2.1).
        CHANGED_ALLOCATED_NAMESPACES = 0x1c,
        /// FDP Configurations (Base 2.1).
        FDP_CONFIGURATIONS = 0x20,
        /// FDP Reclaim Unit Handle Usage (Base 2.1).
        FDP_HANDLE_USAGE = 0x21,
        /// FDP Statistics (Base 2.1).
        FDP_STATISTICS = 0x22,
        /// FDP Events (Base 2.1).
        FDP_EVENTS = 0x23,
        /// Discovery; see [`DiscoveryLogHeader`].
        DISCOVERY = 0x70,
        /// Host Discovery (Base 2.1).
        HOST_DISCOVERY = 0x71,
        /// AVE Discovery (Base 2.1).
        AVE_DISCOVERY = 0x72,
        /// Pull Model DDC Request (Base 2.1).
        PULL_MODEL_DDC_REQUEST = 0x73,
        /// Reservation Notification.
        RESERVATION_NOTIFICATION = 0x80,
        /// Sanitize Status.
        SANITIZE_STATUS = 0x81,
        /// Changed Zone List (Zoned Namespaces Command Set).
        CHANGED_ZONES = 0xbf,
    }
}

/// Dword 10 of Get Log Page.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct GetLogPageCdw10 {
    /// LID; see [`LogId`].
    pub lid: u8,
    /// LSP: specific to the log.
    #[bits(7)]
    pub lsp: u8,
    /// RAE: keep the event that this log page is about.
    pub rae: bool,
    /// NUMDL: low half of the dwords, one less than the count.
    pub numdl: u16,
}

/// Dword 11 of Get Log Page.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct GetLogPageCdw11 {
    /// NUMDU: high half of the dwords, one less than the count.
    pub numdu: u16,
    /// LSI: specific to the log.
    pub lsi: u16,
}

/// Dword 14 of Get Log Page.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct GetLogPageCdw14 {
    /// UIDX: index in the UUID list; 0 for none.
    #[bits(7)]
    pub uuid_index: u8,
    #[bits(16)]
    __: u16,
    /// OT: LPO is an index of entries, else an offset of bytes.
    pub ot: bool,
    /// CSI; see [`Csi`].
    pub csi: u8,
}

wire_bits!(GetLogPageCdw10 => U32, GetLogPageCdw11 => U32, GetLogPageCdw14 => U32);

view! {
    /// Get Log Page (Base 2.0 section 5.16).
    pub struct GetLogPage;
}

impl GetLogPage<'_> {
    /// LID.
    #[must_use]
    pub fn lid(self) -> LogId {
        LogId(self.cdw10().lid())
    }

    /// LSP.
    #[must_use]
    pub fn lsp(self) -> u8 {
        self.cdw10().lsp()
    }

    /// RAE.
    #[must_use]
    pub fn rae(self) -> bool {
        self.cdw10().rae()
    }

    /// NUMD, both halves, as it stands: one less than the count of dwords.
    #[must_use]
    pub fn numd_z(self) -> u32 {
        u32::from(GetLogPageCdw11::from(self.0.cdw11).numdu()) << 16 | u32::from(self.cdw10().numdl())
    }

    /// NUMD with its zero base taken away: 1 to 2^32 dwords.
    #[must_use]
    pub fn numd(self) -> u64 {
        u64::from(self.numd_z()) + 1
    }

    /// How many bytes are asked for.
    #[must_use]
    pub fn bytes(self) -> u64 {
        self.numd() * 4
    }

    /// LPO: where in the log to begin, in bytes or, with [`Self::ot`], in entries.
    #[must_use]
    pub fn lpo(self) -> u64 {
        u64::from(self.0.cdw12()) | u64::from(self.0.cdw13()) << 32
    }

    /// LSI.
    #[must_use]
    pub fn lsi(self) -> u16 {
        GetLogPageCdw11::from(self.0.cdw11).lsi()
    }

    /// CSI.
    #[must_use]
    pub fn csi(self) -> Csi {
        Csi(GetLogPageCdw14::from(self.0.cdw14).csi())
    }

    /// OT: LPO is an index.
    #[must_use]
    pub fn ot(self) -> bool {
        GetLogPageCdw14::from(self.0.cdw14).ot()
    }

    /// UIDX.
    #[must_use]
    pub fn uuid_index(self) -> u8 {
        GetLogPageCdw14::from(self.0.cdw14).uuid_index()
    }

    fn cdw10(self) -> GetLogPageCdw10 {
        self.0.cdw10.into()
    }
}

/// Builders for hosts.
impl Sqe {
    /// Get Log Page of `bytes` from byte `offset`. `bytes` is at least 4 and is rounded up to dwords.
    #[must_use]
    pub fn get_log_page(cid: u16, lid: LogId, nsid: u32, bytes: u32, offset: u64, rae: bool) -> Self {
        let [a, b, c, d] = bytes.div_ceil(4).saturating_sub(1).to_le_bytes();
        let mut sqe = Self::new(AdminOpcode::GET_LOG_PAGE.0, cid, nsid);
        sqe.cdw10 = GetLogPageCdw10::new()
            .with_lid(lid.0)
            .with_rae(rae)
            .with_numdl(u16::from_le_bytes([a, b]))
            .into();
        sqe.cdw11 = GetLogPageCdw11::new().with_numdu(u16::from_le_bytes([c, d])).into();
        sqe.set_cdw12_64(offset);
        sqe
    }
}

/// Log page 00h (Base 2.0 figure "Supported Log Pages Log Page"): an entry for each LID.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct SupportedLogPages {
    /// See [`SupportedLogPage`].
    pub lid: [U32; 256],
}

layout!(SupportedLogPages, 1024, { lid @ 0 });

impl SupportedLogPages {
    /// Marks a log page as supported.
    pub fn set(&mut self, lid: LogId, page: SupportedLogPage) {
        if let Some(entry) = self.lid.get_mut(usize::from(lid.0)) {
            *entry = page.into();
        }
    }
}

/// An entry of log page 00h.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct SupportedLogPage {
    /// LSUPP: the log page is supported.
    pub supported: bool,
    /// IOS: LPO may be an index.
    pub index_offset: bool,
    #[bits(14)]
    __: u16,
    /// LIDSSP: specific to the log.
    pub specific: u16,
}

/// An entry of log page 01h (Base 2.0 figure "Error Information Log Entry Data Structure").
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct ErrorLogEntry {
    /// Error count: grows with each error; 0 where there is no entry.
    pub error_count: U64,
    /// SQID; FFFFh where the error is not of a command.
    pub sqid: U16,
    /// CID; FFFFh where the error is not of a command.
    pub cid: U16,
    /// The status as in the completion, phase tag and all.
    pub status: U16,
    /// Where in the command the error is; see [`ErrorLocation`]. FFFFh where not of a parameter.
    pub location: U16,
    /// LBA of the first block with the error.
    pub lba: U64,
    /// NSID.
    pub nsid: U32,
    /// Log page with more about it; 0 for none.
    pub vs: u8,
    /// TRTYPE, of a transport error.
    pub trtype: TransportType,
    /// CSI of the command, where LPVER is 1.
    pub csi: u8,
    /// Opcode of the command, where LPVER is 1.
    pub opcode: u8,
    /// Command specific information.
    pub cs: U64,
    /// Transport specific information.
    pub ttsi: U16,
    /// Reserved.
    pub reserved42: [u8; 21],
    /// LPVER: 1 in Base 2.0.
    pub lpver: u8,
}

layout!(ErrorLogEntry, 64, {
    error_count @ 0, sqid @ 8, cid @ 10, status @ 12, location @ 14, lba @ 16, nsid @ 24, vs @ 28,
    trtype @ 29, csi @ 30, opcode @ 31, cs @ 32, ttsi @ 40, reserved42 @ 42, lpver @ 63,
});

/// Parameter Error Location: byte and bit of the command that are wrong.
#[bitfield(u16)]
#[derive(PartialEq, Eq)]
pub struct ErrorLocation {
    /// Byte of the entry, 0 to 63.
    pub byte: u8,
    /// Bit of the byte, 0 to 7.
    #[bits(3)]
    pub bit: u8,
    #[bits(5)]
    __: u8,
}

impl ErrorLocation {
    /// The error is not of a parameter.
    pub const NONE: u16 = 0xffff;
}

/// Log page 02h (Base 2.0 figure "SMART / Health Information Log Page").
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct SmartLog {
    /// Critical warning; see [`CriticalWarning`].
    pub critical_warning: u8,
    /// Composite temperature, in kelvins.
    pub temperature: U16,
    /// Available spare, in percent.
    pub available_spare: u8,
    /// Available spare threshold, in percent.
    pub available_spare_threshold: u8,
    /// Percentage used; 255 for 255 and more.
    pub percentage_used: u8,
    /// Endurance group critical warning summary.
    pub endurance_group_warning: u8,
    /// Reserved.
    pub reserved7: [u8; 25],
    /// Data units read: thousands of 512 bytes, rounded up.
    pub data_units_read: U128,
    /// Data units written: thousands of 512 bytes, rounded up.
    pub data_units_written: U128,
    /// Read and Compare commands of hosts.
    pub host_reads: U128,
    /// Write commands of hosts.
    pub host_writes: U128,
    /// Controller busy time, in minutes.
    pub controller_busy_minutes: U128,
    /// Power cycles.
    pub power_cycles: U128,
    /// Power on hours.
    pub power_on_hours: U128,
    /// Unsafe shutdowns.
    pub unsafe_shutdowns: U128,
    /// Media and data integrity errors.
    pub media_errors: U128,
    /// Error log entries over the life of the controller.
    pub error_log_entries: U128,
    /// Time above WCTEMP, in minutes.
    pub warning_temperature_minutes: U32,
    /// Time above CCTEMP, in minutes.
    pub critical_temperature_minutes: U32,
    /// Temperature sensors 1 to 8, in kelvins; 0 where there is none.
    pub temperature_sensors: [U16; 8],
    /// Transitions for thermal management temperature 1.
    pub thermal_1_transitions: U32,
    /// Transitions for thermal management temperature 2.
    pub thermal_2_transitions: U32,
    /// Time for thermal management temperature 1, in seconds.
    pub thermal_1_seconds: U32,
    /// Time for thermal management temperature 2, in seconds.
    pub thermal_2_seconds: U32,
    /// Reserved.
    pub reserved232: [u8; 280],
}

layout!(SmartLog, 512, {
    critical_warning @ 0, temperature @ 1, available_spare @ 3, available_spare_threshold @ 4,
    percentage_used @ 5, endurance_group_warning @ 6, reserved7 @ 7, data_units_read @ 32,
    data_units_written @ 48, host_reads @ 64, host_writes @ 80, controller_busy_minutes @ 96,
    power_cycles @ 112, power_on_hours @ 128, unsafe_shutdowns @ 144, media_errors @ 160,
    error_log_entries @ 176, warning_temperature_minutes @ 192,
    critical_temperature_minutes @ 196, temperature_sensors @ 200, thermal_1_transitions @ 216,
    thermal_2_transitions @ 220, thermal_1_seconds @ 224, thermal_2_seconds @ 228,
    reserved232 @ 232,
});

/// Critical warnings of [`SmartLog`].
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
pub struct CriticalWarning {
    /// Available spare is below its threshold.
    pub spare: bool,
    /// A temperature is beyond a threshold.
    pub temperature: bool,
    /// Reliability is degraded.
    pub reliability: bool,
    /// All of the media is read only.
    pub read_only: bool,
    /// The volatile memory backup failed.
    pub backup_failed: bool,
    /// The persistent memory region is read only or unreliable.
    pub persistent_memory: bool,
    #[bits(2)]
    __: u8,
}

/// Log page 03h (Base 2.0 figure "Firmware Slot Information Log Page").
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct FirmwareSlotLog {
    /// AFI: active slot in bits 2:0, slot after the next reset in bits 6:4.
    pub afi: u8,
    /// Reserved.
    pub reserved1: [u8; 7],
    /// FRS: revision in slots 1 to 7, ASCII; zeroes where there is none.
    pub frs: [[u8; 8]; 7],
    /// Reserved.
    pub reserved64: [u8; 448],
}

layout!(FirmwareSlotLog, 512, { afi @ 0, reserved1 @ 1, frs @ 8, reserved64 @ 64 });

/// Bytes of log page 04h: 1,024 NSIDs, zero after the last.
pub const CHANGED_NAMESPACE_LIST_BYTES: usize = 4096;
/// Most NSIDs in log page 04h.
pub const CHANGED_NAMESPACE_LIST_ENTRIES: usize = 1024;
/// First entry of log page 04h where more NSIDs changed than fit; the others are 0.
pub const CHANGED_NAMESPACE_LIST_OVERFLOW: u32 = 0xffff_ffff;

/// Log page 05h (Base 2.0 figure "Commands Supported and Effects Log Page").
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct CommandEffects {
    /// ACS: for each admin opcode; see [`CommandEffect`].
    pub admin: [U32; 256],
    /// IOCS: for each I/O opcode of the CSI that was asked for; see [`CommandEffect`].
    pub io: [U32; 256],
    /// Reserved.
    pub reserved2048: [u8; 2048],
}

layout!(CommandEffects, 4096, { admin @ 0, io @ 1024, reserved2048 @ 2048 });

impl CommandEffects {
    /// Sets the effect of an admin opcode.
    pub fn set_admin(&mut self, opcode: AdminOpcode, effect: CommandEffect) {
        if let Some(entry) = self.admin.get_mut(usize::from(opcode.0)) {
            *entry = effect.into();
        }
    }

    /// Sets the effect of an I/O opcode.
    pub fn set_io(&mut self, opcode: crate::opcode::IoOpcode, effect: CommandEffect) {
        if let Some(entry) = self.io.get_mut(usize::from(opcode.0)) {
            *entry = effect.into();
        }
    }
}

/// An entry of log page 05h.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct CommandEffect {
    /// CSUPP: the command is supported.
    pub supported: bool,
    /// LBCC: it may change logical blocks.
    pub logical_block_content: bool,
    /// NCC: it may change the capabilities of a namespace.
    pub namespace_capability: bool,
    /// NIC: it may change which namespaces there are.
    pub namespace_inventory: bool,
    /// CCC: it may change the capabilities of the controller.
    pub controller_capability: bool,
    #[bits(9)]
    __: u16,
    /// CSER: relaxations of CSE.
    #[bits(2)]
    pub relaxation: u8,
    /// CSE: what must not run beside it; 0 for no restriction.
    #[bits(3)]
    pub restriction: u8,
    /// USS: a UUID may be selected.
    pub uuid_selection: bool,
    /// CSP: its scope.
    #[bits(12)]
    pub scope: u16,
}

wire_bits!(SupportedLogPage => U32, CommandEffect => U32, ErrorLocation => U16);

/// Header of log page 0Ch (Base 2.0 figure "Asymmetric Namespace Access Log Page"); groups follow.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct AnaHeader {
    /// Change count.
    pub change_count: U64,
    /// How many groups follow.
    pub groups: U16,
    /// Reserved.
    pub reserved10: [u8; 6],
}

layout!(AnaHeader, 16, { change_count @ 0, groups @ 8, reserved10 @ 10 });

/// A group of log page 0Ch; `namespaces` NSIDs of 4 bytes follow (Base 2.0 figure "ANA Group Descriptor
/// format").
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct AnaGroup {
    /// ANA group identifier.
    pub group_id: U32,
    /// How many NSIDs follow.
    pub namespaces: U32,
    /// Change count of the group.
    pub change_count: U64,
    /// State of the group, in bits 3:0.
    pub state: AnaState,
    /// Reserved.
    pub reserved17: [u8; 15],
}

layout!(AnaGroup, 32, {
    group_id @ 0, namespaces @ 4, change_count @ 8, state @ 16, reserved17 @ 17,
});

/// LSP bit 0 of log page 0Ch: return groups only (RGO), without NSIDs.
pub const ANA_RETURN_GROUPS_ONLY: u8 = 1 << 0;

open_enum! {
    /// State of an ANA group (Base 2.0 section 8.1.1).
    pub struct AnaState: u8 {
        /// Optimized.
        OPTIMIZED = 0x1,
        /// Non-optimized.
        NON_OPTIMIZED = 0x2,
        /// Inaccessible.
        INACCESSIBLE = 0x3,
        /// Persistent loss.
        PERSISTENT_LOSS = 0x4,
        /// Change.
        CHANGE = 0xf,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn get_log_page_splits_numd_over_two_dwords() {
        let sqe = Sqe::get_log_page(2, LogId::DISCOVERY, 0, 0x0100_0000, 0x1_0000_0400, true);
        assert_eq!(sqe.as_bytes()[..4], [2, 0x40, 2, 0]);
        assert_eq!(sqe.as_bytes()[40..56], [0x70, 0x80, 0xff, 0xff, 0x3f, 0, 0, 0, 0, 4, 0, 0, 1, 0, 0, 0]);
        let view = GetLogPage::new(&sqe);
        assert_eq!((view.lid(), view.rae(), view.lsp()), (LogId::DISCOVERY, true, 0));
        assert_eq!((view.bytes(), view.lpo(), view.ot()), (0x0100_0000, 0x1_0000_0400, false));
        let mut sqe = sqe;
        sqe.cdw10 = U32::new(u32::MAX);
        sqe.cdw11 = U32::new(u32::MAX);
        sqe.cdw14 = U32::new(0x0280_0003);
        let view = GetLogPage::new(&sqe);
        assert_eq!((view.bytes(), view.lsp(), view.lsi()), (1 << 34, 0x7f, 0xffff));
        assert_eq!((view.csi(), view.ot(), view.uuid_index()), (Csi::ZONED, true, 3));
    }

    #[test]
    fn effects_are_the_bits_that_linux_tests() {
        let effect = CommandEffect::new().with_supported(true).with_logical_block_content(true);
        assert_eq!(effect.into_bits(), 0b11);
        assert_eq!(CommandEffect::new().with_restriction(0b111).into_bits(), 0b111 << 16);
        assert_eq!(CommandEffect::new().with_relaxation(0b11).into_bits(), 0b11 << 14);
        assert_eq!(CommandEffect::new().with_uuid_selection(true).into_bits(), 1 << 19);
        let mut log = CommandEffects::default();
        log.set_io(crate::opcode::IoOpcode::WRITE, effect);
        assert_eq!(log.as_bytes()[1028], 3);
        let mut pages = SupportedLogPages::default();
        pages.set(LogId::DISCOVERY, SupportedLogPage::new().with_supported(true));
        assert_eq!(pages.as_bytes()[0x70 * 4], 1);
    }

    #[test]
    fn the_temperature_of_the_smart_log_is_not_aligned() {
        let log =
            SmartLog { temperature: U16::new(0x0135), power_cycles: U128::new(1), ..SmartLog::default() };
        assert_eq!(log.as_bytes()[..4], [0, 0x35, 1, 0]);
        assert_eq!(log.as_bytes()[112], 1);
    }

    #[test]
    fn an_error_location_is_byte_then_bit() {
        assert_eq!(ErrorLocation::new().with_byte(48).with_bit(2).into_bits(), 0x0230);
    }
}
