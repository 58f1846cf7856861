//! Controller properties (Base 2.0 section 3.1.3): registers on PCIe, Property Get and Set over Fabrics.

use bitfield_struct::bitfield;

/// Offset of CAP (Controller Capabilities), 8 bytes.
pub const CAP: u32 = 0x00;
/// Offset of VS (Version), 4 bytes.
pub const VS: u32 = 0x08;
/// Offset of INTMS (Interrupt Mask Set), 4 bytes; PCIe only.
pub const INTMS: u32 = 0x0c;
/// Offset of CC (Controller Configuration), 4 bytes.
pub const CC: u32 = 0x14;
/// Offset of CSTS (Controller Status), 4 bytes.
pub const CSTS: u32 = 0x1c;
/// Offset of NSSR (NVM Subsystem Reset), 4 bytes.
pub const NSSR: u32 = 0x20;
/// Offset of AQA (Admin Queue Attributes), 4 bytes; PCIe only.
pub const AQA: u32 = 0x24;
/// Offset of ASQ (Admin Submission Queue Base Address), 8 bytes; PCIe only.
pub const ASQ: u32 = 0x28;
/// Offset of ACQ (Admin Completion Queue Base Address), 8 bytes; PCIe only.
pub const ACQ: u32 = 0x30;
/// Offset of NSSD (NVM Subsystem Shutdown), 4 bytes.
pub const NSSD: u32 = 0x64;
/// Offset of CRTO (Controller Ready Timeouts), 4 bytes.
pub const CRTO: u32 = 0x68;
/// Offset of the first doorbell, SQ0TDBL; PCIe only (NVMe over PCIe Transport 1.0 section 3.1.2).
pub const DOORBELLS: u32 = 0x1000;

/// Value "NVMe"; a write to NSSR resets the NVM subsystem (Base 2.0 section 3.1.3.7).
pub const NSSR_RESET: u32 = 0x4e56_4d65;

/// CAP: Controller Capabilities (Base 2.0 section 3.1.3.1).
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct Cap {
    /// MQES: Maximum Queue Entries Supported, zero-based.
    pub mqes_z: u16,
    /// CQR: Contiguous Queues Required; 1 over Fabrics.
    pub cqr: bool,
    #[bits(7)]
    __: u8,
    /// TO: Timeout of a change of CSTS.RDY, in units of 500 ms.
    pub to: u8,
    /// DSTRD: Doorbell Stride, `4 << DSTRD` bytes; 0 over Fabrics.
    #[bits(4)]
    pub dstrd: u8,
    __: bool,
    /// CSS bit 0: NVM Command Set.
    pub css_nvm: bool,
    #[bits(5)]
    __: u8,
    /// CSS bit 6: one or more I/O Command Sets, selected with CC.CSS 110b.
    pub css_io_command_sets: bool,
    #[bits(4)]
    __: u8,
    /// MPSMIN: Memory Page Size Minimum, `4096 << MPSMIN` bytes.
    #[bits(4)]
    pub mpsmin: u8,
    /// MPSMAX: Memory Page Size Maximum, `4096 << MPSMAX` bytes.
    #[bits(4)]
    pub mpsmax: u8,
    #[bits(3)]
    __: u8,
    /// CRWMS: Controller Ready With Media Support.
    pub crwms: bool,
    #[bits(4)]
    __: u8,
}

impl Cap {
    /// Returns the maximum number of queue entries, 1 to 65,536: MQES plus one.
    #[must_use]
    pub const fn queue_entries_max(self) -> u32 {
        self.mqes_z() as u32 + 1
    }

    /// Returns the timeout of a change of CSTS.RDY in milliseconds: TO times 500.
    #[must_use]
    pub const fn timeout_ms(self) -> u32 {
        self.to() as u32 * 500
    }
}

/// VS: Version (Base 2.0 section 3.1.3.2).
#[bitfield(u32)]
#[derive(PartialEq, Eq, PartialOrd, Ord)]
pub struct Vs {
    __: u8,
    /// MNR: Minor Version Number.
    pub minor: u8,
    /// MJR: Major Version Number.
    pub major: u16,
}

impl Vs {
    /// NVM Express 1.3.
    pub const V1_3: Self = Self::new().with_major(1).with_minor(3);
    /// NVM Express 1.4.
    pub const V1_4: Self = Self::new().with_major(1).with_minor(4);
    /// NVM Express Base 2.0.
    pub const V2_0: Self = Self::new().with_major(2);
}

/// CC: Controller Configuration (Base 2.0 section 3.1.3.5).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Cc {
    /// EN: Enable.
    pub en: bool,
    #[bits(3)]
    __: u8,
    /// CSS: I/O Command Set Selected; see [`CommandSetSelected`].
    #[bits(3)]
    pub css: u8,
    /// MPS: Memory Page Size, `4096 << MPS` bytes.
    #[bits(4)]
    pub mps: u8,
    /// AMS: Arbitration Mechanism Selected; 0 is round robin.
    #[bits(3)]
    pub ams: u8,
    /// SHN: Shutdown Notification; see [`ShutdownNotification`].
    #[bits(2)]
    pub shn: u8,
    /// IOSQES: I/O Submission Queue Entry Size, `1 << IOSQES` bytes; 6.
    #[bits(4)]
    pub iosqes: u8,
    /// IOCQES: I/O Completion Queue Entry Size, `1 << IOCQES` bytes; 4.
    #[bits(4)]
    pub iocqes: u8,
    /// CRIME: Controller Ready Independent of Media Enable.
    pub crime: bool,
    #[bits(7)]
    __: u8,
}

impl Cc {
    /// Returns SHN: Shutdown Notification.
    #[must_use]
    pub const fn shutdown(self) -> ShutdownNotification {
        ShutdownNotification(self.shn())
    }
}

open_enum! {
    /// CC.CSS: I/O Command Set Selected.
    pub struct CommandSetSelected: u8 {
        NVM = 0b000,
        /// All supported I/O Command Sets; requires CSS bit 6 of CAP.
        ALL = 0b110,
    }
}

open_enum! {
    /// CC.SHN: Shutdown Notification.
    pub struct ShutdownNotification: u8 {
        NONE = 0,
        NORMAL = 1,
        ABRUPT = 2,
    }
}

/// CSTS: Controller Status (Base 2.0 section 3.1.3.6).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Csts {
    /// RDY: Ready; the controller processes commands.
    pub rdy: bool,
    /// CFS: Controller Fatal Status.
    pub cfs: bool,
    /// SHST: Shutdown Status; see [`ShutdownStatus`].
    #[bits(2)]
    pub shst: u8,
    #[bits(28)]
    __: u32,
}

impl Csts {
    /// Returns SHST: Shutdown Status.
    #[must_use]
    pub const fn shutdown(self) -> ShutdownStatus {
        ShutdownStatus(self.shst())
    }
}

open_enum! {
    /// CSTS.SHST: Shutdown Status.
    pub struct ShutdownStatus: u8 {
        /// The host requested no shutdown.
        NORMAL = 0,
        OCCURRING = 1,
        COMPLETE = 2,
    }
}

/// CRTO: Controller Ready Timeouts (Base 2.0 section 3.1.3.21).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Crto {
    /// CRWMT: Controller Ready With Media Timeout, in units of 500 ms.
    pub crwmt: u16,
    __: u16,
}

/// AQA: Admin Queue Attributes; PCIe only (Base 2.0 section 3.1.3.8).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Aqa {
    /// ASQS: Admin Submission Queue Size in entries, zero-based.
    #[bits(12)]
    pub asqs_z: u16,
    #[bits(4)]
    __: u8,
    /// ACQS: Admin Completion Queue Size in entries, zero-based.
    #[bits(12)]
    pub acqs_z: u16,
    #[bits(4)]
    __: u8,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cap_has_its_fields_where_the_figure_has_them() {
        // QEMU's emulated controller, 2048 entries, 7.5 s, CSS NVM and I/O command sets and none, MPSMAX 4.
        let cap = Cap::from_bits(0x0000_0040_0f01_07ff | 1 << 37);
        assert_eq!((cap.mqes_z(), cap.queue_entries_max(), cap.cqr()), (0x7ff, 2048, true));
        assert_eq!((cap.to(), cap.timeout_ms(), cap.css_nvm()), (15, 7500, true));
        assert_eq!(Cap::new().with_css_io_command_sets(true).into_bits(), 1 << 43);
        assert_eq!(Cap::new().with_mpsmin(1).into_bits(), 1 << 48);
    }

    #[test]
    fn the_value_that_linux_writes_to_enable_a_controller() {
        let cc = Cc::new().with_en(true).with_iosqes(6).with_iocqes(4);
        assert_eq!(cc.into_bits(), 0x0046_0001);
        let cc = Cc::from_bits(0x0046_4001);
        assert_eq!((cc.en(), cc.shutdown()), (true, ShutdownNotification::NORMAL));
        assert_eq!(Cc::new().with_crime(true).into_bits(), 1 << 24);
    }

    #[test]
    fn version_and_status_words() {
        assert_eq!(Vs::V2_0.into_bits(), 0x0002_0000);
        assert_eq!(Vs::V1_4.into_bits(), 0x0001_0400);
        assert!(Vs::V1_4 < Vs::V2_0);
        let done = Csts::new().with_rdy(true).with_shst(ShutdownStatus::COMPLETE.0);
        assert_eq!((done.into_bits(), done.shutdown()), (0x9, ShutdownStatus::COMPLETE));
        assert_eq!(NSSR_RESET.to_be_bytes(), *b"NVMe");
        assert_eq!(Crto::new().with_crwmt(2).into_bits(), 2);
    }
}
