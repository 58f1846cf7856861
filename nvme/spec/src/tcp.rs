//! PDUs of NVMe/TCP (NVMe/TCP Transport 1.0 and 1.1 section 3.6).
//!
//! ```text
//! CommonHeader | rest of the header | HDGST | padding | data | DDGST
//! 0          8 |               HLEN |       |         PDO    |   PLEN
//! ```
//! ICReq and ICResp negotiate the digests. FLAGS of a PDU has a bit for each digest that is present. HDGST
//! covers the first HLEN bytes, DDGST covers the data.

use bitfield_struct::bitfield;
use zerocopy::little_endian::{U16, U32};

use crate::cqe::Cqe;
use crate::sqe::Sqe;

/// Size of [`CommonHeader`], the first part of every PDU, in bytes.
pub const COMMON_HEADER_BYTES: usize = 8;
/// Size of HDGST and of DDGST in bytes: a little-endian CRC32C.
pub const DIGEST_BYTES: usize = 4;
/// PFV: PDU Format Version, the only one that NVMe/TCP 1.0 and 1.1 define.
pub const PFV: u16 = 0;
/// Largest HPDA and CPDA, in dwords, zero-based: 128-byte alignment.
pub const PDA_MAX: u8 = 31;
/// Smallest valid MAXH2CDATA in bytes (section 3.6.2.2).
pub const MAXH2CDATA_MIN: u32 = 4096;
/// Limit in bytes of the data of a TermReq PDU, a copy of the offending PDU's header (section 3.6.2.3).
pub const TERM_REQ_DATA_BYTES_MAX: usize = 128;
/// Limit in bytes of in-capsule data on the admin queue and of Fabrics commands, regardless of IOCCSZ
/// (section 3.3.2.1).
pub const ADMIN_IN_CAPSULE_BYTES: u32 = 8192;

open_enum! {
    /// PDU-type (section 3.6.1). The host sends even types, the controller sends odd types.
    pub struct PduType: u8 {
        /// Initialize Connection Request.
        ICREQ = 0x00,
        /// Initialize Connection Response.
        ICRESP = 0x01,
        /// Host to Controller Terminate Connection Request.
        H2C_TERM_REQ = 0x02,
        /// Controller to Host Terminate Connection Request.
        C2H_TERM_REQ = 0x03,
        /// Command Capsule.
        CAPSULE_CMD = 0x04,
        /// Response Capsule.
        CAPSULE_RESP = 0x05,
        /// Host to Controller Data Transfer.
        H2C_DATA = 0x06,
        /// Controller to Host Data Transfer.
        C2H_DATA = 0x07,
        /// Ready to Transfer.
        R2T = 0x09,
    }
}

impl PduType {
    /// Returns the HLEN required for this type, in bytes; `None` for an unknown type.
    #[must_use]
    pub const fn hlen(self) -> Option<u8> {
        match self {
            Self::ICREQ | Self::ICRESP => Some(128),
            Self::CAPSULE_CMD => Some(72),
            Self::H2C_TERM_REQ
            | Self::C2H_TERM_REQ
            | Self::CAPSULE_RESP
            | Self::H2C_DATA
            | Self::C2H_DATA
            | Self::R2T => Some(24),
            _ => None,
        }
    }
}

/// FLAGS bit 0: HDGST follows the header.
pub const HDGSTF: u8 = 1 << 0;
/// FLAGS bit 1: DDGST follows the data.
pub const DDGSTF: u8 = 1 << 1;
/// FLAGS bit 2 of H2CData and C2HData: last PDU of the data transfer.
pub const LAST_PDU: u8 = 1 << 2;
/// FLAGS bit 3 of C2HData, only with [`LAST_PDU`]: the command succeeded and no response capsule follows.
pub const SUCCESS: u8 = 1 << 3;

/// DGST of ICReq (requested) and ICResp (enabled) (section 3.6.2.1).
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
pub struct DigestBits {
    /// HDGST_ENABLE: header digest.
    pub header: bool,
    /// DDGST_ENABLE: data digest.
    pub data: bool,
    #[bits(6)]
    __: u8,
}

open_enum! {
    /// FES: Fatal Error Status of a TermReq PDU (sections 3.6.2.3 and 3.6.2.4).
    pub struct Fes: u16 {
        /// Invalid PDU Header Field; FEI is the byte offset of the field in the PDU header.
        INVALID_HEADER_FIELD = 0x01,
        PDU_SEQUENCE_ERROR = 0x02,
        /// FEI is the digest that was received.
        HEADER_DIGEST_ERROR = 0x03,
        DATA_TRANSFER_OUT_OF_RANGE = 0x04,
        /// C2HTermReq only. In H2CTermReq the value means [`Self::R2T_LIMIT_EXCEEDED`].
        DATA_TRANSFER_LIMIT_EXCEEDED = 0x05,
        /// FEI is the byte offset of the field in the PDU header.
        UNSUPPORTED_PARAMETER = 0x06,
    }
}

impl Fes {
    /// R2T Limit Exceeded; H2CTermReq only.
    pub const R2T_LIMIT_EXCEEDED: Self = Self::DATA_TRANSFER_LIMIT_EXCEEDED;
}

wire! {
    /// CH: Common Header, the first 8 bytes of every PDU (section 3.6.1).
    pub struct CommonHeader[COMMON_HEADER_BYTES] {
        pdu_type @ 0: PduType,
        /// FLAGS: [`HDGSTF`], [`DDGSTF`], [`LAST_PDU`], [`SUCCESS`].
        flags @ 1: u8,
        /// HLEN: Header Length in bytes, without HDGST.
        hlen @ 2: u8,
        /// PDO: PDU Data Offset in bytes from the start of the PDU; 0 without data.
        pdo @ 3: u8,
        /// PLEN: PDU Length in bytes, with digests and padding.
        plen @ 4: U32,
    }
}

impl CommonHeader {
    /// Creates a header from host-endian values; `hlen`, `pdo` and `plen` are in bytes.
    #[must_use]
    pub fn new(pdu_type: PduType, flags: u8, hlen: u8, pdo: u8, plen: u32) -> Self {
        Self { pdu_type, flags, hlen, pdo, plen: U32::new(plen) }
    }

    /// Returns PLEN: PDU Length in bytes, with digests and padding.
    #[must_use]
    pub fn plen(&self) -> u32 {
        self.plen.get()
    }

    /// Returns true if FLAGS has all bits of `flags`.
    #[must_use]
    pub const fn has(&self, flags: u8) -> bool {
        self.flags & flags == flags
    }
}

/// PDO and PLEN of a PDU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// PDO: PDU Data Offset in bytes; 0 without data.
    pub pdo: u8,
    /// PLEN: PDU Length in bytes; saturates at `u32::MAX`.
    pub plen: u32,
}

impl Extent {
    /// Computes PDO and PLEN. `hlen` is 24 or 72. `pda` is HPDA or CPDA of the receiver, in dwords,
    /// zero-based, and is limited to [`PDA_MAX`]. If `data_bytes` is 0, PDO is 0, and `pda` and
    /// `has_data_digest` have no effect.
    #[must_use]
    pub fn new(hlen: u8, data_bytes: u32, has_header_digest: bool, has_data_digest: bool, pda: u8) -> Self {
        let header_bytes = u32::from(hlen) + if has_header_digest { 4 } else { 0 };
        if data_bytes == 0 {
            return Self { pdo: 0, plen: header_bytes };
        }
        let offset = header_bytes.next_multiple_of(pda_bytes(pda.min(PDA_MAX)));
        let digest_bytes = if has_data_digest { 4 } else { 0 };
        // PDUs with data have HLEN 24 or 72, so PDO is at most 128.
        let pdo = u8::try_from(offset).unwrap_or(u8::MAX);
        Self { pdo, plen: offset.saturating_add(data_bytes).saturating_add(digest_bytes) }
    }
}

/// Returns the alignment in bytes of an HPDA or CPDA value, which is in dwords, zero-based.
#[must_use]
pub const fn pda_bytes(pda: u8) -> u32 {
    (pda as u32 + 1) * 4
}

wire! {
    /// ICReq: Initialize Connection Request, the host's first PDU (section 3.6.2.1).
    pub struct IcReq[128] {
        header @ 0: CommonHeader,
        /// PFV: PDU Format Version, 0.
        pfv @ 8: U16,
        /// HPDA: Host PDU Data Alignment, in dwords, zero-based; 0 to 31.
        hpda @ 10: u8,
        /// DGST: digests that the host requests; see [`DigestBits`].
        dgst @ 11: u8,
        /// MAXR2T: Maximum Number of Outstanding R2T per command, zero-based.
        maxr2t @ 12: U32,
        reserved16 @ 16: [u8; 112],
    }
}

impl IcReq {
    /// Creates an ICReq with PFV 0. `hpda` (in dwords) and `maxr2t_z` are zero-based.
    #[must_use]
    pub fn new(hpda: u8, dgst: DigestBits, maxr2t_z: u32) -> Self {
        Self {
            header: CommonHeader::new(PduType::ICREQ, 0, 128, 0, 128),
            pfv: U16::new(PFV),
            hpda,
            dgst: dgst.into_bits(),
            maxr2t: U32::new(maxr2t_z),
            ..Self::default()
        }
    }

    /// Returns DGST: digests that the host requests.
    #[must_use]
    pub const fn digests(&self) -> DigestBits {
        DigestBits::from_bits(self.dgst)
    }
}

wire! {
    /// ICResp: Initialize Connection Response, the controller's first PDU (section 3.6.2.2).
    pub struct IcResp[128] {
        header @ 0: CommonHeader,
        /// PFV: PDU Format Version, 0.
        pfv @ 8: U16,
        /// CPDA: Controller PDU Data Alignment, in dwords, zero-based; 0 to 31.
        cpda @ 10: u8,
        /// DGST: digests that the connection uses; see [`DigestBits`].
        dgst @ 11: u8,
        /// MAXH2CDATA: Maximum Host to Controller Data length of one H2CData PDU, in bytes; a multiple of 4,
        /// at least [`MAXH2CDATA_MIN`].
        maxh2cdata @ 12: U32,
        reserved16 @ 16: [u8; 112],
    }
}

impl IcResp {
    /// Creates an ICResp with PFV 0. `cpda` is in dwords, zero-based; `maxh2cdata` is in bytes.
    #[must_use]
    pub fn new(cpda: u8, dgst: DigestBits, maxh2cdata: u32) -> Self {
        Self {
            header: CommonHeader::new(PduType::ICRESP, 0, 128, 0, 128),
            pfv: U16::new(PFV),
            cpda,
            dgst: dgst.into_bits(),
            maxh2cdata: U32::new(maxh2cdata),
            ..Self::default()
        }
    }

    /// Returns DGST: digests that the connection uses.
    #[must_use]
    pub const fn digests(&self) -> DigestBits {
        DigestBits::from_bits(self.dgst)
    }
}

wire! {
    /// H2CTermReq and C2HTermReq: up to [`TERM_REQ_DATA_BYTES_MAX`] bytes of the offending PDU follow
    /// (sections 3.6.2.3 and 3.6.2.4). The PDU has no digests.
    pub struct TermReq[24] {
        header @ 0: CommonHeader,
        /// FES: Fatal Error Status; see [`Fes`].
        fes @ 8: U16,
        /// FEI: Fatal Error Information; its meaning depends on FES.
        fei @ 10: U32,
        reserved14 @ 14: [u8; 10],
    }
}

impl TermReq {
    /// Creates the header of a TermReq PDU. The caller appends `data_bytes` of the offending PDU, at most
    /// [`TERM_REQ_DATA_BYTES_MAX`].
    #[must_use]
    pub fn new(pdu_type: PduType, fes: Fes, fei: u32, data_bytes: u32) -> Self {
        Self {
            header: CommonHeader::new(pdu_type, 0, 24, 0, 24_u32.saturating_add(data_bytes)),
            fes: U16::new(fes.0),
            fei: U32::new(fei),
            ..Self::default()
        }
    }

    /// Returns FES: Fatal Error Status.
    #[must_use]
    pub fn fes(&self) -> Fes {
        Fes(self.fes.get())
    }

    /// Returns FEI: Fatal Error Information; its meaning depends on FES.
    #[must_use]
    pub fn fei(&self) -> u32 {
        self.fei.get()
    }
}

wire! {
    /// CapsuleCmd: Command Capsule; in-capsule data may follow (section 3.6.2.5).
    pub struct CapsuleCmd[72] {
        header @ 0: CommonHeader,
        /// CCSQE: Command Capsule Submission Queue Entry.
        sqe @ 8: Sqe,
    }
}

impl CapsuleCmd {
    /// Creates the header and entry of a CapsuleCmd PDU. `flags` has the digest flags; `extent` comes from
    /// [`Extent::new`] with HLEN 72. The caller appends digests and data.
    #[must_use]
    pub fn new(sqe: Sqe, flags: u8, extent: Extent) -> Self {
        Self { header: CommonHeader::new(PduType::CAPSULE_CMD, flags, 72, extent.pdo, extent.plen), sqe }
    }
}

wire! {
    /// CapsuleResp: Response Capsule (section 3.6.2.6).
    pub struct CapsuleResp[24] {
        header @ 0: CommonHeader,
        /// RCCQE: Response Capsule Completion Queue Entry.
        cqe @ 8: Cqe,
    }
}

impl CapsuleResp {
    /// Creates a CapsuleResp PDU. The caller appends HDGST if `has_header_digest`.
    #[must_use]
    pub fn new(cqe: Cqe, has_header_digest: bool) -> Self {
        Self { header: header_without_data(PduType::CAPSULE_RESP, has_header_digest), cqe }
    }
}

wire! {
    /// H2CData: Host to Controller Data Transfer, in reply to an R2T (section 3.6.2.7).
    pub struct H2cData[24] {
        header @ 0: CommonHeader,
        /// CCCID: Command Capsule CID.
        cccid @ 8: U16,
        /// TTAG: Transfer Tag of the R2T.
        ttag @ 10: U16,
        /// DATAO: Data Offset in the command's data buffer, in bytes.
        datao @ 12: U32,
        /// DATAL: Data Length in this PDU, in bytes.
        datal @ 16: U32,
        reserved20 @ 20: [u8; 4],
    }
}

impl H2cData {
    /// Creates the header of a PDU with `datal` bytes of data; `extent` comes from [`Extent::new`] with HLEN
    /// 24.
    #[must_use]
    pub fn new(cccid: u16, ttag: u16, datao: u32, datal: u32, flags: u8, extent: Extent) -> Self {
        Self {
            header: CommonHeader::new(PduType::H2C_DATA, flags, 24, extent.pdo, extent.plen),
            cccid: U16::new(cccid),
            ttag: U16::new(ttag),
            datao: U32::new(datao),
            datal: U32::new(datal),
            ..Self::default()
        }
    }
}

wire! {
    /// C2HData: Controller to Host Data Transfer (section 3.6.2.8).
    pub struct C2hData[24] {
        header @ 0: CommonHeader,
        /// CCCID: Command Capsule CID.
        cccid @ 8: U16,
        reserved10 @ 10: [u8; 2],
        /// DATAO: Data Offset in the command's data buffer, in bytes.
        datao @ 12: U32,
        /// DATAL: Data Length in this PDU, in bytes.
        datal @ 16: U32,
        reserved20 @ 20: [u8; 4],
    }
}

impl C2hData {
    /// Creates the header of a PDU with `datal` bytes of data; `extent` comes from [`Extent::new`] with HLEN
    /// 24.
    #[must_use]
    pub fn new(cccid: u16, datao: u32, datal: u32, flags: u8, extent: Extent) -> Self {
        Self {
            header: CommonHeader::new(PduType::C2H_DATA, flags, 24, extent.pdo, extent.plen),
            cccid: U16::new(cccid),
            datao: U32::new(datao),
            datal: U32::new(datal),
            ..Self::default()
        }
    }
}

wire! {
    /// R2T: Ready to Transfer; requests `r2tl` bytes of the command's data from the host (section 3.6.2.9).
    pub struct R2t[24] {
        header @ 0: CommonHeader,
        /// CCCID: Command Capsule CID.
        cccid @ 8: U16,
        /// TTAG: Transfer Tag, chosen by the controller and repeated in H2CData.
        ttag @ 10: U16,
        /// R2TO: Requested Data Offset in the command's data buffer, in bytes.
        r2to @ 12: U32,
        /// R2TL: Requested Data Length in bytes.
        r2tl @ 16: U32,
        reserved20 @ 20: [u8; 4],
    }
}

impl R2t {
    /// Creates an R2T PDU. `r2to` and `r2tl` are in bytes. The caller appends HDGST if `has_header_digest`.
    #[must_use]
    pub fn new(cccid: u16, ttag: u16, r2to: u32, r2tl: u32, has_header_digest: bool) -> Self {
        Self {
            header: header_without_data(PduType::R2T, has_header_digest),
            cccid: U16::new(cccid),
            ttag: U16::new(ttag),
            r2to: U32::new(r2to),
            r2tl: U32::new(r2tl),
            ..Self::default()
        }
    }
}

/// Creates the header of a PDU without data: HLEN is 24, and PLEN includes HDGST.
fn header_without_data(pdu_type: PduType, has_header_digest: bool) -> CommonHeader {
    if has_header_digest {
        CommonHeader::new(pdu_type, HDGSTF, 24, 0, 28)
    } else {
        CommonHeader::new(pdu_type, 0, 24, 0, 24)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sqe::Sgl;
    use crate::status::Status;
    use zerocopy::{FromBytes, IntoBytes};

    #[test]
    fn icreq_is_what_linux_sends() {
        // hpda 0, both digests, maxr2t 0 as drivers/nvme/host/tcp.c fills it in.
        let pdu = IcReq::new(0, DigestBits::new().with_header(true).with_data(true), 0);
        assert_eq!(pdu.as_bytes()[..16], [0, 0, 128, 0, 128, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0]);
        assert!(pdu.as_bytes()[16..].iter().all(|&byte| byte == 0));
        assert_eq!((pdu.maxr2t.get(), pdu.digests().into_bits()), (0, 0b11));
    }

    #[test]
    fn icresp_carries_maxh2cdata_where_icreq_carries_maxr2t() {
        let pdu = IcResp::new(3, DigestBits::new().with_data(true), 0x0002_0000);
        assert_eq!(pdu.as_bytes()[..16], [1, 0, 128, 0, 128, 0, 0, 0, 0, 0, 3, 2, 0, 0, 2, 0]);
        assert!(!pdu.digests().header() && pdu.digests().data());
    }

    #[test]
    fn fei_of_a_terminate_request_is_at_byte_10() {
        let pdu = TermReq::new(PduType::C2H_TERM_REQ, Fes::HEADER_DIGEST_ERROR, 0x0403_0201, 24);
        let bytes = [3, 0, 24, 0, 48, 0, 0, 0, 3, 0, 1, 2, 3, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(pdu.as_bytes(), bytes);
        let back = TermReq::read_from_bytes(&bytes).unwrap();
        assert_eq!((back.fes(), back.fei()), (Fes::HEADER_DIGEST_ERROR, 0x0403_0201));
        assert_eq!(Fes::R2T_LIMIT_EXCEEDED.0, 5);
    }

    #[test]
    fn a_write_with_its_data_in_the_capsule() {
        let sqe = Sqe::write(1, 1, 0, 8, false).with_sgl(Sgl::in_capsule(4096));
        let pdu = CapsuleCmd::new(sqe, HDGSTF | DDGSTF, Extent::new(72, 4096, true, true, 0));
        assert_eq!(pdu.as_bytes()[..12], [4, 3, 72, 76, 0x50, 0x10, 0, 0, 1, 0x40, 1, 0]);
        assert_eq!(pdu.header.plen(), 72 + 4 + 4096 + 4);
        let pdu = CapsuleCmd::new(Sqe::flush(1, 1), HDGSTF, Extent::new(72, 0, true, false, 31));
        assert_eq!(pdu.as_bytes()[..8], [4, 1, 72, 0, 76, 0, 0, 0]);
    }

    #[test]
    fn data_is_aligned_to_what_the_receiver_asked_for() {
        assert_eq!(Extent::new(24, 512, false, false, 0), Extent { pdo: 24, plen: 536 });
        assert_eq!(Extent::new(24, 512, true, true, 0), Extent { pdo: 28, plen: 544 });
        assert_eq!(Extent::new(24, 512, true, true, 3), Extent { pdo: 32, plen: 548 });
        assert_eq!(Extent::new(72, 512, true, false, 31), Extent { pdo: 128, plen: 640 });
        assert_eq!(Extent::new(24, u32::MAX, true, true, 31), Extent { pdo: 128, plen: u32::MAX });
        assert_eq!((pda_bytes(0), pda_bytes(PDA_MAX)), (4, 128));
    }

    #[test]
    fn data_pdus_and_r2t_have_their_tags_and_offsets_in_place() {
        let c2h =
            C2hData::new(0x0102, 0x1000, 0x200, LAST_PDU | SUCCESS, Extent::new(24, 0x200, false, false, 0));
        #[rustfmt::skip]
        assert_eq!(
            c2h.as_bytes(),
            [7, 12, 24, 24, 0x18, 2, 0, 0, 2, 1, 0, 0, 0, 0x10, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0]
        );
        let h2c =
            H2cData::new(0x0102, 0x0304, 0x1000, 0x200, LAST_PDU, Extent::new(24, 0x200, false, false, 0));
        #[rustfmt::skip]
        assert_eq!(
            h2c.as_bytes(),
            [6, 4, 24, 24, 0x18, 2, 0, 0, 2, 1, 4, 3, 0, 0x10, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0]
        );
        let r2t = R2t::new(0x0102, 0x0304, 0x1000, 0x200, true);
        #[rustfmt::skip]
        assert_eq!(
            r2t.as_bytes(),
            [9, 1, 24, 0, 28, 0, 0, 0, 2, 1, 4, 3, 0, 0x10, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0]
        );
        assert!(c2h.header.has(LAST_PDU | SUCCESS) && !h2c.header.has(SUCCESS));
    }

    #[test]
    fn a_response_capsule_holds_the_completion() {
        let pdu = CapsuleResp::new(Cqe::new(0x1234, Status::INVALID_OPCODE.dnr()), false);
        #[rustfmt::skip]
        assert_eq!(
            pdu.as_bytes(),
            [5, 0, 24, 0, 24, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x34, 0x12, 0x02, 0x80]
        );
    }

    #[test]
    fn every_type_has_the_header_length_of_its_structure() {
        for (pdu_type, bytes) in [
            (PduType::ICREQ, size_of::<IcReq>()),
            (PduType::ICRESP, size_of::<IcResp>()),
            (PduType::H2C_TERM_REQ, size_of::<TermReq>()),
            (PduType::C2H_TERM_REQ, size_of::<TermReq>()),
            (PduType::CAPSULE_CMD, size_of::<CapsuleCmd>()),
            (PduType::CAPSULE_RESP, size_of::<CapsuleResp>()),
            (PduType::H2C_DATA, size_of::<H2cData>()),
            (PduType::C2H_DATA, size_of::<C2hData>()),
            (PduType::R2T, size_of::<R2t>()),
        ] {
            assert_eq!(pdu_type.hlen().map(usize::from), Some(bytes), "{pdu_type}");
        }
        assert_eq!(PduType(8).hlen(), None);
    }
}
