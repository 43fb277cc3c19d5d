// Digests of a whole arena: the number of non-finite elements, where one is, and a hash. See mod.rs for the contract.
//
// Counts and hashes are sums of integers, so the order of threads and blocks does not change them.

#define DIGEST_THREADS 256

__device__ inline void digest_add(u64 mine, u64* total) {
    __shared__ u64 scratch[DIGEST_THREADS / WARP];
    const u64 of_block = block_sum(mine, scratch);
    if (threadIdx.x == 0) atomicAdd(total, of_block);
}

__device__ inline bool non_finite(f32 value) { return (bits_of(value) & 0x7f800000u) == 0x7f800000u; }

template <class T>
__device__ void digest_non_finite(const T* values, u32 len, u32 packs, u64* count) {
    constexpr u32 N = PACK<T>;
    u64 mine = 0;
    for (u32 i = grid_thread(); i < packs; i += grid_threads()) {
        const Pack<T, N> pack = load_pack<N>(values + i * N);
        for (u32 j = 0; j < N; j++) mine += non_finite(to_f32(pack.at[j]));
    }
    for (u32 i = packs * N + grid_thread(); i < len; i += grid_threads()) mine += non_finite(to_f32(values[i]));
    digest_add(mine, count);
}

KERNEL_BOUNDS(digest_non_finite_f32, DIGEST_THREADS)(const f32* values, u32 len, u32 packs, u64* count) {
    digest_non_finite(values, len, packs, count);
}
KERNEL_BOUNDS(digest_non_finite_bf16, DIGEST_THREADS)(const bf16* values, u32 len, u32 packs, u64* count) {
    digest_non_finite(values, len, packs, count);
}
KERNEL_BOUNDS(digest_non_finite_f16, DIGEST_THREADS)(const f16* values, u32 len, u32 packs, u64* count) {
    digest_non_finite(values, len, packs, count);
}

// A range of a tensor to check.
struct DigestPart {
    u32 begin;   // in the arena
    u32 len;
    u32 tensor;
    u32 sparse;  // whether to check only one line in 32
};

// Elements of a line, and the number of lines of which one is checked.
#define DIGEST_LINE 16
#define DIGEST_LINES 32

// The index in the arena of the i-th element to check in this step.
__device__ inline u32 digest_sparse(u32 begin, u32 i, u64 step) {
    constexpr u32 GROUP = DIGEST_LINE * DIGEST_LINES;
    const u32 group = begin / GROUP + i / DIGEST_LINE;
    const u32 line = (u32)((group + group / DIGEST_LINES + step) % DIGEST_LINES);
    return begin + i / DIGEST_LINE * GROUP + line * DIGEST_LINE + i % DIGEST_LINE;
}

// Whether some of `len` elements are not finite, of those that this thread reads: 16 bytes at a time, and several times that
// at once.
__device__ inline bool digest_finds(const f32* values, u32 len) {
    constexpr u32 N = PACK<f32>, AT_ONCE = 4;
    const u32 head = least(len, (N - (u32)((u64)values / sizeof(f32) % N)) % N), packs = (len - head) / N;
    bool bad = false;
    for (u32 first = threadIdx.x; first < packs; first += AT_ONCE * DIGEST_THREADS) {
        Pack<f32, N> loaded[AT_ONCE];
#pragma unroll
        for (u32 n = 0; n < AT_ONCE; n++) {
            const u32 i = first + n * DIGEST_THREADS;
            loaded[n] = i < packs ? load_pack<N>(values + head + i * N) : Pack<f32, N>{};
        }
#pragma unroll
        for (u32 i = 0; i < AT_ONCE * N; i++) bad |= non_finite(loaded[i / N].at[i % N]);
    }
    // What is before and after the packs.
    const u32 i = threadIdx.x, tail = head + packs * N;
    if (i < head) bad |= non_finite(values[i]);
    if (tail + i < len) bad |= non_finite(values[tail + i]);
    return bad;
}

// Each block checks whole parts.
KERNEL_BOUNDS(digest_find_non_finite, DIGEST_THREADS)(
    const f32* values, u32 len, const DigestPart* parts, u32 count, const StepState* state, u64 mark, u64* found) {
    if (state->halted) return;
    for (u32 index = blockIdx.x; index < count; index += gridDim.x) {
        const DigestPart part = parts[index];
        // With a table made for another arena, nothing outside of this one is read.
        if (part.begin > len || part.len > len - part.begin) continue;
        bool bad = false;
        if (part.sparse) {
            for (u32 i = threadIdx.x; i < part.len / DIGEST_LINES; i += DIGEST_THREADS) {
                bad |= non_finite(values[digest_sparse(part.begin, i, state->step)]);
            }
        } else {
            bad = digest_finds(values + part.begin, part.len);
        }
        if (bad) atomicMax(found, mark + part.tensor);
    }
}

__device__ inline u64 digest_of(u32 index, f32 value) { return splitmix64((u64)index << 32 | bits_of(value)); }

KERNEL_BOUNDS(digest_hash_f32, DIGEST_THREADS)(const f32* values, u32 len, u32 packs, u64* hash) {
    constexpr u32 N = PACK<f32>;
    u64 mine = 0;
    for (u32 i = grid_thread(); i < packs; i += grid_threads()) {
        const Pack<f32, N> pack = load_pack<N>(values + i * N);
        for (u32 j = 0; j < N; j++) mine += digest_of(i * N + j, pack.at[j]);
    }
    for (u32 i = packs * N + grid_thread(); i < len; i += grid_threads()) mine += digest_of(i, values[i]);
    digest_add(mine, hash);
}
