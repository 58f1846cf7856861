//! Commands of the NVM command set (NVM Command Set 1.0 section 3.2) and Flush.

use nvme_spec::identify::Dlfeat;
use nvme_spec::io::{Copy, CopyRangeFormat0, DatasetManagement, DsmRange, RANGES_MAX, ReadWriteCdw12};
use nvme_spec::sqe::{Fuse, NSID_ALL, Psdt};
use nvme_spec::zerocopy::FromBytes;
use nvme_spec::{IoOpcode, Sqe, Status};

use crate::controller::{Controller, Outcome};
use crate::memory::Access;
use crate::pointers::Cursor;
use crate::spec::{EmulatorSpec, SglSupport};

const INVALID_FIELD: Status = Status::INVALID_FIELD.dnr();

impl Controller {
    pub(crate) fn execute_io(&mut self, sqe: &Sqe) -> Outcome {
        let opcode = sqe.io_opcode();
        if !self.has_command(opcode) {
            return Err(Status::INVALID_OPCODE.dnr());
        }
        let is_psdt_known = match sqe.psdt() {
            Psdt::PRP => true,
            Psdt::SGL => self.spec.sgl != SglSupport::None,
            _ => false,
        };
        if sqe.fuse() != Fuse::NONE || !is_psdt_known {
            return Err(INVALID_FIELD);
        }
        self.counters.sgls += u64::from(sqe.psdt() != Psdt::PRP);
        if opcode == IoOpcode::FLUSH {
            return self.flush(sqe.nsid());
        }
        let index = self.namespace(sqe.nsid())?;
        match opcode {
            IoOpcode::READ => self.read(index, sqe),
            IoOpcode::WRITE => self.write(index, sqe),
            IoOpcode::COMPARE => self.compare(index, sqe),
            IoOpcode::VERIFY => self.verify(index, sqe),
            IoOpcode::WRITE_ZEROES => self.write_zeroes(index, sqe),
            IoOpcode::DATASET_MANAGEMENT => self.manage_dataset(index, sqe),
            _ => self.copy(index, sqe),
        }
    }

    fn has_command(&self, opcode: IoOpcode) -> bool {
        let oncs = &self.spec.oncs;
        match opcode {
            IoOpcode::FLUSH | IoOpcode::READ | IoOpcode::WRITE => true,
            IoOpcode::COMPARE => oncs.compare(),
            IoOpcode::VERIFY => oncs.verify(),
            IoOpcode::WRITE_ZEROES => oncs.write_zeroes(),
            IoOpcode::DATASET_MANAGEMENT => oncs.dataset_management(),
            IoOpcode::COPY => oncs.copy(),
            _ => false,
        }
    }

    /// Returns the bytes that an I/O command transfers between host and controller.
    pub(crate) fn io_bytes(&self, sqe: &Sqe) -> u64 {
        let block = |medium: &crate::medium::EmulatedMedia| u64::from(medium.block_bytes);
        let block_bytes = self.index(sqe.nsid()).and_then(|at| self.media.get(at)).map_or(0, block);
        match sqe.io_opcode() {
            IoOpcode::READ | IoOpcode::WRITE | IoOpcode::COMPARE => u64::from(sqe.blocks()) * block_bytes,
            IoOpcode::DATASET_MANAGEMENT => u64::from(DatasetManagement::new(sqe).nr()) * 16,
            IoOpcode::COPY => u64::from(Copy::new(sqe).ranges()) * 32,
            _ => 0,
        }
    }

    fn index(&self, nsid: u32) -> Option<usize> {
        let index = usize::try_from(nsid).ok()?.checked_sub(1)?;
        (index < self.media.len()).then_some(index)
    }

    /// Returns the index of a namespace in `media`; Invalid Namespace or Format if it does not exist.
    pub(crate) fn namespace(&self, nsid: u32) -> Result<usize, Status> {
        self.index(nsid).ok_or(Status::INVALID_NAMESPACE_OR_FORMAT.dnr())
    }

    fn flush(&mut self, nsid: u32) -> Outcome {
        if nsid == NSID_ALL {
            self.media.iter_mut().for_each(crate::medium::EmulatedMedia::flush);
            return Ok(0);
        }
        let index = self.namespace(nsid)?;
        if let Some(medium) = self.media.get_mut(index) {
            medium.flush();
        }
        Ok(0)
    }

    fn range(&self, index: usize, lba: u64, blocks: u64) -> Result<(), Status> {
        let size = self.media.get(index).map_or(0, |medium| medium.blocks);
        let is_inside = lba.checked_add(blocks).is_some_and(|end| end <= size);
        if is_inside { Ok(()) } else { Err(Status::LBA_OUT_OF_RANGE.dnr()) }
    }

    /// Checks a command with data and resolves its data pointer. Returns its LBA and count of blocks.
    fn resolve_data(&mut self, index: usize, sqe: &Sqe, access: Access) -> Result<(u64, u64), Status> {
        let bytes = self.io_bytes(sqe);
        let has_metadata = self.spec.namespaces.get(index).is_some_and(|spec| spec.metadata_bytes != 0);
        let is_long = EmulatorSpec::limit_bytes(self.spec.mdts).is_some_and(|most| bytes > most);
        let has_protection = ReadWriteCdw12::from(sqe.cdw12).prinfo() != 0;
        if has_metadata || is_long || has_protection {
            return Err(INVALID_FIELD);
        }
        let (lba, blocks) = (sqe.slba(), u64::from(sqe.blocks()));
        self.range(index, lba, blocks)?;
        self.pointers.resolve_for(&mut self.host, sqe, bytes, self.spec.sgl, access)?;
        Ok((lba, blocks))
    }

    fn read(&mut self, index: usize, sqe: &Sqe) -> Outcome {
        let (lba, blocks) = self.resolve_data(index, sqe, Access::Write)?;
        let Some(medium) = self.media.get_mut(index) else { return Err(INVALID_FIELD) };
        if ReadWriteCdw12::from(sqe.cdw12).fua() {
            medium.flush_blocks(lba, blocks);
        }
        let (host, pointers, mut cursor) = (&mut self.host, &self.pointers, Cursor::default());
        let is_done =
            medium.read_blocks(lba, blocks, |data| pointers.write(host, &mut cursor, data).is_some());
        self.health.note_read(blocks * u64::from(medium.block_bytes));
        if is_done { Ok(0) } else { Err(Status::DATA_TRANSFER_ERROR) }
    }

    fn write(&mut self, index: usize, sqe: &Sqe) -> Outcome {
        let (lba, blocks) = self.resolve_data(index, sqe, Access::Read)?;
        let is_cached = self.is_cached(ReadWriteCdw12::from(sqe.cdw12).fua());
        let Some(medium) = self.media.get_mut(index) else { return Err(INVALID_FIELD) };
        let (host, pointers, mut cursor) = (&mut self.host, &self.pointers, Cursor::default());
        let mut is_done = true;
        medium.change(lba, blocks, is_cached, |data| {
            is_done &= pointers.read(host, &mut cursor, data).is_some();
        });
        self.health.note_write(blocks * u64::from(medium.block_bytes));
        if is_done { Ok(0) } else { Err(Status::DATA_TRANSFER_ERROR) }
    }

    fn compare(&mut self, index: usize, sqe: &Sqe) -> Outcome {
        let (lba, blocks) = self.resolve_data(index, sqe, Access::Read)?;
        self.counters.compares += 1;
        let Some(medium) = self.media.get(index) else { return Err(INVALID_FIELD) };
        let (host, pointers, mut cursor) = (&mut self.host, &self.pointers, Cursor::default());
        let mut buffer = [0; 512];
        let is_same = medium.read_blocks(lba, blocks, |data| {
            data.chunks(buffer.len()).all(|here| {
                let Some(theirs) = buffer.get_mut(..here.len()) else { return false };
                pointers.read(host, &mut cursor, theirs).is_some() && *theirs == *here
            })
        });
        self.health.note_read(blocks * u64::from(medium.block_bytes));
        if is_same { Ok(0) } else { Err(Status::COMPARE_FAILURE.dnr()) }
    }

    fn verify(&mut self, index: usize, sqe: &Sqe) -> Outcome {
        let blocks = u64::from(sqe.blocks());
        let block_bytes = self.media.get(index).map_or(0, |medium| u64::from(medium.block_bytes));
        let is_long =
            EmulatorSpec::limit_bytes(self.spec.vsl).is_some_and(|most| blocks * block_bytes > most);
        if is_long || ReadWriteCdw12::from(sqe.cdw12).prinfo() != 0 {
            return Err(INVALID_FIELD);
        }
        self.range(index, sqe.slba(), blocks)?;
        self.counters.verifies += 1;
        Ok(0)
    }

    fn is_cached(&self, fua: bool) -> bool {
        self.spec.has_write_cache && self.admin.is_cache_on && !fua
    }

    fn write_zeroes(&mut self, index: usize, sqe: &Sqe) -> Outcome {
        let (view, blocks) = (ReadWriteCdw12::from(sqe.cdw12), u64::from(sqe.blocks()));
        let refusal = self.spec.deac_refusal.filter(|_| view.deac()).or(self.spec.zeroes_refusal);
        if let Some(status) = refusal {
            return Err(status);
        }
        let block_bytes = self.media.get(index).map_or(0, |medium| u64::from(medium.block_bytes));
        let is_long =
            EmulatorSpec::limit_bytes(self.spec.wzsl).is_some_and(|most| blocks * block_bytes > most);
        if is_long || view.whole_namespace() || view.prinfo() != 0 {
            return Err(INVALID_FIELD);
        }
        self.range(index, sqe.slba(), blocks)?;
        let is_cached = self.is_cached(view.fua());
        if let Some(medium) = self.media.get_mut(index) {
            // With and without DEAC the blocks read as zeroes.
            medium.set(sqe.slba(), blocks, 0, is_cached);
        }
        Ok(0)
    }

    fn manage_dataset(&mut self, index: usize, sqe: &Sqe) -> Outcome {
        let view = DatasetManagement::new(sqe);
        let bytes = usize::from(view.nr()) * 16;
        self.pointers.resolve_for(&mut self.host, sqe, bytes as u64, self.spec.sgl, Access::Read)?;
        let mut ranges = [0; 4096];
        let ranges = ranges.get_mut(..bytes).ok_or(INVALID_FIELD)?;
        let read = self.pointers.read(&mut self.host, &mut Cursor::default(), ranges);
        read.ok_or(Status::DATA_TRANSFER_ERROR)?;
        let ranges = || ranges.chunks_exact(16).filter_map(|bytes| DsmRange::read_from_bytes(bytes).ok());
        for range in ranges() {
            self.range(index, range.slba.get(), u64::from(range.blocks.get()))?;
        }
        let behavior = self.spec.namespaces.get(index).map_or(0, |spec| spec.dlfeat.read_behavior());
        let byte = match behavior {
            Dlfeat::READS_ZEROES => Some(0),
            Dlfeat::READS_ONES => Some(0xff),
            _ => None,
        };
        let is_cached = self.is_cached(false);
        if let (true, Some(byte), Some(medium)) = (view.ad(), byte, self.media.get_mut(index)) {
            for range in ranges() {
                medium.set(range.slba.get(), u64::from(range.blocks.get()), byte, is_cached);
            }
        }
        Ok(0)
    }

    fn copy(&mut self, index: usize, sqe: &Sqe) -> Outcome {
        let (view, too_large) = (Copy::new(sqe), Status::COMMAND_SIZE_LIMIT_EXCEEDED.dnr());
        let cdw12 = view.cdw12();
        let has_format = cdw12.format() == 0 && self.spec.cdfs & 1 != 0;
        if !has_format || cdw12.prinfo_read() != 0 || cdw12.prinfo_write() != 0 {
            return Err(INVALID_FIELD);
        }
        let limits = self.spec.namespaces.get(index).map(|spec| (spec.mssrl, spec.mcl, spec.msrc_z));
        let (mssrl, mcl, msrc_z) = limits.ok_or(INVALID_FIELD)?;
        if view.ranges() > u16::from(msrc_z) + 1 {
            return Err(too_large);
        }
        let bytes = usize::from(view.ranges()) * 32;
        self.pointers.resolve_for(&mut self.host, sqe, bytes as u64, self.spec.sgl, Access::Read)?;
        let mut ranges = [0; 32 * RANGES_MAX as usize];
        let ranges = ranges.get_mut(..bytes).ok_or(INVALID_FIELD)?;
        let read = self.pointers.read(&mut self.host, &mut Cursor::default(), ranges);
        read.ok_or(Status::DATA_TRANSFER_ERROR)?;
        let ranges =
            || ranges.chunks_exact(32).filter_map(|bytes| CopyRangeFormat0::read_from_bytes(bytes).ok());
        let mut blocks = 0;
        for range in ranges() {
            if range != CopyRangeFormat0::new(range.slba.get(), range.blocks()) {
                self.host
                    .record_violation(|| format!("{range:?}: bits are set that format 0h does not have"));
            }
            if range.blocks() > u32::from(mssrl) {
                return Err(too_large);
            }
            self.range(index, range.slba.get(), u64::from(range.blocks()))?;
            blocks += range.blocks();
        }
        if blocks > mcl {
            return Err(too_large);
        }
        self.range(index, view.sdlba(), u64::from(blocks))?;
        self.counters.copies += 1;
        let is_cached = self.is_cached(cdw12.fua());
        let Some(medium) = self.media.get_mut(index) else { return Err(INVALID_FIELD) };
        // All ranges are read before the first write, so that they may overlap the destination.
        let copied = &mut self.copied;
        copied.clear();
        for range in ranges() {
            medium.read_blocks(range.slba.get(), u64::from(range.blocks()), |data| {
                copied.extend_from_slice(data);
                true
            });
        }
        let mut from = &copied[..];
        medium.change(view.sdlba(), u64::from(blocks), is_cached, |data| {
            if let Some((here, after)) = from.split_at_checked(data.len()) {
                data.copy_from_slice(here);
                from = after;
            }
        });
        Ok(0)
    }
}
