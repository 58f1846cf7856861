//! PCIe only: doorbells, creation and deletion of I/O queues, Doorbell Buffer Config (NVMe over PCIe
//! Transport 1.0 section 3; Base 2.0 sections 5.4 to 5.8).

use bitfield_struct::bitfield;

use crate::opcode::AdminOpcode;
use crate::register::DOORBELLS;
use crate::sqe::Sqe;

/// Returns the offset in bytes of the tail doorbell of submission queue `qid`; `dstrd` is CAP.DSTRD.
#[must_use]
pub const fn sq_tail_doorbell(qid: u16, dstrd: u8) -> u64 {
    doorbell(2 * qid as u64, dstrd)
}

/// Returns the offset in bytes of the head doorbell of completion queue `qid`; `dstrd` is CAP.DSTRD.
#[must_use]
pub const fn cq_head_doorbell(qid: u16, dstrd: u8) -> u64 {
    doorbell(2 * qid as u64 + 1, dstrd)
}

const fn doorbell(index: u64, dstrd: u8) -> u64 {
    // DSTRD has 4 bits: higher bits of the argument are ignored.
    DOORBELLS as u64 + (index << (2 + (dstrd & 0xf)))
}

/// Dword 10 of Create and Delete I/O Queue.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct QueueCdw10 {
    /// QID: Queue Identifier; not 0.
    pub qid: u16,
    /// QSIZE: Queue Size in entries, zero-based; 0 in Delete commands.
    pub qsize_z: u16,
}

/// Dword 11 of Create I/O Completion Queue.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct CreateCqCdw11 {
    /// PC: Physically Contiguous.
    pub contiguous: bool,
    /// IEN: Interrupts Enabled.
    pub interrupts: bool,
    #[bits(30)]
    __: u32,
}

/// Dword 11 of Create I/O Submission Queue.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct CreateSqCdw11 {
    /// PC: Physically Contiguous.
    pub contiguous: bool,
    #[bits(15)]
    __: u16,
    /// CQID: Completion Queue Identifier.
    pub cqid: u16,
}

wire_bits!(QueueCdw10 => U32, CreateCqCdw11 => U32, CreateSqCdw11 => U32);

view! {
    /// Create or Delete I/O Submission or Completion Queue (Base 2.0 sections 5.4 to 5.7).
    pub struct QueueCommand(sqe) {
        /// QID: Queue Identifier.
        qid: u16 = QueueCdw10::from(sqe.cdw10).qid(),
        /// Number of queue entries: QSIZE plus one. Valid only in Create commands.
        entries: u32 = u32::from(QueueCdw10::from(sqe.cdw10).qsize_z()) + 1,
        /// Dword 11; valid only in Create I/O Completion Queue.
        cq: CreateCqCdw11 = sqe.cdw11.into(),
        /// Dword 11; valid only in Create I/O Submission Queue.
        sq: CreateSqCdw11 = sqe.cdw11.into(),
    }
}

/// Builders for hosts.
impl Sqe {
    /// Builds Create I/O Completion Queue with PC set and IEN clear. `entries_z` is zero-based; `address` is
    /// the DMA address of the contiguous queue.
    #[must_use]
    pub fn create_io_cq(cid: u16, qid: u16, entries_z: u16, address: u64) -> Self {
        let mut sqe = Self::new(AdminOpcode::CREATE_IO_CQ.0, cid, 0).with_prp(address, 0);
        sqe.cdw10 = QueueCdw10::new().with_qid(qid).with_qsize_z(entries_z).into();
        sqe.cdw11 = CreateCqCdw11::new().with_contiguous(true).into();
        sqe
    }

    /// Builds Create I/O Submission Queue with PC set. `entries_z` is zero-based; `address` is the DMA
    /// address of the contiguous queue.
    #[must_use]
    pub fn create_io_sq(cid: u16, qid: u16, entries_z: u16, address: u64, cqid: u16) -> Self {
        let mut sqe = Self::new(AdminOpcode::CREATE_IO_SQ.0, cid, 0).with_prp(address, 0);
        sqe.cdw10 = QueueCdw10::new().with_qid(qid).with_qsize_z(entries_z).into();
        sqe.cdw11 = CreateSqCdw11::new().with_contiguous(true).with_cqid(cqid).into();
        sqe
    }

    /// Builds Delete I/O Submission Queue; the controller aborts the outstanding commands of the queue.
    #[must_use]
    pub fn delete_io_sq(cid: u16, qid: u16) -> Self {
        let mut sqe = Self::new(AdminOpcode::DELETE_IO_SQ.0, cid, 0).with_prp(0, 0);
        sqe.cdw10 = QueueCdw10::new().with_qid(qid).into();
        sqe
    }

    /// Builds Delete I/O Completion Queue; the host deletes the submission queues that use it first.
    #[must_use]
    pub fn delete_io_cq(cid: u16, qid: u16) -> Self {
        let mut sqe = Self::new(AdminOpcode::DELETE_IO_CQ.0, cid, 0).with_prp(0, 0);
        sqe.cdw10 = QueueCdw10::new().with_qid(qid).into();
        sqe
    }

    /// Builds Doorbell Buffer Config with the DMA addresses of the Shadow Doorbell and EventIdx buffers, one
    /// memory page each (Base 2.0 section 5.8).
    #[must_use]
    pub fn doorbell_buffer_config(cid: u16, shadow: u64, event_index: u64) -> Self {
        Self::new(AdminOpcode::DOORBELL_BUFFER_CONFIG.0, cid, 0).with_prp(shadow, event_index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::IntoBytes;

    #[test]
    fn doorbells_lie_behind_0x1000_in_pairs() {
        assert_eq!((sq_tail_doorbell(0, 0), cq_head_doorbell(0, 0)), (0x1000, 0x1004));
        assert_eq!((sq_tail_doorbell(3, 0), cq_head_doorbell(3, 0)), (0x1018, 0x101c));
        assert_eq!((sq_tail_doorbell(1, 4), cq_head_doorbell(1, 4)), (0x1080, 0x10c0));
        assert_eq!(cq_head_doorbell(u16::MAX, 15), 0x1000 + (0x1_ffff << 17));
    }

    #[test]
    fn queues_are_made_with_these_bytes() {
        let sqe = Sqe::create_io_cq(7, 3, 255, 0x1000_2000);
        assert_eq!(sqe.as_bytes()[..8], [5, 0, 7, 0, 0, 0, 0, 0]);
        assert_eq!(sqe.as_bytes()[24..40], [0, 0x20, 0, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(sqe.as_bytes()[40..48], [3, 0, 255, 0, 1, 0, 0, 0]);
        let command = QueueCommand::new(&sqe);
        assert_eq!((command.qid(), command.entries()), (3, 256));
        assert!(command.cq().contiguous() && !command.cq().interrupts());
        let sqe = Sqe::create_io_sq(8, 3, 127, 0x1000_0000, 2);
        assert_eq!(sqe.as_bytes()[..4], [1, 0, 8, 0]);
        assert_eq!(sqe.as_bytes()[40..48], [3, 0, 127, 0, 1, 0, 2, 0]);
        assert_eq!(QueueCommand::new(&sqe).sq().cqid(), 2);
        assert_eq!(Sqe::delete_io_sq(1, 9).as_bytes()[..4], [0, 0, 1, 0]);
        assert_eq!(Sqe::delete_io_cq(1, 9).as_bytes()[40..44], [9, 0, 0, 0]);
        let sqe = Sqe::doorbell_buffer_config(1, 0x3000, 0x4000);
        assert_eq!((sqe.as_bytes()[0], sqe.sgl.prp()), (0x7c, (0x3000, 0x4000)));
    }
}
