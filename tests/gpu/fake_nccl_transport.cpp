// Communication between ranks through anonymous shared memory, which is freed with its last process.
//
// The process that creates the id creates the memory; the id contains its process id and descriptor. With
// FAKE_NCCL_HOSTS=FOLDER the ranks are on several hosts, which are namespaces of one machine: the memory is a file in this
// folder, removed when all ranks have mapped it, and before that the ranks meet over the network. Each rank has a
// counter of arrivals. A collective passes through the ranks' slots in chunks, with one arrival of all ranks per
// chunk. With two alternating slots per rank one arrival per chunk is enough: a rank that has arrived for a chunk has
// read the previous one. A killed rank never arrives, and nobody is notified.
#include "fake_nccl.h"

#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace fake_nccl {

constexpr size_t SLOT = 1 << 20;       // size of a rank's slot in bytes
constexpr size_t CHUNK = 64 << 10;    // size of a message chunk in bytes
constexpr char MAGIC[] = "FAKE NCCL ID";

struct CallSignature {
    Kind kind;
    ncclDataType_t type;
    ncclRedOp_t op;
    int root;
    size_t count;
    size_t place;   // that of a buffer in registered memory has to be the same on all ranks
    bool operator==(const CallSignature&) const = default;
};

// A rank's arguments of a split, and the id if it is the first of its group.
struct SplitCall {
    int color, key;
    ncclUniqueId id;
};

struct RankState {
    std::atomic<unsigned> taken;
    int world;
    CUuuid device;
    uint64_t host;
    std::atomic<uint64_t> arrivals[2];
    CallSignature calls[2];
    SplitCall splits[2];
};

// Messages from one rank to another: `written` and `read` count chunks; at most one is in flight.
struct Mailbox {
    std::atomic<uint64_t> written, read;
    size_t total;
    unsigned char chunk[CHUNK];
};

struct Region {
    uint64_t cookie;
    std::atomic<unsigned> notifications;   // changed by every update
    RankState rank_states[MAX_RANKS];
};

namespace {

struct IdText {
    char magic[16];
    int process, descriptor;
    uint64_t cookie;
    BootstrapAddress root;   // with several hosts
};

// The folder of the file for ranks on several hosts; null with one host.
const char* hosts_folder() { return getenv("FAKE_NCCL_HOSTS"); }

std::string file_of(uint64_t cookie) { return std::string(hosts_folder()) + "/" + std::to_string(cookie); }

size_t slots_at() { return (sizeof(Region) + 4095) / 4096 * 4096; }
size_t mail_at(int world) { return slots_at() + (size_t)world * 2 * SLOT; }
size_t end_of(int world) { return mail_at(world) + (size_t)world * (size_t)world * sizeof(Mailbox); }

Mailbox& mailbox(Region* region, int world, int from, int to) {
    auto* all = (Mailbox*)((unsigned char*)region + mail_at(world));
    return all[from * world + to];
}

uint64_t host_hash() {
    // Real NCCL also uses this variable, or else the host's name, to decide which ranks are on one machine.
    char host[65] = "";
    gethostname(host, sizeof host - 1);
    const char* id = getenv("NCCL_HOSTID");
    const char* name = id == nullptr ? host : id;
    uint64_t hash = 0xcbf29ce484222325;
    for (; *name != 0; ++name) hash = (hash ^ (unsigned char)*name) * 0x100000001b3;
    return hash;
}

// Descriptors of ids that this process has made and whose ranks have not all joined, by the cookies of the ids.
std::mutex waiting_mutex;
std::map<uint64_t, int>& waiting() {
    static auto* all = new std::map<uint64_t, int>;
    return *all;
}

void forget(uint64_t cookie) {
    std::lock_guard lock(waiting_mutex);
    const auto found = waiting().find(cookie);
    if (found == waiting().end()) return;
    close(found->second);
    waiting().erase(found);
}

std::string describe(const CallSignature& offer) {
    const char* names[] = {"AllReduce", "Reduce", "Broadcast", "AllGather", "ReduceScatter", "WindowRegister"};
    char text[160];
    snprintf(text, sizeof text, "%s of %zu elements of type %u, operation %u, root %d, at %#zx of registered memory",
             names[(unsigned)offer.kind], offer.count, offer.type, offer.op, offer.root, offer.place);
    return text;
}

bool may_share_devices() {
    return fake::env_number("FAKE_NCCL_VERSION", 22809) >= 23000 &&
           fake::env_number("NCCL_MULTI_RANK_GPU_ENABLE", 0) == 1;
}

}   // namespace

bool Transport::create_id(ncclUniqueId* id) {
    IdText text = {};
    memcpy(text.magic, MAGIC, sizeof MAGIC);
    text.process = getpid();
    if (getrandom(&text.cookie, sizeof text.cookie, 0) != sizeof text.cookie) return false;
    if (hosts_folder() != nullptr) {
        text.descriptor = open(file_of(text.cookie).c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        if (!Bootstrap::start_root(text.cookie, &text.root)) return false;
    } else {
        text.descriptor = (int)syscall(SYS_memfd_create, "fake-nccl", MFD_CLOEXEC);
    }
    if (text.descriptor < 0 || ftruncate(text.descriptor, (off_t)end_of(MAX_RANKS)) != 0) return false;
    if (pwrite(text.descriptor, &text.cookie, sizeof text.cookie, 0) != sizeof text.cookie) return false;
    std::lock_guard lock(waiting_mutex);
    waiting()[text.cookie] = text.descriptor;
    memset(id, 0, sizeof *id);
    memcpy(id, &text, sizeof text);
    return true;
}

ncclResult_t Transport::join(const ncclUniqueId& id, int own_rank, int ranks, const CUuuid& device,
                           const std::atomic<bool>& aborted, std::string& why) {
    rank = own_rank;
    world = ranks;
    IdText text;
    memcpy(&text, &id, sizeof text);
    if (memcmp(text.magic, MAGIC, sizeof MAGIC) != 0) {
        why = "not an id that this library made";
        return ncclInvalidArgument;
    }
    std::string path = "/proc/" + std::to_string(text.process) + "/fd/" + std::to_string(text.descriptor);
    if (hosts_folder() != nullptr) {
        if (!Bootstrap::meet(text.root, text.cookie, rank, world, aborted)) {
            why = aborted ? "aborted" : "no socket interface found";
            return aborted ? ncclInternalError : ncclSystemError;
        }
        path = file_of(text.cookie);
    }
    const int descriptor = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (descriptor < 0) {
        why = "the process that made the id is gone";
        return ncclSystemError;
    }
    bytes = end_of(world);
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
    close(descriptor);
    if (memory == MAP_FAILED) {
        why = "the ranks' shared memory cannot be mapped";
        return ncclSystemError;
    }
    region = (Region*)memory;
    if (region->cookie != text.cookie) {
        why = "the id belongs to an earlier communicator";
        return ncclSystemError;
    }
    RankState& own = region->rank_states[rank];
    unsigned vacant = 0;
    if (!own.taken.compare_exchange_strong(vacant, 1)) {
        why = "this rank has joined already";
        return ncclInvalidUsage;
    }
    own.world = world;
    own.device = device;
    own.host = host_hash();
    if (!barrier(aborted)) {
        why = "aborted";
        return ncclInternalError;
    }
    // All ranks have mapped the memory: the creator of the id can close the descriptor, and the file can go.
    forget(text.cookie);
    if (hosts_folder() != nullptr) unlink(file_of(text.cookie).c_str());
    return check_ranks(why);
}

ncclResult_t Transport::check_ranks(std::string& why) const {
    for (int a = 0; a < world; ++a) {
        for (int b = a + 1; b < world; ++b) {
            const RankState &x = region->rank_states[a], &y = region->rank_states[b];
            if (x.world != y.world) {
                why = "the ranks disagree on the number of ranks";
                return ncclInvalidArgument;
            }
            if (x.host == y.host && memcmp(&x.device, &y.device, sizeof x.device) == 0 && !may_share_devices()) {
                why = "Duplicate GPU detected : rank " + std::to_string(a) + " and rank " + std::to_string(b) +
                      " both on the same CUDA device";
                return ncclInvalidUsage;
            }
        }
    }
    return ncclSuccess;
}

Transport::~Transport() {
    if (region != nullptr) munmap(region, bytes);
}

void Transport::notify() {
    if (region == nullptr) return;
    region->notifications.fetch_add(1);
    syscall(SYS_futex, &region->notifications, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

template <class Condition>
bool Transport::wait_until(const std::atomic<bool>& aborted, Condition condition) {
    for (;;) {
        const unsigned heard = region->notifications.load();
        if (condition()) return true;
        if (aborted) return false;
        // An abort notifies too; the timeout covers one between the check and the wait.
        const timespec limit = {0, 20'000'000};
        syscall(SYS_futex, &region->notifications, FUTEX_WAIT, heard, &limit, nullptr, 0);
    }
}

bool Transport::arrive(Meeting meeting, const std::atomic<bool>& aborted) {
    ++arrivals[meeting];
    region->rank_states[rank].arrivals[meeting].store(arrivals[meeting]);
    notify();
    return wait_until(aborted, [&] {
        for (int other = 0; other < world; ++other) {
            if (region->rank_states[other].arrivals[meeting].load() < arrivals[meeting]) return false;
        }
        return true;
    });
}

unsigned char* Transport::slot(int of, unsigned turn) const {
    return (unsigned char*)region + slots_at() + ((size_t)of * 2 + turn) * SLOT;
}

bool Transport::barrier(const std::atomic<bool>& aborted) { return arrive(COLLECTIVE, aborted); }

bool Transport::open_window(size_t size, const std::atomic<bool>& aborted) {
    const unsigned turn = arrivals[COLLECTIVE] % 2;
    region->rank_states[rank].calls[turn] = {Kind::Window, ncclInt8, ncclSum, 0, size, 0};
    if (!arrive(COLLECTIVE, aborted)) return false;
    check_calls(turn);
    return true;
}

bool Transport::split(int color, int key, const std::atomic<bool>& aborted, int* group_rank, int* group_size,
                      ncclUniqueId* id) {
    unsigned turn = arrivals[SPLIT] % 2;
    region->rank_states[rank].splits[turn] = {color, key, {}};
    if (!arrive(SPLIT, aborted)) return false;
    int first = rank, first_key = key;
    *group_rank = *group_size = 0;
    for (int other = 0; other < world; ++other) {
        const SplitCall& theirs = region->rank_states[other].splits[turn];
        if (theirs.color != color) continue;
        ++*group_size;
        if (theirs.key < key || (theirs.key == key && other < rank)) ++*group_rank;
        if (theirs.key < first_key || (theirs.key == first_key && other < first)) {
            first = other;
            first_key = theirs.key;
        }
    }
    turn = arrivals[SPLIT] % 2;
    if (color >= 0 && first == rank) create_id(&region->rank_states[rank].splits[turn].id);
    if (!arrive(SPLIT, aborted)) return false;
    if (color >= 0) *id = region->rank_states[first].splits[turn].id;
    return true;
}

bool Transport::collective(const Op& op, const std::atomic<bool>& aborted) {
    const size_t size = size_of(op.type), parts = op.kind == Kind::ReduceScatter ? (size_t)world : 1;
    const size_t most = SLOT / size / parts;
    for (size_t first = 0; first < op.count; first += most) {
        const size_t count = op.count - first < most ? op.count - first : most;
        const unsigned turn = arrivals[COLLECTIVE] % 2;
        if (aborted) return false;
        region->rank_states[rank].calls[turn] = {op.kind, op.type, op.op, op.peer, op.count, op.place};
        publish_input(op, first, count, turn);
        if (!arrive(COLLECTIVE, aborted)) return false;
        check_calls(turn);
        compute_result(op, first, count, turn);
    }
    return true;
}

void Transport::publish_input(const Op& op, size_t first, size_t count, unsigned turn) {
    const size_t size = size_of(op.type);
    const bool gives = op.kind != Kind::Broadcast || op.peer == rank;
    const int parts = op.kind == Kind::ReduceScatter ? world : 1;
    for (int part = 0; part < parts && gives; ++part) {
        const unsigned char* from = op.send + ((size_t)part * op.count + first) * size;
        memcpy(slot(rank, turn) + (size_t)part * count * size, from, count * size);
    }
}

void Transport::compute_result(const Op& op, size_t first, size_t count, unsigned turn) {
    const size_t size = size_of(op.type);
    const unsigned char* in[MAX_RANKS];
    for (int other = 0; other < world; ++other) in[other] = slot(other, turn);
    unsigned char* out = op.recv + first * size;
    switch (op.kind) {
        case Kind::Broadcast: memcpy(out, in[op.peer], count * size); break;
        case Kind::AllGather:
            for (int other = 0; other < world; ++other) {
                memcpy(out + (size_t)other * op.count * size, in[other], count * size);
            }
            break;
        case Kind::ReduceScatter:
            for (int other = 0; other < world; ++other) in[other] += (size_t)rank * count * size;
            reduce(in, world, out, count, op.type, op.op);
            break;
        default:
            if (op.kind == Kind::AllReduce || op.peer == rank) reduce(in, world, out, count, op.type, op.op);
    }
}

// Ranks that call different collectives would wait forever or get garbage: report it at once.
void Transport::check_calls(unsigned turn) const {
    const CallSignature& own = region->rank_states[rank].calls[turn];
    for (int other = 0; other < world; ++other) {
        const CallSignature& theirs = region->rank_states[other].calls[turn];
        if (theirs == own) continue;
        fprintf(stderr, "FAKE NCCL: the ranks call different collectives: rank %d %s, rank %d %s\n", rank,
                describe(own).c_str(), other, describe(theirs).c_str());
        abort();
    }
}

// Transfers one more chunk of a message, if the mailbox allows it.
bool Transport::advance(Op& pair, size_t& moved) {
    const size_t total = pair.count * size_of(pair.type);
    const bool sends = pair.kind == Kind::Send;
    Mailbox& box = sends ? mailbox(region, world, rank, pair.peer) : mailbox(region, world, pair.peer, rank);
    const size_t now = total - moved < CHUNK ? total - moved : CHUNK;
    if (sends) {
        if (box.written.load() != box.read.load()) return false;
        box.total = total;
        memcpy(box.chunk, pair.send + moved, now);
        box.written.fetch_add(1);
    } else {
        if (box.written.load() == box.read.load()) return false;
        if (box.total != total) {
            fprintf(stderr, "FAKE NCCL: rank %d sends %zu bytes, rank %d receives %zu\n", pair.peer, box.total, rank,
                    total);
            abort();
        }
        memcpy(pair.recv + moved, box.chunk, now);
        box.read.fetch_add(1);
    }
    moved += now;
    notify();
    return true;
}

bool Transport::exchange(std::vector<Op> pairs, const std::atomic<bool>& aborted) {
    std::vector<size_t> moved(pairs.size(), 0);
    auto is_done = [&](size_t i) { return moved[i] == pairs[i].count * size_of(pairs[i].type); };
    // Messages between the same two ranks in one direction are ordered.
    auto is_first = [&](size_t i) {
        for (size_t before = 0; before < i; ++before) {
            const bool same = pairs[before].kind == pairs[i].kind && pairs[before].peer == pairs[i].peer;
            if (same && !is_done(before)) return false;
        }
        return true;
    };
    return wait_until(aborted, [&] {
        bool all = true, any = true;
        while (any) {
            any = false;
            all = true;
            for (size_t i = 0; i < pairs.size(); ++i) {
                if (is_done(i)) continue;
                if (is_first(i) && advance(pairs[i], moved[i])) any = true;
                all = all && is_done(i);
            }
        }
        return all;
    });
}

}   // namespace fake_nccl
