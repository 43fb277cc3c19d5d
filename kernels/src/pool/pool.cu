// Max-pooling of NHWC images, alone or with the bias and activation before it. See mod.rs for the contract.
//
// A thread owns one window of a pack of channels. Values are rounded to the type of the activations before they are
// compared, so that the fused kernels choose the same positions as the separate ones, ties included.

struct PoolShape {
    u32 images;
    u32 height;
    u32 width;
    u32 out_height;
    u32 out_width;
    u32 channels;
};

// The index of a window's upper left element, and which of the others lie in the image.
struct PoolWindow {
    u32 corner;
    bool right;
    bool below;
};

__device__ inline PoolWindow pool_window(const PoolShape& shape, u32 image, u32 row, u32 column, u32 channel) {
    const u32 corner = ((image * shape.height + 2 * row) * shape.width + 2 * column) * shape.channels + channel;
    return PoolWindow{corner, 2 * column + 1 < shape.width, 2 * row + 1 < shape.height};
}

// Bias and activation before pooling, for N channels.
template <u32 N>
struct PoolBefore {
    Pack<f32, N> bias;
    f32 slope;
};

template <class T, u32 N, bool FUSED>
__device__ inline Pack<T, N> pool_load(const T* x, const PoolBefore<N>& before) {
    Pack<T, N> pack = load_pack<N>(x);
    if (FUSED) {
        for (u32 j = 0; j < N; j++) {
            pack.at[j] = from_f32<T>(rectify(to_f32(pack.at[j]) + before.bias.at[j], before.slope));
        }
    }
    return pack;
}

template <class T, u32 N, bool FUSED>
__device__ void pool_forward_packs(
    const PoolShape& shape, const T* x, const f32* bias, f32 slope, T* y, u8* chosen) {
    const u32 row_packs = shape.channels / N;
    const u32 packs = shape.images * shape.out_height * shape.out_width * row_packs;
    const u32 to_below = shape.width * shape.channels, to_right = shape.channels;
    for (u32 i = grid_thread(); i < packs; i += grid_threads()) {
        const u32 channel = i % row_packs * N, place = i / row_packs;
        const u32 column = place % shape.out_width, line = place / shape.out_width;
        const u32 row = line % shape.out_height, image = line / shape.out_height;
        const PoolWindow window = pool_window(shape, image, row, column, channel);
        PoolBefore<N> before;
        if (FUSED) before = PoolBefore<N>{load_channels<N>(bias + channel), slope};

        // A position outside the image repeats its neighbour, and is never chosen because it is not larger.
        const T* corner = x + window.corner;
        Pack<T, N> upper[2], lower[2];
        upper[0] = pool_load<T, N, FUSED>(corner, before);
        upper[1] = window.right ? pool_load<T, N, FUSED>(corner + to_right, before) : upper[0];
        lower[0] = window.below ? pool_load<T, N, FUSED>(corner + to_below, before) : upper[0];
        lower[1] = !window.below  ? upper[1]
                   : window.right ? pool_load<T, N, FUSED>(corner + to_below + to_right, before)
                                  : lower[0];
        Pack<T, N> best;
        Pack<u8, N> places;
        for (u32 j = 0; j < N; j++) {
            const bool top = to_f32(upper[1].at[j]) > to_f32(upper[0].at[j]);
            const bool bottom = to_f32(lower[1].at[j]) > to_f32(lower[0].at[j]);
            const T above = top ? upper[1].at[j] : upper[0].at[j];
            const T beneath = bottom ? lower[1].at[j] : lower[0].at[j];
            const bool down = to_f32(beneath) > to_f32(above);
            best.at[j] = down ? beneath : above;
            places.at[j] = (u8)(down ? 2 + bottom : top);
        }
        store_pack<N>(y + i * N, best);
        store_pack<N>(chosen + i * N, places);
    }
}

template <class T, bool FUSED>
__device__ void pool_forward(
    const PoolShape& shape, const T* x, const f32* bias, f32 slope, T* y, u8* chosen, u32 wide) {
    if (wide) {
        pool_forward_packs<T, PACK<T>, FUSED>(shape, x, bias, slope, y, chosen);
    } else {
        pool_forward_packs<T, 1, FUSED>(shape, x, bias, slope, y, chosen);
    }
}

KERNEL(pool_forward_f32)(PoolShape shape, const f32* x, f32* y, u8* chosen, u32 wide) {
    pool_forward<f32, false>(shape, x, nullptr, 1.0f, y, chosen, wide);
}
KERNEL(pool_forward_bf16)(PoolShape shape, const bf16* x, bf16* y, u8* chosen, u32 wide) {
    pool_forward<bf16, false>(shape, x, nullptr, 1.0f, y, chosen, wide);
}
KERNEL(pool_forward_f16)(PoolShape shape, const f16* x, f16* y, u8* chosen, u32 wide) {
    pool_forward<f16, false>(shape, x, nullptr, 1.0f, y, chosen, wide);
}

KERNEL(pool_forward_fused_f32)(
    PoolShape shape, const f32* x, const f32* bias, f32 slope, f32* y, u8* chosen, u32 wide) {
    pool_forward<f32, true>(shape, x, bias, slope, y, chosen, wide);
}
KERNEL(pool_forward_fused_bf16)(
    PoolShape shape, const bf16* x, const f32* bias, f32 slope, bf16* y, u8* chosen, u32 wide) {
    pool_forward<bf16, true>(shape, x, bias, slope, y, chosen, wide);
}
KERNEL(pool_forward_fused_f16)(
    PoolShape shape, const f16* x, const f32* bias, f32 slope, f16* y, u8* chosen, u32 wide) {
    pool_forward<f16, true>(shape, x, bias, slope, y, chosen, wide);
}

// Writes the windows of N channels of dx, and returns the gradient of their outputs, before the activation if FUSED.
template <class T, u32 N, bool FUSED>
__device__ inline Pack<T, N> pool_backward_window(
    const PoolShape& shape, u32 place, u32 channel, const T* dy, const T* y, const u8* chosen, f32 slope, T* dx) {
    const u32 rows = (shape.height + 1) / 2, columns = (shape.width + 1) / 2;
    const u32 column = place % columns, line = place / columns;
    const u32 row = line % rows, image = line / rows;
    const PoolWindow window = pool_window(shape, image, row, column, channel);
    const u32 to_below = shape.width * shape.channels, to_right = shape.channels;
    Pack<T, N> gradient;
    Pack<u8, N> places;
    for (u32 j = 0; j < N; j++) {
        gradient.at[j] = from_f32<T>(0.0f);
        places.at[j] = 0;
    }
    if (row < shape.out_height && column < shape.out_width) {
        const u32 at = ((image * shape.out_height + row) * shape.out_width + column) * shape.channels + channel;
        gradient = load_pack<N>(dy + at);
        places = load_pack<N>(chosen + at);
        if (FUSED) {
            const Pack<T, N> outputs = load_pack<N>(y + at);
            for (u32 j = 0; j < N; j++) gradient.at[j] = rectify_gradient(outputs.at[j], gradient.at[j], slope);
        }
    }
    for (u32 corner = 0; corner < 4; corner++) {
        if ((corner % 2 && !window.right) || (corner / 2 && !window.below)) continue;
        Pack<T, N> part;
        for (u32 j = 0; j < N; j++) part.at[j] = places.at[j] == corner ? gradient.at[j] : from_f32<T>(0.0f);
        store_pack<N>(dx + window.corner + corner / 2 * to_below + corner % 2 * to_right, part);
    }
    return gradient;
}

// Every element of dx is written once. Windows are counted rounding up: those of an odd row or column that is not
// pooled contain only zeros.
__device__ inline u32 pool_windows(const PoolShape& shape) {
    return shape.images * ((shape.height + 1) / 2) * ((shape.width + 1) / 2);
}

template <class T, u32 N>
__device__ void pool_backward_packs(const PoolShape& shape, const T* dy, const u8* chosen, T* dx) {
    const u32 row_packs = shape.channels / N, packs = pool_windows(shape) * row_packs;
    for (u32 i = grid_thread(); i < packs; i += grid_threads()) {
        pool_backward_window<T, N, false>(shape, i / row_packs, i % row_packs * N, dy, nullptr, chosen, 1.0f, dx);
    }
}

template <class T>
__device__ void pool_backward(const PoolShape& shape, const T* dy, const u8* chosen, T* dx, u32 wide) {
    if (wide) {
        pool_backward_packs<T, PACK<T>>(shape, dy, chosen, dx);
    } else {
        pool_backward_packs<T, 1>(shape, dy, chosen, dx);
    }
}

KERNEL(pool_backward_f32)(PoolShape shape, const f32* dy, const u8* chosen, f32* dx, u32 wide) {
    pool_backward(shape, dy, chosen, dx, wide);
}
KERNEL(pool_backward_bf16)(PoolShape shape, const bf16* dy, const u8* chosen, bf16* dx, u32 wide) {
    pool_backward(shape, dy, chosen, dx, wide);
}
KERNEL(pool_backward_f16)(PoolShape shape, const f16* dy, const u8* chosen, f16* dx, u32 wide) {
    pool_backward(shape, dy, chosen, dx, wide);
}

// Also the activation and, as the sum of the pooled gradient, the gradient of the bias. A thread keeps its channels; the
// blocks of a row of the grid share the windows.

#define POOL_THREADS 256u

template <class T, u32 N>
__device__ void pool_backward_fused_packs(
    const PoolShape& shape, const T* dy, const T* y, const u8* chosen, f32 slope, T* dx, const ColumnSums& bias) {
    const u32 row_packs = shape.channels / N, tile = least(row_packs, POOL_THREADS), lanes = POOL_THREADS / tile;
    const u32 lane = threadIdx.x / tile, pack = blockIdx.y * tile + threadIdx.x % tile;
    const u32 windows = lane < lanes && pack < row_packs ? pool_windows(shape) : 0;
    f32 mine[N] = {};
    for (u32 place = blockIdx.x * lanes + lane; place < windows; place += gridDim.x * lanes) {
        const Pack<T, N> gradient = pool_backward_window<T, N, true>(shape, place, pack * N, dy, y, chosen, slope, dx);
        for (u32 j = 0; j < N; j++) mine[j] += to_f32(gradient.at[j]);
    }
    if (!bias.total) return;
    add_columns<POOL_THREADS, N>(bias, mine, shape.channels, tile, blockIdx.y, blockIdx.x, gridDim.x);
}

template <class T>
__device__ void pool_backward_fused(
    const PoolShape& shape, const T* dy, const T* y, const u8* chosen, f32 slope, T* dx, const ColumnSums& bias,
    u32 wide) {
    if (wide) {
        pool_backward_fused_packs<T, PACK<T>>(shape, dy, y, chosen, slope, dx, bias);
    } else {
        pool_backward_fused_packs<T, 1>(shape, dy, y, chosen, slope, dx, bias);
    }
}

KERNEL_BOUNDS(pool_backward_fused_f32, POOL_THREADS)(
    PoolShape shape, const f32* dy, const f32* y, const u8* chosen, f32 slope, f32* dx, ColumnSums bias, u32 wide) {
    pool_backward_fused(shape, dy, y, chosen, slope, dx, bias, wide);
}
KERNEL_BOUNDS(pool_backward_fused_bf16, POOL_THREADS)(
    PoolShape shape, const bf16* dy, const bf16* y, const u8* chosen, f32 slope, bf16* dx, ColumnSums bias, u32 wide) {
    pool_backward_fused(shape, dy, y, chosen, slope, dx, bias, wide);
}
KERNEL_BOUNDS(pool_backward_fused_f16, POOL_THREADS)(
    PoolShape shape, const f16* dy, const f16* y, const u8* chosen, f32 slope, f16* dx, ColumnSums bias, u32 wide) {
    pool_backward_fused(shape, dy, y, chosen, slope, dx, bias, wide);
}
