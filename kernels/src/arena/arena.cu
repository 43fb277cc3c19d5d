// Whole arenas: fill, scale, sum, conversion of the type. See mod.rs for the contract.

template <class T>
__device__ void arena_fill(T* values, u32 len, u32 packs, f32 value) {
    constexpr u32 N = PACK<T>;
    Pack<T, N> pack;
    for (u32 j = 0; j < N; j++) pack.at[j] = from_f32<T>(value);
    for (u32 i = grid_thread(); i < packs; i += grid_threads()) store_pack<N>(values + i * N, pack);
    for (u32 i = packs * N + grid_thread(); i < len; i += grid_threads()) values[i] = pack.at[0];
}

KERNEL(arena_fill_f32)(f32* values, u32 len, u32 packs, f32 value) { arena_fill(values, len, packs, value); }
KERNEL(arena_fill_bf16)(bf16* values, u32 len, u32 packs, f32 value) { arena_fill(values, len, packs, value); }
KERNEL(arena_fill_f16)(f16* values, u32 len, u32 packs, f32 value) { arena_fill(values, len, packs, value); }

template <class T>
__device__ void arena_scale(T* values, u32 len, u32 packs, f32 factor) {
    constexpr u32 N = PACK<T>;
    for (u32 i = grid_thread(); i < packs; i += grid_threads()) {
        Pack<T, N> pack = load_pack<N>(values + i * N);
        for (u32 j = 0; j < N; j++) pack.at[j] = from_f32<T>(to_f32(pack.at[j]) * factor);
        store_pack<N>(values + i * N, pack);
    }
    for (u32 i = packs * N + grid_thread(); i < len; i += grid_threads()) {
        values[i] = from_f32<T>(to_f32(values[i]) * factor);
    }
}

KERNEL(arena_scale_f32)(f32* values, u32 len, u32 packs, f32 factor) { arena_scale(values, len, packs, factor); }
KERNEL(arena_scale_bf16)(bf16* values, u32 len, u32 packs, f32 factor) { arena_scale(values, len, packs, factor); }
KERNEL(arena_scale_f16)(f16* values, u32 len, u32 packs, f32 factor) { arena_scale(values, len, packs, factor); }

KERNEL(arena_add_f32)(f32* to, const f32* from, u32 len, u32 packs, f32 divisor) {
    constexpr u32 N = PACK<f32>;
    for (u32 i = grid_thread(); i < packs; i += grid_threads()) {
        Pack<f32, N> sum = load_pack<N>(to + i * N);
        const Pack<f32, N> other = load_pack<N>(from + i * N);
        for (u32 j = 0; j < N; j++) sum.at[j] = (sum.at[j] + other.at[j]) / divisor;
        store_pack<N>(to + i * N, sum);
    }
    for (u32 i = packs * N + grid_thread(); i < len; i += grid_threads()) to[i] = (to[i] + from[i]) / divisor;
}

// A pack is one access of the narrower type, two of the wider one.
template <class From, class To>
__device__ void arena_cast(const From* from, To* to, u32 len, u32 packs) {
    constexpr u32 N = PACK<bf16>, IN = PACK<From>, OUT = PACK<To>;
    for (u32 i = grid_thread(); i < packs; i += grid_threads()) {
        f32 values[N];
        for (u32 j = 0; j < N; j += IN) {
            const Pack<From, IN> part = load_pack<IN>(from + i * N + j);
            for (u32 k = 0; k < IN; k++) values[j + k] = to_f32(part.at[k]);
        }
        for (u32 j = 0; j < N; j += OUT) {
            Pack<To, OUT> part;
            for (u32 k = 0; k < OUT; k++) part.at[k] = from_f32<To>(values[j + k]);
            store_pack<OUT>(to + i * N + j, part);
        }
    }
    for (u32 i = packs * N + grid_thread(); i < len; i += grid_threads()) to[i] = from_f32<To>(to_f32(from[i]));
}

KERNEL(arena_narrow_bf16)(const f32* from, bf16* to, u32 len, u32 packs) { arena_cast(from, to, len, packs); }
KERNEL(arena_narrow_f16)(const f32* from, f16* to, u32 len, u32 packs) { arena_cast(from, to, len, packs); }
KERNEL(arena_widen_bf16)(const bf16* from, f32* to, u32 len, u32 packs) { arena_cast(from, to, len, packs); }
KERNEL(arena_widen_f16)(const f16* from, f32* to, u32 len, u32 packs) { arena_cast(from, to, len, packs); }
