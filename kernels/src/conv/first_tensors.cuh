// Convolutions of images with one channel on tensor cores, for elements of 16 bits (first.cuh has the plain ones).
//
// A warp multiplies 16x16 by 16x8 elements at once. In the forward pass those are 16 pixels by 16 taps, and 16 taps by 8
// filters; in the backward pass 16 taps by 16 pixels, and 16 pixels by 8 filters. Rows, columns and depths of a product
// may be in any order, so they are chosen for the accesses to memory:
//
// - A word of an operand has two neighbouring depths: two taps of a row of the kernel, or two pixels of a row. The band
//   is in shared memory twice, the second time one element earlier, so that a pair of neighbours in any column is a word.
// - A lane's filters are neighbours in memory, as are those of the lanes that have the same pixels.
// - With pooling, a lane has all pixels of a window.
//
// A pair may have one tap or pixel only, at the end of a row of the kernel or of the image. The other half is set to zero
// before it is multiplied, so that no result depends on values that do not belong to it, not even on a NaN.
//
// While a band is multiplied, the next one is loaded to the other buffer; and the backward pass loads a warp's next
// gradients before it multiplies those at hand.

#define FIRST_WARPS (FIRST_THREADS / WARP)

#ifdef F16_TENSOR_CORES
__device__ inline void multiply_pairs(f32 d[4], const u32 a[4], const u32 b[2], f16) { mma_f16_16816(d, a, b); }
#endif
#ifdef TENSOR_CORES
__device__ inline void multiply_pairs(f32 d[4], const u32 a[4], const u32 b[2], bf16) { mma_bf16_16816(d, a, b); }
#endif

// Whether there are tensor cores for a type here.
template <class T>
struct FirstTensors {
    static constexpr bool KNOWN = false;
};

#ifdef F16_TENSOR_CORES
template <>
struct FirstTensors<f16> {
    static constexpr bool KNOWN = true;
};
#endif
#ifdef TENSOR_CORES
template <>
struct FirstTensors<bf16> {
    static constexpr bool KNOWN = true;
};
#endif

// A band in shared memory, as pairs of neighbours; in `odd` each begins one element later. The last pairs of a band
// reach into the row after it, so there are a few more words than values need.
struct BandPairs {
    static constexpr u32 WORDS = BAND_VALUES / 2 + 4;
    u32 even[WORDS], odd[WORDS];

    // Index of the pair that begins in this column, counted from `even` on.
    static __device__ u32 at(u32 row, u32 column, u32 row_words) {
        return column % 2 * WORDS + row * row_words + column / 2;
    }

    template <class T, u32 K, u32 HIGH>
    __device__ Band load(const T* x, const OneChannel& shape, u32 index) {
        u16 *first = (u16*)even, *second = (u16*)odd;
        return read_band<T, K, HIGH>(x, shape, index, [&](u32 i, T value) {
            first[i] = value.bits;
            if (i > 0) second[i - 1] = value.bits;
        });
    }
};

// Keeps both halves of a pair, only the first one, or none.
__device__ inline u32 pair_mask(u32 known) { return known >= 2 ? ~0u : known == 1 ? 0xffffu : 0u; }

// True if N elements of a pixel, from a multiple of N on, can be moved at once.
template <u32 N, class T>
__device__ inline bool has_vectors(const OneChannel& shape, const T* elements) {
    return shape.filters % N == 0 && (u64)elements % (N * sizeof(T)) == 0;
}

// N elements of a pixel, from filter `first` on; zeros beyond the last filter.
template <u32 N, class T>
__device__ inline Pack<T, N> load_filters(const T* pixel, u32 first, u32 filters, bool vectors) {
    Pack<T, N> pack{};
    if (vectors) {
        if (first < filters) pack = load_pack<N>(pixel + first);
        return pack;
    }
#pragma unroll
    for (u32 i = 0; i < N; i++) {
        if (first + i < filters) pack.at[i] = pixel[first + i];
    }
    return pack;
}

template <u32 N, class T>
__device__ inline void store_filters(T* pixel, u32 first, u32 filters, const Pack<T, N>& pack, bool vectors) {
    if (vectors) {
        if (first < filters) store_pack(pixel + first, pack);
        return;
    }
#pragma unroll
    for (u32 i = 0; i < N; i++) {
        if (first + i < filters) pixel[first + i] = pack.at[i];
    }
}

// ---- Forward pass ----

// The pairs of taps of a kernel, row by row; eight of them are the depth of one product.
template <u32 K>
struct TapPairs {
    static constexpr u32 ACROSS = (K + 1) / 2, COUNT = K * ACROSS, STEPS = (COUNT + 7) / 8;
    static __device__ u32 row(u32 pair) { return pair / ACROSS; }
    static __device__ u32 column(u32 pair) { return pair % ACROSS * 2; }
    static __device__ u32 known(u32 pair) { return pair < COUNT ? least(2u, K - column(pair)) : 0; }
};

// The order of the 8 * TILES filters of a block as columns of TILES products. A lane has two columns of each product: in
// all, EACH neighbouring filters, which it stores at once and the next lane continues.
template <u32 TILES>
struct FilterColumns {
    static constexpr u32 EACH = 2 * TILES;
    static __device__ u32 of(u32 tile, u32 column) { return column / 2 * EACH + tile * 2 + column % 2; }
};

template <class T, u32 K, u32 TILES, u32 HIGH>
__device__ inline void first_forward_tensors(
    const T* x, const T* w, const f32* bias, T* y, u8* chosen, const OneChannel& shape, const FirstDropout& dropout) {
    using Pairs = TapPairs<K>;
    using Columns = FilterColumns<TILES>;
    constexpr u32 STEPS = Pairs::STEPS, EACH = Columns::EACH;
    // The pixels or windows that a warp computes at once.
    constexpr u32 PIECE = HIGH == 1 ? 16 : 8;
    __shared__ BandPairs buffers[2];
    const u32 warp = threadIdx.x / WARP, group = threadIdx.x % WARP / 4, member = threadIdx.x % 4;
    const u32 begin = blockIdx.y * (8 * TILES), row_words = band_stride(shape) / 2;
    // Of the lane's pairs of taps.
    u32 offsets[STEPS][2], masks[STEPS][2], weights[TILES][STEPS][2];
#pragma unroll
    for (u32 i = 0; i < 2 * STEPS; i++) {
        const u32 pair = 4 * i + member, row = Pairs::row(pair), column = Pairs::column(pair), known = Pairs::known(pair);
        offsets[i / 2][i % 2] = known > 0 ? BandPairs::at(row, column, row_words) : 0;
        masks[i / 2][i % 2] = pair_mask(known);
#pragma unroll
        for (u32 t = 0; t < TILES; t++) {
            const u32 filter = begin + Columns::of(t, group);
            const T* from = w + filter * (K * K) + row * K + column;
            u32 word = 0;
            if (filter < shape.filters && known > 0) word = from[0].bits;
            if (filter < shape.filters && known > 1) word |= (u32)from[1].bits << 16;
            weights[t][i / 2][i % 2] = word;
        }
    }
    f32 biases[TILES][2];
#pragma unroll
    for (u32 i = 0; i < 2 * TILES; i++) {
        const u32 filter = begin + Columns::of(i / 2, 2 * member + i % 2);
        biases[i / 2][i % 2] = filter < shape.filters ? bias[filter] : 0.0f;
    }
    const bool vectors = has_vectors<EACH>(shape, y) && (HIGH == 1 || has_vectors<EACH>(shape, chosen));
    const u32 height = HIGH == 1 ? shape.out_height : shape.pooled_height;
    const u32 width = HIGH == 1 ? shape.out_width : shape.pooled_width;
    Band next = buffers[0].load<T, K, HIGH>(x, shape, blockIdx.x);
    u32 buffer = 0;
    for (u32 index = blockIdx.x; index < shape.bands; index += gridDim.x) {
        const Band band = next;
        // After this the band is complete, and all threads have finished the one before.
        __syncthreads();
        const u32* pairs = buffers[buffer].even;
        buffer ^= 1;
        if (index + gridDim.x < shape.bands) next = buffers[buffer].load<T, K, HIGH>(x, shape, index + gridDim.x);
        const u32 count = band.rows * width;
        for (u32 piece = warp * PIECE; piece < count; piece += FIRST_WARPS * PIECE) {
            // The lane's two rows of each product: two pixels, or the left and the right pixels of a window.
            u32 place[2], at[2];
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                place[i] = piece + group + (HIGH == 1 ? 8 * i : 0);
                const u32 own = least(place[i], count - 1), row = own / width, column = own % width;
                at[i] = BandPairs::at(HIGH * row, HIGH == 1 ? column : 2 * column + i, row_words);
            }
            f32 sums[HIGH][TILES][4];
#pragma unroll
            for (u32 high = 0; high < HIGH; high++) {
#pragma unroll
                for (u32 i = 0; i < 4 * TILES; i++) sums[high][i / 4][i % 4] = biases[i / 4][i % 2];
#pragma unroll
                for (u32 step = 0; step < STEPS; step++) {
                    u32 a[4];
#pragma unroll
                    for (u32 i = 0; i < 4; i++) {
                        a[i] = pairs[at[i % 2] + high * row_words + offsets[step][i / 2]] & masks[step][i / 2];
                    }
#pragma unroll
                    for (u32 t = 0; t < TILES; t++) multiply_pairs(sums[high][t], a, weights[t][step], T{});
                }
            }
#pragma unroll
            for (u32 i = 0; i < 2 / HIGH; i++) {
                if (place[i] >= count) continue;
                const u32 position = band.first * width + place[i];
                const u64 pixel = ((u64)band.image * height * width + position) * shape.filters;
                const bool right = HIGH == 1 || 2 * (place[i] % width) + 1 < shape.out_width;
                const bool below = HIGH == 1 || 2 * (band.first + place[i] / width) + 1 < shape.out_height;
const u32 first = begin + member * EACH;
                Pack<T, EACH> values;
                Pack<u8, EACH> places;
#pragma unroll
                for (u32 e = 0; e < EACH; e++) {
                    const u32 t = e / 2, half = e % 2;
                    if constexpr (HIGH == 2) {
                        const f32 *top = sums[0][t] + half, *bottom = sums[1][t] + half;
                        const f32 window[4] = {top[0], top[2], bottom[0], bottom[2]};
                        const Maximum<T> maximum(window, right, below, shape.slope);
                        values.at[e] = maximum.value, places.at[e] = maximum.place;
                    } else {
                        values.at[e] = from_f32<T>(rectify(sums[0][t][2 * i + half], shape.slope));
                    }
                }
                dropout.apply_all(band.image, first, position, values);
                store_filters<EACH>(y + pixel, first, shape.filters, values, vectors);
                if (HIGH == 2) store_filters<EACH>(chosen + pixel, first, shape.filters, places, vectors);
            }
        }
    }
}

// ---- Backward pass ----

// The gradients that a lane multiplies at once, of its TILES filters: as they are in memory, to be loaded early. Without
// pooling these are of two pairs of pixels of a row, each pair one of PLACES; with pooling of a window, whose upper and
// lower pixels are the two pairs.
template <class T, u32 TILES, u32 HIGH>
struct LaneGradients {
    static constexpr u32 PLACES = HIGH == 1 ? 2 : 1, PIXELS = HIGH == 1 ? 2 : 1;
    Pack<T, TILES> dy[PLACES][PIXELS], y[PLACES][PIXELS];
    Pack<u8, TILES> chosen;
    // Of each pair, the index in a band, and which of its pixels are in the image.
    u32 at[2], masks[2];

    struct From {
        const T *y, *dy;   // y is null if dy is the gradient before the activation
        const u8* chosen;
        bool vectors;
    };

    // The places from `piece` on are those of the warp; this lane has the one of its number, and the fourth after it.
    __device__ void load(const From& from, const OneChannel& shape, const Band& band, u32 piece, u32 first) {
        const u32 member = threadIdx.x % 4, row_words = band_stride(shape) / 2;
        const u32 height = HIGH == 1 ? shape.out_height : shape.pooled_height;
        const u32 width = HIGH == 1 ? shape.out_width : shape.pooled_width;
        const u32 across = HIGH == 1 ? (width + 1) / 2 : width, count = band.rows * across;
#pragma unroll
        for (u32 p = 0; p < PLACES; p++) {
            const u32 place = piece + member + 4 * p, own = least(place, count - 1);
            const u32 row = own / across, column = own % across;
            const u32 known = place < count ? least(2u, shape.out_width - 2 * column) : 0;
            const u32 index = BandPairs::at(HIGH * row, 2 * column, row_words);
            if constexpr (HIGH == 1) {
                at[p] = index, masks[p] = pair_mask(known);
            } else {
                at[0] = index, masks[0] = pair_mask(known);
                const bool below = 2 * (band.first + row) + 1 < shape.out_height;
                at[1] = index + row_words, masks[1] = below ? masks[0] : 0;
            }
            const u32 begin = (band.first + row) * width + PIXELS * column;
            const u64 pixel = ((u64)band.image * height * width + begin) * shape.filters;
#pragma unroll
            for (u32 i = 0; i < PIXELS; i++) {
                const u64 own_pixel = pixel + i * shape.filters;
                // No filter of a pixel that does not exist.
                const u32 filters = i < known ? shape.filters : 0;
                dy[p][i] = load_filters<TILES>(from.dy + own_pixel, first, filters, from.vectors);
                if (from.y) y[p][i] = load_filters<TILES>(from.y + own_pixel, first, filters, from.vectors);
            }
            if constexpr (HIGH == 2) {
                chosen = load_filters<TILES>(from.chosen + pixel, first, known > 0 ? shape.filters : 0, from.vectors);
            }
        }
    }

    __device__ u32 gradient(u32 p, u32 i, u32 t, bool activated, f32 slope) const {
        const T value = dy[p][i].at[t];
        return activated ? rectify_gradient(y[p][i].at[t], value, slope).bits : value.bits;
    }

    // Those of the t-th filter before the activation and pooling, as the words of an operand.
    __device__ void words(u32 to[2], u32 t, bool activated, f32 slope) const {
        if constexpr (HIGH == 1) {
#pragma unroll
            for (u32 p = 0; p < 2; p++) {
                to[p] = gradient(p, 0, t, activated, slope) | gradient(p, 1, t, activated, slope) << 16;
            }
        } else {
            const u32 place = chosen.at[t], word = gradient(0, 0, t, activated, slope) << place % 2 * 16;
            to[0] = place < 2 ? word : 0, to[1] = place < 2 ? 0 : word;
        }
    }
};

// Adds up the products of all warps of a block, in the shared memory that held the bands, and writes the sums of the taps
// to `dw`, and those of the row after them to `db`. Column c of product t is filter c * TILES + t.
template <u32 ROWS, u32 TILES, u32 TAPS>
__device__ inline void add_warps(const f32 sums[ROWS][TILES][4], f32* shared, u32 all_filters, f32* dw, f32* db) {
    constexpr u32 PRODUCTS = ROWS * TILES, AT_ONCE = PRODUCTS < 8 ? PRODUCTS : 8;
    static_assert(AT_ONCE * FIRST_WARPS * 128 * sizeof(f32) <= 2 * sizeof(BandPairs), "the bands' memory");
    const u32 warp = threadIdx.x / WARP, group = threadIdx.x % WARP / 4, member = threadIdx.x % 4;
#pragma unroll
    for (u32 first = 0; first < PRODUCTS; first += AT_ONCE) {
        __syncthreads();
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++) {
#pragma unroll
            for (u32 e = 0; e < 4; e++) {
                const u32 row = group + e / 2 * 8, column = member * 2 + e % 2;
                shared[(i * FIRST_WARPS + warp) * 128 + row * 8 + column] = sums[(first + i) / TILES][(first + i) % TILES][e];
            }
        }
        __syncthreads();
        for (u32 i = threadIdx.x; i < AT_ONCE * 128; i += FIRST_THREADS) {
            const f32* from = shared + i / 128 * (FIRST_WARPS * 128) + i % 128;
            f32 sum = 0.0f;
#pragma unroll
            for (u32 part = 0; part < FIRST_WARPS; part++) sum += from[part * 128];
            const u32 product = first + i / 128, tap = product / TILES * 16 + i % 128 / 8;
            const u32 filter = blockIdx.y * (8 * TILES) + i % 8 * TILES + product % TILES;
            if (filter >= all_filters) continue;
            if (tap < TAPS) dw[filter * TAPS + tap] = sum;
            if (tap == TAPS && db) db[filter] = sum;
        }
    }
}

// The gradient of the bias is a row of the product, after those of the taps, whose pixels are all one.
template <class T, u32 K, u32 TILES, u32 HIGH>
__device__ inline void first_backward_tensors(
    const T* x, const T* y, const T* dy, const u8* chosen, const FirstSums& result, const OneChannel& shape) {
    constexpr u32 TAPS = K * K, ROWS = TAPS / 16 + 1;
    // The pairs of pixels, or windows, that a warp multiplies at once.
    constexpr u32 PIECE = HIGH == 1 ? 8 : 4;
    using Gradients = LaneGradients<T, TILES, HIGH>;
    __shared__ BandPairs buffers[2];
    const u32 warp = threadIdx.x / WARP, group = threadIdx.x % WARP / 4;
    const u32 row_words = band_stride(shape) / 2, first_filter = blockIdx.y * (8 * TILES) + group * TILES;
    const u32 one = from_f32<T>(1.0f).bits, ones = one | one << 16;
    u32 offsets[ROWS][2];
#pragma unroll
    for (u32 i = 0; i < 2 * ROWS; i++) {
        const u32 tap = 8 * i + group;
        offsets[i / 2][i % 2] = tap < TAPS ? BandPairs::at(tap / K, tap % K, row_words) : 0;
    }
    const bool vectors = has_vectors<TILES>(shape, dy) && (!y || has_vectors<TILES>(shape, y))
                      && (HIGH == 1 || has_vectors<TILES>(shape, chosen));
    const typename Gradients::From from = {y, dy, chosen, vectors};
    const u32 across = HIGH == 1 ? (shape.out_width + 1) / 2 : shape.pooled_width;
    f32 sums[ROWS][TILES][4] = {};
    Band next = buffers[0].load<T, K, HIGH>(x, shape, blockIdx.x);
    Gradients gradients;
    gradients.load(from, shape, next, warp * PIECE, first_filter);
    u32 buffer = 0;
    for (u32 index = blockIdx.x; index < shape.bands; index += gridDim.x) {
        const Band band = next;
        // After this the band is complete, and all threads have finished the one before.
        __syncthreads();
        const u32* pairs = buffers[buffer].even;
        buffer ^= 1;
        const bool is_last = index + gridDim.x >= shape.bands;
        if (!is_last) next = buffers[buffer].load<T, K, HIGH>(x, shape, index + gridDim.x);
        const u32 count = band.rows * across;
        u32 piece = warp * PIECE;
        // A warp without a place in this band adds zeros.
        do {
            u32 b[TILES][2], a[ROWS][4];
#pragma unroll
            for (u32 t = 0; t < TILES; t++) gradients.words(b[t], t, y, shape.slope);
#pragma unroll
            for (u32 i = 0; i < 4 * ROWS; i++) {
                const u32 half = i % 2, pair = i % 4 / 2, tap = i / 4 * 16 + half * 8 + group;
                const u32 word = tap == TAPS ? ones : pairs[gradients.at[pair] + offsets[i / 4][half]];
                a[i / 4][i % 4] = word & gradients.masks[pair];
            }
            piece += FIRST_WARPS * PIECE;
            if (piece < count) {
                gradients.load(from, shape, band, piece, first_filter);
            } else if (!is_last) {
                gradients.load(from, shape, next, warp * PIECE, first_filter);
            }
#pragma unroll
            for (u32 row = 0; row < ROWS; row++) {
#pragma unroll
                for (u32 t = 0; t < TILES; t++) multiply_pairs(sums[row][t], a[row], b[t], T{});
            }
        } while (piece < count);
    }
    const bool alone = gridDim.x == 1;
    f32 *dw = result.own_weights(alone, shape.filters, TAPS), *db = result.own_bias(alone, shape.filters, TAPS);
    add_warps<ROWS, TILES, TAPS>(sums, (f32*)buffers, shape.filters, dw, result.bias ? db : nullptr);
    if (!alone) add_first_slices<8 * TILES, TAPS>(result, shape.filters);
}
