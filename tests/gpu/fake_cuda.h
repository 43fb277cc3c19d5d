// The types of the driver API that the fakes use, and the interfaces between the fakes.
//
// The types are those of cuda.h. With MGPU_REAL_CUDA_H defined, after the real header, the fakes are checked against
// it.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

#ifndef MGPU_REAL_CUDA_H
enum CUresult : unsigned {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_IMAGE = 200,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_ILLEGAL_STATE = 401,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_PEER_ACCESS_UNSUPPORTED = 217,
    CUDA_ERROR_ILLEGAL_ADDRESS = 700,
    CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES = 701,
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704,
    CUDA_ERROR_NOT_PERMITTED = 800,
    CUDA_ERROR_NOT_SUPPORTED = 801,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
    CUDA_ERROR_STREAM_CAPTURE_MERGE = 902,
    CUDA_ERROR_STREAM_CAPTURE_UNMATCHED = 903,
    CUDA_ERROR_STREAM_CAPTURE_UNJOINED = 904,
    CUDA_ERROR_STREAM_CAPTURE_ISOLATION = 905,
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906,
    CUDA_ERROR_CAPTURED_EVENT = 907,
    CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD = 908,
    CUDA_ERROR_UNKNOWN = 999,
};
enum CUdevice_attribute : unsigned {};
enum CUfunction_attribute : unsigned {};
enum CUdevice_P2PAttribute : unsigned {};
enum CUstreamCaptureMode : unsigned {
    CU_STREAM_CAPTURE_MODE_GLOBAL = 0,
    CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1,
    CU_STREAM_CAPTURE_MODE_RELAXED = 2,
};
enum CUstreamCaptureStatus : unsigned {
    CU_STREAM_CAPTURE_STATUS_NONE = 0,
    CU_STREAM_CAPTURE_STATUS_ACTIVE = 1,
    CU_STREAM_CAPTURE_STATUS_INVALIDATED = 2,
};
enum CUjit_option : unsigned {};
enum CUfunc_cache : unsigned {};
enum CUdriverProcAddressQueryResult : unsigned {
    CU_GET_PROC_ADDRESS_SUCCESS = 0,
    CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND = 1,
};
enum { CU_STREAM_NON_BLOCKING = 1, CU_EVENT_DISABLE_TIMING = 2 };
enum { CU_EVENT_RECORD_EXTERNAL = 1, CU_EVENT_WAIT_EXTERNAL = 1 };

typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef uint64_t cuuint64_t;
typedef struct CUctx_st* CUcontext;
typedef struct CUmod_st* CUmodule;
typedef struct CUfunc_st* CUfunction;
typedef struct CUstream_st* CUstream;
typedef struct CUevent_st* CUevent;
typedef struct CUgraph_st* CUgraph;
typedef struct CUgraphExec_st* CUgraphExec;
typedef struct CUgraphNode_st* CUgraphNode;
struct CUgraphEdgeData;
typedef struct CUuuid_st {
    char bytes[16];
} CUuuid;
typedef void (*CUhostFn)(void*);
#endif

namespace fake {

// A work item of a stream: a kernel, a copy, a collective.
using Work = std::function<void()>;

struct Queue;
using QueuePtr = std::shared_ptr<Queue>;

// The state of a recorded event. Waiting for one that is never completed blocks forever, as on a GPU.
class EventRecord {
  public:
    void pass();
    void wait();
    bool passed() const { return done.load(std::memory_order_acquire); }
    std::chrono::steady_clock::time_point when;
    QueuePtr queue;           // the stream that it was recorded on, and the number of its works until then
    uint64_t position = 0;

  private:
    std::atomic<bool> done{false};
    std::mutex mutex;
    std::condition_variable changed;
};

// The beginning of an image made by the fake NVRTC for the fake driver.
constexpr const char* IMAGE_MAGIC = "FAKE GPU IMAGE";

using Dependencies = std::vector<unsigned>;   // indices of nodes

// A node of a capture or a graph.
struct Node {
    Work work;
    Dependencies after;
    const void* lane;   // the stream it was captured from; lanes run concurrently
    CUevent records = nullptr, awaits = nullptr;   // of external event nodes
};

// The records of the external event nodes of one launch, by node.
using ExternalEvents = std::vector<std::shared_ptr<EventRecord>>;

struct Capture {
    CUstream origin;
    CUstreamCaptureMode mode;
    const void* thread;
    unsigned long long id;
    bool invalid = false;
    bool ended = false;
    std::vector<Node> nodes;
    std::vector<CUstream> members;
};

using CapturePtr = std::shared_ptr<Capture>;

// ---- Interface for the other fakes ----

// Enqueues work on a stream, or adds it to the graph captured from the stream. It runs on the stream's own thread,
// which holds no lock of the fakes. Stream 0 waits for all streams of its device and for the work itself.
CUresult enqueue(CUstream stream, Work work);

// The ordinal of this thread's current device, -1 if there is none.
int current_device();

// Sets the current device of a thread of the fakes.
void use_device(int ordinal);

// The 16 bytes that identify a device, equal in all processes.
CUuuid device_uuid(int ordinal);

// Like cuMemAlloc and cuMemFree, which waits for the device.
CUresult allocate(CUdeviceptr* address, size_t bytes);
CUresult release(CUdeviceptr address, bool waits = true);

// Whether a range is device memory that is allocated.
bool is_allocated(CUdeviceptr address, size_t bytes);

// The bytes at a device address, or at one of pinned memory. For work that runs, because memory may be freed before.
// Ends the process with a message that names `user` if `bytes` bytes of such memory are not there.
void* device_bytes(CUdeviceptr address, size_t bytes, const char* user);

// Whether the calling thread does something that a capture forbids; then those captures are invalidated.
bool forbidden_in_capture();

// Whether a stream of the device is being captured; then those captures are invalidated. For calls that wait for the
// whole context, which conflict with a capture of any thread in any mode.
bool captured_on(int ordinal);

// Waits at random for up to FAKE_GPU_DELAY_US, before each work item of a stream.
void delay();

// Whether the driver is new enough for a library that was built with a version of CUDA, 12080 for 12.8.
bool driver_supports(size_t built_with);

// Counts a call, see fake_counters.cpp.
enum class Count { Kernels, Graphs, Uploads, Drains };
void count(Count what);

// Notes the number of nodes of a graph, see fake_counters.cpp.
void note_graph(size_t nodes);

// Whether the GPU executes nothing (FAKE_GPU_IDLE=1): for counting what would be launched, in no time and memory.
bool is_idle();

// The value of an integer environment variable.
long env_number(const char* variable, long otherwise);

// ---- Internal to the driver ----

QueuePtr new_queue();
uint64_t submit(const QueuePtr& queue, Work work);   // returns the number of works so far
bool is_drained(Queue& queue);
void drain(Queue& queue);   // waits for the current work items
void note_drain(Queue& queue, uint64_t position = UINT64_MAX);   // counts a wait, if it is for all works
void close(Queue& queue);   // its thread ends after the current work items

// An instantiated graph: the nodes of each lane run in order on a separate thread.
class ExecutableGraph {
  public:
    explicit ExecutableGraph(std::shared_ptr<const std::vector<Node>> nodes);
    ~ExecutableGraph();
    void run(const ExternalEvents& events);

    const std::shared_ptr<const std::vector<Node>> nodes;

  private:
    std::vector<std::vector<unsigned>> lanes;
    std::vector<QueuePtr> helpers;
    std::mutex running;   // launches of one graph are serialised
};

// Whether a number lies in the range of the device addresses so far.
bool is_device_address(uint64_t address);

// Whether the host has memory at an address. It is unlikely of a number that is none.
bool is_host_address(uint64_t address);

// Where the bytes of a device address are, allocated or not.
unsigned char* bytes_at(CUdeviceptr address);

// Where memory of `bytes` bytes begins: at a multiple of this. Large memory begins at huge pages, which take fewer faults to fill.
constexpr size_t PAGE = 4096, HUGE_PAGE = (size_t)2 << 20;
constexpr size_t page_of(size_t bytes) { return bytes < HUGE_PAGE ? PAGE : HUGE_PAGE; }
constexpr size_t round_up(size_t bytes, size_t page) { return (bytes + page - 1) / page * page; }

// A new device address with `bytes` accessible bytes, 0 if there is no memory; and their end.
CUdeviceptr open_pages(size_t bytes);
void close_pages(CUdeviceptr address, size_t bytes);

// A word of a kernel's arguments as the kernel gets it: a device address becomes that of its bytes.
uint64_t kernel_argument(uint64_t word, const char* kernel);

struct Allocation {
    size_t bytes;
    int ordinal;
};

// The state of the driver. Its lock is never held while waiting for a stream.
struct DriverState {
    std::mutex mutex;
    std::set<CUstream> streams;
    std::set<CUevent> events;
    std::set<CUgraph> graphs;
    std::set<CUgraphExec> programs;
    std::map<CUdeviceptr, Allocation> memory;
    std::map<uintptr_t, size_t> pinned;      // host memory that copies may access after the call
    std::vector<CapturePtr> captures;        // active ones
};
DriverState& driver_state();

// Waits for the current work of a device's streams; `blocking_only` leaves out non-blocking streams.
void wait_for_device(int ordinal, bool blocking_only);

// Enqueues work on an existing stream; the caller holds the lock.
CUresult enqueue_locked(CUstream stream, Work work);

// Whether a stream is one of the default stream handles.
bool is_default(CUstream stream);

}   // namespace fake

struct CUctx_st {
    int ordinal;
};

struct CUstream_st {
    int ordinal;
    unsigned flags;
    int priority;
    fake::QueuePtr queue;
    fake::CapturePtr capture;
    fake::Dependencies tail;   // dependencies of the next captured node
};

struct CUevent_st {
    int ordinal;
    unsigned flags;
    std::shared_ptr<fake::EventRecord> moment;   // null until recorded
    fake::CapturePtr capture;               // if it was last recorded in a capture
    fake::Dependencies nodes;
};

struct CUgraph_st {
    std::shared_ptr<const std::vector<fake::Node>> nodes;
};

struct CUgraphExec_st {
    std::shared_ptr<fake::ExecutableGraph> program;
};
