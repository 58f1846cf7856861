//! Opcodes of the admin, Fabrics and I/O commands (Base 2.0 sections 5 to 7; NVM Command Set 1.0 section 3).

/// Opcode of all Fabrics commands, on admin and I/O queues; FCTYPE selects the command (Base 2.0 section 6).
pub const FABRICS: u8 = 0x7f;

open_enum! {
    /// Opcode of a command on an admin queue (Base 2.0 section 5, figure "Opcodes for Admin Commands").
    pub struct AdminOpcode: u8 {
        /// PCIe only.
        DELETE_IO_SQ = 0x00,
        /// PCIe only.
        CREATE_IO_SQ = 0x01,
        GET_LOG_PAGE = 0x02,
        /// PCIe only.
        DELETE_IO_CQ = 0x04,
        /// PCIe only.
        CREATE_IO_CQ = 0x05,
        IDENTIFY = 0x06,
        ABORT = 0x08,
        SET_FEATURES = 0x09,
        GET_FEATURES = 0x0a,
        ASYNC_EVENT_REQUEST = 0x0c,
        KEEP_ALIVE = 0x18,
        /// PCIe only.
        DOORBELL_BUFFER_CONFIG = 0x7c,
    }
}

open_enum! {
    /// Opcode of a command on an I/O queue (Base 2.0 section 7; NVM Command Set 1.0 section 3.2).
    pub struct IoOpcode: u8 {
        FLUSH = 0x00,
        WRITE = 0x01,
        READ = 0x02,
        COMPARE = 0x05,
        WRITE_ZEROES = 0x08,
        DATASET_MANAGEMENT = 0x09,
        VERIFY = 0x0c,
        COPY = 0x19,
    }
}

open_enum! {
    /// FCTYPE: Fabrics Command Type, byte 4 of the entry (Base 2.0 section 6, figure "Fabrics Command
    /// Types").
    pub struct FabricsType: u8 {
        /// Admin queue only.
        PROPERTY_SET = 0x00,
        /// First command on every queue.
        CONNECT = 0x01,
        /// Admin queue only.
        PROPERTY_GET = 0x04,
        AUTHENTICATION_SEND = 0x05,
        AUTHENTICATION_RECEIVE = 0x06,
        /// I/O queue only.
        DISCONNECT = 0x08,
    }
}
