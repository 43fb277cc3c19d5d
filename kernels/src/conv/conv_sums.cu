// Sums of a matrix over its rows, in slices.

// Adds up the slices of any gradient. The warps of a block take the rows of a slice in turn, with a column for each
// lane, and the warps' sums are added in the order of warps: the same rows give the same bits every time.

#define SUM_WARPS 8u

KERNEL_BOUNDS(conv_sum_f32, 256)(const f32* matrix, u32 rows, u32 columns, u32 slice, f32* sums) {
    // Number of loads in flight, each with a sum of its own.
    constexpr u32 AHEAD = 4;
    __shared__ f32 parts[SUM_WARPS][WARP];
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, column = blockIdx.x * WARP + lane;
    const u32 start = blockIdx.y * slice, end = least(start + slice, rows);
    f32 own[AHEAD] = {};
    if (column < columns) {
        for (u32 row = start + warp; row < end; row += SUM_WARPS * AHEAD) {
#pragma unroll
            for (u32 i = 0; i < AHEAD; i++) {
                const u32 at = row + SUM_WARPS * i;
                if (at < end) own[i] += matrix[(u64)at * columns + column];
            }
        }
    }
#pragma unroll
    for (u32 half = AHEAD / 2; half > 0; half /= 2) {
#pragma unroll
        for (u32 i = 0; i < half; i++) own[i] += own[i + half];
    }
    parts[warp][lane] = own[0];
    __syncthreads();
    if (warp != 0 || column >= columns) return;
    f32 sum = parts[0][lane];
#pragma unroll
    for (u32 i = 1; i < SUM_WARPS; i++) sum += parts[i][lane];
    sums[(u64)blockIdx.y * columns + column] = sum;
}

// The gradient of the bias: a column for every filter, a row for every output pixel. Given the activated output `y`,
// the gradient is first replaced in place by that before the activation. A thread keeps a pack of columns and
// iterates over the rows of its slice; the sums of a column's threads are added in the order of threads.

#define BIAS_THREADS 256u

template <class T, u32 N>
__device__ void bias_packs(
    const T* y, T* gradient, u32 rows, u32 columns, u32 slice, f32 slope, f32* sums) {
    // Number of loads in flight.
    constexpr u32 AHEAD = 4;
    __shared__ f32 parts[BIAS_THREADS * N];
    const u32 row_packs = columns / N, tile = least(row_packs, BIAS_THREADS), lanes = BIAS_THREADS / tile;
    const u32 lane = threadIdx.x / tile, place = threadIdx.x % tile, pack = blockIdx.x * tile + place;
    const u32 start = blockIdx.y * slice, end = least(start + slice, rows), width = tile * N;
    f32 own[N] = {};
    if (lane < lanes && pack < row_packs) {
        for (u32 row = start + lane; row < end; row += lanes * AHEAD) {
            Pack<T, N> values[AHEAD], outputs[AHEAD];
#pragma unroll
            for (u32 i = 0; i < AHEAD; i++) {
                const u64 at = (u64)(row + lanes * i) * columns + pack * N;
                if (row + lanes * i >= end) continue;
                values[i] = load_pack<N>(gradient + at);
                if (y) outputs[i] = load_pack<N>(y + at);
            }
#pragma unroll
            for (u32 i = 0; i < AHEAD; i++) {
                const u64 at = (u64)(row + lanes * i) * columns + pack * N;
                if (row + lanes * i >= end) continue;
                if (y) {
#pragma unroll
                    for (u32 j = 0; j < N; j++) {
                        values[i].at[j] = rectify_gradient(outputs[i].at[j], values[i].at[j], slope);
                    }
                    store_pack<N>(gradient + at, values[i]);
                }
#pragma unroll
                for (u32 j = 0; j < N; j++) own[j] += to_f32(values[i].at[j]);
            }
        }
    }
    if (lane < lanes) {
#pragma unroll
        for (u32 j = 0; j < N; j++) parts[lane * width + place * N + j] = own[j];
    }
    __syncthreads();
    for (u32 column = threadIdx.x; column < width; column += BIAS_THREADS) {
        f32 sum = parts[column];
        for (u32 other = 1; other < lanes; other++) sum += parts[other * width + column];
        const u32 to = blockIdx.x * width + column;
        if (to < columns) sums[(u64)blockIdx.y * columns + to] = sum;
    }
}

template <class T>
__device__ void bias_sums(
    const T* y, T* gradient, u32 rows, u32 columns, u32 slice, f32 slope, f32* sums, u32 wide) {
    if (wide) {
        bias_packs<T, PACK<T>>(y, gradient, rows, columns, slice, slope, sums);
    } else {
        bias_packs<T, 1>(y, gradient, rows, columns, slice, slope, sums);
    }
}

KERNEL_BOUNDS(conv_bias_f32, BIAS_THREADS)(
    const f32* y, f32* gradient, u32 rows, u32 columns, u32 slice, f32 slope, f32* sums, u32 wide) {
    bias_sums(y, gradient, rows, columns, slice, slope, sums, wide);
}
KERNEL_BOUNDS(conv_bias_bf16, BIAS_THREADS)(
    const bf16* y, bf16* gradient, u32 rows, u32 columns, u32 slice, f32 slope, f32* sums, u32 wide) {
    bias_sums(y, gradient, rows, columns, slice, slope, sums, wide);
}
