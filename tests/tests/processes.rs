//! What the launcher does with processes, on one host and on several. These suites wait most of the time.
//!
//! One program, because linking and starting many takes long. Each module is a suite, and its name begins the names of
//! its tests: `cargo test --package mgpu-tests --test processes doctor::`.

mod doctor;
mod faults;
mod hosts;
mod hosts_tools;
mod hosts_without_agents;
mod jobs;
mod launch;
mod limits;
mod other_launchers;
mod output;
mod placement;
mod pytorch;
mod stops;
mod supervision;
mod sweep;
mod torchrun;
mod watching;
