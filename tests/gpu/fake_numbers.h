// Shared by the fakes of cuDNN and cuBLASLt: tensors in memory, and operands as tensor cores see them.
#pragma once

#include "fake_cuda.h"
#include "fake_half.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace fake {

inline float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// Rounds to nearest, ties to even, keeping the upper 32 - `cut` bits.
inline float rounded(float value, unsigned cut) {
    if (std::isnan(value) || std::isinf(value)) return value;
    const uint32_t bits = to_bits(value), last = (bits >> cut) & 1;
    return from_bits((bits + (1u << (cut - 1)) - 1 + last) & ~((1u << cut) - 1));
}

// A matrix or tensor in f32 or bfloat16.
enum class Stored { F32, Bf16, F16 };

struct TensorView {
    void* address;
    Stored stored;

    // The view of a tensor in device memory through which `user` can access its `len` elements.
    TensorView on_host(size_t len, const char* user) const {
        return {device_bytes((CUdeviceptr)address, len * (stored == Stored::F32 ? 4 : 2), user), stored};
    }

    float read(size_t at) const {
        if (stored == Stored::F32) return static_cast<const float*>(address)[at];
        const uint16_t bits = static_cast<const uint16_t*>(address)[at];
        return stored == Stored::F16 ? F16{bits}.wide() : from_bits(uint32_t(bits) << 16);
    }

    void write(size_t at, float value) const {
        if (stored == Stored::F16) {
            static_cast<uint16_t*>(address)[at] = F16::from(value).bits;
        } else if (stored == Stored::Bf16) {
            static_cast<uint16_t*>(address)[at] = uint16_t(to_bits(rounded(value, 16)) >> 16);
        } else {
            static_cast<float*>(address)[at] = value;
        }
    }
};

// The operands of a product: TF32 has 10 bits of mantissa. As plain f32, so that the loops are fast: when benchmarked
// against the project's kernels, which also run as C++ here, a library needs a chance.
inline std::vector<float> operands(const TensorView& numbers, size_t len, bool tf32) {
    std::vector<float> values(len);
    for (size_t at = 0; at < len; ++at) {
        const float value = numbers.read(at);
        values[at] = tf32 ? rounded(value, 13) : value;
    }
    return values;
}

// sums += factor * values
inline void add(float* __restrict sums, const float* __restrict values, float factor, size_t len) {
    for (size_t at = 0; at < len; ++at) sums[at] += factor * values[at];
}

}   // namespace fake
