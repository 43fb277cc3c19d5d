// The functions of cuBLASLt that the project uses, as strict as its documentation: column-major matrices, one dtype
// for both operands, a bias of the dtype of the result, and an algorithm only for the problem it was proposed for.
// All algorithms are the same loops. One of them is an in-place reduction scheme; it reports itself on standard error
// when it runs, and is proposed first unless the scheme is masked out.
//
//   FAKE_CUBLASLT_FUSED=0    no epilogues
//   FAKE_CUBLASLT_WRONG=1    results are wrong by a factor; 2: only the one in the middle is wrong
//   FAKE_CUBLASLT_CREATE=0   cublasLtCreate fails
//   FAKE_CUBLASLT_CUDA=12080 built with CUDA 12.8; cublasLtCreate fails if the driver is of an older major version

#include <cstdio>

#include "fake_cuda.h"
#include "fake_numbers.h"

namespace {

using fake::TensorView;

enum Status : unsigned {
    SUCCESS = 0,
    NOT_INITIALIZED = 1,
    INVALID_VALUE = 7,
    EXECUTION_FAILED = 13,
    NOT_SUPPORTED = 15,
};

enum : int { R_32F = 0, R_16F = 2, R_16BF = 14 };
enum : int { COMPUTE_32F = 68, COMPUTE_32F_FAST_TF32 = 77 };
enum : int { OP_N = 0, OP_T = 1 };
enum : int { EPILOGUE_DEFAULT = 1, EPILOGUE_BIAS = 4, EPILOGUE_RELU_BIAS = 6 };
enum : unsigned { IN_PLACE = 1, ALL_SCHEMES = 7 };

enum class Kind { Product = 81, Layout, Preference, Handle, Destroyed };

struct Object {
    Kind kind;
};

struct Product : Object {
    int compute;
    int transpose_a = OP_N, transpose_b = OP_N, epilogue = EPILOGUE_DEFAULT, bias_type = -1;
    const void* bias = nullptr;
};

struct Layout : Object {
    int type;
    uint64_t rows, columns;
    int64_t ld;
    size_t len() const { return size_t(columns) * uint64_t(ld); }
    size_t at(uint64_t row, uint64_t column) const { return size_t(column * uint64_t(ld) + row); }
};

struct Preference : Object {
    uint64_t workspace = 0;
    uint32_t schemes = ALL_SCHEMES;
    uint32_t alignment[4] = {256, 256, 256, 256};
};

struct Handle : Object {
    int ordinal;
};

// The 64 bytes of an opaque algorithm.
struct Algorithm {
    uint64_t magic, number, problem, alignment[4], rest;
};
constexpr uint64_t MAGIC = 0x6d677075416c676f;
static_assert(sizeof(Algorithm) == 64);

struct HeuristicResult {
    Algorithm algorithm;
    size_t workspace;
    unsigned status;
    float waves;
    int reserved[4];
};

template <class T>
T* of(void* raw, Kind kind) {
    T* object = static_cast<T*>(raw);
    return object && object->kind == kind ? object : nullptr;
}

template <class T>
T* make(void** place, Kind kind) {
    T* object = new T();
    object->kind = kind;
    *place = object;
    return object;
}

template <class T>
Status destroy(void* raw, Kind kind) {
    T* object = of<T>(raw, kind);
    if (!object) return INVALID_VALUE;
    object->kind = Kind::Destroyed;
    delete object;
    return SUCCESS;
}

struct Problem {
    Product product;
    Layout a, b, d;

    uint64_t rows() const { return d.rows; }
    uint64_t columns() const { return d.columns; }
    uint64_t depth() const { return product.transpose_a == OP_T ? a.rows : a.columns; }

    Status check() const {
        const uint64_t m = product.transpose_a == OP_T ? a.columns : a.rows;
        const uint64_t k = product.transpose_b == OP_T ? b.columns : b.rows, n = product.transpose_b == OP_T ? b.rows : b.columns;
        if (m != d.rows || n != d.columns || k != depth()) return INVALID_VALUE;
        if (a.type != b.type) return NOT_SUPPORTED;
        if (d.type != a.type && d.type != R_32F) return NOT_SUPPORTED;
        if (product.compute == COMPUTE_32F_FAST_TF32 && a.type != R_32F) return NOT_SUPPORTED;
        if (product.epilogue != EPILOGUE_DEFAULT) {
            if (!fake::env_number("FAKE_CUBLASLT_FUSED", 1)) return NOT_SUPPORTED;
            const int bias_type = product.bias_type < 0 ? d.type : product.bias_type;
            if (bias_type != d.type || bias_type != R_32F) return NOT_SUPPORTED;
        }
        return SUCCESS;
    }

    uint64_t digest() const {
        uint64_t digest = 1469598103934665603u;
        for (const uint64_t number : {uint64_t(product.compute), uint64_t(product.transpose_a), uint64_t(product.transpose_b),
                                      uint64_t(product.epilogue), uint64_t(a.type), a.rows, a.columns, uint64_t(d.type),
                                      d.rows, d.columns})
            digest = (digest ^ number) * 1099511628211u;
        return digest;
    }
};

Status problem_of(void* product, void* a, void* b, void* c, void* d, Problem& problem) {
    const Product* products = of<Product>(product, Kind::Product);
    const Layout *as = of<Layout>(a, Kind::Layout), *bs = of<Layout>(b, Kind::Layout), *cs = of<Layout>(c, Kind::Layout);
    const Layout* ds = of<Layout>(d, Kind::Layout);
    if (!products || !as || !bs || !cs || !ds) return INVALID_VALUE;
    if (cs->type != ds->type || cs->rows != ds->rows || cs->columns != ds->columns) return INVALID_VALUE;
    problem = Problem{*products, *as, *bs, *ds};
    return problem.check();
}

size_t workspace_of(const Problem& problem, uint64_t number) { return number ? problem.rows() * 4 * number : 0; }

Status check_algorithm(const Problem& problem, const Algorithm& algorithm) {
    if (algorithm.magic != MAGIC || algorithm.number > 2) return INVALID_VALUE;
    return algorithm.problem == problem.digest() ? SUCCESS : NOT_SUPPORTED;
}

struct MatmulWork {
    Problem problem;
    TensorView a, b, d;
    float alpha;
    void* workspace;
    size_t workspace_size;

    void operator()() const {
        const char* user = "cublasLtMatmul";
        const Product& product = problem.product;
        MatmulWork own = *this;
        own.a = a.on_host(problem.a.len(), user);
        own.b = b.on_host(problem.b.len(), user);
        own.d = d.on_host(problem.d.len(), user);
        own.workspace = fake::device_bytes((CUdeviceptr)workspace, workspace_size, user);
        const size_t bias_size = product.epilogue == EPILOGUE_DEFAULT ? 0 : problem.rows() * 4;
        own.problem.product.bias = fake::device_bytes((CUdeviceptr)product.bias, bias_size, user);
        own.compute();
    }

    // With addresses of the host.
    void compute() const {
        if (workspace_size) std::memset(workspace, 0xff, workspace_size);
        const Product& product = problem.product;
        const bool tf32 = product.compute == COMPUTE_32F_FAST_TF32;
        const long kind = fake::env_number("FAKE_CUBLASLT_WRONG", 0);
        const float wrong = kind == 1 ? 1.5f : 1.0f;
        const uint64_t rows = problem.rows(), depth = problem.depth();
        const std::vector<float> as = operands(a, problem.a.len(), tf32), bs = operands(b, problem.b.len(), tf32);
        // Rows are the fastest index.
        std::vector<float> transposed(rows * depth);
        for (uint64_t k = 0; k < depth; ++k)
            for (uint64_t row = 0; row < rows; ++row)
                transposed[k * rows + row] = as[product.transpose_a == OP_T ? problem.a.at(k, row) : problem.a.at(row, k)];
        for (uint64_t column = 0; column < problem.columns(); ++column) {
            std::vector<float> sums(rows, 0.0f);
            for (uint64_t k = 0; k < depth; ++k) {
                const size_t at = product.transpose_b == OP_T ? problem.b.at(column, k) : problem.b.at(k, column);
                fake::add(sums.data(), &transposed[k * rows], bs[at], rows);
            }
            for (uint64_t row = 0; row < rows; ++row) {
                float value = alpha * wrong * sums[row];
                if (product.epilogue != EPILOGUE_DEFAULT) value += static_cast<const float*>(product.bias)[row];
                // NaN becomes zero, as in the real library.
                if (product.epilogue == EPILOGUE_RELU_BIAS && !(value > 0.0f)) value = 0.0f;
                if (kind == 2 && column == problem.columns() / 2 && row == rows / 2) value += 4.0f;
                d.write(problem.d.at(row, column), value);
            }
        }
    }
};

}   // namespace

API size_t cublasLtGetVersion() { return 130099; }
API size_t cublasLtGetCudartVersion() { return (size_t)fake::env_number("FAKE_CUBLASLT_CUDA", 13000); }

API const char* cublasLtGetStatusString(unsigned status) {
    switch (status) {
    case SUCCESS: return "success";
    case NOT_INITIALIZED: return "the library was not initialized";
    case INVALID_VALUE: return "an unsupported value or parameter was passed to the function";
    case NOT_SUPPORTED: return "the requested functionality is not supported";
    default: return "the program failed to execute";
    }
}

API unsigned cublasLtCreate(void** place) {
    if (!place) return INVALID_VALUE;
    if (fake::current_device() < 0 || !fake::env_number("FAKE_CUBLASLT_CREATE", 1)) return NOT_INITIALIZED;
    if (!fake::driver_supports(cublasLtGetCudartVersion())) return NOT_INITIALIZED;
    make<Handle>(place, Kind::Handle)->ordinal = fake::current_device();
    return SUCCESS;
}
API unsigned cublasLtDestroy(void* handle) { return destroy<Handle>(handle, Kind::Handle); }

API unsigned cublasLtMatmulDescCreate(void** place, int compute, int scale) {
    if (!place) return INVALID_VALUE;
    if ((compute != COMPUTE_32F && compute != COMPUTE_32F_FAST_TF32) || scale != R_32F) return NOT_SUPPORTED;
    make<Product>(place, Kind::Product)->compute = compute;
    return SUCCESS;
}
API unsigned cublasLtMatmulDescDestroy(void* raw) { return destroy<Product>(raw, Kind::Product); }

API unsigned cublasLtMatmulDescSetAttribute(void* raw, int attribute, const void* value, size_t size) {
    Product* product = of<Product>(raw, Kind::Product);
    if (!product || !value) return INVALID_VALUE;
    if (size != (attribute == 8 ? 8 : 4)) return INVALID_VALUE;
    int number;
    std::memcpy(&number, value, sizeof number);
    switch (attribute) {
    case 3: product->transpose_a = number; break;
    case 4: product->transpose_b = number; break;
    case 7:
        if (number != EPILOGUE_DEFAULT && number != EPILOGUE_BIAS && number != EPILOGUE_RELU_BIAS) return NOT_SUPPORTED;
        product->epilogue = number;
        break;
    case 8: std::memcpy(&product->bias, value, sizeof product->bias); break;
    case 26: product->bias_type = number; break;
    default: return NOT_SUPPORTED;
    }
    return SUCCESS;
}

API unsigned cublasLtMatrixLayoutCreate(void** place, int type, uint64_t rows, uint64_t columns, int64_t ld) {
    if (!place || !rows || !columns || ld < int64_t(rows)) return INVALID_VALUE;
    if (type != R_32F && type != R_16F && type != R_16BF) return NOT_SUPPORTED;
    Layout* layout = make<Layout>(place, Kind::Layout);
    layout->type = type, layout->rows = rows, layout->columns = columns, layout->ld = ld;
    return SUCCESS;
}
API unsigned cublasLtMatrixLayoutDestroy(void* raw) { return destroy<Layout>(raw, Kind::Layout); }

API unsigned cublasLtMatmulPreferenceCreate(void** place) {
    if (!place) return INVALID_VALUE;
    make<Preference>(place, Kind::Preference);
    return SUCCESS;
}
API unsigned cublasLtMatmulPreferenceDestroy(void* raw) { return destroy<Preference>(raw, Kind::Preference); }

API unsigned cublasLtMatmulPreferenceSetAttribute(void* raw, int attribute, const void* value, size_t size) {
    Preference* preference = of<Preference>(raw, Kind::Preference);
    if (!preference || !value || size != (attribute == 1 ? 8 : 4)) return INVALID_VALUE;
    if (attribute == 1) {
        std::memcpy(&preference->workspace, value, size);
    } else if (attribute == 3) {
        std::memcpy(&preference->schemes, value, size);
    } else if (attribute >= 5 && attribute <= 8) {
        std::memcpy(&preference->alignment[attribute - 5], value, size);
    } else {
        return NOT_SUPPORTED;
    }
    return SUCCESS;
}

API unsigned cublasLtMatmulAlgoGetHeuristic(
    void* handle, void* product, void* a, void* b, void* c, void* d, void* raw, int wanted, HeuristicResult* verdicts, int* count
) {
    const Preference* preference = of<Preference>(raw, Kind::Preference);
    if (!of<Handle>(handle, Kind::Handle)) return NOT_INITIALIZED;
    if (!preference || !verdicts || !count || wanted < 1) return INVALID_VALUE;
    Problem problem;
    if (const Status status = problem_of(product, a, b, c, d, problem)) return status;
    *count = 0;
    for (uint64_t number : {2, 0, 1}) {
        if (number == 2 && !(preference->schemes & IN_PLACE)) continue;
        const size_t workspace = workspace_of(problem, number);
        if (workspace > preference->workspace || *count == wanted) continue;
        Algorithm algorithm{MAGIC, number, problem.digest(), {}, 0};
        for (int i = 0; i < 4; ++i) algorithm.alignment[i] = preference->alignment[i];
        verdicts[(*count)++] = HeuristicResult{algorithm, workspace, SUCCESS, 1.0f, {}};
    }
    return *count ? SUCCESS : NOT_SUPPORTED;
}

API unsigned cublasLtMatmulAlgoCheck(
    void* handle, void* product, void* a, void* b, void* c, void* d, const Algorithm* algorithm, HeuristicResult* verdict
) {
    if (!of<Handle>(handle, Kind::Handle)) return NOT_INITIALIZED;
    if (!algorithm || !verdict) return INVALID_VALUE;
    Problem problem;
    if (const Status status = problem_of(product, a, b, c, d, problem)) return status;
    if (const Status status = check_algorithm(problem, *algorithm)) return status;
    *verdict = HeuristicResult{*algorithm, workspace_of(problem, algorithm->number), SUCCESS, 1.0f, {}};
    return SUCCESS;
}

API unsigned cublasLtMatmul(
    void* raw, void* product, const float* alpha, const void* a, void* a_layout, const void* b, void* b_layout,
    const float* beta, const void* c, void* c_layout, void* d, void* d_layout, const Algorithm* algorithm, void* workspace,
    size_t size, CUstream stream
) {
    const Handle* handle = of<Handle>(raw, Kind::Handle);
    if (!handle) return NOT_INITIALIZED;
    if (!alpha || !beta || !algorithm || !a || !b || !c || !d) return INVALID_VALUE;
    if (*beta != 0.0f) return NOT_SUPPORTED;
    Problem problem;
    if (const Status status = problem_of(product, a_layout, b_layout, c_layout, d_layout, problem)) return status;
    if (const Status status = check_algorithm(problem, *algorithm)) return status;
    const void* addresses[4] = {a, b, c, d};
    for (int i = 0; i < 4; ++i)
        if (reinterpret_cast<uintptr_t>(addresses[i]) % algorithm->alignment[i]) return INVALID_VALUE;
    if (problem.product.epilogue != EPILOGUE_DEFAULT && !problem.product.bias) return INVALID_VALUE;
    const size_t needed = workspace_of(problem, algorithm->number);
    if (size < needed || (needed && reinterpret_cast<uintptr_t>(workspace) % 256)) return INVALID_VALUE;
    if (handle->ordinal != fake::current_device()) return EXECUTION_FAILED;
    if (algorithm->number == 2) std::fprintf(stderr, "fake cuBLASLt: in-place reduction scheme\n");
    auto numbers = [](const void* address, const Layout& layout) {
        using fake::Stored;
        const Stored stored =
            layout.type == R_16F ? Stored::F16 : layout.type == R_16BF ? Stored::Bf16 : Stored::F32;
        return TensorView{const_cast<void*>(address), stored};
    };
    const MatmulWork run{problem, numbers(a, problem.a), numbers(b, problem.b), numbers(d, problem.d), *alpha, workspace, needed};
    return fake::enqueue(stream, run) == CUDA_SUCCESS ? SUCCESS : EXECUTION_FAILED;
}
