//! Identify Controller (CNS 01h) and its part of the NVM command set (CNS 06h).

use nvme_spec::cqe::CQE_BYTES;
use nvme_spec::identify::{
    Cmic, ControllerType, Ctratt, DiscoveryControllerType, EntrySize, Frmw, Fuses, IdentifyController,
    IdentifyControllerNvm, Lpa, Oaes, Ofcs, Oncs, Sgls, Vwc,
};
use nvme_spec::nqn::{Nqn, padded_ascii};
use nvme_spec::sqe::SQE_BYTES;
use nvme_spec::vendor::SpindleFeatures;
use nvme_spec::zerocopy::little_endian::{U16, U32};
use spindle_nvme_transport::{RDMA_DESCRIPTORS_MAX, TransportKind};
use spindle_target_disk::Geometry;

use super::limits::{
    ABORTS_MAX, ASYNC_EVENTS_MAX, ERROR_ENTRIES, FIRMWARE, KEEP_ALIVE_UNITS, TEMPERATURE_CRITICAL_KELVIN,
    TEMPERATURE_WARNING_KELVIN, WRITE_ZEROES_BYTES_MAX, page_exponent,
};
use super::{Context, Controller, property};
use crate::snapshot::{NSID_MAX, Subsystem};

/// Unit of IOCCSZ and IORCSZ in bytes.
const CAPSULE_UNIT_BYTES: u32 = 16;

const SGL_BYTES: u32 = 16;

/// Bit of CDFS: Copy descriptor format 0h is supported.
const COPY_FORMAT_0: u16 = 1 << 0;

/// Fields of Identify Controller that depend on the namespaces.
struct NamespaceSummary {
    atomic_blocks: u32,
    has_compare_and_write: bool,
    any_volatile_cache: bool,
}

impl NamespaceSummary {
    fn of(subsystem: &Subsystem) -> NamespaceSummary {
        let geometries = || subsystem.active().map(|namespace| namespace.source.geometry());
        // FUSES bit 0 is per controller, and VMFS does not use a controller without this bit. A namespace
        // without support refuses each fused pair. Without namespaces the bit is set, since hosts read the
        // bit once and namespaces may be added.
        let has_compare_and_write =
            geometries().any(|geometry| geometry.can_compare_and_write) || geometries().next().is_none();
        NamespaceSummary {
            atomic_blocks: geometries().map(|geometry: Geometry| geometry.atomic_blocks).min().unwrap_or(1),
            has_compare_and_write,
            any_volatile_cache: has_volatile_cache(subsystem),
        }
    }
}

pub(super) fn has_volatile_cache(subsystem: &Subsystem) -> bool {
    subsystem.active().any(|namespace| namespace.source.geometry().has_volatile_cache)
}

impl Controller {
    /// CNS 01h of an I/O controller.
    pub(super) fn identify_io(&self, cx: &Context<'_>, subsystem: &Subsystem, id: &mut IdentifyController) {
        let summary = NamespaceSummary::of(subsystem);
        self.identify_common(&subsystem.nqn, id);
        id.sn = padded_ascii(&subsystem.serial);
        id.mn = padded_ascii(&subsystem.model);
        id.cmic = Cmic::new().with_multiple_ports(true).with_multiple_controllers(true).into_bits();
        id.cntrltype = ControllerType::IO;
        id.oaes = Oaes::new().with_namespace_attribute(true).into();
        id.acl_z = ABORTS_MAX - 1;
        id.frmw = Frmw::new().with_first_slot_read_only(true).with_slots(1).into_bits();
        id.lpa = Lpa::new()
            .with_smart_per_namespace(true)
            .with_command_effects(true)
            .with_extended_data(true)
            .with_supported_log_pages(true)
            .into_bits();
        id.elpe_z = u8::try_from(ERROR_ENTRIES - 1).unwrap_or(u8::MAX);
        id.wctemp = U16::new(TEMPERATURE_WARNING_KELVIN);
        id.cctemp = U16::new(TEMPERATURE_CRITICAL_KELVIN);
        id.sqes = EntrySize::new().with_required(6).with_largest(6).into_bits();
        id.cqes = EntrySize::new().with_required(4).with_largest(4).into_bits();
        id.nn = U32::new(NSID_MAX);
        id.mnan = U32::new(NSID_MAX);
        id.oncs = oncs().into();
        id.cdfs = U16::new(COPY_FORMAT_0);
        id.fuses = Fuses::new().with_compare_and_write(summary.has_compare_and_write).into();
        id.vwc = Vwc::new()
            .with_present(summary.any_volatile_cache)
            .with_flush_all(Vwc::FLUSH_ALL_SUPPORTED)
            .into_bits();
        // AWUN applies without a power failure; with one, a single block is atomic (AWUPF 0).
        id.awun_z = U16::new(u16::try_from(summary.atomic_blocks.saturating_sub(1)).unwrap_or(u16::MAX));
        let features =
            SpindleFeatures::new().with_end_former_associations(true).with_clusters(subsystem.has_clusters());
        id.set_spindle_features(features.with_optimistic_reads(cx.registry.optimistic().is_some()));
    }

    /// CNS 01h of a discovery controller.
    pub(super) fn identify_discovery(&self, id: &mut IdentifyController) {
        self.identify_common(&Nqn::discovery(), id);
        id.cntrltype = ControllerType::DISCOVERY;
        id.oaes = Oaes::new().with_discovery_log(true).into();
        id.lpa = Lpa::new().with_extended_data(true).into_bits();
        id.dctype = DiscoveryControllerType::DIRECT;
    }

    fn identify_common(&self, subsystem_nqn: &Nqn, id: &mut IdentifyController) {
        id.fr = padded_ascii(FIRMWARE);
        // Empty strings are padded with spaces too.
        id.sn = padded_ascii("");
        id.mn = padded_ascii("Spindle");
        id.mdts = page_exponent(self.transfer_bytes);
        id.cntlid = U16::new(self.shared.cntlid);
        id.ver = U32::new(property::VERSION.into_bits());
        id.ctratt = Ctratt::new().with_host_id_128(true).with_traffic_based_keep_alive(true).into();
        id.aerl_z = ASYNC_EVENTS_MAX - 1;
        id.kas = U16::new(KEEP_ALIVE_UNITS);
        id.maxcmd = U16::new(self.queue_entries_max);
        id.sgls = self.sgls().into();
        id.subnqn = subsystem_nqn.to_field();
        let capsule_bytes = u32::try_from(SQE_BYTES).unwrap_or(64).saturating_add(self.in_capsule_bytes);
        id.ioccsz = U32::new(capsule_bytes / CAPSULE_UNIT_BYTES);
        id.iorcsz = U32::new(u32::try_from(CQE_BYTES).unwrap_or(16) / CAPSULE_UNIT_BYTES);
        id.msdbd = self.msdbd();
        id.ofcs = Ofcs::new().with_disconnect(true).into();
    }

    /// MSDBD: most SGL descriptors of a command. Over RDMA a list of descriptors is in-capsule data.
    fn msdbd(&self) -> u8 {
        let room = u8::try_from(self.in_capsule_bytes / SGL_BYTES).unwrap_or(u8::MAX);
        match self.transport {
            TransportKind::Tcp => 1,
            TransportKind::Rdma => room.clamp(1, RDMA_DESCRIPTORS_MAX),
        }
    }

    fn sgls(&self) -> Sgls {
        let sgls = Sgls::new().with_support(1).with_offset(self.in_capsule_bytes > 0);
        match self.transport {
            TransportKind::Tcp => sgls.with_transport(true),
            TransportKind::Rdma => sgls.with_keyed(true),
        }
    }

    /// CNS 06h: the NVM command set's part.
    pub(super) fn identify_nvm(id: &mut IdentifyControllerNvm) {
        // VSL 0: a Verify has no limit, since it is executed in steps. DMRL, DMRSL, DMSL 0: no limit but the
        // 256 ranges of the command.
        id.wzsl = page_exponent(WRITE_ZEROES_BYTES_MAX);
    }
}

fn oncs() -> Oncs {
    Oncs::new()
        .with_compare(true)
        .with_dataset_management(true)
        .with_write_zeroes(true)
        .with_save_select(true)
        .with_timestamp(true)
        .with_verify(true)
        .with_copy(true)
}
