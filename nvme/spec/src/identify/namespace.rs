//! Identify Namespace (CNS 00h, 05h, 08h) and the namespace identification descriptors (CNS 03h).

use bitfield_struct::bitfield;
use zerocopy::FromBytes;
use zerocopy::little_endian::{U16, U32, U64, U128};

wire! {
    /// Identify Namespace, CNS 00h (NVM Command Set 1.0 section 4.1.5.1).
    pub struct IdentifyNamespace[4096] {
        /// NSZE: size, in logical blocks.
        nsze @ 0: U64,
        /// NCAP: capacity, in logical blocks.
        ncap @ 8: U64,
        /// NUSE: use, in logical blocks.
        nuse @ 16: U64,
        /// NSFEAT; see [`Nsfeat`].
        nsfeat @ 24: u8,
        /// Reserved, or not used here.
        reserved25 @ 25: u8,
        /// FLBAS; see [`Flbas`].
        flbas @ 26: u8,
        /// Reserved, or not used here.
        reserved27 @ 27: [u8; 3],
        /// NMIC; see [`Nmic`].
        nmic @ 30: u8,
        /// Reserved, or not used here.
        reserved31 @ 31: [u8; 2],
        /// DLFEAT; see [`Dlfeat`].
        dlfeat @ 33: u8,
        /// NAWUN: atomic write, in logical blocks, one less than the count.
        nawun_z @ 34: U16,
        /// Reserved, or not used here.
        reserved36 @ 36: [u8; 4],
        /// NABSN: atomic boundary, in logical blocks, one less than the count; 0 for none.
        nabsn_z @ 40: U16,
        /// Reserved, or not used here.
        reserved42 @ 42: [u8; 4],
        /// NOIOB: best boundary of I/O, in logical blocks; 0 for none.
        noiob @ 46: U16,
        /// NVMCAP: capacity, in bytes.
        nvmcap @ 48: U128,
        /// NPWG: preferred granularity of writes, in logical blocks, one less than the count.
        npwg_z @ 64: U16,
        /// NPWA: preferred alignment of writes, in logical blocks, one less than the count.
        npwa_z @ 66: U16,
        /// NPDG: preferred granularity of deallocation, in logical blocks, one less than the count.
        npdg_z @ 68: U16,
        /// NPDA: preferred alignment of deallocation, in logical blocks, one less than the count.
        npda_z @ 70: U16,
        /// NOWS: best size of writes, in logical blocks, one less than the count.
        nows_z @ 72: U16,
        /// MSSRL: most logical blocks in one source range of Copy.
        mssrl @ 74: U16,
        /// MCL: most logical blocks in one Copy.
        mcl @ 76: U32,
        /// MSRC: most source ranges in one Copy, one less than the count.
        msrc_z @ 80: u8,
        /// Reserved, or not used here.
        reserved81 @ 81: [u8; 18],
        /// NSATTR; see [`Nsattr`].
        nsattr @ 99: u8,
        /// Reserved, or not used here.
        reserved100 @ 100: [u8; 4],
        /// NGUID, most significant byte first.
        nguid @ 104: [u8; 16],
        /// EUI64, most significant byte first.
        eui64 @ 120: [u8; 8],
        /// LBAF: the formats.
        lbaf @ 128: [LbaFormat; 64],
        /// Reserved, or not used here.
        reserved384 @ 384: [u8; 3712],
    }
}

impl IdentifyNamespace {
    /// The format in use.
    #[must_use]
    pub fn format(&self) -> LbaFormat {
        let index = Flbas::from_bits(self.flbas).format_index();
        self.lbaf.get(usize::from(index)).copied().unwrap_or_default()
    }

    /// Bytes of a logical block; `None` where the format names no size that is allowed (512 and more).
    #[must_use]
    pub fn block_bytes(&self) -> Option<u32> {
        let lbads = u32::from(self.format().lbads);
        if lbads < 9 { None } else { 1_u32.checked_shl(lbads) }
    }
}

wire! {
    /// An LBA format (NVM Command Set 1.0 figure "LBA Format Data Structure").
    pub struct LbaFormat[4] {
        /// MS: bytes of metadata of a logical block.
        ms @ 0: U16,
        /// LBADS: bytes of a logical block, as a power of two; 0 where there is no format here.
        lbads @ 2: u8,
        /// RP: relative performance in bits 1:0; 0 is best, 3 is degraded.
        rp @ 3: u8,
    }
}

/// NSFEAT: features of a namespace.
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
pub struct Nsfeat {
    /// THINP: NCAP may be less than NSZE.
    pub thin: bool,
    /// NSABP: NAWUN, NAWUPF, NACWU say more than AWUN, AWUPF, ACWU.
    pub atomics: bool,
    #[bits(2)]
    __: u8,
    /// OPTPERF bit 0: NPWG, NPWA, NPDG, NPDA, NOWS are defined.
    pub preferred_sizes: bool,
    #[bits(3)]
    __: u8,
}

/// FLBAS: the format in use.
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
pub struct Flbas {
    /// Bits 3:0 of the index.
    #[bits(4)]
    pub index_low: u8,
    __: bool,
    /// Bits 5:4 of the index.
    #[bits(2)]
    pub index_high: u8,
    __: bool,
}

impl Flbas {
    /// The index, 0 to 63.
    #[must_use]
    pub const fn format_index(self) -> u8 {
        self.index_high() << 4 | self.index_low()
    }
}

/// NMIC: how a namespace may be shared.
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
pub struct Nmic {
    /// The namespace may be attached to several controllers at a time.
    pub shared: bool,
    #[bits(7)]
    __: u8,
}

/// DLFEAT: what deallocated blocks are.
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
pub struct Dlfeat {
    /// What they read as: 0 not reported, 1 zeroes, 2 FFh.
    #[bits(3)]
    pub read_behavior: u8,
    /// Write Zeroes with DEAC deallocates.
    pub deallocate_in_write_zeroes: bool,
    #[bits(4)]
    __: u8,
}

impl Dlfeat {
    /// `read_behavior`: not reported.
    pub const READS_NOT_REPORTED: u8 = 0;
    /// `read_behavior`: all bytes 00h.
    pub const READS_ZEROES: u8 = 1;
    /// `read_behavior`: all bytes FFh.
    pub const READS_ONES: u8 = 2;
}

/// NSATTR: attributes of a namespace.
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
pub struct Nsattr {
    /// The namespace is write protected.
    pub write_protected: bool,
    #[bits(7)]
    __: u8,
}

wire! {
    /// Identify Namespace independent of the command set, CNS 08h (Base 2.0 figure "I/O Command Set
    /// Independent Identify Namespace Data Structure").
    pub struct IdentifyNamespaceIndependent[4096] {
        /// Reserved, or not used here.
        reserved0 @ 0: u8,
        /// NMIC; see [`Nmic`].
        nmic @ 1: u8,
        /// Reserved, or not used here.
        reserved2 @ 2: [u8; 6],
        /// NSATTR; see [`Nsattr`].
        nsattr @ 8: u8,
        /// Reserved, or not used here.
        reserved9 @ 9: [u8; 5],
        /// NSTAT; see [`Nstat`].
        nstat @ 14: u8,
        /// Reserved, or not used here.
        reserved15 @ 15: [u8; 4081],
    }
}

/// NSTAT: status of a namespace.
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
pub struct Nstat {
    /// NRDY: the namespace is ready.
    pub ready: bool,
    #[bits(7)]
    __: u8,
}

/// Bytes of an EUI64 descriptor's identifier.
pub const EUI64_BYTES: u8 = 8;
/// Bytes of an NGUID descriptor's identifier.
pub const NGUID_BYTES: u8 = 16;
/// Bytes of a UUID descriptor's identifier.
pub const UUID_BYTES: u8 = 16;
/// Bytes of a CSI descriptor's identifier.
pub const CSI_BYTES: u8 = 1;

open_enum! {
    /// NIDT: type of a namespace identifier (Base 2.0 figure "Namespace Identification Descriptor").
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
    /// Header of a namespace identification descriptor; NIDL bytes of identifier follow (Base 2.0 figure
    /// "Namespace Identification Descriptor", CNS 03h). A descriptor with NIDL 0 ends the list.
    pub struct NamespaceDescriptor[4] {
        /// NIDT.
        nidt @ 0: NamespaceDescriptorType,
        /// NIDL: bytes that follow.
        nidl @ 1: u8,
        /// Reserved.
        reserved2 @ 2: [u8; 2],
    }
}

impl NamespaceDescriptor {
    /// A header.
    #[must_use]
    pub fn new(nidt: NamespaceDescriptorType, nidl: u8) -> Self {
        Self { nidt, nidl, ..Self::default() }
    }

    /// The descriptors in the data of Identify CNS 03h, up to the one with NIDL 0 or the first that does
    /// not fit.
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
