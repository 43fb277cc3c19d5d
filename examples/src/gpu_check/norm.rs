//! Batch normalisation: each step from exact operands, compared with f64.

use mgpu_kernels::DType;
use mgpu_kernels::activation::LEAKY_SLOPE;
use mgpu_kernels::cuda::{Counters, Result};
use mgpu_kernels::norm::cuda::BatchStatistics;
use mgpu_kernels::norm::{EPSILON, MOMENTUM, cuda};

use super::bound;
use super::harness::{Harness, Outcome, Output, Verdict};
use super::shapes::{Images, Shapes, awkward_images};
use super::values::round_to;

pub(super) fn check(harness: &mut Harness) -> Outcome {
    let mut shapes = Vec::new();
    if !harness.quick {
        shapes = Shapes::of_networks(2).norms;
        shapes.push(Images { images: 3, channels: 512, height: 9, width: 9 });
    }
    shapes.extend((0..if harness.quick { 2 } else { 6 }).map(|_| awkward_images(&mut harness.random)));
    shapes.push(Images { images: 2, channels: 24, height: 5, width: 3 });
    shapes.iter().try_for_each(|images| each(harness, images))?;
    harness.skew = 1;
    let outcome = each(harness, &Images { images: 2, channels: 8, height: 4, width: 3 });
    harness.skew = 0;
    outcome
}

fn each(harness: &mut Harness, images: &Images) -> Outcome {
    for (dtype, precision) in Harness::types() {
        harness.check("norm sum_inputs", images, precision, |b, j| sum_inputs(b, j, images, dtype))?;
        harness.check("norm normalise", images, precision, |b, j| normalise(b, j, images, dtype))?;
        harness
            .check("norm normalise_batch", images, precision, |b, j| normalise_batch(b, j, images, dtype))?;
        harness.check("norm sum_gradients", images, precision, |b, j| sum_gradients(b, j, images, dtype))?;
        harness
            .check("norm backward_input", images, precision, |b, j| backward_input(b, j, images, dtype))?;
    }
    harness.check("norm running_statistics", images.channels, "f32", |b, j| running_statistics(b, j, images))
}

/// Activations with a non-zero mean, like those of a layer.
fn activations(harness: &mut Harness, dtype: DType, len: usize) -> Vec<f32> {
    let values = harness.random.floats(len).into_iter().map(|value| value + 0.25);
    values.map(|value| round_to(dtype, value)).collect()
}

/// Means, then inverse standard deviations.
fn statistics(harness: &mut Harness, channels: usize) -> Vec<f32> {
    let mut values = harness.random.floats(2 * channels);
    values[channels..].iter_mut().for_each(|value| *value += 1.5);
    values
}

/// Two sums for each channel, of `terms(channel, element)`, and the sums of their magnitudes.
fn sum_channels(channels: usize, len: usize, terms: impl Fn(usize, usize) -> [f64; 2]) -> [Vec<f64>; 2] {
    let (mut sums, mut sizes) = (vec![0.0; 2 * channels + 1], vec![0.0; 2 * channels + 1]);
    for i in 0..len {
        let c = i % channels;
        for (half, term) in terms(c, i).into_iter().enumerate() {
            sums[half * channels + c] += term;
            sizes[half * channels + c] += term.abs();
        }
    }
    sums[2 * channels] = (len / channels) as f64;
    sizes[2 * channels] = 1.0;
    [sums, sizes]
}

fn sum_inputs(harness: &mut Harness, verdict: &mut Verdict, images: &Images, dtype: DType) -> Result<()> {
    let channels = images.channels;
    let x = activations(harness, dtype, images.len());
    let memory = harness.activations(dtype, &x)?;
    let workspace = workspace(harness, channels)?;
    let counters = Counters::new(harness.stream.device())?;
    let outputs = [Output::of(DType::F64, 2 * channels + 1)];
    let skew = std::mem::take(&mut harness.skew);
    let found = harness.twice(verdict, &outputs, |stream, outputs| {
        cuda::sum_inputs(stream, memory.view(), workspace.view(), counters.view(), outputs[0])
    });
    harness.skew = skew;
    let [sums, sizes] = sum_channels(channels, x.len(), |_, i| {
        let x = f64::from(x[i]);
        [x, x * x]
    });
    let bound = bound::sum_f64(x.len() / channels);
    verdict.close("sum", found?.values::<f64>(0), &sums, |i| sizes[i], bound);
    Ok(())
}

/// Memory for partial sums, filled with NaNs to detect uninitialised reads.
fn workspace(harness: &mut Harness, channels: usize) -> Result<super::harness::Buffer> {
    let skew = std::mem::take(&mut harness.skew);
    let len = cuda::workspace_len(harness.stream.device().multiprocessors(), channels);
    let buffer = harness.input(&vec![f64::NAN; len]);
    harness.skew = skew;
    buffer
}

/// Statistics from sums, and the normalisation by them, which is that by given statistics.
fn normalise_batch(
    harness: &mut Harness,
    verdict: &mut Verdict,
    images: &Images,
    dtype: DType,
) -> Result<()> {
    let (channels, count) = (images.channels, (images.images * images.plane()) as f64);
    let x = activations(harness, dtype, images.len());
    let x_memory = harness.activations(dtype, &x)?;
    let parameters = [harness.random.floats(channels), harness.random.floats(channels)];
    let [gamma, beta] = [harness.input(&parameters[0])?, harness.input(&parameters[1])?];
    let of = harness.random.floats(2 * channels);
    let mut sums: Vec<f64> = of[..channels].iter().map(|mean| f64::from(*mean) * count).collect();
    sums.extend(
        (0..channels).map(|c| (f64::from(of[c]).powi(2) + f64::from(of[channels + c]).abs()) * count),
    );
    sums.push(count);
    let (mean, var) = (harness.random.floats(channels), harness.random.floats(channels));
    let sums_memory = harness.input(&sums)?;
    let outputs = [
        Output::of(DType::F32, 2 * channels),
        Output::holding(&mean),
        Output::holding(&var),
        Output::of(dtype, x.len()),
        Output::of(dtype, x.len()),
    ];
    let found = harness.twice(verdict, &outputs, |stream, outputs| {
        let &[statistics, running_mean, running_var, y, again] = outputs else {
            unreachable!("five outputs")
        };
        let (sums, gamma, beta) = (sums_memory.view(), gamma.view(), beta.view());
        let batch = BatchStatistics { sums, statistics, running_mean, running_var };
        cuda::normalise_batch(stream, &batch, gamma, beta, x_memory.view(), y)?;
        cuda::normalise(stream, statistics, gamma, beta, x_memory.view(), again)
    })?;
    verdict.same("output", &found.floats(3), &found.floats(4));
    let means: Vec<f64> = (0..channels).map(|c| sums[c] / count).collect();
    let vars: Vec<f64> =
        (0..channels).map(|c| (sums[channels + c] / count - means[c] * means[c]).max(0.0)).collect();
    let mut expected = means.clone();
    expected.extend(vars.iter().map(|var| 1.0 / (var + EPSILON).sqrt()));
    let bound = bound::chain(2, DType::F32);
    verdict.close("statistic", found.floats(0), &expected, |i| expected[i].abs(), bound);
    let towards = |running: &[f32], now: &[f64], factor: f64| -> Vec<f64> {
        let pairs = running.iter().zip(now);
        pairs.map(|(running, now)| f64::from(*running) * (1.0 - MOMENTUM) + now * factor * MOMENTUM).collect()
    };
    verdict.close("running mean", found.floats(1), &towards(&mean, &means, 1.0), |_| 1.0, bound);
    let unbiased = count / (count - 1.0).max(1.0);
    verdict.close("running variance", found.floats(2), &towards(&var, &vars, unbiased), |_| 2.0, bound);
    Ok(())
}

fn running_statistics(harness: &mut Harness, verdict: &mut Verdict, images: &Images) -> Result<()> {
    let channels = images.channels;
    let mean = harness.random.floats(channels);
    let var: Vec<f32> = harness.random.floats(channels).iter().map(|value| value.abs()).collect();
    let (mean_memory, var_memory) = (harness.input(&mean)?, harness.input(&var)?);
    let found = harness.twice(verdict, &[Output::of(DType::F32, 2 * channels)], |stream, outputs| {
        cuda::running_statistics(stream, mean_memory.view(), var_memory.view(), outputs[0])
    })?;
    let mut expected: Vec<f64> = mean.iter().map(|mean| f64::from(*mean)).collect();
    expected.extend(var.iter().map(|var| 1.0 / (f64::from(*var) + EPSILON).sqrt()));
    verdict.close(
        "statistic",
        found.floats(0),
        &expected,
        |i| expected[i].abs(),
        bound::chain(2, DType::F32),
    );
    Ok(())
}

fn normalise(harness: &mut Harness, verdict: &mut Verdict, images: &Images, dtype: DType) -> Result<()> {
    let channels = images.channels;
    let x = activations(harness, dtype, images.len());
    let statistics = statistics(harness, channels);
    let (gamma, beta) = (harness.random.floats(channels), harness.random.floats(channels));
    let [x_memory, statistics_memory, gamma_memory, beta_memory] = [
        harness.activations(dtype, &x)?,
        harness.input(&statistics)?,
        harness.input(&gamma)?,
        harness.input(&beta)?,
    ];
    let found = harness.twice(verdict, &[Output::of(dtype, x.len())], |stream, outputs| {
        let (gamma, beta) = (gamma_memory.view(), beta_memory.view());
        cuda::normalise(stream, statistics_memory.view(), gamma, beta, x_memory.view(), outputs[0])
    })?;
    let parts = |i: usize| {
        let c = i % channels;
        let scale = f64::from(gamma[c]) * f64::from(statistics[channels + c]);
        ((f64::from(x[i]) - f64::from(statistics[c])) * scale, f64::from(beta[c]))
    };
    let expected: Vec<f64> = (0..x.len()).map(|i| parts(i).0 + parts(i).1).collect();
    let size = |i| parts(i).0.abs() + parts(i).1.abs();
    verdict.close("output", found.floats(0), &expected, size, bound::chain(4, dtype));
    Ok(())
}

fn sum_gradients(harness: &mut Harness, verdict: &mut Verdict, images: &Images, dtype: DType) -> Result<()> {
    let channels = images.channels;
    let (x, dy) = (activations(harness, dtype, images.len()), activations(harness, dtype, images.len()));
    let statistics = statistics(harness, channels);
    let (x_memory, dy_memory) = (harness.activations(dtype, &x)?, harness.activations(dtype, &dy)?);
    let statistics_memory = harness.input(&statistics)?;
    let workspace = workspace(harness, channels)?;
    let counters = Counters::new(harness.stream.device())?;
    let outputs = [
        Output::of(DType::F64, 2 * channels + 1),
        Output::of(DType::F32, channels),
        Output::of(DType::F32, channels),
    ];
    let skew = std::mem::take(&mut harness.skew);
    let found = harness.twice(verdict, &outputs, |stream, outputs| {
        let (x, dy, space) = (x_memory.view(), dy_memory.view(), workspace.view());
        let [sums, dgamma, dbeta] = [outputs[0], outputs[1], outputs[2]];
        let counters = counters.view();
        cuda::sum_gradients(stream, statistics_memory.view(), x, dy, space, counters, sums, dgamma, dbeta)
    });
    harness.skew = skew;
    let found = found?;
    let [sums, sizes] = sum_channels(channels, x.len(), |c, i| {
        let [mean, inv_std] = [statistics[c], statistics[channels + c]].map(f64::from);
        let (x, dy) = (f64::from(x[i]), f64::from(dy[i]));
        [dy, (x - mean) * inv_std * dy]
    });
    let bound = bound::sum_f64(x.len() / channels);
    verdict.close("sum", found.values::<f64>(0), &sums, |i| sizes[i], bound);
    let narrow = bound::chain(2, DType::F32);
    verdict.close(
        "scale's gradient",
        found.floats(1),
        &sums[channels..2 * channels],
        |i| sizes[channels + i],
        narrow,
    );
    verdict.close("shift's gradient", found.floats(2), &sums[..channels], |i| sizes[i], narrow);
    Ok(())
}

fn backward_input(harness: &mut Harness, verdict: &mut Verdict, images: &Images, dtype: DType) -> Result<()> {
    let channels = images.channels;
    let (x, dy) = (activations(harness, dtype, images.len()), activations(harness, dtype, images.len()));
    let (statistics, gamma) = (statistics(harness, channels), harness.random.floats(channels));
    let count = (images.images * images.plane()) as f64;
    let mut sums: Vec<f64> =
        harness.random.floats(2 * channels).iter().map(|sum| f64::from(*sum) * count).collect();
    sums.push(count);
    let [x_memory, statistics_memory, gamma_memory] =
        [harness.activations(dtype, &x)?, harness.input(&statistics)?, harness.input(&gamma)?];
    let skew = std::mem::take(&mut harness.skew);
    let sums_memory = harness.input(&sums);
    harness.skew = skew;
    let sums_memory = sums_memory?;
    let slope = [1.0, 0.0, LEAKY_SLOPE][harness.random.below(3)];
    let outputs = [Output::activations(dtype, &dy)];
    let found = harness.twice(verdict, &outputs, |stream, outputs| {
        let (sums, gamma, statistics) = (sums_memory.view(), gamma_memory.view(), statistics_memory.view());
        cuda::backward_input(stream, statistics, sums, gamma, x_memory.view(), outputs[0], slope)
    })?;
    let parts = |i: usize| {
        let c = i % channels;
        let [mean, inv_std, gamma] = [statistics[c], statistics[channels + c], gamma[c]].map(f64::from);
        let off = (f64::from(x[i]) - mean) * inv_std * sums[channels + c] / count;
        // The input is the output of an activation.
        let slope = if x[i] > 0.0 { 1.0 } else { f64::from(slope) };
        [f64::from(dy[i]), -sums[c] / count, -off].map(|part| part * gamma * inv_std * slope)
    };
    let expected: Vec<f64> = (0..x.len()).map(|i| parts(i).iter().sum()).collect();
    let size = |i| parts(i).iter().map(|part| part.abs()).sum();
    // Rounded before the activation, and once more behind it.
    let rounded = bound::chain(9, dtype) + bound::kept(dtype);
    verdict.close("gradient", found.floats(0), &expected, size, rounded);
    Ok(())
}
