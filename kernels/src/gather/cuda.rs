//! Gathering on a GPU, from a data set in its memory.
//!
//! An order that contains an invalid sample index, or an index beyond its end, is a panic on the CPU. A GPU cannot
//! report it from a kernel: it writes a row of NaN with label 255, which makes the loss NaN.

use crate::DType;
use crate::cuda::elements::{aligned, check, count, grid, pack, run, typed};
use crate::cuda::{Arg, Result, Source, StepState, Stream, View};

/// The kernels.
pub static SOURCE: Source = Source { name: "gather", text: include_str!("gather.cu") };

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

/// `struct GatherSource` of the kernels.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct Parameters {
    images: u64,
    labels: u64,
    order: u64,
    order_len: u64,
    samples: u32,
    sample_len: u32,
}

impl Samples<'_> {
    /// # Panics
    /// If lengths or types do not fit each other, or do not fit a batch of `labels.len()` rows in `x`.
    #[track_caller]
    fn parameters(&self, x: View<'_>, labels: View<'_>) -> Parameters {
        let samples = self.labels.len();
        let sample_len = self.images.len() / samples;
        check("the images of a data set", self.images, DType::U8, samples * sample_len);
        check("the labels of a data set", self.labels, DType::U8, samples);
        check("the labels of a batch", labels, DType::U8, labels.len());
        check("the inputs of a batch", x, x.dtype(), labels.len() * sample_len);
        if let Some(order) = self.order {
            check("an order of samples", order, DType::I32, order.len());
        }
        count(x.len());
        Parameters {
            images: self.images.address(),
            labels: self.labels.address(),
            order: self.order.map_or(0, |order| order.address()),
            order_len: self.order.map_or(samples, |order| order.len()) as u64,
            samples: count(samples),
            sample_len: count(sample_len),
        }
    }

    /// Runs a kernel whose arguments are the data set, `place`, the batch, and `more`.
    fn gather(
        &self,
        stream: &Stream,
        name: &str,
        place: Arg,
        (x, labels): (View<'_>, View<'_>),
        more: &[u32],
    ) -> Result<()> {
        let parameters = self.parameters(x, labels);
        let pack = pack(x.dtype());
        let wide = (parameters.sample_len as usize).is_multiple_of(pack) && aligned(pack, &[x, self.images]);
        // A batch is a small part of the data set.
        let moved = labels.len() * (parameters.sample_len as usize + 1 + size_of::<u32>());
        let arguments: [Arg; 6] = [
            Arg::of(&parameters).moving(moved),
            place,
            x.into(),
            labels.into(),
            count(labels.len()).into(),
            u32::from(wide).into(),
        ];
        let arguments: Vec<Arg> =
            arguments.into_iter().chain(more.iter().map(|more| (*more).into())).collect();
        let grid = grid(stream, if wide { x.len() / pack } else { x.len() });
        // SAFETY: the lengths are those of the data set and of the batch; the kernel checks each index before it uses
        // it.
        unsafe { run(stream, &SOURCE, &typed(name, x), grid, &arguments) }
    }
}

/// Overwrites `x` and `labels` with one of several equal parts of the batch at the position in `state`. `part` is the
/// index of the part and the number of parts.
///
/// # Errors
/// If the kernel cannot be launched.
///
/// # Panics
/// If lengths or types do not fit.
pub fn batch(
    stream: &Stream,
    samples: &Samples<'_>,
    state: View<'_>,
    x: View<'_>,
    labels: View<'_>,
    (part, parts): (usize, usize),
) -> Result<()> {
    StepState::check(state);
    assert!(part < parts, "part {part} of {parts}");
    samples.gather(stream, "gather_batch", state.into(), (x, labels), &[count(part), count(parts)])
}

/// Overwrites `x` and `labels` with consecutive samples of the order, from index `first` on: for evaluation.
///
/// # Errors
/// If the kernel cannot be launched.
///
/// # Panics
/// If lengths or types do not fit.
pub fn range(
    stream: &Stream,
    samples: &Samples<'_>,
    first: u64,
    x: View<'_>,
    labels: View<'_>,
) -> Result<()> {
    samples.gather(stream, "gather_range", first.into(), (x, labels), &[])
}
