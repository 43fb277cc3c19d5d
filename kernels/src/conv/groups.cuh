// Products by the tensor cores of sm_90, which four warps use together, a warpgroup ("wgmma"). They read operands of 16 bits from
// shared memory by themselves, and multiply while the warps go on: a step of 128 x 128 x 64 multiply-adds takes no loads, and
// eight instructions. They reach the GPU's peak, which the instructions of a warp do not (tiles.cuh), and round otherwise.
// Included after tiles.cuh.
//
// What limits the loop, per multiprocessor and step: the products take 512 cycles (2,048 multiply-adds per cycle). Copies write
// 32 KiB to shared memory and products read 48 KiB of it, which is 640 cycles at 128 bytes per cycle. Two warpgroups with a tile
// of 256x128 and one block on a multiprocessor would move a quarter less, but were slower on an H200 (1.37 instead of 1.24 ms
// for a layer): nothing is multiplied while such a block begins, or writes its results.
//
// An operand lies in atoms of 1,024 bytes: eight rows of 128 bytes, in which the units of 16 bytes are swizzled by the number
// of the row. A row is a line's 64 elements, or a depth's 64 lines. The descriptor of an operand has its address, and how far
// atoms are apart (PTX ISA, "Matrix descriptor format").

// The tile of a warpgroup: a warp has 16 of each 64 rows. Three stages are 96 KiB, so there are two blocks on a multiprocessor.
struct Group {
    static constexpr u32 SIDE = 128, THREADS = 128, WORDS = 32, STAGES = 3;
    static constexpr u32 WARP_ROWS = 32, WARP_COLUMNS = 128, APART = 64;

    static __device__ u32 first_row(u32 warp) { return 16 * warp; }
    static __device__ u32 first_column(u32) { return 0; }
};

// What a product multiplies: 64 lines of the left operand, or 128 of the right one, at 16 depths.
struct GroupOperand {
    const u32* at;
    // Bytes from one atom to the next along the lines, if a row is a depth's; and to the next eight lines or depths.
    u32 leading, stride;

    __device__ u64 descriptor() const {
#ifdef MGPU_SHIM
        return 0;
#else
        constexpr u64 SWIZZLE_128 = 1ull << 62;
        const u64 address = (u64)__cvta_generic_to_shared(at) >> 4;
        return SWIZZLE_128 | (u64)(stride >> 4) << 32 | (u64)(leading >> 4) << 16 | address;
#endif
    }
};

#define ROW_WORDS 32u

// A row is 64 depths of a line.
template <u32 SIDE>
struct GroupLines {
    static constexpr u32 WORDS = SIDE * ROW_WORDS;
    static constexpr bool TRANSPOSED = false;

    static __device__ u32 at(u32 line, u32 unit) { return line * ROW_WORDS + (unit ^ line % 8) * 4; }

    static __device__ GroupOperand operand(const u32* shared, u32 line, u32 depth) {
        return {shared + line * ROW_WORDS + depth / 2, 16, 8 * ROW_WORDS * 4};
    }
};

// A row is 64 lines at a depth. Those of all depths of a step come first, then the next 64 lines.
template <u32 SIDE>
struct GroupDepths {
    static constexpr u32 ROW = ROW_WORDS, DEPTHS = 64, BLOCK = DEPTHS * ROW, WORDS = SIDE / 64 * BLOCK;
    static constexpr bool TRANSPOSED = true;

    static __device__ u32 at(u32 depth, u32 unit) { return unit / 8 * BLOCK + depth * ROW + (unit % 8 ^ depth % 8) * 4; }

    static __device__ GroupOperand operand(const u32* shared, u32 line, u32 depth) {
        return {shared + line / 64 * BLOCK + depth * ROW, BLOCK * 4, 8 * ROW * 4};
    }

    // As those of SwizzledDepths.
    static __device__ u32 word(u32 line, u32 depth) { return at(depth, line / 8) + line % 8 / 2; }
    static __device__ u32 deeper(u32 first, u32 depth) { return (first ^ depth % 8 * 16) + depth * ROW * 4; }
};

// Eight columns of a right operand.
struct alignas(1024) GroupColumns {
    u32 word[GroupLines<8>::WORDS];
};

// The instruction, with 64 sums.
#define FOUR(d, j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define SIXTEEN(d, j) FOUR(d, j), FOUR(d, j + 1), FOUR(d, j + 2), FOUR(d, j + 3)
#define GROUP_MULTIPLY(TYPE)                                                                                       \
    asm volatile(                                                                                                  \
        "{\n.reg .pred more;\nsetp.ne.u32 more, %68, 0;\n"                                                         \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " "                                           \
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,"  \
        "%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53," \
        "%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, %64, %65, more, 1, 1, %66, %67;\n}"                             \
        : SIXTEEN(d, 0), SIXTEEN(d, 4), SIXTEEN(d, 8), SIXTEEN(d, 12)                                              \
        : "l"(left.descriptor()), "l"(right.descriptor()), "n"(LEFT_TRANSPOSED), "n"(RIGHT_TRANSPOSED), "r"(1))

// That with four sums.
#define GROUP_MULTIPLY_NARROW(TYPE)                                                                             \
    asm volatile(                                                                                               \
        "{\n.reg .pred more;\nsetp.ne.u32 more, %7, 0;\n"                                                       \
        "wgmma.mma_async.sync.aligned.m64n8k16.f32." TYPE "." TYPE " {%0,%1,%2,%3}, %4, %5, more, 1, 1, %6, 0;\n}" \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                        \
        : "l"(left.descriptor()), "l"(right.descriptor()), "n"(LEFT_TRANSPOSED), "r"(1))

// Adds the product of 64 lines by 128 to `d`, which the warpgroup's threads have in pieces of 16x8: a warp those of 16 rows.
// The sums are complete when they are awaited.
template <class T, bool LEFT_TRANSPOSED, bool RIGHT_TRANSPOSED>
__device__ inline void multiply_group(f32 (&d)[16][4], const GroupOperand& left, const GroupOperand& right) {
    static_assert(sizeof(T) == 2, "operands of 32 bits cannot be transposed");
#ifdef MGPU_SHIM
    shim_group_multiply(
        &d[0][0], {left.at, left.leading, left.stride, LEFT_TRANSPOSED}, {right.at, right.leading, right.stride, RIGHT_TRANSPOSED},
        ARE_SAME<T, bf16>, 128);
#else
    if constexpr (ARE_SAME<T, bf16>) {
        GROUP_MULTIPLY("bf16");
    } else {
        GROUP_MULTIPLY("f16");
    }
#endif
}

// Adds the product of 64 lines by eight columns to `d`, of which a thread has a piece of 16x8.
template <class T, bool LEFT_TRANSPOSED>
__device__ inline void multiply_group_narrow(f32 (&d)[4], const GroupOperand& left, const GroupOperand& right) {
#ifdef MGPU_SHIM
    shim_group_multiply(
        d, {left.at, left.leading, left.stride, LEFT_TRANSPOSED}, {right.at, right.leading, right.stride, false},
        ARE_SAME<T, bf16>, 8);
#else
    if constexpr (ARE_SAME<T, bf16>) {
        GROUP_MULTIPLY_NARROW("bf16");
    } else {
        GROUP_MULTIPLY_NARROW("f16");
    }
#endif
}

template <class T, class TILE>
struct GroupProduct : WarpSums<TILE> {
    static constexpr bool TENSORS = true, GROUPS = true;
    using Sums = WarpSums<TILE>;
    using Sums::DOWN, Sums::ACROSS, Sums::sums;
    using Lines = GroupLines<TILE::SIDE>;
    using Depths = GroupDepths<TILE::SIDE>;

    static __device__ f32 rounded(f32 value) { return value; }

    // Makes the thread's copies visible to tensor cores, as soon as all threads of the block have passed a barrier.
    static __device__ void publish() {
#ifndef MGPU_SHIM
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
    }

    template <class LEFT>
    struct LineSums : LinesOfWarps<T, Sums> {
        const u32* columns;

        // The ones are visible after the first step's `publish`.
        __device__ LineSums() {
            __shared__ GroupColumns all;
            for (u32 i = threadIdx.x; i < GroupLines<8>::WORDS; i += TILE::THREADS) all.word[i] = this->ones();
            columns = all.word;
        }

        // A step that is being multiplied; awaited with it.
        __device__ void add(const u32* lefts) {
            using Layout = typename LEFT::Layout;
            begin_products();
#pragma unroll
            for (u32 depth = 0; depth < STEP<T, TILE>; depth += 16) {
#pragma unroll
                for (u32 i = 0; i < DOWN; i++) {
                    multiply_group_narrow<T, Layout::TRANSPOSED>(
                        this->sums[i], Layout::operand(lefts, 64 * i, depth), GroupLines<8>::operand(columns, 0, 0));
                }
            }
            end_products();
        }
    };

    // Around products that are awaited together.
    static __device__ void begin_products() {
#ifndef MGPU_SHIM
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
    }
    static __device__ void end_products() {
#ifndef MGPU_SHIM
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
    }

    // Begins to multiply a step.
    template <class LEFT, class RIGHT>
    __device__ void begin(const u32* lefts, const u32* rights) {
        begin_products();
#pragma unroll
        for (u32 depth = 0; depth < STEP<T, TILE>; depth += 16) {
#pragma unroll
            for (u32 i = 0; i < DOWN; i++) {
                multiply_group<T, LEFT::TRANSPOSED, RIGHT::TRANSPOSED>(
                    sums[i], LEFT::operand(lefts, 64 * i, depth), RIGHT::operand(rights, 0, depth));
            }
        }
        end_products();
    }

    // Awaits the steps that have begun.
    __device__ void await() {
#ifdef MGPU_SHIM
        shim_await_groups();
#else
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
        for (u32 i = 0; i < DOWN * ACROSS; i++) {
            f32* four = sums[i / ACROSS][i % ACROSS];
            // The compiler must not read them earlier.
            asm volatile("" : "+f"(four[0]), "+f"(four[1]), "+f"(four[2]), "+f"(four[3])::"memory");
        }
#endif
    }
};

// ---- The main loop ----

// Lets the tensor cores of a warpgroup read the stages, which they do while its threads go on. A step's products are awaited
// before the barrier of the next one, after which its stage is free. Meanwhile those of the other block on the multiprocessor
// are multiplied.
template <class TILE, class LEFT, class RIGHT, class PRODUCT, class VISIT>
__device__ inline void multiply_groups(
    LEFT& left, RIGHT& right, PRODUCT& product, TileMemory<TILE, LEFT, RIGHT>& memory, u32 start, u32 end, u32 step,
    const VISIT& visit) {
    constexpr u32 COUNT = TileMemory<TILE, LEFT, RIGHT>::COUNT, AHEAD = COUNT - 1;
    left.begin(start);
    right.begin(start);
#pragma unroll
    for (u32 stage = 0; stage < AHEAD; stage++) memory.copy(left, right, stage, start + stage * step, end);
    u32 stage = 0, free = AHEAD;
    for (; start < end; start += step) {
        await_copies<AHEAD - 1>();
        product.await();
        product.publish();
        __syncthreads();
        product.template begin<typename LEFT::Layout, typename RIGHT::Layout>(
            memory.lefts[stage]->word, memory.rights[stage]->word);
        memory.copy(left, right, free, start + AHEAD * step, end);
        visit(memory.lefts[stage]->word);
        stage = stage + 1 == COUNT ? 0 : stage + 1;
        free = free + 1 == COUNT ? 0 : free + 1;
    }
    product.await();
    await_copies<0>();
    // The results may overwrite the stages.
    __syncthreads();
}
