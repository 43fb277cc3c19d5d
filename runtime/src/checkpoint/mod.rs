//! Checkpoints: everything that a run needs to resume as if it had never stopped.
//!
//! A checkpoint is a folder `step-00001234` with one safetensors file for each arena (weights, optimizer states) and
//! `manifest.json`. The manifest contains the step, the position in the data, the program's own state, and size and
//! checksum of every file. [`Checkpoint`] reads one, [`Writer`] writes them, and a [`Snapshot`] is what is written.
//!
//! **Training does not wait for the disk.** A snapshot owns its values; a thread of the writer writes them to files
//! while the training continues. At most one write is in flight: the next save waits for it, and returns its error if
//! it failed.
//!
//! **A checkpoint with a final name is complete.** It is written under a hidden name. Every file and the folder
//! itself are flushed to disk before it gets its final name, and the parent folder is flushed before an older
//! checkpoint is removed, whose name is removed before its files. So after a kill at any instant, or a power failure,
//! the newest checkpoint is either the old one or the new one, and never missing (`publish`). The next writer removes
//! what a killed run has left under hidden names; a lock on the folder tells whether its writer is alive (`folder`).
//! Only files that a writer has written are ever removed, identified by name and content (`removal`).
//!
//! **Damaged files are never loaded.** The manifest has its own checksum, every file is compared with the manifest,
//! and [`find`] reports the checkpoints that it skipped.
//!
//! **A lost disk need not lose a run.** [`ReplicatedWriter`] keeps each checkpoint on several hosts, which need not share
//! a file system, and finds the newest one that any host has.
//!
//! Random numbers have no state to save: they are functions of seed, step and element. [`Position`] and the step are
//! all that dropout and shuffling need.
//!
//! ```
//! # fn main() -> mgpu::Result<()> {
//! use mgpu::checkpoint::{self, Snapshot, Writer};
//! # use mgpu::optimizer::{Adam, OptimizerConfig, Rule};
//! # let folder = tempfile::tempdir().unwrap();
//! # let folder = folder.path();
//! # let mut layout = mgpu::Layout::new();
//! # layout.push("slope", [1]);
//! # let make = |world: &mut mgpu::World| {
//! #     let adam = OptimizerConfig::new(Rule::Adam(Adam::default()));
//! #     mgpu::DataParallel::new(world.communicator()?, layout.clone(), vec![0.0], adam, 1)
//! # };
//! # let mut world = mgpu::World::from_env()?;
//! let mut model = make(&mut world)?;
//! // One rank writes; all ranks take part in gathering what it writes.
//! let mut writer = if world.rank() == 0 { Some(Writer::new(folder, 2)?) } else { None };
//! for _ in 0..10 {
//! #   let train = |model: &mut mgpu::DataParallel| model.step(|parameters, gradients| {
//! #       gradients.gradient(0)[0] = parameters[0] - 3.0;
//! #       gradients.ready(0)
//! #   });
//!     train(&mut model)?;
//!     let snapshot = Snapshot::of(&mut model)?;
//!     if let (Some(writer), Some(snapshot)) = (&mut writer, snapshot) {
//!         writer.save(snapshot.with_state(serde_json::json!({"lr": 0.001})))?;
//!     }
//! }
//! if let Some(writer) = &mut writer {
//!     writer.finish()?;
//! }
//!
//! // Later, possibly with another number of ranks:
//! let found = checkpoint::find(folder)?.expect("ten were written, two are kept");
//! assert_eq!((found.checkpoint.manifest().step, found.damaged.len()), (10, 0));
//! # let mut world = mgpu::World::from_env()?;
//! let mut again = make(&mut world)?;
//! again.restore(10, |name, layout| found.checkpoint.load(name, layout))?;
//! assert_eq!(again.parameters(), model.parameters());
//! # Ok(())
//! # }
//! ```

mod agreement;
mod files;
mod folder;
mod manifest;
mod publish;
mod read;
mod removal;
mod replicated;
mod shared_folder;
mod snapshot;
mod transfer;
mod writer;

pub use folder::latest;
pub use manifest::{Manifest, Position};
pub use read::{Checkpoint, Found, find};
pub use replicated::{Fetched, Newest, ReplicatedWriter};
pub use snapshot::Snapshot;
pub use writer::Writer;

use std::fmt::Display;
use std::path::Path;

use crate::Error;

/// The error of a file or folder that cannot be read or written.
fn failed(path: &Path, problem: impl Display) -> Error {
    Error::Checkpoint { path: path.to_owned(), problem: problem.to_string() }
}

/// The error of a file or folder whose content is damaged.
fn damaged(path: &Path, problem: impl Display) -> Error {
    Error::Damaged { path: path.to_owned(), problem: problem.to_string() }
}
