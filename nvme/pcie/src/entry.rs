//! What the core asks of the drive, and the submission queue entries that say so.
//!
//! Lists that the drive reads (PRPs, SGL descriptors, ranges of Dataset Management and Copy) lie in the
//! page that the command's slot has to itself, and stay as they are until the command has ended.

use std::sync::atomic::Ordering;

use nvme_spec::io::{CopyCdw12, CopyRangeFormat0, DsmRange, ReadWriteCdw12};
use nvme_spec::sqe::Sqe;
use nvme_spec::zerocopy;
use spindle_disk::{BlockRange, Op};

use crate::commands::slot_of;
use crate::core::Request;
use crate::core_queue::Setup;
use crate::dma::{Iova, PAGE_BYTES};
use crate::pointers::ListPage;
use crate::rules::{Deallocating, Rules, Zeroing};

/// What a request is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Task {
    /// A command of `Disk::submit`.
    Op(Op),
    /// A deallocation of more than [`Rules::zeroes_of`] allows to be done by Write Zeroes.
    Hint,
    /// A copy to the request's blocks.
    Copy {
        /// First block of the source.
        from: u64,
        /// Force unit access.
        fua: bool,
    },
    /// A step of a compare-and-write, for which the guard is held: the block is read, or written.
    CompareAndWrite {
        /// It is written.
        is_write: bool,
    },
}

impl Task {
    /// A loss of power may undo it, unless it is flushed.
    #[inline]
    pub(crate) fn is_change(self) -> bool {
        match self {
            Task::Op(Op::Read | Op::Flush | Op::Compare | Op::Verify) => false,
            Task::Op(Op::Write { fua } | Op::WriteZeroes { fua, .. }) | Task::Copy { fua, .. } => !fua,
            Task::Op(Op::Deallocate) | Task::Hint => true,
            // What is written is durable at once.
            Task::CompareAndWrite { .. } => false,
        }
    }

    /// Its blocks may hold something else afterwards; a compare-and-write's guard keeps it off, but for its
    /// own.
    pub(crate) fn changes(self) -> bool {
        match self {
            Task::Op(Op::Read | Op::Flush | Op::Compare | Op::Verify) | Task::CompareAndWrite { .. } => false,
            Task::Op(Op::Write { .. } | Op::WriteZeroes { .. } | Op::Deallocate)
            | Task::Hint
            | Task::Copy { .. } => true,
        }
    }

    /// Blocks of the first command of what is left of a request.
    #[inline]
    pub(crate) fn piece_blocks(self, rules: &Rules, left: BlockRange) -> u32 {
        match self {
            Task::Op(op) => rules.piece_blocks(op, left),
            Task::Hint => left.blocks.min(rules.dsm_blocks),
            Task::Copy { .. } => left.blocks.min(rules.copying.blocks),
            // One block.
            Task::CompareAndWrite { .. } => left.blocks,
        }
    }
}

/// The entry of a command; `None` when its data cannot be said.
#[inline]
pub(crate) fn entry(setup: &Setup, request: &Request, range: BlockRange, cid: u16) -> Option<Sqe> {
    let Setup { queue, pointers, rules } = setup;
    let (nsid, lba, blocks) = (rules.nsid, range.lba, range.blocks);
    let list = list_page(setup, slot_of(cid));
    let bytes = (blocks as usize) << rules.shift;
    let op = match request.task {
        Task::Op(op) => op,
        Task::Hint => return Some(hint(cid, rules, range, list)),
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
                    let is_given_back = deallocate && rules.deallocating == Deallocating::WriteZeroes;
                    Some(zeroes(cid, rules, range, is_given_back, fua))
                }
                Zeroing::Writes => {
                    // Every page of the data is the same page of zeroes.
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
    pointers.point(sqe, buf, offset, bytes, list)
}

#[inline]
fn list_page(setup: &Setup, slot: usize) -> ListPage<'_> {
    let offset = setup.queue.layout().list_offset(slot);
    let memory = setup.queue.memory();
    let words = memory.words().get(offset / 8..(offset + PAGE_BYTES as usize) / 8).unwrap_or_default();
    ListPage { words, iova: memory.iova().plus(offset as u64) }
}

fn zeroes(cid: u16, rules: &Rules, range: BlockRange, is_given_back: bool, fua: bool) -> Sqe {
    let mut sqe = Sqe::write_zeroes(cid, rules.nsid, range.lba, range.blocks, is_given_back).with_prp(0, 0);
    sqe.cdw12 = ReadWriteCdw12::from(sqe.cdw12).with_fua(fua).into();
    sqe
}

fn deallocation(cid: u16, rules: &Rules, range: BlockRange, list: ListPage<'_>) -> Option<Sqe> {
    match rules.deallocating {
        Deallocating::WriteZeroes => Some(zeroes(cid, rules, range, true, false)),
        Deallocating::DatasetManagement => Some(hint(cid, rules, range, list)),
        Deallocating::No => None,
    }
}

/// Dataset Management of one range.
fn hint(cid: u16, rules: &Rules, range: BlockRange, list: ListPage<'_>) -> Sqe {
    let words: [u64; 2] = zerocopy::transmute!(DsmRange::new(range.lba, range.blocks));
    for (word, value) in list.words.iter().zip(words) {
        word.store(value, Ordering::Relaxed);
    }
    Sqe::dsm(cid, rules.nsid, 1).with_prp(list.iova.0, 0)
}

/// A write of zeroes: `page` as often as it takes.
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

/// Source ranges of one Copy, format 0h, in the list page. `None` where the drive takes less now than when
/// the request was cut.
fn copy(cid: u16, rules: &Rules, from: BlockRange, to: u64, fua: bool, list: ListPage<'_>) -> Option<Sqe> {
    let copying = rules.copying;
    if from.blocks == 0 || from.blocks > copying.blocks {
        return None;
    }
    let (mut at, mut left, mut ranges) = (from.lba, from.blocks, 0);
    while left > 0 {
        let blocks = left.min(copying.range_blocks);
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

/// Words of a source range.
const RANGE_WORDS: usize = size_of::<CopyRangeFormat0>() / 8;
