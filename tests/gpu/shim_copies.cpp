#include "shim_copies.h"

#include <cstdint>
#include <cstring>

namespace shim {

constexpr unsigned UNIT = 16;
constexpr int ON_THE_WAY = 0xff;   // every byte: NaN in f32, bf16 and f16

const char* Copies::issue(void* to, const void* from, unsigned bytes) {
    if ((uintptr_t)to % UNIT != 0) return "an asynchronous copy to a misaligned address";
    if ((uintptr_t)from % UNIT != 0) return "an asynchronous copy from a misaligned address";
    memset(to, ON_THE_WAY, UNIT);
    copies.push_back({(unsigned char*)to, from, bytes, group});
    return nullptr;
}

void Copies::commit() { ++group; }

void Copies::await(unsigned later) {
    while (!copies.empty() && copies.front().group + later < group) {
        const Copy& copy = copies.front();
        memset(copy.to, 0, UNIT);
        if (copy.bytes > 0) memcpy(copy.to, copy.from, copy.bytes);
        copies.pop_front();
    }
}

void Copies::clear() {
    copies.clear();
    group = 0;
}

}   // namespace shim
