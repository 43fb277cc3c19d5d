//! Element-wise kernels: activations, whole arenas, digests.

use mgpu_kernels::activation::{self, LEAKY_SLOPE};
use mgpu_kernels::cuda::{Result, StepState};
use mgpu_kernels::{DType, arena, digest};

use super::harness::{Harness, Outcome, Output, Verdict};
use super::values::round_to;

pub(super) fn check(harness: &mut Harness) -> Outcome {
    let mut lengths = vec![1, 7, 64, 1003, 4096];
    if !harness.quick {
        lengths.extend([100_003, 1 << 20]);
        lengths.extend((0..6).map(|_| 1 + harness.random.below(50_000)));
    }
    for skew in [0, 1] {
        harness.skew = skew;
        let outcome = lengths.iter().try_for_each(|len| {
            activations(harness, *len)?;
            arenas(harness, *len)?;
            digests(harness, *len)
        });
        harness.skew = 0;
        outcome?;
    }
    Ok(())
}

/// Random values of a dtype, as f32.
fn random(harness: &mut Harness, dtype: DType, len: usize) -> Vec<f32> {
    let mut values = harness.random.floats(len);
    values.iter_mut().for_each(|value| *value = round_to(dtype, *value));
    // Zeros of both signs, where activation functions have their kink.
    values.iter_mut().step_by(11).for_each(|value| *value *= 0.0);
    values
}

fn rounded(dtype: DType, values: &mut [f32]) {
    values.iter_mut().for_each(|value| *value = round_to(dtype, *value));
}

fn activations(harness: &mut Harness, len: usize) -> Outcome {
    for (dtype, precision) in Harness::types() {
        let slope = [0.0, LEAKY_SLOPE][harness.random.below(2)];
        harness.check("activation forward", len, precision, |harness, verdict| {
            let values = random(harness, dtype, len);
            let found =
                harness.twice(verdict, &[Output::activations(dtype, &values)], |stream, outputs| {
                    activation::cuda::forward(stream, slope, outputs[0])
                })?;
            let mut expected = values;
            activation::cpu::forward(&harness.threads, slope, &mut expected);
            rounded(dtype, &mut expected);
            verdict.same("value", &found.floats(0), &expected);
            Ok(())
        })?;
        harness.check("activation backward", len, precision, |harness, verdict| {
            let (y, dy) = (random(harness, dtype, len), random(harness, dtype, len));
            let y_memory = harness.activations(dtype, &y)?;
            let found = harness.twice(verdict, &[Output::activations(dtype, &dy)], |stream, outputs| {
                activation::cuda::backward(stream, slope, y_memory.view(), outputs[0])
            })?;
            let mut expected = dy;
            activation::cpu::backward(&harness.threads, slope, &y, &mut expected);
            rounded(dtype, &mut expected);
            verdict.same("gradient", &found.floats(0), &expected);
            Ok(())
        })?;
        let channels = [1, 3, 8, 24][harness.random.below(4)];
        harness.check("activation bias", format!("{len}x{channels}"), precision, |harness, verdict| {
            let (values, bias) = (random(harness, dtype, len * channels), harness.random.floats(channels));
            let bias_memory = harness.input(&bias)?;
            let found =
                harness.twice(verdict, &[Output::activations(dtype, &values)], |stream, outputs| {
                    activation::cuda::bias(stream, slope, bias_memory.view(), outputs[0])
                })?;
            let mut expected: Vec<f32> =
                values.iter().zip(bias.iter().cycle()).map(|(value, bias)| value + bias).collect();
            activation::cpu::forward(&harness.threads, slope, &mut expected);
            rounded(dtype, &mut expected);
            verdict.same("value", &found.floats(0), &expected);
            Ok(())
        })?;
    }
    Ok(())
}

fn arenas(harness: &mut Harness, len: usize) -> Outcome {
    for (dtype, precision) in Harness::types() {
        let number = harness.random.floats(1)[0];
        harness.check("arena fill", len, precision, |harness, verdict| {
            let found = harness.twice(verdict, &[Output::of(dtype, len)], |stream, outputs| {
                arena::cuda::fill(stream, outputs[0], number)
            })?;
            let mut expected = vec![number; len];
            rounded(dtype, &mut expected);
            verdict.same("element", &found.floats(0), &expected);
            Ok(())
        })?;
        harness.check("arena scale", len, precision, |harness, verdict| {
            let values = random(harness, dtype, len);
            let found =
                harness.twice(verdict, &[Output::activations(dtype, &values)], |stream, outputs| {
                    arena::cuda::scale(stream, outputs[0], number)
                })?;
            let mut expected = values;
            arena::cpu::scale(&mut expected, number);
            rounded(dtype, &mut expected);
            verdict.same("element", &found.floats(0), &expected);
            Ok(())
        })?;
    }
    harness.check("arena add", len, "f32", |harness, verdict| {
        let [values, others] = [harness.random.floats(len), harness.random.floats(len)];
        let memory = harness.input(&others)?;
        let divisor = [1.0, 3.0][harness.random.below(2)];
        let found = harness.twice(verdict, &[Output::holding(&values)], |stream, outputs| {
            arena::cuda::add(stream, outputs[0], memory.view(), divisor)
        })?;
        let mut expected = values;
        arena::cpu::add(&mut expected, &others, divisor);
        verdict.same("element", &found.floats(0), &expected);
        Ok(())
    })?;
    for (dtype, precision) in Harness::types().into_iter().filter(|(dtype, _)| *dtype != DType::F32) {
        casts(harness, len, dtype, precision)?;
    }
    Ok(())
}

/// Rounding f32 to a narrower type, and back.
fn casts(harness: &mut Harness, len: usize, dtype: DType, precision: &'static str) -> Outcome {
    let from_bits = f32::from_bits;
    // Ties between neighbours, the largest numbers and those next to them, infinities, subnormal numbers and the ties
    // between them, and a NaN whose upper half alone is an infinity.
    let special = match dtype {
        DType::F16 => [
            1.0 + 1.0 / 2048.0,
            1.0 + 3.0 / 2048.0,
            65504.0,
            from_bits(0x477f_efff),
            -65520.0,
            f32::NEG_INFINITY,
            2f32.powi(-14) - 2f32.powi(-25),
            2f32.powi(-24) * 1.5,
            -2f32.powi(-24) * 2.5,
            2f32.powi(-25),
            from_bits(0x3300_0001),
            from_bits(0x7f80_0001),
        ],
        _ => [
            1.0 + 1.0 / 256.0,
            1.0 + 3.0 / 256.0,
            f32::MAX,
            from_bits(0x7f7f_7fff),
            -f32::INFINITY,
            f32::MIN_POSITIVE,
            from_bits(0x0000_8000),
            from_bits(0x0001_8000),
            from_bits(0x0001_8001),
            -0.0,
            from_bits(0xffff_ffff),
            from_bits(0x7f80_0001),
        ],
    };
    harness.check("arena narrow", len, precision, |harness, verdict| {
        let mut values = harness.random.floats(len);
        values.iter_mut().skip(len / 2).zip(special).for_each(|(value, special)| *value = special);
        let memory = harness.input(&values)?;
        let found = harness.twice(verdict, &[Output::of(dtype, len)], |stream, outputs| {
            arena::cuda::narrow(stream, memory.view(), outputs[0])
        })?;
        let expected: Vec<f32> = values.iter().map(|value| round_to(dtype, *value)).collect();
        verdict.same("element", &found.floats(0), &expected);
        Ok(())
    })?;
    harness.check("arena widen", len, precision, |harness, verdict| {
        let mut values = random(harness, dtype, len);
        let special = special.map(|value| round_to(dtype, value));
        values.iter_mut().skip(len / 2).zip(special).for_each(|(value, special)| *value = special);
        let memory = harness.activations(dtype, &values)?;
        let found = harness.twice(verdict, &[Output::of(DType::F32, len)], |stream, outputs| {
            arena::cuda::widen(stream, memory.view(), outputs[0])
        })?;
        verdict.same("element", &found.floats(0), &values);
        Ok(())
    })
}

fn digests(harness: &mut Harness, len: usize) -> Outcome {
    for (dtype, precision) in Harness::types() {
        harness.check("digest non_finite", len, precision, |harness, verdict| {
            let mut values = random(harness, dtype, len);
            for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let at = harness.random.below(len);
                values[at] = value;
            }
            let memory = harness.activations(dtype, &values)?;
            let found = harness.twice(verdict, &[Output::holding(&[5i64])], |stream, outputs| {
                digest::cuda::count_non_finite(stream, memory.view(), outputs[0])
            })?;
            let expected = 5 + digest::cpu::count_non_finite(&harness.threads, &values) as i64;
            verdict.equal("count", &found.values::<i64>(0), &[expected]);
            Ok(())
        })?;
    }
    harness.check("digest find_non_finite", len, "f32", |harness, verdict| find(harness, verdict, len))?;
    harness.check("digest hash", len, "f32", |harness, verdict| {
        let values = random(harness, DType::F32, len);
        let memory = harness.input(&values)?;
        let found = harness.twice(verdict, &[Output::of(DType::I64, 1)], |stream, outputs| {
            digest::cuda::hash(stream, memory.view(), outputs[0])
        })?;
        verdict.equal("hash", &found.values::<i64>(0), &[digest::cpu::hash(&values) as i64]);
        Ok(())
    })
}

/// Two tensors, the second with one non-finite element, searched in 32 steps.
fn find(harness: &mut Harness, verdict: &mut Verdict, len: usize) -> Result<()> {
    const MARK: u64 = 1 << 32;
    let between = harness.random.below(len);
    let mut values = harness.random.floats(len);
    values[between + harness.random.below(len - between)] = f32::NAN;
    let parts = digest::cuda::parts([(0, 0..between), (1, between..len)]);
    let memory = harness.input(&values)?;
    // Tables are always aligned.
    let skew = std::mem::take(&mut harness.skew);
    let table = harness.input(bytemuck::cast_slice::<_, u8>(&parts))?;
    let states: Vec<StepState> = (0..32).map(|step| StepState { step, ..StepState::after(0) }).collect();
    let states = harness.input(bytemuck::cast_slice::<_, u8>(&states))?;
    harness.skew = skew;
    let state = |step: usize| states.view().slice(step * StepState::BYTES..(step + 1) * StepState::BYTES);
    let found = harness.twice(verdict, &[Output::holding(&[0i64; 33])], |stream, outputs| {
        for step in 0..32 {
            let found = outputs[0].slice(step..step + 1);
            digest::cuda::find_non_finite(stream, memory.view(), table.view(), state(step), MARK, found)?;
        }
        let (none, found) = (table.view().slice(0..0), outputs[0].slice(32..33));
        digest::cuda::find_non_finite(stream, memory.view(), none, state(0), MARK, found)
    })?;
    let found = found.values::<i64>(0);
    // Every step checks a small tensor completely, and a part of a large one, so that 32 steps cover each element
    // once.
    let at_least = if len - between > digest::cuda::SMALL { 1 } else { 32 };
    let seen = found.iter().filter(|mark| **mark == MARK as i64 + 1).count();
    verdict.equal("found", &[seen.min(at_least)], &[at_least]);
    verdict.equal("not found", &[found.iter().filter(|mark| **mark == 0).count()], &[33 - seen]);
    Ok(())
}
