//! Time-outs of a queue pair whose host does not send the data of its commands ([`Fetches`]) or does not read
//! its replies ([`StallDetector`]).
//!
//! Each fetch holds memory, and so does a reply with data. A host that keeps its connection alive but neither
//! sends nor reads would hold that memory for ever, so its queue pair is closed. Progress means that an
//! eighth of the outstanding fetches or replies ends within the time-out: a slow network with many commands
//! makes progress, a host that completes one among hundreds now and then does not.

use nvme_spec::status::Status;
use spindle_reactor::clock::Nanos;
use spindle_transport::RequestId;
use spindle_transport::Transport;

use super::request::State;
use super::{Qpair, Role};
use crate::env::Env;

/// Time within which an eighth of the outstanding fetches must end. For one of 2 MiB: 70 KB/s.
pub const FETCH_TIMEOUT: Nanos = Nanos::from_secs(30);
/// [`FETCH_TIMEOUT`] of Connect and admin commands while others wait for a buffer of the admin pool. The host
/// sends at most 1 KiB of data for such a command.
pub const FETCH_TIMEOUT_SHORT: Nanos = Nanos::from_secs(1);
/// Time within which an eighth of the replies that are not sent must be sent.
pub const REPLY_TIMEOUT: Nanos = Nanos::from_secs(30);
/// [`REPLY_TIMEOUT`] while a disk has little memory left and the waiting replies have more data than that:
/// writers on all cores wait for the memory.
pub const REPLY_TIMEOUT_SHORT: Nanos = Nanos::from_secs(2);
/// One in this many of the outstanding commands or replies must end within the time-out.
const QUOTA_DIVISOR: u32 = 8;

/// Measures for how long too few of the outstanding commands or replies have ended.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct StallDetector {
    /// `ended` when the measurement began.
    ended_before: u32,
    /// How many must end to begin a new measurement; fewer if less is outstanding by then.
    quota: u32,
    /// Begin of the measurement; `None`: nothing was outstanding.
    since: Option<Nanos>,
}

impl StallDetector {
    /// Time since a call last found the quota met, or something outstanding for the first time; 0: nothing is
    /// outstanding. `ended` is a total that wraps.
    pub(super) fn stalled_for(&mut self, now: Nanos, outstanding: u32, ended: u32) -> Nanos {
        if outstanding == 0 {
            self.since = None;
            return Nanos::ZERO;
        }
        let quota = outstanding.div_ceil(QUOTA_DIVISOR);
        match self.since {
            // If less is outstanding than at the beginning, the smaller quota counts.
            Some(since) if ended.wrapping_sub(self.ended_before) < self.quota.min(quota) => {
                Nanos(now.0.saturating_sub(since.0))
            }
            Some(_) | None => {
                *self = StallDetector { ended_before: ended, quota, since: Some(now) };
                Nanos::ZERO
            }
        }
    }
}

/// Totals of the fetches of a queue pair; both wrap.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Fetches {
    begun: u32,
    ended: u32,
    stalls: StallDetector,
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

    /// A fetch was cancelled: one less is outstanding, which does not count as progress.
    pub(super) fn cancel(&mut self) {
        self.begun = self.begun.wrapping_sub(1);
    }

    /// Time for which too few fetches have ended.
    pub(super) fn stalled_for(&mut self, now: Nanos) -> Nanos {
        self.stalls.stalled_for(now, self.begun.wrapping_sub(self.ended), self.ended)
    }
}

impl<T: Transport> Qpair<T> {
    /// Cancels the fetch of a request in `Fetching`. True: it is cancelled. False: the transport will soon
    /// complete the fetch, and the request then ends with `status`, unless it has an abort status already.
    pub(super) fn stop_fetch(&mut self, slot: RequestId, status: Status) -> bool {
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

    /// True when too few fetches have ended within the time-out.
    pub(super) fn is_stalled(&mut self, env: &Env) -> bool {
        let limit = match &self.role {
            Role::Closing => return false,
            Role::Fresh | Role::Admin(_) if env.is_reserve_short => FETCH_TIMEOUT_SHORT,
            Role::Fresh | Role::Admin(_) | Role::Io(_) => FETCH_TIMEOUT,
        };
        self.fetches.stalled_for(env.now) >= limit
    }

    /// True when too few replies were sent within the time-out: the host does not read.
    pub(super) fn is_unread(&mut self, env: &Env) -> bool {
        if matches!(self.role, Role::Closing) {
            return false;
        }
        let slotted = if self.requests.is_empty() { 0 } else { self.count(State::Replying) };
        let outstanding = u32::try_from(slotted + self.fast_path_inflight as usize).unwrap_or(u32::MAX);
        let stalled = self.reply_stalls.stalled_for(env.now, outstanding, self.replies_sent);
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
        // One of 255 now and then does not restart the time-out.
        for secs in 1..20 {
            fetches.end();
            fetches.begin();
            assert_eq!(at(&mut fetches, secs), secs);
        }
        (0..13).for_each(|_| fetches.end());
        assert_eq!(at(&mut fetches, 25), 0, "an eighth of them");
        // After most fetches are cancelled, an eighth of the rest is enough.
        (0..230).for_each(|_| fetches.cancel());
        fetches.end();
        assert_eq!(at(&mut fetches, 40), 15);
        fetches.end();
        assert_eq!(at(&mut fetches, 41), 0);
    }
}
