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
    /// The controller is that of an SR-IOV virtual function.
    pub virtual_function: bool,
    /// ANA is reported.
    pub ana: bool,
    #[bits(4)]
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
    __: bool,
    /// ANA changed.
    pub ana_change: bool,
    /// Predictable latency event aggregate log changed.
    pub predictable_latency: bool,
    /// LBA status information.
    pub lba_status: bool,
    /// Endurance group event aggregate log changed.
    pub endurance_group: bool,
    /// Normal NVM subsystem shutdown.
    pub subsystem_shutdown: bool,
    /// Temperature threshold hysteresis recovery (Base 2.1).
    pub temperature_hysteresis: bool,
    /// Reachability groups changed (Base 2.1).
    pub reachability_group: bool,
    __: bool,
    /// Allocated namespace attributes changed (Base 2.1).
    pub allocated_namespace_attribute: bool,
    #[bits(7)]
    __: u8,
    /// Zone descriptor changed.
    pub zone_descriptor: bool,
    #[bits(3)]
    __: u8,
    /// Discovery log page changed.
    pub discovery_log: bool,
}

/// CTRATT: controller attributes.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Ctratt {
    /// HIDS: 128-bit host identifier.
    pub host_id_128: bool,
    /// NOPSPM: non-operational power state permissive mode.
    pub non_operational_permissive: bool,
    /// NSETS: NVM sets.
    pub nvm_sets: bool,
    /// RRLVLS: read recovery levels.
    pub read_recovery_levels: bool,
    /// EGS: endurance groups.
    pub endurance_groups: bool,
    /// PLM: predictable latency mode.
    pub predictable_latency: bool,
    /// TBKAS: any command keeps the association alive.
    pub traffic_based_keep_alive: bool,
    /// NG: namespace granularity.
    pub namespace_granularity: bool,
    /// SQA: SQ associations.
    pub sq_associations: bool,
    /// ULIST: UUID list.
    pub uuid_list: bool,
    /// MDS: several domains.
    pub multi_domain: bool,
    /// FCM: fixed capacity management.
    pub fixed_capacity: bool,
    /// VCM: variable capacity management.
    pub variable_capacity: bool,
    /// DEG: delete endurance group.
    pub delete_endurance_group: bool,
    /// DNVMS: delete NVM set.
    pub delete_nvm_set: bool,
    /// ELBAS: extended LBA formats.
    pub extended_lba_formats: bool,
    /// MEM: MDTS does not count metadata (Base 2.1).
    pub mdts_excludes_metadata: bool,
    /// HMBR: host memory buffer restrictions (Base 2.1).
    pub host_memory_restrict: bool,
    /// RHII: reservations and host identifier interaction (Base 2.1).
    pub reservation_host_id: bool,
    /// FDPS: flexible data placement (Base 2.1).
    pub flexible_data_placement: bool,
    #[bits(12)]
    __: u16,
}

/// OACS: optional admin commands.
#[bitfield(u16)]
#[derive(PartialEq, Eq)]
pub struct Oacs {
    /// Security Send and Receive.
    pub security: bool,
    /// Format NVM.
    pub format: bool,
    /// Firmware Commit and Image Download.
    pub firmware: bool,
    /// Namespace Management and Attachment.
    pub namespace_management: bool,
    /// Device Self-test.
    pub self_test: bool,
    /// Directives.
    pub directives: bool,
    /// NVMe-MI Send and Receive.
    pub nvme_mi: bool,
    /// Virtualization Management.
    pub virtualization: bool,
    /// Doorbell Buffer Config.
    pub doorbell_buffer: bool,
    /// Get LBA Status.
    pub lba_status: bool,
    /// Lockdown.
    pub lockdown: bool,
    #[bits(5)]
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
    /// Firmware is activated without a reset.
    pub activation_without_reset: bool,
    /// Overlapping image updates are noticed.
    pub multiple_update_detection: bool,
    #[bits(2)]
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
    /// Telemetry logs.
    pub telemetry: bool,
    /// Persistent event log.
    pub persistent_event: bool,
    /// LID 00h, and the scope of each log; LID 12h and 13h.
    pub supported_log_pages: bool,
    /// Telemetry data area 4.
    pub telemetry_area_4: bool,
    #[bits(1)]
    __: u8,
}

/// ANACAP: what ANA states there are.
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
pub struct Anacap {
    /// Optimized.
    pub optimized: bool,
    /// Non-optimized.
    pub non_optimized: bool,
    /// Inaccessible.
    pub inaccessible: bool,
    /// Persistent loss.
    pub persistent_loss: bool,
    /// Change.
    pub change: bool,
    __: bool,
    /// ANAGRPID does not change while the namespace is attached.
    pub group_id_static: bool,
    /// ANAGRPID may be given at Namespace Management.
    pub group_id_managed: bool,
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
    /// Write Uncorrectable.
    pub write_uncorrectable: bool,
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
    /// A Copy is written atomically as one (NVM Command Set 1.1).
    pub copy_single_atomicity: bool,
    /// All copies are fast (NVM Command Set 1.1).
    pub all_fast_copy: bool,
    /// WZDSL is the limit of a Write Zeroes that deallocates (NVM Command Set 1.1).
    pub write_zeroes_deallocate_limit: bool,
    /// Write Zeroes of a whole namespace (NVM Command Set 1.1).
    pub namespace_zeroes: bool,
    #[bits(3)]
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
    /// `flush_all`: Flush with NSID FFFFFFFFh is refused.
    pub const FLUSH_ALL_REFUSED: u8 = 2;
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
    #[bits(5)]
    __: u8,
    /// SDT: recommended most descriptors.
    pub descriptor_threshold: u8,
    /// Bit Bucket.
    pub bit_bucket: bool,
    /// MPTR is byte aligned.
    pub mptr_byte_aligned: bool,
    /// The SGL may be longer than the data.
    pub longer_than_data: bool,
    /// MPTR may be an SGL.
    pub mptr_sgl: bool,
    /// The address field may be an offset: in-capsule data.
    pub offset: bool,
    /// Transport Data Block.
    pub transport: bool,
    #[bits(10)]
    __: u16,
}

/// FCATT: Fabrics controller attributes.
#[bitfield(u8)]
#[derive(PartialEq, Eq)]
pub struct Fcatt {
    /// The static controller model; else the dynamic one.
    pub static_controllers: bool,
    #[bits(7)]
    __: u8,
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
        assert_eq!(Oaes::new().with_ana_change(true).into_bits(), 1 << 11);
        assert_eq!(Oaes::new().with_discovery_log(true).into_bits(), 1 << 31);
        assert_eq!(Oaes::new().with_zone_descriptor(true).into_bits(), 1 << 27);
        assert_eq!(Ctratt::new().with_traffic_based_keep_alive(true).into_bits(), 1 << 6);
        assert_eq!(Ctratt::new().with_extended_lba_formats(true).into_bits(), 1 << 15);
        assert_eq!(Sgls::new().with_support(1).with_keyed(true).with_offset(true).into_bits(), 0x10_0005);
        assert_eq!(Sgls::new().with_transport(true).into_bits(), 1 << 21);
        assert_eq!(EntrySize::new().with_required(6).with_largest(6).into_bits(), 0x66);
        assert_eq!(Vwc::new().with_present(true).with_flush_all(Vwc::FLUSH_ALL_SUPPORTED).into_bits(), 7);
        assert_eq!(Anacap::new().with_group_id_static(true).into_bits(), 1 << 6);
        assert_eq!(Frmw::new().with_slots(1).with_first_slot_read_only(true).into_bits(), 0x03);
    }
}
