//! [`Flight`]: one operation from its submission to its completion. [`Device`] makes the queue entries of the
//! operation and interprets the kernel's results.
//!
//! ```text
//!   taken ── entry ──> in the kernel ── on_result ──> Ended
//!              ^                            │
//!              └── Again (short, EINTR, EAGAIN)
//! ```

use std::io;
use std::ops::Range;

use io_uring::{cqueue, squeue};

use crate::mem::{Buf, PIECES_MAX, SEGMENTS_MAX};

/// Target of a ring's operations: files, or an NVMe namespace.
pub trait Device {
    /// Type of the submission queue entries.
    type Submission: squeue::EntryMarker;
    /// Type of the completion queue entries.
    type Completion: cqueue::EntryMarker + Into<cqueue::Entry>;
    /// Kind and position of an operation.
    type Operation;
    /// Error of a failed operation.
    type Error: From<io::Error>;

    /// Returns the entry for the rest of an operation.
    fn entry(&self, flight: &Flight<Self::Operation>, data: &Data, user_data: u64) -> Self::Submission;

    /// Interprets the result of the last entry. EINTR and EAGAIN are passed only after all retries.
    fn on_result(flight: &mut Flight<Self::Operation>, result: i32) -> Step<Self::Error>;
}

/// Next step of an operation after a result.
pub enum Step<E> {
    /// The operation, or the part of it that is left, must be queued again.
    Again,
    /// The operation has ended.
    Ended(Result<(), E>),
}

/// An operation in flight. It owns its buffer.
pub struct Flight<O> {
    pub(super) token: u64,
    pub(super) operation: O,
    pub(super) buf: Option<Buf>,
    /// Bytes of the buffer that are not transferred yet.
    pub(super) left: Range<usize>,
    is_read: bool,
    pub(super) retries: u8,
}

/// Memory that an entry refers to.
pub struct Data {
    /// Address of the bytes, or with `is_vectors` of the io vectors.
    pub(super) addr: *mut u8,
    /// Count of bytes, or of io vectors.
    pub(super) count: u32,
    pub(super) is_vectors: bool,
    /// True when this is all that is left to transfer; false: the rest has more than `SEGMENTS_MAX` segments.
    pub(super) is_whole: bool,
    /// Index of the registered buffer in which the memory lies. `None`: not registered, or io vectors.
    pub(super) fixed: Option<u16>,
}

impl<O> Flight<O> {
    pub(super) fn without_data(token: u64, operation: O) -> Flight<O> {
        Flight { token, operation, buf: None, left: 0..0, is_read: false, retries: 0 }
    }

    /// Creates a read into `left` of the buffer.
    ///
    /// # Panics
    /// When the buffer is shared.
    pub(super) fn read(token: u64, operation: O, buf: Buf, left: Range<usize>) -> Flight<O> {
        assert!(buf.is_writable(), "a shared buffer is not read into");
        Flight { token, operation, buf: Some(buf), left, is_read: true, retries: 0 }
    }

    pub(super) fn write(token: u64, operation: O, buf: Buf, left: Range<usize>) -> Flight<O> {
        Flight { token, operation, buf: Some(buf), left, is_read: false, retries: 0 }
    }

    /// Returns the memory of the bytes that are left. `registered` returns the index of the registered buffer
    /// for an address and its zone in the pool. Io vectors, for several segments, are written to `vectors`.
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
                is_whole = fill_iovecs(vectors, buf, &self.left, self.is_read);
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

/// Writes the segments of the bytes `part` of `buf` to `vectors`, at most [`SEGMENTS_MAX`]. Returns true when
/// these are all.
fn fill_iovecs(vectors: &mut Vec<libc::iovec>, buf: &mut Buf, part: &Range<usize>, is_read: bool) -> bool {
    vectors.clear();
    // The capacity is kept, so a slot allocates at its first list, and at its first list of more than
    // PIECES_MAX segments. A pool's buffers have at most PIECES_MAX.
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
