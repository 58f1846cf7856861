//! Tests of the emulator, by a host made by hand.

mod admin;
mod faults;
mod host;
mod hostile;
mod io;
mod pointers;
mod queues;
mod registers;

use host::{Host, pair};
