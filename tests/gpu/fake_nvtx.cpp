// A profiler that records ranges, for programs that are started with NVTX_INJECTION64_PATH=this object.
//
// FAKE_NVTX_TRACE=FILE: appends a line for each range when it ends: `RANK DOMAIN DEPTH NAME [PAYLOAD]`. Ends the process if a thread
// ends a range that it has not begun.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace {

// The types of nvtxTypes.h and nvToolsExt.h.
struct Attributes {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, reserved;
    uint64_t payload;
    int32_t message_type;
    const char* message;
};
using Function = void (*)();
struct Callbacks {
    size_t size;
    int (*function_table)(unsigned module, Function*** table, unsigned* size);
};
struct VersionInfo {
    size_t size;
    uint32_t version, reserved;
    void (*set_tool_version)(uint32_t);
};
constexpr unsigned CORE2 = 5, PUSH = 4, POP = 5, CREATE = 12;

struct Domain {
    std::string name;
};

thread_local std::vector<std::string> open_ranges;

[[noreturn]] void misused(const char* why) {
    fprintf(stderr, "FAKE NVTX: %s\n", why);
    abort();
}

void* create(const char* name) { return new Domain{name}; }

int push(void* domain, const Attributes* attributes) {
    if (domain == nullptr) misused("a range has no domain");
    if (attributes->version != 3 || attributes->size != sizeof(Attributes)) misused("attributes of another version");
    if (attributes->message_type != 1 || attributes->message == nullptr) misused("a range has no name");
    std::string name = attributes->message;
    if (attributes->payload_type == 1) name += " [" + std::to_string(attributes->payload) + "]";
    open_ranges.push_back(name);
    return (int)open_ranges.size() - 1;
}

int pop(void* domain) {
    if (open_ranges.empty()) misused("a range ends that has not begun on this thread");
    const std::string name = open_ranges.back();
    open_ranges.pop_back();
    const char *path = getenv("FAKE_NVTX_TRACE"), *rank = getenv("RANK");
    if (path == nullptr) return (int)open_ranges.size();
    static std::mutex mutex;
    std::lock_guard lock(mutex);
    if (FILE* file = fopen(path, "a")) {
        // One write: other ranks append to the file, too.
        const std::string line = std::string(rank == nullptr ? "-" : rank) + " " + ((Domain*)domain)->name + " " +
                                 std::to_string(open_ranges.size()) + " " + name + "\n";
        fwrite(line.data(), 1, line.size(), file);
        fclose(file);
    }
    return (int)open_ranges.size();
}

}   // namespace

API int InitializeInjectionNvtx2(const void* (*export_table)(uint32_t)) {
    const auto* callbacks = (const Callbacks*)export_table(1);
    const auto* version = (const VersionInfo*)export_table(3);
    if (callbacks == nullptr || callbacks->size < sizeof(Callbacks) || version == nullptr || version->version < 2) return 0;
    version->set_tool_version(3);
    // A profiler attaches to every module that there is.
    for (unsigned module = 1; module <= 6; ++module) {
        Function** table = nullptr;
        unsigned size = 0;
        if (!callbacks->function_table(module, &table, &size) || table == nullptr) return 0;
        if (module != CORE2) continue;
        if (size <= CREATE) return 0;
        *table[PUSH] = (Function)push;
        *table[POP] = (Function)pop;
        *table[CREATE] = (Function)create;
    }
    return 1;
}
