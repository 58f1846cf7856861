//! [`Expectation`]: whether the bytes that come next are likely to be a large payload, so that only its
//! header should be received into the batch and the payload itself straight into its place.
//!
//! Payloads come in streams: after a large one, the next receive takes little. When that little was not
//! followed by a payload, whole batches are taken again. A wrong guess costs one system call or one copy,
//! never more.

/// Bytes of a batch while a large payload is expected: some headers, and little that has to be copied.
const HEADERS_BYTES: usize = 4096;

/// One connection's guess. Begins with whole batches.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Expectation {
    expects_payload: bool,
    was_cut: bool,
}

impl Expectation {
    /// How much of the batch to fill at most, when no payload is being received.
    #[inline]
    #[must_use]
    pub fn batch_bytes(&mut self) -> usize {
        if self.was_cut {
            // The last cut receive did not lead to a payload.
            *self = Expectation::default();
        }
        if self.expects_payload { HEADERS_BYTES } else { usize::MAX }
    }

    /// The batch was filled; `is_full`: with all that was asked for.
    #[inline]
    pub fn on_batch(&mut self, is_full: bool) {
        self.was_cut = self.expects_payload && is_full;
    }

    /// A payload is being received into its place.
    #[inline]
    pub fn on_direct(&mut self) {
        *self = Expectation { expects_payload: true, was_cut: false };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_only_are_taken_after_a_payload_until_small_commands_come() {
        let mut expects = Expectation::default();
        assert_eq!(expects.batch_bytes(), usize::MAX);
        expects.on_batch(true);
        assert_eq!(expects.batch_bytes(), usize::MAX);
        expects.on_direct();
        assert_eq!(expects.batch_bytes(), HEADERS_BYTES);
        expects.on_batch(false); // a lone capsule
        assert_eq!(expects.batch_bytes(), HEADERS_BYTES);
        expects.on_batch(true); // a header, with its payload behind it
        expects.on_direct();
        assert_eq!(expects.batch_bytes(), HEADERS_BYTES);
        expects.on_batch(true); // many capsules
        assert_eq!(expects.batch_bytes(), usize::MAX);
    }
}
