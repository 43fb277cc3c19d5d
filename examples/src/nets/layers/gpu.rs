//! The passes of an operation on a GPU, and what they have at hand.

use mgpu::Result;
use mgpu::device::DeviceDataParallel;
use mgpu_kernels::cuda::{Memory, Options, Stream, View};
use mgpu_kernels::{DType, Precision};

use super::DeviceDropout;

/// An operation on a GPU, with memory for what it alone needs. Its passes put launches on the model's stream and wait for
/// nothing.
pub(in crate::nets) trait OnGpu: Send + Sync {
    /// Memory that it shares with the other operations.
    fn workspace_needs(&self) -> WorkspaceNeeds {
        WorkspaceNeeds::default()
    }

    /// What computes it, where its kernels were chosen.
    fn describe(&self) -> Option<String> {
        None
    }

    /// Overwrites `y` with the output. An operation in place finds its input there.
    ///
    /// # Errors
    /// If a kernel cannot be launched, and as the communicator's.
    fn forward(
        &self,
        step: DeviceStep<'_>,
        model: &DeviceDataParallel,
        x: View<'_>,
        y: View<'_>,
        pass: DevicePass,
    ) -> Result<()>;

    /// Overwrites the gradients of the input and of parameters, and announces the latter.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    fn backward(
        &self,
        step: DeviceStep<'_>,
        model: &mut DeviceDataParallel,
        tensors: DeviceStageTensors<'_>,
        dropout: Option<DeviceDropout>,
    ) -> Result<()>;
}

/// What operations are set up for.
pub(in crate::nets) struct SetUp<'a> {
    /// Kernels are raced here.
    pub(in crate::nets) stream: &'a Stream,
    pub(in crate::nets) max_batch: usize,
    pub(in crate::nets) precision: Precision,
    pub(in crate::nets) options: Options,
    /// Whether the gradient of the operation's input is asked for.
    pub(in crate::nets) input_gradient: bool,
}

impl SetUp<'_> {
    /// Memory for `len` elements of each image of a batch.
    pub(in crate::nets) fn zeroed(&self, dtype: DType, len: usize) -> Result<Memory> {
        Ok(Memory::zeroed(self.stream.device(), dtype, len * self.max_batch)?)
    }
}

/// Elements of each part of [`SharedWorkspace`] that an operation needs.
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::nets) struct WorkspaceNeeds {
    pub(super) workspace: usize,
    pub(super) sums: usize,
    /// For each image of a batch.
    pub(super) unpooled: usize,
}

/// Memory that operations use in turn: they run on one stream.
pub(in crate::nets) struct SharedWorkspace {
    /// For what products need besides, f32.
    pub(super) workspace: Memory,
    /// For sums of normalisations, f64.
    pub(super) sums: Memory,
    /// Activations that a convolution pools, and their gradient.
    pub(super) unpooled: Memory,
}

impl SharedWorkspace {
    /// Enough for each of `needs`.
    pub(in crate::nets) fn new(set_up: &SetUp<'_>, needs: impl Iterator<Item = WorkspaceNeeds>) -> Result<Self> {
        let most = needs.fold(WorkspaceNeeds::default(), |most, one| WorkspaceNeeds {
            workspace: most.workspace.max(one.workspace),
            sums: most.sums.max(one.sums),
            unpooled: most.unpooled.max(one.unpooled),
        });
        let device = set_up.stream.device();
        Ok(SharedWorkspace {
            workspace: Memory::zeroed(device, DType::F32, most.workspace)?,
            sums: Memory::zeroed(device, DType::F64, most.sums)?,
            unpooled: set_up.zeroed(set_up.precision.storage(), most.unpooled)?,
        })
    }
}

/// What the passes of a stage have at hand.
#[derive(Clone, Copy)]
pub(in crate::nets) struct DeviceStep<'a> {
    /// Images in the batch.
    pub(in crate::nets) images: usize,
    pub(in crate::nets) shared: &'a SharedWorkspace,
}

/// What a forward pass is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::nets) enum DevicePass {
    Train(Option<DeviceDropout>),
    Eval,
}

/// Input and output of a stage, and their gradients.
#[derive(Clone, Copy)]
pub(in crate::nets) struct DeviceStageTensors<'a> {
    pub(in crate::nets) x: View<'a>,
    pub(in crate::nets) y: View<'a>,
    /// Gradient of the output; where the backward pass works in place, afterwards that of the input.
    pub(in crate::nets) dy: View<'a>,
    /// Gradient of the input, if it is asked for.
    pub(in crate::nets) dx: Option<View<'a>>,
}

/// The order of a tensor's elements: \[outer, channels, plane\] on the CPU, \[outer, plane, channels\] on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::nets) struct Transposed {
    /// Parts that keep their order: filters, or outputs.
    pub(in crate::nets) outer: usize,
    pub(in crate::nets) channels: usize,
    /// Positions of a channel.
    pub(in crate::nets) plane: usize,
}
