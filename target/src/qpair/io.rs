//! Parse and check of the commands of an I/O queue: from a submission queue entry to an [`IoCommand`].
//!
//! All checks of a command for an active namespace that need no data are here. A refusal has the status and
//! the field at fault. A command that passes is inside the namespace and the limits. Its SGL has the length
//! of its data, or more if the data is a list of ranges. Ranges of a list are checked at execution.

use nvme_spec::cluster::{PAGE_SHIFT, READ_AND_REGISTER, REGISTER, REGISTER_PAGES_MAX};
use nvme_spec::opcode::IoOpcode;
use nvme_spec::optimistic::GET_REFERENCES;
use nvme_spec::sqe::{Fuse, NSID_ALL, Sqe};
use nvme_spec::status::Status;
use spindle_nvme_transport::DataPointer;
use spindle_target_disk::{BlockRange, Geometry, Sender};

use super::request::{Direction, IoCommand, IoOp, Request};
use super::{IoRole, cluster, compound, references};
use crate::controller::limits;
use crate::env::Env;
use crate::refusal::{Refusal, field};

/// First vendor specific opcode (NVM Command Set 3.2).
const FIRST_VENDOR_OPCODE: u8 = 0x80;
/// Bytes of a source range descriptor, format 0h (NVM Command Set, Copy).
pub const COPY_RANGE_BYTES: u32 = 32;
/// Bytes of a Dataset Management range.
pub const DSM_RANGE_BYTES: u32 = 16;

/// CDW12 bit 30 of Read, Write, Write Zeroes and Copy: force unit access.
const FUA: u32 = 1 << 30;
/// CDW12 bit 25 of Write Zeroes: deallocate.
const DEAC: u32 = 1 << 25;
/// CDW11 bit 2 of Dataset Management: deallocate.
const AD: u32 = 1 << 2;

/// The namespace's disk and the limits that [`parse`] checks a command against.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// Index in [`Env::disks`](crate::env::Env::disks).
    pub disk: usize,
    /// Blocks and abilities of the disk at the time of the command.
    pub geometry: Geometry,
    /// Most bytes of data of one command (MDTS).
    pub transfer_bytes: u32,
}

/// True with FUA (force unit access) set; for Read, Write, Write Zeroes and Copy.
#[inline]
#[must_use]
pub fn is_fua(sqe: &Sqe) -> bool {
    sqe.cdw12() & FUA != 0
}

/// Dataset Management field of a Read or Write: the low byte of CDW13.
#[inline]
#[must_use]
pub fn hints(sqe: &Sqe) -> u8 {
    sqe.cdw13().to_le_bytes()[0]
}

/// Looks up the namespace and its disk, checks the command against both, and marks the namespace as active. A
/// Flush with NSID FFFFFFFFh needs no namespace.
#[inline]
pub(super) fn check_io(role: &IoRole, env: &mut Env, request: &Request) -> Result<IoCommand, Refusal> {
    let sqe = &request.sqe;
    if sqe.io_opcode().0 >= FIRST_VENDOR_OPCODE {
        references::check_attached(role, env, sqe)?;
        cluster::check_member(role, sqe)?;
    }
    let nsid = sqe.nsid();
    let Some(namespace) = role.subsystem.namespace(nsid) else {
        if nsid == NSID_ALL && sqe.io_opcode() == IoOpcode::FLUSH {
            return Ok(compound::flush_all());
        }
        return Err(Refusal::namespace());
    };
    let disk = Env::disk_index(namespace.disk);
    let Some(handle) = env.disk_ref(disk) else {
        return Err(Refusal::of(Status::NAMESPACE_NOT_READY, Some(field::NSID)));
    };
    let geometry = handle.geometry();
    env.note_command(namespace, namespace.counters.core(env.core));
    let target = Target { disk, geometry, transfer_bytes: env.snapshot.limits.transfer_bytes };
    let mut io = parse(sqe, request.pointer, &target)?;
    io.client = role.shared.client;
    io.sender = role.shared.sender(disk);
    Ok(io)
}

/// Parses and checks a command for a namespace on the disk of `target`. The caller sets `client`.
///
/// # Errors
/// [`Refusal`] with the status that the specification demands and the field at fault.
#[inline]
pub fn parse(sqe: &Sqe, pointer: DataPointer, target: &Target) -> Result<IoCommand, Refusal> {
    let block_shift = target.geometry.block_bytes.trailing_zeros();
    let command = |op, range: BlockRange, data_bytes| IoCommand {
        op,
        is_fused: false,
        disk: target.disk,
        nsid: sqe.nsid(),
        range,
        block_shift: u8::try_from(block_shift).unwrap_or(12),
        data_bytes,
        hints: 0,
        client: 0,
        sender: Sender::HOST,
        registers: false,
        keeps: false,
    };
    let hinted = |op, range, bytes| IoCommand { hints: hints(sqe), ..command(op, range, bytes) };
    let fused = parse_fuse(sqe)?;
    let mut io = match sqe.io_opcode() {
        IoOpcode::READ => {
            let (range, bytes) = data_range(sqe, target, block_shift)?;
            hinted(IoOp::Read, range, bytes)
        }
        IoOpcode::WRITE => {
            let (range, bytes) = data_range(sqe, target, block_shift)?;
            hinted(IoOp::Write { fua: is_fua(sqe) }, range, bytes)
        }
        IoOpcode::COMPARE => {
            let (range, bytes) = data_range(sqe, target, block_shift)?;
            command(IoOp::Compare, range, bytes)
        }
        IoOpcode::FLUSH => command(IoOp::Flush, BlockRange { lba: 0, blocks: 0 }, 0),
        IoOpcode::WRITE_ZEROES => {
            let op = IoOp::WriteZeroes { deallocate: sqe.cdw12() & DEAC != 0, fua: is_fua(sqe) };
            command(op, zeroes_range(sqe, target, block_shift)?, 0)
        }
        IoOpcode::VERIFY => command(IoOp::Verify, range(sqe, target)?, 0),
        IoOpcode::DATASET_MANAGEMENT => {
            let ranges = (sqe.cdw10() & 0xff) + 1;
            let op = match sqe.cdw11() & AD {
                0 => IoOp::Hint,
                _ => IoOp::Deallocate { ranges: u16::try_from(ranges).unwrap_or(256) },
            };
            command(op, BlockRange { lba: 0, blocks: 0 }, ranges * DSM_RANGE_BYTES)
        }
        IoOpcode::COPY => parse_copy(sqe, target, command)?,
        READ_AND_REGISTER => {
            let (range, bytes) = data_range(sqe, target, block_shift)?;
            IoCommand { registers: true, ..hinted(IoOp::Read, range, bytes) }
        }
        REGISTER => {
            let range = register_range(sqe, target, block_shift)?;
            IoCommand { registers: true, ..command(IoOp::Register, range, 0) }
        }
        GET_REFERENCES => {
            let range = range(sqe, target)?;
            command(IoOp::References, range, references::data_bytes(range, block_shift)?)
        }
        _ => return Err(Refusal::at(Status::INVALID_OPCODE, field::OPCODE)),
    };
    io.is_fused = check_fused(fused, &io, target)?;
    if target.geometry.is_read_only && changes_data(io.op) {
        return Err(Refusal::at(Status::NAMESPACE_IS_WRITE_PROTECTED, field::OPCODE));
    }
    check_pointer(&io, pointer)?;
    if matches!(io.op, IoOp::Deallocate { .. } | IoOp::Hint | IoOp::Copy { .. }) {
        io.data_bytes = pointer.bytes();
    }
    Ok(io)
}

/// The range of a Write Zeroes, at most WZSL.
fn zeroes_range(sqe: &Sqe, target: &Target, block_shift: u32) -> Result<BlockRange, Refusal> {
    limited_range(sqe, target, u64::from(limits::WRITE_ZEROES_BYTES_MAX) >> block_shift)
}

/// The range of a Register.
fn register_range(sqe: &Sqe, target: &Target, block_shift: u32) -> Result<BlockRange, Refusal> {
    limited_range(sqe, target, REGISTER_PAGES_MAX << PAGE_SHIFT >> block_shift)
}

/// A range without data, of at most `blocks_max` blocks.
///
/// # Errors
/// LBA Out of Range, Invalid Field in Command.
fn limited_range(sqe: &Sqe, target: &Target, blocks_max: u64) -> Result<BlockRange, Refusal> {
    let range = range(sqe, target)?;
    if u64::from(range.blocks) > blocks_max {
        return Err(Refusal::invalid(field::CDW12));
    }
    Ok(range)
}

fn parse_fuse(sqe: &Sqe) -> Result<bool, Refusal> {
    match sqe.fuse() {
        Fuse::NONE => Ok(false),
        Fuse::FIRST | Fuse::SECOND => Ok(true),
        _ => Err(Refusal::invalid(field::FLAGS)),
    }
}

/// True for half of a fused pair. Refuses every pair but Compare and Write of one block (ACWU), on a disk
/// that supports the pair.
fn check_fused(is_fused: bool, io: &IoCommand, target: &Target) -> Result<bool, Refusal> {
    if !is_fused {
        return Ok(false);
    }
    let is_half = matches!(io.op, IoOp::Compare | IoOp::Write { .. });
    if !is_half || !target.geometry.can_compare_and_write {
        return Err(Refusal::invalid(field::FLAGS));
    }
    if io.range.blocks > 1 {
        return Err(Refusal::invalid(field::CDW12));
    }
    Ok(true)
}

fn changes_data(op: IoOp) -> bool {
    match op {
        IoOp::Write { .. } | IoOp::WriteZeroes { .. } | IoOp::Deallocate { .. } | IoOp::Copy { .. } => true,
        IoOp::Read
        | IoOp::References
        | IoOp::Register
        | IoOp::Flush
        | IoOp::FlushAll
        | IoOp::Hint
        | IoOp::Compare
        | IoOp::Verify => false,
    }
}

/// SLBA and NLB, checked against the size of the disk (NVM Command Set, 2.1).
#[inline]
fn range(sqe: &Sqe, target: &Target) -> Result<BlockRange, Refusal> {
    let range = BlockRange { lba: sqe.slba(), blocks: sqe.blocks() };
    check_range(range, &target.geometry)?;
    Ok(range)
}

/// Checks that the range ends within the disk.
///
/// # Errors
/// LBA Out of Range.
#[inline]
pub fn check_range(range: BlockRange, geometry: &Geometry) -> Result<(), Refusal> {
    let is_inside =
        range.lba.checked_add(u64::from(range.blocks)).is_some_and(|end| end <= geometry.block_count);
    if is_inside { Ok(()) } else { Err(Refusal::at(Status::LBA_OUT_OF_RANGE, field::CDW10)) }
}

/// The range of a Read, Write or Compare and its length in bytes.
///
/// # Errors
/// LBA Out of Range; Invalid Field in Command for more data than MDTS (Base 2.0, 5.17.2.1).
#[inline]
pub fn data_range(sqe: &Sqe, target: &Target, block_shift: u32) -> Result<(BlockRange, u32), Refusal> {
    let range = range(sqe, target)?;
    match range.blocks.checked_mul(1 << block_shift) {
        Some(bytes) if bytes <= target.transfer_bytes => Ok((range, bytes)),
        _ => Err(Refusal::invalid(field::CDW12)),
    }
}

fn parse_copy(
    sqe: &Sqe,
    target: &Target,
    command: impl Fn(IoOp, BlockRange, u32) -> IoCommand,
) -> Result<IoCommand, Refusal> {
    let cdw12 = sqe.cdw12();
    let format = (cdw12 >> 8) & 0xf;
    if format != 0 {
        return Err(Refusal::invalid(field::CDW12));
    }
    let ranges = (cdw12 & 0xff) + 1;
    if ranges > u32::from(limits::COPY_RANGES_MAX) {
        return Err(Refusal::at(Status::COMMAND_SIZE_LIMIT_EXCEEDED, field::CDW12));
    }
    let lba = sqe.slba();
    if lba >= target.geometry.block_count {
        return Err(Refusal::at(Status::LBA_OUT_OF_RANGE, field::CDW10));
    }
    let op = IoOp::Copy { ranges: u16::try_from(ranges).unwrap_or(1), fua: is_fua(sqe) };
    Ok(command(op, BlockRange { lba, blocks: 0 }, ranges * COPY_RANGE_BYTES))
}

/// Checks that the SGL has exactly the length of the command's data. For a list of ranges the SGL may be
/// longer, up to 8 KiB. For other data a longer SGL is allowed only with SGLS bit 18, which this target does
/// not set. Refuses in-capsule data for a Read.
#[inline]
fn check_pointer(io: &IoCommand, pointer: DataPointer) -> Result<(), Refusal> {
    match io.op.direction() {
        Direction::None => Ok(()),
        Direction::ToHost => match pointer {
            DataPointer::Host { bytes } if bytes == io.data_bytes => Ok(()),
            DataPointer::InCapsule { .. } => {
                Err(Refusal::at(Status::SGL_DESCRIPTOR_TYPE_INVALID, field::SGL_IDENTIFIER))
            }
            DataPointer::Host { .. } | DataPointer::None => {
                Err(Refusal::at(Status::DATA_SGL_LENGTH_INVALID, field::SGL_LENGTH))
            }
        },
        Direction::FromHost => {
            // Linux sends a whole page of ranges for any NR; the valid ranges are at its start.
            let is_list = matches!(io.op, IoOp::Deallocate { .. } | IoOp::Hint | IoOp::Copy { .. });
            let bytes = pointer.bytes();
            if bytes == io.data_bytes
                || (is_list && bytes >= io.data_bytes && bytes <= 256 * COPY_RANGE_BYTES)
            {
                Ok(())
            } else {
                Err(Refusal::at(Status::DATA_SGL_LENGTH_INVALID, field::SGL_LENGTH))
            }
        }
    }
}
