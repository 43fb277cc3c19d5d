//! When a training is saved, and how it is resumed.
//!
//! Only rank 0 reads the folder, so all ranks resume from the same checkpoint; the others receive its contents. If
//! rank 0 refuses the checkpoint it exits, and the others notice that. With `--checkpoint-copies` the newest checkpoint may
//! be on another host; then rank 0 is sent it first.
//!
//! Ranks restarted by a launcher resume without `--resume`, but only from checkpoints of the same launch. The folder
//! may hold others: the first start refuses them and fails, and a launcher that always restarts starts the ranks
//! again. So each checkpoint records its launch (`Run::launch`).

use std::error::Error;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mgpu::World;
use mgpu::checkpoint::{self, Checkpoint, Fetched, Found, Manifest, ReplicatedWriter, Writer};

use super::args::Args;
use super::engine::Engine;
use super::report::EpochReport;
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
    writer: Destination,
    /// Steps between checkpoints within an epoch.
    every: Option<u64>,
    /// The step of the newest checkpoint.
    newest: Option<u64>,
    /// Number of checkpoints, and how long training was blocked by them.
    saved: u32,
    waited: Duration,
}

/// Where checkpoints are written.
enum Destination {
    /// One folder, by rank 0; nothing on other ranks.
    Folder(Option<Writer>),
    /// Folders of several hosts (`--checkpoint-copies`).
    Hosts(Box<ReplicatedWriter>),
}

impl Checkpoints {
    /// Collective.
    pub(super) fn open(folder: &Path, args: &Args, world: &mut World) -> Result<Self, String> {
        Ok(Checkpoints {
            folder: folder.to_owned(),
            writer: Destination::open(folder, args, world)
                .map_err(|error| format!("--checkpoint-dir: {error}"))?,
            every: args.checkpoint_every,
            newest: None,
            saved: 0,
            waited: Duration::ZERO,
        })
    }

    /// Restores the newest checkpoint, if there is one that `from` permits. Returns the results of an epoch that has not
    /// been evaluated, because the run was stopped in the evaluation; without content on ranks other than 0. Collective.
    pub(super) fn begin(
        &mut self,
        engine: &mut dyn Engine,
        run: &Run,
        from: ResumeFrom,
    ) -> Result<Option<EpochReport>, Box<dyn Error>> {
        let is_first = engine.comm().rank() == 0;
        let folder = &self.folder;
        let chosen = match (&mut self.writer, from) {
            (Destination::Folder(None), _) => None,
            // Old checkpoints are deleted by step number, so checkpoints of two runs must not be mixed.
            (Destination::Folder(Some(_)), ResumeFrom::Nothing) => match checkpoint::latest(folder)? {
                Some(other) => return Err(of_an_earlier_run(&other.display())),
                None => None,
            },
            (Destination::Hosts(writer), ResumeFrom::Nothing) => match writer.latest()? {
                Some((host, other)) if is_first => {
                    return Err(of_an_earlier_run(&on_host(host, &other)));
                }
                _ => None,
            },
            (Destination::Folder(Some(writer)), _) => choose(writer, folder, run, from)?,
            (Destination::Hosts(writer), _) => {
                choose_among_hosts(writer, folder, is_first.then_some((run, from)))?
            }
        };
        let step = chosen.as_ref().map(step_of).transpose()?.unwrap_or(-1);
        let unevaluated = chosen.as_ref().and_then(|checkpoint| {
            serde_json::from_value::<Run>(checkpoint.manifest().state.clone()).ok()?.unevaluated
        });
        let mut position = [step, i64::from(unevaluated.is_some())];
        engine.comm().broadcast_slice(&mut position, 0)?;
        let [step, is_unevaluated] = position;
        if let Ok(step) = u64::try_from(step) {
            engine.restore(step, chosen.as_ref())?;
            self.newest = Some(step);
        }
        if let Some(checkpoint) = chosen {
            outln!("resumed from {} after step {step}", checkpoint.path().display());
        }
        Ok((is_unevaluated != 0).then(|| unevaluated.unwrap_or_default()))
    }

    /// The folder, and the step of the newest checkpoint in it, if there is one.
    pub(super) fn newest(&self) -> (&Path, Option<u64>) {
        (&self.folder, self.newest)
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
        let state = snapshot.is_some().then(|| serde_json::to_value(run)).transpose()?;
        let snapshot = snapshot.zip(state);
        let snapshot = snapshot.map(|(snapshot, state)| snapshot.with_position(position).with_state(state));
        match (&mut self.writer, snapshot) {
            (Destination::Folder(Some(writer)), Some(snapshot)) => writer.save(snapshot)?,
            (Destination::Folder(_), _) => {}
            (Destination::Hosts(writer), snapshot) => writer.save(snapshot)?,
        }
        self.newest = Some(engine.steps());
        self.saved += 1;
        self.waited += start.elapsed();
        Ok(())
    }

    /// Waits until the last checkpoint is written, and its copies. Collective.
    pub(super) fn finish(&mut self) -> mgpu::Result<()> {
        match &mut self.writer {
            Destination::Hosts(writer) => writer.finish().map(|_| ()),
            Destination::Folder(_) => self.finish_here(),
        }
    }

    /// Waits until this rank has written what it is writing.
    pub(super) fn finish_here(&mut self) -> mgpu::Result<()> {
        match &mut self.writer {
            Destination::Folder(None) => Ok(()),
            Destination::Folder(Some(writer)) => writer.finish().map(|_| ()),
            Destination::Hosts(writer) => writer.finish_local().map(|_| ()),
        }
    }

    /// The number of checkpoints, and the milliseconds that training was blocked by each, on average.
    pub(super) fn cost(&self) -> (u32, f64) {
        (self.saved, self.waited.as_secs_f64() * 1e3 / f64::from(self.saved.max(1)))
    }
}

impl Destination {
    fn open(folder: &Path, args: &Args, world: &mut World) -> mgpu::Result<Self> {
        let (copies, hosts, is_first) = (args.checkpoint_copies(), world.hosts().len(), world.rank() == 0);
        let say_fewer = |kept: &str| {
            if is_first {
                errln!("train_mnist: --checkpoint-copies {copies}: each checkpoint is kept on {kept}");
            }
        };
        if copies == 1 || hosts == 1 {
            if copies > 1 {
                say_fewer("one host: there is no other");
            }
            return Ok(Destination::Folder(is_first.then(|| Writer::new(folder, args.keep())).transpose()?));
        }
        let writer = ReplicatedWriter::new(world, folder, args.keep(), copies)?;
        if writer.copies() < copies {
            let apart = writer.copies();
            say_fewer(&format!("{apart} of {hosts} hosts: no others have a folder of their own"));
        }
        Ok(Destination::Hosts(Box::new(writer)))
    }
}

/// Chooses the checkpoint to resume from.
fn choose(
    writer: &Writer,
    folder: &Path,
    run: &Run,
    from: ResumeFrom,
) -> Result<Option<Checkpoint>, Box<dyn Error>> {
    let Some(Found { checkpoint, damaged }) = checkpoint::find(folder)? else {
        say_none(folder);
        return Ok(None);
    };
    let path = checkpoint.path().display();
    let saved = check(checkpoint.manifest(), &path, run, from)?;
    for (bad, error) in damaged {
        let aside = writer.set_aside(&bad)?;
        say_set_aside(&error, &aside, &path);
    }
    say_roundings(run, &saved);
    Ok(Some(checkpoint))
}

/// The same, among the checkpoints of all hosts. `first` is given on rank 0, which checks and returns it. Collective.
fn choose_among_hosts(
    writer: &mut ReplicatedWriter,
    folder: &Path,
    first: Option<(&Run, ResumeFrom)>,
) -> Result<Option<Checkpoint>, Box<dyn Error>> {
    let Some(newest) = writer.find()? else {
        if first.is_some() {
            say_none(folder);
        }
        return Ok(None);
    };
    let place = on_host(newest.host, &newest.path);
    let saved = first.map(|(run, from)| check(&newest.manifest, &place, run, from)).transpose()?;
    let Fetched { checkpoint, set_aside } = writer.fetch(&newest)?;
    for (error, aside) in set_aside {
        say_set_aside(&error, &aside, &place);
    }
    if let (Some((run, _)), Some(saved)) = (first, &saved) {
        if newest.host > 0 {
            outln!("the newest checkpoint is {place}: copied to node 0");
        }
        say_roundings(run, saved);
    }
    Ok(checkpoint)
}

/// Refuses a checkpoint of another run, or of another launch if that matters. Returns the run of the checkpoint.
fn check(
    manifest: &Manifest,
    path: &impl Display,
    run: &Run,
    from: ResumeFrom,
) -> Result<Run, Box<dyn Error>> {
    let saved: Run = serde_json::from_value(manifest.state.clone())
        .map_err(|error| format!("{path}: not a checkpoint of train_mnist: {error}"))?;
    if from == ResumeFrom::ThisLaunch && !run.is_same_launch(&saved) {
        return Err(of_an_earlier_run(path));
    }
    let differences = run.differences(&saved);
    if !differences.is_empty() {
        return Err(format!("{path} belongs to another run:\n  {}", differences.join("\n  ")).into());
    }
    Ok(saved)
}

fn say_none(folder: &Path) {
    outln!("no checkpoint in {}: starting at step 0", folder.display());
}

fn say_set_aside(error: &mgpu::Error, aside: &Path, instead: &impl Display) {
    errln!(
        "train_mnist: {error}; renamed to {}; resuming from the previous checkpoint {instead}",
        aside.file_name().unwrap_or_default().display()
    );
}

fn say_roundings(run: &Run, saved: &Run) {
    let roundings = run.rounding_differences(saved);
    if !roundings.is_empty() {
        outln!(
            "the weights will not be bit-equal to those of an uninterrupted run: {}",
            roundings.join(", ")
        );
    }
}

fn on_host(host: usize, path: &Path) -> String {
    format!("{} on node {host}", path.display())
}

/// The step of a checkpoint, for a broadcast.
pub(super) fn step_of(checkpoint: &Checkpoint) -> Result<i64, String> {
    let step = checkpoint.manifest().step;
    i64::try_from(step).map_err(|_| format!("{}: invalid step number {step}", checkpoint.path().display()))
}

fn of_an_earlier_run(path: &impl Display) -> Box<dyn Error> {
    format!("{path} belongs to an earlier run: continue it with --resume, or choose another --checkpoint-dir")
        .into()
}
