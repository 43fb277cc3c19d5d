// Softmax cross-entropy: a warp for each row of logits, in f64 as on the CPU. See mod.rs for the contract.
//
// Each block writes the sums of its rows to a scratch area. The last block to finish adds them up in the order of
// blocks, and to the score: one kernel, and the same result whichever block is last.

#define LOSS_THREADS 256
#define LOSS_WARPS (LOSS_THREADS / WARP)
#define LOSS_BLOCKS 128
// NEGLIGIBLE of mod.rs: 2^-53.
#define LOSS_NEGLIGIBLE 1.1102230246251565e-16

struct Score {
    f64 loss_sum;
    u64 correct;
    u64 samples;
};

struct LossScratch {
    u32 arrived;  // number of blocks so far; zero between kernels
    u32 unused;
    f64 loss_sums[LOSS_BLOCKS];
    u32 corrects[LOSS_BLOCKS];
};

// The first of the largest logits of a row, the same in all lanes.
struct LossBest {
    f32 value;
    u32 index;
};

template <class T>
__device__ LossBest loss_best(const T* row, u32 classes) {
    const u32 lane = threadIdx.x % WARP;
    LossBest best = {-float_of(0x7f800000u), 0xffffffffu};
    for (u32 k = lane; k < classes; k += WARP) {
        const f32 value = to_f32(row[k]);
        if (value > best.value || best.index == 0xffffffffu) best = LossBest{value, k};
    }
    for (u32 step = WARP / 2; step > 0; step /= 2) {
        const f32 value = __shfl_xor_sync(EVERY_LANE, best.value, step);
        const u32 index = __shfl_xor_sync(EVERY_LANE, best.index, step);
        if (value > best.value || (value == best.value && index < best.index)) best = LossBest{value, index};
    }
    // With a NaN, which is neither larger nor smaller, lanes may disagree.
    best.value = __shfl_sync(EVERY_LANE, best.value, 0);
    best.index = __shfl_sync(EVERY_LANE, best.index, 0);
    return best;
}

template <class T, bool GRADIENT>
__device__ void loss_rows(
    const T* logits, const u8* labels, u32 samples, u32 classes, f64 share, T* gradient, LossScratch* scratch,
    Score* score, const StepState* state) {
    const u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    f64 loss_sum = 0.0;
    u32 correct = 0;
    if (GRADIENT && state) share *= (f64)state->loss_scale;
    for (u32 n = blockIdx.x * LOSS_WARPS + warp; n < samples; n += gridDim.x * LOSS_WARPS) {
        const T* row = logits + n * classes;
        const u32 label = labels[n];
        const LossBest best = loss_best(row, classes);
        f64 total = 0.0;
        for (u32 k = lane; k < classes; k += WARP) total += exp((f64)to_f32(row[k]) - (f64)best.value);
        total = warp_sum(total);
        if (GRADIENT) {
            for (u32 k = lane; k < classes; k += WARP) {
                const f64 softmax = exp((f64)to_f32(row[k]) - (f64)best.value) / total;
                const f64 kept = softmax < LOSS_NEGLIGIBLE ? 0.0 : softmax;
                gradient[n * classes + k] = from_f32<T>((f32)((kept - (k == label ? 1.0 : 0.0)) * share));
            }
        }
        // A label that is not a class makes the loss NaN, so that it is noticed.
        const f32 target = label < classes ? to_f32(row[label]) : float_of(0x7fc00000u);
        if (lane == 0) {
            loss_sum += log(total) + (f64)best.value - (f64)target;
            correct += best.index == label;
        }
    }

    __shared__ f64 of_warps[LOSS_WARPS];
    __shared__ u32 counts[LOSS_WARPS];
    __shared__ bool last;
    loss_sum = block_sum(loss_sum, of_warps);
    correct = block_sum(correct, counts);
    if (threadIdx.x == 0) {
        scratch->loss_sums[blockIdx.x] = loss_sum;
        scratch->corrects[blockIdx.x] = correct;
        __threadfence();
        last = atomicAdd(&scratch->arrived, 1u) + 1 == gridDim.x;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    // Values that other blocks wrote are in memory, not in this block's cache: hence volatile.
    const volatile LossScratch* written = scratch;
    const bool mine = threadIdx.x < gridDim.x;
    loss_sum = block_sum(mine ? (f64)written->loss_sums[threadIdx.x] : 0.0, of_warps);
    correct = block_sum(mine ? (u32)written->corrects[threadIdx.x] : 0u, counts);
    if (threadIdx.x == 0) {
        score->loss_sum += loss_sum;
        score->correct += correct;
        score->samples += samples;
        scratch->arrived = 0;
    }
}

KERNEL_BOUNDS(loss_gradient_f32, LOSS_THREADS)(
    const f32* logits, const u8* labels, u32 samples, u32 classes, f64 share, f32* gradient, LossScratch* scratch,
    Score* score, const StepState* state) {
    loss_rows<f32, true>(logits, labels, samples, classes, share, gradient, scratch, score, state);
}
KERNEL_BOUNDS(loss_gradient_bf16, LOSS_THREADS)(
    const bf16* logits, const u8* labels, u32 samples, u32 classes, f64 share, bf16* gradient, LossScratch* scratch,
    Score* score, const StepState* state) {
    loss_rows<bf16, true>(logits, labels, samples, classes, share, gradient, scratch, score, state);
}
KERNEL_BOUNDS(loss_gradient_f16, LOSS_THREADS)(
    const f16* logits, const u8* labels, u32 samples, u32 classes, f64 share, f16* gradient, LossScratch* scratch,
    Score* score, const StepState* state) {
    loss_rows<f16, true>(logits, labels, samples, classes, share, gradient, scratch, score, state);
}

KERNEL_BOUNDS(loss_score_f32, LOSS_THREADS)(
    const f32* logits, const u8* labels, u32 samples, u32 classes, LossScratch* scratch, Score* score) {
    loss_rows<f32, false>(logits, labels, samples, classes, 0.0, nullptr, scratch, score, nullptr);
}
KERNEL_BOUNDS(loss_score_bf16, LOSS_THREADS)(
    const bf16* logits, const u8* labels, u32 samples, u32 classes, LossScratch* scratch, Score* score) {
    loss_rows<bf16, false>(logits, labels, samples, classes, 0.0, nullptr, scratch, score, nullptr);
}
KERNEL_BOUNDS(loss_score_f16, LOSS_THREADS)(
    const f16* logits, const u8* labels, u32 samples, u32 classes, LossScratch* scratch, Score* score) {
    loss_rows<f16, false>(logits, labels, samples, classes, 0.0, nullptr, scratch, score, nullptr);
}
