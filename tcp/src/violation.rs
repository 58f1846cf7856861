//! The rules of NVMe/TCP that a peer can break: one variant for each, with what goes on the wire and what
//! goes to the log.
//!
//! A violation ends the connection. The other side hears of it by a terminate request (NVMe/TCP 1.0, "Error
//! Handling Model"): FES says which kind of rule, FEI which field, and the header of the PDU in question
//! follows.

use nvme_spec::tcp::{COMMON_HEADER_BYTES, Fes, PDA_MAX, PduType};

use crate::frame::RECEIVE_UNIT;

/// A rule that the peer broke, with the value that it sent and what is allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the message of a rule says what its fields are")]
pub enum Violation {
    /// A PDU of an unknown type, or one that only the other side sends.
    #[error("PDU-type {0}: not one that this peer sends")]
    PduType(PduType),
    /// Something came before the connection was initialised.
    #[error("PDU-type {0} before ICReq and ICResp")]
    BeforeInitialize(PduType),
    /// ICReq or ICResp came a second time.
    #[error("PDU-type {0} came again")]
    InitializedTwice(PduType),
    /// HLEN is not that of the PDU's type.
    #[error("HLEN {hlen} of PDU-type {pdu_type}, must be {allowed}")]
    Hlen { pdu_type: PduType, hlen: u8, allowed: u8 },
    /// PLEN does not fit header, padding, data and digests.
    #[error("PLEN {plen} of PDU-type {pdu_type}, must be {relation} {allowed}")]
    Plen { pdu_type: PduType, plen: u32, relation: &'static str, allowed: u32 },
    /// PDO points into the header, or not where the receiver's alignment allows.
    #[error("PDO {pdo} of PDU-type {pdu_type}, must be at least {least} and a multiple of {RECEIVE_UNIT}")]
    Pdo { pdu_type: PduType, pdo: u8, least: u8 },
    /// HDGSTF or DDGSTF is not as ICReq and ICResp agreed.
    #[error("FLAGS {flags:#04x} of PDU-type {pdu_type}: digest flags must be {allowed:#04x}")]
    DigestFlags { pdu_type: PduType, flags: u8, allowed: u8 },
    /// The header does not have the digest that it says.
    #[error("HDGST {received:#010x} of PDU-type {pdu_type}, the header has {computed:#010x}")]
    HeaderDigest { pdu_type: PduType, received: u32, computed: u32 },
    /// A format of NVMe/TCP that does not exist.
    #[error("PFV {0}, must be 0")]
    Pfv(u16),
    /// HPDA or CPDA out of range.
    #[error("PDU data alignment {0}, must be at most {PDA_MAX}")]
    Alignment(u8),
    /// More data in a command capsule than was offered.
    #[error("{bytes} bytes of in-capsule data, at most {allowed} are taken here")]
    InCapsuleBytes { bytes: u32, allowed: u32 },
    /// TTAG names no transfer that is waiting for data: never given out, finished, or of another age.
    #[error("TTAG {0:#06x} names no transfer that waits for data")]
    Ttag(u16),
    /// CCCID is not that of the transfer, or names no command that waits for this PDU.
    #[error("CCCID {cccid:#06x} of PDU-type {pdu_type}: {expected}")]
    Cccid { pdu_type: PduType, cccid: u16, expected: &'static str },
    /// DATAO or R2TO is not where the transfer stands.
    #[error("data offset {offset} of PDU-type {pdu_type}, must be {expected}")]
    DataOffset { pdu_type: PduType, offset: u32, expected: u32 },
    /// The data goes past the end of the transfer.
    #[error("{bytes} bytes at offset {offset} in PDU-type {pdu_type}, the transfer has {allowed}")]
    DataRange { pdu_type: PduType, offset: u32, bytes: u32, allowed: u32 },
    /// DATAL is 0 or is not what PLEN leaves for data.
    #[error("DATAL {datal} of PDU-type {pdu_type}, PLEN leaves {allowed} and 0 is none")]
    Datal { pdu_type: PduType, datal: u32, allowed: u32 },
    /// More data in an H2CData PDU than MAXH2CDATA.
    #[error("DATAL {datal}, at most MAXH2CDATA {allowed}")]
    H2cDataBytes { datal: u32, allowed: u32 },
    /// LAST_PDU is set before the end of a transfer, or not set at its end, or SUCCESS without it.
    #[error("FLAGS {flags:#04x} of PDU-type {pdu_type}: {expected}")]
    LastFlag { pdu_type: PduType, flags: u8, expected: &'static str },
    /// The controller answered digests that were not asked for, or refused one that was.
    #[error("DGST {dgst:#04x} in ICResp, asked for {asked:#04x}")]
    Dgst { dgst: u8, asked: u8 },
    /// MAXH2CDATA too small or not a multiple of 4.
    #[error("MAXH2CDATA {0}, must be at least 4096 and a multiple of 4")]
    Maxh2cdata(u32),
    /// An R2T while the previous one of the command is not done.
    #[error("R2T for command {0:#06x} while another is not done, MAXR2T is 0")]
    R2tLimit(u16),
    /// R2TL is 0.
    #[error("R2TL 0 for command {0:#06x}")]
    R2tEmpty(u16),
    /// A completion for a command that is not outstanding.
    #[error("completion with CID {0:#06x}, which is not outstanding")]
    CompletionCid(u16),
    /// Success, but not all of the data came.
    #[error("command {cid:#06x} succeeded with {received} of {expected} bytes")]
    DataShort { cid: u16, received: u32, expected: u32 },
    /// No ICReq or ICResp in time.
    #[error("the connection was not initialised in time")]
    InitializeTimeout,
    /// The peer ended the connection by a terminate request: it found a violation of ours, or says so.
    #[error("terminated by the peer: {fes}, FEI {fei:#x}")]
    TerminatedByPeer { fes: Fes, fei: u32 },
}

impl Violation {
    /// What the terminate request says: FES; FEI, which is the offset of the wrong field in its header, the
    /// digest that was received, or 0 where FES has none (NVMe/TCP 1.0 sections 3.6.1 to 3.6.2.4); and how
    /// many bytes of the wrong PDU's header go back with it. That is all of it when all of it was looked at,
    /// else the common header: it depends on the rule alone, not on how the stream was cut. `None`: there is
    /// no peer to tell.
    pub(crate) fn report(&self) -> Option<(Fes, u32, usize)> {
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
