// Convolutions as matrix products whose operands are gathered on the fly ("implicit GEMM"; Chetlur and others,
// "cuDNN: efficient primitives for deep learning", 2014). Included after tiles.cuh.
//
//   pass              rows           columns          depth
//   forward           output pixels  filters          taps x channels
//   backward_input    input pixels   channels         taps x filters
//   backward_weights  filters        taps x channels  output pixels, in slices that another kernel adds up
//
// A tap is one of the K x K positions of the kernel, a pixel a position of one of the images.

typedef long long i64;

// Replaces the division of a number below 2^31 by a multiplication (Granlund and Montgomery, "Division by invariant
// integers using multiplication", 1994): shift = ceil(log2 divisor), magic = ceil(2^(31 + shift) / divisor).
struct Reciprocal {
    u32 magic, shift;
};

__device__ inline u32 divide(u32 value, u32 divisor, Reciprocal reciprocal, u32& rest) {
    const u32 quotient = (u32)(((u64)value * reciprocal.magic) >> 31) >> reciprocal.shift;
    rest = value - quotient * divisor;
    return quotient;
}

// The extents of the input or the output images, with the reciprocals that decompose an index.
struct ImageExtents {
    u32 channels, height, width, pixels;   // pixels: of the whole batch
    Reciprocal by_channels, by_width, by_plane;

    // Decomposes the index of a pixel in the batch into image, row and column.
    __device__ u32 place(u32 pixel, u32& row, u32& column) const {
        u32 rest;
        const u32 image = divide(pixel, height * width, by_plane, rest);
        row = divide(rest, width, by_width, column);
        return image;
    }

    // Channels are the inner index.
    __device__ u32 outer(u32 index, u32& channel) const { return divide(index, channels, by_channels, channel); }
};

struct Convolution {
    ImageExtents input, output;
    Reciprocal by_kernel;
    u32 kernel, pad;
    u32 slice;   // output pixels per slice in backward_weights: a multiple of a step's depth
    f32 slope;   // of the activation for negative values: 1 is none, 0 is ReLU

    __device__ u32 taps() const { return kernel * kernel; }

    __device__ void tap(u32 tap, i32& down, i32& right) const {
        u32 column;
        down = (i32)divide(tap, kernel, by_kernel, column);
        right = (i32)column;
    }
};

// ---- Operands in global memory ----
// Each operand returns the element at a line and a depth, or 16 bytes at lines or depths prepared before by
// find_line, find_depth or find_run. Elements beyond the last line are zero; AlongDepth and AlongLines handle the end
// of the depth.

// Lines are pixels of the images `lines`, depths are (tap, channel): the pixels of the images `side` that the kernel
// covers at that position. From an output pixel in row y, tap u reads the input row y - P + u; from an input pixel in
// row y, tap u reads the output row y + P - u.
template <class T, i32 SIGN>
struct GatherByPixel {
    const T* values;
    const ImageExtents& lines;
    const ImageExtents& side;
    const Convolution& shape;
    i32 y[2], x[2], pixel[2];   // position read by tap 0
    u32 channel;
    i32 down, right;

    __device__ GatherByPixel(const T* values, const ImageExtents& lines, const ImageExtents& side, const Convolution& shape)
        : values(values), lines(lines), side(side), shape(shape) {}

    __device__ void find_line(u32 i, u32 line) {
        u32 row, column;
        const u32 image = lines.place(line, row, column);
        // A line beyond the last one reads zeros: no tap leads from there into the image.
        y[i] = line < lines.pixels ? (i32)row - SIGN * (i32)shape.pad : -(1 << 30);
        x[i] = (i32)column - SIGN * (i32)shape.pad;
        pixel[i] = (i32)((image * side.height + (u32)y[i]) * side.width + (u32)x[i]);
    }

    __device__ void find_depth(u32 depth) {
        shape.tap(side.outer(depth, channel), down, right);
        down *= SIGN, right *= SIGN;
    }

    __device__ bool inside(u32 i) const {
        return (u32)(y[i] + down) < side.height && (u32)(x[i] + right) < side.width;
    }

    __device__ const T* address(u32 i) const {
        return values + ((i64)(pixel[i] + (down * (i32)side.width + right)) * side.channels + channel);
    }

    __device__ Quad quad(u32 i) const { return inside(i) ? *(const Quad*)address(i) : Quad{}; }

    __device__ T element(u32 line, u32 depth) {
        find_line(0, line);
        find_depth(depth);
        return inside(0) ? *address(0) : T{};
    }
};

// Lines are filters, depths are (tap, channel).
template <class T>
struct Filters {
    const T* values;
    u32 filters, length;
    u32 at[2];
    u32 depth;

    __device__ Filters(const T* values, const Convolution& shape)
        : values(values), filters(shape.output.channels), length(shape.taps() * shape.input.channels) {}

    __device__ void find_line(u32 i, u32 line) { at[i] = line < filters ? line * length : ~0u; }
    __device__ void find_depth(u32 found) { depth = found; }
    __device__ Quad quad(u32 i) const { return at[i] != ~0u ? *(const Quad*)(values + (at[i] + depth)) : Quad{}; }
    __device__ T element(u32 line, u32 at) const { return line < filters ? values[line * length + at] : T{}; }
};

// Lines are channels, depths are (tap, filter): the same weights, transposed.
template <class T>
struct Channels {
    const T* values;
    const Convolution& shape;
    u32 channel;

    __device__ Channels(const T* values, const Convolution& shape) : values(values), shape(shape) {}

    __device__ void find_run(u32 line) { channel = line; }

    __device__ const T* address(u32 line, u32 depth) const {
        u32 filter;
        const u32 tap = shape.output.outer(depth, filter);
        return values + ((filter * shape.taps() + tap) * shape.input.channels + line);
    }

    __device__ Quad quad(u32 depth) const {
        return channel < shape.input.channels ? *(const Quad*)address(channel, depth) : Quad{};
    }

    __device__ T element(u32 line, u32 depth) const {
        return line < shape.input.channels ? *address(line, depth) : T{};
    }
};

// Lines are filters, depths are output pixels: the gradient of the output, transposed.
template <class T>
struct Gradients {
    const T* values;
    u32 filters, filter;

    __device__ Gradients(const T* values, const Convolution& shape) : values(values), filters(shape.output.channels) {}

    __device__ void find_run(u32 line) { filter = line; }
    __device__ const T* address(u32 line, u32 depth) const { return values + ((u64)depth * filters + line); }
    __device__ Quad quad(u32 depth) const { return filter < filters ? *(const Quad*)address(filter, depth) : Quad{}; }
    __device__ T element(u32 line, u32 depth) const { return line < filters ? *address(line, depth) : T{}; }
};

// Lines are (tap, channel), depths are output pixels: the input that the kernel covers at that position.
template <class T>
struct GatherByTap {
    const T* values;
    const Convolution& shape;
    u32 channel;
    i32 down, right;

    __device__ GatherByTap(const T* values, const Convolution& shape) : values(values), shape(shape) {}

    __device__ void find_run(u32 line) {
        const u32 tap = shape.input.outer(line, channel);
        shape.tap(tap, down, right);
        // A tap beyond the last one reads zeros.
        down = tap < shape.taps() ? down - (i32)shape.pad : 1 << 30;
        right -= (i32)shape.pad;
    }

    // The address of the run's input for an output pixel, or null outside the image.
    __device__ const T* address(u32 depth) const {
        u32 row, column;
        const u32 image = shape.output.place(depth, row, column);
        const u32 y = row + (u32)down, x = column + (u32)right;
        if (y >= shape.input.height || x >= shape.input.width) return nullptr;
        return values + ((u64)((image * shape.input.height + y) * shape.input.width + x) * shape.input.channels + channel);
    }

    __device__ Quad quad(u32 depth) const {
        const T* at = address(depth);
        return at ? *(const Quad*)at : Quad{};
    }

    __device__ T element(u32 line, u32 depth) {
        find_run(line);
        const T* at = address(depth);
        return at ? *at : T{};
    }
};

// ---- The passes ----

#define PRODUCT_TYPE template <class, class> class PRODUCT

// Tiles that share rows have consecutive block indices, since the gathered operand is the larger one.
template <class TILE>
__device__ inline void tile_of_block(u32 columns, u32& row, u32& column) {
    const u32 across = (columns + TILE::SIDE - 1) / TILE::SIDE;
    row = blockIdx.x / across * TILE::SIDE;
    column = blockIdx.x % across * TILE::SIDE;
}

template <class T, PRODUCT_TYPE, class TILE, bool VECTOR>
__device__ inline void forward(const T* x, const T* w, const f32* bias, T* y, const Convolution& shape) {
    using Product = PRODUCT<T, TILE>;
    using Left = AlongDepth<T, TILE, Product, GatherByPixel<T, 1>, VECTOR>;
    using Right = AlongDepth<T, TILE, Product, Filters<T>, VECTOR>;
    const u32 rows = shape.output.pixels, columns = shape.output.channels;
    u32 row, column;
    tile_of_block<TILE>(columns, row, column);
    Left left({x, shape.output, shape.input, shape}, row);
    Right right({w, shape}, column);
    Product product;
    multiply(left, right, product, row, column, 0, shape.taps() * shape.input.channels, Elements<T>::STEP);
    product.write(Result<T, true, VECTOR>(y, rows, columns, row, column, bias, shape.slope));
}

template <class T, PRODUCT_TYPE, class TILE, bool VECTOR>
__device__ inline void backward_input(const T* w, const T* dy, T* dx, const Convolution& shape) {
    using Product = PRODUCT<T, TILE>;
    using Left = AlongDepth<T, TILE, Product, GatherByPixel<T, -1>, VECTOR>;
    using Right = AlongLines<T, TILE, Product, Channels<T>, VECTOR>;
    const u32 rows = shape.input.pixels, columns = shape.input.channels;
    u32 row, column;
    tile_of_block<TILE>(columns, row, column);
    Left left({dy, shape.input, shape.output, shape}, row);
    Right right({w, shape}, column);
    Product product;
    multiply(left, right, product, row, column, 0, shape.taps() * shape.output.channels, Elements<T>::STEP);
    product.write(Result<T, false, VECTOR>(dx, rows, columns, row, column, nullptr, 1.0f));
}

// `dw` receives the weights' gradient of each slice of the output pixels, one slice after another.
template <class T, PRODUCT_TYPE, class TILE, bool VECTOR>
__device__ inline void backward_weights(const T* x, const T* dy, f32* dw, const Convolution& shape) {
    using Product = PRODUCT<T, TILE>;
    using Left = AlongLines<T, TILE, Product, Gradients<T>, VECTOR>;
    using Right = AlongLines<T, TILE, Product, GatherByTap<T>, VECTOR>;
    const u32 rows = shape.output.channels, columns = shape.taps() * shape.input.channels;
    u32 row, column;
    tile_of_block<TILE>(columns, row, column);
    const u32 start = blockIdx.y * shape.slice, end = least(start + shape.slice, shape.output.pixels);
    Left left({dy, shape}, row);
    Right right({x, shape}, column);
    Product product;
    multiply(left, right, product, row, column, start, end, Elements<T>::STEP);
    f32* slice = dw + (u64)blockIdx.y * rows * columns;
    product.write(Result<f32, false, VECTOR>(slice, rows, columns, row, column, nullptr, 1.0f));
}

// ---- Entry points ----
// They are in a source for each precision. `_large` and `_small` move 16 bytes at a time: channels and filters are
// multiples of 4 in f32, of 8 in bf16. `_scalar` supports any numbers.

#ifdef TENSOR_CORES
#define TENSOR TensorProduct
#else
#define TENSOR PlainProduct
#endif

// Threads per block and, if the compiler would otherwise use too many registers, the minimum number of blocks per
// multiprocessor.
#ifdef MGPU_SHIM
#define LARGE 256
#else
#define LARGE 256, 2
#endif
#define SMALL 128

#define FORWARD(T) (const T *x, const T *w, const f32 *bias, T *y, const __grid_constant__ Convolution shape)
#define BACKWARD_INPUT(T) (const T *w, const T *dy, T *dx, const __grid_constant__ Convolution shape)
#define BACKWARD_WEIGHTS(T) (const T *x, const T *dy, f32 *dw, const __grid_constant__ Convolution shape)
