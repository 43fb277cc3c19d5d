// Gathers batches from a data set in device memory (gather.cuh).

#ifdef MGPU_SHIM
#include "gather.cuh"
#endif

template <class T, u32 N>
__device__ void gather_packs(const GatheredBatch& batch, T* x, u8* labels) {
    const u32 row_packs = batch.sample_len / N, packs = batch.size * row_packs;
    const u64 begin = batch.begin();
    for (u32 i = grid_thread(); i < packs; i += grid_threads()) {
        const u32 row = i / row_packs, column = i % row_packs * N;
        const u64 sample = batch.sample(begin + row);
        Pack<T, N> pack;
        if (batch.is_known(sample)) {
            const Pack<u8, N> pixels = load_pack<N>(batch.pixels(sample) + column);
            for (u32 j = 0; j < N; j++) pack.at[j] = from_f32<T>(pixel_value(pixels.at[j]));
        } else {
            for (u32 j = 0; j < N; j++) pack.at[j] = from_f32<T>(unknown_pixel());
        }
        store_pack<N>(x + i * N, pack);
        if (column == 0) labels[row] = batch.label(sample);
    }
}

template <class T>
__device__ void gather(const GatheredBatch& batch, T* x, u8* labels, u32 wide) {
    if (wide) {
        gather_packs<T, PACK<T>>(batch, x, labels);
    } else {
        gather_packs<T, 1>(batch, x, labels);
    }
}

KERNEL(gather_f32)(const __grid_constant__ GatheredBatch batch, f32* x, u8* labels, u32 wide) {
    gather(batch, x, labels, wide);
}
KERNEL(gather_bf16)(const __grid_constant__ GatheredBatch batch, bf16* x, u8* labels, u32 wide) {
    gather(batch, x, labels, wide);
}
KERNEL(gather_f16)(const __grid_constant__ GatheredBatch batch, f16* x, u8* labels, u32 wide) {
    gather(batch, x, labels, wide);
}
