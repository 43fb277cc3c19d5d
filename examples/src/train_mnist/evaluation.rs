//! `--evaluate`: a run that trains nothing. It loads a checkpoint, evaluates it, and classifies images on request.
//!
//! Only rank 0 reads the checkpoint, so all ranks evaluate the same one; the others receive its contents. If rank 0
//! refuses it, it exits, and the others notice that. Nothing in the folder changes: no lock is taken, nothing is
//! removed, and a damaged checkpoint keeps its name. So the training that writes there may still be running.

use std::error::Error;
use std::path::Path;

use mgpu::checkpoint::{self, Checkpoint, Found};
use mgpu::optimizer::Schedule;
use mgpu::timeline::Timeline;
use mgpu::{Communicator, Phase, World};
use serde::Serialize;

use super::args::Args;
use super::checkpoints::step_of;
use super::division::Division;
use super::engine::{Engine, TrainingConfig};
use super::report::{ModelSummary, RankMemory, TestResult, round};
use super::run::Run;
use super::source::Data;
use super::{communicators, engine, logits, number_of_ranks, predictions, source, trainer};
use crate::data::{Samples, Split};
use crate::nets::{Spec, names};
use crate::print::{errln, outln};

/// The last line of standard output with `--json`.
#[derive(Debug, Serialize)]
struct Summary {
    #[serde(flatten)]
    model: ModelSummary,
    test_s: Option<f64>,
    /// The folder of the checkpoint.
    checkpoint: String,
    /// Number of images classified for `--predict`.
    predicted: Option<usize>,
}

/// Evaluates the checkpoint of `args.evaluate`. Collective.
pub(super) fn run(mut args: Args) -> Result<(), Box<dyn Error>> {
    let mut world = World::from_env()?;
    crate::print::print_notices("train_mnist", &world);
    let is_first = world.rank() == 0;
    let (threads, timeline) = (args.threads(world.thread_share()), Timeline::off());
    let (device, mut comm) = communicators(&mut world, &args, &timeline, threads)?;
    if is_first {
        check_outputs(&args)?;
    }
    let chosen = args.evaluate.as_deref().filter(|_| is_first).map(choose).transpose()?;
    let step = adopt(&mut args, chosen.as_ref(), &mut comm)?;
    let images =
        args.predict.as_deref().map(|path| predictions::read(path, &args, &world, &mut comm)).transpose()?;
    let data = load_test_set(&args, &world, &mut comm)?;
    // No batch has more images than there are.
    let most = [data.as_ref().map(|data| data.test.len()), images.as_ref().map(Samples::len)];
    let batch = args.batch().min(most.into_iter().flatten().max().unwrap_or(1).max(1));
    let config = evaluation_config(&args, batch);
    let mut engine = engine(&config, &args, (device, comm), &timeline, threads)?;
    let checkpoint = chosen.map(|(checkpoint, _)| checkpoint);
    engine.restore(step, checkpoint.as_ref()).map_err(|error| explain(&error, checkpoint.as_ref()))?;
    let checksum = engine.verify()?;
    let origin = data.as_ref().map_or("no data".to_owned(), |data| data.origin.to_string());
    if let Some(checkpoint) = &checkpoint {
        print_header(&args, &mut *engine, checkpoint.path(), &origin);
    }

    world.report_phase(Phase::Evaluation);
    let tested = test(&args, &mut *engine, data.as_ref())?;
    if let (Some(images), Some(output)) = (&images, &args.output) {
        predictions::write(images, output, &mut *engine)?;
    }
    let predicted = images.as_ref().map(Samples::len);
    let (memory, l2_loss) = (RankMemory::gather(&mut *engine)?, engine.l2_loss()?);
    if let Some(checkpoint) = checkpoint {
        let model = ModelSummary::new(
            (&args, batch),
            &mut *engine,
            (tested, l2_loss, checksum),
            (memory, threads),
            origin,
        );
        report(&args, model, checkpoint.path(), (tested, predicted))?;
    }
    if let (Some(path), Some(data)) = (&args.logits, &data) {
        logits::write("evaluation", path, &args.net().name, &mut *engine, &data.test)?;
    }
    Ok(())
}

/// Prints the results.
fn report(
    args: &Args,
    model: ModelSummary,
    checkpoint: &Path,
    (tested, predicted): (Option<TestResult>, Option<usize>),
) -> Result<(), Box<dyn Error>> {
    if let (Some(count), Some(output)) = (predicted, &args.output) {
        outln!("{count} predictions in {}", output.display());
    }
    outln!("weights {}, {}", model.weights, args.parallel.describe_copies(model.ranks));
    if let Some(l2) = model.l2_loss {
        outln!("L2 penalty of the weights {l2:.4}, which no loss above includes");
    }
    if args.json {
        let test_s = tested.map(|tested| round(tested.seconds));
        let checkpoint = checkpoint.display().to_string();
        outln!("{}", serde_json::to_string(&Summary { model, test_s, checkpoint, predicted })?);
    }
    Ok(())
}

/// Prints what is evaluated, and on what.
fn print_header(args: &Args, engine: &mut dyn Engine, path: &Path, origin: &str) {
    outln!(
        "{} ({} parameters) from {} on {} of {}; {origin}",
        args.net().name,
        engine.parameters(),
        path.display(),
        number_of_ranks(engine.comm().size()),
        engine.describe_device()
    );
    if let Some(parts) = engine.describe_parts() {
        outln!("{parts}");
    }
    if args.show_kernels {
        engine.kernels().iter().for_each(|line| outln!("{line}"));
    }
}

/// Checks that the output files can be written, so that the error comes first.
fn check_outputs(args: &Args) -> Result<(), String> {
    if let (Some(images), Some(output)) = (&args.predict, &args.output) {
        predictions::check(images, output)?;
    }
    args.logits.as_deref().map_or(Ok(()), logits::check)
}

/// A checkpoint that cannot be loaded although it was intact a moment ago.
fn explain(error: &mgpu::Error, checkpoint: Option<&Checkpoint>) -> String {
    match checkpoint {
        Some(checkpoint) if !checkpoint.path().exists() => {
            let path = checkpoint.path().display();
            format!(
                "{path} was removed while it was loaded, by the training that writes there: try again, or let that \
                 training --keep more"
            )
        }
        _ => error.to_string(),
    }
}

/// The checkpoint at `path`, or the newest intact one in the folder `path`.
fn choose(path: &Path) -> Result<(Checkpoint, Run), Box<dyn Error>> {
    let checkpoint = find(path)?;
    let run = serde_json::from_value(checkpoint.manifest().state.clone()).map_err(|error| {
        format!("{}: not a checkpoint of train_mnist: {error}", checkpoint.path().display())
    })?;
    Ok((checkpoint, run))
}

fn find(path: &Path) -> Result<Checkpoint, Box<dyn Error>> {
    let refuse = |problem: &dyn std::fmt::Display| format!("--evaluate {}: {problem}", path.display());
    let entries = path.read_dir().map_err(|error| refuse(&error))?;
    if let Some(Found { checkpoint, damaged }) = checkpoint::find(path)? {
        for (_, error) in damaged {
            let used = checkpoint.path().display();
            errln!("train_mnist: {error}; it is left as it is; evaluating the previous checkpoint {used}");
        }
        return Ok(checkpoint);
    }
    let is_part = |name: &str| name == "manifest.json" || name.ends_with(".safetensors");
    if !entries.flatten().any(|entry| entry.file_name().to_str().is_some_and(is_part)) {
        let problem = "no checkpoint is there: give a folder step-…, or one with such folders";
        return Err(refuse(&problem).into());
    }
    let checkpoint = Checkpoint::open(path)?;
    checkpoint.verify()?;
    Ok(checkpoint)
}

/// Takes the network, and the seed if none was given, from rank 0's checkpoint. Returns its step. Collective.
fn adopt(
    args: &mut Args,
    chosen: Option<&(Checkpoint, Run)>,
    comm: &mut Communicator,
) -> Result<u64, Box<dyn Error>> {
    let mut values = match chosen {
        None => [0; 3],
        Some((checkpoint, run)) => {
            let path = checkpoint.path().display();
            let index = names().iter().position(|name| *name == run.net);
            let index =
                index.ok_or_else(|| format!("{path}: its network `{}` is not known here", run.net))?;
            if let Some(other) = args.net.as_ref().filter(|net| net.name != run.net) {
                let problem = format!("--net {}: the checkpoint {path} is of {}", other.name, run.net);
                return Err(format!("{problem}; leave --net out").into());
            }
            if let Some(trained) = run.precision().filter(|precision| *precision != args.precision.name()) {
                outln!("trained in {trained}, evaluated in {} (see --precision)", args.precision);
            }
            [step_of(checkpoint)?, index as i64, run.seed.cast_signed()]
        }
    };
    comm.broadcast_slice(&mut values, 0)?;
    let [step, index, seed] = values.map(i64::cast_unsigned);
    args.net = Some(Spec::named(names()[index as usize])?);
    args.seed = args.seed.or(Some(seed));
    Ok(step)
}

/// The test set, unless nothing needs it.
fn load_test_set(
    args: &Args,
    world: &World,
    comm: &mut Communicator,
) -> Result<Option<Data>, Box<dyn Error>> {
    let is_needed = !args.skip_test || args.logits.is_some();
    is_needed.then(|| source::load(args, &[Split::Test], world, comm)).transpose()
}

/// A training that makes no step.
fn evaluation_config(args: &Args, batch: usize) -> TrainingConfig {
    TrainingConfig {
        seed: args.seed(),
        division: Division::undivided(batch),
        lr: args.lr(),
        schedule: Schedule::CONSTANT,
        steps_per_epoch: 1,
        steps: 1,
        resident_bytes: 0,
    }
}

/// Evaluates on the test set, unless that is to be skipped. Collective.
fn test(
    args: &Args,
    engine: &mut dyn Engine,
    data: Option<&Data>,
) -> Result<Option<TestResult>, Box<dyn Error>> {
    let Some(data) = data.filter(|_| !args.skip_test) else { return Ok(None) };
    let tested = trainer::evaluate(engine, &data.test, &mut || Ok(false))?;
    let tested = tested.expect("nothing stops it");
    if engine.comm().rank() == 0 {
        outln!("after step {}: {tested}", engine.steps());
    }
    Ok(Some(tested))
}
