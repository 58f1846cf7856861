//! The layout of a PDU, and the checks of the common header that apply to every PDU-type at both ends.
//!
//! ```text
//!   0    8             HLEN    +4     PDO                  PLEN-4  PLEN
//!   | CH | rest of header | HDGST | pad | data ...             | DDGST |
//!   └────────── frame.header_bytes ─────┘└─ frame.data_bytes ──┘
//! ```

use nvme_spec::tcp::{CommonHeader, DDGSTF, DIGEST_BYTES, HDGSTF, PduType, pda_bytes};

use crate::digest;
use crate::violation::Violation;

/// Length of HDGST or DDGST in bytes, in the type of PLEN.
const DIGEST: u32 = 4;
const _: () = assert!(DIGEST as usize == DIGEST_BYTES);

/// CPDA or HPDA that this end sends: 4-byte alignment, the only one that a Linux host supports
/// (`nvme_tcp_init_connection`).
pub(crate) const PDA: u8 = 0;
/// Alignment of received data that [`PDA`] requests, in bytes.
pub(crate) const RECEIVE_UNIT: u8 = 4;
const _: () = assert!(pda_bytes(PDA) == RECEIVE_UNIT as u32);

/// Result of the negotiation in ICReq and ICResp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Agreed {
    /// Every PDU after ICResp except terminate requests has a header digest.
    pub(crate) header_digest: bool,
    /// Every PDU with data has a data digest.
    pub(crate) data_digest: bool,
    /// Alignment of sent data in bytes, from the peer's HPDA or CPDA.
    pub(crate) send_unit: u8,
}

impl Agreed {
    /// State before ICReq and ICResp: no digests, 4-byte alignment.
    pub(crate) const INITIAL: Agreed = Agreed { header_digest: false, data_digest: false, send_unit: 4 };

    /// Returns the PDO of a PDU that this end sends, with a header of `hlen` bytes.
    pub(crate) fn data_offset(&self, hlen: u8) -> u8 {
        let header = u32::from(hlen) + if self.header_digest { DIGEST } else { 0 };
        // Headers of PDUs with data have 24 or 72 bytes, and the alignment is at most 128. So the offset is
        // at most 128.
        u8::try_from(header.next_multiple_of(u32::from(self.send_unit))).unwrap_or(u8::MAX)
    }

    /// Returns HDGSTF and DDGSTF of a PDU that this end sends.
    pub(crate) fn flags(&self, has_data: bool) -> u8 {
        let header = if self.header_digest { HDGSTF } else { 0 };
        let data = if self.data_digest && has_data { DDGSTF } else { 0 };
        header | data
    }
}

/// Lengths of the parts of a PDU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Frame {
    /// Bytes before the data: header, header digest, padding.
    pub(crate) header_bytes: u32,
    /// Bytes of data, without padding and digest.
    pub(crate) data_bytes: u32,
    /// DDGST follows the data.
    pub(crate) data_digest: bool,
}

impl Frame {
    /// Checks the common header of a PDU without data; `hlen`: header length of its PDU-type in bytes.
    #[inline]
    pub(crate) fn without_data(ch: &CommonHeader, hlen: u8, agreed: &Agreed) -> Result<Frame, Violation> {
        let header_bytes = Self::header(ch, hlen, agreed)?;
        if ch.plen() != header_bytes {
            return Err(plen_violation(ch, "exactly", header_bytes));
        }
        Ok(Frame { header_bytes, data_bytes: 0, data_digest: false })
    }

    /// Checks the common header of a PDU that may have data; `hlen`: header length of its PDU-type in bytes.
    #[inline]
    pub(crate) fn with_data(ch: &CommonHeader, hlen: u8, agreed: &Agreed) -> Result<Frame, Violation> {
        let header_bytes = Self::header(ch, hlen, agreed)?;
        if ch.plen() == header_bytes {
            return Ok(Frame { header_bytes, data_bytes: 0, data_digest: false });
        }
        if agreed.data_digest && ch.flags & DDGSTF == 0 {
            return Err(digest_flags_violation(ch, agreed));
        }
        let data_at = u32::from(ch.pdo);
        if data_at < header_bytes || !ch.pdo.is_multiple_of(RECEIVE_UNIT) {
            let least = u8::try_from(header_bytes).unwrap_or(u8::MAX);
            return Err(Violation::Pdo { pdu_type: ch.pdu_type, pdo: ch.pdo, least });
        }
        let around = data_at + if agreed.data_digest { DIGEST } else { 0 };
        if ch.plen() <= around {
            return Err(plen_violation(ch, "at least", around + 1));
        }
        Ok(Frame { header_bytes: data_at, data_bytes: ch.plen() - around, data_digest: agreed.data_digest })
    }

    /// Checks HLEN, the digest flags and the lower bound of PLEN. Returns the bytes of header and digest.
    #[inline]
    fn header(ch: &CommonHeader, hlen: u8, agreed: &Agreed) -> Result<u32, Violation> {
        if ch.hlen != hlen {
            return Err(Violation::Hlen { pdu_type: ch.pdu_type, hlen: ch.hlen, allowed: hlen });
        }
        let has_header_digest = ch.flags & HDGSTF != 0;
        if has_header_digest != agreed.header_digest || (ch.flags & DDGSTF != 0 && !agreed.data_digest) {
            return Err(digest_flags_violation(ch, agreed));
        }
        let header_bytes = u32::from(hlen) + if agreed.header_digest { DIGEST } else { 0 };
        if ch.plen() < header_bytes {
            return Err(plen_violation(ch, "at least", header_bytes));
        }
        Ok(header_bytes)
    }
}

#[cold]
fn plen_violation(ch: &CommonHeader, relation: &'static str, allowed: u32) -> Violation {
    Violation::Plen { pdu_type: ch.pdu_type, plen: ch.plen(), relation, allowed }
}

#[cold]
fn digest_flags_violation(ch: &CommonHeader, agreed: &Agreed) -> Violation {
    Violation::DigestFlags { pdu_type: ch.pdu_type, flags: ch.flags, allowed: agreed.flags(true) }
}

/// Checks HLEN, flags and PLEN of an ICReq or ICResp: 128 bytes, no digests (NVMe/TCP 1.0 sections 3.6.2.1
/// and 3.6.2.2).
pub(crate) fn check_initialize(ch: &CommonHeader) -> Result<(), Violation> {
    Frame::without_data(ch, 128, &Agreed::INITIAL).map(|_| ())
}

/// Longest terminate request in bytes: its header and 128 of the wrong PDU (NVMe/TCP 1.0 section 3.6.2.3).
const TERM_REQ_BYTES_MAX: u32 = 152;

/// Checks HLEN and PLEN of a terminate request, which never has digests.
pub(crate) fn check_terminate(ch: &CommonHeader) -> Result<(), Violation> {
    if ch.hlen != 24 {
        return Err(Violation::Hlen { pdu_type: ch.pdu_type, hlen: ch.hlen, allowed: 24 });
    }
    match ch.plen() {
        0..24 => Err(plen_violation(ch, "at least", 24)),
        24..=TERM_REQ_BYTES_MAX => Ok(()),
        _ => Err(plen_violation(ch, "at most", TERM_REQ_BYTES_MAX)),
    }
}

/// Compares HDGST, the 4 bytes after the first `hlen` bytes of `header`, with the computed digest.
///
/// # Panics
/// If `header` is shorter than `hlen` and the digest: callers must pass `Frame::header_bytes` bytes.
#[inline]
pub(crate) fn check_header_digest(pdu_type: PduType, header: &[u8], hlen: usize) -> Result<(), Violation> {
    let (covered, rest) = header.split_at(hlen);
    let received = digest::from_wire(*rest.first_chunk().expect("the digest was waited for"));
    let computed = digest::of_bytes(covered);
    if received != computed {
        return Err(Violation::HeaderDigest { pdu_type, received, computed });
    }
    Ok(())
}
