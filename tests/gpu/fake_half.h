// IEEE 754's binary16, by its bits. Shared by the fake libraries and the shim.
#pragma once

#include <cstdint>
#include <cstring>

namespace fake {

struct F16 {
    uint16_t bits;

    static float float_of(uint32_t bits) {
        float value;
        std::memcpy(&value, &bits, 4);
        return value;
    }

    static uint32_t bits_of(float value) {
        uint32_t bits;
        std::memcpy(&bits, &value, 4);
        return bits;
    }

    float wide() const {
        const uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = bits & 0x7fff;
        if (rest >= 0x7c00) return float_of(sign | 0x7f800000 | (rest & 0x3ff) << 13);
        if (rest < 0x400) return float_of(sign | bits_of((float)rest * 0x1p-24f));
        return float_of(sign | ((rest << 13) + (112u << 23)));
    }

    static F16 from(float value) {
        const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffff;
        const auto sign = (uint16_t)(bits >> 16 & 0x8000);
        if (magnitude > 0x7f800000) return {(uint16_t)(sign | 0x7e00)};
        if (magnitude >= 0x477ff000) return {(uint16_t)(sign | 0x7c00)};
        // Below the normal numbers, an addition rounds to their spacing, 2^-24.
        if (magnitude < 0x38800000) return {(uint16_t)(sign | (bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f)))};
        return {(uint16_t)(sign | ((magnitude + 0xfff + (magnitude >> 13 & 1) - (112u << 23)) >> 13))};
    }
};

}   // namespace fake
