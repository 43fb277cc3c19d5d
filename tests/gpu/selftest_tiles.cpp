// The self-test of the main loop of matrix products, and of the loads and copies that it consists of.
#include "selftest.h"

#include <cmath>

namespace {

void matrices() {
    std::vector<unsigned short> values(32 * 8);
    for (size_t i = 0; i < values.size(); ++i) values[i] = (unsigned short)(i * 7);
    const Buffer<unsigned short> in(values), out(2 * values.size());
    OK(launch(kernel("selftest_matrices"), 1, 32, 0, nullptr, in.address, out.address));
    const auto found = out.read();
    for (unsigned lane = 0; lane < 32; ++lane) {
        for (unsigned m = 0; m < 4; ++m) {
            for (unsigned half = 0; half < 2; ++half) {
                const unsigned at = (lane * 4 + m) * 2 + half, g = lane / 4, t = lane % 4;
                CHECK(found[at] == values[m * 64 + g * 8 + 2 * t + half]);
                CHECK(found[values.size() + at] == values[m * 64 + (2 * t + half) * 8 + g]);
            }
        }
    }
}

void bank_conflict() {
    const Buffer<unsigned> out(32 * 4);
    OK(launch(kernel("selftest_bank_conflict"), 1, 32, 0, nullptr, out.address));
}

// Whether the first copies of this kind (`enum` in selftest_tiles.cu) have arrived when they are read.
bool copies_arrive(unsigned kind) {
    std::vector<unsigned> values(128 * 4);
    for (size_t i = 0; i < values.size(); ++i) values[i] = (unsigned)i + 1;
    const unsigned inside = 50;
    const Buffer<unsigned> in(values), out(128);
    OK(launch(kernel("selftest_copies"), 1, 64, 0, nullptr, in.address, out.address, inside, kind));
    const auto found = out.read();
    bool arrive = true;
    for (unsigned own = 0; own < 64; ++own) {
        const unsigned other = (own + 33) % 64, word = own % 4;
        const unsigned expected = other < inside ? values[other * 4 + word] : 0;
        arrive = arrive && found[own] == expected;
        CHECK(found[64 + own] == values[(64 + other) * 4 + word]);
    }
    return arrive;
}

void conflicts() {
    for (const unsigned tile : {0u, 1u, 2u}) {
        const Buffer<unsigned> out(3);
        OK(launch(kernel("selftest_conflicts"), 1, tile == 1 ? 256 : 128, 0, nullptr, out.address, tile));
        const auto found = out.read();
        CHECK(found[0] == 0);
        CHECK(found[1] > 200);
        CHECK(found[2] == 4 * 2 * 4);
    }
}

// The nearest element, as the bits of its type, to a value of few bits: sums of such products are exact in any order.
void put(std::vector<unsigned short>& values, size_t at, float value) {
    unsigned bits;
    memcpy(&bits, &value, 4);
    values[at] = (unsigned short)(bits >> 16);
}
void put(std::vector<float>& values, size_t at, float value) { values[at] = value; }

struct TestProduct {
    unsigned rows, columns, depths, start, end;
};

float left_at(unsigned line, unsigned depth) { return (float)((line * 7 + depth * 5) % 13) - 6.0f; }
float right_at(unsigned line, unsigned depth) { return (float)((line * 3 + depth * 11) % 9) * 0.25f - 1.0f; }

// Two operands of `lines` lines and `depths` depths, each contiguous along its lines or along the depth.
template <class T>
struct TestOperands {
    std::vector<T> left, right;

    TestOperands(unsigned lines, unsigned depths, bool left_by_lines, bool right_by_lines)
        : left(lines * depths), right(lines * depths) {
        for (unsigned line = 0; line < lines; ++line) {
            for (unsigned depth = 0; depth < depths; ++depth) {
                const unsigned by_lines = depth * lines + line, by_depth = line * depths + depth;
                put(left, left_by_lines ? by_lines : by_depth, left_at(line, depth));
                put(right, right_by_lines ? by_lines : by_depth, right_at(line, depth));
            }
        }
    }
};

// Checks the products of `lines` lines in a square tile, and behind them the sums of the left operand's lines.
void check_products(const std::vector<float>& found, unsigned side, const TestProduct& product, bool sums_lines) {
    for (unsigned row = 0; row < side; ++row) {
        float line_sum = 0;
        for (unsigned depth = product.start; depth < product.end && row < product.rows; ++depth) line_sum += left_at(row, depth);
        CHECK(found[side * side + row] == (sums_lines ? line_sum : 0));
        for (unsigned column = 0; column < side; ++column) {
            float expected = 0;
            for (unsigned depth = product.start; depth < product.end && row < product.rows && column < product.columns; ++depth) {
                expected += left_at(row, depth) * right_at(column, depth);
            }
            CHECK(found[row * side + column] == expected);
        }
    }
}

// Both loops compute what is expected, for lines and depths that fill no tile and no step, and for parts of the depth.
template <class T>
void products(const char* name) {
    const unsigned quad = 16 / sizeof(T), step = 64 / sizeof(T);
    for (unsigned layouts = 0; layouts < 6; ++layouts) {
        const bool large = layouts >= 4, left_by_lines = large || layouts % 2 == 1, right_by_lines = layouts / 2 % 2 == 1;
        const unsigned side = large ? 128 : 64;
        for (const unsigned depths : {quad, step - quad, step, 3 * step, 4 * step + quad, 9 * step + 3 * quad}) {
            for (const unsigned lines : {quad, side - quad, side}) {
                const unsigned start = depths > 2 * step ? step : 0, end = depths;
                const TestOperands<T> operands(lines, depths, left_by_lines, right_by_lines);
                const Buffer<T> left(operands.left), right(operands.right);
                for (const unsigned vector : {0u, 1u}) {
                    const Buffer<float> out(side * side + side);
                    const TestProduct product{lines, lines, depths, start, end};
                    OK(launch(kernel(name), 1, layouts == 5 ? 256 : 128, 0, nullptr, left.address, right.address, out.address,
                              product, layouts, vector));
                    check_products(out.read(), side, product, left_by_lines);
                }
            }
        }
    }
}

// A kernel with a block of a warpgroup (`Tile::shared` in partition.rs).
constexpr unsigned GROUP_SHARED = 3 * 2 * 128 * 64 * 2 + 1024;
CUfunction group_kernel(const char* name) {
    const CUfunction found = kernel(name);
    constexpr auto MOST_DYNAMIC_SHARED = (CUfunction_attribute)8;
    OK(cuFuncSetAttribute(found, MOST_DYNAMIC_SHARED, GROUP_SHARED));
    return found;
}

// The same for a warpgroup's loop, which has one kind of operands.
void group_products() {
    using T = unsigned short;
    constexpr unsigned quad = 8, step = 64, side = 128;
    const CUfunction multiply = group_kernel("selftest_group_bf16");
    for (unsigned layouts = 0; layouts < 4; ++layouts) {
        const bool left_by_lines = layouts % 2 == 1, right_by_lines = layouts / 2 == 1;
        for (const unsigned depths : {quad, step - quad, 4 * step + quad, 7 * step + 3 * quad}) {
            for (const unsigned lines : {quad, side - quad, side}) {
                const TestProduct product{lines, lines, depths, depths > 2 * step ? step / 2 : 0, depths};
                const TestOperands<T> operands(lines, depths, left_by_lines, right_by_lines);
                const Buffer<T> left(operands.left), right(operands.right);
                const Buffer<float> out(side * side + side);
                OK(launch(multiply, 1, 128, GROUP_SHARED, nullptr, left.address, right.address, out.address, product, layouts));
                check_products(out.read(), side, product, left_by_lines);
            }
        }
    }
}

// Whether the sums of this kind (`enum` in selftest_tiles.cu) are right.
bool group_is_right(unsigned kind) {
    const Buffer<unsigned> zeros(std::vector<unsigned>(512));
    const Buffer<float> out(128);
    OK(launch(group_kernel("selftest_group_kinds"), 1, 128, GROUP_SHARED, nullptr, zeros.address, out.address, kind));
    bool right = true;
    for (const float value : out.read()) right = right && value == 64;
    return right;
}

// Values whose sums are rounded, among them NaN and infinities: both loops give the same bits.
template <class T>
void same_bits(const char* name) {
    const unsigned step = 64 / sizeof(T), depths = 5 * step + 8, lines = 56;
    for (unsigned layouts = 0; layouts < 6; ++layouts) {
        const unsigned side = layouts >= 4 ? 128 : 64;
        std::vector<T> a(lines * depths), b(lines * depths);
        for (size_t i = 0; i < a.size(); ++i) {
            put(a, i, std::sin((float)i * 1.7f) * 3.0f);
            put(b, i, std::cos((float)i * 0.9f) * 1e-3f);
        }
        put(a, a.size() / 2, INFINITY), put(a, a.size() / 3, NAN), put(b, 5, -INFINITY);
        const Buffer<T> left(a), right(b);
        std::vector<float> results[2];
        for (const unsigned vector : {0u, 1u}) {
            const Buffer<float> out(side * side + side);
            const TestProduct product{lines, lines, depths, 0, depths};
            OK(launch(kernel(name), 1, layouts == 5 ? 256 : 128, 0, nullptr, left.address, right.address, out.address,
                      product, layouts, vector));
            results[vector] = out.read();
        }
        bool finite = false, nan = false;
        for (const float value : results[0]) finite |= std::isfinite(value) && value != 0, nan |= std::isnan(value);
        CHECK(finite && nan);
        CHECK(memcmp(results[0].data(), results[1].data(), results[0].size() * sizeof(float)) == 0);
    }
}

}   // namespace

void tiles_case(const std::string& name) {
    if (name == "tiles_matrices") matrices();
    else if (name == "tiles_bank_conflict") bank_conflict();
    else if (name == "tiles_conflicts") conflicts();
    else if (name == "tiles_copies") CHECK(copies_arrive(0));
    else if (name == "tiles_copies_without_wait") CHECK(!copies_arrive(1));
    else if (name == "tiles_copies_without_barrier") CHECK(!copies_arrive(2));
    else if (name == "tiles_copies_too_early") CHECK(!copies_arrive(3));
    else if (name == "tiles_copies_left_behind") copies_arrive(4);
    else if (name == "tiles_group") CHECK(group_is_right(0));
    else if (name == "tiles_group_read_too_early") CHECK(!group_is_right(1));
    else if (name == "tiles_group_overwritten") CHECK(!group_is_right(2));
    else if (name == "tiles_group_askew") group_is_right(3);
    else if (name == "tiles_group_left_behind") group_is_right(4);
    else if (name == "tiles_group_products") group_products();
    else if (name == "tiles_products_bf16") products<unsigned short>("selftest_product_bf16");
    else if (name == "tiles_products_tf32") products<float>("selftest_product_tf32");
    else if (name == "tiles_same_bits_bf16") same_bits<unsigned short>("selftest_product_bf16");
    else if (name == "tiles_same_bits_tf32") same_bits<float>("selftest_product_tf32");
    else CHECK(!"a case");
}
