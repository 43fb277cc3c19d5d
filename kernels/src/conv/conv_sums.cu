// The gradient of the bias: sums of a matrix over its rows, in slices.
//
// There is a column for every filter, a row for every output pixel. Given the activated output `y`, the gradient is
// first replaced in place by that before the activation. A thread keeps a pack of columns and iterates over the rows
// of its slice; the sums of a column's threads are added in the order of threads.

#define BIAS_THREADS 256u

struct BiasSums {
    u32 rows, columns;
    u32 slice;      // rows of a slice
    f32 slope;
    ColumnSums to;
};

template <class T, u32 N>
__device__ void bias_packs(const T* y, T* gradient, const BiasSums& sums) {
    // Number of loads in flight.
    constexpr u32 AHEAD = 4;
    const u32 rows = sums.rows, columns = sums.columns;
    const u32 row_packs = columns / N, tile = least(row_packs, BIAS_THREADS), lanes = BIAS_THREADS / tile;
    const u32 lane = threadIdx.x / tile, pack = blockIdx.x * tile + threadIdx.x % tile;
    const u32 start = blockIdx.y * sums.slice, end = least(start + sums.slice, rows);
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
                        values[i].at[j] = rectify_gradient(outputs[i].at[j], values[i].at[j], sums.slope);
                    }
                    store_pack<N>(gradient + at, values[i]);
                }
#pragma unroll
                for (u32 j = 0; j < N; j++) own[j] += to_f32(values[i].at[j]);
            }
        }
    }
    add_columns<BIAS_THREADS, N>(sums.to, own, columns, tile, blockIdx.x, blockIdx.y, gridDim.y);
}

template <class T>
__device__ void bias_sums(const T* y, T* gradient, const BiasSums& sums, u32 wide) {
    if (wide) {
        bias_packs<T, PACK<T>>(y, gradient, sums);
    } else {
        bias_packs<T, 1>(y, gradient, sums);
    }
}

KERNEL_BLOCKS(conv_bias_f32, BIAS_THREADS, 2)(const f32* y, f32* gradient, BiasSums sums, u32 wide) {
    bias_sums(y, gradient, sums, wide);
}
KERNEL_BOUNDS(conv_bias_bf16, BIAS_THREADS)(const bf16* y, bf16* gradient, BiasSums sums, u32 wide) {
    bias_sums(y, gradient, sums, wide);
}
KERNEL_BOUNDS(conv_bias_f16, BIAS_THREADS)(const f16* y, f16* gradient, BiasSums sums, u32 wide) {
    bias_sums(y, gradient, sums, wide);
}
