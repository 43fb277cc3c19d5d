//! Training on several ranks equals training on one rank with the whole batch.

use std::process::{Command, Stdio};

use candle_core::{DType, Device};
use candle_nn::{VarBuilder, VarMap};
use mgpu::optimizer::{OptimizerConfig, Rule, Sgd};
use mgpu::{Communicator, World};
use mgpu_candle::{Classifier, Replica};
use mgpu_examples::data::{Dataset, Split, digits};

const BATCH: u32 = 24;
const STEPS: u32 = 4;

fn data() -> Dataset {
    let (images, labels) = digits::generate(5, Split::Train, 0..(BATCH * STEPS) as usize);
    Dataset { images, labels }
}

/// The results of a rank.
#[derive(Debug)]
struct Outcome {
    /// All gradients of the first step, averaged over ranks.
    gradient: Vec<f32>,
    parameters: Vec<f32>,
}

/// Trains on this rank's part of each batch, from the parameters `start` or, without them, from rank 0's random ones.
/// Returns the initial parameters too.
fn train(comm: Communicator, start: Option<&[f32]>) -> (Vec<f32>, Outcome) {
    let (rank, ranks) = (comm.rank(), comm.size());
    let variables = VarMap::new();
    let classifier = Classifier::new(VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu)).unwrap();
    let sgd = OptimizerConfig::new(Rule::Sgd(Sgd { lr: 0.1, momentum: 0.9, ..Sgd::default() }));
    let mut replica = Replica::new(comm, &variables, sgd, 1).unwrap();
    if let Some(start) = start {
        // Set the parameters as a checkpoint would.
        replica
            .parallel()
            .restore(0, |name, layout| {
                Ok(if name == "weights" { start.to_vec() } else { vec![0.0; layout.len()] })
            })
            .unwrap();
        replica.load().unwrap();
    }
    let start = replica.parallel().parameters().to_vec();
    let (data, part) = (data(), BATCH / ranks);
    let mut gradient = Vec::new();
    for step in 0..STEPS {
        let first = step * BATCH + rank * part;
        let samples: Vec<u32> = (first..first + part).collect();
        let (loss, _) = classifier.loss(&data, &samples).unwrap();
        replica.step(&loss).unwrap();
        if step == 0 {
            let parallel = replica.parallel();
            gradient = (0..parallel.layout().tensors().len())
                .flat_map(|tensor| parallel.gradient(tensor).expect("the gradient of the last step").to_vec())
                .collect();
        }
    }
    (start, Outcome { gradient, parameters: replica.parallel().parameters().to_vec() })
}

fn largest_difference(one: &[f32], other: &[f32]) -> f32 {
    assert_eq!(one.len(), other.len());
    one.iter().zip(other).map(|(one, other)| (one - other).abs()).fold(0.0, f32::max)
}

#[test]
fn averaged_gradients_equal_whole_batch_gradients() {
    let alone = World::threads(1).unwrap().remove(0).communicator().unwrap();
    let (start, whole) = train(alone, None);
    let scale = whole.gradient.iter().fold(0f32, |largest, value| largest.max(value.abs()));
    assert!(largest_difference(&start, &whole.parameters) > 1e-2, "nothing was trained");
    for ranks in [2, 3, 4] {
        let outcomes: Vec<Outcome> = std::thread::scope(|scope| {
            let start = &start;
            let worlds = World::threads(ranks).unwrap().into_iter();
            let threads: Vec<_> = worlds
                .map(|mut world| scope.spawn(move || train(world.communicator().unwrap(), Some(start)).1))
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        for outcome in &outcomes {
            assert_eq!(
                outcome.parameters, outcomes[0].parameters,
                "ranks of {ranks} hold different parameters"
            );
        }
        // f32 sums in another order: through two convolutions and, for the parameters, through four steps.
        let gradient = largest_difference(&outcomes[0].gradient, &whole.gradient);
        assert!(gradient <= 1e-5 * scale, "{ranks} ranks: gradients differ by {gradient} of {scale}");
        let parameters = largest_difference(&outcomes[0].parameters, &whole.parameters);
        assert!(parameters <= 1e-5, "{ranks} ranks: parameters differ by {parameters}");
    }
}

/// The program, with the environment variables of a launcher, as MPI and PyTorch users have them.
#[test]
fn processes_end_with_the_same_weights() {
    let start = |rank: u32| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_mgpu-candle"));
        command.args(["--steps", "3", "--batch", "8", "--train", "64", "--test", "20"]);
        let job = format!("candle-{}", std::process::id());
        command.envs([("WORLD_SIZE", "2"), ("RANK", &rank.to_string()), ("MGPU_RUN_ID", &job)]);
        command.env("MGPU_BACKEND", "cpu").env_remove("MGPU_RENDEZVOUS").stdout(Stdio::piped());
        command.spawn().unwrap()
    };
    let outputs = [start(0), start(1)].map(|rank| rank.wait_with_output().unwrap());
    assert!(outputs.iter().all(|output| output.status.success()));
    let text = String::from_utf8_lossy(&outputs[0].stdout);
    assert!(text.contains("ranks: 2,") && text.contains(" on all ranks"), "{text}");
}
