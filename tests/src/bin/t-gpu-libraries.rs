//! Sets up layers on GPU 0 and compares every pass with the CPU: `t-gpu-libraries [nondeterministic] [narrow] [large |
//! depths]`. Prints the kernels of each layer; panics at a wrong result. `narrow` permits gradients of weights in bf16
//! for their speed. `large` layers have more than 16,384 results; `depths` are a shallow and a deep convolution.
//!
//! Each layer runs directly, from a captured graph, with a smaller batch, and with unaligned operands.

use std::sync::Arc;

use half::{bf16, f16};
use mgpu_kernels::Precision;
use mgpu_kernels::Scratch;
use mgpu_kernels::conv::cpu::{self, Backward, ConvOptions, ConvPolicy, Epilogue};
use mgpu_kernels::conv::gpu::Conv;
use mgpu_kernels::conv::{self, Padding};
use mgpu_kernels::cuda::{AutotuneOptions, Device, Memory, Result, Stream, View};
use mgpu_kernels::{DType, Threads, activation, dense};

/// The tensors of a layer on the host, rounded to the storage dtype of the precision.
struct Host {
    x: Vec<f32>,
    w: Vec<f32>,
    b: Vec<f32>,
    dy: Vec<f32>,
}

/// The results of the passes.
#[derive(Debug, PartialEq)]
struct Expected {
    y: Vec<f32>,
    dx: Vec<f32>,
    dw: Vec<f32>,
    db: Vec<f32>,
}

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().collect();
    let given = |word: &str| words.iter().any(|given| given == word);
    let deterministic = !given("nondeterministic");
    let narrow_gradients = given("narrow");
    let options = AutotuneOptions { deterministic, narrow_gradients, ..AutotuneOptions::default() };
    let device = Device::open(0)?;
    let stream = Stream::new(&device)?;
    if given("large") {
        return large(&stream, options);
    }
    if given("depths") {
        return depths(&stream, options);
    }
    for precision in Precision::ALL {
        for slope in [0.0, 1.0, activation::LEAKY_SLOPE] {
            let shape = conv::ConvShape {
                padding: if slope == 1.0 { Padding::Valid } else { Padding::Same },
                ..SHAPE
            };
            check(&stream, shape, 4, precision, slope, options)?;
            // Ten classes are not a multiple of any tile size.
            let outputs = if slope == 1.0 { 10 } else { 48 };
            let shape = dense::cuda::convolution(&dense::DenseShape { inputs: 72, outputs });
            check(&stream, shape, 12, precision, slope, options)?;
        }
        let first = conv::ConvShape {
            channels: 1,
            height: 12,
            width: 12,
            filters: 8,
            kernel: 5,
            padding: Padding::Same,
        };
        check(&stream, first, 3, precision, 0.0, options)?;
    }
    Ok(())
}

/// The convolution of most cases.
const SHAPE: conv::ConvShape =
    conv::ConvShape { channels: 8, height: 9, width: 7, filters: 16, kernel: 3, padding: Padding::Same };

/// A convolution of 24,192 results, and a dense layer of 19,200.
fn large(stream: &Stream, options: AutotuneOptions) -> Result<()> {
    for precision in [Precision::F32, Precision::Bf16] {
        check(stream, SHAPE, 24, precision, 1.0, options)?;
        let shape = dense::cuda::convolution(&dense::DenseShape { inputs: 72, outputs: 48 });
        check(stream, shape, 400, precision, 1.0, options)?;
    }
    Ok(())
}

/// Sums of 36 and of 144 products.
fn depths(stream: &Stream, options: AutotuneOptions) -> Result<()> {
    for (channels, precision) in [(4, Precision::F32), (16, Precision::F32), (16, Precision::Bf16)] {
        let shape =
            conv::ConvShape { channels, height: 9, width: 7, filters: 16, kernel: 3, padding: Padding::Same };
        check(stream, shape, 4, precision, 1.0, options)?;
    }
    Ok(())
}

/// Random numbers from -1 to 1, rounded to `precision`'s storage dtype.
fn random(len: usize, seed: u64, precision: Precision) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let value = ((state >> 40) as f32 / (1u64 << 23) as f32) - 1.0;
        match precision {
            Precision::Bf16 => bf16::from_f32(value).to_f32(),
            Precision::F16 => f16::from_f32(value).to_f32(),
            _ => value,
        }
    };
    std::iter::repeat_with(next).take(len).collect()
}

/// Converts `images` times \[channels, pixels\] to \[pixels, channels\], the layout on a GPU.
fn channels_last(values: &[f32], channels: usize, pixels: usize) -> Vec<f32> {
    let turned = |image: &[f32]| -> Vec<f32> {
        (0..channels * pixels).map(|at| image[at % channels * pixels + at / channels]).collect()
    };
    values.chunks(channels * pixels).flat_map(turned).collect()
}

/// Uploads a tensor as `dtype`, after `skip` elements of padding.
fn upload(stream: &Stream, values: &[f32], dtype: DType, skip: usize) -> Result<Memory> {
    let padded = [&vec![0.0; skip], values].concat();
    match dtype {
        DType::Bf16 => {
            let padded: Vec<bf16> = padded.iter().map(|value| bf16::from_f32(*value)).collect();
            Memory::from_slice(stream, &padded)
        }
        DType::F16 => {
            let padded: Vec<f16> = padded.iter().map(|value| f16::from_f32(*value)).collect();
            Memory::from_slice(stream, &padded)
        }
        _ => Memory::from_slice(stream, &padded),
    }
}

fn download(stream: &Stream, view: View<'_>) -> Result<Vec<f32>> {
    match view.dtype() {
        DType::Bf16 => Ok(view.to_vec::<bf16>(stream)?.iter().map(|value| value.to_f32()).collect()),
        DType::F16 => Ok(view.to_vec::<f16>(stream)?.iter().map(|value| value.to_f32()).collect()),
        _ => view.to_vec(stream),
    }
}

#[track_caller]
fn assert_close(what: &str, found: &[f32], expected: &[f32], precision: Precision) {
    let tolerance = match precision {
        Precision::F32 => 1e-5,
        Precision::Tf32 | Precision::F16 => 3e-3,
        Precision::Bf16 => 1e-2,
    };
    let largest = expected.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
    assert_eq!(found.len(), expected.len(), "{what}");
    for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
        let difference = (found - expected).abs();
        assert!(difference <= tolerance * largest, "{what}, element {at}: {found} instead of {expected}");
    }
}

/// Runs all passes, with operands offset by `skip` elements, from a graph if `captured`.
fn run(
    stream: &Stream,
    layer: &Conv,
    images: usize,
    precision: Precision,
    host: &Host,
    skip: usize,
    captured: bool,
) -> Result<Expected> {
    let dtype = precision.storage();
    let device: &Arc<Device> = stream.device();
    let [x, w, dy] = [&host.x, &host.w, &host.dy].map(|values| upload(stream, values, dtype, skip));
    let (x, w, dy, b) = (x?, w?, dy?, upload(stream, &host.b, DType::F32, 0)?);
    let zeroed = |dtype, len: usize| Memory::zeroed(device, dtype, len + skip);
    let (y, dx) = (zeroed(dtype, host.dy.len())?, zeroed(dtype, host.x.len())?);
    let (dw, db) = (zeroed(DType::F32, host.w.len())?, zeroed(DType::F32, host.b.len())?);
    let workspace = Memory::zeroed(device, DType::F32, layer.workspace_bytes().div_ceil(4))?;
    let [x, w, dy, y, dx, dw, db] =
        [&x, &w, &dy, &y, &dx, &dw, &db].map(|memory| memory.slice(skip..memory.len()));
    let (b, workspace) = (b.view(), workspace.view());
    let passes = || -> Result<()> {
        layer.forward(stream, images, x, w, b, y, workspace)?;
        layer.backward_weights(stream, images, x, dy, dw, workspace)?;
        layer.backward_bias(stream, images, dy, db, workspace)?;
        layer.backward_input(stream, images, w, dy, dx, workspace)
    };
    passes()?;
    if captured {
        stream.synchronize()?;
        for view in [y, dx, dw, db] {
            stream.zero(view)?;
        }
        stream.begin_capture()?;
        passes()?;
        let graph = stream.end_capture()?;
        // SAFETY: the memory outlives the downloads below, which wait for the graph.
        unsafe { stream.launch_graph(&graph) }?;
        stream.synchronize()?;
    }
    let [y, dx, dw, db] = [y, dx, dw, db].map(|view| download(stream, view));
    Ok(Expected { y: y?, dx: dx?, dw: dw?, db: db? })
}

fn compare(what: &str, found: &Expected, expected: &Expected, precision: Precision) {
    assert_close(&format!("{what}: y"), &found.y, &expected.y, precision);
    assert_close(&format!("{what}: dx"), &found.dx, &expected.dx, precision);
    assert_close(&format!("{what}: dw"), &found.dw, &expected.dw, precision);
    assert_close(&format!("{what}: db"), &found.db, &expected.db, precision);
}

/// The results of the passes of `images` images on the CPU.
fn on_cpu(shape: conv::ConvShape, images: usize, precision: Precision, slope: f32) -> (Host, Expected) {
    let threads = Threads::new(1);
    let mut scratch = Scratch::new(&threads);
    let x = random(images * shape.input_len(), 1, precision);
    let w = random(shape.weights_len(), 2, precision);
    let b = random(shape.filters, 3, Precision::F32);
    let dy = random(images * shape.output_len(), 4, precision);
    let mut y = vec![0.0; dy.len()];
    let (mut dx, mut dw, mut db) = (vec![0.0; x.len()], vec![0.0; w.len()], vec![0.0; b.len()]);
    // The backward passes start before the activation here.
    let mut layer = cpu::Conv::new(
        shape,
        Epilogue::NONE,
        ConvOptions { policy: ConvPolicy::Direct, ..ConvOptions::default() },
    );
    layer.forward(&threads, &mut scratch, &x, &w, &b, &mut y, &mut []);
    let from = Backward { x: &x, weights: &w, y: &y, chosen: &[], dy: &dy };
    layer.backward(&threads, &mut scratch, from, &mut dw, &mut db, Some(&mut dx));
    activation::cpu::forward(&threads, slope, &mut y);
    let weights = |values: &[f32]| channels_last(values, shape.channels, shape.kernel * shape.kernel);
    let host = Host { x, w: weights(&w), b, dy };
    (host, Expected { y, dx, dw: weights(&dw), db })
}

/// Checks all variants of a layer.
fn check(
    stream: &Stream,
    shape: conv::ConvShape,
    images: usize,
    precision: Precision,
    slope: f32,
    options: AutotuneOptions,
) -> Result<()> {
    let layer = Conv::new(stream, shape, images, precision, slope, true, options)?;
    let what = format!("slope {slope} {}", layer.describe());
    println!("{what}");
    let (host, expected) = on_cpu(shape, images, precision, slope);
    let direct = run(stream, &layer, images, precision, &host, 0, false)?;
    compare(&what, &direct, &expected, precision);
    let captured = run(stream, &layer, images, precision, &host, 0, true)?;
    assert_eq!(direct, captured, "{what}: a graph computes the same");
    let askew = run(stream, &layer, images, precision, &host, 1, false)?;
    compare(&format!("{what}, askew"), &askew, &expected, precision);
    let (host, expected) = on_cpu(shape, images - 1, precision, slope);
    let fewer = run(stream, &layer, images - 1, precision, &host, 0, false)?;
    compare(&format!("{what}, fewer"), &fewer, &expected, precision);
    Ok(())
}
