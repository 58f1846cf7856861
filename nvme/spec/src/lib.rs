//! The bytes of NVMe, NVMe over Fabrics and NVMe/TCP as Rust types, and nothing else.
//!
//! **What it is.** Every structure that crosses a wire or a device boundary in Spindle is declared here
//! once: command and completion entries, status codes, Identify data, log pages, features, Fabrics
//! commands, TCP PDUs, RDMA private data, names. Revisions: NVM Express Base 2.0 and 2.1, NVM Command Set
//! 1.0 and 1.1, NVMe over PCIe Transport 1.0, NVMe/TCP Transport 1.0 and 1.1, NVMe RDMA Transport 1.0
//! (<https://nvmexpress.org/specifications/>). A section number in a comment is that of Base 2.0 where
//! nothing else is said.
//!
//! **Flow.**
//! ```text
//! bytes --zerocopy--> Sqe --view--> ReadWriteCdw12, Connect, GetLogPage ..   (target reads)
//! Sqe::read(..), IdentifyController { .. } --zerocopy--> bytes          (initiator and target write)
//!
//! tcp::*, rdma, sqe, cqe     what travels          opcode, status        codes, unknown values stay values
//! fabrics, io, admin, log,   what a command says    identify, log,        what a data buffer holds
//! feature                                           feature, register
//! ```
//! Wire structures are `repr(C)` with little-endian byte-array integers, so their alignment is 1, there is
//! no padding, and a reference may be taken into any received buffer. Size and every offset are asserted at
//! compile time (`wire!`). A code read from the wire is a newtype with named constants: an unknown value
//! is kept, never lost and never a panic. A field that the specification counts from zero ends in `_z` or
//! has an accessor that names what it counts.
//!
//! **What it does not do.** It checks no rule that needs state or limits (whether a queue exists, a range
//! fits, a digest is right), allocates nothing, keeps nothing, does no I/O and has no unsafe code. It has
//! no command set but NVM, and no PRP lists: those are the PCIe driver's.
//!
//! **Limits.** Names ([`nqn::Nqn`]) hold 223 bytes; TCP PDU lengths are 32 bits; a command names at most
//! 65,536 logical blocks. Structures of 4 KiB (`IdentifyController` and others) are plain values: build
//! them in place on a cold path.
#![no_std]
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::indexing_slicing))]

#[cfg(test)]
extern crate std;

#[macro_use]
mod macros;

pub mod admin;
pub mod cqe;
pub mod fabrics;
pub mod feature;
pub mod identify;
pub mod io;
pub mod log;
pub mod nqn;
pub mod opcode;
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
