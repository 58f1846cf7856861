//! What is needed to send a command again on the next connection.

use nvme_spec::sqe::Fuse;
use nvme_spec::status::Status;
use nvme_spec::{Cqe, Sqe};
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Buf;
use spindle_reactor::slab::Slot;
use spindle_transport::host::HostData;

use super::{Entry, Failure, Qpair};
use crate::link::Link;

/// Which way a command's data goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    None,
    ToController,
    FromController,
}

/// One command as it was submitted.
#[derive(Debug)]
struct Replay {
    sqe: Sqe,
    direction: Direction,
    /// The order among all commands of the queue.
    number: u64,
    /// Its data, while it is held.
    buf: Option<Buf>,
}

/// By CID.
#[derive(Debug)]
pub(super) struct Replays {
    commands: Box<[Replay]>,
    next: u64,
}

impl Replays {
    pub(super) fn new(entries: usize) -> Replays {
        let none = || Replay { sqe: Sqe::default(), direction: Direction::None, number: 0, buf: None };
        Replays { commands: (0..entries).map(|_| none()).collect(), next: 0 }
    }

    /// A command is about to be submitted.
    pub(super) fn note(&mut self, slot: Slot, sqe: &Sqe, data: &HostData) {
        let replay = &mut self.commands[slot.index()];
        replay.sqe = *sqe;
        replay.direction = match data {
            HostData::None => Direction::None,
            HostData::ToController(_) => Direction::ToController,
            HostData::FromController(_) => Direction::FromController,
        };
        replay.number = self.next;
        self.next += 1;
    }

    /// A fused pair that was executed would fail when it is executed again: its own write changed what it
    /// compares.
    pub(super) fn is_replayable(&self, slot: Slot) -> bool {
        self.commands[slot.index()].sqe.fuse() == Fuse::NONE
    }

    /// The link ended: keep the data until the next one.
    pub(super) fn hold(&mut self, slot: Slot, buf: Option<Buf>) {
        self.commands[slot.index()].buf = buf;
    }
}

impl Replay {
    fn data(&mut self) -> HostData {
        match (self.direction, self.buf.take()) {
            (Direction::ToController, Some(buf)) => HostData::ToController(buf),
            (Direction::FromController, Some(buf)) => HostData::FromController(buf),
            (Direction::None, _) | (_, None) => HostData::None,
        }
    }
}

impl Qpair {
    /// Go on over a new link. What is held is sent again in its order, under its old tickets; how many
    /// commands that were.
    ///
    /// # Panics
    /// When the old link has not ended yet: its commands would be lost without a word.
    pub(crate) fn attach(&mut self, link: Link) -> usize {
        assert!(self.loss.is_some(), "attached to a second link while the first is alive");
        self.link = link;
        self.loss = None;
        self.quiet_since = Nanos::ZERO;
        let held = self.held();
        let Some(replays) = &mut self.replays else { return 0 };
        for slot in &held {
            let replay = &mut replays.commands[slot.index()];
            let sqe = replay.sqe;
            let data = replay.data();
            match self.link.submit(sqe, data) {
                Ok(()) => {
                    if let Some(entry) = self.entries.get_mut(*slot) {
                        *entry = Entry::Waiting;
                    }
                }
                // The new link is gone already; the next one will do.
                Err((_, data)) => replay.buf = data.into_buffer(),
            }
        }
        held.len()
    }

    /// No other link will come: what is held is lost.
    pub(crate) fn give_up(&mut self) {
        for slot in self.held() {
            let buf = self.replays.as_mut().and_then(|replays| replays.commands[slot.index()].buf.take());
            if let Some(entry) = self.entries.get_mut(slot) {
                let cqe = Cqe::new(super::cid_of(slot), Status::HOST_PATHING_ERROR);
                *entry = Entry::Done(Err(Failure::Lost), cqe, buf);
                self.outstanding -= 1;
                self.ready.push_back(slot);
            }
        }
    }

    /// The held commands in their order.
    fn held(&self) -> Vec<Slot> {
        let Some(replays) = &self.replays else { return Vec::new() };
        let held = self.entries.iter().filter(|(_, entry)| matches!(entry, Entry::Held));
        let mut held: Vec<Slot> = held.map(|(slot, _)| slot).collect();
        held.sort_unstable_by_key(|slot| replays.commands[slot.index()].number);
        held
    }
}
