//! Identify Namespace (CNS 00h, 05h, 08h) and the namespace identification descriptors (CNS 03h).

use bitfield_struct::bitfield;
use zerocopy::little_endian::{U16, U32, U64, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Identify Namespace, CNS 00h (NVM Command Set 1.0 section 4.1.5.1).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct IdentifyNamespace {
    /// NSZE: size, in logical blocks.
    pub nsze: U64,
    /// NCAP: capacity, in logical blocks.
    pub ncap: U64,
    /// NUSE: use, in logical blocks.
    pub nuse: U64,
    /// NSFEAT; see [`Nsfeat`].
    pub nsfeat: u8,
    /// NLBAF: how many of LBAF are formats, one less than the count.
    pub nlbaf_z: u8,
    /// FLBAS; see [`Flbas`].
    pub flbas: u8,
    /// MC: metadata capabilities.
    pub mc: u8,
    /// DPC: protection capabilities.
    pub dpc: u8,
    /// DPS: protection settings.
    pub dps: u8,
    /// NMIC; see [`Nmic`].
    pub nmic: u8,
    /// RESCAP: reservation capabilities.
    pub rescap: u8,
    /// FPI: format progress.
    pub fpi: u8,
    /// DLFEAT; see [`Dlfeat`].
    pub dlfeat: u8,
    /// NAWUN: atomic write, in logical blocks, one less than the count.
    pub nawun_z: U16,
    /// NAWUPF: atomic write at power fail, in logical blocks, one less than the count.
    pub nawupf_z: U16,
    /// NACWU: atomic compare and write, in logical blocks, one less than the count.
    pub nacwu_z: U16,
    /// NABSN: atomic boundary, in logical blocks, one less than the count; 0 for none.
    pub nabsn_z: U16,
    /// NABO: LBA of the first atomic boundary.
    pub nabo: U16,
    /// NABSPF: atomic boundary at power fail, one less than the count; 0 for none.
    pub nabspf_z: U16,
    /// NOIOB: best boundary of I/O, in logical blocks; 0 for none.
    pub noiob: U16,
    /// NVMCAP: capacity, in bytes.
    pub nvmcap: U128,
    /// NPWG: preferred granularity of writes, in logical blocks, one less than the count.
    pub npwg_z: U16,
    /// NPWA: preferred alignment of writes, in logical blocks, one less than the count.
    pub npwa_z: U16,
    /// NPDG: preferred granularity of deallocation, in logical blocks, one less than the count.
    pub npdg_z: U16,
    /// NPDA: preferred alignment of deallocation, in logical blocks, one less than the count.
    pub npda_z: U16,
    /// NOWS: best size of writes, in logical blocks, one less than the count.
    pub nows_z: U16,
    /// MSSRL: most logical blocks in one source range of Copy.
    pub mssrl: U16,
    /// MCL: most logical blocks in one Copy.
    pub mcl: U32,
    /// MSRC: most source ranges in one Copy, one less than the count.
    pub msrc_z: u8,
    /// KPIOS: key per I/O status (NVM Command Set 1.1).
    pub kpios: u8,
    /// NULBAF: formats with attributes of their own.
    pub nulbaf: u8,
    /// Reserved.
    pub reserved83: u8,
    /// KPIODAAG: key per I/O alignment and granularity (NVM Command Set 1.1).
    pub kpiodaag: U32,
    /// Reserved.
    pub reserved88: [u8; 4],
    /// ANAGRPID: ANA group.
    pub anagrpid: U32,
    /// Reserved.
    pub reserved96: [u8; 3],
    /// NSATTR; see [`Nsattr`].
    pub nsattr: u8,
    /// NVMSETID: NVM set.
    pub nvmsetid: U16,
    /// ENDGID: endurance group.
    pub endgid: U16,
    /// NGUID, most significant byte first.
    pub nguid: [u8; 16],
    /// EUI64, most significant byte first.
    pub eui64: [u8; 8],
    /// LBAF: the formats.
    pub lbaf: [LbaFormat; 64],
    /// Vendor specific.
    pub vs: [u8; 3712],
}

layout!(IdentifyNamespace, 4096, {
    nsze @ 0, ncap @ 8, nuse @ 16, nsfeat @ 24, nlbaf_z @ 25, flbas @ 26, mc @ 27, dpc @ 28,
    dps @ 29, nmic @ 30, rescap @ 31, fpi @ 32, dlfeat @ 33, nawun_z @ 34, nawupf_z @ 36,
    nacwu_z @ 38, nabsn_z @ 40, nabo @ 42, nabspf_z @ 44, noiob @ 46, nvmcap @ 48, npwg_z @ 64,
    npwa_z @ 66, npdg_z @ 68, npda_z @ 70, nows_z @ 72, mssrl @ 74, mcl @ 76, msrc_z @ 80,
    kpios @ 81, nulbaf @ 82, reserved83 @ 83, kpiodaag @ 84, reserved88 @ 88, anagrpid @ 92,
    reserved96 @ 96, nsattr @ 99, nvmsetid @ 100, endgid @ 102, nguid @ 104, eui64 @ 120,
    lbaf @ 128, vs @ 384,
});

impl IdentifyNamespace {
    /// NLBAF with its zero base taken away: how many formats.
    #[must_use]
    pub fn formats(&self) -> u32 {
        u32::from(self.nlbaf_z) + 1
    }

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

/// An LBA format (NVM Command Set 1.0 figure "LBA Format Data Structure").
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct LbaFormat {
    /// MS: bytes of metadata of a logical block.
    pub ms: U16,
    /// LBADS: bytes of a logical block, as a power of two; 0 where there is no format here.
    pub lbads: u8,
    /// RP: relative performance in bits 1:0; 0 is best, 3 is degraded.
    pub rp: u8,
}

layout!(LbaFormat, 4, { ms @ 0, lbads @ 2, rp @ 3 });

/// NSFEAT: features of a namespace.
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
pub struct Nsfeat {
    /// THINP: NCAP may be less than NSZE.
    pub thin: bool,
    /// NSABP: NAWUN, NAWUPF, NACWU say more than AWUN, AWUPF, ACWU.
    pub atomics: bool,
    /// DAE: reading deallocated blocks may be an error.
    pub deallocated_error: bool,
    /// UIDREUSE: NGUID and EUI64 are never used again.
    pub id_not_reused: bool,
    /// OPTPERF bit 0: NPWG, NPWA, NPDG, NPDA, NOWS are defined.
    pub preferred_sizes: bool,
    /// OPTPERF bit 1: NPDGL and NPDAL are defined (NVM Command Set 1.1).
    pub preferred_sizes_large: bool,
    /// MAM: multiple atomicity mode (NVM Command Set 1.1).
    pub multiple_atomicity: bool,
    /// OPTRPERF: NPRG, NPRA, NORS are defined (NVM Command Set 1.1).
    pub preferred_reads: bool,
}

/// FLBAS: the format in use.
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
pub struct Flbas {
    /// Bits 3:0 of the index.
    #[bits(4)]
    pub index_low: u8,
    /// Metadata is at the end of the data, else in a buffer of its own.
    pub metadata_extended: bool,
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
    /// The namespace is dispersed.
    pub dispersed: bool,
    #[bits(6)]
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
    /// The guard of deallocated blocks is the CRC of what they read as.
    pub guard_crc: bool,
    #[bits(3)]
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

/// Identify Namespace of the NVM Command Set, CNS 05h CSI 00h (NVM Command Set 1.0 section 4.1.5.3).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct IdentifyNamespaceNvm {
    /// LBSTM: logical block storage tag mask.
    pub lbstm: U64,
    /// PIC: protection information capabilities.
    pub pic: u8,
    /// PIFA: protection information format attributes (NVM Command Set 1.1).
    pub pifa: u8,
    /// Reserved.
    pub reserved10: [u8; 2],
    /// ELBAF: more about each format; see [`ElbaFormat`].
    pub elbaf: [U32; 64],
    /// NPDGL: preferred granularity of deallocation, large (NVM Command Set 1.1).
    pub npdgl: U32,
    /// NPRG: preferred granularity of reads (NVM Command Set 1.1).
    pub nprg: U32,
    /// NPRA: preferred alignment of reads (NVM Command Set 1.1).
    pub npra: U32,
    /// NORS: best size of reads (NVM Command Set 1.1).
    pub nors: U32,
    /// NPDAL: preferred alignment of deallocation, large (NVM Command Set 1.1).
    pub npdal: U32,
    /// LBAPSS: placement shard size (NVM Command Set 1.1).
    pub lbapss: U32,
    /// TLBAAG: tracked allocation granularity (NVM Command Set 1.1).
    pub tlbaag: U32,
    /// Reserved.
    pub reserved296: [u8; 3800],
}

layout!(IdentifyNamespaceNvm, 4096, {
    lbstm @ 0, pic @ 8, pifa @ 9, reserved10 @ 10, elbaf @ 12, npdgl @ 268, nprg @ 272,
    npra @ 276, nors @ 280, npdal @ 284, lbapss @ 288, tlbaag @ 292, reserved296 @ 296,
});

/// An entry of ELBAF (NVM Command Set 1.0 figure "Extended LBA Format Data Structure").
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct ElbaFormat {
    /// STS: bits of the storage tag.
    #[bits(7)]
    pub sts: u8,
    /// PIF: 0 is 16-bit guard, 1 is 32-bit, 2 is 64-bit, 3 is that of QPIF.
    #[bits(2)]
    pub pif: u8,
    /// QPIF: qualified protection information format (NVM Command Set 1.1).
    #[bits(4)]
    pub qpif: u8,
    #[bits(19)]
    __: u32,
}

wire_bits!(ElbaFormat => U32);

/// Identify Namespace independent of the command set, CNS 08h (Base 2.0 figure "I/O Command Set Independent
/// Identify Namespace Data Structure").
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct IdentifyNamespaceIndependent {
    /// NSFEAT; see [`NsfeatIndependent`].
    pub nsfeat: u8,
    /// NMIC; see [`Nmic`].
    pub nmic: u8,
    /// RESCAP: reservation capabilities.
    pub rescap: u8,
    /// FPI: format progress.
    pub fpi: u8,
    /// ANAGRPID: ANA group.
    pub anagrpid: U32,
    /// NSATTR; see [`Nsattr`].
    pub nsattr: u8,
    /// Reserved.
    pub reserved9: u8,
    /// NVMSETID: NVM set.
    pub nvmsetid: U16,
    /// ENDGID: endurance group.
    pub endgid: U16,
    /// NSTAT; see [`Nstat`].
    pub nstat: u8,
    /// KPIOS: key per I/O status (Base 2.1).
    pub kpios: u8,
    /// MAXKT: largest key tag (Base 2.1).
    pub maxkt: U16,
    /// Reserved.
    pub reserved18: [u8; 2],
    /// RGRPID: reachability group (Base 2.1).
    pub rgrpid: U32,
    /// Reserved.
    pub reserved24: [u8; 4072],
}

layout!(IdentifyNamespaceIndependent, 4096, {
    nsfeat @ 0, nmic @ 1, rescap @ 2, fpi @ 3, anagrpid @ 4, nsattr @ 8, reserved9 @ 9,
    nvmsetid @ 10, endgid @ 12, nstat @ 14, kpios @ 15, maxkt @ 16, reserved18 @ 18, rgrpid @ 20,
    reserved24 @ 24,
});

/// NSFEAT of [`IdentifyNamespaceIndependent`]: features of a namespace of any command set.
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
pub struct NsfeatIndependent {
    #[bits(3)]
    __: u8,
    /// UIDREUSE: NGUID and EUI64 are never used again.
    pub id_not_reused: bool,
    /// RMEDIA: the medium rotates.
    pub rotational: bool,
    /// VWCNP: this namespace has no volatile write cache (Base 2.1).
    pub no_write_cache: bool,
    #[bits(2)]
    __: u8,
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

/// Header of a namespace identification descriptor; NIDL bytes of identifier follow (Base 2.0 figure
/// "Namespace Identification Descriptor", CNS 03h). A descriptor with NIDL 0 ends the list.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
pub struct NamespaceDescriptor {
    /// NIDT.
    pub nidt: NamespaceDescriptorType,
    /// NIDL: bytes that follow.
    pub nidl: u8,
    /// Reserved.
    pub reserved2: [u8; 2],
}

layout!(NamespaceDescriptor, 4, { nidt @ 0, nidl @ 1, reserved2 @ 2 });

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

    #[test]
    fn the_format_in_use_is_found_by_all_six_bits() {
        let mut id = IdentifyNamespace::default();
        assert_eq!(id.block_bytes(), None);
        id.flbas = Flbas::new().with_index_low(3).with_index_high(2).into_bits();
        assert_eq!(id.flbas, 0x43);
        id.lbaf[35] = LbaFormat { ms: U16::new(0), lbads: 12, rp: 0 };
        assert_eq!(id.block_bytes(), Some(4096));
        assert_eq!(id.as_bytes()[128 + 35 * 4 + 2], 12);
        assert_eq!(id.formats(), 1);
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
        assert_eq!(ElbaFormat::from_bits(0x0000_0490).pif(), 1);
        assert_eq!(
            (Nmic::new().with_shared(true).into_bits(), Nstat::new().with_ready(true).into_bits()),
            (1, 1)
        );
    }
}
