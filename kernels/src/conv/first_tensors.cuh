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
    __device__ void load(const FirstImages<T>& images, const OneChannel& shape, const Band& band) {
        u16 *first = (u16*)even, *second = (u16*)odd;
        read_band<T, K, HIGH>(images, shape, band, [&](u32 i, T value) {
            first[i] = value.bits;
            if (i > 0) second[i - 1] = value.bits;
        });
    }
};

// Calls `visit(pairs, band, following)` for all bands of this block, with the pairs in shared memory. `band` is the first,
// which is being loaded to the first buffer, and `bands` are the others; `following` is null for the last one.
template <class T, u32 K, u32 HIGH, class VISIT>
__device__ inline void each_band(BlockBands<T, HIGH>& bands, BandPairs buffers[2], Band band, const VISIT& visit) {
    bool is_last = false;
    for (u32 buffer = 0; !is_last; buffer ^= 1) {
        // After this the band is complete, and all threads have finished the one before.
        __syncthreads();
        is_last = bands.is_end();
        Band following{};
        if (!is_last) {
            following = bands.next();
            buffers[buffer ^ 1].load<T, K, HIGH>(bands.images, bands.shape, following);
        }
        visit(buffers[buffer].even, band, is_last ? nullptr : &following);
        band = following;
    }
}

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
    const FirstImages<T>& images, const T* w, const f32* bias, T* y, u8* chosen, const OneChannel& shape,
    const FirstDropout& dropout) {
    using Pairs = TapPairs<K>;
    using Columns = FilterColumns<TILES>;
    constexpr u32 STEPS = Pairs::STEPS, EACH = Columns::EACH;
    // The pixels or windows that a warp computes at once.
    constexpr u32 PIECE = HIGH == 1 ? 16 : 8;
    __shared__ BandPairs buffers[2];
    const u32 warp = threadIdx.x / WARP, group = threadIdx.x % WARP / 4, member = threadIdx.x % 4;
    const u32 begin = blockIdx.y * (8 * TILES), row_words = band_stride(shape) / 2;
    // The lane's pairs of taps: where their values are in a band, a mask of those that count, and their weights.
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
    const u32 height = shape.stored_height<HIGH>();
    const u32 width = shape.stored_width<HIGH>();
    BlockBands<T, HIGH> bands(images, shape);
    const Band first_band = bands.next();
    buffers[0].load<T, K, HIGH>(images, shape, first_band);
    each_band<T, K>(bands, buffers, first_band, [&](const u32* pairs, const Band& band, const Band*) {
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
                    for (u32 t = 0; t < TILES; t++) multiply_add(sums[high][t], a, weights[t][step], T{});
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
    });
}

// ---- Backward pass ----

// How a lane's places in a band follow each other: a place is a pair of pixels or a window, `across` of them in a row, and
// a block computes STRIDE places at once.
template <u32 STRIDE>
struct PlaceSteps {
    u32 across, rows, columns;

    __device__ PlaceSteps(u32 each_row) : across(each_row), rows(STRIDE / each_row), columns(STRIDE % each_row) {}

    __device__ void advance(u32& row, u32& column) const {
        row += rows, column += columns;
        if (column >= across) column -= across, row++;
    }
};

// The gradients that a lane multiplies at once, of its TILES filters: as they are in memory, to be loaded early. Without
// pooling these are of two pairs of pixels of a row, each pair one of PLACES; with pooling of a window, whose upper and
// lower pixels are the two pairs. Two filters are in a word.
template <class T, u32 TILES, u32 HIGH, bool VECTORS>
struct LaneGradients {
    static constexpr u32 PLACES = HIGH == 1 ? 2 : 1, PIXELS = HIGH == 1 ? 2 : 1, WORDS = (TILES + 1) / 2;
    // Places that a block multiplies at once.
    static constexpr u32 STRIDE = FIRST_WARPS * 4 * PLACES;
    u32 dy[PLACES][PIXELS][WORDS], y[PLACES][PIXELS][WORDS];
    u8 chosen[TILES];
    // For each pair: its index in the band, and a mask of its pixels that are in the image.
    u32 at[2], masks[2];

    struct From {
        const T *y, *dy;   // y is null if dy is the gradient before the activation
        const u8* chosen;
        u32 filter;   // the lane's first
    };

    // This lane's first place, and the one four places after it.
    static __device__ u32 first_place(u32 p) { return (threadIdx.x / WARP * PLACES + p) * 4 + threadIdx.x % 4; }

    static __device__ void load_words(u32 words[WORDS], const T* elements, u32 first, u32 filters) {
        const auto pack = load_filters<TILES>(elements, first, filters, VECTORS);
#pragma unroll
        for (u32 i = 0; i < WORDS; i++) {
            words[i] = pack.at[2 * i].bits;
            if (2 * i + 1 < TILES) words[i] |= (u32)pack.at[2 * i + 1].bits << 16;
        }
    }

    // Loads the gradients of the places in these rows and columns.
    __device__ void load(
        const From& from, const OneChannel& shape, const Band& band, const u32 rows[PLACES], const u32 columns[PLACES]) {
        const u32 row_words = band_stride(shape) / 2;
        const u32 height = shape.stored_height<HIGH>();
        const u32 width = shape.stored_width<HIGH>();
        const u64 image = ((u64)band.image * height + band.first) * width * shape.filters;
#pragma unroll
        for (u32 p = 0; p < PLACES; p++) {
            const bool inside = rows[p] < band.rows;
            // A place beyond the band gets an index inside it.
            const u32 row = inside ? rows[p] : 0, column = columns[p], index = HIGH * row * row_words + column;
            const u32 known = inside ? least(2u, shape.out_width - 2 * column) : 0;
            if constexpr (HIGH == 1) {
                at[p] = index, masks[p] = pair_mask(known);
            } else {
                const bool below = 2 * (band.first + row) + 1 < shape.out_height;
                at[0] = index, masks[0] = pair_mask(known);
                at[1] = index + row_words, masks[1] = below ? masks[0] : 0;
            }
            const u32 pixel = (row * width + PIXELS * column) * shape.filters;
#pragma unroll
            for (u32 i = 0; i < PIXELS; i++) {
                // No filter of a pixel that does not exist.
                const u32 filters = i < known ? shape.filters : 0;
                const u64 begin = image + pixel + i * shape.filters;
                load_words(dy[p][i], from.dy + begin, from.filter, filters);
                if (from.y) load_words(y[p][i], from.y + begin, from.filter, filters);
                if constexpr (HIGH == 2) {
                    const auto pack = load_filters<TILES>(from.chosen + begin, from.filter, filters, VECTORS);
#pragma unroll
                    for (u32 t = 0; t < TILES; t++) chosen[t] = pack.at[t];
                }
            }
        }
    }

    // Turns them into gradients before the activation.
    __device__ void activate(f32 slope) {
        const auto one = [&](u32 output, u32 gradient) {
            return (u32)rectify_gradient(T{(u16)output}, T{(u16)gradient}, slope).bits;
        };
#pragma unroll
        for (u32 i = 0; i < PLACES * PIXELS * WORDS; i++) {
            u32& word = dy[i / WORDS / PIXELS][i / WORDS % PIXELS][i % WORDS];
            const u32 output = y[i / WORDS / PIXELS][i / WORDS % PIXELS][i % WORDS];
            word = one(output, word) | one(output >> 16, word >> 16) << 16;
        }
    }

    // The gradients of the t-th filter before pooling, as the words of an operand.
    __device__ void words(u32 to[2], u32 t) const {
        const u32 shift = t % 2 * 16;
        if constexpr (HIGH == 1) {
#pragma unroll
            for (u32 p = 0; p < 2; p++) {
                to[p] = (dy[p][0][t / 2] >> shift & 0xffffu) | dy[p][1][t / 2] >> shift << 16;
            }
        } else {
            const u32 word = (dy[0][0][t / 2] >> shift & 0xffffu) << chosen[t] % 2 * 16;
            to[0] = chosen[t] < 2 ? word : 0, to[1] = chosen[t] < 2 ? 0 : word;
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

// Adds the products of a warp's places of all bands of its block to `sums`.
template <class T, u32 K, u32 TILES, u32 HIGH, bool VECTORS, u32 ROWS>
__device__ inline void multiply_gradients(
    const FirstImages<T>& images, const T* y, const T* dy, const u8* chosen, const OneChannel& shape, BandPairs buffers[2],
    f32 sums[ROWS][TILES][4]) {
    using Gradients = LaneGradients<T, TILES, HIGH, VECTORS>;
    constexpr u32 TAPS = K * K, PLACES = Gradients::PLACES;
    const u32 group = threadIdx.x % WARP / 4, row_words = band_stride(shape) / 2;
    const u32 one = from_f32<T>(1.0f).bits, ones = one | one << 16;
    u32 offsets[ROWS][2];
#pragma unroll
    for (u32 i = 0; i < 2 * ROWS; i++) {
        const u32 tap = 8 * i + group;
        offsets[i / 2][i % 2] = tap < TAPS ? BandPairs::at(tap / K, tap % K, row_words) : 0;
    }
    const typename Gradients::From from = {y, dy, chosen, (blockIdx.y * 8 + group) * TILES};
    const PlaceSteps<Gradients::STRIDE> steps(HIGH == 1 ? (shape.out_width + 1) / 2 : shape.pooled_width);
    u32 rows[PLACES], columns[PLACES];
    const auto begin = [&] {
#pragma unroll
        for (u32 p = 0; p < PLACES; p++) {
            rows[p] = Gradients::first_place(p) / steps.across, columns[p] = Gradients::first_place(p) % steps.across;
        }
    };
    begin();
    BlockBands<T, HIGH> bands(images, shape);
    const Band first_band = bands.next();
    buffers[0].load<T, K, HIGH>(images, shape, first_band);
    Gradients gradients;
    gradients.load(from, shape, first_band, rows, columns);
    each_band<T, K>(bands, buffers, first_band, [&](const u32* pairs, const Band& band, const Band* following) {
        // A warp without a place in this band adds zeros.
        bool goes_on = true;
        while (goes_on) {
            if (y) gradients.activate(shape.slope);
            u32 b[TILES][2], a[ROWS][4];
#pragma unroll
            for (u32 t = 0; t < TILES; t++) gradients.words(b[t], t);
#pragma unroll
            for (u32 i = 0; i < 4 * ROWS; i++) {
                const u32 half = i % 2, pair = i % 4 / 2, tap = i / 4 * 16 + half * 8 + group;
                const u32 word = tap == TAPS ? ones : pairs[gradients.at[pair] + offsets[i / 4][half]];
                a[i / 4][i % 4] = word & gradients.masks[pair];
            }
#pragma unroll
            for (u32 p = 0; p < PLACES; p++) steps.advance(rows[p], columns[p]);
            // The same for the whole warp.
            goes_on = __any_sync(EVERY_LANE, rows[0] < band.rows);
            if (!goes_on) begin();
            if (goes_on || following) gradients.load(from, shape, goes_on ? band : *following, rows, columns);
#pragma unroll
            for (u32 row = 0; row < ROWS; row++) {
#pragma unroll
                for (u32 t = 0; t < TILES; t++) multiply_add(sums[row][t], a[row], b[t], T{});
            }
        }
    });
}

// The gradient of the bias is a row of the product, after those of the taps, whose pixels are all one.
template <class T, u32 K, u32 TILES, u32 HIGH>
__device__ inline void first_backward_tensors(
    const FirstImages<T>& images, const T* y, const T* dy, const u8* chosen, const FirstSums& result,
    const OneChannel& shape) {
    constexpr u32 TAPS = K * K, ROWS = TAPS / 16 + 1;
    __shared__ BandPairs buffers[2];
    f32 sums[ROWS][TILES][4] = {};
    const bool vectors = has_vectors<TILES>(shape, dy) && (!y || has_vectors<TILES>(shape, y))
                      && (HIGH == 1 || has_vectors<TILES>(shape, chosen));
    if (TILES > 1 && vectors) {
        multiply_gradients<T, K, TILES, HIGH, true, ROWS>(images, y, dy, chosen, shape, buffers, sums);
    } else {
        multiply_gradients<T, K, TILES, HIGH, false, ROWS>(images, y, dy, chosen, shape, buffers, sums);
    }
    const bool alone = gridDim.x == 1;
    f32 *dw = result.own_weights(alone, shape.filters, TAPS), *db = result.own_bias(alone, shape.filters, TAPS);
    add_warps<ROWS, TILES, TAPS>(sums, (f32*)buffers, shape.filters, dw, result.bias ? db : nullptr);
    if (!alone) add_first_slices<8 * TILES, TAPS>(result, shape.filters);
}
