//! `mgpurun -n 2 train_mnist`: the networks of [`nets`](crate::nets) on MNIST, data-parallel.
//!
//! `run` reads from top to bottom: join the world, get the data, replicate the weights, then epochs of steps. A step is
//! in `Trainer::train_epoch`; everything around it is what a training program needs besides: evaluation, checkpoints, a
//! report.

mod args;
mod checkpoints;
mod curves;
mod engine;
mod logits;
mod profile;
mod report;
mod run;
mod schedule;
mod source;
mod stopwatch;
mod trainer;

use std::error::Error;
use std::process::ExitCode;

use args::Args;
use clap::Parser;
use curves::Curves;
use engine::{Cpu, Engine, Gpu};
use half::bf16;
use mgpu::progress::Phase;
use mgpu::timeline::{Name, Timeline};
use mgpu::{Backend, ReduceOp, World};
use mgpu_kernels::Precision;
use report::{Metrics, Progress, Summary, Tested};
use trainer::{Position, Trainer};

/// Spans of the timeline that a rank has room for: 3 MiB; some 7 MB in the file.
const SPANS: usize = 65_536;

/// The program.
pub fn main() -> ExitCode {
    let args = Args::parse();
    let refused = crate::exit::refuse("train_mnist", args.precision);
    // It outlives the report of an error: a checkpoint that is being written then may take longer than a launcher waits.
    let mut trainer = None;
    let code = refused.unwrap_or_else(|| crate::exit::report("train_mnist", run(&args, &mut trainer)));
    match trainer.as_mut().map_or(Ok(()), Trainer::finish_saving) {
        Ok(()) => code,
        error => crate::exit::report("train_mnist", error),
    }
}

fn run(args: &Args, trainer: &mut Option<Trainer>) -> Result<(), Box<dyn Error>> {
    let mut world = World::from_env()?;
    let (rank, ranks) = (world.rank(), world.size());
    let threads = args.threads(world.thread_share());
    if world.backend() == Backend::Nccl {
        args.parallel.check_gpu()?;
    }
    let timeline = match &args.timeline {
        Some(_) if world.backend() == Backend::Nccl => {
            return Err(
                "--timeline shows what the CPU does: on GPUs take `nsys profile`, or --backend cpu".into()
            );
        }
        Some(path) => {
            if rank == 0 {
                Timeline::check(path)?;
            }
            Timeline::new(SPANS)
        }
        // Counting what communication takes costs next to nothing.
        None => Timeline::new(0),
    };
    let record_next = |made: u64| timeline.set_recording(args.timeline_steps().contains(&(made + 1)));
    record_next(0);
    let (device, mut comm) = match world.backend() {
        Backend::Cpu => (None, timeline.observe(world.communicator()?)),
        Backend::Nccl => world.communicators().map(|(device, host)| (Some(device), host))?,
    };
    if let Some(path) = args.logits.as_deref().filter(|_| rank == 0) {
        logits::check(path)?;
    }
    let data = source::load(args, &world, &mut *comm)?;
    let (plot, events) = (args.plot.as_deref(), args.tensorboard.as_deref());
    let mut curves = if rank == 0 { Curves::new(plot, events)? } else { Curves::default() };
    let mut metrics = args.metrics.as_deref().filter(|_| rank == 0).map(Metrics::open).transpose()?;
    let mut progress = Progress::new(rank);

    let trainer = trainer.insert(Trainer::new(args, (rank, ranks), &data, |recipe| {
        Ok(match (device, args.precision) {
            (Some(device), _) => {
                Box::new(Gpu::new(recipe, &args.net, args.gpu(), device, comm)?) as Box<dyn Engine>
            }
            (None, Precision::Bf16) => Box::new(Cpu::<bf16>::new(recipe, args, comm, threads)?),
            (None, _) => Box::new(Cpu::<f32>::new(recipe, args, comm, threads)?),
        })
    })?);
    if let Some(folder) = &args.checkpoint_dir {
        trainer.keep_in(folder, &world, args, &data, threads)?;
    }
    if rank == 0 {
        println!(
            "{} ({} parameters) on {ranks} rank{} of {}, {} images a step; {}",
            args.net.name,
            trainer.engine().parameters(),
            if ranks == 1 { "" } else { "s" },
            trainer.engine().place(),
            args.batch() * ranks as usize,
            data.origin
        );
        if args.show_kernels {
            trainer.engine().kernels().iter().for_each(|line| println!("{line}"));
        }
    }

    let mut tested = None;
    let begun = trainer.steps();
    record_next(begun);
    while trainer.steps() < trainer.length() {
        let mut written = Ok(());
        let seen = |position: &Position| {
            world.report_step(position.step);
            record_next(position.step);
            progress.update(|| position.to_string());
            if rank == 0 && written.is_ok() {
                written = curves.step(position.step, position.loss);
            }
        };
        let saving = || world.report_phase(Phase::Checkpoint);
        let mut report = trainer.train_epoch(&data.train, seen, saving)?;
        written?;
        if !args.skip_test {
            world.report_phase(Phase::Evaluation);
            let begin = timeline.begin();
            let now = tested.insert(trainer.evaluate(&data.test)?);
            timeline.end(begin, Name::new("evaluation"));
            report.set_test(now);
        }
        if rank == 0 {
            progress.line(&report.line(trainer.epochs(), tested.as_ref()));
            if let Some(metrics) = &mut metrics {
                metrics.append(&report)?;
            }
            curves.epoch(&report)?;
        }
        if args.checkpoint_dir.is_some() {
            world.report_phase(Phase::Checkpoint);
            trainer.save()?;
        }
    }
    trainer.finish_saving()?;
    if begun >= trainer.length() {
        // What it has come to is still worth knowing.
        if !args.skip_test {
            world.report_phase(Phase::Evaluation);
            tested = Some(trainer.evaluate(&data.test)?);
        }
        if rank == 0 {
            let result = tested.map_or(String::new(), |tested| format!("; {tested}"));
            println!("nothing left to train: {begun} steps are made, {} asked for{result}", trainer.length());
        }
    }
    let checksum = trainer.engine().verify()?;
    let gpu_mib = trainer.engine().gpu().map(|gpu| gpu.memory_peak() as f64 / f64::from(1 << 20));
    // Of the rank that has the most of each.
    let mut memory = [peak_resident_mib()?, gpu_mib.unwrap_or(0.0)];
    trainer.engine().comm().all_reduce_slice(&mut memory, ReduceOp::Max)?;
    let mut communication = trainer.totals().communication();
    trainer.engine().comm().all_reduce_slice(&mut communication, ReduceOp::Avg)?;
    if rank == 0 {
        println!("weights {checksum:016x}, the same on {ranks} rank{}", if ranks == 1 { "" } else { "s" });
        let profile = trainer.engine().profile();
        if let Some(profile) = &profile {
            print!("{profile}");
        }
        if args.json {
            let mut summary = summary(args, trainer, tested, memory, threads, checksum);
            if ranks > 1 && trainer.steps() > begun {
                [summary.communication, summary.waiting] = communication.map(|share| Some(round(share)));
            }
            summary.profile = profile;
            println!("{}", serde_json::to_string(&summary)?);
        }
    }
    // Last: a full disk does not cost what was said above.
    if let Some(path) = args.logits.as_deref().filter(|_| rank == 0) {
        logits::write(path, &args.net.name, trainer.engine(), &data.test)?;
    }
    if let Some(path) = &args.timeline {
        timeline.write(trainer.engine().comm(), path)?;
    }
    Ok(())
}

fn summary(
    args: &Args,
    trainer: &mut Trainer,
    tested: Option<Tested>,
    [rss_mib, gpu_mib]: [f64; 2],
    threads: usize,
    checksum: u64,
) -> Summary {
    let (totals, cost) = (trainer.totals(), trainer.checkpoint_cost());
    Summary {
        implementation: "mgpu",
        net: args.net.name.clone(),
        ranks: trainer.engine().comm().size(),
        batch: args.batch(),
        device: if trainer.engine().gpu().is_some() { "cuda" } else { "cpu" },
        dtype: args.precision.name(),
        epochs: trainer.epoch(),
        steps: trainer.steps(),
        images_per_s: round(totals.images_per_s()),
        ms_per_step: round(totals.ms_per_step()),
        communication: None,
        waiting: None,
        train_s: round(totals.train_s),
        test_s: round(totals.test_s),
        test_acc: tested.map(|tested| tested.score.accuracy()),
        test_loss: tested.map(|tested| tested.score.loss()),
        test_acc_average: tested.and_then(|tested| Some(tested.average?.accuracy())),
        max_gpu_mib: trainer.engine().gpu().map(|_| gpu_mib.ceil() as u64),
        gpu: trainer.engine().gpu().map(|gpu| gpu.name().to_owned()),
        rss_mib: round(rss_mib),
        threads,
        seed: args.seed,
        data: trainer.data().to_owned(),
        checkpoints: cost.map(|(saved, _)| saved),
        ms_per_checkpoint: cost.map(|(_, ms)| round(ms)),
        weights: format!("{checksum:016x}"),
        profile: None,
    }
}

fn round(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

/// Peak resident memory of this process, in MiB (VmHWM of `/proc/self/status`).
fn peak_resident_mib() -> Result<f64, Box<dyn Error>> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or_default();
    let kib: f64 = line.split_whitespace().next().unwrap_or_default().parse().unwrap_or(0.0);
    Ok(kib / 1024.0)
}
