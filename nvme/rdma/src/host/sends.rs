//! Free entries of the send queue, and the choice of signalled SENDs.
//!
//! ```text
//!   posted:   . . . S . . . . . . . S . S        S: signalled; its completion frees the dots before it too
//!   signalled:      4               8   2
//! ```
//! A device completes the work requests of one queue in order. So the completion of a signalled SEND implies
//! that all earlier SENDs have completed, and that SEND must be the oldest in `signalled`.

use std::collections::VecDeque;

use spindle_reactor::slab::Slot;

/// At least one in 16 SENDs is signalled. Signalling each would cost a PCIe write of the device and a step of
/// the poller per SEND. The queue has 16 entries more for SENDs of unknown state.
const SIGNAL_EVERY: u32 = 16;

#[derive(Debug)]
pub(super) struct Sends {
    free: u32,
    /// With this many free entries or fewer, every SEND is signalled.
    low: u32,
    /// SENDs posted since the last signalled one.
    unsignalled: u32,
    /// Signalled SENDs in flight, oldest first, and the count of entries that the completion of each frees.
    signalled: VecDeque<(Slot, u32)>,
}

impl Sends {
    pub(super) fn new(capacity: u32) -> Sends {
        Sends {
            free: capacity,
            low: SIGNAL_EVERY.min(capacity / 2),
            unsignalled: 0,
            signalled: VecDeque::with_capacity(capacity as usize),
        }
    }

    #[inline]
    pub(super) fn is_full(&self) -> bool {
        self.free == 0
    }

    /// Reserves an entry and returns whether the SEND must be signalled; `None` if the queue is full.
    /// `is_awaited`: the command ends only after the SEND has completed.
    #[inline]
    pub(super) fn reserve(&mut self, chain: Slot, is_awaited: bool) -> Option<bool> {
        self.free = self.free.checked_sub(1)?;
        self.unsignalled += 1;
        // The SEND in the last entry is signalled, so a full queue always receives a completion.
        let is_signalled = is_awaited || self.unsignalled >= SIGNAL_EVERY || self.free <= self.low;
        if is_signalled {
            self.signalled.push_back((chain, std::mem::take(&mut self.unsignalled)));
        }
        Some(is_signalled)
    }

    /// Frees the entry of the completed signalled SEND of `chain`, and the entries of the unsignalled SENDs
    /// before it. False: it is not the oldest signalled one, so the device completed out of order.
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
            (0..40).filter(|index| sends.reserve(chain(*index), false).expect("room")).collect();
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
        assert_eq!(sends.reserve(chain(0), false), Some(false));
        assert_eq!(sends.reserve(chain(1), true), Some(true));
        assert!(sends.end(chain(1)));
        assert_eq!((sends.free, sends.unsignalled), (100, 0));
    }

    #[test]
    fn a_queue_of_any_length_always_has_a_completion_to_wait_for() {
        for capacity in 1..70 {
            let mut sends = Sends::new(capacity);
            let mut posted = 0;
            while posted < 1000 {
                match sends.reserve(chain(posted), posted % 7 == 3) {
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
