//! A convolutional or dense layer on a GPU, computed by the fastest kernels available.
//!
//! [`Conv`] is set up once for a layer and a batch size. If NVIDIA's library for the layer is installed, autotuning
//! benchmarks its algorithms against this crate's kernels, pass by pass ([`AutotuneOptions`] says whether it may),
//! and the fastest one computes the pass from then on. The library is cuBLASLt for a dense layer (a convolution with
//! a 1×1 kernel on images of one pixel) and cuDNN for any other. Two cases always use this crate's kernels:
//!
//! - images with one channel, on which cuDNN spends most of its time rearranging them;
//! - a batch of another size than the layer was set up for, such as the last of an epoch: the library's algorithms were
//!   selected for one size, and a captured step has no time for autotuning.
//!
//! All calls enqueue work on a stream, allocate nothing, and can be captured after they have run once.

use super::library_layer::{LibraryLayer, Operands};
use super::{ConvShape, cublaslt, cuda, cudnn};
use crate::Precision;
use crate::cuda::algorithm::{Form, LibraryAlgorithm, LibraryName};
use crate::cuda::autotune::{self, Note, Pass, Selection, WORKSPACE_LIMIT};
use crate::cuda::elements::{aligned, check, pack};
use crate::cuda::{AutotuneOptions, Error, Libraries, Memory, Result, Stream, View};
use crate::{DType, activation, pool};

/// A convolutional or dense layer, set up for one GPU and one batch size.
///
/// Images are \[N, H, W, C\] and weights \[F, K, K, C\], both in the precision's [storage](Precision::storage) type;
/// for a dense layer these are \[N, C\] and \[F, C\]. Bias, the gradients of weights and bias, and the workspace are
/// f32. All layers that run on one stream may share a workspace.
pub struct Conv {
    shape: ConvShape,
    images: usize,
    precision: Precision,
    slope: f32,
    library: Option<Box<dyn LibraryLayer>>,
    /// Indexed by [`Pass`]; `None` for a pass that is never called.
    selections: [Option<Selection>; 3],
    workspace: usize,
    notes: Vec<Note>,
}

impl std::fmt::Debug for Conv {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Conv").field(&self.describe()).finish()
    }
}

impl Conv {
    /// Sets up a layer for batches of `images` (smaller batches are possible, and slower). Its activation is `v` for
    /// positive values and `slope · v` otherwise: 0 is ReLU, 1 no activation. `input_gradient` says whether
    /// [`backward_input`](Self::backward_input) will be called.
    ///
    /// Autotuning needs memory for a few batches, which is freed before this returns.
    ///
    /// # Errors
    /// If this crate's own kernels cannot be compiled or run. Problems with a library are not errors; they are listed in
    /// [`describe`](Self::describe).
    ///
    /// # Panics
    /// If the kernel does not fit the images.
    pub fn new(
        stream: &Stream,
        shape: ConvShape,
        images: usize,
        precision: Precision,
        slope: f32,
        input_gradient: bool,
        options: AutotuneOptions,
    ) -> Result<Self> {
        shape.check();
        // The maximum over all batch sizes: fewer images are cut into slices in another way.
        let own = (1..=images).map(|images| cuda::workspace_bytes(&shape, images, precision)).max();
        let is_used = |pass| input_gradient || pass != Pass::BackwardInput;
        let mut conv = Conv {
            shape,
            images,
            precision,
            slope,
            library: None,
            selections: Pass::ALL.map(|pass| is_used(pass).then(Selection::builtin)),
            workspace: own.unwrap_or(0),
            notes: Vec::new(),
        };
        let one_channel = shape.channels == 1 && !shape.is_dense();
        if options.libraries == Libraries::Builtin || one_channel || images == 0 {
            return Ok(conv);
        }
        match conv.open_library(stream) {
            Ok(library) => conv.library = Some(library),
            Err(error) => conv.notes.push(Note::new(conv.library_name(), error)),
        }
        // Allocated by the first pass that is not in the cache.
        let mut buffers = None;
        for pass in Pass::ALL.into_iter().filter(|pass| is_used(*pass)) {
            let selection = conv.select(stream, pass, options.deterministic, &mut buffers)?;
            conv.workspace = conv.workspace.max(selection.workspace);
            conv.selections[pass as usize] = Some(selection);
        }
        Ok(conv)
    }

    fn library_name(&self) -> LibraryName {
        if self.shape.is_dense() { LibraryName::CublasLt } else { LibraryName::CuDnn }
    }

    /// Describes the layer to its library.
    fn open_library(&self, stream: &Stream) -> Result<Box<dyn LibraryLayer>> {
        let &Conv { ref shape, images, precision, slope, .. } = self;
        let device = stream.device();
        Ok(match self.library_name() {
            LibraryName::CublasLt => {
                Box::new(cublaslt::MatmulPlan::new(device, shape, images, precision, slope)?)
            }
            LibraryName::CuDnn => Box::new(cudnn::CudnnPlan::new(device, shape, images, precision, slope)?),
        })
    }

    /// The selection for a pass, from the cache or by autotuning.
    fn select(
        &mut self,
        stream: &Stream,
        pass: Pass,
        deterministic: bool,
        buffers: &mut Option<TuningBuffers>,
    ) -> Result<Selection> {
        let Some(library) = &self.library else { return Ok(Selection::builtin()) };
        let &Conv { shape, images, precision, slope, .. } = &*self;
        let problem = format!("layer {shape:?} {images} {precision} {slope} {deterministic}");
        let own_kernels = &cuda::PRODUCTS[precision as usize];
        let key = autotune::key(stream.device(), &library.version(), &problem, own_kernels, pass);
        let mut notes = Vec::new();
        let supported = |algorithm: &LibraryAlgorithm| library.workspace(pass, algorithm);
        let selection = autotune::cached_or_tuned(&key, supported, || {
            if buffers.is_none() {
                match TuningBuffers::new(stream, self) {
                    Ok(new) => *buffers = Some(new),
                    // Only autotuning needs this memory; the layer works without it.
                    Err(Error::OutOfMemory { .. }) => {
                        let why = "too little memory to benchmark its algorithms";
                        notes.push(Note::new(self.library_name(), why));
                        return Ok(None);
                    }
                    Err(error) => return Err(error),
                }
            }
            let Some(buffers) = buffers else { return Ok(None) };
            let operands = buffers.operands(pass);
            let (candidates, refused) = library.candidates(pass, deterministic, operands.workspace.bytes());
            notes.extend(refused);
            buffers.fill(stream)?;
            let run = |algorithm: Option<&LibraryAlgorithm>| self.run(algorithm, stream, images, &operands);
            let outcome =
                autotune::tune(stream, precision, operands.result, operands.bias, candidates, &run)?;
            notes.extend(outcome.rejected);
            Ok(Some(outcome.selection))
        })?;
        Note::collect(&mut self.notes, pass, notes);
        Ok(selection.unwrap_or(Selection::builtin()))
    }

    /// Bytes of f32 workspace that the passes need.
    pub fn workspace_bytes(&self) -> usize {
        self.workspace
    }

    /// One line for a log: what computes each pass, how long it takes, and why other candidates were rejected.
    pub fn describe(&self) -> String {
        let ConvShape { channels, height, width, filters, kernel, .. } = self.shape;
        let layer = if self.shape.is_dense() {
            format!("dense {filters} of {channels}, {} samples", self.images)
        } else {
            format!("conv {filters} {kernel}x{kernel} of {channels}x{height}x{width}, {} images", self.images)
        };
        autotune::describe(&layer, self.precision, &self.selections, &self.notes)
    }

    /// Overwrites `y` \[N, H', W', F\] with the layer's activated output.
    ///
    /// # Errors
    /// If the work cannot be enqueued.
    ///
    /// # Panics
    /// If lengths or types do not fit, or there are more images than the layer was set up for.
    #[track_caller]
    #[expect(clippy::too_many_arguments, reason = "a pass's operands, one by one")]
    pub fn forward(
        &self,
        stream: &Stream,
        images: usize,
        x: View<'_>,
        weights: View<'_>,
        bias: View<'_>,
        y: View<'_>,
        workspace: View<'_>,
    ) -> Result<()> {
        self.run_selected(stream, images, &Operands::forward(x, weights, bias, y, workspace))
    }

    /// As [`forward`](Self::forward), followed by max-pooling: overwrites `y` with the maxima of the activated
    /// output, and `chosen` with their positions in the windows ([`pool::cuda::forward`]). `raw` has room for the
    /// output before pooling; its contents are unspecified afterwards.
    ///
    /// # Errors
    /// If the work cannot be enqueued.
    ///
    /// # Panics
    /// As [`forward`](Self::forward).
    #[track_caller]
    #[expect(clippy::too_many_arguments, reason = "a pass's operands, one by one")]
    pub fn forward_pooled(
        &self,
        stream: &Stream,
        images: usize,
        x: View<'_>,
        weights: View<'_>,
        bias: View<'_>,
        raw: View<'_>,
        window: &pool::PoolShape,
        y: View<'_>,
        chosen: View<'_>,
        workspace: View<'_>,
    ) -> Result<()> {
        let operands = Operands::forward(x, weights, bias, raw, workspace);
        let algorithm = self.selected(images, &operands);
        if self.compute(algorithm, stream, images, &operands)? {
            pool::cuda::forward(stream, window, self.shape.filters, raw, y, chosen)
        } else {
            pool::cuda::forward_fused(stream, window, self.slope, bias, raw, y, chosen)
        }
    }

    /// Overwrites `dx` \[N, H, W, C\] with the gradient of the input, given that of the output before its activation.
    ///
    /// # Errors
    /// If the work cannot be enqueued.
    ///
    /// # Panics
    /// As [`forward`](Self::forward).
    #[track_caller]
    pub fn backward_input(
        &self,
        stream: &Stream,
        images: usize,
        weights: View<'_>,
        dy: View<'_>,
        dx: View<'_>,
        workspace: View<'_>,
    ) -> Result<()> {
        self.run_selected(stream, images, &Operands::backward_input(weights, dy, dx, workspace))
    }

    /// Overwrites `dw` \[F, K, K, C\], in f32, with the gradient of the weights, summed over all images, given that
    /// of the output before its activation.
    ///
    /// # Errors
    /// If the work cannot be enqueued.
    ///
    /// # Panics
    /// As [`forward`](Self::forward).
    #[track_caller]
    pub fn backward_weights(
        &self,
        stream: &Stream,
        images: usize,
        x: View<'_>,
        dy: View<'_>,
        dw: View<'_>,
        workspace: View<'_>,
    ) -> Result<()> {
        self.run_selected(stream, images, &Operands::backward_weights(x, dy, dw, workspace))
    }

    /// Overwrites `db` \[F\], in f32, with the gradient of the bias.
    ///
    /// # Errors
    /// If the work cannot be enqueued.
    ///
    /// # Panics
    /// As [`forward`](Self::forward).
    #[track_caller]
    pub fn backward_bias(
        &self,
        stream: &Stream,
        images: usize,
        dy: View<'_>,
        db: View<'_>,
        workspace: View<'_>,
    ) -> Result<()> {
        autotune::check_batch(images, self.images, workspace, self.workspace);
        cuda::backward_bias(stream, &self.shape, images, self.precision, dy, workspace, db)
    }

    /// Replaces `dy`, the gradient of the activated output `y`, in place by that of the output before its activation, and
    /// overwrites `db` \[F\], in f32, with the gradient of the bias.
    ///
    /// # Errors
    /// If the work cannot be enqueued.
    ///
    /// # Panics
    /// As [`forward`](Self::forward).
    #[track_caller]
    pub fn backward_activation(
        &self,
        stream: &Stream,
        images: usize,
        y: View<'_>,
        dy: View<'_>,
        db: View<'_>,
        workspace: View<'_>,
    ) -> Result<()> {
        autotune::check_batch(images, self.images, workspace, self.workspace);
        let &Conv { ref shape, precision, slope, .. } = self;
        cuda::backward_activation(stream, shape, images, precision, slope, y, dy, workspace, db)
    }

    /// Computes a pass with the [selected](Self::selected) algorithm.
    #[track_caller]
    fn run_selected(&self, stream: &Stream, images: usize, operands: &Operands<'_>) -> Result<()> {
        self.run(self.selected(images, operands), stream, images, operands)
    }

    /// The library's algorithm, if autotuning selected one, and batch size and alignment are those it was selected for.
    #[track_caller]
    fn selected(&self, images: usize, operands: &Operands<'_>) -> Option<&LibraryAlgorithm> {
        autotune::check_batch(images, self.images, operands.workspace, self.workspace);
        let mut views = operands.views().into_iter().chain(operands.bias);
        let fits = images == self.images && views.all(|view| aligned(pack(view.dtype()), &[view]));
        let selection = self.selections[operands.pass as usize].as_ref().filter(|_| fits);
        selection.and_then(|selection| selection.algorithm.as_ref())
    }

    /// Computes a pass with a library's algorithm, or with this crate's kernel if there is none; the forward pass
    /// with bias and activation.
    #[track_caller]
    fn run(
        &self,
        algorithm: Option<&LibraryAlgorithm>,
        stream: &Stream,
        images: usize,
        operands: &Operands<'_>,
    ) -> Result<()> {
        let activated = self.compute(algorithm, stream, images, operands)?;
        match operands.bias {
            Some(bias) if !activated => activation::cuda::bias(stream, self.slope, bias, operands.result),
            _ => Ok(()),
        }
    }

    /// As [`run`](Self::run), but returns false if bias and activation still have to be applied.
    #[track_caller]
    fn compute(
        &self,
        algorithm: Option<&LibraryAlgorithm>,
        stream: &Stream,
        images: usize,
        operands: &Operands<'_>,
    ) -> Result<bool> {
        let &Conv { ref shape, precision, slope, .. } = self;
        let (Some(library), Some(algorithm)) = (&self.library, algorithm) else {
            let Operands { pass, factors: [from, by], result: to, bias, workspace } = *operands;
            match pass {
                Pass::Forward => {
                    let bias = bias.expect("a forward pass has a bias");
                    cuda::forward(stream, shape, images, precision, from, by, bias, slope, to)
                }
                Pass::BackwardInput => cuda::backward_input(stream, shape, images, precision, from, by, to),
                Pass::BackwardWeights => {
                    cuda::backward_weights(stream, shape, images, precision, from, by, workspace, to)
                }
            }?;
            return Ok(true);
        };
        let dtype = precision.storage();
        let x = ("a layer's input or its gradient", dtype, images * shape.input_len());
        let y = ("a layer's output or its gradient", dtype, images * shape.output_len());
        let w = ("a layer's weights", dtype, shape.weights_len());
        let dw = ("the gradient of a layer's weights", DType::F32, shape.weights_len());
        let expected = match operands.pass {
            Pass::Forward => [x, w, y],
            Pass::BackwardInput => [w, y, x],
            Pass::BackwardWeights => [x, y, dw],
        };
        for ((what, dtype, len), view) in expected.into_iter().zip(operands.views()) {
            check(what, view, dtype, len);
        }
        if let Some(bias) = operands.bias {
            check("a layer's bias", bias, DType::F32, shape.filters);
        }
        library.run(stream, algorithm, operands)?;
        Ok(algorithm.form == Form::Fused)
    }
}

/// Operands for autotuning.
struct TuningBuffers {
    x: Memory,
    w: Memory,
    y: Memory,
    bias: Memory,
    dx: Memory,
    dw: Memory,
    workspace: Memory,
}

impl TuningBuffers {
    fn new(stream: &Stream, layer: &Conv) -> Result<Self> {
        let zeroed = |dtype, len| Memory::zeroed(stream.device(), dtype, len);
        let &Conv { ref shape, images, precision, .. } = layer;
        let dtype = precision.storage();
        Ok(TuningBuffers {
            x: zeroed(dtype, images * shape.input_len())?,
            w: zeroed(dtype, shape.weights_len())?,
            y: zeroed(dtype, images * shape.output_len())?,
            bias: zeroed(DType::F32, shape.filters)?,
            dx: zeroed(dtype, images * shape.input_len())?,
            dw: zeroed(DType::F32, shape.weights_len())?,
            workspace: zeroed(DType::F32, layer.workspace.max(WORKSPACE_LIMIT).div_ceil(4))?,
        })
    }

    /// Fills whatever a pass reads with numbers.
    fn fill(&self, stream: &Stream) -> Result<()> {
        for (seed, memory) in [&self.x, &self.w, &self.y, &self.bias].into_iter().enumerate() {
            autotune::fill(stream, memory.view(), seed as u64)?;
        }
        Ok(())
    }

    fn operands(&self, pass: Pass) -> Operands<'_> {
        let TuningBuffers { x, w, y, bias, dx, dw, workspace } = self;
        let [x, w, y, bias, dx, dw, workspace] = [x, w, y, bias, dx, dw, workspace].map(Memory::view);
        match pass {
            Pass::Forward => Operands::forward(x, w, bias, y, workspace),
            Pass::BackwardInput => Operands::backward_input(w, y, dx, workspace),
            Pass::BackwardWeights => Operands::backward_weights(x, y, dw, workspace),
        }
    }
}
