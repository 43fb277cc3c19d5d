// Asynchronous copies of one thread to shared memory (cp.async), which arrive as late as they may.
//
// From its issue on, the target of a copy holds a pattern that is NaN in every type: a kernel that reads it too early, or
// issues the copy while other threads still read what was there, computes NaN. The bytes are read from global memory and
// arrive when the thread awaits their group, and no earlier. So a thread that lacks a barrier after that finds the
// copies of those that have not yet awaited theirs missing.
#pragma once

#include <deque>

namespace shim {

class Copies {
  public:
    // Begins to copy `bytes` bytes, followed by zeros up to 16. Returns a message if the copy is invalid.
    const char* issue(void* to, const void* from, unsigned bytes);

    // Makes a group of the copies issued since the last group.
    void commit();

    // The copies of all groups but the last `later` ones arrive.
    void await(unsigned later);

    // Whether there are copies that were not awaited.
    bool pending() const { return !copies.empty(); }

    void clear();

  private:
    struct Copy {
        unsigned char* to;
        const void* from;
        unsigned bytes;
        unsigned long group;
    };

    std::deque<Copy> copies;
    unsigned long group = 0;   // of the next copy
};

}   // namespace shim
