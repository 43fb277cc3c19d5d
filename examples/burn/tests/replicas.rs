//! Training on several ranks equals training on one rank with the whole batch.

use std::process::{Command, Stdio};

use burn::backend::ndarray::{NdArrayDevice, NdArrayTensor};
use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::tensor::{DType, Distribution, Tensor};
use mgpu::optimizer::{OptimizerConfig, Rule, Sgd};
use mgpu::{Communicator, DataParallelConfig, World};
use mgpu_burn::{Classifier, Cpu, Error, Replica};
use mgpu_examples::data::{Dataset, Split, digits};

const BATCH: u32 = 24;
const STEPS: u32 = 4;
const DEVICE: NdArrayDevice = NdArrayDevice::Cpu;

fn data() -> Dataset {
    let (images, labels) = digits::generate(5, Split::Train, 0..(BATCH * STEPS) as usize);
    Dataset { images, labels }
}

fn sgd() -> OptimizerConfig {
    OptimizerConfig::new(Rule::Sgd(Sgd { lr: 0.1, momentum: 0.9, ..Sgd::default() }))
}

fn alone() -> Communicator {
    World::threads(1).unwrap().remove(0).communicator().unwrap()
}

/// Runs `rank` on as many threads as there are `ranks`.
fn on_ranks<R: Send>(ranks: u32, rank: impl Fn(Communicator) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = World::threads(ranks)
            .unwrap()
            .into_iter()
            .map(|mut world| {
                let rank = &rank;
                scope.spawn(move || rank(world.communicator().unwrap()))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// The results of a rank.
#[derive(Debug)]
struct Outcome {
    /// The parameters before the first step.
    start: Vec<f32>,
    /// All gradients of the first step, averaged over micro-batches and ranks.
    gradient: Vec<f32>,
    parameters: Vec<f32>,
}

/// Trains on this rank's part of each batch, divided into micro-batches, from the parameters `start` or, without them, from
/// rank 0's random ones.
fn train(comm: Communicator, micro_batches: u32, start: Option<&[f32]>) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.size());
    let config = DataParallelConfig::new(sgd(), 1).with_micro_batches(micro_batches as usize);
    let mut replica = Replica::with_config(comm, Classifier::new(&DEVICE), config).unwrap();
    if let Some(start) = start {
        // Set the parameters as a checkpoint would.
        replica
            .parallel()
            .restore(0, |name, layout| {
                Ok(if name == "weights" { start.to_vec() } else { vec![0.0; layout.len()] })
            })
            .unwrap();
        replica.load();
    }
    let start = replica.parallel().parameters().to_vec();
    let (data, part) = (data(), BATCH / ranks / micro_batches);
    let mut gradient = Vec::new();
    for step in 0..STEPS {
        replica
            .step_accumulated(|module, index| {
                let first = step * BATCH + (rank * micro_batches + index as u32) * part;
                let samples: Vec<u32> = (first..first + part).collect();
                module.loss(&data, &samples, &DEVICE).0
            })
            .unwrap();
        if step == 0 {
            let parallel = replica.parallel();
            gradient = (0..parallel.layout().tensors().len())
                .flat_map(|tensor| parallel.gradient(tensor).expect("the gradient of the last step").to_vec())
                .collect();
        }
    }
    Outcome { start, gradient, parameters: replica.parallel().parameters().to_vec() }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn largest_difference(one: &[f32], other: &[f32]) -> f32 {
    assert_eq!(one.len(), other.len());
    one.iter().zip(other).map(|(one, other)| (one - other).abs()).fold(0.0, f32::max)
}

#[test]
fn ranks_train_as_one_rank_with_the_whole_batch() {
    let whole = train(alone(), 1, None);
    let scale = whole.gradient.iter().fold(0f32, |largest, value| largest.max(value.abs()));
    assert!(largest_difference(&whole.start, &whole.parameters) > 1e-2, "nothing was trained");
    for ranks in [2, 3, 4] {
        let outcomes = on_ranks(ranks, |comm| train(comm, 1, Some(&whole.start)));
        for outcome in &outcomes {
            assert_eq!(
                bits(&outcome.parameters),
                bits(&outcomes[0].parameters),
                "ranks of {ranks} hold different parameters"
            );
        }
        // f32 sums in another order: through two convolutions and, for the parameters, through four steps.
        let gradient = largest_difference(&outcomes[0].gradient, &whole.gradient);
        assert!(gradient <= 1e-5 * scale, "{ranks} ranks: gradients differ by {gradient} of {scale}");
        let parameters = largest_difference(&outcomes[0].parameters, &whole.parameters);
        assert!(parameters <= 1e-5, "{ranks} ranks: parameters differ by {parameters}");
        // The same sums: burn's over each part of the batch, and those of the parts.
        let parts = train(alone(), ranks, Some(&whole.start));
        assert_eq!(bits(&outcomes[0].gradient), bits(&parts.gradient), "{ranks} ranks: gradients");
        assert_eq!(bits(&outcomes[0].parameters), bits(&parts.parameters), "{ranks} ranks: parameters");
    }
}

/// A network with what a replica leaves alone: running statistics and a frozen layer.
#[derive(Module, Debug)]
struct Normalized<B: burn::tensor::backend::Backend> {
    frozen: Linear<B>,
    norm: BatchNorm<B>,
    dense: Linear<B>,
}

impl Normalized<Cpu> {
    fn new() -> Self {
        Normalized {
            frozen: LinearConfig::new(4, 4).init(&DEVICE).no_grad(),
            norm: BatchNormConfig::new(4).init(&DEVICE),
            dense: LinearConfig::new(4, 1).init(&DEVICE),
        }
    }

    fn loss(&self) -> Tensor<Cpu, 1> {
        let input = Tensor::<Cpu, 2>::random([8, 4], Distribution::Uniform(1.0, 3.0), &DEVICE);
        self.dense.forward(self.norm.forward(self.frozen.forward(input))).powi_scalar(2).mean()
    }
}

fn values<const D: usize>(tensor: Tensor<Cpu, D>) -> Vec<f32> {
    tensor.into_data().into_vec().unwrap()
}

#[test]
fn tensors_without_gradient_stay_the_ranks_own() {
    let names = on_ranks(2, |comm| {
        let module = Normalized::new();
        let frozen = values(module.frozen.weight.val());
        let mut replica = Replica::new(comm, module, sgd(), 1).unwrap();
        let before = values(replica.module().dense.weight.val());
        for _ in 0..2 {
            replica.step(replica.module().loss()).unwrap();
        }
        assert_eq!(values(replica.module().frozen.weight.val()), frozen);
        assert_ne!(values(replica.module().norm.running_mean.value()), [0.0; 4], "statistics are kept");
        let after = values(replica.module().dense.weight.val());
        assert_ne!(after, before);
        let layout = replica.parallel().layout().clone();
        let dense = layout.tensors().iter().position(|tensor| tensor.name == "dense.weight").unwrap();
        assert_eq!(replica.parallel().parameters()[layout.range(dense)], after);
        replica.parallel().verify().unwrap();
        layout.tensors().iter().map(|tensor| tensor.name.clone()).collect::<Vec<_>>()
    });
    assert_eq!(names[0], ["norm.gamma", "norm.beta", "dense.weight", "dense.bias"]);
    assert_eq!(names[1], names[0]);
}

/// The addresses of all parameters.
#[derive(Default)]
struct Addresses(Vec<usize>);

impl ModuleVisitor<Cpu> for Addresses {
    fn visit_float<const D: usize>(&mut self, parameter: &Param<Tensor<Cpu, D>>) {
        let NdArrayTensor::F32(storage) = parameter.val().inner().into_primitive().tensor() else {
            panic!("not f32")
        };
        self.0.push(storage.view().as_ptr() as usize);
    }
}

#[test]
fn parameters_are_overwritten_in_place() {
    let mut replica = Replica::new(alone(), Classifier::<Cpu>::new(&DEVICE), sgd(), 1).unwrap();
    let addresses = |replica: &Replica<Classifier<Cpu>>| {
        let mut addresses = Addresses::default();
        replica.module().visit(&mut addresses);
        addresses.0
    };
    let before = addresses(&replica);
    let data = data();
    for _ in 0..3 {
        let (loss, _) = replica.module().loss(&data, &[0, 1, 2], &DEVICE);
        replica.step(loss).unwrap();
    }
    assert_eq!(addresses(&replica), before);
    assert_eq!(before.len(), 6);
}

#[test]
fn parameters_of_other_types_are_errors() {
    let mut module = Classifier::<Cpu>::new(&DEVICE);
    module = module.map(&mut InDouble);
    let error = Replica::new(alone(), module, sgd(), 1).err().expect("an error");
    assert!(matches!(&error, Error::DType { name, dtype: DType::F64 } if name == "first.weight"), "{error}");
}

struct InDouble;

impl burn::module::ModuleMapper<Cpu> for InDouble {
    fn map_float<const D: usize>(&mut self, parameter: Param<Tensor<Cpu, D>>) -> Param<Tensor<Cpu, D>> {
        parameter.map(|tensor| Tensor::from_inner(tensor.inner().cast(DType::F64)).require_grad())
    }
}

/// The program, with the environment variables of a launcher, as MPI and PyTorch users have them.
fn run(ranks: u32, arguments: &[&str]) -> Vec<(bool, String, String)> {
    let start = |rank: u32| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_mgpu-burn"));
        command.args(["--steps", "3", "--batch", "8", "--train", "64", "--test", "20"]).args(arguments);
        let job = format!("burn-{}-{}", std::process::id(), arguments.join(""));
        command.envs([
            ("WORLD_SIZE", &ranks.to_string()),
            ("RANK", &rank.to_string()),
            ("MGPU_RUN_ID", &job),
        ]);
        command.env("MGPU_BACKEND", "cpu").env("MATMUL_NUM_THREADS", "1").env_remove("MGPU_RENDEZVOUS");
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let started: Vec<_> = (0..ranks).map(start).collect();
    started
        .into_iter()
        .map(|rank| {
            let output = rank.wait_with_output().unwrap();
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            (output.status.success(), text(&output.stdout), text(&output.stderr))
        })
        .collect()
}

#[test]
fn processes_end_with_the_same_weights() {
    let outputs = run(2, &[]);
    assert!(outputs.iter().all(|output| output.0), "{outputs:?}");
    let text = &outputs[0].1;
    assert!(text.contains("ranks: 2,") && text.contains(" on all ranks"), "{text}");
}

#[test]
fn the_ways_to_compare_with_run() {
    for (ranks, update) in [(2, "copies"), (1, "burn")] {
        let outputs = run(ranks, &["--update", update]);
        assert!(outputs.iter().all(|output| output.0), "{outputs:?}");
        assert!(outputs[0].1.contains(" images/s; test "), "{outputs:?}");
    }
    let outputs = run(2, &["--update", "burn"]);
    assert!(outputs.iter().all(|output| !output.0), "{outputs:?}");
    let expected = "mgpu-burn: --update burn trains on one rank, and there are 2\n";
    assert!(outputs.iter().all(|output| output.2 == expected), "{outputs:?}");
}
