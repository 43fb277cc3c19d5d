// Dropout in place, of values and gradients alike. See mod.rs for the contract.
//
// Whole packs are of one position, because channels are then a multiple of a pack.

template <class T, u32 N>
__device__ void dropout_packs(T* values, u32 packs, const DropoutMask& mask, u64 base) {
    for (u32 i = grid_thread(); i < packs; i += grid_threads()) {
        u64 element = mask.element(i * N);
        Pack<T, N> pack = load_pack<N>(values + i * N);
        for (u32 j = 0; j < N; j++, element += mask.plane) pack.at[j] = mask.apply(base, element, pack.at[j]);
        store_pack<N>(values + i * N, pack);
    }
}

template <class T>
__device__ void dropout_apply(T* values, u32 len, const DropoutMask& mask, const StepState* state, u32 wide) {
    const u64 base = mask.base(state);
    if (wide) {
        dropout_packs<T, PACK<T>>(values, len / PACK<T>, mask, base);
    } else {
        dropout_packs<T, 1>(values, len, mask, base);
    }
}

KERNEL(dropout_apply_f32)(f32* values, u32 len, DropoutMask mask, const StepState* state, u32 wide) {
    dropout_apply(values, len, mask, state, wide);
}
KERNEL(dropout_apply_bf16)(bf16* values, u32 len, DropoutMask mask, const StepState* state, u32 wide) {
    dropout_apply(values, len, mask, state, wide);
}
KERNEL(dropout_apply_f16)(f16* values, u32 len, DropoutMask mask, const StepState* state, u32 wide) {
    dropout_apply(values, len, mask, state, wide);
}
