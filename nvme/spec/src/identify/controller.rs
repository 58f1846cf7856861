//! Identify Controller (CNS 01h) and the NVM command set's own part of it (CNS 06h); their bits are in
//! `capability`.

use bitfield_struct::bitfield;
use zerocopy::little_endian::{U16, U32, U64, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Identify Controller, CNS 01h (Base 2.0 figure "Identify Controller Data Structure").
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct IdentifyController {
    /// VID: PCI vendor; 0 over Fabrics.
    pub vid: U16,
    /// SSVID: PCI subsystem vendor; 0 over Fabrics.
    pub ssvid: U16,
    /// SN: serial number, ASCII padded with spaces.
    pub sn: [u8; 20],
    /// MN: model number, ASCII padded with spaces.
    pub mn: [u8; 40],
    /// FR: firmware revision, ASCII padded with spaces.
    pub fr: [u8; 8],
    /// RAB: recommended arbitration burst, as a power of two.
    pub rab: u8,
    /// IEEE: OUI of the vendor, least significant byte first.
    pub ieee: [u8; 3],
    /// CMIC; see [`Cmic`](super::Cmic).
    pub cmic: u8,
    /// MDTS: largest transfer as a power of two of the smallest memory page; 0 for no limit.
    pub mdts: u8,
    /// CNTLID: controller identifier.
    pub cntlid: U16,
    /// VER: the value of VS.
    pub ver: U32,
    /// RTD3R: resume latency, in microseconds.
    pub rtd3r: U32,
    /// RTD3E: entry latency, in microseconds.
    pub rtd3e: U32,
    /// OAES; see [`Oaes`](super::Oaes).
    pub oaes: U32,
    /// CTRATT; see [`Ctratt`](super::Ctratt).
    pub ctratt: U32,
    /// RRLS: read recovery levels.
    pub rrls: U16,
    /// BPCAP: boot partition capabilities (Base 2.1).
    pub bpcap: u8,
    /// Reserved.
    pub reserved103: u8,
    /// NSSL: subsystem shutdown latency, in microseconds (Base 2.1).
    pub nssl: U32,
    /// Reserved.
    pub reserved108: [u8; 2],
    /// PLSI: power loss signaling (Base 2.1).
    pub plsi: u8,
    /// CNTRLTYPE.
    pub cntrltype: ControllerType,
    /// FGUID: GUID of the field replaceable unit.
    pub fguid: [u8; 16],
    /// CRDT1: retry delay for CRD 1, in 100 ms.
    pub crdt1: U16,
    /// CRDT2: retry delay for CRD 2, in 100 ms.
    pub crdt2: U16,
    /// CRDT3: retry delay for CRD 3, in 100 ms.
    pub crdt3: U16,
    /// CRCAP: controller reachability capabilities (Base 2.1).
    pub crcap: u8,
    /// CIU: controller instance uniquifier (after Base 2.1).
    pub ciu: u8,
    /// CIRN: controller instance random number (after Base 2.1).
    pub cirn: U64,
    /// Reserved.
    pub reserved144: [u8; 109],
    /// NVMSR: NVM subsystem report.
    pub nvmsr: u8,
    /// VWCI: VPD write cycles.
    pub vwci: u8,
    /// MEC: management endpoint capabilities.
    pub mec: u8,
    /// OACS; see [`Oacs`](super::Oacs).
    pub oacs: U16,
    /// ACL: Abort commands at once, one less than the count.
    pub acl_z: u8,
    /// AERL: Asynchronous Event Requests at once, one less than the count.
    pub aerl_z: u8,
    /// FRMW; see [`Frmw`](super::Frmw).
    pub frmw: u8,
    /// LPA; see [`Lpa`](super::Lpa).
    pub lpa: u8,
    /// ELPE: entries of the error log, one less than the count.
    pub elpe_z: u8,
    /// NPSS: power states, one less than the count.
    pub npss_z: u8,
    /// AVSCC: admin vendor specific command format.
    pub avscc: u8,
    /// APSTA: autonomous power state transitions.
    pub apsta: u8,
    /// WCTEMP: warning temperature, in kelvins.
    pub wctemp: U16,
    /// CCTEMP: critical temperature, in kelvins.
    pub cctemp: U16,
    /// MTFA: longest pause for firmware activation, in 100 ms.
    pub mtfa: U16,
    /// HMPRE: preferred host memory buffer, in 4 KiB.
    pub hmpre: U32,
    /// HMMIN: smallest host memory buffer, in 4 KiB.
    pub hmmin: U32,
    /// TNVMCAP: total capacity, in bytes.
    pub tnvmcap: U128,
    /// UNVMCAP: unallocated capacity, in bytes.
    pub unvmcap: U128,
    /// RPMBS: replay protected memory blocks.
    pub rpmbs: U32,
    /// EDSTT: time of an extended self-test, in minutes.
    pub edstt: U16,
    /// DSTO: self-test options.
    pub dsto: u8,
    /// FWUG: granularity of firmware images, in 4 KiB.
    pub fwug: u8,
    /// KAS: granularity of the keep alive timer, in 100 ms; 0 where there is none.
    pub kas: U16,
    /// HCTMA: host controlled thermal management.
    pub hctma: U16,
    /// MNTMT: lowest thermal management temperature, in kelvins.
    pub mntmt: U16,
    /// MXTMT: highest thermal management temperature, in kelvins.
    pub mxtmt: U16,
    /// SANICAP: sanitize capabilities.
    pub sanicap: U32,
    /// HMMINDS: smallest host memory descriptor, in 4 KiB.
    pub hmminds: U32,
    /// HMMAXD: most host memory descriptors.
    pub hmmaxd: U16,
    /// NSETIDMAX: largest NVM set identifier.
    pub nsetidmax: U16,
    /// ENDGIDMAX: largest endurance group identifier.
    pub endgidmax: U16,
    /// ANATT: longest ANA transition, in seconds.
    pub anatt: u8,
    /// ANACAP; see [`Anacap`](super::Anacap).
    pub anacap: u8,
    /// ANAGRPMAX: largest ANA group identifier.
    pub anagrpmax: U32,
    /// NANAGRPID: how many ANA groups.
    pub nanagrpid: U32,
    /// PELS: size of the persistent event log, in 64 KiB.
    pub pels: U32,
    /// DID: domain identifier.
    pub domainid: U16,
    /// KPIOC: key per I/O capabilities (Base 2.1).
    pub kpioc: u8,
    /// Reserved.
    pub reserved359: u8,
    /// MPTFAWR: time of firmware activation without reset, in 100 ms (Base 2.1).
    pub mptfawr: U16,
    /// Reserved.
    pub reserved362: [u8; 6],
    /// MEGCAP: largest endurance group, in bytes.
    pub megcap: U128,
    /// TMPTHHA: temperature threshold hysteresis (Base 2.1).
    pub tmpthha: u8,
    /// Reserved.
    pub reserved385: u8,
    /// CQT: command quiesce time, in milliseconds (Base 2.1).
    pub cqt: U16,
    /// Reserved.
    pub reserved388: [u8; 124],
    /// SQES; see [`EntrySize`](super::EntrySize).
    pub sqes: u8,
    /// CQES; see [`EntrySize`](super::EntrySize).
    pub cqes: u8,
    /// MAXCMD: commands of one queue that are processed at a time; not 0 over Fabrics.
    pub maxcmd: U16,
    /// NN: largest NSID.
    pub nn: U32,
    /// ONCS; see [`Oncs`](super::Oncs).
    pub oncs: U16,
    /// FUSES; see [`Fuses`](super::Fuses).
    pub fuses: U16,
    /// FNA: Format NVM attributes.
    pub fna: u8,
    /// VWC; see [`Vwc`](super::Vwc).
    pub vwc: u8,
    /// AWUN: atomic write, in logical blocks, one less than the count.
    pub awun_z: U16,
    /// AWUPF: atomic write at power fail, in logical blocks, one less than the count.
    pub awupf_z: U16,
    /// ICSVSCC: I/O vendor specific command format.
    pub icsvscc: u8,
    /// NWPC: namespace write protection.
    pub nwpc: u8,
    /// ACWU: atomic compare and write, in logical blocks, one less than the count.
    pub acwu_z: U16,
    /// CDFS: a bit for each Copy descriptor format.
    pub cdfs: U16,
    /// SGLS; see [`Sgls`](super::Sgls).
    pub sgls: U32,
    /// MNAN: most namespaces; 0 for NN.
    pub mnan: U32,
    /// MAXDNA: most namespace attachments of the domain.
    pub maxdna: U128,
    /// MAXCNA: most namespace attachments of the controller.
    pub maxcna: U32,
    /// OAQD: best aggregated queue depth (Base 2.1).
    pub oaqd: U32,
    /// RHIRI: recommended interval of host-initiated refresh (Base 2.1).
    pub rhiri: u8,
    /// HIRT: time of host-initiated refresh (Base 2.1).
    pub hirt: u8,
    /// CMMRTD: memory range tracking descriptors of the controller (Base 2.1).
    pub cmmrtd: U16,
    /// NMMRTD: memory range tracking descriptors of the subsystem (Base 2.1).
    pub nmmrtd: U16,
    /// MINMRTG: smallest granularity of memory range tracking (Base 2.1).
    pub minmrtg: u8,
    /// MAXMRTG: largest granularity of memory range tracking (Base 2.1).
    pub maxmrtg: u8,
    /// TRATTR: tracking attributes (Base 2.1).
    pub trattr: u8,
    /// Reserved.
    pub reserved577: u8,
    /// MCUDMQ: user data migration queues of the controller (Base 2.1).
    pub mcudmq: U16,
    /// MNSUDMQ: user data migration queues of the subsystem (Base 2.1).
    pub mnsudmq: U16,
    /// MCMR: memory ranges of a controller data queue (Base 2.1).
    pub mcmr: U16,
    /// NMCMR: memory ranges of controller data queues in the subsystem (Base 2.1).
    pub nmcmr: U16,
    /// MCDQPC: PRPs of a controller data queue (Base 2.1).
    pub mcdqpc: U16,
    /// Reserved.
    pub reserved588: [u8; 180],
    /// SUBNQN: name of the subsystem, NUL terminated.
    pub subnqn: [u8; 256],
    /// Reserved.
    pub reserved1024: [u8; 768],
    /// IOCCSZ: command capsule of an I/O queue, in 16 bytes.
    pub ioccsz: U32,
    /// IORCSZ: response capsule of an I/O queue, in 16 bytes.
    pub iorcsz: U32,
    /// ICDOFF: where data begins after the entry in a capsule, in 16 bytes.
    pub icdoff: U16,
    /// FCATT; see [`Fcatt`](super::Fcatt).
    pub fcatt: u8,
    /// MSDBD: most SGL data block descriptors in a capsule; 0 for no limit.
    pub msdbd: u8,
    /// OFCS; see [`Ofcs`](super::Ofcs).
    pub ofcs: U16,
    /// DCTYPE.
    pub dctype: DiscoveryControllerType,
    /// Reserved.
    pub reserved1807: [u8; 241],
    /// PSD: power states.
    pub psd: [PowerState; 32],
    /// Vendor specific.
    pub vs: [u8; 1024],
}

layout!(IdentifyController, 4096, {
    vid @ 0, ssvid @ 2, sn @ 4, mn @ 24, fr @ 64, rab @ 72, ieee @ 73, cmic @ 76, mdts @ 77,
    cntlid @ 78, ver @ 80, rtd3r @ 84, rtd3e @ 88, oaes @ 92, ctratt @ 96, rrls @ 100,
    bpcap @ 102, reserved103 @ 103, nssl @ 104, reserved108 @ 108, plsi @ 110, cntrltype @ 111,
    fguid @ 112, crdt1 @ 128, crdt2 @ 130, crdt3 @ 132, crcap @ 134, ciu @ 135, cirn @ 136,
    reserved144 @ 144, nvmsr @ 253, vwci @ 254, mec @ 255, oacs @ 256, acl_z @ 258, aerl_z @ 259,
    frmw @ 260, lpa @ 261, elpe_z @ 262, npss_z @ 263, avscc @ 264, apsta @ 265, wctemp @ 266,
    cctemp @ 268, mtfa @ 270, hmpre @ 272, hmmin @ 276, tnvmcap @ 280, unvmcap @ 296, rpmbs @ 312,
    edstt @ 316, dsto @ 318, fwug @ 319, kas @ 320, hctma @ 322, mntmt @ 324, mxtmt @ 326,
    sanicap @ 328, hmminds @ 332, hmmaxd @ 336, nsetidmax @ 338, endgidmax @ 340, anatt @ 342,
    anacap @ 343, anagrpmax @ 344, nanagrpid @ 348, pels @ 352, domainid @ 356, kpioc @ 358,
    reserved359 @ 359, mptfawr @ 360, reserved362 @ 362, megcap @ 368, tmpthha @ 384,
    reserved385 @ 385, cqt @ 386, reserved388 @ 388, sqes @ 512, cqes @ 513, maxcmd @ 514,
    nn @ 516, oncs @ 520, fuses @ 522, fna @ 524, vwc @ 525, awun_z @ 526, awupf_z @ 528,
    icsvscc @ 530, nwpc @ 531, acwu_z @ 532, cdfs @ 534, sgls @ 536, mnan @ 540, maxdna @ 544,
    maxcna @ 560, oaqd @ 564, rhiri @ 568, hirt @ 569, cmmrtd @ 570, nmmrtd @ 572, minmrtg @ 574,
    maxmrtg @ 575, trattr @ 576, reserved577 @ 577, mcudmq @ 578, mnsudmq @ 580, mcmr @ 582,
    nmcmr @ 584, mcdqpc @ 586, reserved588 @ 588, subnqn @ 768, reserved1024 @ 1024,
    ioccsz @ 1792, iorcsz @ 1796, icdoff @ 1800, fcatt @ 1802, msdbd @ 1803, ofcs @ 1804,
    dctype @ 1806, reserved1807 @ 1807, psd @ 2048, vs @ 3072,
});

impl IdentifyController {
    /// ACL with its zero base taken away: Abort commands at once.
    #[must_use]
    pub fn aborts_max(&self) -> u32 {
        u32::from(self.acl_z) + 1
    }

    /// AERL with its zero base taken away: Asynchronous Event Requests at once.
    #[must_use]
    pub fn async_events_max(&self) -> u32 {
        u32::from(self.aerl_z) + 1
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
        /// Not reported.
        NOT_REPORTED = 0,
        /// I/O controller.
        IO = 1,
        /// Discovery controller.
        DISCOVERY = 2,
        /// Administrative controller.
        ADMINISTRATIVE = 3,
    }
}

open_enum! {
    /// DCTYPE: what kind of discovery controller it is.
    pub struct DiscoveryControllerType: u8 {
        /// Not reported.
        NOT_REPORTED = 0,
        /// Direct discovery controller.
        DIRECT = 1,
        /// Central discovery controller.
        CENTRAL = 2,
    }
}

/// A power state descriptor (Base 2.0 figure "Power State Descriptor Data Structure").
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct PowerState {
    /// MP: most power, in the unit of MXPS.
    pub mp: U16,
    /// Reserved.
    pub reserved2: u8,
    /// MXPS and NOPS; see [`PowerStateFlags`].
    pub flags: u8,
    /// ENLAT: entry latency, in microseconds.
    pub enlat: U32,
    /// EXLAT: exit latency, in microseconds.
    pub exlat: U32,
    /// RRT: relative read throughput, bits 4:0.
    pub rrt: u8,
    /// RRL: relative read latency, bits 4:0.
    pub rrl: u8,
    /// RWT: relative write throughput, bits 4:0.
    pub rwt: u8,
    /// RWL: relative write latency, bits 4:0.
    pub rwl: u8,
    /// IDLP: idle power.
    pub idlp: U16,
    /// IPS: unit of IDLP, bits 7:6.
    pub ips: u8,
    /// Reserved.
    pub reserved19: u8,
    /// ACTP: active power.
    pub actp: U16,
    /// APW (bits 2:0) and APS (bits 7:6): workload and unit of ACTP.
    pub apws: u8,
    /// Reserved.
    pub reserved23: [u8; 9],
}

layout!(PowerState, 32, {
    mp @ 0, reserved2 @ 2, flags @ 3, enlat @ 4, exlat @ 8, rrt @ 12, rrl @ 13, rwt @ 14,
    rwl @ 15, idlp @ 16, ips @ 18, reserved19 @ 19, actp @ 20, apws @ 22, reserved23 @ 23,
});

/// Byte 3 of a power state.
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
pub struct PowerStateFlags {
    /// MXPS: MP is in 0.1 mW, else in 10 mW.
    pub mxps: bool,
    /// NOPS: no I/O in this state.
    pub nops: bool,
    #[bits(6)]
    __: u8,
}

/// Identify Controller of the NVM Command Set, CNS 06h CSI 00h (NVM Command Set 1.0 section 4.1.5.2).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct IdentifyControllerNvm {
    /// VSL: most of Verify, as MDTS; 0 for no limit.
    pub vsl: u8,
    /// WZSL: most of Write Zeroes, as MDTS; 0 for no limit.
    pub wzsl: u8,
    /// WUSL: most of Write Uncorrectable, as MDTS; 0 for no limit.
    pub wusl: u8,
    /// DMRL: most ranges of Dataset Management; 0 for no limit.
    pub dmrl: u8,
    /// DMRSL: most logical blocks in one range; 0 for no limit.
    pub dmrsl: U32,
    /// DMSL: most logical blocks in all ranges; 0 for no limit.
    pub dmsl: U64,
    /// KPIOCAP: key per I/O capabilities (NVM Command Set 1.1).
    pub kpiocap: u8,
    /// WZDSL: most of Write Zeroes that deallocates, as MDTS (NVM Command Set 1.1).
    pub wzdsl: u8,
    /// AOCS: admin optional command support (NVM Command Set 1.1).
    pub aocs: U16,
    /// VER: version of the command set (NVM Command Set 1.1).
    pub ver: U32,
    /// Reserved.
    pub reserved24: [u8; 4072],
}

layout!(IdentifyControllerNvm, 4096, {
    vsl @ 0, wzsl @ 1, wusl @ 2, dmrl @ 3, dmrsl @ 4, dmsl @ 8, kpiocap @ 16, wzdsl @ 17,
    aocs @ 18, ver @ 20, reserved24 @ 24,
});

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identify::Sgls;

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
