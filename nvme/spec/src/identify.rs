//! Identify: the command and its data structures (Base 2.0 section 5.17; NVM Command Set 1.0 section
//! 4.1.5).
//!
//! The two big structures have files of their own: `controller` (CNS 01h, 06h), its bits in `capability`,
//! and `namespace` (CNS 00h, 05h, 08h and the identification descriptors of 03h). Here are the command, the
//! lists and the command set vectors.

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

/// Bytes of every Identify data structure.
pub const IDENTIFY_BYTES: usize = 4096;

/// Most namespace identifiers in a list.
pub const NAMESPACE_LIST_ENTRIES: usize = 1024;

/// Most controller identifiers in a list.
pub const CONTROLLER_LIST_ENTRIES: usize = 2047;

open_enum! {
    /// CNS: which structure is asked for (Base 2.0 figure "Identify - CNS Values").
    pub struct Cns: u8 {
        /// Identify Namespace of an active NSID.
        NAMESPACE = 0x00,
        /// Identify Controller.
        CONTROLLER = 0x01,
        /// Active NSIDs above the given one.
        ACTIVE_NAMESPACE_LIST = 0x02,
        /// Namespace Identification Descriptors.
        NAMESPACE_DESCRIPTORS = 0x03,
        /// NVM Sets.
        NVM_SET_LIST = 0x04,
        /// Identify Namespace of a command set.
        CSI_NAMESPACE = 0x05,
        /// Identify Controller of a command set.
        CSI_CONTROLLER = 0x06,
        /// Active NSIDs of a command set.
        CSI_ACTIVE_NAMESPACE_LIST = 0x07,
        /// Identify Namespace, independent of the command set.
        INDEPENDENT_NAMESPACE = 0x08,
        /// Controllers of the subsystem.
        CONTROLLER_LIST = 0x13,
        /// Combinations of command sets.
        IO_COMMAND_SETS = 0x1c,
    }
}

open_enum! {
    /// CSI: Command Set Identifier (Base 2.0 figure "Command Set Identifiers").
    pub struct Csi: u8 {
        /// NVM Command Set.
        NVM = 0x00,
        /// Zoned Namespaces Command Set.
        ZONED = 0x02,
    }
}

/// Dword 10 of Identify.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct IdentifyCdw10 {
    /// CNS; see [`Cns`].
    pub cns: u8,
    __: u8,
    /// CNTID: from which controller identifier on, in the CNS values that ask for controllers.
    pub cntid: u16,
}

/// Dword 11 of Identify.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct IdentifyCdw11 {
    #[bits(24)]
    __: u32,
    /// CSI; see [`Csi`].
    pub csi: u8,
}

wire_bits!(IdentifyCdw10 => U32, IdentifyCdw11 => U32);

view! {
    /// Identify (Base 2.0 section 5.17).
    pub struct Identify(sqe) {
        /// CNS.
        cns: Cns = Cns(IdentifyCdw10::from(sqe.cdw10).cns()),
        /// CNTID.
        cntid: u16 = IdentifyCdw10::from(sqe.cdw10).cntid(),
        /// CSI.
        csi: Csi = Csi(IdentifyCdw11::from(sqe.cdw11).csi()),
    }
}

/// Builders for hosts.
impl Sqe {
    /// Identify. `cntid` is 0 where CNS does not ask for controllers; CSI is NVM.
    #[must_use]
    pub fn identify(cid: u16, cns: Cns, nsid: u32, cntid: u16) -> Self {
        let mut sqe = Self::new(AdminOpcode::IDENTIFY.0, cid, nsid);
        sqe.cdw10 = IdentifyCdw10::new().with_cns(cns.0).with_cntid(cntid).into();
        sqe
    }

    /// Identify of one of the CNS values that take a command set.
    #[must_use]
    pub fn identify_csi(cid: u16, cns: Cns, nsid: u32, csi: Csi) -> Self {
        let mut sqe = Self::identify(cid, cns, nsid, 0);
        sqe.cdw11 = IdentifyCdw11::new().with_csi(csi.0).into();
        sqe
    }
}

wire! {
    /// A list of NSIDs, ascending, zero after the last (CNS 02h, 07h, 10h, 1Ah; Base 2.0 section 4.4.2).
    pub struct NamespaceList[4096] {
        /// The NSIDs.
        nsid @ 0: [U32; NAMESPACE_LIST_ENTRIES],
    }
}

impl NamespaceList {
    /// The NSIDs up to the first zero.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.nsid.iter().map(|nsid| nsid.get()).take_while(|&nsid| nsid != 0)
    }
}

wire! {
    /// A list of controller identifiers, ascending (CNS 12h, 13h; Base 2.0 section 4.4.1).
    pub struct ControllerList[4096] {
        /// How many identifiers follow.
        count @ 0: U16,
        /// The identifiers.
        cntlid @ 2: [U16; CONTROLLER_LIST_ENTRIES],
    }
}

wire! {
    /// Combinations of command sets (CNS 1Ch; Base 2.0 figure "Identify I/O Command Set Data Structure").
    pub struct IoCommandSets[4096] {
        /// One bit for each CSI that may be used together with the others of its entry; zero after the last.
        vector @ 0: [U64; 512],
    }
}

/// Bit of a vector of [`IoCommandSets`]: NVM Command Set.
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
