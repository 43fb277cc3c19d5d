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
use super::cuda;
use super::layer::Layer;
use super::library_layer::Operands;
use super::tuning::TuningBuffers;
use crate::Precision;
use crate::cuda::algorithm::LibraryAlgorithm;
use crate::cuda::autotune::{self, Note, Selection};
use crate::cuda::elements::{aligned, pack};
use crate::cuda::trial::{self, Outcome, Trial};
use crate::cuda::{AutotuneOptions, Error, Libraries, Pass, Result, Stream, View};
use crate::pool;

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
        let layer = Layer { shape, images, precision, slope, library: None };
        let is_used = |pass| input_gradient || pass != Pass::BackwardInput;
        let mut conv = Conv {
            workspace: layer.own_workspace(),
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
        let own_kernels = &cuda::PRODUCTS[precision as usize];
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
        self.workspace
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
        let algorithm = self.selected(images, &operands)?;
        if self.layer.compute(algorithm, stream, images, &operands)? {
            pool::cuda::forward(stream, window, self.layer.shape.filters, raw, y, chosen)
        } else {
            pool::cuda::forward_fused(stream, window, self.layer.slope, bias, raw, y, chosen)
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
        let &Layer { ref shape, precision, .. } = &self.layer;
        autotune::check_batch(images, self.layer.images, workspace, self.workspace);
        cuda::backward_bias(stream, shape, images, precision, dy, workspace, db)
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
        autotune::check_batch(images, self.layer.images, workspace, self.workspace);
        let &Layer { ref shape, precision, slope, .. } = &self.layer;
        cuda::backward_activation(stream, shape, images, precision, slope, y, dy, workspace, db)
    }

    /// Computes a pass with the [selected](Self::selected) algorithm.
    #[track_caller]
    fn run_selected(&self, stream: &Stream, images: usize, operands: &Operands<'_>) -> Result<()> {
        self.layer.run(self.selected(images, operands)?, stream, images, operands)
    }

    /// The library's algorithm, if autotuning selected one, and batch size and alignment are those it was selected
    /// for.
    #[track_caller]
    fn selected(&self, images: usize, operands: &Operands<'_>) -> Result<Option<&LibraryAlgorithm>> {
        autotune::check_batch(images, self.layer.images, operands.workspace, self.workspace);
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
