// Reductions over ranks, element by element in rank order, for every NCCL data type.
#include "fake_half.h"
#include "fake_nccl.h"

#include <cstring>
#include <type_traits>

namespace fake_nccl {
namespace {

float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

struct Bf16 {
    uint16_t bits;
    float wide() const { return float_of((uint32_t)bits << 16); }
    static Bf16 from(float value) {
        const uint32_t bits = bits_of(value);
        if (value != value) return {(uint16_t)(bits >> 16 | 0x40)};
        return {(uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
    }
};

using fake::F16;

template <class T>
auto widen(T value) {
    if constexpr (std::is_arithmetic_v<T>) return value;
    else return value.wide();
}

template <class T, class Wide>
T narrow(Wide value) {
    if constexpr (std::is_arithmetic_v<T>) return (T)value;
    else return T::from(value);
}

template <class T>
T combine(T a, T b, ncclRedOp_t op) {
    switch (op) {
        case ncclProd: return (T)(a * b);
        case ncclMax: return a < b ? b : a;
        case ncclMin: return b < a ? b : a;
        default: return (T)(a + b);
    }
}

template <class T>
void reduce_as(const unsigned char* const* in, int ranks, unsigned char* out, size_t count, ncclRedOp_t op) {
    for (size_t i = 0; i < count; ++i) {
        auto element = [&](int rank) {
            T value;
            memcpy(&value, in[rank] + i * sizeof value, sizeof value);
            return widen(value);
        };
        auto all = element(0);
        for (int rank = 1; rank < ranks; ++rank) all = combine(all, element(rank), op);
        if (op == ncclAvg) all = (decltype(all))(all / (decltype(all))ranks);
        const T value = narrow<T>(all);
        memcpy(out + i * sizeof value, &value, sizeof value);
    }
}

}   // namespace

size_t size_of(ncclDataType_t type) {
    const size_t sizes[ncclNumTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return type < ncclNumTypes ? sizes[type] : 0;
}

void reduce(const unsigned char* const* in, int ranks, unsigned char* out, size_t count, ncclDataType_t type,
            ncclRedOp_t op) {
    switch (type) {
        case ncclInt8: return reduce_as<int8_t>(in, ranks, out, count, op);
        case ncclUint8: return reduce_as<uint8_t>(in, ranks, out, count, op);
        case ncclInt32: return reduce_as<int32_t>(in, ranks, out, count, op);
        case ncclUint32: return reduce_as<uint32_t>(in, ranks, out, count, op);
        case ncclInt64: return reduce_as<int64_t>(in, ranks, out, count, op);
        case ncclUint64: return reduce_as<uint64_t>(in, ranks, out, count, op);
        case ncclFloat16: return reduce_as<F16>(in, ranks, out, count, op);
        case ncclFloat32: return reduce_as<float>(in, ranks, out, count, op);
        case ncclFloat64: return reduce_as<double>(in, ranks, out, count, op);
        case ncclBfloat16: return reduce_as<Bf16>(in, ranks, out, count, op);
        default: return;
    }
}

}   // namespace fake_nccl
