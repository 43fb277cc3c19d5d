// Access of devices to each other's memory.
//
// FAKE_GPU_PEERS=1: every device can access every other one; by default none can.
// FAKE_GPU_PEER_FAULT=fault[@FROM-TO], between all devices or from one to another:
//   refuse    access cannot be enabled, although the driver says that it can
//   corrupt   a copy delivers zeros, as through a wrongly set up IOMMU
//   hang      a copy never ends
#include "fake_cuda.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unistd.h>

API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream);
API CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream);

namespace fake {
namespace {

bool can_access(int from, int to) { return from != to && env_number("FAKE_GPU_PEERS", 0) != 0; }

bool is_faulty(const char* fault, int from, int to) {
    const char* text = getenv("FAKE_GPU_PEER_FAULT");
    if (text == nullptr || strncmp(text, fault, strlen(fault)) != 0) return false;
    int only_from = -1, only_to = -1;
    if (sscanf(text + strlen(fault), "@%d-%d", &only_from, &only_to) != 2) return text[strlen(fault)] == 0;
    return from == only_from && to == only_to;
}

std::set<std::pair<int, int>>& enabled() {
    static auto* pairs = new std::set<std::pair<int, int>>;
    return *pairs;
}

}   // namespace
}   // namespace fake

using namespace fake;

API CUresult cuDeviceCanAccessPeer(int* can, CUdevice from, CUdevice to) {
    *can = can_access(from, to);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetP2PAttribute(int* value, CUdevice_P2PAttribute attribute, CUdevice from, CUdevice to) {
    if (from == to) return CUDA_ERROR_INVALID_DEVICE;
    *value = attribute != 1 && can_access(from, to);
    return CUDA_SUCCESS;
}

API CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
    const int own = current_device();
    if (own < 0 || peer == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    if (!can_access(own, peer->ordinal) || is_faulty("refuse", own, peer->ordinal)) {
        return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    }
    std::lock_guard lock(driver_state().mutex);
    const bool added = enabled().insert({own, peer->ordinal}).second;
    return added ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
}

API CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context,
                               size_t bytes, CUstream stream) {
    if (to_context == nullptr || from_context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    const int source = from_context->ordinal, sink = to_context->ordinal;
    if (is_faulty("corrupt", source, sink)) return cuMemsetD8Async(to, 0, bytes, stream);
    if (is_faulty("hang", source, sink)) {
        return enqueue(stream, [] {
            for (;;) pause();
        });
    }
    return cuMemcpyDtoDAsync_v2(to, from, bytes, stream);
}
