// Memory that NCCL allocates, and the registration of memory.
//
// Reported at once: memory that is freed while a communicator has it registered, and a second window on the same memory.
// Unlike the driver, ncclMemFree does not wait for work that uses the memory: such work then finds it freed. A
// communicator that is destroyed or aborted loses its registrations.
//
// FAKE_NCCL_FAULT=mem_alloc_error[@rank]: there is no memory (ranks as in RANK).
#include "fake_nccl.h"

#include <cstdio>
#include <cstdlib>

namespace fake_nccl {
namespace {

// The number of registrations of all communicators, by address.
std::mutex all_mutex;
std::map<CUdeviceptr, int>& all() {
    static auto* counts = new std::map<CUdeviceptr, int>;
    return *counts;
}

void count_registration(CUdeviceptr address, int more) {
    std::lock_guard lock(all_mutex);
    if ((all()[address] += more) == 0) all().erase(address);
}

}   // namespace

void Registrations::clear() {
    std::lock_guard lock(mutex);
    for (const auto& [address, registered] : ranges) count_registration(address, -registered->count);
    ranges.clear();
}

Registered* Registrations::add(CUdeviceptr address, size_t bytes) {
    if (!fake::is_allocated(address, bytes)) return nullptr;
    std::lock_guard lock(mutex);
    auto& range = ranges[address];
    if (range == nullptr) range.reset(new Registered{address, bytes, 0, false});
    ++range->count;
    count_registration(address, 1);
    return range.get();
}

bool Registrations::remove(const Registered* registered) {
    std::lock_guard lock(mutex);
    for (auto at = ranges.begin(); at != ranges.end(); ++at) {
        if (at->second.get() != registered) continue;
        count_registration(at->first, -1);
        if (--at->second->count == 0) ranges.erase(at);
        return true;
    }
    return false;
}

Registered* Registrations::open_window(CUdeviceptr address, size_t bytes) {
    // The real library registers the memory as well.
    Registered* registered = add(address, bytes);
    if (registered == nullptr) return nullptr;
    std::lock_guard lock(mutex);
    if (registered->window) {
        fprintf(stderr, "FAKE NCCL: memory at %#llx gets a second window\n", address);
        abort();
    }
    registered->window = true;
    return registered;
}

bool Registrations::close_window(const Registered* registered) {
    {
        std::lock_guard lock(mutex);
        for (const auto& [address, range] : ranges) {
            if (range.get() == registered) range->window = false;
        }
    }
    return remove(registered);
}

size_t Registrations::place(const void* at) {
    const auto address = (CUdeviceptr)at;
    std::lock_guard lock(mutex);
    auto after = ranges.upper_bound(address);
    if (after == ranges.begin()) return 0;
    const Registered& range = *std::prev(after)->second;
    if (address >= range.address + range.bytes) return 0;
    return 1 + (address - range.address) + (range.window ? (size_t)1 << 60 : 0);
}

}   // namespace fake_nccl

using namespace fake_nccl;

API ncclResult_t ncclMemAlloc(void** address, size_t bytes) {
    trace_call(__func__);
    const char* rank = getenv("RANK");
    if (is_faulty("mem_alloc_error", rank == nullptr ? 0 : atoi(rank))) {
        return fail(ncclUnhandledCudaError, "mem_alloc_error was asked for");
    }
    // The real library rounds the size up, and so would miss less of what is written past the end.
    const CUresult result = fake::allocate((CUdeviceptr*)address, bytes);
    return result == CUDA_SUCCESS ? ncclSuccess : fail(ncclUnhandledCudaError, "no device memory");
}

API ncclResult_t ncclMemFree(void* address) {
    trace_call(__func__);
    {
        std::lock_guard lock(all_mutex);
        if (all().count((CUdeviceptr)address) != 0) {
            fprintf(stderr, "FAKE NCCL: memory at %p is freed while it is registered\n", address);
            abort();
        }
    }
    const CUresult result = fake::release((CUdeviceptr)address, false);
    return result == CUDA_SUCCESS ? ncclSuccess : fail(ncclUnhandledCudaError, "not memory that was allocated");
}
