//! User-space driver of NVMe drives on PCIe: polled queues, no interrupts, no kernel on the data path.
//!
//! A [`Function`] is one drive's PCI function: its registers ([`Bar`]) and a way to let it reach memory
//! ([`Function::map`]). VFIO is one kind; an in-process controller, the crate `spindle-nvme-emulator`, is the
//! other, for tests. Everything else in this crate is the same code over both.
//!
//! ```text
//!   the drive's thread:  Manager: enable, identify, make queues, watch, abort, reset, give up
//!                          │  CoreQueue: one queue pair, and the word that says what may be done with it
//!   core:  submit ─> entry in the queue's memory    poll ─> one doorbell for all, completions ─> Done
//! ```
//!
//! What it answers for: a command given to the drive ends exactly once. Its buffer is given back when the
//! drive has completed it, or when the drive cannot reach memory any more: disabled with CSTS.RDY 0, cut off
//! as bus master, or gone.
//!
//! What it does not do: no interrupts, no controller memory buffer, no metadata, no zoned or key-value
//! namespaces, no multipath between drives.
//!
//! Limits: 1023 commands in flight a queue, 1 MiB a command (larger ones are split).

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
