// Lets a C++ compiler read the project's CUDA sources, to run them without a GPU. For tests only.
//
// The threads of a block are fibers of the host thread that launches it. Blocks run one after another, and so do the
// kernels of all streams of a process, so shared memory is static. A fiber yields only to wait for others (a barrier, a
// shuffle), so kernels without either run each thread to its end. Real blocks and warps run in any order;
// FAKE_GPU_ORDER=forward|reverse|shuffled (with FAKE_GPU_SEED) selects the order of blocks, and of threads between two
// waits. A kernel whose result depends on it lacks a barrier. A barrier that a live thread of the block never reaches ends
// the process with the kernel's name, as does an access at a misaligned address.
// FAKE_GPU_TRUNCATE=1 makes tensor cores truncate their sums, as real ones do. Asynchronous copies arrive as late as they
// may.
//
// This header is included before each source, `device.cuh` second; see fake_gpu.rs for the whole command.
#pragma once

#include <math.h>
#include <stddef.h>
#include <utility>

// Names that NVRTC does not know must not compile here either.
#undef INFINITY
#undef NAN
#undef HUGE_VAL
#undef HUGE_VALF
#undef M_PI
#undef M_E

#define __device__
#define __host__
#define __global__
#define __constant__ static
#define __shared__ static
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __grid_constant__
#define warpSize 32

struct uint3 {
    unsigned x, y, z;
};

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};

// The position of the running thread.
struct ShimNow {
    uint3 thread, block;
    uint3 threads, blocks;
    unsigned char* dynamic;
};
extern ShimNow shim_now;

#define threadIdx (shim_now.thread)
#define blockIdx (shim_now.block)
#define blockDim (shim_now.threads)
#define gridDim (shim_now.blocks)
#define DYNAMIC_SHARED(type, name) type* name = (type*)shim_now.dynamic

// ---- Interface of the engine in shim.cpp ----

namespace shim {

enum class WarpFunction {
    Sync,
    Shuffle,
    ShuffleUp,
    ShuffleDown,
    ShuffleXor,
    Ballot,
    MmaBf16,
    MmaF16,
    MmaTf32,
    LoadMatrices,
    LoadMatricesTransposed
};

// One lane's part in a warp function. It is on the lane's stack while the lane waits for the others in `mask`; the
// last one to arrive computes all results.
struct WarpCall {
    WarpFunction function;
    unsigned mask;
    const void* in;
    void* out;
    unsigned size;    // of a shuffled value, in bytes
    unsigned lane;    // a shuffle's argument; for matrices whether their rows are scattered
    unsigned width;   // of a shuffle's segments
};

void warp_call(WarpCall& call);

// Computes the results of all waiting lanes (null: not in the mask, or ended). Returns a message if the call is
// invalid.
const char* exchange(WarpCall* const lanes[32]);

struct MmaLane {
    float* d;
    const unsigned* a;
    const unsigned* b;
};

// An operand of a warpgroup's product, in atoms of eight swizzled rows of 128 bytes.
struct GroupOperand {
    const void* at;
    unsigned leading, stride;   // bytes: see groups.cuh
    bool transposed;            // a row is a depth's, not a line's

    bool operator==(const GroupOperand&) const = default;
};

template <class T>
T shuffle(WarpFunction function, unsigned mask, T value, unsigned lane, int width) {
    static_assert((sizeof(T) == 4 || sizeof(T) == 8) && __is_trivially_copyable(T), "no such shuffle");
    T result;
    WarpCall call{function, mask, &value, &result, sizeof(T), lane, (unsigned)width};
    warp_call(call);
    return result;
}

}   // namespace shim

void __syncthreads();
int __syncthreads_or(int predicate);

inline void __syncwarp(unsigned mask = 0xffffffffu) {
    shim::WarpCall call{shim::WarpFunction::Sync, mask, nullptr, nullptr, 0, 0, 32};
    shim::warp_call(call);
}

template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
    return shim::shuffle(shim::WarpFunction::Shuffle, mask, value, (unsigned)lane, width);
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    return shim::shuffle(shim::WarpFunction::ShuffleUp, mask, value, delta, width);
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    return shim::shuffle(shim::WarpFunction::ShuffleDown, mask, value, delta, width);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane, int width = 32) {
    return shim::shuffle(shim::WarpFunction::ShuffleXor, mask, value, (unsigned)lane, width);
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
    unsigned result;
    shim::WarpCall call{shim::WarpFunction::Ballot, mask, &predicate, &result, 4, 0, 32};
    shim::warp_call(call);
    return result;
}

inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }

inline void shim_mma_bf16_16816(float d[4], const unsigned a[4], const unsigned b[2]) {
    shim::MmaLane lane{d, a, b};
    shim::WarpCall call{shim::WarpFunction::MmaBf16, 0xffffffffu, &lane, nullptr, 0, 0, 32};
    shim::warp_call(call);
}

inline void shim_mma_f16_16816(float d[4], const unsigned a[4], const unsigned b[2]) {
    shim::MmaLane lane{d, a, b};
    shim::WarpCall call{shim::WarpFunction::MmaF16, 0xffffffffu, &lane, nullptr, 0, 0, 32};
    shim::warp_call(call);
}

inline void shim_mma_tf32_1688(float d[4], const unsigned a[4], const unsigned b[2]) {
    shim::MmaLane lane{d, a, b};
    shim::WarpCall call{shim::WarpFunction::MmaTf32, 0xffffffffu, &lane, nullptr, 0, 0, 32};
    shim::warp_call(call);
}

// Rows of 16 bytes from shared memory: `row` is that of row lane % 8 of matrix lane / 8. If they are `scattered`, some may be
// in the same banks.
inline void shim_load_matrices(unsigned d[4], const unsigned* row, bool transposed, bool scattered) {
    const auto function = transposed ? shim::WarpFunction::LoadMatricesTransposed : shim::WarpFunction::LoadMatrices;
    shim::WarpCall call{function, 0xffffffffu, row, d, 0, scattered, 32};
    shim::warp_call(call);
}

// Asynchronous copies to shared memory: see shim_copies.h.
void shim_copy_async(unsigned* to, const void* from, unsigned bytes);
void shim_commit_copies();
void shim_await_copies(unsigned later);

// Products of a warpgroup: see shim_groups.h.
void shim_group_multiply(
    float* d, const shim::GroupOperand& left, const shim::GroupOperand& right, bool bfloat16, unsigned columns);
void shim_await_groups();

// ---- Atomics: real ones, because host threads may access the same memory ----

template <class T>
T shim_atomic_update(T* address, T (*next)(T, T), T value) {
    T old, wanted;
    __atomic_load(address, &old, __ATOMIC_RELAXED);
    do {
        wanted = next(old, value);
    } while (!__atomic_compare_exchange(address, &old, &wanted, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return old;
}

#define SHIM_ATOMICS(T)                                                                                            \
    inline T atomicAdd(T* address, T value) { return __atomic_fetch_add(address, value, __ATOMIC_RELAXED); }       \
    inline T atomicSub(T* address, T value) { return __atomic_fetch_sub(address, value, __ATOMIC_RELAXED); }       \
    inline T atomicAnd(T* address, T value) { return __atomic_fetch_and(address, value, __ATOMIC_RELAXED); }       \
    inline T atomicOr(T* address, T value) { return __atomic_fetch_or(address, value, __ATOMIC_RELAXED); }         \
    inline T atomicXor(T* address, T value) { return __atomic_fetch_xor(address, value, __ATOMIC_RELAXED); }       \
    inline T atomicExch(T* address, T value) { return __atomic_exchange_n(address, value, __ATOMIC_RELAXED); }     \
    inline T atomicMax(T* address, T value) {                                                                      \
        return shim_atomic_update<T>(address, [](T a, T b) { return a < b ? b : a; }, value);                      \
    }                                                                                                              \
    inline T atomicMin(T* address, T value) {                                                                      \
        return shim_atomic_update<T>(address, [](T a, T b) { return b < a ? b : a; }, value);                      \
    }                                                                                                              \
    inline T atomicCAS(T* address, T expected, T value) {                                                          \
        __atomic_compare_exchange_n(address, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);         \
        return expected;                                                                                           \
    }
SHIM_ATOMICS(int)
SHIM_ATOMICS(unsigned)
SHIM_ATOMICS(unsigned long long)
#undef SHIM_ATOMICS

inline float atomicAdd(float* address, float value) {
    return shim_atomic_update<float>(address, [](float a, float b) { return a + b; }, value);
}
inline double atomicAdd(double* address, double value) {
    return shim_atomic_update<double>(address, [](double a, double b) { return a + b; }, value);
}

inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

template <class T>
T __ldg(const T* address) {
    return *address;
}
template <class T>
T __ldcs(const T* address) {
    return *address;
}
template <class T>
void __stcs(T* address, T value) {
    *address = value;
}

// ---- Vector types ----

#define SHIM_VECTORS(T, name, pair)                                                            \
    struct name##1 {                                                                           \
        T x;                                                                                   \
    };                                                                                         \
    struct alignas(pair) name##2 {                                                             \
        T x, y;                                                                                \
    };                                                                                         \
    struct alignas(2 * pair > 16 ? 16 : 2 * pair) name##4 {                                    \
        T x, y, z, w;                                                                          \
    };                                                                                         \
    inline name##1 make_##name##1(T x) { return {x}; }                                         \
    inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                 \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
SHIM_VECTORS(signed char, char, 2)
SHIM_VECTORS(unsigned char, uchar, 2)
SHIM_VECTORS(short, short, 4)
SHIM_VECTORS(unsigned short, ushort, 4)
SHIM_VECTORS(int, int, 8)
SHIM_VECTORS(unsigned, uint, 8)
SHIM_VECTORS(float, float, 8)
SHIM_VECTORS(long long, longlong, 16)
SHIM_VECTORS(unsigned long long, ulonglong, 16)
SHIM_VECTORS(double, double, 16)
#undef SHIM_VECTORS

// ---- TensorView ----

template <class To, class From>
To shim_bits(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To result;
    __builtin_memcpy(&result, &value, sizeof result);
    return result;
}
inline unsigned __float_as_uint(float value) { return shim_bits<unsigned>(value); }
inline int __float_as_int(float value) { return shim_bits<int>(value); }
inline float __uint_as_float(unsigned value) { return shim_bits<float>(value); }
inline float __int_as_float(int value) { return shim_bits<float>(value); }
inline long long __double_as_longlong(double value) { return shim_bits<long long>(value); }
inline double __longlong_as_double(long long value) { return shim_bits<double>(value); }

inline int __float2int_rn(float value) { return (int)nearbyintf(value); }
inline int __float2int_rz(float value) { return (int)value; }
inline int __float2int_rd(float value) { return (int)floorf(value); }
inline unsigned __float2uint_rn(float value) { return (unsigned)nearbyintf(value); }
inline unsigned __float2uint_rz(float value) { return (unsigned)value; }
inline float __int2float_rn(int value) { return (float)value; }
inline float __uint2float_rn(unsigned value) { return (float)value; }
inline float __double2float_rn(double value) { return (float)value; }

inline float rsqrtf(float value) { return 1.0f / sqrtf(value); }
inline double rsqrt(double value) { return 1.0 / sqrt(value); }
inline float __frsqrt_rn(float value) { return (float)(1.0 / sqrt((double)value)); }
inline float __fsqrt_rn(float value) { return sqrtf(value); }
inline float __frcp_rn(float value) { return 1.0f / value; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline float __expf(float value) { return expf(value); }
inline float __exp10f(float value) { return powf(10.0f, value); }
inline float __logf(float value) { return logf(value); }
inline float __log2f(float value) { return log2f(value); }
inline float __powf(float a, float b) { return powf(a, b); }
inline float __sinf(float value) { return sinf(value); }
inline float __cosf(float value) { return cosf(value); }
inline float __tanf(float value) { return tanf(value); }
inline float __saturatef(float value) { return value > 0.0f ? (value < 1.0f ? value : 1.0f) : 0.0f; }

inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __popcll(unsigned long long value) { return __builtin_popcountll(value); }
inline int __clz(int value) { return value == 0 ? 32 : __builtin_clz((unsigned)value); }
inline int __clzll(long long value) { return value == 0 ? 64 : __builtin_clzll((unsigned long long)value); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __ffsll(long long value) { return __builtin_ffsll(value); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((unsigned long long)a * b) >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)(((unsigned __int128)a * b) >> 64);
}

#define SHIM_MIN_MAX(A, B, T)                                              \
    inline T min(A a, B b) { return (T)b < (T)a ? (T)b : (T)a; }           \
    inline T max(A a, B b) { return (T)a < (T)b ? (T)b : (T)a; }
SHIM_MIN_MAX(int, int, int)
SHIM_MIN_MAX(unsigned, unsigned, unsigned)
SHIM_MIN_MAX(int, unsigned, unsigned)
SHIM_MIN_MAX(unsigned, int, unsigned)
SHIM_MIN_MAX(long long, long long, long long)
SHIM_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
#undef SHIM_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

// ---- Kernels by name ----

namespace shim {

// A kernel as a driver knows it: called with pointers to its arguments, with known sizes.
struct Kernel {
    const char* name;
    void (*call)(void** arguments);
    const unsigned* sizes;
    unsigned arguments;
    unsigned bounds;    // maximum threads of a block
    Kernel* next;
};

void add(Kernel* kernel);
const Kernel* find(const char* name);

// Runs a whole grid in the calling thread and returns when it is done.
void launch(const Kernel& kernel, dim3 blocks, dim3 threads, unsigned shared, void** arguments);

template <auto function>
struct Entry;

template <class... Arguments, void (*function)(Arguments...)>
struct Entry<function> {
    static constexpr unsigned count = sizeof...(Arguments);
    static constexpr unsigned sizes[count + 1] = {sizeof(Arguments)..., 0};

    static void call(void** arguments) { spread(arguments, std::make_index_sequence<count>()); }

  private:
    template <size_t... index>
    static void spread([[maybe_unused]] void** arguments, std::index_sequence<index...>) {
        function(*(Arguments*)arguments[index]...);
    }
};

template <auto function>
struct Registered {
    Kernel kernel;
    Registered(const char* name, unsigned bounds)
        : kernel{name, Entry<function>::call, Entry<function>::sizes, Entry<function>::count, bounds, nullptr} {
        add(&kernel);
    }
};

}   // namespace shim

// The build adds one of these for each entry point, after the source itself.
#define SHIM_REGISTER(name, bounds) static shim::Registered<&name> shim_registered_##name{#name, (unsigned)(bounds)}
