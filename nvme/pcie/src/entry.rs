//! [`Task`], the operation of a request, and [`make_entry`], which makes a command's submission queue entry.
//!
//! The lists that the drive reads (PRPs, SGL descriptors, ranges of Dataset Management and Copy) are in the
//! command slot's own page. A list does not change until its command has ended.

use std::sync::atomic::Ordering;

use nvme_spec::io::{CopyCdw12, CopyRangeFormat0, DsmRange, ReadWriteCdw12};
use nvme_spec::sqe::Sqe;
use nvme_spec::zerocopy;
use spindle_target_disk::{BlockRange, Op};

use crate::commands::slot_of;
use crate::core::Request;
use crate::core_queue::Setup;
use crate::dma::{Iova, PAGE_BYTES};
use crate::pointers::ListPage;
use crate::rules::{Deallocating, Rules, Zeroing};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Task {
    /// An operation of `DiskChannel::submit`.
    Op(Op),
    /// A deallocation by Dataset Management, too large for [`Rules::may_deallocate_by_zeroes`].
    DeallocateHint,
    /// A copy. The request's range is the destination.
    Copy {
        /// First block of the source.
        from: u64,
        fua: bool,
    },
    /// The read or the write of a compare-and-write that has the guard.
    CompareAndWrite { is_write: bool },
}

impl Task {
    /// Returns true if a power loss may undo the operation until a flush.
    #[inline]
    pub(crate) fn needs_flush(self) -> bool {
        match self {
            Task::Op(Op::Read | Op::Flush | Op::Compare | Op::Verify) => false,
            Task::Op(Op::Write { fua } | Op::WriteZeroes { fua, .. }) | Task::Copy { fua, .. } => !fua,
            Task::Op(Op::Deallocate) | Task::DeallocateHint => true,
            // The write has FUA.
            Task::CompareAndWrite { .. } => false,
        }
    }

    /// Returns true if the operation changes blocks and must wait for a guard on one of them. Returns false
    /// for the write of a compare-and-write, which has the guard.
    pub(crate) fn changes_blocks(self) -> bool {
        match self {
            Task::Op(Op::Read | Op::Flush | Op::Compare | Op::Verify) | Task::CompareAndWrite { .. } => false,
            Task::Op(Op::Write { .. } | Op::WriteZeroes { .. } | Op::Deallocate)
            | Task::DeallocateHint
            | Task::Copy { .. } => true,
        }
    }

    /// Returns the number of blocks of the next command for the remaining range `left`.
    #[inline]
    pub(crate) fn piece_blocks(self, rules: &Rules, left: BlockRange) -> u32 {
        match self {
            Task::Op(op) => rules.piece_blocks(op, left),
            Task::DeallocateHint => left.blocks.min(rules.dsm_blocks),
            Task::Copy { .. } => left.blocks.min(rules.copy_limits.blocks),
            Task::CompareAndWrite { .. } => left.blocks,
        }
    }
}

/// Makes the submission queue entry of a command. Returns `None` if the buffer is missing, is not mapped for
/// the drive, or cannot be described
/// ([`Pointers::set_data_pointer`](crate::pointers::Pointers::set_data_pointer)). Also returns `None` if the
/// drive does not support the operation, or a Copy exceeds the drive's limits.
#[inline]
pub(crate) fn make_entry(setup: &Setup, request: &Request, range: BlockRange, cid: u16) -> Option<Sqe> {
    let Setup { queue, pointers, rules } = setup;
    let (nsid, lba, blocks) = (rules.nsid, range.lba, range.blocks);
    let list = list_page(setup, slot_of(cid));
    let bytes = (blocks as usize) << rules.shift;
    let op = match request.task {
        Task::Op(op) => op,
        Task::DeallocateHint => return Some(dataset_management(cid, rules, range, list)),
        Task::Copy { from, fua } => {
            let from = BlockRange { lba: from + (lba - request.lba), blocks };
            return copy(cid, rules, from, lba, fua, list);
        }
        Task::CompareAndWrite { is_write: false } => Op::Read,
        Task::CompareAndWrite { is_write: true } => Op::Write { fua: true },
    };
    let sqe = match op {
        Op::Read => Sqe::read(cid, nsid, lba, blocks),
        Op::Write { fua } => Sqe::write(cid, nsid, lba, blocks, fua),
        Op::Flush => return Some(Sqe::flush(cid, nsid).with_prp(0, 0)),
        Op::WriteZeroes { deallocate, fua } => {
            return match rules.zeroing {
                Zeroing::Command => {
                    let is_deallocated = deallocate && rules.deallocating == Deallocating::WriteZeroes;
                    Some(zeroes(cid, rules, range, is_deallocated, fua))
                }
                Zeroing::Writes => {
                    // All PRP entries point to the same zero page.
                    let page = queue.memory().iova().plus(queue.layout().zeroes_offset() as u64);
                    zero_pages(Sqe::write(cid, nsid, lba, blocks, fua), page, bytes, list)
                }
            };
        }
        Op::Deallocate => return deallocation(cid, rules, range, list),
        Op::Compare => Sqe::compare(cid, nsid, lba, blocks),
        Op::Verify => return Some(Sqe::verify(cid, nsid, lba, blocks).with_prp(0, 0)),
    };
    let buf = request.buf.as_ref()?;
    let offset = usize::try_from((lba - request.lba) << rules.shift).ok()?;
    pointers.set_data_pointer(sqe, buf, offset, bytes, list)
}

#[inline]
fn list_page(setup: &Setup, slot: usize) -> ListPage<'_> {
    let offset = setup.queue.layout().list_offset(slot);
    let memory = setup.queue.memory();
    let words = memory.words().get(offset / 8..(offset + PAGE_BYTES as usize) / 8).unwrap_or_default();
    ListPage { words, iova: memory.iova().plus(offset as u64) }
}

fn zeroes(cid: u16, rules: &Rules, range: BlockRange, is_deallocated: bool, fua: bool) -> Sqe {
    let mut sqe = Sqe::write_zeroes(cid, rules.nsid, range.lba, range.blocks, is_deallocated).with_prp(0, 0);
    sqe.cdw12 = ReadWriteCdw12::from(sqe.cdw12).with_fua(fua).into();
    sqe
}

fn deallocation(cid: u16, rules: &Rules, range: BlockRange, list: ListPage<'_>) -> Option<Sqe> {
    match rules.deallocating {
        Deallocating::WriteZeroes => Some(zeroes(cid, rules, range, true, false)),
        Deallocating::DatasetManagement => Some(dataset_management(cid, rules, range, list)),
        Deallocating::No => None,
    }
}

/// Makes a Dataset Management command (deallocate) with one range.
fn dataset_management(cid: u16, rules: &Rules, range: BlockRange, list: ListPage<'_>) -> Sqe {
    let words: [u64; 2] = zerocopy::transmute!(DsmRange::new(range.lba, range.blocks));
    for (word, value) in list.words.iter().zip(words) {
        word.store(value, Ordering::Relaxed);
    }
    Sqe::dsm(cid, rules.nsid, 1).with_prp(list.iova.0, 0)
}

/// Sets a data pointer for `bytes` whose PRP entries all point to `page`. `None`: the list page is too small.
fn zero_pages(sqe: Sqe, page: Iova, bytes: usize, list: ListPage<'_>) -> Option<Sqe> {
    let pages = bytes.div_ceil(PAGE_BYTES as usize);
    for word in list.words.get(..pages.saturating_sub(1))? {
        word.store(page.0.to_le(), Ordering::Relaxed);
    }
    let second = match pages {
        0 | 1 => 0,
        2 => page.0,
        _ => list.iova.0,
    };
    Some(sqe.with_prp(page.0, second))
}

/// Makes a Copy whose source ranges (format 0h) are in the list page. Returns `None` for an empty range, or
/// if the drive's limits have shrunk since the request was split.
fn copy(cid: u16, rules: &Rules, from: BlockRange, to: u64, fua: bool, list: ListPage<'_>) -> Option<Sqe> {
    let copy_limits = rules.copy_limits;
    if from.blocks == 0 || from.blocks > copy_limits.blocks {
        return None;
    }
    let (mut at, mut left, mut ranges) = (from.lba, from.blocks, 0);
    while left > 0 {
        let blocks = left.min(copy_limits.range_blocks);
        let words: [u64; RANGE_WORDS] = zerocopy::transmute!(CopyRangeFormat0::new(at, blocks));
        let first = usize::from(ranges) * RANGE_WORDS;
        for (word, value) in list.words.get(first..first + RANGE_WORDS)?.iter().zip(words) {
            word.store(value, Ordering::Relaxed);
        }
        at += u64::from(blocks);
        left -= blocks;
        ranges += 1;
    }
    let mut sqe = Sqe::copy(cid, rules.nsid, to, ranges).with_prp(list.iova.0, 0);
    sqe.cdw12 = CopyCdw12::from(sqe.cdw12).with_fua(fua).into();
    Some(sqe)
}

/// 64-bit words of a source range.
const RANGE_WORDS: usize = size_of::<CopyRangeFormat0>() / 8;
