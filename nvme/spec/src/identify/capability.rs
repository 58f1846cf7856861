//! The bits of Identify Controller: what a controller can do (Base 2.0 figure "Identify Controller Data
//! Structure").

use bitfield_struct::bitfield;

/// CMIC: how the subsystem may be reached.
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
pub struct Cmic {
    /// The subsystem may have several ports.
    pub multiple_ports: bool,
    /// The subsystem may have several controllers.
    pub multiple_controllers: bool,
    #[bits(6)]
    __: u8,
}

/// OAES: asynchronous events that may be sent; the same bits turn them on (feature 0Bh).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Oaes {
    __: u8,
    /// Attached namespace attributes changed.
    pub namespace_attribute: bool,
    /// Firmware activation starts.
    pub firmware_activation: bool,
    #[bits(21)]
    __: u32,
    /// Discovery log page changed.
    pub discovery_log: bool,
}

/// CTRATT: controller attributes.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Ctratt {
    /// HIDS: 128-bit host identifier.
    pub host_id_128: bool,
    #[bits(5)]
    __: u8,
    /// TBKAS: any command keeps the association alive.
    pub traffic_based_keep_alive: bool,
    #[bits(25)]
    __: u32,
}

/// OACS: optional admin commands.
#[bitfield(u16)]
#[derive(PartialEq, Eq)]
pub struct Oacs {
    __: u8,
    /// Doorbell Buffer Config.
    pub doorbell_buffer: bool,
    #[bits(7)]
    __: u8,
}

/// FRMW: firmware slots and how they are activated.
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
pub struct Frmw {
    /// Slot 1 is read only.
    pub first_slot_read_only: bool,
    /// How many slots, 1 to 7.
    #[bits(3)]
    pub slots: u8,
    #[bits(4)]
    __: u8,
}

/// LPA: log pages.
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
pub struct Lpa {
    /// SMART log for each namespace.
    pub smart_per_namespace: bool,
    /// Commands Supported and Effects log.
    pub command_effects: bool,
    /// Extended data: offset and 32-bit NUMD in Get Log Page.
    pub extended_data: bool,
    #[bits(2)]
    __: u8,
    /// LID 00h, and the scope of each log; LID 12h and 13h.
    pub supported_log_pages: bool,
    #[bits(2)]
    __: u8,
}

/// SQES and CQES: sizes of queue entries, as powers of two.
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
pub struct EntrySize {
    /// The required size; 6 for SQES, 4 for CQES.
    #[bits(4)]
    pub required: u8,
    /// The largest size.
    #[bits(4)]
    pub largest: u8,
}

/// ONCS: optional NVM commands.
#[bitfield(u16)]
#[derive(PartialEq, Eq)]
pub struct Oncs {
    /// Compare.
    pub compare: bool,
    __: bool,
    /// Dataset Management.
    pub dataset_management: bool,
    /// Write Zeroes.
    pub write_zeroes: bool,
    /// Save and Select of features.
    pub save_select: bool,
    /// Reservations.
    pub reservations: bool,
    /// Timestamp.
    pub timestamp: bool,
    /// Verify.
    pub verify: bool,
    /// Copy.
    pub copy: bool,
    #[bits(7)]
    __: u8,
}

/// FUSES: fused operations.
#[bitfield(u16)]
#[derive(PartialEq, Eq)]
pub struct Fuses {
    /// Compare and Write.
    pub compare_and_write: bool,
    #[bits(15)]
    __: u16,
}

/// VWC: volatile write cache.
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
pub struct Vwc {
    /// There is one.
    pub present: bool,
    /// Flush with NSID FFFFFFFFh: 2 is refused, 3 flushes all namespaces.
    #[bits(2)]
    pub flush_all: u8,
    #[bits(5)]
    __: u8,
}

impl Vwc {
    /// `flush_all`: Flush with NSID FFFFFFFFh flushes every namespace.
    pub const FLUSH_ALL_SUPPORTED: u8 = 3;
}

/// SGLS: what SGLs the controller takes.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Sgls {
    /// 0 none, 1 without alignment, 2 aligned to dwords.
    #[bits(2)]
    pub support: u8,
    /// Keyed Data Block.
    pub keyed: bool,
    #[bits(17)]
    __: u32,
    /// The address field may be an offset: in-capsule data.
    pub offset: bool,
    /// Transport Data Block.
    pub transport: bool,
    #[bits(10)]
    __: u16,
}

/// OFCS: optional Fabrics commands.
#[bitfield(u16)]
#[derive(PartialEq, Eq)]
pub struct Ofcs {
    /// Disconnect.
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
