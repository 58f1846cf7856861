//! [`PassRing`]: commands to one NVMe namespace, which the kernel passes to the drive unchanged (io_uring
//! passthrough of `/dev/ng0n1`).
//!
//! The kernel does not check the count of blocks in a command. If the count exceeded the memory, the drive
//! would write beyond that memory. The ring therefore makes all commands with data itself, from the part of
//! the buffer and the block size that Identify returned ([`Namespace`]). All other commands have no data.
//!
//! With `is_polled`, [`PassRing::poll`] polls the drive for completions, if the drive has poll queues.
//!
//! What it does not do: it does not interpret the status, and does not retry commands that the drive refused.
//! It does not notice when the namespace is formatted with another block size while the ring exists.
//!
//! Limits: as [`Ring`](super::Ring); one namespace per ring, without metadata.

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};

use io_uring::{cqueue, opcode, squeue, types};
use rustix::io::Errno;

use super::admin::{self, Namespace};
use super::flight::{Data, Device, Flight, Step};
use super::{Completion, Ring};
use crate::mem::{Buf, Pool};

/// NVME_URING_CMD_IO and NVME_URING_CMD_IO_VEC of `linux/nvme_ioctl.h`: `_IOWR('N', 0x80, 72 bytes)`, and
/// with 0x81.
const COMMAND: u32 = 0xc048_4e80;
const COMMAND_VECTORS: u32 = 0xc048_4e81;

/// Bytes of a 128-byte entry that are available for the command.
const COMMAND_BYTES: usize = 80;

/// Opcodes and bits of the NVM command set (NVM Command Set 1.0 sections 3.2.4 and 3.2.6).
const READ: u8 = 0x02;
const WRITE: u8 = 0x01;
const FORCE_UNIT_ACCESS: u32 = 1 << 30;
/// Bits 1:0 of an opcode: data transfer direction; 00b is no data.
const DATA_DIRECTION: u8 = 0b11;
/// Maximum number of blocks of one command: NLB has 16 bits and is zero-based.
const BLOCKS_MAX: usize = 1 << 16;

/// A command without its namespace and data pointer, which the ring adds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PassCommand {
    /// Opcode of the NVM command set.
    pub opcode: u8,
    /// Command dwords 10 to 15.
    pub dwords: [u32; 6],
}

/// Error of a command.
#[derive(Debug, thiserror::Error)]
pub enum PassError {
    /// Status of the drive: the 15 bits of the status field, without the phase tag.
    #[error("the device's status is {0:#x}")]
    Status(u16),
    /// The kernel did not pass the command to the drive, or lost the drive.
    #[error(transparent)]
    System(#[from] io::Error),
}

/// A completed command: token, status and buffer.
pub type PassDone = Completion<PassError>;

/// Namespace of a ring, with its device file.
pub struct PassNamespace {
    device: OwnedFd,
    is_registered: bool,
    nsid: u32,
    block_bytes: usize,
}

/// A ring for commands to one namespace. Each method that starts a command panics when as many are in flight
/// as the ring has entries: a fault of the caller.
pub type PassRing = Ring<PassNamespace>;

impl Ring<PassNamespace> {
    /// Creates a ring for `entries` commands in flight to `namespace`, whose device file is `device`. Memory
    /// of `pool` is registered at its first use, if the kernel allows that.
    ///
    /// # Errors
    /// The error of io_uring_setup(2), for example where io_uring is disabled or older than Linux 5.19;
    /// `InvalidInput` for 0 or more than [`RING_ENTRIES_MAX`](super::RING_ENTRIES_MAX) entries, and for a
    /// `device` of another namespace; the error of [`admin::namespace_id`].
    pub fn new(
        entries: u32,
        pool: &Pool,
        device: OwnedFd,
        namespace: &Namespace,
        is_polled: bool,
    ) -> io::Result<PassRing> {
        if admin::namespace_id(&device)? != namespace.id() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        PassRing::of(entries, pool, device, namespace, is_polled)
    }

    fn of(
        entries: u32,
        pool: &Pool,
        device: OwnedFd,
        namespace: &Namespace,
        is_polled: bool,
    ) -> io::Result<PassRing> {
        let block_bytes = namespace.block_bytes() as usize;
        let device = PassNamespace { device, is_registered: false, nsid: namespace.id(), block_bytes };
        let mut made = Ring::make(entries, pool, is_polled, device)?;
        let number = made.device.device.as_raw_fd();
        made.device.is_registered = made.ring.submitter().register_files(&[number]).is_ok();
        Ok(made)
    }

    /// Starts a command without data.
    ///
    /// # Panics
    /// When bits 1:0 of the opcode indicate a data transfer; and as [`PassRing`] says.
    pub fn command(&mut self, token: u64, command: PassCommand) {
        assert_eq!(command.opcode & DATA_DIRECTION, 0, "a command that moves data");
        self.start(Flight::without_data(token, command));
    }

    /// Reads the blocks from `lba` on into the bytes `piece` of `buf`.
    ///
    /// # Panics
    /// When `buf` is shared, or `piece` is not whole blocks of it, 1 to 65536; and as [`PassRing`] says.
    pub fn read(&mut self, token: u64, lba: u64, buf: Buf, piece: Range<usize>) {
        let command = self.transfer(READ, lba, 0, &buf, &piece);
        self.start(Flight::read(token, command, buf, piece));
    }

    /// Writes the bytes `piece` of `buf` to the blocks from `lba` on; with `fua` (Force Unit Access) they are
    /// on the medium when the command completes.
    ///
    /// # Panics
    /// When `piece` is not whole blocks of `buf`, 1 to 65536; and as [`PassRing`] says.
    pub fn write(&mut self, token: u64, lba: u64, buf: Buf, piece: Range<usize>, fua: bool) {
        let command = self.transfer(WRITE, lba, if fua { FORCE_UNIT_ACCESS } else { 0 }, &buf, &piece);
        self.start(Flight::write(token, command, buf, piece));
    }

    /// Returns the command for the blocks of `piece`.
    fn transfer(&self, opcode: u8, lba: u64, bits: u32, buf: &Buf, piece: &Range<usize>) -> PassCommand {
        assert!(piece.start <= piece.end && piece.end <= buf.len(), "a piece of the buffer");
        assert!(piece.len().is_multiple_of(self.device.block_bytes), "whole blocks");
        let blocks = piece.len() / self.device.block_bytes;
        assert!((1..=BLOCKS_MAX).contains(&blocks), "1 to 65536 blocks");
        let nlb_z = u32::from(u16::try_from(blocks - 1).unwrap_or(u16::MAX));
        let [a, b, c, d, e, f, g, h] = lba.to_le_bytes();
        let (low, high) = (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]));
        PassCommand { opcode, dwords: [low, high, nlb_z | bits, 0, 0, 0] }
    }
}

impl Device for PassNamespace {
    type Submission = squeue::Entry128;
    type Completion = cqueue::Entry32;
    type Operation = PassCommand;
    type Error = PassError;

    fn entry(&self, flight: &Flight<PassCommand>, data: &Data, user_data: u64) -> squeue::Entry128 {
        assert!(data.is_whole, "the drive would go on behind the end of the list");
        let operation = if data.is_vectors { COMMAND_VECTORS } else { COMMAND };
        let bytes = entry_bytes(&flight.operation, self.nsid, data.addr as usize as u64, data.count);
        let entry = if self.is_registered {
            opcode::UringCmd80::new(types::Fixed(0), operation).cmd(bytes).buf_index(data.fixed).build()
        } else {
            let device = types::Fd(self.device.as_raw_fd());
            opcode::UringCmd80::new(device, operation).cmd(bytes).buf_index(data.fixed).build()
        };
        entry.user_data(user_data)
    }

    fn on_result(_: &mut Flight<PassCommand>, result: i32) -> Step<PassError> {
        Step::Ended(match result {
            0 => Ok(()),
            1.. => Err(PassError::Status(u16::try_from(result).unwrap_or(u16::MAX))),
            ..0 => {
                let errno = Errno::from_raw_os_error(result.saturating_neg());
                Err(PassError::System(errno.into()))
            }
        })
    }
}

/// Encodes `struct nvme_uring_cmd`. Offsets: opcode 0, flags 1, nsid 4, cdw2 8, cdw3 12, metadata 16, addr
/// 24, metadata_len 32, data_len 36, cdw10 to cdw15 40 to 63, timeout_ms 64 (0: the driver's default).
fn entry_bytes(command: &PassCommand, nsid: u32, addr: u64, count: u32) -> [u8; COMMAND_BYTES] {
    let mut bytes = [0; COMMAND_BYTES];
    bytes[0] = command.opcode;
    bytes[4..8].copy_from_slice(&nsid.to_ne_bytes());
    bytes[24..32].copy_from_slice(&addr.to_ne_bytes());
    bytes[36..40].copy_from_slice(&count.to_ne_bytes());
    for (dword, place) in command.dwords.iter().zip(bytes[40..64].chunks_exact_mut(4)) {
        place.copy_from_slice(&dword.to_ne_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;
    use crate::alloc_count::allocations_here;
    use crate::mem::{Pages, ZoneSpec};

    /// Free bytes of [`pool`] once its larger buffer is taken.
    const FREE: u64 = 8 * 4096;

    /// A pool in which a buffer of 8192 bytes consists of two smaller ones, and its only buffer of 8192
    /// bytes, taken.
    fn pool() -> (Pool, Buf) {
        let zones = [ZoneSpec { buffer_bytes: 4096, count: 8 }, ZoneSpec { buffer_bytes: 8192, count: 1 }];
        let pool = Pool::new(&zones, Pages::Base).expect("pool");
        let large = pool.take(8192).expect("buffer");
        (pool, large)
    }

    /// A ring for the device at `path`. `/dev/null` accepts every command and does nothing.
    fn ring(path: &str, pool: &Pool, is_polled: bool) -> PassRing {
        let device = File::options().read(true).write(true).open(path).expect("opens");
        let namespace = Namespace::parse(1, Box::new([0; 4096])).expect_err("no blocks");
        assert!(namespace.contains("block"), "{namespace}");
        let mut identify = Box::new([0; 4096]);
        identify[130] = 9;
        let namespace = Namespace::parse(1, identify).expect("blocks of 512 bytes");
        PassRing::of(4, pool, device.into(), &namespace, is_polled).expect("a ring")
    }

    fn finish(ring: &mut PassRing) -> Vec<PassDone> {
        let mut done = Vec::new();
        while ring.in_flight() > 0 {
            ring.wait().expect("wait");
            ring.poll(|ended| done.push(ended));
        }
        done.sort_by_key(|ended| ended.token);
        done
    }

    const FLUSH: PassCommand = PassCommand { opcode: 0, dwords: [1, 2, 3, 4, 5, 6] };

    #[test]
    fn a_command_lies_where_the_kernel_looks_for_it() {
        let command = PassCommand { opcode: 2, ..FLUSH };
        let bytes = entry_bytes(&command, 1, 0x1122_3344_5566_7788, 4096);
        let mut expected = [0; COMMAND_BYTES];
        for (at, value) in [(0, 2), (4, 1), (40, 1), (44, 2), (48, 3), (52, 4), (56, 5), (60, 6)] {
            expected[at] = value;
        }
        expected[24..32].copy_from_slice(&0x1122_3344_5566_7788_u64.to_ne_bytes());
        expected[37] = 0x10;
        assert_eq!(bytes, expected);
    }

    #[test]
    fn a_transfer_is_of_as_many_blocks_as_its_piece_has() {
        let (pool, _large) = pool();
        let ring = ring("/dev/null", &pool, false);
        let buf = pool.take(8192).expect("buffer");
        let command = ring.transfer(WRITE, 0x1_0000_0002, FORCE_UNIT_ACCESS, &buf, &(512..8192));
        assert_eq!(command, PassCommand { opcode: 1, dwords: [2, 1, 14 | 1 << 30, 0, 0, 0] });
        let panics = |piece: Range<usize>| {
            let asked = std::panic::AssertUnwindSafe(|| ring.transfer(READ, 0, 0, &buf, &piece));
            std::panic::catch_unwind(asked).is_err()
        };
        for piece in [0..0, 0..100, 0..8704, 8192..8192] {
            assert!(panics(piece.clone()), "{piece:?}");
        }
    }

    #[test]
    #[should_panic(expected = "moves data")]
    fn a_command_that_moves_data_is_not_taken_without() {
        let (pool, _large) = pool();
        ring("/dev/null", &pool, false).command(1, PassCommand { opcode: 2, ..FLUSH });
    }

    #[test]
    fn commands_come_back_with_token_and_buffer() {
        let (pool, _large) = pool();
        let mut ring = ring("/dev/null", &pool, false);
        ring.command(1, FLUSH);
        ring.read(2, 8, pool.take(4096).expect("buffer"), 0..4096);
        // Two pieces of the pool, a part of which is written.
        ring.write(3, 8, pool.take(8192).expect("buffer"), 512..8192, true);
        ring.write(4, 8, Buf::zeroes(4096), 0..512, false);
        let done = finish(&mut ring);
        assert!(done.iter().all(|ended| ended.result.is_ok()), "{done:?}");
        let buffers: Vec<_> = done.iter().map(|ended| ended.buf.as_ref().map(Buf::len)).collect();
        assert_eq!(buffers, [None, Some(4096), Some(8192), Some(4096)]);
        drop((done, ring));
        assert_eq!(pool.free_bytes(), FREE, "every buffer came home");
    }

    #[test]
    fn what_passes_no_commands_says_so_and_gives_the_buffer_back() {
        let (pool, _large) = pool();
        for is_polled in [false, true] {
            let mut ring = ring("/dev/zero", &pool, is_polled);
            ring.read(7, 8, pool.take(4096).expect("buffer"), 0..4096);
            let done = finish(&mut ring).remove(0);
            let Err(PassError::System(error)) = done.result else { panic!("{:?}", done.result) };
            assert_eq!(Errno::from_io_error(&error), Some(Errno::OPNOTSUPP));
            assert_eq!((done.token, done.buf.map(|buf| buf.len())), (7, Some(4096)));
        }
    }

    #[test]
    fn a_status_of_the_device_is_told_as_it_is() {
        let (pool, _large) = pool();
        let mut ring = ring("/dev/null", &pool, false);
        ring.command(1, FLUSH);
        let wire = u64::from(ring.flights.slot_at(0).expect("a slot").to_wire());
        let done = ring.on_result(wire, 0x4281).expect("ended");
        assert!(matches!(done.result, Err(PassError::Status(0x4281))), "{done:?}");
        assert_eq!(ring.in_flight(), 0);
    }

    #[test]
    fn a_ring_that_is_dropped_waits_for_its_commands() {
        let (pool, _large) = pool();
        let mut ring = ring("/dev/null", &pool, false);
        for token in 0..4 {
            ring.read(token, 8, pool.take(4096).expect("buffer"), 0..4096);
        }
        ring.submit().expect("submits");
        drop(ring);
        assert_eq!(pool.free_bytes(), FREE);
    }

    #[test]
    fn a_warm_ring_allocates_nothing() {
        let (pool, _large) = pool();
        let mut ring = ring("/dev/null", &pool, false);
        let round = |ring: &mut PassRing| {
            for (token, bytes) in [(0, 4096), (1, 8192), (2, 512), (3, 8192)] {
                let buf = pool.take(bytes).expect("buffer");
                ring.write(token, 8, buf, 0..bytes as usize, false);
            }
            while ring.in_flight() > 0 {
                ring.submit().expect("submits");
                ring.poll(drop);
            }
        };
        (0..4).for_each(|_| round(&mut ring));
        let before = allocations_here();
        (0..50).for_each(|_| round(&mut ring));
        assert_eq!(allocations_here() - before, 0);
        assert!(ring.pieces.registered() > 0 || ring._pool.is_none());
    }
}
