//! The Status Field of a completion (Base 2.0 section 3.3.3.2.1): SCT, SC, CRD, M and DNR.

use core::fmt;

use bitfield_struct::bitfield;

/// The 15 bits of the status field, without the phase tag: SC 7:0, SCT 10:8, CRD 12:11, M 13, DNR 14.
///
/// Equality includes CRD, M and DNR; compare [`Status::code`] to ignore them. Each code 180h to 185h has one
/// meaning in a completion of a Fabrics command and another in a completion of an I/O command. Codes of
/// commands that Spindle neither sends nor serves (firmware, namespace management, zones) have no constant.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[repr(transparent)]
pub struct Status(u16);

/// Bits of the Status Field (Base 2.0 figure "Completion Queue Entry: Status Field").
#[bitfield(u16)]
#[derive(PartialEq, Eq)]
struct StatusBits {
    /// SC: Status Code.
    #[bits(8)]
    sc: u8,
    /// SCT: Status Code Type; see [`StatusType`].
    #[bits(3)]
    sct: u8,
    /// CRD: Command Retry Delay; 1 to 3 select CRDT1 to CRDT3 of Identify Controller, 0 is no delay.
    #[bits(2)]
    crd: u8,
    /// M: More; the Error Information log page has an entry for the command.
    more: bool,
    /// DNR: Do Not Retry; the same command is expected to fail again.
    dnr: bool,
    #[bits(1)]
    __: u8,
}

open_enum! {
    /// SCT: Status Code Type (Base 2.0 figure "Status Code Type Values").
    pub struct StatusType: u8 {
        /// Media and Data Integrity Errors.
        MEDIA = 2,
        /// Path Related Status.
        PATH = 3,
    }
}

/// Declares status codes as constants of [`Status`], each with its `Display` text.
macro_rules! codes {
    ($($(#[$meta:meta])* $name:ident = $value:expr, $text:literal;)*) => {
        impl Status {
            $(#[doc = $text] $(#[$meta])* pub const $name: Self = Self($value);)*

            /// Returns the `Display` text of SCT and SC; `None` if no constant has this code.
            #[must_use]
            pub const fn text(self) -> Option<&'static str> {
                match self.code() {
                    $(Self::$name => Some($text),)*
                    _ => None,
                }
            }

            /// Returns the name of the constant with this SCT and SC; `None` if there is none.
            #[must_use]
            pub const fn name(self) -> Option<&'static str> {
                match self.code() {
                    $(Self::$name => Some(stringify!($name)),)*
                    _ => None,
                }
            }
        }
    };
}

codes! {
    // Generic command status, SCT 0 (Base 2.0 figure "Status Code - Generic Command Status Values").
    SUCCESS = 0x000, "success";
    INVALID_OPCODE = 0x001, "invalid opcode";
    INVALID_FIELD = 0x002, "invalid field in command";
    /// The CID is already in use.
    COMMAND_ID_CONFLICT = 0x003, "command id conflict";
    DATA_TRANSFER_ERROR = 0x004, "data transfer error";
    ABORTED_POWER_LOSS = 0x005, "aborted: power loss notification";
    INTERNAL_ERROR = 0x006, "internal error";
    ABORTED_BY_REQUEST = 0x007, "aborted by request";
    ABORTED_SQ_DELETION = 0x008, "aborted: submission queue deleted";
    ABORTED_FAILED_FUSED = 0x009, "aborted: other fused command failed";
    ABORTED_MISSING_FUSED = 0x00a, "aborted: other fused command missing";
    INVALID_NAMESPACE_OR_FORMAT = 0x00b, "invalid namespace or format";
    COMMAND_SEQUENCE_ERROR = 0x00c, "command sequence error";
    INVALID_SGL_SEGMENT_DESCRIPTOR = 0x00d, "invalid SGL segment descriptor";
    INVALID_SGL_DESCRIPTOR_COUNT = 0x00e, "invalid number of SGL descriptors";
    DATA_SGL_LENGTH_INVALID = 0x00f, "data SGL length invalid";
    METADATA_SGL_LENGTH_INVALID = 0x010, "metadata SGL length invalid";
    SGL_DESCRIPTOR_TYPE_INVALID = 0x011, "SGL descriptor type invalid";
    INVALID_USE_OF_CMB = 0x012, "invalid use of controller memory buffer";
    PRP_OFFSET_INVALID = 0x013, "PRP offset invalid";
    ATOMIC_WRITE_UNIT_EXCEEDED = 0x014, "atomic write unit exceeded";
    OPERATION_DENIED = 0x015, "operation denied";
    SGL_OFFSET_INVALID = 0x016, "SGL offset invalid";
    HOST_ID_INCONSISTENT_FORMAT = 0x018, "host identifier inconsistent format";
    KEEP_ALIVE_TIMER_EXPIRED = 0x019, "keep alive timer expired";
    KEEP_ALIVE_TIMEOUT_INVALID = 0x01a, "keep alive timeout invalid";
    ABORTED_PREEMPT = 0x01b, "aborted: preempt and abort";
    SANITIZE_FAILED = 0x01c, "sanitize failed";
    SANITIZE_IN_PROGRESS = 0x01d, "sanitize in progress";
    SGL_DATA_BLOCK_GRANULARITY_INVALID = 0x01e, "SGL data block granularity invalid";
    COMMAND_NOT_SUPPORTED_FOR_QUEUE_IN_CMB = 0x01f, "command not supported for queue in CMB";
    NAMESPACE_IS_WRITE_PROTECTED = 0x020, "namespace is write protected";
    /// The host may retry the command.
    COMMAND_INTERRUPTED = 0x021, "command interrupted";
    /// The host may retry the command, for example after a data digest error.
    COMMAND_TRANSIENT_TRANSPORT_ERROR = 0x022, "transient transport error";
    COMMAND_PROHIBITED_BY_LOCKDOWN = 0x023, "command prohibited by lockdown";
    ADMIN_COMMAND_MEDIA_NOT_READY = 0x024, "admin command media not ready";
    INVALID_KEY_TAG = 0x025, "invalid key tag";
    HOST_DISPERSED_NAMESPACE_SUPPORT_NOT_ENABLED = 0x026,
        "host dispersed namespace support not enabled";
    HOST_ID_NOT_INITIALIZED = 0x027, "host identifier not initialized";
    INCORRECT_KEY = 0x028, "incorrect key";
    FDP_DISABLED = 0x029, "FDP disabled";
    INVALID_PLACEMENT_HANDLE_LIST = 0x02a, "invalid placement handle list";
    LBA_OUT_OF_RANGE = 0x080, "LBA out of range";
    CAPACITY_EXCEEDED = 0x081, "capacity exceeded";
    NAMESPACE_NOT_READY = 0x082, "namespace not ready";
    RESERVATION_CONFLICT = 0x083, "reservation conflict";
    FORMAT_IN_PROGRESS = 0x084, "format in progress";
    // Command specific status, SCT 1, of the admin commands (Base 2.0 figure "Status Code - Command
    // Specific Status Values").
    COMPLETION_QUEUE_INVALID = 0x100, "completion queue invalid";
    INVALID_QUEUE_ID = 0x101, "invalid queue identifier";
    INVALID_QUEUE_SIZE = 0x102, "invalid queue size";
    ABORT_LIMIT_EXCEEDED = 0x103, "abort command limit exceeded";
    ASYNC_EVENT_LIMIT_EXCEEDED = 0x105, "asynchronous event request limit exceeded";
    INVALID_INTERRUPT_VECTOR = 0x108, "invalid interrupt vector";
    INVALID_LOG_PAGE = 0x109, "invalid log page";
    INVALID_FORMAT = 0x10a, "invalid format";
    INVALID_QUEUE_DELETION = 0x10c, "invalid queue deletion";
    FEATURE_NOT_SAVEABLE = 0x10d, "feature not saveable";
    FEATURE_NOT_CHANGEABLE = 0x10e, "feature not changeable";
    FEATURE_NOT_NAMESPACE_SPECIFIC = 0x10f, "feature not namespace specific";
    NAMESPACE_INSUFFICIENT_CAPACITY = 0x115, "namespace insufficient capacity";
    IO_COMMAND_SET_NOT_SUPPORTED = 0x129, "I/O command set not supported";
    IO_COMMAND_SET_NOT_ENABLED = 0x12a, "I/O command set not enabled";
    IO_COMMAND_SET_COMBINATION_REJECTED = 0x12b, "I/O command set combination rejected";
    INVALID_IO_COMMAND_SET = 0x12c, "invalid I/O command set";
    // Command specific status, SCT 1, of Fabrics commands (Base 2.0 section 6). 180h to 185h have another
    // meaning in a completion of an NVM Command Set I/O command; the texts give both meanings.
    /// Connect or Disconnect: RECFMT is not supported.
    CONNECT_INCOMPATIBLE_FORMAT = 0x180,
        "incompatible record format (Connect) or conflicting attributes (I/O)";
    /// Connect: the controller is already associated with a host.
    CONNECT_CONTROLLER_BUSY = 0x181,
        "controller busy (Connect) or invalid protection information (I/O)";
    /// Connect: a parameter is invalid; dword 0 is a [`ConnectInvalid`](crate::fabrics::ConnectInvalid).
    CONNECT_INVALID_PARAMETERS = 0x182,
        "invalid parameters (Connect) or write to read only range (I/O)";
    /// Connect: the subsystem is not available; the host restarts discovery.
    CONNECT_RESTART_DISCOVERY = 0x183,
        "restart discovery (Connect) or command size limit exceeded (Copy, Dataset Management)";
    /// Connect: the subsystem does not allow the host.
    CONNECT_INVALID_HOST = 0x184, "invalid host (Connect) or invalid command identifier (Cancel)";
    /// Disconnect: not valid on this type of queue.
    INVALID_QUEUE_TYPE = 0x185,
        "invalid queue type (Disconnect) or incompatible namespace or format (Copy)";
    /// Get Log Page: the discovery log changed; the host reads it again from offset 0.
    DISCOVERY_RESTART = 0x190, "discovery log changed: restart";
    AUTHENTICATION_REQUIRED = 0x191, "authentication required";
    // Command specific status, SCT 1, of NVM Command Set I/O commands (NVM Command Set 1.1 section 3.1);
    // 180h to 185h are above.
    FAST_COPY_NOT_POSSIBLE = 0x186, "fast copy not possible";
    OVERLAPPING_IO_RANGE = 0x187, "overlapping I/O range";
    NAMESPACE_NOT_REACHABLE = 0x188, "namespace not reachable";
    INSUFFICIENT_RESOURCES = 0x189, "insufficient resources";
    // Media and data integrity errors, SCT 2 (Base 2.0 figure "Status Code - Media and Data Integrity Error
    // Values").
    WRITE_FAULT = 0x280, "write fault";
    UNRECOVERED_READ_ERROR = 0x281, "unrecovered read error";
    GUARD_CHECK_ERROR = 0x282, "guard check error";
    APPLICATION_TAG_CHECK_ERROR = 0x283, "application tag check error";
    REFERENCE_TAG_CHECK_ERROR = 0x284, "reference tag check error";
    COMPARE_FAILURE = 0x285, "compare failure";
    ACCESS_DENIED = 0x286, "access denied";
    DEALLOCATED_OR_UNWRITTEN_BLOCK = 0x287, "deallocated or unwritten logical block";
    STORAGE_TAG_CHECK_ERROR = 0x288, "storage tag check error";
    // Path related status, SCT 3 (Base 2.0 figure "Status Code - Path Related Status Values").
    INTERNAL_PATH_ERROR = 0x300, "internal path error";
    ANA_PERSISTENT_LOSS = 0x301, "asymmetric access: persistent loss";
    ANA_INACCESSIBLE = 0x302, "asymmetric access: inaccessible";
    ANA_TRANSITION = 0x303, "asymmetric access: transition";
    CONTROLLER_PATHING_ERROR = 0x360, "controller pathing error";
    HOST_PATHING_ERROR = 0x370, "host pathing error";
    ABORTED_BY_HOST = 0x371, "aborted by host";
}

/// Meaning of 182h and 183h in a completion of an I/O command (NVM Command Set 1.0 and 1.1 section 3.1).
impl Status {
    /// Attempted Write to Read Only Range.
    pub const WRITE_TO_READ_ONLY_RANGE: Self = Self(0x182);
    /// Command Size Limit Exceeded: the command (Copy, Dataset Management and others) exceeds a limit that
    /// Identify reports.
    pub const COMMAND_SIZE_LIMIT_EXCEEDED: Self = Self(0x183);
}

impl Status {
    /// Converts bytes 14 and 15 of a completion; the phase tag (bit 0) is dropped.
    #[must_use]
    pub const fn from_wire(word: u16) -> Self {
        Self(word >> 1)
    }

    /// Returns bytes 14 and 15 of a completion, with `phase` in bit 0.
    #[must_use]
    pub const fn to_wire(self, phase: bool) -> u16 {
        self.0 << 1 | phase as u16
    }

    /// Creates a status from the 15 bits of the Status Field; bit 15 of `bits` is ignored.
    #[must_use]
    pub const fn from_bits(bits: u16) -> Self {
        Self(bits & 0x7fff)
    }

    /// Returns the 15 bits of the Status Field, without the phase tag.
    #[must_use]
    pub const fn bits(self) -> u16 {
        self.0
    }

    const fn parts(self) -> StatusBits {
        StatusBits::from_bits(self.0)
    }

    /// Returns SCT and SC, with CRD, M and DNR cleared.
    #[must_use]
    pub const fn code(self) -> Self {
        Self(self.0 & 0x7ff)
    }

    /// Returns SCT: Status Code Type.
    #[must_use]
    pub const fn sct(self) -> StatusType {
        StatusType(self.parts().sct())
    }

    /// Sets DNR: the host should not retry the command.
    #[must_use]
    pub const fn dnr(self) -> Self {
        Self(self.parts().with_dnr(true).into_bits())
    }

    /// Returns true if DNR (Do Not Retry) is set.
    #[must_use]
    pub const fn is_dnr(self) -> bool {
        self.parts().dnr()
    }

    /// Sets M: the Error Information log page has an entry for the command.
    #[must_use]
    pub const fn more(self) -> Self {
        Self(self.parts().with_more(true).into_bits())
    }

    /// Clears M: the Error Information log page has no entry for the command.
    #[must_use]
    pub const fn without_more(self) -> Self {
        Self(self.parts().with_more(false).into_bits())
    }

    /// Returns true if M (More) is set.
    #[must_use]
    pub const fn is_more(self) -> bool {
        self.parts().more()
    }

    /// Returns true if SCT and SC are 0; ignores CRD, M and DNR.
    #[must_use]
    pub const fn is_success(self) -> bool {
        self.code().0 == 0
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name)?,
            None => write!(f, "Status({:#x})", self.code().0)?,
        }
        write_flags(*self, f)
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.text() {
            Some(text) => write!(f, "{text} ({:#x})", self.code().0)?,
            None => write!(f, "status {:#x}", self.code().0)?,
        }
        write_flags(*self, f)
    }
}

/// Appends CRD, M and DNR to the output if they are set.
fn write_flags(status: Status, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let parts = status.parts();
    if parts.crd() != 0 {
        write!(f, "+CRD{}", parts.crd())?;
    }
    if parts.more() {
        f.write_str("+M")?;
    }
    if parts.dnr() {
        f.write_str("+DNR")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::format;

    #[test]
    fn the_field_has_its_parts_where_the_figure_has_them() {
        // DNR 1, M 1, CRD 2, SCT 2, SC 85h, phase 1.
        let status = Status::from_wire(0xe50b);
        let parts = status.parts();
        assert_eq!(
            (parts.sc(), parts.sct(), parts.crd(), parts.more(), parts.dnr()),
            (0x85, 2, 2, true, true)
        );
        assert_eq!(status.sct(), StatusType::MEDIA);
        assert_eq!(status.code(), Status::COMPARE_FAILURE);
        assert_eq!(status.to_wire(true), 0xe50b);
    }

    #[test]
    fn dnr_is_the_bit_that_linux_tests() {
        // Linux calls it NVME_SC_DNR (4000h, later NVME_STATUS_DNR) on the status shifted right by one.
        assert_eq!(Status::INVALID_FIELD.dnr().bits(), 0x4002);
        assert!(Status::INVALID_FIELD.dnr().is_dnr() && !Status::INVALID_FIELD.is_dnr());
        assert_eq!(Status::SUCCESS.more().bits(), 0x2000);
        assert!(Status::SUCCESS.more().is_success() && Status::SUCCESS.more().is_more());
        assert_eq!(Status::INVALID_FIELD.dnr().more().without_more(), Status::INVALID_FIELD.dnr());
    }

    #[test]
    fn a_status_prints_its_name_or_its_number() {
        assert_eq!(format!("{:?}", Status::LBA_OUT_OF_RANGE.dnr()), "LBA_OUT_OF_RANGE+DNR");
        assert_eq!(format!("{}", Status::WRITE_FAULT), "write fault (0x280)");
        assert_eq!(format!("{:?}", Status::from_bits(0x7ff)), "Status(0x7ff)");
        assert_eq!(format!("{}", Status::from_bits(0x701)), "status 0x701");
    }

    #[test]
    fn every_word_survives_the_way_through_the_wire() {
        for word in 0..=u16::MAX {
            assert_eq!(Status::from_wire(word).to_wire(word & 1 == 1), word);
        }
    }
}
