//! The discovery log page, LID 70h (Base 2.0 section 5.16.1.23).

use bitfield_struct::bitfield;
use zerocopy::little_endian::{U16, U64};

use crate::nqn::{Nqn, NqnError, trimmed_ascii};

/// Bytes of the header and of each entry.
pub const DISCOVERY_ENTRY_BYTES: usize = 1024;

wire! {
    /// Header of the discovery log page; NUMREC entries follow.
    pub struct DiscoveryLogHeader[1024] {
        /// GENCTR: grows with each change; the same at begin and end of reading means that what was read is
        /// whole.
        genctr @ 0: U64,
        /// NUMREC: how many entries follow.
        numrec @ 8: U64,
        /// RECFMT: 0.
        recfmt @ 16: U16,
        /// Reserved.
        reserved18 @ 18: [u8; 1006],
    }
}

impl DiscoveryLogHeader {
    /// A header.
    #[must_use]
    pub fn new(genctr: u64, numrec: u64) -> Self {
        Self { genctr: U64::new(genctr), numrec: U64::new(numrec), ..Self::default() }
    }
}

wire! {
    /// An entry of the discovery log page: one way to one subsystem.
    pub struct DiscoveryLogEntry[1024] {
        /// TRTYPE.
        trtype @ 0: TransportType,
        /// ADRFAM.
        adrfam @ 1: AddressFamily,
        /// SUBTYPE.
        subtype @ 2: SubsystemType,
        /// TREQ; see [`Treq`].
        treq @ 3: u8,
        /// PORTID: which port of the subsystem.
        portid @ 4: U16,
        /// CNTLID: FFFFh for the dynamic controller model.
        cntlid @ 6: U16,
        /// ASQSZ: most entries of the admin submission queue; *not* zero-based, at least 32.
        asqsz @ 8: U16,
        /// EFLAGS; see [`Eflags`].
        eflags @ 10: U16,
        /// Reserved.
        reserved12 @ 12: [u8; 20],
        /// TRSVCID: the port as decimal digits, ASCII padded with spaces.
        trsvcid @ 32: [u8; 32],
        /// Reserved.
        reserved64 @ 64: [u8; 192],
        /// SUBNQN, NUL terminated.
        subnqn @ 256: [u8; 256],
        /// TRADDR: the address, ASCII padded with spaces.
        traddr @ 512: [u8; 256],
        /// TSAS: specific to the transport; [`TsasTcp`], [`TsasRdma`].
        tsas @ 768: [u8; 256],
    }
}

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
}

open_enum! {
    /// TRTYPE: transport, by the name that hosts are shown.
    pub struct TransportType: u8 {
        RDMA = 1,
        FC = 2,
        TCP = 3,
        /// Within one host; not on a wire.
        LOOP = 254,
    }
}

open_enum! {
    /// ADRFAM: kind of address, by the name that hosts are shown.
    pub struct AddressFamily: u8 {
        IPV4 = 1,
        IPV6 = 2,
        INFINIBAND = 3,
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
    #[bits(2)]
    __: u8,
    /// The controller can do without SQ flow control.
    pub sq_flow_control_disable: bool,
    #[bits(5)]
    __: u8,
}

/// EFLAGS: of an entry.
#[bitfield(u16)]
#[derive(PartialEq, Eq)]
pub struct Eflags {
    /// DUPRETINFO: what another port of this service returns is the same.
    pub duplicate_information: bool,
    /// EPCSD: explicit persistent connections to the discovery service are supported.
    pub persistent_connection: bool,
    #[bits(14)]
    __: u16,
}

wire_bits!(Eflags => U16);

open_enum! {
    /// SECTYPE, the first byte of TSAS of TCP (NVMe/TCP Transport 1.0 section 3.1.1).
    pub struct TsasTcp: u8 {
    }
}

wire! {
    /// TSAS of RDMA (NVMe/RDMA Transport 1.0 section 3.1.1).
    pub struct TsasRdma[256] {
        /// RDMA_QPTYPE: 1 reliable connected, 2 reliable datagram.
        qptype @ 0: u8,
        /// RDMA_PRTYPE: 1 not specified, 2 InfiniBand, 3 RoCE, 4 RoCE v2, 5 iWARP.
        prtype @ 1: u8,
        /// RDMA_CMS: 1 RDMA CM with IP addresses.
        cms @ 2: u8,
        /// Reserved, or not used here.
        reserved3 @ 3: [u8; 253],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nqn::padded_ascii;
    use zerocopy::{FromBytes, IntoBytes};

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
        assert!(back.treq().sq_flow_control_disable() && Eflags::from(back.eflags).persistent_connection());
    }

    #[test]
    fn the_header_counts_in_64_bits() {
        let header = DiscoveryLogHeader::new(0x0102, 2);
        assert_eq!(header.as_bytes()[..18], [2, 1, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    }
}
