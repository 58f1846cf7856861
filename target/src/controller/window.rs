//! [`Window`]: the part of a log that the host asked for. Pieces of the log are put where they are in the
//! whole; what is outside of the window is dropped, so a log of any length is read at any offset without
//! being built.

/// Bytes `offset .. offset + length` of a log, zeroed before.
pub(crate) struct Window<'a> {
    offset: u64,
    data: &'a mut [u8],
}

impl<'a> Window<'a> {
    /// `data` shows the log from `offset`.
    pub(crate) fn new(offset: u64, data: &'a mut [u8]) -> Window<'a> {
        Window { offset, data }
    }

    /// True when any of `bytes` bytes at `at` is to be seen.
    pub(crate) fn shows(&self, at: u64, bytes: u64) -> bool {
        let end = self.offset.saturating_add(u64::try_from(self.data.len()).unwrap_or(u64::MAX));
        at < end && at.saturating_add(bytes) > self.offset
    }

    /// The log has `bytes` at `at`.
    pub(crate) fn put(&mut self, at: u64, bytes: &[u8]) {
        // One of the two is 0: what is cut off in front of the piece, or where the piece begins in the
        // window.
        let Ok(skip) = usize::try_from(self.offset.saturating_sub(at)) else { return };
        let Ok(start) = usize::try_from(at.saturating_sub(self.offset)) else { return };
        let (Some(from), Some(to)) = (bytes.get(skip..), self.data.get_mut(start..)) else { return };
        for (to, from) in to.iter_mut().zip(from) {
            *to = *from;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_window_shows_exactly_its_part(
            offset in 0_u64..80, length in 0_usize..80, at in 0_u64..80, piece in 0_usize..80
        ) {
            let piece: Vec<u8> = (1..=u8::try_from(piece).unwrap()).collect();
            let mut whole = [0_u8; 400];
            let start = usize::try_from(at).unwrap();
            whole[start..start + piece.len()].copy_from_slice(&piece);
            let mut data = vec![0; length];
            let mut window = Window::new(offset, &mut data);
            let shows = window.shows(at, u64::try_from(piece.len()).unwrap());
            window.put(at, &piece);
            let offset = usize::try_from(offset).unwrap();
            prop_assert_eq!(&data[..], &whole[offset..offset + length]);
            prop_assert_eq!(shows && length > 0 && !piece.is_empty(), data.iter().any(|byte| *byte != 0));
        }
    }

    #[test]
    fn pieces_far_away_are_dropped() {
        let mut data = [0; 4];
        let mut window = Window::new(u64::MAX - 4, &mut data);
        window.put(0, &[1; 16]);
        assert!(!window.shows(0, 16) && window.shows(u64::MAX - 2, 1));
        window.put(u64::MAX - 2, &[7; 16]);
        assert_eq!(data, [0, 0, 7, 7]);
    }
}
