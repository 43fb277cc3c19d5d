// Two looks at a whole arena: how many elements are not finite, and a hash of all. See mod.rs for the contract.
//
// Both are sums of integers, which any order of threads and blocks adds up to the same number.

#define DIGEST_THREADS 256

__device__ inline void digest_add(u64 mine, u64* total) {
    __shared__ u64 scratch[DIGEST_THREADS / WARP];
    const u64 of_block = block_sum(mine, scratch);
    if (threadIdx.x == 0) atomicAdd(total, of_block);
}

__device__ inline bool not_finite(f32 value) { return (bits_of(value) & 0x7f800000u) == 0x7f800000u; }

template <class T>
__device__ void digest_not_finite(const T* values, u32 len, u32 packs, u64* count) {
    constexpr u32 N = PACK<T>;
    u64 mine = 0;
    for (u32 i = grid_thread(); i < packs; i += grid_threads()) {
        const Pack<T, N> pack = load_pack<N>(values + i * N);
        for (u32 j = 0; j < N; j++) mine += not_finite(to_f32(pack.at[j]));
    }
    for (u32 i = packs * N + grid_thread(); i < len; i += grid_threads()) mine += not_finite(to_f32(values[i]));
    digest_add(mine, count);
}

KERNEL_BOUNDS(digest_not_finite_f32, DIGEST_THREADS)(const f32* values, u32 len, u32 packs, u64* count) {
    digest_not_finite(values, len, packs, count);
}
KERNEL_BOUNDS(digest_not_finite_bf16, DIGEST_THREADS)(const bf16* values, u32 len, u32 packs, u64* count) {
    digest_not_finite(values, len, packs, count);
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
