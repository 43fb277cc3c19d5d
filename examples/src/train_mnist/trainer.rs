//! The training loop.

use std::error::Error;
use std::fmt;
use std::path::Path;
use std::time::Instant;

use mgpu::replicate::verify_same;
use mgpu::timeline::{Name, Timeline};
use mgpu::{Communicator, ReduceOp, Sampler, SamplerConfig, World, evaluation_shard};
use mgpu_kernels::cuda::Device;

use super::args::{Args, Length};
use super::checkpoints::{Checkpoints, ResumeFrom};
use super::division::Division;
use super::engine::{Engine, StopCheck, Stretch, TrainingConfig, over_ranks, resident_bytes};
use super::report::{EpochReport, LossScaleReport, TestResult};
use super::run::Run;
use super::source::Data;
use super::stopwatch::{Stopwatch, TimeSpent};
use super::training_log::{LogLine, TrainingLog};
use crate::data::Samples;

/// Steps that throughput leaves out: first accesses to memory, caches, clock frequencies.
pub(super) const WARM_UP: u64 = 3;

/// Times of the whole run.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Totals {
    pub(super) train_s: f64,
    pub(super) test_s: f64,
    /// After the warm-up. Images are of all ranks.
    measured: TimeSpent,
    measured_steps: u64,
    measured_images: u64,
    /// Steps made, and the bytes that this rank has moved between ranks in them, if the backend counts them.
    steps: u64,
    bytes: Option<u64>,
}

impl Totals {
    pub(super) fn images_per_s(&self) -> f64 {
        self.measured_images as f64 / self.measured.seconds.max(1e-9)
    }

    pub(super) fn ms_per_step(&self) -> f64 {
        self.measured.seconds * 1e3 / self.measured_steps.max(1) as f64
    }

    /// Bytes that all ranks together have moved between ranks in a step, on average; `None` without steps, and if the
    /// backend does not count them. Collective.
    pub(super) fn bytes_per_step(&self, comm: &mut Communicator) -> mgpu::Result<Option<u64>> {
        let Some(bytes) = self.bytes else { return Ok(None) };
        // Exact below 2^53.
        let mut sum = [bytes as f64];
        comm.all_reduce_slice(&mut sum, ReduceOp::Sum)?;
        Ok(Some((sum[0] / self.steps as f64).round() as u64))
    }

    /// Shares of the measured time of this rank in collectives, and waiting for peers there.
    pub(super) fn communication(&self) -> [f64; 2] {
        self.measured.communication()
    }
}

/// What happens during an epoch.
pub(super) enum Event<'a> {
    Step(&'a ProgressLine),
    Log(&'a LogLine),
    /// A checkpoint follows.
    Saving,
}

/// Seconds of each epoch.
#[derive(Debug, Clone, Default)]
pub(super) struct EpochTimes {
    pub(super) train_s: Vec<f64>,
    pub(super) test_s: Vec<f64>,
}

/// The content of the progress line.
pub(super) struct ProgressLine {
    epoch: u64,
    pub(super) step: u64,
    /// Step numbers at the end of the epoch and of the training.
    steps: u64,
    length: u64,
    pub(super) loss: f64,
    images_per_s: f64,
    /// Seconds per step.
    pace: f64,
    /// Share of this rank's time in collectives, with several ranks.
    communication: Option<f64>,
}

impl fmt::Display for ProgressLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ProgressLine { epoch, step, steps, length, loss, images_per_s, pace, communication } = self;
        // The most important comes first, because the rest may not fit the terminal.
        let left = (length.saturating_sub(*step) as f64 * pace).round() as u64;
        write!(f, "{} {}:{:02}:{:02} left, ", bar(*step, *length), left / 3600, left / 60 % 60, left % 60)?;
        write!(f, "epoch {epoch} step {step}/{steps} loss {loss:.4} {images_per_s:.0} images/s")?;
        if let Some(share) = communication {
            write!(f, ", {:.0}% communication", share * 100.0)?;
        }
        Ok(())
    }
}

/// `[=====>    ]  50%`.
fn bar(done: u64, all: u64) -> String {
    const WIDTH: usize = 20;
    let share = (done as f64 / all.max(1) as f64).min(1.0);
    let filled = (share * WIDTH as f64) as usize;
    let head = if filled < WIDTH { ">" } else { "" };
    format!("[{:<WIDTH$}] {:>3.0}%", "=".repeat(filled) + head, (share * 100.0).floor())
}

/// A model in training on one rank. It decides what happens when; the engine does it.
pub(super) struct Trainer {
    engine: Box<dyn Engine>,
    /// The timeline that observes the engine's communicator.
    timeline: Timeline,
    sampler: Sampler,
    run: Run,
    /// The images of a step on this rank.
    division: Division,
    /// The data source, in words.
    data: String,
    checkpoints: Option<Checkpoints>,
    log: Option<TrainingLog>,
    /// Steps of the whole training.
    length: u64,
    /// Epochs follow each other without an evaluation or a checkpoint.
    runs_on: bool,
    /// When the last epoch ended, if a GPU has been working on the next one since.
    running_since: Option<Instant>,
    /// The ranks have compared how far they will train.
    agreed: bool,
    /// The ranks were asked to stop.
    stopping: bool,
    /// The results of an epoch after which the run that is resumed was stopped, before its evaluation was complete.
    unevaluated: Option<EpochReport>,
    /// The newest checkpoint contains such results.
    is_saved_unevaluated: bool,
    totals: Totals,
    epoch_times: EpochTimes,
}

impl Trainer {
    /// `engine` creates the model from the configuration.
    pub(super) fn new(
        args: &Args,
        (rank, ranks): (u32, u32),
        data: &Data,
        timeline: &Timeline,
        engine: impl FnOnce(&TrainingConfig) -> Result<Box<dyn Engine>, Box<dyn Error>>,
    ) -> Result<Self, Box<dyn Error>> {
        let samples = data.train.len();
        // Ranks that share the layers of a network train on the same images.
        let (rank, ranks) = args.parallel.replica(rank, ranks)?;
        let (division, seed) = (args.division((rank, ranks))?, args.seed());
        let sampler = match args.global_batch() {
            Some(global_batch) => Sampler::of_part(samples, global_batch, division.images(), seed)?,
            None => Sampler::new(SamplerConfig { samples, batch: args.batch(), rank, ranks, seed })?,
        };
        let length = match args.length() {
            Length::Epochs(epochs) => epochs.saturating_mul(sampler.steps_per_epoch() as u64),
            Length::Steps(steps) => steps,
        };
        let run = Run::new(args, &division, ranks, length);
        let training_config = TrainingConfig {
            seed,
            division,
            lr: run.lr,
            schedule: args.schedule.over(length, args.warm_up),
            steps_per_epoch: sampler.steps_per_epoch() as u64,
            steps: length,
            // The orders of two epochs.
            resident_bytes: resident_bytes(&data.train, 2 * samples / ranks as usize),
        };
        let (engine, data) = (engine(&training_config)?, data.origin.to_string());
        Ok(Trainer {
            engine,
            timeline: timeline.clone(),
            sampler,
            run,
            division,
            data,
            checkpoints: None,
            log: args.log_every.map(TrainingLog::new),
            length,
            runs_on: args.skip_test && args.checkpoint_dir.is_none(),
            running_since: None,
            agreed: false,
            stopping: false,
            unevaluated: None,
            is_saved_unevaluated: false,
            totals: Totals::default(),
            epoch_times: EpochTimes::default(),
        })
    }

    /// Saves checkpoints to `folder` from now on, and resumes from it if permitted. Collective.
    pub(super) fn enable_checkpoints(
        &mut self,
        folder: &Path,
        world: &mut World,
        args: &Args,
        data: &Data,
        threads: usize,
    ) -> Result<(), Box<dyn Error>> {
        let mut checkpoints = Checkpoints::open(folder, args, world)?;
        if world.rank() == 0 {
            self.run.describe(args, data, threads, self.engine.gpu().map(Device::name));
            self.run.launch = world.launch_id().map(str::to_owned);
        }
        self.unevaluated =
            checkpoints.begin(&mut *self.engine, &self.run, ResumeFrom::choose(args, world))?;
        self.is_saved_unevaluated = self.unevaluated.is_some();
        self.checkpoints = Some(checkpoints);
        Ok(())
    }

    pub(super) fn engine(&mut self) -> &mut dyn Engine {
        &mut *self.engine
    }

    /// The images of a step on this rank.
    pub(super) fn division(&self) -> &Division {
        &self.division
    }

    fn steps_per_epoch(&self) -> u64 {
        self.sampler.steps_per_epoch() as u64
    }

    /// Steps of the whole training.
    pub(super) fn length(&self) -> u64 {
        self.length
    }

    /// Epochs of the whole training, rounded up.
    pub(super) fn epochs(&self) -> u64 {
        self.length.div_ceil(self.steps_per_epoch())
    }

    pub(super) fn steps(&self) -> u64 {
        self.engine.steps()
    }

    pub(super) fn totals(&self) -> Totals {
        self.totals
    }

    pub(super) fn epoch_times(&self) -> &EpochTimes {
        &self.epoch_times
    }

    /// The data source, in words.
    pub(super) fn data(&self) -> &str {
        &self.data
    }

    /// Epochs started.
    pub(super) fn epoch(&self) -> u64 {
        self.steps().div_ceil(self.steps_per_epoch())
    }

    /// The results of an epoch after which the run that is resumed was stopped, before its evaluation was complete;
    /// without content on ranks other than 0.
    pub(super) fn unevaluated(&self) -> Option<&EpochReport> {
        self.unevaluated.as_ref()
    }

    /// Trains to the end of the epoch, or of the training if that comes first. Tells `observer` what happens. `None` if the
    /// ranks stop before, between two steps.
    pub(super) fn train_epoch(
        &mut self,
        data: &Samples,
        world: &World,
        mut observer: impl FnMut(Event<'_>),
    ) -> Result<Option<EpochReport>, Box<dyn Error>> {
        let per_epoch = self.steps_per_epoch();
        let epoch = self.steps() / per_epoch;
        let last = self.length.min((epoch + 1) * per_epoch);
        // Ranks with different numbers of steps would wait for each other in vain. If they agree on the first epoch
        // and on the whole training, they agree on all epochs.
        if !std::mem::replace(&mut self.agreed, true) {
            verify_same(
                self.engine.comm(),
                &format!("steps by the end of epoch {}", epoch + 1),
                last as i64,
            )?;
            verify_same(self.engine.comm(), "steps of the whole training", self.length as i64)?;
        }
        let global_batch = self.run.global_batch();
        let (begin, length) = (self.steps(), self.length);
        let watch = Stopwatch::start(&self.timeline, self.running_since.take());
        // A single rank does not communicate, and on GPUs the host cannot count it.
        let communicates = self.engine.comm().size() > 1 && self.engine.gpu().is_none();
        let share = |spent: TimeSpent| communicates.then(|| spent.communication()[0]);
        let mut measured_from = (begin >= WARM_UP).then(|| (watch.spent(), begin));
        while self.engine.steps() < last {
            let mut note = |step: u64, loss: f64| {
                let spent = watch.spent();
                if step >= WARM_UP && measured_from.is_none() {
                    measured_from = Some((spent, step));
                }
                let pace = spent.seconds / (step - begin) as f64;
                let (epoch, images_per_s, communication) =
                    (epoch + 1, global_batch as f64 / pace, share(spent));
                observer(Event::Step(&ProgressLine {
                    epoch,
                    step,
                    steps: last,
                    length,
                    loss,
                    images_per_s,
                    pace,
                    communication,
                }));
            };
            let step = self.engine.steps();
            let save_at =
                self.checkpoints.as_ref().and_then(|saved| saved.next(step)).filter(|at| *at < last);
            let log_at = self.log.as_ref().map_or(u64::MAX, |log| log.next(step));
            let until = save_at.unwrap_or(last).min(log_at);
            let stretch = Stretch { until, stop: if self.runs_on { length.min(log_at) } else { until } };
            let moved = self.engine.traffic();
            let mut should_stop = || check_stop(world, &mut self.stopping);
            self.engine.train(data, &mut self.sampler, stretch, &mut note, &mut should_stop)?;
            if self.engine.steps() < until {
                return Ok(None);
            }
            self.totals.steps += until - step;
            if let (Some(before), Some(now)) = (moved, self.engine.traffic()) {
                *self.totals.bytes.get_or_insert(0) += now - before;
            }
            if let Some(log) = self.log.as_mut().filter(|log| log.is_due(until)) {
                let score = self.engine.score_so_far()?;
                observer(Event::Log(&log.line((until, length), score, watch.spent().seconds)));
            }
            if save_at == Some(until) {
                observer(Event::Saving);
                // Checkpoints are timed separately.
                watch.leave_out(|| self.save())?;
            }
        }
        let spent = watch.spent();
        self.running_since = (self.runs_on && self.engine.gpu().is_some()).then(Instant::now);
        self.totals.train_s += spent.seconds;
        self.epoch_times.train_s.push(spent.seconds);
        if let Some((from, step)) = measured_from.filter(|(_, step)| *step < last) {
            self.totals.measured += spent - from;
            self.totals.measured_steps += last - step;
            self.totals.measured_images += (last - step) * global_batch;
        }
        let (train_s, communication) = (spent.seconds, share(spent));
        let score = self.engine.take_score()?;
        if let Some(log) = &mut self.log {
            log.end_epoch(score, train_s);
        }
        // A GPU may be working on the next epoch, and have changed the weights.
        let is_ahead = self.running_since.is_some() && last < length;
        let l2_loss = if is_ahead { None } else { self.engine.l2_loss()? };
        let communication = communication.map(|share| mean(share, self.engine.comm())).transpose()?;
        Ok(Some(EpochReport {
            epoch: epoch + 1,
            step: last,
            train_loss: score.loss(),
            train_acc: score.accuracy(),
            l2_loss,
            train_s,
            images_per_s: ((last - begin) * global_batch) as f64 / train_s,
            communication,
            test_loss: None,
            test_acc: None,
            test_acc_average: None,
            test_s: 0.0,
            loss_scale: self.engine.loss_scale().map(LossScaleReport::from),
            data: self.data.clone(),
        }))
    }

    /// Evaluates on the test set. `None` if the ranks stop on the way.
    pub(super) fn evaluate(&mut self, data: &Samples, world: &World) -> mgpu::Result<Option<TestResult>> {
        let mut should_stop = || check_stop(world, &mut self.stopping);
        let tested = evaluate(&mut *self.engine, data, &mut should_stop)?;
        if let Some(tested) = &tested {
            self.totals.test_s += tested.seconds;
            self.epoch_times.test_s.push(tested.seconds);
        }
        Ok(tested)
    }

    /// Starts writing a checkpoint, if requested. Collective.
    pub(super) fn save(&mut self) -> Result<(), Box<dyn Error>> {
        let steps_per_epoch = self.steps_per_epoch();
        let Some(checkpoints) = &mut self.checkpoints else { return Ok(()) };
        let _range = mgpu::nvtx::range("checkpoint", None);
        let begin = self.timeline.begin();
        checkpoints.save(&mut *self.engine, &self.run, steps_per_epoch)?;
        self.is_saved_unevaluated = self.run.unevaluated.is_some();
        self.timeline.end(begin, Name::new("checkpoint"));
        Ok(())
    }

    /// Saves that the epoch of [`unevaluated`](Self::unevaluated) has been evaluated: no further run repeats that. Collective.
    pub(super) fn save_evaluated(&mut self) -> Result<(), Box<dyn Error>> {
        self.unevaluated = None;
        self.save()
    }

    /// Saves what a stopped run is to be resumed from, unless there is such a checkpoint already, and waits until it is
    /// written. `unevaluated` are the results of an epoch whose evaluation was cut short. Returns the folder of the
    /// checkpoint; `None` if nothing is saved. Collective.
    pub(super) fn save_stopped(
        &mut self,
        unevaluated: Option<EpochReport>,
    ) -> Result<Option<&Path>, Box<dyn Error>> {
        let steps = self.steps();
        self.run.unevaluated = unevaluated;
        let is_saved = self.is_saved_unevaluated == self.run.unevaluated.is_some();
        let differs = |saved: &Checkpoints| saved.newest().1 != Some(steps) || !is_saved;
        if steps > 0 && self.checkpoints.as_ref().is_some_and(differs) {
            self.save()?;
        }
        self.finish_saving()?;
        // A launcher may end the other ranks when the first one exits, so all of them wait for the one that writes.
        self.engine.comm().barrier()?;
        let saved = self.checkpoints.as_ref().map(Checkpoints::newest);
        Ok(saved.filter(|(_, newest)| *newest == Some(steps)).map(|(folder, _)| folder))
    }

    /// Waits until the last checkpoint is written, and its copies. Collective.
    pub(super) fn finish_saving(&mut self) -> mgpu::Result<()> {
        self.checkpoints.as_mut().map_or(Ok(()), Checkpoints::finish)
    }

    /// Waits until this rank has written what it is writing, also after an error.
    pub(super) fn finish_saving_here(&mut self) -> mgpu::Result<()> {
        self.checkpoints.as_mut().map_or(Ok(()), Checkpoints::finish_here)
    }

    /// The number of checkpoints, and the milliseconds that training was blocked by each.
    pub(super) fn checkpoint_cost(&self) -> Option<(u32, f64)> {
        self.checkpoints.as_ref().map(Checkpoints::cost)
    }
}

/// Asks whether the ranks should stop, until they should.
fn check_stop(world: &World, stopping: &mut bool) -> mgpu::Result<bool> {
    *stopping = *stopping || world.stop_requested()?;
    Ok(*stopping)
}

/// Evaluates on `data`, each image once, on one of the replicas of the network. `None` if `should_stop` said so on the way.
/// Collective.
pub(super) fn evaluate(
    engine: &mut dyn Engine,
    data: &Samples,
    should_stop: &mut StopCheck<'_>,
) -> mgpu::Result<Option<TestResult>> {
    let start = Instant::now();
    let (replica, replicas) = engine.replica();
    let shard: Vec<u32> = evaluation_shard(data.len(), replica, replicas)?.map(|i| i as u32).collect();
    let Some((score, average)) = engine.evaluate(data, &shard, should_stop)? else { return Ok(None) };
    let score = over_ranks(score, engine.comm())?;
    let average = average.map(|average| over_ranks(average, engine.comm())).transpose()?;
    Ok(Some(TestResult { score, average, seconds: start.elapsed().as_secs_f64() }))
}

/// The mean over all ranks.
fn mean(value: f64, comm: &mut Communicator) -> mgpu::Result<f64> {
    let mut values = [value];
    comm.all_reduce_slice(&mut values, ReduceOp::Avg)?;
    Ok(values[0])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_progress_line_shows_communication_for_several_ranks() {
        let mut position = ProgressLine {
            epoch: 2,
            step: 30,
            steps: 40,
            length: 100,
            loss: 0.25,
            images_per_s: 1234.0,
            pace: 0.5,
            communication: Some(0.123),
        };
        let begin = "[======>             ]  30% 0:00:35 left, epoch 2 step 30/40 loss 0.2500 1234 images/s";
        assert_eq!(position.to_string(), format!("{begin}, 12% communication"));
        position.communication = None;
        assert_eq!(position.to_string(), begin);
    }

    #[test]
    fn the_progress_bar_fills() {
        assert_eq!(bar(0, 7), "[>                   ]   0%");
        assert_eq!(bar(999, 1000), "[===================>]  99%");
        assert_eq!(bar(7, 7), "[====================] 100%");
        assert_eq!(bar(8, 7), bar(7, 7));
    }
}
