// What plain TCP makes of a chain of hosts: neighbours exchange S bytes in both directions at once.
//
//   raw_tcp INDEX ADDRESS... [--min BYTES] [--max BYTES]
//
// Runs on every host of the chain; INDEX is the place of this one among the addresses, from 0. All links are busy at the same time,
// and so many bytes (S in each direction of each link) an all-reduce over these hosts moves at least. The first host prints one JSON
// object per line, by the rules of collectives_mpi.c: the time is that of the slowest host.
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { PORT = 29600, NEIGHBOURS = 2, PIECE = 1 << 20, SPIN_BYTES = 64 << 10 };
static const double LIMIT_SECONDS = 3.0;
// Small sizes spin if each host has a core, barriers too: a spinning process keeps one that it wakes from running on its core.
// Large ones block until there is much to move.
static int hosts, neighbours[NEIGHBOURS] = {-1, -1}, spins;

static void fail(const char *problem) {
    fprintf(stderr, "raw_tcp: %s: %s\n", problem, strerror(errno));
    exit(1);
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

static struct sockaddr_in place(const char *address) {
    struct sockaddr_in place = {.sin_family = AF_INET, .sin_port = htons(PORT)};
    if (inet_pton(AF_INET, address, &place.sin_addr) != 1) fail(address);
    return place;
}

// The connection to the host before this one, which listens.
static int connect_to(const char *address) {
    struct sockaddr_in there = place(address);
    for (int attempt = 0; attempt < 1000; attempt++) {
        int link = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(link, (struct sockaddr *)&there, sizeof there) == 0) return link;
        close(link);
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    }
    fail(address);
    return -1;
}

static int accept_at(const char *address) {
    struct sockaddr_in here = place(address);
    int listener = socket(AF_INET, SOCK_STREAM, 0), yes = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (bind(listener, (struct sockaddr *)&here, sizeof here) || listen(listener, 1)) fail(address);
    int link = accept(listener, NULL, NULL);
    if (link < 0) fail("accept");
    close(listener);
    return link;
}

// True if a transfer has moved bytes, whose number is added to `*done`.
static int advanced(ssize_t bytes, size_t *done) {
    if (bytes > 0) {
        *done += bytes;
        return 1;
    }
    if (bytes == 0) fail("the other host has ended");
    if (errno != EAGAIN && errno != EINTR) fail("transfer");
    return 0;
}

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

// Sends `bytes` bytes to each neighbour and receives as many; `from` and `to` are memory for two neighbours.
static void exchange(const char *from, char *to, size_t bytes) {
    size_t sent[NEIGHBOURS] = {0}, received[NEIGHBOURS] = {0};
    for (;;) {
        struct pollfd waiting[NEIGHBOURS];
        int open = 0, moved = 0;
        for (int i = 0; i < NEIGHBOURS; i++) {
            short events = 0;
            if (neighbours[i] < 0) continue;
            if (sent[i] < bytes) {
                size_t piece = least(bytes - sent[i], PIECE);
                moved |= advanced(send(neighbours[i], from + sent[i], piece, MSG_DONTWAIT | MSG_NOSIGNAL), &sent[i]);
            }
            if (received[i] < bytes) {
                size_t piece = least(bytes - received[i], PIECE);
                moved |= advanced(recv(neighbours[i], to + i * bytes + received[i], piece, MSG_DONTWAIT), &received[i]);
            }
            if (sent[i] < bytes) events |= POLLOUT;
            if (received[i] < bytes) events |= POLLIN;
            if (events) waiting[open++] = (struct pollfd){neighbours[i], events, 0};
        }
        if (open == 0) return;
        if (!moved && !spins) poll(waiting, open, -1);
    }
}

static void move_all(int is_send, int link, double *value) {
    size_t done = 0;
    while (done < sizeof *value) {
        char *rest = (char *)value + done;
        size_t left = sizeof *value - done;
        int flags = spins ? MSG_DONTWAIT | MSG_NOSIGNAL : MSG_NOSIGNAL;
        advanced(is_send ? send(link, rest, left, flags) : recv(link, rest, left, flags), &done);
    }
}

// The largest value of all hosts, which also is a barrier: to the first host and back.
static double largest(double value) {
    int before = neighbours[0], after = neighbours[1];
    double other;
    if (after >= 0) {
        move_all(0, after, &other);
        if (other > value) value = other;
    }
    if (before >= 0) {
        move_all(1, before, &value);
        move_all(0, before, &value);
    }
    if (after >= 0) move_all(1, after, &value);
    return value;
}

static int by_value(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return a < b ? -1 : a > b;
}

static void measure(int index, size_t bytes) {
    spins = bytes <= SPIN_BYTES && hosts <= sysconf(_SC_NPROCESSORS_ONLN);
    char *from = malloc(bytes), *to = malloc(NEIGHBOURS * bytes);
    static double seconds[2300];
    if (!from || !to) fail("memory");
    memset(from, 1, bytes);
    memset(to, 1, NEIGHBOURS * bytes);
    int runs = bytes <= 65536 ? 2000 : bytes <= 4194304 ? 200 : 20, warm_up = runs / 10 + 2, done = 0;
    double begin = now();
    while (done < warm_up + runs) {
        largest(0);
        double start = now();
        exchange(from, to, bytes);
        seconds[done] = largest(now() - start);
        done++;
        if (done % (runs / 20) == 0 && largest(now() - begin) > LIMIT_SECONDS) break;
    }
    int skipped = warm_up < done / 2 ? warm_up : done / 2, count = done - skipped;
    qsort(seconds + skipped, count, sizeof *seconds, by_value);
    if (index == 0) {
        printf("{\"impl\":\"raw\",\"ranks\":%d,\"bytes\":%zu,\"us_p50\":%.2f,\"us_min\":%.2f,"
               "\"collective\":\"exchange\"}\n",
               hosts, bytes, seconds[skipped + count / 2] * 1e6, seconds[skipped] * 1e6);
        fflush(stdout);
    }
    free(from);
    free(to);
}

int main(int argc, char **argv) {
    size_t min = 4, max = 64 << 20;
    int words = argc;
    while (words >= 2 && !strncmp(argv[words - 2], "--", 2)) {
        words -= 2;
        *(strcmp(argv[words], "--min") ? &max : &min) = strtoull(argv[words + 1], NULL, 10);
    }
    hosts = words - 2;
    int index = argc > 1 ? atoi(argv[1]) : -1, yes = 1;
    if (hosts < 2 || index < 0 || index >= hosts || min == 0) {
        fprintf(stderr, "usage: raw_tcp INDEX ADDRESS ADDRESS... [--min BYTES] [--max BYTES]\n");
        return 2;
    }
    if (index > 0) neighbours[0] = connect_to(argv[1 + index]);
    if (index + 1 < hosts) neighbours[1] = accept_at(argv[2 + index]);
    for (int i = 0; i < NEIGHBOURS; i++)
        if (neighbours[i] >= 0) setsockopt(neighbours[i], IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    for (size_t bytes = min; bytes <= max; bytes *= 4) measure(index, bytes);
    return 0;
}
