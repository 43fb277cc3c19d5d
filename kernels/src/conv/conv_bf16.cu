// Entry points of convolutions of bfloat16 with sums in f32. Included after conv.cuh.

#ifdef MGPU_SHIM
#include "tiles.cuh"
#include "groups.cuh"
#include "extents.cuh"
#include "results.cuh"
#include "conv.cuh"
#endif

KERNEL_BOUNDS(conv_forward_bf16_small, SMALL_AHEAD) FORWARD(bf16) {
    forward<bf16, TENSOR, Small, true>(x, w, bias, y, shape, after, sums);
}
KERNEL_BOUNDS(conv_forward_bf16_narrow, NARROW) FORWARD(bf16) {
    forward<bf16, TENSOR, Small, true, NARROW_UNITS>(x, w, bias, y, shape, after, sums);
}
KERNEL_BOUNDS(conv_forward_bf16_even, NARROW) FORWARD(bf16) {
    forward<bf16, TENSOR, Small, true, EVEN_UNITS>(x, w, bias, y, shape, after, sums);
}
KERNEL_BOUNDS(conv_forward_bf16_scalar, SCALAR) FORWARD(bf16) {
    forward<bf16, TENSOR, Small, false>(x, w, bias, y, shape, after, sums);
}

KERNEL_BOUNDS(conv_backward_input_bf16_small, SMALL_AHEAD) BACKWARD_INPUT(bf16) {
    backward_input<bf16, TENSOR, Small, true>(w, dy, dx, shape, before, sums);
}
KERNEL_BOUNDS(conv_backward_input_bf16_narrow, NARROW) BACKWARD_INPUT(bf16) {
    backward_input<bf16, TENSOR, Small, true, NARROW_UNITS>(w, dy, dx, shape, before, sums);
}
KERNEL_BOUNDS(conv_backward_input_bf16_even, NARROW) BACKWARD_INPUT(bf16) {
    backward_input<bf16, TENSOR, Small, true, EVEN_UNITS>(w, dy, dx, shape, before, sums);
}
KERNEL_BOUNDS(conv_backward_input_bf16_scalar, SCALAR) BACKWARD_INPUT(bf16) {
    backward_input<bf16, TENSOR, Small, false>(w, dy, dx, shape, before, sums);
}

KERNEL_BOUNDS(conv_backward_weights_bf16_small, SMALL_AHEAD) BACKWARD_WEIGHTS(bf16) {
    backward_weights<bf16, TENSOR, Small, true>(x, dy, shape, sums);
}
KERNEL_BOUNDS(conv_backward_weights_bf16_narrow, NARROW) BACKWARD_WEIGHTS(bf16) {
    backward_weights<bf16, TENSOR, Small, true, NARROW_UNITS>(x, dy, shape, sums);
}
KERNEL_BOUNDS(conv_backward_weights_bf16_even, NARROW) BACKWARD_WEIGHTS(bf16) {
    backward_weights<bf16, TENSOR, Small, true, EVEN_UNITS>(x, dy, shape, sums);
}
KERNEL_BOUNDS(conv_backward_weights_bf16_scalar, SCALAR) BACKWARD_WEIGHTS(bf16) {
    backward_weights<bf16, TENSOR, Small, false>(x, dy, shape, sums);
}

#ifdef LARGE_BY_WARPS
KERNEL_BOUNDS(conv_forward_bf16_large, LARGE_AHEAD) FORWARD(bf16) {
    forward<bf16, TENSOR, LARGE_TILE, true>(x, w, bias, y, shape, after, sums);
}
KERNEL_BOUNDS(conv_backward_input_bf16_large, LARGE_AHEAD) BACKWARD_INPUT(bf16) {
    backward_input<bf16, TENSOR, LARGE_TILE, true>(w, dy, dx, shape, before, sums);
}
KERNEL_BOUNDS(conv_backward_weights_bf16_large, LARGE_AHEAD) BACKWARD_WEIGHTS(bf16) {
    backward_weights<bf16, TENSOR, LARGE_TILE, true>(x, dy, shape, sums);
}
#endif

#ifdef WARPGROUPS
KERNEL_BOUNDS(conv_forward_bf16_group, GROUP) FORWARD(bf16) {
    forward<bf16, GroupProduct, Group, true>(x, w, bias, y, shape, after, sums);
}
KERNEL_BOUNDS(conv_backward_input_bf16_group, GROUP) BACKWARD_INPUT(bf16) {
    backward_input<bf16, GroupProduct, Group, true>(w, dy, dx, shape, before, sums);
}
KERNEL_BOUNDS(conv_backward_weights_bf16_group, GROUP) BACKWARD_WEIGHTS(bf16) {
    backward_weights<bf16, GroupProduct, Group, true>(x, dy, shape, sums);
}
#endif
