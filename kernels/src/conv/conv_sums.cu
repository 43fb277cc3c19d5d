// Sums of a matrix over its rows, in slices: the gradient of the bias, which has a column for every filter and a row for
// every output pixel, and what slices of any gradient add up to. A slice's rows go round the warps of a block, a column to
// each lane, and the warps' sums are added in their order: the same rows give the same bits every time.

#define SUM_WARPS 8u

template <class T>
__device__ inline void sum_rows(const T* matrix, u32 rows, u32 columns, u32 slice, f32* sums) {
    // Loads on their way at once, in sums of their own: as many bytes for either type.
    constexpr u32 AHEAD = 16 / sizeof(T);
    __shared__ f32 parts[SUM_WARPS][WARP];
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, column = blockIdx.x * WARP + lane;
    const u32 start = blockIdx.y * slice, end = least(start + slice, rows);
    f32 own[AHEAD] = {};
    if (column < columns) {
        for (u32 row = start + warp; row < end; row += SUM_WARPS * AHEAD) {
#pragma unroll
            for (u32 i = 0; i < AHEAD; i++) {
                const u32 at = row + SUM_WARPS * i;
                if (at < end) own[i] += to_f32(matrix[(u64)at * columns + column]);
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

KERNEL_BOUNDS(conv_sum_f32, 256)(const f32* matrix, u32 rows, u32 columns, u32 slice, f32* sums) {
    sum_rows(matrix, rows, columns, slice, sums);
}

KERNEL_BOUNDS(conv_sum_bf16, 256)(const bf16* matrix, u32 rows, u32 columns, u32 slice, f32* sums) {
    sum_rows(matrix, rows, columns, slice, sums);
}
