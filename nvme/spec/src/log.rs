//! Get Log Page and the log pages (Base 2.0 section 5.16). The discovery log page is in `discovery`.

mod discovery;

use bitfield_struct::bitfield;
use zerocopy::little_endian::{U16, U32, U64, U128};

use crate::identify::Csi;
use crate::opcode::AdminOpcode;
use crate::sqe::Sqe;

pub use discovery::{
    AddressFamily, DISCOVERY_ENTRY_BYTES, DiscoveryLogEntry, DiscoveryLogHeader, Eflags, SubsystemType,
    TransportType, Treq, TsasRdma, TsasTcp,
};

open_enum! {
    /// LID: Log Page Identifier (Base 2.0 figure "Get Log Page - Log Page Identifiers").
    pub struct LogId: u8 {
        /// See [`SupportedLogPages`].
        SUPPORTED_LOG_PAGES = 0x00,
        /// Error Information: an array of [`ErrorLogEntry`].
        ERROR = 0x01,
        /// SMART / Health Information; see [`SmartLog`].
        SMART = 0x02,
        /// Firmware Slot Information; see [`FirmwareSlotLog`].
        FIRMWARE_SLOT = 0x03,
        /// Changed Attached Namespace List: up to 1,024 NSIDs.
        CHANGED_NAMESPACES = 0x04,
        /// Commands Supported and Effects; see [`CommandEffects`].
        COMMAND_EFFECTS = 0x05,
        /// Asymmetric Namespace Access.
        ANA = 0x0c,
        /// Feature Identifiers Supported and Effects.
        FEATURE_EFFECTS = 0x12,
        /// NVMe-MI Commands Supported and Effects.
        MI_COMMAND_EFFECTS = 0x13,
        /// Discovery; see [`DiscoveryLogHeader`].
        DISCOVERY = 0x70,
    }
}

/// Dword 10 of Get Log Page: LID, RAE, NUMDL.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct GetLogPageCdw10 {
    /// LID: Log Page Identifier; see [`LogId`].
    pub lid: u8,
    #[bits(7)]
    __: u8,
    /// RAE: Retain Asynchronous Event; reading the log page does not clear its event.
    pub rae: bool,
    /// NUMDL: Number of Dwords Lower, bits 15:0 of the zero-based count.
    pub numdl: u16,
}

/// Dword 11 of Get Log Page: NUMDU.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct GetLogPageCdw11 {
    /// NUMDU: Number of Dwords Upper, bits 31:16 of the zero-based count.
    pub numdu: u16,
    __: u16,
}

/// Dword 14 of Get Log Page: OT, CSI.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct GetLogPageCdw14 {
    #[bits(23)]
    __: u32,
    /// OT: Offset Type; LPO is an entry index if set, otherwise a byte offset.
    pub ot: bool,
    /// CSI: Command Set Identifier; see [`Csi`].
    pub csi: u8,
}

wire_bits!(GetLogPageCdw10 => U32, GetLogPageCdw11 => U32, GetLogPageCdw14 => U32);

view! {
    /// Get Log Page (Base 2.0 section 5.16).
    pub struct GetLogPage(sqe) {
        /// LID: Log Page Identifier.
        lid: LogId = LogId(GetLogPageCdw10::from(sqe.cdw10).lid()),
        /// RAE: Retain Asynchronous Event; reading the log page does not clear its event.
        rae: bool = GetLogPageCdw10::from(sqe.cdw10).rae(),
        /// Requested length in bytes, from NUMDL and NUMDU (dwords, zero-based).
        bytes: u64 = {
            let low = GetLogPageCdw10::from(sqe.cdw10).numdl();
            let high = GetLogPageCdw11::from(sqe.cdw11).numdu();
            ((u64::from(high) << 16 | u64::from(low)) + 1) * 4
        },
        /// LPO: Log Page Offset in bytes, or in entries if [`Self::ot`].
        lpo: u64 = u64::from(sqe.cdw12()) | u64::from(sqe.cdw13()) << 32,
        /// CSI: Command Set Identifier.
        csi: Csi = Csi(GetLogPageCdw14::from(sqe.cdw14).csi()),
        /// OT: Offset Type; LPO is an entry index if set, otherwise a byte offset.
        ot: bool = GetLogPageCdw14::from(sqe.cdw14).ot(),
    }
}

/// Builders for hosts.
impl Sqe {
    /// Builds Get Log Page of `bytes` from byte `offset` on. `bytes` is rounded up to dwords, at least one.
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

wire! {
    /// Log page 00h (Base 2.0 figure "Supported Log Pages Log Page").
    pub struct SupportedLogPages[1024] {
        /// One entry per LID; see [`SupportedLogPage`].
        lid @ 0: [U32; 256],
    }
}

impl SupportedLogPages {
    /// Sets the entry of `lid`.
    pub fn set(&mut self, lid: LogId, page: SupportedLogPage) {
        if let Some(entry) = self.lid.get_mut(usize::from(lid.0)) {
            *entry = page.into();
        }
    }
}

/// Entry of log page 00h.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct SupportedLogPage {
    /// LSUPP: LID Supported.
    pub supported: bool,
    #[bits(31)]
    __: u32,
}

wire! {
    /// Entry of log page 01h (Base 2.0 figure "Error Information Log Entry Data Structure").
    pub struct ErrorLogEntry[64] {
        /// Error Count: sequence number of the error over the life of the controller; 0 in an unused entry.
        error_count @ 0: U64,
        /// SQID: Submission Queue ID; FFFFh if the error is not specific to a command.
        sqid @ 8: U16,
        /// CID: Command ID; FFFFh if the error is not specific to a command.
        cid @ 10: U16,
        /// Bytes 14 and 15 of the completion: phase tag in bit 0, Status Field in bits 15:1.
        status @ 12: U16,
        /// Parameter Error Location; see [`ErrorLocation`]. [`ErrorLocation::NONE`] if the error is not
        /// specific to a parameter.
        location @ 14: U16,
        /// LBA: first logical block with the error.
        lba @ 16: U64,
        /// NSID: Namespace Identifier of the command.
        nsid @ 24: U32,
        reserved28 @ 28: u8,
        /// TRTYPE: Transport Type of a transport error.
        trtype @ 29: TransportType,
        reserved30 @ 30: [u8; 34],
    }
}

/// Parameter Error Location of an [`ErrorLogEntry`].
#[bitfield(u16)]
#[derive(PartialEq, Eq)]
pub struct ErrorLocation {
    /// Byte of the submission queue entry, 0 to 63.
    pub byte: u8,
    __: u8,
}

impl ErrorLocation {
    /// The error is not specific to a parameter.
    pub const NONE: u16 = 0xffff;
}

wire! {
    /// Log page 02h (Base 2.0 figure "SMART / Health Information Log Page").
    pub struct SmartLog[512] {
        /// See [`CriticalWarning`].
        critical_warning @ 0: u8,
        /// Composite temperature, in kelvins.
        temperature @ 1: U16,
        /// Available spare, in percent.
        available_spare @ 3: u8,
        /// Available spare threshold, in percent.
        available_spare_threshold @ 4: u8,
        /// Percentage Used of the estimated endurance; 255 is 255 or more.
        percentage_used @ 5: u8,
        reserved6 @ 6: [u8; 26],
        /// Data Units Read, in units of 512,000 bytes (1,000 blocks of 512 bytes), rounded up.
        data_units_read @ 32: U128,
        /// Data Units Written, in units of 512,000 bytes (1,000 blocks of 512 bytes), rounded up.
        data_units_written @ 48: U128,
        /// Host Read Commands: completed commands that read user data.
        host_reads @ 64: U128,
        /// Host Write Commands: completed commands that write user data.
        host_writes @ 80: U128,
        controller_busy_minutes @ 96: U128,
        power_cycles @ 112: U128,
        power_on_hours @ 128: U128,
        /// Unsafe Shutdowns: power losses without a preceding shutdown notification.
        unsafe_shutdowns @ 144: U128,
        /// Media and Data Integrity Errors: unrecovered errors that the controller detected.
        media_errors @ 160: U128,
        /// Number of Error Information Log Entries over the life of the controller.
        error_log_entries @ 176: U128,
        reserved192 @ 192: [u8; 320],
    }
}

/// Critical Warning, byte 0 of [`SmartLog`].
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
pub struct CriticalWarning {
    /// Available spare is below its threshold.
    pub spare: bool,
    /// A temperature is at or above its over threshold, or at or below its under threshold.
    pub temperature: bool,
    /// NVM subsystem reliability is degraded.
    pub reliability: bool,
    /// All media is read only.
    pub read_only: bool,
    /// The volatile memory backup failed.
    pub backup_failed: bool,
    /// The persistent memory region is read only or unreliable.
    pub persistent_memory: bool,
    #[bits(2)]
    __: u8,
}

wire! {
    /// Log page 03h (Base 2.0 figure "Firmware Slot Information Log Page").
    pub struct FirmwareSlotLog[512] {
        /// AFI: Active Firmware Info; active slot in bits 2:0, slot after the next reset in bits 6:4.
        afi @ 0: u8,
        reserved1 @ 1: [u8; 7],
        /// FRS: Firmware Revision for Slots 1 to 7, ASCII; zeroes for an empty slot.
        frs @ 8: [[u8; 8]; 7],
        reserved64 @ 64: [u8; 448],
    }
}

/// Size of log page 04h in bytes: 1,024 NSIDs, unused entries are zero.
pub const CHANGED_NAMESPACE_LIST_BYTES: usize = 4096;

wire! {
    /// Log page 05h (Base 2.0 figure "Commands Supported and Effects Log Page").
    pub struct CommandEffects[4096] {
        /// ACS: Admin Command Supported, one entry per opcode; see [`CommandEffect`].
        admin @ 0: [U32; 256],
        /// IOCS: I/O Command Supported, one entry per opcode of the requested CSI; see [`CommandEffect`].
        io @ 1024: [U32; 256],
        reserved2048 @ 2048: [u8; 2048],
    }
}

impl CommandEffects {
    /// Sets the entry of `opcode` in ACS.
    pub fn set_admin(&mut self, opcode: AdminOpcode, effect: CommandEffect) {
        if let Some(entry) = self.admin.get_mut(usize::from(opcode.0)) {
            *entry = effect.into();
        }
    }

    /// Sets the entry of `opcode` in IOCS.
    pub fn set_io(&mut self, opcode: crate::opcode::IoOpcode, effect: CommandEffect) {
        if let Some(entry) = self.io.get_mut(usize::from(opcode.0)) {
            *entry = effect.into();
        }
    }
}

/// Entry of log page 05h.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct CommandEffect {
    /// CSUPP: Command Supported.
    pub supported: bool,
    /// LBCC: Logical Block Content Change; the command may change user data.
    pub logical_block_content: bool,
    #[bits(18)]
    __: u32,
    /// CSP: Command Scope, one bit per scope.
    #[bits(12)]
    pub scope: u16,
}

wire_bits!(SupportedLogPage => U32, CommandEffect => U32, ErrorLocation => U16);

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::IntoBytes;

    #[test]
    fn get_log_page_splits_numd_over_two_dwords() {
        let sqe = Sqe::get_log_page(2, LogId::DISCOVERY, 0, 0x0100_0000, 0x1_0000_0400, true);
        assert_eq!(sqe.as_bytes()[..4], [2, 0x40, 2, 0]);
        assert_eq!(sqe.as_bytes()[40..56], [0x70, 0x80, 0xff, 0xff, 0x3f, 0, 0, 0, 0, 4, 0, 0, 1, 0, 0, 0]);
        let view = GetLogPage::new(&sqe);
        assert_eq!((view.lid(), view.rae()), (LogId::DISCOVERY, true));
        assert_eq!((view.bytes(), view.lpo(), view.ot()), (0x0100_0000, 0x1_0000_0400, false));
        let mut sqe = sqe;
        sqe.cdw10 = U32::new(u32::MAX);
        sqe.cdw11 = U32::new(u32::MAX);
        sqe.cdw14 = U32::new(0x0280_0003);
        let view = GetLogPage::new(&sqe);
        assert_eq!(view.bytes(), 1 << 34);
        assert_eq!((view.csi(), view.ot()), (Csi::ZONED, true));
    }

    #[test]
    fn effects_are_the_bits_that_linux_tests() {
        let effect = CommandEffect::new().with_supported(true).with_logical_block_content(true);
        assert_eq!(effect.into_bits(), 0b11);
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
}
