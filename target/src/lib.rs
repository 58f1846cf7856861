//! The NVMe-oF controller side, pure: subsystems, controllers, queue pairs, admin, I/O, discovery.
//!
//! It knows neither sockets nor verbs nor PCIe, makes no system call, reads no clock and has no thread: bytes
//! (by way of a [`Transport`](spindle_transport::Transport)), completions of disks, time and messages go in;
//! replies, disk commands, messages and notices come out. The same code runs in the appliance, in the seeded
//! simulator and under the fuzzers.
//!
//! Where a write goes:
//!
//! ```text
//!   shell: bytes ──> Transport::next_event ── Event::Command ──> qpair::Qpair::step_command
//!     ──> step_io ──> qpair::io::parse (checks; IoCommand) ──> step_buffer (memory of disk or pool, or wait)
//!     ──> Transport::fetch ... Event::Fetched ──> step_fetched ──> step_execute ──> Disk::submit
//!     ... core::TargetCore::poll ──> Disk::poll ──> Qpair::on_done ──> finish ──> Transport::reply
//!     ... Event::Sent ──> free
//! ```
//!
//! | file | what |
//! |---|---|
//! | [`core`] | one core: its queue pairs, disks, messages, timers; room for newcomers |
//! | [`env`](mod@env) | what the queue pairs of a core share; messages between cores |
//! | [`qpair`] | the request machine; I/O, fused and compound commands, the admin queue's plumbing |
//! | [`controller`] | Connect, properties, Identify, log pages, features, events, keep alive |
//! | [`leftovers`] | what queue pairs that are gone have left at the disks |
//! | [`discovery`] | the discovery log |
//! | [`snapshot`] | the configuration, immutable, swapped by message |
//! | [`shared`] | what cores share about controllers |
//! | [`counters`], [`notice`] | what hosts and operators read |
//!
//! What it does not do: reservations, ANA, authentication, namespace management; they are refused as the
//! specification says.
#![forbid(unsafe_code)]

pub mod controller;
pub mod core;
pub mod counters;
pub mod discovery;
pub mod env;
pub mod leftovers;
pub mod notice;
pub mod qpair;
pub mod shared;
pub mod snapshot;
