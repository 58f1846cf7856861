//! x
mod guard;
