//! Tests of the emulator, by a host made by hand.

mod host;
mod io;

use host::Host;
