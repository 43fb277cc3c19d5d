// NCCL's part of the self-test: ranks as threads (each with its own device) and as processes.
#include "fake_nccl.h"
#include "selftest.h"

#include <atomic>
#include <csignal>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

struct ncclComm;
typedef ncclComm* ncclComm_t;
extern "C" {
ncclResult_t ncclGetVersion(int*);
ncclResult_t ncclGetUniqueId(ncclUniqueId*);
ncclResult_t ncclCommInitRank(ncclComm_t*, int, ncclUniqueId, int);
ncclResult_t ncclCommInitRankConfig(ncclComm_t*, int, ncclUniqueId, int, ncclConfig_t*);
ncclResult_t ncclCommSplit(ncclComm_t, int, int, ncclComm_t*, ncclConfig_t*);
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t*);
ncclResult_t ncclCommUserRank(ncclComm_t, int*);
ncclResult_t ncclCommFinalize(ncclComm_t);
ncclResult_t ncclCommDestroy(ncclComm_t);
ncclResult_t ncclCommAbort(ncclComm_t);
ncclResult_t ncclMemAlloc(void**, size_t);
ncclResult_t ncclMemFree(void*);
ncclResult_t ncclCommRegister(ncclComm_t, void*, size_t, void**);
ncclResult_t ncclCommDeregister(ncclComm_t, void*);
ncclResult_t ncclCommWindowRegister(ncclComm_t, void*, size_t, void**, int);
ncclResult_t ncclCommWindowDeregister(ncclComm_t, void*);
ncclResult_t ncclGroupStart();
ncclResult_t ncclGroupEnd();
ncclResult_t ncclAllReduce(const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, CUstream);
ncclResult_t ncclReduce(const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, int, ncclComm_t, CUstream);
ncclResult_t ncclBroadcast(const void*, void*, size_t, ncclDataType_t, int, ncclComm_t, CUstream);
ncclResult_t ncclAllGather(const void*, void*, size_t, ncclDataType_t, ncclComm_t, CUstream);
ncclResult_t ncclReduceScatter(const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, CUstream);
ncclResult_t ncclSend(const void*, size_t, ncclDataType_t, int, ncclComm_t, CUstream);
ncclResult_t ncclRecv(void*, size_t, ncclDataType_t, int, ncclComm_t, CUstream);
}

namespace {

struct Config {
    ncclConfig_t known = {48, 0xcafebeef, 21800, 0, -2147483647 - 1, -2147483647 - 1, -2147483647 - 1};
    const char* net = nullptr;
    int rest[2] = {-2147483647 - 1, -2147483647 - 1};
};

// The final state after "in progress".
ncclResult_t settled(ncclComm_t comm) {
    ncclResult_t state = ncclInProgress;
    while (state == ncclInProgress) {
        OK(ncclCommGetAsyncError(comm, &state));
        std::this_thread::yield();
    }
    return state;
}

ncclComm_t begin(int world, const ncclUniqueId& id, int rank) {
    auto* comm = new ncclComm_t(nullptr);
    Config config;
    EXPECT(ncclInProgress, ncclCommInitRankConfig(comm, world, id, rank, &config.known));
    CHECK(*comm != nullptr);
    return *comm;
}

void on_ranks(int world, void (*body)(int rank, int world, const ncclUniqueId& id)) {
    ncclUniqueId id;
    OK(ncclGetUniqueId(&id));
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < world; ++rank) {
        ranks.emplace_back([=] {
            open_device(rank);
            body(rank, world, id);
        });
    }
    for (auto& rank : ranks) rank.join();
}

// Every collective, at lengths around the size of a slot, in place and out of place.
void check_collectives(ncclComm_t comm, int rank, int world, size_t count) {
    CUstream stream = new_stream();
    auto value = [](int of, size_t i) { return (float)((i * 3 + (size_t)of * 5) % 17); };
    auto sum = [&](size_t i) {
        float all = 0;
        for (int other = 0; other < world; ++other) all += value(other, i);
        return all;
    };
    const size_t whole = count * (size_t)world, own = count * (size_t)rank;
    std::vector<float> mine(whole);
    for (size_t i = 0; i < whole; ++i) mine[i] = value(rank, i);
    const Buffer<float> in(mine), out(whole);
    const void* send = (const void*)in.address;
    void* recv = (void*)out.address;
    std::vector<float> found;
    auto done = [&](ncclResult_t result) {
        CHECK(result == ncclInProgress && settled(comm) == ncclSuccess);
        OK(cuStreamSynchronize(stream));
        found = out.read();
    };
    done(ncclAllReduce(send, recv, count, ncclFloat32, ncclSum, comm, stream));
    for (size_t i = 0; i < count; ++i) CHECK(found[i] == sum(i));
    done(ncclReduce(send, recv, count, ncclFloat32, ncclAvg, world - 1, comm, stream));
    for (size_t i = 0; i < count && rank == world - 1; ++i) CHECK(found[i] == sum(i) / (float)world);
    done(ncclBroadcast(send, recv, count, ncclFloat32, world - 1, comm, stream));
    for (size_t i = 0; i < count; ++i) CHECK(found[i] == value(world - 1, i));
    done(ncclAllGather(send, recv, count, ncclFloat32, comm, stream));
    for (int other = 0; other < world; ++other) {
        for (size_t i = 0; i < count; ++i) CHECK(found[(size_t)other * count + i] == value(other, i));
    }
    done(ncclReduceScatter(send, recv, count, ncclFloat32, ncclSum, comm, stream));
    for (size_t i = 0; i < count; ++i) CHECK(found[i] == sum(own + i));
    // Sends to the next rank, receives from the previous one.
    const int next = (rank + 1) % world, before = (rank + world - 1) % world;
    OK(ncclGroupStart());
    OK(ncclSend(send, whole, ncclFloat32, next, comm, stream));
    OK(ncclRecv(recv, whole, ncclFloat32, before, comm, stream));
    done(ncclGroupEnd());
    for (size_t i = 0; i < whole; ++i) CHECK(found[i] == value(before, i));
    // In place.
    EXPECT(ncclInProgress, ncclReduceScatter(recv, (float*)recv + own, count, ncclFloat32, ncclSum, comm, stream));
    OK(settled(comm));
    done(ncclAllGather((float*)recv + own, recv, count, ncclFloat32, comm, stream));
    for (size_t i = 0; i < whole; ++i) CHECK(found[i] == sum(i));
    OK(cuStreamDestroy_v2(stream));
}

void collectives(int rank, int world, const ncclUniqueId& id) {
    ncclComm_t comm = begin(world, id, rank);
    OK(settled(comm));
    for (const size_t count : {1, 3, 1000, 70'000, 600'000}) check_collectives(comm, rank, world, count);
    EXPECT(ncclInProgress, ncclCommFinalize(comm));
    OK(settled(comm));
    OK(ncclCommDestroy(comm));
}

template <class T>
void reduced(ncclComm_t comm, int rank, ncclDataType_t type, ncclRedOp_t op, T own, T other, T expected) {
    CUstream stream = new_stream();
    const Buffer<T> values(std::vector<T>{rank == 0 ? own : other});
    OK(ncclAllReduce((void*)values.address, (void*)values.address, 1, type, op, comm, stream));
    OK(cuStreamSynchronize(stream));
    CHECK(values.read()[0] == expected);
}

void numbers(int rank, int world, const ncclUniqueId& id) {
    ncclComm_t comm;
    OK(ncclCommInitRank(&comm, world, id, rank));
    reduced<int>(comm, rank, ncclInt32, ncclProd, -3, 5, -15);
    reduced<uint8_t>(comm, rank, ncclUint8, ncclMax, 200, 7, 200);
    reduced<int64_t>(comm, rank, ncclInt64, ncclMin, -(1ll << 40), 7, -(1ll << 40));
    reduced<double>(comm, rank, ncclFloat64, ncclAvg, 1.0, 2.0, 1.5);
    reduced<uint16_t>(comm, rank, ncclFloat16, ncclSum, 0x3c00, 0x0001, 0x3c00);    // 1 + 2^-24
    reduced<uint16_t>(comm, rank, ncclFloat16, ncclSum, 0x0001, 0x03ff, 0x0400);    // the smallest normal number
    reduced<uint16_t>(comm, rank, ncclFloat16, ncclProd, 0x7bff, 0x4000, 0x7c00);   // too large
    reduced<uint16_t>(comm, rank, ncclBfloat16, ncclSum, 0x3f80, 0x3b80, 0x3f80);   // 1 + 2^-8: to even
    reduced<uint16_t>(comm, rank, ncclBfloat16, ncclSum, 0x3f81, 0x3b80, 0x3f82);
    OK(ncclCommDestroy(comm));
}

// A captured all-reduce, replayed.
void graph(int rank, int world, const ncclUniqueId& id) {
    ncclComm_t comm = begin(world, id, rank);
    OK(settled(comm));
    CUstream stream = new_stream();
    const Buffer<float> values(std::vector<float>{1});
    CUgraph graph;
    CUgraphExec program;
    OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    void* address = (void*)values.address;
    EXPECT(ncclInProgress, ncclAllReduce(address, address, 1, ncclFloat32, ncclSum, comm, stream));
    OK(settled(comm));
    OK(cuStreamEndCapture(stream, &graph));
    OK(cuGraphInstantiateWithFlags(&program, graph, 0));
    for (int i = 0; i < 5; ++i) OK(cuGraphLaunch(program, stream));
    OK(cuStreamSynchronize(stream));
    CHECK(values.read()[0] == 32);
    OK(cuGraphExecDestroy(program));
    OK(cuGraphDestroy(graph));
    OK(ncclCommDestroy(comm));
}

// Waits for both communicators of a split.
ncclComm_t split_off(ncclComm_t parent, int color, int key) {
    ncclComm_t child = nullptr;
    Config config;
    OK(ncclCommSplit(parent, color, key, &child, &config.known));
    OK(settled(parent));
    while (color >= 0 && __atomic_load_n(&child, __ATOMIC_ACQUIRE) == nullptr) std::this_thread::yield();
    if (color >= 0) OK(settled(child));
    CHECK(color >= 0 || child == nullptr);
    return child;
}

// Rank 0 has no color; the others are halves in reverse order, and outlive the parent.
void split(int rank, int world, const ncclUniqueId& id) {
    ncclComm_t parent = begin(world, id, rank);
    OK(settled(parent));
    CUstream stream = new_stream();
    const Buffer<float> values(std::vector<float>{1});
    void* address = (void*)values.address;
    EXPECT(ncclInProgress, ncclAllReduce(address, address, 1, ncclFloat32, ncclSum, parent, stream));
    OK(settled(parent));
    OK(cuStreamSynchronize(stream));
    ncclComm_t child = split_off(parent, rank == 0 ? -1 : rank % 2, -rank);
    OK(ncclCommDestroy(parent));
    if (rank == 0) return;
    int own;
    OK(ncclCommUserRank(child, &own));
    const int largest = (world - 1) % 2 == rank % 2 ? world - 1 : world - 2;
    CHECK(own == (largest - rank) / 2);
    const int size = (largest - (rank % 2 == 1 ? 1 : 2)) / 2 + 1;
    check_collectives(child, own, size, 1000);
    OK(ncclCommDestroy(child));
}

// A split that a rank never joins ends by abort of the parent; one during an operation is refused.
void split_fault(int rank, int world, const ncclUniqueId& id) {
    ncclComm_t parent = begin(world, id, rank), child = nullptr;
    OK(settled(parent));
    Config config;
    if (rank == 1) {
        CUstream stream = new_stream();
        const Buffer<float> values(std::vector<float>{1});
        void* address = (void*)values.address;
        EXPECT(ncclInProgress, ncclAllReduce(address, address, 1, ncclFloat32, ncclSum, parent, stream));
        OK(settled(parent));
        EXPECT(ncclInvalidUsage, ncclCommSplit(parent, 0, 0, &child, &config.known));
        OK(ncclCommAbort(parent));
        OK(cuStreamSynchronize(stream));
        return;
    }
    OK(ncclCommSplit(parent, 0, 0, &child, &config.known));
    ncclResult_t state;
    OK(ncclCommGetAsyncError(parent, &state));
    CHECK(state == ncclInProgress);
    EXPECT(ncclInvalidArgument, ncclCommFinalize(parent));
    OK(ncclCommAbort(parent));
    CHECK(child != nullptr);
    OK(ncclCommAbort(child));
}

void* window(ncclComm_t comm, void* address, size_t bytes) {
    void* opened = nullptr;
    EXPECT(ncclInProgress, ncclCommWindowRegister(comm, address, bytes, &opened, 1));
    OK(settled(comm));
    return opened;
}

// Registrations and windows, wrong ones, and their end with the communicator.
void registration(int rank, int world, const ncclUniqueId& id) {
    ncclComm_t comm = begin(world, id, rank);
    OK(settled(comm));
    constexpr size_t BYTES = 400;
    void *memory, *first, *second, *none;
    OK(ncclMemAlloc(&memory, BYTES));
    OK(ncclCommRegister(comm, memory, BYTES, &first));
    // Counted.
    OK(ncclCommRegister(comm, memory, BYTES, &second));
    CHECK(first == second && first != nullptr);
    OK(ncclCommDeregister(comm, first));
    OK(ncclCommDeregister(comm, first));
    EXPECT(ncclInvalidUsage, ncclCommDeregister(comm, first));
    // Memory of the driver is device memory, too; what lies behind it is not, nor is the host's.
    const Buffer<float> values(100);
    OK(ncclCommRegister(comm, (void*)values.address, BYTES, &first));
    OK(ncclCommDeregister(comm, first));
    EXPECT(ncclUnhandledCudaError, ncclCommRegister(comm, (void*)values.address, BYTES + 1, &none));
    EXPECT(ncclUnhandledCudaError, ncclCommRegister(comm, &none, sizeof none, &none));
    void* opened = window(comm, memory, BYTES);
    CHECK(opened != nullptr);
    CUstream stream = new_stream();
    EXPECT(ncclInProgress, ncclAllReduce(memory, memory, 100, ncclFloat32, ncclSum, comm, stream));
    OK(settled(comm));
    OK(cuStreamSynchronize(stream));
    OK(ncclCommWindowDeregister(comm, opened));
    EXPECT(ncclInvalidUsage, ncclCommWindowDeregister(comm, opened));
    OK(ncclCommRegister(comm, memory, BYTES, &first));
    window(comm, memory, BYTES);
    OK(ncclCommAbort(comm));
    EXPECT(ncclInvalidArgument, ncclCommRegister(comm, memory, BYTES, &first));
    OK(ncclMemFree(memory));
}

// Each case ends the process.
void misuse(int rank, int world, const ncclUniqueId& id) {
    ncclComm_t comm = begin(world, id, rank);
    OK(settled(comm));
    void *memory, *registered;
    OK(ncclMemAlloc(&memory, 400));
    const std::string what = getenv("MISUSE");
    if (what == "freed") {
        OK(ncclCommRegister(comm, memory, 400, &registered));
        OK(ncclMemFree(memory));
    } else if (what == "twice") {
        window(comm, memory, 400);
        window(comm, memory, 400);
    } else if (what == "sizes") {
        window(comm, memory, rank == 0 ? 400 : 200);
    } else if (what == "mixed" || what == "offsets") {
        CUstream stream = new_stream();
        if (rank == 0 || what == "offsets") OK(ncclCommRegister(comm, memory, 400, &registered));
        float* from = (float*)memory + (what == "offsets" && rank == 0 ? 4 : 0);
        EXPECT(ncclInProgress, ncclAllReduce(from, from, 50, ncclFloat32, ncclSum, comm, stream));
        OK(settled(comm));
        OK(cuStreamSynchronize(stream));
    } else if (what == "unfinished") {
        CUstream stream = new_stream();
        static std::atomic<bool> freed = false;
        OK(cuLaunchHostFunc(stream, [](void* freed) { ((std::atomic<bool>*)freed)->wait(false); }, &freed));
        EXPECT(ncclInProgress, ncclAllReduce(memory, memory, 100, ncclFloat32, ncclSum, comm, stream));
        OK(settled(comm));
        OK(ncclMemFree(memory));
        freed = true;
        freed.notify_all();
        OK(cuStreamSynchronize(stream));
    }
    OK(ncclCommAbort(comm));
}

void same_device(int rank, int world, const ncclUniqueId& id) {
    open_device(0);
    ncclComm_t comm = begin(world, id, rank);
    const bool allowed = getenv("NCCL_MULTI_RANK_GPU_ENABLE") != nullptr;
    EXPECT(allowed ? ncclSuccess : ncclInvalidUsage, settled(comm));
    OK(ncclCommAbort(comm));
}

// With any FAKE_NCCL_FAULT on rank 1, both ranks end by abort.
void fault(int rank, int world, const ncclUniqueId& id) {
    const std::string wanted = getenv("FAKE_NCCL_FAULT");
    ncclComm_t comm = begin(world, id, rank);
    ncclResult_t state;
    if (wanted == "init_error@1") {
        if (rank == 1) EXPECT(ncclSystemError, settled(comm));
    } else if (wanted == "hang_init@1") {
        OK(ncclCommGetAsyncError(comm, &state));
        CHECK(state == ncclInProgress);
    } else {
        OK(settled(comm));
        CUstream stream = new_stream();
        const Buffer<float> values(std::vector<float>{1});
        void* address = (void*)values.address;
        for (int i = 0; i < 3; ++i) {
            EXPECT(ncclInProgress, ncclAllReduce(address, address, 1, ncclFloat32, ncclSum, comm, stream));
            OK(i < 2 ? settled(comm) : ncclSuccess);
            if (i < 2) OK(cuStreamSynchronize(stream));
        }
        const bool told = wanted.rfind("async_error", 0) == 0 && rank == 1;
        if (told) {
            do OK(ncclCommGetAsyncError(comm, &state));
            while (state != ncclRemoteError);
        } else {
            OK(settled(comm));
        }
        EXPECT(CUDA_ERROR_NOT_READY, cuStreamQuery(stream));
        OK(ncclCommAbort(comm));
        OK(cuStreamSynchronize(stream));
        return;
    }
    OK(ncclCommAbort(comm));
}

// The same for faults of the next call.
void call_fault(int rank, int world, const ncclUniqueId& id) {
    const bool of_finalize = strncmp(getenv("FAKE_NCCL_FAULT"), "stuck_finalize", 14) == 0;
    ncclComm_t comm = begin(world, id, rank);
    OK(settled(comm));
    CUstream stream = new_stream();
    const Buffer<float> values(std::vector<float>{1});
    void* address = (void*)values.address;
    if (of_finalize) {
        EXPECT(ncclInProgress, ncclCommFinalize(comm));
        ncclResult_t state;
        OK(ncclCommGetAsyncError(comm, &state));
        CHECK(state == ncclInProgress);
    } else {
        EXPECT(ncclInProgress, ncclAllReduce(address, address, 1, ncclFloat32, ncclSum, comm, stream));
        EXPECT(rank == 1 ? ncclInternalError : ncclSuccess, settled(comm));
    }
    OK(ncclCommAbort(comm));
    OK(cuStreamSynchronize(stream));
}

// A call that never returns: the process exits inside it.
void hang() {
    ncclUniqueId id;
    OK(ncclGetUniqueId(&id));
    std::atomic<bool> returned{false};
    std::thread([&] {
        open_device();
        ncclComm_t comm = begin(1, id, 0);
        OK(settled(comm));
        OK(ncclCommAbort(comm));
        returned = true;
    }).detach();
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    CHECK(!returned);
    _exit(0);
}

// Ranks as processes; one is killed during a collective.
void processes(int world, bool kill_one) {
    int pipes[2];
    CHECK(pipe(pipes) == 0);
    std::vector<pid_t> children;
    for (int rank = 0; rank < world; ++rank) {
        children.push_back(fork());
        if (children.back() != 0) continue;
        ncclUniqueId id;
        if (rank == 0) {
            OK(ncclGetUniqueId(&id));
            for (int other = 1; other < world; ++other) CHECK(write(pipes[1], &id, sizeof id) == sizeof id);
        } else {
            CHECK(read(pipes[0], &id, sizeof id) == sizeof id);
        }
        open_device(rank);
        ncclComm_t comm;
        OK(ncclCommInitRank(&comm, world, id, rank));
        CUstream stream = new_stream();
        const Buffer<float> values(std::vector<float>(100'000, 1));
        void* address = (void*)values.address;
        OK(ncclAllReduce(address, address, 100'000, ncclFloat32, ncclSum, comm, stream));
        OK(cuStreamSynchronize(stream));
        CHECK(values.read()[99'999] == (float)world);
        if (kill_one) {
            if (rank == world - 1) raise(SIGKILL);
            OK(ncclAllReduce(address, address, 100'000, ncclFloat32, ncclSum, comm, stream));
            EXPECT(CUDA_ERROR_NOT_READY, cuStreamQuery(stream));
            OK(ncclCommAbort(comm));
            OK(cuStreamSynchronize(stream));
        } else {
            OK(ncclCommDestroy(comm));
        }
        exit(0);
    }
    for (int rank = 0; rank < world; ++rank) {
        int status;
        CHECK(waitpid(children[(size_t)rank], &status, 0) == children[(size_t)rank]);
        const bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
        CHECK(kill_one && rank == world - 1 ? killed : WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
}

}   // namespace

void nccl_case(const std::string& name, int ranks) {
    if (name == "nccl_collectives") on_ranks(ranks, collectives);
    else if (name == "nccl_numbers") on_ranks(ranks, numbers);
    else if (name == "nccl_graph") on_ranks(ranks, graph);
    else if (name == "nccl_split") on_ranks(ranks, split);
    else if (name == "nccl_split_fault") on_ranks(ranks, split_fault);
    else if (name == "nccl_same_device") on_ranks(ranks, same_device);
    else if (name == "nccl_registration") on_ranks(ranks, registration);
    else if (name == "nccl_misuse") on_ranks(ranks, misuse);
    else if (name == "nccl_fault") on_ranks(ranks, fault);
    else if (name == "nccl_call_fault") on_ranks(ranks, call_fault);
    else if (name == "nccl_hang") hang();
    else if (name == "nccl_processes") processes(ranks, false);
    else if (name == "nccl_killed") processes(ranks, true);
    else CHECK(!"a known case");
}
