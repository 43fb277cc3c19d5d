//! `mgpurun`: starts a program once per GPU, with rank and world size, and supervises it to its end.
//!
//! The program is a thin `main` on top of this library, so other programs can start ranks, too ([`Launch`]).
//! A launch goes through these modules:
//!
//! | module | job |
//! |---|---|
//! | [`cli`] | arguments → request |
//! | [`program`] | name → path |
//! | [`placement`] | ranks + topology → the cores of each rank (pure except for reading the topology) |
//! | [`plan`] | request + machine → what each rank runs and sees (pure) |
//! | `nodes` | which of the job's nodes is this, and where are the others? |
//! | `reservation` | no two launches choose the same GPU |
//! | `port` | reserves a TCP port for PyTorch |
//! | `spawn` | plan → processes, each in its own process group, killed with this process |
//! | `descriptor_limits` | descriptors for this process, the user's limits for the ranks |
//! | `event_loop` | one loop for exits, output, messages, signals and deadlines |
//! | [`supervisor`] | (state, event) → actions: which rank is the culprit, what happens to the others (pure) |
//! | `watch` | which rank is stuck? (pure) |
//! | `error_file` | what has a failed rank written about its error? |
//! | `status` | what is every rank doing? |
//! | `mpi` | are the ranks MPI programs? |
//! | `metrics` | serves the state of the ranks as OpenMetrics and as a page |
//! | `faults` | which injected faults have not happened? |
//! | `group`, `orphans`, `guardian` | no process of a rank survives, whichever process is killed |
//! | `restart` | outcome → restart or not (pure) |
//! | `elasticity` | failures → the ranks of a restart (pure) |
//! | [`output`] | bytes → complete lines with their rank |
//! | [`events`] | events of the run → JSON |
//! | `writer` | a thread that writes files, so that the loop never blocks on a disk |
//! | `top` | the command that shows the ranks live in the terminal |
//! | `sweep` | the command that compares numbers of ranks and options: one launch for each |
//! | `stop` | the command that asks a running job to stop |
//! | `doctor` | the command that reports the machine's hardware and libraries |
//! | `completions`, `man_pages` | scripts for shells and manual pages, from the description of all `commands` |
//! | `stdout` | mgpurun's own standard output |
//! | [`exit_code`] | the exit codes of mgpurun |
//!
//! The library neither installs signal handlers nor ends the process; only `cli` does both, for `mgpurun`.
#![forbid(unsafe_code)]
// These macros panic when a write fails.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod cli;
mod commands;
mod completions;
mod descriptor_limits;
mod doctor;
mod elasticity;
mod error;
mod error_file;
mod event_loop;
pub mod events;
pub mod exit_code;
mod faults;
mod group;
mod guardian;
mod interrupt;
mod launch;
mod machine;
mod man_pages;
mod metrics;
mod mpi;
mod nccl;
mod nodes;
mod orphans;
pub mod output;
pub mod placement;
pub mod plan;
mod port;
pub mod program;
pub mod ranks;
mod reservation;
mod restart;
mod running_launcher;
mod spawn;
mod status;
mod stdout;
mod stop;
pub mod supervisor;
mod sweep;
mod top;
mod watch;
mod writer;

pub use error::LaunchError;
pub use interrupt::Interrupter;
pub use launch::Launch;
pub use metrics::MetricsAddress;
pub use output::{LogError, OutputOptions};
pub use placement::Bind;
pub use plan::{BackendChoice, GpuChoice};
pub use reservation::ReservationError;
pub use restart::{FailPolicy, RestartPolicy};
pub use supervisor::Outcome;
