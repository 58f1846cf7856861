//! [`Book`]: each command of a host, what became of it, and what is promised of it.
//!
//! ```text
//!   write      begun ──── lost, or not answered in time ──── answered ──── settled
//!                            (suspect)                                       │
//!   newer write               begins ................................ may end only here
//!   newer read                begins ............ may end only here
//! ```
//! A write is settled when nothing of it can be executed any more: it is answered, or its host is gone, and
//! the association with which it was lost last is over. What overlaps a suspect and is newer takes effect
//! after it, so that its begin is noted as that of the promise.
//!
//! A lost write may be executed by the far target that had it and once more when it is sent again: it is
//! noted as one of the time before the loss and one of the time after it.
//!
//! With a cache in front, a read may have the data of an older one, which fills the page for both and which
//! waits for no suspect: reads then take effect between their own begin and end, no more is promised.

use std::collections::BTreeMap;

use spindle_reactor::clock::Nanos;
use spindle_target_disk::{BlockRange, DiskError, Op};

use super::scenario::COMMAND_TIMEOUT;
use crate::sim::counts::Counts;
use crate::sim::history::{Fate, History, Time, What};

/// What a core may be late or early with a time-out.
pub const SLACK: Nanos = Nanos::from_ms(200);

/// A command of a host.
#[derive(Debug, Clone)]
pub struct Command {
    /// The core.
    pub core: usize,
    /// The host.
    pub owner: u32,
    /// What.
    pub op: Op,
    /// Where.
    pub range: BlockRange,
    /// The value of each block that it writes or expects.
    pub tags: Vec<u64>,
    /// When it was submitted.
    pub begin: Time,
    /// The same in simulated time.
    pub begun: Nanos,
    /// The far target has it, as the core sees it.
    pub is_outstanding: bool,
    /// The far target was given any of it.
    pub was_sent: bool,
    /// The far target has answered it with an error.
    pub has_failed: bool,
    /// Its host is gone since.
    pub forgotten: Option<Time>,
    /// The core's handle is gone since.
    pub dropped: Option<Time>,
    /// It has ended, and whether well.
    pub done: Option<(Time, bool)>,
    /// It ended while the far target had it.
    pub is_late: bool,
    /// Blocks that were lost, by their place in the range.
    lost_blocks: u64,
    /// How often it was lost.
    losses: u64,
    /// The association with which it was lost last, and when, unless that is over.
    lost: Option<(u64, Nanos)>,
    /// Since then newer ones wait.
    suspect: Option<Time>,
    /// Until then.
    settled: Option<Time>,
    /// Its begin, later where it had to wait for suspects.
    promised: Time,
}

impl Command {
    /// It changes blocks.
    #[must_use]
    pub fn is_write(&self) -> bool {
        matches!(self.op, Op::Write { .. } | Op::WriteZeroes { .. } | Op::Deallocate)
    }

    /// It writes zeroes, so that its data does not tell whose it is.
    #[must_use]
    pub fn is_zeroes(&self) -> bool {
        matches!(self.op, Op::WriteZeroes { .. } | Op::Deallocate)
    }

    /// A core has it, or had it when it was closed.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.done.is_none() && self.dropped.is_none()
    }

    fn overlaps(&self, other: &Command) -> bool {
        overlap(self.range, other.range)
    }

    /// When the wait for its answer ended.
    fn answered(&self) -> Option<Time> {
        let done = self.done.map(|(at, _)| at);
        [done, self.forgotten, self.dropped].into_iter().flatten().min()
    }

    /// Its time is over.
    fn is_overdue(&self, now: Nanos) -> bool {
        now + SLACK >= self.begun + COMMAND_TIMEOUT
    }
}

/// Some block is in both.
#[must_use]
pub fn overlap(one: BlockRange, other: BlockRange) -> bool {
    let end = |range: BlockRange| range.lba + u64::from(range.blocks);
    one.lba < end(other) && other.lba < end(one)
}

/// An index.
#[must_use]
pub fn index(lba: u64) -> usize {
    usize::try_from(lba).expect("small")
}

#[derive(Debug, Default)]
struct Host {
    /// Commands that have not ended.
    open: usize,
    is_forgotten: bool,
}

/// See the module.
#[derive(Debug)]
pub struct Book {
    /// There is a cache in front of the disk.
    is_cached: bool,
    /// By its number.
    pub commands: BTreeMap<u64, Command>,
    /// What was noted for the judge.
    pub history: History,
    /// How often what happened.
    pub counts: Counts,
    hosts: BTreeMap<u32, Host>,
    /// Suspects, also those that are settled.
    suspects: Vec<u64>,
    /// Of them, those that are not settled.
    unsettled: Vec<u64>,
    /// Errors of the far target that a core has taken for commands which write nothing.
    read_errors: BTreeMap<usize, u64>,
    fence_timeout: Nanos,
    over: u64,
    time: Time,
}

impl Book {
    /// Nothing has happened.
    #[must_use]
    pub fn new(blocks: u64, fence_timeout: Nanos, is_cached: bool) -> Book {
        Book {
            is_cached,
            commands: BTreeMap::new(),
            history: History::new(0, index(blocks), 0..0),
            counts: Counts::default(),
            hosts: BTreeMap::new(),
            suspects: Vec::new(),
            unsettled: Vec::new(),
            read_errors: BTreeMap::new(),
            fence_timeout,
            over: 0,
            time: 1,
        }
    }

    /// The next instant.
    pub fn tick(&mut self) -> Time {
        // Two: what is promised to be after an instant has one of its own.
        self.time += 2;
        self.time
    }

    /// Something is not as it must be.
    fn fail(&self, id: u64, text: &str) -> ! {
        let command = &self.commands[&id];
        let near = |other: &&u64| self.commands[*other].overlaps(command) && **other != id;
        let suspects: Vec<_> =
            self.suspects.iter().filter(near).map(|other| (other, &self.commands[other])).collect();
        panic!("command {id}: {text}\n{command:?}\nsuspects of its blocks: {suspects:#?}");
    }

    /// A host has submitted a command.
    pub fn begin(
        &mut self,
        id: u64,
        (core, owner): (usize, u32),
        (op, range): (Op, BlockRange),
        tags: Vec<u64>,
        now: Nanos,
    ) {
        let begin = self.tick();
        self.hosts.entry(owner).or_default().open += 1;
        let command = Command {
            core,
            owner,
            op,
            range,
            tags,
            begin,
            begun: now,
            is_outstanding: false,
            was_sent: false,
            has_failed: false,
            forgotten: None,
            dropped: None,
            done: None,
            is_late: false,
            lost_blocks: 0,
            losses: 0,
            lost: None,
            suspect: None,
            settled: None,
            promised: begin,
        };
        self.commands.insert(id, command);
    }

    /// Whose zeroes these are: a core has none that overlap.
    #[must_use]
    pub fn zeroes(&self, core: usize, range: BlockRange) -> Option<u64> {
        let fits = |command: &Command| {
            command.core == core && command.is_open() && command.is_zeroes() && overlap(command.range, range)
        };
        self.commands.iter().rev().find(|(_, command)| fits(command)).map(|(id, _)| *id)
    }

    /// Some of a write is given to the far target.
    pub fn sent(&mut self, id: u64, piece: BlockRange) {
        let command = &self.commands[&id];
        let end = command.range.lba + u64::from(command.range.blocks);
        if !command.is_open() {
            self.fail(id, "sent although it has ended");
        } else if command.is_outstanding {
            self.fail(id, "sent although the far target has it");
        } else if command.forgotten.is_some() {
            self.fail(id, "sent although its host is gone");
        } else if piece.lba < command.range.lba || piece.lba + u64::from(piece.blocks) > end {
            self.fail(id, &format!("sent as {piece:?}"));
        }
        if command.losses > 0 {
            self.counts.hit("replays");
        }
        if command.range != piece {
            self.counts.hit("pieces");
        }
        let command = self.commands.get_mut(&id).expect("just seen");
        (command.is_outstanding, command.was_sent) = (true, true);
    }

    /// A core has taken the far target's answer.
    pub fn answered(&mut self, id: Option<u64>, core: usize, is_ok: bool) {
        let Some(id) = id else {
            *self.read_errors.entry(core).or_default() += u64::from(!is_ok);
            return;
        };
        let command = self.commands.get_mut(&id).expect("known");
        command.is_outstanding = false;
        command.has_failed |= !is_ok;
        self.settle(id);
    }

    /// A core has lost a piece of a write, with association `number`, and knows it since `now`.
    pub fn lose(&mut self, id: u64, piece: BlockRange, number: u64, now: Nanos) {
        let time = self.tick();
        let command = self.commands.get_mut(&id).expect("known");
        let first = piece.lba - command.range.lba;
        command.lost_blocks |= ((1 << piece.blocks) - 1) << first;
        command.losses += 1;
        command.lost = (number > self.over).then_some((number, now));
        command.is_outstanding = false;
        self.counts.hit("lost writes");
        if command.losses > 1 {
            self.counts.hit("lost again");
        }
        if command.forgotten.is_some() && !command.is_late {
            self.counts.hit("orphans");
        }
        self.suspect(id, time);
        self.settle(id);
    }

    fn suspect(&mut self, id: u64, time: Time) {
        let command = self.commands.get_mut(&id).expect("known");
        if command.suspect.is_none() {
            command.suspect = Some(time);
            self.suspects.push(id);
            self.unsettled.push(id);
        }
    }

    /// If nothing of it can be executed any more, it is settled.
    fn settle(&mut self, id: u64) {
        let command = &self.commands[&id];
        let is_over = command.answered().is_some() && !command.is_outstanding && command.lost.is_none();
        if !is_over || command.suspect.is_none() || command.settled.is_some() {
            return;
        }
        if command.done.is_none() {
            self.promise(id, false);
        }
        let time = self.tick();
        let command = self.commands.get_mut(&id).expect("just seen");
        command.settled = Some(time);
        self.unsettled.retain(|other| *other != id);
        self.note_suspect(id);
    }

    /// The manager was told that associations up to `number` are over.
    pub fn over(&mut self, number: u64) {
        self.over = self.over.max(number);
        for id in self.unsettled.clone() {
            let command = self.commands.get_mut(&id).expect("known");
            if command.lost.is_some_and(|(with, _)| with <= number) {
                command.lost = None;
                self.counts.hit("fenced writes");
            }
            self.settle(id);
        }
    }

    /// Time has passed.
    pub fn expire(&mut self, now: Nanos) {
        for id in self.unsettled.clone() {
            let command = self.commands.get_mut(&id).expect("known");
            if command.lost.is_some_and(|(_, at)| now >= at + self.fence_timeout) {
                command.lost = None;
                self.counts.hit("waited out");
            }
            self.settle(id);
        }
    }

    /// A host is gone. How many of its commands are to come back.
    pub fn forget(&mut self, owner: u32) -> usize {
        let time = self.tick();
        let host = self.hosts.entry(owner).or_default();
        host.is_forgotten = true;
        let open = host.open;
        let is_own = |command: &Command| command.owner == owner && command.is_open();
        let own: Vec<u64> = self.commands.iter().filter(|(_, it)| is_own(it)).map(|(id, _)| *id).collect();
        for id in own {
            let command = self.commands.get_mut(&id).expect("known");
            command.forgotten = Some(time);
            if command.lost_blocks != 0 && !command.is_outstanding {
                self.counts.hit("orphans");
            }
            self.settle(id);
        }
        open
    }

    /// A core's handle is gone.
    pub fn close(&mut self, core: usize) {
        let time = self.tick();
        let is_own = |command: &Command| command.core == core && command.is_open();
        let own: Vec<u64> = self.commands.iter().filter(|(_, it)| is_own(it)).map(|(id, _)| *id).collect();
        for id in own {
            let command = self.commands.get_mut(&id).expect("known");
            command.dropped = Some(time);
            self.promise(id, false);
            self.finish(id, time, false);
            self.settle(id);
        }
    }

    /// A command has ended.
    pub fn end(&mut self, id: u64, result: Result<(), DiskError>, now: Nanos, hung_until: Nanos) {
        let time = self.tick();
        self.check_end(id, result, now, hung_until);
        if self.commands[&id].op == Op::Deallocate && result.is_ok() {
            self.counts.hit("deallocated");
        }
        let command = self.commands.get_mut(&id).expect("known");
        command.done = Some((time, result.is_ok()));
        command.is_late = command.is_outstanding;
        let (owner, is_late) = (command.owner, command.is_late);
        self.hosts.get_mut(&owner).expect("known").open -= 1;
        self.promise(id, result.is_ok());
        if is_late {
            self.counts.hit("late writes");
            self.suspect(id, time);
        }
        self.finish(id, time, result.is_ok());
        self.settle(id);
    }

    /// An end has a reason, and comes in time.
    fn check_end(&mut self, id: u64, result: Result<(), DiskError>, now: Nanos, hung_until: Nanos) {
        let command = &self.commands[&id];
        let is_overdue = command.is_overdue(now);
        if !command.is_open() {
            self.fail(id, "ended twice");
        } else if command.is_outstanding && !is_overdue {
            self.fail(id, "ended while the far target has it");
        }
        self.check_time(id, now, hung_until);
        let command = &self.commands[&id];
        let (is_write, core, has_failed) = (command.is_write(), command.core, command.has_failed);
        let is_explained = match result {
            Ok(()) | Err(DiskError::NotSupported) => true,
            Err(DiskError::Cancelled) => command.forgotten.is_some(),
            Err(_) if is_overdue => {
                self.counts.hit("time-outs");
                true
            }
            Err(_) if is_write => has_failed,
            Err(_) => {
                let errors = self.read_errors.entry(core).or_default();
                let has_any = *errors > 0;
                *errors = errors.saturating_sub(1);
                has_any
            }
        };
        if !is_explained {
            self.fail(id, &format!("ended with {result:?} without a reason"));
        }
    }

    /// A command that has not ended still has time.
    pub fn check_time(&self, id: u64, now: Nanos, hung_until: Nanos) {
        let command = &self.commands[&id];
        // What is left of one whose host is gone is waited for.
        let more =
            if command.forgotten.is_some() { self.fence_timeout + COMMAND_TIMEOUT } else { Nanos::ZERO };
        let last = (command.begun + COMMAND_TIMEOUT).max(hung_until) + more + SLACK;
        if now > last {
            self.fail(id, &format!("not ended at {now}, begun at {}", command.begun));
        }
    }

    /// Nothing that a host had when it went reaches the far disk when all of it has come back. What was
    /// answered before may be executed once more: newer writes wait for that.
    pub fn check_executed(&self, id: u64) {
        let command = &self.commands[&id];
        let host = &self.hosts[&command.owner];
        if command.forgotten.is_some() && host.open == 0 && !command.is_late {
            self.fail(id, "executed although its host is gone and has all its commands back");
        }
    }

    /// What is newer than a suspect takes effect after it.
    fn promise(&mut self, id: u64, is_ok: bool) {
        let command = &self.commands[&id];
        let (is_write, mut promised) = (command.is_write(), command.begin);
        if self.is_cached && command.op == Op::Read {
            return;
        }
        for other in self.suspects.iter().filter(|other| **other != id) {
            let suspect = &self.commands[other];
            let since = suspect.suspect.expect("a suspect");
            if since > command.begin || !suspect.overlaps(command) || command.op == Op::Flush {
                continue;
            }
            let until = if is_write { suspect.settled } else { suspect.answered() };
            match until {
                Some(until) => promised = promised.max(until + 1),
                None if is_ok => self.fail(id, &format!("ended well before {other}, which is older")),
                None if is_write && command.was_sent => {
                    self.fail(id, &format!("sent before {other}, which is older, was settled"));
                }
                None => {}
            }
        }
        if promised > command.begin {
            self.counts.hit(if is_write { "blocked writes" } else { "blocked reads" });
        }
        self.commands.get_mut(&id).expect("just seen").promised = promised;
    }

    /// Note what a command without a loss has done.
    fn finish(&mut self, id: u64, end: Time, is_ok: bool) {
        let command = &self.commands[&id];
        let first = index(command.range.lba);
        match command.op {
            Op::Compare if is_ok => {
                for (block, tag) in (first..).zip(&command.tags) {
                    self.history.note(block, What::Saw(*tag), command.promised, end, Fate::Done);
                }
            }
            Op::Flush if is_ok => self.counts.hit("flushes"),
            Op::Read | Op::Compare | Op::Verify | Op::Flush => {}
            Op::Write { .. } | Op::WriteZeroes { .. } | Op::Deallocate => {
                if command.suspect.is_none() && command.was_sent {
                    let fate = command.fate(is_ok);
                    for (block, tag) in (first..).zip(command.tags.clone()) {
                        let what = What::Wrote { tag, is_durable: false };
                        self.history.note(block, what, command.promised, end, fate);
                    }
                }
            }
        }
    }

    /// A read saw this.
    pub fn saw(&mut self, id: u64, what: impl Iterator<Item = What>) {
        let command = &self.commands[&id];
        let (end, _) = command.done.expect("it has ended");
        for (block, what) in (index(command.range.lba)..).zip(what) {
            self.history.note(block, what, command.promised, end, Fate::Done);
        }
    }

    /// Note what a write was that is settled only now.
    fn note_suspect(&mut self, id: u64) {
        let command = self.commands[&id].clone();
        let (Some(since), Some(settled)) = (command.suspect, command.settled) else { return };
        let answer = command.done.filter(|(_, is_ok)| *is_ok).map(|(at, _)| at);
        let (begin, end, fate) =
            (command.promised, answer.unwrap_or(settled), command.fate(answer.is_some()));
        for (block, at) in (index(command.range.lba)..).zip(0..command.range.blocks) {
            let what = What::Wrote { tag: command.tags[at as usize], is_durable: false };
            if command.lost_blocks >> at & 1 == 0 {
                self.history.note(block, what, begin, end, fate);
                continue;
            }
            self.history.note(block, what, begin, since, Fate::Perhaps);
            self.history.note(block, what, since + 1, end, fate);
            if answer.is_some_and(|answer| self.may_reappear(id, answer)) {
                self.history.note(block, what, end + 1, settled, Fate::Perhaps);
            }
        }
    }

    /// A write that was repeated and answered may be seen to come back over one that was cut short: of both,
    /// something was left over at the same time, and no request waits for the latter.
    fn may_reappear(&self, id: u64, answer: Time) -> bool {
        let command = &self.commands[&id];
        self.suspects.iter().map(|other| &self.commands[other]).any(|other| {
            let is_short = other.answered().is_some() && other.done.is_none_or(|(_, is_ok)| !is_ok);
            is_short && other.overlaps(command) && other.settled.is_none_or(|settled| settled > answer)
        })
    }

    /// Every suspect is settled.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.unsettled.is_empty()
    }
}

impl Command {
    /// A deallocation is a hint.
    fn fate(&self, is_ok: bool) -> Fate {
        if is_ok && self.op != Op::Deallocate { Fate::Done } else { Fate::Perhaps }
    }
}
