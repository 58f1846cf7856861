//! A command capsule: its checks, and where its data is (NVMe/RDMA Transport, "Capsules and Data Transfer").

use arrayvec::ArrayVec;
use nvme_spec::Sqe;
use nvme_spec::sqe::{KeyedSgl, Psdt, Sgl, SglKind};
use nvme_spec::status::Status;
use nvme_spec::zerocopy::FromBytes;
use spindle_reactor::mem::Buf;
use spindle_transport::DataPointer;

use super::{Block, Blocks};
use crate::work::Remote;

/// Bytes of a capsule without in-capsule data: one submission queue entry.
pub const CAPSULE_BYTES: u32 = 64;
/// Most descriptors of a command: what Identify Controller says.
pub const DESCRIPTORS_MAX: usize = spindle_transport::RDMA_DESCRIPTORS_MAX as usize;
/// Bytes of a descriptor.
const DESCRIPTOR_BYTES: u32 = 16;

/// What a host may not do; it ends the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// A message that is no capsule.
    #[error("a capsule of {bytes} bytes, at least {CAPSULE_BYTES} are needed")]
    CapsuleBytes {
        /// How long it was.
        bytes: u32,
    },
    /// More capsules than it said that it would send without an answer.
    #[error("more capsules without an answer than the {allowed} of HSQSIZE")]
    Capsules {
        /// As many as it said.
        allowed: u16,
    },
    /// More data at the host than the command has memory for, or less.
    #[error("descriptors of {bytes} bytes for a transfer of {expected}")]
    TransferBytes {
        /// What the descriptors have.
        bytes: u32,
        /// What is to be moved.
        expected: u32,
    },
}

/// What a receive brought.
#[derive(Debug)]
pub struct Capsule {
    /// Bytes of the whole message.
    pub bytes: u32,
    /// Its submission queue entry.
    pub sqe: Sqe,
    /// The buffer with all of it; `None` when nothing is behind the entry.
    pub buf: Option<Buf>,
}

/// What a capsule's descriptors say.
#[derive(Debug)]
pub(super) struct Parsed {
    pub(super) data: Result<DataPointer, Status>,
    pub(super) blocks: Blocks,
    pub(super) invalidate: Option<u32>,
    /// Bytes of in-capsule data that are to be fetched.
    pub(super) in_capsule_bytes: u32,
}

/// Look at a capsule.
///
/// # Errors
/// [`Violation`] when it is none. What is wrong with the descriptors fails the command only.
#[inline]
pub(super) fn parse(capsule: &Capsule, in_capsule_max: u32) -> Result<Parsed, Violation> {
    let bytes = capsule.bytes;
    let behind = bytes.checked_sub(CAPSULE_BYTES).ok_or(Violation::CapsuleBytes { bytes })?;
    let all = capsule.buf.as_ref().and_then(Buf::as_slice).unwrap_or_default();
    let data = all.get(CAPSULE_BYTES as usize..).unwrap_or_default();
    let room = &data[..data.len().min(behind.min(in_capsule_max) as usize)];
    let mut parsed = Parsed {
        data: Ok(DataPointer::None),
        blocks: ArrayVec::new(),
        invalidate: None,
        in_capsule_bytes: 0,
    };
    parsed.data = parsed.pointer(&capsule.sqe, room);
    if parsed.data.is_err() {
        parsed.blocks.clear();
    }
    Ok(parsed)
}

impl Parsed {
    /// Where the data is. Offset and length are compared with what came before anything uses them.
    #[inline]
    fn pointer(&mut self, sqe: &Sqe, room: &[u8]) -> Result<DataPointer, Status> {
        // Every command over Fabrics names SGLs (Base 2.0 section 3.3.3.1); in a Fabrics command the field is
        // reserved.
        if !matches!(sqe.psdt(), Psdt::SGL | Psdt::SGL_METADATA_SGL) && !sqe.is_fabrics() {
            return Err(Status::INVALID_FIELD.dnr());
        }
        let sgl = sqe.sgl;
        match sgl.kind() {
            SglKind::KEYED_DATA_BLOCK | SglKind::KEYED_DATA_BLOCK_INVALIDATE => {
                let keyed: KeyedSgl = nvme_spec::zerocopy::transmute!(sgl);
                self.add(&keyed)?;
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
            SglKind::LAST_SEGMENT_OFFSET => self.list(&sgl, room),
            // Some hosts leave the descriptor of a command without data all zero.
            SglKind(0) if sgl.bytes() == 0 => Ok(DataPointer::None),
            _ => Err(Status::SGL_DESCRIPTOR_TYPE_INVALID.dnr()),
        }
    }

    /// A list of keyed descriptors behind the submission queue entry.
    #[cold]
    fn list(&mut self, sgl: &Sgl, room: &[u8]) -> Result<DataPointer, Status> {
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
            self.add(descriptor)?;
        }
        Ok(self.host_pointer())
    }

    /// One keyed block. Of several that ask for it, the key of the first is invalidated: a SEND names one.
    #[inline]
    fn add(&mut self, keyed: &KeyedSgl) -> Result<(), Status> {
        let bytes = keyed.bytes();
        if keyed.kind() == SglKind::KEYED_DATA_BLOCK_INVALIDATE {
            self.invalidate.get_or_insert(keyed.key.get());
        }
        if bytes == 0 {
            return Ok(());
        }
        let remote = Remote { address: keyed.address.get(), key: keyed.key.get() };
        if remote.address.checked_add(u64::from(bytes)).is_none() {
            return Err(Status::DATA_SGL_LENGTH_INVALID.dnr());
        }
        // At most as many as were counted: 16 of 24 bits each stay far below 32.
        self.blocks.try_push(Block { remote, bytes }).map_err(|_| Status::INVALID_SGL_DESCRIPTOR_COUNT.dnr())
    }

    #[inline]
    fn host_pointer(&self) -> DataPointer {
        match self.blocks.iter().map(|block| block.bytes).sum() {
            0 => DataPointer::None,
            bytes => DataPointer::Host { bytes },
        }
    }
}

/// Copy in-capsule data to where it belongs.
#[inline]
pub(super) fn copy_data(capsule: &Buf, bytes: u32, to: &mut Buf) {
    let data = CAPSULE_BYTES as usize..(CAPSULE_BYTES + bytes) as usize;
    if let Some(data) = capsule.as_slice().and_then(|all| all.get(data)) {
        to.copy_in(0, &data[..data.len().min(to.len())]);
    }
}
