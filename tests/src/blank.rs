//! [`Blank`]: a disk without a medium, for measuring what is in front of it.

use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Buf;
use spindle_target_disk::{
    ChannelContext, Disk, DiskChannel, Done, Geometry, IoRequest, OpenError, Owner, ResizeError, Token, Usage,
};

/// A disk whose reads leave the buffer as it is.
#[derive(Debug, Clone, Copy)]
pub struct Blank {
    /// Blocks of 4096 bytes.
    pub blocks: u64,
}

impl Disk for Blank {
    fn name(&self) -> &'static str {
        "blank"
    }

    fn kind(&self) -> &'static str {
        "blank"
    }

    fn geometry(&self) -> Geometry {
        Geometry {
            block_bytes: 4096,
            block_count: self.blocks,
            is_read_only: false,
            has_volatile_cache: false,
            can_deallocate: false,
            atomic_blocks: 1,
            can_compare_and_write: false,
        }
    }

    fn open(&self, _context: &ChannelContext) -> Result<Box<dyn DiskChannel>, OpenError> {
        Ok(Box::new(*self))
    }

    fn resize(&self, bytes: u64) -> Result<(), ResizeError> {
        Err(ResizeError { disk: "blank".to_owned(), bytes, allowed: "never".to_owned() })
    }

    fn usage(&self) -> Usage {
        Usage::default()
    }
}

impl DiskChannel for Blank {
    fn geometry(&self) -> Geometry {
        Disk::geometry(self)
    }

    fn submit(&mut self, token: Token, _request: &IoRequest, buf: Option<Buf>) -> Option<Done> {
        Some(Done { token, result: Ok(()), buf })
    }

    fn poll(&mut self, _now: Nanos, _done: &mut Vec<Done>) -> bool {
        false
    }

    fn cancel_owner(&mut self, _owner: Owner) -> usize {
        0
    }

    fn in_flight(&self) -> usize {
        0
    }
}
