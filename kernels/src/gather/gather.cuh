// A batch of a data set in device memory: for the kernels that gather it, and for those of a first layer, which read its
// images where they are. See mod.rs for the contract.
//
// An invalid index, in the order or beyond its end, gives an image of NaN and a label that is not a class: the loss
// becomes NaN, and nothing outside the data set is read.

#define GATHER_NO_LABEL 255

struct GatheredBatch {
    const u8* images;
    const u8* labels;
    const u32* order;   // null: the samples in the order of the data set
    u64 order_len;
    const StepState* state;   // null: the batch begins at index `first` of the order
    u64 first;
    u32 samples, sample_len;
    u32 size;          // images in the batch
    u32 part, parts;   // which one it is of equal parts of the batch at the position in the state, and of how many

    // The index of its first image in the order.
    __device__ u64 begin() const { return state ? (state->position * parts + part) * size : first; }

    // The sample at an index of the order; `samples` if there is none.
    __device__ u64 sample(u64 place) const {
        if (place >= order_len) return samples;
        return least<u64>(order ? order[place] : place, samples);
    }

    __device__ bool is_known(u64 sample) const { return sample < samples; }
    __device__ const u8* pixels(u64 sample) const { return images + sample * sample_len; }
    __device__ u8 label(u64 sample) const { return is_known(sample) ? labels[sample] : GATHER_NO_LABEL; }
};

__device__ inline f32 unknown_pixel() { return float_of(0x7fc00000u); }

// pixel / 255, rounded once as by a division, with fewer instructions: the quotient and its remainder.
__device__ inline f32 pixel_value(u8 pixel) {
    const f32 reciprocal = 1.0f / 255.0f, quotient = (f32)pixel * reciprocal;
    return __fmaf_rn(__fmaf_rn(-quotient, 255.0f, (f32)pixel), reciprocal, quotient);
}
