//! Identify: the command and its data structures (Base 2.0 section 5.17; NVM Command Set 1.0 section
//! 4.1.5).
//!
//! This file contains the command, the lists and the command set vectors. `controller` contains CNS 01h and
//! 06h, `capability` the bitfields of CNS 01h. `namespace` contains CNS 00h, 08h and the identification
//! descriptors of 03h. CNS 04h and 05h have no structure here.

mod capability;
mod controller;
mod namespace;

use bitfield_struct::bitfield;
use zerocopy::little_endian::{U16, U32, U64};

use crate::opcode::AdminOpcode;
use crate::sqe::Sqe;

pub use capability::{Cmic, Ctratt, EntrySize, Frmw, Fuses, Lpa, Oacs, Oaes, Ofcs, Oncs, Sgls, Vwc};
pub use controller::{ControllerType, DiscoveryControllerType, IdentifyController, IdentifyControllerNvm};
pub use namespace::{
    CSI_BYTES, Dlfeat, EUI64_BYTES, Flbas, IdentifyNamespace, IdentifyNamespaceIndependent, LbaFormat,
    NGUID_BYTES, NamespaceDescriptor, NamespaceDescriptorType, Nmic, Nsattr, Nsfeat, Nstat, UUID_BYTES,
};

/// Size of every Identify data structure in bytes.
pub const IDENTIFY_BYTES: usize = 4096;

/// Maximum number of NSIDs in a [`NamespaceList`].
pub const NAMESPACE_LIST_ENTRIES: usize = 1024;

/// Maximum number of CNTLIDs in a [`ControllerList`].
pub const CONTROLLER_LIST_ENTRIES: usize = 2047;

open_enum! {
    /// CNS: Controller or Namespace Structure (Base 2.0 figure "Identify - CNS Values").
    pub struct Cns: u8 {
        /// [`IdentifyNamespace`] of an active NSID.
        NAMESPACE = 0x00,
        /// [`IdentifyController`].
        CONTROLLER = 0x01,
        /// [`NamespaceList`] of active NSIDs greater than NSID of the command.
        ACTIVE_NAMESPACE_LIST = 0x02,
        /// List of [`NamespaceDescriptor`].
        NAMESPACE_DESCRIPTORS = 0x03,
        /// NVM Set List.
        NVM_SET_LIST = 0x04,
        /// Identify Namespace of the I/O Command Set in CSI.
        CSI_NAMESPACE = 0x05,
        /// Identify Controller of the I/O Command Set in CSI; [`IdentifyControllerNvm`] for NVM.
        CSI_CONTROLLER = 0x06,
        /// As `ACTIVE_NAMESPACE_LIST`, only namespaces of the I/O Command Set in CSI.
        CSI_ACTIVE_NAMESPACE_LIST = 0x07,
        /// [`IdentifyNamespaceIndependent`].
        INDEPENDENT_NAMESPACE = 0x08,
        /// [`ControllerList`] of the NVM subsystem.
        CONTROLLER_LIST = 0x13,
        /// [`IoCommandSets`].
        IO_COMMAND_SETS = 0x1c,
    }
}

open_enum! {
    /// CSI: Command Set Identifier (Base 2.0 figure "Command Set Identifiers").
    pub struct Csi: u8 {
        NVM = 0x00,
        /// Zoned Namespace Command Set.
        ZONED = 0x02,
    }
}

/// Dword 10 of Identify: CNS, CNTID.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct IdentifyCdw10 {
    /// CNS: Controller or Namespace Structure; see [`Cns`].
    pub cns: u8,
    __: u8,
    /// CNTID: Controller Identifier, the lowest one of the returned list.
    pub cntid: u16,
}

/// Dword 11 of Identify: CSI.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct IdentifyCdw11 {
    #[bits(24)]
    __: u32,
    /// CSI: Command Set Identifier; see [`Csi`].
    pub csi: u8,
}

wire_bits!(IdentifyCdw10 => U32, IdentifyCdw11 => U32);

view! {
    /// Identify (Base 2.0 section 5.17).
    pub struct Identify(sqe) {
        /// CNS: Controller or Namespace Structure.
        cns: Cns = Cns(IdentifyCdw10::from(sqe.cdw10).cns()),
        /// CNTID: Controller Identifier, the lowest one of the returned list.
        cntid: u16 = IdentifyCdw10::from(sqe.cdw10).cntid(),
        /// CSI: Command Set Identifier, for the CNS values of a command set.
        csi: Csi = Csi(IdentifyCdw11::from(sqe.cdw11).csi()),
    }
}

/// Builders for hosts.
impl Sqe {
    /// Builds Identify with CSI 0 (NVM). `cntid` is 0 unless CNS returns a controller list.
    #[must_use]
    pub fn identify(cid: u16, cns: Cns, nsid: u32, cntid: u16) -> Self {
        let mut sqe = Self::new(AdminOpcode::IDENTIFY.0, cid, nsid);
        sqe.cdw10 = IdentifyCdw10::new().with_cns(cns.0).with_cntid(cntid).into();
        sqe
    }

    /// Builds Identify with CSI, for the CNS values of a command set; CNTID is 0.
    #[must_use]
    pub fn identify_csi(cid: u16, cns: Cns, nsid: u32, csi: Csi) -> Self {
        let mut sqe = Self::identify(cid, cns, nsid, 0);
        sqe.cdw11 = IdentifyCdw11::new().with_csi(csi.0).into();
        sqe
    }
}

wire! {
    /// Namespace List: NSIDs in ascending order, unused entries are zero (CNS 02h, 07h, 10h, 1Ah; Base 2.0
    /// section 4.4.2).
    pub struct NamespaceList[4096] {
        /// NSIDs in ascending order, then zeroes.
        nsid @ 0: [U32; NAMESPACE_LIST_ENTRIES],
    }
}

impl NamespaceList {
    /// Returns the NSIDs before the first unused (zero) entry.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.nsid.iter().map(|nsid| nsid.get()).take_while(|&nsid| nsid != 0)
    }
}

wire! {
    /// Controller List: CNTLIDs in ascending order (CNS 12h, 13h; Base 2.0 section 4.4.1).
    pub struct ControllerList[4096] {
        /// Count of CNTLIDs in the list.
        count @ 0: U16,
        /// CNTLIDs in ascending order; the first `count` entries are valid.
        cntlid @ 2: [U16; CONTROLLER_LIST_ENTRIES],
    }
}

wire! {
    /// I/O Command Set combinations (CNS 1Ch; Base 2.0 figure "Identify I/O Command Set Data Structure").
    pub struct IoCommandSets[4096] {
        /// I/O Command Set Vectors: one supported combination per entry, bit n is CSI n; unused entries are
        /// zero.
        vector @ 0: [U64; 512],
    }
}

/// NVM Command Set (CSI 0) in a vector of [`IoCommandSets`].
pub const IO_COMMAND_SET_NVM: u64 = 1 << 0;

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::IntoBytes;

    #[test]
    fn identify_has_cns_and_cntid_in_dword_10_and_csi_on_top_of_dword_11() {
        let sqe = Sqe::identify(0x17, Cns::CONTROLLER_LIST, 2, 0x1234);
        assert_eq!(sqe.as_bytes()[..8], [6, 0x40, 0x17, 0, 2, 0, 0, 0]);
        assert_eq!(sqe.as_bytes()[40..44], [0x13, 0, 0x34, 0x12]);
        let view = Identify::new(&sqe);
        assert_eq!((view.cns(), view.cntid(), view.csi()), (Cns::CONTROLLER_LIST, 0x1234, Csi::NVM));
        let sqe = Sqe::identify_csi(0, Cns::CSI_NAMESPACE, 1, Csi::ZONED);
        assert_eq!(sqe.as_bytes()[44..48], [0, 0, 0, 2]);
        assert_eq!(Identify::new(&sqe).csi(), Csi::ZONED);
    }

    #[test]
    fn a_namespace_list_ends_at_its_first_zero() {
        let mut list = NamespaceList::default();
        list.nsid[0] = U32::new(1);
        list.nsid[1] = U32::new(7);
        assert!(list.iter().eq([1, 7]));
        assert_eq!(list.as_bytes()[..8], [1, 0, 0, 0, 7, 0, 0, 0]);
    }
}
