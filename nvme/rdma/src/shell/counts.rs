//! Counts of one core's verbs on one device, for `scripts/compare/rdma-operations`: written to the log
//! (debug) when the core is done with the device.

use spindle_rdma::{LIST_BATCH, Posting, RECEIVES_BATCH};

/// Totals since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Counts {
    /// Work completions, and polls that returned any.
    pub(super) completions: u64,
    pub(super) polls: u64,
    /// Receives posted, and the calls for them.
    receives: u64,
    receive_posts: u64,
    /// Work requests of send queues, and the doorbells for them.
    work: u64,
    work_posts: u64,
}

impl Counts {
    #[inline]
    pub(super) fn add_receives(&mut self, count: usize) {
        self.receives += count as u64;
        self.receive_posts += count.div_ceil(RECEIVES_BATCH) as u64;
    }

    #[inline]
    pub(super) fn add_work(&mut self, count: u32, posting: Posting) {
        self.work += u64::from(count);
        self.work_posts += match posting {
            Posting::Extended => 1,
            Posting::List => u64::from(count.div_ceil(LIST_BATCH)),
        };
    }

    /// Writes the totals to the log.
    #[cold]
    pub(super) fn log(&self, device: &str) {
        let Counts { completions, polls, receives, receive_posts, work, work_posts } = *self;
        tracing::debug!(
            device,
            completions,
            polls,
            receives,
            receive_posts,
            work,
            work_posts,
            "RDMA operations"
        );
    }
}
