// The memory of the driver API.
//
// New memory is filled with 0xa5, so that reading it is detected. Each allocation is followed by a guard area, which is
// checked when the memory is freed. Work names memory by its device address until it runs: then the address has to lie
// in an allocation or in pinned memory. Freeing pinned memory waits for nothing, and a copy that runs later reports it.
#include "fake_cuda.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>

namespace fake {
namespace {

constexpr int POISON = 0xa5;
constexpr int STRIP = 0xc7;
constexpr size_t STRIP_BYTES = 256;

size_t used(int ordinal) {
    size_t bytes = 0;
    for (const auto& [address, allocation] : driver_state().memory) {
        if (allocation.ordinal == ordinal) bytes += allocation.bytes;
    }
    return bytes;
}

size_t total() { return (size_t)env_number("FAKE_GPU_MEMORY_MIB", 4096) << 20; }

void check_strip(const unsigned char* memory, size_t bytes) {
    for (size_t i = 0; i < STRIP_BYTES; ++i) {
        if (memory[bytes + i] == STRIP) continue;
        fprintf(stderr, "FAKE GPU: %zu bytes of device memory were written to past their end, at byte %zu\n", bytes,
                bytes + i);
        abort();
    }
}

bool is_pinned(const void* address) {
    std::lock_guard lock(driver_state().mutex);
    auto after = driver_state().pinned.upper_bound((uintptr_t)address);
    if (after == driver_state().pinned.begin()) return false;
    const auto [start, bytes] = *std::prev(after);
    return (uintptr_t)address < start + bytes;
}

// A copy from or to pinned memory, which has to exist when the copy runs.
Work copy_pinned(const void* host, Work copy) {
    return [host, copy] {
        if (!is_pinned(host)) {
            fprintf(stderr, "FAKE GPU: a copy uses pinned memory that has been freed\n");
            abort();
        }
        copy();
    };
}

// The allocation that contains an address or ends at it; null if there is none. The caller holds the lock.
const std::pair<const CUdeviceptr, Allocation>* allocation_at(CUdeviceptr address) {
    auto after = driver_state().memory.upper_bound(address);
    if (after == driver_state().memory.begin()) return nullptr;
    --after;
    return address <= after->first + after->second.bytes ? &*after : nullptr;
}

[[noreturn]] void reject(const char* user, CUdeviceptr address, const char* why) {
    fprintf(stderr, "FAKE GPU: %s: %#llx is %s\n", user, address, why);
    abort();
}

constexpr const char* FREED = "device memory that is freed, or was never allocated";
constexpr const char* NOT_PINNED = "neither device memory nor pinned memory of the host";

// A copy or fill that the caller waits for, after everything that the default stream waits for.
CUresult now(Work work) { return enqueue(nullptr, std::move(work)); }

bool is_capturing(CUstream stream) {
    std::lock_guard lock(driver_state().mutex);
    return !is_default(stream) && driver_state().streams.count(stream) != 0 && stream->capture != nullptr;
}

}   // namespace

void* device_bytes(CUdeviceptr address, size_t bytes, const char* user) {
    if (bytes == 0) return nullptr;
    if (!is_device_address(address)) {
        if (is_pinned((const void*)address)) return (void*)address;
        reject(user, address, NOT_PINNED);
    }
    std::lock_guard lock(driver_state().mutex);
    const auto* found = allocation_at(address);
    if (found == nullptr) reject(user, address, FREED);
    const size_t rest = found->first + found->second.bytes - address;
    if (bytes > rest) {
        fprintf(stderr, "FAKE GPU: %s: %zu bytes are accessed at %#llx, %zu before the end of the device memory\n", user,
                bytes, address, rest);
        abort();
    }
    return bytes_at(address);
}

uint64_t kernel_argument(uint64_t word, const char* kernel) {
    if (!is_device_address(word)) {
        if (is_host_address(word) && !is_pinned((const void*)word)) reject(kernel, word, NOT_PINNED);
        return word;
    }
    std::lock_guard lock(driver_state().mutex);
    if (allocation_at(word) == nullptr) reject(kernel, word, FREED);
    return (uint64_t)bytes_at(word);
}

bool is_allocated(CUdeviceptr address, size_t bytes) {
    std::lock_guard lock(driver_state().mutex);
    const auto* found = allocation_at(address);
    return found != nullptr && bytes <= found->first + found->second.bytes - address;
}

CUresult allocate(CUdeviceptr* address, size_t bytes) {
    const int ordinal = current_device();
    if (ordinal < 0) return CUDA_ERROR_INVALID_CONTEXT;
    if (forbidden_in_capture()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (address == nullptr || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard lock(driver_state().mutex);
    if (bytes > total() || used(ordinal) + bytes > total()) return CUDA_ERROR_OUT_OF_MEMORY;
    *address = open_pages(bytes + STRIP_BYTES);
    if (*address == 0) return CUDA_ERROR_OUT_OF_MEMORY;
    if (!is_idle()) memset(bytes_at(*address), POISON, bytes);
    memset(bytes_at(*address) + bytes, STRIP, STRIP_BYTES);
    driver_state().memory[*address] = {bytes, ordinal};
    return CUDA_SUCCESS;
}

CUresult release(CUdeviceptr address, bool waits) {
    if (address == 0) return CUDA_SUCCESS;
    if (forbidden_in_capture()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    Allocation allocation;
    {
        std::lock_guard lock(driver_state().mutex);
        const auto found = driver_state().memory.find(address);
        if (found == driver_state().memory.end()) return CUDA_ERROR_INVALID_VALUE;
        allocation = found->second;
        driver_state().memory.erase(found);
    }
    if (waits) wait_for_device(allocation.ordinal, false);
    check_strip(bytes_at(address), allocation.bytes);
    close_pages(address, allocation.bytes + STRIP_BYTES);
    return CUDA_SUCCESS;
}

}   // namespace fake

using namespace fake;

API CUresult cuMemAlloc_v2(CUdeviceptr* address, size_t bytes) { return allocate(address, bytes); }
API CUresult cuMemFree_v2(CUdeviceptr address) { return release(address); }

// Stream-ordered; allocating earlier and freeing later than required is allowed.
API CUresult cuMemAllocAsync(CUdeviceptr* address, size_t bytes, CUstream) { return allocate(address, bytes); }
API CUresult cuMemFreeAsync(CUdeviceptr address, CUstream) { return release(address); }

API CUresult cuMemGetInfo_v2(size_t* unused, size_t* all) {
    if (current_device() < 0) return CUDA_ERROR_INVALID_CONTEXT;
    std::lock_guard lock(driver_state().mutex);
    *all = total();
    *unused = total() - used(current_device());
    return CUDA_SUCCESS;
}

API CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* bytes, CUdeviceptr address) {
    std::lock_guard lock(driver_state().mutex);
    const auto* found = allocation_at(address);
    if (found == nullptr || address == found->first + found->second.bytes) return CUDA_ERROR_NOT_FOUND;
    if (base != nullptr) *base = found->first;
    if (bytes != nullptr) *bytes = found->second.bytes;
    return CUDA_SUCCESS;
}

API CUresult cuMemHostAlloc(void** address, size_t bytes, unsigned) {
    if (current_device() < 0) return CUDA_ERROR_INVALID_CONTEXT;
    if (forbidden_in_capture()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    const size_t alignment = page_of(bytes);
    *address = aligned_alloc(alignment, round_up(bytes, alignment));
    if (*address == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
    if (alignment == HUGE_PAGE) madvise(*address, bytes, MADV_HUGEPAGE);
    memset(*address, POISON, bytes);
    std::lock_guard lock(driver_state().mutex);
    driver_state().pinned[(uintptr_t)*address] = bytes;
    return CUDA_SUCCESS;
}
API CUresult cuMemAllocHost_v2(void** address, size_t bytes) { return cuMemHostAlloc(address, bytes, 0); }

API CUresult cuMemFreeHost(void* address) {
    if (forbidden_in_capture()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    {
        std::lock_guard lock(driver_state().mutex);
        if (driver_state().pinned.erase((uintptr_t)address) == 0) return CUDA_ERROR_INVALID_VALUE;
    }
    free(address);
    return CUDA_SUCCESS;
}

API CUresult cuMemHostRegister_v2(void* address, size_t bytes, unsigned) {
    std::lock_guard lock(driver_state().mutex);
    driver_state().pinned[(uintptr_t)address] = bytes;
    return CUDA_SUCCESS;
}

API CUresult cuMemHostUnregister(void* address) {
    std::lock_guard lock(driver_state().mutex);
    return driver_state().pinned.erase((uintptr_t)address) == 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

API CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* address, void* host, unsigned) {
    *address = (CUdeviceptr)host;
    return CUDA_SUCCESS;
}

// ---- Copies ----

namespace {

Work copy_to_device(CUdeviceptr to, const void* from, size_t bytes) {
    return [=] { memcpy(device_bytes(to, bytes, "cuMemcpyHtoD"), from, bytes); };
}
Work copy_to_host(void* to, CUdeviceptr from, size_t bytes) {
    return [=] { memcpy(to, device_bytes(from, bytes, "cuMemcpyDtoH"), bytes); };
}
Work copy_on_device(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    return [=] { memmove(device_bytes(to, bytes, "cuMemcpyDtoD"), device_bytes(from, bytes, "cuMemcpyDtoD"), bytes); };
}

}   // namespace

API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
    count(Count::Uploads);
    return now(copy_to_device(to, from, bytes));
}
API CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) { return now(copy_to_host(to, from, bytes)); }
API CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    return now(copy_on_device(to, from, bytes));
}
API CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) { return cuMemcpyDtoD_v2(to, from, bytes); }

// Pageable memory is staged before the call returns; pinned memory is read when the copy runs.
API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
    count(Count::Uploads);
    Work copy = copy_to_device(to, from, bytes);
    if (is_pinned(from)) return enqueue(stream, copy_pinned(from, copy));
    if (is_capturing(stream)) return enqueue(stream, copy);
    const auto* start = (const unsigned char*)from;
    auto staged = std::make_shared<std::vector<unsigned char>>(start, start + bytes);
    return enqueue(stream, [=] { copy_to_device(to, staged->data(), bytes)(); });
}

// A copy to pageable memory returns after the copy.
API CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
    Work copy = copy_to_host(to, from, bytes);
    if (is_pinned(to)) return enqueue(stream, copy_pinned(to, copy));
    if (is_capturing(stream)) return enqueue(stream, copy);
    auto made = std::make_shared<EventRecord>();
    const CUresult result = enqueue(stream, [=] {
        copy();
        made->pass();
    });
    if (result == CUDA_SUCCESS) made->wait();
    return result;
}

API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    return enqueue(stream, copy_on_device(to, from, bytes));
}
API CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    return cuMemcpyDtoDAsync_v2(to, from, bytes, stream);
}

// ---- Fills ----

namespace {

template <class T>
CUresult fill(CUdeviceptr to, T value, size_t count, CUstream stream) {
    if (to % sizeof(T) != 0) return CUDA_ERROR_INVALID_VALUE;
    return enqueue(stream, [=] {
        auto* values = (T*)device_bytes(to, count * sizeof(T), "cuMemset");
        // Fresh memory is zero without being touched.
        if (is_idle() && value == 0 && count * sizeof(T) > 1 << 20) return;
        std::fill_n(values, count, value);
    });
}

}   // namespace

API CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t count) {
    return fill(to, value, count, nullptr);
}
API CUresult cuMemsetD16_v2(CUdeviceptr to, unsigned short value, size_t count) {
    return fill(to, value, count, nullptr);
}
API CUresult cuMemsetD32_v2(CUdeviceptr to, unsigned value, size_t count) {
    return fill(to, value, count, nullptr);
}
API CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
    return fill(to, value, count, stream);
}
API CUresult cuMemsetD16Async(CUdeviceptr to, unsigned short value, size_t count, CUstream stream) {
    return fill(to, value, count, stream);
}
API CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream) {
    return fill(to, value, count, stream);
}
