// Entry points of convolutions of images with one channel. Included after gather.cuh, first.cuh and first_tensors.cuh.

#ifdef MGPU_SHIM
#include "../gather/gather.cuh"
#include "first.cuh"
#include "first_tensors.cuh"
#endif

template <class T, u32 K, u32 EACH, u32 HIGH, u32 LANES>
__device__ inline void forward(
    const FirstImages<T>& images, const T* w, const f32* bias, T* y, u8* chosen, const OneChannel& shape,
    const FirstDropout& dropout) {
    if constexpr (FirstTensors<T>::KNOWN) {
        first_forward_tensors<T, K, EACH * LANES / 8, HIGH>(images, w, bias, y, chosen, shape, dropout);
    } else {
        first_forward<T, K, EACH, HIGH, LANES>(images, w, bias, y, chosen, shape, dropout);
    }
}

template <class T, u32 K, u32 EACH, u32 HIGH, u32 LANES>
__device__ inline void backward(
    const FirstImages<T>& images, const T* y, const T* dy, const u8* chosen, const FirstSums& result,
    const OneChannel& shape) {
    if constexpr (FirstTensors<T>::KNOWN) {
        first_backward_tensors<T, K, EACH * LANES / 8, HIGH>(images, y, dy, chosen, result, shape);
    } else {
        first_backward<T, K, EACH, HIGH, LANES>(images, y, dy, chosen, result, shape);
    }
}

#define FIRST_FORWARD(T)                                                                                     \
    (const T *x, const __grid_constant__ GatheredBatch batch, u8 *labels, const T *w, const f32 *bias, T *y, \
     u8 *chosen, const __grid_constant__ OneChannel shape, const __grid_constant__ FirstDropout dropout)
#define FIRST_BACKWARD(T)                                                                                   \
    (const T *x, const __grid_constant__ GatheredBatch batch, const T *y, const T *dy, const u8 *chosen,    \
     const __grid_constant__ FirstSums sums, const __grid_constant__ OneChannel shape)

// For each type and side of the kernel: up to 8, 32 or 64 filters for each block; with pooling, or without. On tensor cores
// 64 would take so many registers that a multiprocessor had one block only.

KERNEL_BOUNDS(conv_first_forward_f32_k3_few, 256) FIRST_FORWARD(f32) {
    forward<f32, 3, 1, 1, FEW_FILTERS>({x, batch, labels}, w, bias, y, chosen, shape, dropout);
}
KERNEL_BOUNDS(conv_first_forward_pooled_f32_k3_few, 256) FIRST_FORWARD(f32) {
    forward<f32, 3, 1, 2, FEW_FILTERS>({x, batch, labels}, w, bias, y, chosen, shape, dropout);
}
KERNEL_BOUNDS(conv_first_forward_f32_k3_x1, 256) FIRST_FORWARD(f32) {
    forward<f32, 3, 1, 1, WARP>({x, batch, labels}, w, bias, y, chosen, shape, dropout);
}
KERNEL_BOUNDS(conv_first_forward_pooled_f32_k3_x1, 256) FIRST_FORWARD(f32) {
    forward<f32, 3, 1, 2, WARP>({x, batch, labels}, w, bias, y, chosen, shape, dropout);
}
KERNEL_BLOCKS(conv_first_forward_f32_k3_x2, 256, 3) FIRST_FORWARD(f32) {
    forward<f32, 3, 2, 1, WARP>({x, batch, labels}, w, bias, y, chosen, shape, dropout);
}
KERNEL_BOUNDS(conv_first_forward_pooled_f32_k3_x2, 256) FIRST_FORWARD(f32) {
    forward<f32, 3, 2, 2, WARP>({x, batch, labels}, w, bias, y, chosen, shape, dropout);
}
KERNEL_BOUNDS(conv_first_forward_f32_k5_few, 256) FIRST_FORWARD(f32) {
    forward<f32, 5, 1, 1, FEW_FILTERS>({x, batch, labels}, w, bias, y, chosen, shape, dropout);
}
KERNEL_BOUNDS(conv_first_forward_pooled_f32_k5_few, 256) FIRST_FORWARD(f32) {
    forward<f32, 5, 1, 2, FEW_FILTERS>({x, batch, labels}, w, bias, y, chosen, shape, dropout);
}
KERNEL_BOUNDS(conv_first_forward_f32_k5_x1, 256) FIRST_FORWARD(f32) {
    forward<f32, 5, 1, 1, WARP>({x, batch, labels}, w, bias, y, chosen, shape, dropout);
}
KERNEL_BOUNDS(conv_first_forward_pooled_f32_k5_x1, 256) FIRST_FORWARD(f32) {
    forward<f32, 5, 1, 2, WARP>({x, batch, labels}, w, bias, y, chosen, shape, dropout);
}
KERNEL_BOUNDS(conv_first_forward_f32_k5_x2, 256) FIRST_FORWARD(f32) {
    forward<f32, 5, 2, 1, WARP>({x, batch, labels}, w, bias, y, chosen, shape, dropout);
}
KERNEL_BOUNDS(conv_first_forward_pooled_f32_k5_x2, 256) FIRST_FORWARD(f32) {
    forward<f32, 5, 2, 2, WARP>({x, batch, labels}, w, bias, y, chosen, shape, dropout);
}

KERNEL_BOUNDS(conv_first_backward_f32_k3_few, 256) FIRST_BACKWARD(f32) {
    backward<f32, 3, 1, 1, FEW_FILTERS>({x, batch, nullptr}, y, dy, chosen, sums, shape);
}
KERNEL_BOUNDS(conv_first_backward_pooled_f32_k3_few, 256) FIRST_BACKWARD(f32) {
    backward<f32, 3, 1, 2, FEW_FILTERS>({x, batch, nullptr}, y, dy, chosen, sums, shape);
}
KERNEL_BOUNDS(conv_first_backward_f32_k3_x1, 256) FIRST_BACKWARD(f32) {
    backward<f32, 3, 1, 1, WARP>({x, batch, nullptr}, y, dy, chosen, sums, shape);
}
KERNEL_BLOCKS(conv_first_backward_pooled_f32_k3_x1, 256, 3) FIRST_BACKWARD(f32) {
    backward<f32, 3, 1, 2, WARP>({x, batch, nullptr}, y, dy, chosen, sums, shape);
}
KERNEL_BOUNDS(conv_first_backward_f32_k3_x2, 256) FIRST_BACKWARD(f32) {
    backward<f32, 3, 2, 1, WARP>({x, batch, nullptr}, y, dy, chosen, sums, shape);
}
KERNEL_BLOCKS(conv_first_backward_pooled_f32_k3_x2, 256, 3) FIRST_BACKWARD(f32) {
    backward<f32, 3, 2, 2, WARP>({x, batch, nullptr}, y, dy, chosen, sums, shape);
}
KERNEL_BLOCKS(conv_first_backward_f32_k5_few, 256, 3) FIRST_BACKWARD(f32) {
    backward<f32, 5, 1, 1, FEW_FILTERS>({x, batch, nullptr}, y, dy, chosen, sums, shape);
}
KERNEL_BOUNDS(conv_first_backward_pooled_f32_k5_few, 256) FIRST_BACKWARD(f32) {
    backward<f32, 5, 1, 2, FEW_FILTERS>({x, batch, nullptr}, y, dy, chosen, sums, shape);
}
KERNEL_BLOCKS(conv_first_backward_f32_k5_x1, 256, 3) FIRST_BACKWARD(f32) {
    backward<f32, 5, 1, 1, WARP>({x, batch, nullptr}, y, dy, chosen, sums, shape);
}
KERNEL_BLOCKS(conv_first_backward_pooled_f32_k5_x1, 256, 3) FIRST_BACKWARD(f32) {
    backward<f32, 5, 1, 2, WARP>({x, batch, nullptr}, y, dy, chosen, sums, shape);
}
KERNEL_BLOCKS(conv_first_backward_f32_k5_x2, 256, 1) FIRST_BACKWARD(f32) {
    backward<f32, 5, 2, 1, WARP>({x, batch, nullptr}, y, dy, chosen, sums, shape);
}
KERNEL_BOUNDS(conv_first_backward_pooled_f32_k5_x2, 256) FIRST_BACKWARD(f32) {
    backward<f32, 5, 2, 2, WARP>({x, batch, nullptr}, y, dy, chosen, sums, shape);
}

KERNEL_BOUNDS(conv_first_forward_bf16_k3_few, 256) FIRST_FORWARD(bf16) {
    forward<bf16, 3, 1, 1, FEW_FILTERS>({x, batch, labels}, w, bias, y, chosen, shape, dropout);
}
KERNEL_BOUNDS(conv_first_forward_pooled_bf16_k3_few, 256) FIRST_FORWARD(bf16) {
    forward<bf16, 3, 1, 2, FEW_FILTERS>({x, batch, labels}, w, bias, y, chosen, shape, dropout);
}
KERNEL_BLOCKS(conv_first_forward_bf16_k3_x1, 256, 2) FIRST_FORWARD(bf16) {
    forward<bf16, 3, 1, 1, WARP>({x, batch, labels}, w, bias, y, chosen, shape, dropout);
}
KERNEL_BLOCKS(conv_first_forward_pooled_bf16_k3_x1, 256, 2) FIRST_FORWARD(bf16) {
    forward<bf16, 3, 1, 2, WARP>({x, batch, labels}, w, bias, y, chosen, shape, dropout);
}
KERNEL_BOUNDS(conv_first_forward_bf16_k5_few, 256) FIRST_FORWARD(bf16) {
    forward<bf16, 5, 1, 1, FEW_FILTERS>({x, batch, labels}, w, bias, y, chosen, shape, dropout);
}
KERNEL_BOUNDS(conv_first_forward_pooled_bf16_k5_few, 256) FIRST_FORWARD(bf16) {
    forward<bf16, 5, 1, 2, FEW_FILTERS>({x, batch, labels}, w, bias, y, chosen, shape, dropout);
}
KERNEL_BLOCKS(conv_first_forward_bf16_k5_x1, 256, 2) FIRST_FORWARD(bf16) {
    forward<bf16, 5, 1, 1, WARP>({x, batch, labels}, w, bias, y, chosen, shape, dropout);
}
KERNEL_BLOCKS(conv_first_forward_pooled_bf16_k5_x1, 256, 2) FIRST_FORWARD(bf16) {
    forward<bf16, 5, 1, 2, WARP>({x, batch, labels}, w, bias, y, chosen, shape, dropout);
}

KERNEL_BOUNDS(conv_first_backward_bf16_k3_few, 256) FIRST_BACKWARD(bf16) {
    backward<bf16, 3, 1, 1, FEW_FILTERS>({x, batch, nullptr}, y, dy, chosen, sums, shape);
}
KERNEL_BLOCKS(conv_first_backward_pooled_bf16_k3_few, 256, 3) FIRST_BACKWARD(bf16) {
    backward<bf16, 3, 1, 2, FEW_FILTERS>({x, batch, nullptr}, y, dy, chosen, sums, shape);
}
KERNEL_BLOCKS(conv_first_backward_bf16_k3_x1, 256, 2) FIRST_BACKWARD(bf16) {
    backward<bf16, 3, 1, 1, WARP>({x, batch, nullptr}, y, dy, chosen, sums, shape);
}
KERNEL_BLOCKS(conv_first_backward_pooled_bf16_k3_x1, 256, 2) FIRST_BACKWARD(bf16) {
    backward<bf16, 3, 1, 2, WARP>({x, batch, nullptr}, y, dy, chosen, sums, shape);
}
KERNEL_BOUNDS(conv_first_backward_bf16_k5_few, 256) FIRST_BACKWARD(bf16) {
    backward<bf16, 5, 1, 1, FEW_FILTERS>({x, batch, nullptr}, y, dy, chosen, sums, shape);
}
KERNEL_BOUNDS(conv_first_backward_pooled_bf16_k5_few, 256) FIRST_BACKWARD(bf16) {
    backward<bf16, 5, 1, 2, FEW_FILTERS>({x, batch, nullptr}, y, dy, chosen, sums, shape);
}
KERNEL_BLOCKS(conv_first_backward_bf16_k5_x1, 256, 2) FIRST_BACKWARD(bf16) {
    backward<bf16, 5, 1, 1, WARP>({x, batch, nullptr}, y, dy, chosen, sums, shape);
}
KERNEL_BLOCKS(conv_first_backward_pooled_bf16_k5_x1, 256, 2) FIRST_BACKWARD(bf16) {
    backward<bf16, 5, 1, 2, WARP>({x, batch, nullptr}, y, dy, chosen, sums, shape);
}

KERNEL_BOUNDS(conv_first_forward_f16_k3_few, 256) FIRST_FORWARD(f16) {
    forward<f16, 3, 1, 1, FEW_FILTERS>({x, batch, labels}, w, bias, y, chosen, shape, dropout);
}
KERNEL_BOUNDS(conv_first_forward_pooled_f16_k3_few, 256) FIRST_FORWARD(f16) {
    forward<f16, 3, 1, 2, FEW_FILTERS>({x, batch, labels}, w, bias, y, chosen, shape, dropout);
}
KERNEL_BLOCKS(conv_first_forward_f16_k3_x1, 256, 2) FIRST_FORWARD(f16) {
    forward<f16, 3, 1, 1, WARP>({x, batch, labels}, w, bias, y, chosen, shape, dropout);
}
KERNEL_BLOCKS(conv_first_forward_pooled_f16_k3_x1, 256, 2) FIRST_FORWARD(f16) {
    forward<f16, 3, 1, 2, WARP>({x, batch, labels}, w, bias, y, chosen, shape, dropout);
}
KERNEL_BOUNDS(conv_first_forward_f16_k5_few, 256) FIRST_FORWARD(f16) {
    forward<f16, 5, 1, 1, FEW_FILTERS>({x, batch, labels}, w, bias, y, chosen, shape, dropout);
}
KERNEL_BOUNDS(conv_first_forward_pooled_f16_k5_few, 256) FIRST_FORWARD(f16) {
    forward<f16, 5, 1, 2, FEW_FILTERS>({x, batch, labels}, w, bias, y, chosen, shape, dropout);
}
KERNEL_BLOCKS(conv_first_forward_f16_k5_x1, 256, 2) FIRST_FORWARD(f16) {
    forward<f16, 5, 1, 1, WARP>({x, batch, labels}, w, bias, y, chosen, shape, dropout);
}
KERNEL_BLOCKS(conv_first_forward_pooled_f16_k5_x1, 256, 2) FIRST_FORWARD(f16) {
    forward<f16, 5, 1, 2, WARP>({x, batch, labels}, w, bias, y, chosen, shape, dropout);
}

KERNEL_BOUNDS(conv_first_backward_f16_k3_few, 256) FIRST_BACKWARD(f16) {
    backward<f16, 3, 1, 1, FEW_FILTERS>({x, batch, nullptr}, y, dy, chosen, sums, shape);
}
KERNEL_BOUNDS(conv_first_backward_pooled_f16_k3_few, 256) FIRST_BACKWARD(f16) {
    backward<f16, 3, 1, 2, FEW_FILTERS>({x, batch, nullptr}, y, dy, chosen, sums, shape);
}
KERNEL_BLOCKS(conv_first_backward_f16_k3_x1, 256, 2) FIRST_BACKWARD(f16) {
    backward<f16, 3, 1, 1, WARP>({x, batch, nullptr}, y, dy, chosen, sums, shape);
}
KERNEL_BLOCKS(conv_first_backward_pooled_f16_k3_x1, 256, 2) FIRST_BACKWARD(f16) {
    backward<f16, 3, 1, 2, WARP>({x, batch, nullptr}, y, dy, chosen, sums, shape);
}
KERNEL_BOUNDS(conv_first_backward_f16_k5_few, 256) FIRST_BACKWARD(f16) {
    backward<f16, 5, 1, 1, FEW_FILTERS>({x, batch, nullptr}, y, dy, chosen, sums, shape);
}
KERNEL_BOUNDS(conv_first_backward_pooled_f16_k5_few, 256) FIRST_BACKWARD(f16) {
    backward<f16, 5, 1, 2, FEW_FILTERS>({x, batch, nullptr}, y, dy, chosen, sums, shape);
}
KERNEL_BLOCKS(conv_first_backward_f16_k5_x1, 256, 2) FIRST_BACKWARD(f16) {
    backward<f16, 5, 1, 1, WARP>({x, batch, nullptr}, y, dy, chosen, sums, shape);
}
KERNEL_BLOCKS(conv_first_backward_pooled_f16_k5_x1, 256, 2) FIRST_BACKWARD(f16) {
    backward<f16, 5, 1, 2, WARP>({x, batch, nullptr}, y, dy, chosen, sums, shape);
}
