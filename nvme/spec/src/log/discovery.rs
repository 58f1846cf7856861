//! The discovery log page, LID 70h (Base 2.0 section 5.16.1.23).

use bitfield_struct::bitfield;
use zerocopy::little_endian::{U16, U64};

use crate::nqn::{Nqn, NqnError, trimmed_ascii};

/// Size of the header and of each entry in bytes.
pub const DISCOVERY_ENTRY_BYTES: usize = 1024;

wire! {
    /// Header of the discovery log page; NUMREC entries ([`DiscoveryLogEntry`]) follow.
    pub struct DiscoveryLogHeader[1024] {
        /// GENCTR: Generation Counter, incremented with each change. If the value is the same before and
        /// after the read of the log page, the entries are consistent.
        genctr @ 0: U64,
        /// NUMREC: Number of Records, count of the entries.
        numrec @ 8: U64,
        /// RECFMT: Record Format, 0.
        recfmt @ 16: U16,
        reserved18 @ 18: [u8; 1006],
    }
}

impl DiscoveryLogHeader {
    /// Creates a header with RECFMT 0; `numrec` is the count of the entries.
    #[must_use]
    pub fn new(genctr: u64, numrec: u64) -> Self {
        Self { genctr: U64::new(genctr), numrec: U64::new(numrec), ..Self::default() }
    }
}

wire! {
    /// Entry of the discovery log page: one transport address of one subsystem.
    pub struct DiscoveryLogEntry[1024] {
        /// TRTYPE: Transport Type.
        trtype @ 0: TransportType,
        /// ADRFAM: Address Family.
        adrfam @ 1: AddressFamily,
        /// SUBTYPE: Subsystem Type.
        subtype @ 2: SubsystemType,
        /// TREQ: Transport Requirements; see [`Treq`].
        treq @ 3: u8,
        /// PORTID: Port ID, identifies a port of the subsystem.
        portid @ 4: U16,
        /// CNTLID: Controller ID; FFFFh for the dynamic controller model.
        cntlid @ 6: U16,
        /// ASQSZ: Admin Max SQ Size in entries, at least 32; *not* zero-based.
        asqsz @ 8: U16,
        /// EFLAGS: Entry Flags; see [`Eflags`].
        eflags @ 10: U16,
        reserved12 @ 12: [u8; 20],
        /// TRSVCID: Transport Service Identifier; the port number in decimal, ASCII padded with spaces.
        trsvcid @ 32: [u8; 32],
        reserved64 @ 64: [u8; 192],
        /// SUBNQN: NVM Subsystem NQN, NUL terminated.
        subnqn @ 256: [u8; 256],
        /// TRADDR: Transport Address, ASCII padded with spaces.
        traddr @ 512: [u8; 256],
        /// TSAS: Transport Specific Address Subtype; see [`TsasTcp`] and [`TsasRdma`].
        tsas @ 768: [u8; 256],
    }
}

impl DiscoveryLogEntry {
    /// Returns TRADDR: Transport Address, without trailing spaces and NULs (some targets pad with NULs).
    #[must_use]
    pub fn traddr(&self) -> &str {
        trimmed_ascii(&self.traddr)
    }

    /// Returns TRSVCID: Transport Service Identifier, without trailing spaces and NULs.
    #[must_use]
    pub fn trsvcid(&self) -> &str {
        trimmed_ascii(&self.trsvcid)
    }

    /// Returns SUBNQN: NVM Subsystem NQN.
    ///
    /// # Errors
    /// [`NqnError`] when the field does not contain a valid NQN.
    pub fn subnqn(&self) -> Result<Nqn, NqnError> {
        Nqn::from_field(&self.subnqn)
    }

    /// Returns TREQ: Transport Requirements.
    #[must_use]
    pub const fn treq(&self) -> Treq {
        Treq::from_bits(self.treq)
    }
}

open_enum! {
    /// TRTYPE: Transport Type.
    pub struct TransportType: u8 {
        RDMA = 1,
        FC = 2,
        TCP = 3,
        /// Intra-host transport; no network.
        LOOP = 254,
    }
}

open_enum! {
    /// ADRFAM: Address Family.
    pub struct AddressFamily: u8 {
        IPV4 = 1,
        IPV6 = 2,
        INFINIBAND = 3,
        FC = 4,
        /// Intra-host transport; no network.
        LOOP = 254,
    }
}

open_enum! {
    /// SUBTYPE: Subsystem Type.
    pub struct SubsystemType: u8 {
        /// Referral to another discovery service.
        REFERRAL = 1,
        /// NVM subsystem with I/O controllers.
        NVM = 2,
        /// The discovery service that returns the log page.
        CURRENT_DISCOVERY = 3,
    }
}

/// TREQ: Transport Requirements.
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
pub struct Treq {
    #[bits(2)]
    __: u8,
    /// Bit 2: the controller supports disabling SQ flow control.
    pub sq_flow_control_disable: bool,
    #[bits(5)]
    __: u8,
}

/// EFLAGS: Entry Flags.
#[bitfield(u16)]
#[derive(PartialEq, Eq)]
pub struct Eflags {
    /// DUPRETINFO: Duplicate Returned Information; the discovery service of this entry returns the same
    /// information as those of other entries with this flag.
    pub duplicate_information: bool,
    /// EPCSD: Explicit Persistent Connection Support for Discovery.
    pub persistent_connection: bool,
    #[bits(14)]
    __: u16,
}

wire_bits!(Eflags => U16);

open_enum! {
    /// SECTYPE: Security Type, the first byte of TSAS of NVMe/TCP (NVMe/TCP Transport 1.0 section 3.1.1).
    pub struct TsasTcp: u8 {
    }
}

wire! {
    /// TSAS of RDMA (NVMe RDMA Transport 1.0 section 3.1.1).
    pub struct TsasRdma[256] {
        /// RDMA_QPTYPE: RDMA QP Service Type; 1 is reliable connected, 2 reliable datagram.
        qptype @ 0: u8,
        /// RDMA_PRTYPE: RDMA Provider Type; 1 is not specified, 2 InfiniBand, 3 RoCE, 4 RoCE v2, 5 iWARP.
        prtype @ 1: u8,
        /// RDMA_CMS: RDMA Connection Management Service; 1 is RDMA CM with IP addresses.
        cms @ 2: u8,
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
