//! How full the send queue is, and which of its SENDs get a completion.
//!
//! ```text
//!   posted:   . . . S . . . . . . . S . S        S: signalled; its completion frees the dots before it too
//!   ledger:         4               8   2
//! ```
//! A device completes the work requests of one queue in their order. So a signalled one that is over says
//! that all before it are, and the first of the ledger is the only one that can be over next.

use std::collections::VecDeque;

use spindle_reactor::slab::Slot;

/// Every so many SENDs one is signalled: each completion is a write of the device over the bus and a turn of
/// the poller, and 16 in flight without one is far below any queue's length.
const SIGNAL_EVERY: u32 = 16;

/// The send queue's ledger.
#[derive(Debug)]
pub(super) struct Sends {
    free: u32,
    /// When no more than this are free, every SEND is signalled.
    low: u32,
    /// Posted since the last one that is signalled.
    silent: u32,
    /// The signalled ones that are in flight, and how many each frees.
    signalled: VecDeque<(Slot, u32)>,
}

impl Sends {
    pub(super) fn new(capacity: u32) -> Sends {
        Sends {
            free: capacity,
            low: SIGNAL_EVERY.min(capacity / 2),
            silent: 0,
            signalled: VecDeque::with_capacity(capacity as usize),
        }
    }

    /// True when there is no room.
    #[inline]
    pub(super) fn is_full(&self) -> bool {
        self.free == 0
    }

    /// One more is posted: whether it is signalled. `None`: there is no room.
    #[inline]
    pub(super) fn post(&mut self, chain: Slot, is_awaited: bool) -> Option<bool> {
        self.free = self.free.checked_sub(1)?;
        self.silent += 1;
        // The last free one always is, so that a full queue has one whose end makes room.
        let is_signalled = is_awaited || self.silent >= SIGNAL_EVERY || self.free <= self.low;
        if is_signalled {
            self.signalled.push_back((chain, std::mem::take(&mut self.silent)));
        }
        Some(is_signalled)
    }

    /// A signalled one is over. False when it is not the one that must be next: the device is broken.
    #[inline]
    pub(super) fn end(&mut self, chain: Slot) -> bool {
        match self.signalled.front() {
            Some((next, count)) if *next == chain => {
                self.free += *count;
                self.signalled.pop_front();
                true
            }
            Some(_) | None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(index: u32) -> Slot {
        Slot::from_wire(1 << 16 | index)
    }

    #[test]
    fn every_16th_is_signalled_and_frees_16() {
        let mut sends = Sends::new(100);
        let signalled: Vec<u32> =
            (0..40).filter(|index| sends.post(chain(*index), false).expect("room")).collect();
        assert_eq!(signalled, [15, 31]);
        assert_eq!(sends.free, 60);
        assert!(!sends.end(chain(31)), "15 is before it");
        assert!(sends.end(chain(15)) && sends.end(chain(31)));
        assert_eq!(sends.free, 92);
        assert!(!sends.end(chain(31)), "over already");
    }

    #[test]
    fn an_awaited_one_is_signalled_and_frees_those_before_it() {
        let mut sends = Sends::new(100);
        assert_eq!(sends.post(chain(0), false), Some(false));
        assert_eq!(sends.post(chain(1), true), Some(true));
        assert!(sends.end(chain(1)));
        assert_eq!((sends.free, sends.silent), (100, 0));
    }

    #[test]
    fn a_queue_of_any_length_always_has_a_completion_to_wait_for() {
        for capacity in 1..70 {
            let mut sends = Sends::new(capacity);
            let mut posted = 0;
            while posted < 1000 {
                match sends.post(chain(posted), posted % 7 == 3) {
                    Some(_) => posted += 1,
                    None => {
                        assert!(sends.is_full());
                        let (next, _) = *sends.signalled.front().expect("one to wait for");
                        assert!(sends.end(next));
                    }
                }
                assert!(sends.free <= capacity);
            }
        }
    }
}
