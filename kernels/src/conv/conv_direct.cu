// Entry points of direct convolutions. Included after direct.cuh. Types without tensor cores have empty ones, which are not
// launched.

#ifdef MGPU_SHIM
#include "tiles.cuh"
#include "extents.cuh"
#include "results.cuh"
#include "direct.cuh"
#endif

#ifdef TENSOR_CORES
#define BF16_BODY(...) __VA_ARGS__
#else
#define BF16_BODY(...)
#endif
#ifdef F16_TENSOR_CORES
#define F16_BODY(...) __VA_ARGS__
#else
#define F16_BODY(...)
#endif

#define FORWARD(T)                                                                           \
    (const T *x, const T *w, const f32 *bias, T *y, const __grid_constant__ Convolution shape, \
     const __grid_constant__ After after, const __grid_constant__ RowBands bands)
#define BACKWARD_INPUT(T)                                                          \
    (const T *w, const T *dy, T *dx, const __grid_constant__ Convolution shape, \
     const __grid_constant__ Before before, const __grid_constant__ RowBands bands)
#define BACKWARD_WEIGHTS(T)                                             \
    (const T *x, const T *dy, const __grid_constant__ Convolution shape, \
     const __grid_constant__ WeightSums sums, const __grid_constant__ RowBands bands)

KERNEL_BOUNDS(conv_direct_forward_bf16_k3, 128) FORWARD(bf16) {
    BF16_BODY(direct_forward<bf16, 3>(x, w, bias, y, shape, after, bands);)
}
KERNEL_BLOCKS(conv_direct_forward_bf16_k5, 128, 4) FORWARD(bf16) {
    BF16_BODY(direct_forward<bf16, 5>(x, w, bias, y, shape, after, bands);)
}
KERNEL_BOUNDS(conv_direct_forward_f16_k3, 128) FORWARD(f16) {
    F16_BODY(direct_forward<f16, 3>(x, w, bias, y, shape, after, bands);)
}
KERNEL_BLOCKS(conv_direct_forward_f16_k5, 128, 4) FORWARD(f16) {
    F16_BODY(direct_forward<f16, 5>(x, w, bias, y, shape, after, bands);)
}

KERNEL_BOUNDS(conv_direct_backward_input_bf16_k3, 128) BACKWARD_INPUT(bf16) {
    BF16_BODY(direct_backward_input<bf16, 3>(w, dy, dx, shape, before, bands);)
}
KERNEL_BLOCKS(conv_direct_backward_input_bf16_k5, 128, 3) BACKWARD_INPUT(bf16) {
    BF16_BODY(direct_backward_input<bf16, 5>(w, dy, dx, shape, before, bands);)
}
KERNEL_BOUNDS(conv_direct_backward_input_f16_k3, 128) BACKWARD_INPUT(f16) {
    F16_BODY(direct_backward_input<f16, 3>(w, dy, dx, shape, before, bands);)
}
KERNEL_BLOCKS(conv_direct_backward_input_f16_k5, 128, 3) BACKWARD_INPUT(f16) {
    F16_BODY(direct_backward_input<f16, 5>(w, dy, dx, shape, before, bands);)
}

KERNEL_BOUNDS(conv_direct_backward_weights_bf16_k3, 256) BACKWARD_WEIGHTS(bf16) {
    BF16_BODY(direct_backward_weights<bf16, 3>(x, dy, shape, sums, bands);)
}
KERNEL_BLOCKS(conv_direct_backward_weights_bf16_k5, 256, 3) BACKWARD_WEIGHTS(bf16) {
    BF16_BODY(direct_backward_weights<bf16, 5>(x, dy, shape, sums, bands);)
}
KERNEL_BOUNDS(conv_direct_backward_weights_f16_k3, 256) BACKWARD_WEIGHTS(f16) {
    F16_BODY(direct_backward_weights<f16, 3>(x, dy, shape, sums, bands);)
}
KERNEL_BLOCKS(conv_direct_backward_weights_f16_k5, 256, 3) BACKWARD_WEIGHTS(f16) {
    F16_BODY(direct_backward_weights<f16, 5>(x, dy, shape, sums, bands);)
}
