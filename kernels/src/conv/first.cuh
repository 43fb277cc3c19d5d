// Convolutions of images with one channel, as in a first layer, with kernels of 3x3 and 5x5. Bias, activation and
// max-pooling of 2x2 are part of the forward pass; activation, pooling and the gradient of the bias are part of the
// backward pass.
//
// With one channel a matrix product would gather single elements and have a depth of 9 or 25. Here a lane owns one or
// two filters, whose weights (or gradients) stay in its registers, and a warp processes the image in strips of four
// pixels of a row, or of two rows if they are pooled. The input is in shared memory and the same for all lanes: eight
// values of a row serve all pixels of a strip. Neighbouring lanes write neighbouring filters, so writes are coalesced.
// With few filters, each quarter of a warp processes strips of its own.
//
// A band is a number of output rows of an image (or of pairs of rows that are pooled), together with the input rows
// that they need; a block processes one band after another.

#define FIRST_THREADS 256u
#define FEW_FILTERS 8u            // up to this number of filters a quarter of a warp is enough
#define STRIP 4u
#define BAND_VALUES 4096u   // maximum number of input values of a band

struct alignas(16) Four {
    f32 value[4];
};

struct OneChannel {
    u32 images, height, width;
    u32 filters, out_height, out_width;
    u32 pad;
    u32 rows, bands;   // rows of strips in a band, and bands of all images
    f32 slope;
    u32 pooled_height, pooled_width;   // only if the output is pooled

    // The extents of the output in memory. It is pooled if a row of strips has two output rows.
    template <u32 HIGH>
    __device__ u32 stored_height() const { return HIGH == 1 ? out_height : pooled_height; }
    template <u32 HIGH>
    __device__ u32 stored_width() const { return HIGH == 1 ? out_width : pooled_width; }
};

// The sums of the gradients, in slices: those of all weights, then those of the biases.
struct FirstSums {
    f32* slices;   // one for each band of blocks, if there are several
    f32* weights;
    f32* bias;     // null if it is not wanted
    u32* counters;

    // Where a block writes its sums: to its slice, unless it is alone.
    __device__ f32* own_weights(bool alone, u32 filters, u32 taps) const {
        return alone ? weights : slices + (u64)blockIdx.x * (filters * taps + filters);
    }

    __device__ f32* own_bias(bool alone, u32 filters, u32 taps) const {
        return alone ? bias : own_weights(false, filters, taps) + filters * taps;
    }
};

// Where images come from: from memory, or from a data set.
template <class T>
struct FirstImages {
    const T* x;   // null: the images are those of `batch`
    const GatheredBatch& batch;
    u8* labels;   // receives the labels of the batch, if it is not null
    u64 begin;

    __device__ FirstImages(const T* x, const GatheredBatch& batch, u8* labels)
        : x(x), batch(batch), labels(labels), begin(x ? 0 : batch.begin()) {}

    // The index of an image where it comes from.
    __device__ u32 sample(u32 image) const { return x ? image : batch.sample(begin + image); }
};

struct Band {
    u32 image, sample;
    u32 first, rows;   // rows of strips from `first` on
};

// The bands of a block, one after the other. Each is located before the one before it is loaded: that takes a load itself if
// images are gathered.
template <class T, u32 HIGH>
struct BlockBands {
    const FirstImages<T>& images;
    const OneChannel& shape;
    u32 index;
    Band ahead;

    __device__ BlockBands(const FirstImages<T>& images, const OneChannel& shape)
        : images(images), shape(shape), index(blockIdx.x), ahead{} {
        locate();
    }

    __device__ bool is_end() const { return index >= shape.bands; }

    __device__ Band next() {
        const Band band = ahead;
        index += gridDim.x;
        locate();
        return band;
    }

    __device__ void locate() {
        if (is_end()) return;
        const u32 height = shape.stored_height<HIGH>(), each = (height + shape.rows - 1) / shape.rows;
        const u32 image = index / each, first = index % each * shape.rows;
        ahead = {image, images.sample(image), first, least(shape.rows, height - first)};
    }
};

// Values of a row in shared memory: the strips' pixels and four more, of which the kernel reads K - 1.
__device__ inline u32 band_stride(const OneChannel& shape) { return (shape.out_width + 2 * STRIP - 1) / STRIP * STRIP; }

// Calls `store(i, value)` for the values of a band, which are zeros outside the image, or if there is no image; every thread
// for some of them. A row of a band has HIGH output rows.
template <u32 K, u32 HIGH, class T, class STORE>
__device__ inline void read_values(const T* image, const OneChannel& shape, const Band& band, const STORE& store) {
    const u32 stride = band_stride(shape), count = (HIGH * band.rows + K - 1) * stride;
    // Several loads are in flight before the first value is stored.
    constexpr u32 AT_ONCE = 4;
    for (u32 begin = threadIdx.x; begin < count; begin += AT_ONCE * FIRST_THREADS) {
        T values[AT_ONCE];
#pragma unroll
        for (u32 n = 0; n < AT_ONCE; n++) {
            const u32 i = begin + n * FIRST_THREADS;
            const u32 row = HIGH * band.first + i / stride - shape.pad, column = i % stride - shape.pad;
            const bool inside = image && i < count && row < shape.height && column < shape.width;
            values[n] = inside ? image[row * shape.width + column] : T{};
        }
#pragma unroll
        for (u32 n = 0; n < AT_ONCE; n++) {
            if (begin + n * FIRST_THREADS < count) store(begin + n * FIRST_THREADS, values[n]);
        }
    }
}

// The same, of a band of `images`.
template <class T, u32 K, u32 HIGH, class STORE>
__device__ inline void read_band(
    const FirstImages<T>& images, const OneChannel& shape, const Band& band, const STORE& store) {
    if (images.x) {
        const u64 len = (u64)shape.height * shape.width;
        return read_values<K, HIGH>(images.x + band.sample * len, shape, band, store);
    }
    const bool known = images.batch.is_known(band.sample);
    const u8* pixels = known ? images.batch.pixels(band.sample) : nullptr;
    read_values<K, HIGH>(pixels, shape, band, [&](u32 i, u8 pixel) {
        store(i, from_f32<T>(known ? pixel_value(pixel) : unknown_pixel()));
    });
    // The first group of filters does it, when it reads the first band of an image.
    if (images.labels && threadIdx.x == 0 && blockIdx.y == 0 && band.first == 0) {
        images.labels[band.image] = images.batch.label(band.sample);
    }
}

// Loads a band into shared memory, between two barriers.
template <class T, u32 K, u32 HIGH>
__device__ inline void load_band(const FirstImages<T>& images, const OneChannel& shape, const Band& band, f32* input) {
    __syncthreads();
    read_band<T, K, HIGH>(images, shape, band, [&](u32 i, T value) { input[i] = to_f32(value); });
    __syncthreads();
}

// Calls `strip(row, column)` for those strips of a band that belong to this thread's group of LANES lanes.
template <u32 LANES, class STRIP_FUNCTION>
__device__ inline void each_strip(const OneChannel& shape, const Band& band, const STRIP_FUNCTION& strip) {
    const u32 strips = (shape.out_width + STRIP - 1) / STRIP;
    u32 row = 0, at = threadIdx.x / LANES;
    while (true) {
        while (at >= strips) at -= strips, row++;
        if (row >= band.rows) return;
        strip(row, at * STRIP);
        at += FIRST_THREADS / LANES;
    }
}

// The input of four pixels in kernel row u: STRIP + K - 1 of these eight values.
__device__ inline void load_strip(const f32* input, u32 stride, u32 row, u32 column, f32 values[2 * STRIP]) {
    const Four* from = (const Four*)(input + row * stride + column);
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        const Four four = from[i];
#pragma unroll
        for (u32 j = 0; j < 4; j++) values[4 * i + j] = four.value[j];
    }
}

// The e-th filter of this lane; a lane's filters are LANES apart.
template <u32 EACH, u32 LANES>
__device__ inline u32 own_filter(u32 e) {
    return blockIdx.y * (EACH * LANES) + e * LANES + threadIdx.x % LANES;
}

// Calls `product(e, tap, pixel, value)` for every filter, tap, and pixel of a strip of HIGH rows, with the input that
// the tap reads for the pixel. The pixels of the second row follow those of the first.
template <u32 K, u32 EACH, u32 HIGH, class PRODUCT_FUNCTION>
__device__ inline void each_product(
    const f32* input, u32 stride, u32 row, u32 column, const PRODUCT_FUNCTION& product) {
#pragma unroll
    for (u32 line = 0; line < K + HIGH - 1; line++) {
        f32 values[2 * STRIP];
        load_strip(input, stride, row * HIGH + line, column, values);
#pragma unroll
        for (u32 high = 0; high < HIGH; high++) {
            if (line < high || line - high >= K) continue;
#pragma unroll
            for (u32 v = 0; v < K; v++) {
#pragma unroll
                for (u32 p = 0; p < STRIP; p++) {
#pragma unroll
                    for (u32 e = 0; e < EACH; e++) product(e, (line - high) * K + v, high * STRIP + p, values[p + v]);
                }
            }
        }
    }
}

// Dropout after a layer.
struct FirstDropout {
    const StepState* state;   // null if there is none
    DropoutMask mask;

    // `position` is that of the output within its channel.
    template <class T>
    __device__ T apply(u32 image, u32 channel, u32 position, T value) const {
        if (!state) return value;
        const u64 element = ((mask.first_sample + image) * mask.channels + channel) * mask.plane + position;
        return mask.apply(mask.base(state), element, value);
    }

    // The same for neighbouring channels from `first` on.
    template <class T, u32 N>
    __device__ void apply_all(u32 image, u32 first, u32 position, Pack<T, N>& values) const {
        if (!state) return;
        const u64 base = mask.base(state);
        u64 element = ((mask.first_sample + image) * mask.channels + first) * mask.plane + position;
#pragma unroll
        for (u32 i = 0; i < N; i++, element += mask.plane) values.at[i] = mask.apply(base, element, values.at[i]);
    }
};

// The maximum of a window of 2x2 and its place, from the values before the activation, row by row; only those pixels are
// known that are in the image. Every value is rounded before it is compared, as when the layers are computed one by one.
template <class T>
struct Maximum {
    T value;
    u8 place;

    __device__ Maximum(const f32 window[4], bool right, bool below, f32 slope)
        : value(from_f32<T>(rectify(window[0], slope))), place(0) {
#pragma unroll
        for (u32 other = 1; other < 4; other++) {
            const T each = from_f32<T>(rectify(window[other], slope));
            const bool known = (other % 2 == 0 || right) && (other / 2 == 0 || below);
            if (known && to_f32(each) > to_f32(value)) value = each, place = (u8)other;
        }
    }
};

// The pooled output of the windows of a strip of two rows. `column` is that of the first window, and
// `store(q, maximum)` gets the q-th window's.
template <class T, class STORE>
__device__ inline void pool_strip(
    const f32 values[2 * STRIP], u32 row, u32 column, const OneChannel& shape, const STORE& store) {
#pragma unroll
    for (u32 q = 0; q < STRIP / 2; q++) {
        if (column + q >= shape.pooled_width) return;
        const bool right = 2 * (column + q) + 1 < shape.out_width, below = 2 * row + 1 < shape.out_height;
        const f32* top = values + 2 * q;
        const f32 window[4] = {top[0], top[1], top[STRIP], top[STRIP + 1]};
        store(q, Maximum<T>(window, right, below, shape.slope));
    }
}

template <class T, u32 K, u32 EACH, u32 HIGH, u32 LANES>
__device__ inline void first_forward(
    const FirstImages<T>& images, const T* w, const f32* bias, T* y, u8* chosen, const OneChannel& shape,
    const FirstDropout& dropout) {
    __shared__ Four shared[BAND_VALUES / 4];
    f32* input = shared->value;
    f32 weights[EACH][K * K], biases[EACH];
#pragma unroll
    for (u32 e = 0; e < EACH; e++) {
        const u32 filter = own_filter<EACH, LANES>(e);
        const bool known = filter < shape.filters;
        biases[e] = known ? bias[filter] : 0.0f;
#pragma unroll
        for (u32 tap = 0; tap < K * K; tap++) weights[e][tap] = known ? to_f32(w[filter * (K * K) + tap]) : 0.0f;
    }
    const u32 stride = band_stride(shape);
    BlockBands<T, HIGH> bands(images, shape);
    while (!bands.is_end()) {
        const Band band = bands.next();
        load_band<T, K, HIGH>(images, shape, band, input);
        const u32 height = shape.stored_height<HIGH>();
        const u32 width = shape.stored_width<HIGH>();
        const u64 begin = ((u64)band.image * height + band.first) * width * shape.filters;
        each_strip<LANES>(shape, band, [&](u32 row, u32 column) {
            f32 sums[EACH][HIGH * STRIP];
#pragma unroll
            for (u32 e = 0; e < EACH; e++) {
#pragma unroll
                for (u32 p = 0; p < HIGH * STRIP; p++) sums[e][p] = biases[e];
            }
            each_product<K, EACH, HIGH>(input, stride, row, column, [&](u32 e, u32 tap, u32 p, f32 value) {
                sums[e][p] += weights[e][tap] * value;
            });
            const u64 at = begin + (row * width + column / HIGH) * shape.filters;
#pragma unroll
            for (u32 e = 0; e < EACH; e++) {
                const u32 filter = own_filter<EACH, LANES>(e);
                if (filter >= shape.filters) continue;
                const u32 position = (band.first + row) * width + column / HIGH;
                const auto store = [&](u32 q, T value) {
                    value = dropout.apply(band.image, filter, position + q, value);
                    y[at + q * shape.filters + filter] = value;
                };
                if constexpr (HIGH == 2) {
                    pool_strip<T>(sums[e], band.first + row, column / 2, shape, [&](u32 q, const Maximum<T>& maximum) {
                        store(q, maximum.value);
                        chosen[at + q * shape.filters + filter] = maximum.place;
                    });
                } else {
#pragma unroll
                    for (u32 p = 0; p < STRIP; p++) {
                        if (column + p < shape.out_width) store(p, from_f32<T>(rectify(sums[e][p], shape.slope)));
                    }
                }
            }
        });
    }
}

// The gradients before the activation of a strip's pixels, for one filter, and their sum. `at` is the index of the
// strip's first output; with pooling a window's gradient belongs to the pixel that was chosen.
template <class T, u32 HIGH>
__device__ inline f32 strip_gradients(
    const T* y, const T* dy, const u8* chosen, const OneChannel& shape, u64 at, u32 column, f32 gradients[HIGH * STRIP]) {
    const u32 width = shape.stored_width<HIGH>();
    f32 sum = 0.0f;
#pragma unroll
    for (u32 q = 0; q < STRIP / HIGH; q++) {
        const bool known = column / HIGH + q < width;
        const u64 from = at + q * shape.filters;
        T gradient = known ? dy[from] : from_f32<T>(0.0f);
        if (known && y) gradient = rectify_gradient(y[from], gradient, shape.slope);
        const f32 value = to_f32(gradient);
        sum += value;
        if constexpr (HIGH == 1) {
            gradients[q] = value;
        } else {
            const u32 place = known ? chosen[from] : 0;
#pragma unroll
            for (u32 other = 0; other < 4; other++) {
                gradients[other / 2 * STRIP + 2 * q + other % 2] = place == other ? value : 0.0f;
            }
        }
    }
    return sum;
}

// Adds up what the groups of lanes of a block have for each filter, a number of values at a time (TAPS), in the shared
// memory that held the bands, and writes the sums to `to[filter * stride + value]`.
template <u32 EACH, u32 LANES, u32 VALUES>
__device__ inline void add_groups(const f32 sums[EACH][VALUES], f32* partial, u32 filters, f32* to) {
    constexpr u32 FILTERS = EACH * LANES, GROUPS = FIRST_THREADS / LANES, AT_ONCE = BAND_VALUES / (GROUPS * FILTERS);
    const u32 lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
#pragma unroll
    for (u32 first = 0; first < VALUES; first += AT_ONCE) {
        __syncthreads();
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++) {
#pragma unroll
            for (u32 e = 0; e < EACH; e++) {
                if (first + i < VALUES) partial[(i * GROUPS + group) * FILTERS + e * LANES + lane] = sums[e][first + i];
            }
        }
        __syncthreads();
        for (u32 i = threadIdx.x; i < least(AT_ONCE, VALUES - first) * FILTERS; i += FIRST_THREADS) {
            const u32 value = i / FILTERS, filter = blockIdx.y * FILTERS + i % FILTERS;
            f32 sum = 0.0f;
#pragma unroll
            for (u32 part = 0; part < GROUPS; part++) sum += partial[(value * GROUPS + part) * FILTERS + i % FILTERS];
            if (filter < filters) to[filter * VALUES + first + value] = sum;
        }
    }
}

// Adds up the slices of all blocks for the FILTERS filters of this row of the grid.
template <u32 FILTERS, u32 TAPS>
__device__ inline void add_first_slices(const FirstSums& result, u32 all_filters) {
    const u32 len = all_filters * TAPS, slice_len = len + all_filters;
    const u32 first_filter = blockIdx.y * FILTERS, filters = least(FILTERS, all_filters - first_filter);
    u32* counters = result.counters + blockIdx.y * (slice_groups(gridDim.x) + 1);
    const u32 own_weights = filters * TAPS, own = own_weights + (result.bias ? filters : 0);
    const auto place = [&](u32 i, f32* weights, f32* biases) {
        return i < own_weights ? weights + first_filter * TAPS + i : biases + first_filter + i - own_weights;
    };
    add_slices(counters, blockIdx.x, gridDim.x, [&](u32 first, u32 step, u32 count, bool total) {
        f32* from = result.slices + (u64)first * slice_len;
        // A thread writes nothing before it has read everything, so that more loads are in flight.
        constexpr u32 EACH = (FILTERS * (TAPS + 1) + FIRST_THREADS - 1) / FIRST_THREADS;
        f32 sums[EACH];
#pragma unroll
        for (u32 e = 0; e < EACH; e++) {
            const u32 i = threadIdx.x + e * FIRST_THREADS;
            sums[e] = i < own ? sum_of_slices(place(i, from, from + len), (u64)step * slice_len, count) : 0.0f;
        }
        f32 *weights = total ? result.weights : from, *biases = total ? result.bias : from + len;
#pragma unroll
        for (u32 e = 0; e < EACH; e++) {
            const u32 i = threadIdx.x + e * FIRST_THREADS;
            if (i < own) *place(i, weights, biases) = sums[e];
        }
    });
}

// The gradients of weights and bias. `y` is null if `dy` is the gradient before the activation. Each row of the grid
// has some of the filters, each of its blocks some of the bands.
template <class T, u32 K, u32 EACH, u32 HIGH, u32 LANES>
__device__ inline void first_backward(
    const FirstImages<T>& images, const T* y, const T* dy, const u8* chosen, const FirstSums& result,
    const OneChannel& shape) {
    __shared__ Four shared[BAND_VALUES / 4];
    f32* input = shared->value;
    f32 sums[EACH][K * K] = {}, biases[EACH][1] = {};
    const u32 stride = band_stride(shape);
    BlockBands<T, HIGH> bands(images, shape);
    while (!bands.is_end()) {
        const Band band = bands.next();
        load_band<T, K, HIGH>(images, shape, band, input);
        const u32 height = shape.stored_height<HIGH>();
        const u32 width = shape.stored_width<HIGH>();
        const u64 begin = ((u64)band.image * height + band.first) * width * shape.filters;
        each_strip<LANES>(shape, band, [&](u32 row, u32 column) {
            const u64 at = begin + (row * width + column / HIGH) * shape.filters;
            f32 gradients[EACH][HIGH * STRIP];
#pragma unroll
            for (u32 e = 0; e < EACH; e++) {
                const u32 filter = own_filter<EACH, LANES>(e);
                // Beyond the last filter, no pixel is in the image.
                const u32 from = filter < shape.filters ? column : ~0u / 2;
                biases[e][0] += strip_gradients<T, HIGH>(y, dy, chosen, shape, at + filter, from, gradients[e]);
            }
            each_product<K, EACH, HIGH>(input, stride, row, column, [&](u32 e, u32 tap, u32 p, f32 value) {
                sums[e][tap] += gradients[e][p] * value;
            });
        });
    }
    const bool alone = gridDim.x == 1;
    f32 *dw = result.own_weights(alone, shape.filters, K * K), *db = result.own_bias(alone, shape.filters, K * K);
    add_groups<EACH, LANES, K * K>(sums, input, shape.filters, dw);
    if (result.bias) add_groups<EACH, LANES, 1>(biases, input, shape.filters, db);
    if (!alone) add_first_slices<EACH * LANES, K * K>(result, shape.filters);
}
