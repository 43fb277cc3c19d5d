//! A convolutional or dense layer on a GPU, computed by the fastest kernels available.
//!
//! [`Conv`] is set up once for a layer and a batch size. If NVIDIA's library for the layer is installed, autotuning
//! benchmarks its algorithms against this crate's kernels, pass by pass ([`AutotuneOptions`] says whether it may),
//! and the fastest correct one computes the pass from then on. The library is cuBLASLt for a dense layer (a
//! convolution with a 1×1 kernel on images of one pixel) and cuDNN for any other. Two cases always use this crate's
//! kernels:
//!
//! - images with one channel, on which cuDNN spends most of its time rearranging them;
//! - a batch of another size than the layer was set up for, such as the last of an epoch: the library's algorithms were
//!   selected for one size, and a captured step has no time for autotuning.
//!
//! All calls enqueue work on a stream, allocate nothing, and can be captured after they have run once.

use super::ConvShape;
use super::cuda::{self, After, Before};
use super::first::{self, Images, OutputGradient};
use super::layer::Layer;
use super::library_layer::Operands;
use super::tuning::TuningBuffers;
use crate::Precision;
use crate::cuda::algorithm::LibraryAlgorithm;
use crate::cuda::autotune::{self, Note, Selection};
use crate::cuda::elements::{aligned, pack};
use crate::cuda::trial::{self, Outcome, Trial};
use crate::cuda::{AutotuneOptions, Error, Libraries, Pass, Result, Stream, View};
use crate::pool::{self, PoolShape};
use crate::{activation, dropout};

/// What a workspace is aligned to, in bytes.
const ALIGNMENT: usize = 256;

/// How often autotuning times each candidate.
const ROUNDS: usize = 4;

/// A convolutional or dense layer, set up for one GPU and one batch size.
///
/// Images are \[N, H, W, C\] and weights \[F, K, K, C\], both in the precision's [storage](Precision::storage) type;
/// for a dense layer these are \[N, C\] and \[F, C\]. Bias, the gradients of weights and bias, and the workspace are
/// f32. All layers that run on one stream may share a workspace.
pub struct Conv {
    layer: Layer,
    /// Indexed by [`Pass`]; `None` for a pass that is never called.
    selections: [Option<Selection>; 3],
    /// Bytes that the passes need one after another, and how many follow for this crate's gradient of the input, which
    /// may run beside the others.
    workspace: usize,
    input_workspace: usize,
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
    /// If this crate's own kernels cannot be compiled or run, or compute something wrong for a pass for which there
    /// is no other algorithm. Problems with a library are not errors; they are listed in
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
        let layer = Layer::new(stream, shape, images, precision, slope)?;
        let is_used = |pass| input_gradient || pass != Pass::BackwardInput;
        let mut conv = Conv {
            workspace: layer.own_workspace(),
            input_workspace: if input_gradient { layer.input_workspace() } else { 0 },
            layer,
            selections: Pass::ALL.map(|pass| is_used(pass).then(Selection::builtin)),
            notes: Vec::new(),
        };
        if options.libraries == Libraries::Builtin || !conv.layer.suits_libraries() {
            return Ok(conv);
        }
        if let Err(error) = conv.layer.open_library(stream) {
            conv.notes.push(Note::new(conv.layer.library_name(), error));
        }
        // Allocated by the first pass that is not in the cache.
        let mut buffers = None;
        for pass in Pass::ALL.into_iter().filter(|pass| is_used(*pass)) {
            let selection = conv.select(stream, pass, options, &mut buffers)?;
            conv.workspace = conv.workspace.max(selection.workspace);
            conv.selections[pass as usize] = Some(selection);
        }
        Ok(conv)
    }

    /// The selection for a pass, from the cache or by autotuning.
    fn select(
        &mut self,
        stream: &Stream,
        pass: Pass,
        options: AutotuneOptions,
        buffers: &mut Option<TuningBuffers>,
    ) -> Result<Selection> {
        let layer = &self.layer;
        let Some(library) = &layer.library else { return Ok(Selection::builtin()) };
        let &Layer { shape, images, precision, slope, .. } = layer;
        let AutotuneOptions { deterministic, narrow_gradients, .. } = options;
        let problem =
            format!("layer {shape:?} {images} {precision} {slope} {deterministic} {narrow_gradients}");
        let own_kernels = cuda::source(&shape, precision);
        let key = autotune::key(stream.device(), &library.version(), &problem, own_kernels, pass);
        let mut notes = Vec::new();
        let supported = |algorithm: &LibraryAlgorithm| library.workspace(pass, algorithm);
        let selection = autotune::cached_or_tuned(&key, supported, || {
            let tried = match buffers.take() {
                Some(earlier) => Ok(earlier),
                None => TuningBuffers::new(stream, layer),
            };
            let tried =
                tried.and_then(|new| buffers.insert(new).trials(stream, layer, pass, options, ROUNDS));
            let (trials, refused) = match tried {
                // Only autotuning needs this memory; the layer works without it.
                Err(Error::OutOfMemory { .. }) => {
                    let why = "too little memory to benchmark its algorithms";
                    notes.push(Note::new(layer.library_name(), why));
                    return Ok(None);
                }
                tried => tried?,
            };
            notes.extend(refused);
            notes.extend(trials.iter().filter_map(rejection));
            let found = trial::fastest(&trials);
            let why = || notes.iter().map(Note::to_string).collect::<Vec<_>>().join("; ");
            found.map(Some).ok_or_else(|| self.no_kernel(pass, why()))
        })?;
        Note::collect(&mut self.notes, pass, notes);
        Ok(selection.unwrap_or(Selection::builtin()))
    }

    fn no_kernel(&self, pass: Pass, why: String) -> Error {
        let Layer { precision, .. } = self.layer;
        Error::NoKernel { pass: format!("the {} pass of {}, {precision}", pass.name(), self.layer), why }
    }

    /// Bytes of f32 workspace that the passes need.
    pub fn workspace_bytes(&self) -> usize {
        self.workspace.next_multiple_of(ALIGNMENT) + self.input_workspace
    }

    /// The parts of a workspace: for the passes one after another, and for this crate's gradient of the input.
    #[track_caller]
    fn parts<'a>(&self, workspace: View<'a>) -> [View<'a>; 2] {
        let first = self.workspace.next_multiple_of(ALIGNMENT) / size_of::<f32>();
        let end = first + self.input_workspace / size_of::<f32>();
        [workspace.slice(0..first), workspace.slice(first..end)]
    }

    /// Whether this crate's gradient of the input for whole batches is computed by enough blocks for all multiprocessors
    /// of a GPU. If not, [`backward_parameters`](Self::backward_parameters) may run beside it on another stream.
    pub fn backward_input_fills(&self, multiprocessors: u32) -> bool {
        let &Layer { ref shape, images, precision, .. } = &self.layer;
        cuda::backward_input_fills(shape, images, precision, multiprocessors)
    }

    /// One line for a log: what computes each pass, how long it takes, and why other candidates were rejected.
    pub fn describe(&self) -> String {
        let layer = self.layer.to_string();
        autotune::describe(&layer, self.layer.precision, &self.selections, &self.notes)
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

    /// True if this crate's own kernel computes a pass of whole batches. Such a pass includes the layer's neighbours at
    /// little cost.
    pub fn is_own(&self, pass: Pass) -> bool {
        self.selections[pass as usize].as_ref().is_some_and(|selection| selection.algorithm.is_none())
    }

    /// As [`forward`](Self::forward), with what follows the activation, in one launch if the pass is
    /// [this crate's own](Self::is_own). Otherwise `raw` has room for the output before pooling; its contents are
    /// unspecified afterwards.
    ///
    /// # Errors
    /// If the work cannot be enqueued.
    ///
    /// # Panics
    /// As [`forward`](Self::forward), and if `raw` is missing.
    #[track_caller]
    #[expect(clippy::too_many_arguments, reason = "a pass's operands, one by one")]
    pub fn forward_fused(
        &self,
        stream: &Stream,
        images: usize,
        x: View<'_>,
        weights: View<'_>,
        bias: View<'_>,
        y: View<'_>,
        after: &After<'_>,
        raw: Option<View<'_>>,
        workspace: View<'_>,
    ) -> Result<()> {
        let &Layer { ref shape, precision, slope, .. } = &self.layer;
        let to = raw.unwrap_or(y);
        let operands = Operands::forward(x, weights, bias, to, workspace);
        let Some(algorithm) = self.selected(images, &operands)? else {
            return cuda::forward_fused(
                stream,
                shape,
                images,
                precision,
                [x, weights, bias, y],
                slope,
                after,
                &self.layer.workspace(workspace),
            );
        };
        let activated = self.layer.compute(Some(algorithm), stream, images, &operands)?;
        match after.pool {
            Some((window, chosen)) if activated => {
                pool::cuda::forward(stream, window, shape.filters, to, y, chosen)?;
            }
            Some((window, chosen)) => pool::cuda::forward_fused(stream, window, slope, bias, to, y, chosen)?,
            None if !activated => activation::cuda::bias(stream, slope, bias, y)?,
            None => {}
        }
        after.dropout.map_or(Ok(()), |dropout| dropout::cuda::apply(stream, &dropout, y))
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
        let mut operands = Operands::backward_input(weights, dy, dx, workspace);
        let algorithm = self.selected(images, &operands)?;
        let [shared, of_input] = self.parts(workspace);
        operands.workspace = if algorithm.is_some() { shared } else { of_input };
        self.layer.run(algorithm, stream, images, &operands)
    }

    /// As [`backward_input`](Self::backward_input), through what precedes the layer, in one launch.
    ///
    /// # Errors
    /// If the work cannot be enqueued.
    ///
    /// # Panics
    /// As [`forward`](Self::forward), and if the pass is not [this crate's own](Self::is_own).
    #[track_caller]
    pub fn backward_input_fused(
        &self,
        stream: &Stream,
        images: usize,
        operands: [View<'_>; 3],
        before: &Before<'_>,
        workspace: View<'_>,
    ) -> Result<()> {
        assert!(self.is_own(Pass::BackwardInput), "{self:?}: a library computes the gradient of the input");
        autotune::check_batch(images, self.layer.images, workspace, self.workspace_bytes());
        let &Layer { ref shape, precision, .. } = &self.layer;
        let [_, of_input] = self.parts(workspace);
        let workspace = self.layer.workspace_of_input(of_input);
        cuda::backward_input_fused(stream, shape, images, precision, operands, before, &workspace)
    }

    /// True if [`backward_first`](Self::backward_first) computes the layer's backward pass, with this pooling after it.
    pub fn is_first(&self, pool: Option<&PoolShape>) -> bool {
        first::is_supported(&self.layer.shape, pool)
    }

    /// As [`forward_fused`](Self::forward_fused) of a [first layer](Self::is_first), whose images may be in a data set.
    ///
    /// # Errors
    /// If the work cannot be enqueued.
    ///
    /// # Panics
    /// As [`forward`](Self::forward), unless the layer is a first layer, and if the pass is not
    /// [this crate's own](Self::is_own).
    #[track_caller]
    pub fn forward_first(
        &self,
        stream: &Stream,
        images: usize,
        from: &Images<'_>,
        operands: [View<'_>; 3],
        after: &After<'_>,
    ) -> Result<()> {
        assert!(self.is_own(Pass::Forward), "{self:?}: a library computes the output");
        let &Layer { ref shape, precision, slope, .. } = &self.layer;
        first::forward(stream, shape, images, precision, from, operands, slope, after)
    }

    /// The gradients of weights and bias of a layer that reads images with one channel, from the gradient of its pooled
    /// and activated output, in one launch.
    ///
    /// # Errors
    /// If the work cannot be enqueued.
    ///
    /// # Panics
    /// As [`forward`](Self::forward), and unless the layer [is such a layer](Self::is_first).
    #[track_caller]
    #[expect(clippy::too_many_arguments, reason = "a pass's operands, one by one")]
    pub fn backward_first(
        &self,
        stream: &Stream,
        images: usize,
        from: &Images<'_>,
        gradient: &OutputGradient<'_>,
        dw: View<'_>,
        db: View<'_>,
        workspace: View<'_>,
    ) -> Result<()> {
        autotune::check_batch(images, self.layer.images, workspace, self.workspace_bytes());
        let &Layer { ref shape, precision, .. } = &self.layer;
        let workspace = self.layer.workspace(workspace);
        first::backward(stream, shape, images, precision, from, gradient, &workspace, dw, Some(db))
    }

    /// As [`backward_weights`](Self::backward_weights), and overwrites `db` \[F\], in f32, with the gradient of the
    /// bias: in one launch if the pass is [this crate's own](Self::is_own) and the precision is not TF32, whose rounding
    /// would affect the sums.
    ///
    /// # Errors
    /// If the work cannot be enqueued.
    ///
    /// # Panics
    /// As [`forward`](Self::forward).
    #[track_caller]
    #[expect(clippy::too_many_arguments, reason = "a pass's operands, one by one")]
    pub fn backward_parameters(
        &self,
        stream: &Stream,
        images: usize,
        x: View<'_>,
        dy: View<'_>,
        dw: View<'_>,
        db: View<'_>,
        workspace: View<'_>,
    ) -> Result<()> {
        let operands = Operands::backward_weights(x, dy, dw, workspace);
        let &Layer { ref shape, precision, .. } = &self.layer;
        if precision != Precision::Tf32 && self.selected(images, &operands)?.is_none() {
            let workspace = self.layer.workspace(workspace);
            return cuda::backward_weights(stream, shape, images, precision, x, dy, &workspace, dw, Some(db));
        }
        self.run_selected(stream, images, &operands)?;
        self.backward_bias(stream, images, dy, db, workspace)
    }

    /// Overwrites `dy` with the gradient of the output before activation and pooling, given that of the pooled output
    /// `y`, and `db` \[F\], if it is given, with that of the bias.
    ///
    /// # Errors
    /// If the work cannot be enqueued.
    ///
    /// # Panics
    /// As [`forward`](Self::forward).
    #[track_caller]
    #[expect(clippy::too_many_arguments, reason = "a pass's operands, one by one")]
    pub fn backward_pooled(
        &self,
        stream: &Stream,
        window: &PoolShape,
        y: View<'_>,
        pooled: View<'_>,
        chosen: View<'_>,
        dy: View<'_>,
        db: Option<View<'_>>,
        workspace: View<'_>,
    ) -> Result<()> {
        let &Layer { ref shape, slope, ref counters, .. } = &self.layer;
        let bias = db.map(|total| pool::cuda::BiasGradient { total, workspace, counters: counters.view() });
        let bias = bias.as_ref();
        pool::cuda::backward_fused(stream, window, shape.filters, slope, pooled, y, chosen, dy, bias)
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
        let &Layer { ref shape, precision, .. } = &self.layer;
        autotune::check_batch(images, self.layer.images, workspace, self.workspace_bytes());
        let workspace = self.layer.workspace(workspace);
        cuda::backward_bias(stream, shape, images, precision, dy, &workspace, db)
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
        autotune::check_batch(images, self.layer.images, workspace, self.workspace_bytes());
        let &Layer { ref shape, precision, slope, .. } = &self.layer;
        let workspace = self.layer.workspace(workspace);
        cuda::backward_activation(stream, shape, images, precision, slope, y, dy, &workspace, db)
    }

    /// Computes a pass with the [selected](Self::selected) algorithm.
    #[track_caller]
    fn run_selected(&self, stream: &Stream, images: usize, operands: &Operands<'_>) -> Result<()> {
        let algorithm = self.selected(images, operands)?;
        let [shared, _] = self.parts(operands.workspace);
        let operands = Operands { workspace: shared, ..*operands };
        self.layer.run(algorithm, stream, images, &operands)
    }

    /// The library's algorithm, if autotuning selected one, and batch size and alignment are those it was selected
    /// for.
    #[track_caller]
    fn selected(&self, images: usize, operands: &Operands<'_>) -> Result<Option<&LibraryAlgorithm>> {
        autotune::check_batch(images, self.layer.images, operands.workspace, self.workspace_bytes());
        let mut views = operands.views().into_iter().chain(operands.bias);
        let fits = images == self.layer.images && views.all(|view| aligned(pack(view.dtype()), &[view]));
        let Some(selection) = &self.selections[operands.pass as usize] else { return Ok(None) };
        match &selection.algorithm {
            Some(algorithm) if fits => Ok(Some(algorithm)),
            _ if selection.own_is_wrong => {
                let wanted = self.layer.images;
                let needs = if images == wanted {
                    "operands at multiples of 16 bytes".to_owned()
                } else {
                    format!("batches of {wanted}, not of {images}")
                };
                let why = format!("the built-in kernel's results are wrong, and the other one needs {needs}");
                Err(self.no_kernel(operands.pass, why))
            }
            _ => Ok(None),
        }
    }
}

/// Why a trial was rejected.
fn rejection(trial: &Trial) -> Option<Note> {
    match &trial.outcome {
        Outcome::Rejected(why) => Some(match &trial.algorithm {
            Some(algorithm) => Note::new(algorithm, why),
            None => Note::new("built in", why),
        }),
        _ => None,
    }
}
