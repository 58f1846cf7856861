//! A kind of disk: [`DiskChannel`] for a read-only disk whose blocks are filled with their LBA. A kind that a
//! target serves has a `Disk` too (`target/disk/src/null.rs` is short). Run: `cargo run --example disk_kind`.
#![forbid(unsafe_code)]

use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Buf, Pages, Pool, ZoneSpec};
use spindle_target_disk::{BlockRange, DiskChannel, DiskError, Done, Geometry, IoRequest, Op, Owner, Token};

struct LbaDisk;

impl DiskChannel for LbaDisk {
    fn geometry(&self) -> Geometry {
        Geometry {
            block_bytes: 4096,
            block_count: 1 << 20,
            is_read_only: true,
            has_volatile_cache: false,
            can_deallocate: false,
            atomic_blocks: 1,
            can_compare_and_write: false,
        }
    }

    fn submit(&mut self, token: Token, request: &IoRequest, mut buf: Option<Buf>) -> Option<Done> {
        let IoRequest { op, range, .. } = *request;
        let result = match (op, &mut buf) {
            (Op::Read, Some(buf)) => {
                let lba = |at: usize| range.lba + at as u64 / 4096;
                (0..buf.len()).step_by(8).for_each(|at| buf.copy_in(at, &lba(at).to_le_bytes()));
                Ok(())
            }
            (Op::Flush, _) => Ok(()),
            (Op::Read | Op::Compare | Op::Verify, _) => Err(DiskError::NotSupported),
            (Op::Write { .. } | Op::WriteZeroes { .. } | Op::Deallocate, _) => Err(DiskError::WriteProtected),
        };
        Some(Done { token, result, buf }) // each command ends here: nothing is left for `poll`
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

pub(crate) fn main() {
    let (mut disk, range) = (LbaDisk, BlockRange { lba: 7, blocks: 2 });
    let pool = Pool::new(&[ZoneSpec { buffer_bytes: 8192, count: 1 }], Pages::Base).expect("memory");
    let read =
        disk.submit(Token(1), &IoRequest::new(Op::Read, range), pool.take(8192)).expect("ends in submit");
    let buf = read.buf.filter(|_| read.result == Ok(())).expect("a read gives its buffer back");
    assert!(buf.equals_at(0, &7_u64.to_le_bytes()) && buf.equals_at(8184, &8_u64.to_le_bytes()));
    let write = disk
        .submit(Token(2), &IoRequest::new(Op::Write { fua: false }, range), Some(buf))
        .expect("ends in submit");
    assert_eq!((write.token, write.result), (Token(2), Err(DiskError::WriteProtected)));
    println!("blocks 7 and 8 are filled with their LBA; a write fails: {}", DiskError::WriteProtected);
}
