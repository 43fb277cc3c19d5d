//! `mgpurun`: starts a program once per GPU, with rank and world size, and sees it through.
//!
//! The program is a thin `main` over this library, so that other programs can start their own ranks ([`Launch`]).
//! A launch goes through these modules:
//!
//! | module | job |
//! |---|---|
//! | [`cli`] | arguments → request |
//! | [`program`] | name → path |
//! | [`placement`] | ranks + topology → the cores of each rank (pure, but for reading the topology) |
//! | [`plan`] | request + machine → what each rank runs and sees (pure) |
//! | `port` | a TCP port that nobody else gets, for PyTorch |
//! | `spawn` | plan → processes, each in a group of its own, tied to this one |
//! | `event_loop` | one queue of exits, output, messages, signals and deadlines |
//! | [`supervisor`] | (state, event) → actions: who is to blame, what happens to the others (pure) |
//! | `watch` | who is silent? (pure) |
//! | `status` | what is every rank doing? |
//! | `mpi` | are the ranks programs of MPI? |
//! | `faults` | which injected faults have not happened? |
//! | `group`, `orphans`, `guardian` | nothing of a rank is left, whoever is killed |
//! | `restart` | outcome → once more? (pure) |
//! | [`output`] | bytes → whole lines with their rank |
//! | [`events`] | what happens → JSON |
//! | `writer` | files that are written without waiting for them |
//! | `doctor` | what the machine has; a command of its own |
//! | `stdout` | what mgpurun itself prints |
//! | [`exit_code`] | what the shell gets |
//!
//! The library neither installs signal handlers nor ends the process; both are done by `cli` for `mgpurun` alone.
#![forbid(unsafe_code)]
// They panic when a write fails.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod cli;
mod doctor;
mod error;
mod event_loop;
pub mod events;
pub mod exit_code;
mod faults;
mod group;
mod guardian;
mod interrupt;
mod launch;
mod machine;
mod mpi;
mod nccl;
mod orphans;
pub mod output;
pub mod placement;
pub mod plan;
mod port;
pub mod program;
pub mod ranks;
mod restart;
mod spawn;
mod status;
mod stdout;
pub mod supervisor;
mod watch;
mod writer;

pub use error::LaunchError;
pub use interrupt::Interrupter;
pub use launch::Launch;
pub use output::{LogError, OutputOptions};
pub use placement::Bind;
pub use plan::BackendChoice;
pub use restart::RestartPolicy;
pub use supervisor::Outcome;
