//! Memory of the data path: mapped regions, the buffer pool, and the frames of RAM disks and caches. Also
//! areas for registration with devices, the record of unmapped ranges, and prefetches.
//!
//! Data of commands lies in a [`Region`] that was mapped when its pool, disk or cache was created, in the
//! static zeroes, or, if a pool is empty, on the heap ([`Buf::heap`]). A [`Buf`] is an owned handle to a part
//! of this memory. The drop of the `Buf` frees the part, so no error path, abort or disconnect can leak it.
//!
//! ```text
//!   Region ──┬── Pool (zones of equal buffers, one pool a core)     ── Buf, writable
//!            ├── FrameStore (4 KiB frames of a RAM disk, all cores) ── Buf, writable (not yet published)
//!            │                                                      └ Buf, shared (pins frames)
//!            └── CacheFrames (4 KiB frames of a cache, all cores)    ── Buf, writable (being filled)
//!                                                                    └ Buf, shared (pins frames)
//! ```
//!
//! The module does no I/O and has no protocol. All `unsafe` code for this memory is in this directory; its
//! users get slices.
//!
//! Limits: a `Buf` stays on the core that took it (it is `!Send`); a store has at most `u32::MAX` frames.

mod area;
mod atomic;
mod buf;
mod cache;
mod cpu_cache;
mod frames;
mod pool;
mod region;
mod seals;
mod shares;
mod unmaps;

pub use area::{Area, MemoryWatch, ResidentBytes};
pub use atomic::{AtomicCount, AtomicWord};
#[cfg(feature = "count-copies")]
pub use buf::copied_bytes;
pub use buf::{Buf, SEGMENTS_MAX, note_copied};
pub use cache::{
    CacheCore, CacheFrames, CacheMemory, Filling, FrameWords, HEAT_MAX, Invalidated, KeptPin, Lookup, Pin,
    Shard,
};
pub use cpu_cache::prefetch;
pub use frames::{FRAME_BYTES, FrameCore, FrameStore, FrameUse, SwapError};
pub use pool::{PIECES_MAX, Pool, PoolError, Share, ZoneSpec, can_serve};
pub use region::{PageSizes, Pages, Region, RegionError};
pub use seals::{Reference, SealedFrames, Seals};
pub use shares::{Holder, SHARE_BYTES};
pub use unmaps::{NewUnmaps, UNMAPS_KEPT, Unmaps, Watch, unmaps};
