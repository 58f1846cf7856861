//! A command of a core, from [`Disk::submit`](spindle_disk::Disk::submit) to its [`Done`], and its pieces.

use nvme_spec::Sqe;
use nvme_spec::io::{DsmRange, ReadWriteCdw12};
use nvme_spec::zerocopy::IntoBytes;
use spindle_disk::{BlockRange, DiskError, Done, Op, Token};
use spindle_initiator::HostData;
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Buf, Pool};

/// Most blocks of one command: NLB counts them less one, in 16 bits.
const COMMAND_BLOCKS_MAX: u32 = 1 << 16;
/// Bytes of the one range of a Dataset Management.
const RANGE_BYTES: u32 = 16;

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Task {
    Read,
    Write {
        fua: bool,
    },
    Flush,
    Zeroes {
        deallocate: bool,
        fua: bool,
    },
    /// Zeroes as data, where the far target has no better way.
    ZeroData {
        fua: bool,
    },
    Deallocate,
    Compare,
    Verify,
}

impl From<Op> for Task {
    fn from(op: Op) -> Task {
        match op {
            Op::Read => Task::Read,
            Op::Write { fua } => Task::Write { fua },
            Op::Flush => Task::Flush,
            Op::WriteZeroes { deallocate, fua } => Task::Zeroes { deallocate, fua },
            Op::Deallocate => Task::Deallocate,
            Op::Compare => Task::Compare,
            Op::Verify => Task::Verify,
        }
    }
}

/// A command.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) token: Token,
    pub(crate) task: Task,
    range: BlockRange,
    /// Its data; `None` while the command that is with the far target has it.
    buf: Option<Buf>,
    /// Its place among all of the core.
    pub(crate) number: u64,
    /// Blocks that are done.
    done: u32,
    /// Blocks of the piece that is with the far target.
    piece: u32,
    /// The piece has a buffer of its own.
    is_bounced: bool,
    /// Its submitter is gone ([`Disk::forget`](spindle_disk::Disk::forget)).
    pub(crate) is_forgotten: bool,
    /// It was with a far target that is lost, and may be done there still.
    pub(crate) was_sent: bool,
    /// Since when it waits for a far target that is away.
    pub(crate) waits_since: Option<Nanos>,
}

/// What one piece is sent as.
pub(crate) struct Piece {
    pub(crate) sqe: Sqe,
    pub(crate) data: HostData,
}

/// Why there is no piece to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lack {
    /// No buffer for pieces is free now: the next command that ends gives one back.
    Buffer,
    /// The command has no data of its own: it cannot be done.
    Data,
}

/// What the pieces of a core are limited by.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) nsid: u32,
    pub(crate) block_bytes: u32,
    /// Blocks that one command moves.
    pub(crate) data_blocks_max: u32,
    /// Blocks that a buffer of a piece holds.
    pub(crate) bounce_blocks: u32,
}

impl Request {
    pub(crate) fn new(token: Token, task: Task, range: BlockRange, buf: Option<Buf>, number: u64) -> Request {
        let (done, piece, is_bounced) = (0, 0, false);
        let (is_forgotten, was_sent, waits_since) = (false, false, None);
        Request {
            token,
            task,
            range,
            buf,
            number,
            done,
            piece,
            is_bounced,
            is_forgotten,
            was_sent,
            waits_since,
        }
    }

    /// The next piece.
    pub(crate) fn next(&mut self, limits: Limits, pool: &Pool) -> Result<Piece, Lack> {
        let left = self.range.blocks - self.done;
        let lba = self.range.lba + u64::from(self.done);
        let (nsid, whole) = (limits.nsid, self.done == 0);
        let (sqe, data) = match self.task {
            Task::Flush => {
                self.piece = left;
                (Sqe::flush(0, nsid), HostData::None)
            }
            Task::Read => {
                let data = self.data(left, whole, limits, pool)?;
                (Sqe::read(0, nsid, lba, self.piece), HostData::FromController(data))
            }
            Task::Write { fua } => {
                let data = self.data(left, whole, limits, pool)?;
                (Sqe::write(0, nsid, lba, self.piece, fua), HostData::ToController(data))
            }
            Task::Compare => {
                let data = self.data(left, whole, limits, pool)?;
                (Sqe::compare(0, nsid, lba, self.piece), HostData::ToController(data))
            }
            Task::ZeroData { fua } => {
                self.piece = left.min(limits.bounce_blocks);
                let mut data = pool.take(self.piece * limits.block_bytes).ok_or(Lack::Buffer)?;
                data.clear();
                self.is_bounced = true;
                (Sqe::write(0, nsid, lba, self.piece, fua), HostData::ToController(data))
            }
            Task::Zeroes { deallocate, fua } => {
                self.piece = left.min(COMMAND_BLOCKS_MAX);
                let mut sqe = Sqe::write_zeroes(0, nsid, lba, self.piece, deallocate);
                sqe.cdw12 = ReadWriteCdw12::from_bits(sqe.cdw12.get()).with_fua(fua).into();
                (sqe, HostData::None)
            }
            Task::Verify => {
                self.piece = left.min(COMMAND_BLOCKS_MAX);
                (Sqe::verify(0, nsid, lba, self.piece), HostData::None)
            }
            Task::Deallocate => {
                let mut data = pool.take(RANGE_BYTES).ok_or(Lack::Buffer)?;
                data.copy_in(0, DsmRange::new(lba, left).as_bytes());
                (self.piece, self.is_bounced) = (left, true);
                (Sqe::dsm(0, nsid, 1), HostData::ToController(data))
            }
        };
        Ok(Piece { sqe, data })
    }

    /// Memory of the next piece: its own where the far target takes all at once, else a buffer with that part
    /// of it.
    fn data(&mut self, left: u32, whole: bool, limits: Limits, pool: &Pool) -> Result<Buf, Lack> {
        if whole && left <= limits.data_blocks_max {
            (self.piece, self.is_bounced) = (left, false);
            return self.buf.take().ok_or(Lack::Data);
        }
        self.piece = left.min(limits.data_blocks_max).min(limits.bounce_blocks);
        let bytes = self.piece * limits.block_bytes;
        let mut piece = pool.take(bytes).ok_or(Lack::Buffer)?;
        self.is_bounced = true;
        let own = self.buf.as_ref().ok_or(Lack::Data)?;
        if self.task != Task::Read {
            let mut at = 0;
            own.visit(self.offset(limits), bytes as usize, |part| {
                piece.copy_in(at, part);
                at += part.len();
            });
        }
        Ok(piece)
    }

    fn offset(&self, limits: Limits) -> usize {
        self.done as usize * limits.block_bytes as usize
    }

    /// The piece was not taken, or comes back undone.
    pub(crate) fn take_back(&mut self, data: Option<Buf>) {
        if !self.is_bounced {
            self.buf = data;
        }
    }

    /// The piece is done. True when it was the last.
    pub(crate) fn on_piece(&mut self, data: Option<Buf>, limits: Limits) -> bool {
        if !self.is_bounced {
            self.buf = data;
        } else if self.task == Task::Read
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

    pub(crate) fn end(self, result: Result<(), DiskError>) -> Done {
        Done { token: self.token, result, buf: self.buf }
    }
}

#[cfg(test)]
mod tests {
    use spindle_reactor::mem::{Pages, ZoneSpec};

    use super::*;

    const LIMITS: Limits = Limits { nsid: 7, block_bytes: 512, data_blocks_max: 16, bounce_blocks: 8 };

    fn pool() -> Pool {
        let zones =
            [ZoneSpec { buffer_bytes: 4096, count: 2 }, ZoneSpec { buffer_bytes: 16 << 10, count: 2 }];
        Pool::new(&zones, Pages::Base).expect("a pool")
    }

    fn request(task: Task, blocks: u32, buf: Option<Buf>) -> Request {
        Request::new(Token(1), task, BlockRange { lba: 100, blocks }, buf, 0)
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
        let mut request = request(Task::Write { fua: true }, 16, Some(filled(&pool, 16)));
        let piece = request.next(LIMITS, &pool).expect("its own");
        let HostData::ToController(data) = piece.data else { panic!("a write") };
        assert_eq!((data.len(), piece.sqe.nsid.get(), piece.sqe.cdw12.get()), (8192, 7, 15 | 1 << 30));
        assert!(request.on_piece(Some(data), LIMITS));
        assert_eq!(request.end(Ok(())).buf.expect("back").len(), 8192);
    }

    #[test]
    fn a_longer_one_goes_in_pieces_each_with_its_part() {
        let pool = pool();
        let mut request = request(Task::Write { fua: false }, 20, Some(filled(&pool, 20)));
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
        let mut request = request(Task::Read, 20, pool.take(20 * 512));
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
    fn a_piece_that_comes_back_undone_is_sent_again_as_it_was() {
        let pool = pool();
        let mut request = request(Task::Write { fua: false }, 20, Some(filled(&pool, 20)));
        let piece = request.next(LIMITS, &pool).expect("a buffer");
        assert!(!request.on_piece(piece.data.into_buffer(), LIMITS));
        for _ in 0..2 {
            let piece = request.next(LIMITS, &pool).expect("a buffer");
            assert_eq!((piece.sqe.cdw10.get(), piece.sqe.cdw12.get()), (108, 7));
            request.take_back(piece.data.into_buffer());
        }
    }

    #[test]
    fn without_a_buffer_a_piece_waits() {
        let pool = pool();
        let held: Vec<Buf> = std::iter::from_fn(|| pool.take(4096)).collect();
        let mut request = request(Task::ZeroData { fua: false }, 3, None);
        assert_eq!(request.next(LIMITS, &pool).err(), Some(Lack::Buffer));
        drop(held);
        let data = request.next(LIMITS, &pool).expect("free again").data.into_buffer().expect("data");
        assert!(data.len() == 3 * 512 && data.equals_at(0, &[0; 3 * 512]));
    }

    #[test]
    fn a_command_that_has_lost_its_data_is_an_error_and_waits_for_nothing() {
        let pool = pool();
        for (task, blocks) in [(Task::Read, 1), (Task::Write { fua: false }, 1), (Task::Compare, 20)] {
            let mut request = request(task, blocks, None);
            assert_eq!(request.next(LIMITS, &pool).err(), Some(Lack::Data), "{task:?} of {blocks}");
        }
    }

    #[test]
    fn zeroes_and_trims_are_as_few_commands_as_can_be() {
        let pool = pool();
        let mut zeroes = request(Task::Zeroes { deallocate: true, fua: true }, 65_537, None);
        let piece = zeroes.next(LIMITS, &pool).expect("no data");
        assert_eq!(piece.sqe.cdw12.get(), 0xffff | 1 << 25 | 1 << 30, "NLB, DEAC, FUA");
        assert!(!zeroes.on_piece(None, LIMITS));
        assert_eq!(zeroes.next(LIMITS, &pool).expect("the rest").sqe.cdw12.get() & 0xffff, 0);
        let mut trim = request(Task::Deallocate, u32::MAX, None);
        let data = trim.next(LIMITS, &pool).expect("a range").data.into_buffer().expect("a range");
        assert!(data.equals_at(0, DsmRange::new(100, u32::MAX).as_bytes()));
        assert!(trim.on_piece(Some(data), LIMITS));
    }
}
