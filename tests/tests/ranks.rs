//! What ranks compute on CPUs: collectives, training, checkpoints. These suites need a processor most of the time.
//!
//! One program, because linking and starting many takes long. Each module is a suite, and its name begins the names of
//! its tests: `cargo test --package mgpu-tests --test ranks between_hosts::`.

mod between_hosts;
mod checkpoint_copies;
mod checkpoint_kills;
mod collectives;
mod data_on;
mod equivalence;
mod examples;
mod golden;
mod groups;
mod parallel;
mod pipeline;
mod replicas;
mod resume;
mod sharding;
mod step;
mod timeline;
mod train;
