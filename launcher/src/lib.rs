//! `mgpurun`: starts a program once per GPU, with rank and world size, and sees it through.
//!
//! The program is a thin `main` over this library, so that other programs can start their own ranks ([`Launch`]).
//! A launch goes through these modules:
//!
//! | module | job |
//! |---|---|
//! | [`cli`] | arguments → request |
//! | [`program`] | name → path |
//! | [`plan`] | request + machine → what each rank runs and sees (pure) |
//! | `port` | a TCP port that nobody else gets, for PyTorch |
//! | `spawn` | plan → processes, each in a group of its own, tied to this one |
//! | `event_loop` | one queue of exits, output, messages, signals and deadlines |
//! | [`supervisor`] | (state, event) → actions: who is to blame, what happens to the others (pure) |
//! | `group` | nothing of a rank's process group is left |
//! | [`output`] | bytes → whole lines with their rank |
//! | [`exit_code`] | what the shell gets |
//!
//! The library neither installs signal handlers nor ends the process; both are done by `cli` for `mgpurun` alone.
#![forbid(unsafe_code)]

pub mod cli;
mod error;
mod event_loop;
pub mod exit_code;
mod group;
mod interrupt;
mod launch;
mod machine;
pub mod output;
pub mod plan;
mod port;
pub mod program;
pub mod ranks;
mod spawn;
pub mod supervisor;

pub use error::LaunchError;
pub use interrupt::Interrupter;
pub use launch::Launch;
pub use output::{LogError, OutputOptions};
pub use plan::BackendChoice;
pub use supervisor::Outcome;
