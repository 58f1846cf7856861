//! The reactor: what one pinned thread per core is made of.
//!
//! Memory of the data path ([`mem`]), generation-checked slots ([`slab`]), sockets ([`net`]), io_uring of
//! disks and of many sockets ([`uring`]), mailboxes between cores ([`mailbox`]), pinning ([`affinity`]), time
//! ([`clock`]), limits for what peers can make us say ([`rate`]), locks off the data path ([`lock`]), and a
//! count of allocations for tests ([`alloc_count`]).
//!
//! What it does not do: it knows no NVMe and no protocol.
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
