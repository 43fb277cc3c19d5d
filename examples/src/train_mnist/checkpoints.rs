//! When a training is saved, and how it is resumed.
//!
//! Only rank 0 reads the folder, so all ranks resume from the same checkpoint; the others receive its contents. If
//! rank 0 refuses the checkpoint it exits, and the others notice that.
//!
//! Ranks restarted by a launcher resume without `--resume`, but only from checkpoints of the same launch. The folder
//! may hold others: the first start refuses them and fails, and a launcher that always restarts starts the ranks
//! again. So each checkpoint records its launch (`Run::launch`).

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mgpu::World;
use mgpu::checkpoint::{self, Checkpoint, Found, Writer};

use super::args::Args;
use super::engine::Engine;
use super::run::Run;

use crate::print::{errln, outln};

/// Which checkpoints a training may resume from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ResumeFrom {
    /// None: the folder must not contain checkpoints.
    Nothing,
    /// Only checkpoints of this launch; others are refused.
    ThisLaunch,
    AnyLaunch,
}

impl ResumeFrom {
    pub(super) fn choose(args: &Args, world: &World) -> Self {
        match world.restart_count() {
            _ if args.resume => ResumeFrom::AnyLaunch,
            0 => ResumeFrom::Nothing,
            _ => ResumeFrom::ThisLaunch,
        }
    }
}

/// The checkpoints of a training.
pub(super) struct Checkpoints {
    folder: PathBuf,
    /// On rank 0 only.
    writer: Option<Writer>,
    /// Steps between checkpoints within an epoch.
    every: Option<u64>,
    /// Number of checkpoints, and how long training was blocked by them.
    saved: u32,
    waited: Duration,
}

impl Checkpoints {
    pub(super) fn open(folder: &Path, args: &Args, rank: u32) -> Result<Self, String> {
        let writer = (rank == 0).then(|| Writer::new(folder, args.keep()));
        Ok(Checkpoints {
            folder: folder.to_owned(),
            writer: writer.transpose().map_err(|error| format!("--checkpoint-dir: {error}"))?,
            every: args.checkpoint_every,
            saved: 0,
            waited: Duration::ZERO,
        })
    }

    /// Restores the newest checkpoint, if there is one that `from` permits. Collective.
    pub(super) fn begin(
        &mut self,
        engine: &mut dyn Engine,
        run: &Run,
        from: ResumeFrom,
    ) -> Result<(), Box<dyn Error>> {
        let chosen = match (&self.writer, from) {
            (None, _) => None,
            // Old checkpoints are deleted by step number, so checkpoints of two runs must not be mixed.
            (Some(_), ResumeFrom::Nothing) => match checkpoint::latest(&self.folder)? {
                Some(other) => return Err(of_an_earlier_run(&other)),
                None => None,
            },
            (Some(writer), ResumeFrom::ThisLaunch | ResumeFrom::AnyLaunch) => {
                self.choose(writer, run, from)?
            }
        };
        let mut step = [chosen.as_ref().map(step_of).transpose()?.unwrap_or(-1)];
        engine.comm().broadcast_slice(&mut step, 0)?;
        if let Ok(step) = u64::try_from(step[0]) {
            engine.restore(step, chosen.as_ref())?;
        }
        if let Some(checkpoint) = chosen {
            outln!("resumed from {} after step {}", checkpoint.path().display(), step[0]);
        }
        Ok(())
    }

    /// Chooses the checkpoint to resume from.
    fn choose(
        &self,
        writer: &Writer,
        run: &Run,
        from: ResumeFrom,
    ) -> Result<Option<Checkpoint>, Box<dyn Error>> {
        let Some(Found { checkpoint, damaged }) = checkpoint::find(&self.folder)? else {
            outln!("no checkpoint in {}: starting at step 0", self.folder.display());
            return Ok(None);
        };
        let path = checkpoint.path().display();
        let saved: Run = serde_json::from_value(checkpoint.manifest().state.clone())
            .map_err(|error| format!("{path}: not a checkpoint of train_mnist: {error}"))?;
        if from == ResumeFrom::ThisLaunch && !run.is_same_launch(&saved) {
            return Err(of_an_earlier_run(checkpoint.path()));
        }
        let differences = run.differences(&saved);
        if !differences.is_empty() {
            return Err(format!("{path} belongs to another run:\n  {}", differences.join("\n  ")).into());
        }
        for (bad, error) in damaged {
            let aside = writer.set_aside(&bad)?;
            errln!(
                "train_mnist: {error}; renamed to {}; resuming from the previous checkpoint {path}",
                aside.file_name().unwrap_or_default().display()
            );
        }
        let roundings = run.rounding_differences(&saved);
        if !roundings.is_empty() {
            outln!(
                "the weights will not be bit-equal to those of an uninterrupted run: {}",
                roundings.join(", ")
            );
        }
        Ok(Some(checkpoint))
    }

    /// The step after `step` at which to save next within an epoch.
    pub(super) fn next(&self, step: u64) -> Option<u64> {
        self.every.map(|every| (step / every + 1).saturating_mul(every))
    }

    /// Starts writing a checkpoint, on rank 0. Collective: sharded state is gathered.
    pub(super) fn save(
        &mut self,
        engine: &mut dyn Engine,
        run: &Run,
        steps_per_epoch: u64,
    ) -> Result<(), Box<dyn Error>> {
        let start = Instant::now();
        let position = run.position(engine.steps(), steps_per_epoch);
        let snapshot = engine.snapshot()?;
        if let (Some(writer), Some(snapshot)) = (&mut self.writer, snapshot) {
            let state = serde_json::to_value(run)?;
            writer.save(snapshot.with_position(position).with_state(state))?;
        }
        self.saved += 1;
        self.waited += start.elapsed();
        Ok(())
    }

    /// Waits until the last checkpoint is written.
    pub(super) fn finish(&mut self) -> mgpu::Result<()> {
        self.writer.as_mut().map_or(Ok(()), |writer| writer.finish().map(|_| ()))
    }

    /// The number of checkpoints, and the milliseconds that training was blocked by each, on average.
    pub(super) fn cost(&self) -> (u32, f64) {
        (self.saved, self.waited.as_secs_f64() * 1e3 / f64::from(self.saved.max(1)))
    }
}

/// The step of a checkpoint, for a broadcast.
pub(super) fn step_of(checkpoint: &Checkpoint) -> Result<i64, String> {
    let step = checkpoint.manifest().step;
    i64::try_from(step).map_err(|_| format!("{}: invalid step number {step}", checkpoint.path().display()))
}

fn of_an_earlier_run(path: &Path) -> Box<dyn Error> {
    let path = path.display();
    format!("{path} belongs to an earlier run: continue it with --resume, or choose another --checkpoint-dir")
        .into()
}
