//! Wire types of NVMe, NVMe over Fabrics, NVMe/TCP and NVMe/RDMA.
//!
//! **What it is.** Every NVMe structure that crosses a wire or a device boundary in Spindle is declared here
//! once: command and completion entries, status codes, Identify data, log pages, features, properties,
//! Fabrics commands, TCP PDUs, RDMA private data, NQNs. Revisions: NVM Express Base 2.0 and 2.1, NVM Command
//! Set 1.0 and 1.1, NVMe over PCIe Transport 1.0, NVMe/TCP Transport 1.0 and 1.1, NVMe RDMA Transport 1.0
//! (<https://nvmexpress.org/specifications/>). A section number without a specification refers to the
//! specification in the first lines of the file, otherwise to Base 2.0.
//!
//! **Flow.**
//! ```text
//! bytes --zerocopy--> Sqe --view--> Copy, Connect, GetLogPage ..        (target reads)
//! Sqe::read(..), IdentifyController { .. } --zerocopy--> bytes          (initiator and target write)
//!
//! tcp, rdma, sqe, cqe          PDUs, private data, queue entries
//! opcode, status               codes; unknown values are kept
//! fabrics, io, admin, log,     fields and builders of commands
//! feature, identify, pcie
//! log, identify, register      data structures, properties
//! nqn                          names
//! vendor, optimistic, cluster  extensions of Spindle
//! ```
//! Wire structures are `repr(C)` with little-endian byte-array integers. Their alignment is 1 and they have
//! no padding, so a reference into any received buffer is valid. Size and every offset are asserted at
//! compile time (`wire!`). A code read from the wire is a newtype with named constants (`open_enum!`): an
//! unknown value is kept and causes no panic. The name of a zero-based field ends in `_z`; exceptions are
//! documented at the field.
//!
//! **What it does not do.** The crate does not check rules that need state or limits (queue identifiers, LBA
//! ranges, digests). It has no allocation, no state, no I/O and no unsafe code. The only I/O command set is
//! the NVM Command Set. The PCIe driver builds PRP lists.
//!
//! **Limits.** An NQN ([`nqn::Nqn`]) has at most 223 bytes; TCP PDU lengths have 32 bits; a command with NLB
//! has at most 65,536 logical blocks. Structures of 4 KiB (`IdentifyController` and others) may be copied at
//! each move: do not build them for each I/O command.
#![no_std]
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::indexing_slicing))]

#[cfg(test)]
extern crate std;

#[macro_use]
mod macros;

pub mod admin;
pub mod cluster;
pub mod cqe;
pub mod fabrics;
pub mod feature;
pub mod identify;
pub mod io;
pub mod log;
pub mod nqn;
pub mod opcode;
pub mod optimistic;
pub mod pcie;
pub mod rdma;
pub mod register;
pub mod sqe;
pub mod status;
pub mod tcp;
pub mod vendor;

pub use zerocopy;

pub use cqe::{CQE_BYTES, Cqe};
pub use nqn::Nqn;
pub use opcode::{AdminOpcode, FabricsType, IoOpcode};
pub use sqe::{SQE_BYTES, Sgl, SglKind, Sqe};
pub use status::Status;
