//! A namespace as commands need it: its identifier and the size of its blocks.

use nvme_spec::identify::IdentifyNamespace;

/// A namespace of a controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Namespace {
    /// NSID.
    pub nsid: u32,
    /// NSZE: its logical blocks.
    pub blocks: u64,
    /// NGUID, the same for as long as it is the same disk; all zero where the target gives none.
    pub nguid: [u8; 16],
    /// log2 of the bytes of a block.
    shift: u32,
}

impl Namespace {
    /// From its Identify data; `None` where that names no block size that is allowed (512 bytes to 64 KiB, a
    /// power of two).
    #[must_use]
    pub fn new(nsid: u32, identify: &IdentifyNamespace) -> Option<Namespace> {
        let block_bytes = identify.block_bytes().filter(|bytes| (512..=65_536).contains(bytes))?;
        let (blocks, shift) = (identify.nsze.get(), block_bytes.trailing_zeros());
        Some(Namespace { nsid, blocks, nguid: identify.nguid, shift })
    }

    /// False when this is another disk than `other` under the same NSID, or its blocks have another size. A
    /// disk may grow and shrink.
    #[must_use]
    pub fn is_same_disk(&self, other: &Namespace) -> bool {
        (self.nsid, self.nguid, self.shift) == (other.nsid, other.nguid, other.shift)
    }

    /// Bytes of a block.
    #[inline]
    #[must_use]
    pub fn block_bytes(&self) -> u32 {
        1 << self.shift
    }

    /// Bytes of all blocks.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.blocks.saturating_mul(u64::from(self.block_bytes()))
    }

    /// How many blocks `bytes` are: `None` unless they are whole blocks, 1 to 65,536 of them.
    #[inline]
    #[must_use]
    pub fn blocks_of(&self, bytes: usize) -> Option<u32> {
        let blocks = bytes >> self.shift;
        let is_whole = blocks << self.shift == bytes;
        u32::try_from(blocks).ok().filter(|blocks| is_whole && (1..=65_536).contains(blocks))
    }
}

/// Some blocks in a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockRange {
    /// The first.
    pub lba: u64,
    /// How many.
    pub blocks: u32,
}

#[cfg(test)]
pub(crate) fn example(block_bytes: u32) -> Namespace {
    Namespace { nsid: 1, blocks: 1000, nguid: [1; 16], shift: block_bytes.trailing_zeros() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_blocks_are_a_transfer() {
        let namespace = example(4096);
        assert_eq!((namespace.block_bytes(), namespace.bytes()), (4096, 4_096_000));
        assert_eq!(namespace.blocks_of(8192), Some(2));
        assert_eq!([0, 1, 4095, 4097, 65_537 * 4096].map(|bytes| namespace.blocks_of(bytes)), [None; 5]);
        assert_eq!(example(512).blocks_of(65_536 * 512), Some(65_536));
    }

    #[test]
    fn a_disk_is_known_by_its_nguid_and_its_blocks_and_not_by_its_size() {
        let namespace = example(4096);
        assert!(namespace.is_same_disk(&Namespace { blocks: 2000, ..namespace }));
        assert!(!namespace.is_same_disk(&Namespace { nguid: [2; 16], ..namespace }));
        assert!(!namespace.is_same_disk(&example(512)));
    }

    #[test]
    fn a_format_without_a_block_size_is_no_namespace() {
        let mut identify = IdentifyNamespace::default();
        assert_eq!(Namespace::new(1, &identify), None);
        identify.lbaf[0].lbads = 12;
        identify.nsze.set(7);
        let namespace = Namespace::new(3, &identify).expect("4 KiB blocks");
        assert_eq!((namespace.nsid, namespace.blocks, namespace.block_bytes()), (3, 7, 4096));
        identify.lbaf[0].lbads = 40;
        assert_eq!(Namespace::new(1, &identify), None);
    }
}
