// NCCL for the ranks of one machine, or of several hosts on it (fake_nccl_bootstrap.cpp): the functions, and the life cycle of communicators.
//
// Faithful where a runtime can go wrong: a non-blocking communicator reports "in progress" and continues on its own
// thread (initialisation, split, finalisation and every launch), refuses calls meanwhile, and writes its handle a second
// time at the end of initialisation. A split writes the new handle only at its end, a little later than it sets the
// state of the communicator that is split, and is refused while that one has operations in progress. A dead peer is never reported; waiting for one ends only by abort. Neither abort
// nor destruction returns before all graphs with operations of the communicator are destroyed.
//
// Injected faults, FAKE_NCCL_FAULT=fault[@rank][:after=N],…  (N: number of operations that still succeed; each replay
// of a graph counts, except for faults of calls):
//   hang_call_init    the call of initialisation never returns
//   hang_init         initialisation never completes
//   init_error        initialisation fails
//   hang_call_split   the call of a split never returns (ranks as in the communicator that is split)
//   hang_split        a split never completes
//   split_error       a split fails
//   call_error        a collective's call fails
//   hang_call         a collective's call never returns
//   stuck_collective  a collective never completes; its stream is busy until abort
//   async_error       the same, and the communicator's state says so
//   stuck_finalize    finalisation never completes
//   stuck_abort       the call of abort never returns
//   register_error    registering memory fails
//   window_error      opening a window fails, and the communicator with it
//
// NCCL_LOCAL_REGISTER=0 and NCCL_WIN_ENABLE=0 switch registrations and windows off, as in the real library.
//
// FAKE_NCCL_TRACE=FILE: calls append their names to the file; those on a stream that is being captured end in
// " captured".
//
// NCCL_DEBUG=INFO prints the version and the connections of a ring, with the transport in FAKE_NCCL_VIA.
//
// FAKE_NCCL_FIRST_MS (0): the first call of each kind of operation takes so long, as the real library then connects
// the ranks.
#include "fake_nccl.h"

#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <unistd.h>

API CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status);

namespace fake_nccl {

static thread_local std::string last_error;

ncclResult_t fail(ncclResult_t result, const std::string& why) {
    last_error = why;
    if (getenv("NCCL_DEBUG") != nullptr) fprintf(stderr, "FAKE NCCL: %s\n", why.c_str());
    return result;
}

void trace_call(const char* call, CUstream stream) {
    const char* path = getenv("FAKE_NCCL_TRACE");
    FILE* file = path == nullptr ? nullptr : fopen(path, "a");
    if (file == nullptr) return;
    CUstreamCaptureStatus captured = CU_STREAM_CAPTURE_STATUS_NONE;
    if (stream != nullptr) cuStreamIsCapturing(stream, &captured);
    fprintf(file, "%s%s\n", call, captured == CU_STREAM_CAPTURE_STATUS_NONE ? "" : " captured");
    fclose(file);
}

bool is_faulty(const char* fault, int rank, long collectives) {
    const char* text = getenv("FAKE_NCCL_FAULT");
    for (const char* at = text; at != nullptr && *at != 0;) {
        const std::string entry(at, strcspn(at, ","));
        const size_t rank_at = entry.find('@'), after_at = entry.find(":after=");
        const std::string name = entry.substr(0, std::min(rank_at, after_at));
        const bool here = rank_at == std::string::npos || atoi(entry.c_str() + rank_at + 1) == rank;
        const long after = after_at == std::string::npos ? 0 : atol(entry.c_str() + after_at + 7);
        if (name == fault && here && collectives >= after) return true;
        at += entry.size();
        if (*at == ',') ++at;
    }
    return false;
}

namespace {

[[noreturn]] void hang() {
    for (;;) pause();
}

struct Comm {
    int rank, world, device;
    bool blocking;
    Transport transport;
    std::atomic<unsigned> state{ncclInProgress};
    std::atomic<bool> aborted{false};
    std::atomic<int> background{0};         // threads working for it
    std::mutex running;                     // one operation at a time
    std::shared_ptr<fake::EventRecord> last;     // the last operation issued outside of captures
    std::atomic<long> issued{0}, executed{0};
    std::atomic<int> captured{0};           // operations in graphs
    std::set<Kind> connected;               // kinds of operations called before
    bool finalized = false;
    std::mutex splitting;
    std::shared_ptr<Comm> child;            // of a split in progress; aborted with this one
    Registrations registrations;

    // Ends "in progress"; an error that occurred meanwhile is kept.
    void settle(ncclResult_t result) {
        unsigned expected = ncclInProgress;
        state.compare_exchange_strong(expected, result);
    }

    // Memory that graphs refer to is not freed, however the communicator ends.
    void wait_for_graphs() {
        while (captured > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }

    void wait_for_abort() {
        while (!aborted) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
};
using CommPtr = std::shared_ptr<Comm>;

}   // namespace
}   // namespace fake_nccl

using namespace fake_nccl;

// The object behind a handle, known until it is destroyed or aborted.
struct ncclComm {
    CommPtr comm;
};
typedef ncclComm* ncclComm_t;

namespace fake_nccl {
namespace {

std::mutex handles_mutex;
std::set<ncclComm_t>& handles() {
    static auto* all = new std::set<ncclComm_t>;
    return *all;
}

CommPtr comm_of(ncclComm_t handle) {
    std::lock_guard lock(handles_mutex);
    return handles().count(handle) == 0 ? nullptr : handle->comm;
}

CommPtr take(ncclComm_t handle) {
    std::lock_guard lock(handles_mutex);
    if (handles().erase(handle) == 0) return nullptr;
    CommPtr comm = handle->comm;
    delete handle;
    return comm;
}

// Checks that the communicator is ready for a call.
ncclResult_t ready(const CommPtr& comm) {
    if (comm == nullptr) return fail(ncclInvalidArgument, "no such communicator");
    const auto state = (ncclResult_t)comm->state.load();
    if (state == ncclInProgress) {
        return fail(ncclInvalidArgument, "the communicator is used before the previous operation returned ncclSuccess");
    }
    if (comm->finalized) return fail(ncclInvalidUsage, "the communicator is used after its finalisation");
    return state;
}

// Runs `work` in the caller or, for a non-blocking communicator, on a thread that sets its state at the end.
ncclResult_t perform(const CommPtr& comm, std::function<ncclResult_t()> work) {
    if (comm->blocking) {
        const ncclResult_t result = work();
        comm->settle(result);
        return result;
    }
    comm->state = ncclInProgress;
    ++comm->background;
    std::thread([comm, work] {
        fake::use_device(comm->device);
        fake::delay();
        comm->settle(work());
        --comm->background;
    }).detach();
    return ncclInProgress;
}

// ---- Operations ----

struct Issued {
    CommPtr comm;
    CUstream stream;
    Op op;
};

thread_local int depth = 0;
thread_local std::vector<Issued> group;
thread_local std::vector<std::thread> joining;   // blocking initialisations within a group
thread_local ncclResult_t group_result = ncclSuccess;

// Whether this rank's part of an operation reads its send buffer, and whether it writes its receive buffer.
bool gives(const Comm& comm, const Op& op) {
    return op.kind != Kind::Recv && (op.kind != Kind::Broadcast || op.peer == comm.rank);
}
bool gets(const Comm& comm, const Op& op) {
    return op.kind != Kind::Send && (op.kind != Kind::Reduce || op.peer == comm.rank);
}

// The operation with the bytes of its buffers instead of their device addresses.
Op on_host(Comm& comm, Op op) {
    // In place, the small buffer is at another offset on every rank.
    op.place = comm.registrations.place(gets(comm, op) && op.kind != Kind::ReduceScatter ? op.recv : op.send);
    const size_t part = op.count * size_of(op.type), whole = part * (size_t)comm.world;
    const size_t given = op.kind == Kind::ReduceScatter ? whole : part, got = op.kind == Kind::AllGather ? whole : part;
    op.send = (unsigned char*)fake::device_bytes((CUdeviceptr)op.send, gives(comm, op) ? given : 0, "NCCL's send buffer");
    op.recv = (unsigned char*)fake::device_bytes((CUdeviceptr)op.recv, gets(comm, op) ? got : 0, "NCCL's receive buffer");
    return op;
}

void run(Comm& comm, std::vector<Op> ops) {
    std::lock_guard lock(comm.running);
    const long before = comm.executed++;
    const bool broken = is_faulty("async_error", comm.rank, before);
    if (broken) comm.state = ncclRemoteError;
    if (broken || is_faulty("stuck_collective", comm.rank, before)) return comm.wait_for_abort();
    for (Op& op : ops) op = on_host(comm, op);
    if (ops[0].is_pair()) {
        comm.transport.exchange(ops, comm.aborted);
    } else {
        comm.transport.collective(ops[0], comm.aborted);
    }
}

// Counts an operation while a graph contains it.
struct InGraph {
    CommPtr comm;
    explicit InGraph(const CommPtr& of) : comm(of) { ++comm->captured; }
    ~InGraph() { --comm->captured; }
    InGraph(const InGraph&) = delete;
};

// Enqueues one collective, or the sends and receives of one group. The real library also keeps a communicator's
// operations in order, on any streams.
ncclResult_t enqueue(const CommPtr& comm, CUstream stream, std::vector<Op> ops) {
    const long before = comm->issued++;
    if (is_faulty("hang_call", comm->rank, before)) hang();
    if (is_faulty("call_error", comm->rank, before)) return fail(ncclInternalError, "call_error was asked for");
    if (comm->connected.insert(ops[0].kind).second) {
        std::this_thread::sleep_for(std::chrono::milliseconds(fake::env_number("FAKE_NCCL_FIRST_MS", 0)));
    }
    CUstreamCaptureStatus captured = CU_STREAM_CAPTURE_STATUS_NONE;
    cuStreamIsCapturing(stream, &captured);
    const bool at_once = captured == CU_STREAM_CAPTURE_STATUS_NONE;
    const auto previous = at_once ? comm->last : nullptr;
    auto done = std::make_shared<fake::EventRecord>();
    const auto in_graph = at_once ? nullptr : std::make_shared<InGraph>(comm);
    const CUresult result = fake::enqueue(stream, [=, ops = std::move(ops)] {
        (void)in_graph;
        if (previous != nullptr) previous->wait();
        run(*comm, ops);
        if (!done->passed()) done->pass();
    });
    if (result == CUDA_SUCCESS && at_once) comm->last = done;
    if (result == CUDA_SUCCESS) return ncclSuccess;
    return fail(ncclUnhandledCudaError, "the stream refused the operation with error " + std::to_string(result));
}

ncclResult_t enqueue_all(const std::vector<Issued>& issued) {
    std::vector<bool> gone(issued.size(), false);
    for (size_t i = 0; i < issued.size(); ++i) {
        if (gone[i]) continue;
        const Issued& first = issued[i];
        std::vector<Op> ops = {first.op};
        for (size_t j = i + 1; first.op.is_pair() && j < issued.size(); ++j) {
            if (!issued[j].op.is_pair() || issued[j].comm != first.comm) continue;
            ops.push_back(issued[j].op);
            gone[j] = true;
        }
        if (const ncclResult_t result = enqueue(first.comm, first.stream, std::move(ops))) return result;
    }
    return ncclSuccess;
}

ncclResult_t launch(std::vector<Issued> issued) {
    // Each communicator gets its part of the group.
    ncclResult_t result = ncclSuccess;
    while (!issued.empty()) {
        const CommPtr comm = issued[0].comm;
        std::vector<Issued> own, others;
        for (auto& one : issued) (one.comm == comm ? own : others).push_back(one);
        const ncclResult_t part = perform(comm, [own] { return enqueue_all(own); });
        if (part != ncclSuccess) result = part;
        issued = std::move(others);
    }
    return result;
}

ncclResult_t issue(ncclComm_t handle, CUstream stream, const Op& op) {
    const CommPtr comm = comm_of(handle);
    ncclResult_t result = ready(comm);
    if (result == ncclSuccess && (size_of(op.type) == 0 || op.op >= ncclNumOps)) {
        result = fail(ncclInvalidArgument, "no such type or operation");
    }
    if (result == ncclSuccess && (op.peer < 0 || op.peer >= comm->world)) {
        result = fail(ncclInvalidArgument, "no such rank");
    }
    const bool missing = result == ncclSuccess && ((gives(*comm, op) && op.send == nullptr) ||
                                                   (gets(*comm, op) && op.recv == nullptr));
    if (missing && op.count > 0) {
        result = fail(ncclInvalidArgument, "a buffer is null");
    }
    if (result != ncclSuccess) {
        group_result = result;
        return result;
    }
    if (op.count == 0) return ncclSuccess;
    if (depth == 0) return launch({{comm, stream, op}});
    group.push_back({comm, stream, op});
    return ncclSuccess;
}

// Prints what the real library prints with NCCL_DEBUG=INFO about the version and about a ring of the ranks.
void describe(const Comm& comm) {
    const char* level = getenv("NCCL_DEBUG");
    if (level == nullptr || strcmp(level, "INFO") != 0) return;
    const char* transport = getenv("FAKE_NCCL_VIA");
    if (transport == nullptr) transport = fake::env_number("FAKE_GPU_PEERS", 0) != 0 ? "P2P/CUMEM/read" : "SHM/direct/direct";
    const int peer = (comm.rank + 1) % comm.world, version = (int)fake::env_number("FAKE_NCCL_VERSION", 22809);
    char lines[512];
    int length = 0;
    if (comm.rank == 0) {
        length = snprintf(lines, sizeof lines, "fake:%d:%d [%d] NCCL INFO NCCL version %d.%d.%d+cuda13.0\n", getpid(),
                          getpid(), comm.device, version / 10000, version / 100 % 100, version % 100);
    }
    if (comm.world > 1) {
        length += snprintf(lines + length, sizeof lines - (size_t)length,
                           "fake:%d:%d [%d] NCCL INFO Channel 00/01 : %d[%d] -> %d[%d] via %s\n", getpid(), getpid(),
                           comm.device, comm.rank, comm.device, peer, peer, transport);
    }
    fwrite(lines, 1, (size_t)length, stdout);
    fflush(stdout);
}

ncclResult_t initialize(const CommPtr& comm, const ncclUniqueId& id) {
    if (is_faulty("hang_init", comm->rank)) {
        comm->wait_for_abort();
        return ncclInternalError;
    }
    if (is_faulty("init_error", comm->rank)) return fail(ncclSystemError, "init_error was asked for");
    std::string why;
    const CUuuid device = fake::device_uuid(comm->device);
    const ncclResult_t result = comm->transport.join(id, comm->rank, comm->world, device, comm->aborted, why);
    if (result == ncclSuccess) describe(*comm);
    return result == ncclSuccess ? result : fail(result, why);
}

CommPtr new_comm(int rank, int world, int device, bool blocking) {
    auto comm = std::make_shared<Comm>();
    comm->rank = rank;
    comm->world = world;
    comm->device = device;
    comm->blocking = blocking;
    return comm;
}

ncclComm_t new_handle(const CommPtr& comm) {
    auto* made = new ncclComm{comm};
    std::lock_guard lock(handles_mutex);
    handles().insert(made);
    return made;
}

ncclResult_t start(ncclComm_t* handle, int world, const ncclUniqueId& id, int rank, bool blocking) {
    const int device = fake::current_device();
    if (device < 0) return fail(ncclUnhandledCudaError, "no device is current");
    if (handle == nullptr || world < 1 || world > MAX_RANKS || rank < 0 || rank >= world) {
        return fail(ncclInvalidArgument, "no such rank");
    }
    if (is_faulty("hang_call_init", rank)) hang();
    const CommPtr comm = new_comm(rank, world, device, blocking);
    const ncclComm_t made = new_handle(comm);
    *handle = made;
    auto work = [comm, id, handle, made] {
        const ncclResult_t result = initialize(comm, id);
        // As in the real library, from any thread.
        if (!comm->aborted) *handle = made;
        return result;
    };
    if (!blocking || depth == 0) return perform(comm, work);
    joining.emplace_back([comm, work] {
        fake::use_device(comm->device);
        comm->settle(work());
    });
    return ncclSuccess;
}

// Runs a split on `parent`; `child` is null without a color.
ncclResult_t split(const CommPtr& parent, const CommPtr& child, int color, int key) {
    if (is_faulty("hang_split", parent->rank)) {
        parent->wait_for_abort();
        return ncclInternalError;
    }
    if (is_faulty("split_error", parent->rank)) return fail(ncclSystemError, "split_error was asked for");
    int rank, world;
    ncclUniqueId id;
    if (!parent->transport.split(color, key, parent->aborted, &rank, &world, &id)) return ncclInternalError;
    if (child == nullptr) return ncclSuccess;
    child->rank = rank;
    child->world = world;
    std::string why;
    const CUuuid device = fake::device_uuid(child->device);
    const ncclResult_t result = child->transport.join(id, rank, world, device, child->aborted, why);
    return result == ncclSuccess ? result : fail(result, why);
}

void set_child(const CommPtr& parent, const CommPtr& child) {
    std::lock_guard lock(parent->splitting);
    parent->child = child;
}

// Waits for the issued operations and for the other ranks' finalisation.
ncclResult_t finish(const CommPtr& comm) {
    if (is_faulty("stuck_finalize", comm->rank)) comm->wait_for_abort();
    if (comm->last != nullptr) comm->last->wait();
    comm->transport.barrier(comm->aborted);
    return ncclSuccess;
}

Op make(Kind kind, const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op, int peer) {
    return {kind, (const unsigned char*)send, (unsigned char*)recv, count, type, op, peer};
}

}   // namespace
}   // namespace fake_nccl

// ---- Without a communicator ----

API ncclResult_t ncclGetVersion(int* version) {
    *version = (int)fake::env_number("FAKE_NCCL_VERSION", 22809);
    return ncclSuccess;
}

API ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    trace_call(__func__);
    return Transport::create_id(id) ? ncclSuccess : fail(ncclSystemError, "no shared memory for the ranks");
}

API const char* ncclGetErrorString(ncclResult_t result) {
    const char* texts[] = {"no error",         "unhandled cuda error", "unhandled system error",
                           "internal error",   "invalid argument",     "invalid usage",
                           "remote process exited or there was a network error", "NCCL operation in progress"};
    return result < sizeof texts / sizeof *texts ? texts[result] : "unknown result code";
}

API const char* ncclGetLastError(ncclComm_t) { return last_error.c_str(); }

// ---- A communicator's life ----

API ncclResult_t ncclCommInitRank(ncclComm_t* comm, int world, ncclUniqueId id, int rank) {
    return start(comm, world, id, rank, true);
}

API ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int world, ncclUniqueId id, int rank, ncclConfig_t* config) {
    trace_call(__func__);
    if (config == nullptr) return start(comm, world, id, rank, true);
    if (config->magic != 0xcafebeef || config->size < sizeof(ncclConfig_t)) {
        return fail(ncclInvalidArgument, "the configuration was not initialised");
    }
    const bool unset = config->max_ctas == INT_MIN;
    if (!unset && config->max_ctas <= 0) return fail(ncclInvalidArgument, "maxCTAs must be positive");
    return start(comm, world, id, rank, config->blocking != 0);
}

API ncclResult_t ncclCommSplit(ncclComm_t handle, int color, int key, ncclComm_t* made, ncclConfig_t* config) {
    trace_call(__func__);
    const CommPtr parent = comm_of(handle);
    if (const ncclResult_t result = ready(parent)) return result;
    if (made == nullptr || color < -1) return fail(ncclInvalidArgument, "no handle to write, or a negative color");
    if (config != nullptr && (config->magic != 0xcafebeef || config->size < sizeof(ncclConfig_t))) {
        return fail(ncclInvalidArgument, "the configuration was not initialised");
    }
    // The real library may deadlock.
    if (depth > 0 || (parent->last != nullptr && !parent->last->passed())) {
        return fail(ncclInvalidUsage, "a communicator is split while it has operations in progress");
    }
    if (fake::current_device() != parent->device) return fail(ncclInvalidUsage, "another device is current");
    if (is_faulty("hang_call_split", parent->rank)) hang();
    const bool blocking = config == nullptr ? parent->blocking : config->blocking != 0;
    const CommPtr child = color < 0 ? nullptr : new_comm(0, 0, parent->device, blocking);
    const ncclComm_t new_one = child == nullptr ? nullptr : new_handle(child);
    *made = nullptr;
    set_child(parent, child);
    parent->state = ncclInProgress;
    ++parent->background;
    std::thread work([=] {
        fake::use_device(parent->device);
        fake::delay();
        const ncclResult_t result = split(parent, child, color, key);
        set_child(parent, nullptr);
        // The real library then writes to address 0.
        if (child == nullptr && result != ncclSuccess) std::abort();
        if (child != nullptr) child->settle(result);
        parent->settle(result);
        if (!parent->blocking) fake::delay();
        __atomic_store_n(made, new_one, __ATOMIC_RELEASE);
        --parent->background;
    });
    if (!parent->blocking) {
        work.detach();
        // As the real library, which looks at the new communicator's state, and there is none yet.
        return ncclSuccess;
    }
    work.join();
    return (ncclResult_t)parent->state.load();
}

API ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* state) {
    const CommPtr comm = comm_of(handle);
    if (comm == nullptr) return fail(ncclInvalidArgument, "no such communicator");
    // Nothing has begun before the end of the group.
    if (depth > 0) trace_call("ncclCommGetAsyncError in a group");
    *state = (ncclResult_t)comm->state.load();
    return ncclSuccess;
}

// ---- Registered memory ----

// Local, and never in progress. NCCL accepts it in any state; that a runtime waits is checked nevertheless.
API ncclResult_t ncclCommRegister(ncclComm_t handle, void* address, size_t bytes, void** made) {
    trace_call(__func__);
    const CommPtr comm = comm_of(handle);
    if (const ncclResult_t result = ready(comm)) return result;
    *made = nullptr;
    if (fake::env_number("NCCL_LOCAL_REGISTER", 1) == 0) return ncclSuccess;
    if (is_faulty("register_error", comm->rank)) return fail(ncclSystemError, "register_error was asked for");
    *made = comm->registrations.add((CUdeviceptr)address, bytes);
    return *made == nullptr ? fail(ncclUnhandledCudaError, "no device memory is registered") : ncclSuccess;
}

API ncclResult_t ncclCommDeregister(ncclComm_t handle, void* registered) {
    trace_call(__func__);
    const CommPtr comm = comm_of(handle);
    if (const ncclResult_t result = ready(comm)) return result;
    if (comm->registrations.remove((const Registered*)registered)) return ncclSuccess;
    return fail(ncclInvalidUsage, "Deregister: Could not find handle");
}

// Collective. The handle is written at the end; it stays null if windows are switched off.
API ncclResult_t ncclCommWindowRegister(ncclComm_t handle, void* address, size_t bytes, void** window, int) {
    trace_call(__func__);
    const CommPtr comm = comm_of(handle);
    if (const ncclResult_t result = ready(comm)) return result;
    *window = nullptr;
    if (address == nullptr || bytes == 0) return fail(ncclInvalidArgument, "a window on nothing");
    if (fake::env_number("NCCL_WIN_ENABLE", 1) == 0) return ncclSuccess;
    return perform(comm, [=] {
        std::lock_guard lock(comm->running);
        if (is_faulty("window_error", comm->rank)) return fail(ncclSystemError, "window_error was asked for");
        Registered* opened = comm->registrations.open_window((CUdeviceptr)address, bytes);
        if (opened == nullptr) return fail(ncclUnhandledCudaError, "a window on no device memory");
        if (!comm->transport.open_window(bytes, comm->aborted)) return ncclInternalError;
        __atomic_store_n(window, (void*)opened, __ATOMIC_RELEASE);
        return ncclSuccess;
    });
}

API ncclResult_t ncclCommWindowDeregister(ncclComm_t handle, void* window) {
    trace_call(__func__);
    const CommPtr comm = comm_of(handle);
    if (const ncclResult_t result = ready(comm)) return result;
    if (comm->registrations.close_window((const Registered*)window)) return ncclSuccess;
    return fail(ncclInvalidUsage, "no such window");
}

API ncclResult_t ncclCommFinalize(ncclComm_t handle) {
    trace_call(__func__);
    const CommPtr comm = comm_of(handle);
    if (const ncclResult_t result = ready(comm)) return result;
    comm->finalized = true;
    return perform(comm, [comm] { return finish(comm); });
}

// Collective too, unless the communicator is finalised or was never initialised.
API ncclResult_t ncclCommDestroy(ncclComm_t handle) {
    trace_call(__func__);
    const CommPtr comm = take(handle);
    if (comm == nullptr) return fail(ncclInvalidArgument, "no such communicator");
    while (comm->background > 0) std::this_thread::yield();
    if (!comm->finalized && comm->state == ncclSuccess) finish(comm);
    comm->wait_for_graphs();
    // Threads that have ended their work may still have the communicator for a moment.
    comm->registrations.clear();
    return ncclSuccess;
}

API ncclResult_t ncclCommAbort(ncclComm_t handle) {
    trace_call(__func__);
    const CommPtr comm = take(handle);
    if (comm == nullptr) return fail(ncclInvalidArgument, "no such communicator");
    if (is_faulty("stuck_abort", comm->rank)) hang();
    comm->aborted = true;
    comm->transport.notify();
    {
        std::lock_guard lock(comm->splitting);
        if (comm->child != nullptr) comm->child->aborted = true;
    }
    // Its threads write to the caller's memory.
    while (comm->background > 0) std::this_thread::yield();
    comm->wait_for_graphs();
    comm->registrations.clear();
    return ncclSuccess;
}

API ncclResult_t ncclCommCount(ncclComm_t handle, int* count) {
    const CommPtr comm = comm_of(handle);
    if (const ncclResult_t result = ready(comm)) return result;
    *count = comm->world;
    return ncclSuccess;
}

API ncclResult_t ncclCommUserRank(ncclComm_t handle, int* rank) {
    const CommPtr comm = comm_of(handle);
    if (const ncclResult_t result = ready(comm)) return result;
    *rank = comm->rank;
    return ncclSuccess;
}

API ncclResult_t ncclCommCuDevice(ncclComm_t handle, int* device) {
    const CommPtr comm = comm_of(handle);
    if (const ncclResult_t result = ready(comm)) return result;
    *device = comm->device;
    return ncclSuccess;
}

// ---- Groups and operations ----

API ncclResult_t ncclGroupStart() {
    trace_call(__func__);
    if (depth++ == 0) group_result = ncclSuccess;
    return ncclSuccess;
}

API ncclResult_t ncclGroupEnd() {
    trace_call(__func__);
    if (depth == 0) return fail(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
    if (--depth > 0) return ncclSuccess;
    auto issued = std::move(group);
    group.clear();
    auto threads = std::move(joining);
    joining.clear();
    for (auto& thread : threads) thread.join();
    if (group_result != ncclSuccess) return group_result;
    return launch(std::move(issued));
}

API ncclResult_t ncclAllReduce(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, CUstream stream) {
    trace_call(__func__, stream);
    return issue(comm, stream, make(Kind::AllReduce, send, recv, count, type, op, 0));
}
API ncclResult_t ncclReduce(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                            ncclComm_t comm, CUstream stream) {
    trace_call(__func__, stream);
    return issue(comm, stream, make(Kind::Reduce, send, recv, count, type, op, root));
}
API ncclResult_t ncclBroadcast(const void* send, void* recv, size_t count, ncclDataType_t type, int root,
                               ncclComm_t comm, CUstream stream) {
    trace_call(__func__, stream);
    return issue(comm, stream, make(Kind::Broadcast, send, recv, count, type, ncclSum, root));
}
API ncclResult_t ncclAllGather(const void* send, void* recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                               CUstream stream) {
    trace_call(__func__, stream);
    return issue(comm, stream, make(Kind::AllGather, send, recv, count, type, ncclSum, 0));
}
API ncclResult_t ncclReduceScatter(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                                   ncclComm_t comm, CUstream stream) {
    trace_call(__func__, stream);
    return issue(comm, stream, make(Kind::ReduceScatter, send, recv, count, type, op, 0));
}
API ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                          CUstream stream) {
    trace_call(__func__, stream);
    return issue(comm, stream, make(Kind::Send, send, nullptr, count, type, ncclSum, peer));
}
API ncclResult_t ncclRecv(void* recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, CUstream stream) {
    trace_call(__func__, stream);
    return issue(comm, stream, make(Kind::Recv, nullptr, recv, count, type, ncclSum, peer));
}
