//! HDGST and DDGST: CRC32C over a header, and over the segments of a buffer without a copy.
//!
//! `crc-fast` is faster than `crc32c` at 24 B, 4 KiB and 128 KiB (measured in `docs/lab-notes.md`).

use crc_fast::{CrcAlgorithm, Digest, checksum};
use nvme_spec::tcp::DIGEST_BYTES;
use spindle_reactor::mem::Buf;

/// CRC32C as in iSCSI: Castagnoli polynomial, reflected (NVMe/TCP 1.0, "PDU Header and Data Digests").
const CRC32C: CrcAlgorithm = CrcAlgorithm::Crc32Iscsi;

fn low_half(crc: u64) -> u32 {
    // The crate returns CRCs of every width as u64; a 32-bit CRC is in the low half.
    u32::try_from(crc & u64::from(u32::MAX)).unwrap_or(0)
}

#[inline]
pub(crate) fn of_bytes(bytes: &[u8]) -> u32 {
    low_half(checksum(CRC32C, bytes))
}

/// Returns the digest of `bytes` bytes of `buf` from `offset` on.
///
/// # Panics
/// If `offset + bytes` is greater than the buffer's length.
pub(crate) fn of_buf(buf: &Buf, offset: usize, bytes: usize) -> u32 {
    if let Some(slice) = buf.as_slice() {
        return of_bytes(&slice[offset..offset + bytes]);
    }
    let mut digest = Digest::new(CRC32C);
    buf.visit(offset, bytes, |piece| digest.update(piece));
    low_half(digest.finalize())
}

/// Converts HDGST or DDGST from the wire, where both are little endian.
#[inline]
pub(crate) fn from_wire(bytes: [u8; DIGEST_BYTES]) -> u32 {
    u32::from_le_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use spindle_reactor::mem::{Pages, Pool, ZoneSpec};

    use super::*;

    #[test]
    fn the_digest_is_the_crc32c_of_iscsi() {
        // Check value of the CRC catalogue, and two test vectors of RFC 3720 appendix B.4.
        assert_eq!(of_bytes(b"123456789"), 0xe306_9283);
        assert_eq!(of_bytes(&[0; 32]), 0x8a91_36aa);
        assert_eq!(of_bytes(&[0xff; 32]), 0x62a8_ab43);
    }

    #[test]
    fn pieces_give_the_digest_of_the_whole() {
        let bytes = (2 << 20) + 5000;
        let zeroes = Buf::zeroes(bytes);
        assert!(!zeroes.is_contiguous());
        assert_eq!(of_buf(&zeroes, 0, bytes as usize), of_bytes(&vec![0; bytes as usize]));
        assert_eq!(of_buf(&zeroes, (2 << 20) - 6, 77), of_bytes(&[0; 77]));
        let pool = Pool::new(&[ZoneSpec { buffer_bytes: 4096, count: 1 }], Pages::Base).expect("pool");
        let mut buf = pool.take(4096).expect("buffer");
        buf.copy_in(100, b"123456789");
        assert_eq!(of_buf(&buf, 100, 9), 0xe306_9283);
    }
}
