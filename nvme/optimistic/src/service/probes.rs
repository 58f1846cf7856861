//! [`Probes`]: finds connections whose client is gone, or whose queue pair has ended.
//!
//! The target sees nothing of a client's READs, and a client that vanishes says nothing. So the target asks:
//!
//! ```text
//!   each PROBE_PERIOD, on each connection, at most one at a time:  RDMA WRITE of 0 bytes, signalled
//!     completes           the client's device is there
//!     fails               the queue pair has ended: a bad READ, or its retries have run out  ─> over
//!     not in ANSWER_MAX   the client is gone, and this device repeats for ever (soft-RoCE)   ─> over
//! ```
//!
//! A WRITE of no bytes needs no key and no READ resources of the client, and the client's software does not
//! see it. A client allows WRITEs without a key to it: the connection manager sets that for each queue pair.

use std::time::{Duration, Instant};

use spindle_rdma::VerbsError;

/// Time between the end of a probe and the next one. A queue pair that has ended is found in this time.
const PROBE_PERIOD: Duration = Duration::from_secs(5);
/// Longest wait for the completion of a probe, as that of NVMe connections for any work request.
const ANSWER_MAX: Duration = Duration::from_secs(30);

/// The queue pair of a connection; tests implement it without a device.
pub(crate) trait Probed {
    fn probe(&mut self) -> &mut Probe;

    /// Posts a signalled RDMA WRITE of no bytes, whose completion has `id`.
    fn post(&mut self, id: u64) -> Result<(), VerbsError>;
}

#[derive(Debug, Clone, Copy)]
enum ProbeState {
    /// No probe is posted; the next one is due at this time.
    Due(Instant),
    /// A probe is posted; the connection is over at this time.
    Posted(Instant),
    Failed,
}

/// The state of one connection. It needs no reference to its queue pair: ids are not used twice.
#[derive(Debug)]
pub(crate) struct Probe {
    id: u64,
    state: ProbeState,
}

impl Probe {
    /// `id` is used by no other connection of the process.
    pub(crate) fn new(id: u64, now: Instant) -> Probe {
        Probe { id, state: ProbeState::Due(now + PROBE_PERIOD) }
    }

    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    pub(crate) fn is_posted(&self) -> bool {
        matches!(self.state, ProbeState::Posted(_))
    }

    /// The probe has completed.
    pub(crate) fn completed(&mut self, is_ok: bool, now: Instant) {
        if self.is_posted() {
            self.state = if is_ok { ProbeState::Due(now + PROBE_PERIOD) } else { ProbeState::Failed };
        }
    }
}

/// Posts the probe of a connection if it is due and `may_post`. Returns true if the connection is over.
/// Completions are taken before, so that one that has come late counts.
pub(crate) fn is_over(connection: &mut impl Probed, may_post: bool, now: Instant) -> bool {
    let Probe { id, state } = *connection.probe();
    match state {
        ProbeState::Failed => true,
        ProbeState::Posted(end) => now >= end,
        ProbeState::Due(at) if now < at || !may_post => false,
        ProbeState::Due(_) => {
            connection.probe().state = ProbeState::Posted(now + ANSWER_MAX);
            connection.post(id).is_err()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What becomes of probes.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum Peer {
        /// The client's device answers.
        There,
        /// Nothing completes.
        Gone,
        /// A bad READ has ended the queue pair: what is posted is flushed.
        Ended,
        /// The device is lost, or its queue is full.
        Refuses,
    }

    struct Fake {
        peer: Peer,
        probe: Probe,
        posted: Vec<u64>,
    }

    impl Probed for Fake {
        fn probe(&mut self) -> &mut Probe {
            &mut self.probe
        }

        fn post(&mut self, id: u64) -> Result<(), VerbsError> {
            if self.peer == Peer::Refuses {
                return Err(VerbsError { verb: "ibv_post_send", errno: 22 });
            }
            self.posted.push(id);
            Ok(())
        }
    }

    impl Fake {
        fn new(id: u64, peer: Peer, now: Instant) -> Fake {
            Fake { peer, probe: Probe::new(id, now), posted: Vec::new() }
        }

        /// What the device completes until the next pass.
        fn step(&mut self, now: Instant) {
            assert!(self.posted.len() <= 1, "one at a time: the send queue has one entry");
            if !matches!(self.peer, Peer::Gone) {
                self.posted.drain(..).for_each(|_| self.probe.completed(self.peer == Peer::There, now));
            }
        }
    }

    const PASS: Duration = Duration::from_millis(100);

    #[test]
    fn clients_that_are_gone_or_whose_queue_pair_has_ended_make_room_and_others_stay() {
        let begin = Instant::now();
        let kinds = [Peer::There, Peer::Gone, Peer::Ended, Peer::Refuses];
        let mut all: Vec<Fake> =
            (0..128).zip(kinds.into_iter().cycle()).map(|(id, peer)| Fake::new(id, peer, begin)).collect();
        let left = |all: &[Fake], peer| all.iter().filter(|it| it.peer == peer).count();
        let mut now = begin;
        while now < begin + Duration::from_secs(3600) {
            now += PASS;
            all.iter_mut().for_each(|it| it.step(now));
            all.retain_mut(|it| !is_over(it, true, now));
            let since = now - begin;
            if since < PROBE_PERIOD {
                assert_eq!(all.len(), 128);
            } else if since < PROBE_PERIOD + ANSWER_MAX {
                assert_eq!(left(&all, Peer::Gone), 32, "after {since:?}");
            } else {
                assert_eq!(left(&all, Peer::Gone), 0);
            }
            if since > PROBE_PERIOD + PASS {
                assert_eq!((left(&all, Peer::Ended), left(&all, Peer::Refuses)), (0, 0));
            }
        }
        assert_eq!((all.len(), left(&all, Peer::There)), (32, 32));
    }

    #[test]
    fn a_client_that_vanishes_later_is_detected_and_a_stray_completion_is_ignored() {
        let begin = Instant::now();
        let mut it = Fake::new(7, Peer::There, begin);
        it.probe.completed(false, begin);
        assert!(!is_over(&mut it, true, begin + PASS), "nothing was posted");
        let mut now = begin + 10 * PROBE_PERIOD;
        assert!(!is_over(&mut it, false, now) && it.posted.is_empty(), "the completion queue is full");
        assert!(!is_over(&mut it, true, now) && it.posted == [7]);
        it.step(now);
        assert!(!it.probe.is_posted());
        it.peer = Peer::Gone;
        now += PROBE_PERIOD;
        assert!(!is_over(&mut it, true, now) && it.probe.is_posted());
        assert!(!is_over(&mut it, true, now + ANSWER_MAX - PASS));
        assert!(is_over(&mut it, true, now + ANSWER_MAX));
    }
}
