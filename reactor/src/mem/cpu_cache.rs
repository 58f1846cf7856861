//! Processor caches: a prefetch ([`prefetch`]), and a copy that bypasses the caches, for memory that is not
//! read soon ([`copy_nontemporal`]).
//!
//! UNSAFETY: intrinsics; the caller of the copy owns the memory.
#![expect(unsafe_code, reason = "an intrinsic that accesses nothing, and one that writes through a pointer")]

/// Bytes copied in one iteration: a cache line.
#[cfg(target_arch = "x86_64")]
const LINE_BYTES: usize = 64;

/// Copies `bytes` from `from` to `to` with non-temporal stores. An ordinary copy first reads every line that
/// it writes (docs/lab-notes.md, "Trials"). Ends with a store fence: other processors see the copy before any
/// later store of this processor. On processors other than x86-64 it is an ordinary copy.
///
/// Never inlined: `scripts/instructions` excludes it by its name.
///
/// # Safety
/// As for [`std::ptr::copy_nonoverlapping`]; `to` is aligned to 16 bytes, and `bytes` is a multiple of 64.
#[inline(never)]
pub(super) unsafe fn copy_nontemporal(from: *const u8, to: *mut u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
        for at in (0..bytes).step_by(LINE_BYTES) {
            // SAFETY: `at + LINE_BYTES` is at most `bytes`, so both accesses are inside of the caller's
            // ranges; `to` is aligned to 16 bytes. SSE2 is part of x86-64.
            unsafe {
                let (from, to) = (from.add(at).cast::<__m128i>(), to.add(at).cast::<__m128i>());
                let line = [0, 1, 2, 3].map(|part| _mm_loadu_si128(from.add(part)));
                for (part, value) in line.into_iter().enumerate() {
                    _mm_stream_si128(to.add(part), value);
                }
            }
        }
        // SAFETY: has no requirement. Non-temporal stores are unordered before this fence.
        unsafe { _mm_sfence() }
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: the caller guarantees the same contract (see Safety).
    unsafe {
        std::ptr::copy_nonoverlapping(from, to, bytes)
    }
}

/// Prefetches the cache line in which `place` begins. No effect on processors other than x86-64.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_copied_and_none_beside_them() {
        #[repr(align(64))]
        struct Lines([u8; 512]);
        let from: Vec<u8> = (0..200).collect();
        for skip in [0, 1, 7] {
            let mut to = Lines([0xee; 512]);
            // SAFETY: 192 bytes from `skip` on are in `from`, as many from 64 on in `to`, which is aligned.
            unsafe { copy_nontemporal(from[skip..].as_ptr(), to.0[64..].as_mut_ptr(), 192) };
            assert_eq!(to.0[64..256], from[skip..skip + 192]);
            assert!(to.0[..64].iter().chain(&to.0[256..]).all(|byte| *byte == 0xee));
        }
    }
}
