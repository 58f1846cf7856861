//! Resolves data pointers, PRPs and SGLs, to IOVA ranges (Base 2.0 sections 4.1.1 and 4.1.2).

use nvme_spec::sqe::Psdt;
use nvme_spec::zerocopy::FromBytes;
use nvme_spec::{Sgl, SglKind, Sqe, Status};

use crate::memory::{Access, HostMemory, Piece};
use crate::spec::SglSupport;

const PAGE: u64 = 4096;
/// Maximum SGL descriptors of a command, so that a cycle of segments ends.
const DESCRIPTORS_MAX: u32 = 1 << 18;

/// IOVA ranges of a command's data and of the lists that describe it.
#[derive(Debug, Default)]
pub(crate) struct Pointers {
    /// Data ranges, in order.
    pub(crate) data: Vec<Piece>,
    /// Entries of PRP lists as far as they were read, and SGL segments.
    pub(crate) lists: Vec<Piece>,
}

impl Pointers {
    /// Resolves the data pointer of a command with `bytes` of data.
    ///
    /// # Errors
    /// The status with which the command ends.
    pub(crate) fn resolve(
        &mut self,
        host: &mut HostMemory,
        sqe: &Sqe,
        bytes: u64,
        sgl: SglSupport,
    ) -> Result<(), Status> {
        self.data.clear();
        self.lists.clear();
        if bytes == 0 {
            return Ok(());
        }
        match (sqe.psdt(), sgl) {
            (Psdt::PRP, _) => {
                let (prp1, prp2) = sqe.sgl.prp();
                self.walk_prps(host, prp1, prp2, bytes)
            }
            (Psdt::SGL, SglSupport::Bytes | SglSupport::Dwords) => {
                self.walk_sgl(host, sqe.sgl, bytes, sgl == SglSupport::Dwords)
            }
            _ => Err(Status::INVALID_FIELD.dnr()),
        }
    }

    /// As [`Self::resolve`], and fails with Data Transfer Error if not all data may be accessed.
    pub(crate) fn resolve_for(
        &mut self,
        host: &mut HostMemory,
        sqe: &Sqe,
        bytes: u64,
        sgl: SglSupport,
        access: Access,
    ) -> Result<(), Status> {
        self.resolve(host, sqe, bytes, sgl)?;
        if host.may_access(&self.data, access, "data") { Ok(()) } else { Err(Status::DATA_TRANSFER_ERROR) }
    }

    fn push(&mut self, iova: u64, bytes: u64) {
        // Fits: a PRP is at most a page, and a descriptor's length has 32 bits.
        self.data.push(Piece { iova, bytes: u32::try_from(bytes).unwrap_or(u32::MAX) });
    }

    fn walk_prps(&mut self, host: &mut HostMemory, prp1: u64, prp2: u64, bytes: u64) -> Result<(), Status> {
        let offset_invalid = Status::PRP_OFFSET_INVALID.dnr();
        if !prp1.is_multiple_of(4) {
            return Err(offset_invalid);
        }
        let first = bytes.min(PAGE - prp1 % PAGE);
        self.push(prp1, first);
        let mut rest = bytes - first;
        if rest == 0 {
            return Ok(());
        }
        if rest <= PAGE {
            if !prp2.is_multiple_of(PAGE) {
                return Err(offset_invalid);
            }
            self.push(prp2, rest);
            return Ok(());
        }
        if !prp2.is_multiple_of(8) {
            return Err(offset_invalid);
        }
        let mut entry = prp2;
        self.lists.push(Piece { iova: entry, bytes: 0 });
        while rest != 0 {
            let value = host.load64(entry, "PRP list").ok_or(Status::DATA_TRANSFER_ERROR)?;
            if let Some(list) = self.lists.last_mut() {
                list.bytes += 8;
            }
            if !value.is_multiple_of(PAGE) {
                return Err(offset_invalid);
            }
            let is_last_of_page = entry % PAGE == PAGE - 8;
            if is_last_of_page && rest > PAGE {
                entry = value;
                self.lists.push(Piece { iova: entry, bytes: 0 });
                continue;
            }
            let here = rest.min(PAGE);
            self.push(value, here);
            rest -= here;
            entry = entry.wrapping_add(8);
        }
        Ok(())
    }

    fn walk_sgl(&mut self, host: &mut HostMemory, sgl: Sgl, bytes: u64, dwords: bool) -> Result<(), Status> {
        let mut rest = bytes;
        let mut next = match sgl.kind() {
            SglKind::DATA_BLOCK_ADDRESS => {
                self.data_block(sgl, &mut rest, dwords)?;
                None
            }
            SglKind::SEGMENT_ADDRESS | SglKind::LAST_SEGMENT_ADDRESS => Some(sgl),
            _ => return Err(Status::SGL_DESCRIPTOR_TYPE_INVALID.dnr()),
        };
        let mut descriptor_count = 0;
        while let Some(segment) = next.take() {
            next = self.walk_segment(host, segment, &mut rest, dwords, &mut descriptor_count)?;
        }
        if rest == 0 { Ok(()) } else { Err(Status::DATA_SGL_LENGTH_INVALID.dnr()) }
    }

    /// Adds the data blocks of one segment. Returns the descriptor of the next segment, if any.
    fn walk_segment(
        &mut self,
        host: &mut HostMemory,
        segment: Sgl,
        rest: &mut u64,
        dwords: bool,
        descriptor_count: &mut u32,
    ) -> Result<Option<Sgl>, Status> {
        let invalid = Status::INVALID_SGL_SEGMENT_DESCRIPTOR.dnr();
        let (address, bytes) = (segment.address(), segment.bytes());
        if bytes == 0 || !bytes.is_multiple_of(16) || !address.is_multiple_of(8) {
            return Err(invalid);
        }
        let is_last = segment.kind() == SglKind::LAST_SEGMENT_ADDRESS;
        self.lists.push(Piece { iova: address, bytes });
        for at in (0..bytes).step_by(16) {
            *descriptor_count += 1;
            if *descriptor_count > DESCRIPTORS_MAX {
                return Err(Status::INVALID_SGL_DESCRIPTOR_COUNT.dnr());
            }
            let mut entry = [0; 16];
            let read = host.read_words(address.wrapping_add(u64::from(at)), &mut entry, "SGL segment");
            let descriptor = read.and_then(|()| Sgl::read_from_bytes(&entry).ok());
            let descriptor = descriptor.ok_or(Status::DATA_TRANSFER_ERROR)?;
            let is_end = at + 16 == bytes;
            match descriptor.kind() {
                SglKind::SEGMENT_ADDRESS | SglKind::LAST_SEGMENT_ADDRESS if is_end && !is_last => {
                    return Ok(Some(descriptor));
                }
                SglKind::SEGMENT_ADDRESS | SglKind::LAST_SEGMENT_ADDRESS => return Err(invalid),
                SglKind::DATA_BLOCK_ADDRESS if is_end && !is_last => return Err(invalid),
                SglKind::DATA_BLOCK_ADDRESS => self.data_block(descriptor, rest, dwords)?,
                _ => return Err(Status::SGL_DESCRIPTOR_TYPE_INVALID.dnr()),
            }
        }
        Ok(None)
    }

    fn data_block(&mut self, block: Sgl, rest: &mut u64, dwords: bool) -> Result<(), Status> {
        let (address, bytes) = (block.address(), u64::from(block.bytes()));
        if dwords && !(address.is_multiple_of(4) && bytes.is_multiple_of(4)) {
            return Err(Status::SGL_DATA_BLOCK_GRANULARITY_INVALID.dnr());
        }
        *rest = rest.checked_sub(bytes).ok_or(Status::DATA_SGL_LENGTH_INVALID.dnr())?;
        if bytes != 0 {
            self.push(address, bytes);
        }
        Ok(())
    }

    /// Copies `from` to the host's data at `cursor` and advances `cursor`. `None` if not all bytes could be
    /// written.
    pub(crate) fn write(&self, host: &mut HostMemory, cursor: &mut Cursor, mut from: &[u8]) -> Option<()> {
        while !from.is_empty() {
            let (iova, bytes) = cursor.advance(&self.data, from.len())?;
            let (here, after) = from.split_at_checked(bytes)?;
            host.write(iova, here)?;
            from = after;
        }
        Some(())
    }

    /// Fills `to` from the host's data at `cursor` and advances `cursor`. `None` if not all bytes could be
    /// read.
    pub(crate) fn read(&self, host: &mut HostMemory, cursor: &mut Cursor, mut to: &mut [u8]) -> Option<()> {
        while !to.is_empty() {
            let (iova, bytes) = cursor.advance(&self.data, to.len())?;
            let (here, after) = to.split_at_mut_checked(bytes)?;
            host.read(iova, here)?;
            to = after;
        }
        Some(())
    }
}

/// Position in a command's data.
#[derive(Debug, Default)]
pub(crate) struct Cursor {
    piece: usize,
    at: u32,
}

impl Cursor {
    /// Advances by up to `bytes` within the current piece. Returns the IOVA and length of these bytes; `None`
    /// at the end of the data.
    fn advance(&mut self, data: &[Piece], bytes: usize) -> Option<(u64, usize)> {
        let piece = data.get(self.piece)?;
        let here = u32::try_from(bytes).unwrap_or(u32::MAX).min(piece.bytes - self.at);
        let iova = piece.iova.wrapping_add(u64::from(self.at));
        self.at += here;
        if self.at == piece.bytes {
            self.piece += 1;
            self.at = 0;
        }
        Some((iova, here as usize))
    }
}
