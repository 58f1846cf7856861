//! [`Cluster`]: the members of one disk at the target. [`ClusterWrite`]: a write, until all members that may
//! have its pages have dropped them. [`Membership`]: a controller that has joined.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use nvme_spec::Nqn;
use nvme_spec::cluster::{MEMBERS_MAX, NextData, Notice, PAGE_SHIFT};
use spindle_reactor::clock::Nanos;
use spindle_reactor::lock::Lock;

use crate::directory::{Directory, LongWrite, SHORT_PAGES_MAX};
use crate::members::{LEASE, Member, Owner, Told, Wake};

/// Time after the start for which writes wait: what members of a former process have is not known.
pub const START_WAIT: Nanos = LEASE;
/// Time between two looks for members whose lease has ended.
const CLEAR_PERIOD: Nanos = Nanos::from_ms(50);
/// Numbers of writes: an entry has 30 bits for one.
const NUMBERS: u32 = 1 << 30;

/// Why a host cannot join.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JoinError {
    /// The host is not one of the agents of the disk.
    NotAllowed,
    /// All [`MEMBERS_MAX`] numbers are in use: by members, and by former ones that are not over, whose
    /// controller has an I/O queue, or whose registrations are not removed yet.
    Full,
}

/// The members of one disk, shared by all cores.
pub struct Cluster {
    directory: Directory,
    members: Box<[Member]>,
    /// Members that may have pages, a bit each. A member that is over may still be in it.
    active: AtomicU64,
    clearing: Lock<Clearing>,
    /// Numbers whose [`Membership`] was dropped, a bit each.
    gone: AtomicU64,
    agents: Lock<Vec<Nqn>>,
    /// End of the wait after the start.
    writes_from: Nanos,
    numbers: AtomicU32,
    /// Cores that sleep while writes of theirs wait for members, or are about to, a bit each.
    waiting: AtomicU64,
    /// What wakes a core. Set by the first join.
    wake: OnceLock<Wake>,
}

/// Removal of the registrations of members that are gone.
#[derive(Default)]
struct Clearing {
    /// Members whose registrations are being removed, a bit each, and the next extent of that.
    members: u64,
    next: u64,
    /// Next time to look for members that are gone and over.
    look_at: Nanos,
}

/// A controller that has joined. Dropped only when no I/O queue of the controller is left: then the number
/// may be used again, and no write that was not begun yet names it.
pub struct Membership {
    cluster: Arc<Cluster>,
    number: u8,
    /// The first Next was answered.
    has_answered: AtomicBool,
}

#[derive(Debug)]
enum Marked {
    /// Its extents are marked, and its members are known.
    Short,
    /// Waits for a place among the long writes.
    None,
    /// Has a place; looks for members from this extent of its own on.
    Long(LongWrite, u64),
    /// Has a place, and its members are known.
    LongDone(LongWrite),
}

/// A write of a clustered disk. [`Cluster::end_write`] must be called for it.
#[derive(Debug)]
pub struct ClusterWrite {
    pages: Range<u64>,
    number: u32,
    marked: Marked,
    /// Members to tell, a bit each.
    to_tell: u64,
    /// Bits of members that are not told: the sender.
    except: u64,
    /// Entries of the members that were told. The first `answered` are acknowledged.
    told: Vec<Told>,
    answered: usize,
}

impl ClusterWrite {
    /// Returns true if the write waits for members only, not for a place or for the end of a search.
    #[must_use]
    pub fn knows_members(&self) -> bool {
        matches!(self.marked, Marked::Short | Marked::LongDone(_))
    }
}

impl Cluster {
    /// Creates the cluster of a disk of `bytes` bytes. `agents`: the hosts that may join. Writes wait until
    /// `writes_from`: [`START_WAIT`] after the start of the process.
    #[must_use]
    pub fn new(bytes: u64, agents: Vec<Nqn>, writes_from: Nanos) -> Arc<Cluster> {
        Arc::new(Cluster {
            directory: Directory::new(bytes.div_ceil(1 << PAGE_SHIFT)),
            members: (0..MEMBERS_MAX).map(|_| Member::new()).collect(),
            active: AtomicU64::new(0),
            clearing: Lock::default(),
            gone: AtomicU64::new(0),
            agents: Lock::new(agents),
            writes_from,
            numbers: AtomicU32::new(0),
            waiting: AtomicU64::new(0),
            wake: OnceLock::new(),
        })
    }

    /// Returns the bytes of memory of the cluster of a disk of `bytes` bytes, without the queues of members.
    #[must_use]
    pub fn memory_bytes(bytes: u64) -> u64 {
        Directory::<AtomicU64>::bytes_for(bytes.div_ceil(1 << PAGE_SHIFT))
    }

    /// Adds a member, whose former membership `former` (0: none) is over: it has dropped the pages of that.
    /// `wake`: what wakes a core, and the core that sends the entries: woken for each entry of an empty
    /// queue, under its lock.
    ///
    /// # Errors
    /// [`JoinError`].
    pub fn join(
        self: &Arc<Cluster>,
        host: Nqn,
        (incarnation, former): (u64, u64),
        now: Nanos,
        wake: (Wake, usize),
    ) -> Result<Membership, JoinError> {
        if !self.agents.lock().contains(&host) {
            return Err(JoinError::NotAllowed);
        }
        let owner = Owner { host, incarnation };
        let mut place = None;
        for (number, member) in (0..).zip(&self.members) {
            let mut has = member.owner.lock();
            match &*has {
                Some(other) if former != 0 && (other.host, other.incarnation) == (host, former) => {
                    member.end();
                    self.wake_waiting();
                }
                None if place.is_none() => {
                    *has = Some(owner);
                    place = Some((number, member));
                }
                Some(_) | None => {}
            }
        }
        let (number, member) = place.ok_or(JoinError::Full)?;
        let _ = self.wake.set(Arc::clone(&wake.0));
        member.begin(now, wake);
        self.active.fetch_or(1 << number, Ordering::AcqRel);
        Ok(Membership { cluster: Arc::clone(self), number, has_answered: AtomicBool::new(false) })
    }

    fn member(&self, number: u8) -> &Member {
        &self.members[usize::from(number) % MEMBERS_MAX]
    }

    /// Begins a write of a few pages that nobody has, and returns true: it goes to the disk at once, and
    /// [`Cluster::end_free`] ends it. False: nothing was begun; the caller calls [`Cluster::begin_write`].
    #[inline]
    #[must_use]
    pub fn begin_free(&self, pages: &Range<u64>, sender: Option<u8>, now: Nanos) -> bool {
        if pages.end - pages.start > SHORT_PAGES_MAX || now < self.writes_from {
            return false;
        }
        let members = self.directory.begin_short(pages);
        let is_free = members & !sender.map_or(0, |sender| 1 << sender) == 0;
        if !is_free {
            self.directory.end_short(pages);
        }
        is_free
    }

    /// Ends a write that [`Cluster::begin_free`] began, after the disk has ended it.
    #[inline]
    pub fn end_free(&self, pages: &Range<u64>) {
        self.directory.end_short(pages);
    }

    /// Begins a write: from now on no member may keep pages of it that it reads. `sender`: the member that
    /// sends it, which is not told. [`Cluster::step_write`] says when it goes to the disk.
    #[inline]
    pub fn begin_write(&self, pages: Range<u64>, sender: Option<u8>, told: Vec<Told>) -> ClusterWrite {
        let except = sender.map_or(0, |sender| 1 << sender);
        let is_short = pages.end - pages.start <= SHORT_PAGES_MAX;
        let (marked, members) = match is_short {
            true => (Marked::Short, self.directory.begin_short(&pages)),
            false => (Marked::None, 0),
        };
        let to_tell = members & !except;
        ClusterWrite { pages, number: 0, marked, to_tell, except, told, answered: 0 }
    }

    /// Tells members, and looks whether all have answered. Returns true when the write may go to the disk;
    /// after that it is not called again.
    #[inline]
    pub fn step_write(&self, write: &mut ClusterWrite, now: Nanos) -> bool {
        if now < self.writes_from {
            return false;
        }
        if matches!(write.marked, Marked::Short) && write.to_tell == 0 && write.told.is_empty() {
            return true;
        }
        self.step_told(write, now)
    }

    #[cold]
    fn step_told(&self, write: &mut ClusterWrite, now: Nanos) -> bool {
        let is_marked = self.mark_long(write);
        self.tell(write, now);
        while let Some(told) = write.told.get(write.answered)
            && self.member(told.member).has_answered(told, now)
        {
            write.answered += 1;
        }
        is_marked && write.to_tell == 0 && write.answered == write.told.len()
    }

    /// Marks the range of a long write, and looks for members in some of its extents. Returns true when all
    /// members are known.
    fn mark_long(&self, write: &mut ClusterWrite) -> bool {
        if matches!(write.marked, Marked::None) {
            let Some(long) = self.directory.begin_long(&write.pages) else { return false };
            write.marked = Marked::Long(long, 0);
        }
        let Marked::Long(_, next) = &mut write.marked else { return true };
        let (members, is_last) = self.directory.step_members(&write.pages, next);
        let told = write.told.iter().fold(0, |told, it| told | 1 << it.member);
        write.to_tell |= members & !write.except & !told;
        if is_last && let Marked::Long(long, _) = std::mem::replace(&mut write.marked, Marked::None) {
            write.marked = Marked::LongDone(long);
        }
        is_last
    }

    /// Enters an Invalidate for each member that is to be told and has room. Those that are over need none.
    fn tell(&self, write: &mut ClusterWrite, now: Nanos) {
        write.to_tell &= self.active.load(Ordering::Acquire);
        if write.to_tell != 0 && write.told.is_empty() {
            write.number = self.numbers.fetch_add(1, Ordering::Relaxed) % NUMBERS;
        }
        let count = write.pages.end - write.pages.start;
        let pages = u32::try_from(count).unwrap_or(u32::MAX);
        let notice = Notice::Invalidate { number: write.number, first: write.pages.start, pages };
        let mut left = write.to_tell;
        while left != 0 {
            // Below 64.
            let number = u8::try_from(left.trailing_zeros()).unwrap_or(0);
            left &= left - 1;
            let member = self.member(number);
            let told = if member.is_over(now) { None } else { member.tell(number, notice, now) };
            if told.is_some() || member.is_over(now) {
                write.to_tell &= !(1 << number);
            }
            write.told.extend(told);
        }
    }

    /// Asks that `core` is woken when a member has acknowledged something, has room again, or has left,
    /// after this call. The end of a lease wakes nobody. Returns false if it is not woken: its index is
    /// above 63.
    ///
    /// Called before the looks of [`Cluster::step_write`]: both sides exchange the same word, so a member
    /// that has answered after the look finds the core in it.
    #[cold]
    #[must_use]
    pub fn wake_when_answered(&self, core: usize) -> bool {
        let is_named = core < 64;
        self.waiting.fetch_or(u64::from(is_named) << (core % 64), Ordering::AcqRel);
        is_named
    }

    fn wake_waiting(&self) {
        let mut cores = self.waiting.swap(0, Ordering::AcqRel);
        while let (true, Some(wake)) = (cores != 0, self.wake.get()) {
            wake(cores.trailing_zeros() as usize);
            cores &= cores - 1;
        }
    }

    /// Ends a write, after the disk has ended it, or without having been submitted to the disk. Returns the
    /// emptied list for the next write.
    #[inline]
    pub fn end_write(&self, write: ClusterWrite, now: Nanos) -> Vec<Told> {
        match &write.marked {
            Marked::Short => self.directory.end_short(&write.pages),
            Marked::Long(long, _) | Marked::LongDone(long) => self.directory.end_long(long),
            Marked::None => {}
        }
        let mut told = write.told;
        for told in told.drain(..) {
            self.member(told.member).tell_done(&told, Notice::Done { number: write.number }, now);
        }
        told
    }

    /// Registers the extents of `pages` for member `number`. Returns true if it may keep what it reads of
    /// them from now on.
    #[must_use]
    pub fn register(&self, pages: &Range<u64>, number: u8, now: Nanos) -> bool {
        let number = number % 64;
        self.directory.register(pages, number) && !self.member(number).is_over(now)
    }

    /// Removes registrations of former members, some in each call. Returns true if there are more to remove
    /// now.
    #[inline]
    pub fn step(&self, now: Nanos) -> bool {
        self.gone.load(Ordering::Relaxed) != 0 && self.step_clear(now)
    }

    #[cold]
    fn step_clear(&self, now: Nanos) -> bool {
        let Some(mut clearing) = self.clearing.try_lock() else { return false };
        let Clearing { members, next, look_at } = &mut *clearing;
        if *members == 0 {
            if now < *look_at {
                return false;
            }
            *look_at = now + CLEAR_PERIOD;
            let gone = self.gone.load(Ordering::Acquire);
            let is_gone = |(number, member): &(u8, &Member)| gone >> number & 1 == 1 && member.is_over(now);
            let gone = (0..).zip(&self.members).filter(is_gone);
            (*members, *next) = (gone.fold(0, |members, (number, _)| members | 1 << number), 0);
            // Writes need not tell them from now on.
            self.active.fetch_and(!*members, Ordering::AcqRel);
        }
        if *members == 0 || !self.directory.step_clear(*members, next) {
            return *members != 0;
        }
        self.gone.fetch_and(!*members, Ordering::AcqRel);
        for (number, member) in (0..).zip(&self.members) {
            if *members >> number & 1 == 1 {
                *member.owner.lock() = None;
            }
        }
        *members = 0;
        false
    }

    /// Returns the numbers of the members that are not over.
    pub fn members(&self, now: Nanos) -> impl Iterator<Item = u8> {
        let is_in = move |member: &Member| member.owner.lock().is_some() && !member.is_over(now);
        (0..).zip(&self.members).filter(move |(_, member)| is_in(member)).map(|(number, _)| number)
    }
}

impl Membership {
    /// Returns the number of the member, below [`MEMBERS_MAX`].
    #[must_use]
    pub fn number(&self) -> u8 {
        self.number
    }

    /// Returns log2 of the pages of an extent.
    #[must_use]
    pub fn extent_shift(&self) -> u8 {
        u8::try_from(self.cluster.directory.shift()).unwrap_or(u8::MAX)
    }

    /// Returns true if this is a membership of `cluster`.
    #[must_use]
    pub fn is_of(&self, cluster: &Arc<Cluster>) -> bool {
        Arc::ptr_eq(&self.cluster, cluster)
    }

    fn member(&self) -> &Member {
        self.cluster.member(self.number)
    }

    /// Handles the acknowledgement of a Next that has arrived. Returns false if it names an entry that was
    /// not sent.
    #[must_use]
    pub fn acknowledge(&self, sequence: u64) -> bool {
        let is_known = self.member().acknowledge(sequence);
        self.cluster.wake_waiting();
        is_known
    }

    /// Renews the lease for a Next that arrived at `now` or before. Returns false if the member is over.
    #[must_use]
    pub fn renew(&self, now: Nanos) -> bool {
        self.member().renew(now)
    }

    /// Returns true if the next answer is due at once: there are entries, or it is the first, with which the
    /// lease of the member begins.
    #[inline]
    #[must_use]
    pub fn is_answer_due(&self) -> bool {
        self.member().has_entries() || !self.has_answered.load(Ordering::Relaxed)
    }

    /// Moves entries into the data of a Next.
    pub fn take(&self, data: &mut NextData) {
        self.has_answered.store(true, Ordering::Relaxed);
        self.member().take(data);
        self.cluster.wake_waiting();
    }

    /// Returns true if the member is over at `now`.
    #[must_use]
    pub fn is_over(&self, now: Nanos) -> bool {
        self.member().is_over(now)
    }

    /// Returns true if the member has not acknowledged an entry for too long.
    #[must_use]
    pub fn is_silent(&self, now: Nanos) -> bool {
        self.member().is_silent(now)
    }

    /// The member has dropped all pages (Leave).
    pub fn leave(&self) {
        self.member().end();
        self.cluster.wake_waiting();
    }
}

impl Drop for Membership {
    /// The number is used again once the lease has ended.
    fn drop(&mut self) {
        self.cluster.gone.fetch_or(1 << self.number, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests;
