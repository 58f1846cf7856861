//! The discovery log page, LID 70h (Base 2.0 section 5.16.1.23).

use bitfield_struct::bitfield;
use zerocopy::little_endian::{U16, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::nqn::{Nqn, NqnError, trimmed_ascii};

/// Bytes of the header and of each entry.
pub const DISCOVERY_ENTRY_BYTES: usize = 1024;

/// Header of the discovery log page; NUMREC entries follow.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct DiscoveryLogHeader {
    /// GENCTR: grows with each change; the same at begin and end of reading means that what was read is
    /// whole.
    pub genctr: U64,
    /// NUMREC: how many entries follow.
    pub numrec: U64,
    /// RECFMT: 0.
    pub recfmt: U16,
    /// Reserved.
    pub reserved18: [u8; 1006],
}

layout!(DiscoveryLogHeader, 1024, { genctr @ 0, numrec @ 8, recfmt @ 16, reserved18 @ 18 });

impl DiscoveryLogHeader {
    /// A header.
    #[must_use]
    pub fn new(genctr: u64, numrec: u64) -> Self {
        Self { genctr: U64::new(genctr), numrec: U64::new(numrec), ..Self::default() }
    }
}

/// An entry of the discovery log page: one way to one subsystem.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct DiscoveryLogEntry {
    /// TRTYPE.
    pub trtype: TransportType,
    /// ADRFAM.
    pub adrfam: AddressFamily,
    /// SUBTYPE.
    pub subtype: SubsystemType,
    /// TREQ; see [`Treq`].
    pub treq: u8,
    /// PORTID: which port of the subsystem.
    pub portid: U16,
    /// CNTLID: FFFFh for the dynamic controller model.
    pub cntlid: U16,
    /// ASQSZ: most entries of the admin submission queue; *not* zero-based, at least 32.
    pub asqsz: U16,
    /// EFLAGS; see [`Eflags`].
    pub eflags: U16,
    /// Reserved.
    pub reserved12: [u8; 20],
    /// TRSVCID: the port as decimal digits, ASCII padded with spaces.
    pub trsvcid: [u8; 32],
    /// Reserved.
    pub reserved64: [u8; 192],
    /// SUBNQN, NUL terminated.
    pub subnqn: [u8; 256],
    /// TRADDR: the address, ASCII padded with spaces.
    pub traddr: [u8; 256],
    /// TSAS: specific to the transport; [`TsasTcp`], [`TsasRdma`].
    pub tsas: [u8; 256],
}

layout!(DiscoveryLogEntry, 1024, {
    trtype @ 0, adrfam @ 1, subtype @ 2, treq @ 3, portid @ 4, cntlid @ 6, asqsz @ 8, eflags @ 10,
    reserved12 @ 12, trsvcid @ 32, reserved64 @ 64, subnqn @ 256, traddr @ 512, tsas @ 768,
});

impl DiscoveryLogEntry {
    /// TRADDR without its padding (spaces, or NULs as some write it).
    #[must_use]
    pub fn traddr(&self) -> &str {
        trimmed_ascii(&self.traddr)
    }

    /// TRSVCID without its padding.
    #[must_use]
    pub fn trsvcid(&self) -> &str {
        trimmed_ascii(&self.trsvcid)
    }

    /// SUBNQN, checked.
    ///
    /// # Errors
    /// The field is not a name.
    pub fn subnqn(&self) -> Result<Nqn, NqnError> {
        Nqn::from_field(&self.subnqn)
    }

    /// TREQ.
    #[must_use]
    pub const fn treq(&self) -> Treq {
        Treq::from_bits(self.treq)
    }

    /// EFLAGS.
    #[must_use]
    pub fn eflags(&self) -> Eflags {
        self.eflags.into()
    }
}

open_enum! {
    /// TRTYPE: transport.
    pub struct TransportType: u8 {
        /// RDMA.
        RDMA = 1,
        /// Fibre Channel.
        FC = 2,
        /// TCP.
        TCP = 3,
        /// Within one host; not on a wire.
        LOOP = 254,
    }
}

open_enum! {
    /// ADRFAM: kind of address.
    pub struct AddressFamily: u8 {
        /// IPv4.
        IPV4 = 1,
        /// IPv6.
        IPV6 = 2,
        /// InfiniBand.
        INFINIBAND = 3,
        /// Fibre Channel.
        FC = 4,
        /// Within one host; not on a wire.
        LOOP = 254,
    }
}

open_enum! {
    /// SUBTYPE: what is found there.
    pub struct SubsystemType: u8 {
        /// Another discovery service: a referral.
        REFERRAL = 1,
        /// A subsystem with namespaces.
        NVM = 2,
        /// This discovery service itself.
        CURRENT_DISCOVERY = 3,
    }
}

/// TREQ: what the transport requires.
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
pub struct Treq {
    /// Secure channel: 0 not specified, 1 required, 2 not required.
    #[bits(2)]
    pub secure_channel: u8,
    /// The controller can do without SQ flow control.
    pub sq_flow_control_disable: bool,
    #[bits(5)]
    __: u8,
}

/// TREQ bit 2: the controller can do without SQ flow control.
pub const TREQ_SQ_FLOW_CONTROL_DISABLE: u8 = 1 << 2;
/// TREQ bits 1:0: a secure channel is required.
pub const TREQ_SECURE_CHANNEL_REQUIRED: u8 = 1;
/// TREQ bits 1:0: a secure channel is not required.
pub const TREQ_SECURE_CHANNEL_NOT_REQUIRED: u8 = 2;

/// EFLAGS: of an entry.
#[bitfield(u16)]
#[derive(PartialEq, Eq)]
pub struct Eflags {
    /// DUPRETINFO: what another port of this service returns is the same.
    pub duplicate_information: bool,
    /// EPCSD: explicit persistent connections to the discovery service are supported.
    pub persistent_connection: bool,
    /// NCC: there is no connectivity to a central discovery controller.
    pub no_cdc_connectivity: bool,
    #[bits(13)]
    __: u16,
}

/// EFLAGS bit 0: what another port of this service returns is the same.
pub const EFLAGS_DUPRETINFO: u16 = 1 << 0;
/// EFLAGS bit 1: persistent connections to the discovery service are supported.
pub const EFLAGS_EPCSD: u16 = 1 << 1;

wire_bits!(Eflags => U16);

open_enum! {
    /// SECTYPE, the first byte of TSAS of TCP (NVMe/TCP Transport 1.0 section 3.1.1).
    pub struct TsasTcp: u8 {
        /// No security.
        NONE = 0,
        /// TLS 1.2 and before.
        TLS_1_2 = 1,
        /// TLS 1.3 or later.
        TLS_1_3 = 2,
    }
}

/// TSAS of RDMA (NVMe/RDMA Transport 1.0 section 3.1.1).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct TsasRdma {
    /// RDMA_QPTYPE: 1 reliable connected, 2 reliable datagram.
    pub qptype: u8,
    /// RDMA_PRTYPE: 1 not specified, 2 InfiniBand, 3 RoCE, 4 RoCE v2, 5 iWARP.
    pub prtype: u8,
    /// RDMA_CMS: 1 RDMA CM with IP addresses.
    pub cms: u8,
    /// Reserved.
    pub reserved3: [u8; 5],
    /// RDMA_PKEY.
    pub pkey: U16,
    /// Reserved.
    pub reserved10: [u8; 246],
}

layout!(TsasRdma, 256, {
    qptype @ 0, prtype @ 1, cms @ 2, reserved3 @ 3, pkey @ 8, reserved10 @ 10,
});

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nqn::padded_ascii;

    #[test]
    fn an_entry_is_what_nvme_discover_prints() {
        let entry = DiscoveryLogEntry {
            trtype: TransportType::TCP,
            adrfam: AddressFamily::IPV4,
            subtype: SubsystemType::NVM,
            treq: Treq::new().with_sq_flow_control_disable(true).into_bits(),
            portid: U16::new(1),
            cntlid: U16::new(0xffff),
            asqsz: U16::new(32),
            eflags: Eflags::new().with_persistent_connection(true).into(),
            trsvcid: padded_ascii("4420"),
            subnqn: Nqn::discovery().to_field(),
            traddr: padded_ascii("127.0.0.1"),
            ..DiscoveryLogEntry::default()
        };
        assert_eq!(entry.as_bytes()[..12], [3, 1, 2, 4, 1, 0, 0xff, 0xff, 32, 0, 2, 0]);
        assert_eq!(entry.as_bytes()[32..38], *b"4420  ");
        assert_eq!((entry.traddr(), entry.trsvcid()), ("127.0.0.1", "4420"));
        assert!(entry.subnqn().unwrap().is_discovery());
        let back = DiscoveryLogEntry::read_from_bytes(entry.as_bytes()).unwrap();
        assert!(back.treq().sq_flow_control_disable() && back.eflags().persistent_connection());
    }

    #[test]
    fn the_header_counts_in_64_bits() {
        let header = DiscoveryLogHeader::new(0x0102, 2);
        assert_eq!(header.as_bytes()[..18], [2, 1, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    }
}
