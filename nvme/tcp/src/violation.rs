//! Violations of NVMe/TCP by a peer: one variant per rule, with its log message and its terminate request.
//!
//! A violation ends the connection. This end sends a terminate request (NVMe/TCP 1.0, "Error Handling
//! Model"), except after a time-out and after the peer's own terminate request. In the request, FES is the
//! kind of error, and FEI the offset of the wrong field or the received digest. The wrong header follows.

use nvme_spec::tcp::{COMMON_HEADER_BYTES, Fes, PDA_MAX, PduType};

use crate::frame::RECEIVE_UNIT;

/// A protocol violation by the peer, with the received and the allowed value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the error message of each variant names its fields")]
pub enum Violation {
    /// The PDU-type is unknown, or this end must not receive it.
    #[error("PDU-type {0}: not one that this peer sends")]
    PduType(PduType),
    /// A PDU arrived before ICReq, or before ICResp at a host.
    #[error("PDU-type {0} before ICReq and ICResp")]
    BeforeInitialize(PduType),
    /// A second ICReq or ICResp arrived.
    #[error("PDU-type {0} came again")]
    InitializedTwice(PduType),
    /// HLEN differs from the fixed value of the PDU-type.
    #[error("HLEN {hlen} of PDU-type {pdu_type}, must be {allowed}")]
    Hlen { pdu_type: PduType, hlen: u8, allowed: u8 },
    /// PLEN does not match the lengths of header, padding, data and digests.
    #[error("PLEN {plen} of PDU-type {pdu_type}, must be {relation} {allowed}")]
    Plen { pdu_type: PduType, plen: u32, relation: &'static str, allowed: u32 },
    /// PDO is less than header and header digest, or not a multiple of the receiver's alignment.
    #[error("PDO {pdo} of PDU-type {pdu_type}, must be at least {least} and a multiple of {RECEIVE_UNIT}")]
    Pdo { pdu_type: PduType, pdo: u8, least: u8 },
    /// HDGSTF or DDGSTF differs from what ICReq and ICResp negotiated.
    #[error("FLAGS {flags:#04x} of PDU-type {pdu_type}: digest flags must be {allowed:#04x}")]
    DigestFlags { pdu_type: PduType, flags: u8, allowed: u8 },
    /// HDGST differs from the digest computed over the header.
    #[error("HDGST {received:#010x} of PDU-type {pdu_type}, the header has {computed:#010x}")]
    HeaderDigest { pdu_type: PduType, received: u32, computed: u32 },
    /// PFV of ICReq or ICResp is not 0, the only defined PDU format version.
    #[error("PFV {0}, must be 0")]
    Pfv(u16),
    /// HPDA or CPDA is greater than 31 (128 bytes).
    #[error("PDU data alignment {0}, must be at most {PDA_MAX}")]
    Alignment(u8),
    /// A command capsule has more data than IOCCSZ allows; on an admin queue and for a Fabrics command at
    /// least 8192 bytes are allowed.
    #[error("{bytes} bytes of in-capsule data, at most {allowed} are taken here")]
    InCapsuleBytes { bytes: u32, allowed: u32 },
    /// TTAG of an H2CData was never used in an R2T, or its transfer is finished.
    #[error("TTAG {0:#06x} names no transfer that waits for data")]
    Ttag(u16),
    /// CCCID differs from the CID of the transfer, or no command with this CID waits for this PDU-type.
    #[error("CCCID {cccid:#06x} of PDU-type {pdu_type}: {expected}")]
    Cccid { pdu_type: PduType, cccid: u16, expected: &'static str },
    /// DATAO or R2TO differs from the offset of the next byte of the transfer.
    #[error("data offset {offset} of PDU-type {pdu_type}, must be {expected}")]
    DataOffset { pdu_type: PduType, offset: u32, expected: u32 },
    /// DATAO + DATAL, or R2TO + R2TL, is greater than the length of the transfer.
    #[error("{bytes} bytes at offset {offset} in PDU-type {pdu_type}, the transfer has {allowed}")]
    DataRange { pdu_type: PduType, offset: u32, bytes: u32, allowed: u32 },
    /// DATAL is 0, or differs from the data length derived from PLEN.
    #[error("DATAL {datal} of PDU-type {pdu_type}, PLEN leaves {allowed} and 0 is none")]
    Datal { pdu_type: PduType, datal: u32, allowed: u32 },
    /// DATAL of an H2CData is greater than MAXH2CDATA.
    #[error("DATAL {datal}, at most MAXH2CDATA {allowed}")]
    H2cDataBytes { datal: u32, allowed: u32 },
    /// LAST_PDU is set before the end of a transfer, missing at its end, or missing beside SUCCESS.
    #[error("FLAGS {flags:#04x} of PDU-type {pdu_type}: {expected}")]
    LastFlag { pdu_type: PduType, flags: u8, expected: &'static str },
    /// DGST of ICResp differs from that of ICReq: a digest was refused, or enabled without request.
    #[error("DGST {dgst:#04x} in ICResp, asked for {asked:#04x}")]
    Dgst { dgst: u8, asked: u8 },
    /// MAXH2CDATA of ICResp is less than 4096 or not a multiple of 4.
    #[error("MAXH2CDATA {0}, must be at least 4096 and a multiple of 4")]
    Maxh2cdata(u32),
    /// An R2T arrived before the data of the command's previous R2T, or its in-capsule data, was sent.
    #[error("R2T for command {0:#06x} while another is not done, MAXR2T is 0")]
    R2tLimit(u16),
    /// R2TL is 0: the R2T requests no data.
    #[error("R2TL 0 for command {0:#06x}")]
    R2tEmpty(u16),
    /// The CID of a completion is not outstanding.
    #[error("completion with CID {0:#06x}, which is not outstanding")]
    CompletionCid(u16),
    /// A read ended with status success before all of its data arrived.
    #[error("command {cid:#06x} succeeded with {received} of {expected} bytes")]
    DataShort { cid: u16, received: u32, expected: u32 },
    /// ICReq or ICResp did not arrive within `initialize_timeout`.
    #[error("the connection was not initialised in time")]
    InitializeTimeout,
    /// The peer sent a terminate request, which reports a violation by this end.
    #[error("terminated by the peer: {fes}, FEI {fei:#x}")]
    TerminatedByPeer { fes: Fes, fei: u32 },
}

impl Violation {
    /// Returns the contents of the terminate request: FES, FEI, and the count of header bytes of the wrong
    /// PDU to return. `None`: no terminate request is sent.
    ///
    /// FEI is the offset of the wrong field, the received digest, or 0 where FES defines none (NVMe/TCP 1.0
    /// sections 3.6.1 to 3.6.2.4). The header bytes are the whole header if the check reads all of it, else
    /// the common header. They do not depend on how the stream was split.
    pub(crate) fn terminate_fields(&self) -> Option<(Fes, u32, usize)> {
        const FIELD: Fes = Fes::INVALID_HEADER_FIELD;
        const COMMON: usize = COMMON_HEADER_BYTES;
        Some(match self {
            Violation::PduType(_) => (FIELD, 0, COMMON),
            Violation::DigestFlags { .. } => (FIELD, 1, COMMON),
            Violation::Hlen { .. } => (FIELD, 2, COMMON),
            Violation::Pdo { .. } => (FIELD, 3, COMMON),
            Violation::Plen { .. } => (FIELD, 4, COMMON),
            Violation::Pfv(_) => (FIELD, 8, 128),
            Violation::Alignment(_) => (FIELD, 10, 128),
            Violation::Dgst { .. } => (FIELD, 11, 128),
            Violation::Maxh2cdata(_) => (FIELD, 12, 128),
            Violation::LastFlag { .. } => (FIELD, 1, 24),
            Violation::Cccid { .. } => (FIELD, 8, 24),
            Violation::Ttag(_) => (FIELD, 10, 24),
            Violation::Datal { .. } | Violation::R2tEmpty(_) => (FIELD, 16, 24),
            Violation::CompletionCid(_) => (FIELD, 20, 24),
            Violation::BeforeInitialize(_) | Violation::InitializedTwice(_) => {
                (Fes::PDU_SEQUENCE_ERROR, 0, COMMON)
            }
            Violation::DataShort { .. } => (Fes::PDU_SEQUENCE_ERROR, 0, 24),
            Violation::HeaderDigest { pdu_type, received, .. } => {
                (Fes::HEADER_DIGEST_ERROR, *received, pdu_type.hlen().map_or(0, usize::from))
            }
            Violation::DataOffset { .. } | Violation::DataRange { .. } => {
                (Fes::DATA_TRANSFER_OUT_OF_RANGE, 0, 24)
            }
            Violation::InCapsuleBytes { .. } => (Fes::DATA_TRANSFER_LIMIT_EXCEEDED, 0, 72),
            Violation::H2cDataBytes { .. } => (Fes::DATA_TRANSFER_LIMIT_EXCEEDED, 0, 24),
            Violation::R2tLimit(_) => (Fes::R2T_LIMIT_EXCEEDED, 0, 24),
            Violation::InitializeTimeout | Violation::TerminatedByPeer { .. } => return None,
        })
    }
}
