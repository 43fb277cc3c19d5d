// Convolutions of images with one channel, as in a first layer, with kernels of 3x3 and 5x5.
//
// With one channel a matrix product would gather single elements and have a depth of 9 or 25. Here a lane owns one or
// two filters, whose weights (or gradients) stay in its registers, and a warp processes the image in strips of four
// pixels of a row. The input is in shared memory and the same for all lanes: eight values of a row serve four pixels.
// Neighbouring lanes write neighbouring filters, so writes are coalesced. With few filters, each quarter of a warp
// processes strips of its own.
//
// A band is a number of output rows of an image, together with the input rows that they need; a block processes one
// band after another.

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
    u32 rows, bands;   // output rows of a band, and bands of all images
    f32 slope;
};

struct Band {
    u32 image, first, rows;   // output rows from `first` on
};

// Values of a row in shared memory: the strips' pixels and four more, of which the kernel reads K - 1.
__device__ inline u32 band_stride(const OneChannel& shape) { return (shape.out_width + 2 * STRIP - 1) / STRIP * STRIP; }

// Loads a band into shared memory, with zeros outside the image.
template <class T, u32 K>
__device__ inline Band load_band(const T* x, const OneChannel& shape, u32 index, f32* input) {
    const u32 each = (shape.out_height + shape.rows - 1) / shape.rows, first = index % each * shape.rows;
    const Band band = {index / each, first, least(shape.rows, shape.out_height - first)};
    const u32 stride = band_stride(shape), count = (band.rows + K - 1) * stride;
    const T* image = x + (u64)band.image * shape.height * shape.width;
    __syncthreads();
    for (u32 i = threadIdx.x; i < count; i += FIRST_THREADS) {
        const u32 row = band.first + i / stride - shape.pad, column = i % stride - shape.pad;
        input[i] = row < shape.height && column < shape.width ? to_f32(image[row * shape.width + column]) : 0.0f;
    }
    __syncthreads();
    return band;
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

template <class T, u32 K, u32 EACH, u32 LANES = WARP>
__device__ inline void first_forward(const T* x, const T* w, const f32* bias, T* y, const OneChannel& shape) {
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
    for (u32 index = blockIdx.x; index < shape.bands; index += gridDim.x) {
        const Band band = load_band<T, K>(x, shape, index, input);
        T* rows = y + ((u64)band.image * shape.out_height + band.first) * shape.out_width * shape.filters;
        each_strip<LANES>(shape, band, [&](u32 row, u32 column) {
            f32 sums[STRIP][EACH];
#pragma unroll
            for (u32 p = 0; p < STRIP; p++) {
#pragma unroll
                for (u32 e = 0; e < EACH; e++) sums[p][e] = biases[e];
            }
#pragma unroll
            for (u32 u = 0; u < K; u++) {
                f32 values[2 * STRIP];
                load_strip(input, stride, row + u, column, values);
#pragma unroll
                for (u32 v = 0; v < K; v++) {
#pragma unroll
                    for (u32 p = 0; p < STRIP; p++) {
#pragma unroll
                        for (u32 e = 0; e < EACH; e++) sums[p][e] += weights[e][u * K + v] * values[p + v];
                    }
                }
            }
#pragma unroll
            for (u32 p = 0; p < STRIP; p++) {
                T* pixel = rows + (row * shape.out_width + column + p) * shape.filters;
#pragma unroll
                for (u32 e = 0; e < EACH; e++) {
                    if (column + p < shape.out_width && own_filter<EACH, LANES>(e) < shape.filters) {
                        pixel[own_filter<EACH, LANES>(e)] = from_f32<T>(rectify(sums[p][e], shape.slope));
                    }
                }
            }
        });
    }
}

// The part of the weights' gradient from this block's bands: one slice of `dw` for each blockIdx.x.
template <class T, u32 K, u32 EACH, u32 LANES = WARP>
__device__ inline void first_backward_weights(const T* x, const T* dy, f32* dw, const OneChannel& shape) {
    __shared__ Four shared[BAND_VALUES / 4];
    f32* input = shared->value;
    f32 sums[EACH][K * K] = {};
    const u32 stride = band_stride(shape);
    for (u32 index = blockIdx.x; index < shape.bands; index += gridDim.x) {
        const Band band = load_band<T, K>(x, shape, index, input);
        const T* rows = dy + ((u64)band.image * shape.out_height + band.first) * shape.out_width * shape.filters;
        each_strip<LANES>(shape, band, [&](u32 row, u32 column) {
            f32 gradients[STRIP][EACH];
#pragma unroll
            for (u32 p = 0; p < STRIP; p++) {
                const T* pixel = rows + (row * shape.out_width + column + p) * shape.filters;
#pragma unroll
                for (u32 e = 0; e < EACH; e++) {
                    const bool known = column + p < shape.out_width && own_filter<EACH, LANES>(e) < shape.filters;
                    gradients[p][e] = known ? to_f32(pixel[own_filter<EACH, LANES>(e)]) : 0.0f;
                }
            }
#pragma unroll
            for (u32 u = 0; u < K; u++) {
                f32 values[2 * STRIP];
                load_strip(input, stride, row + u, column, values);
#pragma unroll
                for (u32 v = 0; v < K; v++) {
#pragma unroll
                    for (u32 p = 0; p < STRIP; p++) {
#pragma unroll
                        for (u32 e = 0; e < EACH; e++) sums[e][u * K + v] += gradients[p][e] * values[p + v];
                    }
                }
            }
        });
    }
    // Adds up the sums of the groups of lanes, some taps at a time, in the shared memory that held the bands.
    constexpr u32 FILTERS = EACH * LANES, GROUPS = FIRST_THREADS / LANES, TAPS = BAND_VALUES / (GROUPS * FILTERS);
    const u32 lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    f32 *slice = dw + (u64)blockIdx.x * shape.filters * (K * K), *partial = input;
#pragma unroll
    for (u32 first = 0; first < K * K; first += TAPS) {
        __syncthreads();
#pragma unroll
        for (u32 tap = 0; tap < TAPS; tap++) {
#pragma unroll
            for (u32 e = 0; e < EACH; e++) {
                if (first + tap < K * K) partial[(tap * GROUPS + group) * FILTERS + e * LANES + lane] = sums[e][first + tap];
            }
        }
        __syncthreads();
        for (u32 i = threadIdx.x; i < least(TAPS, K * K - first) * FILTERS; i += FIRST_THREADS) {
            const u32 tap = i / FILTERS, filter = blockIdx.y * FILTERS + i % FILTERS;
            f32 sum = 0.0f;
#pragma unroll
            for (u32 part = 0; part < GROUPS; part++) sum += partial[(tap * GROUPS + part) * FILTERS + i % FILTERS];
            if (filter < shape.filters) slice[filter * (K * K) + first + tap] = sum;
        }
    }
}

#define FIRST_FORWARD(T) (const T *x, const T *w, const f32 *bias, T *y, const __grid_constant__ OneChannel shape)
#define FIRST_BACKWARD(T) (const T *x, const T *dy, f32 *dw, const __grid_constant__ OneChannel shape)

// For each side of the kernel: one or two filters per lane, or few filters.

KERNEL_BOUNDS(conv_first_forward_f32_k3_few, 256) FIRST_FORWARD(f32) {
    first_forward<f32, 3, 1, FEW_FILTERS>(x, w, bias, y, shape);
}
KERNEL_BOUNDS(conv_first_forward_f32_k3_x1, 256) FIRST_FORWARD(f32) {
    first_forward<f32, 3, 1>(x, w, bias, y, shape);
}
KERNEL_BOUNDS(conv_first_forward_f32_k3_x2, 256) FIRST_FORWARD(f32) {
    first_forward<f32, 3, 2>(x, w, bias, y, shape);
}
KERNEL_BOUNDS(conv_first_forward_f32_k5_few, 256) FIRST_FORWARD(f32) {
    first_forward<f32, 5, 1, FEW_FILTERS>(x, w, bias, y, shape);
}
KERNEL_BOUNDS(conv_first_forward_f32_k5_x1, 256) FIRST_FORWARD(f32) {
    first_forward<f32, 5, 1>(x, w, bias, y, shape);
}
KERNEL_BOUNDS(conv_first_forward_f32_k5_x2, 256) FIRST_FORWARD(f32) {
    first_forward<f32, 5, 2>(x, w, bias, y, shape);
}

KERNEL_BOUNDS(conv_first_backward_weights_f32_k3_few, 256) FIRST_BACKWARD(f32) {
    first_backward_weights<f32, 3, 1, FEW_FILTERS>(x, dy, dw, shape);
}
KERNEL_BOUNDS(conv_first_backward_weights_f32_k3_x1, 256) FIRST_BACKWARD(f32) {
    first_backward_weights<f32, 3, 1>(x, dy, dw, shape);
}
KERNEL_BOUNDS(conv_first_backward_weights_f32_k3_x2, 256) FIRST_BACKWARD(f32) {
    first_backward_weights<f32, 3, 2>(x, dy, dw, shape);
}
KERNEL_BOUNDS(conv_first_backward_weights_f32_k5_few, 256) FIRST_BACKWARD(f32) {
    first_backward_weights<f32, 5, 1, FEW_FILTERS>(x, dy, dw, shape);
}
KERNEL_BOUNDS(conv_first_backward_weights_f32_k5_x1, 256) FIRST_BACKWARD(f32) {
    first_backward_weights<f32, 5, 1>(x, dy, dw, shape);
}
KERNEL_BOUNDS(conv_first_backward_weights_f32_k5_x2, 256) FIRST_BACKWARD(f32) {
    first_backward_weights<f32, 5, 2>(x, dy, dw, shape);
}

KERNEL_BOUNDS(conv_first_forward_bf16_k3_few, 256) FIRST_FORWARD(bf16) {
    first_forward<bf16, 3, 1, FEW_FILTERS>(x, w, bias, y, shape);
}
KERNEL_BOUNDS(conv_first_forward_bf16_k3_x1, 256) FIRST_FORWARD(bf16) {
    first_forward<bf16, 3, 1>(x, w, bias, y, shape);
}
KERNEL_BOUNDS(conv_first_forward_bf16_k3_x2, 256) FIRST_FORWARD(bf16) {
    first_forward<bf16, 3, 2>(x, w, bias, y, shape);
}
KERNEL_BOUNDS(conv_first_forward_bf16_k5_few, 256) FIRST_FORWARD(bf16) {
    first_forward<bf16, 5, 1, FEW_FILTERS>(x, w, bias, y, shape);
}
KERNEL_BOUNDS(conv_first_forward_bf16_k5_x1, 256) FIRST_FORWARD(bf16) {
    first_forward<bf16, 5, 1>(x, w, bias, y, shape);
}
KERNEL_BOUNDS(conv_first_forward_bf16_k5_x2, 256) FIRST_FORWARD(bf16) {
    first_forward<bf16, 5, 2>(x, w, bias, y, shape);
}

KERNEL_BOUNDS(conv_first_backward_weights_bf16_k3_few, 256) FIRST_BACKWARD(bf16) {
    first_backward_weights<bf16, 3, 1, FEW_FILTERS>(x, dy, dw, shape);
}
KERNEL_BOUNDS(conv_first_backward_weights_bf16_k3_x1, 256) FIRST_BACKWARD(bf16) {
    first_backward_weights<bf16, 3, 1>(x, dy, dw, shape);
}
KERNEL_BOUNDS(conv_first_backward_weights_bf16_k3_x2, 256) FIRST_BACKWARD(bf16) {
    first_backward_weights<bf16, 3, 2>(x, dy, dw, shape);
}
KERNEL_BOUNDS(conv_first_backward_weights_bf16_k5_few, 256) FIRST_BACKWARD(bf16) {
    first_backward_weights<bf16, 5, 1, FEW_FILTERS>(x, dy, dw, shape);
}
KERNEL_BOUNDS(conv_first_backward_weights_bf16_k5_x1, 256) FIRST_BACKWARD(bf16) {
    first_backward_weights<bf16, 5, 1>(x, dy, dw, shape);
}
KERNEL_BOUNDS(conv_first_backward_weights_bf16_k5_x2, 256) FIRST_BACKWARD(bf16) {
    first_backward_weights<bf16, 5, 2>(x, dy, dw, shape);
}
