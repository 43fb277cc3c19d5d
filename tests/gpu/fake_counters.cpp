// Counts what a process asks of the driver, for tests of how often it launches, copies and waits.
//
// FAKE_GPU_COUNTERS=FILE: at its exit each process appends a line of JSON to FILE:
//   kernels, graphs   launches, outside of captures
//   uploads           copies from the host
//   nodes             of the largest graph
//   drains            waits or queries of the host for everything that a stream had at that moment: until they end,
//                     the stream gets no further work. Repeated queries of the same moment count once.
#include "fake_cuda.h"

#include <cstdio>
#include <cstdlib>

namespace fake {
namespace {

std::atomic<unsigned long> counts[4];
std::atomic<unsigned long> largest_graph;

void write_counts() {
    const char* path = getenv("FAKE_GPU_COUNTERS");
    if (path == nullptr || *path == 0) return;
    FILE* file = fopen(path, "a");
    if (file == nullptr) return;
    fprintf(file, "{\"kernels\":%lu,\"graphs\":%lu,\"uploads\":%lu,\"drains\":%lu,\"nodes\":%lu}\n", counts[0].load(),
            counts[1].load(), counts[2].load(), counts[3].load(), largest_graph.load());
    fclose(file);
}

}   // namespace

void note_graph(size_t nodes) {
    unsigned long largest = largest_graph;
    while (nodes > largest && !largest_graph.compare_exchange_weak(largest, nodes)) {}
}

bool is_idle() {
    static const bool idle = env_number("FAKE_GPU_IDLE", 0) != 0;
    return idle;
}

void count(Count what) {
    static const int registered = atexit(write_counts);
    (void)registered;
    ++counts[(int)what];
}

}   // namespace fake
