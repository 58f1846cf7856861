//! The completion queue entry (Base 2.0 section 3.3.3.2).

use zerocopy::little_endian::{U16, U64};

use crate::status::Status;

/// Size of a completion queue entry in bytes; CC.IOCQES is 4 (Base 2.0 section 3.3.3.2).
pub const CQE_BYTES: usize = 16;

/// SQHD in completions of a queue without SQ flow control (Base 2.0 section 3.3.2.2, "SQ Flow Control").
pub const SQ_HEAD_NO_FLOW_CONTROL: u16 = 0xffff;

wire! {
    /// A completion queue entry (Base 2.0 figure "Common Completion Queue Entry Layout").
    pub struct Cqe[CQE_BYTES] {
        /// Dwords 0 and 1: command-specific result.
        result @ 0: U64,
        /// SQHD: SQ Head Pointer, index of the next entry that the controller fetches.
        sq_head @ 8: U16,
        /// SQID: SQ Identifier; reserved over Fabrics.
        sq_id @ 10: U16,
        /// CID: Command Identifier of the completed command.
        cid @ 12: U16,
        /// Phase Tag in bit 0 (always 0 over Fabrics), Status Field in bits 15:1.
        status @ 14: U16,
    }
}

impl Cqe {
    /// Creates a completion with phase tag, result, SQHD and SQID 0.
    #[must_use]
    pub fn new(cid: u16, status: Status) -> Self {
        Self { cid: U16::new(cid), status: U16::new(status.to_wire(false)), ..Self::default() }
    }

    /// Sets dword 0 to `result` and dword 1 to zero.
    #[must_use]
    pub fn with_result(self, result: u32) -> Self {
        self.with_result_u64(u64::from(result))
    }

    /// Sets dwords 0 and 1, for commands with a 64-bit result (Property Get).
    #[must_use]
    pub fn with_result_u64(mut self, result: u64) -> Self {
        self.result = U64::new(result);
        self
    }

    /// Returns the Status Field, bits 15:1 of bytes 14 and 15.
    #[must_use]
    pub fn status(&self) -> Status {
        Status::from_wire(self.status.get())
    }

    /// Returns the Phase Tag, bit 0 of bytes 14 and 15.
    #[must_use]
    pub fn phase(&self) -> bool {
        self.status.get() & 1 == 1
    }

    /// Sets Status Field and Phase Tag, which share bytes 14 and 15.
    pub fn set_status(&mut self, status: Status, phase: bool) {
        self.status = U16::new(status.to_wire(phase));
    }

    /// Returns CID: Command Identifier of the completed command.
    #[must_use]
    pub fn cid(&self) -> u16 {
        self.cid.get()
    }

    /// Returns SQHD: SQ Head Pointer; [`SQ_HEAD_NO_FLOW_CONTROL`] without SQ flow control.
    #[must_use]
    pub fn sq_head(&self) -> u16 {
        self.sq_head.get()
    }

    /// Returns dword 0, for commands with a 32-bit result.
    #[must_use]
    pub fn result_u32(&self) -> u32 {
        let [a, b, c, d, ..] = self.result.to_bytes();
        u32::from_le_bytes([a, b, c, d])
    }

    /// Returns dwords 0 and 1, for commands with a 64-bit result.
    #[must_use]
    pub fn result_u64(&self) -> u64 {
        self.result.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::{FromBytes, IntoBytes};

    #[test]
    fn a_completion_has_its_status_above_the_phase_tag() {
        let mut cqe = Cqe::new(0x1234, Status::INVALID_FIELD.dnr()).with_result(0xa0b0_c0d0);
        cqe.sq_head = U16::new(0x0506);
        let bytes = [0xd0, 0xc0, 0xb0, 0xa0, 0, 0, 0, 0, 6, 5, 0, 0, 0x34, 0x12, 0x04, 0x80];
        assert_eq!(cqe.as_bytes(), bytes);
        let back = Cqe::read_from_bytes(&bytes).unwrap();
        assert_eq!((back.status(), back.phase()), (Status::INVALID_FIELD.dnr(), false));
        assert_eq!((back.cid(), back.result_u32(), back.sq_head()), (0x1234, 0xa0b0_c0d0, 0x0506));
        cqe.set_status(Status::SUCCESS, true);
        assert_eq!((cqe.status.get(), cqe.phase(), cqe.status()), (1, true, Status::SUCCESS));
    }
}
