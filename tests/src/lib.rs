//! What the suites share: bodies that run in threads and in processes alike.
#![forbid(unsafe_code)]

pub mod collectives;
pub mod threads;
