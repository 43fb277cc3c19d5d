// Tiled products of two large matrices, which are defined by the source that includes this.
//
// A block of threads computes one square tile of the result. It iterates over the depth, the extent that is summed
// over, in steps of some words of 32 bits: TILE_WORDS (16 elements in f32, 32 in bf16) but for those of groups.cuh. There
// are three loops, with one barrier per step each:
//
// - multiply_groups (groups.cuh), for sm_90 in types of 16 bits: its tensor cores read both operands from shared memory.
// - multiply_ahead, for tensor cores: the operands of the next steps are copied from global to shared memory asynchronously,
//   16 bytes at a time and without registers, while one step's are multiplied. What a warp multiplies it has in registers
//   before, so that neither these loads nor the barrier are waited for.
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
// 16 KiB to shared memory, and four warps of 64 x 64 read 8 KiB each, together 384 cycles at 128 bytes per cycle. The
// products take 512 cycles of an A100's tensor cores (1,024 multiply-adds per cycle), and 384 of an H200's with these
// instructions, as measured: two thirds of its peak, which needs those of groups.cuh. So warps of 64 x 32, which would read
// 6 KiB each in pairs of twice as many, would be limited by shared memory. A small tile takes 192 cycles for a quarter of the
// products.
// There are few warps, two for each scheduler, because their sums take half of all registers; so what others hide by many
// warps has to be hidden by the order of instructions. For each mma instruction of a large tile there are 0.25 loads from
// shared memory (ldmatrix), and 0.5 of a small one; these would be 1 and 2 loads of a word for each lane. Compiled for sm_90
// a step of the forward pass in bf16 takes 171 instructions of a warp, 64 of them mma (small: 93 and 16).

#define TILE_WORDS 16u

struct alignas(16) Quad {
    u32 word[4];
};

struct alignas(8) Pair {
    u32 word[2];
};

// A tile, whose warps have rectangles of it.
template <u32 LEN, u32 COUNT, u32 DOWN, u32 ACROSS, u32 AHEAD>
struct WarpTile {
    static constexpr u32 SIDE = LEN, THREADS = COUNT;
    // Words of a step, and the steps that are in shared memory at once if they are copied ahead: one that is multiplied, and
    // those on the way. A block may have 48 KiB without asking, which are three stages of a large tile; two such blocks fit in
    // any multiprocessor with tensor cores for bf16, as their registers do.
    static constexpr u32 WORDS = TILE_WORDS, STAGES = AHEAD;
    // With tensor cores: the rows and columns of a warp, and how far its pieces of 16 rows are apart.
    static constexpr u32 WARP_ROWS = DOWN, WARP_COLUMNS = ACROSS, APART = 16;

    static __device__ u32 first_row(u32 warp) { return warp % (LEN / DOWN) * DOWN; }
    static __device__ u32 first_column(u32 warp) { return warp / (LEN / DOWN) * ACROSS; }
};

struct Large : WarpTile<128, 256, 64, 32, 2> {};

// The large tile of multiply_ahead.
struct LargeAhead : WarpTile<128, 128, 64, 64, 3> {};

struct Small : WarpTile<64, 128, 32, 32, 4> {};

// How many times 16 bytes a thread moves of a step's operand.
template <class TILE>
constexpr u32 MOVES = TILE::SIDE * TILE::WORDS / 4 / TILE::THREADS;

template <class T>
struct Elements {
    static constexpr u32 WORD = 4 / sizeof(T), QUAD = 16 / sizeof(T);
};

// Elements of a step.
template <class T, class TILE>
constexpr u32 STEP = TILE::WORDS * Elements<T>::WORD;

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
//
// A lane reads at an offset in bytes that depends on the lane and on the warp's first line, a multiple of 32: `first` returns
// that of the first fragments. Those of the i-th 16 lines at another word follow from it by constants (`next`).

// Where matrix m is: in the first or second half of the lines, and of the depth.
template <bool IS_LEFT>
struct Matrix {
    static __device__ u32 line(u32 m) { return IS_LEFT ? m % 2 : m / 2; }
    static __device__ u32 depth(u32 m) { return IS_LEFT ? m / 2 : m % 2; }
};

__device__ inline const u32* at_byte(const u32* shared, u32 offset) { return (const u32*)((const u8*)shared + offset); }

// A line has four units, so two lines fill the banks once.
template <u32 SIDE>
struct SwizzledLines {
    static constexpr u32 WORDS = SIDE * TILE_WORDS;

    static __device__ u32 at(u32 line, u32 unit) { return line * TILE_WORDS + (unit ^ line / 2 % 4) * 4; }

    // The row of a matrix that a lane passes to load_matrices.
    template <bool IS_LEFT>
    static __device__ u32 first(u32 lane, u32 line) {
        using Place = Matrix<IS_LEFT>;
        return at(line + Place::line(lane / 8) * 8 + lane % 8, Place::depth(lane / 8)) * 4;
    }

    static __device__ u32 next(u32 first, u32 i, u32 word) { return (first ^ word * 4) + 16 * i * TILE_WORDS * 4; }

    template <bool IS_LEFT>
    static __device__ void load(u32 fragments[4], const u32* shared, u32 first, u32 i, u32 word) {
        load_matrices(fragments, at_byte(shared, next(first, i, word)));
    }
};

// A depth fills the banks a whole number of times. Elements of 16 bits are transposed on the way to registers. There is
// no such instruction for 32 bits: a lane reads words one by one, those of four depths and eight lines at once.
template <class T, u32 SIDE>
struct SwizzledDepths {
    static constexpr u32 ROW = SIDE / Elements<T>::WORD, WORDS = TILE_WORDS * SIDE;

    static __device__ u32 at(u32 depth, u32 unit) {
        return depth * ROW + (unit ^ (sizeof(T) == 2 ? depth % 8 : depth % 4 * 2)) * 4;
    }

    // The row of a matrix that a lane passes to load_matrices_transposed, or its word of the first matrix.
    template <bool IS_LEFT>
    static __device__ u32 first(u32 lane, u32 line) {
        using Place = Matrix<IS_LEFT>;
        if (sizeof(T) == 4) return word(line + lane / 4, lane % 4) * 4;
        return at(Place::depth(lane / 8) * 8 + lane % 8, line / 8 + Place::line(lane / 8)) * 4;
    }

    static __device__ u32 next(u32 first, u32 i, u32 word) {
        constexpr u32 WORD = Elements<T>::WORD;
        const u32 words = 16 * i / WORD;
        return (first ^ words % 32 * 4) + (words / 32 * 32 + word * WORD * ROW) * 4;
    }

    static __device__ u32 word(u32 line, u32 depth) {
        constexpr u32 QUAD = Elements<T>::QUAD;
        return at(depth, line / QUAD) + line % QUAD / Elements<T>::WORD;
    }

    // The offset of a line's word in bytes, from that of a depth which is a multiple of eight.
    static __device__ u32 deeper(u32 first, u32 depth) {
        return (first ^ (sizeof(T) == 2 ? depth % 8 : depth % 4 * 2) * 16) + depth * ROW * 4;
    }

    template <bool IS_LEFT>
    static __device__ void load(u32 fragments[4], const u32* shared, u32 first, u32 i, u32 word) {
        using Place = Matrix<IS_LEFT>;
        if constexpr (sizeof(T) == 2) {
            load_matrices_transposed(fragments, at_byte(shared, next(first, i, word)));
        } else {
#pragma unroll
            for (u32 m = 0; m < 4; m++) {
                fragments[m] = *at_byte(shared, next(first ^ Place::line(m) * 32, i, word + Place::depth(m) * 4));
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

// A value that the compiler must not compute again instead of keeping it in a register.
__device__ inline u32 kept(u32 value) {
#ifndef MGPU_SHIM
    asm volatile("" : "+r"(value));
#endif
    return value;
}

template <bool CONDITION, class YES, class NO>
struct Conditional {
    using Type = YES;
};

template <class YES, class NO>
struct Conditional<false, YES, NO> {
    using Type = NO;
};

template <class A, class B>
constexpr bool ARE_SAME = false;

template <class A>
constexpr bool ARE_SAME<A, A> = true;

// ---- Loading operands from global memory ----

// Where 16 bytes of an operand are; zeros if they are not inside.
template <class T>
struct Source {
    const T* at;
    bool inside;

    __device__ Quad load() const { return inside ? *(const Quad*)at : Quad{}; }
};

// Up to 16 bytes of an operand, followed by zeros: that many words, which are loaded one by one.
template <class T>
struct NarrowSource {
    const T* at;
    u32 words;

    __device__ Quad load() const {
        Quad quad{};
#pragma unroll
        for (u32 word = 0; word < 4; word++) {
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

// Operands that are contiguous along the depth. A thread moves 16 bytes of each of several lines. Plain products need a
// depth's words side by side. Sources are copied AHEAD if they are whole.
template <class T, class TILE, class PRODUCT, class OPERAND, bool VECTOR, bool AHEAD = VECTOR>
struct AlongDepth {
    using Layout = typename PRODUCT::Lines;
    static constexpr bool ASYNC = PRODUCT::TENSORS && AHEAD && ASYNC_COPIES;
    static constexpr u32 UNITS = TILE::WORDS / 4, COUNT = MOVES<TILE>, APART = TILE::SIDE / COUNT;
    OPERAND operand;
    Quad moving[ASYNC ? 1 : COUNT];

    static __device__ u32 line(u32 i) { return threadIdx.x / UNITS + i * APART; }
    static __device__ u32 unit() { return threadIdx.x % UNITS; }

    __device__ AlongDepth(const OPERAND& from, u32 first) : operand(from) {
        if constexpr (VECTOR) {
#pragma unroll
            for (u32 i = 0; i < COUNT; i++) operand.find_line(i, first + line(i));
        }
    }

    __device__ void begin(u32) {}

    // Begins to copy the step from `start` on.
    __device__ void copy(u32* shared, u32 start, u32 end) {
        const u32 depth = start + unit() * Elements<T>::QUAD;
        operand.find_depth(depth);
        u32* to = shared + Layout::at(line(0), unit());
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) {
            const Source<T> from = operand.source(i);
            copy_async(to + i * Layout::at(APART, 0), from.at, from.inside && depth < end);
        }
    }

    // Loads the step to registers.
    __device__ void fetch(u32 first, u32 start, u32 end) {
        const u32 depth = start + unit() * Elements<T>::QUAD;
        if constexpr (VECTOR) {
            operand.find_depth(depth);
#pragma unroll
            for (u32 i = 0; i < COUNT; i++) moving[i] = depth < end ? operand.source(i).load() : Quad{};
        } else {
#pragma unroll
            for (u32 i = 0; i < COUNT; i++) {
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
        for (u32 i = 0; i < COUNT; i++) {
            if constexpr (PRODUCT::TENSORS) {
                *(Quad*)(shared + Layout::at(line(i), unit())) = moving[i];
            } else {
#pragma unroll
                for (u32 e = 0; e < 4; e++) shared[Layout::at(line(i), unit() * 4 + e)] = moving[i].word[e];
            }
        }
    }
};

// Operands that are contiguous along the lines. A thread moves 16 bytes at several depths: equally far apart, or for
// plain products of bf16 two neighbours, which it interleaves to words.
template <class T, class TILE, class PRODUCT, class OPERAND, bool VECTOR, bool AHEAD = VECTOR>
struct AlongLines {
    static constexpr bool ASYNC = PRODUCT::TENSORS && AHEAD && ASYNC_COPIES;
    static constexpr bool INTERLEAVED = !PRODUCT::TENSORS && sizeof(T) == 2;
    using Layout = typename PRODUCT::Depths;
    static constexpr u32 RUN = Elements<T>::QUAD, RUNS = TILE::SIDE / RUN;
    static constexpr u32 COUNT = MOVES<TILE>, APART = STEP<T, TILE> / COUNT;
    static_assert(!INTERLEAVED || COUNT == 2, "a word for each pair");
    OPERAND operand;
    Quad moving[ASYNC ? 1 : COUNT];

    static __device__ u32 unit() { return threadIdx.x % RUNS; }
    static __device__ u32 run() { return unit() * RUN; }

    static __device__ u32 depth(u32 i) {
        const u32 row = threadIdx.x / RUNS;
        return INTERLEAVED ? row * 2 + i : row + i * APART;
    }

    __device__ AlongLines(const OPERAND& from, u32 first) : operand(from) {
        if constexpr (VECTOR) operand.find_run(first + run());
    }

    // Before the first copy, which is that of the step from `start` on.
    __device__ void begin(u32 start) { operand.begin(start + depth(0), APART); }

    // Begins to copy the step from `start` on, which follows the one that was copied before.
    __device__ void copy(u32* shared, u32 start, u32 end) {
        u32* to = shared + Layout::at(depth(0), unit());
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) {
            const Source<T> from = operand.next();
            copy_async(to + i * Layout::at(APART, 0), from.at, from.inside && start + depth(i) < end);
        }
    }

    // Loads the step to registers.
    __device__ void fetch(u32 first, u32 start, u32 end) {
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) {
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
        if constexpr (PRODUCT::TENSORS) {
            const u32 first = Layout::word(line, 0) * 4;
#pragma unroll 2
            for (u32 start = 0; start < STEP<T, TILE>; start += 8) {
#pragma unroll
                for (u32 depth = 0; depth < 8; depth++) {
                    const u32 word = *at_byte(shared + start * Layout::ROW, Layout::deeper(first, depth));
                    sum += PRODUCT::rounded(value_in_word<T>(word, line % WORD));
                }
            }
        } else {
#pragma unroll 8
            for (u32 depth = 0; depth < STEP<T, TILE>; depth++) {
                sum += value_in_word<T>(shared[Layout::at(line, depth / WORD)], depth % WORD);
            }
        }
        return sum;
    }

    __device__ void store(u32* shared) const {
        if constexpr (PRODUCT::TENSORS) {
#pragma unroll
            for (u32 i = 0; i < COUNT; i++) *(Quad*)(shared + Layout::at(depth(i), unit())) = moving[i];
        } else if constexpr (!INTERLEAVED) {
#pragma unroll
            for (u32 i = 0; i < COUNT; i++) *(Quad*)(shared + Layout::at(run(), depth(i))) = moving[i];
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

// ---- The sums of the left operand's lines ----
// They are the gradients of biases.

// A thread has those of a line.
template <class TILE, class LEFT>
struct LinesOfThreads {
    f32 sum = 0.0f;

    // Adds a step in shared memory.
    __device__ void add(const u32* lefts) {
        if (threadIdx.x < TILE::SIDE) sum += LEFT::sum_line(lefts, threadIdx.x);
    }

    // Calls `store(line, sum)` for the lines that a thread has.
    template <class STORE>
    __device__ void each(const STORE& store) const {
        if (threadIdx.x < TILE::SIDE) store(threadIdx.x, sum);
    }
};

// The same by tensor cores, as products with columns of ones, which are all equal. Each thread takes part.
template <class T, class SUMS>
struct LinesOfWarps {
    static constexpr u32 DOWN = SUMS::DOWN;
    f32 sums[DOWN][4] = {};

    // Two numbers.
    static __device__ u32 ones() {
        const u32 one = bits_of(from_f32<T>(1.0f));
        return one | one << 16;
    }

    template <class STORE>
    __device__ void each(const STORE& store) const {
        const u32 lane = threadIdx.x % WARP;
        if (lane % 4 != 0 || SUMS::first_column() != 0) return;
#pragma unroll
        for (u32 i = 0; i < 2 * DOWN; i++) {
            const u32 half = i % 2;
            store(SUMS::first_row() + SUMS::APART * (i / 2) + 8 * half + lane / 4, sums[i / 2][2 * half]);
        }
    }
};

// ---- Products of two tiles in shared memory ----
// Each keeps a thread's part of the result, and finally passes it to a result (results.cuh) in units of four rows and
// four columns, which begin at multiples of four.

// Fused multiply-adds: a thread computes 8 rows of 8 or 4 columns, in runs of four.
template <class T, class TILE>
struct PlainProduct {
    static constexpr bool TENSORS = false, GROUPS = false;
    using Lines = DepthsOfLines<TILE::SIDE>;
    using Depths = DepthsOfLines<TILE::SIDE>;
    template <class LEFT>
    using LineSums = LinesOfThreads<TILE, LEFT>;
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

// A warp's part of a tile in pieces of 16x8, as the lanes have the results of tensor cores.
template <class TILE>
struct WarpSums {
    static constexpr u32 DOWN = TILE::WARP_ROWS / 16, ACROSS = TILE::WARP_COLUMNS / 8, APART = TILE::APART;
    f32 sums[DOWN][ACROSS][4] = {};

    static __device__ u32 first_row() { return TILE::first_row(threadIdx.x / WARP); }
    static __device__ u32 first_column() { return TILE::first_column(threadIdx.x / WARP); }

    // Calls `visit(index, row, column, four)` for each four of a thread's sums. They are in a warp's piece of 16x8, which
    // begins at that row and column.
    template <class VISIT>
    __device__ void each_four(const VISIT& visit) {
#pragma unroll
        for (u32 i = 0; i < DOWN; i++) {
#pragma unroll
            for (u32 j = 0; j < ACROSS; j++) {
                visit(i * ACROSS + j, first_row() + APART * i, first_column() + 8 * j, sums[i][j]);
            }
        }
    }

    // The units of 16 rows of a warp, and their numbers that a lane has.
    static constexpr u32 UNITS_ACROSS = TILE::WARP_COLUMNS / 4, UNITS = 4 * UNITS_ACROSS;

    // Calls `visit(row, column)` for each of a thread's units.
    template <class VISIT>
    static __device__ void each_unit(const VISIT& visit) {
#pragma unroll
        for (u32 i = 0; i < DOWN; i++) {
#pragma unroll
            for (u32 unit = threadIdx.x % WARP; unit < UNITS; unit += WARP) {
                visit(first_row() + APART * i + unit / UNITS_ACROSS * 4, first_column() + unit % UNITS_ACROSS * 4);
            }
        }
    }

    // A lane of a warp holds single pairs of columns. Through shared memory, 16 rows at a time, it gets whole units.
    // The padding makes a row begin eight banks after the row before, which four lanes write at once.
    template <class RESULT>
    __device__ void write(const RESULT& result, u32* shared) const {
        constexpr u32 STRIDE = TILE::WARP_COLUMNS + 8;
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
            // Not unrolled, because results are long.
#pragma unroll 1
            for (u32 number = lane; number < UNITS; number += WARP) {
                const u32 down = number / UNITS_ACROSS * 4, across = number % UNITS_ACROSS * 4;
                f32 unit[4][4];
#pragma unroll
                for (u32 r = 0; r < 4; r++) {
                    const Quad quad = *(const Quad*)(rows + (down + r) * STRIDE + across);
#pragma unroll
                    for (u32 c = 0; c < 4; c++) unit[r][c] = float_of(quad.word[c]);
                }
                result.unit(first_row() + APART * i + down, first_column() + across, unit);
            }
        }
    }
};

#ifdef F16_TENSOR_CORES
// Tensor cores: a warp computes WARP_ROWS x WARP_COLUMNS, eight words of depth at a time.
template <class T, class TILE>
struct TensorProduct : WarpSums<TILE> {
    static constexpr bool TENSORS = true, GROUPS = false;
    using Sums = WarpSums<TILE>;
    using Sums::DOWN, Sums::ACROSS, Sums::sums, Sums::first_row, Sums::first_column;
    using Lines = SwizzledLines<TILE::SIDE>;
    using Depths = SwizzledDepths<T, TILE::SIDE>;

    // A value as the products see it.
    static __device__ f32 rounded(f32 value) {
        if constexpr (sizeof(T) == 4) return float_of(f32_to_tf32(value));
        return value;
    }

    template <class LEFT>
    struct TensorLineSums : LinesOfWarps<T, Sums> {
        __device__ void add(const u32* lefts) {
            if (first_column() != 0) return;
            const u32 first = LEFT::Layout::template first<true>(threadIdx.x % WARP, first_row());
            const u32 ones[2] = {this->ones(), this->ones()};
#pragma unroll
            for (u32 word = 0; word < TILE_WORDS; word += 8) {
#pragma unroll
                for (u32 i = 0; i < DOWN; i++) {
                    u32 a[4];
                    load<typename LEFT::Layout, true>(a, lefts, first, i, word);
                    multiply_add(this->sums[i], a, ones, T{});
                }
            }
        }
    };

    // Without asynchronous copies there are too few registers for sums by tensor cores.
    static constexpr bool TENSOR_LINES = sizeof(T) == 2 && ASYNC_COPIES;
    template <class LEFT>
    using LineSums = typename Conditional<TENSOR_LINES, TensorLineSums<LEFT>, LinesOfThreads<TILE, LEFT>>::Type;

    // Values of f32 are as in global memory until they are in registers.
    template <class LAYOUT, bool IS_LEFT>
    static __device__ void load(u32 fragments[4], const u32* shared, u32 first, u32 i, u32 word) {
        LAYOUT::template load<IS_LEFT>(fragments, shared, first, i, word);
#pragma unroll
        for (u32 m = 0; m < 4; m++) {
            if constexpr (sizeof(T) == 4) fragments[m] = tf32_operand(float_of(fragments[m]));
        }
    }

    // The fragments of a slab, which is eight words of a step's depth. Those on the right are used until its end, so while it is
    // multiplied there are those of the next slab too. In TF32 there are not: more registers are needed to load them.
    static constexpr u32 RIGHTS = sizeof(T) == 2 ? 2 : 1;
    struct Fragments {
        u32 left[DOWN][4], right[RIGHTS][ACROSS / 2][4];
    };

    // Where a lane's first fragments are in the operands.
    template <class LEFT, class RIGHT>
    struct Offsets {
        u32 left, right;

        __device__ Offsets() {
            const u32 lane = threadIdx.x % WARP;
            left = kept(LEFT::template first<true>(lane, first_row()));
            right = kept(RIGHT::template first<false>(lane, first_column()));
        }

        __device__ void load_left(u32 to[4], const u32* lefts, u32 i, u32 word) const {
            load<LEFT, true>(to, lefts, left, i, word);
        }

        __device__ void load_right(u32 to[4], const u32* rights, u32 j, u32 word) const {
            load<RIGHT, false>(to, rights, right, j, word);
        }
    };

    // Loads the first slab of all.
    template <class OFFSETS>
    static __device__ void load_first(Fragments& to, const OFFSETS& offsets, const u32* lefts, const u32* rights) {
#pragma unroll
        for (u32 j = 0; j < ACROSS / 2; j++) offsets.load_right(to.right[0][j], rights, j, 0);
#pragma unroll
        for (u32 i = 0; i < DOWN; i++) offsets.load_left(to.left[i], lefts, i, 0);
    }

    // Multiplies the fragments of a slab, whose number is even or odd, and replaces them by those of the next one, from
    // these operands at that word. `meanwhile` is called half-way.
    template <class OFFSETS, class MEANWHILE>
    __device__ void multiply_slab(
        Fragments& fragments, u32 slab, const OFFSETS& offsets, const u32* lefts, const u32* rights, u32 word,
        const MEANWHILE& meanwhile) {
        auto &own = fragments.right[slab % RIGHTS], &next = fragments.right[(slab + 1) % RIGHTS];
        constexpr bool LATE = RIGHTS == 1;
#pragma unroll
        for (u32 i = 0; i < DOWN; i++) {
            if (i == DOWN / 2) meanwhile();
#pragma unroll
            for (u32 j = 0; j < ACROSS; j++) {
                if (!LATE && i == 0 && j % 2 == 0) offsets.load_right(next[j / 2], rights, j / 2, word);
                multiply_add(sums[i][j], fragments.left[i], own[j / 2] + j % 2 * 2, T{});
                if (LATE && i == DOWN - 1 && j % 2 == 1) offsets.load_right(next[j / 2], rights, j / 2, word);
            }
            offsets.load_left(fragments.left[i], lefts, i, word);
        }
    }

    // Without asynchronous copies operands take registers, and there are too few of them for both iterations at once.
    template <class LEFT, class RIGHT>
    __device__ void add(const u32* lefts, const u32* rights) {
        const Offsets<LEFT, RIGHT> offsets;
#pragma unroll(ASYNC_COPIES ? 2 : 1)
        for (u32 word = 0; word < TILE_WORDS; word += 8) {
            u32 b[ACROSS / 2][4];
#pragma unroll
            for (u32 j = 0; j < ACROSS / 2; j++) offsets.load_right(b[j], rights, j, word);
#pragma unroll
            for (u32 i = 0; i < DOWN; i++) {
                u32 a[4];
                offsets.load_left(a, lefts, i, word);
#pragma unroll
                for (u32 j = 0; j < ACROSS; j++) multiply_add(sums[i][j], a, b[j / 2] + j % 2 * 2, T{});
            }
        }
    }
};
#endif

// ---- The main loop ----

// The shared memory of a block: a step's operands in each stage, and after the main loop the results on their way out.
// 128 bytes fill the banks once; those of warpgroups are swizzled in units of 1,024 bytes.
template <class TILE, class LEFT, class RIGHT>
struct alignas(TILE::WORDS == TILE_WORDS ? 128 : 1024) TileMemory {
    static constexpr bool ASYNC = LEFT::ASYNC;
    static constexpr u32 COUNT = ASYNC ? TILE::STAGES : 2;
    Quad lefts[COUNT][LEFT::Layout::WORDS / 4], rights[COUNT][RIGHT::Layout::WORDS / 4];

    __device__ u32* words() { return (u32*)this; }

    // Begins to copy the step from `from` on to a stage. Beyond the end of the depth these are zeros, which nobody reads: so the
    // number of groups to wait for is constant.
    __device__ void copy(LEFT& left, RIGHT& right, u32 stage, u32 from, u32 end) {
        left.copy(lefts[stage]->word, from, end);
        right.copy(rights[stage]->word, from, end);
        commit_copies();
    }

    // That of the running block. Warpgroups use more than a block has without asking.
    static __device__ TileMemory& of_block() {
        if constexpr (sizeof(TileMemory) > 48 << 10) {
            DYNAMIC_SHARED(u8, bytes);
            constexpr u64 ALIGNMENT = alignof(TileMemory);
            return *(TileMemory*)(((u64)bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
        } else {
            __shared__ TileMemory memory;
            return memory;
        }
    }
};

// Copies the steps ahead. A step is multiplied in slabs, and while one is multiplied the fragments of the next are loaded:
// those of the next step's first slab too, so the barrier between two steps comes before the last slab. `visit(lines)` is
// called with the left operand of every step in shared memory.
template <class TILE, class LEFT, class RIGHT, class PRODUCT, class VISIT>
__device__ inline void multiply_ahead(
    LEFT& left, RIGHT& right, PRODUCT& product, TileMemory<TILE, LEFT, RIGHT>& memory, u32 start, u32 end, u32 step,
    const VISIT& visit) {
    constexpr u32 COUNT = TileMemory<TILE, LEFT, RIGHT>::COUNT, SLABS = TILE_WORDS / 8;
    left.begin(start);
    right.begin(start);
#pragma unroll
    for (u32 stage = 0; stage < COUNT; stage++) memory.copy(left, right, stage, start + stage * step, end);
    await_copies<COUNT - 1>();
    __syncthreads();
    u32 stage = 0;
    const typename PRODUCT::template Offsets<typename LEFT::Layout, typename RIGHT::Layout> offsets;
    typename PRODUCT::Fragments fragments;
    product.load_first(fragments, offsets, memory.lefts[0]->word, memory.rights[0]->word);
    for (; start < end; start += step) {
        const u32 following = stage + 1 == COUNT ? 0 : stage + 1;
        visit(memory.lefts[stage]->word);
#pragma unroll
        for (u32 slab = 0; slab < SLABS; slab++) {
            const bool last = slab + 1 == SLABS;
            if (last) {
                await_copies<COUNT - 2>();
                // After this the next step is complete, and all threads have read this one, so its stage is free.
                __syncthreads();
            }
            const u32 from = last ? following : stage;
            product.multiply_slab(
                fragments, slab, offsets, memory.lefts[from]->word, memory.rights[from]->word, (slab + 1) % SLABS * 8, [&] {
                    if (last) memory.copy(left, right, stage, start + COUNT * step, end);
                });
        }
        stage = following;
    }
    await_copies<0>();
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
    if constexpr (PRODUCT::GROUPS) {
        multiply_groups(left, right, product, memory, start, end, step, visit);
    } else if constexpr (LEFT::ASYNC) {
        multiply_ahead(left, right, product, memory, start, end, step, visit);
    } else {
        multiply_buffered(left, right, product, memory, row, column, start, end, step, visit);
    }
}
