// NVML: the machine's GPUs, whatever CUDA_VISIBLE_DEVICES says, and the processes that compute on them.
//
//   FAKE_NVML_PROCESSES=1:4242,1:77   processes 4242 and 77 compute on GPU 1
//   FAKE_NVML_READINGS=1:93:61       GPU 1 is 93 % busy and 61 °C warm; the others tell neither
//   FAKE_NVML_NO_DRIVER=1             there is no driver
//   FAKE_NVML_LOST=FILE               the GPUs whose numbers are in the file, if it exists, have fallen off the bus
//
// A call before nvmlInit_v2, or after as many calls of nvmlShutdown, fails as with the real library, and so does a handle
// that is not one of a device.
#include "fake_cuda.h"
#include "shim.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

using namespace fake;

namespace {

enum nvmlReturn : unsigned {
    NVML_SUCCESS = 0,
    NVML_ERROR_UNINITIALIZED = 1,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_SUPPORTED = 3,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7,
    NVML_ERROR_DRIVER_NOT_LOADED = 9,
    NVML_ERROR_GPU_IS_LOST = 15,
};

struct nvmlProcessInfo {
    unsigned pid;
    unsigned long long usedGpuMemory;
    unsigned gpuInstanceId;
    unsigned computeInstanceId;
};

struct nvmlDevice {
    int index;
};

std::atomic<int> initialized{0};

std::vector<nvmlDevice>& all() {
    static auto* devices = [] {
        auto* list = new std::vector<nvmlDevice>;
        for (int i = 0; i < (int)env_number("FAKE_GPU_COUNT", 2); ++i) list->push_back({i});
        return list;
    }();
    return *devices;
}

bool is_device(const nvmlDevice* device) {
    return device != nullptr && device >= all().data() && device < all().data() + all().size();
}

std::string uuid_of(const nvmlDevice& device) {
    char uuid[48];
    snprintf(uuid, sizeof uuid, "GPU-46414b45-0000-0000-0000-%012x", (unsigned)device.index);
    return uuid;
}

std::vector<unsigned> processes_on(int index) {
    std::vector<unsigned> pids;
    const char* list = getenv("FAKE_NVML_PROCESSES");
    for (const char* at = list == nullptr ? "" : list; *at != 0;) {
        int device = 0;
        unsigned pid = 0;
        if (sscanf(at, "%d:%u", &device, &pid) == 2 && device == index) pids.push_back(pid);
        at += strcspn(at, ",");
        if (*at == ',') ++at;
    }
    return pids;
}

struct nvmlUtilization {
    unsigned gpu;
    unsigned memory;
};

struct nvmlMemory {
    unsigned long long total;
    unsigned long long free;
    unsigned long long used;
};

// The reading of this GPU: per cent and degrees.
bool reading_of(int index, unsigned* percent, unsigned* degrees) {
    const char* text = getenv("FAKE_NVML_READINGS");
    int device = 0;
    return text != nullptr && sscanf(text, "%d:%u:%u", &device, percent, degrees) == 3 && device == index;
}

bool is_lost(unsigned index) {
    const char* name = getenv("FAKE_NVML_LOST");
    FILE* file = name == nullptr ? nullptr : fopen(name, "r");
    if (file == nullptr) return false;
    bool found = false;
    for (unsigned lost; !found && fscanf(file, "%u", &lost) == 1;) found = lost == index;
    fclose(file);
    return found;
}

}   // namespace

API nvmlReturn nvmlInit_v2() {
    if (env_number("FAKE_NVML_NO_DRIVER", 0) != 0) return NVML_ERROR_DRIVER_NOT_LOADED;
    ++initialized;
    return NVML_SUCCESS;
}

API nvmlReturn nvmlShutdown() {
    if (initialized == 0) return NVML_ERROR_UNINITIALIZED;
    --initialized;
    return NVML_SUCCESS;
}

API const char* nvmlErrorString(nvmlReturn code) {
    switch (code) {
        case NVML_SUCCESS: return "Success";
        case NVML_ERROR_UNINITIALIZED: return "Uninitialized";
        case NVML_ERROR_INVALID_ARGUMENT: return "Invalid Argument";
        case NVML_ERROR_NOT_SUPPORTED: return "Not Supported";
        case NVML_ERROR_NOT_FOUND: return "Not Found";
        case NVML_ERROR_INSUFFICIENT_SIZE: return "Insufficient Size";
        case NVML_ERROR_DRIVER_NOT_LOADED: return "Driver Not Loaded";
        case NVML_ERROR_GPU_IS_LOST: return "GPU is lost";
    }
    return "Unknown Error";
}

API nvmlReturn nvmlDeviceGetCount_v2(unsigned* count) {
    if (initialized == 0) return NVML_ERROR_UNINITIALIZED;
    *count = (unsigned)all().size();
    return NVML_SUCCESS;
}

API nvmlReturn nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice** device) {
    if (initialized == 0) return NVML_ERROR_UNINITIALIZED;
    if (index >= all().size()) return NVML_ERROR_INVALID_ARGUMENT;
    if (is_lost(index)) return NVML_ERROR_GPU_IS_LOST;
    *device = &all()[index];
    return NVML_SUCCESS;
}

API nvmlReturn nvmlDeviceGetHandleByUUID(const char* uuid, nvmlDevice** device) {
    if (initialized == 0) return NVML_ERROR_UNINITIALIZED;
    for (nvmlDevice& candidate : all()) {
        if (uuid_of(candidate) == uuid) {
            *device = &candidate;
            return NVML_SUCCESS;
        }
    }
    return NVML_ERROR_NOT_FOUND;
}

API nvmlReturn nvmlDeviceGetUUID(nvmlDevice* device, char* uuid, unsigned length) {
    if (initialized == 0) return NVML_ERROR_UNINITIALIZED;
    if (!is_device(device)) return NVML_ERROR_INVALID_ARGUMENT;
    const std::string text = uuid_of(*device);
    if (length <= text.size()) return NVML_ERROR_INSUFFICIENT_SIZE;
    memcpy(uuid, text.c_str(), text.size() + 1);
    return NVML_SUCCESS;
}

API nvmlReturn nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice* device, unsigned* count, nvmlProcessInfo* infos) {
    if (initialized == 0) return NVML_ERROR_UNINITIALIZED;
    if (!is_device(device) || count == nullptr) return NVML_ERROR_INVALID_ARGUMENT;
    const std::vector<unsigned> pids = processes_on(device->index);
    const unsigned room = *count;
    *count = (unsigned)pids.size();
    if (pids.size() > room) return NVML_ERROR_INSUFFICIENT_SIZE;
    for (size_t i = 0; i < pids.size(); ++i) infos[i] = {pids[i], 0, 0xffffffffu, 0xffffffffu};
    return NVML_SUCCESS;
}

API nvmlReturn nvmlDeviceGetName(nvmlDevice* device, char* name, unsigned length) {
    if (initialized == 0) return NVML_ERROR_UNINITIALIZED;
    if (!is_device(device)) return NVML_ERROR_INVALID_ARGUMENT;
    if (snprintf(name, length, "Fake GPU") >= (int)length) return NVML_ERROR_INSUFFICIENT_SIZE;
    return NVML_SUCCESS;
}

API nvmlReturn nvmlDeviceGetMemoryInfo(nvmlDevice* device, nvmlMemory* memory) {
    if (initialized == 0) return NVML_ERROR_UNINITIALIZED;
    if (!is_device(device)) return NVML_ERROR_INVALID_ARGUMENT;
    *memory = {8ull << 30, 6ull << 30, 2ull << 30};
    return NVML_SUCCESS;
}

API nvmlReturn nvmlDeviceGetUtilizationRates(nvmlDevice* device, nvmlUtilization* rates) {
    if (initialized == 0) return NVML_ERROR_UNINITIALIZED;
    if (!is_device(device)) return NVML_ERROR_INVALID_ARGUMENT;
    unsigned degrees = 0;
    return reading_of(device->index, &rates->gpu, &degrees) ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

API nvmlReturn nvmlDeviceGetTemperature(nvmlDevice* device, unsigned sensor, unsigned* degrees) {
    if (initialized == 0) return NVML_ERROR_UNINITIALIZED;
    if (!is_device(device) || sensor != 0) return NVML_ERROR_INVALID_ARGUMENT;
    unsigned percent = 0;
    return reading_of(device->index, &percent, degrees) ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}
