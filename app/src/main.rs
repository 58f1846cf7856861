//! The `spindle` binary: joins the rooms.
fn main() {}
