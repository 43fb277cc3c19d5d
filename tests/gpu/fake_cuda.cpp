// The driver API: devices, contexts, modules and launches. The device is fake, as its name says.
//
// FAKE_GPU_COUNT devices (2) of FAKE_GPU_MEMORY_MIB (4096) each. CUDA_VISIBLE_DEVICES selects among them as among
// real ones. FAKE_CUDA_VERSION (13000) is the version of CUDA that the driver supports. Every device has
// FAKE_GPU_MULTIPROCESSORS (4) multiprocessors: 132 chooses grids and depths of splits as on a large GPU. Kernels are
// loaded when they are launched first, which a capture forbids, unless FAKE_CUDA_LAZY_LOADING is 0.
#include "fake_cuda.h"
#include "shim.h"

#include <cstring>
#include <dlfcn.h>
#include <unordered_map>

namespace fake {
namespace {

constexpr const char* NAME = "FAKE GPU (tests only)";
constexpr unsigned MOST_SHARED = 227 * 1024;
constexpr unsigned SHARED_BY_DEFAULT = 48 * 1024;

thread_local CUcontext current = nullptr;
std::atomic<bool> initialized{false};

// The devices visible to this process, by their index on the machine.
const std::vector<int>& devices() {
    static const auto* all = [] {
        auto* visible = new std::vector<int>;
        const long count = env_number("FAKE_GPU_COUNT", 2);
        const char* chosen = getenv("CUDA_VISIBLE_DEVICES");
        if (chosen == nullptr) {
            for (int i = 0; i < count; ++i) visible->push_back(i);
            return visible;
        }
        // As with the real driver, the first invalid entry ends the list.
        for (const char* at = chosen; *at != 0;) {
            const size_t length = strcspn(at, ",");
            int number = -1;
            for (int i = 0; i < count; ++i) {
                char uuid[48];
                snprintf(uuid, sizeof uuid, "GPU-46414b45-0000-0000-0000-%012x", i);
                const std::string entry(at, length);
                if (entry == std::to_string(i) || (length > 4 && std::string(uuid).rfind(entry, 0) == 0)) number = i;
            }
            if (number < 0) break;
            visible->push_back(number);
            at += length + (at[length] == ',' ? 1 : 0);
        }
        return visible;
    }();
    return *all;
}

bool is_device(int ordinal) { return ordinal >= 0 && ordinal < (int)devices().size(); }

CUcontext context_of(int ordinal) {
    static auto* contexts = [] {
        auto* all = new std::vector<CUctx_st>;
        for (int i = 0; i < (int)devices().size(); ++i) all->push_back({i});
        return all;
    }();
    return &(*contexts)[(size_t)ordinal];
}

}   // namespace

int current_device() { return current == nullptr ? -1 : current->ordinal; }
void use_device(int ordinal) { current = context_of(ordinal); }

CUuuid device_uuid(int ordinal) {
    CUuuid uuid = {};
    memcpy(uuid.bytes, "FAKE", 4);
    uuid.bytes[15] = (char)devices()[(size_t)ordinal];
    return uuid;
}

}   // namespace fake

using namespace fake;

// ---- Devices ----

API CUresult cuInit(unsigned flags) {
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    if (devices().empty()) return CUDA_ERROR_NO_DEVICE;
    initialized = true;
    return CUDA_SUCCESS;
}

API CUresult cuDriverGetVersion(int* version) {
    *version = (int)env_number("FAKE_CUDA_VERSION", 13000);
    return CUDA_SUCCESS;
}

bool fake::driver_supports(size_t built_with) {
    int version = 0;
    cuDriverGetVersion(&version);
    return built_with / 1000 <= (size_t)version / 1000;
}

API CUresult cuDeviceGetCount(int* count) {
    if (!initialized) return CUDA_ERROR_NOT_INITIALIZED;
    *count = (int)devices().size();
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGet(CUdevice* device, int ordinal) {
    if (!initialized) return CUDA_ERROR_NOT_INITIALIZED;
    if (!is_device(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    snprintf(name, (size_t)length, "%s", NAME);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    *uuid = device_uuid(device);
    return CUDA_SUCCESS;
}
API CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) { return cuDeviceGetUuid_v2(uuid, device); }

API CUresult cuDeviceGetPCIBusId(char* text, int length, CUdevice device) {
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    snprintf(text, (size_t)length, "0000:%02X:00.0", devices()[(size_t)device] + 1);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice device) {
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    *bytes = (size_t)env_number("FAKE_GPU_MEMORY_MIB", 4096) << 20;
    return CUDA_SUCCESS;
}

// The compute capability, times ten.
int capability() { return (int)env_number("FAKE_GPU_CAPABILITY", 90); }

API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    static const std::unordered_map<unsigned, int> known = {
        {1, 1024},          {2, 1024},        {3, 1024},    {4, 64},            // threads of a block, in all, x, y, z
        {5, 0x7fffffff},    {6, 65535},       {7, 65535},                       // blocks of a grid, x, y, z
        {8, (int)SHARED_BY_DEFAULT},          {97, (int)MOST_SHARED},           // shared memory of a block; opted in
        {81, 228 * 1024},   {74, 1024},                                         // of a multiprocessor; reserved of it
        {9, 65536},         {10, 32},         {12, 65536},  {82, 65536},        // constants, warp, registers
        {13, 1000000},      {16, (int)env_number("FAKE_GPU_MULTIPROCESSORS", 4)},          {39, 2048},   {106, 32},          // clock, multiprocessors, their threads
        {31, 1},            {36, 1000000},    {37, 512},    {38, 32 << 20},     // concurrency, memory clock, bus, L2
        {40, 2},            {41, 1},          {75, capability() / 10}, {76, capability() % 10},   // engines, addressing, capability
        {78, 1},            {90, 1},          {95, 1},      {115, 1},           // priorities, preemption, pools
    };
    const auto found = known.find(attribute);
    *value = found == known.end() ? 0 : found->second;
    if (attribute == 33) *value = devices()[(size_t)device] + 1;   // PCI bus
    return CUDA_SUCCESS;
}

API CUresult cuDeviceComputeCapability(int* major, int* minor, CUdevice device) {
    *major = capability() / 10;
    *minor = capability() % 10;
    return is_device(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

// ---- Contexts: only the primary context of each device ----

API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
    if (!initialized) return CUDA_ERROR_NOT_INITIALIZED;
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    *context = context_of(device);
    return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    return is_device(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
API CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned) {
    return is_device(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
    *flags = 0;
    *active = 1;
    return is_device(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

API CUresult cuCtxSetCurrent(CUcontext context) {
    current = context;
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetCurrent(CUcontext* context) {
    *context = current;
    return CUDA_SUCCESS;
}

API CUresult cuCtxPushCurrent_v2(CUcontext context) { return cuCtxSetCurrent(context); }

API CUresult cuCtxGetDevice(CUdevice* device) {
    *device = current_device();
    return *device < 0 ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}

API CUresult cuCtxSetFlags(unsigned) { return CUDA_SUCCESS; }
API CUresult cuCtxSetLimit(unsigned, size_t) { return CUDA_SUCCESS; }
API CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    if (least != nullptr) *least = 0;
    if (greatest != nullptr) *greatest = -5;
    return CUDA_SUCCESS;
}

API CUresult cuCtxSynchronize() {
    if (current_device() < 0) return CUDA_ERROR_INVALID_CONTEXT;
    if (captured_on(current_device())) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (forbidden_in_capture()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    wait_for_device(current_device(), false);
    return CUDA_SUCCESS;
}

// ---- Modules: the kernels named in an image of the fake NVRTC ----

struct CUfunc_st {
    const shim::Kernel* kernel;
    int ordinal;
    CUmodule module;
    unsigned shared = SHARED_BY_DEFAULT;   // maximum dynamic shared memory of a launch
    bool loaded = false;                   // it was launched before
};

struct CUmod_st {
    int ordinal;
    std::vector<std::string> names;
    std::map<std::string, std::unique_ptr<CUfunc_st>> functions;
};

API CUresult cuModuleLoadData(CUmodule* module, const void* image) {
    if (current_device() < 0) return CUDA_ERROR_INVALID_CONTEXT;
    if (forbidden_in_capture()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (image == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const char* text = (const char*)image;
    if (strncmp(text, IMAGE_MAGIC, strlen(IMAGE_MAGIC)) != 0) return CUDA_ERROR_INVALID_IMAGE;
    auto loaded = std::make_unique<CUmod_st>();
    loaded->ordinal = current_device();
    for (text = strchr(text, '\n'); text != nullptr && text[1] != 0; text = strchr(text + 1, '\n')) {
        loaded->names.emplace_back(text + 1, strcspn(text + 1, "\n"));
    }
    *module = loaded.release();
    return CUDA_SUCCESS;
}

API CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned, CUjit_option*, void**) {
    return cuModuleLoadData(module, image);
}

API CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
    if (module == nullptr || name == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard lock(driver_state().mutex);
    auto& known = module->functions[name];
    if (known == nullptr) {
        bool compiled = false;
        for (const auto& other : module->names) compiled = compiled || other == name;
        const shim::Kernel* kernel = compiled ? shim::find(name) : nullptr;
        if (kernel == nullptr) return CUDA_ERROR_NOT_FOUND;
        known.reset(new CUfunc_st{kernel, module->ordinal, module});
    }
    *function = known.get();
    return CUDA_SUCCESS;
}

API CUresult cuModuleUnload(CUmodule module) {
    if (forbidden_in_capture()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    wait_for_device(module->ordinal, false);
    delete module;
    return CUDA_SUCCESS;
}

API CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction function) {
    const int values[] = {(int)function->kernel->bounds, 0, 0, 0, 32, 90, 90, 0, (int)function->shared};
    *value = attribute < 9 ? values[attribute] : 0;
    return CUDA_SUCCESS;
}

API CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    if (attribute != 8) return CUDA_SUCCESS;
    if (value < 0 || value > (int)MOST_SHARED) return CUDA_ERROR_INVALID_VALUE;
    function->shared = (unsigned)value;
    return CUDA_SUCCESS;
}

API CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }

API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, CUfunction, int threads, size_t shared,
                                                                  unsigned) {
    if (threads <= 0 || threads > 1024) return CUDA_ERROR_INVALID_VALUE;
    const int by_threads = 2048 / ((threads + 31) / 32 * 32), by_memory = (int)(228 * 1024 / (shared + 1024));
    *blocks = by_threads < by_memory ? by_threads : by_memory;
    return CUDA_SUCCESS;
}
API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction function, int threads, size_t shared) {
    return cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, shared, 0);
}

// ---- Launches ----

namespace {

// A copy of a kernel's arguments at the time of the launch, each at a multiple of 16 bytes.
struct Arguments {
    struct alignas(16) Unit {
        uint64_t words[2];
    };
    std::vector<Unit> units;
    const shim::Kernel* kernel;

    Arguments(const shim::Kernel& of, void** given) : kernel(&of) {
        size_t count = 0;
        for (unsigned i = 0; i < of.arguments; ++i) count += units_of(i);
        units.resize(count);
        each([&](unsigned i, unsigned char* at) { memcpy(at, given[i], kernel->sizes[i]); });
    }

    // The arguments as the kernel gets them: with addresses that the CPU can use, wherever a structure has one.
    std::vector<void*> translate() {
        std::vector<void*> pointers;
        each([&](unsigned i, unsigned char* at) {
            auto* words = (uint64_t*)at;
            for (unsigned word = 0; word < kernel->sizes[i] / 8; ++word) {
                words[word] = kernel_argument(words[word], kernel->name);
            }
            pointers.push_back(at);
        });
        return pointers;
    }

  private:
    size_t units_of(unsigned argument) const { return (kernel->sizes[argument] + sizeof(Unit) - 1) / sizeof(Unit); }

    template <class Action>
    void each(Action action) {
        Unit* at = units.data();
        for (unsigned i = 0; i < kernel->arguments; at += units_of(i++)) action(i, (unsigned char*)at);
    }
};

bool lazy_loading() {
    static const bool lazy = env_number("FAKE_CUDA_LAZY_LOADING", 1) != 0;
    return lazy;
}

CUresult check_launch(const CUfunc_st& function, dim3 blocks, dim3 threads, unsigned shared) {
    const uint64_t count = (uint64_t)threads.x * threads.y * threads.z;
    if (count == 0 || count > 1024 || threads.z > 64) return CUDA_ERROR_INVALID_VALUE;
    if (blocks.x == 0 || blocks.y == 0 || blocks.z == 0) return CUDA_ERROR_INVALID_VALUE;
    if (blocks.x > 0x7fffffff || blocks.y > 65535 || blocks.z > 65535) return CUDA_ERROR_INVALID_VALUE;
    if (shared > function.shared) return CUDA_ERROR_INVALID_VALUE;
    if (count > function.kernel->bounds) return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
    return CUDA_SUCCESS;
}

}   // namespace

API CUresult cuLaunchKernel(CUfunction function, unsigned blocks_x, unsigned blocks_y, unsigned blocks_z,
                            unsigned threads_x, unsigned threads_y, unsigned threads_z, unsigned shared,
                            CUstream stream, void** given, void** extra) {
    if (function == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    const dim3 blocks{blocks_x, blocks_y, blocks_z}, threads{threads_x, threads_y, threads_z};
    if (current_device() != function->ordinal) return CUDA_ERROR_INVALID_HANDLE;
    if (const CUresult result = check_launch(*function, blocks, threads, shared)) return result;
    if (extra != nullptr) return CUDA_ERROR_NOT_SUPPORTED;
    if (given == nullptr && function->kernel->arguments > 0) return CUDA_ERROR_INVALID_VALUE;
    if (!is_default(stream)) {
        std::lock_guard lock(driver_state().mutex);
        const bool known = driver_state().streams.count(stream) != 0;
        if (!known || stream->ordinal != function->ordinal) return CUDA_ERROR_INVALID_HANDLE;
        if (stream->capture == nullptr) {
            function->loaded = true;
            count(Count::Kernels);
        } else if (!function->loaded && lazy_loading()) {
            fprintf(stderr, "FAKE GPU: the first launch of a kernel loads it, which a capture forbids: %s\n",
                    function->kernel->name);
            stream->capture->invalid = true;
            return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    }
    const Arguments arguments(*function->kernel, given);
    return enqueue(stream, [blocks, threads, shared, arguments] {
        if (is_idle()) return;
        Arguments own = arguments;   // a graph runs this again
        shim::launch(*own.kernel, blocks, threads, shared, own.translate().data());
    });
}

// ---- Errors and look-ups ----

namespace {

const char* name_of(CUresult result) {
#define NAMED(error) \
    case error: return #error
    switch (result) {
        NAMED(CUDA_SUCCESS);
        NAMED(CUDA_ERROR_INVALID_VALUE);
        NAMED(CUDA_ERROR_OUT_OF_MEMORY);
        NAMED(CUDA_ERROR_NOT_INITIALIZED);
        NAMED(CUDA_ERROR_NO_DEVICE);
        NAMED(CUDA_ERROR_INVALID_DEVICE);
        NAMED(CUDA_ERROR_INVALID_IMAGE);
        NAMED(CUDA_ERROR_INVALID_CONTEXT);
        NAMED(CUDA_ERROR_INVALID_HANDLE);
        NAMED(CUDA_ERROR_ILLEGAL_STATE);
        NAMED(CUDA_ERROR_NOT_FOUND);
        NAMED(CUDA_ERROR_NOT_READY);
        NAMED(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
        NAMED(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
        NAMED(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
        NAMED(CUDA_ERROR_NOT_PERMITTED);
        NAMED(CUDA_ERROR_NOT_SUPPORTED);
        NAMED(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        NAMED(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        NAMED(CUDA_ERROR_STREAM_CAPTURE_MERGE);
        NAMED(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
        NAMED(CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
        NAMED(CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
        NAMED(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
        NAMED(CUDA_ERROR_CAPTURED_EVENT);
        NAMED(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
        default: return nullptr;
    }
#undef NAMED
}

}   // namespace

API CUresult cuGetErrorName(CUresult result, const char** name) {
    *name = name_of(result);
    return *name == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

API CUresult cuGetErrorString(CUresult result, const char** text) {
    static thread_local char words[96];
    const char* name = name_of(result);
    snprintf(words, sizeof words, "%s (from the fake driver)", name == nullptr ? "unknown error" : name);
    *text = words;
    return name == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

API CUresult cuGetProcAddress_v2(const char* name, void** function, int, cuuint64_t,
                                 CUdriverProcAddressQueryResult* found) {
    Dl_info self;
    dladdr((void*)cuInit, &self);
    void* library = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    *function = nullptr;
    for (const char* version : {"_v2", ""}) {
        if (*function == nullptr) *function = dlsym(library, (std::string(name) + version).c_str());
    }
    dlclose(library);
    if (found != nullptr) {
        *found = *function == nullptr ? CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND : CU_GET_PROC_ADDRESS_SUCCESS;
    }
    return *function == nullptr ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}
