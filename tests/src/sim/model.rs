//! What each block may hold, and who is busy with it.
//!
//! A block's content is a tag spread over its words; tag 0 is all zeroes. A write that was acknowledged
//! leaves one possible tag; one that failed, or whose connection died, leaves the old ones and the new. A
//! read narrows them to what it saw. Commands that overlap with a write are not issued at the same time: what
//! they would see is not promised.

/// Tags of one block that are possible now, and its users.
#[derive(Debug, Clone)]
struct Block {
    possible: Vec<u64>,
    readers: u16,
    is_written: bool,
}

/// One namespace.
#[derive(Debug)]
pub struct Model {
    blocks: Vec<Block>,
    /// Bytes of a block.
    pub block_bytes: usize,
    next_tag: u64,
}

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

impl Model {
    /// All zeroes.
    #[must_use]
    pub fn new(blocks: usize, block_bytes: usize) -> Model {
        let block = Block { possible: vec![0], readers: 0, is_written: false };
        Model { blocks: vec![block; blocks], block_bytes, next_tag: 1 }
    }

    /// Number of blocks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// True when it has no blocks.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// A tag that was never used.
    pub fn fresh_tag(&mut self) -> u64 {
        self.next_tag += 1;
        self.next_tag << 8 | 1
    }

    /// The content, when only one is possible.
    #[must_use]
    pub fn certain(&self, block: usize) -> Option<u64> {
        match self.blocks[block].possible[..] {
            [tag] => Some(tag),
            _ => None,
        }
    }

    /// Begin to read: false when somebody writes there.
    pub fn try_read(&mut self, first: usize, count: usize) -> bool {
        let range = first..first + count;
        if self.blocks[range.clone()].iter().any(|block| block.is_written) {
            return false;
        }
        self.blocks[range].iter_mut().for_each(|block| block.readers += 1);
        true
    }

    /// Begin to write: false when somebody else is there.
    pub fn try_write(&mut self, first: usize, count: usize) -> bool {
        let range = first..first + count;
        if self.blocks[range.clone()].iter().any(|block| block.is_written || block.readers > 0) {
            return false;
        }
        self.blocks[range].iter_mut().for_each(|block| block.is_written = true);
        true
    }

    /// A read has ended.
    pub fn end_read(&mut self, first: usize, count: usize) {
        self.blocks[first..first + count].iter_mut().for_each(|block| block.readers -= 1);
    }

    /// A write has ended: for certain, or perhaps.
    pub fn end_write(&mut self, first: usize, tags: &[u64], is_certain: bool) {
        for (block, tag) in self.blocks[first..first + tags.len()].iter_mut().zip(tags) {
            block.is_written = false;
            if is_certain {
                block.possible.clear();
            }
            if !block.possible.contains(tag) {
                block.possible.push(*tag);
            }
        }
    }

    /// A write that had no effect has ended.
    pub fn end_refused_write(&mut self, first: usize, count: usize) {
        self.blocks[first..first + count].iter_mut().for_each(|block| block.is_written = false);
    }

    /// Judge what a read brought.
    ///
    /// # Panics
    /// When a block holds what it cannot hold.
    pub fn judge(&mut self, first: usize, bytes: &[u8]) {
        for (index, content) in bytes.chunks_exact(self.block_bytes).enumerate() {
            let block = &mut self.blocks[first + index];
            let tag = tag_of(content);
            let is_possible = tag.is_some_and(|tag| block.possible.contains(&tag));
            assert!(
                is_possible,
                "block {}: read {tag:x?}, possible {:x?}; first bytes {:02x?}",
                first + index,
                block.possible,
                &content[..16]
            );
            block.possible = tag.into_iter().collect();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "block 1")]
    fn a_wrong_block_is_noticed() {
        let mut model = Model::new(2, 512);
        let mut bytes = [0; 1024];
        fill(77, &mut bytes[512..]);
        model.judge(0, &bytes);
    }

    #[test]
    fn a_torn_block_has_no_tag() {
        let mut bytes = [0; 512];
        fill(9, &mut bytes);
        assert_eq!(tag_of(&bytes), Some(9));
        fill(5, &mut bytes[..256]);
        assert_eq!(tag_of(&bytes), None);
    }
}
