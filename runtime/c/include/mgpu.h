// mgpu: data-parallel training on several CPUs or GPUs. C interface.
//
// A program joins a run with mgpu_init, creates a communicator, and calls collective operations: all ranks call the same
// ones in the same order. Started by `mgpurun -n 8 ./program` it is one of 8 ranks; started alone it is a world of one.
//
// Errors. Every function that can fail returns MGPU_OK (0) or an error; mgpu_last_error has the text, for each thread, and
// mgpu_last_error_rank the rank at fault. After MGPU_ERROR_PEER_LOST, _TIMEOUT, _MISMATCH and _INTERRUPTED, communicators
// cannot be used any more: the program should end with a code other than 0. Invalid arguments change nothing.
//
// Handles. Results are written to the last arguments. A handle is freed once, by the function for its type, and not used
// afterwards; freeing null does nothing. After an error, a handle that should have been created is null. Handles may be
// used by several threads; operations of one communicator run one after the other, and their order must be the same on all
// ranks.
//
// Pointers. A pointer must refer to as many elements as the call says, aligned, and not used by others during the call; null
// is an error, except where there are no elements. Texts end with a zero byte and are UTF-8. What an operation on host memory
// reads and writes must stay valid until it has returned.
//
// Device memory. An address is one of the rank's GPU; a stream is a CUstream (which a cudaStream_t is) of the GPU's primary
// context, as CUDA's runtime uses it, and null is the default stream. Operations are enqueued on the stream: the memory
// stays allocated until they are done.
//
// Structs. The first field is the size of the struct as the program was compiled. Later versions append fields.
//
// Nothing here prints, ends the process, or handles a signal (but see mgpu_stop_requested and mgpu_interrupt_on_sigint).
// No function throws. Exceptions must not pass through a function of the program that the library calls.

#ifndef MGPU_H
#define MGPU_H

#include <stddef.h>
#include <stdint.h>

// The exit code of a program that was asked to stop and has saved its work.
#define MGPU_EXIT_STOPPED 74

// A checkpoint on the disk.
typedef struct mgpu_checkpoint mgpu_checkpoint;

// The ranks of a world, or of a group, for operations on host memory.
typedef struct mgpu_comm mgpu_comm;

#if defined(MGPU_CUDA)
// The ranks of a world, for operations on the memory of their GPUs.
typedef struct mgpu_device_comm mgpu_device_comm;
#endif

// Names and shapes of the tensors of a model, one after the other in one array of floats.
typedef struct mgpu_layout mgpu_layout;

// Averages gradients over ranks, in buckets.
typedef struct mgpu_reducer mgpu_reducer;

// Where the function of `mgpu_reduce_gradients` writes gradients. It exists during that call only, and is used by one
// thread at a time.
typedef struct mgpu_sink mgpu_sink;

// What a checkpoint will contain.
typedef struct mgpu_snapshot mgpu_snapshot;

// The run, as this rank sees it.
typedef struct mgpu_world mgpu_world;

// Writes checkpoints into a folder, on a thread.
typedef struct mgpu_writer mgpu_writer;

// The result of a call: `MGPU_OK` or one of the errors.
typedef int32_t mgpu_status;

// Type of elements: one of `MGPU_F32` … `MGPU_U8`.
typedef int32_t mgpu_element;

// Reduction over ranks: one of `MGPU_SUM` … `MGPU_PROD`.
typedef int32_t mgpu_operation;

// How gradients are averaged. Must be the same on all ranks. Fill it with `mgpu_reducer_config_init`, and then change
// what should differ from the default.
typedef struct {
    // `sizeof(mgpu_reducer_config)`.
    size_t struct_size;
    // Bytes of gradients that are reduced in one operation; 0 for the default.
    uint64_t bucket_bytes;
    // Largest norm of all averaged gradients together: longer ones are scaled down. 0: no limit.
    double clip_norm;
    // Number of micro-batches in each step: how often the function of `mgpu_reduce_gradients` is called.
    uint32_t micro_batches;
    // 1: reduce on a thread, while the function computes further gradients; useful if there is a free core.
    uint32_t overlap;
    // 1: the sum over ranks and micro-batches instead of the mean.
    uint32_t sum;
    // 1: gradients are sent as bfloat16, which halves the bytes.
    uint32_t bf16;
    // 1 (the default): an error names the rank and the tensor whose gradients are NaN or infinite.
    uint32_t check_finite;
    // 1: a tensor that was not marked ready counts as 0, instead of an error.
    uint32_t unused_is_zero;
} mgpu_reducer_config;

// Computes all gradients of a micro-batch: for each tensor it writes to the memory of `mgpu_sink_gradient`, and then calls
// `mgpu_sink_ready`. Returns 0, or another number if it has failed. No C++ exception may leave it.
typedef int32_t (*mgpu_compute)(void *context, mgpu_sink *sink, size_t micro_batch);

// Who this rank is.
typedef struct {
    // Set it to `sizeof(mgpu_world_info)` before the call.
    size_t struct_size;
    // Rank of this process, from 0.
    uint32_t rank;
    // Number of ranks.
    uint32_t size;
    // Rank among the ranks on this host.
    uint32_t local_rank;
    // Number of ranks on this host.
    uint32_t local_size;
    // How often the launcher has restarted the ranks.
    uint32_t restart_count;
    // Number of threads with which this rank should compute.
    uint32_t threads;
    // 1 if collectives run on GPUs through NCCL, 0 on CPUs.
    uint32_t uses_gpus;
    // 1 if a launcher has started this process, 0 if it is alone.
    uint32_t is_launched;
} mgpu_world_info;

// Phase of the work: one of `MGPU_PHASE_START` … `MGPU_PHASE_FINALISE`.
typedef int32_t mgpu_phase;

// Success.
#define MGPU_OK 0

// An argument is invalid: a null pointer, an unknown number, a length that does not fit.
#define MGPU_ERROR_ARGUMENT 1

// The environment variables do not describe a rank.
#define MGPU_ERROR_ENVIRONMENT 2

// The operating system refused something.
#define MGPU_ERROR_SYSTEM 3

// The rendezvous refused this rank, could not be reached, or did not serve it.
#define MGPU_ERROR_RENDEZVOUS 4

// Another rank did not arrive in time.
#define MGPU_ERROR_TIMEOUT 5

// Another rank has ended, or makes no progress.
#define MGPU_ERROR_PEER_LOST 6

// Ranks have called different operations, or with different arguments.
#define MGPU_ERROR_MISMATCH 7

// An earlier error has made the communicator unusable.
#define MGPU_ERROR_POISONED 8

// This process is a forked child of a rank.
#define MGPU_ERROR_FORKED 9

// The call was interrupted: see `mgpu_interrupt`.
#define MGPU_ERROR_INTERRUPTED 10

// Ranks have different layouts, settings or numbers of something.
#define MGPU_ERROR_DISAGREEMENT 11

// Ranks that should have equal weights do not.
#define MGPU_ERROR_DIVERGED 12

// Gradients are NaN or infinite. Another reduction may follow.
#define MGPU_ERROR_NOT_FINITE 13

// A function of the program has returned an error.
#define MGPU_ERROR_PROGRAM 14

// A GPU, its driver or one of NVIDIA's libraries is missing or has returned an error.
#define MGPU_ERROR_GPU 15

// A file of a checkpoint is damaged.
#define MGPU_ERROR_DAMAGED 16

// A checkpoint cannot be written or read.
#define MGPU_ERROR_CHECKPOINT 17

// An error of a kind that this version has no number for.
#define MGPU_ERROR_OTHER 98

// A defect of the library: it has panicked. The handles of the call cannot be used any more.
#define MGPU_ERROR_PANIC 99

// IEEE 754 binary32, `float`.
#define MGPU_F32 0

// IEEE 754 binary64, `double`.
#define MGPU_F64 1

// IEEE 754 binary16. Reductions accumulate in float and round once.
#define MGPU_F16 2

// bfloat16. Reductions accumulate in float and round once.
#define MGPU_BF16 3

// `int32_t`.
#define MGPU_I32 4

// `int64_t`.
#define MGPU_I64 5

// `uint8_t`.
#define MGPU_U8 6

// The sum.
#define MGPU_SUM 0

// The sum divided by the number of ranks.
#define MGPU_AVG 1

// The smallest; NaN if any is NaN.
#define MGPU_MIN 2

// The largest; NaN if any is NaN.
#define MGPU_MAX 3

// The product.
#define MGPU_PROD 4

// Before the first step.
#define MGPU_PHASE_START 0

// In a training step.
#define MGPU_PHASE_STEP 1

// Evaluating the model.
#define MGPU_PHASE_EVALUATION 2

// Writing or reading a checkpoint.
#define MGPU_PHASE_CHECKPOINT 3

// Ending.
#define MGPU_PHASE_FINALISE 4

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Creates an empty snapshot after `step` training steps.
mgpu_status mgpu_snapshot_create(uint64_t step, mgpu_snapshot **snapshot);

// Frees a snapshot that is not written. Null is ignored.
void mgpu_snapshot_free(mgpu_snapshot *snapshot);

// Adds a copy of `values`, which becomes the file `name`.safetensors with the tensors of `layout`. `count` is the number
// of elements of the layout.
mgpu_status mgpu_snapshot_add(mgpu_snapshot *snapshot,
                              const char *name,
                              const mgpu_layout *layout,
                              const float *values,
                              size_t count);

// Adds other state of the program, a text in JSON.
mgpu_status mgpu_snapshot_set_state(mgpu_snapshot *snapshot, const char *json);

// Prepares to write checkpoints into `folder`, which is created if it does not exist, and to keep the newest `keep`. Only
// one rank has a writer, usually rank 0.
mgpu_status mgpu_writer_create(const char *folder,
                               size_t keep,
                               mgpu_writer **writer);

// Waits for the write in flight, and frees the writer. Null is ignored. The error of that write is lost: call
// `mgpu_writer_finish` first.
void mgpu_writer_free(mgpu_writer *writer);

// Starts writing a snapshot, which it frees, also after an error. The error is that of the write before: this one is
// written nevertheless.
mgpu_status mgpu_writer_save(mgpu_writer *writer,
                             mgpu_snapshot *snapshot);

// Waits until the last snapshot is on the disk.
mgpu_status mgpu_writer_finish(mgpu_writer *writer);

// Opens the newest checkpoint in `folder` that is not damaged; null if there is none. All ranks may read it.
mgpu_status mgpu_checkpoint_find(const char *folder,
                                 mgpu_checkpoint **checkpoint);

// Closes a checkpoint. Null is ignored.
void mgpu_checkpoint_free(mgpu_checkpoint *checkpoint);

// The number of training steps after which it was saved.
mgpu_status mgpu_checkpoint_step(const mgpu_checkpoint *checkpoint, uint64_t *step);

// The state of `mgpu_snapshot_set_state` in JSON, or "null". Valid until the checkpoint is freed.
mgpu_status mgpu_checkpoint_state(const mgpu_checkpoint *checkpoint, const char **json);

// Its folder. Valid until the checkpoint is freed.
mgpu_status mgpu_checkpoint_path(const mgpu_checkpoint *checkpoint, const char **path);

// Reads what was added as `name` into `values`, which has `count` elements. The file must have exactly the tensors of
// `layout`.
mgpu_status mgpu_checkpoint_load(const mgpu_checkpoint *checkpoint,
                                 const char *name,
                                 const mgpu_layout *layout,
                                 float *values,
                                 size_t count);

// Returns once all ranks have called it.
mgpu_status mgpu_barrier(mgpu_comm *comm);

// Every rank's `data` becomes the reduction of all ranks'. Results have the same bits on all ranks and in every run: each
// element is reduced in the order of the ranks (on GPUs, in NCCL's order).
mgpu_status mgpu_all_reduce(mgpu_comm *comm,
                            void *data,
                            size_t count,
                            mgpu_element element,
                            mgpu_operation operation);

// The `data` of rank `root` becomes the reduction of all ranks'; that of the others is unchanged.
mgpu_status mgpu_reduce(mgpu_comm *comm,
                        void *data,
                        size_t count,
                        mgpu_element element,
                        mgpu_operation operation,
                        uint32_t root);

// `data` consists of one shard for each rank (`mgpu_shard`). Shard r of rank r becomes the reduction of all ranks' shards
// r; the other shards are unspecified afterwards.
mgpu_status mgpu_reduce_scatter(mgpu_comm *comm,
                                void *data,
                                size_t count,
                                mgpu_element element,
                                mgpu_operation operation);

// `data` consists of one shard for each rank (`mgpu_shard`). Shard r of every rank becomes that of rank r.
mgpu_status mgpu_all_gather(mgpu_comm *comm,
                            void *data,
                            size_t count,
                            mgpu_element element);

// As `mgpu_all_gather`, with parts of different lengths: part r has `counts[r]` elements, of `count` together. `counts`
// has one number for each rank, the same on all ranks.
mgpu_status mgpu_all_gather_v(mgpu_comm *comm,
                              void *data,
                              size_t count,
                              mgpu_element element,
                              const size_t *counts);

// Every rank's `data` becomes a copy of that of rank `root`.
mgpu_status mgpu_broadcast(mgpu_comm *comm,
                           void *data,
                           size_t count,
                           mgpu_element element,
                           uint32_t root);

// `data` consists of one shard for each rank (`mgpu_shard`). Shard r of rank `root` becomes that of rank r.
mgpu_status mgpu_gather(mgpu_comm *comm,
                        void *data,
                        size_t count,
                        mgpu_element element,
                        uint32_t root);

// `data` consists of one shard for each rank (`mgpu_shard`). Shard r of rank r becomes that of rank `root`.
mgpu_status mgpu_scatter(mgpu_comm *comm,
                         void *data,
                         size_t count,
                         mgpu_element element,
                         uint32_t root);

// `data` consists of one shard for each rank, all of the same length. Shard q of rank r becomes what shard r of rank q was.
mgpu_status mgpu_all_to_all(mgpu_comm *comm,
                            void *data,
                            size_t count,
                            mgpu_element element);

// Sends the next `send_counts[r]` elements of `send_data` to rank r, and receives the next `receive_counts[r]` elements of
// `receive_data` from it. Each array of counts has one number for each rank. The two memories do not overlap.
mgpu_status mgpu_all_to_all_v(mgpu_comm *comm,
                              const void *send_data,
                              const size_t *send_counts,
                              void *receive_data,
                              const size_t *receive_counts,
                              mgpu_element element);

// Sends `data` to rank `to`, which calls `mgpu_receive`. Messages between two ranks arrive in the order they were sent.
mgpu_status mgpu_send(mgpu_comm *comm,
                      const void *data,
                      size_t count,
                      mgpu_element element,
                      uint32_t to);

// Fills `data` with the next message of rank `from`, which has the same type and count.
mgpu_status mgpu_receive(mgpu_comm *comm,
                         void *data,
                         size_t count,
                         mgpu_element element,
                         uint32_t from);

// Frees a communicator. Null is ignored. Under NCCL all ranks free it, in the same order.
void mgpu_comm_free(mgpu_comm *comm);

// This rank, in the communicator.
mgpu_status mgpu_comm_rank(const mgpu_comm *comm, uint32_t *rank);

// Number of ranks.
mgpu_status mgpu_comm_size(const mgpu_comm *comm, uint32_t *size);

// The rank in the world of rank `rank` of the communicator. They differ in groups only.
mgpu_status mgpu_comm_world_rank(const mgpu_comm *comm, uint32_t rank, uint32_t *world_rank);

// Splits a communicator into groups: a communicator for the ranks that pass the same `colour`, in the order of their
// `key`s, and of their ranks where keys are equal. A rank with a negative colour is in no group: its `group` is null.
// Collective.
mgpu_status mgpu_comm_split(mgpu_comm *comm,
                            int64_t colour,
                            int32_t key,
                            mgpu_comm **group);

// Declares that other threads compute on the ranks' cores, so that waiting ranks yield their core early. All ranks call
// it.
mgpu_status mgpu_comm_set_oversubscribed(mgpu_comm *comm);

// Makes `parameters` equal on all ranks: checks that all have the same layout, broadcasts those of rank 0, and compares
// checksums. `count` is the number of elements, that of the layout. Collective.
mgpu_status mgpu_replicate(mgpu_comm *comm,
                           const mgpu_layout *layout,
                           float *parameters,
                           size_t count);

// Checks that all ranks have the same `parameters`, and returns their checksum. The error names the first rank and
// tensor that differ. Collective.
mgpu_status mgpu_verify_equal(mgpu_comm *comm,
                              const mgpu_layout *layout,
                              const float *parameters,
                              size_t count,
                              uint64_t *checksum);

// Where the shard of rank `rank` begins and ends, in elements, if `count` elements are divided among `ranks` ranks:
// ⌈count/ranks⌉ each, except that the last ones may be shorter or empty. ranks · ⌈count/ranks⌉ must fit in a `size_t`.
mgpu_status mgpu_shard(size_t count,
                       uint32_t ranks,
                       uint32_t rank,
                       size_t *begin,
                       size_t *end);

#if defined(MGPU_CUDA)
// Creates a communicator of all ranks for GPU memory. The run must use GPUs. Collective, in the same order as other
// communicators are created.
mgpu_status mgpu_device_comm_create(mgpu_world *world,
                                    mgpu_device_comm **comm);
#endif

#if defined(MGPU_CUDA)
// Frees a communicator, whose operations have ended (`mgpu_device_wait`). Collective, in the same order on all ranks.
// Null is ignored.
void mgpu_device_comm_free(mgpu_device_comm *comm);
#endif

#if defined(MGPU_CUDA)
// All-reduce: every rank's `to` becomes the reduction of all ranks' `from`. The two are the same, or do not overlap.
mgpu_status mgpu_device_all_reduce(mgpu_device_comm *comm,
                                   uint64_t from,
                                   uint64_t to,
                                   size_t count,
                                   mgpu_element element,
                                   mgpu_operation operation,
                                   void *stream);
#endif

#if defined(MGPU_CUDA)
// Reduce-scatter: `from` has `count` elements for each rank; `to` of rank r becomes the reduction of all ranks' shards r.
mgpu_status mgpu_device_reduce_scatter(mgpu_device_comm *comm,
                                       uint64_t from,
                                       uint64_t to,
                                       size_t count,
                                       mgpu_element element,
                                       mgpu_operation operation,
                                       void *stream);
#endif

#if defined(MGPU_CUDA)
// All-gather: `to` has `count` elements for each rank; shard r of every rank becomes `from` of rank r.
mgpu_status mgpu_device_all_gather(mgpu_device_comm *comm,
                                   uint64_t from,
                                   uint64_t to,
                                   size_t count,
                                   mgpu_element element,
                                   void *stream);
#endif

#if defined(MGPU_CUDA)
// Every rank's `data` becomes a copy of that of rank `root`.
mgpu_status mgpu_device_broadcast(mgpu_device_comm *comm,
                                  uint64_t data,
                                  size_t count,
                                  mgpu_element element,
                                  uint32_t root,
                                  void *stream);
#endif

#if defined(MGPU_CUDA)
// The `data` of rank `root` becomes the reduction of all ranks'; that of the others is unchanged.
mgpu_status mgpu_device_reduce(mgpu_device_comm *comm,
                               uint64_t data,
                               size_t count,
                               mgpu_element element,
                               mgpu_operation operation,
                               uint32_t root,
                               void *stream);
#endif

#if defined(MGPU_CUDA)
// Sends `data` to rank `to`, which enqueues `mgpu_device_receive` with the same type and count.
mgpu_status mgpu_device_send(mgpu_device_comm *comm,
                             uint64_t data,
                             size_t count,
                             mgpu_element element,
                             uint32_t to,
                             void *stream);
#endif

#if defined(MGPU_CUDA)
// Fills `data` with what rank `from` sends.
mgpu_status mgpu_device_receive(mgpu_device_comm *comm,
                                uint64_t data,
                                size_t count,
                                mgpu_element element,
                                uint32_t from,
                                void *stream);
#endif

#if defined(MGPU_CUDA)
// Waits until the GPU has done all work on `stream`. Fails if another rank fails, or if the work is not done within the
// world's timeout; waiting in another way, such as by `cudaStreamSynchronize`, would wait for ever then. `what` describes
// the work for errors, such as "the gradients of step 7".
mgpu_status mgpu_device_wait(mgpu_device_comm *comm,
                             void *stream,
                             const char *what);
#endif

// Ends the waits of all calls that are running: they return `MGPU_ERROR_INTERRUPTED` within 20 ms, and their
// communicators cannot be used any more. But `mgpu_init` waits on. May be called in signal handlers. A world of one waits for
// nobody.
void mgpu_interrupt(void);

// Makes SIGINT interrupt calls, before the handler that the program has installed for it runs: for interpreters, whose
// handlers only run after the call. Does nothing if the signal is ignored, ends the process, or has a handler that wants
// more than its number.
//
// An interpreter whose program installs another handler puts its own function back. So call this again before a call
// that may wait; it costs one system call. A handler that is neither this library's nor the one of the first call is
// left as it is.
mgpu_status mgpu_interrupt_on_sigint(void);

// Creates a layout without tensors.
mgpu_status mgpu_layout_create(mgpu_layout **layout);

// Frees a layout. Null is ignored.
void mgpu_layout_free(mgpu_layout *layout);

// Appends a tensor, whose number is `*tensor` (which may be null): 0 for the first. `shape` has `dimensions` extents,
// slowest first; a scalar has none.
mgpu_status mgpu_layout_push(mgpu_layout *layout,
                             const char *name,
                             const size_t *shape,
                             size_t dimensions,
                             size_t *tensor);

// Number of elements of all tensors.
mgpu_status mgpu_layout_count(const mgpu_layout *layout, size_t *count);

// Where tensor `tensor` begins and ends in the array, in elements.
mgpu_status mgpu_layout_range(const mgpu_layout *layout, size_t tensor, size_t *begin, size_t *end);

// Allocates `bytes` zeroed bytes that the other ranks access in place: operations on them are fastest. In an operation either
// all ranks pass the same part of the same allocation, or all pass memory of their own; anything else is a mismatch.
// Collective. At least one byte is allocated.
mgpu_status mgpu_allocate(mgpu_comm *comm,
                          size_t bytes,
                          void **data);

// Frees memory of `mgpu_allocate`. Not collective. Null is ignored. Memory that is not freed stays valid until the process
// ends, also after `mgpu_finalize`.
mgpu_status mgpu_free(void *data);

// Sets all fields of a configuration to their defaults. `struct_size` is `sizeof(mgpu_reducer_config)`.
mgpu_status mgpu_reducer_config_init(mgpu_reducer_config *config,
                                     size_t struct_size);

// Creates a reducer for the tensors of `layout`. `config` may be null: the defaults. It copies both. Collective, in the
// same order as communicators are created.
mgpu_status mgpu_reducer_create(mgpu_world *world,
                                const mgpu_layout *layout,
                                const mgpu_reducer_config *config,
                                mgpu_reducer **reducer);

// Frees a reducer. Null is ignored.
void mgpu_reducer_free(mgpu_reducer *reducer);

// Averages gradients over ranks and micro-batches. Calls `compute` with `context` once for each micro-batch. Collective.
// After `MGPU_ERROR_NOT_FINITE` another call may follow.
mgpu_status mgpu_reduce_gradients(mgpu_reducer *reducer,
                                  mgpu_compute compute,
                                  void *context);

// The memory for the gradient of `tensor`, as the mean over this rank's micro-batch. It contains old values. Valid until
// the tensor is marked ready; an error afterwards, because its bucket may be on its way.
mgpu_status mgpu_sink_gradient(mgpu_sink *handle,
                               size_t tensor,
                               float **gradient);

// Marks the gradient of `tensor` ready: its bucket may be reduced now. Once per tensor and micro-batch.
mgpu_status mgpu_sink_ready(mgpu_sink *handle,
                            size_t tensor);

// The averaged gradient of `tensor`: `count` elements, valid until the next reduction.
mgpu_status mgpu_reducer_gradient(mgpu_reducer *reducer,
                                  size_t tensor,
                                  const float **gradient,
                                  size_t *count);

// The norm of the last averaged gradients before clipping; -1 without clipping, or before the first reduction.
mgpu_status mgpu_reducer_gradient_norm(const mgpu_reducer *reducer,
                                       double *norm);

// The text of the last call of this thread that failed; empty before. It says what happened to which rank. Valid until
// the next call of this thread fails, or the thread ends.
const char *mgpu_last_error(void);

// The rank that the last failed call of this thread names as the cause, or -1.
int64_t mgpu_last_error_rank(void);

// The version of the library, such as "0.1.0".
const char *mgpu_version(void);

// Joins the run that the environment describes, under mgpurun, torchrun, mpirun or srun; without a launcher, a world of
// one. Returns when all ranks have joined.
mgpu_status mgpu_init(mgpu_world **world);

// Leaves the run, once all communicators, reducers and the world are freed, in any order. Null is ignored.
void mgpu_finalize(mgpu_world *world);

// Fills `info`.
mgpu_status mgpu_world_get_info(const mgpu_world *world, mgpu_world_info *info);

// The notice with number `index`, from 0: a sentence without a full stop that the user should know, for instance that the
// ranks have set a variable of NCCL. Null after the last one. Notices are the same on all ranks, so that one of them can
// print them. Valid until the world is freed.
mgpu_status mgpu_world_notice(const mgpu_world *world,
                              size_t index,
                              const char **notice);

// Sets how long communicators that are created afterwards wait for another rank that makes no progress.
mgpu_status mgpu_world_set_timeout(mgpu_world *world,
                                   double seconds);

// Tells the launcher that training step `step` (from 1) begins.
mgpu_status mgpu_report_step(const mgpu_world *world, uint64_t step);

// Tells the launcher that this rank has processed `samples` more.
mgpu_status mgpu_report_samples(const mgpu_world *world, uint64_t samples);

// Tells the launcher that another phase of the work begins, which may take long without a step.
mgpu_status mgpu_report_phase(const mgpu_world *world, mgpu_phase number);

// Whether the ranks should save their work and exit with `MGPU_EXIT_STOPPED`: 1 or 0. All ranks ask equally often, for
// instance before each step; the n-th call gives the same on all of them. From the first call on, this process handles
// SIGTERM, SIGINT and SIGUSR1, except those that it handles or ignores already.
mgpu_status mgpu_stop_requested(const mgpu_world *world,
                                int32_t *stop);

// Asks all ranks to stop. They learn it when all of them next call `mgpu_stop_requested`.
mgpu_status mgpu_request_stop(const mgpu_world *world);

// Creates a communicator of all ranks for host memory. Collective: all ranks call it equally often, in the same order as
// they create their reducers.
mgpu_status mgpu_comm_create(mgpu_world *world,
                             mgpu_comm **comm);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* MGPU_H */
