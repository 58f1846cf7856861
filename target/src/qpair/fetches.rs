//! [`Fetches`]: whether the data comes that a queue pair has asked its host for.
//!
//! Each fetch holds memory. A host that keeps its data back for ever, and lives on otherwise, would keep what
//! it has of the pool for ever; so a queue pair on which data is asked for and none comes has an end. What
//! counts is that one of its commands gets all of its data: a slow line with many commands makes progress.

use spindle_reactor::clock::Nanos;

use super::{Qpair, Role};
use crate::env::Env;
use crate::transport::Transport;

/// How long none of the commands that wait for data may get it: at 2 MiB, 70 KB/s.
pub const FETCH_TIMEOUT: Nanos = Nanos::from_secs(30);
/// The same for Connect and admin commands while others wait for a buffer of the reserve; theirs are at most
/// 8 KiB.
pub const FETCH_TIMEOUT_SHORT: Nanos = Nanos::from_secs(1);

/// How many fetches were begun and have ended, and since when none has.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Fetches {
    begun: u32,
    ended: u32,
    /// `ended` when it was looked at last.
    seen: u32,
    /// No fetch has ended since then, although one was asked for.
    since: Option<Nanos>,
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

    /// How long nothing has come, as far as it was looked at.
    pub(super) fn stalled_for(&mut self, now: Nanos) -> Nanos {
        if self.begun == self.ended {
            self.since = None;
            return Nanos::ZERO;
        }
        match self.since {
            Some(since) if self.seen == self.ended => Nanos(now.0.saturating_sub(since.0)),
            Some(_) | None => {
                self.since = Some(now);
                self.seen = self.ended;
                Nanos::ZERO
            }
        }
    }
}

impl<T: Transport> Qpair<T> {
    /// The host keeps back what it was asked for.
    pub(super) fn is_stalled(&mut self, env: &Env) -> bool {
        let limit = match &self.role {
            Role::Closing => return false,
            Role::Fresh | Role::Admin(_) if env.is_reserve_short => FETCH_TIMEOUT_SHORT,
            Role::Fresh | Role::Admin(_) | Role::Io(_) => FETCH_TIMEOUT,
        };
        self.fetches.stalled_for(env.now) >= limit
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
}
