//! What the controller for tests answers.

use std::sync::{Arc, Mutex};

use spindle_nvme_initiator::nvme_spec::fabrics::{Connect, ConnectResult, Property};
use spindle_nvme_initiator::nvme_spec::feature::{FeatureId, NumberOfQueues, SetFeatures};
use spindle_nvme_initiator::nvme_spec::identify::{
    Cns, Identify, IdentifyController, IdentifyNamespace, NamespaceDescriptor, NamespaceDescriptorType,
    NamespaceList, Oaes, UUID_BYTES,
};
use spindle_nvme_initiator::nvme_spec::io::{CopyRangeFormat0, DsmRange};
use spindle_nvme_initiator::nvme_spec::log::{
    DISCOVERY_ENTRY_BYTES, DiscoveryLogEntry, DiscoveryLogHeader, GetLogPage,
};
use spindle_nvme_initiator::nvme_spec::register::{self, Cap, Cc, Csts};
use spindle_nvme_initiator::nvme_spec::sqe::Fuse;
use spindle_nvme_initiator::nvme_spec::status::Status;
use spindle_nvme_initiator::nvme_spec::vendor::{END_FORMER_ASSOCIATIONS, SpindleFeatures};
use spindle_nvme_initiator::nvme_spec::zerocopy::{FromBytes, IntoBytes};
use spindle_nvme_initiator::nvme_spec::{AdminOpcode, Cqe, FabricsType, IoOpcode, Nqn, Sqe};
use spindle_nvme_initiator::{Buf, Pool};
use spindle_nvme_transport::Reply;

/// Bytes of a block.
pub const BLOCK: u32 = 512;
/// Blocks of the namespace.
const BLOCKS: usize = 4096;
/// Most bytes of one command.
pub const TRANSFER_BYTES: u32 = 256 << 10;
/// Queues that it grants.
pub const QUEUES: u16 = 64;
/// The controller that it is.
const CNTLID: u16 = 0x123;

/// The namespace's bytes, and what else the controller knows. Cloning gives the same.
#[derive(Clone)]
pub struct Disk {
    bytes: Arc<Mutex<Vec<u8>>>,
    /// Entries of the discovery log, and its generation.
    pub log: Arc<Mutex<(u64, u64)>>,
    /// NGUID of namespace 1.
    pub nguid: [u8; 16],
    /// Its UUID; zero: the controller has no descriptors of namespaces.
    pub uuid: [u8; 16],
    /// It says that it knows End Former Associations.
    pub is_spindle: bool,
    /// Dword 0 of the answers to that; `None`: it does not know it after all.
    pub former: Option<u32>,
    /// Events that it has to tell.
    pub events: Arc<Mutex<Vec<u32>>>,
    /// VWC and the last byte of SN.
    pub vwc_and_sn: Arc<Mutex<(u8, u8)>>,
    /// The last Compare of a fused pair was equal.
    is_equal: bool,
    cc: Cc,
}

impl Disk {
    pub fn new() -> Disk {
        let bytes = Arc::new(Mutex::new(vec![0; BLOCKS * BLOCK as usize]));
        let log = Arc::new(Mutex::new((1, 3)));
        Disk {
            bytes,
            log,
            nguid: [9; 16],
            uuid: [0; 16],
            is_spindle: false,
            former: None,
            events: Arc::default(),
            vwc_and_sn: Arc::default(),
            is_equal: false,
            cc: Cc::new(),
        }
    }

    /// The answer to a command; `None`: it waits for an event.
    pub fn execute(
        &mut self,
        sqe: &Sqe,
        data: Option<Buf>,
        bytes: u32,
        qid: &mut u16,
        pool: &Pool,
    ) -> Option<Reply> {
        let result = if sqe.is_fabrics() {
            self.fabrics(sqe, qid)
        } else if *qid == 0 {
            if sqe.admin_opcode() == AdminOpcode::ASYNC_EVENT_REQUEST {
                return None;
            }
            self.admin(sqe, bytes, pool)
        } else {
            self.io(sqe, data, bytes, pool)
        };
        Some(match result {
            Ok((cqe, data)) => Reply {
                slot: super::any_slot(),
                cqe,
                data,
                may_omit_cqe: *qid != 0 && sqe.fuse() == Fuse::NONE,
            },
            Err(status) => failed(sqe, status),
        })
    }

    fn fabrics(&mut self, sqe: &Sqe, qid: &mut u16) -> Result<(Cqe, Option<Buf>), Status> {
        let cqe = Cqe::new(sqe.cid(), Status::SUCCESS);
        match sqe.fctype() {
            FabricsType::CONNECT => {
                *qid = Connect::new(sqe).qid();
                Ok((cqe.with_result(ConnectResult::new().with_cntlid(CNTLID).into_bits()), None))
            }
            FabricsType::PROPERTY_GET => {
                let value = match Property::new(sqe).offset() {
                    register::CAP => Cap::new().with_mqes_z(127).with_to(4).with_css_nvm(true).into_bits(),
                    register::CSTS => {
                        let shst = if self.cc.shn() == 0 { 0 } else { 2 };
                        u64::from(Csts::new().with_rdy(self.cc.en()).with_shst(shst).into_bits())
                    }
                    register::VS => 0x0002_0000,
                    _ => 0,
                };
                Ok((cqe.with_result_u64(value), None))
            }
            FabricsType::PROPERTY_SET => {
                self.cc = Cc::from_bits(Property::new(sqe).value_u32());
                Ok((cqe, None))
            }
            _ => Err(Status::INVALID_OPCODE.dnr()),
        }
    }

    fn admin(&mut self, sqe: &Sqe, bytes: u32, pool: &Pool) -> Result<(Cqe, Option<Buf>), Status> {
        let cqe = Cqe::new(sqe.cid(), Status::SUCCESS);
        let with = |source: &[u8]| {
            let mut buf = pool.take(bytes).expect("buffer");
            buf.clear();
            let count = source.len().min(bytes as usize);
            buf.copy_in(0, &source[..count]);
            Some(buf)
        };
        match sqe.admin_opcode() {
            AdminOpcode::IDENTIFY => Ok((cqe, with(&self.identify(sqe)?))),
            AdminOpcode::SET_FEATURES => {
                let is_queues = SetFeatures::new(sqe).fid() == FeatureId::NUMBER_OF_QUEUES;
                let granted = if is_queues { NumberOfQueues::both(QUEUES.into()).into_bits() } else { 0 };
                Ok((cqe.with_result(granted), None))
            }
            AdminOpcode::GET_LOG_PAGE => {
                let command = GetLogPage::new(sqe);
                let offset = usize::try_from(command.lpo()).expect("an offset");
                let log = self.discovery_log();
                Ok((cqe, with(log.get(offset..).unwrap_or_default())))
            }
            AdminOpcode::KEEP_ALIVE => Ok((cqe, None)),
            END_FORMER_ASSOCIATIONS => {
                let result = self.former.ok_or(Status::INVALID_OPCODE.dnr())?;
                Ok((cqe.with_result(result), None))
            }
            _ => Err(Status::INVALID_OPCODE.dnr()),
        }
    }

    fn identify(&self, sqe: &Sqe) -> Result<Vec<u8>, Status> {
        let (nguid, uuid) = (self.nguid, self.uuid);
        match Identify::new(sqe).cns() {
            Cns::CONTROLLER => {
                let mut identify = IdentifyController { mdts: 6, ..IdentifyController::default() };
                identify.cntlid.set(CNTLID);
                (identify.vwc, identify.sn[19]) = *self.vwc_and_sn.lock().expect("lock");
                identify.ioccsz.set((64 + 4096) / 16);
                identify.oaes.set(Oaes::new().with_namespace_attribute(true).into_bits());
                if self.is_spindle {
                    identify.set_spindle_features(SpindleFeatures::new().with_end_former_associations(true));
                }
                Ok(identify.as_bytes().to_vec())
            }
            Cns::NAMESPACE => {
                let mut identify = IdentifyNamespace { nguid, ..IdentifyNamespace::default() };
                identify.nsze.set(BLOCKS as u64);
                identify.lbaf[0].lbads = 9;
                Ok(identify.as_bytes().to_vec())
            }
            Cns::NAMESPACE_DESCRIPTORS if uuid != [0; 16] => {
                let header = NamespaceDescriptor::new(NamespaceDescriptorType::UUID, UUID_BYTES);
                Ok([header.as_bytes(), &uuid].concat())
            }
            Cns::ACTIVE_NAMESPACE_LIST => {
                let mut list = NamespaceList::default();
                list.nsid[0].set(1);
                Ok(list.as_bytes().to_vec())
            }
            _ => Err(Status::INVALID_FIELD.dnr()),
        }
    }

    fn discovery_log(&self) -> Vec<u8> {
        let (generation, entries) = *self.log.lock().expect("lock");
        let mut log = DiscoveryLogHeader::new(generation, entries).as_bytes().to_vec();
        for entry in 0..entries {
            let name = Nqn::new(&format!("nqn.2026-01.io.spindle:{entry}")).expect("a name");
            let entry = DiscoveryLogEntry { subnqn: name.to_field(), ..DiscoveryLogEntry::default() };
            log.extend_from_slice(entry.as_bytes());
        }
        assert_eq!(log.len() % DISCOVERY_ENTRY_BYTES, 0);
        log
    }

    fn io(
        &mut self,
        sqe: &Sqe,
        data: Option<Buf>,
        bytes: u32,
        pool: &Pool,
    ) -> Result<(Cqe, Option<Buf>), Status> {
        let cqe = Cqe::new(sqe.cid(), Status::SUCCESS);
        let disk = Arc::clone(&self.bytes);
        let mut disk = disk.lock().expect("lock");
        let sent = data.map(|buf| buf.segments().flatten().copied().collect::<Vec<u8>>()).unwrap_or_default();
        match sqe.io_opcode() {
            IoOpcode::READ => {
                let range = range(sqe.slba(), sqe.blocks())?;
                let mut buf = pool.take(bytes).expect("buffer");
                buf.copy_in(0, &disk[range]);
                return Ok((cqe, Some(buf)));
            }
            IoOpcode::WRITE if sqe.fuse() == Fuse::SECOND && !self.is_equal => {
                return Err(Status::ABORTED_FAILED_FUSED);
            }
            IoOpcode::WRITE => disk[range(sqe.slba(), sqe.blocks())?].copy_from_slice(&sent),
            IoOpcode::COMPARE => {
                self.is_equal = disk[range(sqe.slba(), sqe.blocks())?] == sent[..];
                return if self.is_equal { Ok((cqe, None)) } else { Err(Status::COMPARE_FAILURE) };
            }
            IoOpcode::WRITE_ZEROES => disk[range(sqe.slba(), sqe.blocks())?].fill(0),
            IoOpcode::VERIFY => {
                range(sqe.slba(), sqe.blocks())?;
            }
            IoOpcode::DATASET_MANAGEMENT => {
                for entry in sent.chunks_exact(16) {
                    let entry = DsmRange::read_from_bytes(entry).expect("16 bytes");
                    disk[range(entry.slba.get(), entry.blocks.get())?].fill(0);
                }
            }
            IoOpcode::COPY => {
                let mut at = sqe.slba();
                for entry in sent.chunks_exact(32) {
                    let entry = CopyRangeFormat0::read_from_bytes(entry).expect("32 bytes");
                    let from = disk[range(entry.slba.get(), entry.blocks())?].to_vec();
                    disk[range(at, entry.blocks())?].copy_from_slice(&from);
                    at += u64::from(entry.blocks());
                }
            }
            IoOpcode::FLUSH => {}
            _ => return Err(Status::INVALID_OPCODE.dnr()),
        }
        Ok((cqe, None))
    }
}

/// The answer to an Asynchronous Event Request.
pub fn event(sqe: &Sqe, event: u32) -> Reply {
    let cqe = Cqe::new(sqe.cid(), Status::SUCCESS).with_result(event);
    Reply { slot: super::any_slot(), cqe, data: None, may_omit_cqe: false }
}

/// A failed command's answer.
pub fn failed(sqe: &Sqe, status: Status) -> Reply {
    let cqe = Cqe::new(sqe.cid(), status);
    Reply { slot: super::any_slot(), cqe, data: None, may_omit_cqe: false }
}

/// Whether the command has data for the controller.
pub fn sends_data(sqe: &Sqe) -> bool {
    // Bits 1:0 say which way data goes (Base 2.0 section 3.1.2).
    let code = if sqe.is_fabrics() { sqe.fctype().0 } else { sqe.opcode };
    code & 0b11 == 0b01
}

fn range(lba: u64, blocks: u32) -> Result<std::ops::Range<usize>, Status> {
    let lba = usize::try_from(lba).map_err(|_| Status::LBA_OUT_OF_RANGE)?;
    let end = lba.checked_add(blocks as usize).filter(|end| *end <= BLOCKS);
    let end = end.ok_or(Status::LBA_OUT_OF_RANGE.dnr())?;
    Ok(lba * BLOCK as usize..end * BLOCK as usize)
}
