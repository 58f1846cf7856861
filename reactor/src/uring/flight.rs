//! [`Flight`]: one operation from the moment it is taken until it comes back; [`Device`]: what makes the
//! entry for it, and knows what the kernel's answer means.
//!
//! ```text
//!   taken ── entry ──> in the kernel ── on_result ──> Ended
//!              ^                            │
//!              └── Again (short, or "not now")
//! ```

use std::io;
use std::ops::Range;

use io_uring::{cqueue, squeue};

use crate::mem::{Buf, PIECES_MAX, SEGMENTS_MAX};

/// What the operations of a ring are of.
pub trait Device {
    /// An entry of its submission queue.
    type Submission: squeue::EntryMarker;
    /// An entry of its completion queue.
    type Completion: cqueue::EntryMarker + Into<cqueue::Entry>;
    /// What is done, and where.
    type Operation;
    /// Why it was not done.
    type Error: From<io::Error>;

    /// The entry for what is left of an operation.
    fn entry(&self, flight: &Flight<Self::Operation>, data: &Data, user_data: u64) -> Self::Submission;

    /// The kernel's answer to the last entry, unless it is "not now".
    fn on_result(flight: &mut Flight<Self::Operation>, result: i32) -> Step<Self::Error>;
}

/// What a result means for the operation.
pub enum Step<E> {
    /// Some of it is left to do.
    Again,
    /// It is over.
    Ended(Result<(), E>),
}

/// An operation in flight. It owns its buffer.
pub struct Flight<O> {
    pub(super) token: u64,
    pub(super) operation: O,
    pub(super) buf: Option<Buf>,
    /// The bytes of the buffer that are left to do.
    pub(super) left: Range<usize>,
    is_read: bool,
    pub(super) retries: u8,
}

/// Where the data of an entry are.
pub struct Data {
    /// Of bytes, or with `is_vectors` of io vectors.
    pub(super) addr: *mut u8,
    /// How many of them.
    pub(super) count: u32,
    pub(super) is_vectors: bool,
    /// It is all that is left, not only the beginning.
    pub(super) is_whole: bool,
    /// The number under which the kernel knows the memory.
    pub(super) fixed: Option<u16>,
}

impl<O> Flight<O> {
    /// Without data.
    pub(super) fn bare(token: u64, operation: O) -> Flight<O> {
        Flight { token, operation, buf: None, left: 0..0, is_read: false, retries: 0 }
    }

    /// A read into `left` of the buffer.
    ///
    /// # Panics
    /// When the buffer is shared.
    pub(super) fn read(token: u64, operation: O, buf: Buf, left: Range<usize>) -> Flight<O> {
        assert!(buf.is_writable(), "a shared buffer is not read into");
        Flight { token, operation, buf: Some(buf), left, is_read: true, retries: 0 }
    }

    /// A write of `left` of the buffer.
    pub(super) fn write(token: u64, operation: O, buf: Buf, left: Range<usize>) -> Flight<O> {
        Flight { token, operation, buf: Some(buf), left, is_read: false, retries: 0 }
    }

    /// Where what is left of its data lies. `registered` tells the kernel's number of memory in a zone of a
    /// pool. Io vectors, if there is a need of them, are written to `vectors`.
    pub(super) fn data(
        &mut self,
        vectors: &mut Vec<libc::iovec>,
        registered: impl FnOnce(usize, u8) -> Option<u16>,
    ) -> Data {
        let (mut addr, mut fixed, mut is_whole) = (std::ptr::null_mut(), None, true);
        let mut count = self.left.len();
        let is_vectors = self.buf.as_ref().is_some_and(|buf| !buf.is_contiguous());
        match &mut self.buf {
            Some(buf) if is_vectors => {
                is_whole = fill(vectors, buf, &self.left, self.is_read);
                (addr, count) = (vectors.as_mut_ptr().cast(), vectors.len());
            }
            Some(buf) => {
                let (start, zone) = buf.device_target();
                fixed = zone.and_then(|zone| registered(start.as_ptr() as usize, zone));
                addr = start.as_ptr().wrapping_add(self.left.start);
            }
            None => {}
        }
        Data { addr, count: u32::try_from(count).unwrap_or(0), is_vectors, is_whole, fixed }
    }
}

/// The pieces of the bytes `part` of `buf`, as many as fit; true when all do.
fn fill(vectors: &mut Vec<libc::iovec>, buf: &mut Buf, part: &Range<usize>, is_read: bool) -> bool {
    vectors.clear();
    // The first time in this slot; its capacity is kept. A pool's buffers have few pieces.
    let pieces = buf.segments().take(PIECES_MAX + 1).count();
    vectors.reserve_exact(if pieces > PIECES_MAX { SEGMENTS_MAX } else { PIECES_MAX });
    let (mut skip, mut left) = (part.start, part.len());
    let mut push = |addr: *mut u8, bytes: usize| {
        let step = skip.min(bytes);
        skip -= step;
        let here = (bytes - step).min(left);
        if here > 0 && vectors.len() < SEGMENTS_MAX {
            left -= here;
            vectors.push(libc::iovec { iov_base: addr.wrapping_add(step).cast(), iov_len: here });
        }
    };
    if is_read {
        buf.segments_mut().for_each(|piece| push(piece.as_mut_ptr(), piece.len()));
    } else {
        buf.segments().for_each(|piece| push(piece.as_ptr().cast_mut(), piece.len()));
    }
    left == 0
}
