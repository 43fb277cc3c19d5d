// The parts of the fake NCCL: types, transport between ranks, reductions.
#pragma once

#include "fake_cuda.h"

#include <climits>

enum ncclResult_t : unsigned {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7,
};

enum ncclDataType_t : unsigned { ncclInt8, ncclUint8, ncclInt32, ncclUint32, ncclInt64, ncclUint64, ncclFloat16,
                                 ncclFloat32, ncclFloat64, ncclBfloat16, ncclNumTypes };
enum ncclRedOp_t : unsigned { ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg, ncclNumOps };

struct ncclUniqueId {
    char internal[128];
};

// The beginning of ncclConfig_t, with the fields that are used.
struct ncclConfig_t {
    size_t size;
    unsigned magic;
    unsigned version;
    int blocking;
    int cga_cluster_size, min_ctas, max_ctas;
};

namespace fake_nccl {

constexpr int MAX_RANKS = 64;

// Appends a call to the file that FAKE_NCCL_TRACE names, if any; one on a stream that is being captured ends in
// " captured".
void trace_call(const char* call, CUstream stream = nullptr);

// Whether the environment requests a fault on this rank, after this number of collectives.
bool is_faulty(const char* fault, int rank, long collectives = LONG_MAX);

// Sets the text of the last error, and returns the result.
ncclResult_t fail(ncclResult_t result, const std::string& why);

size_t size_of(ncclDataType_t type);

// Reduces `count` elements of `ranks` inputs in rank order into `out`. f16 and bf16 are accumulated in f32.
void reduce(const unsigned char* const* in, int ranks, unsigned char* out, size_t count, ncclDataType_t type,
            ncclRedOp_t op);

enum class Kind : unsigned { AllReduce, Reduce, Broadcast, AllGather, ReduceScatter, Window, Send, Recv };

struct Op {
    Kind kind;
    const unsigned char* send;
    unsigned char* recv;
    size_t count;
    ncclDataType_t type;
    ncclRedOp_t op;
    int peer;   // or root
    size_t place = 0;   // of its large buffer in registered memory, see Registrations
    bool is_pair() const { return kind == Kind::Send || kind == Kind::Recv; }
};

// A range of device memory that is registered with a communicator.
struct Registered {
    CUdeviceptr address;
    size_t bytes;
    int count;     // of registrations
    bool window;
};

// What is registered with one communicator. It ends with the communicator.
class Registrations {
  public:
    Registrations() = default;
    Registrations(const Registrations&) = delete;
    ~Registrations() { clear(); }

    // Ends all of them.
    void clear();

    // Adds a range, or counts it once more; null if it is no device memory.
    Registered* add(CUdeviceptr address, size_t bytes);

    // Removes one registration. False if there is none.
    bool remove(const Registered* registered);

    // Opens or closes a window on a range. Ends the process if a range gets a second window.
    Registered* open_window(CUdeviceptr address, size_t bytes);
    bool close_window(const Registered* registered);

    // Where an address lies: 0 in memory that is not registered, or else the bytes from the beginning of the range, plus
    // 1, plus 2^60 in a window.
    size_t place(const void* address);

  private:
    std::mutex mutex;
    std::map<CUdeviceptr, std::unique_ptr<Registered>> ranges;
};

// An address of a host, with a port in network order.
struct BootstrapAddress {
    unsigned short family, port;
    unsigned char bytes[16];
};

// How ranks on several hosts meet.
struct Bootstrap {
    // Listens for the ranks of the id with this cookie.
    static bool start_root(uint64_t cookie, BootstrapAddress* address);

    // Meets the other ranks. False if aborted first, or if there is no interface.
    static bool meet(const BootstrapAddress& root, uint64_t cookie, int rank, int world,
                     const std::atomic<bool>& aborted);
};

struct Region;

// A rank's connection to the others: shared memory for all ranks of one id, freed with the last of them.
class Transport {
  public:
    ~Transport();

    // Creates the shared memory, and the id by which others find it.
    static bool create_id(ncclUniqueId* id);

    // Joins as `rank` and waits for all ranks. ncclInvalidUsage if two ranks are on one device.
    ncclResult_t join(const ncclUniqueId& id, int rank, int world, const CUuuid& device,
                      const std::atomic<bool>& aborted, std::string& why);

    // Runs one collective; `exchange` runs sends and receives together. False if aborted first.
    bool collective(const Op& op, const std::atomic<bool>& aborted);
    bool exchange(std::vector<Op> pairs, const std::atomic<bool>& aborted);

    // Agrees with all ranks on the groups of a split: sets this rank's number in its group, the group's size, and the
    // id that one of the group's ranks creates. False if aborted first. A negative color has no group.
    bool split(int color, int key, const std::atomic<bool>& aborted, int* group_rank, int* group_size, ncclUniqueId* id);

    // Waits for all ranks, which open a window of the same size.
    bool open_window(size_t bytes, const std::atomic<bool>& aborted);

    // Waits for all ranks.
    bool barrier(const std::atomic<bool>& aborted);

    // Wakes all waiting threads, so that they notice an abort.
    void notify();

  private:
    template <class Condition>
    bool wait_until(const std::atomic<bool>& aborted, Condition condition);
    // Splits and the other operations are counted apart: a rank in one never meets a rank in the other.
    enum Meeting { COLLECTIVE, SPLIT };
    bool arrive(Meeting meeting, const std::atomic<bool>& aborted);
    ncclResult_t check_ranks(std::string& why) const;
    unsigned char* slot(int rank, unsigned turn) const;
    void publish_input(const Op& op, size_t first, size_t count, unsigned turn);
    void compute_result(const Op& op, size_t first, size_t count, unsigned turn);
    void check_calls(unsigned turn) const;
    bool advance(Op& pair, size_t& moved);

    Region* region = nullptr;
    size_t bytes = 0;
    int rank = 0, world = 0;
    uint64_t arrivals[2] = {};
};

}   // namespace fake_nccl
