// The Gaussian error linear unit and its gradient. See mod.rs for the contract.

// The probability that a standard normal number is below x. `erfc` keeps the precision of small ones.
__device__ inline f32 normal_below(f32 x) { return 0.5f * erfcf(-0.70710678f * x); }

__device__ inline f32 gelu(f32 x) { return x * normal_below(x); }

// The derivative, with the density of the standard normal distribution.
__device__ inline f32 gelu_slope(f32 x) {
    const f32 density = 0.39894228f * expf(-0.5f * x * x);
    return normal_below(x) + x * density;
}

template <class T>
__device__ void gelu_forward(const T* x, T* y, u32 len, u32 packs) {
    constexpr u32 N = PACK<T>;
    for (u32 i = grid_thread(); i < packs; i += grid_threads()) {
        Pack<T, N> pack = load_pack<N>(x + i * N);
        for (u32 j = 0; j < N; j++) pack.at[j] = from_f32<T>(gelu(to_f32(pack.at[j])));
        store_pack<N>(y + i * N, pack);
    }
    for (u32 i = packs * N + grid_thread(); i < len; i += grid_threads()) y[i] = from_f32<T>(gelu(to_f32(x[i])));
}

KERNEL(gelu_forward_f32)(const f32* x, f32* y, u32 len, u32 packs) { gelu_forward(x, y, len, packs); }
KERNEL(gelu_forward_bf16)(const bf16* x, bf16* y, u32 len, u32 packs) { gelu_forward(x, y, len, packs); }
KERNEL(gelu_forward_f16)(const f16* x, f16* y, u32 len, u32 packs) { gelu_forward(x, y, len, packs); }

template <class T>
__device__ void gelu_backward(const T* x, T* gradient, u32 len, u32 packs) {
    constexpr u32 N = PACK<T>;
    for (u32 i = grid_thread(); i < packs; i += grid_threads()) {
        const Pack<T, N> inputs = load_pack<N>(x + i * N);
        Pack<T, N> pack = load_pack<N>(gradient + i * N);
        for (u32 j = 0; j < N; j++) {
            pack.at[j] = from_f32<T>(to_f32(pack.at[j]) * gelu_slope(to_f32(inputs.at[j])));
        }
        store_pack<N>(gradient + i * N, pack);
    }
    for (u32 i = packs * N + grid_thread(); i < len; i += grid_threads()) {
        gradient[i] = from_f32<T>(to_f32(gradient[i]) * gelu_slope(to_f32(x[i])));
    }
}

KERNEL(gelu_backward_f32)(const f32* x, f32* gradient, u32 len, u32 packs) { gelu_backward(x, gradient, len, packs); }
KERNEL(gelu_backward_bf16)(const bf16* x, bf16* gradient, u32 len, u32 packs) {
    gelu_backward(x, gradient, len, packs);
}
KERNEL(gelu_backward_f16)(const f16* x, f16* gradient, u32 len, u32 packs) {
    gelu_backward(x, gradient, len, packs);
}
