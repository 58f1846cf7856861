//! The submission queue entry and its data pointer (Base 2.0 sections 3.3.3.1 and 4.1).
//!
//! The meaning of command dwords 10 to 15 depends on the command; `io`, `admin`, `identify`, `log`,
//! `feature`, `fabrics`, `pcie` and `vendor` contain the views and the builders. Builders set PSDT to 01b
//! (SGL), which Fabrics requires for every command, even without data. [`Sqe::with_prp`] changes an entry to
//! PRPs for PCIe. The builders of `pcie` set PRPs.

use bitfield_struct::bitfield;
use zerocopy::little_endian::{U16, U32, U64};

use crate::opcode::{AdminOpcode, FABRICS, FabricsType, IoOpcode};

/// Size of a submission queue entry in bytes; CC.IOSQES is 6 (Base 2.0 section 3.3.3.1).
pub const SQE_BYTES: usize = 64;

/// Broadcast NSID: all namespaces (Base 2.0 section 3.2.1.2).
pub const NSID_ALL: u32 = 0xffff_ffff;

wire! {
    /// A submission queue entry (Base 2.0 figure "Common Command Format").
    pub struct Sqe[SQE_BYTES] {
        /// OPC: Opcode; see [`AdminOpcode`] or [`IoOpcode`], depending on the queue.
        opcode @ 0: u8,
        /// FUSE in bits 1:0, PSDT in bits 7:6; see [`SqeFlags`].
        flags @ 1: u8,
        /// CID: Command Identifier, chosen by the host and repeated in the completion.
        cid @ 2: U16,
        /// NSID: Namespace Identifier. Its low byte is FCTYPE in a Fabrics command.
        nsid @ 4: U32,
        cdw2 @ 8: U32,
        cdw3 @ 12: U32,
        /// MPTR: Metadata Pointer.
        mptr @ 16: U64,
        /// DPTR: Data Pointer as SGL 1; contains PRP 1 and PRP 2 if PSDT is 00b.
        sgl @ 24: Sgl,
        cdw10 @ 40: U32,
        cdw11 @ 44: U32,
        cdw12 @ 48: U32,
        cdw13 @ 52: U32,
        cdw14 @ 56: U32,
        cdw15 @ 60: U32,
    }
}

/// Byte 1 of the entry: FUSE and PSDT (Base 2.0 figure "Command Dword 0").
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
pub struct SqeFlags {
    /// FUSE: Fused Operation; see [`Fuse`].
    #[bits(2)]
    pub fuse: u8,
    #[bits(4)]
    __: u8,
    /// PSDT: PRP or SGL for Data Transfer; see [`Psdt`].
    #[bits(2)]
    pub psdt: u8,
}

open_enum! {
    /// FUSE: Fused Operation (Base 2.0 section 3.4.2).
    pub struct Fuse: u8 {
        /// Normal operation.
        NONE = 0,
        /// First command of a fused operation.
        FIRST = 1,
        /// Second command of a fused operation.
        SECOND = 2,
    }
}

open_enum! {
    /// PSDT: PRP or SGL for Data Transfer (Base 2.0 figure "Command Dword 0").
    pub struct Psdt: u8 {
        /// PRPs; not allowed over Fabrics.
        PRP = 0,
        /// SGL for data; MPTR is the address of one contiguous buffer.
        SGL = 1,
        /// SGL for data; MPTR is the address of an SGL segment.
        SGL_METADATA_SGL = 2,
    }
}

impl Sqe {
    /// Creates an entry with PSDT 01b (SGL); all fields without a parameter are zero.
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

    /// Replaces the data pointer and sets PSDT to 01b (SGL).
    #[must_use]
    pub fn with_sgl(mut self, sgl: Sgl) -> Self {
        self.sgl = sgl;
        self.with_psdt(Psdt::SGL)
    }

    /// Replaces the data pointer with PRP 1 and PRP 2 and sets PSDT to 00b; PCIe only.
    #[must_use]
    pub fn with_prp(mut self, prp1: u64, prp2: u64) -> Self {
        self.sgl = Sgl::from_prp(prp1, prp2);
        self.with_psdt(Psdt::PRP)
    }

    /// Replaces PSDT with the low 2 bits of `psdt`.
    #[must_use]
    pub fn with_psdt(mut self, psdt: Psdt) -> Self {
        self.flags = SqeFlags::from_bits(self.flags).with_psdt(psdt.0 & 0b11).into_bits();
        self
    }

    /// Replaces FUSE with the low 2 bits of `fuse`.
    #[must_use]
    pub fn with_fuse(mut self, fuse: Fuse) -> Self {
        self.flags = SqeFlags::from_bits(self.flags).with_fuse(fuse.0 & 0b11).into_bits();
        self
    }

    /// Returns FUSE: Fused Operation, bits 1:0 of byte 1.
    #[must_use]
    pub const fn fuse(&self) -> Fuse {
        Fuse(SqeFlags::from_bits(self.flags).fuse())
    }

    /// Returns PSDT: PRP or SGL for Data Transfer, bits 7:6 of byte 1.
    #[must_use]
    pub const fn psdt(&self) -> Psdt {
        Psdt(SqeFlags::from_bits(self.flags).psdt())
    }

    /// Returns OPC of an entry of an admin queue.
    #[must_use]
    pub const fn admin_opcode(&self) -> AdminOpcode {
        AdminOpcode(self.opcode)
    }

    /// Returns OPC of an entry of an I/O queue.
    #[must_use]
    pub const fn io_opcode(&self) -> IoOpcode {
        IoOpcode(self.opcode)
    }

    /// Returns true if OPC is 7Fh, the opcode of all Fabrics commands.
    #[must_use]
    pub const fn is_fabrics(&self) -> bool {
        self.opcode == FABRICS
    }

    /// Returns FCTYPE: Fabrics Command Type, byte 4. Valid only if [`Self::is_fabrics`].
    #[must_use]
    pub fn fctype(&self) -> FabricsType {
        let [fctype, ..] = self.nsid.to_bytes();
        FabricsType(fctype)
    }

    /// Returns CID: Command Identifier.
    #[must_use]
    pub fn cid(&self) -> u16 {
        self.cid.get()
    }

    /// Returns NSID: Namespace Identifier; in a Fabrics command the low byte is FCTYPE.
    #[must_use]
    pub fn nsid(&self) -> u32 {
        self.nsid.get()
    }

    /// Returns Command Dword 10 as a host-endian integer.
    #[must_use]
    pub fn cdw10(&self) -> u32 {
        self.cdw10.get()
    }

    /// Returns Command Dword 11 as a host-endian integer.
    #[must_use]
    pub fn cdw11(&self) -> u32 {
        self.cdw11.get()
    }

    /// Returns Command Dword 12 as a host-endian integer.
    #[must_use]
    pub fn cdw12(&self) -> u32 {
        self.cdw12.get()
    }

    /// Returns Command Dword 13 as a host-endian integer.
    #[must_use]
    pub fn cdw13(&self) -> u32 {
        self.cdw13.get()
    }

    /// Returns SLBA: Starting LBA, dwords 10 and 11 of Read, Write, Compare, Verify and Write Zeroes (NVM
    /// Command Set 1.0 section 3.2).
    #[must_use]
    pub fn slba(&self) -> u64 {
        u64::from(self.cdw10.get()) | u64::from(self.cdw11.get()) << 32
    }

    /// Returns NLB: Number of Logical Blocks, bits 15:0 of dword 12, zero-based.
    #[must_use]
    pub fn nlb_z(&self) -> u16 {
        let [low, high, ..] = self.cdw12.to_bytes();
        u16::from_le_bytes([low, high])
    }

    /// Returns the count of logical blocks, 1 to 65,536: NLB plus one.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        u32::from(self.nlb_z()) + 1
    }

    /// Stores `value` in dwords 10 (low half) and 11 (high half).
    pub(crate) fn set_cdw10_64(&mut self, value: u64) {
        let (low, high) = split_u64(value);
        self.cdw10 = low;
        self.cdw11 = high;
    }

    /// Stores `value` in dwords 12 (low half) and 13 (high half).
    pub(crate) fn set_cdw12_64(&mut self, value: u64) {
        let (low, high) = split_u64(value);
        self.cdw12 = low;
        self.cdw13 = high;
    }
}

/// Returns the low and the high dword of `value`.
fn split_u64(value: u64) -> (U32, U32) {
    let [a, b, c, d, e, f, g, h] = value.to_le_bytes();
    (U32::from_bytes([a, b, c, d]), U32::from_bytes([e, f, g, h]))
}

open_enum! {
    /// SGL Identifier: descriptor type in bits 7:4, sub type in bits 3:0 (Base 2.0 section 4.1.2.1).
    pub struct SglKind: u8 {
        DATA_BLOCK_ADDRESS = 0x00,
        /// The data is in the capsule; the address field is a byte offset.
        DATA_BLOCK_OFFSET = 0x01,
        BIT_BUCKET = 0x10,
        SEGMENT_ADDRESS = 0x20,
        LAST_SEGMENT_ADDRESS = 0x30,
        /// The segment is in the capsule; the address field is a byte offset.
        LAST_SEGMENT_OFFSET = 0x31,
        /// Host memory with an RDMA remote key; see [`KeyedSgl`].
        KEYED_DATA_BLOCK = 0x40,
        /// As `KEYED_DATA_BLOCK`; the response invalidates the key (RDMA Send with Invalidate).
        KEYED_DATA_BLOCK_INVALIDATE = 0x4f,
        /// The transport defines the data transfer; NVMe/TCP uses R2T, H2CData and C2HData PDUs.
        TRANSPORT_DATA_BLOCK = 0x5a,
    }
}

wire! {
    /// SGL descriptor with a 64-bit address and a 32-bit length (Base 2.0 section 4.1.2.1).
    pub struct Sgl[16] {
        /// Memory address, or byte offset in the capsule, depending on the kind.
        address @ 0: U64,
        /// Length in bytes.
        length @ 8: U32,
        /// Reserved; part of the key in a [`KeyedSgl`].
        reserved @ 12: [u8; 3],
        /// SGL Identifier; see [`SglKind`].
        identifier @ 15: u8,
    }
}

wire! {
    /// Keyed SGL Data Block descriptor (Base 2.0 section 4.1.2.1): another layout of the 16 bytes of [`Sgl`].
    pub struct KeyedSgl[16] {
        /// Address in the host's memory region.
        address @ 0: U64,
        /// Length in bytes, 24 bits.
        length @ 8: [u8; 3],
        /// RDMA remote key (R_Key) of the host's memory region.
        key @ 11: U32,
        /// SGL Identifier; see [`SglKind`].
        identifier @ 15: u8,
    }
}

impl KeyedSgl {
    /// Largest length of a keyed descriptor, in bytes.
    pub const BYTES_MAX: u32 = (1 << 24) - 1;

    /// Returns the length of the data block in bytes.
    #[must_use]
    pub const fn bytes(&self) -> u32 {
        let [a, b, c] = self.length;
        u32::from_le_bytes([a, b, c, 0])
    }

    /// Returns the SGL Identifier, byte 15: type and sub type.
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
    /// Creates the descriptor of a command without data: all bytes are zero.
    #[must_use]
    pub fn none() -> Self {
        Self::default()
    }

    /// Creates the descriptor of `bytes` of in-capsule data at offset 0.
    #[must_use]
    pub fn in_capsule(bytes: u32) -> Self {
        Self::of_kind(SglKind::DATA_BLOCK_OFFSET, bytes)
    }

    /// Creates the descriptor of `bytes` of data that NVMe/TCP transfers with R2T, H2CData and C2HData PDUs.
    #[must_use]
    pub fn transport(bytes: u32) -> Self {
        Self::of_kind(SglKind::TRANSPORT_DATA_BLOCK, bytes)
    }

    /// Creates the descriptor of host memory with an RDMA remote key. `bytes` is truncated to 24 bits. With
    /// `invalidate`, the response invalidates the key (RDMA Send with Invalidate).
    #[must_use]
    pub fn keyed(address: u64, bytes: u32, key: u32, invalidate: bool) -> Self {
        let [a, b, c, _] = bytes.to_le_bytes();
        let kind = if invalidate { SglKind::KEYED_DATA_BLOCK_INVALIDATE } else { SglKind::KEYED_DATA_BLOCK };
        KeyedSgl { address: U64::new(address), length: [a, b, c], key: U32::new(key), identifier: kind.0 }
            .into()
    }

    /// Creates the descriptor of host memory at `address`; PCIe only.
    #[must_use]
    pub fn data_block(address: u64, bytes: u32) -> Self {
        Self { address: U64::new(address), ..Self::of_kind(SglKind::DATA_BLOCK_ADDRESS, bytes) }
    }

    /// Creates the descriptor of the last segment of an SGL: `bytes` of descriptors at `address`; PCIe only.
    #[must_use]
    pub fn last_segment(address: u64, bytes: u32) -> Self {
        Self { address: U64::new(address), ..Self::of_kind(SglKind::LAST_SEGMENT_ADDRESS, bytes) }
    }

    /// Stores PRP 1 and PRP 2 in the 16 bytes of the descriptor (Base 2.0 section 4.1.1).
    #[must_use]
    pub fn from_prp(prp1: u64, prp2: u64) -> Self {
        zerocopy::transmute!([U64::new(prp1), U64::new(prp2)])
    }

    /// Returns PRP 1 and PRP 2. Valid only if PSDT of the entry is 00b.
    #[must_use]
    pub fn prp(self) -> (u64, u64) {
        let [prp1, prp2]: [U64; 2] = zerocopy::transmute!(self);
        (prp1.get(), prp2.get())
    }

    /// Returns the SGL Identifier, byte 15: type and sub type.
    #[must_use]
    pub const fn kind(&self) -> SglKind {
        SglKind(self.identifier)
    }

    /// Returns the length in bytes. Not valid for a keyed descriptor; see [`KeyedSgl::bytes`].
    #[must_use]
    pub fn bytes(&self) -> u32 {
        self.length.get()
    }

    /// Returns the memory address, or the byte offset in the capsule for the `_OFFSET` kinds.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address.get()
    }

    /// Returns the descriptor as a [`KeyedSgl`]; `None` if it is not of a keyed kind.
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
