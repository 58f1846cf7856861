//! [`History`]: what was done to each block of a namespace and when, and whether one order of it all explains
//! what was seen.
//!
//! Commands overlap in any way, so no single content is right. What is promised is that each block by itself
//! behaves as if every command had touched it at one instant between its begin and its end (linearizability;
//! several blocks of one command have several instants). As every write brings a value of its own, that is
//! decided without search, by the zones of Gibbons and Korach ("Testing Shared Memories", 1997): the commands
//! that wrote or saw a value make its zone, from the first end to the last begin. Where the first end comes
//! before the last begin, the block held that value all the time between, and so
//!
//! - two such zones never overlap,
//! - nothing that saw or left another value lies inside of one.
//!
//! A compare-and-write that succeeded ties the zone of the value that it expected to that of its own: between
//! the two there is nothing, and one value is replaced by one such command only.
//!
//! Zeroes, what a Copy carries, and a value of which several writes are noted may be written many times. Such
//! a value may be seen when one of the writes that can have left it had begun, and no other write began after
//! the last of these had ended and was done before the look began. That is less than could be said, and never
//! wrong. Of several noted writes the last, if it was certainly done, makes a zone with what saw its value
//! later.
//!
//! A write that failed, or whose connection is gone, has an effect or none, until its end or for as long as
//! its host has no new association; it counts once its value was seen.
//!
//! After a power cut a block holds what it held at some instant since the begin of the last Flush that
//! succeeded, and nothing older than a write with FUA that did.

mod judge;
#[cfg(test)]
mod tests;

use std::ops::Range;

pub use judge::Overlaps;

/// The run's count of begins and ends: no two are at the same time.
pub type Time = u64;

/// Later than everything.
pub const NEVER: Time = Time::MAX;

/// Whether a command has had its effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It has, between begin and end.
    Done,
    /// Perhaps; not after its end.
    Perhaps,
    /// Perhaps; not after this association was replaced ([`History::judge`] is told when).
    Open(usize),
}

/// What was done to a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// It was written; 0: zeroed. Durable: with FUA.
    Wrote {
        /// The value.
        tag: u64,
        /// It survives a power cut.
        is_durable: bool,
    },
    /// It got what another block held at that time.
    Copied {
        /// Which.
        from: usize,
        /// It survives a power cut.
        is_durable: bool,
    },
    /// It held this.
    Saw(u64),
    /// It held anything but this.
    SawOther(u64),
    /// It held the one and was given the other, in one step.
    Swapped {
        /// What it held.
        expected: u64,
        /// What it got.
        tag: u64,
    },
}

/// One command's share in a block's history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// What.
    pub what: What,
    /// When the command was sent.
    pub begin: Time,
    /// When it was over.
    pub end: Time,
    /// Whether it happened.
    pub fate: Fate,
}

/// All blocks of a namespace since the last power cut.
#[derive(Debug)]
pub struct History {
    place: usize,
    blocks: Vec<Vec<Event>>,
    /// What each block held at the start.
    initial: Vec<u64>,
    /// Begin of the last Flush that succeeded.
    flushed: Time,
    /// Blocks from which Copy copies. It never copies to them, so what is on the way is copied once.
    pub sources: Range<usize>,
}

/// What a power cut, or the end of a run, has left: the value of each block.
pub type Left = Vec<Option<u64>>;

impl History {
    /// `place` tells namespaces apart. All zeroes.
    #[must_use]
    pub fn new(place: usize, blocks: usize, sources: Range<usize>) -> History {
        let initial = vec![0; blocks];
        History { place, blocks: vec![Vec::new(); blocks], initial, flushed: 0, sources }
    }

    /// Number of blocks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// True when it has no blocks.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Note something.
    pub fn note(&mut self, block: usize, what: What, begin: Time, end: Time, fate: Fate) {
        self.blocks[block].push(Event { what, begin, end, fate });
    }

    /// A Flush that began then has succeeded.
    pub fn note_flush(&mut self, begin: Time) {
        self.flushed = self.flushed.max(begin);
    }

    /// The end of the run: all is judged. `left` is what the disk holds now; `closed` by association, when it
    /// was replaced.
    ///
    /// # Errors
    /// What cannot be.
    pub fn judge(&mut self, now: Time, left: &Left, closed: &[Time]) -> Result<Overlaps, String> {
        self.saw_all(now - 1, now, left)?;
        judge::judge(self, now, closed)
    }

    /// Power was cut. It is judged whether that could be lost which was; what comes after begins with what
    /// was `left`.
    ///
    /// # Errors
    /// What cannot be.
    pub fn power_cut(&mut self, now: Time, left: &Left, closed: &[Time]) -> Result<Overlaps, String> {
        self.saw_all(self.flushed, now, left)?;
        judge::check_durable(self, now, left, closed)?;
        let overlaps = judge::judge(self, now, closed)?;
        self.start_over(left);
        Ok(overlaps)
    }

    /// The medium was lost as a whole, as it should be (memory): what happened until then is judged.
    ///
    /// # Errors
    /// What cannot be.
    pub fn lose_all(&mut self, now: Time, closed: &[Time]) -> Result<Overlaps, String> {
        let overlaps = judge::judge(self, now, closed)?;
        self.start_over(&vec![Some(0); self.blocks.len()]);
        Ok(overlaps)
    }

    fn start_over(&mut self, left: &Left) {
        self.blocks.iter_mut().for_each(Vec::clear);
        self.initial = left.iter().map(|tag| tag.unwrap_or(0)).collect();
        self.flushed = 0;
    }

    fn saw_all(&mut self, begin: Time, end: Time, left: &Left) -> Result<(), String> {
        for (block, tag) in left.iter().enumerate() {
            let Some(tag) = tag else { return Err(self.tell(block, "is torn on the medium")) };
            self.note(block, What::Saw(*tag), begin, end, Fate::Done);
        }
        Ok(())
    }

    /// A complaint, with the block's history.
    fn tell(&self, block: usize, complaint: &str) -> String {
        let mut text = format!("namespace {} block {block}: {complaint}", self.place + 1);
        text += &format!("\n  at first {:x}", self.initial[block]);
        let mut events = self.blocks[block].clone();
        events.sort_by_key(|event| event.begin);
        for Event { what, begin, end, fate } in events {
            text += &format!("\n  {begin:>8} .. {end:<8} {what:x?} {fate:?}");
        }
        text
    }
}
