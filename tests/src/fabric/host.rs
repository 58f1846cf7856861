//! The host's end: its device, and commands with their registrations.

use nvme_spec::sqe::SglKind;
use nvme_spec::zerocopy::{FromBytes, IntoBytes};
use nvme_spec::{Cqe, SQE_BYTES, Sqe};
use spindle_nvme_rdma::host::{CloseCause, HostEvent, Registered, SubmitError, SubmitErrorKind};
use spindle_nvme_rdma::work::Op;

use spindle_nvme_transport::host::HostData;

use super::memory::Access;
use super::queue::Carried;
use super::{Link, Pair};
use crate::sim::Rng;

/// Where a submission queue entry has its data pointer, and that its kind.
const SGL_AT: usize = 24;
const KIND_AT: usize = 15;

impl Link {
    /// Register a command's data and submit it; the data comes back where the connection is not open.
    ///
    /// # Panics
    /// When the host's end refuses a command that fits.
    pub fn submit(&mut self, sqe: Sqe, data: HostData, rng: &mut Rng) -> Result<(), HostData> {
        let config = self.setting.host;
        let room = config.in_capsule_bytes as usize / 16;
        let pieces = self.setting.weather.pieces.min(room).min(usize::from(config.descriptors));
        let access = if matches!(data, HostData::FromController(_)) { Access::Write } else { Access::Read };
        let data = data.map(|buf| {
            let keys = self.memory.register(&buf, access, pieces, rng);
            Registered { buf, keys }
        });
        self.host.submit(sqe, data).map_err(|SubmitError { kind, data }| {
            assert_eq!(kind, SubmitErrorKind::Closed, "the host's end refused a command that fits");
            data.map(|Registered { buf, keys }| {
                self.memory.deregister(&keys);
                buf
            })
        })
    }

    /// What happened at the host's end.
    pub fn next_event(&mut self) -> Option<HostEvent> {
        let event = self.host.next_event()?;
        match &event {
            HostEvent::Completed { buf: Some(data), .. } => self.memory.deregister(&data.keys),
            HostEvent::Completed { .. } => {}
            HostEvent::Ready => panic!("it was established before"),
            HostEvent::Closed { why } => {
                assert!(self.memory.is_empty(), "registrations are left");
                assert!(!matches!(why, CloseCause::Violation(_) | CloseCause::Device), "{why:?}");
            }
        }
        Some(event)
    }

    /// Post all that the host's end asks for.
    pub(super) fn host_posts(&mut self, rng: &mut Rng) -> bool {
        let mut has_worked = false;
        while self.host_pair != Pair::Destroyed
            && let Some(work) = self.host.next_work()
        {
            has_worked = true;
            let Op::Send { head, head_bytes, local, invalidate: None } = work.op else {
                panic!("a host only sends: {work:?}")
            };
            let mut message = self.message();
            message.bytes.extend_from_slice(&head[..usize::from(head_bytes)]);
            self.host.descriptors(work.chain).for_each(|sgl| message.bytes.extend_from_slice(sgl.as_bytes()));
            if let Some(keys) = self.host.keys(work.chain) {
                self.memory.open(keys, work.chain);
            }
            let cid = usize::from(u16::from_le_bytes([head[2], head[3]]));
            self.asked[cid] = ask(&mut message.bytes, self.setting.weather.invalidate, rng);
            self.up.post(
                work.chain,
                work.is_signalled,
                Carried::Send { message: Some(message), data: local.bytes },
            );
        }
        has_worked
    }

    pub(super) fn host_starts(&mut self) -> bool {
        if !self.is_connected || self.host_pair != Pair::Works {
            return false;
        }
        let Some(posted) = self.up.start() else { return false };
        let Carried::Send { message, data } = &mut posted.carried else { return false };
        let mut message = message.take().expect("once");
        if *data > 0 {
            let buf = self.host.buffer(posted.chain).expect("its command is not over");
            buf.visit(0, *data as usize, |piece| message.bytes.extend_from_slice(piece));
        }
        self.to_target.push_back(message);
        true
    }

    pub(super) fn host_acknowledged(&mut self, rng: &mut Rng) -> bool {
        if !self.is_connected || self.host_pair != Pair::Works {
            return false;
        }
        let Some(posted) = self.up.front() else { return false };
        if let Carried::Send { data: 1.., .. } = posted.carried {
            assert!(self.host.buffer(posted.chain).is_some(), "the device may still send it again");
        }
        let is_ok = rng.below(1_000_000) >= self.setting.weather.failure;
        self.up.acknowledge(is_ok);
        if !is_ok {
            self.lose(false);
            self.break_host();
        }
        true
    }

    pub(super) fn arrives_at_host(&mut self) -> bool {
        if !self.is_connected || self.host_pair != Pair::Works {
            return false;
        }
        let Some(message) = self.to_host.pop_front() else { return false };
        if !self.setting.is_honest {
            self.spare.push(message);
            return true;
        }
        assert!(self.host_receives > 0, "the host has no receive for an answer");
        self.host_receives -= 1;
        if let Some(key) = message.invalidate {
            let is_known = self.memory.invalidate(key);
            assert!(is_known, "an unknown key was invalidated: {key:x}");
        }
        self.host_arrived.push_back(message);
        true
    }

    /// Completions at the host, and its end.
    pub(super) fn host_takes(&mut self, rng: &mut Rng) -> bool {
        let has_worked = self.host_takes_one(rng.permille(500));
        if !self.host.is_open() && self.host_pair != Pair::Destroyed {
            self.break_host();
            self.is_connected = false;
            if rng.permille(100) {
                self.destroy_host();
            }
        }
        has_worked
    }

    pub(super) fn host_takes_one(&mut self, is_receive: bool) -> bool {
        if self.host_pair == Pair::Destroyed {
            return false;
        }
        if is_receive && let Some(message) = self.host_arrived.pop_front() {
            self.host_receives += 1;
            if let Ok(cqe) = Cqe::read_from_bytes(&message.bytes) {
                let asked = self.asked.get_mut(usize::from(cqe.cid())).and_then(Option::take);
                let wanted = asked.filter(|_| self.setting.target.can_invalidate);
                assert_eq!(message.invalidate, wanted, "the key to be invalidated");
            }
            self.host.received(&message.bytes);
            self.spare.push(message);
            return true;
        }
        let Some(completion) = self.up.take() else { return false };
        self.host.completed(completion);
        true
    }

    /// DISCONNECTED at the host.
    pub(super) fn host_disconnected(&mut self) {
        self.host.end(CloseCause::ByPeer);
    }

    /// The host's queue pair is no more: nothing reaches its memory.
    pub fn destroy_host(&mut self) {
        self.host.end(CloseCause::Requested);
        self.break_host();
        self.is_connected = false;
        self.host_pair = Pair::Destroyed;
        self.host_arrived.clear();
        self.host.on_gone();
    }
}

/// Let some descriptors of a command ask for their key to be invalidated: the first that does.
fn ask(capsule: &mut [u8], permille: u64, rng: &mut Rng) -> Option<u32> {
    let mut asked = None;
    let mut change = |descriptor: &mut [u8]| {
        let is_keyed = descriptor[KIND_AT] == SglKind::KEYED_DATA_BLOCK.0;
        if is_keyed && descriptor[8..11] != [0; 3] && permille > 0 && rng.permille(permille) {
            descriptor[KIND_AT] = SglKind::KEYED_DATA_BLOCK_INVALIDATE.0;
            let key = [descriptor[11], descriptor[12], descriptor[13], descriptor[14]];
            asked.get_or_insert(u32::from_le_bytes(key));
        }
    };
    let (entry, list) = capsule.split_at_mut(SQE_BYTES);
    if entry[SGL_AT + KIND_AT] == SglKind::LAST_SEGMENT_OFFSET.0 {
        list.chunks_exact_mut(16).for_each(change);
    } else {
        change(&mut entry[SGL_AT..SGL_AT + 16]);
    }
    asked
}
