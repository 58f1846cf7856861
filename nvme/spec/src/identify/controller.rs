//! Identify Controller (CNS 01h) and Identify Controller of the NVM Command Set (CNS 06h). The bitfields of
//! CNS 01h are in `capability`.

use zerocopy::little_endian::{U16, U32, U64};

wire! {
    /// Identify Controller, CNS 01h (Base 2.0 figure "Identify Controller Data Structure").
    pub struct IdentifyController[4096] {
        /// VID: PCI Vendor ID; 0 over Fabrics.
        vid @ 0: U16,
        /// SSVID: PCI Subsystem Vendor ID; 0 over Fabrics.
        ssvid @ 2: U16,
        /// SN: Serial Number, ASCII padded with spaces.
        sn @ 4: [u8; 20],
        /// MN: Model Number, ASCII padded with spaces.
        mn @ 24: [u8; 40],
        /// FR: Firmware Revision, ASCII padded with spaces.
        fr @ 64: [u8; 8],
        reserved72 @ 72: [u8; 4],
        /// CMIC; see [`Cmic`](super::Cmic).
        cmic @ 76: u8,
        /// MDTS: Maximum Data Transfer Size, `1 << MDTS` pages of CAP.MPSMIN; 0 is no limit.
        mdts @ 77: u8,
        /// CNTLID: Controller ID.
        cntlid @ 78: U16,
        /// VER: Version, the value of property VS.
        ver @ 80: U32,
        reserved84 @ 84: [u8; 4],
        /// RTD3E: RTD3 Entry Latency in microseconds.
        rtd3e @ 88: U32,
        /// OAES; see [`Oaes`](super::Oaes).
        oaes @ 92: U32,
        /// CTRATT; see [`Ctratt`](super::Ctratt).
        ctratt @ 96: U32,
        reserved100 @ 100: [u8; 11],
        /// CNTRLTYPE: Controller Type.
        cntrltype @ 111: ControllerType,
        reserved112 @ 112: [u8; 144],
        /// OACS; see [`Oacs`](super::Oacs).
        oacs @ 256: U16,
        /// ACL: Abort Command Limit, concurrent commands, zero-based.
        acl_z @ 258: u8,
        /// AERL: Asynchronous Event Request Limit, concurrent commands, zero-based.
        aerl_z @ 259: u8,
        /// FRMW; see [`Frmw`](super::Frmw).
        frmw @ 260: u8,
        /// LPA; see [`Lpa`](super::Lpa).
        lpa @ 261: u8,
        /// ELPE: Error Log Page Entries, zero-based.
        elpe_z @ 262: u8,
        reserved263 @ 263: [u8; 3],
        /// WCTEMP: Warning Composite Temperature Threshold in kelvins.
        wctemp @ 266: U16,
        /// CCTEMP: Critical Composite Temperature Threshold in kelvins.
        cctemp @ 268: U16,
        reserved270 @ 270: [u8; 50],
        /// KAS: Keep Alive Support, granularity of the timer in units of 100 ms; 0 is no support.
        kas @ 320: U16,
        reserved322 @ 322: [u8; 190],
        /// SQES; see [`EntrySize`](super::EntrySize).
        sqes @ 512: u8,
        /// CQES; see [`EntrySize`](super::EntrySize).
        cqes @ 513: u8,
        /// MAXCMD: Maximum Outstanding Commands of an I/O queue; not 0 over Fabrics.
        maxcmd @ 514: U16,
        /// NN: Number of Namespaces, the largest valid NSID.
        nn @ 516: U32,
        /// ONCS; see [`Oncs`](super::Oncs).
        oncs @ 520: U16,
        /// FUSES; see [`Fuses`](super::Fuses).
        fuses @ 522: U16,
        reserved524 @ 524: u8,
        /// VWC; see [`Vwc`](super::Vwc).
        vwc @ 525: u8,
        /// AWUN: Atomic Write Unit Normal in logical blocks, zero-based.
        awun_z @ 526: U16,
        reserved528 @ 528: [u8; 6],
        /// CDFS: Copy Descriptor Formats Supported, one bit per format.
        cdfs @ 534: U16,
        /// SGLS; see [`Sgls`](super::Sgls).
        sgls @ 536: U32,
        /// MNAN: Maximum Number of Allowed Namespaces; 0 means NN.
        mnan @ 540: U32,
        reserved544 @ 544: [u8; 224],
        /// SUBNQN: NVM Subsystem NQN, NUL terminated.
        subnqn @ 768: [u8; 256],
        reserved1024 @ 1024: [u8; 768],
        /// IOCCSZ: I/O Queue Command Capsule Supported Size in units of 16 bytes.
        ioccsz @ 1792: U32,
        /// IORCSZ: I/O Queue Response Capsule Supported Size in units of 16 bytes.
        iorcsz @ 1796: U32,
        /// ICDOFF: In Capsule Data Offset from the end of the entry, in units of 16 bytes.
        icdoff @ 1800: U16,
        reserved1802 @ 1802: u8,
        /// MSDBD: Maximum SGL Data Block Descriptors in a capsule; 0 is no limit.
        msdbd @ 1803: u8,
        /// OFCS; see [`Ofcs`](super::Ofcs).
        ofcs @ 1804: U16,
        /// DCTYPE: Discovery Controller Type.
        dctype @ 1806: DiscoveryControllerType,
        reserved1807 @ 1807: [u8; 1265],
        /// Vendor Specific; for a controller of Spindle see [`SpindleArea`](crate::vendor::SpindleArea).
        vs @ 3072: [u8; 1024],
    }
}

impl IdentifyController {
    /// Returns the maximum number of concurrent Abort commands: ACL plus one.
    #[must_use]
    pub fn aborts_max(&self) -> u32 {
        u32::from(self.acl_z) + 1
    }

    /// Returns MDTS in bytes; `mpsmin` is CAP.MPSMIN. `None` if there is no limit or the limit exceeds 64
    /// bits.
    #[must_use]
    pub fn transfer_bytes_max(&self, mpsmin: u8) -> Option<u64> {
        let shift = 12 + u32::from(mpsmin) + u32::from(self.mdts);
        if self.mdts == 0 { None } else { 1_u64.checked_shl(shift) }
    }

    /// Returns the maximum in-capsule data of an I/O queue in bytes: IOCCSZ minus the entry and ICDOFF, at
    /// least 0.
    #[must_use]
    pub fn in_capsule_bytes(&self) -> u64 {
        (u64::from(self.ioccsz.get()) * 16)
            .saturating_sub(crate::sqe::SQE_BYTES as u64)
            .saturating_sub(u64::from(self.icdoff.get()) * 16)
    }

    /// Returns SN: Serial Number, without padding.
    #[must_use]
    pub fn serial(&self) -> &str {
        crate::nqn::trimmed_ascii(&self.sn)
    }

    /// Returns MN: Model Number, without padding.
    #[must_use]
    pub fn model(&self) -> &str {
        crate::nqn::trimmed_ascii(&self.mn)
    }

    /// Returns FR: Firmware Revision, without padding.
    #[must_use]
    pub fn firmware(&self) -> &str {
        crate::nqn::trimmed_ascii(&self.fr)
    }
}

open_enum! {
    /// CNTRLTYPE: Controller Type.
    pub struct ControllerType: u8 {
        IO = 1,
        DISCOVERY = 2,
    }
}

open_enum! {
    /// DCTYPE: Discovery Controller Type.
    pub struct DiscoveryControllerType: u8 {
        DIRECT = 1,
    }
}

wire! {
    /// Identify Controller of the NVM Command Set, CNS 06h CSI 00h (NVM Command Set 1.0 section 4.1.5.2).
    pub struct IdentifyControllerNvm[4096] {
        /// VSL: Verify Size Limit, encoded as MDTS; 0 is no limit.
        vsl @ 0: u8,
        /// WZSL: Write Zeroes Size Limit, encoded as MDTS; 0 is no limit.
        wzsl @ 1: u8,
        reserved2 @ 2: [u8; 2],
        /// DMRSL: Dataset Management Range Size Limit in logical blocks; 0 is no limit.
        dmrsl @ 4: U32,
        /// DMSL: Dataset Management Size Limit of all ranges in logical blocks; 0 is no limit.
        dmsl @ 8: U64,
        reserved16 @ 16: u8,
        /// WZDSL: Write Zeroes With Deallocate Size Limit, encoded as MDTS (NVM Command Set 1.1).
        wzdsl @ 17: u8,
        reserved18 @ 18: [u8; 4078],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identify::Sgls;
    use zerocopy::IntoBytes;

    #[test]
    fn capsule_and_transfer_sizes_come_in_units() {
        let mut id = IdentifyController::default();
        assert_eq!((id.transfer_bytes_max(0), id.in_capsule_bytes()), (None, 0));
        id.mdts = 8;
        id.ioccsz = U32::new((64 + 4096) / 16);
        assert_eq!((id.transfer_bytes_max(0), id.in_capsule_bytes()), (Some(1 << 20), 4096));
        id.mdts = 255;
        assert_eq!(id.transfer_bytes_max(15), None);
    }

    #[test]
    fn limits_of_verify_and_formats_of_copy_are_at_their_bytes() {
        let id = IdentifyController { cdfs: U16::new(0x0201), ..IdentifyController::default() };
        assert_eq!(id.as_bytes()[534..536], [1, 2]);
        let nvm = IdentifyControllerNvm { vsl: 7, wzsl: 9, ..IdentifyControllerNvm::default() };
        assert_eq!(nvm.as_bytes()[..3], [7, 9, 0]);
    }

    #[test]
    fn the_fields_that_linux_reads_at_connect_are_at_their_bytes() {
        let id = IdentifyController {
            cntlid: U16::new(0x0102),
            kas: U16::new(10),
            maxcmd: U16::new(128),
            ioccsz: U32::new(260),
            iorcsz: U32::new(1),
            msdbd: 1,
            dctype: DiscoveryControllerType::DIRECT,
            cntrltype: ControllerType::IO,
            sgls: Sgls::new().with_support(1).into(),
            ..IdentifyController::default()
        };
        let bytes = id.as_bytes();
        assert_eq!(bytes[78..80], [2, 1]);
        assert_eq!((bytes[111], bytes[320], bytes[514], bytes[536]), (1, 10, 128, 1));
        assert_eq!(bytes[1792..1800], [4, 1, 0, 0, 1, 0, 0, 0]);
        assert_eq!((bytes[1803], bytes[1806]), (1, 1));
        assert_eq!(bytes.iter().filter(|&&byte| byte != 0).count(), 11);
    }
}
