//! [`World`]: the target with its cluster.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};

use nvme_spec::Nqn;
use nvme_spec::cluster::{Joined, NextData};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::{Buf, Pages, Pool, ZoneSpec};
use spindle_target_card::{Cluster, Membership, NEXT_WAIT, START_WAIT};
use spindle_target_disk::{
    ChannelContext, ClusterDisk, Disk, DiskChannel, Done, IoRequest, Op, Owner, Sender, Token,
};

use super::disk::{BLOCK, Content, SlowDisk};
use super::wire::{AdminAnswer, Answer, CORES, Message, Sent, Shared, Wire, lock};
use crate::sim::Rng;
use crate::sim::counts::Counts;
use crate::sim::model::{fill, tag_of};

/// Owner of the commands of hosts of the target itself.
const DIRECT: u32 = 1;

struct PendingNext {
    number: u64,
    arrived: Nanos,
    is_renewed: bool,
}

/// What the target has of an association.
#[derive(Default)]
struct Controller {
    membership: Option<Membership>,
    nexts: VecDeque<PendingNext>,
}

/// A command at the target's disk.
enum AtDisk {
    Queue { queue: usize, slot: usize, keeps: bool },
    Direct(u64),
}

pub(super) struct World {
    pub(super) wire: Shared,
    pub(super) counts: Counts,
    content: Content,
    fails: u64,
    hosts: Vec<Nqn>,
    cluster: Arc<Cluster>,
    channels: Vec<Box<dyn DiskChannel>>,
    /// A core of the target does nothing until then.
    pub(super) paused_until: [Nanos; CORES],
    at_disk: BTreeMap<u64, AtDisk>,
    tokens: u64,
    /// By link.
    controllers: Vec<Controller>,
    pool: Pool,
    /// Ended commands of hosts of the target: number, result, tags.
    pub(super) direct: Vec<(u64, bool, Vec<u64>)>,
}

fn open(
    content: &Content,
    hosts: &[Nqn],
    (seed, fails): (u64, u64),
    pool: &Pool,
    writes_from: Nanos,
) -> (Arc<Cluster>, Vec<Box<dyn DiskChannel>>) {
    let rng = Arc::new(Mutex::new(Rng::new(seed)));
    let disk: Arc<dyn Disk> = Arc::new(SlowDisk { content: Arc::clone(content), rng, fails });
    let cluster = Cluster::new(disk.geometry().bytes(), hosts.to_vec(), writes_from);
    let disk = ClusterDisk::new(disk, Arc::clone(&cluster));
    let context = |core| ChannelContext { core, pool: pool.clone(), depth: 64 };
    (cluster, (0..CORES).map(|core| disk.open(&context(core)).expect("opens")).collect())
}

impl World {
    pub(super) fn new(seed: u64, pages: usize, agents: usize, fails: u64) -> World {
        let host = |at: usize| Nqn::new(&format!("nqn.2026-01.io.spindle:{at}")).expect("an NQN");
        let hosts: Vec<_> = (0..agents).map(host).collect();
        let content: Content = Arc::new(Mutex::new(vec![0; pages]));
        // A write of zeroes has no buffer.
        let pool =
            Pool::new(&[ZoneSpec { buffer_bytes: 64 << 10, count: 1024 }], Pages::Base).expect("a pool");
        let now = Nanos::from_secs(10);
        let (cluster, channels) = open(&content, &hosts, (seed ^ 5, fails), &pool, now);
        World {
            wire: Wire::new(seed, now),
            counts: Counts::default(),
            content,
            fails,
            hosts,
            cluster,
            channels,
            paused_until: [Nanos::ZERO; CORES],
            at_disk: BTreeMap::new(),
            tokens: 0,
            controllers: Vec::new(),
            pool,
            direct: Vec::new(),
        }
    }

    fn now(&self) -> Nanos {
        lock(&self.wire).now
    }

    fn controller(&mut self, link: usize) -> &mut Controller {
        if self.controllers.len() <= link {
            self.controllers.resize_with(link + 1, Controller::default);
        }
        &mut self.controllers[link]
    }

    /// Returns true when the target executes nothing of the association any more.
    pub(super) fn is_over(&self, link: usize) -> bool {
        let wire = lock(&self.wire);
        let is_of =
            |it: &AtDisk| matches!(it, AtDisk::Queue { queue, .. } if wire.queues[*queue].link == link);
        wire.links[link].is_ended && !self.at_disk.values().any(is_of)
    }

    /// The target's process ends and starts again.
    pub(super) fn restart(&mut self) {
        self.counts.hit("restarts");
        lock(&self.wire).clear();
        self.controllers.iter_mut().for_each(|controller| *controller = Controller::default());
        for (_, at) in std::mem::take(&mut self.at_disk) {
            if let AtDisk::Direct(number) = at {
                self.direct.push((number, false, Vec::new()));
            }
        }
        let from = self.now() + START_WAIT;
        let seed = lock(&self.wire).rng.draw();
        let made = open(&self.content, &self.hosts, (seed, self.fails), &self.pool, from);
        (self.cluster, self.channels) = made;
    }

    /// A command of a host of the target itself.
    pub(super) fn submit_direct(&mut self, number: u64, sent: &Sent) {
        let core = lock(&self.wire).rng.size(0, CORES - 1);
        self.submit(core, DIRECT, AtDisk::Direct(number), sent, Sender::HOST);
    }

    fn submit(&mut self, core: usize, owner: u32, at: AtDisk, sent: &Sent, sender: Sender) {
        let bytes = sent.range.blocks * u32::try_from(BLOCK).expect("small");
        let buf: Option<Buf> = match sent.op {
            Op::Read => Some(self.pool.take(bytes).expect("a buffer")),
            Op::Write { .. } => {
                let mut buf = self.pool.take(bytes).expect("a buffer");
                let mut block = vec![0; BLOCK];
                for (at, tag) in sent.tags.iter().enumerate() {
                    fill(*tag, &mut block);
                    buf.copy_in(at * BLOCK, &block);
                }
                Some(buf)
            }
            Op::Flush | Op::WriteZeroes { .. } | Op::Deallocate | Op::Compare | Op::Verify => None,
        };
        self.tokens += 1;
        let token = Token(u64::from(owner) << 32 | self.tokens);
        self.at_disk.insert(self.tokens, at);
        let request = IoRequest { sender, ..IoRequest::new(sent.op, sent.range) };
        if let Some(done) = self.channels[core].submit(token, &request, buf) {
            self.on_done(done);
        }
    }

    fn on_done(&mut self, done: Done) {
        let Some(at) = self.at_disk.remove(&(done.token.0 & 0xffff_ffff)) else { return };
        let tags = match &done.buf {
            Some(buf) if done.result.is_ok() => {
                let mut bytes = vec![0; buf.len()];
                buf.copy_out(0, &mut bytes);
                bytes.chunks_exact(BLOCK).map(|block| tag_of(block).expect("a block of one write")).collect()
            }
            _ => Vec::new(),
        };
        let is_ok = done.result.is_ok();
        match at {
            AtDisk::Direct(number) => self.direct.push((number, is_ok, tags)),
            AtDisk::Queue { queue, slot, keeps } => {
                let mut wire = lock(&self.wire);
                if !wire.is_cut(wire.queues[queue].link) {
                    let answer = Answer { slot, is_ok, tags, keeps };
                    wire.send((0, queue * 2 + 1), Message::Answer { queue, answer });
                }
            }
        }
    }

    /// Time passes: messages arrive, and the cores of the target do what they have to do.
    pub(super) fn advance(&mut self, now: Nanos) {
        lock(&self.wire).now = now;
        loop {
            let message = lock(&self.wire).take();
            let Some(message) = message else { break };
            self.deliver(message);
        }
        for core in (0..CORES).filter(|core| now >= self.paused_until[*core]).collect::<Vec<_>>() {
            self.turn(core);
        }
    }

    fn deliver(&mut self, message: Message) {
        let mut wire = lock(&self.wire);
        let core = match &message {
            Message::Command { queue, .. } => Some(wire.queues[*queue].core),
            Message::Join { link, .. } | Message::Next { link, .. } | Message::End { link } => {
                Some(wire.links[*link].core)
            }
            Message::Answer { .. } | Message::Admin { .. } => None,
        };
        if let Some(core) = core.filter(|core| wire.now < self.paused_until[*core]) {
            return wire.put_off(self.paused_until[core], message);
        }
        match message {
            Message::Answer { queue, answer } => wire.queues[queue].answers.push_back(answer),
            Message::Admin { link, answer } => wire.links[link].answers.push_back(answer),
            Message::Command { queue, slot, sent } => {
                drop(wire);
                self.on_command(queue, slot, &sent);
            }
            Message::Join { link, incarnation, former } => {
                drop(wire);
                self.on_join(link, incarnation, former);
            }
            Message::Next { link, number, acknowledged } => {
                drop(wire);
                self.on_next(link, number, acknowledged);
            }
            Message::End { link } => {
                drop(wire);
                self.end(link);
            }
        }
    }

    fn answer(&self, link: usize, answer: AdminAnswer) {
        let mut wire = lock(&self.wire);
        if !wire.links[link].is_cut {
            wire.send((1, link * 2 + 1), Message::Admin { link, answer });
        }
    }

    fn is_ended(&self, link: usize) -> bool {
        lock(&self.wire).links[link].is_ended
    }

    fn on_command(&mut self, queue: usize, slot: usize, sent: &Sent) {
        let (link, core) = {
            let wire = lock(&self.wire);
            (wire.queues[queue].link, wire.queues[queue].core)
        };
        if self.is_ended(link) {
            return;
        }
        let member = self.controller(link).membership.as_ref().map(Membership::number);
        let mut keeps = false;
        if sent.registers {
            let Some(member) = member else {
                let answer = Answer { slot, is_ok: false, tags: Vec::new(), keeps };
                return lock(&self.wire).send((0, queue * 2 + 1), Message::Answer { queue, answer });
            };
            keeps = self.channels[core].register(sent.range, member);
            self.counts.hit(if keeps { "registered" } else { "register refused" });
        }
        let sender = member.map_or(Sender::HOST, Sender::of_member);
        let owner = u32::try_from(queue).expect("few") + 2;
        self.submit(core, owner, AtDisk::Queue { queue, slot, keeps }, sent, sender);
    }

    fn on_join(&mut self, link: usize, incarnation: u64, former: u64) {
        let now = self.now();
        if self.is_ended(link) {
            return;
        }
        let agent = lock(&self.wire).links[link].agent;
        let is_member = self.controller(link).membership.is_some();
        let joined = (!is_member)
            .then(|| self.cluster.join(self.hosts[agent], (incarnation, former), now, (Arc::new(|_| ()), 0)));
        let joined = joined.and_then(Result::ok).map(|membership| {
            let answer = Joined::new().with_number(membership.number());
            let answer = answer.with_extent_shift(membership.extent_shift());
            self.controller(link).membership = Some(membership);
            answer
        });
        self.counts.hit(if joined.is_some() { "joined" } else { "join refused" });
        self.answer(link, AdminAnswer::Joined(joined));
    }

    fn on_next(&mut self, link: usize, number: u64, acknowledged: u64) {
        let now = self.now();
        if self.is_ended(link) {
            return;
        }
        let controller = self.controller(link);
        match &controller.membership {
            Some(membership) if !membership.is_over(now) => {
                assert!(membership.acknowledge(acknowledged), "an agent acknowledges what was not sent");
                controller.nexts.push_back(PendingNext { number, arrived: now, is_renewed: false });
            }
            Some(_) | None => self.answer(link, AdminAnswer::Next(number, None)),
        }
    }

    fn end(&mut self, link: usize) {
        *self.controller(link) = Controller::default();
        let mut wire = lock(&self.wire);
        (wire.links[link].is_cut, wire.links[link].is_ended) = (true, true);
        for (queue, at) in wire.queues.iter().enumerate().filter(|(_, at)| at.link == link) {
            self.channels[at.core].cancel_owner(Owner(u32::try_from(queue).expect("few") + 2));
        }
    }

    fn turn(&mut self, core: usize) {
        let (now, mut done) = (self.now(), Vec::with_capacity(64));
        self.channels[core].poll(now, &mut done);
        done.into_iter().for_each(|done| self.on_done(done));
        for link in 0..self.controllers.len() {
            let is_own = lock(&self.wire).links[link].core == core;
            if is_own && !self.is_ended(link) {
                self.step_nexts(link, now);
            }
        }
    }

    fn step_nexts(&mut self, link: usize, now: Nanos) {
        let Controller { membership, nexts } = self.controller(link);
        let Some(membership) = membership else { return };
        let mut answers = Vec::new();
        for next in nexts.iter_mut().filter(|next| now > next.arrived && !next.is_renewed) {
            next.is_renewed = membership.renew(now);
        }
        while let Some(next) = nexts.front() {
            if membership.is_over(now) {
                answers.push(AdminAnswer::Next(next.number, None));
            } else if next.is_renewed && (membership.is_answer_due() || now >= next.arrived + NEXT_WAIT) {
                let mut data = Box::<NextData>::default();
                membership.take(&mut data);
                answers.push(AdminAnswer::Next(next.number, Some(data)));
            } else {
                break;
            }
            nexts.pop_front();
        }
        let is_silent = membership.is_silent(now);
        answers.into_iter().for_each(|answer| self.answer(link, answer));
        if is_silent {
            self.counts.hit("silent members");
            self.end(link);
        }
    }
}
