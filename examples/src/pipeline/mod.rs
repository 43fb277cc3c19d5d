//! Pipeline parallelism: the layers of a network are cut over ranks (`--placement layers`).
//!
//! A rank has one part of the network, a *stage*. Activations are sent to the next stage, their gradients to the one
//! before; [`schedule`] says when. A stage is a [`DataParallel`] of its own tensors, on the communicator of the ranks
//! that have the same stage: with several replicas of the network these average its gradients, and all that a step does
//! besides (accumulation, reduction, update, checks) is as for a whole network. With one replica each of these
//! communicators has one rank. [`device`] does the same on GPUs.
//!
//! The ranks form a grid. With p stages, rank r has stage r mod p of replica ⌊r / p⌋. A replica's ranks are a *row*, those
//! with the same stage a *column*. The stages' arenas, one behind the other, are the arena of the whole network, so
//! checkpoints and checksums are those of any other placement ([`place`]).

mod cuts;
mod device;
mod neighbours;
mod place;
mod schedule;

use mgpu::replicate::replicate;
use mgpu::timeline::{Name, Timeline};
use mgpu::{Communicator, DataParallel, DataParallelConfig, Element, Layout, MicroBatch};
use mgpu_kernels::Storage;
use mgpu_kernels::conv::cpu::ConvPolicy;

use crate::data::{Dataset, IMAGE_LEN};
use crate::nets::{LossReport, Mode, Net, Spec};
use crate::parallel::Grid;
pub(crate) use device::{DeviceStage, DeviceStageConfig};
use place::Arena;
pub(crate) use place::Place;
use schedule::Action;

/// A stage on this rank. Images between layers are stored as `E`.
pub(crate) struct Stage<E> {
    pub(crate) place: Place,
    /// On the column.
    model: DataParallel,
    net: Net<E>,
    /// The [actions](Schedule::until_backward) up to each backward pass.
    actions: Vec<Vec<Action>>,
    timeline: Timeline,
    /// A micro-batch: the images on the first stage, the labels on all.
    images: Vec<f32>,
    labels: Vec<u8>,
    /// The largest number of micro-batches that were between their passes.
    most_in_flight: usize,
}

/// How a network is trained as a pipeline.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PipelineConfig<'a> {
    pub(crate) grid: Grid,
    /// The layers before which the network is cut; empty if rank 0 is to measure the layers.
    pub(crate) cuts: &'a [usize],
    /// Images of a micro-batch.
    pub(crate) micro_batch: usize,
    pub(crate) threads: usize,
    pub(crate) conv: ConvPolicy,
    /// The configuration of each stage, on its column.
    pub(crate) stage: DataParallelConfig,
}

impl<E: Storage + Element> Stage<E> {
    /// Cuts `spec` over the ranks of `comm`. `parameters` returns the initial parameters of a part. Operations are
    /// recorded on `timeline`, and passes too if `record_passes`. Collective.
    pub(crate) fn new(
        comm: &mut Communicator,
        spec: &Spec,
        config: PipelineConfig<'_>,
        parameters: impl FnOnce(&Net<E>) -> Vec<f32>,
        (timeline, record_passes): (&Timeline, bool),
    ) -> mgpu::Result<Self> {
        let PipelineConfig { grid, cuts, micro_batch, threads, conv, stage: column_config } = config;
        let micro_batches = column_config.reducer.micro_batches;
        let ends = cuts::ends::<E>(comm, spec, (cuts, grid.stages as usize), (micro_batch, threads, conv))?;
        let (place, column) = Place::new(comm, spec, grid, ends, micro_batches, timeline)?;
        let schedule = place.schedule;
        let batches = (micro_batch, schedule.in_flight());
        let mut net = Net::part(spec, place.layers(), batches, threads, conv);
        if record_passes {
            net.record_on(timeline);
        }
        let (layout, parameters) = (net.layout().clone(), parameters(&net));
        let model = DataParallel::with_config(timeline.observe(column), layout, parameters, column_config)?;
        let model = model.with_buffers(net.initial_buffers())?;
        Ok(Stage {
            place,
            model,
            actions: (0..micro_batches).map(|index| schedule.until_backward(index)).collect(),
            timeline: timeline.clone(),
            images: vec![0.0; if schedule.is_first() { micro_batch * IMAGE_LEN } else { 0 }],
            labels: vec![0; micro_batch],
            most_in_flight: 0,
            net,
        })
    }

    /// As [`Net::divide_loss_by`].
    pub(crate) fn divide_loss_by(&mut self, images: f64) {
        self.net.divide_loss_by(images);
    }

    /// Makes one step on `samples`. `mode` returns the mode of the micro-batch whose first image is the given one of
    /// `samples`. On the last stage `see_logits` gets the number of each micro-batch and its logits. Returns the losses
    /// on the last stage and on the first; no losses on others.
    ///
    /// # Errors
    /// As [`DataParallel::step_accumulated`].
    pub(crate) fn step(
        &mut self,
        data: &Dataset,
        samples: &[u32],
        mode: impl Fn(usize) -> Mode,
        mut see_logits: impl FnMut(usize, &[f32]),
    ) -> mgpu::Result<LossReport> {
        let Stage { place, model, net, actions, timeline, images, labels, .. } = self;
        let (row, schedule) = (&mut place.row, place.schedule);
        let (stage, in_flight, most) = (row.stage(), schedule.in_flight(), &mut self.most_in_flight);
        let (micro_batch, mut report, mut kept) = (labels.len(), LossReport::default(), 0);
        model.step_accumulated(|batch| {
            let MicroBatch { index, parameters, buffers, gradients } = batch;
            for action in &actions[index] {
                net.select_batch(action.number() % in_flight, action.number());
                match *action {
                    Action::ReceiveActivation(_) => row.receive(net.input(micro_batch), stage - 1)?,
                    Action::Forward(number) => {
                        kept += 1;
                        *most = kept.max(*most);
                        let first = number * micro_batch;
                        let gathering = timeline.begin();
                        let images = load(data, &samples[first..first + micro_batch], images, labels);
                        timeline.end(gathering, Name::new("gather"));
                        net.forward_part(parameters, buffers, images, mode(first), gradients)?;
                        if schedule.is_last() {
                            see_logits(number, net.logits());
                        }
                    }
                    Action::SendActivation(_) => row.send(net.output(), stage + 1)?,
                    Action::ReceiveGradient(_) => row.receive(net.output_gradient(), stage + 1)?,
                    Action::Backward(_) => {
                        if schedule.is_last() {
                            report += net.backward(parameters, labels, gradients)?;
                        } else {
                            net.backward_part(parameters, gradients)?;
                        }
                        kept -= 1;
                    }
                    Action::SendGradient(_) => row.send(net.input_gradient(), stage - 1)?,
                }
            }
            Ok(())
        })?;
        self.place.row.report_to_first(report)
    }

    /// Runs `samples` through all stages, batch by batch, with this stage's current parameters or others. On the last
    /// stage `scored` gets the network with the logits, and the labels. All ranks of a row call it together.
    ///
    /// # Errors
    /// Errors of the communicator.
    pub(crate) fn predict(
        &mut self,
        parameters: Option<&[f32]>,
        data: &Dataset,
        samples: &[u32],
        mut scored: impl FnMut(&Net<E>, &[u8]),
    ) -> mgpu::Result<()> {
        let Stage { place, model, net, images, labels, .. } = self;
        let (row, schedule) = (&mut place.row, place.schedule);
        let stage = row.stage();
        let (parameters, buffers) = (parameters.unwrap_or(model.parameters()), model.buffers());
        net.select_batch(0, 0);
        for samples in samples.chunks(labels.len()) {
            if !schedule.is_first() {
                row.receive(net.input(samples.len()), stage - 1)?;
            }
            let labels = &mut labels[..samples.len()];
            net.predict_part(parameters, buffers, load(data, samples, images, labels));
            if schedule.is_last() {
                scored(net, labels);
            } else {
                row.send(net.output(), stage + 1)?;
            }
        }
        Ok(())
    }

    /// This stage's tensors in training.
    pub(crate) fn model(&mut self) -> &mut DataParallel {
        &mut self.model
    }

    /// This stage's part of the network.
    pub(crate) fn net(&self) -> &Net<E> {
        &self.net
    }

    /// Number of steps made.
    pub(crate) fn steps(&self) -> u64 {
        self.model.steps()
    }

    /// Bytes that this rank has moved between ranks so far, if the backend counts them.
    pub(crate) fn traffic(&mut self) -> Option<u64> {
        Some(self.place.row().traffic()? + self.model.comm().traffic()?)
    }

    /// The checksum of the whole network's parameters, on rank 0; 0 elsewhere. Collective.
    ///
    /// # Errors
    /// Errors of the communicator.
    pub(crate) fn checksum(&mut self) -> mgpu::Result<u64> {
        self.place.checksum(self.model.parameters())
    }

    /// Passes the arenas of the whole network to `keep` on rank 0: parameters, optimizer state and running statistics,
    /// each with its name and layout. Collective.
    ///
    /// # Errors
    /// Errors of the communicator.
    pub(crate) fn gather_arenas(&mut self, keep: impl FnMut(&str, &Layout, Vec<f32>)) -> mgpu::Result<()> {
        let buffers = self.model.buffers().to_vec();
        self.place.gather(self.model.arenas()?, &buffers, keep)
    }

    /// Restores the state after `steps` steps. `read` returns the arena of the whole network of that name and layout;
    /// only rank 0 calls it. Collective.
    ///
    /// # Errors
    /// As `read`, and errors of the communicator.
    pub(crate) fn scatter_arenas(
        &mut self,
        steps: u64,
        read: impl Fn(&str, &Layout) -> mgpu::Result<Vec<f32>>,
    ) -> mgpu::Result<()> {
        let Stage { place, model, net, .. } = self;
        model.restore(steps, |name, _| place.scatter(name, Arena::Parameters, &read))?;
        let mut buffers = place.scatter("buffers", Arena::Buffers, &read)?;
        replicate(model.comm(), net.buffers_layout(), &mut buffers)?;
        model.buffers_mut().copy_from_slice(&buffers);
        Ok(())
    }

    /// The largest number of micro-batches so far that were between their passes.
    pub(crate) fn most_in_flight(&self) -> usize {
        self.most_in_flight
    }
}

/// Reads the labels of `samples`, and their images if there is memory for them: on the first stage.
fn load<'a>(data: &Dataset, samples: &[u32], images: &'a mut [f32], labels: &mut [u8]) -> Option<&'a [f32]> {
    if images.is_empty() {
        for (label, sample) in labels.iter_mut().zip(samples) {
            *label = data.labels[*sample as usize];
        }
        return None;
    }
    let images = &mut images[..samples.len() * IMAGE_LEN];
    data.gather(samples, images, labels);
    Some(images)
}
