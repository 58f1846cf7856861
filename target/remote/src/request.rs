//! A command of a core, from [`DiskChannel::submit`](spindle_target_disk::DiskChannel::submit) to its
//! [`Done`], and its split into pieces.

use std::ops::Range;

use nvme_spec::Sqe;
use nvme_spec::cluster::PAGE_SHIFT;
use nvme_spec::io::{DsmRange, ReadWriteCdw12};
use nvme_spec::zerocopy::IntoBytes;
use spindle_nvme_initiator::HostData;
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Buf, Pool};
use spindle_target_card::Fill;
use spindle_target_disk::{BlockRange, DiskError, Done, Op, Token};

use crate::ledger::EntryId;

/// Most blocks of one command: NLB has 16 bits and is zero-based.
const COMMAND_BLOCKS_MAX: u32 = 1 << 16;
/// Bytes of a Dataset Management range.
const RANGE_BYTES: u32 = 16;

#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) token: Token,
    pub(crate) op: Op,
    /// Write Zeroes is sent as writes of zeroes: the far target lacks or has refused Write Zeroes.
    pub(crate) sends_zeroes: bool,
    pub(crate) range: BlockRange,
    /// Dataset Management hints of a Read or Write, passed on in CDW13.
    pub(crate) hints: u8,
    /// Buffer of the whole request. `None`: there is no data, or a command at the far target uses it.
    buf: Option<Buf>,
    /// Position in the core's order of submission, from 1.
    pub(crate) number: u64,
    /// Time at which the request fails unless the far target has answered it.
    pub(crate) deadline: Nanos,
    /// Blocks transferred so far.
    done: u32,
    /// Blocks of the current piece, or of the last one.
    piece: u32,
    /// The current piece uses a buffer of the core's pool instead of `buf`.
    pub(crate) is_bounced: bool,
    /// All pieces use bounce buffers: the queue has refused the request's own buffer.
    pub(crate) must_bounce: bool,
    /// A command of the request is at the far target, or was lost with its association.
    pub(crate) is_outstanding: bool,
    /// Cancelled by its submitter
    /// ([`DiskChannel::cancel_owner`](spindle_target_disk::DiskChannel::cancel_owner)).
    pub(crate) is_cancelled: bool,
    /// The request's [`Done`] was returned with an error while its command is still at the far target.
    pub(crate) is_answered: bool,
    /// Ledger entry of a write that was lost or not answered in time.
    pub(crate) entry: Option<EntryId>,
    /// Of a read that fills a cache which the far target keeps coherent with others.
    pub(crate) fill: Option<CoherentFill>,
}

/// How the current piece of a fill is read, and whether its former pieces may be kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CoherentFill {
    pub(crate) piece: Fill,
    pub(crate) may_keep: bool,
}

/// A command for one piece of a request.
pub(crate) struct Piece {
    pub(crate) sqe: Sqe,
    pub(crate) data: HostData,
}

/// Reason for which the next piece cannot be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PieceError {
    /// The core's pool has no free buffer; a completion frees one.
    Buffer,
    /// The request has no data buffer, so it must fail.
    Data,
}

/// Parameters by which one core splits requests into commands.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PieceParams {
    pub(crate) nsid: u32,
    pub(crate) block_bytes: u32,
    /// Most blocks of one command with data.
    pub(crate) data_blocks_max: u32,
    /// Blocks per bounce buffer.
    pub(crate) bounce_blocks: u32,
    /// Every write is sent with FUA.
    pub(crate) must_fua: bool,
}

impl Request {
    pub(crate) fn new(
        token: Token,
        op: Op,
        range: BlockRange,
        buf: Option<Buf>,
        number: u64,
        deadline: Nanos,
    ) -> Request {
        Request {
            token,
            op,
            sends_zeroes: false,
            range,
            hints: 0,
            buf,
            number,
            deadline,
            done: 0,
            piece: 0,
            is_bounced: false,
            must_bounce: false,
            is_outstanding: false,
            is_cancelled: false,
            is_answered: false,
            entry: None,
            fill: None,
        }
    }

    /// Builds the command for the next piece. Fails if a bounce buffer is missing or the request has no data.
    pub(crate) fn next(&mut self, limits: PieceParams, pool: &Pool) -> Result<Piece, PieceError> {
        let left = self.range.blocks - self.done;
        let lba = self.range.lba + u64::from(self.done);
        let (nsid, whole) = (limits.nsid, self.done == 0);
        let (mut sqe, data) = match self.op {
            Op::Flush => {
                self.piece = left;
                (Sqe::flush(0, nsid), HostData::None)
            }
            Op::Read => {
                let data = self.data(left, whole, limits, pool)?;
                (Sqe::read(0, nsid, lba, self.piece), HostData::FromController(data))
            }
            Op::Write { fua } => {
                let data = self.data(left, whole, limits, pool)?;
                (Sqe::write(0, nsid, lba, self.piece, fua || limits.must_fua), HostData::ToController(data))
            }
            Op::Compare => {
                let data = self.data(left, whole, limits, pool)?;
                (Sqe::compare(0, nsid, lba, self.piece), HostData::ToController(data))
            }
            Op::WriteZeroes { fua, .. } if self.sends_zeroes => {
                self.piece = left.min(limits.data_blocks_max).min(limits.bounce_blocks);
                let mut data =
                    pool.take_contiguous(self.piece * limits.block_bytes).ok_or(PieceError::Buffer)?;
                data.clear();
                self.is_bounced = true;
                (Sqe::write(0, nsid, lba, self.piece, fua || limits.must_fua), HostData::ToController(data))
            }
            Op::WriteZeroes { deallocate, fua } => {
                self.piece = left.min(COMMAND_BLOCKS_MAX);
                let mut sqe = Sqe::write_zeroes(0, nsid, lba, self.piece, deallocate);
                sqe.cdw12 =
                    ReadWriteCdw12::from_bits(sqe.cdw12.get()).with_fua(fua || limits.must_fua).into();
                (sqe, HostData::None)
            }
            Op::Verify => {
                self.piece = left.min(COMMAND_BLOCKS_MAX);
                (Sqe::verify(0, nsid, lba, self.piece), HostData::None)
            }
            Op::Deallocate => {
                let mut data = pool.take(RANGE_BYTES).ok_or(PieceError::Buffer)?;
                data.copy_in(0, DsmRange::new(lba, left).as_bytes());
                (self.piece, self.is_bounced) = (left, true);
                (Sqe::dsm(0, nsid, 1), HostData::ToController(data))
            }
        };
        if matches!(self.op, Op::Read | Op::Write { .. }) {
            sqe.cdw13 = u32::from(self.hints).into();
        }
        Ok(Piece { sqe, data })
    }

    /// Returns the buffer of the next piece and sets the piece's length. It is the request's own buffer if
    /// one command can transfer all, otherwise a bounce buffer with the data of the piece.
    fn data(&mut self, left: u32, whole: bool, limits: PieceParams, pool: &Pool) -> Result<Buf, PieceError> {
        if whole && left <= limits.data_blocks_max && !self.must_bounce {
            (self.piece, self.is_bounced) = (left, false);
            return self.buf.take().ok_or(PieceError::Data);
        }
        self.piece = left.min(limits.data_blocks_max).min(limits.bounce_blocks);
        let bytes = self.piece * limits.block_bytes;
        let mut piece = pool.take_contiguous(bytes).ok_or(PieceError::Buffer)?;
        self.is_bounced = true;
        let own = self.buf.as_ref().ok_or(PieceError::Data)?;
        if self.op != Op::Read {
            let mut at = 0;
            own.visit(self.offset(limits), bytes as usize, |part| {
                piece.copy_in(at, part);
                at += part.len();
            });
        }
        Ok(piece)
    }

    /// Returns the offset of the next piece in the namespace, in bytes.
    pub(crate) fn next_offset(&self, limits: PieceParams) -> u64 {
        (self.range.lba + u64::from(self.done)).saturating_mul(limits.block_bytes.into())
    }

    /// Returns the pages of the current piece, or of the last one.
    pub(crate) fn piece_pages(&self, limits: PieceParams) -> Range<u64> {
        pages_of(BlockRange { lba: self.range.lba + u64::from(self.done), blocks: self.piece }, limits)
    }

    /// Returns the pages of the request.
    pub(crate) fn pages(&self, limits: PieceParams) -> Range<u64> {
        pages_of(self.range, limits)
    }

    fn offset(&self, limits: PieceParams) -> usize {
        self.done as usize * limits.block_bytes as usize
    }

    /// Stores the buffer of a piece that was refused or has failed; drops a bounce buffer.
    pub(crate) fn take_back(&mut self, data: Option<Buf>) {
        if !self.is_bounced {
            self.buf = data;
        }
    }

    /// Handles a successful piece; copies the data of a read from its bounce buffer. True: it was the last.
    pub(crate) fn on_piece(&mut self, data: Option<Buf>, limits: PieceParams) -> bool {
        if !self.is_bounced {
            self.buf = data;
        } else if self.op == Op::Read
            && let (Some(buf), Some(piece)) = (&mut self.buf, &data)
        {
            let mut at = self.done as usize * limits.block_bytes as usize;
            piece.segments().for_each(|part| {
                buf.copy_in(at, part);
                at += part.len();
            });
        }
        self.done += self.piece;
        self.done >= self.range.blocks
    }

    /// Ends the request for its submitter while its command is at the far target. The [`Done`] contains the
    /// request's buffer unless the far target uses it.
    pub(crate) fn answer(&mut self, result: Result<(), DiskError>) -> Done {
        self.is_answered = true;
        Done { token: self.token, result, buf: self.buf.take() }
    }

    pub(crate) fn end(self, result: Result<(), DiskError>) -> Done {
        Done { token: self.token, result, buf: self.buf }
    }
}

/// Returns the pages, also those in part, of a range.
fn pages_of(range: BlockRange, limits: PieceParams) -> Range<u64> {
    let bytes = |blocks: u64| blocks.saturating_mul(limits.block_bytes.into());
    let end = range.lba.saturating_add(range.blocks.into());
    bytes(range.lba) >> PAGE_SHIFT..bytes(end).div_ceil(1 << PAGE_SHIFT)
}

#[cfg(test)]
mod tests {
    use spindle_reactor::mem::{Pages, ZoneSpec};

    use super::*;

    const LIMITS: PieceParams =
        PieceParams { nsid: 7, block_bytes: 512, data_blocks_max: 16, bounce_blocks: 8, must_fua: false };

    fn pool() -> Pool {
        let zones =
            [ZoneSpec { buffer_bytes: 4096, count: 2 }, ZoneSpec { buffer_bytes: 16 << 10, count: 2 }];
        Pool::new(&zones, Pages::Base).expect("a pool")
    }

    fn small_pool() -> Pool {
        Pool::new(&[ZoneSpec { buffer_bytes: 1 << 16, count: 1 }], Pages::Base).expect("a pool")
    }

    fn request(op: Op, blocks: u32, buf: Option<Buf>) -> Request {
        Request::new(Token(1), op, BlockRange { lba: 100, blocks }, buf, 0, Nanos::MAX)
    }

    fn filled(pool: &Pool, blocks: u32) -> Buf {
        let mut buf = pool.take(blocks * 512).expect("a buffer");
        for block in 0..blocks {
            buf.copy_in(block as usize * 512, &[u8::try_from(block).expect("few"); 512]);
        }
        buf
    }

    #[test]
    fn what_the_far_target_takes_at_once_goes_in_its_own_buffer() {
        let pool = pool();
        let mut request = request(Op::Write { fua: true }, 16, Some(filled(&pool, 16)));
        let piece = request.next(LIMITS, &pool).expect("its own");
        let HostData::ToController(data) = piece.data else { panic!("a write") };
        assert_eq!((data.len(), piece.sqe.nsid.get(), piece.sqe.cdw12.get()), (8192, 7, 15 | 1 << 30));
        assert!(request.on_piece(Some(data), LIMITS));
        assert_eq!(request.end(Ok(())).buf.expect("back").len(), 8192);
    }

    #[test]
    fn the_hints_of_a_read_and_of_a_write_are_passed_on() {
        let pool = pool();
        let mut hints = Vec::new();
        for op in [Op::Read, Op::Write { fua: false }, Op::Compare] {
            let mut request = request(op, 8, Some(filled(&pool, 8)));
            request.hints = 0x46;
            hints.push(request.next(LIMITS, &pool).expect("its own").sqe.cdw13.get());
        }
        assert_eq!(hints, [0x46, 0x46, 0]);
    }

    #[test]
    fn a_longer_one_goes_in_pieces_each_with_its_part() {
        let pool = pool();
        let mut request = request(Op::Write { fua: false }, 20, Some(filled(&pool, 20)));
        let mut seen = Vec::new();
        loop {
            let piece = request.next(LIMITS, &pool).expect("a buffer");
            let HostData::ToController(data) = piece.data else { panic!("a write") };
            let first = data.as_slice().expect("one piece")[0];
            seen.push((piece.sqe.cdw10.get(), piece.sqe.cdw12.get() + 1, first));
            if request.on_piece(Some(data), LIMITS) {
                break;
            }
        }
        assert_eq!(seen, [(100, 8, 0), (108, 8, 8), (116, 4, 16)]);
    }

    #[test]
    fn a_long_read_is_put_together() {
        let pool = pool();
        let mut request = request(Op::Read, 20, pool.take(20 * 512));
        let mut first = 0;
        loop {
            let piece = request.next(LIMITS, &pool).expect("a buffer");
            let HostData::FromController(mut data) = piece.data else { panic!("a read") };
            for block in 0..data.len() / 512 {
                data.copy_in(block * 512, &[first + u8::try_from(block).expect("few"); 512]);
            }
            first += u8::try_from(data.len() / 512).expect("few");
            if request.on_piece(Some(data), LIMITS) {
                break;
            }
        }
        let buf = request.end(Ok(())).buf.expect("back");
        for block in 0..20_u8 {
            assert!(buf.equals_at(usize::from(block) * 512, &[block; 512]), "block {block}");
        }
    }

    #[test]
    fn a_buffer_that_the_far_target_does_not_take_goes_in_copies() {
        let pool = pool();
        let mut request = request(Op::Write { fua: false }, 16, Some(filled(&pool, 16)));
        let refused = request.next(LIMITS, &pool).expect("its own");
        request.take_back(refused.data.into_buffer());
        request.must_bounce = true;
        let mut seen = Vec::new();
        loop {
            let piece = request.next(LIMITS, &pool).expect("a buffer");
            let data = piece.data.into_buffer().expect("data");
            seen.push((piece.sqe.cdw10.get(), data.as_slice().expect("one piece")[0]));
            if request.on_piece(Some(data), LIMITS) {
                break;
            }
        }
        assert_eq!(seen, [(100, 0), (108, 8)]);
        assert_eq!(request.end(Ok(())).buf.expect("its own").len(), 8192);
    }

    #[test]
    fn every_write_has_fua_where_the_far_cache_is_not_told_of() {
        let pool = pool();
        let limits = PieceParams { must_fua: true, ..LIMITS };
        let zeroes = Op::WriteZeroes { deallocate: false, fua: false };
        for (op, sends_zeroes) in [(Op::Write { fua: false }, false), (zeroes, false), (zeroes, true)] {
            let mut request = request(op, 1, Some(filled(&pool, 1)));
            request.sends_zeroes = sends_zeroes;
            let cdw12 = request.next(limits, &pool).expect("a piece").sqe.cdw12.get();
            assert_eq!(cdw12 >> 30 & 1, 1, "{op:?}");
        }
    }

    #[test]
    fn a_piece_that_comes_back_undone_is_sent_again_as_it_was() {
        let pool = pool();
        let mut request = request(Op::Write { fua: false }, 20, Some(filled(&pool, 20)));
        let piece = request.next(LIMITS, &pool).expect("a buffer");
        assert!(!request.on_piece(piece.data.into_buffer(), LIMITS));
        for _ in 0..2 {
            let piece = request.next(LIMITS, &pool).expect("a buffer");
            assert_eq!((piece.sqe.cdw10.get(), piece.sqe.cdw12.get()), (108, 7));
            request.take_back(piece.data.into_buffer());
        }
    }

    #[test]
    fn zeroes_as_data_are_no_longer_than_the_far_target_takes() {
        let pool = pool();
        let limits = PieceParams { data_blocks_max: 4, ..LIMITS };
        let mut request = request(Op::WriteZeroes { deallocate: false, fua: false }, 6, None);
        request.sends_zeroes = true;
        for blocks in [4, 2] {
            let piece = request.next(limits, &pool).expect("a buffer");
            assert_eq!(piece.sqe.cdw12.get() & 0xffff, blocks - 1);
            request.on_piece(piece.data.into_buffer(), limits);
        }
    }

    #[test]
    fn a_copied_piece_is_in_one_piece() {
        let (pool, limits) = (pool(), PieceParams { bounce_blocks: 16, ..LIMITS });
        let held: Vec<Buf> = std::iter::from_fn(|| pool.take_contiguous(8192)).collect();
        let mut request = request(Op::Write { fua: false }, 20, Some(filled(&small_pool(), 20)));
        assert_eq!(request.next(limits, &pool).err(), Some(PieceError::Buffer), "not in two small ones");
        drop(held);
        let data = request.next(limits, &pool).expect("free again").data.into_buffer().expect("data");
        assert_eq!(data.segments().count(), 1);
    }

    #[test]
    fn without_a_buffer_a_piece_waits() {
        let pool = pool();
        let held: Vec<Buf> = std::iter::from_fn(|| pool.take(4096)).collect();
        let mut request = request(Op::WriteZeroes { deallocate: false, fua: false }, 3, None);
        request.sends_zeroes = true;
        assert_eq!(request.next(LIMITS, &pool).err(), Some(PieceError::Buffer));
        drop(held);
        let data = request.next(LIMITS, &pool).expect("free again").data.into_buffer().expect("data");
        assert!(data.len() == 3 * 512 && data.equals_at(0, &[0; 3 * 512]));
    }

    #[test]
    fn a_command_that_has_lost_its_data_is_an_error_and_waits_for_nothing() {
        let pool = pool();
        for (op, blocks) in [(Op::Read, 1), (Op::Write { fua: false }, 1), (Op::Compare, 20)] {
            let mut request = request(op, blocks, None);
            assert_eq!(request.next(LIMITS, &pool).err(), Some(PieceError::Data), "{op:?} of {blocks}");
        }
    }

    #[test]
    fn zeroes_and_trims_are_as_few_commands_as_can_be() {
        let pool = pool();
        let mut zeroes = request(Op::WriteZeroes { deallocate: true, fua: true }, 65_537, None);
        let piece = zeroes.next(LIMITS, &pool).expect("no data");
        assert_eq!(piece.sqe.cdw12.get(), 0xffff | 1 << 25 | 1 << 30, "NLB, DEAC, FUA");
        assert!(!zeroes.on_piece(None, LIMITS));
        assert_eq!(zeroes.next(LIMITS, &pool).expect("the rest").sqe.cdw12.get() & 0xffff, 0);
        let mut trim = request(Op::Deallocate, u32::MAX, None);
        let data = trim.next(LIMITS, &pool).expect("a range").data.into_buffer().expect("a range");
        assert!(data.equals_at(0, DsmRange::new(100, u32::MAX).as_bytes()));
        assert!(trim.on_piece(Some(data), LIMITS));
    }
}
