// Kernels that test the main loop of matrix products (conv/tiles.cuh), and what the shim emulates for it.
#include "../../kernels/src/conv/tiles.cuh"
#include "../../kernels/src/conv/groups.cuh"

// ---- Loads of matrices and asynchronous copies ----

// Four matrices of 8x8 elements of 16 bits as a warp gets them, then the same transposed.
KERNEL(selftest_matrices)(const u32* in, u32* out) {
    __shared__ Quad rows[WARP];
    rows[threadIdx.x] = *(const Quad*)(in + threadIdx.x * 4);
    __syncwarp();
    load_matrices(out + threadIdx.x * 4, rows[threadIdx.x].word);
    load_matrices_transposed(out + (WARP + threadIdx.x) * 4, rows[threadIdx.x].word);
}

// The rows of a matrix are 32 bytes apart, so two of them are in the same banks.
KERNEL(selftest_bank_conflict)(u32* out) {
    __shared__ Quad rows[2 * WARP];
    rows[threadIdx.x] = rows[WARP + threadIdx.x] = Quad{};
    __syncwarp();
    load_matrices(out + threadIdx.x * 4, rows[2 * threadIdx.x].word);
}

enum { COPIES_RIGHT, COPIES_WITHOUT_WAIT, COPIES_WITHOUT_BARRIER, COPIES_TOO_EARLY, COPIES_LEFT_BEHIND };

// Every thread copies 16 bytes, of which those from `inside` on are zeros, and reads those of another thread: twice, with
// the second copy on its way meanwhile. In all kinds but one something is missing.
KERNEL(selftest_copies)(const u32* from, u32* out, u32 inside, u32 kind) {
    __shared__ Quad stages[2][64];
    const u32 own = threadIdx.x, other = (own + 33) % 64;
    copy_async(stages[0][own].word, from + own * 4, own < inside);
    commit_copies();
    if (kind != COPIES_TOO_EARLY) copy_async(stages[1][own].word, from + (64 + own) * 4, true);
    commit_copies();
    // All groups but the second.
    if (kind != COPIES_WITHOUT_WAIT) await_copies<1>();
    if (kind != COPIES_WITHOUT_BARRIER) __syncthreads();
    // Without a barrier before it, a copy may overwrite what another thread has yet to read.
    if (kind == COPIES_TOO_EARLY) copy_async(stages[0][own].word, from + (64 + own) * 4, true);
    commit_copies();
    out[own] = stages[0][other].word[own % 4];
    if (kind == COPIES_LEFT_BEHIND) return;
    await_copies<0>();
    __syncthreads();
    out[64 + own] = stages[kind == COPIES_TOO_EARLY ? 0 : 1][other].word[own % 4];
}

// ---- Bank conflicts ----

// How many of the accesses that the hardware makes at once need more than one, of all. `units` are 16 bytes each by
// eight threads, otherwise 4 bytes by 32.
struct Conflicts {
    u32 found, all;

    template <class OFFSET>
    __device__ void count(bool units, const OFFSET& offset) {
        u32 banks = 0;
        for (u32 i = 0; i < (units ? 8u : 32u); i++) {
            banks |= units ? 1u << offset(i) / 4 % 8 : 1u << offset(i) % 32;
        }
        found += banks != (units ? 0xffu : ~0u);
        all++;
    }
};

// What a layout must not be.
struct NotSwizzled {
    template <bool IS_LEFT>
    static __device__ u32 first(u32 lane, u32 line) {
        return ((line + lane % 16) * TILE_WORDS + lane / 16 * 4) * 4;
    }

    static __device__ u32 next(u32 first, u32 i, u32 word) { return first + (16 * i * TILE_WORDS + word) * 4; }
};

template <class LAYOUT, bool IS_LEFT>
__device__ inline void count_rows(Conflicts& conflicts, u32 side) {
    for (u32 line = 0; line < side; line += 16) {
        for (u32 word = 0; word < TILE_WORDS; word += 8) {
            for (u32 matrix = 0; matrix < 4; matrix++) {
                conflicts.count(true, [&](u32 row) {
                    const u32 first = LAYOUT::template first<IS_LEFT>(8 * matrix + row, line / 32 * 32);
                    return LAYOUT::next(first, line / 16 % 2, word) / 4;
                });
            }
        }
    }
}

template <class TILE>
__device__ inline void count_words(Conflicts& conflicts) {
    for (u32 line = 0; line < TILE::SIDE; line += 8) {
        for (u32 depth = 0; depth < TILE_WORDS; depth += 4) {
            conflicts.count(false, [&](u32 lane) {
                using Layout = SwizzledDepths<f32, TILE::SIDE>;
                const u32 first = Layout::template first<true>(lane, line / 32 * 32) ^ line / 8 % 2 * 32;
                return Layout::next(first, line / 16 % 2, depth) / 4;
            });
        }
    }
}

struct NoOperand {};

// The units that the threads of a block copy.
template <class MOVER, class PLACE>
__device__ inline void count_copies(Conflicts& conflicts, const PLACE& place) {
    __shared__ u32 offsets[256];
    offsets[threadIdx.x] = place(MOVER{});
    __syncthreads();
    for (u32 first = 0; threadIdx.x == 0 && first < blockDim.x; first += 8) {
        conflicts.count(true, [&](u32 i) { return offsets[first + i]; });
    }
    __syncthreads();
}

template <class T, class TILE>
__device__ inline void count_layouts(Conflicts& conflicts) {
    constexpr u32 SIDE = TILE::SIDE;
    using Product = TensorProduct<T, TILE>;
    count_copies<AlongDepth<T, TILE, Product, NoOperand, false>*>(conflicts, [](auto* mover) {
        return SwizzledLines<SIDE>::at(mover->line(0), mover->unit());
    });
    count_copies<AlongLines<T, TILE, Product, NoOperand, false>*>(conflicts, [](auto* mover) {
        return SwizzledDepths<T, SIDE>::at(mover->depth(0), mover->unit());
    });
    if (threadIdx.x != 0) return;
    count_rows<SwizzledLines<SIDE>, true>(conflicts, SIDE);
    count_rows<SwizzledLines<SIDE>, false>(conflicts, SIDE);
    if constexpr (sizeof(T) == 2) {
        count_rows<SwizzledDepths<T, SIDE>, true>(conflicts, SIDE);
        count_rows<SwizzledDepths<T, SIDE>, false>(conflicts, SIDE);
    } else {
        count_words<TILE>(conflicts);
    }
}

template <class T, class TILE>
__device__ inline void count_group_layouts(Conflicts& conflicts) {
    using Product = GroupProduct<T, TILE>;
    count_copies<AlongDepth<T, TILE, Product, NoOperand, false>*>(conflicts, [](auto* mover) {
        return Product::Lines::at(mover->line(0), mover->unit());
    });
    count_copies<AlongLines<T, TILE, Product, NoOperand, false>*>(conflicts, [](auto* mover) {
        return Product::Depths::at(mover->depth(0), mover->unit());
    });
}

enum { SMALL_TILE, LARGE_TILE, LARGE_AHEAD_TILE };

// For blocks of as many threads as the tile has. Writes the conflicts of all layouts, then those of one that has them.
KERNEL(selftest_conflicts)(u32* out, u32 tile) {
    Conflicts conflicts{};
    if (tile == SMALL_TILE) {
        count_layouts<bf16, Small>(conflicts);
        count_layouts<f32, Small>(conflicts);
    } else if (tile == LARGE_TILE) {
        count_layouts<bf16, Large>(conflicts);
        count_layouts<f32, Large>(conflicts);
    } else {
        count_layouts<bf16, LargeAhead>(conflicts);
        count_layouts<f32, LargeAhead>(conflicts);
        count_group_layouts<bf16, Group>(conflicts);
    }
    if (threadIdx.x != 0) return;
    Conflicts wrong{};
    count_rows<NotSwizzled, true>(wrong, Small::SIDE);
    out[0] = conflicts.found, out[1] = conflicts.all, out[2] = wrong.found;
}

// ---- Products ----

// At least those of any tile.
#define MOST_MOVES 8

// A matrix of `lines` lines and `depths` depths, contiguous along the depth or along the lines.
template <class T, bool BY_LINES>
struct TestMatrix {
    const T* values;
    u32 lines, depths;
    u32 found[MOST_MOVES], depth, apart;

    __device__ const T* address(u32 line, u32 at) const { return values + (BY_LINES ? at * lines + line : line * depths + at); }
    __device__ void find_line(u32 i, u32 line) { found[i] = line; }
    __device__ void find_depth(u32 at) { depth = at; }
    __device__ void find_run(u32 line) { found[0] = line; }
    __device__ void begin(u32 at, u32 depths) { depth = at, apart = depths; }
    __device__ T element(u32 line, u32 at) const { return line < lines ? *address(line, at) : T{}; }

    // Along the depth the i-th line, along the lines the i-th depth.
    __device__ Source<T> source(u32 i) const {
        if (BY_LINES) return {address(found[0], i), found[0] < lines};
        return {address(found[i], depth), found[i] < lines};
    }

    __device__ Source<T> next() {
        const Source<T> from = source(depth);
        depth += apart;
        return from;
    }
};

template <class T, class TILE>
using ProductOf = typename Conditional<ARE_SAME<TILE, Group>, GroupProduct<T, TILE>, TensorProduct<T, TILE>>::Type;

template <class T, class TILE, bool BY_LINES, bool VECTOR>
using Mover = typename Conditional<
    BY_LINES, AlongLines<T, TILE, ProductOf<T, TILE>, TestMatrix<T, true>, VECTOR>,
    AlongDepth<T, TILE, ProductOf<T, TILE>, TestMatrix<T, false>, VECTOR>>::Type;

struct TestResult {
    f32* to;
    u32 side;

    __device__ void unit(u32 down, u32 across, const f32 values[4][4]) const {
        for (u32 i = 0; i < 16; i++) to[(down + i / 4) * side + across + i % 4] = values[i / 4][i % 4];
    }
};

struct TestProduct {
    u32 rows, columns, depths, start, end;
};

template <class T, class TILE, bool LEFT_BY_LINES, bool RIGHT_BY_LINES, bool VECTOR>
__device__ inline void test_product(const T* a, const T* b, f32* to, const TestProduct& product) {
    using Left = Mover<T, TILE, LEFT_BY_LINES, VECTOR>;
    using Right = Mover<T, TILE, RIGHT_BY_LINES, VECTOR>;
    auto& memory = TileMemory<TILE, Left, Right>::of_block();
    Left left({a, product.rows, product.depths}, 0);
    Right right({b, product.columns, product.depths}, 0);
    ProductOf<T, TILE> sums;
    f32 line_sum = 0.0f;
    multiply(left, right, sums, memory, 0, 0, product.start, product.end, STEP<T, TILE>, [&](const u32* lines) {
        if constexpr (LEFT_BY_LINES) {
            if (threadIdx.x < TILE::SIDE) line_sum += Left::sum_line(lines, threadIdx.x);
        }
    });
    sums.write(TestResult{to, TILE::SIDE}, memory.words());
    if (threadIdx.x < TILE::SIDE) to[TILE::SIDE * TILE::SIDE + threadIdx.x] = line_sum;
}

// `vector` selects the loop that copies ahead, and otherwise that through registers, element by element.
template <class T, class TILE, bool LEFT_BY_LINES, bool RIGHT_BY_LINES>
__device__ inline void test_loops(const T* a, const T* b, f32* to, const TestProduct& product, u32 vector) {
    if (vector) {
        test_product<T, TILE, LEFT_BY_LINES, RIGHT_BY_LINES, true>(a, b, to, product);
    } else {
        test_product<T, TILE, LEFT_BY_LINES, RIGHT_BY_LINES, false>(a, b, to, product);
    }
}

// `layouts`: 1 if the left operand is contiguous along its lines, 2 if the right one is, 3 if both are; 4 and 5 as 1, but
// for large tiles.
template <class T>
__device__ inline void test_layouts(const T* a, const T* b, f32* to, const TestProduct& product, u32 layouts, u32 vector) {
    if (layouts == 4) {
        test_loops<T, LargeAhead, true, false>(a, b, to, product, vector);
    } else if (layouts == 5) {
        test_loops<T, Large, true, false>(a, b, to, product, vector);
    } else if (layouts == 0) {
        test_loops<T, Small, false, false>(a, b, to, product, vector);
    } else if (layouts == 1) {
        test_loops<T, Small, true, false>(a, b, to, product, vector);
    } else if (layouts == 2) {
        test_loops<T, Small, false, true>(a, b, to, product, vector);
    } else {
        test_loops<T, Small, true, true>(a, b, to, product, vector);
    }
}

// The layouts of operands, in the same order, for tiles of a warpgroup.
template <class T>
__device__ inline void test_group(const T* a, const T* b, f32* to, const TestProduct& product, u32 layouts) {
    if (layouts == 0) {
        test_product<T, Group, false, false, true>(a, b, to, product);
    } else if (layouts == 1) {
        test_product<T, Group, true, false, true>(a, b, to, product);
    } else if (layouts == 2) {
        test_product<T, Group, false, true, true>(a, b, to, product);
    } else {
        test_product<T, Group, true, true, true>(a, b, to, product);
    }
}

KERNEL(selftest_group_bf16)(const bf16* a, const bf16* b, f32* to, TestProduct product, u32 layouts) {
    test_group(a, b, to, product, layouts);
}

enum { GROUP_RIGHT, GROUP_READ_TOO_EARLY, GROUP_OVERWRITTEN, GROUP_ASKEW, GROUP_LEFT_BEHIND };

// A product of ones, whose sums are 64. In all kinds but one something is wrong.
KERNEL(selftest_group_kinds)(const u32* zeros, f32* out, u32 kind) {
    using Product = GroupProduct<bf16, Group>;
    using Operand = Product::Lines;
    DYNAMIC_SHARED(u8, bytes);
    u32* lefts = (u32*)(((u64)bytes + 1023) / 1024 * 1024) + (kind == GROUP_ASKEW ? 32 : 0);
    u32* rights = lefts + Operand::WORDS;
    for (u32 i = threadIdx.x; i < 2 * Operand::WORDS; i += Group::THREADS) lefts[i] = 0x3f803f80u;
    __syncthreads();
    Product product;
    product.publish();
    product.begin<Operand, Operand>(lefts, rights);
    if (kind == GROUP_READ_TOO_EARLY) out[threadIdx.x] = product.sums[0][0][0];
    if (kind == GROUP_LEFT_BEHIND) return;
    __syncthreads();
    if (kind == GROUP_OVERWRITTEN) copy_async(rights + threadIdx.x * 4, zeros, true);
    commit_copies();
    product.await();
    if (kind != GROUP_READ_TOO_EARLY) out[threadIdx.x] = product.sums[0][0][0];
    await_copies<0>();
}

KERNEL(selftest_product_bf16)(const bf16* a, const bf16* b, f32* to, TestProduct product, u32 layouts, u32 vector) {
    test_layouts(a, b, to, product, layouts, vector);
}
KERNEL(selftest_product_tf32)(const f32* a, const f32* b, f32* to, TestProduct product, u32 layouts, u32 vector) {
    test_layouts(a, b, to, product, layouts, vector);
}
