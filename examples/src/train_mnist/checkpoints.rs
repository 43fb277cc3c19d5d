//! When a training is saved, and how it goes on.
//!
//! Rank 0 alone looks at the folder, so that all ranks go on from the same checkpoint; the others get what it has read.
//! If it refuses it ends, and the others learn of that.
//!
//! Ranks that a launcher has restarted go on without being told to, but from checkpoints of their own launch alone. The folder may
//! have others: the first start, which has refused them, counts as a failure like any other, and is restarted if the user wants that
//! always. So a checkpoint says of which launch it is (`Run::launch`).

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mgpu::World;
use mgpu::checkpoint::{self, Checkpoint, Found, Writer};

use super::args::Args;
use super::engine::Engine;
use super::run::Run;

use crate::print::{errln, outln};

/// Which checkpoints a training goes on from, if there are any.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ResumeFrom {
    /// There must be none.
    Nothing,
    /// There must be no others.
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
    /// On rank 0.
    writer: Option<Writer>,
    /// Steps from one to the next within an epoch.
    every: Option<u64>,
    /// How many were saved, and how long the training waited for that.
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

    /// Goes on from the newest checkpoint, if there is one and it is of `from`. Collective.
    pub(super) fn begin(
        &mut self,
        engine: &mut dyn Engine,
        run: &Run,
        from: ResumeFrom,
    ) -> Result<(), Box<dyn Error>> {
        let chosen = match (&self.writer, from) {
            (None, _) => None,
            // Old ones are deleted by their step: this run's would be mixed up with those of another.
            (Some(_), ResumeFrom::Nothing) => match checkpoint::latest(&self.folder)? {
                Some(other) => return Err(of_an_earlier_run(&other)),
                None => None,
            },
            (Some(writer), ResumeFrom::ThisLaunch | ResumeFrom::AnyLaunch) => {
                self.choose(writer, run, from)?
            }
        };
        let step = |checkpoint: &Checkpoint| {
            let step = checkpoint.manifest().step;
            i64::try_from(step)
                .map_err(|_| format!("{}: no run makes {step} steps", checkpoint.path().display()))
        };
        let mut step = [chosen.as_ref().map(step).transpose()?.unwrap_or(-1)];
        engine.comm().broadcast_slice(&mut step, 0)?;
        if let Ok(step) = u64::try_from(step[0]) {
            engine.restore(step, chosen.as_ref())?;
        }
        if let Some(checkpoint) = chosen {
            outln!("resumed from {} after step {}", checkpoint.path().display(), step[0]);
        }
        Ok(())
    }

    /// The checkpoint to go on from.
    fn choose(
        &self,
        writer: &Writer,
        run: &Run,
        from: ResumeFrom,
    ) -> Result<Option<Checkpoint>, Box<dyn Error>> {
        let Some(Found { checkpoint, damaged }) = checkpoint::find(&self.folder)? else {
            outln!("no checkpoint in {} yet: beginning anew", self.folder.display());
            return Ok(None);
        };
        let path = checkpoint.path().display();
        let saved: Run = serde_json::from_value(checkpoint.manifest().state.clone())
            .map_err(|error| format!("{path}: not a checkpoint of train_mnist: {error}"))?;
        if from == ResumeFrom::ThisLaunch && !run.is_of_the_launch_of(&saved) {
            return Err(of_an_earlier_run(checkpoint.path()));
        }
        let differences = run.differences(&saved);
        if !differences.is_empty() {
            return Err(format!("{path} is of another run:\n  {}", differences.join("\n  ")).into());
        }
        for (bad, error) in damaged {
            let aside = writer.set_aside(&bad)?;
            errln!(
                "train_mnist: {error}; it is now called {}, and the one before it is taken: {path}",
                aside.file_name().unwrap_or_default().display()
            );
        }
        let roundings = run.roundings(&saved);
        if !roundings.is_empty() {
            outln!("the weights will not have the bits of an uninterrupted run: {}", roundings.join(", "));
        }
        Ok(Some(checkpoint))
    }

    /// The step after `step` after which to save next within an epoch.
    pub(super) fn next(&self, step: u64) -> Option<u64> {
        self.every.map(|every| (step / every + 1).saturating_mul(every))
    }

    /// Begins to write a checkpoint, on rank 0. Collective: what is sharded over ranks is gathered.
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

    /// Waits for the last one to be written.
    pub(super) fn finish(&mut self) -> mgpu::Result<()> {
        self.writer.as_mut().map_or(Ok(()), |writer| writer.finish().map(|_| ()))
    }

    /// How many were saved, and how many milliseconds the training waited for each.
    pub(super) fn cost(&self) -> (u32, f64) {
        (self.saved, self.waited.as_secs_f64() * 1e3 / f64::from(self.saved.max(1)))
    }
}

fn of_an_earlier_run(path: &Path) -> Box<dyn Error> {
    let path = path.display();
    format!("{path} is of an earlier run: go on with --resume, or choose another --checkpoint-dir").into()
}
