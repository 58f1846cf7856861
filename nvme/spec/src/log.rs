//! Get Log Page and the log pages (Base 2.0 section 5.16). The discovery log has a file of its own.

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

/// Dword 10 of Get Log Page.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct GetLogPageCdw10 {
    /// LID; see [`LogId`].
    pub lid: u8,
    #[bits(7)]
    __: u8,
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
    __: u16,
}

/// Dword 14 of Get Log Page.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct GetLogPageCdw14 {
    #[bits(23)]
    __: u32,
    /// OT: LPO is an index of entries, else an offset of bytes.
    pub ot: bool,
    /// CSI; see [`Csi`].
    pub csi: u8,
}

wire_bits!(GetLogPageCdw10 => U32, GetLogPageCdw11 => U32, GetLogPageCdw14 => U32);

view! {
    /// Get Log Page (Base 2.0 section 5.16).
    pub struct GetLogPage(sqe) {
        /// LID.
        lid: LogId = LogId(GetLogPageCdw10::from(sqe.cdw10).lid()),
        /// RAE.
        rae: bool = GetLogPageCdw10::from(sqe.cdw10).rae(),
        /// How many bytes are asked for: NUMD, both halves, counts dwords from zero.
        bytes: u64 = {
            let low = GetLogPageCdw10::from(sqe.cdw10).numdl();
            let high = GetLogPageCdw11::from(sqe.cdw11).numdu();
            ((u64::from(high) << 16 | u64::from(low)) + 1) * 4
        },
        /// LPO: where in the log to begin, in bytes or, with [`Self::ot`], in entries.
        lpo: u64 = u64::from(sqe.cdw12()) | u64::from(sqe.cdw13()) << 32,
        /// CSI.
        csi: Csi = Csi(GetLogPageCdw14::from(sqe.cdw14).csi()),
        /// OT: LPO is an index.
        ot: bool = GetLogPageCdw14::from(sqe.cdw14).ot(),
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

wire! {
    /// Log page 00h (Base 2.0 figure "Supported Log Pages Log Page"): an entry for each LID.
    pub struct SupportedLogPages[1024] {
        /// See [`SupportedLogPage`].
        lid @ 0: [U32; 256],
    }
}

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
    #[bits(31)]
    __: u32,
}

wire! {
    /// An entry of log page 01h (Base 2.0 figure "Error Information Log Entry Data Structure").
    pub struct ErrorLogEntry[64] {
        /// Error count: grows with each error; 0 where there is no entry.
        error_count @ 0: U64,
        /// SQID; FFFFh where the error is not of a command.
        sqid @ 8: U16,
        /// CID; FFFFh where the error is not of a command.
        cid @ 10: U16,
        /// The status as in the completion, phase tag and all.
        status @ 12: U16,
        /// Where in the command the error is; see [`ErrorLocation`]. FFFFh where not of a parameter.
        location @ 14: U16,
        /// LBA of the first block with the error.
        lba @ 16: U64,
        /// NSID.
        nsid @ 24: U32,
        /// Reserved, or not used here.
        reserved28 @ 28: u8,
        /// TRTYPE, of a transport error.
        trtype @ 29: TransportType,
        /// Reserved, or not used here.
        reserved30 @ 30: [u8; 34],
    }
}

/// Parameter Error Location: byte and bit of the command that are wrong.
#[bitfield(u16)]
#[derive(PartialEq, Eq)]
pub struct ErrorLocation {
    /// Byte of the entry, 0 to 63.
    pub byte: u8,
    __: u8,
}

impl ErrorLocation {
    /// The error is not of a parameter.
    pub const NONE: u16 = 0xffff;
}

wire! {
    /// Log page 02h (Base 2.0 figure "SMART / Health Information Log Page").
    pub struct SmartLog[512] {
        /// Critical warning; see [`CriticalWarning`].
        critical_warning @ 0: u8,
        /// Composite temperature, in kelvins.
        temperature @ 1: U16,
        /// Available spare, in percent.
        available_spare @ 3: u8,
        /// Available spare threshold, in percent.
        available_spare_threshold @ 4: u8,
        /// Percentage used; 255 for 255 and more.
        percentage_used @ 5: u8,
        /// Reserved, or not used here.
        reserved6 @ 6: [u8; 26],
        /// Data units read: thousands of 512 bytes, rounded up.
        data_units_read @ 32: U128,
        /// Data units written: thousands of 512 bytes, rounded up.
        data_units_written @ 48: U128,
        /// Read and Compare commands of hosts.
        host_reads @ 64: U128,
        /// Write commands of hosts.
        host_writes @ 80: U128,
        /// Controller busy time, in minutes.
        controller_busy_minutes @ 96: U128,
        /// Power cycles.
        power_cycles @ 112: U128,
        /// Power on hours.
        power_on_hours @ 128: U128,
        /// Unsafe shutdowns.
        unsafe_shutdowns @ 144: U128,
        /// Media and data integrity errors.
        media_errors @ 160: U128,
        /// Error log entries over the life of the controller.
        error_log_entries @ 176: U128,
        /// Reserved, or not used here.
        reserved192 @ 192: [u8; 320],
    }
}

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

wire! {
    /// Log page 03h (Base 2.0 figure "Firmware Slot Information Log Page").
    pub struct FirmwareSlotLog[512] {
        /// AFI: active slot in bits 2:0, slot after the next reset in bits 6:4.
        afi @ 0: u8,
        /// Reserved.
        reserved1 @ 1: [u8; 7],
        /// FRS: revision in slots 1 to 7, ASCII; zeroes where there is none.
        frs @ 8: [[u8; 8]; 7],
        /// Reserved.
        reserved64 @ 64: [u8; 448],
    }
}

/// Bytes of log page 04h: 1,024 NSIDs, zero after the last.
pub const CHANGED_NAMESPACE_LIST_BYTES: usize = 4096;

wire! {
    /// Log page 05h (Base 2.0 figure "Commands Supported and Effects Log Page").
    pub struct CommandEffects[4096] {
        /// ACS: for each admin opcode; see [`CommandEffect`].
        admin @ 0: [U32; 256],
        /// IOCS: for each I/O opcode of the CSI that was asked for; see [`CommandEffect`].
        io @ 1024: [U32; 256],
        /// Reserved.
        reserved2048 @ 2048: [u8; 2048],
    }
}

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
    #[bits(18)]
    __: u32,
    /// CSP: its scope.
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
