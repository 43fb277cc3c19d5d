// Convolutions as matrix products whose operands are gathered on the fly ("implicit GEMM"; Chetlur and others,
// "cuDNN: efficient primitives for deep learning", 2014). Included after results.cuh.
//
//   pass              rows           columns          depth
//   forward           output pixels  filters          taps x channels
//   backward_input    input pixels   channels         taps x filters
//   backward_weights  filters        taps x channels  output pixels, in slices that another kernel adds up
//
// A tap is one of the K x K positions of the kernel, a pixel a position of one of the images.

// ---- Operands in global memory ----
// Each operand returns the element at a line and a depth, or the source of 16 bytes at lines or depths prepared before
// by find_line, find_depth or find_run. After begin(depth, apart), each call of `next` returns the source that is `apart`
// depths after that of the call before: without divisions. Elements beyond the last line are zero; AlongDepth and AlongLines handle the end
// of the depth.
//
// NARROW operands have 2, 4 or 6 channels of 16 bits, fewer than a unit of 16 bytes. Lines and depths that name a channel
// are then numbered as if there were eight of them, so that a unit is the channels of one tap; the missing ones are zeros.
//
// EVEN operands are those of dense layers whose channels or filters are even, but no multiple of eight: the last unit of a
// matrix's row is not whole.

#define WHOLE_UNITS 0
#define NARROW_UNITS 1
#define EVEN_UNITS 2

// Lines are pixels of the images `lines`, depths are (tap, channel): the pixels of the images `side` that the kernel
// covers at that position. From an output pixel in row y, tap u reads the input row y - P + u; from an input pixel in
// row y, tap u reads the output row y + P - u. If the output is pooled (`windows`), lines are the pixels of one window
// after another, four each.
template <class T, i32 SIGN, u32 LINES, bool NARROW = false>
struct GatherByPixel {
    const T* values;
    const ImageExtents& lines;
    const ImageExtents& side;
    const Convolution& shape;
    const ImageExtents* windows;
    i32 y[LINES], x[LINES];   // position read by tap 0
    u32 pixel[LINES];
    i32 down, right;
    u32 offset;   // of the depth from that pixel, in pixels
    const T* origin;   // of the depth's channel

    __device__ GatherByPixel(
        const T* values, const ImageExtents& lines, const ImageExtents& side, const Convolution& shape,
        const ImageExtents* windows = nullptr)
        : values(values), lines(lines), side(side), shape(shape), windows(windows) {}

    __device__ void find_line(u32 i, u32 line) {
        u32 row, column, image;
        bool known = line < lines.pixels;
        if (windows) {
            image = windows->place(line / 4, row, column);
            row = 2 * row + line / 2 % 2, column = 2 * column + line % 2;
            known = line / 4 < windows->pixels && row < lines.height && column < lines.width;
        } else {
            image = lines.place(line, row, column);
        }
        // A line beyond the last one reads zeros: no tap leads from there into the image.
        y[i] = known ? (i32)row - SIGN * (i32)shape.pad : -(1 << 30);
        x[i] = (i32)column - SIGN * (i32)shape.pad;
        pixel[i] = known ? (image * side.height + (u32)y[i]) * side.width + (u32)x[i] : 0;
    }

    __device__ void find_depth(u32 depth) {
        u32 channel = 0;
        const u32 tap = NARROW ? depth / Elements<T>::QUAD : side.outer(depth, channel);
        shape.tap(tap, down, right);
        down *= SIGN, right *= SIGN;
        offset = (u32)down * side.width + (u32)right;
        origin = values + channel;
    }

    __device__ bool inside(u32 i) const {
        return (u32)(y[i] + down) < side.height && (u32)(x[i] + right) < side.width;
    }

    __device__ const T* at(u32 i) const {
        return (const T*)((const u8*)origin + (u64)(pixel[i] + offset) * (side.channels * (u32)sizeof(T)));
    }

    __device__ auto source(u32 i) const { return source_of<T, NARROW>(at(i), inside(i), side.channels); }

    __device__ T element(u32 line, u32 depth) {
        find_line(0, line);
        find_depth(depth);
        return inside(0) ? *at(0) : T{};
    }
};

// Lines are filters, depths are (tap, channel).
template <class T, u32 LINES, bool NARROW = false>
struct Filters {
    const T* values;
    u32 filters, channels, length;
    u32 at[LINES];   // below 2^31 if there is such a filter
    u32 depth;

    __device__ Filters(const T* values, const Convolution& shape)
        : values(values), filters(shape.output.channels), channels(shape.input.channels),
          length(shape.taps() * shape.input.channels) {}

    __device__ void find_line(u32 i, u32 line) { at[i] = line < filters ? line * length : 1u << 31; }
    __device__ void find_depth(u32 found) { depth = NARROW ? found / Elements<T>::QUAD * channels : found; }

    __device__ auto source(u32 i) const {
        return source_of<T, NARROW>(values + (at[i] + depth), at[i] >> 31 == 0, channels);
    }

    __device__ T element(u32 line, u32 at) const { return line < filters ? values[line * length + at] : T{}; }
};

// Lines are channels, depths are (tap, filter): the same weights, transposed.
template <class T, bool NARROW = false>
struct Channels {
    const T* values;
    const Convolution& shape;
    u32 channel;
    // The filter of the next source and the offset of its weights; and how far the source after it is from there.
    u32 filter, offset, filters_apart, offset_apart;

    __device__ Channels(const T* values, const Convolution& shape) : values(values), shape(shape) {}

    __device__ void find_run(u32 line) { channel = line; }

    __device__ void begin(u32 depth, u32 apart) {
        offset = offset_of(depth, filter) + channel;
        offset_apart = offset_of(apart, filters_apart);
    }

    __device__ Source<T> next() {
        const u32 filters = shape.output.channels, channels = shape.input.channels;
        const Source<T> found{values + offset, channel < channels};
        filter += filters_apart, offset += offset_apart;
        // The next tap.
        if (filter >= filters) filter -= filters, offset += channels - filters * shape.taps() * channels;
        return found;
    }

    __device__ u32 offset_of(u32 depth, u32& filter) const {
        const u32 tap = shape.output.outer(depth, filter);
        return (filter * shape.taps() + tap) * shape.input.channels;
    }

    __device__ const T* address(u32 line, u32 depth) const {
        u32 filter;
        return values + (offset_of(depth, filter) + line);
    }

    __device__ auto source(u32 depth) const {
        const u32 channels = shape.input.channels;
        return source_of<T, NARROW>(address(channel, depth), channel < channels, channels);
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
    const T* following;   // the next source
    u64 apart;

    __device__ Gradients(const T* values, const Convolution& shape) : values(values), filters(shape.output.channels) {}

    __device__ void find_run(u32 line) { filter = line; }
    __device__ const T* address(u32 line, u32 depth) const { return values + ((u64)depth * filters + line); }
    __device__ Source<T> source(u32 depth) const { return {address(filter, depth), filter < filters}; }

    __device__ void begin(u32 depth, u32 depths) { following = address(filter, depth), apart = (u64)depths * filters; }

    __device__ Source<T> next() {
        const Source<T> found{following, filter < filters};
        following += apart;
        return found;
    }

    __device__ T element(u32 line, u32 depth) const { return line < filters ? *address(line, depth) : T{}; }
};

// Lines are (tap, channel), depths are output pixels: the input that the kernel covers at that position.
template <class T, bool NARROW = false>
struct GatherByTap {
    const T* values;
    const Convolution& shape;
    u32 channel;
    i32 down, right;
    // The pixel that the next source reads, which is in row y and column x. And how far the one after it is from there, if
    // no row and no image ends.
    const T* origin;
    u32 pixel, apart;
    i32 y, x, bottom, edge, rows_apart, columns_apart;

    __device__ GatherByTap(const T* values, const Convolution& shape) : values(values), shape(shape) {}

    __device__ void find_run(u32 line) {
        u32 tap;
        if constexpr (NARROW) {
            tap = line / Elements<T>::QUAD, channel = 0;
        } else {
            tap = shape.input.outer(line, channel);
        }
        shape.tap(tap, down, right);
        // A tap beyond the last one reads zeros.
        down = tap < shape.taps() ? down - (i32)shape.pad : 1 << 30;
        right -= (i32)shape.pad;
    }

    __device__ void begin(u32 depth, u32 depths) {
        u32 row, column;
        u32 image = shape.output.place(depth, row, column);
        y = (i32)row + down, x = (i32)column + right;
        pixel = (image * shape.input.height + (u32)y) * shape.input.width + (u32)x;
        image = shape.output.place(depths, row, column);
        apart = kept((image * shape.input.height + row) * shape.input.width + column);
        rows_apart = (i32)kept(row), columns_apart = (i32)kept(column);
        bottom = (i32)kept(shape.output.height + (u32)down), edge = (i32)kept(shape.output.width + (u32)right);
        origin = values + kept(channel);
    }

    __device__ Source<T> next() {
        const ImageExtents &input = shape.input, &output = shape.output;
        const u8* at = (const u8*)origin + (u64)pixel * (input.channels * (u32)sizeof(T));
        const Source<T> found{(const T*)at, (u32)y < input.height && (u32)x < input.width};
        x += columns_apart, y += rows_apart, pixel += apart;
        if (x >= edge) x -= (i32)output.width, y++, pixel += input.width - output.width;
        if (y >= bottom) y -= (i32)output.height, pixel += (input.height - output.height) * input.width;
        return found;
    }

    __device__ auto source(u32 depth) const {
        u32 row, column;
        const u32 image = shape.output.place(depth, row, column);
        const u32 y = row + (u32)down, x = column + (u32)right;
        const u64 pixel = (image * shape.input.height + y) * shape.input.width + x;
        const T* from = values + (pixel * shape.input.channels + channel);
        const bool inside = y < shape.input.height && x < shape.input.width;
        return source_of<T, NARROW>(from, inside, shape.input.channels);
    }

    __device__ T element(u32 line, u32 depth) {
        find_run(line);
        const Source<T> from = source(depth);
        return from.inside ? *from.at : T{};
    }
};

// Lines are the rows of a matrix, depths its columns.
template <class T, u32 LINES>
struct EvenRows {
    const T* values;
    u32 rows, columns, depth;
    const T* from[LINES];   // null beyond the last row

    __device__ EvenRows(const T* values, u32 rows, u32 columns) : values(values), rows(rows), columns(columns) {}

    // The rows of samples, and those of filters.
    __device__ EvenRows(
        const T* values, const ImageExtents& lines, const ImageExtents& side, const Convolution&, const ImageExtents* = nullptr)
        : EvenRows(values, lines.pixels, side.channels) {}
    __device__ EvenRows(const T* values, const Convolution& shape)
        : EvenRows(values, shape.output.channels, shape.input.channels) {}

    __device__ void find_line(u32 i, u32 line) { from[i] = line < rows ? values + (u64)line * columns : nullptr; }
    __device__ void find_depth(u32 found) { depth = found; }

    __device__ NarrowSource<T> source(u32 i) const {
        return {from[i] + depth, from[i] ? least(4u, (columns - depth) / 2) : 0};
    }
};

// Lines are the columns of a matrix, depths its rows: those of the weights or of the input, or of the gradients.
template <class T, bool OF_OUTPUT>
struct EvenColumns {
    const T* values;
    u32 columns, words;

    __device__ EvenColumns(const T* values, const Convolution& shape)
        : values(values), columns(OF_OUTPUT ? shape.output.channels : shape.input.channels) {}

    __device__ void find_run(u32 line) { words = line < columns ? least(4u, (columns - line) / 2) : 0, values += line; }
    __device__ NarrowSource<T> source(u32 depth) const { return {values + (u64)depth * columns, words}; }
};

// ---- The passes ----

#define PRODUCT_TYPE template <class, class> class PRODUCT

// The input's channels in lines and depths.
template <class T, u32 UNITS>
__device__ inline u32 numbered_channels(const Convolution& shape) {
    return UNITS == NARROW_UNITS ? Elements<T>::QUAD : shape.input.channels;
}

template <u32 UNITS, class EVEN, class OTHER>
using Operand = typename Conditional<UNITS == EVEN_UNITS, EVEN, OTHER>::Type;

// Tiles that share rows have consecutive block indices, since the gathered operand is the larger one.
template <class TILE>
__device__ inline void tile_of_block(u32 columns, u32& row, u32& column) {
    const u32 across = (columns + TILE::SIDE - 1) / TILE::SIDE;
    row = blockIdx.x / across * TILE::SIDE;
    column = blockIdx.x % across * TILE::SIDE;
}

// The part of the depth that this block sums up: a slice, or all of it. Large tiles have no slices (partition.rs), and not
// the registers to add them up.
template <class TILE>
constexpr bool HAS_DEPTH_SLICES = TILE::SIDE < 128;

template <class TILE>
__device__ inline void depth_of_block(const Convolution& shape, u32 depth, u32& start, u32& end) {
    start = HAS_DEPTH_SLICES<TILE> ? blockIdx.y * shape.slice : 0;
    end = HAS_DEPTH_SLICES<TILE> ? least(start + shape.slice, depth) : depth;
}

// Passes the sums of a tile to `result`, when all slices of the depth are complete.
template <class TILE, class PRODUCT, class RESULT>
__device__ inline void write_sums(
    PRODUCT& product, const DepthSums& sums, const RESULT& result, u32 rows, u32 columns, u32* shared) {
    if constexpr (HAS_DEPTH_SLICES<TILE>) {
        if (!add_depth<TILE>(product, sums, rows - result.first_row, columns - result.first_column)) return;
    }
    product.write(result, shared);
}

template <class T, PRODUCT_TYPE, class TILE, bool VECTOR, u32 UNITS = WHOLE_UNITS>
__device__ inline void forward(
    const T* x, const T* w, const f32* bias, T* y, const Convolution& shape, const After& after,
    const DepthSums& sums) {
    using Product = PRODUCT<T, TILE>;
    constexpr bool WHOLE = VECTOR && UNITS == WHOLE_UNITS, NARROW = UNITS == NARROW_UNITS;
    using Rows = EvenRows<T, MOVES<TILE>>;
    using Pixels = Operand<UNITS, Rows, GatherByPixel<T, 1, MOVES<TILE>, NARROW>>;
    using Left = AlongDepth<T, TILE, Product, Pixels, VECTOR, WHOLE>;
    using Right = AlongDepth<T, TILE, Product, Operand<UNITS, Rows, Filters<T, MOVES<TILE>, NARROW>>, VECTOR, WHOLE>;
    auto& memory = TileMemory<TILE, Left, Right>::of_block();
    const u32 columns = shape.output.channels;
    u32 row, column;
    tile_of_block<TILE>(columns, row, column);
    Left left({x, shape.output, shape.input, shape, after.chosen ? &after.pooled : nullptr}, row);
    Right right({w, shape}, column);
    Product product;
    u32 start, end;
    depth_of_block<TILE>(shape, shape.taps() * numbered_channels<T, UNITS>(shape), start, end);
    multiply(left, right, product, memory, row, column, start, end, STEP<T, TILE>, [](const u32*) {});
    const ForwardResult<T, VECTOR> result{y, bias, shape, after, row, column};
    write_sums<TILE>(product, sums, result, result.rows(), columns, memory.words());
}

template <class T, PRODUCT_TYPE, class TILE, bool VECTOR, u32 UNITS = WHOLE_UNITS>
__device__ inline void backward_input(
    const T* w, const T* dy, T* dx, const Convolution& shape, const Before& before, const DepthSums& sums) {
    using Product = PRODUCT<T, TILE>;
    constexpr bool WHOLE = VECTOR && UNITS == WHOLE_UNITS;
    using Pixels = Operand<UNITS, EvenRows<T, MOVES<TILE>>, GatherByPixel<T, -1, MOVES<TILE>>>;
    using Weights = Operand<UNITS, EvenColumns<T, false>, Channels<T, UNITS == NARROW_UNITS>>;
    using Left = AlongDepth<T, TILE, Product, Pixels, VECTOR, WHOLE>;
    using Right = AlongLines<T, TILE, Product, Weights, VECTOR, WHOLE>;
    auto& memory = TileMemory<TILE, Left, Right>::of_block();
    const u32 columns = shape.input.channels;
    u32 row, column;
    tile_of_block<TILE>(columns, row, column);
    Left left({dy, shape.input, shape.output, shape}, row);
    Right right({w, shape}, column);
    Product product;
    u32 start, end;
    depth_of_block<TILE>(shape, shape.taps() * shape.output.channels, start, end);
    multiply(left, right, product, memory, row, column, start, end, STEP<T, TILE>, [](const u32*) {});
    const InputResult<T, WHOLE> result{dx, shape.input.pixels, columns, before, row, column};
    write_sums<TILE>(product, sums, result, shape.input.pixels, columns, memory.words());
}

// The weights' gradient from a slice of the output pixels; the last blocks add up the slices. The gradient of the bias
// is the sum of the lines of the left operand: the first tiles of the rows have them anyway.
template <class T, PRODUCT_TYPE, class TILE, bool VECTOR, u32 UNITS = WHOLE_UNITS>
__device__ inline void backward_weights(const T* x, const T* dy, const Convolution& shape, const WeightSums& sums) {
    using Product = PRODUCT<T, TILE>;
    constexpr bool WHOLE = VECTOR && UNITS == WHOLE_UNITS, NARROW = UNITS == NARROW_UNITS;
    using Left = AlongLines<T, TILE, Product, Operand<UNITS, EvenColumns<T, true>, Gradients<T>>, VECTOR, WHOLE>;
    using Taps = Operand<UNITS, EvenColumns<T, false>, GatherByTap<T, NARROW>>;
    using Right = AlongLines<T, TILE, Product, Taps, VECTOR, WHOLE>;
    using Result = WeightsResult<WHOLE, NARROW ? Elements<T>::QUAD : 0>;
    auto& memory = TileMemory<TILE, Left, Right>::of_block();
    const u32 channels = shape.input.channels, rows = shape.output.channels, columns = shape.taps() * channels;
    u32 row, column;
    tile_of_block<TILE>(shape.taps() * numbered_channels<T, UNITS>(shape), row, column);
    const u32 start = blockIdx.y * shape.slice, end = least(start + shape.slice, shape.output.pixels);
    // The same for the whole block.
    const bool has_lines = sums.bias && column == 0;
    typename Product::template LineSums<Left> lines;
    Left left({dy, shape}, row);
    Right right({x, shape}, column);
    Product product;
    multiply(left, right, product, memory, row, column, start, end, STEP<T, TILE>, [&](const u32* lefts) {
        if (has_lines) lines.add(lefts);
    });
    const bool alone = gridDim.y == 1;
    const u64 len = (u64)rows * columns, slice_len = len + rows;
    f32* slice = sums.slices + blockIdx.y * slice_len;
    product.write(Result{alone ? sums.weights : slice, rows, columns, row, column, channels}, memory.words());
    f32* line_sums = (alone ? sums.bias : slice + len) + row;
    if (has_lines) {
        lines.each([&](u32 line, f32 sum) {
            if (row + line < rows) line_sums[line] = sum;
        });
    }
    if (alone) return;
    const bool adds_line = has_lines && threadIdx.x < TILE::SIDE && row + threadIdx.x < rows;
    u32* counters = sums.counters + blockIdx.x * (slice_groups(gridDim.y) + 1);
    add_slices(counters, blockIdx.y, gridDim.y, [&](u32 first, u32 step, u32 count, bool total) {
        f32* from = sums.slices + first * slice_len;
        const Result result{total ? sums.weights : from, rows, columns, row, column, channels};
        Product::each_unit([&](u32 down, u32 across) { result.add(down, across, from, step * slice_len, count); });
        if (adds_line) {
            f32* to = (total ? sums.bias : from + len) + row + threadIdx.x;
            *to = sum_of_slices(from + len + row + threadIdx.x, step * slice_len, count);
        }
    });
}

// ---- Entry points ----
// They are in a source for each precision. `_group`, `_large` and `_small` move 16 bytes at a time: channels and, except in the
// forward pass, filters are multiples of 4 in f32, of 8 in bf16 and f16. `_narrow` supports 2, 4 or 6 channels of these,
// and filters as before; `_even` dense layers with even numbers; `_scalar` any numbers.

#ifdef TENSOR_CORES
#define TENSOR TensorProduct
#define LARGE_TILE LargeAhead
#else
#define TENSOR PlainProduct
#define LARGE_TILE Large
#endif

// Threads per block and, if the compiler would otherwise use too many registers or too few, the minimum number of blocks
// per multiprocessor.
#ifdef MGPU_SHIM
#define LARGE 256
#define GROUP 128
#define LARGE_AHEAD LARGE_TILE::THREADS
#define SMALL_AHEAD 128
#define SCALAR 128
#define NARROW 128
#else
#define LARGE 256, 2
#define GROUP 128, 2
#define LARGE_AHEAD LARGE_TILE::THREADS, 2
#define SMALL_AHEAD 128, 4
#define SCALAR 128, 3
#define NARROW 128, 2
#endif
#define SMALL 128

// Whether large tiles in types of 16 bits are computed by warpgroups or by warps. Only code for exactly this architecture has
// the instructions of warpgroups ("sm_90a").
#if defined(MGPU_SHIM) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define WARPGROUPS 1
#endif
#if defined(MGPU_SHIM) || !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define LARGE_BY_WARPS 1
#endif

#define FORWARD(T)                                                                           \
    (const T *x, const T *w, const f32 *bias, T *y, const __grid_constant__ Convolution shape, \
     const __grid_constant__ After after, const __grid_constant__ DepthSums sums)
#define BACKWARD_INPUT(T)                                                          \
    (const T *w, const T *dy, T *dx, const __grid_constant__ Convolution shape, \
     const __grid_constant__ Before before, const __grid_constant__ DepthSums sums)
#define BACKWARD_WEIGHTS(T)                                             \
    (const T *x, const T *dy, const __grid_constant__ Convolution shape, \
     const __grid_constant__ WeightSums sums)
