//! The connection of both ends, byte by byte and against each other. No sockets, no clock, no sleep.
#![forbid(unsafe_code)]

mod alloc;
mod closing;
mod digests;
mod direct;
mod golden;
mod pair;
mod paused;
mod rig;
mod sgl;
mod splits;
mod violations_controller;
mod violations_host;
mod wire;

#[global_allocator]
static ALLOCATOR: spindle_reactor::alloc_count::CountingAllocator =
    spindle_reactor::alloc_count::CountingAllocator;
