//! Time-outs of a queue pair whose host does not send the data of its commands ([`Fetches`]) or does not read
//! its replies ([`StallDetector`]).
//!
//! Each fetch and each reply with data occupies memory. A host that keeps its connection alive but neither
//! sends nor reads would occupy that memory for ever, so its queue pair is closed: after
//! [`FETCH_TIMEOUT`], or after [`STARVED_TIMEOUT`] while another host waits for memory. The test is
//! whether an eighth of the outstanding fetches or replies ends within the time-out. A slow network with
//! many commands passes; a host that now and then completes one of hundreds does not.

use nvme_spec::status::Status;
use spindle_nvme_transport::RequestId;
use spindle_nvme_transport::Transport;
use spindle_reactor::clock::Nanos;
use spindle_reactor::mem::Holder;

use super::request::RequestState;
use super::{Qpair, Role};
use crate::env::Env;
use crate::notice::Notice;

/// Time within which an eighth of the outstanding fetches must end. A single fetch of 2 MiB needs 70 KB/s.
pub const FETCH_TIMEOUT: Nanos = Nanos::from_secs(30);
/// [`FETCH_TIMEOUT`] of Connect and admin commands while other commands wait for a buffer of the admin pool.
/// The host sends at most 1 KiB of data for such a command.
pub const FETCH_TIMEOUT_SHORT: Nanos = Nanos::from_secs(1);
/// [`FETCH_TIMEOUT`] and [`REPLY_TIMEOUT`] of a host that has memory for which another host waits. The other
/// one's command then ends before the time-out of a Linux host's command, 30 s. Longer than the failover of a
/// switch.
pub const STARVED_TIMEOUT: Nanos = Nanos::from_secs(10);
/// [`STARVED_TIMEOUT`] while very many queue pairs wait.
const STARVED_TIMEOUT_MIN: Nanos = Nanos::from_secs(2);
/// [`STARVED_TIMEOUT`] is divided by one and once more for so many waiting queue pairs: those that wait may
/// be silent as well, and each has the memory for that time. The default pool has about so many buffers for
/// transfers of the largest size.
const STARVED_QUEUES: u32 = 8;
/// Time after which the log tells of a host whose memory makes no progress.
const STALL_NOTICE: Nanos = Nanos::from_secs(5);
/// Time within which an eighth of the outstanding replies must be sent.
pub const REPLY_TIMEOUT: Nanos = Nanos::from_secs(30);
/// [`REPLY_TIMEOUT`] while the unsent replies have more bytes of data than a disk with scarce memory has
/// free. Writers on all cores may wait for that memory.
pub const REPLY_TIMEOUT_SHORT: Nanos = Nanos::from_secs(2);
/// One in this many of the outstanding fetches or replies must end within the time-out.
const QUOTA_DIVISOR: u32 = 8;

/// Measures the time for which too few of the outstanding fetches or replies have ended.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct StallDetector {
    /// Value of `ended` at the start of the measurement.
    ended_before: u32,
    /// Number that must end before a new measurement starts; less if fewer are outstanding by then.
    quota: u32,
    /// Start of the measurement; `None`: nothing was outstanding.
    since: Option<Nanos>,
}

impl StallDetector {
    /// Returns the time since the start of the measurement. A call that finds the quota met starts a new
    /// measurement and returns 0. Also 0: nothing is outstanding. `ended` is a total that wraps.
    pub(super) fn stalled_for(&mut self, now: Nanos, outstanding: u32, ended: u32) -> Nanos {
        if outstanding == 0 {
            self.since = None;
            return Nanos::ZERO;
        }
        let quota = outstanding.div_ceil(QUOTA_DIVISOR);
        match self.since {
            // If fewer are outstanding than at the start, the smaller quota counts.
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

impl StallDetector {
    /// Does not count the last `time`, in which this core did not run.
    pub(super) fn excuse(&mut self, time: Nanos) {
        self.since = self.since.map(|since| since + time);
    }
}

/// Totals of the begun and ended fetches of a queue pair; both wrap.
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

    /// Removes a cancelled fetch from the outstanding ones, without counting it as progress.
    pub(super) fn cancel(&mut self) {
        self.begun = self.begun.wrapping_sub(1);
    }

    pub(super) fn excuse(&mut self, time: Nanos) {
        self.stalls.excuse(time);
    }

    /// Returns the time for which too few fetches have ended.
    pub(super) fn stalled_for(&mut self, now: Nanos) -> Nanos {
        self.stalls.stalled_for(now, self.begun.wrapping_sub(self.ended), self.ended)
    }
}

/// Returns the time-out of a host that has memory for which another one waits.
fn starved_timeout(env: &Env) -> Nanos {
    let rounds = u64::from(1 + env.waiting_queues / STARVED_QUEUES);
    Nanos((STARVED_TIMEOUT.0 / rounds).max(STARVED_TIMEOUT_MIN.0))
}

impl<T: Transport> Qpair<T> {
    /// Cancels the fetch of a request in `Fetching`. True: the fetch is cancelled. False: the transport
    /// completes the fetch without further action of the host. The request then ends with `status`, or with
    /// an abort status set earlier.
    pub(super) fn stop_fetch(&mut self, slot: RequestId, status: Status) -> bool {
        if self.transport.cancel(slot) {
            self.fetches.cancel();
            self.discharge(slot);
            return true;
        }
        if let Some(request) = self.requests.get_mut(slot) {
            request.abort_status.get_or_insert(status);
        }
        false
    }

    /// True when too few fetches have ended within the time-out.
    pub(super) fn is_stalled(&mut self, env: &mut Env) -> bool {
        let limit = match &self.role {
            Role::Closing => return false,
            Role::Fresh | Role::Admin(_) if env.is_admin_short => FETCH_TIMEOUT_SHORT,
            Role::Io(_) if self.starves_others(env) => starved_timeout(env),
            Role::Fresh | Role::Admin(_) | Role::Io(_) => FETCH_TIMEOUT,
        };
        let stalled = self.fetches.stalled_for(env.now);
        self.notice_stalled(env, stalled, "it does not send the data of its writes");
        env.has_lasted(stalled, limit)
    }

    /// True when too few replies were sent within [`REPLY_TIMEOUT`], [`STARVED_TIMEOUT`] or, if memory of
    /// a disk is scarce, [`REPLY_TIMEOUT_SHORT`]: the host does not read.
    pub(super) fn is_unread(&mut self, env: &mut Env) -> bool {
        if matches!(self.role, Role::Closing) {
            return false;
        }
        let slotted = if self.requests.is_empty() { 0 } else { self.count(RequestState::Replying) };
        let outstanding = u32::try_from(slotted + self.fast_path_inflight as usize).unwrap_or(u32::MAX);
        let stalled = self.reply_stalls.stalled_for(env.now, outstanding, self.replies_sent);
        self.notice_stalled(env, stalled, "it does not receive the data of its reads");
        let limit = match &self.role {
            Role::Io(_) if self.transport.unsent_bytes() > env.scarcest_bytes() => REPLY_TIMEOUT_SHORT,
            Role::Io(_) if self.starves_others(env) => starved_timeout(env),
            Role::Fresh | Role::Admin(_) if env.is_admin_short || self.starves_others(env) => {
                REPLY_TIMEOUT_SHORT
            }
            Role::Fresh | Role::Admin(_) | Role::Io(_) | Role::Closing => REPLY_TIMEOUT,
        };
        env.has_lasted(stalled, limit)
    }

    /// True when this queue's host has memory for which another host waits: buffers of the pool, or more
    /// memory of a disk for data to come than the disk has free.
    fn starves_others(&self, env: &Env) -> bool {
        let (holder, memory) = match &self.role {
            Role::Io(role) => (Holder::host(role.shared.client), Some(&role.shared.memory)),
            Role::Admin(_) | Role::Fresh | Role::Closing => (self.admin_holder(env), None),
        };
        let is_scarce =
            |(group, scarce): (usize, &u64)| memory.is_some_and(|memory| memory.disk_bytes(group) > *scarce);
        env.starved.has_other_than(holder) && env.pool.share(holder).held() > 0
            || env.scarce_bytes.iter().enumerate().any(is_scarce)
    }

    /// Tells once of a host that keeps memory without progress, and counts it.
    fn notice_stalled(&self, env: &mut Env, stalled: Nanos, what: &'static str) {
        let Role::Io(role) = &self.role else { return };
        if stalled < STALL_NOTICE || !role.shared.memory.note_stalled() {
            return;
        }
        env.registry.count_stalled_host();
        let pool = env.pool.share(Holder::host(role.shared.client)).held();
        let bytes = pool + role.shared.memory.all_disk_bytes() + self.transport.unsent_bytes();
        let (host, remote) = (role.shared.host_nqn, self.peer.remote);
        env.notice(Notice::Stalled { host, remote, bytes, what });
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
