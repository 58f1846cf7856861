//! Command capsules: validation, and location of data (NVMe/RDMA Transport, "Capsules and Data Transfer").

use nvme_spec::Sqe;
use nvme_spec::sqe::{KeyedSgl, Psdt, Sgl, SglKind};
use nvme_spec::status::Status;
use nvme_spec::zerocopy::FromBytes;
use spindle_nvme_transport::DataPointer;
use spindle_reactor::mem::Buf;

use super::blocks::{Block, Blocks, SpareLists};

/// Bytes of a capsule without in-capsule data: one submission queue entry.
pub const CAPSULE_BYTES: u32 = 64;
/// Maximum data descriptors of a command (MSDBD of Identify Controller).
pub const DESCRIPTORS_MAX: usize = spindle_nvme_transport::RDMA_DESCRIPTORS_MAX as usize;
const DESCRIPTOR_BYTES: u32 = 16;

/// A protocol violation by the host, which ends the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// The message is shorter than a submission queue entry.
    #[error("a capsule of {bytes} bytes, at least {CAPSULE_BYTES} are needed")]
    CapsuleBytes {
        /// Bytes received.
        bytes: u32,
    },
    /// More unanswered capsules than HSQSIZE allows.
    #[error("more capsules without an answer than the {allowed} of HSQSIZE")]
    Capsules {
        /// HSQSIZE + 1.
        allowed: u16,
    },
    /// The descriptors' total length differs from the command's transfer length.
    #[error("descriptors of {bytes} bytes for a transfer of {expected}")]
    TransferBytes {
        /// Total bytes of the descriptors.
        bytes: u32,
        /// Bytes of the transfer.
        expected: u32,
    },
}

/// A received command capsule.
#[derive(Debug)]
pub struct Capsule {
    /// Bytes received, including the submission queue entry.
    pub bytes: u32,
    /// Submission queue entry: a copy of the first 64 bytes of the message.
    pub sqe: Sqe,
    /// The receive buffer with the whole message; `None` if nothing follows the entry.
    pub buf: Option<Buf>,
}

#[derive(Debug)]
pub(super) struct Parsed {
    pub(super) data: Result<DataPointer, Status>,
    pub(super) blocks: Blocks,
    pub(super) invalidate: Option<u32>,
    /// Bytes of in-capsule data to be copied; 0 if the data is at the host.
    pub(super) in_capsule_bytes: u32,
}

/// Parses a capsule's data pointer. An invalid descriptor fails the command: `data` is the status.
///
/// # Errors
/// [`Violation::CapsuleBytes`]: the message is shorter than 64 bytes.
#[inline]
pub(super) fn parse(
    capsule: &Capsule,
    in_capsule_max: u32,
    spare: &mut SpareLists,
) -> Result<Parsed, Violation> {
    let bytes = capsule.bytes;
    let behind = bytes.checked_sub(CAPSULE_BYTES).ok_or(Violation::CapsuleBytes { bytes })?;
    let all = capsule.buf.as_ref().and_then(Buf::as_slice).unwrap_or_default();
    let data = all.get(CAPSULE_BYTES as usize..).unwrap_or_default();
    let room = &data[..data.len().min(behind.min(in_capsule_max) as usize)];
    let mut parsed =
        Parsed { data: Ok(DataPointer::None), blocks: Blocks::Empty, invalidate: None, in_capsule_bytes: 0 };
    parsed.data = parsed.pointer(&capsule.sqe, room, spare);
    if parsed.data.is_err() {
        spare.put(std::mem::take(&mut parsed.blocks));
    }
    Ok(parsed)
}

impl Parsed {
    /// Returns the data pointer of the entry's SGL, or the error status of an invalid descriptor. Offsets and
    /// lengths are checked against the received bytes.
    #[inline]
    fn pointer(&mut self, sqe: &Sqe, room: &[u8], spare: &mut SpareLists) -> Result<DataPointer, Status> {
        // Over Fabrics, PSDT of every command selects SGLs (Base 2.0 section 3.3.3.1), except that the field
        // is reserved in a Fabrics command.
        if !matches!(sqe.psdt(), Psdt::SGL | Psdt::SGL_METADATA_SGL) && !sqe.is_fabrics() {
            return Err(Status::INVALID_FIELD.dnr());
        }
        let sgl = sqe.sgl;
        match sgl.kind() {
            SglKind::KEYED_DATA_BLOCK | SglKind::KEYED_DATA_BLOCK_INVALIDATE => {
                let keyed: KeyedSgl = nvme_spec::zerocopy::transmute!(sgl);
                self.add(&keyed, spare)?;
                Ok(self.host_pointer())
            }
            SglKind::DATA_BLOCK_OFFSET => {
                let bytes = sgl.bytes();
                if sgl.address() != 0 {
                    return Err(Status::SGL_OFFSET_INVALID.dnr());
                }
                if bytes as usize > room.len() {
                    return Err(Status::DATA_SGL_LENGTH_INVALID.dnr());
                }
                self.in_capsule_bytes = bytes;
                Ok(if bytes == 0 { DataPointer::None } else { DataPointer::InCapsule { bytes } })
            }
            SglKind::LAST_SEGMENT_OFFSET => self.list(&sgl, room, spare),
            // Some hosts send an all-zero descriptor with a command without data.
            SglKind(0) if sgl.bytes() == 0 => Ok(DataPointer::None),
            _ => Err(Status::SGL_DESCRIPTOR_TYPE_INVALID.dnr()),
        }
    }

    /// Parses a list of keyed descriptors that follows the submission queue entry.
    #[cold]
    fn list(&mut self, sgl: &Sgl, room: &[u8], spare: &mut SpareLists) -> Result<DataPointer, Status> {
        let (offset, bytes) = (sgl.address(), sgl.bytes());
        let end = offset.checked_add(u64::from(bytes)).and_then(|end| usize::try_from(end).ok());
        let start = usize::try_from(offset).map_err(|_| Status::SGL_OFFSET_INVALID.dnr())?;
        let Some(list) = end.and_then(|end| room.get(start..end)) else {
            return Err(Status::SGL_OFFSET_INVALID.dnr());
        };
        if bytes == 0 || !bytes.is_multiple_of(DESCRIPTOR_BYTES) {
            return Err(Status::INVALID_SGL_SEGMENT_DESCRIPTOR.dnr());
        }
        let Ok(descriptors) = <[KeyedSgl]>::ref_from_bytes(list) else {
            return Err(Status::INVALID_SGL_SEGMENT_DESCRIPTOR.dnr());
        };
        if descriptors.len() > DESCRIPTORS_MAX {
            return Err(Status::INVALID_SGL_DESCRIPTOR_COUNT.dnr());
        }
        for descriptor in descriptors {
            let kinds = [SglKind::KEYED_DATA_BLOCK, SglKind::KEYED_DATA_BLOCK_INVALIDATE];
            if !kinds.contains(&descriptor.kind()) {
                return Err(Status::SGL_DESCRIPTOR_TYPE_INVALID.dnr());
            }
            self.add(descriptor, spare)?;
        }
        Ok(self.host_pointer())
    }

    /// Adds one keyed block, unless it has 0 bytes. A SEND invalidates one key: if several descriptors
    /// request invalidation, the key of the first is invalidated.
    #[inline]
    fn add(&mut self, keyed: &KeyedSgl, spare: &mut SpareLists) -> Result<(), Status> {
        let bytes = keyed.bytes();
        if keyed.kind() == SglKind::KEYED_DATA_BLOCK_INVALIDATE {
            self.invalidate.get_or_insert(keyed.key.get());
        }
        if bytes == 0 {
            return Ok(());
        }
        let block = Block { address: keyed.address.get(), key: keyed.key.get(), bytes };
        if block.address.checked_add(u64::from(bytes)).is_none() {
            return Err(Status::DATA_SGL_LENGTH_INVALID.dnr());
        }
        // `list` has checked the count. The sum of 16 lengths of 24 bits fits into 32 bits.
        let is_added = self.blocks.push(block, spare);
        if is_added { Ok(()) } else { Err(Status::INVALID_SGL_DESCRIPTOR_COUNT.dnr()) }
    }

    #[inline]
    fn host_pointer(&self) -> DataPointer {
        match self.blocks.as_slice().iter().map(|block| block.bytes).sum() {
            0 => DataPointer::None,
            bytes => DataPointer::Host { bytes },
        }
    }
}

/// Copies the `bytes` of in-capsule data after the submission queue entry, at most the length of `to`.
#[inline]
pub(super) fn copy_data(capsule: &Buf, bytes: u32, to: &mut Buf) {
    let data = CAPSULE_BYTES as usize..(CAPSULE_BYTES + bytes) as usize;
    if let Some(data) = capsule.as_slice().and_then(|all| all.get(data)) {
        to.copy_in(0, &data[..data.len().min(to.len())]);
    }
}
