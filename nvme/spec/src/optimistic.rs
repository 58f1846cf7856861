//! Optimistic reads, an extension of Spindle: a host reads pages of the target's cache by RDMA READ, without
//! the target's CPU. `docs/extensions.md` specifies it.
//!
//! ```text
//!   admin queue      Attach (NSID) ──────────────> Attachment: RDMA port, token
//!   RDMA             connect (OptimisticRequest: token) ──> accept (OptimisticAccept: frames, seals)
//!   I/O queue        Read ──────────────> completion with a PageReference in dwords 0 and 1
//!   RDMA             READ of the frame and of its seal; valid if the seal is the reference's
//! ```

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, IntoBytes};

use crate::cqe::Cqe;
use crate::opcode::{AdminOpcode, IoOpcode};
use crate::sqe::Sqe;

/// Opcode of Attach: vendor specific, data from controller to host (bits 1:0 are 10b).
pub const ATTACH: AdminOpcode = AdminOpcode(0xc2);
/// Opcode of Get References: vendor specific, data from controller to host.
pub const GET_REFERENCES: IoOpcode = IoOpcode(0x82);
/// Most pages of one Get References. The target computes a checksum of each.
pub const REFERENCE_PAGES_MAX: u32 = 64;
/// Size of a [`PageEntry`] in bytes.
pub const PAGE_ENTRY_BYTES: u32 = 16;
/// Version of [`Attachment`] and of the private data.
pub const OPTIMISTIC_VERSION: u16 = 1;
/// Size of [`Attachment`] in bytes.
pub const ATTACHMENT_BYTES: usize = 64;
/// log2 of the bytes of a page of the target's cache.
pub const OPTIMISTIC_PAGE_SHIFT: u8 = 12;

/// Single use name of a grant; random.
pub type Token = [u8; 16];

wire! {
    /// Data of Attach.
    pub struct Attachment[ATTACHMENT_BYTES] {
        /// VER: [`OPTIMISTIC_VERSION`].
        version @ 0: U16,
        /// PORT: port of the RDMA listener for optimistic reads, on the IP addresses of the RDMA
        /// listeners.
        port @ 2: U16,
        /// TTL: milliseconds in which the token must be used.
        ttl_ms @ 4: U32,
        /// TOKEN: admits one RDMA connection.
        token @ 8: Token,
        reserved @ 24: [u8; 40],
    }
}

wire! {
    /// Private data of the RDMA connection request, sent by the host.
    pub struct OptimisticRequest[24] {
        version @ 0: U16,
        reserved @ 2: [u8; 6],
        token @ 8: Token,
    }
}

wire! {
    /// Private data of the RDMA accept, sent by the target: where frames and seals are. The host reads frame
    /// `n` at `frames_base + n * 2^page_shift` and its seal, 8 bytes, at `seals_base + 8 * n`.
    pub struct OptimisticAccept[40] {
        /// VER: [`OPTIMISTIC_VERSION`].
        version @ 0: U16,
        /// EPOCH: number of the cache. Only a [`PageReference`] with this number is valid here.
        epoch @ 2: u8,
        /// log2 of the bytes of a frame, [`OPTIMISTIC_PAGE_SHIFT`].
        page_shift @ 3: u8,
        /// Number of frames.
        frames @ 4: U32,
        /// Virtual address of the first frame.
        frames_base @ 8: U64,
        /// Virtual address of the first seal.
        seals_base @ 16: U64,
        /// Remote key of the frames.
        frames_key @ 24: U32,
        /// Remote key of the seals.
        seals_key @ 28: U32,
        reserved @ 32: [u8; 8],
    }
}

wire! {
    /// Private data of the RDMA reject, sent by the target.
    pub struct OptimisticReject[4] {
        version @ 0: U16,
        status @ 2: U16,
    }
}

wire! {
    /// Data of Get References, for each page.
    pub struct PageEntry[PAGE_ENTRY_BYTES as usize] {
        /// As dwords 0 and 1 of the completion of a Read: a [`PageReference`], or 0.
        reference @ 0: U64,
        /// CRC-64/NVME of the data of the page; 0 without a reference.
        crc @ 8: U64,
    }
}

open_enum! {
    /// Reason of an [`OptimisticReject`].
    pub struct OptimisticStatus: u16 {
        /// The private data is too short or of another version.
        INVALID_FORMAT = 1,
        /// The token is unknown, was used, or is too old.
        INVALID_TOKEN = 2,
        /// The target does not use this RDMA device, or cannot register the cache with it.
        NO_MEMORY = 3,
        /// There are too many connections.
        TOO_MANY = 4,
    }
}

impl OptimisticStatus {
    /// The reason in words.
    #[must_use]
    pub fn reason(self) -> &'static str {
        match self {
            OptimisticStatus::INVALID_FORMAT => "the private data is of another version",
            OptimisticStatus::INVALID_TOKEN => {
                "the token is unknown, used or expired, or its namespace or cache was removed"
            }
            OptimisticStatus::NO_MEMORY => {
                "the target does not use this RDMA device, or cannot register the cache with it"
            }
            OptimisticStatus::TOO_MANY => "there are too many connections",
            _ => "unknown reason",
        }
    }
}

impl OptimisticRequest {
    /// A request with `token`.
    #[must_use]
    pub fn new(token: Token) -> Self {
        Self { version: U16::new(OPTIMISTIC_VERSION), token, ..Self::default() }
    }

    /// The token. Bytes after the first 24 (padding of the connection manager) are ignored.
    ///
    /// # Errors
    /// Fewer than 24 bytes, or another version.
    pub fn parse(bytes: &[u8]) -> Result<Token, OptimisticStatus> {
        let (request, _) = Self::read_from_prefix(bytes).map_err(|_| OptimisticStatus::INVALID_FORMAT)?;
        match request.version.get() {
            OPTIMISTIC_VERSION => Ok(request.token),
            _ => Err(OptimisticStatus::INVALID_FORMAT),
        }
    }
}

impl OptimisticAccept {
    /// Private data of an accept; `None` if it is too short or of another version. Bytes after the first 40
    /// are ignored.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let (accept, _) = Self::read_from_prefix(bytes).ok()?;
        (accept.version.get() == OPTIMISTIC_VERSION).then_some(accept)
    }
}

impl OptimisticReject {
    /// A reject with `status`.
    #[must_use]
    pub fn new(status: OptimisticStatus) -> Self {
        Self { version: U16::new(OPTIMISTIC_VERSION), status: U16::new(status.0) }
    }

    /// The status; `None` if there are too few bytes or they are of another version. A reject by the
    /// connection manager itself (no listener) has no private data.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<OptimisticStatus> {
        let (reject, _) = Self::read_from_prefix(bytes).ok()?;
        (reject.version.get() == OPTIMISTIC_VERSION).then(|| OptimisticStatus(reject.status.get()))
    }
}

/// CRC-64/NVME of the content of a page.
#[inline]
#[must_use]
pub fn page_checksum(page: &[u8]) -> u64 {
    if cfg!(feature = "cheap-checksum") {
        let words = page.chunks_exact(8).map(|word| word.try_into().map_or(0, u64::from_le_bytes));
        return words.fold(0, |sum: u64, word| sum.rotate_left(5) ^ word);
    }
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, page)
}

/// Names the content of a frame: dwords 0 and 1 of the completion of a Read of one aligned page.
///
/// ```text
///   dword 0: frame      dword 1: generation (24 bits) | epoch (8 bits)
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageReference {
    /// Index of the frame.
    pub frame: u32,
    /// Odd, below 2^24.
    pub generation: u32,
    /// Number of the cache.
    pub epoch: u8,
}

impl PageReference {
    /// Dwords 0 and 1 of a completion.
    #[must_use]
    pub fn to_result(self) -> u64 {
        u64::from(self.epoch) << 56 | u64::from(self.generation & 0xff_ffff) << 32 | u64::from(self.frame)
    }

    /// Reads the reference of a completion; `None` if the generation is even (0: none).
    #[inline]
    #[must_use]
    pub fn from_result(result: u64) -> Option<PageReference> {
        let [f0, f1, f2, f3, g0, g1, g2, epoch] = result.to_le_bytes();
        let generation = u32::from_le_bytes([g0, g1, g2, 0]);
        let frame = u32::from_le_bytes([f0, f1, f2, f3]);
        (generation % 2 == 1).then_some(PageReference { frame, generation, epoch })
    }

    /// The seal of the frame while it contains `page`: generation (24 bits), page (40 bits).
    #[inline]
    #[must_use]
    pub fn seal(self, page: u64) -> u64 {
        u64::from(self.generation) << 40 | page & 0xff_ffff_ffff
    }
}

impl PageEntry {
    /// The entry of a page that has a reference.
    #[must_use]
    pub fn new(reference: PageReference, crc: u64) -> Self {
        Self { reference: U64::new(reference.to_result()), crc: U64::new(crc) }
    }

    /// The reference and the checksum; `None`: the page has no reference.
    #[must_use]
    pub fn get(&self) -> Option<(PageReference, u64)> {
        PageReference::from_result(self.reference.get()).map(|reference| (reference, self.crc.get()))
    }
}

impl Cqe {
    /// The page reference of a completed Read; `None`: it has none.
    #[inline]
    #[must_use]
    pub fn page_reference(&self) -> Option<PageReference> {
        PageReference::from_result(self.result_u64())
    }
}

/// Builders for hosts.
impl Sqe {
    /// Attach to a namespace.
    #[must_use]
    pub fn attach(cid: u16, nsid: u32) -> Self {
        Self::new(ATTACH.0, cid, nsid)
    }

    /// Get References of the pages in 1 to 65,536 blocks, which begin and end with a page.
    #[must_use]
    pub fn get_references(cid: u16, nsid: u32, lba: u64, blocks: u32) -> Self {
        Self { opcode: GET_REFERENCES.0, ..Self::read(cid, nsid, lba, blocks) }
    }
}

impl Attachment {
    /// Answer to Attach.
    #[must_use]
    pub fn new(port: u16, ttl_ms: u32, token: Token) -> Self {
        let version = U16::new(OPTIMISTIC_VERSION);
        Self { version, port: U16::new(port), ttl_ms: U32::new(ttl_ms), token, ..Self::default() }
    }

    /// Writes the answer into the data of the command; no effect if that is too short.
    pub fn put(&self, data: &mut [u8]) {
        let _ = self.write_to_prefix(data);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: Token = *b"0123456789abcdef";

    #[test]
    fn attach_and_its_data_are_these_bytes() {
        let sqe = Sqe::attach(7, 3);
        assert_eq!(sqe.as_bytes()[..8], [0xc2, 0x40, 7, 0, 3, 0, 0, 0]);
        let mut data = [0; ATTACHMENT_BYTES];
        Attachment::new(4421, 10_000, TOKEN).put(&mut data);
        assert_eq!(data[..8], [1, 0, 0x45, 0x11, 0x10, 0x27, 0, 0]);
        assert!(data[8..24] == TOKEN && data[24..] == [0; 40]);
    }

    #[test]
    fn get_references_and_its_data_are_these_bytes() {
        let sqe = Sqe::get_references(7, 3, 0x1_0000_0008, 16);
        assert_eq!(sqe.as_bytes()[..8], [0x82, 0x40, 7, 0, 3, 0, 0, 0]);
        assert_eq!(sqe.as_bytes()[40..52], [8, 0, 0, 0, 1, 0, 0, 0, 15, 0, 0, 0]);
        let reference = PageReference { frame: 0x0102_0304, generation: 0xa0_b0c1, epoch: 9 };
        let entry = PageEntry::new(reference, 0x1122_3344_5566_7788);
        let bytes = [4, 3, 2, 1, 0xc1, 0xb0, 0xa0, 9, 0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11];
        assert_eq!(entry.as_bytes(), bytes);
        assert_eq!(entry.get(), Some((reference, 0x1122_3344_5566_7788)));
        assert_eq!(PageEntry::default().get(), None);
    }

    #[test]
    fn the_checksum_is_crc_64_nvme() {
        // The check value of the catalogue of CRC algorithms, and the example of 4096 zeroes of the NVM
        // Command Set specification.
        assert_eq!(page_checksum(b"123456789"), 0xae8b_1486_0a79_9888);
        assert_eq!(page_checksum(&[0; 4096]), 0x6482_d367_eb22_b64e);
    }

    #[test]
    fn private_data_is_these_bytes() {
        let request = OptimisticRequest::new(TOKEN);
        assert_eq!(request.as_bytes(), [&[1, 0, 0, 0, 0, 0, 0, 0][..], &TOKEN].concat());
        let padded = [request.as_bytes(), &[0; 32]].concat();
        assert_eq!(OptimisticRequest::parse(&padded), Ok(TOKEN));
        assert_eq!(OptimisticRequest::parse(&padded[..23]), Err(OptimisticStatus::INVALID_FORMAT));
        assert_eq!(OptimisticRequest::parse(&[2; 24]), Err(OptimisticStatus::INVALID_FORMAT));
        let accept = OptimisticAccept {
            version: U16::new(1),
            epoch: 5,
            page_shift: 12,
            frames: U32::new(0x0403_0201),
            frames_base: U64::new(0x1122_3344_5566_7788),
            seals_base: U64::new(9),
            frames_key: U32::new(10),
            seals_key: U32::new(11),
            ..OptimisticAccept::default()
        };
        let bytes = accept.as_bytes();
        assert_eq!(bytes[..16], [1, 0, 5, 12, 1, 2, 3, 4, 0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11]);
        assert_eq!(bytes[16..32], [9, 0, 0, 0, 0, 0, 0, 0, 10, 0, 0, 0, 11, 0, 0, 0]);
        assert!(OptimisticAccept::parse(bytes).is_some_and(|back| back == accept));
        assert!(
            OptimisticAccept::parse(&bytes[..39]).is_none() && OptimisticAccept::parse(&[0; 40]).is_none()
        );
        let reject = OptimisticReject::new(OptimisticStatus::INVALID_TOKEN);
        assert_eq!(reject.as_bytes(), [1, 0, 2, 0]);
        assert_eq!(OptimisticReject::parse(&[1, 0, 2, 0, 0]), Some(OptimisticStatus::INVALID_TOKEN));
        assert_eq!(OptimisticReject::parse(&[]), None);
    }

    #[test]
    fn a_reference_is_two_dwords_and_a_seal_has_its_generation() {
        let reference = PageReference { frame: 0x0102_0304, generation: 0xa0_b0c1, epoch: 9 };
        let cqe = Cqe::default().with_result_u64(reference.to_result());
        assert_eq!(cqe.as_bytes()[..8], [4, 3, 2, 1, 0xc1, 0xb0, 0xa0, 9]);
        assert_eq!(cqe.page_reference(), Some(reference));
        assert_eq!(reference.seal(0x12_3456_789a), 0xa0b0_c112_3456_789a);
        assert_eq!(PageReference::from_result(0), None);
        assert_eq!(PageReference::from_result(reference.to_result() ^ 1 << 32), None, "an even generation");
    }
}
