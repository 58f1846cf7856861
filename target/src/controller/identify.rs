//! Identify (Base 2.0 section 5.17): namespaces, lists and command sets. Identify Controller is in
//! `identify_controller`.

use nvme_spec::identify::{
    CSI_BYTES, Cns, Csi, Dlfeat, IO_COMMAND_SET_NVM, Identify, IdentifyNamespace,
    IdentifyNamespaceIndependent, IoCommandSets, LbaFormat, NGUID_BYTES, NamespaceDescriptor,
    NamespaceDescriptorType, NamespaceList, Nmic, Nsattr, Nsfeat, Nstat, UUID_BYTES,
};
use nvme_spec::sqe::NSID_ALL;
use nvme_spec::status::Status;
use nvme_spec::zerocopy::little_endian::{U16, U32, U64, U128};
use nvme_spec::zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::limits::{COPY_RANGES_MAX, PREFERRED_BYTES, copy_blocks_max, copy_range_blocks_max};
use super::{Context, Controller, Kind, Window};
use crate::refusal::{Refusal, field};
use crate::snapshot::{NSID_MAX, Namespace, Subsystem};

/// CNTID FFFFh: the controller that executes the command.
const CNTID_SELF: u16 = 0xffff;

impl Controller {
    /// Returns the controller's subsystem; Internal Error if the snapshot no longer has it.
    pub(super) fn subsystem<'a>(&self, cx: &Context<'a>) -> Result<&'a Subsystem, Refusal> {
        let subsystem = cx.snapshot.subsystem(&self.shared.subsystem_nqn);
        subsystem.map(AsRef::as_ref).ok_or(Refusal::of(Status::INTERNAL_ERROR, None))
    }

    /// Checks that this kind of controller supports the data structure of CNS and CSI; else Invalid Field.
    pub(super) fn check_identify(&self, identify: Identify<'_>) -> Result<(), Refusal> {
        let is_known = match (self.kind, identify.cns()) {
            (_, Cns::CONTROLLER) => true,
            (
                Kind::Io,
                Cns::NAMESPACE
                | Cns::ACTIVE_NAMESPACE_LIST
                | Cns::NAMESPACE_DESCRIPTORS
                | Cns::INDEPENDENT_NAMESPACE
                | Cns::IO_COMMAND_SETS,
            ) => true,
            (Kind::Io, Cns::CSI_NAMESPACE | Cns::CSI_CONTROLLER | Cns::CSI_ACTIVE_NAMESPACE_LIST) => {
                if identify.csi() != Csi::NVM {
                    return Err(Refusal::invalid(field::CDW11_TOP));
                }
                true
            }
            _ => false,
        };
        if is_known { Ok(()) } else { Err(Refusal::invalid(field::CDW10)) }
    }

    pub(super) fn identify(
        &self,
        cx: &Context<'_>,
        identify: Identify<'_>,
        data: &mut [u8],
    ) -> Result<(), Refusal> {
        let nsid = identify.sqe().nsid();
        match (self.kind, identify.cns()) {
            (Kind::Io, Cns::CONTROLLER) => self.identify_io(cx, self.subsystem(cx)?, view(data)?),
            (Kind::Discovery, Cns::CONTROLLER) => self.identify_discovery(view(data)?),
            (_, Cns::NAMESPACE) => {
                if let Some(namespace) = find_or_inactive(self.subsystem(cx)?, nsid)? {
                    self.identify_namespace(namespace, view(data)?);
                }
            }
            (_, Cns::INDEPENDENT_NAMESPACE) => {
                if let Some(namespace) = find_or_inactive(self.subsystem(cx)?, nsid)? {
                    identify_independent(namespace, view(data)?);
                }
            }
            (_, Cns::CSI_NAMESPACE) => {
                // No protection information, no storage tag: all zero, as for an inactive namespace.
                find_or_inactive(self.subsystem(cx)?, nsid)?;
            }
            (_, Cns::CSI_CONTROLLER) => Controller::identify_nvm(view(data)?),
            (_, Cns::ACTIVE_NAMESPACE_LIST | Cns::CSI_ACTIVE_NAMESPACE_LIST) => {
                active_list(self.subsystem(cx)?, nsid, view(data)?)?;
            }
            (_, Cns::NAMESPACE_DESCRIPTORS) => {
                namespace_descriptors(find_active(self.subsystem(cx)?, nsid)?, data)
            }
            (_, Cns::IO_COMMAND_SETS) => self.command_sets(cx, identify.cntid(), view(data)?)?,
            _ => return Err(Refusal::invalid(field::CDW10)),
        }
        Ok(())
    }

    /// CNS 00h: Identify Namespace.
    fn identify_namespace(&self, namespace: &Namespace, id: &mut IdentifyNamespace) {
        let geometry = namespace.source.geometry();
        let block_bytes = geometry.block_bytes.max(1);
        let preferred_z = blocks_z(PREFERRED_BYTES, block_bytes);
        let optimal_z = blocks_z(self.transfer_bytes, block_bytes);
        id.nsze = U64::new(geometry.block_count);
        id.ncap = U64::new(geometry.block_count);
        id.nuse =
            U64::new(blocks_used(namespace, geometry.block_count, block_bytes, geometry.can_deallocate));
        id.nsfeat = nsfeat(geometry.can_deallocate).into_bits();
        id.nmic = Nmic::new().with_shared(true).into_bits();
        if geometry.can_deallocate {
            let is_zero = namespace.source.deallocated_is_zero();
            let reads = if is_zero { Dlfeat::READS_ZEROES } else { Dlfeat::READS_NOT_REPORTED };
            let dlfeat = Dlfeat::new().with_read_behavior(reads);
            id.dlfeat = dlfeat.with_deallocate_in_write_zeroes(true).into_bits();
        }
        id.nvmcap = U128::new(u128::from(geometry.bytes()));
        for preferred in [&mut id.npwg_z, &mut id.npwa_z, &mut id.npdg_z, &mut id.npda_z] {
            *preferred = U16::new(preferred_z);
        }
        id.nows_z = U16::new(optimal_z);
        id.mssrl = U16::new(copy_range_blocks_max(self.transfer_bytes, block_bytes));
        id.mcl = U32::new(copy_blocks_max(self.transfer_bytes, block_bytes));
        id.msrc_z = u8::try_from(COPY_RANGES_MAX - 1).unwrap_or(u8::MAX);
        id.nsattr = Nsattr::new().with_write_protected(geometry.is_read_only).into_bits();
        id.nguid = namespace.nguid;
        let lbads = block_bytes.checked_ilog2().and_then(|lbads| u8::try_from(lbads).ok()).unwrap_or(0);
        if let Some(format) = id.lbaf.first_mut() {
            *format = LbaFormat { ms: U16::new(0), lbads, rp: 0 };
        }
    }

    /// CNS 1Ch: the NVM command set, in the only combination. Invalid Field if CNTID is not of the subsystem.
    fn command_sets(&self, cx: &Context<'_>, cntid: u16, sets: &mut IoCommandSets) -> Result<(), Refusal> {
        let is_self = cntid == CNTID_SELF || cntid == self.shared.cntlid;
        if !is_self && cx.registry.find(&self.shared.subsystem_nqn, cntid).is_none() {
            return Err(Refusal::invalid(field::CDW10_HIGH));
        }
        if let Some(first) = sets.vector.first_mut() {
            *first = U64::new(IO_COMMAND_SET_NVM);
        }
        Ok(())
    }
}

/// CNS 08h: I/O Command Set Independent Identify Namespace.
fn identify_independent(namespace: &Namespace, id: &mut IdentifyNamespaceIndependent) {
    let geometry = namespace.source.geometry();
    id.nmic = Nmic::new().with_shared(true).into_bits();
    id.nsattr = Nsattr::new().with_write_protected(geometry.is_read_only).into_bits();
    id.nstat = Nstat::new().with_ready(true).into_bits();
}

/// CNS 02h and 07h: NSIDs of active namespaces above `nsid`, ascending.
fn active_list(subsystem: &Subsystem, nsid: u32, list: &mut NamespaceList) -> Result<(), Refusal> {
    // Base 2.0 section 5.17.2.2: FFFFFFFEh and FFFFFFFFh are refused.
    if nsid >= NSID_ALL - 1 {
        return Err(Refusal::namespace());
    }
    let above = subsystem.active().map(|namespace| namespace.nsid).filter(|other| *other > nsid);
    for (entry, active) in list.nsid.iter_mut().zip(above) {
        *entry = U32::new(active);
    }
    Ok(())
}

/// CNS 03h: UUID, NGUID and command set identifier; no namespace has an EUI-64.
fn namespace_descriptors(namespace: &Namespace, data: &mut [u8]) {
    let mut window = Window::new(0, data);
    let mut at = 0;
    let mut put = |kind, bytes: u8, identifier: &[u8]| {
        window.put(at, NamespaceDescriptor::new(kind, bytes).as_bytes());
        window.put(at + 4, identifier);
        at += 4 + u64::from(bytes);
    };
    if namespace.uuid != [0; 16] {
        put(NamespaceDescriptorType::UUID, UUID_BYTES, &namespace.uuid);
    }
    if namespace.nguid != [0; 16] {
        put(NamespaceDescriptorType::NGUID, NGUID_BYTES, &namespace.nguid);
    }
    put(NamespaceDescriptorType::CSI, CSI_BYTES, &[Csi::NVM.0]);
}

fn nsfeat(can_deallocate: bool) -> Nsfeat {
    Nsfeat::new().with_thin(can_deallocate).with_preferred_sizes(true)
}

/// `bytes` as a 0's based number of blocks, at least one and at most 65,536 blocks.
fn blocks_z(bytes: u32, block_bytes: u32) -> u16 {
    u16::try_from((bytes / block_bytes).saturating_sub(1)).unwrap_or(u16::MAX)
}

/// NUSE in blocks: the used space, rounded up, of a disk that can deallocate, at most the disk's size. For
/// other disks the size.
fn blocks_used(namespace: &Namespace, block_count: u64, block_bytes: u32, can_deallocate: bool) -> u64 {
    if !can_deallocate {
        return block_count;
    }
    namespace.source.usage().bytes_used.div_ceil(u64::from(block_bytes)).min(block_count)
}

/// Returns the namespace; `None` for a valid NSID that is not active. Invalid Namespace or Format for an NSID
/// of 0 or above [`NSID_MAX`].
fn find_or_inactive(subsystem: &Subsystem, nsid: u32) -> Result<Option<&Namespace>, Refusal> {
    if nsid == 0 || nsid > NSID_MAX {
        return Err(Refusal::namespace());
    }
    Ok(subsystem.namespace(nsid).map(AsRef::as_ref))
}

/// Returns the namespace; Invalid Namespace or Format for an NSID that is not active.
pub(super) fn find_active(subsystem: &Subsystem, nsid: u32) -> Result<&Namespace, Refusal> {
    subsystem.namespace(nsid).map(AsRef::as_ref).ok_or(Refusal::namespace())
}

/// Returns the data buffer as structure `T`; Internal Error if the lengths differ.
pub(super) fn view<T>(data: &mut [u8]) -> Result<&mut T, Refusal>
where
    T: FromBytes + IntoBytes + KnownLayout + Immutable,
{
    T::mut_from_bytes(data).map_err(|_| Refusal::of(Status::INTERNAL_ERROR, None))
}
