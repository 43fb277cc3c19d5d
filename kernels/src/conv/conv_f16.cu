// Entry points of convolutions of f16 with sums in f32. Included after conv.cuh. Unlike those of bfloat16, tensor cores of
// f16 are older than sm_80.

#ifdef MGPU_SHIM
#include "tiles.cuh"
#include "groups.cuh"
#include "extents.cuh"
#include "results.cuh"
#include "conv.cuh"
#endif

#ifdef F16_TENSOR_CORES
#define F16_TENSOR TensorProduct
#else
#define F16_TENSOR PlainProduct
#endif

KERNEL_BOUNDS(conv_forward_f16_small, SMALL_AHEAD) FORWARD(f16) {
    forward<f16, F16_TENSOR, Small, true>(x, w, bias, y, shape, after, sums);
}
KERNEL_BOUNDS(conv_forward_f16_narrow, NARROW) FORWARD(f16) {
    forward<f16, F16_TENSOR, Small, true, NARROW_UNITS>(x, w, bias, y, shape, after, sums);
}
KERNEL_BOUNDS(conv_forward_f16_even, NARROW) FORWARD(f16) {
    forward<f16, F16_TENSOR, Small, true, EVEN_UNITS>(x, w, bias, y, shape, after, sums);
}
KERNEL_BOUNDS(conv_forward_f16_scalar, SCALAR) FORWARD(f16) {
    forward<f16, F16_TENSOR, Small, false>(x, w, bias, y, shape, after, sums);
}

KERNEL_BOUNDS(conv_backward_input_f16_small, SMALL_AHEAD) BACKWARD_INPUT(f16) {
    backward_input<f16, F16_TENSOR, Small, true>(w, dy, dx, shape, before, sums);
}
KERNEL_BOUNDS(conv_backward_input_f16_narrow, NARROW) BACKWARD_INPUT(f16) {
    backward_input<f16, F16_TENSOR, Small, true, NARROW_UNITS>(w, dy, dx, shape, before, sums);
}
KERNEL_BOUNDS(conv_backward_input_f16_even, NARROW) BACKWARD_INPUT(f16) {
    backward_input<f16, F16_TENSOR, Small, true, EVEN_UNITS>(w, dy, dx, shape, before, sums);
}
KERNEL_BOUNDS(conv_backward_input_f16_scalar, SCALAR) BACKWARD_INPUT(f16) {
    backward_input<f16, F16_TENSOR, Small, false>(w, dy, dx, shape, before, sums);
}

KERNEL_BOUNDS(conv_backward_weights_f16_small, SMALL_AHEAD) BACKWARD_WEIGHTS(f16) {
    backward_weights<f16, F16_TENSOR, Small, true>(x, dy, shape, sums);
}
KERNEL_BOUNDS(conv_backward_weights_f16_narrow, NARROW) BACKWARD_WEIGHTS(f16) {
    backward_weights<f16, F16_TENSOR, Small, true, NARROW_UNITS>(x, dy, shape, sums);
}
KERNEL_BOUNDS(conv_backward_weights_f16_even, NARROW) BACKWARD_WEIGHTS(f16) {
    backward_weights<f16, F16_TENSOR, Small, true, EVEN_UNITS>(x, dy, shape, sums);
}
KERNEL_BOUNDS(conv_backward_weights_f16_scalar, SCALAR) BACKWARD_WEIGHTS(f16) {
    backward_weights<f16, F16_TENSOR, Small, false>(x, dy, shape, sums);
}

#ifdef LARGE_BY_WARPS
KERNEL_BOUNDS(conv_forward_f16_large, LARGE_AHEAD) FORWARD(f16) {
    forward<f16, F16_TENSOR, LARGE_TILE, true>(x, w, bias, y, shape, after, sums);
}
KERNEL_BOUNDS(conv_backward_input_f16_large, LARGE_AHEAD) BACKWARD_INPUT(f16) {
    backward_input<f16, F16_TENSOR, LARGE_TILE, true>(w, dy, dx, shape, before, sums);
}
KERNEL_BOUNDS(conv_backward_weights_f16_large, LARGE_AHEAD) BACKWARD_WEIGHTS(f16) {
    backward_weights<f16, F16_TENSOR, LARGE_TILE, true>(x, dy, shape, sums);
}
#endif

#ifdef WARPGROUPS
KERNEL_BOUNDS(conv_forward_f16_group, GROUP) FORWARD(f16) {
    forward<f16, GroupProduct, Group, true>(x, w, bias, y, shape, after, sums);
}
KERNEL_BOUNDS(conv_backward_input_f16_group, GROUP) BACKWARD_INPUT(f16) {
    backward_input<f16, GroupProduct, Group, true>(w, dy, dx, shape, before, sums);
}
KERNEL_BOUNDS(conv_backward_weights_f16_group, GROUP) BACKWARD_WEIGHTS(f16) {
    backward_weights<f16, GroupProduct, Group, true>(x, dy, shape, sums);
}
#endif
