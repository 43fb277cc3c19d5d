// mgpurun -n 2 ./train_mlp [STEPS [CHECKPOINTS]]: trains a small network, data-parallel.
//
// Every rank computes the gradients of its part of each batch; the reducer averages them over ranks; every rank makes the
// same update. With a folder for checkpoints the training resumes where it was stopped.
#include <mgpu.h>
#include <stdio.h>
#include <stdlib.h>

#include "mlp.h"

// Ends the rank with the text of the error; mgpurun then ends the others.
static void check(mgpu_status status) {
    if (status == MGPU_OK) return;
    fprintf(stderr, "train_mlp: %s\n", mgpu_last_error());
    exit(1);
}

typedef struct {
    const float *parameters;
    uint64_t first;
    int count;
    float loss;
} Batch;

static int32_t compute(void *context, mgpu_sink *sink, size_t micro_batch) {
    Batch *batch = context;
    float *gradients[4];
    (void)micro_batch;
    for (size_t tensor = 0; tensor < 4; tensor++)
        if (mgpu_sink_gradient(sink, tensor, &gradients[tensor]) != MGPU_OK) return 1;
    batch->loss = mlp_gradients(batch->parameters, batch->first, batch->count, gradients[0], gradients[1], gradients[2],
                                gradients[3]);
    for (size_t tensor = 4; tensor-- > 0;)
        if (mgpu_sink_ready(sink, tensor) != MGPU_OK) return 1;
    return 0;
}

static void save(mgpu_writer *writer, const mgpu_layout *layout, const float *parameters, uint64_t step) {
    mgpu_snapshot *snapshot;
    check(mgpu_snapshot_create(step, &snapshot));
    check(mgpu_snapshot_add(snapshot, "weights", layout, parameters, PARAMETERS));
    check(mgpu_writer_save(writer, snapshot));
    check(mgpu_writer_finish(writer));
}

int main(int argc, char **argv) {
    uint64_t steps = argc > 1 ? strtoull(argv[1], NULL, 10) : 100, step = 0, checksum;
    const char *folder = argc > 2 ? argv[2] : NULL;
    mgpu_world *world;
    mgpu_comm *comm;
    mgpu_layout *layout;
    mgpu_reducer *reducer;
    mgpu_writer *writer = NULL;
    mgpu_world_info info = {.struct_size = sizeof info};
    check(mgpu_init(&world));
    check(mgpu_world_get_info(world, &info));
    check(mgpu_comm_create(world, &comm));

    check(mgpu_layout_create(&layout));
    check(mgpu_layout_push(layout, "1.weight", (size_t[]){HIDDEN, INPUTS}, 2, NULL));
    check(mgpu_layout_push(layout, "1.bias", (size_t[]){HIDDEN}, 1, NULL));
    check(mgpu_layout_push(layout, "2.weight", (size_t[]){CLASSES, HIDDEN}, 2, NULL));
    check(mgpu_layout_push(layout, "2.bias", (size_t[]){CLASSES}, 1, NULL));
    float *parameters = malloc(PARAMETERS * sizeof *parameters);
    mlp_initialise(parameters, info.rank + 3); // Different on each rank: those of rank 0 are used.

    mgpu_checkpoint *checkpoint = NULL;
    if (folder) check(mgpu_checkpoint_find(folder, &checkpoint));
    if (checkpoint) {
        check(mgpu_checkpoint_step(checkpoint, &step));
        check(mgpu_checkpoint_load(checkpoint, "weights", layout, parameters, PARAMETERS));
        mgpu_checkpoint_free(checkpoint);
    }
    check(mgpu_replicate(comm, layout, parameters, PARAMETERS));
    check(mgpu_reducer_create(world, layout, NULL, &reducer));
    if (folder && info.rank == 0) check(mgpu_writer_create(folder, 2, &writer));

    float loss = 0;
    int part = BATCH / (int)info.size, stop = 0;
    for (; step < steps; step++) {
        check(mgpu_stop_requested(world, &stop));
        if (stop) break;
        check(mgpu_report_step(world, step + 1));
        Batch batch = {parameters, step * BATCH + info.rank * (uint64_t)part, part, 0};
        check(mgpu_reduce_gradients(reducer, compute, &batch));
        for (size_t tensor = 0, at = 0, count; tensor < 4; tensor++, at += count) {
            const float *gradient;
            check(mgpu_reducer_gradient(reducer, tensor, &gradient, &count));
            for (size_t i = 0; i < count; i++) parameters[at + i] -= 0.5f * gradient[i];
        }
        loss = batch.loss;
    }
    check(mgpu_all_reduce(comm, &loss, 1, MGPU_F32, MGPU_AVG));
    check(mgpu_verify_equal(comm, layout, parameters, PARAMETERS, &checksum));
    if (writer) save(writer, layout, parameters, step);
    if (info.rank == 0)
        printf("%u ranks, %llu steps: loss %.4f; weights %016llx on all\n", info.size, (unsigned long long)step, loss,
               (unsigned long long)checksum);

    mgpu_writer_free(writer);
    mgpu_reducer_free(reducer);
    mgpu_layout_free(layout);
    mgpu_comm_free(comm);
    mgpu_finalize(world);
    free(parameters);
    return stop ? MGPU_EXIT_STOPPED : 0;
}
