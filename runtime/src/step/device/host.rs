//! The optimizer on the host: [`Placement::Host`](crate::Placement::Host).
//!
//! The parameters and the optimizer's state are those of a [`DataParallel`] on the host. The GPU computes gradients
//! and accumulates them over micro-batches. At the end of a step the host reads them, bucket by bucket, while later
//! buckets are still being copied, and hands them in as the gradients of its own model. So the reduction over ranks,
//! the checks, the clipping and the update are those of the CPU, with all of its options. Then the new parameters are
//! uploaded in stream order.
//!
//! A captured step ends with the gradients: the host does its part after each replay.

use std::sync::Arc;

use mgpu_kernels::cuda::{Device, StepState};

use super::super::config::DataParallelConfig;
use super::super::{DataParallel, NamedArena};
use super::DeviceDataParallel;
use super::device_bucket::DeviceBucket;
use super::graph::{Readback, Upload};
use crate::comm::Communicator;
use crate::optimizer::LossScale;
use crate::{Error, Layout, Result};

/// What a model on a GPU has on the host.
pub(super) enum HostSide {
    /// The communicator to set up and verify.
    Communicator(Communicator),
    /// The parameters and the optimizer.
    Model(Box<HostModel>),
}

impl HostSide {
    /// The communicator for host buffers.
    pub(super) fn comm(&mut self) -> &mut Communicator {
        match self {
            HostSide::Communicator(comm) => comm,
            HostSide::Model(host) => host.model.comm(),
        }
    }

    /// The model on the host, if the host updates the parameters.
    pub(super) fn model(&self) -> Option<&DataParallel> {
        match self {
            HostSide::Communicator(_) => None,
            HostSide::Model(host) => Some(&host.model),
        }
    }

    /// As [`model`](Self::model), mutable.
    pub(super) fn model_mut(&mut self) -> Option<&mut DataParallel> {
        match self {
            HostSide::Communicator(_) => None,
            HostSide::Model(host) => Some(&mut host.model),
        }
    }

    /// Notes whether this rank has data for the next step.
    pub(super) fn begin_step(&mut self, has_data: bool) {
        if let HostSide::Model(host) = self {
            host.has_data = has_data;
        }
    }
}

/// The parameters and the optimizer on the host, and the way to and from the GPU.
pub(super) struct HostModel {
    model: DataParallel,
    /// Whether this rank has data for the current step.
    has_data: bool,
    /// The gradients of each bucket of the device.
    gradients: Vec<Readback>,
    parameters: Upload,
    loss_scale: Upload,
}

impl HostModel {
    /// As [`DataParallel::with_config`]. Collective.
    pub(super) fn new(
        comm: Communicator,
        (layout, parameters): (&Layout, Vec<f32>),
        config: DataParallelConfig,
        (device, buckets): (&Arc<Device>, &[DeviceBucket]),
    ) -> Result<Self> {
        if comm.size() > 1 && !comm.capabilities().shares_memory {
            let problem = "placement host needs a communicator over host memory: create it with \
                           `World::host_memory_communicator`"
                .to_owned();
            return Err(Error::InvalidArgument { operation: "data parallel", problem });
        }
        // The device accumulates micro-batches.
        let config = config.with_micro_batches(1);
        let readback =
            |bucket: &DeviceBucket| Readback::new(device, size_of::<f32>() * bucket.elements.len());
        Ok(HostModel {
            gradients: buckets.iter().map(readback).collect::<Result<_>>()?,
            parameters: Upload::new(device, size_of::<f32>() * layout.len())?,
            loss_scale: Upload::new(device, StepState::LOSS_SCALE.len())?,
            model: DataParallel::with_config(comm, layout.clone(), parameters, config)?,
            has_data: true,
        })
    }

    /// The parameters.
    pub(super) fn parameters(&self) -> &[f32] {
        self.model.parameters()
    }
}

impl DeviceDataParallel {
    /// Whether the host updates the parameters.
    pub(super) fn is_updated_on_host(&self) -> bool {
        matches!(self.host, HostSide::Model(_))
    }

    /// Makes the host's part of a step, after the gradients that are enqueued. Collective.
    pub(super) fn update_on_host(&mut self) -> Result<()> {
        let Self { host: HostSide::Model(host), comm, buckets, gradients, layout, compute, .. } = self else {
            return Ok(());
        };
        let HostModel { model, has_data, gradients: readbacks, .. } = &mut **host;
        if *has_data {
            for (bucket, readback) in buckets.iter().zip(readbacks.iter_mut()) {
                readback.enqueue(compute, gradients.slice(bucket.elements.clone()))?;
            }
        }
        model.make_step(*has_data, |batch| {
            for (bucket, readback) in buckets.iter().zip(readbacks.iter_mut()) {
                let values: &[f32] = bytemuck::cast_slice(readback.wait(comm)?);
                for tensor in bucket.plan.tensors.clone().rev() {
                    let range = layout.range(tensor);
                    let from = range.start - bucket.elements.start;
                    batch.gradients.write(tensor, &values[from..from + range.len()])?;
                }
            }
            Ok(())
        })?;
        self.upload_from_host()
    }

    /// Enqueues a copy of the host's parameters to the GPU, and of the next step's loss scale.
    pub(super) fn upload_from_host(&mut self) -> Result<()> {
        let Self { host: HostSide::Model(host), comm, compute, parameters, layout, state, .. } = self else {
            return Ok(());
        };
        let HostModel { model, parameters: upload, loss_scale, .. } = &mut **host;
        upload.enqueue(comm, compute, model.parameters(), parameters.slice(0..layout.len()))?;
        if let Some(LossScale { scale, .. }) = model.loss_scale() {
            loss_scale.enqueue(comm, compute, &[scale], state.slice(StepState::LOSS_SCALE))?;
        }
        self.refresh_copy()
    }
}

/// Copies of a model's arenas.
pub(super) fn owned(arenas: Vec<NamedArena<'_>>) -> Vec<NamedArena<'static>> {
    arenas.into_iter().map(|(name, values)| (name, values.into_owned().into())).collect()
}
