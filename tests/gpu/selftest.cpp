// The self-test of the fakes: `selftest CASE`. Each case is a separate process, because some are meant to crash.
#include "selftest.h"

#include <cmath>
#include <thread>

namespace {

const unsigned LENGTH = 1000, BLOCK = 256, BLOCKS = 4;

std::vector<float> ramp(size_t length) {
    std::vector<float> values(length);
    for (size_t i = 0; i < length; ++i) values[i] = (float)(i % 13) - 4.0f;
    return values;
}

void sums() {
    const auto values = ramp(LENGTH);
    const Buffer<float> in(values), out(BLOCKS);
    CUstream stream = new_stream();
    for (const char* name : {"selftest_block_sum", "selftest_shuffle_sum"}) {
        OK(launch(kernel(name), BLOCKS, BLOCK, BLOCK / 32 * 4, stream, in.address, out.address, LENGTH));
        OK(cuStreamSynchronize(stream));
        const auto found = out.read();
        for (unsigned block = 0; block < BLOCKS; ++block) {
            float expected = 0;
            for (unsigned i = block * BLOCK; i < std::min(LENGTH, (block + 1) * BLOCK); ++i) expected += values[i];
            CHECK(found[block] == expected);
        }
    }
}

void lanes() {
    const Buffer<uint64_t> out(64 * 8);
    OK(launch(kernel("selftest_lanes"), 1, 64, 0, nullptr, out.address));
    const auto found = out.read();
    for (uint64_t thread = 0; thread < 64; ++thread) {
        const uint64_t lane = thread % 32, *mine = &found[thread * 8];
        CHECK(mine[0] == 70);
        CHECK(mine[1] == (lane < 3 ? lane : lane - 3) << 33);
        CHECK(mine[2] == (lane % 16 + 5 < 16 ? lane + 5 : lane));
        CHECK(mine[3] == (lane ^ 17));
        CHECK(mine[4] == 0x49249249);
        CHECK(mine[5] == 1);
        CHECK(mine[6] == (lane < 16 ? 3 : 19));
        CHECK(mine[7] == 0);
    }
}

void product(const char* name, unsigned depth) {
    std::vector<float> a(16 * depth), b(depth * 8);
    for (size_t i = 0; i < a.size(); ++i) a[i] = (float)((i * 7) % 11) - 5.0f;
    for (size_t i = 0; i < b.size(); ++i) b[i] = (float)((i * 5) % 9) * 0.25f - 1.0f;
    const Buffer<float> left(a), right(b), out(16 * 8);
    OK(launch(kernel(name), 1, 32, 0, nullptr, left.address, right.address, out.address));
    const auto found = out.read();
    for (unsigned row = 0; row < 16; ++row) {
        for (unsigned column = 0; column < 8; ++column) {
            float expected = 1.0f;
            for (unsigned k = 0; k < depth; ++k) expected += a[row * depth + k] * b[k * 8 + column];
            CHECK(found[row * 8 + column] == expected);
        }
    }
}

// Sums that are not representable: 1 plus small products, which truncation loses.
void truncated() {
    std::vector<float> a(16 * 16, 0.0f), b(16 * 8, 1.0f);
    for (unsigned row = 0; row < 16; ++row) a[row * 16] = 0x1.8p-24f, a[row * 16 + 8] = -0x1p-26f;
    const Buffer<float> left(a), right(b), out(16 * 8);
    OK(launch(kernel("selftest_mma_bf16"), 1, 32, 0, nullptr, left.address, right.address, out.address));
    // To nearest, 1 + 1.5 * 2^-24 is the next number. Truncated it is 1, and less 2^-26 the number before 1.
    const bool truncates = fake::env_number("FAKE_GPU_TRUNCATE", 0) != 0;
    CHECK(out.read()[0] == (truncates ? 0x1.fffffep-1f : 0x1.000002p0f));
}

void packs(unsigned skipped) {
    const Buffer<float> from(ramp(20)), to(20);
    OK(launch(kernel("selftest_copy_packs"), 1, 4, 0, nullptr, from.address + 4 * skipped, to.address));
    CHECK(to.read()[15] == from.read()[15 + skipped]);
}

// Prints the result, for comparison between thread orders.
void no_barrier() {
    const Buffer<float> in(ramp(64)), out(64);
    OK(launch(kernel("selftest_no_barrier"), 1, 64, 0, nullptr, in.address, out.address));
    for (const float value : out.read()) printf("%g ", value);
}

void half_a_barrier() {
    const Buffer<unsigned> out(64);
    OK(launch(kernel("selftest_half_a_barrier"), 1, 64, 0, nullptr, out.address));
}

void limits() {
    const Buffer<unsigned> counter(std::vector<unsigned>{0});
    CUfunction count = kernel("selftest_count");
    CUstream stream = new_stream();
    void* arguments[] = {(void*)&counter.address};
    auto with = [&](unsigned y, unsigned z, unsigned threads, unsigned shared) {
        return cuLaunchKernel(count, 1, y, z, threads, 1, 1, shared, stream, arguments, nullptr);
    };
    OK(with(3, 2, 1024, 48 * 1024));
    EXPECT(CUDA_ERROR_INVALID_VALUE, with(1, 1, 1025, 0));
    EXPECT(CUDA_ERROR_INVALID_VALUE, with(65536, 1, 32, 0));
    EXPECT(CUDA_ERROR_INVALID_VALUE, with(1, 65536, 32, 0));
    EXPECT(CUDA_ERROR_INVALID_VALUE, with(0, 1, 32, 0));
    EXPECT(CUDA_ERROR_INVALID_VALUE, with(1, 1, 32, 48 * 1024 + 1));
    OK(cuFuncSetAttribute(count, (CUfunction_attribute)8, 227 * 1024));
    OK(with(1, 1, 32, 227 * 1024));
    OK(cuStreamSynchronize(stream));
    CHECK(counter.read()[0] == 3 * 2 * 1024 + 32);
    CUfunction bounded = kernel("selftest_block_sum");
    const CUdeviceptr any = counter.address;
    EXPECT(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, launch(bounded, 1, 512, 0, stream, any, any, 0u));
    CUmodule module;
    CUfunction unknown;
    EXPECT(CUDA_ERROR_INVALID_IMAGE, cuModuleLoadData(&module, "some other compiler's"));
    OK(cuModuleLoadData(&module, "FAKE GPU IMAGE\nselftest_axpy\n"));
    EXPECT(CUDA_ERROR_NOT_FOUND, cuModuleGetFunction(&unknown, module, "selftest_count"));
}

void memory() {
    size_t before, after, all;
    OK(cuMemGetInfo_v2(&before, &all));
    {
        const Buffer<unsigned> fresh(10);
        CHECK(fresh.read()[9] == 0xa5a5a5a5);
        OK(cuMemGetInfo_v2(&after, &all));
        CHECK(after == before - 40);
    }
    CUdeviceptr address;
    EXPECT(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc_v2(&address, all + 1));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemFree_v2(12345));
    CUevent start = new_event(0), end = new_event(0);
    CUstream stream = new_stream();
    OK(cuEventRecord(start, stream));
    OK(cuEventRecord(end, stream));
    OK(cuEventSynchronize(end));
    float milliseconds = -1;
    OK(cuEventElapsedTime(&milliseconds, start, end));
    CHECK(milliseconds >= 0);
}

// Keeps a stream busy until it is opened.
struct Gate {
    std::atomic<bool> is_open{false};
    explicit Gate(CUstream stream) {
        OK(cuLaunchHostFunc(stream, [](void* gate) { ((Gate*)gate)->is_open.wait(false); }, this));
    }
    void open() {
        is_open = true;
        is_open.notify_one();
    }
};

void times() {
    const CUevent start = new_event(0), end = new_event(0), untimed = new_event(), never = new_event(0);
    const CUstream stream = new_stream();
    float milliseconds = -1;
    OK(cuEventRecord(start, stream));
    OK(cuEventRecord(untimed, stream));
    Gate gate(stream);
    OK(cuEventRecord(end, stream));
    EXPECT(CUDA_ERROR_NOT_READY, cuEventElapsedTime(&milliseconds, start, end));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuEventElapsedTime(&milliseconds, start, never));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuEventElapsedTime(&milliseconds, untimed, end));
    gate.open();
    OK(cuEventSynchronize(end));
    OK(cuEventElapsedTime(&milliseconds, start, end));
    CHECK(milliseconds >= 0);
}

// Nodes that record and await events, and host functions, in a graph.
void external_nodes() {
    const CUstream stream = new_stream(), other = new_stream();
    const CUevent start = new_event(0), end = new_event(0), given = new_event();
    CUgraph graph;
    CUgraphExec program;
    std::atomic<unsigned> calls{0};
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuEventRecordWithFlags(start, stream, CU_EVENT_RECORD_EXTERNAL));
    OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    OK(cuEventRecordWithFlags(start, stream, CU_EVENT_RECORD_EXTERNAL));
    OK(cuStreamWaitEvent(stream, given, CU_EVENT_WAIT_EXTERNAL));
    OK(cuLaunchHostFunc(stream, [](void* calls) {
        // Calls of CUDA are not allowed here.
        EXPECT(CUDA_ERROR_NOT_PERMITTED, cuMemsetD8Async(1, 0, 1, nullptr));
        ++*(std::atomic<unsigned>*)calls;
    }, &calls));
    OK(cuEventRecordWithFlags(end, stream, CU_EVENT_RECORD_EXTERNAL));
    OK(cuStreamEndCapture(stream, &graph));
    OK(cuGraphInstantiateWithFlags(&program, graph, 0));
    float milliseconds = -1;
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuEventElapsedTime(&milliseconds, start, end));
    for (unsigned round = 1; round <= 3; ++round) {
        Gate gate(other);
        OK(cuEventRecord(given, other));
        OK(cuGraphLaunch(program, stream));
        EXPECT(CUDA_ERROR_NOT_READY, cuEventQuery(end));
        CHECK(calls == round - 1);
        gate.open();
        OK(cuEventSynchronize(end));
        CHECK(calls == round);
        OK(cuEventElapsedTime(&milliseconds, start, end));
        CHECK(milliseconds >= 0);
    }
    OK(cuEventDestroy_v2(end));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuGraphLaunch(program, stream));
}

// The first launch of a kernel loads it, which a capture forbids.
void lazy_loading() {
    const Buffer<unsigned> counter(std::vector<unsigned>{0});
    const CUfunction count = kernel("selftest_count");
    const CUstream stream = new_stream();
    CUgraph graph;
    for (const bool loaded : {false, true}) {
        OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
        EXPECT(loaded ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
               launch(count, 1, 1, 0, stream, counter.address));
        EXPECT(loaded ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture(stream, &graph));
        OK(launch(count, 1, 1, 0, stream, counter.address));
        OK(cuStreamSynchronize(stream));
    }
    CHECK(counter.read()[0] == 2);
}

void past_the_end() {
    const Buffer<float> small(10), zeros(std::vector<float>(11, 1.0f));
    OK(launch(kernel("selftest_axpy"), 1, 32, 0, nullptr, 1.0f, zeros.address, small.address, (uint64_t)11));
}

// ---- Memory from the wrong side, and memory that is gone: each case ends the process ----

void fill_past_the_end() {
    const Buffer<unsigned> small(10);
    OK(cuMemsetD32Async(small.address, 0, 11, nullptr));
}

void host_reads_device() {
    const Buffer<unsigned> small(10);
    printf("%u", *(volatile unsigned*)small.address);
}

void host_copies_device() {
    const Buffer<unsigned> from(10), to(10);
    OK(cuMemcpyHtoDAsync_v2(to.address, (const void*)from.address, 40, new_stream()));
}

void copy_to_host_address() {
    unsigned there[10];
    OK(cuMemsetD32Async((CUdeviceptr)there, 0, 10, nullptr));
}

void kernel_gets_host_address() {
    auto counter = std::make_unique<unsigned>(0);
    OK(launch(kernel("selftest_count"), 1, 1, 0, nullptr, (CUdeviceptr)counter.get()));
}

void kernel_far_past_the_end() {
    const Buffer<unsigned> counter(std::vector<unsigned>{0});
    OK(launch(kernel("selftest_lanes"), 1, 64, 0, nullptr, counter.address));
}

CUdeviceptr freed() { return Buffer<unsigned>(10).address; }

void kernel_gets_freed() { OK(launch(kernel("selftest_count"), 1, 1, 0, nullptr, freed())); }

void copy_from_freed() {
    unsigned there;
    OK(cuMemcpyDtoH_v2(&there, freed(), 4));
}

// A graph names memory that is freed before its second launch.
void graph_uses_freed() {
    auto counter = std::make_unique<Buffer<unsigned>>(std::vector<unsigned>{0});
    CUfunction count = kernel("selftest_count");
    CUstream stream = new_stream();
    OK(launch(count, 1, 3, 0, stream, counter->address));
    OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    OK(launch(count, 1, 3, 0, stream, counter->address));
    CUgraph graph;
    CUgraphExec program;
    OK(cuStreamEndCapture(stream, &graph));
    OK(cuGraphInstantiateWithFlags(&program, graph, 0));
    OK(cuGraphLaunch(program, stream));
    OK(cuStreamSynchronize(stream));
    CHECK(counter->read()[0] == 6);
    counter.reset();
    OK(cuGraphLaunch(program, stream));
    OK(cuStreamSynchronize(stream));
}

// The device reads and writes pinned memory, by its host address.
void pinned() {
    void* memory;
    OK(cuMemHostAlloc(&memory, 4, 0));
    auto* counter = (std::atomic<unsigned>*)memory;
    *counter = 1;
    OK(launch(kernel("selftest_count"), 1, 3, 0, nullptr, (CUdeviceptr)memory));
    CHECK(*counter == 4);
    OK(cuMemsetD8_v2((CUdeviceptr)memory, 0, 4));
    CHECK(*counter == 0);
    OK(cuMemFreeHost(memory));
}

// The memory of a copy is freed before the copy runs.
void freed_pinned() {
    const Buffer<unsigned> small(10);
    CUstream stream = new_stream();
    void* pinned;
    std::atomic<bool> freed{false};
    OK(cuMemHostAlloc(&pinned, 40, 0));
    OK(cuLaunchHostFunc(stream, [](void* freed) { ((std::atomic<bool>*)freed)->wait(false); }, &freed));
    OK(cuMemcpyHtoDAsync_v2(small.address, pinned, 40, stream));
    OK(cuMemFreeHost(pinned));
    freed = true;
    freed.notify_one();
    OK(cuStreamSynchronize(stream));
}

// One stream adds, another copies: with an event between them the copy has the sum, without it sometimes not.
bool copies_the_sum(bool waits) {
    const Buffer<float> x(ramp(LENGTH)), y(std::vector<float>(LENGTH, 0)), z(LENGTH);
    CUfunction axpy = kernel("selftest_axpy");
    CUstream adds = new_stream(), copies = new_stream();
    CUevent added = new_event();
    bool always = true;
    for (int round = 1; round <= 40; ++round) {
        OK(launch(axpy, BLOCKS, BLOCK, 0, adds, 1.0f, x.address, y.address, (uint64_t)LENGTH));
        OK(cuEventRecord(added, adds));
        if (waits) OK(cuStreamWaitEvent(copies, added, 0));
        OK(cuMemcpyDtoDAsync_v2(z.address, y.address, LENGTH * 4, copies));
        OK(cuStreamSynchronize(copies));
        OK(cuStreamSynchronize(adds));
        always = always && z.read()[0] == -4.0f * (float)round;
    }
    return always;
}

void event_wait() { CHECK(copies_the_sum(true)); }
void missing_event_wait() { CHECK(!copies_the_sum(false)); }

// y += x on one branch and counter += 1 on another, joined; replayed three times.
void replay() {
    const Buffer<float> x(ramp(LENGTH)), y(std::vector<float>(LENGTH, 0));
    Buffer<unsigned> counter(std::vector<unsigned>{0});
    CUfunction axpy = kernel("selftest_axpy"), count = kernel("selftest_count");
    CUstream stream = new_stream(), branch = new_stream();
    CUevent fork = new_event(), join = new_event();
    OK(launch(axpy, 1, 1, 0, stream, 0.0f, x.address, y.address, (uint64_t)0));
    OK(launch(count, 1, 1, 0, stream, counter.address));
    OK(cuStreamSynchronize(stream));
    counter.write({0});
    OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    OK(cuEventRecord(fork, stream));
    OK(cuStreamWaitEvent(branch, fork, 0));
    CUstreamCaptureStatus status;
    OK(cuStreamIsCapturing(branch, &status));
    CHECK(status == CU_STREAM_CAPTURE_STATUS_ACTIVE);
    OK(launch(count, 1, 32, 0, branch, counter.address));
    OK(launch(axpy, BLOCKS, BLOCK, 0, stream, 1.0f, x.address, y.address, (uint64_t)LENGTH));
    OK(cuEventRecord(join, branch));
    OK(cuStreamWaitEvent(stream, join, 0));
    OK(launch(count, 1, 1, 0, stream, counter.address));
    CUgraph graph;
    OK(cuStreamEndCapture(stream, &graph));
    size_t nodes;
    OK(cuGraphGetNodes(graph, nullptr, &nodes));
    CHECK(nodes == 3);
    CHECK(counter.read()[0] == 0);
    CUgraphExec program;
    OK(cuGraphInstantiateWithFlags(&program, graph, 0));
    OK(cuGraphDestroy(graph));
    for (int round = 0; round < 3; ++round) OK(cuGraphLaunch(program, stream));
    OK(cuGraphExecDestroy(program));
    OK(cuStreamSynchronize(stream));
    CHECK(counter.read()[0] == 3 * 33);
    CHECK(y.read()[1] == -9.0f);
}

// Errors that end a capture: the call of each case, and the result of ending the capture.
void capture_errors() {
    CUstream stream = new_stream(), other = new_stream();
    CUevent event = new_event(), elsewhere = new_event();
    CUgraph graph;
    CUdeviceptr address;
    OK(cuEventRecord(elsewhere, other));
    auto spoiled_by = [&](CUresult expected, auto call) {
        OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
        EXPECT(expected, call());
        EXPECT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture(stream, &graph));
        CHECK(graph == nullptr);
    };
    spoiled_by(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, [&] { return cuMemAlloc_v2(&address, 64); });
    spoiled_by(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, [&] { return cuStreamSynchronize(stream); });
    spoiled_by(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, [&] { return cuStreamQuery(stream); });
    spoiled_by(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, [&] { return cuCtxSynchronize(); });
    spoiled_by(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, [&] { return cuStreamWaitEvent(stream, elsewhere, 0); });
    spoiled_by(CUDA_ERROR_CAPTURED_EVENT, [&] {
        OK(cuEventRecord(event, stream));
        return cuEventSynchronize(event);
    });
    // Other threads may allocate meanwhile.
    OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    std::thread([&] {
        open_device();
        OK(cuMemAlloc_v2(&address, 64));
        EXPECT(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, cuStreamEndCapture(stream, &graph));
    }).join();
    EXPECT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture(stream, &graph));
    OK(cuMemFree_v2(address));
    // Waiting for the whole context conflicts with a capture of any thread, in any mode; work on other streams does not.
    for (const auto mode : {CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, CU_STREAM_CAPTURE_MODE_RELAXED}) {
        const Buffer<unsigned> zeros(std::vector<unsigned>{1});
        OK(cuStreamBeginCapture_v2(stream, mode));
        std::thread([&] {
            open_device();
            OK(cuMemsetD8Async(zeros.address, 0, 4, other));
            OK(cuStreamSynchronize(other));
            OK(cuMemsetD8_v2(zeros.address, 0, 4));
        }).join();
        OK(cuStreamEndCapture(stream, &graph));
        OK(cuGraphDestroy(graph));
        OK(cuStreamBeginCapture_v2(stream, mode));
        std::thread([&] {
            open_device();
            EXPECT(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cuCtxSynchronize());
        }).join();
        EXPECT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture(stream, &graph));
        // The default stream waits for a stream that is not created as non-blocking.
        CUstream blocking;
        OK(cuStreamCreate(&blocking, 0));
        OK(cuStreamBeginCapture_v2(blocking, mode));
        std::thread([&] {
            open_device();
            EXPECT(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, cuMemsetD8_v2(zeros.address, 0, 4));
        }).join();
        EXPECT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture(blocking, &graph));
        OK(cuStreamDestroy_v2(blocking));
    }
    // In global mode no thread may allocate or free.
    for (const bool allocates : {true, false}) {
        CUdeviceptr earlier;
        OK(cuMemAlloc_v2(&earlier, 64));
        OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
        std::thread([&] {
            open_device();
            EXPECT(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                   allocates ? cuMemAlloc_v2(&address, 64) : cuMemFree_v2(earlier));
        }).join();
        EXPECT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture(stream, &graph));
        OK(cuMemFree_v2(earlier));
    }
    // A branch that is never joined.
    Buffer<unsigned> counter(std::vector<unsigned>{0});
    CUfunction count = kernel("selftest_count");
    OK(launch(count, 1, 1, 0, stream, counter.address));
    OK(cuStreamSynchronize(stream));
    counter.write({0});
    OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    OK(cuEventRecord(event, stream));
    OK(cuStreamWaitEvent(other, event, 0));
    OK(launch(count, 1, 1, 0, other, counter.address));
    EXPECT(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, cuStreamEndCapture(stream, &graph));
    // After the errors both streams work again.
    OK(launch(count, 1, 1, 0, other, counter.address));
    OK(cuStreamSynchronize(other));
    CHECK(counter.read()[0] == 1);
}

}   // namespace

int main(int count, char** words) {
    const std::string name = count > 1 ? words[1] : "";
    if (name.rfind("nccl_", 0) == 0) {
        nccl_case(name, count > 2 ? atoi(words[2]) : 2);
        return 0;
    }
    open_device();
    if (name.rfind("tiles_", 0) == 0) tiles_case(name);
    else if (name == "sums") sums();
    else if (name == "lanes") lanes();
    else if (name == "mma_bf16") product("selftest_mma_bf16", 16);
    else if (name == "mma_f16") product("selftest_mma_f16", 16);
    else if (name == "mma_tf32") product("selftest_mma_tf32", 8);
    else if (name == "truncated") truncated();
    else if (name == "aligned") packs(4);
    else if (name == "misaligned") packs(1);
    else if (name == "no_barrier") no_barrier();
    else if (name == "half_a_barrier") half_a_barrier();
    else if (name == "limits") limits();
    else if (name == "memory") memory();
    else if (name == "times") times();
    else if (name == "external_nodes") external_nodes();
    else if (name == "lazy_loading") lazy_loading();
    else if (name == "past_the_end") past_the_end();
    else if (name == "fill_past_the_end") fill_past_the_end();
    else if (name == "host_reads_device") host_reads_device();
    else if (name == "host_copies_device") host_copies_device();
    else if (name == "copy_to_host_address") copy_to_host_address();
    else if (name == "kernel_gets_host_address") kernel_gets_host_address();
    else if (name == "kernel_far_past_the_end") kernel_far_past_the_end();
    else if (name == "kernel_gets_freed") kernel_gets_freed();
    else if (name == "copy_from_freed") copy_from_freed();
    else if (name == "graph_uses_freed") graph_uses_freed();
    else if (name == "pinned") pinned();
    else if (name == "freed_pinned") freed_pinned();
    else if (name == "event_wait") event_wait();
    else if (name == "missing_event_wait") missing_event_wait();
    else if (name == "replay") replay();
    else if (name == "capture_errors") capture_errors();
    else CHECK(!"a known case");
    return 0;
}
