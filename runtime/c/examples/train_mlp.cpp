// mgpurun -n 2 ./train_mlp [STEPS]: train_mlp.c in C++, with errors as exceptions and handles that free themselves. It
// averages gradients itself, in memory that all ranks access in place.
#include <mgpu.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include "mlp.h"

namespace {

struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

void check(mgpu_status status) {
    if (status != MGPU_OK) throw Error(mgpu_last_error());
}

// A handle that frees itself.
template <typename T, void (*Free)(T *)>
using Handle = std::unique_ptr<T, std::integral_constant<void (*)(T *), Free>>;

// Creates a handle by a function whose last argument is the result.
template <typename H, typename Create, typename... Arguments>
H create(Create function, Arguments... arguments) {
    typename H::pointer made = nullptr;
    check(function(arguments..., &made));
    return H(made);
}

using World = Handle<mgpu_world, mgpu_finalize>;
using Comm = Handle<mgpu_comm, mgpu_comm_free>;

int train(std::uint64_t steps) {
    auto world = create<World>(mgpu_init);
    auto comm = create<Comm>(mgpu_comm_create, world.get());
    mgpu_world_info info{};
    info.struct_size = sizeof info;
    check(mgpu_world_get_info(world.get(), &info));

    std::vector<float> parameters(PARAMETERS);
    mlp_initialise(parameters.data(), info.rank + 3);
    check(mgpu_broadcast(comm.get(), parameters.data(), parameters.size(), MGPU_F32, 0));

    void *memory = nullptr;
    check(mgpu_allocate(comm.get(), PARAMETERS * sizeof(float), &memory));
    float *gradients = static_cast<float *>(memory);
    float *bias1 = gradients + WEIGHT1, *weight2 = bias1 + BIAS1, *bias2 = weight2 + WEIGHT2;

    float loss = 0;
    std::int32_t stop = 0;
    const int part = BATCH / static_cast<int>(info.size);
    for (std::uint64_t step = 0; step < steps; step++) {
        check(mgpu_stop_requested(world.get(), &stop));
        if (stop) break;
        check(mgpu_report_step(world.get(), step + 1));
        loss = mlp_gradients(parameters.data(), step * BATCH + info.rank * static_cast<std::uint64_t>(part), part, gradients,
                             bias1, weight2, bias2);
        check(mgpu_all_reduce(comm.get(), gradients, PARAMETERS, MGPU_F32, MGPU_AVG));
        for (std::size_t i = 0; i < parameters.size(); i++) parameters[i] -= 0.5f * gradients[i];
    }
    check(mgpu_all_reduce(comm.get(), &loss, 1, MGPU_F32, MGPU_AVG));
    check(mgpu_free(memory));
    if (info.rank == 0) std::printf("%u ranks: loss %.4f\n", info.size, loss);
    return stop ? MGPU_EXIT_STOPPED : 0;
}

} // namespace

int main(int argc, char **argv) {
    try {
        return train(argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 100);
    } catch (const std::exception &error) {
        std::fprintf(stderr, "train_mlp: %s\n", error.what());
        return 1;
    }
}
