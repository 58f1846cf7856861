//! Hints to the processor's cache. They change no result, only when it comes.
#![expect(unsafe_code, reason = "an intrinsic that accesses nothing")]

/// Ask for the cache line on which `place` begins. Does nothing where the processor cannot be asked.
#[inline(always)]
pub fn prefetch<T>(place: &T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a hint; it accesses nothing, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(place).cast()) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}
