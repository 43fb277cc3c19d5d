// NVRTC: "compiles" a source to a list of its entry points, for the fake driver only.
//
// The kernels themselves were compiled with the fakes; see shim.h. The image changes with the source, so caches of
// images work as with the real compiler. A source with `#error` outside of conditions does not compile.
//
//   FAKE_NVRTC_MAJOR=12   its version is 12.0 instead of 13.0
#include "fake_cuda.h"

#include <cstring>

enum nvrtcResult : unsigned {
    NVRTC_SUCCESS = 0,
    NVRTC_ERROR_INVALID_INPUT = 3,
    NVRTC_ERROR_INVALID_PROGRAM = 4,
    NVRTC_ERROR_INVALID_OPTION = 5,
    NVRTC_ERROR_COMPILATION = 6,
};

struct _nvrtcProgram {
    std::string source, name, log, image, architecture;
};
typedef _nvrtcProgram* nvrtcProgram;

namespace {

constexpr int ARCHITECTURES[] = {75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121};

bool is_name_letter(char letter) { return isalnum((unsigned char)letter) != 0 || letter == '_'; }

// The lines after the magic: the architecture, a hash of the source, then one entry point per line.
std::string image_of(const std::string& source, const std::string& architecture) {
    uint64_t hash = 0xcbf29ce484222325;
    for (const char letter : source) hash = (hash ^ (unsigned char)letter) * 0x100000001b3;
    char line[64];
    snprintf(line, sizeof line, "%s %s %016llx\n", fake::IMAGE_MAGIC, architecture.c_str(), (unsigned long long)hash);
    std::string image = line;
    for (const std::string opening : {"KERNEL(", "KERNEL_BOUNDS(", "KERNEL_BLOCKS("}) {
        for (size_t at = source.find(opening); at != std::string::npos; at = source.find(opening, at + 1)) {
            size_t end = at + opening.size();
            while (end < source.size() && is_name_letter(source[end])) ++end;
            image += source.substr(at + opening.size(), end - at - opening.size()) + "\n";
        }
    }
    return image;
}

nvrtcResult copy(const std::string& text, char* to) {
    memcpy(to, text.c_str(), text.size() + 1);
    return NVRTC_SUCCESS;
}

bool says_error(const std::string& source) {
    return source.rfind("#error", 0) == 0 || source.find("\n#error") != std::string::npos;
}

}   // namespace

API nvrtcResult nvrtcVersion(int* major, int* minor) {
    *major = (int)fake::env_number("FAKE_NVRTC_MAJOR", 13);
    *minor = 0;
    return NVRTC_SUCCESS;
}

API nvrtcResult nvrtcGetNumSupportedArchs(int* count) {
    *count = (int)(sizeof ARCHITECTURES / sizeof *ARCHITECTURES);
    return NVRTC_SUCCESS;
}

API nvrtcResult nvrtcGetSupportedArchs(int* architectures) {
    memcpy(architectures, ARCHITECTURES, sizeof ARCHITECTURES);
    return NVRTC_SUCCESS;
}

API nvrtcResult nvrtcCreateProgram(nvrtcProgram* program, const char* source, const char* name, int, const char* const*,
                                   const char* const*) {
    if (program == nullptr || source == nullptr) return NVRTC_ERROR_INVALID_INPUT;
    *program = new _nvrtcProgram{source, name == nullptr ? "default_program" : name, "", "", ""};
    return NVRTC_SUCCESS;
}

API nvrtcResult nvrtcCompileProgram(nvrtcProgram program, int count, const char* const* options) {
    if (program == nullptr) return NVRTC_ERROR_INVALID_PROGRAM;
    for (int i = 0; i < count; ++i) {
        const std::string option = options[i];
        const size_t value = option.find('=');
        const bool names_it = option.rfind("--gpu-architecture=", 0) == 0 || option.rfind("-arch=", 0) == 0;
        if (names_it) program->architecture = option.substr(value + 1);
        if (option.empty() || option[0] != '-') {
            program->log = "nvrtc: error: unrecognized option " + option + " found\n";
            return NVRTC_ERROR_INVALID_OPTION;
        }
    }
    bool known = false;
    for (const int number : ARCHITECTURES) {
        for (const char* kind : {"sm_", "compute_"}) {
            const std::string plain = kind + std::to_string(number);
            known = known || program->architecture == plain || program->architecture == plain + "a";
        }
    }
    if (!known) {
        program->log = "nvrtc: error: invalid value for --gpu-architecture (-arch)\n";
        return NVRTC_ERROR_INVALID_OPTION;
    }
    if (says_error(program->source)) {
        program->log = program->name + "(1): catastrophic error: #error directive\n1 catastrophic error detected\n";
        return NVRTC_ERROR_COMPILATION;
    }
    program->image = image_of(program->source, program->architecture);
    return NVRTC_SUCCESS;
}

// A real architecture gives a cubin, a virtual one does not.
API nvrtcResult nvrtcGetCUBINSize(nvrtcProgram program, size_t* bytes) {
    if (program == nullptr || program->image.empty()) return NVRTC_ERROR_INVALID_PROGRAM;
    *bytes = program->architecture[0] == 's' ? program->image.size() + 1 : 0;
    return NVRTC_SUCCESS;
}
API nvrtcResult nvrtcGetCUBIN(nvrtcProgram program, char* image) { return copy(program->image, image); }

API nvrtcResult nvrtcGetPTXSize(nvrtcProgram program, size_t* bytes) {
    if (program == nullptr || program->image.empty()) return NVRTC_ERROR_INVALID_PROGRAM;
    *bytes = program->image.size() + 1;
    return NVRTC_SUCCESS;
}
API nvrtcResult nvrtcGetPTX(nvrtcProgram program, char* image) { return copy(program->image, image); }

API nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram program, size_t* bytes) {
    *bytes = program->log.size() + 1;
    return NVRTC_SUCCESS;
}
API nvrtcResult nvrtcGetProgramLog(nvrtcProgram program, char* log) { return copy(program->log, log); }

API nvrtcResult nvrtcDestroyProgram(nvrtcProgram* program) {
    if (program == nullptr || *program == nullptr) return NVRTC_ERROR_INVALID_PROGRAM;
    delete *program;
    *program = nullptr;
    return NVRTC_SUCCESS;
}

API const char* nvrtcGetErrorString(nvrtcResult result) {
    switch (result) {
        case NVRTC_SUCCESS: return "NVRTC_SUCCESS";
        case NVRTC_ERROR_INVALID_INPUT: return "NVRTC_ERROR_INVALID_INPUT";
        case NVRTC_ERROR_INVALID_PROGRAM: return "NVRTC_ERROR_INVALID_PROGRAM";
        case NVRTC_ERROR_INVALID_OPTION: return "NVRTC_ERROR_INVALID_OPTION";
        case NVRTC_ERROR_COMPILATION: return "NVRTC_ERROR_COMPILATION";
        default: return "NVRTC_ERROR unknown";
    }
}
