// Compares results with a reference, element by element, and fills memory with random numbers. See compare.rs.

struct Comparison {
    u32 largest_difference;   // the bits of an f32, whose order is that of the numbers, since none is negative
    u32 largest_expected;
    u64 wrong;
};

// Threads whose number is not larger need no atomic operation, which is nearly all of them.
__device__ inline void raise(u32* largest, f32 value) {
    if (bits_of(value) > *(volatile u32*)largest) atomicMax(largest, bits_of(value));
}

template <class T>
__device__ inline void compare(
    const f32* expected, const T* found, u32 len, u32 nan_every, f32 scale, f32 tolerance, Comparison* to) {
    const f32 infinity = float_of(0x7f800000u);
    f32 largest_difference = 0.0f, largest_expected = 0.0f;
    u64 wrong = 0;
    for (u32 i = grid_thread(); i < len; i += grid_threads()) {
        const f32 value = to_f32(found[i]), magnitude = fabsf(expected[i]);
        if (nan_every > 0 && i % nan_every == 0) {
            wrong += value == value;
            continue;
        }
        const f32 difference = fabsf(value - expected[i]);
        // A NaN is not within the tolerance.
        wrong += !(difference <= tolerance * (scale + magnitude));
        largest_difference = most(largest_difference, difference == difference ? difference : infinity);
        largest_expected = most(largest_expected, magnitude);
    }
    raise(&to->largest_difference, largest_difference);
    raise(&to->largest_expected, largest_expected);
    if (wrong > 0) atomicAdd(&to->wrong, wrong);
}

KERNEL(compare_f32)(
    const f32* expected, const f32* found, u32 len, u32 nan_every, f32 scale, f32 tolerance, Comparison* to) {
    compare(expected, found, len, nan_every, scale, tolerance, to);
}
KERNEL(compare_bf16)(
    const f32* expected, const bf16* found, u32 len, u32 nan_every, f32 scale, f32 tolerance, Comparison* to) {
    compare(expected, found, len, nan_every, scale, tolerance, to);
}
KERNEL(compare_f16)(
    const f32* expected, const f16* found, u32 len, u32 nan_every, f32 scale, f32 tolerance, Comparison* to) {
    compare(expected, found, len, nan_every, scale, tolerance, to);
}

// Numbers from -1 to 1, each a function of its index and of the seed.
template <class T>
__device__ inline void compare_random(T* values, u32 len, u64 seed) {
    const u64 base = random_base(seed, 0);
    for (u32 i = grid_thread(); i < len; i += grid_threads()) {
        values[i] = from_f32<T>((f32)random_bits24(base, i) / 8388608.0f - 1.0f);
    }
}

KERNEL(compare_random_f32)(f32* values, u32 len, u64 seed) { compare_random(values, len, seed); }
KERNEL(compare_random_bf16)(bf16* values, u32 len, u64 seed) { compare_random(values, len, seed); }
KERNEL(compare_random_f16)(f16* values, u32 len, u64 seed) { compare_random(values, len, seed); }
