//! The NVMe-oF controller side of Spindle: subsystems, controllers, queue pairs, admin and I/O commands,
//! discovery. **Read this crate first**; the others are listed below.
//!
//! The crate makes no system call, reads no clock and has no thread. Input: bytes or completions of a
//! connection (through a [`Transport`](spindle_nvme_transport::Transport)), completions of disks, the time,
//! messages of other cores. Output: replies, disk commands, messages to cores, notices for the log. The same
//! code runs in the binary, in the seeded simulator and in the fuzzers.
//!
//! # Path of a write
//!
//! ```text
//!   shell: bytes ──> Transport::next_event ── Event::Command ──> qpair::Qpair::step_command
//!    fast path: data in the capsule, a disk with memory of its own for writes (RAM)
//!     ──> step_fast_path ──> write_fast_path: check, Disk::prepare (Fill), take_in_capsule, Disk::submit
//!     ──> reply_fast_path ──> Transport::reply
//!    slab path: every other write (in pieces: `qpair::bulk`; fused: `qpair::fused`)
//!     ──> step_io ──> qpair::io::parse (checks; IoCommand) ──> step_buffer: Disk::prepare
//!         (Fill: memory of the disk; Pool: a buffer of the pool; Wait)
//!     ──> Transport::fetch ... Event::Fetched ──> step_fetched ──> step_execute ──> Disk::submit
//!     ... core::TargetCore::poll ──> Disk::poll ──> Qpair::on_done ──> finish ──> Transport::reply
//!     ... Event::Sent ──> free
//! ```
//!
//! # Path of a read
//!
//! ```text
//!   qpair::Qpair::step_command
//!    fast path: the disk has the data in memory (RAM, null, a cache hit)
//!     ──> step_fast_path ──> read_fast_path: check, Disk::prepare (Ready)
//!     ──> reply_fast_path ──> Transport::reply
//!    slab path: any other result of `prepare` (a Read that fails a check: `step_io`)
//!     ──> continue_read ──> step_buffer (Pool: a buffer of the pool) ──> step_execute ──> Disk::submit
//!     ... core::TargetCore::poll ──> Disk::poll ──> Qpair::on_done ──> finish ──> Transport::reply
//!     ... Event::Sent ──> free
//! ```
//!
//! # Modules
//!
//! | module | contents |
//! |---|---|
//! | [`core`] | one core: its queue pairs, disks, messages, timers; eviction on a full core |
//! | [`env`](mod@env) | state that the queue pairs of a core share; messages between cores |
//! | [`qpair`] | the request machine; I/O, fused and compound commands, the admin queue |
//! | [`controller`] | Connect, properties, Identify, log pages, features, events, keep alive |
//! | [`orphaned_commands`] | disk commands that have not completed when their I/O queue ends |
//! | [`discovery`] | the discovery log |
//! | [`refusal`] | status of a failed command, and its field at fault |
//! | [`snapshot`] | the configuration, immutable, replaced by message |
//! | [`shared`] | state of controllers that all cores share |
//! | [`counters`], `busy` | statistics; busy time of namespaces |
//! | [`notice`] | log entries |
//!
//! Not supported: reservations, ANA, authentication, namespace management, firmware update, directives. Such
//! commands are refused with the status that the specification demands.
//!
//! # The other crates, in reading order
//!
//! | crate | contents |
//! |---|---|
//! | [`spindle_nvme_transport`] | the interface between this crate and a connection: `Transport`, `Connections` |
//! | [`spindle_target_disk`] | the interface of a disk: `DiskSource`, `Disk`; kinds `ram`, `null`, `file`, `ng` |
//! | [`spindle_nvme_tcp`] | NVMe/TCP: `controller::Conn`, and `shell::Shell` with the sockets |
//! | [`spindle_reactor`] | the loop of a core (`run`), its memory (`mem`), sockets, io_uring, mailboxes |
//! | [`spindle`] | the binary: configuration, `serve` (one `CoreLoop` per core), `bench`, `status` |
//! | [`spindle_nvme_rdma`] | NVMe/RDMA: `controller::Conn`, and `shell::Shell` with the queue pairs |
//! | [`spindle_rdma`] | libibverbs and librdmacm |
//! | [`spindle_nvme_pcie`] | the user-space driver of NVMe drives |
//! | [`spindle_nvme_initiator`] | the host side as a library |
//! | [`spindle_target_remote`] | a disk that is a namespace of another target |
//! | [`nvme_spec`] | wire types that the other crates use |
//! | [`spindle_tests`] | the simulator, and a target inside a test (`embedded`) |
//!
//! `cargo doc --workspace --no-deps` writes these pages to `build/doc/spindle_target/index.html`. Programs to
//! begin with: `cargo run --example embedded_target`, `disk_kind`, `read_block`.
//!
//! [`spindle`]: ../spindle/index.html
//! [`spindle_nvme_initiator`]: ../spindle_nvme_initiator/index.html
//! [`spindle_nvme_pcie`]: ../spindle_nvme_pcie/index.html
//! [`spindle_nvme_rdma`]: ../spindle_nvme_rdma/index.html
//! [`spindle_rdma`]: ../spindle_rdma/index.html
//! [`spindle_target_remote`]: ../spindle_target_remote/index.html
//! [`spindle_nvme_tcp`]: ../spindle_nvme_tcp/index.html
//! [`spindle_tests`]: ../spindle_tests/index.html
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
