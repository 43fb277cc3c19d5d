// The functions of cuDNN that the project uses, as strict as its documentation: descriptors of the wrong kind,
// extents that do not fit, unsupported combinations of dtypes, and workspaces that are too small are errors;
// workspaces are overwritten, as by a real algorithm. All algorithms are the same loops. As in the real library, only
// the first two of each pass support channels last, and the first one of each backward pass is nondeterministic; it
// reports itself on standard error when it runs.
//
//   FAKE_CUDNN_WIDE_GRADIENT=1   the gradient of weights may be f32 with bfloat16 operands
//   FAKE_CUDNN_FUSED=0           no fused bias and activation
//   FAKE_CUDNN_WRONG=1           forward results are wrong by a factor; 2: only the one in the middle is wrong
//   FAKE_CUDNN_FILTER_WRONG=1    gradients of weights are wrong by a factor
//   FAKE_CUDNN_COST=1            the algorithms differ in speed: see `cost`
//   FAKE_CUDNN_CREATE=0          cudnnCreate fails
//   FAKE_CUDNN_CUDA=12080        built with CUDA 12.8; cudnnCreate fails if the driver is of an older major version

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "fake_cuda.h"
#include "fake_numbers.h"

namespace {

using fake::TensorView;

enum Status : unsigned {
    SUCCESS = 0,
    NOT_INITIALIZED = 1001,
    BAD_PARAM = 2000,
    NULL_POINTER = 2002,
    MISALIGNED_POINTER = 2003,
    SIZE_INSUFFICIENT = 2006,
    SHAPE_MISMATCH = 2008,
    DESCRIPTOR_TYPE = 2012,
    NOT_SUPPORTED = 3000,
    NOT_SUPPORTED_DATA_TYPE = 3003,
    NOT_SUPPORTED_LAYOUT = 3004,
    EXECUTION_FAILED = 5000,
};

enum : int { FLOAT = 0, HALF = 2, BFLOAT16 = 9 };

fake::Stored stored_as(int type) {
    return type == HALF ? fake::Stored::F16 : type == BFLOAT16 ? fake::Stored::Bf16 : fake::Stored::F32;
}

enum : int { NHWC = 1 };
enum : int { CROSS_CORRELATION = 1 };
enum : int { DEFAULT_MATH = 0, TENSOR_OP_MATH = 1, FMA_MATH = 3 };
enum : int { RELU = 1, IDENTITY = 5 };
enum : int { IMPLICIT_PRECOMP_GEMM = 1 };

enum class Kind { Tensor = 71, Filter, Convolution, Activation, Handle, Destroyed };

struct Object {
    Kind kind;
    bool set = false;
};

struct Tensor : Object {
    int type, n, c, h, w;   // n of a filter is its number of output channels
    size_t len() const { return size_t(n) * c * h * w; }
};

struct Convolution : Object {
    int pad, math;
};

struct Activation : Object {
    int mode;
    bool keeps_nan;
};

struct Handle : Object {
    int ordinal;
    CUstream stream;
};

template <class T>
T* of(void* raw, Kind kind) {
    T* object = static_cast<T*>(raw);
    return object && object->kind == kind && object->set ? object : nullptr;
}

template <class T>
Status create(void** place, Kind kind) {
    if (!place) return NULL_POINTER;
    T* object = new T();
    object->kind = kind;
    *place = object;
    return SUCCESS;
}

template <class T>
Status destroy(void* raw, Kind kind) {
    T* object = static_cast<T*>(raw);
    if (!object || object->kind != kind) return DESCRIPTOR_TYPE;
    object->kind = Kind::Destroyed;
    delete object;
    return SUCCESS;
}

// One convolution: the tensors of its forward pass, for any pass.
struct Layer {
    Tensor x, w, y;
    Convolution convolution;

    // The gradient of weights may have another dtype.
    Status check() const {
        if (w.c != x.c || w.n != y.c || w.h != w.w || y.n != x.n) return SHAPE_MISMATCH;
        const int grown = 2 * convolution.pad + 1 - w.h;
        if (y.h != x.h + grown || y.w != x.w + grown || y.h < 1 || y.w < 1) return SHAPE_MISMATCH;
        if (x.type != y.type) return NOT_SUPPORTED_DATA_TYPE;
        const bool wide = w.type == FLOAT && fake::env_number("FAKE_CUDNN_WIDE_GRADIENT", 0);
        if (w.type != x.type && !wide) return NOT_SUPPORTED_DATA_TYPE;
        if (x.type != FLOAT && convolution.math == FMA_MATH) return NOT_SUPPORTED;
        return SUCCESS;
    }

    // Calls `visit(y, w, x)` for every output pixel and every tap, with the offsets of the first channel of each; for
    // `w`, in the first filter.
    template <class Visit>
    void taps(Visit visit) const {
        for (int n = 0; n < y.n; ++n)
            for (int i = 0; i < y.h; ++i)
                for (int j = 0; j < y.w; ++j)
                    for (int u = 0; u < w.h; ++u)
                        for (int v = 0; v < w.w; ++v) {
                            const int row = i + u - convolution.pad, column = j + v - convolution.pad;
                            if (row < 0 || row >= x.h || column < 0 || column >= x.w) continue;
                            const size_t from = ((size_t(n) * x.h + row) * x.w + column) * x.c;
                            const size_t to = ((size_t(n) * y.h + i) * y.w + j) * y.c;
                            visit(to, (size_t(u) * w.w + v) * x.c, from);
                        }
    }
    size_t filter() const { return size_t(w.h) * w.w * w.c; }
};

enum class Pass { Forward, BackwardData, BackwardFilter };

struct Algorithm {
    int number;
    bool deterministic;
    bool channels_last;
};

// The algorithms of a pass in the order of their numbers, which differ in meaning. Forward: implicit GEMM, with
// precomputed indices, GEMM, direct, FFT, in tiles, Winograd in one and in several kernels. Gradient of the input: 0
// (adds with atomics), 1, FFT, in tiles, Winograd twice. Gradient of the weights: 0 (atomics), 1, FFT, 3 (atomics),
// Winograd in several kernels, FFT in tiles.
const std::vector<Algorithm>& algorithms_of(Pass pass) {
    static const std::vector<Algorithm> forward = {{0, true, true},  {1, true, true},  {2, true, false}, {3, true, false},
                                                   {4, true, false}, {5, true, false}, {6, true, false}, {7, true, false}};
    static const std::vector<Algorithm> data = {{0, false, true}, {1, true, true},  {2, true, false},
                                                {3, true, false}, {4, true, false}, {5, true, false}};
    static const std::vector<Algorithm> filter = {{0, false, true},  {1, true, true},  {2, true, false},
                                                  {3, false, false}, {5, true, false}, {6, true, false}};
    return pass == Pass::Forward ? forward : pass == Pass::BackwardData ? data : filter;
}

// All tensors have their channels last here.
const Algorithm* supported(Pass pass, int number) {
    for (const Algorithm& algorithm : algorithms_of(pass))
        if (algorithm.number == number && algorithm.channels_last) return &algorithm;
    return nullptr;
}

// Milliseconds by which an algorithm is slower than the loops are. Of the forward algorithms the one with precomputed
// indices is the better one for deep sums, gradients of the input are slower than the transposed convolution, and a
// gradient of weights in f32 from bfloat16 operands is slower than one in bfloat16.
int cost(Pass pass, const Layer& layer, int number) {
    const bool deep = layer.w.h * layer.w.w * layer.w.c >= 64;
    switch (pass) {
    case Pass::Forward: return number == (deep ? 1 : 0) ? 0 : 8;
    case Pass::BackwardData: return number == 0 ? 4 : 8;
    default: return (number == 0 ? 4 : 0) + (layer.w.type != layer.x.type ? 8 : 0);
    }
}

void wait(int milliseconds) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds);
    while (std::chrono::steady_clock::now() < end) {}
}

// Workspace sizes differ between algorithms.
size_t workspace_of(const Layer& layer, int number) { return number == 0 ? 0 : layer.w.len() * number + 100; }

struct ConvolutionWork {
    Pass pass;
    int number = 0;
    Layer layer;
    TensorView from, by, to;
    float alpha, beta;
    void* workspace = nullptr;
    size_t workspace_size = 0;
    const void* bias = nullptr;
    bool relu = false, keeps_nan = false;

    TensorView x() const { return pass == Pass::BackwardData ? to : from; }
    TensorView w() const { return pass == Pass::Forward ? by : pass == Pass::BackwardData ? from : to; }
    TensorView y() const { return pass == Pass::Forward ? to : by; }

    const Tensor& result() const { return pass == Pass::Forward ? layer.y : pass == Pass::BackwardData ? layer.x : layer.w; }

    void operator()() const {
        const char* user = "cuDNN's convolution";
        ConvolutionWork own = *this;
        own.from = from.on_host((pass == Pass::BackwardData ? layer.w : layer.x).len(), user);
        own.by = by.on_host((pass == Pass::Forward ? layer.w : layer.y).len(), user);
        own.to = to.on_host(result().len(), user);
        own.workspace = fake::device_bytes((CUdeviceptr)workspace, workspace_size, user);
        const size_t bias_size = bias ? layer.y.c * (result().type == FLOAT ? 4 : 2) : 0;
        own.bias = fake::device_bytes((CUdeviceptr)bias, bias_size, user);
        own.compute();
    }

    // With addresses of the host.
    void compute() const {
        if (fake::env_number("FAKE_CUDNN_COST", 0)) wait(cost(pass, layer, number));
        if (workspace_size) std::memset(workspace, 0xff, workspace_size);
        const Tensor& result = this->result();
        std::vector<float> sums(result.len(), 0.0f);
        const bool tf32 = layer.x.type == FLOAT && layer.convolution.math != FMA_MATH;
        const size_t filters = layer.w.n, channels = layer.w.c, filter = layer.filter();
        std::vector<float> x, w, y;
        if (pass != Pass::BackwardData) x = operands(this->x(), layer.x.len(), tf32);
        if (pass != Pass::BackwardFilter) w = operands(this->w(), layer.w.len(), tf32);
        if (pass != Pass::Forward) y = operands(this->y(), layer.y.len(), tf32);
        if (pass == Pass::Forward) {
            // Filters are the fastest index.
            std::vector<float> transposed(w.size());
            for (size_t at = 0; at < w.size(); ++at) transposed[at % filter * filters + at / filter] = w[at];
            w = transposed;
        }
        layer.taps([&](size_t to, size_t tap, size_t from) {
            if (pass == Pass::Forward) {
                for (size_t c = 0; c < channels; ++c) fake::add(&sums[to], &w[(tap + c) * filters], x[from + c], filters);
            } else if (pass == Pass::BackwardData) {
                for (size_t f = 0; f < filters; ++f) fake::add(&sums[from], &w[f * filter + tap], y[to + f], channels);
            } else {
                for (size_t f = 0; f < filters; ++f) fake::add(&sums[f * filter + tap], &x[from], y[to + f], channels);
            }
        });
        const char* fault = pass == Pass::BackwardFilter ? "FAKE_CUDNN_FILTER_WRONG" : "FAKE_CUDNN_WRONG";
        const long kind = pass == Pass::BackwardData ? 0 : fake::env_number(fault, 0);
        const float wrong = kind == 1 ? 1.5f : 1.0f;
        for (size_t at = 0; at < sums.size(); ++at) {
            float value = alpha * wrong * sums[at] + (beta == 0.0f ? 0.0f : beta * to.read(at));
            if (bias) value += TensorView{const_cast<void*>(bias), stored_as(result.type)}.read(at % (layer.y.c));
            if (relu && !(value > 0.0f) && !(keeps_nan && std::isnan(value))) value = 0.0f;
            if (kind == 2 && at == sums.size() / 2) value += 4.0f;
            to.write(at, value);
        }
    }
};

Status check_addresses(const ConvolutionWork& run, size_t needed) {
    for (const void* address : {run.from.address, run.by.address, run.to.address}) {
        if (!address) return NULL_POINTER;
        if (reinterpret_cast<uintptr_t>(address) % 16) return MISALIGNED_POINTER;
    }
    if (run.workspace_size < needed || (needed && !run.workspace)) return SIZE_INSUFFICIENT;
    if (needed && reinterpret_cast<uintptr_t>(run.workspace) % 16) return MISALIGNED_POINTER;
    return SUCCESS;
}

Status start(Handle* handle, const ConvolutionWork& run, int number) {
    const Algorithm* algorithm = supported(run.pass, number);
    if (!algorithm) return NOT_SUPPORTED;
    ConvolutionWork exact = run;
    exact.number = number;
    exact.workspace_size = workspace_of(run.layer, number);
    if (const Status status = check_addresses(run, exact.workspace_size)) return status;
    if (handle->ordinal != fake::current_device()) return EXECUTION_FAILED;
    if (!algorithm->deterministic) std::fprintf(stderr, "fake cuDNN: algorithm %d is not deterministic\n", number);
    return fake::enqueue(handle->stream, exact) == CUDA_SUCCESS ? SUCCESS : EXECUTION_FAILED;
}

// The layer of these descriptors; `from`, `by` and `to` are in the order of the pass.
Status layer_of(Pass pass, void* from, void* by, void* convolution, void* to, Layer& layer) {
    void* x = pass == Pass::BackwardData ? to : from;
    void* w = pass == Pass::Forward ? by : pass == Pass::BackwardData ? from : to;
    void* y = pass == Pass::Forward ? to : by;
    const Tensor *xs = of<Tensor>(x, Kind::Tensor), *ws = of<Tensor>(w, Kind::Filter), *ys = of<Tensor>(y, Kind::Tensor);
    const Convolution* c = of<Convolution>(convolution, Kind::Convolution);
    if (!xs || !ws || !ys || !c) return DESCRIPTOR_TYPE;
    layer = Layer{*xs, *ws, *ys, *c};
    if (pass != Pass::BackwardFilter && ws->type != xs->type) return NOT_SUPPORTED_DATA_TYPE;
    return layer.check();
}

ConvolutionWork prepare(Pass pass, const Layer& layer, const void* from, const void* by, void* to) {
    auto numbers = [&](const void* address, bool is_w) {
        return TensorView{const_cast<void*>(address), stored_as(is_w ? layer.w.type : layer.x.type)};
    };
    ConvolutionWork run{pass, 0, layer, numbers(from, pass == Pass::BackwardData), numbers(by, pass == Pass::Forward),
            numbers(to, pass == Pass::BackwardFilter), 1.0f, 0.0f};
    return run;
}

struct Timing {
    int algorithm;
    unsigned status;
    float milliseconds;
    size_t memory;
    int deterministic, math;
    int reserved[3];
};

Status rank(
    Pass pass, void* raw, void* from, void* by, void* convolution, void* to, int wanted, int* count, Timing* timings
) {
    Handle* handle = of<Handle>(raw, Kind::Handle);
    if (!handle) return NOT_INITIALIZED;
    if (!count || !timings || wanted < 1) return BAD_PARAM;
    Layer layer;
    if (const Status status = layer_of(pass, from, by, convolution, to, layer)) return status;
    // First the supported algorithms in the order of their expected times, for both math types; then the others.
    std::vector<Timing> all;
    for (int math : {layer.convolution.math, int(DEFAULT_MATH)}) {
        for (const Algorithm& algorithm : algorithms_of(pass)) {
            const int number = algorithm.number;
            const bool known = algorithm.channels_last;
            all.push_back(Timing{number, known ? SUCCESS : NOT_SUPPORTED, known ? 0.01f * float(1 + cost(pass, layer, number)) : -1.0f,
                                 known ? workspace_of(layer, number) : 0, algorithm.deterministic, math, {}});
        }
        if (math == DEFAULT_MATH) break;
    }
    std::stable_sort(all.begin(), all.end(), [](const Timing& a, const Timing& b) {
        return a.status != b.status ? a.status < b.status : a.milliseconds < b.milliseconds;
    });
    *count = std::min(wanted, int(all.size()));
    std::copy_n(all.begin(), *count, timings);
    return SUCCESS;
}

Status workspace_size(Pass pass, void* handle, void* from, void* by, void* convolution, void* to, int number, size_t* bytes) {
    if (!of<Handle>(handle, Kind::Handle)) return NOT_INITIALIZED;
    if (!bytes) return NULL_POINTER;
    Layer layer;
    if (const Status status = layer_of(pass, from, by, convolution, to, layer)) return status;
    if (!supported(pass, number)) return NOT_SUPPORTED;
    *bytes = workspace_of(layer, number);
    return SUCCESS;
}

Status convolve(
    Pass pass, void* raw, const float* alpha, void* from_descriptor, const void* from, void* by_descriptor, const void* by,
    void* convolution, int number, void* workspace, size_t size, const float* beta, void* to_descriptor, void* to,
    const void* bias = nullptr, const Activation* activation = nullptr
) {
    Handle* handle = of<Handle>(raw, Kind::Handle);
    if (!handle) return NOT_INITIALIZED;
    if (!alpha || !beta) return NULL_POINTER;
    Layer layer;
    if (const Status status = layer_of(pass, from_descriptor, by_descriptor, convolution, to_descriptor, layer)) return status;
    ConvolutionWork run = prepare(pass, layer, from, by, to);
    run.alpha = *alpha;
    run.beta = *beta;
    run.workspace = workspace;
    run.workspace_size = size;
    run.bias = bias;
    run.relu = activation && activation->mode == RELU;
    run.keeps_nan = activation && activation->keeps_nan;
    return start(handle, run, number);
}

Status set_extents(void* raw, Kind kind, int type, int format, int n, int c, int h, int w) {
    Tensor* tensor = static_cast<Tensor*>(raw);
    if (!tensor || tensor->kind != kind) return DESCRIPTOR_TYPE;
    if (n < 1 || c < 1 || h < 1 || w < 1) return BAD_PARAM;
    if (format != NHWC) return NOT_SUPPORTED_LAYOUT;
    if (type != FLOAT && type != HALF && type != BFLOAT16) return NOT_SUPPORTED_DATA_TYPE;
    tensor->type = type;
    tensor->n = n, tensor->c = c, tensor->h = h, tensor->w = w;
    tensor->set = true;
    return SUCCESS;
}

}   // namespace

API size_t cudnnGetVersion() { return 90999; }
API size_t cudnnGetCudartVersion() { return (size_t)fake::env_number("FAKE_CUDNN_CUDA", 13000); }

API const char* cudnnGetErrorString(unsigned status) {
    switch (status) {
    case SUCCESS: return "CUDNN_STATUS_SUCCESS";
    case NOT_INITIALIZED: return "CUDNN_STATUS_NOT_INITIALIZED";
    case SIZE_INSUFFICIENT: return "CUDNN_STATUS_BAD_PARAM_SIZE_INSUFFICIENT";
    case NOT_SUPPORTED: return "CUDNN_STATUS_NOT_SUPPORTED";
    case NOT_SUPPORTED_DATA_TYPE: return "CUDNN_STATUS_NOT_SUPPORTED_DATA_TYPE";
    default: return status < 3000 ? "CUDNN_STATUS_BAD_PARAM" : "CUDNN_STATUS_EXECUTION_FAILED";
    }
}

API unsigned cudnnCreate(void** place) {
    if (fake::current_device() < 0 || !fake::env_number("FAKE_CUDNN_CREATE", 1)) return NOT_INITIALIZED;
    if (!fake::driver_supports(cudnnGetCudartVersion())) return NOT_INITIALIZED;
    const Status status = create<Handle>(place, Kind::Handle);
    if (status == SUCCESS) {
        Handle* handle = static_cast<Handle*>(*place);
        handle->set = true;
        handle->ordinal = fake::current_device();
        handle->stream = nullptr;
    }
    return status;
}

API unsigned cudnnDestroy(void* handle) { return destroy<Handle>(handle, Kind::Handle); }

API unsigned cudnnSetStream(void* raw, CUstream stream) {
    Handle* handle = of<Handle>(raw, Kind::Handle);
    if (!handle) return NOT_INITIALIZED;
    handle->stream = stream;
    return SUCCESS;
}

API unsigned cudnnCreateTensorDescriptor(void** place) { return create<Tensor>(place, Kind::Tensor); }
API unsigned cudnnDestroyTensorDescriptor(void* raw) { return destroy<Tensor>(raw, Kind::Tensor); }
API unsigned cudnnSetTensor4dDescriptor(void* raw, int format, int type, int n, int c, int h, int w) {
    return set_extents(raw, Kind::Tensor, type, format, n, c, h, w);
}

API unsigned cudnnCreateFilterDescriptor(void** place) { return create<Tensor>(place, Kind::Filter); }
API unsigned cudnnDestroyFilterDescriptor(void* raw) { return destroy<Tensor>(raw, Kind::Filter); }
API unsigned cudnnSetFilter4dDescriptor(void* raw, int type, int format, int k, int c, int h, int w) {
    return set_extents(raw, Kind::Filter, type, format, k, c, h, w);
}

API unsigned cudnnCreateConvolutionDescriptor(void** place) { return create<Convolution>(place, Kind::Convolution); }
API unsigned cudnnDestroyConvolutionDescriptor(void* raw) { return destroy<Convolution>(raw, Kind::Convolution); }
API unsigned cudnnSetConvolution2dDescriptor(void* raw, int pad_h, int pad_w, int u, int v, int du, int dv, int mode, int type) {
    Convolution* convolution = static_cast<Convolution*>(raw);
    if (!convolution || convolution->kind != Kind::Convolution) return DESCRIPTOR_TYPE;
    if (pad_h < 0 || u < 1 || v < 1 || du < 1 || dv < 1) return BAD_PARAM;
    if (pad_h != pad_w || u != 1 || v != 1 || du != 1 || dv != 1 || mode != CROSS_CORRELATION) return NOT_SUPPORTED;
    if (type != FLOAT) return NOT_SUPPORTED_DATA_TYPE;
    convolution->pad = pad_h;
    convolution->math = DEFAULT_MATH;
    convolution->set = true;
    return SUCCESS;
}
API unsigned cudnnSetConvolutionMathType(void* raw, int math) {
    Convolution* convolution = of<Convolution>(raw, Kind::Convolution);
    if (!convolution) return DESCRIPTOR_TYPE;
    // The mode that rounds f32 to half precision is refused.
    if (math != DEFAULT_MATH && math != TENSOR_OP_MATH && math != FMA_MATH) return NOT_SUPPORTED;
    convolution->math = math;
    return SUCCESS;
}

API unsigned cudnnCreateActivationDescriptor(void** place) { return create<Activation>(place, Kind::Activation); }
API unsigned cudnnDestroyActivationDescriptor(void* raw) { return destroy<Activation>(raw, Kind::Activation); }
API unsigned cudnnSetActivationDescriptor(void* raw, int mode, int propagate_nan, double) {
    Activation* activation = static_cast<Activation*>(raw);
    if (!activation || activation->kind != Kind::Activation) return DESCRIPTOR_TYPE;
    if (mode != RELU && mode != IDENTITY) return NOT_SUPPORTED;
    activation->mode = mode;
    activation->keeps_nan = propagate_nan == 1;
    activation->set = true;
    return SUCCESS;
}

#define RANK(name, pass)                                                                                             \
    API unsigned name(                                                                                               \
        void* handle, void* from, void* by, void* convolution, void* to, int wanted, int* count, Timing* timings     \
    ) {                                                                                                              \
        return rank(pass, handle, from, by, convolution, to, wanted, count, timings);                                \
    }
RANK(cudnnGetConvolutionForwardAlgorithm_v7, Pass::Forward)
RANK(cudnnGetConvolutionBackwardDataAlgorithm_v7, Pass::BackwardData)
RANK(cudnnGetConvolutionBackwardFilterAlgorithm_v7, Pass::BackwardFilter)

#define WORKSPACE_SIZE(name, pass)                                                                                  \
    API unsigned name(void* handle, void* from, void* by, void* convolution, void* to, int number, size_t* bytes) { \
        return workspace_size(pass, handle, from, by, convolution, to, number, bytes);                              \
    }
WORKSPACE_SIZE(cudnnGetConvolutionForwardWorkspaceSize, Pass::Forward)
WORKSPACE_SIZE(cudnnGetConvolutionBackwardDataWorkspaceSize, Pass::BackwardData)
WORKSPACE_SIZE(cudnnGetConvolutionBackwardFilterWorkspaceSize, Pass::BackwardFilter)

#define CONVOLVE(name, pass)                                                                                                \
    API unsigned name(                                                                                                      \
        void* handle, const float* alpha, void* from_descriptor, const void* from, void* by_descriptor, const void* by,     \
        void* convolution, int number, void* workspace, size_t size, const float* beta, void* to_descriptor, void* to       \
    ) {                                                                                                                     \
        return convolve(pass, handle, alpha, from_descriptor, from, by_descriptor, by, convolution, number, workspace, size, \
                        beta, to_descriptor, to);                                                                           \
    }
CONVOLVE(cudnnConvolutionForward, Pass::Forward)
CONVOLVE(cudnnConvolutionBackwardData, Pass::BackwardData)
CONVOLVE(cudnnConvolutionBackwardFilter, Pass::BackwardFilter)

API unsigned cudnnConvolutionBiasActivationForward(
    void* handle, const float* alpha1, void* x_descriptor, const void* x, void* w_descriptor, const void* w,
    void* convolution, int number, void* workspace, size_t size, const float* alpha2, void* z_descriptor, const void* z,
    void* bias_descriptor, const void* bias, void* activation_descriptor, void* y_descriptor, void* y
) {
    if (!fake::env_number("FAKE_CUDNN_FUSED", 1)) return NOT_SUPPORTED;
    const Tensor *zs = of<Tensor>(z_descriptor, Kind::Tensor), *bs = of<Tensor>(bias_descriptor, Kind::Tensor);
    const Tensor* ys = of<Tensor>(y_descriptor, Kind::Tensor);
    const Activation* activation = of<Activation>(activation_descriptor, Kind::Activation);
    if (!zs || !bs || !ys || !activation) return DESCRIPTOR_TYPE;
    if (!alpha2 || !z || !bias) return NULL_POINTER;
    if (zs->n != ys->n || zs->c != ys->c || zs->h != ys->h || zs->w != ys->w || zs->type != ys->type) return SHAPE_MISMATCH;
    if (bs->n != 1 || bs->c != ys->c || bs->h != 1 || bs->w != 1) return SHAPE_MISMATCH;
    if (bs->type != ys->type) return NOT_SUPPORTED_DATA_TYPE;
    if (*alpha2 != 0.0f) return NOT_SUPPORTED;
    if (activation->mode == IDENTITY && number != IMPLICIT_PRECOMP_GEMM) return NOT_SUPPORTED;
    const float zero = 0.0f;
    return convolve(Pass::Forward, handle, alpha1, x_descriptor, x, w_descriptor, w, convolution, number, workspace, size, &zero,
                    y_descriptor, y, bias, activation);
}
