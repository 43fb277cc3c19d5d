//! `mgpurun -n 2 train_mnist`: the networks of [`nets`](crate::nets) on MNIST, data-parallel.
//!
//! `run` reads from top to bottom: join the world and load the data, replicate the weights, resume from a checkpoint,
//! train epochs of steps, report. `Trainer::train_epoch` makes the steps; the other files are what a training program
//! needs besides: checkpoints, reports, and `evaluation`, a run without training.

mod args;
mod byproducts;
mod checkpoints;
mod curves;
mod division;
mod engine;
mod evaluation;
mod logits;
mod predictions;
mod profile;
mod report;
mod run;
mod schedule;
mod source;
mod step_images;
mod stop;
mod stopwatch;
mod trainer;
mod training_log;

use std::error::Error;
use std::num::NonZero;
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;

use args::Args;
use byproducts::ByProduct;
use curves::Curves;
use engine::{Cpu, DevicePipeline, Engine, Gpu, Pipeline, TrainingConfig};
use half::{bf16, f16};
use mgpu::Phase;
use mgpu::replicate::verify_settings;
use mgpu::timeline::{Name, Timeline};
use mgpu::{Backend, Communicator, DeviceCommunicator, ReduceOp, World};
use mgpu_kernels::Precision;
use mgpu_kernels::cuda::Device;
use report::{
    EpochReport, LossScaleReport, Metrics, ModelSummary, ProgressDisplay, RankMemory, Summary, TestResult,
};
use source::Data;
use stop::Ended;
use trainer::{Event, Trainer};

use crate::data::{Split, digit_files};
use crate::print::{outln, parse_arguments, print};

/// Capacity of a rank's timeline in spans: 3.5 MiB in memory, about 7 MB in the file.
const SPANS: usize = 65_536;

/// The program.
pub fn main() -> ExitCode {
    let args: Args = parse_arguments();
    mgpu::output_file::block_sigxfsz();
    if let Some(folder) = &args.write_digits {
        let threads = args.threads(thread::available_parallelism().map_or(1, NonZero::get));
        let counts = (args.digits(Split::Train), args.digits(Split::Test));
        let written = digit_files::write(folder, args.seed(), counts, threads);
        return crate::exit::report("train_mnist", written);
    }
    let refused = args.refuse();
    if args.evaluate.is_some() {
        return refused.unwrap_or_else(|| crate::exit::report("train_mnist", evaluation::run(args)));
    }
    // Declared here so that it outlives the error report: finishing a checkpoint may take longer than a launcher
    // waits.
    let mut trainer = None;
    let code = refused.unwrap_or_else(|| match run(&args, &mut trainer) {
        Ok(Ended::Stopped) => crate::exit::stopped(),
        ended => crate::exit::report("train_mnist", ended.map(drop)),
    });
    match trainer.as_mut().map_or(Ok(()), Trainer::finish_saving_here) {
        Ok(()) => code,
        error => crate::exit::report("train_mnist", error),
    }
}

fn run(args: &Args, trainer: &mut Option<Trainer>) -> Result<Ended, Box<dyn Error>> {
    let world = World::from_env()?;
    crate::print::print_notices("train_mnist", &world);
    // The first check: a launcher that is asked to stop the ranks knows from now on that they do it by themselves.
    if world.stop_requested()? {
        return Ok(stop::before_training(&world));
    }
    let (mut session, device, comm) = Session::begin(args, world)?;
    let trainer = trainer.insert(session.trainer(device, comm)?);
    if let Some(folder) = &args.checkpoint_dir {
        trainer.enable_checkpoints(folder, &mut session.world, args, &session.data, session.threads)?;
    }
    session.print_header(trainer);
    let begun = trainer.steps();
    record_next(&session.timeline, args, begun);
    let trained = if begun < trainer.length() || trainer.unevaluated().is_some() {
        session.train(trainer)?
    } else {
        session.report_finished_run(trainer)?
    };
    let Some(tested) = trained else { return Ok(Ended::Stopped) };
    session.conclude(trainer, begun, tested)?;
    Ok(Ended::Finished)
}

/// Everything around the training of one rank.
struct Session<'a> {
    args: &'a Args,
    world: World,
    timeline: Timeline,
    threads: usize,
    data: Data,
    curves: Curves,
    metrics: Option<ByProduct<Metrics>>,
    progress: ProgressDisplay,
}

/// On ranks with a GPU.
type DeviceComm = Option<Arc<DeviceCommunicator>>;
type Comm = Communicator;

impl<'a> Session<'a> {
    /// Compares the arguments of all ranks, checks the output files, and loads the data.
    fn begin(args: &'a Args, mut world: World) -> Result<(Self, DeviceComm, Comm), Box<dyn Error>> {
        let is_first = world.rank() == 0;
        let timeline = timeline(args, &world)?;
        record_next(&timeline, args, 0);
        let threads = args.threads(world.thread_share());
        let (device, mut comm) = communicators(&mut world, args, &timeline, threads)?;
        if let Some(path) = args.logits.as_deref().filter(|_| is_first) {
            logits::check(path)?;
        }
        let data = source::load(args, &[Split::Train, Split::Test], &world, &mut comm)?;
        let (plot, events) = (args.plot.as_deref(), args.tensorboard.as_deref());
        let title = format!("{} on {}: {}", args.net().name, number_of_ranks(world.size()), data.origin);
        let curves = if is_first { Curves::new(plot, title, events)? } else { Curves::default() };
        let metrics =
            args.metrics.as_deref().filter(|_| is_first).map(Metrics::open).transpose()?.map(ByProduct::new);
        let progress = ProgressDisplay::new(world.rank());
        let session = Session { args, world, timeline, threads, data, curves, metrics, progress };
        Ok((session, device, comm))
    }

    /// The model, with the same weights on all ranks.
    fn trainer(&self, device: DeviceComm, comm: Comm) -> Result<Trainer, Box<dyn Error>> {
        let Session { args, world, timeline, threads, .. } = self;
        Trainer::new(args, (world.rank(), world.size()), &self.data, timeline, |training_config| {
            Ok(engine(training_config, args, (device, comm), timeline, *threads)?)
        })
    }

    /// Prints what will be trained, and on what.
    fn print_header(&self, trainer: &mut Trainer) {
        if self.world.rank() > 0 {
            return;
        }
        let (args, ranks) = (self.args, self.world.size());
        outln!(
            "{} ({} parameters) on {} of {}, {} images a step; {}",
            args.net().name,
            trainer.engine().parameters(),
            number_of_ranks(ranks),
            trainer.engine().describe_device(),
            trainer.division().global_batch(),
            self.data.describe()
        );
        if let Some(uneven) = trainer.division().describe_uneven() {
            outln!("{uneven}");
        }
        if let Some(parts) = trainer.engine().describe_parts() {
            outln!("{parts}");
        }
        let capability = trainer.engine().gpu().map(Device::architecture);
        if let (Some((7, minor)), Precision::Bf16) = (capability, args.precision) {
            outln!(
                "this GPU (compute capability 7.{minor}) has tensor cores for fp16, but multiplies bf16 as f32: try \
                 --precision fp16"
            );
        }
        if args.show_kernels {
            trainer.engine().kernels().iter().for_each(|line| outln!("{line}"));
        }
    }

    /// Trains to the end, epoch by epoch. Returns the last evaluation; `None` if the ranks were stopped.
    fn train(&mut self, trainer: &mut Trainer) -> Result<Option<Option<TestResult>>, Box<dyn Error>> {
        let mut tested = None;
        if let Some(mut report) = trainer.unevaluated().cloned().filter(|_| !self.args.skip_test) {
            // The run before was stopped in this evaluation. It has saved its state.
            if !self.test(trainer, &mut report, &mut tested)? {
                return self.stop(trainer, Some(report));
            }
            self.world.report_phase(Phase::Checkpoint);
            trainer.save_evaluated()?;
            self.report_epoch(trainer, &report, tested.as_ref());
        }
        while trainer.steps() < trainer.length() {
            let Some(mut report) = self.train_epoch(trainer)? else { return self.stop(trainer, None) };
            report::check_finite("training loss", report.epoch, report.train_loss)?;
            if !self.args.skip_test && !self.test(trainer, &mut report, &mut tested)? {
                return self.stop(trainer, Some(report));
            }
            // The checkpoint comes first, so that no failure of the output below can lose it.
            if self.args.checkpoint_dir.is_some() {
                self.world.report_phase(Phase::Checkpoint);
                trainer.save()?;
            }
            self.report_epoch(trainer, &report, tested.as_ref());
        }
        trainer.finish_saving()?;
        Ok(Some(tested))
    }

    /// Reports an epoch to the user.
    fn report_epoch(&mut self, trainer: &Trainer, report: &EpochReport, tested: Option<&TestResult>) {
        if self.world.rank() == 0 {
            self.progress.line(&report.line(trainer.epochs(), tested));
            if let Some(metrics) = &mut self.metrics {
                metrics.update(|metrics| metrics.append(report));
            }
            self.curves.epoch(report);
        }
    }

    /// Evaluates after an epoch, and adds the results to its report. False if the ranks stop on the way.
    fn test(
        &self,
        trainer: &mut Trainer,
        report: &mut EpochReport,
        tested: &mut Option<TestResult>,
    ) -> Result<bool, Box<dyn Error>> {
        let _range = mgpu::nvtx::range("evaluation", None);
        let begin = self.timeline.begin();
        let Some(result) = self.evaluate(trainer)? else { return Ok(false) };
        report.set_test(tested.insert(result));
        report::check_finite("test loss", report.epoch, report.test_loss.unwrap_or_default())?;
        self.timeline.end(begin, Name::new("evaluation"));
        Ok(true)
    }

    /// Trains the rest of the epoch and reports each step to the launcher and the user. `None` if the ranks stop.
    fn train_epoch(&mut self, trainer: &mut Trainer) -> Result<Option<EpochReport>, Box<dyn Error>> {
        let Session { args, world, timeline, data, curves, progress, .. } = self;
        let is_first = world.rank() == 0;
        let (global_batch, mut reported) = (trainer.division().global_batch() as u64, trainer.steps());
        trainer.train_epoch(&data.train, world, |event| match event {
            Event::Step(line) => {
                world.report_step(line.step);
                if is_first {
                    // For all ranks: a rank's own part depends on how the work is divided.
                    world.report_samples((line.step - reported) * global_batch);
                    reported = line.step;
                }
                record_next(timeline, args, line.step);
                progress.update(|| line.to_string());
                if is_first {
                    curves.step(line.step, line.loss);
                }
            }
            Event::Log(line) if is_first => {
                progress.line(&line.to_string());
                curves.log(line);
            }
            Event::Log(_) => {}
            Event::Saving => world.report_phase(Phase::Checkpoint),
        })
    }

    fn evaluate(&self, trainer: &mut Trainer) -> mgpu::Result<Option<TestResult>> {
        self.world.report_phase(Phase::Evaluation);
        trainer.evaluate(&self.data.test, &self.world)
    }

    /// For a run whose steps are all done: evaluates and reports the result; `None` if the ranks were stopped.
    fn report_finished_run(
        &self,
        trainer: &mut Trainer,
    ) -> Result<Option<Option<TestResult>>, Box<dyn Error>> {
        let tested = match self.args.skip_test {
            true => None,
            false => match self.evaluate(trainer)? {
                None => return self.stop(trainer, None),
                tested => tested,
            },
        };
        if self.world.rank() == 0 {
            let (made, asked) = (trainer.steps(), trainer.length());
            let result = tested.map_or(String::new(), |tested| format!("; {tested}"));
            outln!("nothing left to train: {made} steps are done, {asked} requested{result}");
        }
        Ok(Some(tested))
    }

    /// Compares the weights of all ranks; prints and writes the results.
    fn conclude(
        &self,
        trainer: &mut Trainer,
        begun: u64,
        tested: Option<TestResult>,
    ) -> Result<(), Box<dyn Error>> {
        let (args, ranks) = (self.args, self.world.size());
        let checksum = trainer.engine().verify()?;
        let memory = RankMemory::gather(trainer.engine())?;
        let mut communication = trainer.totals().communication();
        trainer.engine().comm().all_reduce_slice(&mut communication, ReduceOp::Avg)?;
        let (l2_loss, pipeline) = (trainer.engine().l2_loss()?, trainer.engine().pipeline()?);
        let bytes_per_step = trainer.totals().bytes_per_step(trainer.engine().comm())?;
        if self.world.rank() == 0 {
            outln!("weights {checksum:016x}, {}", args.parallel.describe_copies(ranks));
            let profile = trainer.engine().profile();
            if let Some(profile) = &profile {
                print(format_args!("{profile}"));
            }
            if args.json {
                let (memory, data) = ((memory, self.threads), trainer.data().to_owned());
                let results = (tested, l2_loss, checksum);
                let batch = trainer.division().images().len();
                let mut model = ModelSummary::new((args, batch), trainer.engine(), results, memory, data);
                model.global_batch = args.global_batch();
                let mut summary = Summary::new(model, trainer, bytes_per_step);
                summary.pipeline = pipeline;
                summary.loss_scale = trainer.engine().loss_scale().map(LossScaleReport::from);
                if ranks > 1 && trainer.steps() > begun && trainer.engine().gpu().is_none() {
                    summary.set_communication(communication);
                }
                summary.profile = profile;
                outln!("{}", serde_json::to_string(&summary)?);
            }
        }
        // The last output, so that a full disk cannot lose the lines above.
        if let Some(path) = &args.logits {
            logits::write("training", path, &args.net().name, trainer.engine(), &self.data.test)?;
        }
        if let Some(path) = &args.timeline {
            match self.timeline.write(trainer.engine().comm(), path) {
                Err(error @ mgpu::Error::Timeline { .. }) => byproducts::warn("training", &error.to_string()),
                written => written?,
            }
        }
        Ok(())
    }
}

/// The communicators of this rank, after a comparison of all ranks' arguments.
fn communicators(
    world: &mut World,
    args: &Args,
    timeline: &Timeline,
    threads: usize,
) -> Result<(DeviceComm, Comm), Box<dyn Error>> {
    args.parallel.grid(world.size())?;
    let (device, mut comm) = match world.backend() {
        Backend::Cpu => (None, timeline.observe(world.communicator()?)),
        Backend::Nccl => args.parallel.communicators(world).map(|(device, host)| (Some(device), host))?,
    };
    verify_settings(&mut comm, &args.settings(threads))?;
    if device.is_some() {
        verify_settings(&mut comm, &args.traced_settings())?;
    }
    Ok((device, comm))
}

/// The model on this rank's device, with the same weights on all ranks. Collective.
fn engine(
    config: &TrainingConfig,
    args: &Args,
    (device, comm): (DeviceComm, Comm),
    timeline: &Timeline,
    threads: usize,
) -> mgpu::Result<Box<dyn Engine>> {
    if let Some(grid) = args.parallel.grid(comm.size()).map_err(mgpu::Error::program)? {
        return Ok(match (device, args.precision) {
            (Some(device), _) => {
                let comms = (&*device, comm);
                Box::new(DevicePipeline::new(config, args, grid, comms, timeline, threads)?)
            }
            (None, Precision::Bf16) => {
                Box::new(Pipeline::<bf16>::new(config, args, grid, comm, timeline, threads)?)
            }
            (None, _) => Box::new(Pipeline::<f32>::new(config, args, grid, comm, timeline, threads)?),
        });
    }
    Ok(match (device, args.precision) {
        (Some(device), _) => Box::new(Gpu::new(config, args, (device, comm), timeline, threads)?),
        (None, Precision::Bf16) => Box::new(Cpu::<bf16>::new(config, args, comm, timeline, threads)?),
        (None, Precision::F16) => Box::new(Cpu::<f16>::new(config, args, comm, timeline, threads)?),
        (None, _) => Box::new(Cpu::<f32>::new(config, args, comm, timeline, threads)?),
    })
}

/// The requested timeline, or one that only counts, which costs next to nothing and gives the communication time. On
/// GPUs none, because the host has nothing to count.
fn timeline(args: &Args, world: &World) -> Result<Timeline, Box<dyn Error>> {
    let Some(path) = &args.timeline else {
        return Ok(match world.backend() {
            Backend::Cpu => Timeline::new(0)?,
            Backend::Nccl => Timeline::off(),
        });
    };
    if world.rank() == 0 {
        Timeline::check(path)?;
    }
    Ok(Timeline::new(SPANS)?)
}

/// Records the step after step `made` if it was requested.
fn record_next(timeline: &Timeline, args: &Args, made: u64) {
    timeline.set_recording(args.timeline_steps().contains(&(made + 1)));
}

fn number_of_ranks(ranks: u32) -> String {
    format!("{ranks} rank{}", if ranks == 1 { "" } else { "s" })
}
