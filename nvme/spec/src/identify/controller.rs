//! Identify Controller (CNS 01h) and the NVM command set's own part of it (CNS 06h); their bits are in
//! `capability`.

use zerocopy::little_endian::{U16, U32, U64};

wire! {
    /// Identify Controller, CNS 01h (Base 2.0 figure "Identify Controller Data Structure").
    pub struct IdentifyController[4096] {
        /// VID: PCI vendor; 0 over Fabrics.
        vid @ 0: U16,
        /// SSVID: PCI subsystem vendor; 0 over Fabrics.
        ssvid @ 2: U16,
        /// SN: serial number, ASCII padded with spaces.
        sn @ 4: [u8; 20],
        /// MN: model number, ASCII padded with spaces.
        mn @ 24: [u8; 40],
        /// FR: firmware revision, ASCII padded with spaces.
        fr @ 64: [u8; 8],
        /// Reserved, or not used here.
        reserved72 @ 72: [u8; 4],
        /// CMIC; see [`Cmic`](super::Cmic).
        cmic @ 76: u8,
        /// MDTS: largest transfer as a power of two of the smallest memory page; 0 for no limit.
        mdts @ 77: u8,
        /// CNTLID: controller identifier.
        cntlid @ 78: U16,
        /// VER: the value of VS.
        ver @ 80: U32,
        /// Reserved, or not used here.
        reserved84 @ 84: [u8; 4],
        /// RTD3E: entry latency, in microseconds.
        rtd3e @ 88: U32,
        /// OAES; see [`Oaes`](super::Oaes).
        oaes @ 92: U32,
        /// CTRATT; see [`Ctratt`](super::Ctratt).
        ctratt @ 96: U32,
        /// Reserved, or not used here.
        reserved100 @ 100: [u8; 11],
        /// CNTRLTYPE.
        cntrltype @ 111: ControllerType,
        /// Reserved, or not used here.
        reserved112 @ 112: [u8; 144],
        /// OACS; see [`Oacs`](super::Oacs).
        oacs @ 256: U16,
        /// ACL: Abort commands at once, one less than the count.
        acl_z @ 258: u8,
        /// AERL: Asynchronous Event Requests at once, one less than the count.
        aerl_z @ 259: u8,
        /// FRMW; see [`Frmw`](super::Frmw).
        frmw @ 260: u8,
        /// LPA; see [`Lpa`](super::Lpa).
        lpa @ 261: u8,
        /// ELPE: entries of the error log, one less than the count.
        elpe_z @ 262: u8,
        /// Reserved, or not used here.
        reserved263 @ 263: [u8; 3],
        /// WCTEMP: warning temperature, in kelvins.
        wctemp @ 266: U16,
        /// CCTEMP: critical temperature, in kelvins.
        cctemp @ 268: U16,
        /// Reserved, or not used here.
        reserved270 @ 270: [u8; 50],
        /// KAS: granularity of the keep alive timer, in 100 ms; 0 where there is none.
        kas @ 320: U16,
        /// Reserved, or not used here.
        reserved322 @ 322: [u8; 190],
        /// SQES; see [`EntrySize`](super::EntrySize).
        sqes @ 512: u8,
        /// CQES; see [`EntrySize`](super::EntrySize).
        cqes @ 513: u8,
        /// MAXCMD: commands of one queue that are processed at a time; not 0 over Fabrics.
        maxcmd @ 514: U16,
        /// NN: largest NSID.
        nn @ 516: U32,
        /// ONCS; see [`Oncs`](super::Oncs).
        oncs @ 520: U16,
        /// FUSES; see [`Fuses`](super::Fuses).
        fuses @ 522: U16,
        /// Reserved, or not used here.
        reserved524 @ 524: u8,
        /// VWC; see [`Vwc`](super::Vwc).
        vwc @ 525: u8,
        /// AWUN: atomic write, in logical blocks, one less than the count.
        awun_z @ 526: U16,
        /// Reserved, or not used here.
        reserved528 @ 528: [u8; 6],
        /// CDFS: a bit for each Copy descriptor format.
        cdfs @ 534: U16,
        /// SGLS; see [`Sgls`](super::Sgls).
        sgls @ 536: U32,
        /// MNAN: most namespaces; 0 for NN.
        mnan @ 540: U32,
        /// Reserved, or not used here.
        reserved544 @ 544: [u8; 224],
        /// SUBNQN: name of the subsystem, NUL terminated.
        subnqn @ 768: [u8; 256],
        /// Reserved.
        reserved1024 @ 1024: [u8; 768],
        /// IOCCSZ: command capsule of an I/O queue, in 16 bytes.
        ioccsz @ 1792: U32,
        /// IORCSZ: response capsule of an I/O queue, in 16 bytes.
        iorcsz @ 1796: U32,
        /// ICDOFF: where data begins after the entry in a capsule, in 16 bytes.
        icdoff @ 1800: U16,
        /// Reserved, or not used here.
        reserved1802 @ 1802: u8,
        /// MSDBD: most SGL data block descriptors in a capsule; 0 for no limit.
        msdbd @ 1803: u8,
        /// OFCS; see [`Ofcs`](super::Ofcs).
        ofcs @ 1804: U16,
        /// DCTYPE.
        dctype @ 1806: DiscoveryControllerType,
        /// Reserved, or not used here.
        reserved1807 @ 1807: [u8; 1265],
        /// Vendor specific.
        vs @ 3072: [u8; 1024],
    }
}

impl IdentifyController {
    /// ACL with its zero base taken away: Abort commands at once.
    #[must_use]
    pub fn aborts_max(&self) -> u32 {
        u32::from(self.acl_z) + 1
    }

    /// MDTS in bytes with this CAP.MPSMIN; `None` where there is no limit, or none that 64 bits hold.
    #[must_use]
    pub fn transfer_bytes_max(&self, mpsmin: u8) -> Option<u64> {
        let shift = 12 + u32::from(mpsmin) + u32::from(self.mdts);
        if self.mdts == 0 { None } else { 1_u64.checked_shl(shift) }
    }

    /// Most bytes of data in a command capsule of an I/O queue: IOCCSZ less the entry and ICDOFF.
    #[must_use]
    pub fn in_capsule_bytes(&self) -> u64 {
        (u64::from(self.ioccsz.get()) * 16)
            .saturating_sub(crate::sqe::SQE_BYTES as u64)
            .saturating_sub(u64::from(self.icdoff.get()) * 16)
    }

    /// SN without its padding.
    #[must_use]
    pub fn serial(&self) -> &str {
        crate::nqn::trimmed_ascii(&self.sn)
    }

    /// MN without its padding.
    #[must_use]
    pub fn model(&self) -> &str {
        crate::nqn::trimmed_ascii(&self.mn)
    }

    /// FR without its padding.
    #[must_use]
    pub fn firmware(&self) -> &str {
        crate::nqn::trimmed_ascii(&self.fr)
    }
}

open_enum! {
    /// CNTRLTYPE: what the controller is for.
    pub struct ControllerType: u8 {
        /// I/O controller.
        IO = 1,
        /// Discovery controller.
        DISCOVERY = 2,
    }
}

open_enum! {
    /// DCTYPE: what kind of discovery controller it is.
    pub struct DiscoveryControllerType: u8 {
        /// Direct discovery controller.
        DIRECT = 1,
    }
}

wire! {
    /// Identify Controller of the NVM Command Set, CNS 06h CSI 00h (NVM Command Set 1.0 section 4.1.5.2).
    pub struct IdentifyControllerNvm[4096] {
        /// VSL: most of Verify, as MDTS; 0 for no limit.
        vsl @ 0: u8,
        /// WZSL: most of Write Zeroes, as MDTS; 0 for no limit.
        wzsl @ 1: u8,
        /// Reserved, or not used here.
        reserved2 @ 2: [u8; 2],
        /// DMRSL: most logical blocks in one range; 0 for no limit.
        dmrsl @ 4: U32,
        /// DMSL: most logical blocks in all ranges; 0 for no limit.
        dmsl @ 8: U64,
        /// Reserved, or not used here.
        reserved16 @ 16: u8,
        /// WZDSL: most of Write Zeroes that deallocates, as MDTS (NVM Command Set 1.1).
        wzdsl @ 17: u8,
        /// Reserved, or not used here.
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
