// How ranks on several hosts meet: over TCP, on the interface that NCCL's rules choose, as in the real library.
//
// Who makes the id listens (the root) and puts its address into the id. Every rank listens too, and tells the root where.
// The root then connects to each rank and tells it where the next rank listens; each rank connects to that one. A
// connection that fails is tried again until the communicator is aborted: on an interface that leads nowhere
// initialisation hangs.
//
// Hosts are namespaces of one machine. Afterwards the ranks communicate by a file that all of them map, in the folder
// that FAKE_NCCL_HOSTS names; see fake_nccl_transport.cpp.
#include "fake_nccl.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <string>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>

namespace fake_nccl {
namespace {

// What a rank tells the root.
struct Hello {
    uint64_t cookie;
    int rank, world;
    BootstrapAddress address;
};

// A socket; closed at the end.
struct Socket {
    int fd = -1;
    explicit Socket(int of) : fd(of) {}
    Socket(Socket&& other) : fd(other.fd) { other.fd = -1; }
    Socket(const Socket&) = delete;
    ~Socket() {
        if (fd >= 0) close(fd);
    }
};

socklen_t to_socket(const BootstrapAddress& address, sockaddr_storage* to) {
    memset(to, 0, sizeof *to);
    to->ss_family = address.family;
    if (address.family == AF_INET) {
        auto* v4 = (sockaddr_in*)to;
        v4->sin_port = address.port;
        memcpy(&v4->sin_addr, address.bytes, 4);
        return sizeof *v4;
    }
    auto* v6 = (sockaddr_in6*)to;
    v6->sin6_port = address.port;
    memcpy(&v6->sin6_addr, address.bytes, 16);
    return sizeof *v6;
}

bool is_listed(const char* name, std::string list) {
    const bool exclude = list[0] == '^';
    if (exclude) list.erase(0, 1);
    const bool exact = list[0] == '=';
    if (exact) list.erase(0, 1);
    bool found = false;
    for (size_t at = 0; at <= list.size();) {
        const size_t end = std::min(list.find(',', at), list.size());
        const std::string entry = list.substr(at, end - at);
        if (!entry.empty()) found |= exact ? entry == name : strncmp(name, entry.c_str(), entry.size()) == 0;
        at = end + 1;
    }
    return found != exclude;
}

// The first running interface on a list.
bool find_interface(const char* list, BootstrapAddress* address) {
    ifaddrs* all = nullptr;
    if (getifaddrs(&all) != 0) return false;
    bool found = false;
    for (const ifaddrs* one = all; one != nullptr && !found; one = one->ifa_next) {
        if (one->ifa_addr == nullptr || !(one->ifa_flags & IFF_RUNNING) || !is_listed(one->ifa_name, list)) continue;
        const int family = one->ifa_addr->sa_family;
        if (family != AF_INET && family != AF_INET6) continue;
        const char* wanted = getenv("NCCL_SOCKET_FAMILY");
        if (wanted != nullptr && strcmp(wanted, family == AF_INET ? "AF_INET6" : "AF_INET") == 0) continue;
        *address = {};
        address->family = (unsigned short)family;
        if (family == AF_INET) memcpy(address->bytes, &((sockaddr_in*)one->ifa_addr)->sin_addr, 4);
        else memcpy(address->bytes, &((sockaddr_in6*)one->ifa_addr)->sin6_addr, 16);
        found = true;
    }
    freeifaddrs(all);
    return found;
}

bool choose_interface(BootstrapAddress* address) {
    const char* named = getenv("NCCL_SOCKET_IFNAME");
    if (named != nullptr && strlen(named) > 1) return find_interface(named, address);
    for (const char* list : {"ib", "^docker,lo,virbr", "docker", "lo", "virbr"}) {
        if (find_interface(list, address)) return true;
    }
    return false;
}

Socket listen_on(BootstrapAddress* address) {
    sockaddr_storage place;
    if (!choose_interface(address)) return Socket(-1);
    socklen_t length = to_socket(*address, &place);
    Socket socket(::socket(address->family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (bind(socket.fd, (sockaddr*)&place, length) != 0 || listen(socket.fd, MAX_RANKS) != 0) return Socket(-1);
    getsockname(socket.fd, (sockaddr*)&place, &length);
    address->port = address->family == AF_INET ? ((sockaddr_in*)&place)->sin_port : ((sockaddr_in6*)&place)->sin6_port;
    return socket;
}

// Waits until a socket is readable. False if aborted first.
bool wait_for(const Socket& socket, const std::atomic<bool>& aborted) {
    while (!aborted) {
        pollfd readable = {socket.fd, POLLIN, 0};
        if (poll(&readable, 1, 20) > 0) return true;
    }
    return false;
}

bool receive(const Socket& socket, void* to, size_t bytes, const std::atomic<bool>& aborted) {
    for (size_t done = 0; done < bytes;) {
        if (!wait_for(socket, aborted)) return false;
        const ssize_t count = recv(socket.fd, (char*)to + done, bytes - done, 0);
        if (count <= 0) return false;
        done += (size_t)count;
    }
    return true;
}

// Connects and sends a few bytes, again and again until that succeeds.
bool tell(const BootstrapAddress& address, const void* what, size_t bytes, const std::atomic<bool>& aborted) {
    sockaddr_storage place;
    const socklen_t length = to_socket(address, &place);
    while (!aborted) {
        Socket socket(::socket(address.family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
        connect(socket.fd, (sockaddr*)&place, length);
        pollfd writable = {socket.fd, POLLOUT, 0};
        for (int turn = 0; turn < 50 && !aborted && poll(&writable, 1, 20) == 0; ++turn) {}
        if (send(socket.fd, what, bytes, MSG_NOSIGNAL) == (ssize_t)bytes) return true;
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    return false;
}

// Accepts connections until one begins with the cookie of the id, and reads what it says.
template <class Message>
bool hear(const Socket& listener, uint64_t cookie, Message* message, const std::atomic<bool>& aborted) {
    while (wait_for(listener, aborted)) {
        const Socket socket(accept4(listener.fd, nullptr, nullptr, SOCK_CLOEXEC));
        if (socket.fd >= 0 && receive(socket, message, sizeof *message, aborted) && message->cookie == cookie) return true;
    }
    return false;
}

// What the root, and then the rank before, tell a rank.
struct Next {
    uint64_t cookie;
    BootstrapAddress address;
};

void serve(const Socket& listener, uint64_t cookie) {
    // The process ends while it waits, if the ranks do not come.
    static const std::atomic<bool> never{false};
    BootstrapAddress ranks[MAX_RANKS];
    int world = 1;
    for (int count = 0; count < world; ++count) {
        Hello hello;
        if (!hear(listener, cookie, &hello, never)) return;
        if (hello.rank < 0 || hello.rank >= hello.world || hello.world > MAX_RANKS) return;
        world = hello.world;
        ranks[hello.rank] = hello.address;
    }
    for (int rank = 0; rank < world; ++rank) {
        const Next next = {cookie, ranks[(rank + 1) % world]};
        tell(ranks[rank], &next, sizeof next, never);
    }
}

}   // namespace

bool Bootstrap::start_root(uint64_t cookie, BootstrapAddress* address) {
    Socket listener = listen_on(address);
    if (listener.fd < 0) return false;
    std::thread([listener = std::move(listener), cookie] { serve(listener, cookie); }).detach();
    return true;
}

bool Bootstrap::meet(const BootstrapAddress& root, uint64_t cookie, int rank, int world,
                     const std::atomic<bool>& aborted) {
    Hello hello = {cookie, rank, world, {}};
    const Socket listener = listen_on(&hello.address);
    Next next, previous;
    if (listener.fd < 0 || !tell(root, &hello, sizeof hello, aborted)) return false;
    // The rank before may be faster than the root.
    if (!hear(listener, cookie, &next, aborted)) return false;
    const bool is_from_root = next.address.family != 0;
    if (!is_from_root && !hear(listener, cookie, &next, aborted)) return false;
    const Next greeting = {cookie, {}};
    if (!tell(next.address, &greeting, sizeof greeting, aborted)) return false;
    return !is_from_root || hear(listener, cookie, &previous, aborted);
}

}   // namespace fake_nccl
