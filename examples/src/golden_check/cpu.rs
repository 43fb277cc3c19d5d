//! A golden run on the CPU.

use std::error::Error;

use mgpu::{Communicator, DataParallel, Layout, MicroBatch};
use mgpu_kernels::Storage;

use super::{Args, Golden, GoldenBackend, norm};
use crate::data::{Dataset, IMAGE_LEN};
use crate::nets::{LossReport, Mode, Net, Spec};

/// A golden run on the CPU; images between layers are stored as `E`.
pub(super) struct Cpu<'a, E> {
    model: DataParallel,
    net: Net<E>,
    train: &'a Dataset,
    images: Vec<f32>,
    labels: Vec<u8>,
    /// Logits of the first image of the last batch.
    logits: Vec<f32>,
}

impl<'a, E: Storage> Cpu<'a, E> {
    /// `batch` is the batch size of this rank.
    pub(super) fn new(
        golden: &Golden,
        train: &'a Dataset,
        batch: usize,
        comm: Communicator,
        threads: usize,
        args: &Args,
    ) -> Result<Self, Box<dyn Error>> {
        let micro_batches = args.parallel.micro_batches(batch, comm.size())?;
        let batch = batch / micro_batches;
        let net = Net::with_conv_policy(&Spec::named(&golden.net)?, batch, threads, args.conv);
        let parameters = net.golden_parameters(golden.seed);
        let config = args.parallel.config(golden.optimizer(), threads, (comm.size(), micro_batches));
        let config = config.with_loss_scaler(args.loss_scaler());
        let layout = net.layout().clone();
        let model = DataParallel::with_config(comm, layout, parameters, config)?;
        let model = model.with_buffers(net.initial_buffers())?;
        let (images, labels) = (vec![0.0; batch * IMAGE_LEN], vec![0; batch]);
        Ok(Cpu { model, net, train, images, labels, logits: Vec::new() })
    }
}

impl<E: Storage> GoldenBackend for Cpu<'_, E> {
    fn layout(&self) -> &Layout {
        self.net.layout()
    }

    fn comm(&mut self) -> &mut Communicator {
        self.model.comm()
    }

    fn step(&mut self, samples: &[u32]) -> mgpu::Result<f64> {
        let Cpu { model, net, train, images, labels, logits } = self;
        let mut report = LossReport::default();
        net.scale_loss_by(model.loss_scale().map_or(1.0, |scale| scale.scale));
        model.step_accumulated(|batch| {
            let MicroBatch { index, parameters, buffers, gradients } = batch;
            let first = index * labels.len();
            train.gather(&samples[first..first + labels.len()], images, labels);
            net.forward(parameters, buffers, images, Mode::Train { dropout: None }, gradients)?;
            report += net.backward(parameters, labels, gradients)?;
            if index == 0 {
                *logits = net.logits()[..net.classes()].to_vec();
            }
            Ok(())
        })?;
        Ok(report.loss())
    }

    fn gradient_norms(&mut self) -> mgpu::Result<Vec<f64>> {
        let tensors = 0..self.layout().tensors().len();
        tensors.map(|tensor| Ok(norm(self.model.gradient(tensor)?))).collect()
    }

    fn parameter_norms(&mut self) -> mgpu::Result<Vec<f64>> {
        let tensors = self.layout().tensors().iter();
        Ok(tensors.map(|tensor| norm(&self.model.parameters()[tensor.range()])).collect())
    }

    fn logits(&mut self) -> mgpu::Result<Vec<f64>> {
        Ok(self.logits.iter().copied().map(f64::from).collect())
    }

    fn verify(&mut self) -> mgpu::Result<()> {
        self.model.verify().map(|_| ())
    }
}
