//! Memory bandwidth and matrix products: the lower bound of a training step's time.
//!
//! A figure is the difference between a long and a short series of the same work, each a captured graph, divided by
//! the difference of their lengths. Start-up and end costs cancel out.

use std::fmt;
use std::time::Instant;

use mgpu_kernels::Precision;
use mgpu_kernels::conv::gpu::Conv;
use mgpu_kernels::cuda::{AutotuneOptions, Counters, Memory, Result, StepState, Stream, View};
use mgpu_kernels::optimizer::Factors;
use mgpu_kernels::optimizer::chunk::chunks;
use mgpu_kernels::optimizer::cuda::{Arenas, UpdatePlan};
use mgpu_kernels::optimizer::{Adam, Optimizer, cuda};
use mgpu_kernels::schedule::Schedule;
use mgpu_kernels::{DType, dense};
use serde::Serialize;

use crate::print::outln;

/// Parameters of the optimizer's arena: four times the size of caches.
const PARAMETERS: usize = 1 << 26;
/// Rows, columns and depth of the product.
const SIDE: usize = 8192;

/// One measurement.
#[derive(Debug, Serialize)]
pub(super) struct Figure {
    what: &'static str,
    value: f64,
    unit: &'static str,
    /// Ratio to the preceding figure, which is its limit.
    share: Option<f64>,
}

impl fmt::Display for Figure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:.0} {}", self.what, self.value, self.unit)?;
        self.share.map_or(Ok(()), |share| write!(f, " ({:.0}% of a copy)", share * 100.0))
    }
}

/// Seconds of one execution of `work`.
fn time(stream: &Stream, work: impl Fn() -> Result<()>) -> Result<f64> {
    const SHORT: u32 = 4;
    const LONG: u32 = 24;
    work()?;
    stream.synchronize()?;
    let series = |times| -> Result<f64> {
        let start = Instant::now();
        stream.repeat(times, &work)?;
        Ok(start.elapsed().as_secs_f64())
    };
    let mut best = [f64::INFINITY; 2];
    for _ in 0..3 {
        for (best, times) in best.iter_mut().zip([SHORT, LONG]) {
            *best = best.min(series(times)?);
        }
    }
    Ok((best[1] - best[0]) / f64::from(LONG - SHORT))
}

/// The rate at which memory is copied, in GB/s.
pub(super) fn copy(stream: &Stream) -> Result<f64> {
    let arena = || Memory::zeroed(stream.device(), DType::F32, PARAMETERS);
    let (from, to) = (arena()?, arena()?);
    let seconds = time(stream, || stream.copy(from.view(), to.view()))?;
    // One read and one write.
    Ok(8.0 * PARAMETERS as f64 / seconds / 1e9)
}

/// The rate at which Adam's update moves memory, in GB/s.
fn update(stream: &Stream) -> Result<f64> {
    let device = stream.device();
    let arena = || Memory::zeroed(device, DType::F32, PARAMETERS);
    let (gradients, params, first, second) = (arena()?, arena()?, arena()?, arena()?);
    let copies = Memory::zeroed(device, DType::Bf16, PARAMETERS)?;
    let optimizer = Optimizer::Adam(Adam::default());
    let state = StepState::after(0).upload(stream)?;
    let plan = UpdatePlan { steps_per_epoch: 100, schedule: Schedule::CONSTANT, loss_scaler: None };
    cuda::begin_step(stream, &optimizer, plan, state.view())?;
    let table =
        Memory::from_slice(stream, bytemuck::cast_slice::<_, u8>(&chunks([(0..PARAMETERS, Factors::ONE)])))?;
    let arenas = Arenas {
        gradients: gradients.view(),
        params: params.view(),
        first: Some(first.view()),
        second: Some(second.view()),
        average: None,
        copy: Some(copies.view()),
    };
    let seconds = time(stream, || cuda::update(stream, &optimizer, state.view(), table.view(), &arenas))?;
    // Four arenas read, three written, and a copy of half the size.
    Ok(30.0 * PARAMETERS as f64 / seconds / 1e9)
}

/// The operands of a large matrix product.
struct Product {
    precision: Precision,
    shape: dense::DenseShape,
    x: Memory,
    w: Memory,
    bias: Memory,
    y: Memory,
}

impl Product {
    fn new(stream: &Stream, precision: Precision) -> Result<Self> {
        let matrix = || -> Result<Memory> {
            let matrix = Memory::zeroed(stream.device(), precision.storage(), SIDE * SIDE)?;
            mgpu_kernels::arena::cuda::fill(stream, matrix.view(), 0.37)?;
            Ok(matrix)
        };
        let bias = Memory::zeroed(stream.device(), DType::F32, SIDE)?;
        let shape = dense::DenseShape { inputs: SIDE, outputs: SIDE };
        Ok(Product { precision, shape, x: matrix()?, w: matrix()?, bias, y: matrix()? })
    }

    /// TFLOP/s of `work`, which gets the operands and the result.
    fn rate(&self, stream: &Stream, work: impl Fn([View<'_>; 4]) -> Result<()>) -> Result<f64> {
        let views = [&self.x, &self.w, &self.bias, &self.y].map(Memory::view);
        let seconds = time(stream, || work(views))?;
        Ok(2.0 * (SIDE as f64).powi(3) / seconds / 1e12)
    }

    fn built_in(&self, stream: &Stream) -> Result<f64> {
        let &Product { precision, ref shape, .. } = self;
        let sums = dense::cuda::workspace_bytes(shape, SIDE, precision) / size_of::<f32>();
        let sums = Memory::zeroed(stream.device(), DType::F32, sums)?;
        let counters = Counters::new(stream.device())?;
        let space = &dense::cuda::Workspace { sums: sums.view(), counters: counters.view(), batch: SIDE };
        self.rate(stream, |[x, w, b, y]| {
            dense::cuda::forward(stream, shape, SIDE, precision, x, w, b, dense::cuda::LINEAR, y, space)
        })
    }

    fn fastest(&self, stream: &Stream) -> Result<f64> {
        let (shape, options) = (dense::cuda::convolution(&self.shape), AutotuneOptions::default());
        let layer = Conv::new(stream, shape, SIDE, self.precision, 1.0, false, options)?;
        outln!("{}", layer.describe());
        let space = Memory::zeroed(stream.device(), DType::F32, layer.workspace_bytes().div_ceil(4))?;
        self.rate(stream, |[x, w, b, y]| layer.forward(stream, SIDE, x, w, b, y, space.view()))
    }
}

/// TFLOP/s of the fastest large matrix product.
pub(super) fn fastest_product(stream: &Stream, precision: Precision) -> Result<f64> {
    Product::new(stream, precision)?.fastest(stream)
}

pub(super) fn measure(stream: &Stream) -> Result<Vec<Figure>> {
    let (copy, update) = (copy(stream)?, update(stream)?);
    let mut figures = vec![
        Figure { what: "copy", value: copy, unit: "GB/s", share: None },
        Figure { what: "Adam's update", value: update, unit: "GB/s", share: Some(update / copy) },
    ];
    if stream.device().architecture() >= (8, 0) {
        let product = Product::new(stream, Precision::Bf16)?;
        let product_of = |what, value| Figure { what, value, unit: "TFLOP/s", share: None };
        figures.push(product_of("bf16 product 8192^3, built in", product.built_in(stream)?));
        figures.push(product_of("bf16 product 8192^3, the fastest", product.fastest(stream)?));
    }
    Ok(figures)
}
