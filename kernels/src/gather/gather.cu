// Gathers batches from a data set in device memory. See mod.rs for the contract.
//
// An invalid index, in the order or beyond its end, gives a row of NaN and a label that is not a class: the loss
// becomes NaN, and nothing outside the data set is read.

#define GATHER_NO_LABEL 255

struct GatherSource {
    const u8* images;
    const u8* labels;
    const u32* order;  // null: the samples in the order of the data set
    u64 order_len;
    u32 samples;
    u32 sample_len;
};

template <class T, u32 N>
__device__ void gather_packs(const GatherSource& source, u64 first, T* x, u8* labels, u32 batch) {
    const u32 row_packs = source.sample_len / N;
    const u32 packs = batch * row_packs;
    for (u32 i = grid_thread(); i < packs; i += grid_threads()) {
        const u32 row = i / row_packs, column = i % row_packs * N;
        const u64 place = first + row;
        u64 sample = source.samples;
        if (place < source.order_len) sample = source.order ? source.order[place] : place;
        const bool known = sample < source.samples;
        Pack<T, N> pack;
        if (known) {
            const Pack<u8, N> pixels = load_pack<N>(source.images + sample * source.sample_len + column);
            for (u32 j = 0; j < N; j++) pack.at[j] = from_f32<T>((f32)pixels.at[j] / 255.0f);
        } else {
            for (u32 j = 0; j < N; j++) pack.at[j] = from_f32<T>(float_of(0x7fc00000u));
        }
        store_pack<N>(x + i * N, pack);
        if (column == 0) labels[row] = known ? source.labels[sample] : GATHER_NO_LABEL;
    }
}

template <class T>
__device__ void gather(const GatherSource& source, u64 first, T* x, u8* labels, u32 batch, u32 wide) {
    if (wide) {
        gather_packs<T, PACK<T>>(source, first, x, labels, batch);
    } else {
        gather_packs<T, 1>(source, first, x, labels, batch);
    }
}

KERNEL(gather_batch_f32)(
    GatherSource source, const StepState* state, f32* x, u8* labels, u32 batch, u32 wide, u32 part, u32 parts) {
    gather(source, (state->position * parts + part) * batch, x, labels, batch, wide);
}
KERNEL(gather_batch_bf16)(
    GatherSource source, const StepState* state, bf16* x, u8* labels, u32 batch, u32 wide, u32 part, u32 parts) {
    gather(source, (state->position * parts + part) * batch, x, labels, batch, wide);
}
KERNEL(gather_batch_f16)(
    GatherSource source, const StepState* state, f16* x, u8* labels, u32 batch, u32 wide, u32 part, u32 parts) {
    gather(source, (state->position * parts + part) * batch, x, labels, batch, wide);
}

KERNEL(gather_range_f32)(GatherSource source, u64 first, f32* x, u8* labels, u32 count, u32 wide) {
    gather(source, first, x, labels, count, wide);
}
KERNEL(gather_range_bf16)(GatherSource source, u64 first, bf16* x, u8* labels, u32 count, u32 wide) {
    gather(source, first, x, labels, count, wide);
}
KERNEL(gather_range_f16)(GatherSource source, u64 first, f16* x, u8* labels, u32 count, u32 wide) {
    gather(source, first, x, labels, count, wide);
}
