//! [`Layout`]: what the frames of a RAM disk are used for.

use super::extents::EXTENT_PAGES;
use super::{FRAME, FRESH_BATCH};

/// What the frames of a store are.
pub(super) struct Layout {
    /// Extents that are homes of pages.
    pub(super) homes: u64,
    /// Further extents, for large writes: half of the slack.
    pub(super) spares: u64,
    /// Frames of no extent, for smaller ones: the other half, and what one core takes at a time.
    pub(super) small: u64,
}

impl Layout {
    pub(super) fn of(capacity_bytes: u64, slack_bytes: u64) -> Layout {
        let extent_bytes = u64::from(EXTENT_PAGES) * FRAME;
        let spares = slack_bytes / 2 / extent_bytes;
        let small = (slack_bytes - spares * extent_bytes).div_ceil(FRAME);
        Layout {
            homes: capacity_bytes.div_ceil(extent_bytes),
            spares,
            small: small.saturating_add(u64::from(FRESH_BATCH)),
        }
    }
}
