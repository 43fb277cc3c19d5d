// Tiled products of two large matrices, which are defined by the source that includes this.
//
// A block of threads computes one square tile of the result. It iterates over the depth, the extent that is summed
// over, in steps of TILE_WORDS words of 32 bits (16 elements in f32, 32 in bf16). There are two loops, with one barrier
// per step each:
//
// - multiply_ahead, for tensor cores: the operands of the next two or three steps are copied from global to shared memory
//   asynchronously, 16 bytes at a time and without registers, while one step's are multiplied.
// - multiply_buffered, for operands that cannot be moved 16 bytes at a time, and for plain multiply-adds: the next step's
//   operands are loaded to registers and then written to one of two buffers. So are those of tensor cores without
//   asynchronous copies (f16 on sm_75).
//
// A line is a row of the left operand or a column of the right one. A fragment of the tensor cores' products has a word
// for a line and one depth, or in elements of 16 bits two neighbouring depths; the words are in the same lanes in both, so
// one loop serves TF32, bfloat16 and f16. Every element of the result is summed over the depth in the same order, whatever the
// loop and the tile's size.
//
// What limits the loop, per multiprocessor and step of a large tile in bf16 (128 x 128 x 32 multiply-adds): copies write
// 16 KiB to shared memory, and eight warps of 64 x 32 read 6 KiB each, together 512 cycles at 128 bytes per cycle. The
// products take 512 cycles of an A100's tensor cores (1,024 multiply-adds per cycle), and 256 of an H100's if it reached
// its peak, which needs other instructions. So shared memory allows at most half of that peak; warps of 64 x 64 would
// allow two thirds, with twice the sums in registers. A small tile takes 192 cycles for a quarter of the products. For
// each mma instruction of a large tile there are 0.375 loads from shared memory (ldmatrix), and 0.5 of a small one; these
// would be 1.5 and 2 loads of a word for each lane. Compiled for sm_90 a step of the forward pass in bf16 takes 110
// instructions of a warp, 32 of them mma (small: 99 and 16).

#define TILE_WORDS 16u

struct alignas(16) Quad {
    u32 word[4];
};

struct alignas(8) Pair {
    u32 word[2];
};

// The side of the tile, the threads of a block, and the rows and columns that a warp computes with tensor cores.
struct Large {
    static constexpr u32 SIDE = 128, THREADS = 256, WARP_ROWS = 64, WARP_COLUMNS = 32;
};

struct Small {
    static constexpr u32 SIDE = 64, THREADS = 128, WARP_ROWS = 32, WARP_COLUMNS = 32;
};

template <class T>
struct Elements {
    static constexpr u32 WORD = 4 / sizeof(T), QUAD = 16 / sizeof(T), STEP = TILE_WORDS * WORD;
};

// The i-th value of a word, the lower half first.
template <class T>
__device__ inline f32 value_in_word(u32 word, u32 i) {
    if (sizeof(T) == 4) return float_of(word);
    return float_of(i == 0 ? word << 16 : word & 0xffff0000u);
}

template <>
__device__ inline f32 value_in_word<f16>(u32 word, u32 i) {
    return to_f32(f16{(u16)(i == 0 ? word : word >> 16)});
}

// ---- Operands in shared memory ----
// A step's values of all lines of the tile, which are its rows or its columns. For tensor cores they lie in units of
// 16 bytes as in global memory, one line or one depth after another, and the units of a line or a depth are permuted by
// an exclusive or ("swizzled"): a quarter of a warp reads or writes eight units at once, and these must be in different
// groups of four banks. `load` returns a warp's fragments of 16 lines and eight words of depth, which are four matrices
// of eight lines and four words: one left operand of an mma instruction or, in neighbouring registers, two right ones.

// Where matrix m is: in the first or second half of the lines, and of the depth.
template <bool IS_LEFT>
struct Matrix {
    static __device__ u32 line(u32 m) { return IS_LEFT ? m % 2 : m / 2; }
    static __device__ u32 depth(u32 m) { return IS_LEFT ? m / 2 : m % 2; }
};

// A line has four units, so two lines fill the banks once.
template <u32 SIDE>
struct SwizzledLines {
    static constexpr u32 WORDS = SIDE * TILE_WORDS;

    static __device__ u32 at(u32 line, u32 unit) { return line * TILE_WORDS + (unit ^ line / 2 % 4) * 4; }

    // The row of a matrix that a lane passes to load_matrices.
    template <bool IS_LEFT>
    static __device__ u32 row(u32 lane, u32 line, u32 word) {
        using Place = Matrix<IS_LEFT>;
        return at(line + Place::line(lane / 8) * 8 + lane % 8, word / 4 + Place::depth(lane / 8));
    }

    template <bool IS_LEFT>
    static __device__ void load(u32 fragments[4], const u32* shared, u32 line, u32 word) {
        load_matrices(fragments, shared + row<IS_LEFT>(threadIdx.x % WARP, line, word));
    }
};

// A depth fills the banks a whole number of times. Elements of 16 bits are transposed on the way to registers. There is
// no such instruction for 32 bits: a lane reads words one by one, those of four depths and eight lines at once.
template <class T, u32 SIDE>
struct SwizzledDepths {
    static constexpr u32 ROW = SIDE / Elements<T>::WORD, WORDS = Elements<T>::STEP * ROW;

    static __device__ u32 at(u32 depth, u32 unit) {
        return depth * ROW + (unit ^ (sizeof(T) == 2 ? depth % 8 : depth % 4 * 2)) * 4;
    }

    template <bool IS_LEFT>
    static __device__ u32 row(u32 lane, u32 line, u32 word) {
        using Place = Matrix<IS_LEFT>;
        return at(word * 2 + Place::depth(lane / 8) * 8 + lane % 8, line / 8 + Place::line(lane / 8));
    }

    static __device__ u32 word(u32 line, u32 depth) {
        constexpr u32 QUAD = Elements<T>::QUAD;
        return at(depth, line / QUAD) + line % QUAD / Elements<T>::WORD;
    }

    static __device__ f32 value(const u32* shared, u32 line, u32 depth) {
        return value_in_word<T>(shared[word(line, depth)], line % Elements<T>::WORD);
    }

    template <bool IS_LEFT>
    static __device__ void load(u32 fragments[4], const u32* shared, u32 line, u32 first) {
        using Place = Matrix<IS_LEFT>;
        const u32 lane = threadIdx.x % WARP;
        if constexpr (sizeof(T) == 2) {
            load_matrices_transposed(fragments, shared + row<IS_LEFT>(lane, line, first));
        } else {
#pragma unroll
            for (u32 m = 0; m < 4; m++) {
                // As word(), with what is the same for all lanes apart.
                const u32 lines = line + Place::line(m) * 8, depth = first + Place::depth(m) * 4 + lane % 4;
                fragments[m] = shared[depth * ROW + lines / 32 * 32 + (lines % 32 ^ lane % 4 * 8) + lane / 4];
            }
        }
    }
};

// For plain multiply-adds: a word has a line's values at one depth or, in bf16, at two neighbouring depths. The words of
// one depth lie one after another.
template <u32 SIDE>
struct DepthsOfLines {
    static constexpr u32 STRIDE = SIDE + 8, WORDS = TILE_WORDS * STRIDE;
    static __device__ u32 at(u32 line, u32 word) { return word * STRIDE + line; }
};

template <bool CONDITION, class YES, class NO>
struct Conditional {
    using Type = YES;
};

template <class YES, class NO>
struct Conditional<false, YES, NO> {
    using Type = NO;
};

// ---- Loading operands from global memory ----

// Where 16 bytes of an operand are; zeros if they are not inside.
template <class T>
struct Source {
    const T* at;
    bool inside;

    __device__ Quad load() const { return inside ? *(const Quad*)at : Quad{}; }
};

// Less than 16 bytes of an operand, followed by zeros: that many words, at most three.
template <class T>
struct NarrowSource {
    const T* at;
    u32 words;

    __device__ Quad load() const {
        Quad quad{};
#pragma unroll
        for (u32 word = 0; word < 3; word++) {
            if (word < words) quad.word[word] = ((const u32*)at)[word];
        }
        return quad;
    }
};

// The source of 16 bytes, or with NARROW of an input's `channels`, of which two are a word.
template <class T, bool NARROW>
__device__ inline auto source_of(const T* at, bool inside, u32 channels) {
    if constexpr (NARROW) {
        return NarrowSource<T>{at, inside ? channels / 2 : 0};
    } else {
        return Source<T>{at, inside};
    }
}

__device__ inline u32 bits_of(bf16 value) { return value.bits; }
__device__ inline u32 bits_of(f16 value) { return value.bits; }

template <class T>
__device__ inline void put(Quad& quad, u32 element, T value) {
    constexpr u32 WORD = Elements<T>::WORD;
    quad.word[element / WORD] |= bits_of(value) << (element % WORD * 16);
}

// The steps that are in shared memory at once: one that is multiplied, and those that are on the way. A block may have
// 48 KiB without asking, which are three stages of a large tile; two such blocks fit in any multiprocessor with tensor
// cores for bf16, as their registers do.
template <class TILE, bool ASYNC>
constexpr u32 STAGES = !ASYNC ? 2 : TILE::SIDE == 128 ? 3 : 4;

// Operands that are contiguous along the depth. A thread moves 16 bytes of each of two lines. Plain products need a
// depth's words side by side. Sources are copied AHEAD if they are whole.
template <class T, class TILE, class PRODUCT, class OPERAND, bool VECTOR, bool AHEAD = VECTOR>
struct AlongDepth {
    using Layout = typename Conditional<PRODUCT::TENSORS, SwizzledLines<TILE::SIDE>, DepthsOfLines<TILE::SIDE>>::Type;
    static constexpr bool ASYNC = PRODUCT::TENSORS && AHEAD && ASYNC_COPIES;
    static constexpr u32 HALF = TILE::SIDE / 2;
    OPERAND operand;
    Quad moving[2];

    static __device__ u32 line(u32 i) { return threadIdx.x / 4 + i * HALF; }
    static __device__ u32 unit() { return threadIdx.x % 4; }

    __device__ AlongDepth(const OPERAND& from, u32 first) : operand(from) {
        if constexpr (VECTOR) {
#pragma unroll
            for (u32 i = 0; i < 2; i++) operand.find_line(i, first + line(i));
        }
    }

    // Begins to copy the step from `start` on.
    __device__ void copy(u32* shared, u32 start, u32 end) {
        const u32 depth = start + unit() * Elements<T>::QUAD;
        operand.find_depth(depth);
        u32* to = shared + Layout::at(line(0), unit());
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const Source<T> from = operand.source(i);
            copy_async(to + i * Layout::at(HALF, 0), from.at, from.inside && depth < end);
        }
    }

    // Loads the step to registers.
    __device__ void fetch(u32 first, u32 start, u32 end) {
        const u32 depth = start + unit() * Elements<T>::QUAD;
        if constexpr (VECTOR) {
            operand.find_depth(depth);
#pragma unroll
            for (u32 i = 0; i < 2; i++) moving[i] = depth < end ? operand.source(i).load() : Quad{};
        } else {
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                moving[i] = Quad{};
#pragma unroll
                for (u32 e = 0; e < Elements<T>::QUAD; e++) {
                    if (depth + e < end) put(moving[i], e, operand.element(first + line(i), depth + e));
                }
            }
        }
    }

    __device__ void store(u32* shared) const {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            if constexpr (PRODUCT::TENSORS) {
                *(Quad*)(shared + Layout::at(line(i), unit())) = moving[i];
            } else {
#pragma unroll
                for (u32 e = 0; e < 4; e++) shared[Layout::at(line(i), unit() * 4 + e)] = moving[i].word[e];
            }
        }
    }
};

// Operands that are contiguous along the lines. A thread moves 16 bytes at two depths: half a step apart, or for plain
// products of bf16 neighbours, which it interleaves to words.
template <class T, class TILE, class PRODUCT, class OPERAND, bool VECTOR, bool AHEAD = VECTOR>
struct AlongLines {
    static constexpr bool ASYNC = PRODUCT::TENSORS && AHEAD && ASYNC_COPIES;
    static constexpr bool INTERLEAVED = !PRODUCT::TENSORS && sizeof(T) == 2;
    using Layout =
        typename Conditional<PRODUCT::TENSORS, SwizzledDepths<T, TILE::SIDE>, DepthsOfLines<TILE::SIDE>>::Type;
    static constexpr u32 RUN = Elements<T>::QUAD, RUNS = TILE::SIDE / RUN, HALF = Elements<T>::STEP / 2;
    OPERAND operand;
    Quad moving[2];

    static __device__ u32 unit() { return threadIdx.x % RUNS; }
    static __device__ u32 run() { return unit() * RUN; }

    static __device__ u32 depth(u32 i) {
        const u32 row = threadIdx.x / RUNS;
        return INTERLEAVED ? row * 2 + i : row + i * HALF;
    }

    __device__ AlongLines(const OPERAND& from, u32 first) : operand(from) {
        if constexpr (VECTOR) operand.find_run(first + run());
    }

    // Begins to copy the step from `start` on.
    __device__ void copy(u32* shared, u32 start, u32 end) {
        u32* to = shared + Layout::at(depth(0), unit());
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const u32 at = start + depth(i);
            const Source<T> from = operand.source(at);
            copy_async(to + i * Layout::at(HALF, 0), from.at, from.inside && at < end);
        }
    }

    // Loads the step to registers.
    __device__ void fetch(u32 first, u32 start, u32 end) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const u32 at = start + depth(i);
            moving[i] = Quad{};
            if (at >= end) continue;
            if constexpr (VECTOR) {
                moving[i] = operand.source(at).load();
            } else {
#pragma unroll
                for (u32 e = 0; e < RUN; e++) put(moving[i], e, operand.element(first + run() + e, at));
            }
        }
    }

    // The sum of a line over a step's depth, from shared memory.
    static __device__ f32 sum_line(const u32* shared, u32 line) {
        constexpr u32 WORD = Elements<T>::WORD;
        f32 sum = 0.0f;
#pragma unroll 8
        for (u32 depth = 0; depth < Elements<T>::STEP; depth++) {
            if constexpr (PRODUCT::TENSORS) {
                sum += PRODUCT::rounded(Layout::value(shared, line, depth));
            } else {
                sum += value_in_word<T>(shared[Layout::at(line, depth / WORD)], depth % WORD);
            }
        }
        return sum;
    }

    __device__ void store(u32* shared) const {
        if constexpr (PRODUCT::TENSORS) {
#pragma unroll
            for (u32 i = 0; i < 2; i++) *(Quad*)(shared + Layout::at(depth(i), unit())) = moving[i];
        } else if constexpr (!INTERLEAVED) {
#pragma unroll
            for (u32 i = 0; i < 2; i++) *(Quad*)(shared + Layout::at(run(), depth(i))) = moving[i];
        } else {
            Quad words[2];
#pragma unroll
            for (u32 e = 0; e < 4; e++) {
                const u32 even = moving[0].word[e], odd = moving[1].word[e];
                words[e / 2].word[e % 2 * 2] = (even & 0xffffu) | odd << 16;
                words[e / 2].word[e % 2 * 2 + 1] = even >> 16 | (odd & 0xffff0000u);
            }
            // A thread writes 32 bytes in two halves: every other four threads begin with the second, so that eight
            // neighbours have no bank conflict.
            const bool second = threadIdx.x / 4 % 2 != 0;
            const u32 at = Layout::at(run(), threadIdx.x / RUNS);
            *(Quad*)(shared + at + (second ? 4 : 0)) = second ? words[1] : words[0];
            *(Quad*)(shared + at + (second ? 0 : 4)) = second ? words[0] : words[1];
        }
    }
};

// ---- Products of two tiles in shared memory ----
// Each keeps a thread's part of the result, and finally passes it to a result (results.cuh) in units of four rows and
// four columns, which begin at multiples of four.

// Fused multiply-adds: a thread computes 8 rows of 8 or 4 columns, in runs of four.
template <class T, class TILE>
struct PlainProduct {
    static constexpr bool TENSORS = false;
    static constexpr u32 ROWS = 8, ACROSS = 16, DOWN = TILE::SIDE / ROWS, COLUMNS = TILE::SIDE / ACROSS;
    f32 sums[ROWS][COLUMNS] = {};

    // The i-th of a thread's lines, when `threads` threads share them.
    static __device__ u32 line(u32 thread, u32 threads, u32 i) { return 4 * (thread + threads * (i / 4)) + i % 4; }

    // Not unrolled: with several words at once the compiler runs out of registers.
    template <class, class>
    __device__ void add(const u32* left, const u32* right) {
        const u32 across = threadIdx.x % ACROSS, down = threadIdx.x / ACROSS;
#pragma unroll 1
        for (u32 word = 0; word < TILE_WORDS; word++) {
            Quad a[ROWS / 4], b[COLUMNS / 4];
#pragma unroll
            for (u32 i = 0; i < ROWS / 4; i++) {
                a[i] = *(const Quad*)(left + DepthsOfLines<TILE::SIDE>::at(line(down, DOWN, 4 * i), word));
            }
#pragma unroll
            for (u32 i = 0; i < COLUMNS / 4; i++) {
                b[i] = *(const Quad*)(right + DepthsOfLines<TILE::SIDE>::at(line(across, ACROSS, 4 * i), word));
            }
#pragma unroll
            for (u32 i = 0; i < Elements<T>::WORD; i++) {
#pragma unroll
                for (u32 r = 0; r < ROWS; r++) {
#pragma unroll
                    for (u32 c = 0; c < COLUMNS; c++) {
                        const f32 factor = value_in_word<T>(a[r / 4].word[r % 4], i);
                        sums[r][c] += factor * value_in_word<T>(b[c / 4].word[c % 4], i);
                    }
                }
            }
        }
    }

    // Calls `visit(index, row, column, four)` for each four of a thread's sums, of which the first has that row and column.
    template <class VISIT>
    __device__ void each_four(const VISIT& visit) {
        const u32 across = threadIdx.x % ACROSS, down = threadIdx.x / ACROSS;
#pragma unroll
        for (u32 r = 0; r < ROWS; r++) {
#pragma unroll
            for (u32 c = 0; c < COLUMNS; c += 4) {
                visit((r * COLUMNS + c) / 4, line(down, DOWN, r), line(across, ACROSS, c), sums[r] + c);
            }
        }
    }

    // Calls `visit(row, column)` for each of a thread's units.
    template <class VISIT>
    static __device__ void each_unit(const VISIT& visit) {
        const u32 across = threadIdx.x % ACROSS, down = threadIdx.x / ACROSS;
#pragma unroll
        for (u32 r = 0; r < ROWS; r += 4) {
#pragma unroll
            for (u32 c = 0; c < COLUMNS; c += 4) visit(line(down, DOWN, r), line(across, ACROSS, c));
        }
    }

    template <class RESULT>
    __device__ void write(const RESULT& result, u32*) const {
        const u32 across = threadIdx.x % ACROSS, down = threadIdx.x / ACROSS;
#pragma unroll
        for (u32 r = 0; r < ROWS; r += 4) {
#pragma unroll
            for (u32 c = 0; c < COLUMNS; c += 4) {
                f32 unit[4][4];
#pragma unroll
                for (u32 i = 0; i < 16; i++) unit[i / 4][i % 4] = sums[r + i / 4][c + i % 4];
                result.unit(line(down, DOWN, r), line(across, ACROSS, c), unit);
            }
        }
    }
};

#ifdef F16_TENSOR_CORES
__device__ inline void multiply_add(f32 d[4], const u32 a[4], const u32 b[2], f16) { mma_f16_16816(d, a, b); }
#ifdef TENSOR_CORES
__device__ inline void multiply_add(f32 d[4], const u32 a[4], const u32 b[2], bf16) { mma_bf16_16816(d, a, b); }
__device__ inline void multiply_add(f32 d[4], const u32 a[4], const u32 b[2], f32) { mma_tf32_1688(d, a, b); }
#endif

// Tensor cores: a warp computes WARP_ROWS x WARP_COLUMNS in pieces of 16x8, eight words of depth at a time.
template <class T, class TILE>
struct TensorProduct {
    static constexpr bool TENSORS = true;
    static constexpr u32 DOWN = TILE::WARP_ROWS / 16, ACROSS = TILE::WARP_COLUMNS / 8;
    f32 sums[DOWN][ACROSS][4] = {};

    // A value as the products see it.
    static __device__ f32 rounded(f32 value) {
        if constexpr (sizeof(T) == 4) return float_of(f32_to_tf32(value));
        return value;
    }

    // Values of f32 are as in global memory until they are in registers.
    template <class LAYOUT, bool IS_LEFT>
    static __device__ void load(u32 fragments[4], const u32* shared, u32 line, u32 word) {
        LAYOUT::template load<IS_LEFT>(fragments, shared, line, word);
#pragma unroll
        for (u32 m = 0; m < 4; m++) {
            if constexpr (sizeof(T) == 4) fragments[m] = tf32_operand(float_of(fragments[m]));
        }
    }

    static __device__ u32 first_row() { return threadIdx.x / WARP % (TILE::SIDE / TILE::WARP_ROWS) * TILE::WARP_ROWS; }

    static __device__ u32 first_column() {
        return threadIdx.x / WARP / (TILE::SIDE / TILE::WARP_ROWS) * TILE::WARP_COLUMNS;
    }

    // Without asynchronous copies operands take registers, and there are too few of them for both iterations at once.
    template <class LEFT, class RIGHT>
    __device__ void add(const u32* left, const u32* right) {
#pragma unroll(ASYNC_COPIES ? 2 : 1)
        for (u32 word = 0; word < TILE_WORDS; word += 8) {
            u32 b[ACROSS / 2][4];
#pragma unroll
            for (u32 j = 0; j < ACROSS / 2; j++) load<RIGHT, false>(b[j], right, first_column() + 16 * j, word);
#pragma unroll
            for (u32 i = 0; i < DOWN; i++) {
                u32 a[4];
                load<LEFT, true>(a, left, first_row() + 16 * i, word);
#pragma unroll
                for (u32 j = 0; j < ACROSS; j++) multiply_add(sums[i][j], a, b[j / 2] + j % 2 * 2, T{});
            }
        }
    }

    // Calls `visit(index, row, column, four)` for each four of a thread's sums. They are in a warp's piece of 16x8, which
    // begins at that row and column.
    template <class VISIT>
    __device__ void each_four(const VISIT& visit) {
#pragma unroll
        for (u32 i = 0; i < DOWN; i++) {
#pragma unroll
            for (u32 j = 0; j < ACROSS; j++) {
                visit(i * ACROSS + j, first_row() + 16 * i, first_column() + 8 * j, sums[i][j]);
            }
        }
    }

    // Calls `visit(row, column)` for each of a thread's units.
    template <class VISIT>
    static __device__ void each_unit(const VISIT& visit) {
        const u32 lane = threadIdx.x % WARP;
#pragma unroll
        for (u32 i = 0; i < DOWN; i++) visit(first_row() + 16 * i + lane / 8 * 4, first_column() + lane % 8 * 4);
    }

    // A lane of a warp holds single pairs of columns. Through shared memory, 16 rows at a time, it gets a whole unit.
    // The padding makes a row begin four banks after the row before.
    template <class RESULT>
    __device__ void write(const RESULT& result, u32* shared) const {
        static_assert(TILE::WARP_COLUMNS == 32, "a lane for each unit of 16 rows");
        constexpr u32 STRIDE = TILE::WARP_COLUMNS + 4;
        const u32 lane = threadIdx.x % WARP, group = lane / 4;
        u32* rows = shared + threadIdx.x / WARP * (16 * STRIDE);
#pragma unroll
        for (u32 i = 0; i < DOWN; i++) {
            __syncwarp();
#pragma unroll
            for (u32 j = 0; j < ACROSS; j++) {
#pragma unroll
                for (u32 half = 0; half < 2; half++) {
                    const f32* pair = sums[i][j] + 2 * half;
                    u32* to = rows + (group + 8 * half) * STRIDE + 8 * j + lane % 4 * 2;
                    *(Pair*)to = Pair{{bits_of(pair[0]), bits_of(pair[1])}};
                }
            }
            __syncwarp();
            f32 unit[4][4];
#pragma unroll
            for (u32 r = 0; r < 4; r++) {
                const Quad quad = *(const Quad*)(rows + (lane / 8 * 4 + r) * STRIDE + lane % 8 * 4);
#pragma unroll
                for (u32 c = 0; c < 4; c++) unit[r][c] = float_of(quad.word[c]);
            }
            result.unit(first_row() + 16 * i + lane / 8 * 4, first_column() + lane % 8 * 4, unit);
        }
    }
};
#endif

// ---- The main loop ----

// The shared memory of a block: a step's operands in each stage, and after the main loop the results on their way out.
// 128 bytes fill the banks once.
template <class TILE, class LEFT, class RIGHT>
struct alignas(128) TileMemory {
    static constexpr bool ASYNC = LEFT::ASYNC;
    static constexpr u32 COUNT = STAGES<TILE, ASYNC>;
    Quad lefts[COUNT][LEFT::Layout::WORDS / 4], rights[COUNT][RIGHT::Layout::WORDS / 4];

    __device__ u32* words() { return (u32*)this; }
};

// Copies the steps ahead. `visit(lines)` is called with the left operand of every step in shared memory.
template <class TILE, class LEFT, class RIGHT, class PRODUCT, class VISIT>
__device__ inline void multiply_ahead(
    LEFT& left, RIGHT& right, PRODUCT& product, TileMemory<TILE, LEFT, RIGHT>& memory, u32 start, u32 end, u32 step,
    const VISIT& visit) {
    constexpr u32 COUNT = TileMemory<TILE, LEFT, RIGHT>::COUNT;
    u32 next = start;
    // Every iteration commits a group, perhaps an empty one at the end: so the number of groups to wait for is constant.
    const auto copy = [&](u32 stage) {
        if (next < end) {
            left.copy(memory.lefts[stage]->word, next, end);
            right.copy(memory.rights[stage]->word, next, end);
        }
        commit_copies();
        next += step;
    };
#pragma unroll
    for (u32 stage = 0; stage < COUNT - 1; stage++) copy(stage);
    u32 stage = 0, last = COUNT - 1;
    for (; start < end; start += step) {
        await_copies<COUNT - 2>();
        // After this the step is complete, and all threads have finished the one before, so its stage is free.
        __syncthreads();
        copy(last);
        product.template add<typename LEFT::Layout, typename RIGHT::Layout>(
            memory.lefts[stage]->word, memory.rights[stage]->word);
        visit(memory.lefts[stage]->word);
        last = stage;
        stage = stage + 1 == COUNT ? 0 : stage + 1;
    }
    // The results may overwrite the stages.
    __syncthreads();
}

// Loads the next step to registers while one is multiplied.
template <class TILE, class LEFT, class RIGHT, class PRODUCT, class VISIT>
__device__ inline void multiply_buffered(
    LEFT& left, RIGHT& right, PRODUCT& product, TileMemory<TILE, LEFT, RIGHT>& memory, u32 row, u32 column, u32 start,
    u32 end, u32 step, const VISIT& visit) {
    left.fetch(row, start, end);
    right.fetch(column, start, end);
    u32 buffer = 0;
    for (; start < end; start += step) {
        u32 *a = memory.lefts[buffer]->word, *b = memory.rights[buffer]->word;
        // This buffer was last read two steps ago, and all threads finished that before the barrier of the last step.
        // Other threads may still be reading the other buffer.
        left.store(a);
        right.store(b);
        __syncthreads();
        if (start + step < end) {
            left.fetch(row, start + step, end);
            right.fetch(column, start + step, end);
        }
        product.template add<typename LEFT::Layout, typename RIGHT::Layout>(a, b);
        visit(a);
        buffer ^= 1;
    }
    // The results may overwrite the buffers.
    __syncthreads();
}

template <class TILE, class LEFT, class RIGHT, class PRODUCT, class VISIT>
__device__ inline void multiply(
    LEFT& left, RIGHT& right, PRODUCT& product, TileMemory<TILE, LEFT, RIGHT>& memory, u32 row, u32 column, u32 start,
    u32 end, u32 step, const VISIT& visit) {
    if constexpr (LEFT::ASYNC) {
        multiply_ahead(left, right, product, memory, start, end, step, visit);
    } else {
        multiply_buffered(left, right, product, memory, row, column, start, end, step, visit);
    }
}
