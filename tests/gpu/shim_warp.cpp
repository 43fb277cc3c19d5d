// Warp functions: computed for all lanes at once, by the lane that arrives last.
#include <cstdint>
#include <cstring>

#include "shim.h"
#include "shim_products.h"

namespace shim {
namespace {

constexpr unsigned LANES = 32;

// The source lane of `lane`. Outside its segment a lane is its own source.
unsigned source_of(const WarpCall& call, unsigned lane) {
    const unsigned first = lane & ~(call.width - 1), end = first + call.width;
    switch (call.function) {
        case WarpFunction::ShuffleUp: return lane >= first + call.lane ? lane - call.lane : lane;
        case WarpFunction::ShuffleDown: return lane + call.lane < end ? lane + call.lane : lane;
        case WarpFunction::ShuffleXor: return (lane ^ call.lane) < end ? lane ^ call.lane : lane;
        default: return first + (call.lane & (call.width - 1));
    }
}

void shuffle_lane(WarpCall* const lanes[LANES], unsigned lane) {
    const WarpCall& call = *lanes[lane];
    const WarpCall* source = lanes[source_of(call, lane)];
    if (source == nullptr) {
        // Undefined on a GPU: a lane outside the mask, or an ended one.
        memset(call.out, 0xa5, call.size);
    } else {
        memcpy(call.out, source->in, call.size);
    }
}

void ballot(WarpCall* const lanes[LANES]) {
    unsigned votes = 0;
    for (unsigned lane = 0; lane < LANES; ++lane) {
        if (lanes[lane] != nullptr && *(const int*)lanes[lane]->in != 0) votes |= 1u << lane;
    }
    for (unsigned lane = 0; lane < LANES; ++lane) {
        if (lanes[lane] != nullptr) *(unsigned*)lanes[lane]->out = votes;
    }
}

// Tensor cores ignore the lower 13 bits of the mantissa of TF32 operands.
float tf32(unsigned bits) { return from_bits(bits & 0xffffe000u); }

template <unsigned K>
void multiply_truncating(WarpCall* const lanes[LANES], const float (&a)[16][K], const float (&b)[K][8]) {
    for (unsigned lane = 0; lane < LANES; ++lane) {
        float* d = ((const MmaLane*)lanes[lane]->in)->d;
        for (unsigned i = 0; i < 4; ++i) {
            const unsigned row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
            for (unsigned first = 0; first < K; first += 8) {
                double sum = d[i];
                for (unsigned k = first; k < first + 8; ++k) sum += (double)a[row][k] * b[k][column];
                d[i] = towards_zero(sum);
            }
        }
    }
}

template <unsigned K>
void multiply(WarpCall* const lanes[LANES], const float (&a)[16][K], const float (&b)[K][8]) {
    if (truncates()) return multiply_truncating(lanes, a, b);
    // In registers, which the compiler does not do by itself.
    typedef float Row __attribute__((vector_size(32), aligned(4)));
    Row sums[16];
    for (unsigned row = 0; row < 16; ++row) {
        Row sum = {};
        for (unsigned k = 0; k < K; ++k) sum += a[row][k] * *(const Row*)b[k];
        sums[row] = sum;
    }
    for (unsigned lane = 0; lane < LANES; ++lane) {
        float* d = ((const MmaLane*)lanes[lane]->in)->d;
        for (unsigned i = 0; i < 4; ++i) d[i] += sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
    }
}

// `number(pair, half)` is a number of a pair of 16 bits each.
template <float number(unsigned pair, unsigned half)>
void multiply_halves(WarpCall* const lanes[LANES]) {
    float a[16][16], b[16][8];
    for (unsigned lane = 0; lane < LANES; ++lane) {
        const auto* part = (const MmaLane*)lanes[lane]->in;
        const unsigned g = lane / 4, t = lane % 4;
        for (unsigned half = 0; half < 2; ++half) {
            for (unsigned i = 0; i < 4; ++i) {
                a[g + i % 2 * 8][2 * t + i / 2 * 8 + half] = number(part->a[i], half);
            }
            for (unsigned i = 0; i < 2; ++i) b[2 * t + i * 8 + half][g] = number(part->b[i], half);
        }
    }
    multiply(lanes, a, b);
}

void multiply_tf32(WarpCall* const lanes[LANES]) {
    float a[16][8], b[8][8];
    for (unsigned lane = 0; lane < LANES; ++lane) {
        const auto* part = (const MmaLane*)lanes[lane]->in;
        const unsigned g = lane / 4, t = lane % 4;
        for (unsigned i = 0; i < 4; ++i) a[g + i % 2 * 8][t + i / 2 * 4] = tf32(part->a[i]);
        for (unsigned i = 0; i < 2; ++i) b[t + i * 4][g] = tf32(part->b[i]);
    }
    multiply(lanes, a, b);
}

// Loads four matrices. A real GPU reads the eight rows of a matrix at once if they are in different groups of four banks,
// and ours all are unless they are scattered.
const char* load_matrices(WarpCall* const lanes[LANES], bool transposed) {
    unsigned short rows[LANES][8];
    for (unsigned matrix = 0; matrix < LANES; matrix += 8) {
        unsigned groups = 0;
        for (unsigned row = matrix; row < matrix + 8; ++row) {
            const auto address = (uintptr_t)lanes[row]->in;
            if (address % 16 != 0) return "a row of a matrix at a misaligned address";
            groups |= 1u << address / 16 % 8;
            memcpy(rows[row], lanes[row]->in, sizeof rows[row]);
        }
        if (groups != 0xff && !lanes[matrix]->lane) return "rows of a matrix in the same banks of shared memory";
    }
    for (unsigned lane = 0; lane < LANES; ++lane) {
        const unsigned g = lane / 4, t = lane % 4;
        auto* out = (unsigned*)lanes[lane]->out;
        for (unsigned m = 0; m < 4; ++m) {
            const auto& matrix = rows + 8 * m;
            const unsigned short low = transposed ? matrix[2 * t][g] : matrix[g][2 * t];
            const unsigned short high = transposed ? matrix[2 * t + 1][g] : matrix[g][2 * t + 1];
            out[m] = low | (unsigned)high << 16;
        }
    }
    return nullptr;
}

}   // namespace

const char* exchange(WarpCall* const lanes[LANES]) {
    const WarpCall* first = nullptr;
    unsigned present = 0;
    for (unsigned lane = 0; lane < LANES; ++lane) {
        if (lanes[lane] == nullptr) continue;
        ++present;
        if (first == nullptr) first = lanes[lane];
        if (lanes[lane]->function != first->function) return "the lanes of a warp call different warp functions";
    }
    const bool product = first->function == WarpFunction::MmaBf16 || first->function == WarpFunction::MmaF16 ||
        first->function == WarpFunction::MmaTf32;
    const bool transposed = first->function == WarpFunction::LoadMatricesTransposed;
    const bool load = transposed || first->function == WarpFunction::LoadMatrices;
    if (product && present < LANES) return "a matrix product without all 32 lanes of the warp";
    if (load && present < LANES) return "matrices are loaded without all 32 lanes of the warp";
    switch (first->function) {
        case WarpFunction::Sync: break;
        case WarpFunction::Ballot: ballot(lanes); break;
        case WarpFunction::MmaBf16: multiply_halves<bf16_half>(lanes); break;
        case WarpFunction::MmaF16: multiply_halves<f16_half>(lanes); break;
        case WarpFunction::MmaTf32: multiply_tf32(lanes); break;
        case WarpFunction::LoadMatrices:
        case WarpFunction::LoadMatricesTransposed: return load_matrices(lanes, transposed);
        default:
            for (unsigned lane = 0; lane < LANES; ++lane) {
                if (lanes[lane] != nullptr) shuffle_lane(lanes, lane);
            }
    }
    return nullptr;
}

}   // namespace shim
