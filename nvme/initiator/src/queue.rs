//! [`IoQueue`]: the commands of the NVM command set on one queue pair, and [`RefusedPair`].

use std::time::Duration;

use nvme_spec::Sqe;
use nvme_spec::io::{CopyRangeFormat0, DsmRange};
use nvme_spec::opcode::IoOpcode;
use nvme_spec::sqe::Fuse;
use nvme_spec::zerocopy::{Immutable, IntoBytes};
use spindle_nvme_optimistic::client::{Opening, OptimisticCounts};
use spindle_nvme_transport::host::HostData;
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Buf;

use crate::error::{Error, Loss};
use crate::namespace::{BlockRange, Namespace};
use crate::qpair::{Completion, Qpair, Refusal, Refused, Ticket, WaitError};

/// Most ranges of one Dataset Management or Copy command.
const RANGES_MAX: usize = 256;

/// An I/O queue, with a connection of its own. Commands are queued and sent together by the next
/// [`IoQueue::send`] or [`IoQueue::poll`].
#[derive(Debug)]
pub struct IoQueue {
    pub(crate) qpair: Qpair,
    transfer_bytes_max: u32,
}

impl IoQueue {
    pub(crate) fn new(qpair: Qpair, transfer_bytes_max: u32) -> IoQueue {
        IoQueue { qpair, transfer_bytes_max }
    }

    /// Submits a Read of the blocks from `lba` on, as many as fit in `buf`.
    #[inline]
    pub fn read(&mut self, namespace: &Namespace, lba: u64, buf: Buf) -> Result<Ticket, Refused> {
        match self.blocks(namespace, &buf) {
            Ok(blocks) => {
                let sqe = Sqe::read(0, namespace.nsid, lba, blocks);
                self.qpair.submit_read(sqe, namespace.offset(lba), buf)
            }
            Err(why) => Err(Refused::new(why, Some(buf))),
        }
    }

    /// Submits a Write of `buf` to the blocks from `lba` on. `fua`: complete when the data is on the medium.
    #[inline]
    pub fn write(&mut self, namespace: &Namespace, lba: u64, buf: Buf, fua: bool) -> Result<Ticket, Refused> {
        self.qpair.note_write(namespace.nsid, namespace.offset(lba), buf.len());
        let sqe = |blocks| Sqe::write(0, namespace.nsid, lba, blocks, fua);
        self.submit_blocks(namespace, buf, sqe, HostData::ToController)
    }

    /// Submits a Flush, which makes all completed writes durable.
    pub fn flush(&mut self, namespace: &Namespace) -> Result<Ticket, Refused> {
        self.qpair.submit(Sqe::flush(0, namespace.nsid), HostData::None)
    }

    /// Submits a Write Zeroes for 1 to 65,536 blocks. `deallocate`: their space may be freed (DEAC).
    pub fn write_zeroes(
        &mut self,
        namespace: &Namespace,
        range: BlockRange,
        deallocate: bool,
    ) -> Result<Ticket, Refused> {
        check_count(namespace, range)?;
        let sqe = Sqe::write_zeroes(0, namespace.nsid, range.lba, range.blocks, deallocate);
        self.qpair.submit(sqe, HostData::None)
    }

    /// Submits a deallocation of blocks (Dataset Management). `buf` is overwritten with the 1 to 256 ranges,
    /// 16 bytes each, and truncated to their length.
    pub fn deallocate(
        &mut self,
        namespace: &Namespace,
        ranges: &[BlockRange],
        buf: Buf,
    ) -> Result<Ticket, Refused> {
        let (count, buf) = put_ranges(ranges, buf, |range| DsmRange::new(range.lba, range.blocks))?;
        self.qpair.submit(Sqe::dsm(0, namespace.nsid, count), HostData::ToController(buf))
    }

    /// Submits a Copy of 1 to 256 `ranges`, concatenated, to the blocks from `lba` on. `buf` is overwritten
    /// with the ranges, 32 bytes each, and truncated to their length.
    pub fn copy(
        &mut self,
        namespace: &Namespace,
        ranges: &[BlockRange],
        lba: u64,
        buf: Buf,
    ) -> Result<Ticket, Refused> {
        for range in ranges {
            if let Err(refused) = check_count(namespace, *range) {
                return Err(Refused::new(refused.why, Some(buf)));
            }
        }
        let (count, buf) = put_ranges(ranges, buf, |range| CopyRangeFormat0::new(range.lba, range.blocks))?;
        self.qpair.submit(Sqe::copy(0, namespace.nsid, lba, count), HostData::ToController(buf))
    }

    /// Submits a Compare of the blocks from `lba` on with `buf`. The command completes with status
    /// `COMPARE_FAILURE` if the data differs.
    pub fn compare(&mut self, namespace: &Namespace, lba: u64, buf: Buf) -> Result<Ticket, Refused> {
        let sqe = |blocks| Sqe::compare(0, namespace.nsid, lba, blocks);
        self.submit_blocks(namespace, buf, sqe, HostData::ToController)
    }

    /// Submits a fused Compare and Write: an atomic write, executed only if the blocks equal `compare`. Each
    /// of the two commands has a completion.
    pub fn compare_and_write(
        &mut self,
        namespace: &Namespace,
        lba: u64,
        compare: Buf,
        write: Buf,
    ) -> Result<[Ticket; 2], RefusedPair> {
        let refused = |why, compare, write| RefusedPair { why, compare, write };
        let blocks = match (self.blocks(namespace, &compare), compare.len() == write.len()) {
            (Ok(blocks), true) => blocks,
            (Ok(_), false) => {
                let why = Refusal::Length { bytes: write.len(), block_bytes: namespace.block_bytes() };
                return Err(refused(why, Some(compare), Some(write)));
            }
            (Err(why), _) => return Err(refused(why, Some(compare), Some(write))),
        };
        if self.qpair.room() < 2 {
            return Err(refused(Refusal::Full, Some(compare), Some(write)));
        }
        let first = Sqe::compare(0, namespace.nsid, lba, blocks).with_fuse(Fuse::FIRST);
        let second = Sqe::write(0, namespace.nsid, lba, blocks, false).with_fuse(Fuse::SECOND);
        let first = match self.qpair.submit(first, HostData::ToController(compare)) {
            Ok(ticket) => ticket,
            Err(Refused { why, buf }) => return Err(refused(why, buf, Some(write))),
        };
        // Capacity for two commands was checked, and the connection cannot end between them. Over RDMA the
        // second buffer can still be refused.
        match self.qpair.submit(second, HostData::ToController(write)) {
            Ok(second) => Ok([first, second]),
            Err(Refused { why, buf }) => Err(refused(why, None, buf)),
        }
    }

    /// Submits a Verify: the controller reads 1 to 65,536 blocks without a transfer.
    pub fn verify(&mut self, namespace: &Namespace, range: BlockRange) -> Result<Ticket, Refused> {
        check_count(namespace, range)?;
        self.qpair.submit(Sqe::verify(0, namespace.nsid, range.lba, range.blocks), HostData::None)
    }

    /// Submits any command. This function sets CID and data pointer. The caller ensures that `data` has the
    /// length that the command transfers, at most [`IoQueue::transfer_bytes_max`].
    #[inline]
    pub fn submit(&mut self, sqe: Sqe, data: HostData) -> Result<Ticket, Refused> {
        self.qpair.submit(sqe, data)
    }

    /// Submits as [`IoQueue::submit`] a command whose first byte in its namespace is at `offset`. On an
    /// attached queue a Read may be optimistic, and a Write removes its pages from the directory. What a
    /// command changes that has no data is not removed: the target breaks the seals.
    #[inline]
    pub fn submit_at(&mut self, sqe: Sqe, offset: u64, data: HostData) -> Result<Ticket, Refused> {
        match (IoOpcode(sqe.opcode), data) {
            (IoOpcode::READ, HostData::FromController(buf)) => self.qpair.submit_read(sqe, offset, buf),
            (IoOpcode::WRITE, HostData::ToController(buf)) => {
                self.qpair.note_write(sqe.nsid(), offset, buf.len());
                self.qpair.submit(sqe, HostData::ToController(buf))
            }
            (_, data) => self.qpair.submit(sqe, data),
        }
    }

    /// Sends queued commands. Only needed where no poll follows soon.
    #[inline]
    pub fn send(&mut self) {
        self.qpair.send();
    }

    /// Sends queued commands, receives once and collects completions, without blocking. Returns true when
    /// data arrived or the connection ended; an abort by this host may not count.
    #[inline]
    pub fn poll(&mut self, now: Nanos) -> bool {
        self.qpair.poll(now)
    }

    /// Takes the next completion of any command, in order of arrival; `None`: no completion was collected.
    #[inline]
    pub fn next_completion(&mut self) -> Option<Completion> {
        self.qpair.next_completion()
    }

    /// Waits at most `timeout` for the completion of a command. Keeps other completions for later calls.
    pub fn wait(&mut self, ticket: Ticket, timeout: Duration) -> Result<Completion, WaitError> {
        self.qpair.wait(ticket, timeout)
    }

    /// Advances an attempt to attach this queue, without blocking. The queue may be used meanwhile:
    ///
    /// ```text
    ///   thread of the controller  begin_attach ─> poll ─> take_grant ── OptimisticGrant ──┐
    ///                                                                                     v
    ///   thread of the queue  OptimisticOpening::begin ─> step_attach (poll the queue meanwhile) ─> attached
    /// ```
    /// Returns true once it is attached. Must not be called afterwards or after an error; the queue stays as
    /// it was then.
    ///
    /// # Errors
    /// See [`Controller::attach`](crate::Controller::attach).
    pub fn step_attach(&mut self, opening: &mut Opening, now: Nanos) -> Result<bool, Error> {
        let attached = opening.step(now)?;
        let is_attached = attached.is_some();
        if let Some(attached) = attached {
            self.qpair.attach(attached, now);
        }
        Ok(is_attached)
    }

    /// Returns the counts of optimistic reads; `None`: the queue is not attached
    /// ([`Controller::attach`](crate::Controller::attach)).
    #[must_use]
    pub fn optimistic_counts(&self) -> Option<OptimisticCounts> {
        self.qpair.optimistic_counts()
    }

    /// Returns true while the queue is attached and its optimistic connection has not ended. It ends without
    /// the queue when the target's cache or the device is removed; the queue can be attached again.
    #[inline]
    #[must_use]
    pub fn has_optimistic_connection(&self) -> bool {
        self.qpair.has_optimistic_connection()
    }

    /// Returns the number of commands without a completion.
    #[inline]
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.qpair.outstanding()
    }

    /// Returns the number of commands that can be queued now.
    #[inline]
    #[must_use]
    pub fn room(&self) -> usize {
        self.qpair.room()
    }

    /// Returns the most commands of the queue, including completed commands that were not taken; of an
    /// attached queue of depth 3 or more the caller has one less.
    #[must_use]
    pub fn depth(&self) -> usize {
        self.qpair.depth()
    }

    /// Returns the most data bytes of one command.
    #[must_use]
    pub fn transfer_bytes_max(&self) -> u32 {
        self.transfer_bytes_max
    }

    /// Returns true while commands can be submitted.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.qpair.is_up()
    }

    /// Returns why the connection has ended, once every outstanding command has completed; `None` before.
    #[inline]
    #[must_use]
    pub fn loss(&self) -> Option<Loss> {
        self.qpair.loss()
    }

    /// Aborts the connection: outstanding commands complete as lost. Poll until [`IoQueue::loss`] is `Some`,
    /// or drop the queue.
    pub fn abandon(&mut self) {
        self.qpair.fail(Loss::Requested);
    }

    /// Submits a command that transfers all of `buf`.
    #[inline]
    fn submit_blocks(
        &mut self,
        namespace: &Namespace,
        buf: Buf,
        sqe: impl FnOnce(u32) -> Sqe,
        data: impl FnOnce(Buf) -> HostData,
    ) -> Result<Ticket, Refused> {
        match self.blocks(namespace, &buf) {
            Ok(blocks) => self.qpair.submit(sqe(blocks), data(buf)),
            Err(why) => Err(Refused::new(why, Some(buf))),
        }
    }

    /// Returns the length of a buffer in blocks; an error if one command cannot transfer it.
    #[inline]
    fn blocks(&self, namespace: &Namespace, buf: &Buf) -> Result<u32, Refusal> {
        let bytes = buf.len();
        let Some(blocks) = namespace.blocks_of(bytes) else {
            return Err(Refusal::Length { bytes, block_bytes: namespace.block_bytes() });
        };
        if bytes > self.transfer_bytes_max as usize {
            return Err(Refusal::TooLong { bytes, allowed: self.transfer_bytes_max });
        }
        Ok(blocks)
    }
}

/// A refused fused pair, with its buffers.
#[derive(Debug, thiserror::Error)]
#[error("{why}")]
pub struct RefusedPair {
    /// Reason of the refusal.
    pub why: Refusal,
    /// Data of the Compare; `None` if the Compare itself was submitted: its completion follows.
    pub compare: Option<Buf>,
    /// Data of the Write.
    pub write: Option<Buf>,
}

/// Refuses a range unless it has 1 to 65,536 blocks.
fn check_count(namespace: &Namespace, range: BlockRange) -> Result<(), Refused> {
    if (1..=65_536).contains(&range.blocks) {
        return Ok(());
    }
    let bytes = (range.blocks as usize).saturating_mul(namespace.block_bytes() as usize);
    Err(Refused::new(Refusal::Length { bytes, block_bytes: namespace.block_bytes() }, None))
}

/// Writes ranges to a buffer. Returns their number and the truncated buffer. Refuses zero ranges, more than
/// 256 ranges, and a buffer that is too small or not writable.
fn put_ranges<R: IntoBytes + Immutable>(
    ranges: &[BlockRange],
    mut buf: Buf,
    wire: impl Fn(&BlockRange) -> R,
) -> Result<(u16, Buf), Refused> {
    let bytes = size_of::<R>();
    let room = if buf.is_writable() { buf.len() / bytes } else { 0 };
    let count = u16::try_from(ranges.len())
        .ok()
        .filter(|count| (1..=RANGES_MAX.min(room)).contains(&usize::from(*count)));
    let Some(count) = count else {
        return Err(Refused::new(Refusal::Ranges { count: ranges.len(), room }, Some(buf)));
    };
    for (index, range) in ranges.iter().enumerate() {
        buf.copy_in(index * bytes, wire(range).as_bytes());
    }
    buf.truncate(ranges.len() * bytes);
    Ok((count, buf))
}
