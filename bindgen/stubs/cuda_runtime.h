/* The minimum of the CUDA runtime that nccl.h needs to parse: the two handle types in its prototypes.
 * Both are pointers to opaque types. The runtime's version macro stays undefined on purpose, so that
 * nccl.h includes no further CUDA header. */
#ifndef NCCL_SYS_STUB_CUDA_RUNTIME_H
#define NCCL_SYS_STUB_CUDA_RUNTIME_H

#include <stddef.h>

typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;

#endif
