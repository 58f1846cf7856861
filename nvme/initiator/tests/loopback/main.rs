//! The initiator against a scripted controller over loopback sockets, in one process.
#![forbid(unsafe_code)]

mod allocation;
mod commands;
mod connecting;
mod events;
mod fake;
mod former;
mod losing;
mod sets;
mod waiting;

#[global_allocator]
static ALLOCATOR: spindle_reactor::alloc_count::CountingAllocator =
    spindle_reactor::alloc_count::CountingAllocator;
