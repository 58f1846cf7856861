//! What the end-to-end tests share.
//!
//! | module | contents |
//! |---|---|
//! | [`sim`] | the seeded simulator |
//! | [`blank`] | a disk without a medium, for measuring |
//! | [`direct`], [`script`] | a target driven by hand, over NVMe/TCP and over scripted connections |
//! | [`seeds`] | seeds of the simulators besides the fixed ones |
//! | [`snapshot`] | the configuration of a target in a test |
//! | [`embedded`] | a target on a thread of this process, with sockets: `tests/examples/embedded_target.rs` |
//! | [`loopback`] | the binary as a child process, and hosts that use it |
//! | [`fabric`] | queue pairs without devices, for NVMe/RDMA |
//! | [`drive`] | the user-space NVMe driver over its emulator |
//! | [`remote`] | the remote disk over a simulated far target |
//! | [`cluster`] | caches on client hosts that a target keeps coherent |
//! | [`fuzz`] | the bodies of the fuzzers |
//!
//! The tests themselves are in `tests/tests`: simulation seeds, two-process loopback, corpora, tidy rules;
//! those of the request machine in `target/tests/requests`. Beside: `lab` (cases with Linux hosts),
//! `emulator` (a drive in the process), `conformance` (the contract of a disk), `fuzz`, `limit` (what bare
//! sockets give), `medium` (disks that lose power), `skip`. They may use every crate. Begin with [`sim`].
#![forbid(unsafe_code)]

pub mod blank;
#[cfg(feature = "simulator")]
pub mod cluster;
pub mod direct;
pub mod drive;
#[cfg(feature = "simulator")]
pub mod embedded;
#[cfg(feature = "simulator")]
pub mod fabric;
#[cfg(feature = "simulator")]
pub mod fuzz;
#[cfg(feature = "simulator")]
pub mod loopback;
#[cfg(feature = "simulator")]
pub mod remote;
#[cfg(feature = "simulator")]
pub mod script;
pub mod seeds;
#[cfg(feature = "simulator")]
pub mod sim;
pub mod snapshot;

/// What the shells of a core do in a receive pass, where nothing waits to be received.
pub fn receive_pass<T: spindle_nvme_transport::Transport>(core: &mut spindle_target::core::TargetCore<T>) {
    use spindle_nvme_transport::{Connections, TransportKind};
    TransportKind::ALL.into_iter().for_each(|transport| core.passed(transport));
}
