//! Controller properties (Base 2.0 section 3.1.3): registers on PCIe, Property Get and Set over Fabrics.

use bitfield_struct::bitfield;

/// Offset of CAP, 8 bytes.
pub const CAP: u32 = 0x00;
/// Offset of VS, 4 bytes.
pub const VS: u32 = 0x08;
/// Offset of INTMS, 4 bytes; PCIe.
pub const INTMS: u32 = 0x0c;
/// Offset of CC, 4 bytes.
pub const CC: u32 = 0x14;
/// Offset of CSTS, 4 bytes.
pub const CSTS: u32 = 0x1c;
/// Offset of NSSR, 4 bytes.
pub const NSSR: u32 = 0x20;
/// Offset of AQA, 4 bytes; PCIe.
pub const AQA: u32 = 0x24;
/// Offset of ASQ, 8 bytes; PCIe.
pub const ASQ: u32 = 0x28;
/// Offset of ACQ, 8 bytes; PCIe.
pub const ACQ: u32 = 0x30;
/// Offset of NSSD, 4 bytes.
pub const NSSD: u32 = 0x64;
/// Offset of CRTO, 4 bytes.
pub const CRTO: u32 = 0x68;
/// Offset of the first doorbell, SQ0TDBL; PCIe (NVMe over PCIe Transport 1.0 section 3.1.2).
pub const DOORBELLS: u32 = 0x1000;

/// What is written to NSSR to reset the subsystem: "NVMe" (Base 2.0 section 3.1.3.7).
pub const NSSR_RESET: u32 = 0x4e56_4d65;

/// CAP: Controller Capabilities (Base 2.0 section 3.1.3.1).
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct Cap {
    /// MQES: most entries of a queue, one less than the count.
    pub mqes_z: u16,
    /// CQR: queues are physically contiguous; 1 over Fabrics.
    pub cqr: bool,
    #[bits(7)]
    __: u8,
    /// TO: longest time for CSTS.RDY to change, in 500 ms.
    pub to: u8,
    /// DSTRD: distance of doorbells, as 4 << DSTRD bytes; 0 over Fabrics.
    #[bits(4)]
    pub dstrd: u8,
    __: bool,
    /// CSS bit 0: NVM command set.
    pub css_nvm: bool,
    #[bits(5)]
    __: u8,
    /// CSS bit 6: one or more I/O command sets, chosen by CC.CSS 110b.
    pub css_io_command_sets: bool,
    #[bits(4)]
    __: u8,
    /// MPSMIN: smallest memory page, as 4 KiB << MPSMIN.
    #[bits(4)]
    pub mpsmin: u8,
    /// MPSMAX: largest memory page, as 4 KiB << MPSMAX.
    #[bits(4)]
    pub mpsmax: u8,
    #[bits(3)]
    __: u8,
    /// CRWMS: controller ready with media.
    pub crwms: bool,
    #[bits(4)]
    __: u8,
}

impl Cap {
    /// MQES with its zero base taken away.
    #[must_use]
    pub const fn queue_entries_max(self) -> u32 {
        self.mqes_z() as u32 + 1
    }

    /// TO in milliseconds.
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
    /// MNR: minor.
    pub minor: u8,
    /// MJR: major.
    pub major: u16,
}

impl Vs {
    /// 1.3.
    pub const V1_3: Self = Self::new().with_major(1).with_minor(3);
    /// 1.4.
    pub const V1_4: Self = Self::new().with_major(1).with_minor(4);
    /// 2.0.
    pub const V2_0: Self = Self::new().with_major(2);
}

/// CC: Controller Configuration (Base 2.0 section 3.1.3.5).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Cc {
    /// EN: enable.
    pub en: bool,
    #[bits(3)]
    __: u8,
    /// CSS: I/O command set selected; see [`CommandSetSelected`].
    #[bits(3)]
    pub css: u8,
    /// MPS: memory page, as 4 KiB << MPS.
    #[bits(4)]
    pub mps: u8,
    /// AMS: arbitration mechanism.
    #[bits(3)]
    pub ams: u8,
    /// SHN: shutdown notification; see [`ShutdownNotification`].
    #[bits(2)]
    pub shn: u8,
    /// IOSQES: size of I/O submission entries, as a power of two; 6.
    #[bits(4)]
    pub iosqes: u8,
    /// IOCQES: size of I/O completion entries, as a power of two; 4.
    #[bits(4)]
    pub iocqes: u8,
    /// CRIME: controller ready independent of media is enabled.
    pub crime: bool,
    #[bits(7)]
    __: u8,
}

impl Cc {
    /// SHN.
    #[must_use]
    pub const fn shutdown(self) -> ShutdownNotification {
        ShutdownNotification(self.shn())
    }
}

open_enum! {
    /// CC.CSS: I/O command set selected.
    pub struct CommandSetSelected: u8 {
        /// NVM command set.
        NVM = 0b000,
        /// All supported I/O command sets.
        ALL = 0b110,
    }
}

open_enum! {
    /// CC.SHN: what the host says about shutting down.
    pub struct ShutdownNotification: u8 {
        /// Nothing.
        NONE = 0,
        /// Normal shutdown.
        NORMAL = 1,
        /// Abrupt shutdown.
        ABRUPT = 2,
    }
}

/// CSTS: Controller Status (Base 2.0 section 3.1.3.6).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Csts {
    /// RDY: ready.
    pub rdy: bool,
    /// CFS: controller fatal status.
    pub cfs: bool,
    /// SHST: shutdown status; see [`ShutdownStatus`].
    #[bits(2)]
    pub shst: u8,
    #[bits(28)]
    __: u32,
}

impl Csts {
    /// SHST.
    #[must_use]
    pub const fn shutdown(self) -> ShutdownStatus {
        ShutdownStatus(self.shst())
    }
}

open_enum! {
    /// CSTS.SHST: how far shutting down has come.
    pub struct ShutdownStatus: u8 {
        /// No shutdown was asked for.
        NORMAL = 0,
        /// In progress.
        OCCURRING = 1,
        /// Done.
        COMPLETE = 2,
    }
}

/// CRTO: Controller Ready Timeouts (Base 2.0 section 3.1.3.21), both in 500 ms.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Crto {
    /// CRWMT: until ready with media.
    pub crwmt: u16,
    __: u16,
}

/// AQA: Admin Queue Attributes; PCIe (Base 2.0 section 3.1.3.8).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Aqa {
    /// ASQS: entries of the admin submission queue, one less than the count.
    #[bits(12)]
    pub asqs_z: u16,
    #[bits(4)]
    __: u8,
    /// ACQS: entries of the admin completion queue, one less than the count.
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
