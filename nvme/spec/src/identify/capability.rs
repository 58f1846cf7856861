//! Bitfields of Identify Controller (Base 2.0 figure "Identify Controller Data Structure").

use bitfield_struct::bitfield;

/// CMIC: Controller Multi-Path I/O and Namespace Sharing Capabilities.
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
pub struct Cmic {
    /// Bit 0: the NVM subsystem may have more than one port.
    pub multiple_ports: bool,
    /// Bit 1: the NVM subsystem may have more than one controller.
    pub multiple_controllers: bool,
    #[bits(6)]
    __: u8,
}

/// OAES: Optional Asynchronous Events Supported; feature 0Bh enables them with the same bits.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Oaes {
    __: u8,
    /// Bit 8, Attached Namespace Attribute Notices.
    pub namespace_attribute: bool,
    /// Bit 9, Firmware Activation Notices.
    pub firmware_activation: bool,
    #[bits(21)]
    __: u32,
    /// Bit 31, Discovery Log Page Change Notification.
    pub discovery_log: bool,
}

/// CTRATT: Controller Attributes.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Ctratt {
    /// HIDS: Host Identifier Support, 128 bits.
    pub host_id_128: bool,
    #[bits(5)]
    __: u8,
    /// TBKAS: Traffic Based Keep Alive Support; any command restarts the keep alive timer.
    pub traffic_based_keep_alive: bool,
    #[bits(25)]
    __: u32,
}

/// OACS: Optional Admin Command Support.
#[bitfield(u16)]
#[derive(PartialEq, Eq)]
pub struct Oacs {
    __: u8,
    /// Bit 8: Doorbell Buffer Config is supported.
    pub doorbell_buffer: bool,
    #[bits(7)]
    __: u8,
}

/// FRMW: Firmware Updates.
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
pub struct Frmw {
    /// Bit 0: firmware slot 1 is read only.
    pub first_slot_read_only: bool,
    /// Bits 3:1: number of firmware slots, 1 to 7.
    #[bits(3)]
    pub slots: u8,
    #[bits(4)]
    __: u8,
}

/// LPA: Log Page Attributes.
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
pub struct Lpa {
    /// Bit 0: the SMART / Health Information log page is supported per namespace.
    pub smart_per_namespace: bool,
    /// Bit 1: the Commands Supported and Effects log page is supported.
    pub command_effects: bool,
    /// Bit 2, Extended Data: Get Log Page supports LPO and a 32-bit NUMD.
    pub extended_data: bool,
    #[bits(2)]
    __: u8,
    /// Bit 5: log pages 00h, 12h and 13h are supported, and log page 05h has the scope of each command.
    pub supported_log_pages: bool,
    #[bits(2)]
    __: u8,
}

/// SQES and CQES: Submission and Completion Queue Entry Size, `1 << size` bytes.
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
pub struct EntrySize {
    /// Bits 3:0: required size; 6 for SQES, 4 for CQES.
    #[bits(4)]
    pub required: u8,
    /// Bits 7:4: largest supported size.
    #[bits(4)]
    pub largest: u8,
}

/// ONCS: Optional NVM Command Support.
#[bitfield(u16)]
#[derive(PartialEq, Eq)]
pub struct Oncs {
    /// Bit 0: Compare is supported.
    pub compare: bool,
    __: bool,
    /// Bit 2: Dataset Management is supported.
    pub dataset_management: bool,
    /// Bit 3: Write Zeroes is supported.
    pub write_zeroes: bool,
    /// Bit 4: SV of Set Features and SEL of Get Features are supported.
    pub save_select: bool,
    /// Bit 5: Reservations are supported.
    pub reservations: bool,
    /// Bit 6: Timestamp (feature 0Eh) is supported.
    pub timestamp: bool,
    /// Bit 7: Verify is supported.
    pub verify: bool,
    /// Bit 8: Copy is supported.
    pub copy: bool,
    #[bits(7)]
    __: u8,
}

/// FUSES: Fused Operation Support.
#[bitfield(u16)]
#[derive(PartialEq, Eq)]
pub struct Fuses {
    /// Bit 0: the fused operation Compare and Write is supported.
    pub compare_and_write: bool,
    #[bits(15)]
    __: u16,
}

/// VWC: Volatile Write Cache.
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
pub struct Vwc {
    /// Bit 0: the controller has a volatile write cache.
    pub present: bool,
    /// Bits 2:1, Flush with NSID FFFFFFFFh: 0 is not reported, 2 is not supported, 3 flushes all namespaces.
    #[bits(2)]
    pub flush_all: u8,
    #[bits(5)]
    __: u8,
}

impl Vwc {
    /// Value of `flush_all`: Flush with NSID FFFFFFFFh flushes all namespaces.
    pub const FLUSH_ALL_SUPPORTED: u8 = 3;
}

/// SGLS: SGL Support.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Sgls {
    /// Bits 1:0: 0 is no SGL support, 1 SGLs without an alignment requirement, 2 SGLs with dword alignment.
    #[bits(2)]
    pub support: u8,
    /// Bit 2: the Keyed SGL Data Block descriptor is supported.
    pub keyed: bool,
    #[bits(17)]
    __: u32,
    /// Bit 20: the address field may be an offset (in-capsule data).
    pub offset: bool,
    /// Bit 21: the Transport SGL Data Block descriptor is supported.
    pub transport: bool,
    #[bits(10)]
    __: u16,
}

/// OFCS: Optional Fabrics Commands Support.
#[bitfield(u16)]
#[derive(PartialEq, Eq)]
pub struct Ofcs {
    /// Bit 0: Disconnect of an I/O queue is supported.
    pub disconnect: bool,
    #[bits(15)]
    __: u16,
}

wire_bits!(Oaes => U32, Ctratt => U32, Oacs => U16, Oncs => U16, Fuses => U16, Sgls => U32, Ofcs => U16);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capability_bits_have_the_values_that_nvme_cli_decodes() {
        assert_eq!(Oncs::new().with_copy(true).into_bits(), 1 << 8);
        assert_eq!(Oncs::new().with_verify(true).with_dataset_management(true).into_bits(), 0x84);
        assert_eq!(Oaes::new().with_namespace_attribute(true).into_bits(), 1 << 8);
        assert_eq!(Oaes::new().with_discovery_log(true).into_bits(), 1 << 31);
        assert_eq!(Ctratt::new().with_traffic_based_keep_alive(true).into_bits(), 1 << 6);
        assert_eq!(Sgls::new().with_support(1).with_keyed(true).with_offset(true).into_bits(), 0x10_0005);
        assert_eq!(Sgls::new().with_transport(true).into_bits(), 1 << 21);
        assert_eq!(EntrySize::new().with_required(6).with_largest(6).into_bits(), 0x66);
        assert_eq!(Vwc::new().with_present(true).with_flush_all(Vwc::FLUSH_ALL_SUPPORTED).into_bits(), 7);
        assert_eq!(Frmw::new().with_slots(1).with_first_slot_read_only(true).into_bits(), 0x03);
    }
}
