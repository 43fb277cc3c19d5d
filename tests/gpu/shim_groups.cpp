#include "shim_groups.h"

#include "shim_products.h"

namespace shim {
namespace {

constexpr unsigned ATOM = 1024, ROW = 128, UNIT = 16;
// Elements of a row.
constexpr unsigned IN_ROW = ROW / 2;
// Columns of the result that a lane has at most.
constexpr unsigned MOST = GROUP_COLUMNS / 4;

// The element of a line at a depth. Along a row an operand is contiguous; eight rows are an atom. The units of a row are
// permuted by an exclusive or with the row's number in the atom, which is that of its address.
float element(const GroupOperand& operand, unsigned line, unsigned depth, bool bfloat16) {
    const unsigned along = operand.transposed ? line : depth, row = operand.transposed ? depth : line;
    const unsigned offset = along / IN_ROW * operand.leading + row / 8 * operand.stride;
    uintptr_t address = (uintptr_t)operand.at + offset + row % 8 * ROW + along % IN_ROW * 2;
    address ^= address / ROW % 8 * UNIT;
    const unsigned bits = *(const unsigned short*)address;
    return bfloat16 ? bf16_half(bits, 0) : f16_half(bits, 0);
}

// Adds the products of all depths to the sums of a lane's columns: one after another, and so with other bits than those of a
// warp, as on a GPU.
template <unsigned OWN>
void add_products(float (&sums)[MOST], const float* left, const float* right) {
    if (!truncates()) {
        for (unsigned k = 0; k < GROUP_DEPTHS; ++k) {
            for (unsigned i = 0; i < OWN; ++i) sums[i] += left[k] * right[k * OWN + i];
        }
        return;
    }
    for (unsigned i = 0; i < OWN; ++i) {
        double sum = sums[i];
        for (unsigned k = 0; k < GROUP_DEPTHS; ++k) sum += (double)left[k] * right[k * OWN + i];
        sums[i] = towards_zero(sum);
    }
}

}   // namespace

template <class Fill>
const float* GroupNumbers::find_or(const GroupOperand& operand, unsigned lines, Fill fill) {
    for (const Entry& entry : entries) {
        if (entry.operand == operand) return entry.numbers.data();
    }
    const unsigned rows = operand.transposed ? GROUP_DEPTHS : lines, along = operand.transposed ? lines : GROUP_DEPTHS;
    const uintptr_t begin = (uintptr_t)operand.at / ATOM * ATOM;
    const uintptr_t last = begin + (rows - 1) / 8 * operand.stride + (along - 1) / IN_ROW * operand.leading;
    entries.push_back({operand, begin, last + ATOM, {}});
    std::vector<float>& numbers = entries.back().numbers;
    numbers.reserve(lines * GROUP_DEPTHS);
    fill(numbers);
    return numbers.data();
}

void GroupNumbers::forget(const void* at) {
    const auto place = (uintptr_t)at;
    std::erase_if(entries, [&](const Entry& entry) { return entry.begin <= place && place < entry.end; });
}

const float* GroupNumbers::left(const GroupOperand& operand, bool bfloat16) {
    return find_or(operand, GROUP_LINES, [&](std::vector<float>& numbers) {
        for (unsigned line = 0; line < GROUP_LINES; ++line) {
            for (unsigned k = 0; k < GROUP_DEPTHS; ++k) numbers.push_back(element(operand, line, k, bfloat16));
        }
    });
}

const float* GroupNumbers::right(const GroupOperand& operand, bool bfloat16, unsigned columns) {
    return find_or(operand, columns, [&](std::vector<float>& numbers) {
        for (unsigned t = 0; t < 4; ++t) {
            for (unsigned k = 0; k < GROUP_DEPTHS; ++k) {
                for (unsigned i = 0; i < columns / 4; ++i) numbers.push_back(element(operand, i / 2 * 8 + 2 * t + i % 2, k, bfloat16));
            }
        }
    });
}

const char* Groups::begin(
    float* d, const GroupOperand& left, const GroupOperand& right, bool bfloat16, unsigned columns) {
    for (const GroupOperand* operand : {&left, &right}) {
        if ((uintptr_t)operand->at % UNIT != 0) return "a warpgroup's operand at a misaligned address";
        // One whose rows are lines may begin within a row.
        const uintptr_t within = operand->transposed ? 0 : (uintptr_t)operand->at % ROW;
        if (((uintptr_t)operand->at - within) % ATOM != 0) return "a warpgroup's operand does not begin with an atom";
        if (operand->stride % ATOM != 0) return "atoms of a warpgroup's operand overlap";
    }
    products.push_back({d, left, right, bfloat16, columns});
    return nullptr;
}

void Groups::await(unsigned thread, GroupNumbers& numbers) {
    const unsigned lane = thread % 32;
    for (const Product& product : products) {
        const unsigned own = product.columns / 4;
        const float* right = numbers.right(product.right, product.bfloat16, product.columns) + lane % 4 * GROUP_DEPTHS * own;
        for (unsigned half = 0; half < 2; ++half) {
            const unsigned line = thread / 32 % 4 * 16 + lane / 4 + 8 * half;
            const float* left = numbers.left(product.left, product.bfloat16) + line * GROUP_DEPTHS;
            float sums[MOST];
            for (unsigned i = 0; i < own; ++i) sums[i] = product.d[i / 2 * 4 + half * 2 + i % 2];
            own == MOST ? add_products<MOST>(sums, left, right) : add_products<2>(sums, left, right);
            for (unsigned i = 0; i < own; ++i) product.d[i / 2 * 4 + half * 2 + i % 2] = sums[i];
        }
    }
    products.clear();
}

}   // namespace shim
