//! The reactor: loop, memory, sockets, io_uring and mailboxes of a core's one pinned thread, without NVMe and
//! without a transport protocol. It uses no other crate of Spindle. Begin with [`run`]: a turn of the loop.
//!
//! | module | contents |
//! |---|---|
//! | [`run`] | the loop of a core: descriptors, mailbox, time, pollers, idle behaviour |
//! | [`mem`] | memory of the data path: regions, the buffer pool, frames of RAM disks and caches, unmaps |
//! | [`slab`] | generation-checked slots |
//! | [`net`] | sockets, epoll, wakers |
//! | [`uring`] | io_uring for disks: files, block devices, NVMe passthrough |
//! | [`mailbox`] | bounded queues between cores |
//! | [`affinity`] | pinning of threads, memory node of a thread |
//! | [`clock`] | time |
//! | [`rate`] | limits for log lines that peers cause |
//! | [`lock`] | a mutex for code off the data path |
//! | [`alloc_count`] | a count of allocations, for tests |
pub mod affinity;
pub mod alloc_count;
pub mod clock;
pub mod lock;
pub mod mailbox;
pub mod mem;
pub mod net;
pub mod rate;
pub mod run;
pub mod slab;
pub mod uring;

#[cfg(test)]
#[global_allocator]
static ALLOCATOR: alloc_count::CountingAllocator = alloc_count::CountingAllocator;
