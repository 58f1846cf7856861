//! Data block descriptors of a command or of a part of its data.
//!
//! A connection moves the descriptors of each command several times: from the capsule to the command's state,
//! its slot and its chain. Nearly all commands have one descriptor, which is 16 bytes; a list of up to 16 is
//! in a box. The connection keeps unused boxes, so that lists allocate nothing once as many were in use.

use arrayvec::ArrayVec;

use super::capsule::DESCRIPTORS_MAX;
use crate::work::Remote;

/// Address, key and length of one keyed data block descriptor of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Block {
    pub(super) address: u64,
    pub(super) key: u32,
    pub(super) bytes: u32,
}

impl Block {
    /// Returns the memory from byte `offset` of the block on.
    #[inline]
    pub(super) fn remote(&self, offset: u32) -> Remote {
        Remote { address: self.address + u64::from(offset), key: self.key }
    }
}

type List = ArrayVec<Block, DESCRIPTORS_MAX>;

/// Data block descriptors in order; see the module documentation.
#[derive(Debug, Default)]
pub(super) enum Blocks {
    #[default]
    Empty,
    One(Block),
    List(Box<List>),
}

const _: () = assert!(size_of::<Blocks>() <= 24);

/// Boxes for lists, all empty.
#[derive(Debug, Default)]
#[expect(clippy::vec_box, reason = "the boxes are moved, not the lists")]
pub(super) struct SpareLists(Vec<Box<List>>);

impl Blocks {
    #[inline]
    pub(super) fn as_slice(&self) -> &[Block] {
        match self {
            Blocks::Empty => &[],
            Blocks::One(block) => std::slice::from_ref(block),
            Blocks::List(list) => list,
        }
    }

    /// Appends a block. Returns false if there are [`DESCRIPTORS_MAX`] already.
    #[inline]
    pub(super) fn push(&mut self, block: Block, spare: &mut SpareLists) -> bool {
        if matches!(self, Blocks::Empty) {
            *self = Blocks::One(block);
            return true;
        }
        self.push_further(block, spare)
    }

    #[cold]
    fn push_further(&mut self, block: Block, spare: &mut SpareLists) -> bool {
        if let Blocks::One(first) = *self {
            let mut list = spare.0.pop().unwrap_or_default();
            list.push(first);
            *self = Blocks::List(list);
        }
        match self {
            Blocks::List(list) => list.try_push(block).is_ok(),
            Blocks::Empty | Blocks::One(_) => false,
        }
    }

    /// Returns the blocks for `bytes` bytes from `offset` of the data. Fewer if the descriptors end before.
    pub(super) fn part(&self, offset: u32, bytes: usize, spare: &mut SpareLists) -> Blocks {
        let mut part = Blocks::Empty;
        let (mut skip, mut left) = (offset, u32::try_from(bytes).unwrap_or(u32::MAX));
        for block in self.as_slice() {
            let step = left.min(block.bytes.saturating_sub(skip));
            if step > 0 {
                let Remote { address, key } = block.remote(skip);
                part.push(Block { address, key, bytes: step }, spare);
                left -= step;
            }
            skip = skip.saturating_sub(block.bytes);
        }
        part
    }
}

impl SpareLists {
    /// Keeps the box of blocks that are no longer needed, if they have one.
    #[inline]
    pub(super) fn put(&mut self, blocks: Blocks) {
        if let Blocks::List(mut list) = blocks {
            list.clear();
            self.0.push(list);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(index: u32) -> Block {
        Block { address: u64::from(index) << 32, key: index, bytes: 1000 }
    }

    #[test]
    fn a_list_has_its_blocks_in_order_and_its_box_is_used_again() {
        let mut spare = SpareLists::default();
        let mut blocks = Blocks::default();
        assert!(blocks.as_slice().is_empty());
        for count in 1..=16 {
            assert!(blocks.push(block(count), &mut spare));
            assert_eq!(blocks.as_slice(), (1..=count).map(block).collect::<Vec<_>>());
        }
        assert!(!blocks.push(block(17), &mut spare) && blocks.as_slice().len() == 16);
        let place = blocks.as_slice().as_ptr();
        spare.put(blocks);
        spare.put(Blocks::One(block(1)));
        assert_eq!(spare.0.len(), 1);
        let mut next = Blocks::One(block(5));
        assert!(next.push(block(6), &mut spare) && spare.0.is_empty());
        assert_eq!((next.as_slice(), next.as_slice().as_ptr()), (&[block(5), block(6)][..], place));
    }
}
