//! The NVMe-oF controller side of Spindle: subsystems, controllers, queue pairs, admin and I/O commands,
//! discovery. **Read this crate first**; `docs/architecture.md` has the others and all paths.
//!
//! The crate makes no system call, reads no clock and has no thread. Input: events of a connection
//! ([`Transport`](spindle_nvme_transport::Transport)), completions of disks, time, messages of other cores.
//! Output: replies, disk commands, messages, notices for the log. The same code runs in the binary, in the
//! seeded simulator and in the fuzzers. It may use `nvme/spec`, `nvme/transport`, `target/disk`, `reactor`.
//!
//! ```text
//! write  shell: bytes ──> Transport::next_event ── Event::Command ──> qpair::Qpair::on_command
//!    fast path: data in the capsule, a disk with memory of its own for writes (RAM)
//!     ──> step_fast_path ──> write_fast_path: check, DiskChannel::prepare (Fill), take_in_capsule, submit
//!     ──> reply_fast_path ──> Transport::reply
//!    slab path: every other write (in pieces: `qpair::bulk`; fused: `qpair::fused`)
//!     ──> step_io ──> qpair::io::parse (checks; IoCommand) ──> step_buffer: DiskChannel::prepare
//!         (Fill: memory of the disk; Pool: a buffer of the pool; Wait)
//!     ──> Transport::fetch ... Event::Fetched ──> on_fetched ──> step_execute ──> DiskChannel::submit
//!     ... core::TargetCore::poll ──> DiskChannel::poll ──> Qpair::on_done ──> finish ──> Transport::reply
//!     ... Event::Sent ──> free
//! read   fast path: the disk has the data in memory (RAM, null, a cache hit)
//!     ──> step_fast_path ──> read_fast_path: check, DiskChannel::prepare (Ready) ──> reply_fast_path
//!    slab path: any other result of `prepare` (a Read that fails a check: `step_io`)
//!     ──> continue_read ──> step_buffer ──> step_execute ──> DiskChannel::submit ... as above
//! ```
//!
//! | module | contents |
//! |---|---|
//! | [`core`] | one core: its queue pairs, disks, messages, timers; eviction on a full core |
//! | [`env`](mod@env), [`shared`] | what the queue pairs of a core, and all cores, share |
//! | [`qpair`] | the request machine; I/O, fused and compound commands, the admin queue |
//! | [`controller`], [`discovery`] | Connect, properties, Identify, log pages, features, events, keep alive |
//! | [`orphaned_commands`] | disk commands that have not completed when their I/O queue ends |
//! | [`refusal`] | status of a failed command, and its field at fault |
//! | [`snapshot`] | the configuration, immutable, replaced by message |
//! | [`counters`], [`notice`] | statistics; log entries |
//!
//! Not supported: reservations, ANA, authentication, namespace management, firmware update, directives. Such
//! commands are refused with the status that the specification demands.
#![forbid(unsafe_code)]

mod busy;
pub mod controller;
pub mod core;
pub mod counters;
pub mod discovery;
pub mod env;
pub mod notice;
pub mod orphaned_commands;
pub mod qpair;
pub mod refusal;
pub mod shared;
pub mod snapshot;
