//! A golden run on a GPU.

use std::error::Error;
use std::sync::Arc;

use mgpu::device::{DeviceConfig, DeviceDataParallel};
use mgpu::{Communicator, DeviceCommunicator, Layout};
use mgpu_kernels::cuda::{AutotuneOptions, Stream};

use super::{Args, Golden, GoldenBackend, norm};
use crate::data::Dataset;
use crate::nets::{DeviceData, DeviceNet, Spec};

pub(super) struct Gpu {
    model: DeviceDataParallel,
    net: DeviceNet,
    data: DeviceData,
}

impl Gpu {
    /// `batch` is the batch size of this rank.
    pub(super) fn new(
        golden: &Golden,
        train: &Dataset,
        batch: usize,
        (device, host): (Arc<DeviceCommunicator>, Communicator),
        threads: usize,
        args: &Args,
    ) -> Result<Self, Box<dyn Error>> {
        let set_up = Stream::new(device.device())?;
        let options = AutotuneOptions {
            libraries: args.kernels,
            narrow_gradients: args.narrow_gradients,
            ..AutotuneOptions::default()
        };
        let micro_batches = args.parallel.micro_batches(batch, device.size())?;
        let spec = Spec::named(&golden.net)?;
        let net = DeviceNet::new(&spec, batch / micro_batches, args.precision, options, &set_up)?;
        let parameters = net.to_device(&net.golden_parameters(golden.seed));
        // Every step sets a new sample order, so each step is the first step of an epoch.
        let parallel = args.parallel.config(golden.optimizer(), threads, (device.size(), micro_batches));
        let parallel = parallel.with_loss_scaler(args.loss_scaler());
        let config = DeviceConfig::new(parallel).with_copy_in(args.precision.storage());
        let model = DeviceDataParallel::new(device, host, net.layout().clone(), parameters, config)?;
        let model = model.with_buffers(&net.initial_buffers())?;
        let data = DeviceData::new(model.stream(), &train.images, &train.labels, batch)?;
        Ok(Gpu { model, net, data })
    }

    /// The norms of the tensors of an arena in device order.
    fn norms(&self, values: &[f32]) -> Vec<f64> {
        self.net.layout().tensors().iter().map(|tensor| norm(&values[tensor.range()])).collect()
    }
}

impl GoldenBackend for Gpu {
    fn layout(&self) -> &Layout {
        self.net.host_layout()
    }

    fn comm(&mut self) -> &mut Communicator {
        self.model.comm()
    }

    fn step(&mut self, samples: &[u32]) -> mgpu::Result<f64> {
        let Gpu { model, net, data } = self;
        // The micro-batch that contains the first sample comes last, because the logits of the last micro-batch
        // remain.
        let mut order = samples.to_vec();
        order.rotate_left(samples.len() / model.micro_batches());
        data.set_order(model.stream(), &order)?;
        net.clear_score(model.stream())?;
        net.step(model, data, None)?;
        model.check()?;
        Ok(net.read_score(model.stream())?.loss())
    }

    fn gradient_norms(&mut self) -> mgpu::Result<Vec<f64>> {
        let gradients = self.model.gradients()?;
        Ok(self.norms(&gradients))
    }

    fn parameter_norms(&mut self) -> mgpu::Result<Vec<f64>> {
        let parameters = self.model.parameters()?;
        Ok(self.norms(&parameters))
    }

    fn logits(&mut self) -> mgpu::Result<Vec<f64>> {
        let logits = self.net.logits(self.model.stream(), 1)?;
        Ok(logits.into_iter().map(f64::from).collect())
    }

    fn verify(&mut self) -> mgpu::Result<()> {
        self.model.verify().map(|_| ())
    }
}
