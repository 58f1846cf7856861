//! User-space driver of NVMe drives on PCIe: polled queues, no interrupts, no kernel on the data path.
//!
//! A [`Function`] is one drive's PCI function: its registers ([`Bar`]) and DMA mappings ([`Function::map`]).
//! VFIO implements the trait and, for tests, so does the in-process controller of the crate
//! `spindle-tests-emulator`. All other code of this crate is the same for both.
//!
//! ```text
//!   the drive's thread:  Manager: enable, identify, make queues, watch, abort, reset, close
//!                          │  CoreQueue: one queue pair, and the word with the manager's queue command
//!   core:  submit ─> entry in the queue's memory    poll ─> one doorbell for all, completions ─> Done
//! ```
//!
//! Guarantee: each submitted request ends exactly once. Its buffer is released when the drive has completed
//! the request or can no longer access memory: disabled with CSTS.RDY 0, bus mastering off, or gone. A handle
//! that is dropped with commands in flight leaks their buffers.
//!
//! Not supported: interrupts, controller memory buffer, metadata, zoned or key-value namespaces, multipath.
//!
//! Limits: 1023 commands in flight on a queue pair (959 of its core, 64 of sharers), 1 MiB of data for each
//! command (larger requests are split).

pub mod address;
mod admin;
pub mod bar;
mod commands;
mod core;
mod core_queue;
pub mod dma;
mod drive;
mod drives;
mod entry;
mod fronts;
pub mod function;
mod manager;
mod pointers;
mod queue;
mod quirks;
mod rules;
mod shared;
mod shared_queue;
pub mod vfio;

pub use address::{PciAddress, PciAddressError};
pub use bar::Bar;
pub use dma::{DmaMemory, Iova};
pub use drive::{Drive, DriveError, NvmeDisk, finish, finish_within};
pub use drives::Drives;
pub use function::{Bus, Function, Mapping, OpenFunctionError};
pub use manager::Manager;
pub use quirks::PciId;
pub use rules::{Namespace, UnfitNamespace};
pub use shared::{DriveFacts, Settings};
pub use vfio::{Vfio, VfioBus};
