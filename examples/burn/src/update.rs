//! Three ways to update a model, to compare their speed: the [`Replica`]; burn's optimizer with gradients that mgpu averages
//! outside of their tensors, as a program does that knows only `all_reduce_slice`; and burn alone.

use burn::backend::ndarray::NdArray;
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{Adam, AdamConfig, GradientsParams, Optimizer};
use burn::tensor::{Tensor, TensorData};
use clap::ValueEnum;
use mgpu::optimizer::{self, OptimizerConfig, Rule};
use mgpu::{Communicator, ReduceOp};
use mgpu_burn::{Classifier, Cpu, Error, Replica};

/// Who averages the gradients, and who updates the weights.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Update {
    /// mgpu does both, in memory that all ranks share
    Replica,
    /// mgpu averages a copy of each gradient, and burn's Adam updates
    Copies,
    /// burn's Adam updates; one rank only
    Burn,
}

/// A model with its optimizer, which is Adam.
pub(crate) enum Model {
    Replica(Box<Replica<Classifier<Cpu>>>),
    Burn(Box<BurnModel>),
}

impl Model {
    /// The module's weights must be equal on all ranks already, except for a replica.
    pub(crate) fn new(
        update: Update,
        comm: Communicator,
        module: Classifier<Cpu>,
        lr: f64,
        threads: usize,
    ) -> Result<Self, Error> {
        let defaults = optimizer::Adam::default();
        if update == Update::Replica {
            let adam = OptimizerConfig::new(Rule::Adam(optimizer::Adam { lr, ..defaults }));
            return Ok(Model::Replica(Box::new(Replica::new(comm, module, adam, threads)?)));
        }
        let optimizer = AdamConfig::new().with_epsilon(defaults.eps as f32).init();
        Ok(Model::Burn(Box::new(BurnModel { module: Some(module), optimizer, lr, comm })))
    }

    pub(crate) fn module(&self) -> &Classifier<Cpu> {
        match self {
            Model::Replica(replica) => replica.module(),
            Model::Burn(model) => model.module.as_ref().expect(PRESENT),
        }
    }

    pub(crate) fn step(&mut self, loss: Tensor<Cpu, 1>) -> Result<(), Error> {
        match self {
            Model::Replica(replica) => replica.step(loss),
            Model::Burn(model) => model.step(loss),
        }
    }

    pub(crate) fn comm(&mut self) -> &mut Communicator {
        match self {
            Model::Replica(replica) => replica.parallel().comm(),
            Model::Burn(model) => &mut model.comm,
        }
    }

    /// Compares the weights of all ranks and returns their checksum. Only a replica can.
    pub(crate) fn verify(&mut self) -> Result<Option<u64>, Error> {
        match self {
            Model::Replica(replica) => Ok(Some(replica.parallel().verify()?)),
            Model::Burn(_) => Ok(None),
        }
    }
}

const PRESENT: &str = "the module is absent only while it is updated";

/// A module that burn's optimizer updates.
pub(crate) struct BurnModel {
    module: Option<Classifier<Cpu>>,
    optimizer: OptimizerAdaptor<Adam, Classifier<Cpu>, Cpu>,
    lr: f64,
    comm: Communicator,
}

impl BurnModel {
    fn step(&mut self, loss: Tensor<Cpu, 1>) -> Result<(), Error> {
        let module = self.module.as_ref().expect(PRESENT);
        let gradients = GradientsParams::from_grads(loss.backward(), module);
        let mut average = Average { gradients, comm: &mut self.comm, result: Ok(()) };
        if average.comm.size() > 1 {
            module.visit(&mut average);
        }
        average.result?;
        let gradients = average.gradients;
        self.module = self.module.take().map(|module| self.optimizer.step(self.lr, module, gradients));
        Ok(())
    }
}

/// Takes each gradient out of its tensor, averages it over ranks, and puts it into a new tensor.
struct Average<'a> {
    gradients: GradientsParams,
    comm: &'a mut Communicator,
    result: mgpu::Result<()>,
}

impl ModuleVisitor<Cpu> for Average<'_> {
    fn visit_float<const D: usize>(&mut self, parameter: &Param<Tensor<Cpu, D>>) {
        let Some(gradient) = self.gradients.remove::<NdArray<f32>, D>(parameter.id) else { return };
        let (device, shape) = (gradient.device(), gradient.shape());
        let mut values = gradient.into_data().into_vec::<f32>().expect("gradients of f32 parameters are f32");
        if self.result.is_ok() {
            self.result = self.comm.all_reduce_slice(&mut values, ReduceOp::Avg);
        }
        let average: Tensor<NdArray<f32>, D> = Tensor::from_data(TensorData::new(values, shape), &device);
        self.gradients.register(parameter.id, average);
    }
}
