// Entry points of convolutions of f32 with operands rounded to TF32. Included after conv.cuh.

#ifdef MGPU_SHIM
#include "tiles.cuh"
#include "extents.cuh"
#include "results.cuh"
#include "conv.cuh"
#endif

KERNEL_BOUNDS(conv_forward_tf32_large, LARGE) FORWARD(f32) {
    forward<f32, TENSOR, Large, true>(x, w, bias, y, shape, after, sums);
}
KERNEL_BOUNDS(conv_forward_tf32_small, SMALL) FORWARD(f32) {
    forward<f32, TENSOR, Small, true>(x, w, bias, y, shape, after, sums);
}
KERNEL_BOUNDS(conv_forward_tf32_scalar, SMALL) FORWARD(f32) {
    forward<f32, TENSOR, Small, false>(x, w, bias, y, shape, after, sums);
}

KERNEL_BOUNDS(conv_backward_input_tf32_large, LARGE) BACKWARD_INPUT(f32) {
    backward_input<f32, TENSOR, Large, true>(w, dy, dx, shape, before, sums);
}
KERNEL_BOUNDS(conv_backward_input_tf32_small, SMALL) BACKWARD_INPUT(f32) {
    backward_input<f32, TENSOR, Small, true>(w, dy, dx, shape, before, sums);
}
KERNEL_BLOCKS(conv_backward_input_tf32_scalar, SMALL, 5) BACKWARD_INPUT(f32) {
    backward_input<f32, TENSOR, Small, false>(w, dy, dx, shape, before, sums);
}

KERNEL_BOUNDS(conv_backward_weights_tf32_large, LARGE) BACKWARD_WEIGHTS(f32) {
    backward_weights<f32, TENSOR, Large, true>(x, dy, shape, sums);
}
KERNEL_BOUNDS(conv_backward_weights_tf32_small, SMALL) BACKWARD_WEIGHTS(f32) {
    backward_weights<f32, TENSOR, Small, true>(x, dy, shape, sums);
}
KERNEL_BOUNDS(conv_backward_weights_tf32_scalar, SMALL) BACKWARD_WEIGHTS(f32) {
    backward_weights<f32, TENSOR, Small, false>(x, dy, shape, sums);
}
