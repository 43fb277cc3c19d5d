//! Passes over activations, compiled once for each type that activations are stored as.
//!
//! The public passes are generic in their [`Storage`]. Rust compiles a generic function in every crate that calls it, at the
//! optimisation level of that crate, and these functions are the largest of the project: each contains a loop for each
//! instruction set. So a public pass only calls a method of [`Passes`], which has an implementation for each storage type in
//! this crate. The functions behind them end in `_as`.

use half::{bf16, f16};

use crate::conv::cpu::{Backward, Conv};
use crate::dropout::{self, Mask};
use crate::norm::{self, Statistics, Sums};
use crate::pool::{self, PoolShape};
use crate::{DType, Scratch, Storage, Threads, activation, gelu, transpose};

/// Makes the trait and its implementations of a list `method = function(arguments)`.
macro_rules! compiled_once {
    ($($method:ident = $function:path, ($($argument:ident: $type:ty),* $(,)?);)*) => {
        /// The passes of the [module](self).
        #[expect(clippy::too_many_arguments, reason = "each is a part of the pass's contract")]
        pub trait Passes: Sized {
            $(fn $method($($argument: $type),*);)*
        }
        compiled_once!(@for f32: $($method = $function, ($($argument: $type),*);)*);
        compiled_once!(@for bf16: $($method = $function, ($($argument: $type),*);)*);
        compiled_once!(@for f16: $($method = $function, ($($argument: $type),*);)*);
    };
    (@for $storage:ty: $($method:ident = $function:path, ($($argument:ident: $type:ty),*);)*) => {
        impl Passes for $storage {
            $(fn $method($($argument: $type),*) {
                $function($($argument),*);
            })*
        }
    };
}

compiled_once! {
    activation_forward = activation::cpu::forward_as, (threads: &Threads, slope: f32, values: &mut [Self]);
    activation_backward = activation::cpu::backward_as, (
        threads: &Threads, slope: f32, y: &[Self], gradient: &mut [Self],
    );
    gelu_forward = gelu::cpu::forward_as, (threads: &Threads, x: &[Self], y: &mut [Self]);
    gelu_backward = gelu::cpu::backward_as, (threads: &Threads, x: &[Self], gradient: &mut [Self]);
    dropout = dropout::cpu::apply_as, (
        threads: &Threads, probability: f32, mask: &Mask, step: u64, values: &mut [Self],
    );
    norm_sum_inputs = norm::cpu::sum_inputs_as, (threads: &Threads, x: &[Self], sums: &mut Sums);
    norm_normalise = norm::cpu::normalise_as, (
        threads: &Threads, statistics: &Statistics, gamma: &[f32], beta: &[f32], x: &[Self], y: &mut [Self],
    );
    norm_sum_gradients = norm::cpu::sum_gradients_as, (
        threads: &Threads, statistics: &Statistics, x: &[Self], dy: &[Self], sums: &mut Sums,
    );
    norm_backward_input = norm::cpu::backward_input_as, (
        threads: &Threads, statistics: &Statistics, sums: &Sums, gamma: &[f32], x: &[Self], gradient: &mut [Self],
    );
    pool_forward = pool::cpu::forward_as, (
        threads: &Threads, shape: &PoolShape, channels: usize, x: &[Self], y: &mut [Self], chosen: &mut [u8],
    );
    pool_backward = pool::cpu::backward_as, (
        threads: &Threads, shape: &PoolShape, channels: usize, dy: &[Self], chosen: &[u8], dx: &mut [Self],
    );
    conv_forward = Conv::forward_as, (
        conv: &mut Conv, threads: &Threads, scratch: &mut Scratch, x: &[Self], weights: &[f32], bias: &[f32],
        y: &mut [Self], chosen: &mut [u8],
    );
    conv_backward = Conv::backward_as, (
        conv: &mut Conv, threads: &Threads, scratch: &mut Scratch, from: Backward<'_, Self>, dw: &mut [f32],
        db: &mut [f32], dx: Option<&mut [Self]>,
    );
    transpose_f32 = transpose::matrices_as, (
        threads: &Threads, scratch: &mut Scratch, shape: (usize, usize), from: &[f32], to: &mut [Self],
    );
    transpose_bf16 = transpose::matrices_as, (
        threads: &Threads, scratch: &mut Scratch, shape: (usize, usize), from: &[bf16], to: &mut [Self],
    );
    transpose_f16 = transpose::matrices_as, (
        threads: &Threads, scratch: &mut Scratch, shape: (usize, usize), from: &[f16], to: &mut [Self],
    );
}

/// [`transpose::matrices`], by the two types it goes between.
pub(crate) fn transpose<A: Storage, B: Storage>(
    threads: &Threads,
    scratch: &mut Scratch,
    shape: (usize, usize),
    from: &[A],
    to: &mut [B],
) {
    match A::DTYPE {
        DType::Bf16 => B::transpose_bf16(threads, scratch, shape, bytemuck::cast_slice(from), to),
        DType::F16 => B::transpose_f16(threads, scratch, shape, bytemuck::cast_slice(from), to),
        // There are three storage types.
        _ => B::transpose_f32(threads, scratch, shape, bytemuck::cast_slice(from), to),
    }
}
