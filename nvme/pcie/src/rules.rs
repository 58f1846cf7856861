//! [`Rules`], the limits of a controller and a namespace for the data path; [`Namespace`]; status codes.

use std::sync::atomic::{AtomicU64, Ordering};

use nvme_spec::identify::{IdentifyController, IdentifyControllerNvm, IdentifyNamespace, Nsfeat, Oncs, Vwc};
use nvme_spec::status::Status;
use spindle_target_disk::{Abilities, BlockRange, DiskError, Geometry, Op};

use crate::dma::PAGE_BYTES;
use crate::entry::Task;
use crate::pointers::TRANSFER_BYTES_MAX;

/// Maximum number of blocks of a command with NLB: 16 bits, zero-based (not Dataset Management and Copy).
const NLB_MAX: u32 = 1 << 16;

/// Maximum number of source ranges of one Copy: the 32-byte descriptors that fit one list page.
const COPY_RANGES_MAX: u32 = PAGE_BYTES / 32;

/// Method of [`Op::WriteZeroes`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Zeroing {
    Command,
    /// Writes whose PRP entries all point to one zero page.
    Writes,
}

/// Method of [`Op::Deallocate`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Deallocating {
    /// Write Zeroes with DEAC: the range reads as zeroes.
    WriteZeroes,
    /// Dataset Management, a hint to the drive. Blocks that the drive leaves allocated, such as partial units
    /// at the ends, keep their data; DLFEAT does not cover these blocks.
    DatasetManagement,
    /// Not supported.
    No,
}

/// Maximum number of Write Zeroes commands for one deallocation. A trim of 7.68 TB in blocks of 512 bytes
/// would need 229,000 commands, each possibly a real write. Dataset Management needs 4.
const ZEROES_OF_DEALLOCATION_MAX: u32 = 64;

/// Limits of one Copy command; both are 0 if the drive does not support Copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct CopyLimits {
    /// Maximum number of blocks of a source range.
    pub(crate) range_blocks: u32,
    /// Maximum number of blocks of all source ranges together; their descriptors fit one list page.
    pub(crate) blocks: u32,
}

impl CopyLimits {
    fn new(mssrl: u16, mcl: u32, msrc_z: u8) -> CopyLimits {
        let range_blocks = u32::from(mssrl).min(mcl);
        let ranges = (u32::from(msrc_z) + 1).min(COPY_RANGES_MAX);
        CopyLimits { range_blocks, blocks: mcl.min(range_blocks * ranges) }
    }
}

/// Limits and optional commands of one namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rules {
    pub(crate) nsid: u32,
    /// Base-2 logarithm of the block size in bytes (LBADS).
    pub(crate) shift: u32,
    /// Maximum number of blocks of a Read, Write or Compare (MDTS, [`TRANSFER_BYTES_MAX`], [`NLB_MAX`]).
    pub(crate) transfer_blocks: u32,
    /// Boundary in blocks that a Read, Write or Compare does not cross (NOIOB, or a quirk's stripe); 0: none.
    pub(crate) boundary_blocks: u32,
    /// Maximum number of blocks of one Write Zeroes (the smallest of WZSL, WZDSL and [`NLB_MAX`]).
    pub(crate) zeroing_blocks: u32,
    /// Maximum number of blocks of one Dataset Management (DMRSL, DMSL).
    pub(crate) dsm_blocks: u32,
    pub(crate) zeroing: Zeroing,
    pub(crate) deallocating: Deallocating,
    /// ONCS has Dataset Management.
    pub(crate) has_dsm: bool,
    /// The drive refused Write Zeroes or DEAC although Identify data reports support.
    pub(crate) has_fallen_back: bool,
    /// VWC reports a volatile write cache. Without one, a flush needs no command.
    pub(crate) has_volatile_cache: bool,
    /// ONCS has Compare, and the drive has not refused it.
    pub(crate) has_compare: bool,
    /// Maximum number of blocks of one Verify (VSL); 0 if Verify is not supported.
    pub(crate) verify_blocks: u32,
    pub(crate) copy_limits: CopyLimits,
}

impl Rules {
    /// Creates the rules of a namespace. `mpsmin` is CAP.MPSMIN: MDTS, VSL, WZSL and WZDSL are exponents of
    /// 2, in units of `2^(12 + mpsmin)` bytes.
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
            copy_limits: if oncs.copy() && controller.cdfs.get() & 1 != 0 {
                namespace.copy_limits
            } else {
                CopyLimits::default()
            },
        }
    }

    /// Returns the optional operations that the drive executes.
    pub(crate) fn abilities(&self) -> Abilities {
        let (verify, copy) = (self.verify_blocks > 0, self.copy_limits.blocks > 0);
        Abilities { compare: self.has_compare, verify, copy, reads_in_place: false }
    }

    /// Disables Compare, Verify or Copy after the drive refused it with Invalid Opcode. Others: no effect.
    pub(crate) fn disable(&mut self, task: Task) {
        match task {
            Task::Op(Op::Compare) => self.has_compare = false,
            Task::Op(Op::Verify) => self.verify_blocks = 0,
            Task::Copy { .. } => self.copy_limits = CopyLimits::default(),
            Task::Op(Op::Read | Op::Write { .. } | Op::Flush | Op::WriteZeroes { .. } | Op::Deallocate)
            | Task::DeallocateHint
            | Task::CompareAndWrite { .. } => {}
        }
    }

    /// Returns true if a deallocation of `blocks` may use Write Zeroes: at most `ZEROES_OF_DEALLOCATION_MAX`
    /// commands suffice, or the drive has no Dataset Management.
    pub(crate) fn may_deallocate_by_zeroes(&self, blocks: u32) -> bool {
        !self.has_dsm || blocks <= self.zeroing_blocks.saturating_mul(ZEROES_OF_DEALLOCATION_MAX)
    }

    /// Selects the next method, if any, after the drive refused Write Zeroes or DEAC with `code`: Invalid
    /// Opcode or Invalid Field. True: submit again, with that method or to fail as not supported. Some drives
    /// refuse commands that they report (SK hynix SC300: Linux's quirk for 1c5c:1504).
    pub(crate) fn fall_back(&mut self, task: Task, code: Status) -> bool {
        if ![Status::INVALID_OPCODE, Status::INVALID_FIELD].contains(&code) {
            return false;
        }
        let deallocates = match task {
            Task::Op(Op::Deallocate) => true,
            Task::Op(Op::WriteZeroes { deallocate, .. }) => deallocate,
            Task::Op(Op::Read | Op::Write { .. } | Op::Flush | Op::Compare | Op::Verify)
            | Task::DeallocateHint
            | Task::CompareAndWrite { .. }
            | Task::Copy { .. } => return false,
        };
        let is_deac = deallocates && self.deallocating == Deallocating::WriteZeroes;
        let is_zeroes = task != Task::Op(Op::Deallocate) && self.zeroing == Zeroing::Command;
        if is_deac {
            self.deallocating = if self.has_dsm { Deallocating::DatasetManagement } else { Deallocating::No };
        }
        // Invalid Field may be about DEAC only; Invalid Opcode is about the command.
        if is_zeroes && (!is_deac || code == Status::INVALID_OPCODE) {
            self.zeroing = Zeroing::Writes;
        }
        self.has_fallen_back |= is_deac || is_zeroes;
        // True also for a command that was in flight when another command was refused.
        self.has_fallen_back
    }

    /// Returns true if one command can read or write the whole range; false for an empty range.
    #[inline]
    pub(crate) fn is_one_piece(&self, range: BlockRange) -> bool {
        range.blocks != 0 && self.data_blocks(range) == range.blocks
    }

    /// Returns the number of blocks of the next command for the remaining range `left`.
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
        // `room` fits 32 bits: it is at most `boundary_blocks`.
        let room = boundary - left.lba % boundary;
        blocks.min(u32::try_from(room).unwrap_or(blocks))
    }
}

/// Returns the maximum blocks of a Dataset Management command with one range (DMRSL, DMSL; 0: no limit).
fn dsm_blocks(nvm: &IdentifyControllerNvm) -> u32 {
    let limit = |blocks: u64| if blocks == 0 { u32::MAX } else { u32::try_from(blocks).unwrap_or(u32::MAX) };
    limit(nvm.dmrsl.get().into()).min(limit(nvm.dmsl.get()))
}

/// A namespace whose format or size is not supported.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("namespace {nsid}: {field} is {value}: {allowed}")]
pub struct UnfitNamespace {
    /// NSID.
    pub nsid: u32,
    /// Field of Identify Namespace.
    pub field: &'static str,
    /// Value of the field.
    pub value: u64,
    /// Requirement, as text for the log.
    pub allowed: &'static str,
}

/// A namespace of a drive, from Identify Namespace.
#[derive(Debug)]
pub struct Namespace {
    /// NSID.
    pub nsid: u32,
    /// NGUID; zeroes if the namespace has none.
    pub nguid: [u8; 16],
    /// EUI64; zeroes if the namespace has none.
    pub eui64: [u8; 8],
    /// Base-2 logarithm of the block size in bytes (LBADS).
    pub(crate) shift: u32,
    blocks: AtomicU64,
    /// NOIOB in blocks; 0 without a boundary.
    boundary_blocks: u32,
    /// DLFEAT bit 3: Write Zeroes supports DEAC.
    has_deac: bool,
    /// Maximum blocks that a write changes atomically (NAWUN or AWUN plus 1; 1 with atomic boundaries).
    atomic_blocks: u32,
    copy_limits: CopyLimits,
    /// NSATTR bit 0: the namespace is write protected.
    is_read_only: bool,
}

impl Namespace {
    /// Checks Identify Namespace and copies the values that the driver needs. Fails for a format with
    /// metadata, a block size other than 512 or 4096 bytes, or an invalid size.
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
        // NABSN: a write that crosses an atomic boundary is not atomic.
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
            copy_limits: CopyLimits::new(id.mssrl.get(), id.mcl.get(), id.msrc_z),
            is_read_only: id.nsattr & 1 != 0,
        })
    }

    /// Returns true if NSID, block size and identifiers match. The size may differ.
    pub(crate) fn is_same(&self, other: &Namespace) -> bool {
        self.nsid == other.nsid
            && self.shift == other.shift
            && self.nguid == other.nguid
            && self.eui64 == other.eui64
    }

    pub(crate) fn set_blocks(&self, blocks: u64) {
        self.blocks.store(blocks, Ordering::Relaxed);
    }

    /// Returns the current size in blocks (NSZE).
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.blocks.load(Ordering::Relaxed)
    }

    pub(crate) fn geometry(&self, rules: &Rules) -> Geometry {
        Geometry {
            block_bytes: 1 << self.shift,
            block_count: self.blocks(),
            is_read_only: self.is_read_only,
            has_volatile_cache: rules.has_volatile_cache,
            can_deallocate: rules.deallocating != Deallocating::No,
            // A write may be split at a boundary or at the transfer limit.
            atomic_blocks: match rules.boundary_blocks {
                0 => self.atomic_blocks.min(rules.transfer_blocks),
                _ => 1,
            },
            can_compare_and_write: !self.is_read_only,
        }
    }
}

/// Returns true for a transient failure: DNR is clear, and the status reports an abort, an interruption, a
/// transfer or path error, or a namespace that is not ready.
pub(crate) fn is_transient(status: Status) -> bool {
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

pub(crate) fn disk_error(status: Status) -> DiskError {
    match status.code() {
        // The namespace was deleted or detached, so a retry fails as well.
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
        assert!(is_transient(Status::ABORTED_BY_REQUEST) && is_transient(Status::NAMESPACE_NOT_READY));
        assert!(!is_transient(Status::UNRECOVERED_READ_ERROR) && !is_transient(Status::INVALID_FIELD));
        let never = Status::from_bits(Status::ABORTED_BY_REQUEST.bits() | 1 << 14);
        assert!(!is_transient(never));
    }
}
