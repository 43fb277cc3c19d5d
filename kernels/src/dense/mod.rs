//! Fully connected layers.
//!
//! Contract: `y = x · Wᵀ + b` with input `x` \[N, I\], weights `W` \[O, I\], bias `b` \[O\], output `y` \[N, O\],
//! all row-major. For `dy` = ∂L/∂y the gradients are `dW = dyᵀ · x`, `db[o] = Σ_n dy[n,o]` and `dx = dy · W`.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;

/// The extents of a dense layer, but for the number of samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Features of a sample of the input, I.
    pub inputs: usize,
    /// Features of a sample of the output, O.
    pub outputs: usize,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{assert_close, random};
    use crate::threads::Threads;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn all_four_passes_match_the_definition(
            inputs in 1usize..90, outputs in 1usize..90, samples in 1usize..40, count in 1usize..5,
        ) {
            let threads = Threads::new(count);
            let shape = Shape { inputs, outputs };
            let x = random(samples * inputs, 1);
            let w = random(outputs * inputs, 2);
            let b = random(outputs, 3);
            let dy = random(samples * outputs, 4);
            let mut ey: Vec<f64> = (0..dy.len()).map(|at| f64::from(b[at % outputs])).collect();
            let (mut edw, mut edx, mut edb) = (vec![0.0; w.len()], vec![0.0; x.len()], vec![0.0; outputs]);
            for n in 0..samples {
                for o in 0..outputs {
                    let g = f64::from(dy[n * outputs + o]);
                    edb[o] += g;
                    for i in 0..inputs {
                        let (xi, wi) = (f64::from(x[n * inputs + i]), f64::from(w[o * inputs + i]));
                        ey[n * outputs + o] += xi * wi;
                        edw[o * inputs + i] += g * xi;
                        edx[n * inputs + i] += g * wi;
                    }
                }
            }
            let (mut y, mut dw) = (vec![f32::NAN; dy.len()], vec![f32::NAN; w.len()]);
            let (mut dx, mut db) = (vec![f32::NAN; x.len()], vec![f32::NAN; outputs]);
            cpu::forward(&threads, &shape, &x, &w, &b, &mut y);
            cpu::backward_weights(&threads, &shape, &x, &dy, &mut dw);
            cpu::backward_input(&threads, &shape, &w, &dy, &mut dx);
            cpu::backward_bias(&threads, &shape, &dy, &mut db);
            assert_close(&y, &ey, 1e-5);
            assert_close(&dw, &edw, 1e-5);
            assert_close(&dx, &edx, 1e-5);
            assert_close(&db, &edb, 1e-6);
        }
    }
}
