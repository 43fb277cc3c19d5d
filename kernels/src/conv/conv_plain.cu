// The passes of a convolution as plain sums, one thread for each result. Autotuning compares all other kernels with
// these, so they share nothing with them: no tiles, no shared memory, no tensor cores, no rounding of operands.
// Neighbouring threads compute neighbouring channels, so that their loads are contiguous.

struct PlainConvolution {
    u32 images, channels, height, width;
    u32 filters, out_height, out_width;
    u32 kernel, pad;
    f32 slope;
};

// A sum with Kahan's compensation: its error does not grow with the number of terms.
struct CompensatedSum {
    f32 value = 0.0f, excess = 0.0f;

    __device__ void add_product(f32 a, f32 b) {
        const f32 term = fmaf(a, b, -excess), next = value + term;
        excess = (next - value) - term;
        value = next;
    }
};

// Weights [filters][taps and channels] to [taps and channels][filters].
template <class T>
__device__ inline void plain_transpose(const T* weights, u32 filters, u32 filter_len, f32* transposed) {
    for (u32 at = grid_thread(); at < filters * filter_len; at += grid_threads()) {
        transposed[at] = to_f32(weights[at % filters * filter_len + at / filters]);
    }
}

// y[n, i, j, f], with bias and activation; `weights` are transposed.
template <class T>
__device__ inline void plain_forward(
    const T* x, const f32* weights, const f32* bias, f32* y, const PlainConvolution& shape) {
    const u32 len = shape.images * shape.out_height * shape.out_width * shape.filters;
    for (u32 at = grid_thread(); at < len; at += grid_threads()) {
        const u32 f = at % shape.filters, pixel = at / shape.filters;
        const u32 j = pixel % shape.out_width, i = pixel / shape.out_width % shape.out_height;
        const u32 n = pixel / shape.out_width / shape.out_height;
        CompensatedSum sum;
        for (u32 u = 0; u < shape.kernel; u++) {
            for (u32 v = 0; v < shape.kernel; v++) {
                // Above and left of the image these wrap around to large numbers.
                const u32 row = i + u - shape.pad, column = j + v - shape.pad;
                if (row >= shape.height || column >= shape.width) continue;
                const T* from = x + ((n * shape.height + row) * shape.width + column) * shape.channels;
                const f32* by = weights + (u * shape.kernel + v) * shape.channels * shape.filters + f;
                for (u32 c = 0; c < shape.channels; c++) sum.add_product(to_f32(from[c]), by[c * shape.filters]);
            }
        }
        y[at] = rectify(sum.value + bias[f], shape.slope);
    }
}

// dx[n, p, q, c]
template <class T>
__device__ inline void plain_backward_input(const T* weights, const T* dy, f32* dx, const PlainConvolution& shape) {
    const u32 len = shape.images * shape.height * shape.width * shape.channels;
    const u32 taps = shape.kernel * shape.kernel;
    for (u32 at = grid_thread(); at < len; at += grid_threads()) {
        const u32 c = at % shape.channels, pixel = at / shape.channels;
        const u32 q = pixel % shape.width, p = pixel / shape.width % shape.height;
        const u32 n = pixel / shape.width / shape.height;
        CompensatedSum sum;
        for (u32 u = 0; u < shape.kernel; u++) {
            for (u32 v = 0; v < shape.kernel; v++) {
                const u32 i = p + shape.pad - u, j = q + shape.pad - v;
                if (i >= shape.out_height || j >= shape.out_width) continue;
                const T* from = dy + ((n * shape.out_height + i) * shape.out_width + j) * shape.filters;
                const T* by = weights + (u * shape.kernel + v) * shape.channels + c;
                for (u32 f = 0; f < shape.filters; f++) {
                    sum.add_product(to_f32(from[f]), to_f32(by[f * taps * shape.channels]));
                }
            }
        }
        dx[at] = sum.value;
    }
}

// dw[f, u, v, c]
template <class T>
__device__ inline void plain_backward_weights(const T* x, const T* dy, f32* dw, const PlainConvolution& shape) {
    const u32 taps = shape.kernel * shape.kernel, len = shape.filters * taps * shape.channels;
    for (u32 at = grid_thread(); at < len; at += grid_threads()) {
        const u32 c = at % shape.channels, tap = at / shape.channels % taps, f = at / shape.channels / taps;
        const u32 u = tap / shape.kernel, v = tap % shape.kernel;
        CompensatedSum sum;
        for (u32 n = 0; n < shape.images; n++) {
            for (u32 i = 0; i < shape.out_height; i++) {
                const u32 row = i + u - shape.pad;
                if (row >= shape.height) continue;
                for (u32 j = 0; j < shape.out_width; j++) {
                    const u32 column = j + v - shape.pad;
                    if (column >= shape.width) continue;
                    const u32 input = (n * shape.height + row) * shape.width + column;
                    const u32 output = (n * shape.out_height + i) * shape.out_width + j;
                    sum.add_product(to_f32(x[input * shape.channels + c]), to_f32(dy[output * shape.filters + f]));
                }
            }
        }
        dw[at] = sum.value;
    }
}

KERNEL(conv_plain_transpose_f32)(const f32* weights, u32 filters, u32 filter_len, f32* transposed) {
    plain_transpose(weights, filters, filter_len, transposed);
}
KERNEL(conv_plain_transpose_bf16)(const bf16* weights, u32 filters, u32 filter_len, f32* transposed) {
    plain_transpose(weights, filters, filter_len, transposed);
}
KERNEL(conv_plain_transpose_f16)(const f16* weights, u32 filters, u32 filter_len, f32* transposed) {
    plain_transpose(weights, filters, filter_len, transposed);
}

KERNEL(conv_plain_forward_f32)(
    const f32* x, const f32* weights, const f32* bias, f32* y, const __grid_constant__ PlainConvolution shape) {
    plain_forward(x, weights, bias, y, shape);
}
KERNEL(conv_plain_forward_bf16)(
    const bf16* x, const f32* weights, const f32* bias, f32* y, const __grid_constant__ PlainConvolution shape) {
    plain_forward(x, weights, bias, y, shape);
}
KERNEL(conv_plain_forward_f16)(
    const f16* x, const f32* weights, const f32* bias, f32* y, const __grid_constant__ PlainConvolution shape) {
    plain_forward(x, weights, bias, y, shape);
}

KERNEL(conv_plain_backward_input_f32)(
    const f32* weights, const f32* dy, f32* dx, const __grid_constant__ PlainConvolution shape) {
    plain_backward_input(weights, dy, dx, shape);
}
KERNEL(conv_plain_backward_input_bf16)(
    const bf16* weights, const bf16* dy, f32* dx, const __grid_constant__ PlainConvolution shape) {
    plain_backward_input(weights, dy, dx, shape);
}
KERNEL(conv_plain_backward_input_f16)(
    const f16* weights, const f16* dy, f32* dx, const __grid_constant__ PlainConvolution shape) {
    plain_backward_input(weights, dy, dx, shape);
}

KERNEL(conv_plain_backward_weights_f32)(
    const f32* x, const f32* dy, f32* dw, const __grid_constant__ PlainConvolution shape) {
    plain_backward_weights(x, dy, dw, shape);
}
KERNEL(conv_plain_backward_weights_bf16)(
    const bf16* x, const bf16* dy, f32* dw, const __grid_constant__ PlainConvolution shape) {
    plain_backward_weights(x, dy, dw, shape);
}
KERNEL(conv_plain_backward_weights_f16)(
    const f16* x, const f16* dy, f32* dw, const __grid_constant__ PlainConvolution shape) {
    plain_backward_weights(x, dy, dw, shape);
}
