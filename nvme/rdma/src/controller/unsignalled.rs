//! The choice of SENDs without a completion, and their chains until they are known to have completed.
//!
//! ```text
//!   one batch:   WRITE SEND   WRITE SEND   WRITE SEND (signalled)       its completion ends the three chains
//!                  chain 1      chain 2      chain 3: `ends` is 2
//! ```
//! A signalled SEND costs a PCIe write of the device and a step of the poller. But only a completion frees
//! the buffer of a chain, its entries of the send queue and its entry of the host's queue. So a SEND is
//! unsignalled only if a signalled work request follows it in the same batch: no chain waits for a later
//! reply, which may never come. A run of them is short, so that a large batch gives memory back in steps.

use std::collections::VecDeque;

use spindle_reactor::slab::Slot;

/// Maximum chains in a row without a signal, as at the host's end.
const CHAINS_MAX: u32 = 15;
/// Maximum buffer bytes of all chains of one run. A longer transfer costs much more than its completion.
const BYTES_MAX: usize = 64 << 10;

/// The chains of unsignalled SENDs.
#[derive(Debug)]
pub(super) struct Unsignalled {
    /// Chains whose SEND is unsignalled and not known to have completed, oldest first.
    chains: VecDeque<Slot>,
    /// The last so many of `chains` have no signalled work request behind them yet.
    run: u32,
    /// Work requests and bytes of the chains of the run.
    work: u32,
    bytes: usize,
    /// Maximum work requests of a run: a quarter of the send queue, so that it never waits for one run.
    work_max: u32,
}

impl Unsignalled {
    /// `chains`: maximum posted chains.
    pub(super) fn new(send_queue: u32, chains: usize) -> Unsignalled {
        let work_max = send_queue / 4;
        Unsignalled { chains: VecDeque::with_capacity(chains), run: 0, work: 0, bytes: 0, work_max }
    }

    /// Adds a chain to the run, whose last work request is a SEND, if it may be unsignalled. Returns false if
    /// the SEND must be signalled. `work` and `bytes`: work requests and bytes of the chain. The caller knows
    /// that a signalled work request follows in the same batch.
    #[inline]
    pub(super) fn add(&mut self, chain: Slot, work: u32, bytes: usize) -> bool {
        let (work, bytes) = (self.work + work, self.bytes + bytes);
        if self.run == CHAINS_MAX || work > self.work_max || bytes > BYTES_MAX {
            return false;
        }
        (self.work, self.bytes, self.run) = (work, bytes, self.run + 1);
        self.chains.push_back(chain);
        true
    }

    /// Ends the run with a signalled work request. Returns the count of chains that its completion ends.
    #[inline]
    pub(super) fn end_run(&mut self) -> u32 {
        (self.work, self.bytes) = (0, 0);
        std::mem::take(&mut self.run)
    }

    /// Returns the oldest chain, whose run's signalled work request has completed.
    #[inline]
    pub(super) fn take(&mut self) -> Option<Slot> {
        self.chains.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(index: u32) -> Slot {
        Slot::from_wire(1 << 16 | index)
    }

    /// Count of chains of `work` work requests and `bytes` bytes each in one run.
    fn run(send_queue: u32, work: u32, bytes: usize) -> u32 {
        let mut unsignalled = Unsignalled::new(send_queue, 64);
        for _ in 0..2 {
            let count = (0..64).take_while(|index| unsignalled.add(chain(*index), work, bytes)).count();
            assert_eq!(unsignalled.end_run() as usize, count);
        }
        let count = unsignalled.chains.len() / 2;
        (0..2 * count).for_each(|_| assert!(unsignalled.take().is_some()));
        assert_eq!(unsignalled.take(), None);
        u32::try_from(count).expect("few")
    }

    #[test]
    fn a_run_is_short() {
        assert_eq!(run(256, 2, 4096), 15, "chains");
        assert_eq!(run(256, 1, 0), 15, "no memory");
        assert_eq!(run(256, 2, 16 << 10), 4, "64 KiB");
        assert_eq!(run(256, 2, (64 << 10) + 1), 0, "one large transfer");
        assert_eq!(run(256, 17, 4096), 3, "a quarter of the queue");
        assert_eq!(run(32, 2, 4096), 4);
        assert_eq!(run(7, 2, 4096), 0);
        assert_eq!(run(2, 1, 0), 0);
    }

    #[test]
    fn the_chains_of_a_run_are_taken_in_their_order() {
        let mut unsignalled = Unsignalled::new(256, 64);
        assert!((0..3).all(|index| unsignalled.add(chain(index), 2, 4096)));
        assert_eq!((unsignalled.end_run(), unsignalled.end_run()), (3, 0));
        assert!(unsignalled.add(chain(3), 2, 4096));
        assert_eq!(unsignalled.end_run(), 1);
        let taken: Vec<_> = std::iter::from_fn(|| unsignalled.take()).collect();
        assert_eq!(taken, (0..4).map(chain).collect::<Vec<_>>());
    }
}
