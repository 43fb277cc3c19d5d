// Products of a warpgroup (wgmma), of which each thread computes its own results. They read their operands as late as they may:
// when they are awaited. So a kernel whose next copies overwrite what is still multiplied computes NaN, and one that reads its
// results too early finds sums that lack them.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "shim.h"

namespace shim {

constexpr unsigned GROUP_LINES = 64, GROUP_DEPTHS = 16;
// At most.
constexpr unsigned GROUP_COLUMNS = 128;

// The operands of products as numbers, until they may change.
class GroupNumbers {
  public:
    // [line][depth].
    const float* left(const GroupOperand& operand, bool bfloat16);
    // [t][depth][i]: the columns that a lane with lane % 4 = t has.
    const float* right(const GroupOperand& operand, bool bfloat16, unsigned columns);
    void clear() { entries.clear(); }
    // Forgets the operands that have this place in their memory, because it changes.
    void forget(const void* at);

  private:
    struct Entry {
        GroupOperand operand;
        uintptr_t begin, end;   // of the atoms
        std::vector<float> numbers;
    };

    // Those of an operand of so many lines or columns, which `fill` appends if they are not known.
    template <class Fill>
    const float* find_or(const GroupOperand& operand, unsigned lines, Fill fill);

    std::deque<Entry> entries;
};

// The products of a thread.
class Groups {
  public:
    // Begins to add the product of 64 lines by 8 or 128 columns, at 16 depths, to a thread's sums, of which there are half as
    // many as columns. Returns a message if an operand is invalid.
    const char* begin(float* d, const GroupOperand& left, const GroupOperand& right, bool bfloat16, unsigned columns);

    // Computes what has begun, for this thread of the warpgroup.
    void await(unsigned thread, GroupNumbers& numbers);

    bool pending() const { return !products.empty(); }

  private:
    struct Product {
        float* d;
        GroupOperand left, right;
        bool bfloat16;
        unsigned columns;
    };

    std::vector<Product> products;
};

}   // namespace shim
