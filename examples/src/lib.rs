//! (being written)
pub mod nets;
