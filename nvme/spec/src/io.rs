//! Commands of the NVM command set (NVM Command Set 1.0 and 1.1 section 3.2) and Flush (Base 2.0 section
//! 7.1).

use bitfield_struct::bitfield;
use zerocopy::little_endian::{U16, U32, U64};

use crate::opcode::IoOpcode;
use crate::sqe::Sqe;

/// Maximum number of ranges of a Dataset Management or Copy command.
pub const RANGES_MAX: u16 = 256;

/// Dword 12 of Read, Write, Compare, Verify, Write Zeroes and Write Uncorrectable.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct ReadWriteCdw12 {
    /// NLB: Number of Logical Blocks, zero-based.
    pub nlb_z: u16,
    #[bits(7)]
    __: u8,
    /// NSZ of Write Zeroes: Namespace Zeroes, all blocks of the namespace regardless of SLBA and NLB (NVM
    /// Command Set 1.1). The bit is part of DTYPE in Write.
    pub whole_namespace: bool,
    __: bool,
    /// DEAC of Write Zeroes: Deallocate. Reserved in the other commands.
    pub deac: bool,
    /// PRINFO: Protection Information; PRACT in bit 3, PRCHK in bits 2:0.
    #[bits(4)]
    pub prinfo: u8,
    /// FUA: Force Unit Access; reads from and writes to the non-volatile medium.
    pub fua: bool,
    __: bool,
}

/// Dword 10 of Dataset Management.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct DsmCdw10 {
    /// NR: Number of Ranges, zero-based.
    pub nr_z: u8,
    #[bits(24)]
    __: u32,
}

/// Dword 11 of Dataset Management.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct DsmCdw11 {
    #[bits(2)]
    __: u8,
    /// AD: Attribute Deallocate.
    pub deallocate: bool,
    #[bits(29)]
    __: u32,
}

/// Dword 12 of Copy.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct CopyCdw12 {
    /// NR: Number of source Ranges, zero-based.
    pub nr_z: u8,
    /// DESFMT: Descriptor Format of the source ranges.
    #[bits(4)]
    pub format: u8,
    /// PRINFOR: Protection Information Read.
    #[bits(4)]
    pub prinfo_read: u8,
    #[bits(10)]
    __: u16,
    /// PRINFOW: Protection Information Write.
    #[bits(4)]
    pub prinfo_write: u8,
    /// FUA: Force Unit Access of the writes.
    pub fua: bool,
    __: bool,
}

wire_bits!(ReadWriteCdw12 => U32, DsmCdw10 => U32, DsmCdw11 => U32, CopyCdw12 => U32);

view! {
    /// Dataset Management (NVM Command Set 1.0 section 3.2.3); its data is an array of [`DsmRange`].
    pub struct DatasetManagement(sqe) {
        /// Number of ranges, 1 to 256: NR plus one.
        nr: u16 = u16::from(DsmCdw10::from(sqe.cdw10).nr_z()) + 1,
        /// AD: Attribute Deallocate.
        ad: bool = DsmCdw11::from(sqe.cdw11).deallocate(),
    }
}

wire! {
    /// Range of Dataset Management (NVM Command Set 1.0 figure "Dataset Management - Range Definition").
    pub struct DsmRange[16] {
        /// Context Attributes: access hints, optional for the controller.
        attributes @ 0: U32,
        /// Length in logical blocks; *not* zero-based.
        blocks @ 4: U32,
        /// SLBA: Starting LBA.
        slba @ 8: U64,
    }
}

impl DsmRange {
    /// Creates a range of `blocks` logical blocks without Context Attributes.
    #[must_use]
    pub fn new(slba: u64, blocks: u32) -> Self {
        Self { attributes: U32::ZERO, blocks: U32::new(blocks), slba: U64::new(slba) }
    }
}

view! {
    /// Copy (NVM Command Set 1.0 section 3.2.2); its data is an array of source ranges in the format DESFMT,
    /// [`CopyRangeFormat0`] for format 0h.
    pub struct Copy(sqe) {
        /// SDLBA: Starting Destination LBA.
        sdlba: u64 = sqe.slba(),
        /// Dword 12: NR, DESFMT, PRINFOR, PRINFOW, FUA.
        cdw12: CopyCdw12 = sqe.cdw12.into(),
        /// Number of ranges, 1 to 256: NR plus one.
        ranges: u16 = u16::from(CopyCdw12::from(sqe.cdw12).nr_z()) + 1,
    }
}

wire! {
    /// Source range of Copy, format 0h (NVM Command Set 1.0 and 1.1 figure "Copy - Source Range Entries Copy
    /// Descriptor Format 0h"). Format 2h has the same layout and uses SNSID and SOPT.
    pub struct CopyRangeFormat0[32] {
        /// SNSID: Source Namespace Identifier of format 2h (NVM Command Set 1.1); reserved in format 0h.
        snsid @ 0: U32,
        reserved4 @ 4: [u8; 4],
        /// SLBA: Starting LBA of the source.
        slba @ 8: U64,
        /// NLB: Number of Logical Blocks, zero-based.
        nlb_z @ 16: U16,
        reserved18 @ 18: [u8; 14],
    }
}

impl CopyRangeFormat0 {
    /// Creates a source range of format 0h with 1 to 65,536 logical blocks.
    ///
    /// # Panics
    /// When `blocks` is 0 or more than 65,536.
    #[must_use]
    pub fn new(slba: u64, blocks: u32) -> Self {
        Self { slba: U64::new(slba), nlb_z: U16::new(blocks_z(blocks)), ..Self::default() }
    }

    /// Returns the count of logical blocks, 1 to 65,536: NLB plus one.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        u32::from(self.nlb_z.get()) + 1
    }
}

/// Returns the zero-based NLB; panics unless `blocks` is 1 to 65,536.
fn blocks_z(blocks: u32) -> u16 {
    u16::try_from(blocks.wrapping_sub(1)).expect("a command names 1 to 65,536 logical blocks")
}

/// Returns the zero-based NR; panics unless `ranges` is 1 to 256.
fn ranges_z(ranges: u16) -> u8 {
    u8::try_from(ranges.wrapping_sub(1)).expect("a command has 1 to 256 ranges")
}

/// Builders for hosts. They panic unless `blocks` is 1 to 65,536 and `ranges` is 1 to 256.
impl Sqe {
    /// Builds Flush of namespace `nsid`; [`NSID_ALL`](crate::sqe::NSID_ALL) where the controller supports it
    /// (VWC).
    #[must_use]
    pub fn flush(cid: u16, nsid: u32) -> Self {
        Self::new(IoOpcode::FLUSH.0, cid, nsid)
    }

    /// Builds Read of `blocks` logical blocks from `slba`, FUA clear.
    #[must_use]
    pub fn read(cid: u16, nsid: u32, slba: u64, blocks: u32) -> Self {
        Self::ranged(IoOpcode::READ, cid, nsid, slba, blocks, ReadWriteCdw12::new())
    }

    /// Builds Write of `blocks` logical blocks from `slba`; `fua` is FUA.
    #[must_use]
    pub fn write(cid: u16, nsid: u32, slba: u64, blocks: u32, fua: bool) -> Self {
        Self::ranged(IoOpcode::WRITE, cid, nsid, slba, blocks, ReadWriteCdw12::new().with_fua(fua))
    }

    /// Builds Write Zeroes of `blocks` logical blocks from `slba`; `deallocate` is DEAC.
    #[must_use]
    pub fn write_zeroes(cid: u16, nsid: u32, slba: u64, blocks: u32, deallocate: bool) -> Self {
        Self::ranged(
            IoOpcode::WRITE_ZEROES,
            cid,
            nsid,
            slba,
            blocks,
            ReadWriteCdw12::new().with_deac(deallocate),
        )
    }

    /// Builds Compare of `blocks` logical blocks from `slba`, FUA clear.
    #[must_use]
    pub fn compare(cid: u16, nsid: u32, slba: u64, blocks: u32) -> Self {
        Self::ranged(IoOpcode::COMPARE, cid, nsid, slba, blocks, ReadWriteCdw12::new())
    }

    /// Builds Verify of `blocks` logical blocks from `slba`, FUA clear.
    #[must_use]
    pub fn verify(cid: u16, nsid: u32, slba: u64, blocks: u32) -> Self {
        Self::ranged(IoOpcode::VERIFY, cid, nsid, slba, blocks, ReadWriteCdw12::new())
    }

    /// Builds Dataset Management with AD; its data has `ranges` entries of [`DsmRange`].
    #[must_use]
    pub fn dsm(cid: u16, nsid: u32, ranges: u16) -> Self {
        let mut sqe = Self::new(IoOpcode::DATASET_MANAGEMENT.0, cid, nsid);
        sqe.cdw10 = DsmCdw10::new().with_nr_z(ranges_z(ranges)).into();
        sqe.cdw11 = DsmCdw11::new().with_deallocate(true).into();
        sqe
    }

    /// Builds Copy to `sdlba`, format 0h; its data has `ranges` entries of [`CopyRangeFormat0`].
    #[must_use]
    pub fn copy(cid: u16, nsid: u32, sdlba: u64, ranges: u16) -> Self {
        let mut sqe = Self::new(IoOpcode::COPY.0, cid, nsid);
        sqe.set_cdw10_64(sdlba);
        sqe.cdw12 = CopyCdw12::new().with_nr_z(ranges_z(ranges)).into();
        sqe
    }

    fn ranged(opcode: IoOpcode, cid: u16, nsid: u32, slba: u64, blocks: u32, cdw12: ReadWriteCdw12) -> Self {
        let mut sqe = Self::new(opcode.0, cid, nsid);
        sqe.set_cdw10_64(slba);
        sqe.cdw12 = cdw12.with_nlb_z(blocks_z(blocks)).into();
        sqe
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sqe::Sgl;
    use zerocopy::{FromBytes, IntoBytes};

    #[test]
    fn a_read_is_the_64_bytes_that_linux_sends() {
        let sqe = Sqe::read(0x1001, 1, 0x01_2345_6789, 8).with_sgl(Sgl::transport(4096));
        #[rustfmt::skip]
        let bytes = [
            0x02, 0x40, 0x01, 0x10, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
            0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
            0x00, 0x10, 0, 0, 0, 0, 0, 0x5a, 0x89, 0x67, 0x45, 0x23, 0x01, 0, 0, 0,
            7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        ];
        assert_eq!(sqe.as_bytes(), bytes);
        let back = Sqe::read_from_bytes(&bytes).unwrap();
        assert_eq!((back.slba(), back.blocks(), back.nlb_z()), (0x01_2345_6789, 8, 7));
        assert!(!ReadWriteCdw12::from(back.cdw12).fua());
    }

    #[test]
    fn flags_of_dword_12_are_where_the_figures_have_them() {
        assert_eq!(Sqe::write(0, 1, 0, 65_536, true).cdw12(), 0x4000_ffff);
        let sqe = Sqe::write_zeroes(0, 1, u64::MAX, 1, true);
        assert_eq!((sqe.cdw10(), sqe.cdw11(), sqe.cdw12()), (u32::MAX, u32::MAX, 0x0200_0000));
        assert_eq!(ReadWriteCdw12::new().with_whole_namespace(true).into_bits(), 1 << 23);
        assert_eq!(ReadWriteCdw12::new().with_prinfo(12).into_bits(), 0x3000_0000);
        assert_eq!(CopyCdw12::new().with_format(2).with_prinfo_write(8).into_bits(), 0x2000_0200);
    }

    #[test]
    fn counts_of_ranges_lose_their_zero_base() {
        let sqe = Sqe::dsm(5, 1, 256);
        assert_eq!(sqe.as_bytes()[40..48], [255, 0, 0, 0, 4, 0, 0, 0]);
        let view = DatasetManagement::new(&sqe);
        assert_eq!((view.nr(), view.ad()), (256, true));
        let sqe = Sqe::copy(5, 1, 0x10, 3);
        let view = Copy::new(&sqe);
        assert_eq!((view.sdlba(), view.ranges(), view.cdw12().format(), sqe.opcode), (0x10, 3, 0, 0x19));
    }

    #[test]
    fn compare_verify_and_copy_are_these_64_bytes() {
        let compare = Sqe::compare(0x1001, 1, 0x01_2345_6789, 8).with_prp(0x1_0000_2000, 0x3000);
        #[rustfmt::skip]
        let bytes = [
            0x05, 0, 0x01, 0x10, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
            0, 0, 0, 0, 0, 0, 0, 0, 0, 0x20, 0, 0, 1, 0, 0, 0,
            0, 0x30, 0, 0, 0, 0, 0, 0, 0x89, 0x67, 0x45, 0x23, 0x01, 0, 0, 0,
            7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        ];
        assert_eq!(compare.as_bytes(), bytes);
        let verify = Sqe::verify(2, 3, 0x0a0b, 65_536).with_prp(0, 0);
        #[rustfmt::skip]
        let bytes = [
            0x0c, 0, 2, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
            0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
            0, 0, 0, 0, 0, 0, 0, 0, 0x0b, 0x0a, 0, 0, 0, 0, 0, 0,
            0xff, 0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        ];
        assert_eq!(verify.as_bytes(), bytes);
        let mut copy = Sqe::copy(0x0203, 1, 0x01_2345_6789, 128).with_prp(0x5000, 0);
        copy.cdw12 = CopyCdw12::from(copy.cdw12).with_fua(true).into();
        #[rustfmt::skip]
        let bytes = [
            0x19, 0, 3, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
            0, 0, 0, 0, 0, 0, 0, 0, 0, 0x50, 0, 0, 0, 0, 0, 0,
            0, 0, 0, 0, 0, 0, 0, 0, 0x89, 0x67, 0x45, 0x23, 0x01, 0, 0, 0,
            127, 0, 0, 0x40, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        ];
        assert_eq!(copy.as_bytes(), bytes);
    }

    #[test]
    fn a_source_range_of_a_copy_is_these_32_bytes() {
        #[rustfmt::skip]
        let bytes = [
            0, 0, 0, 0, 0, 0, 0, 0, 0x89, 0x67, 0x45, 0x23, 0x01, 0, 0, 0,
            0x34, 0x12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        ];
        assert_eq!(CopyRangeFormat0::new(0x01_2345_6789, 0x1235).as_bytes(), bytes);
    }

    #[test]
    fn ranges_are_little_endian() {
        assert_eq!(DsmRange::new(0x0102, 3).as_bytes(), [0, 0, 0, 0, 3, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0]);
        let range = CopyRangeFormat0::new(0x0102, 65_536);
        assert_eq!(range.as_bytes()[8..18], [2, 1, 0, 0, 0, 0, 0, 0, 0xff, 0xff]);
        assert_eq!(range.blocks(), 65_536);
    }

    #[test]
    #[should_panic(expected = "1 to 65,536 logical blocks")]
    fn a_read_of_no_blocks_is_a_bug_of_the_caller() {
        let _ = Sqe::read(0, 1, 0, 0);
    }
}
