//! What blocks hold: every block that is written gets a tag of its own, which says where it belongs and is
//! spread over the block's words, so that a block torn in the middle has none. Tag 0 is all zeroes.

/// Fill a block's bytes from its tag.
pub fn fill(tag: u64, bytes: &mut [u8]) {
    for (index, word) in bytes.chunks_exact_mut(8).enumerate() {
        let value = if tag == 0 { 0 } else { tag.wrapping_mul(index as u64 * 2 + 1) };
        word.copy_from_slice(&value.to_le_bytes());
    }
}

/// The tag of a block's bytes, if they are all of one.
#[must_use]
pub fn tag_of(bytes: &[u8]) -> Option<u64> {
    let tag = u64::from_le_bytes(bytes.get(..8)?.try_into().ok()?);
    let is_whole = bytes.chunks_exact(8).enumerate().all(|(index, word)| {
        let value = if tag == 0 { 0 } else { tag.wrapping_mul(index as u64 * 2 + 1) };
        word == value.to_le_bytes()
    });
    is_whole.then_some(tag)
}

/// A tag that no other write has: `sequence` counts the writes of a run.
#[must_use]
pub fn stamp(sequence: u64, place: usize, block: usize) -> u64 {
    sequence << 32 | (place as u64 & 0xff) << 24 | (block as u64 & 0xffff) << 8 | 1
}

/// The block for which a tag was made.
#[must_use]
pub fn home(tag: u64) -> (usize, usize) {
    ((tag >> 24 & 0xff) as usize, (tag >> 8 & 0xffff) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_torn_block_has_no_tag() {
        let mut bytes = [0; 512];
        fill(9, &mut bytes);
        assert_eq!(tag_of(&bytes), Some(9));
        fill(5, &mut bytes[..256]);
        assert_eq!(tag_of(&bytes), None);
    }

    #[test]
    fn a_stamp_says_where_it_belongs() {
        assert_eq!(home(stamp(7, 3, 4195)), (3, 4195));
        assert_ne!(stamp(7, 3, 4195), stamp(8, 3, 4195));
    }
}
