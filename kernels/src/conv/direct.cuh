// Direct convolutions of images with few channels and few filters, for elements of 16 bits on tensor cores: up to 8
// channels and 16 filters, with kernels of 3x3 and 5x5. Included after results.cuh.
//
// As products of gathered matrices (conv.cuh) such layers would fill a tile in part only, and read every pixel once for
// each tap. Here a block has a band of an image in shared memory, and a warp's product takes the pixels that a tap covers from
// there: the rows of a matrix that ldmatrix loads may be anywhere. A band is a number of rows of the result (or of pairs of
// rows that are pooled), with the rows of the operands that they need.
//
// Eight channels of a pixel are a unit of 16 bytes, channels that do not exist are zeros. Units of neighbouring pixels are
// neighbours, and the filters from the ninth on have a plane of their own, so eight pixels in a row lie in all banks.
//
// | pass | rows of a product | its depth | columns |
// |---|---|---|---|
// | forward | 16 pixels | 8 channels of 2 taps | 8 filters |
// | backward_input | 16 pixels | 16 filters of a tap | 8 channels |
// | backward_weights | 16 filters | 16 pixels | 8 channels of a tap |
//
// A depth beyond the last tap or pixel reads a unit of zeros, so that no result depends on values that do not belong to it, not
// even on a NaN. A row beyond the last pixel reads that pixel's values again, and is not written.

#define DIRECT_THREADS 128u
#define DIRECT_WEIGHTS_THREADS 256u
#define BAND_UNITS 512u   // maximum number of pixels of a band

// Rows of a band, and bands of all images.
struct RowBands {
    u32 rows, count;
};

struct RowBand {
    u32 image, first, rows;
};

// Band `index` of images of this height.
__device__ inline RowBand band_of(const RowBands& bands, u32 index, u32 height) {
    const u32 each = (height + bands.rows - 1) / bands.rows, first = index % each * bands.rows;
    return {index / each, first, least(bands.rows, height - first)};
}

// A plane of a band: units of pixels, and one of zeros.
struct BandPlane {
    static constexpr u32 ZEROS = BAND_UNITS;
    Quad units[BAND_UNITS + 1];

    __device__ const u32* at(u32 unit) const { return units[unit].word; }
};

// The pixels of an image that a band covers: `rows` by `columns`, from this row and column on, which may be negative.
struct Area {
    u32 first_row, first_column, rows, columns;
};

// Loads an area of image `image` to PLANES planes, with zeros outside the image. Threads have finished the band before.
template <u32 PLANES, u32 THREADS, class T>
__device__ inline void load_area(
    BandPlane planes[PLANES], const T* values, const ImageExtents& extents, u32 image, const Area& area) {
    const u32 count = area.rows * area.columns, channels = extents.channels;
    const T* from = values + (u64)image * extents.height * extents.width * channels;
    // Several loads are in flight before the first unit is stored.
    constexpr u32 AT_ONCE = 2;
    for (u32 begin = threadIdx.x; begin < count; begin += AT_ONCE * THREADS) {
        Quad loaded[AT_ONCE][PLANES];
#pragma unroll
        for (u32 n = 0; n < AT_ONCE; n++) {
            const u32 i = begin + n * THREADS;
            const u32 row = area.first_row + i / area.columns, column = area.first_column + i % area.columns;
            const bool inside = i < count && row < extents.height && column < extents.width;
            const T* pixel = from + (row * extents.width + column) * channels;
#pragma unroll
            for (u32 plane = 0; plane < PLANES; plane++) {
                const u32 known = inside && channels > 8 * plane ? least(8u, channels - 8 * plane) : 0;
                if (known == 8) {
                    loaded[n][plane] = *(const Quad*)(pixel + 8 * plane);
                } else {
                    loaded[n][plane] = NarrowSource<T>{pixel, known / 2}.load();
                }
            }
        }
#pragma unroll
        for (u32 n = 0; n < AT_ONCE; n++) {
#pragma unroll
            for (u32 plane = 0; plane < PLANES; plane++) {
                if (begin + n * THREADS < count) planes[plane].units[begin + n * THREADS] = loaded[n][plane];
            }
        }
    }
}

template <u32 PLANES>
__device__ inline void clear_zeros(BandPlane planes[PLANES]) {
    if (threadIdx.x < PLANES) planes[threadIdx.x].units[BandPlane::ZEROS] = Quad{};
}

// The lane's part in a product: it has rows `group` and `group + 8` of the result, and of both columns 2 `member` and the
// next one.
struct Lane {
    u32 index, group, member;

    __device__ Lane() : index(threadIdx.x % WARP), group(index / 4), member(index % 4) {}

    // The matrix of which it passes a row to ldmatrix, and which row.
    __device__ u32 matrix() const { return index / 8; }
    __device__ u32 row() const { return index % 8; }
};

// ---- Forward pass ----

// A warp computes eight groups of four rows of ForwardResult, that is four pixels of a row each or the window that is
// pooled: two products, of the first and of the last two pixels of the groups. The filters are in such an order that a
// lane has four neighbours.
template <class T, u32 K>
__device__ inline void direct_forward(
    const T* x, const T* w, const f32* bias, T* y, const Convolution& shape, const After& after, const RowBands& bands) {
    constexpr u32 TAPS = K * K, STEPS = (TAPS + 1) / 2, WARPS = DIRECT_THREADS / WARP;
    __shared__ BandPlane input;
    const Lane lane;
    const u32 channels = shape.input.channels, filters = shape.output.channels, warp = threadIdx.x / WARP;
    // The right operands: two channels of a tap and a filter.
    u32 weights[STEPS][2][2];
#pragma unroll
    for (u32 i = 0; i < 4 * STEPS; i++) {
        const u32 tile = i / 2 % 2, tap = i / 4 * 2 + i % 2, filter = lane.group / 2 * 4 + tile * 2 + lane.group % 2;
        const bool known = tap < TAPS && filter < filters && 2 * lane.member < channels;
        weights[i / 4][tile][i % 2] = known ? *(const u32*)(w + (filter * TAPS + tap) * channels + 2 * lane.member) : 0;
    }
    const bool pools = after.chosen;
    const u32 high = pools ? 2 : 1, width = pools ? after.pooled.width : shape.output.width;
    const u32 height = pools ? after.pooled.height : shape.output.height, stride = high * width + K - 1;
    const bool second = lane.matrix() / 2, right = lane.matrix() % 2;
    clear_zeros<1>(&input);
    for (u32 index = blockIdx.x; index < bands.count; index += gridDim.x) {
        const RowBand band = band_of(bands, index, height);
        __syncthreads();
        load_area<1, DIRECT_THREADS>(
            &input, x, shape.input, band.image,
            {high * band.first - shape.pad, 0u - shape.pad, high * band.rows + K - 1, stride});
        __syncthreads();
        const u32 pixels = band.rows * width, groups = pools ? pixels : (pixels + 3) / 4;
        const u32 first = (band.image * height + band.first) * width;
        const ForwardResult<T, true> result{y, bias, shape, after, pools ? 4 * first : first, 0,
                                            pools ? ~0u : first + pixels};
        for (u32 piece = warp * 8; piece < groups; piece += WARPS * 8) {
            // The pixels whose units this lane passes to ldmatrix.
            u32 units[2];
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                const u32 group = least(piece + lane.row(), groups - 1);
                const u32 pixel = pools ? group : least(4 * group + 2 * i + right, pixels - 1);
                const u32 row = pixel / width, column = pixel % width;
                units[i] = pools ? (2 * row + i) * stride + 2 * column + right : row * stride + column;
            }
            f32 sums[2][2][4] = {};
#pragma unroll
            for (u32 step = 0; step < STEPS; step++) {
                const u32 tap = 2 * step, next = tap + 1;
                const u32 offset = second ? next / K * stride + next % K : tap / K * stride + tap % K;
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
                    u32 a[4];
                    load_matrices<true>(a, input.at(next == TAPS && second ? BandPlane::ZEROS : units[i] + offset));
                    multiply_add(sums[i][0], a, weights[step][0], T{});
                    multiply_add(sums[i][1], a, weights[step][1], T{});
                }
            }
            f32 values[4][4];
#pragma unroll
            for (u32 e = 0; e < 16; e++) values[e / 4][e % 4] = sums[e / 8][e % 4 / 2][e / 4 % 2 * 2 + e % 2];
            if (piece + lane.group < groups) result.unit(4 * (piece + lane.group), 4 * lane.member, values);
        }
    }
}

// ---- The gradient of the input ----

// Tap t of an input pixel reads the gradient K - 1 - t rows and columns after the first that its kernel reaches.
template <class T, u32 K>
__device__ inline void direct_backward_input(
    const T* w, const T* dy, T* dx, const Convolution& shape, const Before& before, const RowBands& bands) {
    constexpr u32 TAPS = K * K, WARPS = DIRECT_THREADS / WARP;
    __shared__ BandPlane gradients[2];
    const Lane lane;
    const u32 channels = shape.input.channels, filters = shape.output.channels, warp = threadIdx.x / WARP;
    // The right operands: two filters of a tap and a channel.
    u32 weights[TAPS][2];
#pragma unroll
    for (u32 i = 0; i < 2 * TAPS; i++) {
        const u32 tap = i / 2, filter = i % 2 * 8 + 2 * lane.member;
        const bool known = filter < filters && lane.group < channels;
        const T* from = w + (filter * TAPS + tap) * channels + lane.group;
        weights[tap][i % 2] = known ? from[0].bits | (u32)from[TAPS * channels].bits << 16 : 0;
    }
    const u32 height = shape.input.height, width = shape.input.width, stride = width + K - 1;
    const u32 plane = lane.matrix() / 2;
    using Result = InputResult<T, true, 2>;
    const Result result{dx, shape.input.pixels, channels, before, 0, 0};
    for (u32 index = blockIdx.x; index < bands.count; index += gridDim.x) {
        const RowBand band = band_of(bands, index, height);
        const u32 border = K - 1 - shape.pad;
        __syncthreads();
        load_area<2, DIRECT_THREADS>(
            gradients, dy, shape.output, band.image, {band.first - border, 0u - border, band.rows + K - 1, stride});
        __syncthreads();
        const u32 pixels = band.rows * width, first = (band.image * height + band.first) * width;
        for (u32 piece = warp * 16; piece < pixels; piece += WARPS * 16) {
            const u32 own = least(piece + lane.matrix() % 2 * 8 + lane.row(), pixels - 1);
            const u32 unit = own / width * stride + own % width;
            // Two sums, so that a product does not wait for the one before.
            f32 sums[2][4] = {};
#pragma unroll
            for (u32 tap = 0; tap < TAPS; tap++) {
                u32 a[4];
                load_matrices<true>(a, gradients[plane].at(unit + (K - 1 - tap / K) * stride + K - 1 - tap % K));
                multiply_add(sums[tap % 2], a, weights[tap], T{});
            }
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                const u32 pixel = piece + 8 * half + lane.group, channel = 2 * lane.member;
                T gradient[2];
#pragma unroll
                for (u32 e = 0; e < 2; e++) gradient[e] = from_f32<T>(sums[0][2 * half + e] + sums[1][2 * half + e]);
                if (pixel < pixels && channel < channels) {
                    result.finish((first + pixel) * channels + channel, gradient, 2, [&](u32) {
                        return typename Result::Place{
                            band.image, band.first + pixel / width, pixel % width, channel};
                    });
                }
            }
        }
    }
}

// ---- The gradients of weights and bias ----

// Each warp has some of the pairs of taps, of all pixels. The gradient of the bias is a product with ones.
template <class T, u32 K>
__device__ inline void direct_backward_weights(
    const T* x, const T* dy, const Convolution& shape, const WeightSums& result, const RowBands& bands) {
    constexpr u32 TAPS = K * K, WARPS = DIRECT_WEIGHTS_THREADS / WARP, PAIRS = (TAPS + 2 * WARPS - 1) / (2 * WARPS);
    __shared__ BandPlane input, gradients[2];
    const Lane lane;
    const u32 channels = shape.input.channels, filters = shape.output.channels, warp = threadIdx.x / WARP;
    const u32 height = shape.output.height, width = shape.output.width, stride = width + K - 1;
    const u32 one = from_f32<T>(1.0f).bits, ones[2] = {one | one << 16, one | one << 16};
    const auto tap_of = [&](u32 pair, u32 i) { return 2 * (warp + pair * WARPS) + i; };
    u32 offsets[PAIRS];
#pragma unroll
    for (u32 pair = 0; pair < PAIRS; pair++) {
        const u32 tap = tap_of(pair, lane.matrix() / 2);
        offsets[pair] = tap < TAPS ? tap / K * stride + tap % K : 0;
    }
    f32 sums[PAIRS][2][4] = {}, bias[4] = {};
    clear_zeros<1>(&input);
    clear_zeros<2>(gradients);
    for (u32 index = blockIdx.x; index < bands.count; index += gridDim.x) {
        const RowBand band = band_of(bands, index, height);
        __syncthreads();
        load_area<1, DIRECT_WEIGHTS_THREADS>(
            &input, x, shape.input, band.image, {band.first - shape.pad, 0u - shape.pad, band.rows + K - 1, stride});
        load_area<2, DIRECT_WEIGHTS_THREADS>(
            gradients, dy, shape.output, band.image, {band.first, 0, band.rows, width});
        __syncthreads();
        const u32 pixels = band.rows * width;
        for (u32 piece = 0; piece < pixels; piece += 16) {
            u32 a[4];
            const u32 left = piece + lane.matrix() / 2 * 8 + lane.row(), right = piece + lane.matrix() % 2 * 8 + lane.row();
            load_matrices_transposed<true>(a, gradients[lane.matrix() % 2].at(left < pixels ? left : BandPlane::ZEROS));
            const u32 unit = right / width * stride + right % width;
#pragma unroll
            for (u32 pair = 0; pair < PAIRS; pair++) {
                u32 b[4];
                load_matrices_transposed<true>(b, input.at(right < pixels ? unit + offsets[pair] : BandPlane::ZEROS));
                multiply_add(sums[pair][0], a, b, T{});
                multiply_add(sums[pair][1], a, b + 2, T{});
            }
            if (warp == WARPS - 1) multiply_add(bias, a, ones, T{});
        }
    }
    const bool alone = gridDim.x == 1;
    const u32 len = filters * TAPS * channels, slice_len = len + filters;
    f32* slice = result.slices + (u64)blockIdx.x * slice_len;
    f32 *dw = alone ? result.weights : slice, *db = alone ? result.bias : slice + len;
#pragma unroll
    for (u32 i = 0; i < 4 * PAIRS; i++) {
        const u32 tap = tap_of(i / 4, i / 2 % 2), filter = lane.group + i % 2 * 8, channel = 2 * lane.member;
        if (tap >= TAPS || filter >= filters || channel >= channels) continue;
        const f32* from = sums[i / 4][i / 2 % 2] + i % 2 * 2;
        store_values<2, true>(dw + (filter * TAPS + tap) * channels + channel, from, 2);
    }
    if (warp == WARPS - 1 && lane.member == 0 && result.bias) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            if (lane.group + 8 * half < filters) db[lane.group + 8 * half] = bias[2 * half];
        }
    }
    if (alone) return;
    // The weights, and so the bias, are a multiple of four numbers.
    add_slices(result.counters, blockIdx.x, gridDim.x, [&](u32 first, u32 step, u32 count, bool total) {
        const u32 all = result.bias ? slice_len : len;
        for (u32 i = 4 * threadIdx.x; i < all; i += 4 * DIRECT_WEIGHTS_THREADS) {
            f32* from = result.slices + (u64)first * slice_len + i;
            f32 sum[4] = {};
            each_slice<8, f32[4]>(
                count, [&](u32 n, f32(&values)[4]) { fresh_four(from + (u64)n * step * slice_len, values); },
                [&](const f32(&values)[4]) {
#pragma unroll
                    for (u32 e = 0; e < 4; e++) sum[e] += values[e];
                });
            f32* to = !total ? from : i < len ? result.weights + i : result.bias + (i - len);
            store_values<4, true>(to, sum, 4);
        }
    });
}
