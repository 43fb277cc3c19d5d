// mgpurun -n 2 ./all_reduce_time, or compiled with -DUSE_MPI: mpirun -n 2 ./all_reduce_time.
//
// Prints for several sizes the median time of an all-reduce of floats in microseconds: in the program's own memory, and,
// without MPI, in memory of mgpu_allocate.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#ifdef USE_MPI
#include <mpi.h>
#else
#include <mgpu.h>

static mgpu_comm *comm;

static void check(mgpu_status status) {
    if (status == MGPU_OK) return;
    fprintf(stderr, "all_reduce_time: %s\n", mgpu_last_error());
    exit(1);
}
#endif

enum { TIMES = 41, LARGEST = 16 << 20 };

static void barrier(void) {
#ifdef USE_MPI
    MPI_Barrier(MPI_COMM_WORLD);
#else
    check(mgpu_barrier(comm));
#endif
}

static void all_reduce(float *data, size_t count) {
#ifdef USE_MPI
    MPI_Allreduce(MPI_IN_PLACE, data, (int)count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
#else
    check(mgpu_all_reduce(comm, data, count, MGPU_F32, MGPU_SUM));
#endif
}

static int ascending(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e6 + (double)time.tv_nsec * 1e-3;
}

static double median(float *data, size_t bytes) {
    double times[TIMES];
    for (size_t i = 0; i < bytes / sizeof *data; i++) data[i] = 0;
    for (int i = -3; i < TIMES; i++) {
        barrier();
        double begin = now();
        all_reduce(data, bytes / sizeof *data);
        if (i >= 0) times[i] = now() - begin;
    }
    qsort(times, TIMES, sizeof *times, ascending);
    return times[TIMES / 2];
}

int main(int argc, char **argv) {
    float *own = aligned_alloc(64, LARGEST);
    (void)argv;
#ifdef USE_MPI
    int rank;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    for (size_t bytes = 64; bytes <= LARGEST; bytes *= 8) {
        double time = median(own, bytes);
        if (rank == 0) printf("%9zu bytes %10.1f us\n", bytes, time);
    }
    MPI_Finalize();
#else
    mgpu_world *world;
    void *shared;
    uint32_t rank;
    (void)argc;
    check(mgpu_init(&world));
    check(mgpu_comm_create(world, &comm));
    check(mgpu_comm_rank(comm, &rank));
    check(mgpu_allocate(comm, LARGEST, &shared));
    for (size_t bytes = 64; bytes <= LARGEST; bytes *= 8) {
        double private_time = median(own, bytes), shared_time = median(shared, bytes);
        if (rank == 0) printf("%9zu bytes %10.1f us own memory %10.1f us mgpu_allocate\n", bytes, private_time, shared_time);
    }
    mgpu_comm_free(comm);
    mgpu_finalize(world);
#endif
    free(own);
    return 0;
}
