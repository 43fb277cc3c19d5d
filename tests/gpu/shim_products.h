// The numbers of tensor cores, and how they add products.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "fake_half.h"

namespace shim {

inline float from_bits(unsigned bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

inline float bf16_half(unsigned pair, unsigned half) { return from_bits(half == 0 ? pair << 16 : pair & 0xffff0000u); }

inline float f16_half(unsigned pair, unsigned half) {
    return fake::F16{(uint16_t)(half == 0 ? pair : pair >> 16)}.wide();
}

// With FAKE_GPU_TRUNCATE=1 products are added as tensor cores do: some at a time to the sum so far, exactly, and the result
// loses all bits beyond those of an f32. So each step's error is towards zero, up to 2^-23 of the sum. Those of a warp add eight
// at a time, those of a warpgroup sixteen.
inline bool truncates() {
    static const char* text = getenv("FAKE_GPU_TRUNCATE");
    return text != nullptr && *text == '1';
}

inline float towards_zero(double value) {
    const float nearest = (float)value;
    return std::fabs((double)nearest) > std::fabs(value) ? std::nextafterf(nearest, 0.0f) : nearest;
}

}   // namespace shim
