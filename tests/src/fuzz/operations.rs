//! A program of what hosts, disks, time and the operator do to the request machine, on scripted connections
//! and two cores.
//!
//! Each step takes a few bytes; when they are used up, everything that is still open is brought to its end.
//! Then each command of a queue that lived has been answered exactly once, and every buffer is home.

use std::sync::Arc;

use nvme_spec::feature::FeatureId;
use nvme_spec::identify::Cns;
use nvme_spec::optimistic::{ATTACH, GET_REFERENCES};
use nvme_spec::register::CC;
use nvme_spec::sqe::{Fuse, NSID_ALL};
use nvme_spec::{Sqe, Status};
use spindle_nvme_transport::DataPointer;
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Pages;
use spindle_target::controller::IO_PAGES;
use spindle_target::env::Message;
use spindle_target::qpair::FUSED_TIMEOUT;
use spindle_target::qpair::request::RequestState;
use spindle_target::snapshot::AllowedHosts;
use spindle_target_disk::fault::{Fault, FaultControl, FaultDisk};
use spindle_target_disk::ram::{RamDisk, RamSpec};
use spindle_target_disk::{Abilities, Disk};

use super::bytes::Bytes;
use crate::script::{
    CC_DISABLED, CC_ENABLED, HOST, Probe, Queue, Rig, Setup, Want, connect_data, connect_sqe,
};
use crate::sim::disk::PoolDisk;

/// Longest program: longer ones find nothing that a short one does not.
const BYTES_MAX: usize = 1024;
/// Connections of a program at a time.
const QUEUES_MAX: usize = 12;
const BLOCKS: u64 = 256;

/// A connection, and how many commands it took and answered.
struct Peer {
    queue: Queue,
    sent: usize,
    answered: usize,
    /// What Connect says when its data is asked for.
    want: Want,
}

struct Program<'a> {
    bytes: Bytes<'a>,
    rig: Rig,
    control: Arc<FaultControl>,
    disks: [Arc<dyn Disk>; 2],
    peers: Vec<Peer>,
    is_draining: bool,
}

/// The body.
///
/// # Panics
/// When a promise is broken.
pub fn run(bytes: &[u8]) {
    let is_able = bytes.len() % 2 == 1;
    let bytes = Bytes::new(&bytes[..bytes.len().min(BYTES_MAX)]);
    let mut program = Program::new(bytes, is_able);
    while !program.bytes.is_empty() {
        program.step();
    }
    program.finish();
}

impl<'a> Program<'a> {
    /// `is_able`: the first disk does Compare, Verify and Copy itself.
    fn new(bytes: Bytes<'a>, is_able: bool) -> Program<'a> {
        let abilities = Abilities { compare: is_able, verify: is_able, copy: is_able, reads_in_place: false };
        let disk = PoolDisk::with_abilities(512, BLOCKS, abilities);
        let (disk, _) = Probe::over(disk, |geometry| geometry);
        let (disk, control) = FaultDisk::new(disk, 1);
        let spec = RamSpec { bytes: BLOCKS * 4096, block_bytes: 4096, pages: Pages::Base, has_seals: true };
        let ram = RamDisk::with_slack("ram", spec, 64 << 10).expect("a disk");
        let disks: [Arc<dyn Disk>; 2] = [disk, Arc::new(ram)];
        let setup = Setup {
            cores: 2,
            zones: vec![(4096, 3), (16 << 10, 1)],
            transfer_bytes: 16 << 10,
            ..Setup::small(disks.to_vec())
        };
        let mut rig = Rig::new(setup);
        let host = rig.host();
        let peer = |queue, want| Peer { queue, sent: 0, answered: 0, want };
        let peers = vec![peer(host.admin, Want::admin()), peer(host.io, Want::io(host.cntlid, 1))];
        Program { bytes, rig, control, disks, peers, is_draining: false }
    }

    fn step(&mut self) {
        match self.bytes.below(20) {
            0..=6 => self.command(),
            7..=9 => self.bring(),
            10 | 11 => self.read(),
            12 => self.rig.turn(),
            13 => self.abort(),
            14 => self.connect(),
            15 => self.hang_up(),
            16 => self.set_cc(),
            17 => self.disks(),
            18 => self.reconfigure(),
            _ => self.world(),
        }
    }

    fn pick(&mut self) -> Option<usize> {
        let count = self.peers.len();
        (count > 0).then(|| self.bytes.below(count))
    }

    /// A command arrives; it counts while the connection lives.
    fn send(&mut self, at: usize, sqe: Sqe, data: Result<DataPointer, Status>) {
        let queue = self.peers[at].queue.clone();
        let is_taken = queue.line.closed().is_none() && !self.is_draining;
        self.rig.send_pointer(&queue, sqe, data);
        self.peers[at].sent += usize::from(is_taken);
    }

    fn command(&mut self) {
        let Some(at) = self.pick() else { return };
        let cid = u16::from(self.bytes.byte() % 16);
        let (sqe, bytes) = self.sqe(cid);
        let wrong = self.bytes.byte();
        let bytes = if wrong == 1 { bytes + 1 } else { bytes };
        let data = match (bytes, wrong) {
            (_, 2) => Err(Status::SGL_DESCRIPTOR_TYPE_INVALID.dnr()),
            (0, _) => Ok(DataPointer::None),
            (bytes, 3) if bytes <= 4096 => Ok(DataPointer::InCapsule { bytes }),
            (bytes, _) => Ok(DataPointer::Host { bytes }),
        };
        self.send(at, sqe, data);
    }

    /// A command, and how many bytes its data has.
    fn sqe(&mut self, cid: u16) -> (Sqe, u32) {
        let nsid = self.bytes.pick(&[1, 1, 1, 2, 2, 3, NSID_ALL]);
        let lba = self.bytes.pick(&[0, 1, 5, 200, BLOCKS - 1, BLOCKS, u64::MAX]);
        let blocks = self.bytes.pick(&[1_u32, 1, 1, 2, 4, 33]);
        let block = if nsid == 2 { 4096 } else { 512 };
        match self.bytes.below(20) {
            0..=2 => (Sqe::read(cid, nsid, lba, blocks), blocks * block),
            3..=5 => (Sqe::write(cid, nsid, lba, blocks, lba.is_multiple_of(2)), blocks * block),
            6 => (Sqe::flush(cid, nsid), 0),
            7 => (Sqe::write_zeroes(cid, nsid, lba, blocks, true), 0),
            8 => (Sqe::compare(cid, nsid, lba, blocks), blocks * block),
            9 => (Sqe::compare(cid, nsid, lba, 1).with_fuse(Fuse::FIRST), block),
            10 | 11 => (Sqe::write(cid, nsid, lba, 1, false).with_fuse(Fuse::SECOND), block),
            12 => (Sqe::verify(cid, nsid, 0, self.bytes.pick(&[1, 100, 256])), 0),
            13 => (Sqe::dsm(cid, nsid, self.bytes.pick(&[1, 2, 40, 256])), 4096),
            14 => (Sqe::copy(cid, nsid, lba, 1), 32),
            15 => (Sqe::async_event_request(cid), 0),
            16 => (Sqe::keep_alive(cid), 0),
            17 => (Sqe::identify(cid, Cns(self.bytes.byte() % 9), nsid, 0), 4096),
            18 => (Sqe::get_log_page(cid, self.bytes.pick(IO_PAGES), NSID_ALL, 512, 0, false), 512),
            _ => self.rare(cid, nsid),
        }
    }

    fn rare(&mut self, cid: u16, nsid: u32) -> (Sqe, u32) {
        match self.bytes.below(7) {
            0 => (Sqe::set_features(cid, FeatureId::HOST_BEHAVIOR, 0, 0), 512),
            1 => (Sqe::set_features(cid, FeatureId::VOLATILE_WRITE_CACHE, 0, u32::from(cid & 1)), 0),
            2 => (Sqe::disconnect(cid), 0),
            3 => (connect_sqe(Want::admin()), 1024),
            4 => (Sqe::property_get(cid, false, u32::from(self.bytes.byte())), 0),
            5 => (Sqe::end_former_associations(cid, self.bytes.pick(&[1, 1, 2, 0])), 0),
            _ => match self.bytes.byte() {
                code if code == GET_REFERENCES.0 => {
                    let lba = self.bytes.pick(&[0, 1, 8, BLOCKS - 8, u64::MAX]);
                    let blocks = self.bytes.pick(&[1_u32, 8, 64, 65_536]);
                    let entries = blocks * if nsid == 2 { 4096 } else { 512 } / 4096;
                    (Sqe::get_references(cid, nsid, lba, blocks), entries * 16)
                }
                code if code == ATTACH.0 && cid > 3 => (Sqe::attach(cid, nsid), 64),
                code => (Sqe::new(code, cid, nsid).with_fuse(Fuse(cid.to_le_bytes()[0] & 3)), 0),
            },
        }
    }

    /// Data that was asked for arrives: a list that makes sense, or Connect's, or anything.
    fn bring(&mut self) {
        let Some(at) = self.pick() else { return };
        let Peer { queue, want, .. } = &self.peers[at];
        let (queue, want) = (queue.clone(), *want);
        let fetching = queue.line.fetching();
        if fetching.is_empty() {
            return;
        }
        let cid = self.bytes.pick(&fetching);
        let is_damaged = self.bytes.byte() == 0xff;
        self.bring_to(&queue, want, cid, is_damaged);
    }

    fn bring_to(&mut self, queue: &Queue, want: Want, cid: u16, is_damaged: bool) {
        let fill = self.bytes.byte();
        let fetch = queue.line.take_fetch(cid).expect("asked for");
        let mut data = vec![fill; fetch.buf.len()];
        if data.len() == 1024 {
            data = connect_data(want, HOST);
        }
        if fill < 128 && data.len() >= 24 {
            // Ranges of Copy and Dataset Management that may be inside of the namespace.
            data.fill(0);
            data[4] = fill % 4;
            data[8] = fill;
            data[16] = fill % 8;
        }
        let (slot, mut buf) = (fetch.slot, fetch.buf);
        buf.copy_in(0, &data);
        let result = if is_damaged { Err(Status::COMMAND_TRANSIENT_TRANSPORT_ERROR) } else { Ok(()) };
        queue.line.push(spindle_nvme_transport::Event::Fetched { slot, buf, result });
        self.rig.step(queue);
    }

    /// The host reads some completions; they leave, or not yet.
    fn read(&mut self) {
        let Some(at) = self.pick() else { return };
        let queue = self.peers[at].queue.clone();
        for _ in 0..=self.bytes.below(4) {
            self.peers[at].answered += usize::from(queue.line.read().is_some());
        }
        if self.bytes.below(3) > 0 {
            self.rig.sent(&queue);
        }
    }

    fn abort(&mut self) {
        let qid = u16::from(self.bytes.byte() % 4);
        let (cid, victim) = (u16::from(self.bytes.byte() % 16), u16::from(self.bytes.byte() % 16));
        let Some(at) = self.pick() else { return };
        self.send(at, Sqe::abort(cid, qid, victim), Ok(DataPointer::None));
    }

    /// A new connection, and its Connect.
    fn connect(&mut self) {
        if self.peers.len() >= QUEUES_MAX || self.is_draining {
            return;
        }
        let core = self.bytes.below(2);
        let cntlid = u16::from(self.bytes.byte() % 8);
        let want = match self.bytes.below(4) {
            0 => Want { kato_ms: 1000, ..Want::admin() },
            1 => Want { entries: 2, sq_flow_off: true, ..Want::io(cntlid, 2) },
            _ => Want::io(cntlid, u16::from(self.bytes.byte() % 4)),
        };
        let queue = self.rig.accept(core);
        self.peers.push(Peer { queue, sent: 0, answered: 0, want });
        let at = self.peers.len() - 1;
        self.send(at, connect_sqe(want), Ok(DataPointer::InCapsule { bytes: 1024 }));
    }

    fn hang_up(&mut self) {
        let Some(at) = self.pick() else { return };
        let peer = self.peers.swap_remove(at);
        self.rig.hang_up(&peer.queue);
    }

    fn set_cc(&mut self) {
        let value = self.bytes.pick(&[
            CC_DISABLED,
            CC_ENABLED,
            CC_ENABLED,
            CC_ENABLED | 1 << 14,
            CC_ENABLED | 1 << 7,
        ]);
        let Some(at) = self.pick() else { return };
        self.send(at, Sqe::property_set(15, false, CC, value), Ok(DataPointer::None));
    }

    fn disks(&mut self) {
        let rate = self.bytes.pick(&[0, 0, 500_000, 1_000_000]);
        match self.bytes.below(5) {
            0 => self.control.set_all(Fault::Error, rate),
            1 => self.control.set_all(Fault::Delay, rate),
            2 => self.control.set_all(Fault::Drop, rate),
            3 => self.control.set_gone(rate > 500_000),
            _ => self.control.release_dropped(),
        }
    }

    fn reconfigure(&mut self) {
        let index = self.bytes.below(2);
        match self.bytes.below(5) {
            0 if self.rig.setup.namespaces[index].is_some() => drop(self.rig.setup.remove(index + 1)),
            0 => self.rig.setup.add(index + 1, Arc::clone(&self.disks[index])),
            1 if self.rig.setup.disks.len() < 20 => {
                // Another disk under the same number, at once.
                if self.rig.setup.namespaces[index].is_some() {
                    self.rig.setup.remove(index + 1);
                }
                self.rig.setup.add(index + 1, Arc::clone(&self.disks[1 - index]));
            }
            2 => {
                let blocks = self.bytes.pick(&[64, BLOCKS]);
                // Refused where no frame is free to zero with.
                let _ = self.disks[1].resize(blocks * 4096);
            }
            3 => self.rig.setup.hosts = AllowedHosts::Only(Vec::new()),
            _ => self.rig.setup.hosts = AllowedHosts::Any,
        }
        self.rig.publish();
    }

    fn world(&mut self) {
        match self.bytes.byte() {
            0 => {
                self.is_draining = true;
                self.rig.tell(&Message::Shutdown);
            }
            1..=100 => self.rig.is_mail_held = true,
            101..=200 => self.rig.is_mail_held = false,
            ms => self.rig.pass(Nanos::from_ms(u64::from(ms))),
        }
    }

    /// Everything that is open comes to its end, except for what has none.
    fn finish(mut self) {
        self.rig.is_mail_held = false;
        self.control.set_all(Fault::Drop, 0);
        // Each step of a long command may be held for many turns: they would be more than there are here.
        self.control.set_all(Fault::Delay, 0);
        self.bring_all();
        // Only then: it is long enough for other time-outs, too.
        if self.peers.iter().any(|peer| self.has(peer, RequestState::Fused)) {
            self.rig.pass(Nanos(FUSED_TIMEOUT.0 + Nanos::from_secs(1).0));
            self.bring_all();
        }
        // A transport that was told to close is gone in time, whatever its peer does. Till then others wait
        // for what its queue holds.
        for at in 0..self.peers.len() {
            let queue = self.peers[at].queue.clone();
            if queue.line.closed().is_some() && self.rig.cores[queue.core].qpair(queue.id).is_some() {
                self.rig.hang_up(&queue);
            }
        }
        self.bring_all();
        self.check_ended();
        self.rig.finish();
    }

    fn has(&self, peer: &Peer, state: RequestState) -> bool {
        self.rig.states(&peer.queue).iter().any(|(its, _)| *its == state)
    }

    /// Disks and hosts give everything that is waited for.
    fn bring_all(&mut self) {
        for _ in 0..400 {
            self.control.release_dropped();
            // A Connect that waits for what its host has left at the disks is tried again by time.
            self.rig.pass(Nanos::from_ms(1));
            for at in 0..self.peers.len() {
                let (queue, want) = (self.peers[at].queue.clone(), self.peers[at].want);
                while let Some(cid) = queue.line.fetching().first() {
                    self.bring_to(&queue, want, *cid, false);
                }
                self.peers[at].answered += std::iter::from_fn(|| queue.line.read()).count();
                self.rig.sent(&queue);
            }
        }
    }

    fn check_ended(&self) {
        for peer in &self.peers {
            if peer.queue.line.closed().is_some() {
                continue;
            }
            let states = self.rig.states(&peer.queue);
            let is_endless = |(state, _): &(RequestState, usize)| *state == RequestState::Parked;
            assert!(states.iter().all(is_endless), "requests that never end: {states:?}");
            let left: usize = states.iter().map(|(_, count)| count).sum();
            // Event requests at a reset or a shutdown: they have no answer.
            let forgotten = peer.queue.line.forgotten();
            assert!(
                peer.answered + left + forgotten == peer.sent,
                "{} answered, {left} left, {forgotten} forgotten, {} sent",
                peer.answered,
                peer.sent
            );
        }
    }
}
