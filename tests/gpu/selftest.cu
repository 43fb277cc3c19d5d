// Kernels that test the shim; not part of the product.

// Sums a block's values in static shared memory, by halving with a barrier at each step.
KERNEL_BOUNDS(selftest_block_sum, 256)(const f32* in, f32* out, u32 length) {
    __shared__ f32 values[256];
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    values[threadIdx.x] = i < length ? in[i] : 0.0f;
    __syncthreads();
    for (u32 half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) values[threadIdx.x] += values[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) out[blockIdx.x] = values[0];
}

// The same with shuffles and dynamic shared memory as scratch.
KERNEL(selftest_shuffle_sum)(const f32* in, f32* out, u32 length) {
    DYNAMIC_SHARED(f32, scratch);
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    const f32 sum = block_sum(i < length ? in[i] : 0.0f, scratch);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

// Reverses a block's values in shared memory without a barrier: wrong, and must be detected.
KERNEL(selftest_no_barrier)(const f32* in, f32* out) {
    __shared__ f32 values[64];
    values[threadIdx.x] = in[threadIdx.x];
    out[threadIdx.x] = values[63 - threadIdx.x];
}

// The result of every warp function for each lane.
KERNEL(selftest_lanes)(u64* out) {
    const u32 lane = threadIdx.x % 32;
    u64* mine = out + threadIdx.x * 8;
    mine[0] = __shfl_sync(EVERY_LANE, lane * 10, 7);
    mine[1] = __shfl_up_sync(EVERY_LANE, (u64)lane << 33, 3);
    mine[2] = __shfl_down_sync(EVERY_LANE, lane, 5, 16);
    mine[3] = __shfl_xor_sync(EVERY_LANE, lane, 17);
    mine[4] = __ballot_sync(EVERY_LANE, lane % 3 == 0);
    mine[5] = (u64)(__any_sync(EVERY_LANE, lane == 31) + 2 * __all_sync(EVERY_LANE, lane < 31));
    // Two halves of the warp, each by itself.
    const u32 mask = lane < 16 ? 0x0000ffffu : 0xffff0000u;
    if (lane < 16) {
        mine[6] = __shfl_sync(mask, lane, 3);
    } else {
        mine[6] = __shfl_sync(mask, lane, 19);
    }
    __syncwarp();
    mine[7] = blockIdx.z * 100 + blockIdx.y * 10 + threadIdx.y;
}

KERNEL(selftest_half_a_barrier)(u32* out) {
    if (threadIdx.x % 2 == 0) __syncthreads();
    while (threadIdx.x % 2 == 1) __syncwarp(EVERY_LANE);
    out[threadIdx.x] = threadIdx.x;
}

// c = a b for one tile, all matrices dense and row-major: a is 16 by k, b is k by 8.
template <class T, class PRODUCT>
__device__ void selftest_mma_halves(const f32* a, const f32* b, f32* c, const PRODUCT& product) {
    const u32 g = threadIdx.x / 4, t = threadIdx.x % 4;
    auto pair = [](f32 low, f32 high) { return (u32)from_f32<T>(low).bits | (u32)from_f32<T>(high).bits << 16; };
    auto a_pair = [&](u32 row, u32 column) { return pair(a[row * 16 + column], a[row * 16 + column + 1]); };
    auto b_pair = [&](u32 row, u32 column) { return pair(b[row * 8 + column], b[(row + 1) * 8 + column]); };
    const u32 left[4] = {a_pair(g, 2 * t), a_pair(g + 8, 2 * t), a_pair(g, 2 * t + 8), a_pair(g + 8, 2 * t + 8)};
    const u32 right[2] = {b_pair(2 * t, g), b_pair(2 * t + 8, g)};
    f32 d[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    product(d, left, right);
    for (u32 i = 0; i < 4; ++i) c[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = d[i];
}

KERNEL(selftest_mma_bf16)(const f32* a, const f32* b, f32* c) {
    selftest_mma_halves<bf16>(a, b, c, [](f32* d, const u32* a, const u32* b) { mma_bf16_16816(d, a, b); });
}
KERNEL(selftest_mma_f16)(const f32* a, const f32* b, f32* c) {
    selftest_mma_halves<f16>(a, b, c, [](f32* d, const u32* a, const u32* b) { mma_f16_16816(d, a, b); });
}

KERNEL(selftest_mma_tf32)(const f32* a, const f32* b, f32* c) {
    const u32 g = threadIdx.x / 4, t = threadIdx.x % 4;
    const u32 left[4] = {f32_to_tf32(a[g * 8 + t]), f32_to_tf32(a[(g + 8) * 8 + t]), f32_to_tf32(a[g * 8 + t + 4]),
                         f32_to_tf32(a[(g + 8) * 8 + t + 4])};
    const u32 right[2] = {f32_to_tf32(b[t * 8 + g]), f32_to_tf32(b[(t + 4) * 8 + g])};
    f32 d[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    mma_tf32_1688(d, left, right);
    for (u32 i = 0; i < 4; ++i) c[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = d[i];
}

// For streams and graphs: y = a x + y, and a counter.
KERNEL(selftest_axpy)(f32 a, const f32* x, f32* y, u64 length) {
    const u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x;
    if (i < length) y[i] += a * x[i];
}

KERNEL(selftest_count)(u32* counter) { atomicAdd(counter, 1u); }

// Copies 16 bytes at a time.
KERNEL(selftest_copy_packs)(const f32* from, f32* to) {
    store_pack<4>(to + threadIdx.x * 4, load_pack<4>(from + threadIdx.x * 4));
}
