// Where the results of the matrix products go, and what is computed on the way: bias, activation, pooling and dropout
// after a layer in the forward pass, those before it in the backward pass. Included after extents.cuh.
//
// A result receives units of four rows and four columns. Every step rounds to the type of the activations, as when the
// operations are launched one by one, so the bits are the same.

// N values side by side, of which `known` lie in the matrix: all of them with VECTOR.
template <u32 N, bool VECTOR, class T>
__device__ inline void store_values(T* to, const T values[N], u32 known) {
    if constexpr (VECTOR) {
        Pack<T, N> pack;
#pragma unroll
        for (u32 e = 0; e < N; e++) pack.at[e] = values[e];
        store_pack(to, pack);
    } else {
#pragma unroll
        for (u32 e = 0; e < N; e++) {
            if (e < known) to[e] = values[e];
        }
    }
}

template <u32 N, bool VECTOR, class T>
__device__ inline void load_values(const T* from, T values[N], u32 known) {
    if constexpr (VECTOR) {
        const Pack<T, N> pack = load_pack<N>(from);
#pragma unroll
        for (u32 e = 0; e < N; e++) values[e] = pack.at[e];
    } else {
#pragma unroll
        for (u32 e = 0; e < N; e++) values[e] = e < known ? from[e] : T{};
    }
}

// Dropout of N neighbours in memory, from index `at` on.
template <u32 N, class T>
__device__ inline void drop_values(const DropoutMask& mask, const StepState* state, u32 at, T values[N], u32 known) {
    const u64 base = mask.base(state);
    u64 element = mask.element(at);
    for (u32 e = 0; e < N; e++) {
        if (e < known) values[e] = mask.apply(base, element, values[e]);
        // The next one may be of another position.
        element = mask.channels % N == 0 && at % N == 0 ? element + mask.plane : mask.element(at + e + 1);
    }
}

// ---- Sums over slices of the depth ----

// If a pass has too few tiles to fill a GPU, its depth is cut into slices, with a block for each slice of each tile.
struct DepthSums {
    f32* slices;     // if there are several: those of one tile after another, as their threads hold them
    u32* counters;   // one for each tile
};

// Makes the sums of a slice those of the whole depth, in the last block of a tile; false in the others. That block adds up
// the slices in their order, so the result does not depend on which one it is. Threads hold the same places of the tile
// in all blocks, so they write and read 16 bytes beside each other's, whatever the width of the result, and what follows
// is as without slices. Only those of the `rows` and `columns` that exist are moved.
template <class TILE, class PRODUCT>
__device__ inline bool add_depth(PRODUCT& product, const DepthSums& sums, u32 rows, u32 columns) {
    constexpr u32 LEN = TILE::SIDE * TILE::SIDE, STRIDE = 4 * TILE::THREADS, FOURS = LEN / STRIDE;
    const u32 slices = gridDim.y;
    if (slices == 1) return true;
    f32* from = sums.slices + (u64)blockIdx.x * slices * LEN + 4 * threadIdx.x;
    f32* to = from + blockIdx.y * LEN;
    product.each_four([&](u32 index, u32 row, u32 column, const f32* four) {
        if (row >= rows || column >= columns) return;
        *(Quad*)(to + index * STRIDE) = Quad{{bits_of(four[0]), bits_of(four[1]), bits_of(four[2]), bits_of(four[3])}};
    });
    if (!arrives_last(sums.counters + blockIdx.x, slices)) return false;
    product.each_four([&](u32, u32, u32, f32* four) { four[0] = four[1] = four[2] = four[3] = 0.0f; });
    // One block does this, so many loads are in flight.
#pragma unroll 2
    for (u32 slice = 0; slice < slices; slice++, from += LEN) {
        f32 values[FOURS][4];
        product.each_four([&](u32 index, u32 row, u32 column, const f32*) {
            if (row < rows && column < columns) fresh_four(from + index * STRIDE, values[index]);
        });
        product.each_four([&](u32 index, u32 row, u32 column, f32* four) {
            if (row >= rows || column >= columns) return;
#pragma unroll
            for (u32 e = 0; e < 4; e++) four[e] += values[index][e];
        });
    }
    return true;
}

// ---- The forward pass ----

// What follows the activation.
struct After {
    u8* chosen;              // receives the positions of the maxima; null without pooling
    const StepState* state;  // null without dropout
    ImageExtents pooled;     // the extents of the output, if it is pooled
    DropoutMask mask;
};

// Rows are output pixels, or with pooling those of one window after another. With VECTOR, four columns are written at once
// if their number is a multiple of four.
template <class T, bool VECTOR>
struct ForwardResult {
    T* y;
    const f32* bias;
    const Convolution& shape;
    const After& after;
    u32 first_row, first_column;
    u32 end = ~0u;   // rows from here on are not written

    __device__ u32 rows() const { return least(end, after.chosen ? 4 * after.pooled.pixels : shape.output.pixels); }

    __device__ void unit(u32 down, u32 across, const f32 values[4][4]) const {
        const u32 row = first_row + down, column = first_column + across, columns = shape.output.channels;
        if (row >= rows() || column >= columns) return;
        const u32 known = least(4u, columns - column);
        T activated[4][4];
#pragma unroll
        for (u32 e = 0; e < 4; e++) {
            const f32 shift = e < known ? bias[column + e] : 0.0f;
#pragma unroll
            for (u32 r = 0; r < 4; r++) activated[r][e] = from_f32<T>(rectify(values[r][e] + shift, shape.slope));
        }
        if (after.chosen) {
            pool(row / 4, column, known, activated);
            return;
        }
#pragma unroll
        for (u32 r = 0; r < 4; r++) {
            if (row + r < rows()) store((row + r) * columns + column, activated[r], known);
        }
    }

    // The maximum of a window, which is the first of equal values.
    __device__ void pool(u32 window, u32 column, u32 known, const T values[4][4]) const {
        u32 i, j;
        after.pooled.place(window, i, j);
        const bool right = 2 * j + 1 < shape.output.width, below = 2 * i + 1 < shape.output.height;
        T best[4];
        u8 places[4];
#pragma unroll
        for (u32 e = 0; e < 4; e++) {
            best[e] = values[0][e], places[e] = 0;
#pragma unroll
            for (u32 r = 1; r < 4; r++) {
                const bool inside = (r % 2 == 0 || right) && (r / 2 == 0 || below);
                if (inside && to_f32(values[r][e]) > to_f32(best[e])) best[e] = values[r][e], places[e] = (u8)r;
            }
        }
        const u32 at = window * shape.output.channels + column;
        store_columns(after.chosen + at, places, known);
        store(at, best, known);
    }

    __device__ void store(u32 at, T values[4], u32 known) const {
        if (after.state) drop_values<4>(after.mask, after.state, at, values, known);
        store_columns(y + at, values, known);
    }

    template <class S>
    __device__ void store_columns(S* to, const S values[4], u32 known) const {
        if (VECTOR && shape.output.channels % 4 == 0) {
            store_values<4, true>(to, values, known);
        } else {
            store_values<4, false>(to, values, known);
        }
    }
};

// ---- The gradient of the input ----

// What precedes the layer: its input is the output `y` of an activation, perhaps pooled and dropped out. The gradient
// is then that before the activation, with zeros for pixels that were not chosen.
struct Before {
    const void* y;           // null if the gradient is not wanted before the activation
    const u8* chosen;        // null without pooling
    const StepState* state;  // null without dropout
    u32 channels, height, width;   // of the input as images
    u32 unpooled_height, unpooled_width;
    f32 slope;
    DropoutMask mask;
};

// It receives N neighbouring channels at once.
template <class T, bool VECTOR, u32 N = 4>
struct InputResult {
    T* dx;
    u32 rows, columns;
    const Before& before;
    u32 first_row, first_column;

    __device__ void unit(u32 down, u32 across, const f32 values[4][4]) const {
        const u32 row = first_row + down, column = first_column + across;
        if (column >= columns) return;
        const u32 known = VECTOR ? 4 : least(4u, columns - column);
        // Not unrolled, because this is long.
#pragma unroll 1
        for (u32 r = 0; r < 4 && row + r < rows; r++) {
            T gradient[4];
#pragma unroll
            for (u32 e = 0; e < 4; e++) {
                // An index that is known at compile time keeps the values in registers.
                const f32 value = r == 0 ? values[0][e] : r == 1 ? values[1][e] : r == 2 ? values[2][e] : values[3][e];
                gradient[e] = from_f32<T>(value);
            }
            finish((row + r) * columns + column, gradient, known, [&](u32 at) { return place(at); });
        }
    }

    // Where an element of the pooled input is.
    struct Place {
        u32 image, row, column, channel;
    };

    __device__ Place place(u32 at) const {
        const u32 pixel = at / before.channels, line = pixel / before.width;
        return {line / before.height, line % before.height, pixel % before.width, at % before.channels};
    }

    // Stores the gradients of the elements from index `at` on. `place` finds an element if the input was pooled.
    template <class PLACE>
    __device__ void finish(u32 at, T gradient[N], u32 known, const PLACE& place) const {
        if (before.state) drop_values<N>(before.mask, before.state, at, gradient, known);
        if (before.y) {
            T y[N];
            load_values<N, VECTOR>((const T*)before.y + at, y, known);
#pragma unroll
            for (u32 e = 0; e < N; e++) gradient[e] = rectify_gradient(y[e], gradient[e], before.slope);
        }
        if (!before.chosen) {
            store_values<N, VECTOR>(dx + at, gradient, known);
            return;
        }
        u8 places[N];
        load_values<N, VECTOR>(before.chosen + at, places, known);
        if (VECTOR && before.channels % N == 0) {
            unpool<true>(place(at), gradient, places);
        } else {
#pragma unroll
            for (u32 e = 0; e < N; e++) {
                if (e < known) unpool<false>(place(at + e), gradient + e, places + e);
            }
        }
    }

    // Writes the window of an output of the pooling layer, or those of N neighbouring channels, with the pixels that
    // an odd extent leaves over.
    template <bool WIDE>
    __device__ void unpool(const Place& at, const T* gradient, const u8* places) const {
        const u32 i = at.row, j = at.column;
        const u32 bottom = i + 1 == before.height ? before.unpooled_height : 2 * i + 2;
        const u32 right = j + 1 == before.width ? before.unpooled_width : 2 * j + 2;
        for (u32 y = 2 * i; y < bottom; y++) {
            for (u32 x = 2 * j; x < right; x++) {
                const u32 v = x - 2 * j, place = v < 2 ? 2 * (y - 2 * i) + v : 4;
                const u64 line = (u64)at.image * before.unpooled_height + y;
                T* to = dx + (line * before.unpooled_width + x) * before.channels + at.channel;
                T part[N];
#pragma unroll
                for (u32 e = 0; e < (WIDE ? N : 1); e++) part[e] = places[e] == place ? gradient[e] : from_f32<T>(0.0f);
                if constexpr (WIDE) {
                    store_values<N, true>(to, part, N);
                } else {
                    to[0] = part[0];
                }
            }
        }
    }
};

// ---- The gradients of weights and bias ----

// The sums of a slice are those of all weights, then those of the biases.
struct WeightSums {
    f32* slices;   // if there are several
    f32* weights;
    f32* bias;     // null if it is not wanted
    u32* counters;
};

// The columns of the product are numbered as those of the weights, or with UNIT channels instead of `channels`, of which
// the others do not exist.
template <bool VECTOR, u32 UNIT>
struct WeightsResult {
    f32* weights;
    u32 rows, columns;
    u32 first_row, first_column;
    u32 channels;

    // Finds the column of the weights for that of the product, and how many of them belong together from there on.
    __device__ bool place(u32 across, u32& column, u32& known) const {
        column = first_column + across;
        known = columns - column;
        if constexpr (UNIT != 0) {
            const u32 channel = column % UNIT;
            if (channel >= channels) return false;
            column = column / UNIT * channels + channel;
            known = channels - channel;
        }
        return column < columns;
    }

    __device__ void unit(u32 down, u32 across, const f32 values[4][4]) const {
        const u32 row = first_row + down;
        u32 column, known;
        if (!place(across, column, known)) return;
#pragma unroll
        for (u32 r = 0; r < 4; r++) {
            f32* to = weights + ((u64)(row + r) * columns + column);
            if (row + r < rows) store_values<4, VECTOR>(to, values[r], known);
        }
    }

    // Writes a unit of the sum of `count` slices, from `from` on.
    __device__ void add(u32 down, u32 across, const f32* from, u64 stride, u32 count) const {
        const u32 row = first_row + down;
        u32 column, known;
        if (row >= rows || !place(across, column, known)) return;
        f32 sums[4][4] = {};
        const auto load = [&](u32 i, f32(&values)[4][4]) {
#pragma unroll
            for (u32 r = 0; r < 4; r++) {
                // Beyond the last row or column another value is read, and not used.
                const f32* line = from + i * stride + (u64)least(row + r, rows - 1) * columns;
                if constexpr (VECTOR) {
                    fresh_four(line + column, values[r]);
                } else {
#pragma unroll
                    for (u32 e = 0; e < 4; e++) values[r][e] = fresh(line + least(column + e, columns - 1));
                }
            }
        };
        each_slice<4, f32[4][4]>(count, load, [&](const f32(&values)[4][4]) {
#pragma unroll
            for (u32 e = 0; e < 16; e++) sums[e / 4][e % 4] += values[e / 4][e % 4];
        });
        unit(down, across, sums);
    }
};
