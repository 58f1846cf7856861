//! Opcodes of the admin, NVM and Fabrics command sets (Base 2.0 sections 5 and 6; NVM Command Set 1.0
//! section 3).

/// The opcode that marks a Fabrics command on any queue; its kind is then in FCTYPE (Base 2.0 section 6).
pub const FABRICS: u8 = 0x7f;

open_enum! {
    /// Opcode of a command on an admin queue (Base 2.0 section 5, figure "Opcodes for Admin Commands").
    pub struct AdminOpcode: u8 {
        /// Delete I/O Submission Queue; PCIe only.
        DELETE_IO_SQ = 0x00,
        /// Create I/O Submission Queue; PCIe only.
        CREATE_IO_SQ = 0x01,
        /// Get Log Page.
        GET_LOG_PAGE = 0x02,
        /// Delete I/O Completion Queue; PCIe only.
        DELETE_IO_CQ = 0x04,
        /// Create I/O Completion Queue; PCIe only.
        CREATE_IO_CQ = 0x05,
        /// Identify.
        IDENTIFY = 0x06,
        /// Abort.
        ABORT = 0x08,
        /// Set Features.
        SET_FEATURES = 0x09,
        /// Get Features.
        GET_FEATURES = 0x0a,
        /// Asynchronous Event Request.
        ASYNC_EVENT_REQUEST = 0x0c,
        /// Namespace Management.
        NAMESPACE_MANAGEMENT = 0x0d,
        /// Firmware Commit.
        FIRMWARE_COMMIT = 0x10,
        /// Firmware Image Download.
        FIRMWARE_IMAGE_DOWNLOAD = 0x11,
        /// Device Self-test.
        DEVICE_SELF_TEST = 0x14,
        /// Namespace Attachment.
        NAMESPACE_ATTACHMENT = 0x15,
        /// Keep Alive.
        KEEP_ALIVE = 0x18,
        /// Directive Send.
        DIRECTIVE_SEND = 0x19,
        /// Directive Receive.
        DIRECTIVE_RECEIVE = 0x1a,
        /// Virtualization Management.
        VIRTUALIZATION_MANAGEMENT = 0x1c,
        /// NVMe-MI Send.
        NVME_MI_SEND = 0x1d,
        /// NVMe-MI Receive.
        NVME_MI_RECEIVE = 0x1e,
        /// Capacity Management.
        CAPACITY_MANAGEMENT = 0x20,
        /// Discovery Information Management (Base 2.1).
        DISCOVERY_INFORMATION_MANAGEMENT = 0x21,
        /// Fabric Zoning Receive (Base 2.1).
        FABRIC_ZONING_RECEIVE = 0x22,
        /// Lockdown.
        LOCKDOWN = 0x24,
        /// Fabric Zoning Lookup (Base 2.1).
        FABRIC_ZONING_LOOKUP = 0x25,
        /// Clear Exported NVM Resource Configuration (Base 2.1).
        CLEAR_EXPORTED_NVM_RESOURCE = 0x28,
        /// Fabric Zoning Send (Base 2.1).
        FABRIC_ZONING_SEND = 0x29,
        /// Create Exported NVM Subsystem (Base 2.1).
        CREATE_EXPORTED_NVM_SUBSYSTEM = 0x2a,
        /// Manage Exported NVM Subsystem (Base 2.1).
        MANAGE_EXPORTED_NVM_SUBSYSTEM = 0x2d,
        /// Manage Exported Namespace (Base 2.1).
        MANAGE_EXPORTED_NAMESPACE = 0x31,
        /// Manage Exported Port (Base 2.1).
        MANAGE_EXPORTED_PORT = 0x35,
        /// Send Discovery Log Page (Base 2.1).
        SEND_DISCOVERY_LOG_PAGE = 0x39,
        /// Track Send (Base 2.1).
        TRACK_SEND = 0x3d,
        /// Track Receive (Base 2.1).
        TRACK_RECEIVE = 0x3e,
        /// Migration Send (Base 2.1).
        MIGRATION_SEND = 0x41,
        /// Migration Receive (Base 2.1).
        MIGRATION_RECEIVE = 0x42,
        /// Controller Data Queue (Base 2.1).
        CONTROLLER_DATA_QUEUE = 0x45,
        /// Doorbell Buffer Config; PCIe only.
        DOORBELL_BUFFER_CONFIG = 0x7c,
        /// A Fabrics command; see [`FabricsType`].
        FABRICS = FABRICS,
        /// Format NVM.
        FORMAT_NVM = 0x80,
        /// Security Send.
        SECURITY_SEND = 0x81,
        /// Security Receive.
        SECURITY_RECEIVE = 0x82,
        /// Sanitize.
        SANITIZE = 0x84,
        /// Get LBA Status (NVM Command Set).
        GET_LBA_STATUS = 0x86,
    }
}

open_enum! {
    /// Opcode of a command on an I/O queue (Base 2.0 section 7; NVM Command Set 1.0 section 3.2).
    pub struct IoOpcode: u8 {
        /// Flush.
        FLUSH = 0x00,
        /// Write.
        WRITE = 0x01,
        /// Read.
        READ = 0x02,
        /// Write Uncorrectable.
        WRITE_UNCORRECTABLE = 0x04,
        /// Compare.
        COMPARE = 0x05,
        /// Write Zeroes.
        WRITE_ZEROES = 0x08,
        /// Dataset Management.
        DATASET_MANAGEMENT = 0x09,
        /// Verify.
        VERIFY = 0x0c,
        /// Reservation Register.
        RESERVATION_REGISTER = 0x0d,
        /// Reservation Report.
        RESERVATION_REPORT = 0x0e,
        /// Reservation Acquire.
        RESERVATION_ACQUIRE = 0x11,
        /// I/O Management Receive (Base 2.1).
        IO_MANAGEMENT_RECEIVE = 0x12,
        /// Reservation Release.
        RESERVATION_RELEASE = 0x15,
        /// Cancel (Base 2.1).
        CANCEL = 0x18,
        /// Copy.
        COPY = 0x19,
        /// I/O Management Send (Base 2.1).
        IO_MANAGEMENT_SEND = 0x1d,
        /// Zone Management Send (Zoned Namespaces Command Set).
        ZONE_MANAGEMENT_SEND = 0x79,
        /// Zone Management Receive (Zoned Namespaces Command Set).
        ZONE_MANAGEMENT_RECEIVE = 0x7a,
        /// Zone Append (Zoned Namespaces Command Set).
        ZONE_APPEND = 0x7d,
        /// A Fabrics command; see [`FabricsType`].
        FABRICS = FABRICS,
    }
}

open_enum! {
    /// FCTYPE, byte 4 of a Fabrics command (Base 2.0 section 6, figure "Fabrics Command Types").
    pub struct FabricsType: u8 {
        /// Property Set; admin queue only.
        PROPERTY_SET = 0x00,
        /// Connect; the first command of every queue.
        CONNECT = 0x01,
        /// Property Get; admin queue only.
        PROPERTY_GET = 0x04,
        /// Authentication Send.
        AUTHENTICATION_SEND = 0x05,
        /// Authentication Receive.
        AUTHENTICATION_RECEIVE = 0x06,
        /// Disconnect; I/O queue only.
        DISCONNECT = 0x08,
    }
}
