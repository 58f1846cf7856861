//! [`Fetches`]: whether the data comes that a queue pair has asked its host for, and whether the host takes
//! its answers ([`Progress`]).
//!
//! Each fetch holds memory, and so does an answer that lies on a disk. A host that keeps its data back or
//! does not read, and lives on otherwise, would keep that for ever; so a queue pair that makes no progress
//! has an end. What counts is that so many of its commands get all of their data, or leave: a slow line with
//! many commands makes progress, and one command now and then is none where hundreds are waited for.

use nvme_spec::status::Status;
use spindle_reactor::clock::Nanos;
use spindle_reactor::slab::Slot;
use spindle_transport::Transport;

use super::request::State;
use super::{Qpair, Role};
use crate::env::Env;

/// How long too few of the commands that wait for data may get it: at 2 MiB, 70 KB/s.
pub const FETCH_TIMEOUT: Nanos = Nanos::from_secs(30);
/// The same for Connect and admin commands while others wait for a buffer of the reserve; theirs are at most
/// 8 KiB.
pub const FETCH_TIMEOUT_SHORT: Nanos = Nanos::from_secs(1);
/// How long too few answers may leave.
pub const REPLY_TIMEOUT: Nanos = Nanos::from_secs(30);
/// The same while a disk has hardly any memory left and the answers that wait are more than that: writers on
/// all cores wait for what they pin.
pub const REPLY_TIMEOUT_SHORT: Nanos = Nanos::from_secs(2);
/// One of so many that are waited for has to come within the time.
const QUOTA: u32 = 8;

/// Whether enough of what is waited for ends.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Progress {
    /// How many had ended when the time began.
    seen: u32,
    /// How many of them were to end.
    quota: u32,
    since: Option<Nanos>,
}

impl Progress {
    /// How long too few have ended, as far as it was looked at: `outstanding` are waited for, `ended` have
    /// ended ever.
    pub(super) fn stalled_for(&mut self, now: Nanos, outstanding: u32, ended: u32) -> Nanos {
        if outstanding == 0 {
            self.since = None;
            return Nanos::ZERO;
        }
        let quota = outstanding.div_ceil(QUOTA);
        match self.since {
            // Who waits for less than at the beginning need not bring more than that.
            Some(since) if ended.wrapping_sub(self.seen) < self.quota.min(quota) => {
                Nanos(now.0.saturating_sub(since.0))
            }
            Some(_) | None => {
                *self = Progress { seen: ended, quota, since: Some(now) };
                Nanos::ZERO
            }
        }
    }
}

/// How many fetches were begun and have ended.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Fetches {
    begun: u32,
    ended: u32,
    progress: Progress,
}

impl Fetches {
    #[inline]
    pub(super) fn begin(&mut self) {
        self.begun = self.begun.wrapping_add(1);
    }

    #[inline]
    pub(super) fn end(&mut self) {
        self.ended = self.ended.wrapping_add(1);
    }

    /// The data is not waited for any more. That is no progress.
    pub(super) fn cancel(&mut self) {
        self.begun = self.begun.wrapping_sub(1);
    }

    /// How long too few have come, as far as it was looked at.
    pub(super) fn stalled_for(&mut self, now: Nanos) -> Nanos {
        self.progress.stalled_for(now, self.begun.wrapping_sub(self.ended), self.ended)
    }
}

impl<T: Transport> Qpair<T> {
    /// The data of a request in `Fetching` is not wanted any more. True: nothing of it comes. False: it does,
    /// soon, and the request ends with `status` then.
    pub(super) fn stop_fetch(&mut self, slot: Slot, status: Status) -> bool {
        if self.transport.cancel(slot) {
            self.fetches.cancel();
            if let Some(request) = self.requests.get_mut(slot) {
                self.charged -= u64::from(std::mem::take(&mut request.charged));
            }
            return true;
        }
        if let Some(request) = self.requests.get_mut(slot) {
            request.abort_status.get_or_insert(status);
        }
        false
    }

    /// The host keeps back what it was asked for.
    pub(super) fn is_stalled(&mut self, env: &Env) -> bool {
        let limit = match &self.role {
            Role::Closing => return false,
            Role::Fresh | Role::Admin(_) if env.is_reserve_short => FETCH_TIMEOUT_SHORT,
            Role::Fresh | Role::Admin(_) | Role::Io(_) => FETCH_TIMEOUT,
        };
        self.fetches.stalled_for(env.now) >= limit
    }

    /// The host does not take its answers.
    pub(super) fn is_unread(&mut self, env: &Env) -> bool {
        if matches!(self.role, Role::Closing) {
            return false;
        }
        let slotted = if self.requests.is_empty() { 0 } else { self.count(State::Replying) };
        let outstanding = u32::try_from(slotted + self.fast_path_inflight as usize).unwrap_or(u32::MAX);
        let stalled = self.replies.stalled_for(env.now, outstanding, self.left);
        stalled >= REPLY_TIMEOUT
            || stalled >= REPLY_TIMEOUT_SHORT && self.transport.unsent_bytes() > env.scarce_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_fetch_that_ends_starts_the_time_anew_and_none_is_none() {
        let mut fetches = Fetches::default();
        let at = |fetches: &mut Fetches, secs| fetches.stalled_for(Nanos::from_secs(secs)).as_ms() / 1000;
        assert_eq!(at(&mut fetches, 5), 0);
        (0..3).for_each(|_| fetches.begin());
        assert_eq!((at(&mut fetches, 10), at(&mut fetches, 19)), (0, 9));
        fetches.begin();
        assert_eq!(at(&mut fetches, 20), 10, "asking for more is no progress");
        fetches.end();
        assert_eq!((at(&mut fetches, 21), at(&mut fetches, 25)), (0, 4));
        (0..3).for_each(|_| fetches.end());
        assert_eq!(at(&mut fetches, 60), 0);
        fetches.begin();
        assert_eq!((at(&mut fetches, 70), at(&mut fetches, 71)), (0, 1));
    }

    #[test]
    fn one_now_and_then_is_no_progress_where_many_are_waited_for() {
        let mut fetches = Fetches::default();
        let at = |fetches: &mut Fetches, secs| fetches.stalled_for(Nanos::from_secs(secs)).as_ms() / 1000;
        (0..255).for_each(|_| fetches.begin());
        assert_eq!(at(&mut fetches, 0), 0);
        // Once each of them gave all of them another 30 s.
        for secs in 1..20 {
            fetches.end();
            fetches.begin();
            assert_eq!(at(&mut fetches, secs), secs);
        }
        (0..13).for_each(|_| fetches.end());
        assert_eq!(at(&mut fetches, 25), 0, "an eighth of them");
        // Who gives most of them up owes an eighth of the rest.
        (0..230).for_each(|_| fetches.cancel());
        fetches.end();
        assert_eq!(at(&mut fetches, 40), 15);
        fetches.end();
        assert_eq!(at(&mut fetches, 41), 0);
    }
}
