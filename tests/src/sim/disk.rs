//! [`PoolDisk`]: memory behind the pool's buffers, as a file is, so that the path of drives is simulated too.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Buf;
use spindle_target_disk::{
    Abilities, BlockRange, ChannelContext, Disk, DiskChannel, DiskError, Done, Geometry, IoRequest, Op,
    OpenError, Owner, ResizeError, Token, Usage,
};

/// A disk that reads into and writes from the pool's buffers.
pub struct PoolDisk {
    bytes: Arc<Mutex<Vec<u8>>>,
    geometry: Geometry,
    abilities: Abilities,
}

impl PoolDisk {
    /// All zeroes.
    #[must_use]
    pub fn create(block_bytes: u32, block_count: u64) -> Arc<dyn Disk> {
        PoolDisk::with_abilities(block_bytes, block_count, Abilities::default())
    }

    /// The same, and it does these itself.
    #[must_use]
    pub fn with_abilities(block_bytes: u32, block_count: u64, abilities: Abilities) -> Arc<dyn Disk> {
        let geometry = Geometry {
            block_bytes,
            block_count,
            is_read_only: false,
            has_volatile_cache: true,
            can_deallocate: true,
            atomic_blocks: 1,
            can_compare_and_write: true,
        };
        let bytes = vec![0; usize::try_from(geometry.bytes()).unwrap_or(0)];
        Arc::new(PoolDisk { bytes: Arc::new(Mutex::new(bytes)), geometry, abilities })
    }
}

impl Disk for PoolDisk {
    fn name(&self) -> &str {
        "pool-disk"
    }

    fn kind(&self) -> &'static str {
        "sim"
    }

    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn open(&self, _context: &ChannelContext) -> Result<Box<dyn DiskChannel>, OpenError> {
        let (bytes, geometry, abilities) = (Arc::clone(&self.bytes), self.geometry, self.abilities);
        Ok(Box::new(PoolCore { bytes, geometry, abilities }))
    }

    fn resize(&self, bytes: u64) -> Result<(), ResizeError> {
        Err(ResizeError { disk: "pool-disk".to_owned(), bytes, allowed: "never".to_owned() })
    }

    fn usage(&self) -> Usage {
        Usage::default()
    }
}

struct PoolCore {
    bytes: Arc<Mutex<Vec<u8>>>,
    geometry: Geometry,
    abilities: Abilities,
}

impl PoolCore {
    fn lock(&self) -> MutexGuard<'_, Vec<u8>> {
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn span(&self, range: BlockRange) -> std::ops::Range<usize> {
        let block = u64::from(self.geometry.block_bytes);
        let start = usize::try_from(range.lba * block).expect("checked by the target");
        start..start + usize::try_from(u64::from(range.blocks) * block).expect("checked by the target")
    }
}

impl DiskChannel for PoolCore {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn submit(&mut self, token: Token, request: &IoRequest, mut buf: Option<Buf>) -> Option<Done> {
        let IoRequest { op, range, .. } = *request;
        let span = self.span(range);
        let abilities = self.abilities;
        let mut bytes = self.lock();
        let mut result = Ok(());
        match (op, &mut buf) {
            (Op::Read, Some(buf)) => buf.copy_in(0, &bytes[span]),
            (Op::Write { .. }, Some(buf)) => buf.copy_out(0, &mut bytes[span]),
            (Op::WriteZeroes { .. } | Op::Deallocate, _) => bytes[span].fill(0),
            (Op::Flush, _) => {}
            (Op::Compare, Some(buf)) if abilities.compare => {
                if !buf.equals_at(0, &bytes[span]) {
                    result = Err(DiskError::CompareDiffers);
                }
            }
            (Op::Verify, None) if abilities.verify => {}
            (Op::Compare | Op::Verify, _) => result = Err(DiskError::NotSupported),
            (Op::Read | Op::Write { .. }, None) => panic!("a command came without its buffer"),
        }
        drop(bytes);
        Some(Done { token, result, buf })
    }

    fn abilities(&self) -> Abilities {
        self.abilities
    }

    fn copy(&mut self, token: Token, from: BlockRange, to: u64, _fua: bool) -> Option<Done> {
        let (span, to) = (self.span(from), self.span(BlockRange { lba: to, ..from }));
        let result = if self.abilities.copy {
            self.lock().copy_within(span, to.start);
            Ok(())
        } else {
            Err(DiskError::NotSupported)
        };
        Some(Done { token, result, buf: None })
    }

    fn compare_and_write(
        &mut self,
        token: Token,
        range: BlockRange,
        expected: Buf,
        data: Buf,
    ) -> Option<Done> {
        let span = self.span(range);
        let mut bytes = self.lock();
        let is_same = expected.equals_at(0, &bytes[span.clone()]);
        if is_same {
            data.copy_out(0, &mut bytes[span]);
        }
        drop(bytes);
        let result = if is_same { Ok(()) } else { Err(DiskError::CompareDiffers) };
        Some(Done { token, result, buf: Some(data) })
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
