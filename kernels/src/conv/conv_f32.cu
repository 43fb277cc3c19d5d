// Entry points of convolutions in f32 throughout. Included after conv.cuh.

#ifdef MGPU_SHIM
#include "tiles.cuh"
#include "extents.cuh"
#include "results.cuh"
#include "conv.cuh"
#endif

KERNEL_BOUNDS(conv_forward_f32_large, LARGE) FORWARD(f32) {
    forward<f32, PlainProduct, Large, true>(x, w, bias, y, shape, after, sums);
}
KERNEL_BLOCKS(conv_forward_f32_small, SMALL, 5) FORWARD(f32) {
    forward<f32, PlainProduct, Small, true>(x, w, bias, y, shape, after, sums);
}
KERNEL_BOUNDS(conv_forward_f32_scalar, SMALL) FORWARD(f32) {
    forward<f32, PlainProduct, Small, false>(x, w, bias, y, shape, after, sums);
}

KERNEL_BOUNDS(conv_backward_input_f32_large, LARGE) BACKWARD_INPUT(f32) {
    backward_input<f32, PlainProduct, Large, true>(w, dy, dx, shape, before, sums);
}
KERNEL_BLOCKS(conv_backward_input_f32_small, SMALL, 4) BACKWARD_INPUT(f32) {
    backward_input<f32, PlainProduct, Small, true>(w, dy, dx, shape, before, sums);
}
KERNEL_BOUNDS(conv_backward_input_f32_scalar, SMALL) BACKWARD_INPUT(f32) {
    backward_input<f32, PlainProduct, Small, false>(w, dy, dx, shape, before, sums);
}

KERNEL_BOUNDS(conv_backward_weights_f32_large, LARGE) BACKWARD_WEIGHTS(f32) {
    backward_weights<f32, PlainProduct, Large, true>(x, dy, shape, sums);
}
KERNEL_BOUNDS(conv_backward_weights_f32_small, SMALL) BACKWARD_WEIGHTS(f32) {
    backward_weights<f32, PlainProduct, Small, true>(x, dy, shape, sums);
}
KERNEL_BLOCKS(conv_backward_weights_f32_scalar, SMALL, 3) BACKWARD_WEIGHTS(f32) {
    backward_weights<f32, PlainProduct, Small, false>(x, dy, shape, sums);
}
