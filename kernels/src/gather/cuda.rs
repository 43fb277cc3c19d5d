//! Gathering on a GPU, from a data set in its memory.
//!
//! An order that contains an invalid sample index, or an index beyond its end, is a panic on the CPU. A GPU cannot
//! report it from a kernel: it writes a row of NaN with label 255, which makes the loss NaN.

use crate::DType;
use crate::cuda::elements::{aligned, check, count, grid, pack, run, typed};
use crate::cuda::{Arg, Result, Source, StepState, Stream, View, kernel_source};

/// The kernels.
pub static SOURCE: Source = kernel_source!("gather": "gather.cuh");

/// A data set on a GPU and optionally an order of its samples.
#[derive(Debug, Clone, Copy)]
pub struct Samples<'a> {
    /// Pixels of all samples (u8), one sample after the other.
    pub images: View<'a>,
    /// One label (u8) for each sample.
    pub labels: View<'a>,
    /// Indices of samples, as i32.
    pub order: Option<View<'a>>,
}

/// A batch of a data set, which a [`gather`] copies, or a [first layer](crate::conv::first) reads where it is.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    samples: Samples<'a>,
    place: Place<'a>,
    len: usize,
}

/// Where a batch begins in the order.
#[derive(Debug, Clone, Copy)]
enum Place<'a> {
    Index(u64),
    /// One of several equal parts of the batch at the position in the state: its index, and their number.
    OfStep(View<'a>, (usize, usize)),
}

/// `struct GatheredBatch` of the kernels. All zeros for images that are not gathered.
#[derive(Clone, Copy, bytemuck::NoUninit, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct Parameters {
    images: u64,
    labels: u64,
    order: u64,
    order_len: u64,
    state: u64,
    first: u64,
    samples: u32,
    sample_len: u32,
    size: u32,
    part: u32,
    parts: u32,
    unused: u32,
}

impl<'a> Batch<'a> {
    /// `len` consecutive samples of the order, from index `first` on: for evaluation.
    pub fn range(samples: Samples<'a>, first: u64, len: usize) -> Self {
        Batch { samples, place: Place::Index(first), len }
    }

    /// One of several equal parts of the batch at the position in `state`, with `len` samples. `part` is the index of the
    /// part and the number of parts.
    ///
    /// # Panics
    /// If `state` is not the memory of a [`StepState`], or there is no such part.
    #[track_caller]
    pub fn of_step(samples: Samples<'a>, state: View<'a>, len: usize, (part, parts): (usize, usize)) -> Self {
        StepState::check(state);
        assert!(part < parts, "part {part} of {parts}");
        Batch { samples, place: Place::OfStep(state, (part, parts)), len }
    }

    /// Number of samples.
    #[expect(clippy::len_without_is_empty, reason = "a batch is not a container")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Bytes of a sample.
    pub fn sample_len(&self) -> usize {
        self.samples.images.len() / self.samples.labels.len()
    }

    /// For the kernels; `labels` receives the labels.
    ///
    /// # Panics
    /// If lengths or types do not fit each other.
    #[track_caller]
    pub(crate) fn parameters(&self, labels: View<'_>) -> Parameters {
        let &Batch { samples: Samples { images, labels: all_labels, order }, place, len } = self;
        let (samples, sample_len) = (all_labels.len(), self.sample_len());
        check("the images of a data set", images, DType::U8, samples * sample_len);
        check("the labels of a data set", all_labels, DType::U8, samples);
        check("the labels of a batch", labels, DType::U8, len);
        if let Some(order) = order {
            check("an order of samples", order, DType::I32, order.len());
        }
        let (state, first, (part, parts)) = match place {
            Place::Index(first) => (0, first, (0, 1)),
            Place::OfStep(state, part) => (state.address(), 0, part),
        };
        Parameters {
            images: images.address(),
            labels: all_labels.address(),
            order: order.map_or(0, |order| order.address()),
            order_len: order.map_or(samples, |order| order.len()) as u64,
            state,
            first,
            samples: count(samples),
            sample_len: count(sample_len),
            size: count(len),
            part: count(part),
            parts: count(parts),
            unused: 0,
        }
    }

    /// Bytes that a kernel reads of the data set: a batch is a small part of it.
    pub(crate) fn bytes(&self) -> usize {
        self.len * (self.sample_len() + 1 + size_of::<u32>())
    }
}

/// Overwrites `x` and `labels` with a batch.
///
/// # Errors
/// If the kernel cannot be launched.
///
/// # Panics
/// If lengths or types do not fit.
#[track_caller]
pub fn gather(stream: &Stream, batch: &Batch<'_>, x: View<'_>, labels: View<'_>) -> Result<()> {
    let parameters = batch.parameters(labels);
    check("the inputs of a batch", x, x.dtype(), batch.len() * batch.sample_len());
    count(x.len());
    let pack = pack(x.dtype());
    let wide = batch.sample_len().is_multiple_of(pack) && aligned(pack, &[x, batch.samples.images]);
    let arguments =
        [Arg::of(&parameters).moving(batch.bytes()), x.into(), labels.into(), u32::from(wide).into()];
    let grid = grid(stream, if wide { x.len() / pack } else { x.len() });
    // SAFETY: the lengths are those of the data set and of the batch; the kernel checks each index before it uses it.
    unsafe { run(stream, &SOURCE, &typed("gather", x), grid, &arguments) }
}
