//! Get References (`docs/extensions.md`): where the pages of a range are in memory, for optimistic reads.

use nvme_spec::optimistic::{
    GET_REFERENCES, PAGE_ENTRY_BYTES, PageEntry, PageReference, REFERENCE_PAGES_MAX, page_checksum,
};
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;
use spindle_nvme_transport::{RequestId, Transport};
use spindle_reactor::mem::{FRAME_BYTES, Reference};
use spindle_target_disk::{BlockRange, DiskChannel, DiskError};
use zerocopy::IntoBytes;

use super::request::{IoCommand, Request};
use super::{IoRole, Qpair, status_of};
use crate::env::Env;
use crate::refusal::{Refusal, field};

/// Checks that the host of a Get References has attached. Other commands pass.
///
/// # Errors
/// Command Sequence Error; Invalid Opcode where the target has no optimistic reads.
#[inline]
pub(super) fn check_attached(role: &IoRole, env: &Env, sqe: &Sqe) -> Result<(), Refusal> {
    if sqe.io_opcode() != GET_REFERENCES || role.shared.has_attached() {
        return Ok(());
    }
    let has_optimistic = env.registry.optimistic().is_some();
    let status = if has_optimistic { Status::COMMAND_SEQUENCE_ERROR } else { Status::INVALID_OPCODE };
    Err(Refusal::at(status, field::OPCODE))
}

/// Length of the data of a Get References for `range`, which is on the disk.
///
/// # Errors
/// Invalid Field in Command: the range does not begin and end with a page, or has more than
/// [`REFERENCE_PAGES_MAX`] pages.
pub(super) fn data_bytes(range: BlockRange, block_shift: u32) -> Result<u32, Refusal> {
    let page = u64::from(FRAME_BYTES);
    if !(range.lba << block_shift).is_multiple_of(page) {
        return Err(Refusal::invalid(field::CDW10));
    }
    let bytes = u64::from(range.blocks) << block_shift;
    let pages = u32::try_from(bytes / page).unwrap_or(u32::MAX);
    if !bytes.is_multiple_of(page) || pages > REFERENCE_PAGES_MAX {
        return Err(Refusal::invalid(field::CDW12));
    }
    Ok(pages * PAGE_ENTRY_BYTES)
}

impl<T: Transport> Qpair<T> {
    /// Fills the buffer of the request with the entries of its pages, and completes it.
    #[cold]
    pub(super) fn step_references(&mut self, env: &mut Env, slot: RequestId, io: &IoCommand) {
        let Some(Request { buf, .. }) = self.requests.get_mut(slot) else { return };
        // Without a buffer the disk was removed while the command waited.
        let (Some(disk), Some(mut data)) = (env.disk(io.disk), buf.take()) else {
            return self.finish(slot, status_of(DiskError::Gone), 0, None);
        };
        let first = io.range.lba << io.block_shift;
        for at in 0..io.data_bytes / PAGE_ENTRY_BYTES {
            let entry = page_entry(disk, first + u64::from(at) * u64::from(FRAME_BYTES));
            data.copy_in((at * PAGE_ENTRY_BYTES) as usize, entry.as_bytes());
        }
        self.finish(slot, Status::SUCCESS, 0, Some(data));
    }
}

/// Entry of the page at `offset`. The buffer pins the frame, so that its content does not change between the
/// checksum and the reference, which is taken last: a page that has changed since has none.
fn page_entry(disk: &dyn DiskChannel, offset: u64) -> PageEntry {
    let entry = || {
        let page = disk.page_in_memory(offset)?;
        page.page_reference()?; // spares the checksum of a page without a seal
        let crc = page_checksum(page.as_slice()?);
        let (Reference { frame, generation }, epoch) = page.page_reference()?;
        Some(PageEntry::new(PageReference { frame, generation, epoch }, crc))
    };
    entry().unwrap_or_default()
}
