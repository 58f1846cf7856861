//! [`Refusal`]: the status of a command that fails, and the field at fault for the error log.

use nvme_spec::status::Status;

/// Status and field at fault of a failed command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refusal {
    /// Status of the completion, with or without DNR.
    pub status: Status,
    /// Byte offset of the field at fault in the submission queue entry; `None`: no field is at fault.
    pub field: Option<u16>,
}

/// Byte offsets of fields in the submission queue entry, for [`Refusal::field`].
pub(crate) mod field {
    pub(crate) const OPCODE: u16 = 0;
    /// Byte with FUSE and PSDT.
    pub(crate) const FLAGS: u16 = 1;
    pub(crate) const NSID: u16 = 4;
    /// Fabrics commands have FCTYPE at the offset of NSID.
    pub(crate) const FCTYPE: u16 = NSID;
    /// Length field of the SGL descriptor.
    pub(crate) const SGL_LENGTH: u16 = 32;
    pub(crate) const SGL_IDENTIFIER: u16 = 39;
    pub(crate) const CDW10: u16 = 40;
    /// CNTID of Identify, NUMDL of Get Log Page.
    pub(crate) const CDW10_HIGH: u16 = 42;
    pub(crate) const CDW11: u16 = 44;
    pub(crate) const PROPERTY_OFFSET: u16 = CDW11;
    /// CSI of Identify.
    pub(crate) const CDW11_TOP: u16 = 47;
    pub(crate) const CDW12: u16 = 48;
    pub(crate) const PROPERTY_VALUE: u16 = CDW12;
    pub(crate) const CDW14: u16 = 56;
}

impl Refusal {
    /// Creates a refusal with `status` unchanged: with DNR only if `status` has DNR.
    #[must_use]
    pub const fn of(status: Status, field: Option<u16>) -> Refusal {
        Refusal { status, field }
    }

    /// Creates a refusal with `status` and DNR (do not retry), and the field at byte `field`.
    #[must_use]
    pub const fn at(status: Status, field: u16) -> Refusal {
        Refusal { status: status.dnr(), field: Some(field) }
    }

    /// Invalid Field in Command, with DNR.
    #[must_use]
    pub const fn invalid(field: u16) -> Refusal {
        Refusal::at(Status::INVALID_FIELD, field)
    }

    /// Invalid Namespace or Format at NSID, with DNR.
    #[must_use]
    pub const fn namespace() -> Refusal {
        Refusal::at(Status::INVALID_NAMESPACE_OR_FORMAT, field::NSID)
    }
}
