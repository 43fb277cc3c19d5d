// The text that every kernel source begins with. It includes no header: NVRTC compiles it with nothing else
// installed.
//
// With MGPU_SHIM defined, a C++ compiler compiles the same text after a header that defines the language's
// extensions; code with instructions of a GPU has a plain alternative here.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef float f32;
typedef double f64;

// Entry points are found by these macros' names, so each kernel's name is written out once.
#define KERNEL(name) extern "C" __global__ void name
#define KERNEL_BOUNDS(name, threads) extern "C" __global__ void __launch_bounds__(threads) name
// For kernels that the compiler would otherwise give so few registers that some values are spilled.
#define KERNEL_BLOCKS(name, threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks) name

#ifndef MGPU_SHIM
#define DYNAMIC_SHARED(type, name) extern __shared__ __align__(16) u8 name##_bytes[]; type* name = (type*)name##_bytes
#endif

#define WARP 32u
#define EVERY_LANE 0xffffffffu

// bfloat16 as its bits: the upper half of an f32.
struct bf16 {
    u16 bits;
};

// IEEE 754's binary16 as its bits.
struct f16 {
    u16 bits;
};

__device__ inline u32 bits_of(f32 value) {
#ifdef MGPU_SHIM
    u32 bits;
    __builtin_memcpy(&bits, &value, 4);
    return bits;
#else
    return __float_as_uint(value);
#endif
}

__device__ inline f32 float_of(u32 bits) {
#ifdef MGPU_SHIM
    f32 value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
#else
    return __uint_as_float(bits);
#endif
}

__device__ inline f32 to_f32(f32 value) { return value; }
__device__ inline f32 to_f32(bf16 value) { return float_of((u32)value.bits << 16); }

__device__ inline f32 to_f32(f16 value) {
#ifdef MGPU_SHIM
    const u32 sign = (u32)(value.bits & 0x8000u) << 16, rest = value.bits & 0x7fffu;
    // Below the smallest normal number all are multiples of 2^-24.
    if (rest < 0x400u) return float_of(sign | bits_of((f32)rest * 5.9604644775390625e-8f));
    return float_of(sign | ((rest << 13) + (rest < 0x7c00u ? 0x38000000u : 0x70000000u)));
#else
    f32 wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
    return wide;
#endif
}

template <class T>
__device__ inline T from_f32(f32 value);

template <>
__device__ inline f32 from_f32<f32>(f32 value) {
    return value;
}

// Rounds to nearest, ties to even; every NaN stays a NaN.
template <>
__device__ inline bf16 from_f32<bf16>(f32 value) {
#if !defined(MGPU_SHIM) && __CUDA_ARCH__ >= 800
    bf16 rounded;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded.bits) : "f"(value));
    return rounded;
#endif
    u32 bits = bits_of(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16{(u16)((bits >> 16) | 0x40u)};
    return bf16{(u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

// Rounds to nearest, ties to even; from 65520 on to Inf. Every NaN stays a NaN.
template <>
__device__ inline f16 from_f32<f16>(f32 value) {
#ifdef MGPU_SHIM
    const u32 bits = bits_of(value), rest = bits & 0x7fffffffu;
    const u16 sign = (u16)(bits >> 16 & 0x8000u);
    if (rest > 0x7f800000u) return f16{(u16)(sign | 0x7e00u | (rest >> 13 & 0x1ffu))};
    if (rest >= 0x477ff000u) return f16{(u16)(sign | 0x7c00u)};
    // Below 2^-14 the results are multiples of 2^-24, as are the numbers from 0.5 to 1: the addition rounds.
    if (rest < 0x38800000u) return f16{(u16)(sign | (bits_of(float_of(rest) + 0.5f) - 0x3f000000u))};
    return f16{(u16)(sign | ((rest - 0x38000000u + 0xfffu + (rest >> 13 & 1u)) >> 13))};
#else
    f16 rounded;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(rounded.bits) : "f"(value));
    return rounded;
#endif
}

// The nearest number with TF32's 10 bits of mantissa, as the bits of an f32. Infinities and NaNs are unchanged.
__device__ inline u32 f32_to_tf32(f32 value) {
    u32 bits = bits_of(value);
    if ((bits & 0x7f800000u) == 0x7f800000u) return bits;
    return (bits + 0x1000u) & 0xffffe000u;
}

// The same as an operand of mma_tf32_1688, with fewer instructions: the lower bits are unspecified.
__device__ inline u32 tf32_operand(f32 value) {
#if !defined(MGPU_SHIM) && __CUDA_ARCH__ >= 800
    u32 operand;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(operand) : "f"(value));
    return operand;
#else
    return f32_to_tf32(value);
#endif
}

template <class T>
__device__ inline T least(T a, T b) {
    return b < a ? b : a;
}

template <class T>
__device__ inline T most(T a, T b) {
    return a < b ? b : a;
}

// Number of elements that one access of 16 bytes moves, and a type for N elements that are loaded and stored at once.
// Its address is a multiple of its size.
template <class T>
constexpr u32 PACK = 16 / sizeof(T);

template <class T, u32 N>
struct alignas(N * sizeof(T)) Pack {
    T at[N];
};

template <u32 N, class T>
__device__ inline Pack<T, N> load_pack(const T* from) {
    return *(const Pack<T, N>*)from;
}

template <u32 N, class T>
__device__ inline void store_pack(T* to, const Pack<T, N>& pack) {
    *(Pack<T, N>*)to = pack;
}

// N numbers for the N channels of a pack of activations, loaded 16 bytes at a time if there are as many.
template <u32 N>
__device__ inline Pack<f32, N> load_channels(const f32* from) {
    constexpr u32 STEP = N < PACK<f32> ? N : PACK<f32>;
    Pack<f32, N> values;
    for (u32 j = 0; j < N; j += STEP) {
        const Pack<f32, STEP> part = load_pack<STEP>(from + j);
        for (u32 k = 0; k < STEP; k++) values.at[j + k] = part.at[k];
    }
    return values;
}

// Index of this thread in a one-dimensional grid, and the number of threads: a loop from the one in strides of the
// other visits every item once, whatever the grid (grid-stride loop).
__device__ inline u32 grid_thread() { return blockIdx.x * blockDim.x + threadIdx.x; }
__device__ inline u32 grid_threads() { return gridDim.x * blockDim.x; }

// ReLU with a slope for negative values; with slope 1, the value itself.
__device__ inline f32 rectify(f32 value, f32 slope) {
    const f32 scaled = value * slope;
    return value > 0.0f ? value : scaled;
}

// The gradient of the input of `rectify`, from that of its output `y`.
template <class T>
__device__ inline T rectify_gradient(T y, T gradient, f32 slope) {
    const f32 scaled = to_f32(gradient) * slope;
    return to_f32(y) > 0.0f ? gradient : from_f32<T>(scaled);
}

// Sum over the lanes of a warp, the same in every lane, always in the same order.
template <class T>
__device__ inline T warp_sum(T value) {
    for (u32 lane = WARP / 2; lane > 0; lane /= 2) value += __shfl_xor_sync(EVERY_LANE, value, lane);
    return value;
}

template <class T>
__device__ inline T warp_max(T value) {
    for (u32 lane = WARP / 2; lane > 0; lane /= 2) value = most(value, __shfl_xor_sync(EVERY_LANE, value, lane));
    return value;
}

// Sum over the threads of a one-dimensional block, the same in every thread, always in the same order. `scratch` has
// room for one value per warp. All threads of the block must call it, and the block consists of whole warps.
template <class T>
__device__ inline T block_sum(T value, T* scratch) {
    const u32 warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    value = warp_sum(value);
    __syncthreads();
    if (threadIdx.x % WARP == 0) scratch[warp] = value;
    __syncthreads();
    value = threadIdx.x % WARP < warps ? scratch[threadIdx.x % WARP] : T(0);
    return warp_sum(value);
}

// The counter-based generator of rng.rs: the number for counter i is a function of (seed, stream, i) alone.
#define RANDOM_INCREMENT 0x9e3779b97f4a7c15ull

__device__ inline u64 splitmix64(u64 x) {
    u64 z = x + RANDOM_INCREMENT;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

__device__ inline u64 random_base(u64 seed, u64 stream) { return splitmix64(splitmix64(seed) ^ stream); }
__device__ inline u32 random_bits24(u64 base, u64 i) { return (u32)(splitmix64(base + i * RANDOM_INCREMENT) >> 40); }

// The values that change from step to step. They are in device memory and a kernel advances them, so that a captured
// graph can be replayed with the arguments that it was captured with.
struct StepState {
    u64 step;            // index of the current step, from 0
    u64 position;        // index of the step within its epoch
    f64 learning_rate;   // of that step
    f32 constants[8];    // those constants of the optimizer that depend on the step
    f64 squares;         // sum of the squares of all gradients, if they are clipped
    f64 norm;            // the square root of it
    f32 scale;           // the factor for the gradients
    u32 halted;          // an earlier step had non-finite gradients, whatever its loss scale: no update is applied
    u64 non_finite;      // the mark of the tensor with non-finite gradients, 0 for none
    f64 step_size;       // the learning rate with Adam's bias correction
    f64 shrink;          // the learning rate times the weight decay
    f32 loss_scale;      // the factor of the loss's gradient
    u32 good_steps;      // steps before this one since that scale changed
    u64 skipped;         // steps before this one that were skipped
    u64 begun;           // whether a step has begun with this state
};

// The mask of a dropout layer, see dropout/mod.rs. Elements are counted as [N, C, P], although they are [N, P, C] in
// memory: the number of the element in the next channel is larger by `plane`.
struct DropoutMask {
    u64 seed;
    u64 stream;        // without the step, which is read from the device's memory
    u64 first_sample;  // index of this rank's first sample in the batch of all ranks
    u32 channels;
    u32 plane;
    u32 threshold;  // of 2^24: below it, an element is dropped
    f32 scale;

    __device__ u64 base(const StepState* state) const { return random_base(seed, stream | state->step << 16); }

    // The number of the element at index `at` in memory.
    __device__ u64 element(u32 at) const {
        const u32 place = at / channels, sample = place / plane;
        return ((first_sample + sample) * channels + at % channels) * plane + place % plane;
    }

    template <class T>
    __device__ T apply(u64 base, u64 element, T value) const {
        const bool kept = random_bits24(base, element) >= threshold;
        return from_f32<T>(kept ? to_f32(value) * scale : 0.0f);
    }
};

// ---- Sums over blocks ----
// A long sum is cut into slices, one for each block of a row of the grid. The last block of a group of slices adds up
// the group's, and the last group adds up the groups' sums. Both additions are in the order of slices, so the result
// does not depend on which block is last. The counters are zero before and after a kernel; a row of the grid needs one
// for each group, and one more.

#define SLICES_OF_GROUP 16u

__device__ inline u32 slice_groups(u32 slices) { return (slices + SLICES_OF_GROUP - 1) / SLICES_OF_GROUP; }

// True in all threads of the last of `blocks` blocks that call it with this counter. That block sees what the others
// have written before, if it does not read it from its own cache: see `fresh`.
__device__ inline bool arrives_last(u32* counter, u32 blocks) {
    __threadfence();
    __syncthreads();
    bool last = false;
    if (threadIdx.x == 0) {
        last = atomicAdd(counter, 1u) + 1 == blocks;
        if (last) *counter = 0;
    }
    last = __syncthreads_or(last);
    if (last) __threadfence();
    return last;
}

// A value that another block may have written during this kernel.
template <class T>
__device__ inline T fresh(const T* from) {
    return *(const volatile T*)from;
}

// Four neighbours at a multiple of 16 bytes.
__device__ inline void fresh_four(const f32* from, f32 values[4]) {
#ifdef MGPU_SHIM
    for (u32 e = 0; e < 4; e++) values[e] = fresh(from + e);
#else
    asm volatile("ld.volatile.global.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(values[0]), "=f"(values[1]), "=f"(values[2]), "=f"(values[3])
                 : "l"(from)
                 : "memory");
#endif
}

// Calls `add(first, step, count, total)` in the blocks that add up slices: `count` of them, from `first` on in steps of
// `step`, into slice `first` or, if `total` is true, into the result.
template <class ADD>
__device__ inline void add_slices(u32* counters, u32 slice, u32 slices, const ADD& add) {
    const u32 group = slice / SLICES_OF_GROUP, groups = slice_groups(slices), first = group * SLICES_OF_GROUP;
    const u32 members = least(SLICES_OF_GROUP, slices - first);
    if (!arrives_last(counters + group, members)) return;
    add(first, 1u, members, groups == 1);
    if (groups == 1 || !arrives_last(counters + groups, groups)) return;
    add(0u, SLICES_OF_GROUP, groups, true);
}

// Adds up `count` slices in their order: calls `load(i, value)`, and then `add(value)`, for AT_ONCE slices at a time, so that
// these loads are in flight together. With an addition after each load a warp would wait for every single one.
template <u32 AT_ONCE, class VALUE, class LOAD, class ADD>
__device__ inline void each_slice(u32 count, const LOAD& load, const ADD& add) {
#pragma unroll 1
    for (u32 first = 0; first < count; first += AT_ONCE) {
        VALUE values[AT_ONCE];
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++) {
            if (first + i < count) load(first + i, values[i]);
        }
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++) {
            if (first + i < count) add(values[i]);
        }
    }
}

// The sum of one element over slices that are `stride` elements apart.
template <class T>
__device__ inline T sum_of_slices(const T* from, u64 stride, u32 count) {
    T sum = 0;
    each_slice<SLICES_OF_GROUP, T>(
        count, [&](u32 i, T& value) { value = fresh(from + i * stride); }, [&](const T& value) { sum += value; });
    return sum;
}

// Sums of the columns of a matrix, for example the gradient of a bias.
struct ColumnSums {
    f32* slices;   // a row of sums for each slice, if there are several
    f32* total;    // null if the sums are not wanted
    u32* counters;
};

// Adds up the columns of a block of THREADS threads, and of all slices. The threads form lanes of `tile` threads, each
// with N columns; `mine` are a thread's own sums. A tile of columns is computed by `slices` blocks.
template <u32 THREADS, u32 N>
__device__ inline void add_columns(
    const ColumnSums& sums, const f32 mine[N], u32 columns, u32 tile, u32 tile_index, u32 slice, u32 slices) {
    __shared__ f32 parts[THREADS * N];
    const u32 lanes = THREADS / tile, lane = threadIdx.x / tile, place = threadIdx.x % tile, width = tile * N;
    if (lane < lanes) {
#pragma unroll
        for (u32 j = 0; j < N; j++) parts[lane * width + place * N + j] = mine[j];
    }
    __syncthreads();
    const bool alone = slices == 1;
    const u32 begin = tile_index * width, known = least(width, columns - begin);
    f32* own = (alone ? sums.total : sums.slices + (u64)slice * columns) + begin;
    for (u32 column = threadIdx.x; column < known; column += THREADS) {
        f32 sum = parts[column];
        for (u32 other = 1; other < lanes; other++) sum += parts[other * width + column];
        own[column] = sum;
    }
    if (alone) return;
    u32* counters = sums.counters + tile_index * (slice_groups(slices) + 1);
    add_slices(counters, slice, slices, [&](u32 first, u32 step, u32 count, bool total) {
        f32* from = sums.slices + (u64)first * columns + begin;
        f32* to = total ? sums.total + begin : from;
        for (u32 column = threadIdx.x; column < known; column += THREADS) {
            to[column] = sum_of_slices(from + column, (u64)step * columns, count);
        }
    });
}

#if defined(MGPU_SHIM) || __CUDA_ARCH__ >= 750
#define F16_TENSOR_CORES 1

// One warp's product of 16x16 by 16x8 in f16, added to 16x8 in f32. The lanes hold what they hold for bfloat16, below.
__device__ inline void mma_f16_16816(f32 d[4], const u32 a[4], const u32 b[2]) {
#ifdef MGPU_SHIM
    shim_mma_f16_16816(d, a, b);
#elif __CUDA_ARCH__ >= 800
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    // Half the depth at a time, with the same columns in the same lanes.
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        asm volatile(
            "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[2 * half]), "r"(a[2 * half + 1]), "r"(b[half]));
    }
#endif
}
#endif

#if defined(MGPU_SHIM) || __CUDA_ARCH__ >= 800
#define TENSOR_CORES 1

// One warp's product of 16x16 by 16x8 in bfloat16, added to 16x8 in f32. With g = lane / 4 and t = lane % 4, a lane
// holds
//   a[0]: (g, 2t..2t+1)   a[1]: (g+8, 2t..)   a[2]: (g, 2t+8..)   a[3]: (g+8, 2t+8..)     lower column in the lower half
//   b[0]: (2t..2t+1, g)   b[1]: (2t+8.., g)
//   d[0], d[1]: (g, 2t..2t+1)   d[2], d[3]: (g+8, 2t..)
__device__ inline void mma_bf16_16816(f32 d[4], const u32 a[4], const u32 b[2]) {
#ifdef MGPU_SHIM
    shim_mma_bf16_16816(d, a, b);
#else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// The same for 16x8 by 8x8 in TF32:
//   a[0]: (g, t)   a[1]: (g+8, t)   a[2]: (g, t+4)   a[3]: (g+8, t+4)
//   b[0]: (t, g)   b[1]: (t+4, g)   d as above
__device__ inline void mma_tf32_1688(f32 d[4], const u32 a[4], const u32 b[2]) {
#ifdef MGPU_SHIM
    shim_mma_tf32_1688(d, a, b);
#else
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}
#endif

// The product of tensor cores for operands of a type, the last parameter: 16 depths of 16 bits, or 8 in TF32.
#ifdef F16_TENSOR_CORES
__device__ inline void multiply_add(f32 d[4], const u32 a[4], const u32 b[2], f16) { mma_f16_16816(d, a, b); }
#endif
#ifdef TENSOR_CORES
__device__ inline void multiply_add(f32 d[4], const u32 a[4], const u32 b[2], bf16) { mma_bf16_16816(d, a, b); }
__device__ inline void multiply_add(f32 d[4], const u32 a[4], const u32 b[2], f32) { mma_tf32_1688(d, a, b); }
#endif

// Four matrices of eight rows of 16 bytes from shared memory. Lane l passes the address of row l % 8 of matrix l / 8, and
// gets word t of row g of each matrix, where g = l / 4 and t = l % 4. The rows of a matrix are in different groups of four
// banks, or take longer if they are SCATTERED.
template <bool SCATTERED = false>
__device__ inline void load_matrices(u32 d[4], const u32* row) {
#ifdef MGPU_SHIM
    shim_load_matrices(d, row, false, SCATTERED);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"((u32)__cvta_generic_to_shared(row))
                 : "memory");
#endif
}

// The same for 8x8 elements of 16 bits: a lane gets those of column g in the rows 2t (lower half) and 2t + 1.
template <bool SCATTERED = false>
__device__ inline void load_matrices_transposed(u32 d[4], const u32* row) {
#ifdef MGPU_SHIM
    shim_load_matrices(d, row, true, SCATTERED);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"((u32)__cvta_generic_to_shared(row))
                 : "memory");
#endif
}

// Whether there are asynchronous copies to shared memory: since sm_80, while sm_75 has tensor cores for f16.
#if defined(MGPU_SHIM) || __CUDA_ARCH__ >= 800
#define ASYNC_COPIES true
#else
#define ASYNC_COPIES false
#endif

// Begins to copy 16 bytes from global to shared memory, both at multiples of 16, or zeros instead if they are not
// `inside` the operand. The thread itself sees them after it has awaited the group that the copy is committed to, other
// threads after a barrier that follows.
__device__ inline void copy_async(u32* to, const void* from, bool inside) {
#ifdef MGPU_SHIM
    shim_copy_async(to, from, inside ? 16 : 0);
#else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from),
                 "r"(inside ? 16 : 0)
                 : "memory");
#endif
}

// Makes a group of the thread's copies since its last group; there may be none.
__device__ inline void commit_copies() {
#ifdef MGPU_SHIM
    shim_commit_copies();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits for all of the thread's groups but the last LATER ones.
template <u32 LATER>
__device__ inline void await_copies() {
#ifdef MGPU_SHIM
    shim_await_copies(LATER);
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
#endif
}
