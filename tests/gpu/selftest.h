// Shared by the self-tests of the fakes: the driver's functions, checks, a device with kernels.
#pragma once

#include "fake_cuda.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

extern "C" {
CUresult cuInit(unsigned);
CUresult cuDeviceGet(CUdevice*, int);
CUresult cuDeviceGetName(char*, int, CUdevice);
CUresult cuDevicePrimaryCtxRetain(CUcontext*, CUdevice);
CUresult cuCtxSetCurrent(CUcontext);
CUresult cuCtxSynchronize();
CUresult cuMemAlloc_v2(CUdeviceptr*, size_t);
CUresult cuMemFree_v2(CUdeviceptr);
CUresult cuMemGetInfo_v2(size_t*, size_t*);
CUresult cuMemHostAlloc(void**, size_t, unsigned);
CUresult cuMemFreeHost(void*);
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr, const void*, size_t, CUstream);
CUresult cuMemsetD8_v2(CUdeviceptr, unsigned char, size_t);
CUresult cuMemsetD8Async(CUdeviceptr, unsigned char, size_t, CUstream);
CUresult cuMemcpyHtoD_v2(CUdeviceptr, const void*, size_t);
CUresult cuMemcpyDtoH_v2(void*, CUdeviceptr, size_t);
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr, CUdeviceptr, size_t, CUstream);
CUresult cuMemsetD32Async(CUdeviceptr, unsigned, size_t, CUstream);
CUresult cuStreamCreate(CUstream*, unsigned);
CUresult cuStreamDestroy_v2(CUstream);
CUresult cuStreamQuery(CUstream);
CUresult cuStreamSynchronize(CUstream);
CUresult cuStreamWaitEvent(CUstream, CUevent, unsigned);
CUresult cuLaunchHostFunc(CUstream, CUhostFn, void*);
CUresult cuStreamBeginCapture_v2(CUstream, CUstreamCaptureMode);
CUresult cuStreamEndCapture(CUstream, CUgraph*);
CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus*);
CUresult cuEventCreate(CUevent*, unsigned);
CUresult cuEventRecord(CUevent, CUstream);
CUresult cuEventRecordWithFlags(CUevent, CUstream, unsigned);
CUresult cuEventQuery(CUevent);
CUresult cuEventDestroy_v2(CUevent);
CUresult cuEventSynchronize(CUevent);
CUresult cuEventElapsedTime(float*, CUevent, CUevent);
CUresult cuModuleLoadData(CUmodule*, const void*);
CUresult cuModuleGetFunction(CUfunction*, CUmodule, const char*);
CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int);
CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream,
                        void**, void**);
CUresult cuGraphInstantiateWithFlags(CUgraphExec*, CUgraph, unsigned long long);
CUresult cuGraphLaunch(CUgraphExec, CUstream);
CUresult cuGraphExecDestroy(CUgraphExec);
CUresult cuGraphDestroy(CUgraph);
CUresult cuGraphGetNodes(CUgraph, CUgraphNode*, size_t*);
typedef struct _nvrtcProgram* nvrtcProgram;
int nvrtcCreateProgram(nvrtcProgram*, const char*, const char*, int, const char* const*, const char* const*);
int nvrtcCompileProgram(nvrtcProgram, int, const char* const*);
int nvrtcGetCUBINSize(nvrtcProgram, size_t*);
int nvrtcGetCUBIN(nvrtcProgram, char*);
int nvrtcDestroyProgram(nvrtcProgram*);
}

#define CHECK(condition)                                                                     \
    do {                                                                                     \
        if (!(condition)) {                                                                  \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition);        \
            exit(1);                                                                         \
        }                                                                                    \
    } while (0)

#define EXPECT(expected, call)                                                                               \
    do {                                                                                                     \
        const unsigned result_ = (unsigned)(call);                                                           \
        if (result_ != (unsigned)(expected)) {                                                               \
            fprintf(stderr, "%s:%d: %u instead of %s: %s\n", __FILE__, __LINE__, result_, #expected, #call); \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

#define OK(call) EXPECT(0, call)

template <class T>
struct Buffer {
    CUdeviceptr address = 0;
    size_t length;
    explicit Buffer(size_t count) : length(count) { OK(cuMemAlloc_v2(&address, count * sizeof(T))); }
    explicit Buffer(const std::vector<T>& values) : Buffer(values.size()) { write(values); }
    Buffer(const Buffer&) = delete;
    ~Buffer() { OK(cuMemFree_v2(address)); }
    void write(const std::vector<T>& values) { OK(cuMemcpyHtoD_v2(address, values.data(), values.size() * sizeof(T))); }
    std::vector<T> read() const {
        std::vector<T> values(length);
        OK(cuMemcpyDtoH_v2(values.data(), address, length * sizeof(T)));
        return values;
    }
};

inline CUstream new_stream() {
    CUstream stream;
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    return stream;
}

inline CUevent new_event(unsigned flags = CU_EVENT_DISABLE_TIMING) {
    CUevent event;
    OK(cuEventCreate(&event, flags));
    return event;
}

inline void open_device(int ordinal = 0) {
    CUdevice device;
    CUcontext context;
    OK(cuInit(0));
    OK(cuDeviceGet(&device, ordinal));
    OK(cuDevicePrimaryCtxRetain(&context, device));
    OK(cuCtxSetCurrent(context));
}

// A kernel of selftest.cu, compiled by NVRTC.
inline CUfunction kernel(const char* name) {
    nvrtcProgram program;
    const std::string source = std::string("KERNEL(") + name + ")() {}";
    const char* options[] = {"--gpu-architecture=sm_90"};
    OK(nvrtcCreateProgram(&program, source.c_str(), "selftest.cu", 0, nullptr, nullptr));
    OK(nvrtcCompileProgram(program, 1, options));
    size_t bytes;
    OK(nvrtcGetCUBINSize(program, &bytes));
    std::vector<char> image(bytes);
    OK(nvrtcGetCUBIN(program, image.data()));
    OK(nvrtcDestroyProgram(&program));
    CUmodule module;
    CUfunction function;
    OK(cuModuleLoadData(&module, image.data()));
    OK(cuModuleGetFunction(&function, module, name));
    return function;
}

template <class... T>
CUresult launch(CUfunction kernel, unsigned blocks, unsigned threads, unsigned shared, CUstream stream, T... arguments) {
    void* pointers[] = {&arguments..., nullptr};
    return cuLaunchKernel(kernel, blocks, 1, 1, threads, 1, 1, shared, stream, pointers, nullptr);
}

void nccl_case(const std::string& name, int ranks);
void tiles_case(const std::string& name);
