//! [`Wire`]: the connections of the agents with the target, and the messages that are under way.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};

use nvme_spec::cluster::{Joined, NextData};
use spindle_reactor::clock::Nanos;
use spindle_target_disk::{BlockRange, Op};

use crate::sim::Rng;

/// Cores of the target.
pub(super) const CORES: usize = 2;

/// A command on an I/O queue.
#[derive(Debug, Clone)]
pub(super) struct Sent {
    pub(super) op: Op,
    pub(super) range: BlockRange,
    pub(super) registers: bool,
    /// Of a write.
    pub(super) tags: Vec<u64>,
}

/// An answer on an I/O queue.
#[derive(Debug, Clone)]
pub(super) struct Answer {
    pub(super) slot: usize,
    pub(super) is_ok: bool,
    /// Of a read.
    pub(super) tags: Vec<u64>,
    pub(super) keeps: bool,
}

/// An answer on an admin queue.
#[derive(Debug, Clone)]
pub(super) enum AdminAnswer {
    /// `None`: refused.
    Joined(Option<Joined>),
    /// To the Next with this number; `None`: refused.
    Next(u64, Option<Box<NextData>>),
}

#[derive(Debug, Clone)]
pub(super) enum Message {
    Command {
        queue: usize,
        slot: usize,
        sent: Sent,
    },
    Answer {
        queue: usize,
        answer: Answer,
    },
    Join {
        link: usize,
        incarnation: u64,
        former: u64,
    },
    Next {
        link: usize,
        number: u64,
        acknowledged: u64,
    },
    Admin {
        link: usize,
        answer: AdminAnswer,
    },
    /// The target notices the end of an association.
    End {
        link: usize,
    },
}

/// A message with its time and its number.
struct Due(Nanos, u64, Message);

impl PartialEq for Due {
    fn eq(&self, other: &Due) -> bool {
        (self.0, self.1) == (other.0, other.1)
    }
}

impl Eq for Due {}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Due) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Due {
    fn cmp(&self, other: &Due) -> std::cmp::Ordering {
        (self.0, self.1).cmp(&(other.0, other.1))
    }
}

/// An association, of one agent.
pub(super) struct Link {
    pub(super) agent: usize,
    pub(super) core: usize,
    /// No message passes any more.
    pub(super) is_cut: bool,
    /// The target has ended it.
    pub(super) is_ended: bool,
    pub(super) answers: VecDeque<AdminAnswer>,
}

/// An I/O queue.
pub(super) struct Queue {
    pub(super) link: usize,
    pub(super) core: usize,
    pub(super) answers: VecDeque<Answer>,
}

pub(super) struct Wire {
    pub(super) now: Nanos,
    pub(super) rng: Rng,
    pub(super) links: Vec<Link>,
    pub(super) queues: Vec<Queue>,
    mail: BinaryHeap<Reverse<Due>>,
    messages: u64,
    /// By connection and direction, the time of its last message: messages of one stay in order.
    last: BTreeMap<(u8, usize), Nanos>,
}

pub(super) type Shared = Arc<Mutex<Wire>>;

pub(super) fn lock(wire: &Shared) -> MutexGuard<'_, Wire> {
    wire.lock().expect("no panic")
}

impl Wire {
    pub(super) fn new(seed: u64, now: Nanos) -> Shared {
        Arc::new(Mutex::new(Wire {
            now,
            rng: Rng::new(seed ^ 0xfa4),
            links: Vec::new(),
            queues: Vec::new(),
            mail: BinaryHeap::new(),
            messages: 0,
            last: BTreeMap::new(),
        }))
    }

    /// Sends a message over a connection, whose messages stay in order; it takes some time.
    pub(super) fn send(&mut self, connection: (u8, usize), message: Message) {
        let us = if self.rng.permille(20) { self.rng.between(500, 20_000) } else { self.rng.between(2, 200) };
        let last = self.last.entry(connection).or_insert(Nanos::ZERO);
        *last = (self.now + Nanos::from_us(us)).max(*last);
        self.messages += 1;
        self.mail.push(Reverse(Due(*last, self.messages, message)));
    }

    /// A new association of an agent.
    pub(super) fn connect(&mut self, agent: usize) -> usize {
        let core = self.rng.size(0, CORES - 1);
        self.links.push(Link { agent, core, is_cut: false, is_ended: false, answers: VecDeque::new() });
        self.links.len() - 1
    }

    /// A new I/O queue of an association; `None`: the association is over.
    pub(super) fn connect_queue(&mut self, link: usize) -> Option<usize> {
        if self.links[link].is_cut || self.links[link].is_ended {
            return None;
        }
        let core = self.rng.size(0, CORES - 1);
        self.queues.push(Queue { link, core, answers: VecDeque::new() });
        Some(self.queues.len() - 1)
    }

    /// No message of the association passes from now on; some of those under way do. The target notices
    /// later.
    pub(super) fn cut(&mut self, link: usize) {
        if std::mem::replace(&mut self.links[link].is_cut, true) {
            return;
        }
        let mail = std::mem::take(&mut self.mail);
        for Reverse(due) in mail {
            let is_of = match &due.2 {
                Message::Command { queue, .. } | Message::Answer { queue, .. } => {
                    self.queues[*queue].link == link
                }
                Message::Join { link: of, .. }
                | Message::Next { link: of, .. }
                | Message::Admin { link: of, .. } => *of == link,
                Message::End { .. } => false,
            };
            let to_agent = matches!(due.2, Message::Answer { .. } | Message::Admin { .. });
            if !is_of || !to_agent && self.rng.permille(500) {
                self.mail.push(Reverse(due));
            }
        }
        let us = self.rng.between(1, 3_000_000);
        self.messages += 1;
        self.mail.push(Reverse(Due(self.now + Nanos::from_us(us), self.messages, Message::End { link })));
    }

    pub(super) fn is_cut(&self, link: usize) -> bool {
        self.links[link].is_cut || self.links[link].is_ended
    }

    pub(super) fn command(&mut self, queue: usize, slot: usize, sent: Sent) {
        if !self.is_cut(self.queues[queue].link) {
            self.send((0, queue * 2), Message::Command { queue, slot, sent });
        }
    }

    /// Answers that have arrived at a queue; `None`: it is lost.
    pub(super) fn answers(&mut self, queue: usize) -> Option<Vec<Answer>> {
        let answers: Vec<_> = self.queues[queue].answers.drain(..).collect();
        let is_lost = self.is_cut(self.queues[queue].link) && answers.is_empty();
        (!is_lost).then_some(answers)
    }

    pub(super) fn join(&mut self, link: usize, incarnation: u64, former: u64) {
        if !self.is_cut(link) {
            self.send((1, link * 2), Message::Join { link, incarnation, former });
        }
    }

    pub(super) fn next(&mut self, link: usize, number: u64, acknowledged: u64) {
        if !self.is_cut(link) {
            self.send((1, link * 2), Message::Next { link, number, acknowledged });
        }
    }

    pub(super) fn admin_answer(&mut self, link: usize) -> Option<AdminAnswer> {
        self.links[link].answers.pop_front()
    }

    /// Takes the next message whose time has come.
    pub(super) fn take(&mut self) -> Option<Message> {
        self.mail.peek().filter(|due| due.0.0 <= self.now)?;
        self.mail.pop().map(|Reverse(Due(_, _, message))| message)
    }

    /// Delivers a message later.
    pub(super) fn put_off(&mut self, until: Nanos, message: Message) {
        self.messages += 1;
        self.mail.push(Reverse(Due(until, self.messages, message)));
    }

    /// The target's process has ended: nothing is under way any more.
    pub(super) fn clear(&mut self) {
        self.mail.clear();
        self.last.clear();
        for link in &mut self.links {
            (link.is_cut, link.is_ended) = (true, true);
        }
    }
}
