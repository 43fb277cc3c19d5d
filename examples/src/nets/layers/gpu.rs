//! The interface of forward and backward passes on a GPU.

use std::sync::Arc;

use mgpu::Result;
use mgpu::device::DeviceDataParallel;
use mgpu_kernels::cuda::{AutotuneOptions, Device, Event, Memory, Stream, View};
use mgpu_kernels::gather::cuda::{Batch, Samples};
use mgpu_kernels::{DType, Precision};

use super::dropout::DropoutOp;
use super::{DeviceDropout, PoolOp};

/// An operation on a GPU, with its private memory. Its passes enqueue launches on the model's stream and never block.
pub(in crate::nets) trait OnGpu: Send + Sync {
    /// The memory it needs from the shared workspace.
    fn workspace_needs(&self, _neighbours: &Neighbourhood) -> WorkspaceNeeds {
        WorkspaceNeeds::default()
    }

    /// How its backward pass ends, if the backward pass of the following stage can include that.
    fn backward_end(&self) -> Option<BackwardEnd> {
        None
    }

    /// Whether its backward pass can include the end of the backward pass before it, perhaps behind dropout.
    fn includes_end(&self, _end: &BackwardEnd, _dropout: bool) -> bool {
        false
    }

    /// Whether its backward pass can include the dropout before it, and its forward pass the dropout behind it.
    fn includes_dropout(&self) -> [bool; 2] {
        [false; 2]
    }

    /// The dropout that it is.
    fn as_dropout(&self) -> Option<DropoutOp> {
        None
    }

    /// Allocates what its backward pass needs from the forward pass besides input and output. It exists once for each
    /// batch in flight.
    ///
    /// # Errors
    /// If memory is short.
    fn pass_state(&self, _set_up: &SetUp<'_>) -> Result<Option<Memory>> {
        Ok(None)
    }

    /// Whether its passes can read the images of a batch from the data set.
    fn reads_data_set(&self) -> bool {
        false
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

/// The end of the backward pass of a convolution or dense layer: from the gradient of its output to that before its
/// activation. It computes each element by itself, and no sums: the gradient of the bias always belongs to the layer. So
/// a layer has the same bits whether another stage's pass includes its end or, where a network is cut over ranks, there
/// is no such stage.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::nets) struct BackwardEnd {
    /// That of the activation for negative values; 1 without one.
    pub(super) slope: f32,
    /// Pooling after the activation.
    pub(super) pool: Option<PoolOp>,
    /// Elements of an image before pooling.
    pub(in crate::nets) len: usize,
}

/// What the passes of a stage include of its neighbours' passes.
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::nets) struct Neighbourhood {
    /// Dropout behind the stage, in its forward pass.
    pub(super) dropout_behind: Option<DropoutOp>,
    /// Dropout before the stage, in its backward pass.
    pub(super) dropout_before: Option<DropoutOp>,
    /// The end of the backward pass of the stage before (before the dropout), in this stage's, and that stage's index.
    pub(in crate::nets) end_before: Option<(usize, BackwardEnd)>,
    /// Another stage's backward pass includes the end of this stage's: the gradient is that before the activation.
    pub(in crate::nets) is_ended: bool,
    /// Other stages' forward and backward passes include this stage's, which is dropout.
    pub(super) is_included: [bool; 2],
}

impl Neighbourhood {
    /// Those of all stages. The gradient of the input of `stages` from `first` on is needed.
    pub(in crate::nets) fn of_stages(stages: &[Box<dyn OnGpu>], first: usize) -> Vec<Self> {
        let mut all = vec![Neighbourhood::default(); stages.len()];
        for index in 1..stages.len() {
            if let Some(dropout) = stages[index].as_dropout()
                && stages[index - 1].includes_dropout()[1]
            {
                all[index - 1].dropout_behind = Some(dropout);
                all[index].is_included[0] = true;
            }
            if index < first {
                continue;
            }
            let stage = &stages[index];
            let dropout = stages[index - 1].as_dropout();
            if dropout.is_some() && stage.includes_dropout()[0] {
                all[index].dropout_before = dropout;
                all[index - 1].is_included[1] = true;
            }
            let before = index.checked_sub(if dropout.is_some() { 2 } else { 1 });
            let Some(before) = before.filter(|_| all[index].dropout_before.is_some() || dropout.is_none())
            else {
                continue;
            };
            let end = stages[before].backward_end();
            if let Some(end) = end.filter(|end| stage.includes_end(end, dropout.is_some())) {
                all[index].end_before = Some((before, end));
                all[before].is_ended = true;
            }
        }
        all
    }
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

/// A second stream, for a pass beside another one of the same stage.
pub(in crate::nets) struct SideStream {
    stream: Stream,
    forked: Event,
    joined: Event,
}

impl SideStream {
    fn new(device: &Arc<Device>) -> Result<Self> {
        let (forked, joined) = (Event::new(device)?, Event::new(device)?);
        Ok(SideStream { stream: Stream::new(device)?, forked, joined })
    }

    /// The stream, whose work waits for that of `main` so far.
    pub(super) fn fork(&self, main: &Stream) -> Result<&Stream> {
        main.record(&self.forked)?;
        self.stream.wait_for(&self.forked)?;
        Ok(&self.stream)
    }

    /// Makes `main` wait for the stream.
    pub(super) fn join(&self, main: &Stream) -> Result<()> {
        self.stream.record(&self.joined)?;
        Ok(main.wait_for(&self.joined)?)
    }
}

/// Memory that all operations use one after the other, and a stream beside theirs.
pub(in crate::nets) struct SharedWorkspace {
    /// Workspace of matrix products, f32.
    pub(super) workspace: Memory,
    /// Sums of normalisations, f64.
    pub(super) sums: Memory,
    /// Unpooled activations of a convolution with fused pooling, and their gradient.
    pub(super) unpooled: Memory,
    pub(super) side: SideStream,
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
            side: SideStream::new(device)?,
        })
    }
}

/// A batch of a data set.
#[derive(Clone, Copy)]
pub(in crate::nets) struct DataBatch<'a> {
    pub(in crate::nets) samples: Samples<'a>,
    pub(in crate::nets) place: BatchPlace,
    /// Receives the label of each image.
    pub(in crate::nets) labels: View<'a>,
}

/// Which images of a data set are a batch.
#[derive(Debug, Clone, Copy)]
pub(in crate::nets) enum BatchPlace {
    /// Those of the order from this index on.
    Index(usize),
    /// One of several equal parts of the step's batch: its index, and their number.
    OfStep(usize, usize),
}

impl DataBatch<'_> {
    /// For kernels, in the current step of `model`.
    pub(in crate::nets) fn on_step<'a>(&'a self, model: &'a DeviceDataParallel) -> Batch<'a> {
        let images = self.labels.len();
        match self.place {
            BatchPlace::Index(first) => Batch::range(self.samples, first as u64, images),
            BatchPlace::OfStep(part, parts) => {
                Batch::of_step(self.samples, model.state(), images, (part, parts))
            }
        }
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
    pub(in crate::nets) neighbours: &'a Neighbourhood,
    /// The state of the stage whose [end](Neighbourhood::end_before) the backward pass includes.
    pub(in crate::nets) state_before: Option<&'a Memory>,
    /// The batch that the stage [reads from the data set](OnGpu::reads_data_set), instead of its input in memory.
    pub(in crate::nets) batch: Option<&'a DataBatch<'a>>,
}

impl<'a> DeviceStep<'a> {
    /// The operation's state of this batch, of an operation that has one.
    pub(super) fn state(&self) -> &'a Memory {
        self.state.expect("the operation has allocated its state")
    }

    /// The state of the operation before, of one that has a state.
    pub(super) fn state_before(&self) -> &'a Memory {
        self.state_before.expect("the operation before has allocated its state")
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
