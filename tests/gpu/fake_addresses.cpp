// Device addresses: the host can neither read nor write at any of them.
//
// Two ranges of the same size follow each other. Addresses of the first one are handed out as device addresses, and
// no access to it is ever allowed. The bytes of an address lie at the same place of the second range, where only
// allocated pages are accessible. The distance of the ranges keeps every alignment. No address is handed out twice,
// so that one that was freed never becomes valid again.
#include "fake_cuda.h"

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <unistd.h>

namespace fake {
namespace {

constexpr size_t SPAN = (size_t)1 << 40;
constexpr size_t GAP = 16 * PAGE;   // never accessible, between allocations
constexpr size_t ALIGNMENT = 512;   // as the driver's, and no more
constexpr int RESERVED = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
// Where the ranges are, if that is free: far from programs, libraries and heaps. Two numbers of 32 bits side by side
// are only taken for an address if the second is 0x2d4d, or a little more in a process that allocates gigabytes.
constexpr uintptr_t PLACE = 0x2d4d'0000'0000;

std::atomic<size_t> handed_out{0};   // bytes from the start of the ranges
struct sigaction earlier;

uintptr_t reserve() {
    void* first = mmap((void*)PLACE, 2 * SPAN, PROT_NONE, RESERVED, -1, 0);
    if (first == MAP_FAILED) {
        perror("FAKE GPU: no address range for device memory");
        abort();
    }
    return (uintptr_t)first;
}

uintptr_t first_address() {
    static const uintptr_t first = reserve();
    return first;
}

// Says which memory was accessed from the wrong side, and leaves the rest to the earlier handler: it gets the same
// signal again.
void report_fault(int signal, siginfo_t* info, void*) {
    const uintptr_t address = (uintptr_t)info->si_addr, at = address - first_address();
    char text[160] = "";
    if (info->si_code > 0 && at < SPAN) {
        snprintf(text, sizeof text, "FAKE GPU: the host accesses device memory at %#zx\n", address);
    } else if (info->si_code > 0 && at < 2 * SPAN) {
        snprintf(text, sizeof text, "FAKE GPU: a kernel accesses %#zx, where no device memory is allocated\n",
                 address - SPAN);
    }
    if (write(STDERR_FILENO, text, strlen(text)) < 0) {}
    sigaction(signal, &earlier, nullptr);
    if (info->si_code <= 0) raise(signal);
}

// The pages of an allocation that starts `ALIGNMENT` after the first of them.
size_t pages_of(size_t bytes) { return round_up(ALIGNMENT + bytes, PAGE); }

}   // namespace

bool is_device_address(uint64_t address) { return address - first_address() < handed_out; }

bool is_host_address(uint64_t address) {
    if (address >> 32 == 0 || address >> 47 != 0 || address - first_address() < 2 * SPAN) return false;
    unsigned char resident;
    return mincore((void*)(address / PAGE * PAGE), 1, &resident) == 0;
}

unsigned char* bytes_at(CUdeviceptr address) { return (unsigned char*)(address + SPAN); }

CUdeviceptr open_pages(size_t bytes) {
    static std::once_flag installed;
    std::call_once(installed, [] {
        first_address();
        struct sigaction action = {};
        action.sa_sigaction = report_fault;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigaction(SIGSEGV, &action, &earlier);
    });
    const size_t alignment = page_of(bytes);
    const size_t at = round_up(handed_out.fetch_add(pages_of(bytes) + GAP + alignment - PAGE), alignment);
    if (at + pages_of(bytes) > SPAN) {
        fprintf(stderr, "FAKE GPU: this process has used up its device addresses\n");
        abort();
    }
    const CUdeviceptr page = first_address() + at;
    if (mprotect(bytes_at(page), pages_of(bytes), PROT_READ | PROT_WRITE) != 0) return 0;
    if (alignment == HUGE_PAGE) madvise(bytes_at(page), pages_of(bytes), MADV_HUGEPAGE);
    return page + ALIGNMENT;
}

void close_pages(CUdeviceptr address, size_t bytes) {
    unsigned char* page = bytes_at(address - ALIGNMENT);
    if (mmap(page, pages_of(bytes), PROT_NONE, RESERVED | MAP_FIXED, -1, 0) != page) abort();
}

}   // namespace fake
