//! [`Rules`]: what a controller and its namespace allow, as the data path needs it; [`Namespace`]; and what a
//! status means for the one who asked the disk.

use std::sync::atomic::{AtomicU64, Ordering};

use nvme_spec::identify::{IdentifyController, IdentifyControllerNvm, IdentifyNamespace, Nsfeat, Oncs, Vwc};
use nvme_spec::status::Status;
use spindle_disk::{Abilities, BlockRange, DiskError, Geometry, Op};

use crate::dma::PAGE_BYTES;
use crate::entry::Task;
use crate::pointers::TRANSFER_BYTES_MAX;

/// Most blocks of a command but Dataset Management: NLB has 16 bits.
const NLB_MAX: u32 = 1 << 16;

/// Most source ranges of one Copy: a page of them.
const COPY_RANGES_MAX: u32 = PAGE_BYTES / 32;

/// How a range becomes zeroes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Zeroing {
    /// Write Zeroes.
    Command,
    /// Writes of a page of zeroes.
    Writes,
}

/// How a range gives its space back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Deallocating {
    /// Write Zeroes with DEAC: it reads as zeroes afterwards.
    WriteZeroes,
    /// Dataset Management: a hint. What the drive leaves allocated, as the ends of a range that are smaller
    /// than its unit, reads as before, and DLFEAT does not speak of that.
    DatasetManagement,
    /// Not at all.
    No,
}

/// Most commands that one deallocation becomes: a trim of 7.68 TB would be 229,000 of Write Zeroes, which a
/// drive may really write, and is 4 of Dataset Management.
const ZEROES_OF_DEALLOCATION_MAX: u32 = 64;

/// What one Copy command takes; nothing where the drive has none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Copying {
    /// Most blocks of a source range.
    pub(crate) range_blocks: u32,
    /// Most blocks of all its ranges, as many as fit one page.
    pub(crate) blocks: u32,
}

impl Copying {
    /// From MSSRL, MCL and MSRC.
    fn new(mssrl: u16, mcl: u32, msrc_z: u8) -> Copying {
        let range_blocks = u32::from(mssrl).min(mcl);
        let ranges = (u32::from(msrc_z) + 1).min(COPY_RANGES_MAX);
        Copying { range_blocks, blocks: mcl.min(range_blocks * ranges) }
    }
}

/// What one namespace of one controller allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rules {
    pub(crate) nsid: u32,
    /// Shift that turns blocks into bytes.
    pub(crate) shift: u32,
    /// Most blocks of a command with data.
    pub(crate) transfer_blocks: u32,
    /// No command with data should cross a multiple of this (NOIOB); 0 for none.
    pub(crate) boundary_blocks: u32,
    /// Most blocks of one Write Zeroes.
    pub(crate) zeroing_blocks: u32,
    /// Most blocks of one Dataset Management (DMRSL, DMSL).
    pub(crate) dsm_blocks: u32,
    pub(crate) zeroing: Zeroing,
    pub(crate) deallocating: Deallocating,
    /// The drive has Dataset Management.
    pub(crate) has_dsm: bool,
    /// It has refused a way to make zeroes that it said it has.
    pub(crate) has_fallen_back: bool,
    /// Without one, a flush has nothing to do.
    pub(crate) has_volatile_cache: bool,
    /// The drive has Compare.
    pub(crate) has_compare: bool,
    /// Most blocks of one Verify; 0 where the drive has none.
    pub(crate) verify_blocks: u32,
    pub(crate) copying: Copying,
}

impl Rules {
    /// From what the drive says. `mpsmin` is CAP.MPSMIN.
    pub(crate) fn new(
        namespace: &Namespace,
        controller: &IdentifyController,
        nvm: &IdentifyControllerNvm,
        mpsmin: u8,
    ) -> Rules {
        let oncs = Oncs::from(controller.oncs);
        let transfer = controller.transfer_bytes_max(mpsmin).unwrap_or(u64::MAX);
        let transfer = transfer.min(u64::from(TRANSFER_BYTES_MAX)) >> namespace.shift;
        let unit_shift = 12 + u32::from(mpsmin);
        let in_units = |exponent: u8| match exponent {
            0 => NLB_MAX,
            _ => {
                let bytes = 1_u64.checked_shl(unit_shift + u32::from(exponent)).unwrap_or(u64::MAX);
                u32::try_from(bytes >> namespace.shift).unwrap_or(u32::MAX).clamp(1, NLB_MAX)
            }
        };
        Rules {
            nsid: namespace.nsid,
            shift: namespace.shift,
            transfer_blocks: u32::try_from(transfer).unwrap_or(NLB_MAX).clamp(1, NLB_MAX),
            boundary_blocks: namespace.boundary_blocks,
            zeroing_blocks: in_units(nvm.wzsl).min(in_units(nvm.wzdsl)),
            dsm_blocks: dsm_blocks(nvm),
            zeroing: if oncs.write_zeroes() { Zeroing::Command } else { Zeroing::Writes },
            deallocating: if oncs.write_zeroes() && namespace.has_deac {
                Deallocating::WriteZeroes
            } else if oncs.dataset_management() {
                Deallocating::DatasetManagement
            } else {
                Deallocating::No
            },
            has_dsm: oncs.dataset_management(),
            has_fallen_back: false,
            has_volatile_cache: Vwc::from_bits(controller.vwc).present(),
            has_compare: oncs.compare(),
            verify_blocks: if oncs.verify() { in_units(nvm.vsl) } else { 0 },
            // Bit 0 of CDFS (OCFS in Base 2.0): descriptor format 0h.
            copying: if oncs.copy() && controller.cdfs.get() & 1 != 0 {
                namespace.copying
            } else {
                Copying::default()
            },
        }
    }

    /// What the drive does itself.
    pub(crate) fn abilities(&self) -> Abilities {
        let (verify, copy) = (self.verify_blocks > 0, self.copying.blocks > 0);
        Abilities { compare: self.has_compare, verify, copy, reads_in_place: false }
    }

    /// The drive has said that it does not have a command for this.
    pub(crate) fn forget(&mut self, task: Task) {
        match task {
            Task::Op(Op::Compare) => self.has_compare = false,
            Task::Op(Op::Verify) => self.verify_blocks = 0,
            Task::Copy { .. } => self.copying = Copying::default(),
            Task::Op(Op::Read | Op::Write { .. } | Op::Flush | Op::WriteZeroes { .. } | Op::Deallocate)
            | Task::Hint
            | Task::CompareAndWrite { .. } => {}
        }
    }

    /// A deallocation of so many blocks is one of Write Zeroes, where it is one at all.
    pub(crate) fn zeroes_of(&self, blocks: u32) -> bool {
        !self.has_dsm || blocks <= self.zeroing_blocks.saturating_mul(ZEROES_OF_DEALLOCATION_MAX)
    }

    /// The drive has refused a way to make zeroes, which it need not know although it says so (as SK hynix
    /// SC300: Linux's quirk for 1c5c:1504): the next one from now on. False when there is none.
    pub(crate) fn fall_back(&mut self, task: Task, code: Status) -> bool {
        if ![Status::INVALID_OPCODE, Status::INVALID_FIELD].contains(&code) {
            return false;
        }
        let gives_back = match task {
            Task::Op(Op::Deallocate) => true,
            Task::Op(Op::WriteZeroes { deallocate, .. }) => deallocate,
            Task::Op(Op::Read | Op::Write { .. } | Op::Flush | Op::Compare | Op::Verify)
            | Task::Hint
            | Task::CompareAndWrite { .. }
            | Task::Copy { .. } => return false,
        };
        let is_deac = gives_back && self.deallocating == Deallocating::WriteZeroes;
        let is_zeroes = task != Task::Op(Op::Deallocate) && self.zeroing == Zeroing::Command;
        if is_deac {
            self.deallocating = if self.has_dsm { Deallocating::DatasetManagement } else { Deallocating::No };
        }
        // Without DEAC it may do as well, unless it has no such command at all.
        if is_zeroes && (!is_deac || code == Status::INVALID_OPCODE) {
            self.zeroing = Zeroing::Writes;
        }
        self.has_fallen_back |= is_deac || is_zeroes;
        // Also one that was with the drive when another of its kind was refused.
        self.has_fallen_back
    }

    /// A read or write of these blocks is one command.
    #[inline]
    pub(crate) fn is_one_piece(&self, range: BlockRange) -> bool {
        range.blocks != 0 && self.data_blocks(range) == range.blocks
    }

    /// Blocks of the first command of what is left of a request.
    #[inline]
    pub(crate) fn piece_blocks(&self, op: Op, left: BlockRange) -> u32 {
        match op {
            Op::Read | Op::Write { .. } | Op::Compare => self.data_blocks(left),
            Op::Verify => left.blocks.min(self.verify_blocks),
            Op::Flush => left.blocks,
            Op::WriteZeroes { .. } => match self.zeroing {
                Zeroing::Command => left.blocks.min(self.zeroing_blocks),
                Zeroing::Writes => self.data_blocks(left),
            },
            Op::Deallocate => match self.deallocating {
                Deallocating::WriteZeroes => left.blocks.min(self.zeroing_blocks),
                Deallocating::DatasetManagement => left.blocks.min(self.dsm_blocks),
                Deallocating::No => left.blocks,
            },
        }
    }

    #[inline]
    fn data_blocks(&self, left: BlockRange) -> u32 {
        let blocks = left.blocks.min(self.transfer_blocks);
        if self.boundary_blocks == 0 {
            return blocks;
        }
        let boundary = u64::from(self.boundary_blocks);
        // At most a boundary's blocks, which are 16 bits.
        let room = boundary - left.lba % boundary;
        blocks.min(u32::try_from(room).unwrap_or(blocks))
    }
}

/// Blocks that one range, and all ranges together, may have; ours are one range.
fn dsm_blocks(nvm: &IdentifyControllerNvm) -> u32 {
    let limit = |blocks: u64| if blocks == 0 { u32::MAX } else { u32::try_from(blocks).unwrap_or(u32::MAX) };
    limit(nvm.dmrsl.get().into()).min(limit(nvm.dmsl.get()))
}

/// Why a namespace cannot be served.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("namespace {nsid}: {field} is {value}: {allowed}")]
pub struct UnfitNamespace {
    /// The namespace.
    pub nsid: u32,
    /// What is wrong.
    pub field: &'static str,
    /// What it is.
    pub value: u64,
    /// What is allowed.
    pub allowed: &'static str,
}

/// A namespace of a drive, as it was identified.
#[derive(Debug)]
pub struct Namespace {
    /// Its number.
    pub nsid: u32,
    /// NGUID; zeroes where it has none.
    pub nguid: [u8; 16],
    /// EUI64; zeroes where it has none.
    pub eui64: [u8; 8],
    /// Bytes of a logical block, as a power of two.
    pub(crate) shift: u32,
    blocks: AtomicU64,
    /// NOIOB.
    boundary_blocks: u32,
    /// DLFEAT: Write Zeroes takes DEAC.
    has_deac: bool,
    /// Blocks that one write changes in one step.
    atomic_blocks: u32,
    /// MSSRL, MCL and MSRC.
    copying: Copying,
    /// NSATTR: it is write protected.
    is_read_only: bool,
}

impl Namespace {
    /// From Identify Namespace and Identify Controller.
    ///
    /// # Errors
    /// [`UnfitNamespace`]: its format is one that hosts could not use.
    pub(crate) fn new(
        nsid: u32,
        id: &IdentifyNamespace,
        controller: &IdentifyController,
    ) -> Result<Namespace, UnfitNamespace> {
        let unfit = |field, value, allowed| Err(UnfitNamespace { nsid, field, value, allowed });
        let format = id.format();
        if format.ms.get() != 0 {
            return unfit(
                "MS",
                u64::from(format.ms.get()),
                "must be 0: format it without metadata (nvme format)",
            );
        }
        if !matches!(format.lbads, 9 | 12) {
            return unfit("LBADS", u64::from(format.lbads), "must be 9 (512 bytes) or 12 (4096 bytes)");
        }
        let (blocks, shift) = (id.nsze.get(), u32::from(format.lbads));
        if blocks == 0 || blocks > i64::MAX.unsigned_abs() >> shift {
            return unfit("NSZE", blocks, "must be 1 block to 2^63 bytes");
        }
        let own = Nsfeat::from_bits(id.nsfeat).atomics().then(|| id.nawun_z.get());
        // NABSN: a write that crosses one of these is changed in several steps.
        let has_atomic_boundaries = id.nabsn_z.get() != 0;
        Ok(Namespace {
            nsid,
            nguid: id.nguid,
            eui64: id.eui64,
            shift,
            blocks: AtomicU64::new(blocks),
            boundary_blocks: u32::from(id.noiob.get()),
            has_deac: id.dlfeat & 8 != 0,
            atomic_blocks: if has_atomic_boundaries {
                1
            } else {
                u32::from(own.unwrap_or(controller.awun_z.get())) + 1
            },
            copying: Copying::new(id.mssrl.get(), id.mcl.get(), id.msrc_z),
            is_read_only: id.nsattr & 1 != 0,
        })
    }

    /// True for the same namespace, or one that hosts could not tell from it but for its size.
    pub(crate) fn is_same(&self, other: &Namespace) -> bool {
        self.nsid == other.nsid
            && self.shift == other.shift
            && self.nguid == other.nguid
            && self.eui64 == other.eui64
    }

    /// It has another size now.
    pub(crate) fn set_blocks(&self, blocks: u64) {
        self.blocks.store(blocks, Ordering::Relaxed);
    }

    /// Blocks it has now.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.blocks.load(Ordering::Relaxed)
    }

    /// Its shape as a disk.
    pub(crate) fn geometry(&self, rules: &Rules) -> Geometry {
        Geometry {
            block_bytes: 1 << self.shift,
            block_count: self.blocks(),
            is_read_only: self.is_read_only,
            has_volatile_cache: rules.has_volatile_cache,
            can_deallocate: rules.deallocating != Deallocating::No,
            // A command may be split at a boundary or at the transfer limit.
            atomic_blocks: match rules.boundary_blocks {
                0 => self.atomic_blocks.min(rules.transfer_blocks),
                _ => 1,
            },
            can_compare_and_write: !self.is_read_only,
        }
    }
}

/// True for a failure that the same command may not meet again: DNR is clear, and the code says that it was
/// not the command's fault.
pub(crate) fn is_passing(status: Status) -> bool {
    if status.is_dnr() {
        return false;
    }
    matches!(
        status.code(),
        Status::ABORTED_BY_REQUEST
            | Status::ABORTED_SQ_DELETION
            | Status::ABORTED_POWER_LOSS
            | Status::COMMAND_INTERRUPTED
            | Status::COMMAND_TRANSIENT_TRANSPORT_ERROR
            | Status::NAMESPACE_NOT_READY
            | Status::DATA_TRANSFER_ERROR
            | Status::INTERNAL_PATH_ERROR
            | Status::CONTROLLER_PATHING_ERROR
            | Status::HOST_PATHING_ERROR
            | Status::ABORTED_BY_HOST
    )
}

/// The disk's error for a status that is not success.
pub(crate) fn disk_error(status: Status) -> DiskError {
    match status.code() {
        // The namespace was deleted or detached: it does not come back by asking again.
        Status::INVALID_NAMESPACE_OR_FORMAT => DiskError::Gone,
        _ => DiskError::of_status(status),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvme_spec::zerocopy::little_endian::{U16, U64};

    fn namespace(change: impl FnOnce(&mut IdentifyNamespace)) -> Result<Namespace, UnfitNamespace> {
        let mut id = IdentifyNamespace { nsze: U64::new(1000), dlfeat: 9, ..IdentifyNamespace::default() };
        id.lbaf[0].lbads = 9;
        change(&mut id);
        Namespace::new(1, &id, &IdentifyController::default())
    }

    fn rules(namespace: &Namespace, mdts: u8) -> Rules {
        let oncs = Oncs::new().with_write_zeroes(true);
        let id = IdentifyController { mdts, oncs: oncs.into(), ..IdentifyController::default() };
        Rules::new(namespace, &id, &IdentifyControllerNvm::default(), 0)
    }

    #[test]
    fn formats_that_hosts_cannot_use_are_refused_with_what_is_allowed() {
        let metadata = namespace(|id| id.lbaf[0].ms = U16::new(8)).expect_err("metadata");
        assert!(metadata.to_string().contains("namespace 1: MS is 8: must be 0"), "{metadata}");
        assert!(namespace(|id| id.lbaf[0].lbads = 10).is_err());
        assert!(namespace(|id| id.nsze = U64::new(0)).is_err());
        assert!(namespace(|id| id.nsze = U64::new(u64::MAX)).is_err());
        assert!(namespace(|_| ()).is_ok());
    }

    #[test]
    fn pieces_end_at_the_transfer_limit_and_at_boundaries() {
        let plain = namespace(|_| ()).expect("fits");
        let range = |lba, blocks| BlockRange { lba, blocks };
        // 4 KiB << 1 = 16 blocks; without MDTS 1 MiB.
        assert_eq!(rules(&plain, 1).piece_blocks(Op::Read, range(5, 100)), 16);
        assert_eq!(rules(&plain, 0).piece_blocks(Op::Read, range(5, 100_000)), 2048);
        assert_eq!(rules(&plain, 200).transfer_blocks, 2048);
        let striped = namespace(|id| id.noiob = U16::new(10)).expect("fits");
        let rules = rules(&striped, 1);
        for (lba, blocks, piece) in [(0, 100, 10), (5, 100, 5), (9, 1, 1), (19, 3, 1), (20, 7, 7)] {
            assert_eq!(rules.piece_blocks(Op::Write { fua: false }, range(lba, blocks)), piece, "{lba}");
        }
        let zeroes = Op::WriteZeroes { deallocate: false, fua: false };
        assert_eq!(rules.piece_blocks(zeroes, range(5, 100_000)), 65_536);
    }

    #[test]
    fn a_write_is_one_step_only_where_no_boundary_may_cut_it() {
        let atomic = |change: fn(&mut IdentifyNamespace)| {
            let namespace = namespace(|id| {
                (id.nsfeat, id.nawun_z) = (Nsfeat::new().with_atomics(true).into_bits(), U16::new(7));
                change(id);
            });
            let namespace = namespace.expect("fits");
            namespace.geometry(&rules(&namespace, 0)).atomic_blocks
        };
        assert_eq!(atomic(|_| ()), 8);
        assert_eq!(atomic(|id| id.nabsn_z = U16::new(255)), 1);
        assert_eq!(atomic(|id| id.noiob = U16::new(256)), 1);
    }

    #[test]
    fn a_namespace_that_the_drive_protects_from_writes_is_read_only() {
        let is_read_only = |nsattr| {
            let namespace = namespace(|id| id.nsattr = nsattr).expect("fits");
            namespace.geometry(&rules(&namespace, 0)).is_read_only
        };
        assert!(is_read_only(1) && is_read_only(0xff));
        assert!(!is_read_only(0) && !is_read_only(0xfe), "the other bits say something else");
    }

    #[test]
    fn a_deallocation_is_no_larger_than_the_drive_takes() {
        let namespace = namespace(|id| id.dlfeat = 1).expect("fits");
        let oncs = Oncs::new().with_dataset_management(true);
        let id = IdentifyController { oncs: oncs.into(), ..IdentifyController::default() };
        for (dmrsl, dmsl, most) in [(0, 0, 500), (100, 0, 100), (0, 64, 64), (100, 1 << 40, 100)] {
            let nvm = IdentifyControllerNvm { dmrsl: dmrsl.into(), dmsl: dmsl.into(), ..Default::default() };
            let rules = Rules::new(&namespace, &id, &nvm, 0);
            assert_eq!(rules.piece_blocks(Op::Deallocate, BlockRange { lba: 1, blocks: 500 }), most);
        }
    }

    #[test]
    fn a_range_is_deallocated_by_the_command_that_makes_zeroes_of_it_where_there_is_one() {
        let way = |dlfeat, oncs: Oncs| {
            let namespace = namespace(|id| id.dlfeat = dlfeat).expect("fits");
            let id = IdentifyController { oncs: oncs.into(), ..IdentifyController::default() };
            Rules::new(&namespace, &id, &IdentifyControllerNvm::default(), 0).deallocating
        };
        let both = Oncs::new().with_write_zeroes(true).with_dataset_management(true);
        assert_eq!(way(9, both), Deallocating::WriteZeroes);
        assert_eq!(way(1, both), Deallocating::DatasetManagement);
        assert_eq!(way(0, both), Deallocating::DatasetManagement);
        assert_eq!(way(1, Oncs::new().with_write_zeroes(true)), Deallocating::No);
        assert_eq!(way(9, Oncs::new()), Deallocating::No);
    }

    #[test]
    fn media_errors_are_as_the_drive_says_them_and_the_others_are_the_disks() {
        for status in [Status::UNRECOVERED_READ_ERROR, Status::WRITE_FAULT, Status::WRITE_FAULT.dnr()] {
            assert_eq!(disk_error(status), DiskError::Device(status));
        }
        assert_eq!(disk_error(Status::COMPARE_FAILURE), DiskError::CompareDiffers);
        assert_eq!(disk_error(Status::NAMESPACE_IS_WRITE_PROTECTED), DiskError::WriteProtected);
        assert_eq!(disk_error(Status::CAPACITY_EXCEEDED), DiskError::NoSpace);
        assert_eq!(disk_error(Status::INVALID_FIELD), DiskError::Internal);
    }

    #[test]
    fn what_passes_is_tried_again_unless_the_drive_says_not_to() {
        assert!(is_passing(Status::ABORTED_BY_REQUEST) && is_passing(Status::NAMESPACE_NOT_READY));
        assert!(!is_passing(Status::UNRECOVERED_READ_ERROR) && !is_passing(Status::INVALID_FIELD));
        let never = Status::from_bits(Status::ABORTED_BY_REQUEST.bits() | 1 << 14);
        assert!(!is_passing(never));
    }
}
