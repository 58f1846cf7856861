//! The status field of a completion (Base 2.0 section 3.3.3.2.1): code type, code, and the bits that say
//! what to do next.

use core::fmt;

use bitfield_struct::bitfield;

/// The 15 bits of the status field, without the phase tag: SC 7:0, SCT 10:8, CRD 12:11, M 13, DNR 14.
///
/// Two statuses are equal when all of these are; compare [`Status::code`] to ignore CRD, M and DNR. The
/// codes 180h to 189h mean one thing as a reply to a Fabrics command and another as a reply to an I/O
/// command, hence the pairs of constants.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[repr(transparent)]
pub struct Status(u16);

/// The status field in parts (Base 2.0 figure "Completion Queue Entry: Status Field").
#[bitfield(u16)]
#[derive(PartialEq, Eq)]
pub struct StatusBits {
    /// SC: Status Code.
    #[bits(8)]
    pub sc: u8,
    /// SCT: Status Code Type; see [`StatusType`].
    #[bits(3)]
    pub sct: u8,
    /// CRD: Command Retry Delay, which of the three times of Identify Controller to wait; 0 for none.
    #[bits(2)]
    pub crd: u8,
    /// M: the error log has more about it.
    pub more: bool,
    /// DNR: the same command would fail again.
    pub dnr: bool,
    #[bits(1)]
    __: u8,
}

open_enum! {
    /// SCT: Status Code Type (Base 2.0 figure "Status Code Type Values").
    pub struct StatusType: u8 {
        /// Generic Command Status.
        GENERIC = 0,
        /// Command Specific Status.
        COMMAND_SPECIFIC = 1,
        /// Media and Data Integrity Errors.
        MEDIA = 2,
        /// Path Related Status.
        PATH = 3,
        /// Vendor Specific.
        VENDOR = 7,
    }
}

/// Declares the codes as constants of [`Status`], with the words of `Display`.
macro_rules! codes {
    ($($(#[$meta:meta])* $name:ident = $value:expr, $text:literal;)*) => {
        impl Status {
            $($(#[$meta])* pub const $name: Self = Self($value);)*

            /// Words for the code, if it has a name here.
            #[must_use]
            pub const fn text(self) -> Option<&'static str> {
                match self.code() {
                    $(Self::$name => Some($text),)*
                    _ => None,
                }
            }

            /// The name of the constant with this code, if there is one.
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
    /// Successful Completion.
    SUCCESS = 0x000, "success";
    /// Invalid Command Opcode.
    INVALID_OPCODE = 0x001, "invalid opcode";
    /// Invalid Field in Command.
    INVALID_FIELD = 0x002, "invalid field in command";
    /// Command ID Conflict: the CID is already in use.
    COMMAND_ID_CONFLICT = 0x003, "command id conflict";
    /// Data Transfer Error.
    DATA_TRANSFER_ERROR = 0x004, "data transfer error";
    /// Commands Aborted due to Power Loss Notification.
    ABORTED_POWER_LOSS = 0x005, "aborted: power loss notification";
    /// Internal Error.
    INTERNAL_ERROR = 0x006, "internal error";
    /// Command Abort Requested.
    ABORTED_BY_REQUEST = 0x007, "aborted by request";
    /// Command Aborted due to SQ Deletion.
    ABORTED_SQ_DELETION = 0x008, "aborted: submission queue deleted";
    /// Command Aborted due to Failed Fused Command.
    ABORTED_FAILED_FUSED = 0x009, "aborted: other fused command failed";
    /// Command Aborted due to Missing Fused Command.
    ABORTED_MISSING_FUSED = 0x00a, "aborted: other fused command missing";
    /// Invalid Namespace or Format.
    INVALID_NAMESPACE_OR_FORMAT = 0x00b, "invalid namespace or format";
    /// Command Sequence Error.
    COMMAND_SEQUENCE_ERROR = 0x00c, "command sequence error";
    /// Invalid SGL Segment Descriptor.
    INVALID_SGL_SEGMENT_DESCRIPTOR = 0x00d, "invalid SGL segment descriptor";
    /// Invalid Number of SGL Descriptors.
    INVALID_SGL_DESCRIPTOR_COUNT = 0x00e, "invalid number of SGL descriptors";
    /// Data SGL Length Invalid.
    DATA_SGL_LENGTH_INVALID = 0x00f, "data SGL length invalid";
    /// Metadata SGL Length Invalid.
    METADATA_SGL_LENGTH_INVALID = 0x010, "metadata SGL length invalid";
    /// SGL Descriptor Type Invalid.
    SGL_DESCRIPTOR_TYPE_INVALID = 0x011, "SGL descriptor type invalid";
    /// Invalid Use of Controller Memory Buffer.
    INVALID_USE_OF_CMB = 0x012, "invalid use of controller memory buffer";
    /// PRP Offset Invalid.
    PRP_OFFSET_INVALID = 0x013, "PRP offset invalid";
    /// Atomic Write Unit Exceeded.
    ATOMIC_WRITE_UNIT_EXCEEDED = 0x014, "atomic write unit exceeded";
    /// Operation Denied.
    OPERATION_DENIED = 0x015, "operation denied";
    /// SGL Offset Invalid.
    SGL_OFFSET_INVALID = 0x016, "SGL offset invalid";
    /// Host Identifier Inconsistent Format.
    HOST_ID_INCONSISTENT_FORMAT = 0x018, "host identifier inconsistent format";
    /// Keep Alive Timer Expired.
    KEEP_ALIVE_TIMER_EXPIRED = 0x019, "keep alive timer expired";
    /// Keep Alive Timeout Invalid.
    KEEP_ALIVE_TIMEOUT_INVALID = 0x01a, "keep alive timeout invalid";
    /// Command Aborted due to Preempt and Abort.
    ABORTED_PREEMPT = 0x01b, "aborted: preempt and abort";
    /// Sanitize Failed.
    SANITIZE_FAILED = 0x01c, "sanitize failed";
    /// Sanitize In Progress.
    SANITIZE_IN_PROGRESS = 0x01d, "sanitize in progress";
    /// SGL Data Block Granularity Invalid.
    SGL_DATA_BLOCK_GRANULARITY_INVALID = 0x01e, "SGL data block granularity invalid";
    /// Command Not Supported for Queue in CMB.
    COMMAND_NOT_SUPPORTED_FOR_QUEUE_IN_CMB = 0x01f, "command not supported for queue in CMB";
    /// Namespace is Write Protected.
    NAMESPACE_IS_WRITE_PROTECTED = 0x020, "namespace is write protected";
    /// Command Interrupted: may be sent again.
    COMMAND_INTERRUPTED = 0x021, "command interrupted";
    /// Transient Transport Error: may be sent again (a bad data digest, say).
    COMMAND_TRANSIENT_TRANSPORT_ERROR = 0x022, "transient transport error";
    /// Command Prohibited by Command and Feature Lockdown.
    COMMAND_PROHIBITED_BY_LOCKDOWN = 0x023, "command prohibited by lockdown";
    /// Admin Command Media Not Ready.
    ADMIN_COMMAND_MEDIA_NOT_READY = 0x024, "admin command media not ready";
    /// Invalid Key Tag (Base 2.1).
    INVALID_KEY_TAG = 0x025, "invalid key tag";
    /// Host Dispersed Namespace Support Not Enabled (Base 2.1).
    HOST_DISPERSED_NAMESPACE_SUPPORT_NOT_ENABLED = 0x026,
        "host dispersed namespace support not enabled";
    /// Host Identifier Not Initialized (Base 2.1).
    HOST_ID_NOT_INITIALIZED = 0x027, "host identifier not initialized";
    /// Incorrect Key (Base 2.1).
    INCORRECT_KEY = 0x028, "incorrect key";
    /// FDP Disabled (Base 2.1).
    FDP_DISABLED = 0x029, "FDP disabled";
    /// Invalid Placement Handle List (Base 2.1).
    INVALID_PLACEMENT_HANDLE_LIST = 0x02a, "invalid placement handle list";
    /// LBA Out of Range.
    LBA_OUT_OF_RANGE = 0x080, "LBA out of range";
    /// Capacity Exceeded.
    CAPACITY_EXCEEDED = 0x081, "capacity exceeded";
    /// Namespace Not Ready.
    NAMESPACE_NOT_READY = 0x082, "namespace not ready";
    /// Reservation Conflict.
    RESERVATION_CONFLICT = 0x083, "reservation conflict";
    /// Format In Progress.
    FORMAT_IN_PROGRESS = 0x084, "format in progress";
    // Command specific status, SCT 1, of the admin commands (Base 2.0 figure "Status Code - Command
    // Specific Status Values").
    /// Completion Queue Invalid.
    COMPLETION_QUEUE_INVALID = 0x100, "completion queue invalid";
    /// Invalid Queue Identifier.
    INVALID_QUEUE_ID = 0x101, "invalid queue identifier";
    /// Invalid Queue Size.
    INVALID_QUEUE_SIZE = 0x102, "invalid queue size";
    /// Abort Command Limit Exceeded.
    ABORT_LIMIT_EXCEEDED = 0x103, "abort command limit exceeded";
    /// Asynchronous Event Request Limit Exceeded.
    ASYNC_EVENT_LIMIT_EXCEEDED = 0x105, "asynchronous event request limit exceeded";
    /// Invalid Firmware Slot.
    INVALID_FIRMWARE_SLOT = 0x106, "invalid firmware slot";
    /// Invalid Firmware Image.
    INVALID_FIRMWARE_IMAGE = 0x107, "invalid firmware image";
    /// Invalid Interrupt Vector.
    INVALID_INTERRUPT_VECTOR = 0x108, "invalid interrupt vector";
    /// Invalid Log Page.
    INVALID_LOG_PAGE = 0x109, "invalid log page";
    /// Invalid Format.
    INVALID_FORMAT = 0x10a, "invalid format";
    /// Firmware Activation Requires Conventional Reset.
    FIRMWARE_REQUIRES_CONVENTIONAL_RESET = 0x10b, "firmware activation requires conventional reset";
    /// Invalid Queue Deletion.
    INVALID_QUEUE_DELETION = 0x10c, "invalid queue deletion";
    /// Feature Identifier Not Saveable.
    FEATURE_NOT_SAVEABLE = 0x10d, "feature not saveable";
    /// Feature Not Changeable.
    FEATURE_NOT_CHANGEABLE = 0x10e, "feature not changeable";
    /// Feature Not Namespace Specific.
    FEATURE_NOT_NAMESPACE_SPECIFIC = 0x10f, "feature not namespace specific";
    /// Firmware Activation Requires NVM Subsystem Reset.
    FIRMWARE_REQUIRES_SUBSYSTEM_RESET = 0x110, "firmware activation requires subsystem reset";
    /// Firmware Activation Requires Controller Level Reset.
    FIRMWARE_REQUIRES_CONTROLLER_RESET = 0x111,
        "firmware activation requires controller level reset";
    /// Firmware Activation Requires Maximum Time Violation.
    FIRMWARE_REQUIRES_MAX_TIME_VIOLATION = 0x112,
        "firmware activation requires maximum time violation";
    /// Firmware Activation Prohibited.
    FIRMWARE_ACTIVATION_PROHIBITED = 0x113, "firmware activation prohibited";
    /// Overlapping Range.
    OVERLAPPING_RANGE = 0x114, "overlapping range";
    /// Namespace Insufficient Capacity.
    NAMESPACE_INSUFFICIENT_CAPACITY = 0x115, "namespace insufficient capacity";
    /// Namespace Identifier Unavailable.
    NAMESPACE_ID_UNAVAILABLE = 0x116, "namespace identifier unavailable";
    /// Namespace Already Attached.
    NAMESPACE_ALREADY_ATTACHED = 0x118, "namespace already attached";
    /// Namespace Is Private.
    NAMESPACE_IS_PRIVATE = 0x119, "namespace is private";
    /// Namespace Not Attached.
    NAMESPACE_NOT_ATTACHED = 0x11a, "namespace not attached";
    /// Thin Provisioning Not Supported.
    THIN_PROVISIONING_NOT_SUPPORTED = 0x11b, "thin provisioning not supported";
    /// Controller List Invalid.
    CONTROLLER_LIST_INVALID = 0x11c, "controller list invalid";
    /// Device Self-test In Progress.
    SELF_TEST_IN_PROGRESS = 0x11d, "device self-test in progress";
    /// Boot Partition Write Prohibited.
    BOOT_PARTITION_WRITE_PROHIBITED = 0x11e, "boot partition write prohibited";
    /// Invalid Controller Identifier.
    INVALID_CONTROLLER_ID = 0x11f, "invalid controller identifier";
    /// Invalid Secondary Controller State.
    INVALID_SECONDARY_CONTROLLER_STATE = 0x120, "invalid secondary controller state";
    /// Invalid Number of Controller Resources.
    INVALID_CONTROLLER_RESOURCE_COUNT = 0x121, "invalid number of controller resources";
    /// Invalid Resource Identifier.
    INVALID_RESOURCE_ID = 0x122, "invalid resource identifier";
    /// Sanitize Prohibited While Persistent Memory Region is Enabled.
    SANITIZE_PROHIBITED_WHILE_PMR_ENABLED = 0x123, "sanitize prohibited while PMR is enabled";
    /// ANA Group Identifier Invalid.
    ANA_GROUP_ID_INVALID = 0x124, "ANA group identifier invalid";
    /// ANA Attach Failed.
    ANA_ATTACH_FAILED = 0x125, "ANA attach failed";
    /// Insufficient Capacity.
    INSUFFICIENT_CAPACITY = 0x126, "insufficient capacity";
    /// Namespace Attachment Limit Exceeded.
    NAMESPACE_ATTACHMENT_LIMIT_EXCEEDED = 0x127, "namespace attachment limit exceeded";
    /// Prohibition of Command Execution Not Supported.
    PROHIBITION_NOT_SUPPORTED = 0x128, "prohibition of command execution not supported";
    /// I/O Command Set Not Supported.
    IO_COMMAND_SET_NOT_SUPPORTED = 0x129, "I/O command set not supported";
    /// I/O Command Set Not Enabled.
    IO_COMMAND_SET_NOT_ENABLED = 0x12a, "I/O command set not enabled";
    /// I/O Command Set Combination Rejected.
    IO_COMMAND_SET_COMBINATION_REJECTED = 0x12b, "I/O command set combination rejected";
    /// Invalid I/O Command Set.
    INVALID_IO_COMMAND_SET = 0x12c, "invalid I/O command set";
    /// Identifier Unavailable.
    IDENTIFIER_UNAVAILABLE = 0x12d, "identifier unavailable";
    /// Namespace Is Dispersed (Base 2.1).
    NAMESPACE_IS_DISPERSED = 0x12e, "namespace is dispersed";
    /// Invalid Discovery Information (Base 2.1).
    INVALID_DISCOVERY_INFORMATION = 0x12f, "invalid discovery information";
    /// Zoning Data Structure Locked (Base 2.1).
    ZONING_DATA_STRUCTURE_LOCKED = 0x130, "zoning data structure locked";
    /// Zoning Data Structure Not Found (Base 2.1).
    ZONING_DATA_STRUCTURE_NOT_FOUND = 0x131, "zoning data structure not found";
    /// Insufficient Discovery Resources (Base 2.1).
    INSUFFICIENT_DISCOVERY_RESOURCES = 0x132, "insufficient discovery resources";
    /// Requested Function Disabled (Base 2.1).
    REQUESTED_FUNCTION_DISABLED = 0x133, "requested function disabled";
    /// ZoneGroup Originator Invalid (Base 2.1).
    ZONEGROUP_ORIGINATOR_INVALID = 0x134, "zone group originator invalid";
    // Command specific status, SCT 1, of Fabrics commands (Base 2.0 section 6). 180h to 185h mean other
    // things as a reply to an I/O command of the NVM Command Set; see the constants after these.
    /// Connect or Disconnect: RECFMT is not supported.
    CONNECT_INCOMPATIBLE_FORMAT = 0x180,
        "incompatible record format (Connect) or conflicting attributes (I/O)";
    /// Connect: the controller is already associated with a host.
    CONNECT_CONTROLLER_BUSY = 0x181,
        "controller busy (Connect) or invalid protection information (I/O)";
    /// Connect: a parameter is invalid; dword 0 says which.
    CONNECT_INVALID_PARAMETERS = 0x182,
        "invalid parameters (Connect) or write to read only range (I/O)";
    /// Connect: the subsystem is not there, discover again.
    CONNECT_RESTART_DISCOVERY = 0x183,
        "restart discovery (Connect) or command size limit exceeded (Copy, Dataset Management)";
    /// Connect: the host is not allowed.
    CONNECT_INVALID_HOST = 0x184, "invalid host (Connect) or invalid command identifier (Cancel)";
    /// Disconnect: not on this kind of queue.
    INVALID_QUEUE_TYPE = 0x185,
        "invalid queue type (Disconnect) or incompatible namespace or format (Copy)";
    /// Get Log Page: the discovery log changed, read it again from its beginning.
    DISCOVERY_RESTART = 0x190, "discovery log changed: restart";
    /// Authentication Required before this command.
    AUTHENTICATION_REQUIRED = 0x191, "authentication required";
    // Command specific status, SCT 1, of the NVM and Zoned command sets, where the value is not one of the
    // above (NVM Command Set 1.1 section 3.1).
    /// Copy: Fast Copy Not Possible (NVM Command Set 1.1).
    FAST_COPY_NOT_POSSIBLE = 0x186, "fast copy not possible";
    /// Copy: Overlapping I/O Range (NVM Command Set 1.1).
    OVERLAPPING_IO_RANGE = 0x187, "overlapping I/O range";
    /// Copy: Namespace Not Reachable (NVM Command Set 1.1).
    NAMESPACE_NOT_REACHABLE = 0x188, "namespace not reachable";
    /// Copy: Insufficient Resources (NVM Command Set 1.1).
    INSUFFICIENT_RESOURCES = 0x189, "insufficient resources";
    /// Zoned Boundary Error.
    ZONE_BOUNDARY_ERROR = 0x1b8, "zoned boundary error";
    /// Zone Is Full.
    ZONE_IS_FULL = 0x1b9, "zone is full";
    /// Zone Is Read Only.
    ZONE_IS_READ_ONLY = 0x1ba, "zone is read only";
    /// Zone Is Offline.
    ZONE_IS_OFFLINE = 0x1bb, "zone is offline";
    /// Zone Invalid Write.
    ZONE_INVALID_WRITE = 0x1bc, "zone invalid write";
    /// Too Many Active Zones.
    TOO_MANY_ACTIVE_ZONES = 0x1bd, "too many active zones";
    /// Too Many Open Zones.
    TOO_MANY_OPEN_ZONES = 0x1be, "too many open zones";
    /// Invalid Zone State Transition.
    INVALID_ZONE_STATE_TRANSITION = 0x1bf, "invalid zone state transition";
    // Media and data integrity errors, SCT 2 (Base 2.0 figure "Status Code - Media and Data Integrity Error
    // Values").
    /// Write Fault.
    WRITE_FAULT = 0x280, "write fault";
    /// Unrecovered Read Error.
    UNRECOVERED_READ_ERROR = 0x281, "unrecovered read error";
    /// End-to-end Guard Check Error.
    GUARD_CHECK_ERROR = 0x282, "guard check error";
    /// End-to-end Application Tag Check Error.
    APPLICATION_TAG_CHECK_ERROR = 0x283, "application tag check error";
    /// End-to-end Reference Tag Check Error.
    REFERENCE_TAG_CHECK_ERROR = 0x284, "reference tag check error";
    /// Compare Failure.
    COMPARE_FAILURE = 0x285, "compare failure";
    /// Access Denied.
    ACCESS_DENIED = 0x286, "access denied";
    /// Deallocated or Unwritten Logical Block.
    DEALLOCATED_OR_UNWRITTEN_BLOCK = 0x287, "deallocated or unwritten logical block";
    /// End-to-end Storage Tag Check Error.
    STORAGE_TAG_CHECK_ERROR = 0x288, "storage tag check error";
    // Path related status, SCT 3 (Base 2.0 figure "Status Code - Path Related Status Values").
    /// Internal Path Error.
    INTERNAL_PATH_ERROR = 0x300, "internal path error";
    /// Asymmetric Access Persistent Loss.
    ANA_PERSISTENT_LOSS = 0x301, "asymmetric access: persistent loss";
    /// Asymmetric Access Inaccessible.
    ANA_INACCESSIBLE = 0x302, "asymmetric access: inaccessible";
    /// Asymmetric Access Transition.
    ANA_TRANSITION = 0x303, "asymmetric access: transition";
    /// Controller Pathing Error.
    CONTROLLER_PATHING_ERROR = 0x360, "controller pathing error";
    /// Host Pathing Error.
    HOST_PATHING_ERROR = 0x370, "host pathing error";
    /// Command Aborted By Host.
    ABORTED_BY_HOST = 0x371, "aborted by host";
}

/// The second meaning of 180h to 185h: as a reply to an I/O command (NVM Command Set 1.0 and 1.1 section
/// 3.1).
impl Status {
    /// Conflicting Attributes: the access hints contradict each other.
    pub const CONFLICTING_ATTRIBUTES: Self = Self(0x180);
    /// Invalid Protection Information.
    pub const INVALID_PROTECTION_INFORMATION: Self = Self(0x181);
    /// Attempted Write to Read Only Range.
    pub const WRITE_TO_READ_ONLY_RANGE: Self = Self(0x182);
    /// Command Size Limit Exceeded: Copy, Dataset Management and others beyond what Identify allows.
    pub const COMMAND_SIZE_LIMIT_EXCEEDED: Self = Self(0x183);
    /// Invalid Command ID: Cancel names none (Base 2.1).
    pub const INVALID_COMMAND_ID: Self = Self(0x184);
    /// Incompatible Namespace or Format: Copy between unlike namespaces (NVM Command Set 1.1).
    pub const INCOMPATIBLE_NAMESPACE_OR_FORMAT: Self = Self(0x185);
}

impl Status {
    /// From SCT and SC, with CRD, M and DNR zero; SCT is cut to three bits.
    #[must_use]
    pub const fn new(sct: StatusType, sc: u8) -> Self {
        Self(StatusBits::new().with_sc(sc).with_sct(sct.0 & 0b111).into_bits())
    }

    /// From the last word of a completion: the phase tag, bit 0, is dropped.
    #[must_use]
    pub const fn from_wire(word: u16) -> Self {
        Self(word >> 1)
    }

    /// The last word of a completion.
    #[must_use]
    pub const fn to_wire(self, phase: bool) -> u16 {
        self.0 << 1 | phase as u16
    }

    /// From the 15 bits; a sixteenth is dropped.
    #[must_use]
    pub const fn from_bits(bits: u16) -> Self {
        Self(bits & 0x7fff)
    }

    /// The 15 bits.
    #[must_use]
    pub const fn bits(self) -> u16 {
        self.0
    }

    /// The field in parts.
    #[must_use]
    pub const fn parts(self) -> StatusBits {
        StatusBits::from_bits(self.0)
    }

    /// Only SCT and SC.
    #[must_use]
    pub const fn code(self) -> Self {
        Self(self.0 & 0x7ff)
    }

    /// SCT.
    #[must_use]
    pub const fn sct(self) -> StatusType {
        StatusType(self.parts().sct())
    }

    /// SC.
    #[must_use]
    pub const fn sc(self) -> u8 {
        self.parts().sc()
    }

    /// The same status with DNR set: the host is not to try again.
    #[must_use]
    pub const fn dnr(self) -> Self {
        Self(self.parts().with_dnr(true).into_bits())
    }

    /// Whether DNR is set.
    #[must_use]
    pub const fn is_dnr(self) -> bool {
        self.parts().dnr()
    }

    /// The same status with M set: the error log has an entry about it.
    #[must_use]
    pub const fn more(self) -> Self {
        Self(self.parts().with_more(true).into_bits())
    }

    /// The same status with M clear.
    #[must_use]
    pub const fn without_more(self) -> Self {
        Self(self.parts().with_more(false).into_bits())
    }

    /// Whether M is set.
    #[must_use]
    pub const fn is_more(self) -> bool {
        self.parts().more()
    }

    /// Whether the command succeeded: SCT 0 and SC 0.
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
        write_marks(*self, f)
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.text() {
            Some(text) => write!(f, "{text} ({:#x})", self.code().0)?,
            None => write!(f, "status {:#x}", self.code().0)?,
        }
        write_marks(*self, f)
    }
}

/// Writes CRD, M and DNR where they are set.
fn write_marks(status: Status, f: &mut fmt::Formatter<'_>) -> fmt::Result {
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
        assert_eq!((status.sct(), status.sc()), (StatusType::MEDIA, 0x85));
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
        assert_eq!(format!("{}", Status::new(StatusType::VENDOR, 1)), "status 0x701");
    }

    #[test]
    fn every_word_survives_the_way_through_the_wire() {
        for word in 0..=u16::MAX {
            assert_eq!(Status::from_wire(word).to_wire(word & 1 == 1), word);
        }
    }
}
