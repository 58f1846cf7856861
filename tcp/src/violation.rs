//! The rules of NVMe/TCP that a peer can break: one variant for each, with what goes on the wire and what
//! goes to the log.
//!
//! A violation ends the connection. The other side hears of it by a terminate request (NVMe/TCP 1.0, "Error
//! Handling Model"): FES says which kind of rule, FEI which field, and the header of the PDU in question
//! follows.

use nvme_spec::tcp::{COMMON_HEADER_BYTES, Fes, PduType};

/// Offset of a field in its PDU header, for FEI (NVMe/TCP 1.0 sections 3.6.1 and 3.6.2).
mod at {
    pub(super) const PDU_TYPE: u32 = 0;
    pub(super) const FLAGS: u32 = 1;
    pub(super) const HLEN: u32 = 2;
    pub(super) const PDO: u32 = 3;
    pub(super) const PLEN: u32 = 4;
    pub(super) const PFV: u32 = 8;
    pub(super) const CCCID: u32 = 8;
    pub(super) const PDA: u32 = 10;
    pub(super) const TTAG: u32 = 10;
    pub(super) const DGST: u32 = 11;
    pub(super) const MAXH2CDATA: u32 = 12;
    pub(super) const DATAL: u32 = 16;
    pub(super) const RCCQE_CID: u32 = 20;
}

/// A rule that the peer broke, with the value that it sent and what is allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// A PDU of an unknown type, or one that only the other side sends.
    #[error("PDU-type {pdu_type}: not one that this peer sends")]
    PduType {
        /// What it sent.
        pdu_type: PduType,
    },
    /// Something came before the connection was initialised.
    #[error("PDU-type {pdu_type} before ICReq and ICResp")]
    BeforeInitialize {
        /// What it sent.
        pdu_type: PduType,
    },
    /// ICReq or ICResp came a second time.
    #[error("PDU-type {pdu_type} came again")]
    InitializedTwice {
        /// ICReq or ICResp.
        pdu_type: PduType,
    },
    /// HLEN is not that of the PDU's type.
    #[error("HLEN {hlen} of PDU-type {pdu_type}, must be {allowed}")]
    Hlen {
        /// Whose header it is.
        pdu_type: PduType,
        /// What it sent.
        hlen: u8,
        /// The length of such a header.
        allowed: u8,
    },
    /// PLEN does not fit header, padding, data and digests.
    #[error("PLEN {plen} of PDU-type {pdu_type}, must be {relation} {allowed}")]
    Plen {
        /// Whose length it is.
        pdu_type: PduType,
        /// What it sent.
        plen: u32,
        /// "exactly", "at least" or "at most".
        relation: &'static str,
        /// The bound.
        allowed: u32,
    },
    /// PDO points into the header, or not where the receiver's alignment allows.
    #[error("PDO {pdo} of PDU-type {pdu_type}, must be at least {least} and a multiple of {unit}")]
    Pdo {
        /// Whose data it is.
        pdu_type: PduType,
        /// What it sent.
        pdo: u8,
        /// Header and header digest.
        least: u8,
        /// The alignment.
        unit: u8,
    },
    /// HDGSTF or DDGSTF is not as ICReq and ICResp agreed.
    #[error("FLAGS {flags:#04x} of PDU-type {pdu_type}: digest flags must be {allowed:#04x}")]
    DigestFlags {
        /// Whose flags they are.
        pdu_type: PduType,
        /// What it sent.
        flags: u8,
        /// The digest flags that it must have.
        allowed: u8,
    },
    /// The header does not have the digest that it says.
    #[error("HDGST {received:#010x} of PDU-type {pdu_type}, the header has {computed:#010x}")]
    HeaderDigest {
        /// Whose header it is.
        pdu_type: PduType,
        /// What it sent.
        received: u32,
        /// What it ought to be.
        computed: u32,
    },
    /// A format of NVMe/TCP that does not exist.
    #[error("PFV {pfv}, must be 0")]
    Pfv {
        /// What it sent.
        pfv: u16,
    },
    /// HPDA or CPDA out of range.
    #[error("PDU data alignment {pda}, must be at most {allowed}")]
    Alignment {
        /// What it sent.
        pda: u8,
        /// The most.
        allowed: u8,
    },
    /// More data in a command capsule than was offered.
    #[error("{bytes} bytes of in-capsule data, at most {allowed} are taken here")]
    InCapsuleBytes {
        /// What it sent.
        bytes: u32,
        /// The most.
        allowed: u32,
    },
    /// TTAG names no transfer that is waiting for data: never given out, finished, or of another age.
    #[error("TTAG {ttag:#06x} names no transfer that waits for data")]
    Ttag {
        /// What it sent.
        ttag: u16,
    },
    /// CCCID is not that of the transfer, or names no command that waits for this PDU.
    #[error("CCCID {cccid:#06x} of PDU-type {pdu_type}: {expected}")]
    Cccid {
        /// What came.
        pdu_type: PduType,
        /// What it sent.
        cccid: u16,
        /// What is expected.
        expected: &'static str,
    },
    /// DATAO or R2TO is not where the transfer stands.
    #[error("data offset {offset} of PDU-type {pdu_type}, must be {expected}")]
    DataOffset {
        /// What came.
        pdu_type: PduType,
        /// What it sent.
        offset: u32,
        /// The next byte of the transfer.
        expected: u32,
    },
    /// The data goes past the end of the transfer.
    #[error("{bytes} bytes at offset {offset} in PDU-type {pdu_type}, the transfer has {allowed}")]
    DataRange {
        /// What came.
        pdu_type: PduType,
        /// Its offset.
        offset: u32,
        /// Its length.
        bytes: u32,
        /// Length of the transfer.
        allowed: u32,
    },
    /// DATAL is 0 or is not what PLEN leaves for data.
    #[error("DATAL {datal} of PDU-type {pdu_type}, PLEN leaves {allowed} and 0 is none")]
    Datal {
        /// What came.
        pdu_type: PduType,
        /// What it sent.
        datal: u32,
        /// What PLEN, PDO and digests leave.
        allowed: u32,
    },
    /// More data in an H2CData PDU than MAXH2CDATA.
    #[error("DATAL {datal}, at most MAXH2CDATA {allowed}")]
    H2cDataBytes {
        /// What it sent.
        datal: u32,
        /// MAXH2CDATA.
        allowed: u32,
    },
    /// LAST_PDU is set before the end of a transfer, or not set at its end, or SUCCESS without it.
    #[error("FLAGS {flags:#04x} of PDU-type {pdu_type}: {expected}")]
    LastFlag {
        /// What came.
        pdu_type: PduType,
        /// What it sent.
        flags: u8,
        /// What is expected.
        expected: &'static str,
    },
    /// The controller answered digests that were not asked for, or refused one that was.
    #[error("DGST {dgst:#04x} in ICResp, asked for {asked:#04x}")]
    Dgst {
        /// What it sent.
        dgst: u8,
        /// What ICReq said.
        asked: u8,
    },
    /// MAXH2CDATA too small or not a multiple of 4.
    #[error("MAXH2CDATA {maxh2cdata}, must be at least 4096 and a multiple of 4")]
    Maxh2cdata {
        /// What it sent.
        maxh2cdata: u32,
    },
    /// An R2T while the previous one of the command is not done.
    #[error("R2T for command {cccid:#06x} while another is not done, MAXR2T is 0")]
    R2tLimit {
        /// The command.
        cccid: u16,
    },
    /// R2TL is 0.
    #[error("R2TL 0 for command {cccid:#06x}")]
    R2tEmpty {
        /// The command.
        cccid: u16,
    },
    /// A completion for a command that is not outstanding.
    #[error("completion with CID {cid:#06x}, which is not outstanding")]
    CompletionCid {
        /// What it sent.
        cid: u16,
    },
    /// Success, but not all of the data came.
    #[error("command {cid:#06x} succeeded with {received} of {expected} bytes")]
    DataShort {
        /// The command.
        cid: u16,
        /// What came.
        received: u32,
        /// What it asked for.
        expected: u32,
    },
    /// No ICReq or ICResp in time.
    #[error("the connection was not initialised in time")]
    InitializeTimeout,
    /// The peer ended the connection by a terminate request: it found a violation of ours, or says so.
    #[error("terminated by the peer: {fes}, FEI {fei:#x}")]
    TerminatedByPeer {
        /// Its reason.
        fes: Fes,
        /// The field or digest.
        fei: u32,
    },
}

impl Violation {
    /// FES of the terminate request, `None` when there is no peer to tell.
    #[must_use]
    pub fn fes(&self) -> Option<Fes> {
        match self {
            Violation::PduType { .. }
            | Violation::Hlen { .. }
            | Violation::Plen { .. }
            | Violation::Pdo { .. }
            | Violation::DigestFlags { .. }
            | Violation::Pfv { .. }
            | Violation::Alignment { .. }
            | Violation::Ttag { .. }
            | Violation::Cccid { .. }
            | Violation::Datal { .. }
            | Violation::LastFlag { .. }
            | Violation::Dgst { .. }
            | Violation::Maxh2cdata { .. }
            | Violation::R2tEmpty { .. }
            | Violation::CompletionCid { .. } => Some(Fes::INVALID_HEADER_FIELD),
            Violation::BeforeInitialize { .. }
            | Violation::InitializedTwice { .. }
            | Violation::DataShort { .. } => Some(Fes::PDU_SEQUENCE_ERROR),
            Violation::HeaderDigest { .. } => Some(Fes::HEADER_DIGEST_ERROR),
            Violation::DataOffset { .. } | Violation::DataRange { .. } => {
                Some(Fes::DATA_TRANSFER_OUT_OF_RANGE)
            }
            Violation::InCapsuleBytes { .. } | Violation::H2cDataBytes { .. } => {
                Some(Fes::DATA_TRANSFER_LIMIT_EXCEEDED)
            }
            Violation::R2tLimit { .. } => Some(Fes::R2T_LIMIT_EXCEEDED),
            Violation::InitializeTimeout | Violation::TerminatedByPeer { .. } => None,
        }
    }

    /// FEI of the terminate request: the offset of the wrong field, or the digest that was received, or 0
    /// where FES has none (NVMe/TCP 1.0 sections 3.6.2.3 and 3.6.2.4).
    #[must_use]
    pub fn fei(&self) -> u32 {
        match self {
            Violation::PduType { .. } => at::PDU_TYPE,
            Violation::Hlen { .. } => at::HLEN,
            Violation::Plen { .. } => at::PLEN,
            Violation::Pdo { .. } => at::PDO,
            Violation::DigestFlags { .. } | Violation::LastFlag { .. } => at::FLAGS,
            Violation::HeaderDigest { received, .. } => *received,
            Violation::Pfv { .. } => at::PFV,
            Violation::Alignment { .. } => at::PDA,
            Violation::Ttag { .. } => at::TTAG,
            Violation::Cccid { .. } => at::CCCID,
            Violation::Datal { .. } | Violation::R2tEmpty { .. } => at::DATAL,
            Violation::Dgst { .. } => at::DGST,
            Violation::Maxh2cdata { .. } => at::MAXH2CDATA,
            Violation::CompletionCid { .. } => at::RCCQE_CID,
            Violation::BeforeInitialize { .. }
            | Violation::InitializedTwice { .. }
            | Violation::DataShort { .. }
            | Violation::DataOffset { .. }
            | Violation::DataRange { .. }
            | Violation::InCapsuleBytes { .. }
            | Violation::H2cDataBytes { .. }
            | Violation::R2tLimit { .. }
            | Violation::InitializeTimeout
            | Violation::TerminatedByPeer { .. } => 0,
        }
    }

    /// How much of the wrong PDU's header goes back with the terminate request: all of it when all of it was
    /// looked at, else the common header. It depends on the rule alone, not on how the stream was cut.
    pub(crate) fn header_bytes(&self) -> usize {
        match self {
            Violation::PduType { .. }
            | Violation::BeforeInitialize { .. }
            | Violation::InitializedTwice { .. }
            | Violation::Hlen { .. }
            | Violation::Plen { .. }
            | Violation::Pdo { .. }
            | Violation::DigestFlags { .. } => COMMON_HEADER_BYTES,
            Violation::Pfv { .. }
            | Violation::Alignment { .. }
            | Violation::Dgst { .. }
            | Violation::Maxh2cdata { .. } => 128,
            Violation::InCapsuleBytes { .. } => 72,
            Violation::HeaderDigest { pdu_type, .. } => pdu_type.hlen().map_or(0, usize::from),
            Violation::Ttag { .. }
            | Violation::Cccid { .. }
            | Violation::DataOffset { .. }
            | Violation::DataRange { .. }
            | Violation::Datal { .. }
            | Violation::H2cDataBytes { .. }
            | Violation::LastFlag { .. }
            | Violation::R2tLimit { .. }
            | Violation::R2tEmpty { .. }
            | Violation::CompletionCid { .. }
            | Violation::DataShort { .. } => 24,
            Violation::InitializeTimeout | Violation::TerminatedByPeer { .. } => 0,
        }
    }
}
