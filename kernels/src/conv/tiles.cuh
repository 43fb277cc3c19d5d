// Tiled products of two large matrices, which are defined by the source that includes this.
//
// A block of threads computes one square tile of the result. It iterates over the depth, the extent that is summed
// over, in steps of TILE_WORDS words of 32 bits (16 elements in f32, 32 in bf16): while one step's operands are
// multiplied from shared memory, the next step's are being loaded from global memory into registers. There are two
// buffers, so one barrier per step is enough.
//
// In shared memory a word holds an operand's values at one line (row of the left operand, column of the right one)
// and one depth, or in bf16 at two neighbouring depths. So the fragments of the tensor cores' TF32 and bfloat16
// products have the same words in the same lanes, and one loop serves both. Every element of the result is summed
// over the depth in the same order, whatever the tile's size.

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

// ---- Operands in shared memory ----

// Lines of the tile (its rows or its columns) one after another, each with its words along the depth: for fragments
// of operands that are contiguous along the depth. With four words of padding eight lines start in eight different
// groups of four banks.
template <u32 SIDE>
struct LinesOfDepth {
    static constexpr u32 STRIDE = TILE_WORDS + 4, WORDS = SIDE * STRIDE;
    static __device__ u32 at(u32 line, u32 word) { return line * STRIDE + word; }
};

// Words of one depth one after another, a word for each line. Here the padding keeps a fragment's four depths in
// different banks.
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

template <class T>
struct Elements {
    static constexpr u32 WORD = 4 / sizeof(T), QUAD = 16 / sizeof(T), STEP = TILE_WORDS * WORD;
};

__device__ inline u32 bits_of(bf16 value) { return value.bits; }
__device__ inline u32 bits_of(f16 value) { return value.bits; }

template <class T>
__device__ inline void put(Quad& quad, u32 element, T value) {
    constexpr u32 WORD = Elements<T>::WORD;
    quad.word[element / WORD] |= bits_of(value) << (element % WORD * 16);
}

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

// Operands that are contiguous along the depth. A thread moves four words of each of two lines. The lines of eight
// neighbouring threads are chosen such that their 16-byte writes have no bank conflict. Plain products need a depth's
// words side by side instead.
template <class T, class TILE, class PRODUCT, class OPERAND, bool VECTOR>
struct AlongDepth {
    using Layout = typename Conditional<PRODUCT::TENSORS, LinesOfDepth<TILE::SIDE>, DepthsOfLines<TILE::SIDE>>::Type;
    OPERAND operand;
    Quad moving[2];

    static __device__ u32 line(u32 i) {
        const u32 lane = threadIdx.x % WARP, eighth = lane / 4;
        return threadIdx.x / WARP * 8 + eighth / 2 + eighth % 2 * 4 + i * (TILE::SIDE / 2);
    }

    __device__ AlongDepth(const OPERAND& from, u32 first) : operand(from) {
        if constexpr (VECTOR) {
#pragma unroll
            for (u32 i = 0; i < 2; i++) operand.find_line(i, first + line(i));
        }
    }

    __device__ void fetch(u32 first, u32 start, u32 end) {
        const u32 depth = start + threadIdx.x % 4 * Elements<T>::QUAD;
        if constexpr (VECTOR) {
            operand.find_depth(depth);
#pragma unroll
            for (u32 i = 0; i < 2; i++) moving[i] = depth < end ? operand.quad(i) : Quad{};
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
        const u32 word = threadIdx.x % 4 * 4;
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            if constexpr (PRODUCT::TENSORS) {
                *(Quad*)(shared + Layout::at(line(i), word)) = PRODUCT::rounded(moving[i]);
            } else {
#pragma unroll
                for (u32 e = 0; e < 4; e++) shared[Layout::at(line(i), word + e)] = moving[i].word[e];
            }
        }
    }
};

// Operands that are contiguous along the lines. In f32 a thread moves two runs of four lines, eight depths apart; in
// bf16 it moves two runs of eight lines at neighbouring depths, and interleaves them to words.
template <class T, class TILE, class PRODUCT, class OPERAND, bool VECTOR>
struct AlongLines {
    using Layout = DepthsOfLines<TILE::SIDE>;
    static constexpr u32 RUN = Elements<T>::QUAD, RUNS = TILE::SIDE / RUN;
    OPERAND operand;
    Quad moving[2];

    static __device__ u32 run() { return threadIdx.x % RUNS * RUN; }

    static __device__ u32 depth(u32 i) {
        const u32 word = threadIdx.x / RUNS;
        return sizeof(T) == 4 ? word + i * (TILE_WORDS / 2) : word * 2 + i;
    }

    __device__ AlongLines(const OPERAND& from, u32 first) : operand(from) {
        if constexpr (VECTOR) operand.find_run(first + run());
    }

    __device__ void fetch(u32 first, u32 start, u32 end) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const u32 at = start + depth(i);
            moving[i] = Quad{};
            if (at >= end) continue;
            if constexpr (VECTOR) {
                moving[i] = operand.quad(at);
            } else {
#pragma unroll
                for (u32 e = 0; e < RUN; e++) put(moving[i], e, operand.element(first + run() + e, at));
            }
        }
    }

    // The sum of a line over a step's depth, from shared memory.
    static __device__ f32 sum_line(const u32* shared, u32 line) {
        f32 sum = 0.0f;
#pragma unroll 4
        for (u32 word = 0; word < TILE_WORDS; word++) {
            const u32 values = shared[Layout::at(line, word)];
#pragma unroll
            for (u32 i = 0; i < Elements<T>::WORD; i++) sum += value_in_word<T>(values, i);
        }
        return sum;
    }

    __device__ void store(u32* shared) const {
        if constexpr (sizeof(T) == 4) {
#pragma unroll
            for (u32 i = 0; i < 2; i++) *(Quad*)(shared + Layout::at(run(), depth(i))) = PRODUCT::rounded(moving[i]);
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

    static __device__ Quad rounded(Quad quad) { return quad; }

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

    static __device__ Quad rounded(Quad quad) {
        if (sizeof(T) == 4) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) quad.word[i] = f32_to_tf32(float_of(quad.word[i]));
        }
        return quad;
    }

    static __device__ u32 first_row() { return threadIdx.x / WARP % (TILE::SIDE / TILE::WARP_ROWS) * TILE::WARP_ROWS; }

    static __device__ u32 first_column() {
        return threadIdx.x / WARP / (TILE::SIDE / TILE::WARP_ROWS) * TILE::WARP_COLUMNS;
    }

    // Not unrolled: with both iterations at once the compiler runs out of registers.
    template <class LEFT, class RIGHT>
    __device__ void add(const u32* left, const u32* right) {
        const u32 group = threadIdx.x % WARP / 4, lane = threadIdx.x % 4;
        const u32 row = first_row() + group, column = first_column() + group;
#pragma unroll 1
        for (u32 word = 0; word < TILE_WORDS; word += 8) {
            u32 b[ACROSS][2];
#pragma unroll
            for (u32 j = 0; j < ACROSS; j++) {
#pragma unroll
                for (u32 e = 0; e < 2; e++) b[j][e] = right[RIGHT::at(column + 8 * j, word + lane + e * 4)];
            }
#pragma unroll
            for (u32 i = 0; i < DOWN; i++) {
                u32 a[4];
#pragma unroll
                for (u32 e = 0; e < 4; e++) a[e] = left[LEFT::at(row + 16 * i + e % 2 * 8, word + lane + e / 2 * 4)];
#pragma unroll
                for (u32 j = 0; j < ACROSS; j++) multiply_add(sums[i][j], a, b[j], T{});
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

// The shared memory of a block: two buffers for each operand, and after the main loop the results on their way out.
template <class LEFT, class RIGHT>
struct TileMemory {
    Quad lefts[2][LEFT::Layout::WORDS / 4], rights[2][RIGHT::Layout::WORDS / 4];

    __device__ u32* words() { return lefts[0]->word; }
};

// `visit(lines)` is called with the left operand of every step in shared memory.
template <class LEFT, class RIGHT, class PRODUCT, class VISIT>
__device__ inline void multiply(
    LEFT& left, RIGHT& right, PRODUCT& product, TileMemory<LEFT, RIGHT>& memory, u32 row, u32 column, u32 start,
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
