//! Placeholder header; replaced by its first slice.
