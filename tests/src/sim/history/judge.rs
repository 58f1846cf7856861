//! The rules. See the module above.

use std::collections::{HashMap, HashSet};

use super::super::model::home;
use super::{Event, Fate, History, Left, NEVER, Time, What};

/// How much of what was judged happened at the same time as something else.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Overlaps {
    /// Looks at a block while it was written.
    pub reads: u64,
    /// Writes of a block while it was written.
    pub writes: u64,
    /// Compare-and-writes of a block while it was written.
    pub swaps: u64,
}

impl std::ops::AddAssign for Overlaps {
    fn add_assign(&mut self, other: Overlaps) {
        self.reads += other.reads;
        self.writes += other.writes;
        self.swaps += other.swaps;
    }
}

/// A value that was written once, with all that wrote or saw it.
#[derive(Debug, Clone, Copy)]
struct Cluster {
    tag: u64,
    /// Of its write.
    begin: Time,
    end: Time,
    /// It was certainly written.
    is_sure: bool,
    first_end: Time,
    last_begin: Time,
}

/// An event whose end is known, at the latest.
#[derive(Clone, Copy)]
struct Known {
    what: What,
    begin: Time,
    end: Time,
    is_sure: bool,
}

/// One block.
struct Facts {
    events: Vec<Known>,
    initial: u64,
    clusters: HashMap<u64, Cluster>,
    /// Values of which more than one write was noted.
    repeated: HashSet<u64>,
    /// The last write of such a value, if it certainly happened, with the looks that began after its end.
    tails: HashMap<u64, Cluster>,
    /// Begin of each write that certainly happened, ascending, and the earliest time at which it, or one that
    /// began later, was certainly done.
    overwrites: Vec<(Time, Time)>,
}

impl Facts {
    fn new(events: &[Event], initial: u64, own: (usize, usize), now: Time, closed: &[Time]) -> Facts {
        let known = |event: &Event| {
            let end = match event.fate {
                Fate::Done | Fate::Perhaps => event.end,
                Fate::Open(association) => closed.get(association).copied().unwrap_or(NEVER).min(now),
            };
            Known { what: event.what, begin: event.begin, end, is_sure: event.fate == Fate::Done }
        };
        let mut events: Vec<Known> = events.iter().map(known).collect();
        events.sort_by_key(|event| event.begin);
        let mut clusters = HashMap::new();
        let (mut tags, mut repeated) = (HashSet::new(), HashSet::new());
        for Known { what, .. } in &events {
            if let What::Wrote { tag, .. } = *what
                && !tags.insert(tag)
            {
                repeated.insert(tag);
            }
        }
        if initial != 0 && home(initial) == own {
            let (begin, end, is_sure) = (0, 0, true);
            let cluster = Cluster { tag: initial, begin, end, is_sure, first_end: 0, last_begin: 0 };
            clusters.insert(initial, cluster);
        }
        for Known { what, begin, end, is_sure } in &events {
            if let What::Wrote { tag, .. } | What::Swapped { tag, .. } = *what
                && tag != 0
                && !repeated.contains(&tag)
            {
                let (begin, end, is_sure) = (*begin, *end, *is_sure);
                let cluster = Cluster { tag, begin, end, is_sure, first_end: end, last_begin: begin };
                clusters.insert(tag, cluster);
            }
        }
        let (tails, overwrites) = (HashMap::new(), Vec::new());
        let mut facts = Facts { events, initial, clusters, repeated, tails, overwrites };
        facts.find_tails();
        facts.look();
        facts.find_overwrites();
        facts
    }

    /// After its last write a value stays until it is overwritten.
    fn find_tails(&mut self) {
        let mut last: HashMap<u64, &Known> = HashMap::new();
        for event in &self.events {
            if let What::Wrote { tag, .. } = event.what
                && tag != 0
                && self.repeated.contains(&tag)
                && last.get(&tag).is_none_or(|last| last.end < event.end)
            {
                last.insert(tag, event);
            }
        }
        for (tag, Known { begin, end, is_sure, .. }) in last {
            if *is_sure {
                let (begin, end, is_sure) = (*begin, *end, true);
                let tail = Cluster { tag, begin, end, is_sure, first_end: end, last_begin: begin };
                self.tails.insert(tag, tail);
            }
        }
    }

    /// Put what was seen to what was written.
    fn look(&mut self) {
        for event in &self.events {
            if let Some(tag) = seen(event)
                && let Some(tail) = self.tails.get_mut(&tag).filter(|tail| tail.end < event.begin)
            {
                tail.last_begin = tail.last_begin.max(event.begin);
            }
            if let Some(tag) = seen(event)
                && let Some(cluster) = self.clusters.get_mut(&tag)
            {
                cluster.is_sure = true;
                cluster.first_end = cluster.first_end.min(event.end);
                cluster.last_begin = cluster.last_begin.max(event.begin);
            }
        }
        self.clusters.retain(|_, cluster| cluster.is_sure);
    }

    fn find_overwrites(&mut self) {
        let written = self.clusters.values().map(|cluster| (cluster.begin, cluster.first_end));
        let others = self.events.iter().filter(|event| event.is_sure && self.is_many(event.what));
        self.overwrites = written.chain(others.map(|event| (event.begin, event.end))).collect();
        self.overwrites.sort_unstable();
        let mut earliest = NEVER;
        for (_, done) in self.overwrites.iter_mut().rev() {
            earliest = earliest.min(*done);
            *done = earliest;
        }
    }

    /// A value that may be written more than once.
    fn is_many(&self, what: What) -> bool {
        match what {
            What::Copied { .. } => true,
            What::Wrote { tag, .. } => tag == 0 || self.repeated.contains(&tag),
            What::Saw(_) | What::SawOther(_) | What::Swapped { .. } => false,
        }
    }

    /// Some write began after `last` and was done before `begin`.
    fn is_overwritten(&self, last: Time, begin: Time) -> bool {
        let at = self.overwrites.partition_point(|(write, _)| *write <= last);
        self.overwrites.get(at).is_some_and(|(_, done)| *done < begin)
    }

    /// The block may have held `tag` some time between `begin` and `end`. `copied` says whether a Copy from
    /// there can have brought it. The error says why not.
    fn may_hold(
        &self,
        tag: u64,
        (begin, end): (Time, Time),
        copied: impl Fn(&Known, usize) -> bool,
    ) -> Result<(), &'static str> {
        if let Some(cluster) = self.clusters.get(&tag) {
            return match cluster.begin < end {
                true if self.is_overwritten(cluster.end, begin) => Err("it was overwritten before"),
                true => Ok(()),
                false => Err("it was written later"),
            };
        }
        let wrote = self.events.iter().filter(|event| match event.what {
            _ if event.begin >= end => false,
            What::Wrote { tag: wrote, .. } => wrote == tag,
            What::Copied { from, .. } => copied(event, from),
            What::Swapped { tag: wrote, .. } => wrote == tag,
            What::Saw(_) | What::SawOther(_) => false,
        });
        let first = (self.initial == tag).then_some(0);
        let Some(last) = wrote.map(|event| event.end).chain(first).max() else {
            return Err("no command wrote it there");
        };
        if self.is_overwritten(last, begin) { Err("it was overwritten before") } else { Ok(()) }
    }
}

fn seen(event: &Known) -> Option<u64> {
    match event.what {
        What::Saw(tag) => Some(tag),
        What::Swapped { expected, .. } if event.is_sure => Some(expected),
        What::Swapped { .. } | What::SawOther(_) | What::Wrote { .. } | What::Copied { .. } => None,
    }
}

/// A stretch of time in which a block held one value, or some that were swapped one for the other.
#[derive(Debug, Clone, Copy)]
struct Zone {
    tag: u64,
    first_end: Time,
    last_begin: Time,
}

pub(super) fn judge(history: &History, now: Time, closed: &[Time]) -> Result<Overlaps, String> {
    let facts: Vec<Facts> = (0..history.len()).map(|block| facts(history, block, now, closed)).collect();
    let mut overlaps = Overlaps::default();
    for (block, own) in facts.iter().enumerate() {
        judge_block(own, &facts, history).map_err(|complaint| history.tell(block, &complaint))?;
        overlaps += count_overlaps(own);
    }
    Ok(overlaps)
}

fn facts(history: &History, block: usize, now: Time, closed: &[Time]) -> Facts {
    Facts::new(&history.blocks[block], history.initial[block], (history.place, block), now, closed)
}

fn may_copy(facts: &[Facts], tag: u64, event: &Known, from: usize) -> bool {
    facts[from].may_hold(tag, (event.begin, event.end), |_, _| false).is_ok()
}

fn judge_block(own: &Facts, all: &[Facts], history: &History) -> Result<(), String> {
    for event in &own.events {
        let Some(tag) = seen(event) else { continue };
        let is_copied = |copy: &Known, from: usize| {
            (tag == 0 || home(tag) == (history.place, from)) && may_copy(all, tag, copy, from)
        };
        own.may_hold(tag, (event.begin, event.end), is_copied)
            .map_err(|why| format!("{tag:x} was seen at {} .. {}: {why}", event.begin, event.end))?;
    }
    let zones = zones(own)?;
    let mut forward: Vec<Zone> =
        zones.iter().filter(|zone| zone.first_end < zone.last_begin).copied().collect();
    forward.sort_unstable_by_key(|zone| zone.first_end);
    for pair in forward.windows(2) {
        if pair[1].first_end < pair[0].last_begin {
            let [Zone { tag: one, .. }, Zone { tag: other, .. }] = [pair[0], pair[1]];
            return Err(format!("{one:x} and {other:x} were there at the same time"));
        }
    }
    let check = |what: &str, tag: Option<u64>, begin: Time, end: Time| {
        let at = forward.partition_point(|zone| zone.first_end < begin);
        match at.checked_sub(1).map(|at| forward[at]) {
            Some(zone) if end < zone.last_begin && tag != Some(zone.tag) => {
                Err(format!("{what} at {begin} .. {end}, when it held {:x}", zone.tag))
            }
            Some(_) | None => Ok(()),
        }
    };
    for zone in zones.iter().filter(|zone| zone.first_end >= zone.last_begin) {
        check(&format!("{:x}", zone.tag), Some(zone.tag), zone.last_begin, zone.first_end)?;
    }
    for event in &own.events {
        let is_other_value = event.is_sure && own.is_many(event.what);
        let is_other_look = seen(event).is_some_and(|tag| !own.clusters.contains_key(&tag));
        if is_other_value || is_other_look {
            check(&format!("{:x?}", event.what), seen(event), event.begin, event.end)?;
        }
        check_other(own, event)?;
    }
    Ok(())
}

/// "Anything but this" was seen: not when it was certainly there all the time.
fn check_other(own: &Facts, event: &Known) -> Result<(), String> {
    let What::SawOther(tag) = event.what else { return Ok(()) };
    let is_certain = match own.clusters.get(&tag) {
        Some(cluster) => cluster.first_end < event.begin && event.end < cluster.last_begin,
        None if tag != 0 => false,
        None => {
            let ended = |known: &&Known| known.is_sure && known.end < event.begin;
            let zeroed = own.events.iter().filter(ended).filter(|known| is_zeroed(known.what));
            let last = zeroed.map(|known| known.begin).max();
            let since = last.or((own.initial == 0).then_some(0));
            let may_differ = |known: &Known, since| {
                !is_zeroed(known.what) && writes(known.what) && known.begin < event.end && known.end > since
            };
            since.is_some_and(|since| !own.events.iter().any(|known| may_differ(known, since)))
        }
    };
    if is_certain {
        return Err(format!("{tag:x} was not seen at {} .. {}, but was there", event.begin, event.end));
    }
    Ok(())
}

fn is_zeroed(what: What) -> bool {
    matches!(what, What::Wrote { tag: 0, .. })
}

fn writes(what: What) -> bool {
    matches!(what, What::Wrote { .. } | What::Copied { .. } | What::Swapped { .. })
}

/// The zones of values that were written once; those that were swapped one for the other are one.
fn zones(own: &Facts) -> Result<Vec<Zone>, String> {
    let mut next: HashMap<u64, &Known> = HashMap::new();
    let mut has_previous = Vec::new();
    for event in &own.events {
        if let What::Swapped { expected, tag } = event.what
            && (event.is_sure || own.clusters.contains_key(&tag))
            && own.clusters.contains_key(&expected)
        {
            if next.insert(expected, event).is_some() {
                return Err(format!("{expected:x} was swapped for two values"));
            }
            has_previous.push(tag);
        }
    }
    let mut zones = Vec::with_capacity(own.clusters.len());
    for first in own.clusters.values().filter(|cluster| !has_previous.contains(&cluster.tag)) {
        let mut zone = Zone { tag: first.tag, first_end: first.first_end, last_begin: first.last_begin };
        let (mut cluster, mut at) = (first, first.begin);
        while let Some(event) = next.get(&cluster.tag) {
            let What::Swapped { tag, .. } = event.what else { break };
            // The earliest instant at which this swap can have been.
            at = at.max(event.begin).max(cluster.last_begin);
            let Some(after) = own.clusters.get(&tag) else { break };
            if at > event.end.min(after.first_end) {
                return Err(format!("{:x} was seen after it was swapped for {tag:x}", cluster.tag));
            }
            zone.first_end = zone.first_end.min(after.first_end);
            zone.last_begin = zone.last_begin.max(after.last_begin);
            cluster = after;
        }
        zones.push(zone);
    }
    let tail = |it: &Cluster| Zone { tag: it.tag, first_end: it.first_end, last_begin: it.last_begin };
    zones.extend(own.tails.values().map(tail));
    Ok(zones)
}

fn count_overlaps(own: &Facts) -> Overlaps {
    let mut overlaps = Overlaps::default();
    let (mut written_until, mut seen_until) = (0, 0);
    for event in &own.events {
        let is_write = writes(event.what);
        let is_swap = matches!(event.what, What::Swapped { .. });
        let is_at_once = event.begin < written_until;
        overlaps.swaps += u64::from(is_swap && is_at_once);
        overlaps.writes += u64::from(is_write && !is_swap && is_at_once);
        overlaps.reads += u64::from(if is_write { event.begin < seen_until } else { is_at_once });
        let until = if is_write { &mut written_until } else { &mut seen_until };
        // What has no end would overlap with all that follows.
        if event.end != NEVER {
            *until = (*until).max(event.end);
        }
    }
    overlaps
}

/// After a power cut: nothing older than what was written with FUA.
pub(super) fn check_durable(
    history: &History,
    now: Time,
    left: &Left,
    closed: &[Time],
) -> Result<(), String> {
    let all: Vec<Facts> = (0..history.len()).map(|block| facts(history, block, now, closed)).collect();
    for (block, own) in all.iter().enumerate() {
        let Some(tag) = left[block] else { continue };
        let copied = |copy: &Known, from: usize| {
            (tag == 0 || home(tag) == (history.place, from)) && may_copy(&all, tag, copy, from)
        };
        let last = own.last_write(tag, copied);
        for event in own.events.iter().filter(|event| event.is_sure) {
            let is_durable = match event.what {
                What::Wrote { is_durable, tag: wrote } => is_durable && wrote != tag,
                What::Copied { is_durable, .. } => is_durable,
                What::Saw(_) | What::SawOther(_) | What::Swapped { .. } => false,
            };
            if is_durable && last.is_none_or(|last| last < event.begin) {
                let complaint = format!("the power cut left {tag:x}, older than FUA {:x?}", event.what);
                return Err(history.tell(block, &complaint));
            }
        }
    }
    Ok(())
}

impl Facts {
    /// The last end of a write that can have left `tag`.
    fn last_write(&self, tag: u64, copied: impl Fn(&Known, usize) -> bool) -> Option<Time> {
        if let Some(cluster) = self.clusters.get(&tag) {
            return Some(cluster.end);
        }
        let first = (self.initial == tag).then_some(0);
        let wrote = self.events.iter().filter(|event| match event.what {
            What::Wrote { tag: wrote, .. } => wrote == tag,
            What::Copied { from, .. } => copied(event, from),
            What::Swapped { tag: wrote, .. } => wrote == tag,
            What::Saw(_) | What::SawOther(_) => false,
        });
        wrote.map(|event| event.end).chain(first).max()
    }
}
