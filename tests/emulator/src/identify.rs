//! The Identify command and its data structures.

use nvme_spec::identify::{
    Cns, ControllerList, ControllerType, Csi, EntrySize, Frmw, IDENTIFY_BYTES, IO_COMMAND_SET_NVM, Identify,
    IdentifyController, IdentifyControllerNvm, IdentifyNamespace, IdentifyNamespaceIndependent,
    IoCommandSets, LbaFormat, Lpa, NamespaceDescriptorType, NamespaceList, Nstat, Oacs, Oaes, Sgls, Vwc,
};
use nvme_spec::zerocopy::IntoBytes;
use nvme_spec::{Sqe, Status};

use crate::admin::ERROR_LOG_ENTRIES;
use crate::controller::{Controller, Outcome};
use crate::memory::Access;
use crate::pointers::Cursor;
use crate::spec::{EmulatorSpec, SglSupport};

/// Returns a buffer of 4,096 bytes for the data of an admin command.
pub(crate) fn page() -> Box<[u8]> {
    vec![0; IDENTIFY_BYTES].into_boxed_slice()
}

/// Returns `text` as an ASCII field of `BYTES` bytes: padded with spaces, truncated if too long.
pub(crate) fn ascii<const BYTES: usize>(text: &str) -> [u8; BYTES] {
    let mut field = [b' '; BYTES];
    field.iter_mut().zip(text.bytes()).for_each(|(to, from)| *to = from);
    field
}

/// Returns the EUI64 of a namespace, a hash of the serial number and the NSID.
fn eui64(spec: &EmulatorSpec, nsid: u32) -> [u8; 8] {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    let bytes = spec.serial.bytes().chain(nsid.to_be_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, step).to_be_bytes()
}

fn nguid(spec: &EmulatorSpec, nsid: u32) -> [u8; 16] {
    let mut found = [0; 16];
    let (head, tail) = found.split_at_mut(8);
    head.copy_from_slice(&eui64(spec, nsid ^ 0x8000_0000));
    tail.copy_from_slice(&eui64(spec, nsid));
    found
}

impl Controller {
    pub(crate) fn identify(&mut self, sqe: &Sqe) -> Outcome {
        self.page.fill(0);
        self.fill_identify(sqe)?;
        let bytes = IDENTIFY_BYTES as u64;
        self.pointers.resolve_for(&mut self.host, sqe, bytes, self.spec.sgl, Access::Write)?;
        let written = self.pointers.write(&mut self.host, &mut Cursor::default(), &self.page);
        written.map(|()| 0).ok_or(Status::DATA_TRANSFER_ERROR)
    }

    fn fill_identify(&mut self, sqe: &Sqe) -> Result<(), Status> {
        let (command, nsid) = (Identify::new(sqe), sqe.nsid());
        let is_of_set = [Cns::CSI_NAMESPACE, Cns::CSI_CONTROLLER, Cns::CSI_ACTIVE_NAMESPACE_LIST]
            .contains(&command.cns());
        if is_of_set && command.csi() != Csi::NVM {
            return Err(Status::INVALID_IO_COMMAND_SET.dnr());
        }
        match command.cns() {
            Cns::CONTROLLER => self.page.copy_from_slice(self.controller().as_bytes()),
            Cns::NAMESPACE => {
                let index = self.namespace(nsid)?;
                let structure = self.namespace_structure(index, nsid);
                self.page.copy_from_slice(structure.as_bytes());
            }
            Cns::ACTIVE_NAMESPACE_LIST | Cns::CSI_ACTIVE_NAMESPACE_LIST => self.list_namespaces(nsid)?,
            Cns::NAMESPACE_DESCRIPTORS => {
                self.namespace(nsid)?;
                self.describe(nsid);
            }
            // All zeroes: no protection information, no storage tags.
            Cns::CSI_NAMESPACE => {
                self.namespace(nsid)?;
            }
            Cns::CSI_CONTROLLER => {
                let (vsl, wzsl) = (self.spec.vsl, self.spec.wzsl);
                let structure = IdentifyControllerNvm { vsl, wzsl, ..IdentifyControllerNvm::default() };
                self.page.copy_from_slice(structure.as_bytes());
            }
            Cns::INDEPENDENT_NAMESPACE => {
                self.namespace(nsid)?;
                let nstat = Nstat::new().with_ready(true).into_bits();
                let structure =
                    IdentifyNamespaceIndependent { nstat, ..IdentifyNamespaceIndependent::default() };
                self.page.copy_from_slice(structure.as_bytes());
            }
            Cns::CONTROLLER_LIST => {
                let mut list = ControllerList::default();
                if command.cntid() <= 1 {
                    list.count = 1.into();
                    let [first, ..] = &mut list.cntlid;
                    *first = 1.into();
                }
                self.page.copy_from_slice(list.as_bytes());
            }
            Cns::IO_COMMAND_SETS => {
                let mut sets = IoCommandSets::default();
                let [first, ..] = &mut sets.vector;
                *first = IO_COMMAND_SET_NVM.into();
                self.page.copy_from_slice(sets.as_bytes());
            }
            _ => return Err(Status::INVALID_FIELD.dnr()),
        }
        Ok(())
    }

    fn list_namespaces(&mut self, above: u32) -> Result<(), Status> {
        if above >= 0xffff_fffe {
            return Err(Status::INVALID_NAMESPACE_OR_FORMAT.dnr());
        }
        let mut list = NamespaceList::default();
        let there = (1..).take(self.media.len()).filter(|nsid| *nsid > above);
        list.nsid.iter_mut().zip(there).for_each(|(place, nsid)| *place = nsid.into());
        self.page.copy_from_slice(list.as_bytes());
        Ok(())
    }

    fn describe(&mut self, nsid: u32) {
        let (eui64, nguid) = (eui64(&self.spec, nsid), nguid(&self.spec, nsid));
        let descriptors: [(NamespaceDescriptorType, &[u8]); 3] = [
            (NamespaceDescriptorType::EUI64, &eui64),
            (NamespaceDescriptorType::NGUID, &nguid),
            (NamespaceDescriptorType::CSI, &[Csi::NVM.0]),
        ];
        let bytes = descriptors.iter().flat_map(|(kind, id)| {
            // An identifier has at most 16 bytes.
            [kind.0, u8::try_from(id.len()).unwrap_or_default(), 0, 0].into_iter().chain(id.iter().copied())
        });
        self.page.iter_mut().zip(bytes).for_each(|(to, from)| *to = from);
    }

    fn controller(&self) -> IdentifyController {
        let spec = &self.spec;
        let sizes = |size| EntrySize::new().with_required(size).with_largest(size).into_bits();
        let support = match spec.sgl {
            SglSupport::None => 0,
            SglSupport::Bytes => 1,
            SglSupport::Dwords => 2,
        };
        let vwc = Vwc::new().with_present(spec.has_write_cache).with_flush_all(Vwc::FLUSH_ALL_SUPPORTED);
        let nn = u32::try_from(spec.namespaces.len()).unwrap_or(u32::MAX);
        IdentifyController {
            vid: spec.id.vendor.into(),
            ssvid: 0x1af4.into(),
            sn: ascii(&spec.serial),
            mn: ascii(&spec.model),
            fr: ascii(&spec.firmware),
            mdts: spec.mdts,
            cntlid: 1.into(),
            ver: spec.version.into_bits().into(),
            rtd3e: spec.rtd3e_us.into(),
            oaes: Oaes::new()
                .with_namespace_attribute(true)
                .with_firmware_activation(true)
                .into_bits()
                .into(),
            cntrltype: ControllerType::IO,
            oacs: Oacs::new().with_doorbell_buffer(spec.has_doorbell_buffer).into_bits().into(),
            acl_z: spec.acl_z,
            aerl_z: spec.aerl_z,
            frmw: Frmw::new().with_first_slot_read_only(true).with_slots(1).into_bits(),
            lpa: Lpa::new().with_extended_data(true).into_bits(),
            elpe_z: u8::try_from(ERROR_LOG_ENTRIES - 1).unwrap_or(u8::MAX),
            wctemp: 343.into(),
            cctemp: 353.into(),
            sqes: sizes(6),
            cqes: sizes(4),
            nn: nn.into(),
            oncs: spec.oncs_reported().into_bits().into(),
            vwc: vwc.into_bits(),
            cdfs: spec.cdfs.into(),
            sgls: Sgls::new().with_support(support).into_bits().into(),
            subnqn: self.subnqn(),
            vs: self.vendor_specific(),
            ..IdentifyController::default()
        }
    }

    fn vendor_specific(&self) -> [u8; 1024] {
        let mut own = [0; 1024];
        own[3] = self.spec.vendor_stripe;
        own
    }

    fn subnqn(&self) -> [u8; 256] {
        let mut field = [0; 256];
        let name = b"nqn.2014-08.org.nvmexpress:emulated:".iter().copied().chain(self.spec.serial.bytes());
        field.iter_mut().take(223).zip(name).for_each(|(to, from)| *to = from);
        field
    }

    fn namespace_structure(&self, index: usize, nsid: u32) -> IdentifyNamespace {
        let Some((spec, medium)) = self.spec.namespaces.get(index).zip(self.media.get(index)) else {
            return IdentifyNamespace::default();
        };
        let mut structure = IdentifyNamespace {
            nsze: medium.blocks.into(),
            ncap: medium.blocks.into(),
            nuse: medium.blocks.into(),
            dlfeat: spec.dlfeat.into_bits(),
            noiob: spec.noiob.into(),
            mssrl: spec.mssrl.into(),
            mcl: spec.mcl.into(),
            msrc_z: spec.msrc_z,
            nguid: nguid(&self.spec, nsid),
            eui64: eui64(&self.spec, nsid),
            ..IdentifyNamespace::default()
        };
        let [first, ..] = &mut structure.lbaf;
        // Block sizes are 2^9 to 2^16.
        let lbads = u8::try_from(spec.block_bytes.trailing_zeros()).unwrap_or_default();
        *first = LbaFormat { ms: spec.metadata_bytes.into(), lbads, rp: 0 };
        structure
    }
}
