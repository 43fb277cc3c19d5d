// mpirun -n 2 ./train_mlp_mpi [STEPS]: train_mlp.c with MPI. It has no checks of layouts and weights, no stop on request and
// no checkpoints, which MPI does not have; an error ends the program in MPI.
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

#include "mlp.h"

int main(int argc, char **argv) {
    uint64_t steps = argc > 1 ? strtoull(argv[1], NULL, 10) : 100;
    int rank, size;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);

    float *parameters = malloc(PARAMETERS * sizeof *parameters), *gradients = malloc(PARAMETERS * sizeof *gradients);
    mlp_initialise(parameters, (uint64_t)rank + 3);
    MPI_Bcast(parameters, PARAMETERS, MPI_FLOAT, 0, MPI_COMM_WORLD);

    float loss = 0;
    int part = BATCH / size;
    for (uint64_t step = 0; step < steps; step++) {
        float *bias1 = gradients + WEIGHT1, *weight2 = bias1 + BIAS1, *bias2 = weight2 + WEIGHT2;
        loss = mlp_gradients(parameters, step * BATCH + (uint64_t)(rank * part), part, gradients, bias1, weight2, bias2);
        MPI_Allreduce(MPI_IN_PLACE, gradients, PARAMETERS, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        for (int i = 0; i < PARAMETERS; i++) parameters[i] -= 0.5f * gradients[i] / (float)size;
    }
    MPI_Allreduce(MPI_IN_PLACE, &loss, 1, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    if (rank == 0) printf("%d ranks, %llu steps: loss %.4f\n", size, (unsigned long long)steps, loss / (float)size);

    MPI_Finalize();
    free(parameters);
    free(gradients);
    return 0;
}
