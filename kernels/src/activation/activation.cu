// Activation functions in place, with or without a preceding bias. See mod.rs for the contract.

template <class T>
__device__ void activation_forward(T* values, u32 len, u32 packs, f32 slope) {
    constexpr u32 N = PACK<T>;
    for (u32 i = grid_thread(); i < packs; i += grid_threads()) {
        Pack<T, N> pack = load_pack<N>(values + i * N);
        for (u32 j = 0; j < N; j++) pack.at[j] = from_f32<T>(rectify(to_f32(pack.at[j]), slope));
        store_pack<N>(values + i * N, pack);
    }
    for (u32 i = packs * N + grid_thread(); i < len; i += grid_threads()) {
        values[i] = from_f32<T>(rectify(to_f32(values[i]), slope));
    }
}

KERNEL(activation_forward_f32)(f32* values, u32 len, u32 packs, f32 slope) {
    activation_forward(values, len, packs, slope);
}
KERNEL(activation_forward_bf16)(bf16* values, u32 len, u32 packs, f32 slope) {
    activation_forward(values, len, packs, slope);
}
KERNEL(activation_forward_f16)(f16* values, u32 len, u32 packs, f32 slope) {
    activation_forward(values, len, packs, slope);
}

template <class T>
__device__ void activation_backward(const T* y, T* gradient, u32 len, u32 packs, f32 slope) {
    constexpr u32 N = PACK<T>;
    for (u32 i = grid_thread(); i < packs; i += grid_threads()) {
        const Pack<T, N> outputs = load_pack<N>(y + i * N);
        Pack<T, N> pack = load_pack<N>(gradient + i * N);
        for (u32 j = 0; j < N; j++) pack.at[j] = rectify_gradient(outputs.at[j], pack.at[j], slope);
        store_pack<N>(gradient + i * N, pack);
    }
    for (u32 i = packs * N + grid_thread(); i < len; i += grid_threads()) {
        gradient[i] = rectify_gradient(y[i], gradient[i], slope);
    }
}

KERNEL(activation_backward_f32)(const f32* y, f32* gradient, u32 len, u32 packs, f32 slope) {
    activation_backward(y, gradient, len, packs, slope);
}
KERNEL(activation_backward_bf16)(const bf16* y, bf16* gradient, u32 len, u32 packs, f32 slope) {
    activation_backward(y, gradient, len, packs, slope);
}
KERNEL(activation_backward_f16)(const f16* y, f16* gradient, u32 len, u32 packs, f32 slope) {
    activation_backward(y, gradient, len, packs, slope);
}

// `packs` packs of N channels, `row_packs` of them to a row of channels.
template <class T, u32 N>
__device__ void activation_bias(T* values, const f32* bias, u32 packs, u32 row_packs, f32 slope) {
    for (u32 i = grid_thread(); i < packs; i += grid_threads()) {
        const Pack<f32, N> shift = load_channels<N>(bias + i % row_packs * N);
        Pack<T, N> pack = load_pack<N>(values + i * N);
        for (u32 j = 0; j < N; j++) pack.at[j] = from_f32<T>(rectify(to_f32(pack.at[j]) + shift.at[j], slope));
        store_pack<N>(values + i * N, pack);
    }
}

template <class T>
__device__ void activation_bias(T* values, const f32* bias, u32 len, u32 channels, f32 slope, u32 wide) {
    constexpr u32 N = PACK<T>;
    if (wide) {
        activation_bias<T, N>(values, bias, len / N, channels / N, slope);
    } else {
        activation_bias<T, 1>(values, bias, len, channels, slope);
    }
}

KERNEL(activation_bias_f32)(f32* values, const f32* bias, u32 len, u32 channels, f32 slope, u32 wide) {
    activation_bias(values, bias, len, channels, slope, wide);
}
KERNEL(activation_bias_bf16)(bf16* values, const f32* bias, u32 len, u32 channels, f32 slope, u32 wide) {
    activation_bias(values, bias, len, channels, slope, wide);
}
KERNEL(activation_bias_f16)(f16* values, const f32* bias, u32 len, u32 channels, f32 slope, u32 wide) {
    activation_bias(values, bias, len, channels, slope, wide);
}
