//! The submission queue entry and its data pointer (Base 2.0 sections 3.3.3.1 and 4.1).
//!
//! The command dwords 10 to 15 have a meaning for each command; `io`, `admin`, `log`, `feature` and
//! `fabrics` give the views and the builders. Builders name SGLs as the data pointer (PSDT 01b), as Fabrics
//! requires of every command, also one without data; [`Sqe::with_prp`] turns an entry into a PCIe one.

use bitfield_struct::bitfield;
use zerocopy::little_endian::{U16, U32, U64};

use crate::opcode::{AdminOpcode, FABRICS, FabricsType, IoOpcode};

/// Bytes of a submission queue entry, CC.IOSQES 6 (Base 2.0 section 3.3.3.1).
pub const SQE_BYTES: usize = 64;

/// NSID that names every namespace (Base 2.0 section 3.2.1.2).
pub const NSID_ALL: u32 = 0xffff_ffff;

wire! {
    /// A submission queue entry (Base 2.0 figure "Common Command Format").
    pub struct Sqe[SQE_BYTES] {
        /// OPC; read it as [`AdminOpcode`] or [`IoOpcode`] according to the queue.
        opcode @ 0: u8,
        /// FUSE in bits 1:0, PSDT in bits 7:6.
        flags @ 1: u8,
        /// CID: the host's name for this command, given back in the completion.
        cid @ 2: U16,
        /// NSID; the low byte of it is FCTYPE in a Fabrics command.
        nsid @ 4: U32,
        /// Command dword 2.
        cdw2 @ 8: U32,
        /// Command dword 3.
        cdw3 @ 12: U32,
        /// MPTR: where the metadata is.
        mptr @ 16: U64,
        /// DPTR as SGL 1.
        sgl @ 24: Sgl,
        /// Command dword 10.
        cdw10 @ 40: U32,
        /// Command dword 11.
        cdw11 @ 44: U32,
        /// Command dword 12.
        cdw12 @ 48: U32,
        /// Command dword 13.
        cdw13 @ 52: U32,
        /// Command dword 14.
        cdw14 @ 56: U32,
        /// Command dword 15.
        cdw15 @ 60: U32,
    }
}

/// Byte 1 of the entry: FUSE and PSDT (Base 2.0 figure "Command Dword 0").
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
pub struct SqeFlags {
    /// FUSE as a number; see [`Fuse`].
    #[bits(2)]
    pub fuse: u8,
    #[bits(4)]
    __: u8,
    /// PSDT as a number; see [`Psdt`].
    #[bits(2)]
    pub psdt: u8,
}

open_enum! {
    /// FUSE: whether the command is half of a fused operation (Base 2.0 section 3.4.2).
    pub struct Fuse: u8 {
        /// A normal command.
        NONE = 0,
        /// First of the two.
        FIRST = 1,
        /// Second of the two.
        SECOND = 2,
    }
}

open_enum! {
    /// PSDT: what the data and metadata pointers are (Base 2.0 figure "Command Dword 0").
    pub struct Psdt: u8 {
        /// PRPs; never over Fabrics.
        PRP = 0,
        /// SGL for data; MPTR is the address of one contiguous buffer.
        SGL = 1,
        /// SGL for data; MPTR is the address of an SGL segment.
        SGL_METADATA_SGL = 2,
    }
}

impl Sqe {
    /// An entry with these three fields, PSDT 01b (SGL) and everything else zero.
    #[must_use]
    pub fn new(opcode: u8, cid: u16, nsid: u32) -> Self {
        Self {
            opcode,
            flags: SqeFlags::new().with_psdt(Psdt::SGL.0).into_bits(),
            cid: U16::new(cid),
            nsid: U32::new(nsid),
            ..Self::default()
        }
    }

    /// The same entry with this data pointer, and PSDT 01b.
    #[must_use]
    pub fn with_sgl(mut self, sgl: Sgl) -> Self {
        self.sgl = sgl;
        self.with_psdt(Psdt::SGL)
    }

    /// The same entry with PRP 1 and PRP 2 as its data pointer, and PSDT 00b; for PCIe.
    #[must_use]
    pub fn with_prp(mut self, prp1: u64, prp2: u64) -> Self {
        self.sgl = Sgl::from_prp(prp1, prp2);
        self.with_psdt(Psdt::PRP)
    }

    /// The same entry with another PSDT.
    #[must_use]
    pub fn with_psdt(mut self, psdt: Psdt) -> Self {
        self.flags = SqeFlags::from_bits(self.flags).with_psdt(psdt.0 & 0b11).into_bits();
        self
    }

    /// The same entry as half of a fused operation.
    #[must_use]
    pub fn with_fuse(mut self, fuse: Fuse) -> Self {
        self.flags = SqeFlags::from_bits(self.flags).with_fuse(fuse.0 & 0b11).into_bits();
        self
    }

    /// FUSE.
    #[must_use]
    pub const fn fuse(&self) -> Fuse {
        Fuse(SqeFlags::from_bits(self.flags).fuse())
    }

    /// PSDT.
    #[must_use]
    pub const fn psdt(&self) -> Psdt {
        Psdt(SqeFlags::from_bits(self.flags).psdt())
    }

    /// The opcode, on an admin queue.
    #[must_use]
    pub const fn admin_opcode(&self) -> AdminOpcode {
        AdminOpcode(self.opcode)
    }

    /// The opcode, on an I/O queue.
    #[must_use]
    pub const fn io_opcode(&self) -> IoOpcode {
        IoOpcode(self.opcode)
    }

    /// Whether this is a Fabrics command.
    #[must_use]
    pub const fn is_fabrics(&self) -> bool {
        self.opcode == FABRICS
    }

    /// FCTYPE: byte 4, meaningful in a Fabrics command.
    #[must_use]
    pub fn fctype(&self) -> FabricsType {
        let [fctype, ..] = self.nsid.to_bytes();
        FabricsType(fctype)
    }

    /// CID.
    #[must_use]
    pub fn cid(&self) -> u16 {
        self.cid.get()
    }

    /// NSID.
    #[must_use]
    pub fn nsid(&self) -> u32 {
        self.nsid.get()
    }

    /// Command dword 10.
    #[must_use]
    pub fn cdw10(&self) -> u32 {
        self.cdw10.get()
    }

    /// Command dword 11.
    #[must_use]
    pub fn cdw11(&self) -> u32 {
        self.cdw11.get()
    }

    /// Command dword 12.
    #[must_use]
    pub fn cdw12(&self) -> u32 {
        self.cdw12.get()
    }

    /// Command dword 13.
    #[must_use]
    pub fn cdw13(&self) -> u32 {
        self.cdw13.get()
    }

    /// SLBA, dwords 10 and 11 of Read, Write and their kin (NVM Command Set 1.0 section 3.2).
    #[must_use]
    pub fn slba(&self) -> u64 {
        u64::from(self.cdw10.get()) | u64::from(self.cdw11.get()) << 32
    }

    /// NLB as it stands, one less than the count: bits 15:0 of dword 12.
    #[must_use]
    pub fn nlb_z(&self) -> u16 {
        let [low, high, ..] = self.cdw12.to_bytes();
        u16::from_le_bytes([low, high])
    }

    /// How many logical blocks: NLB with its zero base taken away, 1 to 65,536.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        u32::from(self.nlb_z()) + 1
    }

    /// Sets dwords 10 and 11 to a 64-bit value.
    pub(crate) fn set_cdw10_64(&mut self, value: u64) {
        let (low, high) = halves(value);
        self.cdw10 = low;
        self.cdw11 = high;
    }

    /// Sets dwords 12 and 13 to a 64-bit value.
    pub(crate) fn set_cdw12_64(&mut self, value: u64) {
        let (low, high) = halves(value);
        self.cdw12 = low;
        self.cdw13 = high;
    }
}

/// The low and high dword of a value.
fn halves(value: u64) -> (U32, U32) {
    let [a, b, c, d, e, f, g, h] = value.to_le_bytes();
    (U32::from_bytes([a, b, c, d]), U32::from_bytes([e, f, g, h]))
}

open_enum! {
    /// The identifier byte of an SGL descriptor: type in bits 7:4, sub type in bits 3:0 (Base 2.0 section
    /// 4.1.2.1).
    pub struct SglKind: u8 {
        /// Data Block, by address.
        DATA_BLOCK_ADDRESS = 0x00,
        /// Data Block, by offset: the data is in the capsule.
        DATA_BLOCK_OFFSET = 0x01,
        BIT_BUCKET = 0x10,
        /// Segment, by address.
        SEGMENT_ADDRESS = 0x20,
        /// Last Segment, by address.
        LAST_SEGMENT_ADDRESS = 0x30,
        /// Last Segment, by offset in the capsule.
        LAST_SEGMENT_OFFSET = 0x31,
        /// Keyed Data Block: RDMA memory of the host.
        KEYED_DATA_BLOCK = 0x40,
        /// Keyed Data Block whose key the reply is to invalidate.
        KEYED_DATA_BLOCK_INVALIDATE = 0x4f,
        /// Transport Data Block: the transport moves the data in its own way (TCP).
        TRANSPORT_DATA_BLOCK = 0x5a,
    }
}

impl SglKind {}

wire! {
    /// An SGL descriptor of the kinds with an address and a 32-bit length (Base 2.0 section 4.1.2.1).
    pub struct Sgl[16] {
        /// Address, or offset in the capsule.
        address @ 0: U64,
        /// Bytes.
        length @ 8: U32,
        /// Reserved; part of the key in a keyed descriptor.
        reserved @ 12: [u8; 3],
        /// Type and sub type; see [`SglKind`].
        identifier @ 15: u8,
    }
}

wire! {
    /// A Keyed SGL Data Block descriptor (Base 2.0 section 4.1.2.1): the same 16 bytes as [`Sgl`], cut
    /// otherwise.
    pub struct KeyedSgl[16] {
        /// Address in the host's memory region.
        address @ 0: U64,
        /// Bytes, 24 bits.
        length @ 8: [u8; 3],
        /// Remote key.
        key @ 11: U32,
        /// Type and sub type; see [`SglKind`].
        identifier @ 15: u8,
    }
}

impl KeyedSgl {
    /// Most bytes that one keyed descriptor names.
    pub const BYTES_MAX: u32 = (1 << 24) - 1;

    /// The length as a number.
    #[must_use]
    pub const fn bytes(&self) -> u32 {
        let [a, b, c] = self.length;
        u32::from_le_bytes([a, b, c, 0])
    }

    /// The identifier byte as a kind.
    #[must_use]
    pub const fn kind(&self) -> SglKind {
        SglKind(self.identifier)
    }
}

impl From<KeyedSgl> for Sgl {
    fn from(keyed: KeyedSgl) -> Self {
        zerocopy::transmute!(keyed)
    }
}

impl Sgl {
    /// No data: all zero.
    #[must_use]
    pub fn none() -> Self {
        Self::default()
    }

    /// Data that follows the entry in its capsule, from offset 0.
    #[must_use]
    pub fn in_capsule(bytes: u32) -> Self {
        Self::of_kind(SglKind::DATA_BLOCK_OFFSET, bytes)
    }

    /// Data that the transport asks for or sends in PDUs of its own (TCP).
    #[must_use]
    pub fn transport(bytes: u32) -> Self {
        Self::of_kind(SglKind::TRANSPORT_DATA_BLOCK, bytes)
    }

    /// Data in host memory that a remote key opens (RDMA); `bytes` is cut to 24 bits, `invalidate` asks for
    /// the key to be invalidated with the reply.
    #[must_use]
    pub fn keyed(address: u64, bytes: u32, key: u32, invalidate: bool) -> Self {
        let [a, b, c, _] = bytes.to_le_bytes();
        let kind = if invalidate { SglKind::KEYED_DATA_BLOCK_INVALIDATE } else { SglKind::KEYED_DATA_BLOCK };
        KeyedSgl { address: U64::new(address), length: [a, b, c], key: U32::new(key), identifier: kind.0 }
            .into()
    }

    /// Data of host memory at `address` (PCIe).
    #[must_use]
    pub fn data_block(address: u64, bytes: u32) -> Self {
        Self { address: U64::new(address), ..Self::of_kind(SglKind::DATA_BLOCK_ADDRESS, bytes) }
    }

    /// `bytes` of descriptors at `address`, the last ones of the list (PCIe).
    #[must_use]
    pub fn last_segment(address: u64, bytes: u32) -> Self {
        Self { address: U64::new(address), ..Self::of_kind(SglKind::LAST_SEGMENT_ADDRESS, bytes) }
    }

    /// PRP 1 and PRP 2 in the place of an SGL (Base 2.0 section 4.1.1).
    #[must_use]
    pub fn from_prp(prp1: u64, prp2: u64) -> Self {
        zerocopy::transmute!([U64::new(prp1), U64::new(prp2)])
    }

    /// PRP 1 and PRP 2, where PSDT says so.
    #[must_use]
    pub fn prp(self) -> (u64, u64) {
        let [prp1, prp2]: [U64; 2] = zerocopy::transmute!(self);
        (prp1.get(), prp2.get())
    }

    /// The identifier byte as a kind.
    #[must_use]
    pub const fn kind(&self) -> SglKind {
        SglKind(self.identifier)
    }

    /// The length, of a descriptor that is not keyed.
    #[must_use]
    pub fn bytes(&self) -> u32 {
        self.length.get()
    }

    /// The address or offset.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address.get()
    }

    /// The same bytes as a keyed descriptor, if they are one.
    #[must_use]
    pub fn as_keyed(&self) -> Option<KeyedSgl> {
        let is_keyed =
            matches!(self.kind(), SglKind::KEYED_DATA_BLOCK | SglKind::KEYED_DATA_BLOCK_INVALIDATE);
        is_keyed.then(|| zerocopy::transmute!(*self))
    }

    fn of_kind(kind: SglKind, bytes: u32) -> Self {
        Self { length: U32::new(bytes), identifier: kind.0, ..Self::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::IntoBytes;

    #[test]
    fn descriptors_of_host_memory_have_address_length_and_kind() {
        let bytes = |sgl: Sgl| -> [u8; 16] { zerocopy::transmute!(sgl) };
        let block = bytes(Sgl::data_block(0x0102_0304_0506_0708, 0x1122_3344));
        assert_eq!(block, [8, 7, 6, 5, 4, 3, 2, 1, 0x44, 0x33, 0x22, 0x11, 0, 0, 0, 0]);
        let list = bytes(Sgl::last_segment(0x1000, 32));
        assert_eq!(list, [0, 0x10, 0, 0, 0, 0, 0, 0, 32, 0, 0, 0, 0, 0, 0, 0x30]);
    }

    #[test]
    fn a_transport_descriptor_has_its_length_and_identifier_where_linux_puts_them() {
        let sgl = Sgl::transport(0x1000);
        assert_eq!(sgl.as_bytes(), [0, 0, 0, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0x5a]);
        assert_eq!(sgl.kind(), SglKind::TRANSPORT_DATA_BLOCK);
        assert_eq!(Sgl::in_capsule(1024).as_bytes(), [0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 1]);
    }

    #[test]
    fn a_keyed_descriptor_packs_24_bits_of_length_beside_its_key() {
        let sgl = Sgl::keyed(0x1122_3344_5566_7788, 0x02_0304, 0xaabb_ccdd, true);
        assert_eq!(
            sgl.as_bytes(),
            [0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 4, 3, 2, 0xdd, 0xcc, 0xbb, 0xaa, 0x4f]
        );
        let keyed = sgl.as_keyed().unwrap();
        assert_eq!((keyed.bytes(), keyed.key.get(), keyed.kind()), (0x02_0304, 0xaabb_ccdd, SglKind(0x4f)));
        assert_eq!(Sgl::transport(8).as_keyed(), None);
    }

    #[test]
    fn the_flags_byte_holds_fuse_and_psdt_apart() {
        let sqe = Sqe::new(IoOpcode::COMPARE.0, 7, 1).with_fuse(Fuse::FIRST);
        assert_eq!((sqe.flags, sqe.fuse(), sqe.psdt()), (0x41, Fuse::FIRST, Psdt::SGL));
        let sqe = sqe.with_prp(0x1000, 0x2000);
        assert_eq!((sqe.flags, sqe.psdt(), sqe.sgl.prp()), (0x01, Psdt::PRP, (0x1000, 0x2000)));
        assert_eq!(std::format!("{:?} {:?}", Fuse::SECOND, Fuse(3)), "SECOND Fuse(0x3)");
    }
}
