// Batch normalisation of NHWC images: rows of channels, one row for each position of an image. See mod.rs for the
// contract.
//
// In every kernel that iterates over rows, a thread keeps its channels: a block is `tile` packs of channels wide and
// `lanes` rows high, and strides over the rows. Values that depend on the channel alone are then computed once per
// thread. Each block writes its own sums, in f64, to a workspace [blocks][2][channels], and the last blocks add these
// up in the order of the blocks. The result depends on the size of the grid, never on timing.

#define NORM_THREADS 256u

struct NormShape {
    u32 rows;
    u32 channels;
};

// A thread's position: its first channel, and the rows that it processes.
struct NormPosition {
    u32 tile;
    u32 lanes;
    u32 lane;
    u32 channel;
    u32 row;
    u32 stride;
};

template <u32 N>
__device__ inline NormPosition norm_position(const NormShape& shape) {
    const u32 row_packs = shape.channels / N;
    NormPosition position;
    position.tile = least(row_packs, NORM_THREADS);
    position.lanes = NORM_THREADS / position.tile;
    position.lane = threadIdx.x / position.tile;
    const u32 pack = blockIdx.y * position.tile + threadIdx.x % position.tile;
    position.channel = pack * N;
    position.row = blockIdx.x * position.lanes + position.lane;
    position.stride = gridDim.x * position.lanes;
    // Threads left over by the tiles have no rows.
    if (position.lane >= position.lanes || pack >= row_packs) position.row = shape.rows;
    return position;
}

// Adds up the values of a block's lanes, for each channel from the first lane to the last.
template <u32 N>
__device__ void norm_add_lanes(const NormShape& shape, const NormPosition& position, const f64 mine[N], f64* partial) {
    __shared__ f64 sums[NORM_THREADS * N];
    const u32 width = position.tile * N, first = blockIdx.y * width;
    __syncthreads();
    if (position.lane < position.lanes) {
        for (u32 j = 0; j < N; j++) sums[position.lane * width + threadIdx.x % position.tile * N + j] = mine[j];
    }
    __syncthreads();
    for (u32 column = threadIdx.x; column < width; column += NORM_THREADS) {
        f64 sum = 0.0;
        for (u32 lane = 0; lane < position.lanes; lane++) sum += sums[lane * width + column];
        if (first + column < shape.channels) partial[first + column] = sum;
    }
}

// Where the sums of all blocks go. `dgamma` and `dbeta` are null for the sums of inputs.
struct NormTotals {
    f64* workspace;
    f64* sums;   // first sums, second sums, count
    f32* dgamma;
    f32* dbeta;
    u32* counters;
};

// Adds up the blocks' sums of a tile of channels. The gradients of the parameters are those of this rank alone. Their
// second sums in the workspace are those of (x - mean) dy.
template <u32 N>
__device__ void norm_add_blocks(
    const NormShape& shape, const NormPosition& position, const f32* statistics, const NormTotals& totals) {
    const u32 channels = shape.channels, width = position.tile * N, begin = blockIdx.y * width;
    const u32 known = least(width, channels - begin);
    u32* counters = totals.counters + blockIdx.y * (slice_groups(gridDim.x) + 1);
    add_slices(counters, blockIdx.x, gridDim.x, [&](u32 first, u32 step, u32 count, bool total) {
        for (u32 i = threadIdx.x; i < 2 * known; i += NORM_THREADS) {
            const u32 channel = begin + i % known, column = i < known ? channel : channels + channel;
            f64* from = totals.workspace + (u64)first * 2 * channels + column;
            f64 sum = sum_of_slices(from, (u64)step * 2 * channels, count);
            if (!total) {
                *from = sum;
                continue;
            }
            if (totals.dgamma) {
                if (i >= known) sum *= (f64)statistics[column];
                (i < known ? totals.dbeta : totals.dgamma)[channel] = (f32)sum;
            }
            totals.sums[column] = sum;
            if (column == 0) totals.sums[2 * channels] = (f64)shape.rows;
        }
    });
}

template <class T, u32 N>
__device__ void norm_sum_inputs_packs(const NormShape& shape, const T* x, const NormTotals& totals) {
    const NormPosition position = norm_position<N>(shape);
    f64 sum[N], squares[N];
    for (u32 j = 0; j < N; j++) sum[j] = squares[j] = 0.0;
#pragma unroll 2
    for (u32 row = position.row; row < shape.rows; row += position.stride) {
        const Pack<T, N> pack = load_pack<N>(x + row * shape.channels + position.channel);
        for (u32 j = 0; j < N; j++) {
            const f64 value = to_f32(pack.at[j]);
            sum[j] += value;
            squares[j] += value * value;
        }
    }
    f64* partial = totals.workspace + (u64)blockIdx.x * 2 * shape.channels;
    norm_add_lanes<N>(shape, position, sum, partial);
    norm_add_lanes<N>(shape, position, squares, partial + shape.channels);
    norm_add_blocks<N>(shape, position, nullptr, totals);
}

template <class T>
__device__ void norm_sum_inputs(const NormShape& shape, const T* x, const NormTotals& totals, u32 wide) {
    if (wide) {
        norm_sum_inputs_packs<T, PACK<T>>(shape, x, totals);
    } else {
        norm_sum_inputs_packs<T, 1>(shape, x, totals);
    }
}

KERNEL_BOUNDS(norm_sum_inputs_f32, NORM_THREADS)(NormShape shape, const f32* x, NormTotals totals, u32 wide) {
    norm_sum_inputs(shape, x, totals, wide);
}
KERNEL_BOUNDS(norm_sum_inputs_bf16, NORM_THREADS)(NormShape shape, const bf16* x, NormTotals totals, u32 wide) {
    norm_sum_inputs(shape, x, totals, wide);
}
KERNEL_BOUNDS(norm_sum_inputs_f16, NORM_THREADS)(NormShape shape, const f16* x, NormTotals totals, u32 wide) {
    norm_sum_inputs(shape, x, totals, wide);
}

// The second sum lacks its factor, the inverse deviation, which the last block applies.
template <class T, u32 N>
__device__ void norm_sum_gradients_packs(
    const NormShape& shape, const f32* statistics, const T* x, const T* dy, const NormTotals& totals) {
    const NormPosition position = norm_position<N>(shape);
    f64 sum[N], products[N], mean[N];
    for (u32 j = 0; j < N; j++) {
        sum[j] = products[j] = 0.0;
        mean[j] = position.row < shape.rows ? (f64)statistics[position.channel + j] : 0.0;
    }
#pragma unroll 2
    for (u32 row = position.row; row < shape.rows; row += position.stride) {
        const Pack<T, N> values = load_pack<N>(x + row * shape.channels + position.channel);
        const Pack<T, N> gradients = load_pack<N>(dy + row * shape.channels + position.channel);
        for (u32 j = 0; j < N; j++) {
            const f64 gradient = to_f32(gradients.at[j]);
            sum[j] += gradient;
            products[j] += ((f64)to_f32(values.at[j]) - mean[j]) * gradient;
        }
    }
    f64* partial = totals.workspace + (u64)blockIdx.x * 2 * shape.channels;
    norm_add_lanes<N>(shape, position, sum, partial);
    norm_add_lanes<N>(shape, position, products, partial + shape.channels);
    norm_add_blocks<N>(shape, position, statistics, totals);
}

template <class T>
__device__ void norm_sum_gradients(
    const NormShape& shape, const f32* statistics, const T* x, const T* dy, const NormTotals& totals, u32 wide) {
    if (wide) {
        norm_sum_gradients_packs<T, PACK<T>>(shape, statistics, x, dy, totals);
    } else {
        norm_sum_gradients_packs<T, 1>(shape, statistics, x, dy, totals);
    }
}

KERNEL_BLOCKS(norm_sum_gradients_f32, NORM_THREADS, 3)(
    NormShape shape, const f32* statistics, const f32* x, const f32* dy, NormTotals totals, u32 wide) {
    norm_sum_gradients(shape, statistics, x, dy, totals, wide);
}
KERNEL_BOUNDS(norm_sum_gradients_bf16, NORM_THREADS)(
    NormShape shape, const f32* statistics, const bf16* x, const bf16* dy, NormTotals totals, u32 wide) {
    norm_sum_gradients(shape, statistics, x, dy, totals, wide);
}
KERNEL_BOUNDS(norm_sum_gradients_f16, NORM_THREADS)(
    NormShape shape, const f32* statistics, const f16* x, const f16* dy, NormTotals totals, u32 wide) {
    norm_sum_gradients(shape, statistics, x, dy, totals, wide);
}

// Statistics are [2][channels]: means, inverse deviations.
KERNEL(norm_running_statistics)(
    u32 channels, const f32* running_mean, const f32* running_var, f64 epsilon, f32* statistics) {
    for (u32 c = grid_thread(); c < channels; c += grid_threads()) {
        statistics[c] = running_mean[c];
        statistics[channels + c] = (f32)(1.0 / sqrt((f64)running_var[c] + epsilon));
    }
}

// A batch's statistics from its sums, and the running statistics. Every block computes those of its own channels, and
// the first row of blocks stores them.
struct NormBatch {
    const f64* sums;   // null if the statistics are given
    f32* statistics;
    f32* running_mean;
    f32* running_var;
    f64 epsilon;
    f64 momentum;
};

__device__ inline void norm_batch_statistics(
    const NormBatch& batch, u32 channels, u32 c, bool store, f32& mean, f32& inv_std) {
    const f64 count = batch.sums[2 * channels], exact = batch.sums[c] / count;
    const f64 var = most(batch.sums[channels + c] / count - exact * exact, 0.0);
    mean = (f32)exact;
    inv_std = (f32)(1.0 / sqrt(var + batch.epsilon));
    if (!store) return;
    batch.statistics[c] = mean;
    batch.statistics[channels + c] = inv_std;
    const f64 unbiased = var * count / most(count - 1.0, 1.0), momentum = batch.momentum;
    batch.running_mean[c] = (f32)((f64)batch.running_mean[c] * (1.0 - momentum) + exact * momentum);
    batch.running_var[c] = (f32)((f64)batch.running_var[c] * (1.0 - momentum) + unbiased * momentum);
}

template <class T, u32 N>
__device__ void norm_normalise_packs(
    const NormShape& shape, const NormBatch& batch, const f32* gamma, const f32* beta, const T* x, T* y) {
    // Divisions in f64 are slow: they are computed once per channel in a block.
    __shared__ Pack<f32, N> means[NORM_THREADS], deviations[NORM_THREADS];
    const NormPosition position = norm_position<N>(shape);
    const u32 channels = shape.channels, width = position.tile * N, first = blockIdx.y * width;
    for (u32 column = threadIdx.x; column < width && first + column < channels; column += NORM_THREADS) {
        const u32 c = first + column;
        f32 mean, inv_std;
        if (batch.sums) {
            norm_batch_statistics(batch, channels, c, blockIdx.x == 0, mean, inv_std);
        } else {
            mean = batch.statistics[c], inv_std = batch.statistics[channels + c];
        }
        means[column / N].at[column % N] = mean;
        deviations[column / N].at[column % N] = inv_std;
    }
    __syncthreads();
    if (position.row >= shape.rows) return;
    const Pack<f32, N> mean = means[threadIdx.x % position.tile];
    const Pack<f32, N> inv_std = deviations[threadIdx.x % position.tile];
    const Pack<f32, N> shift = load_channels<N>(beta + position.channel);
    Pack<f32, N> scale = load_channels<N>(gamma + position.channel);
    for (u32 j = 0; j < N; j++) scale.at[j] *= inv_std.at[j];
#pragma unroll 2
    for (u32 row = position.row; row < shape.rows; row += position.stride) {
        const u32 at = row * channels + position.channel;
        Pack<T, N> pack = load_pack<N>(x + at);
        for (u32 j = 0; j < N; j++) {
            pack.at[j] = from_f32<T>((to_f32(pack.at[j]) - mean.at[j]) * scale.at[j] + shift.at[j]);
        }
        store_pack<N>(y + at, pack);
    }
}

template <class T>
__device__ void norm_normalise(
    const NormShape& shape, const NormBatch& batch, const f32* gamma, const f32* beta, const T* x, T* y, u32 wide) {
    if (wide) {
        norm_normalise_packs<T, PACK<T>>(shape, batch, gamma, beta, x, y);
    } else {
        norm_normalise_packs<T, 1>(shape, batch, gamma, beta, x, y);
    }
}

KERNEL_BOUNDS(norm_normalise_f32, NORM_THREADS)(
    NormShape shape, NormBatch batch, const f32* gamma, const f32* beta, const f32* x, f32* y, u32 wide) {
    norm_normalise(shape, batch, gamma, beta, x, y, wide);
}
KERNEL_BOUNDS(norm_normalise_bf16, NORM_THREADS)(
    NormShape shape, NormBatch batch, const f32* gamma, const f32* beta, const bf16* x, bf16* y, u32 wide) {
    norm_normalise(shape, batch, gamma, beta, x, y, wide);
}
KERNEL_BOUNDS(norm_normalise_f16, NORM_THREADS)(
    NormShape shape, NormBatch batch, const f32* gamma, const f32* beta, const f16* x, f16* y, u32 wide) {
    norm_normalise(shape, batch, gamma, beta, x, y, wide);
}

// `before` is the slope of the activation whose output is the input `x`: 1 without one.
template <class T, u32 N>
__device__ void norm_backward_input_packs(
    const NormShape& shape, const f32* statistics, const f64* sums, const f32* gamma, const T* x, T* gradient,
    f32 before) {
    __shared__ Pack<f32, N> shifts[NORM_THREADS], slopes[NORM_THREADS];
    const NormPosition position = norm_position<N>(shape);
    const u32 width = position.tile * N, first = blockIdx.y * width;
    const f64 count = sums[2 * shape.channels];
    for (u32 column = threadIdx.x; column < width && first + column < shape.channels; column += NORM_THREADS) {
        const u32 c = first + column;
        const f64 inv_std = statistics[shape.channels + c];
        shifts[column / N].at[column % N] = (f32)(sums[c] / count);
        slopes[column / N].at[column % N] = (f32)(sums[shape.channels + c] / count * inv_std);
    }
    __syncthreads();
    if (position.row >= shape.rows) return;
    const Pack<f32, N> shift = shifts[threadIdx.x % position.tile], slope = slopes[threadIdx.x % position.tile];
    const Pack<f32, N> mean = load_channels<N>(statistics + position.channel);
    const Pack<f32, N> inv_std = load_channels<N>(statistics + shape.channels + position.channel);
    Pack<f32, N> scale = load_channels<N>(gamma + position.channel);
    for (u32 j = 0; j < N; j++) scale.at[j] *= inv_std.at[j];
    for (u32 row = position.row; row < shape.rows; row += position.stride) {
        const u32 at = row * shape.channels + position.channel;
        const Pack<T, N> values = load_pack<N>(x + at);
        Pack<T, N> pack = load_pack<N>(gradient + at);
        for (u32 j = 0; j < N; j++) {
            const f32 off = (to_f32(values.at[j]) - mean.at[j]) * slope.at[j];
            pack.at[j] = from_f32<T>(scale.at[j] * (to_f32(pack.at[j]) - shift.at[j] - off));
            pack.at[j] = rectify_gradient(values.at[j], pack.at[j], before);
        }
        store_pack<N>(gradient + at, pack);
    }
}

template <class T>
__device__ void norm_backward_input(
    const NormShape& shape, const f32* statistics, const f64* sums, const f32* gamma, const T* x, T* gradient,
    f32 before, u32 wide) {
    if (wide) {
        norm_backward_input_packs<T, PACK<T>>(shape, statistics, sums, gamma, x, gradient, before);
    } else {
        norm_backward_input_packs<T, 1>(shape, statistics, sums, gamma, x, gradient, before);
    }
}

KERNEL_BOUNDS(norm_backward_input_f32, NORM_THREADS)(
    NormShape shape, const f32* statistics, const f64* sums, const f32* gamma, const f32* x, f32* gradient,
    f32 before, u32 wide) {
    norm_backward_input(shape, statistics, sums, gamma, x, gradient, before, wide);
}
KERNEL_BLOCKS(norm_backward_input_bf16, NORM_THREADS, 3)(
    NormShape shape, const f32* statistics, const f64* sums, const f32* gamma, const bf16* x, bf16* gradient,
    f32 before, u32 wide) {
    norm_backward_input(shape, statistics, sums, gamma, x, gradient, before, wide);
}
KERNEL_BLOCKS(norm_backward_input_f16, NORM_THREADS, 3)(
    NormShape shape, const f32* statistics, const f64* sums, const f32* gamma, const f16* x, f16* gradient,
    f32 before, u32 wide) {
    norm_backward_input(shape, statistics, sums, gamma, x, gradient, before, wide);
}
