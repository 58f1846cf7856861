//! A disk that reads as zeroes and discards writes, for measuring the target without a medium.
//!
//! Every command ends in `prepare` or `submit`. Reads return shared zeroes, which need no memory. The data of
//! a write is in a buffer of the pool, which `Done` returns. No Compare, Verify, Copy or compare-and-write.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Buf;

use crate::shape::{block_shift, checked_blocks, size_refusal};
use crate::{
    Abilities, ChannelContext, Disk, DiskChannel, Done, Geometry, IoRequest, Op, OpenError, Owner, Prepared,
    ResizeError, Token, Usage,
};

/// Settings of a null disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NullSpec {
    /// Capacity in bytes, a multiple of the block size, up to 2^62.
    pub bytes: u64,
    /// Bytes of a logical block: 512 or 4096.
    pub block_bytes: u32,
}

/// A null disk, shared by all cores. See the module.
pub struct NullDisk {
    name: String,
    block_bytes: u32,
    block_count: Arc<AtomicU64>,
}

fn geometry(block_bytes: u32, block_count: &AtomicU64) -> Geometry {
    Geometry {
        block_bytes,
        block_count: block_count.load(Ordering::Relaxed),
        is_read_only: false,
        has_volatile_cache: false,
        can_deallocate: true,
        atomic_blocks: 1,
        can_compare_and_write: false,
    }
}

impl NullDisk {
    /// Creates a null disk. Fails with [`OpenError::Setting`] if the size or block size is not allowed.
    #[expect(clippy::new_ret_no_self, reason = "every kind is made as the interface that its users see")]
    pub fn new(name: &str, spec: NullSpec) -> Result<Arc<dyn Disk>, OpenError> {
        let block_count = checked_blocks(name, spec.bytes, spec.block_bytes)?;
        Ok(Arc::new(NullDisk {
            name: name.to_owned(),
            block_bytes: spec.block_bytes,
            block_count: Arc::new(AtomicU64::new(block_count)),
        }))
    }
}

impl Disk for NullDisk {
    fn name(&self) -> &str {
        &self.name
    }

    fn kind(&self) -> &'static str {
        "null"
    }

    fn geometry(&self) -> Geometry {
        geometry(self.block_bytes, &self.block_count)
    }

    fn open(&self, _context: &ChannelContext) -> Result<Box<dyn DiskChannel>, OpenError> {
        Ok(Box::new(NullChannel {
            block_bytes: self.block_bytes,
            block_count: Arc::clone(&self.block_count),
        }))
    }

    fn prepare_resize(&self, bytes: u64) -> Result<(), ResizeError> {
        let refusal = size_refusal(bytes, self.block_bytes);
        refusal.map_or(Ok(()), |allowed| Err(ResizeError::new(&self.name, bytes, allowed)))
    }

    fn resize(&self, bytes: u64) -> Result<(), ResizeError> {
        self.prepare_resize(bytes)?;
        self.block_count.store(bytes / u64::from(self.block_bytes), Ordering::Release);
        Ok(())
    }

    fn usage(&self) -> Usage {
        Usage { bytes_used: 0 }
    }
}

/// One core's handle on a null disk.
pub struct NullChannel {
    block_bytes: u32,
    block_count: Arc<AtomicU64>,
}

impl DiskChannel for NullChannel {
    #[inline]
    fn geometry(&self) -> Geometry {
        geometry(self.block_bytes, &self.block_count)
    }

    #[inline]
    fn prepare(&mut self, request: &IoRequest, _next: Option<u64>) -> Prepared {
        if request.op != Op::Read {
            return Prepared::Pool;
        }
        Prepared::Ready(Buf::zeroes(request.range.data_bytes(block_shift(self.block_bytes))))
    }

    fn abilities(&self) -> Abilities {
        Abilities { reads_in_place: true, ..Abilities::default() }
    }

    #[inline]
    fn submit(&mut self, token: Token, request: &IoRequest, buf: Option<Buf>) -> Option<Done> {
        let buf = match request.op {
            Op::Read => Some(Buf::zeroes(request.range.data_bytes(block_shift(self.block_bytes)))),
            Op::Write { .. } | Op::Flush | Op::WriteZeroes { .. } | Op::Deallocate => buf,
            Op::Compare | Op::Verify => return Some(Done::not_supported(token, buf)),
        };
        Some(Done { token, result: Ok(()), buf })
    }

    #[inline]
    fn poll(&mut self, _now: Nanos, _done: &mut Vec<Done>) -> bool {
        false
    }

    /// Returns 0: no command is ever in flight.
    fn cancel_owner(&mut self, _owner: Owner) -> usize {
        0
    }

    #[inline]
    fn in_flight(&self) -> usize {
        0
    }
}

#[cfg(test)]
mod tests {
    use spindle_reactor::mem::{Pages, Pool, ZoneSpec};

    use super::*;
    use crate::BlockRange;

    fn context() -> ChannelContext {
        let pool = Pool::new(&[ZoneSpec { buffer_bytes: 4096, count: 2 }], Pages::Base).expect("pool");
        ChannelContext { core: 0, pool, depth: 8 }
    }

    #[test]
    fn reads_are_zeroes_and_written_buffers_come_back() {
        let source = NullDisk::new("n", NullSpec { bytes: 1 << 50, block_bytes: 512 }).expect("null disk");
        let context = context();
        let mut disk = source.open(&context).expect("opens");
        let range = BlockRange { lba: (1 << 41) - 2048, blocks: 2048 };
        let done = disk.submit(Token(7), &IoRequest::new(Op::Read, range), None).expect("at once");
        assert_eq!((done.token, done.result), (Token(7), Ok(())));
        let buf = done.buf.expect("zeroes");
        assert_eq!(buf.len(), 1 << 20);
        assert!(buf.segments().all(|segment| segment.iter().all(|byte| *byte == 0)));
        let read = IoRequest::new(Op::Read, range);
        let Prepared::Ready(in_place) = disk.prepare(&read, Some(u64::MAX)) else { panic!("at once") };
        assert_eq!(
            (in_place.len(), in_place.segments().all(|segment| segment == vec![0; segment.len()])),
            (1 << 20, true)
        );
        let mut data = context.pool.take(4096).expect("buffer");
        data.copy_in(0, &[1; 4096]);
        let range = BlockRange { lba: 0, blocks: 8 };
        let done = disk
            .submit(Token(8), &IoRequest::new(Op::Write { fua: true }, range), Some(data))
            .expect("at once");
        assert!(done.buf.is_some());
        assert!(disk.submit(Token(9), &IoRequest::new(Op::Deallocate, range), None).is_some());
        assert_eq!((disk.in_flight(), disk.poll(Nanos::ZERO, &mut Vec::new())), (0, false));
    }

    #[test]
    fn every_core_sees_a_resize() {
        let source = NullDisk::new("n", NullSpec { bytes: 8192, block_bytes: 4096 }).expect("null disk");
        let disk = source.open(&context()).expect("opens");
        source.resize(1 << 40).expect("any size");
        assert_eq!(disk.geometry().bytes(), 1 << 40);
        let error = source.resize(5000).expect_err("not whole blocks");
        assert!(
            error.to_string().contains("size = 5000 bytes: must be a multiple of the block size, 4096"),
            "{error}"
        );
    }

    #[test]
    fn settings_out_of_range_are_refused_by_name() {
        let error = |bytes, block_bytes| {
            NullDisk::new("n", NullSpec { bytes, block_bytes }).err().expect("refused").to_string()
        };
        assert_eq!(error(4096, 1024), "disk \"n\": block_bytes = 1024: must be 512 or 4096");
        assert!(error(0, 512).starts_with("disk \"n\": size = 0: must be a multiple of the block size, 512"));
        assert!(error(513, 512).contains("size = 513"));
        assert!(error(u64::MAX - 511, 512).contains("2^62"));
    }
}
