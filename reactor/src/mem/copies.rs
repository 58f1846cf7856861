//! How many bytes of data user space copies, for tests that assert that it copies none.
//!
//! Counted where data of commands is copied: [`Buf::copy_in`](super::Buf::copy_in) and
//! [`Buf::copy_out`](super::Buf::copy_out), the rest of a page beside what a write covers, what stays behind
//! of a received batch. Headers are not data. Only with the feature `count-copies`; without it nothing of
//! this is in the binary.

#[cfg(feature = "count-copies")]
thread_local! {
    static COPIED: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// Bytes of data that the calling thread has copied.
#[cfg(feature = "count-copies")]
#[must_use]
pub fn copied_bytes() -> u64 {
    COPIED.with(std::cell::Cell::get)
}

/// Data was copied, elsewhere than in a [`Buf`](super::Buf)'s own functions.
#[inline(always)]
pub fn note_copied(bytes: usize) {
    #[cfg(feature = "count-copies")]
    COPIED.with(|copied| copied.set(copied.get() + bytes as u64));
    #[cfg(not(feature = "count-copies"))]
    let _ = bytes;
}
