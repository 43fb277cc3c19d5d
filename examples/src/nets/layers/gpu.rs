//! The interface of forward and backward passes on a GPU.

use mgpu::Result;
use mgpu::device::DeviceDataParallel;
use mgpu_kernels::cuda::{AutotuneOptions, Memory, Stream, View};
use mgpu_kernels::{DType, Precision};

use super::DeviceDropout;

/// An operation on a GPU, with its private memory. Its passes enqueue launches on the model's stream and never block.
pub(in crate::nets) trait OnGpu: Send + Sync {
    /// The memory it needs from the shared workspace.
    fn workspace_needs(&self) -> WorkspaceNeeds {
        WorkspaceNeeds::default()
    }

    /// Allocates what its backward pass needs from the forward pass besides input and output. It exists once for each
    /// batch in flight.
    ///
    /// # Errors
    /// If memory is short.
    fn pass_state(&self, _set_up: &SetUp<'_>) -> Result<Option<Memory>> {
        Ok(None)
    }

    /// Its kernel, if it was chosen among several.
    fn describe(&self) -> Option<String> {
        None
    }

    /// Overwrites `y` with the output. An in-place operation finds its input in `y`.
    ///
    /// # Errors
    /// If a kernel cannot be launched; errors of the communicator.
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

/// The context in which operations are set up.
pub(in crate::nets) struct SetUp<'a> {
    /// Kernels are benchmarked on this stream.
    pub(in crate::nets) stream: &'a Stream,
    pub(in crate::nets) max_batch: usize,
    pub(in crate::nets) precision: Precision,
    pub(in crate::nets) options: AutotuneOptions,
    /// Whether the gradient of the operation's input is needed.
    pub(in crate::nets) input_gradient: bool,
}

impl SetUp<'_> {
    /// Memory for `len` elements of each image of a batch.
    pub(in crate::nets) fn zeroed(&self, dtype: DType, len: usize) -> Result<Memory> {
        Ok(Memory::zeroed(self.stream.device(), dtype, len * self.max_batch)?)
    }
}

/// Elements of each part of the [`SharedWorkspace`] that an operation needs.
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::nets) struct WorkspaceNeeds {
    pub(super) workspace: usize,
    pub(super) sums: usize,
    /// Per image of a batch.
    pub(super) unpooled: usize,
}

/// Memory that all operations use one after the other: they run on one stream.
pub(in crate::nets) struct SharedWorkspace {
    /// Workspace of matrix products, f32.
    pub(super) workspace: Memory,
    /// Sums of normalisations, f64.
    pub(super) sums: Memory,
    /// Unpooled activations of a convolution with fused pooling, and their gradient.
    pub(super) unpooled: Memory,
}

impl SharedWorkspace {
    /// Large enough for each of `needs`.
    pub(in crate::nets) fn new(
        set_up: &SetUp<'_>,
        needs: impl Iterator<Item = WorkspaceNeeds>,
    ) -> Result<Self> {
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

/// The context of a stage's passes.
#[derive(Clone, Copy)]
pub(in crate::nets) struct DeviceStep<'a> {
    /// Images in the batch.
    pub(in crate::nets) images: usize,
    pub(in crate::nets) shared: &'a SharedWorkspace,
    /// What the operation has [allocated](OnGpu::pass_state) for this batch.
    pub(in crate::nets) state: Option<&'a Memory>,
}

impl<'a> DeviceStep<'a> {
    /// The operation's state of this batch, of an operation that has one.
    pub(super) fn state(&self) -> &'a Memory {
        self.state.expect("the operation has allocated its state")
    }
}

/// The kind of forward pass.
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
    /// Gradient of the output; after an in-place backward pass, the gradient of the input.
    pub(in crate::nets) dy: View<'a>,
    /// Gradient of the input, if it is needed.
    pub(in crate::nets) dx: Option<View<'a>>,
}

/// The layout of a tensor: \[outer, channels, plane\] on the CPU, \[outer, plane, channels\] on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::nets) struct Transposed {
    /// The dimension that keeps its place: filters, or outputs.
    pub(in crate::nets) outer: usize,
    pub(in crate::nets) channels: usize,
    /// Positions in a channel.
    pub(in crate::nets) plane: usize,
}
