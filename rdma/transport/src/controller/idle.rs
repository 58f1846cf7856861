//! A host that has gone without a word: asked whether it is there when nothing has been heard for long.
//!
//! Keep alive ends the controller of such a host, but not one with KATO 0, nor an I/O queue whose admin queue
//! is gone. Without anything posted no device notices either. So a silent connection posts an RDMA WRITE of
//! no bytes: it touches no memory and needs no key (InfiniBand Architecture 1.4, C9-88), the host's software
//! sees nothing of it, and a host that is not there lets the queue pair run out of retries.

use spindle_reactor::clock::Nanos;
use spindle_transport::FAST_PATH;

use super::chain::{Chain, Kind};
use super::{Blocks, Conn, Phase};

/// Silence after which a host is asked whether it is there. 15 s: with the retries of a queue pair a dead
/// host is gone within half a minute, and a live one is asked four times a minute.
pub const PROBE_AFTER: Nanos = Nanos::from_secs(15);

/// What is known of a host's silence.
#[derive(Debug, Default)]
pub(super) struct Silence {
    /// Something has completed since the last look.
    pub(super) is_broken: bool,
    /// Since when nothing has, as far as was looked at.
    since: Option<Nanos>,
}

impl Conn {
    /// To be called from time to time, much more often than the time to a probe. True: the host has been
    /// silent for so long that it is asked whether it is there; there is work to be posted.
    ///
    /// At most one probe is under way: while anything is posted, its completion will tell.
    pub fn watch(&mut self, now: Nanos) -> bool {
        let is_busy = std::mem::take(&mut self.silence.is_broken) || self.posted() > 0;
        if self.phase != Phase::Open || is_busy || !self.replies.is_empty() {
            self.silence.since = None;
            return false;
        }
        let since = *self.silence.since.get_or_insert(now);
        if now < since + self.config.probe_after {
            return false;
        }
        self.silence.since = None;
        let probe = self.add_chain(Chain::new(FAST_PATH, Kind::Probe, None, Blocks::new()));
        self.replies.extend(probe);
        probe.is_some()
    }
}
