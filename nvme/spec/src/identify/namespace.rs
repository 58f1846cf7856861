//! Identify Namespace (CNS 00h, 08h) and the namespace identification descriptors (CNS 03h).

use bitfield_struct::bitfield;
use zerocopy::FromBytes;
use zerocopy::little_endian::{U16, U32, U64, U128};

wire! {
    /// Identify Namespace, CNS 00h (NVM Command Set 1.0 section 4.1.5.1).
    pub struct IdentifyNamespace[4096] {
        /// NSZE: Namespace Size in logical blocks.
        nsze @ 0: U64,
        /// NCAP: Namespace Capacity in logical blocks.
        ncap @ 8: U64,
        /// NUSE: Namespace Utilization in logical blocks.
        nuse @ 16: U64,
        /// NSFEAT; see [`Nsfeat`].
        nsfeat @ 24: u8,
        reserved25 @ 25: u8,
        /// FLBAS; see [`Flbas`].
        flbas @ 26: u8,
        reserved27 @ 27: [u8; 3],
        /// NMIC; see [`Nmic`].
        nmic @ 30: u8,
        reserved31 @ 31: [u8; 2],
        /// DLFEAT; see [`Dlfeat`].
        dlfeat @ 33: u8,
        /// NAWUN: Namespace Atomic Write Unit Normal in logical blocks, zero-based.
        nawun_z @ 34: U16,
        reserved36 @ 36: [u8; 4],
        /// NABSN: Namespace Atomic Boundary Size Normal in logical blocks, zero-based; 0 is no boundary.
        nabsn_z @ 40: U16,
        reserved42 @ 42: [u8; 4],
        /// NOIOB: Namespace Optimal I/O Boundary in logical blocks; 0 is not reported.
        noiob @ 46: U16,
        /// NVMCAP: NVM Capacity in bytes.
        nvmcap @ 48: U128,
        /// NPWG: Namespace Preferred Write Granularity in logical blocks, zero-based.
        npwg_z @ 64: U16,
        /// NPWA: Namespace Preferred Write Alignment in logical blocks, zero-based.
        npwa_z @ 66: U16,
        /// NPDG: Namespace Preferred Deallocate Granularity in logical blocks, zero-based.
        npdg_z @ 68: U16,
        /// NPDA: Namespace Preferred Deallocate Alignment in logical blocks, zero-based.
        npda_z @ 70: U16,
        /// NOWS: Namespace Optimal Write Size in logical blocks, zero-based.
        nows_z @ 72: U16,
        /// MSSRL: Maximum Single Source Range Length of Copy in logical blocks.
        mssrl @ 74: U16,
        /// MCL: Maximum Copy Length in logical blocks.
        mcl @ 76: U32,
        /// MSRC: Maximum Source Range Count of Copy, zero-based.
        msrc_z @ 80: u8,
        reserved81 @ 81: [u8; 18],
        /// NSATTR; see [`Nsattr`].
        nsattr @ 99: u8,
        reserved100 @ 100: [u8; 4],
        /// NGUID: Namespace Globally Unique Identifier, big-endian.
        nguid @ 104: [u8; 16],
        /// EUI64: IEEE Extended Unique Identifier, big-endian.
        eui64 @ 120: [u8; 8],
        /// LBAF: LBA Format Support, selected by [`Flbas::format_index`].
        lbaf @ 128: [LbaFormat; 64],
        reserved384 @ 384: [u8; 3712],
    }
}

impl IdentifyNamespace {
    /// Returns the LBA format that FLBAS selects.
    #[must_use]
    pub fn format(&self) -> LbaFormat {
        let index = Flbas::from_bits(self.flbas).format_index();
        self.lbaf.get(usize::from(index)).copied().unwrap_or_default()
    }

    /// Returns the size of a logical block in bytes; `None` unless LBADS is 9 to 31 (512 bytes to 2 GiB).
    #[must_use]
    pub fn block_bytes(&self) -> Option<u32> {
        let lbads = u32::from(self.format().lbads);
        if lbads < 9 { None } else { 1_u32.checked_shl(lbads) }
    }
}

wire! {
    /// LBA Format (NVM Command Set 1.0 figure "LBA Format Data Structure").
    pub struct LbaFormat[4] {
        /// MS: Metadata Size per logical block in bytes.
        ms @ 0: U16,
        /// LBADS: LBA Data Size, `1 << LBADS` bytes; 0 if the format is not available.
        lbads @ 2: u8,
        /// RP: Relative Performance in bits 1:0; 0 is best, 3 is degraded.
        rp @ 3: u8,
    }
}

/// NSFEAT: Namespace Features.
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
pub struct Nsfeat {
    /// THINP: Thin Provisioning; NCAP may be less than NSZE.
    pub thin: bool,
    /// NSABP: NAWUN, NAWUPF and NACWU are defined and replace AWUN, AWUPF and ACWU.
    pub atomics: bool,
    #[bits(2)]
    __: u8,
    /// OPTPERF bit 0: NPWG, NPWA, NPDG, NPDA, NOWS are defined.
    pub preferred_sizes: bool,
    #[bits(3)]
    __: u8,
}

/// FLBAS: Formatted LBA Size.
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
pub struct Flbas {
    /// Bits 3:0 of the LBA format index.
    #[bits(4)]
    pub index_low: u8,
    __: bool,
    /// Bits 5:4 of the LBA format index.
    #[bits(2)]
    pub index_high: u8,
    __: bool,
}

impl Flbas {
    /// Returns the index in LBAF of the format in use, 0 to 63.
    #[must_use]
    pub const fn format_index(self) -> u8 {
        self.index_high() << 4 | self.index_low()
    }
}

/// NMIC: Namespace Multi-path I/O and Namespace Sharing Capabilities.
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
pub struct Nmic {
    /// Bit 0: the namespace may be attached to two or more controllers at the same time.
    pub shared: bool,
    #[bits(7)]
    __: u8,
}

/// DLFEAT: Deallocate Logical Block Features.
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
pub struct Dlfeat {
    /// Bits 2:0: content of deallocated logical blocks; 0 is not reported, 1 is 00h, 2 is FFh.
    #[bits(3)]
    pub read_behavior: u8,
    /// Bit 3: Write Zeroes supports DEAC.
    pub deallocate_in_write_zeroes: bool,
    #[bits(4)]
    __: u8,
}

impl Dlfeat {
    /// Value of `read_behavior`: not reported.
    pub const READS_NOT_REPORTED: u8 = 0;
    /// Value of `read_behavior`: all bytes are 00h.
    pub const READS_ZEROES: u8 = 1;
    /// Value of `read_behavior`: all bytes are FFh.
    pub const READS_ONES: u8 = 2;
}

/// NSATTR: Namespace Attributes.
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
pub struct Nsattr {
    /// Bit 0: the namespace is write protected.
    pub write_protected: bool,
    #[bits(7)]
    __: u8,
}

wire! {
    /// Identify Namespace independent of the command set, CNS 08h (Base 2.0 figure "I/O Command Set
    /// Independent Identify Namespace Data Structure").
    pub struct IdentifyNamespaceIndependent[4096] {
        reserved0 @ 0: u8,
        /// NMIC; see [`Nmic`].
        nmic @ 1: u8,
        reserved2 @ 2: [u8; 6],
        /// NSATTR; see [`Nsattr`].
        nsattr @ 8: u8,
        reserved9 @ 9: [u8; 5],
        /// NSTAT; see [`Nstat`].
        nstat @ 14: u8,
        reserved15 @ 15: [u8; 4081],
    }
}

/// NSTAT: Namespace Status.
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
pub struct Nstat {
    /// NRDY: Namespace Ready.
    pub ready: bool,
    #[bits(7)]
    __: u8,
}

/// NIDL of an EUI64 descriptor, in bytes.
pub const EUI64_BYTES: u8 = 8;
/// NIDL of an NGUID descriptor, in bytes.
pub const NGUID_BYTES: u8 = 16;
/// NIDL of a UUID descriptor, in bytes.
pub const UUID_BYTES: u8 = 16;
/// NIDL of a CSI descriptor, in bytes.
pub const CSI_BYTES: u8 = 1;

open_enum! {
    /// NIDT: Namespace Identifier Type (Base 2.0 figure "Namespace Identification Descriptor").
    pub struct NamespaceDescriptorType: u8 {
        /// IEEE Extended Unique Identifier, 8 bytes.
        EUI64 = 1,
        /// Namespace Globally Unique Identifier, 16 bytes.
        NGUID = 2,
        /// UUID, 16 bytes.
        UUID = 3,
        /// Command Set Identifier, 1 byte.
        CSI = 4,
    }
}

wire! {
    /// Header of a Namespace Identification Descriptor (CNS 03h; Base 2.0 figure "Namespace Identification
    /// Descriptor"). NIDL bytes of identifier follow; a descriptor with NIDL 0 ends the list.
    pub struct NamespaceDescriptor[4] {
        /// NIDT: Namespace Identifier Type.
        nidt @ 0: NamespaceDescriptorType,
        /// NIDL: Namespace Identifier Length, bytes of the identifier after the header.
        nidl @ 1: u8,
        reserved2 @ 2: [u8; 2],
    }
}

impl NamespaceDescriptor {
    /// Creates a header; the caller appends `nidl` bytes of identifier.
    #[must_use]
    pub fn new(nidt: NamespaceDescriptorType, nidl: u8) -> Self {
        Self { nidt, nidl, ..Self::default() }
    }

    /// Returns the type and identifier of each descriptor in the data of Identify CNS 03h. Ends at NIDL 0 or
    /// at a descriptor that exceeds `data`.
    pub fn iter(data: &[u8]) -> impl Iterator<Item = (NamespaceDescriptorType, &[u8])> {
        let mut rest = data;
        core::iter::from_fn(move || {
            let (header, after) = Self::read_from_prefix(rest).ok()?;
            let (identifier, after) = after.split_at_checked(usize::from(header.nidl))?;
            rest = after;
            (header.nidl != 0).then_some((header.nidt, identifier))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::IntoBytes;

    #[test]
    fn the_format_in_use_is_found_by_all_six_bits() {
        let mut id = IdentifyNamespace::default();
        assert_eq!(id.block_bytes(), None);
        id.flbas = Flbas::new().with_index_low(3).with_index_high(2).into_bits();
        assert_eq!(id.flbas, 0x43);
        id.lbaf[35] = LbaFormat { ms: U16::new(0), lbads: 12, rp: 0 };
        assert_eq!(id.block_bytes(), Some(4096));
        assert_eq!(id.as_bytes()[128 + 35 * 4 + 2], 12);
    }

    #[test]
    fn descriptors_are_walked_to_their_end() {
        let mut data = [0; 64];
        data[..12].copy_from_slice(&[1, 8, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]);
        data[12..17].copy_from_slice(&[4, 1, 0, 0, 9]);
        let mut iter = NamespaceDescriptor::iter(&data);
        assert_eq!(iter.next(), Some((NamespaceDescriptorType::EUI64, &[1, 2, 3, 4, 5, 6, 7, 8][..])));
        assert_eq!(iter.next(), Some((NamespaceDescriptorType::CSI, &[9][..])));
        assert_eq!(iter.next(), None);
        assert_eq!(NamespaceDescriptor::iter(&[3, 16, 0, 0, 1]).count(), 0);
        assert_eq!(
            NamespaceDescriptor::new(NamespaceDescriptorType::UUID, UUID_BYTES).as_bytes(),
            [3, 16, 0, 0]
        );
    }

    #[test]
    fn namespace_bits_have_the_values_that_nvme_cli_decodes() {
        assert_eq!(Dlfeat::new().with_read_behavior(1).with_deallocate_in_write_zeroes(true).into_bits(), 9);
        assert_eq!(Nsfeat::new().with_preferred_sizes(true).with_thin(true).into_bits(), 0x11);
        assert_eq!(
            (Nmic::new().with_shared(true).into_bits(), Nstat::new().with_ready(true).into_bits()),
            (1, 1)
        );
    }
}
