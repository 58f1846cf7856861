//! [`Session`]: a member's side of Join and Next, on the thread of the disk's manager.
//!
//! ```text
//!   away ── association up ──> Join ── joined ──> member: two Next outstanding ──┐
//!    ^                          │ refused: later again                           │ lost, refused
//!    └──────────────────────────┴────────────────────────────────────────────────┘ all pages are dropped
//! ```
//! An association has one membership: when that has ended, the manager connects again.

use std::collections::HashMap;
use std::sync::Arc;

use nvme_spec::cluster::{Joined, MEMBERS_MAX, NEXT_OUTSTANDING_MAX, NextData, Notice, OPEN_WRITES_MAX};
use spindle_reactor::clock::Nanos;

use crate::agent::{Agent, ForeignWrite};

/// The lease ends this long after the newest Next that was completed was sent.
pub(crate) const LEASE: Nanos = Nanos::from_ms(1500);
/// First and longest wait before a further Join.
const JOIN_WAITS: (Nanos, Nanos) = (Nanos::from_secs(1), Nanos::from_secs(60));

/// A command to send on the admin queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// Join, as this incarnation, after a former one (0: none).
    Join {
        /// Random, not 0.
        incarnation: u64,
        /// The one before, whose pages are dropped.
        former: u64,
    },
    /// Next, with the sequence of the last entry that was executed.
    Next {
        /// 0: none.
        acknowledged: u64,
    },
}

enum State {
    /// No association.
    Away,
    /// Joins at this time.
    Waiting(Nanos),
    Joining,
    Member,
}

/// A member's side of the protocol. See the module.
pub struct Session {
    agent: Arc<Agent>,
    state: State,
    incarnation: u64,
    former: u64,
    /// Sequence of the last entry that was executed; `None`: no answer has come yet.
    executed: Option<u64>,
    /// Number of outstanding Next commands.
    outstanding: usize,
    /// Writes of other hosts that have not ended, by number: [`OPEN_WRITES_MAX`] at most.
    foreign: HashMap<u32, ForeignWrite>,
    wait: Nanos,
}

impl Session {
    /// Creates the session of an agent without an association.
    #[must_use]
    pub fn new(agent: Arc<Agent>) -> Session {
        Session {
            agent,
            state: State::Away,
            incarnation: 0,
            former: 0,
            executed: None,
            outstanding: 0,
            foreign: HashMap::new(),
            wait: JOIN_WAITS.0,
        }
    }

    /// An association is up: joins at once.
    pub fn on_up(&mut self, now: Nanos) {
        self.state = State::Waiting(now);
    }

    /// The association is lost: drops all pages.
    pub fn on_down(&mut self) {
        self.end();
        self.state = State::Away;
    }

    /// Returns the next command to send now. `random`: for the name of a membership.
    pub fn next_command(&mut self, now: Nanos, random: impl FnOnce() -> u64) -> Option<Command> {
        match self.state {
            State::Waiting(until) if now >= until => {
                self.state = State::Joining;
                self.incarnation = random() | 1;
                Some(Command::Join { incarnation: self.incarnation, former: self.former })
            }
            State::Member if self.outstanding < NEXT_OUTSTANDING_MAX => {
                self.outstanding += 1;
                Some(Command::Next { acknowledged: self.executed.unwrap_or(0) })
            }
            State::Away | State::Waiting(_) | State::Joining | State::Member => None,
        }
    }

    /// A command of [`Session::next_command`] could not be sent: it is due again.
    pub fn on_unsent(&mut self, command: Command, now: Nanos) {
        match command {
            Command::Join { .. } => self.state = State::Waiting(now + self.wait),
            Command::Next { .. } => self.outstanding = self.outstanding.saturating_sub(1),
        }
    }

    /// Returns the time at which [`Session::next_command`] may have one without a further answer.
    #[must_use]
    pub fn due(&self) -> Option<Nanos> {
        match self.state {
            State::Waiting(until) => Some(until),
            State::Away | State::Joining | State::Member => None,
        }
    }

    /// Handles the answer to Join; `None`: it was refused.
    ///
    /// # Errors
    /// What is wrong with the answer.
    pub fn on_joined(&mut self, joined: Option<Joined>, now: Nanos) -> Result<(), String> {
        if !matches!(self.state, State::Joining) {
            return Ok(());
        }
        self.state = State::Waiting(now + self.wait);
        self.wait = (self.wait + self.wait).min(JOIN_WAITS.1);
        let Some(joined) = joined else { return Ok(()) };
        if usize::from(joined.number()) >= MEMBERS_MAX {
            return Err(format!("it is member {}; a number is below {MEMBERS_MAX}", joined.number()));
        }
        let (theirs, ours) = (u32::from(joined.extent_shift()), self.agent.extent_shift());
        if theirs != ours {
            return Err(format!("an extent has 2^{theirs} pages; of this size of disk 2^{ours}"));
        }
        self.state = State::Member;
        (self.executed, self.outstanding) = (None, 0);
        self.agent.begin();
        Ok(())
    }

    /// Handles the answer to a Next that was sent at `sent`; `None`: it was refused. After an error the
    /// agent is no member, and joins again over another association.
    ///
    /// # Errors
    /// What is wrong with the answer.
    pub fn on_next(&mut self, sent: Nanos, answer: Option<&NextData>) -> Result<(), &'static str> {
        if !matches!(self.state, State::Member) {
            return Ok(());
        }
        self.outstanding = self.outstanding.saturating_sub(1);
        let result = match answer {
            Some(data) => self.execute(data),
            None => Err("the target has ended the membership"),
        };
        match result {
            Ok(()) => {
                self.wait = JOIN_WAITS.0;
                self.agent.extend_lease(sent + LEASE);
            }
            Err(_) => self.on_down(),
        }
        result
    }

    fn execute(&mut self, data: &NextData) -> Result<(), &'static str> {
        let entries = data.entries().ok_or("an answer has more than 255 entries")?;
        let sequence = data.sequence.get();
        let first = sequence.checked_sub(entries.len() as u64);
        if first.is_none() || self.executed.is_some_and(|executed| first != Some(executed)) {
            return Err("entries are missing");
        }
        for entry in entries {
            match entry.notice() {
                Some(Notice::Invalidate { number, first, pages }) => {
                    let end = first.checked_add(pages.into()).ok_or("an Invalidate ends beyond 2^64")?;
                    if self.foreign.len() >= OPEN_WRITES_MAX {
                        return Err("more than 4096 writes have not ended");
                    }
                    let Some(cache) = self.agent.cache() else { continue };
                    let write = cache.begin_foreign(first..end);
                    if let Some(before) = self.foreign.insert(number, write) {
                        cache.end_foreign(before);
                    }
                }
                Some(Notice::Done { number }) => {
                    if let (Some(write), Some(cache)) = (self.foreign.remove(&number), self.agent.cache()) {
                        cache.end_foreign(write);
                    }
                }
                None => return Err("an entry is of an unknown kind"),
            }
        }
        self.executed = Some(sequence);
        Ok(())
    }

    /// Ends the membership, if there is one: drops all pages, then ends the writes of other hosts.
    fn end(&mut self) {
        if self.agent.is_member() {
            self.former = self.incarnation;
            self.agent.end();
        }
        if let Some(cache) = self.agent.cache() {
            self.foreign.drain().for_each(|(_, write)| cache.end_foreign(write));
        }
        self.foreign.clear();
        self.outstanding = 0;
    }
}

#[cfg(test)]
mod tests;
