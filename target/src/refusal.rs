//! [`Refusal`]: how a command fails, and the field that is to blame for it, for the error log.

use nvme_spec::status::Status;

/// A command that fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refusal {
    /// The answer.
    pub status: Status,
    /// Byte of the submission queue entry at which the field begins.
    pub field: Option<u16>,
}

/// Bytes of the submission queue entry at which fields begin, for [`Refusal::field`].
pub(crate) mod field {
    pub(crate) const OPCODE: u16 = 0;
    /// FUSE, PSDT.
    pub(crate) const FLAGS: u16 = 1;
    pub(crate) const NSID: u16 = 4;
    /// Of a Fabrics command, in the place of NSID.
    pub(crate) const FCTYPE: u16 = NSID;
    /// Of the SGL descriptor.
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
    /// This status, blaming this field.
    #[must_use]
    pub const fn of(status: Status, field: Option<u16>) -> Refusal {
        Refusal { status, field }
    }

    /// With the field at byte `field`; permanent: the same command will be refused again.
    #[must_use]
    pub const fn at(status: Status, field: u16) -> Refusal {
        Refusal { status: status.dnr(), field: Some(field) }
    }

    /// Invalid Field in Command, for good.
    #[must_use]
    pub const fn invalid(field: u16) -> Refusal {
        Refusal::at(Status::INVALID_FIELD, field)
    }

    /// Invalid Namespace or Format, for good.
    #[must_use]
    pub const fn namespace() -> Refusal {
        Refusal::at(Status::INVALID_NAMESPACE_OR_FORMAT, field::NSID)
    }
}
