// The weights of the transposed convolution, from weights [filters][side][side][channels]: the first index becomes
// the last, and every kernel is rotated by 180 degrees. A block moves 32 by 32 weights of one tap.

#define FLIP_ROWS 8u

template <class T>
__device__ inline void flip_weights(const T* weights, u32 filters, u32 taps, u32 channels, T* flipped) {
    __shared__ T tile[WARP][WARP + 2];
    const u32 lane = threadIdx.x % WARP, row = threadIdx.x / WARP;
    const u32 across = (channels + WARP - 1) / WARP;
    const u32 channel = blockIdx.x % across * WARP, filter = blockIdx.x / across * WARP;
    const u32 tap = blockIdx.y, opposite = taps - 1 - tap;
    for (u32 i = row; i < WARP; i += FLIP_ROWS) {
        if (filter + i < filters && channel + lane < channels) {
            tile[i][lane] = weights[((u64)(filter + i) * taps + tap) * channels + channel + lane];
        }
    }
    __syncthreads();
    for (u32 i = row; i < WARP; i += FLIP_ROWS) {
        if (channel + i < channels && filter + lane < filters) {
            flipped[((u64)(channel + i) * taps + opposite) * filters + filter + lane] = tile[lane][i];
        }
    }
}

KERNEL_BOUNDS(conv_flip_f32, 256)(const f32* weights, u32 filters, u32 taps, u32 channels, f32* flipped) {
    flip_weights(weights, filters, taps, channels, flipped);
}

KERNEL_BOUNDS(conv_flip_bf16, 256)(const bf16* weights, u32 filters, u32 taps, u32 channels, bf16* flipped) {
    flip_weights(weights, filters, taps, channels, flipped);
}
KERNEL_BOUNDS(conv_flip_f16, 256)(const f16* weights, u32 filters, u32 taps, u32 channels, f16* flipped) {
    flip_weights(weights, filters, taps, channels, flipped);
}
