// The extents of a convolution, and divisions by them. Included after tiles.cuh.

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
    u32 slice;   // depth of a slice, a multiple of a step's: in backward_weights output pixels
    f32 slope;   // of the activation for negative values: 1 is none, 0 is ReLU

    __device__ u32 taps() const { return kernel * kernel; }

    __device__ void tap(u32 tap, i32& down, i32& right) const {
        u32 column;
        down = (i32)divide(tap, kernel, by_kernel, column);
        right = (i32)column;
    }
};
