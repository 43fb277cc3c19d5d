// Dropout in place, of values and gradients alike. See mod.rs for the contract.
//
// Masks are indexed by the elements of [N, C, P]; in memory the same element is at [N, P, C]. So the index grows by P
// for each further channel of a thread's pack.

struct DropoutMask {
    u64 seed;
    u64 stream;        // without the step, which is read from the device's memory
    u64 first_sample;  // index of this rank's first sample in the batch of all ranks
    u32 channels;
    u32 plane;
    u32 threshold;  // of 2^24: below it, an element is dropped
    f32 scale;
};

template <class T, u32 N>
__device__ void dropout_packs(T* values, u32 packs, const DropoutMask& mask, u64 base) {
    const u32 row_packs = mask.channels / N;
    const u64 image = (u64)mask.plane * mask.channels;
    for (u32 i = grid_thread(); i < packs; i += grid_threads()) {
        const u32 channel = i % row_packs * N, place = i / row_packs;
        const u32 position = place % mask.plane, sample = place / mask.plane;
        u64 element = (mask.first_sample + sample) * image + (u64)channel * mask.plane + position;
        Pack<T, N> pack = load_pack<N>(values + i * N);
        for (u32 j = 0; j < N; j++, element += mask.plane) {
            const bool kept = random_bits24(base, element) >= mask.threshold;
            pack.at[j] = from_f32<T>(kept ? to_f32(pack.at[j]) * mask.scale : 0.0f);
        }
        store_pack<N>(values + i * N, pack);
    }
}

template <class T>
__device__ void dropout_apply(T* values, u32 len, const DropoutMask& mask, const StepState* state, u32 wide) {
    const u64 base = random_base(mask.seed, mask.stream | state->step << 16);
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
