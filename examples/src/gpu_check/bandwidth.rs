//! Memory bandwidth and matrix products: the lower bound of a training step's time.
//!
//! A figure is the difference between a long and a short series of the same work, each a captured graph, divided by
//! the difference of their lengths. Start-up and end costs cancel out.

use std::fmt;
use std::time::Instant;

use mgpu_kernels::Precision;
use mgpu_kernels::conv::gpu::Conv;
use mgpu_kernels::cuda::{Memory, Options, Result, StepState, Stream};
use mgpu_kernels::optimizer::Factors;
use mgpu_kernels::optimizer::chunk::chunks;
use mgpu_kernels::optimizer::cuda::{Arenas, Plan};
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

pub(super) fn measure(stream: &Stream) -> Result<Vec<Figure>> {
    let device = stream.device();
    let arena = || Memory::zeroed(device, DType::F32, PARAMETERS);
    let (gradients, params, first, second) = (arena()?, arena()?, arena()?, arena()?);
    let copied = time(stream, || stream.copy(gradients.view(), params.view()))?;
    // One read and one write.
    let copy = 8.0 * PARAMETERS as f64 / copied / 1e9;

    let copies = Memory::zeroed(device, DType::Bf16, PARAMETERS)?;
    let optimizer = Optimizer::Adam(Adam::default());
    let state = StepState::after(0).upload(stream)?;
    let plan = Plan { steps_per_epoch: 100, schedule: Schedule::CONSTANT };
    cuda::begin(stream, &optimizer, plan, state.view())?;
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
    let updated = time(stream, || cuda::update(stream, &optimizer, state.view(), table.view(), &arenas))?;
    // Four arenas read, three written, and a copy of half the size.
    let update = 30.0 * PARAMETERS as f64 / updated / 1e9;
    drop((gradients, params, first, second, copies));

    let mut figures = vec![
        Figure { what: "copy", value: copy, unit: "GB/s", share: None },
        Figure { what: "Adam's update", value: update, unit: "GB/s", share: Some(update / copy) },
    ];
    if device.architecture() >= (8, 0) {
        let shape = dense::Shape { inputs: SIDE, outputs: SIDE };
        let matrix = || -> Result<Memory> {
            let matrix = Memory::zeroed(device, DType::Bf16, SIDE * SIDE)?;
            mgpu_kernels::arena::cuda::fill(stream, matrix.view(), 0.37)?;
            Ok(matrix)
        };
        let (x, w, y) = (matrix()?, matrix()?, matrix()?);
        let bias = Memory::zeroed(device, DType::F32, SIDE)?;
        let seconds = time(stream, || {
            let (x, w, b, y) = (x.view(), w.view(), bias.view(), y.view());
            dense::cuda::forward(stream, &shape, SIDE, Precision::Bf16, x, w, b, dense::cuda::LINEAR, y)
        })?;
        let value = 2.0 * (SIDE as f64).powi(3) / seconds / 1e12;
        figures.push(Figure { what: "bf16 product 8192^3, built in", value, unit: "TFLOP/s", share: None });
        let options = Options::default();
        let layer =
            Conv::new(stream, dense::cuda::convolution(&shape), SIDE, Precision::Bf16, 1.0, false, options)?;
        outln!("{}", layer.describe());
        let space = Memory::zeroed(device, DType::F32, layer.workspace_bytes().div_ceil(4))?;
        let seconds = time(stream, || {
            layer.forward(stream, SIDE, x.view(), w.view(), bias.view(), y.view(), space.view())
        })?;
        let value = 2.0 * (SIDE as f64).powi(3) / seconds / 1e12;
        figures.push(Figure {
            what: "bf16 product 8192^3, the fastest",
            value,
            unit: "TFLOP/s",
            share: None,
        });
    }
    Ok(figures)
}
