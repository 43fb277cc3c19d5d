//! A golden run on CPUs as a [pipeline](crate::pipeline).

use std::error::Error;

use mgpu::timeline::Timeline;
use mgpu::{Communicator, Element, Layout, ReduceOp};
use mgpu_kernels::Storage;

use super::{Args, Golden, GoldenBackend, norm};
use crate::data::{CLASSES, Dataset};
use crate::nets::{Mode, Spec};
use crate::parallel::Grid;
use crate::pipeline::{PipelineConfig, Stage};

/// A golden run on CPUs whose layers are cut over ranks; images between layers are stored as `E`.
pub(super) struct Pipeline<'a, E> {
    comm: Communicator,
    stage: Stage<E>,
    train: &'a Dataset,
    /// Logits of the first image of the last batch, on the last stage; 0 elsewhere.
    logits: Vec<f64>,
}

impl<'a, E: Storage + Element> Pipeline<'a, E> {
    /// `batch` is the batch size of each replica of the network.
    pub(super) fn new(
        golden: &Golden,
        train: &'a Dataset,
        (batch, grid): (usize, Grid),
        mut comm: Communicator,
        threads: usize,
        args: &Args,
    ) -> Result<Self, Box<dyn Error>> {
        let micro_batches = args.parallel.micro_batches(batch, grid.replicas)?;
        let config = PipelineConfig {
            grid,
            cuts: args.parallel.cuts(),
            micro_batch: batch / micro_batches,
            threads,
            conv: args.conv,
            stage: args.parallel.config(golden.optimizer(), threads, (grid.replicas, micro_batches)),
        };
        let (spec, seed, timeline) = (Spec::named(&golden.net)?, golden.seed, (&Timeline::off(), false));
        let stage = Stage::new(&mut comm, &spec, config, |net| net.golden_parameters(seed), timeline)?;
        Ok(Pipeline { comm, stage, train, logits: vec![0.0; CLASSES] })
    }

    /// Joins a value for each tensor of this stage into a value for each of the whole network.
    fn of_whole(&mut self, own: &[f64]) -> mgpu::Result<Vec<f64>> {
        let first = self.stage.model().layout().tensors()[0].name.clone();
        let tensors = self.stage.place.layout().tensors();
        let begin = tensors.iter().position(|tensor| tensor.name == first);
        let begin = begin.expect("a tensor of a part is one of the whole network");
        let mut all = vec![0.0; tensors.len()];
        all[begin..begin + own.len()].copy_from_slice(own);
        self.stage.place.row().all_reduce_slice(&mut all, ReduceOp::Sum)?;
        Ok(all)
    }
}

impl<E: Storage + Element> GoldenBackend for Pipeline<'_, E> {
    fn layout(&self) -> &Layout {
        self.stage.place.layout()
    }

    fn comm(&mut self) -> &mut Communicator {
        &mut self.comm
    }

    fn step(&mut self, samples: &[u32]) -> mgpu::Result<f64> {
        let Pipeline { stage, train, logits, .. } = self;
        let report = stage.step(
            train,
            samples,
            |_| Mode::Train { dropout: None },
            |number, found| {
                if number == 0 {
                    logits.clear();
                    logits.extend(found[..CLASSES].iter().copied().map(f64::from));
                }
            },
        )?;
        // The loss is the same on all ranks of a replica, as if each had computed it.
        let mut loss = [if stage.place.is_last() { report.loss() } else { 0.0 }];
        stage.place.row().all_reduce_slice(&mut loss, ReduceOp::Sum)?;
        Ok(loss[0])
    }

    fn gradient_norms(&mut self) -> mgpu::Result<Vec<f64>> {
        let model = self.stage.model();
        let tensors = 0..model.layout().tensors().len();
        let own: Vec<f64> =
            tensors.map(|tensor| Ok(norm(model.gradient(tensor)?))).collect::<mgpu::Result<_>>()?;
        self.of_whole(&own)
    }

    fn parameter_norms(&mut self) -> mgpu::Result<Vec<f64>> {
        let model = self.stage.model();
        let tensors = model.layout().tensors().iter();
        let own: Vec<f64> = tensors.map(|tensor| norm(&model.parameters()[tensor.range()])).collect();
        self.of_whole(&own)
    }

    fn logits(&mut self) -> mgpu::Result<Vec<f64>> {
        self.stage.place.row().all_reduce_slice(&mut self.logits, ReduceOp::Sum)?;
        Ok(self.logits.clone())
    }

    fn verify(&mut self) -> mgpu::Result<()> {
        self.stage.model().verify().map(|_| ())
    }
}
