//! Fully connected layers.
//!
//! Contract: `y = x · Wᵀ + b` with input `x` \[N, I\], weights `W` \[O, I\], bias `b` \[O\], output `y` \[N, O\],
//! all row-major. For `dy` = ∂L/∂y the gradients are `dW = dyᵀ · x`, `db[o] = Σ_n dy[n,o]` and `dx = dy · W`.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod tiles;

/// The extents of a dense layer, except for the number of samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DenseShape {
    /// Features of a sample of the input, I.
    pub inputs: usize,
    /// Features of a sample of the output, O.
    pub outputs: usize,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{assert_close, narrow, random, widen};
    use crate::threads::Threads;
    use crate::tile_engine::Engine;
    use proptest::prelude::*;

    /// The results of a layer by the definition, in f64.
    struct Expected {
        y: Vec<f64>,
        dw: Vec<f64>,
        db: Vec<f64>,
        dx: Vec<f64>,
    }

    /// `signs` has the signs of the result that the backward pass is given.
    fn reference(shape: DenseShape, slope: f32, [x, w, b, dy, signs]: [&[f32]; 5]) -> Expected {
        let DenseShape { inputs, outputs } = shape;
        let mut y: Vec<f64> = (0..dy.len()).map(|at| f64::from(b[at % outputs])).collect();
        let (mut dw, mut db, mut dx) = (vec![0.0; w.len()], vec![0.0; outputs], vec![0.0; x.len()]);
        for (at, y) in y.iter_mut().enumerate() {
            let (n, o) = (at / outputs, at % outputs);
            let gradient = f64::from(dy[at]) * if signs[at] > 0.0 { 1.0 } else { f64::from(slope) };
            db[o] += gradient;
            for i in 0..inputs {
                let (xi, wi) = (f64::from(x[n * inputs + i]), f64::from(w[o * inputs + i]));
                *y += xi * wi;
                dw[o * inputs + i] += gradient * xi;
                dx[n * inputs + i] += gradient * wi;
            }
            if *y <= 0.0 {
                *y *= f64::from(slope);
            }
        }
        Expected { y, dw, db, dx }
    }

    /// Runs two layers in turn, so that scratch memory has other contents, and compares with the definition and with
    /// each other. For an engine all operands are bf16 numbers; so the slope has to be a power of two, or zero.
    fn check(
        shape: DenseShape,
        samples: usize,
        counts: &[usize],
        slope: Option<f32>,
        engine: Option<Engine>,
        off: f64,
    ) {
        let DenseShape { inputs, outputs } = shape;
        let operand = |len, stream| {
            let values = random(len, stream);
            if engine.is_some() { widen(&narrow(&values)) } else { values }
        };
        let (x, w) = (operand(samples * inputs, 1), operand(outputs * inputs, 2));
        let (b, dy) = (random(outputs, 3), operand(samples * outputs, 4));
        let mut first = None;
        for &count in counts {
            let threads = Threads::new(count);
            let mut scratch = crate::Scratch::new(&threads);
            let mut layer = cpu::Dense::new(shape, slope).with_engine(engine);
            for _ in 0..2 {
                let mut y = vec![f32::NAN; dy.len()];
                layer.forward(&threads, &mut scratch, &x, &w, &b, &mut y);
                let result = y.clone();
                // As dropout changes a result before the backward pass.
                y.iter_mut().for_each(|y| *y *= 2.0);
                let (mut dw, mut db) = (vec![f32::NAN; w.len()], vec![f32::NAN; outputs]);
                let (mut dx, mut same) = (vec![f32::NAN; x.len()], vec![f32::NAN; w.len()]);
                let from = cpu::Backward { x: &x, weights: &w, y: &y, dy: &dy };
                layer.backward(&threads, &mut scratch, from, &mut same, &mut db, None);
                layer.backward(&threads, &mut scratch, from, &mut dw, &mut db, Some(&mut dx));
                assert_eq!(dw, same);
                let results = (result, dw, db, dx);
                let Some(first) = &first else {
                    let expected = reference(shape, slope.unwrap_or(1.0), [&x, &w, &b, &dy, &y]);
                    assert_close(&results.0, &expected.y, off);
                    assert_close(&results.1, &expected.dw, off);
                    assert_close(&results.2, &expected.db, 1e-6);
                    assert_close(&results.3, &expected.dx, off);
                    first = Some(results);
                    continue;
                };
                assert!(*first == results, "the bits differ with {count} threads or in another step");
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn all_passes_match_the_definition_on_any_number_of_threads(
            inputs in 1usize..90, outputs in 1usize..90, samples in 0usize..70,
            slope in prop::option::of(0.0f32..0.5),
        ) {
            check(DenseShape { inputs, outputs }, samples, &[1, 2, 3], slope, None, 1e-5);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn engines_match_the_definition_on_any_number_of_threads(
            inputs in 1usize..150, outputs in 1usize..90, samples in 0usize..70,
            slope in prop::sample::select(vec![None, Some(0.0), Some(0.25)]),
        ) {
            for engine in Engine::available() {
                check(DenseShape { inputs, outputs }, samples, &[1, 3], slope, Some(engine), 1e-5);
            }
        }
    }

    #[test]
    fn large_layers_are_divided_among_threads() {
        for (inputs, outputs, samples) in [(700, 300, 60), (1100, 40, 150), (513, 600, 33), (40, 30, 700)] {
            check(DenseShape { inputs, outputs }, samples, &[1, 2, 3], Some(0.1), None, 5e-5);
        }
    }

    /// More than one block of the depth in each pass.
    #[test]
    fn large_layers_of_engines_are_divided_among_threads() {
        for engine in Engine::available() {
            for (inputs, outputs, samples) in [(1100, 40, 50), (300, 700, 33)] {
                check(DenseShape { inputs, outputs }, samples, &[1, 2, 3], Some(0.5), Some(engine), 5e-5);
            }
        }
    }

    /// Numbers that are not bf16 are rounded to nearest even before they are multiplied.
    #[test]
    fn engines_round_operands_and_nothing_else() {
        let (shape, samples) = (DenseShape { inputs: 70, outputs: 50 }, 40);
        let threads = Threads::new(2);
        let run = |engine, x: &[f32], w: &[f32]| {
            let mut y = vec![f32::NAN; samples * shape.outputs];
            let mut layer = cpu::Dense::new(shape, None).with_engine(Some(engine));
            let bias = random(shape.outputs, 3);
            layer.forward(&threads, &mut crate::Scratch::new(&threads), x, w, &bias, &mut y);
            y
        };
        let (x, w) = (random(samples * shape.inputs, 1), random(shape.outputs * shape.inputs, 2));
        for engine in Engine::available() {
            let rounded = run(engine, &widen(&narrow(&x)), &widen(&narrow(&w)));
            assert_eq!(run(engine, &x, &w), rounded, "{engine}");
        }
    }
}
