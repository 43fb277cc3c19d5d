// Benchmarks MPI's collectives: float32, sum, in place. Rank 0 prints one JSON object per line.
//
//   collectives_mpi [--collective all_reduce|reduce_scatter|all_gather|broadcast|reduce] [--min BYTES] [--max BYTES]
//
// The counterpart of `allreduce_perf`, with the same rules: sizes by factors of 4, each that of a rank's whole
// buffer, rounded up to equal shards; a barrier, then the operation between two clock reads; the time of the
// operation is that of the slowest rank; 2000, 200 or 20 runs after a tenth of warm-up, and none after 3 seconds.
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, REDUCE, COLLECTIVES };
static const char *const NAMES[COLLECTIVES] = {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce"};

static const double LIMIT_SECONDS = 3.0;
static int rank, ranks;

static void fail(const char *problem, const char *detail) {
    fprintf(stderr, "collectives_mpi: rank %d: %s%s\n", rank, problem, detail);
    MPI_Abort(MPI_COMM_WORLD, 1);
    exit(1);
}

static int is_sharded(int collective) { return collective == REDUCE_SCATTER || collective == ALL_GATHER; }

static void run(int collective, float *data, size_t count) {
    int shard = (int)(count / ranks);
    switch (collective) {
    case ALL_REDUCE:
        MPI_Allreduce(MPI_IN_PLACE, data, (int)count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        break;
    case REDUCE_SCATTER: // The result comes to the front of the buffer.
        MPI_Reduce_scatter_block(MPI_IN_PLACE, data, shard, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        break;
    case ALL_GATHER:
        MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, data, shard, MPI_FLOAT, MPI_COMM_WORLD);
        break;
    case BROADCAST:
        MPI_Bcast(data, (int)count, MPI_FLOAT, 0, MPI_COMM_WORLD);
        break;
    case REDUCE:
        MPI_Reduce(rank == 0 ? MPI_IN_PLACE : data, rank == 0 ? data : 0, (int)count, MPI_FLOAT, MPI_SUM, 0,
                   MPI_COMM_WORLD);
        break;
    }
}

// The input of rank `of` at `index`: small whole numbers with exact sums.
static float input(int of, size_t index) { return (float)((index + 3 * (size_t)of) % 61); }

static float sum_of_inputs(size_t index) {
    float sum = 0;
    for (int of = 0; of < ranks; of++) sum += input(of, index);
    return sum;
}

// Runs the operation once and verifies every defined element.
static void verify(int collective, float *data, size_t count) {
    for (size_t i = 0; i < count; i++) data[i] = input(rank, i);
    run(collective, data, count);
    size_t shard = count / ranks, defined = collective == REDUCE_SCATTER ? shard : count;
    for (size_t i = 0; i < defined; i++) {
        float right = 0;
        switch (collective) {
        case ALL_REDUCE: right = sum_of_inputs(i); break;
        case REDUCE_SCATTER: right = sum_of_inputs(rank * shard + i); break;
        case ALL_GATHER: right = input((int)(i / shard), i); break;
        case BROADCAST: right = input(0, i); break;
        case REDUCE: right = rank == 0 ? sum_of_inputs(i) : data[i]; break;
        }
        if (data[i] != right) fail("a wrong result of ", NAMES[collective]);
    }
}

static int by_value(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return a < b ? -1 : a > b;
}

// The times of the slowest rank for each run after the warm-up, in seconds, ascending; returns their number.
static int measure(int collective, float *data, size_t count, double *seconds) {
    size_t bytes = count * sizeof *data;
    int runs = bytes <= 65536 ? 2000 : bytes <= 4194304 ? 200 : 20, warm_up = runs / 10 + 2, done = 0;
    // Zeros stay zeros under every reduction.
    memset(data, 0, bytes);
    double begin = MPI_Wtime();
    while (done < warm_up + runs) {
        MPI_Barrier(MPI_COMM_WORLD);
        double start = MPI_Wtime();
        run(collective, data, count);
        seconds[done++] = MPI_Wtime() - start;
        if (done % (runs / 20) == 0) { // All ranks stop together, by the slowest clock.
            double spent = MPI_Wtime() - begin;
            MPI_Allreduce(MPI_IN_PLACE, &spent, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
            if (spent > LIMIT_SECONDS) break;
        }
    }
    MPI_Allreduce(MPI_IN_PLACE, seconds, done, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    int skipped = warm_up < done / 2 ? warm_up : done / 2;
    memmove(seconds, seconds + skipped, (done - skipped) * sizeof *seconds);
    qsort(seconds, done - skipped, sizeof *seconds, by_value);
    return done - skipped;
}

static double bus_factor(int collective) {
    double others = (ranks - 1.0) / ranks;
    return collective == ALL_REDUCE ? 2 * others : is_sharded(collective) ? others : 1;
}

static const char *implementation(void) {
    char version[MPI_MAX_LIBRARY_VERSION_STRING];
    int length;
    MPI_Get_library_version(version, &length);
    if (strstr(version, "Open MPI")) return "openmpi";
    return strstr(version, "Intel") ? "impi" : strstr(version, "MPICH") ? "mpich" : "mpi";
}

static size_t bytes_of(const char *text) {
    char *end;
    unsigned long long bytes = strtoull(text, &end, 10);
    // Counts are ints.
    if (*end || end == text || bytes == 0 || bytes > 1ull << 32) fail("not a number of bytes up to 4 GiB: ", text);
    return bytes;
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    size_t min = 4, max = 256 << 20, offset = 0;
    int collective = ALL_REDUCE;
    for (int i = 1; i < argc; i += 2) {
        if (i + 1 == argc) fail("no value for ", argv[i]);
        if (!strcmp(argv[i], "--min")) {
            min = bytes_of(argv[i + 1]);
        } else if (!strcmp(argv[i], "--max")) {
            max = bytes_of(argv[i + 1]);
        } else if (!strcmp(argv[i], "--offset")) { // Of the buffer within a page.
            offset = strtoull(argv[i + 1], NULL, 10);
            if (offset % sizeof(float) || offset >= 4096) fail("not an offset of a float in a page: ", argv[i + 1]);
        } else if (!strcmp(argv[i], "--collective")) {
            for (collective = 0; collective < COLLECTIVES && strcmp(argv[i + 1], NAMES[collective]);) collective++;
            if (collective == COLLECTIVES) fail("unknown collective ", argv[i + 1]);
        } else {
            fail("unknown option ", argv[i]);
        }
    }

    size_t unit = sizeof(float) * (is_sharded(collective) ? ranks : 1), before = 0;
    double *seconds = malloc(2202 * sizeof *seconds);
    for (size_t wanted = min; wanted <= max; wanted *= 4) {
        size_t bytes = (wanted + unit - 1) / unit * unit;
        if (bytes == before) continue;
        before = bytes;
        char *memory = aligned_alloc(4096, (offset + bytes + 4095) / 4096 * 4096);
        float *data = (float *)(memory + offset);
        if (!memory || !seconds) fail("out of memory", "");
        verify(collective, data, bytes / sizeof *data);
        int count = measure(collective, data, bytes / sizeof *data, seconds);
        if (rank == 0) {
            double p50 = seconds[count / 2];
            printf("{\"impl\":\"%s\",\"ranks\":%d,\"bytes\":%zu,\"us_p50\":%.2f,\"us_min\":%.2f,\"busbw_gbps\":%.3f,"
                   "\"collective\":\"%s\"}\n",
                   implementation(), ranks, bytes, p50 * 1e6, seconds[0] * 1e6,
                   bytes / p50 / 1e9 * bus_factor(collective), NAMES[collective]);
            fflush(stdout);
        }
        free(memory);
    }
    free(seconds);
    MPI_Finalize();
    return 0;
}
