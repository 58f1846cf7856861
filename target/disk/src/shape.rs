//! Allowed block sizes and capacities of disks, and conversion from blocks to bytes.

use crate::{BlockRange, OpenError};

/// Allowed block sizes, in bytes.
pub(crate) const BLOCK_BYTES_ALLOWED: [u32; 2] = [512, 4096];

/// Largest disk in bytes: byte offsets of files are signed 64-bit numbers.
pub(crate) const BYTES_MAX: u64 = 1 << 62;

/// Returns the number of blocks of a disk of `bytes`; an error if the size or block size is not allowed.
pub(crate) fn checked_blocks(disk: &str, bytes: u64, block_bytes: u32) -> Result<u64, OpenError> {
    if !BLOCK_BYTES_ALLOWED.contains(&block_bytes) {
        return Err(OpenError::setting(disk, "block_bytes", block_bytes, "must be 512 or 4096"));
    }
    match size_refusal(bytes, block_bytes) {
        Some(allowed) => Err(OpenError::setting(disk, "size", bytes, allowed)),
        None => Ok(bytes / u64::from(block_bytes)),
    }
}

/// Returns `None` if a disk may have `bytes` bytes, otherwise a text with the allowed sizes.
pub(crate) fn size_refusal(bytes: u64, block_bytes: u32) -> Option<String> {
    if bytes == 0 || !bytes.is_multiple_of(u64::from(block_bytes)) || bytes > BYTES_MAX {
        return Some(format!(
            "must be a multiple of the block size, {block_bytes}, from 1 block to 2^62 bytes"
        ));
    }
    None
}

/// Returns log2 of the block size.
pub(crate) fn block_shift(block_bytes: u32) -> u32 {
    block_bytes.trailing_zeros()
}

impl BlockRange {
    /// Returns the byte offset of the range on the disk. `shift`: log2 of the block size.
    #[inline]
    pub(crate) fn offset(self, shift: u32) -> u64 {
        self.lba << shift
    }

    /// Returns the length of the range in bytes. `shift`: log2 of the block size.
    #[inline]
    pub(crate) fn bytes(self, shift: u32) -> u64 {
        u64::from(self.blocks) << shift
    }

    /// Returns the length in bytes of the buffer with the data of the range. `shift`: log2 of the block size.
    ///
    /// # Panics
    /// If the range has 4 GiB or more. The caller's transfer limit is far smaller.
    #[inline]
    pub(crate) fn data_bytes(self, shift: u32) -> u32 {
        let Ok(bytes) = u32::try_from(self.bytes(shift)) else {
            panic!(
                "{} blocks are more than one buffer holds; the caller checks its transfer limit",
                self.blocks
            )
        };
        bytes
    }
}
